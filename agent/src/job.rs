//! The job on the box: its processes, what they see, how they end.
//!
//! A job runs under a helper (`limb-agent job-init`) that is pid 1 of a PID namespace of its own,
//! so the whole tree ends with that one process: double forks, new sessions and ignored signals
//! change nothing. The helper gets its orders over a socket; the end of that socket, which the
//! agent's own death is too, means "kill everything".
//!
//! ```text
//! agent ── socket ── outer helper ── init (pid 1, new mount/PID/IPC namespace) ── setup, run
//!   │ terminate: a byte                │ SIGTERM to all; stays until all have ended
//!   └ kill: socket shut down           └ SIGKILL to init; gone when the kernel has ended the rest
//! ```
//!
//! Never: put a secret into an argv or a file, leave a process behind, create anything on the
//! host outside the agent's private directory, or let a kill hang.
//!
//! Background children that outlive the job's main process are killed when it ends. After
//! `terminate` they are given the same time as everybody else.

pub mod cgroup;
pub mod changes;
pub mod init;
pub mod layer;
mod messages;
mod running;
pub mod view;

use std::path::PathBuf;

use limb_common::assignment::Command;
use limb_common::secret::Secret;

pub use cgroup::Limits;
pub use running::{KillSwitch, RunningJob};
pub use view::{Access, Bind, View, Workdir};

/// Everything about one job. `env` is the whole environment: nothing is added but `secrets`.
/// See [`base_env`] for what a job can expect to find.
#[derive(Debug)]
pub struct JobSpec {
    /// A bash script that runs first, in the same view; a failure ends the job there.
    pub setup: Option<String>,
    pub command: Command,
    /// A later entry replaces an earlier one of the same name.
    pub env: Vec<(Vec<u8>, Vec<u8>)>,
    pub secrets: Vec<(Vec<u8>, Secret<Vec<u8>>)>,
    /// Where the job starts, in the view. None: the workdir.
    pub cwd: Option<PathBuf>,
    pub view: View,
    pub limits: Limits,
    /// The program that has the `job-init` subcommand; [`this_program`] in production.
    pub init_program: PathBuf,
}

/// The running agent's own binary, even if its file was replaced or removed.
#[must_use]
pub fn this_program() -> PathBuf {
    PathBuf::from("/proc/self/exe")
}

/// What every job's environment starts from; put the job's own variables after it.
#[must_use]
pub fn base_env(view: &View) -> Vec<(Vec<u8>, Vec<u8>)> {
    use std::os::unix::ffi::OsStrExt as _;
    let path = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin".to_vec();
    vec![
        (b"HOME".to_vec(), view.home.as_os_str().as_bytes().to_vec()),
        (b"PATH".to_vec(), path),
        (b"LANG".to_vec(), b"C.UTF-8".to_vec()),
        (b"TMPDIR".to_vec(), b"/tmp".to_vec()),
    ]
}

/// A job could not be put into place. Nothing of it runs.
#[derive(Debug, thiserror::Error)]
pub enum JobError {
    #[error("an environment variable cannot be passed on: {0}")]
    BadEnvironment(String),
    #[error("the job's helper process could not be started")]
    Helper(#[source] std::io::Error),
    /// Give a writable mount (`Workdir::Ready`) instead.
    #[error("this kernel refuses an overlay for the workdir: {0}")]
    OverlayRefused(String),
    #[error("this system gives the job no namespaces of its own: {0}")]
    NoNamespaces(String),
    #[error("the job's view of the file system could not be built: {0}")]
    View(String),
    #[error("the job's helper ended before the job started")]
    HelperDied,
}

/// The tree is not gone although everything was tried.
#[derive(Debug, thiserror::Error)]
#[error(
    "processes of the job are still there after {waited_s} s: they are stuck in the kernel\n  hint: power the box off"
)]
pub struct StillRunning {
    pub waited_s: u64,
}
