//! Bytes that nobody has asked for, pushed into the kernel's page cache of one mount.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fuser::{INodeNo, Notifier};
use limb_common::manifest::Inode;

/// Shut when the end of the mount begins. Whoever shuts it does not wait for a push that is under
/// way: that may stand behind a request which only the abort frees.
#[derive(Debug, Default)]
pub(super) struct Gate(AtomicBool);

impl Gate {
    pub(super) fn shut(&self) {
        self.0.store(true, Ordering::SeqCst);
    }

    fn is_shut(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }
}

/// What became of a push.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored {
    Done,
    /// The mount is ending: nothing will be pushed any more.
    Ending,
}

/// For one thread that does nothing else.
#[derive(Debug)]
pub struct Storer {
    notifier: Notifier,
    gate: Arc<Gate>,
}

impl Storer {
    pub(super) fn new(notifier: Notifier, gate: Arc<Gate>) -> Self {
        Self { notifier, gate }
    }

    #[must_use]
    pub fn is_ending(&self) -> bool {
        self.gate.is_shut()
    }

    /// Puts `bytes` into the page cache at `offset`. What lies past the end of the file makes the
    /// file longer, so the caller keeps within it. A file that the kernel does not know is no error.
    ///
    /// Waits for the lock of each page, so for the answer to a read of it that is under way, and
    /// nothing but that answer or the mount's abort ends the wait, not even SIGKILL. Never from a
    /// thread that answers requests or holds what such a thread may wait for.
    ///
    /// # Errors
    /// The kernel refused.
    pub fn store(&self, inode: Inode, offset: u64, bytes: &[u8]) -> io::Result<Stored> {
        if self.is_ending() {
            return Ok(Stored::Ending);
        }
        match self.notifier.store(INodeNo(inode.0), offset, bytes) {
            Err(_) if self.is_ending() => Ok(Stored::Ending),
            outcome => outcome.map(|()| Stored::Done),
        }
    }
}
