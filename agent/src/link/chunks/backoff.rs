//! Pauses between attempts: doubling, with jitter, so that what was cut together does not come
//! back together.

use std::time::Duration;

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(5);

#[derive(Debug)]
pub(super) struct Backoff(Duration);

impl Backoff {
    pub(super) fn new() -> Self {
        Self(FIRST)
    }

    pub(super) fn reset(&mut self) {
        self.0 = FIRST;
    }

    /// Between half of the current pause and all of it; the next is twice as long.
    pub(super) fn next_pause(&mut self) -> Duration {
        let pause = self.0;
        self.0 = (pause * 2).min(LONGEST);
        pause.mul_f64(rand::random_range(0.5..=1.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_to_a_limit_and_start_again() {
        let mut backoff = Backoff::new();
        assert!(backoff.next_pause() <= FIRST);
        let late = (0..20).map(|_| backoff.next_pause()).last().unwrap();
        assert!(late >= LONGEST / 2 && late <= LONGEST, "{late:?}");
        backoff.reset();
        assert!(backoff.next_pause() <= FIRST);
    }
}
