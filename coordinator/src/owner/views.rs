//! Ledger rows as the owner's commands see them.

use limb_common::assignment::WORKDIR_CHANGES;
use limb_common::id::RunId;
use limb_common::phase::{Attempt, DataOutcome, DestroyOutcome, Phase};
use limb_proto::v1 as proto;
use tonic::Status;

use super::OwnerService;
use crate::ledger::{AttemptRow, RunRow};
use crate::lifecycle::SweepReport;

impl OwnerService {
    pub(super) async fn run_info(&self, row: RunRow) -> Result<proto::RunInfo, Status> {
        let attempts = self.ledger().attempts(&row.run).await?;
        let costs = self.ledger().costs(Some(row.run.clone())).await?;
        let now = self.ledger().now_unix_ms();
        let last = attempts.last();
        let phase = last.map_or("submitted", |attempt| attempt.state.phase.name());
        let state = match (row.ended_unix_ms, &row.stop) {
            (Some(_), _) => "ended",
            (None, Some(_)) => "stopping",
            (None, None) => phase,
        };
        Ok(proto::RunInfo {
            run_id: row.run.to_string(),
            name: row.spec.name.clone(),
            state: state.to_owned(),
            attempt: last.map_or(0, |attempt| attempt.number.0),
            provider: row.spec.provider.clone(),
            instance: last
                .and_then(|attempt| attempt.instance.as_ref())
                .map(ToString::to_string)
                .unwrap_or_default(),
            submitted_unix_ms: row.submitted_unix_ms,
            ended_unix_ms: row.ended_unix_ms.unwrap_or_default(),
            phase: phase.to_owned(),
            outcome: last.map(|attempt| outcome(attempt, row.ended_unix_ms.is_some())),
            cost_micros: costs.iter().map(|cost| cost.cost(now).0).sum(),
            billed_ms: costs.iter().map(|cost| cost.billed_ms(now)).sum(),
            dests: dests(&row, last.map_or(1, |attempt| attempt.number.0)),
        })
    }

    pub(super) async fn cost_rows(
        &self,
        run: Option<RunId>,
        month: &str,
    ) -> Result<Vec<proto::CostRow>, Status> {
        let now = self.ledger().now_unix_ms();
        let rows = self.ledger().costs(run).await?;
        Ok(rows
            .into_iter()
            .filter(|row| month.is_empty() || month_of(row.started_unix_ms) == month)
            .map(|row| proto::CostRow {
                run_id: row.run.to_string(),
                name: row.name.clone(),
                attempt: row.attempt.0,
                provider: row.provider.clone(),
                offer: row.offer.clone(),
                price_micros_per_hour: row.price_per_hour.0,
                started_unix_ms: row.started_unix_ms,
                ended_unix_ms: row.ended_unix_ms.unwrap_or_default(),
                billed_ms: row.billed_ms(now),
                cost_micros: row.cost(now).0,
                open: row.ended_unix_ms.is_none(),
                outcome: row.state.job.as_ref().map(ToString::to_string).unwrap_or_default(),
            })
            .collect())
    }

    pub(super) fn reap_reply(&self, report: SweepReport) -> proto::ReapReply {
        let now = self.ledger().now_unix_ms();
        let boxes = report
            .boxes
            .into_iter()
            .map(|found| proto::ReapedBox {
                provider: found.provider,
                run_id: found.instance.attempt().map(|(run, _)| run.to_string()).unwrap_or_default(),
                age_ms: found.instance.created_unix_ms.map_or(0, |born| now.saturating_sub(born)),
                verdict: found.verdict.as_str().to_owned(),
                instance: found.instance.id.to_string(),
            })
            .collect();
        proto::ReapReply { boxes, problems: report.problems }
    }
}

/// Of the outputs that the job file names; the workdir's changes have a place of their own.
fn dests(row: &RunRow, attempt: u32) -> Vec<String> {
    use std::os::unix::ffi::OsStrExt as _;
    let spec = &row.spec;
    spec.outputs
        .iter()
        .filter(|output| output.path.as_os_str().as_bytes() != WORKDIR_CHANGES)
        .map(|output| output.dest_of(&spec.name, &row.run, attempt).display().to_string())
        .collect()
}

/// `2026-11`, by UTC.
fn month_of(unix_ms: u64) -> String {
    i64::try_from(unix_ms)
        .ok()
        .and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok())
        .map(|at| at.strftime("%Y-%m").to_string())
        .unwrap_or_default()
}

fn outcome(row: &AttemptRow, is_final: bool) -> proto::Outcome {
    let Attempt { phase, job, data, destroy, .. } = &row.state;
    let verdict = row.state.exit();
    let (files_home, bytes_home, unsaved) = match data {
        Some(DataOutcome::Home { files, bytes }) => (*files, *bytes, Vec::new()),
        Some(DataOutcome::Incomplete { files, bytes, unsaved }) => (*files, *bytes, unsaved.clone()),
        Some(DataOutcome::Nothing) | None => (0, 0, Vec::new()),
    };
    let (destroyed, at) = match destroy {
        Some(DestroyOutcome::Confirmed { at_unix_ms }) => ("confirmed", *at_unix_ms),
        Some(DestroyOutcome::NeverCreated) => ("never created", 0),
        None => ("unconfirmed", 0),
    };
    proto::Outcome {
        job: job.as_ref().map(ToString::to_string).unwrap_or_default(),
        data: data.as_ref().map(ToString::to_string).unwrap_or_default(),
        destroy: destroyed.to_owned(),
        exit_code: verdict.code,
        exit_origin: verdict.origin.to_string(),
        destroyed_unix_ms: at,
        files_home,
        bytes_home,
        unsaved,
        r#final: is_final && *phase == Phase::Closed,
    }
}
