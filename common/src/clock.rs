//! The one place that asks what time it is. Deadlines use [`boottime`], which neither stops in a
//! suspend nor jumps when the wall clock is set; people and ledgers get [`unix_ms`].

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// A point on CLOCK_BOOTTIME of this machine's current boot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BootInstant(Duration);

impl BootInstant {
    #[must_use]
    pub const fn from_duration(since_boot: Duration) -> Self {
        Self(since_boot)
    }

    #[must_use]
    pub const fn since_boot(self) -> Duration {
        self.0
    }

    #[must_use]
    pub fn saturating_since(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

impl std::ops::Add<Duration> for BootInstant {
    type Output = Self;
    fn add(self, by: Duration) -> Self {
        Self(self.0.saturating_add(by))
    }
}

/// A source of time: the machine's, or a test's.
pub trait Clock: Send + Sync + std::fmt::Debug {
    fn boottime(&self) -> BootInstant;
    /// Milliseconds since 1970, by the wall clock. Never for deadlines.
    fn unix_ms(&self) -> u64;
}

/// The machine's clocks.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn boottime(&self) -> BootInstant {
        BootInstant(read(ClockId::CLOCK_BOOTTIME))
    }

    fn unix_ms(&self) -> u64 {
        u64::try_from(read(ClockId::CLOCK_REALTIME).as_millis()).unwrap_or(u64::MAX)
    }
}

/// CLOCK_BOOTTIME now.
#[must_use]
pub fn boottime() -> BootInstant {
    SystemClock.boottime()
}

/// Milliseconds since 1970 now.
#[must_use]
pub fn unix_ms() -> u64 {
    SystemClock.unix_ms()
}

fn read(clock: ClockId) -> Duration {
    clock_gettime(clock).map_or(Duration::ZERO, Duration::from)
}
