//! How fast bytes come from home and how far home is: enough to say how much must be asked for
//! ahead so that the link is never idle.
//!
//! Rate: as BBR samples it, bytes delivered by *all* fetches during one fetch's life, over that
//! life; the best sample of the last seconds. Delay: the fastest fetch of the last minute. Where
//! all fetches are large it contains their transfer, which errs towards asking for more.

use std::collections::VecDeque;
use std::time::Duration;

/// A link may change; older samples say nothing about now.
const RATE_MEMORY: Duration = Duration::from_secs(10);
const DELAY_MEMORY: Duration = Duration::from_secs(60);
/// Fewer answers than this say more about chance than about the link.
const ENOUGH_SAMPLES: u32 = 8;

#[derive(Debug, Default)]
pub(super) struct Meter {
    delivered_bytes: u64,
    samples: u32,
    /// Falling rates in order of time: the first is the best of the window.
    rates: VecDeque<(Duration, u64)>,
    delay: Option<(Duration, Duration)>,
}

/// When a fetch began.
#[derive(Clone, Copy, Debug)]
pub(super) struct Mark {
    at: Duration,
    delivered_bytes: u64,
}

impl Meter {
    pub(super) fn begin(&self, now: Duration) -> Mark {
        Mark { at: now, delivered_bytes: self.delivered_bytes }
    }

    pub(super) fn delivered(&mut self, mark: Mark, now: Duration, len: u64) {
        self.delivered_bytes += len;
        self.samples = self.samples.saturating_add(1);
        let took = now.saturating_sub(mark.at).max(Duration::from_micros(50));
        let rate = per_second(self.delivered_bytes - mark.delivered_bytes, took);
        while self.rates.back().is_some_and(|&(_, older)| older <= rate) {
            self.rates.pop_back();
        }
        self.rates.push_back((now, rate));
        while self.rates.front().is_some_and(|&(at, _)| now.saturating_sub(at) > RATE_MEMORY) {
            self.rates.pop_front();
        }
        let stale = |at: Duration| now.saturating_sub(at) > DELAY_MEMORY;
        if self.delay.is_none_or(|(at, least)| took < least || stale(at)) {
            self.delay = Some((now, took));
        }
    }

    /// Bandwidth × delay in bytes, once there is enough to tell.
    pub(super) fn bandwidth_delay_bytes(&self) -> Option<u64> {
        if self.samples < ENOUGH_SAMPLES {
            return None;
        }
        let (_, rate) = self.rates.front()?;
        let (_, delay) = self.delay?;
        let bytes = u128::from(*rate) * delay.as_micros() / 1_000_000;
        Some(u64::try_from(bytes).unwrap_or(u64::MAX))
    }
}

fn per_second(bytes: u64, took: Duration) -> u64 {
    u64::try_from(u128::from(bytes) * 1_000_000 / took.as_micros().max(1)).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// `parallel` fetches of 1 MiB at a time over a link of this rate and delay.
    fn run(rate: u64, delay: Duration, parallel: usize) -> Meter {
        let mut meter = Meter::default();
        let mut now = Duration::ZERO;
        for _ in 0..10 {
            let small = meter.begin(now);
            now += delay;
            meter.delivered(small, now, 1000);
        }
        let len = 1_u64 << 20;
        let transfer = Duration::from_micros(len * 1_000_000 / rate);
        let mut marks: VecDeque<_> = (0..parallel).map(|_| meter.begin(now)).collect();
        now += delay;
        for _ in 0..200 {
            now += transfer;
            let mark = marks.pop_front().unwrap();
            meter.delivered(mark, now, len);
            marks.push_back(meter.begin(now));
        }
        meter
    }

    #[test]
    fn a_full_link_gives_its_bandwidth_times_its_delay() {
        // 1 Gbit/s at 80 ms: 10 MB.
        let bdp = run(125_000_000, 80 * MS, 16).bandwidth_delay_bytes().unwrap();
        assert!((8_000_000..13_000_000).contains(&bdp), "{bdp}");
        // 30 Mbit/s at 20 ms: 75 kB.
        let bdp = run(3_750_000, 20 * MS, 4).bandwidth_delay_bytes().unwrap();
        assert!((60_000..110_000).contains(&bdp), "{bdp}");
    }

    #[test]
    fn nothing_is_said_before_there_is_something_to_say() {
        let mut meter = Meter::default();
        assert_eq!(meter.bandwidth_delay_bytes(), None);
        let mark = meter.begin(Duration::ZERO);
        meter.delivered(mark, 40 * MS, 1 << 20);
        assert_eq!(meter.bandwidth_delay_bytes(), None);
    }
}
