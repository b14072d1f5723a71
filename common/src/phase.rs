//! The life of one attempt (one box), as a value and one pure function.
//!
//! ```text
//!  Intended ──CreateAsked──▶ Creating ──InstanceSeen──▶ Booting ─▶ Joined ─▶ Enrolled
//!     │                       │  │ ▲                      │  │        │        │
//!  StopAsked          refused,│  └─┘ CreateAmbiguous       │  └────────┴──────┐ ├─▶ SettingUp ─▶ Running
//!     │         quarantine    │                            │   StopAsked, Lost│ │        │          │
//!     │         empty         │                            ▼                  ▼ ▼        ▼          ▼
//!     └────────▶ Closed ◀─────┴── (data and destroy known) Destroying ◀── DataSettled ── Ending ◀────┘
//! ```
//!
//! Never: reach `Closed` while a box may exist, overwrite an outcome, forget a stop. A stop that
//! comes while a create is in flight stays: the box that arrives is destroyed. What became of the
//! job, of the data and of the box are three fields, each written once.
//!
//! `Creating` closes only when the provider refused for certain or when the quarantine (lists
//! over a stated time) stayed empty; a box that shows up even later is destroyed by the sweep,
//! which knows the attempt by its tag.

mod outcome;

#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

use crate::id::InstanceId;
pub use outcome::{
    DataOutcome, DestroyOutcome, ExitOrigin, ExitVerdict, HowEnded, JobOutcome, LimbExit, NO_LONGER_HOME,
    NotStarted, StopCause,
};

/// Where an attempt is. What has been learnt about its outcomes stands beside it, in [`Attempt`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "phase", rename_all = "kebab-case")]
pub enum Phase {
    /// Durable at home; the provider has not been asked.
    Intended,
    /// The provider may have been asked, so a box may exist. `quarantined`: no answer will come.
    Creating {
        quarantined: bool,
    },
    /// The provider named the box.
    Booting {
        instance: InstanceId,
    },
    /// Its node showed up in the mesh.
    Joined {
        instance: InstanceId,
    },
    /// Its agent holds a certificate.
    Enrolled {
        instance: InstanceId,
    },
    SettingUp {
        instance: InstanceId,
    },
    Running {
        instance: InstanceId,
    },
    /// The job is over or told to stop; its data is on the way home.
    Ending {
        instance: InstanceId,
    },
    /// The box must go; only a provider's answer ends this.
    Destroying {
        instance: InstanceId,
    },
    Closed,
}

impl Phase {
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            Self::Intended => "intended",
            Self::Creating { quarantined: false } => "creating",
            Self::Creating { quarantined: true } => "creating (quarantined)",
            Self::Booting { .. } => "booting",
            Self::Joined { .. } => "joined",
            Self::Enrolled { .. } => "enrolled",
            Self::SettingUp { .. } => "setting up",
            Self::Running { .. } => "running",
            Self::Ending { .. } => "ending",
            Self::Destroying { .. } => "destroying",
            Self::Closed => "closed",
        }
    }

    /// The box, where the provider has named one that is not confirmed gone.
    #[must_use]
    pub fn instance(&self) -> Option<&InstanceId> {
        match self {
            Self::Intended | Self::Creating { .. } | Self::Closed => None,
            Self::Booting { instance }
            | Self::Joined { instance }
            | Self::Enrolled { instance }
            | Self::SettingUp { instance }
            | Self::Running { instance }
            | Self::Ending { instance }
            | Self::Destroying { instance } => Some(instance),
        }
    }

    /// May an agent with this attempt's certificate be served?
    #[must_use]
    pub fn serves_agent(&self) -> bool {
        match self {
            Self::Enrolled { .. } | Self::SettingUp { .. } | Self::Running { .. } | Self::Ending { .. } => {
                true
            }
            Self::Intended
            | Self::Creating { .. }
            | Self::Booting { .. }
            | Self::Joined { .. }
            | Self::Destroying { .. }
            | Self::Closed => false,
        }
    }

    /// May a box exist that costs money?
    #[must_use]
    pub fn may_have_box(&self) -> bool {
        !matches!(self, Self::Intended | Self::Closed)
    }
}

/// One attempt: its phase and what is known of its three outcomes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Attempt {
    #[serde(flatten)]
    pub phase: Phase,
    /// Sticky: the first cause stays.
    #[serde(default)]
    pub stop: Option<StopCause>,
    #[serde(default)]
    pub job: Option<JobOutcome>,
    #[serde(default)]
    pub data: Option<DataOutcome>,
    #[serde(default)]
    pub destroy: Option<DestroyOutcome>,
}

impl Default for Attempt {
    fn default() -> Self {
        Self { phase: Phase::Intended, stop: None, job: None, data: None, destroy: None }
    }
}

