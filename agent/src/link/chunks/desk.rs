//! Everything outstanding, which stream it was asked on, and what must be said to home about it.
//! No I/O: the pool's task feeds it and sends what lies in each lane's outbox.
//!
//! A lane is one stream on a connection of its own. An ask waits here until a lane has room for
//! it, so that a lane that became slow gets less; demand never waits for room.
//!
//! Invariant: an ask is waiting, or was said once, or, where nothing came of it under demand, twice;
//! the first answer counts.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use bytes::BytesMut;
use limb_common::id::Digest;
use limb_common::wire::{self, MAX_PACK_FILES};
use limb_proto::v1;
use limb_proto::v1::fetch_request::What;
use tokio::sync::oneshot;

use super::meter::{LaneRate, Meter};
use super::thinning::Thinning;
use super::{Answer, Arrived, Body, Command, MAX_LANES, Wanted};
use crate::fetch::{Priority, TransportError};

/// A lane for so much of the window (twice what the link holds). One stock TCP stream carries about
/// 3 MiB (4 MiB of send buffer, with its overhead): 62 % of 1 Gbit/s at 40 ms. More lanes than are
/// needed would each be idle at times, and TCP begins anew after a pause.
const LANE_BYTES: u64 = 3 << 20;
/// One that falls silent has a neighbour.
const LEAST_LANES: usize = 2;
/// A lane is given what it sends in two round trips and this time, and one chunk: home has the next
/// at hand, and a lane that became slow does not hold what others could bring.
const SPARE_TIME: Duration = Duration::from_millis(50);
const SPARE_BYTES: u64 = 1 << 20;
/// Tiny chunks: bytes alone would allow thousands.
const MAX_ON_LANE: usize = 1024;
/// Even one piece of the smallest size must get through.
const LEAST_CREDIT_BYTES: u64 = 64 << 10;
/// A lane so silent under demand is asked no more than it was; another is.
const HEDGE_AFTER: Duration = Duration::from_secs(1);
/// Values that prove one run of groups; twelve are enough for any.
const MAX_PROOF: usize = 64;
const PRIORITIES: usize = 4;

#[derive(Debug, Default)]
pub(super) struct Desk {
    /// By the number that the asker chose.
    asks: BTreeMap<u64, Open>,
    /// On no lane, by priority. Numbers of asks that are gone, given or risen are skipped.
    waiting: [VecDeque<u64>; PRIORITIES],
    lanes: Vec<Lane>,
    meter: Meter,
    thinning: Thinning,
}

#[derive(Debug)]
struct Open {
    wanted: Wanted,
    tell: oneshot::Sender<Answer>,
    /// At most two.
    sent: Vec<Sent>,
}

/// An ask as one lane knows it.
#[derive(Debug)]
struct Sent {
    lane: usize,
    id: u64,
    at: Duration,
    /// The last piece of it.
    heard_at: Duration,
    /// On the wire.
    expected_bytes: u64,
    arrived_bytes: u64,
    /// Of the first piece.
    encoding: Option<i32>,
    got: BytesMut,
    missing: Vec<v1::MissingFile>,
    proof: Vec<Digest>,
}

#[derive(Debug)]
struct Lane {
    up: bool,
    /// Home has taken the stream; before, what is asked travels with its opening.
    answered: bool,
    /// From the stream's own ids. Ids of cancelled asks are absent: their pieces are ignored.
    by_id: HashMap<u64, u64>,
    last_id: u64,
    outbox: VecDeque<v1::FetchRequest>,
    /// Expected on the wire.
    owed_bytes: u64,
    /// Against the credit.
    counted_bytes: u64,
    credit_bytes: u64,
    /// The last piece, or since when something is outstanding.
    active_at: Duration,
    rate: LaneRate,
}

impl Desk {
    /// One more lane; it is down until [`Desk::opened`].
    pub(super) fn add_lane(&mut self) -> usize {
        self.lanes.push(Lane::new(false, Duration::ZERO));
        self.lanes.len() - 1
    }

