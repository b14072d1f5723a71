//! One pass over a source: names, metadata, links, hard links; no content.
//!
//! Never: follows a link, unless asked, and then only one that leaves the set. Every directory is
//! opened once and checked to be the one that its parent named.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CStr, CString, OsStr};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use limb_common::class::DataClass;
use limb_common::manifest::NodeMeta;
use nix::dir::Dir;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, openat, readlinkat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, fstatat};

use super::own::Own;
use super::sources::nanoseconds;
use super::{
    CLASS_FILE, FileIdentity, LinkPolicy, OutsideLink, Progress, SkipReason, Skipped, SnapshotError,
};

/// 20 M nodes are a manifest of about 2.5 GB: more is a mistake (`/`, or links that multiply).
const MAX_NODES: usize = 20_000_000;
const MAX_DEPTH: usize = 4096;
/// What the kernel accepts as one path, less some room.
const PATH_PIECE_BYTES: usize = 3000;
/// XATTR_LIST_MAX and XATTR_SIZE_MAX.
const XATTR_BYTES: usize = 64 * 1024;
/// A class file is one word.
const MAX_CLASS_BYTES: u64 = 64;

/// Extended attributes by name.
pub(super) type Xattrs = BTreeMap<Vec<u8>, Vec<u8>>;

/// Who waits for the walk.
pub(super) struct Watch<'a> {
    pub(super) cancelled: &'a AtomicBool,
    pub(super) progress: &'a (dyn Fn(Progress) + Sync),
}

/// A source as it was found. Node 0 is the root.
#[derive(Debug, Default)]
pub(super) struct Walked {
    pub(super) source: PathBuf,
    pub(super) single_file: bool,
    pub(super) label: Option<DataClass>,
    pub(super) nodes: Vec<FoundNode>,
    pub(super) files: Vec<FoundFile>,
    pub(super) outside_links: Vec<OutsideLink>,
    pub(super) skipped: Vec<Skipped>,
}

#[derive(Debug)]
pub(super) struct FoundNode {
    pub(super) parent: usize,
    pub(super) name: Vec<u8>,
    /// Of a file only what the walk saw: no attributes, which are known with its content.
    pub(super) meta: NodeMeta,
    pub(super) kind: FoundKind,
}

#[derive(Debug)]
pub(super) enum FoundKind {
    Directory,
    /// Into [`Walked::files`]; hard links share one.
    File(usize),
    Symlink(Vec<u8>),
}

#[derive(Debug)]
pub(super) struct FoundFile {
    /// Absolute, no symlink in its last component.
    pub(super) path: PathBuf,
    pub(super) identity: FileIdentity,
    pub(super) mode: u32,
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
    node: usize,
    /// Levels below the source, or below the followed link, that holds it.
    depth: usize,
    total_depth: usize,
    chain: Arc<Chain>,
}

struct Walker<'a> {
    out: Walked,
    own: &'a Own,
    links: LinkPolicy,
    hard_links: HashMap<(u64, u64), usize>,
    pending: Vec<Pending>,
    buffer: Vec<u8>,
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
    let mut walker = Walker {
        out: Walked { source: absolute.clone(), ..Walked::default() },
        own,
        links,
        hard_links: HashMap::new(),
        pending: Vec::new(),
        buffer: vec![0; XATTR_BYTES],
    };
    match kind_of(&stat) {
        SFlag::S_IFDIR => {
            walker.out.label = read_label(&absolute)?;
            let meta = walker.meta(&fd, b".", &stat);
            let root = FoundNode { parent: 0, name: Vec::new(), meta, kind: FoundKind::Directory };
            walker.out.nodes.push(root);
            let chain = Arc::new(Chain { id: (stat.st_dev, stat.st_ino), above: None });
            let inside = Vec::new();
            walker.pending.push(Pending { path: absolute, inside, node: 0, depth: 0, total_depth: 0, chain });
        }
        SFlag::S_IFREG => {
            // The directory around it exists only in the manifest, so nothing of it depends on home.
            let meta = NodeMeta { mode: 0o755, ..NodeMeta::default() };
            let root = FoundNode { parent: 0, name: Vec::new(), meta, kind: FoundKind::Directory };
            walker.out.nodes.push(root);
            walker.out.single_file = true;
            let name = source.file_name().or(absolute.file_name()).map_or(&b"file"[..], OsStr::as_bytes);
            walker.add_file(0, name, absolute.clone(), &stat)?;
        }
        _ => return Err(SnapshotError::SourceKind { path: source.to_owned() }),
    }
    while let Some(directory) = walker.pending.pop() {
        walker.read_directory(&directory, watch)?;
        (watch.progress)(Progress { files_done: walker.out.files.len() as u64, ..Progress::default() });
    }
    walker.out.outside_links.sort();
    walker.out.skipped.sort();
    Ok(walker.out)
}

