//! The way to the coordinator: its socket, and starting one where a command needs it.

use hyper_util::rt::TokioIo;
use limb_common::phase::LimbExit;
use limb_proto::v1::owner_client::OwnerClient;
use limb_proto::v1::{ListRunsRequest, RunInfo};
use tokio::net::UnixStream;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use super::talk::{Failure, clean};
use crate::serve::supervise::Wish;
use crate::settings::Settings;

pub(super) type Owner = OwnerClient<Channel>;

/// A listing of thousands of results fits; the socket's peer is the same user.
const MAX_REPLY_BYTES: usize = 256 * 1024 * 1024;

/// Whether a command may start a coordinator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    IfNeeded,
    /// Also one that was stopped on purpose.
    ForNewWork,
}

/// A client of the coordinator.
pub(super) async fn connect(settings: &Settings, start: Start) -> Result<Owner, Failure> {
    match dial(settings).await {
        Ok(owner) => Ok(owner),
        Err(_) => {
            let wish = match start {
                Start::IfNeeded => Wish::Look,
                Start::ForNewWork => Wish::Submit,
            };
            super::serve::ensure_running(settings, wish).await?;
            dial(settings).await.map_err(|error| Failure::new(LimbExit::NoCoordinator, error))
        }
    }
}

/// One try.
pub(super) async fn dial(settings: &Settings) -> anyhow::Result<Owner> {
    let socket = settings.socket.clone();
    // The address is never looked up: the connector below ignores it.
    let channel = Endpoint::from_static("http://coordinator.invalid")
        .connect_with_connector(service_fn(move |_| {
            let socket = socket.clone();
            async move { UnixStream::connect(socket).await.map(TokioIo::new) }
        }))
        .await?;
    Ok(OwnerClient::new(channel).max_decoding_message_size(MAX_REPLY_BYTES))
}

/// The run that a person means: an id, or the newest of a name.
pub(super) async fn find_run(owner: &mut Owner, run: &str) -> Result<RunInfo, Failure> {
    let request = ListRunsRequest { all: true, run: String::new() };
    let reply = owner.list_runs(request).await.map_err(|status| Failure::status(&status))?;
    pick(reply.into_inner().runs, run).ok_or_else(|| {
        Failure::refused(anyhow::anyhow!("there is no run {}; hint: `limb ps -a` lists them", clean(run)))
    })
}

fn pick(runs: Vec<RunInfo>, wanted: &str) -> Option<RunInfo> {
    let by_id = runs.iter().position(|run| run.run_id == wanted);
    let by_name = || {
        let named = runs.iter().enumerate().filter(|(_, run)| run.name == wanted);
        named.max_by_key(|(at, run)| (run.submitted_unix_ms, *at)).map(|(at, _)| at)
    };
    let at = by_id.or_else(by_name)?;
    runs.into_iter().nth(at)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_wins_over_a_name_and_the_newest_of_a_name_is_meant() {
        let run = |id: &str, name: &str, at| RunInfo {
            run_id: id.into(),
            name: name.into(),
            submitted_unix_ms: at,
            ..RunInfo::default()
        };
        let runs = vec![run("r-1", "a", 5), run("r-2", "a", 9), run("r-3", "r-1", 20), run("r-4", "b", 1)];
        assert_eq!(pick(runs.clone(), "r-1").unwrap().run_id, "r-1");
        assert_eq!(pick(runs.clone(), "a").unwrap().run_id, "r-2");
        assert!(pick(runs, "c").is_none());
    }
}
