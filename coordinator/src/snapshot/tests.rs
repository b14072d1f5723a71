//! What was frozen is what is read back, whatever happens to the source.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, PermissionsExt, symlink};

use limb_common::chunk::{CHUNK_BYTES, chunk_len, merge_root};
use limb_common::manifest::{ChunkRef, NodeKind, ROOT};
use proptest::prelude::*;

use super::*;

struct Home {
    dir: tempfile::TempDir,
    snapshots: Snapshots,
    source: PathBuf,
}

impl Home {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        std::fs::create_dir(&source).unwrap();
        let snapshots = Snapshots::open(&dir.path().join("state")).unwrap();
        Self { dir, snapshots, source }
    }

    fn put(&self, name: &str, bytes: &[u8]) -> PathBuf {
        let path = self.source.join(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(&path, bytes).unwrap();
        path
    }

    fn request(&self) -> SnapshotRequest {
        SnapshotRequest {
            source: self.source.clone(),
            class: DataClass::Internal,
            copy_all: false,
            links: LinkPolicy::Keep,
        }
    }

    fn freeze(&self) -> Snapshot {
        self.snapshots.create(&self.request(), |_| {}).unwrap()
    }

    fn freeze_copy(&self) -> Snapshot {
        self.snapshots.create(&SnapshotRequest { copy_all: true, ..self.request() }, |_| {}).unwrap()
    }

    fn read(&self, snapshot: &Snapshot, path: &[u8]) -> Result<Vec<u8>, ReadError> {
        let inode = snapshot.manifest.resolve(path).unwrap();
        read_file(&self.snapshots.reader(snapshot.id).unwrap(), inode)
    }
}

/// The file's bytes through its chunks; also checks that the values merge to the ordinary hash.
fn read_file(loaded: &LoadedSnapshot, inode: Inode) -> Result<Vec<u8>, ReadError> {
    let node = loaded.manifest().node(inode).unwrap();
    let (mut bytes, mut values, mut holes) = (Vec::new(), Vec::new(), false);
    for index in 0..node.chunk_count() {
        match node.chunk(index).unwrap() {
            ChunkRef::Hole { len } => {
                holes = true;
                bytes.resize(bytes.len() + len as usize, 0);
            }
            ChunkRef::Data(id) => {
                values.push(id.hash);
                bytes.extend_from_slice(loaded.read_chunk(inode, index)?.bytes());
            }
        }
    }
    if !holes && let Some(root) = merge_root(&values) {
        assert_eq!(root, Digest::of(&bytes));
    }
    Ok(bytes)
}

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut out = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
    out
}

/// Sets a file's mtime; the ctime moves by itself.
fn set_mtime(path: &Path, mtime_ns: i64) {
    let time = nix::sys::time::TimeSpec::new(mtime_ns / 1_000_000_000, mtime_ns % 1_000_000_000);
    nix::sys::stat::utimensat(
        nix::fcntl::AT_FDCWD,
        path,
        &time,
        &time,
        nix::sys::stat::UtimensatFlags::NoFollowSymlink,
    )
    .unwrap();
}

