//! The one SQLite file: intents, ledger, results journal. One writer thread; a write is on disk
//! when its future ends (WAL, synchronous = FULL).
//!
//! Never: hold a connection across an await, or keep state that matters anywhere else.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use rusqlite::{Connection, Transaction, TransactionBehavior};
use tokio::sync::{mpsc, oneshot};

/// The database cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DatabaseError {
    #[error("could not open the database {}", path.display())]
    Open { path: PathBuf, source: rusqlite::Error },
    #[error("there is no room for the database {}; hint: make room on its disk: nothing in it is lost", path.display())]
    Full { path: PathBuf, source: rusqlite::Error },
    #[error(
        "the database {} is damaged; hint: nothing in it was changed: restore it from a backup, or move it away to begin anew (boxes that still run end with their leases)",
        path.display()
    )]
    Damaged { path: PathBuf, source: rusqlite::Error },
    #[error(
        "the database {} has format {found}, and this limb knows {known}; hint: use the newer limb that wrote it",
        path.display()
    )]
    Newer { path: PathBuf, found: i64, known: i64 },
    #[error("the database refused a statement")]
    Statement(#[from] rusqlite::Error),
    #[error("the database writer has ended")]
    Closed,
    #[error("could not start the database writer")]
    Thread(#[source] std::io::Error),
}

/// Of the file. To be raised when an older limb would misread it.
const FORMAT: i64 = 1;

type Job = Box<dyn FnOnce(&mut Connection) + Send>;

/// Handle to the writer. Cheap to clone; the file is closed when the last one is gone.
#[derive(Clone, Debug)]
pub struct Database {
    jobs: mpsc::UnboundedSender<Job>,
    path: Arc<Path>,
}

impl Database {
    /// Opens or makes the file and applies every module's schema (idempotent statements).
    ///
    /// # Errors
    /// [`DatabaseError::Open`] with SQLite's reason.
    pub fn open(path: &Path, schemas: &[&str]) -> Result<Self, DatabaseError> {
        let open = |source: rusqlite::Error| {
            let path = path.to_owned();
            match source.sqlite_error_code() {
                Some(rusqlite::ErrorCode::NotADatabase | rusqlite::ErrorCode::DatabaseCorrupt) => {
                    DatabaseError::Damaged { path, source }
                }
                Some(rusqlite::ErrorCode::DiskFull) => DatabaseError::Full { path, source },
                Some(_) | None => DatabaseError::Open { path, source },
            }
        };
        let mut connection = Connection::open(path).map_err(open)?;
        // Before anything is written to it.
        let found: i64 = connection.query_row("PRAGMA user_version", [], |row| row.get(0)).map_err(open)?;
        if found > FORMAT {
            return Err(DatabaseError::Newer { path: path.to_owned(), found, known: FORMAT });
        }
        connection
            .execute_batch(
                "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; PRAGMA foreign_keys = ON;
                 PRAGMA busy_timeout = 5000;",
            )
            .map_err(open)?;
        for schema in schemas {
            connection.execute_batch(schema).map_err(open)?;
        }
        connection.pragma_update(None, "user_version", FORMAT).map_err(open)?;
        // Unbounded: every sender awaits its own reply, so the queue is as long as there are callers.
        let (jobs, mut queue) = mpsc::unbounded_channel::<Job>();
        std::thread::Builder::new()
            .name("limb-database".to_owned())
            .spawn(move || {
                while let Some(job) = queue.blocking_recv() {
                    job(&mut connection);
                }
            })
            .map_err(DatabaseError::Thread)?;
        Ok(Self { jobs, path: path.into() })
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Runs `work` in one immediate transaction; durable when this returns `Ok`. An error from
    /// `work` rolls back.
    ///
    /// # Errors
    /// Whatever `work` or the commit says.
    pub async fn write<T, E>(
        &self,
        work: impl FnOnce(&Transaction<'_>) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<DatabaseError> + Send + 'static,
    {
        self.submit_write(work)?.await.map_err(|_| DatabaseError::Closed)?
    }

    /// [`Self::write`] for a thread that may block (never one that runs async tasks).
    ///
    /// # Errors
    /// As [`Self::write`].
    pub fn write_blocking<T, E>(
        &self,
        work: impl FnOnce(&Transaction<'_>) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<DatabaseError> + Send + 'static,
    {
        self.submit_write(work)?.blocking_recv().map_err(|_| DatabaseError::Closed)?
    }

    fn submit_write<T, E>(
        &self,
        work: impl FnOnce(&Transaction<'_>) -> Result<T, E> + Send + 'static,
    ) -> Result<oneshot::Receiver<Result<T, E>>, DatabaseError>
    where
        T: Send + 'static,
        E: From<DatabaseError> + Send + 'static,
    {
        let (reply, answer) = oneshot::channel();
        let job: Job = Box::new(move |connection| {
            let result = (|| {
                let transaction = connection
                    .transaction_with_behavior(TransactionBehavior::Immediate)
                    .map_err(DatabaseError::from)?;
                let value = work(&transaction)?;
                transaction.commit().map_err(DatabaseError::from)?;
                Ok(value)
            })();
            // The caller may have gone; the write stands all the same.
            drop(reply.send(result));
        });
        self.jobs.send(job).map_err(|_| DatabaseError::Closed)?;
        Ok(answer)
    }

    /// Runs a query on the writer's connection, so that it sees every write before it.
    ///
    /// # Errors
    /// Whatever `work` says.
    pub async fn read<T, E>(
        &self,
        work: impl FnOnce(&Connection) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<DatabaseError> + Send + 'static,
    {
        self.submit_read(work)?.await.map_err(|_| DatabaseError::Closed)?
    }

    /// [`Self::read`] for a thread that may block (never one that runs async tasks).
    ///
    /// # Errors
    /// As [`Self::read`].
    pub fn read_blocking<T, E>(
        &self,
        work: impl FnOnce(&Connection) -> Result<T, E> + Send + 'static,
    ) -> Result<T, E>
    where
        T: Send + 'static,
        E: From<DatabaseError> + Send + 'static,
    {
        self.submit_read(work)?.blocking_recv().map_err(|_| DatabaseError::Closed)?
    }

    fn submit_read<T, E>(
        &self,
        work: impl FnOnce(&Connection) -> Result<T, E> + Send + 'static,
    ) -> Result<oneshot::Receiver<Result<T, E>>, DatabaseError>
    where
        T: Send + 'static,
        E: From<DatabaseError> + Send + 'static,
    {
        let (reply, answer) = oneshot::channel();
        let job: Job = Box::new(move |connection| drop(reply.send(work(connection))));
        self.jobs.send(job).map_err(|_| DatabaseError::Closed)?;
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_of_a_newer_limb_or_a_damaged_one_is_refused_and_left_as_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("limb.db");
        drop(Database::open(&path, &["CREATE TABLE IF NOT EXISTS t (x)"]).unwrap());
        let connection = Connection::open(&path).unwrap();
        connection.pragma_update(None, "user_version", FORMAT + 1).unwrap();
        drop(connection);
        let newer = Database::open(&path, &[]).unwrap_err();
        assert!(matches!(newer, DatabaseError::Newer { found, .. } if found == FORMAT + 1), "{newer}");
        // Another file: the first one's connection may still be closing, with a log beside it.
        let path = dir.path().join("damaged.db");
        let noise = b"this was a database once".repeat(500);
        std::fs::write(&path, &noise).unwrap();
        let damaged = Database::open(&path, &[]).unwrap_err();
        assert!(matches!(damaged, DatabaseError::Damaged { .. }), "{damaged}");
        assert_eq!(std::fs::read(&path).unwrap(), noise);
    }

    #[tokio::test]
    async fn a_failed_write_leaves_nothing_and_a_good_one_survives_reopening() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("limb.db");
        let schema = "CREATE TABLE IF NOT EXISTS t (x INTEGER) STRICT;";
        let count = |c: &Connection| {
            c.query_row("SELECT count(*) FROM t", [], |row| row.get::<_, i64>(0)).map_err(DatabaseError::from)
        };
        {
            let database = Database::open(&path, &[schema]).unwrap();
            let failed: Result<(), DatabaseError> = database
                .write(|tx| {
                    tx.execute("INSERT INTO t VALUES (1)", [])?;
                    Err(DatabaseError::Closed)
                })
                .await;
            assert!(failed.is_err());
            database
                .write(|tx| {
                    tx.execute("INSERT INTO t VALUES (2)", []).map(|_| ()).map_err(DatabaseError::from)
                })
                .await
                .unwrap();
        }
        let database = Database::open(&path, &[schema]).unwrap();
        assert_eq!(database.read(count).await.unwrap(), 1);
    }
}
