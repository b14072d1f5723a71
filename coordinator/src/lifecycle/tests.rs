//! The lifecycle against a provider that misbehaves on demand and boxes whose agents call the
//! front desk. "Crash" means: every task of ours gone, no write gets through any more; then a new
//! lifecycle on the same database. In the end there is no box and the ledger is closed.

mod world;

use std::sync::Arc;
use std::time::Duration;

use limb_common::clock::SystemClock;
use limb_common::id::{HomeId, RunId};
use limb_common::phase::{DestroyOutcome, JobOutcome, NotStarted, Phase, StopCause};
use limb_common::secret::Secret;

use self::world::{CreateFault, World, spec};
use super::*;
use crate::database::Database;
use crate::ledger::{CrashSwitch, SCHEMA};
use crate::rpc::desk::{BeatVerdict, Desk, EnrolmentRequest};

/// Far more than anything here takes; a hang fails instead of hanging.
const PATIENCE: Duration = Duration::from_secs(20);

/// A home in a temporary directory, its coordinator, and the world outside.
struct Stage {
    dir: tempfile::TempDir,
    world: World,
    outputs: world::NoOutputs,
    lifecycle: Option<Arc<Lifecycle>>,
    crash: Option<Arc<CrashSwitch>>,
    agents: Option<Task<()>>,
}

impl Stage {
    async fn new(world: World) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let outputs = world::NoOutputs::default();
        let mut stage = Self { dir, world, outputs, lifecycle: None, crash: None, agents: None };
        stage.start(None).await;
        stage
    }

    async fn start(&mut self, crash: Option<Arc<CrashSwitch>>) {
        let database = Database::open(&self.dir.path().join("limb.db"), &[SCHEMA]).unwrap();
        let mut ledger = Ledger::open(database, Arc::new(SystemClock)).await.unwrap();
        ledger.crash.clone_from(&crash);
        let lifecycle = Lifecycle::open(Parts {
            ledger,
            secrets: SecretStore::new(self.dir.path().join("secrets")),
            providers: Providers::new([Arc::new(self.world.clone()) as Arc<dyn Provider>]),
            outputs: Arc::new(self.outputs.clone()),
            clock: Arc::new(SystemClock),
            endpoint: HomeEndpoint { address: "127.0.0.1:1".to_owned(), ca_certificate_pem: String::new() },
        })
        .await
        .unwrap();
        let desk = desk::FrontDesk(Arc::clone(&lifecycle));
        self.agents = Some(task::spawn("agents", world::play(self.world.clone(), desk)));
        self.lifecycle = Some(lifecycle);
        self.crash = crash;
    }

    fn lifecycle(&self) -> &Arc<Lifecycle> {
        self.lifecycle.as_ref().unwrap()
    }

    fn die(&mut self) {
        self.lifecycle.take().unwrap().halt();
        self.agents = None;
    }

    async fn submit(&self, change: impl FnOnce(&mut RunSpec)) -> RunId {
        let mut spec = spec();
        change(&mut spec);
        let run = RunId::random();
        let secrets = [("S".to_owned(), Secret::new("v".to_owned()))];
        self.lifecycle().submit(run.clone(), spec, &secrets).await.unwrap();
        run
    }

    async fn wait(&self, what: &str, mut met: impl AsyncFnMut(&Lifecycle) -> bool) {
        let deadline = self.lifecycle().now() + PATIENCE;
        while !met(self.lifecycle()).await {
            assert!(self.lifecycle().now() < deadline, "gave up waiting for {what}");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    }

    async fn wait_phase(&self, run: &RunId, met: impl Fn(&Attempt) -> bool) {
        self.wait("a phase", async |lifecycle| {
            let attempts = lifecycle.ledger().attempts(run).await.unwrap();
            attempts.last().is_some_and(|attempt| met(&attempt.state))
        })
        .await;
    }

    /// The last attempt, once the run has ended; and everything that must be true of every end.
    async fn end(&self, run: &RunId) -> AttemptRow {
        self.wait("the end of the run", async |lifecycle| {
            lifecycle.ledger().run(run).await.unwrap().unwrap().ended_unix_ms.is_some()
        })
        .await;
        self.wait("the secrets to be forgotten", async |lifecycle| {
            lifecycle.parts.secrets.load(run).unwrap().is_empty()
        })
        .await;
        let ledger = self.lifecycle().ledger();
        assert!(ledger.open_attempts().await.unwrap().is_empty(), "an attempt is open");
        assert!(self.world.boxes().is_empty(), "a box is left: {:?}", self.world.boxes());
        assert!(self.world.most_working() <= 1, "two boxes worked at once");
        for cost in ledger.costs(Some(run.clone())).await.unwrap() {
            assert!(cost.ended_unix_ms.is_some(), "an interval is open");
        }
        ledger.attempts(run).await.unwrap().pop().unwrap()
    }

    async fn kinds(&self, run: &RunId) -> Vec<String> {
        let events = self.lifecycle().ledger().events_after(run, 0).await.unwrap();
        events.into_iter().map(|event| event.kind).collect()
    }
}

