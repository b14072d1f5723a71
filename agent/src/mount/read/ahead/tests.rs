//! What is asked for ahead, for every way to read a file.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;

const MIB: u64 = 1 << 20;

fn read(offset: u64, len: u64, file_bytes: u64) -> Read {
    Read { inode: Inode(7), offset, len, file_bytes }
}

/// Reads a file from front to end; returns how many chunks were demanded that nobody had
/// asked for ahead, and how far ahead it went at most.
fn sequential(piece: u64, file_bytes: u64, delay_bytes: Option<u64>) -> (u64, u64) {
    let mut ahead = ReadAhead::default();
    let (mut asked, mut missed, mut furthest) = (BTreeSet::new(), BTreeSet::new(), 0);
    let mut offset = 0;
    while offset < file_bytes {
        let chunk = offset / MIB;
        if !asked.contains(&chunk) {
            missed.insert(chunk);
        }
        for index in ahead.on_read(read(offset, piece, file_bytes), delay_bytes).ask {
            assert!(asked.insert(index), "chunk {index} was asked for twice");
            assert!(index < file_bytes.div_ceil(MIB));
            furthest = furthest.max(index - chunk);
        }
        offset += piece;
    }
    (missed.len() as u64, furthest)
}

#[test]
fn sequential_reads_of_any_size_run_into_what_was_read_ahead() {
    for piece in [4096, 128 << 10, MIB] {
        let (missed, furthest) = sequential(piece, 300 * MIB + 5, None);
        assert!(missed <= 2, "{piece}: {missed} chunks were not read ahead");
        assert_eq!(furthest, 16, "{piece}");
    }
}

#[test]
fn a_large_read_of_the_beginning_of_a_large_file_is_enough() {
    let mut ahead = ReadAhead::default();
    let step = ahead.on_read(read(0, 128 << 10, 64 * MIB), None);
    assert_eq!((step.ask, step.sequential), (1..17, true));
    for (len, file) in [(16 << 10, 64 * MIB), (128 << 10, 63 * MIB)] {
        assert_eq!(ReadAhead::default().on_read(read(0, len, file), None), Step::default());
    }
}

#[test]
fn what_was_not_asked_for_is_offered_again() {
    let mut ahead = ReadAhead::default();
    for at in 0..40 {
        let step = ahead.on_read(read(at * MIB, MIB, 100 * MIB), Some(2 * MIB));
        ahead.not_asked(Inode(7), &step.ask);
    }
    let step = ahead.on_read(read(40 * MIB, MIB, 100 * MIB), Some(2 * MIB));
    assert_eq!(step, Step { ask: 41..57, sequential: true, before: 42..57 });
    ahead.not_asked(Inode(8), &(1..2));
}

/// Of a chunk that was pushed the kernel asks for the first page only.
#[test]
fn single_pages_of_chunks_in_order_keep_a_stream_running_ahead() {
    let mut ahead = ReadAhead::default();
    let file = 1000 * MIB;
    let mut asked = BTreeSet::new();
    for at in 0..100 {
        let step = ahead.on_read(read(at * MIB, if at < 2 { MIB } else { 4096 }, file), None);
        assert!(step.sequential);
        asked.extend(step.ask);
    }
    assert!(asked.into_iter().eq(1..116));
}

#[test]
fn a_slow_link_is_not_flooded() {
    assert_eq!(sequential(128 << 10, 50 * MIB, Some(75_000)).1, 2);
    assert_eq!(sequential(128 << 10, 200 * MIB, Some(3 * MIB)).1, 24);
}

#[test]
fn two_strays_halve_and_a_stream_survives_one() {
    let mut ahead = ReadAhead::default();
    let file = 1000 * MIB;
    let mut at = 0;
    let mut run = |ahead: &mut ReadAhead, count: u64| {
        for _ in 0..count {
            ahead.on_read(read(at, MIB, file), None);
            at += MIB;
        }
    };
    let window = |ahead: &ReadAhead| {
        ahead.files[&Inode(7)].streams.iter().map(|stream| stream.window_chunks).max().unwrap()
    };
    run(&mut ahead, 100);
    assert_eq!(window(&ahead), 16);
    ahead.on_read(read(700 * MIB, 4096, file), None);
    run(&mut ahead, 1);
    assert_eq!(window(&ahead), 16);
    ahead.on_read(read(720 * MIB, 4096, file), None);
    ahead.on_read(read(740 * MIB, 4096, file), None);
    assert_eq!(window(&ahead), 8);
    run(&mut ahead, 40);
    assert_eq!(window(&ahead), 16);
}

