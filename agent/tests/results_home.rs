//! The tree beside a plain directory, and home beside both: random calls, over a link that is cut
//! at random places and repeats itself.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/fake_results.rs"]
mod fake_results;

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fake_results::{FakeHome, Reads, Seen};
use limb_agent::link::results::Uplink;
use limb_agent::results::outbox::{Outbox, OutboxSettings, Refusal};
use limb_agent::results::output::{ChangeKind, Output, OutputSettings, Settling};
use limb_agent::results::tree::{AttributesKind, Creation, OpenMode, TreeSettings};
use limb_common::assignment::{Durability, OutputNumber, SetNumber};
use limb_common::chunk::{CHUNK_BYTES, Position, value_of};
use limb_common::id::LeaseEpoch;
use limb_common::manifest::{Manifest, ManifestBuilder, NewNode, NodeMeta};
use nix::errno::Errno;
use proptest::prelude::*;
use tokio_util::sync::CancellationToken;

const HOW: Creation = Creation { mode: 0o644, uid: 0, gid: 0 };
const MIB: u64 = CHUNK_BYTES as u64;

struct Rig {
    home: FakeHome,
    outbox: Arc<Outbox>,
    output: Arc<Output>,
    refusals: Arc<Mutex<Vec<Refusal>>>,
    _settling: Settling,
    _uplink: Uplink,
}

async fn rig(cuts: Vec<usize>, limits: OutboxSettings, lower: Option<(Manifest, Vec<u8>)>) -> Rig {
    let home = FakeHome::new();
    home.0.cuts.lock().unwrap().extend(cuts);
    let refusals: Arc<Mutex<Vec<Refusal>>> = Arc::default();
    let told = Arc::clone(&refusals);
    let stop = CancellationToken::new();
    let outbox =
        Outbox::new(limits, Box::new(move |refusal| told.lock().unwrap().push(refusal)), stop.clone());
    if let Some((manifest, bytes)) = &lower {
        let inode = manifest.resolve(b"old").unwrap();
        for (index, chunk) in bytes.chunks(CHUNK_BYTES).enumerate() {
            home.lower(inode.0, index as u64, chunk);
        }
        home.show(b"old", Seen::File(Arc::new(bytes.clone())));
    }
    let output = Output::new(OutputSettings {
        tree: TreeSettings {
            output: OutputNumber(1),
            lower: lower.map(|(manifest, _)| manifest),
            owner: (0, 0),
            quota_bytes: None,
            quota_inodes: None,
            outbox: Some(Arc::clone(&outbox)),
        },
        durability: Durability::Fsync,
        lower_set: Some(SetNumber(7)),
        source: Arc::new(home.clone()),
        stop,
    });
    let channels = home.serve().await;
    let settling = output.start();
    let uplink = Uplink::start(Arc::clone(&outbox), channels, LeaseEpoch(1));
    Rig { home, outbox, output, refusals, _settling: settling, _uplink: uplink }
}

const WIDE: OutboxSettings = OutboxSettings { dirty_bytes: 256 << 20, clean_bytes: 3 << 20 };

fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
    out
}

fn lower_set() -> (Manifest, Vec<u8>) {
    let bytes = noise(99, 2 * CHUNK_BYTES + 777);
    let size = bytes.len() as u64;
    let chunks = bytes.chunks(CHUNK_BYTES).zip(0..);
    let chunks = chunks.map(|(part, index)| Some(value_of(Position::of(size, index), part))).collect();
    let mut builder = ManifestBuilder::new(NodeMeta { mode: 0o755, ..NodeMeta::default() });
    let meta = NodeMeta { mode: 0o644, ..NodeMeta::default() };
    builder.add(builder.root(), b"old", NewNode::File { size, chunks }, meta).unwrap();
    let (raw, _order) = builder.finish();
    let id = limb_common::id::Digest::of(&raw);
    (Manifest::open(raw, id).unwrap(), bytes)
}

#[derive(Clone, Debug)]
enum Call {
    Open { slot: usize, path: usize, truncate: bool, append: bool },
    Write { slot: usize, at: u64, len: usize },
    Resize { slot: usize, size: u64 },
    Sync { slot: usize },
    Close { slot: usize },
    Rename { from: usize, to: usize },
    Unlink { path: usize },
    MakeDirectory { path: usize },
    RemoveDirectory { path: usize },
    Link { from: usize, to: usize },
    Symlink { path: usize },
    Read { path: usize },
    Settle,
}

