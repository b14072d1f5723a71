//! Text that is no YAML, told in the job file's own words: what is wrong, what is expected there,
//! what to do. The library's words are about its inside.

use serde_saphyr::Error;
use serde_saphyr::granit_parser::ErrorKind;
use serde_saphyr::localizer::ExternalMessageSource;

use super::yaml::{NotYaml, unquoted_braces};

/// What is wrong, and what to do.
type Words = (String, &'static str);

const CLOSE: &str = "close it where it ends, or quote the value if the character belongs to it";
const QUOTE: &str = "put the value in double quotes";
const SPACES: &str = "indent with spaces";
const SHAPE: &str = "a line is `key: value`, or `- value` in a list; what belongs to a key stands further in";

pub(super) fn words(error: &Error, text: &str) -> NotYaml {
    let line = error.location().map(|at| at.line()).filter(|line| *line > 0);
    let (message, hint) = of(error.without_snippet(), line_of(text, line));
    let hint = unquoted_braces(text, line).unwrap_or_else(|| hint.to_owned());
    NotYaml { line, message, hint }
}

fn line_of(text: &str, line: Option<u64>) -> &str {
    let at = line.and_then(|line| usize::try_from(line).ok()).and_then(|line| line.checked_sub(1));
    at.and_then(|at| text.lines().nth(at)).unwrap_or_default()
}

fn of(error: &Error, line: &str) -> Words {
    let say = |message: &str, hint| (message.to_owned(), hint);
    match error {
        Error::DuplicateMappingKey { key, .. } => {
            let key = key.as_ref().map_or_else(String::new, |key| format!(" `{key}`"));
            (format!("the key{key} is there twice"), "keep one of them")
        }
        Error::MultipleDocuments { .. } => {
            say("a second document begins here; a job file is one", "leave out `---`, or make two files")
        }
        Error::UnknownAnchor { .. } => {
            say("`*` refers to something that has no `&` name above", "quote a value that begins with `*`")
        }
        Error::ExternalMessage { source, .. } => match source.as_ref() {
            ExternalMessageSource::Parser(scan) => of_kind(scan.kind(), line),
            _ => general(line),
        },
        Error::AliasReplayLimitExceeded { .. }
        | Error::AliasExpansionLimitExceeded { .. }
        | Error::AliasReplayStackDepthExceeded { .. }
        | Error::AliasReplayCounterOverflow { .. } => {
            say("its references (`*name`) unfold into too much", "write the values out")
        }
        Error::MergeKeyNotAllowed { .. } | Error::MergeValueNotMapOrSeqOfMaps { .. } => {
            say("`<<` merges mappings, and this is none", "write the keys out")
        }
        _ if line.contains('!') => {
            say("`!` begins a type tag, and a job file has none", "quote a value that begins with `!`")
        }
        _ => general(line),
    }
}

fn of_kind(kind: &ErrorKind, line: &str) -> Words {
    use ErrorKind as K;
    let say = |message: &str, hint| (message.to_owned(), hint);
    match kind {
        K::UnclosedFlowCollection { .. }
        | K::UnexpectedEofFlowSequence
        | K::UnexpectedEofFlowMapping
        | K::UnexpectedEofImplicitFlowMapping
        | K::ExpectedFlowMappingSeparator
        | K::ExpectedFlowSequenceSeparator
        | K::InvalidFlowScalarIndent => say("`{` or `[` was opened and is not closed", CLOSE),
        K::MisplacedFlowCollectionEnd | K::MismatchedFlowCollectionEnd { .. } => say(
            "`}` or `]` closes what was not opened",
            "open it, or quote the value if the character belongs to it",
        ),
        K::UnclosedQuotedScalar | K::DocumentIndicatorInQuotedScalar | K::InvalidQuotedScalarIndent => {
            say("a quote was opened and is not closed", CLOSE)
        }
        K::InvalidTrailingSingleQuotedScalar | K::InvalidTrailingDoubleQuotedScalar => {
            say("something stands behind the closing quote", "quote the whole value")
        }
        K::UnknownQuotedScalarEscape | K::InvalidQuotedScalarHexEscape | K::InvalidUnicodeEscape => {
            say("`\\` and what follows means nothing in double quotes", "use single quotes, or write `\\\\`")
        }
        K::TabNotAllowed | K::TabInBlockIndentation | K::TabInIndentation | K::TabAtBlockScalarStart => {
            say("a tab indents this line", SPACES)
        }
        K::MappingValueNotAllowed | K::InvalidMappingValueWhitespace | K::InvalidColonPlacement
            if line.matches(": ").count() > 1 =>
        {
            say("a second `: ` stands in this line", QUOTE)
        }
        _ => general(line),
    }
}

/// From the looks of the line.
fn general(line: &str) -> Words {
    let indent: String = line.chars().take_while(|c| c.is_whitespace()).collect();
    if indent.contains('\t') {
        return ("a tab indents this line".to_owned(), SPACES);
    }
    let value = line.split_once(": ").map_or(line, |(_, value)| value).trim_start();
    let first = value.trim_start_matches("- ").chars().next();
    match first.filter(|c| "@`%!&*".contains(*c)) {
        Some(first) => (format!("a value cannot begin with `{first}`"), QUOTE),
        None => ("this line does not fit those above it".to_owned(), SHAPE),
    }
}
