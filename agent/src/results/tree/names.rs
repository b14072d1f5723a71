//! Calls on names: lookup, create, rename, link, unlink, attributes.

use nix::errno::Errno;

use super::{Attributes, OpenMode, SetAttributes, Tree};
use crate::results::content::Content;
use crate::results::namespace::{Directory, File, Kind, ROOT, check_name, stays_within};
use crate::results::outbox::{Op, PublishKind};

/// Linux's limits.
const MAX_XATTR_VALUE_BYTES: usize = 64 * 1024;

/// Who makes something, and how.
#[derive(Clone, Copy, Debug)]
pub struct Creation {
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
}

impl Tree {
    pub fn lookup(&mut self, parent: u64, name: &[u8]) -> Result<Attributes, Errno> {
        let inode = self.names.find(parent, name)?.ok_or(Errno::ENOENT)?;
        self.attributes(inode)
    }

    /// Checks that something new may stand there.
    fn vacant(&mut self, parent: u64, name: &[u8]) -> Result<(), Errno> {
        self.check_new_name(name)?;
        if self.names.find(parent, name)?.is_some() {
            return Err(Errno::EEXIST);
        }
        if parent != ROOT && self.names.node(parent)?.names.is_empty() {
            return Err(Errno::ENOENT);
        }
        self.names.check_path(parent, name)?;
        if self.settings.quota_inodes.is_some_and(|quota| self.used_inodes >= quota) {
            return Err(self.no_space());
        }
        Ok(())
    }

    fn check_new_name(&self, name: &[u8]) -> Result<(), Errno> {
        check_name(name)?;
        let reserved = self.settings.outbox.is_some() && name.starts_with(b".limb");
        if reserved { Err(Errno::EPERM) } else { Ok(()) }
    }

    fn make(&mut self, parent: u64, name: &[u8], kind: Kind, how: Creation) -> Result<u64, Errno> {
        self.vacant(parent, name)?;
        let inode = self.names.insert(kind, how.mode, (how.uid, how.gid), self.now_ns);
        self.names.attach(parent, name.to_vec(), inode);
        self.used_inodes += 1;
        self.names.node_mut(inode)?.touched = true;
        self.touch_directory(parent);
        Ok(inode)
    }

    fn touch_directory(&mut self, directory: u64) {
        let now_ns = self.now_ns;
        if let Ok(node) = self.names.node_mut(directory) {
            node.mtime_ns = now_ns;
            node.ctime_ns = now_ns;
        }
    }

    /// Makes an empty file. Nobody sees it at home before it is published.
    pub fn make_file(&mut self, parent: u64, name: &[u8], how: Creation) -> Result<Attributes, Errno> {
        let kind = Kind::File(Box::new(File::new(Content::empty(), false)));
        let inode = self.make(parent, name, kind, how)?;
        self.begin(inode, true);
        self.attributes(inode)
    }

    pub fn create(
        &mut self,
        parent: u64,
        name: &[u8],
        how: Creation,
        mode: OpenMode,
    ) -> Result<(Attributes, u64), Errno> {
        let made = self.make_file(parent, name, how)?;
        let handle = self.open(made.inode, mode)?;
        Ok((made, handle))
    }

    /// mknod of a regular file: nobody will release it, so it is published at once.
    pub fn make_closed_file(&mut self, parent: u64, name: &[u8], how: Creation) -> Result<Attributes, Errno> {
        let made = self.make_file(parent, name, how)?;
        self.end_life(made.inode);
        Ok(made)
    }

    pub fn make_directory(&mut self, parent: u64, name: &[u8], how: Creation) -> Result<Attributes, Errno> {
        let inode = self.make(parent, name, Kind::Directory(Directory::default()), how)?;
        let (path, mode) = (self.names.path_in(parent, name), how.mode & 0o1777);
        self.push(inode, Op::DirectoryMade { path, mode });
        self.attributes(inode)
    }

    pub fn make_symlink(
        &mut self,
        parent: u64,
        name: &[u8],
        target: &[u8],
        how: Creation,
    ) -> Result<Attributes, Errno> {
        if self.settings.outbox.is_some() && !stays_within(target, self.names.depth(parent)) {
            return Err(Errno::EPERM);
        }
        let how = Creation { mode: 0o777, ..how };
        let inode = self.make(parent, name, Kind::Symlink(target.to_vec()), how)?;
        let path = self.names.path_in(parent, name);
        self.push(inode, Op::SymlinkMade { path, target: target.to_vec() });
        self.attributes(inode)
    }

