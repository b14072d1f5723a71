//! What is cached, on its way and waiting: pure bookkeeping, under the fetcher's one lock.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use limb_common::assignment::SetNumber;
use limb_common::chunk::{ChunkId, VerifiedChunk, VerifiedSlice};
use limb_common::manifest::Inode;
use tokio::sync::{oneshot, watch};

use super::{FetchStats, FetcherLimits, MAX_WAITING, PARTS_SHARE};
use crate::fetch::cache::ChunkCache;
use crate::fetch::parts::Parts;
use crate::fetch::{ChunkAddress, FetchError, Priority};

type Waiter = oneshot::Sender<Result<VerifiedChunk, FetchError>>;

pub(super) struct State {
    pub(super) cache: ChunkCache,
    pub(super) parts: Parts,
    pub(super) flights: HashMap<ChunkId, Flight>,
    pub(super) loads: HashMap<LoadNumber, Load>,
    next_load: u64,
    /// Not started yet, by priority. An entry whose load has started, risen or gone is skipped.
    waiting: [VecDeque<LoadNumber>; 4],
    started: u64,
    pub(super) in_flight_bytes: u64,
    pub(super) stats: FetchStats,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct LoadNumber(u64);

/// A chunk that is wanted.
pub(super) struct Flight {
    address: ChunkAddress,
    load: LoadNumber,
    waiters: Vec<Waiter>,
}

/// What travels together.
pub(super) struct Load {
    /// A chunk of a load that has not started may leave it for a load of its own.
    chunks: Vec<ChunkId>,
    bytes: u64,
    /// Where all of it lies, for a pack.
    set: Option<SetNumber>,
    priority: watch::Sender<Priority>,
    started: bool,
}

/// A load that was admitted and must be spawned.
pub(super) struct Start {
    pub(super) load: LoadNumber,
    pub(super) set: Option<SetNumber>,
    pub(super) chunks: Vec<(ChunkId, ChunkAddress)>,
    pub(super) priority: watch::Receiver<Priority>,
}

impl State {
    pub(super) fn new(limits: &FetcherLimits) -> Self {
        Self {
            cache: ChunkCache::new(limits.cache_bytes - limits.cache_bytes / PARTS_SHARE),
            parts: Parts::new(limits.cache_bytes / PARTS_SHARE),
            flights: HashMap::new(),
            loads: HashMap::new(),
            next_load: 0,
            waiting: Default::default(),
            started: 0,
            in_flight_bytes: 0,
            stats: FetchStats::default(),
        }
    }

    pub(super) fn slice(&mut self, id: &ChunkId, range: Range<usize>) -> Option<VerifiedSlice> {
        match self.cache.get(id) {
            Some(chunk) => chunk.slice(range),
            None => self.parts.get(id, &range),
        }
    }

    pub(super) fn is_full(&self) -> bool {
        self.waiting.iter().map(VecDeque::len).sum::<usize>() >= MAX_WAITING
    }

    pub(super) fn ask(
        &mut self,
        address: ChunkAddress,
        id: ChunkId,
        priority: Priority,
        waiter: Option<Waiter>,
        limits: &FetcherLimits,
    ) -> Option<Start> {
        let known = self.flights.get(&id).map(|flight| flight.load);
        let (number, new) = match known {
            Some(number) if priority == Priority::Demand && self.leaves_its_load(id, number) => {
                (self.add_load(vec![id], u64::from(id.len), None, priority), true)
            }
            Some(number) => (number, false),
            None => (self.add_load(vec![id], u64::from(id.len), None, priority), true),
        };
        let flight =
            self.flights.entry(id).or_insert_with(|| Flight { address, load: number, waiters: Vec::new() });
        flight.load = number;
        flight.waiters.extend(waiter);
        self.wish(number, priority, new, limits)
    }

    /// A reader must not wait for a pack that has not even begun.
    fn leaves_its_load(&mut self, id: ChunkId, number: LoadNumber) -> bool {
        let Some(load) = self.loads.get_mut(&number).filter(|load| !load.started) else { return false };
        if load.chunks.len() < 2 {
            return false;
        }
        load.chunks.retain(|other| *other != id);
        load.bytes -= u64::from(id.len);
        true
    }

