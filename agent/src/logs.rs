//! What the job prints, from its pipe to home: raw bytes under offsets that have no gaps.
//!
//! ```text
//! pipe ── capture thread ──> LogBuffer: RAM ─> unlinked file ─> (oldest goes) ── sender ──> home
//! ```
//!
//! Never: wait for home while the job prints, read the bytes as text, or lose a byte without
//! saying so where it was. Bytes get their offset when they are first handed out for sending,
//! so a gap in what the job printed is no gap in what home stores.

mod spill;

use std::collections::VecDeque;
use std::io::Read;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::watch;

use spill::Spill;

/// 16 MiB: some seconds of a chatty job over a slow uplink.
const RAM_BYTES: usize = 16 << 20;
/// 256 MiB on the agent's private directory: an outage of 20 minutes at 200 kB/s.
const SPILL_BYTES: u64 = 256 << 20;
/// One read of the pipe: what the kernel holds in it.
const READ_BYTES: usize = 64 << 10;

/// How much is kept while home cannot take it.
#[derive(Clone, Copy, Debug)]
pub struct LogLimits {
    pub ram_bytes: usize,
    pub spill_bytes: u64,
}

impl Default for LogLimits {
    fn default() -> Self {
        Self { ram_bytes: RAM_BYTES, spill_bytes: SPILL_BYTES }
    }
}

/// Home says that it has something other than what was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("home is at log offset {home}, but this box has bytes {from} to {to}")]
pub struct OffsetMismatch {
    pub home: u64,
    pub from: u64,
    pub to: u64,
}

/// Bytes on their way home. Shared by the capture thread and the sender.
#[derive(Debug)]
pub struct LogBuffer {
    inner: Mutex<Inner>,
    /// Changes whenever something was added, acknowledged or finished.
    changed: watch::Sender<u64>,
}

#[derive(Debug)]
struct Inner {
    /// Offset of the first byte that home has not acknowledged.
    acknowledged: u64,
    /// Handed out at least once and not acknowledged. Follows `acknowledged`.
    in_flight: VecDeque<u8>,
    /// How much of `in_flight` was handed out since the last resume.
    sent: usize,
    /// The oldest bytes that were never handed out.
    waiting: VecDeque<u8>,
    /// What follows `waiting`.
    spill: Spill,
    /// Lost from before `waiting` and not yet said.
    dropped: u64,
    ram_bytes: usize,
    finished: bool,
}

impl LogBuffer {
    /// A buffer that spills into an unlinked file in `private`.
    #[must_use]
    pub fn new(private: &Path, limits: LogLimits) -> Arc<Self> {
        let inner = Inner {
            acknowledged: 0,
            in_flight: VecDeque::new(),
            sent: 0,
            waiting: VecDeque::new(),
            spill: Spill::new(private, limits.spill_bytes),
            dropped: 0,
            ram_bytes: limits.ram_bytes,
            finished: false,
        };
        Arc::new(Self { inner: Mutex::new(inner), changed: watch::Sender::new(0) })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // Each method leaves the state whole, so a panic elsewhere is no reason to lose the log.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn note_change(&self) {
        self.changed.send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Adds what the job printed. Never waits for home; drops the oldest unsent bytes if it must.
    pub fn append(&self, bytes: &[u8]) {
        let mut inner = self.lock();
        for piece in bytes.chunks(READ_BYTES) {
            inner.append(piece);
        }
        drop(inner);
        self.note_change();
    }

    /// Nothing will be added any more.
    pub fn finish(&self) {
        self.lock().finished = true;
        self.note_change();
    }

    /// The next bytes to send, with their offset; empty when there are none or `window` bytes
    /// are unacknowledged already.
    #[must_use]
    pub fn next(&self, most: usize, window: usize) -> (u64, Vec<u8>) {
        self.lock().next(most, window)
    }

    /// How many bytes may be handed out now, with at most `window` unacknowledged.
    #[must_use]
    pub fn sendable(&self, window: usize) -> u64 {
        self.lock().sendable(window)
    }

    /// Everything before this is home.
    #[must_use]
    pub fn acknowledged(&self) -> u64 {
        self.lock().acknowledged
    }

    /// Whether something was handed out that home has not acknowledged.
    #[must_use]
    pub fn has_in_flight(&self) -> bool {
        !self.lock().in_flight.is_empty()
    }

    /// Whether home lacks something.
    #[must_use]
    pub fn has_outstanding(&self) -> bool {
        self.lock().outstanding() > 0
    }

    /// Home has everything before `offset`.
    pub fn acknowledge(&self, offset: u64) -> Result<(), OffsetMismatch> {
        let result = self.lock().acknowledge(offset);
        self.note_change();
        result
    }

    /// A new stream: home goes on from `offset`, and so do we.
    pub fn resume(&self, offset: u64) -> Result<(), OffsetMismatch> {
        let mut inner = self.lock();
        inner.acknowledge(offset)?;
        inner.sent = 0;
        drop(inner);
        self.note_change();
        Ok(())
    }

    /// Finished, and all of it is home.
    #[must_use]
    pub fn is_drained(&self) -> bool {
        let inner = self.lock();
        inner.finished && inner.outstanding() == 0
    }

    /// Notes changes; see [`tokio::sync::watch`].
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// Waits until the output has ended and all of it is home, at most for `within`. To be
    /// called when the job is over. Gives the number of bytes that are not home: 0 is good.
    pub async fn flush(&self, within: Duration) -> u64 {
        let mut changes = self.changes();
        let all_home = changes.wait_for(|_| self.is_drained());
        let _in_time = tokio::time::timeout(within, all_home).await.is_ok();
        self.lock().outstanding()
    }
}

impl Inner {
    fn sendable(&self, window: usize) -> u64 {
        let again = self.in_flight.len() - self.sent;
        let room = window.saturating_sub(self.in_flight.len());
        again as u64 + self.never_sent().min(room as u64)
    }

