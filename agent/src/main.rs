//! The agent's program.

use std::io::IsTerminal as _;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use limb_agent::run::{Edges, RunError, read_settings, run};
use limb_common::error::chain;

/// The box's side of limb. Started by whatever boots the box.
#[derive(Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Lives one life with these boot settings.
    Run {
        /// A JSON file; removed once it is read where the agent is a process.
        #[arg(long)]
        settings: PathBuf,
    },
}

fn main() -> ExitCode {
    // First of all, before anything starts a thread: the job's helper is this program too.
    if std::env::args_os().nth(1).is_some_and(|word| word == "job-init") {
        return limb_agent::job::init::main();
    }
    let Command::Run { settings } = Arguments::parse().command;
    limb_common::memory::keep_large_buffers();
    tracing_subscriber::fmt()
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_env("LIMB_LOG").unwrap_or_else(|_| "info".into()),
        )
        .with_ansi(std::io::stderr().is_terminal())
        .with_writer(std::io::stderr)
        .init();
    match live(&settings) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            tracing::error!(error = chain(&error), "this agent's life is over");
            ExitCode::FAILURE
        }
    }
}

fn live(settings: &std::path::Path) -> Result<(), RunError> {
    let settings = read_settings(settings)?;
    run(&settings, &Edges::real(settings.host))
}
