//! What results promise, one test each. Shared pieces for the crash tests too.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use limb_common::assignment::OutputNumber;
use limb_common::chunk::{CHUNK_BYTES, Position, value_of};
use limb_common::id::{AttemptNumber, Digest, RunId};
use limb_common::manifest::ChunkRef;
use nix::errno::Errno;

use super::disk::GoOn;
use super::*;
use crate::database::Database;

pub(super) const OUT: OutputNumber = OutputNumber(1);

/// RAM where there is some: these tests are about order, not about disks.
pub(super) fn fast_dir() -> tempfile::TempDir {
    if Path::new("/dev/shm").is_dir() {
        tempfile::tempdir_in("/dev/shm").unwrap()
    } else {
        tempfile::tempdir().unwrap()
    }
}

pub(super) fn bytes(len: usize, seed: u8) -> Vec<u8> {
    let mut out = vec![0; len];
    blake3::Hasher::new().update(&[seed]).finalize_xof().fill(&mut out);
    out
}

pub(super) fn chunk(file: u64, index: u64, generation: u64, data: &[u8]) -> Item {
    Item::Chunk(Chunk {
        id: ChunkName { output: OUT, file, index, generation },
        bytes: Bytes::copy_from_slice(data),
        value: value_of(Position::Subtree { index }, data),
    })
}

pub(super) fn chunks(file: u64, generation: u64, content: &[u8]) -> Vec<Item> {
    content.chunks(CHUNK_BYTES).zip(0..).map(|(data, i)| chunk(file, i, generation, data)).collect()
}

pub(super) fn created(file: u64, path: &str) -> Op {
    Op::Created { file, path: path.into(), mode: 0o644, base: Base::Nothing }
}

pub(super) fn published(file: u64, path: &str, content: &[u8], kind: PublishKind) -> Op {
    Op::Published(Publication {
        file,
        path: path.into(),
        size: content.len() as u64,
        root: Digest::of(content),
        mode: 0o4755,
        mtime_ns: 1_700_000_000_123_456_789,
        kind,
    })
}

/// Every visible file and link below a directory, `.limb` left out.
pub(super) fn tree(root: &Path) -> BTreeMap<String, Vec<u8>> {
    fn walk(root: &Path, at: &Path, found: &mut BTreeMap<String, Vec<u8>>) {
        for entry in std::fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(root).unwrap().to_string_lossy().into_owned();
            if name == ".limb" {
                continue;
            }
            let stat = path.symlink_metadata().unwrap();
            if stat.is_dir() {
                walk(root, &path, found);
            } else if stat.is_symlink() {
                let target = std::fs::read_link(&path).unwrap();
                found.insert(name, format!("-> {}", target.display()).into_bytes());
            } else {
                found.insert(name, std::fs::read(&path).unwrap());
            }
        }
    }
    let mut found = BTreeMap::new();
    walk(root, root, &mut found);
    found
}

/// A home with one attempt, and a journal that numbers its entries.
pub(super) struct Bench {
    pub(super) dir: tempfile::TempDir,
    pub(super) home: ResultsHome,
    pub(super) id: AttemptId,
    pub(super) dest: PathBuf,
    pub(super) events: Arc<Mutex<Vec<String>>>,
    pub(super) journal: Journal,
    pub(super) seq: u64,
}

impl Bench {
    pub(super) async fn new() -> Self {
        Self::with(fast_dir(), |begin| begin).await
    }

    pub(super) async fn with(
        dir: tempfile::TempDir,
        change: impl FnOnce(OutputBegin) -> OutputBegin,
    ) -> Self {
        let dest = dir.path().join("dest");
        let events = Arc::new(Mutex::new(Vec::new()));
        let home = open_home(dir.path(), &events, Arc::new(GoOn));
        let id = AttemptId { run: RunId::random(), attempt: AttemptNumber(1) };
        home.lock_dest(&dest, &id.run).await.unwrap();
        home.begin(&id, vec![change(begin(&dest))]).await.unwrap();
        let (journal, _) = home.open_journal(id.clone()).await.unwrap();
        Self { dir, home, id, dest, events, journal, seq: 0 }
    }

