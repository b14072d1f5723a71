//! Messages as people read them: pure functions, so that each screen is a snapshot in a test.
//!
//! Every text that a box, a provider or a job file had a hand in goes through [`clean`].

use std::time::Duration;

use comfy_table::{CellAlignment, ContentArrangement, Table, presets};
use limb_common::phase::NO_LONGER_HOME;
use limb_common::units::{Micros, show_bytes, show_duration};
use limb_proto::v1::{CostRow, Outcome, PlanReply, ReapedBox, ResultFile, RunInfo};

use super::results::checkpoints::{self, OfOutput};
use super::talk::clean;

/// What the ending says where a job ended by its own code.
const JOB_ORIGIN: &str = "job";

pub(super) fn money(micros: u64) -> String {
    Micros(micros).to_string()
}

pub(super) fn duration(ms: u64) -> String {
    show_duration(Duration::from_millis(ms))
}

/// `2026-11-30 19:20:33`, in the owner's zone.
pub(super) fn moment(unix_ms: u64, zone: &jiff::tz::TimeZone) -> String {
    let at = i64::try_from(unix_ms).ok().and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok());
    at.filter(|_| unix_ms > 0).map_or_else(String::new, |at| {
        at.to_zoned_datetime(zone.clone()).strftime("%Y-%m-%d %H:%M:%S").to_string()
    })
}

pub(super) fn files(count: u64) -> String {
    if count == 1 { "1 file".to_owned() } else { format!("{count} files") }
}

fn table(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>, right: &[usize]) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_content_arrangement(ContentArrangement::Disabled);
    table.set_header(header.iter().copied());
    table.add_rows(rows);
    for (at, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, 2));
        if right.contains(&at) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt()
}

/// What is said before anything is started.
pub(super) fn plan(plan: &PlanReply) -> String {
    let mut lines = vec![format!("Plan for {}", clean(&plan.name))];
    for set in &plan.sets {
        lines.push(format!(
            "  reads   {}  ← {}  ({}, {}, {})",
            clean(&set.path),
            clean(&set.source),
            files(set.files),
            show_bytes(set.bytes),
            clean(&set.class)
        ));
        if let Some(first) = set.outside_links.first() {
            let more = set.outside_links.len() - 1;
            let others = if more == 0 { String::new() } else { format!(" and {more} more") };
            lines.push(format!(
                "          {}{others} lead out of the set and will dangle; hint: `links: follow`",
                clean(first)
            ));
        }
    }
    for output in &plan.outputs {
        lines.push(format!(
            "  writes  {}  → {}  (durability: {})",
            clean(&output.path),
            clean(&output.dest),
            clean(&output.durability)
        ));
    }
    let offer = if plan.offer.is_empty() { String::new() } else { format!(", {}", clean(&plan.offer)) };
    lines.push(format!(
        "  runs    {}{offer}, {}/h, for at most {}",
        clean(&plan.provider),
        money(plan.price_micros_per_hour),
        duration(plan.max_duration_ms)
    ));
    lines.push(if plan.at_most_micros == 0 {
        "  costs   nothing: $0.00".to_owned()
    } else {
        format!("  costs   at most {} (as long as home or a reaper is alive)", money(plan.at_most_micros))
    });
    if !plan.verdict.is_empty() {
        let word = if plan.allowed { "allowed" } else { "REFUSED" };
        lines.push(format!("  data    {word}: {}", clean(&plan.verdict)));
    }
    lines.extend(plan.warnings.iter().map(|warning| format!("  warning: {}", clean(warning))));
    lines.join("\n")
}

/// What the three lines need to know.
#[derive(Debug)]
pub(super) struct Ending<'a> {
    pub(super) run: &'a RunInfo,
    pub(super) outcome: &'a Outcome,
}

/// The three lines that a run ends with, and a fourth where the exit code is not the job's.
pub(super) fn ending(ending: &Ending<'_>, zone: &jiff::tz::TimeZone) -> Vec<String> {
    let Ending { run, outcome } = ending;
    let took = match (run.billed_ms, run.ended_unix_ms.saturating_sub(run.submitted_unix_ms)) {
        (0, wall) => wall,
        (billed, _) => billed,
    };
    let mut lines = vec![
        format!("job {} · {}", or_unknown(&outcome.job), duration(took)),
        data_line(outcome, &run.dests),
    ];
    lines.extend(unsaved_lines(outcome));
    lines.push(box_line(run, outcome, zone));
    if outcome.exit_origin != JOB_ORIGIN {
        lines.push(format!("exit {}: {}", outcome.exit_code, or_unknown(&outcome.exit_origin)));
    }
    lines
}

