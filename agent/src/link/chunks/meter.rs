//! How fast bytes come from home and how far home is: enough to say how much must be on its way
//! so that the link is never idle, and no more, so that demand finds no long queue before it.
//!
//! The rate is sampled as BBR does it: bytes that arrived during a few round trips in which there
//! was always something to wait for; the best sample of the last seconds stands. The delay is the
//! shortest round trip seen. Until the rate has stopped growing, more is asked for than measured.
//! (Cardwell et al., "BBR: Congestion-Based Congestion Control", ACM Queue 14-5, 2016.)

use std::collections::VecDeque;
use std::time::Duration;

/// A link may change; older samples say nothing about now.
const RATE_MEMORY: Duration = Duration::from_secs(10);
const DELAY_MEMORY: Duration = Duration::from_secs(300);
/// A sample covers three round trips and at least this: a machine that was busy takes what came
/// meanwhile in one burst, and that is not the link's rate.
const LEAST_SPAN: Duration = Duration::from_millis(250);
const MOST_SPAN: Duration = Duration::from_millis(600);
/// Marks closer together say nothing more.
const MARK_EVERY: Duration = Duration::from_millis(2);
/// Scheduling at both ends: without it a link of no delay would be given nothing.
const SLACK: Duration = Duration::from_millis(3);
const LEAST_WINDOW_BYTES: u64 = 128 << 10;
/// Home is on this machine or beside it.
const FAR: Duration = Duration::from_millis(1);
/// 2 Gbit/s: what two cores can compress.
const FAST_BYTES_PER_SECOND: u64 = 250_000_000;
/// 10 Gbit/s at 25 ms.
const MOST_WINDOW_BYTES: u64 = 64 << 20;
/// Before anything came: TCP begins with a fraction of it.
const FIRST_WINDOW_BYTES: u64 = 128 << 10;
/// Of one and a half round trips: TCP may send twice as much in each as in the one before.
const STARTUP_GAIN: u64 = 2;
/// A round trip is looked for in at least this time.
const LEAST_ROUND: Duration = Duration::from_millis(10);
/// 1 Gbit/s: what lanes are made for before the link is known.
const HOPED_BYTES_PER_SECOND: u64 = 125_000_000;
const LEAST_HOPED_BYTES: u64 = 8 << 20;
/// Round trips without growth by a quarter after which the rate is believed.
const FLAT_ROUNDS: u32 = 3;

#[derive(Debug, Default)]
pub(super) struct Meter {
    received_bytes: u64,
    /// (when, received until then), while something was always on its way.
    marks: VecDeque<(Duration, u64)>,
    /// Falling rates in order of time: the first is the best of the window.
    rates: VecDeque<(Duration, u64)>,
    round_trip: Option<(Duration, Duration)>,
    startup: Startup,
}

/// Has the rate stopped growing?
#[derive(Debug, Default)]
struct Startup {
    over: bool,
    best: u64,
    flat: u32,
    round_ends: Duration,
}

impl Meter {
    /// A round trip was seen: a connection was made, or a first piece came.
    pub(super) fn round_trip(&mut self, now: Duration, took: Duration) {
        let stale = |at: Duration| now.saturating_sub(at) > DELAY_MEMORY;
        if self.round_trip.is_none_or(|(at, least)| took < least || stale(at)) {
            self.round_trip = Some((now, took));
        }
    }

    /// A piece came. `owed` is what was asked for and has not come yet.
    pub(super) fn received(&mut self, now: Duration, len: u64, owed: u64) {
        self.received_bytes += len;
        if owed == 0 {
            self.marks.clear();
            return;
        }
        let span = (self.least_round_trip().unwrap_or_default() * 3).clamp(LEAST_SPAN, MOST_SPAN);
        while self.marks.get(1).is_some_and(|&(at, _)| now.saturating_sub(at) >= span) {
            self.marks.pop_front();
        }
        if let Some(&(at, before)) = self.marks.front()
            && now.saturating_sub(at) >= span
        {
            let rate = per_second(self.received_bytes - before, now.saturating_sub(at));
            // Where the reader is what limits, a lower sample says nothing about the link.
            let limited = owed * 2 >= self.window_bytes();
            self.sample(now, rate, limited, span);
        }
        if self.marks.back().is_none_or(|&(at, _)| now.saturating_sub(at) >= MARK_EVERY) {
            self.marks.push_back((now, self.received_bytes));
        }
    }

