//! A file of the box that is still being written: where its bytes lie and which of them are known
//! to be right.

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::unix::fs::FileExt as _;

use limb_common::chunk::{CHUNK_BYTES_U64, Position, chunk_count, chunk_len, merge_root, value_of};
use limb_common::id::Digest;
use nix::errno::Errno;

use super::disk::{Disk, DiskError, Ident};
use super::effect::Where;

/// A chunk whose bytes were checked before they were written.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stored {
    pub(super) generation: u64,
    pub(super) len: u32,
    pub(super) value: Digest,
    /// Chunk 0 also as the whole of a small file.
    pub(super) whole: Option<Digest>,
}

/// A visible file that grows with the part.
#[derive(Clone, Debug)]
pub(super) struct Grown {
    pub(super) path: Vec<u8>,
    pub(super) ident: Ident,
    pub(super) size: u64,
    pub(super) values: Vec<u8>,
}

#[derive(Debug)]
pub(super) struct Part {
    pub(super) place: Where,
    pub(super) ident: Ident,
    /// The name that the box means it to have.
    pub(super) intended: Vec<u8>,
    pub(super) chunks: HashMap<u64, Stored>,
    /// Chunks that could not be stored, with the reason.
    pub(super) failed: BTreeMap<u64, Errno>,
    /// Bytes that the part holds.
    pub(super) extent: u64,
    pub(super) grown: Option<Grown>,
}

impl Part {
    pub(super) fn new(place: Where, ident: Ident, intended: Vec<u8>, extent: u64) -> Self {
        Self { place, ident, intended, chunks: HashMap::new(), failed: BTreeMap::new(), extent, grown: None }
    }

    /// Writes a checked chunk; what an older, longer generation left behind it becomes zeros.
    pub(super) fn write(
        &mut self,
        disk: &Disk,
        file: &File,
        index: u64,
        bytes: &[u8],
        stored: Stored,
    ) -> Result<(), DiskError> {
        let start = index * CHUNK_BYTES_U64;
        let end = start + bytes.len() as u64;
        // Unknown until it is written whole.
        self.chunks.remove(&index);
        disk.write_at(file, bytes, start)?;
        let stale_end = self.extent.min(start + CHUNK_BYTES_U64);
        if stale_end > end {
            let zeros = vec![0; usize::try_from(stale_end - end).unwrap_or(0)];
            disk.write_at(file, &zeros, end)?;
        }
        self.extent = self.extent.max(end);
        self.chunks.insert(index, stored);
        self.failed.remove(&index);
        Ok(())
    }

    /// Brings the part to `size` and proves that its content has this root. Chunk values that are
    /// not known (never sent, or lost in a restart) are computed from the file. The answer is
    /// what a manifest wants: one root for a small file, else a value for each chunk.
    pub(super) fn prove(
        &mut self,
        disk: &Disk,
        file: &File,
        size: u64,
        root: Digest,
    ) -> Result<Vec<Digest>, DiskError> {
        let count = chunk_count(size);
        if let Some((_, errno)) = self.failed.range(..count).next() {
            return Err((*errno).into());
        }
        if file.metadata()?.len() != size {
            disk.set_len(file, size)?;
        }
        self.extent = size;
        // A chunk that was cut is not the one that was checked.
        self.chunks.retain(|index, stored| index * CHUNK_BYTES_U64 + u64::from(stored.len) <= size);
        let values = self.values(file, size)?;
        let found = match values.as_slice() {
            [] => Digest::of(b""),
            [only] => *only,
            several => merge_root(several).unwrap_or_else(|| Digest::of(b"")),
        };
        if found == root { Ok(values) } else { Err(Errno::EIO.into()) }
    }

    fn values(&self, file: &File, size: u64) -> Result<Vec<Digest>, DiskError> {
        (0..chunk_count(size))
            .map(|index| {
                let len = chunk_len(size, index);
                let position = Position::of(size, index);
                let known = self.chunks.get(&index).filter(|stored| stored.len == len);
                let known = known.and_then(|stored| match position {
                    Position::Whole => stored.whole,
                    Position::Subtree { .. } => Some(stored.value),
                });
                known.map_or_else(|| read_value(file, position, index, len), Ok)
            })
            .collect()
    }
}

/// The value of a chunk as it is on disk.
pub(super) fn read_value(file: &File, position: Position, index: u64, len: u32) -> Result<Digest, DiskError> {
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, index * CHUNK_BYTES_U64)?;
    Ok(value_of(position, &bytes))
}

/// Hashes a whole file of a known size; `None` when it is shorter.
pub(super) fn root_of(file: &File, size: u64) -> Result<Digest, DiskError> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 20];
    let mut at = 0;
    while at < size {
        let want = usize::try_from(size - at).unwrap_or(usize::MAX).min(buffer.len());
        file.read_exact_at(&mut buffer[..want], at)?;
        hasher.update(&buffer[..want]);
        at += want as u64;
    }
    Ok(Digest(*hasher.finalize().as_bytes()))
}

pub(super) fn flatten(values: &[Digest]) -> Vec<u8> {
    values.iter().flat_map(|value| value.0).collect()
}

/// The value of chunk `index` in a flat list.
pub(super) fn value_at(flat: &[u8], index: u64) -> Option<Digest> {
    let at = usize::try_from(index).ok()?.checked_mul(32)?;
    flat.get(at..at + 32)?.try_into().ok().map(Digest)
}
