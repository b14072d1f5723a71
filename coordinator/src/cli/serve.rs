//! `limb serve`: the coordinator in this process, and the way to end one.

use std::process::ExitCode;

use limb_common::phase::LimbExit;
use limb_proto::v1::ShutdownRequest;

use super::args::ServeArgs;
use super::client;
use super::talk::{Failure, Talk};
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

/// What differs between `limb` and a test's program.
#[derive(Debug, Default)]
pub struct Edges;

pub(super) async fn serve(
    settings: &Settings,
    talk: &Talk,
    args: &ServeArgs,
    _edges: &Edges,
) -> Result<ExitCode, Failure> {
    if args.stop {
        return stop(settings, talk, args).await;
    }
    Err(Failure::new(LimbExit::NoCoordinator, anyhow::anyhow!("this build has no coordinator yet")))
}

#[expect(clippy::unused_async, reason = "starts one as soon as there is one")]
pub(super) async fn ensure_running(_settings: &Settings) -> Result<client::Owner, Failure> {
    Err(Failure::new(LimbExit::NoCoordinator, anyhow::anyhow!("this build has no coordinator yet")))
}
