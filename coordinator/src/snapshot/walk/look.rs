//! One directory's names, looked at one by one.
//!
//! Never: goes into what it finds. It says what is to be read next.

use std::ffi::{CStr, OsStr};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use limb_common::manifest::NodeMeta;
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, readlinkat};
use nix::sys::stat::{FileStat, SFlag, fstatat};

use super::{
    Chain, Found, FoundDirectory, MAX_DEPTH, Pending, Seen, Walker, joined, kind_of, meta_of, mtime_of,
    open_path,
};
use crate::snapshot::{LinkPolicy, OutsideLink, SkipReason, Skipped, SnapshotError};

/// One directory's names being looked at.
pub(super) struct Look<'a, 'b> {
    pub(super) walker: &'a Walker<'b>,
    pub(super) here: &'a Pending,
    pub(super) fd: &'a OwnedFd,
    pub(super) found: &'a mut Found,
    /// Directories to read next.
    pub(super) below: Vec<Pending>,
}

impl Look<'_, '_> {
    fn path(&self, name: &CStr) -> PathBuf {
        self.here.path.join(OsStr::from_bytes(name.to_bytes()))
    }

    fn unreadable(&self, name: &CStr, errno: Errno) -> SnapshotError {
        SnapshotError::Unreadable { path: self.path(name), source: errno.into() }
    }

    /// `None`: nothing that a set holds.
    pub(super) fn visit(&mut self, name: &CStr) -> Result<Option<Seen>, SnapshotError> {
        let stat = match fstatat(self.fd, name, AtFlags::AT_SYMLINK_NOFOLLOW) {
            Err(Errno::ENOENT) => return Ok(None),
            other => other.map_err(|errno| self.unreadable(name, errno))?,
        };
        match kind_of(&stat) {
            SFlag::S_IFREG => self.walker.file(&stat, || self.path(name), None).map(Some),
            SFlag::S_IFDIR => {
                let meta = meta_of(self.fd, name, &stat);
                self.directory(name, self.path(name), &stat, meta, self.here.depth + 1).map(Some)
            }
            SFlag::S_IFLNK => {
                let target = match readlinkat(self.fd, name) {
                    Err(Errno::ENOENT | Errno::EINVAL) => return Ok(None),
                    other => other.map_err(|errno| self.unreadable(name, errno))?,
                };
                self.link(name, &stat, target.as_bytes())
            }
            other => {
                self.skip(name, other);
                Ok(None)
            }
        }
    }

    fn link(&mut self, name: &CStr, stat: &FileStat, target: &[u8]) -> Result<Option<Seen>, SnapshotError> {
        let kept = Seen::Symlink { target: target.into(), mtime_ns: mtime_of(stat) };
        if !leaves(self.here.depth, target) {
            return Ok(Some(kept));
        }
        let found = fstatat(self.fd, name, AtFlags::empty());
        if let (LinkPolicy::Follow, Ok(found), Ok(real)) =
            (self.walker.links, found, std::fs::canonicalize(self.path(name)))
        {
            return self.follow(name, real, &found, kept);
        }
        let path = joined(&self.here.inside, name.to_bytes());
        self.found.outside_links.push(OutsideLink { path, target: target.to_vec() });
        Ok(Some(kept))
    }

    fn follow(
        &mut self,
        name: &CStr,
        real: PathBuf,
        found: &FileStat,
        kept: Seen,
    ) -> Result<Option<Seen>, SnapshotError> {
        match kind_of(found) {
            SFlag::S_IFREG => self.walker.file(found, || real.clone(), Some(real.as_path().into())).map(Some),
            SFlag::S_IFDIR => {
                let id = (found.st_dev, found.st_ino);
                let mut above = Some(&self.here.chain);
                while let Some(chain) = above {
                    if chain.id == id {
                        let path = joined(&self.here.inside, name.to_bytes());
                        self.found.skipped.push(Skipped { path, why: SkipReason::LinkLoop });
                        return Ok(Some(kept));
                    }
                    above = chain.above.as_ref();
                }
                let fd = open_path(&real, OFlag::O_PATH | OFlag::O_DIRECTORY).map_err(|errno| {
                    SnapshotError::Unreadable { path: real.clone(), source: errno.into() }
                })?;
                let meta = meta_of(&fd, c".", found);
                self.directory(name, real, found, meta, 0).map(Some)
            }
            other => {
                self.skip(name, other);
                Ok(None)
            }
        }
    }

    fn directory(
        &mut self,
        name: &CStr,
        path: PathBuf,
        stat: &FileStat,
        meta: NodeMeta,
        depth: usize,
    ) -> Result<Seen, SnapshotError> {
        let (here, id) = (self.here, (stat.st_dev, stat.st_ino));
        self.walker.own.check(|| path.clone(), id)?;
        let total_depth = here.total_depth + 1;
        if total_depth > MAX_DEPTH {
            return Err(SnapshotError::TooLarge { path, limit: "4096 levels" });
        }
        let number = self.walker.directories.fetch_add(1, Ordering::Relaxed);
        self.found.directories.push((number, FoundDirectory::new(meta, path.clone())));
        let chain = Arc::new(Chain { id, above: Some(Arc::clone(&here.chain)) });
        let inside = joined(&here.inside, name.to_bytes());
        self.below.push(Pending { path, inside, number, depth, total_depth, chain });
        Ok(Seen::Directory(number))
    }

    fn skip(&mut self, name: &CStr, kind: SFlag) {
        let why = match kind {
            SFlag::S_IFIFO => SkipReason::Fifo,
            SFlag::S_IFSOCK => SkipReason::Socket,
            _ => SkipReason::Device,
        };
        self.found.skipped.push(Skipped { path: joined(&self.here.inside, name.to_bytes()), why });
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
