//! What a job printed, as raw bytes: one file per attempt, addressed by byte offset.
//!
//! Never: acknowledges what is not on disk, stores a byte twice, or leaves a gap.
//! Invariant: the file is a prefix of what the job printed. Past the quota bytes are counted and
//! dropped, and the closed file ends by saying how many. A closed log is read-only on disk.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use bytes::Bytes;
use futures_util::Stream;
use limb_common::id::{AttemptNumber, RunId};
use tokio::sync::watch;

/// 1 GiB: a job that prints more than that in one attempt prints by mistake.
pub const DEFAULT_QUOTA_BYTES: u64 = 1 << 30;
/// What [`LogFile::follow`] reads at once.
const FOLLOW_BYTES: usize = 64 * 1024;

#[derive(Debug, thiserror::Error)]
pub enum LogError {
    #[error("could not use the log {}; hint: check space and permissions there", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("bytes from {offset} were sent where {expected} comes next")]
    Gap { expected: u64, offset: u64 },
    #[error("the log of this attempt is closed")]
    Closed,
}

/// The logs of all attempts. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Logs {
    inner: Arc<LogsInner>,
}

#[derive(Debug)]
struct LogsInner {
    dir: PathBuf,
    quota_bytes: u64,
    open: Mutex<HashMap<(RunId, AttemptNumber), Weak<LogFile>>>,
}

/// One attempt's log.
#[derive(Debug)]
pub struct LogFile {
    path: PathBuf,
    file: File,
    quota_bytes: u64,
    writing: Mutex<Writing>,
    seen: watch::Sender<LogState>,
}

#[derive(Debug)]
struct Writing {
    /// Bytes of the job's output that are taken, stored or dropped.
    taken: u64,
    /// Bytes in the file.
    stored: u64,
    closed: bool,
}

/// What a reader may rely on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LogState {
    /// Bytes that can be read.
    pub len: u64,
    /// Nothing will come after them.
    pub closed: bool,
}

/// A piece of a log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogPiece {
    pub offset: u64,
    pub data: Bytes,
}

impl Logs {
    /// Logs live in `<state>/runs/<run>/<attempt>.log`.
    #[must_use]
    pub fn open(state_dir: &Path) -> Self {
        Self::with_quota(state_dir, DEFAULT_QUOTA_BYTES)
    }

    #[must_use]
    pub fn with_quota(state_dir: &Path, quota_bytes: u64) -> Self {
        let dir = state_dir.join("runs");
        Self { inner: Arc::new(LogsInner { dir, quota_bytes, open: Mutex::default() }) }
    }

    /// Opens or makes the log of an attempt. Everybody who asks gets the same one. Blocks briefly.
    ///
    /// # Errors
    /// [`LogError::Io`].
    pub fn attempt(&self, run: &RunId, attempt: AttemptNumber) -> Result<Arc<LogFile>, LogError> {
        let mut open = lock(&self.inner.open);
        let key = (run.clone(), attempt);
        if let Some(log) = open.get(&key).and_then(Weak::upgrade) {
            return Ok(log);
        }
        let dir = self.inner.dir.join(run.as_str());
        let log = Arc::new(LogFile::open(&dir, attempt, self.inner.quota_bytes)?);
        open.retain(|_, weak| weak.strong_count() > 0);
        open.insert(key, Arc::downgrade(&log));
        Ok(log)
    }

    /// Is there a log of this attempt? (Asking for one makes it.)
    #[must_use]
    pub fn exists(&self, run: &RunId, attempt: AttemptNumber) -> bool {
        self.inner.dir.join(run.as_str()).join(format!("{attempt}.log")).is_file()
    }
}

impl LogFile {
    fn open(dir: &Path, attempt: AttemptNumber, quota_bytes: u64) -> Result<Self, LogError> {
        let path = dir.join(format!("{attempt}.log"));
        let open = || -> io::Result<(File, u64, bool)> {
            std::fs::create_dir_all(dir)?;
            let closed = path.metadata().is_ok_and(|meta| meta.permissions().mode() & 0o200 == 0);
            let mut options = OpenOptions::new();
            options.read(true).mode(0o600);
            if !closed {
                options.write(true).create(true).truncate(false);
            }
            let file = options.open(&path)?;
            if !closed {
                // Of what a crash left, everything counts as taken: so it must be durable too.
                file.sync_all()?;
                for dir in dir.ancestors().take(3) {
                    File::open(dir)?.sync_all()?;
                }
            }
            let len = file.metadata()?.len();
            Ok((file, len, closed))
        };
        let (file, len, closed) = open().map_err(|source| LogError::Io { path: path.clone(), source })?;
        let writing = Mutex::new(Writing { taken: len, stored: len, closed });
        Ok(Self { path, file, quota_bytes, writing, seen: watch::Sender::new(LogState { len, closed }) })
    }

