//! Messages as JSON documents, for programs. Names are those of the protocol; times are
//! milliseconds since 1970, money is micro-dollars, and what is not known yet is null.

use limb_proto::v1::{CostRow, Event, Outcome, PlanReply, ReapReply, ResultFile, RunInfo, VerifiedFile};
use serde_json::{Value, json};

use super::results::checkpoints::OfOutput;

fn known(value: u64) -> Value {
    if value == 0 { Value::Null } else { value.into() }
}

fn text(value: &str) -> Value {
    if value.is_empty() { Value::Null } else { value.into() }
}

pub(super) fn run(run: &RunInfo) -> Value {
    json!({
        "run_id": run.run_id,
        "name": run.name,
        "state": run.state,
        "phase": run.phase,
        "attempt": run.attempt,
        "provider": run.provider,
        "instance": text(&run.instance),
        "submitted_unix_ms": run.submitted_unix_ms,
        "ended_unix_ms": known(run.ended_unix_ms),
        "cost_micros": run.cost_micros,
        "billed_ms": run.billed_ms,
        "dests": run.dests,
        "outcome": run.outcome.as_ref().map(outcome),
    })
}

pub(super) fn outcome(outcome: &Outcome) -> Value {
    json!({
        "job": text(&outcome.job),
        "data": text(&outcome.data),
        "destroy": text(&outcome.destroy),
        "exit_code": outcome.r#final.then_some(outcome.exit_code),
        "exit_origin": text(&outcome.exit_origin),
        "destroyed_unix_ms": known(outcome.destroyed_unix_ms),
        "files_home": outcome.files_home,
        "bytes_home": outcome.bytes_home,
        "unsaved": outcome.unsaved,
        "final": outcome.r#final,
    })
}

pub(super) fn plan(plan: &PlanReply) -> Value {
    let sets: Vec<Value> = plan
        .sets
        .iter()
        .map(|set| {
            json!({
                "path": set.path, "source": set.source, "files": set.files, "bytes": set.bytes,
                "class": set.class, "outside_links": set.outside_links,
            })
        })
        .collect();
    let outputs: Vec<Value> = plan
        .outputs
        .iter()
        .map(|output| json!({"path": output.path, "dest": output.dest, "durability": output.durability}))
        .collect();
    json!({
        "name": plan.name,
        "provider": plan.provider,
        "offer": plan.offer,
        "price_micros_per_hour": plan.price_micros_per_hour,
        "at_most_micros": plan.at_most_micros,
        "max_duration_ms": plan.max_duration_ms,
        "allowed": plan.allowed,
        "verdict": plan.verdict,
        "sets": sets,
        "outputs": outputs,
        "warnings": plan.warnings,
    })
}

pub(super) fn event(event: &Event) -> Value {
    json!({
        "seq": event.seq,
        "at_unix_ms": event.at_unix_ms,
        "attempt": event.attempt,
        "kind": event.kind,
        "text": event.text,
        "data": serde_json::from_str::<Value>(&event.json).unwrap_or(Value::Null),
    })
}

/// A name that is not UTF-8 also stands there as hexadecimal bytes.
pub(super) fn checkpoint(found: &OfOutput) -> Value {
    let OfOutput { output, dest, checkpoint } = found;
    json!({
        "output": output,
        "path": String::from_utf8_lossy(&checkpoint.path),
        "dest": dest,
        "layout": checkpoint.layout.name(),
        "step": checkpoint.step,
        "size": checkpoint.bytes,
        "files": checkpoint.files,
        "published_unix_ms": known(checkpoint.published_unix_ms),
        "complete": checkpoint.is_complete(),
        "lacks": checkpoint.lacks,
    })
}

pub(super) fn file(file: &ResultFile) -> Value {
    let mut value = json!({
        "run_id": file.run_id,
        "output": file.output,
        "path": String::from_utf8_lossy(&file.path),
        "dest": file.dest,
        "size": file.size,
        "b3sum": file.b3sum,
        "published_unix_ms": known(file.published_unix_ms),
        "state": file.state,
    });
    if std::str::from_utf8(&file.path).is_err() {
        value["path_hex"] = file.path.iter().map(|byte| format!("{byte:02x}")).collect::<String>().into();
    }
    value
}

pub(super) fn verified(verified: &VerifiedFile) -> Value {
    let mut value = verified.file.as_ref().map_or_else(|| json!({}), file);
    value["ok"] = verified.ok.into();
    value["verdict"] = verified.verdict.as_str().into();
    value
}

pub(super) fn cost(row: &CostRow) -> Value {
    json!({
        "run_id": row.run_id,
        "name": row.name,
        "attempt": row.attempt,
        "provider": row.provider,
        "offer": row.offer,
        "price_micros_per_hour": row.price_micros_per_hour,
        "started_unix_ms": known(row.started_unix_ms),
        "ended_unix_ms": known(row.ended_unix_ms),
        "billed_ms": row.billed_ms,
        "cost_micros": row.cost_micros,
        "open": row.open,
        "outcome": text(&row.outcome),
    })
}

pub(super) fn reap(reply: &ReapReply) -> Value {
    let boxes: Vec<Value> = reply
        .boxes
        .iter()
        .map(|found| {
            json!({
                "provider": found.provider, "instance": found.instance, "run_id": text(&found.run_id),
                "age_ms": found.age_ms, "verdict": found.verdict,
            })
        })
        .collect();
    json!({ "boxes": boxes, "problems": reply.problems })
}
