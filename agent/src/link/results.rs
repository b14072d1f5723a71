//! Sends the outbox home over `Results.Journal` and takes home's acknowledgements. A stream that
//! breaks is opened again and starts from what home has not acknowledged; duplicates are harmless.
//!
//! Never: send an entry before the chunks that it publishes, or more unacknowledged bytes on one
//! stream than [`IN_FLIGHT_BYTES`].

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use limb_common::assignment::OutputNumber;
use limb_common::error::chain;
use limb_common::id::{Digest, LeaseEpoch};
use limb_common::task::{self, Task};
use limb_common::wire::PIECE_BYTES;
use limb_proto::v1::results_client::ResultsClient;
use limb_proto::v1::{self as wire, journal_entry, journal_frame};
use rand::RngExt as _;
use tokio::sync::{Notify, mpsc};
use tokio_stream::StreamExt as _;
use tokio_stream::wrappers::ReceiverStream;

use super::channels::{ChannelError, Channels};
use crate::results::chunk::{ChunkKey, SealedChunk, root_of};
use crate::results::outbox::{FileBase, Op, Outbox, Outgoing, PublishKind};

/// Sent on one stream and not acknowledged: 2 × bandwidth × delay at 2.5 Gbit/s and 100 ms.
const IN_FLIGHT_BYTES: u64 = 64 * 1024 * 1024;
/// Frames between the outbox and the stream: one chunk ahead; HTTP/2 holds the rest.
const FRAMES: usize = 4;
const BACKOFF_FIRST: Duration = Duration::from_millis(100);
const BACKOFF_LAST: Duration = Duration::from_secs(5);

/// A stream ended.
#[derive(Debug, thiserror::Error)]
enum StreamError {
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error("home ended the results stream")]
    Status(#[source] Box<tonic::Status>),
    #[error("the results stream ended")]
    Ended,
}

