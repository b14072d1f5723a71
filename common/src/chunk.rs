//! Fixed, aligned chunks of 1 MiB and their hashes.
//!
//! A file of at most one chunk is named by its ordinary BLAKE3 hash. A larger one is named chunk
//! by chunk with the chaining value of each aligned subtree; the values merge to the ordinary
//! hash of the file, so the owner can check anything with `b3sum`. A chaining value is bound to
//! its offset: equal bytes at other offsets have other values.
//!
//! Invariant: only [`ChunkId::verify`] makes a [`VerifiedChunk`], and only
//! [`ChunkId::verify_part`] a [`VerifiedPart`]. Caches and the kernel accept nothing else.

mod part;

pub use part::{
    GROUP_BYTES, VerifiedPart, VerifiedSlice, group_bytes, group_count, group_values, groups_of, proof,
};

use blake3::hazmat::{HasherExt as _, Mode, merge_subtrees_non_root, merge_subtrees_root};
use bytes::Bytes;

use crate::id::Digest;

/// 1 MiB: the largest FUSE request, the read-ahead size and 8 ms at 1 Gbit/s.
pub const CHUNK_BYTES: usize = 1 << 20;
/// [`CHUNK_BYTES`] as the type that offsets have.
pub const CHUNK_BYTES_U64: u64 = 1 << 20;

/// How many chunks a file of this size has. An empty file has none.
#[must_use]
pub const fn chunk_count(size_bytes: u64) -> u64 {
    size_bytes.div_ceil(CHUNK_BYTES_U64)
}

/// Length of chunk `index` in a file of this size; 0 past its end.
#[must_use]
pub const fn chunk_len(size_bytes: u64, index: u64) -> u32 {
    let start = index.saturating_mul(CHUNK_BYTES_U64);
    let left = size_bytes.saturating_sub(start);
    #[expect(clippy::cast_possible_truncation, reason = "at most 1 MiB")]
    let len = if left < CHUNK_BYTES_U64 { left } else { CHUNK_BYTES_U64 } as u32;
    len
}

/// Where in its file a chunk stands; part of what its hash means.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Position {
    /// The whole of a file of at most 1 MiB: its hash is the file's.
    Whole,
    /// Chunk `index` of a larger file.
    Subtree { index: u64 },
}

impl Position {
    /// The position of chunk `index` in a finished file of this size.
    #[must_use]
    pub const fn of(size_bytes: u64, index: u64) -> Self {
        if size_bytes <= CHUNK_BYTES_U64 { Self::Whole } else { Self::Subtree { index } }
    }
}

/// The name of a chunk: its content, its place and its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ChunkId {
    pub hash: Digest,
    pub position: Position,
    pub len: u32,
}

/// Bytes did not have the hash that they were asked for by.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("content has hash {found} and {found_len} bytes where {expected} and {expected_len} were expected")]
pub struct HashMismatch {
    pub expected: Digest,
    pub expected_len: u32,
    pub found: Digest,
    pub found_len: usize,
}

impl ChunkId {
    /// Names these bytes at this position.
    #[must_use]
    pub fn of(position: Position, bytes: &[u8]) -> Self {
        Self {
            hash: value_of(position, bytes),
            position,
            len: u32::try_from(bytes.len()).unwrap_or(u32::MAX),
        }
    }

    /// Turns bytes that somebody sent into bytes that can be used.
    ///
    /// # Errors
    /// [`HashMismatch`] when they are not this chunk.
    pub fn verify(self, bytes: Bytes) -> Result<VerifiedChunk, HashMismatch> {
        // First, because no bytes at all have no value as a subtree: BLAKE3 would panic.
        let fits = bytes.len() == self.len as usize;
        let found = if fits { value_of(self.position, &bytes) } else { Digest([0; 32]) };
        if fits && found == self.hash {
            return Ok(VerifiedChunk { id: self, bytes });
        }
        let (expected, expected_len, found_len) = (self.hash, self.len, bytes.len());
        Err(HashMismatch { expected, expected_len, found, found_len })
    }
}

