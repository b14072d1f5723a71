use std::collections::HashMap;
use std::path::Path;
use std::sync::mpsc;

use limb_common::chunk::Position;
use proptest::prelude::*;

use super::*;

const MEMORY_BYTES: u64 = 64 << 20;

/// A directory on a disk: /tmp may be memory.
fn disk() -> tempfile::TempDir {
    tempfile::tempdir_in(Path::new(env!("CARGO_MANIFEST_DIR")).join("../target")).unwrap()
}

fn open(dir: &Path, disk_bytes: u64) -> (Spill, mpsc::Receiver<SpillEvent>) {
    let (tell, told) = mpsc::channel();
    let on_event = Box::new(move |event| drop(tell.send(event)));
    let settings = SpillSettings { dir: dir.to_owned(), disk_bytes, memory_bytes: MEMORY_BYTES, on_event };
    (Spill::open(settings).unwrap(), told)
}

fn chunk(number: u64, len: usize) -> VerifiedChunk {
    let mut bytes = vec![0; len.max(8)];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    let bytes = Bytes::from(bytes);
    ChunkId::of(Position::Whole, &bytes).verify(bytes).unwrap()
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap()
}

fn is(found: Option<VerifiedChunk>, expected: &VerifiedChunk) -> bool {
    found.is_some_and(|found| found == *expected)
}

/// What the file system counts.
fn disk_bytes(spill: &Spill) -> u64 {
    spill.shared.lock().store.as_ref().unwrap().file.disk_bytes()
}

