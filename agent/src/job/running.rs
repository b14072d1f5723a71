//! The agent's end of a running job.

use std::io::{BufRead as _, BufReader, PipeReader, Write as _};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use limb_common::assignment::Command;
use limb_common::report::{EndedBy, JobEnd, JobStep};
use tokio::sync::watch;

use super::cgroup::Group;
use super::messages::{Order, Step, StepOrder, TERMINATE, Told, send_order};
use super::view::WORKDIR;
use super::{JobError, JobSpec, StillRunning};

/// From the main process's end to "somebody is stuck": the kernel needs milliseconds.
const LEFTOVERS: Duration = Duration::from_secs(5);
/// The longest that a kill is waited for, before and again after the helper itself is killed.
const KILL_BOUND: Duration = Duration::from_secs(5);

/// What is known of the job so far.
#[derive(Clone, Debug, Default)]
struct Known {
    /// Whether it could be put into place.
    placed: Option<Result<(), Told>>,
    /// Entrances of groups that it could not enter.
    outside: Vec<String>,
    step: Option<JobStep>,
    ended: Option<(JobStep, EndedBy)>,
    /// Somebody had ordered the end by then.
    stopped: bool,
    /// The helper has ended, and with it the tree.
    gone: bool,
}

#[derive(Debug)]
struct Shared {
    socket: UnixStream,
    group: Group,
    stopped: AtomicBool,
}

impl Shared {
    fn kill(&self) {
        self.stopped.store(true, Ordering::Release);
        // The helper takes the end of its orders for the order to kill.
        let _told = self.socket.shutdown(Shutdown::Write);
        self.group.kill();
    }
}

/// A job that has its view and is running. Dropping it kills the tree.
#[derive(Debug)]
pub struct RunningJob {
    shared: Arc<Shared>,
    known: watch::Receiver<Known>,
    output: Option<PipeReader>,
    helper_pid: u32,
}

/// Kills the job without waiting and without a runtime: for the leash.
#[derive(Clone, Debug)]
pub struct KillSwitch(Arc<Shared>);

impl KillSwitch {
    /// Never blocks. Abort FUSE first, or a reader stuck in it stays.
    pub fn fire(&self) {
        self.0.kill();
    }
}

impl RunningJob {
    /// Puts the job into place and starts it. `Err` means that nothing runs; a program that
    /// cannot be executed is not an error here but the job's end.
    pub async fn start(spec: JobSpec) -> Result<Self, JobError> {
        let group = Group::create(spec.limits);
        let order = order_of(&spec, &group)?;
        let (socket, theirs) = UnixStream::pair().map_err(JobError::Helper)?;
        let (output, log) = std::io::pipe().map_err(JobError::Helper)?;
        let shared = Arc::new(Shared { socket, group, stopped: AtomicBool::new(false) });
        let (knows, mut known) = watch::channel(Known::default());
        let reader = shared.socket.try_clone().map_err(JobError::Helper)?;
        let supervised = shared.clone();
        let (started, helper) = tokio::sync::oneshot::channel();
        let program = spec.init_program.clone();
        // A thread of its own, for the whole life of the job: it blocks until the helper is gone.
        std::thread::Builder::new()
            .name("job".to_owned())
            .spawn(move || {
                let spawned = spawn_helper(&program, theirs, log);
                match spawned {
                    Ok(child) => {
                        let _waiting = started.send(Ok(child.id()));
                        supervise(child, reader, order, &knows, &supervised);
                    }
                    Err(error) => {
                        let _waiting = started.send(Err(error));
                    }
                }
            })
            .map_err(JobError::Helper)?;
        let helper_pid = helper.await.map_err(|_| JobError::HelperDied)?.map_err(JobError::Helper)?;
        let job = Self { shared, known: known.clone(), output: Some(output), helper_pid };
        let placed = known.wait_for(|known| known.placed.is_some() || known.gone).await;
        let placed = placed.map_err(|_| JobError::HelperDied)?.placed.clone();
        match placed {
            Some(Ok(())) => Ok(job),
            Some(Err(told)) => Err(refusal(told)),
            None => Err(JobError::HelperDied),
        }
    }

    /// Both of the job's output streams, interleaved as written. Ends when the tree is gone.
    pub fn take_output(&mut self) -> Option<PipeReader> {
        self.output.take()
    }

