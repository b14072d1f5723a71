//! Money, sizes and durations as people write and read them.

use std::fmt;
use std::time::Duration;

/// Integer micro-dollars: sums are exact and a price of $0.000001 can be said.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Micros(pub u64);

impl Micros {
    /// The price of a duration at `self` per hour, rounded up to a micro-dollar.
    #[must_use]
    pub fn per_hour_for(self, duration: Duration) -> Self {
        let exact = u128::from(self.0) * duration.as_millis();
        Self(u64::try_from(exact.div_ceil(3_600_000)).unwrap_or(u64::MAX))
    }
}

/// Dollars and cents, rounded up so that a cost is never understated.
impl fmt::Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cents = self.0.div_ceil(10_000);
        write!(f, "${}.{:02}", cents / 100, cents % 100)
    }
}

/// A text is not a duration, size or sum of money.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{text:?} is not a {kind}; hint: write it like {example}")]
pub struct InvalidUnit {
    kind: &'static str,
    text: String,
    example: &'static str,
}

/// Reads `90s`, `2m`, `6h`, `1d`, `1h30m`. A bare number is refused: its unit would be a guess.
///
/// # Errors
/// [`InvalidUnit`] with an example.
pub fn parse_duration(text: &str) -> Result<Duration, InvalidUnit> {
    let invalid = || InvalidUnit { kind: "duration", text: text.to_owned(), example: "90s, 2m, 6h or 1h30m" };
    let mut total = Duration::ZERO;
    let mut rest = text.trim();
    if rest.is_empty() {
        return Err(invalid());
    }
    while !rest.is_empty() {
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        let number: u64 = rest[..digits].parse().map_err(|_| invalid())?;
        let letters = rest[digits..].bytes().take_while(u8::is_ascii_alphabetic).count();
        let unit_ms = match &rest[digits..digits + letters] {
            "ms" => 1,
            "s" => 1_000,
            "m" => 60_000,
            "h" => 3_600_000,
            "d" => 86_400_000,
            _ => return Err(invalid()),
        };
        let part = number.checked_mul(unit_ms).ok_or_else(invalid)?;
        total = total.checked_add(Duration::from_millis(part)).ok_or_else(invalid)?;
        rest = &rest[digits + letters..];
    }
    Ok(total)
}

/// Reads `64GB` (10^9), `64GiB` (2^30), `512`. Bytes.
///
/// # Errors
/// [`InvalidUnit`] with an example.
pub fn parse_size(text: &str) -> Result<u64, InvalidUnit> {
    let invalid = || InvalidUnit { kind: "size", text: text.to_owned(), example: "512MB, 64GB or 1GiB" };
    let text = text.trim();
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    let number: u64 = text[..digits].parse().map_err(|_| invalid())?;
    let unit: u64 = match text[digits..].trim() {
        "" | "B" => 1,
        "kB" | "KB" | "K" => 1_000,
        "MB" | "M" => 1_000_000,
        "GB" | "G" => 1_000_000_000,
        "TB" | "T" => 1_000_000_000_000,
        "KiB" | "Ki" => 1 << 10,
        "MiB" | "Mi" => 1 << 20,
        "GiB" | "Gi" => 1 << 30,
        "TiB" | "Ti" => 1 << 40,
        _ => return Err(invalid()),
    };
    number.checked_mul(unit).ok_or_else(invalid)
}

/// Reads `25`, `25.00`, `$0.5`: dollars.
///
/// # Errors
/// [`InvalidUnit`] with an example.
pub fn parse_money(text: &str) -> Result<Micros, InvalidUnit> {
    let invalid = || InvalidUnit { kind: "sum of money", text: text.to_owned(), example: "25.00 (dollars)" };
    let text = text.trim().trim_start_matches('$');
    let (whole, fraction) = text.split_once('.').unwrap_or((text, ""));
    let all_digits = |part: &str| part.bytes().all(|b| b.is_ascii_digit());
    if whole.is_empty() || !all_digits(whole) || !all_digits(fraction) || fraction.len() > 6 {
        return Err(invalid());
    }
    let whole: u64 = whole.parse().map_err(|_| invalid())?;
    let fraction: u64 = format!("{fraction:0<6}").parse().map_err(|_| invalid())?;
    whole.checked_mul(1_000_000).and_then(|w| w.checked_add(fraction)).map(Micros).ok_or_else(invalid)
}

/// `1.4 GB`, `312 B`.
#[must_use]
pub fn show_bytes(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["kB", "MB", "GB", "TB", "PB"];
    if bytes < 1_000 {
        return format!("{bytes} B");
    }
    let mut tenths = u128::from(bytes) * 10;
    let mut unit = "B";
    for next in UNITS {
        if tenths < 10_000 {
            break;
        }
        tenths = tenths.div_ceil(1_000);
        unit = next;
    }
    format!("{}.{} {unit}", tenths / 10, tenths % 10)
}

/// `850ms`, `12s`, `3m04s`, `5h00m`, `2d03h`.
#[must_use]
pub fn show_duration(duration: Duration) -> String {
    let ms = duration.as_millis();
    let s = duration.as_secs();
    match s {
        0 => format!("{ms}ms"),
        1..60 => format!("{s}s"),
        60..3_600 => format!("{}m{:02}s", s / 60, s % 60),
        3_600..86_400 => format!("{}h{:02}m", s / 3_600, s % 3_600 / 60),
        _ => format!("{}d{:02}h", s / 86_400, s % 86_400 / 3_600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn durations_need_a_unit() {
        assert_eq!(parse_duration("90s"), Ok(Duration::from_secs(90)));
        assert_eq!(parse_duration("1h30m"), Ok(Duration::from_secs(5400)));
        for bad in ["", "90", "h", "-5s", "1.5h", "1x", "99999999999999999d", "5 s", "１s"] {
            assert!(parse_duration(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn sizes_and_money() {
        assert_eq!(parse_size("64GB"), Ok(64_000_000_000));
        assert_eq!(parse_size("1 GiB"), Ok(1 << 30));
        assert!(parse_size("GB").is_err() && parse_size("1XB").is_err());
        assert_eq!(parse_money("25.00"), Ok(Micros(25_000_000)));
        assert_eq!(parse_money("$0.5"), Ok(Micros(500_000)));
        assert!(
            parse_money("-1").is_err() && parse_money("1,5").is_err() && parse_money("0.0000001").is_err()
        );
        assert_eq!(Micros(1).to_string(), "$0.01");
        assert_eq!(Micros(0).to_string(), "$0.00");
        assert_eq!(show_bytes(999), "999 B");
        assert_eq!(show_bytes(1_400_000_000), "1.4 GB");
    }

    proptest! {
        #[test]
        fn parsers_never_panic(text in "\\PC{0,12}") {
            drop(parse_duration(&text));
            drop(parse_size(&text));
            drop(parse_money(&text));
        }

        #[test]
        fn cost_is_monotonic(price in 0..100_000_000_u64, a in 0..10_000_000_u64, b in 0..10_000_000_u64) {
            let (a, b) = (a.min(b), a.max(b));
            let cost = |ms| Micros(price).per_hour_for(Duration::from_millis(ms));
            prop_assert!(cost(a) <= cost(b));
        }
    }
}
