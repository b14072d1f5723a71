//! Results at home: what a box writes lands in a plain folder, whole or not at all.
//!
//! Bytes arrive as chunks, are checked against their value and written to a private part file in
//! the same file system. Journal entries are applied in order, each once:
//!
//! ```text
//! verify content ─► fsync parts ─► intents committed ─► renames ─► fsync directories
//!                                        │                              │
//!                                        └── crash: done again ◄────────┴─► outcome committed ─► ack
//! ```
//!
//! An intent names files by (dev, ino), so doing it again changes nothing although SQLite and the
//! file system cannot commit together.
//!
//! Never: show a torn file, acknowledge what is not on disk, overwrite what the owner put there
//! (it is renamed to NAME.owner-UNIXSECONDS and the run's events say so), follow a symlink.
//! Exception to the first: a file of more than 64 MiB that the job fsyncs while it goes on
//! writing, on a file system without clones, is shown in place until its last close.

mod disk;
mod effect;
mod entry;
mod execute;
mod lifecycle;
mod load;
mod lower;
mod names;
mod part;
mod parts;
mod pins;
mod plan;
mod redo;
mod table;
mod view;
mod writer;

#[cfg(test)]
mod crash_tests;
#[cfg(test)]
mod pin_tests;
#[cfg(test)]
mod room_tests;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use limb_common::id::{AttemptNumber, RunId};
use nix::errno::Errno;

pub use disk::{Step, Steps};
pub use entry::{Acks, Base, Chunk, ChunkName, Entry, Item, Op, Publication, PublishKind, Refusal};
pub use lifecycle::{Finished, OutputBegin};
pub use lower::{Lower, LowerFile};
pub use table::SCHEMA;
pub use view::{ChunkReadError, Listed, ListedKind, Problem, Verified};

use crate::database::{Database, DatabaseError};
use disk::{Disk, GoOn};
use writer::Writer;

/// Something the owner should read in the run's events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ResultEvent {
    pub run: RunId,
    pub attempt: AttemptNumber,
    pub text: String,
}

/// Who wrote it.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct AttemptId {
    pub run: RunId,
    pub attempt: AttemptNumber,
}

/// Results cannot be taken.
#[derive(Debug, thiserror::Error)]
pub enum ResultsError {
    #[error("the results journal in home's database failed")]
    Database(#[from] DatabaseError),
    #[error("a record of the results journal is damaged")]
    Record(#[from] serde_json::Error),
    #[error(
        "could not use {} for results; hint: check that it is a directory you may write to",
        path.display()
    )]
    Destination { path: PathBuf, source: Errno },
    #[error("{} is in use by run {by}; hint: wait for it, stop it, or choose another dest", dest.display())]
    Locked { dest: PathBuf, by: String },
    #[error("no such attempt takes results")]
    UnknownAttempt,
    #[error("the attempt has ended")]
    Ended,
    #[error("another stream of the same agent took over")]
    Replaced,
    /// The agent broke the contract; its stream ends.
    #[error("the agent broke the protocol: {0}")]
    Protocol(&'static str),
    #[error("could not make results durable")]
    Disk(#[source] Errno),
    #[error("stopped before a durable step")]
    Stopped,
    #[error("a worker thread of the results ended")]
    Worker,
}

impl From<rusqlite::Error> for ResultsError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Database(error.into())
    }
}

impl From<disk::DiskError> for ResultsError {
    fn from(error: disk::DiskError) -> Self {
        match error {
            disk::DiskError::Os(errno) => Self::Disk(errno),
            disk::DiskError::Stopped => Self::Stopped,
        }
    }
}

type EventSink = dyn Fn(ResultEvent) + Send + Sync;

/// Everything that results need of home. Cheap to clone.
#[derive(Clone)]
pub struct ResultsHome {
    inner: Arc<Inner>,
}

struct Inner {
    database: Database,
    disk: Disk,
    events: Arc<EventSink>,
    attempts: Mutex<HashMap<AttemptId, Arc<Slot>>>,
}

/// One attempt that takes results.
#[derive(Default)]
struct Slot {
    /// The newest stream; older ones are refused.
    session: AtomicU64,
    /// Loaded from the table on first use, dropped when a batch failed half-way.
    writer: Mutex<Option<Writer>>,
}

