//! Chunks over gRPC: one long-lived stream on a bulk connection, many asks on their way.
//!
//! A cut is not an answer: whatever is outstanding is asked again on the next stream, for as long
//! as it takes. The lease decides when waiting has no more sense, not this module.
//!
//! One task owns the stream and everything outstanding; [`GrpcChunks::fetch`] only talks to it.
//! A raised priority asks again under a new number and cancels the old one, unless pieces of it
//! have arrived already.
//!
//! Never: verify (the fetcher does), or keep more of a chunk than its length.

mod backoff;
mod desk;
mod manifest;
mod stream;

pub use manifest::{ManifestFetchError, fetch_manifest};

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use limb_common::task::{self, Task};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::channels::Channels;
use crate::fetch::{Ask, ChunkAddress, ChunkTransport, Priority, TransportError, TransportFuture};

/// Commands to the task that owns the stream; it takes each in microseconds.
const COMMANDS: usize = 1024;

/// When silence means that something is broken.
#[derive(Clone, Copy, Debug)]
pub struct ChunkPatience {
    /// No piece of anything although something is outstanding: the stream is dead.
    pub stream: Duration,
    /// No piece of one demanded chunk while others arrive. Long, because on a slow link many
    /// chunks rightly wait for each other; asking again would only send it to the queue's end.
    pub chunk: Duration,
}

impl Default for ChunkPatience {
    fn default() -> Self {
        Self { stream: Duration::from_secs(10), chunk: Duration::from_secs(60) }
    }
}

/// The link as a [`ChunkTransport`].
#[derive(Debug)]
pub struct GrpcChunks {
    commands: mpsc::Sender<Command>,
    next: AtomicU64,
    _stream: Task<()>,
}

type Answer = Result<Bytes, TransportError>;

#[derive(Debug)]
enum Command {
    Ask { number: u64, wanted: Wanted, tell: oneshot::Sender<Answer> },
    Raise { number: u64, priority: Priority },
    Cancel { number: u64 },
}

#[derive(Clone, Copy, Debug)]
struct Wanted {
    address: ChunkAddress,
    len: u32,
    priority: Priority,
}

impl GrpcChunks {
    /// Must be called within a runtime. Ends when `stop` is cancelled or it is dropped: whoever
    /// waits then gets [`TransportError::Closed`].
    #[must_use]
    pub fn new(channels: Arc<dyn Channels>, patience: ChunkPatience, stop: CancellationToken) -> Self {
        let (commands, taken) = mpsc::channel(COMMANDS);
        let stream = task::spawn("chunks", stream::drive(channels, taken, patience, stop));
        Self { commands, next: AtomicU64::new(1), _stream: stream }
    }
}

impl ChunkTransport for GrpcChunks {
    fn fetch(&self, ask: Ask) -> TransportFuture {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let commands = self.commands.clone();
        Box::pin(async move { wait(number, ask, commands).await })
    }
}

async fn wait(number: u64, ask: Ask, commands: mpsc::Sender<Command>) -> Answer {
    let Ask { address, len, mut priority } = ask;
    let (tell, mut told) = oneshot::channel();
    let wanted = Wanted { address, len, priority: *priority.borrow_and_update() };
    let closed = |_| TransportError::Closed;
    commands.send(Command::Ask { number, wanted, tell }).await.map_err(closed)?;
    let mut cancel = CancelOnDrop { number, commands: Some(commands.clone()) };
    loop {
        tokio::select! {
            answer = &mut told => {
                cancel.commands = None;
                return answer.unwrap_or(Err(TransportError::Closed));
            }
            Ok(()) = priority.changed() => {
                let priority = *priority.borrow_and_update();
                commands.send(Command::Raise { number, priority }).await.map_err(closed)?;
            }
        }
    }
}

/// Nobody waits any more.
struct CancelOnDrop {
    number: u64,
    commands: Option<mpsc::Sender<Command>>,
}

impl Drop for CancelOnDrop {
    fn drop(&mut self) {
        if let Some(commands) = &self.commands {
            // When there is no room, the owner of the stream notices at its next sweep.
            let _full: Result<(), _> = commands.try_send(Command::Cancel { number: self.number });
        }
    }
}