fn set_xattr(path: &Path, name: &str, value: &[u8]) {
    let path = std::ffi::CString::new(path.as_os_str().as_bytes()).unwrap();
    let name = std::ffi::CString::new(name).unwrap();
    // SAFETY: both strings end with NUL and the value is as long as said.
    let rc = unsafe { libc::setxattr(path.as_ptr(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0) };
    assert_eq!(rc, 0, "{}", std::io::Error::last_os_error());
}

#[test]
fn a_tree_of_every_kind_comes_back_as_it_was() {
    let home = Home::new();
    let odd = std::ffi::OsStr::from_bytes(b"new\nline \xff\xfe");
    std::fs::write(home.source.join(odd), b"odd").unwrap();
    let long = "n".repeat(255);
    home.put(&long, b"long");
    home.put("empty", b"");
    home.put("d/e/big", &noise(3 * CHUNK_BYTES + 17, 1));
    home.put("split", &noise((17 << 20) + 1, 2));
    std::fs::hard_link(home.source.join("d/e/big"), home.source.join("other name")).unwrap();
    symlink("d/e", home.source.join("inside")).unwrap();
    symlink("/etc/passwd", home.source.join("d/absolute")).unwrap();
    symlink("../../x", home.source.join("d/climbs")).unwrap();
    nix::unistd::mkfifo(&home.source.join("fifo"), nix::sys::stat::Mode::S_IRUSR).unwrap();
    let sparse = std::fs::File::create(home.source.join("sparse")).unwrap();
    sparse.set_len(9 << 20).unwrap();
    sparse.write_all_at(b"middle", 5 << 20).unwrap();
    set_xattr(&home.source.join("d"), "user.k", b"v\0v");
    set_xattr(&home.source.join("empty"), "user.e", b"");
    std::fs::set_permissions(home.source.join("empty"), std::fs::Permissions::from_mode(0o4751)).unwrap();
    set_mtime(&home.source.join("empty"), 1_234_567_890_123_456_789);

    for snapshot in [home.freeze(), home.freeze_copy()] {
        let tree = &snapshot.manifest;
        assert_eq!(home.read(&snapshot, odd.as_bytes()).unwrap(), b"odd");
        assert_eq!(home.read(&snapshot, long.as_bytes()).unwrap(), b"long");
        assert_eq!(home.read(&snapshot, b"empty").unwrap(), b"");
        assert_eq!(home.read(&snapshot, b"d/e/big").unwrap(), noise(3 * CHUNK_BYTES + 17, 1));
        assert_eq!(home.read(&snapshot, b"split").unwrap(), noise((17 << 20) + 1, 2));
        assert_eq!(tree.resolve(b"d/e/big"), tree.resolve(b"other name"));
        let sparse = tree.node(tree.resolve(b"sparse").unwrap()).unwrap();
        assert_eq!((sparse.size, sparse.data_bytes()), (9 << 20, 1 << 20));
        assert_eq!(&home.read(&snapshot, b"sparse").unwrap()[5 << 20..(5 << 20) + 6], b"middle");
        let empty = tree.node(tree.resolve(b"empty").unwrap()).unwrap();
        assert_eq!((empty.mode, empty.mtime_ns), (0o751, 1_234_567_890_123_456_789));
        assert_eq!(empty.xattrs().collect::<Vec<_>>(), [(&b"user.e"[..], &b""[..])]);
        let d = tree.node(tree.resolve(b"d").unwrap()).unwrap();
        assert_eq!(d.xattrs().collect::<Vec<_>>(), [(&b"user.k"[..], &b"v\0v"[..])]);
        assert_eq!(tree.node(tree.resolve(b"inside").unwrap()).unwrap().target(), Some(&b"d/e"[..]));
        let outside: Vec<_> = snapshot.outside_links.iter().map(|link| link.path.clone()).collect();
        assert_eq!(outside, [b"d/absolute".to_vec(), b"d/climbs".to_vec()]);
        assert_eq!(snapshot.skipped, [Skipped { path: b"fifo".to_vec(), why: SkipReason::Fifo }]);
        assert_eq!(snapshot.files, 6);
        let again = home.snapshots.load(snapshot.id).unwrap();
        assert_eq!((again.files, again.bytes), (snapshot.files, snapshot.bytes));
        assert_eq!(again.outside_links, snapshot.outside_links);
    }
    assert_eq!(home.freeze().id, home.freeze_copy().id, "where bytes are kept is not identity");
    assert_eq!(home.snapshots.list().unwrap().len(), 1);
}

#[test]
fn one_file_is_a_set_too() {
    let home = Home::new();
    let path = home.put("weights.bin", &noise(100_000, 3));
    let request = SnapshotRequest { source: path, ..home.request() };
    let snapshot = home.snapshots.create(&request, |_| {}).unwrap();
    assert!(snapshot.single_file);
    assert_eq!(home.read(&snapshot, b"weights.bin").unwrap(), noise(100_000, 3));
    assert_eq!(snapshot.manifest.node(ROOT).unwrap().size, 1);
    let missing = SnapshotRequest { source: home.dir.path().join("no"), ..home.request() };
    assert!(matches!(home.snapshots.create(&missing, |_| {}), Err(SnapshotError::Source { .. })));
}

#[test]
fn links_that_leave_are_followed_when_asked_and_loops_end() {
    let home = Home::new();
    let outside = home.dir.path().join("outside");
    std::fs::create_dir_all(outside.join("sub")).unwrap();
    std::fs::write(outside.join("sub/f"), b"from outside").unwrap();
    symlink("sub/f", outside.join("stays")).unwrap();
    symlink(&outside, outside.join("sub/loop")).unwrap();
    symlink(&outside, home.source.join("out")).unwrap();
    symlink(outside.join("sub/f"), home.source.join("file")).unwrap();
    symlink("/no/such/place", home.source.join("dead")).unwrap();
    symlink(&home.source, home.source.join("self")).unwrap();
    let request = SnapshotRequest { links: LinkPolicy::Follow, ..home.request() };
    let snapshot = home.snapshots.create(&request, |_| {}).unwrap();
    assert_eq!(home.read(&snapshot, b"out/sub/f").unwrap(), b"from outside");
    assert_eq!(home.read(&snapshot, b"file").unwrap(), b"from outside");
    let kind = |path: &[u8]| snapshot.manifest.node(snapshot.manifest.resolve(path).unwrap()).unwrap().kind;
    assert_eq!(kind(b"out/stays"), NodeKind::Symlink);
    assert_eq!(kind(b"out/sub/loop"), NodeKind::Symlink);
    assert_eq!(kind(b"self"), NodeKind::Symlink);
    let loops: Vec<_> = snapshot.skipped.iter().map(|skip| (skip.path.as_slice(), skip.why)).collect();
    assert_eq!(loops, [(&b"out/sub/loop"[..], SkipReason::LinkLoop), (b"self", SkipReason::LinkLoop)]);
    assert_eq!(snapshot.outside_links.len(), 1);
}

#[test]
fn homes_own_state_is_no_set_and_no_part_of_one() {
    let home = Home::new();
    let state = home.dir.path().join("state");
    for own in ["ca", "workdir.changes/run"] {
        std::fs::create_dir_all(state.join(own)).unwrap();
    }
    std::fs::write(state.join("ca/key.pem"), b"secret").unwrap();
    std::fs::write(state.join("workdir.changes/run/x"), b"a result").unwrap();
    home.put("fine", b"x");
    let request =
        |source: &Path, links| SnapshotRequest { source: source.to_owned(), links, ..home.request() };
    let refused = |source: &Path, links| {
        let made = home.snapshots.create(&request(source, links), |_| {});
        assert!(matches!(made, Err(SnapshotError::Own { .. })), "{}: {made:?}", source.display());
    };
    // What holds it, what it is, what lies in it, and the same by another name.
    for own in [home.dir.path(), &state, &state.join("ca"), &state.join("ca/key.pem"), &state.join("store")] {
        refused(own, LinkPolicy::Keep);
    }
    let by_name = home.dir.path().join("link");
    std::os::unix::fs::symlink(state.join("ca"), &by_name).unwrap();
    refused(&by_name, LinkPolicy::Keep);
    // A link in the set stays a link, unless it is followed.
    std::os::unix::fs::symlink("../state/ca", home.source.join("ca")).unwrap();
    home.freeze();
    refused(&home.source, LinkPolicy::Follow);
    std::fs::remove_file(home.source.join("ca")).unwrap();
    std::fs::hard_link(state.join("ca/key.pem"), home.source.join("key")).unwrap();
    refused(&home.source, LinkPolicy::Keep);
    std::fs::remove_file(home.source.join("key")).unwrap();
    // What a run left changed is the owner's.
    home.snapshots.create(&request(&state.join("workdir.changes/run"), LinkPolicy::Keep), |_| {}).unwrap();
    let door = home.source.join("door");
    std::fs::create_dir(&door).unwrap();
    let (flags, none) = (nix::mount::MsFlags::MS_BIND, None::<&str>);
    for own in [&state, &state.join("ca")] {
        if nix::mount::mount(Some(own), &door, none, flags, none).is_err() {
            println!("SKIPPED bind mounts in homes_own_state_is_no_set_and_no_part_of_one: may not mount");
            return;
        }
        let made =
            [&home.source, &door].map(|from| home.snapshots.create(&request(from, LinkPolicy::Keep), |_| {}));
        nix::mount::umount2(&door, nix::mount::MntFlags::MNT_DETACH).unwrap();
        assert!(made.iter().all(|made| matches!(made, Err(SnapshotError::Own { .. }))), "{made:?}");
    }
}

#[test]
fn the_stricter_label_wins_and_a_bad_one_is_an_error() {
    let home = Home::new();
    for (text, expected) in [("public\n", DataClass::Internal), ("sealed", DataClass::Sealed)] {
        home.put(CLASS_FILE, text.as_bytes());
        assert_eq!(home.freeze().class, expected);
    }
    home.put(CLASS_FILE, b"secret");
    assert!(matches!(
        home.snapshots.create(&home.request(), |_| {}),
        Err(SnapshotError::BadClass { text, .. }) if text == "secret"
    ));
}

#[test]
fn what_was_copied_is_still_there_after_the_source_changed() {
    let home = Home::new();
    home.put("train.py", b"print(1)");
    home.put("big", &noise(2 * CHUNK_BYTES, 4));
    let workdir = home.freeze_copy();
    home.put("train.py", b"print(2)");
    std::fs::remove_file(home.source.join("big")).unwrap();
    assert_eq!(home.read(&workdir, b"train.py").unwrap(), b"print(1)");
    assert_eq!(home.read(&workdir, b"big").unwrap(), noise(2 * CHUNK_BYTES, 4));
    let difference = home.snapshots.diff(workdir.id, home.freeze_copy().id).unwrap();
    assert_eq!((difference.removed, difference.changed), (vec![b"big".to_vec()], vec![b"train.py".to_vec()]));
}

#[test]
fn a_large_file_that_changed_is_never_served_as_what_it_was() {
    let home = Home::new();
    let original = noise(3 * CHUNK_BYTES, 5);
    let path = home.put("d/weights", &original);
    let mtime = || {
        let meta = path.metadata().unwrap();
        meta.mtime() * 1_000_000_000 + meta.mtime_nsec()
    };
    let changed = |snapshot: &Snapshot| match home.read(snapshot, b"d/weights") {
        Err(ReadError::SourceChanged { path, .. }) => path == b"d/weights",
        _ => false,
    };
    // Same size, times put back.
    let snapshot = home.freeze();
    let then = mtime();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(b"X", (2 << 20) + 5).unwrap();
    set_mtime(&path, then);
    assert!(changed(&snapshot));
    // Put back: the bytes are the frozen ones again, whatever the times say.
    file.write_all_at(&original[(2 << 20) + 5..(2 << 20) + 6], (2 << 20) + 5).unwrap();
    assert_eq!(home.read(&snapshot, b"d/weights").unwrap(), original);
    file.set_len(100).unwrap();
    assert!(changed(&snapshot));
    std::fs::remove_file(&path).unwrap();
    assert!(changed(&snapshot));
    symlink("/etc/passwd", &path).unwrap();
    assert!(changed(&snapshot));
}

#[test]
fn a_file_that_changes_while_it_is_read_is_read_again_or_named() {
    let home = Home::new();
    let path = home.put("busy", &noise(20 << 20, 6));
    let writes = std::sync::atomic::AtomicU64::new(0);
    // Each look at progress changes the file once, up to a limit.
    let run = |limit: u64| {
        writes.store(0, Ordering::Relaxed);
        home.snapshots.create(&home.request(), |progress| {
            if progress.files_done == 0 && writes.fetch_add(1, Ordering::Relaxed) < limit {
                let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
                file.write_all_at(&writes.load(Ordering::Relaxed).to_le_bytes(), 7 << 20).unwrap();
            }
        })
    };
    let snapshot = run(1).unwrap();
    let now = std::fs::read(&path).unwrap();
    assert_eq!(home.read(&snapshot, b"busy").unwrap(), now);
    // A writer that does not stop.
    let (done, (begun, began)) = (AtomicBool::new(false), std::sync::mpsc::channel());
    let frozen = std::thread::scope(|scope| {
        scope.spawn(|| {
            let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
            let mut turn = 0_u64;
            while !done.load(Ordering::Relaxed) {
                turn += 1;
                file.write_all_at(&turn.to_le_bytes(), 7 << 20).unwrap();
                let _once: Result<(), _> = begun.send(());
            }
        });
        began.recv().unwrap();
        let frozen = home.snapshots.create(&home.request(), |_| {});
        done.store(true, Ordering::Relaxed);
        frozen
    });
    assert!(matches!(frozen, Err(SnapshotError::Changing { path: named }) if named == path));
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_hashes_on_for_a_caller_who_has_gone() {
    let home = Home::new();
    home.put("big", &noise(8 << 20, 8));
    let (started, begun) = std::sync::mpsc::channel();
    let (ended, gone) = std::sync::mpsc::channel();
    let gone = Mutex::new(gone);
    let mut making = Box::pin(home.snapshots.create_async(home.request(), move |_| {
        let _: Result<(), _> = started.send(());
        // Until the caller has gone; the later calls find the channel closed.
        let _: Result<(), _> = lock(&gone).recv();
    }));
    assert!(futures_util::poll!(&mut making).is_pending());
    tokio::task::spawn_blocking(move || begun.recv()).await.unwrap().unwrap();
    drop(making);
    drop(ended);
    // A collection waits for what is being made.
    let snapshots = home.snapshots.clone();
    tokio::task::spawn_blocking(move || snapshots.collect(&HashSet::new())).await.unwrap().unwrap();
    assert!(home.snapshots.list().unwrap().is_empty());
}

#[test]
fn a_stored_copy_that_rots_is_noticed() {
    let home = Home::new();
    home.put("f", b"some bytes");
    let snapshot = home.freeze();
    let stored = home.snapshots.inner.store.path(Digest::of(b"some bytes"));
    std::fs::write(&stored, b"some bytez").unwrap();
    assert!(matches!(home.read(&snapshot, b"f"), Err(ReadError::SourceChanged { .. })));
}

#[test]
fn known_hashes_are_reused_only_for_files_that_were_quiet() {
    let home = Home::new();
    let path = home.put("big", &noise(2 * CHUNK_BYTES, 7));
    home.freeze();
    let identity = FileIdentity::of(&path.metadata().unwrap());
    let find = || lock(&home.snapshots.inner.index).find(&identity).unwrap();
    assert_eq!(find(), None, "written a moment ago: its times prove nothing");
    // As if it had been quiet: plant what a reading would have learnt, and a lie beside it.
    let truth = home.freeze();
    let node = truth.manifest.node(truth.manifest.resolve(b"big").unwrap()).unwrap();
    let chunks: Vec<_> = (0..2)
        .map(|index| match node.chunk(index) {
            Some(ChunkRef::Data(id)) => Some(id.hash),
            _ => None,
        })
        .collect();
    let plant = |chunks: Vec<Option<Digest>>| {
        let known = index::KnownRef { chunks: &chunks, content: None, xattrs: &BTreeMap::new() };
        lock(&home.snapshots.inner.index).put(std::iter::once((identity, known))).unwrap();
    };
    plant(chunks.clone());
    assert_eq!(home.freeze().id, truth.id);
    plant(vec![Some(Digest([1; 32])), chunks[1]]);
    let lie = home.freeze();
    assert_ne!(lie.id, truth.id, "the index was used");
    // A workdir is copied, so it is read whatever the index says.
    assert_eq!(home.freeze_copy().id, truth.id);
    // Served, the lie is found out, and forgotten.
    plant(vec![Some(Digest([1; 32])), chunks[1]]);
    assert!(matches!(home.read(&lie, b"big"), Err(ReadError::SourceChanged { .. })));
    assert_eq!(find(), None);
    assert_eq!(home.freeze().id, truth.id);
}

#[test]
fn collecting_keeps_what_a_kept_snapshot_needs() {
    let home = Home::new();
    home.put("both", b"shared");
    let old = home.freeze();
    home.put("new", b"only in the second");
    let new = home.freeze();
    let (snapshots, _) = home.snapshots.collect(&HashSet::from([old.id])).unwrap();
    assert_eq!(snapshots, 1);
    assert_eq!(home.read(&old, b"both").unwrap(), b"shared");
    assert!(matches!(home.snapshots.load(new.id), Err(SnapshotError::NotFound(_))));
    assert!(!home.snapshots.inner.store.contains(Digest::of(b"only in the second"), 18));
}

#[test]
fn many_small_files_are_frozen_whole() {
    let home = Home::new();
    for directory in 0..10 {
        let path = home.source.join(format!("d{directory}"));
        std::fs::create_dir(&path).unwrap();
        for file in 0..500 {
            std::fs::write(path.join(file.to_string()), format!("{directory} {file}")).unwrap();
        }
    }
    let snapshot = home.freeze();
    assert_eq!(snapshot.files, 5_000);
    assert_eq!(home.read(&snapshot, b"d9/499").unwrap(), b"9 499");
    assert!(std::fs::read_dir(home.dir.path().join("state/store/incoming")).unwrap().next().is_none());
}

impl Home {
    /// More small files than a few: they go into packs.
    fn put_many(&self, directory: &str, count: u32) {
        std::fs::create_dir_all(self.source.join(directory)).unwrap();
        for file in 0..count {
            let path = self.source.join(directory).join(file.to_string());
            std::fs::write(path, format!("{directory} {file}")).unwrap();
        }
    }

    fn packs(&self) -> Vec<PathBuf> {
        let entries = std::fs::read_dir(self.dir.path().join("state/store/packs")).unwrap();
        entries.map(|entry| entry.unwrap().path()).collect()
    }

    /// As another process, or this one after a restart, finds it.
    fn reopened(&self) -> Snapshots {
        Snapshots::open(&self.dir.path().join("state")).unwrap()
    }

    /// Files change their times until they prove something.
    fn settle(&self) {
        let quiet = || {
            let (now, mut newest) = (limb_common::clock::unix_ms(), 0);
            let mut pending = vec![self.source.clone()];
            while let Some(path) = pending.pop() {
                let meta = path.symlink_metadata().unwrap();
                newest =
                    newest.max(u64::try_from(meta.ctime() * 1000 + meta.ctime_nsec() / 1_000_000).unwrap());
                if meta.is_dir() {
                    pending.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
                }
            }
            newest + 2_001 < now
        };
        while !quiet() {
            std::thread::yield_now();
        }
    }
}

/// What the manifest of a tree is, said as plainly as can be.
fn plain_manifest(source: &Path) -> Digest {
    use limb_common::manifest::{ManifestBuilder, NewNode, NodeMeta};
    let meta = |path: &Path| {
        let meta = path.symlink_metadata().unwrap();
        let mtime_ns = meta.mtime() * 1_000_000_000 + meta.mtime_nsec();
        NodeMeta { mode: meta.mode() & 0o7777, mtime_ns, xattrs: BTreeMap::new() }
    };
    let mut builder = ManifestBuilder::new(meta(source));
    let mut pending = vec![(source.to_owned(), builder.root())];
    while let Some((directory, parent)) = pending.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let (path, name) = (entry.as_ref().unwrap().path(), entry.unwrap().file_name());
            let (meta, name) = (meta(&path), name.as_bytes());
            if path.is_symlink() {
                let target = std::fs::read_link(&path).unwrap().as_os_str().as_bytes().to_vec();
                builder.add(parent, name, NewNode::Symlink { target }, meta).unwrap();
            } else if path.is_dir() {
                pending.push((path, builder.add(parent, name, NewNode::Directory, meta).unwrap()));
            } else {
                let bytes = std::fs::read(&path).unwrap();
                let chunks = (!bytes.is_empty()).then(|| Some(Digest::of(&bytes))).into_iter().collect();
                let node = NewNode::File { size: bytes.len() as u64, chunks };
                builder.add(parent, name, node, meta).unwrap();
            }
        }
    }
    builder.build().0.id()
}

