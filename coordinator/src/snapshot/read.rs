//! Reading frozen bytes back. The hash is the judge: a file whose times changed but whose bytes
//! did not is still served, one whose bytes changed never is, whatever its times say.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex};

use bytes::{Bytes, BytesMut};
use limb_common::chunk::{
    CHUNK_BYTES_U64, ChunkId, VerifiedChunk, group_bytes, group_count, group_values, proof,
};
use limb_common::id::Digest;
use limb_common::manifest::{ChunkRef, Inode, Manifest, NodeKind, ROOT};
use limb_common::wire::MAX_PACK_BYTES;
use nix::errno::Errno;
use nix::fcntl::OFlag;

use super::index::Index;
use super::lock;
use super::sources::{FileIdentity, Source, SourceTable};
use super::store::Store;
use super::walk::open_path;

/// A chunk of a snapshot cannot be had. Paths are raw bytes inside the set.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    #[error("there is no such chunk")]
    NotFound,
    #[error("{} is not what was frozen: {why}", String::from_utf8_lossy(path))]
    SourceChanged { path: Vec<u8>, why: &'static str },
    /// Worth another try.
    #[error("could not read {}", String::from_utf8_lossy(path))]
    Io { path: Vec<u8>, source: std::io::Error },
}

/// Several small files as one answer.
#[derive(Debug)]
pub struct Pack {
    /// Of the files that could be read, in the order asked.
    pub bytes: Bytes,
    /// The others, by their place in what was asked.
    pub missing: Vec<(usize, ReadError)>,
}

/// A run of groups of a chunk.
#[derive(Debug)]
pub struct Part {
    pub bytes: Bytes,
    /// 32 bytes a value, left to right.
    pub proof: Bytes,
}

/// Chunks whose group values are remembered (2 KiB each), so that a part costs a read and a hash of
/// its own length and not of the whole chunk.
const MAX_OUTLINES: usize = 16_384;

type Outlines = HashMap<(Inode, u64), Arc<[Digest]>>;

/// A snapshot open for reading.
#[derive(Debug)]
pub struct LoadedSnapshot {
    outlines: Mutex<Outlines>,
    manifest: Manifest,
    table: SourceTable,
    store: Store,
    index: Arc<Mutex<Index>>,
}

/// Why one look at a file did not give the chunk.
enum Look {
    Changed(&'static str),
    Failed(std::io::Error),
}

impl LoadedSnapshot {
    pub(super) fn new(
        manifest: Manifest,
        table: SourceTable,
        store: Store,
        index: Arc<Mutex<Index>>,
    ) -> Self {
        Self { outlines: Mutex::default(), manifest, table, store, index }
    }

    #[must_use]
    pub fn manifest(&self) -> &Manifest {
        &self.manifest
    }

    /// The frozen bytes of a chunk. Blocks on the disk.
    ///
    /// # Errors
    /// [`ReadError`]; never other bytes.
    pub fn read_chunk(&self, inode: Inode, index: u64) -> Result<VerifiedChunk, ReadError> {
        let node = self.manifest.node(inode).ok_or(ReadError::NotFound)?;
        let Some(ChunkRef::Data(id)) = node.chunk(index) else { return Err(ReadError::NotFound) };
        let source = self.table.get(inode);
        let identity = match &source {
            Source::Nothing => return Err(ReadError::NotFound),
            Source::Store(..) => None,
            Source::InPlace { identity, .. } => Some(*identity),
        };
        let look = |source: &Source| look(self.open(source), identity.as_ref(), id, index);
        // A second look before the verdict: the first may have met a writer half-way through
        // putting back the same bytes, or the store has moved them.
        let second = match look(&source) {
            Ok(chunk) => return Ok(chunk),
            Err(Look::Failed(_) | Look::Changed(_)) => look(&self.found_again(source, node.size)),
        };
        match second {
            Ok(chunk) => Ok(chunk),
            Err(Look::Failed(source)) => Err(ReadError::Io { path: self.path_of(inode), source }),
            Err(Look::Changed(why)) => {
                if let Some(identity) = identity
                    && let Err(error) = lock(&self.index).forget(&identity)
                {
                    tracing::warn!(%error, "a stale hash stays in the index");
                }
                let why = if identity.is_some() { why } else { "home's stored copy is damaged" };
                Err(ReadError::SourceChanged { path: self.path_of(inode), why })
            }
        }
    }

    /// A run of groups of a chunk, with its proof. Blocks on the disk.
    ///
    /// # Errors
    /// [`ReadError`]; never other bytes.
    pub fn read_part(&self, inode: Inode, index: u64, groups: &Range<usize>) -> Result<Part, ReadError> {
        let node = self.manifest.node(inode).ok_or(ReadError::NotFound)?;
        let Some(ChunkRef::Data(id)) = node.chunk(index) else { return Err(ReadError::NotFound) };
        if groups.is_empty() || groups.end > group_count(id.len) {
            return Err(ReadError::NotFound);
        }
        let range = group_bytes(id.len, groups);
        let known = lock(&self.outlines).get(&(inode, index)).cloned();
        if let Some(values) = known
            && let Some(bytes) = self.read_known(inode, index, id, &values, groups)
        {
            return Ok(Part { bytes, proof: wire_proof(&values, groups) });
        }
        // The first of this chunk; or its file is not what it was, and this says how.
        let chunk = self.read_chunk(inode, index)?;
        let values: Arc<[Digest]> = group_values(id.position, chunk.bytes()).into();
        let proof = wire_proof(&values, groups);
        let mut outlines = lock(&self.outlines);
        if outlines.len() >= MAX_OUTLINES {
            outlines.clear();
        }
        outlines.insert((inode, index), values);
        Ok(Part { bytes: chunk.bytes().slice(range), proof })
    }

