//! Service `Chunks`: manifests, and the frozen bytes behind them.
//!
//! An attempt reads only sets that the [`Desk`] says are its own; unknown and forbidden look the
//! same. Bytes are checked against their hash before they leave.
//!
//! Never: unbounded memory for a client that asks much and reads nothing; bulk before demand.

mod manifest;
mod queue;
mod results;
mod stream;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use futures_util::Stream;
use limb_common::assignment::{OutputNumber, SetNumber};
use limb_common::id::Digest;
use limb_common::identity::AgentIdentity;
use limb_common::manifest::Inode;
use limb_common::task::Task;
use limb_common::wire::PIECE_BYTES;
use limb_proto::v1;
use limb_proto::v1::chunks_server::{Chunks, ChunksServer};
use tokio::sync::{Semaphore, mpsc};
use tonic::{Request, Response, Status, Streaming};

use super::caller;
use super::desk::{Desk, DeskError};
use crate::snapshot::{LoadedSnapshot, SnapshotError, Snapshots};

/// Bytes read and not yet sent, all agents together. Bulk and demand have one each, so that
/// clients who read slowly ahead cannot take what somebody waits for.
const BULK_BUDGET_BYTES: usize = 192 << 20;
const DEMAND_BUDGET_BYTES: usize = 64 << 20;
/// Reads at the disk at once, per kind: enough for an SSD, few enough for a spinning disk.
const READS: usize = 16;
/// How often a long stream asks whether its agent still is who it was.
const LIVENESS_EVERY: Duration = Duration::from_secs(3);
/// A client that took nothing for this long loses what was read for it (it is read again when
/// the client goes on), so that others get the memory.
const STALL: Duration = Duration::from_secs(10);
/// Pieces that wait for the transport: one being sent, one behind it. More would let bulk stand
/// in front of demand.
const OUTBOUND_PIECES: usize = 1;
/// A FetchRequest is a few dozen bytes, or a pack of 256 inodes.
const MAX_REQUEST_BYTES: usize = 4096;
/// Beside a piece's data: its headers and the files of a pack that are missing, with reasons.
const MISSING_BYTES: usize = 256 * 1024;

/// A chunk of something that this attempt sent home earlier.
pub trait ResultReader: Send + Sync + 'static {
    /// The whole chunk, as it is durable at home.
    fn read_chunk(
        &self,
        who: &AgentIdentity,
        output: OutputNumber,
        file: u64,
        index: u64,
    ) -> ResultChunkFuture;

    /// A chunk of earlier results, where the attempt that reads them has moved the file since.
    /// The caller checks it against its hash.
    fn read_moved(
        &self,
        _who: &AgentIdentity,
        _manifest: Digest,
        _inode: Inode,
        _index: u64,
    ) -> ResultChunkFuture {
        Box::pin(async { Err(ResultReadError::NotFound) })
    }
}

pub type ResultChunkFuture = Pin<Box<dyn Future<Output = Result<Bytes, ResultReadError>> + Send>>;

#[derive(Debug, thiserror::Error)]
pub enum ResultReadError {
    /// Unknown and forbidden look the same.
    #[error("there is no such chunk")]
    NotFound,
    #[error("the file at home is not the one that was sent")]
    Changed,
    #[error("could not read it")]
    Io(#[from] std::io::Error),
}

/// Told what chunks are served, and how. Must not block.
pub trait SourceEvents: Send + Sync + 'static {
    /// A source at home is not what was frozen; once per file and stream.
    fn on_source_changed(&self, who: &AgentIdentity, set: SetNumber, path: &[u8]);

    /// An answer that might have been compressed goes out as so many bytes.
    fn on_encoded(&self, _who: &AgentIdentity, _plain_len: usize, _wire_len: usize) {}
}

/// The service's implementation. Cheap to clone.
#[derive(Clone)]
pub struct ChunkService {
    shared: Arc<Shared>,
}

struct Shared {
    desk: Arc<dyn Desk>,
    snapshots: Snapshots,
    results: Arc<dyn ResultReader>,
    events: Arc<dyn SourceEvents>,
    limits: Limits,
    compress: bool,
    bulk: Lane,
    demand: Lane,
}

/// What one kind of request may use.
struct Lane {
    /// In KiB.
    budget: Arc<Semaphore>,
    reads: Arc<Semaphore>,
    /// Compressing at once: as many as there are cores.
    encoders: Arc<Semaphore>,
}

#[derive(Clone, Copy)]
struct Limits {
    liveness_every: Duration,
    stall: Duration,
    bulk_budget_bytes: usize,
    demand_budget_bytes: usize,
}

impl std::fmt::Debug for ChunkService {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChunkService").finish_non_exhaustive()
    }
}

