//! Kills, cuts and changed sources: what the job, the owner and the ledger see.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::process::Stdio;

use limb_tests::home::{Home, lacks_fuse};
use limb_tests::processes;
use limb_tests::wait::wait_for;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const OUT: &str = "outputs: {/out: {dest: \"{root}/dest/{name}\"}}\n";

/// Bytes that compress and dedupe with nothing; another seed, other bytes.
fn noise(seed: &str, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    blake3::Hasher::new().update(seed.as_bytes()).finalize_xof().fill(&mut bytes);
    bytes
}

#[test]
fn a_killed_coordinator_adopts_the_box_and_the_job_never_knows() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    let job = home.job(
        "adopted",
        &format!("{OUT}run: |\n  echo ready\n  while ! [ -e {{root}}/run/go ]; do sleep 0.05; done\n  echo done > /out/done.txt\n  exit 5\n"),
    );
    let client = home.start(&["run", "-y", &job]);
    wait_for("the job to be ready", || client.out().contains("ready").then_some(()));
    let before = home.agents();
    home.kill_coordinator();
    drop(client);
    home.serve();
    home.write("run/go", "");
    let run = wait_for("the run to end", || home.ps("adopted").filter(|run| run["outcome"]["final"] == true));
    assert_eq!(run["outcome"]["exit_code"], 5, "{run}\n{}", home.log());
    assert_eq!(before.len(), 1);
    assert_eq!(home.read("dest/adopted/done.txt").as_deref(), Some(&b"done\n"[..]));
    home.assert_no_box_left();
}

#[test]
fn a_result_that_went_again_is_not_called_home() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    let job = home.job(
        "gone",
        &format!("{OUT}run: |\n  mkdir /out/d\n  for f in a d/b d/c; do echo $f > /out/$f; sync /out/$f; done\n  echo ready\n  while ! [ -e {{root}}/run/go ]; do sleep 0.05; done\n"),
    );
    let client = home.start(&["run", "-y", &job]);
    wait_for("the job to be ready", || client.out().contains("ready").then_some(()));
    fs::remove_dir_all(home.path("dest/gone/d")).unwrap();
    home.write("run/go", "");
    let ended = client.wait();
    assert_eq!(ended.code, 74, "{ended:?}");
    assert!(ended.stderr.contains("data NOT all home: 1 file, 2 B are, verified"), "{}", ended.stderr);
    let said = "no longer home: 2 files missing or changed since they arrived; hint: `limb results verify ";
    assert!(ended.stderr.contains(said), "{}", ended.stderr);
    for name in ["d/b", "d/c"] {
        let path = home.path("dest/gone").join(name);
        assert!(ended.stderr.contains(&format!("no longer home: {}", path.display())), "{}", ended.stderr);
    }
    home.assert_no_box_left();
}

#[test]
fn a_coordinator_killed_in_each_phase_leaves_no_box_and_one_outcome() {
    if lacks_fuse() {
        return;
    }
    let phases = [
        "intended",
        "creating",
        "booting",
        "enrolled",
        "setting up",
        "running",
        "ending",
        "destroying",
        "closed",
    ];
    for (index, phase) in phases.iter().enumerate() {
        let mut home = Home::new();
        home.serve();
        let name = format!("killed-{index}");
        let job =
            home.job(&name, &format!("{OUT}setup: sleep 0.3\nrun: |\n  echo x > /out/x\n  sleep 0.3\n"));
        let client = home.start(&["run", "-y", "--detach", &job]);
        // The first moment at which the phase, or a later one, shows.
        wait_for(&format!("phase {phase}"), || {
            let now = home.ps(&name)?["phase"].as_str()?.to_owned();
            // "joined" and "creating (quarantined)" pass by.
            let at = phases.iter().position(|phase| *phase == now)?;
            (at >= index).then_some(())
        });
        home.kill_coordinator();
        drop(client);
        home.serve();
        let run = wait_for(&format!("the run killed at {phase} to end"), || {
            home.ps(&name).filter(|run| run["outcome"]["final"] == true)
        });
        // Between the intent and the call to the provider there is no box yet, and none to destroy.
        let early = index < 2 && run["instance"].is_null();
        let wanted = if early { "never created" } else { "confirmed" };
        assert_eq!(run["outcome"]["destroy"], wanted, "{phase}: {run}");
        home.assert_no_box_left();
        if run["outcome"]["exit_code"] == 0 {
            assert_eq!(home.read(format!("dest/{name}/x")).as_deref(), Some(&b"x\n"[..]), "{phase}");
        }
    }
}

