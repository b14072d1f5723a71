//! The desk alone, with streams that answer as the test says.

use std::collections::BTreeSet;

use bytes::Bytes;
use limb_common::assignment::SetNumber;
use limb_common::manifest::Inode;
use proptest::prelude::*;

use super::*;
use crate::fetch::ChunkAddress;

const MS: Duration = Duration::from_millis(1);
const LEN: u32 = 1 << 20;

/// A desk with lanes, and what their streams were asked and have not sent.
struct Rig {
    desk: Desk,
    now: Duration,
    streams: Vec<Vec<v1::FetchRequest>>,
    credit: Vec<u64>,
    answers: Vec<(u64, oneshot::Receiver<Answer>)>,
}

impl Rig {
    fn new(lanes: usize) -> Self {
        let mut rig = Self {
            desk: Desk::default(),
            now: MS,
            streams: vec![Vec::new(); lanes],
            credit: vec![0; lanes],
            answers: Vec::new(),
        };
        for lane in 0..lanes {
            assert_eq!(rig.desk.add_lane(), lane);
            rig.desk.opened(lane, rig.now);
            rig.desk.answered(lane, rig.now);
        }
        rig.desk.round_trip(rig.now, 40 * MS);
        rig
    }

    fn ask(&mut self, number: u64, priority: Priority) {
        let (tell, told) = oneshot::channel();
        let address = ChunkAddress::Set { set: SetNumber(0), inode: Inode(1), index: number };
        let wanted = Wanted { body: Body::Chunk { address, len: LEN }, priority };
        self.desk.take(Command::Ask { number, wanted, tell });
        self.answers.push((number, told));
    }

    fn deal(&mut self) {
        self.desk.deal(self.now);
        for lane in 0..self.streams.len() {
            let Some(outbox) = self.desk.outbox(lane) else { continue };
            for request in outbox.drain(..) {
                match request.what {
                    Some(What::Credit(bytes)) => self.credit[lane] = self.credit[lane].max(bytes),
                    Some(What::Cancel(true)) => self.streams[lane].retain(|open| open.id != request.id),
                    Some(What::Raise(true)) => {
                        for open in self.streams[lane].iter_mut().filter(|open| open.id == request.id) {
                            open.priority = request.priority;
                        }
                    }
                    _ => self.streams[lane].push(request),
                }
            }
        }
    }

    /// The stream answers its most urgent request whole, in this time.
    fn answer(&mut self, lane: usize, took: Duration) -> bool {
        let best = self.streams[lane].iter().enumerate().min_by_key(|(at, open)| (open.priority, *at));
        let Some(at) = best.map(|(at, _)| at) else { return false };
        let open = self.streams[lane].remove(at);
        let counted = open.priority > 0;
        for piece in 0..4 {
            self.now += took / 4;
            let data = Bytes::from(vec![0; LEN as usize / 4]);
            let body = Some(v1::fetch_piece::Body::Data(data));
            let (id, last) = (open.id, piece == 3);
            let piece = v1::FetchPiece { id, body, last, counted, ..v1::FetchPiece::default() };
            self.desk.piece(lane, piece, self.now);
        }
        self.deal();
        true
    }

    fn answered(&mut self) -> Vec<u64> {
        let done = |(number, told): &mut (u64, oneshot::Receiver<Answer>)| {
            told.try_recv().ok().map(|answer| {
                assert_eq!(answer.unwrap().bytes.len(), LEN as usize);
                *number
            })
        };
        self.answers.iter_mut().filter_map(done).collect()
    }
}

/// The stream is never silent, so nothing but the ask itself can tell.
#[test]
fn what_home_lost_on_a_busy_stream_is_asked_for_once_more() {
    let mut rig = Rig::new(1);
    rig.ask(1, Priority::Demand);
    rig.deal();
    let lost = rig.streams[0].pop().unwrap();
    let end = rig.now + 30_000 * MS;
    let mut said = 0;
    for number in 2.. {
        rig.ask(number, Priority::Demand);
        rig.deal();
        // Only the latest of those that ask once more stays, and that is lost twice too.
        if rig.streams[0].iter().any(|open| open.what == lost.what) {
            said += 1;
            if said == 3 {
                break;
            }
            rig.streams[0].retain(|open| open.what != lost.what);
        }
        assert!(rig.answer(0, 400 * MS), "the stream goes on");
        rig.desk.sweep(rig.now, 5_000 * MS);
        assert!(rig.now < end, "asked {said} times more");
    }
    while rig.answer(0, 8 * MS) {}
    assert!(rig.answered().contains(&1));
    assert!(rig.desk.asks.is_empty() && rig.desk.lanes[0].by_id.is_empty());
    assert_eq!(rig.desk.lanes[0].owed_bytes, 0);
}

