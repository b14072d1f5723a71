//! One coordinator at a time: an exclusive lock on a file in the state directory, which the
//! kernel lets go when the process ends, however it ends.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use limb_common::clock;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};
use nix::sys::signal::kill;
use nix::unistd::Pid;

use super::ServeError;

/// Held as long as it lives.
#[derive(Debug)]
#[must_use = "dropping it lets another coordinator in"]
pub(super) struct CoordinatorLock(
    #[cfg_attr(not(test), expect(dead_code, reason = "held, never read"))] Flock<File>,
);

/// A process that the last coordinator was just starting when it was killed shares its lock until
/// the new program takes over: milliseconds, more on a busy machine.
const HEIR_BOUND: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(10);

pub(super) fn take(state: &Path) -> Result<CoordinatorLock, ServeError> {
    let path = state.join("coordinator.lock");
    let failed = |source| ServeError::State { path: path.clone(), source };
    let mut file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(failed)?;
    let deadline = clock::boottime() + HEIR_BOUND;
    loop {
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(mut held) => {
                // Whoever finds the lock taken judges its holder by this.
                let say = held
                    .set_len(0)
                    .and_then(|()| held.rewind())
                    .and_then(|()| write!(held, "{}", std::process::id()));
                say.map_err(failed)?;
                return Ok(CoordinatorLock(held));
            }
            Err((mut refused, Errno::EWOULDBLOCK)) => {
                let mut pid = String::new();
                // Nothing to read is nothing to say.
                drop(refused.rewind().and_then(|()| refused.read_to_string(&mut pid)));
                if lives(&pid) || clock::boottime() >= deadline {
                    return Err(ServeError::AlreadyRunning { state: state.to_owned(), pid });
                }
                std::thread::sleep(LOOK_AGAIN);
                file = refused;
            }
            Err((_, errno)) => return Err(failed(errno.into())),
        }
    }
}

/// Whether the process that wrote this is there. One that has not written yet is about to.
fn lives(pid: &str) -> bool {
    pid.parse().is_ok_and(|pid| kill(Pid::from_raw(pid), None) != Err(Errno::ESRCH))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_one_is_told_who_the_first_is() {
        let dir = tempfile::tempdir().unwrap();
        let first = take(dir.path()).unwrap();
        let Err(ServeError::AlreadyRunning { pid, .. }) = take(dir.path()) else { panic!("locked twice") };
        assert_eq!(pid, std::process::id().to_string());
        drop(first);
        drop(take(dir.path()).unwrap());
    }

    #[test]
    fn what_a_killed_one_was_just_starting_holds_the_lock_for_a_moment_only() {
        let dir = tempfile::tempdir().unwrap();
        let mut dead = std::process::Command::new("true").spawn().unwrap();
        let pid = dead.id();
        dead.wait().unwrap();
        let mut first = take(dir.path()).unwrap();
        first.0.set_len(0).unwrap();
        first.0.rewind().unwrap();
        write!(first.0, "{pid}").unwrap();
        std::thread::scope(|scope| {
            let second = scope.spawn(|| take(dir.path()));
            std::thread::sleep(LOOK_AGAIN * 3);
            assert!(!second.is_finished(), "its pid is nobody's");
            drop(first);
            drop(second.join().unwrap().unwrap());
        });
    }
}
