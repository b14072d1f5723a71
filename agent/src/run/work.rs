//! The job from its start to its end, with home's orders in between:
//!
//! ```text
//!   start ─▶ setup ─▶ run ─▶ ended ─▶ drained ─▶ (Die)
//!              │       │        Stop: SIGTERM ─▶ grace ─▶ fence ─▶ abort mounts, kill
//!              └───────┴─────── Die:  fence ─▶ abort mounts, kill
//! ```
//!
//! No fence stands during the grace: a job that saves when it is told to stop closes its files,
//! and that publishes them. One that dies of the signal publishes nothing (see [`crate::mount`]).

use std::sync::Arc;
use std::time::Duration;

use limb_common::assignment::{Assignment, Order};
use limb_common::clock::boottime;
use limb_common::error::chain;
use limb_common::report::{BoxEvent, DrainReport, EndedBy, JobEnd, JobStep};
use limb_common::task::{self, Task};
use tokio::sync::watch;

use super::keeping;
use super::place::{Builder, Mounts, Place, agent_bytes, notice};
use crate::job::cgroup::box_memory_bytes;
use crate::job::{JobError, JobSpec, Limits, RunningJob, Workdir, base_env, this_program};
use crate::leash::Stage;
use crate::link::channels::Channels;
use crate::link::control::Reporter;
use crate::link::logs::send_logs;
use crate::logs::{LogBuffer, LogLimits, capture};
use crate::results::Output;

/// The end of a job that nobody stopped may take as long as its bytes need; home's limits bound
/// it with a Stop.
const UNHURRIED: Duration = Duration::from_secs(365 * 86_400);
/// A shell's code for a program that cannot be executed.
const CANNOT_RUN: i32 = 126;

const NO_MEMORY_LIMIT: &str = "this box has no memory controller for the job: nothing limits what it takes; \
                               hint: run the agent as root, or in a unit with Delegate=yes";

/// The kernel tells of the last closes of a job that has ended within milliseconds.
const RELEASE_PATIENCE: Duration = Duration::from_secs(2);

/// What ended a wait for the job.
enum Interruption {
    Stop { grace: Duration, drain: Duration },
    Die,
}

impl Interruption {
    /// How long what is left may take to get home.
    fn drain_bound(&self) -> Duration {
        match self {
            Self::Stop { drain, .. } => *drain,
            Self::Die => Duration::ZERO,
        }
    }
}

/// Waits for an order that ends the job.
async fn ordered_to_end(orders: &mut watch::Receiver<Order>) -> Interruption {
    loop {
        match orders.borrow_and_update().clone() {
            Order::Run => {}
            Order::Stop { grace, drain, reason } => {
                tracing::info!(reason, "home ordered a stop");
                return Interruption::Stop { grace, drain };
            }
            Order::Die { reason } => {
                tracing::info!(reason, "home ordered the end");
                return Interruption::Die;
            }
        }
        if orders.changed().await.is_err() {
            // The link's tasks have ended; the leash ends the rest.
            std::future::pending::<()>().await;
        }
    }
}

/// Waits for any order that ends the job, leaving it to be seen again.
pub(super) async fn ordered_to_end_early(orders: &watch::Receiver<Order>) {
    let _order = ordered_to_end(&mut orders.clone()).await;
}

/// Waits until home orders this box to die.
pub(super) async fn ordered_to_die(orders: &mut watch::Receiver<Order>) {
    let died = orders.wait_for(|order| matches!(order, Order::Die { .. })).await.is_ok();
    if !died {
        std::future::pending::<()>().await;
    }
}

/// A job that was put into its place.
pub(super) struct Started {
    job: Arc<RunningJob>,
    logs: Arc<LogBuffer>,
    _sending: Task<bool>,
    /// The workdir where the kernel refused an overlay.
    ready_workdir: Option<Arc<Output>>,
}

pub(super) async fn start(
    builder: &Builder<'_>,
    place: &Place,
    assignment: &Assignment,
) -> Result<Started, JobError> {
    let private_dir = builder.private_dir;
    let view_error = |error: std::io::Error| JobError::View(error.to_string());
    let spec = |workdir| {
        let view = place.view(private_dir, builder.hide, workdir).map_err(view_error)?;
        Ok::<_, JobError>(job_spec(assignment, view))
    };
    let mut ready_workdir = None;
    let mut job = match RunningJob::start(spec(place.layered_workdir())?).await {
        Err(JobError::OverlayRefused(why)) => {
            tracing::info!(why, "no overlay here; the workdir is a mount of our own");
            let (output, source) =
                builder.ready_workdir(place).map_err(|error| JobError::View(chain(&error)))?;
            ready_workdir = Some(output);
            RunningJob::start(spec(Workdir::Ready { source })?).await?
        }
        other => other?,
    };
    if !job.limits_memory() {
        // Where nobody asked for a limit, the kernel still takes the job before the agent.
        match assignment.memory_bytes {
            Some(_) => notice(builder.reporter, "memory-not-limited", NO_MEMORY_LIMIT.to_owned()),
            None => tracing::info!("{NO_MEMORY_LIMIT}"),
        }
    }
    let switch = job.kill_switch();
    builder.link.leash().register(Stage::KillJob, "job", move || switch.fire());
    let logs = LogBuffer::new(private_dir, LogLimits::default());
    if let Some(output) = job.take_output() {
        capture(output, Arc::clone(&logs)).map(drop).map_err(JobError::Helper)?;
    }
    let channels: Arc<dyn Channels> = Arc::clone(builder.link) as _;
    let sending = task::spawn("logs", send_logs(channels, Arc::clone(&logs)));
    Ok(Started { job: Arc::new(job), logs, _sending: sending, ready_workdir })
}