    /// The file that holds these bytes, and where in it they begin.
    fn open(&self, source: &Source) -> nix::Result<(File, u64)> {
        match source {
            Source::Nothing => Err(Errno::ENOENT),
            Source::Store(content, place) => self.store.open_stored(*content, *place),
            Source::InPlace { path, .. } => {
                open_path(path, OFlag::O_RDONLY | OFlag::O_NONBLOCK).map(|fd| (File::from(fd), 0))
            }
        }
    }

    fn found_again(&self, source: Source, size: u64) -> Source {
        match source {
            Source::Store(content, place) => {
                Source::Store(content, self.store.find(content, size).unwrap_or(place))
            }
            other => other,
        }
    }

    /// The groups, if they have the values that they had.
    fn read_known(
        &self,
        inode: Inode,
        index: u64,
        id: ChunkId,
        values: &[Digest],
        groups: &Range<usize>,
    ) -> Option<Bytes> {
        let (file, start) = self.open(&self.table.get(inode)).ok()?;
        if !file.metadata().ok()?.is_file() {
            return None;
        }
        let range = group_bytes(id.len, groups);
        let mut bytes = vec![0; range.len()];
        file.read_exact_at(&mut bytes, start + index * CHUNK_BYTES_U64 + range.start as u64).ok()?;
        let bytes = Bytes::from(bytes);
        id.verify_part(groups.clone(), bytes.clone(), &proof(values, groups)).ok()?;
        Some(bytes)
    }

    /// Whole small files, one after the other. A file whose bytes cannot be had, that has not
    /// exactly one chunk, or with which the pack would be longer than [`MAX_PACK_BYTES`], is
    /// missing from them. Blocks on the disk.
    #[must_use]
    pub fn read_files(&self, inodes: &[Inode]) -> Pack {
        let (mut bytes, mut missing) = (BytesMut::new(), Vec::new());
        for (at, &inode) in inodes.iter().enumerate() {
            let node = self.manifest.node(inode);
            let fits = node.is_some_and(|node| {
                node.chunk_count() == 1 && node.size <= (MAX_PACK_BYTES - bytes.len()) as u64
            });
            let read = if fits { self.read_chunk(inode, 0) } else { Err(ReadError::NotFound) };
            match read {
                Ok(chunk) => bytes.extend_from_slice(chunk.bytes()),
                Err(error) => missing.push((at, error)),
            }
        }
        Pack { bytes: bytes.freeze(), missing }
    }

    /// A path of this inode inside the set.
    #[must_use]
    pub fn path_of(&self, inode: Inode) -> Vec<u8> {
        let mut names: Vec<&[u8]> = Vec::new();
        let mut at = inode;
        // A parent has a smaller number, so this ends; the bound holds for any manifest.
        for _ in 0..self.manifest.inode_count() {
            let parent = self.manifest.node(at).and_then(|node| self.manifest.node(node.parent));
            let Some(parent) = parent.filter(|parent| at != ROOT && parent.kind == NodeKind::Directory)
            else {
                break;
            };
            let Some((name, _)) = parent.children().find(|&(_, child)| child == at) else { break };
            names.push(name);
            at = parent.inode;
        }
        names.reverse();
        names.join(&b'/')
    }
}

fn wire_proof(values: &[Digest], groups: &Range<usize>) -> Bytes {
    proof(values, groups).iter().flat_map(|value| value.0).collect()
}

fn look(
    opened: nix::Result<(File, u64)>,
    identity: Option<&FileIdentity>,
    id: ChunkId,
    index: u64,
) -> Result<VerifiedChunk, Look> {
    let (file, start) = opened.map_err(|errno| match errno {
        Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::ENXIO => Look::Changed("it is gone"),
        Errno::EACCES | Errno::EPERM => Look::Changed("it may not be read any more"),
        other => Look::Failed(other.into()),
    })?;
    let now = file.metadata().map_err(Look::Failed)?;
    if !now.is_file() {
        return Err(Look::Changed("it is no regular file any more"));
    }
    let mut bytes = vec![0; id.len as usize];
    file.read_exact_at(&mut bytes, start + index * CHUNK_BYTES_U64).map_err(|error| match error.kind() {
        std::io::ErrorKind::UnexpectedEof => Look::Changed("it is shorter"),
        _ => Look::Failed(error),
    })?;
    id.verify(bytes.into()).map_err(|_| {
        Look::Changed(match identity {
            Some(then) if *then == FileIdentity::of(&now) => "its content changed although its times did not",
            _ => "its content changed",
        })
    })
}
