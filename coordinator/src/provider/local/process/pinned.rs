//! One process for certain: a pid that cannot come to mean another one.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _, FromRawFd as _, OwnedFd};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Held by a pidfd; before Linux 5.3, which has none, by its number alone.
#[derive(Debug)]
pub(super) struct Pinned {
    pid: i32,
    fd: Option<OwnedFd>,
}

impl Pinned {
    /// Whoever has this pid now. None: nobody. The caller checks afterwards who it is.
    pub(super) fn new(pid: i32) -> Option<Self> {
        if pid <= 1 || pid.unsigned_abs() == std::process::id() {
            return None;
        }
        // SAFETY: plain numbers; the answer is a descriptor of our own.
        let answer = unsafe { libc::syscall(libc::SYS_pidfd_open, pid, 0) };
        match i32::try_from(answer) {
            // SAFETY: the kernel has just made it, and nobody else knows it.
            Ok(fd) if fd >= 0 => Some(Self { pid, fd: Some(unsafe { OwnedFd::from_raw_fd(fd) }) }),
            Ok(_) | Err(_) => {
                let unknown = io::Error::last_os_error().raw_os_error() == Some(libc::ENOSYS);
                unknown.then_some(Self { pid, fd: None })
            }
        }
    }

    pub(super) fn pid(&self) -> i32 {
        self.pid
    }

    /// One that is gone already is what we want; one that may not be signalled shows by staying.
    pub(super) fn signal(&self, with: Signal) {
        match &self.fd {
            Some(fd) => {
                // SAFETY: plain numbers and a null pointer, which asks for the usual siginfo.
                let _gone = unsafe {
                    libc::syscall(
                        libc::SYS_pidfd_send_signal,
                        fd.as_raw_fd(),
                        with as i32,
                        std::ptr::null::<libc::siginfo_t>(),
                        0,
                    )
                };
            }
            None => {
                let _gone: nix::Result<()> = kill(Pid::from_raw(self.pid), with);
            }
        }
    }

    /// One that waits to be collected has ended, and so have all its threads.
    pub(super) fn is_alive(&self) -> bool {
        match &self.fd {
            Some(fd) => {
                let mut asked = [PollFd::new(fd.as_fd(), PollFlags::POLLIN)];
                !matches!(poll(&mut asked, PollTimeout::ZERO), Ok(1..))
            }
            None => parent(self.pid).is_some(),
        }
    }
}

/// All that descend from `roots`. An ended process is nobody's descendant here.
pub(super) fn descendants(roots: &[i32]) -> io::Result<Vec<Pinned>> {
    let mut parents = BTreeMap::new();
    for entry in std::fs::read_dir("/proc")? {
        let Ok(entry) = entry else { continue };
        if let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok())
            && let Some(parent) = parent(pid)
        {
            parents.insert(pid, parent);
        }
    }
    let mut family: BTreeSet<i32> = roots.iter().copied().collect();
    loop {
        let before = family.len();
        family.extend(
            parents
                .iter()
                .filter(|(_, parent)| family.contains(parent))
                .map(|(pid, _)| *pid)
                .collect::<Vec<_>>(),
        );
        if family.len() == before {
            break;
        }
    }
    let pinned = family.into_iter().filter(|pid| !roots.contains(pid)).filter_map(Pinned::new);
    // A number that has come to mean somebody else since has another parent now.
    Ok(pinned.filter(|process| parent(process.pid).as_ref() == parents.get(&process.pid)).collect())
}

/// The parent of a process that has not ended.
fn parent(pid: i32) -> Option<i32> {
    let status = std::fs::read(format!("/proc/{pid}/status")).ok()?;
    let status = String::from_utf8_lossy(&status);
    let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
    if field("State:")?.starts_with(['Z', 'X']) {
        return None;
    }
    field("PPid:")?.parse().ok()
}
