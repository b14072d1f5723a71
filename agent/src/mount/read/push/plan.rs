//! What may be pushed now: pure, stepped by each read that the kernel sends.
//!
//! A chunk is *ahead* from when it is offered until a reader has come to it: so it is pushed once,
//! and what is pushed for nobody is bounded. A chunk that a read touches is left alone: its pages
//! are locked until the read is answered. That is a matter of speed and not of safety, since the
//! kernel may have asked for what we have not seen yet.

use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::time::Duration;

use limb_common::chunk::{CHUNK_BYTES_U64, chunk_len};
use limb_common::clock::BootInstant;
use limb_common::manifest::Inode;

/// Of one mount, pushed and not passed.
pub(super) const MAX_AHEAD_BYTES: u64 = 64 << 20;
/// A reader that comes to a chunk has passed what lies so many chunks behind it.
const BEHIND_CHUNKS: u64 = MAX_AHEAD_BYTES / CHUNK_BYTES_U64;
/// Who has not come by then will not come: the kernel may do with the pages what it likes.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(30);

/// The part of a chunk that is pushed, as a range of the file: all but its first page. The kernel
/// asks for that one, which tells the detector and the trace that a reader has come here.
pub(super) fn pushed_range(file_bytes: u64, index: u64, page_bytes: u64) -> Option<Range<u64>> {
    let start = index.checked_mul(CHUNK_BYTES_U64)?;
    let end = start.checked_add(u64::from(chunk_len(file_bytes, index)))?;
    let from = start.checked_add(page_bytes)?;
    (from < end).then_some(from..end)
}

#[derive(Debug, Default)]
pub(super) struct Plan {
    /// Reads under way, by each chunk that they touch.
    reading: HashMap<(Inode, u64), u32>,
    /// Nothing of [`Self::reading`].
    ahead: BTreeMap<(Inode, u64), Ahead>,
    ahead_bytes: u64,
}

#[derive(Debug)]
struct Ahead {
    bytes: u64,
    since: BootInstant,
}

impl Plan {
    /// A read has come; [`Self::end`] with the same chunks when it is answered.
    pub(super) fn begin(&mut self, inode: Inode, chunks: Range<u64>) {
        for index in chunks.clone() {
            *self.reading.entry((inode, index)).or_default() += 1;
        }
        let passed = chunks.start.saturating_sub(BEHIND_CHUNKS)..chunks.end;
        let passed: Vec<_> =
            self.ahead.range((inode, passed.start)..(inode, passed.end)).map(|(&(_, at), _)| at).collect();
        for index in passed {
            self.forget(inode, index);
        }
    }

    pub(super) fn end(&mut self, inode: Inode, chunks: Range<u64>) {
        for index in chunks {
            if let Some(count) = self.reading.get_mut(&(inode, index)) {
                *count -= 1;
                if *count == 0 {
                    self.reading.remove(&(inode, index));
                }
            }
        }
    }

    /// Somebody reads towards this chunk. Whether to push it; then it counts as ahead.
    pub(super) fn offer(
        &mut self,
        (inode, index): (Inode, u64),
        bytes: u64,
        room_bytes: u64,
        now: BootInstant,
    ) -> bool {
        if self.ahead.contains_key(&(inode, index)) || self.reading.contains_key(&(inode, index)) {
            return false;
        }
        let most = room_bytes.min(MAX_AHEAD_BYTES);
        if self.ahead_bytes + bytes > most {
            self.ahead.retain(|_, ahead| now.saturating_since(ahead.since) < FORGOTTEN_AFTER);
            self.ahead_bytes = self.ahead.values().map(|ahead| ahead.bytes).sum();
        }
        if self.ahead_bytes + bytes > most {
            return false;
        }
        self.ahead.insert((inode, index), Ahead { bytes, since: now });
        self.ahead_bytes += bytes;
        true
    }

    /// Right before it is pushed: nobody has come to it meanwhile.
    pub(super) fn is_due(&self, inode: Inode, index: u64) -> bool {
        self.ahead.contains_key(&(inode, index))
    }

