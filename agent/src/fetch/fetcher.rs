//! Single-flight fetching over a [`ChunkTransport`], with a cache in memory and, where it is asked
//! for, on the box's disk.
//!
//! One chunk is on its way at most once, however many ask; whoever asks with more urgency raises
//! it. What travels together is a load: one chunk, or a pack of small files. Demand is always
//! admitted (a reader waits for it); everything else waits until there is room for it, also beside
//! what was read ahead and not used yet.
//!
//! Invariant: a chunk is cached or in flight or neither, never both. No lock is held across an
//! await, and every lock is held for the time of a few map operations, so FUSE threads may call.

mod carry;
mod state;

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use limb_common::assignment::{CacheSpec, SetNumber};
use limb_common::chunk::{ChunkId, VerifiedChunk, VerifiedSlice, group_bytes, group_count, groups_of};
use limb_common::manifest::Inode;
use tokio::runtime::Handle;
use tokio::sync::{oneshot, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

use self::carry::PartLanding;
use self::state::State;
use super::spill::{Spill, SpillStats};
use super::{
    ChunkAddress, ChunkSource, ChunkTransport, FetchError, FetchFuture, PartAsk, Priority, SliceFuture,
    slice_of,
};

/// More wrong answers than this are no accident of the link.
const REFETCHES: u32 = 2;
/// A disk at home that failed once gets a moment.
const IO_PAUSE: Duration = Duration::from_millis(200);
/// Hints that may wait for room; more are dropped, they cost a demand fetch later.
const MAX_WAITING: usize = 1024;

/// Of the cache, for parts of chunks: one in so many bytes.
const PARTS_SHARE: u64 = 4;

/// A link that holds less than this many bytes takes long for a whole chunk.
const WHOLE_BYTES: u64 = 512 << 10;

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
    /// 96 MiB in flight fill 1 Gbit/s at 80 ms ten times over; the link holds back what it cannot
    /// use.
    #[must_use]
    pub const fn with_cache(cache_bytes: u64) -> Self {
        Self { cache_bytes, in_flight_bytes: 96 << 20 }
    }

    /// As much as was asked for, but no more than half of the memory that is available now: the
    /// job needs the rest.
    #[must_use]
    pub fn on_this_machine(cache_bytes: u64) -> Self {
        let available = std::fs::read_to_string("/proc/meminfo").ok().and_then(|text| available_bytes(&text));
        let most = available.map_or(u64::MAX, |bytes| (bytes / 2).max(CacheSpec::LEAST_MEMORY_BYTES));
        Self::with_cache(cache_bytes.min(most))
    }
}

/// Counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FetchStats {
    /// Chunks that arrived and were what they should be.
    pub fetched_chunks: u64,
    pub fetched_bytes: u64,
    /// Runs of groups, where a whole chunk was not worth it.
    pub fetched_parts: u64,
    /// Answers that were not what was asked for.
    pub mismatches: u64,
    pub cache_hits: u64,
    /// Now.
    pub in_flight_bytes: u64,
    pub most_in_flight_chunks: u64,
    pub cached_bytes: u64,
    /// All zero without a disk.
    pub spill: SpillStats,
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
    spill: Option<Arc<Spill>>,
    state: Mutex<State>,
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
        Self::spilling(transport, limits, None, runtime, stop)
    }

    /// With a disk behind the memory. What the spill needs of memory comes out of
    /// [`FetcherLimits::cache_bytes`].
    #[must_use]
    pub fn spilling(
        transport: Arc<dyn ChunkTransport>,
        limits: FetcherLimits,
        spill: Option<Spill>,
        runtime: Handle,
        stop: &CancellationToken,
    ) -> Self {
        let stop = stop.child_token();
        let spill = spill.map(Arc::new);
        let state = Mutex::new(State::new(&limits, spill.clone()));
        let guard = Arc::new(stop.clone().drop_guard());
        let inner = Arc::new(Inner { transport, limits, runtime, stop, spill, state });
        Self { inner, _ends_fetches: guard }
    }

    /// Blocks until the disk has taken what memory gave it. For tests.
    #[doc(hidden)]
    pub fn settle(&self) {
        if let Some(spill) = &self.inner.spill {
            spill.settle();
        }
    }

    #[must_use]
    pub fn stats(&self) -> FetchStats {
        let state = self.inner.lock();
        FetchStats {
            in_flight_bytes: state.in_flight_bytes,
            cached_bytes: state.cache.bytes() + state.parts.bytes(),
            spill: self.inner.spill.as_ref().map(|spill| spill.stats()).unwrap_or_default(),
            ..state.stats
        }
    }
}

impl Fetcher {
    /// A whole chunk takes no longer than a few round trips.
    fn is_fast(&self) -> bool {
        self.bandwidth_delay_bytes().is_some_and(|bytes| bytes >= WHOLE_BYTES)
    }

    /// Something was found in memory: what is used now makes room for what is read ahead.
    fn hit(&self, mut state: MutexGuard<'_, State>) {
        state.stats.cache_hits += 1;
        let starts = self.inner.admitted(&mut state);
        drop(state);
        self.inner.start_all(starts);
    }

