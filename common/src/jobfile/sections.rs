//! The keys that hold keys: `resources`, `env`, `mounts`, `outputs`, `limits`, `retry`, `cache`;
//! and values out of a closed list.

use std::time::Duration;

use super::paths;
use super::read::{Place, Read};
use super::yaml::{Node, Value};
use super::{
    CacheSpec, DEFAULT_RETRY_ATTEMPTS, DestTemplate, Durability, EnvEntry, EnvValue, Infra, JobFileError,
    LEAST_MEMORY_BYTES, Limits, Links, MAX_DISCONNECT_GRACE, Mount, Output, Resources, Retry, RetryEvent,
    SecretName, Source, nearest,
};
use crate::class::DataClass;
use crate::units::{Micros, parse_duration, parse_money, parse_size};

const SOURCE_KEYS: [&str; 3] = ["source", "class", "links"];
const OUTPUT_KEYS: [&str; 2] = ["dest", "durability"];
const RESOURCE_KEYS: [&str; 7] = ["gpu", "cpu", "memory", "disk", "infra", "max_price", "accelerators"];
const LIMIT_KEYS: [&str; 7] =
    ["max_duration", "max_cost", "boot_timeout", "stop_duration", "disconnect_grace", "memory", "gpu_idle"];
const RETRY_KEYS: [&str; 2] = ["on_events", "max_attempts"];
const CACHE_KEYS: [&str; 3] = ["memory", "disk", "dir"];
/// More attempts than this is a loop, not a retry.
const MAX_ATTEMPTS: u32 = 100;

/// The key of an entry as text.
fn key_text<'n>(place: &Place<'_>, key: &'n Node, section: &str, known: &[&str]) -> Read<&'n str> {
    match &key.value {
        Value::Scalar(text) => Ok(text),
        Value::Null | Value::Sequence(_) | Value::Mapping(_) => Err(place.unknown(key, section, known)),
    }
}

pub(super) fn workdir(place: &Place<'_>, value: &Node) -> Read<Option<Source>> {
    match &value.value {
        Value::Null => Ok(None),
        Value::Scalar(_) | Value::Mapping(_) | Value::Sequence(_) => {
            source(place, value, "workdir").map(Some)
        }
    }
}

/// `PATH`, or `{source: PATH, class: …, links: …}`.
fn source(place: &Place<'_>, value: &Node, key: &str) -> Read<Source> {
    let entries = match &value.value {
        Value::Scalar(text) => {
            let path = place.at_home(value.line, text)?;
            return Ok(Source { path, class: DataClass::default(), links: Links::default() });
        }
        Value::Mapping(entries) => entries,
        Value::Null | Value::Sequence(_) => {
            return Err(place.expected(value, key, "a path or {source: PATH}"));
        }
    };
    let (mut path, mut class, mut links) = (None, DataClass::default(), Links::default());
    for (name, value) in entries {
        match key_text(place, name, key, &SOURCE_KEYS)? {
            "source" => path = Some(place.at_home(value.line, place.text(value, "source")?)?),
            "class" => {
                class = one_of(
                    place,
                    value,
                    "class",
                    &[
                        ("public", DataClass::Public),
                        ("internal", DataClass::Internal),
                        ("regulated", DataClass::Regulated),
                        ("sealed", DataClass::Sealed),
                    ],
                )?;
            }
            "links" => {
                links = one_of(place, value, "links", &[("keep", Links::Keep), ("follow", Links::Follow)])?;
            }
            _ => return Err(place.unknown(name, key, &SOURCE_KEYS)),
        }
    }
    let path = path.ok_or_else(|| place.error(value.line, format!("`{key}` has no `source`")))?;
    Ok(Source { path, class, links })
}

/// A word of a closed list.
fn one_of<T: Copy>(place: &Place<'_>, value: &Node, key: &str, words: &[(&str, T)]) -> Read<T> {
    let text = place.text(value, key)?;
    words.iter().find(|(word, _)| *word == text).map(|(_, meaning)| *meaning).ok_or_else(|| {
        let known: Vec<&str> = words.iter().map(|(word, _)| *word).collect();
        let hint = nearest(text, &known)
            .map_or_else(|| format!("one of {}", known.join(", ")), |near| format!("did you mean `{near}`?"));
        place.hinted(value.line, format!("`{key}` cannot be {text:?}"), hint)
    })
}