    pub fn link(&mut self, inode: u64, parent: u64, name: &[u8]) -> Result<Attributes, Errno> {
        self.vacant(parent, name)?;
        match self.names.node(inode)?.kind {
            Kind::Directory(_) => return Err(Errno::EPERM),
            Kind::Symlink(_) if self.settings.outbox.is_some() => {
                if self.names.leaks_at(inode, self.names.depth(parent)) {
                    return Err(Errno::EPERM);
                }
            }
            Kind::Symlink(_) | Kind::File(_) => {}
        }
        if self.names.lower_links(inode) > 1 {
            self.names.load_all();
        }
        let existing = self.names.path(inode).ok_or(Errno::ENOENT)?;
        if self.names.file(inode).is_ok_and(|file| !file.at_home) {
            self.publish(inode, PublishKind::Snapshot);
        }
        self.names.attach(parent, name.to_vec(), inode);
        let now_ns = self.now_ns;
        let node = self.names.node_mut(inode)?;
        node.touched = true;
        node.ctime_ns = now_ns;
        self.touch_directory(parent);
        let path = self.names.path_in(parent, name);
        self.push(inode, Op::HardLinkMade { existing, path });
        self.attributes(inode)
    }

    pub fn unlink(&mut self, parent: u64, name: &[u8]) -> Result<(), Errno> {
        let inode = self.names.find(parent, name)?.ok_or(Errno::ENOENT)?;
        if matches!(self.names.node(inode)?.kind, Kind::Directory(_)) {
            return Err(Errno::EISDIR);
        }
        self.remove(parent, name, inode, true);
        Ok(())
    }

    pub fn remove_directory(&mut self, parent: u64, name: &[u8]) -> Result<(), Errno> {
        let inode = self.names.find(parent, name)?.ok_or(Errno::ENOENT)?;
        if !self.names.directory(inode)?.entries.is_empty() {
            return Err(Errno::ENOTEMPTY);
        }
        self.remove(parent, name, inode, true);
        Ok(())
    }

    /// Takes a name away; `journal` is false where another entry removes it at home.
    fn remove(&mut self, parent: u64, name: &[u8], inode: u64, journal: bool) {
        if self.names.lower_links(inode) > 1 {
            self.names.load_all();
        }
        let path = self.names.path_in(parent, name);
        let (shown, directory) = match self.names.node(inode).map(|node| &node.kind) {
            Ok(Kind::File(file)) => (file.at_home, false),
            Ok(Kind::Directory(_)) => (true, true),
            Ok(Kind::Symlink(_)) | Err(_) => (true, false),
        };
        self.names.detach(parent, name);
        self.touch_directory(parent);
        let now_ns = self.now_ns;
        if let Ok(node) = self.names.node_mut(inode) {
            node.ctime_ns = now_ns;
            node.touched = true;
        }
        if shown && journal {
            self.push(inode, Op::Removed { path, directory });
        }
        self.collect(inode);
        // An orphan directory or symlink has no handles of ours.
        if self
            .names
            .node(inode)
            .is_ok_and(|node| node.names.is_empty() && !matches!(node.kind, Kind::File(_)))
        {
            self.names.collect(inode);
        }
    }

    pub fn rename(
        &mut self,
        (parent, name): (u64, &[u8]),
        (to_parent, to_name): (u64, &[u8]),
        no_replace: bool,
    ) -> Result<(), Errno> {
        self.check_new_name(to_name)?;
        let inode = self.names.find(parent, name)?.ok_or(Errno::ENOENT)?;
        let replaced = self.names.find(to_parent, to_name)?;
        self.names.check_path(to_parent, to_name)?;
        let is_directory = matches!(self.names.node(inode)?.kind, Kind::Directory(_));
        if let Some(old) = replaced {
            if no_replace {
                return Err(Errno::EEXIST);
            }
            if old == inode {
                return Ok(());
            }
            match (is_directory, matches!(self.names.node(old)?.kind, Kind::Directory(_))) {
                (true, false) => return Err(Errno::ENOTDIR),
                (false, true) => return Err(Errno::EISDIR),
                (true, true) if !self.names.directory(old)?.entries.is_empty() => {
                    return Err(Errno::ENOTEMPTY);
                }
                (true, true) | (false, false) => {}
            }
        }
        if is_directory && self.names.is_within(to_parent, inode) {
            return Err(Errno::EINVAL);
        }
        if self.settings.outbox.is_some() {
            let depth = self.names.depth(to_parent);
            let moves_up = depth < self.names.depth(parent);
            if moves_up && self.names.leaks_at(inode, if is_directory { depth + 1 } else { depth }) {
                return Err(Errno::EPERM);
            }
        }
        self.apply_rename((parent, name), (to_parent, to_name), inode, replaced);
        Ok(())
    }