fn job_spec(assignment: &Assignment, view: crate::job::View) -> JobSpec {
    let mut env = base_env(&view);
    env.extend(assignment.env.iter().cloned());
    JobSpec {
        setup: (!assignment.setup.is_empty()).then(|| assignment.setup.clone()),
        command: assignment.command.clone(),
        env,
        secrets: assignment.secrets.clone(),
        cwd: None,
        view,
        limits: Limits::of_memory(
            assignment.memory_bytes,
            box_memory_bytes(),
            agent_bytes(&assignment.cache),
        ),
        init_program: this_program(),
    }
}

impl Started {
    /// Waits for the job's end or brings it about; reports what happens on the way. Gives the
    /// end and how long the drain may take.
    pub(super) async fn until_ended(
        &self,
        place: &Place,
        mounts: &Mounts,
        orders: &mut watch::Receiver<Order>,
        reporter: &Reporter,
        has_setup: bool,
    ) -> (JobEnd, Option<Duration>) {
        let _starts = self.report_starts(reporter, has_setup);
        let interruption = tokio::select! {
            end = self.job.wait() => return (end, None),
            interruption = ordered_to_end(orders) => interruption,
        };
        let drain = match interruption {
            Interruption::Stop { grace, drain } => {
                self.job.terminate();
                let died = tokio::select! {
                    ended = tokio::time::timeout(grace, self.job.wait()) => ended.is_err(),
                    () = ordered_to_die(orders) => true,
                };
                if died {
                    self.kill(place, mounts).await;
                }
                drain
            }
            Interruption::Die => {
                self.job.terminate();
                self.kill(place, mounts).await;
                Duration::ZERO
            }
        };
        (self.job.wait().await, Some(drain))
    }

    async fn kill(&self, place: &Place, mounts: &Mounts) {
        // An aborted mount tells of no close any more: from here on what is not whole stays private.
        for output in &place.outputs {
            output.fence();
        }
        if let Err(error) = self.job.kill(|| mounts.abort_the_jobs()).await {
            tracing::error!(%error, "the job could not be killed");
        }
    }

    fn report_starts(&self, reporter: &Reporter, has_setup: bool) -> Task<()> {
        let (job, reporter) = (Arc::clone(&self.job), reporter.clone());
        task::spawn("job starts", async move {
            if has_setup && job.started(JobStep::Setup).await {
                reporter.report(BoxEvent::SetupStarted).await;
            }
            if job.started(JobStep::Run).await {
                reporter.report(BoxEvent::JobStarted).await;
            }
        })
    }

    /// Brings home what is left: partial files are named, workdir changes kept up to the cap,
    /// results and logs drained.
    pub(super) async fn drain(
        &self,
        place: &Place,
        assignment: &Assignment,
        orders: &mut watch::Receiver<Order>,
        bound: Option<Duration>,
    ) -> DrainReport {
        let began = boottime();
        let rest = |bound: Duration| bound.saturating_sub(boottime().saturating_since(began));
        for output in &place.outputs {
            // After the fence nothing more will be told.
            if !output.tree().is_fenced() && !output.released(RELEASE_PATIENCE).await {
                tracing::warn!("a file of the job is still open after its end");
            }
            output.abandon_open();
        }
        let cap = assignment.workdir_changes_cap_bytes;
        let keeping = keeping::keep(place, self.ready_workdir.clone(), cap);
        let left = within(orders, bound, keeping)
            .await
            .unwrap_or_else(|| vec!["the workdir's changes: time was up before all were copied".to_owned()]);
        let mut report = match bound {
            Some(bound) => place.outbox.drain(rest(bound)).await,
            None => tokio::select! {
                drained = place.outbox.drain(UNHURRIED) => drained,
                interruption = ordered_to_end(orders) => {
                    place.outbox.drain(interruption.drain_bound()).await
                }
            },
        };
        let log_bytes_left = match bound {
            Some(bound) => self.logs.flush(rest(bound)).await,
            None => tokio::select! {
                left = self.logs.flush(UNHURRIED) => left,
                interruption = ordered_to_end(orders) => self.logs.flush(interruption.drain_bound()).await,
            },
        };
        if log_bytes_left > 0 {
            report.complete = false;
            report.unsaved.push(format!("the last {log_bytes_left} bytes of the job's log"));
        }
        report.workdir_changes_left = left;
        report
    }
}

/// Does this for as long as home allows. `None`: time was up first.
async fn within<T>(
    orders: &mut watch::Receiver<Order>,
    bound: Option<Duration>,
    work: impl Future<Output = T>,
) -> Option<T> {
    let mut work = std::pin::pin!(work);
    let bound = match bound {
        Some(bound) => bound,
        None => tokio::select! {
            done = &mut work => return Some(done),
            interruption = ordered_to_end(orders) => interruption.drain_bound(),
        },
    };
    if bound.is_zero() {
        return None;
    }
    tokio::select! {
        done = tokio::time::timeout(bound, work) => done.ok(),
        () = ordered_to_die(orders) => None,
    }
}

/// The end of a job that this box could not put into its place. Not the job's own doing.
pub(super) fn never_began(why: String) -> JobEnd {
    JobEnd {
        step: JobStep::Prepare,
        how: EndedBy::CouldNotStart { code: CANNOT_RUN, why },
        oom_killed: false,
        stopped: false,
    }
}

/// Home ended it while the job was still being put into its place.
pub(super) fn stopped_early() -> JobEnd {
    JobEnd { stopped: true, ..never_began("stopped before the job started".to_owned()) }
}