/// What happened. Past tense.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "kebab-case")]
pub enum Event {
    /// About to call the provider; durable before the call.
    CreateAsked,
    /// The provider said no, for certain: there is no box.
    CreateRefused {
        why: NotStarted,
        text: String,
    },
    /// The call's fate is unknown (timeout, 5xx, a restart of home in between).
    CreateAmbiguous {
        text: String,
    },
    /// The provider named a box with this attempt's tag: an answer, or a list.
    InstanceSeen {
        instance: InstanceId,
    },
    /// No box appeared in the whole quarantine.
    QuarantineEmpty,
    NodeJoined,
    AgentEnrolled,
    SetupStarted,
    JobStarted,
    JobEnded {
        how: JobOutcome,
    },
    StopAsked {
        cause: StopCause,
    },
    /// Silent longer than its lease can last, or the provider says that it is gone.
    BoxLost {
        why: String,
        /// The provider no longer has it: what a preemption looks like from home.
        #[serde(default)]
        vanished: bool,
    },
    /// Nothing more will come from the box: everything is home, or what is missing is named.
    DataSettled {
        outcome: DataOutcome,
    },
    /// Absent or terminated in as many spaced lists as the provider needs.
    DestroyConfirmed {
        at_unix_ms: u64,
    },
}

impl Event {
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Self::CreateAsked => "create-asked",
            Self::CreateRefused { .. } => "create-refused",
            Self::CreateAmbiguous { .. } => "create-ambiguous",
            Self::InstanceSeen { .. } => "instance-seen",
            Self::QuarantineEmpty => "quarantine-empty",
            Self::NodeJoined => "node-joined",
            Self::AgentEnrolled => "agent-enrolled",
            Self::SetupStarted => "setup-started",
            Self::JobStarted => "job-started",
            Self::JobEnded { .. } => "job-ended",
            Self::StopAsked { .. } => "stop-asked",
            Self::BoxLost { .. } => "box-lost",
            Self::DataSettled { .. } => "data-settled",
            Self::DestroyConfirmed { .. } => "destroy-confirmed",
        }
    }
}

/// The event makes no sense in this phase. Nothing was changed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{event} cannot happen to an attempt that is {phase}")]
pub struct IllegalTransition {
    pub phase: &'static str,
    pub event: &'static str,
}

/// The one transition function. Repeating an event that already took effect is legal and changes
/// nothing, so that a redo after a crash needs no special case.
///
/// # Errors
/// [`IllegalTransition`].
pub fn next(attempt: &Attempt, event: &Event) -> Result<Attempt, IllegalTransition> {
    let illegal = || IllegalTransition { phase: attempt.phase.name(), event: event.kind() };
    let mut after = attempt.clone();
    match event {
        Event::CreateAsked => match &attempt.phase {
            Phase::Intended if attempt.stop.is_none() => after.phase = Phase::Creating { quarantined: false },
            _ => return Err(illegal()),
        },
        Event::CreateRefused { why, text } => match &attempt.phase {
            Phase::Creating { quarantined: false } => after.close_without_box(*why, text),
            _ => return Err(illegal()),
        },
        Event::CreateAmbiguous { .. } => match &attempt.phase {
            Phase::Creating { .. } => after.phase = Phase::Creating { quarantined: true },
            _ => return Err(illegal()),
        },
        Event::InstanceSeen { instance } => match (&attempt.phase, attempt.phase.instance()) {
            (Phase::Creating { .. }, _) => after.arrive(instance.clone()),
            (_, Some(known)) if known == instance => {}
            _ => return Err(illegal()),
        },
        Event::QuarantineEmpty => match &attempt.phase {
            Phase::Creating { quarantined: true } => {
                after.close_without_box(NotStarted::NeverAppeared, "no box appeared");
            }
            _ => return Err(illegal()),
        },
        Event::NodeJoined => match &attempt.phase {
            Phase::Booting { instance } => after.phase = Phase::Joined { instance: instance.clone() },
            _ => return Err(illegal()),
        },
        Event::AgentEnrolled => match &attempt.phase {
            Phase::Booting { instance } | Phase::Joined { instance } => {
                after.phase = Phase::Enrolled { instance: instance.clone() };
            }
            Phase::Enrolled { .. } => {}
            _ => return Err(illegal()),
        },
        Event::SetupStarted => match &attempt.phase {
            Phase::Enrolled { instance } => after.phase = Phase::SettingUp { instance: instance.clone() },
            // A stop overtook the report; it is still true, and changes nothing.
            Phase::SettingUp { .. } | Phase::Ending { .. } => {}
            _ => return Err(illegal()),
        },
        Event::JobStarted => match &attempt.phase {
            Phase::Enrolled { instance } | Phase::SettingUp { instance } => {
                after.phase = Phase::Running { instance: instance.clone() };
            }
            Phase::Running { .. } | Phase::Ending { .. } => {}
            _ => return Err(illegal()),
        },
        Event::JobEnded { how } => match &attempt.phase {
            Phase::Enrolled { instance }
            | Phase::SettingUp { instance }
            | Phase::Running { instance }
            | Phase::Ending { instance } => {
                after.phase = Phase::Ending { instance: instance.clone() };
                after.job.get_or_insert_with(|| how.clone());
            }
            _ => return Err(illegal()),
        },
        Event::StopAsked { cause } => after.stop(cause),
        Event::BoxLost { why, vanished } => match attempt.phase.instance() {
            Some(instance) => {
                let never_enrolled = matches!(attempt.phase, Phase::Booting { .. } | Phase::Joined { .. });
                after.job.get_or_insert_with(|| {
                    if never_enrolled {
                        JobOutcome::NeverStarted { why: NotStarted::BootFailed, text: why.clone() }
                    } else {
                        JobOutcome::Lost { why: why.clone(), vanished: *vanished }
                    }
                });
                if never_enrolled {
                    after.data.get_or_insert(DataOutcome::Nothing);
                }
                after.phase = Phase::Destroying { instance: instance.clone() };
            }
            None => return Err(illegal()),
        },
        Event::DataSettled { outcome } => match &attempt.phase {
            Phase::Ending { instance } => {
                after.data.get_or_insert_with(|| outcome.clone());
                after.settle_job("home stopped waiting for the box");
                after.phase = Phase::Destroying { instance: instance.clone() };
            }
            Phase::Destroying { .. } => {
                after.data.get_or_insert_with(|| outcome.clone());
                after.close_if_complete();
            }
            Phase::Closed => {}
            _ => return Err(illegal()),
        },
        Event::DestroyConfirmed { at_unix_ms } => match &attempt.phase {
            Phase::Destroying { .. } => {
                after.destroy.get_or_insert(DestroyOutcome::Confirmed { at_unix_ms: *at_unix_ms });
                after.close_if_complete();
            }
            Phase::Closed => {}
            _ => return Err(illegal()),
        },
    }
    Ok(after)
}

