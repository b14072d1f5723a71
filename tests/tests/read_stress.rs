//! The read mount under everything at once: kernel, mount, fetcher and the chunk link over mutual
//! TLS, against the source directory, while home answers wrongly, late or not at all and the link
//! stalls, breaks and comes back. Never a wrong byte, never a wait without an end.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../../agent/tests/support/fake_chunks.rs"]
mod fake_chunks;
#[path = "read_stress/fio.rs"]
mod fio;
#[path = "read_stress/link.rs"]
mod link;
#[path = "read_stress/ops.rs"]
mod ops;
#[path = "read_stress/readers.rs"]
mod readers;
#[path = "read_stress/rig.rs"]
mod rig;
#[path = "read_stress/tree.rs"]
mod tree;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::Duration;

use fake_chunks::Fault;
use limb_common::manifest::ChunkRef;
use limb_tests::home::{lacks, lacks_fuse};
use ops::{Step, World};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use rig::{Rig, Serving};
use tree::FileSpec;

const TTL: Duration = Duration::from_secs(600);
/// For what takes a second or two. It is the test's end that is bounded by it, not its verdict: a
/// reader that waits for longer waits for ever.
const DEADLINE: Duration = Duration::from_secs(90);

fn cannot_run() -> bool {
    lacks_fuse() || lacks("root, to mount", nix::unistd::geteuid().is_root())
}

fn is_long() -> bool {
    std::env::var_os("LIMB_TEST_LONG").is_some()
}

/// Something that happens to the link while readers read, for so many milliseconds.
#[derive(Clone, Debug)]
enum Trouble {
    Cut(u64),
    Reset(u64),
    Swallow(u64),
    /// Home takes requests and sends nothing.
    Hold(u64),
    Slow(u64),
}

fn trouble() -> impl Strategy<Value = Trouble> {
    prop_oneof![
        (1_u64..300).prop_map(Trouble::Cut),
        (1_u64..100).prop_map(Trouble::Reset),
        (1_u64..100).prop_map(Trouble::Swallow),
        (1_u64..300).prop_map(Trouble::Hold),
        (1_u64..300).prop_map(Trouble::Slow),
    ]
}

fn fault() -> impl Strategy<Value = Fault> {
    prop_oneof![6 => lasting(), 1 => Just(Fault::AnswerTwice), 1 => Just(Fault::Silence)]
}

/// What makes every answer wrong.
fn lasting() -> impl Strategy<Value = Fault> {
    prop_oneof![
        Just(Fault::FlipByte),
        Just(Fault::Short),
        Just(Fault::PieceTwice),
        Just(Fault::Reordered),
        Just(Fault::Neighbour),
        Just(Fault::Unreadable),
    ]
}

#[derive(Clone, Debug)]
struct Case {
    tree: Vec<FileSpec>,
    readers: Vec<Vec<Step>>,
    /// Of the next answers.
    faults: Vec<Fault>,
    /// Chunks that never come right: a file, and which of its chunks.
    spoiled: Vec<(prop::sample::Index, prop::sample::Index, Fault)>,
    troubles: Vec<Trouble>,
    cache_mib: u64,
    /// Home itself serves, whose answers are always right.
    real: bool,
}

fn case() -> impl Strategy<Value = Case> {
    let readers = prop::collection::vec(prop::collection::vec(ops::step(), 1..30), 1..5);
    let faults = prop_oneof![Just(Vec::new()), prop::collection::vec(fault(), 1..25)];
    let spoiled = prop_oneof![
        Just(Vec::new()),
        prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>(), lasting()), 1..4)
    ];
    let troubles = prop::collection::vec(trouble(), 0..4);
    let cache = prop_oneof![Just(1_u64), Just(6), Just(64)];
    (tree::tree(), readers, faults, spoiled, troubles, cache, prop::bool::weighted(0.25)).prop_map(
        |(tree, readers, faults, spoiled, troubles, cache_mib, real)| Case {
            tree,
            readers,
            faults,
            spoiled,
            troubles,
            cache_mib,
            real,
        },
    )
}

/// Causes the troubles, one after the other, until all have been or nobody reads any more.
fn trouble_makers(rig: &Rig, troubles: &[Trouble], over: &AtomicBool) {
    let hold = |held: bool| {
        rig.state.held.send_replace(held);
    };
    for trouble in troubles {
        let length = match trouble {
            Trouble::Cut(length) => {
                rig.proxy.cut();
                length
            }
            Trouble::Reset(length) => {
                rig.proxy.reset();
                length
            }
            Trouble::Swallow(length) => {
                rig.proxy.swallow();
                length
            }
            Trouble::Slow(length) => {
                rig.proxy.slow(2 << 20);
                length
            }
            Trouble::Hold(length) => {
                hold(true);
                length
            }
        };
        let ended = until(over, *length);
        rig.proxy.restore();
        rig.proxy.slow(0);
        hold(false);
        if ended {
            return;
        }
    }
}

