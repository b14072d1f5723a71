//! Which slot holds what: pure bookkeeping, under the spill's one lock.
//!
//! Who comes in when all is full: a chunk that was used clearly more often of late than the one
//! that the hand points at. So whoever reads more than fits, once or over and over, keeps what is
//! here already (turning it over would make every round a miss), and what is used again pushes out
//! what is not. What was read ahead and not used yet stays for some turns of the hand.

use std::collections::HashMap;

use limb_common::chunk::{CHUNK_BYTES_U64, ChunkId};
use ring::aead::Tag;

use super::file::BLOCK_BYTES;
use super::key::WriteNumber;
use super::uses::Uses;

/// Turns of the hand until nobody is expected to come for what was read ahead.
const PATIENT_TURNS: u8 = 3;
/// What is read ahead and not used yet will be: it is worth more than what was used once.
const UNREAD_BONUS: u8 = 3;

#[derive(Debug)]
pub(super) struct Index {
    budget_bytes: u64,
    max_slots: usize,
    held_bytes: u64,
    unread_bytes: u64,
    slots: Vec<Option<Entry>>,
    free: Vec<u32>,
    by_chunk: HashMap<ChunkId, u32>,
    hand: usize,
    uses: Uses,
}

#[derive(Debug)]
struct Entry {
    id: ChunkId,
    /// `None`: being written, and nobody's to read or to push out.
    written: Option<Written>,
    readers: u32,
    /// Turns of the hand that it is still kept for whoever will read it first.
    unread: u8,
    /// Somebody could not read it: it goes with its last reader.
    bad: bool,
}

#[derive(Clone, Copy)]
pub(super) struct Written {
    pub(super) number: WriteNumber,
    /// Of a chunk that was not sealed: none.
    pub(super) tag: Option<Tag>,
}

impl std::fmt::Debug for Written {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.number.fmt(f)
    }
}

/// A slot for a chunk, and what must be given back to the file system before it is written:
/// of each slot what lies beyond so many bytes.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Admitted {
    pub(super) slot: u32,
    pub(super) cuts: Vec<(u32, u64)>,
}

impl Index {
    pub(super) fn new(budget_bytes: u64, max_slots: u32) -> Self {
        // Some are smaller than a whole one.
        let chunks = usize::try_from(4 * (budget_bytes / CHUNK_BYTES_U64)).unwrap_or(usize::MAX);
        let max_slots = usize::try_from(max_slots).unwrap_or(usize::MAX);
        Self {
            budget_bytes,
            max_slots,
            held_bytes: 0,
            unread_bytes: 0,
            slots: Vec::new(),
            free: Vec::new(),
            by_chunk: HashMap::new(),
            hand: 0,
            uses: Uses::new(chunks.min(max_slots)),
        }
    }

    /// On the disk, of the budget.
    pub(super) fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    /// What is not used yet stays up to here.
    pub(super) fn unread_room_bytes(&self) -> u64 {
        self.budget_bytes - (self.held_bytes - self.unread_bytes).min(self.budget_bytes)
    }

    pub(super) fn note_use(&mut self, id: &ChunkId) {
        self.uses.note(id);
    }

    /// Here, or being written.
    pub(super) fn contains(&self, id: &ChunkId) -> bool {
        self.by_chunk.contains_key(id)
    }

    /// A slot for a chunk that is not here; `None`: what is here is worth more.
    pub(super) fn admit(&mut self, id: ChunkId, used: bool) -> Option<Admitted> {
        let cost = cost(&id);
        if cost > self.budget_bytes || self.max_slots == 0 {
            return None;
        }
        let worth = self.uses.of(&id) + if used { 0 } else { UNREAD_BONUS };
        let (mut victims, mut freed_bytes, mut steps) = (Vec::new(), 0, self.slots.len());
        while self.held_bytes - freed_bytes + cost > self.budget_bytes
            || (victims.is_empty() && self.free.is_empty() && self.slots.len() == self.max_slots)
        {
            let (victim, victim_cost) = self.next_victim(worth, &mut steps)?;
            victims.push(victim);
            freed_bytes += victim_cost;
        }
        let mut cuts = Vec::new();
        for (order, &victim) in victims.iter().enumerate() {
            let freed = self.forget(victim);
            // The first one's slot is taken over.
            if order > 0 {
                self.free.push(victim);
                cuts.push((victim, 0));
            } else if freed > cost {
                cuts.push((victim, cost));
            }
        }
        let slot = victims.first().copied().or_else(|| self.free.pop()).unwrap_or_else(|| {
            self.slots.push(None);
            u32::try_from(self.slots.len() - 1).unwrap_or(u32::MAX)
        });
        let unread = if used { 0 } else { PATIENT_TURNS };
        self.held_bytes += cost;
        self.unread_bytes += if used { 0 } else { cost };
        self.by_chunk.insert(id, slot);
        self.slots[index(slot)] = Some(Entry { id, written: None, readers: 0, unread, bad: false });
        Some(Admitted { slot, cuts })
    }

