//! The record of what happened, in words for people and JSON for programs.

use limb_common::id::{AttemptNumber, RunId};
use limb_common::phase::{Attempt, Event, JobOutcome};
use limb_common::report::{BoxEvent, Report};
use limb_common::units::{show_bytes, show_duration};
use rusqlite::{Connection, params};

use super::{Ledger, LedgerError, sql, unsql};

/// Most rows that one look returns.
const PAGE: u32 = 1_000;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EventRow {
    pub seq: u64,
    pub at_unix_ms: u64,
    pub attempt: u32,
    pub kind: String,
    pub text: String,
    pub json: String,
}

pub(super) fn insert(
    connection: &Connection,
    run: &RunId,
    attempt: u32,
    now: u64,
    kind: &str,
    text: &str,
    json: &str,
) -> Result<(), LedgerError> {
    connection
        .prepare_cached(
            "INSERT INTO events (run, attempt, at_unix_ms, kind, text, json) VALUES (?1, ?2, ?3, ?4, ?5, ?6)",
        )?
        .execute(params![run.as_str(), attempt, sql(now), kind, text, json])?;
    Ok(())
}

/// What a transition is called in front of people.
pub(super) fn words(event: &Event, after: &Attempt) -> String {
    match event {
        Event::CreateAsked => "asking for a box".to_owned(),
        Event::CreateRefused { text, .. } => format!("no box: {text}"),
        Event::CreateAmbiguous { text } => {
            format!("it is not known whether a box was made ({text}); looking for it")
        }
        Event::InstanceSeen { instance } => format!("box {instance} exists"),
        Event::QuarantineEmpty => "no box appeared".to_owned(),
        Event::NodeJoined => "the box joined the mesh".to_owned(),
        Event::AgentEnrolled => "the agent enrolled".to_owned(),
        Event::SetupStarted => "setup started".to_owned(),
        Event::JobStarted => "job started".to_owned(),
        Event::JobEnded { how } => format!("job ended: {how}"),
        Event::StopAsked { cause } => cause.to_string(),
        Event::BoxLost { why, .. } => format!("box lost: {why}"),
        Event::DataSettled { outcome } => format!("data: {outcome}"),
        Event::DestroyConfirmed { .. } => match &after.job {
            Some(JobOutcome::Lost { .. }) => "box confirmed gone; how far the job came is unknown".to_owned(),
            Some(JobOutcome::Ended { .. } | JobOutcome::NeverStarted { .. }) | None => {
                "box confirmed gone".to_owned()
            }
        },
    }
}

/// A box's own report: kind, words, JSON.
pub(super) fn of_report(report: &Report) -> (&'static str, String, String) {
    let uptime_ms = u64::try_from(report.box_uptime.as_millis()).unwrap_or(u64::MAX);
    let with = |mut value: serde_json::Value| {
        value["seq"] = report.seq.into();
        value["box_uptime_ms"] = uptime_ms.into();
        value.to_string()
    };
    match &report.event {
        BoxEvent::BootPhasePassed { name, took } => (
            "boot-phase",
            format!("{name} took {}", show_duration(*took)),
            with(serde_json::json!({ "name": name, "took_ms": took.as_millis().to_string() })),
        ),
        BoxEvent::SetupStarted => {
            ("report-setup-started", "the box began setup".to_owned(), with(serde_json::json!({})))
        }
        BoxEvent::JobStarted => {
            ("report-job-started", "the box began the job".to_owned(), with(serde_json::json!({})))
        }
        BoxEvent::JobEnded(end) => {
            let outcome = JobOutcome::from(end);
            ("report-job-ended", outcome.to_string(), with(serde_json::json!({ "outcome": outcome })))
        }
        BoxEvent::ResultsDrained(drain) => (
            "results-drained",
            format!(
                "{} sent in {} published versions{}{}",
                show_bytes(drain.bytes_sent),
                drain.files_published,
                if drain.complete { "" } else { "; not everything could be saved" },
                match drain.workdir_changes_left.len() {
                    0 => String::new(),
                    left => format!("; {left} changed workdir files were not kept"),
                }
            ),
            with(serde_json::json!({
                "complete": drain.complete,
                "unsaved": drain.unsaved,
                "bytes_sent": drain.bytes_sent,
                "files_published": drain.files_published,
                "workdir_changes_left": drain.workdir_changes_left,
            })),
        ),
        BoxEvent::Noticed { kind, text } => {
            ("notice", text.clone(), with(serde_json::json!({ "kind": kind, "text": text })))
        }
    }
}

impl Ledger {
    /// Something that is worth telling and changes no phase.
    ///
    /// # Errors
    /// The database's.
    pub async fn note(
        &self,
        run: &RunId,
        attempt: AttemptNumber,
        kind: &'static str,
        text: String,
    ) -> Result<(), LedgerError> {
        let (run, now) = (run.clone(), self.now_unix_ms());
        self.write(move |tx| insert(tx, &run, attempt.0, now, kind, &text, "{}")).await
    }

    /// Events of a run after `seq`, at most a page.
    ///
    /// # Errors
    /// The database's.
    pub async fn events_after(&self, run: &RunId, seq: u64) -> Result<Vec<EventRow>, LedgerError> {
        let run = run.clone();
        self.read(move |connection| {
            let mut statement = connection.prepare_cached(
                "SELECT seq, at_unix_ms, attempt, kind, text, json FROM events
                 WHERE run = ?1 AND seq > ?2 ORDER BY seq LIMIT ?3",
            )?;
            let rows = statement.query_map(params![run.as_str(), sql(seq), PAGE], |row| {
                Ok(EventRow {
                    seq: unsql(row.get(0)?),
                    at_unix_ms: unsql(row.get(1)?),
                    attempt: row.get(2)?,
                    kind: row.get(3)?,
                    text: row.get(4)?,
                    json: row.get(5)?,
                })
            })?;
            rows.collect::<Result<_, _>>().map_err(LedgerError::from)
        })
        .await
    }

    /// What the box of an attempt said about its results at the end, if it did: the names that
    /// it could not save.
    ///
    /// # Errors
    /// The database's.
    pub async fn drained(
        &self,
        run: &RunId,
        attempt: AttemptNumber,
    ) -> Result<Option<serde_json::Value>, LedgerError> {
        let run = run.clone();
        self.read(move |connection| {
            let mut statement = connection.prepare_cached(
                "SELECT json FROM events WHERE run = ?1 AND attempt = ?2 AND kind = 'results-drained'
                 ORDER BY seq DESC LIMIT 1",
            )?;
            let mut rows = statement.query(params![run.as_str(), attempt.0])?;
            match rows.next()? {
                Some(row) => {
                    let text: String = row.get(0)?;
                    serde_json::from_str(&text).map(Some).map_err(super::corrupt("drain report"))
                }
                None => Ok(None),
            }
        })
        .await
    }
}
