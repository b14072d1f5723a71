//! One life of the agent, from its settings to its end:
//!
//! ```text
//!  fence off ─▶ enrol ─▶ lease armed ─▶ assignment ─▶ mounts ─▶ job ─▶ drain ─▶ Die ─▶ wipe ─▶ end
//! ```
//!
//! The leash stands beside all of it: when the lease is over, its thread destroys everything and
//! powers off without asking here.

mod cache;
mod keeping;
mod place;
mod traces;
mod work;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use limb_common::assignment::Assignment;
use limb_common::boot::{BootSettings, HostKind};
use limb_common::clock::{BootInstant, boottime};
use limb_common::error::chain;
use limb_common::report::{BoxEvent, DrainReport};
use limb_common::task::{self, Task};
use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

use self::place::{Builder, Mounts};
use crate::host::{self, EXIT_LEASE_OVER, HostPower, LifeError, MachinePower, ProcessPower};
use crate::leash::{Leash, LeashError, Stage};
use crate::link::control::{self, ControlError, Reporter};
use crate::link::{Link, LinkError, boot_id};

/// After the ordered end: what the runtime's last tasks may take.
const RUNTIME_END: Duration = Duration::from_secs(1);

/// For what the job touched to get home: a hint, that no box is kept for.
const TRACE_PATIENCE: Duration = Duration::from_secs(10);

/// What the agent meets the world with.
pub struct Edges {
    pub power: Arc<dyn HostPower>,
}

impl std::fmt::Debug for Edges {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Edges").finish_non_exhaustive()
    }
}

impl Edges {
    /// The real ones.
    #[must_use]
    pub fn real(kind: HostKind) -> Self {
        match kind {
            HostKind::Process => Self { power: Arc::new(ProcessPower) },
            HostKind::Machine => Self { power: Arc::new(MachinePower) },
        }
    }
}

