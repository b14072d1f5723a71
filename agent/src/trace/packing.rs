//! A plan's chunks as what is asked for: small files in packs, whatever their order in the set.

use limb_common::chunk::ChunkId;
use limb_common::manifest::{ChunkRef, Inode, Manifest};
use limb_common::trace::Touch;
use limb_common::wire::{MAX_PACK_BYTES, MAX_PACK_FILES};

/// A file larger than this travels by itself.
const PACKED_FILE_BYTES: u64 = 256 << 10;
const LEAST_PACK_BYTES: u64 = 64 << 10;
/// A pack goes also when so much else has gone since its first file was planned.
const OTHERS_BYTES: u64 = 2 << 20;

/// Something to ask for, as one.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Step {
    /// One chunk; or small files of one chunk each.
    pub(super) chunks: Vec<Planned>,
    pub(super) bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Planned {
    pub(super) inode: Inode,
    pub(super) index: u64,
    pub(super) id: ChunkId,
    /// Among all of the set's.
    pub(super) number: u64,
}

/// A plan on its way.
#[derive(Debug)]
pub(super) struct Packing {
    plan: std::vec::IntoIter<Touch>,
    pack: Vec<Planned>,
    pack_bytes: u64,
    others_bytes: u64,
    /// Behind the pack that it pushed out.
    kept: Option<Step>,
}

impl Packing {
    pub(super) fn new(plan: Vec<Touch>) -> Self {
        Self { plan: plan.into_iter(), pack: Vec::new(), pack_bytes: 0, others_bytes: 0, kept: None }
    }

    /// What comes next of what is `wanted` still, in packs of what the link holds for a moment.
    pub(super) fn next(
        &mut self,
        manifest: &Manifest,
        bandwidth_delay_bytes: Option<u64>,
        wanted: impl Fn(u64) -> bool,
    ) -> Option<Step> {
        let most = bandwidth_delay_bytes.map_or(MAX_PACK_BYTES as u64, |bytes| {
            (bytes / 4).clamp(LEAST_PACK_BYTES, MAX_PACK_BYTES as u64)
        });
        if let Some(step) = self.kept.take() {
            return Some(step);
        }
        while let Some(touch) = self.plan.next() {
            let Some((node, number)) = touch.find(manifest).filter(|(_, number)| wanted(*number)) else {
                continue;
            };
            let Some(ChunkRef::Data(id)) = node.chunk(touch.index()) else { continue };
            let planned = Planned { inode: node.inode, index: touch.index(), id, number };
            let bytes = u64::from(id.len);
            if node.size > PACKED_FILE_BYTES {
                let step = Step { chunks: vec![planned], bytes };
                self.others_bytes += bytes;
                if self.pack.is_empty() || self.others_bytes < OTHERS_BYTES {
                    return Some(step);
                }
                self.kept = Some(step);
                return self.take();
            }
            let full = self.pack_bytes + bytes > most || self.pack.len() >= MAX_PACK_FILES;
            let before = if full { self.take() } else { None };
            self.pack.push(planned);
            self.pack_bytes += bytes;
            if before.is_some() {
                return before;
            }
        }
        self.take()
    }

    fn take(&mut self) -> Option<Step> {
        let (chunks, bytes) = (std::mem::take(&mut self.pack), std::mem::take(&mut self.pack_bytes));
        self.others_bytes = 0;
        (!chunks.is_empty()).then_some(Step { chunks, bytes })
    }
}

#[cfg(test)]
mod tests {
    use limb_common::chunk::{CHUNK_BYTES_U64, Position, chunk_count, value_of};
    use limb_common::manifest::{ManifestBuilder, NewNode, NodeMeta};
    use proptest::prelude::*;

    use super::*;

    fn set(sizes: &[u64]) -> Manifest {
        let mut builder = ManifestBuilder::new(NodeMeta::default());
        for (number, &size) in sizes.iter().enumerate() {
            let value = |index| Some(value_of(Position::of(size, index), &number.to_le_bytes()));
            let node = NewNode::File { size, chunks: (0..chunk_count(size)).map(value).collect() };
            let (root, name) = (builder.root(), format!("{number:05}"));
            builder.add(root, name.as_bytes(), node, NodeMeta::default()).unwrap();
        }
        builder.build().0
    }

    fn steps(manifest: &Manifest, plan: Vec<Touch>, delay_bytes: Option<u64>) -> Vec<Step> {
        let mut packing = Packing::new(plan);
        std::iter::from_fn(|| packing.next(manifest, delay_bytes, |_| true)).collect()
    }

    #[test]
    fn small_files_in_no_order_go_in_packs_and_large_ones_between_them_hold_nothing_up() {
        let mut sizes = vec![20_000; 500];
        sizes.push(40 * CHUNK_BYTES_U64);
        let manifest = set(&sizes);
        let small = |number: u64| Touch::new(Inode(2 + number * 193 % 500), 0, 0).unwrap();
        let large = |index| Touch::new(Inode(502), index, 0).unwrap();
        let plan: Vec<_> = (0..500).map(small).collect();
        let packs = steps(&manifest, plan.clone(), None);
        assert_eq!(
            packs.iter().map(|step| step.chunks.len()).collect::<Vec<_>>(),
            [52; 9].into_iter().chain([32]).collect::<Vec<_>>()
        );
        assert!(
            packs
                .iter()
                .flat_map(|step| &step.chunks)
                .map(|planned| planned.inode)
                .eq(plan.iter().map(Touch::inode))
        );
        assert!(steps(&manifest, plan, Some(1)).iter().all(|step| step.bytes <= LEAST_PACK_BYTES));

        let mixed = (0..40).flat_map(|at| [small(at), large(at)]).collect();
        let mixed = steps(&manifest, mixed, None);
        let packs = mixed.iter().filter(|step| step.bytes < CHUNK_BYTES_U64).count();
        assert_eq!((packs, mixed.len()), (20, 60));
    }

    proptest! {
        #[test]
        fn everything_planned_is_asked_for_once_within_the_limits(
            sizes in proptest::collection::vec(1_u64..3 * CHUNK_BYTES_U64, 1..60),
            order in proptest::collection::vec((2_u64..62, 0_u64..3), 0..200),
            delay in proptest::option::of(0_u64..8 << 20),
        ) {
            let manifest = set(&sizes);
            let plan: Vec<_> = order.into_iter().filter_map(|(inode, index)| Touch::new(Inode(inode), index, 0)).collect();
            let plan = limb_common::trace::of_set(&manifest, plan);
            let steps = steps(&manifest, plan.clone(), delay);
            let mut numbers: Vec<_> = steps.iter().flat_map(|step| &step.chunks).map(|planned| planned.number).collect();
            let mut wanted: Vec<_> = plan.iter().filter_map(|touch| Some(touch.find(&manifest)?.1)).collect();
            numbers.sort_unstable();
            wanted.sort_unstable();
            prop_assert_eq!(numbers, wanted);
            for step in steps {
                prop_assert_eq!(step.bytes, step.chunks.iter().map(|planned| u64::from(planned.id.len)).sum::<u64>());
                prop_assert!(step.chunks.len() == 1 || (step.bytes <= MAX_PACK_BYTES as u64 && step.chunks.len() <= MAX_PACK_FILES));
            }
        }
    }
}
