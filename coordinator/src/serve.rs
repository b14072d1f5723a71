//! `limb serve`: the one coordinator of a home. It opens the ledger, listens for agents and for
//! the owner's commands, and hands everything to the lifecycle.
//!
//! Order at the start: lock, database, epoch, authority, agents' port, lifecycle (which adopts
//! and tears down), then the doors. At the end the doors close first; boxes are never touched by
//! an ending coordinator.
//!
//! Never: run beside another one on the same state (a lock decides, an epoch proves it).

pub mod fate;
mod listen;
mod lock;
pub mod socket;
pub(crate) mod stopped;
pub mod supervise;
#[cfg(test)]
mod tests;
mod wiring;

pub use wiring::Data;

use std::path::PathBuf;
use std::sync::Arc;

use limb_common::clock::{Clock, SystemClock};
use limb_common::task;
use tokio_util::sync::CancellationToken;

use crate::ca::{CaError, HomeCa};
use crate::database::{Database, DatabaseError};
use crate::ledger::{Ledger, LedgerError, secrets::SecretStore};
use crate::lifecycle::{HomeEndpoint, Lifecycle, LifecycleError, Parts};
use crate::owner::{OwnerService, Standing};
use crate::provider::{Provider, Providers, local::Local};
use crate::settings::Settings;

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error(
        "a coordinator runs on {} already (process {pid}); hint: `limb ps` talks to it, `limb serve --stop` ends it",
        state.display()
    )]
    AlreadyRunning { state: PathBuf, pid: String },
    #[error("could not prepare {}; hint: check that it is yours and writable", path.display())]
    State { path: PathBuf, source: std::io::Error },
    #[error(transparent)]
    Database(#[from] DatabaseError),
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    #[error(transparent)]
    Lifecycle(#[from] LifecycleError),
    #[error(transparent)]
    Ca(#[from] CaError),
    #[error(
        "could not listen for agents on {address}; hint: another program may have taken the port that running boxes know"
    )]
    Listen { address: std::net::SocketAddr, source: std::io::Error },
    #[error("could not open the owner's socket {}", path.display())]
    Socket { path: PathBuf, source: std::io::Error },
    #[error("the owner's socket failed")]
    Owner(#[source] tonic::transport::Error),
    #[error("the snapshots could not be opened")]
    Snapshots(#[from] crate::snapshot::SnapshotError),
    #[error("the results could not be recovered")]
    Results(#[source] Box<dyn std::error::Error + Send + Sync>),
}

/// Makes a home's providers from its settings.
pub type MakeProviders = Box<dyn Fn(&Settings) -> Vec<Arc<dyn Provider>> + Send + Sync>;

/// What differs between `limb` and a test's program.
pub struct Edges {
    /// The providers of this home.
    pub providers: MakeProviders,
}

impl std::fmt::Debug for Edges {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Edges")
    }
}

impl Default for Edges {
    /// The embedded default alone.
    fn default() -> Self {
        Self {
            providers: Box::new(|settings| {
                let root = settings.state_dir.join("local");
                let local = Local::new(root, settings.agent.clone()).hiding(vec![settings.state_dir.clone()]);
                vec![Arc::new(local) as Arc<dyn Provider>]
            }),
        }
    }
}

/// How this coordinator came to be.
#[derive(Clone, Debug, Default)]
pub struct ServeOptions {
    /// Who starts it again after a crash; none: nobody.
    pub supervised_by: Option<String>,
    /// A command started it: it ends after a while without work.
    pub ends_when_idle: bool,
    /// Ends it from outside, as a signal does.
    pub stop: CancellationToken,
}

/// Runs the coordinator until it is told to stop (`Shutdown`, SIGTERM, SIGINT, idle).
///
/// # Errors
/// [`ServeError`]; nothing is left half open.
pub async fn serve(settings: Settings, options: ServeOptions, edges: &Edges) -> Result<(), ServeError> {
    make_private(&settings.state_dir)?;
    let _lock = lock::take(&settings.state_dir)?;
    let state = |source| ServeError::State { path: settings.state_dir.clone(), source };
    stopped::forget(&settings.state_dir).map_err(state)?;
    let clock: Arc<dyn Clock> = Arc::new(SystemClock);
    let database = Database::open(&settings.state_dir.join("limb.db"), wiring::SCHEMAS)?;
    let ledger = Ledger::open(database.clone(), Arc::clone(&clock)).await?;
    let epoch = ledger.next_coordinator_epoch().await?;
    let ca = Arc::new(HomeCa::open_or_create(&settings.state_dir, ledger.home().clone(), clock.unix_ms())?);
    let (listener, address) = listen::agents(&ledger, settings.listen).await?;
    let data = wiring::Data::open(&settings, &database, &ledger).await?;
    let lifecycle = Lifecycle::open(Parts {
        ledger,
        secrets: SecretStore::new(settings.state_dir.join("secrets")),
        providers: Providers::new((edges.providers)(&settings)),
        outputs: data.outputs(),
        clock,
        endpoint: HomeEndpoint {
            address: settings.advertise.unwrap_or(address).to_string(),
            ca_certificate_pem: ca.certificate_pem().to_owned(),
        },
    })
    .await?;
    let stop = options.stop.clone();
    tracing::info!(home = %lifecycle.ledger().home(), epoch, %address, "coordinator is up");
    let agents = data.serve_agents(listener, ca, &lifecycle, stop.clone());
    let _agents = task::spawn("agents", {
        let stop = stop.clone();
        async move {
            if let Err(error) = agents.await {
                tracing::error!(error = limb_common::error::chain(&error), "the agents' port failed");
                // Without its port home is deaf; a supervisor starts it again.
                stop.cancel();
            }
        }
    });
    // Ctrl-C at a coordinator that nobody watches over is the owner's own stop.
    let remembered = options.supervised_by.is_none().then(|| settings.state_dir.clone());
    let _signals = task::spawn("signals", stop_on_signals(stop.clone(), remembered));
    let standing = Standing {
        address: address.to_string(),
        epoch,
        supervised_by: options.supervised_by.clone(),
        stop: stop.clone(),
    };
    let _idle =
        options.ends_when_idle.then_some(settings.idle_exit).flatten().map(|after| {
            task::spawn("idle exit", end_when_idle(Arc::clone(&lifecycle), after, stop.clone()))
        });
    let owner = OwnerService::new(Arc::clone(&lifecycle), data, settings.clone(), standing);
    let served = socket::serve(&settings.socket, owner, stop.clone()).await;
    stop.cancel();
    lifecycle.halt();
    tracing::info!("coordinator ends");
    served
}

fn make_private(dir: &std::path::Path) -> Result<(), ServeError> {
    use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
    let failed = |source| ServeError::State { path: dir.to_owned(), source };
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed)?;
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700)).map_err(failed)
}

