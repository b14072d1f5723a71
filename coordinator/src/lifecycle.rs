//! The lifecycle of runs at home: one saga per run that asks for a box and follows it to its end,
//! a teardown reconciler that gets rid of boxes, a sweep that looks for boxes nobody expects.
//!
//! ```text
//!   submit ─▶ saga (one per run) ──events──▶ ledger ◀──events── desk (agents' calls)
//!                                              │ Destroying
//!                                              ▼
//!                      sweep ───────────▶ teardown (one, never gives up)
//! ```
//!
//! All state that matters is in the ledger; what is in memory here (leases, orders, timers) is
//! rebuilt from it. Each step looks at the ledger and does the next thing, so that a restart at
//! any point, or a wake too many, needs no special case.
//!
//! Never: ask for a second box while a first one of the same run may exist; end a box because of
//! silence that home itself may have caused; re-run a job whose outcome is unknown without
//! `retry` saying so.

mod create;
pub mod desk;
mod ending;
pub mod limits;
mod live;
mod saga;
pub mod seam;
mod sweep;
mod teardown;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use limb_common::clock::{BootInstant, Clock};
use limb_common::id::{AttemptNumber, RunId};
use limb_common::phase::{Attempt, Event, StopCause};
use limb_common::secret::Secret;
use limb_common::task::{self, Task};
use tokio::sync::Notify;

pub use live::Live;
pub use seam::{Finished, Outputs};
pub use sweep::{BoxVerdict, SweepReport, SweptBox};

use crate::ledger::secrets::SecretStore;
use crate::ledger::{AttemptRow, Ledger, LedgerError, RunSpec};
use crate::provider::{Provider, ProviderError, Providers};

