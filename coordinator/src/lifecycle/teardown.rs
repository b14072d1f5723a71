//! The teardown reconciler. It takes no input: whatever the ledger calls `Destroying` must go,
//! whoever put it there and whenever. It looks when told and at intervals, never gives up, and
//! gets louder.
//!
//! A box is gone when the provider heard the terminate and then listed without it (or as
//! terminated) in as many spaced lists as the provider needs. An error is never an absence.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use limb_common::clock::BootInstant;
use limb_common::error;
use limb_common::id::{AttemptNumber, InstanceId, RunId};
use limb_common::phase::{Event, Phase};
use tokio::sync::Mutex;

use super::{Lifecycle, LifecycleError};
use crate::ledger::AttemptRow;
use crate::provider::{Capabilities, ErrorClass};

/// The longest time between two looks at a box whose provider these settings do not know.
const NO_PROVIDER_BACKOFF: Duration = Duration::from_secs(5 * 60);
/// With nothing to do the reconciler still looks this often.
const IDLE: Duration = Duration::from_secs(5);

/// What is known of one box on its way out. Lost in a restart, which only means starting over.
#[derive(Debug, Default)]
struct Progress {
    /// The provider has answered a terminate for certain.
    heard: bool,
    absences: u32,
    first_absent_unix_ms: u64,
    last_absent: Option<BootInstant>,
    failures: u32,
    due: Option<BootInstant>,
}

type Key = (RunId, AttemptNumber);

impl Lifecycle {
    pub(super) async fn tear_down_forever(self: Arc<Self>) {
        let progress: Mutex<HashMap<Key, Arc<Mutex<Progress>>>> = Mutex::default();
        loop {
            let pause = match self.tear_down_round(&progress).await {
                Ok(next) => next.map_or(IDLE, |due| due.saturating_since(self.now())),
                Err(error) => {
                    tracing::error!(error = error::chain(&error), "teardown cannot read the ledger");
                    IDLE
                }
            };
            tokio::select! {
                () = self.teardown.notified() => {}
                // Zero would spin where a box is due at once again.
                () = tokio::time::sleep(pause.clamp(Duration::from_millis(1), IDLE)) => {}
            }
        }
    }

    /// One look at every box that must go, side by side: one that hangs delays no other beyond
    /// its call's own limit.
    async fn tear_down_round(
        &self,
        progress: &Mutex<HashMap<Key, Arc<Mutex<Progress>>>>,
    ) -> Result<Option<BootInstant>, LifecycleError> {
        let open = self.parts.ledger.open_attempts().await?;
        let going: Vec<_> = open
            .into_iter()
            .filter(|attempt| attempt.state.destroy.is_none())
            .filter_map(|attempt| match &attempt.state.phase {
                Phase::Destroying { instance } => {
                    let instance = instance.clone();
                    Some((attempt, instance))
                }
                Phase::Intended
                | Phase::Creating { .. }
                | Phase::Booting { .. }
                | Phase::Joined { .. }
                | Phase::Enrolled { .. }
                | Phase::SettingUp { .. }
                | Phase::Running { .. }
                | Phase::Ending { .. }
                | Phase::Closed => None,
            })
            .collect();
        let mut states = progress.lock().await;
        states.retain(|(run, number), _| {
            going.iter().any(|(attempt, _)| attempt.run == *run && attempt.number == *number)
        });
        let work: Vec<_> = going
            .iter()
            .map(|(attempt, instance)| {
                let state = states.entry((attempt.run.clone(), attempt.number)).or_default();
                self.tear_down(attempt, instance, Arc::clone(state))
            })
            .collect();
        drop(states);
        Ok(futures_util::future::join_all(work).await.into_iter().flatten().min())
    }

