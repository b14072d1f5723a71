//! A provider that misbehaves on demand. Its boxes are real agents (the `local` driver's), its
//! state outlives the coordinator, and its faults are switches in a JSON file that a test may
//! change at any time.
//!
//! Under `<state>/fake/`: `script.json` (the switches), `late/` (creates that are to happen
//! later), `hidden/` (when a box may first be listed),
//! `calls.log` (one line per call).

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use limb::provider::local::Local;
use limb::provider::{
    Capabilities, CreateRequest, ErrorClass, Instance, Offer, Provider, ProviderError, ProviderFuture,
};
use limb_common::boot::BootSettings;
use limb_common::clock;
use limb_common::id::InstanceId;
use limb_common::units::Micros;
use serde::{Deserialize, Serialize};

/// The switches. Absent ones are off.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Script {
    /// The box is made, the answer is a 500.
    pub create_500_after_create: bool,
    /// The call times out at once; the box appears so many milliseconds later.
    pub create_timeout_late_ms: Option<u64>,
    pub no_capacity: bool,
    /// A new box is listed only after so long.
    pub list_lag_ms: u64,
    /// The next list is empty, whatever there is.
    pub list_empty_once: bool,
    /// So many terminates answer 500 and do nothing.
    pub terminate_500: u32,
    /// Terminates work, and say that there is no such box.
    pub terminate_says_gone: bool,
    /// A box younger than this cannot be terminated.
    pub refuse_terminate_for_ms: u64,
    pub price_micros_per_hour: u64,
    /// Read when the program starts.
    pub absence_confirmations: u32,
    pub absence_spacing_ms: u64,
    pub quarantine_interval_ms: u64,
    pub quarantine_ms: u64,
    pub sweep_interval_ms: u64,
    pub orphan_recheck_ms: u64,
    pub is_local: bool,
}

impl Default for Script {
    fn default() -> Self {
        Self {
            create_500_after_create: false,
            create_timeout_late_ms: None,
            no_capacity: false,
            list_lag_ms: 0,
            list_empty_once: false,
            terminate_500: 0,
            terminate_says_gone: false,
            refuse_terminate_for_ms: 0,
            price_micros_per_hour: 0,
            absence_confirmations: 2,
            absence_spacing_ms: 100,
            quarantine_interval_ms: 100,
            quarantine_ms: 3_000,
            sweep_interval_ms: 500,
            orphan_recheck_ms: 1_000,
            // So that tests need no label on each of their sets.
            is_local: true,
        }
    }
}

impl Script {
    /// Where the program with this state directory looks for it.
    #[must_use]
    pub fn path(state_dir: &Path) -> PathBuf {
        state_dir.join("fake/script.json")
    }

    /// Puts the switches in place, whole.
    ///
    /// # Panics
    /// When the file cannot be written.
    pub fn write(&self, state_dir: &Path) {
        let path = Self::path(state_dir);
        fs::create_dir_all(path.parent().expect("has one")).expect("a directory of ours");
        let part = path.with_extension("part");
        fs::write(&part, serde_json::to_vec_pretty(self).expect("plain data")).expect("a file of ours");
        fs::rename(part, path).expect("a file of ours");
    }
}

#[derive(Clone, Debug)]
pub struct FakeProvider {
    dir: PathBuf,
    local: Local,
    capabilities: Arc<Capabilities>,
}

/// A create that is to happen later, as it lies on disk.
#[derive(Serialize, Deserialize)]
struct Late {
    at_unix_ms: u64,
    name: String,
    tags: BTreeMap<String, String>,
    boot: BootSettings,
}

impl FakeProvider {
    #[must_use]
    pub fn new(state_dir: &Path, agent: PathBuf) -> Self {
        let dir = state_dir.join("fake");
        let local = Local::new(state_dir.join("local"), agent);
        let script = read(&dir);
        let capabilities = Capabilities {
            is_local: script.is_local,
            absence_confirmations: script.absence_confirmations,
            absence_spacing: Duration::from_millis(script.absence_spacing_ms),
            quarantine_interval: Duration::from_millis(script.quarantine_interval_ms),
            quarantine: Duration::from_millis(script.quarantine_ms),
            sweep_interval: Duration::from_millis(script.sweep_interval_ms),
            orphan_recheck: Duration::from_millis(script.orphan_recheck_ms),
            ..local.capabilities().clone()
        };
        Self { dir, local, capabilities: Arc::new(capabilities) }
    }

    fn log(&self, line: &str) {
        drop(fs::create_dir_all(&self.dir));
        let opened = fs::File::options().append(true).create(true).open(self.dir.join("calls.log"));
        if let Ok(mut file) = opened {
            drop(writeln!(file, "{line}"));
        }
    }

    fn change(&self, change: impl FnOnce(&mut Script)) {
        let mut script = read(&self.dir);
        change(&mut script);
        if let Some(state) = self.dir.parent() {
            script.write(state);
        }
    }

