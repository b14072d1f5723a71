//! What a walk found, as it is used afterwards.
//!
//! Never: finds anything itself.

use std::ffi::{CStr, OsStr};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use limb_common::class::DataClass;
use limb_common::manifest::NodeMeta;
use nix::fcntl::{OFlag, openat};
use nix::sys::stat::Mode;

use super::open_path;
use crate::snapshot::{FileIdentity, OutsideLink, Skipped};

/// A source as it was found.
#[derive(Debug, Default)]
pub(in crate::snapshot) struct Walked {
    pub(in crate::snapshot) source: PathBuf,
    pub(in crate::snapshot) single_file: bool,
    pub(in crate::snapshot) label: Option<DataClass>,
    /// The root first, and each before those in it.
    pub(in crate::snapshot) directories: Vec<FoundDirectory>,
    /// Those of one directory side by side.
    pub(in crate::snapshot) files: Vec<FoundFile>,
    pub(in crate::snapshot) outside_links: Vec<OutsideLink>,
    pub(in crate::snapshot) skipped: Vec<Skipped>,
}

#[derive(Debug)]
pub(in crate::snapshot) struct FoundDirectory {
    pub(in crate::snapshot) meta: NodeMeta,
    /// Where it was read.
    pub(in crate::snapshot) path: PathBuf,
    pub(super) names: Arc<Names>,
    /// In order of name.
    pub(in crate::snapshot) entries: Vec<FoundEntry>,
}

#[derive(Debug)]
pub(in crate::snapshot) struct FoundEntry {
    /// Into the directory's names.
    pub(super) name: usize,
    pub(in crate::snapshot) kind: FoundKind,
}

#[derive(Debug)]
pub(in crate::snapshot) enum FoundKind {
    /// Into [`Walked::directories`].
    Directory(usize),
    /// Into [`Walked::files`]; hard links share one.
    File(usize),
    Symlink {
        target: Box<[u8]>,
        mtime_ns: i64,
    },
}

#[derive(Debug)]
pub(in crate::snapshot) struct FoundFile {
    pub(super) place: FilePlace,
    pub(in crate::snapshot) identity: FileIdentity,
    pub(in crate::snapshot) mode: u32,
}

#[derive(Debug)]
pub(super) enum FilePlace {
    In {
        directory: usize,
        name: usize,
    },
    /// Where a followed link led: absolute, no symlink in its last component.
    At(Box<Path>),
}

/// The names in one directory, each with a NUL after it.
#[derive(Debug, Default)]
pub(super) struct Names {
    bytes: Vec<u8>,
    pub(super) starts: Vec<usize>,
}

impl Names {
    pub(super) fn get(&self, at: usize) -> &CStr {
        let from = self.starts.get(at).and_then(|&start| self.bytes.get(start..));
        from.and_then(|bytes| CStr::from_bytes_until_nul(bytes).ok()).unwrap_or_default()
    }

    pub(super) fn push(&mut self, name: &CStr) {
        self.starts.push(self.bytes.len());
        self.bytes.extend_from_slice(name.to_bytes_with_nul());
    }

    pub(super) fn sort(&mut self) {
        let bytes = &self.bytes;
        let name = |start: usize| bytes.get(start..).unwrap_or_default().split(|&byte| byte == 0).next();
        self.starts.sort_by(|&a, &b| name(a).cmp(&name(b)));
    }
}

impl FoundDirectory {
    pub(super) fn new(meta: NodeMeta, path: PathBuf) -> Self {
        Self { meta, path, names: Arc::default(), entries: Vec::new() }
    }

    pub(in crate::snapshot) fn name_of(&self, entry: &FoundEntry) -> &[u8] {
        self.names.get(entry.name).to_bytes()
    }
}

impl Walked {
    /// Absolute, no symlink in its last component.
    pub(in crate::snapshot) fn path(&self, file: &FoundFile) -> PathBuf {
        match &file.place {
            FilePlace::At(path) => path.to_path_buf(),
            FilePlace::In { directory, name } => {
                let directory = &self.directories[*directory];
                directory.path.join(OsStr::from_bytes(directory.names.get(*name).to_bytes()))
            }
        }
    }

    /// Opens a file to read it; `last` is the directory of the one before, which is mostly the same.
    pub(in crate::snapshot) fn open_file(
        &self,
        file: &FoundFile,
        last: &mut Option<(usize, OwnedFd)>,
    ) -> nix::Result<OwnedFd> {
        let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK;
        let (directory, name) = match &file.place {
            FilePlace::At(path) => return open_path(path, flags),
            FilePlace::In { directory, name } => (*directory, *name),
        };
        let names = &self.directories[directory].names;
        let around = match last {
            Some((at, fd)) if *at == directory => fd,
            _ => {
                let fd = open_path(&self.directories[directory].path, OFlag::O_PATH | OFlag::O_DIRECTORY)?;
                &mut last.insert((directory, fd)).1
            }
        };
        openat(around.as_fd(), names.get(name), flags | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW, Mode::empty())
    }
}
