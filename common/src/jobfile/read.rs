//! From the tree of lines to a [`JobFile`]: one arm per key, and the checks that span keys.

use std::path::{Path, PathBuf};

use super::yaml::{self, Node, Value};
use super::{CacheSpec, Command, JobFile, JobFileError, Limits, Resources, Retry, nearest, paths, sections};
use crate::class::DataClass;

/// Every key of the format, aliases last.
const KEYS: [&str; 18] = [
    "name",
    "workdir",
    "resources",
    "image",
    "env",
    "secrets",
    "mounts",
    "outputs",
    "setup",
    "run",
    "limits",
    "retry",
    "trace",
    "push",
    "cache",
    "notify",
    "commands",
    "accelerators",
];

/// Longest name of a run: it becomes a directory name and a column of tables.
const MAX_NAME_CHARS: usize = 63;

/// Where a file stands: for its errors and its relative paths.
#[derive(Debug)]
pub(super) struct Place<'a> {
    pub(super) file: &'a str,
    pub(super) base: &'a Path,
    pub(super) home: Option<PathBuf>,
}

pub(super) type Read<T> = Result<T, JobFileError>;

impl<'a> Place<'a> {
    pub(super) fn new(file: &'a str, base: &'a Path) -> Self {
        Self {
            file,
            base,
            home: std::env::var_os("HOME").map(PathBuf::from).filter(|home| home.is_absolute()),
        }
    }

    pub(super) fn error(&self, line: u64, message: impl Into<String>) -> JobFileError {
        JobFileError {
            file: self.file.to_owned(),
            line: (line > 0).then_some(line),
            message: message.into(),
            hint: None,
        }
    }

    pub(super) fn hinted(
        &self,
        line: u64,
        message: impl Into<String>,
        hint: impl Into<String>,
    ) -> JobFileError {
        JobFileError { hint: Some(hint.into()), ..self.error(line, message) }
    }

    pub(super) fn not_built(&self, line: u64, key: &str, instead: &str) -> JobFileError {
        self.hinted(line, format!("`{key}` is not built yet"), instead)
    }

    /// An unknown key, with the known one that it most resembles.
    pub(super) fn unknown(&self, key: &Node, section: &str, known: &[&str]) -> JobFileError {
        let name = match &key.value {
            Value::Scalar(text) => text.clone(),
            Value::Null | Value::Sequence(_) | Value::Mapping(_) => key.value.kind().to_owned(),
        };
        let hint = nearest(&name, known).map_or_else(
            || format!("known here: {}", known.join(", ")),
            |near| format!("did you mean `{near}`?"),
        );
        let place = if section.is_empty() { String::new() } else { format!(" in `{section}`") };
        self.hinted(key.line, format!("unknown key `{name}`{place}"), hint)
    }

    pub(super) fn expected(&self, node: &Node, key: &str, what: &str) -> JobFileError {
        self.error(node.line, format!("`{key}` must be {what}, not {}", node.value.kind()))
    }

    pub(super) fn text<'n>(&self, node: &'n Node, key: &str) -> Read<&'n str> {
        match &node.value {
            Value::Scalar(text) => Ok(text),
            Value::Null | Value::Sequence(_) | Value::Mapping(_) => {
                Err(self.expected(node, key, "a single value"))
            }
        }
    }

    /// A mapping; nothing counts as an empty one.
    pub(super) fn entries<'n>(&self, node: &'n Node, key: &str) -> Read<&'n [(Node, Node)]> {
        match &node.value {
            Value::Mapping(entries) => Ok(entries),
            Value::Null => Ok(&[]),
            Value::Scalar(_) | Value::Sequence(_) => Err(self.expected(node, key, "a mapping")),
        }
    }

    /// A list; a single value counts as a list of one, nothing as an empty one.
    pub(super) fn items<'n>(&self, node: &'n Node, key: &str) -> Read<Vec<(u64, &'n str)>> {
        match &node.value {
            Value::Null => Ok(Vec::new()),
            Value::Scalar(text) => Ok(vec![(node.line, text.as_str())]),
            Value::Sequence(items) => {
                items.iter().map(|item| Ok((item.line, self.text(item, key)?))).collect()
            }
            Value::Mapping(_) => Err(self.expected(node, key, "a list")),
        }
    }

    pub(super) fn at_home(&self, line: u64, text: &str) -> Read<PathBuf> {
        paths::at_home(text, self.base, self.home.as_deref()).map_err(|message| self.error(line, message))
    }
}

