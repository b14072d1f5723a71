//! The values of a run's `secrets:`: one file per run, 0600 in a 0700 directory of the state,
//! durable before the run is, removed when the run ends. They are not in the database, whose
//! freed pages and write-ahead log would keep them long after.
//!
//! They must outlive a restart of the coordinator: an attempt that has not enrolled yet, and
//! each retry, asks for them again.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _};
use std::path::PathBuf;

use limb_common::id::RunId;
use limb_common::secret::Secret;

use super::LedgerError;

/// A variable's name and its value.
pub type NamedSecret = (Vec<u8>, Secret<Vec<u8>>);

/// Where the files are.
#[derive(Clone, Debug)]
pub struct SecretStore {
    dir: PathBuf,
}

impl SecretStore {
    #[must_use]
    pub fn new(dir: PathBuf) -> Self {
        Self { dir }
    }

    fn path(&self, run: &RunId) -> PathBuf {
        self.dir.join(run.as_str())
    }

    /// # Errors
    /// The file system's.
    pub fn keep(&self, run: &RunId, secrets: &[(String, Secret<String>)]) -> Result<(), LedgerError> {
        if secrets.is_empty() {
            return Ok(());
        }
        let write = || {
            DirBuilder::new().recursive(true).mode(0o700).create(&self.dir)?;
            let mut file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(self.path(run))?;
            for (name, value) in secrets {
                // name NUL length NUL bytes: no escaping, so no copy of the value.
                write!(file, "{name}\0{}\0", value.expose().len())?;
                file.write_all(value.expose().as_bytes())?;
            }
            file.sync_all()?;
            File::open(&self.dir)?.sync_all()
        };
        write().map_err(LedgerError::Secrets)
    }

    /// # Errors
    /// The file system's, or a file that is not ours.
    pub fn load(&self, run: &RunId) -> Result<Vec<NamedSecret>, LedgerError> {
        let bytes = match std::fs::read(self.path(run)) {
            Ok(bytes) => Secret::new(bytes),
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
            Err(error) => return Err(LedgerError::Secrets(error)),
        };
        parse(bytes.expose()).ok_or_else(|| {
            LedgerError::Secrets(std::io::Error::new(ErrorKind::InvalidData, "the secrets file is damaged"))
        })
    }

    /// # Errors
    /// The file system's.
    pub fn forget(&self, run: &RunId) -> Result<(), LedgerError> {
        match std::fs::remove_file(self.path(run)) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            Err(error) => Err(LedgerError::Secrets(error)),
        }
    }
}

fn parse(mut rest: &[u8]) -> Option<Vec<NamedSecret>> {
    let mut found = Vec::new();
    while !rest.is_empty() {
        let end = rest.iter().position(|byte| *byte == 0)?;
        let name = rest[..end].to_vec();
        rest = &rest[end + 1..];
        let end = rest.iter().position(|byte| *byte == 0)?;
        let length: usize = std::str::from_utf8(&rest[..end]).ok()?.parse().ok()?;
        rest = &rest[end + 1..];
        let value = rest.get(..length)?;
        found.push((name, Secret::new(value.to_vec())));
        rest = &rest[length..];
    }
    Some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn secrets_survive_and_are_forgotten() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let store = SecretStore::new(dir.path().join("secrets"));
        let run = RunId::random();
        let secrets = [
            ("A".to_owned(), Secret::new("x\0y=$*\n".to_owned())),
            ("B".to_owned(), Secret::new(String::new())),
        ];
        store.keep(&run, &secrets).unwrap();
        let mode = std::fs::metadata(store.path(&run)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
        let back = store.load(&run).unwrap();
        assert_eq!(back.len(), 2);
        assert_eq!((back[0].0.as_slice(), back[0].1.expose().as_slice()), (&b"A"[..], &b"x\0y=$*\n"[..]));
        store.forget(&run).unwrap();
        store.forget(&run).unwrap();
        assert!(store.load(&run).unwrap().is_empty());
    }
}
