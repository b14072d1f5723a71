//! The machine that the agent stands on: how it is fenced off, how one life is kept one, how
//! everything here is removed, and what "power off" means.
//!
//! Never: follow a mount while wiping. What the job's results mount shows is the owner's.

use std::fs;
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};
use nix::sys::resource::{Resource, setrlimit};

/// The lease ended, and this box with it.
pub const EXIT_LEASE_OVER: u8 = 75;

/// Ends what the agent stands on. Called last, from the leash's thread or from `main`.
pub trait HostPower: Send + Sync + 'static {
    /// Does not return where it works; must not block for long.
    fn power_off(&self, code: u8);
}

/// The agent is a process on somebody's machine: it ends, and its mounts with its namespace.
#[derive(Clone, Copy, Debug, Default)]
pub struct ProcessPower;

impl HostPower for ProcessPower {
    fn power_off(&self, code: u8) {
        // SAFETY: _exit runs no handlers and touches no memory; after an expiry the runtime may
        // be frozen, so returning from `main` is not an option.
        unsafe { libc::_exit(i32::from(code)) }
    }
}

/// The agent owns the machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct MachinePower;

impl HostPower for MachinePower {
    fn power_off(&self, _code: u8) {
        nix::unistd::sync();
        let ordered = std::process::Command::new("systemctl").args(["poweroff", "-ff"]).spawn();
        if let Err(error) = ordered {
            tracing::warn!(%error, "systemctl is not there; asking the kernel");
        }
        // The kernel's own ways, at once: systemctl may hang with the rest of the machine.
        // SAFETY: takes no pointers; everything worth keeping was synced above.
        if unsafe { libc::reboot(libc::RB_POWER_OFF) } != 0 {
            tracing::error!(error = %io::Error::last_os_error(), "the kernel refused to power off");
        }
        drop(fs::write("/proc/sysrq-trigger", "o"));
    }
}

/// No core dumps, no ptrace by others of the same user: keys and secrets are in this memory.
///
/// # Errors
/// The kernel refused.
pub fn harden() -> nix::Result<()> {
    nix::sys::prctl::set_dumpable(false)?;
    setrlimit(Resource::RLIMIT_CORE, 0, 0)
}

/// A mount namespace of our own, so that no mount outlives the agent. Must run before the
/// process has a second thread. Without root there is none: mounts are then fusermount3's.
///
/// # Errors
/// The kernel refused although we are root.
pub fn isolate_mounts() -> nix::Result<()> {
    if !nix::unistd::geteuid().is_root() {
        return Ok(());
    }
    unshare(CloneFlags::CLONE_NEWNS)?;
    let flags = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, flags, None::<&str>)
}

/// An agent may not begin here.
#[derive(Debug, thiserror::Error)]
pub enum LifeError {
    #[error("an agent has lived here before (boot {boot_id}); a box has one life: let home start a new one")]
    Lived { boot_id: String },
    #[error("could not use the private directory {}", path.display())]
    Directory { path: PathBuf, source: io::Error },
}

/// Marks this private directory as used. A second agent, after a crash or a reboot, finds the
/// mark and refuses.
///
/// # Errors
/// [`LifeError::Lived`], or the directory cannot be written.
pub fn begin_life(private_dir: &Path, boot_id: &str) -> Result<(), LifeError> {
    let directory = |source| LifeError::Directory { path: private_dir.to_owned(), source };
    fs::create_dir_all(private_dir).map_err(directory)?;
    let path = private_dir.join("life");
    match fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(&path) {
        Ok(mut file) => file.write_all(boot_id.as_bytes()).and_then(|()| file.sync_all()).map_err(directory),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            Err(LifeError::Lived { boot_id: fs::read_to_string(&path).unwrap_or_default() })
        }
        Err(error) => Err(directory(error)),
    }
}

/// Takes every mount below `dir` out of the tree, newest first, and removes the directory. What
/// cannot be unmounted is left alone, with all that is behind it.
///
/// # Errors
/// The first thing that could not be removed; the rest was tried.
pub fn wipe(dir: &Path) -> io::Result<()> {
    let dir = match dir.canonicalize() {
        Ok(dir) => dir,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error),
    };
    for path in mounts_below(&dir)?.into_iter().rev() {
        if let Err(error) = umount2(&path, MntFlags::MNT_DETACH) {
            tracing::warn!(%error, path = %path.display(), "could not detach a mount");
        }
    }
    let device = fs::symlink_metadata(&dir)?.dev();
    remove(&dir, device)
}

fn mounts_below(dir: &Path) -> io::Result<Vec<PathBuf>> {
    let table = fs::read("/proc/self/mountinfo")?;
    let points = table.split(|byte| *byte == b'\n').filter_map(|line| {
        let raw = line.split(|byte| *byte == b' ').nth(4)?;
        let path = PathBuf::from(std::ffi::OsString::from_vec(unescape(raw)));
        (path.starts_with(dir) && path != dir).then_some(path)
    });
    Ok(points.collect())
}

/// `\040` and its like, as the kernel writes them.
fn unescape(raw: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(raw.len());
    let mut rest = raw;
    while let [first, tail @ ..] = rest {
        let octal = (*first == b'\\').then(|| tail.get(..3)).flatten();
        let value = octal
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        if let Some(byte) = value {
            out.push(byte);
            rest = &tail[3..];
        } else {
            out.push(*first);
            rest = tail;
        }
    }
    out
}

fn remove(path: &Path, device: u64) -> io::Result<()> {
    let meta = fs::symlink_metadata(path)?;
    if meta.dev() != device {
        return Err(io::Error::other(format!("{} is still a mount", path.display())));
    }
    if !meta.is_dir() {
        return fs::remove_file(path);
    }
    let mut first = Ok(());
    for entry in fs::read_dir(path)? {
        let removed = entry.and_then(|entry| remove(&entry.path(), device));
        first = first.and(removed);
    }
    first.and_then(|()| fs::remove_dir(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_life_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        begin_life(dir.path(), "boot-a").unwrap();
        for boot in ["boot-a", "boot-b"] {
            let refused = begin_life(dir.path(), boot).unwrap_err();
            assert!(matches!(refused, LifeError::Lived { boot_id } if boot_id == "boot-a"));
        }
    }

    #[test]
    fn wiping_removes_everything_and_follows_no_link() {
        let dir = tempfile::tempdir().unwrap();
        let outside = dir.path().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("kept"), "x").unwrap();
        let private = dir.path().join("private");
        fs::create_dir_all(private.join("a/b")).unwrap();
        fs::write(private.join("a/b/c"), "x").unwrap();
        std::os::unix::fs::symlink(&outside, private.join("link")).unwrap();
        wipe(&private).unwrap();
        assert!(!private.exists() && outside.join("kept").exists());
        wipe(&private).unwrap();
    }

    #[test]
    fn mount_points_are_unescaped() {
        assert_eq!(unescape(br"/a\040b\134c\n"), br"/a b\c\n".to_vec());
    }
}
