//! The content store: files named by the BLAKE3 hash of their content, each there once; and packs,
//! where many small files were put at once.
//!
//! Several processes may use it at once. Each writes under names of its own in `incoming`, and holds
//! a lock, shared, until somebody names what it has put in; who sweeps holds it alone.
//!
//! Invariant: a file under its final name is whole and was on disk before it took that name.

mod pack;

use std::collections::HashSet;
use std::fs::{DirBuilder, File, OpenOptions};
use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use limb_common::id::Digest;
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg, OFlag};

use super::SnapshotError;
use super::walk::open_path;
use pack::{Contents, Held};
pub(super) use pack::{Filler, Packer};

/// Above this many files one `syncfs` costs less than an fsync each.
const SYNC_EACH_UP_TO: usize = 64;

#[derive(Clone, Debug)]
pub(super) struct Store {
    root: Arc<Path>,
    /// Begins the names of this process's temporary files.
    mine: u64,
    next: Arc<AtomicU64>,
}

/// Where stored content was put. It may have been moved since: its hash always finds it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Place {
    /// A file of its own.
    File,
    Pack {
        pack: u64,
        at: u64,
    },
}

/// While it is held, nothing in the store goes; or, held alone, nothing comes.
#[derive(Debug)]
#[must_use]
pub(super) struct Hold {
    _lock: Flock<File>,
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
        make_dir(&root.join("packs"))?;
        let store = Self { root: root.into(), mine: rand::random(), next: Arc::default() };
        // Left by a process that was killed, unless another is at work.
        if let Some(_alone) = store.hold(FlockArg::LockExclusiveNonblock)? {
            for entry in std::fs::read_dir(&incoming).map_err(failed(&incoming))?.flatten() {
                remove(&entry.path())?;
            }
        }
        Ok(store)
    }

    /// While something is put in that nobody has named yet.
    pub(super) fn share(&self) -> Result<Option<Hold>, SnapshotError> {
        self.hold(FlockArg::LockShared)
    }

    /// While things are removed.
    pub(super) fn alone(&self) -> Result<Option<Hold>, SnapshotError> {
        self.hold(FlockArg::LockExclusive)
    }

    /// `None`: somebody else has it, and the caller does not wait.
    fn hold(&self, how: FlockArg) -> Result<Option<Hold>, SnapshotError> {
        let path = self.root.join("lock");
        let open = || OpenOptions::new().write(true).create(true).truncate(false).mode(0o600).open(&path);
        let mut file = open().map_err(failed(&path))?;
        loop {
            match Flock::lock(file, how) {
                Ok(lock) => return Ok(Some(Hold { _lock: lock })),
                Err((_, Errno::EWOULDBLOCK)) => return Ok(None),
                Err((again, Errno::EINTR)) => file = again,
                Err((_, errno)) => return Err(failed(&path)(errno.into())),
            }
        }
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
        let path = self.root.join("incoming").join(format!("{:016x}-{number}", self.mine));
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

    /// Opens what holds this content; it begins at the offset. The bytes are not looked at.
    pub(super) fn open_stored(&self, content: Digest, place: Place) -> nix::Result<(File, u64)> {
        let (path, at) = match place {
            Place::File => (self.path(content), 0),
            Place::Pack { pack, at } => (self.pack_path(pack), at),
        };
        open_path(&path, OFlag::O_RDONLY | OFlag::O_NONBLOCK).map(|fd| (File::from(fd), at))
    }

    /// Where this content is, whatever anybody remembers.
    pub(super) fn find(&self, content: Digest, size: u64) -> Option<Place> {
        if self.contains(content, size) {
            return Some(Place::File);
        }
        self.pack_files().ok()?.find_map(|(pack, file)| {
            let entry = pack::find_in(&file, content).filter(|entry| entry.len == size)?;
            Some(Place::Pack { pack, at: entry.at })
        })
    }

    /// The packs that are there and whole.
    pub(super) fn packs(&self) -> Result<HashSet<u64>, SnapshotError> {
        Ok(self.pack_files()?.map(|(pack, _)| pack).collect())
    }

    /// Takes about so many small files, of which none is stored twice.
    pub(super) fn packer(&self, files: usize) -> Result<Packer<'_>, SnapshotError> {
        let mut before = Vec::new();
        for (pack, file) in self.pack_files()? {
            let held = Held::of(file, files).map_err(failed(&self.pack_path(pack)))?;
            before.extend(held.map(|held| (pack, held)));
        }
        Ok(Packer::new(self, before))
    }

    fn pack_path(&self, pack: u64) -> PathBuf {
        self.root.join("packs").join(format!("{pack:016x}"))
    }

    /// One after the other, so that few are open at once.
    fn pack_files(&self) -> Result<impl Iterator<Item = (u64, File)>, SnapshotError> {
        let dir = self.root.join("packs");
        let entries: Vec<_> = std::fs::read_dir(&dir).map_err(failed(&dir))?.flatten().collect();
        Ok(entries.into_iter().filter_map(|entry| {
            let id = entry.file_name().to_str().and_then(|name| u64::from_str_radix(name, 16).ok())?;
            let file = File::open(entry.path()).ok().filter(pack::is_whole)?;
            Some((id, file))
        }))
    }

    fn name_pack(&self, pack: u64, target: Arc<Temporary>) -> Result<(), SnapshotError> {
        let path = self.pack_path(pack);
        std::fs::rename(&target.path.path, &path).map_err(failed(&path))
    }

    fn sync_packs(&self) -> Result<(), SnapshotError> {
        sync_dir(&self.root.join("packs"))
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
        Ok(freed + self.sweep_packs(used)?)
    }

    /// A pack that is used for less than half is put into another one.
    fn sweep_packs(&self, used: &HashSet<Digest>) -> Result<u64, SnapshotError> {
        let (packer, mut gone, mut freed) = (Packer::new(self, Vec::new()), Vec::new(), 0);
        let mut filler = packer.filler();
        for (pack, file) in self.pack_files()? {
            let path = self.pack_path(pack);
            let Some(contents) = Contents::of(&file).map_err(failed(&path))? else {
                tracing::warn!(path = %path.display(), "a pack is damaged: it stays as it is");
                continue;
            };
            let bytes = |used_only: bool| -> u64 {
                let entries = contents.iter().filter(|entry| !used_only || used.contains(&entry.content));
                entries.map(|entry| entry.len).sum()
            };
            let (all, live) = (bytes(false), bytes(true));
            let any = contents.iter().any(|entry| used.contains(&entry.content));
            if any && live >= all / 2 {
                continue;
            }
            for entry in contents.iter().filter(|entry| used.contains(&entry.content)) {
                let mut bytes = vec![0; usize::try_from(entry.len).unwrap_or(usize::MAX)];
                file.read_exact_at(&mut bytes, entry.at).map_err(failed(&path))?;
                let _moved: Place = filler.put(entry.content, &bytes)?;
            }
            freed += all - live;
            gone.push(path);
        }
        filler.finish()?;
        packer.finish()?;
        gone.iter().try_for_each(|path| remove(path))?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_somebody_is_putting_in_is_left_alone_and_what_nobody_is_goes() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("store");
        let (store, other) = (Store::open(&root).unwrap(), Store::open(&root).unwrap());
        let held = store.share().unwrap().unwrap();
        let (mine, theirs) = (store.temporary().unwrap(), other.temporary().unwrap());
        assert_ne!(mine.path.path, theirs.path.path);
        drop(Store::open(&root).unwrap());
        assert!(mine.path.path.exists());
        assert!(other.hold(FlockArg::LockExclusiveNonblock).unwrap().is_none());
        drop(held);
        drop(Store::open(&root).unwrap());
        assert!(!mine.path.path.exists());
    }
}
