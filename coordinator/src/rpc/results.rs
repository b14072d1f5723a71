//! Service `Results`: an agent's journal stream into [`crate::results`]. Whose results they are
//! comes from the certificate alone.
//!
//! ```text
//! frames ─► reader (joins pieces, holds budget) ─► queue ─► worker (feeds home, sends acks)
//! ```
//!
//! Whatever waits in the queue while home syncs is the next batch: many small files share one
//! commit without anybody waiting for a timer.

use std::sync::Arc;
use std::time::Duration;

use bytes::BytesMut;
use limb_common::assignment::OutputNumber;
use limb_common::chunk::CHUNK_BYTES;
use limb_common::clock::{self, BootInstant};
use limb_common::error::chain;
use limb_common::id::Digest;
use limb_common::identity::AgentIdentity;
use limb_common::wire::{MAX_MESSAGE_BYTES, PIECE_BYTES};
use limb_proto::v1;
use limb_proto::v1::results_server::ResultsServer;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tonic::{Request, Response, Status, Streaming};

use super::caller;
use super::desk::Desk;
use super::worked::{self, Liveness, Worked, check_live};
use crate::results::{
    Acks, AttemptId, Base, Chunk, ChunkName, Entry, Item, Journal, Op, Publication, PublishKind,
    ResultsError, ResultsHome,
};

/// Chunks of all agents that are in memory at once (256 MiB): past it, streams wait for the disk.
const BUDGET_CHUNKS: usize = 256;
/// Items of one stream between reader and worker: what waits there while home syncs is the next
/// batch, and a small file is three of them. Chunks among them are held to the budget.
const QUEUE: usize = 1024;
/// Answers that wait for the transport.
const ACKS: usize = 16;
/// A chunk is durable at most this long after it came, if nothing asks sooner.
const SYNC_EVERY: Duration = Duration::from_millis(100);
/// An agent that opened a stream says so at once.
const OPEN_WITHIN: Duration = Duration::from_secs(30);
/// Notes in one answer: stays far below the message limit.
const NOTES_PER_ACK: usize = 4096;

/// The service's implementation. Cheap to clone.
#[derive(Clone)]
pub struct ResultService {
    desk: Arc<dyn Desk>,
    home: ResultsHome,
    budget: Arc<Semaphore>,
}

impl std::fmt::Debug for ResultService {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ResultService").field("home", &self.home).finish_non_exhaustive()
    }
}

impl ResultService {
    #[must_use]
    pub fn new(desk: Arc<dyn Desk>, home: ResultsHome) -> Self {
        Self { desk, home, budget: Arc::new(Semaphore::new(BUDGET_CHUNKS)) }
    }

    /// With the limits that belong to it.
    #[must_use]
    pub fn into_server(self) -> ResultsServer<Self> {
        ResultsServer::new(self).max_decoding_message_size(MAX_MESSAGE_BYTES)
    }
}

#[tonic::async_trait]
impl v1::results_server::Results for ResultService {
    type JournalStream = Worked<v1::JournalAck>;

    async fn journal(
        &self,
        request: Request<Streaming<v1::JournalFrame>>,
    ) -> Result<Response<Self::JournalStream>, Status> {
        let who = caller(&request)?;
        check_live(self.desk.as_ref(), &who)?;
        let (service, frames) = (self.clone(), request.into_inner());
        let work = |out| async move { service.serve(who, frames, &out).await };
        Ok(Response::new(Worked::start("results", ACKS, work)))
    }
}

type Out = worked::Out<v1::JournalAck>;
/// An item, and the memory it takes.
type Held = (Item, Option<OwnedSemaphorePermit>);

impl ResultService {
    async fn serve(
        &self,
        who: AgentIdentity,
        mut frames: Streaming<v1::JournalFrame>,
        out: &Out,
    ) -> Result<(), Status> {
        let first = tokio::time::timeout(OPEN_WITHIN, frames.message())
            .await
            .map_err(|_| Status::deadline_exceeded("no JournalOpen came"))??;
        match first.and_then(|frame| frame.body) {
            Some(v1::journal_frame::Body::Open(open)) if open.epoch == who.epoch.0 => {}
            Some(v1::journal_frame::Body::Open(_)) => {
                return Err(worked::over());
            }
            Some(v1::journal_frame::Body::Chunk(_) | v1::journal_frame::Body::Entry(_)) | None => {
                return Err(Status::invalid_argument("the first frame is not JournalOpen"));
            }
        }
        let id = AttemptId { run: who.run.clone(), attempt: who.attempt };
        let (journal, standing) = self.home.open_journal(id).await.map_err(|error| status_of(&error))?;
        if !send(out, standing).await {
            return Ok(());
        }
        let (items, queue) = mpsc::channel(QUEUE);
        let reader = limb_common::task::spawn("results-read", read(frames, items, Arc::clone(&self.budget)));
        self.work(&who, &journal, queue, out).await?;
        // The queue ended, so the reader has said why.
        reader.join().await.unwrap_or_else(|| Err(Status::internal("the reader ended")))
    }

