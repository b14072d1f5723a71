//! What a box tells home about itself, each once, numbered from 1.

use std::time::Duration;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    pub seq: u64,
    pub box_uptime: Duration,
    pub event: BoxEvent,
}

/// Past tense: it happened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BoxEvent {
    BootPhasePassed { name: String, took: Duration },
    SetupStarted,
    JobStarted,
    JobEnded(JobEnd),
    ResultsDrained(DrainReport),
    Noticed { kind: String, text: String },
}

/// Which step ended, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobEnd {
    pub step: JobStep,
    pub how: EndedBy,
    pub oom_killed: bool,
    /// Ended because home ordered it.
    pub stopped: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobStep {
    /// The box's own work before the job's first: no step of the job ever began.
    Prepare,
    Setup,
    Run,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EndedBy {
    Exit(i32),
    Signal(i32),
    /// The program could not be started at all; shells say 126 or 127.
    CouldNotStart {
        code: i32,
        why: String,
    },
}

impl EndedBy {
    /// The code that a shell would give: a signal is 128 + its number.
    #[must_use]
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::Exit(code) | Self::CouldNotStart { code, .. } => *code,
            Self::Signal(signal) => 128 + signal,
        }
    }
}

/// What became of the bytes at the end.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DrainReport {
    /// Every published byte is durable at home.
    pub complete: bool,
    /// What could not be saved, by name (lossy text).
    pub unsaved: Vec<String>,
    pub bytes_sent: u64,
    pub files_published: u64,
    /// Changed workdir files over the cap: not kept.
    pub workdir_changes_left: Vec<String>,
}
