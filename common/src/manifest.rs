//! A snapshot's manifest: one immutable, canonical, little-endian binary that holds everything
//! about a tree but its bytes. Its BLAKE3 hash is its identity.
//!
//! The agent answers lookup, stat, readdir, readlink, xattr and statfs from it without a round
//! trip, so access is by offset into the mapped bytes, never by parsing into objects. Inodes are
//! dense from 1 (the root), in depth-first order; children of a directory are sorted by raw name.
//!
//! ```text
//! header 64 B | inodes 64 B each | entries 24 B each | chunk values 32 B each | blob
//! ```
//!
//! Invariant: [`Manifest::open`] checks the hash and every offset once; the accessors after it
//! neither panic nor read outside.

mod build;

pub use build::{BuildError, Draft, ManifestBuilder, NewNode, NodeMeta, NodeOrder};

use std::sync::Arc;

use crate::chunk::{ChunkId, Position, chunk_count, chunk_len};
use crate::id::Digest;

const MAGIC: &[u8; 8] = b"LIMBMAN\x01";
const HEADER_BYTES: usize = 64;
const INODE_BYTES: usize = 64;
const ENTRY_BYTES: usize = 24;
const VALUE_BYTES: usize = 32;
/// A chunk of zeros that nobody stored: no file content hashes to it.
const HOLE: [u8; 32] = [0; 32];

/// Longest file name that Linux passes on.
pub const MAX_NAME_BYTES: usize = 255;
/// The root directory (or the single file's directory).
pub const ROOT: Inode = Inode(1);

/// Number of a node in its manifest, dense from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Inode(pub u64);

/// What a node is. Devices, fifos and sockets are not part of a working set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum NodeKind {
    Directory,
    File,
    Symlink,
}

/// One chunk of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChunkRef {
    /// Zeros; nothing to fetch.
    Hole {
        len: u32,
    },
    Data(ChunkId),
}

/// Bytes are not a manifest, or not the one that was asked for.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum ManifestError {
    #[error("the manifest has hash {found} where {expected} was expected")]
    WrongHash { expected: Digest, found: Digest },
    #[error("the manifest is malformed: {0}")]
    Malformed(&'static str),
}

/// Where the bytes live: a buffer or a sealed mapping.
pub trait ManifestBytes: AsRef<[u8]> + Send + Sync + 'static {}
impl<T: AsRef<[u8]> + Send + Sync + 'static> ManifestBytes for T {}

/// An opened manifest. Cheap to clone.
#[derive(Clone)]
pub struct Manifest {
    bytes: Arc<dyn ManifestBytes>,
    id: Digest,
    layout: Layout,
}

impl std::fmt::Debug for Manifest {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Manifest").field("id", &self.id).field("layout", &self.layout).finish_non_exhaustive()
    }
}

#[derive(Clone, Copy, Debug)]
struct Layout {
    inodes: u64,
    entries: u64,
    values: u64,
    total_bytes: u64,
    entries_at: usize,
    values_at: usize,
    blob_at: usize,
    blob_len: usize,
}

/// One node, borrowed from its manifest.
#[derive(Clone, Copy)]
pub struct Node<'a> {
    manifest: &'a Manifest,
    pub inode: Inode,
    pub kind: NodeKind,
    /// Permission bits (no type bits, no set-id bits).
    pub mode: u32,
    pub nlink: u32,
    /// Bytes of a file; length of a symlink's target; number of entries of a directory.
    pub size: u64,
    pub mtime_ns: i64,
    pub parent: Inode,
    first: u64,
    xattr_at: u64,
    xattr_count: u32,
}

impl std::fmt::Debug for Node<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Node")
            .field("inode", &self.inode)
            .field("kind", &self.kind)
            .field("size", &self.size)
            .finish_non_exhaustive()
    }
}

impl Manifest {
    /// Opens bytes that must hash to `expected`.
    ///
    /// # Errors
    /// [`ManifestError`] when they do not, or when any offset in them leads outside.
    pub fn open(bytes: impl ManifestBytes, expected: Digest) -> Result<Self, ManifestError> {
        let found = Digest::of(bytes.as_ref());
        if found != expected {
            return Err(ManifestError::WrongHash { expected, found });
        }
        let layout = Layout::read(bytes.as_ref())?;
        let manifest = Self { bytes: Arc::new(bytes), id: found, layout };
        manifest.check()?;
        Ok(manifest)
    }

