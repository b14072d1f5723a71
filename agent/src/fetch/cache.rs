//! Verified chunks in memory, under a budget of bytes: two queues (2Q).
//!
//! What is new waits in a first-in-first-out queue, where hits do not count: the eight requests
//! that read one chunk are one use. Only what is asked for again after it fell out of that queue
//! enters the main queue, so one pass over a large file pushes out nothing that is used again.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use limb_common::chunk::{ChunkId, VerifiedChunk};

/// Memory that an entry costs besides its bytes, so that a million tiny files are counted too.
const ENTRY_OVERHEAD_BYTES: u64 = 256;
/// Names remembered of what fell out of the first queue (72 bytes each).
const MAX_GHOSTS: usize = 8192;
/// The first queue holds what was read ahead and not used yet, so it must not be too small.
const MIN_NEWCOMER_BYTES: u64 = 64 << 20;

#[derive(Debug)]
pub(super) struct ChunkCache {
    budget_bytes: u64,
    newcomer_budget_bytes: u64,
    entries: HashMap<ChunkId, Entry>,
    newcomers: VecDeque<ChunkId>,
    newcomer_bytes: u64,
    /// By time of last use.
    main: BTreeMap<u64, ChunkId>,
    main_bytes: u64,
    /// Read ahead, and nobody asked for it yet.
    unused_bytes: u64,
    ghosts: VecDeque<ChunkId>,
    ghost_names: HashSet<ChunkId>,
    tick: u64,
}

#[derive(Debug)]
struct Entry {
    chunk: VerifiedChunk,
    place: Place,
    /// Somebody asked for it since it came.
    used: bool,
}

/// What had to go.
#[derive(Debug)]
pub(super) struct Evicted {
    pub(super) chunk: VerifiedChunk,
    /// If not, it was read ahead and somebody may still come for it.
    pub(super) used: bool,
}

#[derive(Clone, Copy, Debug)]
enum Place {
    Newcomer,
    Main { used_at: u64 },
}

impl ChunkCache {
    pub(super) fn new(budget_bytes: u64) -> Self {
        Self {
            budget_bytes,
            newcomer_budget_bytes: (budget_bytes / 4).max(MIN_NEWCOMER_BYTES.min(budget_bytes / 2)),
            entries: HashMap::new(),
            newcomers: VecDeque::new(),
            newcomer_bytes: 0,
            main: BTreeMap::new(),
            main_bytes: 0,
            unused_bytes: 0,
            ghosts: VecDeque::new(),
            ghost_names: HashSet::new(),
            tick: 0,
        }
    }

    pub(super) fn contains(&self, id: &ChunkId) -> bool {
        self.entries.contains_key(id)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.newcomer_bytes + self.main_bytes
    }

    pub(super) fn unused_bytes(&self) -> u64 {
        self.unused_bytes
    }

    /// What came last stays up to here, used or not.
    pub(super) fn newcomer_room_bytes(&self) -> u64 {
        self.newcomer_budget_bytes.max(self.budget_bytes - self.main_bytes.min(self.budget_bytes))
    }

    pub(super) fn get(&mut self, id: &ChunkId) -> Option<VerifiedChunk> {
        let entry = self.entries.get_mut(id)?;
        if !std::mem::replace(&mut entry.used, true) {
            self.unused_bytes -= cost(&entry.chunk);
        }
        if let Place::Main { used_at } = &mut entry.place {
            self.tick += 1;
            self.main.remove(used_at);
            *used_at = self.tick;
            self.main.insert(self.tick, *id);
        }
        Some(entry.chunk.clone())
    }

    /// What had to go for it.
    pub(super) fn insert(&mut self, chunk: VerifiedChunk, used: bool) -> Vec<Evicted> {
        let (id, cost) = (chunk.id(), cost(&chunk));
        if self.entries.contains_key(&id) {
            return Vec::new();
        }
        if cost > self.budget_bytes {
            return vec![Evicted { chunk, used }];
        }
        let place = if self.ghost_names.remove(&id) {
            self.tick += 1;
            self.main.insert(self.tick, id);
            self.main_bytes += cost;
            Place::Main { used_at: self.tick }
        } else {
            self.newcomers.push_back(id);
            self.newcomer_bytes += cost;
            Place::Newcomer
        };
        self.unused_bytes += if used { 0 } else { cost };
        self.entries.insert(id, Entry { chunk, place, used });
        let mut evicted = Vec::new();
        while self.bytes() > self.budget_bytes && self.evict_one(&mut evicted) {}
        evicted
    }

