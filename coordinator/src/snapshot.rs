//! Home's side of a working set: a directory or file is frozen into a manifest, and its bytes can
//! be had again, chunk by chunk, exactly as they were.
//!
//! Small files and whole workdirs are copied into the content store; larger files stay where they
//! are and are checked against their hash each time they are read (or pinned by a reflink clone
//! where the file system has one).
//!
//! Never: follow a link that the caller did not ask to follow, hand out bytes that are not the
//! frozen ones, or zeros for bytes that are missing.
//! Invariant: a snapshot that [`Snapshots::create`] returned is on disk with everything it copied.

mod diff;
mod hash;
mod index;
mod own;
mod read;
mod sources;
mod store;
mod threads;
mod traces;
mod walk;

use std::collections::{HashMap, HashSet};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use limb_common::class::DataClass;
use limb_common::id::Digest;
use limb_common::manifest::{BuildError, Inode, Manifest, ManifestError};
use serde::{Deserialize, Serialize};

pub use diff::Difference;
pub use read::{LoadedSnapshot, ReadError};
pub use sources::FileIdentity;
use sources::{Source, SourceTable};
use store::Store;
pub use traces::{TraceKey, Traces};

/// A file with one word in the root of a source: the owner's label for it.
pub const CLASS_FILE: &str = ".limb-class";
/// Files up to this size are copied into the store (the walk touches them anyway, and a copy
/// costs less than explaining to somebody why a config file changed under a run).
pub const COPY_BYTES: u64 = 64 * 1024;

/// What becomes of symlinks that leave the set.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LinkPolicy {
    /// They stay links and dangle on the box; [`Snapshot::outside_links`] names them.
    #[default]
    Keep,
    /// What they point to becomes part of the set.
    Follow,
}

#[derive(Clone, Debug)]
pub struct SnapshotRequest {
    pub source: PathBuf,
    /// The label in the job file; a stricter one in the source wins.
    pub class: DataClass,
    /// Copy every file (a workdir): its owner edits it while runs go on.
    pub copy_all: bool,
    pub links: LinkPolicy,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// While `bytes_total` is 0: found so far.
    pub files_done: u64,
    pub bytes_done: u64,
    pub bytes_total: u64,
}

/// A symlink that leads out of the set. Paths are raw bytes, relative to the set.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct OutsideLink {
    pub path: Vec<u8>,
    pub target: Vec<u8>,
}

/// Something in the source that is not part of the set.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Skipped {
    pub path: Vec<u8>,
    pub why: SkipReason,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum SkipReason {
    Device,
    Fifo,
    Socket,
    /// Following this link would never end.
    LinkLoop,
}

/// A frozen working set.
#[derive(Clone, Debug)]
pub struct Snapshot {
    /// The manifest's hash.
    pub id: Digest,
    pub manifest: Manifest,
    pub source: PathBuf,
    /// Regular files, a hard-linked one counted once.
    pub files: u64,
    pub bytes: u64,
    pub class: DataClass,
    /// The source was one file; the manifest's root holds only it.
    pub single_file: bool,
    pub outside_links: Vec<OutsideLink>,
    pub skipped: Vec<Skipped>,
    pub created_unix_ms: u64,
}

/// A tree whose bytes lie in plain files at home already, with hashes that are known already.
#[derive(Clone, Debug)]
pub struct Registration {
    pub source: PathBuf,
    pub class: DataClass,
    pub manifest: Manifest,
    /// Where each file's bytes are, and which state of that file was hashed.
    pub files: Vec<(Inode, PathBuf, FileIdentity)>,
}