    pub(super) fn outbox(&mut self, lane: usize) -> Option<&mut VecDeque<v1::FetchRequest>> {
        self.lanes.get_mut(lane).filter(|lane| lane.up).map(|lane| &mut lane.outbox)
    }

    /// For the log.
    pub(super) fn describe(&self) -> impl std::fmt::Debug + use<> {
        let owed: Vec<_> = self.lanes.iter().map(|lane| lane.owed_bytes >> 10).collect();
        let waiting: Vec<_> = self.waiting.iter().map(VecDeque::len).collect();
        (self.meter.describe(), owed, waiting)
    }

    pub(super) fn bandwidth_delay_bytes(&self) -> Option<u64> {
        // Whoever reads ahead counts plain bytes.
        self.meter.bandwidth_delay_bytes().map(|bytes| self.thinning.plain(bytes))
    }

    pub(super) fn round_trip(&mut self, now: Duration, took: Duration) {
        self.meter.round_trip(now, took);
    }

    /// A stream begins; what is given to it travels with its opening.
    pub(super) fn opened(&mut self, number: usize, now: Duration) {
        if let Some(lane) = self.lanes.get_mut(number) {
            *lane = Lane::new(true, now);
        }
    }

    /// Home answered the opening: only from now on can pieces come.
    pub(super) fn answered(&mut self, number: usize, now: Duration) {
        if let Some(lane) = self.lanes.get_mut(number) {
            lane.answered = true;
            lane.active_at = now;
            lane.rate.begins(now);
        }
    }

    /// The stream is over: what it owed is to be asked again, in the order of asking.
    pub(super) fn cut(&mut self, number: usize) {
        if let Some(lane) = self.lanes.get_mut(number) {
            *lane = Lane::new(false, Duration::ZERO);
        }
        for (ask, open) in self.asks.iter_mut().rev() {
            let before = open.sent.len();
            open.sent.retain(|sent| sent.lane != number);
            if open.sent.is_empty() && before > 0 {
                self.waiting[open.wanted.priority as usize].push_front(*ask);
            }
        }
    }

    pub(super) fn take(&mut self, command: Command) {
        match command {
            Command::Ask { number, wanted, tell } => {
                self.waiting[wanted.priority as usize].push_back(number);
                self.asks.insert(number, Open { wanted, tell, sent: Vec::new() });
            }
            Command::Raise { number, priority } => {
                let Some(open) = self.asks.get_mut(&number) else { return };
                open.wanted.priority = priority;
                if open.sent.is_empty() {
                    self.waiting[priority as usize].push_back(number);
                }
                for sent in &open.sent {
                    if let Some(lane) = self.lanes.get_mut(sent.lane) {
                        let what = Some(What::Raise(true));
                        lane.say(v1::FetchRequest {
                            id: sent.id,
                            what,
                            priority: priority as u32,
                            encoded: false,
                        });
                    }
                }
            }
            Command::Cancel { number } => {
                if let Some(open) = self.asks.remove(&number) {
                    self.take_back(&open, None);
                }
            }
        }
    }

    /// Gives what waits to lanes with room, and credit to those that use it up.
    pub(super) fn deal(&mut self, now: Duration) {
        while let Some(number) = self.next_waiting(Priority::Demand, false) {
            let Some((lane, _)) = self.soonest_lane(now, false) else { break };
            self.take_waiting(Priority::Demand, false);
            self.give(number, lane, now);
        }
        for priority in [Priority::ReadAhead, Priority::Trace, Priority::Background] {
            while let Some((lane, late)) = self.soonest_lane(now, true) {
                let Some(number) = self.next_waiting(priority, late) else { break };
                self.take_waiting(priority, late);
                self.give(number, lane, now);
            }
        }
        self.help_the_slow(now);
        let (window, in_use) = (self.lane_window(), self.lanes_in_use());
        for (number, lane) in self.lanes.iter_mut().enumerate() {
            if lane.up && !lane.by_id.is_empty() {
                // One too many, of a time when the link seemed to hold more, only ends what it has.
                lane.give_credit(if number < in_use { window } else { LEAST_CREDIT_BYTES });
            }
        }
    }

