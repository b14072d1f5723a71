//! Binds an output (or a private writable tree) to FUSE. Thin: what a call means is decided in
//! `results`; here it is only decided who answers. What is in memory is answered by the FUSE
//! thread; what waits for home is answered later by a task, so that metadata never queues behind
//! data.
//!
//! We are the only ones who change these files, so the kernel may remember everything. There is
//! no writeback cache: it breaks O_WRONLY appends and can deadlock with shared mappings.

mod closer;
mod reply;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use fuser::{
    BsdFileFlags, FileHandle, Filesystem, FopenFlags, Generation, INodeNo, InitFlags, KernelConfig,
    LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate, ReplyData, ReplyDirectory, ReplyDirectoryPlus,
    ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use limb_common::assignment::Durability;
use limb_common::task;
use nix::errno::Errno;
use tokio::runtime::Handle;

use self::closer::{process_of, was_killed};
use self::reply::{errno, file_attr, kind_of, mtime_ns};
use super::session::request_capabilities;
use crate::results::output::Output;
use crate::results::tree::{Attributes, Closed, Creation, OpenMode, SetAttributes, Stake};

/// Nobody but this file system changes what the kernel remembers.
const TTL: Duration = Duration::from_secs(365 * 24 * 3600);
const GENERATION: Generation = Generation(0);
const MAX_WRITE_BYTES: u32 = 1 << 20;
/// Block size and free space that statfs shows where there is no quota.
const BLOCK_BYTES: u64 = 4096;
const BOUNDLESS_BYTES: u64 = 1 << 50;

/// The file system of one output.
#[derive(Debug)]
pub struct WriteFs {
    output: Arc<Output>,
    runtime: Handle,
    /// Which thread opened a handle that may write; where close waits for home, which process: only
    /// the opener's close does, so that a forked child that closes what it inherited publishes
    /// nothing.
    openers: Arc<Mutex<HashMap<u64, u32>>>,
}

impl WriteFs {
    /// `runtime` runs the answers that wait.
    #[must_use]
    pub fn new(output: Arc<Output>, runtime: Handle) -> Self {
        Self { output, runtime, openers: Arc::default() }
    }

    fn later<F>(&self, name: &'static str, answer: F)
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let _inside = self.runtime.enter();
        task::detach(name, answer);
    }

    fn opened(&self, handle: u64, flags: i32, thread: u32) {
        if open_mode(flags).write {
            let waits = self.output.durability() == Durability::Close;
            let opener = if waits { process_of(thread) } else { thread };
            self.openers.lock().unwrap_or_else(PoisonError::into_inner).insert(handle, opener);
        }
    }

    fn opener_of(&self, handle: u64) -> Option<u32> {
        self.openers.lock().unwrap_or_else(PoisonError::into_inner).get(&handle).copied()
    }

    /// Looks at the closing thread, where something depends on it.
    fn how_closed(&self, handle: u64, thread: u32) -> Closed {
        let stake = self.output.tree().stake(handle);
        match stake {
            Stake::Nothing => Closed::ByOther,
            Stake::Unpublished | Stake::Torn if was_killed(thread) => Closed::ByDeath,
            Stake::Unpublished => Closed::ByOther,
            Stake::Torn => {
                let opener = self.opener_of(handle).map(process_of);
                if opener == Some(process_of(thread)) { Closed::ByOpener } else { Closed::ByOther }
            }
        }
    }