    #[must_use]
    pub fn kill_switch(&self) -> KillSwitch {
        KillSwitch(self.shared.clone())
    }

    /// Whether the job's [`super::Limits::memory_bytes`] holds here.
    #[must_use]
    pub fn limits_memory(&self) -> bool {
        self.shared.group.limits_memory(&self.known.borrow().outside)
    }

    /// Waits until `step` has started. False: the job ended before.
    pub async fn started(&self, step: JobStep) -> bool {
        let reached = |known: &Known| known.step == Some(step) || known.step == Some(JobStep::Run);
        let mut known = self.known.clone();
        known
            .wait_for(|known| reached(known) || known.ended.is_some() || known.gone)
            .await
            .is_ok_and(|known| reached(&known))
    }

    /// Waits for the job's end. What its main process left behind is killed by then, unless it
    /// is stuck in the kernel ([`Self::kill`] deals with that). After [`Self::terminate`] it
    /// waits for the whole tree: bound it with the grace, then kill.
    pub async fn wait(&self) -> JobEnd {
        let mut known = self.known.clone();
        let _ended = known.wait_for(|known| known.ended.is_some() || known.gone).await.is_ok();
        if self.shared.stopped.load(Ordering::Acquire) {
            let _gone = known.wait_for(|known| known.gone).await.is_ok();
        } else {
            let _gone = tokio::time::timeout(LEFTOVERS, self.gone()).await;
        }
        let last = self.known.borrow().clone();
        let step = last.step.unwrap_or(JobStep::Prepare);
        // A helper that died without a word was killed, and the job with it.
        let (step, how) = last.ended.unwrap_or((step, EndedBy::Signal(libc::SIGKILL)));
        let failed = how != EndedBy::Exit(0);
        let oom_killed = failed && self.oom_killed(&how);
        JobEnd { step, how, oom_killed, stopped: last.stopped }
    }

    fn oom_killed(&self, how: &EndedBy) -> bool {
        let kills = self.shared.group.oom_kills();
        // The machine's counter says nothing about whose process it was.
        let ours = self.shared.group.counts_memory() || how.exit_code() == 128 + libc::SIGKILL;
        kills > 0 && ours
    }

    /// SIGTERM to every process of the job.
    pub fn terminate(&self) {
        self.shared.stopped.store(true, Ordering::Release);
        // A helper that is gone has nobody left to pass it on to.
        let _sent = (&self.shared.socket).write_all(&[TERMINATE]);
    }

    /// Kills the tree and waits until it is gone. `abort` runs first: it must answer or abort
    /// the job's pending FUSE requests, since a process waiting on one ignores SIGKILL.
    pub async fn kill(&self, abort: impl FnOnce()) -> Result<(), StillRunning> {
        abort();
        self.shared.kill();
        if tokio::time::timeout(KILL_BOUND, self.gone()).await.is_ok() {
            return Ok(());
        }
        // Should the helper be the one that hangs: its death is pid 1's death.
        if let Ok(pid) = i32::try_from(self.helper_pid)
            && !self.is_gone()
        {
            let _sent =
                nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), nix::sys::signal::Signal::SIGKILL);
        }
        match tokio::time::timeout(KILL_BOUND, self.gone()).await {
            Ok(()) => Ok(()),
            Err(_) => Err(StillRunning { waited_s: (KILL_BOUND * 2).as_secs() }),
        }
    }

    /// Whether no process of the job is left.
    #[must_use]
    pub fn is_gone(&self) -> bool {
        self.known.borrow().gone
    }

    async fn gone(&self) {
        // The sender lives as long as the supervising thread: its end is the helper's end.
        let mut known = self.known.clone();
        let _gone = known.wait_for(|known| known.gone).await.is_ok();
    }
}

impl Drop for RunningJob {
    fn drop(&mut self) {
        self.shared.kill();
    }
}

fn refusal(told: Told) -> JobError {
    match told {
        Told::NoNamespaces(why) => JobError::NoNamespaces(why),
        Told::OverlayRefused(why) => JobError::OverlayRefused(why),
        Told::ViewFailed(why) => JobError::View(why),
        Told::ViewReady { .. }
        | Told::Started(_)
        | Told::Exited { .. }
        | Told::Signalled { .. }
        | Told::CouldNotStart { .. } => JobError::HelperDied,
    }
}