    pub(super) fn entry(&mut self, op: Op) -> Item {
        self.seq += 1;
        Item::Entry(Entry { seq: self.seq, output: OUT, op })
    }

    pub(super) async fn feed(&self, items: Vec<Item>) -> Acks {
        self.journal.feed(items, true).await.unwrap()
    }

    /// Applies one entry; 0 or the errno of its refusal.
    pub(super) async fn apply(&mut self, op: Op) -> i32 {
        let item = self.entry(op);
        let acks = self.feed(vec![item]).await;
        assert_eq!(acks.durable_seq, self.seq);
        acks.refused.first().map_or(0, |refusal| refusal.errno)
    }

    pub(super) async fn put(&mut self, file: u64, path: &str, content: &[u8]) -> i32 {
        let mut items = vec![self.entry(created(file, path))];
        items.extend(chunks(file, 1, content));
        items.push(self.entry(published(file, path, content, PublishKind::Final)));
        let acks = self.feed(items).await;
        acks.refused.first().map_or(0, |refusal| refusal.errno)
    }

    pub(super) fn read(&self, path: &str) -> Vec<u8> {
        std::fs::read(self.dest.join(path)).unwrap()
    }
}

pub(super) fn begin(dest: &Path) -> OutputBegin {
    OutputBegin { output: OUT, dest: dest.to_owned(), lower: None, quota_bytes: None, quota_inodes: None }
}

pub(super) fn open_home(dir: &Path, events: &Arc<Mutex<Vec<String>>>, steps: Arc<dyn Steps>) -> ResultsHome {
    let database = Database::open(&dir.join("limb.db"), &[SCHEMA]).unwrap();
    let events = Arc::clone(events);
    let sink = Arc::new(move |event: ResultEvent| events.lock().unwrap().push(event.text));
    ResultsHome::with_steps(database, sink, steps)
}

#[tokio::test]
async fn files_of_every_size_appear_whole_with_their_attributes() {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
    let mut bench = Bench::new().await;
    let sizes = [0, 1, 4096, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES + 77];
    for (size, file) in sizes.into_iter().zip(1..) {
        let path = format!("a/b/f{size}");
        assert_eq!(bench.put(file, &path, &bytes(size, 1)).await, 0, "{size}");
        assert_eq!(bench.read(&path), bytes(size, 1));
        let stat = std::fs::metadata(bench.dest.join(&path)).unwrap();
        assert_eq!(stat.permissions().mode() & 0o7777, 0o755, "set-id bits are gone");
        assert_eq!((stat.mtime(), stat.mtime_nsec()), (1_700_000_000, 123_456_789));
    }
    let verified = bench.home.verify(&bench.id.run).await.unwrap();
    assert_eq!((verified.files, verified.problems), (7, vec![]));
    let finished = bench.home.finish(&bench.id).await.unwrap();
    assert_eq!((finished.files, finished.partials), (7, vec![]));
    assert!(!bench.dest.join(".limb").exists());
    assert_eq!(bench.home.finish(&bench.id).await.unwrap().files, 7);
    assert!(matches!(bench.home.open_journal(bench.id.clone()).await, Err(ResultsError::Ended)));
}

#[tokio::test]
async fn wrong_bytes_end_the_stream_and_a_wrong_root_shows_nothing() {
    let mut bench = Bench::new().await;
    let create = bench.entry(created(1, "f"));
    bench.feed(vec![create]).await;
    let Item::Chunk(mut bad) = chunk(1, 0, 1, b"right") else { unreachable!() };
    bad.bytes = Bytes::from_static(b"wrong");
    let refused = bench.journal.feed(vec![Item::Chunk(bad)], true).await;
    assert!(matches!(refused, Err(ResultsError::Protocol(_))));
    bench.feed(vec![chunk(1, 0, 1, b"right")]).await;
    assert_eq!(bench.apply(published(1, "f", b"other", PublishKind::Final)).await, Errno::EIO as i32);
    assert!(tree(&bench.dest).is_empty());
    // The stream stays usable and so does the file.
    assert_eq!(bench.apply(published(1, "f", b"right", PublishKind::Final)).await, 0);
    assert_eq!(bench.read("f"), b"right");
    // A refusal is not forgotten with the ack that carried it.
    let (_, standing) = bench.home.open_journal(bench.id.clone()).await.unwrap();
    assert_eq!((standing.durable_seq, standing.refused.len()), (bench.seq, 1));
}

