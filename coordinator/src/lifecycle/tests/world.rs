//! The world outside: a provider whose boxes outlive every coordinator, and their agents.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use limb_common::assignment::{CacheSpec, Order};
use limb_common::class::DataClass;
use limb_common::clock::{self, BootInstant};
use limb_common::id::{AttemptNumber, Digest, HomeId, InstanceId, RunId};
use limb_common::identity::AgentIdentity;
use limb_common::report::{BoxEvent, DrainReport, EndedBy, JobEnd, JobStep, Report};
use limb_common::units::Micros;

use super::super::desk::FrontDesk;
use super::super::live::parse_digest;
use super::super::seam::{Finished, Lower, Outputs, OutputsFuture};
use crate::ledger::RunSpec;
use crate::provider::{
    Capabilities, CreateRequest, ErrorClass, Instance, InstanceState, Offer, Provider, ProviderError,
    ProviderFuture, tags,
};
use crate::rpc::desk::{BeatVerdict, Desk, EnrolmentRequest, OutputHome};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum CreateFault {
    #[default]
    None,
    NoCapacity,
    /// Made, and a 500.
    ErrorAfterCreate,
    /// A timeout at once, the box later.
    Late(Duration),
    /// Made, and no answer for ever.
    NeverAnswers,
    Slow(Duration),
}

#[derive(Debug, Default)]
pub(super) struct Script {
    pub(super) create: CreateFault,
    pub(super) list_lag: Duration,
    pub(super) list_errors: u32,
    pub(super) lists_empty_once_at_teardown: bool,
    pub(super) terminate_errors: u32,
    pub(super) terminate_says_gone: bool,
    pub(super) terminate_takes: Duration,
    pub(super) job_waits_for_stop: bool,
    pub(super) ignores_orders: bool,
    pub(super) never_enrols: bool,
    pub(super) cannot_prepare: bool,
    pub(super) silent_when_running: bool,
    pub(super) first_box_vanishes_when_running: bool,
}

#[derive(Debug)]
struct FakeBox {
    instance: Instance,
    exists_from: BootInstant,
    listed_from: BootInstant,
    gone_from: Option<BootInstant>,
    token: Option<Digest>,
    key: Digest,
    /// What its agent has done; it survives the coordinator.
    who: Option<AgentIdentity>,
    reported: u64,
}

#[derive(Debug, Default)]
struct State {
    script: Script,
    boxes: Vec<FakeBox>,
    made: usize,
    most_working: usize,
    secrets: Vec<Vec<u8>>,
    first: Option<(Digest, Digest)>,
}

#[derive(Clone, Debug)]
pub(super) struct World {
    state: Arc<Mutex<State>>,
    capabilities: Arc<Capabilities>,
}

impl World {
    pub(super) fn new() -> Self {
        let ms = Duration::from_millis;
        let capabilities = Capabilities {
            absence_confirmations: 2,
            absence_spacing: ms(10),
            quarantine_interval: ms(5),
            quarantine: ms(150),
            sweep_interval: ms(20),
            orphan_recheck: ms(40),
            create_timeout: ms(100),
            call_timeout: ms(200),
            destroy_allowance: ms(10),
            ..Capabilities::cloud()
        };
        Self { state: Arc::default(), capabilities: Arc::new(capabilities) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        let mut state = self.state.lock().unwrap();
        let now = clock::boottime();
        state.boxes.retain(|found| found.gone_from.is_none_or(|gone| now < gone));
        state
    }

    pub(super) fn set(&self, change: impl FnOnce(&mut Script)) {
        change(&mut self.lock().script);
    }

    pub(super) fn boxes(&self) -> Vec<String> {
        let now = clock::boottime();
        let state = self.lock();
        state.boxes.iter().filter(|b| b.exists_from <= now).map(|b| b.instance.id.to_string()).collect()
    }

    /// Boxes that came to exist, over all.
    pub(super) fn made(&self) -> usize {
        let now = clock::boottime();
        let state = self.lock();
        state.made - state.boxes.iter().filter(|found| found.exists_from > now).count()
    }

    pub(super) fn most_working(&self) -> usize {
        self.lock().most_working
    }

    pub(super) fn secrets_seen(&self) -> Vec<Vec<u8>> {
        self.lock().secrets.clone()
    }

    pub(super) fn enrolment_of_first_box(&self) -> (Digest, Digest) {
        self.lock().first.unwrap()
    }

    pub(super) fn put(&self, id: &str, home: &HomeId, run: &RunId) {
        let now = clock::boottime();
        self.lock().boxes.push(FakeBox {
            instance: instance(id, tags(home, run, AttemptNumber(1), 0)),
            exists_from: now,
            listed_from: now,
            gone_from: None,
            token: None,
            key: Digest::of(id.as_bytes()),
            who: None,
            reported: 0,
        });
    }

    fn make(&self, request: &CreateRequest, after: Duration) -> Instance {
        let mut state = self.lock();
        state.made += 1;
        let exists_from = clock::boottime() + after;
        let made = instance(&format!("i-{}", state.made), request.tags.clone());
        let made = Instance { name: request.name.clone(), ..made };
        let token = Digest::of(&parse_digest(&request.boot.token).unwrap().0);
        let key = Digest::of(made.id.as_str().as_bytes());
        state.first.get_or_insert((token, key));
        let listed_from = exists_from + state.script.list_lag;
        state.boxes.push(FakeBox {
            instance: made.clone(),
            exists_from,
            listed_from,
            gone_from: None,
            token: Some(token),
            key,
            who: None,
            reported: 0,
        });
        made
    }
}

fn instance(id: &str, tags: BTreeMap<String, String>) -> Instance {
    Instance {
        id: InstanceId::new(id),
        name: id.to_owned(),
        tags,
        state: InstanceState::Running,
        created_unix_ms: Some(clock::unix_ms()),
    }
}

fn error(class: ErrorClass, text: &str) -> ProviderError {
    ProviderError::new("fake", class, text)
}

impl Provider for World {
    fn name(&self) -> &'static str {
        "fake"
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn offers(&self) -> ProviderFuture<Vec<Offer>> {
        Box::pin(async { Ok(vec![Offer { name: "box".to_owned(), price_per_hour: Micros(3_600_000) }]) })
    }