impl Attempt {
    fn arrive(&mut self, instance: InstanceId) {
        self.phase = if let Some(cause) = self.stop.clone() {
            self.never_started(&cause);
            Phase::Destroying { instance }
        } else {
            Phase::Booting { instance }
        };
    }

    /// Legal in every phase; where nothing is left to stop it only adds the cause, once.
    fn stop(&mut self, cause: &StopCause) {
        if matches!(self.phase, Phase::Closed) {
            return;
        }
        self.stop.get_or_insert_with(|| cause.clone());
        match self.phase.clone() {
            Phase::Intended => self.close_without_box(NotStarted::Stopped, &cause.to_string()),
            Phase::Booting { instance } | Phase::Joined { instance } => {
                self.never_started(cause);
                self.phase = Phase::Destroying { instance };
            }
            Phase::Enrolled { instance } | Phase::SettingUp { instance } | Phase::Running { instance } => {
                self.phase = Phase::Ending { instance };
            }
            Phase::Creating { .. } | Phase::Ending { .. } | Phase::Destroying { .. } | Phase::Closed => {}
        }
    }

    fn never_started(&mut self, cause: &StopCause) {
        let why = match cause {
            StopCause::BootTimeout => NotStarted::BootFailed,
            StopCause::Owner { .. }
            | StopCause::MaxDuration
            | StopCause::MaxCost
            | StopCause::TokenReused
            | StopCause::Shutdown => NotStarted::Stopped,
        };
        self.job.get_or_insert_with(|| JobOutcome::NeverStarted { why, text: cause.to_string() });
        self.data.get_or_insert(DataOutcome::Nothing);
    }

    fn close_without_box(&mut self, why: NotStarted, text: &str) {
        let why = if self.stop.is_some() { NotStarted::Stopped } else { why };
        self.job.get_or_insert_with(|| JobOutcome::NeverStarted { why, text: text.to_owned() });
        self.data.get_or_insert(DataOutcome::Nothing);
        self.destroy.get_or_insert(DestroyOutcome::NeverCreated);
        self.phase = Phase::Closed;
    }

    fn settle_job(&mut self, why: &str) {
        self.job.get_or_insert_with(|| JobOutcome::Lost { why: why.to_owned(), vanished: false });
    }

    fn close_if_complete(&mut self) {
        if self.data.is_some() && self.destroy.is_some() {
            self.settle_job("the box ended without a word");
            self.phase = Phase::Closed;
        }
    }

    /// What the command ends with, and whose number that is.
    #[must_use]
    pub fn exit(&self) -> ExitVerdict {
        outcome::exit(self)
    }
}