#[tokio::test]
async fn an_older_stream_is_refused_once_a_newer_one_opened() {
    let mut bench = Bench::new().await;
    let (newer, _) = bench.home.open_journal(bench.id.clone()).await.unwrap();
    let item = bench.entry(created(1, "f"));
    let old = bench.journal.feed(vec![item.clone()], true).await;
    assert!(matches!(old, Err(ResultsError::Replaced)));
    assert_eq!(newer.feed(vec![item.clone(), item], true).await.unwrap().durable_seq, 1);
    let gap = Item::Entry(Entry { seq: 9, output: OUT, op: created(2, "g") });
    assert!(matches!(newer.feed(vec![gap], true).await, Err(ResultsError::Protocol(_))));
}

#[tokio::test]
async fn hostile_entries_are_refused_and_touch_nothing() {
    let mut bench = Bench::new().await;
    std::fs::write(bench.dir.path().join("secret"), b"s").unwrap();
    std::os::unix::fs::symlink("..", bench.dest.join("up")).unwrap();
    let long = "n".repeat(256);
    let paths =
        ["../secret", "/etc/passwd", "", "a/../../secret", ".limb/x", ".limb", "a//b", "a\0b", "./a", &long];
    for (path, file) in paths.into_iter().zip(100..) {
        assert_ne!(bench.apply(created(file, path)).await, 0, "{path:?}");
        assert_ne!(bench.apply(Op::DirectoryMade { path: path.into(), mode: 0o755 }).await, 0, "{path:?}");
        assert_ne!(bench.apply(Op::Removed { path: path.into(), directory: false }).await, 0, "{path:?}");
        let link = Op::SymlinkMade { path: path.into(), target: b"x".to_vec() };
        assert_ne!(bench.apply(link).await, 0, "{path:?}");
    }
    for target in ["/etc/passwd", "../secret", "a/../../secret", ""] {
        let link = Op::SymlinkMade { path: b"l".to_vec(), target: target.into() };
        assert_eq!(bench.apply(link).await, Errno::EPERM as i32, "{target}");
    }
    // Through a link that stands at home: neither written nor followed.
    assert_ne!(bench.put(1, "up/secret", b"evil").await, 0);
    assert_ne!(bench.put(2, "up/new", b"evil").await, 0);
    assert_eq!(std::fs::read(bench.dir.path().join("secret")).unwrap(), b"s");
    assert!(!bench.dir.path().join("new").exists());
    let exchange = Op::Renamed { from: b"a".to_vec(), to: b"b".to_vec(), no_replace: false, exchange: true };
    assert_eq!(bench.apply(exchange).await, Errno::EINVAL as i32);
    let trusted = Op::XattrSet { path: b"x".to_vec(), name: b"trusted.x".to_vec(), value: None };
    assert_eq!(bench.apply(trusted).await, Errno::EPERM as i32);
    assert_eq!(tree(&bench.dest), BTreeMap::from([("up".to_owned(), b"-> ..".to_vec())]));
}

