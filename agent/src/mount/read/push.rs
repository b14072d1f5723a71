//! Pushing what is here already into the kernel's page cache before a sequential reader comes to
//! it, so that read(2) and page faults find it there.
//!
//! ```text
//!  FUSE thread: a read of a stream ──(queue: full = dropped)──▶ the pusher's thread ──▶ kernel
//! ```
//!
//! A push waits for the locks of its pages, and so perhaps for the answer to a read. Invariants: it
//! runs on a thread of its own; nobody waits for that thread; it holds no lock while it pushes.
//! Of each chunk the first page is never pushed: the reader's fault on it is how the detector and
//! the trace see him pass, one by one and only where he really was.

mod plan;
mod pressure;

use std::ops::Range;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};

use limb_common::chunk::{CHUNK_BYTES_U64, ChunkId, VerifiedSlice};
use limb_common::clock::boottime;
use limb_common::manifest::{ChunkRef, Inode, Manifest};

use self::plan::{MAX_AHEAD_BYTES, Plan, pushed_range};
use self::pressure::Pressure;
use super::lock;
use crate::fetch::ChunkSource;
use crate::mount::session::{Stored, Storer};

/// As many as may be ahead.
const MAX_WAITING: usize = (MAX_AHEAD_BYTES / CHUNK_BYTES_U64) as usize;

/// One chunk to push.
#[derive(Debug)]
struct Push {
    inode: Inode,
    index: u64,
    id: ChunkId,
    bytes: Range<u64>,
}

/// Counted since the start, over all mounts that share it.
#[derive(Debug, Default)]
pub struct PushStats {
    chunks: AtomicU64,
    bytes: AtomicU64,
    dropped: AtomicU64,
}

impl PushStats {
    #[must_use]
    pub fn chunks(&self) -> u64 {
        self.chunks.load(Ordering::Relaxed)
    }

    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Chunks that were to be pushed and were not: a reader came first, they were gone, or the
    /// memory or the kernel said no.
    #[must_use]
    pub fn dropped(&self) -> u64 {
        self.dropped.load(Ordering::Relaxed)
    }
}

/// Of the threads that answer reads: for [`super::ReadFsOptions`].
pub struct Pushing {
    manifest: Manifest,
    source: Arc<dyn ChunkSource>,
    plan: Arc<Mutex<Plan>>,
    queue: SyncSender<Push>,
    page_bytes: u64,
}

/// Where it pushes to.
trait Pages {
    fn is_ending(&self) -> bool;
    fn store(&self, inode: Inode, offset: u64, bytes: &[u8]) -> std::io::Result<Stored>;
}

impl Pages for Storer {
    fn is_ending(&self) -> bool {
        Self::is_ending(self)
    }

    fn store(&self, inode: Inode, offset: u64, bytes: &[u8]) -> std::io::Result<Stored> {
        Self::store(self, inode, offset, bytes)
    }
}

/// Of the thread that pushes; it ends when the file system does.
pub struct Pusher {
    source: Arc<dyn ChunkSource>,
    plan: Arc<Mutex<Plan>>,
    queue: Receiver<Push>,
    pressure: Pressure,
    stats: Arc<PushStats>,
}

impl std::fmt::Debug for Pushing {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pushing").field("plan", &self.plan).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Pusher {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Pusher").field("stats", &self.stats).finish_non_exhaustive()
    }
}

/// A read that is not answered yet. Dropped after the answer.
pub(super) struct Reading {
    plan: Arc<Mutex<Plan>>,
    inode: Inode,
    chunks: Range<u64>,
}

impl Drop for Reading {
    fn drop(&mut self) {
        lock(&self.plan).end(self.inode, self.chunks.clone());
    }
}

impl Pushing {
    pub(super) fn reading(&self, inode: Inode, offset: u64, len: u64) -> Reading {
        let chunks = offset / CHUNK_BYTES_U64..offset.saturating_add(len).div_ceil(CHUNK_BYTES_U64);
        lock(&self.plan).begin(inode, chunks.clone());
        Reading { plan: Arc::clone(&self.plan), inode, chunks }
    }