    fn sample(&mut self, now: Duration, rate: u64, limited: bool, span: Duration) {
        if !limited && self.rates.front().is_some_and(|&(_, best)| rate <= best) {
            return;
        }
        while self.rates.back().is_some_and(|&(_, older)| older <= rate) {
            self.rates.pop_back();
        }
        self.rates.push_back((now, rate));
        while self.rates.front().is_some_and(|&(at, _)| now.saturating_sub(at) > RATE_MEMORY) {
            self.rates.pop_front();
        }
        let startup = &mut self.startup;
        if !startup.over && limited && now >= startup.round_ends {
            startup.round_ends = now + span;
            let best = self.rates.front().map_or(rate, |&(_, best)| best);
            let grown = best > startup.best.saturating_add(startup.best / 4);
            startup.flat = if grown { 0 } else { startup.flat + 1 };
            startup.best = startup.best.max(best);
            startup.over = startup.flat >= FLAT_ROUNDS;
        }
    }

    /// For the log: bytes received, best rate, shortest round trip, window.
    pub(super) fn describe(&self) -> impl std::fmt::Debug + use<> {
        let rate = self.rates.front().map(|&(_, rate)| rate);
        (self.received_bytes, rate, self.least_round_trip(), self.window_bytes())
    }

    pub(super) fn least_round_trip(&self) -> Option<Duration> {
        self.round_trip.map(|(_, took)| took)
    }

    /// The link, and not the machines at its ends, is what bytes wait for.
    pub(super) fn is_scarce(&self) -> bool {
        let fast = self.rates.front().is_some_and(|&(_, rate)| rate >= FAST_BYTES_PER_SECOND);
        !fast && self.least_round_trip().is_some_and(|took| took >= FAR)
    }

    /// Bytes that fill the way home, once there is enough to tell.
    pub(super) fn bandwidth_delay_bytes(&self) -> Option<u64> {
        let (_, rate) = self.rates.front().filter(|_| self.startup.over)?;
        Some(over(*rate, self.least_round_trip()?))
    }

    /// How much should be on its way: twice what fills it, or, until that is known, what TCP may send
    /// next.
    pub(super) fn window_bytes(&self) -> u64 {
        let measured = match (self.rates.front(), self.round_trip) {
            (Some((_, rate)), Some((_, delay))) => {
                over(*rate, delay + SLACK).saturating_mul(2).clamp(LEAST_WINDOW_BYTES, MOST_WINDOW_BYTES)
            }
            _ => 0,
        };
        if self.startup.over { measured } else { measured.max(self.startup_window_bytes()) }
    }

    fn startup_window_bytes(&self) -> u64 {
        let round = (self.least_round_trip().unwrap_or_default() * 3 / 2).max(LEAST_ROUND);
        let last = self.marks.back().map_or(Duration::ZERO, |&(at, _)| at);
        let before = self.marks.iter().rev().take_while(|(at, _)| last.saturating_sub(*at) <= round).last();
        let arrived = before.map_or(0, |&(_, before)| self.received_bytes - before);
        (FIRST_WINDOW_BYTES + arrived.saturating_mul(STARTUP_GAIN)).min(MOST_WINDOW_BYTES)
    }

    /// What may be on its way at most as far as is known: as much as 1 Gbit/s needs, while nothing is.
    pub(super) fn hoped_bytes(&self) -> u64 {
        if self.startup.over {
            return self.window_bytes();
        }
        let round_trip = self.least_round_trip().unwrap_or_default();
        over(HOPED_BYTES_PER_SECOND, round_trip * 2).clamp(LEAST_HOPED_BYTES, 2 * LEAST_HOPED_BYTES)
    }

    /// The rate has stopped growing.
    pub(super) fn is_settled(&self) -> bool {
        self.startup.over
    }
}

/// How fast one lane is while it has something to send: bytes over busy time, both fading.
#[derive(Debug)]
pub(super) struct LaneRate {
    bytes: f64,
    busy_s: f64,
    since: Duration,
}