#[test]
fn a_killed_agent_loses_nothing_that_was_durable_and_a_retry_resumes() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    let job = home.job(
        "lost",
        &format!(
            "{OUT}retry: {{on_events: [lost], max_attempts: 2}}\nlimits: {{disconnect_grace: 3s}}\nrun: |\n  \
             if [ -e /out/published.txt ]; then echo resumed from $(cat /out/published.txt); exit 0; fi\n  \
             echo first > /out/published.txt\n  \
             python3 - <<'EOF'\n  import os\n  f = open('/out/synced.bin', 'wb'); f.write(b'd' * 100000); f.flush(); os.fsync(f.fileno())\n  \
             g = open('/out/half.bin', 'wb'); g.write(b'h' * 300000); g.flush()\n  print('ready', flush=True)\n  import time; time.sleep(600)\n  EOF\n"
        ),
    );
    let client = home.start(&["run", "-y", &job]);
    wait_for("the job to be ready", || client.out().contains("ready").then_some(()));
    for pid in home.agents() {
        kill(Pid::from_raw(pid), Signal::SIGKILL).unwrap();
    }
    let ended = client.wait();
    assert_eq!(ended.code, 0, "{ended:?}\n{}", home.events("lost"));
    assert!(ended.stdout.contains("resumed from first"), "{ended:?}");
    assert_eq!(home.read("dest/lost/synced.bin").map(|b| b.len()), Some(100_000));
    assert!(home.read("dest/lost/half.bin").is_none(), "never published under its name");
    let events = home.events("lost");
    assert!(events.contains("lost"), "{events}");
    home.assert_no_box_left();
}

#[test]
fn a_cut_of_five_seconds_in_a_read_and_in_a_write_is_not_noticed() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::behind_a_cable();
    home.serve();
    let data = noise("cut", 24 << 20);
    home.write("src/data/big.bin", &data);
    let job = home.job(
        "cut",
        &format!(
            "mounts: {{/data: \"{{root}}/src/data\"}}\n{OUT}run: |\n  python3 - <<'EOF'\n  import os, hashlib, time\n  \
             h = hashlib.sha256()\n  f = open('/data/big.bin', 'rb', buffering=0)\n  h.update(f.read(1 << 20)); print('reading', flush=True)\n  \
             while not os.path.exists('{{root}}/run/go'): time.sleep(0.02)\n  \
             while b := f.read(1 << 20): h.update(b)\n  print(h.hexdigest(), flush=True)\n  \
             g = open('/out/copy.bin', 'wb', buffering=0)\n  f.seek(0)\n  g.write(f.read(4 << 20)); print('writing', flush=True)\n  \
             while not os.path.exists('{{root}}/run/go2'): time.sleep(0.02)\n  \
             while b := f.read(1 << 20): g.write(b)\n  os.fsync(g.fileno()); print('synced', flush=True)\n  EOF\n"
        ),
    );
    let client = home.start(&["run", "-y", &job]);
    for (word, go) in [("reading", "run/go"), ("writing", "run/go2")] {
        wait_for(word, || client.out().contains(word).then_some(()));
        home.cable().cut();
        home.write(go, "");
        // Five seconds of darkness is the fault itself, not a wait for something.
        let until = limb_common::clock::boottime() + std::time::Duration::from_secs(5);
        wait_for("five seconds to pass", || (limb_common::clock::boottime() > until).then_some(()));
        home.cable().restore();
    }
    let ended = client.wait();
    assert_eq!(ended.code, 0, "{ended:?}\n{}", home.log());
    assert!(ended.stdout.contains("synced"), "{ended:?}");
    assert!(home.read("dest/cut/copy.bin").unwrap() == data, "the copy differs");
    home.assert_no_box_left();
}