impl Walker<'_> {
    fn read_directory(&mut self, here: &Pending, watch: &Watch<'_>) -> Result<(), SnapshotError> {
        let failed =
            |errno: Errno| SnapshotError::Unreadable { path: here.path.clone(), source: errno.into() };
        let fd = match open_path(&here.path, OFlag::O_RDONLY | OFlag::O_DIRECTORY) {
            // Removed or replaced since its parent was read: it is not part of this state.
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) if here.node != 0 => return Ok(()),
            other => other.map_err(failed)?,
        };
        let stat = fstat(&fd).map_err(failed)?;
        if (stat.st_dev, stat.st_ino) != here.chain.id {
            return Err(SnapshotError::Changing { path: here.path.clone() });
        }
        let duplicate =
            fd.try_clone().map_err(|source| SnapshotError::Unreadable { path: here.path.clone(), source })?;
        let mut names = Vec::new();
        for entry in Dir::from_fd(duplicate).map_err(failed)?.iter() {
            let entry = entry.map_err(failed)?;
            if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
                names.push(entry.file_name().to_owned());
            }
        }
        names.sort();
        for name in names {
            if watch.cancelled.load(Ordering::Relaxed) {
                return Err(SnapshotError::Cancelled);
            }
            self.visit(here, &fd, &name)?;
        }
        Ok(())
    }

    fn visit(&mut self, here: &Pending, fd: &OwnedFd, name: &CString) -> Result<(), SnapshotError> {
        let path = here.path.join(OsStr::from_bytes(name.to_bytes()));
        let failed = |errno: Errno| SnapshotError::Unreadable { path: path.clone(), source: errno.into() };
        let stat = match fstatat(fd, name.as_c_str(), AtFlags::AT_SYMLINK_NOFOLLOW) {
            Err(Errno::ENOENT) => return Ok(()),
            other => other.map_err(failed)?,
        };
        let bytes = name.to_bytes();
        match kind_of(&stat) {
            SFlag::S_IFDIR => {
                let meta = self.meta(fd, bytes, &stat);
                self.add_directory(here, bytes, path, &stat, meta, here.depth + 1)
            }
            SFlag::S_IFREG => self.add_file(here.node, bytes, path, &stat),
            SFlag::S_IFLNK => {
                let target = match readlinkat(fd, name.as_c_str()) {
                    Err(Errno::ENOENT | Errno::EINVAL) => return Ok(()),
                    other => other.map_err(failed)?,
                };
                self.link(here, fd, name, path, &stat, target.as_bytes())
            }
            other => {
                self.skip(here, bytes, other);
                Ok(())
            }
        }
    }

    fn link(
        &mut self,
        here: &Pending,
        fd: &OwnedFd,
        name: &CString,
        path: PathBuf,
        stat: &FileStat,
        target: &[u8],
    ) -> Result<(), SnapshotError> {
        let bytes = name.to_bytes();
        if leaves(here.depth, target) {
            let followed = fstatat(fd, name.as_c_str(), AtFlags::empty());
            if let (LinkPolicy::Follow, Ok(found), Ok(real)) =
                (self.links, followed, std::fs::canonicalize(&path))
            {
                return self.follow(here, bytes, real, &found, stat, target);
            }
            let path = joined(&here.inside, bytes);
            self.out.outside_links.push(OutsideLink { path, target: target.to_vec() });
        }
        self.add_symlink(here, bytes, stat, target)
    }

    fn follow(
        &mut self,
        here: &Pending,
        name: &[u8],
        real: PathBuf,
        found: &FileStat,
        link: &FileStat,
        target: &[u8],
    ) -> Result<(), SnapshotError> {
        match kind_of(found) {
            SFlag::S_IFREG => self.add_file(here.node, name, real, found),
            SFlag::S_IFDIR => {
                let parent = real.parent().unwrap_or(Path::new("/")).to_owned();
                let real_name = real.file_name().map_or(&b"."[..], OsStr::as_bytes).to_vec();
                let around = open_path(&parent, OFlag::O_PATH | OFlag::O_DIRECTORY)
                    .map_err(|errno| SnapshotError::Unreadable { path: parent, source: errno.into() })?;
                let id = (found.st_dev, found.st_ino);
                let mut above = Some(&here.chain);
                while let Some(chain) = above {
                    if chain.id == id {
                        let path = joined(&here.inside, name);
                        self.out.skipped.push(Skipped { path, why: SkipReason::LinkLoop });
                        return self.add_symlink(here, name, link, target);
                    }
                    above = chain.above.as_ref();
                }
                let meta = self.meta(&around, &real_name, found);
                self.add_directory(here, name, real, found, meta, 0)
            }
            other => {
                self.skip(here, name, other);
                Ok(())
            }
        }
    }

    fn add_directory(
        &mut self,
        here: &Pending,
        name: &[u8],
        path: PathBuf,
        stat: &FileStat,
        meta: NodeMeta,
        depth: usize,
    ) -> Result<(), SnapshotError> {
        self.own.check(&path, (stat.st_dev, stat.st_ino))?;
        let total_depth = here.total_depth + 1;
        if total_depth > MAX_DEPTH {
            return Err(SnapshotError::TooLarge { path, limit: "4096 levels" });
        }
        let node = self.add(here.node, name, meta, FoundKind::Directory)?;
        let chain = Arc::new(Chain { id: (stat.st_dev, stat.st_ino), above: Some(Arc::clone(&here.chain)) });
        let inside = joined(&here.inside, name);
        self.pending.push(Pending { path, inside, node, depth, total_depth, chain });
        Ok(())
    }

    fn add_file(
        &mut self,
        parent: usize,
        name: &[u8],
        path: PathBuf,
        stat: &FileStat,
    ) -> Result<(), SnapshotError> {
        let identity = identity_of(stat);
        let meta =
            NodeMeta { mode: stat.st_mode & 0o7777, mtime_ns: identity.mtime_ns, xattrs: BTreeMap::new() };
        self.own.check(&path, (identity.dev, identity.ino))?;
        // A followed link may lead to a file that has one name only and yet is met twice.
        let shared = stat.st_nlink > 1 || self.links == LinkPolicy::Follow;
        let id = (identity.dev, identity.ino);
        let known = if shared { self.hard_links.get(&id).copied() } else { None };
        let file = known.unwrap_or(self.out.files.len());
        if known.is_none() {
            self.out.files.push(FoundFile { path, identity, mode: meta.mode });
            if shared {
                self.hard_links.insert(id, file);
            }
        }
        self.add(parent, name, meta, FoundKind::File(file)).map(drop)
    }

    fn add_symlink(
        &mut self,
        here: &Pending,
        name: &[u8],
        stat: &FileStat,
        target: &[u8],
    ) -> Result<(), SnapshotError> {
        let meta = NodeMeta { mode: 0o777, mtime_ns: mtime_of(stat), xattrs: BTreeMap::new() };
        self.add(here.node, name, meta, FoundKind::Symlink(target.to_vec())).map(drop)
    }

    fn add(
        &mut self,
        parent: usize,
        name: &[u8],
        meta: NodeMeta,
        kind: FoundKind,
    ) -> Result<usize, SnapshotError> {
        if self.out.nodes.len() >= MAX_NODES {
            return Err(SnapshotError::TooLarge { path: self.out.source.clone(), limit: "20 million names" });
        }
        self.out.nodes.push(FoundNode { parent, name: name.to_vec(), meta, kind });
        Ok(self.out.nodes.len() - 1)
    }

    fn skip(&mut self, here: &Pending, name: &[u8], kind: SFlag) {
        let why = match kind {
            SFlag::S_IFIFO => SkipReason::Fifo,
            SFlag::S_IFSOCK => SkipReason::Socket,
            _ => SkipReason::Device,
        };
        self.out.skipped.push(Skipped { path: joined(&here.inside, name), why });
    }

    fn meta(&mut self, directory: &OwnedFd, name: &[u8], stat: &FileStat) -> NodeMeta {
        let xattrs = user_xattrs(directory, name, &mut self.buffer);
        NodeMeta { mode: stat.st_mode & 0o7777, mtime_ns: mtime_of(stat), xattrs }
    }
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