#[tokio::test]
async fn names_move_link_and_go_as_a_job_expects() {
    let mut bench = Bench::new().await;
    assert_eq!(bench.apply(Op::DirectoryMade { path: b"d".to_vec(), mode: 0o750 }).await, 0);
    assert_eq!(bench.put(1, "d/tmp", b"one").await, 0);
    let rename = |from: &str, to: &str| Op::Renamed {
        from: from.into(),
        to: to.into(),
        no_replace: false,
        exchange: false,
    };
    assert_eq!(bench.apply(rename("d/tmp", "d/one")).await, 0);
    // The usual way to move `latest`: a link under another name, renamed over.
    for target in ["d/one", "d/two"] {
        let make = bench.entry(Op::SymlinkMade { path: b"latest.tmp".to_vec(), target: target.into() });
        let over = bench.entry(rename("latest.tmp", "latest"));
        assert!(bench.feed(vec![make, over]).await.refused.is_empty());
    }
    assert_eq!(bench.put(2, "d/two", b"two").await, 0);
    let link = Op::HardLinkMade { existing: b"d/two".to_vec(), path: b"again".to_vec() };
    assert_eq!(bench.apply(link).await, 0);
    assert_eq!(bench.apply(rename("d", "e")).await, 0);
    let keep =
        Op::Renamed { from: b"e/one".to_vec(), to: b"e/two".to_vec(), no_replace: true, exchange: false };
    assert_eq!(bench.apply(keep).await, Errno::EEXIST as i32);
    let directory = |path: &str| Op::Removed { path: path.into(), directory: true };
    assert_eq!(bench.apply(directory("e")).await, Errno::ENOTEMPTY as i32);
    let set = Op::AttributesSet { path: b"again".to_vec(), mode: Some(0o6700), mtime_ns: Some(5) };
    assert_eq!(bench.apply(set).await, 0);
    assert_eq!(bench.apply(Op::Removed { path: b"e/one".to_vec(), directory: false }).await, 0);
    let expected = [("again", &b"two"[..]), ("e/two", b"two"), ("latest", b"-> d/two")]
        .map(|(n, c)| (n.to_owned(), c.to_vec()));
    assert_eq!(tree(&bench.dest), expected.into());
    assert!(bench.events.lock().unwrap().is_empty(), "{:?}", bench.events);
    let names = bench.home.list(&bench.id.run).await.unwrap();
    let names: Vec<_> = names.iter().map(|n| n.path.strip_prefix(&bench.dest).unwrap().to_owned()).collect();
    assert_eq!(names, ["again", "e", "e/two", "latest"].map(PathBuf::from));
}

#[tokio::test]
async fn what_the_owner_put_there_is_kept() {
    let mut bench = Bench::new().await;
    std::fs::write(bench.dest.join("f"), b"owner").unwrap();
    assert_eq!(bench.put(1, "f", b"job").await, 0);
    assert_eq!(bench.put(2, "f", b"job 2").await, 0);
    // Changed by the owner after limb published it: the owner's too.
    std::fs::write(bench.dest.join("f"), b"edited").unwrap();
    assert_eq!(bench.put(3, "f", b"job 3").await, 0);
    std::fs::write(bench.dest.join("g"), b"mine").unwrap();
    assert_eq!(bench.apply(Op::Removed { path: b"g".to_vec(), directory: false }).await, 0);
    let found = tree(&bench.dest);
    let kept: Vec<_> = found.iter().filter(|(name, _)| name.starts_with("f.owner-")).collect();
    let contents: Vec<_> = kept.iter().map(|(_, content)| content.as_slice()).collect();
    assert!(contents.contains(&&b"owner"[..]) && contents.contains(&&b"edited"[..]), "{kept:?}");
    assert_eq!((found["f"].as_slice(), found["g"].as_slice()), (&b"job 3"[..], &b"mine"[..]));
    assert_eq!(bench.events.lock().unwrap().len(), 3);
}

#[tokio::test]
async fn what_went_again_by_the_end_is_named() {
    let mut bench = Bench::new().await;
    for (file, path) in (1..).zip(["stays", "d/removed", "changed", "moved", "e/stays"]) {
        assert_eq!(bench.put(file, path, b"result").await, 0);
    }
    std::fs::remove_dir_all(bench.dest.join("d")).unwrap();
    std::fs::write(bench.dest.join("changed"), b"longer than before").unwrap();
    std::fs::rename(bench.dest.join("moved"), bench.dest.join("elsewhere")).unwrap();
    let finished = bench.home.finish(&bench.id).await.unwrap();
    let gone = ["changed", "d/removed", "moved"].map(|name| bench.dest.join(name).display().to_string());
    assert_eq!((finished.files, finished.bytes, finished.gone), (2, 12, gone.to_vec()));
}

