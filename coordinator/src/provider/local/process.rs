//! The processes of a local box: started detached, told from all others by the locks that they
//! hold on the box's life file (`limb_common::life`), ended whole.
//!
//! A process belongs to a box if it holds a part of the box's life, or descends from one that
//! does. Nothing else counts: not a working directory, not an argument, not an environment.
//!
//! Never: signal by a pid that was not pinned and checked after; read anything but `status` of
//! another process, since reading most other files waits for one that hangs in an execve.

mod pinned;

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use limb_common::{clock, life};
use nix::sys::signal::Signal;

use self::pinned::Pinned;

/// Between two looks while waiting for processes to go.
const POLL: Duration = Duration::from_millis(20);

fn life_file(dir: &Path) -> PathBuf {
    dir.join("life")
}

/// Boxes whose agent this process is starting. Nobody here may open their life file meanwhile: the
/// child would inherit that descriptor, and lose its lock when the exec closes it.
static STARTING: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());

fn starting() -> MutexGuard<'static, BTreeSet<PathBuf>> {
    STARTING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Starts the agent in its own session, with nothing of ours but its log and its life. It
/// outlives this process; whoever keeps the handle collects it when it has ended.
pub(super) fn start(agent: &Path, settings: &Path, dir: &Path) -> io::Result<Child> {
    starting().insert(dir.to_owned());
    let started = start_alone(agent, settings, dir);
    starting().remove(dir);
    started
}

fn start_alone(agent: &Path, settings: &Path, dir: &Path) -> io::Result<Child> {
    let life = File::options().append(true).create_new(true).mode(0o600).open(life_file(dir))?;
    // Held from before the fork: there is no moment at which the child could be missed.
    life::begin_birth(life.as_fd())?;
    let fd = life.as_raw_fd();
    let log = File::options().append(true).create(true).mode(0o600).open(dir.join("agent.log"))?;
    let mut command = Command::new(agent);
    command
        .arg("run")
        .arg("--settings")
        .arg(settings)
        // A box knows nothing of home's environment.
        .env_clear()
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .env(life::VARIABLE, fd.to_string())
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    for name in ["RUST_LOG", "LIMB_LOG", "RUST_BACKTRACE"] {
        if let Some(value) = std::env::var_os(name) {
            command.env(name, value);
        }
    }
    // SAFETY: the calls are async-signal-safe and touch no memory of ours.
    unsafe {
        command.pre_exec(move || {
            #[cfg(test)]
            super::tests::wait_before_birth();
            nix::unistd::setsid().map_err(io::Error::from)?;
            // What it starts stays its descendant, however it is detached.
            nix::sys::prctl::set_child_subreaper(true).map_err(io::Error::from)?;
            life::born(fd)
        });
    }
    command.spawn()
}

/// A box's life file.
enum Life {
    /// Being started here and now.
    Starting,
    /// Nothing was ever started.
    Never,
    Open(File),
}

fn open(dir: &Path) -> io::Result<Life> {
    let starting = starting();
    if starting.contains(dir) {
        return Ok(Life::Starting);
    }
    // Under the guard: a start that begins now makes the file anew.
    match File::options().append(true).open(life_file(dir)) {
        Ok(life) => Ok(Life::Open(life)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Life::Never),
        Err(error) => Err(error),
    }
}

/// Whether any process of the box is left.
pub(super) fn lives(dir: &Path) -> io::Result<bool> {
    match open(dir)? {
        Life::Starting => Ok(true),
        Life::Never => Ok(false),
        Life::Open(life) => Ok(!life::holders(life.as_fd())?.is_empty()),
    }
}

/// A box without processes. While it is kept, none can begin.
#[derive(Debug)]
pub(super) struct Sealed {
    _life: Option<File>,
}

/// Ends every process of the box: politely first, so that the agent can unmount and wipe.
pub(super) fn end(dir: &Path, term_grace: Duration, kill_grace: Duration) -> io::Result<Sealed> {
    let life = match open(dir)? {
        Life::Starting => return Err(io::Error::other("it is being started")),
        Life::Never => return Ok(Sealed { _life: None }),
        Life::Open(life) => life,
    };
    let mut family = Family { life: &life, members: Vec::new(), asked: Vec::new() };
    if family.wait_until_gone(term_grace, Family::ask)? || family.wait_until_gone(kill_grace, Family::kill)? {
        return Ok(Sealed { _life: Some(life) });
    }
    Err(io::Error::other(format!("{} ignore SIGKILL", family.names()?)))
}

/// All who must go.
struct Family<'a> {
    life: &'a File,
    members: Vec<Pinned>,
    /// Agents that got their SIGTERM.
    asked: Vec<i32>,
}

impl Family<'_> {
    fn wait_until_gone(
        &mut self,
        limit: Duration,
        step: fn(&mut Self) -> io::Result<()>,
    ) -> io::Result<bool> {
        let deadline = clock::boottime() + limit;
        loop {
            step(self)?;
            self.members.retain(Pinned::is_alive);
            if self.members.is_empty() && life::seal(self.life.as_fd())? {
                return Ok(true);
            }
            if clock::boottime() >= deadline {
                return Ok(false);
            }
            std::thread::sleep(POLL);
        }
    }

    /// Those who hold a part of the life, each for certain: it held one before and after.
    fn holders(&self, agents_only: bool) -> io::Result<Vec<Pinned>> {
        let pids = |holders: Vec<life::Holder>| -> Vec<i32> {
            holders.iter().filter(|holder| holder.is_agent || !agents_only).filter_map(|h| h.pid).collect()
        };
        let seen = pids(life::holders(self.life.as_fd())?);
        let pinned: Vec<Pinned> = seen.into_iter().filter_map(Pinned::new).collect();
        let still = pids(life::holders(self.life.as_fd())?);
        Ok(pinned.into_iter().filter(|process| still.contains(&process.pid())).collect())
    }

    /// SIGTERM once to each agent that shows up: one may be on its way to its birth.
    fn ask(&mut self) -> io::Result<()> {
        for agent in self.holders(true)? {
            if !self.asked.contains(&agent.pid()) {
                agent.signal(Signal::SIGTERM);
                self.asked.push(agent.pid());
            }
        }
        Ok(())
    }

    /// SIGKILL to everybody, again and again. The agent stands still first, so that what it
    /// started stays its descendant until all are known.
    fn kill(&mut self) -> io::Result<()> {
        let holders = self.holders(false)?;
        for agent in self.holders(true)? {
            agent.signal(Signal::SIGSTOP);
        }
        let roots: Vec<i32> = holders.iter().map(Pinned::pid).collect();
        let descendants = pinned::descendants(&roots)?;
        for process in descendants.into_iter().chain(holders) {
            process.signal(Signal::SIGKILL);
            if !self.members.iter().any(|known| known.pid() == process.pid()) {
                self.members.push(process);
            }
        }
        Ok(())
    }

    fn names(&self) -> io::Result<String> {
        let hidden = life::holders(self.life.as_fd())?.iter().filter(|holder| holder.pid.is_none()).count();
        let pids: Vec<i32> = self.members.iter().map(Pinned::pid).collect();
        Ok(match hidden {
            0 => format!("processes {pids:?}"),
            _ => format!("processes {pids:?} and {hidden} that cannot be seen from here"),
        })
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
}