#[derive(Debug, thiserror::Error)]
pub enum LifecycleError {
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error(transparent)]
    Provider(#[from] ProviderError),
    #[error("there is no provider `{0}` here; hint: `limb config show` lists the configured ones")]
    NoProvider(String),
    #[error("the results could not be {what}")]
    Outputs { what: &'static str, source: Box<dyn std::error::Error + Send + Sync> },
}

/// What a box is told about home.
#[derive(Clone, Debug)]
pub struct HomeEndpoint {
    /// `IP:PORT` of the agent listener.
    pub address: String,
    pub ca_certificate_pem: String,
}

/// Everything the lifecycle works with.
#[derive(Debug)]
pub struct Parts {
    pub ledger: Ledger,
    pub secrets: SecretStore,
    pub providers: Providers,
    pub outputs: Arc<dyn Outputs>,
    pub clock: Arc<dyn Clock>,
    pub endpoint: HomeEndpoint,
}

/// The lifecycle. Its tasks end with [`Lifecycle::halt`]; boxes go on.
#[derive(Debug)]
pub struct Lifecycle {
    parts: Parts,
    home_boot_id: String,
    live: Mutex<HashMap<(RunId, AttemptNumber), Live>>,
    wakes: Mutex<HashMap<RunId, Arc<Notify>>>,
    teardown: Notify,
    tasks: Mutex<Tasks>,
}

#[derive(Debug, Default)]
struct Tasks {
    halted: bool,
    sagas: HashMap<RunId, Task<()>>,
    services: Vec<Task<()>>,
}

/// Nothing panics while one of these is held; a poisoned one is as good as any.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Lifecycle {
    /// Takes up what the ledger knows: adopts what lives, goes on with what ends.
    ///
    /// # Errors
    /// The ledger's.
    pub async fn open(parts: Parts) -> Result<Arc<Self>, LifecycleError> {
        let home_boot_id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .map(|text| text.trim().to_owned())
            .unwrap_or_default();
        let lifecycle = Arc::new(Self {
            parts,
            home_boot_id,
            live: Mutex::default(),
            wakes: Mutex::default(),
            teardown: Notify::new(),
            tasks: Mutex::default(),
        });
        lifecycle.recover().await?;
        Ok(lifecycle)
    }

    async fn recover(self: &Arc<Self>) -> Result<(), LifecycleError> {
        for attempt in self.parts.ledger.open_attempts().await? {
            if let Some(run) = self.parts.ledger.run(&attempt.run).await? {
                self.adopt(&run.spec, &attempt);
            }
        }
        self.let_go_of_what_nobody_holds().await?;
        for run in self.parts.ledger.runs(false).await? {
            self.start_saga(run.run);
        }
        let mut services = vec![task::spawn("teardown", Arc::clone(self).tear_down_forever())];
        for provider in self.parts.providers.iter() {
            services.push(task::spawn("sweep", Arc::clone(self).sweep_forever(Arc::clone(provider))));
        }
        lock(&self.tasks).services = services;
        Ok(())
    }

    /// A crash may have come between a run's claim and the run, or between its end and the letting
    /// go: its destinations would be nobody's for ever.
    async fn let_go_of_what_nobody_holds(&self) -> Result<(), LifecycleError> {
        let locked = self
            .parts
            .outputs
            .locked()
            .await
            .map_err(|source| LifecycleError::Outputs { what: "looked through", source })?;
        for run in locked {
            let row = self.parts.ledger.run(&run).await?;
            if row.is_none_or(|row| row.ended_unix_ms.is_some()) {
                tracing::info!(%run, "destinations of a run that is over or never came to be: let go");
                self.unclaim(&run).await;
            }
        }
        Ok(())
    }

    /// A run exists from here on; its secrets are kept before it is.
    ///
    /// # Errors
    /// The ledger's, or the disk's.
    pub async fn submit(
        self: &Arc<Self>,
        run: RunId,
        spec: RunSpec,
        secrets: &[(String, Secret<String>)],
    ) -> Result<(), LifecycleError> {
        self.parts.secrets.keep(&run, secrets)?;
        self.parts.ledger.insert_run(run.clone(), spec).await?;
        self.start_saga(run);
        Ok(())
    }

    /// The destinations become this run's until it ends.
    ///
    /// # Errors
    /// [`LifecycleError::Outputs`] where another run uses one.
    pub async fn claim(&self, run: &RunId, dests: Vec<PathBuf>) -> Result<(), LifecycleError> {
        self.parts
            .outputs
            .lock(run, dests)
            .await
            .map_err(|source| LifecycleError::Outputs { what: "claimed", source })
    }

    /// A run that was claimed for and did not come to be.
    pub async fn unclaim(&self, run: &RunId) {
        if let Err(problem) = self.parts.outputs.unlock(run).await {
            tracing::warn!(%run, error = limb_common::error::chain(&*problem), "destinations stay locked");
        }
        if let Err(problem) = self.parts.secrets.forget(run) {
            tracing::warn!(%run, error = limb_common::error::chain(&problem), "secrets stay");
        }
    }

    /// The one way to stop a run: durable, sticky, level-triggered.
    ///
    /// # Errors
    /// The ledger's; `Missing` where there is no such run.
    pub async fn stop(&self, run: &RunId, cause: StopCause) -> Result<(), LifecycleError> {
        self.parts.ledger.stop_run(run, cause).await?;
        self.wake(run);
        Ok(())
    }

    #[must_use]
    pub fn ledger(&self) -> &Ledger {
        &self.parts.ledger
    }

    #[must_use]
    pub fn providers(&self) -> &Providers {
        &self.parts.providers
    }

    #[must_use]
    pub fn endpoint(&self) -> &HomeEndpoint {
        &self.parts.endpoint
    }

    /// Ends every task of ours. Boxes, and what the ledger says of them, stay as they are.
    pub fn halt(&self) {
        let ended = {
            let mut tasks = lock(&self.tasks);
            tasks.halted = true;
            (std::mem::take(&mut tasks.sagas), std::mem::take(&mut tasks.services))
        };
        drop(ended);
    }

    fn start_saga(self: &Arc<Self>, run: RunId) {
        let mut tasks = lock(&self.tasks);
        if tasks.halted || tasks.sagas.get(&run).is_some_and(|saga| !saga.is_finished()) {
            return;
        }
        let saga = task::spawn("saga", Arc::clone(self).drive(run.clone()));
        tasks.sagas.insert(run, saga);
    }

    fn wake_of(&self, run: &RunId) -> Arc<Notify> {
        Arc::clone(lock(&self.wakes).entry(run.clone()).or_default())
    }

    /// The saga looks again.
    fn wake(&self, run: &RunId) {
        self.wake_of(run).notify_one();
        self.teardown.notify_one();
    }

    async fn apply(&self, attempt: &AttemptRow, event: Event) -> Result<Attempt, LifecycleError> {
        let after = self.parts.ledger.apply(&attempt.run, attempt.number, event).await?;
        self.wake(&attempt.run);
        Ok(after)
    }

    fn now(&self) -> BootInstant {
        self.parts.clock.boottime()
    }

    /// A wall-clock time of the ledger on this boot's clock, as far as both can be believed.
    fn instant_of(&self, unix_ms: u64) -> BootInstant {
        let age = Duration::from_millis(self.parts.clock.unix_ms().saturating_sub(unix_ms));
        BootInstant::from_duration(self.now().since_boot().saturating_sub(age))
    }

    fn provider(&self, name: &str) -> Result<Arc<dyn Provider>, LifecycleError> {
        self.parts.providers.get(name).cloned().ok_or_else(|| LifecycleError::NoProvider(name.to_owned()))
    }
}
