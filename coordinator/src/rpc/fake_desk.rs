//! A desk over a map, for tests of the services.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use limb_common::assignment::{Assignment, Order, SetNumber};
use limb_common::id::{AttemptNumber, Digest, HomeId, LeaseEpoch, RunId};
use limb_common::identity::AgentIdentity;
use limb_common::report::Report;
use tokio::sync::watch;

use super::desk::{Answer, BeatVerdict, Desk, DeskError, EnrolmentRequest, OutputHome};
use crate::snapshot::TraceKey;

/// Knows a few sets, and whether its agent lives.
pub(super) struct FakeDesk {
    sets: HashMap<SetNumber, Digest>,
    pub(super) live: AtomicBool,
}

fn refused<T: Send + 'static>() -> Answer<T> {
    Box::pin(async { Err(DeskError::Refused("not in this test")) })
}

impl Desk for FakeDesk {
    fn enrol(&self, _: EnrolmentRequest) -> Answer<AgentIdentity> {
        refused()
    }
    fn is_live(&self, _: &AgentIdentity) -> bool {
        self.live.load(Ordering::Relaxed)
    }
    fn beat(&self, _: &AgentIdentity, _: Duration) -> Answer<BeatVerdict> {
        refused()
    }
    fn orders(&self, _: &AgentIdentity) -> Answer<watch::Receiver<Order>> {
        refused()
    }
    fn assignment(&self, _: &AgentIdentity) -> Answer<Assignment> {
        refused()
    }
    fn report(&self, _: &AgentIdentity, _: Report) -> Answer<()> {
        refused()
    }
    fn set(&self, _: &AgentIdentity, set: SetNumber) -> Answer<Digest> {
        let found = self.sets.get(&set).copied().ok_or(DeskError::Refused("not yours"));
        Box::pin(async move { found })
    }
    /// The job of every set is the same; one of the number 0 is not traced.
    fn trace(&self, _: &AgentIdentity, set: SetNumber) -> Answer<Option<TraceKey>> {
        let found = self.sets.get(&set).copied().ok_or(DeskError::Refused("not yours"));
        let key = move |manifest| (set.0 > 0).then_some(TraceKey { manifest, job: Digest([1; 32]) });
        Box::pin(async move { found.map(key) })
    }
    fn outputs(&self, _: &AgentIdentity) -> Answer<Vec<OutputHome>> {
        refused()
    }
}

impl FakeDesk {
    pub(super) fn new(sets: HashMap<SetNumber, Digest>) -> Self {
        Self { sets, live: AtomicBool::new(true) }
    }
}

/// Somebody new.
pub(super) fn identity() -> AgentIdentity {
    AgentIdentity {
        home: HomeId::random(),
        run: RunId::random(),
        attempt: AttemptNumber(1),
        epoch: LeaseEpoch(1),
    }
}
