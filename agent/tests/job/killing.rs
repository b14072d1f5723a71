//! Whatever a job does, its tree is gone after a kill.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::time::Duration;

use limb_agent::job::{JobSpec, RunningJob};
use limb_common::assignment::Command;
use limb_common::report::{EndedBy, JobStep};

use crate::support::{BOUND, Place, exit, read_all, run, runtime, text, wait_for};

/// Every process on this machine with `mark` in its environment.
fn marked(mark: &str) -> Vec<i32> {
    fs::read_dir("/proc")
        .unwrap()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| {
            fs::read(format!("/proc/{pid}/environ"))
                .is_ok_and(|environ| String::from_utf8_lossy(&environ).contains(mark))
        })
        .collect()
}

fn with_mark(mut spec: JobSpec, mark: &str) -> JobSpec {
    spec.env.push((b"LIMB_TEST_MARK".to_vec(), mark.as_bytes().to_vec()));
    spec
}

fn unique(name: &str) -> String {
    format!("limb-mark-{name}-{}", std::process::id())
}

/// Starts the job and waits until it has said `ready`.
async fn start_and_wait_ready(spec: JobSpec) -> RunningJob {
    let mut job = RunningJob::start(spec).await.unwrap();
    let output = job.take_output().unwrap();
    let (says, said) = tokio::sync::oneshot::channel();
    std::thread::spawn(move || {
        let mut says = Some(says);
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if line == "ready"
                && let Some(says) = says.take()
            {
                let _heard = says.send(());
            }
        }
    });
    tokio::time::timeout(BOUND, said).await.unwrap().unwrap();
    job
}

#[test]
fn escapes_of_every_kind_are_gone_after_a_kill() {
    let script = r#"
        setsid bash -c 'setsid sleep 1000 & exit' &
        (trap '' TERM INT HUP; setsid sleep 1001) &
        nohup sleep 1002 >/dev/null 2>&1 & disown
        for i in $(seq 200); do sleep 1003 & done
        echo ready
        wait"#;
    let place = Place::new();
    let mark = unique("escape");
    runtime().block_on(async {
        let job = start_and_wait_ready(with_mark(place.script(script), &mark)).await;
        // Some may be between fork and exec, when nothing can be read of them.
        assert!(marked(&mark).len() > 100);
        let mut aborted = false;
        job.kill(|| aborted = true).await.unwrap();
        assert!(aborted);
        assert_eq!(marked(&mark), Vec::<i32>::new());
        let end = job.wait().await;
        assert!(end.stopped);
        assert_eq!(end.how, EndedBy::Signal(9));
        // Once more is harmless.
        job.kill(|| {}).await.unwrap();
    });
}

#[test]
fn children_in_the_background_end_with_the_job() {
    let place = Place::new();
    let mark = unique("background");
    let (end, _) = run(with_mark(place.script("nohup sleep 1000 & setsid sleep 1000 & exit 5"), &mark));
    assert_eq!(end.how, exit(5));
    assert_eq!(marked(&mark), Vec::<i32>::new());
}

#[test]
fn a_stop_reaches_everybody_and_leaves_time_to_save() {
    // The shell dies at once of SIGTERM; its child still has work to do.
    let script = r#"
        python3 -c '
import signal, sys, time
def save(*_):
    open("saved", "w").write("checkpoint"); sys.exit(0)
signal.signal(signal.SIGTERM, save)
print("ready", flush=True)
while True: time.sleep(0.05)'
        echo never"#;
    let place = Place::new();
    runtime().block_on(async {
        let job = start_and_wait_ready(place.script(script)).await;
        job.terminate();
        let end = tokio::time::timeout(BOUND, job.wait()).await.unwrap();
        assert!(end.stopped);
        assert!(job.is_gone());
    });
    assert_eq!(fs::read_to_string(place.path("layer/upper/saved")).unwrap(), "checkpoint");
}

#[test]
fn who_ignores_a_stop_is_killed() {
    let place = Place::new();
    let mark = unique("ignore");
    let script = "trap '' TERM; (trap '' TERM; echo ready; while :; do sleep 0.05; done)";
    runtime().block_on(async {
        let job = start_and_wait_ready(with_mark(place.script(script), &mark)).await;
        job.terminate();
        assert!(tokio::time::timeout(Duration::from_millis(300), job.wait()).await.is_err());
        job.kill(|| {}).await.unwrap();
        assert_eq!(marked(&mark), Vec::<i32>::new());
        assert!(job.wait().await.stopped);
    });
}