    /// One box, one step. Returns when it wants to be looked at again.
    async fn tear_down(
        &self,
        attempt: &AttemptRow,
        instance: &InstanceId,
        state: Arc<Mutex<Progress>>,
    ) -> Option<BootInstant> {
        let mut state = state.lock().await;
        let now = self.now();
        if let Some(due) = state.due.filter(|due| now < *due) {
            return Some(due);
        }
        let provider = match self.provider(&attempt.provider) {
            Ok(provider) => provider,
            Err(problem) => {
                self.complain(attempt, &mut state, "blocked", &error::chain(&problem)).await;
                state.due = Some(now + NO_PROVIDER_BACKOFF);
                return state.due;
            }
        };
        let capabilities = provider.capabilities();
        if state.absences == 0
            && let Err(problem) = self.ask_to_terminate(attempt, instance, &mut state).await
        {
            let kind = match problem {
                ErrorClass::Auth => "blocked",
                ErrorClass::Ambiguous
                | ErrorClass::NoCapacity
                | ErrorClass::Quota
                | ErrorClass::Refused
                | ErrorClass::Retry => "destroy-delayed",
            };
            let text = format!("the box is not confirmed gone after {} tries", state.failures + 1);
            self.complain(attempt, &mut state, kind, &text).await;
        }
        self.look(attempt, instance, &mut state, capabilities).await;
        state.due
    }

    async fn ask_to_terminate(
        &self,
        attempt: &AttemptRow,
        instance: &InstanceId,
        state: &mut Progress,
    ) -> Result<(), ErrorClass> {
        let recorded = self.parts.ledger.terminate_asked(&attempt.run, attempt.number).await;
        if let Err(problem) = recorded {
            tracing::error!(error = error::chain(&problem), "the ledger did not take a terminate");
            return Err(ErrorClass::Retry);
        }
        let provider = self.provider(&attempt.provider).map_err(|_| ErrorClass::Auth)?;
        let limit = provider.capabilities().call_timeout;
        match tokio::time::timeout(limit, provider.terminate(instance)).await {
            Ok(Ok(())) => {
                state.heard = true;
                Ok(())
            }
            Ok(Err(problem)) => {
                tracing::warn!(%instance, error = error::chain(&problem), "terminate failed");
                // "There is no such box" is said in many ways; the lists decide what it means.
                state.heard |= problem.class == ErrorClass::Refused;
                Err(problem.class)
            }
            Err(_) => Err(ErrorClass::Ambiguous),
        }
    }

    async fn look(
        &self,
        attempt: &AttemptRow,
        instance: &InstanceId,
        state: &mut Progress,
        capabilities: &Capabilities,
    ) {
        let now = self.now();
        let backoff = capabilities
            .quarantine_interval
            .saturating_mul(1 << state.failures.min(16))
            .min(capabilities.longest_backoff);
        let Ok(provider) = self.provider(&attempt.provider) else { return };
        let listed = tokio::time::timeout(capabilities.call_timeout, provider.list()).await;
        let Ok(Ok(boxes)) = listed else {
            state.failures += 1;
            state.due = Some(now + backoff);
            return;
        };
        let present = boxes.iter().any(|found| found.id == *instance && !found.is_gone());
        if present {
            state.absences = 0;
            state.last_absent = None;
            state.failures += 1;
            state.due = Some(now + backoff);
            return;
        }
        if !state.heard {
            // Not listed, and the provider has not even heard us: it may only be slow to list.
            state.failures += 1;
            state.due = Some(now + backoff);
            return;
        }
        let spaced =
            state.last_absent.is_none_or(|last| now.saturating_since(last) >= capabilities.absence_spacing);
        if spaced {
            if state.absences == 0 {
                state.first_absent_unix_ms = self.parts.clock.unix_ms();
            }
            state.absences += 1;
            state.last_absent = Some(now);
        }
        if state.absences < capabilities.absence_confirmations {
            state.due = Some(now + capabilities.absence_spacing);
            return;
        }
        let event = Event::DestroyConfirmed { at_unix_ms: state.first_absent_unix_ms };
        if let Err(problem) = self.apply(attempt, event).await {
            tracing::error!(error = error::chain(&problem), "the ledger did not take a confirmed teardown");
            state.due = Some(now + backoff);
        }
    }

    /// Said at the first failure and at each doubling, so that it is never silent and never a flood.
    async fn complain(&self, attempt: &AttemptRow, state: &mut Progress, kind: &'static str, text: &str) {
        if !(state.failures + 1).is_power_of_two() {
            return;
        }
        tracing::error!(run = %attempt.run, attempt = %attempt.number, text, "teardown unconfirmed");
        let noted = self.parts.ledger.note(&attempt.run, attempt.number, kind, text.to_owned()).await;
        if let Err(problem) = noted {
            tracing::error!(error = error::chain(&problem), "the ledger did not take a note");
        }
    }
}
