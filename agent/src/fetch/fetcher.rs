//! Single-flight fetching over a [`ChunkTransport`], with a cache in memory.
//!
//! One chunk is on its way at most once, however many ask; whoever asks with more urgency raises
//! it. Bytes on their way have a budget of their own: demand is always admitted (a reader waits
//! for it), everything else waits its turn.
//!
//! Invariant: a chunk is cached or in flight or neither, never both. No lock is held across an
//! await, and every lock is held for the time of a few map operations, so FUSE threads may call.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use limb_common::chunk::{ChunkId, VerifiedChunk};
use limb_common::{clock, task};
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

use super::cache::ChunkCache;
use super::meter::Meter;
use super::{
    Ask, ChunkAddress, ChunkSource, ChunkTransport, FetchError, FetchFuture, Priority, TransportError,
};

/// More wrong answers than this are no accident of the link.
const REFETCHES: u32 = 2;
/// A disk at home that failed once gets a moment.
const IO_PAUSE: Duration = Duration::from_millis(200);
/// Hints that may wait for room; more are dropped, they cost a demand fetch later.
const MAX_WAITING: usize = 1024;

/// Less could not hold what is read ahead for a few streams.
const LEAST_CACHE_BYTES: u64 = 64 << 20;
/// More gains nothing over the page cache.
const MOST_CACHE_BYTES: u64 = 16 << 30;

/// `MemAvailable` of /proc/meminfo.
fn available_bytes(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kilobytes: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kilobytes.checked_mul(1024)
}

/// How much memory fetching may use.
#[derive(Clone, Copy, Debug)]
pub struct FetcherLimits {
    /// Verified chunks kept.
    pub cache_bytes: u64,
    /// On their way, not counting demand.
    pub in_flight_bytes: u64,
}

impl FetcherLimits {
    /// 32 MiB in flight fill 1 Gbit/s at 80 ms three times over.
    #[must_use]
    pub const fn with_cache(cache_bytes: u64) -> Self {
        Self { cache_bytes, in_flight_bytes: 32 << 20 }
    }

    /// A quarter of the memory that is available now: the kernel's page cache of the mount is
    /// the first cache, and the job needs the rest.
    #[must_use]
    pub fn for_this_machine() -> Self {
        let available = std::fs::read_to_string("/proc/meminfo")
            .ok()
            .and_then(|text| available_bytes(&text))
            .unwrap_or(4 * LEAST_CACHE_BYTES);
        Self::with_cache((available / 4).clamp(LEAST_CACHE_BYTES, MOST_CACHE_BYTES))
    }
}

/// Counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FetchStats {
    /// Chunks that arrived and were what they should be.
    pub fetched_chunks: u64,
    pub fetched_bytes: u64,
    /// Answers that were not what was asked for.
    pub mismatches: u64,
    pub cache_hits: u64,
    /// Now.
    pub in_flight_bytes: u64,
    pub most_in_flight_chunks: u64,
    pub cached_bytes: u64,
}

/// Gives verified chunks from memory or from home. Clones share everything; when the last one is
/// dropped all fetches end.
#[derive(Clone)]
pub struct Fetcher {
    inner: Arc<Inner>,
    _ends_fetches: Arc<DropGuard>,
}

impl std::fmt::Debug for Fetcher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Fetcher").field("stats", &self.stats()).finish_non_exhaustive()
    }
}

struct Inner {
    transport: Arc<dyn ChunkTransport>,
    limits: FetcherLimits,
    /// FUSE threads are not of the runtime; fetches are spawned here.
    runtime: Handle,
    stop: CancellationToken,
    state: Mutex<State>,
}

struct State {
    cache: ChunkCache,
    flights: HashMap<ChunkId, Flight>,
    /// Not started yet, by priority. An entry whose flight has started or risen is skipped.
    waiting: [VecDeque<ChunkId>; 4],
    started: u64,
    in_flight_bytes: u64,
    meter: Meter,
    stats: FetchStats,
}

struct Flight {
    address: ChunkAddress,
    priority: watch::Sender<Priority>,
    waiters: Vec<oneshot::Sender<Result<VerifiedChunk, FetchError>>>,
    started: bool,
}