    fn evict_one(&mut self, evicted: &mut Vec<Evicted>) -> bool {
        if (self.newcomer_bytes > self.newcomer_budget_bytes || self.main.is_empty())
            && let Some(id) = self.newcomers.pop_front()
        {
            self.newcomer_bytes -= self.remove(id, evicted);
            self.remember(id);
            return true;
        }
        let Some((_, id)) = self.main.pop_first() else { return false };
        self.main_bytes -= self.remove(id, evicted);
        true
    }

    /// What it cost.
    fn remove(&mut self, id: ChunkId, evicted: &mut Vec<Evicted>) -> u64 {
        let Some(Entry { chunk, used, .. }) = self.entries.remove(&id) else { return 0 };
        let cost = cost(&chunk);
        self.unused_bytes -= if used { 0 } else { cost };
        evicted.push(Evicted { chunk, used });
        cost
    }

    fn remember(&mut self, id: ChunkId) {
        if self.ghost_names.insert(id) {
            self.ghosts.push_back(id);
        }
        while self.ghosts.len() > MAX_GHOSTS {
            if let Some(oldest) = self.ghosts.pop_front() {
                self.ghost_names.remove(&oldest);
            }
        }
    }
}

fn cost(chunk: &VerifiedChunk) -> u64 {
    u64::from(chunk.id().len) + ENTRY_OVERHEAD_BYTES
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use limb_common::chunk::Position;
    use proptest::prelude::*;

    use super::*;

    fn chunk(number: u64, len: usize) -> VerifiedChunk {
        let mut bytes = vec![0; len.max(8)];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        let bytes = Bytes::from(bytes);
        ChunkId::of(Position::Whole, &bytes).verify(bytes).unwrap()
    }

    #[test]
    fn a_scan_pushes_out_nothing_that_is_used_again() {
        let mut cache = ChunkCache::new(100_000);
        let hot: Vec<_> = (0..20).map(|number| chunk(number, 1000)).collect();
        // Seen, fallen out, asked for again: now in the main queue.
        for round in 0..2 {
            hot.iter().for_each(|one| drop(cache.insert(one.clone(), true)));
            (0..100).for_each(|number| drop(cache.insert(chunk(1000 + round * 1000 + number, 1000), true)));
        }
        (0..10_000).for_each(|number| drop(cache.insert(chunk(100_000 + number, 1000), true)));
        assert!(hot.iter().all(|one| cache.contains(&one.id())));
    }

    proptest! {
        #[test]
        fn bytes_add_up_and_stay_within_the_budget(
            steps in proptest::collection::vec((0_u64..60, 8_usize..5000, any::<bool>(), any::<bool>()), 1..400),
            budget in 1000_u64..60_000,
        ) {
            let mut cache = ChunkCache::new(budget);
            for (number, len, read, used) in steps {
                // Equal numbers have equal lengths, as equal ids have.
                let one = chunk(number, len % 97 * 50 + usize::try_from(number).unwrap());
                if read {
                    let found = cache.get(&one.id());
                    prop_assert!(found.is_none_or(|found| found == one));
                } else {
                    let before = cache.entries.len() + usize::from(!cache.contains(&one.id()));
                    let evicted = cache.insert(one, used);
                    // Whatever goes is handed out: the disk behind takes it.
                    prop_assert_eq!(before, cache.entries.len() + evicted.len());
                    prop_assert!(evicted.iter().all(|gone| !cache.contains(&gone.chunk.id())));
                }
                let sum: u64 = cache.entries.values().map(|entry| cost(&entry.chunk)).sum();
                prop_assert_eq!(sum, cache.bytes());
                prop_assert!(sum <= budget);
                let unused = cache.entries.values().filter(|entry| !entry.used);
                prop_assert_eq!(unused.map(|entry| cost(&entry.chunk)).sum::<u64>(), cache.unused_bytes());
                prop_assert_eq!(cache.entries.len(), cache.main.len() + cache.newcomers.len());
                prop_assert!(cache.ghosts.len() <= MAX_GHOSTS);
            }
        }
    }
}