const PATHS: [&str; 7] = ["old", "a", "b", "d", "d/a", "d/b", "e"];
const OFFSETS: [u64; 8] = [0, 1, 4096, MIB - 1, MIB, MIB + 1, 2 * MIB, 2 * MIB + 5];
const LENGTHS: [usize; 5] = [1, 4096, 100_000, CHUNK_BYTES, CHUNK_BYTES + 3];

fn call() -> impl Strategy<Value = Call> {
    let path = 0..PATHS.len();
    let slot = 0..2_usize;
    prop_oneof![
        6 => (slot.clone(), path.clone(), any::<bool>(), any::<bool>())
            .prop_map(|(slot, path, truncate, append)| Call::Open { slot, path, truncate, append }),
        8 => (slot.clone(), 0..OFFSETS.len(), 0..LENGTHS.len())
            .prop_map(|(slot, at, len)| Call::Write { slot, at: OFFSETS[at], len: LENGTHS[len] }),
        3 => (slot.clone(), 0..OFFSETS.len()).prop_map(|(slot, at)| Call::Resize { slot, size: OFFSETS[at] }),
        1 => slot.clone().prop_map(|slot| Call::Sync { slot }),
        4 => slot.prop_map(|slot| Call::Close { slot }),
        3 => (path.clone(), path.clone()).prop_map(|(from, to)| Call::Rename { from, to }),
        2 => path.clone().prop_map(|path| Call::Unlink { path }),
        2 => path.clone().prop_map(|path| Call::MakeDirectory { path }),
        1 => path.clone().prop_map(|path| Call::RemoveDirectory { path }),
        1 => (path.clone(), path.clone()).prop_map(|(from, to)| Call::Link { from, to }),
        1 => path.clone().prop_map(|path| Call::Symlink { path }),
        3 => path.prop_map(|path| Call::Read { path }),
        1 => Just(Call::Settle),
    ]
}

/// The same calls, on the tree and on a directory of the machine.
struct Pair {
    rig: Rig,
    plain: tempfile::TempDir,
    slots: [Option<(u64, u64, bool, std::fs::File)>; 3],
    writes: u64,
}

impl Pair {
    fn plain(&self, path: usize) -> PathBuf {
        self.plain.path().join(PATHS[path])
    }

    fn place(&self, path: usize) -> Result<(u64, &'static [u8]), Errno> {
        let (parent, name) = PATHS[path].rsplit_once('/').unwrap_or(("", PATHS[path]));
        if parent.is_empty() {
            return Ok((1, name.as_bytes()));
        }
        let found = self.rig.output.tree().lookup(1, parent.as_bytes())?;
        match found.kind {
            AttributesKind::Directory => Ok((found.inode, name.as_bytes())),
            AttributesKind::File => Err(Errno::ENOTDIR),
            // The links of this test dangle.
            AttributesKind::Symlink => Err(Errno::ENOENT),
        }
    }

    fn open(&self, path: usize, mode: OpenMode) -> Result<(u64, u64), Errno> {
        let (parent, name) = self.place(path)?;
        let mut tree = self.rig.output.tree();
        match tree.lookup(parent, name) {
            Ok(found) => tree.open(found.inode, mode).map(|handle| (found.inode, handle)),
            Err(Errno::ENOENT) => {
                tree.create(parent, name, HOW, mode).map(|(made, handle)| (made.inode, handle))
            }
            Err(error) => Err(error),
        }
    }