    #[must_use]
    pub fn id(&self) -> Digest {
        self.id
    }

    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        (*self.bytes).as_ref()
    }

    #[must_use]
    pub fn inode_count(&self) -> u64 {
        self.layout.inodes
    }

    /// Chunks of all files, holes among them.
    #[must_use]
    pub fn chunk_total(&self) -> u64 {
        self.layout.values
    }

    /// Sum of the sizes of all files, each hard link counted once.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        self.layout.total_bytes
    }

    #[must_use]
    pub fn node(&self, inode: Inode) -> Option<Node<'_>> {
        if inode.0 == 0 || inode.0 > self.layout.inodes {
            return None;
        }
        let at = HEADER_BYTES + (to_usize(inode.0) - 1) * INODE_BYTES;
        let raw = self.as_bytes().get(at..at + INODE_BYTES)?;
        let mode = u32_at(raw, 0);
        Some(Node {
            manifest: self,
            inode,
            kind: match mode >> 12 {
                0o04 => NodeKind::Directory,
                0o12 => NodeKind::Symlink,
                _ => NodeKind::File,
            },
            mode: mode & 0o7777,
            nlink: u32_at(raw, 4),
            size: u64_at(raw, 8),
            mtime_ns: i64_at(raw, 16),
            first: u64_at(raw, 24),
            parent: Inode(u64_at(raw, 32)),
            xattr_at: u64_at(raw, 40),
            xattr_count: u32_at(raw, 48),
        })
    }

    /// Finds a child by name: binary search, no allocation.
    #[must_use]
    pub fn lookup(&self, directory: Inode, name: &[u8]) -> Option<Inode> {
        let node = self.node(directory).filter(|node| node.kind == NodeKind::Directory)?;
        let (mut low, mut high) = (0, node.size);
        while low < high {
            let middle = low + (high - low) / 2;
            let (found, inode) = node.child(middle)?;
            match found.cmp(name) {
                std::cmp::Ordering::Equal => return Some(inode),
                std::cmp::Ordering::Less => low = middle + 1,
                std::cmp::Ordering::Greater => high = middle,
            }
        }
        None
    }

    /// Walks a path of raw bytes from the root; empty components are skipped.
    #[must_use]
    pub fn resolve(&self, path: &[u8]) -> Option<Inode> {
        path.split(|&b| b == b'/')
            .filter(|part| !part.is_empty())
            .try_fold(ROOT, |at, name| self.lookup(at, name))
    }

    fn entry(&self, index: u64) -> Option<(&[u8], Inode)> {
        if index >= self.layout.entries {
            return None;
        }
        let at = self.layout.entries_at + to_usize(index) * ENTRY_BYTES;
        let raw = self.as_bytes().get(at..at + ENTRY_BYTES)?;
        let name = self.blob(u64_at(raw, 0), u64::from(u32_at(raw, 8)))?;
        Some((name, Inode(u64_at(raw, 16))))
    }

    fn blob(&self, at: u64, len: u64) -> Option<&[u8]> {
        let start = usize::try_from(at).ok()?;
        let end = start.checked_add(usize::try_from(len).ok()?)?;
        if end > self.layout.blob_len {
            return None;
        }
        self.as_bytes().get(self.layout.blob_at + start..self.layout.blob_at + end)
    }

    /// Every offset once, so that the accessors cannot meet a bad one later.
    fn check(&self) -> Result<(), ManifestError> {
        let malformed = |what| Err(ManifestError::Malformed(what));
        if self.node(ROOT).is_none_or(|root| root.kind != NodeKind::Directory || root.parent != ROOT) {
            return malformed("the root is not a directory");
        }
        for number in 1..=self.layout.inodes {
            let Some(node) = self.node(Inode(number)) else { return malformed("inode") };
            if node.parent.0 == 0 || node.parent.0 > self.layout.inodes {
                return malformed("parent");
            }
            if node.xattrs().count() != node.xattr_count as usize {
                return malformed("extended attributes");
            }
            match node.kind {
                NodeKind::Directory => {
                    let end = node.first.checked_add(node.size);
                    if end.is_none_or(|end| end > self.layout.entries) {
                        return malformed("entries");
                    }
                    let mut previous: Option<&[u8]> = None;
                    for index in 0..node.size {
                        let Some((name, child)) = node.child(index) else { return malformed("entry") };
                        let sorted = previous.is_none_or(|before| before < name);
                        let legal = !name.is_empty()
                            && name.len() <= MAX_NAME_BYTES
                            && name != b"."
                            && name != b".."
                            && !name.contains(&b'/')
                            && !name.contains(&0);
                        if !sorted || !legal || child.0 <= 1 || child.0 > self.layout.inodes {
                            return malformed("entry");
                        }
                        previous = Some(name);
                    }
                }
                NodeKind::File => {
                    let end = node.first.checked_add(chunk_count(node.size));
                    if end.is_none_or(|end| end > self.layout.values) {
                        return malformed("chunk values");
                    }
                }
                NodeKind::Symlink => {
                    if self.blob(node.first, node.size).is_none() {
                        return malformed("symlink target");
                    }
                }
            }
        }
        Ok(())
    }
}

