//! Service `Traces`: what jobs touched, and what the next run of the same job will want. Both for
//! the set and job that the [`Desk`] says, whatever the message names.
//!
//! Never: keep what is not in the set; more than a few frames in memory at once.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{Stream, StreamExt as _};
use limb_common::assignment::SetNumber;
use limb_common::error::chain;
use limb_common::identity::AgentIdentity;
use limb_common::trace::{self, MAX_FRAME_BYTES, Touch};
use limb_common::wire::PIECE_BYTES;
use limb_proto::v1;
use limb_proto::v1::traces_server::TracesServer;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::{Request, Response, Status, Streaming};

use super::desk::Desk;
use super::{caller, desk_status, home_status};
use crate::snapshot::{Snapshots, TraceKey};

/// Frames of all agents in memory, each way: 8 MiB each at most, and 12 MiB decoded.
const FRAMES: usize = 4;
/// A frame that takes longer is not worth its place.
const PATIENCE: Duration = Duration::from_secs(120);
/// A piece and its headers.
const MAX_REQUEST_BYTES: usize = PIECE_BYTES + 1024;

/// The service's implementation. Cheap to clone.
#[derive(Clone)]
pub struct TraceService {
    desk: Arc<dyn Desk>,
    snapshots: Snapshots,
    reading: Arc<Semaphore>,
    writing: Arc<Semaphore>,
}

impl std::fmt::Debug for TraceService {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TraceService").finish_non_exhaustive()
    }
}

/// One frame on its way, in the order of its bytes.
struct Frame {
    rest: Bytes,
    _place: OwnedSemaphorePermit,
}

impl Iterator for Frame {
    type Item = Result<v1::TracePiece, Status>;

    fn next(&mut self) -> Option<Self::Item> {
        let data = self.rest.split_to(self.rest.len().min(PIECE_BYTES));
        (!data.is_empty()).then_some(Ok(v1::TracePiece { data, set: 0 }))
    }
}

impl TraceService {
    #[must_use]
    pub fn new(desk: Arc<dyn Desk>, snapshots: Snapshots) -> Self {
        let places = || Arc::new(Semaphore::new(FRAMES));
        Self { desk, snapshots, reading: places(), writing: places() }
    }

    /// With the limits that belong to it.
    #[must_use]
    pub fn into_server(self) -> TracesServer<Self> {
        TracesServer::new(self)
            .max_decoding_message_size(MAX_REQUEST_BYTES)
            .max_encoding_message_size(MAX_REQUEST_BYTES)
    }

    async fn take(
        &self,
        who: &AgentIdentity,
        mut pieces: Streaming<v1::TracePiece>,
    ) -> Result<(SetNumber, Vec<Touch>), Status> {
        let (mut set, mut frame) = (None, Vec::new());
        while let Some(piece) = pieces.message().await? {
            if !self.desk.is_live(who) {
                return Err(Status::permission_denied("this attempt is over"));
            }
            set = set.or(Some(SetNumber(piece.set)));
            if frame.len() + piece.data.len() > MAX_FRAME_BYTES {
                return Err(Status::invalid_argument("the trace is too long"));
            }
            frame.extend_from_slice(&piece.data);
        }
        let set = set.ok_or_else(|| Status::invalid_argument("there is no trace"))?;
        let decoded = tokio::task::spawn_blocking(move || trace::decode(&frame)).await;
        let touches = decoded
            .map_err(|join| home_status(&join))?
            .map_err(|error| Status::invalid_argument(chain(&error)))?;
        Ok((set, touches))
    }

    /// Merges what came; blocks.
    fn keep(&self, who: &AgentIdentity, key: &TraceKey, touches: Vec<Touch>) -> Result<(), Status> {
        let loaded = self.snapshots.reader(key.manifest).map_err(|error| home_status(&error))?;
        self.snapshots
            .traces()
            .record(key, loaded.manifest(), (&who.run, who.attempt), touches)
            .map_err(|error| home_status(&error))
    }
}

#[tonic::async_trait]
impl v1::traces_server::Traces for TraceService {
    type PlanStream = Pin<Box<dyn Stream<Item = Result<v1::TracePiece, Status>> + Send>>;

    async fn plan(
        &self,
        request: Request<v1::TracePlanRequest>,
    ) -> Result<Response<Self::PlanStream>, Status> {
        let who = caller(&request)?;
        let set = SetNumber(request.get_ref().set);
        let key = self.desk.trace(&who, set).await.map_err(desk_status)?;
        let busy = |_| Status::unavailable("too many ask at once");
        let place = Arc::clone(&self.reading).try_acquire_owned().map_err(busy)?;
        let frame = match key {
            None => None,
            Some(key) => {
                let traces = self.snapshots.traces().clone();
                let read = tokio::task::spawn_blocking(move || traces.plan(&key)).await;
                read.map_err(|join| home_status(&join))?.map_err(|error| home_status(&error))?
            }
        };
        let frame = Frame { rest: frame.unwrap_or_default().into(), _place: place };
        Ok(Response::new(tokio_stream::iter(frame).boxed()))
    }

    async fn record(
        &self,
        request: Request<Streaming<v1::TracePiece>>,
    ) -> Result<Response<v1::TraceRecorded>, Status> {
        let who = caller(&request)?;
        let late = |_| Status::deadline_exceeded("the trace took too long");
        let work = async {
            let closed = |_| Status::unavailable("home is ending");
            let _place = Arc::clone(&self.writing).acquire_owned().await.map_err(closed)?;
            let (set, touches) = self.take(&who, request.into_inner()).await?;
            let key = self.desk.trace(&who, set).await.map_err(desk_status)?;
            let key = key.ok_or_else(|| Status::failed_precondition("this set is not traced"))?;
            let (this, who) = (self.clone(), who.clone());
            let kept = tokio::task::spawn_blocking(move || this.keep(&who, &key, touches)).await;
            kept.map_err(|join| home_status(&join))?
        };
        tokio::time::timeout(PATIENCE, work).await.map_err(late)??;
        Ok(Response::new(v1::TraceRecorded {}))
    }
}

#[cfg(test)]
mod tests;
