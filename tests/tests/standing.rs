//! Whether a coordinator runs, and who says why not: starts that fail, stops that are meant,
//! kills that are not, and what the commands say to all of it.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::net::TcpListener;
use std::process::Command;

use limb_tests::home::{Home, lacks, lacks_fuse};
use limb_tests::wait::wait_for;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

const HELD: &str = "outputs: {/out: {dest: \"{root}/dest/{name}\"}}\nrun: |\n  echo ready\n  \
                    while ! [ -e {root}/run/go ]; do sleep 0.05; done\n  echo x > /out/x\n  exit 5\n";

/// Pids of what serves this home: the supervisor, then the coordinator.
fn serving(home: &Home) -> Vec<i32> {
    let mut found: Vec<(i32, String)> =
        home.processes().into_iter().filter(|(_, command)| command.contains(" serve ")).collect();
    found.sort_by_key(|(_, command)| !command.contains("--supervise "));
    found.into_iter().map(|(pid, _)| pid).collect()
}

fn wait_until_nothing_serves(home: &Home) {
    wait_for("the coordinator and its supervisor to end", || serving(home).is_empty().then_some(()));
}

fn ends_right(home: &Home, name: &str) {
    home.write("run/go", "");
    let run = wait_for("the run to end", || home.ps(name).filter(|run| run["outcome"]["final"] == true));
    assert_eq!(
        (&run["outcome"]["exit_code"], &run["outcome"]["destroy"]),
        (&5.into(), &"confirmed".into()),
        "{run}"
    );
    assert_eq!(home.read(format!("dest/{name}/x")).as_deref(), Some(&b"x\n"[..]));
    home.assert_no_box_left();
}

#[test]
fn a_start_that_cannot_succeed_is_said_at_once_and_not_tried_for_ever() {
    let home = Home::new();
    assert_eq!(home.say(&["ps"]).code, 0);
    assert_eq!(home.say(&["serve", "--stop"]).code, 0);
    wait_until_nothing_serves(&home);
    // All of it in the one file: SQLite would mend the damage from the log beside it.
    let database = rusqlite::Connection::open(home.path("state/limb/limb.db")).unwrap();
    database.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |_| Ok(())).unwrap();
    drop(database);
    let good = |name: &str| home.read(format!("state/limb/{name}")).unwrap();
    let (database, key) = (good("limb.db"), good("ca.pem"));
    let newer = || {
        let database = rusqlite::Connection::open(home.path("state/limb/limb.db")).unwrap();
        database.pragma_update(None, "user_version", 99).unwrap();
    };
    let causes = [
        ("limb.db", "is damaged"),
        ("ca.pem", "cannot be read"),
        ("newer", "format 99"),
        ("socket", "no socket"),
    ];
    for (what, words) in causes {
        match what {
            "newer" => newer(),
            "socket" => fs::create_dir(home.path("state/limb/limb.sock")).unwrap(),
            file => drop(home.write(format!("state/limb/{file}"), vec![b'x'; 20_000])),
        }
        let by_hand = home.say(&["serve"]);
        assert_eq!(by_hand.code, 79, "{by_hand:?}");
        assert!(by_hand.stderr.contains(words), "{by_hand:?}");
        assert!(by_hand.stderr.ends_with("exit 79: limb: the coordinator cannot start\n"), "{by_hand:?}");
        let by_command = home.say(&["run", "-y", "--", "true"]);
        assert_eq!(by_command.code, 76, "{by_command:?}");
        assert!(by_command.stderr.contains(words) && by_command.stderr.contains("hint: "), "{by_command:?}");
        assert!(by_command.stderr.ends_with("exit 76: limb: no coordinator answers\n"), "{by_command:?}");
        wait_until_nothing_serves(&home);
        match what {
            "socket" => fs::remove_dir(home.path("state/limb/limb.sock")).unwrap(),
            "ca.pem" => drop(home.write("state/limb/ca.pem", &key)),
            _ => drop(home.write("state/limb/limb.db", &database)),
        }
    }
    let again = home.say(&["run", "-y", "--", "true"]);
    assert!(!again.stderr.contains("cannot start"), "{again:?}");
}

#[test]
fn a_start_that_may_succeed_later_is_tried_on_and_its_reason_is_said() {
    let home = Home::new();
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let listen = taken.local_addr().unwrap().to_string();
    let waiting = home.say(&["--set", &format!("listen={listen}"), "ps"]);
    assert_eq!(waiting.code, 76, "{waiting:?}");
    assert!(waiting.stderr.contains(&listen) && waiting.stderr.contains("goes on trying"), "{waiting:?}");
    assert!(!serving(&home).is_empty(), "its supervisor goes on");
    drop(taken);
    wait_for("the next try", || {
        (home.say(&["--set", &format!("listen={listen}"), "ps"]).code == 0).then_some(())
    });
}

#[test]
fn a_stop_that_was_meant_is_kept_until_somebody_wants_it_otherwise() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    let job = home.job("kept", HELD);
    let followers = [home.start(&["run", "-y", &job])];
    wait_for("the job to be ready", || followers[0].out().contains("ready").then_some(()));
    let [run] = followers;
    let (logs, events) = (home.start(&["logs", "-f", "kept"]), home.start(&["events", "-f", "kept"]));
    wait_for("both to follow", || {
        (logs.out().contains("ready") && events.out().contains("job-started")).then_some(())
    });
    assert_eq!(home.say(&["serve", "--stop"]).code, 64, "a run is live");
    assert_eq!(home.say(&["serve", "--stop", "--force"]).code, 0);
    for follower in [run, logs, events] {
        let ended = follower.wait();
        assert_eq!(ended.code, 76, "{ended:?}");
        assert!(ended.stderr.contains("was stopped"), "{ended:?}");
        assert!(ended.stderr.contains("limb serve"), "{ended:?}");
    }
    for command in [&["ps"][..], &["logs", "kept"], &["stop", "kept"]] {
        let ended = home.say(command);
        assert_eq!(ended.code, 76, "{ended:?}");
        assert!(ended.stderr.contains("was stopped"), "{ended:?}");
    }
    wait_until_nothing_serves(&home);
    assert_eq!(home.agents().len(), 1, "the run goes on");
    // New work is a reason to start.
    let other = home.say(&["run", "-y", "--", "sh", "-c", "exit 3"]);
    assert_eq!(other.code, 3, "{other:?}");
    assert_eq!(home.say(&["logs", "kept"]).stdout, "ready\n");
    ends_right(&home, "kept");
}

