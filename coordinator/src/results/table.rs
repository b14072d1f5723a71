//! The results in home's database: locks, attempts, files, published names, the intents of the
//! batch that is being applied, refusals.
//!
//! Never: commit a name before the file system has it, or forget an intent before the name is
//! recorded.

mod links;
mod lower;

use limb_common::id::{AttemptNumber, RunId};
use rusqlite::{Connection, OptionalExtension as _, Row, params};

use super::disk::{Ident, Kind};
use super::effect::{After, Effect, Intent, Where, Written};
use super::entry::Refusal;
use super::names::ResultPath;
use super::{AttemptId, ResultsError};
pub(super) use links::names_of_ident;

/// Applied by [`crate::database::Database::open`].
pub const SCHEMA: &str = "
CREATE TABLE IF NOT EXISTS result_locks (
    dest BLOB PRIMARY KEY, run TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS result_attempts (
    run TEXT NOT NULL, attempt INTEGER NOT NULL, applied INTEGER NOT NULL DEFAULT 0,
    ended INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (run, attempt)) STRICT;
CREATE TABLE IF NOT EXISTS result_outputs (
    run TEXT NOT NULL, attempt INTEGER NOT NULL, output INTEGER NOT NULL, dest BLOB NOT NULL,
    lower BLOB, quota_bytes INTEGER, quota_inodes INTEGER,
    PRIMARY KEY (run, attempt, output)) STRICT;
CREATE TABLE IF NOT EXISTS result_files (
    run TEXT NOT NULL, attempt INTEGER NOT NULL, output INTEGER NOT NULL, file INTEGER NOT NULL,
    state INTEGER NOT NULL, path BLOB NOT NULL,
    PRIMARY KEY (run, attempt, output, file)) STRICT;
CREATE TABLE IF NOT EXISTS result_names (
    dest BLOB NOT NULL, path BLOB NOT NULL, kind INTEGER NOT NULL, run TEXT NOT NULL,
    attempt INTEGER NOT NULL, output INTEGER NOT NULL, file INTEGER, size INTEGER NOT NULL,
    root BLOB, chunk_values BLOB NOT NULL, mode INTEGER NOT NULL, dev INTEGER NOT NULL,
    ino INTEGER NOT NULL, mtime_ns INTEGER NOT NULL, open INTEGER NOT NULL,
    published_unix_ms INTEGER NOT NULL, PRIMARY KEY (dest, path)) STRICT;
CREATE INDEX IF NOT EXISTS result_names_ino ON result_names (ino, dev);
CREATE INDEX IF NOT EXISTS result_names_run ON result_names (run, attempt, output, file);
CREATE TABLE IF NOT EXISTS result_intents (
    run TEXT NOT NULL, attempt INTEGER NOT NULL, seq INTEGER NOT NULL, intent TEXT NOT NULL,
    chunk_values BLOB NOT NULL, PRIMARY KEY (run, attempt, seq)) STRICT;
CREATE TABLE IF NOT EXISTS result_refusals (
    run TEXT NOT NULL, attempt INTEGER NOT NULL, seq INTEGER NOT NULL, errno INTEGER NOT NULL,
    detail TEXT NOT NULL, PRIMARY KEY (run, attempt, seq)) STRICT;
CREATE TABLE IF NOT EXISTS result_partials (
    run TEXT NOT NULL, attempt INTEGER NOT NULL, output INTEGER NOT NULL, path BLOB NOT NULL,
    PRIMARY KEY (run, attempt, output, path)) STRICT;
CREATE TABLE IF NOT EXISTS result_lower (
    manifest BLOB NOT NULL, inode INTEGER NOT NULL, path BLOB NOT NULL, dev INTEGER NOT NULL,
    ino INTEGER NOT NULL, PRIMARY KEY (manifest, inode)) STRICT;
CREATE INDEX IF NOT EXISTS result_lower_ino ON result_lower (manifest, ino, dev);
";

pub(super) use lower::{is_lower, lower_ident, lower_name, put_lower};

/// A file of the box in the table: where it stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FileState {
    Open,
    /// Published while open; the part is the visible file.
    InPlace,
    /// Open, and a visible file grows with it.
    Grows,
    Final,
    Abandoned,
}

