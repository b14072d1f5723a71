//! The cache behind the cache: what memory has no room for goes to a file on the box's disk,
//! sealed, and is opened, verified again and served from there.
//!
//! ```text
//! memory ──pushed out──▶ queue ──writer thread──▶ seal ──▶ slot of an unnamed file
//!    ▲                     │ (served from here too)             │
//!    └─────────────────────┴──── verify ◀── open ◀── blocking pool
//! ```
//!
//! Never: write plain bytes or the key to a disk; serve a byte that was not verified on the way
//! back; hold up a FUSE thread or a fetch (when the queue is full, chunks are dropped); use more
//! disk or memory than it was given.
//!
//! Whatever goes wrong here is a miss. What a disk refuses to take ends the spilling, with one
//! event: memory alone goes on.

mod file;
mod index;
mod key;
mod uses;

use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use limb_common::chunk::{CHUNK_BYTES, CHUNK_BYTES_U64, ChunkId, VerifiedChunk};
use limb_common::units::show_bytes;
use tokio::sync::Semaphore;

pub use self::file::FileError;
use self::file::{BLOCK_BYTES, Block, SpillFile};
use self::index::{Admitted, Index, Written};
pub use self::key::KeyError;
use self::key::{LockedKey, WriteNumber};

/// Chunks that are read at once: what a disk with a queue likes, and not much memory.
const READERS: usize = 4;
/// Memory that a slot's bookkeeping costs, with its share of the counters of uses.
const SLOT_OVERHEAD_BYTES: u64 = 256;
/// Less disk than this is not worth a file.
const LEAST_DISK_BYTES: u64 = 8 << 20;
/// A disk that takes longer to read 1 MiB is slower than any link.
const READ_PATIENCE: Duration = Duration::from_secs(5);
/// A disk that gave back other bytes than these many times will do so again.
const MOST_DAMAGED: u64 = 8;

/// What a spill is given.
pub struct SpillSettings {
    /// On the box; must exist. Nothing can be seen in it.
    pub dir: PathBuf,
    /// At most, and at most seven eighths of what is free there.
    pub disk_bytes: u64,
    /// The whole memory of the cache, of which [`Spill::memory_bytes`] is for this.
    pub memory_bytes: u64,
    /// Called from threads of the spill; must not block for long.
    pub on_event: Box<dyn Fn(SpillEvent) + Send + Sync>,
}

impl std::fmt::Debug for SpillSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { dir, disk_bytes, memory_bytes, on_event: _ } = self;
        f.debug_struct("SpillSettings")
            .field("dir", dir)
            .field("disk_bytes", disk_bytes)
            .field("memory_bytes", memory_bytes)
            .finish_non_exhaustive()
    }
}

/// Each is told at most once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SpillEvent {
    /// Nothing goes to the disk any more, and what lay there is gone.
    Stopped { reason: String },
    /// A chunk did not come back as it was; it is fetched again. More may follow.
    Damaged { detail: String },
}

/// There is no spill.
#[derive(Debug, thiserror::Error)]
pub enum SpillError {
    #[error("{} cannot hold the cache", dir.display())]
    File { dir: PathBuf, source: FileError },
    #[error("{} has no room for the cache: {} are free", dir.display(), show_bytes(*room_bytes))]
    NoRoom { dir: PathBuf, room_bytes: u64 },
    #[error("there is no key for the cache")]
    Key(#[from] KeyError),
    #[error("no thread to write the cache with")]
    Thread(#[source] io::Error),
}

/// Counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpillStats {
    /// Written to the disk.
    pub spilled_chunks: u64,
    pub spilled_bytes: u64,
    /// Read from there, or out of the queue, in time.
    pub hits: u64,
    pub hit_bytes: u64,
    /// Not written: the queue was full.
    pub dropped: u64,
    /// Not written: what is there is worth more.
    pub refused: u64,
    /// Did not come back as they were.
    pub damaged: u64,
    /// On the disk now.
    pub held_bytes: u64,
    /// In memory now, on the way there.
    pub queued_bytes: u64,
}

/// Dropping it ends the writer and gives the disk back.
#[derive(Debug)]
pub struct Spill {
    shared: Arc<Shared>,
    readers: Arc<Semaphore>,
}

struct Shared {
    desk: Mutex<Desk>,
    /// Something is in the queue, or never will be; or the writer is done with something.
    changed: Condvar,
    disk_bytes: u64,
    queue_bytes: u64,
    slots: u32,
    spare: Mutex<Vec<Block>>,
    on_event: Box<dyn Fn(SpillEvent) + Send + Sync>,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("disk_bytes", &self.disk_bytes).finish_non_exhaustive()
    }
}