impl<'a> Node<'a> {
    /// The child at this place in name order.
    #[must_use]
    pub fn child(&self, index: u64) -> Option<(&'a [u8], Inode)> {
        (self.kind == NodeKind::Directory && index < self.size)
            .then(|| self.manifest.entry(self.first + index))?
    }

    /// Children in name order.
    pub fn children(self) -> impl Iterator<Item = (&'a [u8], Inode)> {
        (0..self.size).map_while(move |index| self.child(index))
    }

    /// Where a symlink points.
    #[must_use]
    pub fn target(&self) -> Option<&'a [u8]> {
        (self.kind == NodeKind::Symlink).then(|| self.manifest.blob(self.first, self.size))?
    }

    /// Chunks of a file; 0 for anything else.
    #[must_use]
    pub fn chunk_count(&self) -> u64 {
        if self.kind == NodeKind::File { chunk_count(self.size) } else { 0 }
    }

    #[must_use]
    pub fn chunk(&self, index: u64) -> Option<ChunkRef> {
        if index >= self.chunk_count() {
            return None;
        }
        let at = self.manifest.layout.values_at + to_usize(self.first + index) * VALUE_BYTES;
        let raw: [u8; 32] = self.manifest.as_bytes().get(at..at + VALUE_BYTES)?.try_into().ok()?;
        let len = chunk_len(self.size, index);
        Some(if raw == HOLE {
            ChunkRef::Hole { len }
        } else {
            ChunkRef::Data(ChunkId { hash: Digest(raw), position: Position::of(self.size, index), len })
        })
    }

    /// The number of a chunk among all of the manifest's, from 0.
    #[must_use]
    pub fn chunk_number(&self, index: u64) -> Option<u64> {
        (index < self.chunk_count()).then(|| self.first + index)
    }

    /// Bytes that are not holes.
    #[must_use]
    pub fn data_bytes(&self) -> u64 {
        (0..self.chunk_count())
            .map(|index| match self.chunk(index) {
                Some(ChunkRef::Data(id)) => u64::from(id.len),
                Some(ChunkRef::Hole { .. }) | None => 0,
            })
            .sum()
    }

    /// Extended attributes, names as the kernel gives them (`user.x`).
    pub fn xattrs(self) -> impl Iterator<Item = (&'a [u8], &'a [u8])> {
        let mut at = self.xattr_at;
        (0..self.xattr_count).map_while(move |_| {
            let header = self.manifest.blob(at, 8)?;
            let (name_len, value_len) = (u32_at(header, 0), u32_at(header, 4));
            let name = self.manifest.blob(at + 8, u64::from(name_len))?;
            let value = self.manifest.blob(at + 8 + u64::from(name_len), u64::from(value_len))?;
            at += 8 + u64::from(name_len) + u64::from(value_len);
            Some((name, value))
        })
    }
}

impl Layout {
    fn read(bytes: &[u8]) -> Result<Self, ManifestError> {
        let malformed = |what| ManifestError::Malformed(what);
        let header = bytes.get(..HEADER_BYTES).ok_or_else(|| malformed("too short"))?;
        if &header[..8] != MAGIC {
            return Err(malformed("not a manifest of this version"));
        }
        let [inodes, entries, values, blob, total_bytes] = [8, 16, 24, 32, 40].map(|at| u64_at(header, at));
        let table = |count: u64, size: usize| usize::try_from(count).ok().and_then(|n| n.checked_mul(size));
        let place = || {
            let entries_at = table(inodes, INODE_BYTES)?.checked_add(HEADER_BYTES)?;
            let values_at = table(entries, ENTRY_BYTES)?.checked_add(entries_at)?;
            let blob_at = table(values, VALUE_BYTES)?.checked_add(values_at)?;
            let blob_len = usize::try_from(blob).ok()?;
            (blob_at.checked_add(blob_len)? == bytes.len()).then_some(Self {
                inodes,
                entries,
                values,
                total_bytes,
                entries_at,
                values_at,
                blob_at,
                blob_len,
            })
        };
        place().ok_or_else(|| malformed("tables do not fit"))
    }
}

fn to_usize(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

fn array_at<const N: usize>(raw: &[u8], at: usize) -> [u8; N] {
    raw.get(at..at + N).and_then(|slice| slice.try_into().ok()).unwrap_or([0; N])
}

fn u32_at(raw: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(raw, at))
}

fn u64_at(raw: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(raw, at))
}

fn i64_at(raw: &[u8], at: usize) -> i64 {
    i64::from_le_bytes(array_at(raw, at))
}