/// A lane is judged by its last round trips.
const LANE_MEMORY_S: f64 = 0.4;
/// Idle for longer, TCP begins anew (RFC 2861, on by default in Linux).
const LANE_FORGETS: Duration = Duration::from_millis(250);
/// What TCP sends in its first tenth of a second.
const NEW_LANE_BYTES: f64 = 400_000.0;
const NEW_LANE_S: f64 = 0.1;

impl LaneRate {
    pub(super) fn new(now: Duration) -> Self {
        Self { bytes: NEW_LANE_BYTES, busy_s: NEW_LANE_S, since: now }
    }

    /// It was idle until now.
    pub(super) fn begins(&mut self, now: Duration) {
        if self.silence(now) > LANE_FORGETS && self.bytes / self.busy_s > NEW_LANE_BYTES / NEW_LANE_S {
            *self = Self::new(now);
        }
        self.since = now;
    }

    pub(super) fn received(&mut self, now: Duration, len: u64) {
        let waited = now.saturating_sub(self.since).as_secs_f64();
        let fade = (-waited / LANE_MEMORY_S).exp();
        #[expect(clippy::cast_precision_loss, reason = "a piece is at most 256 KiB")]
        let len = len as f64;
        self.bytes = self.bytes * fade + len;
        self.busy_s = self.busy_s * fade + waited;
        self.since = now;
    }

    pub(super) fn silence(&self, now: Duration) -> Duration {
        now.saturating_sub(self.since)
    }

    /// Bytes in this time, if it were asked for something now.
    pub(super) fn bytes_after_idle(&self, now: Duration, time: Duration) -> u64 {
        let mut then = Self { ..*self };
        then.begins(now);
        then.bytes_in(time, Duration::ZERO)
    }

    /// Bytes in this time, after a silence that was none of the asker's.
    pub(super) fn bytes_in(&self, time: Duration, silence: Duration) -> u64 {
        let busy_s = (self.busy_s + silence.as_secs_f64()).max(1e-4);
        let bytes = self.bytes / busy_s * time.as_secs_f64();
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "neither negative nor huge"
        )]
        let bytes = bytes.min(1e12) as u64;
        bytes
    }
}

fn per_second(bytes: u64, took: Duration) -> u64 {
    u64::try_from(u128::from(bytes) * 1_000_000 / took.as_micros().max(1)).unwrap_or(u64::MAX)
}