/// `on` or `off`.
pub(super) fn switch(place: &Place<'_>, value: &Node, key: &str) -> Read<bool> {
    one_of(place, value, key, &[("on", true), ("off", false)])
}

pub(super) fn mounts(place: &Place<'_>, value: &Node) -> Read<Vec<(u64, Mount)>> {
    let entries = place.entries(value, "mounts")?;
    entries
        .iter()
        .map(|(key, value)| {
            let path = box_path(place, key, "mounts")?;
            let section = format!("mounts.{}", path.display());
            Ok((key.line, Mount { path, source: source(place, value, &section)? }))
        })
        .collect()
}

fn box_path(place: &Place<'_>, key: &Node, section: &str) -> Read<std::path::PathBuf> {
    paths::on_box(place.text(key, section)?).map_err(|(message, hint)| place.hinted(key.line, message, hint))
}

pub(super) fn outputs(place: &Place<'_>, value: &Node) -> Read<Vec<(u64, Output)>> {
    let entries = place.entries(value, "outputs")?;
    entries
        .iter()
        .map(|(key, value)| {
            let path = box_path(place, key, "outputs")?;
            let section = format!("outputs.{}", path.display());
            let (dest, durability) = output_body(place, value, &section)?;
            Ok((key.line, Output { path, dest, durability }))
        })
        .collect()
}

fn output_body(place: &Place<'_>, value: &Node, section: &str) -> Read<(DestTemplate, Durability)> {
    let entries = match &value.value {
        Value::Scalar(_) => return Ok((dest(place, value)?, Durability::default())),
        Value::Mapping(entries) => entries,
        Value::Null | Value::Sequence(_) => {
            return Err(place.expected(value, section, "a path or {dest: PATH}"));
        }
    };
    let (mut to, mut durability) = (None, Durability::default());
    for (name, value) in entries {
        match key_text(place, name, section, &OUTPUT_KEYS)? {
            "dest" => to = Some(dest(place, value)?),
            "durability" => {
                durability = one_of(
                    place,
                    value,
                    "durability",
                    &[("fsync", Durability::Fsync), ("close", Durability::Close), ("none", Durability::None)],
                )?;
            }
            _ => return Err(place.unknown(name, section, &OUTPUT_KEYS)),
        }
    }
    let to = to.ok_or_else(|| place.error(value.line, format!("`{section}` has no `dest`")))?;
    Ok((to, durability))
}

fn dest(place: &Place<'_>, value: &Node) -> Read<DestTemplate> {
    let text = place.text(value, "dest")?;
    let path = place.at_home(value.line, text)?;
    if path == std::path::Path::new("/") {
        return Err(place.error(value.line, "results cannot land in `/`"));
    }
    DestTemplate::new(text, path).map_err(|(message, hint)| {
        let error = place.error(value.line, message);
        JobFileError { hint, ..error }
    })
}

fn variable_name(place: &Place<'_>, line: u64, name: &str) -> Read<String> {
    let good = !name.is_empty()
        && !name.starts_with(|c: char| c.is_ascii_digit())
        && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_');
    good.then(|| name.to_owned()).ok_or_else(|| {
        place.hinted(
            line,
            format!("{name:?} cannot be the name of a variable"),
            "use letters, digits and `_`, no digit first",
        )
    })
}

pub(super) fn env(place: &Place<'_>, value: &Node) -> Read<Vec<EnvEntry>> {
    let entries = place.entries(value, "env")?;
    entries
        .iter()
        .map(|(key, value)| {
            let name = variable_name(place, key.line, place.text(key, "env")?)?;
            let value = match &value.value {
                Value::Null => EnvValue::FromSubmitter,
                Value::Scalar(text) if !text.contains('\0') => EnvValue::Literal(text.clone()),
                Value::Scalar(_) => {
                    return Err(place.error(value.line, format!("the value of `{name}` has a NUL in it")));
                }
                Value::Sequence(_) | Value::Mapping(_) => {
                    return Err(place.expected(value, &name, "a single value"));
                }
            };
            Ok(EnvEntry { name, value, line: key.line })
        })
        .collect()
}