    fn never_sent(&self) -> u64 {
        self.waiting.len() as u64 + self.spill.len() + u64::from(self.dropped > 0)
    }

    fn outstanding(&self) -> u64 {
        self.in_flight.len() as u64 + self.never_sent()
    }

    fn append(&mut self, piece: &[u8]) {
        if self.spill.is_empty() && self.waiting.len() + piece.len() <= self.ram_bytes {
            self.waiting.extend(piece);
            return;
        }
        while !self.spill.push(piece) {
            // The oldest are all of those in RAM; the file's front takes their place.
            self.dropped += self.waiting.len() as u64;
            self.waiting.clear();
            if self.spill.is_empty() {
                self.waiting.extend(piece);
                return;
            }
            self.refill();
        }
    }

    fn refill(&mut self) {
        let lost = self.spill.pop_into(&mut self.waiting, self.ram_bytes);
        self.dropped += lost;
    }

    fn next(&mut self, most: usize, window: usize) -> (u64, Vec<u8>) {
        if self.sent == self.in_flight.len() {
            self.hand_out(most.min(window.saturating_sub(self.in_flight.len())));
        }
        let offset = self.acknowledged + self.sent as u64;
        let bytes: Vec<u8> = self.in_flight.range(self.sent..).take(most).copied().collect();
        self.sent += bytes.len();
        (offset, bytes)
    }

    /// Gives the next bytes their offsets.
    fn hand_out(&mut self, most: usize) {
        if most == 0 {
            return;
        }
        if self.dropped > 0 {
            let marker = format!("\n[limb: {} bytes dropped]\n", self.dropped);
            self.in_flight.extend(marker.as_bytes());
            self.dropped = 0;
            return;
        }
        if self.waiting.is_empty() {
            self.refill();
        }
        let count = most.min(self.waiting.len());
        self.in_flight.extend(self.waiting.drain(..count));
    }

    fn acknowledge(&mut self, offset: u64) -> Result<(), OffsetMismatch> {
        let to = self.acknowledged + self.in_flight.len() as u64;
        let mismatch = OffsetMismatch { home: offset, from: self.acknowledged, to };
        let count = offset.checked_sub(self.acknowledged).ok_or(mismatch)?;
        let count =
            usize::try_from(count).ok().filter(|count| *count <= self.in_flight.len()).ok_or(mismatch)?;
        self.in_flight.drain(..count);
        self.sent = self.sent.saturating_sub(count);
        self.acknowledged = offset;
        Ok(())
    }
}

/// Copies the job's output into `buffer` on a thread of its own, until the last writer is gone.
/// The buffer is finished then, and also when reading fails.
pub fn capture(
    mut output: impl Read + Send + 'static,
    buffer: Arc<LogBuffer>,
) -> std::io::Result<std::thread::JoinHandle<()>> {
    std::thread::Builder::new().name("job-log".to_owned()).spawn(move || {
        let mut bytes = vec![0; READ_BYTES];
        loop {
            match output.read(&mut bytes) {
                Ok(0) => break,
                Ok(count) => buffer.append(bytes.get(..count).unwrap_or_default()),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    tracing::warn!(%error, "the job's output cannot be read any more");
                    break;
                }
            }
        }
        buffer.finish();
    })
}

#[cfg(test)]
mod tests;