    fn create_or_open(
        &self,
        req: &Request,
        parent: u64,
        name: &OsStr,
        mode: u32,
        flags: i32,
    ) -> Result<(Attributes, u64), Errno> {
        let how = Creation { mode, uid: req.uid(), gid: req.gid() };
        let mut tree = self.output.tree();
        match tree.create(parent, name.as_bytes(), how, open_mode(flags)) {
            Err(Errno::EEXIST) if flags & libc::O_EXCL == 0 => {
                let found = tree.lookup(parent, name.as_bytes())?;
                let handle = tree.open(found.inode, open_mode(flags))?;
                Ok((tree.attributes(found.inode)?, handle))
            }
            made => made,
        }
    }
}

fn open_mode(flags: i32) -> OpenMode {
    OpenMode {
        write: flags & libc::O_ACCMODE != libc::O_RDONLY,
        append: flags & libc::O_APPEND != 0,
        truncate: flags & libc::O_TRUNC != 0,
    }
}

fn send_entry(reply: ReplyEntry, made: Result<Attributes, Errno>) {
    match made {
        Ok(attributes) => reply.entry(&TTL, &file_attr(&attributes), GENERATION),
        Err(error) => reply.error(errno(error)),
    }
}

fn send_attr(reply: ReplyAttr, got: Result<Attributes, Errno>) {
    match got {
        Ok(attributes) => reply.attr(&TTL, &file_attr(&attributes)),
        Err(error) => reply.error(errno(error)),
    }
}

fn send_empty(reply: ReplyEmpty, done: Result<(), Errno>) {
    match done {
        Ok(()) => reply.ok(),
        Err(error) => reply.error(errno(error)),
    }
}

fn send_bytes(reply: ReplyData, got: Result<Vec<u8>, Errno>) {
    match got {
        Ok(bytes) => reply.data(&bytes),
        Err(error) => reply.error(errno(error)),
    }
}

fn send_written(reply: ReplyWrite, done: Result<(), Errno>, len: usize) {
    match done {
        Ok(()) => reply.written(u32::try_from(len).unwrap_or(u32::MAX)),
        Err(error) => reply.error(errno(error)),
    }
}

fn send_xattr(reply: ReplyXattr, got: Result<Vec<u8>, Errno>, size: u32) {
    match got {
        Err(error) => reply.error(errno(error)),
        Ok(bytes) if size == 0 => reply.size(u32::try_from(bytes.len()).unwrap_or(u32::MAX)),
        Ok(bytes) if bytes.len() > size as usize => reply.error(errno(Errno::ERANGE)),
        Ok(bytes) => reply.data(&bytes),
    }
}

impl Filesystem for WriteFs {
    fn init(&mut self, _req: &Request, config: &mut KernelConfig) -> std::io::Result<()> {
        request_capabilities(
            config,
            InitFlags::FUSE_ASYNC_READ
                | InitFlags::FUSE_BIG_WRITES
                | InitFlags::FUSE_ATOMIC_O_TRUNC
                | InitFlags::FUSE_DO_READDIRPLUS
                | InitFlags::FUSE_READDIRPLUS_AUTO
                | InitFlags::FUSE_PARALLEL_DIROPS
                | InitFlags::FUSE_HANDLE_KILLPRIV
                | InitFlags::FUSE_MAX_PAGES
                | InitFlags::FUSE_EXPLICIT_INVAL_DATA,
        );
        // The kernel's own limit is answered as an error, and is then the limit.
        let _nearest: Result<u32, u32> = config.set_max_write(MAX_WRITE_BYTES);
        Ok(())
    }

    fn lookup(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        send_entry(reply, self.output.tree().lookup(parent.0, name.as_bytes()));
    }

    fn getattr(&self, _req: &Request, ino: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        send_attr(reply, self.output.tree().attributes(ino.0));
    }

    fn setattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        mode: Option<u32>,
        uid: Option<u32>,
        gid: Option<u32>,
        size: Option<u64>,
        _atime: Option<TimeOrNow>,
        mtime: Option<TimeOrNow>,
        _ctime: Option<SystemTime>,
        _fh: Option<FileHandle>,
        _crtime: Option<SystemTime>,
        _chgtime: Option<SystemTime>,
        _bkuptime: Option<SystemTime>,
        _flags: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        let set = SetAttributes { mode, uid, gid, mtime_ns: mtime.map(mtime_ns) };
        let resized = size.map_or(Some(Ok(())), |size| self.output.resize_now(ino.0, size));
        match resized {
            Some(done) => {
                let got = done.and_then(|()| self.output.tree().set_attributes(ino.0, set));
                send_attr(reply, got);
            }
            None => {
                let output = Arc::clone(&self.output);
                self.later("results-setattr", async move {
                    send_attr(reply, output.set(ino.0, size, set).await);
                });
            }
        }
    }

    fn readlink(&self, _req: &Request, ino: INodeNo, reply: ReplyData) {
        send_bytes(reply, self.output.tree().read_link(ino.0));
    }

    fn mknod(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        _rdev: u32,
        reply: ReplyEntry,
    ) {
        if mode & libc::S_IFMT != libc::S_IFREG {
            return reply.error(errno(Errno::EPERM));
        }
        let how = Creation { mode, uid: req.uid(), gid: req.gid() };
        send_entry(reply, self.output.tree().make_closed_file(parent.0, name.as_bytes(), how));
    }

    fn mkdir(&self, req: &Request, parent: INodeNo, name: &OsStr, mode: u32, _umask: u32, reply: ReplyEntry) {
        let how = Creation { mode, uid: req.uid(), gid: req.gid() };
        send_entry(reply, self.output.tree().make_directory(parent.0, name.as_bytes(), how));
    }

