//! The access traces of one job: what is read ahead by the plan of earlier runs, and what goes home
//! for the next one. Once a minute also, so that a box that is lost leaves a trace too.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use limb_common::assignment::SetNumber;
use limb_common::manifest::Manifest;
use limb_common::report::BoxEvent;
use limb_common::task::{self, Task};
use limb_common::units::show_bytes;

use crate::fetch::ChunkSource;
use crate::link::channels::Channels;
use crate::link::control::Reporter;
use crate::link::traces::{self, Outgoing};
use crate::trace::{Figures, SetTrace, Shares, TouchBudget, replay};

const SEND_EVERY: Duration = Duration::from_secs(60);

/// The event's kind.
const KIND: &str = "trace";

/// Everything that is traced.
pub(super) struct Traces {
    channels: Arc<dyn Channels>,
    source: Arc<dyn ChunkSource>,
    budget: Arc<TouchBudget>,
    shares: Shares,
    outgoing: Arc<Outgoing>,
    _sending: Task<()>,
    readings: Mutex<Vec<Task<()>>>,
}

impl std::fmt::Debug for Traces {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Traces").finish_non_exhaustive()
    }
}

impl Traces {
    pub(super) fn start(channels: Arc<dyn Channels>, source: Arc<dyn ChunkSource>) -> Self {
        let outgoing: Arc<Outgoing> = Arc::default();
        let sending = task::spawn("traces", {
            let (outgoing, channels) = (Arc::clone(&outgoing), Arc::clone(&channels));
            async move { outgoing.keep_sending(channels.as_ref(), SEND_EVERY).await }
        });
        let (budget, shares, readings) = (Arc::default(), Shares::default(), Mutex::default());
        Self { channels, source, budget, shares, outgoing, _sending: sending, readings }
    }

    /// The trace of a set that is being mounted. What earlier runs touched of it is asked for and
    /// read ahead from here on.
    pub(super) fn begin(&self, set: SetNumber, manifest: &Manifest) -> Arc<SetTrace> {
        let trace = Arc::new(SetTrace::new(set, manifest.clone(), Arc::clone(&self.budget)));
        let reading_ahead = task::spawn("read ahead by trace", {
            let (trace, source) = (Arc::clone(&trace), Arc::clone(&self.source));
            let (channels, shares) = (Arc::clone(&self.channels), self.shares.clone());
            async move {
                let plan = traces::plan(channels.as_ref(), set).await;
                replay(trace, plan, source, shares).await;
            }
        });
        self.readings.lock().unwrap_or_else(PoisonError::into_inner).push(reading_ahead);
        self.outgoing.add(Arc::clone(&trace));
        trace
    }

    /// Says how the plan did, where there was one, and sends home what was touched.
    pub(super) async fn finish(&self, reporter: &Reporter, bound: Duration) {
        let all = self.outgoing.traces().into_iter().map(|trace| trace.figures());
        if let Some(text) = words(all.fold(Figures::default(), Figures::and)) {
            reporter.report(BoxEvent::Noticed { kind: KIND.to_owned(), text }).await;
        }
        if tokio::time::timeout(bound, self.outgoing.send_all(self.channels.as_ref())).await.is_err() {
            tracing::info!("the access trace did not get home in time");
        }
    }
}

fn words(figures: Figures) -> Option<String> {
    let Figures { planned_chunks, planned_bytes, touches, hits, foreseen, .. } = figures;
    let percent = |part: u64| part * 100 / touches.max(1);
    (planned_chunks > 0).then(|| {
        format!(
            "read ahead by trace: {planned_chunks} chunks, {} planned; of {touches} first reads {} % were \
             planned, hit rate {} %",
            show_bytes(planned_bytes),
            percent(foreseen),
            percent(hits)
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_without_a_plan_says_nothing() {
        let figures = Figures { touches: 7, hits: 3, ..Figures::default() };
        assert_eq!(words(figures), None);
        let text =
            words(Figures { planned_chunks: 9, planned_bytes: 9 << 20, foreseen: 6, ..figures }).unwrap();
        assert!(text.starts_with("read ahead by trace: 9 chunks, ") && text.contains("85 %"), "{text}");
        assert!(text.ends_with("hit rate 42 %"), "{text}");
    }
}
