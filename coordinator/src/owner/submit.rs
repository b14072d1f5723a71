//! `Submit`: freeze with progress, judge, make the run durable, answer.

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

type Reply = Result<proto::SubmitProgress, Status>;

impl OwnerService {
    pub(super) fn start_submit(
        &self,
        request: proto::SubmitRequest,
    ) -> Result<Replies<proto::SubmitProgress>, Status> {
        let (replies, stream) = mpsc::channel::<Reply>(STREAM_DEPTH);
        let this = self.clone();
        // Not tied to the stream: from the moment that the run is durable it goes on without it.
        // Until then a caller that went away is noticed at the next word of progress.
        task::detach("submit", async move {
            let work = Box::pin(this.submit_run(request, &replies));
            let outcome = tokio::select! {
                outcome = work => outcome,
                () = replies.closed() => return,
            };
            let last = outcome.map(|run| proto::SubmitProgress {
                body: Some(proto::submit_progress::Body::RunId(run.to_string())),
            });
            // A caller that is gone learns it from `limb ps`.
            drop(replies.send(last).await);
        });
        Ok(Box::pin(ReceiverStream::new(stream)))
    }

    async fn submit_run(
        &self,
        request: proto::SubmitRequest,
        replies: &mpsc::Sender<Reply>,
    ) -> Result<RunId, Status> {
        let draft = self.draft(request.job.unwrap_or_default()).await?;
        let alone = self.standing.supervised_by.is_none();
        if alone && !request.unsupervised && !draft.provider.capabilities().is_local {
            return Err(Status::failed_precondition(UNSUPERVISED));
        }
        let frozen = self.freeze(draft, &progress(replies.clone())).await?;
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

/// Words of progress that never wait: a caller who reads slowly hears fewer.
fn progress(replies: mpsc::Sender<Reply>) -> Told {
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
        let body = Some(proto::submit_progress::Body::Hashing(hashing));
        drop(replies.try_send(Ok(proto::SubmitProgress { body })));
    })
}