    /// Takes bytes that start at `offset` of the job's output. What is there already is skipped.
    /// Not durable before [`Self::sync`]. Blocks.
    ///
    /// # Errors
    /// [`LogError::Gap`] when bytes before these are missing.
    pub fn append(&self, offset: u64, data: &[u8]) -> Result<(), LogError> {
        let mut writing = lock(&self.writing);
        if writing.closed {
            return Err(LogError::Closed);
        }
        let end = offset.saturating_add(data.len() as u64);
        // Past the quota nothing is kept, so nothing can be missing: after a restart home does
        // not know how much it dropped before, and the sender need not have it any more.
        if offset > writing.taken && writing.stored < self.quota_bytes && !data.is_empty() {
            return Err(LogError::Gap { expected: writing.taken, offset });
        }
        if end > writing.taken && !data.is_empty() {
            let stored = writing.stored;
            if stored < self.quota_bytes {
                let skip = usize::try_from(stored.saturating_sub(offset)).unwrap_or(usize::MAX);
                let room = usize::try_from(self.quota_bytes - stored).unwrap_or(usize::MAX);
                let fresh = data.get(skip..).unwrap_or_default();
                let fresh = &fresh[..fresh.len().min(room)];
                self.file.write_all_at(fresh, stored).map_err(|source| self.failed(source))?;
                writing.stored += fresh.len() as u64;
            }
            writing.taken = end;
        }
        Ok(())
    }

    /// Makes everything taken so far durable, shows it to readers, and says up to where that is:
    /// the offset to acknowledge. Blocks.
    ///
    /// # Errors
    /// [`LogError::Io`]; then nothing more is acknowledged.
    pub fn sync(&self) -> Result<u64, LogError> {
        let (taken, stored, closed) = {
            let writing = lock(&self.writing);
            (writing.taken, writing.stored, writing.closed)
        };
        let seen = *self.seen.borrow();
        if stored > seen.len && !closed {
            self.file.sync_data().map_err(|source| self.failed(source))?;
            self.seen.send_if_modified(|state| {
                let grew = stored > state.len;
                state.len = state.len.max(stored);
                grew
            });
        }
        Ok(taken)
    }

    /// Ends the log: followers end, appends are refused. Doing it again changes nothing. Blocks.
    ///
    /// # Errors
    /// [`LogError::Io`].
    pub fn close(&self) -> Result<(), LogError> {
        let mut writing = lock(&self.writing);
        if writing.closed {
            return Ok(());
        }
        let dropped = writing.taken - writing.stored;
        if dropped > 0 {
            let marker = format!("\n[limb: {dropped} bytes dropped]\n");
            let at = writing.stored;
            self.file.write_all_at(marker.as_bytes(), at).map_err(|source| self.failed(source))?;
            writing.stored += marker.len() as u64;
        }
        let read_only = std::fs::Permissions::from_mode(0o400);
        self.file
            .set_permissions(read_only)
            .and_then(|()| self.file.sync_all())
            .map_err(|source| self.failed(source))?;
        writing.closed = true;
        self.seen.send_replace(LogState { len: writing.stored, closed: true });
        Ok(())
    }

    #[must_use]
    pub fn state(&self) -> LogState {
        *self.seen.borrow()
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// At most `max_bytes` from `offset`; empty at the end. Blocks.
    ///
    /// # Errors
    /// [`LogError::Io`].
    pub fn read(&self, offset: u64, max_bytes: usize) -> Result<Bytes, LogError> {
        let left = usize::try_from(self.state().len.saturating_sub(offset)).unwrap_or(usize::MAX);
        let mut data = vec![0; left.min(max_bytes)];
        self.file.read_exact_at(&mut data, offset).map_err(|source| self.failed(source))?;
        Ok(data.into())
    }

    /// Everything from `offset` on, as it comes; ends when the log is closed.
    pub fn follow(
        self: Arc<Self>,
        offset: u64,
    ) -> impl Stream<Item = Result<LogPiece, LogError>> + Send + 'static {
        let seen = self.seen.subscribe();
        futures_util::stream::try_unfold((self, seen, offset), |(log, mut seen, offset)| async move {
            // The sender lives in `log`, so this ends only with a state that fits.
            let ready = seen.wait_for(|state| state.len > offset || state.closed).await;
            if ready.map_or(true, |state| state.len <= offset) {
                return Ok(None);
            }
            let reading = Arc::clone(&log);
            let data = tokio::task::spawn_blocking(move || reading.read(offset, FOLLOW_BYTES))
                .await
                .map_err(|join| log.failed(io::Error::other(join)))??;
            let next = offset + data.len() as u64;
            Ok(Some((LogPiece { offset, data }, (log, seen, next))))
        })
    }

