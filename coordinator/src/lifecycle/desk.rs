//! The front desk over the ledger: what agents may have and what they say.
//!
//! Never: answer an identity that is not the live epoch of its attempt; answer before what must
//! be durable is.

use std::sync::Arc;
use std::time::Duration;

use limb_common::assignment::{Assignment, MountSpec, Order, OutputNumber, OutputSpec, SetNumber, SetSpec};
use limb_common::id::Digest;
use limb_common::identity::AgentIdentity;
use limb_common::lease::{HomeLease, StoredHorizon};
use limb_common::phase::{Event, JobOutcome, Phase, StopCause};
use limb_common::report::{BoxEvent, Report};
use tokio::sync::watch;

use super::live::parse_digest;
use super::{Lifecycle, LifecycleError, lock};
use crate::ledger::{AttemptRow, LowerRow, SetRow, TokenAlarm};
use crate::rpc::desk::{Answer, BeatVerdict, Desk, DeskError, EnrolmentRequest, OutputHome};
use crate::snapshot::TraceKey;

/// Most of `stop_duration` between SIGTERM and SIGKILL; see the orders of `ending`.
const STOP_GRACE: Duration = Duration::from_secs(60);

/// The lifecycle as the agent-facing services see it.
#[derive(Clone, Debug)]
pub struct FrontDesk(pub Arc<Lifecycle>);

fn unavailable(error: impl std::error::Error + Send + Sync + 'static) -> DeskError {
    DeskError::Unavailable(Box::new(error))
}

const NOT_LIVE: DeskError = DeskError::Refused("this attempt is over or unknown");

impl Desk for FrontDesk {
    fn enrol(&self, request: EnrolmentRequest) -> Answer<AgentIdentity> {
        let lifecycle = Arc::clone(&self.0);
        Box::pin(async move { lifecycle.enrol(request).await })
    }

    fn is_live(&self, who: &AgentIdentity) -> bool {
        self.0.live(who, |_| ()).is_ok()
    }

    fn beat(&self, who: &AgentIdentity, remaining: Duration) -> Answer<BeatVerdict> {
        let (lifecycle, who) = (Arc::clone(&self.0), who.clone());
        Box::pin(async move { lifecycle.beat(&who, remaining).await })
    }

    fn orders(&self, who: &AgentIdentity) -> Answer<watch::Receiver<Order>> {
        let orders = self.0.live(who, |live| live.orders.subscribe());
        Box::pin(async move { orders })
    }

    fn assignment(&self, who: &AgentIdentity) -> Answer<Assignment> {
        let (lifecycle, who) = (Arc::clone(&self.0), who.clone());
        Box::pin(async move { lifecycle.assignment(&who).await })
    }

    fn report(&self, who: &AgentIdentity, report: Report) -> Answer<()> {
        let (lifecycle, who) = (Arc::clone(&self.0), who.clone());
        Box::pin(async move { lifecycle.take_report(&who, report).await })
    }

    fn set(&self, who: &AgentIdentity, set: SetNumber) -> Answer<Digest> {
        let found = self.0.live(who, |live| live.sets.get(&set.0).copied());
        Box::pin(async move { found?.ok_or(DeskError::Refused("no such set")) })
    }

    fn trace(&self, who: &AgentIdentity, set: SetNumber) -> Answer<Option<TraceKey>> {
        let found = self.0.live(who, |live| {
            let manifest = live.sets.get(&set.0).copied().ok_or(DeskError::Refused("no such set"))?;
            Ok(live.traced.get(&set.0).map(|&job| TraceKey { manifest, job }))
        });
        Box::pin(async move { found? })
    }

    fn outputs(&self, who: &AgentIdentity) -> Answer<Vec<OutputHome>> {
        let outputs = self.0.live(who, |live| live.outputs.clone());
        Box::pin(async move { outputs })
    }
}

