//! The ordered log of what home has to learn: chunks, and entries that come after the chunks they
//! publish. One per agent, shared by its outputs; the link sends it front to back and starts over
//! from what is not acknowledged after each cut.
//!
//! Never: drop an item that home has not acknowledged, unless nobody needs it any more (a chunk
//! that was overwritten before it was sent, and that no publish refers to).
//!
//! Invariant: seq has no gaps; an entry stands after every chunk that it publishes.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use limb_common::assignment::OutputNumber;
use limb_common::manifest::Inode;
use limb_common::report::DrainReport;
use nix::errno::Errno;
use tokio::sync::{Notify, watch};
use tokio_util::sync::CancellationToken;

use super::budget::Budget;
use super::chunk::{ChunkKey, PublishedChunk, SealedChunk};
use super::content::Base;

/// How many names a drain report lists.
const NAMED: usize = 100;

/// How a content becomes visible.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PublishKind {
    Final,
    Snapshot,
    Grown,
}

/// One change at home. Paths are relative to the output.
#[derive(Clone, Debug)]
pub enum Op {
    Created { file: u64, path: Vec<u8>, mode: u32, base: FileBase },
    Published(Publish),
    Renamed { from: Vec<u8>, to: Vec<u8>, no_replace: bool },
    Removed { path: Vec<u8>, directory: bool },
    DirectoryMade { path: Vec<u8>, mode: u32 },
    SymlinkMade { path: Vec<u8>, target: Vec<u8> },
    HardLinkMade { existing: Vec<u8>, path: Vec<u8> },
    AttributesSet { path: Vec<u8>, mode: Option<u32>, mtime_ns: Option<i64> },
    XattrSet { path: Vec<u8>, name: Vec<u8>, value: Option<Vec<u8>> },
    Abandoned { file: u64, keep: bool, path: Vec<u8>, size: u64, chunks: Vec<(u64, PublishedChunk)> },
}

/// What a new file at home starts from.
pub type FileBase = Base;

#[derive(Clone, Debug)]
pub struct Publish {
    pub file: u64,
    pub path: Vec<u8>,
    pub size: u64,
    /// Keeps what it publishes alive until home has it.
    pub chunks: Vec<(u64, PublishedChunk)>,
    pub mode: u32,
    pub mtime_ns: i64,
    pub kind: PublishKind,
}

/// Home said no to something; the run should show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub output: OutputNumber,
    pub path: Vec<u8>,
    pub errno: i32,
    pub detail: String,
}

pub type RefusalCallback = Box<dyn Fn(Refusal) + Send + Sync>;

/// How much may be held.
#[derive(Clone, Copy, Debug)]
pub struct OutboxSettings {
    /// Written and not yet at home; beyond it writers wait.
    pub dirty_bytes: u64,
    /// At home, but still in memory to be read back fast.
    pub clean_bytes: u64,
}

/// Something to send.
#[derive(Clone, Debug)]
pub enum Outgoing {
    Chunk(Arc<SealedChunk>),
    Entry { seq: u64, output: OutputNumber, op: Arc<Op> },
}

#[derive(Debug)]
enum Item {
    Chunk(Weak<SealedChunk>),
    Entry { seq: u64, output: OutputNumber, inode: u64, op: Arc<Op> },
}

/// What fsync says of a file until it is written anew.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Sticky {
    errno: Errno,
    /// The file's life at home that it is about; `None`: its names or attributes.
    life: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Superseded {
    below: u64,
    until_seq: u64,
}

#[derive(Debug, Default)]
struct Log {
    items: VecDeque<Item>,
    /// Position of the first of `items`; positions are never reused.
    first: u64,
    last_seq: u64,
    durable_seq: u64,
    last_file: u64,
    unacknowledged: HashMap<ChunkKey, Weak<SealedChunk>>,
    clean: VecDeque<Weak<SealedChunk>>,
    clean_bytes: u64,
    errors: BTreeMap<(OutputNumber, u64), Sticky>,
    /// Files whose lives below a number are over and built upon by nobody, until home has
    /// answered the last entry about them.
    superseded: HashMap<(OutputNumber, u64), Superseded>,
    kept_partial: Vec<String>,
    bytes_stored: u64,
    files_published: u64,
}