    fn whole(&self, address: ChunkAddress, id: ChunkId, range: Range<usize>) -> SliceFuture {
        let whole = self.fetch(address, id, Priority::Demand);
        Box::pin(async move { slice_of(&whole.await?, range) })
    }
}

impl ChunkSource for Fetcher {
    fn fetch(&self, address: ChunkAddress, id: ChunkId, priority: Priority) -> FetchFuture {
        let mut state = self.inner.lock();
        if let Some(chunk) = state.get(&id) {
            self.hit(state);
            return Box::pin(std::future::ready(Ok(chunk)));
        }
        let (tell, told) = oneshot::channel();
        let start = state.ask(address, id, priority, Some(tell), &self.inner.limits);
        drop(state);
        self.inner.start_all(start);
        let stop = self.inner.stop.clone();
        Box::pin(async move {
            tokio::select! {
                biased;
                answer = told => answer.unwrap_or(Err(FetchError::Closed)),
                () = stop.cancelled() => Err(FetchError::Closed),
            }
        })
    }

    fn fetch_slice(&self, address: ChunkAddress, id: ChunkId, range: Range<usize>) -> SliceFuture {
        let groups = groups_of(&range);
        let mut state = self.inner.lock();
        if let Some(slice) = state.slice(&id, range.clone()) {
            self.hit(state);
            return Box::pin(std::future::ready(Ok(slice)));
        }
        let ChunkAddress::Set { set, inode, index } = address else { return self.whole(address, id, range) };
        // Over a slow link a whole chunk that is on its way is not worth waiting for.
        let comes = state.on_disk(&id) || self.is_fast() && state.flights.contains_key(&id);
        if comes || groups.len() >= group_count(id.len) {
            drop(state);
            return self.whole(address, id, range);
        }
        let (tell, told) = oneshot::channel();
        let key = (id, groups.clone());
        let bytes = group_bytes(id.len, &groups).len() as u64;
        let first = state.parts.wait(key.clone(), tell);
        state.in_flight_bytes += if first { bytes } else { 0 };
        // A runtime that is ending drops what is spawned at once, and that lands under the lock.
        drop(state);
        if first {
            let (urgent, priority) = watch::channel(Priority::Demand);
            let ask = PartAsk { set, inode, index, id, groups, priority };
            let landing = PartLanding { inner: Arc::clone(&self.inner), key, bytes, outcome: None };
            self.inner.start_part(ask, landing, urgent);
        }
        let stop = self.inner.stop.clone();
        Box::pin(async move {
            let part = tokio::select! {
                biased;
                answer = told => answer.unwrap_or(Err(FetchError::Closed)),
                () = stop.cancelled() => Err(FetchError::Closed),
            };
            let outside = || FetchError::Io { detail: "outside of the chunk".to_owned() };
            part?.slice(range).ok_or_else(outside)
        })
    }

    fn whole_pays(&self, file_bytes: u64) -> bool {
        let disk_bytes = self.inner.spill.as_ref().map_or(0, |spill| spill.added_bytes());
        self.is_fast() && file_bytes <= (self.inner.limits.cache_bytes + disk_bytes) / 2
    }

    fn cached_slice(&self, id: &ChunkId, range: Range<usize>) -> Option<VerifiedSlice> {
        let mut state = self.inner.lock();
        let found = state.slice(id, range)?;
        self.hit(state);
        Some(found)
    }

    fn cached(&self, id: &ChunkId) -> Option<VerifiedChunk> {
        let mut state = self.inner.lock();
        let found = state.get(id)?;
        self.hit(state);
        Some(found)
    }

    fn has(&self, id: &ChunkId) -> bool {
        self.inner.lock().contains(id)
    }

    fn prefetch(&self, address: ChunkAddress, id: ChunkId, priority: Priority) {
        let mut state = self.inner.lock();
        if state.is_full() || state.contains(&id) {
            return;
        }
        let start = state.ask(address, id, priority, None, &self.inner.limits);
        drop(state);
        self.inner.start_all(start);
    }

    fn prefetch_pack(&self, set: SetNumber, files: &[(Inode, ChunkId)], priority: Priority) {
        let mut state = self.inner.lock();
        if state.is_full() {
            return;
        }
        let start = state.ask_pack(set, files, priority, &self.inner.limits);
        drop(state);
        self.inner.start_all(start);
    }

    fn room_ahead_bytes(&self) -> u64 {
        self.inner.lock().room_ahead_bytes()
    }

    fn bandwidth_delay_bytes(&self) -> Option<u64> {
        self.inner.transport.bandwidth_delay_bytes()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_as_the_kernel_writes_it() {
        let text = "MemTotal:       24597340 kB\nMemFree:  1 kB\nMemAvailable:   23456789 kB\n";
        assert_eq!(available_bytes(text), Some(23_456_789 * 1024));
        assert_eq!(available_bytes("MemTotal: 5 kB\n"), None);
        let (little, all) = (CacheSpec::LEAST_MEMORY_BYTES, u64::MAX);
        assert_eq!(FetcherLimits::on_this_machine(little).cache_bytes, little);
        assert!((little..1 << 50).contains(&FetcherLimits::on_this_machine(all).cache_bytes));
    }
}