    fn unlink(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        if let Some(done) = self.output.unlink_now(parent.0, name.as_bytes()) {
            return send_empty(reply, done);
        }
        let (output, name) = (Arc::clone(&self.output), name.as_bytes().to_vec());
        self.later("results-unlink", async move {
            send_empty(reply, output.unlink(parent.0, &name).await);
        });
    }

    fn rmdir(&self, _req: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        send_empty(reply, self.output.tree().remove_directory(parent.0, name.as_bytes()));
    }

    fn symlink(&self, req: &Request, parent: INodeNo, name: &OsStr, target: &Path, reply: ReplyEntry) {
        let how = Creation { mode: 0o777, uid: req.uid(), gid: req.gid() };
        let target = target.as_os_str().as_bytes();
        send_entry(reply, self.output.tree().make_symlink(parent.0, name.as_bytes(), target, how));
    }

    fn rename(
        &self,
        _req: &Request,
        parent: INodeNo,
        name: &OsStr,
        newparent: INodeNo,
        newname: &OsStr,
        flags: RenameFlags,
        reply: ReplyEmpty,
    ) {
        if flags.intersects(RenameFlags::RENAME_EXCHANGE | RenameFlags::RENAME_WHITEOUT) {
            return reply.error(errno(Errno::EINVAL));
        }
        let no_replace = flags.contains(RenameFlags::RENAME_NOREPLACE);
        let (from, to) = ((parent.0, name.as_bytes()), (newparent.0, newname.as_bytes()));
        if let Some(done) = self.output.rename_now(from, to, no_replace) {
            return send_empty(reply, done);
        }
        let output = Arc::clone(&self.output);
        let (name, newname) = (name.as_bytes().to_vec(), newname.as_bytes().to_vec());
        self.later("results-rename", async move {
            let (from, to) = ((parent.0, name.as_slice()), (newparent.0, newname.as_slice()));
            send_empty(reply, output.rename(from, to, no_replace).await);
        });
    }

    fn link(&self, _req: &Request, ino: INodeNo, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        send_entry(reply, self.output.tree().link(ino.0, parent.0, name.as_bytes()));
    }

    fn open(&self, req: &Request, ino: INodeNo, flags: OpenFlags, reply: ReplyOpen) {
        let opened = self.output.tree().open(ino.0, open_mode(flags.0));
        match opened {
            Ok(handle) => {
                self.opened(handle, flags.0, req.pid());
                reply.opened(FileHandle(handle), FopenFlags::FOPEN_KEEP_CACHE);
            }
            Err(error) => reply.error(errno(error)),
        }
    }

    fn create(
        &self,
        req: &Request,
        parent: INodeNo,
        name: &OsStr,
        mode: u32,
        _umask: u32,
        flags: i32,
        reply: ReplyCreate,
    ) {
        match self.create_or_open(req, parent.0, name, mode, flags) {
            Ok((made, handle)) => {
                self.opened(handle, flags, req.pid());
                let flags = FopenFlags::FOPEN_KEEP_CACHE;
                reply.created(&TTL, &file_attr(&made), GENERATION, FileHandle(handle), flags);
            }
            Err(error) => reply.error(errno(error)),
        }
    }

    fn read(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        if let Some(got) = self.output.read_now(ino.0, offset, size as usize) {
            return send_bytes(reply, got);
        }
        let output = Arc::clone(&self.output);
        self.later("results-read", async move {
            send_bytes(reply, output.read(ino.0, offset, size as usize).await);
        });
    }

    fn write(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        data: &[u8],
        _write_flags: WriteFlags,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        if let Some(done) = self.output.write_now(ino.0, offset, data) {
            return send_written(reply, done, data.len());
        }
        let (output, data) = (Arc::clone(&self.output), data.to_vec());
        self.later("results-write", async move {
            let done = output.write(ino.0, offset, &data).await;
            send_written(reply, done, data.len());
        });
    }

    fn flush(&self, req: &Request, ino: INodeNo, fh: FileHandle, _owner: LockOwner, reply: ReplyEmpty) {
        let how = self.how_closed(fh.0, req.pid());
        self.output.tree().flushed(fh.0, how);
        if self.output.durability() != Durability::Close {
            return send_empty(reply, self.output.sticky(ino.0));
        }
        // Who was killed has not said that the file is whole, and waits for nobody.
        let own = how != Closed::ByDeath && self.opener_of(fh.0) == Some(process_of(req.pid()));
        let output = Arc::clone(&self.output);
        self.later("results-flush", async move { send_empty(reply, output.flush(ino.0, own).await) });
    }