fn or_unknown(text: &str) -> String {
    if text.is_empty() { "unknown".to_owned() } else { clean(text) }
}

fn data_line(outcome: &Outcome, dests: &[String]) -> String {
    let to = match dests {
        [] => String::new(),
        [one] => format!(" → {}", clean(one)),
        [first, rest @ ..] => format!(" → {} and {} more", clean(first), rest.len()),
    };
    let amount = format!("{}, {}", files(outcome.files_home), show_bytes(outcome.bytes_home));
    match outcome.data.as_str() {
        "home" if outcome.files_home == 0 => "data home: no files were written".to_owned(),
        "home" => format!("data home: {amount}, verified{to}"),
        "nothing" => "data home: there was nothing to bring".to_owned(),
        "incomplete" => format!("data NOT all home: {amount} are, verified{to}"),
        "" => "data: NOT confirmed home".to_owned(),
        other => format!("data: {}", clean(other)),
    }
}

/// A page of names; the ledger has them all.
const UNSAVED_SHOWN: usize = 20;

fn unsaved_lines(outcome: &Outcome) -> Vec<String> {
    let mut lines: Vec<String> = outcome
        .unsaved
        .iter()
        .take(UNSAVED_SHOWN)
        .map(|name| match name.strip_prefix(NO_LONGER_HOME) {
            Some(_) => format!("  {}", clean(name)),
            None => format!("  not saved: {}", clean(name)),
        })
        .collect();
    if outcome.unsaved.len() > UNSAVED_SHOWN {
        lines.push(format!("  not saved: {} more", outcome.unsaved.len() - UNSAVED_SHOWN));
    }
    lines
}

fn box_line(run: &RunInfo, outcome: &Outcome, zone: &jiff::tz::TimeZone) -> String {
    let cost = money(run.cost_micros);
    match outcome.destroy.as_str() {
        "confirmed" => {
            let at = moment(outcome.destroyed_unix_ms, zone);
            let at = if at.is_empty() { at } else { format!(" at {at}") };
            format!("box destroyed: confirmed{at}, cost {cost}")
        }
        "" | "unconfirmed" => format!(
            "box NOT confirmed destroyed: money may be running, cost so far {cost}; hint: `limb reap`"
        ),
        other => format!("box: {}, cost {cost}", clean(other)),
    }
}

pub(super) fn runs(runs: &[RunInfo], now_unix_ms: u64) -> String {
    let rows = runs.iter().map(|run| {
        let end = if run.ended_unix_ms == 0 { now_unix_ms } else { run.ended_unix_ms };
        let outcome = run.outcome.as_ref();
        vec![
            clean(&run.run_id),
            clean(&run.name),
            run.attempt.to_string(),
            clean(if run.phase.is_empty() { &run.state } else { &run.phase }),
            clean(&run.provider),
            duration(end.saturating_sub(run.submitted_unix_ms)),
            money(run.cost_micros),
            outcome.map_or_else(|| "-".to_owned(), outcome_words),
        ]
    });
    table(&["RUN", "NAME", "ATTEMPT", "PHASE", "ON", "AGE", "COST", "OUTCOME"], rows, &[2, 5, 6])
}

/// `exit 0 · data home · box confirmed`, as far as it is known.
fn outcome_words(outcome: &Outcome) -> String {
    let mut words = Vec::new();
    // While the job has no outcome its box is at work, and not "unconfirmed".
    let at_work = outcome.job.is_empty() && outcome.data.is_empty();
    for (what, word) in [("", &outcome.job), ("data ", &outcome.data), ("box ", &outcome.destroy)] {
        if !word.is_empty() && !at_work {
            words.push(format!("{what}{}", clean(word)));
        }
    }
    if words.is_empty() { "-".to_owned() } else { words.join(" · ") }
}

