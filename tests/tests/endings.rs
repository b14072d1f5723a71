//! How files of a job end that is stopped, killed or crashes: what home shows, what it keeps apart,
//! and what becomes of a changed workdir.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use limb_tests::home::{Client, Ended, Home, lacks_fuse, lacks_memory_controller};
use limb_tests::wait::wait_for;

const OUT: &str = "outputs: {/out: {dest: \"{root}/dest/{name}\"}}\n";

/// Writes and leaves open; says so; stays.
const HALF: &str = "import os, sys, time; f = open(sys.argv[1], 'wb', buffering=0); f.write(b'h' * 300000); \
                    os.mknod(sys.argv[1] + '.begun'); time.sleep(600)";

fn serve() -> Home {
    let mut home = Home::new();
    home.serve();
    home.write("src/half.py", HALF);
    home
}

/// A run that has printed `ready`.
fn ready(home: &Home, name: &str, yaml: &str) -> Client {
    let job = home.job(name, yaml);
    let client = home.start(&["run", "-y", &job]);
    wait_for("the job to be ready", || client.out().contains("ready").then_some(()));
    client
}

fn stop(home: &Home, name: &str, client: Client) -> Ended {
    assert_eq!(home.say(&["stop", name]).code, 0);
    client.wait()
}

fn kept_apart(home: &Home, ended: &Ended, run: &str, name: &str) {
    assert!(home.read(format!("dest/{run}/{name}")).is_none(), "half of {name} has its name: {ended:?}");
    let partial = home.read(format!("dest/{run}/{name}.partial"));
    assert!(partial.is_some_and(|bytes| bytes == vec![b'h'; 300_000]), "{name}: {ended:?}\n{}", home.log());
    assert!(
        ended.stderr.contains(&format!("dest/{run}/{name}.partial\n")),
        "the outcome names it: {ended:?}"
    );
}

/// What came home of a run's workdir: path and content.
fn changes(home: &Home, state: &str) -> Vec<(String, Vec<u8>)> {
    let runs = home.path(state).join("workdir.changes");
    let mut found = Vec::new();
    let mut look = vec![runs.clone()];
    while let Some(directory) = look.pop() {
        for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
            let path = entry.path();
            // The first part is the run's id.
            let name: PathBuf = path.strip_prefix(&runs).unwrap().components().skip(1).collect();
            let name = name.to_string_lossy().into_owned();
            if name.starts_with(".limb") {
                continue;
            }
            match entry.file_type().unwrap() {
                kind if kind.is_dir() => look.push(path),
                kind if kind.is_symlink() => {
                    let to = fs::read_link(&path).unwrap().to_string_lossy().into_owned();
                    found.push((name, format!("-> {to}").into_bytes()));
                }
                _ => found.push((name, fs::read(&path).unwrap())),
            }
        }
    }
    found.sort();
    found
}

fn named(list: &[(&str, &str)]) -> Vec<(String, Vec<u8>)> {
    list.iter().map(|(name, content)| ((*name).to_owned(), content.as_bytes().to_vec())).collect()
}

#[test]
fn what_a_job_saves_when_it_is_told_to_stop_takes_its_name_and_its_code_is_kept() {
    if lacks_fuse() {
        return;
    }
    let home = serve();
    let client = ready(
        &home,
        "saves",
        &format!(
            "{OUT}limits: {{stop_duration: 60s}}\nrun: |\n  exec python3 - <<'EOF'\n  import signal, sys, time\n  \
             f = open('/out/log', 'wb', buffering=0); f.write(b'before ')\n  \
             def save(*_):\n      with open('/out/state', 'wb') as g: g.write(b's' * 2500000)\n      \
             f.write(b'after'); f.close(); sys.exit(7)\n  \
             signal.signal(signal.SIGTERM, save)\n  print('ready', flush=True)\n  time.sleep(600)\n  EOF\n"
        ),
    );
    let ended = stop(&home, "saves", client);
    assert_eq!(ended.code, 7, "{ended:?}\n{}", home.log());
    assert!(home.read("dest/saves/state").is_some_and(|bytes| bytes == vec![b's'; 2_500_000]), "{ended:?}");
    assert_eq!(home.read("dest/saves/log").as_deref(), Some(&b"before after"[..]));
    assert!(!ended.stderr.contains("partial"), "{ended:?}");
    let run = home.ps("saves").unwrap();
    assert_eq!(run["outcome"]["exit_code"], 7, "{run}");
    home.assert_no_box_left();
}

