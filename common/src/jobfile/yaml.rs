//! YAML as a tree that remembers lines, so that every complaint about a job file can name one.
//!
//! Scalars keep the text that the owner wrote (`0755`, `25.00`, `1_000`): what it means is
//! decided by the key that it stands under, never by a guess of the YAML library.

use serde::de::{Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_saphyr::Spanned;

/// One node and the line that it starts on (counted from 1).
#[derive(Clone, Debug)]
pub(super) struct Node {
    pub(super) line: u64,
    pub(super) value: Value,
}

#[derive(Clone, Debug)]
pub(super) enum Value {
    Null,
    Scalar(String),
    Sequence(Vec<Node>),
    Mapping(Vec<(Node, Node)>),
}

impl Value {
    /// What it is, for "expected …, found …".
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Null => "nothing",
            Self::Scalar(_) => "a single value",
            Self::Sequence(_) => "a list",
            Self::Mapping(_) => "a mapping",
        }
    }
}

/// The text is not YAML.
#[derive(Debug)]
pub(super) struct NotYaml {
    pub(super) line: Option<u64>,
    pub(super) message: String,
    pub(super) hint: String,
}

/// Parses one document.
pub(super) fn parse(text: &str) -> Result<Node, NotYaml> {
    let options = serde_saphyr::options! {
        with_snippet: false,
        strict_booleans: true,
        reject_unsupported_tags: true,
    };
    let tree: Typed = serde_saphyr::from_str_with_options(text, options)
        .map_err(|error| super::broken::words(&error, text))?;
    Ok(tree.into_node(text))
}

/// `{dest: /x/{name}}`: YAML reads the inner braces as its own. Says so where the text that broke
/// has a placeholder outside quotes.
pub(super) fn unquoted_braces(text: &str, line: Option<u64>) -> Option<String> {
    // The parser may notice a line or two late.
    let last = usize::try_from(line?).ok()?;
    let near = text.lines().take(last).skip(last.saturating_sub(3));
    let found = near.filter_map(|line| {
        let word = line.split([' ', ',', ':']).find(|word| has_placeholder(word))?;
        let value = word.trim_start_matches(['[', '{']);
        let is_quoted = word.starts_with(['"', '\'']) || line.trim_start().starts_with('#');
        (!is_quoted).then(|| placeholder_value(value))
    });
    found.last().map(|value| format!("quote a value that contains braces: \"{value}\""))
}

const PLACEHOLDERS: [&str; 3] = ["{name}", "{run}", "{attempt}"];

fn has_placeholder(word: &str) -> bool {
    PLACEHOLDERS.iter().any(|placeholder| word.contains(placeholder))
}

/// Without the closing braces of the mapping around it.
fn placeholder_value(word: &str) -> &str {
    let opened = word.matches('{').count();
    let mut value = word.trim_end_matches(']');
    while value.matches('}').count() > opened {
        let Some(shorter) = value.strip_suffix(['}', ']']) else { break };
        value = shorter;
    }
    value
}

/// What the library makes of a node before numbers are turned back into their text.
struct Typed(Spanned<Raw>);

enum Raw {
    Null,
    Text(String),
    /// A plain scalar that the library took for a number or boolean; `shown` is used where the
    /// source has no such text.
    Plain {
        shown: String,
    },
    Sequence(Vec<Typed>),
    Mapping(Vec<(Typed, Typed)>),
}

impl Typed {
    fn into_node(self, source: &str) -> Node {
        let line = self.0.referenced.line();
        let span = self.0.defined.span();
        let value = match self.0.value {
            Raw::Null => Value::Null,
            Raw::Text(text) => Value::Scalar(text),
            Raw::Plain { shown } => {
                Value::Scalar(written(source, span.byte_offset(), span.byte_len()).unwrap_or(shown))
            }
            Raw::Sequence(items) => {
                Value::Sequence(items.into_iter().map(|item| item.into_node(source)).collect())
            }
            Raw::Mapping(entries) => Value::Mapping(
                entries
                    .into_iter()
                    .map(|(key, value)| (key.into_node(source), value.into_node(source)))
                    .collect(),
            ),
        };
        Node { line, value }
    }
}

fn written(source: &str, at: Option<u64>, len: Option<u64>) -> Option<String> {
    let at = usize::try_from(at?).ok()?;
    let end = at.checked_add(usize::try_from(len?).ok()?)?;
    let text = source.get(at..end)?.trim();
    (!text.is_empty()).then(|| text.to_owned())
}

impl<'de> Deserialize<'de> for Typed {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        Spanned::deserialize(deserializer).map(Self)
    }
}

impl<'de> Deserialize<'de> for Raw {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(RawVisitor)
    }
}

struct RawVisitor;

impl<'de> Visitor<'de> for RawVisitor {
    type Value = Raw;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("any YAML value")
    }

    fn visit_unit<E>(self) -> Result<Raw, E> {
        Ok(Raw::Null)
    }

    fn visit_none<E>(self) -> Result<Raw, E> {
        Ok(Raw::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Raw, D::Error> {
        Raw::deserialize(deserializer)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Raw, E> {
        Ok(Raw::Plain { shown: value.to_string() })
    }

    fn visit_i64<E>(self, value: i64) -> Result<Raw, E> {
        Ok(Raw::Plain { shown: value.to_string() })
    }

    fn visit_u64<E>(self, value: u64) -> Result<Raw, E> {
        Ok(Raw::Plain { shown: value.to_string() })
    }

    fn visit_f64<E>(self, value: f64) -> Result<Raw, E> {
        Ok(Raw::Plain { shown: value.to_string() })
    }

    fn visit_str<E>(self, value: &str) -> Result<Raw, E> {
        Ok(Raw::Text(value.to_owned()))
    }

    fn visit_string<E>(self, value: String) -> Result<Raw, E> {
        Ok(Raw::Text(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Raw, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = sequence.next_element()? {
            items.push(item);
        }
        Ok(Raw::Sequence(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Raw, A::Error> {
        let mut entries = Vec::new();
        while let Some(entry) = map.next_entry()? {
            entries.push(entry);
        }
        Ok(Raw::Mapping(entries))
    }
}
