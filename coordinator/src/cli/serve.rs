//! `limb serve`: the coordinator in this process, and the way to end one.

use std::process::ExitCode;

use limb_common::phase::LimbExit;
use limb_proto::v1::ShutdownRequest;

use super::args::ServeArgs;
use super::client;
use super::talk::{Failure, Talk};
use crate::serve::{ServeError, ServeOptions, supervise};
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
                "{} runs are live; hint: `limb stop` them, or --stop --force and their boxes end when their leases do",
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
        supervise::supervise(settings).await.map_err(Failure::internal)?;
        return Ok(ExitCode::SUCCESS);
    }
    let options = ServeOptions {
        supervised_by: args.supervised_by.clone(),
        ends_when_idle: args.idle_exit,
        ..ServeOptions::default()
    };
    match Box::pin(crate::serve::serve(settings.clone(), options, edges)).await {
        Ok(()) => Ok(ExitCode::SUCCESS),
        Err(error @ ServeError::AlreadyRunning { .. }) => Err(Failure::new(LimbExit::AlreadyRunning, error)),
        Err(error) => Err(Failure::internal(error)),
    }
}

/// Starts a coordinator where none answers, and waits until it does.
pub(super) async fn ensure_running(settings: &Settings) -> Result<client::Owner, Failure> {
    supervise::ensure_running(settings).await.map_err(|error| Failure::new(LimbExit::NoCoordinator, error))
}
