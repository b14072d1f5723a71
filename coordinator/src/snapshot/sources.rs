//! Where the bytes of each inode of a snapshot are: one fixed record per inode, so that a table
//! of a million files is opened without parsing.
//!
//! ```text
//! magic 8 B | record length u64 | inodes u64 | record (JSON) | 64 B per inode | paths | BLAKE3 of all before
//! ```

use std::fs::Metadata;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use limb_common::id::Digest;
use limb_common::manifest::Inode;

use super::Record;
use super::store::Place;

const MAGIC: &[u8; 8] = b"LIMBSRC\x01";
const HEADER_BYTES: usize = 24;
const ENTRY_BYTES: usize = 64;
const HASH_BYTES: usize = 32;
const KIND_STORE: u8 = 1;
const KIND_IN_PLACE: u8 = 2;

/// One state of one file, as far as the kernel tells without reading it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct FileIdentity {
    pub dev: u64,
    pub ino: u64,
    pub size: u64,
    pub mtime_ns: i64,
    pub ctime_ns: i64,
}

impl FileIdentity {
    #[must_use]
    pub fn of(meta: &Metadata) -> Self {
        Self {
            dev: meta.dev(),
            ino: meta.ino(),
            size: meta.size(),
            mtime_ns: nanoseconds(meta.mtime(), meta.mtime_nsec()),
            ctime_ns: nanoseconds(meta.ctime(), meta.ctime_nsec()),
        }
    }
}

/// Saturates beyond the year 2262.
pub(super) fn nanoseconds(seconds: i64, nanoseconds: i64) -> i64 {
    seconds.saturating_mul(1_000_000_000).saturating_add(nanoseconds)
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// A directory or link, or a file that nobody knows a source of.
    Nothing,
    /// This content in the store.
    Store(Digest, Place),
    InPlace {
        path: PathBuf,
        identity: FileIdentity,
    },
}

#[derive(Debug)]
pub(super) struct SourceTable {
    bytes: Vec<u8>,
    entries_at: usize,
    inodes: usize,
}

impl SourceTable {
    /// `sources` in order of inode.
    pub(super) fn encode(record: &Record, sources: &[Source]) -> Vec<u8> {
        // A record has no map with other keys than text, so this cannot fail.
        let record = serde_json::to_vec(record).unwrap_or_default();
        let mut out = Vec::with_capacity(HEADER_BYTES + record.len() + sources.len() * ENTRY_BYTES);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&(record.len() as u64).to_le_bytes());
        out.extend_from_slice(&(sources.len() as u64).to_le_bytes());
        out.extend_from_slice(&record);
        let mut paths = Vec::new();
        for source in sources {
            let mut entry = [0_u8; ENTRY_BYTES];
            match source {
                Source::Nothing => {}
                Source::Store(content, place) => {
                    entry[0] = KIND_STORE;
                    entry[8..40].copy_from_slice(&content.0);
                    // No pack has number 0, which is what tables before there were packs say here.
                    if let Place::Pack { pack, at } = place {
                        entry[40..48].copy_from_slice(&pack.to_le_bytes());
                        entry[48..56].copy_from_slice(&at.to_le_bytes());
                    }
                }
                Source::InPlace { path, identity } => {
                    entry[0] = KIND_IN_PLACE;
                    let path = path.as_os_str().as_bytes();
                    let numbers = [
                        identity.dev.to_le_bytes(),
                        identity.ino.to_le_bytes(),
                        identity.size.to_le_bytes(),
                        identity.mtime_ns.to_le_bytes(),
                        identity.ctime_ns.to_le_bytes(),
                        (paths.len() as u64).to_le_bytes(),
                        (path.len() as u64).to_le_bytes(),
                    ];
                    for (place, number) in entry[8..].chunks_exact_mut(8).zip(numbers) {
                        place.copy_from_slice(&number);
                    }
                    paths.extend_from_slice(path);
                }
            }
            out.extend_from_slice(&entry);
        }
        out.extend_from_slice(&paths);
        let hash = Digest::of(&out);
        out.extend_from_slice(&hash.0);
        out
    }

    /// `None`: not what [`Self::encode`] wrote.
    pub(super) fn open(mut bytes: Vec<u8>) -> Option<Self> {
        let body = bytes.len().checked_sub(HASH_BYTES)?;
        if bytes.get(..8)? != MAGIC || Digest::of(&bytes[..body]).0 != bytes[body..] {
            return None;
        }
        bytes.truncate(body);
        let entries_at = HEADER_BYTES.checked_add(usize::try_from(number(&bytes, 8)?).ok()?)?;
        let inodes = usize::try_from(number(&bytes, 16)?).ok()?;
        let paths_at = inodes.checked_mul(ENTRY_BYTES)?.checked_add(entries_at)?;
        (paths_at <= bytes.len()).then_some(Self { bytes, entries_at, inodes })
    }

    pub(super) fn record(&self) -> Option<Record> {
        serde_json::from_slice(self.bytes.get(HEADER_BYTES..self.entries_at)?).ok()
    }

    pub(super) fn get(&self, inode: Inode) -> Source {
        self.find(inode).unwrap_or(Source::Nothing)
    }

    /// Contents in the store that this snapshot needs.
    pub(super) fn stored(&self) -> impl Iterator<Item = Digest> {
        (1..=self.inodes as u64).filter_map(|inode| match self.get(Inode(inode)) {
            Source::Store(content, _) => Some(content),
            Source::Nothing | Source::InPlace { .. } => None,
        })
    }

    fn find(&self, inode: Inode) -> Option<Source> {
        let index = usize::try_from(inode.0.checked_sub(1)?).ok().filter(|&index| index < self.inodes)?;
        let at = self.entries_at + index * ENTRY_BYTES;
        let entry = self.bytes.get(at..at + ENTRY_BYTES)?;
        match entry[0] {
            KIND_STORE => {
                let content = Digest::try_from(&entry[8..40]).ok()?;
                Some(Source::Store(
                    content,
                    match number(entry, 40)? {
                        0 => Place::File,
                        pack => Place::Pack { pack, at: number(entry, 48)? },
                    },
                ))
            }
            KIND_IN_PLACE => {
                let [dev, ino, size, mtime, ctime, path_at, path_len] =
                    [8, 16, 24, 32, 40, 48, 56].map(|at| number(entry, at).unwrap_or(0));
                let start = self.entries_at + self.inodes * ENTRY_BYTES + usize::try_from(path_at).ok()?;
                let path = self.bytes.get(start..start.checked_add(usize::try_from(path_len).ok()?)?)?;
                Some(Source::InPlace {
                    path: PathBuf::from(std::ffi::OsStr::from_bytes(path)),
                    identity: FileIdentity {
                        dev,
                        ino,
                        size,
                        mtime_ns: mtime.cast_signed(),
                        ctime_ns: ctime.cast_signed(),
                    },
                })
            }
            _ => None,
        }
    }
}

fn number(bytes: &[u8], at: usize) -> Option<u64> {
    bytes.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes)
}
