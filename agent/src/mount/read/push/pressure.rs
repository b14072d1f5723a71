//! Does this machine lack memory? Then nothing is put into it that nobody has asked for.

use std::path::PathBuf;
use std::time::Duration;

use limb_common::clock::BootInstant;

/// Of the last ten seconds, how many some program waited for memory, in percent.
const MOST_PERCENT: f64 = 10.0;
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// `some avg10` of a file below /proc/pressure.
fn some_avg10(text: &str) -> Option<f64> {
    let line = text.lines().find_map(|line| line.strip_prefix("some "))?;
    line.split(' ').find_map(|word| word.strip_prefix("avg10="))?.parse().ok()
}

#[derive(Debug)]
pub(super) struct Pressure {
    file: PathBuf,
    looked: Option<BootInstant>,
    is_high: bool,
}

impl Default for Pressure {
    fn default() -> Self {
        Self { file: "/proc/pressure/memory".into(), looked: None, is_high: false }
    }
}

impl Pressure {
    /// As of a second ago at most. A kernel that does not count says no.
    pub(super) fn is_high(&mut self, now: BootInstant) -> bool {
        if self.looked.is_none_or(|looked| now.saturating_since(looked) >= LOOK_EVERY) {
            self.looked = Some(now);
            let text = std::fs::read_to_string(&self.file).ok();
            self.is_high = text.and_then(|text| some_avg10(&text)).is_some_and(|some| some > MOST_PERCENT);
        }
        self.is_high
    }
}

#[cfg(test)]
mod tests {
    use limb_common::clock::boottime;

    use super::*;

    #[test]
    fn pressure_is_read_as_the_kernel_writes_it_and_once_a_second() {
        let text = |some: &str| {
            format!(
                "some avg10={some} avg60=0.00 avg300=0.10 total=35\nfull avg10=99.00 avg60=0.00 avg300=0.0 total=1\n"
            )
        };
        assert_eq!(some_avg10(&text("10.50")), Some(10.5));
        assert_eq!(some_avg10(""), None);
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("memory");
        let mut pressure = Pressure { file: file.clone(), ..Pressure::default() };
        let now = boottime();
        assert!(!pressure.is_high(now), "there is no such file");
        std::fs::write(&file, text("10.01")).unwrap();
        assert!(!pressure.is_high(now + LOOK_EVERY / 2), "it was looked at just now");
        assert!(pressure.is_high(now + LOOK_EVERY));
        std::fs::write(&file, text("10.00")).unwrap();
        assert!(!pressure.is_high(now + 2 * LOOK_EVERY));
    }
}