async fn stop_on_signals(stop: CancellationToken, remembered: Option<PathBuf>) {
    use tokio::signal::unix::{SignalKind, signal};
    let (Ok(mut term), Ok(mut interrupt)) =
        (signal(SignalKind::terminate()), signal(SignalKind::interrupt()))
    else {
        tracing::error!("signals cannot be handled; SIGTERM ends this coordinator at once");
        return;
    };
    tokio::select! {
        _ = term.recv() => {}
        _ = interrupt.recv() => if let Some(state) = remembered && let Err(error) = stopped::remember(&state) {
            tracing::warn!(%error, "the next command will start a coordinator again");
        }
    }
    stop.cancel();
}

/// Counts from the last time that a run was open or a command asked for something.
async fn end_when_idle(lifecycle: Arc<Lifecycle>, after: std::time::Duration, stop: CancellationToken) {
    let mut changes = lifecycle.ledger().changes();
    loop {
        // A write of any kind starts the wait anew.
        changes.mark_unchanged();
        tokio::select! {
            changed = changes.changed() => {
                if changed.is_err() {
                    return;
                }
            }
            () = tokio::time::sleep(after) => {
                let busy = match lifecycle.ledger().runs(false).await {
                    Ok(open) => !open.is_empty(),
                    Err(_) => true,
                };
                if !busy {
                    tracing::info!("no work: the coordinator ends; the next command starts it again");
                    stop.cancel();
                    return;
                }
            }
        }
    }
}
