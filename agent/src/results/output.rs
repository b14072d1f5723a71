//! One output with its waits: what a call needs from home is fetched, what is over the budget
//! waits for acknowledgements, what must be durable waits for home. Every method here that is not
//! `async` answers at once and may be called from a FUSE thread.
//!
//! Never: hold the tree's lock across a wait.
//!
//! Order within a file is the kernel's: it holds the inode's lock over a write, a truncate and an
//! fsync until we have answered, so there is at most one of them per file.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use limb_common::assignment::{Durability, SetNumber};
use limb_common::clock;
use limb_common::task::{self, Task};
use nix::errno::Errno;
use tokio_util::sync::CancellationToken;

use super::budget::Budget;
use super::content::{Missing, MissingFrom, Piece};
use super::outbox::Outbox;
use super::tree::{Attributes, SetAttributes, Tree, TreeSettings};
pub use super::tree::{Change, ChangeKind};
use crate::fetch::{ChunkAddress, ChunkSource, FetchError, Priority};

/// How often pauses of writers are looked for; a quarter of the pause that counts.
const SETTLE_EVERY: Duration = Duration::from_millis(50);

/// A name in a directory.
pub type Place<'a> = (u64, &'a [u8]);

/// How long a rename waits for a release that close(2) has announced. The kernel queues it before
/// the rename, so this passes only when another process has the file open too.
const CLOSING_LIMIT: Duration = Duration::from_millis(20);
/// Closes of an ended job arrive within milliseconds.
const RELEASED_EVERY: Duration = Duration::from_millis(2);

pub struct OutputSettings {
    pub tree: TreeSettings,
    pub durability: Durability,
    /// Addresses the lower set in `source`.
    pub lower_set: Option<SetNumber>,
    pub source: Arc<dyn ChunkSource>,
    /// Ends every wait with EIO: given to the mount session too.
    pub stop: CancellationToken,
}

impl std::fmt::Debug for OutputSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("OutputSettings").field("tree", &self.tree).finish_non_exhaustive()
    }
}

pub struct Output {
    tree: Mutex<Tree>,
    durability: Durability,
    lower_set: Option<SetNumber>,
    source: Arc<dyn ChunkSource>,
    outbox: Option<Arc<Outbox>>,
    stop: CancellationToken,
}

impl std::fmt::Debug for Output {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Output").field("durability", &self.durability).finish_non_exhaustive()
    }
}

