//! What a job touches first, and reading it ahead when the same job runs again over the same set.
//!
//! [`SetTrace`] stands in a read mount and is told of every read; [`replay()`] asks for the chunks
//! of a plan before the job does, as far ahead as the cache may hold.
//!
//! Never: hold up a FUSE thread; ask again for what the job has touched already; push out of the
//! cache what was read ahead and not used yet.

mod packing;
mod replay;

pub use replay::{Shares, replay};

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use limb_common::assignment::SetNumber;
use limb_common::chunk::chunk_len;
use limb_common::clock::{BootInstant, boottime};
use limb_common::manifest::{Inode, Manifest};
use limb_common::trace::{ChunkSet, MAX_TOUCHES, Touch};
use tokio::sync::Notify;

/// Touches of one allocation: none is ever copied to make room.
const SEGMENT: usize = 4096;
/// Chunks that somebody may be in the middle of: a few for each of many readers.
const RECENT: usize = 256;

/// Memory for the touches of all sets of a job: 12 bytes each.
#[derive(Debug)]
pub struct TouchBudget(AtomicUsize);

impl Default for TouchBudget {
    fn default() -> Self {
        Self(AtomicUsize::new(MAX_TOUCHES))
    }
}

impl TouchBudget {
    #[must_use]
    pub fn of(touches: usize) -> Self {
        Self(AtomicUsize::new(touches))
    }

    fn take(&self) -> bool {
        let less = |left: usize| left.checked_sub(1);
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }
}

/// First touches of one set, in order.
#[derive(Debug)]
pub struct SetTrace {
    set: SetNumber,
    manifest: Manifest,
    since: BootInstant,
    budget: Arc<TouchBudget>,
    state: Mutex<State>,
    /// Something that was read ahead has been used.
    used: Notify,
}

#[derive(Debug)]
struct State {
    seen: ChunkSet,
    segments: Vec<Vec<Touch>>,
    plan: Option<Plan>,
    /// Touched first just now.
    recent: VecDeque<u64>,
    figures: Figures,
}

#[derive(Debug)]
struct Plan {
    chunks: ChunkSet,
    asked: ChunkSet,
}

/// How a plan did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Figures {
    /// Of the plan.
    pub planned_chunks: u64,
    pub planned_bytes: u64,
    /// Asked for and not used yet.
    pub ahead_bytes: u64,
    /// First touches of the job.
    pub touches: u64,
    /// Of these, what was in memory by then.
    pub hits: u64,
    /// Of these, what had been asked for by the plan.
    pub foreseen: u64,
}

impl Figures {
    #[must_use]
    pub fn and(self, other: Self) -> Self {
        Self {
            planned_chunks: self.planned_chunks + other.planned_chunks,
            planned_bytes: self.planned_bytes + other.planned_bytes,
            ahead_bytes: self.ahead_bytes + other.ahead_bytes,
            touches: self.touches + other.touches,
            hits: self.hits + other.hits,
            foreseen: self.foreseen + other.foreseen,
        }
    }
}

impl SetTrace {
    #[must_use]
    pub fn new(set: SetNumber, manifest: Manifest, budget: Arc<TouchBudget>) -> Self {
        let seen = ChunkSet::of(&manifest);
        let state = State {
            seen,
            segments: Vec::new(),
            plan: None,
            recent: VecDeque::new(),
            figures: Figures::default(),
        };
        let (state, used) = (Mutex::new(state), Notify::new());
        Self { set, manifest, since: boottime(), budget, state, used }
    }

    #[must_use]
    pub fn set(&self) -> SetNumber {
        self.set
    }

    #[must_use]
    pub fn figures(&self) -> Figures {
        self.lock().figures
    }

