//! The content store: files named by the BLAKE3 hash of their content, each there once.
//!
//! Invariant: a file under its final name is whole and was on disk before it took that name.

use std::collections::HashSet;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use limb_common::id::Digest;

use super::SnapshotError;

/// Above this many files one `syncfs` costs less than an fsync each.
const SYNC_EACH_UP_TO: usize = 64;

#[derive(Clone, Debug)]
pub(super) struct Store {
    root: Arc<Path>,
    next: Arc<AtomicU64>,
}

/// A file that has no name yet. Dropping it removes it.
#[derive(Debug)]
pub(super) struct Temporary {
    pub(super) file: File,
    path: TemporaryPath,
}

#[derive(Debug)]
struct TemporaryPath {
    path: PathBuf,
    kept: bool,
}

/// A written file that waits for its name. It holds no descriptor: there may be a million.
#[derive(Debug)]
pub(super) struct Pending {
    from: TemporaryPath,
    content: Digest,
}

impl Store {
    pub(super) fn open(root: &Path) -> Result<Self, SnapshotError> {
        make_dir(root)?;
        let incoming = root.join("incoming");
        make_dir(&incoming)?;
        // Left by a coordinator that was killed; only one runs at a time.
        for entry in std::fs::read_dir(&incoming).map_err(failed(&incoming))?.flatten() {
            remove(&entry.path())?;
        }
        Ok(Self { root: root.into(), next: Arc::default() })
    }

    pub(super) fn path(&self, content: Digest) -> PathBuf {
        let hex = content.to_hex();
        self.root.join(&hex[..2]).join(&hex[2..])
    }

    /// Is a file of this content and size there?
    pub(super) fn contains(&self, content: Digest, size: u64) -> bool {
        std::fs::symlink_metadata(self.path(content)).is_ok_and(|meta| meta.is_file() && meta.len() == size)
    }

    pub(super) fn temporary(&self) -> Result<Temporary, SnapshotError> {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let path = self.root.join("incoming").join(number.to_string());
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&path)
            .map_err(failed(&path))?;
        Ok(Temporary { file, path: TemporaryPath { path, kept: false } })
    }

    /// Gives all these files their names; durable when it returns.
    pub(super) fn commit(&self, pending: Vec<Pending>) -> Result<(), SnapshotError> {
        if pending.is_empty() {
            return Ok(());
        }
        let root = File::open(&self.root).map_err(failed(&self.root))?;
        let sync_all = || nix::unistd::syncfs(&root).map_err(|errno| failed(&self.root)(errno.into()));
        let each = pending.len() <= SYNC_EACH_UP_TO;
        if each {
            for one in &pending {
                let path = &one.from.path;
                File::open(path).and_then(|file| file.sync_all()).map_err(failed(path))?;
            }
        } else {
            sync_all()?;
        }
        let mut directories = HashSet::new();
        for Pending { mut from, content } in pending {
            let path = self.path(content);
            let directory = path.parent().unwrap_or(&self.root).to_owned();
            if !directory.is_dir() {
                make_dir(&directory)?;
            }
            std::fs::rename(&from.path, &path).map_err(failed(&path))?;
            from.kept = true;
            directories.insert(directory);
        }
        if each {
            directories.iter().try_for_each(|directory| sync_dir(directory))?;
            sync_dir(&self.root)
        } else {
            sync_all()
        }
    }

    /// Removes what is not used; returns the bytes that this freed.
    pub(super) fn sweep(&self, used: &HashSet<Digest>) -> Result<u64, SnapshotError> {
        let mut freed = 0;
        for directory in std::fs::read_dir(&self.root).map_err(failed(&self.root))?.flatten() {
            let prefix = directory.file_name();
            let Some(prefix) = prefix.to_str().filter(|name| name.len() == 2) else { continue };
            let directory = directory.path();
            for file in std::fs::read_dir(&directory).map_err(failed(&directory))?.flatten() {
                let content =
                    file.file_name().to_str().and_then(|name| format!("{prefix}{name}").parse().ok());
                if content.is_some_and(|content: Digest| !used.contains(&content)) {
                    freed += file.metadata().map_or(0, |meta| meta.len());
                    remove(&file.path())?;
                }
            }
        }
        Ok(freed)
    }
}

impl Temporary {
    pub(super) fn named(self, content: Digest) -> Pending {
        Pending { from: self.path, content }
    }

    pub(super) fn failed(&self) -> impl FnOnce(std::io::Error) -> SnapshotError + use<> {
        failed(&self.path.path)
    }
}

impl Drop for TemporaryPath {
    fn drop(&mut self) {
        if !self.kept {
            drop(std::fs::remove_file(&self.path));
        }
    }
}

/// Writes beside, syncs, renames, syncs the directory.
pub(super) fn write_durably(path: &Path, bytes: &[u8]) -> Result<(), SnapshotError> {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let beside = path.with_extension(format!("tmp-{}-{number}", std::process::id()));
    let write = || {
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&beside)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        std::fs::rename(&beside, path)
    };
    write().map_err(|error| {
        drop(std::fs::remove_file(&beside));
        failed(path)(error)
    })?;
    path.parent().map_or(Ok(()), sync_dir)
}

/// Makes a private directory, and its parents, durably.
pub(super) fn make_dir(path: &Path) -> Result<(), SnapshotError> {
    if path.is_dir() {
        return Ok(());
    }
    DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(failed(path))?;
    path.parent().map_or(Ok(()), sync_dir)
}

pub(super) fn remove(path: &Path) -> Result<(), SnapshotError> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(failed(path)(error)),
        _ => Ok(()),
    }
}

fn sync_dir(path: &Path) -> Result<(), SnapshotError> {
    File::open(path).and_then(|dir| dir.sync_all()).map_err(failed(path))
}

pub(super) fn failed(path: &Path) -> impl FnOnce(std::io::Error) -> SnapshotError + use<> {
    let path = path.to_owned();
    move |source| SnapshotError::Store { path, source }
}
