//! `limb run` and `limb plan`: plan, ask, submit, follow to the end.
//!
//! The run lives in the coordinator. This client may die at any moment and harm nothing; it
//! never says how a run ended before the coordinator's ledger says that it is final.

use std::io::Write as _;
use std::process::ExitCode;

use limb_common::phase::LimbExit;
use limb_common::units::show_bytes;
use limb_proto::v1::plan_progress;
use limb_proto::v1::submit_progress::Body;
use limb_proto::v1::{HashProgress, JobSource, Outcome, PlanReply, PlanRequest, RunInfo, SubmitRequest};

use super::args::{PlanArgs, RunArgs};
use super::client::{self, Owner, Start};
use super::follow::{self, Interest};
use super::talk::{Failure, Talk, clean, print, print_json};
use super::{job, json, render};
use crate::settings::Settings;

pub(super) async fn plan(settings: &Settings, talk: &Talk, args: &PlanArgs) -> Result<ExitCode, Failure> {
    let source = job::source(&args.job)?;
    let mut owner = client::connect(settings, Start::IfNeeded).await?;
    let plan = ask_plan(&mut owner, talk, source).await?;
    if args.json {
        print_json(&json::plan(&plan))?;
    } else {
        print(&render::plan(&plan))?;
    }
    allowed(&plan)?;
    Ok(ExitCode::SUCCESS)
}

pub(super) async fn run(settings: &Settings, talk: &Talk, args: &RunArgs) -> Result<ExitCode, Failure> {
    let source = job::source(&args.job)?;
    let mut owner = client::connect(settings, Start::ForNewWork).await?;
    let plan = ask_plan(&mut owner, talk, source.clone()).await?;
    talk.say(&render::plan(&plan));
    allowed(&plan)?;
    confirm(talk, &plan, args.yes)?;
    let run_id = submit(&mut owner, talk, source, args.unsupervised).await?;
    if args.detach {
        talk.say(&format!("submitted; `limb logs -f {run_id}` follows it, `limb stop {run_id}` ends it"));
        if args.json {
            print_json(&serde_json::json!({ "run_id": run_id }))?;
        } else {
            print(&run_id)?;
        }
        return Ok(ExitCode::SUCCESS);
    }
    talk.say(&format!("run {run_id}"));
    let interest = Interest { run_id, output_to_stderr: args.json };
    match follow::to_the_end(settings, talk, owner, interest).await? {
        follow::End::Final(info) => finish(talk, &info, args.json),
        follow::End::Detached(run_id) => {
            talk.insist(&format!(
                "detached: run {run_id} goes on; `limb logs -f {run_id}` follows it, `limb stop {run_id}` ends it"
            ));
            Ok(ExitCode::SUCCESS)
        }
    }
}

async fn ask_plan(owner: &mut Owner, talk: &Talk, job: JobSource) -> Result<PlanReply, Failure> {
    let mut wait = talk.wait("looking at the working sets");
    let failed = |status: tonic::Status| Failure::status(&status);
    let request = owner.plan(PlanRequest { job: Some(job) });
    let mut progress = follow::ticking(&mut wait, request).await.map_err(failed)?.into_inner();
    while let Some(message) = follow::ticking(&mut wait, progress.message()).await.map_err(failed)? {
        match message.body {
            Some(plan_progress::Body::Hashing(hashing)) => wait.update(&hashing_line(&hashing)),
            Some(plan_progress::Body::Plan(plan)) => return Ok(plan),
            None => {}
        }
    }
    Err(Failure::new(
        LimbExit::NoCoordinator,
        anyhow::anyhow!("the coordinator hung up before it had a plan; hint: try again"),
    ))
}

fn allowed(plan: &PlanReply) -> Result<(), Failure> {
    if plan.allowed {
        return Ok(());
    }
    Err(Failure::refused(anyhow::anyhow!("{}", clean(&plan.verdict))))
}

/// Money is asked for; what costs nothing just starts.
fn confirm(talk: &Talk, plan: &PlanReply, yes: bool) -> Result<(), Failure> {
    if yes || plan.at_most_micros == 0 {
        return Ok(());
    }
    if !talk.interactive() {
        return Err(Failure::refused(anyhow::anyhow!(
            "this may cost {} and there is no terminal to ask on; hint: say -y",
            render::money(plan.at_most_micros)
        )));
    }
    let mut stderr = std::io::stderr().lock();
    drop(write!(stderr, "Proceed? [Y/n] ").and_then(|()| stderr.flush()));
    drop(stderr);
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer)?;
    // End of input is not a yes.
    if is_yes(&answer) {
        return Ok(());
    }
    Err(Failure::refused(anyhow::anyhow!("not confirmed; nothing was started")))
}

