//! The right of a box to act, as arithmetic. Home grants, the box obeys; neither knows how long
//! a message was under way, so each counts from the end that is safe for it:
//!
//! ```text
//!   box    sent ───────────────── + TTL ─▶ dead
//!   home         answered ─────── + TTL ──── + margin ─▶ lost
//! ```
//!
//! A renewal is answered after it was sent, so box-dead comes before home-lost whatever the delay.
//!
//! Invariant: a lease that is over stays over. Never: a wall clock in a deadline, except to carry
//! home's horizon over a reboot of home.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock::BootInstant;

/// How often a box renews, unless its TTL is so short that a quarter of it is less.
pub const BEAT_INTERVAL: Duration = Duration::from_secs(5);

/// HTTP/2 ping and its timeout: a dead connection is found after the sum of both.
pub const PING_INTERVAL: Duration = Duration::from_secs(5);
/// See [`PING_INTERVAL`].
pub const PING_TIMEOUT: Duration = Duration::from_secs(5);

/// The default TTL: a job runs on through a router's reboot.
pub const DEFAULT_TTL: Duration = Duration::from_secs(20 * 60);

// A connection found dead must leave time to renew on the next one.
const _: () = assert!(PING_INTERVAL.as_secs() + PING_TIMEOUT.as_secs() < DEFAULT_TTL.as_secs() / 2);

/// The lease is over, for ever.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the lease is over")]
pub struct LeaseOver;

/// How long a box with this TTL waits between two beats.
#[must_use]
pub fn beat_interval(ttl: Duration) -> Duration {
    BEAT_INTERVAL.min(ttl / 4).max(Duration::from_millis(50))
}

/// What home adds before it calls a box lost: 1000 ppm of clock drift (a bad crystal has 100), the
/// leash's 100 ms tick and 2 s for the destruction itself, rounded up.
#[must_use]
pub fn margin(ttl: Duration) -> Duration {
    Duration::from_secs(3) + ttl / 1000
}

/// The box's side. All times are this boot's CLOCK_BOOTTIME.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BoxLease {
    deadline: BootInstant,
}

impl BoxLease {
    /// A grant that the box asked for at `sent`.
    #[must_use]
    pub fn granted(sent: BootInstant, ttl: Duration) -> Self {
        Self { deadline: sent + ttl }
    }

    #[must_use]
    pub fn deadline(self) -> BootInstant {
        self.deadline
    }

    #[must_use]
    pub fn is_over(self, now: BootInstant) -> bool {
        now >= self.deadline
    }

    #[must_use]
    pub fn remaining(self, now: BootInstant) -> Duration {
        self.deadline.saturating_since(now)
    }

    /// Home answered a beat that was sent at `sent`; the answer is looked at `now`. An answer
    /// that comes late never shortens what a later beat has won already.
    ///
    /// # Errors
    /// [`LeaseOver`] when the deadline passed before the answer was looked at.
    pub fn renew(self, sent: BootInstant, now: BootInstant, ttl: Duration) -> Result<Self, LeaseOver> {
        if self.is_over(now) {
            return Err(LeaseOver);
        }
        Ok(Self { deadline: self.deadline.max(sent + ttl) })
    }
}

/// Home's side. Times are home's CLOCK_BOOTTIME.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HomeLease {
    ttl: Duration,
    /// The latest time at which a box that was answered may still act, with the margin.
    lost_at: BootInstant,
    /// Up to where grants are covered by what is on disk.
    persisted_until: Option<BootInstant>,
}

impl HomeLease {
    /// The first grant, answered `now`. It must be persisted ([`Self::due_horizon`]) before it is
    /// told to the box.
    #[must_use]
    pub fn granted(now: BootInstant, ttl: Duration) -> Self {
        Self { ttl, lost_at: now + ttl + margin(ttl), persisted_until: None }
    }

    #[must_use]
    pub fn ttl(self) -> Duration {
        self.ttl
    }

    /// From then on no box of this lease acts any more.
    #[must_use]
    pub fn lost_at(self) -> BootInstant {
        self.lost_at
    }

    #[must_use]
    pub fn is_lost(self, now: BootInstant) -> bool {
        now >= self.lost_at
    }

    /// A beat came in and is answered `now`. `remaining` is the box's own view when it sent it.
    ///
    /// # Errors
    /// [`LeaseOver`] when either side says that the lease is over.
    pub fn renew(self, now: BootInstant, remaining: Duration) -> Result<Self, LeaseOver> {
        if remaining.is_zero() || self.is_lost(now) {
            return Err(LeaseOver);
        }
        let lost_at = self.lost_at.max(now + self.ttl + margin(self.ttl));
        Ok(Self { lost_at, ..self })
    }

    /// The horizon that must be on disk before the newest grant leaves home; `None` when what is
    /// there covers it. It reaches TTL/4 further than needed, so that the disk is asked every
    /// TTL/4 and not at every beat.
    #[must_use]
    pub fn due_horizon(self) -> Option<BootInstant> {
        match self.persisted_until {
            Some(until) if until >= self.lost_at => None,
            Some(_) | None => Some(self.lost_at + self.ttl / 4),
        }
    }

    /// `horizon` is on disk.
    #[must_use]
    pub fn persisted(self, horizon: BootInstant) -> Self {
        Self { persisted_until: Some(horizon), ..self }
    }

