//! Streams that go on while a run does: events, logs.

use std::time::Duration;

use limb_common::id::{AttemptNumber, RunId};
use limb_common::task;
use limb_proto::v1 as proto;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::{OwnerService, Replies, STREAM_DEPTH, internal};

/// One look at a log.
const LOG_PIECE_BYTES: usize = 256 * 1024;
/// Logs are files that grow: looked at this often while followed.
const LOG_POLL: Duration = Duration::from_millis(50);

impl OwnerService {
    /// Each event once, in order; with `follow` until the run has ended and all was said.
    pub(super) fn follow_events(&self, run: RunId, after: u64, follow: bool) -> Replies<proto::Event> {
        let (replies, stream) = mpsc::channel(STREAM_DEPTH);
        let this = self.clone();
        task::detach("follow events", async move {
            tokio::select! {
                () = replies.closed() => {}
                result = this.send_events(&run, after, follow, &replies) => {
                    if let Err(status) = result {
                        drop(replies.send(Err(status)).await);
                    }
                }
                () = this.standing.stop.cancelled(), if follow => {}
            }
        });
        Box::pin(ReceiverStream::new(stream))
    }

    async fn send_events(
        &self,
        run: &RunId,
        mut after: u64,
        follow: bool,
        replies: &mpsc::Sender<Result<proto::Event, Status>>,
    ) -> Result<(), Status> {
        let mut changes = self.ledger().changes();
        loop {
            changes.mark_unchanged();
            // Asked before the events are read: an end seen here has its events in that read.
            let ended = self.has_ended(run).await?;
            let events = self.ledger().events_after(run, after).await?;
            let none = events.is_empty();
            for event in events {
                after = event.seq;
                let event = proto::Event {
                    seq: event.seq,
                    at_unix_ms: event.at_unix_ms,
                    attempt: event.attempt,
                    kind: event.kind,
                    text: event.text,
                    json: event.json,
                };
                if replies.send(Ok(event)).await.is_err() {
                    return Ok(());
                }
            }
            if !none {
                continue;
            }
            if !follow || ended || changes.changed().await.is_err() {
                return Ok(());
            }
        }
    }

    async fn has_ended(&self, run: &RunId) -> Result<bool, Status> {
        Ok(self.ledger().run(run).await?.is_none_or(|row| row.ended_unix_ms.is_some()))
    }

    /// Raw bytes by offset: one attempt's, or (attempt 0) every attempt's in turn.
    pub(super) fn follow_logs(
        &self,
        run: RunId,
        attempt: u32,
        offset: u64,
        follow: bool,
    ) -> Replies<proto::LogChunk> {
        let (replies, stream) = mpsc::channel(STREAM_DEPTH);
        let this = self.clone();
        task::detach("follow logs", async move {
            tokio::select! {
                () = replies.closed() => {}
                result = this.send_logs(&run, attempt, offset, follow, &replies) => {
                    if let Err(status) = result {
                        drop(replies.send(Err(status)).await);
                    }
                }
                () = this.standing.stop.cancelled(), if follow => {}
            }
        });
        Box::pin(ReceiverStream::new(stream))
    }

    async fn send_logs(
        &self,
        run: &RunId,
        wanted: u32,
        mut offset: u64,
        follow: bool,
        replies: &mpsc::Sender<Result<proto::LogChunk, Status>>,
    ) -> Result<(), Status> {
        let mut attempt = wanted.max(1);
        loop {
            // Asked before the log is read: once true, what is read is all.
            let ended = self.has_ended(run).await?;
            let attempts = self.ledger().attempts(run).await?;
            let next_exists = attempts.iter().any(|row| row.number.0 > attempt);
            let complete = ended || next_exists;
            let data = self.log_piece(run, AttemptNumber(attempt), offset)?;
            if data.is_empty() {
                if complete && wanted == 0 && next_exists {
                    (attempt, offset) = (attempt + 1, 0);
                    continue;
                }
                if complete || !follow {
                    return Ok(());
                }
                tokio::time::sleep(LOG_POLL).await;
                continue;
            }
            let length = data.len() as u64;
            let chunk = proto::LogChunk { offset, data, attempt };
            if replies.send(Ok(chunk)).await.is_err() {
                return Ok(());
            }
            offset += length;
        }
    }

    fn log_piece(&self, run: &RunId, attempt: AttemptNumber, offset: u64) -> Result<bytes::Bytes, Status> {
        if !self.data.logs().exists(run, attempt) {
            return Ok(bytes::Bytes::new());
        }
        let log = self.data.logs().attempt(run, attempt).map_err(|e| internal(&e))?;
        log.read(offset, LOG_PIECE_BYTES).map_err(|e| internal(&e))
    }
}
