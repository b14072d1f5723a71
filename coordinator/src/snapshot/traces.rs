//! Access traces at home: one file for each set and job, `traces/<manifest>/<fingerprint>`, merged
//! from the runs of that job. Numbers of files and chunks, no names and no content.
//!
//! A trace is a hint: one that is lost, stale or damaged costs time and nothing else, so files are
//! bounded in number and size (the oldest go first) and go with their snapshot.
//!
//! Never: keep a number that the set's manifest does not have.

use std::collections::HashSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::SystemTime;

use limb_common::id::{AttemptNumber, Digest, RunId};
use limb_common::manifest::Manifest;
use limb_common::trace::{self, ChunkSet, MAX_TOUCHES, Touch};

use super::{SnapshotError, lock, store};

const MAGIC: &[u8; 8] = b"LIMBTRF\x01";
/// Attempts remembered in a file, newest first: what one sends again is no new run.
const WRITERS: usize = 8;
const HEAD_BYTES: usize = MAGIC.len() + 8 * WRITERS;
/// What so many runs in a row did not touch is forgotten.
const KEPT_RUNS: u32 = 3;
/// Of all jobs and sets.
const MAX_FILES: usize = 1000;
const MAX_BYTES: u64 = 256 << 20;

/// What a trace belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct TraceKey {
    pub manifest: Digest,
    /// The job's fingerprint.
    pub job: Digest,
}

/// All traces of this home. Cheap to clone; every call blocks.
#[derive(Clone, Debug)]
pub struct Traces {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    dir: PathBuf,
    /// Two attempts of one job may send at once.
    writing: Mutex<()>,
    max_files: usize,
    max_bytes: u64,
}

/// A file's content.
#[derive(Debug, Default, PartialEq, Eq)]
struct Stored {
    writers: Vec<u64>,
    touches: Vec<Touch>,
}

impl Traces {
    pub(super) fn open(state_dir: &Path, exists: impl Fn(Digest) -> bool) -> Result<Self, SnapshotError> {
        Self::bounded(state_dir, exists, MAX_FILES, MAX_BYTES)
    }

    fn bounded(
        state_dir: &Path,
        exists: impl Fn(Digest) -> bool,
        max_files: usize,
        max_bytes: u64,
    ) -> Result<Self, SnapshotError> {
        let dir = state_dir.join("traces");
        store::make_dir(&dir)?;
        for entry in fs::read_dir(&dir).map_err(store::failed(&dir))?.flatten() {
            let id: Option<Digest> = entry.file_name().to_str().and_then(|name| name.parse().ok());
            if !id.is_some_and(&exists) {
                remove_dir(&entry.path())?;
            }
        }
        Ok(Self { inner: Arc::new(Inner { dir, writing: Mutex::default(), max_files, max_bytes }) })
    }

    /// What is known, as a frame of [`trace`]; `None`: nothing.
    ///
    /// # Errors
    /// [`SnapshotError::Store`].
    pub fn plan(&self, key: &TraceKey) -> Result<Option<Vec<u8>>, SnapshotError> {
        let path = self.path(key);
        match fs::read(&path) {
            Ok(mut bytes) if bytes.len() >= HEAD_BYTES && bytes.starts_with(MAGIC) => {
                Ok(Some(bytes.split_off(HEAD_BYTES)))
            }
            Ok(_) => Ok(None),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(store::failed(&path)(error)),
        }
    }

    /// Takes what an attempt has touched so far.
    ///
    /// # Errors
    /// [`SnapshotError::Store`].
    pub fn record(
        &self,
        key: &TraceKey,
        manifest: &Manifest,
        (run, attempt): (&RunId, AttemptNumber),
        touches: Vec<Touch>,
    ) -> Result<(), SnapshotError> {
        let new = trace::of_set(manifest, touches);
        if new.is_empty() {
            return Ok(());
        }
        let _alone = lock(&self.inner.writing);
        let before = self.read(key);
        let after = before.merged(manifest, writer(run, attempt), &new);
        let path = self.path(key);
        store::make_dir(path.parent().unwrap_or(&self.inner.dir))?;
        let bytes = after.encode().map_err(store::failed(&path))?;
        store::write_durably(&path, &bytes)?;
        self.trim()
    }

    /// Forgets everything about a set.
    pub(super) fn forget(&self, manifest: Digest) -> Result<(), SnapshotError> {
        let _alone = lock(&self.inner.writing);
        remove_dir(&self.inner.dir.join(manifest.to_hex()))
    }

    fn path(&self, key: &TraceKey) -> PathBuf {
        self.inner.dir.join(key.manifest.to_hex()).join(key.job.to_hex())
    }

    /// What cannot be read counts as nothing.
    fn read(&self, key: &TraceKey) -> Stored {
        fs::read(self.path(key)).ok().and_then(|bytes| Stored::decode(&bytes)).unwrap_or_default()
    }

