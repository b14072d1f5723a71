//! The bytes of one results file, in slots of 1 MiB.
//!
//! ```text
//!  Hole ── write ──▶ Dirty ── the writer passed it, 200 ms, fsync, close ──▶ Sealed ─ ack ─▶ (bytes may go)
//!  Lower ─ copy-up ──▶ Dirty ◀────────────── overwrite: next generation ───────┘
//! ```
//!
//! Invariant: a Lower or Sealed slot is exactly as long as its place in the file; only a Dirty one
//! may be shorter (zeros follow). So whatever changes the size loads what would break this first.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use limb_common::assignment::OutputNumber;
use limb_common::chunk::{CHUNK_BYTES, CHUNK_BYTES_U64, ChunkId, Position, chunk_count, chunk_len};
use limb_common::manifest::Inode;

use super::budget::{Budget, Charge};
use super::chunk::{ChunkKey, PublishedChunk, SealedChunk};

#[derive(Debug)]
pub(crate) enum Slot {
    Lower(ChunkId),
    Dirty { bytes: Vec<u8>, charge: Charge },
    Sealed(Arc<SealedChunk>),
}

/// One life of the file at home: from the first change after a final publish to the next one.
#[derive(Debug)]
pub(crate) struct Upload {
    pub(crate) file: u64,
    generation: u64,
    /// Home may hold something else than zeros in chunks below this.
    touched: u64,
    /// Every write so far went to the end.
    pub(crate) append_only: bool,
    /// The last publish made the visible file grow.
    pub(crate) grown: bool,
}

/// A chunk that has to be in memory before an operation can be done.
#[derive(Clone, Debug)]
pub(crate) struct Missing {
    pub(crate) index: u64,
    pub(crate) from: MissingFrom,
}

#[derive(Clone, Debug)]
pub(crate) enum MissingFrom {
    Lower { inode: Inode, id: ChunkId },
    Home(Arc<SealedChunk>),
}

/// Part of a read's answer.
#[derive(Debug)]
pub(crate) enum Piece {
    Zeros(usize),
    Bytes(Bytes),
    Missing { missing: Missing, start: usize, len: usize },
}

#[derive(Debug)]
pub(crate) struct Content {
    pub(crate) size: u64,
    slots: BTreeMap<u64, Slot>,
    /// Fetched for an operation that is about to be tried again.
    loaded: BTreeMap<u64, Bytes>,
    pub(crate) upload: Option<Upload>,
    /// The last finished life, whose bytes the next one starts from.
    pub(crate) finished: Option<u64>,
    pub(crate) lower: Option<Inode>,
    last_index: u64,
}

/// What a new life at home starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    Nothing,
    File(u64),
    Lower(Inode),
}

impl Content {
    pub(crate) fn empty() -> Self {
        Self {
            size: 0,
            slots: BTreeMap::new(),
            loaded: BTreeMap::new(),
            upload: None,
            finished: None,
            lower: None,
            last_index: 0,
        }
    }

    pub(crate) fn of_lower(inode: Inode, size: u64, chunks: impl Iterator<Item = (u64, ChunkId)>) -> Self {
        let slots = chunks.map(|(index, id)| (index, Slot::Lower(id))).collect();
        Self { size, slots, lower: Some(inode), ..Self::empty() }
    }

    /// Begins a life at home, if none is going on. Returns what it starts from.
    pub(crate) fn begin(&mut self, file: u64, fresh: bool) -> Base {
        let base = match (fresh, self.finished, self.lower) {
            (true, ..) | (false, None, None) => Base::Nothing,
            (false, Some(file), _) => Base::File(file),
            (false, None, Some(inode)) => Base::Lower(inode),
        };
        let touched = if base == Base::Nothing { 0 } else { chunk_count(self.size) };
        self.upload = Some(Upload { file, generation: 0, touched, append_only: true, grown: false });
        base
    }

    pub(crate) fn finish(&mut self) {
        self.finished = self.upload.take().map(|upload| upload.file);
    }

    pub(crate) fn is_dirty(&self) -> bool {
        self.slots.values().any(|slot| matches!(slot, Slot::Dirty { .. }))
    }

    /// Blocks of 512 bytes; holes take none.
    pub(crate) fn blocks(&self) -> u64 {
        let held = self.slots.keys().map(|index| u64::from(chunk_len(self.size, *index))).sum::<u64>();
        held.div_ceil(512)
    }

