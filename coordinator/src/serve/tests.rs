//! A whole coordinator in this process, asked through its socket.

use std::time::Duration;

use limb_proto::v1 as proto;
use tokio_util::sync::CancellationToken;

use super::*;
use crate::settings::Sources;

struct Running {
    dir: tempfile::TempDir,
    settings: Settings,
    stop: CancellationToken,
    served: Option<task::Task<Result<(), ServeError>>>,
}

fn settings(state: &std::path::Path) -> Settings {
    let flags = vec![
        format!("state_dir={}", state.display()),
        // Nothing there: a local box is refused for certain, which is an end like any other.
        format!("agent={}", state.join("no-agent").display()),
    ];
    Settings::load(&Sources { flags, ..Sources::default() }).unwrap()
}

impl Running {
    fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let settings = settings(&dir.path().join("state"));
        let mut this = Self { dir, settings, stop: CancellationToken::new(), served: None };
        this.serve();
        this
    }

    fn serve(&mut self) {
        self.stop = CancellationToken::new();
        let options = ServeOptions { stop: self.stop.clone(), ..ServeOptions::default() };
        let settings = self.settings.clone();
        self.served = Some(task::spawn("coordinator", async move {
            Box::pin(serve(settings, options, &Edges::default())).await
        }));
    }

    async fn owner(&self) -> limb_proto::v1::owner_client::OwnerClient<tonic::transport::Channel> {
        for _ in 0..500 {
            if let Ok(owner) = socket::connect(&self.settings.socket).await {
                return owner;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        panic!("the coordinator does not answer");
    }

    async fn end(&mut self) {
        self.stop.cancel();
        self.served.take().unwrap().join().await.unwrap().unwrap();
    }

    fn job(&self, yaml: &str) -> proto::JobSource {
        proto::JobSource {
            yaml: yaml.to_owned(),
            file_name: "job.yaml".to_owned(),
            base_dir: self.dir.path().display().to_string(),
            ..proto::JobSource::default()
        }
    }
}

async fn submit(
    owner: &mut limb_proto::v1::owner_client::OwnerClient<tonic::transport::Channel>,
    job: proto::JobSource,
) -> Result<String, tonic::Status> {
    let request = proto::SubmitRequest { job: Some(job), unsupervised: false };
    let mut progress = owner.submit(request).await?.into_inner();
    while let Some(said) = progress.message().await? {
        if let Some(proto::submit_progress::Body::RunId(run)) = said.body {
            return Ok(run);
        }
    }
    panic!("no run id");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_is_durable_and_its_events_end_with_it() {
    let mut running = Running::start();
    let mut owner = running.owner().await;
    let status = owner.status(proto::StatusRequest {}).await.unwrap().into_inner();
    assert_eq!((status.epoch, status.live_runs), (1, 0));
    let run = submit(&mut owner, running.job("name: hello\nrun: echo hello\n")).await.unwrap();
    let request = proto::EventsRequest { run: run.clone(), follow: true, after_seq: 0 };
    let mut events = owner.events(request).await.unwrap().into_inner();
    let mut kinds = Vec::new();
    while let Some(event) = events.message().await.unwrap() {
        kinds.push(event.kind);
    }
    assert_eq!(kinds.first().unwrap(), "submitted");
    assert_eq!(kinds.last().unwrap(), "run-ended");
    running.end().await;
    // Another coordinator on the same state: the same port, the next epoch, the same run.
    running.serve();
    let mut owner = running.owner().await;
    let again = owner.status(proto::StatusRequest {}).await.unwrap().into_inner();
    assert_eq!((again.epoch, &again.agent_address), (2, &status.agent_address));
    let request = proto::ListRunsRequest { all: true, run: String::new() };
    let runs = owner.list_runs(request).await.unwrap().into_inner().runs;
    let outcome = runs[0].outcome.clone().unwrap();
    assert_eq!((runs[0].run_id.as_str(), outcome.r#final), (run.as_str(), true));
    assert_eq!(outcome.exit_code, limb_common::phase::LimbExit::Refused.code());
    assert!(outcome.job.contains("no agent at"), "{}", outcome.job);
    running.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_may_not_be_is_refused_before_a_run_exists() {
    let mut running = Running::start();
    let mut owner = running.owner().await;
    std::fs::write(running.dir.path().join("secret.txt"), "x").unwrap();
    for (yaml, code, word) in [
        ("nmae: x\nrun: 'true'\n", tonic::Code::InvalidArgument, "name"),
        ("name: x\nenv: {A: null}\nrun: 'true'\n", tonic::Code::InvalidArgument, "`A`"),
        (
            "name: x\nmounts: {/d: {source: secret.txt, class: sealed}}\nrun: 'true'\n",
            tonic::Code::PermissionDenied,
            "sealed",
        ),
        ("name: x\nmounts: {/d: absent}\nrun: 'true'\n", tonic::Code::FailedPrecondition, "absent"),
        ("name: x\nresources: {infra: [nowhere]}\nrun: 'true'\n", tonic::Code::FailedPrecondition, "nowhere"),
    ] {
        let status = submit(&mut owner, running.job(yaml)).await.unwrap_err();
        assert_eq!(status.code(), code, "{yaml}: {status}");
        assert!(status.message().contains(word), "{yaml}: {status}");
    }
    let request = proto::ListRunsRequest { all: true, run: String::new() };
    assert!(owner.list_runs(request).await.unwrap().into_inner().runs.is_empty());
    running.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plan_says_what_would_happen_and_starts_nothing() {
    let mut running = Running::start();
    let mut owner = running.owner().await;
    std::fs::create_dir(running.dir.path().join("data")).unwrap();
    std::fs::write(running.dir.path().join("data/a"), "abc").unwrap();
    let yaml = "name: p\nmounts: {/data: data}\noutputs: {/out: {dest: 'out/{run}'}}\nrun: 'true'\n";
    let request = proto::PlanRequest { job: Some(running.job(yaml)) };
    let mut said = owner.plan(request).await.unwrap().into_inner();
    let plan = loop {
        match said.message().await.unwrap().unwrap().body.unwrap() {
            proto::plan_progress::Body::Hashing(hashing) => assert!(hashing.source.ends_with("data")),
            proto::plan_progress::Body::Plan(plan) => break plan,
        }
    };
    assert!(plan.allowed);
    assert_eq!((plan.sets[0].files, plan.sets[0].bytes, plan.at_most_micros), (1, 3, 0));
    assert_eq!(plan.outputs.len(), 1);
    running.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_one_coordinator_at_a_time() {
    let mut running = Running::start();
    drop(running.owner().await);
    let second = Box::pin(serve(running.settings.clone(), ServeOptions::default(), &Edges::default())).await;
    assert!(matches!(second, Err(ServeError::AlreadyRunning { .. })));
    running.end().await;
}
