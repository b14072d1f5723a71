//! What the agent and the job's helper say to each other over their socket: the order first,
//! length-prefixed JSON; then lines of JSON from the helper and single bytes to it.

use std::io::{self, Read, Write};

use limb_common::report::JobStep;
use serde::{Deserialize, Serialize};
use zeroize::Zeroize;

use super::view::View;

/// A byte to the helper: SIGTERM to the whole tree. The end of the stream: kill it.
pub(crate) const TERMINATE: u8 = b'T';
/// More than any environment the kernel accepts.
const ORDER_MAX_BYTES: u64 = 64 << 20;

#[derive(Serialize, Deserialize)]
pub(crate) struct Order {
    pub(crate) steps: Vec<StepOrder>,
    /// `NAME=value`, as execve takes them.
    pub(crate) env: Vec<Vec<u8>>,
    pub(crate) cwd: Vec<u8>,
    pub(crate) view: View,
    /// `cgroup.procs` files to enter.
    pub(crate) cgroups: Vec<String>,
}

impl Drop for Order {
    fn drop(&mut self) {
        // Secrets are among them.
        self.env.iter_mut().for_each(Zeroize::zeroize);
    }
}

#[derive(Serialize, Deserialize)]
pub(crate) struct StepOrder {
    pub(crate) step: Step,
    pub(crate) argv: Vec<Vec<u8>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Step {
    Setup,
    Run,
}

impl From<Step> for JobStep {
    fn from(step: Step) -> Self {
        match step {
            Step::Setup => Self::Setup,
            Step::Run => Self::Run,
        }
    }
}

/// From the helper.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Told {
    NoNamespaces(String),
    OverlayRefused(String),
    ViewFailed(String),
    /// `outside`: those of [`Order::cgroups`] that could not be entered.
    ViewReady {
        outside: Vec<String>,
    },
    Started(Step),
    Exited {
        step: Step,
        code: i32,
    },
    Signalled {
        step: Step,
        signal: i32,
    },
    CouldNotStart {
        step: Step,
        code: i32,
        why: String,
    },
}

pub(crate) fn send_order(mut to: impl Write, order: &Order) -> io::Result<()> {
    let mut bytes = serde_json::to_vec(order).map_err(io::Error::other)?;
    let sent = to.write_all(&(bytes.len() as u64).to_le_bytes()).and_then(|()| to.write_all(&bytes));
    bytes.zeroize();
    sent
}

pub(crate) fn read_order(mut from: impl Read) -> io::Result<Order> {
    let mut length = [0; 8];
    from.read_exact(&mut length)?;
    let length = u64::from_le_bytes(length);
    if length > ORDER_MAX_BYTES {
        return Err(io::Error::other("the order is too long"));
    }
    let mut bytes = Vec::new();
    from.take(length).read_to_end(&mut bytes)?;
    let order = serde_json::from_slice(&bytes).map_err(io::Error::other);
    bytes.zeroize();
    order
}

pub(crate) fn tell(mut to: impl Write, told: &Told) {
    // An agent that no longer listens is dying, and so is this tree.
    if let Ok(mut line) = serde_json::to_vec(told) {
        line.push(b'\n');
        let _unheard = to.write_all(&line);
    }
}

/// Paths are bytes; JSON text is not.
pub(crate) mod raw_path {
    use std::ffi::OsString;
    use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
    use std::path::{Path, PathBuf};

    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    pub(crate) fn serialize<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
        path.as_os_str().as_bytes().serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
        Ok(PathBuf::from(OsString::from_vec(Vec::<u8>::deserialize(from)?)))
    }
}

pub(crate) mod raw_paths {
    use std::ffi::OsString;
    use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
    use std::path::PathBuf;

    use serde::{Deserialize as _, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(paths: &[PathBuf], to: S) -> Result<S::Ok, S::Error> {
        to.collect_seq(paths.iter().map(|path| path.as_os_str().as_bytes()))
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Vec<PathBuf>, D::Error> {
        let raw = Vec::<Vec<u8>>::deserialize(from)?;
        Ok(raw.into_iter().map(|bytes| PathBuf::from(OsString::from_vec(bytes))).collect())
    }
}