pub(super) fn secrets(place: &Place<'_>, value: &Node) -> Read<Vec<SecretName>> {
    if let Value::Mapping(_) = value.value {
        return Err(place.hinted(
            value.line,
            "`secrets` is a list of names, never of values",
            "say `secrets: [HF_TOKEN]`; the value comes from the environment of `limb run`",
        ));
    }
    let mut secrets: Vec<SecretName> = Vec::new();
    for (line, name) in place.items(value, "secrets")? {
        let name = variable_name(place, line, name)?;
        if secrets.iter().any(|secret| secret.name == name) {
            return Err(place.error(line, format!("the secret `{name}` is there twice")));
        }
        secrets.push(SecretName { name, line });
    }
    Ok(secrets)
}

/// Choosing hardware needs a provider that has a choice; accepting the key and renting something
/// else would be the worst answer.
pub(super) fn no_hardware_choice(place: &Place<'_>, line: u64, key: &str) -> JobFileError {
    place.not_built(
        line,
        key,
        "leave it out; the `local` provider has the hardware of this machine and nothing else",
    )
}

pub(super) fn resources(place: &Place<'_>, value: &Node) -> Read<Resources> {
    let mut resources = Resources::default();
    for (key, value) in place.entries(value, "resources")? {
        match key_text(place, key, "resources", &RESOURCE_KEYS)? {
            name @ ("gpu" | "cpu" | "memory" | "disk" | "accelerators") => {
                if !matches!(value.value, Value::Null) {
                    return Err(no_hardware_choice(place, key.line, &format!("resources.{name}")));
                }
            }
            "infra" => {
                for (line, text) in place.items(value, "infra")? {
                    resources.infra.push(infra(place, line, text)?);
                }
            }
            "max_price" => resources.max_price = Some(money(place, value, "max_price")?),
            _ => return Err(place.unknown(key, "resources", &RESOURCE_KEYS)),
        }
    }
    Ok(resources)
}

fn infra(place: &Place<'_>, line: u64, text: &str) -> Read<Infra> {
    let word = |part: &str| {
        !part.is_empty() && part.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
    };
    let (provider, region) =
        text.split_once('/').map_or((text, None), |(provider, region)| (provider, Some(region)));
    if !word(provider) || !region.is_none_or(word) {
        return Err(place.hinted(
            line,
            format!("{text:?} is not a place to run"),
            "say a provider, like `local`, or `provider/region`",
        ));
    }
    Ok(Infra { provider: provider.to_owned(), region: region.map(str::to_owned) })
}

fn money(place: &Place<'_>, value: &Node, key: &str) -> Read<Micros> {
    parse_money(place.text(value, key)?)
        .map_err(|error| split_hint(place, value.line, key, &error.to_string()))
}

fn duration(place: &Place<'_>, value: &Node, key: &str) -> Read<Duration> {
    let text = place.text(value, key)?;
    let parsed =
        parse_duration(text).map_err(|error| split_hint(place, value.line, key, &error.to_string()))?;
    if parsed.is_zero() {
        return Err(place.hinted(
            value.line,
            format!("`{key}` cannot be zero"),
            "there is no way to switch a limit off; say a long one",
        ));
    }
    Ok(parsed)
}

fn memory(place: &Place<'_>, value: &Node) -> Read<u64> {
    let bytes = parse_size(place.text(value, "memory")?)
        .map_err(|error| split_hint(place, value.line, "memory", &error.to_string()))?;
    if bytes < LEAST_MEMORY_BYTES {
        return Err(place.hinted(
            value.line,
            format!("`memory`: a job cannot live on {bytes} bytes"),
            "16MiB is the least; write it like 512MB or 64GB",
        ));
    }
    Ok(bytes)
}

/// Units carry their own hint.
fn split_hint(place: &Place<'_>, line: u64, key: &str, message: &str) -> JobFileError {
    match message.split_once("; hint: ") {
        Some((message, hint)) => place.hinted(line, format!("`{key}`: {message}"), hint),
        None => place.error(line, format!("`{key}`: {message}")),
    }
}

