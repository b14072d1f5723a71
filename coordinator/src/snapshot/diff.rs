//! What changed between two snapshots, by path.

use limb_common::manifest::{Inode, Manifest, Node, NodeKind, ROOT};

/// Raw paths inside the set, each list in order of path. A directory that came or went is named
/// together with everything in it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Difference {
    pub added: Vec<Vec<u8>>,
    pub removed: Vec<Vec<u8>>,
    pub changed: Vec<Vec<u8>>,
}

pub(super) fn diff(before: &Manifest, after: &Manifest) -> Difference {
    let mut out = Difference::default();
    let mut pending = vec![(Vec::new(), ROOT, ROOT)];
    while let Some((path, old, new)) = pending.pop() {
        let (Some(old), Some(new)) = (before.node(old), after.node(new)) else { continue };
        let mut left = old.children().peekable();
        let mut right = new.children().peekable();
        loop {
            let order = match (left.peek(), right.peek()) {
                (None, None) => break,
                (Some(_), None) => std::cmp::Ordering::Less,
                (None, Some(_)) => std::cmp::Ordering::Greater,
                (Some((old, _)), Some((new, _))) => old.cmp(new),
            };
            match order {
                std::cmp::Ordering::Less => {
                    if let Some((name, inode)) = left.next() {
                        tree(before, inode, joined(&path, name), &mut out.removed);
                    }
                }
                std::cmp::Ordering::Greater => {
                    if let Some((name, inode)) = right.next() {
                        tree(after, inode, joined(&path, name), &mut out.added);
                    }
                }
                std::cmp::Ordering::Equal => {
                    let (Some((name, old)), Some((_, new))) = (left.next(), right.next()) else { break };
                    let here = joined(&path, name);
                    let (Some(a), Some(b)) = (before.node(old), after.node(new)) else { continue };
                    if a.kind != b.kind {
                        tree(before, old, here.clone(), &mut out.removed);
                        tree(after, new, here, &mut out.added);
                        continue;
                    }
                    if a.kind == NodeKind::Directory {
                        pending.push((here.clone(), old, new));
                    }
                    if !same(&a, &b) {
                        out.changed.push(here);
                    }
                }
            }
        }
    }
    out.added.sort();
    out.removed.sort();
    out.changed.sort();
    out
}

fn same(a: &Node<'_>, b: &Node<'_>) -> bool {
    // A directory's own mtime changes with what is in it, which is named by itself.
    let directory = a.kind == NodeKind::Directory;
    a.mode == b.mode
        && a.xattrs().eq(b.xattrs())
        && (directory || (a.size == b.size && a.mtime_ns == b.mtime_ns))
        && a.target() == b.target()
        && (0..a.chunk_count()).all(|index| a.chunk(index) == b.chunk(index))
}

fn tree(manifest: &Manifest, inode: Inode, path: Vec<u8>, out: &mut Vec<Vec<u8>>) {
    let mut pending = vec![(path, inode)];
    while let Some((path, inode)) = pending.pop() {
        if let Some(node) = manifest.node(inode) {
            pending.extend(node.children().map(|(name, child)| (joined(&path, name), child)));
        }
        out.push(path);
    }
}

fn joined(directory: &[u8], name: &[u8]) -> Vec<u8> {
    if directory.is_empty() { name.to_vec() } else { [directory, b"/", name].concat() }
}
