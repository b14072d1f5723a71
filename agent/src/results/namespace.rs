//! Nodes and names of an output: who is where. Directories of the lower set are taken over when
//! they are first looked at.
//!
//! Invariant: inode numbers are dense and never reused: those of the lower set keep theirs, new
//! ones follow. A cookie of a directory entry never changes while the entry lives.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use limb_common::manifest::{ChunkRef, Inode, MAX_NAME_BYTES, Manifest, NodeKind};
use nix::errno::Errno;

use super::content::Content;

/// The root's inode number, as FUSE wants it.
pub(crate) const ROOT: u64 = 1;
/// Longest path that home accepts.
const MAX_PATH_BYTES: usize = 4096;

#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) inode: u64,
    cookie: u64,
}

#[derive(Debug, Default)]
pub(crate) struct Directory {
    pub(crate) entries: BTreeMap<Vec<u8>, Entry>,
    by_cookie: BTreeMap<u64, Vec<u8>>,
    last_cookie: u64,
    /// A directory of the lower set whose children were not taken over yet.
    unloaded: Option<Inode>,
}

#[derive(Debug)]
pub(crate) struct File {
    pub(crate) content: Content,
    /// Some state of it is at home under its names.
    pub(crate) at_home: bool,
    /// Differs from what is at home.
    pub(crate) changed: bool,
    pub(crate) opens: u32,
    pub(crate) writers: u32,
    /// A descriptor was closed after the last write: the release may be on its way.
    pub(crate) flushed: bool,
    /// There is or was a writer, and each of its time opened the file with O_APPEND.
    pub(crate) appending: bool,
    /// How often its bytes were changed.
    pub(crate) changes: u64,
    /// `changes` when the first of its present writers opened it.
    pub(crate) changes_before: u64,
    /// A writer was killed, and nobody has carried on since: what there is may be half a file.
    pub(crate) torn: bool,
    pub(crate) last_write: std::time::Duration,
    pub(crate) last_grown: std::time::Duration,
}

#[derive(Debug)]
pub(crate) enum Kind {
    Directory(Directory),
    File(Box<File>),
    Symlink(Vec<u8>),
}

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) kind: Kind,
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mtime_ns: i64,
    pub(crate) ctime_ns: i64,
    pub(crate) xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    /// Where it stands: one for a directory, any number for others.
    pub(crate) names: BTreeSet<(u64, Vec<u8>)>,
    pub(crate) from_lower: bool,
    /// Differs from the lower set (contents or attributes).
    pub(crate) touched: bool,
    pub(crate) last_seq: u64,
}

#[derive(Debug)]
pub(crate) struct Namespace {
    nodes: HashMap<u64, Node>,
    lower: Option<Manifest>,
    next_inode: u64,
    owner: (u32, u32),
}

impl File {
    pub(crate) fn new(content: Content, at_home: bool) -> Self {
        let zero = std::time::Duration::ZERO;
        Self {
            content,
            at_home,
            changed: false,
            opens: 0,
            writers: 0,
            flushed: false,
            appending: false,
            changes: 0,
            changes_before: 0,
            torn: false,
            last_write: zero,
            last_grown: zero,
        }
    }
}

impl Namespace {
    pub(crate) fn new(lower: Option<Manifest>, owner: (u32, u32), now_ns: i64) -> Self {
        let next_inode = lower.as_ref().map_or(ROOT, Manifest::inode_count) + 1;
        let mut this = Self { nodes: HashMap::new(), lower, next_inode, owner };
        let root = Kind::Directory(Directory::default());
        let node = this.lower.as_ref().and_then(|lower| this.lower_node(lower, Inode(ROOT)));
        let mut node = node.unwrap_or_else(|| new_node(root, 0o755, owner, now_ns));
        node.names.insert((ROOT, Vec::new()));
        this.nodes.insert(ROOT, node);
        this
    }

    fn lower_node(&self, lower: &Manifest, inode: Inode) -> Option<Node> {
        let node = lower.node(inode)?;
        let kind = match node.kind {
            NodeKind::Directory => {
                Kind::Directory(Directory { unloaded: Some(inode), ..Directory::default() })
            }
            NodeKind::Symlink => Kind::Symlink(node.target()?.to_vec()),
            NodeKind::File => {
                let chunks = (0..node.chunk_count()).filter_map(|index| match node.chunk(index)? {
                    ChunkRef::Hole { .. } => None,
                    ChunkRef::Data(id) => Some((index, id)),
                });
                Kind::File(Box::new(File::new(Content::of_lower(inode, node.size, chunks), true)))
            }
        };
        let mut made = new_node(kind, node.mode, self.owner, node.mtime_ns);
        made.xattrs = node.xattrs().map(|(name, value)| (name.to_vec(), value.to_vec())).collect();
        made.from_lower = true;
        Some(made)
    }

