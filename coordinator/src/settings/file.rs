//! `limb.toml` and `--set`: keys and the text of their values.

use std::path::Path;

use limb_common::jobfile::nearest;
use toml::de::{DeTable, DeValue};

use super::{KEYS, Origin, SettingsError};

/// Every key of the file. A file that nobody named may be missing.
pub(super) fn read(path: &Path, named: bool) -> Result<Vec<(&'static str, String, Origin)>, SettingsError> {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound && !named => return Ok(Vec::new()),
        Err(source) => return Err(SettingsError::Unreadable { path: path.to_owned(), source }),
    };
    parse(path, &text)
}

pub(super) fn parse(path: &Path, text: &str) -> Result<Vec<(&'static str, String, Origin)>, SettingsError> {
    let wrong = |at: usize, message: String| SettingsError::File {
        path: path.to_owned(),
        line: line_of(text, at),
        message,
    };
    let table = DeTable::parse(text).map_err(|error| {
        let message = error.message().lines().next().unwrap_or_default().to_owned();
        wrong(error.span().map_or(0, |span| span.start), format!("not valid TOML: {message}"))
    })?;
    let mut found = Vec::new();
    for (key, value) in table.get_ref() {
        let at = key.span().start;
        let known = known(key.get_ref()).map_err(|message| wrong(at, message))?;
        let value = match value.get_ref() {
            DeValue::String(value) => value.to_string(),
            DeValue::Integer(value) => value.as_str().to_owned(),
            DeValue::Float(_)
            | DeValue::Boolean(_)
            | DeValue::Datetime(_)
            | DeValue::Array(_)
            | DeValue::Table(_) => {
                return Err(wrong(at, format!("`{known}` must be a text in quotes")));
            }
        };
        found.push((known, value, Origin::File { path: path.to_owned(), line: line_of(text, at) }));
    }
    Ok(found)
}

/// `KEY=VALUE`.
pub(super) fn flag(text: &str) -> Result<(&'static str, String), SettingsError> {
    let wrong = |message: String| SettingsError::Flag { text: text.to_owned(), message };
    let (key, value) = text
        .split_once('=')
        .ok_or_else(|| wrong("not a setting; hint: write it like --set provider=local".to_owned()))?;
    Ok((known(key).map_err(wrong)?, value.to_owned()))
}

fn known(key: &str) -> Result<&'static str, String> {
    let names = KEYS.map(|(name, _, _)| name);
    names.into_iter().find(|name| *name == key).ok_or_else(|| {
        let hint = nearest(key, &names)
            .map_or_else(|| format!("known: {}", names.join(", ")), |near| format!("did you mean `{near}`?"));
        format!("unknown key `{key}`; hint: {hint}")
    })
}

fn line_of(text: &str, at: usize) -> usize {
    text.bytes().take(at).filter(|byte| *byte == b'\n').count() + 1
}
