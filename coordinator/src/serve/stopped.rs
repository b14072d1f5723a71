//! A deliberate stop is remembered: no command that only looks starts the coordinator again.
//! `limb serve` and a new submission do.

use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

fn mark(state_dir: &Path) -> PathBuf {
    state_dir.join("stopped")
}

pub(crate) fn remember(state_dir: &Path) -> io::Result<()> {
    std::fs::File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(mark(state_dir))
        .map(drop)
}

/// Somebody meant it to run again.
pub(crate) fn forget(state_dir: &Path) -> io::Result<()> {
    match std::fs::remove_file(mark(state_dir)) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

#[must_use]
pub(crate) fn is_remembered(state_dir: &Path) -> bool {
    mark(state_dir).exists()
}
