//! Can results land there? Asked before anything is read, frozen or paid for.
//!
//! Never: leaves anything behind at the owner's place.

use std::fs::OpenOptions;
use std::io::{Error, ErrorKind};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use limb_common::id::RunId;

/// Why not, with a hint.
#[derive(Debug, thiserror::Error)]
pub(super) enum DestProblem {
    #[error(
        "results may not land at {}: limb keeps its own ledger and keys in {}; hint: choose another `dest`",
        dest.display(), state_dir.display()
    )]
    Own { dest: PathBuf, state_dir: PathBuf },
    #[error(
        "results cannot land at {}: {} is not a directory; hint: choose another `dest`, or move that file away",
        dest.display(), at.display()
    )]
    NotDirectory { dest: PathBuf, at: PathBuf },
    #[error(
        "results cannot land at {}: nothing can be written in {}; hint: choose a `dest` where you may write",
        dest.display(), at.display()
    )]
    Closed { dest: PathBuf, at: PathBuf, source: Error },
}

/// Looks at one destination. Blocks.
pub(super) fn check(dest: &Path, state_dir: &Path) -> Result<(), DestProblem> {
    if meets(dest, state_dir) {
        return Err(DestProblem::Own { dest: dest.to_owned(), state_dir: state_dir.to_owned() });
    }
    // The lowest part that is there, dangling links included: what is missing is made below it.
    let there = dest.ancestors().find(|at| at.symlink_metadata().is_ok());
    let at = there.unwrap_or(Path::new("/"));
    if !at.is_dir() {
        return Err(DestProblem::NotDirectory { dest: dest.to_owned(), at: at.to_owned() });
    }
    try_to_write(at).map_err(|source| DestProblem::Closed {
        dest: dest.to_owned(),
        at: at.to_owned(),
        source,
    })
}

/// A file without a name, or, where there are none, a directory that goes again at once. Asking for
/// rights would not do: root has them all, and neither a read-only mount nor /proc takes a file.
fn try_to_write(at: &Path) -> Result<(), Error> {
    let unnamed = OpenOptions::new()
        .write(true)
        .mode(0o600)
        .custom_flags(nix::libc::O_TMPFILE | nix::libc::O_CLOEXEC)
        .open(at);
    match unnamed {
        Ok(_) => return Ok(()),
        Err(error)
            if matches!(
                error.kind(),
                ErrorKind::ReadOnlyFilesystem | ErrorKind::PermissionDenied | ErrorKind::StorageFull
            ) =>
        {
            return Err(error);
        }
        Err(_) => {}
    }
    let probe = at.join(format!(".limb-probe-{}", RunId::random()));
    std::fs::DirBuilder::new().mode(0o700).create(&probe)?;
    std::fs::remove_dir(&probe)
}

/// Is one of these below the other (or the same place)? By name, with the links in what exists of
/// them followed, and by (dev, ino), which sees through bind mounts.
fn meets(one: &Path, other: &Path) -> bool {
    let real = |path: &Path| {
        path.ancestors().find_map(|exists| {
            let rest = path.strip_prefix(exists).ok()?;
            exists.canonicalize().ok().map(|real| real.join(rest))
        })
    };
    let (one, other) =
        (real(one).unwrap_or_else(|| one.to_owned()), real(other).unwrap_or_else(|| other.to_owned()));
    let id = |path: &Path| path.metadata().ok().map(|meta| (meta.dev(), meta.ino()));
    let below = |path: &Path, top: &Path| {
        path.starts_with(top) || id(top).is_some_and(|top| path.ancestors().any(|at| id(at) == Some(top)))
    };
    below(&one, &other) || below(&other, &one)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_that_cannot_take_results_is_named_and_nothing_is_left_there() {
        let dir = tempfile::tempdir().unwrap();
        let (root, state) = (dir.path(), dir.path().join("home/state"));
        std::fs::create_dir_all(state.join("store")).unwrap();
        std::fs::write(root.join("file"), b"").unwrap();
        std::os::unix::fs::symlink("nowhere", root.join("dangling")).unwrap();
        std::os::unix::fs::symlink(state.join("store"), root.join("way in")).unwrap();
        let words = |dest: &Path| {
            let problem = check(dest, &state).unwrap_err();
            limb_common::error::chain(&problem).replace(&root.display().to_string(), "")
        };
        let said = "results cannot land at /file: /file is not a directory; \
                    hint: choose another `dest`, or move that file away";
        assert_eq!(words(&root.join("file")), said);
        assert!(words(&root.join("file/below/it")).contains("/file is not a directory"));
        assert!(words(&root.join("dangling")).contains("/dangling is not a directory"));
        for own in ["home", "home/state", "home/state/x", "way in/x"] {
            assert!(words(&root.join(own)).contains("its own ledger and keys"), "{own}");
        }
        for closed in ["/proc/limb", "/proc/self/fd/limb", "/sys/limb/x"] {
            assert!(words(Path::new(closed)).contains("nothing can be written in"), "{closed}");
        }
        for fine in ["new", "deep/new/place"] {
            check(&root.join(fine), &state).unwrap();
        }
        check(root.join("home").parent().unwrap().join("new").as_path(), &state).unwrap();
        let mut left: Vec<_> = std::fs::read_dir(root).unwrap().map(|e| e.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, ["dangling", "file", "home", "way in"]);
    }

    /// Needs to mount; without the right to, there is nothing to test.
    #[test]
    fn a_bind_mount_is_no_way_around() {
        use nix::mount::{MntFlags, MsFlags, mount, umount2};
        let dir = tempfile::tempdir().unwrap();
        let (state, door) = (dir.path().join("state"), dir.path().join("door"));
        for made in [&state, &door] {
            std::fs::create_dir(made).unwrap();
        }
        let none = None::<&str>;
        if mount(Some(&state), &door, none, MsFlags::MS_BIND, none).is_err() {
            println!("SKIPPED a_bind_mount_is_no_way_around: may not mount");
            return;
        }
        let own = check(&door.join("results"), &state);
        let read_only = MsFlags::MS_BIND | MsFlags::MS_REMOUNT | MsFlags::MS_RDONLY;
        mount(none, &door, none, read_only, none).unwrap();
        let closed = check(&door.join("results"), &dir.path().join("elsewhere"));
        umount2(&door, MntFlags::MNT_DETACH).unwrap();
        assert!(matches!(own, Err(DestProblem::Own { .. })), "{own:?}");
        assert!(matches!(closed, Err(DestProblem::Closed { .. })), "{closed:?}");
    }
}