/// What the keys said, before the checks that span them.
#[derive(Default)]
struct Draft {
    job: DraftJob,
    command: Option<(u64, String)>,
}

#[derive(Default)]
struct DraftJob {
    name: Option<String>,
    workdir: Option<super::Source>,
    resources: Resources,
    env: Vec<super::EnvEntry>,
    secrets: Vec<super::SecretName>,
    mounts: Vec<(u64, super::Mount)>,
    outputs: Vec<(u64, super::Output)>,
    setup: String,
    limits: Limits,
    retry: Retry,
    trace: Option<bool>,
    push: Option<bool>,
    cache: (u64, CacheSpec),
}

pub(super) fn read(text: &str, place: &Place<'_>, argv: Option<Vec<Vec<u8>>>) -> Read<JobFile> {
    let tree = yaml::parse(text).map_err(|error| JobFileError {
        file: place.file.to_owned(),
        line: error.line,
        message: format!("not valid YAML: {}", error.message),
        hint: Some(error.hint),
    })?;
    let mut draft = Draft::default();
    let entries = match &tree.value {
        Value::Mapping(entries) => entries.as_slice(),
        Value::Null => &[],
        Value::Scalar(_) | Value::Sequence(_) => {
            return Err(place.error(
                tree.line,
                format!("a job file is a mapping of keys like `run:`, not {}", tree.value.kind()),
            ));
        }
    };
    for (key, value) in entries {
        read_key(place, &mut draft, key, value)?;
    }
    finish(place, draft, argv)
}

fn read_key(place: &Place<'_>, draft: &mut Draft, key: &Node, value: &Node) -> Read<()> {
    let unknown = || place.unknown(key, "", &KEYS);
    let Value::Scalar(name) = &key.value else { return Err(unknown()) };
    let job = &mut draft.job;
    match name.as_str() {
        "name" => job.name = Some(read_name(place, value)?),
        "workdir" => job.workdir = sections::workdir(place, value)?,
        "resources" => job.resources = sections::resources(place, value)?,
        "image" => match value.value {
            Value::Null => {}
            Value::Scalar(_) | Value::Sequence(_) | Value::Mapping(_) => {
                return Err(place.not_built(
                    key.line,
                    "image",
                    "leave it out or say `image: null`: the job runs on the box's own system",
                ));
            }
        },
        "env" => job.env = sections::env(place, value)?,
        "secrets" => job.secrets = sections::secrets(place, value)?,
        "mounts" => job.mounts = sections::mounts(place, value)?,
        "outputs" => job.outputs = sections::outputs(place, value)?,
        "setup" => job.setup = read_script(place, value, name)?,
        "run" | "commands" => {
            let script = read_script(place, value, name)?;
            if let Some((line, _)) = &draft.command {
                return Err(place.error(
                    key.line,
                    format!("`run` and its alias `commands` are both there (the other on line {line})"),
                ));
            }
            draft.command = Some((key.line, script));
        }
        "limits" => job.limits = sections::limits(place, value)?,
        "retry" => job.retry = sections::retry(place, value)?,
        "trace" => job.trace = Some(sections::switch(place, value, "trace")?),
        "push" => job.push = Some(sections::switch(place, value, "push")?),
        "cache" => job.cache = (key.line, sections::cache(place, value)?),
        "notify" => {
            if !place.items(value, name)?.is_empty() {
                return Err(place.not_built(
                    key.line,
                    "notify",
                    "leave it out; `limb events -f RUN` says what happens",
                ));
            }
        }
        "accelerators" => return Err(sections::no_hardware_choice(place, key.line, name)),
        _ => return Err(unknown()),
    }
    Ok(())
}

fn read_name(place: &Place<'_>, value: &Node) -> Read<String> {
    let name = place.text(value, "name")?;
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-');
    let good = name.starts_with(|c: char| c.is_ascii_alphanumeric())
        && name.chars().all(allowed)
        && name.len() <= MAX_NAME_CHARS;
    if good {
        return Ok(name.to_owned());
    }
    Err(place.hinted(
        value.line,
        format!("{name:?} cannot be a name"),
        format!(
            "use at most {MAX_NAME_CHARS} letters, digits, `.`, `_` and `-`, a letter or digit first: it becomes a directory name"
        ),
    ))
}

/// The file's own name, made fit.
fn name_of_file(file: &str) -> String {
    let stem = Path::new(file).file_stem().map(|stem| stem.to_string_lossy().into_owned());
    let fit: String = stem
        .unwrap_or_default()
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-') { c } else { '-' })
        .take(MAX_NAME_CHARS)
        .collect();
    let fit = fit.trim_matches(['-', '.', '_']);
    if fit.is_empty() { "job".to_owned() } else { fit.to_owned() }
}

