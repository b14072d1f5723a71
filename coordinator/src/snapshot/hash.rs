//! From what the walk found to a manifest: each file is read once, on all cores, and what must
//! not change under a run is copied on the way.
//!
//! A file is read between two looks at its identity; one that changed meanwhile is read again.

use std::collections::HashSet;
use std::fs::{File, Metadata};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use limb_common::chunk::{
    CHUNK_BYTES, CHUNK_BYTES_U64, Position, chunk_count, chunk_len, merge_root, value_of,
};
use limb_common::clock::{BootInstant, boottime, unix_ms};
use limb_common::id::Digest;
use limb_common::manifest::{Draft, Manifest, ManifestBuilder, NewNode};
use nix::fcntl::OFlag;
use nix::unistd::{Whence, lseek};

use super::index::{Index, Known, is_racy};
use super::sources::{FileIdentity, Source};
use super::store::{Pending, Store, Temporary};
use super::walk::{FoundFile, FoundKind, Walked, Xattrs, open_path, xattrs_of};
use super::{COPY_BYTES, Progress, SnapshotError, lock};

/// Times a file that changes is read before its owner is told.
const READS: usize = 4;
/// Files from this size on are read by all cores together, smaller ones side by side.
const SPLIT_BYTES: u64 = 16 << 20;
/// Holes of a file changed more recently are read all the same: file systems have reported data
/// that was not yet allocated on disk as holes (ZFS until 2.2.2).
const TRUST_HOLES_AFTER_NS: i64 = 10_000_000_000;
/// Files looked up in the index at once.
const LOOKUPS: usize = 256;
const PROGRESS_EVERY: Duration = Duration::from_millis(100);

pub(super) struct Setting<'a> {
    pub(super) store: &'a Store,
    pub(super) index: &'a Mutex<Index>,
    pub(super) copy_all: bool,
    pub(super) cancelled: &'a AtomicBool,
}

/// One file, read.
struct Frozen {
    identity: FileIdentity,
    mode: u32,
    xattrs: Xattrs,
    chunks: Vec<Option<Digest>>,
    /// The whole's hash, when the store has it.
    content: Option<Digest>,
}

struct Freezer<'a> {
    setting: &'a Setting<'a>,
    meter: Meter<'a>,
    pending: Mutex<Vec<Pending>>,
    pending_contents: Mutex<HashSet<Digest>>,
    learnt: Mutex<Vec<(FileIdentity, Known)>>,
    /// Devices where a reflink clone was refused.
    no_clones: Mutex<HashSet<u64>>,
}

/// Reads all files and writes the manifest. The sources are in order of inode.
pub(super) fn freeze(
    walked: &Walked,
    setting: &Setting<'_>,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<(Manifest, Vec<Source>), SnapshotError> {
    let freezer = Freezer {
        setting,
        meter: Meter::new(walked, progress),
        pending: Mutex::default(),
        pending_contents: Mutex::default(),
        learnt: Mutex::default(),
        no_clones: Mutex::default(),
    };
    let frozen = freezer.all(&walked.files)?;
    setting.store.commit(std::mem::take(&mut *lock(&freezer.pending)))?;
    // Only now: what the index says of the store must be true after a crash too.
    lock(setting.index).put(&lock(&freezer.learnt))?;
    freezer.meter.show(true);
    assemble(walked, &frozen)
}

fn assemble(walked: &Walked, frozen: &[Frozen]) -> Result<(Manifest, Vec<Source>), SnapshotError> {
    let root = walked.nodes.first().map(|node| node.meta.clone()).unwrap_or_default();
    let mut builder = ManifestBuilder::new(root);
    let mut drafts: Vec<Draft> = vec![builder.root()];
    let mut of_file: Vec<Option<Draft>> = vec![None; frozen.len()];
    for node in walked.nodes.iter().skip(1) {
        // A parent is always found before what is in it.
        let parent = drafts[node.parent];
        let mut meta = node.meta.clone();
        let draft = match &node.kind {
            FoundKind::Directory => builder.add(parent, &node.name, NewNode::Directory, meta)?,
            FoundKind::Symlink(target) => {
                builder.add(parent, &node.name, NewNode::Symlink { target: target.clone() }, meta)?
            }
            FoundKind::File(file) => {
                if let Some(first) = of_file[*file] {
                    builder.link(parent, &node.name, first)?;
                    first
                } else {
                    let read = &frozen[*file];
                    (meta.mode, meta.mtime_ns) = (read.mode, read.identity.mtime_ns);
                    meta.xattrs.clone_from(&read.xattrs);
                    let new = NewNode::File { size: read.identity.size, chunks: read.chunks.clone() };
                    let draft = builder.add(parent, &node.name, new, meta)?;
                    of_file[*file] = Some(draft);
                    draft
                }
            }
        };
        drafts.push(draft);
    }
    let (manifest, order) = builder.build();
    let mut sources = vec![Source::Nothing; usize::try_from(manifest.inode_count()).unwrap_or(0)];
    for (file, draft) in of_file.into_iter().enumerate() {
        let Some(draft) = draft else { continue };
        let read = &frozen[file];
        let slot = usize::try_from(order.inode(draft).0 - 1).ok().and_then(|at| sources.get_mut(at));
        if let Some(slot) = slot {
            *slot = match read.content {
                Some(content) => Source::Store(content),
                None => Source::InPlace { path: walked.files[file].path.clone(), identity: read.identity },
            };
        }
    }
    Ok((manifest, sources))
}