    fn missing(&self, index: u64) -> Option<Missing> {
        if self.loaded.contains_key(&index) {
            return None;
        }
        let from = match self.slots.get(&index)? {
            Slot::Dirty { .. } => return None,
            Slot::Lower(id) => MissingFrom::Lower { inode: self.lower?, id: *id },
            Slot::Sealed(chunk) if chunk.bytes().is_none() => MissingFrom::Home(Arc::clone(chunk)),
            Slot::Sealed(_) => return None,
        };
        Some(Missing { index, from })
    }

    /// As [`Self::missing`]; what is in memory stays there until it is used. The link forgets
    /// acknowledged bytes at any moment, also between this and the write.
    fn hold(&mut self, index: u64) -> Option<Missing> {
        if let Some(Slot::Sealed(chunk)) = self.slots.get(&index)
            && let Some(bytes) = chunk.bytes()
        {
            self.loaded.insert(index, bytes);
        }
        self.missing(index)
    }

    /// Chunks whose name would not fit any more if the file had this size.
    fn misfits(&self, size: u64) -> impl Iterator<Item = u64> + use<> {
        let last = |size: u64| chunk_count(size).saturating_sub(1);
        let mut at = vec![0, last(self.size), last(size)];
        at.dedup();
        at.retain(|index| {
            let len = chunk_len(size, *index);
            len > 0
                && match self.slots.get(index) {
                    None | Some(Slot::Dirty { .. }) => false,
                    Some(Slot::Lower(id)) => id.len != len || id.position != Position::of(size, *index),
                    Some(Slot::Sealed(chunk)) => chunk.len != len,
                }
        });
        at.into_iter()
    }

    pub(crate) fn missing_for_resize(&mut self, size: u64) -> Vec<Missing> {
        self.misfits(size).filter_map(|index| self.hold(index)).collect()
    }

    pub(crate) fn missing_for_write(&mut self, offset: u64, len: usize) -> Vec<Missing> {
        let end = offset + len as u64;
        let mut wanted: Vec<u64> = self.misfits(self.size.max(end)).collect();
        for index in touched_chunks(offset, end) {
            let start = index * CHUNK_BYTES_U64;
            let old_end = start + u64::from(chunk_len(self.size, index));
            if offset > start || end < old_end {
                wanted.push(index);
            }
        }
        wanted.sort_unstable();
        wanted.dedup();
        // What the write covers whole needs no old bytes, misfit or not.
        wanted.retain(|index| {
            let start = index * CHUNK_BYTES_U64;
            !(offset <= start && end >= start + u64::from(chunk_len(self.size.max(end), *index)))
        });
        wanted.into_iter().filter_map(|index| self.hold(index)).collect()
    }

    /// Keeps what is in memory there for as long as the file is. What only home has is missing:
    /// it will not keep it once the file has lost its name there.
    pub(crate) fn pin(&mut self) -> Vec<Missing> {
        let sealed = self.slots.iter().filter(|(_, slot)| matches!(slot, Slot::Sealed(_)));
        let sealed: Vec<u64> = sealed.map(|(index, _)| *index).collect();
        sealed.into_iter().filter_map(|index| self.hold(index)).collect()
    }

    /// Whether the slot is still the one that lacked its bytes.
    pub(crate) fn lacks(&self, missing: &Missing) -> bool {
        match (self.slots.get(&missing.index), &missing.from) {
            (Some(Slot::Lower(now)), MissingFrom::Lower { id, .. }) => now == id,
            (Some(Slot::Sealed(now)), MissingFrom::Home(chunk)) => Arc::ptr_eq(now, chunk),
            _ => false,
        }
    }

    /// Takes fetched bytes, if the slot is still the one that they were fetched for.
    pub(crate) fn install(&mut self, missing: &Missing, bytes: Bytes) {
        if self.lacks(missing) {
            self.loaded.insert(missing.index, bytes);
        }
    }

    /// Makes a chunk writable. Its bytes are held: the caller has loaded what was missing, or
    /// overwrites all of it.
    fn dirty(&mut self, index: u64, budget: &Arc<Budget>) -> (&mut Vec<u8>, &mut Charge) {
        let loaded = self.loaded.remove(&index);
        let limit = chunk_len(self.size, index) as usize;
        let slot = self.slots.entry(index).or_insert_with(|| new_dirty(Vec::new(), budget));
        let old = match slot {
            Slot::Dirty { .. } => None,
            Slot::Lower(_) => Some(loaded.unwrap_or_default()),
            Slot::Sealed(chunk) => Some(loaded.or_else(|| chunk.bytes()).unwrap_or_default()),
        };
        if let Some(old) = old {
            let mut bytes = old.to_vec();
            bytes.truncate(limit);
            *slot = new_dirty(bytes, budget);
        }
        match slot {
            Slot::Dirty { bytes, charge } => (bytes, charge),
            Slot::Lower(_) | Slot::Sealed(_) => unreachable!("it was just made dirty"),
        }
    }

