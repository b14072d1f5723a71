//! Chunks over gRPC: a pool of long-lived streams, each on a bulk connection of its own, with many
//! asks on their way.
//!
//! A cut is not an answer: whatever is outstanding is asked again, for as long as it takes. The
//! lease decides when waiting has no more sense, not this module.
//!
//! One task owns everything outstanding ([`desk`]); one for each lane owns its stream
//! ([`lane`]); [`GrpcChunks`] only talks to the first.
//!
//! An encoded answer is decoded by whoever asked, not by those tasks.
//!
//! Never: verify (the fetcher does), or keep more of an answer than its length.

mod backoff;
mod desk;
mod lane;
mod manifest;
mod meter;
mod pool;
mod thinning;

pub use manifest::{ManifestFetchError, fetch_manifest};

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use limb_common::assignment::SetNumber;
use limb_common::chunk::group_bytes;
use limb_common::codec::{DecodeError, Encoding, decode};
use limb_common::id::Digest;
use limb_common::manifest::Inode;
use limb_common::task::{self, Task};
use limb_proto::v1;
use limb_proto::v1::fetch_request::What;
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

use super::channels::Channels;
use crate::fetch::{
    Ask, ChunkAddress, ChunkTransport, PackAsk, PackFuture, PartAsk, PartFuture, Priority, TransportError,
    TransportFuture,
};

/// Commands to the task that owns what is outstanding; it takes each in microseconds.
const COMMANDS: usize = 1024;
/// Connections for chunks at most. Home's uplink gains nothing from more.
const MAX_LANES: usize = 8;

/// When silence means that something is broken.
#[derive(Clone, Copy, Debug)]
pub struct ChunkPatience {
    /// No piece of anything on a stream although something is outstanding on it: it is dead.
    pub stream: Duration,
}

impl Default for ChunkPatience {
    fn default() -> Self {
        Self { stream: Duration::from_secs(10) }
    }
}

/// The link as a [`ChunkTransport`].
#[derive(Debug)]
pub struct GrpcChunks {
    commands: mpsc::Sender<Command>,
    next: AtomicU64,
    bandwidth_delay: watch::Receiver<Option<u64>>,
    _pool: Task<()>,
}

/// What came.
#[derive(Debug)]
struct Arrived {
    bytes: Bytes,
    encoding: Encoding,
    /// Of a pack.
    missing: Vec<v1::MissingFile>,
    /// Of a part.
    proof: Vec<Digest>,
}

type Answer = Result<Arrived, TransportError>;

#[derive(Debug)]
enum Command {
    Ask { number: u64, wanted: Wanted, tell: oneshot::Sender<Answer> },
    Raise { number: u64, priority: Priority },
    Cancel { number: u64 },
}

#[derive(Clone, Debug)]
struct Wanted {
    body: Body,
    priority: Priority,
}

#[derive(Clone, Debug)]
enum Body {
    Chunk { address: ChunkAddress, len: u32 },
    Files { set: SetNumber, files: Arc<[(Inode, u32)]> },
    Part { set: SetNumber, inode: Inode, index: u64, groups: Range<usize>, len: u32 },
}

impl Body {
    fn len(&self) -> u64 {
        match self {
            Self::Chunk { len, .. } | Self::Part { len, .. } => u64::from(*len),
            Self::Files { files, .. } => files.iter().map(|(_, len)| u64::from(*len)).sum(),
        }
    }

    /// Parts are proved group by group, and small.
    fn may_be_encoded(&self) -> bool {
        match self {
            Self::Chunk { .. } | Self::Files { .. } => true,
            Self::Part { .. } => false,
        }
    }

    fn message(&self) -> What {
        match self {
            Self::Chunk { address: ChunkAddress::Set { set, inode, index }, .. } => {
                What::SetChunk(v1::SetChunk { set: set.0, inode: inode.0, index: *index })
            }
            Self::Chunk { address: ChunkAddress::Result { output, file, index }, .. } => {
                What::ResultChunk(v1::ResultChunk { output: output.0, file: *file, index: *index })
            }
            Self::Files { set, files } => {
                let inodes = files.iter().map(|(inode, _)| inode.0).collect();
                What::SetFiles(v1::SetFiles { set: set.0, inodes })
            }
            Self::Part { set, inode, index, groups, .. } => {
                let number = |group: usize| u32::try_from(group).unwrap_or(u32::MAX);
                let (first, count) = (number(groups.start), number(groups.len()));
                What::SetPart(v1::SetPart { set: set.0, inode: inode.0, index: *index, first, count })
            }
        }
    }
}

