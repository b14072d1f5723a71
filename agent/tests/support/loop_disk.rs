//! A disk of the test's own: an ext4 image on a loop device, mounted while the value lives.
#![allow(clippy::print_stderr, reason = "a test that is skipped says so")]

use std::fs::{self, File};
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::mount::{MntFlags, umount2};
use nix::sys::statvfs::statvfs;

pub(crate) struct LoopDisk {
    path: PathBuf,
    image: PathBuf,
    _directory: tempfile::TempDir,
}

/// True, after saying so loudly, where no disk can be made.
pub(crate) fn cannot_mount_disks(test: &str) -> bool {
    let needed = ["/dev/fuse", "/dev/loop-control", "/sbin/mkfs.ext4", "/usr/bin/unshare"];
    let missing = needed.into_iter().find(|path| !Path::new(path).exists());
    let missing = missing.or_else(|| (!nix::unistd::geteuid().is_root()).then_some("root"));
    if let Some(missing) = missing {
        // Written past the test runner's capture: a skip must be seen.
        drop(writeln!(std::io::stderr(), "SKIPPED {test}: needs {missing}"));
    }
    missing.is_some()
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
}

impl LoopDisk {
    pub(crate) fn new(bytes: u64) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let (path, image) = (directory.path().join("disk"), directory.path().join("image"));
        File::create(&image).unwrap().set_len(bytes).unwrap();
        let file = image.to_str().unwrap();
        // All of it made now, not by a kernel thread later.
        let eager = "lazy_itable_init=0,lazy_journal_init=0";
        run("/sbin/mkfs.ext4", &["-q", "-F", "-m", "0", "-E", eager, file]);
        fs::create_dir(&path).unwrap();
        run("mount", &["-o", "loop", file, path.to_str().unwrap()]);
        fs::remove_dir(path.join("lost+found")).unwrap();
        Self { path, image, _directory: directory }
    }

    /// Where it is mounted.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Everything that was written is in the image.
    pub(crate) fn sync(&self) {
        nix::unistd::syncfs(File::open(&self.path).unwrap()).unwrap();
    }

    /// Until it takes no more.
    pub(crate) fn fill(&self) {
        let mut ballast = File::create(self.path.join("ballast")).unwrap();
        let block = vec![1; 64 << 10];
        while ballast.write_all(&block).and_then(|()| ballast.sync_data()).is_ok() {}
    }

    pub(crate) fn free_bytes(&self) -> u64 {
        let space = statvfs(&self.path).unwrap();
        space.blocks_available() * space.fragment_size()
    }

    /// Every byte of it.
    pub(crate) fn into_image(self) -> Vec<u8> {
        umount2(&self.path, MntFlags::empty()).unwrap();
        fs::read(&self.image).unwrap()
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        // The loop device goes with its last mount. Unmounted already: that is what is wanted.
        let _unmounted: nix::Result<()> = umount2(&self.path, MntFlags::MNT_DETACH);
    }
}
