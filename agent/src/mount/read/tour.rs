//! Reading ahead over many files: pure, stepped by each file that is read from its start.
//!
//! A set numbers its files in the order of a depth-first walk, so `tar`, `cp`, `rsync`, an import
//! and a data loader that takes names in order all visit ascending inodes. Three such visits in a
//! row are a tour: from then on the files that come next are asked for, small ones in packs, a
//! window of bytes ahead that doubles with each refill up to what the link holds.
//!
//! Invariant: each file is asked for at most once by one tour, and no more than a window ahead of
//! the visitor; visits in no order cause nothing.

use std::collections::VecDeque;

use limb_common::chunk::{CHUNK_BYTES_U64, ChunkId};
use limb_common::manifest::{ChunkRef, Inode, Manifest, Node, NodeKind};
use limb_common::wire::{MAX_PACK_BYTES, MAX_PACK_FILES};

/// Tours at once: eight loader processes.
const MAX_TOURS: usize = 8;
/// Steps before it is one.
const STEPS_TO_PROVE: u32 = 2;
/// A visitor may leave out so many nodes (directories, links, files of another kind) in one step.
const GAP_NODES: u64 = 8;
const FIRST_WINDOW_BYTES: u64 = 1 << 20;
const MIN_WINDOW_BYTES: u64 = 2 << 20;
const MAX_WINDOW_BYTES: u64 = 64 << 20;
const UNMEASURED_WINDOW_BYTES: u64 = 8 << 20;
const LEAST_PACK_BYTES: u64 = 64 << 10;
/// A file larger than this travels by itself.
const PACKED_FILE_BYTES: u64 = 256 << 10;
/// Of a large file only its beginning: who reads on is noticed by the read-ahead of that file.
const FIRST_CHUNKS: u64 = 2;
/// Nodes without bytes looked at for one refill: a directory of a million links must not hold up
/// a FUSE thread.
const MAX_NODES: u64 = 4096;

#[derive(Debug, Default)]
pub(super) struct Tours {
    tours: Vec<Tour>,
    visits: u64,
}

#[derive(Debug)]
struct Tour {
    last: u64,
    steps: u32,
    /// The next node to look at.
    cursor: u64,
    window_bytes: u64,
    /// Asked for and not visited yet.
    ahead: VecDeque<(u64, u64)>,
    ahead_bytes: u64,
    used_at: u64,
}

/// Something to ask for ahead.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Stop {
    Files(Vec<(Inode, ChunkId)>),
    Chunk { inode: Inode, index: u64, id: ChunkId },
}

impl Tours {
    /// Takes note that a file is read from its start, and says what to ask for now.
    pub(super) fn on_visit(
        &mut self,
        manifest: &Manifest,
        inode: Inode,
        bandwidth_delay_bytes: Option<u64>,
    ) -> Vec<Stop> {
        self.visits += 1;
        let active = self.tours.iter().filter(|tour| tour.steps >= STEPS_TO_PROVE).count().max(1) as u64;
        let most = bandwidth_delay_bytes.map_or(UNMEASURED_WINDOW_BYTES, |bytes| {
            (bytes.saturating_mul(8) / active).clamp(MIN_WINDOW_BYTES, MAX_WINDOW_BYTES)
        });
        // Several readers of one file in a row, or its second 128 KiB: no step.
        if let Some(tour) = self.tours.iter_mut().find(|tour| tour.last == inode.0) {
            tour.used_at = self.visits;
            return Vec::new();
        }
        let visits = self.visits;
        // The nearest behind it.
        let own = self.tours.iter_mut().filter(|tour| tour.expects(inode.0)).max_by_key(|tour| tour.last);
        if let Some(tour) = own {
            tour.used_at = visits;
            return tour.step(manifest, inode.0, most);
        }
        if self.tours.len() >= MAX_TOURS
            && let Some(oldest) = (0..self.tours.len()).min_by_key(|&at| self.tours[at].used_at)
        {
            self.tours.swap_remove(oldest);
        }
        self.tours.push(Tour {
            last: inode.0,
            steps: 0,
            cursor: inode.0 + 1,
            window_bytes: FIRST_WINDOW_BYTES,
            ahead: VecDeque::new(),
            ahead_bytes: 0,
            used_at: visits,
        });
        Vec::new()
    }
}

