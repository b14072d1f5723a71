//! The eternal sweep: what each provider lists, held against what the ledger explains.
//!
//! | a listed box with our home's tag | verdict |
//! |---|---|
//! | of an open attempt, and its box | expected; one that runs no more is lost |
//! | of an open attempt that looks for one | the saga adopts it |
//! | of an attempt that is closed, or has another box | late: destroyed on sight |
//! | of no attempt that we know | marked; destroyed when seen again a while later |
//! | of no attempt, and the ledger is empty | only reported: a lost ledger is no verdict |
//!
//! Boxes of other homes and of nobody are never touched. Boxes that the ledger expects and the
//! list lacks are lost only after as many spaced lists as the provider needs, and never while
//! their agent's heartbeats arrive.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use limb_common::clock::BootInstant;
use limb_common::error;
use limb_common::id::{InstanceId, RunId};
use limb_common::phase::Phase;

use super::{Lifecycle, LifecycleError};
use crate::ledger::AttemptRow;
use crate::provider::{Instance, InstanceState, Provider};

/// A heartbeat this young proves life, whatever a list says: three beats.
const FRESH_BEAT: Duration = Duration::from_secs(15);

/// What the sweep thinks of a box.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BoxVerdict {
    Expected,
    /// The provider still has it, the attempt does not: destroyed.
    Late,
    /// Not in the ledger; destroyed if it is still there at the next look.
    Marked,
    /// Not in the ledger, seen twice: destroyed.
    Unexplained,
    /// Not in the ledger, which is empty: only reported.
    Unknown,
    Gone,
}

impl BoxVerdict {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Expected => "expected",
            Self::Late => "late: destroyed",
            Self::Marked => "unexplained: destroyed if still there at the next look",
            Self::Unexplained => "unexplained: destroyed",
            Self::Unknown => "unknown, and this home's ledger is empty: left alone",
            Self::Gone => "gone",
        }
    }
}

#[derive(Clone, Debug)]
pub struct SweptBox {
    pub provider: String,
    pub instance: Instance,
    pub verdict: BoxVerdict,
}

#[derive(Clone, Debug, Default)]
pub struct SweepReport {
    pub boxes: Vec<SweptBox>,
    pub problems: Vec<String>,
}

/// What one provider's sweep remembers between two looks.
#[derive(Debug, Default)]
pub(super) struct Memory {
    marked: HashMap<InstanceId, BootInstant>,
    absent: HashMap<InstanceId, (u32, BootInstant)>,
}

impl Lifecycle {
    pub(super) async fn sweep_forever(self: Arc<Self>, provider: Arc<dyn Provider>) {
        let mut memory = Memory::default();
        loop {
            let report = self.sweep(&*provider, &mut memory, true).await;
            for problem in report.problems {
                tracing::warn!(provider = provider.name(), problem, "sweep");
            }
            tokio::time::sleep(provider.capabilities().sweep_interval).await;
        }
    }

    /// One look at every provider, for `limb reap`. `act`: destroy what is late; what is not in
    /// the ledger needs two looks all the same.
    pub async fn reap(&self, act: bool) -> SweepReport {
        let mut total = SweepReport::default();
        for provider in self.parts.providers.iter() {
            let mut memory = Memory::default();
            let mut report = self.sweep(&**provider, &mut memory, act).await;
            if act && report.boxes.iter().any(|found| found.verdict == BoxVerdict::Marked) {
                tokio::time::sleep(provider.capabilities().orphan_recheck).await;
                report = self.sweep(&**provider, &mut memory, act).await;
            }
            total.boxes.extend(report.boxes);
            total.problems.extend(report.problems);
        }
        total
    }

    pub(super) async fn sweep(&self, provider: &dyn Provider, memory: &mut Memory, act: bool) -> SweepReport {
        let mut report = SweepReport::default();
        let limit = provider.capabilities().call_timeout;
        let boxes = match tokio::time::timeout(limit, provider.list()).await {
            Ok(Ok(boxes)) => boxes,
            Ok(Err(problem)) => {
                report.problems.push(error::chain(&problem));
                return report;
            }
            Err(_) => {
                report.problems.push(format!("provider {}: no answer to a list in time", provider.name()));
                return report;
            }
        };
        // One bad item never stops the others.
        for found in boxes.iter().filter(|found| found.is_of(self.parts.ledger.home())) {
            match self.judge(provider, found, memory, act).await {
                Ok(verdict) => report.boxes.push(SweptBox {
                    provider: provider.name().to_owned(),
                    instance: found.clone(),
                    verdict,
                }),
                Err(problem) => {
                    report.problems.push(format!("box {}: {}", found.id, error::chain(&problem)));
                }
            }
        }
        let listed: HashSet<_> =
            boxes.iter().filter(|found| !found.is_gone()).map(|found| &found.id).collect();
        memory.marked.retain(|id, _| listed.contains(id));
        if act && let Err(problem) = self.look_for_absent(provider, &listed, memory).await {
            report.problems.push(error::chain(&problem));
        }
        report
    }