impl Lifecycle {
    /// The live attempt of this identity, if it may be served.
    fn live<T>(&self, who: &AgentIdentity, work: impl FnOnce(&mut super::Live) -> T) -> Result<T, DeskError> {
        lock(&self.live)
            .get_mut(&(who.run.clone(), who.attempt))
            .filter(|live| live.serves && live.identity == *who)
            .map(work)
            .ok_or(NOT_LIVE)
    }

    async fn enrol(&self, request: EnrolmentRequest) -> Result<AgentIdentity, DeskError> {
        let spent =
            self.parts.ledger.spend_token(request.token_hash, request.key_hash).await.map_err(unavailable)?;
        let spent = match spent {
            Ok(spent) => spent,
            Err(TokenAlarm::Unknown | TokenAlarm::Expired) => {
                return Err(DeskError::Refused("this token is not good"));
            }
            Err(TokenAlarm::OtherKey { run, attempt }) => {
                let text = "a second key tried the enrolment token of this box".to_owned();
                self.parts.ledger.note(&run, attempt, "alarm", text).await.map_err(unavailable)?;
                self.alarm(&run, attempt).await.map_err(unavailable)?;
                return Err(DeskError::Refused("this token is not good"));
            }
        };
        let attempt = spent.attempt;
        let who = self.with_live(&attempt, |live| live.identity.clone()).ok_or(NOT_LIVE)?;
        match &attempt.state.phase {
            Phase::Booting { .. } | Phase::Joined { .. } => {}
            // The box is quicker than the provider's answer; its agent asks again.
            Phase::Intended | Phase::Creating { .. } => {
                return Err(unavailable(std::io::Error::other("the box is not known yet")));
            }
            Phase::Enrolled { .. }
            | Phase::SettingUp { .. }
            | Phase::Running { .. }
            | Phase::Ending { .. }
                if spent.again =>
            {
                return Ok(who);
            }
            Phase::Enrolled { .. }
            | Phase::SettingUp { .. }
            | Phase::Running { .. }
            | Phase::Ending { .. }
            | Phase::Destroying { .. }
            | Phase::Closed => return Err(NOT_LIVE),
        }
        self.first_grant(&attempt).await.map_err(unavailable)?;
        let after = self.apply(&attempt, Event::AgentEnrolled).await.map_err(unavailable)?;
        self.set_serving(&attempt, &after);
        Ok(who)
    }

    /// Whoever holds a second key gets nothing, and the first one no longer either.
    async fn alarm(
        &self,
        run: &limb_common::id::RunId,
        attempt: limb_common::id::AttemptNumber,
    ) -> Result<(), LifecycleError> {
        let row = self.parts.ledger.attempt(run, attempt).await?;
        self.revoke(&row);
        self.stop(run, StopCause::TokenReused).await
    }

    async fn first_grant(&self, attempt: &AttemptRow) -> Result<(), LifecycleError> {
        let now = self.now();
        let granted = self.with_live(attempt, |live| HomeLease::granted(now, live.ttl));
        let Some(lease) = granted else { return Ok(()) };
        let lease = self.persist_grant(attempt, lease).await?;
        self.with_live(attempt, |live| {
            live.lease = Some(lease);
            live.last_beat = Some(now);
        });
        Ok(())
    }

    async fn persist_grant(
        &self,
        attempt: &AttemptRow,
        lease: HomeLease,
    ) -> Result<HomeLease, LifecycleError> {
        let Some(horizon) = lease.due_horizon() else { return Ok(lease) };
        let stored = StoredHorizon::new(horizon, self.now(), self.parts.clock.unix_ms(), &self.home_boot_id);
        self.parts.ledger.persist_horizon(&attempt.run, attempt.number, stored).await?;
        Ok(lease.persisted(horizon))
    }