#[test]
fn chunks_come_back_from_the_disk_as_they_were_and_leave_no_name_there() {
    let dir = disk();
    let (spill, _events) = open(dir.path(), 64 << 20);
    let all: Vec<_> = [8, 4095, 4096, 4097, 300_000, CHUNK_BYTES - 1, CHUNK_BYTES]
        .into_iter()
        .zip(0..)
        .map(|(len, number)| chunk(number, len))
        .collect();
    all.iter().for_each(|one| spill.offer(one.clone(), true));
    spill.settle();
    for one in &all {
        assert!(spill.queued(&one.id()).is_none() && spill.holds(&one.id()));
        assert!(is(runtime().block_on(spill.read(one.id())), one));
    }
    let stats = spill.stats();
    assert_eq!((stats.spilled_chunks, stats.hits, stats.damaged), (7, 7, 0));
    assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn a_flipped_byte_is_a_miss_and_one_warning_and_the_chunk_can_come_again() {
    let dir = disk();
    let (spill, events) = open(dir.path(), 64 << 20);
    let all: Vec<_> = (0..4).map(|number| chunk(number, 100_000)).collect();
    all.iter().for_each(|one| spill.offer(one.clone(), true));
    spill.settle();
    let store = spill.shared.lock().store.clone().unwrap();
    let slot_of = |one: &VerifiedChunk| {
        let mut desk = spill.shared.lock();
        let slot = desk.index.begin_read(&one.id()).unwrap().number.slot;
        desk.index.end_read(slot, true);
        slot
    };
    for (one, at) in all.iter().zip([0, 50_000, 99_999]) {
        store.file.flip(slot_of(one), at);
    }
    let runtime = runtime();
    for one in &all[..3] {
        assert!(runtime.block_on(spill.read(one.id())).is_none() && !spill.holds(&one.id()));
    }
    assert!(is(runtime.block_on(spill.read(all[3].id())), &all[3]));
    assert!(matches!(events.try_recv(), Ok(SpillEvent::Damaged { .. })));
    assert!(events.try_recv().is_err(), "one warning for all");
    assert_eq!((spill.stats().damaged, spill.stats().held_bytes), (3, 102_400));
    all.iter().for_each(|one| spill.offer(one.clone(), true));
    spill.settle();
    assert!(all.iter().all(|one| is(runtime.block_on(spill.read(one.id())), one)));
}

#[test]
fn a_disk_that_goes_on_damaging_is_given_up() {
    let dir = disk();
    let (spill, events) = open(dir.path(), 64 << 20);
    let all: Vec<_> = (0..=MOST_DAMAGED).map(|number| chunk(number, 5000)).collect();
    all.iter().for_each(|one| spill.offer(one.clone(), true));
    spill.settle();
    let store = spill.shared.lock().store.clone().unwrap();
    for slot in 0..u32::try_from(all.len()).unwrap() {
        store.file.flip(slot, 7);
    }
    let runtime = runtime();
    assert!(all.iter().all(|one| runtime.block_on(spill.read(one.id())).is_none()));
    assert!(matches!(events.try_recv(), Ok(SpillEvent::Damaged { .. })));
    assert!(matches!(events.try_recv(), Ok(SpillEvent::Stopped { .. })));
    assert!(events.try_recv().is_err());
}

/// The disk is there from a sound start and then refuses: as one that is full or broken.
#[test]
fn a_disk_that_refuses_ends_the_spilling_with_one_event_and_is_given_back() {
    let dir = disk();
    let (spill, events) = open(dir.path(), 64 << 20);
    let first = chunk(0, 5000);
    spill.offer(first.clone(), true);
    spill.settle();
    spill.shared.lock().store.as_ref().unwrap().file.refuse();
    (1..20).for_each(|number| spill.offer(chunk(number, CHUNK_BYTES), true));
    spill.settle();
    assert!(matches!(events.recv().unwrap(), SpillEvent::Stopped { .. }));
    (20..40).for_each(|number| spill.offer(chunk(number, CHUNK_BYTES), true));
    spill.settle();
    assert!(events.try_recv().is_err(), "one event");
    assert!(!spill.holds(&first.id()) && runtime().block_on(spill.read(first.id())).is_none());
    assert_eq!((spill.room_ahead_bytes(), spill.added_bytes(), spill.stats().held_bytes), (0, 0, 0));
    assert!(spill.shared.lock().store.is_none());
}

#[test]
fn a_full_queue_drops_and_never_waits() {
    let dir = disk();
    // Nobody empties its queue: the slowest of disks.
    let settings = SpillSettings {
        dir: dir.path().to_owned(),
        disk_bytes: 64 << 20,
        memory_bytes: MEMORY_BYTES,
        on_event: Box::new(drop),
    };
    let spill = Spill::idle(settings, None).unwrap();
    let most = spill.shared.queue_bytes / CHUNK_BYTES_U64;
    (0..most + 3).for_each(|number| spill.offer(chunk(number, CHUNK_BYTES), true));
    assert_eq!(spill.stats().dropped, 3);
    let runtime = runtime();
    for number in 0..most + 3 {
        let one = chunk(number, CHUNK_BYTES);
        assert_eq!(spill.queued(&one.id()).is_some(), number < most);
        assert_eq!(is(runtime.block_on(spill.read(one.id())), &one), number < most);
    }
    assert!(spill.room_ahead_bytes() > 0, "who read it already does not come for it");
    spill.offer(chunk(99, CHUNK_BYTES), false);
    assert_eq!(spill.room_ahead_bytes(), 0, "nothing more is promised to who reads ahead");
}

#[test]
fn a_place_that_is_no_disk_or_has_no_room_is_refused() {
    let dir = disk();
    let settings = |dir: &Path, disk_bytes| SpillSettings {
        dir: dir.to_owned(),
        disk_bytes,
        memory_bytes: MEMORY_BYTES,
        on_event: Box::new(drop),
    };
    let no_room = Spill::open(settings(dir.path(), 1 << 20)).unwrap_err();
    assert!(matches!(no_room, SpillError::NoRoom { .. }), "{no_room:?}");
    let nowhere = Spill::open(settings(&dir.path().join("none"), 64 << 20)).unwrap_err();
    assert!(matches!(nowhere, SpillError::File { source: FileError::Create(_), .. }), "{nowhere:?}");
    let memory = Spill::open(settings(Path::new("/dev/shm"), 64 << 20)).unwrap_err();
    assert!(matches!(memory, SpillError::File { source: FileError::InMemory, .. }), "{memory:?}");
}

/// What a step does to chunk `number`.
#[derive(Clone, Copy, Debug)]
enum Step {
    Offer { used: bool },
    Use,
    Read,
    Damage,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => any::<bool>().prop_map(|used| Step::Offer { used }),
        2 => Just(Step::Use),
        4 => Just(Step::Read),
        1 => Just(Step::Damage),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    /// The reference: a map of all that was ever offered. What comes back is what the map says, or
    /// nothing; nothing comes back that was damaged; the disk holds no more than it may.
    #[test]
    fn a_spill_is_a_part_of_what_was_offered_within_its_budget(
        steps in proptest::collection::vec((0_u64..40, step()), 1..200),
        lengths in proptest::collection::vec(
            prop_oneof![8_usize..20_000, Just(CHUNK_BYTES), 4090_usize..4100, 200_000_usize..CHUNK_BYTES],
            40,
        ),
    ) {
        let dir = disk();
        let (spill, _events) = open(dir.path(), 9 << 20);
        let runtime = runtime();
        let of = |number: u64| chunk(number, lengths[usize::try_from(number).unwrap()]);
        let mut offered: HashMap<u64, bool> = HashMap::new();
        let mut damaged = 0;
        for (number, step) in steps {
            let one = of(number);
            match step {
                Step::Offer { used } => {
                    spill.offer(one, used);
                    spill.settle();
                    offered.insert(number, true);
                }
                Step::Use => spill.shared.lock().index.note_use(&one.id()),
                Step::Damage => {
                    let mut desk = spill.shared.lock();
                    let Some(store) = desk.store.clone() else { break };
                    if let Some(written) = desk.index.begin_read(&one.id()) {
                        desk.index.end_read(written.number.slot, true);
                        store.file.flip(written.number.slot, one.bytes().len() / 2);
                        drop(desk);
                        prop_assert!(runtime.block_on(spill.read(one.id())).is_none());
                        damaged += 1;
                    }
                }
                Step::Read => {
                    let held = spill.holds(&one.id());
                    prop_assert!(!held || offered.contains_key(&number));
                    let found = runtime.block_on(spill.read(one.id()));
                    prop_assert_eq!(found.is_some(), held);
                    prop_assert!(found.is_none_or(|found| found == one));
                }
            }
            let stats = spill.stats();
            prop_assert_eq!(stats.damaged, damaged);
            if damaged > MOST_DAMAGED {
                break;
            }
            prop_assert!(stats.held_bytes <= 9 << 20);
            prop_assert!(spill.room_ahead_bytes() <= 9 << 20);
            // A few blocks of the file system's own are for where the blocks are.
            prop_assert!(disk_bytes(&spill) <= stats.held_bytes + (64 << 10), "{} for {}", disk_bytes(&spill), stats.held_bytes);
        }
    }
}

/// `cargo test -p limb-agent --lib what_a_mebibyte_costs -- --ignored --nocapture`, with `--release`
/// for figures to quote (docs/performance.md).
#[test]
#[ignore = "a measurement"]
fn what_a_mebibyte_costs() {
    use limb_common::clock::boottime;
    const ROUNDS: u32 = 200;
    let dir = disk();
    let (spill, _events) = open(dir.path(), 256 << 20);
    let key = LockedKey::random().unwrap();
    let one = chunk(1, CHUNK_BYTES);
    let mut bytes = one.bytes().to_vec();
    let timed = |name: &str, work: &mut dyn FnMut(u64)| {
        let began = boottime();
        (0..u64::from(ROUNDS)).for_each(work);
        let each = boottime().saturating_since(began) / ROUNDS;
        println!("{name}: {each:?} per MiB");
    };
    let number = |counter| WriteNumber { slot: 0, counter };
    let mut tags = Vec::new();
    timed("seal", &mut |round| tags.push(key.seal(number(round), &one.id(), &mut bytes).unwrap()));
    timed("open", &mut |round| {
        let counter = u64::from(ROUNDS) - 1 - round;
        assert!(key.open(number(counter), &one.id(), tags.pop().unwrap(), &mut bytes));
    });
    timed("verify", &mut |_| drop(one.id().verify(one.bytes().clone()).unwrap()));
    let all: Vec<_> = (0..u64::from(ROUNDS)).map(|number| chunk(number, CHUNK_BYTES)).collect();
    timed("seal and write", &mut |round| {
        spill.offer(all[usize::try_from(round).unwrap()].clone(), true);
        spill.settle();
    });
    let runtime = runtime();
    timed("read, open and verify", &mut |round| {
        let one = &all[usize::try_from(round).unwrap()];
        assert!(is(runtime.block_on(spill.read(one.id())), one));
    });
}
