//! One pass over a source, on all cores: names, metadata, links, hard links; no content.
//!
//! Directories, and pieces of large ones, wait in one queue (last in, first out: few are open at
//! once). What each thread found is put together by directory and name, so that the outcome does not
//! depend on who was faster.
//!
//! Never: follows a link, unless asked, and then only one that leaves the set. Every directory is
//! opened once and checked to be the one that its parent named.

mod found;
mod look;
mod xattrs;

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, OsStr};
use std::fs::File;
use std::ops::Range;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};

use limb_common::class::DataClass;
use limb_common::manifest::NodeMeta;
use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat};

use super::own::Own;
use super::sources::nanoseconds;
use super::threads::{cores, on_threads};
use super::{CLASS_FILE, FileIdentity, LinkPolicy, OutsideLink, Progress, Skipped, SnapshotError, lock};
use found::{FilePlace, Names};
pub(super) use found::{FoundDirectory, FoundEntry, FoundFile, FoundKind, Walked};
use look::Look;
pub(super) use xattrs::xattrs_of;

/// 20 M nodes are a manifest of about 2.5 GB: more is a mistake (`/`, or links that multiply).
const MAX_NODES: usize = 20_000_000;
const MAX_DEPTH: usize = 4096;
/// What the kernel accepts as one path, less some room.
const PATH_PIECE_BYTES: usize = 3000;
/// A class file is one word.
const MAX_CLASS_BYTES: u64 = 64;
/// Names of one directory that one thread looks at before another may help: about a millisecond.
const PIECE_NAMES: usize = 2048;

/// Extended attributes by name.
pub(super) type Xattrs = BTreeMap<Vec<u8>, Vec<u8>>;

/// Who waits for the walk.
pub(super) struct Watch<'a> {
    pub(super) cancelled: &'a AtomicBool,
    pub(super) progress: &'a (dyn Fn(Progress) + Sync),
}

/// Directories above, to know a link that leads into one of them.
#[derive(Debug)]
struct Chain {
    id: (u64, u64),
    above: Option<Arc<Self>>,
}

/// A directory to read.
#[derive(Debug)]
struct Pending {
    path: PathBuf,
    /// Path inside the set.
    inside: Vec<u8>,
    /// Into [`Walked::directories`].
    number: usize,
    /// Levels below the source, or below the followed link, that holds it.
    depth: usize,
    total_depth: usize,
    chain: Arc<Chain>,
}

/// A directory whose names are known.
#[derive(Debug)]
struct Opened {
    pending: Pending,
    fd: OwnedFd,
    names: Arc<Names>,
}

#[derive(Debug)]
enum Task {
    Read(Pending),
    Look(Arc<Opened>, Range<usize>),
}

#[derive(Debug, Default)]
struct Queue {
    tasks: Vec<Task>,
    /// Tasks that somebody is at.
    busy: usize,
    failed: Option<SnapshotError>,
}

/// What one thread has found.
#[derive(Default)]
struct Found {
    directories: Vec<(usize, FoundDirectory)>,
    pieces: Vec<Piece>,
    outside_links: Vec<OutsideLink>,
    skipped: Vec<Skipped>,
}

/// Some names of one directory, looked at.
struct Piece {
    directory: usize,
    names: Arc<Names>,
    /// By place in the names, in order.
    entries: Vec<(usize, Seen)>,
}

enum Seen {
    Directory(usize),
    File {
        identity: FileIdentity,
        mode: u32,
        /// It may be met again under another name.
        shared: bool,
        elsewhere: Option<Box<Path>>,
    },
    Symlink {
        target: Box<[u8]>,
        mtime_ns: i64,
    },
}

struct Walker<'a> {
    own: &'a Own,
    links: LinkPolicy,
    watch: &'a Watch<'a>,
    queue: Mutex<Queue>,
    wake: Condvar,
    directories: AtomicUsize,
    names: AtomicUsize,
    files: AtomicUsize,
}

/// Held while a task is worked at, so that nobody waits for a thread that has ended.
struct Turn<'a, 'b>(&'a Walker<'b>);