impl Freezer<'_> {
    fn all(&self, files: &[FoundFile]) -> Result<Vec<Frozen>, SnapshotError> {
        let (large, small): (Vec<_>, Vec<_>) =
            (0..files.len()).partition(|&at| files[at].identity.size >= SPLIT_BYTES);
        let mut done: Vec<(usize, Frozen)> = Vec::with_capacity(files.len());
        let (next, failed) = (AtomicUsize::new(0), AtomicBool::new(false));
        let work = || -> Result<Vec<(usize, Frozen)>, SnapshotError> {
            let mut mine = Vec::new();
            loop {
                let from = next.fetch_add(LOOKUPS, Ordering::Relaxed);
                let Some(batch) = small.get(from..).filter(|rest| !rest.is_empty()) else { return Ok(mine) };
                let batch = &batch[..batch.len().min(LOOKUPS)];
                let known = lock(self.setting.index).find_all(batch.iter().map(|&at| files[at].identity))?;
                for (&at, known) in batch.iter().zip(known) {
                    if failed.load(Ordering::Relaxed) {
                        return Ok(mine);
                    }
                    let read = self.file(&files[at], known, 1);
                    mine.push((at, read.inspect_err(|_| failed.store(true, Ordering::Relaxed))?));
                }
            }
        };
        for part in on_threads(cores().min(small.len()), &work) {
            done.extend(part?);
        }
        for at in large {
            let known = lock(self.setting.index).find(&files[at].identity)?;
            done.push((at, self.file(&files[at], known, cores())?));
        }
        done.sort_by_key(|&(at, _)| at);
        Ok(done.into_iter().map(|(_, frozen)| frozen).collect())
    }

    fn file(&self, found: &FoundFile, known: Option<Known>, threads: usize) -> Result<Frozen, SnapshotError> {
        if let Some(frozen) = known.and_then(|known| self.unchanged(found, known)) {
            self.meter.bytes(frozen.identity.size);
            self.meter.file();
            return Ok(frozen);
        }
        let path = &found.path;
        for _ in 0..READS {
            if self.setting.cancelled.load(Ordering::Relaxed) {
                return Err(SnapshotError::Cancelled);
            }
            let unreadable = |source| SnapshotError::Unreadable { path: path.clone(), source };
            let fd = open_path(path, OFlag::O_RDONLY | OFlag::O_NONBLOCK)
                .map_err(|errno| unreadable(errno.into()))?;
            let file = File::from(fd);
            let before = file.metadata().map_err(unreadable)?;
            if !before.is_file() {
                return Err(SnapshotError::Changing { path: path.clone() });
            }
            let identity = FileIdentity::of(&before);
            let frozen = self.read(&file, identity, &before, threads, found)?;
            let after = FileIdentity::of(&file.metadata().map_err(unreadable)?);
            let Some(frozen) = frozen.filter(|_| after == identity) else { continue };
            self.meter.file();
            return Ok(frozen);
        }
        Err(SnapshotError::Changing { path: path.clone() })
    }

    fn must_copy(&self, size: u64) -> bool {
        self.setting.copy_all || size <= COPY_BYTES
    }

    /// What was read of it earlier, if the walk found it as it was then.
    fn unchanged(&self, found: &FoundFile, known: Known) -> Option<Frozen> {
        if self.setting.cancelled.load(Ordering::Relaxed) {
            return None;
        }
        let FoundFile { identity, mode, .. } = *found;
        let content = known.content.filter(|&content| self.setting.store.contains(content, identity.size));
        if content.is_none() && self.must_copy(identity.size) {
            return None;
        }
        Some(Frozen { identity, mode, xattrs: known.xattrs, chunks: known.chunks, content })
    }

    /// `None`: it changed while it was read.
    fn read(
        &self,
        file: &File,
        identity: FileIdentity,
        meta: &Metadata,
        threads: usize,
        found: &FoundFile,
    ) -> Result<Option<Frozen>, SnapshotError> {
        let read_at_ns = i64::try_from(unix_ms()).unwrap_or(i64::MAX).saturating_mul(1_000_000);
        let one_chunk = identity.size <= CHUNK_BYTES_U64;
        let copy = self.must_copy(identity.size);
        // A file of one chunk is hashed before it is copied, since mostly it is there already.
        let target = if copy && !one_chunk { Some(self.setting.store.temporary()?) } else { None };
        let clone = if copy { None } else { self.clone_of(file, identity.dev) };
        let pass = Pass {
            from: clone.as_ref().map_or(file, |clone| &clone.file),
            to: target.as_ref(),
            size: identity.size,
            trust_holes: identity.mtime_ns.max(identity.ctime_ns) < read_at_ns - TRUST_HOLES_AFTER_NS,
            with_content: copy || clone.is_some(),
            keep_bytes: copy && one_chunk,
            next: AtomicU64::new(0),
            freezer: self,
        };
        let mut parts = Vec::new();
        for part in
            on_threads(threads.min(usize::try_from(chunk_count(identity.size)).unwrap_or(1)).max(1), &|| {
                pass.run()
            })
        {
            match part {
                Ok(Some(part)) => parts.extend(part),
                Ok(None) => return Ok(None),
                Err(PassError::Read(source)) => {
                    return Err(SnapshotError::Unreadable { path: found.path.clone(), source });
                }
                Err(PassError::Write(error)) => return Err(error),
                Err(PassError::Cancelled) => return Err(SnapshotError::Cancelled),
            }
        }
        parts.sort_by_key(|part| part.index);
        let content = pass.with_content.then(|| content_of(&parts)).flatten();
        let bytes = parts.first_mut().map(|part| std::mem::take(&mut part.bytes)).unwrap_or_default();
        let chunks: Vec<_> =
            parts.iter().map(|part| (!part.is_zero).then_some(part.value).flatten()).collect();
        if let Some(content) = content {
            self.store(content, identity.size, target.or(clone), &bytes)?;
        }
        let xattrs = xattrs_of(file);
        if !is_racy(&identity, read_at_ns) {
            let known = Known { chunks: chunks.clone(), content, xattrs: xattrs.clone() };
            lock(&self.learnt).push((identity, known));
        }
        Ok(Some(Frozen { identity, mode: meta.mode() & 0o7777, xattrs, chunks, content }))
    }

    fn store(
        &self,
        content: Digest,
        size: u64,
        written: Option<Temporary>,
        bytes: &[u8],
    ) -> Result<(), SnapshotError> {
        if self.setting.store.contains(content, size) || !lock(&self.pending_contents).insert(content) {
            return Ok(());
        }
        let target = match written {
            Some(target) => target,
            None => {
                let target = self.setting.store.temporary()?;
                target.file.write_all_at(bytes, 0).map_err(target.failed())?;
                target
            }
        };
        target.file.set_len(size).map_err(target.failed())?;
        lock(&self.pending).push(target.named(content));
        Ok(())
    }

    /// A clone that shares the file's blocks and does not change with it; `None` where the file
    /// system cannot.
    fn clone_of(&self, file: &File, dev: u64) -> Option<Temporary> {
        nix::ioctl_write_int!(ficlone, 0x94, 9);
        if lock(&self.no_clones).contains(&dev) {
            return None;
        }
        let target = self.setting.store.temporary().ok()?;
        // SAFETY: FICLONE takes a descriptor as its integer argument; both are open files.
        let cloned = unsafe {
            ficlone(
                target.file.as_raw_fd(),
                u64::from(file.as_raw_fd().cast_unsigned()) as nix::libc::c_ulong,
            )
        };
        if cloned.is_err() {
            lock(&self.no_clones).insert(dev);
            return None;
        }
        Some(target)
    }
}

