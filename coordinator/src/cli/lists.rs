//! `ps`, `stop`, `cost`, `reap`, `config show`: one question, one answer.

use std::process::ExitCode;

use limb_common::phase::LimbExit;
use limb_proto::v1::{CostRequest, ListRunsRequest, ReapRequest, StopRequest};
use serde_json::{Value, json};

use super::args::{CostArgs, PsArgs, ReapArgs, StopArgs};
use super::client::{self, Start};
use super::run::exit_code;
use super::talk::{Failure, Talk, clean, print, print_json};
use super::{json, render};
use crate::settings::{Origin, Settings};

pub(super) async fn ps(settings: &Settings, talk: &Talk, args: &PsArgs) -> Result<ExitCode, Failure> {
    // Runs that are going on need their home: looking at them brings it back.
    let mut owner = client::connect(settings, Start::IfNeeded).await?;
    let request = ListRunsRequest { all: args.all, run: String::new() };
    let runs = owner.list_runs(request).await.map_err(|status| Failure::status(&status))?.into_inner().runs;
    if args.json {
        print_json(&Value::Array(runs.iter().map(json::run).collect()))?;
    } else if runs.is_empty() {
        talk.say(if args.all { "no runs yet" } else { "nothing is running; `limb ps -a` shows what was" });
    } else {
        print(&render::runs(&runs, limb_common::clock::unix_ms()))?;
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) async fn stop(settings: &Settings, talk: &Talk, args: &StopArgs) -> Result<ExitCode, Failure> {
    let mut owner = client::connect(settings, Start::IfNeeded).await?;
    let run = client::find_run(&mut owner, &args.run).await?;
    let request = StopRequest { run: run.run_id.clone(), reason: args.reason.clone() };
    let reply = owner.stop(request).await.map_err(|status| Failure::status(&status))?.into_inner();
    if args.json {
        print_json(&json!({ "run_id": run.run_id, "state": reply.state }))?;
    } else {
        talk.say(&format!("{} ({}): {}", clean(&run.name), run.run_id, clean(&reply.state)));
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) async fn cost(settings: &Settings, talk: &Talk, args: &CostArgs) -> Result<ExitCode, Failure> {
    if let Some(month) = args.month.as_deref().filter(|month| !is_month(month)) {
        return Err(Failure::refused(anyhow::anyhow!(
            "{month:?} is not a month; hint: write it like 2026-11"
        )));
    }
    let mut owner = client::connect(settings, Start::IfNeeded).await?;
    let run = match &args.run {
        Some(run) => client::find_run(&mut owner, run).await?.run_id,
        None => String::new(),
    };
    let request = CostRequest { run, month: args.month.clone().unwrap_or_default() };
    let rows = owner.cost(request).await.map_err(|status| Failure::status(&status))?.into_inner().rows;
    if args.json {
        print_json(&Value::Array(rows.iter().map(json::cost).collect()))?;
    } else if args.csv {
        print(&render::costs_csv(&rows))?;
    } else if rows.is_empty() {
        talk.say("nothing was rented");
    } else {
        print(&render::costs(&rows, &jiff::tz::TimeZone::system()))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn is_month(text: &str) -> bool {
    let digits = |part: &str, len: usize| part.len() == len && part.bytes().all(|b| b.is_ascii_digit());
    text.split_once('-')
        .is_some_and(|(year, month)| digits(year, 4) && digits(month, 2) && ("01"..="12").contains(&month))
}

/// What could not be asked may be running: that is said by the code, too.
pub(super) async fn reap(settings: &Settings, talk: &Talk, args: &ReapArgs) -> Result<ExitCode, Failure> {
    let mut owner = client::connect(settings, Start::IfNeeded).await?;
    let mut wait = talk.wait("asking every provider");
    let reply = super::follow::ticking(&mut wait, owner.reap(ReapRequest { dry_run: args.dry_run })).await;
    drop(wait);
    let reply = reply.map_err(|status| Failure::status(&status))?.into_inner();
    if args.json {
        print_json(&json::reap(&reply))?;
    } else if reply.boxes.is_empty() {
        talk.say("no box is unexplained");
    } else {
        print(&render::reaped(&reply.boxes))?;
    }
    for problem in &reply.problems {
        talk.insist(&format!("warning: {}", clean(problem)));
    }
    if reply.problems.is_empty() {
        return Ok(ExitCode::SUCCESS);
    }
    let exit = LimbExit::TeardownUnconfirmed;
    talk.insist(&format!("exit {}: limb: {}", exit.code(), exit.words()));
    Ok(exit_code(exit.code()))
}

pub(super) fn config_show(settings: &Settings, as_json: bool) -> Result<ExitCode, Failure> {
    if !as_json {
        print(&render::settings(&settings.shown))?;
        return Ok(ExitCode::SUCCESS);
    }
    let shown: serde_json::Map<String, Value> = settings
        .shown
        .iter()
        .map(|shown| {
            let value = if shown.value.is_empty() { Value::Null } else { shown.value.as_str().into() };
            let (origin, place) = match &shown.origin {
                Origin::Flag => ("flag", Value::Null),
                Origin::Environment(name) => ("environment", Value::from(*name)),
                Origin::File { path, line } => ("file", format!("{}:{line}", path.display()).into()),
                Origin::Default => ("default", Value::Null),
            };
            (shown.key.to_owned(), json!({ "value": value, "origin": origin, "from": place }))
        })
        .collect();
    print_json(&Value::Object(shown))?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn months_are_months() {
        assert!(is_month("2026-11"));
        for bad in ["2026", "2026-13", "2026-00", "26-11", "2026-1", "x026-11"] {
            assert!(!is_month(bad), "{bad}");
        }
    }
}