    /// Makes the boxes whose time has come: a create that timed out happens without its caller.
    async fn settle(&self) -> Result<(), ProviderError> {
        for path in entries(&self.dir.join("late")) {
            let Some(late) = fs::read(&path).ok().and_then(|b| serde_json::from_slice::<Late>(&b).ok())
            else {
                continue;
            };
            if clock::unix_ms() < late.at_unix_ms {
                continue;
            }
            drop(fs::remove_file(&path));
            let request = CreateRequest {
                idempotency_key: late.name.clone(),
                name: late.name,
                tags: late.tags,
                offer: Offer { name: "late".to_owned(), price_per_hour: Micros(0) },
                boot: late.boot,
            };
            self.local.create(request).await?;
        }
        Ok(())
    }

    async fn create_box(&self, request: CreateRequest) -> Result<Instance, ProviderError> {
        let script = read(&self.dir);
        // A late one says so when it is certain: a test may kill its caller at that line.
        if script.create_timeout_late_ms.is_none() {
            self.log(&format!("create {}", request.name));
        }
        if script.no_capacity {
            return Err(error(ErrorClass::NoCapacity, "none left"));
        }
        if script.list_lag_ms > 0 {
            let dir = self.dir.join("hidden");
            drop(fs::create_dir_all(&dir));
            let until = clock::unix_ms() + script.list_lag_ms;
            drop(fs::write(dir.join(&request.name), until.to_string()));
        }
        if let Some(after) = script.create_timeout_late_ms {
            let dir = self.dir.join("late");
            drop(fs::create_dir_all(&dir));
            let late = Late {
                at_unix_ms: clock::unix_ms() + after,
                name: request.name.clone(),
                tags: request.tags,
                boot: request.boot,
            };
            let text = serde_json::to_vec(&late).map_err(|e| error(ErrorClass::Retry, &e.to_string()))?;
            drop(fs::write(dir.join(&request.name), text));
            self.log(&format!("create {}", request.name));
            return Err(error(ErrorClass::Ambiguous, "timeout"));
        }
        let made = self.local.create(request).await?;
        if script.create_500_after_create {
            return Err(error(ErrorClass::Ambiguous, "500"));
        }
        Ok(made)
    }

    async fn list_boxes(&self) -> Result<Vec<Instance>, ProviderError> {
        self.settle().await?;
        let script = read(&self.dir);
        self.log("list");
        if script.list_empty_once {
            self.change(|script| script.list_empty_once = false);
            return Ok(Vec::new());
        }
        let now = clock::unix_ms();
        let hidden = |found: &Instance| {
            let until = fs::read_to_string(self.dir.join("hidden").join(&found.name)).ok();
            until.and_then(|text| text.parse::<u64>().ok()).is_some_and(|until| now < until)
        };
        Ok(self.local.list().await?.into_iter().filter(|found| !hidden(found)).collect())
    }

    async fn terminate_box(&self, id: InstanceId) -> Result<(), ProviderError> {
        self.settle().await?;
        let script = read(&self.dir);
        self.log(&format!("terminate {id}"));
        if script.terminate_500 > 0 {
            self.change(|script| script.terminate_500 -= 1);
            return Err(error(ErrorClass::Retry, "500, try again"));
        }
        let born = self.local.list().await?.into_iter().find(|found| found.id == id);
        let age =
            born.and_then(|found| found.created_unix_ms).map(|born| clock::unix_ms().saturating_sub(born));
        if age.is_some_and(|age| age < script.refuse_terminate_for_ms) {
            return Err(error(ErrorClass::Retry, "too young to be terminated"));
        }
        self.local.terminate(&id).await?;
        if script.terminate_says_gone { Err(error(ErrorClass::Refused, "no such box")) } else { Ok(()) }
    }
}

fn error(class: ErrorClass, text: &str) -> ProviderError {
    ProviderError::new("fake", class, text)
}

fn read(dir: &Path) -> Script {
    fs::read(dir.join("script.json"))
        .ok()
        .map(|bytes| serde_json::from_slice(&bytes).expect("the test's own script"))
        .unwrap_or_default()
}

fn entries(dir: &Path) -> Vec<PathBuf> {
    fs::read_dir(dir).map(|found| found.flatten().map(|entry| entry.path()).collect()).unwrap_or_default()
}

impl Provider for FakeProvider {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn offers(&self) -> ProviderFuture<Vec<Offer>> {
        let price_per_hour = Micros(read(&self.dir).price_micros_per_hour);
        Box::pin(async move { Ok(vec![Offer { name: "a fake box".to_owned(), price_per_hour }]) })
    }

    fn create(&self, request: CreateRequest) -> ProviderFuture<Instance> {
        let this = self.clone();
        Box::pin(async move { this.create_box(request).await })
    }

    fn list(&self) -> ProviderFuture<Vec<Instance>> {
        let this = self.clone();
        Box::pin(async move { this.list_boxes().await })
    }

    fn terminate(&self, id: &InstanceId) -> ProviderFuture<()> {
        let (this, id) = (self.clone(), id.clone());
        Box::pin(async move { this.terminate_box(id).await })
    }
}