impl ChunkService {
    #[must_use]
    pub fn new(
        desk: Arc<dyn Desk>,
        snapshots: Snapshots,
        results: Arc<dyn ResultReader>,
        events: Arc<dyn SourceEvents>,
    ) -> Self {
        let limits = Limits {
            liveness_every: LIVENESS_EVERY,
            stall: STALL,
            bulk_budget_bytes: BULK_BUDGET_BYTES,
            demand_budget_bytes: DEMAND_BUDGET_BYTES,
        };
        Self::with_limits(desk, snapshots, results, events, limits)
    }

    fn with_limits(
        desk: Arc<dyn Desk>,
        snapshots: Snapshots,
        results: Arc<dyn ResultReader>,
        events: Arc<dyn SourceEvents>,
        limits: Limits,
    ) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let lane = |budget: usize| Lane {
            budget: Arc::new(Semaphore::new(budget / 1024)),
            reads: Arc::new(Semaphore::new(READS)),
            encoders: Arc::new(Semaphore::new(cores)),
        };
        let (bulk, demand) = (lane(limits.bulk_budget_bytes), lane(limits.demand_budget_bytes));
        let compress = true;
        Self { shared: Arc::new(Shared { desk, snapshots, results, events, limits, compress, bulk, demand }) }
    }

    /// Without compression chunks go as they are, whatever agents ask for.
    #[must_use]
    pub fn compressing(mut self, compress: bool) -> Self {
        if let Some(shared) = Arc::get_mut(&mut self.shared) {
            shared.compress = compress;
        }
        self
    }

    /// With the limits that belong to it.
    #[must_use]
    pub fn into_server(self) -> ChunksServer<Self> {
        ChunksServer::new(self).max_decoding_message_size(MAX_REQUEST_BYTES).max_encoding_message_size(
            // A piece and its headers.
            PIECE_BYTES + MISSING_BYTES,
        )
    }
}

impl Shared {
    fn check(&self, who: &AgentIdentity) -> Result<(), Status> {
        if self.desk.is_live(who) { Ok(()) } else { Err(over()) }
    }

    async fn open(&self, who: &AgentIdentity, set: SetNumber) -> Result<Arc<LoadedSnapshot>, OpenError> {
        let id = self.desk.set(who, set).await.map_err(|error| match error {
            DeskError::Refused(_) => OpenError::NotFound,
            DeskError::Unavailable(_) => OpenError::Unavailable(limb_common::error::chain(&error)),
        })?;
        let snapshots = self.snapshots.clone();
        let opened = tokio::task::spawn_blocking(move || snapshots.reader(id)).await;
        match opened {
            Ok(Ok(loaded)) => Ok(loaded),
            Ok(Err(error)) => {
                tracing::error!(%id, error = limb_common::error::chain(&error), "a set cannot be opened");
                match error {
                    SnapshotError::NotFound(_) => Err(OpenError::NotFound),
                    other => Err(OpenError::Unavailable(other.to_string())),
                }
            }
            Err(join) => Err(OpenError::Unavailable(join.to_string())),
        }
    }
}

enum OpenError {
    NotFound,
    Unavailable(String),
}

fn over() -> Status {
    Status::permission_denied("this attempt is over")
}

/// A stream of replies together with the task that makes them.
#[derive(Debug)]
pub struct Replies<T> {
    replies: mpsc::Receiver<Result<T, Status>>,
    _maker: Task<()>,
}

impl<T> Stream for Replies<T> {
    type Item = Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.replies.poll_recv(context)
    }
}

impl<T: Send + 'static> Replies<T> {
    fn from_task<F>(name: &'static str, make: impl FnOnce(mpsc::Sender<Result<T, Status>>) -> F) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let (sender, replies) = mpsc::channel(OUTBOUND_PIECES);
        Self { replies, _maker: limb_common::task::spawn(name, make(sender)) }
    }
}

#[tonic::async_trait]
impl Chunks for ChunkService {
    type ManifestStream = Replies<v1::ManifestPiece>;
    type FetchStream = Replies<v1::FetchPiece>;

    async fn manifest(
        &self,
        request: Request<v1::ManifestRequest>,
    ) -> Result<Response<Self::ManifestStream>, Status> {
        let who = caller(&request)?;
        self.shared.check(&who)?;
        let set = SetNumber(request.get_ref().set);
        let loaded = self.shared.open(&who, set).await.map_err(|error| match error {
            OpenError::NotFound => Status::not_found("there is no such set"),
            OpenError::Unavailable(why) => Status::unavailable(why),
        })?;
        let shared = Arc::clone(&self.shared);
        let replies = Replies::from_task("manifest", move |out| manifest::send(shared, who, loaded, out));
        Ok(Response::new(replies))
    }

    async fn fetch(
        &self,
        request: Request<Streaming<v1::FetchRequest>>,
    ) -> Result<Response<Self::FetchStream>, Status> {
        let who = caller(&request)?;
        self.shared.check(&who)?;
        let (shared, requests) = (Arc::clone(&self.shared), request.into_inner());
        let replies = Replies::from_task("fetch", move |out| stream::serve(shared, who, requests, out));
        Ok(Response::new(replies))
    }
}

#[cfg(test)]
mod tests;
