//! A front desk over a map: one attempt, one token.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use limb::rpc::desk::{Answer, BeatVerdict, Desk, DeskError, EnrolmentRequest, OutputHome};
use limb::snapshot::TraceKey;
use limb_common::assignment::{Assignment, CacheSpec, Command, Order, SetNumber};
use limb_common::id::{AttemptNumber, Digest, HomeId, LeaseEpoch, RunId};
use limb_common::identity::AgentIdentity;
use limb_common::report::{BoxEvent, Report};
use tokio::sync::watch;

pub const TOKEN: [u8; 32] = [0xa7; 32];

#[derive(Debug)]
pub struct TestDesk {
    pub who: AgentIdentity,
    pub live: AtomicBool,
    pub ttl: Duration,
    pub orders: watch::Sender<Order>,
    pub beats: watch::Sender<u64>,
    pub alarms: watch::Sender<u64>,
    pub reports: Mutex<BTreeMap<u64, BoxEvent>>,
    key: Mutex<Option<Digest>>,
    sets: HashMap<SetNumber, Digest>,
}

impl TestDesk {
    #[must_use]
    pub fn new(ttl: Duration) -> Arc<Self> {
        Self::reading(ttl, HashMap::new())
    }

    /// Past its enrolment: an agent that reads these sets.
    #[must_use]
    pub fn serving(who: AgentIdentity, sets: HashMap<SetNumber, Digest>) -> Arc<Self> {
        Arc::new(Self::of(who, Duration::ZERO, sets))
    }

    /// One attempt that has yet to enrol, and then reads these sets.
    #[must_use]
    pub fn reading(ttl: Duration, sets: HashMap<SetNumber, Digest>) -> Arc<Self> {
        Arc::new(Self::of(somebody(), ttl, sets))
    }

    fn of(who: AgentIdentity, ttl: Duration, sets: HashMap<SetNumber, Digest>) -> Self {
        Self {
            who,
            live: AtomicBool::new(true),
            ttl,
            orders: watch::Sender::new(Order::Run),
            beats: watch::Sender::new(0),
            alarms: watch::Sender::new(0),
            reports: Mutex::default(),
            key: Mutex::default(),
            sets,
        }
    }

    /// # Panics
    /// When another test thread panicked while it held the reports.
    #[must_use]
    pub fn reported(&self) -> Vec<BoxEvent> {
        self.reports.lock().expect("no holder panics").values().cloned().collect()
    }
}

fn somebody() -> AgentIdentity {
    AgentIdentity {
        home: HomeId::random(),
        run: RunId::random(),
        attempt: AttemptNumber(1),
        epoch: LeaseEpoch(9),
    }
}

fn answer<T: Send + 'static>(value: Result<T, DeskError>) -> Answer<T> {
    Box::pin(std::future::ready(value))
}

impl Desk for TestDesk {
    fn enrol(&self, request: EnrolmentRequest) -> Answer<AgentIdentity> {
        if request.token_hash != Digest::of(&TOKEN) {
            return answer(Err(DeskError::Refused("unknown token")));
        }
        let mut key = self.key.lock().expect("no holder panics");
        if *key.get_or_insert(request.key_hash) == request.key_hash {
            answer(Ok(self.who.clone()))
        } else {
            self.alarms.send_modify(|count| *count += 1);
            answer(Err(DeskError::Refused("another key")))
        }
    }

    fn is_live(&self, who: &AgentIdentity) -> bool {
        *who == self.who && self.live.load(Ordering::SeqCst)
    }

    fn beat(&self, _who: &AgentIdentity, remaining: Duration) -> Answer<BeatVerdict> {
        self.beats.send_modify(|count| *count += 1);
        answer(Ok(if remaining.is_zero() {
            BeatVerdict::Refused
        } else {
            BeatVerdict::Renewed { ttl: self.ttl }
        }))
    }

    fn orders(&self, _who: &AgentIdentity) -> Answer<watch::Receiver<Order>> {
        answer(Ok(self.orders.subscribe()))
    }

    fn assignment(&self, who: &AgentIdentity) -> Answer<Assignment> {
        answer(Ok(Assignment {
            run: who.run.clone(),
            name: "test".to_owned(),
            attempt: who.attempt,
            mounts: vec![],
            workdir: None,
            outputs: vec![],
            env: vec![],
            secrets: vec![],
            setup: String::new(),
            command: Command::Script("true".to_owned()),
            workdir_changes_cap_bytes: 0,
            memory_bytes: None,
            trace: true,
            push: false,
            cache: CacheSpec::default(),
            stop_grace: Duration::from_secs(1),
            disconnect_grace: self.ttl,
        }))
    }

    fn report(&self, _who: &AgentIdentity, report: Report) -> Answer<()> {
        self.reports.lock().expect("no holder panics").entry(report.seq).or_insert(report.event);
        answer(Ok(()))
    }

    fn set(&self, _who: &AgentIdentity, set: SetNumber) -> Answer<Digest> {
        answer(self.sets.get(&set).copied().ok_or(DeskError::Refused("no such set")))
    }

    fn trace(&self, _who: &AgentIdentity, _set: SetNumber) -> Answer<Option<TraceKey>> {
        answer(Err(DeskError::Refused("no such set")))
    }

    fn outputs(&self, _who: &AgentIdentity) -> Answer<Vec<OutputHome>> {
        answer(Ok(vec![]))
    }
}
