//! From what the walk found to a manifest: each file is read once, on all cores, and what must
//! not change under a run is copied on the way.
//!
//! A file is read between two looks at its identity; one that changed meanwhile is read again.

use std::collections::{BTreeMap, HashSet};
use std::fs::{File, Metadata};
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use limb_common::chunk::{
    CHUNK_BYTES, CHUNK_BYTES_U64, Position, chunk_count, chunk_len, merge_root, value_of,
};
use limb_common::clock::{BootInstant, boottime, unix_ms};
use limb_common::id::Digest;
use limb_common::manifest::{Draft, Manifest, ManifestBuilder, NewNode, NodeMeta};
use nix::unistd::{Whence, lseek};

use super::index::{Index, Known, KnownRef, is_racy, order};
use super::sources::{FileIdentity, Source};
use super::store::{Filler, Packer, Pending, Place, Store, Temporary};
use super::threads::{cores, on_threads};
use super::walk::{FoundFile, FoundKind, Walked, Xattrs, xattrs_of};
use super::{COPY_BYTES, Progress, SnapshotError, lock};

/// Times a file that changes is read before its owner is told.
const READS: usize = 4;
/// Files from this size on are read by all cores together, smaller ones side by side.
const SPLIT_BYTES: u64 = 16 << 20;
/// Holes of a file changed more recently are read all the same: file systems have reported data
/// that was not yet allocated on disk as holes (ZFS until 2.2.2).
const TRUST_HOLES_AFTER_NS: i64 = 10_000_000_000;
/// Files that one thread takes at once, to look them up or to read them.
const BATCH: usize = 256;
/// From so many files on to copy they are put into packs, fewer into files of their own.
const PACK_FROM: usize = 64;
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
    content: Option<(Digest, Place)>,
    /// The index does not know it like this, and may.
    learn: bool,
}

struct Freezer<'a> {
    walked: &'a Walked,
    setting: &'a Setting<'a>,
    meter: Meter<'a>,
    /// Packs that were there when this began.
    packs: HashSet<u64>,
    pending: Mutex<Vec<Pending>>,
    pending_contents: Mutex<HashSet<Digest>>,
    /// Devices where a reflink clone was refused.
    no_clones: Mutex<HashSet<u64>>,
    failed: AtomicBool,
}

/// What one thread keeps from file to file.
#[derive(Default)]
struct Hands<'a> {
    buffer: Vec<u8>,
    directory: Option<(usize, OwnedFd)>,
    filler: Option<Filler<'a>>,
}

/// Reads all files and writes the manifest. The sources are in order of inode.
pub(super) fn freeze(
    walked: &Walked,
    setting: &Setting<'_>,
    progress: &(dyn Fn(Progress) + Sync),
) -> Result<(Manifest, Vec<Source>), SnapshotError> {
    let freezer = Freezer {
        walked,
        setting,
        meter: Meter::new(walked, progress),
        packs: setting.store.packs()?,
        pending: Mutex::default(),
        pending_contents: Mutex::default(),
        no_clones: Mutex::default(),
        failed: AtomicBool::new(false),
    };
    let frozen = freezer.all()?;
    setting.store.commit(std::mem::take(&mut *lock(&freezer.pending)))?;
    let (learnt, made) = std::thread::scope(|scope| {
        // Only now: what the index says of the store must be true after a crash too.
        let learning = scope.spawn(|| learn(setting.index, &frozen));
        let made = assemble(walked, &frozen);
        (learning.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), made)
    });
    learnt?;
    freezer.meter.show(true);
    made
}

fn learn(index: &Mutex<Index>, frozen: &[Frozen]) -> Result<(), SnapshotError> {
    let mut learnt: Vec<&Frozen> = frozen.iter().filter(|frozen| frozen.learn).collect();
    learnt.sort_unstable_by_key(|frozen| order(&frozen.identity));
    let rows = learnt.into_iter().map(|Frozen { identity, xattrs, chunks, content, .. }| {
        (*identity, KnownRef { chunks, content: *content, xattrs })
    });
    Ok(lock(index).put(rows)?)
}

