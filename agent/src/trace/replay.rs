//! Asks for the chunks of a plan, in its order, before the job does.
//!
//! ```text
//!  plan ─▶ packs ─▶ asked ─▶ in memory ─▶ touched
//!                   └ 2 × BDP ┘           │
//!                   └── share of the cache┘
//! ```
//!
//! Both windows hold it back: what is on its way, so that whatever is more urgent finds room; and
//! what was asked for and not touched yet, so that nothing is pushed out before it was used. A plan
//! that the job does not follow therefore comes to rest by itself.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use limb_common::trace::{self, ChunkSet, Touch};
use tokio::sync::watch;

use super::packing::{Packing, Planned, Step};
use super::{Plan, SetTrace, State};
use crate::fetch::{ChunkAddress, ChunkSource, Priority};

const MIN_PIPE_BYTES: u64 = 2 << 20;
/// Half of what may be in flight besides demand: the read-ahead of streams needs the other half.
const MAX_PIPE_BYTES: u64 = 32 << 20;
/// Until the link has been measured.
const UNMEASURED_PIPE_BYTES: u64 = 16 << 20;
/// Of the cache's room, for what was read ahead and not touched yet. What comes may come in any
/// order and what came first goes first: with more than half, what is wanted last of the first
/// chunks could be pushed out before its turn.
const SHARE_PERCENT: u64 = 50;

/// The plans of one job divide the cache between them.
#[derive(Clone, Debug)]
pub struct Shares(Arc<watch::Sender<u64>>);

impl Default for Shares {
    fn default() -> Self {
        Self(Arc::new(watch::Sender::new(0)))
    }
}

impl Shares {
    fn join(&self) -> Member {
        self.0.send_modify(|members| *members += 1);
        Member { changes: self.0.subscribe(), all: self.clone() }
    }
}

struct Member {
    all: Shares,
    changes: watch::Receiver<u64>,
}

impl Member {
    fn of(&mut self, bytes: u64) -> u64 {
        bytes / (*self.changes.borrow_and_update()).max(1) * SHARE_PERCENT / 100
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.all.0.send_modify(|members| *members -= 1);
    }
}

/// Asks for all of a plan; ends when everything was asked for and has come. Nothing of it is
/// trusted: chunks that the set does not have are left out.
pub async fn replay(own: Arc<SetTrace>, plan: Vec<Touch>, source: Arc<dyn ChunkSource>, shares: Shares) {
    let plan = trace::of_set(&own.manifest, plan);
    if !own.begin(&plan) {
        return;
    }
    let mut share = shares.join();
    let mut packing = Packing::new(plan);
    let mut coming = FuturesUnordered::new();
    let on_its_way = AtomicU64::new(0);
    while let Some(step) =
        packing.next(&own.manifest, source.bandwidth_delay_bytes(), |number| own.is_untouched(number))
    {
        loop {
            let pipe = source
                .bandwidth_delay_bytes()
                .map_or(UNMEASURED_PIPE_BYTES, |bytes| (2 * bytes).clamp(MIN_PIPE_BYTES, MAX_PIPE_BYTES));
            let room = share.of(source.room_ahead_bytes());
            let flying = on_its_way.load(Ordering::Relaxed);
            let ahead = own.figures().ahead_bytes;
            let fits = |held: u64, most: u64| held == 0 || held + step.bytes <= most;
            if fits(flying, pipe) && fits(ahead, room) {
                break;
            }
            tokio::select! {
                Some(bytes) = coming.next(), if flying > 0 => {
                    on_its_way.fetch_sub(bytes, Ordering::Relaxed);
                }
                () = own.used.notified() => {}
                Ok(()) = share.changes.changed() => {}
            }
        }
        let Some(last) = own.ask(&step, source.as_ref()) else { continue };
        on_its_way.fetch_add(step.bytes, Ordering::Relaxed);
        let address = address(&own, &last);
        // Joins what was just asked for; a pack comes as one.
        let landing = source.fetch(address, last.id, Priority::Trace);
        coming.push(async move {
            // Whoever reads it is told.
            drop(landing.await);
            step.bytes
        });
    }
    while coming.next().await.is_some() {}
}

fn address(own: &SetTrace, planned: &Planned) -> ChunkAddress {
    ChunkAddress::Set { set: own.set, inode: planned.inode, index: planned.index }
}

impl SetTrace {
    /// Whether there is anything to do.
    fn begin(&self, plan: &[Touch]) -> bool {
        let bytes = plan.iter().filter_map(|touch| {
            let (node, _) = touch.find(&self.manifest)?;
            Some(u64::from(limb_common::chunk::chunk_len(node.size, touch.index())))
        });
        let planned_bytes = bytes.sum();
        let mut state = self.lock();
        state.figures.planned_chunks = plan.len() as u64;
        state.figures.planned_bytes = planned_bytes;
        let (mut chunks, asked) = (ChunkSet::of(&self.manifest), ChunkSet::of(&self.manifest));
        for (_, number) in plan.iter().filter_map(|touch| touch.find(&self.manifest)) {
            chunks.insert(number);
        }
        state.plan = Some(Plan { chunks, asked });
        !plan.is_empty()
    }

    fn is_untouched(&self, number: u64) -> bool {
        !self.lock().seen.contains(number)
    }

    /// Asks for what of a step was not touched meanwhile; gives the last chunk of it.
    fn ask(&self, step: &Step, source: &dyn ChunkSource) -> Option<Planned> {
        let left = self.left_of(step);
        if let [only] = left.as_slice() {
            source.prefetch(address(self, only), only.id, Priority::Trace);
        } else {
            let files: Vec<_> = left.iter().map(|planned| (planned.inode, planned.id)).collect();
            source.prefetch_pack(self.set, &files, Priority::Trace);
        }
        left.last().copied()
    }

    fn left_of(&self, step: &Step) -> Vec<Planned> {
        let mut state = self.lock();
        let State { seen, plan, figures, .. } = &mut *state;
        let left = |planned: &&Planned| {
            !seen.contains(planned.number)
                && plan.as_mut().is_some_and(|plan| plan.asked.insert(planned.number))
        };
        let left: Vec<_> = step.chunks.iter().filter(left).copied().collect();
        figures.ahead_bytes += left.iter().map(|planned| u64::from(planned.id.len)).sum::<u64>();
        left
    }
}
