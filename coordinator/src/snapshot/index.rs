//! Hashes that are known already, so that an unchanged tree is frozen without reading it.
//!
//! Its own file, not limb's database: it is a cache that may be deleted at any time, and it must
//! not make the ledger wait.
//! Never: holds a file that might change without its times changing (see [`is_racy`]).

use std::cmp::Ordering;
use std::path::{Path, PathBuf};

use limb_common::id::Digest;
use rusqlite::{Connection, Row, params};

use super::FileIdentity;
use super::store::Place;
use super::walk::Xattrs;

/// Of the table below; what another version wrote is forgotten.
const VERSION: i64 = 3;

/// A file modified so shortly before it was read may be modified again within the same tick of
/// its file system's clock (2 s on FAT, the coarsest there is).
const RACY_NS: i64 = 2_000_000_000;
/// Rows of other files that are stepped over before the next one is sought: a step costs a twentieth
/// of that.
const STEPS: usize = 16;

const COLUMNS: &str = "size, mtime_ns, ctime_ns, chunks, content, pack, pack_at, xattrs";

/// What was found in a file of this identity.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Known {
    /// One per chunk; `None` is a chunk of zeros.
    pub(super) chunks: Vec<Option<Digest>>,
    /// The hash of the whole and where it was put, when it was put into the store.
    pub(super) content: Option<(Digest, Place)>,
    /// Setting one changes a file's ctime, so they are as well known as its bytes.
    pub(super) xattrs: Xattrs,
}

#[derive(Debug)]
pub(super) struct Index {
    connection: Connection,
    path: PathBuf,
}

/// Its times were so close to the moment it was read that they prove nothing.
pub(super) fn is_racy(identity: &FileIdentity, read_at_ns: i64) -> bool {
    identity.mtime_ns.max(identity.ctime_ns) > read_at_ns.saturating_sub(RACY_NS)
}

/// [`Known`], borrowed.
#[derive(Clone, Copy, Debug)]
pub(super) struct KnownRef<'a> {
    pub(super) chunks: &'a [Option<Digest>],
    pub(super) content: Option<(Digest, Place)>,
    pub(super) xattrs: &'a Xattrs,
}