fn assemble(walked: &Walked, frozen: &[Frozen]) -> Result<(Manifest, Vec<Source>), SnapshotError> {
    let root = walked.directories.first().map(|root| root.meta.clone()).unwrap_or_default();
    let mut builder = ManifestBuilder::new(root);
    let mut directories = vec![builder.root(); walked.directories.len()];
    let mut of_file: Vec<Option<Draft>> = vec![None; frozen.len()];
    for (number, directory) in walked.directories.iter().enumerate() {
        // Its own draft is there: a directory is numbered when its parent is looked at.
        let parent = directories[number];
        for entry in &directory.entries {
            let name = directory.name_of(entry);
            match &entry.kind {
                FoundKind::Directory(number) => {
                    let meta = walked.directories[*number].meta.clone();
                    directories[*number] = builder.add(parent, name, NewNode::Directory, meta)?;
                }
                FoundKind::Symlink { target, mtime_ns } => {
                    let meta = NodeMeta { mode: 0o777, mtime_ns: *mtime_ns, xattrs: BTreeMap::new() };
                    builder.add(parent, name, NewNode::Symlink { target: target.to_vec() }, meta)?;
                }
                FoundKind::File(file) => {
                    if let Some(first) = of_file[*file] {
                        builder.link(parent, name, first)?;
                    } else {
                        let Frozen { identity, mode, xattrs, chunks, .. } = &frozen[*file];
                        let new = NewNode::File { size: identity.size, chunks: chunks.clone() };
                        let meta =
                            NodeMeta { mode: *mode, mtime_ns: identity.mtime_ns, xattrs: xattrs.clone() };
                        of_file[*file] = Some(builder.add(parent, name, new, meta)?);
                    }
                }
            }
        }
    }
    let (manifest, order) = builder.build();
    let mut sources = vec![Source::Nothing; usize::try_from(manifest.inode_count()).unwrap_or(0)];
    for (file, draft) in of_file.into_iter().enumerate() {
        let Some(draft) = draft else { continue };
        let read = &frozen[file];
        let slot = usize::try_from(order.inode(draft).0 - 1).ok().and_then(|at| sources.get_mut(at));
        if let Some(slot) = slot {
            *slot = match read.content {
                Some((content, place)) => Source::Store(content, place),
                None => Source::InPlace { path: walked.path(&walked.files[file]), identity: read.identity },
            };
        }
    }
    Ok((manifest, sources))
}

impl<'a> Freezer<'a> {
    fn all(&self) -> Result<Vec<Frozen>, SnapshotError> {
        let mut frozen: Vec<Option<Frozen>> = Vec::new();
        frozen.resize_with(self.walked.files.len(), || None);
        for (at, found) in self.known()? {
            frozen[at] = Some(found);
        }
        let unknown: Vec<usize> = (0..frozen.len()).filter(|&at| frozen[at].is_none()).collect();
        for (at, read) in self.read_all(&unknown)? {
            frozen[at] = Some(read);
        }
        Ok(frozen.into_iter().flatten().collect())
    }

    /// The files that are as the index knows them.
    fn known(&self) -> Result<Vec<(usize, Frozen)>, SnapshotError> {
        let files = &self.walked.files;
        let mut sorted: Vec<usize> = (0..files.len()).collect();
        sorted.sort_by_key(|&at| order(&files[at].identity));
        let threads = if files.len() < BATCH { 1 } else { cores() };
        let share = sorted.len().div_ceil(threads).max(1);
        let next = AtomicUsize::new(0);
        let work = || -> Result<Vec<(usize, Frozen)>, SnapshotError> {
            let mine = sorted.chunks(share).nth(next.fetch_add(1, Ordering::Relaxed)).unwrap_or_default();
            let wanted: Vec<_> = mine.iter().map(|&at| files[at].identity).collect();
            let mut found = Vec::with_capacity(mine.len());
            let tell = |at: usize, known| {
                let at = mine[at];
                found.extend(self.unchanged(&files[at], known).map(|frozen| (at, frozen)));
            };
            if threads == 1 {
                lock(self.setting.index).find_sorted(&wanted, tell)?;
            } else {
                let reader = lock(self.setting.index).reader()?;
                reader.find_sorted(&wanted, tell)?;
            }
            let bytes = found.iter().map(|(_, frozen)| frozen.identity.size).sum();
            self.meter.add(found.len(), bytes);
            Ok(found)
        };
        flat(on_threads(threads, &work))
    }