/// Runs until it is dropped.
#[derive(Debug)]
#[must_use = "dropping it stops the sending"]
pub struct Uplink(#[expect(dead_code, reason = "held for its Drop")] Task<()>);

impl Uplink {
    /// Starts sending. Call it inside a runtime.
    pub fn start(outbox: Arc<Outbox>, channels: Arc<dyn Channels>, epoch: LeaseEpoch) -> Self {
        Self(task::spawn("results-uplink", run(outbox, channels, epoch)))
    }
}

async fn run(outbox: Arc<Outbox>, channels: Arc<dyn Channels>, epoch: LeaseEpoch) {
    let mut pause = BACKOFF_FIRST;
    loop {
        let before = outbox.progress();
        match Box::pin(stream(&outbox, channels.as_ref(), epoch)).await {
            Err(StreamError::Channel(ChannelError::Closed)) => return,
            Err(error) => tracing::info!(error = chain(&error), "results stream ended; trying again"),
            Ok(never) => match never {},
        }
        if outbox.progress() != before {
            pause = BACKOFF_FIRST;
        }
        let jitter = rand::rng().random_range(0.5..1.0);
        tokio::time::sleep(pause.mul_f64(jitter)).await;
        pause = (pause * 2).min(BACKOFF_LAST);
    }
}

/// What this stream sent and home has not acknowledged yet. Kept here and not in the outbox, which
/// forgets a chunk that was overwritten before its acknowledgement came.
#[derive(Debug, Default)]
struct Window {
    sent: Mutex<Sent>,
    freed: Notify,
}

#[derive(Debug, Default)]
struct Sent {
    chunks: HashMap<ChunkKey, u64>,
    bytes: u64,
}

impl Window {
    fn lock(&self) -> MutexGuard<'_, Sent> {
        self.sent.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for room and takes it.
    async fn take(&self, key: ChunkKey, bytes: u64) {
        while !self.try_take(key, bytes) {
            self.freed.notified().await;
        }
    }

    fn try_take(&self, key: ChunkKey, bytes: u64) -> bool {
        let mut sent = self.lock();
        if sent.bytes >= IN_FLIGHT_BYTES {
            return false;
        }
        sent.bytes += bytes - sent.chunks.insert(key, bytes).unwrap_or(0);
        true
    }

    /// An acknowledgement of what another stream sent counts for nothing here.
    fn give(&self, key: &ChunkKey) {
        let mut sent = self.lock();
        if let Some(bytes) = sent.chunks.remove(key) {
            sent.bytes -= bytes;
            drop(sent);
            self.freed.notify_one();
        }
    }
}

async fn stream(
    outbox: &Arc<Outbox>,
    channels: &dyn Channels,
    epoch: LeaseEpoch,
) -> Result<std::convert::Infallible, StreamError> {
    let channel = channels.bulk().await?;
    let mut client = ResultsClient::new(channel)
        .max_decoding_message_size(limb_common::wire::MAX_MESSAGE_BYTES)
        .max_encoding_message_size(limb_common::wire::MAX_MESSAGE_BYTES);
    let (frames, outgoing) = mpsc::channel(FRAMES);
    let open = frame(journal_frame::Body::Open(wire::JournalOpen { epoch: epoch.0 }));
    frames.send(open).await.map_err(|_| StreamError::Ended)?;
    let status = |status: tonic::Status| StreamError::Status(Box::new(status));
    let mut acks = client.journal(ReceiverStream::new(outgoing)).await.map_err(status)?.into_inner();
    // The first acknowledgement says from where to go on.
    let first = acks.next().await.ok_or(StreamError::Ended)?.map_err(status)?;
    let window = Arc::new(Window::default());
    apply(outbox, &window, &first);
    let sending = send_all(outbox, &frames, &window);
    let receiving = async {
        while let Some(ack) = acks.next().await {
            apply(outbox, &window, &ack.map_err(status)?);
        }
        Err(StreamError::Ended)
    };
    tokio::select! {
        ended = sending => ended,
        ended = receiving => ended,
    }
}

async fn send_all(
    outbox: &Arc<Outbox>,
    frames: &mpsc::Sender<wire::JournalFrame>,
    window: &Window,
) -> Result<std::convert::Infallible, StreamError> {
    let mut position = 0;
    loop {
        let (outgoing, after) = outbox.next(position).await;
        position = after;
        match outgoing {
            Outgoing::Chunk(chunk) => send_chunk(frames, window, chunk).await?,
            Outgoing::Entry { seq, output, op } => {
                let entry = wire::JournalEntry { seq, output: output.0, op: Some(entry_op(op).await) };
                frames
                    .send(frame(journal_frame::Body::Entry(entry)))
                    .await
                    .map_err(|_| StreamError::Ended)?;
            }
        }
    }
}

async fn send_chunk(
    frames: &mpsc::Sender<wire::JournalFrame>,
    window: &Window,
    chunk: Arc<SealedChunk>,
) -> Result<(), StreamError> {
    let hashed = Arc::clone(&chunk);
    let value = tokio::task::spawn_blocking(move || hashed.subtree_value()).await.ok().flatten();
    let (Some(value), Some(bytes)) = (value, chunk.bytes()) else {
        // Acknowledged between being chosen and being sent; or it cannot be hashed, and then the
        // publish that needs it is refused.
        return Ok(());
    };
    window.take(chunk.key, u64::from(chunk.len)).await;
    let ChunkKey { output, file, index, generation } = chunk.key;
    let mut at = 0;
    while at < bytes.len() {
        let end = bytes.len().min(at + PIECE_BYTES);
        let last = end == bytes.len();
        let piece = wire::UploadChunk {
            output: output.0,
            file,
            index,
            generation,
            piece_offset: u32::try_from(at).unwrap_or(u32::MAX),
            data: bytes.slice(at..end),
            last,
            value: if last { value.0.to_vec().into() } else { Default::default() },
            chunk_len: if last { chunk.len } else { 0 },
        };
        frames.send(frame(journal_frame::Body::Chunk(piece))).await.map_err(|_| StreamError::Ended)?;
        at = end;
    }
    Ok(())
}

/// The message of an entry; a publish is hashed here, off the runtime's threads.
async fn entry_op(op: Arc<Op>) -> journal_entry::Op {
    if let Op::Published(_) = &*op {
        let hashed = Arc::clone(&op);
        let root = tokio::task::spawn_blocking(move || match &*hashed {
            Op::Published(publish) => root_of(publish.size, &publish.chunks),
            _ => None,
        });
        // A file that cannot be named must fail, not stop the stream: home refuses an empty root.
        let root = root.await.ok().flatten().unwrap_or(Digest([0; 32]));
        return message_of(&op, &root.0);
    }
    message_of(&op, &[])
}

fn message_of(op: &Op, root: &[u8]) -> journal_entry::Op {
    let bytes = bytes::Bytes::copy_from_slice;
    match op {
        Op::Created { file, path, mode, base } => journal_entry::Op::Created(wire::FileCreated {
            file: *file,
            path: bytes(path),
            mode: *mode,
            base: match base {
                FileBase::Nothing => None,
                FileBase::File(file) => Some(wire::file_created::Base::BaseFile(*file)),
                FileBase::Lower(inode) => Some(wire::file_created::Base::BaseLowerInode(inode.0)),
            },
        }),
        Op::Published(publish) => journal_entry::Op::Published(wire::FilePublished {
            file: publish.file,
            path: bytes(&publish.path),
            size: publish.size,
            root: bytes(root),
            mode: publish.mode,
            mtime_ns: publish.mtime_ns,
            kind: match publish.kind {
                PublishKind::Final => wire::file_published::Kind::Final,
                PublishKind::Snapshot => wire::file_published::Kind::Snapshot,
                PublishKind::Grown => wire::file_published::Kind::Grown,
            }
            .into(),
            holes: Vec::new(),
        }),
        Op::Renamed { from, to, no_replace } => journal_entry::Op::Renamed(wire::Renamed {
            from: bytes(from),
            to: bytes(to),
            no_replace: *no_replace,
            exchange: false,
        }),
        Op::Removed { path, directory } => {
            journal_entry::Op::Removed(wire::Removed { path: bytes(path), directory: *directory })
        }
        Op::DirectoryMade { path, mode } => {
            journal_entry::Op::DirectoryMade(wire::DirectoryMade { path: bytes(path), mode: *mode })
        }
        Op::SymlinkMade { path, target } => {
            journal_entry::Op::SymlinkMade(wire::SymlinkMade { path: bytes(path), target: bytes(target) })
        }
        Op::HardLinkMade { existing, path } => journal_entry::Op::HardLinkMade(wire::HardLinkMade {
            existing: bytes(existing),
            path: bytes(path),
        }),
        Op::AttributesSet { path, mode, mtime_ns } => journal_entry::Op::AttributesSet(wire::AttributesSet {
            path: bytes(path),
            mode: *mode,
            mtime_ns: *mtime_ns,
        }),
        Op::XattrSet { path, name, value } => journal_entry::Op::XattrSet(wire::XattrSet {
            path: bytes(path),
            name: bytes(name),
            value: value.as_deref().map(bytes),
        }),
        Op::Abandoned { file, keep, path, size, .. } => journal_entry::Op::Abandoned(wire::FileAbandoned {
            file: *file,
            keep: *keep,
            path: bytes(path),
            size: *size,
        }),
    }
}

fn apply(outbox: &Outbox, window: &Window, ack: &wire::JournalAck) {
    // Refusals first: whoever waits for `durable_seq` looks for them when it comes.
    for refused in &ack.refused {
        outbox.entry_refused(refused.seq, refused.errno, &refused.detail);
    }
    for chunk in &ack.chunks_refused {
        let key = key_of(chunk.output, chunk.file, chunk.index, chunk.generation);
        outbox.chunk_settled(key, Some(chunk.errno));
        window.give(&key);
    }
    for chunk in &ack.chunks {
        let key = key_of(chunk.output, chunk.file, chunk.index, chunk.generation);
        outbox.chunk_settled(key, None);
        window.give(&key);
    }
    outbox.durable_up_to(ack.durable_seq);
}

fn key_of(output: u32, file: u64, index: u64, generation: u64) -> ChunkKey {
    ChunkKey { output: OutputNumber(output), file, index, generation }
}

fn frame(body: journal_frame::Body) -> wire::JournalFrame {
    wire::JournalFrame { body: Some(body) }
}