    async fn work(
        &self,
        who: &AgentIdentity,
        journal: &Journal,
        mut queue: mpsc::Receiver<Held>,
        out: &Out,
    ) -> Result<(), Status> {
        let mut liveness = Liveness::new(Arc::clone(&self.desk), who.clone());
        let mut due: Option<BootInstant> = None;
        let mut durable_seq = 0;
        loop {
            let mut held = Vec::with_capacity(QUEUE);
            let wait = due.map_or(SYNC_EVERY, |due| due.saturating_since(clock::boottime()));
            let more = tokio::select! {
                live = liveness.look() => {
                    live?;
                    continue;
                }
                count = queue.recv_many(&mut held, QUEUE) => count > 0,
                () = tokio::time::sleep(wait), if due.is_some() => true,
            };
            if !more {
                break;
            }
            let (items, permits): (Vec<_>, Vec<_>) = held.into_iter().unzip();
            if due.is_none() && items.iter().any(|item| matches!(item, Item::Chunk(_))) {
                due = Some(clock::boottime() + SYNC_EVERY);
            }
            let sync = due.is_some_and(|due| due <= clock::boottime());
            let acks = journal.feed(items, sync).await.map_err(|error| status_of(&error))?;
            drop(permits);
            if sync {
                due = None;
            }
            let news = acks.durable_seq != durable_seq
                || !(acks.chunks.is_empty() && acks.refused.is_empty() && acks.chunks_refused.is_empty());
            durable_seq = acks.durable_seq;
            if news && !send(out, acks).await {
                return Ok(());
            }
        }
        // A clean end: what came is made durable and said, if anybody still listens.
        let acks = journal.feed(Vec::new(), true).await.map_err(|error| status_of(&error))?;
        send(out, acks).await;
        Ok(())
    }
}

/// Sends what home said, in messages of bounded size. The sequence number comes with the last
/// one, after every refusal it covers. `false`: nobody listens.
async fn send(out: &Out, acks: Acks) -> bool {
    let mut chunks = acks.chunks.into_iter().map(|name| v1::ChunkStored {
        output: name.output.0,
        file: name.file,
        index: name.index,
        generation: name.generation,
    });
    let mut refused = acks.refused.into_iter().map(|refusal| v1::EntryRefused {
        seq: refusal.seq,
        errno: refusal.errno,
        detail: refusal.detail,
    });
    let mut chunks_refused = acks.chunks_refused.into_iter().map(|(name, errno)| v1::ChunkRefused {
        output: name.output.0,
        file: name.file,
        index: name.index,
        generation: name.generation,
        errno,
    });
    loop {
        let mut ack = v1::JournalAck {
            durable_seq: 0,
            chunks: chunks.by_ref().take(NOTES_PER_ACK).collect(),
            refused: refused.by_ref().take(NOTES_PER_ACK).collect(),
            chunks_refused: chunks_refused.by_ref().take(NOTES_PER_ACK).collect(),
        };
        let last = chunks.len() + refused.len() + chunks_refused.len() == 0;
        if last {
            ack.durable_seq = acks.durable_seq;
        }
        if out.send(Ok(ack)).await.is_err() {
            return false;
        }
        if last {
            return true;
        }
    }
}

/// Reads frames until the stream ends or breaks the contract.
async fn read(
    mut frames: Streaming<v1::JournalFrame>,
    items: mpsc::Sender<Held>,
    budget: Arc<Semaphore>,
) -> Result<(), Status> {
    let mut joining: Option<Joining> = None;
    while let Some(frame) = frames.message().await? {
        let held = match frame.body {
            Some(v1::journal_frame::Body::Entry(entry)) => (Item::Entry(entry_of(entry)?), None),
            Some(v1::journal_frame::Body::Chunk(piece)) => {
                let mut current = match joining.take() {
                    Some(current) => current,
                    None => Joining::begin(&piece, &budget).await?,
                };
                match current.add(&piece)? {
                    Some(chunk) => (Item::Chunk(chunk), Some(current.permit)),
                    None => {
                        joining = Some(current);
                        continue;
                    }
                }
            }
            Some(v1::journal_frame::Body::Open(_)) | None => {
                return Err(Status::invalid_argument("a frame that is neither a chunk nor an entry"));
            }
        };
        if items.send(held).await.is_err() {
            break;
        }
    }
    Ok(())
}

/// A chunk whose pieces are still coming. One a stream, so that no set of streams can hold the
/// whole budget in unfinished chunks and wait for more.
struct Joining {
    id: ChunkName,
    bytes: BytesMut,
    permit: OwnedSemaphorePermit,
}

