//! What differs from the lower set, by path: for a working directory whose changes are looked at
//! when the job has ended.

use limb_common::manifest::{Inode, NodeKind};

use super::Tree;
use crate::results::namespace::{Kind, ROOT};

/// One path that is not as it was.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub path: Vec<u8>,
    pub kind: ChangeKind,
    /// 0 when removed.
    pub inode: u64,
    /// Bytes of a file; 0 for anything else.
    pub size: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    Created,
    Modified,
    Removed,
}

impl Tree {
    /// Created, modified and removed paths, parents before children.
    pub fn changes(&mut self) -> Vec<Change> {
        let mut found = Vec::new();
        let lower = self.names.lower().map(|_| Inode(ROOT));
        self.compare(ROOT, lower, &[], &mut found);
        found
    }

    fn compare(&mut self, inode: u64, lower: Option<Inode>, path: &[u8], found: &mut Vec<Change>) {
        if lower.is_some_and(|lower| lower.0 == inode) && self.names.is_unloaded(inode) {
            return;
        }
        let Ok(directory) = self.names.directory(inode) else { return };
        let ours: Vec<(Vec<u8>, u64)> =
            directory.entries.iter().map(|(name, entry)| (name.clone(), entry.inode)).collect();
        let Some(manifest) = self.names.lower().cloned() else {
            for (name, child) in ours {
                self.compare_one(child, None, join(path, &name), found);
            }
            return;
        };
        for (name, child) in &ours {
            let was = lower.and_then(|lower| manifest.lookup(lower, name));
            self.compare_one(*child, was, join(path, name), found);
        }
        let before =
            lower.and_then(|lower| manifest.node(lower)).into_iter().flat_map(|node| node.children());
        for (name, _) in before {
            if !ours.iter().any(|(ours, _)| ours == name) {
                let path = join(path, name);
                found.push(Change { path, kind: ChangeKind::Removed, inode: 0, size: 0 });
            }
        }
    }

    fn compare_one(&mut self, inode: u64, was: Option<Inode>, path: Vec<u8>, found: &mut Vec<Change>) {
        let Ok(node) = self.names.node(inode) else { return };
        let was_directory = was
            .and_then(|was| self.names.lower().and_then(|lower| lower.node(was)))
            .is_some_and(|node| node.kind == NodeKind::Directory);
        let (is_directory, size) = match &node.kind {
            Kind::Directory(_) => (true, 0),
            Kind::File(file) => (false, file.content.size),
            Kind::Symlink(_) => (false, 0),
        };
        let kind = match was {
            None => Some(ChangeKind::Created),
            Some(was) if is_directory && was_directory => {
                (node.touched && was.0 == inode).then_some(ChangeKind::Modified)
            }
            Some(was) => (was.0 != inode || node.touched).then_some(ChangeKind::Modified),
        };
        if let Some(kind) = kind {
            found.push(Change { path: path.clone(), kind, inode, size });
        }
        if is_directory {
            self.compare(inode, was.filter(|_| was_directory), &path, found);
        }
    }
}

fn join(parent: &[u8], name: &[u8]) -> Vec<u8> {
    if parent.is_empty() { name.to_vec() } else { [parent, b"/", name].concat() }
}
