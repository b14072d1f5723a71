//! What a failed start means for whoever would try again, and how it is told: one line of JSON
//! from the coordinator to its supervisor, from there to the command that waits; under systemd,
//! where nobody holds the other end, a file.
//!
//! Never: call something permanent that may pass by itself. A wrong "it passes" costs tries at a
//! bounded rate; a wrong "permanent" leaves boxes without a home until somebody looks.

use std::error::Error;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::ServeError;
use crate::ca::CaError;
use crate::database::DatabaseError;

/// A start that failed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FailedStart {
    /// The same again until a person does something.
    pub permanent: bool,
    pub error: String,
    pub hints: Vec<String>,
}

impl FailedStart {
    /// As one message: its hints last.
    #[must_use]
    pub fn message(&self) -> String {
        match self.hints.is_empty() {
            true => self.error.clone(),
            false => format!("{}; hint: {}", self.error, self.hints.join("; ")),
        }
    }

    #[must_use]
    pub fn to_line(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    #[must_use]
    pub fn of_line(line: &str) -> Option<Self> {
        serde_json::from_str(line).ok()
    }
}

/// Where a coordinator under systemd leaves its reason.
#[must_use]
pub fn failure_file(state_dir: &Path) -> PathBuf {
    state_dir.join("start-failure.json")
}

/// Whether the next start would fail in the same way.
#[must_use]
pub fn is_permanent(error: &ServeError) -> bool {
    match error {
        ServeError::AlreadyRunning { .. }
        | ServeError::Ca(CaError::Damaged { .. })
        | ServeError::Database(DatabaseError::Newer { .. } | DatabaseError::Damaged { .. }) => true,
        // It was up by then.
        ServeError::Owner(_) => false,
        ServeError::State { .. }
        | ServeError::Database(_)
        | ServeError::Ledger(_)
        | ServeError::Lifecycle(_)
        | ServeError::Ca(_)
        | ServeError::Listen { .. }
        | ServeError::Socket { .. }
        | ServeError::Snapshots(_)
        | ServeError::Results(_) => causes(error).any(stays),
    }
}

fn causes(error: &ServeError) -> impl Iterator<Item = &(dyn Error + 'static)> {
    let first: &(dyn Error + 'static) = error;
    std::iter::successors(Some(first), |error: &&(dyn Error + 'static)| Error::source(*error))
}

fn stays(cause: &(dyn Error + 'static)) -> bool {
    if let Some(error) = cause.downcast_ref::<std::io::Error>() {
        return matches!(
            error.kind(),
            ErrorKind::PermissionDenied
                | ErrorKind::ReadOnlyFilesystem
                | ErrorKind::NotADirectory
                | ErrorKind::IsADirectory
                | ErrorKind::InvalidInput
                | ErrorKind::AddrNotAvailable
        );
    }
    if let Some(error) = cause.downcast_ref::<rusqlite::Error>() {
        return error.sqlite_error_code().is_some_and(|code| {
            matches!(
                code,
                rusqlite::ErrorCode::NotADatabase
                    | rusqlite::ErrorCode::DatabaseCorrupt
                    | rusqlite::ErrorCode::ReadOnly
                    | rusqlite::ErrorCode::CannotOpen
                    | rusqlite::ErrorCode::PermissionDenied
            )
        });
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_person_must_mend_is_permanent_and_what_passes_is_not() {
        let io = |kind| std::io::Error::from(kind);
        let state = |kind| ServeError::State { path: "/s".into(), source: io(kind) };
        let listen = |kind| ServeError::Listen { address: "127.0.0.1:1".parse().unwrap(), source: io(kind) };
        for error in [
            state(ErrorKind::PermissionDenied),
            state(ErrorKind::ReadOnlyFilesystem),
            listen(ErrorKind::AddrNotAvailable),
            ServeError::Ca(CaError::Damaged { path: "/ca".into() }),
            ServeError::Ca(CaError::File {
                doing: "read",
                path: "/ca".into(),
                source: io(ErrorKind::PermissionDenied),
            }),
            ServeError::Database(DatabaseError::Newer { path: "/db".into(), found: 9, known: 1 }),
        ] {
            assert!(is_permanent(&error), "{error}");
        }
        for error in [state(ErrorKind::StorageFull), listen(ErrorKind::AddrInUse)] {
            assert!(!is_permanent(&error), "{error}");
        }
    }

    #[test]
    fn a_failed_start_travels_as_a_line() {
        let failed =
            FailedStart { permanent: true, error: "no\nkey".to_owned(), hints: vec!["mend it".to_owned()] };
        let line = failed.to_line();
        assert!(!line.contains('\n'));
        assert_eq!(FailedStart::of_line(&line).as_ref(), Some(&failed));
        assert_eq!(failed.message(), "no\nkey; hint: mend it");
        assert_eq!(FailedStart::of_line("something else"), None);
    }
}
