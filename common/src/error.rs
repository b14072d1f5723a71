//! One classification of errors, given where an error is born, and one way to print a chain.

use std::error::Error;
use std::fmt::Write as _;

/// What the caller should do about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Disposition {
    /// The same request may succeed later.
    Retry,
    /// It will fail again; somebody has to change something.
    Fatal,
    /// The other side understood and said no.
    Refused,
}

/// An error that knows its disposition.
pub trait Classified {
    fn disposition(&self) -> Disposition;
}

/// Stands before what somebody can do about an error.
pub const HINT: &str = "; hint: ";

/// `a: b: c; hint: d`: without repeating a source that its parent already printed, and with the
/// hints behind all causes, each once.
#[must_use]
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let (mut text, mut hints) = (String::new(), Vec::new());
    let mut next = Some(error);
    while let Some(error) = next {
        let line = error.to_string();
        let mut words = line.split(HINT);
        let cause = words.next().unwrap_or_default();
        if text.is_empty() {
            text.push_str(cause);
        } else if !text.ends_with(cause) {
            // Writing to a String cannot fail.
            let _unused: std::fmt::Result = write!(text, ": {cause}");
        }
        for hint in words.map(str::to_owned) {
            if !hints.contains(&hint) {
                hints.push(hint);
            }
        }
        next = error.source();
    }
    for hint in hints {
        text.push_str(HINT);
        text.push_str(&hint);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    #[error("could not open {name}; hint: check the path")]
    struct Outer {
        name: &'static str,
        source: Inner,
    }

    #[derive(Debug, thiserror::Error)]
    #[error("{0}; hint: check the path; hint: or ask")]
    struct Inner(std::io::Error);

    #[test]
    fn hints_come_after_every_cause_and_once() {
        let inner = Inner(std::io::Error::from_raw_os_error(2));
        let said = chain(&Outer { name: "x", source: inner });
        assert_eq!(
            said,
            "could not open x: No such file or directory (os error 2); hint: check the path; hint: or ask"
        );
    }
}
