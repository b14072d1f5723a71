//! Removes what a local box left: mounts first, then files.
//!
//! Never: delete through a mount. If one cannot be detached the directory stays and the teardown
//! tries again.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use nix::mount::{MntFlags, umount2};

use super::process::unescape;

/// Detaches every mount under `dir`, deepest first, then removes it.
pub(super) fn remove(dir: &Path) -> io::Result<()> {
    let dir = dir.canonicalize()?;
    for mount in mounts_under(&dir)?.into_iter().rev() {
        detach(&mount)?;
    }
    if let Some(left) = mounts_under(&dir)?.first() {
        return Err(io::Error::other(format!("{} is still mounted", left.display())));
    }
    std::fs::remove_dir_all(&dir)
}

/// In the order in which they were mounted.
fn mounts_under(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let table = std::fs::read_to_string("/proc/self/mountinfo")?;
    Ok(table
        .lines()
        .filter_map(|line| line.split(' ').nth(4))
        .map(unescape)
        .filter(|target| target.starts_with(dir))
        .collect())
}

fn detach(mount: &Path) -> io::Result<()> {
    let Err(error) = umount2(mount, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) else {
        return Ok(());
    };
    // Without privilege the setuid helper may do it for a mount of ours.
    let helped = Command::new("fusermount3")
        .args(["-u", "-z", "--"])
        .arg(mount)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .status()
        .is_ok_and(|status| status.success());
    if helped { Ok(()) } else { Err(error.into()) }
}
