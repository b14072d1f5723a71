//! The front desk: what the services ask the lifecycle about an agent that called. The
//! lifecycle implements it over the database; tests implement it over a map.
//!
//! Every answer is for one identity. A stale epoch, an ended attempt and an unknown run are all
//! [`DeskError::Refused`], and say nothing more.

use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::time::Duration;

use limb_common::assignment::{Assignment, Order, OutputNumber, SetNumber};
use limb_common::id::Digest;
use limb_common::identity::AgentIdentity;
use limb_common::report::Report;
use tokio::sync::watch;

use crate::snapshot::TraceKey;

#[derive(Debug, thiserror::Error)]
pub enum DeskError {
    /// Never again, whatever the reason.
    #[error("refused: {0}")]
    Refused(&'static str),
    /// Home has a problem of its own; the agent may ask again.
    #[error("home cannot answer now")]
    Unavailable(#[source] Box<dyn std::error::Error + Send + Sync>),
}

pub type Answer<T> = Pin<Box<dyn Future<Output = Result<T, DeskError>> + Send>>;

/// One enrolment as it came in.
#[derive(Clone, Debug)]
pub struct EnrolmentRequest {
    /// BLAKE3 of the token; the token itself is not kept.
    pub token_hash: Digest,
    /// BLAKE3 of the CSR's public key: the same key may ask again, another one is an alarm.
    pub key_hash: Digest,
    pub boot_id: String,
    pub agent_version: String,
}

/// What home says to a heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BeatVerdict {
    Renewed {
        ttl: Duration,
    },
    /// Over for ever.
    Refused,
}

/// Where an output of an attempt lands at home.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputHome {
    pub output: OutputNumber,
    pub dest: PathBuf,
    pub quota_bytes: Option<u64>,
    pub quota_inodes: Option<u64>,
}

pub trait Desk: Send + Sync + 'static {
    /// Spends a token. Durable before it answers.
    fn enrol(&self, request: EnrolmentRequest) -> Answer<AgentIdentity>;
    /// Is this identity (still) the live epoch of its attempt? Asked on every RPC and by timer on
    /// long streams; answered from memory.
    fn is_live(&self, who: &AgentIdentity) -> bool;
    /// `remaining` is the box's own view of its lease at the time it sent the beat.
    fn beat(&self, who: &AgentIdentity, remaining: Duration) -> Answer<BeatVerdict>;
    fn orders(&self, who: &AgentIdentity) -> Answer<watch::Receiver<Order>>;
    fn assignment(&self, who: &AgentIdentity) -> Answer<Assignment>;
    /// Durable before it answers; the same seq again is a no-op.
    fn report(&self, who: &AgentIdentity, report: Report) -> Answer<()>;
    /// The snapshot (manifest id) that a set number of this attempt stands for.
    fn set(&self, who: &AgentIdentity, set: SetNumber) -> Answer<Digest>;
    /// What accesses to a set of this attempt are recorded under; `None` where they are not.
    fn trace(&self, who: &AgentIdentity, set: SetNumber) -> Answer<Option<TraceKey>>;
    fn outputs(&self, who: &AgentIdentity) -> Answer<Vec<OutputHome>>;
}