/// With a file that is still being written, and with a coordinator that starts again on nothing.
#[tokio::test]
async fn an_attempt_ends_though_its_destination_is_gone() {
    for restarted in [false, true] {
        let mut bench = Bench::new().await;
        assert_eq!(bench.put(1, "a", b"result").await, 0);
        let items = vec![bench.entry(created(2, "half")), chunk(2, 0, 1, b"half")];
        bench.feed(items).await;
        std::fs::remove_dir_all(&bench.dest).unwrap();
        if restarted {
            bench.home = open_home(bench.dir.path(), &bench.events, Arc::new(GoOn));
            bench.home.recover().await.unwrap();
        }
        let finished = bench.home.finish(&bench.id).await.unwrap();
        assert_eq!((finished.files, finished.gone.len()), (0, 1), "restarted: {restarted}");
    }
}

#[tokio::test]
async fn quotas_refuse_and_the_old_version_stays() {
    let quota = |begin| OutputBegin { quota_bytes: Some(5_000), quota_inodes: Some(2), ..begin };
    let mut bench = Bench::with(fast_dir(), quota).await;
    assert_eq!(bench.put(1, "f", &bytes(6000, 1)).await, 0);
    assert_ne!(bench.put(2, "f", &bytes(6000, 2)).await, 0);
    assert_eq!(bench.read("f"), bytes(6000, 1));
    let drop = Op::Abandoned { file: 2, keep: false, path: b"f".to_vec(), size: 0 };
    assert_eq!(bench.apply(drop).await, 0);
    assert_eq!(bench.put(3, "f", &bytes(3000, 3)).await, 0);
    assert_eq!(bench.put(4, "g", &bytes(6000, 4)).await, 0, "what was replaced is free again");
    assert_eq!(bench.put(5, "h", b"").await, 0);
    assert_eq!(bench.put(6, "i", b"").await, 0);
    assert_eq!(bench.put(7, "j", b"").await, Errno::EDQUOT as i32);
    let dir = Op::DirectoryMade { path: b"d".to_vec(), mode: 0o755 };
    assert_eq!(bench.apply(dir).await, Errno::EDQUOT as i32);
}

#[tokio::test]
async fn a_file_that_grows_is_always_a_prefix_and_keeps_its_inode() {
    use std::os::unix::fs::MetadataExt as _;
    let mut bench = Bench::new().await;
    let content = bytes(CHUNK_BYTES + 50_000, 9);
    let mut items = vec![bench.entry(created(1, "log"))];
    let mut inode = None;
    for (generation, end) in [(1, 1000), (2, 90_000), (3, CHUNK_BYTES + 7), (4, content.len())] {
        // The tail arrives before its middle.
        items.extend(chunks(1, generation, &content[..end]).into_iter().rev());
        let kind = if generation == 4 { PublishKind::Final } else { PublishKind::Grown };
        items.push(bench.entry(published(1, "log", &content[..end], kind)));
        assert!(bench.feed(std::mem::take(&mut items)).await.refused.is_empty());
        assert_eq!(bench.read("log"), content[..end], "{end}");
        let stat = std::fs::metadata(bench.dest.join("log")).unwrap();
        assert_eq!(*inode.get_or_insert(stat.ino()), stat.ino(), "a `tail -f` keeps working");
    }
    assert_eq!(bench.home.verify(&bench.id.run).await.unwrap().problems, vec![]);
}

