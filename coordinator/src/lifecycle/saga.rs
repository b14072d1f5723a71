//! One run, step by step: each step reads the ledger and does the next thing. A step that fails
//! is done again, later and later; nothing is remembered that the ledger does not say.

use std::sync::Arc;
use std::time::Duration;

use limb_common::clock::BootInstant;
use limb_common::error;
use limb_common::id::RunId;
use limb_common::phase::{Event, ExitVerdict, JobOutcome, NotStarted, Phase, StopCause};
use limb_common::units::Micros;

use super::limits::Budget;
use super::{Lifecycle, LifecycleError, lock};
use crate::ledger::{AttemptRow, NewAttempt, RunRow};

/// A failed step is tried again after this, doubled each time.
const FIRST_RETRY: Duration = Duration::from_millis(200);
const LONGEST_RETRY: Duration = Duration::from_secs(60);
/// The saga looks at least this often, whatever it waits for.
const LONGEST_WAIT: Duration = Duration::from_secs(30);

/// What a step leads to.
#[derive(Clone, Copy, Debug)]
pub(super) enum Next {
    Again,
    /// Until woken, or then.
    WaitUntil(BootInstant),
    /// Until woken.
    Wait,
    Done,
}

impl Lifecycle {
    pub(super) async fn drive(self: Arc<Self>, run: RunId) {
        let wake = self.wake_of(&run);
        let mut retry = FIRST_RETRY;
        loop {
            let pause = match Box::pin(self.step(&run)).await {
                Ok(Next::Done) => break,
                Ok(Next::Again) => Duration::ZERO,
                Ok(Next::Wait) => LONGEST_WAIT,
                Ok(Next::WaitUntil(until)) => until.saturating_since(self.now()).min(LONGEST_WAIT),
                Err(error) => {
                    tracing::warn!(%run, error = error::chain(&error), "a step failed; it is tried again");
                    retry = (retry * 2).min(LONGEST_RETRY);
                    retry
                }
            };
            if pause.is_zero() {
                continue;
            }
            if pause < retry {
                retry = FIRST_RETRY;
            }
            tokio::select! {
                () = wake.notified() => {}
                () = tokio::time::sleep(pause) => {}
            }
        }
        lock(&self.wakes).remove(&run);
    }

    async fn step(&self, run: &RunId) -> Result<Next, LifecycleError> {
        let Some(row) = self.parts.ledger.run(run).await? else { return Ok(Next::Done) };
        if row.ended_unix_ms.is_some() {
            return self.let_go(run).await;
        }
        let attempts = self.parts.ledger.attempts(run).await?;
        let Some(attempt) = attempts.last() else { return self.begin(&row).await };
        match &attempt.state.phase {
            Phase::Closed => {
                self.forget(attempt);
                if self.goes_on(&row, attempt).await? {
                    self.begin(&row).await
                } else {
                    self.end(&row, attempt).await
                }
            }
            Phase::Intended => self.ask_for_box(&row, attempt).await,
            Phase::Creating { quarantined: false } => {
                // This process has no call in flight: an earlier one may have had.
                let text = "the coordinator was restarted meanwhile".to_owned();
                self.apply(attempt, Event::CreateAmbiguous { text }).await?;
                Ok(Next::Again)
            }
            Phase::Creating { quarantined: true } => self.quarantine(&row, attempt).await,
            Phase::Booting { .. } | Phase::Joined { .. } => self.watch_boot(&row, attempt).await,
            Phase::Enrolled { .. } | Phase::SettingUp { .. } | Phase::Running { .. } => {
                self.watch_job(&row, attempt).await
            }
            Phase::Ending { .. } => self.watch_ending(&row, attempt).await,
            Phase::Destroying { .. } => self.settle_data(attempt).await,
        }
    }

    async fn begin(&self, row: &RunRow) -> Result<Next, LifecycleError> {
        let provider = self.provider(&row.spec.provider)?;
        let capabilities = provider.capabilities();
        let longest = row.spec.boot_timeout()
            + row.spec.max_duration()
            + row.spec.stop_duration()
            + capabilities.destroy_allowance;
        let deadline =
            self.parts.clock.unix_ms() + u64::try_from(longest.as_millis()).unwrap_or(u64::MAX / 4);
        let attempt = self
            .parts
            .ledger
            .begin_attempt(NewAttempt {
                run: row.run.clone(),
                provider: row.spec.provider.clone(),
                offer: row.spec.offer.clone(),
                price_micros_per_hour: row.spec.price_micros_per_hour,
                // As random as a run id, and not one.
                box_name: RunId::random().as_str().replacen("r-", "limb-", 1),
                deadline_unix_ms: deadline,
            })
            .await?;
        self.adopt(&row.spec, &attempt);
        Ok(Next::Again)
    }

    /// Is this end worth another box?
    async fn goes_on(&self, row: &RunRow, last: &AttemptRow) -> Result<bool, LifecycleError> {
        if row.stop.is_some() || last.number.0 >= row.spec.max_attempts {
            return Ok(false);
        }
        let worth = match &last.state.job {
            Some(JobOutcome::Ended { .. }) | None => false,
            Some(JobOutcome::Lost { vanished, .. }) => {
                row.spec.retry_lost || (*vanished && row.spec.retry_preemption)
            }
            Some(JobOutcome::NeverStarted { why, .. }) => match why {
                NotStarted::NoCapacity | NotStarted::NeverAppeared => row.spec.retry_no_capacity,
                // The box's fault, not the job's: another one may do.
                NotStarted::BootFailed | NotStarted::PrepareFailed => row.spec.retry_lost,
                NotStarted::Quota | NotStarted::Auth | NotStarted::Refused | NotStarted::Stopped => false,
            },
        };
        if !worth {
            return Ok(false);
        }
        let affordable = self.budget(row, None).await?.affords_a_box();
        if !affordable {
            let text = "no further attempt: max_cost leaves no room for one".to_owned();
            self.parts.ledger.note(&row.run, last.number, "no-retry", text).await?;
        }
        Ok(affordable)
    }