struct Desk {
    /// `None`: stopped or closed. The last who works with it closes the file and wipes the key.
    store: Option<Arc<Store>>,
    index: Index,
    queue: VecDeque<(ChunkId, bool)>,
    /// Of the queue, and what is being written.
    queued: HashMap<ChunkId, VerifiedChunk>,
    queued_bytes: u64,
    /// Something that was read ahead had to be dropped: this disk promises nothing.
    fell_behind: bool,
    stats: SpillStats,
}

struct Store {
    file: SpillFile,
    key: Option<LockedKey>,
}

impl Spill {
    /// Makes the file and the key, and starts the writer.
    ///
    /// # Errors
    /// There is no place, no room or no key; the cache is memory alone then.
    pub fn open(settings: SpillSettings) -> Result<Self, SpillError> {
        let key = LockedKey::random()?;
        let this = Self::idle(settings, Some(key))?;
        this.start()?;
        Ok(this)
    }

    /// Plain bytes on the disk, so that a test that looks for them can fail. For tests only.
    ///
    /// # Errors
    /// As [`Self::open`].
    #[doc(hidden)]
    pub fn open_unsealed_for_test(settings: SpillSettings) -> Result<Self, SpillError> {
        let this = Self::idle(settings, None)?;
        this.start()?;
        Ok(this)
    }

    /// Without a writer.
    fn idle(settings: SpillSettings, key: Option<LockedKey>) -> Result<Self, SpillError> {
        let SpillSettings { dir, disk_bytes, memory_bytes, on_event } = settings;
        let found = SpillFile::create(&dir)
            .and_then(|file| Ok((file.room_bytes().map_err(FileError::Create)?, file)));
        let (room_bytes, file) = found.map_err(|source| SpillError::File { dir: dir.clone(), source })?;
        let disk_bytes = disk_bytes.min(room_bytes);
        if disk_bytes < LEAST_DISK_BYTES {
            return Err(SpillError::NoRoom { dir, room_bytes });
        }
        let slots = (disk_bytes / BLOCK_BYTES).min(memory_bytes / 16 / SLOT_OVERHEAD_BYTES);
        let slots = u32::try_from(slots).unwrap_or(u32::MAX);
        let desk = Desk {
            store: Some(Arc::new(Store { file, key })),
            index: Index::new(disk_bytes, slots),
            queue: VecDeque::new(),
            queued: HashMap::new(),
            queued_bytes: 0,
            fell_behind: false,
            stats: SpillStats::default(),
        };
        let shared = Arc::new(Shared {
            desk: Mutex::new(desk),
            changed: Condvar::new(),
            disk_bytes,
            // A quarter of a second of a fast link at most, and never too little for a few chunks.
            queue_bytes: (memory_bytes / 8).clamp(4 << 20, 32 << 20),
            slots,
            spare: Mutex::new(Vec::new()),
            on_event,
        });
        Ok(Self { shared, readers: Arc::new(Semaphore::new(READERS)) })
    }

    fn start(&self) -> Result<(), SpillError> {
        let writing = Arc::clone(&self.shared);
        let writer = std::thread::Builder::new().name("limb-spill".to_owned());
        writer.spawn(move || writing.write_all()).map(drop).map_err(SpillError::Thread)
    }

    /// Of the disk, at most.
    #[must_use]
    pub fn disk_bytes(&self) -> u64 {
        self.shared.disk_bytes
    }

    /// Memory that this uses at most.
    #[must_use]
    pub fn memory_bytes(&self) -> u64 {
        let blocks = (READERS as u64 + 1) * CHUNK_BYTES_U64;
        self.shared.queue_bytes + u64::from(self.shared.slots) * SLOT_OVERHEAD_BYTES + blocks
    }

    #[must_use]
    pub fn stats(&self) -> SpillStats {
        let desk = self.shared.lock();
        let held_bytes = if desk.store.is_some() { desk.index.held_bytes() } else { 0 };
        SpillStats { held_bytes, queued_bytes: desk.queued_bytes, ..desk.stats }
    }