    /// Changes the size. [`Self::missing_for_resize`] said that nothing is missing, and a life at
    /// home has begun.
    pub(crate) fn resize(&mut self, size: u64, budget: &Arc<Budget>) {
        let misfits: Vec<u64> = self.misfits(size).collect();
        let old_count = chunk_count(self.size);
        let kept = chunk_count(size);
        if kept < old_count {
            drop(self.slots.split_off(&kept));
            drop(self.loaded.split_off(&kept));
        }
        if size < self.size
            && let Some(upload) = &mut self.upload
        {
            upload.append_only = false;
        }
        for index in misfits {
            self.dirty(index, budget);
        }
        if size < self.size && kept > 0 {
            let limit = chunk_len(size, kept - 1) as usize;
            if let Some(Slot::Dirty { bytes, charge }) = self.slots.get_mut(&(kept - 1)) {
                bytes.truncate(limit);
                charge.set(bytes.len());
            }
        }
        // Home may still hold old bytes where we now have zeros: those zeros must be said.
        let touched = self.upload.as_ref().map_or(0, |upload| upload.touched);
        for index in old_count..kept.min(touched) {
            self.slots.entry(index).or_insert_with(|| new_dirty(Vec::new(), budget));
        }
        self.size = size;
    }

    /// Writes. As for [`Self::resize`], nothing is missing. Returns chunks that the writer has
    /// now left.
    pub(crate) fn write(&mut self, offset: u64, data: &[u8], budget: &Arc<Budget>) -> Vec<u64> {
        let end = offset + data.len() as u64;
        if offset != self.size
            && let Some(upload) = &mut self.upload
        {
            upload.append_only = false;
        }
        if end > self.size {
            self.resize(end, budget);
        }
        let mut passed = Vec::new();
        for index in touched_chunks(offset, end) {
            let start = index * CHUNK_BYTES_U64;
            let from = usize_of(offset.max(start) - start);
            let source = usize_of((start + from as u64) - offset);
            let count = (CHUNK_BYTES - from).min(data.len() - source);
            let (bytes, charge) = self.dirty(index, budget);
            if bytes.len() < from + count {
                if bytes.capacity() < from + count && from + count > 64 * 1024 {
                    bytes.reserve_exact(CHUNK_BYTES - bytes.len());
                }
                bytes.resize(from + count, 0);
            }
            bytes[from..from + count].copy_from_slice(&data[source..source + count]);
            charge.set(bytes.len());
            if from + count == CHUNK_BYTES {
                passed.push(index);
            }
            self.last_index = index;
        }
        passed
    }

    /// Seals one dirty chunk.
    pub(crate) fn seal(&mut self, output: OutputNumber, index: u64) -> Option<Arc<SealedChunk>> {
        let upload = self.upload.as_mut()?;
        let slot = self.slots.get_mut(&index)?;
        let Slot::Dirty { bytes, charge } = slot else { return None };
        let mut bytes = std::mem::take(bytes);
        bytes.resize(chunk_len(self.size, index) as usize, 0);
        charge.set(bytes.len());
        upload.generation += 1;
        upload.touched = upload.touched.max(index + 1);
        let key = ChunkKey { output, file: upload.file, index, generation: upload.generation };
        let budget_moves = std::mem::replace(slot, Slot::Lower(EMPTY));
        let Slot::Dirty { charge, .. } = budget_moves else { return None };
        let chunk = Arc::new(SealedChunk::new(key, bytes, Some(charge)));
        *slot = Slot::Sealed(Arc::clone(&chunk));
        Some(chunk)
    }

    pub(crate) fn dirty_indexes(&self) -> Vec<u64> {
        let dirty = self.slots.iter().filter(|(_, slot)| matches!(slot, Slot::Dirty { .. }));
        dirty.map(|(index, _)| *index).collect()
    }

    /// What a publish takes; every dirty chunk was sealed before.
    pub(crate) fn published(&self) -> Vec<(u64, PublishedChunk)> {
        let named = self.slots.iter().filter_map(|(index, slot)| match slot {
            Slot::Lower(id) => Some((*index, PublishedChunk::Lower(*id))),
            Slot::Sealed(chunk) => Some((*index, PublishedChunk::Sealed(Arc::clone(chunk)))),
            Slot::Dirty { .. } => None,
        });
        named.collect()
    }

