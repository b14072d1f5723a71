//! The world stops before each durable step of a random journal, in turn; a new life recovers,
//! the agent goes on from where home says it stands. The tree must be the model's in the end, and
//! at every moment each visible file must be whole.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use limb_common::chunk::CHUNK_BYTES;
use limb_common::id::{AttemptNumber, RunId};
use proptest::prelude::*;

use super::disk::GoOn;
use super::tests::{OUT, begin, bytes, chunks, created, fast_dir, open_home, published, tree};
use super::*;

/// Lets so many steps happen, and none after.
#[derive(Debug)]
struct Countdown {
    left: AtomicU64,
    taken: AtomicU64,
}

impl Countdown {
    fn new(left: u64) -> Arc<Self> {
        Arc::new(Self { left: left.into(), taken: 0.into() })
    }
}

impl Steps for Countdown {
    fn before(&self, _step: Step) -> bool {
        self.taken.fetch_add(1, Ordering::SeqCst);
        let go = |left: u64| left.checked_sub(1);
        self.left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, go).is_ok()
    }
}

#[derive(Clone, Debug)]
enum Act {
    /// A new file at a name, over what is there.
    Write(u8, usize),
    /// fsynced half-way, then changed and closed.
    Snapshot(u8, usize),
    /// Appended to in three steps.
    Grow(u8, usize),
    /// One byte changed, starting from what is there.
    Edit(u8),
    Rename(u8, u8),
    Remove(u8),
    Link(u8, u8),
    Symlink(u8),
    Directory(u8),
    MoveDirectory,
    Touch(u8),
    /// Created, written and unlinked before it was closed.
    Vanish(usize),
    /// Grows, gets a second name, loses the first in between or not, grows on.
    GrowLinked(u8, u8, bool, usize),
    /// A new file at a name; the other names of what stood there follow, as the box does it.
    Rewrite(u8, usize),
}

fn name(number: u8) -> String {
    ["a", "b", "d/x", "d/y", "e/x"][usize::from(number) % 5].to_owned()
}

fn act() -> impl Strategy<Value = Act> {
    let size = prop_oneof![5 => 0..300_usize, 1 => CHUNK_BYTES..CHUNK_BYTES + 9];
    let name = 0..5_u8;
    prop_oneof![
        3 => (name.clone(), size.clone()).prop_map(|(n, s)| Act::Write(n, s)),
        2 => (name.clone(), size.clone()).prop_map(|(n, s)| Act::Snapshot(n, s)),
        2 => (name.clone(), size.clone()).prop_map(|(n, s)| Act::Grow(n, s)),
        1 => name.clone().prop_map(Act::Edit),
        3 => (name.clone(), name.clone()).prop_map(|(a, b)| Act::Rename(a, b)),
        1 => name.clone().prop_map(Act::Remove),
        1 => (name.clone(), name.clone()).prop_map(|(a, b)| Act::Link(a, b)),
        1 => name.clone().prop_map(Act::Symlink),
        1 => name.clone().prop_map(Act::Directory),
        1 => Just(Act::MoveDirectory),
        1 => name.prop_map(Act::Touch),
        1 => (1..300_usize).prop_map(Act::Vanish),
    ]
}

/// Few names, and whatever can be done to a file with several.
fn tangle() -> impl Strategy<Value = Act> {
    let (name, size) = (0..3_u8, 0..300_usize);
    prop_oneof![
        2 => (name.clone(), size.clone()).prop_map(|(n, s)| Act::Write(n, s)),
        1 => (name.clone(), size.clone()).prop_map(|(n, s)| Act::Snapshot(n, s)),
        4 => (name.clone(), name.clone()).prop_map(|(a, b)| Act::Rename(a, b)),
        3 => name.clone().prop_map(Act::Remove),
        6 => (name.clone(), name.clone()).prop_map(|(a, b)| Act::Link(a, b)),
        1 => name.clone().prop_map(Act::Symlink),
        1 => name.clone().prop_map(Act::Edit),
        2 => name.clone().prop_map(Act::Touch),
        2 => (name.clone(), name.clone(), any::<bool>(), size.clone())
            .prop_map(|(a, b, gone, s)| Act::GrowLinked(a, b, gone, s)),
        2 => (name, size).prop_map(|(n, s)| Act::Rewrite(n, s)),
    ]
}

/// Numbers from here on are symlinks: told apart as files are, but never opened.
const SYMLINKS: u64 = 1 << 63;

