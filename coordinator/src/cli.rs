//! The command line: every command but `serve` is a client of the coordinator.
//!
//! Data goes to stdout, talk to stderr; a run's exit code is its job's, and where it is limb's
//! own the last line says so. Nothing here decides anything about a run: the coordinator does,
//! and these are its words.
//!
//! Never: say that something succeeded before the coordinator has confirmed it.

mod args;
mod client;
mod docs;
mod doctor;
mod follow;
mod job;
mod json;
mod lists;
mod log;
mod render;
#[cfg(test)]
mod render_tests;
mod results;
mod run;
mod serve;
mod snapshot;
mod talk;

use std::process::ExitCode;

use clap::Parser as _;
use limb_common::phase::LimbExit;

use args::{Cli, Command, ConfigCommand};
pub use serve::Edges;
use talk::{Failure, Talk};

use crate::settings::{Settings, Sources};

/// Runs the whole program with the process's own arguments and environment.
pub fn main(edges: &Edges) -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // Help and versions are asked for; everything else is a refusal.
            drop(error.print());
            if !error.use_stderr() {
                return ExitCode::SUCCESS;
            }
            last_line(&Talk::new(false, 0), LimbExit::Refused);
            return run::exit_code(LimbExit::Refused.code());
        }
    };
    let talk = Talk::new(cli.common.quiet, cli.common.verbose);
    match dispatch(&cli, &talk, edges) {
        Ok(code) => code,
        Err(failure) if talk::is_broken_pipe(&failure) => ExitCode::SUCCESS,
        Err(failure) => fail(&cli, &talk, &failure),
    }
}

/// The error, its hints, and whose code it is.
fn fail(cli: &Cli, talk: &Talk, failure: &Failure) -> ExitCode {
    talk.failure(failure);
    let exit = failure.exit;
    last_line(talk, exit);
    if let Command::Run(run) = &cli.command
        && run.json
    {
        let (error, hints) = failure.words();
        let document = serde_json::json!({
            "error": error, "hints": hints, "exit_code": exit.code(),
            "exit_origin": format!("limb: {}", exit.words()),
        });
        // What could be said has been said on stderr.
        drop(talk::print_json(&document));
    }
    run::exit_code(exit.code())
}

/// Whose number the exit code is: a run's may be the job's own.
fn last_line(talk: &Talk, exit: LimbExit) {
    talk.insist(&format!("exit {}: limb: {}", exit.code(), exit.words()));
}

fn dispatch(cli: &Cli, talk: &Talk, edges: &Edges) -> Result<ExitCode, Failure> {
    // These need neither settings nor a runtime.
    match &cli.command {
        Command::Completions { shell } => return docs::completions(*shell),
        Command::Man(args) => return docs::man(args),
        Command::Run(_)
        | Command::Plan(_)
        | Command::Ps(_)
        | Command::Logs(_)
        | Command::Events(_)
        | Command::Stop(_)
        | Command::Results(_)
        | Command::Snapshot(_)
        | Command::Cost(_)
        | Command::Reap(_)
        | Command::Serve(_)
        | Command::Config(_)
        | Command::Doctor(_) => {}
    }
    let sources = Sources::of_process(cli.common.config.clone(), cli.common.set.clone());
    let settings = Settings::load(&sources).map_err(Failure::refused)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    runtime.block_on(command(cli, talk, settings, edges))
}

async fn command(cli: &Cli, talk: &Talk, settings: Settings, edges: &Edges) -> Result<ExitCode, Failure> {
    let settings = &settings;
    match &cli.command {
        Command::Run(args) => Box::pin(run::run(settings, talk, args)).await,
        Command::Plan(args) => Box::pin(run::plan(settings, talk, args)).await,
        Command::Ps(args) => lists::ps(settings, talk, args).await,
        Command::Logs(args) => follow::logs(settings, args).await,
        Command::Events(args) => follow::events(settings, args).await,
        Command::Stop(args) => lists::stop(settings, talk, args).await,
        Command::Results(args) => results::results(settings, talk, args).await,
        Command::Snapshot(args) => snapshot::snapshot(settings, talk, args).await,
        Command::Cost(args) => lists::cost(settings, talk, args).await,
        Command::Reap(args) => lists::reap(settings, talk, args).await,
        Command::Serve(args) => {
            if !args.stop {
                log::start(&settings.log)?;
            }
            Box::pin(serve::serve(settings, talk, args, edges)).await
        }
        Command::Config(ConfigCommand::Show { json }) => lists::config_show(settings, *json),
        Command::Doctor(args) => doctor::doctor(settings, talk, args.json).await,
        Command::Completions { shell } => docs::completions(*shell),
        Command::Man(args) => docs::man(args),
    }
}
