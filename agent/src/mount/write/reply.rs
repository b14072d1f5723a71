//! From our types to fuser's.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fuser::{FileAttr, FileType, INodeNo, TimeOrNow};
use limb_common::clock;
use nix::errno::Errno;

use crate::results::tree::{Attributes, AttributesKind};

/// What programs should write at once.
const BLOCK_SIZE_HINT: u32 = 1 << 20;

pub(super) fn errno(error: Errno) -> fuser::Errno {
    fuser::Errno::from_i32(error as i32)
}

pub(super) fn kind_of(kind: AttributesKind) -> FileType {
    match kind {
        AttributesKind::Directory => FileType::Directory,
        AttributesKind::File => FileType::RegularFile,
        AttributesKind::Symlink => FileType::Symlink,
    }
}

pub(super) fn file_attr(attributes: &Attributes) -> FileAttr {
    let (mtime, ctime) = (time_of(attributes.mtime_ns), time_of(attributes.ctime_ns));
    FileAttr {
        ino: INodeNo(attributes.inode),
        size: attributes.size,
        blocks: attributes.blocks,
        atime: mtime,
        mtime,
        ctime,
        crtime: ctime,
        kind: kind_of(attributes.kind),
        perm: u16::try_from(attributes.mode & 0o7777).unwrap_or(0),
        nlink: attributes.nlink,
        uid: attributes.uid,
        gid: attributes.gid,
        rdev: 0,
        blksize: BLOCK_SIZE_HINT,
        flags: 0,
    }
}

fn time_of(ns: i64) -> SystemTime {
    let distance = Duration::from_nanos(ns.unsigned_abs());
    if ns >= 0 { UNIX_EPOCH + distance } else { UNIX_EPOCH - distance }
}

pub(super) fn mtime_ns(time: TimeOrNow) -> i64 {
    let since = |time: SystemTime| match time.duration_since(UNIX_EPOCH) {
        Ok(after) => i64::try_from(after.as_nanos()).unwrap_or(i64::MAX),
        Err(before) => i64::try_from(before.duration().as_nanos()).map_or(i64::MIN, |ns| -ns),
    };
    match time {
        TimeOrNow::SpecificTime(time) => since(time),
        TimeOrNow::Now => i64::try_from(clock::unix_ms()).unwrap_or(i64::MAX).saturating_mul(1_000_000),
    }
}