fn is_yes(answer: &str) -> bool {
    answer.ends_with('\n') && matches!(answer.trim().to_ascii_lowercase().as_str(), "" | "y" | "yes")
}

async fn submit(
    owner: &mut Owner,
    talk: &Talk,
    job: JobSource,
    unsupervised: bool,
) -> Result<String, Failure> {
    let mut wait = talk.wait("freezing the working sets");
    let failed = |status: tonic::Status| Failure::status(&status);
    let request = owner.submit(SubmitRequest { job: Some(job), unsupervised });
    let mut progress = follow::ticking(&mut wait, request).await.map_err(failed)?.into_inner();
    while let Some(message) = follow::ticking(&mut wait, progress.message()).await.map_err(failed)? {
        match message.body {
            Some(Body::Hashing(hashing)) => wait.update(&hashing_line(&hashing)),
            Some(Body::RunId(run_id)) => return Ok(run_id),
            None => {}
        }
    }
    Err(Failure::new(
        LimbExit::NoCoordinator,
        anyhow::anyhow!(
            "the coordinator hung up before the run was durable; hint: `limb ps` shows whether it runs"
        ),
    ))
}

pub(super) fn hashing_line(hashing: &HashProgress) -> String {
    if hashing.bytes_total == 0 {
        return format!(
            "looking at {}: {} so far",
            clean(&hashing.source),
            render::files(hashing.files_done)
        );
    }
    format!(
        "freezing {}: {}, {} of {}",
        clean(&hashing.source),
        render::files(hashing.files_done),
        show_bytes(hashing.bytes_done),
        show_bytes(hashing.bytes_total)
    )
}

/// The three lines and the code.
fn finish(talk: &Talk, info: &RunInfo, json: bool) -> Result<ExitCode, Failure> {
    let outcome = info.outcome.clone().unwrap_or_else(no_attempt);
    let ending = render::Ending { run: info, outcome: &outcome };
    for line in render::ending(&ending, &jiff::tz::TimeZone::system()) {
        talk.insist(&line);
    }
    if json {
        print_json(&json::run(info))?;
    }
    Ok(exit_code(outcome.exit_code))
}

/// The run was over before a box was asked for.
fn no_attempt() -> Outcome {
    let exit = LimbExit::Stopped;
    Outcome {
        job: "never started".to_owned(),
        data: "nothing".to_owned(),
        destroy: "never created".to_owned(),
        exit_code: exit.code(),
        exit_origin: format!("limb: {}", exit.words()),
        r#final: true,
        ..Outcome::default()
    }
}

/// A code outside of a byte is a failure all the same.
pub(super) fn exit_code(code: i32) -> ExitCode {
    ExitCode::from(u8::try_from(code).unwrap_or(u8::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_line_that_says_so_is_a_yes() {
        for yes in ["\n", "y\n", "YES\n", " y \n"] {
            assert!(is_yes(yes), "{yes:?}");
        }
        for no in ["", "n\n", "no\n", "y", "x\n"] {
            assert!(!is_yes(no), "{no:?}");
        }
    }

    #[test]
    fn a_wait_says_how_far_it_is() {
        let at = |files_done, bytes_done, bytes_total| {
            hashing_line(&HashProgress { source: "/d".into(), files_done, bytes_done, bytes_total })
        };
        assert_eq!(at(1, 0, 0), "looking at /d: 1 file so far");
        assert_eq!(at(70, 3 << 20, 9 << 20), "freezing /d: 70 files, 3.2 MB of 9.5 MB");
    }

    #[test]
    fn money_without_a_terminal_needs_a_yes() {
        let talk = Talk { quiet: false, verbose: false, terminal: false, colour: false };
        let paid = PlanReply { at_most_micros: 5_000_000, ..PlanReply::default() };
        let failure = confirm(&talk, &paid, false).unwrap_err();
        assert_eq!(failure.words().0, "this may cost $5.00 and there is no terminal to ask on");
        confirm(&talk, &paid, true).unwrap();
        confirm(&talk, &PlanReply::default(), false).unwrap();
    }

    #[test]
    fn a_refused_plan_ends_in_words() {
        let refused = PlanReply { verdict: "sealed data stays; hint: no".into(), ..PlanReply::default() };
        let failure = allowed(&refused).unwrap_err();
        assert_eq!(failure.words(), ("sealed data stays".to_owned(), vec!["no".to_owned()]));
        assert_eq!(failure.exit, LimbExit::Refused);
    }
}
