//! The three outcomes of an attempt and the exit code that follows from them.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Attempt;
use crate::report::{EndedBy, JobEnd, JobStep};

/// Why home wants an attempt to end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "cause", rename_all = "kebab-case")]
pub enum StopCause {
    Owner {
        reason: String,
    },
    MaxDuration,
    MaxCost,
    /// The agent did not enrol within `boot_timeout`.
    BootTimeout,
    /// A second key tried the attempt's enrolment token.
    TokenReused,
    Shutdown,
}

impl fmt::Display for StopCause {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Owner { reason } if reason.is_empty() => f.write_str("stopped by the owner"),
            Self::Owner { reason } => write!(f, "stopped by the owner: {reason}"),
            Self::MaxDuration => f.write_str("max_duration reached"),
            Self::MaxCost => f.write_str("max_cost reached"),
            Self::BootTimeout => f.write_str("boot_timeout: the box never enrolled"),
            Self::TokenReused => f.write_str("a second key tried the box's enrolment token"),
            Self::Shutdown => f.write_str("the coordinator was shut down"),
        }
    }
}

/// Why no job ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum NotStarted {
    NoCapacity,
    Quota,
    Auth,
    /// The provider refused the request itself.
    Refused,
    /// An ambiguous create, and no box appeared.
    NeverAppeared,
    /// The box was there; its agent never enrolled.
    BootFailed,
    /// The agent enrolled and could not put the job into its place.
    PrepareFailed,
    Stopped,
}

/// How a step of the job ended, in a form that is kept.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "how", rename_all = "kebab-case")]
pub enum HowEnded {
    Exit { code: i32 },
    Signal { signal: i32 },
    CouldNotStart { code: i32, why: String },
}

/// What became of the job.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "job", rename_all = "kebab-case")]
pub enum JobOutcome {
    /// It ended by itself or was stopped; `setup`: that step failed and the job did not start.
    Ended {
        setup: bool,
        how: HowEnded,
        oom_killed: bool,
        stopped: bool,
    },
    NeverStarted {
        why: NotStarted,
        text: String,
    },
    /// The box went silent: how far the job came is unknown.
    Lost {
        why: String,
        #[serde(default)]
        vanished: bool,
    },
}

impl From<&JobEnd> for JobOutcome {
    fn from(end: &JobEnd) -> Self {
        let how = match &end.how {
            EndedBy::Exit(code) => HowEnded::Exit { code: *code },
            EndedBy::Signal(signal) => HowEnded::Signal { signal: *signal },
            EndedBy::CouldNotStart { code, why } => HowEnded::CouldNotStart { code: *code, why: why.clone() },
        };
        let setup = match end.step {
            JobStep::Prepare => return never_began(end),
            JobStep::Setup => true,
            JobStep::Run => false,
        };
        Self::Ended { setup, how, oom_killed: end.oom_killed, stopped: end.stopped }
    }
}

/// What the box says of a job that it could not put into its place is not about the job.
fn never_began(end: &JobEnd) -> JobOutcome {
    let why = if end.stopped { NotStarted::Stopped } else { NotStarted::PrepareFailed };
    let text = match &end.how {
        EndedBy::CouldNotStart { why, .. } => why.clone(),
        EndedBy::Exit(_) | EndedBy::Signal(_) if end.stopped => "stopped before the job started".to_owned(),
        EndedBy::Exit(_) | EndedBy::Signal(_) => "the job's helper on the box died".to_owned(),
    };
    JobOutcome::NeverStarted { why, text }
}

impl fmt::Display for JobOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Ended { setup, how, oom_killed, stopped } => {
                if *setup {
                    f.write_str("setup: ")?;
                }
                match how {
                    HowEnded::Exit { code } => write!(f, "exit {code}")?,
                    HowEnded::Signal { signal } => write!(f, "signal {signal}")?,
                    HowEnded::CouldNotStart { why, .. } => write!(f, "could not start: {why}")?,
                }
                if *oom_killed {
                    f.write_str(" (out of memory)")?;
                }
                if *stopped {
                    f.write_str(" (stopped)")?;
                }
                Ok(())
            }
            Self::NeverStarted { text, .. } => write!(f, "never started: {text}"),
            Self::Lost { why, .. } => write!(f, "lost: {why}"),
        }
    }
}

/// Begins a line about a file that arrived and is missing or changed at the end.
pub const NO_LONGER_HOME: &str = "no longer home: ";

/// What became of the results.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "data", rename_all = "kebab-case")]
pub enum DataOutcome {
    /// No job ran, so there was nothing to bring.
    Nothing,
    Home {
        files: u64,
        bytes: u64,
    },
    /// What was published is home; what is not is named.
    Incomplete {
        files: u64,
        bytes: u64,
        unsaved: Vec<String>,
    },
}

impl fmt::Display for DataOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Nothing => "nothing",
            Self::Home { .. } => "home",
            Self::Incomplete { .. } => "incomplete",
        })
    }
}

/// What became of the box. There is no "failed": until it is confirmed, home goes on trying.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "destroy", rename_all = "kebab-case")]
pub enum DestroyOutcome {
    Confirmed {
        at_unix_ms: u64,
    },
    /// The provider made no box.
    NeverCreated,
}

