//! Attempts: one row per box that was ever intended.

use limb_common::id::{AttemptNumber, Digest, InstanceId, LeaseEpoch, RunId};
use limb_common::lease::StoredHorizon;
use limb_common::phase::{self, Attempt, Event, Phase};
use limb_common::report::Report;
use rusqlite::{Connection, OptionalExtension as _, Row, Transaction, params};
use serde::{Deserialize, Serialize};

use super::{Ledger, LedgerError, corrupt, costs, events, missing_attempt, next_lease_epoch, sql, unsql};

/// What is known before the provider is asked.
#[derive(Clone, Debug)]
pub struct NewAttempt {
    pub run: RunId,
    pub provider: String,
    pub offer: String,
    pub price_micros_per_hour: u64,
    /// Opaque; unique for ever.
    pub box_name: String,
    pub deadline_unix_ms: u64,
}

#[derive(Clone, Debug)]
pub struct AttemptRow {
    pub run: RunId,
    pub number: AttemptNumber,
    pub epoch: LeaseEpoch,
    pub provider: String,
    pub offer: String,
    pub price_micros_per_hour: u64,
    pub box_name: String,
    pub deadline_unix_ms: u64,
    pub intended_unix_ms: u64,
    /// Stays after the attempt is closed.
    pub instance: Option<InstanceId>,
    pub state: Attempt,
    /// When the box existed, by the provider's clock where it has one.
    pub started_unix_ms: Option<u64>,
    pub horizon: Option<StoredHorizon>,
    /// None: not prepared yet.
    pub lowers: Option<Vec<LowerRow>>,
}

/// One output's view of what is at home already.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LowerRow {
    pub output: u32,
    pub set: u32,
    /// Hex.
    pub manifest_id: String,
    pub manifest_bytes: u64,
}

const COLUMNS: &str = "run, attempt, epoch, provider, offer, price_micros_per_hour, box_name, deadline_unix_ms, \
                       intended_unix_ms, instance, state, started_unix_ms, horizon, lowers";

fn read_row(row: &Row<'_>) -> Result<AttemptRow, LedgerError> {
    let run: String = row.get(0)?;
    let state: String = row.get(10)?;
    let horizon: Option<String> = row.get(12)?;
    let lowers: Option<String> = row.get(13)?;
    Ok(AttemptRow {
        run: run.parse().map_err(corrupt("run id"))?,
        number: AttemptNumber(row.get(1)?),
        epoch: LeaseEpoch(unsql(row.get(2)?)),
        provider: row.get(3)?,
        offer: row.get(4)?,
        price_micros_per_hour: unsql(row.get(5)?),
        box_name: row.get(6)?,
        deadline_unix_ms: unsql(row.get(7)?),
        intended_unix_ms: unsql(row.get(8)?),
        instance: row.get::<_, Option<String>>(9)?.map(InstanceId::new),
        state: serde_json::from_str(&state).map_err(corrupt("attempt"))?,
        started_unix_ms: row.get::<_, Option<i64>>(11)?.map(unsql),
        horizon: horizon.map(|text| serde_json::from_str(&text)).transpose().map_err(corrupt("horizon"))?,
        lowers: lowers.map(|text| serde_json::from_str(&text)).transpose().map_err(corrupt("lower sets"))?,
    })
}

pub(super) fn load(
    connection: &Connection,
    run: &RunId,
    attempt: AttemptNumber,
) -> Result<AttemptRow, LedgerError> {
    let mut statement = connection
        .prepare_cached(&format!("SELECT {COLUMNS} FROM attempts WHERE run = ?1 AND attempt = ?2"))?;
    let mut rows = statement.query(params![run.as_str(), attempt.0])?;
    rows.next()?.map(read_row).transpose()?.ok_or_else(|| missing_attempt(run, attempt))
}

/// The one caller of [`phase::next`]. Records the event and keeps money's interval in step.
pub(super) fn apply(
    tx: &Transaction<'_>,
    run: &RunId,
    attempt: AttemptNumber,
    event: &Event,
    now: u64,
) -> Result<Attempt, LedgerError> {
    let row = load(tx, run, attempt)?;
    let after = phase::next(&row.state, event)?;
    if after == row.state {
        return Ok(after);
    }
    let instance = after.phase.instance().or(row.instance.as_ref()).map(InstanceId::as_str);
    let state = serde_json::to_string(&after).map_err(corrupt("attempt"))?;
    tx.execute(
        "UPDATE attempts SET state = ?3, instance = ?4, closed = ?5 WHERE run = ?1 AND attempt = ?2",
        params![run.as_str(), attempt.0, state, instance, after.phase == Phase::Closed],
    )?;
    match event {
        Event::InstanceSeen { .. } => costs::open(tx, run, attempt, row.started_unix_ms.unwrap_or(now))?,
        Event::DestroyConfirmed { at_unix_ms } => costs::close(tx, run, attempt, *at_unix_ms)?,
        _ => {}
    }
    let json = serde_json::to_string(event).map_err(corrupt("event"))?;
    let text = events::words(event, &after);
    events::insert(tx, run, attempt.0, now, event.kind(), &text, &json)?;
    Ok(after)
}

