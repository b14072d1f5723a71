//! Waiting for a condition, with a bound that says what did not come.

use std::time::Duration;

use limb_common::clock::boottime;

/// Long enough for the slowest machine that runs the suite; no test passes by waiting this long.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Looks until `condition` gives something.
///
/// # Panics
/// After [`PATIENCE`], naming what was waited for.
pub fn wait_for<T>(what: &str, condition: impl FnMut() -> Option<T>) -> T {
    wait_up_to(PATIENCE, what, condition)
}

/// [`wait_for`] with a bound of its own.
///
/// # Panics
/// After `bound`.
pub fn wait_up_to<T>(bound: Duration, what: &str, mut condition: impl FnMut() -> Option<T>) -> T {
    let end = boottime() + bound;
    loop {
        if let Some(value) = condition() {
            return value;
        }
        assert!(boottime() < end, "waited {bound:?} in vain for: {what}");
        std::thread::park_timeout(Duration::from_millis(20));
    }
}