#[test]
fn a_skip_inside_what_is_on_its_way_stays_in_the_stream() {
    let mut ahead = ReadAhead::default();
    let file = 1000 * MIB;
    for at in 0..50 {
        ahead.on_read(read(at * MIB, MIB, file), None);
    }
    let step = ahead.on_read(read(60 * MIB, MIB, file), None);
    assert_eq!(step.ask.end, 61 + 16);
    assert_eq!(ahead.files[&Inode(7)].streams.len(), 1);
}

/// Chunks asked for by what is expected after a first read of the file's head.
fn expected(ahead: &mut ReadAhead, file: u64) -> Range<u64> {
    assert_eq!(ahead.on_read(read(0, 16 << 10, file), None), Step::default());
    ahead.expect(Inode(7), file, None)
}

#[test]
fn a_stream_that_is_expected_has_its_whole_window_and_asks_for_each_chunk_once() {
    let (mut ahead, file) = (ReadAhead::default(), 300 * MIB + 5);
    let mut asked = BTreeSet::from_iter(expected(&mut ahead, file));
    assert_eq!(asked, (1..17).collect());
    assert_eq!(ahead.expect(Inode(7), file, None), 0..0, "once");
    for offset in (16 << 10..file).step_by(128 << 10) {
        assert!(offset < MIB || asked.contains(&(offset / MIB)), "{offset} was not read ahead");
        for index in ahead.on_read(read(offset, 128 << 10, file), None).ask {
            assert!(asked.insert(index), "chunk {index} was asked for twice");
        }
    }
    assert_eq!(asked.len(), 300);
    assert_eq!(ahead.files[&Inode(7)].streams.len(), 1);
}

#[test]
fn two_reads_elsewhere_disprove_what_was_expected_for_good() {
    let (mut ahead, file) = (ReadAhead::default(), 300 * MIB);
    expected(&mut ahead, file);
    ahead.on_read(read(200 * MIB, 4096, file), None);
    ahead.on_read(read(100 * MIB, 4096, file), None);
    assert!(ahead.files[&Inode(7)].streams.iter().all(|stream| stream.window_chunks == 0));
    assert_eq!(ahead.expect(Inode(7), file, None), 0..0);
    // One that was read for a window is only halved.
    let mut ahead = ReadAhead::default();
    expected(&mut ahead, file);
    for at in 0..40 {
        ahead.on_read(read(at * MIB, MIB, file), None);
    }
    ahead.on_read(read(200 * MIB, 4096, file), None);
    ahead.on_read(read(100 * MIB, 4096, file), None);
    assert_eq!(ahead.files[&Inode(7)].streams.iter().map(|stream| stream.window_chunks).max(), Some(8));
}

/// Reads records in random order, in pieces, and says of the later half what was asked for in vain
/// and which chunks were demanded unasked besides each record's first piece.
fn records(record: u64, piece: u64, file: u64) -> (usize, usize) {
    let mut ahead = ReadAhead::default();
    let (mut vain, mut late) = (0, 0);
    for number in 0..400_u64 {
        let start = number * 7919 % (file / record / 2) * 2 * record;
        let mut asked = BTreeSet::new();
        for offset in (0..record / piece).map(|number| start + number * piece) {
            let chunk = offset / MIB;
            late += usize::from(
                number >= 200 && offset > start + piece && !asked.remove(&chunk) && chunk * MIB == offset,
            );
            asked.extend(ahead.on_read(read(offset, piece, file), Some(4 * MIB)).ask);
        }
        vain += if number >= 200 {
            asked.iter().filter(|&&chunk| chunk * MIB >= start + record).count()
        } else {
            0
        };
    }
    (vain, late)
}

