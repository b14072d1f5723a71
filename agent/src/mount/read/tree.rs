//! A frozen tree as a file system sees it: everything but the bytes, from the manifest alone.
//! Knows nothing of FUSE and waits for nothing.

use std::os::unix::ffi::OsStringExt as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use limb_common::chunk::{CHUNK_BYTES_U64, ChunkId};
use limb_common::manifest::{ChunkRef, Inode, MAX_NAME_BYTES, Manifest, Node, NodeKind, ROOT};

/// Deeper trees than the kernel could name; ends the walk up in a manifest with a loop.
const MAX_DEPTH: usize = 4096;
/// What `du` shows for a directory: 4 KiB, as ext4.
const DIRECTORY_BLOCKS: u64 = 8;
const BLOCK_BYTES: u64 = 512;

/// Who owns everything on the box, whoever owned it at home.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Owner {
    pub uid: u32,
    pub gid: u32,
}

/// Why a question about the tree has no answer. Each is one errno.
#[derive(Clone, Copy, Debug, thiserror::Error, PartialEq, Eq)]
pub enum TreeError {
    #[error("no such node")]
    NoEntry,
    #[error("not a directory")]
    NotADirectory,
    #[error("a directory")]
    IsADirectory,
    #[error("the name is longer than 255 bytes")]
    NameTooLong,
    #[error("no such extended attribute")]
    NoAttribute,
    #[error("not a symbolic link")]
    NotASymlink,
    #[error("past the end")]
    PastTheEnd,
}

/// What stat shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    pub inode: Inode,
    pub kind: NodeKind,
    pub mode: u32,
    pub nlink: u32,
    pub size: u64,
    /// 512 bytes each, holes not counted.
    pub blocks: u64,
    pub mtime: SystemTime,
    pub owner: Owner,
}

/// One line of a directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry<'a> {
    pub name: &'a [u8],
    pub inode: Inode,
    /// Where the next listing goes on.
    pub next: u64,
}

/// A part of one read, in order. All parts together are exactly what was asked for, or end at
/// the end of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    Zeros { len: usize },
    Data { index: u64, id: ChunkId, from: usize, to: usize },
}

/// What to look for from an offset on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Seek {
    Data,
    Hole,
}

/// A manifest with an owner.
#[derive(Clone, Debug)]
pub struct Tree {
    manifest: Manifest,
    owner: Owner,
}

