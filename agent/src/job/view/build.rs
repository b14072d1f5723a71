//! Puts a view together with mounts, inside the job's own mount namespace.

use std::fs;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::unistd::{chdir, pivot_root};

use super::tree::{Leaf, Node, plan};
use super::{Access, View, ViewError};
use crate::job::layer::{UPPER, WORK};

/// Parts of /proc through which root could reach outside the view.
const PROC_READ_ONLY: [&str; 4] = ["sys", "sysrq-trigger", "irq", "bus"];

/// Makes `view` the root of this process. The caller is alone in a new mount namespace and is
/// pid 1 of a new PID namespace.
pub(crate) fn enter(view: &View, in_user_namespace: bool) -> Result<(), ViewError> {
    let root = plan(view)?;
    let none: Option<&str> = None;
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    check("making private", Path::new("/"), mount(none, "/", none, private, none))?;
    let new = &view.staging;
    let ram = MsFlags::empty();
    check("mounting RAM on", new, mount(Some("limb-root"), new, Some("tmpfs"), ram, Some("mode=755")))?;
    // So that a recursive bind of what holds it does not bring it along.
    check("setting apart", new, mount(none, new, none, MsFlags::MS_UNBINDABLE, none))?;
    let builder = Builder { in_user_namespace };
    builder.synthesise(Some(Path::new("/")), new, &root, Access::ReadOnly)?;
    read_only(new, false);
    check("entering", new, chdir(new))?;
    check("pivoting to", new, pivot_root(".", "."))?;
    check("leaving the old root of", new, umount2(".", MntFlags::MNT_DETACH))?;
    check("entering", Path::new("/"), chdir("/"))
}

struct Builder {
    in_user_namespace: bool,
}

impl Builder {
    /// Shows `host` (if there is one) at `new`, as `node` wants it.
    fn place(&self, host: Option<&Path>, new: &Path, node: &Node, access: Access) -> Result<(), ViewError> {
        match &node.leaf {
            None => self.host_directory(host, new, node, access),
            Some(Leaf::Bind { source, access }) if node.children.is_empty() => bind(source, new, *access),
            Some(Leaf::Bind { source, access }) => self.host_directory(Some(source), new, node, *access),
            Some(Leaf::Ram { mode }) => {
                mount_ram(new, *mode)?;
                self.inside(new, node)
            }
            Some(Leaf::Hidden) => {
                mount_ram(new, 0o755)?;
                self.inside(new, node)?;
                read_only(new, false);
                Ok(())
            }
            Some(Leaf::Overlay { lower, layer }) => {
                self.mount_overlay(lower, layer, new)?;
                self.inside(new, node)
            }
            Some(Leaf::Proc) => mount_proc(new),
        }
    }

    /// Children of something writable: what is not there is made.
    fn inside(&self, new: &Path, node: &Node) -> Result<(), ViewError> {
        for (name, child) in &node.children {
            self.place(None, &new.join(name), child, Access::ReadWrite)?;
        }
        Ok(())
    }

    fn host_directory(
        &self,
        host: Option<&Path>,
        new: &Path,
        node: &Node,
        access: Access,
    ) -> Result<(), ViewError> {
        // What is under /dev must stay usable.
        let access = if host == Some(Path::new("/dev")) { Access::ReadWrite } else { access };
        match host {
            Some(host) if all_present(host, node) => {
                bind(host, new, access)?;
                for (name, child) in &node.children {
                    self.place(Some(&host.join(name)), &new.join(name), child, access)?;
                }
                Ok(())
            }
            Some(_) | None => self.synthesise(host, new, node, access),
        }
    }