    async fn beat(&self, who: &AgentIdentity, remaining: Duration) -> Result<BeatVerdict, DeskError> {
        let now = self.now();
        let Ok(Some(lease)) = self.live(who, |live| live.lease) else { return Ok(BeatVerdict::Refused) };
        let Ok(renewed) = lease.renew(now, remaining) else { return Ok(BeatVerdict::Refused) };
        let renewed = match renewed.due_horizon() {
            None => renewed,
            Some(_) => {
                let row = self.parts.ledger.attempt(&who.run, who.attempt).await.map_err(unavailable)?;
                self.persist_grant(&row, renewed).await.map_err(unavailable)?
            }
        };
        // The attempt may have ended while the disk was asked.
        let stored = self.live(who, |live| {
            live.lease = Some(renewed);
            live.last_beat = Some(now);
        });
        Ok(match stored {
            Ok(()) => BeatVerdict::Renewed { ttl: renewed.ttl() },
            Err(_) => BeatVerdict::Refused,
        })
    }

    async fn assignment(&self, who: &AgentIdentity) -> Result<Assignment, DeskError> {
        self.live(who, |_| ())?;
        let row = self.parts.ledger.run(&who.run).await.map_err(unavailable)?.ok_or(NOT_LIVE)?;
        let attempt = self.parts.ledger.attempt(&who.run, who.attempt).await.map_err(unavailable)?;
        let secrets = self.parts.secrets.load(&who.run).map_err(unavailable)?;
        let spec = row.spec;
        let lowers = attempt.lowers.unwrap_or_default();
        Ok(Assignment {
            run: who.run.clone(),
            name: spec.name.clone(),
            attempt: who.attempt,
            mounts: spec
                .mounts
                .iter()
                .filter_map(|set| {
                    Some(MountSpec {
                        set: set_spec(set)?,
                        path: set.path.clone(),
                        single_file: set.single_file,
                    })
                })
                .collect(),
            workdir: spec.workdir.as_ref().and_then(set_spec),
            outputs: spec
                .outputs
                .iter()
                .map(|output| OutputSpec {
                    output: OutputNumber(output.output),
                    path: {
                        use std::os::unix::ffi::OsStrExt as _;
                        output.path.as_os_str().as_bytes().to_vec()
                    },
                    durability: output.durability(),
                    lower: lowers.iter().find(|lower| lower.output == output.output).and_then(lower_spec),
                    quota_bytes: None,
                    quota_inodes: None,
                })
                .collect(),
            env: spec.env.iter().map(|(name, value)| (name.clone().into(), value.clone().into())).collect(),
            secrets,
            setup: spec.setup.clone(),
            command: spec.command(),
            workdir_changes_cap_bytes: spec.workdir_changes_cap_bytes,
            memory_bytes: spec.memory_bytes,
            trace: spec.trace,
            push: spec.push,
            cache: spec.cache.clone(),
            stop_grace: (spec.stop_duration() / 2).min(STOP_GRACE),
            disconnect_grace: spec.disconnect_grace(),
        })
    }

    async fn take_report(&self, who: &AgentIdentity, report: Report) -> Result<(), DeskError> {
        self.live(who, |_| ())?;
        let event = match &report.event {
            BoxEvent::SetupStarted => Some(Event::SetupStarted),
            BoxEvent::JobStarted => Some(Event::JobStarted),
            BoxEvent::JobEnded(end) => Some(Event::JobEnded { how: JobOutcome::from(end) }),
            BoxEvent::BootPhasePassed { .. } | BoxEvent::ResultsDrained(_) | BoxEvent::Noticed { .. } => None,
        };
        self.parts.ledger.report(&who.run, who.attempt, report, event).await.map_err(unavailable)?;
        self.wake(&who.run);
        Ok(())
    }
}

fn set_spec(row: &SetRow) -> Option<SetSpec> {
    Some(SetSpec {
        set: SetNumber(row.set),
        manifest_id: parse_digest(&row.manifest_id)?,
        manifest_bytes: row.manifest_bytes,
    })
}

fn lower_spec(row: &LowerRow) -> Option<SetSpec> {
    Some(SetSpec {
        set: SetNumber(row.set),
        manifest_id: parse_digest(&row.manifest_id)?,
        manifest_bytes: row.manifest_bytes,
    })
}
