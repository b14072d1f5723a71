//! Proof of life of a box that is processes on the owner's machine: record locks on one file.
//!
//! The kernel gives such a lock up when the process that took it ends, however it ends; a child
//! does not inherit it and an exec does not lose it; and it names its holder. So no pid is
//! stored anywhere, none can be mistaken after reuse, and no crash can lose one.
//!
//! | byte | held by |
//! |---|---|
//! | 0 | the agent, from before its program is executed |
//! | 1 – 15 | the outer and the inner helper of a job's tree; the outer one until the tree is gone |
//! | 16 | the birth: whoever is about to start the agent, and the child until it holds byte 0 |
//!
//! Whoever holds all of it ([`seal`]) knows that nothing lives, and that nothing will: a child
//! that is born late gets no lock and ends before it executes anything.
//!
//! Never: open this file a second time in a process that holds a part of it, or fork the agent
//! while another descriptor of it is open: closing any one of them gives the part up, and an
//! exec closes those that it does not pass on.

use std::io;
use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};

/// The number of the descriptor of the life file, in the environment of the agent and of its
/// helper. Not set where the agent owns the machine.
pub const VARIABLE: &str = "LIMB_LIFE";

const AGENT: libc::off_t = 0;
const TREE: std::ops::RangeInclusive<libc::off_t> = 1..=15;
const BIRTH: libc::off_t = 16;
/// To the end of the file and beyond.
const ALL: libc::off_t = 0;

/// Somebody who lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Holder {
    /// None: not to be told, like a box that is being born, or one in another PID namespace.
    pub pid: Option<i32>,
    pub is_agent: bool,
}

/// The birth begins. Ends when no process has this open file any more, or with [`born`].
///
/// # Errors
/// Somebody lives here, or the file system knows no locks.
pub fn begin_birth(file: BorrowedFd<'_>) -> io::Result<()> {
    set(file.as_raw_fd(), libc::F_OFD_SETLK, libc::F_WRLCK, BIRTH, 1)
}

/// To be called by the child itself, between fork and exec: from here on it is the agent, and
/// the descriptor stays open in it. Async-signal-safe.
///
/// # Errors
/// The box is sealed already.
pub fn born(fd: RawFd) -> io::Result<()> {
    set(fd, libc::F_SETLK, libc::F_WRLCK, AGENT, 1)?;
    // SAFETY: sets a flag of a descriptor; takes no pointers.
    if unsafe { libc::fcntl(fd, libc::F_SETFD, 0) } != 0 {
        return Err(io::Error::last_os_error());
    }
    set(fd, libc::F_OFD_SETLK, libc::F_UNLCK, BIRTH, 1)
}

/// To be called by each helper of a job's tree.
///
/// # Errors
/// The box is sealed already, or the descriptor is not that of a life file.
pub fn join_tree(fd: RawFd) -> io::Result<()> {
    let mut last = None;
    for byte in TREE {
        match set(fd, libc::F_SETLK, libc::F_WRLCK, byte, 1) {
            Ok(()) => return Ok(()),
            Err(error) => last = Some(error),
        }
    }
    Err(last.unwrap_or_else(|| io::Error::from(io::ErrorKind::WouldBlock)))
}

/// Takes all of it. False: somebody lives. Kept as long as this open file.
///
/// # Errors
/// The file system knows no locks.
pub fn seal(file: BorrowedFd<'_>) -> io::Result<bool> {
    match set(file.as_raw_fd(), libc::F_OFD_SETLK, libc::F_WRLCK, 0, ALL) {
        Ok(()) => Ok(true),
        Err(error) if matches!(error.raw_os_error(), Some(libc::EAGAIN | libc::EACCES)) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Everybody who lives.
///
/// # Errors
/// The file system knows no locks.
pub fn holders(file: BorrowedFd<'_>) -> io::Result<Vec<Holder>> {
    let fd = file.as_raw_fd();
    if get(fd, 0, ALL)?.is_none() {
        return Ok(Vec::new());
    }
    // Byte by byte: the kernel answers with any one lock of a range, not with the first.
    let mut found: Vec<Holder> = Vec::new();
    for byte in AGENT..=BIRTH {
        if let Some(pid) = get(fd, byte, 1)? {
            let holder = Holder { pid: (pid > 0).then_some(pid), is_agent: byte == AGENT };
            if holder.pid.is_none() || !found.iter().any(|known| known.pid == holder.pid) {
                found.push(holder);
            }
        }
    }
    Ok(found)
}

fn lock(kind: i32, start: libc::off_t, len: libc::off_t) -> libc::flock {
    // SAFETY: a structure of plain numbers, for which zeros are valid.
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    // Small constants of the same header, in the types that its fields have.
    lock.l_type = libc::c_short::try_from(kind).unwrap_or_default();
    lock.l_whence = libc::c_short::try_from(libc::SEEK_SET).unwrap_or_default();
    lock.l_start = start;
    lock.l_len = len;
    lock
}

fn set(fd: RawFd, how: i32, kind: i32, start: libc::off_t, len: libc::off_t) -> io::Result<()> {
    let wanted = lock(kind, start, len);
    // SAFETY: the structure lives through the call.
    if unsafe { libc::fcntl(fd, how, &raw const wanted) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

/// The pid of one who holds a part of this range; 0 or less where there is none to tell.
fn get(fd: RawFd, start: libc::off_t, len: libc::off_t) -> io::Result<Option<i32>> {
    let mut asked = lock(libc::F_WRLCK, start, len);
    // SAFETY: the structure lives through the call, which fills it.
    if unsafe { libc::fcntl(fd, libc::F_OFD_GETLK, &raw mut asked) } != 0 {
        return Err(io::Error::last_os_error());
    }
    Ok((i32::from(asked.l_type) != libc::F_UNLCK).then_some(asked.l_pid))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::os::unix::process::CommandExt as _;

    use super::*;

    #[test]
    fn a_child_that_is_born_is_told_and_a_seal_waits_for_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("life");
        let open = || std::fs::File::options().create(true).append(true).open(&path).unwrap();
        let (cradle, watcher) = (open(), open());
        assert!(holders(watcher.as_fd()).unwrap().is_empty());
        begin_birth(cradle.as_fd()).unwrap();
        assert_eq!(holders(watcher.as_fd()).unwrap(), [Holder { pid: None, is_agent: false }]);
        assert!(!seal(watcher.as_fd()).unwrap(), "a birth is life");
        drop(watcher);
        let fd = cradle.as_raw_fd();
        let mut command = std::process::Command::new("sleep");
        command.arg("60");
        // SAFETY: async-signal-safe calls alone.
        unsafe { command.pre_exec(move || born(fd)) };
        let mut child = command.spawn().unwrap();
        drop(cradle);
        let watcher = open();
        let pid = i32::try_from(child.id()).unwrap();
        assert_eq!(holders(watcher.as_fd()).unwrap(), [Holder { pid: Some(pid), is_agent: true }]);
        assert!(!seal(watcher.as_fd()).unwrap());
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(holders(watcher.as_fd()).unwrap().is_empty());
        assert!(seal(watcher.as_fd()).unwrap());
        // Who is born too late does not live.
        let late = open();
        assert!(begin_birth(late.as_fd()).is_err());
        let fd = late.as_raw_fd();
        let mut command = std::process::Command::new("true");
        // SAFETY: async-signal-safe calls alone.
        unsafe { command.pre_exec(move || born(fd)) };
        assert!(command.spawn().is_err());
        assert!(join_tree(fd).is_err());
    }
}