#[test]
fn many_threads_find_what_one_would_find() {
    let home = Home::new();
    home.put_many("flat", 5_000);
    for directory in 0..40 {
        home.put_many(&format!("tree/{directory}/below"), 3);
        symlink("below/1", home.source.join(format!("tree/{directory}/link"))).unwrap();
    }
    home.put("empty", b"");
    let expected = plain_manifest(&home.source);
    for _ in 0..3 {
        assert_eq!(home.freeze().id, expected);
    }
    assert_eq!(home.snapshots.load(expected).unwrap().files, 5_121);
}

#[test]
fn many_small_files_share_a_pack_and_each_content_is_there_once() {
    let home = Home::new();
    home.put_many("d", 300);
    home.put_many("e", 10);
    for copy in ["copy 1", "copy 2"] {
        home.put(copy, b"d 7");
    }
    home.put("zeros", &[0; 5000]);
    home.put("empty", b"");
    home.put("most", &noise(64 << 10, 1));
    home.put("large", &noise((64 << 10) + 1, 2));
    let snapshot = home.freeze();
    assert_eq!(home.packs().len(), 1);
    let held: u64 = home.packs().iter().map(|pack| pack.metadata().unwrap().blocks() * 512).sum();
    assert!(held < (64 << 10) + 5000 + 313 * (48 + 8) + (12 << 10), "{held}: gaps take nothing");
    let store = &home.snapshots.inner.store;
    assert!(!store.contains(Digest::of(b"d 7"), 3), "no file of its own");
    // The originals go, and so does the process.
    for name in ["d", "e"] {
        std::fs::remove_dir_all(home.source.join(name)).unwrap();
    }
    let loaded = home.reopened().reader(snapshot.id).unwrap();
    let inode = |path: &str| snapshot.manifest.resolve(path.as_bytes()).unwrap();
    for (path, bytes) in [("d/299", &b"d 299"[..]), ("e/0", b"e 0"), ("copy 2", b"d 7"), ("empty", b"")] {
        assert_eq!(read_file(&loaded, inode(path)).unwrap(), bytes);
    }
    assert_eq!(read_file(&loaded, inode("most")).unwrap(), noise(64 << 10, 1));
    let pack = loaded.read_files(&[inode("d/1"), inode("e/9"), inode("most")]);
    assert!(pack.missing.is_empty());
    assert_eq!(&pack.bytes[..6], b"d 1e 9");
    let part = loaded.read_part(inode("most"), 0, &(1..2)).unwrap();
    assert_eq!(part.bytes, noise(64 << 10, 1)[16 << 10..32 << 10]);
    let again = loaded.read_part(inode("most"), 0, &(2..3)).unwrap();
    assert_eq!(again.bytes, noise(64 << 10, 1)[32 << 10..48 << 10]);
    // What is in a pack is not put into another one, nor into a file.
    let [first] = home.packs().try_into().unwrap();
    home.put_many("d", 301);
    home.freeze();
    let [second] =
        home.packs().into_iter().filter(|pack| *pack != first).collect::<Vec<_>>().try_into().unwrap();
    assert!(!store.contains(Digest::of(b"d 7"), 3));
    assert!(second.metadata().unwrap().len() < 200, "the one that is new");
    assert_eq!(home.read(&home.freeze(), b"d/300").unwrap(), b"d 300");
}

