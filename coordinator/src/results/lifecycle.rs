//! Around the journal: who may write where, the beginning and end of an attempt, and what a
//! coordinator does with results when it starts.

use std::collections::HashMap;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use limb_common::assignment::OutputNumber;
use limb_common::id::{Digest, RunId};
use nix::errno::Errno;
use nix::fcntl::OFlag;
use rusqlite::params;

use super::disk::{DiskError, look, open_beneath, open_in, open_root};
use super::effect::{Effect, Intent};
use super::execute::Owned;
use super::names::ResultPath;
use super::part::root_of;
use super::table::{self, Name, OutputRow};
use super::writer::{LIMB_DIRECTORY, Writer};
use super::{AttemptId, Inner, ResultsError, ResultsHome};

/// One output of an attempt that begins.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OutputBegin {
    pub output: OutputNumber,
    pub dest: PathBuf,
    /// The manifest that [`ResultsHome::lower`] gave for it.
    pub lower: Option<Digest>,
    pub quota_bytes: Option<u64>,
    pub quota_inodes: Option<u64>,
}

/// What an attempt left.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Finished {
    /// Published by this attempt and standing as they were (by identity, size and mtime).
    pub files: u64,
    pub bytes: u64,
    /// Unfinished files, kept as NAME.partial: full paths, lossy.
    pub partials: Vec<String>,
    /// Published by this attempt, and missing or changed by now: full paths, lossy.
    pub gone: Vec<String>,
}

impl ResultsHome {
    /// Makes the directory and locks it for one run, also against directories above and below.
    /// Survives a restart; the same run may ask again.
    ///
    /// # Errors
    /// [`ResultsError::Locked`] names the other run; [`ResultsError::Destination`].
    pub async fn lock_dest(&self, dest: &Path, run: &RunId) -> Result<(), ResultsError> {
        let (dest, run) = (dest.to_owned(), run.clone());
        self.blocking(move |inner| {
            let key = make_dest(&dest)?;
            inner.database.write_blocking(move |db| {
                let other = table::locks(db)?
                    .into_iter()
                    .find(|(other, by)| by != run.as_str() && overlaps(other, &key));
                if let Some((_, by)) = other {
                    return Err(ResultsError::Locked { dest, by });
                }
                db.execute(
                    "INSERT OR REPLACE INTO result_locks VALUES (?1, ?2)",
                    params![key, run.as_str()],
                )?;
                Ok(())
            })
        })
        .await
    }

    /// Asks whether any run holds this directory, or one above or below it, and makes nothing.
    ///
    /// # Errors
    /// [`ResultsError::Locked`] names the run.
    pub async fn check_free(&self, dest: &Path) -> Result<(), ResultsError> {
        let dest = dest.to_owned();
        self.blocking(move |inner| {
            let real = dest.ancestors().find_map(|there| {
                let real = std::fs::canonicalize(there).ok()?;
                Some(real.join(dest.strip_prefix(there).ok()?))
            });
            let key = real.unwrap_or_else(|| dest.clone()).into_os_string().into_vec();
            let locks = inner.database.read_blocking(table::locks)?;
            match locks.into_iter().find(|(other, _)| overlaps(other, &key)) {
                Some((_, by)) => Err(ResultsError::Locked { dest, by }),
                None => Ok(()),
            }
        })
        .await
    }

    /// Gives back every directory that the run holds. For the end of the run, not of an attempt.
    ///
    /// # Errors
    /// [`ResultsError::Database`].
    pub async fn unlock_dests(&self, run: &RunId) -> Result<(), ResultsError> {
        let run = run.clone();
        self.inner
            .database
            .write(move |db| {
                db.execute("DELETE FROM result_locks WHERE run = ?1", params![run.as_str()])?;
                Ok(())
            })
            .await
    }

    /// The runs that hold a directory, each once.
    ///
    /// # Errors
    /// [`ResultsError::Database`].
    pub async fn locked_runs(&self) -> Result<Vec<RunId>, ResultsError> {
        let locks = self.blocking(|inner| inner.database.read_blocking(table::locks)).await?;
        let names: std::collections::BTreeSet<String> = locks.into_iter().map(|(_, run)| run).collect();
        // Only this program writes the table; a name that is no run's holds nothing for anybody.
        Ok(names.iter().filter_map(|name| name.parse().ok()).collect())
    }

