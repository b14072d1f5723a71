//! Getting a mounted /dev/fuse: mount(2) as root, fusermount3 otherwise.

use std::ffi::OsStr;
use std::fs::OpenOptions;
use std::io::{self, IoSliceMut};
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use nix::fcntl::{FcntlArg, FdFlag, fcntl};
use nix::mount::{MntFlags, MsFlags, umount2};
use nix::sys::socket::{ControlMessageOwned, MsgFlags, recvmsg};

use super::MountError;

/// Both names are in use; the first is the current one.
const HELPERS: [&str; 2] = ["fusermount3", "fusermount"];

pub(super) fn mount(path: &Path, name: &str, read_only: bool, root: bool) -> Result<OwnedFd, MountError> {
    if root { mount_as_root(path, name, read_only) } else { mount_through_helper(path, name, read_only) }
}

fn mount_as_root(path: &Path, name: &str, read_only: bool) -> Result<OwnedFd, MountError> {
    let refused = |source: io::Error| MountError::Refused { path: path.to_path_buf(), source };
    let device = OpenOptions::new()
        .read(true)
        .write(true)
        .open("/dev/fuse")
        .map_err(|source| MountError::NoDevice { source })?;
    let mode = path.metadata().map_err(refused)?.permissions().mode();
    let data = format!(
        "fd={},rootmode={mode:o},user_id=0,group_id=0,default_permissions,allow_other",
        device.as_raw_fd()
    );
    let mut flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOATIME;
    flags.set(MsFlags::MS_RDONLY, read_only);
    let source = format!("limb-{name}");
    nix::mount::mount(Some(source.as_str()), path, Some("fuse.limb"), flags, Some(data.as_str()))
        .map_err(|errno| refused(errno.into()))?;
    Ok(device.into())
}

/// fusermount3 mounts for us and passes the device over a socket.
fn mount_through_helper(path: &Path, name: &str, read_only: bool) -> Result<OwnedFd, MountError> {
    let failed = |detail: String| MountError::Helper { path: path.to_path_buf(), detail };
    let access = if read_only { "ro" } else { "rw" };
    let options =
        format!("fsname=limb-{name},subtype=limb,nosuid,nodev,noatime,default_permissions,{access}");
    for helper in HELPERS {
        let (theirs, ours) = UnixStream::pair().map_err(|error| failed(error.to_string()))?;
        let passed = theirs.as_raw_fd();
        let mut command = Command::new(helper);
        command.arg("-o").arg(&options).arg("--").arg(path);
        command.env("_FUSE_COMMFD", passed.to_string()).stdout(Stdio::null()).stderr(Stdio::piped());
        // SAFETY: runs between fork and exec; fcntl is async-signal-safe, and the descriptor is
        // open there because `theirs` lives until the spawn has returned.
        unsafe {
            command.pre_exec(move || {
                let fd = std::os::fd::BorrowedFd::borrow_raw(passed);
                fcntl(fd, FcntlArg::F_SETFD(FdFlag::empty()))?;
                Ok(())
            });
        }
        let child = match command.spawn() {
            Ok(child) => child,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(failed(error.to_string())),
        };
        drop(theirs);
        let received = receive_device(&ours);
        drop(ours);
        let output = child.wait_with_output().map_err(|error| failed(error.to_string()))?;
        return received.ok_or_else(|| failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()));
    }
    Err(failed("no such program".to_owned()))
}

fn receive_device(socket: &UnixStream) -> Option<OwnedFd> {
    let mut byte = [0_u8];
    let mut parts = [IoSliceMut::new(&mut byte)];
    let mut space = nix::cmsg_space!(RawFd);
    let flags = MsgFlags::MSG_CMSG_CLOEXEC;
    let message = loop {
        match recvmsg::<()>(socket.as_raw_fd(), &mut parts, Some(&mut space), flags) {
            Err(nix::errno::Errno::EINTR) => {}
            other => break other.ok()?,
        }
    };
    let raw = message.cmsgs().ok()?.find_map(|control| match control {
        ControlMessageOwned::ScmRights(fds) => fds.first().copied(),
        _ => None,
    })?;
    // SAFETY: the kernel has just made this descriptor for us; nobody else knows its number.
    Some(unsafe { OwnedFd::from_raw_fd(raw) })
}

/// Takes the topmost mount off `path`, busy or not. Errors are only logged: the caller looks at
/// the mount table afterwards (fusermount3's own exit status is no proof).
pub(super) fn detach(path: &Path, root: bool) {
    if root {
        if let Err(error) = umount2(path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW) {
            tracing::debug!(%error, path = %path.display(), "umount2");
        }
        return;
    }
    for helper in HELPERS {
        let arguments = ["-u", "-q", "-z", "--"].map(OsStr::new);
        let status = Command::new(helper).args(arguments).arg(path).stderr(Stdio::null()).status();
        if status.is_ok_and(|status| status.success()) {
            return;
        }
    }
}
