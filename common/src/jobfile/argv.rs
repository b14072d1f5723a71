//! `limb run -- CMD` with flags, as the job file that it stands for. The flags become the same
//! keys and go through the same reader, so that a flag can never mean something else than its key.

use std::path::Path;

use serde_json::{Map, Value, json};

use super::{JobFile, JobFileError};

/// What errors call a job that came from the command line.
pub const FILE_NAME: &str = "command line";

/// The flags of `limb run -- CMD`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ArgvJob {
    pub name: Option<String>,
    pub workdir: Option<String>,
    /// `SOURCE:PATH[:CLASS]`, each a directory or file at home and where the job sees it.
    pub mounts: Vec<String>,
    /// `PATH:DEST`, where the job writes and where that lands at home.
    pub outputs: Vec<String>,
    /// `NAME=VALUE`, or `NAME` for the submitter's own value.
    pub env: Vec<String>,
    pub secrets: Vec<String>,
    pub max_duration: Option<String>,
    pub max_cost: Option<String>,
    pub stop_duration: Option<String>,
    pub disconnect_grace: Option<String>,
    /// `on` or `off`.
    pub trace: Option<String>,
    /// `on` or `off`.
    pub push: Option<String>,
    pub cache_memory: Option<String>,
    pub cache_disk: Option<String>,
}

impl ArgvJob {
    /// The job file (JSON, which YAML includes) that travels to the coordinator beside the argv.
    ///
    /// # Errors
    /// Names the flag that cannot be read.
    pub fn to_yaml(&self, argv: &[Vec<u8>]) -> Result<String, JobFileError> {
        let mut file = Map::new();
        let name = self.name.clone().or_else(|| command_name(argv));
        put(&mut file, "name", name.map(Value::from));
        put(&mut file, "workdir", self.workdir.clone().map(Value::from));
        let mut mounts = Map::new();
        for flag in &self.mounts {
            let (point, source) = mount(flag)?;
            add(&mut mounts, "--mount", point, source)?;
        }
        put(&mut file, "mounts", section(mounts));
        let mut outputs = Map::new();
        for flag in &self.outputs {
            let (path, dest) = flag
                .split_once(':')
                .filter(|(path, dest)| path.starts_with('/') && !dest.is_empty())
                .ok_or_else(|| wrong("--output", flag, "write it like --output /ckpt:./runs/{name}"))?;
            add(&mut outputs, "--output", path, json!({ "dest": dest }))?;
        }
        put(&mut file, "outputs", section(outputs));
        let mut env = Map::new();
        for flag in &self.env {
            let (name, value) = flag
                .split_once('=')
                .map_or((flag.as_str(), Value::Null), |(name, value)| (name, value.into()));
            add(&mut env, "--env", name, value)?;
        }
        put(&mut file, "env", section(env));
        put(&mut file, "secrets", (!self.secrets.is_empty()).then(|| json!(self.secrets)));
        let mut limits = Map::new();
        put(&mut limits, "max_duration", self.max_duration.clone().map(Value::from));
        put(&mut limits, "max_cost", self.max_cost.clone().map(Value::from));
        put(&mut limits, "stop_duration", self.stop_duration.clone().map(Value::from));
        put(&mut limits, "disconnect_grace", self.disconnect_grace.clone().map(Value::from));
        put(&mut file, "limits", section(limits));
        put(&mut file, "trace", self.trace.clone().map(Value::from));
        put(&mut file, "push", self.push.clone().map(Value::from));
        let mut cache = Map::new();
        put(&mut cache, "memory", self.cache_memory.clone().map(Value::from));
        put(&mut cache, "disk", self.cache_disk.clone().map(Value::from));
        put(&mut file, "cache", section(cache));
        Ok(Value::Object(file).to_string())
    }
}

impl JobFile {
    /// The job that `limb run [flags] -- argv…` asks for.
    ///
    /// # Errors
    /// As [`JobFile::parse`], with the flags as the file.
    pub fn from_argv(flags: &ArgvJob, base_dir: &Path, argv: Vec<Vec<u8>>) -> Result<Self, JobFileError> {
        let yaml = flags.to_yaml(&argv)?;
        // One line of JSON has no lines worth naming.
        Self::parse_with_argv(&yaml, FILE_NAME, base_dir, argv)
            .map_err(|error| JobFileError { line: None, ..error })
    }
}

fn put(map: &mut Map<String, Value>, key: &str, value: Option<Value>) {
    if let Some(value) = value {
        map.insert(key.to_owned(), value);
    }
}

fn section(map: Map<String, Value>) -> Option<Value> {
    (!map.is_empty()).then_some(Value::Object(map))
}

fn add(map: &mut Map<String, Value>, flag: &str, key: &str, value: Value) -> Result<(), JobFileError> {
    match map.insert(key.to_owned(), value) {
        None => Ok(()),
        Some(_) => Err(wrong(flag, key, "give it once")),
    }
}

fn wrong(flag: &str, value: &str, hint: &str) -> JobFileError {
    JobFileError {
        file: FILE_NAME.to_owned(),
        line: None,
        message: format!("{flag} {value:?} cannot be read"),
        hint: Some(hint.to_owned()),
    }
}

/// The last `:/` splits, so that a source may have colons in it.
fn mount(flag: &str) -> Result<(&str, Value), JobFileError> {
    let failed =
        || wrong("--mount", flag, "write it like --mount ./data:/data or --mount ./data:/data:public");
    let at = flag.rfind(":/").ok_or_else(failed)?;
    let (source, rest) = (&flag[..at], &flag[at + 1..]);
    let (point, class) = rest.split_once(':').map_or((rest, None), |(point, class)| (point, Some(class)));
    if source.is_empty() || class == Some("") {
        return Err(failed());
    }
    let mut body = Map::new();
    put(&mut body, "source", Some(source.into()));
    put(&mut body, "class", class.map(Value::from));
    Ok((point, Value::Object(body)))
}

/// `python3 train.py` is called `python3`.
fn command_name(argv: &[Vec<u8>]) -> Option<String> {
    let program = String::from_utf8_lossy(argv.first()?).into_owned();
    let base = program.rsplit('/').next().unwrap_or_default();
    let fit: String =
        base.chars().filter(|c| c.is_ascii_alphanumeric() || matches!(c, '.' | '_' | '-')).take(40).collect();
    let fit = fit.trim_start_matches(['.', '_', '-']).to_owned();
    (!fit.is_empty()).then_some(fit)
}