/// The one exception to "whole": too large to copy at each fsync, where there are no clones.
#[tokio::test]
async fn a_large_file_synced_while_it_is_written_is_shown_in_place_until_its_last_close() {
    if !Path::new("/dev/shm").is_dir() {
        return;
    }
    let mut bench = Bench::new().await;
    let mut content = bytes(65 * CHUNK_BYTES, 1);
    let mut items = vec![bench.entry(created(1, "big"))];
    items.extend(chunks(1, 1, &content));
    items.push(bench.entry(published(1, "big", &content, PublishKind::Snapshot)));
    assert!(bench.feed(items).await.refused.is_empty());
    assert!(bench.read("big") == content);
    content[5] ^= 1;
    bench.feed(vec![chunk(1, 0, 2, &content[..CHUNK_BYTES])]).await;
    assert!(bench.read("big") == content, "the write shows before anything was published");
    // Nobody resumes from what may be torn.
    assert_eq!(bench.home.lower(&bench.dest).await.unwrap().left_out, ["big"]);
    assert_eq!(bench.apply(published(1, "big", &content, PublishKind::Final)).await, 0);
    let verified = bench.home.verify(&bench.id.run).await.unwrap();
    assert_eq!((verified.files, verified.problems), (1, vec![]));
}

#[tokio::test]
async fn an_edit_in_place_starts_from_what_was_published() {
    let mut bench = Bench::new().await;
    let mut content = bytes(3 * CHUNK_BYTES + 5, 1);
    assert_eq!(bench.put(1, "f", &content).await, 0);
    content[CHUNK_BYTES + 3] ^= 1;
    let op = Op::Created { file: 2, path: b"f".to_vec(), mode: 0o644, base: Base::File(1) };
    let items = vec![
        bench.entry(op),
        chunk(2, 1, 1, &content[CHUNK_BYTES..2 * CHUNK_BYTES]),
        bench.entry(published(2, "f", &content, PublishKind::Final)),
    ];
    assert!(bench.feed(items).await.refused.is_empty());
    assert_eq!(bench.read("f"), content);
    // Shrunk and grown again: what is between is zeros.
    content.truncate(CHUNK_BYTES / 2);
    content.resize(2 * CHUNK_BYTES + 9, 0);
    let op = Op::Created { file: 3, path: b"f".to_vec(), mode: 0o644, base: Base::File(2) };
    let items = vec![
        bench.entry(op),
        chunk(3, 0, 1, &content[..CHUNK_BYTES / 2]),
        chunk(3, 1, 1, &[0]),
        chunk(3, 2, 1, &[0; 9]),
        bench.entry(published(3, "f", &content, PublishKind::Final)),
    ];
    assert!(bench.feed(items).await.refused.is_empty());
    assert_eq!(bench.read("f"), content);
    // The agent may read back what it sent.
    let read = bench.home.result_chunk(&bench.id, OUT, 3, 2).await.unwrap();
    assert_eq!(read.as_ref(), &[0; 9]);
    assert!(bench.home.result_chunk(&bench.id, OUT, 2, 1).await.is_ok(), "replaced, and still open perhaps");
}

#[tokio::test]
async fn a_reader_never_sees_a_torn_file() {
    let mut bench = Bench::new().await;
    let size = 2 * CHUNK_BYTES;
    assert_eq!(bench.put(1, "f", &vec![1; size]).await, 0);
    let (path, stop) = (bench.dest.join("f"), Arc::new(std::sync::atomic::AtomicBool::new(false)));
    let seen = {
        let stop = Arc::clone(&stop);
        tokio::task::spawn_blocking(move || {
            let mut reads = 0;
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let content = std::fs::read(&path).unwrap();
                assert!(content.len() == size && content.iter().all(|&b| b == content[0]), "torn");
                reads += 1;
            }
            reads
        })
    };
    for version in 2..22_u8 {
        assert_eq!(bench.put(version.into(), "f", &vec![version; size]).await, 0);
    }
    stop.store(true, std::sync::atomic::Ordering::Relaxed);
    assert!(seen.await.unwrap() > 0);
}

#[tokio::test]
async fn a_flipped_byte_and_a_missing_file_are_named() {
    let mut bench = Bench::new().await;
    assert_eq!(bench.put(1, "flip", &bytes(100, 1)).await, 0);
    assert_eq!(bench.put(2, "gone", &bytes(100, 2)).await, 0);
    assert_eq!(bench.put(3, "fine", &bytes(100, 3)).await, 0);
    let mut content = bench.read("flip");
    content[50] ^= 4;
    std::fs::write(bench.dest.join("flip"), content).unwrap();
    std::fs::remove_file(bench.dest.join("gone")).unwrap();
    let verified = bench.home.verify(&bench.id.run).await.unwrap();
    assert_eq!(verified.files, 1);
    assert!(matches!(&verified.problems[..], [Problem::Mismatch { path, .. }, Problem::Missing { .. }]
        if path.ends_with("flip")));
}

