//! The file system under the results: every call that changes something durable goes through here
//! and past one counter, so that a test can stop the world before any of them.
//!
//! Never: follow a symlink or leave the output's directory. Parents are opened with
//! openat2(BENEATH | NO_SYMLINKS | NO_MAGICLINKS), the last component is only ever named relative
//! to that descriptor.

use std::collections::HashMap;
use std::ffi::CString;
use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, openat, openat2};
use nix::sys::stat::{Mode, SFlag, UtimensatFlags, fchmod, fstat, fstatat, mkdirat, utimensat};
use nix::sys::time::TimeSpec;
use nix::unistd::{UnlinkatFlags, linkat, symlinkat, unlinkat};
use serde::{Deserialize, Serialize};

/// A durable effect that is about to happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    Write,
    Sync,
    Rename,
    Link,
    Unlink,
    MakeDirectory,
    Symlink,
    Clone,
    Metadata,
    /// A database transaction is about to be committed.
    Commit,
}

/// Asked before each durable effect. `false`: the process is as good as dead; nothing after this
/// may happen. Production always goes on.
pub trait Steps: Send + Sync + fmt::Debug {
    fn before(&self, step: Step) -> bool;
}

#[derive(Debug)]
pub(super) struct GoOn;

impl Steps for GoOn {
    fn before(&self, _step: Step) -> bool {
        true
    }
}

/// Why an effect did not happen.
#[derive(Debug, thiserror::Error)]
pub(super) enum DiskError {
    /// The file system's answer; concerns this one entry.
    #[error("{0}")]
    Os(Errno),
    /// Everything stops here.
    #[error("stopped before a durable step")]
    Stopped,
}

impl From<Errno> for DiskError {
    fn from(errno: Errno) -> Self {
        Self::Os(errno)
    }
}

impl From<io::Error> for DiskError {
    fn from(error: io::Error) -> Self {
        Self::Os(error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
    }
}

/// Which file it is, whatever its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct Ident {
    pub(super) dev: u64,
    pub(super) ino: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) enum Kind {
    File,
    Directory,
    Symlink,
    /// Something that limb never makes.
    Other,
}

/// What stands under a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seen {
    pub(super) ident: Ident,
    pub(super) kind: Kind,
    pub(super) size: u64,
    pub(super) mtime_ns: i64,
    pub(super) mode: u32,
}

impl From<nix::sys::stat::FileStat> for Seen {
    fn from(stat: nix::sys::stat::FileStat) -> Self {
        let kind = match SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT {
            SFlag::S_IFREG => Kind::File,
            SFlag::S_IFDIR => Kind::Directory,
            SFlag::S_IFLNK => Kind::Symlink,
            _ => Kind::Other,
        };
        Self {
            ident: Ident { dev: stat.st_dev, ino: stat.st_ino },
            kind,
            size: u64::try_from(stat.st_size).unwrap_or(0),
            mtime_ns: stat.st_mtime.saturating_mul(1_000_000_000).saturating_add(stat.st_mtime_nsec),
            mode: stat.st_mode & 0o7777,
        }
    }
}

/// What a rename may do to a name that is taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Over {
    Replace,
    Keep,
}

const RENAME_NOREPLACE: libc::c_uint = 1;
/// `_IOW(0x94, 9, int)`.
const FICLONE: libc::c_ulong = 0x4004_9409;
const COPY_BUFFER_BYTES: usize = 1 << 20;
/// fsyncs that wait at the same time; more gave nothing on ext4.
const SYNC_THREADS: usize = 8;
/// Below this many for each, a thread costs more than it saves.
const SYNCS_PER_THREAD: usize = 4;
/// Largest extended attribute that is kept; the kernel's own limit.
pub(super) const MAX_XATTR_BYTES: usize = 64 * 1024;

/// The calls.
#[derive(Clone, Debug)]
pub(super) struct Disk {
    steps: Arc<dyn Steps>,
}

type Answer<T> = Result<T, DiskError>;

impl Disk {
    pub(super) fn new(steps: Arc<dyn Steps>) -> Self {
        Self { steps }
    }

