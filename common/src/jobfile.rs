//! The job file: what the owner wants, read once into a type that has no half-valid states.
//!
//! Every key of the format is either honoured or refused by name; an unknown key is an error
//! with its line and a suggestion. Nothing is ever ignored, because a limit that is silently
//! ignored costs money.
//!
//! Never: read the environment of this process except `HOME` for `~`, or touch the files that a
//! job names. Values that the file leaves to the submitter are bound by [`JobFile::bind`].

mod argv;
mod broken;
mod paths;
mod read;
mod sections;
mod suggest;
#[cfg(test)]
mod tests;
mod yaml;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use argv::{ArgvJob, FILE_NAME as ARGV_FILE_NAME};
pub use paths::DestTemplate;
pub use suggest::nearest;

pub use crate::assignment::{CacheSpec, Command, Durability};
use crate::class::DataClass;
use crate::secret::Secret;
use crate::units::Micros;

/// A job that says nothing ends after a day.
pub const DEFAULT_MAX_DURATION: Duration = Duration::from_secs(24 * 3600);
/// A job that says nothing costs at most 25 dollars, all attempts together.
pub const DEFAULT_MAX_COST: Micros = Micros(25_000_000);
/// Eight-GPU machines have been seen to take 25 minutes to boot.
pub const DEFAULT_BOOT_TIMEOUT: Duration = Duration::from_secs(30 * 60);
/// From SIGTERM to SIGKILL, draining included.
pub const DEFAULT_STOP_DURATION: Duration = Duration::from_secs(5 * 60);
/// A router's reboot and a provider's line reset fit inside.
pub const DEFAULT_DISCONNECT_GRACE: Duration = Duration::from_secs(20 * 60);
/// Twice the grace and a margin must fit into an agent certificate's hour.
pub const MAX_DISCONNECT_GRACE: Duration = Duration::from_secs(25 * 60);
/// Changed workdir files are brought home up to this much.
pub const WORKDIR_CHANGES_CAP_BYTES: u64 = 1 << 30;
/// A job with less could not even be put into place.
pub const LEAST_MEMORY_BYTES: u64 = 16 << 20;
/// What `retry:` means where it does not say how often.
pub const DEFAULT_RETRY_ATTEMPTS: u32 = 3;

/// What is wrong with a job file, and where.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobFileError {
    pub file: String,
    pub line: Option<u64>,
    pub message: String,
    pub hint: Option<String>,
}

impl std::fmt::Display for JobFileError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.file)?;
        if let Some(line) = self.line {
            write!(f, ":{line}")?;
        }
        write!(f, ": {}", self.message)?;
        self.hint.as_ref().map_or(Ok(()), |hint| write!(f, "; hint: {hint}"))
    }
}

impl std::error::Error for JobFileError {}

/// A whole job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobFile {
    /// Letters, digits, `.`, `_`, `-`: safe as a directory name.
    pub name: String,
    /// Copied into home's store, writable on the box, the job's cwd. None: an empty directory.
    pub workdir: Option<Source>,
    pub resources: Resources,
    /// In the order of the file.
    pub env: Vec<EnvEntry>,
    pub secrets: Vec<SecretName>,
    pub mounts: Vec<Mount>,
    pub outputs: Vec<Output>,
    /// A bash script; empty: none.
    pub setup: String,
    pub command: Command,
    pub limits: Limits,
    pub retry: Retry,
    /// What the job touches first is recorded, and read ahead when the same job runs again over the
    /// same sources (`trace: on`, the default).
    pub trace: bool,
    /// What is on the box already goes into the kernel's page cache before a sequential reader comes
    /// to it (`push: on`; off by default).
    pub push: bool,
    /// What the box may use to keep what the job has read.
    pub cache: CacheSpec,
    file: String,
}

/// A directory or file at home.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    /// Absolute.
    pub path: PathBuf,
    pub class: DataClass,
    pub links: Links,
}

/// What becomes of symlinks that leave a working set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Links {
    /// They stay links, and dangle on the box.
    #[default]
    Keep,
    /// What they point at is part of the set.
    Follow,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// Absolute, where the job sees it.
    pub path: PathBuf,
    pub source: Source,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Output {
    /// Absolute, where the job writes.
    pub path: PathBuf,
    pub dest: DestTemplate,
    pub durability: Durability,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EnvEntry {
    pub name: String,
    pub value: EnvValue,
    line: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EnvValue {
    Literal(String),
    /// `null` in the file: taken where the job is submitted.
    FromSubmitter,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SecretName {
    pub name: String,
    line: u64,
}

/// Where the job may run. Empty `infra` leaves the choice to the settings.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Resources {
    pub infra: Vec<Infra>,
    /// Per hour.
    pub max_price: Option<Micros>,
}

/// `lambda` or `lambda/us-east-1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Infra {
    pub provider: String,
    pub region: Option<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub max_duration: Duration,
    /// All attempts of the run together.
    pub max_cost: Micros,
    pub boot_timeout: Duration,
    /// From a stop to the moment when home waits no longer: half of it, at most 60 s, is between
    /// SIGTERM and SIGKILL; the rest is for what is still on its way home.
    pub stop_duration: Duration,
    /// The lease's TTL: how long the box may go on without home.
    pub disconnect_grace: Duration,
    /// What all processes of the job may have together, swap included; who takes more is killed.
    /// None: what the box has, less what limb's agent there needs.
    pub memory_bytes: Option<u64>,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_duration: DEFAULT_MAX_DURATION,
            max_cost: DEFAULT_MAX_COST,
            boot_timeout: DEFAULT_BOOT_TIMEOUT,
            stop_duration: DEFAULT_STOP_DURATION,
            disconnect_grace: DEFAULT_DISCONNECT_GRACE,
            memory_bytes: None,
        }
    }
}