impl FileState {
    fn number(self) -> i64 {
        match self {
            Self::Open => 0,
            Self::InPlace => 1,
            Self::Grows => 2,
            Self::Final => 3,
            Self::Abandoned => 4,
        }
    }

    fn of(number: i64) -> Self {
        match number {
            0 => Self::Open,
            1 => Self::InPlace,
            2 => Self::Grows,
            3 => Self::Final,
            _ => Self::Abandoned,
        }
    }
}

/// A published name.
#[derive(Clone, Debug)]
pub(super) struct Name {
    pub(super) path: Vec<u8>,
    pub(super) run: String,
    pub(super) attempt: u32,
    pub(super) file: Option<u64>,
    pub(super) what: Written,
    pub(super) published_unix_ms: u64,
}

impl Name {
    /// The file's number, if this attempt gave it.
    pub(super) fn file_of(&self, id: &AttemptId) -> Option<u64> {
        self.file.filter(|_| self.run == id.run.as_str() && self.attempt == id.attempt.0)
    }
}

#[derive(Clone, Debug)]
pub(super) struct OutputRow {
    pub(super) output: u32,
    pub(super) dest: Vec<u8>,
    pub(super) lower: Option<Vec<u8>>,
    pub(super) quota_bytes: Option<u64>,
    pub(super) quota_inodes: Option<u64>,
}

pub(super) fn sql(value: u64) -> i64 {
    value.cast_signed()
}

fn kind_number(kind: Kind) -> i64 {
    match kind {
        Kind::File => 0,
        Kind::Directory => 1,
        Kind::Symlink => 2,
        Kind::Other => 3,
    }
}

fn unsigned(row: &Row<'_>, column: &str) -> rusqlite::Result<u64> {
    row.get::<_, i64>(column).map(i64::cast_unsigned)
}

fn name_of(row: &Row<'_>) -> rusqlite::Result<Name> {
    let root: Option<Vec<u8>> = row.get("root")?;
    Ok(Name {
        path: row.get("path")?,
        run: row.get("run")?,
        attempt: row.get("attempt")?,
        file: row.get::<_, Option<i64>>("file")?.map(i64::cast_unsigned),
        published_unix_ms: unsigned(row, "published_unix_ms")?,
        what: Written {
            ident: Ident { dev: unsigned(row, "dev")?, ino: unsigned(row, "ino")? },
            kind: match row.get::<_, i64>("kind")? {
                0 => Kind::File,
                1 => Kind::Directory,
                2 => Kind::Symlink,
                _ => Kind::Other,
            },
            size: unsigned(row, "size")?,
            mtime_ns: row.get("mtime_ns")?,
            mode: row.get("mode")?,
            root: root.and_then(|bytes| bytes.try_into().ok()),
            values: row.get("chunk_values")?,
            open: row.get("open")?,
        },
    })
}

pub(super) fn name(db: &Connection, dest: &[u8], path: &[u8]) -> Result<Option<Name>, ResultsError> {
    let mut query = db.prepare_cached("SELECT * FROM result_names WHERE dest = ?1 AND path = ?2")?;
    Ok(query.query_row(params![dest, path], name_of).optional()?)
}

pub(super) fn names_of_dest(db: &Connection, dest: &[u8]) -> Result<Vec<Name>, ResultsError> {
    let mut query = db.prepare_cached("SELECT * FROM result_names WHERE dest = ?1 ORDER BY path")?;
    Ok(query.query_map(params![dest], name_of)?.collect::<Result<_, _>>()?)
}