/// What an agent would send for a script, and what the owner should find at its end.
#[derive(Default)]
struct Script {
    items: Vec<Item>,
    seq: u64,
    file: u64,
    /// Content and the file number that published it (0: a link).
    model: BTreeMap<String, (Vec<u8>, u64)>,
    /// Every content that was whole at some time.
    whole: HashSet<Vec<u8>>,
    /// Final contents of files that grow: a prefix of one may be seen before it is cut back.
    growing: HashSet<Vec<u8>>,
}

impl Script {
    fn entry(&mut self, op: Op) {
        self.seq += 1;
        self.items.push(Item::Entry(Entry { seq: self.seq, output: OUT, op }));
    }

    fn send(&mut self, generation: u64, content: &[u8]) {
        self.items.extend(chunks(self.file, generation, content));
    }

    fn publish(&mut self, path: &str, content: &[u8], kind: PublishKind) {
        self.entry(published(self.file, path, content, kind));
        self.whole.insert(content.to_vec());
        self.model.insert(path.to_owned(), (content.to_vec(), self.file));
    }

    fn create(&mut self, path: &str) {
        self.file += 1;
        self.entry(created(self.file, path));
    }

    fn act(&mut self, act: &Act) {
        let seed = u8::try_from(self.file % 251).unwrap();
        match act {
            Act::Write(number, size) => {
                let (path, content) = (name(*number), bytes(*size, seed));
                self.create(&path);
                self.send(1, &content);
                self.publish(&path, &content, PublishKind::Final);
            }
            Act::Snapshot(number, size) => {
                let (path, mut content) = (name(*number), bytes(*size, seed));
                self.create(&path);
                self.send(1, &content);
                self.publish(&path, &content, PublishKind::Snapshot);
                content.push(1);
                content[0] ^= 1;
                self.send(2, &content);
                self.publish(&path, &content, PublishKind::Final);
            }
            Act::Grow(number, size) => {
                let (path, content) = (name(*number), bytes(*size + 3, seed));
                self.growing.insert(content.clone());
                self.create(&path);
                for (generation, end) in [(1, size / 2), (2, size / 2 + 1)] {
                    self.send(generation, &content[..end]);
                    self.publish(&path, &content[..end], PublishKind::Grown);
                }
                self.send(3, &content);
                self.publish(&path, &content, PublishKind::Final);
            }
            Act::Edit(number) => {
                let path = name(*number);
                let Some((mut content, base)) = self.model.get(&path).cloned() else { return };
                if base >= SYMLINKS || content.is_empty() {
                    return;
                }
                content[0] ^= 0x55;
                self.file += 1;
                let op = Op::Created {
                    file: self.file,
                    path: path.clone().into(),
                    mode: 0o644,
                    base: Base::File(base),
                };
                self.entry(op);
                let first = content.len().min(CHUNK_BYTES);
                self.send(1, &content[..first]);
                self.publish(&path, &content, PublishKind::Final);
            }
            Act::Rename(from, to) => {
                let (from, to) = (name(*from), name(*to));
                let same = self.model.get(&from).zip(self.model.get(&to)).is_some_and(|(a, b)| a.1 == b.1);
                if from == to || same {
                    return;
                }
                let Some(content) = self.model.remove(&from) else { return };
                self.model.insert(to.clone(), content);
                self.entry(Op::Renamed {
                    from: from.into(),
                    to: to.into(),
                    no_replace: false,
                    exchange: false,
                });
            }
            Act::Remove(number) => {
                let path = name(*number);
                if self.model.remove(&path).is_some() {
                    self.entry(Op::Removed { path: path.into(), directory: false });
                }
            }
            Act::Link(from, to) => {
                let (from, to) = (name(*from), name(*to));
                let Some(content) = self.model.get(&from).cloned() else { return };
                if self.model.contains_key(&to) {
                    return;
                }
                self.model.insert(to.clone(), content);
                self.entry(Op::HardLinkMade { existing: from.into(), path: to.into() });
            }
            Act::Symlink(number) => {
                let path = name(*number);
                if self.model.contains_key(&path) {
                    return;
                }
                let target = format!("t{}", self.seq);
                self.model.insert(path.clone(), (format!("-> {target}").into_bytes(), SYMLINKS + self.seq));
                self.whole.insert(format!("-> {target}").into_bytes());
                self.entry(Op::SymlinkMade { path: path.into(), target: target.into() });
            }
            Act::Directory(number) => {
                let path = format!("dir{number}");
                self.entry(Op::DirectoryMade { path: path.into(), mode: 0o755 });
            }
            Act::MoveDirectory => {
                // Made by name so that it is limb's own.
                let (from, to) = (format!("m{}", self.seq), format!("n{}", self.seq));
                self.entry(Op::DirectoryMade { path: from.clone().into(), mode: 0o755 });
                let inside = format!("{from}/f");
                self.create(&inside);
                self.send(1, b"inside");
                self.publish(&inside, b"inside", PublishKind::Final);
                let content = self.model.remove(&inside).unwrap();
                self.model.insert(format!("{to}/f"), content);
                self.entry(Op::Renamed {
                    from: from.into(),
                    to: to.into(),
                    no_replace: false,
                    exchange: false,
                });
            }
            Act::Touch(number) => {
                let path = name(*number);
                if self.model.contains_key(&path) {
                    let mtime_ns = Some(1_000_000_000 * i64::try_from(self.seq).unwrap());
                    self.entry(Op::AttributesSet { path: path.into(), mode: Some(0o640), mtime_ns });
                }
            }
            Act::GrowLinked(number, other, loses, size) => {
                let (path, other, content) = (name(*number), name(*other), bytes(*size + 3, seed));
                if self.model.contains_key(&other) || path == other {
                    return;
                }
                self.growing.insert(content.clone());
                self.create(&path);
                self.send(1, &content[..1]);
                self.publish(&path, &content[..1], PublishKind::Grown);
                self.entry(Op::HardLinkMade { existing: path.clone().into(), path: other.clone().into() });
                if *loses {
                    self.model.remove(&path);
                    self.entry(Op::Removed { path: path.clone().into(), directory: false });
                }
                let shown = if *loses { &other } else { &path };
                for (generation, end) in [(2, 2), (3, content.len())] {
                    self.send(generation, &content[..end]);
                    self.publish(shown, &content[..end], PublishKind::Grown);
                }
                self.publish(shown, &content, PublishKind::Final);
                self.model.insert(other, (content, self.file));
            }
            Act::Rewrite(number, size) => {
                let (path, content) = (name(*number), bytes(*size, seed));
                let old = self.model.get(&path).map_or(SYMLINKS, |(_, file)| *file);
                self.create(&path);
                self.send(1, &content);
                self.publish(&path, &content, PublishKind::Final);
                let others: Vec<_> =
                    self.model.iter().filter(|(_, (_, file))| old < SYMLINKS && *file == old).collect();
                for other in others.into_iter().map(|(other, _)| other.clone()).collect::<Vec<_>>() {
                    self.entry(Op::Removed { path: other.clone().into(), directory: false });
                    let op = Op::HardLinkMade { existing: path.clone().into(), path: other.clone().into() };
                    self.entry(op);
                    self.model.insert(other, (content.clone(), self.file));
                }
            }
            Act::Vanish(size) => {
                self.create("gone");
                self.send(1, &bytes(*size, seed));
                let op = Op::Abandoned {
                    file: self.file,
                    keep: false,
                    path: b"gone".to_vec(),
                    size: *size as u64,
                };
                self.entry(op);
            }
        }
    }
}

