//! How often chunks were used of late, also of chunks that are not here: a count-min sketch of
//! small counters that are halved now and then (as TinyLFU has it). It may count too much, for a
//! few; that costs an eviction.

use limb_common::chunk::ChunkId;

const ROWS: usize = 4;
/// A chunk that was used more often is as good as this.
const MOST: u8 = 4;
/// Counters in a row for each chunk that the cache can hold.
const WIDTH_PER_CHUNK: usize = 16;
/// Uses for each chunk that the cache can hold, after which everything counts half. A scan of so
/// many chunks meets another's counters in all four rows once in 400 times.
const AGEING_PER_CHUNK: u64 = 4;

#[derive(Debug)]
pub(super) struct Uses {
    rows: [Box<[u8]>; ROWS],
    mask: u64,
    since_ageing: u64,
    ageing_after: u64,
}

impl Uses {
    pub(super) fn new(chunks: usize) -> Self {
        let width = chunks.max(16).saturating_mul(WIDTH_PER_CHUNK).next_power_of_two();
        Self {
            rows: std::array::from_fn(|_| vec![0; width].into()),
            mask: width as u64 - 1,
            since_ageing: 0,
            ageing_after: AGEING_PER_CHUNK * chunks.max(16) as u64,
        }
    }

    pub(super) fn of(&self, id: &ChunkId) -> u8 {
        let places = self.places(id);
        self.rows.iter().zip(places).map(|(row, place)| row[place]).min().unwrap_or(0)
    }

    pub(super) fn note(&mut self, id: &ChunkId) {
        let (now, places) = (self.of(id), self.places(id));
        for (row, place) in self.rows.iter_mut().zip(places) {
            // Only the least are raised: others count somebody else.
            if row[place] == now && now < MOST {
                row[place] += 1;
            }
        }
        self.since_ageing += 1;
        if self.since_ageing >= self.ageing_after {
            self.since_ageing = 0;
            self.rows.iter_mut().flat_map(|row| row.iter_mut()).for_each(|counter| *counter /= 2);
        }
    }

    /// A hash is as random as anything made of it.
    fn places(&self, id: &ChunkId) -> [usize; ROWS] {
        std::array::from_fn(|row| {
            let bytes: [u8; 8] = id.hash.0[8 * row..8 * row + 8].try_into().unwrap_or_default();
            usize::try_from(u64::from_le_bytes(bytes) & self.mask).unwrap_or(0)
        })
    }
}
