//! One FUSE mount, from mount(2) to the last reply. Both mounts of the agent (the working set
//! and the results) go through here.
//!
//! We mount ourselves and hand the descriptor to fuser, so that only this module ever unmounts:
//! fuser 0.18 takes an unmounted session for a mounted one and would unmount whatever has come
//! to the same path since.
//!
//! Never hangs: [`MountSession::abort`] is one write to a descriptor that was opened when the
//! mount was made; [`MountSession::unmount`] bounds each wait and falls back to the abort.

mod capabilities;
mod control;
mod device;
mod guard;
mod storer;

pub use capabilities::request_capabilities;
pub use storer::{Stored, Storer};

use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fuser::{Config, Filesystem, Notifier, Session, SessionACL};
use tokio_util::sync::CancellationToken;

use self::guard::Guarded;
use self::storer::Gate;

/// More threads than this gain nothing: metadata is answered from memory, reads reply elsewhere.
const MAX_THREADS: usize = 8;
/// How long a healthy file system may take to write back what is dirty when it is unmounted.
const DETACH_GRACE: Duration = Duration::from_secs(2);
/// An aborted connection ends its threads at once; more means that the kernel is in trouble.
const END_GRACE: Duration = Duration::from_secs(2);
/// One FUSE request and one chunk. More multiplies what a random page fault drags in.
const READ_AHEAD_KB: u32 = 1024;

/// What to mount, and where.
#[derive(Clone, Debug)]
pub struct MountOptions {
    /// An existing directory, best a private fresh one.
    pub path: PathBuf,
    pub read_only: bool,
    /// Shown in the mount table as `limb-NAME` and in the log: letters, digits, `-`, `_`, `.`.
    pub name: String,
    /// Cancelled by [`AbortHandle::abort`]. The file system must answer
    /// every waiting request with an error when it fires: where the kernel's abort cannot be
    /// reached (no root, no fusectl) this is what frees a blocked job.
    pub stop: CancellationToken,
}

