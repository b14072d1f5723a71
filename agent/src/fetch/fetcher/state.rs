//! What is cached, on its way and waiting: pure bookkeeping, under the fetcher's one lock.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use limb_common::assignment::SetNumber;
use limb_common::chunk::{ChunkId, VerifiedChunk, VerifiedSlice};
use limb_common::manifest::Inode;
use tokio::sync::{oneshot, watch};

use super::{FetchStats, FetcherLimits, MAX_WAITING, PARTS_SHARE};
use crate::fetch::cache::ChunkCache;
use crate::fetch::parts::Parts;
use crate::fetch::spill::Spill;
use crate::fetch::{ChunkAddress, FetchError, Priority};

type Waiter = oneshot::Sender<Result<VerifiedChunk, FetchError>>;

pub(super) struct State {
    pub(super) cache: ChunkCache,
    pub(super) spill: Option<Arc<Spill>>,
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
    /// Somebody waits for it, not only who reads ahead.
    demanded: bool,
    waiters: Vec<Waiter>,
}

/// Where a chunk came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Origin {
    Home,
    Disk,
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
    pub(super) fn new(limits: &FetcherLimits, spill: Option<Arc<Spill>>) -> Self {
        let parts_bytes = limits.cache_bytes / PARTS_SHARE;
        let spill_bytes = spill.as_ref().map_or(0, |spill| spill.memory_bytes());
        Self {
            cache: ChunkCache::new((limits.cache_bytes - parts_bytes).saturating_sub(spill_bytes)),
            spill,
            parts: Parts::new(parts_bytes),
            flights: HashMap::new(),
            loads: HashMap::new(),
            next_load: 0,
            waiting: Default::default(),
            started: 0,
            in_flight_bytes: 0,
            stats: FetchStats::default(),
        }
    }

    /// From memory, for somebody who will use it.
    pub(super) fn get(&mut self, id: &ChunkId) -> Option<VerifiedChunk> {
        self.cache.get(id).or_else(|| self.spill.as_ref()?.queued(id))
    }

    pub(super) fn contains(&self, id: &ChunkId) -> bool {
        self.cache.contains(id) || self.spill.as_ref().is_some_and(|spill| spill.queued(id).is_some())
    }

    /// Can be had without home, though perhaps not at once.
    pub(super) fn on_disk(&self, id: &ChunkId) -> bool {
        self.spill.as_ref().is_some_and(|spill| spill.holds(id))
    }

    pub(super) fn room_ahead_bytes(&self) -> u64 {
        let spill_bytes = self.spill.as_ref().map_or(0, |spill| spill.room_ahead_bytes());
        self.cache.newcomer_room_bytes() + spill_bytes
    }

    pub(super) fn slice(&mut self, id: &ChunkId, range: Range<usize>) -> Option<VerifiedSlice> {
        match self.get(id) {
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
        let flight = self.flights.entry(id).or_insert_with(|| Flight::new(address, number));
        flight.load = number;
        flight.demanded |= priority == Priority::Demand;
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
            if self.contains(&id) || self.flights.contains_key(&id) || self.on_disk(&id) {
                continue;
            }
            let address = ChunkAddress::Set { set, inode, index: 0 };
            self.flights.insert(id, Flight::new(address, number));
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
        if priority == Priority::Demand {
            return self.admit(number);
        }
        if risen || new {
            self.waiting[queue_of(priority)].push_back(number);
        }
        // It, or one that waited longer.
        self.admit_next(limits)
    }

    /// What is read ahead has room: on its way, and together with what came and was not used yet. Who
    /// begins many files at once would else push out what was brought for the first of them.
    fn has_room(&self, bytes: u64, limits: &FetcherLimits) -> bool {
        let in_flight = self.in_flight_bytes + bytes;
        in_flight <= limits.in_flight_bytes
            && in_flight + self.cache.unused_bytes() <= self.room_ahead_bytes()
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
                if valid.is_some_and(|bytes| !self.has_room(bytes, limits)) {
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
    pub(super) fn land(
        &mut self,
        id: ChunkId,
        origin: Origin,
        outcome: &Result<VerifiedChunk, FetchError>,
    ) -> Vec<Waiter> {
        self.started -= 1;
        self.in_flight_bytes -= u64::from(id.len);
        let flight = self.flights.remove(&id);
        if let Ok(chunk) = outcome {
            if origin == Origin::Home {
                self.stats.fetched_chunks += 1;
                self.stats.fetched_bytes += u64::from(id.len);
            }
            let demanded = flight.as_ref().is_some_and(|flight| flight.demanded);
            self.keep(chunk.clone(), demanded);
        }
        flight.map(|flight| flight.waiters).unwrap_or_default()
    }

    fn keep(&mut self, chunk: VerifiedChunk, used: bool) {
        let evicted = self.cache.insert(chunk, used);
        let Some(spill) = &self.spill else { return };
        for gone in evicted {
            spill.offer(gone.chunk, gone.used);
        }
    }
}

impl Flight {
    fn new(address: ChunkAddress, load: LoadNumber) -> Self {
        Self { address, load, demanded: false, waiters: Vec::new() }
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