/// One chunk as it was read.
struct Part {
    index: u64,
    /// Missing only for a hole whose hash nobody needs.
    value: Option<Digest>,
    is_zero: bool,
    bytes: Vec<u8>,
}

enum PassError {
    Read(std::io::Error),
    Write(SnapshotError),
    Cancelled,
}

/// One reading of one file, by one or more threads.
struct Pass<'a> {
    from: &'a File,
    to: Option<&'a Temporary>,
    size: u64,
    trust_holes: bool,
    with_content: bool,
    keep_bytes: bool,
    next: AtomicU64,
    freezer: &'a Freezer<'a>,
}

impl Pass<'_> {
    fn run(&self) -> Result<Option<Vec<Part>>, PassError> {
        let count = chunk_count(self.size);
        let mut parts = Vec::new();
        let mut buffer = vec![0; usize::try_from(self.size).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES)];
        loop {
            let index = self.next.fetch_add(1, Ordering::Relaxed);
            if index >= count {
                return Ok(Some(parts));
            }
            if self.freezer.setting.cancelled.load(Ordering::Relaxed) {
                return Err(PassError::Cancelled);
            }
            let len = chunk_len(self.size, index);
            let buffer = &mut buffer[..len as usize];
            let at = index * CHUNK_BYTES_U64;
            let is_hole = self.trust_holes && self.is_hole(at, at + u64::from(len));
            if is_hole {
                buffer.fill(0);
            } else if let Err(error) = self.from.read_exact_at(buffer, at) {
                // Shorter than it was a moment ago.
                return match error.kind() {
                    std::io::ErrorKind::UnexpectedEof => Ok(None),
                    _ => Err(PassError::Read(error)),
                };
            }
            let is_zero = is_hole || buffer.iter().all(|&byte| byte == 0);
            if let Some(to) = self.to
                && !is_zero
            {
                to.file.write_all_at(buffer, at).map_err(|error| PassError::Write(to.failed()(error)))?;
            }
            let value =
                (!is_zero || self.with_content).then(|| value_of(Position::of(self.size, index), buffer));
            let bytes = if self.keep_bytes { buffer.to_vec() } else { Vec::new() };
            parts.push(Part { index, value, is_zero, bytes });
            self.freezer.meter.bytes(u64::from(len));
        }
    }

    fn is_hole(&self, start: u64, end: u64) -> bool {
        let Ok(from) = i64::try_from(start) else { return false };
        match lseek(self.from, from, Whence::SeekData) {
            Ok(data) => u64::try_from(data).is_ok_and(|data| data >= end),
            // Nothing but a hole up to the end of the file.
            Err(nix::errno::Errno::ENXIO) => true,
            Err(_) => false,
        }
    }
}

