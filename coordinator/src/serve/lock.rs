//! One coordinator at a time: an exclusive lock on a file in the state directory, which the
//! kernel lets go when the process ends, however it ends.

use std::fs::{File, OpenOptions};
use std::io::{Read as _, Seek as _, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use super::ServeError;

/// Held as long as it lives.
#[derive(Debug)]
#[must_use = "dropping it lets another coordinator in"]
pub(super) struct CoordinatorLock(#[expect(dead_code, reason = "held, never read")] Flock<File>);

pub(super) fn take(state: &Path) -> Result<CoordinatorLock, ServeError> {
    let path = state.join("coordinator.lock");
    let failed = |source| ServeError::State { path: path.clone(), source };
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(failed)?;
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(mut held) => {
            // For people; the lock itself is what counts.
            let say = held
                .set_len(0)
                .and_then(|()| held.rewind())
                .and_then(|()| write!(held, "{}", std::process::id()));
            say.map_err(failed)?;
            Ok(CoordinatorLock(held))
        }
        Err((mut file, Errno::EWOULDBLOCK)) => {
            let mut pid = String::new();
            // Nothing to read is nothing to say.
            drop(file.read_to_string(&mut pid));
            Err(ServeError::AlreadyRunning { state: state.to_owned(), pid })
        }
        Err((_, errno)) => Err(failed(errno.into())),
    }
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
}