impl std::fmt::Debug for ResultsHome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ResultsHome").field("database", &self.inner.database).finish_non_exhaustive()
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ResultsHome {
    /// `events` is called with what the owner should know; it must not block for long.
    #[must_use]
    pub fn new(database: Database, events: Arc<dyn Fn(ResultEvent) + Send + Sync>) -> Self {
        Self::with_steps(database, events, Arc::new(GoOn))
    }

    /// With a say before each durable step, for tests that stop the world at any of them.
    #[must_use]
    pub fn with_steps(
        database: Database,
        events: Arc<dyn Fn(ResultEvent) + Send + Sync>,
        steps: Arc<dyn Steps>,
    ) -> Self {
        let inner = Inner { database, disk: Disk::new(steps), events, attempts: Mutex::default() };
        Self { inner: Arc::new(inner) }
    }

    /// Takes over the journal of an attempt: an older stream of it is refused from now on.
    /// Also says where the journal stands.
    ///
    /// # Errors
    /// [`ResultsError`]; `UnknownAttempt` and `Ended` are final.
    pub async fn open_journal(&self, id: AttemptId) -> Result<(Journal, Acks), ResultsError> {
        let slot = self.slot(&id);
        let session = slot.session.fetch_add(1, Ordering::SeqCst) + 1;
        let journal = Journal { home: self.clone(), id, slot, session };
        let acks = journal.with_writer(Writer::standing).await?;
        Ok((journal, acks))
    }

    fn slot(&self, id: &AttemptId) -> Arc<Slot> {
        Arc::clone(lock(&self.inner.attempts).entry(id.clone()).or_default())
    }

    /// Runs blocking work off the async threads.
    async fn blocking<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Inner) -> Result<T, ResultsError> + Send + 'static,
    ) -> Result<T, ResultsError> {
        let inner = Arc::clone(&self.inner);
        tokio::task::spawn_blocking(move || work(&inner)).await.unwrap_or(Err(ResultsError::Worker))
    }
}

impl Inner {
    /// The attempt's writer, loaded where it is not. A failure drops it: what is true is then
    /// read from disk again.
    fn with_writer<T>(
        &self,
        id: &AttemptId,
        slot: &Slot,
        session: Option<u64>,
        work: impl FnOnce(&mut Writer) -> Result<T, ResultsError>,
    ) -> Result<T, ResultsError> {
        let mut guard = lock(&slot.writer);
        if session.is_some_and(|mine| mine != slot.session.load(Ordering::SeqCst)) {
            return Err(ResultsError::Replaced);
        }
        let mut writer = match guard.take() {
            Some(writer) => writer,
            None => Writer::load(&self.database, &self.disk, &self.events, id)?,
        };
        let result = work(&mut writer);
        if result.is_ok() {
            *guard = Some(writer);
        }
        result
    }
}

/// One agent's stream, while it is the newest of its attempt.
pub struct Journal {
    home: ResultsHome,
    id: AttemptId,
    slot: Arc<Slot>,
    session: u64,
}

impl std::fmt::Debug for Journal {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Journal").field("id", &self.id).finish_non_exhaustive()
    }
}

impl Journal {
    /// Takes what came in, in order. Entries are durable when this returns; chunks are when they
    /// are in the answer, which `sync` (or enough of them) brings about.
    ///
    /// # Errors
    /// [`ResultsError`]: the stream must end; nothing in this call is acknowledged, and the agent
    /// goes on from the journal's standing on a new stream.
    pub async fn feed(&self, items: Vec<Item>, sync: bool) -> Result<Acks, ResultsError> {
        self.with_writer(move |writer| writer.feed(items, sync)).await
    }

    async fn with_writer<T: Send + 'static>(
        &self,
        work: impl FnOnce(&mut Writer) -> Result<T, ResultsError> + Send + 'static,
    ) -> Result<T, ResultsError> {
        let (id, slot, session) = (self.id.clone(), Arc::clone(&self.slot), self.session);
        self.home.blocking(move |inner| inner.with_writer(&id, &slot, Some(session), work)).await
    }
}
