//! What an attempt is to do: the domain's form of the `Assignment` message.

use std::path::PathBuf;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::id::{AttemptNumber, Digest, RunId};
use crate::secret::Secret;

/// Addresses one snapshot within an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SetNumber(pub u32);

/// Addresses one output within an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OutputNumber(pub u32);

/// The path of the output that the job does not see: the agent puts into it what the job left
/// changed in its workdir. Its home is `workdir.changes/`.
pub const WORKDIR_CHANGES: &[u8] = b"/workdir.changes";

#[derive(Clone, Debug)]
pub struct Assignment {
    pub run: RunId,
    pub name: String,
    pub attempt: AttemptNumber,
    pub mounts: Vec<MountSpec>,
    /// The set that is the job's working directory; none: an empty directory.
    pub workdir: Option<SetSpec>,
    pub outputs: Vec<OutputSpec>,
    /// Names and values are bytes: an environment is not text.
    pub env: Vec<(Vec<u8>, Vec<u8>)>,
    pub secrets: Vec<(Vec<u8>, Secret<Vec<u8>>)>,
    /// A bash script; empty: none.
    pub setup: String,
    pub command: Command,
    pub workdir_changes_cap_bytes: u64,
    /// The job's, at most. None: what the box has, less what the agent needs.
    pub memory_bytes: Option<u64>,
    /// First touches are recorded, and those of earlier runs of the same job read ahead.
    pub trace: bool,
    /// What the agent holds is pushed into the kernel's page cache before sequential readers.
    pub push: bool,
    pub cache: CacheSpec,
    /// From SIGTERM to SIGKILL at a stop.
    pub stop_grace: Duration,
    /// The lease's TTL.
    pub disconnect_grace: Duration,
}

/// How much of what the job reads is kept on the box.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheSpec {
    /// In the agent's memory.
    pub memory_bytes: u64,
    /// On the box's disk, sealed; 0: nothing is written there. Off unless the job asks: what a
    /// box calls its disk may be a small one that the system itself needs.
    pub disk_bytes: u64,
    /// Where that disk is, absolute and on the box; none: the agent's private directory.
    pub dir: Option<PathBuf>,
}

impl CacheSpec {
    /// What the smallest box has.
    pub const DEFAULT_MEMORY_BYTES: u64 = 512 << 20;
    /// Less could not hold what is read ahead for a few streams.
    pub const LEAST_MEMORY_BYTES: u64 = 64 << 20;
}

impl Default for CacheSpec {
    fn default() -> Self {
        Self { memory_bytes: Self::DEFAULT_MEMORY_BYTES, disk_bytes: 0, dir: None }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Command {
    /// Given to `bash -c` (with `-e` unset, `-o pipefail` set).
    Script(String),
    /// Executed as it is, no shell.
    Argv(Vec<Vec<u8>>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetSpec {
    pub set: SetNumber,
    pub manifest_id: Digest,
    pub manifest_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MountSpec {
    pub set: SetSpec,
    /// Absolute, where the job sees it.
    pub path: Vec<u8>,
    /// The source is one file: the manifest's root holds only it, and `path` is a file.
    pub single_file: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputSpec {
    pub output: OutputNumber,
    pub path: Vec<u8>,
    pub durability: Durability,
    /// What this lineage left at home; a snapshot like any other, read through `Chunks`.
    pub lower: Option<SetSpec>,
    pub quota_bytes: Option<u64>,
    pub quota_inodes: Option<u64>,
}

/// What waits for home.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Durability {
    /// fsync does (the default).
    #[default]
    Fsync,
    /// fsync and close do.
    Close,
    /// Nothing does; errors still surface at close and fsync.
    None,
}

/// What home wants of a box now. Level-triggered: only the newest counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Order {
    Run,
    Stop {
        reason: String,
        grace: Duration,
        drain: Duration,
    },
    /// Everything is home or given up: wipe and power off.
    Die {
        reason: String,
    },
}