    #[must_use]
    pub fn len(&self) -> usize {
        self.lock().segments.iter().map(Vec::len).sum()
    }

    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.lock().segments.is_empty()
    }

    /// Everything so far, in order.
    #[must_use]
    pub fn touches(&self) -> Vec<Touch> {
        self.lock().segments.concat()
    }

    /// The job reads this chunk, and it was in memory or was not. Where a part of it is all that is
    /// fetched (`whole` is false), it is not worth a place in a plan. Whether the plan has it: then
    /// all of it is wanted.
    pub fn touch(&self, inode: Inode, index: u64, hit: bool, whole: bool) -> bool {
        let Some(node) = self.manifest.node(inode) else { return false };
        let Some(number) = node.chunk_number(index) else { return false };
        let mut state = self.lock();
        let (planned, foreseen) = state
            .plan
            .as_ref()
            .map_or((false, false), |plan| (plan.chunks.contains(number), plan.asked.contains(number)));
        if !(whole || planned) || !state.seen.insert(number) {
            return planned;
        }
        if state.recent.len() >= RECENT {
            state.recent.pop_front();
        }
        state.recent.push_back(number);
        let figures = &mut state.figures;
        figures.touches += 1;
        figures.hits += u64::from(hit);
        if foreseen {
            figures.foreseen += 1;
            figures.ahead_bytes = figures.ahead_bytes.saturating_sub(u64::from(chunk_len(node.size, index)));
            self.used.notify_one();
        }
        let note = Touch::note_of(boottime().saturating_since(self.since), hit);
        if let Some(touch) = Touch::new(inode, index, note)
            && self.budget.take()
        {
            state.record(touch);
        }
        planned
    }

    /// Is whoever reads this chunk led by a plan? Then nobody needs to guess what is read next. Not
    /// where the job leaves the plan, and not where it comes back to what it touched before.
    pub(crate) fn leads(&self, inode: Inode, index: u64) -> bool {
        let number = self.manifest.node(inode).and_then(|node| node.chunk_number(index));
        let state = self.lock();
        let (Some(number), Some(plan)) = (number, &state.plan) else { return false };
        let Figures { touches, foreseen, .. } = state.figures;
        2 * foreseen >= touches && plan.chunks.contains(number) && state.recent.contains(&number)
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn record(&mut self, touch: Touch) {
        match self.segments.last_mut().filter(|last| last.len() < SEGMENT) {
            Some(last) => last.push(touch),
            None => {
                let mut segment = Vec::with_capacity(SEGMENT);
                segment.push(touch);
                self.segments.push(segment);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use limb_common::chunk::{CHUNK_BYTES_U64, ChunkId, Position, VerifiedChunk, value_of};
    use limb_common::manifest::{ManifestBuilder, NewNode, NodeMeta};

    use super::*;
    use crate::fetch::{ChunkAddress, ChunkSource, FetchError, FetchFuture, Priority};

    /// Has nothing and answers at once.
    struct Nothing;

    impl ChunkSource for Nothing {
        fn fetch(&self, _: ChunkAddress, _: ChunkId, _: Priority) -> FetchFuture {
            Box::pin(std::future::ready(Err(FetchError::NotFound)))
        }
        fn cached(&self, _: &ChunkId) -> Option<VerifiedChunk> {
            None
        }
    }

    #[tokio::test]
    async fn a_plan_leads_where_it_is_followed_and_not_where_the_job_comes_back() {
        let size = 1000 * CHUNK_BYTES_U64;
        let value = |index: u64| Some(value_of(Position::of(size, index), &index.to_le_bytes()));
        let mut builder = ManifestBuilder::new(NodeMeta::default());
        let node = NewNode::File { size, chunks: (0..1000).map(value).collect() };
        let root = builder.root();
        builder.add(root, b"a", node, NodeMeta::default()).unwrap();
        let trace = Arc::new(SetTrace::new(SetNumber(0), builder.build().0, Arc::default()));
        let file = Inode(2);
        assert!(!trace.touch(file, 999, false, true));
        assert!(!trace.leads(file, 999), "there is no plan");

        let plan = (0..600).map(|index| Touch::new(file, index, 0).unwrap()).collect();
        let replaying = replay(Arc::clone(&trace), plan, Arc::new(Nothing), Shares::default());
        tokio::time::timeout(Duration::from_secs(20), replaying).await.unwrap();
        for index in 0..500 {
            assert!(!trace.leads(file, index));
            assert!(trace.touch(file, index, false, false));
            assert!(trace.leads(file, index));
        }
        trace.touch(file, 3, false, true);
        assert!(!trace.leads(file, 3), "it was there before");
        trace.touch(file, 700, false, true);
        assert!(!trace.leads(file, 700), "not of the plan");
        for index in 601..999 {
            trace.touch(file, index, false, true);
        }
        trace.touch(file, 550, false, true);
        assert!(trace.leads(file, 550));
        assert_eq!(trace.figures().foreseen, 501);
    }
}