impl Fetcher {
    /// Fetches run on `runtime`; they end when `stop` is cancelled.
    #[must_use]
    pub fn new(
        transport: Arc<dyn ChunkTransport>,
        limits: FetcherLimits,
        runtime: Handle,
        stop: &CancellationToken,
    ) -> Self {
        let stop = stop.child_token();
        let state = State {
            cache: ChunkCache::new(limits.cache_bytes),
            flights: HashMap::new(),
            waiting: Default::default(),
            started: 0,
            in_flight_bytes: 0,
            meter: Meter::default(),
            stats: FetchStats::default(),
        };
        let guard = Arc::new(stop.clone().drop_guard());
        let inner = Arc::new(Inner { transport, limits, runtime, stop, state: Mutex::new(state) });
        Self { inner, _ends_fetches: guard }
    }

    #[must_use]
    pub fn stats(&self) -> FetchStats {
        let state = self.inner.lock();
        FetchStats {
            in_flight_bytes: state.in_flight_bytes,
            cached_bytes: state.cache.bytes(),
            ..state.stats
        }
    }
}

impl ChunkSource for Fetcher {
    fn fetch(&self, address: ChunkAddress, id: ChunkId, priority: Priority) -> FetchFuture {
        let mut state = self.inner.lock();
        if let Some(chunk) = state.cache.get(&id) {
            state.stats.cache_hits += 1;
            return Box::pin(std::future::ready(Ok(chunk)));
        }
        let (tell, told) = oneshot::channel();
        let start = state.ask(address, id, priority, Some(tell), &self.inner.limits);
        drop(state);
        if let Some(start) = start {
            self.inner.start(start);
        }
        let stop = self.inner.stop.clone();
        Box::pin(async move {
            tokio::select! {
                biased;
                answer = told => answer.unwrap_or(Err(FetchError::Closed)),
                () = stop.cancelled() => Err(FetchError::Closed),
            }
        })
    }

    fn cached(&self, id: &ChunkId) -> Option<VerifiedChunk> {
        let mut state = self.inner.lock();
        let found = state.cache.get(id);
        state.stats.cache_hits += u64::from(found.is_some());
        found
    }

    fn prefetch(&self, address: ChunkAddress, id: ChunkId, priority: Priority) {
        let mut state = self.inner.lock();
        let waiting: usize = state.waiting.iter().map(VecDeque::len).sum();
        if waiting >= MAX_WAITING || state.cache.contains(&id) {
            return;
        }
        let start = state.ask(address, id, priority, None, &self.inner.limits);
        drop(state);
        if let Some(start) = start {
            self.inner.start(start);
        }
    }

    fn bandwidth_delay_bytes(&self) -> Option<u64> {
        self.inner.lock().meter.bandwidth_delay_bytes()
    }
}

/// A flight that was admitted and must be spawned.
struct Start {
    id: ChunkId,
    address: ChunkAddress,
    priority: watch::Receiver<Priority>,
}

impl State {
    fn ask(
        &mut self,
        address: ChunkAddress,
        id: ChunkId,
        priority: Priority,
        waiter: Option<oneshot::Sender<Result<VerifiedChunk, FetchError>>>,
        limits: &FetcherLimits,
    ) -> Option<Start> {
        let flight = self.flights.entry(id).or_insert_with(|| Flight {
            address,
            priority: watch::Sender::new(Priority::Background),
            waiters: Vec::new(),
            started: false,
        });
        flight.waiters.extend(waiter);
        let risen = priority < *flight.priority.borrow();
        if risen {
            flight.priority.send_replace(priority);
        }
        if flight.started {
            return None;
        }
        if priority == Priority::Demand || self.in_flight_bytes + u64::from(id.len) <= limits.in_flight_bytes
        {
            return self.admit(id);
        }
        let now = *flight.priority.borrow();
        let queue = &mut self.waiting[queue_of(now)];
        if risen || !queue.contains(&id) {
            queue.push_back(id);
        }
        None
    }

    fn admit(&mut self, id: ChunkId) -> Option<Start> {
        let flight = self.flights.get_mut(&id).filter(|flight| !flight.started)?;
        flight.started = true;
        self.started += 1;
        self.in_flight_bytes += u64::from(id.len);
        self.stats.most_in_flight_chunks = self.stats.most_in_flight_chunks.max(self.started);
        Some(Start { id, address: flight.address, priority: flight.priority.subscribe() })
    }

