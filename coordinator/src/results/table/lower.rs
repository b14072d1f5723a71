//! Which inode of a lower set is which file at home. The attempt that reads the set may rename its
//! files, so they are found again by (dev, ino).

use limb_common::id::Digest;
use rusqlite::{Connection, OptionalExtension as _, params};

use super::{Name, name, sql};
use crate::results::ResultsError;
use crate::results::disk::Ident;

/// Inode, path, and which file that is.
pub(in crate::results) fn put_lower(
    db: &Connection,
    manifest: Digest,
    inodes: &[(u64, Vec<u8>, Ident)],
) -> Result<(), ResultsError> {
    let mut insert = db.prepare_cached("INSERT OR REPLACE INTO result_lower VALUES (?1, ?2, ?3, ?4, ?5)")?;
    for (inode, path, ident) in inodes {
        insert.execute(params![manifest.0.as_slice(), sql(*inode), path, sql(ident.dev), sql(ident.ino)])?;
    }
    Ok(())
}

/// Which file an inode of the lower set was when the set was made.
pub(in crate::results) fn lower_ident(
    db: &Connection,
    manifest: &[u8],
    inode: u64,
) -> Result<Option<Ident>, ResultsError> {
    let mut query =
        db.prepare_cached("SELECT dev, ino FROM result_lower WHERE manifest = ?1 AND inode = ?2")?;
    let ident = |row: &rusqlite::Row<'_>| {
        Ok(Ident { dev: row.get::<_, i64>(0)?.cast_unsigned(), ino: row.get::<_, i64>(1)?.cast_unsigned() })
    };
    Ok(query.query_row(params![manifest, sql(inode)], ident).optional()?)
}

/// Is the file one of the lower set?
pub(in crate::results) fn is_lower(
    db: &Connection,
    manifest: &[u8],
    ident: Ident,
) -> Result<bool, ResultsError> {
    let mut query =
        db.prepare_cached("SELECT 1 FROM result_lower WHERE manifest = ?1 AND ino = ?2 AND dev = ?3")?;
    Ok(query.exists(params![manifest, sql(ident.ino), sql(ident.dev)])?)
}

/// A name that a file of the lower set has now.
pub(in crate::results) fn lower_name(
    db: &Connection,
    dest: &[u8],
    manifest: &[u8],
    inode: u64,
) -> Result<Option<Name>, ResultsError> {
    let row: Option<(Vec<u8>, i64, i64)> = db
        .query_row(
            "SELECT path, dev, ino FROM result_lower WHERE manifest = ?1 AND inode = ?2",
            params![manifest, sql(inode)],
            |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)),
        )
        .optional()?;
    let Some((path, dev, ino)) = row else { return Ok(None) };
    let stands = |name: &Name| sql(name.what.ident.dev) == dev && sql(name.what.ident.ino) == ino;
    if let Some(found) = name(db, dest, &path)?.filter(stands) {
        return Ok(Some(found));
    }
    let moved: Option<Vec<u8>> = db
        .query_row(
            "SELECT path FROM result_names WHERE dest = ?1 AND dev = ?2 AND ino = ?3 LIMIT 1",
            params![dest, dev, ino],
            |row| row.get(0),
        )
        .optional()?;
    moved.map_or(Ok(None), |path| name(db, dest, &path))
}
