//! How limb speaks: data on stdout, talk on stderr, errors as a chain with a hint, progress on
//! every wait. Nothing is said by colour alone.
//!
//! Never: print a name or text that came from a box without [`clean`]; panic because a reader of
//! stdout has gone.

use std::io::{IsTerminal as _, Write as _};
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use limb_common::clock::{self, BootInstant};
use limb_common::phase::LimbExit;
use owo_colors::OwoColorize as _;

use crate::env_names;

/// Shorter waits say nothing.
const QUIET_WAIT: Duration = Duration::from_secs(1);
/// Between two lines about the same wait where lines cannot be overwritten.
const LINE_EVERY: Duration = Duration::from_secs(10);

/// Why a command ends without what it was asked for.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) exit: LimbExit,
    pub(super) error: anyhow::Error,
}

impl Failure {
    pub(super) fn new(exit: LimbExit, error: impl Into<anyhow::Error>) -> Self {
        Self { exit, error: error.into() }
    }

    pub(super) fn refused(error: impl Into<anyhow::Error>) -> Self {
        Self::new(LimbExit::Refused, error)
    }

    pub(super) fn internal(error: impl Into<anyhow::Error>) -> Self {
        Self::new(LimbExit::Internal, error)
    }

    /// What the coordinator answered.
    pub(super) fn status(status: &tonic::Status) -> Self {
        use tonic::Code;
        let exit = match status.code() {
            Code::InvalidArgument
            | Code::NotFound
            | Code::AlreadyExists
            | Code::PermissionDenied
            | Code::FailedPrecondition
            | Code::OutOfRange
            | Code::Unauthenticated => LimbExit::Refused,
            Code::Unavailable | Code::Cancelled => LimbExit::NoCoordinator,
            Code::ResourceExhausted => LimbExit::NoBox,
            Code::Ok
            | Code::Unknown
            | Code::DeadlineExceeded
            | Code::Aborted
            | Code::Unimplemented
            | Code::Internal
            | Code::DataLoss => LimbExit::Internal,
        };
        let text = if status.message().is_empty() { status.code().description() } else { status.message() };
        Self::new(exit, anyhow::anyhow!("{}", clean(text)))
    }

    /// `(error, hints)`: hints are taken out of the chain, each once.
    pub(super) fn words(&self) -> (String, Vec<String>) {
        let mut parts: Vec<String> = Vec::new();
        let mut hints: Vec<String> = Vec::new();
        for cause in self.error.chain() {
            let text = cause.to_string();
            let mut words = text.split(limb_common::error::HINT).map(str::to_owned);
            let part = words.next().unwrap_or_default();
            if !parts.last().is_some_and(|last| last.ends_with(&part)) {
                parts.push(part);
            }
            for hint in words {
                if !hints.contains(&hint) {
                    hints.push(hint);
                }
            }
        }
        (parts.join(": "), hints)
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::internal(error)
    }
}

/// Nobody reads stdout any more: not an error of ours.
pub(super) fn is_broken_pipe(failure: &Failure) -> bool {
    failure
        .error
        .downcast_ref::<std::io::Error>()
        .is_some_and(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}

/// Removes what could make a terminal do things or text look like other text: C0 and C1 controls
/// (with ESC, every escape sequence), and the marks that reorder or hide text. A line break
/// becomes a space, so that a text cannot forge a line of its own.
pub(super) fn clean(text: &str) -> String {
    text.chars()
        .filter_map(|c| match c {
            '\n' | '\t' => Some(' '),
            c if c.is_control() => None,
            '\u{061c}'
            | '\u{200b}'..='\u{200f}'
            | '\u{2028}'..='\u{202e}'
            | '\u{2060}'..='\u{2069}'
            | '\u{feff}' => None,
            c => Some(c),
        })
        .collect()
}

/// The talker of one command.
#[derive(Debug)]
pub(super) struct Talk {
    pub(super) quiet: bool,
    pub(super) verbose: bool,
    /// stderr is a terminal.
    pub(super) terminal: bool,
    pub(super) colour: bool,
}

impl Talk {
    pub(super) fn new(quiet: bool, verbose: u8) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let set = |name| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let dumb = std::env::var_os(env_names::TERM).is_some_and(|term| term == "dumb");
        Self {
            quiet,
            verbose: verbose > 0,
            terminal: terminal && !dumb,
            colour: terminal && !dumb && !set(env_names::NO_COLOR),
        }
    }

    /// A person can be asked.
    pub(super) fn interactive(&self) -> bool {
        self.terminal && std::io::stdin().is_terminal()
    }

    /// A line, unless `-q`.
    pub(super) fn say(&self, line: &str) {
        if !self.quiet {
            self.insist(line);
        }
    }

    /// A line, always: errors, money, the box's end. Nobody may be there to read it.
    pub(super) fn insist(&self, line: &str) {
        let mut stderr = std::io::stderr().lock();
        drop(writeln!(stderr, "{line}"));
    }

    pub(super) fn failure(&self, failure: &Failure) {
        let (error, hints) = failure.words();
        if self.colour {
            self.insist(&format!("{} {error}", "error:".red().bold()));
        } else {
            self.insist(&format!("error: {error}"));
        }
        for hint in hints {
            if self.colour {
                self.insist(&format!("{} {hint}", "hint:".cyan()));
            } else {
                self.insist(&format!("hint: {hint}"));
            }
        }
    }

    /// Something that may take long begins.
    pub(super) fn wait(&self, text: &str) -> Wait {
        let bar = (self.terminal && !self.quiet).then(|| {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
                bar.set_style(style);
            }
            bar.set_message(text.to_owned());
            bar.enable_steady_tick(Duration::from_millis(120));
            bar
        });
        Wait {
            bar,
            lines: !self.terminal && !self.quiet,
            said: clock::boottime(),
            first: true,
            text: text.to_owned(),
        }
    }
}