impl Tree {
    #[must_use]
    pub fn new(manifest: Manifest, owner: Owner) -> Self {
        Self { manifest, owner }
    }

    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    fn node(&self, inode: Inode) -> Result<Node<'_>, TreeError> {
        self.manifest.node(inode).ok_or(TreeError::NoEntry)
    }

    /// # Errors
    /// [`TreeError::NoEntry`] is a lasting answer here, which the kernel may remember.
    pub fn lookup(&self, directory: Inode, name: &[u8]) -> Result<Inode, TreeError> {
        if name.len() > MAX_NAME_BYTES {
            return Err(TreeError::NameTooLong);
        }
        let node = self.node(directory)?;
        if node.kind != NodeKind::Directory {
            return Err(TreeError::NotADirectory);
        }
        self.manifest.lookup(directory, name).ok_or(TreeError::NoEntry)
    }

    /// # Errors
    /// [`TreeError::NoEntry`] for a number that was never given out.
    pub fn attributes(&self, inode: Inode) -> Result<Attributes, TreeError> {
        let node = self.node(inode)?;
        let (size, blocks) = match node.kind {
            NodeKind::Directory => (node.size, DIRECTORY_BLOCKS),
            NodeKind::File => (node.size, node.data_bytes().div_ceil(BLOCK_BYTES)),
            NodeKind::Symlink => (node.size, 0),
        };
        Ok(Attributes {
            inode,
            kind: node.kind,
            mode: node.mode,
            nlink: node.nlink,
            size,
            blocks,
            mtime: time_of(node.mtime_ns),
            owner: self.owner,
        })
    }

    /// # Errors
    /// [`TreeError::NotASymlink`].
    pub fn target(&self, inode: Inode) -> Result<&[u8], TreeError> {
        let node = self.manifest.node(inode).ok_or(TreeError::NoEntry)?;
        node.target().ok_or(TreeError::NotASymlink)
    }

    /// The lines of a directory from a place on: `.`, `..`, then the children by name.
    ///
    /// # Errors
    /// [`TreeError::NotADirectory`].
    pub fn list(&self, directory: Inode, from: u64) -> Result<impl Iterator<Item = Entry<'_>>, TreeError> {
        let node = self.node(directory)?;
        if node.kind != NodeKind::Directory {
            return Err(TreeError::NotADirectory);
        }
        let end = node.size + 2;
        Ok((from..end).map_while(move |place| {
            let (name, inode) = match place {
                0 => (b".".as_slice(), directory),
                1 => (b"..".as_slice(), node.parent),
                place => node.child(place - 2)?,
            };
            Some(Entry { name, inode, next: place + 1 })
        }))
    }

    /// # Errors
    /// [`TreeError::NoAttribute`].
    pub fn xattr(&self, inode: Inode, name: &[u8]) -> Result<&[u8], TreeError> {
        let node = self.node(inode)?;
        node.xattrs().find(|(found, _)| *found == name).map(|(_, value)| value).ok_or(TreeError::NoAttribute)
    }

    /// Names of all extended attributes, each ended by a zero byte.
    ///
    /// # Errors
    /// [`TreeError::NoEntry`].
    pub fn xattr_names(&self, inode: Inode) -> Result<Vec<u8>, TreeError> {
        let mut names = Vec::new();
        for (name, _) in self.node(inode)?.xattrs() {
            names.extend_from_slice(name);
            names.push(0);
        }
        Ok(names)
    }

    /// What a read of `len` bytes at `offset` consists of. Empty at and past the end.
    ///
    /// # Errors
    /// [`TreeError::IsADirectory`] for what has no bytes.
    pub fn span(&self, inode: Inode, offset: u64, len: u64) -> Result<Vec<Part>, TreeError> {
        let node = self.file(inode)?;
        let end = offset.saturating_add(len).min(node.size);
        let mut parts = Vec::with_capacity(2);
        let mut at = offset;
        while at < end {
            let index = at / CHUNK_BYTES_U64;
            let from = small(at % CHUNK_BYTES_U64);
            let to = small((end - index * CHUNK_BYTES_U64).min(CHUNK_BYTES_U64));
            parts.push(match node.chunk(index).ok_or(TreeError::PastTheEnd)? {
                ChunkRef::Hole { .. } => Part::Zeros { len: to - from },
                ChunkRef::Data(id) => Part::Data { index, id, from, to },
            });
            at = (index + 1) * CHUNK_BYTES_U64;
        }
        Ok(parts)
    }

    /// As lseek(2) with SEEK_DATA and SEEK_HOLE.
    ///
    /// # Errors
    /// [`TreeError::PastTheEnd`] when there is no such place.
    pub fn seek(&self, inode: Inode, offset: u64, what: Seek) -> Result<u64, TreeError> {
        let node = self.file(inode)?;
        if offset >= node.size {
            return Err(TreeError::PastTheEnd);
        }
        let first = offset / CHUNK_BYTES_U64;
        let found = (first..node.chunk_count()).find(|&index| match node.chunk(index) {
            Some(ChunkRef::Hole { .. }) => what == Seek::Hole,
            Some(ChunkRef::Data(_)) | None => what == Seek::Data,
        });
        match (found, what) {
            (Some(index), _) => Ok(offset.max(index * CHUNK_BYTES_U64)),
            // Every file ends in a hole.
            (None, Seek::Hole) => Ok(node.size),
            (None, Seek::Data) => Err(TreeError::PastTheEnd),
        }
    }

    fn file(&self, inode: Inode) -> Result<Node<'_>, TreeError> {
        let node = self.node(inode)?;
        match node.kind {
            NodeKind::File => Ok(node),
            NodeKind::Directory | NodeKind::Symlink => Err(TreeError::IsADirectory),
        }
    }

    /// The name of a node from the root on, for people. Slow: looks through directories.
    #[must_use]
    pub fn path_of(&self, inode: Inode) -> PathBuf {
        let mut names: Vec<&[u8]> = Vec::new();
        let mut at = inode;
        while at != ROOT && names.len() < MAX_DEPTH {
            let parent = self.manifest.node(at).and_then(|node| self.manifest.node(node.parent));
            let Some(parent) = parent else { break };
            let Some((name, _)) = parent.children().find(|(_, child)| *child == at) else { break };
            names.push(name);
            at = parent.inode;
        }
        names.reverse();
        PathBuf::from(std::ffi::OsString::from_vec(names.join(&b'/')))
    }
}

fn time_of(mtime_ns: i64) -> SystemTime {
    let distance = Duration::from_nanos(mtime_ns.unsigned_abs());
    let time = if mtime_ns < 0 {
        SystemTime::UNIX_EPOCH.checked_sub(distance)
    } else {
        SystemTime::UNIX_EPOCH.checked_add(distance)
    };
    time.unwrap_or(SystemTime::UNIX_EPOCH)
}