    pub(super) fn step(&self, step: Step) -> Answer<()> {
        if self.steps.before(step) { Ok(()) } else { Err(DiskError::Stopped) }
    }

    pub(super) fn rename(
        &self,
        from: (BorrowedFd<'_>, &[u8]),
        to: (BorrowedFd<'_>, &[u8]),
        over: Over,
    ) -> Answer<()> {
        self.step(Step::Rename)?;
        let (old, new) = (c_string(from.1)?, c_string(to.1)?);
        let flags = match over {
            Over::Replace => 0,
            Over::Keep => RENAME_NOREPLACE,
        };
        // SAFETY: both descriptors are borrowed for the call and both names end with NUL.
        let result = unsafe {
            libc::syscall(
                libc::SYS_renameat2,
                from.0.as_raw_fd(),
                old.as_ptr(),
                to.0.as_raw_fd(),
                new.as_ptr(),
                flags,
            )
        };
        match Errno::result(result) {
            // A file system without the flag (NFS, some FUSE): look, then rename.
            Err(Errno::EINVAL) if over == Over::Keep => {
                if look(to.0, to.1)?.is_some() {
                    return Err(Errno::EEXIST.into());
                }
                nix::fcntl::renameat(from.0, from.1, to.0, to.1)?;
                Ok(())
            }
            other => Ok(other.map(drop)?),
        }
    }

    pub(super) fn link(&self, from: (BorrowedFd<'_>, &[u8]), to: (BorrowedFd<'_>, &[u8])) -> Answer<()> {
        self.step(Step::Link)?;
        Ok(linkat(from.0, from.1, to.0, to.1, AtFlags::empty())?)
    }

    pub(super) fn unlink(&self, directory: BorrowedFd<'_>, name: &[u8]) -> Answer<()> {
        self.step(Step::Unlink)?;
        Ok(unlinkat(directory, name, UnlinkatFlags::NoRemoveDir)?)
    }

    pub(super) fn remove_directory(&self, directory: BorrowedFd<'_>, name: &[u8]) -> Answer<()> {
        self.step(Step::Unlink)?;
        Ok(unlinkat(directory, name, UnlinkatFlags::RemoveDir)?)
    }

    pub(super) fn make_directory(&self, directory: BorrowedFd<'_>, name: &[u8], mode: u32) -> Answer<()> {
        self.step(Step::MakeDirectory)?;
        Ok(mkdirat(directory, name, Mode::from_bits_truncate(mode))?)
    }

    pub(super) fn symlink(&self, target: &[u8], directory: BorrowedFd<'_>, name: &[u8]) -> Answer<()> {
        self.step(Step::Symlink)?;
        Ok(symlinkat(target, directory, name)?)
    }

    pub(super) fn write_at(&self, file: &File, bytes: &[u8], offset: u64) -> Answer<()> {
        self.step(Step::Write)?;
        Ok(file.write_all_at(bytes, offset)?)
    }

    pub(super) fn set_len(&self, file: &File, size: u64) -> Answer<()> {
        self.step(Step::Write)?;
        Ok(file.set_len(size)?)
    }

    /// Content only (and the size).
    pub(super) fn sync_data(&self, file: &File) -> Answer<()> {
        self.step(Step::Sync)?;
        Ok(file.sync_data()?)
    }

    pub(super) fn sync(&self, fd: impl AsFd) -> Answer<()> {
        self.step(Step::Sync)?;
        Ok(nix::unistd::fsync(fd)?)
    }

    /// Each of many files, in their order. All writeback starts before anybody waits, and a few
    /// threads wait together: one commit of the file system's journal then serves them all.
    pub(super) fn sync_all(&self, files: &[File]) -> Vec<Answer<()>> {
        files.iter().for_each(Self::start_writing);
        let threads = (files.len() / SYNCS_PER_THREAD).min(SYNC_THREADS);
        if threads < 2 {
            return files.iter().map(|file| self.sync(file)).collect();
        }
        let share = files.len().div_ceil(threads);
        let work = |files: &[File]| files.iter().map(|file| self.sync(file)).collect::<Vec<_>>();
        std::thread::scope(|scope| {
            let waiting: Vec<_> =
                files.chunks(share).map(|part| (part, scope.spawn(move || work(part)))).collect();
            let joined = waiting.into_iter().map(|(part, thread)| {
                // A thread that died has synced nothing that anybody may believe.
                thread.join().unwrap_or_else(|_| part.iter().map(|_| Err(Errno::EIO.into())).collect())
            });
            joined.flatten().collect()
        })
    }

    fn start_writing(file: &File) {
        // SAFETY: the descriptor is open for the whole call; a failure only costs time.
        unsafe { libc::sync_file_range(file.as_raw_fd(), 0, 0, libc::SYNC_FILE_RANGE_WRITE) };
    }

    /// Shares the blocks of `from` with `to` where the file system can.
    pub(super) fn try_clone(&self, from: &File, to: &File) -> Answer<bool> {
        self.step(Step::Clone)?;
        // SAFETY: FICLONE takes a descriptor by value; both are open for the whole call.
        Ok(unsafe { libc::ioctl(to.as_raw_fd(), FICLONE as _, from.as_raw_fd()) } == 0)
    }

    /// Copies `from..to` (offsets) to the same offsets; holes stay holes only in whole MiB.
    pub(super) fn copy(&self, source: &File, target: &File, from: u64, to: u64) -> Answer<()> {
        let mut buffer = vec![0; COPY_BUFFER_BYTES];
        let mut at = from;
        while at < to {
            let want = usize::try_from(to - at).unwrap_or(COPY_BUFFER_BYTES).min(COPY_BUFFER_BYTES);
            source.read_exact_at(&mut buffer[..want], at)?;
            let last = at + want as u64 == to;
            if last || buffer[..want].iter().any(|&byte| byte != 0) {
                self.write_at(target, &buffer[..want], at)?;
            }
            at += want as u64;
        }
        Ok(())
    }

    pub(super) fn set_mode(&self, fd: impl AsFd, mode: u32) -> Answer<()> {
        self.step(Step::Metadata)?;
        Ok(fchmod(fd, Mode::from_bits_truncate(mode))?)
    }

    /// Of the name itself, never of what a link points to.
    pub(super) fn set_mtime(&self, directory: BorrowedFd<'_>, name: &[u8], mtime_ns: i64) -> Answer<()> {
        self.step(Step::Metadata)?;
        let mtime = TimeSpec::new(mtime_ns.div_euclid(1_000_000_000), mtime_ns.rem_euclid(1_000_000_000));
        Ok(utimensat(directory, name, &TimeSpec::UTIME_OMIT, &mtime, UtimensatFlags::NoFollowSymlink)?)
    }

    pub(super) fn set_xattr(&self, file: &File, name: &[u8], value: Option<&[u8]>) -> Answer<()> {
        self.step(Step::Metadata)?;
        let name = c_string(name)?;
        let result = match value {
            // SAFETY: the name ends with NUL, the value's length is its own, the fd is open.
            Some(value) => unsafe {
                libc::fsetxattr(file.as_raw_fd(), name.as_ptr(), value.as_ptr().cast(), value.len(), 0)
            },
            // SAFETY: as above.
            None => unsafe { libc::fremovexattr(file.as_raw_fd(), name.as_ptr()) },
        };
        match Errno::result(result) {
            Err(Errno::ENODATA) if value.is_none() => Ok(()),
            other => Ok(other.map(drop)?),
        }
    }
}

/// All `user.*` attributes of an open file.
pub(super) fn user_xattrs(file: &File) -> Vec<(Vec<u8>, Vec<u8>)> {
    let fd = file.as_raw_fd();
    let mut names = vec![0_u8; MAX_XATTR_BYTES];
    // SAFETY: the buffer's length is passed with it.
    let len = unsafe { libc::flistxattr(fd, names.as_mut_ptr().cast(), names.len()) };
    names.truncate(usize::try_from(len).unwrap_or(0));
    names
        .split(|&b| b == 0)
        .filter(|name| name.starts_with(b"user."))
        .filter_map(|name| {
            let c_name = CString::new(name).ok()?;
            let mut value = vec![0_u8; MAX_XATTR_BYTES];
            // SAFETY: the name ends with NUL and the buffer's length is passed with it.
            let len = unsafe { libc::fgetxattr(fd, c_name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
            value.truncate(usize::try_from(len).ok()?);
            Some((name.to_vec(), value))
        })
        .collect()
}

fn c_string(name: &[u8]) -> Result<CString, Errno> {
    CString::new(name).map_err(|_| Errno::EINVAL)
}

/// What stands under `name`, links not followed.
pub(super) fn look(directory: impl AsFd, name: &[u8]) -> Result<Option<Seen>, Errno> {
    match fstatat(directory, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
        Ok(stat) => Ok(Some(stat.into())),
        Err(Errno::ENOENT) => Ok(None),
        Err(other) => Err(other),
    }
}

pub(super) fn look_at_open(fd: impl AsFd) -> Result<Seen, Errno> {
    fstat(fd).map(Seen::from)
}

/// Opens `name` itself in `directory`.
pub(super) fn open_in(directory: impl AsFd, name: &[u8], flags: OFlag) -> Result<File, Errno> {
    let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
    openat(directory, name, flags, Mode::from_bits_truncate(0o600)).map(File::from)
}

/// Opens a directory below `root` without following anything.
pub(super) fn open_beneath(root: impl AsFd, path: &[u8]) -> Result<OwnedFd, Errno> {
    let how = OpenHow::new().flags(OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC).resolve(
        ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_MAGICLINKS,
    );
    openat2(root, if path.is_empty() { b".".as_slice() } else { path }, how)
}

/// The owner's own path: may lead through the owner's own links.
pub(super) fn open_root(path: &Path) -> Result<OwnedFd, Errno> {
    nix::fcntl::open(
        path.as_os_str().as_bytes(),
        OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC,
        Mode::empty(),
    )
}

/// Directories that a batch works in: each opened once, and fsynced once at the end.
#[derive(Debug, Default)]
pub(super) struct Directories {
    open: HashMap<(u32, Vec<u8>), Arc<OwnedFd>>,
    touched: Vec<(u32, Vec<u8>)>,
}

impl Directories {
    /// Opens `path` below `root`; makes it and what is missing above it where `make` says so.
    pub(super) fn open(
        &mut self,
        disk: &Disk,
        output: u32,
        root: BorrowedFd<'_>,
        path: &[u8],
        make: bool,
    ) -> Answer<Arc<OwnedFd>> {
        let key = (output, path.to_vec());
        if let Some(fd) = self.open.get(&key) {
            return Ok(Arc::clone(fd));
        }
        let fd = match open_beneath(root, path) {
            Err(Errno::ENOENT) if make && !path.is_empty() => {
                let cut = path.iter().rposition(|&b| b == b'/');
                let (above, name) = cut.map_or((&[][..], path), |at| (&path[..at], &path[at + 1..]));
                let parent = self.open(disk, output, root, above, true)?;
                match disk.make_directory(parent.as_fd(), name, 0o755) {
                    Ok(()) | Err(DiskError::Os(Errno::EEXIST)) => {}
                    Err(other) => return Err(other),
                }
                self.touch(output, above);
                open_beneath(root, path)?
            }
            other => other?,
        };
        let fd = Arc::new(fd);
        self.open.insert(key, Arc::clone(&fd));
        Ok(fd)
    }

    /// Its entries changed.
    pub(super) fn touch(&mut self, output: u32, path: &[u8]) {
        let key = (output, path.to_vec());
        if !self.touched.contains(&key) {
            self.touched.push(key);
        }
    }

    /// Makes the changed entries durable.
    pub(super) fn sync(&mut self, disk: &Disk) -> Answer<()> {
        for key in self.touched.drain(..) {
            if let Some(fd) = self.open.get(&key) {
                disk.sync(fd)?;
            }
        }
        self.open.clear();
        Ok(())
    }
}