    /// The ask of this priority that has waited longest and is still one and on no lane; or that is
    /// wanted last.
    fn next_waiting(&mut self, priority: Priority, last: bool) -> Option<u64> {
        let queue = &mut self.waiting[priority as usize];
        while let Some(number) = if last { queue.back() } else { queue.front() } {
            let valid = |open: &Open| open.sent.is_empty() && open.wanted.priority == priority;
            if self.asks.get(number).is_some_and(valid) {
                return Some(*number);
            }
            if last {
                queue.pop_back()
            } else {
                queue.pop_front()
            };
        }
        None
    }

    fn take_waiting(&mut self, priority: Priority, last: bool) {
        let queue = &mut self.waiting[priority as usize];
        if last {
            queue.pop_back()
        } else {
            queue.pop_front()
        };
    }

    /// The lane in use that would have sent one chunk more first; with room for more, if asked so.
    /// And whether it is so late that it should bring what is wanted last: who reads in order would
    /// wait for a new connection while all others have nothing to do.
    fn soonest_lane(&self, now: Duration, with_room: bool) -> Option<(usize, bool)> {
        let round_trip = self.meter.least_round_trip().unwrap_or_default();
        let time = round_trip * 2 + SPARE_TIME;
        let has_room = |lane: &Lane, ahead: u64| {
            !with_room
                || (lane.by_id.len() < MAX_ON_LANE
                    && lane.owed_bytes + SPARE_BYTES / 2 < ahead.max(SPARE_BYTES))
        };
        let answered = self.lanes.iter().any(|lane| lane.up && lane.answered);
        let up = self.lanes.iter().enumerate().filter(|(_, lane)| lane.up && lane.answered >= answered);
        let mut least = u64::MAX;
        let mut soonest = None;
        for (number, lane) in up.take(self.lanes_in_use()) {
            let ahead = lane.bytes_in(now, time);
            // In units of what it sends in that time.
            let load = ((lane.owed_bytes + SPARE_BYTES) << 10) / ahead.max(1);
            least = least.min(load);
            if has_room(lane, ahead) && soonest.is_none_or(|(best, _)| load < best) {
                soonest = Some((load, number));
            }
        }
        soonest.map(|(load, number)| (number, load > least.saturating_add(least / 2)))
    }

    /// Somebody waits for what a slow lane owes, and the fastest would bring it in two thirds of the
    /// time, demand going before all else: it is asked too.
    fn help_the_slow(&mut self, now: Duration) {
        let round_trip = self.meter.least_round_trip().unwrap_or_default();
        let second = Duration::from_secs(1);
        let rates: Vec<_> = self.lanes.iter().map(|lane| lane.bytes_in(now, second).max(1)).collect();
        let up = self.lanes.iter().zip(&rates).enumerate().filter(|(_, (lane, _))| lane.up && lane.answered);
        let Some((helper, (_, &rate))) = up.max_by_key(|(_, (_, rate))| **rate) else { return };
        let time = |bytes: u64, rate: u64| Duration::from_micros(bytes.saturating_mul(1_000_000) / rate);
        let slowest = self
            .asks
            .iter()
            .filter(|(_, open)| open.wanted.priority == Priority::Demand)
            .filter_map(|(number, open)| {
                let [only] = open.sent.as_slice() else { return None };
                let len = open.wanted.body.len();
                let left = time(len.saturating_sub(only.arrived_bytes), *rates.get(only.lane)?);
                let again = (round_trip + time(len, rate) + SPARE_TIME) * 3 / 2;
                let late = only.lane != helper && left > again && now.saturating_sub(only.at) > again;
                late.then_some((left, *number))
            })
            .max();
        if let Some((_, number)) = slowest {
            self.give(number, helper, now);
        }
    }

    fn lanes_in_use(&self) -> usize {
        let lanes = self.meter.hoped_bytes().div_ceil(LANE_BYTES);
        usize::try_from(lanes).unwrap_or(MAX_LANES).clamp(1, MAX_LANES)
    }

