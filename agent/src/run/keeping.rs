//! What the job left changed in its workdir, copied into the output that brings it home: from the
//! upper layer of an overlay or an empty workdir, or from our own writable tree where the kernel
//! refused the overlay.
//!
//! Never: read through a mount of the job's. It may have been aborted to kill the job.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::{self, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, UNIX_EPOCH};

use limb_common::chunk::CHUNK_BYTES;
use nix::errno::Errno;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use super::place::Place;
use crate::job::changes::{self, Change, ChangeKind};
use crate::results::output::{self, Output};
use crate::results::tree::AttributesKind;

/// Between two looks whether copied files are closed, and how long to look.
const CLOSE_POLL: Duration = Duration::from_millis(5);
const CLOSE_PATIENCE: Duration = Duration::from_secs(2);

/// Stops the copying when the wait for it is over.
#[derive(Debug, Default)]
pub(super) struct Copying(CancellationToken);

impl Drop for Copying {
    fn drop(&mut self) {
        self.0.cancel();
    }
}

/// Copies changed workdir files into their output; names what was not kept. `ready` is the
/// workdir where the kernel refused an overlay.
pub(super) async fn keep(place: &Place, ready: Option<Arc<Output>>, cap_bytes: u64) -> Vec<String> {
    let copying = Copying::default();
    let until = copying.0.clone();
    let (home, to) = place.changes_to.clone().unzip();
    let (upper, lower) = (place.layer.upper(), place.workdir_lower.clone());
    let runtime = Handle::current();
    let kept = tokio::task::spawn_blocking(move || match ready {
        Some(workdir) => Ok(keep_tree(&workdir, to.as_deref(), cap_bytes, &runtime, &until)),
        None => keep_layer(&upper, lower.as_deref(), to.as_deref(), cap_bytes),
    });
    let kept = kept.await;
    if let Some(home) = home {
        // What was just copied is closed; the kernel says so a moment later.
        let closed = async {
            while home.tree().has_handles() {
                tokio::time::sleep(CLOSE_POLL).await;
            }
        };
        if tokio::time::timeout(CLOSE_PATIENCE, closed).await.is_err() {
            tracing::warn!("the workdir's changes are not all closed");
        }
    }
    match kept {
        Ok(Ok(left)) => left,
        Ok(Err(error)) => vec![format!("the workdir's changes could not be listed: {error}")],
        Err(_) => vec!["the workdir's changes could not be listed".to_owned()],
    }
}

fn keep_layer(upper: &Path, lower: Option<&Path>, to: Option<&Path>, cap: u64) -> io::Result<Vec<String>> {
    let found = changes::changes(upper, lower)?;
    match to {
        Some(to) => Ok(changes::keep(&found, upper, to, cap).left),
        None => Ok(named(&found)),
    }
}

/// What a home that wants no changes is told.
fn named(found: &[Change]) -> Vec<String> {
    found.iter().map(|change| change.path.display().to_string()).collect()
}

fn keep_tree(
    workdir: &Output,
    to: Option<&Path>,
    cap_bytes: u64,
    runtime: &Handle,
    until: &CancellationToken,
) -> Vec<String> {
    let mut found = Vec::new();
    let mut inodes = BTreeMap::new();
    for change in workdir.changes() {
        let path = PathBuf::from(OsStr::from_bytes(&change.path));
        let kind = match change.kind {
            output::ChangeKind::Removed => ChangeKind::Removed,
            output::ChangeKind::Created => ChangeKind::Created,
            output::ChangeKind::Modified => ChangeKind::Modified,
        };
        let is = workdir.tree().attributes(change.inode).ok().map(|attributes| attributes.kind);
        // Directories come with what is in them.
        if kind != ChangeKind::Removed && is == Some(AttributesKind::Directory) {
            continue;
        }
        inodes.insert(path.clone(), change.inode);
        found.push(Change { path, kind, size_bytes: change.size });
    }
    let Some(to) = to else { return named(&found) };
    let copy = |path: &Path, target: &Path| {
        let inode = inodes.get(path).ok_or(io::ErrorKind::NotFound)?;
        copy_from_tree(workdir, *inode, target, runtime, until)
    };
    changes::keep_with(&found, to, cap_bytes, copy).left
}

fn copy_from_tree(
    workdir: &Output,
    inode: u64,
    target: &Path,
    runtime: &Handle,
    until: &CancellationToken,
) -> io::Result<u64> {
    let attributes = workdir.tree().attributes(inode).map_err(told)?;
    match attributes.kind {
        AttributesKind::Directory => return Ok(0),
        AttributesKind::Symlink => {
            let to = workdir.tree().read_link(inode).map_err(told)?;
            std::os::unix::fs::symlink(OsStr::from_bytes(&to), target)?;
            return Ok(0);
        }
        AttributesKind::File => {}
    }
    let mut made = fs::OpenOptions::new().write(true).create_new(true).open(target)?;
    let mut offset = 0;
    while offset < attributes.size {
        let part = runtime.block_on(workdir.read_until(inode, offset, CHUNK_BYTES, until)).map_err(told)?;
        if part.is_empty() {
            break;
        }
        made.write_all(&part)?;
        offset += part.len() as u64;
    }
    made.set_permissions(fs::Permissions::from_mode(attributes.mode & 0o777))?;
    let since = u64::try_from(attributes.mtime_ns).unwrap_or_default();
    made.set_modified(UNIX_EPOCH + Duration::from_nanos(since))?;
    Ok(offset)
}

fn told(errno: Errno) -> io::Error {
    io::Error::from_raw_os_error(errno as i32)
}