    /// The attempt may send results from now on. Asking again is harmless.
    ///
    /// # Errors
    /// [`ResultsError::Destination`].
    pub async fn begin(&self, id: &AttemptId, outputs: Vec<OutputBegin>) -> Result<(), ResultsError> {
        let id = id.clone();
        self.blocking(move |inner| {
            let mut rows = Vec::with_capacity(outputs.len());
            for output in outputs {
                rows.push(OutputRow {
                    output: output.output.0,
                    dest: make_dest(&output.dest)?,
                    lower: output.lower.map(|digest| digest.0.to_vec()),
                    quota_bytes: output.quota_bytes,
                    quota_inodes: output.quota_inodes,
                });
            }
            inner.database.write_blocking(move |db| table::begin(db, &id, &rows))
        })
        .await
    }

    /// No more results from this attempt: its streams are refused, what it did not publish is kept
    /// as NAME.partial and named, `.limb` goes. Asking again gives the same counts.
    ///
    /// # Errors
    /// [`ResultsError`]; ask again later.
    pub async fn finish(&self, id: &AttemptId) -> Result<Finished, ResultsError> {
        let slot = self.slot(id);
        // Streams of before are refused from here on.
        slot.session.fetch_add(1, std::sync::atomic::Ordering::SeqCst);
        let wanted = id.clone();
        let finished = self
            .blocking(move |inner| {
                match inner.with_writer(&wanted, &slot, None, Writer::finish) {
                    Ok(()) | Err(ResultsError::Ended | ResultsError::UnknownAttempt) => {}
                    Err(other) => return Err(other),
                }
                super::lock(&slot.writer).take();
                inner.summary(&wanted)
            })
            .await?;
        super::lock(&self.inner.attempts).remove(id);
        Ok(finished)
    }

    /// At coordinator start: batches that were cut short are finished, visible files that grew too
    /// far are cut back. Parts of attempts that still live are kept. Answers with the attempts
    /// that have not ended.
    ///
    /// # Errors
    /// [`ResultsError`] where even the table cannot be read. An attempt whose destination is out
    /// of reach is only logged: it is tried again when its agent or `finish` asks.
    pub async fn recover(&self) -> Result<Vec<AttemptId>, ResultsError> {
        let live = self.blocking(|inner| inner.database.read_blocking(table::live_attempts)).await?;
        for id in &live {
            let (slot, wanted) = (self.slot(id), id.clone());
            let loaded =
                self.blocking(move |inner| inner.with_writer(&wanted, &slot, None, |_| Ok(()))).await;
            match loaded {
                Ok(()) => {}
                Err(ResultsError::Stopped) => return Err(ResultsError::Stopped),
                Err(error) => tracing::warn!(
                    run = %id.run,
                    attempt = %id.attempt,
                    error = limb_common::error::chain(&error),
                    "could not recover results yet"
                ),
            }
        }
        Ok(live)
    }
}

impl Inner {
    fn summary(&self, id: &AttemptId) -> Result<Finished, ResultsError> {
        let wanted = id.clone();
        let (names, mut finished) = self.database.read_blocking(move |db| {
            let mut finished = Finished::default();
            let names = table::names_of_run(db, &wanted.run)?;
            let outputs = table::outputs(db, &wanted)?;
            for (attempt, output, path) in table::partials(db, &wanted.run)? {
                let home = outputs.iter().find(|row| row.output == output);
                if let (true, Some(home)) = (attempt == wanted.attempt.0, home) {
                    let full = [&home.dest, &b"/"[..], &path].concat();
                    finished.partials.push(String::from_utf8_lossy(&full).into_owned());
                }
            }
            Ok::<_, ResultsError>((names, finished))
        })?;
        let mut roots: HashMap<Vec<u8>, Option<OwnedFd>> = HashMap::new();
        for (dest, name) in names {
            if name.attempt != id.attempt.0 || name.what.root.is_none() {
                continue;
            }
            let full = [&dest, &b"/"[..], &name.path].concat();
            // By its name, not by what was open: the directory itself may be gone.
            let root = roots.entry(dest).or_insert_with_key(|dest| open_root(&bytes_path(dest)).ok());
            if root.as_ref().is_some_and(|root| stands(root, &name)) {
                finished.files += 1;
                finished.bytes += name.what.size;
            } else {
                finished.gone.push(String::from_utf8_lossy(&full).into_owned());
            }
        }
        Ok(finished)
    }
}

