//! A provider that misbehaves, coordinators that die, money: whatever happens, in the end there is
//! no box and the ledger is closed.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::PathBuf;

use limb_common::id::RunId;
use limb_tests::fake_provider::Script;
use limb_tests::home::{Ended, Home, lacks_fuse};
use limb_tests::wait::wait_for;
use serde_json::{Value, json};

const ON: &str = "resources: {infra: fake}\noutputs: {/out: {dest: \"{root}/dest/{name}\"}}\n";
/// Runs until the test says `go`, and ends with a code that nobody else uses.
const HELD: &str = "run: |\n  echo ready\n  while ! [ -e {root}/run/go ]; do sleep 0.05; done\n  echo x > /out/x\n  exit 5\n";

fn write(home: &Home, script: &Script) {
    script.write(&home.path("state/limb"));
}

fn home(script: &Script) -> Home {
    let mut home = Home::with_fake_provider();
    write(&home, script);
    home.serve();
    home
}

/// How often the provider was asked to do this.
fn calls(home: &Home, what: &str) -> usize {
    let log = home.read("state/limb/fake/calls.log").unwrap_or_default();
    String::from_utf8_lossy(&log).lines().filter(|line| line.split(' ').next() == Some(what)).count()
}

/// The run's end as the ledger has it. No box is left then, and no interval is open.
fn closed(home: &Home, name: &str) -> Value {
    let run = wait_for("the run to end", || home.ps(name).filter(|run| run["outcome"]["final"] == true));
    home.assert_no_box_left();
    let costs: Value = serde_json::from_str(&home.say(&["cost", "--json"]).stdout).unwrap();
    for row in costs.as_array().unwrap() {
        assert_eq!(row["open"], false, "{row}");
    }
    run
}

fn detached(home: &Home, name: &str, yaml: &str) {
    let job = home.job(name, &format!("{ON}{yaml}"));
    let ended = home.say(&["run", "-y", "--detach", &job]);
    assert_eq!(ended.code, 0, "{ended:?}");
}

fn run(home: &Home, name: &str, yaml: &str) -> Ended {
    home.run(name, &format!("{ON}{yaml}"))
}

fn wait_running(home: &Home, name: &str) {
    wait_for("the job to be ready", || home.say(&["logs", name]).stdout.contains("ready").then_some(()));
}

fn boxes(home: &Home) -> Vec<PathBuf> {
    fs::read_dir(home.path("state/limb/local"))
        .map(|entries| entries.flatten().map(|entry| entry.path()).collect())
        .unwrap_or_default()
}

#[test]
fn a_500_after_a_create_leaves_exactly_one_box_and_it_is_adopted() {
    if lacks_fuse() {
        return;
    }
    let home = home(&Script { create_500_after_create: true, ..Script::default() });
    detached(&home, "answered-500", HELD);
    wait_running(&home, "answered-500");
    assert_eq!((home.agents().len(), boxes(&home).len()), (1, 1));
    home.write("run/go", "");
    let run = closed(&home, "answered-500");
    assert_eq!(run["outcome"]["exit_code"], 5, "{run}\n{}", home.log());
    assert_eq!(calls(&home, "create"), 1);
    assert!(home.events("answered-500").contains("create-ambiguous"));
}

#[test]
fn a_box_that_comes_late_after_a_crash_is_adopted_or_destroyed_and_never_two() {
    if lacks_fuse() {
        return;
    }
    for (quarantine_ms, adopted) in [(8_000, true), (500, false)] {
        let script = Script { create_timeout_late_ms: Some(1_500), quarantine_ms, ..Script::default() };
        let mut home = home(&script);
        detached(&home, "late", "run: exit 5\n");
        wait_for("the create", || (calls(&home, "create") == 1).then_some(()));
        home.kill_coordinator();
        home.serve();
        let run = wait_for("the end", || home.ps("late").filter(|run| run["outcome"]["final"] == true));
        let code = if adopted { 5 } else { 69 };
        assert_eq!(run["outcome"]["exit_code"], code, "{run}\n{}", home.log());
        if !adopted {
            wait_for("the late box to be destroyed", || {
                (home.events("late").contains("late-box") && boxes(&home).is_empty()).then_some(())
            });
        }
        closed(&home, "late");
        assert_eq!(calls(&home, "create"), 1);
    }
}

#[test]
fn a_teardown_outlasts_errors_and_a_box_that_is_gone_already() {
    if lacks_fuse() {
        return;
    }
    let home = home(&Script { terminate_500: 3, ..Script::default() });
    let ended = run(&home, "three-errors", "run: exit 5\n");
    assert_eq!(ended.code, 5, "{ended:?}");
    assert!(ended.stderr.contains("box destroyed: confirmed"), "{ended:?}");
    assert!(calls(&home, "terminate") >= 4, "{}", calls(&home, "terminate"));
    assert!(home.events("three-errors").contains("destroy-delayed"));
    closed(&home, "three-errors");

    write(&home, &Script { terminate_says_gone: true, ..Script::default() });
    let ended = run(&home, "gone-already", "run: exit 5\n");
    assert_eq!(ended.code, 5, "{ended:?}");
    assert!(ended.stderr.contains("box destroyed: confirmed"), "{ended:?}");
    closed(&home, "gone-already");
}