fn spawn_helper(program: &Path, socket: UnixStream, log: std::io::PipeWriter) -> std::io::Result<Child> {
    let errors = log.try_clone()?;
    let mut command = std::process::Command::new(program);
    command.arg0("limb-job").arg("job-init").env_clear();
    if let Some(life) = std::env::var_os(limb_common::life::VARIABLE) {
        command.env(limb_common::life::VARIABLE, life);
    }
    command.stdin(Stdio::from(OwnedFd::from(socket))).stdout(log).stderr(errors).spawn()
}

/// Gives the order, passes on what is told, and stays until the helper is gone.
fn supervise(
    mut child: Child,
    socket: UnixStream,
    order: Order,
    knows: &watch::Sender<Known>,
    shared: &Shared,
) {
    let stopped = || shared.stopped.load(Ordering::Acquire);
    if send_order(&socket, &order).is_err() {
        tracing::warn!("the job's helper took no order");
    }
    drop(order);
    for line in BufReader::new(socket).lines() {
        let Ok(line) = line else { break };
        match serde_json::from_str(&line) {
            Ok(told) => {
                knows.send_modify(|known| learn(known, told, stopped()));
            }
            Err(error) => tracing::warn!(%error, "the job's helper speaks in riddles"),
        }
    }
    let _status = child.wait();
    knows.send_modify(|known| {
        known.stopped |= known.ended.is_none() && stopped();
        known.gone = true;
    });
}

fn learn(known: &mut Known, told: Told, stopped: bool) {
    match told {
        Told::NoNamespaces(_) | Told::OverlayRefused(_) | Told::ViewFailed(_) => {
            known.placed = Some(Err(told))
        }
        Told::ViewReady { outside } => {
            known.placed = Some(Ok(()));
            known.outside = outside;
        }
        Told::Started(step) => known.step = Some(step.into()),
        Told::Exited { step, code } => known.end(step, EndedBy::Exit(code), stopped),
        Told::Signalled { step, signal } => known.end(step, EndedBy::Signal(signal), stopped),
        Told::CouldNotStart { step, code, why } => {
            known.end(step, EndedBy::CouldNotStart { code, why }, stopped);
        }
    }
}

impl Known {
    fn end(&mut self, step: Step, how: EndedBy, stopped: bool) {
        self.ended = Some((step.into(), how));
        self.stopped = stopped;
    }
}

fn order_of(spec: &JobSpec, group: &Group) -> Result<Order, JobError> {
    let mut steps = Vec::new();
    if let Some(script) = spec.setup.as_ref().filter(|script| !script.trim().is_empty()) {
        steps.push(StepOrder { step: Step::Setup, argv: bash(script) });
    }
    let argv = match &spec.command {
        Command::Script(script) => bash(script),
        Command::Argv(argv) => argv.clone(),
    };
    steps.push(StepOrder { step: Step::Run, argv });
    let cwd = spec.cwd.as_deref().unwrap_or(Path::new(WORKDIR));
    Ok(Order {
        steps,
        env: environment(spec)?,
        cwd: cwd.as_os_str().as_bytes().to_vec(),
        view: spec.view.clone(),
        cgroups: group.entrances(),
    })
}

fn bash(script: &str) -> Vec<Vec<u8>> {
    ["bash", "-o", "pipefail", "-c", script].iter().map(|word| word.as_bytes().to_vec()).collect()
}

/// `NAME=value`, each name once, the last one counting, in order of first appearance.
fn environment(spec: &JobSpec) -> Result<Vec<Vec<u8>>, JobError> {
    let secrets = spec.secrets.iter().map(|(name, value)| (name, value.expose()));
    let mut all: Vec<(&Vec<u8>, &Vec<u8>)> = Vec::new();
    for (name, value) in spec.env.iter().map(|(name, value)| (name, value)).chain(secrets) {
        // The value is not shown: it may be a secret.
        let shown = || String::from_utf8_lossy(name).into_owned();
        if name.is_empty() || name.contains(&b'=') || name.contains(&0) {
            return Err(JobError::BadEnvironment(format!("the name {:?}", shown())));
        }
        if value.contains(&0) {
            return Err(JobError::BadEnvironment(format!("{} contains a NUL byte", shown())));
        }
        match all.iter_mut().find(|(known, _)| *known == name) {
            Some(entry) => entry.1 = value,
            None => all.push((name, value)),
        }
    }
    Ok(all.into_iter().map(|(name, value)| [name.as_slice(), b"=", value].concat()).collect())
}