#[test]
fn a_damaged_pack_is_noticed_and_one_that_is_cut_is_made_again() {
    let home = Home::new();
    home.put_many("d", 100);
    home.settle();
    let snapshot = home.freeze();
    let [pack] = home.packs().try_into().unwrap();
    let whole = std::fs::read(&pack).unwrap();
    let at = whole.windows(4).position(|bytes| bytes == b"d 77").unwrap();
    let file = std::fs::OpenOptions::new().write(true).open(&pack).unwrap();
    file.write_all_at(b"D", at as u64).unwrap();
    assert!(matches!(home.read(&snapshot, b"d/77"), Err(ReadError::SourceChanged { .. })));
    assert_eq!(home.read(&snapshot, b"d/78").unwrap(), b"d 78");
    file.write_all_at(b"d", at as u64).unwrap();
    assert_eq!(home.read(&snapshot, b"d/77").unwrap(), b"d 77");
    // Nothing changed and all is known: it is not read, but its pack is asked for.
    assert_eq!(home.freeze().id, snapshot.id);
    assert_eq!(home.packs().len(), 1);
    file.set_len(whole.len() as u64 - 1).unwrap();
    assert_eq!(home.freeze().id, snapshot.id);
    assert_eq!(home.packs().len(), 2);
    assert_eq!(home.read(&snapshot, b"d/99").unwrap(), b"d 99");
}