/// limb's own exit codes. None is 0–2 (what programs and shells use for themselves) or 126–165
/// (what shells say about programs and signals).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LimbExit {
    /// Refused before any money was spent: the job file, the data class, a policy.
    Refused = 64,
    /// No box could be had.
    NoBox = 69,
    /// A defect of limb or of this machine.
    Internal = 70,
    /// The box was lost; how far the job came is unknown.
    Lost = 71,
    /// The box came up but never got as far as the job: its agent did not enrol, or could not put
    /// the job into its place.
    BootFailed = 72,
    /// A limit (`max_duration`, `max_cost`) ended the job.
    LimitReached = 73,
    /// The job's results are not all home.
    DataNotHome = 74,
    /// The box is not confirmed gone: money may be running.
    TeardownUnconfirmed = 75,
    /// No coordinator answers.
    NoCoordinator = 76,
    /// Stopped before the job had started.
    Stopped = 77,
    /// `limb serve`: another coordinator has this home.
    AlreadyRunning = 78,
    /// `limb serve`: something that only a person can mend is in the way.
    CannotStart = 79,
}

impl LimbExit {
    #[must_use]
    pub fn code(self) -> i32 {
        self as i32
    }

    #[must_use]
    pub fn words(self) -> &'static str {
        match self {
            Self::Refused => "refused before anything was started",
            Self::NoBox => "no box could be had",
            Self::Internal => "internal error",
            Self::Lost => "the box was lost",
            Self::BootFailed => "the box never got ready for the job",
            Self::LimitReached => "a limit ended the job",
            Self::DataNotHome => "results are not all home",
            Self::TeardownUnconfirmed => "teardown not confirmed: money may be running",
            Self::NoCoordinator => "no coordinator answers",
            Self::Stopped => "stopped before the job started",
            Self::AlreadyRunning => "another coordinator has this home",
            Self::CannotStart => "the coordinator cannot start",
        }
    }
}

/// Whose number an exit code is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExitOrigin {
    Job,
    Setup,
    Limb(LimbExit),
}

impl fmt::Display for ExitOrigin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Job => f.write_str("job"),
            Self::Setup => f.write_str("job: setup"),
            Self::Limb(exit) => write!(f, "limb: {}", exit.words()),
        }
    }
}

/// What a command ends with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExitVerdict {
    pub code: i32,
    pub origin: ExitOrigin,
}

impl From<LimbExit> for ExitVerdict {
    fn from(exit: LimbExit) -> Self {
        Self { code: exit.code(), origin: ExitOrigin::Limb(exit) }
    }
}

/// Teardown unconfirmed > data not home > the job's own.
pub(super) fn exit(attempt: &Attempt) -> ExitVerdict {
    if attempt.destroy.is_none() {
        return LimbExit::TeardownUnconfirmed.into();
    }
    // A lost box leaves data behind by nature; that it was lost says more.
    let lost = matches!(attempt.job, Some(JobOutcome::Lost { .. }));
    match &attempt.data {
        Some(DataOutcome::Nothing | DataOutcome::Home { .. }) => {}
        Some(DataOutcome::Incomplete { .. }) if lost => {}
        Some(DataOutcome::Incomplete { .. }) | None => return LimbExit::DataNotHome.into(),
    }
    match &attempt.job {
        Some(JobOutcome::Ended { stopped: true, .. }) if ended_by_limit(attempt) => {
            LimbExit::LimitReached.into()
        }
        // A setup that ends well is no end: only a stop keeps the job from following.
        Some(JobOutcome::Ended { setup: true, how: HowEnded::Exit { code: 0 }, .. }) => {
            LimbExit::Stopped.into()
        }
        Some(JobOutcome::Ended { setup, how, .. }) => {
            let code = match how {
                HowEnded::Exit { code } | HowEnded::CouldNotStart { code, .. } => *code,
                HowEnded::Signal { signal } => 128 + signal,
            };
            let origin = if *setup { ExitOrigin::Setup } else { ExitOrigin::Job };
            ExitVerdict { code, origin }
        }
        Some(JobOutcome::NeverStarted { why, .. }) => never_started(*why, attempt).into(),
        Some(JobOutcome::Lost { .. }) => LimbExit::Lost.into(),
        None => LimbExit::Internal.into(),
    }
}

fn ended_by_limit(attempt: &Attempt) -> bool {
    matches!(attempt.stop, Some(StopCause::MaxDuration | StopCause::MaxCost))
}

fn never_started(why: NotStarted, attempt: &Attempt) -> LimbExit {
    match why {
        NotStarted::NoCapacity | NotStarted::Quota | NotStarted::Auth | NotStarted::NeverAppeared => {
            LimbExit::NoBox
        }
        NotStarted::Refused => LimbExit::Refused,
        NotStarted::BootFailed | NotStarted::PrepareFailed => LimbExit::BootFailed,
        NotStarted::Stopped if ended_by_limit(attempt) => LimbExit::LimitReached,
        NotStarted::Stopped => LimbExit::Stopped,
    }
}
