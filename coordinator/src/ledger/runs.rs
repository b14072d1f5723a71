//! Runs: what was submitted, and whether its end is asked for or reached.

use std::path::PathBuf;
use std::time::Duration;

use limb_common::assignment::{CacheSpec, Command, Durability};
use limb_common::class::DataClass;
use limb_common::id::{Digest, RunId};
use limb_common::phase::{Attempt, Event, StopCause};
use limb_common::units::Micros;
use rusqlite::{OptionalExtension as _, Row, params};
use serde::{Deserialize, Serialize};

use super::{Ledger, LedgerError, attempts, corrupt, events, sql, unsql};

const FINGERPRINT_CONTEXT: &str = "limb 2026 fingerprint of a job for access traces";

/// Everything that a run is to do, frozen when it was submitted. Secrets are not in here.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunSpec {
    pub name: String,
    pub provider: String,
    pub offer: String,
    /// Frozen: a later price list does not change what a run may cost.
    pub price_micros_per_hour: u64,
    pub class: DataClass,
    pub mounts: Vec<SetRow>,
    pub workdir: Option<SetRow>,
    pub outputs: Vec<OutputRow>,
    pub env: Vec<(String, String)>,
    pub setup: String,
    pub script: Option<String>,
    pub argv: Vec<Vec<u8>>,
    pub workdir_changes_cap_bytes: u64,
    /// Runs of earlier releases did not say.
    #[serde(default)]
    pub trace: bool,
    #[serde(default)]
    pub push: bool,
    #[serde(default)]
    pub cache: CacheSpec,
    pub max_duration_ms: u64,
    pub max_cost_micros: u64,
    pub boot_timeout_ms: u64,
    pub stop_duration_ms: u64,
    pub disconnect_grace_ms: u64,
    /// Runs of earlier releases had no limit.
    #[serde(default)]
    pub memory_bytes: Option<u64>,
    pub retry_no_capacity: bool,
    pub retry_preemption: bool,
    pub retry_lost: bool,
    pub max_attempts: u32,
}

/// One frozen set.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SetRow {
    pub set: u32,
    /// Empty: the working directory.
    pub path: Vec<u8>,
    /// Hex, as `b3sum` prints.
    pub manifest_id: String,
    pub manifest_bytes: u64,
    pub single_file: bool,
    pub source: PathBuf,
}

/// One output: where the job writes, and the template of where that lands.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OutputRow {
    pub output: u32,
    pub path: PathBuf,
    pub dest: PathBuf,
    pub durability: String,
}

impl OutputRow {
    /// The destination of one attempt: `{name}`, `{run}` and `{attempt}` filled in.
    #[must_use]
    pub fn dest_of(&self, name: &str, run: &RunId, attempt: u32) -> PathBuf {
        self.dest
            .components()
            .map(|component| match component.as_os_str().to_str() {
                Some(text) if text.contains('{') => PathBuf::from(
                    text.replace("{name}", name)
                        .replace("{run}", run.as_str())
                        .replace("{attempt}", &attempt.to_string()),
                ),
                Some(_) | None => PathBuf::from(component.as_os_str()),
            })
            .collect()
    }

    #[must_use]
    pub fn durability(&self) -> Durability {
        match self.durability.as_str() {
            "none" => Durability::None,
            "close" => Durability::Close,
            // The safest one where a later release wrote a word that we do not know.
            _ => Durability::Fsync,
        }
    }
}

/// The word that [`OutputRow::durability`] reads.
#[must_use]
pub fn durability_word(durability: Durability) -> &'static str {
    match durability {
        Durability::Fsync => "fsync",
        Durability::Close => "close",
        Durability::None => "none",
    }
}

impl RunSpec {
    /// What two runs have in common that touch the data mounted at `path` in the same order, as far
    /// as home can tell: `setup`, the command, the path. Neither the environment nor results.
    #[must_use]
    pub fn fingerprint(&self, path: &[u8]) -> Digest {
        let words = self.argv.iter().map(Vec::as_slice);
        let script = self.script.iter().map(String::as_bytes);
        let parts = [path, self.setup.as_bytes(), if self.script.is_some() { b"script" } else { b"argv" }];
        let mut hasher = blake3::Hasher::new_derive_key(FINGERPRINT_CONTEXT);
        for part in parts.into_iter().chain(script).chain(words) {
            hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
        }
        Digest(*hasher.finalize().as_bytes())
    }

    #[must_use]
    pub fn price(&self) -> Micros {
        Micros(self.price_micros_per_hour)
    }

    #[must_use]
    pub fn max_duration(&self) -> Duration {
        Duration::from_millis(self.max_duration_ms)
    }

    #[must_use]
    pub fn stop_duration(&self) -> Duration {
        Duration::from_millis(self.stop_duration_ms)
    }

    #[must_use]
    pub fn boot_timeout(&self) -> Duration {
        Duration::from_millis(self.boot_timeout_ms)
    }

    #[must_use]
    pub fn disconnect_grace(&self) -> Duration {
        Duration::from_millis(self.disconnect_grace_ms)
    }

    #[must_use]
    pub fn command(&self) -> Command {
        self.script.clone().map_or_else(|| Command::Argv(self.argv.clone()), Command::Script)
    }
}