    fn read_all(&self, unknown: &[usize]) -> Result<Vec<(usize, Frozen)>, SnapshotError> {
        let size = |at: usize| self.walked.files[at].identity.size;
        let (large, small): (Vec<usize>, Vec<usize>) =
            unknown.iter().partition(|&&at| size(at) >= SPLIT_BYTES);
        let to_pack = small.iter().filter(|&&at| size(at) <= COPY_BYTES).count();
        let packer = if to_pack >= PACK_FROM { Some(self.setting.store.packer(to_pack)?) } else { None };
        let next = AtomicUsize::new(0);
        let work = || -> Result<Vec<(usize, Frozen)>, SnapshotError> {
            let mut done = Vec::new();
            let mut hands =
                Hands { filler: packer.as_ref().map(|packer| packer.filler()), ..Hands::default() };
            loop {
                let from = next.fetch_add(BATCH, Ordering::Relaxed);
                let Some(batch) = small.get(from..).filter(|rest| !rest.is_empty()) else { break };
                for &at in &batch[..batch.len().min(BATCH)] {
                    if self.failed.load(Ordering::Relaxed) {
                        return Ok(done);
                    }
                    let read = self.file(&self.walked.files[at], 1, &mut hands);
                    done.push((at, read.inspect_err(|_| self.failed.store(true, Ordering::Relaxed))?));
                }
            }
            hands.filler.map_or(Ok(()), Filler::finish)?;
            Ok(done)
        };
        let threads = cores().min(small.len());
        let mut done = flat(on_threads(threads, &work))?;
        packer.map_or(Ok(()), Packer::finish)?;
        for at in large {
            let mut hands = Hands::default();
            done.push((at, self.file(&self.walked.files[at], cores(), &mut hands)?));
        }
        Ok(done)
    }

    fn file(
        &self,
        found: &FoundFile,
        threads: usize,
        hands: &mut Hands<'_>,
    ) -> Result<Frozen, SnapshotError> {
        let unreadable = |source| SnapshotError::Unreadable { path: self.walked.path(found), source };
        for _ in 0..READS {
            if self.setting.cancelled.load(Ordering::Relaxed) {
                return Err(SnapshotError::Cancelled);
            }
            let fd = self
                .walked
                .open_file(found, &mut hands.directory)
                .map_err(|errno| unreadable(errno.into()))?;
            let file = File::from(fd);
            let before = file.metadata().map_err(unreadable)?;
            if !before.is_file() {
                return Err(SnapshotError::Changing { path: self.walked.path(found) });
            }
            let identity = FileIdentity::of(&before);
            let frozen = match hands.filler.as_mut().filter(|_| identity.size <= COPY_BYTES) {
                Some(filler) => self.read_small(&file, &before, &mut hands.buffer, filler, found)?,
                None => self.read(&file, identity, &before, threads, found)?,
            };
            let after = FileIdentity::of(&file.metadata().map_err(unreadable)?);
            let Some(frozen) = frozen.filter(|_| after == identity) else { continue };
            self.meter.add(1, 0);
            return Ok(frozen);
        }
        Err(SnapshotError::Changing { path: self.walked.path(found) })
    }