    /// What ends it from another thread: the key is wiped, the disk given back.
    pub fn closer(&self) -> impl FnOnce() + Send + 'static {
        let shared = Arc::clone(&self.shared);
        move || {
            shared.close();
        }
    }

    /// Blocks until everything that was offered is written or dropped. For tests.
    pub(super) fn settle(&self) {
        let mut desk = self.shared.lock();
        while !desk.queued.is_empty() {
            desk = self.shared.changed.wait(desk).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Memory has no room for it any more. Never blocks. A chunk that nobody `used` was read ahead;
    /// however often it was used while it was in memory is one use.
    pub(super) fn offer(&self, chunk: VerifiedChunk, used: bool) {
        let (id, bytes) = (chunk.id(), u64::from(chunk.id().len));
        let mut desk = self.shared.lock();
        if used {
            desk.index.note_use(&id);
        }
        if desk.store.is_none() || desk.index.contains(&id) || desk.queued.contains_key(&id) {
            return;
        }
        if desk.queued_bytes + bytes > self.shared.queue_bytes {
            desk.stats.dropped += 1;
            desk.fell_behind |= !used;
            return;
        }
        desk.queued_bytes += bytes;
        desk.queued.insert(id, chunk);
        desk.queue.push_back((id, used));
        self.shared.changed.notify_all();
    }

    /// Of what is on its way to the disk. Never blocks.
    pub(super) fn queued(&self, id: &ChunkId) -> Option<VerifiedChunk> {
        self.shared.lock().queued.get(id).cloned()
    }

    /// Can probably be read from here.
    pub(super) fn holds(&self, id: &ChunkId) -> bool {
        let desk = self.shared.lock();
        desk.store.is_some() && (desk.index.contains(id) || desk.queued.contains_key(id))
    }

    /// How much more than memory holds stays here until somebody asks for it.
    pub(super) fn room_ahead_bytes(&self) -> u64 {
        let desk = self.shared.lock();
        if desk.store.is_none() || desk.fell_behind { 0 } else { desk.index.unread_room_bytes() }
    }

    /// How large the disk makes the cache.
    pub(super) fn added_bytes(&self) -> u64 {
        if self.shared.lock().store.is_some() { self.shared.disk_bytes } else { 0 }
    }

    /// The chunk, verified; `None`: it is not here, or not any more, or not as it was.
    pub(super) async fn read(&self, id: ChunkId) -> Option<VerifiedChunk> {
        if !self.holds(&id) {
            return None;
        }
        let permit = Arc::clone(&self.readers).acquire_owned().await.ok()?;
        let shared = Arc::clone(&self.shared);
        let reading = tokio::task::spawn_blocking(move || {
            let chunk = shared.read(id);
            drop(permit);
            chunk
        });
        match tokio::time::timeout(READ_PATIENCE, reading).await {
            Ok(chunk) => chunk.ok().flatten(),
            Err(_) => {
                self.shared.stop(|| "the disk takes more than 5 s to read 1 MiB".to_owned());
                None
            }
        }
    }
}

impl Drop for Spill {
    fn drop(&mut self) {
        self.shared.close();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Desk> {
        self.desk.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it was open.
    fn close(&self) -> bool {
        let mut desk = self.lock();
        let store = desk.store.take();
        desk.queue.clear();
        desk.queued.clear();
        desk.queued_bytes = 0;
        self.changed.notify_all();
        drop(desk);
        store.is_some()
    }

    fn stop(&self, reason: impl FnOnce() -> String) {
        if self.close() {
            (self.on_event)(SpillEvent::Stopped { reason: reason() });
        }
    }

    /// The writer's life.
    fn write_all(&self) {
        let mut block = match Block::new() {
            Ok(block) => block,
            Err(error) => return self.stop(|| error.to_string()),
        };
        let mut counter = 0;
        while let Some((store, chunk, used)) = self.next() {
            counter += 1;
            if let Err(error) = self.write(&store, &chunk, used, (counter, &mut block)) {
                self.stop(|| format!("the disk takes no more: {error}"));
            }
            let mut desk = self.lock();
            // Nothing is there any more if it was closed meanwhile.
            if desk.queued.remove(&chunk.id()).is_some() {
                desk.queued_bytes -= u64::from(chunk.id().len);
            }
            self.changed.notify_all();
        }
    }

    fn next(&self) -> Option<(Arc<Store>, VerifiedChunk, bool)> {
        let mut desk = self.lock();
        loop {
            let store = desk.store.clone()?;
            if let Some((id, used)) = desk.queue.pop_front()
                && let Some(chunk) = desk.queued.get(&id).cloned()
            {
                return Some((store, chunk, used));
            }
            desk = self.changed.wait(desk).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn write(
        &self,
        store: &Store,
        chunk: &VerifiedChunk,
        used: bool,
        (counter, block): (u64, &mut Block),
    ) -> io::Result<()> {
        let (id, len) = (chunk.id(), chunk.bytes().len());
        let admitted = {
            let mut desk = self.lock();
            let admitted = desk.index.admit(id, used);
            desk.stats.refused += u64::from(admitted.is_none());
            admitted
        };
        let Some(Admitted { slot, cuts }) = admitted else { return Ok(()) };
        for (cut, keep_bytes) in cuts {
            store.file.cut(cut, keep_bytes)?;
        }
        let number = WriteNumber { slot, counter };
        let bytes = &mut block.bytes()[..len];
        bytes.copy_from_slice(chunk.bytes());
        let tag = match &store.key {
            Some(key) => Some(key.seal(number, &id, bytes).ok_or(io::ErrorKind::InvalidInput)?),
            None => None,
        };
        store.file.write(slot, len, block)?;
        let mut desk = self.lock();
        desk.index.written(slot, Written { number, tag });
        desk.stats.spilled_chunks += 1;
        desk.stats.spilled_bytes += len as u64;
        Ok(())
    }

    fn read(&self, id: ChunkId) -> Option<VerifiedChunk> {
        let (store, written) = {
            let mut desk = self.lock();
            if let Some(chunk) = desk.queued.get(&id).cloned() {
                desk.count_hit(&id);
                return Some(chunk);
            }
            (desk.store.clone()?, desk.index.begin_read(&id)?)
        };
        let chunk = self.open(&store, &id, written);
        let slot = written.number.slot;
        let mut desk = self.lock();
        let unreadable = desk.index.end_read(slot, chunk.is_ok());
        match chunk {
            Ok(chunk) => {
                desk.count_hit(&id);
                Some(chunk)
            }
            Err(detail) => {
                desk.stats.damaged += 1;
                let damaged = desk.stats.damaged;
                drop(desk);
                self.missed(&store, unreadable.then_some(slot), damaged, detail);
                None
            }
        }
    }

    fn open(&self, store: &Store, id: &ChunkId, written: Written) -> Result<VerifiedChunk, String> {
        let len = usize::try_from(id.len).unwrap_or(usize::MAX).min(CHUNK_BYTES);
        let spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let mut block = match spare {
            Some(block) => block,
            None => Block::new().map_err(|error| error.to_string())?,
        };
        store.file.read(written.number.slot, len, &mut block).map_err(|error| error.to_string())?;
        let bytes = &mut block.bytes()[..len];
        if let (Some(key), Some(tag)) = (&store.key, written.tag)
            && !key.open(written.number, id, tag, bytes)
        {
            return Err("the disk gave back other bytes than were written".to_owned());
        }
        let chunk = id.verify(Bytes::copy_from_slice(bytes)).map_err(|mismatch| mismatch.to_string());
        self.spare.lock().unwrap_or_else(PoisonError::into_inner).push(block);
        chunk
    }

    /// One warning for all, and an end when it goes on.
    fn missed(&self, store: &Store, unreadable: Option<u32>, damaged: u64, detail: String) {
        tracing::warn!(damaged, detail, "a chunk did not come back from the box's disk; fetched again");
        if let Some(slot) = unreadable {
            // A slot that cannot be given back is not used again either.
            if store.file.cut(slot, 0).is_ok() {
                self.lock().index.release(slot);
            }
        }
        if damaged == 1 {
            (self.on_event)(SpillEvent::Damaged { detail });
        } else if damaged > MOST_DAMAGED {
            self.stop(|| format!("the disk damaged {damaged} chunks"));
        }
    }
}

impl Desk {
    fn count_hit(&mut self, id: &ChunkId) {
        self.stats.hits += 1;
        self.stats.hit_bytes += u64::from(id.len);
    }
}

#[cfg(test)]
mod tests;