    async fn judge(
        &self,
        provider: &dyn Provider,
        found: &Instance,
        memory: &mut Memory,
        act: bool,
    ) -> Result<BoxVerdict, LifecycleError> {
        if found.is_gone() {
            return Ok(BoxVerdict::Gone);
        }
        let row = match found.attempt() {
            Some((run, number)) => self.known(&run, number).await?,
            None => None,
        };
        let Some(row) = row else { return self.judge_unknown(provider, found, memory, act).await };
        let verdict = match (&row.state.phase, row.state.phase.instance()) {
            (Phase::Intended | Phase::Creating { .. }, _) => BoxVerdict::Expected,
            (Phase::Closed, _) => BoxVerdict::Late,
            (_, Some(id)) if *id == found.id => BoxVerdict::Expected,
            (_, _) => BoxVerdict::Late,
        };
        if !act {
            return Ok(verdict);
        }
        if verdict == BoxVerdict::Late {
            let text = format!("box {} of this attempt is still there: destroying it", found.id);
            if memory.marked.insert(found.id.clone(), self.now()).is_none() {
                self.parts.ledger.note(&row.run, row.number, "late-box", text).await?;
            }
            self.terminate(provider, &found.id).await?;
        } else if found.state == InstanceState::Stopped && runs_on(&row.state.phase) {
            self.lose(&row, "the provider says that the box runs no more", true).await?;
        }
        Ok(verdict)
    }

    async fn judge_unknown(
        &self,
        provider: &dyn Provider,
        found: &Instance,
        memory: &mut Memory,
        act: bool,
    ) -> Result<BoxVerdict, LifecycleError> {
        if self.parts.ledger.runs(true).await?.is_empty() {
            return Ok(BoxVerdict::Unknown);
        }
        let now = self.now();
        let marked = *memory.marked.entry(found.id.clone()).or_insert(now);
        if now.saturating_since(marked) < provider.capabilities().orphan_recheck || marked == now {
            return Ok(BoxVerdict::Marked);
        }
        if act {
            tracing::warn!(instance = %found.id, "a box of ours that no run explains: destroying it");
            self.terminate(provider, &found.id).await?;
        }
        Ok(BoxVerdict::Unexplained)
    }

    async fn terminate(&self, provider: &dyn Provider, id: &InstanceId) -> Result<(), LifecycleError> {
        let limit = provider.capabilities().call_timeout;
        match tokio::time::timeout(limit, provider.terminate(id)).await {
            Ok(answer) => Ok(answer?),
            // Asked again at the next look.
            Err(_) => Ok(()),
        }
    }

    async fn known(
        &self,
        run: &RunId,
        number: limb_common::id::AttemptNumber,
    ) -> Result<Option<AttemptRow>, LifecycleError> {
        let attempts = self.parts.ledger.attempts(run).await?;
        Ok(attempts.into_iter().find(|attempt| attempt.number == number))
    }

    async fn look_for_absent(
        &self,
        provider: &dyn Provider,
        listed: &HashSet<&InstanceId>,
        memory: &mut Memory,
    ) -> Result<(), LifecycleError> {
        let capabilities = provider.capabilities();
        let now = self.now();
        let mut absent = HashMap::new();
        for attempt in self.parts.ledger.open_attempts().await? {
            let Some(id) = attempt.state.phase.instance().cloned() else { continue };
            if attempt.provider != provider.name() || listed.contains(&id) || !runs_on(&attempt.state.phase) {
                continue;
            }
            let beat = self.with_live(&attempt, |live| live.last_beat).flatten();
            let alive = beat.is_some_and(|beat| now.saturating_since(beat) < FRESH_BEAT);
            let age = now.saturating_since(self.instant_of(attempt.started_unix_ms.unwrap_or(0)));
            if alive || age < capabilities.quarantine {
                continue;
            }
            let (count, last) =
                memory.absent.get(&id).copied().unwrap_or((0, BootInstant::from_duration(Duration::ZERO)));
            let spaced = count == 0 || now.saturating_since(last) >= capabilities.absence_spacing;
            let count = if spaced { count + 1 } else { count };
            // One more than a teardown needs: here nobody asked for the box to go.
            if count > capabilities.absence_confirmations {
                self.lose(&attempt, "the provider no longer lists the box", true).await?;
            } else {
                absent.insert(id, (count, if spaced { now } else { last }));
            }
        }
        memory.absent = absent;
        Ok(())
    }
}

/// Phases in which a box is expected to be up.
fn runs_on(phase: &Phase) -> bool {
    match phase {
        Phase::Booting { .. }
        | Phase::Joined { .. }
        | Phase::Enrolled { .. }
        | Phase::SettingUp { .. }
        | Phase::Running { .. }
        | Phase::Ending { .. } => true,
        Phase::Intended | Phase::Creating { .. } | Phase::Destroying { .. } | Phase::Closed => false,
    }
}