#[test]
fn a_link_that_stays_dead_kills_the_job_and_wipes_the_box() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::behind_a_cable();
    home.serve();
    home.write("src/data/big.bin", noise("dead", 8 << 20));
    let job = home.job(
        "dead",
        &format!("mounts: {{/data: \"{{root}}/src/data\"}}\n{OUT}limits: {{disconnect_grace: 3s}}\nrun: |\n  echo home > /out/before.txt\n  \
             python3 -c \"import os; f = open('/out/durable', 'w'); f.write('y'); f.flush(); os.fsync(f.fileno())\"\n  echo ready\n  cat /data/big.bin > /dev/null\n  sleep 600\n"),
    );
    let client = home.start(&["run", "-y", &job]);
    wait_for("the job to be ready", || client.out().contains("ready").then_some(()));
    let agents = home.agents();
    assert_eq!(agents.len(), 1);
    home.cable().cut();
    // The box ends by its own clock; home confirms with the provider.
    let ended = client.wait();
    assert_ne!(ended.code, 0, "{ended:?}");
    assert!(ended.stderr.contains("lost"), "{ended:?}");
    assert!(ended.stderr.contains("box destroyed: confirmed"), "{ended:?}");
    assert_eq!(home.read("dest/dead/durable").as_deref(), Some(&b"y"[..]));
    home.assert_no_box_left();
}

#[test]
fn a_byte_flipped_or_a_file_changed_at_home_is_an_error_and_never_wrong_data() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    // Each its own bytes: equal chunks would rightly be served from the box's cache.
    let changed = home.write("src/data/changed.bin", noise("changed", 6 << 20));
    let data = noise("flipped", 6 << 20);
    let flipped = home.write("src/data/flipped.bin", &data);
    let fine = noise("fine", 6 << 20);
    home.write("src/data/fine.bin", &fine);
    home.write("src/work/script.py", "print('old script')\n");
    let job = home.job(
        "changed",
        &format!(
            "workdir: \"{{root}}/src/work\"\nmounts: {{/data: \"{{root}}/src/data\"}}\n{OUT}run: |\n  echo ready\n  while ! [ -e {{root}}/run/go ]; do sleep 0.05; done\n  \
             python3 script.py\n  for f in changed flipped fine; do if cp /data/$f.bin /out/$f.bin; then echo $f ok; else echo $f failed; rm -f /out/$f.bin; fi; done\n"
        ),
    );
    let client = home.start(&["run", "-y", &job]);
    wait_for("the job to be ready", || client.out().contains("ready").then_some(()));
    // One file is rewritten (the ordinary case); in the other one bit changes and the time is put
    // back, as bit rot would look.
    fs::write(&changed, noise("rewritten", 5 << 20)).unwrap();
    let times = fs::metadata(&flipped).unwrap();
    let file = fs::File::options().write(true).open(&flipped).unwrap();
    file.write_all_at(&[data[3_000_000] ^ 1], 3_000_000).unwrap();
    file.set_modified(times.modified().unwrap()).unwrap();
    drop(file);
    home.write("src/work/script.py", "print('new script')\n");
    home.write("run/go", "");
    let ended = client.wait();
    assert!(ended.stdout.contains("old script"), "the workdir is home's copy: {ended:?}");
    assert!(ended.stdout.contains("changed failed") && ended.stdout.contains("flipped failed"), "{ended:?}");
    assert!(ended.stdout.contains("fine ok"), "{ended:?}");
    assert!(home.read("dest/changed/fine.bin").unwrap() == fine);
    let events = home.events("changed");
    assert!(events.contains("changed.bin") && events.contains("flipped.bin"), "{events}");
    home.assert_no_box_left();
}