/// What the agent knows to be home.
#[derive(Default)]
struct Acked {
    seq: u64,
    chunks: BTreeSet<(u64, u64, u64)>,
}

impl Acked {
    fn learn(&mut self, acks: &Acks) {
        assert!(acks.durable_seq >= self.seq, "home forgot what it acknowledged");
        assert_eq!((&acks.refused, &acks.chunks_refused), (&vec![], &vec![]));
        self.seq = acks.durable_seq;
        self.chunks.extend(acks.chunks.iter().map(|name| (name.file, name.index, name.generation)));
    }

    fn needs(&self, item: &Item) -> bool {
        match item {
            Item::Entry(entry) => entry.seq > self.seq,
            Item::Chunk(chunk) => {
                !self.chunks.contains(&(chunk.id.file, chunk.id.index, chunk.id.generation))
            }
        }
    }
}

/// One life of home, as far as it goes. `true`: everything was taken.
async fn live(
    dir: &Path,
    id: &AttemptId,
    script: &Script,
    acked: &mut Acked,
    group: usize,
    steps: Arc<dyn Steps>,
) -> bool {
    let events = Arc::new(Mutex::new(Vec::new()));
    let home = open_home(dir, &events, steps);
    if home.recover().await.is_err() {
        return false;
    }
    whole(dir, script);
    let Ok((journal, standing)) = home.open_journal(id.clone()).await else { return false };
    acked.learn(&standing);
    // What was not acknowledged comes again, and some of what was (a lost ack).
    let items: Vec<_> = script.items.iter().filter(|item| acked.needs(item)).cloned().collect();
    for (group, number) in items.chunks(group).zip(0..) {
        let sync = number % 2 == 0;
        match journal.feed(group.to_vec(), sync).await {
            Ok(acks) => acked.learn(&acks),
            Err(ResultsError::Stopped) => return false,
            Err(other) => panic!("{other:?}"),
        }
        if number == 0
            && let Err(ResultsError::Stopped) = journal.feed(group.to_vec(), sync).await
        {
            return false;
        }
    }
    match journal.feed(Vec::new(), true).await {
        Ok(acks) => acked.learn(&acks),
        Err(_) => return false,
    }
    assert_eq!(*events.lock().unwrap(), Vec::<String>::new());
    true
}