impl Joining {
    async fn begin(piece: &v1::UploadChunk, budget: &Arc<Semaphore>) -> Result<Self, Status> {
        let permit =
            Arc::clone(budget).acquire_owned().await.map_err(|_| Status::unavailable("home is ending"))?;
        Ok(Self { id: name_of(piece), bytes: BytesMut::new(), permit })
    }

    fn add(&mut self, piece: &v1::UploadChunk) -> Result<Option<Chunk>, Status> {
        let broken = |what| Err(Status::invalid_argument(what));
        if name_of(piece) != self.id {
            return broken("pieces of two chunks are mixed");
        }
        if piece.piece_offset as usize != self.bytes.len() {
            return broken("a piece is missing");
        }
        if piece.data.len() > PIECE_BYTES || self.bytes.len() + piece.data.len() > CHUNK_BYTES {
            return broken("a piece or chunk is too large");
        }
        self.bytes.extend_from_slice(&piece.data);
        if !piece.last {
            return Ok(None);
        }
        let Ok(value) = <[u8; 32]>::try_from(piece.value.as_ref()) else {
            return broken("the last piece has no value");
        };
        if piece.chunk_len as usize != self.bytes.len() {
            return broken("the chunk does not have the length that was sent with it");
        }
        Ok(Some(Chunk { id: self.id, bytes: self.bytes.split().freeze(), value: Digest(value) }))
    }
}

fn name_of(piece: &v1::UploadChunk) -> ChunkName {
    ChunkName {
        output: OutputNumber(piece.output),
        file: piece.file,
        index: piece.index,
        generation: piece.generation,
    }
}

fn entry_of(entry: v1::JournalEntry) -> Result<Entry, Status> {
    use v1::journal_entry::Op as Wire;
    let op = match entry.op.ok_or_else(|| Status::invalid_argument("an entry without an operation"))? {
        Wire::Created(created) => Op::Created {
            file: created.file,
            path: created.path.into(),
            mode: created.mode,
            base: match created.base {
                None => Base::Nothing,
                Some(v1::file_created::Base::BaseFile(file)) => Base::File(file),
                Some(v1::file_created::Base::BaseLowerInode(inode)) => Base::Lower(inode),
            },
        },
        Wire::Published(published) => Op::Published(publication_of(published)?),
        Wire::Renamed(renamed) => Op::Renamed {
            from: renamed.from.into(),
            to: renamed.to.into(),
            no_replace: renamed.no_replace,
            exchange: renamed.exchange,
        },
        Wire::Removed(removed) => Op::Removed { path: removed.path.into(), directory: removed.directory },
        Wire::DirectoryMade(made) => Op::DirectoryMade { path: made.path.into(), mode: made.mode },
        Wire::SymlinkMade(made) => Op::SymlinkMade { path: made.path.into(), target: made.target.into() },
        Wire::HardLinkMade(made) => {
            Op::HardLinkMade { existing: made.existing.into(), path: made.path.into() }
        }
        Wire::AttributesSet(set) => {
            Op::AttributesSet { path: set.path.into(), mode: set.mode, mtime_ns: set.mtime_ns }
        }
        Wire::XattrSet(set) => {
            Op::XattrSet { path: set.path.into(), name: set.name.into(), value: set.value.map(Into::into) }
        }
        Wire::Abandoned(gone) => {
            Op::Abandoned { file: gone.file, keep: gone.keep, path: gone.path.into(), size: gone.size }
        }
    };
    Ok(Entry { seq: entry.seq, output: OutputNumber(entry.output), op })
}

fn publication_of(published: v1::FilePublished) -> Result<Publication, Status> {
    use v1::file_published::Kind;
    let kind = match published.kind() {
        Kind::Final => PublishKind::Final,
        Kind::Snapshot => PublishKind::Snapshot,
        Kind::Grown => PublishKind::Grown,
        Kind::Unspecified => return Err(Status::invalid_argument("FilePublished.kind is unknown")),
    };
    let root = <[u8; 32]>::try_from(published.root.as_ref())
        .map_err(|_| Status::invalid_argument("FilePublished.root is not a hash"))?;
    Ok(Publication {
        file: published.file,
        path: published.path.into(),
        size: published.size,
        root: Digest(root),
        mode: published.mode,
        mtime_ns: published.mtime_ns,
        kind,
    })
}

fn status_of(error: &ResultsError) -> Status {
    match error {
        ResultsError::Protocol(what) => Status::invalid_argument(*what),
        ResultsError::Replaced => Status::aborted("another stream of this agent took over"),
        ResultsError::UnknownAttempt | ResultsError::Ended => worked::over(),
        ResultsError::Database(_)
        | ResultsError::Record(_)
        | ResultsError::Destination { .. }
        | ResultsError::Locked { .. }
        | ResultsError::Disk(_)
        | ResultsError::Stopped
        | ResultsError::Worker => {
            tracing::error!(error = chain(error), "results cannot be taken");
            // Paths of home are none of the box's business.
            Status::unavailable("home cannot take results now")
        }
    }
}

#[cfg(test)]
mod tests;