    async fn step(&mut self, call: Call) {
        match call {
            Call::Open { slot, path, truncate, append } => {
                self.close(slot);
                let is_link = self.plain(path).is_symlink();
                if is_link {
                    return;
                }
                let mut options = std::fs::OpenOptions::new();
                options.read(true).write(true).create(true).truncate(truncate);
                if append {
                    options.custom_flags(libc::O_APPEND);
                }
                let file = options.open(self.plain(path));
                let ours = self.open(path, OpenMode { write: true, append, truncate });
                assert_eq!(file.is_ok(), ours.is_ok(), "{call:?} {file:?} {ours:?}");
                if let (Ok(file), Ok((inode, handle))) = (file, ours) {
                    self.slots[slot] = Some((inode, handle, append, file));
                }
            }
            Call::Write { slot, at, len } => {
                self.writes += 1;
                let data = noise(self.writes, len);
                let Some((inode, _, append, file)) = &mut self.slots[slot] else { return };
                let size = file.metadata().unwrap().len();
                let offset = if *append { size } else { at };
                if size > 4 * MIB {
                    return;
                }
                if *append {
                    file.write_all(&data).unwrap();
                } else {
                    file.write_all_at(&data, offset).unwrap();
                }
                match self.rig.output.write_now(*inode, offset, &data) {
                    Some(done) => done.unwrap(),
                    None => self.rig.output.write(*inode, offset, &data).await.unwrap(),
                }
            }
            Call::Resize { slot, size } => {
                let Some((inode, _, _, file)) = &self.slots[slot] else { return };
                file.set_len(size).unwrap();
                self.rig.output.resize(*inode, size).await.unwrap();
            }
            Call::Sync { slot } => {
                let Some((inode, ..)) = &self.slots[slot] else { return };
                self.rig.output.sync(*inode).await.unwrap();
            }
            Call::Close { slot } => self.close(slot),
            Call::Rename { from, to } => {
                let plain = std::fs::rename(self.plain(from), self.plain(to));
                let ours = self.place(from).and_then(|from| {
                    let to = self.place(to)?;
                    self.rig.output.tree().rename(from, to, false)
                });
                assert_eq!(plain.is_ok(), ours.is_ok(), "{call:?} {plain:?} {ours:?}");
            }
            Call::Unlink { path } => {
                let plain = std::fs::remove_file(self.plain(path));
                let ours =
                    self.place(path).and_then(|(parent, name)| self.rig.output.tree().unlink(parent, name));
                assert_eq!(plain.is_ok(), ours.is_ok(), "{call:?} {plain:?} {ours:?}");
            }
            Call::MakeDirectory { path } => {
                let plain = std::fs::create_dir(self.plain(path));
                let ours = self.place(path).and_then(|(parent, name)| {
                    self.rig.output.tree().make_directory(parent, name, Creation { mode: 0o755, ..HOW })
                });
                assert_eq!(plain.is_ok(), ours.is_ok(), "{call:?} {plain:?} {ours:?}");
            }
            Call::RemoveDirectory { path } => {
                let plain = std::fs::remove_dir(self.plain(path));
                let place = self.place(path);
                let ours =
                    place.and_then(|(parent, name)| self.rig.output.tree().remove_directory(parent, name));
                assert_eq!(plain.is_ok(), ours.is_ok(), "{call:?} {plain:?} {ours:?}");
            }
            Call::Link { from, to } => {
                let plain = std::fs::hard_link(self.plain(from), self.plain(to));
                let ours = self.place(from).and_then(|(parent, name)| {
                    let to = self.place(to)?;
                    let mut tree = self.rig.output.tree();
                    let found = tree.lookup(parent, name)?;
                    tree.link(found.inode, to.0, to.1)
                });
                assert_eq!(plain.is_ok(), ours.is_ok(), "{call:?} {plain:?} {ours:?}");
            }
            Call::Symlink { path } => {
                let plain = std::os::unix::fs::symlink("nowhere", self.plain(path));
                let ours = self.place(path).and_then(|(parent, name)| {
                    self.rig.output.tree().make_symlink(parent, name, b"nowhere", HOW)
                });
                assert_eq!(plain.is_ok(), ours.is_ok(), "{call:?} {plain:?} {ours:?}");
            }
            Call::Read { path } => self.compare(path).await,
            Call::Settle => self.rig.output.tree().seal_everything(),
        }
        self.compare_slots();
    }

    fn compare_slots(&self) {
        for slot in 0..self.slots.len() {
            let Some((inode, _, _, file)) = &self.slots[slot] else { continue };
            let size = file.metadata().unwrap().len();
            assert_eq!(self.rig.output.tree().attributes(*inode).unwrap().size, size);
        }
    }

    async fn compare(&self, path: usize) {
        let plain = self.plain(path);
        if !plain.is_file() || plain.is_symlink() {
            return;
        }
        let wanted = std::fs::read(&plain).unwrap();
        let (parent, name) = self.place(path).unwrap();
        let found = self.rig.output.tree().lookup(parent, name).unwrap();
        let got = self.rig.output.read(found.inode, 0, wanted.len() + 10).await.unwrap();
        assert!(got == wanted, "{} reads otherwise ({} and {})", PATHS[path], got.len(), wanted.len());
    }

    fn close(&mut self, slot: usize) {
        if let Some((_, handle, _, file)) = self.slots[slot].take() {
            drop(file);
            self.rig.output.tree().release(handle).unwrap();
        }
    }
}