    fn failed(&self, source: io::Error) -> LogError {
        LogError::Io { path: self.path.clone(), source }
    }
}

/// A poisoned lock guards numbers that are right at every step, so it is used on.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use futures_util::StreamExt as _;
    use proptest::prelude::*;

    use super::*;

    fn open(dir: &Path, run: &RunId, quota: u64) -> Arc<LogFile> {
        Logs::with_quota(dir, quota).attempt(run, AttemptNumber(1)).unwrap()
    }

    #[test]
    fn a_gap_is_refused_and_a_closed_log_stays_closed() {
        let dir = tempfile::tempdir().unwrap();
        let run = RunId::random();
        let log = open(dir.path(), &run, 100);
        log.append(0, b"abc").unwrap();
        assert!(matches!(log.append(5, b"x"), Err(LogError::Gap { expected: 3, offset: 5 })));
        assert_eq!(log.read(0, 10).unwrap(), Bytes::new(), "not shown before it is durable");
        assert_eq!(log.sync().unwrap(), 3);
        log.close().unwrap();
        log.close().unwrap();
        assert!(matches!(log.append(3, b"x"), Err(LogError::Closed)));
        drop(log);
        let log = open(dir.path(), &run, 100);
        assert_eq!(log.state(), LogState { len: 3, closed: true });
        assert!(matches!(log.append(3, b"x"), Err(LogError::Closed)));
        assert_eq!(log.read(1, 10).unwrap(), "bc");
    }

    #[test]
    fn past_the_quota_bytes_are_counted_also_over_a_restart() {
        let dir = tempfile::tempdir().unwrap();
        let run = RunId::random();
        let log = open(dir.path(), &run, 4);
        log.append(0, b"abcdef").unwrap();
        assert_eq!(log.sync().unwrap(), 6);
        drop(log);
        let log = open(dir.path(), &run, 4);
        assert_eq!(log.sync().unwrap(), 4);
        log.append(6, b"gh").unwrap();
        assert_eq!(log.sync().unwrap(), 8);
        log.close().unwrap();
        assert_eq!(log.read(0, 100).unwrap(), "abcd\n[limb: 4 bytes dropped]\n");
    }

    #[tokio::test]
    async fn a_follower_gets_everything_and_ends_with_the_attempt() {
        let dir = tempfile::tempdir().unwrap();
        let log = open(dir.path(), &RunId::random(), 1 << 20);
        log.append(0, b"one").unwrap();
        log.sync().unwrap();
        let mut pieces = Box::pin(Arc::clone(&log).follow(1));
        let first = pieces.next().await.unwrap().unwrap();
        assert_eq!((first.offset, first.data), (1, Bytes::from("ne")));
        assert!(futures_util::poll!(pieces.next()).is_pending());
        log.append(3, b"two").unwrap();
        log.close().unwrap();
        assert_eq!(pieces.next().await.unwrap().unwrap().data, "two");
        assert!(pieces.next().await.is_none());
    }

    proptest! {
        #[test]
        fn cuts_and_overlaps_leave_exactly_the_bytes(
            text in prop::collection::vec(any::<u8>(), 0..400),
            steps in prop::collection::vec((0_usize..400, 0_usize..60, any::<bool>()), 0..60),
        ) {
            let dir = tempfile::tempdir().unwrap();
            let run = RunId::random();
            let mut log = open(dir.path(), &run, 1 << 20);
            let mut sent = 0;
            for (back, len, reopen) in steps {
                if reopen {
                    drop(log);
                    log = open(dir.path(), &run, 1 << 20);
                }
                let acked = usize::try_from(log.sync().unwrap()).unwrap();
                prop_assert_eq!(acked, sent);
                let from = acked.saturating_sub(back);
                let to = (from + len).min(text.len());
                log.append(from as u64, &text[from..to]).unwrap();
                sent = sent.max(to);
            }
            log.append(sent as u64, &text[sent..]).unwrap();
            log.close().unwrap();
            prop_assert_eq!(&std::fs::read(log.path()).unwrap(), &text);
        }
    }
}