pub(super) fn names_of_run(db: &Connection, run: &RunId) -> Result<Vec<(Vec<u8>, Name)>, ResultsError> {
    let mut query = db.prepare_cached("SELECT * FROM result_names WHERE run = ?1 ORDER BY dest, path")?;
    let rows = query.query_map(params![run.as_str()], |row| Ok((row.get("dest")?, name_of(row)?)))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// The newest name of a file of this attempt.
pub(super) fn name_of_file(
    db: &Connection,
    id: &AttemptId,
    output: u32,
    file: u64,
) -> Result<Option<Name>, ResultsError> {
    let mut query = db.prepare_cached(
        "SELECT * FROM result_names WHERE run = ?1 AND attempt = ?2 AND output = ?3 AND file = ?4
         ORDER BY published_unix_ms DESC LIMIT 1",
    )?;
    Ok(query.query_row(params![id.run.as_str(), id.attempt.0, output, sql(file)], name_of).optional()?)
}

/// (bytes, names) that a run has under a destination.
pub(super) fn used(db: &Connection, run: &RunId, dest: &[u8]) -> Result<(u64, u64), ResultsError> {
    Ok(db.query_row(
        "SELECT coalesce(sum(size), 0) AS bytes, count(*) AS names FROM result_names
         WHERE run = ?1 AND dest = ?2",
        params![run.as_str(), dest],
        |row| Ok((unsigned(row, "bytes")?, unsigned(row, "names")?)),
    )?)
}

/// `None` where the attempt was never begun; else (applied, ended).
pub(super) fn attempt(db: &Connection, id: &AttemptId) -> Result<Option<(u64, bool)>, ResultsError> {
    Ok(db
        .query_row(
            "SELECT applied, ended FROM result_attempts WHERE run = ?1 AND attempt = ?2",
            params![id.run.as_str(), id.attempt.0],
            |row| Ok((unsigned(row, "applied")?, row.get("ended")?)),
        )
        .optional()?)
}

pub(super) fn live_attempts(db: &Connection) -> Result<Vec<AttemptId>, ResultsError> {
    let mut query = db.prepare("SELECT run, attempt FROM result_attempts WHERE ended = 0")?;
    let rows = query.query_map([], |row| Ok((row.get::<_, String>(0)?, row.get::<_, u32>(1)?)))?;
    let mut found = Vec::new();
    for row in rows {
        let (run, attempt) = row?;
        if let Ok(run) = run.parse() {
            found.push(AttemptId { run, attempt: AttemptNumber(attempt) });
        }
    }
    Ok(found)
}

pub(super) fn outputs(db: &Connection, id: &AttemptId) -> Result<Vec<OutputRow>, ResultsError> {
    let mut query =
        db.prepare_cached("SELECT * FROM result_outputs WHERE run = ?1 AND attempt = ?2 ORDER BY output")?;
    let rows = query.query_map(params![id.run.as_str(), id.attempt.0], |row| {
        Ok(OutputRow {
            output: row.get("output")?,
            dest: row.get("dest")?,
            lower: row.get("lower")?,
            quota_bytes: row.get::<_, Option<i64>>("quota_bytes")?.map(i64::cast_unsigned),
            quota_inodes: row.get::<_, Option<i64>>("quota_inodes")?.map(i64::cast_unsigned),
        })
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}

pub(super) fn begin(db: &Connection, id: &AttemptId, outputs: &[OutputRow]) -> Result<(), ResultsError> {
    db.execute(
        "INSERT OR IGNORE INTO result_attempts (run, attempt) VALUES (?1, ?2)",
        params![id.run.as_str(), id.attempt.0],
    )?;
    for row in outputs {
        db.execute(
            "INSERT OR REPLACE INTO result_outputs VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7)",
            params![
                id.run.as_str(),
                id.attempt.0,
                row.output,
                row.dest,
                row.lower,
                row.quota_bytes.map(sql),
                row.quota_inodes.map(sql)
            ],
        )?;
    }
    Ok(())
}

pub(super) fn file_state(
    db: &Connection,
    id: &AttemptId,
    output: u32,
    file: u64,
) -> Result<Option<(FileState, Vec<u8>)>, ResultsError> {
    let mut query = db.prepare_cached(
        "SELECT state, path FROM result_files WHERE run = ?1 AND attempt = ?2 AND output = ?3 AND file = ?4",
    )?;
    Ok(query
        .query_row(params![id.run.as_str(), id.attempt.0, output, sql(file)], |row| {
            Ok((FileState::of(row.get(0)?), row.get(1)?))
        })
        .optional()?)
}

/// (output, file, state, path)
type OpenFile = (u32, u64, FileState, Vec<u8>);

/// Files that are neither final nor abandoned.
pub(super) fn open_files(db: &Connection, id: &AttemptId) -> Result<Vec<OpenFile>, ResultsError> {
    let mut query = db.prepare_cached(
        "SELECT output, file, state, path FROM result_files
         WHERE run = ?1 AND attempt = ?2 AND state < 3 ORDER BY output, file",
    )?;
    let rows = query.query_map(params![id.run.as_str(), id.attempt.0], |row| {
        Ok((row.get(0)?, row.get::<_, i64>(1)?.cast_unsigned(), FileState::of(row.get(2)?), row.get(3)?))
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}

fn put_file(
    db: &Connection,
    id: &AttemptId,
    output: u32,
    file: u64,
    state: FileState,
    path: &[u8],
) -> Result<(), ResultsError> {
    db.prepare_cached("INSERT OR REPLACE INTO result_files VALUES (?1, ?2, ?3, ?4, ?5, ?6)")?
        .execute(params![id.run.as_str(), id.attempt.0, output, sql(file), state.number(), path])?;
    Ok(())
}

pub(super) fn put_intents(db: &Connection, id: &AttemptId, intents: &[Intent]) -> Result<(), ResultsError> {
    let mut insert =
        db.prepare_cached("INSERT OR REPLACE INTO result_intents VALUES (?1, ?2, ?3, ?4, ?5)")?;
    for intent in intents {
        let text = serde_json::to_string(intent)?;
        let seq = sql(intent.seq);
        let values = intent.effect.written().map_or(&[][..], |what| &what.values);
        insert.execute(params![id.run.as_str(), id.attempt.0, seq, text, values])?;
    }
    Ok(())
}

pub(super) fn intents(db: &Connection, id: &AttemptId) -> Result<Vec<Intent>, ResultsError> {
    let mut query = db.prepare(
        "SELECT intent, chunk_values FROM result_intents WHERE run = ?1 AND attempt = ?2 ORDER BY seq",
    )?;
    let rows = query.query_map(params![id.run.as_str(), id.attempt.0], |row| {
        Ok((row.get::<_, String>(0)?, row.get::<_, Vec<u8>>(1)?))
    })?;
    let mut found = Vec::new();
    for row in rows {
        let (text, values) = row?;
        let mut intent: Intent = serde_json::from_str(&text)?;
        intent.effect = intent.effect.with_values(values);
        found.push(intent);
    }
    Ok(found)
}

pub(super) fn refusals(db: &Connection, id: &AttemptId) -> Result<Vec<Refusal>, ResultsError> {
    let mut query = db.prepare(
        "SELECT seq, errno, detail FROM result_refusals WHERE run = ?1 AND attempt = ?2 ORDER BY seq",
    )?;
    let rows = query.query_map(params![id.run.as_str(), id.attempt.0], |row| {
        Ok(Refusal { seq: unsigned(row, "seq")?, errno: row.get(1)?, detail: row.get(2)? })
    })?;
    Ok(rows.collect::<Result<_, _>>()?)
}

pub(super) fn partials(db: &Connection, run: &RunId) -> Result<Vec<(u32, u32, Vec<u8>)>, ResultsError> {
    let mut query = db.prepare(
        "SELECT attempt, output, path FROM result_partials WHERE run = ?1 ORDER BY attempt, output, path",
    )?;
    let rows = query.query_map(params![run.as_str()], |row| Ok((row.get(0)?, row.get(1)?, row.get(2)?)))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// How much a batch adds to what an output holds.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Delta {
    pub(super) bytes: i64,
    pub(super) names: i64,
}

/// Writes one applied effect. What was refused on the way is in `refused`.
pub(super) fn record(
    db: &Connection,
    id: &AttemptId,
    dest: &[u8],
    intent: &Intent,
    refused: Option<&Refusal>,
    now_unix_ms: u64,
) -> Result<Delta, ResultsError> {
    let refusal = match (&intent.effect, refused) {
        (_, Some(refusal)) => Some(refusal.clone()),
        (Effect::Refused { errno, detail }, None) => {
            Some(Refusal { seq: intent.seq, errno: *errno, detail: detail.clone() })
        }
        _ => None,
    };
    if let Some(refusal) = refusal {
        db.prepare_cached("INSERT OR REPLACE INTO result_refusals VALUES (?1, ?2, ?3, ?4, ?5)")?.execute(
            params![id.run.as_str(), id.attempt.0, sql(refusal.seq), refusal.errno, refusal.detail],
        )?;
        return Ok(Delta::default());
    }
    Recorder { db, id, dest, output: intent.output, now_unix_ms }.effect(&intent.effect)
}

struct Recorder<'a> {
    db: &'a Connection,
    id: &'a AttemptId,
    dest: &'a [u8],
    output: u32,
    now_unix_ms: u64,
}

impl Recorder<'_> {
    fn effect(&self, effect: &Effect) -> Result<Delta, ResultsError> {
        let none = Delta::default();
        match effect {
            Effect::Nothing | Effect::Refused { .. } | Effect::Xattr { .. } => Ok(none),
            Effect::Created { file, path } => {
                put_file(self.db, self.id, self.output, *file, FileState::Open, path)?;
                Ok(none)
            }
            Effect::Place { path, what, after, .. } => self.place(path, what, *after),
            Effect::Settle { path, what, after } | Effect::Grow { path, what, after, .. } => {
                let others = links::change_other_names(self.db, self.id, self.dest, path, what)?;
                let own = self.place(path, what, *after)?;
                Ok(Delta { bytes: own.bytes.saturating_add(others), names: own.names })
            }
            Effect::Rename { from, to, directory, .. } => self.rename(from, to, *directory),
            Effect::Remove { path, .. } => self.forget(path),
            Effect::Link { existing, path, .. } => {
                let Some(row) = name(self.db, self.dest, existing)? else { return Ok(none) };
                // A number of another attempt means another file in this one.
                self.put_name(path, &row.what, row.file_of(self.id))
            }
            Effect::Attributes { ident, mode, mtime_ns, .. } => {
                self.db
                    .prepare_cached(
                        "UPDATE result_names SET mode = coalesce(?1, mode), mtime_ns = coalesce(?2, mtime_ns)
                         WHERE ino = ?3 AND dev = ?4 AND dest = ?5",
                    )?
                    .execute(params![mode, mtime_ns, sql(ident.ino), sql(ident.dev), self.dest])?;
                Ok(none)
            }
            Effect::Partial { file, source, path, .. } => {
                let delta = match source {
                    Where::Visible(visible) => self.forget(visible)?,
                    Where::Private(_) => none,
                };
                self.db.execute(
                    "INSERT OR IGNORE INTO result_partials VALUES (?1, ?2, ?3, ?4)",
                    params![self.id.run.as_str(), self.id.attempt.0, self.output, path],
                )?;
                put_file(self.db, self.id, self.output, *file, FileState::Abandoned, path)?;
                Ok(delta)
            }
            Effect::Drop { file, .. } => {
                put_file(self.db, self.id, self.output, *file, FileState::Abandoned, b"")?;
                Ok(none)
            }
        }
    }

    fn place(&self, path: &[u8], what: &Written, after: After) -> Result<Delta, ResultsError> {
        let state = match after {
            After::NoFile => None,
            After::Final { file } => Some((file, FileState::Final)),
            After::PartStays { file } => Some((file, FileState::Open)),
            After::InPlace { file } => Some((file, FileState::InPlace)),
            After::Grows { file } => Some((file, FileState::Grows)),
        };
        if let Some((file, state)) = state {
            put_file(self.db, self.id, self.output, file, state, path)?;
        }
        self.put_name(path, what, state.map(|(file, _)| file))
    }

    fn put_name(&self, path: &[u8], what: &Written, file: Option<u64>) -> Result<Delta, ResultsError> {
        let before = self.forget(path)?;
        self.db
            .prepare_cached(
                "INSERT INTO result_names VALUES
                 (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10, ?11, ?12, ?13, ?14, ?15, ?16)",
            )?
            .execute(params![
                self.dest,
                path,
                kind_number(what.kind),
                self.id.run.as_str(),
                self.id.attempt.0,
                self.output,
                file.map(sql),
                sql(what.size),
                what.root.as_ref().map(|root| root.as_slice()),
                what.values,
                what.mode,
                sql(what.ident.dev),
                sql(what.ident.ino),
                what.mtime_ns,
                what.open,
                sql(self.now_unix_ms)
            ])?;
        Ok(Delta { bytes: before.bytes.saturating_add(sql(what.size)), names: before.names + 1 })
    }

    fn forget(&self, path: &[u8]) -> Result<Delta, ResultsError> {
        let mut query = self.db.prepare_cached(
            "DELETE FROM result_names WHERE dest = ?1 AND path = ?2 RETURNING size, run = ?3",
        )?;
        let gone: Option<(i64, bool)> = query
            .query_row(params![self.dest, path, self.id.run.as_str()], |row| Ok((row.get(0)?, row.get(1)?)))
            .optional()?;
        Ok(match gone {
            // What another run of the lineage left does not count against this one.
            Some((size, true)) => Delta { bytes: -size, names: -1 },
            Some((_, false)) | None => Delta::default(),
        })
    }

    fn rename(&self, from: &[u8], to: &[u8], directory: bool) -> Result<Delta, ResultsError> {
        let mut delta = self.forget(to)?;
        let mut moves = vec![(from.to_vec(), to.to_vec())];
        if directory {
            let (low, high) = ([from, b"/"].concat(), [from, b"0"].concat());
            let mut query = self.db.prepare_cached(
                "SELECT path FROM result_names WHERE dest = ?1 AND path > ?2 AND path < ?3",
            )?;
            let below: Vec<Vec<u8>> = query
                .query_map(params![self.dest, low, high], |row| row.get(0))?
                .collect::<Result<_, _>>()?;
            moves.extend(below.into_iter().map(|path| {
                let moved = [to, &path[from.len()..]].concat();
                (path, moved)
            }));
        }
        for (old, new) in moves {
            if new != to {
                let before = self.forget(&new)?;
                delta.bytes = delta.bytes.saturating_add(before.bytes);
                delta.names += before.names;
            }
            self.db
                .prepare_cached("UPDATE result_names SET path = ?3 WHERE dest = ?1 AND path = ?2")?
                .execute(params![self.dest, old, new])?;
            self.db
                .prepare_cached(
                    "UPDATE result_files SET path = ?5
                     WHERE run = ?1 AND attempt = ?2 AND output = ?3 AND path = ?4 AND state IN (1, 2)",
                )?
                .execute(params![self.id.run.as_str(), self.id.attempt.0, self.output, old, new])?;
        }
        Ok(delta)
    }
}

/// The batch is done: its intents go, the attempt stands at `applied`.
pub(super) fn finish_batch(db: &Connection, id: &AttemptId, applied: u64) -> Result<(), ResultsError> {
    db.execute(
        "DELETE FROM result_intents WHERE run = ?1 AND attempt = ?2",
        params![id.run.as_str(), id.attempt.0],
    )?;
    db.execute(
        "UPDATE result_attempts SET applied = max(applied, ?3) WHERE run = ?1 AND attempt = ?2",
        params![id.run.as_str(), id.attempt.0, sql(applied)],
    )?;
    Ok(())
}

pub(super) fn end_attempt(db: &Connection, id: &AttemptId) -> Result<(), ResultsError> {
    db.execute(
        "UPDATE result_attempts SET ended = 1 WHERE run = ?1 AND attempt = ?2",
        params![id.run.as_str(), id.attempt.0],
    )?;
    db.execute(
        "UPDATE result_names SET open = 0 WHERE run = ?1 AND attempt = ?2",
        params![id.run.as_str(), id.attempt.0],
    )?;
    Ok(())
}

pub(super) fn locks(db: &Connection) -> Result<Vec<(Vec<u8>, String)>, ResultsError> {
    let mut query = db.prepare("SELECT dest, run FROM result_locks ORDER BY dest")?;
    let rows = query.query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?;
    Ok(rows.collect::<Result<_, _>>()?)
}

/// Moved paths, for what is in memory.
pub(super) fn moved(path: &[u8], from: &ResultPath, to: &ResultPath) -> Option<Vec<u8>> {
    if path == from.as_bytes() {
        return Some(to.as_bytes().to_vec());
    }
    ResultPath::parse(path).ok()?.moved(from, to).map(|moved| moved.as_bytes().to_vec())
}
