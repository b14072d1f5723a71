//! Makes a manifest from a tree. The same tree gives the same bytes, whatever order it was
//! walked in.

use std::collections::BTreeMap;

use super::{
    ENTRY_BYTES, HEADER_BYTES, HOLE, INODE_BYTES, Inode, MAGIC, MAX_NAME_BYTES, Manifest, ROOT, VALUE_BYTES,
};
use crate::chunk::chunk_count;
use crate::id::Digest;

/// A tree cannot be written as a manifest.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BuildError {
    #[error("{0:?} is not a legal file name")]
    BadName(Vec<u8>),
    #[error("{0:?} is there twice")]
    Duplicate(Vec<u8>),
    #[error("a file of {size} bytes needs {needed} chunk values but has {given}")]
    ChunkCount { size: u64, needed: u64, given: usize },
    #[error("the parent is not a directory")]
    NotADirectory,
}

/// What every node has.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodeMeta {
    /// Permission bits; set-id and type bits are dropped.
    pub mode: u32,
    pub mtime_ns: i64,
    /// Sorted by name when written.
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// What a node is made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NewNode {
    Directory,
    /// Chunk values in order; `None` is a hole. For a file of at most one chunk the value is its
    /// ordinary hash.
    File {
        size: u64,
        chunks: Vec<Option<Digest>>,
    },
    Symlink {
        target: Vec<u8>,
    },
}

/// A handle to a node in the builder (not its final inode number).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Draft(usize);

#[derive(Debug)]
struct DraftNode {
    node: NewNode,
    meta: NodeMeta,
    /// Of a directory only: nearly all nodes are files.
    children: Option<Box<Children>>,
    links: u32,
}

/// The names of one directory. A walk gives them in order, and then they are only appended.
#[derive(Debug)]
enum Children {
    InOrder(Vec<(Name, Draft)>),
    InAnyOrder(BTreeMap<Vec<u8>, Draft>),
}

/// A name's place among all names.
#[derive(Clone, Copy, Debug)]
struct Name {
    at: usize,
    len: usize,
}

/// Collects nodes, then writes them in canonical order.
#[derive(Debug)]
pub struct ManifestBuilder {
    nodes: Vec<DraftNode>,
    names: Vec<u8>,
}

impl Name {
    fn of(self, names: &[u8]) -> &[u8] {
        &names[self.at..self.at + self.len]
    }

    fn put(names: &mut Vec<u8>, name: &[u8]) -> Self {
        let at = names.len();
        names.extend_from_slice(name);
        Self { at, len: name.len() }
    }
}

impl Children {
    /// `false`: the name is there.
    fn add(&mut self, names: &mut Vec<u8>, name: &[u8], child: Draft) -> bool {
        if let Self::InOrder(all) = self {
            if all.last().is_none_or(|(last, _)| last.of(names) < name) {
                all.push((Name::put(names, name), child));
                return true;
            }
            *self =
                Self::InAnyOrder(all.iter().map(|&(name, child)| (name.of(names).to_vec(), child)).collect());
        }
        let Self::InAnyOrder(all) = self else { return false };
        if all.contains_key(name) {
            return false;
        }
        all.insert(name.to_vec(), child);
        true
    }

    fn in_order(&mut self, names: &mut Vec<u8>) {
        if let Self::InAnyOrder(all) = self {
            *self = Self::InOrder(all.iter().map(|(name, &child)| (Name::put(names, name), child)).collect());
        }
    }
}

impl DraftNode {
    fn new(node: NewNode, meta: NodeMeta, links: u32) -> Self {
        let children = (node == NewNode::Directory).then(|| Box::new(Children::InOrder(Vec::new())));
        Self { node, meta, children, links }
    }

    /// In order of name, once they have been put into order.
    fn children(&self) -> &[(Name, Draft)] {
        match self.children.as_deref() {
            Some(Children::InOrder(all)) => all,
            Some(Children::InAnyOrder(_)) | None => &[],
        }
    }
}

impl ManifestBuilder {
    #[must_use]
    pub fn new(root: NodeMeta) -> Self {
        Self { nodes: vec![DraftNode::new(NewNode::Directory, root, 1)], names: Vec::new() }
    }

    /// The root directory.
    #[must_use]
    pub fn root(&self) -> Draft {
        Draft(0)
    }

    /// Adds a node under a directory.
    ///
    /// # Errors
    /// [`BuildError`] for an illegal or duplicate name, or chunk values that do not fit the size.
    pub fn add(
        &mut self,
        parent: Draft,
        name: &[u8],
        node: NewNode,
        meta: NodeMeta,
    ) -> Result<Draft, BuildError> {
        if let NewNode::File { size, chunks } = &node
            && chunk_count(*size) != chunks.len() as u64
        {
            return Err(BuildError::ChunkCount {
                size: *size,
                needed: chunk_count(*size),
                given: chunks.len(),
            });
        }
        let draft = Draft(self.nodes.len());
        self.nodes.push(DraftNode::new(node, meta, 0));
        self.link(parent, name, draft).inspect_err(|_| {
            self.nodes.pop();
        })?;
        Ok(draft)
    }

