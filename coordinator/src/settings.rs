//! limb's own settings: flag > environment > `limb.toml` > default, each with its origin.
//!
//! Never: ignore a key. What is not known is an error with its line and a suggestion, as in the
//! job file.

mod file;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use limb_common::units::{parse_duration, parse_size};

use crate::env_names;

/// Everything that can be set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Where agents reach the coordinator. Port 0: chosen once and kept in the state directory.
    pub listen: SocketAddr,
    /// What boxes are told to dial, where that differs from `listen`.
    pub advertise: Option<SocketAddr>,
    /// The `limb-agent` binary that boxes run.
    pub agent: PathBuf,
    pub state_dir: PathBuf,
    /// The owner's socket.
    pub socket: PathBuf,
    /// Used where neither `--on` nor the job file says one.
    pub provider: String,
    /// A coordinator that was started by a command ends after so long without work; none: never.
    pub idle_exit: Option<Duration>,
    /// Chunks are compressed where a box's link is slow enough for it.
    pub compress: bool,
    /// Kept of each attempt's output.
    pub log_quota_bytes: u64,
    /// A tracing filter for the coordinator's own log.
    pub log: String,
    /// Each setting as text with its origin, in the order of the reference.
    pub shown: Vec<Shown>,
}

/// One line of `limb config show`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shown {
    pub key: &'static str,
    pub value: String,
    pub origin: Origin,
}

/// Where a value comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    Flag,
    Environment(&'static str),
    File { path: PathBuf, line: usize },
    Default,
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flag => f.write_str("--set"),
            Self::Environment(name) => write!(f, "${name}"),
            Self::File { path, line } => write!(f, "{}:{line}", path.display()),
            Self::Default => f.write_str("default"),
        }
    }
}

/// The settings cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    #[error("could not read {}", path.display())]
    Unreadable { path: PathBuf, source: std::io::Error },
    #[error("{}:{line}: {message}", path.display())]
    File { path: PathBuf, line: usize, message: String },
    #[error("--set {text:?}: {message}")]
    Flag { text: String, message: String },
    #[error("`{key}` (from {origin}): {message}")]
    Value { key: &'static str, origin: Origin, message: String },
    #[error(
        "neither {} nor {} is set; hint: set one, or --set state_dir=DIR",
        env_names::XDG_STATE_HOME,
        env_names::HOME
    )]
    NoHome,
}

/// The key, the variable and the meaning of each setting.
pub const KEYS: [(&str, &str, &str); 10] = [
    ("listen", env_names::LISTEN, "IP:PORT where agents reach the coordinator (port 0: chosen once, kept)"),
    (
        "advertise",
        env_names::ADVERTISE,
        "IP:PORT that boxes are told to dial, where it differs from `listen`",
    ),
    ("agent", env_names::AGENT, "the limb-agent binary that boxes run"),
    ("state_dir", env_names::STATE_DIR, "ledger, certificate authority, content store"),
    ("socket", env_names::SOCKET, "the unix socket between limb's commands and the coordinator"),
    ("provider", env_names::PROVIDER, "used where neither --on nor the job file names one"),
    (
        "idle_exit",
        env_names::IDLE_EXIT,
        "a coordinator that a command started ends after so long without work (or `never`)",
    ),
    (
        "compress",
        env_names::COMPRESS,
        "`on` or `off`: what boxes read is compressed where their link is slow enough for it",
    ),
    ("log_quota", env_names::LOG_QUOTA, "kept of each attempt's output"),
    ("log", env_names::LOG, "what the coordinator logs, like `info` or `limb=debug`"),
];

const DEFAULT_LISTEN: &str = "127.0.0.1:0";
const DEFAULT_IDLE_EXIT: &str = "10m";
/// A job that prints 1 MB/s for a quarter of an hour is kept whole.
const DEFAULT_LOG_QUOTA: &str = "1GB";
const DEFAULT_LOG: &str = "info";
const NEVER: &str = "never";

/// Where values may come from. All of it is an argument, so that a test has its own.
#[derive(Debug, Default)]
pub struct Sources {
    /// `--config`.
    pub config: Option<PathBuf>,
    /// `--set KEY=VALUE`, in order.
    pub flags: Vec<String>,
    pub env: Vec<(String, OsString)>,
    /// Directory of the running binary: the agent lies beside it.
    pub bin_dir: Option<PathBuf>,
}

impl Sources {
    /// The process's own environment and place.
    #[must_use]
    pub fn of_process(config: Option<PathBuf>, flags: Vec<String>) -> Self {
        let env =
            std::env::vars_os().filter_map(|(name, value)| Some((name.into_string().ok()?, value))).collect();
        let bin_dir = std::env::current_exe().ok().and_then(|exe| exe.parent().map(Path::to_owned));
        Self { config, flags, env, bin_dir }
    }

    fn var(&self, name: &str) -> Option<&OsString> {
        let found = self.env.iter().find(|(known, _)| known == name).map(|(_, value)| value);
        found.filter(|value| !value.is_empty())
    }

    fn xdg(&self, name: &str, below_home: &str) -> Option<PathBuf> {
        let absolute = |value: &OsString| Some(PathBuf::from(value)).filter(|path| path.is_absolute());
        self.var(name)
            .and_then(absolute)
            .or_else(|| self.var(env_names::HOME).and_then(absolute).map(|home| home.join(below_home)))
    }