    /// A directory in RAM that holds what `host` holds, and the children of `node`.
    fn synthesise(
        &self,
        host: Option<&Path>,
        new: &Path,
        node: &Node,
        access: Access,
    ) -> Result<(), ViewError> {
        let mode =
            host.and_then(|host| fs::metadata(host).ok()).map_or(0o755, |meta| meta.permissions().mode());
        make_directory(new, mode & 0o7777)?;
        if let Some(entries) = host.and_then(|host| fs::read_dir(host).ok()) {
            for entry in entries.flatten() {
                if !node.children.contains_key(&entry.file_name()) {
                    show_as_is(&entry.path(), &new.join(entry.file_name()), access);
                }
            }
        }
        for (name, child) in &node.children {
            let inner = host.map(|host| host.join(name)).filter(|path| path.is_dir());
            self.place(inner.as_deref(), &new.join(name), child, access)?;
        }
        Ok(())
    }

    fn mount_overlay(&self, lower: &Path, layer: &Path, new: &Path) -> Result<(), ViewError> {
        make_directory(new, 0o755)?;
        let (upper, work) = (layer.join(UPPER), layer.join(WORK));
        for path in [lower, &upper, &work] {
            let text = path.to_str().filter(|text| !text.contains([':', ',', '\\', '"']));
            if text.is_none() {
                return Err(ViewError::Overlay(format!(
                    "{} holds a character overlayfs reads",
                    path.display()
                )));
            }
        }
        let paths =
            format!("lowerdir={},upperdir={},workdir={}", lower.display(), upper.display(), work.display());
        // The upper layer must tell the whole change by itself: no redirects into the lower one.
        let plain = format!("{paths},redirect_dir=off,metacopy=off,index=off");
        let for_users = format!("{paths},userxattr");
        let tries = if self.in_user_namespace { [&for_users, &paths] } else { [&plain, &for_users] };
        let mut refused = Errno::EINVAL;
        for data in tries {
            let made = mount(Some("overlay"), new, Some("overlay"), MsFlags::MS_NODEV, Some(data.as_str()));
            match made {
                Ok(()) => return Ok(()),
                Err(errno) => refused = errno,
            }
        }
        Err(ViewError::Overlay(format!("over {}: {refused}", lower.display())))
    }
}

/// Whether every mount point below `host` exists there already, as the kind that it must be.
fn all_present(host: &Path, node: &Node) -> bool {
    node.children.iter().all(|(name, child)| {
        let path = host.join(name);
        let Ok(found) = fs::symlink_metadata(&path) else { return false };
        match &child.leaf {
            Some(Leaf::Bind { source, .. }) => source.is_dir() == found.is_dir() && !found.is_symlink(),
            Some(Leaf::Ram { .. } | Leaf::Hidden | Leaf::Overlay { .. } | Leaf::Proc) => found.is_dir(),
            None => found.is_dir() && all_present(&path, child),
        }
    })
}

/// One of the host's entries in a synthesised directory. One that vanished or that this user may
/// not bind is left out: it is not the job's.
fn show_as_is(host: &Path, new: &Path, access: Access) {
    let shown = match fs::read_link(host) {
        Ok(to) => std::os::unix::fs::symlink(to, new).map_err(|_| ()),
        Err(_) => {
            let access = if host == Path::new("/dev") { Access::ReadWrite } else { access };
            bind(host, new, access).map_err(|_| ())
        }
    };
    if shown.is_err() {
        tracing::debug!(path = %host.display(), "not shown to the job");
    }
}

fn bind(source: &Path, new: &Path, access: Access) -> Result<(), ViewError> {
    if fs::symlink_metadata(new).is_err() {
        if source.is_dir() {
            make_directory(new, 0o755)?;
        } else {
            let made = fs::File::create(new).map(drop);
            check("making the mount point", new, made.map_err(errno_of))?;
        }
    }
    let none: Option<&str> = None;
    let made = mount(Some(source), new, none, MsFlags::MS_BIND | MsFlags::MS_REC, none);
    check("binding", source, made)?;
    if access == Access::ReadOnly {
        read_only(new, true);
    }
    Ok(())
}