    async fn end(&self, row: &RunRow, last: &AttemptRow) -> Result<Next, LifecycleError> {
        let ExitVerdict { code, origin } = last.state.exit();
        let job = last.state.job.as_ref().map_or_else(|| "unknown".to_owned(), ToString::to_string);
        let data = last.state.data.as_ref().map_or_else(|| "unknown".to_owned(), ToString::to_string);
        let text = format!("job: {job}; data: {data}; box confirmed gone; exit code {code} ({origin})");
        self.parts.ledger.end_run(&row.run, text).await?;
        Ok(Next::Again)
    }

    async fn let_go(&self, run: &RunId) -> Result<Next, LifecycleError> {
        self.parts
            .outputs
            .unlock(run)
            .await
            .map_err(|source| LifecycleError::Outputs { what: "let go", source })?;
        self.parts.secrets.forget(run)?;
        Ok(Next::Done)
    }

    /// `current`: the attempt whose own cost is not yet counted as spent.
    pub(super) async fn budget(
        &self,
        row: &RunRow,
        current: Option<&AttemptRow>,
    ) -> Result<Budget, LifecycleError> {
        let now = self.parts.clock.unix_ms();
        let costs = self.parts.ledger.costs(Some(row.run.clone())).await?;
        let spent = costs
            .iter()
            .filter(|cost| current.is_none_or(|current| cost.attempt != current.number))
            .map(|cost| cost.cost(now).0)
            .sum();
        let provider = self.provider(&row.spec.provider)?;
        Ok(Budget {
            max_duration: row.spec.max_duration(),
            max_cost: Micros(row.spec.max_cost_micros),
            spent: Micros(spent),
            price_per_hour: row.spec.price(),
            stop_duration: row.spec.stop_duration(),
            destroy_allowance: provider.capabilities().destroy_allowance,
        })
    }

    /// The stop that limits impose, if it is due; else when.
    pub(super) async fn due_limit(
        &self,
        row: &RunRow,
        attempt: &AttemptRow,
    ) -> Result<Result<StopCause, BootInstant>, LifecycleError> {
        let (after, cause) = self.budget(row, Some(attempt)).await?.stop_after();
        let started = self.instant_of(attempt.started_unix_ms.unwrap_or(attempt.intended_unix_ms));
        let due = started + after;
        Ok(if self.now() >= due { Ok(cause) } else { Err(due) })
    }

    async fn watch_boot(&self, row: &RunRow, attempt: &AttemptRow) -> Result<Next, LifecycleError> {
        if let Some(cause) = row.stop.clone() {
            self.apply(attempt, Event::StopAsked { cause }).await?;
            return Ok(Next::Again);
        }
        let limit = match self.due_limit(row, attempt).await? {
            Ok(cause) => {
                self.apply(attempt, Event::StopAsked { cause }).await?;
                return Ok(Next::Again);
            }
            Err(due) => due,
        };
        let started = self.instant_of(attempt.started_unix_ms.unwrap_or(attempt.intended_unix_ms));
        let boot = started + row.spec.boot_timeout();
        if self.now() >= boot {
            self.apply(attempt, Event::StopAsked { cause: StopCause::BootTimeout }).await?;
            return Ok(Next::Again);
        }
        Ok(Next::WaitUntil(boot.min(limit)))
    }

    async fn watch_job(&self, row: &RunRow, attempt: &AttemptRow) -> Result<Next, LifecycleError> {
        self.set_serving(attempt, &attempt.state);
        if let Some(cause) = row.stop.clone() {
            self.apply(attempt, Event::StopAsked { cause }).await?;
            return Ok(Next::Again);
        }
        let limit = match self.due_limit(row, attempt).await? {
            Ok(cause) => {
                self.apply(attempt, Event::StopAsked { cause }).await?;
                return Ok(Next::Again);
            }
            Err(due) => due,
        };
        match self.lease_end(attempt) {
            Some(lost_at) if self.now() >= lost_at => {
                self.lose(attempt, "no heartbeat for as long as its lease lasts", false).await?;
                Ok(Next::Again)
            }
            Some(lost_at) => Ok(Next::WaitUntil(lost_at.min(limit))),
            None => Ok(Next::WaitUntil(limit)),
        }
    }

    pub(super) fn lease_end(&self, attempt: &AttemptRow) -> Option<BootInstant> {
        self.with_live(attempt, |live| live.lease.map(limb_common::lease::HomeLease::lost_at)).flatten()
    }

    pub(super) async fn lose(
        &self,
        attempt: &AttemptRow,
        why: &str,
        vanished: bool,
    ) -> Result<(), LifecycleError> {
        self.revoke(attempt);
        self.apply(attempt, Event::BoxLost { why: why.to_owned(), vanished }).await?;
        Ok(())
    }
}