pub(super) fn limits(place: &Place<'_>, value: &Node) -> Read<Limits> {
    let mut limits = Limits::default();
    for (key, value) in place.entries(value, "limits")? {
        match key_text(place, key, "limits", &LIMIT_KEYS)? {
            "max_duration" => limits.max_duration = duration(place, value, "max_duration")?,
            "max_cost" => limits.max_cost = money(place, value, "max_cost")?,
            "boot_timeout" => limits.boot_timeout = duration(place, value, "boot_timeout")?,
            "stop_duration" => limits.stop_duration = duration(place, value, "stop_duration")?,
            "disconnect_grace" => {
                limits.disconnect_grace = duration(place, value, "disconnect_grace")?;
                if limits.disconnect_grace > MAX_DISCONNECT_GRACE {
                    return Err(place.hinted(
                        value.line,
                        "`disconnect_grace` is longer than a box's certificate can cover",
                        "25m is the most",
                    ));
                }
            }
            "memory" => limits.memory_bytes = Some(memory(place, value)?),
            "gpu_idle" => match value.value {
                Value::Null => {}
                Value::Scalar(_) | Value::Sequence(_) | Value::Mapping(_) => {
                    return Err(place.not_built(
                        key.line,
                        "limits.gpu_idle",
                        "leave it out; `max_duration` and `max_cost` hold",
                    ));
                }
            },
            _ => return Err(place.unknown(key, "limits", &LIMIT_KEYS)),
        }
    }
    Ok(limits)
}

fn size(place: &Place<'_>, value: &Node, key: &str) -> Read<u64> {
    parse_size(place.text(value, key)?)
        .map_err(|error| split_hint(place, value.line, key, &error.to_string()))
}

pub(super) fn cache(place: &Place<'_>, value: &Node) -> Read<CacheSpec> {
    let mut cache = CacheSpec::default();
    for (key, value) in place.entries(value, "cache")? {
        match key_text(place, key, "cache", &CACHE_KEYS)? {
            "memory" => {
                cache.memory_bytes = size(place, value, "cache.memory")?;
                if cache.memory_bytes < CacheSpec::LEAST_MEMORY_BYTES {
                    return Err(place.hinted(
                        value.line,
                        "`cache.memory` cannot hold what is read ahead",
                        "64MiB is the least, 512MiB the default",
                    ));
                }
            }
            "disk" => match &value.value {
                Value::Scalar(text) if text == "off" => cache.disk_bytes = 0,
                Value::Null | Value::Scalar(_) | Value::Sequence(_) | Value::Mapping(_) => {
                    cache.disk_bytes = size(place, value, "cache.disk")?;
                }
            },
            "dir" => {
                let path = paths::on_box(place.text(value, "cache.dir")?);
                let wrong =
                    |(message, hint)| place.hinted(value.line, format!("`cache.dir`: {message}"), hint);
                cache.dir = Some(path.map_err(wrong)?);
            }
            _ => return Err(place.unknown(key, "cache", &CACHE_KEYS)),
        }
    }
    if cache.dir.is_some() && cache.disk_bytes == 0 {
        return Err(place.hinted(
            value.line,
            "`cache.dir` is for a cache on the disk, and there is none",
            "say how large it may get, like `disk: 20GiB`",
        ));
    }
    Ok(cache)
}

pub(super) fn retry(place: &Place<'_>, value: &Node) -> Read<Retry> {
    if matches!(value.value, Value::Null) {
        return Ok(Retry::default());
    }
    let (mut on_events, mut max_attempts) = (None, DEFAULT_RETRY_ATTEMPTS);
    for (key, value) in place.entries(value, "retry")? {
        match key_text(place, key, "retry", &RETRY_KEYS)? {
            "on_events" => on_events = Some(retry_events(place, value)?),
            "max_attempts" => {
                let text = place.text(value, "max_attempts")?;
                max_attempts =
                    text.parse().ok().filter(|count| (1..=MAX_ATTEMPTS).contains(count)).ok_or_else(
                        || {
                            place.error(
                            value.line,
                            format!(
                                "`max_attempts` must be a whole number from 1 to {MAX_ATTEMPTS}, not {text:?}"
                            ),
                        )
                        },
                    )?;
            }
            _ => return Err(place.unknown(key, "retry", &RETRY_KEYS)),
        }
    }
    Ok(Retry { on_events: on_events.unwrap_or_else(|| RetryEvent::ALL.to_vec()), max_attempts })
}

fn retry_events(place: &Place<'_>, value: &Node) -> Read<Vec<RetryEvent>> {
    let words = RetryEvent::ALL.map(|event| (event.as_str(), event));
    let mut events = Vec::new();
    for (line, text) in place.items(value, "on_events")? {
        let node = Node { line, value: Value::Scalar(text.to_owned()) };
        let event = one_of(place, &node, "on_events", &words)?;
        if !events.contains(&event) {
            events.push(event);
        }
    }
    Ok(events)
}
