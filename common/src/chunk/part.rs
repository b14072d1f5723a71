//! Parts of a chunk: runs of 16 KiB groups, each run verified by itself against the chunk's name.
//!
//! A chunk's value is the top of a BLAKE3 tree over its groups, so a few values of the tree, those
//! beside the way from the run to the top, prove the run: at most twelve for one run. (Slices as
//! in "bao", <https://github.com/oconnor663/bao>, with larger groups and the proof apart.)
//!
//! Invariant: only [`ChunkId::verify_part`] makes a [`VerifiedPart`].

use std::ops::Range;

use blake3::hazmat::{HasherExt as _, Mode, merge_subtrees_non_root, merge_subtrees_root};
use bytes::Bytes;

use super::{CHUNK_BYTES_U64, ChunkId, HashMismatch, Position, VerifiedChunk, left_len};
use crate::id::Digest;

/// The smallest part. The proof of one group of 64 is 192 bytes.
pub const GROUP_BYTES: usize = 16 << 10;

/// How many groups a chunk of this length has.
#[must_use]
pub const fn group_count(chunk_len: u32) -> usize {
    (chunk_len as usize).div_ceil(GROUP_BYTES)
}

/// The groups that hold these bytes.
#[must_use]
pub fn groups_of(bytes: &Range<usize>) -> Range<usize> {
    bytes.start / GROUP_BYTES..bytes.end.div_ceil(GROUP_BYTES)
}

/// The bytes of a run of groups, within a chunk of this length.
#[must_use]
pub fn group_bytes(chunk_len: u32, groups: &Range<usize>) -> Range<usize> {
    let end = |group: usize| group.saturating_mul(GROUP_BYTES).min(chunk_len as usize);
    end(groups.start)..end(groups.end)
}

/// The values of all groups of a chunk, in order: what a proof of any run is made from.
#[must_use]
pub fn group_values(position: Position, bytes: &[u8]) -> Vec<Digest> {
    bytes
        .chunks(GROUP_BYTES)
        .enumerate()
        .map(|(group, bytes)| Digest(subtree_value(position, group, bytes)))
        .collect()
}

/// The value of a run of bytes that begins with this group and is a subtree of its chunk's tree.
fn subtree_value(position: Position, group: usize, bytes: &[u8]) -> [u8; 32] {
    let base = match position {
        Position::Whole => 0,
        Position::Subtree { index } => index * CHUNK_BYTES_U64,
    };
    let mut hasher = blake3::Hasher::new();
    hasher.set_input_offset(base + (group * GROUP_BYTES) as u64);
    hasher.update(bytes);
    hasher.finalize_non_root()
}

/// What must travel with this run of groups. `values` are those of all groups of the chunk.
#[must_use]
pub fn proof(values: &[Digest], groups: &Range<usize>) -> Vec<Digest> {
    let mut out = Vec::new();
    prove(values, 0..values.len(), groups, &mut out);
    out
}

fn prove(values: &[Digest], node: Range<usize>, wanted: &Range<usize>, out: &mut Vec<Digest>) {
    if node.end <= wanted.start || node.start >= wanted.end {
        out.extend(merge(values.get(node).unwrap_or_default()).map(Digest));
    } else if node.start < wanted.start || node.end > wanted.end {
        let (left, right) = halves(&node);
        prove(values, left, wanted, out);
        prove(values, right, wanted, out);
    }
}

fn merge(values: &[Digest]) -> Option<[u8; 32]> {
    match values {
        [] => None,
        [only] => Some(only.0),
        several => {
            let (left, right) = several.split_at(left_len(several.len()));
            Some(merge_subtrees_non_root(&merge(left)?, &merge(right)?, Mode::Hash))
        }
    }
}

fn halves(node: &Range<usize>) -> (Range<usize>, Range<usize>) {
    let middle = node.start + left_len(node.len());
    (node.start..middle, middle..node.end)
}

/// A run of groups that is what its chunk's name says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedPart {
    id: ChunkId,
    first: usize,
    bytes: Bytes,
}

impl VerifiedPart {
    #[must_use]
    pub fn id(&self) -> ChunkId {
        self.id
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Never: a part has at least one byte.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// The bytes of this range of the chunk, if all of it is here.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Option<VerifiedSlice> {
        let start = self.first * GROUP_BYTES;
        let (from, to) = (range.start.checked_sub(start)?, range.end.checked_sub(start)?);
        (from <= to && to <= self.bytes.len()).then(|| VerifiedSlice(self.bytes.slice(from..to)))
    }
}

impl VerifiedChunk {
    /// The bytes of this range of the chunk.
    #[must_use]
    pub fn slice(&self, range: Range<usize>) -> Option<VerifiedSlice> {
        let inside = range.start <= range.end && range.end <= self.bytes().len();
        inside.then(|| VerifiedSlice(self.bytes().slice(range)))
    }
}

/// Some bytes of something that was verified.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerifiedSlice(Bytes);

impl VerifiedSlice {
    #[must_use]
    pub fn bytes(&self) -> &Bytes {
        &self.0
    }
}

