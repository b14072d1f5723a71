//! The processes of a local box: started detached, found again in /proc, ended whole.
//!
//! Identity is the path of the box's own directory in a process's arguments, environment, root
//! or working directory, or being a child of such a process: it needs no pid on disk, so that no
//! crash can lose it and no reused pid can be mistaken for it.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use limb_common::clock;
use nix::sys::signal::{Signal, kill};
use nix::sys::wait::{WaitPidFlag, waitpid};
use nix::unistd::Pid;

/// Between two looks at /proc while waiting for processes to go.
const POLL: Duration = Duration::from_millis(20);

/// Starts the agent in its own session, with nothing of ours but its log. It is not a child that
/// anybody waits for: `list` reaps it while this process lives, init does afterwards.
pub(super) fn start(agent: &Path, settings: &Path, log: &Path) -> io::Result<()> {
    let log = std::fs::OpenOptions::new().append(true).create(true).open(log)?;
    let mut command = Command::new(agent);
    command
        .arg("run")
        .arg("--settings")
        .arg(settings)
        // A box knows nothing of home's environment.
        .env_clear()
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .env("LIMB_BOX", settings.parent().unwrap_or(settings))
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    for name in ["RUST_LOG", "LIMB_LOG", "RUST_BACKTRACE"] {
        if let Some(value) = std::env::var_os(name) {
            command.env(name, value);
        }
    }
    // SAFETY: setsid is async-signal-safe and touches no memory of ours.
    unsafe {
        command.pre_exec(|| nix::unistd::setsid().map(drop).map_err(io::Error::from));
    }
    command.spawn().map(drop)
}

/// One look at /proc.
#[derive(Debug)]
pub(super) struct Table {
    processes: BTreeMap<i32, Process>,
}

#[derive(Debug)]
struct Process {
    parent: i32,
    arguments: Vec<Vec<u8>>,
    environment: Vec<u8>,
    places: Vec<PathBuf>,
}

impl Table {
    pub(super) fn read() -> io::Result<Self> {
        reap_children();
        let mut processes = BTreeMap::new();
        for entry in std::fs::read_dir("/proc")? {
            let Ok(entry) = entry else { continue };
            let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok()) else {
                continue;
            };
            // A process that ends while we look is one that is gone.
            if let Some(process) = read_process(&entry.path()) {
                processes.insert(pid, process);
            }
        }
        Ok(Self { processes })
    }

    /// The agents that were started with this settings file.
    pub(super) fn agents(&self, settings: &Path) -> Vec<i32> {
        let wanted = settings.as_os_str().as_bytes();
        self.processes
            .iter()
            .filter(|(_, process)| process.arguments.iter().any(|argument| argument == wanted))
            .map(|(pid, _)| *pid)
            .collect()
    }

    /// Every process of the box in `dir`: those that name it, and all that they started.
    fn of_box(&self, dir: &Path) -> BTreeSet<i32> {
        let own = i32::try_from(std::process::id()).unwrap_or(0);
        let needle = dir.as_os_str().as_bytes();
        let mut found: BTreeSet<i32> = self
            .processes
            .iter()
            .filter(|(pid, process)| **pid != own && **pid > 1 && process.names(dir, needle))
            .map(|(pid, _)| *pid)
            .collect();
        loop {
            let children: Vec<i32> = self
                .processes
                .iter()
                .filter(|(pid, process)| found.contains(&process.parent) && !found.contains(pid))
                .map(|(pid, _)| *pid)
                .collect();
            if children.is_empty() {
                return found;
            }
            found.extend(children);
        }
    }
}

impl Process {
    fn names(&self, dir: &Path, needle: &[u8]) -> bool {
        let is_agent = self.arguments.iter().any(|argument| is_below(argument, needle))
            && self.arguments.first().is_some_and(|first| first.ends_with(b"limb-agent"));
        is_agent
            || self
                .environment
                .split(|byte| *byte == 0)
                .filter_map(|pair| pair.splitn(2, |byte| *byte == b'=').nth(1))
                .any(|value| is_below(value, needle))
            || self.places.iter().any(|place| place.starts_with(dir))
    }
}

/// `value` is `dir` or something under it.
fn is_below(value: &[u8], dir: &[u8]) -> bool {
    value.strip_prefix(dir).is_some_and(|rest| rest.is_empty() || rest.starts_with(b"/"))
}

