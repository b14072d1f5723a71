//! What a job changed in its workdir: read from the overlay's upper layer after its end, so that
//! it can be brought home up to a cap. Smallest first; what is not kept is named.
//!
//! Never: follow a link, or say nothing about something that is left behind.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

/// Deeper than any real tree; bounds the recursion.
const DEPTH_MAX: usize = 200;

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// Relative to the workdir.
    pub path: PathBuf,
    pub kind: ChangeKind,
    /// Of the content to keep; 0 for a removal.
    pub size_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ChangeKind {
    Created,
    Modified,
    Removed,
    /// A pipe, socket or device: named, never kept.
    Special,
}

/// Lists what `upper` changes over `lower` (none: an empty workdir), in order of path.
pub fn changes(upper: &Path, lower: Option<&Path>) -> io::Result<Vec<Change>> {
    let mut found = Vec::new();
    walk(upper, lower, Path::new(""), 0, &mut found)?;
    found.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(found)
}

fn walk(
    upper: &Path,
    lower: Option<&Path>,
    inside: &Path,
    depth: usize,
    found: &mut Vec<Change>,
) -> io::Result<()> {
    if depth > DEPTH_MAX {
        return Err(io::Error::other(format!("{} is nested too deeply", inside.display())));
    }
    let here = upper.join(inside);
    let opaque = is_opaque(&here);
    if opaque && let Some(lower) = lower {
        removed_below(lower, upper, inside, found);
    }
    let below = if opaque { None } else { lower };
    for entry in fs::read_dir(&here)? {
        let path = inside.join(entry?.file_name());
        let meta = fs::symlink_metadata(upper.join(&path))?;
        let before = below.and_then(|lower| fs::symlink_metadata(lower.join(&path)).ok());
        if is_whiteout(&meta) {
            found.push(Change { path, kind: ChangeKind::Removed, size_bytes: 0 });
        } else if meta.is_dir() {
            if before.as_ref().is_some_and(|before| !before.is_dir()) {
                found.push(Change { path: path.clone(), kind: ChangeKind::Removed, size_bytes: 0 });
            }
            let below = below.filter(|_| before.is_some_and(|before| before.is_dir()));
            walk(upper, below, &path, depth + 1, found)?;
        } else if meta.is_file() || meta.is_symlink() {
            let known = before.is_some() || (opaque && existed(lower, &path));
            let kind = if known { ChangeKind::Modified } else { ChangeKind::Created };
            found.push(Change { path, kind, size_bytes: meta.len() });
        } else {
            found.push(Change { path, kind: ChangeKind::Special, size_bytes: 0 });
        }
    }
    Ok(())
}

fn existed(lower: Option<&Path>, path: &Path) -> bool {
    lower.is_some_and(|lower| fs::symlink_metadata(lower.join(path)).is_ok())
}

/// An opaque directory hides everything that was in it.
fn removed_below(lower: &Path, upper: &Path, inside: &Path, found: &mut Vec<Change>) {
    for entry in fs::read_dir(lower.join(inside)).into_iter().flatten().flatten() {
        let path = inside.join(entry.file_name());
        if fs::symlink_metadata(upper.join(&path)).is_err() {
            found.push(Change { path, kind: ChangeKind::Removed, size_bytes: 0 });
        }
    }
}

fn is_whiteout(meta: &Metadata) -> bool {
    meta.file_type().is_char_device() && meta.rdev() == 0
}

/// overlayfs says so in an xattr: `trusted.` as root, `user.` in a user namespace.
fn is_opaque(directory: &Path) -> bool {
    ["trusted.overlay.opaque", "user.overlay.opaque"].iter().any(|name| xattr_is(directory, name, b"y"))
}

fn xattr_is(path: &Path, name: &str, wanted: &[u8]) -> bool {
    use std::os::unix::ffi::OsStrExt as _;
    let (Ok(path), Ok(name)) =
        (std::ffi::CString::new(path.as_os_str().as_bytes()), std::ffi::CString::new(name))
    else {
        return false;
    };
    let mut value = [0_u8; 8];
    // SAFETY: both strings are NUL-terminated; the kernel writes at most the given length.
    let count =
        unsafe { libc::lgetxattr(path.as_ptr(), name.as_ptr(), value.as_mut_ptr().cast(), value.len()) };
    usize::try_from(count).is_ok_and(|count| value.get(..count) == Some(wanted))
}

/// What was kept and what was not.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    pub files: Vec<PathBuf>,
    pub bytes: u64,
    /// With the reason, as text for people.
    pub left: Vec<String>,
    pub removed: Vec<PathBuf>,
}

/// Copies the changed files from `upper` into `to` (which exists), smallest first, up to
/// `cap_bytes`. One that cannot be copied is named and the rest goes on.
#[must_use]
pub fn keep(changes: &[Change], upper: &Path, to: &Path, cap_bytes: u64) -> Kept {
    keep_with(changes, to, cap_bytes, |path, target| copy(&upper.join(path), target))
}

/// As [`keep`], with a way to copy: from a path relative to the workdir to a name that is free.
pub(crate) fn keep_with(
    changes: &[Change],
    to: &Path,
    cap_bytes: u64,
    copy: impl Fn(&Path, &Path) -> io::Result<u64>,
) -> Kept {
    let mut kept = Kept::default();
    let mut order: Vec<&Change> = changes.iter().collect();
    order.sort_by_key(|change| (change.size_bytes, &change.path));
    for change in order {
        let shown = change.path.display();
        match change.kind {
            ChangeKind::Removed => kept.removed.push(change.path.clone()),
            ChangeKind::Special => kept.left.push(format!("{shown} (not a file)")),
            ChangeKind::Created | ChangeKind::Modified => {
                if kept.bytes.saturating_add(change.size_bytes) > cap_bytes {
                    kept.left.push(format!("{shown} ({} bytes, over the cap)", change.size_bytes));
                } else {
                    match clear(to, &change.path).and_then(|target| copy(&change.path, &target)) {
                        Ok(bytes) => {
                            kept.bytes += bytes;
                            kept.files.push(change.path.clone());
                        }
                        Err(error) => kept.left.push(format!("{shown} ({error})")),
                    }
                }
            }
        }
    }
    kept.files.sort();
    kept
}

/// A free name: what an earlier attempt left under it goes.
fn clear(to: &Path, path: &Path) -> io::Result<PathBuf> {
    let target = to.join(path);
    if let Some(parent) = target.parent() {
        fs::DirBuilder::new().recursive(true).mode(0o755).create(parent)?;
    }
    match fs::remove_file(&target) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(target),
    }
}

fn copy(from: &Path, target: &Path) -> io::Result<u64> {
    let meta = fs::symlink_metadata(from)?;
    if meta.is_symlink() {
        std::os::unix::fs::symlink(fs::read_link(from)?, target)?;
        return Ok(0);
    }
    let mut source = fs::File::open(from)?;
    let mut made = fs::OpenOptions::new().write(true).create_new(true).open(target)?;
    let bytes = io::copy(&mut source, &mut made)?;
    made.set_permissions(fs::Permissions::from_mode(meta.mode() & 0o777))?;
    if let Ok(modified) = meta.modified() {
        made.set_modified(modified)?;
    }
    // Closing publishes it; waiting for home file by file would take a round trip each.
    Ok(bytes)
}
