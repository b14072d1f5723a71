//! The embedded default: a box is a `limb-agent` process on this machine, with the same settings
//! file that a rented one gets.
//!
//! Each box has a directory `<root>/<id>/` with `instance.json` (written before the process is
//! started, so that a crash in between leaves a box that is listed), `settings.json`, `agent.log`,
//! `life` and `private/` (the agent's own). The box exists as long as its directory does; it runs
//! as long as a process holds a lock on `life`. The process is in its own session and outlives
//! the coordinator.
//!
//! Never: end a process that is not the box's, look at anybody else's, remove anything through a
//! mount.

mod clean;
mod process;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::process::Child;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use limb_common::boot::HostKind;
use limb_common::clock;
use limb_common::id::InstanceId;
use limb_common::units::Micros;
use serde::{Deserialize, Serialize};

use super::{
    Capabilities, CreateRequest, ErrorClass, Instance, InstanceState, Offer, Provider, ProviderError,
    ProviderFuture,
};

/// From SIGTERM to SIGKILL: the agent's own order of destruction is bounded by 2 s.
const TERM_GRACE: Duration = Duration::from_secs(3);
/// From SIGKILL to the last process being gone.
const KILL_GRACE: Duration = Duration::from_secs(5);

#[derive(Clone, Debug)]
pub struct Local {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    root: PathBuf,
    agent: PathBuf,
    hide: Vec<PathBuf>,
    capabilities: Capabilities,
    /// Agents that this process started: they are its children, and wait to be collected.
    children: Mutex<Vec<Child>>,
}

/// What `instance.json` keeps.
#[derive(Debug, Serialize, Deserialize)]
struct Record {
    name: String,
    tags: BTreeMap<String, String>,
    created_unix_ms: u64,
}

impl Local {
    /// `root`: where the boxes live (made 0700); `agent`: the `limb-agent` binary.
    #[must_use]
    pub fn new(root: PathBuf, agent: PathBuf) -> Self {
        Self::with(root, agent, Vec::new())
    }

    fn with(root: PathBuf, agent: PathBuf, hide: Vec<PathBuf>) -> Self {
        let (capabilities, children) = (capabilities(), Mutex::default());
        Self { shared: Arc::new(Shared { root, agent, hide, capabilities, children }) }
    }

    /// Jobs do not see these directories: home's state, with its keys, secrets and ledger.
    #[must_use]
    pub fn hiding(self, hide: Vec<PathBuf>) -> Self {
        let Shared { root, agent, .. } = &*self.shared;
        Self::with(root.clone(), agent.clone(), hide)
    }

    /// The agent binary: `LIMB_AGENT` or a setting where given, else beside this program.
    #[must_use]
    pub fn find_agent(setting: Option<PathBuf>) -> PathBuf {
        setting.unwrap_or_else(|| {
            std::env::current_exe()
                .ok()
                .and_then(|exe| exe.parent().map(|dir| dir.join("limb-agent")))
                .unwrap_or_else(|| PathBuf::from("limb-agent"))
        })
    }

    #[must_use]
    pub fn root(&self) -> &Path {
        &self.shared.root
    }
}

fn capabilities() -> Capabilities {
    Capabilities {
        is_local: true,
        idempotency_key: true,
        unique_names: true,
        user_data_limit_bytes: usize::MAX,
        poweroff_stops_compute: true,
        absence_confirmations: 1,
        absence_spacing: Duration::ZERO,
        // A process is there at once or not at all.
        quarantine_interval: Duration::from_millis(200),
        quarantine: Duration::from_secs(1),
        sweep_interval: Duration::from_secs(5),
        orphan_recheck: Duration::from_secs(60),
        create_timeout: Duration::from_secs(10),
        call_timeout: Duration::from_secs(30),
        destroy_allowance: Duration::from_secs(10),
        // A try costs nothing here, and the owner may be waiting for it.
        longest_backoff: Duration::from_secs(5),
        ..Capabilities::cloud()
    }
}

impl Provider for Local {
    fn name(&self) -> &'static str {
        "local"
    }

    fn capabilities(&self) -> &Capabilities {
        &self.shared.capabilities
    }

    fn offers(&self) -> ProviderFuture<Vec<Offer>> {
        Box::pin(async { Ok(vec![Offer { name: "this machine".to_owned(), price_per_hour: Micros(0) }]) })
    }

    fn create(&self, request: CreateRequest) -> ProviderFuture<Instance> {
        let shared = Arc::clone(&self.shared);
        blocking(move || shared.create(request))
    }

    fn list(&self) -> ProviderFuture<Vec<Instance>> {
        let shared = Arc::clone(&self.shared);
        blocking(move || shared.list())
    }

    fn terminate(&self, id: &InstanceId) -> ProviderFuture<()> {
        let (shared, id) = (Arc::clone(&self.shared), id.clone());
        blocking(move || shared.terminate(&id))
    }
}

fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ProviderError> + Send + 'static,
) -> ProviderFuture<T> {
    Box::pin(async move {
        tokio::task::spawn_blocking(work)
            .await
            .unwrap_or_else(|error| Err(failed(ErrorClass::Ambiguous, "the driver stopped").because(error)))
    })
}

