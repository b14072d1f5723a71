//! What the job sees: the host's own files read-only, a fresh /proc, private RAM for /tmp,
//! /var/tmp, /dev/shm and HOME, a writable workdir, and the job's mounts at their absolute paths.
//!
//! Never: create or change anything on the host. A mount point that does not exist there is
//! made in the view: its parent becomes a directory in RAM, beside binds of what it held.

pub(crate) mod build;
mod tree;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::messages::{raw_path, raw_paths};

/// Where the workdir is, in every view.
pub const WORKDIR: &str = "/workdir";
/// Where HOME is, unless the caller says otherwise.
pub const HOME: &str = "/home/job";

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct View {
    /// An empty directory inside the agent's private directory; the new root is put together
    /// over it, in the job's own mount namespace only.
    #[serde(with = "raw_path")]
    pub staging: PathBuf,
    pub mounts: Vec<Bind>,
    pub workdir: Workdir,
    /// Directories that the job must not see: the agent's private one, home's state.
    #[serde(with = "raw_paths")]
    pub hide: Vec<PathBuf>,
    #[serde(with = "raw_path")]
    pub home: PathBuf,
}

/// A directory or file that exists now, shown at another path.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bind {
    #[serde(with = "raw_path")]
    pub source: PathBuf,
    /// Absolute, in the view.
    #[serde(with = "raw_path")]
    pub target: PathBuf,
    pub access: Access,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Access {
    ReadOnly,
    ReadWrite,
}

/// What is at [`WORKDIR`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Workdir {
    /// The set at `lower`, with changes going into `layer` (see [`super::layer::WorkdirLayer`]).
    Overlay {
        #[serde(with = "raw_path")]
        lower: PathBuf,
        #[serde(with = "raw_path")]
        layer: PathBuf,
    },
    /// A mount that is writable by itself.
    Ready {
        #[serde(with = "raw_path")]
        source: PathBuf,
    },
    /// Nothing at first; what the job writes goes into `layer`.
    Empty {
        #[serde(with = "raw_path")]
        layer: PathBuf,
    },
}

/// Why a view could not be built.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ViewError {
    #[error("{what} {path}: {errno}")]
    Step { what: &'static str, path: String, errno: nix::errno::Errno },
    #[error("{0}")]
    Overlay(String),
    #[error("{path} cannot be a mount point: {why}")]
    BadTarget { path: String, why: &'static str },
}