    fn release(
        &self,
        _req: &Request,
        _ino: INodeNo,
        fh: FileHandle,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        _flush: bool,
        reply: ReplyEmpty,
    ) {
        self.openers.lock().unwrap_or_else(PoisonError::into_inner).remove(&fh.0);
        send_empty(reply, self.output.tree().release(fh.0));
    }

    fn fsync(&self, _req: &Request, ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        let output = Arc::clone(&self.output);
        self.later("results-fsync", async move { send_empty(reply, output.sync(ino.0).await) });
    }

    fn fsyncdir(&self, _req: &Request, ino: INodeNo, _fh: FileHandle, _datasync: bool, reply: ReplyEmpty) {
        let output = Arc::clone(&self.output);
        self.later("results-fsyncdir", async move { send_empty(reply, output.sync_directory(ino.0).await) });
    }

    fn fallocate(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        length: u64,
        mode: i32,
        reply: ReplyEmpty,
    ) {
        let output = Arc::clone(&self.output);
        self.later("results-fallocate", async move {
            send_empty(reply, output.allocate(ino.0, offset, length, mode).await);
        });
    }

    fn readdir(&self, _req: &Request, ino: INodeNo, _fh: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        match self.listing(ino.0, offset) {
            Ok(listed) => {
                for (cookie, attributes, name) in listed {
                    let kind = kind_of(attributes.kind);
                    if reply.add(INodeNo(attributes.inode), cookie, kind, OsStr::from_bytes(&name)) {
                        break;
                    }
                }
                reply.ok();
            }
            Err(error) => reply.error(errno(error)),
        }
    }

    fn readdirplus(
        &self,
        _req: &Request,
        ino: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        match self.listing(ino.0, offset) {
            Ok(listed) => {
                for (cookie, attributes, name) in listed {
                    let (attr, name) = (file_attr(&attributes), OsStr::from_bytes(&name));
                    if reply.add(INodeNo(attributes.inode), cookie, name, &TTL, &attr, GENERATION) {
                        break;
                    }
                }
                reply.ok();
            }
            Err(error) => reply.error(errno(error)),
        }
    }

    fn statfs(&self, _req: &Request, _ino: INodeNo, reply: ReplyStatfs) {
        let usage = self.output.tree().usage();
        let limit = usage.limit_bytes.unwrap_or(BOUNDLESS_BYTES);
        let free = limit.saturating_sub(usage.used_bytes) / BLOCK_BYTES;
        let inodes = usage.limit_inodes.unwrap_or(u64::from(u32::MAX));
        let inodes_free = inodes.saturating_sub(usage.used_inodes);
        reply.statfs(limit / BLOCK_BYTES, free, free, inodes, inodes_free, 4096, 255, 4096);
    }

    fn setxattr(
        &self,
        _req: &Request,
        ino: INodeNo,
        name: &OsStr,
        value: &[u8],
        flags: i32,
        _position: u32,
        reply: ReplyEmpty,
    ) {
        send_empty(reply, self.output.tree().set_xattr(ino.0, name.as_bytes(), value, flags));
    }

    fn getxattr(&self, _req: &Request, ino: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        send_xattr(reply, self.output.tree().xattr(ino.0, name.as_bytes()), size);
    }

    fn listxattr(&self, _req: &Request, ino: INodeNo, size: u32, reply: ReplyXattr) {
        send_xattr(reply, self.output.tree().xattr_names(ino.0), size);
    }

    fn removexattr(&self, _req: &Request, ino: INodeNo, name: &OsStr, reply: ReplyEmpty) {
        send_empty(reply, self.output.tree().remove_xattr(ino.0, name.as_bytes()));
    }
}

/// Cookies of `.` and `..`; those of the tree follow.
const DOT: u64 = 1;
const DOT_DOT: u64 = 2;

impl WriteFs {
    fn listing(&self, inode: u64, offset: u64) -> Result<Vec<(u64, Attributes, Vec<u8>)>, Errno> {
        let mut tree = self.output.tree();
        let mut listed = Vec::new();
        if offset < DOT {
            listed.push((DOT, tree.attributes(inode)?, b".".to_vec()));
        }
        if offset < DOT_DOT {
            let parent = tree.parent_of(inode);
            listed.push((DOT_DOT, tree.attributes(parent)?, b"..".to_vec()));
        }
        let entries = tree.read_directory(inode, offset.saturating_sub(DOT_DOT))?;
        listed.extend(entries.into_iter().map(|(cookie, attr, name)| (cookie + DOT_DOT, attr, name)));
        Ok(listed)
    }
}