#[test]
fn a_list_that_is_wrongly_empty_once_kills_nothing_and_confirms_nothing() {
    if lacks_fuse() {
        return;
    }
    let home = home(&Script { sweep_interval_ms: 200, quarantine_ms: 200, ..Script::default() });
    detached(&home, "lied-about", HELD);
    wait_running(&home, "lied-about");
    let asked = calls(&home, "list");
    write(&home, &Script { list_empty_once: true, ..Script::default() });
    wait_for("the lie and two lists more", || (calls(&home, "list") >= asked + 3).then_some(()));
    assert_eq!(home.agents().len(), 1);
    // In the teardown: the first list is empty while the box still refuses to go.
    write(&home, &Script { list_empty_once: true, terminate_500: 2, ..Script::default() });
    home.write("run/go", "");
    let run = closed(&home, "lied-about");
    assert_eq!(run["outcome"]["exit_code"], 5, "{run}\n{}", home.log());
    assert!(calls(&home, "terminate") >= 3);
}

#[test]
fn no_capacity_is_said_in_words() {
    if lacks_fuse() {
        return;
    }
    let home = home(&Script { no_capacity: true, ..Script::default() });
    let ended = run(&home, "full", "run: exit 5\n");
    assert_eq!(ended.code, 69, "{ended:?}");
    for words in ["none left", "no box could be had", "never created"] {
        assert!(ended.stderr.contains(words), "{words}: {ended:?}");
    }
    closed(&home, "full");
}

#[test]
fn money_is_asked_for_bounded_and_accounted() {
    if lacks_fuse() {
        return;
    }
    // A cent per second.
    let home = home(&Script { price_micros_per_hour: 36_000_000, ..Script::default() });
    let yaml = "limits: {max_cost: 0.15, stop_duration: 2s}\nrun: |\n  echo x > /out/x\n  sleep 600\n";
    let job = home.job("paid", &format!("{ON}{yaml}"));
    let plan = home.say(&["plan", &job]);
    assert!(plan.stdout.contains("at most $0.15") && plan.stdout.contains("$36.00/h"), "{plan:?}");
    assert!(plan.stdout.contains("/dest/paid "), "{{name}} is filled in: {plan:?}");
    let unasked = home.say(&["run", &job]);
    assert_eq!(unasked.code, 64, "{unasked:?}");
    assert!(unasked.stderr.contains("-y"), "{unasked:?}");
    assert_eq!(calls(&home, "create"), 0);

    let ended = home.say(&["run", "-y", &job]);
    assert_eq!(ended.code, 73, "{ended:?}");
    assert!(ended.stderr.contains("max_cost"), "{ended:?}");
    assert!(ended.stderr.contains("at most $0.15"), "{ended:?}");
    assert_eq!(home.read("dest/paid/x").as_deref(), Some(&b"x\n"[..]));
    let ended = closed(&home, "paid");
    let spent = ended["cost_micros"].as_u64().unwrap();
    assert!((20_000..=150_000).contains(&spent), "{ended}");
    let costs: Value = serde_json::from_str(&home.say(&["cost", "--json"]).stdout).unwrap();
    assert_eq!(costs[0]["cost_micros"], spent, "{costs}");
    let shown = home.say(&["cost"]).stdout;
    assert!(shown.contains("paid") && shown.contains("total: $0."), "{shown}");
    // Not even the ending of a box would fit.
    let poor = run(&home, "poor", "limits: {max_cost: 0.10, stop_duration: 2s}\nrun: exit 5\n");
    assert_eq!(poor.code, 64, "{poor:?}");
    assert_eq!(calls(&home, "create"), 1);
}

#[test]
fn a_coordinator_killed_in_the_middle_of_a_teardown_finishes_it() {
    if lacks_fuse() {
        return;
    }
    let mut home = home(&Script { refuse_terminate_for_ms: 4_000, ..Script::default() });
    detached(&home, "half-gone", "run: |\n  echo x > /out/x\n  exit 5\n");
    wait_for("a terminate that was refused", || (calls(&home, "terminate") >= 1).then_some(()));
    home.kill_coordinator();
    home.serve();
    let run = closed(&home, "half-gone");
    assert_eq!(run["outcome"]["exit_code"], 5, "{run}\n{}", home.log());
    assert_eq!(run["outcome"]["destroy"], "confirmed");
    assert_eq!(home.read("dest/half-gone/x").as_deref(), Some(&b"x\n"[..]));
    assert_eq!(calls(&home, "create"), 1);
}

#[test]
fn a_box_away_from_home_needs_somebody_who_starts_the_coordinator_again() {
    if lacks_fuse() {
        return;
    }
    let home = home(&Script { is_local: false, ..Script::default() });
    let job = home.job("alone", &format!("{ON}run: exit 5\n"));
    let refused = home.say(&["run", "-y", &job]);
    assert_eq!(refused.code, 64, "{refused:?}");
    assert!(refused.stderr.contains("--unsupervised"), "{refused:?}");
    assert_eq!(calls(&home, "create"), 0);
    let taken = home.say(&["run", "-y", "--unsupervised", &job]);
    assert_eq!(taken.code, 5, "{taken:?}\n{}", home.log());
    closed(&home, "alone");
}