/// Would this link, in a directory this deep inside the set, lead out of it? An absolute one
/// names a place of home's, which the box does not have.
fn leaves(depth: usize, target: &[u8]) -> bool {
    if target.first() == Some(&b'/') {
        return true;
    }
    let mut level = depth;
    for part in target.split(|&byte| byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => match level.checked_sub(1) {
                Some(up) => level = up,
                None => return true,
            },
            _ => level += 1,
        }
    }
    false
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

/// The attributes that any owner may set. A file system without them has none.
fn user_xattrs(directory: &OwnedFd, name: &[u8], buffer: &mut [u8]) -> Xattrs {
    // Through /proc, since there is no *at() form and the absolute path may be too long.
    let path = [format!("/proc/self/fd/{}/", directory.as_raw_fd()).as_bytes(), name].concat();
    let Ok(path) = CString::new(path) else { return Xattrs::new() };
    // SAFETY: the strings end with NUL, and the buffer is writable for the length given.
    let list = |buffer: &mut [u8]| unsafe {
        libc::llistxattr(path.as_ptr(), buffer.as_mut_ptr().cast(), buffer.len())
    };
    // SAFETY: as above.
    let get = |name: &CStr, buffer: &mut [u8]| unsafe {
        libc::lgetxattr(path.as_ptr(), name.as_ptr(), buffer.as_mut_ptr().cast(), buffer.len())
    };
    collect_xattrs(list, get, buffer)
}

