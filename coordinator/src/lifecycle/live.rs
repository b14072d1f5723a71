//! What is kept in memory of each open attempt: its lease, its orders, what it may read. Built
//! from the ledger, also after a restart.

use std::collections::HashMap;
use std::time::Duration;

use limb_common::assignment::{Order, OutputNumber};
use limb_common::clock::BootInstant;
use limb_common::id::Digest;
use limb_common::identity::AgentIdentity;
use limb_common::lease::HomeLease;
use limb_common::phase::Attempt;
use tokio::sync::watch;

use super::{Lifecycle, lock};
use crate::ledger::{AttemptRow, LowerRow, RunSpec};
use crate::rpc::desk::OutputHome;

/// Sets of what is at home already are numbered from here; the job's own from 0.
pub(super) const LOWER_SETS: u32 = 1 << 20;

/// One open attempt.
#[derive(Debug)]
pub struct Live {
    pub(super) identity: AgentIdentity,
    pub(super) ttl: Duration,
    /// None: not enrolled.
    pub(super) lease: Option<HomeLease>,
    pub(super) last_beat: Option<BootInstant>,
    /// May the agent be served?
    pub(super) serves: bool,
    pub(super) orders: watch::Sender<Order>,
    pub(super) sets: HashMap<u32, Digest>,
    /// The job's fingerprint for each set whose accesses are traced.
    pub(super) traced: HashMap<u32, Digest>,
    pub(super) outputs: Vec<OutputHome>,
    /// Since when home waits for the box's last bytes.
    pub(super) ending_since: Option<BootInstant>,
    /// Since when a box is looked for.
    pub(super) quarantined_since: Option<BootInstant>,
}

impl Lifecycle {
    /// Puts an attempt into memory, or brings what is there up to the row.
    pub(super) fn adopt(&self, spec: &RunSpec, attempt: &AttemptRow) {
        let ttl = spec.disconnect_grace();
        let key = (attempt.run.clone(), attempt.number);
        let (now, unix_ms) = (self.now(), self.parts.clock.unix_ms());
        let mut live = lock(&self.live);
        let entry = live.entry(key).or_insert_with(|| Live {
            identity: AgentIdentity {
                home: self.parts.ledger.home().clone(),
                run: attempt.run.clone(),
                attempt: attempt.number,
                epoch: attempt.epoch,
            },
            ttl,
            lease: attempt
                .horizon
                .as_ref()
                .map(|horizon| HomeLease::restored(ttl, horizon.on(now, unix_ms, &self.home_boot_id))),
            last_beat: None,
            serves: false,
            orders: watch::Sender::new(Order::Run),
            sets: HashMap::new(),
            traced: traced_of(spec),
            outputs: outputs_of(spec, attempt),
            ending_since: None,
            quarantined_since: None,
        });
        entry.sets = sets_of(spec, attempt.lowers.as_deref().unwrap_or_default());
        entry.serves = attempt.state.phase.serves_agent();
    }

    /// The attempt's box may no longer be served.
    pub(super) fn revoke(&self, attempt: &AttemptRow) {
        if let Some(live) = lock(&self.live).get_mut(&(attempt.run.clone(), attempt.number)) {
            live.serves = false;
        }
    }

    pub(super) fn forget(&self, attempt: &AttemptRow) {
        let gone = lock(&self.live).remove(&(attempt.run.clone(), attempt.number));
        drop(gone);
    }

    /// `serves` follows the phase; it never comes back once it is off.
    pub(super) fn set_serving(&self, attempt: &AttemptRow, state: &Attempt) {
        self.with_live(attempt, |live| live.serves = state.phase.serves_agent());
    }

    pub(super) fn with_live<T>(&self, attempt: &AttemptRow, work: impl FnOnce(&mut Live) -> T) -> Option<T> {
        lock(&self.live).get_mut(&(attempt.run.clone(), attempt.number)).map(work)
    }

    /// What the box is told. Level-triggered: the same order again changes nothing.
    pub(super) fn order(&self, attempt: &AttemptRow, order: Order) {
        self.with_live(attempt, |live| {
            live.orders.send_if_modified(|current| {
                // Death is final, and a stop is not taken back.
                let goes = match (&*current, &order) {
                    (Order::Die { .. }, _) | (Order::Stop { .. }, Order::Run) => false,
                    (Order::Run | Order::Stop { .. }, _) => *current != order,
                };
                if goes {
                    *current = order;
                }
                goes
            })
        });
    }
}

pub(super) fn outputs_of(spec: &RunSpec, attempt: &AttemptRow) -> Vec<OutputHome> {
    spec.outputs
        .iter()
        .map(|output| OutputHome {
            output: OutputNumber(output.output),
            dest: output.dest_of(&spec.name, &attempt.run, attempt.number.0),
            quota_bytes: None,
            quota_inodes: None,
        })
        .collect()
}

fn sets_of(spec: &RunSpec, lowers: &[LowerRow]) -> HashMap<u32, Digest> {
    let own = spec.mounts.iter().chain(&spec.workdir).map(|set| (set.set, &set.manifest_id));
    let lower = lowers.iter().map(|lower| (lower.set, &lower.manifest_id));
    own.chain(lower).filter_map(|(set, hex)| Some((set, parse_digest(hex)?))).collect()
}

fn traced_of(spec: &RunSpec) -> HashMap<u32, Digest> {
    let own = spec.mounts.iter().chain(&spec.workdir).filter(|_| spec.trace);
    own.map(|set| (set.set, spec.fingerprint(&set.path))).collect()
}

/// The hex that `Digest` prints.
pub(super) fn parse_digest(hex: &str) -> Option<Digest> {
    let bytes: Vec<u8> = (0..hex.len() / 2)
        .map(|at| hex.get(2 * at..2 * at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok()))
        .collect::<Option<_>>()?;
    <[u8; 32]>::try_from(bytes).ok().map(Digest)
}