    /// What one lane may have on its way. Half of all, also where there are more than two: not every
    /// lane has something to send at every moment, and those that have must fill the link.
    fn lane_window(&self) -> u64 {
        let up = self.lanes.iter().take(self.lanes_in_use()).filter(|lane| lane.up).count();
        (self.meter.window_bytes() / (up.clamp(1, 2) as u64)).max(LEAST_CREDIT_BYTES)
    }

    fn give(&mut self, number: u64, lane_number: usize, now: Duration) {
        let Some(open) = self.asks.get_mut(&number) else { return };
        let Some(lane) = self.lanes.get_mut(lane_number) else { return };
        if lane.by_id.is_empty() {
            lane.active_at = now;
            lane.rate.begins(now);
        }
        lane.last_id += 1;
        let id = lane.last_id;
        lane.by_id.insert(id, number);
        let body = &open.wanted.body;
        let encoded = body.may_be_encoded() && self.meter.is_scarce();
        let expected_bytes = if encoded { self.thinning.wire(body.len()) } else { body.len() };
        lane.owed_bytes += expected_bytes;
        let priority = open.wanted.priority as u32;
        lane.say(v1::FetchRequest { id, what: Some(body.message()), priority, encoded });
        open.sent.push(Sent::new(lane_number, id, now, expected_bytes));
    }

    /// Takes an ask back from its lanes, but not what is `answered` (lane and id), of which nothing
    /// is left to send.
    fn take_back(&mut self, open: &Open, answered: Option<(usize, u64)>) {
        for sent in &open.sent {
            let Some(lane) = self.lanes.get_mut(sent.lane) else { continue };
            lane.forget(sent);
            if answered != Some((sent.lane, sent.id)) {
                lane.cancel(sent.id);
            }
        }
    }

    pub(super) fn piece(&mut self, lane_number: usize, piece: v1::FetchPiece, now: Duration) {
        let Some(lane) = self.lanes.get_mut(lane_number) else { return };
        lane.active_at = now;
        let arrived = match &piece.body {
            Some(v1::fetch_piece::Body::Data(data)) => data.len() as u64,
            Some(v1::fetch_piece::Body::Failure(_)) | None => 0,
        };
        lane.rate.received(now, arrived);
        if piece.counted {
            lane.counted_bytes += arrived;
        }
        let id = piece.id;
        let number = lane.by_id.get(&id).copied();
        let own = |sent: &&mut Sent| sent.lane == lane_number && sent.id == piece.id;
        let sent = number.and_then(|number| self.asks.get_mut(&number)?.sent.iter_mut().find(own));
        if let Some(sent) = sent {
            let before = sent.left_bytes();
            sent.arrived_bytes += arrived;
            sent.heard_at = now;
            lane.owed_bytes = lane.owed_bytes.saturating_sub(before - sent.left_bytes());
        }
        let owed = self.lanes.iter().map(|lane| lane.owed_bytes).sum();
        self.meter.received(now, arrived, owed);
        let Some((number, open)) = number.and_then(|number| Some((number, self.asks.get_mut(&number)?)))
        else {
            return;
        };
        let Some(sent) = open.sent.iter_mut().find(|sent| sent.lane == lane_number && sent.id == piece.id)
        else {
            return;
        };
        if sent.arrived_bytes == arrived && open.wanted.priority == Priority::Demand {
            self.meter.round_trip(now, now.saturating_sub(sent.at));
        }
        let (last, wire_bytes) = (piece.last, sent.arrived_bytes);
        if let Some(answer) = sent.add(piece, &open.wanted.body) {
            if answer.is_ok() && open.wanted.body.may_be_encoded() {
                self.thinning.add(open.wanted.body.len(), wire_bytes);
            }
            let Some(open) = self.asks.remove(&number) else { return };
            // A garbled answer may go on.
            self.take_back(&open, last.then_some((lane_number, id)));
            // The asker may be gone since.
            let _gone: Result<(), _> = open.tell.send(answer);
        }
    }