#[test]
fn a_supervisor_and_its_coordinator_that_are_killed_come_back_with_the_next_look() {
    if lacks_fuse() {
        return;
    }
    let home = Home::new();
    let job = home.job("orphan", HELD);
    assert_eq!(home.say(&["run", "-y", "--detach", &job]).code, 0);
    wait_for("the job to be ready", || home.say(&["logs", "orphan"]).stdout.contains("ready").then_some(()));
    let pids = serving(&home);
    assert_eq!(pids.len(), 2, "a supervisor and a coordinator");
    for pid in pids {
        kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    }
    wait_until_nothing_serves(&home);
    let ps = home.say(&["ps"]);
    assert!(ps.code == 0 && ps.stdout.contains("orphan"), "{ps:?}");
    ends_right(&home, "orphan");
}

#[test]
fn a_full_disk_is_said_and_loses_nothing() {
    if lacks("not root: no disk of its own", nix::unistd::geteuid().is_root()) {
        return;
    }
    let home = Home::new();
    let disk = home.path("state");
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=4m", "limb-test"])
        .arg(&disk)
        .status()
        .unwrap();
    assert!(mounted.success());
    let ended = home.say(&["run", "-y", "--", "sh", "-c", "exit 3"]);
    assert_eq!(ended.code, 3, "{ended:?}");
    let before = home.say(&["ps", "-a", "--json"]).stdout;
    let fill = || {
        let mut file = fs::File::options().append(true).create(true).open(disk.join("ballast")).unwrap();
        while std::io::Write::write_all(&mut file, &[0; 4096]).is_ok() {}
    };
    // Under a coordinator that runs.
    fill();
    let full = home.say(&["run", "-y", "--", "true"]);
    assert!(full.code != 0 && full.stderr.to_lowercase().contains("full"), "{full:?}");
    // And at a start.
    assert_eq!(home.say(&["ps", "-a"]).code, 0, "looking needs no room");
    for pid in serving(&home) {
        kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    }
    wait_until_nothing_serves(&home);
    fill();
    let full = home.say(&["ps"]);
    assert!(
        full.code == 0 || full.stderr.contains("No space left") || full.stderr.contains("full"),
        "{full:?}"
    );
    fs::remove_file(disk.join("ballast")).unwrap();
    wait_for("it to come back", || (home.say(&["ps"]).code == 0).then_some(()));
    let runs: Vec<Value> = serde_json::from_str(&home.say(&["ps", "-a", "--json"]).stdout).unwrap();
    let known: Vec<Value> = serde_json::from_str(&before).unwrap();
    assert!(known.iter().all(|run| runs.iter().any(|now| now["run_id"] == run["run_id"])), "{runs:?}");
}

#[test]
fn every_refusal_ends_with_the_same_line_and_every_empty_list_is_json() {
    let home = Home::new();
    for command in [
        &["ps", "--no-such-flag"][..],
        &["no-such-command"],
        &["run"],
        &["logs"],
        &["logs", "nobody"],
        &["cost", "--month", "November"],
        &["--set", "nothing", "ps"],
    ] {
        let ended = home.say(command);
        assert_eq!(ended.code, 64, "{command:?}: {ended:?}");
        let last = ended.stderr.lines().last().unwrap();
        assert_eq!(last, "exit 64: limb: refused before anything was started", "{command:?}: {ended:?}");
    }
    for command in
        [&["ps", "--json"][..], &["ps", "-a", "--json"], &["cost", "--json"], &["snapshot", "ls", "--json"]]
    {
        let ended = home.say(command);
        assert_eq!(
            serde_json::from_str::<Value>(&ended.stdout).unwrap(),
            Value::Array(vec![]),
            "{command:?}"
        );
    }
    for command in [&["reap", "--json"][..], &["config", "show", "--json"], &["doctor", "--json"]] {
        let ended = home.say(command);
        assert!(serde_json::from_str::<Value>(&ended.stdout).is_ok(), "{command:?}: {ended:?}");
    }
}

#[test]
fn an_attempt_that_never_was_is_no_empty_log() {
    if lacks_fuse() {
        return;
    }
    let home = Home::new();
    let job = home.job("once", "run: echo said\n");
    assert_eq!(home.say(&["run", "-y", &job]).code, 0);
    assert_eq!(home.say(&["logs", "once", "--attempt", "1"]).stdout, "said\n");
    for flags in [&["--attempt", "9"][..], &["-f", "--attempt", "2"]] {
        let ended = home.say(&[&["logs", "once"], flags].concat());
        assert_eq!(ended.code, 64, "{ended:?}");
        assert!(ended.stderr.contains("no attempt") && ended.stderr.contains("attempt 1"), "{ended:?}");
    }
    let results = home.say(&["results", "ls", "once", "--json"]);
    assert!(serde_json::from_str::<Value>(&results.stdout).is_ok(), "{results:?}");
}