#[test]
fn the_kill_switch_needs_no_runtime() {
    let place = Place::new();
    let mark = unique("switch");
    runtime().block_on(async {
        let job = start_and_wait_ready(with_mark(place.script("echo ready; sleep 1000"), &mark)).await;
        let switch = job.kill_switch();
        std::thread::spawn(move || switch.fire()).join().unwrap();
        tokio::time::timeout(BOUND, job.wait()).await.unwrap();
        assert_eq!(marked(&mark), Vec::<i32>::new());
    });
}

#[test]
fn a_dropped_job_is_a_killed_job() {
    let place = Place::new();
    let mark = unique("drop");
    runtime().block_on(async {
        let mut job = RunningJob::start(with_mark(place.script("sleep 1000"), &mark)).await.unwrap();
        let output = read_all(&mut job);
        drop(job);
        // Its output ends only when the last process is gone.
        output.join().unwrap();
    });
    assert_eq!(marked(&mark), Vec::<i32>::new());
}

#[test]
fn zombies_are_reaped() {
    let script = r#"
        for i in $(seq 300); do (setsid true &) ; done
        for try in $(seq 200); do
            count=$(grep -s -l '^State:.Z' /proc/[0-9]*/status | wc -l)
            [ $count = 0 ] && break
            sleep 0.05
        done
        echo $count"#;
    let (_, output) = run(Place::new().script(script));
    assert_eq!(text(&output), "0");
}

/// Run by the next test in a process of its own, which is then killed.
#[test]
#[ignore = "the other half of the_tree_dies_with_the_agent"]
fn agent_that_will_be_killed() {
    let Ok(mark) = std::env::var("LIMB_TEST_AGENT_MARK") else { return };
    let place = Place::new();
    runtime().block_on(async {
        let script = "setsid sleep 1000 & trap '' TERM HUP; echo ready; sleep 1000";
        let job = start_and_wait_ready(with_mark(place.script(script), &mark)).await;
        println!("the job is up");
        let _end = tokio::time::timeout(BOUND, job.wait()).await;
    });
}

#[test]
fn the_tree_dies_with_the_agent() {
    let mark = unique("orphan");
    // Under another name in the agent's own environment, which it does not pass on.
    let mut agent = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "killing::agent_that_will_be_killed", "--nocapture"])
        .env("LIMB_TEST_AGENT_MARK", &mark)
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let lines = BufReader::new(agent.stdout.take().unwrap()).lines();
    assert!(lines.map_while(Result::ok).any(|line| line.contains("the job is up")));
    let wanted = format!("LIMB_TEST_MARK={mark}");
    assert!(!marked(&wanted).is_empty());
    agent.kill().unwrap();
    agent.wait().unwrap();
    wait_for("the job to be gone", || marked(&wanted).is_empty());
}

#[test]
fn a_report_follows_the_steps() {
    let place = Place::new();
    let mut spec = place.script("exit 0");
    spec.setup = Some("true".to_owned());
    runtime().block_on(async {
        let job = RunningJob::start(spec).await.unwrap();
        assert!(job.started(JobStep::Setup).await);
        assert!(job.started(JobStep::Run).await);
        assert_eq!(job.wait().await.how, exit(0));
    });
    let mut spec = place.script("exit 0");
    spec.setup = Some("false".to_owned());
    runtime().block_on(async {
        let job = RunningJob::start(spec).await.unwrap();
        assert!(!job.started(JobStep::Run).await);
    });
    let mut spec = place.script("");
    spec.command = Command::Argv(vec![b"no-such-program".to_vec()]);
    runtime().block_on(async {
        let job = RunningJob::start(spec).await.unwrap();
        assert!(!job.started(JobStep::Run).await);
        assert_eq!(job.wait().await.how.exit_code(), 127);
    });
}

#[test]
fn a_fork_bomb_takes_nothing_but_its_own_limit() {
    let place = Place::new();
    let mark = unique("bomb");
    let mut spec =
        with_mark(place.script("bomb() { bomb | bomb & }; bomb 2>/dev/null; echo ready; sleep 1000"), &mark);
    spec.limits.pids = Some(100);
    if limb_agent::job::cgroup::Group::create(spec.limits).counts_processes() {
        runtime().block_on(async {
            let job = start_and_wait_ready(spec).await;
            assert!(marked(&mark).len() <= 100);
            job.kill(|| {}).await.unwrap();
            assert_eq!(marked(&mark), Vec::<i32>::new());
        });
    } else {
        eprintln!("not checked: no pids controller here");
    }
}

#[test]
fn a_kill_after_the_end_changes_nothing_of_it() {
    let place = Place::new();
    runtime().block_on(async {
        let job = RunningJob::start(place.script("exit 4")).await.unwrap();
        let end = job.wait().await;
        job.kill(|| {}).await.unwrap();
        assert_eq!(job.wait().await, end);
        assert!(!end.stopped);
    });
}