#[test]
fn what_the_background_was_writing_when_the_job_ended_is_kept_apart() {
    if lacks_fuse() {
        return;
    }
    let home = serve();
    let ended = home.run(
        "background",
        &format!(
            "mounts: {{/src: \"{{root}}/src\"}}\n{OUT}run: |\n  python3 /src/half.py /out/model &\n  \
             while ! [ -e /out/model.begun ]; do sleep 0.02; done\n  echo whole > /out/whole\n  exit 0\n"
        ),
    );
    kept_apart(&home, &ended, "background", "model");
    assert_eq!(ended.code, 74, "not all results are home: {ended:?}");
    assert_eq!(home.ps("background").unwrap()["outcome"]["exit_code"], 74);
    assert_eq!(home.read("dest/background/whole").as_deref(), Some(&b"whole\n"[..]));
    home.assert_no_box_left();
}

#[test]
fn what_a_crashed_process_was_writing_is_kept_apart_while_the_job_goes_on() {
    if lacks_fuse() {
        return;
    }
    let home = serve();
    let client = ready(
        &home,
        "crashes",
        &format!(
            "mounts: {{/src: \"{{root}}/src\"}}\n{OUT}run: |\n  \
             for s in SEGV KILL ABRT; do\n    python3 /src/half.py /out/$s & child=$!\n    \
             while ! [ -e /out/$s.begun ]; do sleep 0.02; done\n    kill -$s $child; wait $child\n  done\n  \
             rm /out/*.begun\n  test $(cat /out/KILL | wc -c) = 300000 && echo readable > /out/marker\n  \
             echo ready\n  while ! [ -e {{root}}/run/go ]; do sleep 0.05; done\n  exit 3\n"
        ),
    );
    wait_for("a later file to be home", || home.read("dest/crashes/marker"));
    for name in ["SEGV", "KILL", "ABRT"] {
        assert!(home.read(format!("dest/crashes/{name}")).is_none(), "half of {name} has its name");
    }
    home.write("run/go", "");
    let ended = client.wait();
    for name in ["SEGV", "KILL", "ABRT"] {
        kept_apart(&home, &ended, "crashes", name);
    }
    home.assert_no_box_left();
}

#[test]
fn a_job_that_ignores_a_stop_gets_its_workdir_home_all_the_same() {
    if lacks_fuse() {
        return;
    }
    let home = serve();
    home.write("src/work/old.txt", "old\n");
    let client = ready(
        &home,
        "deaf",
        &format!(
            "workdir: \"{{root}}/src/work\"\nmounts: {{/src: \"{{root}}/src\"}}\n{OUT}limits: {{stop_duration: 8s}}\nrun: |\n  \
             trap '' TERM\n  echo more >> old.txt\n  mkdir deep\n  echo made > deep/made\n  echo closed > /out/closed\n  \
             python3 /src/half.py /out/half &\n  while ! [ -e /out/half.begun ]; do sleep 0.02; done\n  echo ready\n  \
             while true; do sleep 1; done\n"
        ),
    );
    let ended = stop(&home, "deaf", client);
    kept_apart(&home, &ended, "deaf", "half");
    assert_eq!(home.read("dest/deaf/closed").as_deref(), Some(&b"closed\n"[..]));
    assert_eq!(changes(&home, "state/limb"), named(&[("deep/made", "made\n"), ("old.txt", "old\nmore\n")]));
    assert_eq!(home.read("src/work/old.txt").as_deref(), Some(&b"old\n"[..]), "the source is not touched");
    home.assert_no_box_left();
}