    /// Whatever the hand comes to next, if it is worth less than the newcomer. Each newcomer that
    /// loses moves the hand on by what it lost to.
    fn next_victim(&mut self, worth: u8, steps: &mut usize) -> Option<(u32, u64)> {
        while *steps > 0 {
            *steps -= 1;
            let at = self.hand;
            self.hand = (at + 1) % self.slots.len();
            let Some(entry) = &mut self.slots[at] else { continue };
            if entry.written.is_none() || entry.readers > 0 {
                continue;
            }
            let cost = cost(&entry.id);
            if entry.unread > 0 {
                entry.unread -= 1;
                self.unread_bytes -= if entry.unread == 0 { cost } else { 0 };
                return None;
            }
            // More by one is chance: in a loop whoever comes was read one round more often than
            // who comes later.
            if worth <= self.uses.of(&entry.id) + 1 {
                return None;
            }
            return Some((u32::try_from(at).ok()?, cost));
        }
        None
    }

    pub(super) fn written(&mut self, slot: u32, written: Written) {
        if let Some(entry) = self.slots.get_mut(index(slot)).and_then(Option::as_mut) {
            entry.written = Some(written);
        }
    }

    /// Where to read it; nothing is written there until [`Self::end_read`].
    pub(super) fn begin_read(&mut self, id: &ChunkId) -> Option<Written> {
        let slot = *self.by_chunk.get(id)?;
        let entry = self.slots.get_mut(index(slot))?.as_mut()?;
        let written = entry.written?;
        entry.readers += 1;
        if std::mem::take(&mut entry.unread) > 0 {
            self.unread_bytes -= cost(id);
        }
        Some(written)
    }

    /// Whether the slot is to be cut and then given to [`Self::release`]: it was unreadable.
    pub(super) fn end_read(&mut self, slot: u32, good: bool) -> bool {
        let Some(entry) = self.slots.get_mut(index(slot)).and_then(Option::as_mut) else { return false };
        entry.readers -= 1;
        entry.bad |= !good;
        if !entry.bad {
            return false;
        }
        let (id, last) = (entry.id, entry.readers == 0);
        self.by_chunk.remove(&id);
        // Not the hand's any more.
        entry.written = None;
        last
    }

    pub(super) fn release(&mut self, slot: u32) {
        self.forget(slot);
        self.free.push(slot);
    }

    /// How many bytes it held.
    fn forget(&mut self, slot: u32) -> u64 {
        let Some(entry) = self.slots[index(slot)].take() else { return 0 };
        let cost = cost(&entry.id);
        self.held_bytes -= cost;
        self.unread_bytes -= if entry.unread > 0 { cost } else { 0 };
        if self.by_chunk.get(&entry.id) == Some(&slot) {
            self.by_chunk.remove(&entry.id);
        }
        cost
    }
}

/// What a chunk takes up.
fn cost(id: &ChunkId) -> u64 {
    u64::from(id.len).next_multiple_of(BLOCK_BYTES)
}