impl Drop for Turn<'_, '_> {
    fn drop(&mut self) {
        let mut queue = lock(&self.0.queue);
        queue.busy -= 1;
        if queue.busy == 0 && queue.tasks.is_empty() {
            self.0.wake.notify_all();
        }
    }
}

pub(super) fn walk(
    source: &Path,
    links: LinkPolicy,
    own: &Own,
    watch: &Watch<'_>,
) -> Result<Walked, SnapshotError> {
    let failed = |error| SnapshotError::Source { path: source.to_owned(), source: error };
    let absolute = std::fs::canonicalize(source).map_err(failed)?;
    own.check_source(&absolute)?;
    let fd = open_path(&absolute, OFlag::O_PATH).map_err(|errno| failed(errno.into()))?;
    let stat = fstat(&fd).map_err(|errno| failed(errno.into()))?;
    let walker = Walker {
        own,
        links,
        watch,
        queue: Mutex::default(),
        wake: Condvar::new(),
        directories: AtomicUsize::new(1),
        names: AtomicUsize::new(0),
        files: AtomicUsize::new(0),
    };
    let mut out = Walked { source: absolute.clone(), ..Walked::default() };
    match kind_of(&stat) {
        SFlag::S_IFDIR => {
            out.label = read_label(&absolute)?;
            out.directories.push(FoundDirectory::new(meta_of(&fd, c".", &stat), absolute.clone()));
            let chain = Arc::new(Chain { id: (stat.st_dev, stat.st_ino), above: None });
            let inside = Vec::new();
            walker.push([Task::Read(Pending {
                path: absolute,
                inside,
                number: 0,
                depth: 0,
                total_depth: 0,
                chain,
            })]);
            let found = on_threads(cores(), &|| walker.work());
            if let Some(error) = lock(&walker.queue).failed.take() {
                return Err(error);
            }
            put_together(&mut out, found);
        }
        SFlag::S_IFREG => {
            // The directory around it exists only in the manifest, so nothing of it depends on home.
            let meta = NodeMeta { mode: 0o755, ..NodeMeta::default() };
            out.directories.push(FoundDirectory::new(meta, PathBuf::new()));
            out.single_file = true;
            let name = source.file_name().or(absolute.file_name()).map_or(&b"file"[..], OsStr::as_bytes);
            let mut names = Names::default();
            names.push(&std::ffi::CString::new(name).unwrap_or_default());
            let file = walker.file(&stat, || absolute.clone(), Some(absolute.as_path().into()))?;
            let piece = Piece { directory: 0, names: Arc::new(names), entries: vec![(0, file)] };
            put_together(&mut out, vec![Found { pieces: vec![piece], ..Found::default() }]);
        }
        _ => return Err(SnapshotError::SourceKind { path: source.to_owned() }),
    }
    Ok(out)
}

fn put_together(out: &mut Walked, found: Vec<Found>) {
    let mut directories = Vec::new();
    let mut pieces = Vec::new();
    for part in found {
        directories.extend(part.directories);
        pieces.extend(part.pieces);
        out.outside_links.extend(part.outside_links);
        out.skipped.extend(part.skipped);
    }
    out.outside_links.sort();
    out.skipped.sort();
    directories.sort_unstable_by_key(|&(number, _)| number);
    out.directories.extend(directories.into_iter().map(|(_, directory)| directory));
    pieces.sort_unstable_by_key(|piece| (piece.directory, piece.entries.first().map(|&(at, _)| at)));
    out.files.reserve(pieces.iter().map(|piece| piece.entries.len()).sum());
    let mut hard_links: HashMap<(u64, u64), usize> = HashMap::new();
    for Piece { directory, names, entries } in pieces {
        let here = &mut out.directories[directory];
        here.names = names;
        here.entries.reserve(entries.len());
        for (name, seen) in entries {
            let kind = match seen {
                Seen::Directory(number) => FoundKind::Directory(number),
                Seen::Symlink { target, mtime_ns } => FoundKind::Symlink { target, mtime_ns },
                Seen::File { identity, mode, shared, elsewhere } => {
                    let new = out.files.len();
                    let id = (identity.dev, identity.ino);
                    let file = if shared { *hard_links.entry(id).or_insert(new) } else { new };
                    if file == new {
                        let place = elsewhere.map_or(FilePlace::In { directory, name }, FilePlace::At);
                        out.files.push(FoundFile { place, identity, mode });
                    }
                    FoundKind::File(file)
                }
            };
            here.entries.push(FoundEntry { name, kind });
        }
    }
}