impl ChunkId {
    /// Turns bytes that somebody sent as these groups of this chunk into bytes that can be used.
    ///
    /// # Errors
    /// [`HashMismatch`] when bytes and proof do not come to this chunk's value, or there are too
    /// many or too few of either.
    pub fn verify_part(
        self,
        groups: Range<usize>,
        bytes: Bytes,
        proof: &[Digest],
    ) -> Result<VerifiedPart, HashMismatch> {
        let count = group_count(self.len);
        let mismatch = |found: Digest| HashMismatch {
            expected: self.hash,
            expected_len: u32::try_from(group_bytes(self.len, &groups).len()).unwrap_or(u32::MAX),
            found,
            found_len: bytes.len(),
        };
        if groups.is_empty() || groups.end > count || bytes.len() != group_bytes(self.len, &groups).len() {
            return Err(mismatch(Digest([0; 32])));
        }
        let part = VerifiedPart { id: self, first: groups.start, bytes: bytes.clone() };
        if groups == (0..count) {
            return if proof.is_empty() {
                self.verify(bytes).map(|_| part)
            } else {
                Err(mismatch(self.hash))
            };
        }
        let mut check =
            Check { position: self.position, wanted: groups.clone(), rest: &bytes, proof: proof.iter() };
        let (left, right) = halves(&(0..count));
        let found = check.value(left).and_then(|left| {
            let right = check.value(right)?;
            Some(match self.position {
                Position::Whole => *merge_subtrees_root(&left, &right, Mode::Hash).as_bytes(),
                Position::Subtree { .. } => merge_subtrees_non_root(&left, &right, Mode::Hash),
            })
        });
        let found = Digest(found.unwrap_or_default());
        let all_used = check.rest.is_empty() && check.proof.next().is_none();
        if all_used && found == self.hash { Ok(part) } else { Err(mismatch(found)) }
    }
}

struct Check<'a> {
    position: Position,
    wanted: Range<usize>,
    /// Of the wanted bytes, those not used yet.
    rest: &'a [u8],
    proof: std::slice::Iter<'a, Digest>,
}

impl Check<'_> {
    fn value(&mut self, node: Range<usize>) -> Option<[u8; 32]> {
        if node.end <= self.wanted.start || node.start >= self.wanted.end {
            return self.proof.next().map(|value| value.0);
        }
        if node.start >= self.wanted.start && node.end <= self.wanted.end {
            let len = (node.len() * GROUP_BYTES).min(self.rest.len());
            let (own, rest) = self.rest.split_at(len);
            self.rest = rest;
            return Some(subtree_value(self.position, node.start, own));
        }
        let (left, right) = halves(&node);
        let left = self.value(left)?;
        let right = self.value(right)?;
        Some(merge_subtrees_non_root(&left, &right, Mode::Hash))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::chunk::CHUNK_BYTES;

    fn noise(len: usize) -> Vec<u8> {
        let mut out = vec![0; len];
        blake3::Hasher::new().update(b"parts").finalize_xof().fill(&mut out);
        out
    }

    #[derive(Debug)]
    struct Case {
        id: ChunkId,
        groups: Range<usize>,
        bytes: Bytes,
        proof: Vec<Digest>,
    }

    fn case(len: usize, whole: bool, from: usize, count: usize) -> Case {
        let bytes = noise(len);
        let position = if whole { Position::Whole } else { Position::Subtree { index: 5 } };
        let id = ChunkId::of(position, &bytes);
        let all = group_count(id.len);
        let from = from % all;
        let groups = from..(from + 1 + count % (all - from)).min(all);
        let values = group_values(position, &bytes);
        let own = Bytes::from(bytes).slice(group_bytes(id.len, &groups));
        let proof = proof(&values, &groups);
        Case { id, groups, bytes: own, proof }
    }

    fn cases() -> impl Strategy<Value = Case> {
        let len =
            prop_oneof![1..=CHUNK_BYTES, Just(CHUNK_BYTES), (1_usize..=64).prop_map(|n| n * GROUP_BYTES)];
        (len, any::<bool>(), 0_usize..64, 0_usize..64)
            .prop_map(|(len, whole, from, count)| case(len, whole, from, count))
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

        #[test]
        fn every_run_of_groups_is_proved(case in cases()) {
            let Case { id, groups, bytes, proof } = case;
            prop_assert!(proof.len() <= 12);
            let part = id.verify_part(groups.clone(), bytes.clone(), &proof).unwrap();
            let range = group_bytes(id.len, &groups);
            let slice = part.slice(range.clone()).unwrap();
            prop_assert_eq!(slice.bytes(), &bytes);
            prop_assert!(part.slice(range.start..range.end + 1).is_none());
        }

        /// Any flipped bit in the bytes or in the proof, other groups, another place, a value too
        /// few or too many.
        #[test]
        fn nothing_else_is(case in cases(), at in any::<proptest::sample::Index>(), bit in 0_u8..8) {
            let Case { id, groups, bytes, mut proof } = case;
            let mut flipped = bytes.to_vec();
            flipped[at.index(bytes.len())] ^= 1 << bit;
            prop_assert!(id.verify_part(groups.clone(), flipped.into(), &proof).is_err());
            let other = ChunkId { position: Position::Subtree { index: 6 }, ..id };
            prop_assert!(other.verify_part(groups.clone(), bytes.clone(), &proof).is_err());
            let moved = groups.start + 1..groups.end + 1;
            prop_assert!(id.verify_part(moved, bytes.clone(), &proof).is_err());
            proof.push(Digest([1; 32]));
            prop_assert!(id.verify_part(groups.clone(), bytes.clone(), &proof).is_err());
            proof.pop();
            if !proof.is_empty() {
                let value = at.index(proof.len());
                proof[value].0[usize::from(bit)] ^= 1;
                prop_assert!(id.verify_part(groups.clone(), bytes.clone(), &proof).is_err());
                proof.pop();
                prop_assert!(id.verify_part(groups, bytes, &proof).is_err());
            }
        }
    }
}