#[test]
fn collecting_moves_what_is_used_of_a_pack_and_removes_the_rest() {
    let home = Home::new();
    home.put_many("d", 100);
    let kept = home.freeze();
    std::fs::remove_dir_all(home.source.join("d")).unwrap();
    home.put_many("e", 100);
    let most = home.freeze();
    home.put_many("d", 5);
    std::fs::remove_dir_all(home.source.join("e")).unwrap();
    home.put_many("e", 90);
    let some = home.freeze();
    assert_eq!(home.packs().len(), 2);
    let reader = home.snapshots.reader(some.id).unwrap();
    // Of the first pack 5 files are used, of the second 90.
    let (gone, freed) = home.snapshots.collect(&HashSet::from([some.id])).unwrap();
    assert_eq!((gone, freed), (2, 90 * 4 + 5 * 3));
    assert_eq!(home.packs().len(), 2);
    for snapshots in [home.snapshots.clone(), home.reopened()] {
        let loaded = snapshots.reader(some.id).unwrap();
        for (path, bytes) in [("d/4", b"d 4"), ("e/0", b"e 0")] {
            let inode = some.manifest.resolve(path.as_bytes()).unwrap();
            assert_eq!(read_file(&loaded, inode).unwrap(), bytes);
        }
    }
    let inode = some.manifest.resolve(b"d/3").unwrap();
    assert_eq!(read_file(&reader, inode).unwrap(), b"d 3", "who had it open finds it where it went");
    for id in [kept.id, most.id] {
        assert!(matches!(home.snapshots.load(id), Err(SnapshotError::NotFound(_))));
    }
    assert_eq!(home.snapshots.collect(&HashSet::new()).unwrap(), (1, 5 * 3 + 100 * 3 + 90));
    assert!(home.packs().is_empty());
}

