//! From the job's end to the box's: orders, a bounded drain, the data's outcome. The one path for
//! success, failure, stop, limit and loss.

use std::time::Duration;

use limb_common::assignment::Order;
use limb_common::phase::{DataOutcome, Event, JobOutcome, NO_LONGER_HOME, StopCause};

use super::saga::Next;
use super::{Finished, Lifecycle, LifecycleError};
use crate::ledger::{AttemptRow, RunRow};

/// Of `stop_duration`, the part that the job gets between SIGTERM and SIGKILL, at most.
const LONGEST_TERM: Duration = Duration::from_secs(60);

impl Lifecycle {
    pub(super) async fn watch_ending(
        &self,
        row: &RunRow,
        attempt: &AttemptRow,
    ) -> Result<Next, LifecycleError> {
        self.set_serving(attempt, &attempt.state);
        let now = self.now();
        if attempt.state.stop.is_none() {
            let cause = match row.stop.clone() {
                Some(cause) => Some(cause),
                None => self.due_limit(row, attempt).await?.ok(),
            };
            if let Some(cause) = cause {
                self.apply(attempt, Event::StopAsked { cause }).await?;
                return Ok(Next::Again);
            }
        }
        let drained = self.parts.ledger.drained(&attempt.run, attempt.number).await?;
        if drained.is_some() {
            return self.settle_data(attempt).await;
        }
        if self.lease_end(attempt).is_some_and(|lost_at| now >= lost_at) {
            self.lose(attempt, "no heartbeat for as long as its lease lasts", false).await?;
            return Ok(Next::Again);
        }
        let Some(cause) = &attempt.state.stop else {
            // The drain after a natural end may take as long as the limits allow.
            let limit = self.due_limit(row, attempt).await?.err();
            let lost_at = self.lease_end(attempt);
            return Ok([limit, lost_at].into_iter().flatten().min().map_or(Next::Wait, Next::WaitUntil));
        };
        let allowed = match cause {
            // Whoever holds a second key gets no time.
            StopCause::TokenReused => Duration::ZERO,
            StopCause::Owner { .. }
            | StopCause::MaxDuration
            | StopCause::MaxCost
            | StopCause::BootTimeout
            | StopCause::Shutdown => row.spec.stop_duration(),
        };
        let since = self.with_live(attempt, |live| *live.ending_since.get_or_insert(now)).unwrap_or(now);
        let deadline = since + allowed;
        if now >= deadline {
            return self.settle_data(attempt).await;
        }
        let grace = (allowed / 2).min(LONGEST_TERM);
        self.order(
            attempt,
            Order::Stop { reason: cause.to_string(), grace, drain: allowed.saturating_sub(grace) },
        );
        Ok(Next::WaitUntil(self.lease_end(attempt).map_or(deadline, |lost_at| lost_at.min(deadline))))
    }

    /// Nothing more is taken from the box. In `Ending` this is what starts the teardown; in
    /// `Destroying` it goes on beside it.
    pub(super) async fn settle_data(&self, attempt: &AttemptRow) -> Result<Next, LifecycleError> {
        if attempt.state.data.is_some() {
            self.revoke(attempt);
            return Ok(Next::Wait);
        }
        self.order(attempt, Order::Die { reason: "the attempt is over".to_owned() });
        self.revoke(attempt);
        let finished = self
            .parts
            .outputs
            .finish(&attempt.run, attempt.number)
            .await
            .map_err(|source| LifecycleError::Outputs { what: "finished", source })?;
        let drained = self.parts.ledger.drained(&attempt.run, attempt.number).await?;
        let outcome = outcome(attempt, finished, drained.as_ref());
        self.apply(attempt, Event::DataSettled { outcome }).await?;
        Ok(Next::Again)
    }
}

/// Home says what arrived, the box what did not; without its word nothing counts as complete.
fn outcome(attempt: &AttemptRow, finished: Finished, drained: Option<&serde_json::Value>) -> DataOutcome {
    let Finished { files, bytes, partial, gone } = finished;
    let nothing = files == 0 && partial.is_empty() && gone.is_empty();
    if let (Some(JobOutcome::NeverStarted { .. }), true) = (&attempt.state.job, nothing) {
        return DataOutcome::Nothing;
    }
    let complete = drained.is_some_and(|said| said["complete"] == true);
    let mut unsaved: Vec<String> = drained
        .and_then(|said| said["unsaved"].as_array())
        .into_iter()
        .flatten()
        .filter_map(|name| name.as_str().map(str::to_owned))
        .collect();
    if drained.is_none() {
        unsaved.push("(the box did not say what it still held)".to_owned());
    }
    let mut unsaved = each_once(unsaved, partial);
    unsaved.extend(no_longer_home(&gone, attempt.run.as_str()));
    if complete && unsaved.is_empty() {
        DataOutcome::Home { files, bytes }
    } else {
        DataOutcome::Incomplete { files, bytes, unsaved }
    }
}

/// Of files that went again, so many are named.
const GONE_SHOWN: usize = 20;

/// What arrived and is not there as it arrived: said, and what to do.
fn no_longer_home(gone: &[String], run: &str) -> Vec<String> {
    if gone.is_empty() {
        return Vec::new();
    }
    let (files, were) =
        if gone.len() == 1 { ("1 file", "it") } else { (&*format!("{} files", gone.len()), "they") };
    let said = format!(
        "{NO_LONGER_HOME}{files} missing or changed since {were} arrived; hint: `limb results verify {run}` names \
         all; put {were} back, or run again"
    );
    let named = gone.iter().take(GONE_SHOWN).map(|path| format!("{NO_LONGER_HOME}{path}"));
    std::iter::once(said).chain(named).collect()
}

/// What the box adds to the name of a file that home was told to keep.
const KEPT: &str = " (kept as .partial)";

/// The box names a cut-off file by its name in the output, home by where it lies now: home's word
/// is the one that helps, and one is enough.
fn each_once(said: Vec<String>, partial: Vec<String>) -> Vec<String> {
    let mut names: Vec<String> = Vec::new();
    for said in said {
        let name = said.strip_suffix(KEPT).unwrap_or(&said);
        let at_home = partial.iter().any(|kept| {
            original(kept).strip_suffix(name).is_some_and(|above| above.is_empty() || above.ends_with('/'))
        });
        let known = names.iter().any(|known| known.strip_suffix(KEPT).unwrap_or(known) == name);
        if !at_home && !known {
            names.push(said);
        }
    }
    names.extend(partial);
    names
}

/// `a/x.partial` and `a/x.partial.2` were to be `a/x`.
fn original(kept: &str) -> &str {
    let stem = match kept.rsplit_once('.') {
        Some((stem, turn)) if turn.bytes().all(|byte| byte.is_ascii_digit()) => stem,
        Some(_) | None => kept,
    };
    stem.strip_suffix(".partial").unwrap_or(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_was_cut_off_is_named_once() {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
        let said = names(&[
            "model.bin (kept as .partial)",
            "model.bin",
            "sub/x",
            "empty",
            "the last 3 bytes of the job's log",
        ]);
        let partial = names(&["/dest/model.bin.partial", "/dest/sub/x.partial.2"]);
        assert_eq!(
            each_once(said, partial),
            [
                "empty",
                "the last 3 bytes of the job's log",
                "/dest/model.bin.partial",
                "/dest/sub/x.partial.2"
            ]
        );
        // Another file whose name only ends alike is another file.
        let other = each_once(names(&["el.bin (kept as .partial)"]), names(&["/dest/model.bin.partial"]));
        assert_eq!(other.len(), 2, "{other:?}");
    }
}