fn content_of(parts: &[Part]) -> Option<Digest> {
    match parts {
        [] => Some(Digest::of(b"")),
        [only] => only.value,
        many => merge_root(&many.iter().map(|part| part.value).collect::<Option<Vec<_>>>()?),
    }
}

fn cores() -> usize {
    std::thread::available_parallelism().map_or(1, std::num::NonZero::get)
}

/// Runs `work` on this many threads and gives back what each returned.
fn on_threads<T: Send>(threads: usize, work: &(impl Fn() -> T + Sync)) -> Vec<T> {
    if threads <= 1 {
        return vec![work()];
    }
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        running
            .into_iter()
            .map(|thread| thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    })
}

/// Counts, and says so at most ten times a second.
struct Meter<'a> {
    files: AtomicU64,
    bytes: AtomicU64,
    total: u64,
    shown: Mutex<Option<BootInstant>>,
    say: &'a (dyn Fn(Progress) + Sync),
}

impl<'a> Meter<'a> {
    fn new(walked: &Walked, say: &'a (dyn Fn(Progress) + Sync)) -> Self {
        let total = walked.files.iter().map(|file| file.identity.size).sum();
        Self { files: AtomicU64::new(0), bytes: AtomicU64::new(0), total, shown: Mutex::default(), say }
    }

    fn bytes(&self, bytes: u64) {
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        self.show(false);
    }

    fn file(&self) {
        self.files.fetch_add(1, Ordering::Relaxed);
        self.show(false);
    }

    fn show(&self, always: bool) {
        let now = boottime();
        {
            let mut shown = lock(&self.shown);
            if !always && shown.is_some_and(|then| now.saturating_since(then) < PROGRESS_EVERY) {
                return;
            }
            *shown = Some(now);
        }
        (self.say)(Progress {
            files_done: self.files.load(Ordering::Relaxed),
            // A file that is read again is counted again.
            bytes_done: self.bytes.load(Ordering::Relaxed).min(self.total),
            bytes_total: self.total,
        });
    }
}