#[test]
fn a_job_without_a_workdir_gets_home_what_it_wrote_where_it_stood() {
    if lacks_fuse() {
        return;
    }
    let home = serve();
    let ended = home.run("bare", "run: |\n  echo a > a\n  mkdir d\n  echo b > d/b\n  ln -s d/b link\n");
    assert_eq!(ended.code, 0, "{ended:?}\n{}", home.log());
    assert_eq!(changes(&home, "state/limb"), named(&[("a", "a\n"), ("d/b", "b\n"), ("link", "-> d/b")]));
    let list = home.say(&["results", "ls", "bare"]);
    assert!(list.stdout.contains("d/b"), "{list:?}");
    // One that writes nothing leaves nothing.
    let ended = home.run("idle", "run: pwd\n");
    assert_eq!(ended.code, 0, "{ended:?}");
    assert_eq!(fs::read_dir(home.path("state/limb/workdir.changes")).unwrap().count(), 1);
    home.assert_no_box_left();
}

/// A kernel may refuse an overlay over FUSE; here it is the colon in the path that cannot be said
/// to it. The workdir is then a tree of limb's own.
#[test]
fn a_workdir_gets_home_also_where_no_overlay_can_be_had() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    let state = home.path("state/a:b");
    let settings = String::from_utf8(home.read("config/limb/limb.toml").unwrap()).unwrap();
    home.write("config/limb/limb.toml", format!("{settings}state_dir = \"{}\"\n", state.display()));
    home.serve();
    let big: Vec<u8> = (0..3_000_000_u32).map(|n| u8::try_from(n % 251).unwrap()).collect();
    home.write("src/work/big", &big);
    home.write("src/work/old.txt", "old\n");
    home.write("src/work/gone.txt", "gone\n");
    home.write("src/work/same.txt", "same\n");
    home.write("src/half.py", HALF);
    let edits = "echo fs=$(stat -f -c %T .)\n  printf X | dd of=big bs=1 seek=1500000 conv=notrunc status=none\n  echo more >> old.txt\n  rm gone.txt\n  \
                 mkdir deep\n  echo made > deep/made\n  chmod 755 deep/made\n  ln -s deep/made link\n";
    let mut wanted_big = big.clone();
    wanted_big[1_500_000] = b'X';
    let check = |ended: &Ended| {
        assert!(ended.stdout.contains("fs=fuse"), "an overlay could be had: {ended:?}");
        let found = changes(&home, "state/a:b");
        let names: Vec<&str> = found.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["big", "deep/made", "link", "old.txt"], "{ended:?}\n{}", home.log());
        assert!(found[0].1 == wanted_big, "big differs");
        assert_eq!(found[1].1, b"made\n");
        assert_eq!(found[3].1, b"old\nmore\n");
        let runs = home.path("state/a:b/workdir.changes");
        let run = fs::read_dir(&runs).unwrap().flatten().next().unwrap().path();
        assert_eq!(fs::metadata(run.join("deep/made")).unwrap().permissions().mode() & 0o777, 0o755);
        fs::remove_dir_all(run).unwrap();
        assert_eq!(home.read("src/work/big").unwrap(), big, "the source is not touched");
    };
    let workdir = "workdir: \"{root}/src/work\"\nmounts: {/src: \"{root}/src\"}\n";
    let ended = home.run("layered", &format!("{workdir}run: |\n  {edits}"));
    assert_eq!(ended.code, 0, "{ended:?}\n{}", home.log());
    check(&ended);
    // Killed in a write: its mounts are aborted, and what it changed is read all the same.
    let client = ready(
        &home,
        "killed",
        &format!(
            "{workdir}limits: {{stop_duration: 8s}}\nrun: |\n  trap '' TERM\n  {edits}  echo ready\n  while true; do sleep 1; done\n"
        ),
    );
    let ended = stop(&home, "killed", client);
    check(&ended);
    let ended = home.run("bare", "run: |\n  echo a > a\n");
    assert_eq!(ended.code, 0, "{ended:?}\n{}", home.log());
    assert_eq!(changes(&home, "state/a:b"), named(&[("a", "a\n")]));
}