    /// Gives an existing file a further name.
    ///
    /// # Errors
    /// As [`Self::add`].
    pub fn link(&mut self, parent: Draft, name: &[u8], target: Draft) -> Result<(), BuildError> {
        let legal = !name.is_empty()
            && name.len() <= MAX_NAME_BYTES
            && name != b"."
            && name != b".."
            && !name.contains(&b'/')
            && !name.contains(&0);
        if !legal {
            return Err(BuildError::BadName(name.to_vec()));
        }
        let Some(children) = self.nodes[parent.0].children.as_deref_mut() else {
            return Err(BuildError::NotADirectory);
        };
        if !children.add(&mut self.names, name, target) {
            return Err(BuildError::Duplicate(name.to_vec()));
        }
        self.nodes[target.0].links += 1;
        Ok(())
    }

    /// Writes the canonical bytes. [`NodeOrder`] tells which inode each draft became.
    #[must_use]
    pub fn finish(mut self) -> (Vec<u8>, NodeOrder) {
        for children in self.nodes.iter_mut().filter_map(|node| node.children.as_deref_mut()) {
            children.in_order(&mut self.names);
        }
        let order = self.number();
        let mut inodes = Vec::with_capacity(order.drafts.len() * INODE_BYTES);
        let (mut entries, mut values, mut blob) = (Vec::new(), Vec::new(), Vec::new());
        let mut total_bytes = 0_u64;
        for (&draft, &parent) in order.drafts.iter().zip(&order.parents) {
            let node = &self.nodes[draft.0];
            let (kind, nlink, size, first) = match &node.node {
                NewNode::Directory => {
                    let first = (entries.len() / ENTRY_BYTES) as u64;
                    for &(name, child) in node.children() {
                        let name = name.of(&self.names);
                        entries.extend_from_slice(&(blob.len() as u64).to_le_bytes());
                        entries.extend_from_slice(&len_u32(name).to_le_bytes());
                        entries.extend_from_slice(&[0; 4]);
                        entries.extend_from_slice(&order.inode(child).0.to_le_bytes());
                        blob.extend_from_slice(name);
                    }
                    let subdirectories = node
                        .children()
                        .iter()
                        .filter(|(_, child)| self.nodes[child.0].node == NewNode::Directory)
                        .count();
                    (
                        0o04_u32,
                        2 + u32::try_from(subdirectories).unwrap_or(u32::MAX - 2),
                        node.children().len() as u64,
                        first,
                    )
                }
                NewNode::File { size, chunks } => {
                    let first = (values.len() / VALUE_BYTES) as u64;
                    for chunk in chunks {
                        values.extend_from_slice(chunk.as_ref().map_or(&HOLE, |digest| &digest.0));
                    }
                    total_bytes += size;
                    (0o10, node.links, *size, first)
                }
                NewNode::Symlink { target } => {
                    let first = blob.len() as u64;
                    blob.extend_from_slice(target);
                    (0o12, node.links, target.len() as u64, first)
                }
            };
            let xattr_at = blob.len() as u64;
            for (name, value) in &node.meta.xattrs {
                blob.extend_from_slice(&len_u32(name).to_le_bytes());
                blob.extend_from_slice(&len_u32(value).to_le_bytes());
                blob.extend_from_slice(name);
                blob.extend_from_slice(value);
            }
            inodes.extend_from_slice(&(kind << 12 | node.meta.mode & 0o1777).to_le_bytes());
            inodes.extend_from_slice(&nlink.to_le_bytes());
            inodes.extend_from_slice(&size.to_le_bytes());
            inodes.extend_from_slice(&node.meta.mtime_ns.to_le_bytes());
            inodes.extend_from_slice(&first.to_le_bytes());
            inodes.extend_from_slice(&parent.0.to_le_bytes());
            inodes.extend_from_slice(&xattr_at.to_le_bytes());
            inodes
                .extend_from_slice(&u32::try_from(node.meta.xattrs.len()).unwrap_or(u32::MAX).to_le_bytes());
            inodes.extend_from_slice(&[0; 12]);
        }
        let mut out =
            Vec::with_capacity(HEADER_BYTES + inodes.len() + entries.len() + values.len() + blob.len());
        out.extend_from_slice(MAGIC);
        for count in [
            (inodes.len() / INODE_BYTES) as u64,
            (entries.len() / ENTRY_BYTES) as u64,
            (values.len() / VALUE_BYTES) as u64,
            blob.len() as u64,
            total_bytes,
        ] {
            out.extend_from_slice(&count.to_le_bytes());
        }
        out.resize(HEADER_BYTES, 0);
        for part in [inodes, entries, values, blob] {
            out.extend_from_slice(&part);
        }
        (out, order)
    }

    /// [`Self::finish`], opened.
    ///
    /// # Panics
    /// Never: what the builder accepts is well formed.
    #[must_use]
    pub fn build(self) -> (Manifest, NodeOrder) {
        let (bytes, order) = self.finish();
        let id = Digest::of(&bytes);
        let manifest = Manifest::open(bytes, id).expect("the builder writes what the reader accepts");
        (manifest, order)
    }