fn walk(root: &Path, under: &Path, out: &mut BTreeMap<Vec<u8>, Seen>) {
    for entry in std::fs::read_dir(under).unwrap() {
        let path = entry.unwrap().path();
        let name = path.strip_prefix(root).unwrap().to_str().unwrap().as_bytes().to_vec();
        let kind = std::fs::symlink_metadata(&path).unwrap().file_type();
        if kind.is_symlink() {
            out.insert(name, Seen::Symlink(b"nowhere".to_vec()));
        } else if kind.is_dir() {
            out.insert(name, Seen::Directory);
            walk(root, &path, out);
        } else {
            let mut bytes = Vec::new();
            std::fs::File::open(&path).unwrap().read_to_end(&mut bytes).unwrap();
            out.insert(name, Seen::File(Arc::new(bytes)));
        }
    }
}

async fn run_calls(calls: Vec<Call>, cuts: Vec<usize>) {
    let lower = lower_set();
    let plain = tempfile::tempdir().unwrap();
    std::fs::write(plain.path().join("old"), &lower.1).unwrap();
    let rig = rig(cuts, WIDE, Some(lower)).await;
    let mut pair = Pair { rig, plain, slots: [None, None, None], writes: 0 };
    let open = |slot, path| Call::Open { slot, path, truncate: false, append: false };
    for call in [open(0, 0), open(1, 1)].into_iter().chain(calls) {
        pair.step(call).await;
    }
    for path in 0..PATHS.len() {
        pair.compare(path).await;
    }
    for slot in 0..3 {
        pair.close(slot);
    }
    let report = pair.rig.outbox.drain(Duration::from_secs(30)).await;
    let shelf = pair.rig.home.0.shelf.lock().unwrap();
    assert_eq!(shelf.offences, Vec::<String>::new());
    assert_eq!(*pair.rig.refusals.lock().unwrap(), Vec::new());
    assert!(report.complete, "{report:?}");
    let mut wanted = BTreeMap::new();
    walk(pair.plain.path(), pair.plain.path(), &mut wanted);
    let brief = |tree: &BTreeMap<Vec<u8>, Seen>| {
        tree.iter()
            .map(|(path, seen)| {
                (
                    String::from_utf8_lossy(path).into_owned(),
                    match seen {
                        Seen::File(bytes) => {
                            format!("{} {}", bytes.len(), limb_common::id::Digest::of(bytes))
                        }
                        other => format!("{other:?}"),
                    },
                )
            })
            .collect::<Vec<_>>()
    };
    assert_eq!(brief(&shelf.visible), brief(&wanted), "home differs");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, max_shrink_iters: 200, ..ProptestConfig::default() })]
    #[test]
    fn tree_and_home_are_what_a_plain_directory_is(
        calls in prop::collection::vec(call(), 1..40),
        cuts in prop::collection::vec(1..12_usize, 0..6),
    ) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        runtime.block_on(async { Box::pin(run_calls(calls, cuts)).await });
    }
}

