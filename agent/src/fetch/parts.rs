//! Verified parts of chunks: a bounded memory of them, and those on their way.
//!
//! First in, first out: who reads at random comes back to a part as often as chance has it, and
//! the kernel's page cache is before this one.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use limb_common::chunk::{ChunkId, VerifiedPart, VerifiedSlice};
use tokio::sync::oneshot;

use super::FetchError;

/// Memory that a part costs besides its bytes.
const OVERHEAD_BYTES: u64 = 256;

/// A run of groups of a chunk.
pub(super) type PartKey = (ChunkId, Range<usize>);
pub(super) type PartWaiter = oneshot::Sender<Result<VerifiedPart, FetchError>>;

#[derive(Debug)]
pub(super) struct Parts {
    budget_bytes: u64,
    bytes: u64,
    oldest_first: VecDeque<ChunkId>,
    by_chunk: HashMap<ChunkId, VecDeque<VerifiedPart>>,
    coming: HashMap<PartKey, Vec<PartWaiter>>,
}

impl Parts {
    pub(super) fn new(budget_bytes: u64) -> Self {
        Self {
            budget_bytes,
            bytes: 0,
            oldest_first: VecDeque::new(),
            by_chunk: HashMap::new(),
            coming: HashMap::new(),
        }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn get(&self, id: &ChunkId, range: &Range<usize>) -> Option<VerifiedSlice> {
        self.by_chunk.get(id)?.iter().find_map(|part| part.slice(range.clone()))
    }

    /// One more waits for it; whether it must be asked for.
    pub(super) fn wait(&mut self, key: PartKey, waiter: PartWaiter) -> bool {
        let waiters = self.coming.entry(key).or_default();
        waiters.push(waiter);
        waiters.len() == 1
    }

    /// It has come, or will not: who waits for it.
    pub(super) fn land(
        &mut self,
        key: &PartKey,
        outcome: &Result<VerifiedPart, FetchError>,
    ) -> Vec<PartWaiter> {
        if let Ok(part) = outcome {
            self.insert(part.clone());
        }
        self.coming.remove(key).unwrap_or_default()
    }

    fn insert(&mut self, part: VerifiedPart) {
        self.bytes += cost(&part);
        self.oldest_first.push_back(part.id());
        self.by_chunk.entry(part.id()).or_default().push_back(part);
        while self.bytes > self.budget_bytes {
            let Some(oldest) = self.oldest_first.pop_front() else { return };
            let Some(parts) = self.by_chunk.get_mut(&oldest) else { continue };
            if let Some(part) = parts.pop_front() {
                self.bytes -= cost(&part);
            }
            if parts.is_empty() {
                self.by_chunk.remove(&oldest);
            }
        }
    }
}

fn cost(part: &VerifiedPart) -> u64 {
    part.len() as u64 + OVERHEAD_BYTES
}