/// At most a chunk.
fn small(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use limb_common::id::Digest;
    use limb_common::manifest::{Draft, ManifestBuilder, NewNode, NodeMeta};
    use proptest::prelude::*;

    use super::*;

    fn meta(mode: u32) -> NodeMeta {
        NodeMeta { mode, mtime_ns: -1_500_000_000, ..NodeMeta::default() }
    }

    /// A file of these chunks (true: data) and this size, alone in a tree.
    fn tree_of(size: u64, holes: &[bool]) -> (Tree, Inode) {
        let mut builder = ManifestBuilder::new(meta(0o755));
        let chunks =
            holes.iter().zip(1_u8..).map(|(&data, number)| data.then_some(Digest([number; 32]))).collect();
        let file: Draft =
            builder.add(builder.root(), b"f", NewNode::File { size, chunks }, meta(0o644)).unwrap();
        let (manifest, order) = builder.build();
        (Tree::new(manifest, Owner { uid: 5, gid: 6 }), order.inode(file))
    }

    #[test]
    fn attributes_count_data_only_and_keep_old_times() {
        let (tree, file) = tree_of(3 * CHUNK_BYTES_U64 + 1, &[true, false, false, true]);
        let attributes = tree.attributes(file).unwrap();
        assert_eq!(attributes.blocks, (CHUNK_BYTES_U64 + 1).div_ceil(512));
        assert_eq!(attributes.owner, Owner { uid: 5, gid: 6 });
        assert_eq!(SystemTime::UNIX_EPOCH - Duration::from_millis(1500), attributes.mtime);
        assert!(tree.attributes(ROOT).unwrap().blocks >= 1);
    }

    #[test]
    fn names_that_are_too_long_and_questions_to_the_wrong_kind_are_refused() {
        let (tree, file) = tree_of(1, &[true]);
        assert_eq!(tree.lookup(ROOT, &[b'x'; 256]), Err(TreeError::NameTooLong));
        assert_eq!(tree.lookup(ROOT, &[b'x'; 255]), Err(TreeError::NoEntry));
        assert_eq!(tree.lookup(file, b"x"), Err(TreeError::NotADirectory));
        assert_eq!(tree.span(ROOT, 0, 1), Err(TreeError::IsADirectory));
        assert_eq!(tree.target(file), Err(TreeError::NotASymlink));
        assert_eq!(tree.attributes(Inode(99)), Err(TreeError::NoEntry));
        assert_eq!(tree.path_of(file), PathBuf::from("f"));
    }

    #[test]
    fn listing_goes_on_from_any_place() {
        let (tree, file) = tree_of(1, &[true]);
        let all: Vec<_> = tree.list(ROOT, 0).unwrap().map(|entry| (entry.name, entry.inode)).collect();
        assert_eq!(all, [(b".".as_slice(), ROOT), (b"..", ROOT), (b"f", file)]);
        assert_eq!(tree.list(ROOT, 2).unwrap().count(), 1);
        assert_eq!(tree.list(ROOT, 3).unwrap().count(), 0);
        assert_eq!(tree.list(ROOT, u64::MAX).unwrap().count(), 0);
    }

    #[test]
    fn holes_and_data_are_found() {
        let size = 4 * CHUNK_BYTES_U64;
        let (tree, file) = tree_of(size, &[false, true, false, false]);
        assert_eq!(tree.seek(file, 0, Seek::Data), Ok(CHUNK_BYTES_U64));
        assert_eq!(tree.seek(file, CHUNK_BYTES_U64 + 7, Seek::Data), Ok(CHUNK_BYTES_U64 + 7));
        assert_eq!(tree.seek(file, CHUNK_BYTES_U64 + 7, Seek::Hole), Ok(2 * CHUNK_BYTES_U64));
        assert_eq!(tree.seek(file, 2 * CHUNK_BYTES_U64, Seek::Data), Err(TreeError::PastTheEnd));
        assert_eq!(tree.seek(file, size, Seek::Hole), Err(TreeError::PastTheEnd));
    }

    proptest! {
        /// Whatever is asked for, the parts are exactly that much, in order.
        #[test]
        fn parts_are_exactly_what_was_asked_for(
            chunks in proptest::collection::vec(any::<bool>(), 1..5),
            tail in 1_u64..=CHUNK_BYTES_U64,
            offset in 0_u64..6 * CHUNK_BYTES_U64,
            len in 0_u64..3 * CHUNK_BYTES_U64,
        ) {
            let size = (chunks.len() as u64 - 1) * CHUNK_BYTES_U64 + tail;
            let (tree, file) = tree_of(size, &chunks);
            let mut at = offset;
            for part in tree.span(file, offset, len).unwrap() {
                let index = at / CHUNK_BYTES_U64;
                let here = match part {
                    Part::Zeros { len } => {
                        prop_assert!(!chunks[small(index)]);
                        len
                    }
                    Part::Data { index: found, id, from, to } => {
                        prop_assert_eq!(found, index);
                        prop_assert_eq!(from as u64, at % CHUNK_BYTES_U64);
                        prop_assert!(to <= id.len as usize);
                        to - from
                    }
                };
                prop_assert!(here > 0);
                at += here as u64;
            }
            prop_assert_eq!(at - offset, len.min(size.saturating_sub(offset)));
        }
    }
}
