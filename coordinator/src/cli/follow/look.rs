//! `limb logs` and `limb events`: what there is, and with `-f` what comes, also over a coordinator
//! that ends in between.

use std::io::Write as _;
use std::process::ExitCode;

use limb_proto::v1::{EventsRequest, ListRunsRequest, LogsRequest, RunInfo};
use tonic::Status;

use super::{full_event_line, redial, write_all};
use crate::cli::args::{EventsArgs, LogsArgs};
use crate::cli::client::{self, Owner, Start};
use crate::cli::json;
use crate::cli::talk::{Failure, clean, print};
use crate::settings::Settings;

/// How one stream ended.
enum Ended {
    /// By itself; whether anything had come.
    Whole { empty: bool },
    /// The coordinator has gone, or does not say what it should.
    Cut,
}

/// A refusal is the command's end, and so is any error where nothing is followed.
fn cut(status: &Status, follow: bool) -> Result<Ended, Failure> {
    if !follow || super::is_refusal(status) { Err(Failure::status(status)) } else { Ok(Ended::Cut) }
}

async fn info(owner: &mut Owner, run_id: &str) -> Option<RunInfo> {
    let request = ListRunsRequest { all: true, run: run_id.to_owned() };
    owner.list_runs(request).await.ok()?.into_inner().runs.into_iter().find(|run| run.run_id == run_id)
}

/// The byte that comes next.
struct Place {
    /// 0: the first attempt that has any, and then all in turn.
    attempt: u32,
    offset: u64,
    /// What was asked for begins here; less than that was not dropped.
    begun: bool,
}

/// `limb logs`.
pub(in crate::cli) async fn logs(settings: &Settings, args: &LogsArgs) -> Result<ExitCode, Failure> {
    let mut owner = client::connect(settings, Start::IfNeeded).await?;
    let run = client::find_run(&mut owner, &args.run).await?;
    exists(&run, args.attempt)?;
    let mut place = Place { attempt: args.attempt, offset: args.offset, begun: false };
    loop {
        let ended = log_stream(&mut owner, &run.run_id, &mut place, args.follow).await?;
        if !args.follow {
            return Ok(ExitCode::SUCCESS);
        }
        // A stream also ends with its coordinator. It was all if another one has nothing to add.
        if let Ended::Whole { empty: true } = ended
            && let Some(info) = info(&mut owner, &run.run_id).await
        {
            let last = place.attempt == 0 || place.attempt >= info.attempt || args.attempt > 0;
            if last && (super::is_over(&info) || (args.attempt > 0 && info.attempt > args.attempt)) {
                return Ok(ExitCode::SUCCESS);
            }
            if !last {
                place = Place { attempt: place.attempt + 1, offset: 0, begun: false };
                continue;
            }
        }
        if let Ended::Cut = ended {
            owner = redial(settings).await?;
        }
    }
}

/// A number that no attempt has is a mistake, and not an empty log.
fn exists(run: &RunInfo, attempt: u32) -> Result<(), Failure> {
    if attempt <= run.attempt {
        return Ok(());
    }
    let there = match run.attempt {
        0 => "it has had none yet".to_owned(),
        1 => "it has attempt 1 alone".to_owned(),
        last => format!("it has attempts 1 to {last}"),
    };
    Err(Failure::refused(anyhow::anyhow!("{} has no attempt {attempt}; hint: {there}", clean(&run.name))))
}

async fn log_stream(owner: &mut Owner, run: &str, place: &mut Place, follow: bool) -> Result<Ended, Failure> {
    let request = LogsRequest { run: run.to_owned(), follow, offset: place.offset, attempt: place.attempt };
    let mut stream = match owner.logs(request).await {
        Ok(stream) => stream.into_inner(),
        Err(status) => return cut(&status, follow),
    };
    let mut empty = true;
    loop {
        let chunk = match stream.message().await {
            Ok(Some(chunk)) => chunk,
            Ok(None) => return Ok(Ended::Whole { empty }),
            Err(status) => return cut(&status, follow),
        };
        empty = false;
        // Said on stderr, so that stdout stays the job's own bytes.
        if place.begun && place.attempt == chunk.attempt && place.offset < chunk.offset {
            let lost = chunk.offset - place.offset;
            drop(writeln!(std::io::stderr().lock(), "limb: {lost} bytes of output were dropped here"));
        }
        let offset = chunk.offset.saturating_add(chunk.data.len() as u64);
        *place = Place { attempt: chunk.attempt, offset, begun: true };
        write_all(&mut std::io::stdout().lock(), &chunk.data)?;
    }
}

/// `limb events`.
pub(in crate::cli) async fn events(settings: &Settings, args: &EventsArgs) -> Result<ExitCode, Failure> {
    let mut owner = client::connect(settings, Start::IfNeeded).await?;
    let run = client::find_run(&mut owner, &args.run).await?;
    let mut after_seq = 0;
    loop {
        let ended = event_stream(&mut owner, &run.run_id, &mut after_seq, args).await?;
        if !args.follow {
            return Ok(ExitCode::SUCCESS);
        }
        match ended {
            Ended::Whole { empty: true } => {
                if info(&mut owner, &run.run_id).await.is_some_and(|info| super::is_over(&info)) {
                    return Ok(ExitCode::SUCCESS);
                }
            }
            Ended::Whole { empty: false } => {}
            Ended::Cut => owner = redial(settings).await?,
        }
    }
}

async fn event_stream(
    owner: &mut Owner,
    run: &str,
    after_seq: &mut u64,
    args: &EventsArgs,
) -> Result<Ended, Failure> {
    let request = EventsRequest { run: run.to_owned(), follow: args.follow, after_seq: *after_seq };
    let mut stream = match owner.events(request).await {
        Ok(stream) => stream.into_inner(),
        Err(status) => return cut(&status, args.follow),
    };
    let zone = jiff::tz::TimeZone::system();
    let mut empty = true;
    loop {
        let event = match stream.message().await {
            Ok(Some(event)) => event,
            Ok(None) => return Ok(Ended::Whole { empty }),
            Err(status) => return cut(&status, args.follow),
        };
        empty = false;
        *after_seq = event.seq;
        if args.json {
            print(&json::event(&event).to_string())?;
        } else {
            print(&full_event_line(&event, &zone))?;
        }
    }
}