impl Walker<'_> {
    fn work(&self) -> Found {
        let mut found = Found::default();
        while let Some((task, _turn)) = self.next() {
            let done = match task {
                Task::Read(pending) => self.read_directory(pending, &mut found),
                Task::Look(opened, names) => self.look(&opened, names, &mut found),
            };
            if let Err(error) = done {
                lock(&self.queue).failed.get_or_insert(error);
                self.wake.notify_all();
            }
        }
        found
    }

    /// `None`: all is done, or nobody needs the rest.
    fn next(&self) -> Option<(Task, Turn<'_, '_>)> {
        let mut queue = lock(&self.queue);
        loop {
            if queue.failed.is_some() {
                return None;
            }
            if let Some(task) = queue.tasks.pop() {
                queue.busy += 1;
                return Some((task, Turn(self)));
            }
            if queue.busy == 0 {
                return None;
            }
            queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn push(&self, tasks: impl IntoIterator<Item = Task>) {
        lock(&self.queue).tasks.extend(tasks);
        self.wake.notify_all();
    }

    fn read_directory(&self, here: Pending, found: &mut Found) -> Result<(), SnapshotError> {
        let failed =
            |errno: Errno| SnapshotError::Unreadable { path: here.path.clone(), source: errno.into() };
        let fd = match open_path(&here.path, OFlag::O_RDONLY | OFlag::O_DIRECTORY) {
            // Removed or replaced since its parent was read: it is not part of this state.
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) if here.number != 0 => return Ok(()),
            other => other.map_err(failed)?,
        };
        let stat = fstat(&fd).map_err(failed)?;
        if (stat.st_dev, stat.st_ino) != here.chain.id {
            return Err(SnapshotError::Changing { path: here.path.clone() });
        }
        let duplicate =
            fd.try_clone().map_err(|source| SnapshotError::Unreadable { path: here.path.clone(), source })?;
        let mut names = Names::default();
        for entry in Dir::from_fd(duplicate).map_err(failed)?.iter() {
            let entry = entry.map_err(failed)?;
            if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                names.push(entry.file_name());
            }
            self.check_cancelled()?;
        }
        names.sort();
        let count = names.starts.len();
        if self.names.fetch_add(count, Ordering::Relaxed) + count >= MAX_NODES {
            return Err(SnapshotError::TooLarge { path: here.path, limit: "20 million names" });
        }
        let opened = Arc::new(Opened { pending: here, fd, names: Arc::new(names) });
        let mut pieces = (0..count).step_by(PIECE_NAMES).map(|from| from..count.min(from + PIECE_NAMES));
        let first = pieces.next();
        if count > PIECE_NAMES {
            self.push(pieces.map(|names| Task::Look(Arc::clone(&opened), names)));
        }
        first.map_or(Ok(()), |names| self.look(&opened, names, found))
    }

    fn check_cancelled(&self) -> Result<(), SnapshotError> {
        if self.watch.cancelled.load(Ordering::Relaxed) { Err(SnapshotError::Cancelled) } else { Ok(()) }
    }

    fn look(&self, here: &Opened, names: Range<usize>, found: &mut Found) -> Result<(), SnapshotError> {
        let mut entries = Vec::with_capacity(names.len());
        let mut look = Look { walker: self, here: &here.pending, fd: &here.fd, found, below: Vec::new() };
        for at in names {
            self.check_cancelled()?;
            if let Some(seen) = look.visit(here.names.get(at))? {
                entries.push((at, seen));
            }
        }
        let below = look.below;
        if !below.is_empty() {
            self.push(below.into_iter().map(Task::Read));
        }
        let files = self.files.fetch_add(entries.len(), Ordering::Relaxed) + entries.len();
        found.pieces.push(Piece { directory: here.pending.number, names: Arc::clone(&here.names), entries });
        (self.watch.progress)(Progress { files_done: files as u64, ..Progress::default() });
        Ok(())
    }

    fn file(
        &self,
        stat: &FileStat,
        path: impl FnOnce() -> PathBuf,
        elsewhere: Option<Box<Path>>,
    ) -> Result<Seen, SnapshotError> {
        let identity = identity_of(stat);
        self.own.check(path, (identity.dev, identity.ino))?;
        // A followed link may lead to a file that has one name only and yet is met twice.
        let shared = stat.st_nlink > 1 || self.links == LinkPolicy::Follow;
        Ok(Seen::File { identity, mode: stat.st_mode & 0o7777, shared, elsewhere })
    }
}

