//! A stopped process wakes with its timers late. No effect may pass the guard after the deadline.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Command, Stdio};
use std::time::Duration;

use limb_agent::leash::Leash;
use limb_common::clock::boottime;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const CHILD: &str = "LIMB_TEST_LEASH_CHILD";
const TTL: Duration = Duration::from_millis(600);

/// Not a test of its own: what the other one starts.
#[test]
fn child() {
    if std::env::var_os(CHILD).is_none() {
        return;
    }
    let leash = Leash::start().unwrap();
    let sent = boottime();
    leash.arm(sent, TTL).unwrap();
    let mut out = std::io::stdout();
    writeln!(out, "deadline {}", (sent + TTL).since_boot().as_nanos()).unwrap();
    while leash.guard().is_ok() {
        // The effect is stamped after it: a stop between guard and effect would show.
        writeln!(out, "effect {}", boottime().since_boot().as_nanos()).unwrap();
    }
    writeln!(out, "over").unwrap();
}

#[test]
fn no_effect_passes_after_a_stop_that_outlasted_the_lease() {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["child", "--exact", "--nocapture"])
        .env(CHILD, "1")
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let pid = Pid::from_raw(i32::try_from(child.id()).unwrap());
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    let number = |line: &str| line.rsplit(' ').next().unwrap().parse::<u128>().unwrap();
    let deadline = number(&lines.by_ref().find(|line| line.contains("deadline")).unwrap());
    lines.by_ref().find(|line| line.contains("effect")).unwrap();
    kill(pid, Signal::SIGSTOP).unwrap();
    let stopped_at = boottime().since_boot().as_nanos();
    // The stop must outlast the lease: time itself is what is tested here.
    let wake = Duration::from_nanos(u64::try_from(deadline - stopped_at.min(deadline)).unwrap());
    let (_never, bell) = std::sync::mpsc::channel::<()>();
    assert!(bell.recv_timeout(wake + Duration::from_millis(700)).is_err());
    let woken_at = boottime().since_boot().as_nanos();
    kill(pid, Signal::SIGCONT).unwrap();
    let rest: Vec<_> = lines.collect();
    assert!(child.wait().unwrap().success());
    assert!(rest.iter().any(|line| line.contains("over")));
    // One effect may have been between its guard and its write when the stop came; it was begun
    // before the deadline. A second one would have passed the guard after it.
    let late =
        rest.iter().filter(|line| line.contains("effect")).filter(|line| number(line) >= woken_at).count();
    assert!(late <= 1, "{late} effects after the lease was over");
}