/// Rows, then the sum. An interval that is still open is said to be open.
pub(super) fn costs(rows: &[CostRow], zone: &jiff::tz::TimeZone) -> String {
    let lines = rows.iter().map(|row| {
        vec![
            clean(&row.run_id),
            clean(&row.name),
            row.attempt.to_string(),
            clean(&row.provider),
            clean(&row.offer),
            format!("{}/h", money(row.price_micros_per_hour)),
            moment(row.started_unix_ms, zone),
            format!("{}{}", duration(row.billed_ms), if row.open { "+" } else { "" }),
            format!("{}{}", money(row.cost_micros), if row.open { "+" } else { "" }),
            clean(&row.outcome),
        ]
    });
    let header = ["RUN", "NAME", "ATTEMPT", "ON", "OFFER", "PRICE", "STARTED", "DURATION", "COST", "OUTCOME"];
    let total = rows.iter().fold(0_u64, |sum, row| sum.saturating_add(row.cost_micros));
    let billed = rows.iter().fold(0_u64, |sum, row| sum.saturating_add(row.billed_ms));
    let open = rows.iter().filter(|row| row.open).count();
    let mut text = table(&header, lines, &[2, 5, 7, 8]);
    text.push_str(&format!("\ntotal: {} for {}", money(total), duration(billed)));
    if open > 0 {
        text.push_str(&format!(" and counting: {open} not confirmed ended (+)"));
    }
    text
}

/// Exact micro-dollars for a spreadsheet.
pub(super) fn costs_csv(rows: &[CostRow]) -> String {
    let mut text = String::from(
        "run,name,attempt,provider,offer,price_micros_per_hour,started_unix_ms,ended_unix_ms,billed_ms,cost_micros,open,outcome\n",
    );
    for row in rows {
        let fields = [
            csv(&row.run_id),
            csv(&row.name),
            row.attempt.to_string(),
            csv(&row.provider),
            csv(&row.offer),
            row.price_micros_per_hour.to_string(),
            row.started_unix_ms.to_string(),
            if row.ended_unix_ms == 0 { String::new() } else { row.ended_unix_ms.to_string() },
            row.billed_ms.to_string(),
            row.cost_micros.to_string(),
            row.open.to_string(),
            csv(&row.outcome),
        ];
        text.push_str(&fields.join(","));
        text.push('\n');
    }
    text
}

/// Quoted where needed; a leading `=`, `+`, `-` or `@` would be a formula in a spreadsheet.
fn csv(text: &str) -> String {
    let text = clean(text);
    let text = if text.starts_with(['=', '+', '-', '@']) { format!("'{text}") } else { text };
    if text.contains([',', '"']) { format!("\"{}\"", text.replace('"', "\"\"")) } else { text }
}

pub(super) fn results(files: &[ResultFile], zone: &jiff::tz::TimeZone) -> String {
    let rows = files.iter().map(|file| {
        vec![
            clean(&file.output),
            clean(&String::from_utf8_lossy(&file.path)),
            show_bytes(file.size),
            moment(file.published_unix_ms, zone),
            clean(&file.state),
            clean(&file.b3sum),
        ]
    });
    table(&["OUTPUT", "PATH", "SIZE", "PUBLISHED", "STATE", "B3SUM"], rows, &[2])
}

/// The newest last.
pub(super) fn checkpoints(found: &[OfOutput], now_ms: u64) -> String {
    let rows = found.iter().map(|found| {
        let OfOutput { output, checkpoint, .. } = found;
        let age = now_ms.saturating_sub(checkpoint.published_unix_ms);
        vec![
            clean(output),
            checkpoints::name(found),
            checkpoint.step.map_or_else(String::new, |step| step.to_string()),
            show_bytes(checkpoint.bytes),
            checkpoint.files.to_string(),
            if checkpoint.published_unix_ms == 0 { String::new() } else { duration(age) },
            checkpoint
                .lacks
                .as_deref()
                .map_or_else(|| "complete".to_owned(), |lacks| format!("incomplete: {}", clean(lacks))),
        ]
    });
    table(&["OUTPUT", "CHECKPOINT", "STEP", "SIZE", "FILES", "AGE", "STATE"], rows, &[2, 3, 4, 5])
}

pub(super) fn reaped(boxes: &[ReapedBox]) -> String {
    let rows = boxes.iter().map(|found| {
        vec![
            clean(&found.provider),
            clean(&found.instance),
            clean(&found.run_id),
            duration(found.age_ms),
            clean(&found.verdict),
        ]
    });
    table(&["ON", "BOX", "RUN", "AGE", "VERDICT"], rows, &[3])
}

pub(super) fn settings(shown: &[crate::settings::Shown]) -> String {
    let rows = shown.iter().map(|shown| {
        let value = if shown.value.is_empty() { "-".to_owned() } else { clean(&shown.value) };
        vec![shown.key.to_owned(), value, shown.origin.to_string()]
    });
    table(&["KEY", "VALUE", "FROM"], rows, &[])
}

pub(super) fn snapshots(rows: Vec<Vec<String>>) -> String {
    table(&["SNAPSHOT", "SOURCE", "CLASS", "FILES", "SIZE", "MADE"], rows, &[3, 4])
}