impl Arrived {
    /// The plain bytes. Where they are as they came, what is too short is for others to find.
    fn plain(self, len: usize) -> Result<Bytes, TransportError> {
        match self.encoding {
            Encoding::Raw => Ok(self.bytes),
            encoding @ (Encoding::Zstd | Encoding::Planes2 | Encoding::Planes4) => {
                let garbled = |error: DecodeError| TransportError::Garbled { detail: error.to_string() };
                decode(encoding, self.bytes, len).map_err(garbled)
            }
        }
    }
}

/// The files of a pack, in the order asked. Copied: each may live long after the others.
fn split(
    files: &[(Inode, u32)],
    mut arrived: Arrived,
) -> Result<Vec<Result<Bytes, TransportError>>, TransportError> {
    let garbled = |detail: &str| TransportError::Garbled { detail: detail.to_owned() };
    let mut parts: Vec<Option<Result<Bytes, TransportError>>> = vec![None; files.len()];
    for file in std::mem::take(&mut arrived.missing) {
        let at = usize::try_from(file.at).unwrap_or(usize::MAX);
        let part = parts.get_mut(at).ok_or_else(|| garbled("a file is missing that was not asked for"))?;
        *part = Some(Err(file.failure.map_or_else(|| garbled("no reason is given"), desk::refusal)));
    }
    let there = parts.iter().zip(files).filter(|(part, _)| part.is_none());
    let bytes = arrived.plain(there.map(|(_, &(_, len))| len as usize).sum())?;
    let mut rest = &bytes[..];
    for (part, &(_, len)) in parts.iter_mut().zip(files.iter()).filter(|(part, _)| part.is_none()) {
        let (own, others) =
            rest.split_at_checked(len as usize).ok_or_else(|| garbled("the pack is too short"))?;
        *part = Some(Ok(Bytes::copy_from_slice(own)));
        rest = others;
    }
    if !rest.is_empty() {
        return Err(garbled("the pack is too long"));
    }
    Ok(parts.into_iter().flatten().collect())
}

impl GrpcChunks {
    /// Must be called within a runtime; dials at once. Ends when `stop` is cancelled or it is
    /// dropped: whoever waits then gets [`TransportError::Closed`].
    #[must_use]
    pub fn new(channels: Arc<dyn Channels>, patience: ChunkPatience, stop: CancellationToken) -> Self {
        let (commands, taken) = mpsc::channel(COMMANDS);
        let (tell, bandwidth_delay) = watch::channel(None);
        let pool = task::spawn("chunks", pool::drive(channels, taken, tell, patience, stop));
        Self { commands, next: AtomicU64::new(1), bandwidth_delay, _pool: pool }
    }

    fn ask(
        &self,
        body: Body,
        priority: watch::Receiver<Priority>,
    ) -> impl Future<Output = Answer> + Send + use<> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        wait(number, body, priority, self.commands.clone())
    }
}

impl ChunkTransport for GrpcChunks {
    fn fetch(&self, Ask { address, len, priority }: Ask) -> TransportFuture {
        let answer = self.ask(Body::Chunk { address, len }, priority);
        Box::pin(async move { answer.await?.plain(len as usize) })
    }

    fn fetch_pack(&self, PackAsk { set, files, priority }: PackAsk) -> PackFuture {
        let answer = self.ask(Body::Files { set, files: Arc::clone(&files) }, priority);
        Box::pin(async move {
            let all = answer.await.and_then(|arrived| split(&files, arrived));
            all.unwrap_or_else(|error| vec![Err(error); files.len()])
        })
    }

    fn fetch_part(&self, PartAsk { set, inode, index, id, groups, priority }: PartAsk) -> PartFuture {
        let len = u32::try_from(group_bytes(id.len, &groups).len()).unwrap_or(u32::MAX);
        let answer = self.ask(Body::Part { set, inode, index, groups, len }, priority);
        Box::pin(async move {
            let mut arrived = answer.await?;
            let proof = std::mem::take(&mut arrived.proof);
            Ok((arrived.plain(len as usize)?, proof))
        })
    }

    fn bandwidth_delay_bytes(&self) -> Option<u64> {
        *self.bandwidth_delay.borrow()
    }
}

async fn wait(
    number: u64,
    body: Body,
    mut priority: watch::Receiver<Priority>,
    commands: mpsc::Sender<Command>,
) -> Answer {
    let (tell, mut told) = oneshot::channel();
    let wanted = Wanted { body, priority: *priority.borrow_and_update() };
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
            // When there is no room, the pool notices at its next sweep.
            let _full: Result<(), _> = commands.try_send(Command::Cancel { number: self.number });
        }
    }
}
