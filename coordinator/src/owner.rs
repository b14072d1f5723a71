//! What the owner's commands may ask of the coordinator: the `Owner` service. Messages become
//! domain values here; everything that lasts happens in the lifecycle.
//!
//! Never: answer `Submit` before the run is durable; say that a box is gone before it is
//! confirmed.

mod dests;
mod follow;
mod outputs;
mod plan;
mod submit;
mod views;

use std::pin::Pin;
use std::sync::Arc;

use limb_common::error;
use limb_common::id::RunId;
use limb_common::phase::StopCause;
use limb_proto::v1 as proto;
use limb_proto::v1::owner_server::Owner;
use tokio_stream::Stream;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};

use crate::ledger::{Ledger, RunRow};
use crate::lifecycle::{Lifecycle, LifecycleError};
use crate::serve::Data;
use crate::settings::Settings;

/// Progress and rows on their way to a command: a slow reader slows its own stream only.
const STREAM_DEPTH: usize = 16;

type Replies<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

/// What the coordinator says about itself.
#[derive(Clone, Debug)]
pub struct Standing {
    pub address: String,
    pub epoch: u64,
    pub supervised_by: Option<String>,
    pub stop: CancellationToken,
}

/// The service. Cheap to clone.
#[derive(Clone, Debug)]
pub struct OwnerService {
    lifecycle: Arc<Lifecycle>,
    data: Data,
    settings: Arc<Settings>,
    standing: Standing,
}