    /// The settings file, whether or not it is there.
    #[must_use]
    pub fn config_path(&self) -> Option<PathBuf> {
        self.config
            .clone()
            .or_else(|| self.var(env_names::CONFIG).map(PathBuf::from))
            .or_else(|| Some(self.xdg(env_names::XDG_CONFIG_HOME, ".config")?.join("limb/limb.toml")))
    }
}

/// A value as text, before it is read.
type Raw = (String, Origin);

impl Settings {
    /// Reads everything.
    ///
    /// # Errors
    /// The first thing that is wrong, with its origin.
    pub fn load(sources: &Sources) -> Result<Self, SettingsError> {
        let flags = sources.flags.iter().map(|flag| file::flag(flag)).collect::<Result<Vec<_>, _>>()?;
        let named = sources.config.is_some() || sources.var(env_names::CONFIG).is_some();
        let from_file = sources.config_path().map_or(Ok(Vec::new()), |path| file::read(&path, named))?;
        let given = |key: &'static str| -> Option<Raw> {
            let flag = flags.iter().rev().find(|(known, _)| *known == key);
            if let Some((_, value)) = flag {
                return Some((value.clone(), Origin::Flag));
            }
            let variable =
                KEYS.iter().find(|(known, _, _)| *known == key).map(|(_, variable, _)| *variable)?;
            if let Some(value) = sources.var(variable) {
                return Some((value.to_string_lossy().into_owned(), Origin::Environment(variable)));
            }
            let (_, value, origin) = from_file.iter().find(|(known, _, _)| *known == key)?;
            Some((value.clone(), origin.clone()))
        };
        let mut reader = Reader { given: &given, shown: Vec::new() };
        let state_default =
            sources.xdg(env_names::XDG_STATE_HOME, ".local/state").map(|dir| dir.join("limb"));
        let agent_default = sources.bin_dir.as_deref().unwrap_or(Path::new("/usr/bin")).join("limb-agent");

        let listen = reader.required("listen", DEFAULT_LISTEN, parse_address)?;
        let advertise = reader.optional("advertise", parse_address)?;
        let agent = reader.required("agent", &agent_default.to_string_lossy(), parse_path)?;
        let state_dir = match state_default {
            Some(dir) => reader.required("state_dir", &dir.to_string_lossy(), parse_path)?,
            None => reader.optional("state_dir", parse_path)?.ok_or(SettingsError::NoHome)?,
        };
        let socket = reader.required("socket", &state_dir.join("limb.sock").to_string_lossy(), parse_path)?;
        let provider = reader.required("provider", "local", |text| Ok(text.to_owned()))?;
        let idle_exit = reader.required("idle_exit", DEFAULT_IDLE_EXIT, |text| {
            if text == NEVER { Ok(None) } else { parse_duration(text).map(Some).map_err(|e| e.to_string()) }
        })?;
        let compress = reader.required("compress", "on", parse_switch)?;
        let log_quota_bytes = reader
            .required("log_quota", DEFAULT_LOG_QUOTA, |text| parse_size(text).map_err(|e| e.to_string()))?;
        let log = reader.required("log", DEFAULT_LOG, |text| Ok(text.to_owned()))?;
        let shown = reader.shown;
        Ok(Self {
            listen,
            advertise,
            agent,
            state_dir,
            socket,
            provider,
            idle_exit,
            compress,
            log_quota_bytes,
            log,
            shown,
        })
    }

    /// What a process that is started with the same settings needs on its command line.
    #[must_use]
    pub fn as_flags(&self) -> Vec<String> {
        self.shown
            .iter()
            .filter(|shown| !shown.value.is_empty() && shown.origin != Origin::Default)
            .flat_map(|shown| ["--set".to_owned(), format!("{}={}", shown.key, shown.value)])
            .collect()
    }
}

struct Reader<'a> {
    given: &'a dyn Fn(&'static str) -> Option<Raw>,
    shown: Vec<Shown>,
}

impl Reader<'_> {
    fn required<T>(
        &mut self,
        key: &'static str,
        default: &str,
        read: impl Fn(&str) -> Result<T, String>,
    ) -> Result<T, SettingsError> {
        let (text, origin) = (self.given)(key).unwrap_or_else(|| (default.to_owned(), Origin::Default));
        let value =
            read(&text).map_err(|message| SettingsError::Value { key, origin: origin.clone(), message })?;
        self.shown.push(Shown { key, value: text, origin });
        Ok(value)
    }

    fn optional<T>(
        &mut self,
        key: &'static str,
        read: impl Fn(&str) -> Result<T, String>,
    ) -> Result<Option<T>, SettingsError> {
        if (self.given)(key).is_some() {
            return self.required(key, "", read).map(Some);
        }
        self.shown.push(Shown { key, value: String::new(), origin: Origin::Default });
        Ok(None)
    }
}

fn parse_address(text: &str) -> Result<SocketAddr, String> {
    text.parse().map_err(|_| format!("{text:?} is not an address; hint: write it like 127.0.0.1:7433"))
}

fn parse_switch(text: &str) -> Result<bool, String> {
    match text {
        "on" => Ok(true),
        "off" => Ok(false),
        _ => Err(format!("{text:?} is neither `on` nor `off`")),
    }
}

fn parse_path(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    if path.is_absolute() { Ok(path) } else { Err(format!("{text:?} is not an absolute path")) }
}