fn index(slot: u32) -> usize {
    usize::try_from(slot).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use limb_common::chunk::{CHUNK_BYTES, Position};

    use super::*;

    const CHUNKS: u64 = 64;

    fn id(number: u64) -> ChunkId {
        let named = ChunkId::of(Position::Whole, &number.to_le_bytes());
        ChunkId { len: u32::try_from(CHUNK_BYTES).unwrap(), ..named }
    }

    /// Reads a chunk as the fetcher does when memory is too small to matter; whether it was here.
    fn read(index: &mut Index, number: u64) -> bool {
        let id = id(number);
        index.note_use(&id);
        if let Some(written) = index.begin_read(&id) {
            assert!(!index.end_read(written.number.slot, true));
            return true;
        }
        if let Some(Admitted { slot, cuts }) = index.admit(id, true) {
            assert!(cuts.is_empty(), "chunks of one size take over whole slots");
            index.written(slot, Written { number: WriteNumber { slot, counter: 0 }, tag: None });
        }
        false
    }

    fn hits(index: &mut Index, numbers: impl Iterator<Item = u64>) -> u64 {
        numbers.map(|number| u64::from(read(index, number))).sum()
    }

    #[test]
    fn a_scan_of_any_length_pushes_out_nothing_that_is_used_again() {
        let mut index = Index::new(CHUNKS * CHUNK_BYTES_U64, 1000);
        let half = CHUNKS / 2;
        assert_eq!(hits(&mut index, 0..half), 0);
        assert_eq!(hits(&mut index, 0..half), half);
        for round in 1..5 {
            hits(&mut index, round * 100_000..round * 100_000 + 20 * CHUNKS);
            assert_eq!(hits(&mut index, 0..half), half, "round {round}");
        }
    }

    #[test]
    fn who_reads_three_times_what_fits_over_and_over_finds_a_third_of_it() {
        let mut index = Index::new(CHUNKS * CHUNK_BYTES_U64, 1000);
        hits(&mut index, 0..3 * CHUNKS);
        for epoch in 1..12 {
            let found = hits(&mut index, 0..3 * CHUNKS);
            // All but what the sketch mistakes for used more.
            assert!(found >= CHUNKS - CHUNKS / 8, "epoch {epoch}: {found} of {CHUNKS}");
        }
    }

    #[test]
    fn what_is_used_now_replaces_what_was_used_before() {
        let mut index = Index::new(CHUNKS * CHUNK_BYTES_U64, 1000);
        (0..10).for_each(|_| assert!(hits(&mut index, 0..CHUNKS) <= CHUNKS));
        (0..40).for_each(|_| assert!(hits(&mut index, 1000..1000 + CHUNKS) <= CHUNKS));
        assert!(hits(&mut index, 1000..1000 + CHUNKS) >= CHUNKS - CHUNKS / 8);
    }

    #[test]
    fn what_was_read_ahead_stays_for_its_reader() {
        let mut index = Index::new(CHUNKS * CHUNK_BYTES_U64, 1000);
        let half = CHUNKS / 2;
        for number in 0..half {
            let slot = index.admit(id(number), false).unwrap().slot;
            index.written(slot, Written { number: WriteNumber { slot, counter: 0 }, tag: None });
        }
        assert_eq!(index.unread_room_bytes(), CHUNKS * CHUNK_BYTES_U64);
        hits(&mut index, 1000..1000 + 2 * CHUNKS);
        assert_eq!(index.unread_room_bytes(), half * CHUNK_BYTES_U64);
        assert_eq!(hits(&mut index, 0..half), half);
        assert_eq!(index.unread_room_bytes(), 0);
    }

    #[test]
    fn nothing_is_written_where_somebody_reads() {
        let mut index = Index::new(2 * CHUNK_BYTES_U64, 1000);
        hits(&mut index, 0..2);
        let reading = [0, 1].map(|number| index.begin_read(&id(number)).unwrap().number.slot);
        (0..4).for_each(|_| index.note_use(&id(5)));
        assert_eq!(index.admit(id(5), true), None);
        assert!(!index.end_read(reading[1], true));
        assert_eq!(index.admit(id(5), true).unwrap().slot, reading[1]);
        // What is being written is nobody's to push out, and cannot be read.
        (0..4).for_each(|_| index.note_use(&id(6)));
        assert_eq!(index.admit(id(6), false), None);
        assert!(index.begin_read(&id(5)).is_none());
    }

    #[test]
    fn a_large_chunk_takes_the_place_of_small_ones_and_gives_back_what_it_does_not_use() {
        let mut index = Index::new(CHUNK_BYTES_U64, 1000);
        let small = |number| ChunkId { len: 5000, ..id(number) };
        for number in 0..128 {
            let Admitted { slot, cuts } = index.admit(small(number), true).unwrap();
            assert!(cuts.is_empty());
            index.written(slot, Written { number: WriteNumber { slot, counter: 0 }, tag: None });
        }
        assert_eq!(index.held_bytes(), CHUNK_BYTES_U64);
        assert_eq!(index.admit(id(999), true), None);
        (0..3).for_each(|_| index.note_use(&id(999)));
        let Admitted { slot, cuts } = index.admit(id(999), true).unwrap();
        // The one that lost to 0 has had its turn.
        assert_eq!((slot, cuts.len()), (1, 127));
        assert!(cuts.iter().all(|(cut, keep)| *cut != slot && *keep == 0));
        assert_eq!(index.held_bytes(), CHUNK_BYTES_U64);
        index.written(slot, Written { number: WriteNumber { slot, counter: 0 }, tag: None });
        let little = small(1000);
        (0..4).for_each(|_| index.note_use(&little));
        (0..8 * 64).for_each(|_| index.note_use(&id(1)));
        (0..4).for_each(|_| index.note_use(&little));
        assert_eq!(index.admit(little, true), Some(Admitted { slot, cuts: vec![(slot, 8192)] }));
        assert_eq!(index.held_bytes(), 8192);
    }
}