impl Ledger {
    /// The intent: committed before anybody is asked for a box.
    ///
    /// # Errors
    /// The database's.
    pub async fn begin_attempt(&self, new: NewAttempt) -> Result<AttemptRow, LedgerError> {
        let now = self.now_unix_ms();
        self.write(move |tx| {
            let last: u32 = tx.query_row(
                "SELECT coalesce(max(attempt), 0) FROM attempts WHERE run = ?1",
                [new.run.as_str()],
                |row| row.get(0),
            )?;
            let number = AttemptNumber(last + 1);
            let epoch = next_lease_epoch(tx)?;
            let state = serde_json::to_string(&Attempt::default()).map_err(corrupt("attempt"))?;
            tx.execute(
                "INSERT INTO attempts (run, attempt, epoch, provider, offer, price_micros_per_hour, box_name,
                     deadline_unix_ms, intended_unix_ms, state)
                 VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
                params![
                    new.run.as_str(),
                    number.0,
                    sql(epoch.0),
                    new.provider,
                    new.offer,
                    sql(new.price_micros_per_hour),
                    new.box_name,
                    sql(new.deadline_unix_ms),
                    sql(now),
                    state
                ],
            )?;
            let text = format!("attempt {number} on {} ({})", new.provider, new.offer);
            events::insert(tx, &new.run, number.0, now, "intended", &text, "{}")?;
            load(tx, &new.run, number)
        })
        .await
    }

    /// The last thing before the provider is asked: the attempt's enrolment token (its hash) and
    /// [`Event::CreateAsked`], together.
    ///
    /// # Errors
    /// As [`Ledger::apply`].
    pub async fn create_asked(
        &self,
        run: &RunId,
        attempt: AttemptNumber,
        token_hash: Digest,
        expires_unix_ms: u64,
    ) -> Result<Attempt, LedgerError> {
        let (run, now) = (run.clone(), self.now_unix_ms());
        self.write(move |tx| {
            tx.execute(
                "INSERT INTO tokens (token_hash, run, attempt, expires_unix_ms) VALUES (?1, ?2, ?3, ?4)",
                params![token_hash.0.as_slice(), run.as_str(), attempt.0, sql(expires_unix_ms)],
            )?;
            apply(tx, &run, attempt, &Event::CreateAsked, now)
        })
        .await
    }

    /// What earlier attempts left, as this one is to see it: decided once, before the box is.
    ///
    /// # Errors
    /// The database's.
    pub async fn set_lowers(
        &self,
        run: &RunId,
        attempt: AttemptNumber,
        lowers: Vec<LowerRow>,
    ) -> Result<(), LedgerError> {
        let run = run.clone();
        let text = serde_json::to_string(&lowers).map_err(corrupt("lower sets"))?;
        self.write(move |tx| {
            tx.execute(
                "UPDATE attempts SET lowers = ?3 WHERE run = ?1 AND attempt = ?2",
                params![run.as_str(), attempt.0, text],
            )?;
            Ok(())
        })
        .await
    }

    /// # Errors
    /// [`LedgerError::Missing`], or the database's.
    pub async fn attempt(&self, run: &RunId, attempt: AttemptNumber) -> Result<AttemptRow, LedgerError> {
        let run = run.clone();
        self.read(move |connection| load(connection, &run, attempt)).await
    }

    /// In order.
    ///
    /// # Errors
    /// The database's.
    pub async fn attempts(&self, run: &RunId) -> Result<Vec<AttemptRow>, LedgerError> {
        let run = run.clone();
        self.read(move |connection| {
            let mut statement = connection
                .prepare_cached(&format!("SELECT {COLUMNS} FROM attempts WHERE run = ?1 ORDER BY attempt"))?;
            let mut rows = statement.query([run.as_str()])?;
            let mut found = Vec::new();
            while let Some(row) = rows.next()? {
                found.push(read_row(row)?);
            }
            Ok(found)
        })
        .await
    }

    /// Every attempt that is not closed.
    ///
    /// # Errors
    /// The database's.
    pub async fn open_attempts(&self) -> Result<Vec<AttemptRow>, LedgerError> {
        self.read(move |connection| {
            let mut statement = connection
                .prepare_cached(&format!("SELECT {COLUMNS} FROM attempts WHERE closed = 0 ORDER BY epoch"))?;
            let mut rows = statement.query([])?;
            let mut found = Vec::new();
            while let Some(row) = rows.next()? {
                found.push(read_row(row)?);
            }
            Ok(found)
        })
        .await
    }

    /// One event happened to an attempt.
    ///
    /// # Errors
    /// [`LedgerError::Illegal`] when it cannot have; the database's.
    pub async fn apply(
        &self,
        run: &RunId,
        attempt: AttemptNumber,
        event: Event,
    ) -> Result<Attempt, LedgerError> {
        let (run, now) = (run.clone(), self.now_unix_ms());
        self.write(move |tx| apply(tx, &run, attempt, &event, now)).await
    }

    /// The provider named the box; `started` is its own account of when.
    ///
    /// # Errors
    /// As [`Ledger::apply`].
    pub async fn instance_seen(
        &self,
        run: &RunId,
        attempt: AttemptNumber,
        instance: InstanceId,
        started_unix_ms: Option<u64>,
    ) -> Result<Attempt, LedgerError> {
        let (run, now) = (run.clone(), self.now_unix_ms());
        self.write(move |tx| {
            tx.execute(
                "UPDATE attempts SET started_unix_ms = coalesce(started_unix_ms, ?3)
                 WHERE run = ?1 AND attempt = ?2",
                params![run.as_str(), attempt.0, sql(started_unix_ms.unwrap_or(now))],
            )?;
            apply(tx, &run, attempt, &Event::InstanceSeen { instance }, now)
        })
        .await
    }

    /// A box reported something. Known sequence numbers are no-ops; `event` is what it means for
    /// the attempt's phase, if anything. `None`: it was known.
    ///
    /// # Errors
    /// The database's. A report that no longer fits the phase is recorded all the same.
    pub async fn report(
        &self,
        run: &RunId,
        attempt: AttemptNumber,
        report: Report,
        event: Option<Event>,
    ) -> Result<Option<Attempt>, LedgerError> {
        let (run, now) = (run.clone(), self.now_unix_ms());
        self.write(move |tx| {
            let fresh = tx.execute(
                "INSERT INTO reports (run, attempt, seq) VALUES (?1, ?2, ?3) ON CONFLICT DO NOTHING",
                params![run.as_str(), attempt.0, sql(report.seq)],
            )?;
            if fresh == 0 {
                return Ok(None);
            }
            let (kind, text, json) = events::of_report(&report);
            events::insert(tx, &run, attempt.0, now, kind, &text, &json)?;
            let applied = event.map(|event| apply(tx, &run, attempt, &event, now));
            match applied {
                Some(Ok(after)) => Ok(Some(after)),
                Some(Err(LedgerError::Illegal(why))) => {
                    events::insert(tx, &run, attempt.0, now, "report-out-of-place", &why.to_string(), "{}")?;
                    load(tx, &run, attempt).map(|row| Some(row.state))
                }
                Some(Err(error)) => Err(error),
                None => load(tx, &run, attempt).map(|row| Some(row.state)),
            }
        })
        .await
    }

    /// The horizon must be on disk before the grant that it covers leaves home.
    ///
    /// # Errors
    /// The database's.
    pub async fn persist_horizon(
        &self,
        run: &RunId,
        attempt: AttemptNumber,
        horizon: StoredHorizon,
    ) -> Result<(), LedgerError> {
        let run = run.clone();
        let text = serde_json::to_string(&horizon).map_err(corrupt("horizon"))?;
        self.write(move |tx| {
            tx.execute(
                "UPDATE attempts SET horizon = ?3 WHERE run = ?1 AND attempt = ?2",
                params![run.as_str(), attempt.0, text],
            )?;
            Ok(())
        })
        .await
    }

    /// A terminate call is about to go out. Returns how many went before.
    ///
    /// # Errors
    /// The database's.
    pub async fn terminate_asked(&self, run: &RunId, attempt: AttemptNumber) -> Result<u32, LedgerError> {
        let (run, now) = (run.clone(), self.now_unix_ms());
        self.write(move |tx| {
            let before: Option<u32> = tx
                .query_row(
                    "UPDATE attempts SET terminate_calls = terminate_calls + 1
                     WHERE run = ?1 AND attempt = ?2 RETURNING terminate_calls - 1",
                    params![run.as_str(), attempt.0],
                    |row| row.get(0),
                )
                .optional()?;
            let before = before.ok_or_else(|| missing_attempt(&run, attempt))?;
            if before == 0 {
                events::insert(
                    tx,
                    &run,
                    attempt.0,
                    now,
                    "terminate-asked",
                    "asked to destroy the box",
                    "{}",
                )?;
            }
            Ok(before)
        })
        .await
    }
}