/// How long the trouble lasts, unless everybody has finished; whether they have.
fn until(over: &AtomicBool, length_ms: u64) -> bool {
    let end = limb_common::clock::boottime() + Duration::from_millis(length_ms);
    while limb_common::clock::boottime() < end && !over.load(Ordering::SeqCst) {
        std::thread::park_timeout(Duration::from_millis(5));
    }
    over.load(Ordering::SeqCst)
}

/// Runs every reader on a thread of its own; an error, also of one that does not end.
fn all_end(
    rig: &Rig,
    readers: Vec<Box<dyn FnOnce() -> Result<(), String> + Send + '_>>,
) -> Result<(), String> {
    let (tell, told) = mpsc::channel();
    std::thread::scope(|scope| {
        let count = readers.len();
        for (number, reader) in readers.into_iter().enumerate() {
            let tell = tell.clone();
            scope.spawn(move || tell.send((number, reader())).unwrap());
        }
        let mut verdict = Ok(());
        let mut missing: BTreeSet<_> = (0..count).collect();
        let end = limb_common::clock::boottime() + DEADLINE;
        while !missing.is_empty() {
            let left = end.saturating_since(limb_common::clock::boottime());
            let Ok((number, outcome)) = told.recv_timeout(left) else {
                rig.abort();
                return Err(format!("readers {missing:?} did not end; {:?}", rig.fetcher.stats()));
            };
            missing.remove(&number);
            verdict = verdict.and(outcome.map_err(|wrong| format!("reader {number}: {wrong}")));
        }
        verdict
    })
}

fn run(case: &Case) -> Result<(), String> {
    let mut paths = Vec::new();
    let serving = if case.real { Serving::Home } else { Serving::Fake };
    let rig = Rig::new(serving, case.cache_mib << 20, TTL, |root| paths = tree::plant(&case.tree, root));
    let mut spoiled = BTreeSet::new();
    for (file, chunk, fault) in case.spoiled.iter().filter(|_| !case.real) {
        let path = file.get(&paths);
        let found = rig.manifest.node(rig.inode(path)).unwrap();
        if found.chunk_count() == 0 {
            continue;
        }
        let index = chunk.index(usize::try_from(found.chunk_count()).unwrap()) as u64;
        // A hole is not asked for.
        let Some(ChunkRef::Data(id)) = found.chunk(index) else { continue };
        // Equal bytes are one chunk, wherever they lie: who has it from one place asks at no other.
        for path in &paths {
            let node = rig.manifest.node(rig.inode(path)).unwrap();
            for index in (0..node.chunk_count()).filter(|&at| node.chunk(at) == Some(ChunkRef::Data(id))) {
                rig.spoil(path, index, *fault);
                spoiled.insert((path.clone(), index));
            }
        }
    }
    rig.state.faults.lock().unwrap().extend(&case.faults);
    let world = World {
        mounted: rig.mounted(),
        source: &rig.source,
        manifest: &rig.manifest,
        paths: &paths,
        spoiled: &spoiled,
    };
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| trouble_makers(&rig, &case.troubles, &over));
        let readers = case.readers.iter().map(|steps| {
            let world = &world;
            Box::new(move || ops::play(world, steps)) as Box<dyn FnOnce() -> Result<(), String> + Send>
        });
        let verdict = all_end(&rig, readers.collect());
        over.store(true, Ordering::SeqCst);
        verdict
    })?;
    let problems = rig.problems.lock().unwrap().clone();
    if let Some(problem) = problems.iter().find(|(path, _)| !spoiled.iter().any(|(bad, _)| bad == path)) {
        return Err(format!("{problem:?} is said, where {spoiled:?} cannot be read"));
    }
    rig.assert_nothing_left();
    Ok(())
}

#[test]
fn any_reads_of_any_tree_through_any_trouble_are_the_sources_bytes() {
    if cannot_run() {
        return;
    }
    let cases = if is_long() { 1500 } else { 12 };
    let config = Config { cases, max_shrink_iters: 60, failure_persistence: None, ..Config::default() };
    let outcome = TestRunner::new(config).run(&case(), |case| run(&case).map_err(TestCaseError::fail));
    if let Err(error) = outcome {
        panic!("{error}");
    }
}
