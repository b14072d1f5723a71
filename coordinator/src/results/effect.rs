//! What an entry does to the file system, as a record that can be done again.
//!
//! Invariant: an effect is written to the journal only after every byte it publishes is durable,
//! and it names files by (dev, ino): doing it a second time changes nothing.

use serde::{Deserialize, Serialize};

use super::disk::{Ident, Kind};
use super::writer::lacks_room;

/// An effect and where it belongs.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Intent {
    pub(super) seq: u64,
    pub(super) output: u32,
    pub(super) effect: Effect,
}

/// A file, directory or link as it will be known by name.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Written {
    pub(super) ident: Ident,
    pub(super) kind: Kind,
    pub(super) size: u64,
    pub(super) mtime_ns: i64,
    pub(super) mode: u32,
    pub(super) root: Option<[u8; 32]>,
    /// 32 bytes each; kept beside the record, not in it.
    #[serde(skip)]
    pub(super) values: Vec<u8>,
    /// The visible file is still being written (no clone could be made of it).
    pub(super) open: bool,
}

/// What becomes of the box's file once the effect is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum After {
    /// Not a file of the box (a directory, a link).
    NoFile,
    /// Finished.
    Final { file: u64 },
    /// A copy took the name; the part goes on.
    PartStays { file: u64 },
    /// The part itself took the name and is written on.
    InPlace { file: u64 },
    /// A copy took the name and will grow with the part.
    Grows { file: u64 },
}

impl After {
    pub(super) fn file(self) -> Option<u64> {
        match self {
            Self::NoFile => None,
            Self::Final { file }
            | Self::PartStays { file }
            | Self::InPlace { file }
            | Self::Grows { file } => Some(file),
        }
    }
}

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Effect {
    /// Applied without touching anything.
    Nothing,
    Refused {
        errno: i32,
        detail: String,
    },
    /// The part exists.
    Created {
        file: u64,
        path: Vec<u8>,
    },
    /// `.limb/SOURCE` takes the name.
    Place {
        source: Vec<u8>,
        path: Vec<u8>,
        what: Written,
        after: After,
        /// The box meant the same file: what stands there hands its attributes on.
        #[serde(default)]
        keeps_xattrs: bool,
    },
    /// It has the name already; only what is known of it changes.
    Settle {
        path: Vec<u8>,
        what: Written,
        after: After,
    },
    /// Bytes from..what.size of the part are appended to the visible file.
    Grow {
        part: Vec<u8>,
        path: Vec<u8>,
        from: u64,
        what: Written,
        after: After,
    },
    Rename {
        from: Vec<u8>,
        to: Vec<u8>,
        ident: Ident,
        directory: bool,
        no_replace: bool,
    },
    Remove {
        path: Vec<u8>,
        ident: Ident,
        directory: bool,
    },
    Link {
        existing: Vec<u8>,
        path: Vec<u8>,
        ident: Ident,
    },
    Attributes {
        path: Vec<u8>,
        ident: Ident,
        mode: Option<u32>,
        mtime_ns: Option<i64>,
    },
    Xattr {
        path: Vec<u8>,
        ident: Ident,
        name: Vec<u8>,
        value: Option<Vec<u8>>,
    },
    /// The part (or, where it was published in place, the visible file) is kept under this name.
    Partial {
        file: u64,
        source: Where,
        path: Vec<u8>,
        ident: Ident,
    },
    /// The part goes.
    Drop {
        file: u64,
        part: Vec<u8>,
    },
}

/// Where a file's bytes lie.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Where {
    /// `.limb/NAME`.
    Private(Vec<u8>),
    /// Under its published path.
    Visible(Vec<u8>),
}

impl Effect {
    pub(super) fn refused(errno: nix::errno::Errno, detail: impl Into<String>) -> Self {
        Self::Refused { errno: errno as i32, detail: detail.into() }
    }

    /// The errno of a refusal for want of room.
    pub(super) fn lacks_room(&self) -> Option<nix::errno::Errno> {
        let Self::Refused { errno, .. } = self else { return None };
        Some(nix::errno::Errno::from_raw(*errno)).filter(|errno| lacks_room(*errno))
    }

    pub(super) fn written(&self) -> Option<&Written> {
        match self {
            Self::Place { what, .. } | Self::Settle { what, .. } | Self::Grow { what, .. } => Some(what),
            Self::Nothing
            | Self::Refused { .. }
            | Self::Created { .. }
            | Self::Rename { .. }
            | Self::Remove { .. }
            | Self::Link { .. }
            | Self::Attributes { .. }
            | Self::Xattr { .. }
            | Self::Partial { .. }
            | Self::Drop { .. } => None,
        }
    }

    /// Puts the chunk values back that are kept beside the record.
    pub(super) fn with_values(mut self, given: Vec<u8>) -> Self {
        match &mut self {
            Self::Place { what, .. } | Self::Settle { what, .. } | Self::Grow { what, .. } => {
                what.values = given;
            }
            Self::Nothing
            | Self::Refused { .. }
            | Self::Created { .. }
            | Self::Rename { .. }
            | Self::Remove { .. }
            | Self::Link { .. }
            | Self::Attributes { .. }
            | Self::Xattr { .. }
            | Self::Partial { .. }
            | Self::Drop { .. } => {}
        }
        self
    }

    /// The box's file that it concerns.
    pub(super) fn file(&self) -> Option<u64> {
        match self {
            Self::Place { after, .. } | Self::Settle { after, .. } | Self::Grow { after, .. } => after.file(),
            Self::Created { file, .. } | Self::Partial { file, .. } | Self::Drop { file, .. } => Some(*file),
            Self::Nothing
            | Self::Refused { .. }
            | Self::Rename { .. }
            | Self::Remove { .. }
            | Self::Link { .. }
            | Self::Attributes { .. }
            | Self::Xattr { .. } => None,
        }
    }

    /// Does it change the owner's directories at all?
    pub(super) fn is_quiet(&self) -> bool {
        matches!(self, Self::Nothing | Self::Refused { .. } | Self::Created { .. })
    }
}