    pub(crate) fn read(&self, offset: u64, len: usize) -> Vec<Piece> {
        let end = self.size.min(offset.saturating_add(len as u64));
        let mut pieces = Vec::new();
        for index in touched_chunks(offset, end) {
            let start = index * CHUNK_BYTES_U64;
            let from = usize_of(offset.max(start) - start);
            let to = usize_of(end.min(start + CHUNK_BYTES_U64) - start);
            let held = match self.slots.get(&index) {
                None => Some(Bytes::new()),
                Some(Slot::Dirty { bytes, .. }) => {
                    let stop = to.min(bytes.len());
                    let part = bytes.get(from..stop).unwrap_or_default();
                    pieces.push(Piece::Bytes(Bytes::copy_from_slice(part)));
                    pieces.push(Piece::Zeros(to - from - part.len()));
                    continue;
                }
                Some(Slot::Sealed(chunk)) => chunk.bytes().or_else(|| self.loaded.get(&index).cloned()),
                Some(Slot::Lower(_)) => self.loaded.get(&index).cloned(),
            };
            match (held, self.missing(index)) {
                (Some(bytes), _) => {
                    let part = bytes.slice(from.min(bytes.len())..to.min(bytes.len()));
                    let rest = to - from - part.len();
                    pieces.push(Piece::Bytes(part));
                    pieces.push(Piece::Zeros(rest));
                }
                (None, Some(missing)) => pieces.push(Piece::Missing { missing, start: from, len: to - from }),
                (None, None) => pieces.push(Piece::Zeros(to - from)),
            }
        }
        pieces
    }
}

const EMPTY: ChunkId = ChunkId { hash: limb_common::id::Digest([0; 32]), position: Position::Whole, len: 0 };

fn new_dirty(bytes: Vec<u8>, budget: &Arc<Budget>) -> Slot {
    let mut charge = budget.charge();
    charge.set(bytes.len());
    Slot::Dirty { bytes, charge }
}

fn touched_chunks(offset: u64, end: u64) -> std::ops::Range<u64> {
    if end <= offset { 0..0 } else { offset / CHUNK_BYTES_U64..chunk_count(end) }
}

/// Offsets inside a chunk or a request: always small.
fn usize_of(value: u64) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OUTPUT: OutputNumber = OutputNumber(0);

    /// A content whose one chunk is at home and still in memory.
    fn published(bytes: &[u8], budget: &Arc<Budget>) -> (Content, Arc<SealedChunk>) {
        let mut content = Content::empty();
        content.begin(1, false);
        content.write(0, bytes, budget);
        let chunk = content.seal(OUTPUT, 0).expect("it is dirty");
        assert!(chunk.subtree_value().is_some());
        chunk.settle(true);
        content.finish();
        content.begin(2, false);
        (content, chunk)
    }

    fn all(content: &Content) -> Vec<u8> {
        let pieces = content.read(0, usize_of(content.size)).into_iter();
        let bytes = pieces.map(|piece| match piece {
            Piece::Zeros(len) => vec![0; len],
            Piece::Bytes(bytes) => bytes.to_vec(),
            Piece::Missing { .. } => panic!("it was just written"),
        });
        bytes.flatten().collect()
    }

    /// The link acknowledges, and memory is short, between the look and the write: the old bytes
    /// were taken for zeros, and home got those.
    #[test]
    fn bytes_that_were_there_at_the_look_are_there_at_the_write() {
        let budget = Budget::new(1 << 30);
        let (mut content, chunk) = published(b"old bytes", &budget);
        assert!(content.missing_for_write(4, 1).is_empty());
        chunk.forget_bytes();
        content.write(4, b"B", &budget);
        assert_eq!(all(&content), b"old Bytes");

        let (mut content, chunk) = published(b"old bytes", &budget);
        assert!(content.missing_for_write(CHUNK_BYTES_U64, 1).is_empty(), "a chunk that grows");
        chunk.forget_bytes();
        content.write(CHUNK_BYTES_U64, b"B", &budget);
        assert_eq!(&all(&content)[..9], b"old bytes");

        let (mut content, chunk) = published(b"old bytes", &budget);
        assert!(content.missing_for_resize(3).is_empty());
        chunk.forget_bytes();
        content.resize(3, &budget);
        assert_eq!(all(&content), b"old");
    }
}
