//! A long stream of an agent at home: answers together with the task that makes them, for as long
//! as the agent's attempt lives.
//!
//! Invariant: dropping the stream ends the task; an attempt that is over is noticed on the way in
//! and within [`LIVENESS_EVERY`] after.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::{Stream, StreamExt as _};
use limb_common::identity::AgentIdentity;
use limb_common::task::Task;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::desk::Desk;

const LIVENESS_EVERY: Duration = Duration::from_secs(3);

/// Where the task puts its answers.
pub(super) type Out<T> = mpsc::Sender<Result<T, Status>>;

/// Answers, and the task that makes them.
#[derive(Debug)]
pub struct Worked<T> {
    answers: ReceiverStream<Result<T, Status>>,
    _worker: Task<()>,
}

impl<T: Send + 'static> Worked<T> {
    /// `depth` answers may wait for the transport.
    pub(super) fn start<F>(name: &'static str, depth: usize, work: impl FnOnce(Out<T>) -> F) -> Self
    where
        F: Future<Output = Result<(), Status>> + Send + 'static,
    {
        let (out, answers) = mpsc::channel(depth);
        let working = work(out.clone());
        let worker = limb_common::task::spawn(name, async move {
            if let Err(status) = working.await {
                // The client may have gone, and then nobody needs to know.
                drop(out.send(Err(status)).await);
            }
        });
        Self { answers: ReceiverStream::new(answers), _worker: worker }
    }
}

impl<T> Stream for Worked<T> {
    type Item = Result<T, Status>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.answers.poll_next_unpin(context)
    }
}

/// What an agent hears whose attempt is over.
pub(super) fn over() -> Status {
    Status::permission_denied("this attempt is over")
}

/// Does the attempt (still) live?
pub(super) fn check_live(desk: &dyn Desk, who: &AgentIdentity) -> Result<(), Status> {
    if desk.is_live(who) { Ok(()) } else { Err(over()) }
}

/// Asks again and again beside the work of a stream.
pub(super) struct Liveness {
    desk: Arc<dyn Desk>,
    who: AgentIdentity,
    ticks: tokio::time::Interval,
}

impl Liveness {
    pub(super) fn new(desk: Arc<dyn Desk>, who: AgentIdentity) -> Self {
        Self { desk, who, ticks: tokio::time::interval(LIVENESS_EVERY) }
    }

    /// For a `select!`: ends at each look. Loses nothing when it is dropped half-way.
    ///
    /// # Errors
    /// The attempt is over.
    pub(super) async fn look(&mut self) -> Result<(), Status> {
        self.ticks.tick().await;
        check_live(self.desk.as_ref(), &self.who)
    }
}