    /// After a restart of home: the lease as the disk knows it. It may look alive for up to TTL/4
    /// longer than it was; the box's own `remaining` refuses what is over there.
    #[must_use]
    pub fn restored(ttl: Duration, horizon: BootInstant) -> Self {
        Self { ttl, lost_at: horizon, persisted_until: Some(horizon) }
    }
}

/// A grant horizon as it stands in the database. CLOCK_BOOTTIME means nothing after a reboot of
/// home, so the wall clock's view is kept beside it and used only then.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StoredHorizon {
    pub boot_id: String,
    pub boottime_ms: u64,
    pub unix_ms: u64,
}

impl StoredHorizon {
    #[must_use]
    pub fn new(horizon: BootInstant, now: BootInstant, unix_ms_now: u64, boot_id: &str) -> Self {
        let ahead_ms = millis(horizon.saturating_since(now));
        Self {
            boot_id: boot_id.to_owned(),
            boottime_ms: millis(horizon.since_boot()),
            unix_ms: unix_ms_now.saturating_add(ahead_ms),
        }
    }

    /// The horizon on this boot's clock.
    #[must_use]
    pub fn on(&self, now: BootInstant, unix_ms_now: u64, boot_id: &str) -> BootInstant {
        if self.boot_id == boot_id {
            BootInstant::from_duration(Duration::from_millis(self.boottime_ms))
        } else {
            now + Duration::from_millis(self.unix_ms.saturating_sub(unix_ms_now))
        }
    }
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(ms: u64) -> BootInstant {
        BootInstant::from_duration(Duration::from_millis(ms))
    }

    proptest! {
        /// Beats with any delay each way, lost answers, answers out of order: as long as home has
        /// answered a beat, the box is dead before home calls it lost.
        #[test]
        fn the_box_is_dead_before_home_calls_it_lost(
            ttl_ms in 100u64..2_000_000,
            beats in prop::collection::vec((0u64..30_000, 0u64..3_000_000, 0u64..3_000_000, any::<bool>()), 1..60),
        ) {
            let ttl = Duration::from_millis(ttl_ms);
            let mut box_side = BoxLease::granted(at(0), ttl);
            let mut home_side = HomeLease::granted(at(0), ttl);
            let mut sent = 0;
            let mut home_now = 0;
            let mut box_now = 0;
            for (gap, out, back, answer_arrives) in beats {
                sent += gap;
                box_now = box_now.max(sent);
                let remaining = box_side.remaining(at(sent));
                home_now = home_now.max(sent + out);
                if let Ok(renewed) = home_side.renew(at(home_now), remaining) {
                    home_side = renewed;
                    if answer_arrives {
                        box_now = box_now.max(home_now + back);
                        if let Ok(renewed) = box_side.renew(at(sent), at(box_now), ttl) {
                            box_side = renewed;
                        }
                    }
                }
                prop_assert!(box_side.deadline() + Duration::from_secs(2) < home_side.lost_at());
            }
        }

        #[test]
        fn what_is_over_stays_over(ttl_ms in 1u64..1_000_000, late in 0u64..1_000_000, remaining in 0u64..1000) {
            let ttl = Duration::from_millis(ttl_ms);
            let box_side = BoxLease::granted(at(0), ttl);
            prop_assert_eq!(box_side.renew(at(ttl_ms / 2), at(ttl_ms + late), ttl), Err(LeaseOver));
            let home_side = HomeLease::granted(at(0), ttl);
            let lost = home_side.lost_at() + Duration::from_millis(late);
            prop_assert_eq!(home_side.renew(lost, Duration::from_millis(remaining)), Err(LeaseOver));
            prop_assert_eq!(home_side.renew(at(0), Duration::ZERO), Err(LeaseOver));
        }

        /// Home may restart after any beat: what it then believes covers every grant it made, and
        /// it writes at most once per TTL/4.
        #[test]
        fn the_persisted_horizon_covers_every_grant(
            ttl_ms in 400u64..2_000_000, gaps in prop::collection::vec(1u64..20_000, 1..100),
        ) {
            let ttl = Duration::from_millis(ttl_ms);
            let mut lease = HomeLease::granted(at(0), ttl);
            let mut now = 0;
            let mut on_disk = at(0);
            let mut last_write = None;
            for gap in gaps {
                if let Some(due) = lease.due_horizon() {
                    if let Some(last) = last_write {
                        prop_assert!(at(now).saturating_since(last) >= ttl / 4);
                    }
                    last_write = Some(at(now));
                    on_disk = due;
                    lease = lease.persisted(due);
                }
                prop_assert!(HomeLease::restored(ttl, on_disk).lost_at() >= lease.lost_at());
                now += gap;
                match lease.renew(at(now), Duration::from_millis(1)) {
                    Ok(renewed) => lease = renewed,
                    Err(LeaseOver) => break,
                }
            }
        }

        #[test]
        fn a_horizon_survives_restarts_and_reboots(
            boot_now in 0u64..1_000_000, ahead in 0u64..1_000_000, passed in 0u64..2_000_000,
        ) {
            let horizon = at(boot_now + ahead);
            let stored = StoredHorizon::new(horizon, at(boot_now), 5_000_000, "a");
            prop_assert_eq!(stored.on(at(boot_now + passed), 0, "a"), horizon);
            let after_reboot = stored.on(at(7), 5_000_000 + passed, "b");
            prop_assert_eq!(after_reboot, at(7 + ahead.saturating_sub(passed)));
        }
    }
}