    /// A file that goes into a pack. `None`: it changed while it was read.
    fn read_small(
        &self,
        file: &File,
        meta: &Metadata,
        buffer: &mut Vec<u8>,
        filler: &mut Filler<'_>,
        found: &FoundFile,
    ) -> Result<Option<Frozen>, SnapshotError> {
        let (identity, read_at_ns) = (FileIdentity::of(meta), now_ns());
        buffer.resize(usize::try_from(identity.size).unwrap_or(usize::MAX), 0);
        match file.read_exact_at(buffer, 0) {
            Err(error) if error.kind() == std::io::ErrorKind::UnexpectedEof => return Ok(None),
            other => {
                other.map_err(|source| SnapshotError::Unreadable { path: self.walked.path(found), source })?
            }
        }
        let content = Digest::of(buffer);
        let chunk = (!is_zero(buffer)).then_some(content);
        let chunks = if buffer.is_empty() { Vec::new() } else { vec![chunk] };
        let place = filler.put(content, buffer)?;
        self.meter.add(0, identity.size);
        Ok(Some(Frozen {
            identity,
            mode: meta.mode() & 0o7777,
            xattrs: xattrs_of(file),
            chunks,
            content: Some((content, place)),
            learn: !is_racy(&identity, read_at_ns),
        }))
    }

    fn must_copy(&self, size: u64) -> bool {
        self.setting.copy_all || size <= COPY_BYTES
    }

    /// What was read of it earlier, if what was copied of it is still there.
    fn unchanged(&self, found: &FoundFile, known: Known) -> Option<Frozen> {
        let FoundFile { identity, mode, .. } = *found;
        let Known { chunks, content, xattrs } = known;
        let there = content.and_then(|(content, place)| {
            let as_it_was = match place {
                Place::File => self.setting.store.contains(content, identity.size),
                Place::Pack { pack, .. } => self.packs.contains(&pack),
            };
            let place = if as_it_was { Some(place) } else { self.setting.store.find(content, identity.size) };
            place.map(|place| (content, place))
        });
        if there.is_none() && self.must_copy(identity.size) {
            return None;
        }
        Some(Frozen { identity, mode, xattrs, chunks, content: there, learn: there != content })
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
        let read_at_ns = now_ns();
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
                    return Err(SnapshotError::Unreadable { path: self.walked.path(found), source });
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
        let content = match content {
            Some(content) => Some((content, self.store(content, identity.size, target.or(clone), &bytes)?)),
            None => None,
        };
        Ok(Some(Frozen {
            identity,
            mode: meta.mode() & 0o7777,
            xattrs: xattrs_of(file),
            chunks,
            content,
            learn: !is_racy(&identity, read_at_ns),
        }))
    }

    fn store(
        &self,
        content: Digest,
        size: u64,
        written: Option<Temporary>,
        bytes: &[u8],
    ) -> Result<Place, SnapshotError> {
        if let Some(place) = self.setting.store.find(content, size) {
            return Ok(place);
        }
        if !lock(&self.pending_contents).insert(content) {
            return Ok(Place::File);
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
        Ok(Place::File)
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
            let is_zero = is_hole || is_zero(buffer);
            if let Some(to) = self.to
                && !is_zero
            {
                to.file.write_all_at(buffer, at).map_err(|error| PassError::Write(to.failed()(error)))?;
            }
            let value =
                (!is_zero || self.with_content).then(|| value_of(Position::of(self.size, index), buffer));
            let bytes = if self.keep_bytes { buffer.to_vec() } else { Vec::new() };
            parts.push(Part { index, value, is_zero, bytes });
            self.freezer.meter.add(0, u64::from(len));
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

fn flat<T>(parts: Vec<Result<Vec<T>, SnapshotError>>) -> Result<Vec<T>, SnapshotError> {
    parts.into_iter().try_fold(Vec::new(), |mut all, part| {
        all.append(&mut part?);
        Ok(all)
    })
}

fn is_zero(bytes: &[u8]) -> bool {
    bytes.iter().all(|&byte| byte == 0)
}

fn now_ns() -> i64 {
    i64::try_from(unix_ms()).unwrap_or(i64::MAX).saturating_mul(1_000_000)
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

    fn add(&self, files: usize, bytes: u64) {
        self.files.fetch_add(files as u64, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
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
