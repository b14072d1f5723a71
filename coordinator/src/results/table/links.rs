//! One file under several names.

use rusqlite::{Connection, params};

use super::sql;
use crate::results::disk::Ident;
use crate::results::effect::Written;
use crate::results::{AttemptId, ResultsError};

/// All names under which this attempt knows a file.
pub(in crate::results) fn names_of_ident(
    db: &Connection,
    id: &AttemptId,
    dest: &[u8],
    ident: Ident,
) -> Result<Vec<Vec<u8>>, ResultsError> {
    let mut query = db.prepare_cached(
        "SELECT path FROM result_names
         WHERE dest = ?1 AND dev = ?2 AND ino = ?3 AND run = ?4 AND attempt = ?5",
    )?;
    let rows = query
        .query_map(params![dest, sql(ident.dev), sql(ident.ino), id.run.as_str(), id.attempt.0], |row| {
            row.get(0)
        })?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// The file changed where it is: what is known of its other names changes too. Returns by how much
/// the bytes of all of them grew.
pub(super) fn change_other_names(
    db: &Connection,
    id: &AttemptId,
    dest: &[u8],
    path: &[u8],
    what: &Written,
) -> Result<i64, ResultsError> {
    let (dev, ino) = (sql(what.ident.dev), sql(what.ident.ino));
    let (before, names): (i64, i64) = db
        .prepare_cached(
            "SELECT coalesce(sum(size), 0), count(*) FROM result_names
             WHERE dest = ?1 AND path <> ?2 AND dev = ?3 AND ino = ?4 AND run = ?5 AND attempt = ?6",
        )?
        .query_row(params![dest, path, dev, ino, id.run.as_str(), id.attempt.0], |row| {
            Ok((row.get(0)?, row.get(1)?))
        })?;
    if names == 0 {
        return Ok(0);
    }
    db.prepare_cached(
        "UPDATE result_names
         SET size = ?7, root = ?8, chunk_values = ?9, mode = ?10, mtime_ns = ?11, open = ?12
         WHERE dest = ?1 AND path <> ?2 AND dev = ?3 AND ino = ?4 AND run = ?5 AND attempt = ?6",
    )?
    .execute(params![
        dest,
        path,
        dev,
        ino,
        id.run.as_str(),
        id.attempt.0,
        sql(what.size),
        what.root.as_ref().map(|root| root.as_slice()),
        what.values,
        what.mode,
        what.mtime_ns,
        what.open
    ])?;
    Ok(names.saturating_mul(sql(what.size)).saturating_sub(before))
}