/// Prints the limit that the kernel has for the job, in either kind of hierarchy.
const SHOW_LIMIT: &str = "g=$(sed -n 's/^[0-9]*:memory://p' /proc/self/cgroup)\n  \
                          if [ -n \"$g\" ]; then f=/sys/fs/cgroup/memory$g/memory.limit_in_bytes\n  \
                          else f=/sys/fs/cgroup$(sed -n 's/^0:://p' /proc/self/cgroup)/memory.max; fi\n  \
                          echo limit=$(cat $f)\n";

fn limit_shown(output: &str) -> u64 {
    let text = output.lines().find_map(|line| line.strip_prefix("limit="));
    text.and_then(|text| text.parse().ok()).unwrap_or_else(|| panic!("no limit: {output}"))
}

#[test]
fn a_job_that_takes_more_memory_than_it_may_ends_as_out_of_memory_and_its_results_are_home() {
    if lacks_fuse() || lacks_memory_controller() {
        return;
    }
    let home = serve();
    let job = home.job(
        "greedy",
        &format!(
            "{OUT}limits: {{memory: 96MiB}}\nrun: |\n  {SHOW_LIMIT}  exec python3 - <<'EOF'\n  import os\n  \
             with open('/out/closed', 'wb') as f: f.write(b'c' * 2500000)\n  \
             g = open('/out/synced', 'wb', buffering=0); g.write(b's' * 2500000); os.fsync(g.fileno())\n  \
             held = []\n  while len(held) < 1000: held.append(b'x' * (1 << 20) + b'y' * len(held))\n  EOF\n"
        ),
    );
    let ended = home.say(&["run", "-y", "--json", &job]);
    assert_eq!(ended.code, 137, "{ended:?}\n{}", home.log());
    assert_eq!(limit_shown(&ended.stderr), 96 << 20);
    let said: serde_json::Value = serde_json::from_str(&ended.stdout).unwrap();
    let outcome = &said["outcome"];
    assert_eq!(outcome["job"], "signal 9 (out of memory)", "{ended:?}");
    assert_eq!(outcome["exit_code"], 137, "{ended:?}");
    assert_eq!(outcome["exit_origin"], "job", "{ended:?}");
    assert_eq!(outcome["destroy"], "confirmed", "{ended:?}");
    assert_eq!(home.ps("greedy").unwrap()["outcome"], *outcome);
    for name in ["closed", "synced"] {
        let bytes = home.read(format!("dest/greedy/{name}"));
        assert!(bytes.is_some_and(|bytes| bytes.len() == 2_500_000), "{name}: {ended:?}");
    }
    home.assert_no_box_left();
    // One process of several: the others go on, and the job's own code follows.
    let ended = home.run(
        "child",
        "limits: {memory: 96MiB}\nrun: |\n  python3 -c 'x = bytearray(300 << 20)'\n  code=$?\n  echo went on\n  exit $code\n",
    );
    assert_eq!(ended.code, 137, "{ended:?}");
    assert!(ended.stdout.contains("went on"), "{ended:?}");
    assert!(ended.stderr.contains("job exit 137 (out of memory)"), "{ended:?}");
    home.assert_no_box_left();
}

#[test]
fn a_job_that_says_nothing_of_memory_leaves_the_agent_what_it_needs() {
    if lacks_fuse() || lacks_memory_controller() {
        return;
    }
    let home = serve();
    let ended = home.run("modest", &format!("run: |\n  {SHOW_LIMIT}"));
    assert_eq!(ended.code, 0, "{ended:?}\n{}", home.log());
    let whole = limb_agent::job::cgroup::box_memory_bytes();
    let limit = limit_shown(&ended.stdout);
    assert!(limit < whole && limit >= whole / 2, "{limit} of {whole}");
    assert!(!home.events("modest").contains("memory-not-limited"));
    home.assert_no_box_left();
}