/// Every visible file is a content that was whole at some time.
fn whole(dir: &Path, script: &Script) {
    for (path, content) in tree(&dir.join("dest")) {
        let fine = script.whole.contains(&content)
            // A growing file before it is cut back: still a prefix of what comes.
            || (!content.is_empty() && script.growing.iter().any(|whole| whole.starts_with(&content)));
        assert!(fine, "{path} is torn: {} bytes", content.len());
    }
}

async fn crash_at(script: &Script, group: usize, steps: Option<u64>, again: u64) -> u64 {
    let dir = fast_dir();
    let id = AttemptId { run: RunId::random(), attempt: AttemptNumber(1) };
    let events = Arc::new(Mutex::new(Vec::new()));
    {
        let home = open_home(dir.path(), &events, Arc::new(GoOn));
        home.begin(&id, vec![begin(&dir.path().join("dest"))]).await.unwrap();
    }
    let mut acked = Acked::default();
    let countdown = Countdown::new(steps.unwrap_or(u64::MAX));
    let mut done = live(dir.path(), &id, script, &mut acked, group, Arc::clone(&countdown) as _).await;
    whole(dir.path(), script);
    if !done {
        // A second crash, often in the middle of recovery.
        done = live(dir.path(), &id, script, &mut acked, group, Countdown::new(again)).await;
        whole(dir.path(), script);
    }
    if !done {
        assert!(live(dir.path(), &id, script, &mut acked, group, Arc::new(GoOn)).await);
    }
    assert_eq!(acked.seq, script.seq);
    let expected: BTreeMap<_, _> =
        script.model.iter().map(|(path, (content, _))| (path.clone(), content.clone())).collect();
    assert_eq!(tree(&dir.path().join("dest")), expected, "stopped before step {steps:?}, then {again}");
    let home = open_home(dir.path(), &events, Arc::new(GoOn));
    assert_eq!(home.verify(&id.run).await.unwrap().problems, vec![]);
    let finished = home.finish(&id).await.unwrap();
    assert_eq!(finished.partials, Vec::<String>::new());
    assert!(!dir.path().join("dest/.limb").exists());
    countdown.taken.load(Ordering::SeqCst)
}

fn run_all(acts: &[Act], group: usize, stride: u64) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut script = Script::default();
    acts.iter().for_each(|act| script.act(act));
    runtime.block_on(async {
        let total = crash_at(&script, group, None, 0).await;
        let mut at = 0;
        while at < total {
            crash_at(&script, group, Some(at), at * 7 % 13).await;
            at += stride;
        }
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 4, max_shrink_iters: 200, ..ProptestConfig::default() })]
    #[test]
    fn any_journal_survives_a_stop_before_any_step(
        acts in prop::collection::vec(act(), 1..14),
        group in 1..12_usize,
    ) {
        run_all(&acts, group, 7);
    }
}

/// How many tangles: `LIMB_TEST_LONG` makes it a few minutes.
fn tangles() -> u32 {
    if std::env::var_os("LIMB_TEST_LONG").is_some() { 400 } else { 12 }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: tangles(), max_shrink_iters: 400, ..ProptestConfig::default() })]
    #[test]
    fn any_tangle_of_links_survives_a_stop_before_every_step(
        acts in prop::collection::vec(tangle(), 2..12),
        group in prop_oneof![1..6_usize, Just(100)],
    ) {
        run_all(&acts, group, 1);
    }
}

