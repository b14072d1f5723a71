//! Where boxes come from. A driver makes, lists and terminates; what a provider can and cannot do
//! is data ([`Capabilities`]), so that the lifecycle has one path for all.
//!
//! Never: retry a create, decide that a box is gone, keep the only record of one. A driver says
//! what the provider said; the ledger remembers and the reconciler decides.

pub mod local;

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use limb_common::boot::BootSettings;
use limb_common::id::{AttemptNumber, HomeId, InstanceId, RunId};
use limb_common::phase::NotStarted;
use limb_common::units::Micros;

/// Owner tag: the home whose ledger explains the box.
pub const TAG_HOME: &str = "limb-home";
/// `RUN.ATTEMPT`.
pub const TAG_RUN: &str = "limb-run";
/// Unix seconds after which anybody with the provider's key may destroy the box.
pub const TAG_DEADLINE: &str = "limb-deadline";

pub type ProviderFuture<T> = Pin<Box<dyn Future<Output = Result<T, ProviderError>> + Send>>;

/// What kind of answer an error is. Given where it is born; the lifecycle acts on nothing else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ErrorClass {
    /// The call may or may not have taken effect (timeout, 5xx, broken pipe).
    Ambiguous,
    NoCapacity,
    Quota,
    Auth,
    /// Understood and refused: asking again the same way is useless.
    Refused,
    /// It did not take effect; worth asking again.
    Retry,
}

#[derive(Debug, thiserror::Error)]
#[error("provider {provider}: {message}")]
pub struct ProviderError {
    pub provider: String,
    pub class: ErrorClass,
    pub message: String,
    #[source]
    pub source: Option<Box<dyn std::error::Error + Send + Sync>>,
}

impl ProviderError {
    #[must_use]
    pub fn new(provider: &str, class: ErrorClass, message: impl Into<String>) -> Self {
        Self { provider: provider.to_owned(), class, message: message.into(), source: None }
    }

    #[must_use]
    pub fn because(mut self, source: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        self.source = Some(source.into());
        self
    }

    /// What a create that failed like this means; none: a box may exist.
    #[must_use]
    pub fn not_started(&self) -> Option<NotStarted> {
        match self.class {
            ErrorClass::Ambiguous => None,
            ErrorClass::NoCapacity | ErrorClass::Retry => Some(NotStarted::NoCapacity),
            ErrorClass::Quota => Some(NotStarted::Quota),
            ErrorClass::Auth => Some(NotStarted::Auth),
            ErrorClass::Refused => Some(NotStarted::Refused),
        }
    }
}

/// What a provider can do, and how sure its answers are.
#[derive(Clone, Debug)]
pub struct Capabilities {
    /// The boxes are on home's own machine: no data leaves it.
    pub is_local: bool,
    pub idempotency_key: bool,
    pub unique_names: bool,
    pub ssh_key_required: bool,
    pub user_data_limit_bytes: usize,
    /// An agent that ends also ends the bill.
    pub poweroff_stops_compute: bool,
    pub disk_outlives_instance: bool,
    /// Successful lists without the box before it counts as gone, and the time between them.
    pub absence_confirmations: u32,
    pub absence_spacing: Duration,
    /// How often, and for how long, an ambiguous create is looked for.
    pub quarantine_interval: Duration,
    pub quarantine: Duration,
    /// Between two regular looks at the list; also from "unexplained" to "destroyed" at least.
    pub sweep_interval: Duration,
    pub orphan_recheck: Duration,
    /// A call that takes longer has an unknown fate.
    pub create_timeout: Duration,
    pub call_timeout: Duration,
    /// From the first terminate to the last confirmation, as it usually goes: budgeted before
    /// `max_cost` is reached.
    pub destroy_allowance: Duration,
    /// The longest time between two tries of a teardown that does not get on.
    pub longest_backoff: Duration,
}