    /// Takes over a directory's children, once.
    fn load(&mut self, inode: u64) {
        let Some(Node { kind: Kind::Directory(directory), .. }) = self.nodes.get_mut(&inode) else { return };
        let (Some(from), Some(lower)) = (directory.unloaded.take(), self.lower.clone()) else { return };
        let Some(node) = lower.node(from) else { return };
        for (name, child) in node.children() {
            if !self.nodes.contains_key(&child.0)
                && let Some(made) = self.lower_node(&lower, child)
            {
                self.nodes.insert(child.0, made);
            }
            self.attach(inode, name.to_vec(), child.0);
        }
    }

    /// Every directory, so that all names of a hard-linked file are known.
    pub(crate) fn load_all(&mut self) {
        let mut open = vec![ROOT];
        while let Some(inode) = open.pop() {
            self.load(inode);
            let Some(Kind::Directory(directory)) = self.nodes.get(&inode).map(|node| &node.kind) else {
                continue;
            };
            open.extend(directory.entries.values().map(|entry| entry.inode));
        }
    }

    pub(crate) fn lower_links(&self, inode: u64) -> u32 {
        self.lower.as_ref().and_then(|lower| lower.node(Inode(inode))).map_or(0, |node| node.nlink)
    }

    pub(crate) fn node(&self, inode: u64) -> Result<&Node, Errno> {
        self.nodes.get(&inode).ok_or(Errno::ENOENT)
    }

    pub(crate) fn node_mut(&mut self, inode: u64) -> Result<&mut Node, Errno> {
        self.nodes.get_mut(&inode).ok_or(Errno::ENOENT)
    }

    pub(crate) fn file(&self, inode: u64) -> Result<&File, Errno> {
        match &self.node(inode)?.kind {
            Kind::File(file) => Ok(file),
            Kind::Directory(_) => Err(Errno::EISDIR),
            Kind::Symlink(_) => Err(Errno::EINVAL),
        }
    }

    pub(crate) fn file_mut(&mut self, inode: u64) -> Result<&mut File, Errno> {
        match &mut self.node_mut(inode)?.kind {
            Kind::File(file) => Ok(file),
            Kind::Directory(_) => Err(Errno::EISDIR),
            Kind::Symlink(_) => Err(Errno::EINVAL),
        }
    }

    pub(crate) fn directory(&mut self, inode: u64) -> Result<&Directory, Errno> {
        self.load(inode);
        match &self.node(inode)?.kind {
            Kind::Directory(directory) => Ok(directory),
            Kind::File(_) | Kind::Symlink(_) => Err(Errno::ENOTDIR),
        }
    }

    pub(crate) fn is_unloaded(&self, inode: u64) -> bool {
        matches!(self.nodes.get(&inode).map(|node| &node.kind), Some(Kind::Directory(directory)) if directory.unloaded.is_some())
    }

    pub(crate) fn find(&mut self, parent: u64, name: &[u8]) -> Result<Option<u64>, Errno> {
        check_name(name)?;
        Ok(self.directory(parent)?.entries.get(name).map(|entry| entry.inode))
    }

    pub(crate) fn insert(&mut self, kind: Kind, mode: u32, owner: (u32, u32), now_ns: i64) -> u64 {
        let inode = self.next_inode;
        self.next_inode += 1;
        self.nodes.insert(inode, new_node(kind, mode, owner, now_ns));
        inode
    }

    pub(crate) fn attach(&mut self, parent: u64, name: Vec<u8>, inode: u64) {
        if let Some(Node { kind: Kind::Directory(directory), .. }) = self.nodes.get_mut(&parent) {
            directory.last_cookie += 1;
            let cookie = directory.last_cookie;
            directory.by_cookie.insert(cookie, name.clone());
            directory.entries.insert(name.clone(), Entry { inode, cookie });
        }
        if let Some(node) = self.nodes.get_mut(&inode) {
            node.names.insert((parent, name));
        }
    }

    pub(crate) fn detach(&mut self, parent: u64, name: &[u8]) -> Option<u64> {
        let Some(Node { kind: Kind::Directory(directory), .. }) = self.nodes.get_mut(&parent) else {
            return None;
        };
        let entry = directory.entries.remove(name)?;
        directory.by_cookie.remove(&entry.cookie);
        if let Some(node) = self.nodes.get_mut(&entry.inode) {
            node.names.remove(&(parent, name.to_vec()));
        }
        Some(entry.inode)
    }

    /// Forgets a node that has neither a name nor a handle.
    pub(crate) fn collect(&mut self, inode: u64) -> Option<Node> {
        let gone = self.nodes.get(&inode).is_some_and(|node| {
            node.names.is_empty()
                && match &node.kind {
                    Kind::File(file) => file.opens == 0,
                    Kind::Directory(_) | Kind::Symlink(_) => true,
                }
        });
        gone.then(|| self.nodes.remove(&inode))?
    }