fn over(rate: u64, time: Duration) -> u64 {
    u64::try_from(u128::from(rate) * time.as_micros() / 1_000_000).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);
    const PIECE: u64 = 256 << 10;

    /// Pieces over a link of this rate, `seconds` long, with always something behind them.
    fn flow(meter: &mut Meter, from: Duration, rate: u64, seconds: u64) -> Duration {
        let each = Duration::from_micros(PIECE * 1_000_000 / rate);
        let mut now = from;
        while now < from + Duration::from_secs(seconds) {
            now += each;
            meter.received(now, PIECE, 64 << 20);
        }
        now
    }

    fn near(found: u64, expected: u64) -> bool {
        found > expected - expected / 8 && found < expected + expected / 8
    }

    #[test]
    fn a_full_link_gives_its_bandwidth_times_its_delay() {
        for (rate, delay) in [(125_000_000, 80), (37_500_000, 80), (3_750_000, 30)] {
            let mut meter = Meter::default();
            meter.round_trip(Duration::ZERO, delay * MS);
            assert_eq!(meter.bandwidth_delay_bytes(), None);
            assert_eq!(meter.window_bytes(), FIRST_WINDOW_BYTES);
            flow(&mut meter, Duration::ZERO, rate, 5);
            let bdp = meter.bandwidth_delay_bytes().unwrap();
            assert!(near(bdp, rate * u64::from(delay) / 1000), "{rate} {delay}: {bdp}");
            let window = meter.window_bytes();
            assert!(near(window, rate * u64::from(delay + 3) / 500), "{rate} {delay}: {window}");
        }
    }

    #[test]
    fn a_near_or_fast_home_is_not_scarce() {
        let mut meter = Meter::default();
        assert!(!meter.is_scarce(), "nothing is known");
        meter.round_trip(Duration::ZERO, 40 * MS);
        assert!(meter.is_scarce());
        let now = flow(&mut meter, Duration::ZERO, 125_000_000, 3);
        assert!(meter.is_scarce());
        let now = flow(&mut meter, now, 1_000_000_000, 1);
        assert!(!meter.is_scarce());
        flow(&mut meter, now, 125_000_000, 12);
        assert!(meter.is_scarce());
        meter.round_trip(Duration::from_secs(20), MS / 10);
        assert!(!meter.is_scarce());
    }

    #[test]
    fn a_link_that_slows_down_is_noticed_and_a_slow_reader_is_not_a_slow_link() {
        let mut meter = Meter::default();
        meter.round_trip(Duration::ZERO, 40 * MS);
        let mut now = flow(&mut meter, Duration::ZERO, 125_000_000, 3);
        let before = meter.window_bytes();
        // A reader that takes a piece each 100 ms.
        for _ in 0..300 {
            now += 100 * MS;
            meter.received(now, PIECE, PIECE);
        }
        assert_eq!(meter.window_bytes(), before);
        flow(&mut meter, now, 12_500_000, 15);
        assert!(near(meter.window_bytes(), 12_500_000 * 43 / 500), "{}", meter.window_bytes());
    }

    #[test]
    fn slow_start_is_not_taken_for_the_link() {
        let mut meter = Meter::default();
        meter.round_trip(Duration::ZERO, 40 * MS);
        let mut now = Duration::ZERO;
        // What TCP sends in its first round trips.
        for round in 0..8_u32 {
            let bytes = 30_000_u64 << round;
            for _ in 0..8 {
                now += 5 * MS;
                meter.received(now, bytes / 8, 4 << 20);
                assert!(meter.window_bytes() >= FIRST_WINDOW_BYTES);
            }
            assert!(meter.window_bytes() >= 2 * bytes, "TCP would send {} next", 2 * bytes);
        }
        assert_eq!(meter.bandwidth_delay_bytes(), None);
    }

    /// A reader who comes meanwhile would stand behind all of it.
    #[test]
    fn a_slow_link_that_is_not_known_yet_is_not_flooded() {
        let mut meter = Meter::default();
        meter.round_trip(Duration::ZERO, 30 * MS);
        let mut now = Duration::ZERO;
        while !meter.is_settled() {
            now += 8 * MS;
            meter.received(now, 30_000, 16 << 20);
            assert!(meter.window_bytes() <= 512 << 10, "{}", meter.window_bytes());
        }
        assert!(now < Duration::from_secs(3));
    }

    #[test]
    fn a_lane_is_as_fast_as_its_last_round_trips_and_its_silence_counts() {
        let second = Duration::from_secs(1);
        let mut lane = LaneRate::new(Duration::ZERO);
        assert!(near(lane.bytes_in(second, Duration::ZERO), 4_000_000));
        let mut now = Duration::ZERO;
        for _ in 0..200 {
            now += 10 * MS;
            lane.received(now, PIECE);
        }
        assert!(near(lane.bytes_in(second, Duration::ZERO), 100 * PIECE));
        for _ in 0..20 {
            now += 100 * MS;
            lane.received(now, PIECE);
        }
        assert!(near(lane.bytes_in(second, Duration::ZERO), 10 * PIECE));
        assert!(lane.bytes_in(second, lane.silence(now + second)) < 5 * PIECE);
        for _ in 0..200 {
            now += 10 * MS;
            lane.received(now, PIECE);
        }
        lane.begins(now + 100 * MS);
        assert!(near(lane.bytes_in(second, Duration::ZERO), 100 * PIECE));
        // Idle for long, it begins anew.
        lane.begins(now + second);
        assert!(near(lane.bytes_in(second, Duration::ZERO), 4_000_000));
    }

    #[test]
    fn the_shortest_round_trip_stands_for_minutes() {
        let mut meter = Meter::default();
        meter.round_trip(Duration::ZERO, 40 * MS);
        meter.round_trip(Duration::from_secs(200), 900 * MS);
        assert_eq!(meter.least_round_trip(), Some(40 * MS));
        meter.round_trip(Duration::from_secs(400), 90 * MS);
        assert_eq!(meter.least_round_trip(), Some(90 * MS));
    }
}
