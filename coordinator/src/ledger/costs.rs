//! What boxes cost: an interval per box, opened when the provider names it and closed when the
//! provider's lists confirm it gone. An open one is flagged, never guessed.

use limb_common::id::{AttemptNumber, RunId};
use limb_common::phase::Attempt;
use limb_common::units::Micros;
use rusqlite::{Connection, params};

use super::{Ledger, LedgerError, corrupt, sql, unsql};

#[derive(Clone, Debug)]
pub struct CostRow {
    pub run: RunId,
    pub name: String,
    pub attempt: AttemptNumber,
    pub provider: String,
    pub offer: String,
    pub price_per_hour: Micros,
    pub started_unix_ms: u64,
    /// None: may still be running.
    pub ended_unix_ms: Option<u64>,
    pub state: Attempt,
}

impl CostRow {
    /// Up to its end, or up to `now` for an open one.
    #[must_use]
    pub fn billed_ms(&self, now_unix_ms: u64) -> u64 {
        self.ended_unix_ms.unwrap_or(now_unix_ms).saturating_sub(self.started_unix_ms)
    }

    #[must_use]
    pub fn cost(&self, now_unix_ms: u64) -> Micros {
        self.price_per_hour.per_hour_for(std::time::Duration::from_millis(self.billed_ms(now_unix_ms)))
    }
}

pub(super) fn open(
    connection: &Connection,
    run: &RunId,
    attempt: AttemptNumber,
    started: u64,
) -> Result<(), LedgerError> {
    connection.execute(
        "INSERT INTO costs (run, attempt, started_unix_ms) VALUES (?1, ?2, ?3) ON CONFLICT DO NOTHING",
        params![run.as_str(), attempt.0, sql(started)],
    )?;
    Ok(())
}

pub(super) fn close(
    connection: &Connection,
    run: &RunId,
    attempt: AttemptNumber,
    ended: u64,
) -> Result<(), LedgerError> {
    connection.execute(
        "UPDATE costs SET ended_unix_ms = coalesce(ended_unix_ms, ?3) WHERE run = ?1 AND attempt = ?2",
        params![run.as_str(), attempt.0, sql(ended)],
    )?;
    Ok(())
}

impl Ledger {
    /// All intervals, or one run's; oldest first.
    ///
    /// # Errors
    /// The database's.
    pub async fn costs(&self, run: Option<RunId>) -> Result<Vec<CostRow>, LedgerError> {
        self.read(move |connection| {
            let mut statement = connection.prepare_cached(
                "SELECT c.run, r.name, c.attempt, a.provider, a.offer, a.price_micros_per_hour,
                        c.started_unix_ms, c.ended_unix_ms, a.state
                 FROM costs c JOIN runs r USING (run) JOIN attempts a USING (run, attempt)
                 WHERE ?1 IS NULL OR c.run = ?1 ORDER BY c.started_unix_ms, c.attempt",
            )?;
            let mut rows = statement.query([run.as_ref().map(RunId::as_str)])?;
            let mut found = Vec::new();
            while let Some(row) = rows.next()? {
                let run: String = row.get(0)?;
                let state: String = row.get(8)?;
                found.push(CostRow {
                    run: run.parse().map_err(corrupt("run id"))?,
                    name: row.get(1)?,
                    attempt: AttemptNumber(row.get(2)?),
                    provider: row.get(3)?,
                    offer: row.get(4)?,
                    price_per_hour: Micros(unsql(row.get(5)?)),
                    started_unix_ms: unsql(row.get(6)?),
                    ended_unix_ms: row.get::<_, Option<i64>>(7)?.map(unsql),
                    state: serde_json::from_str(&state).map_err(corrupt("attempt"))?,
                });
            }
            Ok(found)
        })
        .await
    }
}