impl Tour {
    fn expects(&self, inode: u64) -> bool {
        inode > self.last && inode <= self.last.max(self.cursor) + GAP_NODES
    }

    fn step(&mut self, manifest: &Manifest, inode: u64, most: u64) -> Vec<Stop> {
        self.last = inode;
        self.steps = self.steps.saturating_add(1);
        self.cursor = self.cursor.max(inode + 1);
        while let Some((_, bytes)) = self.ahead.pop_front_if(|&mut (asked, _)| asked <= inode) {
            self.ahead_bytes -= bytes;
        }
        let pack_bytes = (most / 8).clamp(LEAST_PACK_BYTES, MAX_PACK_BYTES as u64);
        // A refill asks for a whole pack, not for one file because one was visited.
        if self.steps < STEPS_TO_PROVE || self.ahead_bytes + pack_bytes > self.window_bytes {
            return Vec::new();
        }
        self.window_bytes = (self.window_bytes * 2).min(most);
        self.refill(manifest, pack_bytes)
    }

    fn refill(&mut self, manifest: &Manifest, pack_bytes: u64) -> Vec<Stop> {
        let (mut stops, mut pack) = (Vec::new(), Pack::default());
        let end = self.cursor.saturating_add(MAX_NODES).min(manifest.inode_count() + 1);
        while self.cursor < end && self.ahead_bytes < self.window_bytes {
            let inode = self.cursor;
            self.cursor += 1;
            let Some(node) = manifest.node(Inode(inode)) else { continue };
            if node.kind != NodeKind::File || node.size == 0 {
                continue;
            }
            self.ahead.push_back((inode, node.size));
            self.ahead_bytes += node.size;
            if node.size <= PACKED_FILE_BYTES {
                if let Some(ChunkRef::Data(id)) = node.chunk(0) {
                    stops.extend(pack.add(node.inode, id, pack_bytes));
                }
            } else {
                stops.extend(pack.take());
                stops.extend(beginning(&node));
            }
        }
        stops.extend(pack.take());
        stops
    }
}

fn beginning(node: &Node<'_>) -> Vec<Stop> {
    let chunks = node.size.div_ceil(CHUNK_BYTES_U64).min(FIRST_CHUNKS);
    let chunk = |index| match node.chunk(index)? {
        ChunkRef::Data(id) => Some(Stop::Chunk { inode: node.inode, index, id }),
        ChunkRef::Hole { .. } => None,
    };
    (0..chunks).filter_map(chunk).collect()
}

#[derive(Default)]
struct Pack {
    files: Vec<(Inode, ChunkId)>,
    bytes: u64,
}

impl Pack {
    /// The pack before it, if it is full with this one.
    fn add(&mut self, inode: Inode, id: ChunkId, most: u64) -> Option<Stop> {
        let len = u64::from(id.len);
        let full = self.files.len() >= MAX_PACK_FILES || (self.bytes + len > most && !self.files.is_empty());
        let before = if full { self.take() } else { None };
        self.files.push((inode, id));
        self.bytes += len;
        before
    }