/// A problem of home's own, with its whole chain.
fn internal(problem: &(dyn std::error::Error + 'static)) -> Status {
    Status::internal(error::chain(problem))
}

/// Something that the owner can change.
fn refused(problem: &(dyn std::error::Error + 'static)) -> Status {
    Status::failed_precondition(error::chain(problem))
}

impl OwnerService {
    #[must_use]
    pub fn new(lifecycle: Arc<Lifecycle>, data: Data, settings: Settings, standing: Standing) -> Self {
        Self { lifecycle, data, settings: Arc::new(settings), standing }
    }

    fn ledger(&self) -> &Ledger {
        self.lifecycle.ledger()
    }

    /// A run by its id, or the newest one of that name.
    async fn find(&self, text: &str) -> Result<RunRow, Status> {
        if let Ok(id) = text.parse::<RunId>()
            && let Some(row) = self.ledger().run(&id).await.map_err(|e| internal(&e))?
        {
            return Ok(row);
        }
        let all = self.ledger().runs(true).await.map_err(|e| internal(&e))?;
        all.into_iter().find(|row| row.spec.name == text).ok_or_else(|| {
            Status::not_found(format!("there is no run {text:?}; hint: `limb ps -a` lists them all"))
        })
    }

    async fn live_runs(&self) -> Result<u32, Status> {
        let open = self.ledger().runs(false).await.map_err(|e| internal(&e))?;
        Ok(u32::try_from(open.len()).unwrap_or(u32::MAX))
    }
}

#[tonic::async_trait]
impl Owner for OwnerService {
    type PlanStream = Replies<proto::PlanProgress>;
    type SubmitStream = Replies<proto::SubmitProgress>;
    type EventsStream = Replies<proto::Event>;
    type LogsStream = Replies<proto::LogChunk>;
    type VerifyResultsStream = Replies<proto::VerifiedFile>;

    async fn status(&self, _: Request<proto::StatusRequest>) -> Result<Response<proto::StatusReply>, Status> {
        Ok(Response::new(proto::StatusReply {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            epoch: self.standing.epoch,
            agent_address: self.standing.address.clone(),
            supervised_by: self.standing.supervised_by.clone().unwrap_or_default(),
            live_runs: self.live_runs().await?,
            home_id: self.ledger().home().to_string(),
        }))
    }

    async fn plan(&self, request: Request<proto::PlanRequest>) -> Result<Response<Self::PlanStream>, Status> {
        Ok(Response::new(self.start_plan(request.into_inner())))
    }

    async fn submit(
        &self,
        request: Request<proto::SubmitRequest>,
    ) -> Result<Response<Self::SubmitStream>, Status> {
        Ok(Response::new(self.start_submit(request.into_inner())))
    }

    async fn list_runs(
        &self,
        request: Request<proto::ListRunsRequest>,
    ) -> Result<Response<proto::ListRunsReply>, Status> {
        let request = request.into_inner();
        let rows = if request.run.is_empty() {
            self.ledger().runs(request.all).await.map_err(|e| internal(&e))?
        } else {
            vec![self.find(&request.run).await?]
        };
        let mut runs = Vec::with_capacity(rows.len());
        for row in rows {
            runs.push(self.run_info(row).await?);
        }
        Ok(Response::new(proto::ListRunsReply { runs }))
    }

    async fn events(
        &self,
        request: Request<proto::EventsRequest>,
    ) -> Result<Response<Self::EventsStream>, Status> {
        let request = request.into_inner();
        let row = self.find(&request.run).await?;
        Ok(Response::new(self.follow_events(row.run, request.after_seq, request.follow)))
    }

    async fn logs(&self, request: Request<proto::LogsRequest>) -> Result<Response<Self::LogsStream>, Status> {
        let request = request.into_inner();
        let row = self.find(&request.run).await?;
        Ok(Response::new(self.follow_logs(row.run, request.attempt, request.offset, request.follow)))
    }

    async fn stop(&self, request: Request<proto::StopRequest>) -> Result<Response<proto::StopReply>, Status> {
        let request = request.into_inner();
        let row = self.find(&request.run).await?;
        if row.ended_unix_ms.is_some() {
            return Ok(Response::new(proto::StopReply { state: "ended".to_owned() }));
        }
        let cause = StopCause::Owner { reason: request.reason };
        self.lifecycle.stop(&row.run, cause).await.map_err(|e| internal(&e))?;
        Ok(Response::new(proto::StopReply { state: "stopping".to_owned() }))
    }

    async fn list_results(
        &self,
        request: Request<proto::ListResultsRequest>,
    ) -> Result<Response<proto::ListResultsReply>, Status> {
        let row = self.find(&request.into_inner().run).await?;
        let files = self.result_files(&row).await?;
        Ok(Response::new(proto::ListResultsReply { files }))
    }

    async fn verify_results(
        &self,
        request: Request<proto::ListResultsRequest>,
    ) -> Result<Response<Self::VerifyResultsStream>, Status> {
        let row = self.find(&request.into_inner().run).await?;
        self.verify_files(row).await.map(Response::new)
    }

    async fn cost(&self, request: Request<proto::CostRequest>) -> Result<Response<proto::CostReply>, Status> {
        let request = request.into_inner();
        let run = match request.run.as_str() {
            "" => None,
            text => Some(self.find(text).await?.run),
        };
        let rows = self.cost_rows(run, &request.month).await?;
        Ok(Response::new(proto::CostReply { rows }))
    }

    async fn reap(&self, request: Request<proto::ReapRequest>) -> Result<Response<proto::ReapReply>, Status> {
        let report = Box::pin(self.lifecycle.reap(!request.into_inner().dry_run)).await;
        Ok(Response::new(self.reap_reply(report)))
    }

    async fn shutdown(
        &self,
        request: Request<proto::ShutdownRequest>,
    ) -> Result<Response<proto::ShutdownReply>, Status> {
        let live_runs = self.live_runs().await?;
        let stopping = live_runs == 0 || request.into_inner().even_with_live_runs;
        if stopping {
            crate::serve::stopped::remember(&self.settings.state_dir).map_err(|problem| {
                Status::internal(format!("the stop could not be written down: {problem}"))
            })?;
            self.standing.stop.cancel();
        }
        Ok(Response::new(proto::ShutdownReply { stopping, live_runs }))
    }
}

impl From<LifecycleError> for Status {
    fn from(problem: LifecycleError) -> Self {
        match &problem {
            LifecycleError::Ledger(_) => internal(&problem),
            LifecycleError::Provider(_) => Self::unavailable(error::chain(&problem)),
            LifecycleError::NoProvider(_) | LifecycleError::Outputs { .. } => refused(&problem),
        }
    }
}