    /// It is not ahead any more: passed, or not pushed after all.
    pub(super) fn forget(&mut self, inode: Inode, index: u64) {
        if let Some(ahead) = self.ahead.remove(&(inode, index)) {
            self.ahead_bytes -= ahead.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use limb_common::clock::boottime;
    use proptest::prelude::*;

    use super::*;

    const FILE: Inode = Inode(7);
    const MIB: u64 = 1 << 20;
    const ROOM: u64 = u64::MAX;

    #[test]
    fn what_a_read_touches_is_not_pushed_before_it_is_answered() {
        let (mut plan, now) = (Plan::default(), boottime());
        plan.begin(FILE, 3..5);
        plan.begin(FILE, 4..5);
        assert!(!plan.offer((FILE, 3), MIB, ROOM, now) && !plan.offer((FILE, 4), MIB, ROOM, now));
        assert!(plan.offer((FILE, 5), MIB, ROOM, now) && plan.offer((Inode(8), 4), MIB, ROOM, now));
        plan.end(FILE, 3..5);
        assert!(plan.offer((FILE, 3), MIB, ROOM, now) && !plan.offer((FILE, 4), MIB, ROOM, now));
        plan.end(FILE, 4..5);
        assert!(plan.offer((FILE, 4), MIB, ROOM, now) && plan.is_due(FILE, 4));
        plan.begin(FILE, 4..5);
        assert!(!plan.is_due(FILE, 4), "a reader has come before the push");
        plan.end(FILE, 4..5);
        assert!(!plan.is_due(FILE, 4), "and has its bytes by now");
        assert!(plan.reading.is_empty());
    }

    #[test]
    fn what_is_ahead_is_pushed_once_bounded_and_freed_by_who_passes() {
        let (mut plan, now) = (Plan::default(), boottime());
        let offer = |plan: &mut Plan, from: u64, now| {
            (from..from + 100).filter(|&index| plan.offer((FILE, index), MIB, ROOM, now)).count()
        };
        assert_eq!(offer(&mut plan, 0, now), 64);
        assert_eq!(offer(&mut plan, 0, now), 0);
        plan.begin(FILE, 9..10);
        assert_eq!(plan.ahead_bytes, 54 * MIB);
        assert_eq!(offer(&mut plan, 10, now), 10);
        assert!(!plan.offer((Inode(8), 0), MIB, ROOM, now), "the bound is the mount's");
        assert!(!plan.offer((Inode(8), 0), MIB, 10 * MIB, now));
        let later = now + FORGOTTEN_AFTER;
        assert!(plan.offer((Inode(8), 0), MIB, ROOM, later), "nobody has come for the rest");
        assert_eq!(plan.ahead_bytes, MIB);
    }

    proptest! {
        /// A push that reaches past the end would make the file longer.
        #[test]
        fn a_push_is_within_its_chunk_and_the_file_and_leaves_out_the_first_page(
            file_bytes in 0..5 * MIB, index in 0_u64..6, page_bytes in prop_oneof![Just(4096_u64), Just(65536)],
        ) {
            let chunk = index * MIB..file_bytes.min((index + 1) * MIB);
            match pushed_range(file_bytes, index, page_bytes) {
                Some(range) => {
                    prop_assert_eq!(range.start, chunk.start + page_bytes);
                    prop_assert_eq!(range.end, chunk.end);
                    prop_assert!(range.start < range.end);
                }
                None => prop_assert!(chunk.end <= chunk.start + page_bytes),
            }
        }

        #[test]
        fn bytes_add_up_and_stay_bounded(
            steps in proptest::collection::vec((0_u8..4, 0_u64..3, 0_u64..200, 1_u64..4), 1..300),
            room in 0..80 * MIB,
        ) {
            let (mut plan, now, mut under_way) = (Plan::default(), boottime(), Vec::new());
            for (step, file, index, count) in steps {
                match step {
                    0 => {
                        plan.begin(Inode(file), index..index + count);
                        under_way.push((Inode(file), index..index + count));
                    }
                    1 => {
                        if let Some((file, chunks)) = under_way.pop() {
                            plan.end(file, chunks);
                        }
                    }
                    2 => plan.forget(Inode(file), index),
                    _ => {
                        let read = under_way.iter().any(|(of, chunks)| of.0 == file && chunks.contains(&index));
                        let pushed = plan.offer((Inode(file), index), MIB, room, now);
                        prop_assert!(!(read && pushed));
                    }
                }
                prop_assert_eq!(plan.ahead.values().map(|ahead| ahead.bytes).sum::<u64>(), plan.ahead_bytes);
                prop_assert!(plan.ahead_bytes <= room.min(MAX_AHEAD_BYTES));
                prop_assert!(plan.ahead.keys().all(|chunk| !plan.reading.contains_key(chunk)));
            }
            for (file, chunks) in under_way {
                plan.end(file, chunks);
            }
            prop_assert!(plan.reading.is_empty());
        }
    }
}