/// Read-only where possible: a mount that cannot be changed stays as the host has it.
fn read_only(path: &Path, recursive: bool) {
    if recursive && set_read_only_recursively(path).is_ok() {
        return;
    }
    let flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | MsFlags::MS_RDONLY;
    let none: Option<&str> = None;
    // Flags that the host's mount has are locked in a user namespace: repeat them.
    let kept = nix::sys::statvfs::statvfs(path).map_or(MsFlags::empty(), |fs| kept_flags(fs.flags()));
    if let Err(errno) = mount(none, path, none, flags | kept, none) {
        tracing::debug!(path = %path.display(), %errno, "stays writable");
    }
}

fn kept_flags(host: nix::sys::statvfs::FsFlags) -> MsFlags {
    use nix::sys::statvfs::FsFlags;
    [
        (FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
        (FsFlags::ST_NODEV, MsFlags::MS_NODEV),
        (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
        (FsFlags::ST_NOATIME, MsFlags::MS_NOATIME),
        (FsFlags::ST_RELATIME, MsFlags::MS_RELATIME),
    ]
    .into_iter()
    .filter(|(theirs, _)| host.contains(*theirs))
    .fold(MsFlags::empty(), |all, (_, ours)| all | ours)
}

/// mount_setattr(2), Linux 5.12: the mount and all under it at once.
fn set_read_only_recursively(path: &Path) -> nix::Result<()> {
    use nix::NixPath as _;
    let attributes =
        libc::mount_attr { attr_set: libc::MOUNT_ATTR_RDONLY, attr_clr: 0, propagation: 0, userns_fd: 0 };
    let result = path.with_nix_path(|path| {
        // SAFETY: the path is a NUL-terminated string and the structure outlives the call, whose
        // last argument is that structure's size.
        unsafe {
            libc::syscall(
                libc::SYS_mount_setattr,
                libc::AT_FDCWD,
                path.as_ptr(),
                libc::AT_RECURSIVE,
                &raw const attributes,
                size_of::<libc::mount_attr>(),
            )
        }
    })?;
    Errno::result(result).map(drop)
}

fn mount_ram(new: &Path, mode: u32) -> Result<(), ViewError> {
    make_directory(new, 0o755)?;
    let data = format!("mode={mode:o}");
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
    check("mounting RAM on", new, mount(Some("limb-ram"), new, Some("tmpfs"), flags, Some(data.as_str())))
}

fn mount_proc(new: &Path) -> Result<(), ViewError> {
    make_directory(new, 0o555)?;
    let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV | MsFlags::MS_NOEXEC;
    let none: Option<&str> = None;
    if mount(Some("proc"), new, Some("proc"), flags, none).is_err() {
        // Inside a container with parts of /proc masked a user namespace gets no fresh one.
        return bind(Path::new("/proc"), new, Access::ReadWrite);
    }
    for name in PROC_READ_ONLY {
        let path: PathBuf = new.join(name);
        if path.exists() && bind(&path, &path, Access::ReadOnly).is_err() {
            tracing::debug!(path = %path.display(), "stays as it is");
        }
    }
    Ok(())
}

fn make_directory(path: &Path, mode: u32) -> Result<(), ViewError> {
    match fs::DirBuilder::new().mode(mode).create(path) {
        Ok(()) => {
            // The umask has had its say.
            let _same_mode = fs::set_permissions(path, fs::Permissions::from_mode(mode));
            Ok(())
        }
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && path.is_dir() => Ok(()),
        Err(error) => check("making the directory", path, Err(errno_of(error))),
    }
}

#[expect(clippy::needless_pass_by_value, reason = "used as a map_err function")]
fn errno_of(error: std::io::Error) -> Errno {
    error.raw_os_error().map_or(Errno::EIO, Errno::from_raw)
}

fn check(what: &'static str, path: &Path, result: nix::Result<()>) -> Result<(), ViewError> {
    result.map_err(|errno| ViewError::Step { what, path: path.display().to_string(), errno })
}