/// A mount could not be made or ended.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    #[error("{0:?} cannot be a mount's name: it has other characters than letters, digits, - _ .")]
    BadName(String),
    #[error("{} is not a directory that can be mounted on", path.display())]
    MountPoint {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("/dev/fuse cannot be opened; hint: load the kernel module (`modprobe fuse`)")]
    NoDevice {
        #[source]
        source: io::Error,
    },
    #[error("the kernel refused to mount on {}", path.display())]
    Refused {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("fusermount3 did not mount on {}: {detail}; hint: {}", path.display(), helper_hint(detail))]
    Helper { path: PathBuf, detail: String },
    #[error("the mount on {} is not in /proc/self/mountinfo", path.display())]
    NotListed { path: PathBuf },
    #[error("the session on {} could not start", path.display())]
    Session {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
    #[error("{} is still mounted; hint: `umount -l` it when nothing uses it", path.display())]
    StillMounted { path: PathBuf },
    #[error("the connection of {} could not be aborted", path.display())]
    Abort {
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// What a person does about fusermount3's complaint.
fn helper_hint(detail: &str) -> &'static str {
    if detail.contains("/dev/fuse") && detail.contains("Permission denied") {
        "let every user open /dev/fuse: `chmod 666 /dev/fuse`"
    } else if detail.contains("/dev/fuse") || detail.contains("fuse device") {
        "load the kernel module (`modprobe fuse`); in a container: --device /dev/fuse"
    } else {
        "install the package fuse3"
    }
}

/// Aborts one mount's connection.
#[derive(Clone, Debug)]
pub struct AbortHandle {
    /// The connection's own file under fusectl, opened when the mount was made.
    kernel: Option<Arc<File>>,
    stop: CancellationToken,
    pushes: Arc<Gate>,
}

impl AbortHandle {
    /// Fails every request that waits and every later one. One write(2) and no allocation where
    /// fusectl is there; safe to call more than once, from any thread, after the unmount too
    /// (the kernel never gives the file another connection).
    ///
    /// # Errors
    /// When the kernel refused the write. Without fusectl the stop token alone is what frees
    /// waiting requests, and that is no error.
    pub fn abort(&self) -> io::Result<()> {
        self.pushes.shut();
        let outcome = self.kernel.as_deref().map_or(Ok(()), |mut file| file.write_all(b"1"));
        self.stop.cancel();
        match outcome {
            // The connection is gone already.
            Err(error) if matches!(error.raw_os_error(), Some(libc::ENOTCONN | libc::ENOENT)) => Ok(()),
            outcome => outcome,
        }
    }
}

/// A live mount. Dropping it unmounts.
#[derive(Debug)]
pub struct MountSession {
    path: PathBuf,
    name: String,
    minor: u32,
    abort: AbortHandle,
    notifier: Notifier,
    /// Closes when the session's threads have ended.
    ended: Mutex<Receiver<()>>,
    over: AtomicBool,
}

impl MountSession {
    /// Mounts `fs`: by mount(2) as root, through fusermount3 otherwise. Returns when the kernel
    /// and the file system have agreed on their options; requests are served from then on.
    ///
    /// # Errors
    /// [`MountError`]; nothing stays mounted.
    pub fn mount<F: Filesystem>(fs: F, options: MountOptions) -> Result<Self, MountError> {
        let MountOptions { path, read_only, name, stop } = options;
        if name.is_empty() || !name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.".contains(&b)) {
            return Err(MountError::BadName(name));
        }
        let path = path
            .canonicalize()
            .and_then(|full| if full.is_dir() { Ok(full) } else { Err(io::ErrorKind::NotADirectory.into()) })
            .map_err(|source| MountError::MountPoint { path, source })?;
        let root = nix::unistd::geteuid().is_root();
        let device = device::mount(&path, &name, read_only, root)?;
        let entry = control::find_mount(&path);
        let Some(minor) = entry.map(|entry| entry.minor) else {
            device::detach(&path, root);
            return Err(MountError::NotListed { path });
        };
        let kernel = control::open_abort(minor, root)
            .inspect_err(|error| {
                tracing::warn!(mount = name, %error, "fusectl is out of reach: a stuck request can only be freed from inside the file system");
            })
            .ok()
            .map(Arc::new);
        let abort = AbortHandle { kernel, stop, pushes: Arc::default() };
        let started = start(fs, device, &name, root);
        let (notifier, ended) = started.map_err(|source| {
            device::detach(&path, root);
            MountError::Session { path: path.clone(), source }
        })?;
        if root {
            control::widen_read_ahead(minor, READ_AHEAD_KB, &name);
        }
        tracing::info!(mount = name, path = %path.display(), minor, "mounted");
        let (ended, over) = (Mutex::new(ended), AtomicBool::new(false));
        Ok(Self { path, name, minor, abort, notifier, ended, over })
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The minor number of the mount's device: its name under fusectl and bdi.
    #[must_use]
    pub fn minor(&self) -> u32 {
        self.minor
    }

    /// For a thread that pushes; it must end with the file system.
    #[must_use]
    pub fn storer(&self) -> Storer {
        Storer::new(self.notifier.clone(), Arc::clone(&self.abort.pushes))
    }

    /// For whoever must be able to abort without the session at hand, such as the leash.
    #[must_use]
    pub fn abort_handle(&self) -> AbortHandle {
        self.abort.clone()
    }

    /// See [`AbortHandle::abort`].
    ///
    /// # Errors
    /// [`MountError::Abort`].
    pub fn abort(&self) -> Result<(), MountError> {
        self.abort.abort().map_err(|source| MountError::Abort { path: self.path.clone(), source })
    }

    /// Takes the mount out of the tree: a healthy file system first gets [`DETACH_GRACE`] to
    /// write back, then the connection is aborted, whoever still uses it. Blocks a few seconds
    /// at most; may be called more than once.
    ///
    /// # Errors
    /// [`MountError::StillMounted`] when the mount table still lists it.
    pub fn unmount(&self) -> Result<(), MountError> {
        if self.over.swap(true, Ordering::SeqCst) {
            return Ok(());
        }
        self.abort.pushes.shut();
        let detached = self.detach_within(DETACH_GRACE);
        if let Err(error) = self.abort() {
            tracing::warn!(mount = self.name, error = limb_common::error::chain(&error), "abort failed");
        }
        if let Err(Waiting(done)) = detached {
            tracing::warn!(mount = self.name, "unmounting took too long: the connection was aborted");
            let _woken: Result<(), RecvTimeoutError> = done.recv_timeout(END_GRACE);
        }
        let ended = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        if ended.recv_timeout(END_GRACE) == Err(RecvTimeoutError::Timeout) {
            tracing::warn!(mount = self.name, "the session's threads have not ended");
        }
        // By path too: the kernel gives a free minor to the next mount at once.
        if control::find_mount(&self.path).is_some_and(|entry| entry.minor == self.minor) {
            self.over.store(false, Ordering::SeqCst);
            return Err(MountError::StillMounted { path: self.path.clone() });
        }
        tracing::info!(mount = self.name, "unmounted");
        Ok(())
    }

    /// The last unmount writes back what is dirty, through this very file system: on a thread of
    /// its own, so that a file system that does not answer cannot hold us.
    fn detach_within(&self, grace: Duration) -> Result<(), Waiting> {
        let ours = control::find_mount(&self.path).is_some_and(|entry| entry.minor == self.minor);
        if !ours {
            return Ok(());
        }
        let (tell, done) = sync_channel(1);
        let (path, root) = (self.path.clone(), nix::unistd::geteuid().is_root());
        let spawned = std::thread::Builder::new().name("limb-unmount".to_owned()).spawn(move || {
            device::detach(&path, root);
            let _nobody_waits: Result<(), _> = tell.send(());
        });
        if spawned.is_err() {
            return Ok(());
        }
        match done.recv_timeout(grace) {
            Ok(()) | Err(RecvTimeoutError::Disconnected) => Ok(()),
            Err(RecvTimeoutError::Timeout) => Err(Waiting(done)),
        }
    }
}

/// Unmounting goes on; this tells when it has ended.
struct Waiting(Receiver<()>);

impl Drop for MountSession {
    fn drop(&mut self) {
        if let Err(error) = self.unmount() {
            tracing::error!(
                mount = self.name,
                error = limb_common::error::chain(&error),
                "unmounting failed"
            );
        }
    }
}

fn start<F: Filesystem>(
    fs: F,
    device: std::os::fd::OwnedFd,
    name: &str,
    root: bool,
) -> io::Result<(Notifier, Receiver<()>)> {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let mut config = Config::default();
    config.acl = if root { SessionACL::All } else { SessionACL::Owner };
    // A single thread would answer in turn; two at least, so that one slow handler hides none.
    config.n_threads = Some(cores.clamp(2, MAX_THREADS));
    config.clone_fd = root;
    let session = Session::from_fd(Guarded::new(fs), device, config.acl, config)?;
    let notifier = session.notifier();
    let (alive, ended) = sync_channel(1);
    let label = name.to_owned();
    std::thread::Builder::new().name(format!("limb-mount-{name}")).spawn(move || {
        let _alive = alive;
        match session.run() {
            Ok(()) => tracing::debug!(mount = label, "session ended"),
            Err(error) => tracing::warn!(mount = label, %error, "session ended"),
        }
    })?;
    Ok((notifier, ended))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hint_fits_what_fusermount3_says() {
        for (detail, hint) in [
            ("fusermount3: failed to open /dev/fuse: Permission denied", "chmod 666 /dev/fuse"),
            ("fusermount3: fuse device not found, try 'modprobe fuse' first", "load the kernel module"),
            ("fusermount3: failed to open /dev/fuse: No such file or directory", "modprobe fuse"),
            ("no such program", "install the package fuse3"),
        ] {
            let said = MountError::Helper { path: "/x".into(), detail: detail.to_owned() }.to_string();
            assert!(said.contains(hint), "{said}");
        }
    }
}
