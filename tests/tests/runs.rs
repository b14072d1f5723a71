//! A job from submission to the destroyed box: what it gets, what comes back, which code.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use limb_tests::home::{Home, lacks_fuse};
use limb_tests::wait::wait_for;

const OUT: &str = "outputs: {/out: {dest: \"{root}/dest/{name}\"}}\n";

#[test]
fn a_job_reads_writes_and_everything_ends() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    home.write("src/data/big.bin", vec![7_u8; 3 << 20]);
    home.write("src/data/sub/small.txt", "small\n");
    home.write("src/work/tool.sh", "echo tool ran in \"$PWD\"\n");
    let ended = home.run(
        "success",
        &format!(
            "workdir: \"{{root}}/src/work\"\nmounts: {{/data: \"{{root}}/src/data\"}}\n{OUT}env: {{GREETING: \"good day\"}}\n\
             run: |\n  bash tool.sh\n  cat /data/sub/small.txt\n  echo \"$GREETING\"\n  sha256sum < /data/big.bin > /out/sum.txt\n  \
             echo changed > made-in-workdir.txt\n  echo to-stderr >&2\n"
        ),
    );
    assert_eq!(ended.code, 0, "{ended:?}\n{}", home.log());
    for expected in ["small\n", "good day\n", "to-stderr\n"] {
        assert!(ended.stdout.contains(expected), "{expected:?} is not in {:?}", ended.stdout);
    }
    assert!(ended.stderr.contains("job exit 0"), "{}", ended.stderr);
    assert!(ended.stderr.contains("data home"), "{}", ended.stderr);
    assert!(ended.stderr.contains("box destroyed: confirmed"), "{}", ended.stderr);
    assert!(ended.stderr.contains("$0.00"), "{}", ended.stderr);

    let sum = home.read("dest/success/sum.txt").expect("the result is home");
    assert!(String::from_utf8_lossy(&sum).len() > 64);
    let verify = home.say(&["results", "verify", "success"]);
    assert_eq!(verify.code, 0, "{verify:?}");
    let list = home.say(&["results", "ls", "success"]);
    assert!(list.stdout.contains("sum.txt") && list.stdout.contains("made-in-workdir.txt"), "{list:?}");
    assert!(!home.path("src/work/made-in-workdir.txt").exists(), "the source is not touched");

    let cost = home.say(&["cost", "--json"]);
    let rows: serde_json::Value = serde_json::from_str(&cost.stdout).expect("cost --json is JSON");
    assert_eq!(rows.as_array().map(Vec::len), Some(1), "{rows}");
    home.assert_no_box_left();

    // The owner's results are plain files that an ordinary hash confirms.
    let listed: serde_json::Value =
        serde_json::from_str(&home.say(&["results", "ls", "success", "--json"]).stdout).unwrap();
    let entry = listed
        .as_array()
        .unwrap()
        .iter()
        .find(|f| f["path"].as_str().is_some_and(|p| p.ends_with("sum.txt")))
        .unwrap();
    assert_eq!(entry["b3sum"].as_str().unwrap(), blake3::hash(&sum).to_hex().as_str());
}

#[test]
fn the_jobs_own_code_is_limbs_code() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    let cases = [
        ("exit 1", 1, "job exit 1"),
        ("exit 2", 2, "job exit 2"),
        ("exit 255", 255, "job exit 255"),
        ("exit 256", 0, "job exit 0"),
        ("/etc/passwd", 126, "126"),
        ("no-such-program-at-all", 127, "127"),
        ("false | true", 1, "job exit 1"),
        ("kill -KILL $$", 137, "signal 9"),
        ("kill -TERM $$", 143, "signal 15"),
        ("python3 -c 'import os; os.abort()'", 134, "signal 6"),
    ];
    for (index, (script, code, words)) in cases.iter().enumerate() {
        let ended = home.run(&format!("code-{index}"), &format!("run: \"{script}\"\n"));
        assert_eq!(ended.code, *code, "{script}: {ended:?}");
        assert!(ended.stderr.contains(words), "{script}: {}", ended.stderr);
        assert!(ended.stderr.contains("box destroyed: confirmed"), "{script}: {}", ended.stderr);
    }
    // A program given as it is, without a shell.
    let ended = home
        .say(&["run", "-y", "--on", "local", "--name", "argv", "--", "printf", "%s|", "a b", "$HOME", ""]);
    assert_eq!((ended.code, ended.stdout.as_str()), (0, "a b|$HOME||"), "{ended:?}");
    let ended =
        home.say(&["run", "-y", "--on", "local", "--name", "missing", "--", "no-such-program-at-all"]);
    assert_eq!(ended.code, 127, "{ended:?}");
    home.assert_no_box_left();
}