    fn number(&self) -> NodeOrder {
        let mut order =
            NodeOrder { drafts: Vec::new(), parents: Vec::new(), inodes: vec![Inode(0); self.nodes.len()] };
        let mut stack = vec![(Draft(0), ROOT)];
        while let Some((draft, parent)) = stack.pop() {
            if order.inodes[draft.0].0 != 0 {
                continue; // a further name of a hard link
            }
            order.drafts.push(draft);
            order.parents.push(parent);
            let inode = Inode(order.drafts.len() as u64);
            order.inodes[draft.0] = inode;
            stack.extend(self.nodes[draft.0].children().iter().rev().map(|&(_, child)| (child, inode)));
        }
        order
    }
}

/// Which inode each draft became.
#[derive(Debug)]
pub struct NodeOrder {
    drafts: Vec<Draft>,
    parents: Vec<Inode>,
    inodes: Vec<Inode>,
}

impl NodeOrder {
    #[must_use]
    pub fn inode(&self, draft: Draft) -> Inode {
        self.inodes[draft.0]
    }
}

fn len_u32(bytes: &[u8]) -> u32 {
    u32::try_from(bytes.len()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manifest::{ChunkRef, ManifestError, NodeKind};

    fn meta(mode: u32) -> NodeMeta {
        NodeMeta { mode, mtime_ns: -5, xattrs: [(b"user.k".to_vec(), b"v\0".to_vec())].into() }
    }

    fn sample(reverse: bool) -> ManifestBuilder {
        let mut builder = ManifestBuilder::new(meta(0o755));
        let root = builder.root();
        let mut names: Vec<&[u8]> = vec![b"a", b"b\n", b"\xff"];
        if reverse {
            names.reverse();
        }
        for name in names {
            let dir = builder.add(root, name, NewNode::Directory, meta(0o700)).unwrap();
            let chunks = vec![Some(Digest([7; 32])), None, Some(Digest([9; 32]))];
            let file = NewNode::File { size: (2 << 20) + 5, chunks };
            builder.add(dir, b"f", file, meta(0o4644)).unwrap();
            builder.add(dir, b"l", NewNode::Symlink { target: b"../x".to_vec() }, meta(0o777)).unwrap();
        }
        builder
    }

    #[test]
    fn what_was_built_is_read_back_and_order_of_walking_does_not_matter() {
        let (manifest, _) = sample(false).build();
        assert_eq!(manifest.id(), sample(true).build().0.id());
        assert_eq!(manifest.inode_count(), 10);
        let file = manifest.node(manifest.resolve(b"/b\n/f").unwrap()).unwrap();
        assert_eq!((file.kind, file.mode, file.mtime_ns, file.nlink), (NodeKind::File, 0o644, -5, 1));
        assert_eq!(file.chunk(1), Some(ChunkRef::Hole { len: 1 << 20 }));
        assert_eq!(file.data_bytes(), (1 << 20) + 5);
        assert_eq!(file.chunk(3), None);
        assert_eq!(file.xattrs().next(), Some((&b"user.k"[..], &b"v\0"[..])));
        let link = manifest.node(manifest.resolve(b"\xff/l").unwrap()).unwrap();
        assert_eq!(link.target(), Some(&b"../x"[..]));
        assert_eq!(manifest.resolve(b"nope"), None);
        assert_eq!(manifest.total_bytes(), 3 * ((2 << 20) + 5));
    }

    #[test]
    fn hard_links_share_an_inode() {
        let mut builder = ManifestBuilder::new(meta(0o755));
        let root = builder.root();
        let file = builder.add(root, b"x", NewNode::File { size: 0, chunks: vec![] }, meta(0o600)).unwrap();
        builder.link(root, b"y", file).unwrap();
        assert_eq!(builder.link(root, b"y", file), Err(BuildError::Duplicate(b"y".to_vec())));
        assert!(builder.link(root, b"..", file).is_err() && builder.link(root, b"a/b", file).is_err());
        let (manifest, _) = builder.build();
        assert_eq!(manifest.resolve(b"x"), manifest.resolve(b"y"));
        assert_eq!(manifest.node(manifest.resolve(b"x").unwrap()).unwrap().nlink, 2);
    }

    #[test]
    fn no_flipped_or_missing_byte_is_accepted_and_none_panics() {
        let (bytes, _) = sample(false).finish();
        let id = Digest::of(&bytes);
        for at in 0..bytes.len() {
            let mut bad = bytes.clone();
            bad[at] ^= 0x80;
            assert!(matches!(Manifest::open(bad.clone(), id), Err(ManifestError::WrongHash { .. })));
            // The same bytes under their own hash: structure alone must hold.
            if let Ok(manifest) = Manifest::open(bad.clone(), Digest::of(&bad)) {
                for inode in 0..=manifest.inode_count() + 1 {
                    if let Some(node) = manifest.node(Inode(inode)) {
                        let _: usize = node.children().count() + node.xattrs().count();
                        let _: Option<ChunkRef> = node.chunk(0);
                    }
                }
            }
            let short = bytes[..at].to_vec();
            assert!(Manifest::open(short.clone(), Digest::of(&short)).is_err());
        }
    }
}
