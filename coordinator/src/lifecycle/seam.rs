//! What the lifecycle asks of the results at home. `ResultsHome` stands behind it.

use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;

use limb_common::assignment::OutputNumber;
use limb_common::id::{AttemptNumber, Digest, RunId};
use limb_common::identity::AgentIdentity;

use crate::rpc::desk::OutputHome;

pub type OutputsError = Box<dyn std::error::Error + Send + Sync>;
pub type OutputsFuture<T> = Pin<Box<dyn Future<Output = Result<T, OutputsError>> + Send>>;

/// What is at home when nothing more will come.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Finished {
    pub files: u64,
    pub bytes: u64,
    /// Files that were cut short, kept beside their names.
    pub partial: Vec<String>,
    /// Files that arrived and are missing or changed by now.
    pub gone: Vec<String>,
}

/// A snapshot of what a lineage left at an output's destination.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lower {
    pub output: OutputNumber,
    pub manifest_id: Digest,
    pub manifest_bytes: u64,
}

/// Every call may be repeated: after a restart the lifecycle asks again.
pub trait Outputs: Send + Sync + std::fmt::Debug + 'static {
    /// No other run writes there while this one is open.
    fn lock(&self, run: &RunId, dests: Vec<PathBuf>) -> OutputsFuture<()>;
    /// The attempt may write from here on; what is there already is frozen as its lower sets.
    fn begin(&self, who: &AgentIdentity, outputs: Vec<OutputHome>) -> OutputsFuture<Vec<Lower>>;
    /// Nothing more will come from the attempt.
    fn finish(&self, run: &RunId, attempt: AttemptNumber) -> OutputsFuture<Finished>;
    /// The runs that hold a destination.
    fn locked(&self) -> OutputsFuture<Vec<RunId>>;
    /// The run is over.
    fn unlock(&self, run: &RunId) -> OutputsFuture<()>;
}