    /// The oldest go until the rest is within its bounds.
    fn trim(&self) -> Result<(), SnapshotError> {
        let mut files = Vec::new();
        let entries = |dir: &Path| fs::read_dir(dir).into_iter().flatten().flatten();
        for directory in entries(&self.inner.dir) {
            for file in entries(&directory.path()) {
                let Ok(meta) = file.metadata() else { continue };
                let modified = meta.modified().unwrap_or(SystemTime::UNIX_EPOCH);
                files.push((std::cmp::Reverse(modified), meta.len(), file.path()));
            }
        }
        files.sort();
        let mut bytes = 0;
        for (at, (_, len, path)) in files.iter().enumerate() {
            bytes += len;
            if at >= self.inner.max_files || bytes > self.inner.max_bytes {
                store::remove(path)?;
                // Fails while others are in it.
                drop(path.parent().map(fs::remove_dir));
            }
        }
        Ok(())
    }
}

fn remove_dir(path: &Path) -> Result<(), SnapshotError> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(store::failed(path)(error)),
        _ => Ok(()),
    }
}

fn writer(run: &RunId, attempt: AttemptNumber) -> u64 {
    let hash = Digest::of(format!("{run}/{}", attempt.0).as_bytes());
    hash.0.iter().take(8).fold(0, |number, &byte| number << 8 | u64::from(byte))
}

impl Stored {
    fn encode(&self) -> std::io::Result<Vec<u8>> {
        let mut bytes = MAGIC.to_vec();
        for at in 0..WRITERS {
            bytes.extend(self.writers.get(at).copied().unwrap_or_default().to_le_bytes());
        }
        bytes.extend(trace::encode(&self.touches)?);
        Ok(bytes)
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let (head, frame) = bytes.split_at_checked(HEAD_BYTES)?;
        let writers = head.strip_prefix(MAGIC)?.chunks_exact(8);
        let number = |raw: &[u8]| Some(u64::from_le_bytes(raw.try_into().ok()?));
        let writers = writers.filter_map(number).filter(|&writer| writer != 0).collect();
        Some(Self { writers, touches: trace::decode(frame).ok()? })
    }

    /// The newest order first; behind it what earlier runs touched and this one did not (yet), until
    /// [`KEPT_RUNS`] in a row did not.
    fn merged(self, manifest: &Manifest, writer: u64, new: &[Touch]) -> Self {
        let older = u32::from(!self.writers.contains(&writer));
        let mut seen = ChunkSet::of(manifest);
        let mut touches: Vec<Touch> = Vec::with_capacity(new.len());
        let numbered = |touch: Touch| touch.find(manifest).map(|(_, number)| (touch, number));
        for (touch, number) in new.iter().copied().filter_map(numbered) {
            seen.insert(number);
            touches.push(touch.with_note(0));
        }
        let before = self.touches.into_iter().filter_map(numbered);
        for (touch, number) in before {
            let note = touch.note.saturating_add(older);
            if note < KEPT_RUNS && touches.len() < MAX_TOUCHES && seen.insert(number) {
                touches.push(touch.with_note(note));
            }
        }
        let others = self.writers.into_iter().filter(|&other| other != writer);
        let writers = std::iter::once(writer).chain(others).take(WRITERS).collect();
        Self { writers, touches }
    }
}

/// Those of `ids` that no snapshot of ours has.
pub(super) fn known(ids: Vec<Digest>) -> impl Fn(Digest) -> bool {
    let ids: HashSet<Digest> = ids.into_iter().collect();
    move |id| ids.contains(&id)
}

#[cfg(test)]
mod tests {
    use limb_common::chunk::{Position, value_of};
    use limb_common::manifest::{Inode, ManifestBuilder, NewNode, NodeMeta};
    use proptest::prelude::*;

    use super::*;

    /// A set of so many small files; inodes from 2.
    fn set(files: u64) -> Manifest {
        let mut builder = ManifestBuilder::new(NodeMeta::default());
        for number in 0..files {
            let chunks = vec![Some(value_of(Position::of(8, 0), &number.to_le_bytes()))];
            let (root, name) = (builder.root(), format!("{number:04}"));
            builder
                .add(root, name.as_bytes(), NewNode::File { size: 8, chunks }, NodeMeta::default())
                .unwrap();
        }
        builder.build().0
    }

    fn touches(inodes: impl IntoIterator<Item = u64>) -> Vec<Touch> {
        inodes.into_iter().map(|inode| Touch::new(Inode(inode), 0, 77).unwrap()).collect()
    }

    fn inodes(stored: &Stored) -> Vec<u64> {
        stored.touches.iter().map(|touch| touch.inode().0).collect()
    }

    fn key(manifest: &Manifest, job: u8) -> TraceKey {
        TraceKey { manifest: manifest.id(), job: Digest([job; 32]) }
    }