    /// The most urgent that waits, if there is room.
    fn admit_next(&mut self, limits: &FetcherLimits) -> Option<Start> {
        for level in 0..self.waiting.len() {
            while let Some(&id) = self.waiting[level].front() {
                let valid = self
                    .flights
                    .get(&id)
                    .is_some_and(|flight| !flight.started && queue_of(*flight.priority.borrow()) == level);
                if valid && self.in_flight_bytes + u64::from(id.len) > limits.in_flight_bytes {
                    return None;
                }
                self.waiting[level].pop_front();
                if valid {
                    return self.admit(id);
                }
            }
        }
        None
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

/// Ends a flight also when its task panics, so that nobody waits for ever.
struct Landing {
    inner: Arc<Inner>,
    id: ChunkId,
    outcome: Result<VerifiedChunk, FetchError>,
}

impl Drop for Landing {
    fn drop(&mut self) {
        let mut state = self.inner.lock();
        let waiters = state.flights.remove(&self.id).map(|flight| flight.waiters).unwrap_or_default();
        state.started -= 1;
        state.in_flight_bytes -= u64::from(self.id.len);
        if let Ok(chunk) = &self.outcome {
            state.stats.fetched_chunks += 1;
            state.stats.fetched_bytes += u64::from(self.id.len);
            state.cache.insert(chunk.clone());
        }
        let mut starts = Vec::new();
        if !self.inner.stop.is_cancelled() {
            starts.extend(std::iter::from_fn(|| state.admit_next(&self.inner.limits)));
        }
        drop(state);
        for waiter in waiters {
            // A reader that was killed meanwhile does not wait any more.
            let _gone: Result<(), _> = waiter.send(self.outcome.clone());
        }
        for start in starts {
            self.inner.start(start);
        }
    }
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn start(self: &Arc<Self>, Start { id, address, priority }: Start) {
        let inner = Arc::clone(self);
        let outcome = Err(FetchError::Io { detail: "the fetch ended without an answer".to_owned() });
        let mut landing = Landing { inner: Arc::clone(self), id, outcome };
        let _runtime = self.runtime.enter();
        task::detach("fetch", async move {
            landing.outcome = tokio::select! {
                biased;
                () = inner.stop.cancelled() => Err(FetchError::Closed),
                outcome = inner.bring(id, address, priority) => outcome,
            };
            drop(landing);
        });
    }

    async fn bring(
        &self,
        id: ChunkId,
        address: ChunkAddress,
        priority: watch::Receiver<Priority>,
    ) -> Result<VerifiedChunk, FetchError> {
        let (mut mismatches, mut failures) = (0, 0);
        loop {
            let mark = self.lock().meter.begin(now());
            let ask = Ask { address, len: id.len, priority: priority.clone() };
            let wrong = match self.transport.fetch(ask).await {
                Ok(bytes) => match id.verify(bytes) {
                    Ok(chunk) => {
                        self.lock().meter.delivered(mark, now(), u64::from(id.len));
                        return Ok(chunk);
                    }
                    Err(mismatch) => mismatch.to_string(),
                },
                Err(TransportError::Garbled { detail }) => detail,
                Err(TransportError::Io { detail }) => {
                    failures += 1;
                    if failures > REFETCHES {
                        return Err(FetchError::Io { detail });
                    }
                    tokio::time::sleep(IO_PAUSE * failures).await;
                    continue;
                }
                Err(TransportError::SourceChanged { detail }) => {
                    return Err(FetchError::SourceChanged { detail });
                }
                Err(TransportError::NotFound) => return Err(FetchError::NotFound),
                Err(TransportError::Closed) => return Err(FetchError::Closed),
            };
            mismatches += 1;
            self.lock().stats.mismatches += 1;
            tracing::warn!(?address, mismatches, wrong, "a chunk is not what was asked for");
            if mismatches > REFETCHES {
                return Err(FetchError::Corrupt { detail: wrong });
            }
        }
    }
}

fn now() -> Duration {
    clock::boottime().since_boot()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_as_the_kernel_writes_it() {
        let text = "MemTotal:       24597340 kB\nMemFree:  1 kB\nMemAvailable:   23456789 kB\n";
        assert_eq!(available_bytes(text), Some(23_456_789 * 1024));
        assert_eq!(available_bytes("MemTotal: 5 kB\n"), None);
        assert!(FetcherLimits::for_this_machine().cache_bytes >= LEAST_CACHE_BYTES);
    }
}