#[test]
fn a_failed_setup_ends_the_run_and_says_so() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    let ended = home.run("setup", "setup: |\n  echo in setup\n  exit 7\nrun: echo never\n");
    assert_eq!(ended.code, 7, "{ended:?}");
    assert!(ended.stdout.contains("in setup") && !ended.stdout.contains("never"), "{ended:?}");
    assert!(ended.stderr.contains("setup"), "the ending names the step: {}", ended.stderr);
    home.assert_no_box_left();
}

#[test]
fn ctrl_c_stops_the_job_keeps_what_it_wrote_and_destroys_the_box() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    let job = home.job(
        "interrupted",
        &format!("{OUT}run: |\n  echo kept > /out/closed.txt\n  trap 'echo got TERM; exit 9' TERM\n  echo ready\n  while :; do sleep 0.1; done\n"),
    );
    let client = home.start(&["run", "-y", &job]);
    wait_for("the job to be ready", || client.out().contains("ready").then_some(()));
    client.interrupt();
    let ended = client.wait();
    assert!(ended.stdout.contains("got TERM"), "{ended:?}");
    assert_ne!(ended.code, 0, "{ended:?}");
    assert!(ended.stderr.contains("box destroyed: confirmed"), "{ended:?}");
    assert_eq!(home.read("dest/interrupted/closed.txt").as_deref(), Some(&b"kept\n"[..]));
    home.assert_no_box_left();
}

#[test]
fn a_client_that_is_killed_harms_nothing_and_stop_works_from_elsewhere() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    let job = home.job("detached", "run: |\n  echo ready\n  sleep 600\n");
    let client = home.start(&["run", "-y", &job]);
    wait_for("the job to be ready", || client.out().contains("ready").then_some(()));
    client.kill();
    drop(client);
    assert_eq!(home.agents().len(), 1, "the run lives in the coordinator");
    assert!(home.say(&["logs", "detached"]).stdout.contains("ready"));
    let stop = home.say(&["stop", "detached"]);
    assert_eq!(stop.code, 0, "{stop:?}");
    wait_for("the run to be over", || home.ps("detached").filter(|run| run["outcome"]["final"] == true));
    home.assert_no_box_left();
}

#[test]
fn nothing_of_the_job_survives_its_end() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    let marker = home.path("run/alive-");
    let script = format!(
        "run: |\n  export MARK={}\n  setsid bash -c 'trap \"\" TERM HUP; sleep 1000' &\n  (bash -c 'sleep 1000' & ) \n  \
         nohup sleep 1000 >/dev/null 2>&1 &\n  for i in $(seq 50); do sleep 1000 & done\n  echo started\n",
        marker.display()
    );
    let ended = home.run("tree", &script);
    assert_eq!(ended.code, 0, "{ended:?}");
    home.assert_no_box_left();
    let left = limb_tests::processes::marked("sleep", &marker.to_string_lossy());
    assert_eq!(left, Vec::<i32>::new(), "processes of the job are still there");
}

#[test]
fn secrets_reach_the_job_and_nothing_else() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    let job = home.job("secret", &format!("secrets: [TOKEN_X]\n{OUT}run: |\n  printf %s \"$TOKEN_X\" | sha256sum > /out/hash.txt\n  cat /proc/[0-9]*/cmdline > /out/cmdlines.bin\n"));
    let secret = "s3cr3t-value-that-nobody-prints";
    let ended: limb_tests::home::Ended =
        home.limb(&["run", "-y", &job]).env("TOKEN_X", secret).output().unwrap().into();
    assert_eq!(ended.code, 0, "{ended:?}");
    assert!(!String::from_utf8_lossy(&home.read("dest/secret/cmdlines.bin").unwrap()).contains(secret));
    for text in [ended.stdout, ended.stderr, home.log(), home.events("secret")] {
        assert!(!text.contains(secret), "the secret was printed");
    }
    let without = home.say(&["run", "-y", &job]);
    assert_ne!(without.code, 0);
    assert!(without.stderr.contains("TOKEN_X"), "{without:?}");
}