#[derive(Clone, Debug)]
pub struct RunRow {
    pub run: RunId,
    pub spec: RunSpec,
    pub submitted_unix_ms: u64,
    pub stop: Option<StopCause>,
    pub ended_unix_ms: Option<u64>,
}

const COLUMNS: &str = "run, spec, submitted_unix_ms, stop, ended_unix_ms";

fn read_row(row: &Row<'_>) -> Result<RunRow, LedgerError> {
    let run: String = row.get(0)?;
    let spec: String = row.get(1)?;
    let stop: Option<String> = row.get(3)?;
    Ok(RunRow {
        run: run.parse().map_err(corrupt("run id"))?,
        spec: serde_json::from_str(&spec).map_err(corrupt("job"))?,
        submitted_unix_ms: unsql(row.get(2)?),
        stop: stop.map(|stop| serde_json::from_str(&stop)).transpose().map_err(corrupt("stop cause"))?,
        ended_unix_ms: row.get::<_, Option<i64>>(4)?.map(unsql),
    })
}

impl Ledger {
    /// The run exists from here on.
    ///
    /// # Errors
    /// The database's.
    pub async fn insert_run(&self, run: RunId, spec: RunSpec) -> Result<(), LedgerError> {
        let now = self.now_unix_ms();
        let text = serde_json::to_string(&spec).map_err(corrupt("job"))?;
        self.write(move |tx| {
            tx.execute(
                "INSERT INTO runs (run, name, spec, submitted_unix_ms) VALUES (?1, ?2, ?3, ?4)",
                params![run.as_str(), spec.name, text, sql(now)],
            )?;
            events::insert(tx, &run, 0, now, "submitted", &format!("`{}` submitted", spec.name), "{}")
        })
        .await
    }

    /// # Errors
    /// The database's, or what cannot be read.
    pub async fn run(&self, run: &RunId) -> Result<Option<RunRow>, LedgerError> {
        let run = run.clone();
        self.read(move |connection| {
            let mut statement =
                connection.prepare_cached(&format!("SELECT {COLUMNS} FROM runs WHERE run = ?1"))?;
            let mut rows = statement.query([run.as_str()])?;
            rows.next()?.map(read_row).transpose()
        })
        .await
    }

    /// Open runs, or all; newest first.
    ///
    /// # Errors
    /// The database's, or what cannot be read.
    pub async fn runs(&self, all: bool) -> Result<Vec<RunRow>, LedgerError> {
        self.read(move |connection| {
            let mut statement = connection.prepare_cached(&format!(
                "SELECT {COLUMNS} FROM runs WHERE ?1 OR ended_unix_ms IS NULL
                 ORDER BY submitted_unix_ms DESC, rowid DESC"
            ))?;
            let mut rows = statement.query([all])?;
            let mut found = Vec::new();
            while let Some(row) = rows.next()? {
                found.push(read_row(row)?);
            }
            Ok(found)
        })
        .await
    }

    /// Asks for the end of a run; the first cause stays. Reaches the open attempt in the same
    /// transaction, so that no crash can lose the one and keep the other.
    ///
    /// # Errors
    /// [`LedgerError::Missing`], or the database's.
    pub async fn stop_run(&self, run: &RunId, cause: StopCause) -> Result<Option<Attempt>, LedgerError> {
        let (run, now) = (run.clone(), self.now_unix_ms());
        self.write(move |tx| {
            let text = serde_json::to_string(&cause).map_err(corrupt("stop cause"))?;
            let changed = tx.execute(
                "UPDATE runs SET stop = ?2 WHERE run = ?1 AND stop IS NULL AND ended_unix_ms IS NULL",
                params![run.as_str(), text],
            )?;
            if changed == 0 {
                let known: Option<i64> = tx
                    .query_row("SELECT 1 FROM runs WHERE run = ?1", [run.as_str()], |row| row.get(0))
                    .optional()?;
                if known.is_none() {
                    return Err(LedgerError::Missing { what: format!("run {run}") });
                }
            }
            let open: Option<u32> = tx
                .query_row(
                    "SELECT attempt FROM attempts WHERE run = ?1 AND closed = 0",
                    [run.as_str()],
                    |row| row.get(0),
                )
                .optional()?;
            match open {
                Some(attempt) if changed > 0 => {
                    let number = limb_common::id::AttemptNumber(attempt);
                    attempts::apply(tx, &run, number, &Event::StopAsked { cause }, now).map(Some)
                }
                Some(_) | None => Ok(None),
            }
        })
        .await
    }

    /// The run is over. Once.
    ///
    /// # Errors
    /// The database's.
    pub async fn end_run(&self, run: &RunId, text: String) -> Result<(), LedgerError> {
        let (run, now) = (run.clone(), self.now_unix_ms());
        self.write(move |tx| {
            let changed = tx.execute(
                "UPDATE runs SET ended_unix_ms = ?2 WHERE run = ?1 AND ended_unix_ms IS NULL",
                params![run.as_str(), sql(now)],
            )?;
            if changed > 0 {
                let last: u32 = tx.query_row(
                    "SELECT coalesce(max(attempt), 0) FROM attempts WHERE run = ?1",
                    [run.as_str()],
                    |row| row.get(0),
                )?;
                events::insert(tx, &run, last, now, "run-ended", &text, "{}")?;
            }
            Ok(())
        })
        .await
    }
}