pub struct Outbox {
    log: Mutex<Log>,
    /// Something was added.
    added: Notify,
    durable: watch::Sender<u64>,
    budget: Arc<Budget>,
    settings: OutboxSettings,
    refused: RefusalCallback,
    closed: CancellationToken,
}

impl std::fmt::Debug for Outbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Outbox").field("budget", &self.budget).finish_non_exhaustive()
    }
}

impl Outbox {
    /// `closed` fires when the agent ends: nobody waits for home after that.
    #[must_use]
    pub fn new(settings: OutboxSettings, refused: RefusalCallback, closed: CancellationToken) -> Arc<Self> {
        Arc::new(Self {
            log: Mutex::new(Log::default()),
            added: Notify::new(),
            durable: watch::Sender::new(0),
            budget: Budget::new(settings.dirty_bytes),
            settings,
            refused,
            closed,
        })
    }

    #[must_use]
    pub fn budget(&self) -> &Arc<Budget> {
        &self.budget
    }

    #[must_use]
    pub fn closed(&self) -> &CancellationToken {
        &self.closed
    }

    fn lock(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn new_file(&self) -> u64 {
        let mut log = self.lock();
        log.last_file += 1;
        log.last_file
    }

    pub(crate) fn push_chunk(&self, chunk: &Arc<SealedChunk>) {
        let mut log = self.lock();
        log.items.push_back(Item::Chunk(Arc::downgrade(chunk)));
        log.unacknowledged.insert(chunk.key, Arc::downgrade(chunk));
        drop(log);
        self.added.notify_waiters();
    }

    /// Appends an entry; `inode` is whose fsync reports its refusal.
    pub(crate) fn push(&self, output: OutputNumber, inode: u64, op: Op) -> u64 {
        let mut log = self.lock();
        log.last_seq += 1;
        let seq = log.last_seq;
        if let Op::Abandoned { keep: true, path, .. } = &op {
            log.kept_partial.push(format!("{} (kept as .partial)", String::from_utf8_lossy(path)));
        }
        log.items.push_back(Item::Entry { seq, output, inode, op: Arc::new(op) });
        drop(log);
        self.added.notify_waiters();
        seq
    }

    #[must_use]
    pub fn last_seq(&self) -> u64 {
        self.lock().last_seq
    }

    #[must_use]
    pub fn durable_seq(&self) -> u64 {
        *self.durable.borrow()
    }

    /// A sticky error of this inode.
    pub(crate) fn error_of(&self, output: OutputNumber, inode: u64) -> Option<Errno> {
        self.lock().errors.get(&(output, inode)).map(|sticky| sticky.errno)
    }

    pub(crate) fn clear_error(&self, output: OutputNumber, inode: u64) {
        self.lock().errors.remove(&(output, inode));
    }

    /// Nobody needs the file's lives below this number any more, whatever home said, or will still
    /// say, of them: it was started over, or is gone.
    pub(crate) fn supersede(&self, output: OutputNumber, inode: u64, below: u64) {
        let (mut log, key) = (self.lock(), (output, inode));
        if log.errors.get(&key).is_some_and(|sticky| sticky.life.is_some_and(|life| life < below)) {
            log.errors.remove(&key);
        }
        let until_seq = log.last_seq;
        if until_seq > log.durable_seq {
            log.superseded.insert(key, Superseded { below, until_seq });
        }
    }

    /// Waits until home has everything up to `seq` on disk.
    ///
    /// # Errors
    /// EIO when the agent ends first.
    pub async fn wait_durable(&self, seq: u64) -> Result<(), Errno> {
        let mut durable = self.durable.subscribe();
        tokio::select! {
            reached = durable.wait_for(|now| *now >= seq) => reached.map(drop).map_err(|_| Errno::EIO),
            () = self.closed.cancelled() => Err(Errno::EIO),
        }
    }

    // ---- the link's side

    /// The next item at or after `position` that still has to be sent, and the position after it.
    /// Waits for one.
    pub async fn next(&self, mut position: u64) -> (Outgoing, u64) {
        loop {
            let added = self.added.notified();
            let mut added = std::pin::pin!(added);
            added.as_mut().enable();
            match self.next_now(position) {
                Ok(found) => return found,
                Err(end) => position = position.max(end),
            }
            added.await;
        }
    }

    /// What comes next, or where the log ends: both from one look, since what is added between
    /// two would be stepped over and never sent.
    fn next_now(&self, position: u64) -> Result<(Outgoing, u64), u64> {
        let log = self.lock();
        let skip = usize::try_from(position.saturating_sub(log.first)).unwrap_or(usize::MAX);
        for (at, item) in log.items.iter().enumerate().skip(skip) {
            let after = log.first + at as u64 + 1;
            match item {
                Item::Chunk(chunk) => {
                    if let Some(chunk) =
                        chunk.upgrade().filter(|chunk| log.unacknowledged.contains_key(&chunk.key))
                    {
                        return Ok((Outgoing::Chunk(chunk), after));
                    }
                }
                Item::Entry { seq, output, op, .. } if *seq > log.durable_seq => {
                    return Ok((Outgoing::Entry { seq: *seq, output: *output, op: Arc::clone(op) }, after));
                }
                Item::Entry { .. } => {}
            }
        }
        Err(log.first + log.items.len() as u64)
    }

    /// Changes with every acknowledgement.
    #[must_use]
    pub fn progress(&self) -> (u64, u64) {
        let log = self.lock();
        (log.durable_seq, log.bytes_stored)
    }

    /// Home has this chunk on disk, or (`errno`) will not take it.
    pub fn chunk_settled(&self, key: ChunkKey, errno: Option<i32>) {
        let mut log = self.lock();
        let Some(chunk) = log.unacknowledged.remove(&key) else { return };
        let Some(chunk) = chunk.upgrade() else {
            log.trim();
            return;
        };
        chunk.settle(errno.is_none());
        if errno.is_none() {
            log.bytes_stored += u64::from(chunk.len);
            log.clean_bytes += u64::from(chunk.len);
            log.clean.push_back(Arc::downgrade(&chunk));
            log.forget(self.settings.clean_bytes);
        }
        log.trim();
    }

    /// Home refused an entry. Comes again after a reconnect; only the first counts.
    pub fn entry_refused(&self, seq: u64, errno: i32, detail: &str) {
        let mut log = self.lock();
        let found = log.items.iter().find_map(|item| match item {
            Item::Entry { seq: at, output, inode, op } if *at == seq => {
                Some((*output, *inode, Arc::clone(op)))
            }
            Item::Entry { .. } | Item::Chunk(_) => None,
        });
        let Some((output, inode, op)) = found.filter(|_| seq > log.durable_seq) else { return };
        let errno_kind = Errno::from_raw(errno);
        let errno_known = if errno_kind == Errno::UnknownErrno { Errno::EIO } else { errno_kind };
        let (key, sticky) = ((output, inode), Sticky { errno: errno_known, life: op.life() });
        let over = |life| log.superseded.get(&key).is_some_and(|superseded| life < superseded.below);
        if sticky.life.is_some_and(over) {
            tracing::debug!(seq, errno, detail, "home refused what nobody needs any more");
            return;
        }
        let first = log.errors.insert(key, sticky) != Some(sticky);
        drop(log);
        if first {
            let (path, detail) = (op.path().to_vec(), detail.to_owned());
            (self.refused)(Refusal { output, path, errno, detail });
        }
    }

    pub fn durable_up_to(&self, seq: u64) {
        let mut log = self.lock();
        // Home cannot have what we never made: such a home is confused, and waiters must not pass.
        if seq > log.last_seq || seq <= log.durable_seq {
            return;
        }
        let mut published = 0;
        for item in &log.items {
            match item {
                Item::Entry { seq: at, .. } if *at > seq => break,
                Item::Entry { seq: at, output, inode, op } => {
                    let refused = log.errors.contains_key(&(*output, *inode));
                    let news = *at > log.durable_seq && matches!(**op, Op::Published(_));
                    published += u64::from(news && !refused);
                }
                Item::Chunk(_) => {}
            }
        }
        log.files_published += published;
        log.durable_seq = seq;
        log.superseded.retain(|_, superseded| superseded.until_seq > seq);
        log.trim();
        drop(log);
        self.durable.send_replace(seq);
    }

    // ---- the end

    #[must_use]
    pub fn is_empty(&self) -> bool {
        let log = self.lock();
        log.last_seq == log.durable_seq
    }

    /// Waits until everything is durable or `deadline` has passed; names what is not.
    pub async fn drain(&self, deadline: Duration) -> DrainReport {
        let last = self.last_seq();
        let drained = tokio::time::timeout(deadline, self.wait_durable(last)).await;
        let log = self.lock();
        let mut unsaved: Vec<String> = log.kept_partial.iter().take(NAMED).cloned().collect();
        for item in &log.items {
            if let Item::Entry { seq, op, .. } = item
                && *seq > log.durable_seq
                && let Op::Published(Publish { path, .. }) | Op::Abandoned { path, keep: true, .. } = &**op
            {
                unsaved.push(String::from_utf8_lossy(path).into_owned());
            }
        }
        unsaved.dedup();
        unsaved.truncate(NAMED);
        DrainReport {
            complete: matches!(drained, Ok(Ok(()))) && log.errors.is_empty(),
            unsaved,
            bytes_sent: log.bytes_stored,
            files_published: log.files_published,
            workdir_changes_left: Vec::new(),
        }
    }
}

impl Log {
    /// Drops what is done from the front.
    fn trim(&mut self) {
        while let Some(item) = self.items.front() {
            let done = match item {
                Item::Entry { seq, .. } => *seq <= self.durable_seq,
                Item::Chunk(chunk) => {
                    chunk.upgrade().is_none_or(|chunk| !self.unacknowledged.contains_key(&chunk.key))
                }
            };
            if !done {
                return;
            }
            self.items.pop_front();
            self.first += 1;
        }
        if self.items.is_empty() {
            self.unacknowledged.retain(|_, chunk| chunk.strong_count() > 0);
        }
    }

