//! Where the workdir's changes go while the job runs: RAM of the agent's own, so that they can
//! be looked through after the job's namespaces are gone.

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use nix::mount::{MntFlags, MsFlags, mount, umount2};

/// Holds the job's changes.
pub(crate) const UPPER: &str = "upper";
/// overlayfs's own scratch.
pub(crate) const WORK: &str = "work";

/// A directory with an upper and a work directory. Its RAM goes when it is dropped.
#[derive(Debug)]
pub struct WorkdirLayer {
    path: PathBuf,
    mounted: bool,
}

impl WorkdirLayer {
    /// Makes the layer in `private` as `name`. As root it is a tmpfs of its own; otherwise it is
    /// a directory on whatever `private` is on.
    pub fn create(private: &Path, name: &str) -> io::Result<Self> {
        let path = private.join(name);
        fs::create_dir_all(&path)?;
        let flags = MsFlags::MS_NOSUID | MsFlags::MS_NODEV;
        let mounted = mount(Some("limb-workdir"), &path, Some("tmpfs"), flags, Some("mode=755")).is_ok();
        let layer = Self { path, mounted };
        fs::create_dir_all(layer.upper())?;
        fs::create_dir_all(layer.path.join(WORK))?;
        Ok(layer)
    }

    /// For `Workdir::Overlay` and `Workdir::Empty`.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// For [`super::changes::changes`].
    #[must_use]
    pub fn upper(&self) -> PathBuf {
        self.path.join(UPPER)
    }
}

impl Drop for WorkdirLayer {
    fn drop(&mut self) {
        if self.mounted {
            let _gone = umount2(&self.path, MntFlags::MNT_DETACH);
        }
        // overlayfs leaves a directory without any permission in its scratch.
        let scratch = self.path.join(WORK).join(WORK);
        let _opened = fs::set_permissions(&scratch, fs::Permissions::from_mode(0o700));
        let _removed = fs::remove_dir_all(&self.path);
    }
}