/// Which ends of an attempt are worth another one. The default: none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Retry {
    pub on_events: Vec<RetryEvent>,
    /// Boxes that the run may use in all; 1: no retry.
    pub max_attempts: u32,
}

impl Default for Retry {
    fn default() -> Self {
        Self { on_events: Vec::new(), max_attempts: 1 }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RetryEvent {
    NoCapacity,
    Preemption,
    Lost,
}

impl RetryEvent {
    pub const ALL: [Self; 3] = [Self::NoCapacity, Self::Preemption, Self::Lost];

    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::NoCapacity => "no-capacity",
            Self::Preemption => "preemption",
            Self::Lost => "lost",
        }
    }
}

/// The values that the submitter gave, checked against what the file asks for.
#[derive(Clone, Debug, Default)]
pub struct BoundEnv {
    pub env: Vec<(String, String)>,
    pub secrets: Vec<(String, Secret<String>)>,
}

impl JobFile {
    /// Reads a job file. `file_name` is what errors call it; relative sources and destinations
    /// start at `base_dir`, which must be absolute.
    ///
    /// # Errors
    /// The first thing that is wrong, with its line.
    pub fn parse(text: &str, file_name: &str, base_dir: &Path) -> Result<Self, JobFileError> {
        read::read(text, &read::Place::new(file_name, base_dir), None)
    }

    /// As [`JobFile::parse`], for a file without `run:` whose command is `argv`, executed without
    /// a shell (`limb run -- CMD`).
    ///
    /// # Errors
    /// As [`JobFile::parse`]; also where `argv` is empty.
    pub fn parse_with_argv(
        text: &str,
        file_name: &str,
        base_dir: &Path,
        argv: Vec<Vec<u8>>,
    ) -> Result<Self, JobFileError> {
        read::read(text, &read::Place::new(file_name, base_dir), Some(argv))
    }

    /// Names whose values the submitter must send: `null` variables that are not secrets, and
    /// secrets.
    #[must_use]
    pub fn wanted(&self) -> Wanted<'_> {
        let is_secret = |name: &str| self.secrets.iter().any(|secret| secret.name == name);
        Wanted {
            env: self
                .env
                .iter()
                .filter(|entry| entry.value == EnvValue::FromSubmitter && !is_secret(&entry.name))
                .map(|entry| entry.name.as_str())
                .collect(),
            secrets: self.secrets.iter().map(|secret| secret.name.as_str()).collect(),
        }
    }

    /// Puts the submitter's values in. A name that is a secret never becomes an ordinary variable.
    ///
    /// # Errors
    /// Names the first value that is missing, with the line that asks for it.
    pub fn bind(
        &self,
        env: &BTreeMap<String, String>,
        secrets: &BTreeMap<String, String>,
    ) -> Result<BoundEnv, JobFileError> {
        let missing = |name: &str, line: u64, what: &str| JobFileError {
            file: self.file.clone(),
            line: (line > 0).then_some(line),
            message: format!("{what} `{name}` is not set where the job was submitted"),
            hint: Some(format!("export {name}, or give it a value in the file")),
        };
        let mut bound = BoundEnv::default();
        for secret in &self.secrets {
            let value =
                secrets.get(&secret.name).ok_or_else(|| missing(&secret.name, secret.line, "the secret"))?;
            bound.secrets.push((secret.name.clone(), Secret::new(value.clone())));
        }
        for entry in &self.env {
            let value = match &entry.value {
                EnvValue::Literal(value) => value,
                EnvValue::FromSubmitter if self.secrets.iter().any(|secret| secret.name == entry.name) => {
                    continue;
                }
                EnvValue::FromSubmitter => {
                    env.get(&entry.name).ok_or_else(|| missing(&entry.name, entry.line, "the variable"))?
                }
            };
            bound.env.push((entry.name.clone(), value.clone()));
        }
        Ok(bound)
    }

    /// The strictest class of what the job takes along.
    #[must_use]
    pub fn class(&self) -> DataClass {
        let mounts = self.mounts.iter().map(|mount| mount.source.class);
        mounts.chain(self.workdir.iter().map(|source| source.class)).max().unwrap_or(DataClass::Public)
    }

    /// What errors call the file.
    #[must_use]
    pub fn file_name(&self) -> &str {
        &self.file
    }
}

/// See [`JobFile::wanted`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wanted<'a> {
    pub env: Vec<&'a str>,
    pub secrets: Vec<&'a str>,
}