fn read_process(proc: &Path) -> Option<Process> {
    let stat = std::fs::read(proc.join("stat")).ok()?;
    // The name may contain anything, also spaces and brackets: fields count from the last `)`.
    let tail = stat.rsplit(|byte| *byte == b')').next()?;
    let mut fields = std::str::from_utf8(tail).ok()?.split_ascii_whitespace();
    let state = fields.next()?;
    if state == "Z" || state == "X" {
        return None;
    }
    let parent = fields.next()?.parse().ok()?;
    let cmdline = std::fs::read(proc.join("cmdline")).unwrap_or_default();
    let places = ["cwd", "root"].iter().filter_map(|name| std::fs::read_link(proc.join(name)).ok()).collect();
    Some(Process {
        parent,
        arguments: cmdline.split(|byte| *byte == 0).map(<[u8]>::to_vec).collect(),
        environment: std::fs::read(proc.join("environ")).unwrap_or_default(),
        places,
    })
}

/// Collects agents that ended and are still our children. Only pids that /proc shows as zombies
/// of ours with the agent's name: other parts of the program wait for their own children.
fn reap_children() {
    let own = std::process::id();
    let Ok(threads) = std::fs::read_dir("/proc/self/task") else { return };
    for thread in threads.flatten() {
        let Ok(children) = std::fs::read_to_string(thread.path().join("children")) else { continue };
        for pid in children.split_ascii_whitespace().filter_map(|pid| pid.parse::<i32>().ok()) {
            let comm = std::fs::read(format!("/proc/{pid}/comm")).unwrap_or_default();
            if comm.starts_with(b"limb-agent") && pid.unsigned_abs() != own {
                // An agent that still runs stays; one that somebody else collected is gone.
                let _unused: nix::Result<_> = waitpid(Pid::from_raw(pid), Some(WaitPidFlag::WNOHANG));
            }
        }
    }
}

/// Ends every process of the box: politely first, so that the agent can unmount and wipe.
pub(super) fn end(dir: &Path, term_grace: Duration, kill_grace: Duration) -> io::Result<()> {
    let agents = Table::read()?.agents(&dir.join("settings.json"));
    signal(agents.into_iter(), Signal::SIGTERM);
    if wait_until_none(dir, term_grace, None)? {
        return Ok(());
    }
    if wait_until_none(dir, kill_grace, Some(Signal::SIGKILL))? {
        return Ok(());
    }
    let left = Table::read()?.of_box(dir);
    Err(io::Error::other(format!("processes {left:?} ignore SIGKILL")))
}

/// Whether none is left within `limit`. Signals go out again in each round: a fork bomb needs
/// more than one.
fn wait_until_none(dir: &Path, limit: Duration, with: Option<Signal>) -> io::Result<bool> {
    let deadline = clock::boottime() + limit;
    loop {
        let left = Table::read()?.of_box(dir);
        if left.is_empty() {
            return Ok(true);
        }
        if clock::boottime() >= deadline {
            return Ok(false);
        }
        if let Some(with) = with {
            signal(left.into_iter(), with);
        }
        std::thread::sleep(POLL);
    }
}

fn signal(pids: impl Iterator<Item = i32>, with: Signal) {
    for pid in pids {
        // One that is gone already is what we want.
        let _unused: nix::Result<()> = kill(Pid::from_raw(pid), with);
    }
}

/// A path as /proc/self/mountinfo writes it.
pub(super) fn unescape(field: &str) -> PathBuf {
    let bytes = field.as_bytes();
    let mut out = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let octal = bytes
            .get(at + 1..at + 4)
            .filter(|_| bytes[at] == b'\\')
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match octal {
            Some(byte) => {
                out.push(byte);
                at += 4;
            }
            None => {
                out.push(bytes[at]);
                at += 1;
            }
        }
    }
    PathBuf::from(OsStr::from_bytes(&out))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mountinfo_paths_are_unescaped() {
        assert_eq!(unescape(r"/a\040b\134c"), PathBuf::from(r"/a b\c"));
        assert_eq!(unescape(r"/plain\"), PathBuf::from(r"/plain\"));
    }

    #[test]
    fn a_box_is_not_mistaken_for_one_with_a_longer_name() {
        assert!(is_below(b"/x/box/private", b"/x/box") && is_below(b"/x/box", b"/x/box"));
        assert!(!is_below(b"/x/box2", b"/x/box"));
    }
}