/// A script, or a list of lines of one.
fn read_script(place: &Place<'_>, value: &Node, key: &str) -> Read<String> {
    let script = match &value.value {
        Value::Null => String::new(),
        Value::Scalar(text) => text.clone(),
        Value::Sequence(_) => {
            let lines: Vec<&str> = place.items(value, key)?.into_iter().map(|(_, line)| line).collect();
            lines.join("\n")
        }
        Value::Mapping(_) => return Err(place.expected(value, key, "a script")),
    };
    if script.contains('\0') {
        return Err(place.error(value.line, format!("`{key}` has a NUL in it")));
    }
    Ok(script)
}

fn finish(place: &Place<'_>, draft: Draft, argv: Option<Vec<Vec<u8>>>) -> Read<JobFile> {
    let Draft { job, command } = draft;
    let command = match (argv, command) {
        (None, None) => {
            return Err(place.hinted(
                0,
                "there is no `run:`",
                "say what to run, like `run: python train.py`",
            ));
        }
        (None, Some((line, script))) if script.trim().is_empty() => {
            return Err(place.error(line, "`run` is empty"));
        }
        (None, Some((_, script))) => Command::Script(script),
        (Some(argv), None) if argv.is_empty() || argv[0].is_empty() => {
            return Err(place.error(0, "there is no command after `--`"));
        }
        (Some(argv), None) if argv.iter().any(|word| word.contains(&0)) => {
            return Err(place.error(0, "a word of the command has a NUL in it"));
        }
        (Some(argv), None) => Command::Argv(argv),
        (Some(_), Some((line, _))) => {
            return Err(place.error(line, "`run` and a command after `--` are both there"));
        }
    };
    check_secrets(place, &job)?;
    check_paths(place, &job)?;
    let (cache_line, cache) = job.cache;
    let this = JobFile {
        name: job.name.unwrap_or_else(|| name_of_file(place.file)),
        workdir: job.workdir,
        resources: job.resources,
        env: job.env,
        secrets: job.secrets,
        mounts: job.mounts.into_iter().map(|(_, mount)| mount).collect(),
        outputs: job.outputs.into_iter().map(|(_, output)| output).collect(),
        setup: job.setup,
        command,
        limits: job.limits,
        retry: job.retry,
        trace: job.trace.unwrap_or(true),
        push: job.push.unwrap_or(false),
        cache,
        file: place.file.to_owned(),
    };
    if this.cache.disk_bytes > 0 && this.class() >= DataClass::Regulated {
        return Err(place.hinted(
            cache_line,
            format!("data of class `{}` does not go to a box's disk, not even sealed", this.class()),
            "leave out `cache.disk`",
        ));
    }
    Ok(this)
}

fn check_secrets(place: &Place<'_>, job: &DraftJob) -> Read<()> {
    for entry in &job.env {
        let secret = job.secrets.iter().any(|secret| secret.name == entry.name);
        if secret && entry.value != super::EnvValue::FromSubmitter {
            return Err(place.hinted(
                entry.line,
                format!("the secret `{}` has its value in the file", entry.name),
                format!("say `{}: null`, or leave it out of `env`", entry.name),
            ));
        }
    }
    Ok(())
}

/// No two mount points hold each other, and no two outputs land in each other.
fn check_paths(place: &Place<'_>, job: &DraftJob) -> Read<()> {
    let mounts = job.mounts.iter().map(|(line, mount)| (*line, "mount", mount.path.as_path()));
    let outputs = job.outputs.iter().map(|(line, output)| (*line, "output", output.path.as_path()));
    let points: Vec<_> = mounts.chain(outputs).collect();
    let dests: Vec<_> =
        job.outputs.iter().map(|(line, output)| (*line, "destination", output.dest.as_path())).collect();
    for list in [points, dests] {
        for (at, (line, what, path)) in list.iter().enumerate() {
            if let Some((other, other_what, other_path)) =
                list[..at].iter().find(|(_, _, earlier)| paths::nested(earlier, path))
            {
                return Err(place.hinted(
                    *line,
                    format!(
                        "the {what} `{}` and the {other_what} `{}` (line {other}) are inside each other",
                        path.display(),
                        other_path.display()
                    ),
                    "give each a place of its own",
                ));
            }
        }
    }
    Ok(())
}
