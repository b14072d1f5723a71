//! [`ReadFs`] as fuser wants it: translation and nothing else.

use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::{Duration, SystemTime};

use fuser::{
    AccessFlags, BsdFileFlags, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, InitFlags, IoctlFlags, KernelConfig, LockOwner, OpenFlags, RenameFlags, ReplyAttr, ReplyCreate,
    ReplyData, ReplyDirectory, ReplyDirectoryPlus, ReplyEmpty, ReplyEntry, ReplyIoctl, ReplyLseek, ReplyOpen,
    ReplyStatfs, ReplyWrite, ReplyXattr, Request, TimeOrNow, WriteFlags,
};
use limb_common::chunk::CHUNK_BYTES_U64;
use limb_common::manifest::{Inode, MAX_NAME_BYTES, NodeKind, ROOT};

use super::{Attributes, Owner, ReadFs, Seek, TreeError};
use crate::mount::session::request_capabilities;

/// A frozen set does not change: the kernel may keep everything, also what is not there.
const FOR_EVER: Duration = Duration::from_secs(365 * 24 * 3600);
/// The unit of statfs, as tools expect it.
const STATFS_BLOCK_BYTES: u32 = 4096;
/// Read-ahead requests of a whole link's worth (the default is 16).
const MAX_BACKGROUND: u16 = 128;
const CONGESTION: u16 = 96;
const PREFERRED_IO_BYTES: u32 = 1 << 20;

const WANTED: InitFlags = InitFlags::FUSE_ASYNC_READ
    .union(InitFlags::FUSE_PARALLEL_DIROPS)
    .union(InitFlags::FUSE_DO_READDIRPLUS)
    // Where nobody asks for attributes, the kernel asks for names only: a tenth of the work.
    .union(InitFlags::FUSE_READDIRPLUS_AUTO)
    .union(InitFlags::FUSE_CACHE_SYMLINKS)
    .union(InitFlags::FUSE_EXPLICIT_INVAL_DATA)
    .union(InitFlags::FUSE_NO_OPEN_SUPPORT)
    .union(InitFlags::FUSE_NO_OPENDIR_SUPPORT);

pub(super) fn errno(error: TreeError) -> Errno {
    match error {
        TreeError::NoEntry => Errno::ENOENT,
        TreeError::NotADirectory => Errno::ENOTDIR,
        TreeError::IsADirectory => Errno::EISDIR,
        TreeError::NameTooLong => Errno::ENAMETOOLONG,
        TreeError::NoAttribute => Errno::ENODATA,
        TreeError::NotASymlink => Errno::EINVAL,
        TreeError::PastTheEnd => Errno::ENXIO,
    }
}

fn kind_of(kind: NodeKind) -> FileType {
    match kind {
        NodeKind::Directory => FileType::Directory,
        NodeKind::File => FileType::RegularFile,
        NodeKind::Symlink => FileType::Symlink,
    }
}

fn attr_of(attributes: &Attributes) -> FileAttr {
    FileAttr {
        ino: INodeNo(attributes.inode.0),
        size: attributes.size,
        blocks: attributes.blocks,
        atime: attributes.mtime,
        mtime: attributes.mtime,
        ctime: attributes.mtime,
        crtime: attributes.mtime,
        kind: kind_of(attributes.kind),
        perm: u16::try_from(attributes.mode & 0o7777).unwrap_or(0),
        nlink: attributes.nlink,
        uid: attributes.owner.uid,
        gid: attributes.owner.gid,
        rdev: 0,
        blksize: PREFERRED_IO_BYTES,
        flags: 0,
    }
}

/// Inode 0 means: not there, and remember that.
fn nothing() -> FileAttr {
    attr_of(&Attributes {
        inode: Inode(0),
        kind: NodeKind::File,
        mode: 0,
        nlink: 0,
        size: 0,
        blocks: 0,
        mtime: SystemTime::UNIX_EPOCH,
        owner: Owner { uid: 0, gid: 0 },
    })
}

fn send_xattr(reply: ReplyXattr, value: &[u8], room: u32) {
    let len = u32::try_from(value.len()).unwrap_or(u32::MAX);
    if room == 0 {
        reply.size(len);
    } else if room < len {
        reply.error(Errno::ERANGE);
    } else {
        reply.data(value);
    }
}