#[test]
fn a_second_coordinator_leaves_at_once() {
    let home = home(&Script::default());
    let second = home.say(&["serve"]);
    assert_eq!(second.code, 78, "{second:?}");
    assert!(second.stderr.contains("runs on"), "{second:?}");
    assert_eq!(home.say(&["ps"]).code, 0, "the first one goes on");
}

#[test]
fn reap_destroys_a_box_of_ours_that_no_run_explains_at_the_second_look() {
    if lacks_fuse() {
        return;
    }
    // Only `limb reap` looks.
    let home = home(&Script { sweep_interval_ms: 3_600_000, ..Script::default() });
    detached(&home, "explained", HELD);
    wait_running(&home, "explained");
    let record = boxes(&home)[0].join("instance.json");
    let mut record: Value = serde_json::from_slice(&fs::read(record).unwrap()).unwrap();
    home.write("run/go", "");
    closed(&home, "explained");

    record["name"] = json!("limb-stray");
    record["tags"]["limb-run"] = json!(format!("{}.1", RunId::random()));
    home.write("state/limb/local/limb-stray/instance.json", record.to_string());
    // Somebody else's box is nobody's business of ours.
    record["tags"]["limb-home"] = json!("h-somebody-else");
    home.write("state/limb/local/limb-foreign/instance.json", record.to_string());
    let look = home.say(&["reap", "--dry-run"]);
    assert!(look.stdout.contains("limb-stray") && look.stdout.contains("unexplained"), "{look:?}");
    assert_eq!(boxes(&home).len(), 2, "a look destroys nothing");
    let reap = home.say(&["reap"]);
    assert_eq!(reap.code, 0, "{reap:?}");
    assert!(reap.stdout.contains("unexplained: destroyed"), "{reap:?}");
    assert_eq!(boxes(&home), [home.path("state/limb/local/limb-foreign")]);
    fs::remove_dir_all(home.path("state/limb/local/limb-foreign")).unwrap();
    closed(&home, "explained");
}

#[test]
fn a_box_that_cannot_put_the_job_into_its_place_is_limbs_failure() {
    if lacks_fuse() {
        return;
    }
    let home = home(&Script::default());
    home.write("src/data/x", "x");
    // Only the box sees where the link leads: into /proc, where nothing can be mounted.
    std::os::unix::fs::symlink("/proc", home.path("src/link")).unwrap();
    let yaml = "mounts: {\"{root}/src/link/data\": \"{root}/src/data\"}\nrun: exit 5\n";
    let ended = run(&home, "no-place", yaml);
    assert_eq!(ended.code, 72, "{ended:?}");
    assert!(ended.stderr.contains("job never started: "), "{ended:?}");
    assert!(ended.stderr.contains("src/link/data cannot be a mount point"), "{ended:?}");
    assert!(ended.stderr.contains("exit 72: limb: the box never got ready for the job"), "{ended:?}");
    closed(&home, "no-place");
}

#[test]
fn a_stop_during_setup_is_no_success() {
    if lacks_fuse() {
        return;
    }
    let home = home(&Script::default());
    for (name, code, expected) in [("setup-0", 0, 77), ("setup-3", 3, 3)] {
        let setup = format!(
            "setup: |\n  trap 'exit {code}' TERM\n  echo ready\n  while :; do sleep 0.05; done\nrun: echo never\n"
        );
        let job = home.job(name, &format!("{ON}{setup}"));
        let client = home.start(&["run", "-y", &job]);
        wait_for("setup to be ready", || client.out().contains("ready").then_some(()));
        assert_eq!(home.say(&["stop", name]).code, 0);
        let ended = client.wait();
        assert_eq!(ended.code, expected, "{ended:?}");
        assert!(!ended.stdout.contains("never"), "{ended:?}");
        closed(&home, name);
    }
}

#[test]
fn a_lock_that_a_crash_left_on_a_destination_is_nobodys() {
    if lacks_fuse() {
        return;
    }
    let mut home = home(&Script::default());
    home.kill_coordinator();
    let dest = home.path("dest/locked");
    fs::create_dir_all(&dest).unwrap();
    let database = rusqlite::Connection::open(home.path("state/limb/limb.db")).unwrap();
    let row = (dest.to_str().unwrap().as_bytes(), RunId::random().to_string());
    database.execute("INSERT INTO result_locks VALUES (?1, ?2)", row).unwrap();
    drop(database);
    home.serve();
    let ended = run(&home, "locked", "run: echo x > /out/x; exit 5\n");
    assert_eq!(ended.code, 5, "{ended:?}");
    assert!(ended.stderr.contains("/dest/locked") && !ended.stderr.contains("{name}"), "{ended:?}");
    closed(&home, "locked");
}