#[tokio::test]
async fn unfinished_files_are_kept_as_partial_and_the_next_attempt_sees_the_rest() {
    let mut bench = Bench::new().await;
    let big = bytes(CHUNK_BYTES + 10, 1);
    assert_eq!(bench.put(1, "d/ckpt", &big).await, 0);
    assert_eq!(bench.put(2, "d/small", b"small").await, 0);
    assert_eq!(bench.put(3, "d/edited", b"before").await, 0);
    let link = Op::SymlinkMade { path: b"latest".to_vec(), target: b"d/ckpt".to_vec() };
    assert_eq!(bench.apply(link).await, 0);
    let xattr =
        Op::XattrSet { path: b"d/small".to_vec(), name: b"user.k".to_vec(), value: Some(b"v".to_vec()) };
    let kept_xattrs = bench.apply(xattr).await == 0;
    std::fs::write(bench.dest.join("d/edited"), b"after, by the owner").unwrap();
    std::fs::write(bench.dest.join("d/next.partial"), b"from before").unwrap();
    let items = vec![bench.entry(created(4, "d/next")), chunk(4, 0, 1, b"half")];
    bench.feed(items).await;
    let killed = vec![
        bench.entry(created(5, "d/killed")),
        chunk(5, 0, 1, b"cut short, rest"),
        bench.entry(Op::Abandoned { file: 5, keep: true, path: b"d/killed".to_vec(), size: 9 }),
    ];
    bench.feed(killed).await;
    let finished = bench.home.finish(&bench.id).await.unwrap();
    assert_eq!(finished.partials.len(), 2, "{finished:?}");
    assert_eq!(bench.read("d/next.partial.2"), b"half");
    assert_eq!(bench.read("d/killed.partial"), b"cut short");
    assert_eq!(bench.read("d/next.partial"), b"from before");

    let lower = bench.home.lower(&bench.dest).await.unwrap();
    assert_eq!(lower.left_out, ["d/edited"]);
    assert_eq!(lower.files.len(), 2);
    let manifest = &lower.manifest;
    let ckpt = manifest.node(manifest.resolve(b"d/ckpt").unwrap()).unwrap();
    for (data, index) in big.chunks(CHUNK_BYTES).zip(0..) {
        let Some(ChunkRef::Data(id)) = ckpt.chunk(index) else { panic!("no data") };
        assert!(id.verify(Bytes::copy_from_slice(data)).is_ok());
    }
    let link = manifest.node(manifest.resolve(b"latest").unwrap()).unwrap();
    assert_eq!(link.target(), Some(&b"d/ckpt"[..]));
    let small = manifest.node(manifest.resolve(b"d/small").unwrap()).unwrap();
    assert_eq!(small.xattrs().count(), usize::from(kept_xattrs));

    // The next attempt edits a lower file in place and replaces another.
    let next = AttemptId { run: bench.id.run.clone(), attempt: AttemptNumber(2) };
    let begin = OutputBegin { lower: Some(manifest.id()), ..begin(&bench.dest) };
    bench.home.begin(&next, vec![begin]).await.unwrap();
    let inode = manifest.resolve(b"d/ckpt").unwrap().0;
    (bench.journal, _) = bench.home.open_journal(next.clone()).await.unwrap();
    (bench.id, bench.seq) = (next, 0);
    let mut edited = big.clone();
    edited[0] ^= 1;
    let op = Op::Created { file: 1, path: b"d/ckpt".to_vec(), mode: 0o600, base: Base::Lower(inode) };
    let items = vec![
        bench.entry(op),
        chunk(1, 0, 1, &edited[..CHUNK_BYTES]),
        bench.entry(published(1, "d/ckpt", &edited, PublishKind::Final)),
    ];
    assert_eq!(bench.feed(items).await.refused, vec![]);
    assert_eq!(bench.read("d/ckpt"), edited);
    assert_eq!(bench.put(2, "d/small", b"new").await, 0);
    assert!(!tree(&bench.dest).keys().any(|name| name.contains("owner")));
}

