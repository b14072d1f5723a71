//! The cache as the job asked for it, on the box as it is: memory that is there, and a disk
//! behind it if the job named a size.
//!
//! Never: fail a job for want of a cache. Without a disk memory goes on, and home is told once.

use std::path::Path;
use std::sync::Arc;

use limb_common::assignment::CacheSpec;
use limb_common::error::chain;
use limb_common::report::BoxEvent;
use limb_common::units::show_bytes;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use super::place::notice;
use crate::fetch::{ChunkTransport, Fetcher, FetcherLimits, Spill, SpillEvent, SpillSettings, SpillStats};
use crate::leash::{Leash, Stage};
use crate::link::control::Reporter;
use crate::mount::read::PushStats;

/// The disk could not be used, or not any longer.
const NO_DISK: &str = "cache-disk-off";
/// What lay on it did not come back as it was.
const DAMAGED: &str = "cache-disk-damaged";
/// How the disk did, at the end.
const SUMMARY: &str = "cache";
/// What went into the kernel's page cache before anybody read it.
const PUSHED: &str = "pushed";

/// What a box's cache stands on.
pub(super) struct Ground<'a> {
    pub(super) private_dir: &'a Path,
    pub(super) reporter: &'a Reporter,
    pub(super) leash: &'a Leash,
    pub(super) stop: &'a CancellationToken,
}

/// Called within the runtime.
pub(super) fn fetcher(
    spec: &CacheSpec,
    transport: Arc<dyn ChunkTransport>,
    ground: &Ground<'_>,
) -> Arc<Fetcher> {
    let limits = FetcherLimits::on_this_machine(spec.memory_bytes);
    if limits.cache_bytes < spec.memory_bytes {
        let (have, asked) = (show_bytes(limits.cache_bytes), show_bytes(spec.memory_bytes));
        notice(
            ground.reporter,
            "cache-memory-low",
            format!("the cache has {have} of {asked}: half of what is free here"),
        );
    }
    let spill = (spec.disk_bytes > 0).then(|| spill(spec, limits.cache_bytes, ground)).flatten();
    Arc::new(Fetcher::spilling(transport, limits, spill, Handle::current(), ground.stop))
}

fn spill(spec: &CacheSpec, memory_bytes: u64, ground: &Ground<'_>) -> Option<Spill> {
    let reporter = ground.reporter.clone();
    let on_event = Box::new(move |event| match event {
        SpillEvent::Stopped { reason } => {
            notice(&reporter, NO_DISK, format!("the cache goes on in memory alone: {reason}"));
        }
        SpillEvent::Damaged { detail } => {
            let text = format!("the box's disk: {detail}; what it damages is fetched again");
            notice(&reporter, DAMAGED, text);
        }
    });
    let dir = spec.dir.clone().unwrap_or_else(|| ground.private_dir.to_owned());
    let disk_bytes = spec.disk_bytes;
    match Spill::open(SpillSettings { dir: dir.clone(), disk_bytes, memory_bytes, on_event }) {
        Ok(spill) => {
            ground.leash.register(Stage::DropKeys, "cache", spill.closer());
            tracing::info!(dir = %dir.display(), bytes = spill.disk_bytes(), "a cache on the disk, sealed");
            Some(spill)
        }
        Err(error) => {
            let why = chain(&error);
            notice(ground.reporter, NO_DISK, format!("the cache goes on in memory alone: {why}"));
            None
        }
    }
}

/// Says how the disk did, if there was one, and what was pushed, if anything was to be.
pub(super) async fn finish(fetcher: &Fetcher, pushed: Option<&PushStats>, reporter: &Reporter) {
    let texts = [(SUMMARY, words(fetcher.stats().spill)), (PUSHED, pushed.map(pushed_words))];
    for (kind, text) in texts {
        if let Some(text) = text {
            reporter.report(BoxEvent::Noticed { kind: kind.to_owned(), text }).await;
        }
    }
}

fn pushed_words(stats: &PushStats) -> String {
    let (bytes, chunks, dropped) = (show_bytes(stats.bytes()), stats.chunks(), stats.dropped());
    format!(
        "pushed into the page cache before it was read: {bytes} of {chunks} chunks, {dropped} not after all"
    )
}

fn words(stats: SpillStats) -> Option<String> {
    let SpillStats { spilled_bytes, hits, hit_bytes, dropped, refused, .. } = stats;
    (spilled_bytes > 0).then(|| {
        format!(
            "cache on the box's disk, sealed: {} written, {} read back ({hits} chunks); not written: \
             {dropped} chunks that came too fast, {refused} that were worth less than what was there",
            show_bytes(spilled_bytes),
            show_bytes(hit_bytes),
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_that_was_not_used_is_not_spoken_of() {
        assert_eq!(words(SpillStats { hits: 3, ..SpillStats::default() }), None);
        let stats =
            SpillStats { spilled_bytes: 3 << 20, hit_bytes: 1 << 20, hits: 1, ..SpillStats::default() };
        let text = words(stats).unwrap();
        assert!(text.contains("3.2 MB written, 1.1 MB read back (1 chunks)"), "{text}");
        let text = pushed_words(&PushStats::default());
        assert_eq!(text, "pushed into the page cache before it was read: 0 B of 0 chunks, 0 not after all");
    }
}