#[test]
fn two_runs_at_once_do_not_see_each_other() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    home.write("src/a/x", "from a");
    home.write("src/b/x", "from b");
    let start = |name: &str| {
        let job = home.job(
            name,
            &format!("mounts: {{/data: \"{{root}}/src/{name}\"}}\n{OUT}run: |\n  cp /data/x /out/x\n  echo ready\n  while ! [ -e /out/go ]; do sleep 0.05; [ $SECONDS -gt 5 ] && break; done\n  ls / > /out/root.txt\n"),
        );
        home.start(&["run", "-y", &job])
    };
    let (a, b) = (start("a"), start("b"));
    wait_for("both to run", || (a.out().contains("ready") && b.out().contains("ready")).then_some(()));
    assert_eq!(home.agents().len(), 2);
    let (a, b) = (a.wait(), b.wait());
    assert_eq!((a.code, b.code), (0, 0), "{a:?} {b:?}");
    assert_eq!(home.read("dest/a/x").as_deref(), Some(&b"from a"[..]));
    assert_eq!(home.read("dest/b/x").as_deref(), Some(&b"from b"[..]));
    home.assert_no_box_left();
}

#[test]
fn ten_megabytes_of_output_arrive_byte_for_byte() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    let ended = home.run("loud", "run: |\n  seq 1 1300000\n  printf '\\xff\\x00\\xe2\\x96end'\n");
    assert_eq!(ended.code, 0, "{}", ended.stderr);
    let raw = home.limb(&["logs", "loud"]).output().unwrap().stdout;
    let mut expected: Vec<u8> = (1..=1_300_000).flat_map(|n: u32| format!("{n}\n").into_bytes()).collect();
    expected.extend_from_slice(b"\xff\x00\xe2\x96end");
    assert_eq!(raw.len(), expected.len());
    assert!(raw == expected, "the log differs");
}

#[test]
fn limits_end_a_run() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    let ended = home
        .run("late", "limits: {max_duration: 2s, stop_duration: 2s}\nrun: |\n  echo ready\n  sleep 600\n");
    assert_ne!(ended.code, 0, "{ended:?}");
    assert!(ended.stderr.contains("max_duration"), "{}", ended.stderr);
    home.assert_no_box_left();
}

#[test]
fn a_bad_job_file_is_refused_before_anything_starts() {
    let mut home = Home::new();
    home.serve();
    std::fs::write(home.path("file"), b"").unwrap();
    for (yaml, words) in [
        ("runn: echo\n", "run"),
        ("run: echo\nimage: ubuntu\n", "image"),
        ("run: echo\nnotify: [https://example.org]\n", "notify"),
        ("run: echo\nlimits: {max_duration: 90}\n", "90"),
        ("run: echo\nmounts: {/data: \"{root}/no-such-directory\"}\n", "no-such-directory"),
        ("run: echo\nmounts: {/data: {source: \"{root}/src\", class: sealed}}\n", "sealed"),
        ("run: echo\noutputs: {/out: {dest: \"{root}/state/limb/results\"}}\n", "state/limb"),
        ("run: echo\noutputs: {/out: {dest: \"{root}\"}}\n", "state/limb"),
        // Before any source is looked at.
        (
            "run: echo\nmounts: {/data: \"{root}/no-such\"}\noutputs: {/out: {dest: \"{root}/file\"}}\n",
            "not a directory",
        ),
        ("run: echo\noutputs: {/out: {dest: /proc/limb}}\n", "nothing can be written in /proc"),
        // A box reads none of home's keys.
        ("run: echo\nmounts: {/data: \"{root}\"}\n", "is limb's own"),
        ("run: echo\nworkdir: \"{root}/state/limb/store\"\n", "is limb's own"),
    ] {
        let ended = home.run("bad", yaml);
        assert!(ended.code == 64 && ended.stderr.contains(words), "{yaml}: {ended:?}");
        assert_eq!(home.agents(), Vec::<i32>::new());
    }
}

#[test]
fn a_job_on_this_machine_does_not_see_homes_state() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    let key = home.read("state/limb/ca.pem").expect("home has a key");
    assert!(String::from_utf8_lossy(&key).contains("PRIVATE KEY"));
    let ended = home.run(
        "curious",
        &format!("{OUT}run: |\n  cat {{root}}/state/limb/ca.pem; cat {{root}}/state/limb/limb.db\n  echo seen: $(ls -A {{root}}/state/limb | wc -l)\n  echo x > /out/x\n"),
    );
    assert_eq!(ended.code, 0, "{ended:?}");
    assert!(ended.stdout.contains("seen: 0\n"), "{ended:?}");
    assert!(!ended.stdout.contains("PRIVATE KEY") && !ended.stdout.contains("SQLite"), "{ended:?}");
    assert_eq!(home.read("dest/curious/x").as_deref(), Some(&b"x\n"[..]));
    home.assert_no_box_left();
}