#[test]
fn a_forked_child_that_closes_inherited_files_publishes_nothing() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    let job = home.job(
        "forked",
        &format!(
            "{OUT}run: |\n  python3 - <<'EOF'\n  import os, time\n  f = open('/out/half.bin', 'wb', buffering=0)\n  f.write(b'a' * 2000000)\n  \
             for _ in range(5):\n      if os.fork() == 0:\n          f.close(); os._exit(0)\n      os.wait()\n  \
             os.close(os.dup(f.fileno()))\n  open('/out/marker', 'w').close()\n  print('forked', flush=True)\n  \
             while not os.path.exists('{{root}}/run/go'): time.sleep(0.02)\n  f.write(b'b' * 1000)\n  f.close()\n  EOF\n"
        ),
    );
    let client = home.start(&["run", "-y", &job]);
    wait_for("the forks", || client.out().contains("forked").then_some(()));
    wait_for("a later file to be home", || home.read("dest/forked/marker"));
    assert!(home.read("dest/forked/half.bin").is_none(), "half a file was published");
    home.write("run/go", "");
    assert_eq!(client.wait().code, 0);
    assert_eq!(home.read("dest/forked/half.bin").map(|b| b.len()), Some(2_001_000));
}

#[test]
fn a_checkpoint_overwritten_twenty_times_is_never_torn_at_home() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    let job = home.job(
        "overwritten",
        &format!(
            "{OUT}run: |\n  python3 - <<'EOF'\n  import os\n  for i in range(1, 21):\n      with open('/out/ckpt.tmp', 'wb') as f:\n          \
             f.truncate(3 << 20)\n          f.write(bytes([i]) * (3 << 20))\n          f.flush(); os.fsync(f.fileno())\n      os.rename('/out/ckpt.tmp', '/out/ckpt')\n  \
             # and in place, without a temporary file\n  for i in range(21, 41):\n      with open('/out/inplace', 'wb') as f: f.write(bytes([i]) * (2 << 20))\n  EOF\n"
        ),
    );
    let client = home.start(&["run", "-y", &job]);
    let mut seen = std::collections::BTreeSet::new();
    wait_for("the last version", || {
        for (name, size) in [("ckpt", 3 << 20), ("inplace", 2 << 20)] {
            if let Some(bytes) = home.read(format!("dest/overwritten/{name}")) {
                assert_eq!(bytes.len(), size, "{name} is torn");
                assert!(bytes.iter().all(|b| *b == bytes[0]), "{name} mixes two versions");
                seen.insert(bytes[0]);
            }
        }
        (seen.contains(&20) && seen.contains(&40)).then_some(())
    });
    assert_eq!(client.wait().code, 0);
    let verify = home.say(&["results", "verify", "overwritten"]);
    assert_eq!(verify.code, 0, "{verify:?}");
}

#[test]
fn a_half_written_file_at_a_stop_is_kept_apart_and_named() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    let job = home.job(
        "fenced",
        &format!(
            "{OUT}limits: {{stop_duration: 5s}}\nrun: |\n  exec python3 -c \"import time; f = open('/out/model.bin', 'wb', buffering=0); f.write(b'm' * 1500000); print('ready', flush=True); time.sleep(600)\"\n"
        ),
    );
    let client = home.start(&["run", "-y", &job]);
    wait_for("the job to be ready", || client.out().contains("ready").then_some(()));
    assert_eq!(home.say(&["stop", "fenced"]).code, 0);
    let ended = client.wait();
    assert!(home.read("dest/fenced/model.bin").is_none(), "half a file under its final name");
    assert!(home.read("dest/fenced/model.bin.partial").is_some(), "{ended:?}");
    assert!(ended.stderr.contains("model.bin"), "the outcome names it: {}", ended.stderr);
}