fn failed(class: ErrorClass, message: impl Into<String>) -> ProviderError {
    ProviderError::new("local", class, message)
}

impl Shared {
    fn create(&self, request: CreateRequest) -> Result<Instance, ProviderError> {
        let refused = |what: &str| {
            let message = format!("could not {what}");
            move |error: std::io::Error| failed(ErrorClass::Refused, message).because(error)
        };
        if !self.agent.is_file() {
            return Err(failed(
                ErrorClass::Refused,
                format!(
                    "no agent at {}; hint: put `limb-agent` beside `limb`, or set LIMB_AGENT",
                    self.agent.display()
                ),
            ));
        }
        // The intent's own name is the box's id: a second create of one intent cannot make two.
        let id = InstanceId::new(&request.name);
        let dir = self.root.join(id.as_str());
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&self.root)
            .map_err(refused("make the boxes' directory"))?;
        if dir.exists() {
            return Err(failed(ErrorClass::Ambiguous, format!("box {id} exists already")));
        }
        std::fs::DirBuilder::new().mode(0o700).create(&dir).map_err(refused("make the box's directory"))?;
        let record = Record { name: request.name, tags: request.tags, created_unix_ms: clock::unix_ms() };
        let private = dir.join("private");
        let settings = dir.join("settings.json");
        let mut boot = request.boot;
        boot.private_dir.clone_from(&private);
        boot.hide.clone_from(&self.hide);
        // This machine is the owner's, whatever the caller believes of it: nothing here powers it off.
        boot.host = HostKind::Process;
        let started = write_json(&dir.join("instance.json"), &record)
            .and_then(|()| std::fs::DirBuilder::new().mode(0o700).create(&private))
            .and_then(|()| write_json(&settings, &boot))
            .and_then(|()| process::start(&self.agent, &settings, &dir));
        match started {
            Ok(child) => self.children.lock().unwrap_or_else(PoisonError::into_inner).push(child),
            // Nothing ran, so that the answer is certain once the directory is gone.
            Err(error) => {
                return Err(match std::fs::remove_dir_all(&dir) {
                    Ok(()) => refused("start the agent")(error),
                    Err(_) => failed(ErrorClass::Ambiguous, "could not start the agent").because(error),
                });
            }
        }
        Ok(record.instance(id, InstanceState::Running))
    }

    fn list(&self) -> Result<Vec<Instance>, ProviderError> {
        let entries = match std::fs::read_dir(&self.root) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => {
                return Err(failed(ErrorClass::Retry, "could not list the boxes").because(error));
            }
        };
        self.collect_children();
        let mut boxes = Vec::new();
        for entry in entries {
            let entry = entry
                .map_err(|error| failed(ErrorClass::Retry, "could not list the boxes").because(error))?;
            let dir = entry.path();
            let (Ok(name), true) = (entry.file_name().into_string(), dir.is_dir()) else { continue };
            let state = match process::lives(&dir) {
                Ok(true) => InstanceState::Running,
                Ok(false) => InstanceState::Stopped,
                Err(error) => {
                    return Err(failed(
                        ErrorClass::Retry,
                        format!("could not tell whether box {name} lives"),
                    )
                    .because(error));
                }
            };
            // A directory whose record was cut short by a crash is a box all the same: its name
            // is the intent's.
            let record = std::fs::read(dir.join("instance.json"))
                .ok()
                .and_then(|bytes| serde_json::from_slice::<Record>(&bytes).ok())
                .unwrap_or_else(|| Record { name: name.clone(), tags: BTreeMap::new(), created_unix_ms: 0 });
            boxes.push(record.instance(InstanceId::new(name), state));
        }
        Ok(boxes)
    }

    /// Their locks went when they ended; this takes their entries out of the process table.
    fn collect_children(&self) {
        let mut children = self.children.lock().unwrap_or_else(PoisonError::into_inner);
        children.retain_mut(|child| matches!(child.try_wait(), Ok(None)));
    }

    fn terminate(&self, id: &InstanceId) -> Result<(), ProviderError> {
        if id.as_str().is_empty() || id.as_str().contains(['/', '\0']) || id.as_str().starts_with('.') {
            return Err(failed(ErrorClass::Refused, format!("{id} is not the name of a box")));
        }
        let dir = self.root.join(id.as_str());
        if !dir.exists() {
            return Ok(());
        }
        let _sealed = process::end(&dir, TERM_GRACE, KILL_GRACE)
            .map_err(|error| failed(ErrorClass::Retry, format!("box {id} does not end")).because(error))?;
        self.collect_children();
        clean::remove(&dir).map_err(|error| {
            failed(ErrorClass::Retry, format!("could not remove what box {id} left")).because(error)
        })
    }
}

impl Record {
    fn instance(self, id: InstanceId, state: InstanceState) -> Instance {
        Instance { id, name: self.name, tags: self.tags, state, created_unix_ms: Some(self.created_unix_ms) }
    }
}

/// Durable and readable by the owner alone.
fn write_json(path: &Path, value: &impl Serialize) -> std::io::Result<()> {
    use std::io::Write as _;
    let bytes = serde_json::to_vec(value).map_err(std::io::Error::other)?;
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    file.write_all(&bytes)?;
    file.sync_all()
}
