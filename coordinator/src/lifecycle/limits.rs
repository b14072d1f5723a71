//! When an attempt must be told to stop so that its ending still fits: pure arithmetic.

use std::time::Duration;

use limb_common::phase::StopCause;
use limb_common::units::Micros;

/// What the limits of one attempt follow from.
#[derive(Clone, Copy, Debug)]
pub struct Budget {
    pub max_duration: Duration,
    pub max_cost: Micros,
    /// By earlier attempts of the same run.
    pub spent: Micros,
    pub price_per_hour: Micros,
    pub stop_duration: Duration,
    pub destroy_allowance: Duration,
}

impl Budget {
    /// How long after the box began to exist the stop is due, and why.
    #[must_use]
    pub fn stop_after(&self) -> (Duration, StopCause) {
        match self.stop_after_for_cost() {
            Some(by_cost) if by_cost < self.max_duration => (by_cost, StopCause::MaxCost),
            Some(_) | None => (self.max_duration, StopCause::MaxDuration),
        }
    }

    /// `max_cost − price × (stop_duration + destroy allowance)`, as a time; `None`: free.
    fn stop_after_for_cost(&self) -> Option<Duration> {
        if self.price_per_hour == Micros(0) {
            return None;
        }
        let left = u128::from(self.max_cost.0.saturating_sub(self.spent.0));
        let affordable_ms = left * 3_600_000 / u128::from(self.price_per_hour.0);
        let affordable = Duration::from_millis(u64::try_from(affordable_ms).unwrap_or(u64::MAX));
        Some(affordable.saturating_sub(self.stop_duration + self.destroy_allowance))
    }

    /// Is there enough left for a box to do anything before it must stop?
    #[must_use]
    pub fn affords_a_box(&self) -> bool {
        self.stop_after_for_cost().is_none_or(|after| !after.is_zero())
    }

    /// The most that this attempt may cost.
    #[must_use]
    pub fn at_most(&self) -> Micros {
        let longest = self.max_duration + self.stop_duration + self.destroy_allowance;
        let left = Micros(self.max_cost.0.saturating_sub(self.spent.0));
        self.price_per_hour.per_hour_for(longest).min(left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Stopped when told, and ended within its allowance, no attempt costs more than is left.
        #[test]
        fn the_ending_fits_inside_the_cost(
            price in 0..200_000_000_u64, cost in 0..500_000_000_u64, spent in 0..100_000_000_u64,
            hours in 0..100_u64, stop_s in 0..3_600_u64, destroy_s in 0..600_u64,
        ) {
            let budget = Budget {
                max_duration: Duration::from_secs(hours * 3_600),
                max_cost: Micros(cost),
                spent: Micros(spent),
                price_per_hour: Micros(price),
                stop_duration: Duration::from_secs(stop_s),
                destroy_allowance: Duration::from_secs(destroy_s),
            };
            let (after, _) = budget.stop_after();
            let ending = budget.stop_duration + budget.destroy_allowance;
            if budget.affords_a_box() {
                let total = budget.price_per_hour.per_hour_for(after + ending);
                prop_assert!(total.0 <= cost.saturating_sub(spent) || price == 0);
            }
            prop_assert!(after <= budget.max_duration);
            prop_assert!(budget.at_most().0 <= cost.saturating_sub(spent));
        }
    }

    #[test]
    fn a_free_box_is_limited_by_time_alone() {
        let budget = Budget {
            max_duration: Duration::from_secs(60),
            max_cost: Micros(0),
            spent: Micros(0),
            price_per_hour: Micros(0),
            stop_duration: Duration::from_secs(300),
            destroy_allowance: Duration::from_secs(10),
        };
        assert_eq!(budget.stop_after(), (Duration::from_secs(60), StopCause::MaxDuration));
        assert!(budget.affords_a_box());
    }
}
