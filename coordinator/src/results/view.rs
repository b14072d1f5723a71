//! Looking at results: what a run published, whether it is still that, and single chunks for the
//! agent that sent them.

use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use bytes::Bytes;
use limb_common::assignment::OutputNumber;
use limb_common::chunk::{CHUNK_BYTES_U64, chunk_len};
use limb_common::id::{Digest, RunId};
use limb_common::manifest::Inode;
use nix::errno::Errno;
use nix::fcntl::OFlag;

use super::disk::{Kind, look, open_beneath, open_in, open_root};
use super::execute::Owned;
use super::lifecycle::bytes_path;
use super::names::ResultPath;
use super::part::root_of;
use super::pins;
use super::table;
use super::writer::{Output, Writer, open_part};
use super::{AttemptId, ResultsError, ResultsHome};

/// One published name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    pub path: PathBuf,
    pub kind: ListedKind,
    pub size: u64,
    /// BLAKE3 of the content (`b3sum`); none for directories and links.
    pub root: Option<Digest>,
    pub attempt: u32,
    pub published_unix_ms: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ListedKind {
    File,
    Directory,
    Symlink,
    /// NAME.partial: cut short, never published.
    Partial,
}

/// What [`ResultsHome::verify`] found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    pub files: u64,
    pub bytes: u64,
    pub problems: Vec<Problem>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Problem {
    Missing { path: PathBuf },
    Mismatch { path: PathBuf, expected: Digest, found: Digest },
    Unreadable { path: PathBuf, errno: i32 },
}

/// A chunk of a result cannot be read back.
#[derive(Debug, thiserror::Error)]
pub enum ChunkReadError {
    /// Unknown, not this attempt's, or not there any more.
    #[error("there is no such chunk")]
    NotFound,
    #[error("the file at home is not what the agent sent")]
    Changed,
    #[error("home could not read it")]
    Io(#[source] ResultsError),
}

impl ResultsHome {
    /// Everything that a run published or left as partial, by path.
    ///
    /// # Errors
    /// A failure of the table.
    pub async fn list(&self, run: &RunId) -> Result<Vec<Listed>, ResultsError> {
        let run = run.clone();
        self.inner
            .database
            .read(move |db| {
                let mut found = Vec::new();
                for (dest, name) in table::names_of_run(db, &run)? {
                    found.push(Listed {
                        path: bytes_path(&dest).join(bytes_path(&name.path)),
                        kind: match name.what.kind {
                            Kind::File | Kind::Other => ListedKind::File,
                            Kind::Directory => ListedKind::Directory,
                            Kind::Symlink => ListedKind::Symlink,
                        },
                        size: name.what.size,
                        root: name.what.root.map(Digest),
                        attempt: name.attempt,
                        published_unix_ms: name.published_unix_ms,
                    });
                }
                for (attempt, output, path) in table::partials(db, &run)? {
                    let id = AttemptId { run: run.clone(), attempt: limb_common::id::AttemptNumber(attempt) };
                    let rows = table::outputs(db, &id)?;
                    let Some(row) = rows.iter().find(|row| row.output == output) else { continue };
                    let path = bytes_path(&row.dest).join(bytes_path(&path));
                    let Ok(stat) = std::fs::symlink_metadata(&path) else { continue };
                    found.push(Listed {
                        path,
                        kind: ListedKind::Partial,
                        size: stat.len(),
                        root: None,
                        attempt,
                        published_unix_ms: 0,
                    });
                }
                Ok(found)
            })
            .await
    }

    /// Reads every published file again and compares it with its hash.
    ///
    /// # Errors
    /// A failure of the table; what is wrong with files is in the answer.
    pub async fn verify(&self, run: &RunId) -> Result<Verified, ResultsError> {
        let run = run.clone();
        self.blocking(move |inner| {
            let names = inner.database.read_blocking(move |db| table::names_of_run(db, &run))?;
            let mut verified = Verified::default();
            for (dest, name) in names {
                let Some(root) = name.what.root.map(Digest) else { continue };
                let path = bytes_path(&dest).join(bytes_path(&name.path));
                match hash_of(&dest, &name.path) {
                    Ok((found, size)) if found == root => {
                        verified.files += 1;
                        verified.bytes += size;
                    }
                    Ok((found, _)) => {
                        verified.problems.push(Problem::Mismatch { path, expected: root, found });
                    }
                    Err(Errno::ENOENT | Errno::ENOTDIR) => verified.problems.push(Problem::Missing { path }),
                    Err(errno) => {
                        verified.problems.push(Problem::Unreadable { path, errno: errno as i32 });
                    }
                }
            }
            Ok(verified)
        })
        .await
    }

    /// A chunk of a file that this attempt sent, from its part or its newest published name. The
    /// agent checks it against the hash that it kept.
    ///
    /// # Errors
    /// [`ChunkReadError`]; unknown and forbidden are the same.
    pub async fn result_chunk(
        &self,
        id: &AttemptId,
        output: OutputNumber,
        file: u64,
        index: u64,
    ) -> Result<Bytes, ChunkReadError> {
        self.read_with(id, move |writer| writer.read_chunk(output.0, file, index)).await
    }