#[test]
fn a_lane_that_became_slow_is_given_less() {
    let mut rig = Rig::new(2);
    for number in 0..200 {
        rig.ask(number, Priority::ReadAhead);
    }
    rig.deal();
    let mut counts = [0; 2];
    for turn in 0..120 {
        // Lane 1 needs ten times as long.
        let lane = usize::from(turn % 11 == 10);
        counts[lane] += u32::from(rig.answer(lane, if lane == 0 { 8 * MS } else { 40 * MS }));
    }
    assert!(rig.streams[1].len() < rig.streams[0].len(), "{:?}", rig.streams);
    assert!(counts[0] > 5 * counts[1], "{counts:?}");
}

/// A reader in order would wait for it while what the others brought lies there.
#[test]
fn a_new_lane_begins_with_what_is_wanted_last_and_only_when_home_took_it() {
    let mut rig = Rig::new(2);
    for number in 0..60 {
        rig.ask(number, Priority::ReadAhead);
    }
    rig.deal();
    for _ in 0..10 {
        rig.answer(0, 4 * MS);
        rig.answer(1, 4 * MS);
    }
    assert_eq!(rig.desk.add_lane(), 2);
    rig.streams.push(Vec::new());
    rig.credit.push(0);
    rig.desk.opened(2, rig.now);
    rig.deal();
    assert_eq!(rig.streams[2], []);
    rig.desk.answered(2, rig.now);
    rig.deal();
    let Some(What::SetChunk(chunk)) = &rig.streams[2][0].what else { panic!("{:?}", rig.streams[2]) };
    assert_eq!((chunk.index, rig.streams[2].len()), (59, 1));
}

#[test]
fn who_waits_for_a_slow_lane_is_helped_by_an_idle_one_and_the_first_answer_counts() {
    let mut rig = Rig::new(2);
    // Both prove themselves.
    for number in 0..8 {
        rig.ask(number, Priority::Demand);
    }
    rig.deal();
    while rig.answer(0, 8 * MS) || rig.answer(1, 8 * MS) {}
    rig.ask(100, Priority::Demand);
    rig.deal();
    let slow = rig.streams.iter().position(|open| !open.is_empty()).unwrap();
    rig.now += 100 * MS;
    rig.deal();
    assert!(rig.streams[1 - slow].is_empty(), "too early");
    rig.now += 10_000 * MS;
    rig.deal();
    assert_eq!(rig.streams[1 - slow].len(), 1);
    assert!(rig.answer(1 - slow, 8 * MS));
    assert!(rig.answered().contains(&100));
    assert!(rig.streams[slow].is_empty(), "it was not taken back");
    assert_eq!(rig.desk.lanes.iter().map(|lane| lane.owed_bytes).sum::<u64>(), 0);
}

#[test]
fn a_cut_lane_owes_nothing_and_what_it_owed_is_asked_elsewhere_in_order() {
    let mut rig = Rig::new(2);
    for number in 0..4 {
        rig.ask(number, Priority::ReadAhead);
    }
    rig.ask(9, Priority::Demand);
    rig.deal();
    rig.streams[0].clear();
    rig.desk.cut(0);
    while rig.answer(1, 8 * MS) {}
    assert_eq!(rig.answered(), [0, 1, 2, 3, 9]);
}

proptest! {
    /// Whatever is asked, raised, dropped, answered and cut: every ask that is still wanted is
    /// answered once the lanes are back, and nothing is owed then.
    #[test]
    fn nothing_is_forgotten(steps in proptest::collection::vec((0_u8..7, 0_usize..3, 0_u64..40), 1..200)) {
        let mut rig = Rig::new(3);
        let (mut asked, mut dropped) = (BTreeSet::new(), BTreeSet::new());
        for (what, lane, number) in steps {
            match what {
                0 | 1 => {
                    if asked.insert(number) {
                        let urgent = if what == 0 { Priority::Demand } else { Priority::ReadAhead };
                        rig.ask(number, urgent);
                    }
                }
                2 => rig.desk.take(Command::Raise { number, priority: Priority::Demand }),
                3 => {
                    if asked.contains(&number) && dropped.insert(number) {
                        rig.answers.retain(|(other, _)| *other != number);
                        rig.desk.take(Command::Cancel { number });
                    }
                }
                4 => {
                    rig.streams[lane].clear();
                    rig.desk.cut(lane);
                }
                5 => {
                    rig.streams[lane].clear();
                    rig.desk.cut(lane);
                    rig.desk.opened(lane, rig.now);
                }
                _ => drop(rig.answer(lane, 10 * MS)),
            }
            rig.now += 7 * MS;
            rig.desk.sweep(rig.now, 10_000 * MS);
            rig.deal();
        }
        for lane in 0..3 {
            if rig.desk.outbox(lane).is_none() {
                rig.desk.opened(lane, rig.now);
            }
        }
        rig.deal();
        while (0..3).any(|lane| rig.answer(lane, MS)) {}
        let left: Vec<_> = rig.desk.asks.keys().collect();
        prop_assert!(left.is_empty(), "{left:?}");
        prop_assert!(rig.desk.lanes.iter().all(|lane| lane.owed_bytes == 0 && lane.by_id.is_empty()));
    }
}