/// Ten times what the test above does, for its memory: run it by hand.
#[test]
#[ignore = "half a minute"]
fn fifty_thousand_small_files() {
    let home = Home::new();
    for file in 0..50_000_u32 {
        std::fs::write(home.source.join(file.to_string()), file.to_le_bytes()).unwrap();
    }
    let snapshot = home.freeze();
    assert_eq!(snapshot.files, 50_000);
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak_kib: u64 = peak.trim().trim_end_matches(" kB").parse().unwrap();
    assert!(peak_kib < 400 * 1024, "{peak_kib} KiB");
}

fn tree_strategy() -> impl Strategy<Value = BTreeMap<Vec<Vec<u8>>, (usize, u64)>> {
    let name = prop_oneof![
        4 => "[a-c]{1,2}".prop_map(String::into_bytes),
        1 => prop::collection::vec(1_u8..=255, 1..20),
        1 => prop::collection::vec(128_u8..=255, 255),
    ]
    .prop_map(|mut name| {
        name.iter_mut().filter(|byte| **byte == b'/').for_each(|byte| *byte = b'\n');
        if name == b"." || name == b".." { b"dots".to_vec() } else { name }
    });
    let size = prop_oneof![0_usize..200, Just(64 * 1024), Just(64 * 1024 + 1), Just(CHUNK_BYTES + 3)];
    prop::collection::btree_map(prop::collection::vec(name, 1..4), (size, any::<u64>()), 0..12)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    #[test]
    fn any_tree_reads_back(tree in tree_strategy(), copy_all in any::<bool>()) {
        let home = Home::new();
        let mut written = BTreeMap::new();
        for (names, (size, seed)) in tree {
            let mut path = home.source.clone();
            names.iter().for_each(|name| path.push(std::ffi::OsStr::from_bytes(name)));
            // A name may be a file in one path and a directory in another: the first wins.
            if std::fs::create_dir_all(path.parent().unwrap()).is_ok()
                && !path.exists()
                && std::fs::write(&path, noise(size, seed)).is_ok()
            {
                written.insert(names.join(&b'/'), (size, seed));
            }
        }
        let snapshot = home.snapshots
            .create(&SnapshotRequest { copy_all, ..home.request() }, |_| {})
            .unwrap();
        prop_assert_eq!(snapshot.files, written.len() as u64);
        let loaded = home.snapshots.reader(snapshot.id).unwrap();
        for (path, (size, seed)) in written {
            let inode = snapshot.manifest.resolve(&path).unwrap();
            let node = snapshot.manifest.node(inode).unwrap();
            prop_assert_eq!(chunk_len(node.size, 0) as usize, size.min(CHUNK_BYTES));
            prop_assert_eq!(loaded.path_of(inode), path);
            prop_assert_eq!(read_file(&loaded, inode).unwrap(), noise(size, seed));
        }
    }
}