/// This life ended before its work was done.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error("could not read the settings {}", path.display())]
    Settings { path: PathBuf, source: std::io::Error },
    #[error("the settings are not an agent's")]
    Format(#[from] serde_json::Error),
    #[error("could not fence the agent off")]
    Fence(#[from] nix::Error),
    #[error(transparent)]
    Leash(#[from] LeashError),
    #[error(transparent)]
    Life(#[from] LifeError),
    #[error("could not start the runtime")]
    Runtime(#[source] std::io::Error),
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error("no assignment")]
    Assignment(#[from] ControlError),
    #[error("the lease was over before the work began")]
    LeaseOver,
}

/// Reads the settings file. For a process on somebody's machine it is removed at once: its token
/// is about to be spent, and nobody else has to see it.
///
/// # Errors
/// The file cannot be read, or is not an agent's settings.
pub fn read_settings(path: &Path) -> Result<BootSettings, RunError> {
    let file = |source| RunError::Settings { path: path.to_owned(), source };
    let text = std::fs::read(path).map_err(file)?;
    let settings: BootSettings = serde_json::from_slice(&text)?;
    match settings.host {
        HostKind::Process => std::fs::remove_file(path).map_err(file)?,
        HostKind::Machine => {}
    }
    Ok(settings)
}

/// Lives. Must be called while the process has one thread.
///
/// # Errors
/// [`RunError`]; everything here is gone all the same.
pub fn run(settings: &BootSettings, edges: &Edges) -> Result<(), RunError> {
    let started = boottime();
    host::harden()?;
    match settings.host {
        HostKind::Process => host::isolate_mounts()?,
        HostKind::Machine => {}
    }
    let boot = boot_id().map_err(|source| LifeError::Directory { path: "/proc".into(), source })?;
    host::begin_life(&settings.private_dir, &boot)?;
    let leash = Leash::start()?;
    let mounts = Mounts::default();
    mounts.register(&leash, &settings.private_dir);
    let power = Arc::clone(&edges.power);
    leash.register(Stage::PowerOff, "power", move || power.power_off(EXIT_LEASE_OVER));
    let runtime =
        tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(RunError::Runtime)?;
    let life = Life { settings, boot_id: boot, started, leash: leash.clone(), mounts };
    let result = runtime.block_on(Box::pin(life.live()));
    // Mounts are answered by the runtime, so it goes after them.
    leash.destroy();
    runtime.shutdown_timeout(RUNTIME_END);
    match settings.host {
        HostKind::Process => {}
        HostKind::Machine => edges.power.power_off(0),
    }
    result
}

struct Life<'a> {
    settings: &'a BootSettings,
    boot_id: String,
    started: BootInstant,
    leash: Leash,
    mounts: Mounts,
}

impl Life<'_> {
    async fn live(self) -> Result<(), RunError> {
        let _signals = trip_on_sigterm(self.leash.clone());
        let link = Link::enrol(self.settings, &self.boot_id, self.started, self.leash.clone()).await?;
        let link = Arc::new(link);
        let asked = boottime();
        let assignment = control::assignment(&link).await?;
        // Home granted at the enrolment; the first beat follows at once.
        let ttl = assignment.disconnect_grace;
        self.leash.arm(link.enrolled_sent(), ttl).map_err(|_| RunError::LeaseOver)?;
        let _beats = control::beat(Arc::clone(&link), ttl);
        let _certificates = control::renew_certificates(Arc::clone(&link));
        let (_following, mut orders) = control::orders(Arc::clone(&link));
        let (_reports, reporter) = Reporter::start(Arc::clone(&link));
        passed(&reporter, "enrolled", asked.saturating_since(self.started)).await;
        let stop = CancellationToken::new();
        let _stopping = stop.clone().drop_guard();
        let builder = Builder {
            link: &link,
            mounts: &self.mounts,
            reporter: &reporter,
            private_dir: &self.settings.private_dir,
            hide: &self.settings.hide,
            stop: &stop,
        };
        let drained = self.work(&builder, &assignment, &mut orders, &reporter).await;
        reporter.report(BoxEvent::ResultsDrained(drained)).await;
        let mut also = orders.clone();
        tokio::select! {
            () = reporter.flush() => work::ordered_to_die(&mut orders).await,
            () = work::ordered_to_die(&mut also) => {}
        }
        Ok(())
    }

    /// Everything between the assignment and the last byte.
    async fn work(
        &self,
        builder: &Builder<'_>,
        assignment: &Assignment,
        orders: &mut tokio::sync::watch::Receiver<limb_common::assignment::Order>,
        reporter: &Reporter,
    ) -> DrainReport {
        let began = boottime();
        // Home may end it all while manifests are still on their way.
        let placed = tokio::select! {
            placed = builder.place(assignment) => placed,
            () = work::ordered_to_end_early(orders) => {
                reporter.report(BoxEvent::JobEnded(work::stopped_early())).await;
                return DrainReport { complete: true, ..DrainReport::default() };
            }
        };
        let place = match placed {
            Ok(place) => place,
            Err(error) => {
                reporter.report(BoxEvent::JobEnded(work::never_began(chain(&error)))).await;
                return DrainReport { complete: true, ..DrainReport::default() };
            }
        };
        passed(reporter, "mounted", boottime().saturating_since(began)).await;
        let job = match work::start(builder, &place, assignment).await {
            Ok(job) => job,
            Err(error) => {
                reporter.report(BoxEvent::JobEnded(work::never_began(chain(&error)))).await;
                return place.outbox.drain(Duration::ZERO).await;
            }
        };
        let has_setup = !assignment.setup.is_empty();
        let (end, bound) = job.until_ended(&place, &self.mounts, orders, reporter, has_setup).await;
        reporter.report(BoxEvent::JobEnded(end)).await;
        let traced = async {
            if let Some(traces) = &place.traces {
                traces.finish(reporter, bound.unwrap_or(TRACE_PATIENCE).min(TRACE_PATIENCE)).await;
            }
        };
        cache::finish(&place.source, place.pushed.as_deref(), reporter).await;
        // Beside the drain, which counts from now.
        tokio::join!(job.drain(&place, assignment, orders, bound), traced).0
    }
}

async fn passed(reporter: &Reporter, name: &str, took: Duration) {
    reporter.report(BoxEvent::BootPhasePassed { name: name.to_owned(), took }).await;
}

/// Whoever ends the agent by hand gets the whole destruction, not a half.
fn trip_on_sigterm(leash: Leash) -> Task<()> {
    task::spawn("signals", async move {
        let Ok(mut terminated) = signal(SignalKind::terminate()) else { return };
        if terminated.recv().await.is_some() {
            leash.trip("the agent was told to end (SIGTERM)");
        }
    })
}