    /// Entries after a cookie, in the order of cookies.
    pub(crate) fn entries_after(
        &mut self,
        inode: u64,
        cookie: u64,
    ) -> Result<Vec<(u64, u64, Vec<u8>)>, Errno> {
        /// More than a readdir buffer holds.
        const AT_ONCE: usize = 512;
        let directory = self.directory(inode)?;
        let after = directory.by_cookie.range(cookie.saturating_add(1)..).take(AT_ONCE);
        let listed = after.filter_map(|(cookie, name)| {
            directory.entries.get(name).map(|entry| (*cookie, entry.inode, name.clone()))
        });
        Ok(listed.collect())
    }

    pub(crate) fn parent_of(&self, inode: u64) -> u64 {
        self.nodes.get(&inode).and_then(|node| node.names.first()).map_or(ROOT, |(parent, _)| *parent)
    }

    /// The inode and the directories above it: all that its path depends on.
    pub(crate) fn with_parents(&self, inode: u64) -> impl Iterator<Item = u64> {
        std::iter::successors(Some(inode), |&at| (at != ROOT).then(|| self.parent_of(at)))
    }

    /// Path of a name under a directory, from the output's root.
    pub(crate) fn path_in(&self, parent: u64, name: &[u8]) -> Vec<u8> {
        let mut parts = vec![name.to_vec()];
        let mut at = parent;
        while at != ROOT {
            let Some((up, own)) = self.nodes.get(&at).and_then(|node| node.names.first()) else { break };
            parts.push(own.clone());
            at = *up;
        }
        parts.reverse();
        parts.join(&b'/')
    }

    /// One of the node's paths; `None` when it has none.
    pub(crate) fn path(&self, inode: u64) -> Option<Vec<u8>> {
        let (parent, name) = self.nodes.get(&inode)?.names.first()?;
        Some(self.path_in(*parent, name))
    }

    pub(crate) fn depth(&self, directory: u64) -> usize {
        let mut depth = 0;
        let mut at = directory;
        while at != ROOT {
            at = self.parent_of(at);
            depth += 1;
        }
        depth
    }

    pub(crate) fn is_within(&self, directory: u64, ancestor: u64) -> bool {
        let mut at = directory;
        loop {
            if at == ancestor {
                return true;
            }
            if at == ROOT {
                return false;
            }
            at = self.parent_of(at);
        }
    }

    /// Would a symlink under `inode` lead outside if `inode` stood at this depth?
    pub(crate) fn leaks_at(&mut self, inode: u64, depth: usize) -> bool {
        self.load(inode);
        let children: Vec<u64> = match self.nodes.get(&inode).map(|node| &node.kind) {
            Some(Kind::Symlink(target)) => return !stays_within(target, depth),
            Some(Kind::Directory(directory)) => directory.entries.values().map(|entry| entry.inode).collect(),
            Some(Kind::File(_)) | None => return false,
        };
        children.into_iter().any(|child| self.leaks_at(child, depth + 1))
    }

    pub(crate) fn inodes(&self) -> impl Iterator<Item = (u64, &Node)> {
        self.nodes.iter().map(|(inode, node)| (*inode, node))
    }

    pub(crate) fn lower(&self) -> Option<&Manifest> {
        self.lower.as_ref()
    }

    pub(crate) fn check_path(&self, parent: u64, name: &[u8]) -> Result<(), Errno> {
        let too_long = self.path_in(parent, name).len() > MAX_PATH_BYTES;
        if too_long { Err(Errno::ENAMETOOLONG) } else { Ok(()) }
    }
}

fn new_node(kind: Kind, mode: u32, owner: (u32, u32), now_ns: i64) -> Node {
    Node {
        kind,
        mode: mode & 0o1777,
        uid: owner.0,
        gid: owner.1,
        mtime_ns: now_ns,
        ctime_ns: now_ns,
        xattrs: BTreeMap::new(),
        names: BTreeSet::new(),
        from_lower: false,
        touched: false,
        last_seq: 0,
    }
}

pub(crate) fn check_name(name: &[u8]) -> Result<(), Errno> {
    if name.len() > MAX_NAME_BYTES {
        return Err(Errno::ENAMETOOLONG);
    }
    let illegal =
        name.is_empty() || name == b"." || name == b".." || name.contains(&b'/') || name.contains(&0);
    if illegal { Err(Errno::EINVAL) } else { Ok(()) }
}

/// Whether a link in a directory at `depth` below the root leads to something in the output, by
/// its text alone.
pub(crate) fn stays_within(target: &[u8], depth: usize) -> bool {
    if target.is_empty() || target.starts_with(b"/") {
        return false;
    }
    let mut left = depth;
    for part in target.split(|&byte| byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => match left.checked_sub(1) {
                Some(up) => left = up,
                None => return false,
            },
            _ => left += 1,
        }
    }
    true
}