    fn apply_rename(
        &mut self,
        (parent, name): (u64, &[u8]),
        (to_parent, to_name): (u64, &[u8]),
        inode: u64,
        replaced: Option<u64>,
    ) {
        let from = self.names.path_in(parent, name);
        let to = self.names.path_in(to_parent, to_name);
        let at_home = self.names.file(inode).map_or(true, |file| file.at_home);
        let unpublished = self.names.file(inode).is_ok_and(|file| file.changed || !file.at_home);
        let grows = self.grows(inode);
        // The content goes before the name. What home never showed is published under its new
        // name only, so that no temporary name appears there.
        if at_home && unpublished && !self.fenced {
            let kind = if grows { PublishKind::Grown } else { self.snapshot_kind(inode) };
            self.publish(inode, kind);
        }
        let shown = replaced.is_some_and(|old| self.names.file(old).map_or(true, |file| file.at_home));
        if let Some(old) = replaced {
            // Home's rename or publish replaces it; a fenced one does not come.
            let nothing_follows = !at_home && self.fenced;
            self.remove(to_parent, to_name, old, shown && nothing_follows);
        }
        self.names.detach(parent, name);
        self.names.attach(to_parent, to_name.to_vec(), inode);
        let now_ns = self.now_ns;
        if let Ok(node) = self.names.node_mut(inode) {
            node.ctime_ns = now_ns;
            node.touched = true;
        }
        self.touch_directory(parent);
        self.touch_directory(to_parent);
        if at_home {
            self.push(inode, Op::Renamed { from, to, no_replace: false });
        } else if !self.fenced {
            self.publish(inode, self.snapshot_kind(inode));
        }
    }

    pub fn read_directory(
        &mut self,
        inode: u64,
        cookie: u64,
    ) -> Result<Vec<(u64, Attributes, Vec<u8>)>, Errno> {
        let listed = self.names.entries_after(inode, cookie)?;
        listed.into_iter().map(|(cookie, inode, name)| Ok((cookie, self.attributes(inode)?, name))).collect()
    }

    #[must_use]
    pub fn parent_of(&self, inode: u64) -> u64 {
        self.names.parent_of(inode)
    }

    pub fn read_link(&self, inode: u64) -> Result<Vec<u8>, Errno> {
        match &self.names.node(inode)?.kind {
            Kind::Symlink(target) => Ok(target.clone()),
            Kind::Directory(_) | Kind::File(_) => Err(Errno::EINVAL),
        }
    }

    /// Changes attributes. While a file is being written its publish will carry them.
    pub fn set_attributes(&mut self, inode: u64, set: SetAttributes) -> Result<Attributes, Errno> {
        let now_ns = self.now_ns;
        let node = self.names.node_mut(inode)?;
        let mode = set.mode.map(|mode| mode & 0o1777);
        node.mode = mode.unwrap_or(node.mode);
        node.uid = set.uid.unwrap_or(node.uid);
        node.gid = set.gid.unwrap_or(node.gid);
        node.mtime_ns = set.mtime_ns.unwrap_or(node.mtime_ns);
        node.ctime_ns = now_ns;
        node.touched = true;
        let waits = match &node.kind {
            Kind::Symlink(_) => true,
            Kind::Directory(_) => inode == ROOT,
            Kind::File(file) => file.changed || !file.at_home,
        };
        if !waits
            && (mode.is_some() || set.mtime_ns.is_some())
            && let Some(path) = self.names.path(inode)
        {
            self.push(inode, Op::AttributesSet { path, mode, mtime_ns: set.mtime_ns });
        }
        self.attributes(inode)
    }

    pub fn xattr(&self, inode: u64, name: &[u8]) -> Result<Vec<u8>, Errno> {
        self.names.node(inode)?.xattrs.get(name).cloned().ok_or(Errno::ENODATA)
    }

    pub fn xattr_names(&self, inode: u64) -> Result<Vec<u8>, Errno> {
        let names = self.names.node(inode)?.xattrs.keys();
        Ok(names.flat_map(|name| name.iter().copied().chain([0])).collect())
    }

    pub fn set_xattr(&mut self, inode: u64, name: &[u8], value: &[u8], flags: i32) -> Result<(), Errno> {
        if !name.starts_with(b"user.") {
            return Err(Errno::EOPNOTSUPP);
        }
        if name.len() > 255 || value.len() > MAX_XATTR_VALUE_BYTES {
            return Err(Errno::ERANGE);
        }
        let there = self.names.node(inode)?.xattrs.contains_key(name);
        if flags & libc::XATTR_CREATE != 0 && there {
            return Err(Errno::EEXIST);
        }
        if flags & libc::XATTR_REPLACE != 0 && !there {
            return Err(Errno::ENODATA);
        }
        self.names.node_mut(inode)?.xattrs.insert(name.to_vec(), value.to_vec());
        self.xattr_changed(inode, name, Some(value));
        Ok(())
    }

    pub fn remove_xattr(&mut self, inode: u64, name: &[u8]) -> Result<(), Errno> {
        self.names.node_mut(inode)?.xattrs.remove(name).ok_or(Errno::ENODATA)?;
        self.xattr_changed(inode, name, None);
        Ok(())
    }

    fn xattr_changed(&mut self, inode: u64, name: &[u8], value: Option<&[u8]>) {
        if let Ok(node) = self.names.node_mut(inode) {
            node.touched = true;
        }
        let shown = self.names.file(inode).map_or(inode != ROOT, |file| file.at_home);
        if shown && let Some(path) = self.names.path(inode) {
            self.push(inode, Op::XattrSet { path, name: name.to_vec(), value: value.map(<[u8]>::to_vec) });
        }
    }
}
