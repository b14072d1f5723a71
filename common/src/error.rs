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

/// `a: b: c`, without repeating a source that its parent already printed.
#[must_use]
pub fn chain(error: &(dyn Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let line = cause.to_string();
        if !text.ends_with(&line) {
            // Writing to a String cannot fail.
            let _unused: std::fmt::Result = write!(text, ": {line}");
        }
        source = cause.source();
    }
    text
}