fn exited(attempt: &AttemptRow) -> i32 {
    assert!(matches!(attempt.state.destroy, Some(DestroyOutcome::Confirmed { .. })));
    attempt.state.exit().code
}

fn owner_stop() -> StopCause {
    StopCause::Owner { reason: String::new() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_run_goes_from_submit_to_a_confirmed_end() {
    let stage = Stage::new(World::new()).await;
    let run = stage.submit(|_| {}).await;
    let last = stage.end(&run).await;
    assert_eq!(exited(&last), 7);
    assert_eq!(stage.world.made(), 1);
    assert_eq!(stage.world.secrets_seen(), [b"v".to_vec()]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_ambiguous_create_is_adopted_with_exactly_one_box() {
    for fault in [
        CreateFault::ErrorAfterCreate,
        CreateFault::Late(Duration::from_millis(60)),
        CreateFault::NeverAnswers,
    ] {
        let world = World::new();
        world.set(|script| {
            script.create = fault;
            script.list_lag = Duration::from_millis(30);
        });
        let stage = Stage::new(world).await;
        let run = stage.submit(|_| {}).await;
        assert_eq!(exited(&stage.end(&run).await), 7, "{fault:?}");
        assert_eq!(stage.world.made(), 1, "{fault:?}");
        assert!(stage.kinds(&run).await.contains(&"create-ambiguous".to_owned()));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_box_that_appears_after_the_quarantine_is_destroyed_on_sight() {
    let world = World::new();
    // The quarantine is 150 ms.
    world.set(|script| script.create = CreateFault::Late(Duration::from_millis(500)));
    let stage = Stage::new(world).await;
    let run = stage.submit(|_| {}).await;
    stage.wait_phase(&run, |attempt| attempt.phase == Phase::Closed).await;
    stage
        .wait("the late box to come and go", async |_| {
            stage.world.made() == 1 && stage.world.boxes().is_empty()
        })
        .await;
    let last = stage.end(&run).await;
    assert!(matches!(last.state.job, Some(JobOutcome::NeverStarted { why: NotStarted::NeverAppeared, .. })));
    assert!(stage.kinds(&run).await.contains(&"late-box".to_owned()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn teardown_outlasts_errors_lies_and_refusals() {
    for change in [
        (|script: &mut world::Script| script.terminate_errors = 4) as fn(&mut world::Script),
        |script| script.terminate_says_gone = true,
        |script| script.list_errors = 5,
        |script| script.lists_empty_once_at_teardown = true,
        |script| script.terminate_takes = Duration::from_millis(80),
    ] {
        let world = World::new();
        world.set(change);
        let stage = Stage::new(world).await;
        let run = stage.submit(|_| {}).await;
        assert_eq!(exited(&stage.end(&run).await), 7);
        assert_eq!(stage.world.made(), 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_during_the_create_destroys_the_box_that_arrives() {
    let world = World::new();
    world.set(|script| script.create = CreateFault::Slow(Duration::from_millis(60)));
    let stage = Stage::new(world).await;
    let run = stage.submit(|_| {}).await;
    stage.wait_phase(&run, |attempt| matches!(attempt.phase, Phase::Creating { .. })).await;
    stage.lifecycle().stop(&run, owner_stop()).await.unwrap();
    let last = stage.end(&run).await;
    assert!(matches!(last.state.job, Some(JobOutcome::NeverStarted { why: NotStarted::Stopped, .. })));
    assert_eq!(exited(&last), limb_common::phase::LimbExit::Stopped.code());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn destinations_that_a_crash_left_locked_are_let_go_at_the_start() {
    let world = World::new();
    world.set(|script| script.job_waits_for_stop = true);
    let mut stage = Stage::new(world).await;
    let over = stage.submit(|_| {}).await;
    stage.lifecycle().stop(&over, owner_stop()).await.unwrap();
    stage.end(&over).await;
    let live = stage.submit(|_| {}).await;
    stage.wait_phase(&live, |attempt| matches!(attempt.phase, Phase::Running { .. })).await;
    stage.die();
    let held = Arc::clone(&stage.outputs.0);
    // Claimed, and the coordinator died before the run was one; ended, and it died before the end.
    held.lock().unwrap().extend([RunId::random(), over]);
    stage.start(None).await;
    assert_eq!(
        held.lock().unwrap().as_slice(),
        std::slice::from_ref(&live),
        "only the run that lives holds one"
    );
    stage.lifecycle().stop(&live, owner_stop()).await.unwrap();
    stage.end(&live).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_box_that_cannot_prepare_is_a_bad_box_and_another_one_may_do() {
    for (retries, attempts) in [(false, 1), (true, 2)] {
        let world = World::new();
        world.set(|script| script.cannot_prepare = true);
        let stage = Stage::new(world).await;
        let run = stage
            .submit(|spec| {
                spec.retry_lost = retries;
                spec.max_attempts = 2;
            })
            .await;
        let last = stage.end(&run).await;
        let Some(JobOutcome::NeverStarted { why: NotStarted::PrepareFailed, text }) = &last.state.job else {
            panic!("{:?}", last.state.job);
        };
        assert!(text.contains("could not mount"), "{text}");
        assert_eq!(exited(&last), limb_common::phase::LimbExit::BootFailed.code());
        assert_eq!(last.number.0, attempts);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stop_of_a_running_job_drains_and_ends() {
    let world = World::new();
    world.set(|script| script.job_waits_for_stop = true);
    let stage = Stage::new(world).await;
    let run = stage.submit(|_| {}).await;
    stage.wait_phase(&run, |attempt| matches!(attempt.phase, Phase::Running { .. })).await;
    stage.lifecycle().stop(&run, owner_stop()).await.unwrap();
    let last = stage.end(&run).await;
    assert!(matches!(last.state.job, Some(JobOutcome::Ended { stopped: true, .. })));
    assert_eq!(exited(&last), 143);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_box_that_does_not_obey_is_destroyed_without_its_help() {
    let world = World::new();
    world.set(|script| {
        script.job_waits_for_stop = true;
        script.ignores_orders = true;
    });
    let stage = Stage::new(world).await;
    let run = stage.submit(|spec| spec.stop_duration_ms = 50).await;
    stage.wait_phase(&run, |attempt| matches!(attempt.phase, Phase::Running { .. })).await;
    stage.lifecycle().stop(&run, owner_stop()).await.unwrap();
    let last = stage.end(&run).await;
    assert!(matches!(last.state.job, Some(JobOutcome::Lost { .. })));
    assert_eq!(exited(&last), limb_common::phase::LimbExit::Lost.code());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn limits_end_a_run_by_name() {
    let world = World::new();
    world.set(|script| script.job_waits_for_stop = true);
    let stage = Stage::new(world).await;
    let run = stage.submit(|spec| spec.max_duration_ms = 200).await;
    let last = stage.end(&run).await;
    assert_eq!(last.state.stop, Some(StopCause::MaxDuration));
    assert_eq!(exited(&last), limb_common::phase::LimbExit::LimitReached.code());

    let world = World::new();
    world.set(|script| script.never_enrols = true);
    let stage = Stage::new(world).await;
    let run = stage.submit(|spec| spec.boot_timeout_ms = 100).await;
    let last = stage.end(&run).await;
    assert_eq!(exited(&last), limb_common::phase::LimbExit::BootFailed.code());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_box_is_destroyed_and_the_retry_gets_a_new_one() {
    let world = World::new();
    world.set(|script| {
        script.job_waits_for_stop = true;
        script.first_box_vanishes_when_running = true;
    });
    let stage = Stage::new(world).await;
    let run = stage
        .submit(|spec| {
            spec.retry_lost = true;
            spec.max_attempts = 2;
        })
        .await;
    stage
        .wait("the second attempt to run", async |lifecycle| {
            let attempts = lifecycle.ledger().attempts(&run).await.unwrap();
            attempts.len() == 2 && matches!(attempts[1].state.phase, Phase::Running { .. })
        })
        .await;
    stage.lifecycle().stop(&run, owner_stop()).await.unwrap();
    assert_eq!(exited(&stage.end(&run).await), 143);
    let first = stage.lifecycle().ledger().attempts(&run).await.unwrap().remove(0);
    assert!(matches!(first.state.job, Some(JobOutcome::Lost { vanished: true, .. })));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn silence_ends_the_lease_and_then_the_box() {
    let world = World::new();
    world.set(|script| {
        script.job_waits_for_stop = true;
        script.silent_when_running = true;
    });
    let stage = Stage::new(world).await;
    // TTL 100 ms and the margin of 3 s.
    let run = stage.submit(|spec| spec.disconnect_grace_ms = 100).await;
    let last = stage.end(&run).await;
    assert!(matches!(last.state.job, Some(JobOutcome::Lost { vanished: false, .. })));
    assert_eq!(stage.lifecycle().ledger().attempts(&run).await.unwrap().len(), 1, "re-run unasked");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_capacity_is_retried_only_when_asked() {
    let world = World::new();
    world.set(|script| script.create = CreateFault::NoCapacity);
    let stage = Stage::new(world).await;
    let run = stage.submit(|_| {}).await;
    let last = stage.end(&run).await;
    assert_eq!((last.number.0, last.state.exit().code), (1, limb_common::phase::LimbExit::NoBox.code()));
    let run = stage
        .submit(|spec| {
            spec.retry_no_capacity = true;
            spec.max_attempts = 3;
        })
        .await;
    assert_eq!(stage.end(&run).await.number.0, 3);
    assert_eq!(stage.world.made(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_is_spent_once_and_a_second_key_is_an_alarm() {
    let world = World::new();
    world.set(|script| script.job_waits_for_stop = true);
    let stage = Stage::new(world).await;
    let run = stage.submit(|_| {}).await;
    stage.wait_phase(&run, |attempt| matches!(attempt.phase, Phase::Running { .. })).await;
    let desk = desk::FrontDesk(Arc::clone(stage.lifecycle()));
    let (token_hash, key_hash) = stage.world.enrolment_of_first_box();
    let request = |key_hash| EnrolmentRequest {
        token_hash,
        key_hash,
        boot_id: String::new(),
        agent_version: String::new(),
    };
    // The same key may ask again: its reply may have been lost.
    let who = desk.enrol(request(key_hash)).await.unwrap();
    assert!(desk.is_live(&who));
    assert!(matches!(desk.beat(&who, Duration::from_secs(1)).await, Ok(BeatVerdict::Renewed { .. })));
    assert!(matches!(desk.beat(&who, Duration::ZERO).await, Ok(BeatVerdict::Refused)));
    let mut stale = who.clone();
    stale.epoch.0 += 1;
    assert!(!desk.is_live(&stale));
    assert!(desk.enrol(request(limb_common::id::Digest::of(b"other"))).await.is_err());
    let last = stage.end(&run).await;
    assert_eq!(last.state.stop, Some(StopCause::TokenReused));
    assert!(stage.kinds(&run).await.contains(&"alarm".to_owned()));
    assert!(!desk.is_live(&who));
    assert!(desk.enrol(request(key_hash)).await.is_err(), "a tombstone let somebody in");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn boxes_that_nothing_explains_are_reaped_in_two_passes_and_foreign_ones_never() {
    let world = World::new();
    let stage = Stage::new(world).await;
    let run = stage.submit(|_| {}).await;
    stage.end(&run).await;
    let ours = stage.lifecycle().ledger().home().clone();
    stage.world.put("foreign", &HomeId::random(), &RunId::random());
    stage.world.put("orphan", &ours, &RunId::random());
    stage.wait("the orphan to go", async |_| stage.world.boxes() == ["foreign".to_owned()]).await;
    let report = stage.lifecycle().reap(true).await;
    assert!(report.boxes.is_empty() && report.problems.is_empty());
    assert_eq!(stage.world.boxes(), ["foreign".to_owned()]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_empty_ledger_reaps_nothing() {
    let stage = Stage::new(World::new()).await;
    let ours = stage.lifecycle().ledger().home().clone();
    stage.world.put("mine", &ours, &RunId::random());
    let report = stage.lifecycle().reap(true).await;
    assert_eq!(report.boxes[0].verdict, BoxVerdict::Unknown);
    assert_eq!(stage.world.boxes(), ["mine".to_owned()]);
}

/// A coordinator that dies after each write of its life, and once more a few writes later; with a
/// provider that answers, and with one whose answers to a create are lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_after_any_write_ends_the_same() {
    for fault in [CreateFault::None, CreateFault::ErrorAfterCreate] {
        for writes in 0..40 {
            let world = World::new();
            world.set(|script| script.create = fault);
            let mut stage = Stage::new(world).await;
            let run = RunId::random();
            let lifecycle = Arc::clone(stage.lifecycle());
            lifecycle.submit(run.clone(), spec(), &[]).await.unwrap();
            stage.die();
            // The first life may have come some way before it was ended; that is fine.
            let mut survived = true;
            for more in [writes, 3] {
                let crash = CrashSwitch::after(more);
                stage.start(Some(Arc::clone(&crash))).await;
                let deadline = stage.lifecycle().now() + PATIENCE;
                loop {
                    let row = stage.lifecycle().ledger().run(&run).await.unwrap().unwrap();
                    if crash.is_down() {
                        survived = false;
                        break;
                    }
                    if row.ended_unix_ms.is_some() {
                        break;
                    }
                    assert!(stage.lifecycle().now() < deadline, "stuck after {writes} writes, {fault:?}");
                    tokio::time::sleep(Duration::from_millis(1)).await;
                }
                stage.die();
            }
            stage.start(None).await;
            let last = stage.end(&run).await;
            assert_eq!(last.number.0, 1, "a second box after {writes} writes, {fault:?}");
            if last.state.job.as_ref().is_some_and(|job| matches!(job, JobOutcome::Ended { .. })) {
                assert_eq!(exited(&last), 7, "after {writes} writes, {fault:?}");
            } else {
                // Only a create that was never sent may end without a box.
                assert_eq!(stage.world.made(), 0, "after {writes} writes, {fault:?}");
            }
            if survived {
                break;
            }
        }
    }
}