    /// A stream is before these chunks: what is here of them, up to the first that is not, is to be
    /// pushed.
    pub(super) fn hand_over(&self, inode: Inode, chunks: Range<u64>) {
        let Some(node) = self.manifest.node(inode) else { return };
        // What is pushed too early to stay in memory would have to come again for its first page.
        let room_bytes = self.source.room_ahead_bytes() / 2;
        for index in chunks {
            let Some(ChunkRef::Data(id)) = node.chunk(index) else { continue };
            let Some(bytes) = pushed_range(node.size, index, self.page_bytes) else { continue };
            if !self.source.has(&id) {
                return;
            }
            if !lock(&self.plan).offer((inode, index), u64::from(id.len), room_bytes, boottime()) {
                continue;
            }
            let push = Push { inode, index, id, bytes };
            if let Err(TrySendError::Full(_) | TrySendError::Disconnected(_)) = self.queue.try_send(push) {
                lock(&self.plan).forget(inode, index);
                return;
            }
        }
    }
}

impl Pusher {
    /// What pushes the chunks of a set, and what it is told by.
    #[must_use]
    pub fn new(manifest: Manifest, source: Arc<dyn ChunkSource>, stats: Arc<PushStats>) -> (Self, Pushing) {
        let plan: Arc<Mutex<Plan>> = Arc::default();
        let (queue, queued) = sync_channel(MAX_WAITING);
        let page_bytes = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten();
        let page_bytes = page_bytes.and_then(|bytes| u64::try_from(bytes).ok()).unwrap_or(4096);
        let pressure = Pressure::default();
        let this =
            Self { source: Arc::clone(&source), plan: Arc::clone(&plan), queue: queued, pressure, stats };
        (this, Pushing { manifest, source, plan, queue, page_bytes })
    }

    /// Starts the thread.
    ///
    /// # Errors
    /// There is none to be had; nothing is pushed then.
    pub fn start(self, storer: Storer) -> std::io::Result<()> {
        std::thread::Builder::new().name("limb-push".to_owned()).spawn(move || self.run(&storer)).map(drop)
    }

    fn run(mut self, pages: &impl Pages) {
        while let Ok(push) = self.queue.recv() {
            let (inode, index) = (push.inode, push.index);
            let outcome = match self.due(&push) {
                Some(slice) => pages.store(inode, push.bytes.start, slice.bytes()).map(Some),
                None if pages.is_ending() => Ok(Some(Stored::Ending)),
                None => Ok(None),
            };
            match outcome {
                Ok(Some(Stored::Ending)) => return,
                Ok(Some(Stored::Done)) => {
                    self.stats.chunks.fetch_add(1, Ordering::Relaxed);
                    self.stats.bytes.fetch_add(push.bytes.end - push.bytes.start, Ordering::Relaxed);
                }
                Ok(None) => self.drop_it(inode, index),
                Err(error) => {
                    self.drop_it(inode, index);
                    tracing::debug!(inode = inode.0, index, %error, "the kernel took no pages");
                }
            }
        }
    }

    /// The bytes, if it is still to be pushed.
    fn due(&mut self, push: &Push) -> Option<VerifiedSlice> {
        if self.pressure.is_high(boottime()) || !lock(&self.plan).is_due(push.inode, push.index) {
            return None;
        }
        let start = push.index * CHUNK_BYTES_U64;
        let within = |at: u64| usize::try_from(at - start).ok();
        self.source.cached(&push.id)?.slice(within(push.bytes.start)?..within(push.bytes.end)?)
    }