    pub(super) fn ask_pack(
        &mut self,
        set: SetNumber,
        files: &[(Inode, ChunkId)],
        priority: Priority,
        limits: &FetcherLimits,
    ) -> Option<Start> {
        let number = LoadNumber(self.next_load);
        let mut chunks = Vec::new();
        for &(inode, id) in files {
            if self.cache.contains(&id) || self.flights.contains_key(&id) {
                continue;
            }
            let address = ChunkAddress::Set { set, inode, index: 0 };
            self.flights.insert(id, Flight { address, load: number, waiters: Vec::new() });
            chunks.push(id);
        }
        if chunks.is_empty() {
            return None;
        }
        let bytes = chunks.iter().map(|id| u64::from(id.len)).sum();
        let number = self.add_load(chunks, bytes, Some(set), priority);
        self.wish(number, priority, true, limits)
    }

    fn add_load(
        &mut self,
        chunks: Vec<ChunkId>,
        bytes: u64,
        set: Option<SetNumber>,
        priority: Priority,
    ) -> LoadNumber {
        let number = LoadNumber(self.next_load);
        self.next_load += 1;
        let priority = watch::Sender::new(priority);
        self.loads.insert(number, Load { chunks, bytes, set, priority, started: false });
        number
    }

    /// Somebody wants this load with this urgency; a new one is to be queued or started.
    fn wish(
        &mut self,
        number: LoadNumber,
        priority: Priority,
        new: bool,
        limits: &FetcherLimits,
    ) -> Option<Start> {
        let load = self.loads.get(&number)?;
        let risen = priority < *load.priority.borrow();
        if risen {
            load.priority.send_replace(priority);
        }
        if load.started {
            return None;
        }
        if priority == Priority::Demand || self.in_flight_bytes + load.bytes <= limits.in_flight_bytes {
            return self.admit(number);
        }
        if risen || new {
            self.waiting[queue_of(priority)].push_back(number);
        }
        None
    }

    fn admit(&mut self, number: LoadNumber) -> Option<Start> {
        let load = self.loads.get_mut(&number).filter(|load| !load.started)?;
        load.started = true;
        let chunks: Vec<_> =
            load.chunks.iter().filter_map(|id| Some((*id, self.flights.get(id)?.address))).collect();
        self.started += chunks.len() as u64;
        self.in_flight_bytes += load.bytes;
        self.stats.most_in_flight_chunks = self.stats.most_in_flight_chunks.max(self.started);
        let priority = load.priority.subscribe();
        Some(Start { load: number, set: load.set, chunks, priority })
    }

    /// The most urgent that waits, if there is room.
    pub(super) fn admit_next(&mut self, limits: &FetcherLimits) -> Option<Start> {
        for level in 0..self.waiting.len() {
            while let Some(&number) = self.waiting[level].front() {
                let valid = self
                    .loads
                    .get(&number)
                    .filter(|load| !load.started && queue_of(*load.priority.borrow()) == level)
                    .map(|load| load.bytes);
                if valid.is_some_and(|bytes| self.in_flight_bytes + bytes > limits.in_flight_bytes) {
                    return None;
                }
                self.waiting[level].pop_front();
                if valid.is_some() {
                    return self.admit(number);
                }
            }
        }
        None
    }

    /// A chunk has come, or will not: who waits for it.
    pub(super) fn land(&mut self, id: ChunkId, outcome: &Result<VerifiedChunk, FetchError>) -> Vec<Waiter> {
        if let Ok(chunk) = outcome {
            self.stats.fetched_chunks += 1;
            self.stats.fetched_bytes += u64::from(id.len);
            self.cache.insert(chunk.clone());
        }
        self.started -= 1;
        self.in_flight_bytes -= u64::from(id.len);
        self.flights.remove(&id).map(|flight| flight.waiters).unwrap_or_default()
    }
}

fn queue_of(priority: Priority) -> usize {
    match priority {
        Priority::Demand => 0,
        Priority::ReadAhead => 1,
        Priority::Trace => 2,
        Priority::Background => 3,
    }
}