/// Is it still there as it was published? Bytes are not read: `verify` does that.
fn stands(root: &OwnedFd, name: &Name) -> bool {
    let Ok(path) = ResultPath::parse(&name.path) else { return false };
    let seen = open_beneath(root, path.parent()).and_then(|parent| look(&parent, path.name()));
    seen.ok().flatten().is_some_and(|seen| Owned::from(&name.what).matches(&seen))
}

impl Writer {
    fn finish(&mut self) -> Result<(), ResultsError> {
        let mut keys: Vec<_> = self.files.keys().copied().collect();
        keys.sort_unstable();
        for (output, file) in keys {
            let effect = if self.is_whole_in_place(output, file)? {
                Effect::Nothing
            } else {
                self.partial_effect(output, file)?
            };
            if let Effect::Refused { detail, .. } = &effect {
                self.event(format!("an unfinished file could not be kept: {detail}"));
            }
            // Not an entry of the box: seq 0 never counts as applied.
            self.commit_own(Intent { seq: 0, output, effect })?;
        }
        let id = self.id.clone();
        self.database.write_blocking(move |db| table::end_attempt(db, &id))?;
        self.sweep();
        Ok(())
    }

    /// Published in place, never closed, and yet what was last recorded: nothing to do.
    fn is_whole_in_place(&self, output: u32, file: u64) -> Result<bool, ResultsError> {
        let (id, Some(home)) = (self.id.clone(), self.outputs.get(&output)) else { return Ok(false) };
        let name = self.database.read_blocking(move |db| table::name_of_file(db, &id, output, file))?;
        let Some(name) = name.filter(|name| name.what.open) else { return Ok(false) };
        let Some(root) = name.what.root else { return Ok(false) };
        let Ok(Some((parent, path, seen))) = home.find(&name.path) else { return Ok(false) };
        if seen.ident != name.what.ident || seen.size != name.what.size {
            return Ok(false);
        }
        let Ok(opened) = open_in(&parent, path.name(), OFlag::O_RDONLY) else { return Ok(false) };
        Ok(root_of(&opened, seen.size).is_ok_and(|found| found.0 == root))
    }

    /// Removes what this attempt left in `.limb`, and `.limb` when it is empty. What cannot be
    /// removed stays: it is private and harmless.
    fn sweep(&self) {
        for home in self.outputs.values() {
            let entries = std::fs::read_dir(bytes_path(&home.dest).join(bytes_path(LIMB_DIRECTORY)));
            for entry in entries.into_iter().flatten().flatten() {
                let name = entry.file_name().into_vec();
                if !name.starts_with(self.prefix().as_bytes()) {
                    continue;
                }
                let directory = look(&home.limb, &name)
                    .ok()
                    .flatten()
                    .is_some_and(|seen| seen.kind == super::disk::Kind::Directory);
                let removed = if directory {
                    self.disk.remove_directory(home.limb.as_fd(), &name)
                } else {
                    self.disk.unlink(home.limb.as_fd(), &name)
                };
                if let Err(error) = removed {
                    tracing::debug!(%error, "a private file stays");
                }
            }
            match self.disk.remove_directory(home.root.as_fd(), LIMB_DIRECTORY) {
                Ok(()) | Err(DiskError::Os(Errno::ENOTEMPTY | Errno::ENOENT)) => {}
                Err(error) => tracing::debug!(%error, ".limb stays"),
            }
        }
    }
}

/// Is one of these the other, or below it?
fn overlaps(one: &[u8], other: &[u8]) -> bool {
    let (one, other) = (bytes_path(one), bytes_path(other));
    one.starts_with(&other) || other.starts_with(&one)
}

pub(super) fn bytes_path(bytes: &[u8]) -> PathBuf {
    PathBuf::from(std::ffi::OsStr::from_bytes(bytes))
}

/// Makes a destination and gives the one name by which the table knows it.
pub(super) fn make_dest(dest: &Path) -> Result<Vec<u8>, ResultsError> {
    let failed = |error: std::io::Error| ResultsError::Destination {
        path: dest.to_owned(),
        source: error.raw_os_error().map_or(Errno::EIO, Errno::from_raw),
    };
    std::fs::create_dir_all(dest).map_err(failed)?;
    let real = std::fs::canonicalize(dest).map_err(failed)?;
    open_root(&real).map_err(|source| ResultsError::Destination { path: dest.to_owned(), source })?;
    Ok(real.into_os_string().into_vec())
}