    fn forget(&mut self, limit: u64) {
        while self.clean_bytes > limit {
            let Some(oldest) = self.clean.pop_front() else {
                self.clean_bytes = 0;
                return;
            };
            if let Some(chunk) = oldest.upgrade() {
                chunk.forget_bytes();
                self.clean_bytes = self.clean_bytes.saturating_sub(u64::from(chunk.len));
            } else {
                // Its length died with it; what is left is counted again.
                self.clean_bytes =
                    self.clean.iter().filter_map(Weak::upgrade).map(|chunk| u64::from(chunk.len)).sum();
            }
        }
    }
}

impl Op {
    /// The life of a file at home whose content it is about.
    fn life(&self) -> Option<u64> {
        match self {
            Self::Created { file, .. }
            | Self::Abandoned { file, .. }
            | Self::Published(Publish { file, .. }) => Some(*file),
            Self::Renamed { .. }
            | Self::Removed { .. }
            | Self::DirectoryMade { .. }
            | Self::SymlinkMade { .. }
            | Self::HardLinkMade { .. }
            | Self::AttributesSet { .. }
            | Self::XattrSet { .. } => None,
        }
    }

    /// The name that an error about it should show.
    #[must_use]
    pub fn path(&self) -> &[u8] {
        match self {
            Self::Created { path, .. }
            | Self::Removed { path, .. }
            | Self::DirectoryMade { path, .. }
            | Self::SymlinkMade { path, .. }
            | Self::HardLinkMade { path, .. }
            | Self::AttributesSet { path, .. }
            | Self::XattrSet { path, .. }
            | Self::Abandoned { path, .. } => path,
            Self::Published(publish) => &publish.path,
            Self::Renamed { to, .. } => to,
        }
    }
}

/// The inode of the lower set that a base names.
#[must_use]
pub fn lower_inode(base: FileBase) -> Option<Inode> {
    match base {
        Base::Lower(inode) => Some(inode),
        Base::Nothing | Base::File(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Home is slow to refuse: by then the file was written anew, or is gone. Its error would fail
    /// an fsync of other bytes, or the whole run.
    #[test]
    fn a_late_refusal_of_what_nobody_needs_is_no_error() {
        const OUTPUT: OutputNumber = OutputNumber(0);
        let settings = OutboxSettings { dirty_bytes: 1 << 20, clean_bytes: 0 };
        let outbox = Outbox::new(settings, Box::new(|_| {}), CancellationToken::new());
        let created = |inode, file| {
            let base = Base::Nothing;
            outbox.push(OUTPUT, inode, Op::Created { file, path: b"x".to_vec(), mode: 0o600, base })
        };
        let full = Errno::ENOSPC as i32;
        let [old, other] = [created(7, 1), created(8, 2)];
        outbox.supersede(OUTPUT, 7, 3);
        let new = created(7, 3);
        outbox.entry_refused(old, full, "");
        outbox.entry_refused(other, full, "");
        assert_eq!((outbox.error_of(OUTPUT, 7), outbox.error_of(OUTPUT, 8)), (None, Some(Errno::ENOSPC)));
        // Its own refusal counts.
        outbox.entry_refused(new, full, "");
        assert_eq!(outbox.error_of(OUTPUT, 7), Some(Errno::ENOSPC));
        // A file that is gone: refused before, or after.
        let path = b"x".to_vec();
        let removed = outbox.push(OUTPUT, 8, Op::Removed { path, directory: false });
        outbox.supersede(OUTPUT, 7, u64::MAX);
        outbox.supersede(OUTPUT, 8, u64::MAX);
        outbox.entry_refused(new, full, "");
        assert_eq!((outbox.error_of(OUTPUT, 7), outbox.error_of(OUTPUT, 8)), (None, None));
        // That it is still there is worth saying.
        outbox.entry_refused(removed, Errno::EISDIR as i32, "");
        assert_eq!(outbox.error_of(OUTPUT, 8), Some(Errno::EISDIR));
        outbox.durable_up_to(removed);
        assert!(outbox.lock().superseded.is_empty());
    }

    /// What is added while the reader finds nothing must still be sent: a skipped entry would
    /// leave its fsync waiting for ever.
    #[test]
    fn nothing_is_stepped_over_while_writers_add() {
        const ENTRIES: u64 = 200_000;
        let settings = OutboxSettings { dirty_bytes: 1 << 20, clean_bytes: 0 };
        let outbox = Outbox::new(settings, Box::new(|_| {}), CancellationToken::new());
        let seen = Arc::new(std::sync::atomic::AtomicU64::new(0));
        let writer = {
            let (outbox, seen) = (Arc::clone(&outbox), Arc::clone(&seen));
            std::thread::spawn(move || {
                for inode in 0..ENTRIES {
                    // One at a time, after a pause that varies: it meets the reader at the end of
                    // the log, between its look and its wait.
                    while seen.load(std::sync::atomic::Ordering::Acquire) < inode {
                        std::hint::spin_loop();
                    }
                    (0..inode % 97).for_each(|_| std::hint::spin_loop());
                    let op = Op::Removed { path: b"x".to_vec(), directory: false };
                    outbox.push(OutputNumber(0), inode, op);
                }
            })
        };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let (mut position, mut expected) = (0, 1);
            while expected <= ENTRIES {
                let next = tokio::time::timeout(std::time::Duration::from_secs(10), outbox.next(position));
                let (outgoing, after) = next.await.expect("an entry was stepped over");
                match outgoing {
                    Outgoing::Entry { seq, .. } => assert_eq!(seq, expected),
                    Outgoing::Chunk(_) => panic!("no chunk was added"),
                }
                seen.store(expected, std::sync::atomic::Ordering::Release);
                (position, expected) = (after, expected + 1);
            }
        });
        writer.join().unwrap();
    }
}