fn meta_of(directory: &OwnedFd, name: &CStr, stat: &FileStat) -> NodeMeta {
    let xattrs = xattrs::xattrs_at(directory, name);
    NodeMeta { mode: stat.st_mode & 0o7777, mtime_ns: mtime_of(stat), xattrs }
}

/// Opens a path of any length; a symlink as its last component is refused.
pub(super) fn open_path(path: &Path, flags: OFlag) -> nix::Result<OwnedFd> {
    let flags = flags | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW;
    let mut rest = path.as_os_str().as_bytes();
    let mut at: Option<OwnedFd> = None;
    while rest.len() > PATH_PIECE_BYTES {
        let cut = rest[..PATH_PIECE_BYTES].iter().rposition(|&byte| byte == b'/').filter(|&cut| cut > 0);
        let cut = cut.ok_or(Errno::ENAMETOOLONG)?;
        let through = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
        at = Some(open_from(at.as_ref(), &rest[..cut], through)?);
        rest = &rest[cut + 1..];
    }
    open_from(at.as_ref(), rest, flags)
}

fn open_from(at: Option<&OwnedFd>, path: &[u8], flags: OFlag) -> nix::Result<OwnedFd> {
    match at {
        Some(fd) => openat(fd.as_fd(), path, flags, Mode::empty()),
        None => nix::fcntl::open(path, flags, Mode::empty()),
    }
}

fn joined(directory: &[u8], name: &[u8]) -> Vec<u8> {
    if directory.is_empty() { name.to_vec() } else { [directory, b"/", name].concat() }
}

fn kind_of(stat: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(stat.st_mode & SFlag::S_IFMT.bits())
}

fn mtime_of(stat: &FileStat) -> i64 {
    nanoseconds(stat.st_mtime, stat.st_mtime_nsec)
}

fn identity_of(stat: &FileStat) -> FileIdentity {
    FileIdentity {
        dev: stat.st_dev,
        ino: stat.st_ino,
        size: u64::try_from(stat.st_size).unwrap_or(0),
        mtime_ns: mtime_of(stat),
        ctime_ns: nanoseconds(stat.st_ctime, stat.st_ctime_nsec),
    }
}

/// The owner's label in the source's root. One that cannot be read or understood is an error: it
/// may say that the data must not leave.
fn read_label(root: &Path) -> Result<Option<DataClass>, SnapshotError> {
    let path = root.join(CLASS_FILE);
    let read = || -> std::io::Result<Vec<u8>> {
        use std::io::Read as _;
        let mut text = Vec::new();
        File::open(&path)?.take(MAX_CLASS_BYTES).read_to_end(&mut text)?;
        Ok(text)
    };
    let text = match read() {
        Ok(text) => String::from_utf8_lossy(&text).trim().to_owned(),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(SnapshotError::Unreadable { path, source }),
    };
    [DataClass::Public, DataClass::Internal, DataClass::Regulated, DataClass::Sealed]
        .into_iter()
        .find(|class| class.as_str() == text)
        .map(Some)
        .ok_or(SnapshotError::BadClass { path, text })
}
