//! What home knows about runs, boxes, money and outcomes: every intent is here, committed, before
//! the effect that it announces, and every outcome after it. Recovery is reading it.
//!
//! All changes of an attempt go through [`Ledger::apply`], which is the one caller of
//! `phase::next` and runs in the database's one writer, so that they are in one order.
//!
//! Never: delete a token (a spent one is a tombstone), rewrite an outcome, keep a secret's value
//! (see [`secrets`]).

pub mod attempts;
pub mod costs;
pub mod events;
pub mod runs;
pub mod secrets;
pub mod tokens;

use std::sync::Arc;

use limb_common::clock::Clock;
use limb_common::id::{AttemptNumber, HomeId, LeaseEpoch, RunId};
use limb_common::phase::IllegalTransition;
use rusqlite::{Connection, OptionalExtension as _, Transaction};
use tokio::sync::watch;

pub use attempts::{AttemptRow, LowerRow, NewAttempt};
pub use costs::CostRow;
pub use events::EventRow;
pub use runs::{OutputRow, RunRow, RunSpec, SetRow};
pub use tokens::{Spent, TokenAlarm};

use crate::database::{Database, DatabaseError};

pub const SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS runs (
    run TEXT PRIMARY KEY,
    name TEXT NOT NULL,
    spec TEXT NOT NULL,
    submitted_unix_ms INTEGER NOT NULL,
    stop TEXT,
    ended_unix_ms INTEGER
) STRICT;
CREATE INDEX IF NOT EXISTS runs_open ON runs (ended_unix_ms);
CREATE TABLE IF NOT EXISTS attempts (
    run TEXT NOT NULL REFERENCES runs (run),
    attempt INTEGER NOT NULL,
    epoch INTEGER NOT NULL UNIQUE,
    provider TEXT NOT NULL,
    offer TEXT NOT NULL,
    price_micros_per_hour INTEGER NOT NULL,
    box_name TEXT NOT NULL UNIQUE,
    deadline_unix_ms INTEGER NOT NULL,
    intended_unix_ms INTEGER NOT NULL,
    instance TEXT,
    state TEXT NOT NULL,
    closed INTEGER NOT NULL DEFAULT 0,
    terminate_calls INTEGER NOT NULL DEFAULT 0,
    horizon TEXT,
    lowers TEXT,
    started_unix_ms INTEGER,
    PRIMARY KEY (run, attempt)
) STRICT;
CREATE INDEX IF NOT EXISTS attempts_open ON attempts (closed);
CREATE TABLE IF NOT EXISTS tokens (
    token_hash BLOB PRIMARY KEY,
    run TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    expires_unix_ms INTEGER NOT NULL,
    key_hash BLOB,
    spent_unix_ms INTEGER
) STRICT;
CREATE TABLE IF NOT EXISTS reports (
    run TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    seq INTEGER NOT NULL,
    PRIMARY KEY (run, attempt, seq)
) STRICT;
CREATE TABLE IF NOT EXISTS events (
    seq INTEGER PRIMARY KEY AUTOINCREMENT,
    run TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    at_unix_ms INTEGER NOT NULL,
    kind TEXT NOT NULL,
    text TEXT NOT NULL,
    json TEXT NOT NULL
) STRICT;
CREATE INDEX IF NOT EXISTS events_of_run ON events (run, seq);
CREATE TABLE IF NOT EXISTS costs (
    run TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    started_unix_ms INTEGER NOT NULL,
    ended_unix_ms INTEGER,
    PRIMARY KEY (run, attempt)
) STRICT;
";

