//! Keeping a coordinator alive: commands start one where none answers, under systemd where it
//! runs for the user, else under a small process of ours that starts it again after a crash.
//!
//! Never: host a run in a command's own process.

use std::io::{IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Command, ExitStatus, Stdio};
use std::time::Duration;

use limb_common::clock;
use limb_common::id::Digest;
use limb_common::phase::LimbExit;
use limb_proto::v1::StatusRequest;
use limb_proto::v1::owner_client::OwnerClient;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, BufReader, Lines};
use tokio::process::ChildStdout;
use tonic::transport::Channel;

use super::fate::{self, FailedStart};
use super::{socket, stopped};
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
    #[error("the coordinator cannot start: {0}")]
    Cannot(String),
    #[error("the coordinator did not come up within {} s, and goes on trying: {reason}", START_LIMIT.as_secs())]
    Trying { reason: String },
    #[error("the coordinator did not come up within {} s; hint: its log is {}", START_LIMIT.as_secs(), log.display())]
    NotUp { log: PathBuf, source: socket::NotRunning },
    #[error(
        "the coordinator was stopped; runs continue when it is started again; hint: `limb serve` starts it"
    )]
    Stopped,
    #[error("could not use {}; hint: check that it is yours and writable, or set `state_dir` to another place", path.display())]
    State { path: PathBuf, source: std::io::Error },
}

/// The log of a coordinator that a command started.
#[must_use]
pub fn log_path(settings: &Settings) -> PathBuf {
    settings.state_dir.join("coordinator.log")
}

/// What a coordinator is wanted for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wish {
    /// One that was stopped on purpose stays so.
    Look,
    /// New work: it is meant to run.
    Submit,
}

/// A client of this home's coordinator, which is started first where none answers.
///
/// # Errors
/// [`EnsureError`].
pub async fn ensure_running(settings: &Settings, wish: Wish) -> Result<OwnerClient<Channel>, EnsureError> {
    if let Ok(client) = answering(&settings.socket).await {
        return Ok(client);
    }
    match wish {
        Wish::Look if stopped::is_remembered(&settings.state_dir) => return Err(EnsureError::Stopped),
        Wish::Look | Wish::Submit => {}
    }
    let mut told = start(settings)?;
    let deadline = clock::boottime() + START_LIMIT;
    let mut latest: Option<FailedStart> = None;
    loop {
        match answering(&settings.socket).await {
            Ok(client) => return Ok(client),
            Err(source) if clock::boottime() >= deadline => {
                return Err(match latest {
                    Some(failed) => EnsureError::Trying { reason: failed.message() },
                    None => EnsureError::NotUp { log: log_path(settings), source },
                });
            }
            Err(_) => {
                if let Some(failed) = told.next_within(POLL).await {
                    if failed.permanent {
                        return Err(EnsureError::Cannot(failed.message()));
                    }
                    latest = Some(failed);
                }
            }
        }
    }
}

/// What the one who was started says of its failures.
enum Told {
    /// A supervisor of ours writes lines.
    Lines(Option<Lines<BufReader<ChildStdout>>>),
    /// A unit leaves a file.
    File(PathBuf),
}

impl Told {
    async fn next_within(&mut self, limit: Duration) -> Option<FailedStart> {
        match self {
            Self::Lines(Some(lines)) => match tokio::time::timeout(limit, lines.next_line()).await {
                Ok(Ok(Some(line))) => FailedStart::of_line(&line),
                // It has ended: somebody else's coordinator may be about to answer.
                Ok(Ok(None) | Err(_)) => {
                    *self = Self::Lines(None);
                    None
                }
                Err(_) => None,
            },
            Self::Lines(None) => {
                tokio::time::sleep(limit).await;
                None
            }
            Self::File(path) => {
                tokio::time::sleep(limit).await;
                FailedStart::of_line(&std::fs::read_to_string(path).ok()?)
            }
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

fn start(settings: &Settings) -> Result<Told, EnsureError> {
    use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
    let state = |source| EnsureError::State { path: settings.state_dir.clone(), source };
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(&settings.state_dir).map_err(state)?;
    let program = std::env::current_exe().map_err(EnsureError::Start)?;
    if systemd_runs_for_the_user() {
        let failure = fate::failure_file(&settings.state_dir);
        // An older reason is not this one's.
        drop(std::fs::remove_file(&failure));
        if start_unit(settings, &program) {
            return Ok(Told::File(failure));
        }
    }
    let log = std::fs::OpenOptions::new()
        .append(true)
        .create(true)
        .mode(0o600)
        .open(log_path(settings))
        .map_err(state)?;
    let mut command = tokio::process::Command::new(program);
    command
        .args(["serve", "--supervise"])
        .args(settings.as_flags())
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(log);
    // SAFETY: setsid is async-signal-safe and touches no memory of ours. Without a terminal of
    // its own the coordinator is not reached by the command's ctrl-C or hangup.
    unsafe {
        command.pre_exec(|| nix::unistd::setsid().map(drop).map_err(std::io::Error::from));
    }
    let mut supervisor = command.spawn().map_err(EnsureError::Start)?;
    Ok(Told::Lines(supervisor.stdout.take().map(|out| BufReader::new(out).lines())))
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
        .args(["-p", &format!("RestartPreventExitStatus={}", LimbExit::CannotStart.code())])
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

/// Why a supervisor gives up.
#[derive(Debug, thiserror::Error)]
pub enum SuperviseError {
    #[error("the coordinator's program could not be started")]
    Start(#[from] std::io::Error),
    #[error("{0}")]
    Cannot(String),
}

/// `limb serve --supervise`: runs the coordinator as a child, again and again, until it ends
/// cleanly or cannot start for a reason that stays. SIGTERM is passed on.
///
/// # Errors
/// [`SuperviseError`].
pub async fn supervise(settings: &Settings) -> Result<(), SuperviseError> {
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
            .stdout(Stdio::piped())
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
        let failed = what_it_said(&mut child).await;
        if let Some(failed) = &failed {
            pass_on(failed);
        }
        if status.code() == Some(LimbExit::CannotStart.code()) {
            let unsaid = || "the coordinator cannot start; hint: its log says why".to_owned();
            return Err(SuperviseError::Cannot(failed.map_or_else(unsaid, |failed| failed.message())));
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

/// More than any chain of errors.
const LONGEST_REASON_BYTES: u64 = 64 * 1024;
/// A process that the coordinator was just starting may hold its output open for a moment.
const LAST_WORDS: Duration = Duration::from_secs(1);

async fn what_it_said(child: &mut tokio::process::Child) -> Option<FailedStart> {
    let mut said = String::new();
    let mut out = child.stdout.take()?.take(LONGEST_REASON_BYTES);
    // A line is whole or it is none.
    drop(tokio::time::timeout(LAST_WORDS, out.read_to_string(&mut said)).await);
    said.lines().find_map(FailedStart::of_line)
}

/// To the command that started this supervisor, if it still listens. A person reads the log.
fn pass_on(failed: &FailedStart) {
    let mut stdout = std::io::stdout().lock();
    if !stdout.is_terminal() {
        drop(writeln!(stdout, "{}", failed.to_line()).and_then(|()| stdout.flush()));
    }
}