impl Capabilities {
    /// What is prudent for a cloud: 3 lists, 30 s apart; 10 s for 11 min.
    #[must_use]
    pub fn cloud() -> Self {
        Self {
            is_local: false,
            idempotency_key: false,
            unique_names: false,
            ssh_key_required: false,
            user_data_limit_bytes: 16 * 1024,
            poweroff_stops_compute: false,
            disk_outlives_instance: false,
            absence_confirmations: 3,
            absence_spacing: Duration::from_secs(30),
            quarantine_interval: Duration::from_secs(10),
            quarantine: Duration::from_secs(11 * 60),
            sweep_interval: Duration::from_secs(60),
            orphan_recheck: Duration::from_secs(60),
            create_timeout: Duration::from_secs(60),
            call_timeout: Duration::from_secs(30),
            destroy_allowance: Duration::from_secs(300),
            longest_backoff: Duration::from_secs(5 * 60),
        }
    }
}

/// One kind of box at one price.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    pub name: String,
    pub price_per_hour: Micros,
}

/// Everything a driver needs to make a box. Names and tags are opaque.
#[derive(Clone, Debug)]
pub struct CreateRequest {
    pub name: String,
    pub tags: BTreeMap<String, String>,
    pub offer: Offer,
    /// The same for every try of one intent.
    pub idempotency_key: String,
    pub boot: BootSettings,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstanceState {
    /// Exists; may not have booted.
    Pending,
    Running,
    /// Exists and bills or holds something, but runs no more.
    Stopped,
    Terminating,
    /// Gone; some providers list such boxes for a while.
    Terminated,
}

/// A box as the provider lists it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    pub id: InstanceId,
    pub name: String,
    pub tags: BTreeMap<String, String>,
    pub state: InstanceState,
    /// By the provider's clock, where it says so.
    pub created_unix_ms: Option<u64>,
}

impl Instance {
    #[must_use]
    pub fn is_gone(&self) -> bool {
        match self.state {
            InstanceState::Terminated => true,
            InstanceState::Pending
            | InstanceState::Running
            | InstanceState::Stopped
            | InstanceState::Terminating => false,
        }
    }

    #[must_use]
    pub fn is_of(&self, home: &HomeId) -> bool {
        self.tags.get(TAG_HOME).is_some_and(|tag| tag == home.as_str())
    }

    /// The attempt that its tag names.
    #[must_use]
    pub fn attempt(&self) -> Option<(RunId, AttemptNumber)> {
        let (run, attempt) = self.tags.get(TAG_RUN)?.split_once('.')?;
        Some((run.parse().ok()?, AttemptNumber(attempt.parse().ok()?)))
    }
}

/// The tags of an attempt's box.
#[must_use]
pub fn tags(
    home: &HomeId,
    run: &RunId,
    attempt: AttemptNumber,
    deadline_unix_ms: u64,
) -> BTreeMap<String, String> {
    BTreeMap::from([
        (TAG_HOME.to_owned(), home.to_string()),
        (TAG_RUN.to_owned(), format!("{run}.{attempt}")),
        (TAG_DEADLINE.to_owned(), (deadline_unix_ms / 1_000).to_string()),
    ])
}

/// One provider. Each call is one request: no retries inside.
pub trait Provider: Send + Sync + std::fmt::Debug + 'static {
    fn name(&self) -> &str;
    fn capabilities(&self) -> &Capabilities;
    /// What it would rent now, best first.
    fn offers(&self) -> ProviderFuture<Vec<Offer>>;
    fn create(&self, request: CreateRequest) -> ProviderFuture<Instance>;
    /// Every box, also foreign ones; from the provider itself, never from a cache.
    fn list(&self) -> ProviderFuture<Vec<Instance>>;
    /// `Ok` says that the provider heard it, not that the box is gone. A box that is already
    /// gone is `Ok` too.
    fn terminate(&self, id: &InstanceId) -> ProviderFuture<()>;
}

/// The configured providers, by name.
#[derive(Clone, Debug, Default)]
pub struct Providers(BTreeMap<String, Arc<dyn Provider>>);

impl Providers {
    #[must_use]
    pub fn new(providers: impl IntoIterator<Item = Arc<dyn Provider>>) -> Self {
        Self(providers.into_iter().map(|provider| (provider.name().to_owned(), provider)).collect())
    }

    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Arc<dyn Provider>> {
        self.0.get(name)
    }

    pub fn iter(&self) -> impl Iterator<Item = &Arc<dyn Provider>> {
        self.0.values()
    }

    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}