    fn drop_it(&self, inode: Inode, index: u64) {
        lock(&self.plan).forget(inode, index);
        self.stats.dropped.fetch_add(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicBool;
    use std::sync::mpsc::{Sender, channel};
    use std::time::Duration;

    use bytes::Bytes;
    use limb_common::chunk::{CHUNK_BYTES, Position, VerifiedChunk, value_of};
    use limb_common::manifest::{ManifestBuilder, NewNode, NodeMeta};

    use super::*;
    use crate::fetch::{ChunkAddress, FetchError, FetchFuture, Priority};

    const FILE: Inode = Inode(2);
    const CHUNKS: u64 = 70;
    const BOUND: Duration = Duration::from_secs(20);

    /// Has every chunk.
    struct Everything(Bytes);

    impl ChunkSource for Everything {
        fn fetch(&self, _: ChunkAddress, _: ChunkId, _: Priority) -> FetchFuture {
            Box::pin(std::future::ready(Err(FetchError::NotFound)))
        }
        fn cached(&self, id: &ChunkId) -> Option<VerifiedChunk> {
            id.verify(self.0.clone()).ok()
        }
        fn has(&self, _: &ChunkId) -> bool {
            true
        }
    }

    /// Says when a push has begun, and holds it until it is told to go on.
    struct Held {
        begun: Sender<u64>,
        go_on: Receiver<()>,
        ending: Arc<AtomicBool>,
    }

    impl Pages for Held {
        fn is_ending(&self) -> bool {
            self.ending.load(Ordering::SeqCst)
        }
        fn store(&self, _: Inode, offset: u64, _: &[u8]) -> std::io::Result<Stored> {
            if self.is_ending() {
                return Ok(Stored::Ending);
            }
            self.begun.send(offset).unwrap();
            let _over = self.go_on.recv();
            Ok(Stored::Done)
        }
    }

    #[test]
    fn a_push_that_hangs_holds_up_nobody_and_none_begins_once_the_end_has() {
        let bytes = Bytes::from(vec![7; CHUNK_BYTES]);
        let size = CHUNKS * CHUNK_BYTES_U64;
        let chunks = (0..CHUNKS).map(|index| Some(value_of(Position::of(size, index), &bytes))).collect();
        let mut builder = ManifestBuilder::new(NodeMeta::default());
        let root = builder.root();
        builder.add(root, b"f", NewNode::File { size, chunks }, NodeMeta::default()).unwrap();
        let stats: Arc<PushStats> = Arc::default();
        let (pusher, pushing) =
            Pusher::new(builder.build().0, Arc::new(Everything(bytes)), Arc::clone(&stats));
        let (begun, begins) = channel();
        let (go_on, told) = channel();
        let ending = Arc::new(AtomicBool::new(false));
        let pages = Held { begun, go_on: told, ending: Arc::clone(&ending) };
        let thread = std::thread::spawn(move || pusher.run(&pages));
        pushing.hand_over(FILE, 2..CHUNKS);
        let first = begins.recv_timeout(BOUND).unwrap();
        assert_eq!(first, 2 * CHUNK_BYTES_U64 + pushing.page_bytes);

        let (done, is_done) = channel();
        let reads = std::thread::spawn(move || {
            for round in 0..1000 {
                let reading = pushing.reading(FILE, round % CHUNKS * CHUNK_BYTES_U64, 4096);
                pushing.hand_over(FILE, 0..CHUNKS);
                drop(reading);
            }
            done.send(pushing).unwrap();
        });
        let pushing = is_done.recv_timeout(BOUND).expect("who answers reads waits for nobody");
        reads.join().unwrap();

        // What waited has been passed; so it goes on with what comes now.
        go_on.send(()).unwrap();
        let end = boottime() + BOUND;
        while begins.recv_timeout(Duration::from_millis(1)).is_err() {
            assert!(boottime() < end, "nothing is pushed any more");
            pushing.hand_over(FILE, 0..CHUNKS);
        }
        ending.store(true, Ordering::SeqCst);
        go_on.send(()).unwrap();
        thread.join().unwrap();
        assert!(begins.try_recv().is_err(), "one began after the end had");
        assert_eq!(stats.chunks(), 2);
        drop(pushing);
    }
}