/// A snapshot cannot be made or found.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error("could not open the source {}; hint: check the path and that you may read it", path.display())]
    Source { path: PathBuf, source: std::io::Error },
    #[error("{} is neither a directory nor a regular file; hint: name one of these", path.display())]
    SourceKind { path: PathBuf },
    #[error("could not read {}; hint: make it readable to you, or move it out of the set", path.display())]
    Unreadable { path: PathBuf, source: std::io::Error },
    #[error(
        "{} kept changing while it was read; hint: let its writer finish, or move it out of the set",
        path.display()
    )]
    Changing { path: PathBuf },
    #[error(
        "{} is limb's own: its keys, ledger and stored data in {} are not for a box to read; hint: name a \
         directory that neither holds that one nor lies in it, or move it with `--set state_dir=DIR`",
        path.display(), state_dir.display()
    )]
    Own { path: PathBuf, state_dir: PathBuf },
    #[error("{} is beyond what one set may hold ({limit}); hint: mount a smaller part of it", path.display())]
    TooLarge { path: PathBuf, limit: &'static str },
    #[error(
        "{} says {text:?}; hint: write one word of public, internal, regulated, sealed",
        path.display()
    )]
    BadClass { path: PathBuf, text: String },
    #[error("could not write {} in home's store; hint: check space and permissions there", path.display())]
    Store { path: PathBuf, source: std::io::Error },
    #[error("the index of known hashes failed; hint: it may be deleted, it only saves time")]
    Index(#[from] rusqlite::Error),
    #[error("the tree cannot be described")]
    Build(#[from] BuildError),
    #[error("there is no snapshot {0}")]
    NotFound(Digest),
    #[error("snapshot {id} is damaged on disk; hint: make it again")]
    Damaged { id: Digest, source: ManifestError },
    #[error("the table of sources of snapshot {id} is damaged on disk; hint: make it again")]
    DamagedSources { id: Digest },
    #[error("nobody waits for this snapshot any more")]
    Cancelled,
}

/// What is kept beside a manifest.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Record {
    source: Vec<u8>,
    class: DataClass,
    single_file: bool,
    files: u64,
    bytes: u64,
    outside_links: Vec<OutsideLink>,
    skipped: Vec<Skipped>,
    created_unix_ms: u64,
}

/// All snapshots of this home. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Snapshots {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    state_dir: PathBuf,
    dir: PathBuf,
    store: Store,
    index: Arc<Mutex<index::Index>>,
    traces: Traces,
    loaded: Mutex<HashMap<Digest, Weak<LoadedSnapshot>>>,
}

impl Snapshots {
    /// Opens or makes `<state>/snapshots` and `<state>/store`.
    ///
    /// # Errors
    /// [`SnapshotError::Store`] or [`SnapshotError::Index`].
    pub fn open(state_dir: &Path) -> Result<Self, SnapshotError> {
        let dir = state_dir.join("snapshots");
        store::make_dir(&dir)?;
        let store = Store::open(&state_dir.join("store"))?;
        let index = Arc::new(Mutex::new(index::Index::open(&dir.join("index.db"))?));
        let traces = Traces::open(state_dir, traces::known(ids_in(&dir)?))?;
        let state_dir = state_dir.to_owned();
        Ok(Self { inner: Arc::new(Inner { state_dir, dir, store, index, traces, loaded: Mutex::default() }) })
    }

    /// What jobs touched of these snapshots.
    #[must_use]
    pub fn traces(&self) -> &Traces {
        &self.inner.traces
    }

    /// Freezes a source. Blocks, and uses all cores: see [`Self::create_async`].
    ///
    /// # Errors
    /// [`SnapshotError`], naming the file that stands in the way.
    pub fn create(
        &self,
        request: &SnapshotRequest,
        progress: impl Fn(Progress) + Sync,
    ) -> Result<Snapshot, SnapshotError> {
        self.create_cancellable(request, &progress, &AtomicBool::new(false))
    }