/// The hash of bytes at a position. Chunks are at most 1 MiB: past 2^10 BLAKE3 chunks an aligned
/// subtree would be another one.
#[must_use]
pub fn value_of(position: Position, bytes: &[u8]) -> Digest {
    debug_assert!(bytes.len() <= CHUNK_BYTES, "a chunk is at most 1 MiB");
    match position {
        Position::Whole => Digest::of(bytes),
        Position::Subtree { index } => {
            let mut hasher = blake3::Hasher::new();
            hasher.set_input_offset(index * CHUNK_BYTES_U64);
            hasher.update(bytes);
            Digest(hasher.finalize_non_root())
        }
    }
}

/// Bytes that are what their name says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedChunk {
    id: ChunkId,
    bytes: Bytes,
}

impl VerifiedChunk {
    #[must_use]
    pub fn id(&self) -> ChunkId {
        self.id
    }

    #[must_use]
    pub fn bytes(&self) -> &Bytes {
        &self.bytes
    }
}

/// The ordinary BLAKE3 hash of a file of more than one chunk, from its subtree values in order.
/// `None` for fewer than two values: such a file's hash is that of its only chunk as
/// [`Position::Whole`], or of nothing.
#[must_use]
pub fn merge_root(values: &[Digest]) -> Option<Digest> {
    if values.len() < 2 {
        return None;
    }
    let (left, right) = values.split_at(left_len(values.len()));
    let root = merge_subtrees_root(&merge(left), &merge(right), Mode::Hash);
    Some(Digest(*root.as_bytes()))
}

fn merge(values: &[Digest]) -> [u8; 32] {
    if let [only] = values {
        return only.0;
    }
    let (left, right) = values.split_at(left_len(values.len()));
    merge_subtrees_non_root(&merge(left), &merge(right), Mode::Hash)
}

/// BLAKE3's tree is left-full: the left side is the largest power of two that leaves something
/// on the right.
fn left_len(count: usize) -> usize {
    count.next_power_of_two() / 2
}

#[cfg(test)]
mod tests {
    use super::*;

    fn noise(len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        blake3::Hasher::new().update(b"noise").finalize_xof().fill(&mut out);
        out
    }

    #[test]
    fn merged_chunk_values_are_the_ordinary_hash_of_the_file() {
        for chunks in [2, 3, 4, 5, 7, 8, 9, 13] {
            for tail in [1, 1023, 1025, CHUNK_BYTES] {
                let file = noise((chunks - 1) * CHUNK_BYTES + tail);
                let values: Vec<_> = file
                    .chunks(CHUNK_BYTES)
                    .zip(0..)
                    .map(|(bytes, index)| value_of(Position::Subtree { index }, bytes))
                    .collect();
                assert_eq!(merge_root(&values), Some(Digest::of(&file)), "{chunks} chunks, tail {tail}");
            }
        }
    }

    #[test]
    fn verify_refuses_other_bytes_other_lengths_and_other_places() {
        let bytes = Bytes::from(noise(5000));
        let id = ChunkId::of(Position::Subtree { index: 3 }, &bytes);
        assert_eq!(id.verify(bytes.clone()).unwrap().bytes(), &bytes);
        assert!(id.verify(bytes.slice(..4999)).is_err());
        assert!(id.verify(Bytes::new()).is_err());
        let mut flipped = bytes.to_vec();
        flipped[2500] ^= 1;
        assert!(id.verify(flipped.into()).is_err());
        assert!(ChunkId { position: Position::Subtree { index: 4 }, ..id }.verify(bytes).is_err());
    }

    #[test]
    fn lengths_of_chunks_add_up() {
        for size in [0, 1, CHUNK_BYTES_U64 - 1, CHUNK_BYTES_U64, CHUNK_BYTES_U64 + 1, 5 * CHUNK_BYTES_U64] {
            let sum: u64 = (0..chunk_count(size)).map(|i| u64::from(chunk_len(size, i))).sum();
            assert_eq!(sum, size);
            assert_eq!(chunk_len(size, chunk_count(size)), 0);
        }
    }
}
