//! The view as a tree of what differs from the host: pure, but for looking up where a path
//! leads on the host.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::path::{Component, Path, PathBuf};

use super::{Access, View, ViewError, WORKDIR, Workdir};

/// Directories that are RAM of the job's own, with their modes.
const PRIVATE: [(&str, u32); 3] = [("/tmp", 0o1777), ("/var/tmp", 0o1777), ("/dev/shm", 0o1777)];
/// The kernel's own trees: a working set has no business there.
const RESERVED: [&str; 4] = ["/proc", "/sys", "/dev", "/"];

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Leaf {
    Bind { source: PathBuf, access: Access },
    Ram { mode: u32 },
    Hidden,
    Overlay { lower: PathBuf, layer: PathBuf },
    Proc,
}

/// A directory or file of the view. Without a leaf: the host's own, with differences below.
#[derive(Debug, Default)]
pub(crate) struct Node {
    pub(crate) leaf: Option<Leaf>,
    pub(crate) children: BTreeMap<OsString, Self>,
}

impl Node {
    fn insert(&mut self, path: &Path, leaf: Leaf) {
        let mut node = self;
        for name in names(path) {
            node = node.children.entry(name.to_owned()).or_default();
        }
        node.leaf = Some(leaf);
    }
}

fn names(path: &Path) -> impl Iterator<Item = &OsStr> {
    path.components().filter_map(|part| match part {
        Component::Normal(name) => Some(name),
        Component::Prefix(_) | Component::RootDir | Component::CurDir | Component::ParentDir => None,
    })
}

/// The differences that `view` asks for.
pub(crate) fn plan(view: &View) -> Result<Node, ViewError> {
    let mut root = Node::default();
    root.insert(Path::new("/proc"), Leaf::Proc);
    for (path, mode) in PRIVATE {
        root.insert(&on_host(Path::new(path), &[]), Leaf::Ram { mode });
    }
    let private: Vec<&Path> = PRIVATE
        .iter()
        .map(|(path, _)| Path::new(*path))
        .chain([view.home.as_path(), Path::new(WORKDIR)])
        .collect();
    root.insert(&target(&view.home, &private)?, Leaf::Ram { mode: 0o700 });
    for hidden in &view.hide {
        // One that is not there needs no hiding, nor what is under RAM of the job's own.
        match hidden.canonicalize() {
            Ok(found) if !private.iter().any(|top| found.starts_with(top)) => {
                root.insert(&found, Leaf::Hidden);
            }
            Ok(_) | Err(_) => {}
        }
    }
    let workdir = match &view.workdir {
        Workdir::Overlay { lower, layer } => Leaf::Overlay { lower: lower.clone(), layer: layer.clone() },
        Workdir::Ready { source } => Leaf::Bind { source: source.clone(), access: Access::ReadWrite },
        Workdir::Empty { layer } => {
            Leaf::Bind { source: layer.join(super::super::layer::UPPER), access: Access::ReadWrite }
        }
    };
    root.insert(Path::new(WORKDIR), workdir);
    for bind in &view.mounts {
        let leaf = Leaf::Bind { source: bind.source.clone(), access: bind.access };
        root.insert(&target(&bind.target, &private)?, leaf);
    }
    Ok(root)
}

/// Checks a mount point and follows the links on its way, as far as the host has it.
fn target(path: &Path, private: &[&Path]) -> Result<PathBuf, ViewError> {
    let bad = |why| ViewError::BadTarget { path: path.display().to_string(), why };
    if !path.is_absolute() {
        return Err(bad("it is not absolute"));
    }
    if path.components().any(|part| part == Component::ParentDir) {
        return Err(bad("it contains `..`"));
    }
    let found = on_host(path, private);
    let reserved =
        RESERVED.iter().any(|top| found == Path::new(top) || (*top != "/" && found.starts_with(top)));
    if reserved {
        return Err(bad("it is the kernel's"));
    }
    Ok(found)
}

/// `path` with the links of its longest existing prefix resolved. Inside private RAM the host's
/// links do not count.
fn on_host(path: &Path, private: &[&Path]) -> PathBuf {
    if private.iter().any(|top| path.starts_with(top)) {
        return path.components().collect();
    }
    for prefix in path.ancestors().skip(1) {
        if let (Ok(found), Ok(rest)) = (prefix.canonicalize(), path.strip_prefix(prefix)) {
            return found.join(rest);
        }
    }
    path.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(targets: &[&str]) -> View {
        let mounts = targets
            .iter()
            .map(|target| super::super::Bind {
                source: "/".into(),
                target: target.into(),
                access: Access::ReadOnly,
            })
            .collect();
        View {
            staging: "/".into(),
            mounts,
            workdir: Workdir::Ready { source: "/".into() },
            hide: Vec::new(),
            home: super::super::HOME.into(),
        }
    }

    #[test]
    fn nested_mount_points_share_their_parents() {
        let root = plan(&view(&["/mnt/a/b", "/mnt/a/c"])).unwrap();
        let a = &root.children[OsStr::new("mnt")].children[OsStr::new("a")];
        assert!(a.leaf.is_none());
        assert_eq!(a.children.len(), 2);
    }

    #[test]
    fn the_kernels_trees_and_odd_paths_are_refused() {
        for path in ["/", "/proc/x", "/sys", "/dev/x", "data", "/data/../etc"] {
            assert!(plan(&view(&[path])).is_err(), "{path}");
        }
    }
}