async fn write_file(output: &Output, name: &[u8], bytes: &[u8]) -> (u64, u64) {
    let mode = OpenMode { write: true, ..OpenMode::default() };
    let (made, handle) = output.tree().create(1, name, HOW, mode).unwrap();
    output.write(made.inode, 0, bytes).await.unwrap();
    (made.inode, handle)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_publish_is_an_error_of_that_file_only() {
    let rig = rig(vec![3, 2], WIDE, None).await;
    rig.home.0.refuse.lock().unwrap().insert(b"bad".to_vec(), libc::EDQUOT);
    let (bad, bad_handle) = write_file(&rig.output, b"bad", b"xyz").await;
    let (good, good_handle) = write_file(&rig.output, b"good", b"xyz").await;
    assert_eq!(rig.output.sync(bad).await, Err(Errno::EDQUOT));
    assert_eq!(rig.output.sync(good).await, Ok(()));
    assert_eq!(rig.output.flush(bad, false).await, Err(Errno::EDQUOT));
    rig.output.tree().release(bad_handle).unwrap();
    rig.output.tree().release(good_handle).unwrap();
    assert!(!rig.outbox.drain(Duration::from_secs(10)).await.complete);
    let refusals = rig.refusals.lock().unwrap();
    assert_eq!((refusals[0].path.as_slice(), refusals[0].errno), (&b"bad"[..], libc::EDQUOT));
}

/// A job that finds the disk full, removes its file and goes on has lost nothing.
#[tokio::test(flavor = "multi_thread")]
async fn a_refused_file_that_the_job_removes_is_no_loss() {
    let rig = rig(Vec::new(), WIDE, None).await;
    rig.home.0.refuse.lock().unwrap().insert(b"bad".to_vec(), libc::ENOSPC);
    let (bad, handle) = write_file(&rig.output, b"bad", b"xyz").await;
    assert_eq!(rig.output.sync(bad).await, Err(Errno::ENOSPC));
    rig.output.tree().release(handle).unwrap();
    rig.home.0.refuse.lock().unwrap().clear();
    rig.output.tree().unlink(1, b"bad").unwrap();
    assert!(rig.outbox.drain(Duration::from_secs(10)).await.complete);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_that_runs_out_of_time_names_what_is_not_home() {
    let rig = rig(Vec::new(), WIDE, None).await;
    rig.home.0.held.send_replace(true);
    let (_, handle) = write_file(&rig.output, b"late", &noise(1, 3 * CHUNK_BYTES)).await;
    rig.output.tree().release(handle).unwrap();
    let report = rig.outbox.drain(Duration::from_millis(100)).await;
    assert!(!report.complete);
    assert_eq!(report.unsaved, ["late"]);
    rig.home.0.held.send_replace(false);
    assert!(rig.outbox.drain(Duration::from_secs(10)).await.complete);
}

#[tokio::test(flavor = "multi_thread")]
async fn after_the_fence_half_a_file_is_kept_as_partial_and_never_shown() {
    let rig = rig(vec![2], WIDE, None).await;
    let bytes = noise(5, 2 * CHUNK_BYTES + 9);
    let (_, closed) = write_file(&rig.output, b"half", &bytes).await;
    let (_, whole) = write_file(&rig.output, b"whole", b"all of it").await;
    write_file(&rig.output, b"open", b"still").await;
    rig.output.tree().release(whole).unwrap();
    rig.output.fence();
    rig.output.tree().release(closed).unwrap();
    rig.output.abandon_open();
    let report = rig.outbox.drain(Duration::from_secs(10)).await;
    assert!(report.complete);
    assert_eq!(report.unsaved, ["half (kept as .partial)", "open (kept as .partial)"]);
    let shelf = rig.home.0.shelf.lock().unwrap();
    assert_eq!(shelf.visible.keys().collect::<Vec<_>>(), [b"whole"]);
    assert_eq!(shelf.partial[&b"half"[..]], bytes);
    assert_eq!(shelf.partial[&b"open"[..]], b"still");
}

/// What a job should do when it is told to stop.
#[tokio::test(flavor = "multi_thread")]
async fn after_the_fence_what_is_synced_and_renamed_is_still_shown() {
    let rig = rig(Vec::new(), WIDE, None).await;
    rig.output.fence();
    let (inode, handle) = write_file(&rig.output, b"ckpt.tmp", b"all of it").await;
    assert_eq!(rig.output.sync(inode).await, Ok(()));
    rig.output.tree().release(handle).unwrap();
    rig.output.tree().rename((1, b"ckpt.tmp"), (1, b"ckpt"), false).unwrap();
    let report = rig.outbox.drain(Duration::from_secs(10)).await;
    assert!(report.complete && report.unsaved.is_empty(), "{report:?}");
    let shelf = rig.home.0.shelf.lock().unwrap();
    assert_eq!(shelf.visible.keys().collect::<Vec<_>>(), [b"ckpt"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn names_and_links_that_harm_the_owner_are_refused() {
    let rig = rig(Vec::new(), WIDE, None).await;
    let mut tree = rig.output.tree();
    assert_eq!(tree.make_file(1, b".limb-x", HOW).unwrap_err(), Errno::EPERM);
    assert_eq!(tree.make_file(1, &[b'n'; 256], HOW).unwrap_err(), Errno::ENAMETOOLONG);
    tree.make_file(1, &[b'n'; 255], HOW).unwrap();
    assert_eq!(tree.make_symlink(1, b"l", b"/etc/passwd", HOW).unwrap_err(), Errno::EPERM);
    assert_eq!(tree.make_symlink(1, b"l", b"../x", HOW).unwrap_err(), Errno::EPERM);
    let d = tree.make_directory(1, b"d", Creation { mode: 0o6755, ..HOW }).unwrap();
    assert_eq!(d.mode, 0o755);
    tree.make_symlink(d.inode, b"up", b"../x", HOW).unwrap();
    assert_eq!(tree.rename((d.inode, b"up"), (1, b"up"), false).unwrap_err(), Errno::EPERM);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_private_tree_sends_nothing_and_lists_its_changes() {
    let (manifest, bytes) = lower_set();
    let home = FakeHome::new();
    let inode = manifest.resolve(b"old").unwrap();
    for (index, chunk) in bytes.chunks(CHUNK_BYTES).enumerate() {
        home.lower(inode.0, index as u64, chunk);
    }
    let output = Output::new(OutputSettings {
        tree: TreeSettings {
            output: OutputNumber(0),
            lower: Some(manifest),
            owner: (5, 5),
            quota_bytes: Some(8 << 20),
            quota_inodes: None,
            outbox: None,
        },
        durability: Durability::None,
        lower_set: Some(SetNumber(1)),
        source: Arc::new(home),
        stop: CancellationToken::new(),
    });
    assert_eq!(output.changes(), Vec::new());
    output.tree().lookup(1, b"old").unwrap();
    assert_eq!(output.changes(), Vec::new());
    output.write(inode.0, 10, b"edit").await.unwrap();
    let (made_inode, handle) = write_file(&output, b"new", b"n").await;
    output.tree().release(handle).unwrap();
    output.sync(made_inode).await.unwrap();
    let listed = output.changes();
    let brief: Vec<_> = listed.iter().map(|change| (change.path.as_slice(), change.kind)).collect();
    assert_eq!(brief, [(&b"new"[..], ChangeKind::Created), (b"old", ChangeKind::Modified)]);
    assert_eq!(&output.read(inode.0, 8, 8).await.unwrap()[2..6], b"edit");
    assert_eq!(output.resize(made_inode, 9 << 20).await, Err(Errno::ENOSPC));
    output.tree().unlink(1, b"old").unwrap();
    assert_eq!(output.changes()[1].kind, ChangeKind::Removed);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_cut_off_does_not_come_back_when_the_file_grows_again() {
    for lower in [false, true] {
        let rig = rig(vec![4], WIDE, lower.then(lower_set)).await;
        let mode = OpenMode { write: true, ..OpenMode::default() };
        let (inode, handle) = if lower {
            let mut tree = rig.output.tree();
            let found = tree.lookup(1, b"old").unwrap();
            (found.inode, tree.open(found.inode, mode).unwrap())
        } else {
            write_file(&rig.output, b"old", &noise(99, 2 * CHUNK_BYTES + 777)).await
        };
        rig.output.tree().seal_everything();
        for size in [1, 2 * MIB + 5, MIB + 7, 3 * MIB] {
            rig.output.resize(inode, size).await.unwrap();
        }
        rig.output.write(inode, MIB + 3, b"x").await.unwrap();
        rig.output.tree().release(handle).unwrap();
        assert!(rig.outbox.drain(Duration::from_secs(10)).await.complete);
        let mut wanted = vec![0; 3 * CHUNK_BYTES];
        wanted[0] = noise(99, 1)[0];
        wanted[CHUNK_BYTES + 3] = b'x';
        assert!(*rig.home.file("old").unwrap() == wanted);
        assert!(rig.output.read(inode, 0, 4 * CHUNK_BYTES).await.unwrap() == wanted);
    }
}

/// Home keeps one state of a chunk. Who asks late for the one before is no victim of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_reader_that_a_writer_overtakes_gets_what_was_written() {
    let rig = rig(Vec::new(), OutboxSettings { dirty_bytes: 64 << 20, clean_bytes: 0 }, None).await;
    let (inode, handle) = write_file(&rig.output, b"f", &noise(1, 2 * CHUNK_BYTES + 5)).await;
    rig.output.sync(inode).await.unwrap();
    rig.home.0.reads.send_replace(Reads::Held);
    let new = noise(2, 2 * CHUNK_BYTES);
    let overtaking = async {
        rig.home.0.read_asks.subscribe().wait_for(|asks| *asks == 1).await.unwrap();
        rig.output.write(inode, 0, &new).await.unwrap();
        rig.output.sync(inode).await.unwrap();
        rig.home.0.reads.send_replace(Reads::Served);
    };
    let (got, ()) = tokio::join!(rig.output.read(inode, MIB - 9, 100), overtaking);
    assert!(got.unwrap() == new[CHUNK_BYTES - 9..CHUNK_BYTES + 91]);
    rig.output.tree().release(handle).unwrap();
}
