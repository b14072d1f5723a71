//! The one place where async tasks are spawned. Every task has a name, a span and an owner; when
//! the owner goes, the task goes.

use std::future::Future;

use tokio::task::{AbortHandle, JoinHandle};
use tracing::Instrument as _;

/// Owns a task: dropping it aborts the task.
#[derive(Debug)]
#[must_use = "dropping the handle aborts the task"]
pub struct Task<T> {
    handle: JoinHandle<T>,
}

impl<T> Task<T> {
    /// Waits for the end. A panic in the task becomes `None`, after it was logged.
    pub async fn join(mut self) -> Option<T> {
        match (&mut self.handle).await {
            Ok(value) => Some(value),
            Err(error) => {
                if error.is_panic() {
                    tracing::error!(%error, "a task panicked");
                }
                None
            }
        }
    }

    #[must_use]
    pub fn is_finished(&self) -> bool {
        self.handle.is_finished()
    }

    #[must_use]
    pub fn abort_handle(&self) -> AbortHandle {
        self.handle.abort_handle()
    }
}

impl<T> Drop for Task<T> {
    fn drop(&mut self) {
        self.handle.abort();
    }
}

/// Spawns `future` under a span of this name.
#[expect(clippy::disallowed_methods, reason = "this is their one home")]
pub fn spawn<F>(name: &'static str, future: F) -> Task<F::Output>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    Task { handle: tokio::spawn(future.instrument(tracing::info_span!("task", name))) }
}

/// Spawns a future that answers one request and needs no owner: it ends by itself because every
/// wait in it is bounded by the request's own life.
#[expect(clippy::disallowed_methods, reason = "this is their one home")]
pub fn detach<F>(name: &'static str, future: F)
where
    F: Future<Output = ()> + Send + 'static,
{
    drop(tokio::spawn(future.instrument(tracing::debug_span!("task", name))));
}