    /// Forgets what nobody waits for, and asks once more for what somebody waits for and a silent
    /// lane owes, or one that goes on but said nothing of it for `patience`.
    pub(super) fn sweep(&mut self, now: Duration, patience: Duration) {
        let gone = |open: &Open| open.tell.is_closed();
        let gone: Vec<_> =
            self.asks.iter().filter(|(_, open)| gone(open)).map(|(number, _)| *number).collect();
        for number in gone {
            self.take(Command::Cancel { number });
        }
        let silent: Vec<_> = self.silent_lanes(now, HEDGE_AFTER).collect();
        let stuck = |open: &Open| {
            open.wanted.priority == Priority::Demand
                && matches!(open.sent.as_slice(), [only] if silent.contains(&only.lane))
        };
        let stuck: Vec<_> =
            self.asks.iter().filter(|(_, open)| stuck(open)).map(|(number, _)| *number).collect();
        for number in stuck {
            let other = self
                .lanes
                .iter()
                .enumerate()
                .filter(|(at, lane)| lane.up && !silent.contains(at))
                .min_by_key(|(_, lane)| lane.owed_bytes);
            let Some((other, _)) = other else { return };
            tracing::debug!(number, other, "a lane is silent; asking on another");
            self.give(number, other, now);
        }
        let lost = |open: &Open| {
            let silent = |sent: &Sent| now.saturating_sub(sent.heard_at) > patience;
            open.wanted.priority == Priority::Demand && !open.sent.is_empty() && open.sent.iter().all(silent)
        };
        let lost: Vec<_> =
            self.asks.iter().filter(|(_, open)| lost(open)).map(|(number, _)| *number).collect();
        for number in lost {
            self.ask_anew(number, now);
        }
    }

    /// Home may have lost the ask. The first stays as it is: it may only wait for its turn there.
    fn ask_anew(&mut self, number: u64, now: Duration) {
        let Some((lane, _)) = self.soonest_lane(now, false) else { return };
        tracing::debug!(number, lane, "nothing came of an ask; asking once more");
        let second = self.asks.get_mut(&number).and_then(|open| open.sent.drain(1..).next());
        if let Some(sent) = second
            && let Some(lane) = self.lanes.get_mut(sent.lane)
        {
            lane.forget(&sent);
            lane.cancel(sent.id);
        }
        self.give(number, lane, now);
    }

    /// Lanes on which nothing has come for `patience` although something should.
    pub(super) fn silent_lanes(
        &self,
        now: Duration,
        patience: Duration,
    ) -> impl Iterator<Item = usize> + use<'_> {
        let silent = move |lane: &Lane| {
            lane.up && !lane.by_id.is_empty() && now.saturating_sub(lane.active_at) > patience
        };
        self.lanes.iter().enumerate().filter(move |(_, lane)| silent(lane)).map(|(number, _)| number)
    }

    /// One more connection would help now: the link holds more than these can carry and there is
    /// something to ask. As many as it may hold are made before it is known: each takes three round
    /// trips, and begins slowly.
    pub(super) fn wants_lane(&self) -> bool {
        let open = self.lanes.len();
        let waits = || self.waiting[1..].iter().any(|queue| !queue.is_empty());
        open < LEAST_LANES || (open < self.lanes_in_use() && (!self.meter.is_settled() || waits()))
    }
}

impl Lane {
    fn new(up: bool, now: Duration) -> Self {
        Self {
            up,
            answered: false,
            by_id: HashMap::new(),
            last_id: 0,
            outbox: VecDeque::new(),
            owed_bytes: 0,
            counted_bytes: 0,
            credit_bytes: 0,
            active_at: now,
            rate: LaneRate::new(now),
        }
    }

    /// What it sends in this time. Only the silence of a lane that owes something counts.
    fn bytes_in(&self, now: Duration, time: Duration) -> u64 {
        if self.by_id.is_empty() {
            self.rate.bytes_after_idle(now, time)
        } else {
            self.rate.bytes_in(time, self.rate.silence(now))
        }
    }