    fn create(&self, request: CreateRequest) -> ProviderFuture<Instance> {
        let world = self.clone();
        Box::pin(async move {
            let fault = world.lock().script.create;
            match fault {
                CreateFault::None => Ok(world.make(&request, Duration::ZERO)),
                CreateFault::NoCapacity => Err(error(ErrorClass::NoCapacity, "none left")),
                CreateFault::ErrorAfterCreate => {
                    drop(world.make(&request, Duration::ZERO));
                    Err(error(ErrorClass::Ambiguous, "500"))
                }
                CreateFault::Late(after) => {
                    drop(world.make(&request, after));
                    Err(error(ErrorClass::Ambiguous, "timeout"))
                }
                CreateFault::NeverAnswers => {
                    drop(world.make(&request, Duration::ZERO));
                    std::future::pending().await
                }
                CreateFault::Slow(takes) => {
                    tokio::time::sleep(takes).await;
                    Ok(world.make(&request, Duration::ZERO))
                }
            }
        })
    }

    fn list(&self) -> ProviderFuture<Vec<Instance>> {
        let world = self.clone();
        Box::pin(async move {
            let now = clock::boottime();
            let mut state = world.lock();
            if state.script.list_errors > 0 {
                state.script.list_errors -= 1;
                return Err(error(ErrorClass::Retry, "503"));
            }
            let going = state.boxes.iter().any(|found| found.gone_from.is_some());
            if going && std::mem::take(&mut state.script.lists_empty_once_at_teardown) {
                return Ok(Vec::new());
            }
            Ok(state.boxes.iter().filter(|b| b.listed_from <= now).map(|b| b.instance.clone()).collect())
        })
    }