#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    #[error("the ledger could not be read or written")]
    Database(#[from] DatabaseError),
    #[error(transparent)]
    Illegal(#[from] IllegalTransition),
    #[error("the ledger has no {what}")]
    Missing { what: String },
    #[error("the ledger's {what} cannot be read")]
    Corrupt { what: &'static str, source: Box<dyn std::error::Error + Send + Sync> },
    #[error("the secrets of a run could not be kept")]
    Secrets(#[source] std::io::Error),
}

impl From<rusqlite::Error> for LedgerError {
    fn from(error: rusqlite::Error) -> Self {
        Self::Database(error.into())
    }
}

/// Handle to the ledger. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Ledger {
    database: Database,
    clock: Arc<dyn Clock>,
    home: HomeId,
    /// Counts writes, so that followers of events know when to look again.
    changed: Arc<watch::Sender<u64>>,
    #[cfg(test)]
    pub(crate) crash: Option<Arc<CrashSwitch>>,
}

/// Tests: after so many more writes the process has "died": nothing gets in or out any more.
#[cfg(test)]
#[derive(Debug)]
pub(crate) struct CrashSwitch(pub(crate) std::sync::atomic::AtomicI64);

#[cfg(test)]
impl CrashSwitch {
    pub(crate) fn after(writes: i64) -> Arc<Self> {
        Arc::new(Self(std::sync::atomic::AtomicI64::new(writes)))
    }

    pub(crate) fn is_down(&self) -> bool {
        self.0.load(std::sync::atomic::Ordering::SeqCst) < 0
    }

    /// Whether this write is still within the process's life.
    fn count(&self) -> bool {
        self.0.fetch_sub(1, std::sync::atomic::Ordering::SeqCst) > 0
    }
}

impl Ledger {
    /// Takes the database, which must have [`SCHEMA`]; gives home its id at the first start.
    ///
    /// # Errors
    /// The database's.
    pub async fn open(database: Database, clock: Arc<dyn Clock>) -> Result<Self, LedgerError> {
        let home = database
            .write(|tx| {
                if let Some(known) = meta(tx, "home")? {
                    return known.parse::<HomeId>().map_err(corrupt("home id"));
                }
                let home = HomeId::random();
                set_meta(tx, "home", home.as_str())?;
                Ok(home)
            })
            .await?;
        Ok(Self {
            database,
            clock,
            home,
            changed: Arc::new(watch::Sender::new(0)),
            #[cfg(test)]
            crash: None,
        })
    }

    #[must_use]
    pub fn home(&self) -> &HomeId {
        &self.home
    }

    #[must_use]
    pub fn now_unix_ms(&self) -> u64 {
        self.clock.unix_ms()
    }

    /// Moves whenever something was written.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changed.subscribe()
    }

    /// The coordinator's own epoch: one more at each start.
    ///
    /// # Errors
    /// The database's.
    pub async fn next_coordinator_epoch(&self) -> Result<u64, LedgerError> {
        self.write(|tx| count_up(tx, "coordinator-epoch")).await
    }

    /// # Errors
    /// The database's.
    pub async fn meta(&self, key: &'static str) -> Result<Option<String>, LedgerError> {
        self.database.read(move |connection| meta(connection, key)).await
    }

    /// # Errors
    /// The database's.
    pub async fn set_meta(&self, key: &'static str, value: String) -> Result<(), LedgerError> {
        self.write(move |tx| set_meta(tx, key, &value)).await
    }

    async fn write<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Transaction<'_>) -> Result<T, LedgerError> + Send + 'static,
    ) -> Result<T, LedgerError> {
        #[cfg(test)]
        if let Some(crash) = &self.crash
            && !crash.count()
        {
            return Err(DatabaseError::Closed.into());
        }
        let value = self.database.write(work).await?;
        self.changed.send_modify(|count| *count += 1);
        Ok(value)
    }

    async fn read<T: Send + 'static>(
        &self,
        work: impl FnOnce(&Connection) -> Result<T, LedgerError> + Send + 'static,
    ) -> Result<T, LedgerError> {
        self.database.read(work).await
    }
}

fn meta(connection: &Connection, key: &str) -> Result<Option<String>, LedgerError> {
    Ok(connection.query_row("SELECT value FROM meta WHERE key = ?1", [key], |row| row.get(0)).optional()?)
}

fn set_meta(connection: &Connection, key: &str, value: &str) -> Result<(), LedgerError> {
    connection.execute(
        "INSERT INTO meta (key, value) VALUES (?1, ?2) ON CONFLICT (key) DO UPDATE SET value = ?2",
        [key, value],
    )?;
    Ok(())
}

/// A counter that never gives a number twice.
fn count_up(connection: &Connection, key: &str) -> Result<u64, LedgerError> {
    let last: u64 = match meta(connection, key)? {
        Some(text) => text.parse().map_err(corrupt("counter"))?,
        None => 0,
    };
    set_meta(connection, key, &(last + 1).to_string())?;
    Ok(last + 1)
}

fn next_lease_epoch(connection: &Connection) -> Result<LeaseEpoch, LedgerError> {
    count_up(connection, "lease-epoch").map(LeaseEpoch)
}

fn corrupt<E: std::error::Error + Send + Sync + 'static>(what: &'static str) -> impl Fn(E) -> LedgerError {
    move |source| LedgerError::Corrupt { what, source: Box::new(source) }
}

fn missing_attempt(run: &RunId, attempt: AttemptNumber) -> LedgerError {
    LedgerError::Missing { what: format!("attempt {attempt} of run {run}") }
}

/// SQLite's integers are signed; ours never need the last bit.
fn sql(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn unsql(number: i64) -> u64 {
    u64::try_from(number).unwrap_or(0)
}
