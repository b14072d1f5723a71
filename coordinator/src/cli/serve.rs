//! `limb serve`: the coordinator in this process, and the way to end one.

use std::process::ExitCode;

use limb_common::phase::LimbExit;
use limb_proto::v1::ShutdownRequest;

use super::args::ServeArgs;
use super::client;
use super::talk::{Failure, Talk, print};
use crate::serve::{ServeError, ServeOptions, fate, supervise};
use crate::settings::Settings;

pub(super) async fn stop(settings: &Settings, talk: &Talk, args: &ServeArgs) -> Result<ExitCode, Failure> {
    let Ok(mut owner) = client::dial(settings).await else {
        talk.say("no coordinator is running");
        return Ok(ExitCode::SUCCESS);
    };
    let request = ShutdownRequest { even_with_live_runs: args.force };
    let reply = owner.shutdown(request).await.map_err(|status| Failure::status(&status))?.into_inner();
    if !reply.stopping {
        return Err(Failure::new(
            LimbExit::Refused,
            anyhow::anyhow!(
                "{} runs are live; hint: `limb stop` them; with --stop --force they go on without home, and their boxes end when their leases do unless `limb serve` comes first",
                reply.live_runs
            ),
        ));
    }
    talk.say("the coordinator ends");
    Ok(ExitCode::SUCCESS)
}

pub use crate::serve::Edges;

pub(super) async fn serve(
    settings: &Settings,
    talk: &Talk,
    args: &ServeArgs,
    edges: &Edges,
) -> Result<ExitCode, Failure> {
    if args.stop {
        return stop(settings, talk, args).await;
    }
    if args.supervise {
        return match supervise::supervise(settings).await {
            Ok(()) => Ok(ExitCode::SUCCESS),
            Err(error @ supervise::SuperviseError::Cannot(_)) => {
                Err(Failure::new(LimbExit::CannotStart, error))
            }
            Err(error @ supervise::SuperviseError::Start(_)) => Err(Failure::internal(error)),
        };
    }
    let options = ServeOptions {
        supervised_by: args.supervised_by.clone(),
        ends_when_idle: args.idle_exit,
        ..ServeOptions::default()
    };
    match Box::pin(crate::serve::serve(settings.clone(), options, edges)).await {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error @ ServeError::AlreadyRunning { .. }) => Err(Failure::new(LimbExit::AlreadyRunning, error)),
        Err(error) => {
            let permanent = fate::is_permanent(&error);
            let exit = if permanent { LimbExit::CannotStart } else { LimbExit::Internal };
            let failure = Failure::new(exit, error);
            tell_the_supervisor(settings, args, permanent, &failure);
            Err(failure)
        }
    }
}

/// So that the command that waits for this coordinator can say why it does not come.
fn tell_the_supervisor(settings: &Settings, args: &ServeArgs, permanent: bool, failure: &Failure) {
    let (error, hints) = failure.words();
    let line = fate::FailedStart { permanent, error, hints }.to_line();
    // Whoever cannot be told finds it in the log.
    match args.supervised_by.as_deref() {
        Some("process") => drop(print(&line)),
        Some(_) => drop(std::fs::write(fate::failure_file(&settings.state_dir), line)),
        None => {}
    }
}

/// Starts a coordinator where none answers, and waits until it does.
pub(super) async fn ensure_running(
    settings: &Settings,
    wish: supervise::Wish,
) -> Result<client::Owner, Failure> {
    supervise::ensure_running(settings, wish)
        .await
        .map_err(|error| Failure::new(LimbExit::NoCoordinator, error))
}