impl Filesystem for ReadFs {
    fn init(&mut self, _request: &Request, config: &mut KernelConfig) -> io::Result<()> {
        self.granted = request_capabilities(config, WANTED);
        let limits = [
            config.set_max_background(MAX_BACKGROUND).map(u32::from).map_err(u32::from),
            config.set_congestion_threshold(CONGESTION).map(u32::from).map_err(u32::from),
            // Also bounds the pages of one read: 256 of them.
            config.set_max_write(u32::try_from(CHUNK_BYTES_U64).unwrap_or(PREFERRED_IO_BYTES)),
        ];
        if limits.iter().any(Result::is_err) {
            tracing::debug!(?limits, "the kernel's limits are others");
        }
        Ok(())
    }

    fn lookup(&self, _request: &Request, parent: INodeNo, name: &OsStr, reply: ReplyEntry) {
        let found = self
            .core
            .tree
            .lookup(Inode(parent.0), name.as_bytes())
            .and_then(|inode| self.core.tree.attributes(inode));
        match found {
            Ok(attributes) => reply.entry(&FOR_EVER, &attr_of(&attributes), Generation(0)),
            Err(TreeError::NoEntry) => reply.entry(&FOR_EVER, &nothing(), Generation(0)),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn getattr(&self, _request: &Request, inode: INodeNo, _fh: Option<FileHandle>, reply: ReplyAttr) {
        match self.core.tree.attributes(Inode(inode.0)) {
            Ok(attributes) => reply.attr(&FOR_EVER, &attr_of(&attributes)),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn readlink(&self, _request: &Request, inode: INodeNo, reply: ReplyData) {
        match self.core.tree.target(Inode(inode.0)) {
            Ok(target) => reply.data(target),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn open(&self, _request: &Request, _inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        // ENOSYS tells the kernel to open by itself from now on and to keep its pages.
        if self.granted.contains(InitFlags::FUSE_NO_OPEN_SUPPORT) {
            reply.error(Errno::ENOSYS);
        } else {
            reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_NOFLUSH);
        }
    }

    fn read(
        &self,
        request: &Request,
        inode: INodeNo,
        _fh: FileHandle,
        offset: u64,
        size: u32,
        _flags: OpenFlags,
        _lock_owner: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.answer_read(request.pid(), Inode(inode.0), offset, u64::from(size), reply);
    }

    fn opendir(&self, _request: &Request, _inode: INodeNo, _flags: OpenFlags, reply: ReplyOpen) {
        if self.granted.contains(InitFlags::FUSE_NO_OPENDIR_SUPPORT) {
            reply.error(Errno::ENOSYS);
        } else {
            reply.opened(FileHandle(0), FopenFlags::FOPEN_KEEP_CACHE | FopenFlags::FOPEN_CACHE_DIR);
        }
    }

    fn readdir(
        &self,
        _request: &Request,
        inode: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectory,
    ) {
        let tree = &self.core.tree;
        let entries = match tree.list(Inode(inode.0), offset) {
            Ok(entries) => entries,
            Err(error) => return reply.error(errno(error)),
        };
        for entry in entries {
            let Some(node) = tree.manifest().node(entry.inode) else { continue };
            let name = OsStr::from_bytes(entry.name);
            if reply.add(INodeNo(entry.inode.0), entry.next, kind_of(node.kind), name) {
                break;
            }
        }
        reply.ok();
    }

    fn readdirplus(
        &self,
        _request: &Request,
        inode: INodeNo,
        _fh: FileHandle,
        offset: u64,
        mut reply: ReplyDirectoryPlus,
    ) {
        let tree = &self.core.tree;
        let entries = match tree.list(Inode(inode.0), offset) {
            Ok(entries) => entries,
            Err(error) => return reply.error(errno(error)),
        };
        for entry in entries {
            let Ok(attributes) = tree.attributes(entry.inode) else { continue };
            let name = OsStr::from_bytes(entry.name);
            let number = INodeNo(entry.inode.0);
            if reply.add(number, entry.next, name, &FOR_EVER, &attr_of(&attributes), Generation(0)) {
                break;
            }
        }
        reply.ok();
    }

    fn statfs(&self, _request: &Request, _inode: INodeNo, reply: ReplyStatfs) {
        let manifest = self.core.tree.manifest();
        let blocks = manifest.total_bytes().div_ceil(u64::from(STATFS_BLOCK_BYTES));
        let names = u32::try_from(MAX_NAME_BYTES).unwrap_or(255);
        reply.statfs(blocks, 0, 0, manifest.inode_count(), 0, STATFS_BLOCK_BYTES, names, STATFS_BLOCK_BYTES);
    }

    fn getxattr(&self, _request: &Request, inode: INodeNo, name: &OsStr, size: u32, reply: ReplyXattr) {
        match self.core.tree.xattr(Inode(inode.0), name.as_bytes()) {
            Ok(value) => send_xattr(reply, value, size),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn listxattr(&self, _request: &Request, inode: INodeNo, size: u32, reply: ReplyXattr) {
        match self.core.tree.xattr_names(Inode(inode.0)) {
            Ok(names) => send_xattr(reply, &names, size),
            Err(error) => reply.error(errno(error)),
        }
    }

    fn lseek(
        &self,
        _request: &Request,
        inode: INodeNo,
        _fh: FileHandle,
        offset: i64,
        whence: i32,
        reply: ReplyLseek,
    ) {
        let what = match whence {
            libc::SEEK_DATA => Seek::Data,
            libc::SEEK_HOLE => Seek::Hole,
            _ => return reply.error(Errno::EINVAL),
        };
        let Ok(from) = u64::try_from(offset) else { return reply.error(Errno::ENXIO) };
        match self.core.tree.seek(Inode(inode.0), from, what).map(i64::try_from) {
            Ok(Ok(found)) => reply.offset(found),
            Ok(Err(_)) => reply.error(Errno::EOVERFLOW),
            Err(error) => reply.error(errno(error)),
        }
    }

    // Nothing to do on a close or a sync; ENOSYS tells the kernel not to ask again.
    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: LockOwner, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }
    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }
    fn fsyncdir(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }
    // The kernel checks permissions by mode (default_permissions).
    fn access(&self, _: &Request, _: INodeNo, _: AccessFlags, reply: ReplyEmpty) {
        reply.ok();
    }
    fn ioctl(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: IoctlFlags,
        _: u32,
        _: &[u8],
        _: u32,
        reply: ReplyIoctl,
    ) {
        reply.error(Errno::ENOTTY);
    }

    // The kernel refuses these on a read-only mount before it asks; a remount must not help.
    fn setattr(
        &self,
        _: &Request,
        _: INodeNo,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u32>,
        _: Option<u64>,
        _: Option<TimeOrNow>,
        _: Option<TimeOrNow>,
        _: Option<SystemTime>,
        _: Option<FileHandle>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<SystemTime>,
        _: Option<BsdFileFlags>,
        reply: ReplyAttr,
    ) {
        reply.error(Errno::EROFS);
    }
    fn mknod(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, _: u32, reply: ReplyEntry) {
        reply.error(Errno::EROFS);
    }
    fn mkdir(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, reply: ReplyEntry) {
        reply.error(Errno::EROFS);
    }
    fn unlink(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EROFS);
    }
    fn rmdir(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EROFS);
    }
    fn symlink(&self, _: &Request, _: INodeNo, _: &OsStr, _: &Path, reply: ReplyEntry) {
        reply.error(Errno::EROFS);
    }
    fn rename(
        &self,
        _: &Request,
        _: INodeNo,
        _: &OsStr,
        _: INodeNo,
        _: &OsStr,
        _: RenameFlags,
        reply: ReplyEmpty,
    ) {
        reply.error(Errno::EROFS);
    }
    fn link(&self, _: &Request, _: INodeNo, _: INodeNo, _: &OsStr, reply: ReplyEntry) {
        reply.error(Errno::EROFS);
    }
    fn create(&self, _: &Request, _: INodeNo, _: &OsStr, _: u32, _: u32, _: i32, reply: ReplyCreate) {
        reply.error(Errno::EROFS);
    }
    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        _: u64,
        _: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        reply.error(Errno::EROFS);
    }
    fn fallocate(&self, _: &Request, _: INodeNo, _: FileHandle, _: u64, _: u64, _: i32, reply: ReplyEmpty) {
        reply.error(Errno::EROFS);
    }
    fn setxattr(&self, _: &Request, _: INodeNo, _: &OsStr, _: &[u8], _: i32, _: u32, reply: ReplyEmpty) {
        reply.error(Errno::EROFS);
    }
    fn removexattr(&self, _: &Request, _: INodeNo, _: &OsStr, reply: ReplyEmpty) {
        reply.error(Errno::EROFS);
    }
}

/// The kernel's root and the manifest's are the same number.
const _: () = assert!(INodeNo::ROOT.0 == ROOT.0);
