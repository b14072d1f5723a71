//! Reading frozen bytes back. The hash is the judge: a file whose times changed but whose bytes
//! did not is still served, one whose bytes changed never is, whatever its times say.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::{Arc, Mutex};

use limb_common::chunk::{CHUNK_BYTES_U64, ChunkId, VerifiedChunk};
use limb_common::manifest::{ChunkRef, Inode, Manifest, NodeKind, ROOT};
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

/// A snapshot open for reading.
#[derive(Debug)]
pub struct LoadedSnapshot {
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
        Self { manifest, table, store, index }
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
        let (path, identity) = match self.table.get(inode) {
            Source::Nothing => return Err(ReadError::NotFound),
            Source::Store(content) => (self.store.path(content), None),
            Source::InPlace { path, identity } => (path, Some(identity)),
        };
        // A second look before the verdict: the first may have met a writer half-way through
        // putting back the same bytes.
        let first = look(&path, identity.as_ref(), id, index);
        let second = match first {
            Ok(chunk) => return Ok(chunk),
            Err(Look::Failed(_) | Look::Changed(_)) => look(&path, identity.as_ref(), id, index),
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

fn look(
    path: &Path,
    identity: Option<&FileIdentity>,
    id: ChunkId,
    index: u64,
) -> Result<VerifiedChunk, Look> {
    use nix::errno::Errno;
    let fd = open_path(path, OFlag::O_RDONLY | OFlag::O_NONBLOCK).map_err(|errno| match errno {
        Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP | Errno::ENXIO => Look::Changed("it is gone"),
        Errno::EACCES | Errno::EPERM => Look::Changed("it may not be read any more"),
        other => Look::Failed(other.into()),
    })?;
    let file = File::from(fd);
    let now = file.metadata().map_err(Look::Failed)?;
    if !now.is_file() {
        return Err(Look::Changed("it is no regular file any more"));
    }
    let mut bytes = vec![0; id.len as usize];
    file.read_exact_at(&mut bytes, index * CHUNK_BYTES_U64).map_err(|error| match error.kind() {
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