/// Keeps an output's pauses noticed. Dropping it stops that.
#[derive(Debug)]
#[must_use = "without it idle chunks are not sent"]
pub struct Settling(#[expect(dead_code, reason = "held for its Drop")] Task<()>);

impl Output {
    #[must_use]
    pub fn new(settings: OutputSettings) -> Arc<Self> {
        let OutputSettings { tree, durability, lower_set, source, stop } = settings;
        let outbox = tree.outbox.clone();
        let tree = Mutex::new(Tree::new(tree, now_ns()));
        Arc::new(Self { tree, durability, lower_set, source, outbox, stop })
    }

    /// Starts the task that seals what writers leave alone. Call it inside a runtime.
    pub fn start(self: &Arc<Self>) -> Settling {
        let this = Arc::clone(self);
        Settling(task::spawn("results-settle", async move {
            loop {
                tokio::time::sleep(SETTLE_EVERY).await;
                this.tree().settle();
            }
        }))
    }

    /// The tree, with the time told.
    pub fn tree(&self) -> MutexGuard<'_, Tree> {
        let mut tree = self.tree.lock().unwrap_or_else(PoisonError::into_inner);
        tree.tick(now_ns(), clock::boottime().since_boot());
        tree
    }

    #[must_use]
    pub fn durability(&self) -> Durability {
        self.durability
    }

    #[must_use]
    pub fn stop(&self) -> &CancellationToken {
        &self.stop
    }

    fn budget(&self) -> Option<&Arc<Budget>> {
        self.outbox.as_ref().map(|outbox| outbox.budget())
    }

    /// Writes if that needs no waiting; `None`: call [`Self::write`].
    pub fn write_now(&self, inode: u64, offset: u64, data: &[u8]) -> Option<Result<(), Errno>> {
        if self.budget().is_some_and(|budget| budget.is_over()) {
            return None;
        }
        let mut tree = self.tree();
        match tree.missing_for_write(inode, offset, data.len()) {
            Ok(missing) if missing.is_empty() => Some(tree.write(inode, offset, data)),
            Ok(_) => None,
            Err(error) => Some(Err(error)),
        }
    }

    /// Writes, after what it needs has come and the budget has room.
    ///
    /// # Errors
    /// The errno that the writer gets.
    pub async fn write(&self, inode: u64, offset: u64, data: &[u8]) -> Result<(), Errno> {
        if let Some(budget) = self.budget()
            && budget.is_over()
        {
            self.tree().seal_everything();
            self.unless_stopped(budget.room()).await?;
        }
        loop {
            let missing = {
                let mut tree = self.tree();
                let missing = tree.missing_for_write(inode, offset, data.len())?;
                if missing.is_empty() {
                    return tree.write(inode, offset, data);
                }
                missing
            };
            self.load(inode, missing).await?;
        }
    }

    /// Sets the size if that needs no waiting.
    pub fn resize_now(&self, inode: u64, size: u64) -> Option<Result<(), Errno>> {
        let mut tree = self.tree();
        match tree.missing_for_resize(inode, size) {
            Ok(missing) if missing.is_empty() => Some(tree.resize(inode, size)),
            Ok(_) => None,
            Err(error) => Some(Err(error)),
        }
    }

    /// ftruncate and truncate.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub async fn resize(&self, inode: u64, size: u64) -> Result<(), Errno> {
        loop {
            let missing = {
                let mut tree = self.tree();
                let missing = tree.missing_for_resize(inode, size)?;
                if missing.is_empty() {
                    return tree.resize(inode, size);
                }
                missing
            };
            self.load(inode, missing).await?;
        }
    }

    /// setattr as FUSE sends it: size and attributes at once.
    ///
    /// # Errors
    /// As [`Self::write`].
    pub async fn set(&self, inode: u64, size: Option<u64>, set: SetAttributes) -> Result<Attributes, Errno> {
        if let Some(size) = size {
            self.resize(inode, size).await?;
        }
        self.tree().set_attributes(inode, set)
    }

    /// fallocate; only mode 0, which is a size.
    ///
    /// # Errors
    /// EOPNOTSUPP for other modes; as [`Self::write`].
    pub async fn allocate(&self, inode: u64, offset: u64, len: u64, mode: i32) -> Result<(), Errno> {
        let (size, old) = {
            let tree = self.tree();
            (tree.allocate_size(inode, offset, len, mode)?, tree.attributes(inode)?.size)
        };
        if size > old { self.resize(inode, size).await } else { Ok(()) }
    }

    /// Reads if everything is in memory.
    pub fn read_now(&self, inode: u64, offset: u64, len: usize) -> Option<Result<Vec<u8>, Errno>> {
        let pieces = match self.tree().read(inode, offset, len) {
            Ok(pieces) => pieces,
            Err(error) => return Some(Err(error)),
        };
        if pieces.iter().any(|piece| matches!(piece, Piece::Missing { .. })) {
            return None;
        }
        Some(Ok(pieces.iter().fold(Vec::with_capacity(len), |mut out, piece| {
            match piece {
                Piece::Zeros(count) => out.resize(out.len() + count, 0),
                Piece::Bytes(bytes) => out.extend_from_slice(bytes),
                Piece::Missing { .. } => {}
            }
            out
        })))
    }

    /// Reads; exactly what was asked for except at the end of the file.
    ///
    /// # Errors
    /// EIO when home cannot give back what it has.
    pub async fn read(&self, inode: u64, offset: u64, len: usize) -> Result<Vec<u8>, Errno> {
        self.read_until(inode, offset, len, &self.stop).await
    }

    /// [`Self::read`], given up when `until` is cancelled: for the agent itself, that reads on
    /// when the job's mount was aborted.
    ///
    /// # Errors
    /// As [`Self::read`].
    pub async fn read_until(
        &self,
        inode: u64,
        offset: u64,
        len: usize,
        until: &CancellationToken,
    ) -> Result<Vec<u8>, Errno> {
        loop {
            let pieces = self.tree().read(inode, offset, len)?;
            match self.join(inode, pieces, until).await {
                // A writer was faster: home has its bytes by now, and so have we.
                Err(lost) if !self.tree().lacks(inode, &lost) && !until.is_cancelled() => {}
                joined => return joined.map_err(|_| Errno::EIO),
            }
        }
    }

    /// The bytes of all pieces; else the one that home could not give back.
    async fn join(
        &self,
        inode: u64,
        pieces: Vec<Piece>,
        until: &CancellationToken,
    ) -> Result<Vec<u8>, Missing> {
        let mut out = Vec::new();
        for piece in pieces {
            match piece {
                Piece::Zeros(count) => out.resize(out.len() + count, 0),
                Piece::Bytes(bytes) => out.extend_from_slice(&bytes),
                Piece::Missing { missing, start, len } => {
                    let fetched = self.fetch(inode, &missing, until).await;
                    let Ok(bytes) = fetched else { return Err(missing) };
                    let end = bytes.len().min(start + len);
                    out.extend_from_slice(bytes.get(start..end).unwrap_or_default());
                    let zeros = start + len - end.max(start);
                    out.resize(out.len() + zeros, 0);
                }
            }
        }
        Ok(out)
    }

    async fn load(&self, inode: u64, missing: Vec<Missing>) -> Result<(), Errno> {
        for one in missing {
            let bytes = self.fetch(inode, &one, &self.stop).await?;
            self.tree().install(inode, &one, bytes);
        }
        Ok(())
    }

    async fn fetch(&self, inode: u64, missing: &Missing, until: &CancellationToken) -> Result<Bytes, Errno> {
        let (address, id) = match &missing.from {
            MissingFrom::Lower { inode, id } => {
                let set = self.lower_set.ok_or(Errno::EIO)?;
                (ChunkAddress::Set { set, inode: *inode, index: missing.index }, *id)
            }
            MissingFrom::Home(chunk) => {
                let key = chunk.key;
                let address = ChunkAddress::Result { output: key.output, file: key.file, index: key.index };
                (address, chunk.id().ok_or(Errno::EIO)?)
            }
        };
        let first = unless(until, self.source.fetch(address, id, Priority::Demand)).await?;
        // A later life of the file took over the chunk as it is.
        let gone = matches!(first, Err(FetchError::NotFound | FetchError::SourceChanged { .. }));
        let later = if gone { self.tree().newest_file(inode) } else { None };
        let answer = match later {
            Some(file) => {
                let output = self.tree().output();
                let address = ChunkAddress::Result { output, file, index: missing.index };
                unless(until, self.source.fetch(address, id, Priority::Demand)).await?
            }
            None => first,
        };
        answer.map(|chunk| chunk.bytes().clone()).map_err(|error| {
            tracing::warn!(%error, ?address, "a chunk of results could not be read back");
            Errno::EIO
        })
    }

    async fn unless_stopped<T>(&self, future: impl Future<Output = T>) -> Result<T, Errno> {
        unless(&self.stop, future).await
    }

    /// fsync: returns when home has the file as it is now.
    ///
    /// # Errors
    /// EIO when the agent ends first; what home refused, by its own errno.
    pub async fn sync(&self, inode: u64) -> Result<(), Errno> {
        let seq = self.tree().sync(inode)?;
        self.wait(seq).await?;
        self.sticky(inode)
    }

    /// close, before the descriptor is gone. Waits for home only if `publish` is set: the caller
    /// has made sure that it is the opener itself who closes.
    ///
    /// # Errors
    /// As [`Self::sync`].
    pub async fn flush(&self, inode: u64, publish: bool) -> Result<(), Errno> {
        if publish && self.durability == Durability::Close {
            return self.sync(inode).await;
        }
        self.sticky(inode)
    }

    /// Earlier errors of the file.
    ///
    /// # Errors
    /// What home refused.
    pub fn sticky(&self, inode: u64) -> Result<(), Errno> {
        self.tree().error_of(inode).map_or(Ok(()), Err)
    }

    /// fsync of a directory: everything that was done in this output so far.
    ///
    /// # Errors
    /// As [`Self::sync`].
    pub async fn sync_directory(&self, inode: u64) -> Result<(), Errno> {
        let seq = self.tree().last_seq();
        self.wait(seq).await?;
        self.sticky(inode)
    }

    async fn wait(&self, seq: u64) -> Result<(), Errno> {
        match (&self.outbox, self.durability) {
            (Some(outbox), Durability::Fsync | Durability::Close) => {
                self.unless_stopped(outbox.wait_durable(seq)).await?
            }
            (None, _) | (_, Durability::None) => Ok(()),
        }
    }

    /// Removes a name if that needs no waiting.
    pub fn unlink_now(&self, parent: u64, name: &[u8]) -> Option<Result<(), Errno>> {
        let mut tree = self.tree();
        tree.pin_open(parent, name).is_none().then(|| tree.unlink(parent, name))
    }

    /// Removes a name; who has the file open goes on reading it.
    ///
    /// # Errors
    /// The errno that the caller gets.
    pub async fn unlink(&self, parent: u64, name: &[u8]) -> Result<(), Errno> {
        self.pin(parent, name).await?;
        self.tree().unlink(parent, name)
    }

    /// Renames if that needs no waiting.
    pub fn rename_now(&self, from: Place<'_>, to: Place<'_>, no_replace: bool) -> Option<Result<(), Errno>> {
        let mut tree = self.tree();
        let waits = tree.is_closing(from.0, from.1) || tree.pin_open(to.0, to.1).is_some();
        (!waits).then(|| tree.rename(from, to, no_replace))
    }

    /// Renames; who has the replaced file open goes on reading it.
    ///
    /// # Errors
    /// The errno that the caller gets.
    pub async fn rename(&self, from: Place<'_>, to: Place<'_>, no_replace: bool) -> Result<(), Errno> {
        let released = async {
            while self.tree().is_closing(from.0, from.1) {
                tokio::time::sleep(RELEASED_EVERY).await;
            }
        };
        // Still open elsewhere, perhaps: then it is published as it is now, by a copy at home.
        let _in_time: Result<(), _> = tokio::time::timeout(CLOSING_LIMIT, released).await;
        self.pin(to.0, to.1).await?;
        self.tree().rename(from, to, no_replace)
    }

    async fn pin(&self, parent: u64, name: &[u8]) -> Result<(), Errno> {
        let missing = self.tree().pin_open(parent, name);
        let Some((inode, missing)) = missing else { return Ok(()) };
        self.load(inode, missing).await
    }

    /// Waits until no file is open for writing: the kernel tells of the last close of an ended
    /// job some time after it has ended. False when `limit` passed first.
    pub async fn released(&self, limit: Duration) -> bool {
        let gone = async {
            while self.tree().is_being_written() {
                tokio::time::sleep(RELEASED_EVERY).await;
            }
        };
        tokio::time::timeout(limit, gone).await.is_ok()
    }

    /// The kill fence: what is released from now on and was not whole before stays private.
    pub fn fence(&self) {
        self.tree().fence();
    }

    /// After the job's end, before the drain: what is torn or still open ends as a partial file.
    pub fn abandon_open(&self) {
        let mut tree = self.tree();
        tree.fence();
        tree.abandon_open();
    }

    /// What differs from the lower set.
    #[must_use]
    pub fn changes(&self) -> Vec<Change> {
        self.tree().changes()
    }
}

async fn unless<T>(stop: &CancellationToken, future: impl Future<Output = T>) -> Result<T, Errno> {
    tokio::select! {
        value = future => Ok(value),
        () = stop.cancelled() => Err(Errno::EIO),
    }
}

fn now_ns() -> i64 {
    i64::try_from(clock::unix_ms()).unwrap_or(i64::MAX / 1_000_000).saturating_mul(1_000_000)
}
