//! A chunk of a results file that its writer has left: immutable bytes, and their hashes once
//! somebody off the FUSE threads has computed them.
//!
//! Invariant: the bytes may be dropped only after home has acknowledged them, and then what comes
//! back from home is accepted only if it has the value that we kept.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use bytes::Bytes;
use limb_common::assignment::OutputNumber;
use limb_common::chunk::{
    CHUNK_BYTES, CHUNK_BYTES_U64, ChunkId, Position, chunk_count, chunk_len, merge_root, value_of,
};
use limb_common::id::Digest;

use super::budget::Charge;

/// Names one state of one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChunkKey {
    pub output: OutputNumber,
    pub file: u64,
    pub index: u64,
    pub generation: u64,
}

/// Both names that the bytes can have: what they are depends on the file's final size.
#[derive(Clone, Copy, Debug)]
struct Values {
    subtree: Digest,
    /// Only of chunk 0.
    whole: Option<Digest>,
}

#[derive(Debug)]
pub struct SealedChunk {
    pub key: ChunkKey,
    pub len: u32,
    values: OnceLock<Values>,
    bytes: Mutex<Option<Bytes>>,
    charge: Mutex<Option<Charge>>,
    acknowledged: AtomicBool,
}

impl SealedChunk {
    pub(crate) fn new(key: ChunkKey, bytes: Vec<u8>, charge: Option<Charge>) -> Self {
        Self {
            key,
            len: u32::try_from(bytes.len()).unwrap_or(u32::MAX),
            values: OnceLock::new(),
            bytes: Mutex::new(Some(bytes.into())),
            charge: Mutex::new(charge),
            acknowledged: AtomicBool::new(false),
        }
    }

    /// The bytes, unless they are only at home by now.
    #[must_use]
    pub fn bytes(&self) -> Option<Bytes> {
        self.bytes.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Hashes; call it off the FUSE threads. `None` when the bytes are gone and were never hashed,
    /// which cannot be: they go only after they were sent.
    #[must_use]
    pub fn subtree_value(&self) -> Option<Digest> {
        self.values().map(|values| values.subtree)
    }

    fn values(&self) -> Option<Values> {
        if let Some(values) = self.values.get() {
            return Some(*values);
        }
        let bytes = self.bytes()?;
        let subtree = value_of(Position::Subtree { index: self.key.index }, &bytes);
        let whole = (self.key.index == 0).then(|| Digest::of(&bytes));
        Some(*self.values.get_or_init(|| Values { subtree, whole }))
    }

    /// What to ask home for when the bytes were dropped.
    pub(crate) fn id(&self) -> Option<ChunkId> {
        let hash = self.values.get()?.subtree;
        Some(ChunkId { hash, position: Position::Subtree { index: self.key.index }, len: self.len })
    }

    #[must_use]
    pub fn is_acknowledged(&self) -> bool {
        self.acknowledged.load(Ordering::SeqCst)
    }

    /// Home has it (or will never take it): it no longer counts as dirty.
    pub(crate) fn settle(&self, durable: bool) {
        self.acknowledged.store(durable, Ordering::SeqCst);
        drop(self.charge.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// Forgets the bytes if home has them.
    pub(crate) fn forget_bytes(&self) {
        if self.is_acknowledged() && self.values.get().is_some() {
            drop(self.bytes.lock().unwrap_or_else(PoisonError::into_inner).take());
        }
    }
}

/// One chunk of a file that is to be published. A chunk that is not listed is a hole.
#[derive(Clone, Debug)]
pub enum PublishedChunk {
    /// As in the lower set.
    Lower(ChunkId),
    Sealed(std::sync::Arc<SealedChunk>),
}

/// The ordinary BLAKE3 hash of a file of these chunks, in order of index. Hashes what was not yet
/// hashed, so call it off the FUSE threads. `None` when a chunk cannot be named: then the file
/// has a defect that must become an error, never a wrong root.
#[must_use]
pub fn root_of(size: u64, chunks: &[(u64, PublishedChunk)]) -> Option<Digest> {
    if size <= CHUNK_BYTES_U64 {
        let len = chunk_len(size, 0) as usize;
        return match chunks.first() {
            None => Some(Digest::of(&vec![0; len])),
            Some((_, PublishedChunk::Lower(id))) => {
                (id.position == Position::Whole && id.len as usize == len).then_some(id.hash)
            }
            Some((_, PublishedChunk::Sealed(chunk))) => {
                chunk.values().filter(|_| chunk.len as usize == len)?.whole
            }
        };
    }
    let zeros = vec![0; CHUNK_BYTES];
    let mut given = chunks.iter().peekable();
    let mut values = Vec::new();
    for index in 0..chunk_count(size) {
        let len = chunk_len(size, index);
        let position = Position::Subtree { index };
        let value = match given.next_if(|(at, _)| *at == index) {
            None => value_of(position, zeros.get(..len as usize)?),
            Some((_, PublishedChunk::Lower(id))) => {
                (id.position == position && id.len == len).then_some(id.hash)?
            }
            Some((_, PublishedChunk::Sealed(chunk))) => chunk.values().filter(|_| chunk.len == len)?.subtree,
        };
        values.push(value);
    }
    merge_root(&values)
}