#[tokio::test]
async fn a_destination_belongs_to_one_run() {
    let bench = Bench::new().await;
    let other = RunId::random();
    for path in [bench.dest.clone(), bench.dest.join("below"), bench.dir.path().to_owned()] {
        let refused = bench.home.lock_dest(&path, &other).await;
        assert!(matches!(refused, Err(ResultsError::Locked { .. })), "{}", path.display());
    }
    bench.home.lock_dest(&bench.dest, &bench.id.run).await.unwrap();
    bench.home.unlock_dests(&bench.id.run).await.unwrap();
    bench.home.lock_dest(&bench.dest, &other).await.unwrap();
}

/// Needs to mount a small tmpfs; without the right to, there is nothing to test.
#[tokio::test]
async fn a_full_disk_refuses_and_the_old_version_stays() {
    let dir = fast_dir();
    let small = dir.path().join("dest");
    std::fs::create_dir(&small).unwrap();
    let flags = nix::mount::MsFlags::empty();
    if nix::mount::mount(Some("none"), &small, Some("tmpfs"), flags, Some("size=3m")).is_err() {
        return;
    }
    let mut bench = Bench::with(dir, |begin| begin).await;
    let (old, new) = (bytes(CHUNK_BYTES, 1), bytes(3 * CHUNK_BYTES, 2));
    let first = bench.put(1, "f", &old).await;
    let mut items = vec![bench.entry(created(2, "f"))];
    items.extend(chunks(2, 1, &new));
    let acks = bench.feed(items).await;
    let refused = bench.apply(published(2, "f", &new, PublishKind::Final)).await;
    let kept = bench.read("f") == old;
    let drop_it = bench.apply(Op::Abandoned { file: 2, keep: false, path: b"f".to_vec(), size: 0 }).await;
    let again = bench.put(3, "f", &bytes(CHUNK_BYTES, 3)).await;
    drop(bench.home);
    drop(bench.journal);
    nix::mount::umount2(&small, nix::mount::MntFlags::MNT_DETACH).unwrap();
    assert!(acks.chunks_refused.iter().any(|(_, errno)| *errno == Errno::ENOSPC as i32), "{acks:?}");
    assert_eq!((first, refused, kept, drop_it, again), (0, Errno::ENOSPC as i32, true, 0, 0));
}

/// 65 MiB without clones: the part itself takes the name until its last close.
#[tokio::test]
async fn a_large_open_file_is_shown_in_place_and_settles_at_its_close() {
    let mut bench = Bench::new().await;
    let mut content = vec![7; 65 * CHUNK_BYTES + 3];
    for (file, path) in [(1, "closed"), (2, "cut")] {
        content[0] = 7;
        let mut items = vec![bench.entry(created(file, path))];
        items.extend(chunks(file, 1, &content));
        items.push(bench.entry(published(file, path, &content, PublishKind::Snapshot)));
        assert_eq!(bench.feed(items).await.refused, vec![]);
        assert!(bench.read(path) == content);
        content[0] = 8;
        bench.feed(vec![chunk(file, 0, 2, &content[..CHUNK_BYTES])]).await;
    }
    assert_eq!(bench.apply(published(1, "closed", &content, PublishKind::Final)).await, 0);
    assert!(bench.read("closed") == content);
    // The other one was never closed: what stands under its name is not what was published.
    let finished = bench.home.finish(&bench.id).await.unwrap();
    assert_eq!(finished.files, 1 + u64::from(bench.dest.join("cut").exists()));
    if !bench.dest.join("cut").exists() {
        assert!(finished.partials[0].ends_with("cut.partial"), "{finished:?}");
    }
    assert_eq!(bench.home.verify(&bench.id.run).await.unwrap().problems, vec![]);
    assert!(!tree(&bench.dest).keys().any(|name| name.contains("owner")));
}