#[test]
fn records_in_random_order_are_read_ahead_to_their_end_and_no_further() {
    for (record, piece) in [(4 * MIB, MIB), (4 * MIB, 128 << 10), (2 * MIB, MIB), (12 * MIB, 512 << 10)] {
        assert_eq!(records(record, piece, 20_000 * MIB), (0, 0), "{record} in {piece}");
    }
}

/// A fault makes the kernel read 1 MiB around it; who copies on from there makes it read the next.
#[test]
fn faults_that_the_kernel_widens_cause_nothing_more_and_a_scan_after_them_is_found() {
    let (mut ahead, file) = (ReadAhead::default(), 8192 * MIB);
    let mut asked = 0;
    for number in 0..1000_u64 {
        let start = number * 7919 % 8000 * MIB + number * 4096 % MIB;
        let mut step = ahead.on_read(read(start, MIB, file), Some(4 * MIB));
        if number % 4 == 1 {
            step = ahead.on_read(read(start + MIB, MIB, file), Some(4 * MIB));
        }
        if number >= 40 {
            asked += step.ask.end - step.ask.start;
            assert!(!step.sequential, "all of a chunk would be fetched");
        }
    }
    assert_eq!(asked, 0);
    let mut furthest = 0;
    for at in 0..100 {
        assert!(at < 3 || furthest > at, "{at} was not read ahead");
        furthest = furthest.max(ahead.on_read(read(at * MIB, MIB, file), Some(4 * MIB)).ask.end);
    }
    assert_eq!(furthest, 100 + 32);
}

#[test]
fn many_files_are_forgotten() {
    let mut ahead = ReadAhead::default();
    for number in 0..50_000 {
        ahead.on_read(Read { inode: Inode(number), offset: 0, len: 4096, file_bytes: 4096 }, None);
    }
    assert!(ahead.files.len() <= MAX_FILES);
}

proptest! {
    /// No two of these touch, so none may cause any read-ahead.
    #[test]
    fn random_reads_are_not_amplified(slots in proptest::collection::vec(0_u64..200_000, 1..300)) {
        let mut ahead = ReadAhead::default();
        for slot in slots {
            let step = ahead.on_read(read(slot * 8192, 4096, 200_000 * 8192), None);
            prop_assert_eq!(step, Step::default());
        }
    }

    /// Several readers of one file, in any order of turns, out of step by one request.
    #[test]
    fn interleaved_streams_are_all_found(
        turns in proptest::collection::vec(0_usize..8, 400..800),
        piece in prop_oneof![Just(128_u64 << 10), Just(MIB)],
    ) {
        let mut ahead = ReadAhead::default();
        let file = 8 * 2000 * MIB;
        let mut at: Vec<u64> = (0..8).map(|stream| stream * 2000 * MIB).collect();
        let mut asked = BTreeSet::new();
        let mut late = [0; 8];
        let mut reads = [0; 8];
        for turn in turns {
            let offset = at[turn];
            reads[turn] += 1;
            if reads[turn] > 40 && !asked.contains(&(offset / MIB)) {
                late[turn] += 1;
            }
            asked.extend(ahead.on_read(read(offset, piece, file), None).ask);
            at[turn] += piece;
        }
        prop_assert_eq!(late, [0; 8]);
    }

    /// Whatever is read: never outside of the file, never more than a window from it.
    #[test]
    fn read_ahead_stays_near_and_inside(
        reads in proptest::collection::vec((0_u64..80 * MIB, 1_u64..2 * MIB), 1..200),
    ) {
        let mut ahead = ReadAhead::default();
        let file = 70 * MIB + 17;
        for (offset, len) in reads {
            let Step { ask, before, .. } = ahead.on_read(read(offset, len, file), None);
            prop_assert!(ask.end <= 71 && before.end <= 71);
            prop_assert!(ask.end - ask.start <= 40);
            prop_assert!(before.is_empty() || before.start * MIB > offset + len);
        }
    }
}