/// A wait that is being shown. Dropping it takes it off the screen.
#[derive(Debug)]
pub(super) struct Wait {
    bar: Option<ProgressBar>,
    lines: bool,
    said: BootInstant,
    first: bool,
    text: String,
}

impl Wait {
    pub(super) fn update(&mut self, text: &str) {
        self.text = text.to_owned();
        if let Some(bar) = &self.bar {
            bar.set_message(self.text.clone());
        }
        self.tick();
    }

    /// Called now and then; says a line where lines cannot be overwritten.
    pub(super) fn tick(&mut self) {
        let every = if self.first { QUIET_WAIT } else { LINE_EVERY };
        let now = clock::boottime();
        if self.lines && now.saturating_since(self.said) >= every {
            self.said = now;
            self.first = false;
            drop(writeln!(std::io::stderr().lock(), "{} …", self.text));
        }
    }

    /// Prints a line above the wait.
    pub(super) fn above(&self, talk: &Talk, line: &str) {
        match &self.bar {
            Some(bar) => bar.suspend(|| talk.insist(line)),
            None => talk.say(line),
        }
    }
}

impl Drop for Wait {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Data, on stdout.
pub(super) fn print(text: &str) -> Result<(), Failure> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    if !text.is_empty() && !text.ends_with('\n') {
        stdout.write_all(b"\n")?;
    }
    stdout.flush()?;
    Ok(())
}

/// One JSON document, on stdout.
pub(super) fn print_json(value: &serde_json::Value) -> Result<(), Failure> {
    print(&format!("{value:#}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_terminal_would_obey_is_removed() {
        for (dirty, expected) in [
            ("\u{1b}]0;title\u{7}x", "]0;titlex"),
            ("\u{1b}[2Jgone", "[2Jgone"),
            ("a\r\nlimb: box destroyed", "a limb: box destroyed"),
            ("\u{9b}31mred", "31mred"),
            ("\u{1b}]52;c;ZWNobw==\u{1b}\\", "]52;c;ZWNobw==\\"),
            ("exe\u{202e}gpj", "exegpj"),
            ("zero\u{200b}width\u{feff}", "zerowidth"),
            ("naïve 漢字 🦀", "naïve 漢字 🦀"),
        ] {
            assert_eq!(clean(dirty), expected);
        }
    }

    #[test]
    fn a_chain_is_said_once_and_hints_come_apart() {
        let inner = anyhow::anyhow!("permission denied; hint: chmod it");
        let failure =
            Failure::refused(inner.context("could not read x: permission denied").context("no job"));
        let (error, hints) = failure.words();
        assert_eq!(error, "no job: could not read x: permission denied");
        assert_eq!(hints, ["chmod it"]);
    }

    #[test]
    fn a_coordinators_answer_becomes_a_documented_code() {
        let exit = |code| Failure::status(&tonic::Status::new(code, "x")).exit;
        assert_eq!(exit(tonic::Code::InvalidArgument), LimbExit::Refused);
        assert_eq!(exit(tonic::Code::Unavailable), LimbExit::NoCoordinator);
        assert_eq!(exit(tonic::Code::Internal), LimbExit::Internal);
    }
}