    fn take(&mut self) -> Option<Stop> {
        self.bytes = 0;
        let files = std::mem::take(&mut self.files);
        (!files.is_empty()).then_some(Stop::Files(files))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use limb_common::chunk::{Position, value_of};
    use limb_common::manifest::{ManifestBuilder, NewNode, NodeMeta};
    use proptest::prelude::*;

    use super::*;

    /// Directories of 100 files each; returns the files' inodes in order of the walk.
    fn set(sizes: &[u64]) -> (Manifest, Vec<Inode>) {
        let mut builder = ManifestBuilder::new(NodeMeta { mode: 0o755, ..NodeMeta::default() });
        let mut directory = builder.root();
        let mut drafts = Vec::new();
        for (number, &size) in sizes.iter().enumerate() {
            if number % 100 == 0 {
                let name = format!("d{:05}", number / 100);
                let root = builder.root();
                directory =
                    builder.add(root, name.as_bytes(), NewNode::Directory, NodeMeta::default()).unwrap();
            }
            let chunks = (0..size.div_ceil(CHUNK_BYTES_U64))
                .map(|index| Some(value_of(Position::of(size, index), &(number + 1).to_le_bytes())))
                .collect();
            let name = format!("f{number:06}");
            let node = NewNode::File { size, chunks };
            drafts.push(builder.add(directory, name.as_bytes(), node, NodeMeta::default()).unwrap());
        }
        let (manifest, order) = builder.build();
        let inodes = drafts.into_iter().map(|draft| order.inode(draft)).collect();
        (manifest, inodes)
    }

    fn names(stops: &[Stop]) -> Vec<Inode> {
        stops
            .iter()
            .flat_map(|stop| match stop {
                Stop::Files(files) => files.iter().map(|(inode, _)| *inode).collect(),
                Stop::Chunk { inode, .. } => vec![*inode],
            })
            .collect()
    }

    #[test]
    fn a_walk_finds_nearly_every_file_asked_for_in_packs() {
        let sizes: Vec<u64> = (0..3000_u64).map(|number| 4096 + number * 7919 % 36_000).collect();
        let (manifest, files) = set(&sizes);
        let mut tours = Tours::default();
        let (mut asked, mut missed, mut packs) = (BTreeSet::new(), 0, 0);
        for &inode in &files {
            missed += u64::from(!asked.contains(&inode));
            let stops = tours.on_visit(&manifest, inode, Some(4 << 20));
            packs += stops.len();
            for name in names(&stops) {
                assert!(asked.insert(name), "{name:?} was asked for twice");
            }
        }
        assert_eq!(missed, 3);
        assert!(packs < 3000 / 20, "{packs}");
        assert_eq!(tours.tours.len(), 1);
    }

    #[test]
    fn a_large_file_on_the_way_is_begun_and_nothing_behind_it_is_asked_for() {
        let mut sizes = vec![5000; 50];
        sizes[20] = 500 << 20;
        let (manifest, files) = set(&sizes);
        let mut tours = Tours::default();
        let asked: Vec<_> =
            files[..10].iter().flat_map(|&inode| tours.on_visit(&manifest, inode, None)).collect();
        assert_eq!(asked.iter().filter(|stop| matches!(stop, Stop::Chunk { .. })).count(), 2);
        assert_eq!(names(&asked).last(), Some(&files[20]));
        let behind: Vec<_> =
            files[10..22].iter().flat_map(|&inode| tours.on_visit(&manifest, inode, None)).collect();
        assert!(names(&behind).contains(&files[30]), "{behind:?}");
    }

    proptest! {
        /// Several loaders, each with its own part of the set, in any order of turns.
        #[test]
        fn tours_beside_each_other_are_all_found(turns in proptest::collection::vec(0_usize..4, 200..400)) {
            let (manifest, files) = set(&[10_000; 4000]);
            let mut tours = Tours::default();
            let mut at: Vec<usize> = (0..4).map(|part| part * 1000).collect();
            let mut asked = BTreeSet::new();
            let mut missed = 0;
            for turn in turns {
                let inode = files[at[turn]];
                missed += u64::from(!asked.contains(&inode));
                asked.extend(names(&tours.on_visit(&manifest, inode, Some(4 << 20))));
                at[turn] += 1;
            }
            prop_assert!(missed <= 12, "{missed}");
        }

        /// Far jumps cause nothing; and whatever is visited, no more than a window is ahead.
        #[test]
        fn visits_in_no_order_are_not_amplified(visits in proptest::collection::vec(0_usize..200, 1..200)) {
            let (manifest, files) = set(&[10_000; 4000]);
            let mut tours = Tours::default();
            let mut before = Vec::new();
            for visit in visits {
                let inode = files[visit * 20];
                let stops = tours.on_visit(&manifest, inode, None);
                before.push(inode);
                prop_assert!(stops.is_empty(), "{before:?} {stops:?}");
            }
        }
    }
}