/// A batch is done again from its start: a link, a move or a removal must still know that it was
/// done when later effects of the batch changed its names again.
#[test]
fn names_that_come_back_survive_a_stop() {
    use Act::*;
    let cases: &[&[Act]] = &[
        &[Snapshot(1, 0), Link(1, 0), Symlink(2), Snapshot(0, 1)],
        &[Write(0, 9), Link(0, 1), Rename(1, 2)],
        &[Write(0, 9), Link(0, 1), Remove(1), Write(1, 5)],
        &[Write(0, 9), Write(1, 8), Link(0, 2), Rename(1, 2)],
        // Removed again, the file would be gone for good.
        &[Write(0, 9), Link(0, 1), Remove(0), Link(1, 0), Remove(1)],
        &[Write(0, 9), Link(0, 1), Remove(0), Rename(1, 0)],
        &[Symlink(1), Link(1, 2), Rename(2, 1)],
        &[Write(0, 9), Rename(0, 1), Rename(1, 0), Write(1, 5)],
        &[Write(0, 9), Rename(0, 1), Link(1, 0), Touch(0), Write(1, 5), Write(0, 6)],
        &[Write(0, 9), Link(0, 1), Touch(0), Write(0, 5), Write(1, 6)],
        &[GrowLinked(0, 1, false, 20), Write(0, 5), Write(1, 6)],
        &[GrowLinked(0, 1, true, 20), Link(1, 0), Write(1, 6)],
        &[Write(0, 9), Link(0, 1), Link(0, 2), Rewrite(1, 30), Rewrite(2, 3)],
    ];
    for case in cases {
        let acts: Vec<_> = [Directory(0)].iter().chain(*case).cloned().collect();
        for group in [5, 100] {
            run_all(&acts, group, 1);
        }
    }
}

/// The long form, for `cargo test -- --ignored`.
#[test]
#[ignore = "minutes"]
fn long_journals_survive_a_stop_before_every_step() {
    proptest!(ProptestConfig::with_cases(40), |(acts in prop::collection::vec(act(), 1..30), group in 1..30_usize)| {
        run_all(&acts, group, 1);
    });
}

/// One of everything; every single step where most entries share a batch.
#[test]
fn one_of_everything_survives_a_stop() {
    use Act::*;
    let acts = [
        Write(0, 100),
        Write(0, 50),
        Snapshot(1, 80),
        Grow(2, 90),
        Edit(1),
        Rename(0, 1),
        Link(1, 3),
        Touch(3),
        Symlink(4),
        Rename(4, 0),
        Directory(1),
        MoveDirectory,
        Vanish(9),
        Remove(3),
        Write(1, CHUNK_BYTES + 5),
        Edit(1),
    ];
    for (group, stride) in [(1, 11), (7, 5), (100, 1)] {
        run_all(&acts, group, stride);
    }
}

/// What was never published is kept under its name once, wherever the end of the attempt stops.
#[tokio::test]
async fn the_end_of_an_attempt_survives_a_stop_before_every_step() {
    let content = bytes(500, 1);
    for steps in 0.. {
        let (dir, events) = (fast_dir(), Arc::new(Mutex::new(Vec::new())));
        let id = AttemptId { run: RunId::random(), attempt: AttemptNumber(1) };
        let mut script = Script::default();
        script.create("d/unfinished");
        script.send(1, &content);
        {
            let home = open_home(dir.path(), &events, Arc::new(GoOn));
            home.begin(&id, vec![begin(&dir.path().join("dest"))]).await.unwrap();
            let (journal, _) = home.open_journal(id.clone()).await.unwrap();
            journal.feed(script.items, true).await.unwrap();
        }
        let stopped = {
            let home = open_home(dir.path(), &events, Countdown::new(steps));
            home.finish(&id).await.is_err()
        };
        let home = open_home(dir.path(), &events, Arc::new(GoOn));
        home.recover().await.unwrap();
        let finished = home.finish(&id).await.unwrap();
        assert_eq!(finished.partials.len(), 1, "stopped before step {steps}");
        let expected = BTreeMap::from([("d/unfinished.partial".to_owned(), content.clone())]);
        assert_eq!(tree(&dir.path().join("dest")), expected, "stopped before step {steps}");
        if !stopped {
            return;
        }
    }
}