/// Ended whatever becomes of the test.
struct Reader(std::process::Child);

impl Reader {
    /// Somebody who wants to know the environment of this process.
    fn of_environment(pid: i32) -> Self {
        let mut cat = std::process::Command::new("cat");
        cat.arg(format!("/proc/{pid}/environ")).stdin(Stdio::null()).stdout(Stdio::null());
        Self(cat.stderr(Stdio::null()).spawn().unwrap())
    }

    fn has_ended(&mut self) -> bool {
        self.0.try_wait().unwrap().is_some()
    }

    fn hangs(&self) -> bool {
        processes::hangs(i32::try_from(self.0.id()).unwrap())
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        drop(self.0.kill());
        drop(self.0.wait());
    }
}

/// The kernel closes close-on-exec files in the middle of an execve, with locks that most files of
/// /proc/PID take too. A close that waits for home makes that a long time.
#[test]
fn a_process_that_hangs_in_an_exec_delays_no_box_and_not_its_own_end() {
    if lacks_fuse() {
        return;
    }
    let mut stuck = Home::behind_a_cable();
    stuck.serve();
    let job = stuck.job(
        "stuck",
        "outputs: {/out: {dest: \"{root}/dest/{name}\", durability: close}}\nlimits: {stop_duration: 2s, disconnect_grace: 2m}\nrun: |\n  \
         exec python3 - <<'EOF'\n  import os, time\n  fd = os.open('/out/file', os.O_CREAT | os.O_WRONLY)\n  \
         os.write(fd, b'x' * 300000)\n  print('ready', flush=True)\n  \
         while not os.path.exists('{root}/run/go'): time.sleep(0.02)\n  os.execv('/bin/sh', ['sh', '-c', 'exit 6'])\n  EOF\n",
    );
    let client = stuck.start(&["run", "-y", &job]);
    wait_for("the job to be ready", || client.out().contains("ready").then_some(()));
    stuck.cable().cut();
    stuck.write("run/go", "");
    let python = wait_for("the job's process", || {
        stuck.processes().into_iter().find(|(_, name)| name.starts_with("python")).map(|(pid, _)| pid)
    });
    // Not by asking the kernel where it waits: that question hangs with it, too.
    let mut reader = Reader::of_environment(python);
    let mut looks = 0;
    wait_for("a reader of /proc to hang with it", || {
        if reader.has_ended() {
            reader = Reader::of_environment(python);
        }
        // One that only starts may wait for its disk for a moment.
        looks = if reader.hangs() { looks + 1 } else { 0 };
        (looks == 20).then_some(())
    });

    let mut other = Home::new();
    other.serve();
    let job = other.job("other", "run: exit 5\n");
    let neighbour = other.start(&["run", "-y", &job]);
    let run =
        wait_for("the other box to end", || other.ps("other").filter(|run| run["outcome"]["final"] == true));
    assert_eq!(run["outcome"]["destroy"], "confirmed", "{run}");
    assert_eq!(neighbour.wait().code, 5);
    other.assert_no_box_left();
    assert!(reader.hangs(), "it hung all the time");

    // The cable stays cut: only the provider can end it.
    assert_eq!(stuck.say(&["stop", "stuck"]).code, 0);
    let run =
        wait_for("its own box to end", || stuck.ps("stuck").filter(|run| run["outcome"]["final"] == true));
    assert_eq!(run["outcome"]["destroy"], "confirmed", "{run}");
    let ended = client.wait();
    assert!(ended.stderr.contains("box destroyed: confirmed"), "{ended:?}");
    wait_for("the reader to be free", || reader.has_ended().then_some(()));
    stuck.assert_no_box_left();
}