    #[test]
    fn the_newest_order_leads_and_what_three_runs_left_out_is_forgotten() {
        let manifest = set(9);
        let mut stored = Stored::default().merged(&manifest, 1, &touches([2, 3, 4, 5]));
        // The same attempt goes on: nothing has aged.
        stored = stored.merged(&manifest, 1, &touches([2, 3, 4, 5, 6]));
        assert_eq!(inodes(&stored), [2, 3, 4, 5, 6]);
        stored = stored.merged(&manifest, 2, &touches([6, 5, 2]));
        assert_eq!(inodes(&stored), [6, 5, 2, 3, 4]);
        stored = stored.merged(&manifest, 3, &touches([3]));
        assert_eq!(inodes(&stored), [3, 6, 5, 2, 4]);
        // Two at once, in turns: each counts once.
        for writer in [4, 3, 4, 3, 4] {
            stored = stored.merged(&manifest, writer, &touches([3]));
        }
        assert_eq!(inodes(&stored), [3, 6, 5, 2]);
        stored = stored.merged(&manifest, 5, &touches([7]));
        assert_eq!(inodes(&stored), [7, 3]);
        let again = Stored::decode(&stored.encode().unwrap()).unwrap();
        assert_eq!(again, stored);
    }

    #[test]
    fn traces_are_bounded_and_go_with_their_snapshot() {
        let dir = tempfile::tempdir().unwrap();
        let traces = Traces::bounded(dir.path(), |_| true, 3, 1 << 20).unwrap();
        let (manifest, other) = (set(4), set(5));
        let run = RunId::random();
        let who = (&run, AttemptNumber(1));
        for job in 0..5 {
            traces.record(&key(&manifest, job), &manifest, who, touches([2, 3])).unwrap();
        }
        let known = |manifest, job| traces.plan(&key(manifest, job)).unwrap().is_some();
        assert_eq!((0..5).filter(|&job| known(&manifest, job)).count(), 3);
        assert!(known(&manifest, 4), "the newest stays");
        traces.record(&key(&other, 0), &other, who, touches([2, 99, 1])).unwrap();
        let plan = trace::decode(&traces.plan(&key(&other, 0)).unwrap().unwrap()).unwrap();
        assert_eq!(plan.iter().map(|touch| touch.inode().0).collect::<Vec<_>>(), [2]);

        traces.forget(manifest.id()).unwrap();
        assert!((0..5).all(|job| !known(&manifest, job)) && known(&other, 0));
        // Nothing that the set has: nothing is kept.
        traces.record(&key(&manifest, 1), &manifest, who, touches([1, 0, 800])).unwrap();
        assert!(!known(&manifest, 1));
        drop(Traces::open(dir.path(), |_| false).unwrap());
        assert!(!known(&other, 0));

        let small = Traces::bounded(dir.path(), |_| true, 3, 10).unwrap();
        small.record(&key(&manifest, 1), &manifest, who, touches([2])).unwrap();
        assert!(!known(&manifest, 1), "larger than all may be together");
    }

    #[test]
    fn a_damaged_file_counts_as_none_and_is_written_anew() {
        let dir = tempfile::tempdir().unwrap();
        let traces = Traces::open(dir.path(), |_| true).unwrap();
        let manifest = set(4);
        let (run, key) = (RunId::random(), key(&manifest, 1));
        for damage in
            [Vec::new(), b"LIMBTRF\x01".to_vec(), vec![7; 300], [MAGIC.as_slice(), &[0; 90]].concat()]
        {
            traces.record(&key, &manifest, (&run, AttemptNumber(1)), touches([2, 3])).unwrap();
            fs::write(traces.path(&key), damage).unwrap();
            traces.record(&key, &manifest, (&run, AttemptNumber(2)), touches([3])).unwrap();
            assert_eq!(inodes(&traces.read(&key)), [3]);
            fs::remove_file(traces.path(&key)).unwrap();
        }
    }

    proptest! {
        #[test]
        fn a_merge_holds_each_chunk_once_and_begins_with_the_newest(
            runs in proptest::collection::vec(proptest::collection::vec(0_u64..60, 0..80), 1..8),
        ) {
            let manifest = set(40);
            let mut stored = Stored::default();
            for (writer, run) in (1..).zip(runs) {
                let new = trace::of_set(&manifest, touches(run));
                stored = stored.merged(&manifest, writer, &new);
                let all = inodes(&stored);
                let newest: Vec<_> = new.iter().map(|touch| touch.inode().0).collect();
                prop_assert!(all.starts_with(&newest));
                prop_assert_eq!(all.iter().collect::<HashSet<_>>().len(), all.len());
                prop_assert!(stored.touches.iter().all(|touch| touch.note < KEPT_RUNS));
            }
        }
    }
}