/// The order of the table.
pub(super) fn order(identity: &FileIdentity) -> impl Ord + use<> {
    (identity.dev.cast_signed(), identity.ino.cast_signed())
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
                 chunks BLOB NOT NULL,
                 -- Empty where it is the only chunk's.
                 content BLOB, pack INTEGER, pack_at INTEGER, xattrs BLOB,
                 PRIMARY KEY (dev, ino)
             ) STRICT, WITHOUT ROWID;",
        )?;
        Ok(Self { connection, path: path.to_owned() })
    }

    /// Another connection, for another thread to read by.
    pub(super) fn reader(&self) -> rusqlite::Result<Self> {
        let connection = Connection::open(&self.path)?;
        connection.execute_batch("PRAGMA query_only = TRUE; PRAGMA busy_timeout = 5000;")?;
        Ok(Self { connection, path: self.path.clone() })
    }

    /// Tells of each wanted file that is as it was what is known of it. Sorted by [`order`], most of
    /// them cost one step to the next row.
    pub(super) fn find_sorted(
        &self,
        wanted: &[FileIdentity],
        mut found: impl FnMut(usize, Known),
    ) -> rusqlite::Result<()> {
        let mut statement = self.connection.prepare_cached(&format!(
            "SELECT ino, {COLUMNS} FROM known WHERE dev = ?1 AND ino >= ?2 ORDER BY ino"
        ))?;
        let mut at = 0;
        while let Some(&FileIdentity { dev, ino, .. }) = wanted.get(at) {
            let mut rows = statement.query(params![dev.cast_signed(), ino.cast_signed()])?;
            let mut steps = 0;
            while steps < STEPS && wanted.get(at).is_some_and(|next| next.dev == dev) {
                let Some(row) = rows.next()? else {
                    at += wanted[at..].iter().take_while(|next| next.dev == dev).count();
                    break;
                };
                let here: i64 = row.get(0)?;
                steps += 1;
                while let Some(next) = wanted.get(at).filter(|next| next.dev == dev) {
                    match next.ino.cast_signed().cmp(&here) {
                        Ordering::Greater => break,
                        Ordering::Less => {}
                        Ordering::Equal => {
                            steps = 0;
                            if let Some(known) = known_in(row, next)? {
                                found(at, known);
                            }
                        }
                    }
                    at += 1;
                }
            }
        }
        Ok(())
    }

    #[cfg(test)]
    pub(super) fn find(&self, identity: &FileIdentity) -> rusqlite::Result<Option<Known>> {
        let mut answer = None;
        self.find_sorted(std::slice::from_ref(identity), |_, known| answer = Some(known))?;
        Ok(answer)
    }

    /// All or nothing; a crash loses at most these. Sorted by [`order`] it is several times as fast.
    pub(super) fn put<'a>(
        &mut self,
        rows: impl Iterator<Item = (FileIdentity, KnownRef<'a>)>,
    ) -> rusqlite::Result<()> {
        let transaction = self.connection.transaction()?;
        {
            let mut statement = transaction.prepare_cached(
                "INSERT OR REPLACE INTO known VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
            )?;
            let mut chunks = Vec::new();
            for (identity, known) in rows {
                chunks.clear();
                for chunk in known.chunks {
                    chunks.extend_from_slice(chunk.as_ref().map_or(&[0; 32], |digest| &digest.0));
                }
                let content = known.content.as_ref().map(|(content, _)| match known.chunks {
                    [Some(only)] if only == content => &[][..],
                    _ => &content.0[..],
                });
                let pack = match known.content {
                    Some((_, Place::Pack { pack, at })) => Some((pack.cast_signed(), at.cast_signed())),
                    Some((_, Place::File)) | None => None,
                };
                let pairs: Vec<_> = known.xattrs.iter().collect();
                let xattrs = (!pairs.is_empty()).then(|| serde_json::to_vec(&pairs).ok()).flatten();
                statement.execute(params![
                    identity.dev.cast_signed(),
                    identity.ino.cast_signed(),
                    identity.size.cast_signed(),
                    identity.mtime_ns,
                    identity.ctime_ns,
                    chunks,
                    content,
                    pack.map(|(pack, _)| pack),
                    pack.map(|(_, at)| at),
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

/// What a row (`ino` and [`COLUMNS`]) says of this file, if it is about this state of it.
fn known_in(row: &Row<'_>, identity: &FileIdentity) -> rusqlite::Result<Option<Known>> {
    let same = row.get::<_, i64>(1)? == identity.size.cast_signed()
        && row.get::<_, i64>(2)? == identity.mtime_ns
        && row.get::<_, i64>(3)? == identity.ctime_ns;
    if !same {
        return Ok(None);
    }
    let raw = row.get_ref(4)?.as_blob()?;
    let chunks: Vec<_> = raw
        .chunks_exact(32)
        .filter_map(|raw| Digest::try_from(raw).ok())
        .map(|digest| (digest.0 != [0; 32]).then_some(digest))
        .collect();
    if chunks.len() as u64 != limb_common::chunk::chunk_count(identity.size) {
        return Ok(None);
    }
    let content = match (row.get_ref(5)?.as_blob_or_null()?, chunks.as_slice()) {
        (None, _) => None,
        (Some([]), [only]) => *only,
        (Some(raw), _) => Digest::try_from(raw).ok(),
    };
    let place = match (row.get::<_, Option<i64>>(6)?, row.get::<_, Option<i64>>(7)?) {
        (Some(pack), Some(at)) => Place::Pack { pack: pack.cast_unsigned(), at: at.cast_unsigned() },
        _ => Place::File,
    };
    let xattrs = match row.get_ref(8)?.as_blob_or_null()? {
        None => Xattrs::new(),
        Some(raw) => match serde_json::from_slice::<Vec<(Vec<u8>, Vec<u8>)>>(raw) {
            Ok(pairs) => pairs.into_iter().collect(),
            Err(_) => return Ok(None),
        },
    };
    Ok(Some(Known { chunks, content: content.map(|content| (content, place)), xattrs }))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn put(index: &mut Index, rows: &[(FileIdentity, Known)]) {
        let rows = rows.iter().map(|(identity, Known { chunks, content, xattrs })| {
            (*identity, KnownRef { chunks, content: *content, xattrs })
        });
        index.put(rows).unwrap();
    }

    #[test]
    fn any_difference_in_identity_is_a_miss_and_fresh_times_are_racy() {
        let dir = tempfile::tempdir().unwrap();
        let mut index = Index::open(&dir.path().join("index.db")).unwrap();
        let identity = FileIdentity { dev: u64::MAX, ino: 7, size: 3 << 20, mtime_ns: -4, ctime_ns: 5 };
        let xattrs = Xattrs::from([(b"user.a".to_vec(), vec![0, 255]), (b"user.b".to_vec(), Vec::new())]);
        let chunks = vec![Some(Digest([1; 32])), None, Some(Digest([2; 32]))];
        let known = Known { chunks, content: None, xattrs };
        put(&mut index, &[(identity, known.clone())]);
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

    proptest! {
        /// Both tables hold few numbers, so that rows are met, missed and stepped over.
        #[test]
        fn many_are_found_as_each_alone(
            rows in prop::collection::btree_map((0_u64..3, 0_u64..200), 0_u64..2, 0..120),
            wanted in prop::collection::vec((0_u64..3, 0_u64..200, 0_u64..2), 0..60),
            large in any::<bool>(),
        ) {
            // Some file systems number by hash: half of all numbers are negative in the table.
            let ino = |ino: u64| if large { ino.wrapping_sub(100) } else { ino };
            let identity = |dev, number, size| FileIdentity { dev, ino: ino(number), size, mtime_ns: 1, ctime_ns: 2 };
            let known = |number: u64| Known {
                chunks: Vec::new(),
                content: Some((Digest::of(&number.to_le_bytes()), Place::Pack { pack: number + 1, at: 7 })),
                xattrs: Xattrs::new(),
            };
            let dir = tempfile::tempdir().unwrap();
            let mut index = Index::open(&dir.path().join("index.db")).unwrap();
            let all: Vec<_> = rows
                .iter()
                .map(|(&(dev, number), &mtime)| {
                    (FileIdentity { mtime_ns: i64::try_from(mtime).unwrap(), ..identity(dev, number, 0) }, known(number))
                })
                .collect();
            put(&mut index, &all);
            let mut wanted: Vec<_> = wanted
                .into_iter()
                .map(|(dev, number, mtime)| {
                    FileIdentity { mtime_ns: i64::try_from(mtime).unwrap(), ..identity(dev, number, 0) }
                })
                .collect();
            wanted.sort_by_key(order);
            let mut found = vec![None; wanted.len()];
            index.reader().unwrap().find_sorted(&wanted, |at, known| found[at] = Some(known)).unwrap();
            for (wanted, found) in wanted.iter().zip(found) {
                let expected = all.iter().find(|(identity, _)| identity == wanted).map(|(_, known)| known.clone());
                prop_assert_eq!(found, expected);
            }
        }
    }

    #[test]
    fn what_another_version_wrote_is_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("index.db");
        let old = Connection::open(&path).unwrap();
        old.execute_batch(
            "PRAGMA user_version = 2;
             CREATE TABLE known (dev INTEGER, ino INTEGER, chunks BLOB NOT NULL, PRIMARY KEY (dev, ino)) WITHOUT ROWID;
             INSERT INTO known VALUES (1, 2, x'');",
        )
        .unwrap();
        drop(old);
        let index = Index::open(&path).unwrap();
        let identity = FileIdentity { dev: 1, ino: 2, size: 0, mtime_ns: 0, ctime_ns: 0 };
        assert_eq!(index.find(&identity).unwrap(), None);
    }
}
