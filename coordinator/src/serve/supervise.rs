//! Keeping a coordinator alive: commands start one where none answers, under systemd where it
//! runs for the user, else under a small process of ours that starts it again after a crash.
//!
//! Never: host a run in a command's own process.

use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use limb_common::clock;
use limb_common::id::Digest;
use limb_common::phase::LimbExit;
use limb_proto::v1::StatusRequest;
use limb_proto::v1::owner_client::OwnerClient;
use tonic::transport::Channel;

use super::socket;
use crate::settings::Settings;

/// A fresh coordinator recovers first; on a slow disk that takes a moment.
const START_LIMIT: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(50);
/// After a crash; doubled up to a minute, back to the first after a good while.
const FIRST_BACKOFF: Duration = Duration::from_millis(200);
const LONGEST_BACKOFF: Duration = Duration::from_secs(60);
const GOOD_WHILE: Duration = Duration::from_secs(60);

#[derive(Debug, thiserror::Error)]
pub enum EnsureError {
    #[error("could not start a coordinator")]
    Start(#[source] std::io::Error),
    #[error("the coordinator did not come up within {} s; hint: its log is {}", START_LIMIT.as_secs(), log.display())]
    NotUp { log: PathBuf, source: socket::NotRunning },
    #[error("could not make {}", path.display())]
    State { path: PathBuf, source: std::io::Error },
}

/// The log of a coordinator that a command started.
#[must_use]
pub fn log_path(settings: &Settings) -> PathBuf {
    settings.state_dir.join("coordinator.log")
}

/// A client of this home's coordinator, which is started first where none answers.
///
/// # Errors
/// [`EnsureError`].
pub async fn ensure_running(settings: &Settings) -> Result<OwnerClient<Channel>, EnsureError> {
    if let Ok(client) = answering(&settings.socket).await {
        return Ok(client);
    }
    start(settings)?;
    let deadline = clock::boottime() + START_LIMIT;
    loop {
        match answering(&settings.socket).await {
            Ok(client) => return Ok(client),
            Err(source) if clock::boottime() >= deadline => {
                return Err(EnsureError::NotUp { log: log_path(settings), source });
            }
            Err(_) => tokio::time::sleep(POLL).await,
        }
    }
}

/// Connected, and somebody behind the socket speaks.
async fn answering(path: &Path) -> Result<OwnerClient<Channel>, socket::NotRunning> {
    let mut client = socket::connect(path).await?;
    // A coordinator that is just ending takes connections and answers nothing: connect again.
    match client.status(StatusRequest {}).await {
        Ok(_) => Ok(client),
        Err(_) => socket::connect(path).await,
    }
}

fn start(settings: &Settings) -> Result<(), EnsureError> {
    use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
    let state = |source| EnsureError::State { path: settings.state_dir.clone(), source };
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&settings.state_dir).map_err(state)?;
    let program = std::env::current_exe().map_err(EnsureError::Start)?;
    if systemd_runs_for_the_user() && start_unit(settings, &program) {
        return Ok(());
    }
    let log = std::fs::OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(log_path(settings))
        .map_err(state)?;
    let mut command = Command::new(program);
    command
        .args(["serve", "--supervise"])
        .args(settings.as_flags())
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log.try_clone().map_err(EnsureError::Start)?)
        .stderr(log);
    // SAFETY: setsid is async-signal-safe and touches no memory of ours. Without a terminal of
    // its own the coordinator is not reached by the command's ctrl-C or hangup.
    unsafe {
        command.pre_exec(|| nix::unistd::setsid().map(drop).map_err(std::io::Error::from));
    }
    command.spawn().map(drop).map_err(EnsureError::Start)
}

fn systemd_runs_for_the_user() -> bool {
    std::env::var_os("XDG_RUNTIME_DIR").is_some_and(|dir| Path::new(&dir).join("systemd/private").exists())
}

/// A transient unit: started again after any unclean end; a clean one (idle, `--stop`) is final.
/// `KillMode=process`: local boxes are not the coordinator's to take along.
fn start_unit(settings: &Settings, program: &Path) -> bool {
    use std::os::unix::ffi::OsStrExt as _;
    let name = Digest::of(settings.state_dir.as_os_str().as_bytes()).to_hex();
    Command::new("systemd-run")
        .args(["--user", "--quiet", "--collect", "--unit", &format!("limb-{}", &name[..12])])
        .args(["-p", "Restart=on-failure", "-p", "RestartSec=1", "-p", "StartLimitIntervalSec=0"])
        .args(["-p", "KillMode=process", "--"])
        .arg(program)
        .args(["serve", "--supervised-by", "systemd", "--idle-exit"])
        .args(settings.as_flags())
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success())
}

/// `limb serve --supervise`: runs the coordinator as a child, again and again, until it ends
/// cleanly. SIGTERM is passed on.
///
/// # Errors
/// The child cannot be started at all.
pub async fn supervise(settings: &Settings) -> std::io::Result<()> {
    use tokio::signal::unix::{SignalKind, signal};
    let program = std::env::current_exe()?;
    let mut term = signal(SignalKind::terminate())?;
    let mut backoff = FIRST_BACKOFF;
    loop {
        let began = clock::boottime();
        let mut child = tokio::process::Command::new(&program)
            .args(["serve", "--supervised-by", "process", "--idle-exit"])
            .args(settings.as_flags())
            .stdin(Stdio::null())
            .spawn()?;
        let status: ExitStatus = tokio::select! {
            status = child.wait() => status?,
            _ = term.recv() => {
                if let Some(pid) = child.id().and_then(|pid| i32::try_from(pid).ok()) {
                    let pid = nix::unistd::Pid::from_raw(pid);
                    let _unused: nix::Result<()> = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM);
                }
                child.wait().await?;
                return Ok(());
            }
        };
        // A clean end is meant, and whoever has the lock already is not to be fought.
        if status.success() || status.code() == Some(LimbExit::AlreadyRunning.code()) {
            return Ok(());
        }
        if clock::boottime().saturating_since(began) >= GOOD_WHILE {
            backoff = FIRST_BACKOFF;
        }
        tracing::error!(%status, "the coordinator ended unasked; it is started again");
        tokio::select! {
            () = tokio::time::sleep(backoff) => {}
            _ = term.recv() => return Ok(()),
        }
        backoff = (backoff * 2).min(LONGEST_BACKOFF);
    }
}
