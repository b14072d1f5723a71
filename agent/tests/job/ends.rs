//! How a job ended is told as it was.

use std::os::unix::fs::PermissionsExt as _;

use limb_common::report::{EndedBy, JobStep};

use crate::support::{Place, argv, exit, run, runtime, text};

fn how(script: &str) -> EndedBy {
    run(Place::new().script(script)).0.how
}

#[test]
fn exit_codes_are_the_jobs_own() {
    for code in [0, 1, 2, 126, 127, 255] {
        assert_eq!(how(&format!("exit {code}")), exit(code));
    }
    // What the kernel keeps of it.
    assert_eq!(how("exit 256"), exit(0));
    assert_eq!(how("no-such-command-at-all"), exit(127));
    assert_eq!(how("python3 -c 'import sys; sys.exit(1)'"), exit(1));
}

#[test]
fn signals_are_told_as_signals() {
    for (name, number) in [("KILL", 9), ("TERM", 15), ("SEGV", 11)] {
        let end = run(Place::new().script(&format!("kill -{name} $$"))).0;
        assert_eq!(end.how, EndedBy::Signal(number));
        assert_eq!(end.how.exit_code(), 128 + number);
        assert!(!end.oom_killed && !end.stopped);
    }
}

#[test]
fn a_failure_inside_a_pipeline_counts() {
    assert_eq!(how("false | true"), exit(1));
    assert_eq!(how("false; true"), exit(0));
}

#[test]
fn a_failed_setup_ends_the_job_there() {
    let place = Place::new();
    let mut spec = place.script("echo ran");
    spec.setup = Some("echo set up; exit 3".to_owned());
    let (end, output) = run(spec);
    assert_eq!((end.step, end.how), (JobStep::Setup, exit(3)));
    assert_eq!(text(&output), "set up");
}

#[test]
fn setup_and_run_share_one_view() {
    let place = Place::new();
    let mut spec = place.script("cat $HOME/a /tmp/b here");
    spec.setup = Some("printf 1 >$HOME/a; printf 2 >/tmp/b; printf 3 >here".to_owned());
    let (end, output) = run(spec);
    assert_eq!((end.step, end.how), (JobStep::Run, exit(0)));
    assert_eq!(text(&output), "123");
}

#[track_caller]
fn cannot_start(place: &Place, words: &[&str], code: i32, says: &str) {
    match run(place.spec(argv(words))).0.how {
        EndedBy::CouldNotStart { code: found, why } => {
            assert_eq!(found, code, "{why}");
            assert!(why.contains(says), "{why}");
        }
        other => panic!("{words:?} ended by {other:?}"),
    }
}

#[test]
fn what_cannot_be_executed_is_told_with_the_reason() {
    let place = Place::new();
    let upper = place.path("layer/upper");
    let put = |name: &str, content: &str, mode: u32| {
        std::fs::write(upper.join(name), content).unwrap();
        std::fs::set_permissions(upper.join(name), std::fs::Permissions::from_mode(mode)).unwrap();
    };
    put("badly", "#!/no/such/interpreter\n", 0o755);
    put("crlf", "#!/bin/sh\r\necho\r\n", 0o755);
    put("plain", "echo no first line\n", 0o755);
    put("closed", "#!/bin/sh\n", 0o644);
    cannot_start(&place, &["no-such-program"], 127, "no such program");
    cannot_start(&place, &["/no/such/program"], 127, "no such file");
    cannot_start(&place, &["./badly"], 126, "/no/such/interpreter");
    cannot_start(&place, &["./crlf"], 126, "\\r");
    cannot_start(&place, &["./plain"], 126, "neither a program nor a script");
    cannot_start(&place, &["./closed"], 126, "chmod +x");
    cannot_start(&place, &["/usr"], 126, "is a directory");
    cannot_start(&place, &[""], 127, "no program");
}

#[test]
fn argv_goes_through_no_shell() {
    let (end, output) = run(Place::new().spec(argv(&["printf", "%s|", "a b", "$HOME", "*", ""])));
    assert_eq!(end.how, exit(0));
    assert_eq!(text(&output), "a b|$HOME|*||");
}

#[test]
fn a_kill_for_want_of_memory_has_its_name() {
    let place = Place::new();
    let mut spec = place.script("exec python3 -c 'x = bytearray(300 << 20)'");
    spec.limits.memory_bytes = Some(64 << 20);
    let group = limb_agent::job::cgroup::Group::create(spec.limits);
    if !group.counts_memory() {
        eprintln!("not checked: no memory controller here");
        return;
    }
    let end = run(spec).0;
    assert_eq!(end.how, EndedBy::Signal(9));
    assert!(end.oom_killed);
}

#[test]
fn output_is_raw_and_in_order() {
    let script = r"printf '\xff\x00\xe2\x96'; sleep 0.01; printf '\x88' >&2; printf 'end\r\n'";
    assert_eq!(run(Place::new().script(script)).1, b"\xff\x00\xe2\x96\x88end\r\n");
    let lines = run(Place::new().script("seq -f '%015.0f' 1 655360")).1;
    assert_eq!(lines.len(), 10 << 20);
    assert!(lines.chunks(16).zip(1..).all(|(line, n)| line == format!("{n:015}\n").as_bytes()));
}

#[test]
fn a_flood_of_output_slows_nobody_and_says_what_was_dropped() {
    use limb_agent::logs::{LogBuffer, LogLimits, capture};
    const PRINTED: usize = 50_000_000;
    let place = Place::new();
    let buffer = LogBuffer::new(place.dir.path(), LogLimits { ram_bytes: 1 << 20, spill_bytes: 4 << 20 });
    runtime().block_on(async {
        let spec = place.script(&format!("yes 2>/dev/null | head -c {PRINTED}; exit 0"));
        let mut job = limb_agent::job::RunningJob::start(spec).await.unwrap();
        let captured = capture(job.take_output().unwrap(), buffer.clone()).unwrap();
        // Home is away all the time.
        assert_eq!(job.wait().await.how.exit_code() % 141, 0);
        captured.join().unwrap();
    });
    let mut kept = Vec::new();
    loop {
        let (_, bytes) = buffer.next(1 << 20, 1 << 20);
        if bytes.is_empty() {
            break;
        }
        kept.extend(bytes);
        buffer.acknowledge(kept.len() as u64).unwrap();
    }
    assert!(buffer.is_drained());
    let said = String::from_utf8(kept).unwrap();
    let marker = said.lines().find(|line| line.starts_with("[limb: ")).unwrap();
    let dropped: usize = marker.split(' ').nth(1).unwrap().parse().unwrap();
    assert_eq!(dropped + said.len() - marker.len() - 2, PRINTED);
    assert_eq!(said.matches("[limb: ").count(), 1);
}