    /// [`Self::create`] off the async threads; dropping the future ends the work soon.
    ///
    /// # Errors
    /// As [`Self::create`].
    pub async fn create_async(
        &self,
        request: SnapshotRequest,
        progress: impl Fn(Progress) + Send + Sync + 'static,
    ) -> Result<Snapshot, SnapshotError> {
        struct CancelOnDrop(Arc<AtomicBool>);
        impl Drop for CancelOnDrop {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let guard = CancelOnDrop(Arc::default());
        let (this, cancelled) = (self.clone(), Arc::clone(&guard.0));
        let work = move || this.create_cancellable(&request, &progress, &cancelled);
        tokio::task::spawn_blocking(work).await.unwrap_or(Err(SnapshotError::Cancelled))
    }

    fn create_cancellable(
        &self,
        request: &SnapshotRequest,
        progress: &(dyn Fn(Progress) + Sync),
        cancelled: &AtomicBool,
    ) -> Result<Snapshot, SnapshotError> {
        let _held = self.inner.store.share()?;
        let own = own::Own::of(&self.inner.state_dir);
        let walked = walk::walk(&request.source, request.links, &own, &walk::Watch { cancelled, progress })?;
        let class = request.class.max(walked.label.unwrap_or(request.class));
        let (manifest, sources) = hash::freeze(
            &walked,
            &hash::Setting {
                store: &self.inner.store,
                index: &self.inner.index,
                copy_all: request.copy_all,
                cancelled,
            },
            progress,
        )?;
        let record = Record {
            source: walked.source.as_os_str().as_bytes().to_vec(),
            class,
            single_file: walked.single_file,
            files: walked.files.len() as u64,
            bytes: manifest.total_bytes(),
            outside_links: walked.outside_links,
            skipped: walked.skipped,
            created_unix_ms: limb_common::clock::unix_ms(),
        };
        self.persist(manifest, record, &sources)
    }

    /// Makes a snapshot of files whose hashes are known (earlier results). Blocks.
    ///
    /// # Errors
    /// [`SnapshotError::Store`].
    pub fn register(&self, registration: Registration) -> Result<Snapshot, SnapshotError> {
        let _held = self.inner.store.share()?;
        let Registration { source, class, manifest, files } = registration;
        let mut sources = vec![Source::Nothing; usize::try_from(manifest.inode_count()).unwrap_or(0)];
        let count = files.len() as u64;
        for (inode, path, identity) in files {
            let slot = usize::try_from(inode.0.wrapping_sub(1)).ok().and_then(|at| sources.get_mut(at));
            if let Some(slot) = slot {
                *slot = Source::InPlace { path, identity };
            }
        }
        let record = Record {
            source: source.as_os_str().as_bytes().to_vec(),
            class,
            single_file: false,
            files: count,
            bytes: manifest.total_bytes(),
            outside_links: Vec::new(),
            skipped: Vec::new(),
            created_unix_ms: limb_common::clock::unix_ms(),
        };
        self.persist(manifest, record, &sources)
    }

    fn persist(
        &self,
        manifest: Manifest,
        record: Record,
        sources: &[Source],
    ) -> Result<Snapshot, SnapshotError> {
        let id = manifest.id();
        let table = SourceTable::encode(&record, sources);
        // The table last: it is what makes a snapshot exist.
        let path = self.manifest_path(id);
        // An unchanged tree's is there; one that was damaged is written anew.
        if !std::fs::read(&path).is_ok_and(|there| there == manifest.as_bytes()) {
            store::write_durably(&path, manifest.as_bytes())?;
        }
        store::write_durably(&self.sources_path(id), &table)?;
        // The same tree may have been frozen from another place before: what was just read is the
        // better source of its bytes.
        lock(&self.inner.loaded).remove(&id);
        Ok(record.into_snapshot(manifest))
    }

    /// Opens a snapshot for reading its chunks. Blocks on first use.
    ///
    /// # Errors
    /// [`SnapshotError::NotFound`], or that it is damaged.
    pub fn reader(&self, id: Digest) -> Result<Arc<LoadedSnapshot>, SnapshotError> {
        if let Some(loaded) = lock(&self.inner.loaded).get(&id).and_then(Weak::upgrade) {
            return Ok(loaded);
        }
        let (manifest, table) = self.read_files(id)?;
        let loaded = Arc::new(LoadedSnapshot::new(
            manifest,
            table,
            self.inner.store.clone(),
            Arc::clone(&self.inner.index),
        ));
        let mut known = lock(&self.inner.loaded);
        known.retain(|_, weak| weak.strong_count() > 0);
        known.insert(id, Arc::downgrade(&loaded));
        Ok(loaded)
    }

    /// A snapshot that was made before. Blocks.
    ///
    /// # Errors
    /// [`SnapshotError::NotFound`], or that it is damaged.
    pub fn load(&self, id: Digest) -> Result<Snapshot, SnapshotError> {
        let (manifest, table) = self.read_files(id)?;
        let record = table.record().ok_or(SnapshotError::DamagedSources { id })?;
        Ok(record.into_snapshot(manifest))
    }

    /// All snapshots, newest first. A damaged one is left out and logged. Blocks.
    ///
    /// # Errors
    /// [`SnapshotError::Store`] when the directory cannot be read.
    pub fn list(&self) -> Result<Vec<Snapshot>, SnapshotError> {
        let mut all = Vec::new();
        for id in self.ids()? {
            match self.load(id) {
                Ok(snapshot) => all.push(snapshot),
                Err(error) => tracing::warn!(%id, %error, "a snapshot cannot be opened"),
            }
        }
        all.sort_by_key(|snapshot| std::cmp::Reverse((snapshot.created_unix_ms, snapshot.id)));
        Ok(all)
    }

    /// What changed from one snapshot to another. Blocks.
    ///
    /// # Errors
    /// As [`Self::load`].
    pub fn diff(&self, before: Digest, after: Digest) -> Result<Difference, SnapshotError> {
        let (before, after) = (self.read_files(before)?.0, self.read_files(after)?.0);
        Ok(diff::diff(&before, &after))
    }

    /// Deletes every snapshot not in `keep` and every stored file that then serves none. Returns
    /// how many snapshots and stored bytes went. Blocks, and waits for snapshots being made.
    ///
    /// # Errors
    /// [`SnapshotError`]; a damaged table stops it, since what it refers to is not known.
    pub fn collect(&self, keep: &HashSet<Digest>) -> Result<(u64, u64), SnapshotError> {
        let _alone = self.inner.store.alone()?;
        let (mut used, mut gone) = (HashSet::new(), Vec::new());
        for id in self.ids()? {
            if keep.contains(&id) {
                used.extend(self.read_files(id)?.1.stored());
            } else {
                gone.push(id);
            }
        }
        for &id in &gone {
            // The table first: without it the snapshot does not exist.
            for path in [self.sources_path(id), self.manifest_path(id)] {
                store::remove(&path)?;
            }
            self.inner.traces.forget(id)?;
            lock(&self.inner.loaded).remove(&id);
        }
        Ok((gone.len() as u64, self.inner.store.sweep(&used)?))
    }

    fn ids(&self) -> Result<Vec<Digest>, SnapshotError> {
        ids_in(&self.inner.dir)
    }

    fn read_files(&self, id: Digest) -> Result<(Manifest, SourceTable), SnapshotError> {
        let read = |path: PathBuf| {
            std::fs::read(&path).map_err(|source| match source.kind() {
                std::io::ErrorKind::NotFound => SnapshotError::NotFound(id),
                _ => SnapshotError::Store { path, source },
            })
        };
        let table =
            SourceTable::open(read(self.sources_path(id))?).ok_or(SnapshotError::DamagedSources { id })?;
        let manifest = Manifest::open(read(self.manifest_path(id))?, id)
            .map_err(|source| SnapshotError::Damaged { id, source })?;
        Ok((manifest, table))
    }

    fn manifest_path(&self, id: Digest) -> PathBuf {
        self.inner.dir.join(format!("{id}.manifest"))
    }

    fn sources_path(&self, id: Digest) -> PathBuf {
        self.inner.dir.join(format!("{id}.sources"))
    }
}

fn ids_in(dir: &Path) -> Result<Vec<Digest>, SnapshotError> {
    let mut ids = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(store::failed(dir))? {
        let name = entry.map_err(store::failed(dir))?.file_name();
        let id: Option<Digest> =
            name.to_str().and_then(|name| name.strip_suffix(".sources")).and_then(|hex| hex.parse().ok());
        ids.extend(id);
    }
    Ok(ids)
}

impl Record {
    fn into_snapshot(self, manifest: Manifest) -> Snapshot {
        Snapshot {
            id: manifest.id(),
            manifest,
            source: PathBuf::from(std::ffi::OsStr::from_bytes(&self.source)),
            files: self.files,
            bytes: self.bytes,
            class: self.class,
            single_file: self.single_file,
            outside_links: self.outside_links,
            skipped: self.skipped,
            created_unix_ms: self.created_unix_ms,
        }
    }
}

/// A poisoned lock guards data that is valid at every step, so it is used on.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
