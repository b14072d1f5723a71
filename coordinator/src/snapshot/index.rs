//! Hashes that are known already, so that an unchanged tree is frozen without reading it.
//!
//! Its own file, not limb's database: it is a cache that may be deleted at any time, and it must
//! not make the ledger wait.
//! Never: holds a file that might change without its times changing (see [`is_racy`]).

use std::path::Path;

use limb_common::id::Digest;
use rusqlite::{Connection, OptionalExtension as _, params};

use super::FileIdentity;
use super::walk::Xattrs;

/// Of the table below; what another version wrote is forgotten.
const VERSION: i64 = 2;

/// A file modified so shortly before it was read may be modified again within the same tick of
/// its file system's clock (2 s on FAT, the coarsest there is).
const RACY_NS: i64 = 2_000_000_000;

/// What was found in a file of this identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Known {
    /// One per chunk; `None` is a chunk of zeros.
    pub(super) chunks: Vec<Option<Digest>>,
    /// The hash of the whole, when it was put into the store.
    pub(super) content: Option<Digest>,
    /// Setting one changes a file's ctime, so they are as well known as its bytes.
    pub(super) xattrs: Xattrs,
}

#[derive(Debug)]
pub(super) struct Index {
    connection: Connection,
}

/// Its times were so close to the moment it was read that they prove nothing.
pub(super) fn is_racy(identity: &FileIdentity, read_at_ns: i64) -> bool {
    identity.mtime_ns.max(identity.ctime_ns) > read_at_ns.saturating_sub(RACY_NS)
}

impl Index {
    pub(super) fn open(path: &Path) -> rusqlite::Result<Self> {
        let connection = Connection::open(path)?;
        connection.execute_batch(
            "PRAGMA journal_mode = WAL; PRAGMA synchronous = NORMAL; PRAGMA busy_timeout = 5000;",
        )?;
        let version: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0))?;
        if version != VERSION {
            connection.execute_batch("DROP TABLE IF EXISTS known;")?;
            connection.pragma_update(None, "user_version", VERSION)?;
        }
        connection.execute_batch(
            "CREATE TABLE IF NOT EXISTS known (
                 dev INTEGER, ino INTEGER, size INTEGER, mtime_ns INTEGER, ctime_ns INTEGER,
                 chunks BLOB NOT NULL, content BLOB, xattrs BLOB,
                 PRIMARY KEY (dev, ino)
             ) STRICT, WITHOUT ROWID;",
        )?;
        Ok(Self { connection })
    }

    /// Of many files at once: one transaction costs less than one for each.
    pub(super) fn find_all(
        &self,
        identities: impl Iterator<Item = FileIdentity>,
    ) -> rusqlite::Result<Vec<Option<Known>>> {
        let _one = self.connection.unchecked_transaction()?;
        identities.map(|identity| self.find(&identity)).collect()
    }

    pub(super) fn find(&self, identity: &FileIdentity) -> rusqlite::Result<Option<Known>> {
        let mut statement = self.connection.prepare_cached(
            "SELECT chunks, content, xattrs FROM known
             WHERE dev = ?1 AND ino = ?2 AND size = ?3 AND mtime_ns = ?4 AND ctime_ns = ?5",
        )?;
        let row = statement
            .query_row(
                params![
                    identity.dev.cast_signed(),
                    identity.ino.cast_signed(),
                    identity.size.cast_signed(),
                    identity.mtime_ns,
                    identity.ctime_ns
                ],
                |row| {
                    Ok((
                        row.get::<_, Vec<u8>>(0)?,
                        row.get::<_, Option<Vec<u8>>>(1)?,
                        row.get::<_, Option<Vec<u8>>>(2)?,
                    ))
                },
            )
            .optional()?;
        Ok(row.and_then(|(chunks, content, xattrs)| {
            let pairs = xattrs.map(|raw| serde_json::from_slice::<Vec<(Vec<u8>, Vec<u8>)>>(&raw));
            let xattrs = pairs.transpose().ok()?.into_iter().flatten().collect();
            let chunks: Vec<_> = chunks
                .chunks_exact(32)
                .filter_map(|raw| Digest::try_from(raw).ok())
                .map(|digest| (digest.0 != [0; 32]).then_some(digest))
                .collect();
            let fits = chunks.len() as u64 == limb_common::chunk::chunk_count(identity.size);
            let content = content.and_then(|raw| Digest::try_from(raw.as_slice()).ok());
            fits.then_some(Known { chunks, content, xattrs })
        }))
    }

    /// All or nothing; a crash loses at most these.
    pub(super) fn put(&mut self, rows: &[(FileIdentity, Known)]) -> rusqlite::Result<()> {
        let transaction = self.connection.transaction()?;
        {
            let mut statement = transaction
                .prepare_cached("INSERT OR REPLACE INTO known VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8)")?;
            for (identity, known) in rows {
                let chunks: Vec<u8> =
                    known.chunks.iter().flat_map(|chunk| chunk.map_or([0; 32], |digest| digest.0)).collect();
                let pairs: Vec<_> = known.xattrs.iter().collect();
                let xattrs = (!pairs.is_empty()).then(|| serde_json::to_vec(&pairs).ok()).flatten();
                statement.execute(params![
                    identity.dev.cast_signed(),
                    identity.ino.cast_signed(),
                    identity.size.cast_signed(),
                    identity.mtime_ns,
                    identity.ctime_ns,
                    chunks,
                    known.content.map(|digest| digest.0.to_vec()),
                    xattrs
                ])?;
            }
        }
        transaction.commit()
    }

    /// The file was found to differ from what is known of it although its times are the same.
    pub(super) fn forget(&self, identity: &FileIdentity) -> rusqlite::Result<()> {
        self.connection
            .prepare_cached("DELETE FROM known WHERE dev = ?1 AND ino = ?2")?
            .execute(params![identity.dev.cast_signed(), identity.ino.cast_signed()])
            .map(drop)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn any_difference_in_identity_is_a_miss_and_fresh_times_are_racy() {
        let dir = tempfile::tempdir().unwrap();
        let mut index = Index::open(&dir.path().join("index.db")).unwrap();
        let identity = FileIdentity { dev: u64::MAX, ino: 7, size: 3 << 20, mtime_ns: -4, ctime_ns: 5 };
        let xattrs = Xattrs::from([(b"user.a".to_vec(), vec![0, 255]), (b"user.b".to_vec(), Vec::new())]);
        let chunks = vec![Some(Digest([1; 32])), None, Some(Digest([2; 32]))];
        let known = Known { chunks, content: None, xattrs };
        index.put(&[(identity, known.clone())]).unwrap();
        assert_eq!(index.find(&identity).unwrap(), Some(known));
        for other in [
            FileIdentity { dev: 1, ..identity },
            FileIdentity { ino: 8, ..identity },
            FileIdentity { size: 1, ..identity },
            FileIdentity { mtime_ns: -3, ..identity },
            FileIdentity { ctime_ns: 6, ..identity },
        ] {
            assert_eq!(index.find(&other).unwrap(), None);
        }
        index.forget(&identity).unwrap();
        assert_eq!(index.find(&identity).unwrap(), None);
        let at = |mtime_ns, ctime_ns| FileIdentity { mtime_ns, ctime_ns, ..identity };
        let now = 100 * RACY_NS;
        assert!(!is_racy(&at(now - RACY_NS, now - RACY_NS), now));
        assert!(is_racy(&at(now - RACY_NS + 1, 0), now));
        assert!(is_racy(&at(0, now - RACY_NS + 1), now));
        assert!(is_racy(&at(now + RACY_NS, 0), now), "a time in the future proves nothing");
    }
}