    /// A chunk of the lower set that this attempt began on, wherever its file stands now.
    ///
    /// # Errors
    /// As [`Self::result_chunk`].
    pub async fn lower_chunk(
        &self,
        id: &AttemptId,
        manifest: Digest,
        inode: Inode,
        index: u64,
    ) -> Result<Bytes, ChunkReadError> {
        self.read_with(id, move |writer| writer.read_lower(manifest, inode, index)).await
    }

    async fn read_with(
        &self,
        id: &AttemptId,
        read: impl FnOnce(&Writer) -> Result<Bytes, ChunkReadError> + Send + 'static,
    ) -> Result<Bytes, ChunkReadError> {
        let (slot, wanted) = (self.slot(id), id.clone());
        let read = move |writer: &mut Writer| Ok(read(writer));
        let result = self.blocking(move |inner| inner.with_writer(&wanted, &slot, None, read)).await;
        match result {
            Ok(answer) => answer,
            Err(ResultsError::UnknownAttempt | ResultsError::Ended) => Err(ChunkReadError::NotFound),
            Err(error) => Err(ChunkReadError::Io(error)),
        }
    }
}

fn hash_of(dest: &[u8], path: &[u8]) -> Result<(Digest, u64), Errno> {
    let root = open_root(&bytes_path(dest))?;
    let path = ResultPath::parse(path)?;
    let parent = open_beneath(&root, path.parent())?;
    let file = open_in(&parent, path.name(), OFlag::O_RDONLY)?;
    let size = file.metadata().map_err(|_| Errno::EIO)?.len();
    let found = root_of(&file, size).map_err(|_| Errno::EIO)?;
    Ok((found, size))
}

impl Writer {
    fn read_chunk(&self, output: u32, file: u64, index: u64) -> Result<Bytes, ChunkReadError> {
        let missing = |_| ChunkReadError::NotFound;
        let home = self.outputs.get(&output).ok_or(ChunkReadError::NotFound)?;
        let (opened, size) = if let Some(part) = self.files.get(&(output, file)) {
            (open_part(home, part).map_err(missing)?, part.extent)
        } else {
            let id = self.id.clone();
            let name = self
                .database
                .read_blocking(move |db| table::name_of_file(db, &id, output, file))
                .map_err(ChunkReadError::Io)?;
            let pin = pins::old_name(&self.prefix(), output, file);
            name.map_or(Err(ChunkReadError::NotFound), |name| open_name(home, &name))
                .or_else(|error| pins::open(home, &pin).ok_or(error))?
        };
        chunk_of(&opened, size, index)
    }

    /// Under whatever name the file stands now, or where its bytes are pinned.
    fn read_lower(&self, manifest: Digest, inode: Inode, index: u64) -> Result<Bytes, ChunkReadError> {
        let with_it = |home: &&Output| home.lower.as_deref() == Some(manifest.0.as_slice());
        for home in self.outputs.values().filter(with_it) {
            let dest = home.dest.clone();
            let name = self
                .database
                .read_blocking(move |db| table::lower_name(db, &dest, &manifest.0, inode.0))
                .map_err(ChunkReadError::Io)?;
            let ident = self
                .database
                .read_blocking(move |db| table::lower_ident(db, &manifest.0, inode.0))
                .map_err(ChunkReadError::Io)?
                .ok_or(ChunkReadError::NotFound)?;
            let pin = pins::lower_name(&self.prefix(), ident);
            let found = name.map_or(Err(ChunkReadError::NotFound), |name| open_name(home, &name));
            match found.or_else(|error| pins::open(home, &pin).ok_or(error)) {
                Ok((opened, size)) => return chunk_of(&opened, size, index),
                Err(error @ (ChunkReadError::Changed | ChunkReadError::Io(_))) => return Err(error),
                // Two outputs may have begun on the same set.
                Err(ChunkReadError::NotFound) => {}
            }
        }
        Err(ChunkReadError::NotFound)
    }
}

/// What a name of the table stands for, if it still does.
fn open_name(home: &Output, name: &table::Name) -> Result<(std::fs::File, u64), ChunkReadError> {
    let missing = |_| ChunkReadError::NotFound;
    let path = ResultPath::parse(&name.path).map_err(missing)?;
    let parent = open_beneath(&home.root, path.parent()).map_err(missing)?;
    let seen = look(&parent, path.name()).map_err(missing)?.ok_or(ChunkReadError::NotFound)?;
    if !Owned::from(&name.what).matches(&seen) {
        return Err(ChunkReadError::Changed);
    }
    Ok((open_in(&parent, path.name(), OFlag::O_RDONLY).map_err(missing)?, seen.size))
}

fn chunk_of(file: &std::fs::File, size: u64, index: u64) -> Result<Bytes, ChunkReadError> {
    let len = chunk_len(size, index);
    if len == 0 {
        return Err(ChunkReadError::NotFound);
    }
    let mut bytes = vec![0; len as usize];
    file.read_exact_at(&mut bytes, index * CHUNK_BYTES_U64)
        .map_err(|error| ChunkReadError::Io(super::disk::DiskError::from(error).into()))?;
    Ok(bytes.into())
}
