//! What no set may hold: home's own state, with its keys, ledger and other people's data.
//!
//! Told by (dev, ino), so that neither a link nor a bind mount is a way around it.

use std::collections::HashSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::SnapshotError;

/// Results of earlier runs that have no `dest` of their own: the owner may mount them.
const OPEN: &str = "workdir.changes";

type Id = (u64, u64);

#[derive(Debug)]
pub(super) struct Own {
    dir: PathBuf,
    ids: HashSet<Id>,
    open: Option<Id>,
}

fn id_of(path: &Path) -> Option<Id> {
    std::fs::symlink_metadata(path).ok().map(|meta| (meta.dev(), meta.ino()))
}

impl Own {
    /// The state directory and two levels of it: a bind mount or hard link of anything deeper is
    /// nobody's accident.
    pub(super) fn of(state_dir: &Path) -> Self {
        let dir = state_dir.canonicalize().unwrap_or_else(|_| state_dir.to_owned());
        let entries = |dir: &Path| std::fs::read_dir(dir).into_iter().flatten().flatten();
        let mut ids: HashSet<Id> = id_of(&dir).into_iter().collect();
        for entry in entries(&dir).filter(|entry| entry.file_name() != OPEN) {
            ids.extend(id_of(&entry.path()));
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                ids.extend(entries(&entry.path()).filter_map(|below| id_of(&below.path())));
            }
        }
        let open = id_of(&dir.join(OPEN));
        Self { dir, ids, open }
    }

    /// # Errors
    /// [`SnapshotError::Own`] where this is home's own.
    pub(super) fn check(&self, path: impl FnOnce() -> PathBuf, id: Id) -> Result<(), SnapshotError> {
        if self.ids.contains(&id) {
            return Err(SnapshotError::Own { path: path(), state_dir: self.dir.clone() });
        }
        Ok(())
    }

    /// A source and all that it lies in.
    ///
    /// # Errors
    /// As [`Self::check`].
    pub(super) fn check_source(&self, source: &Path) -> Result<(), SnapshotError> {
        for above in source.ancestors() {
            let Some(id) = id_of(above) else { continue };
            if Some(id) == self.open {
                return Ok(());
            }
            self.check(|| source.to_owned(), id)?;
        }
        Ok(())
    }
}