/// As [`user_xattrs`], of an open file.
pub(super) fn xattrs_of(file: &File) -> Xattrs {
    let fd = file.as_raw_fd();
    // SAFETY: the descriptor is open, and the buffer is writable for the length given.
    let list = |buffer: &mut [u8]| unsafe { libc::flistxattr(fd, buffer.as_mut_ptr().cast(), buffer.len()) };
    // SAFETY: as above; the name ends with NUL.
    let get = |name: &CStr, buffer: &mut [u8]| unsafe {
        libc::fgetxattr(fd, name.as_ptr(), buffer.as_mut_ptr().cast(), buffer.len())
    };
    // Nearly no file has any: a buffer only for one that has.
    // SAFETY: a length of 0 asks how long the list is.
    if unsafe { libc::flistxattr(fd, std::ptr::null_mut(), 0) } <= 0 {
        return Xattrs::new();
    }
    collect_xattrs(list, get, &mut vec![0; XATTR_BYTES])
}

fn collect_xattrs(
    list: impl Fn(&mut [u8]) -> isize,
    get: impl Fn(&CStr, &mut [u8]) -> isize,
    buffer: &mut [u8],
) -> Xattrs {
    let mut found = Xattrs::new();
    let len = list(buffer);
    let Some(names) = usize::try_from(len).ok().and_then(|len| buffer.get(..len)) else { return found };
    let names: Vec<CString> = names
        .split(|&byte| byte == 0)
        .filter(|name| name.starts_with(b"user."))
        .filter_map(|name| CString::new(name).ok())
        .collect();
    for name in names {
        let len = get(&name, buffer);
        if let Some(value) = usize::try_from(len).ok().and_then(|len| buffer.get(..len)) {
            found.insert(name.into_bytes(), value.to_vec());
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_leave_by_absolute_targets_and_by_climbing_above_the_root() {
        for (depth, target, out) in [
            (0, "x", false),
            (0, "../x", true),
            (1, "../x", false),
            (1, "../../set/x", true),
            (2, "a/../../../b", false),
            (2, "a/../../../../b", true),
            (5, "/etc/passwd", true),
            (0, "./a//b/..", false),
        ] {
            assert_eq!(leaves(depth, target.as_bytes()), out, "{depth} {target}");
        }
    }
}
