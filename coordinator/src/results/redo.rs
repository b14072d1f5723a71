//! Which effects may share a batch. After a crash the whole batch is done again, from its first
//! effect, over what an earlier life left of it; each effect then tells by (dev, ino) whether it
//! was done: a rename or removal when its file is gone from the name, a link when its file is there.
//!
//! Invariant: nothing later in a batch makes that answer wrong. Only hard links and names that come
//! back can, and they start a new batch.

use std::collections::HashSet;

use super::disk::Ident;
use super::effect::{After, Effect};
use super::entry::{Entry, Op};

#[derive(Debug, Default)]
pub(super) struct Batch {
    /// Names that a link made.
    linked: HashSet<(u32, Vec<u8>)>,
    /// Names that a file left.
    left: HashSet<(u32, Vec<u8>, Ident)>,
}

impl Batch {
    /// Must this entry wait until the batch is committed? `comes` is the file that it brings under
    /// a name it had before or not.
    pub(super) fn refuses(&self, entry: &Entry, comes: impl FnOnce(&[u8]) -> Option<Ident>) -> bool {
        let output = entry.output.0;
        let linked = |path: &[u8]| !self.linked.is_empty() && self.linked.contains(&(output, path.to_vec()));
        let back = |from: &[u8], to: &[u8]| {
            !self.left.is_empty()
                && comes(from).is_some_and(|ident| self.left.contains(&(output, to.to_vec(), ident)))
        };
        match &entry.op {
            Op::Renamed { from, to, .. } => linked(from) || linked(to) || back(from, to),
            Op::HardLinkMade { existing, path } => linked(path) || back(existing, path),
            Op::Published(publication) => linked(&publication.path),
            Op::Removed { path, .. } | Op::DirectoryMade { path, .. } | Op::SymlinkMade { path, .. } => {
                linked(path)
            }
            Op::Created { .. } | Op::AttributesSet { .. } | Op::XattrSet { .. } | Op::Abandoned { .. } => {
                false
            }
        }
    }

    /// Takes note of an effect. `true`: nothing may follow in this batch.
    pub(super) fn add(&mut self, output: u32, effect: &Effect) -> bool {
        match effect {
            Effect::Link { path, .. } => {
                self.linked.insert((output, path.clone()));
                false
            }
            Effect::Rename { from: path, ident, .. } | Effect::Remove { path, ident, .. } => {
                self.left.insert((output, path.clone(), *ident));
                false
            }
            // If it loses its name the part comes back to where it was taken from.
            Effect::Place { after, .. } => matches!(after, After::InPlace { .. }),
            Effect::Nothing
            | Effect::Refused { .. }
            | Effect::Created { .. }
            | Effect::Settle { .. }
            | Effect::Grow { .. }
            | Effect::Attributes { .. }
            | Effect::Xattr { .. }
            | Effect::Partial { .. }
            | Effect::Drop { .. } => false,
        }
    }
}