    fn say(&mut self, request: v1::FetchRequest) {
        if self.up {
            self.outbox.push_back(request);
        }
    }

    fn forget(&mut self, sent: &Sent) {
        if self.by_id.remove(&sent.id).is_some() {
            self.owed_bytes = self.owed_bytes.saturating_sub(sent.left_bytes());
        }
    }

    fn cancel(&mut self, id: u64) {
        let mut unsent = false;
        self.outbox.retain(|request| {
            let own = request.id == id;
            unsent |= own && request.what != Some(What::Raise(true));
            !own
        });
        if !unsent {
            self.say(v1::FetchRequest { id, what: Some(What::Cancel(true)), priority: 0, encoded: false });
        }
    }

    fn give_credit(&mut self, window: u64) {
        let target = self.counted_bytes + window;
        if target >= self.credit_bytes + window.div_ceil(4) {
            self.credit_bytes = target;
            // Before what waits for it.
            let credit =
                v1::FetchRequest { id: 0, what: Some(What::Credit(target)), priority: 0, encoded: false };
            if self.up {
                self.outbox.push_front(credit);
            }
        }
    }
}

impl Sent {
    fn new(lane: usize, id: u64, at: Duration, expected_bytes: u64) -> Self {
        let (got, missing, proof) = (BytesMut::new(), Vec::new(), Vec::new());
        let heard_at = at;
        Self { lane, id, at, heard_at, expected_bytes, arrived_bytes: 0, encoding: None, got, missing, proof }
    }

    fn left_bytes(&self) -> u64 {
        self.expected_bytes.saturating_sub(self.arrived_bytes)
    }

    /// Takes a piece in; the answer, when it was the last. No encoding is longer than what it says.
    fn add(&mut self, piece: v1::FetchPiece, body: &Body) -> Option<Answer> {
        let len = usize::try_from(body.len()).unwrap_or(usize::MAX);
        match piece.body {
            Some(v1::fetch_piece::Body::Data(data)) => {
                self.missing.extend(piece.missing);
                if self.missing.len() > MAX_PACK_FILES || self.proof.len() > MAX_PROOF {
                    let detail = "more is missing or proved than was asked for".to_owned();
                    return Some(Err(TransportError::Garbled { detail }));
                }
                let values = piece.proof.chunks_exact(32).filter_map(|value| value.try_into().ok());
                self.proof.extend(values.map(Digest));
                if *self.encoding.get_or_insert(piece.encoding) != piece.encoding {
                    let detail = "the pieces of an answer have several encodings".to_owned();
                    return Some(Err(TransportError::Garbled { detail }));
                }
                if self.got.len() + data.len() > len {
                    let detail = format!("more than {len} bytes came");
                    return Some(Err(TransportError::Garbled { detail }));
                }
                if self.got.capacity() < len {
                    self.got.reserve(len);
                }
                self.got.extend_from_slice(&data);
                piece.last.then(|| {
                    let encoding = wire::encoding::encoding(piece.encoding);
                    Ok(Arrived {
                        bytes: self.got.split().freeze(),
                        encoding: encoding.map_err(|e| TransportError::Garbled { detail: e.to_string() })?,
                        missing: std::mem::take(&mut self.missing),
                        proof: std::mem::take(&mut self.proof),
                    })
                })
            }
            Some(v1::fetch_piece::Body::Failure(failure)) => Some(Err(refusal(failure))),
            None => Some(Err(TransportError::Garbled { detail: "a piece has no body".to_owned() })),
        }
    }
}

pub(super) fn refusal(failure: v1::FetchFailure) -> TransportError {
    use v1::fetch_failure::Kind;
    let (kind, detail) = (failure.kind(), failure.detail);
    match kind {
        Kind::NotFound => TransportError::NotFound,
        Kind::SourceChanged => TransportError::SourceChanged { detail },
        Kind::Io => TransportError::Io { detail },
        Kind::Unspecified => {
            TransportError::Garbled { detail: format!("a failure of no known kind: {detail}") }
        }
    }
}

#[cfg(test)]
mod tests;
