//! `Plan` and `Submit` as streams: words of progress while the sources are frozen, then the answer.

use std::future::Future;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use limb_common::id::RunId;
use limb_common::task;
use limb_proto::v1 as proto;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::plan::{Told, UNSUPERVISED};
use super::{OwnerService, Replies, STREAM_DEPTH};
use crate::snapshot::Progress;

/// Between two words of progress.
const SAY_EVERY_MS: u64 = 100;

type Reply<T> = Result<T, Status>;

impl OwnerService {
    pub(super) fn start_plan(&self, request: proto::PlanRequest) -> Replies<proto::PlanProgress> {
        let this = self.clone();
        stream("plan", |replies| async move {
            let told = progress(replies, |hashing| proto::PlanProgress {
                body: Some(proto::plan_progress::Body::Hashing(hashing)),
            });
            let plan = this.make_plan(request, &told).await?;
            Ok(proto::PlanProgress { body: Some(proto::plan_progress::Body::Plan(plan)) })
        })
    }

    pub(super) fn start_submit(&self, request: proto::SubmitRequest) -> Replies<proto::SubmitProgress> {
        let this = self.clone();
        stream("submit", |replies| async move {
            let told = progress(replies, |hashing| proto::SubmitProgress {
                body: Some(proto::submit_progress::Body::Hashing(hashing)),
            });
            let run = this.submit_run(request, &told).await?;
            Ok(proto::SubmitProgress { body: Some(proto::submit_progress::Body::RunId(run.to_string())) })
        })
    }

    async fn submit_run(&self, request: proto::SubmitRequest, told: &Told) -> Result<RunId, Status> {
        let draft = self.draft(request.job.unwrap_or_default()).await?;
        let alone = self.standing.supervised_by.is_none();
        if alone && !request.unsupervised && !draft.provider.capabilities().is_local {
            return Err(Status::failed_precondition(UNSUPERVISED));
        }
        let frozen = self.freeze(draft, told).await?;
        frozen.check_budget()?;
        let spec = frozen.spec(&self.data.changes_home());
        let run = RunId::random();
        let dests = spec.outputs.iter().map(|output| output.dest_of(&spec.name, &run, 1)).collect();
        let submitted = match self.lifecycle.claim(&run, dests).await {
            Ok(()) => self.lifecycle.submit(run.clone(), spec, &frozen.draft.bound.secrets).await,
            Err(error) => Err(error),
        };
        if let Err(error) = submitted {
            self.lifecycle.unclaim(&run).await;
            return Err(error.into());
        }
        Ok(run)
    }
}

/// Not tied to the stream: from the moment that a run is durable it goes on without it. Until then
/// a caller that went away ends the work.
fn stream<T, F>(
    what: &'static str,
    work: impl FnOnce(mpsc::Sender<Reply<T>>) -> F + Send + 'static,
) -> Replies<T>
where
    T: Send + 'static,
    F: Future<Output = Reply<T>> + Send + 'static,
{
    let (replies, stream) = mpsc::channel::<Reply<T>>(STREAM_DEPTH);
    task::detach(what, async move {
        let last = tokio::select! {
            last = Box::pin(work(replies.clone())) => last,
            () = replies.closed() => return,
        };
        // A caller that is gone learns it from `limb ps`.
        drop(replies.send(last).await);
    });
    Box::pin(ReceiverStream::new(stream))
}

/// Words of progress that never wait: a caller who reads slowly hears fewer.
fn progress<T: Send + 'static>(
    replies: mpsc::Sender<Reply<T>>,
    reply: impl Fn(proto::HashProgress) -> T + Send + Sync + 'static,
) -> Told {
    let last = AtomicU64::new(0);
    Arc::new(move |source: &Path, progress: Progress| {
        let now = limb_common::clock::unix_ms();
        if now.saturating_sub(last.load(Ordering::Relaxed)) < SAY_EVERY_MS {
            return;
        }
        last.store(now, Ordering::Relaxed);
        let hashing = proto::HashProgress {
            source: source.display().to_string(),
            files_done: progress.files_done,
            bytes_done: progress.bytes_done,
            bytes_total: progress.bytes_total,
        };
        drop(replies.try_send(Ok(reply(hashing))));
    })
}