    fn terminate(&self, id: &InstanceId) -> ProviderFuture<()> {
        let (world, id) = (self.clone(), id.clone());
        Box::pin(async move {
            let mut state = world.lock();
            if state.script.terminate_errors > 0 {
                state.script.terminate_errors -= 1;
                return Err(error(ErrorClass::Retry, "500, try again"));
            }
            let mut takes = state.script.terminate_takes;
            if state.script.lists_empty_once_at_teardown {
                takes = takes.max(Duration::from_millis(40));
            }
            let says_gone = state.script.terminate_says_gone;
            for found in state.boxes.iter_mut().filter(|found| found.instance.id == id) {
                found.gone_from.get_or_insert(clock::boottime() + takes);
            }
            if says_gone { Err(error(ErrorClass::Refused, "no such box")) } else { Ok(()) }
        })
    }
}

/// An agent beats at a pace of its own: home never calls, so there is nothing that it could wait for
/// (a coordinator that has just adopted it, say, tells nobody).
const BEAT: Duration = Duration::from_millis(2);

/// Every box's agent, a step at a time, as long as there is a coordinator.
pub(super) async fn play(world: World, desk: FrontDesk) {
    loop {
        let now = clock::boottime();
        let ids: Vec<_> = {
            let mut state = world.lock();
            let working = state.boxes.iter().filter(|b| b.who.is_some() && b.reported >= 1).count();
            state.most_working = state.most_working.max(working);
            state
                .boxes
                .iter()
                .filter(|b| b.exists_from <= now && b.token.is_some())
                .map(|b| b.instance.id.clone())
                .collect()
        };
        for id in ids {
            step(&world, &desk, &id).await;
        }
        tokio::time::sleep(BEAT).await;
    }
}

async fn step(world: &World, desk: &FrontDesk, id: &InstanceId) {
    let (who, reported, token, key) = {
        let state = world.lock();
        let Some(found) = state.boxes.iter().find(|found| found.instance.id == *id) else { return };
        if state.script.never_enrols {
            return;
        }
        (found.who.clone(), found.reported, found.token.unwrap(), found.key)
    };
    let Some(who) = who else {
        let request = EnrolmentRequest {
            token_hash: token,
            key_hash: key,
            boot_id: "b".to_owned(),
            agent_version: "t".to_owned(),
        };
        if let Ok(who) = desk.enrol(request).await {
            with(world, id, |found| found.who = Some(who));
        }
        return;
    };
    if reported >= 1 && world.lock().script.silent_when_running {
        return;
    }
    if reported >= 1 && std::mem::take(&mut world.lock().script.first_box_vanishes_when_running) {
        // As a preempted box is listed by some providers.
        with(world, id, |found| found.instance.state = InstanceState::Stopped);
        with(world, id, |found| found.token = None);
        return;
    }
    if !matches!(desk.beat(&who, Duration::from_secs(1)).await, Ok(BeatVerdict::Renewed { .. })) {
        return;
    }
    let Some(event) = next_event(world, desk, &who, reported).await else { return };
    let report = Report { seq: reported + 1, box_uptime: Duration::from_secs(1), event };
    if desk.report(&who, report).await.is_ok() {
        with(world, id, |found| found.reported += 1);
    }
}

async fn next_event(world: &World, desk: &FrontDesk, who: &AgentIdentity, reported: u64) -> Option<BoxEvent> {
    let cannot_prepare = world.lock().script.cannot_prepare;
    match reported {
        0 if cannot_prepare => {
            let how = EndedBy::CouldNotStart { code: 126, why: "could not mount /data".to_owned() };
            Some(BoxEvent::JobEnded(JobEnd {
                step: JobStep::Prepare,
                how,
                oom_killed: false,
                stopped: false,
            }))
        }
        1 if cannot_prepare => {
            Some(BoxEvent::ResultsDrained(DrainReport { complete: true, ..DrainReport::default() }))
        }
        0 => {
            let assignment = desk.assignment(who).await.ok()?;
            world.lock().secrets =
                assignment.secrets.iter().map(|(_, value)| value.expose().clone()).collect();
            Some(BoxEvent::JobStarted)
        }
        1 => {
            let (waits, ignores) = {
                let state = world.lock();
                (state.script.job_waits_for_stop, state.script.ignores_orders)
            };
            let order = desk.orders(who).await.ok()?.borrow().clone();
            let stopped = !matches!(order, Order::Run);
            if waits && (!stopped || ignores) {
                return None;
            }
            let how = if waits { EndedBy::Signal(15) } else { EndedBy::Exit(7) };
            Some(BoxEvent::JobEnded(JobEnd { step: JobStep::Run, how, oom_killed: false, stopped: waits }))
        }
        2 => Some(BoxEvent::ResultsDrained(DrainReport { complete: true, ..DrainReport::default() })),
        _ => None,
    }
}

fn with(world: &World, id: &InstanceId, change: impl FnOnce(&mut FakeBox)) {
    if let Some(found) = world.lock().boxes.iter_mut().find(|found| found.instance.id == *id) {
        change(found);
    }
}

/// No outputs: what home does with them has its own tests.
#[derive(Clone, Debug, Default)]
pub(super) struct NoOutputs(pub(super) Arc<Mutex<Vec<RunId>>>);

impl Outputs for NoOutputs {
    fn lock(&self, run: &RunId, _: Vec<std::path::PathBuf>) -> OutputsFuture<()> {
        let mut held = self.0.lock().unwrap();
        if !held.contains(run) {
            held.push(run.clone());
        }
        Box::pin(async { Ok(()) })
    }

    fn begin(&self, _: &AgentIdentity, _: Vec<OutputHome>) -> OutputsFuture<Vec<Lower>> {
        Box::pin(async { Ok(Vec::new()) })
    }

    fn finish(&self, _: &RunId, _: AttemptNumber) -> OutputsFuture<Finished> {
        Box::pin(async { Ok(Finished::default()) })
    }

    fn locked(&self) -> OutputsFuture<Vec<RunId>> {
        let locked = self.0.lock().unwrap().clone();
        Box::pin(async move { Ok(locked) })
    }

    fn unlock(&self, run: &RunId) -> OutputsFuture<()> {
        self.0.lock().unwrap().retain(|held| held != run);
        Box::pin(async { Ok(()) })
    }
}

pub(super) fn spec() -> RunSpec {
    RunSpec {
        name: "test".to_owned(),
        provider: "fake".to_owned(),
        offer: "box".to_owned(),
        price_micros_per_hour: 3_600_000,
        class: DataClass::Public,
        mounts: Vec::new(),
        workdir: None,
        outputs: Vec::new(),
        env: Vec::new(),
        setup: String::new(),
        script: Some("true".to_owned()),
        argv: Vec::new(),
        workdir_changes_cap_bytes: 0,
        memory_bytes: None,
        trace: true,
        push: false,
        cache: CacheSpec::default(),
        max_duration_ms: 60_000,
        max_cost_micros: 1_000_000_000,
        boot_timeout_ms: 60_000,
        stop_duration_ms: 5_000,
        disconnect_grace_ms: 60_000,
        retry_no_capacity: false,
        retry_preemption: false,
        retry_lost: false,
        max_attempts: 1,
    }
}
