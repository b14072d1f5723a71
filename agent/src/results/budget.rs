//! How many bytes of the job's writes are held that home does not have yet.
//!
//! Invariant: what is held is charged by the charges that live; there is no other way to change it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::Notify;

/// The limit, and who waits for room. Shared by all outputs of an agent.
#[derive(Debug)]
pub struct Budget {
    used_bytes: AtomicU64,
    limit_bytes: u64,
    freed: Notify,
}

impl Budget {
    #[must_use]
    pub fn new(limit_bytes: u64) -> Arc<Self> {
        Arc::new(Self { used_bytes: AtomicU64::new(0), limit_bytes, freed: Notify::new() })
    }

    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.used_bytes.load(Ordering::SeqCst)
    }

    #[must_use]
    pub fn is_over(&self) -> bool {
        self.used_bytes() >= self.limit_bytes
    }

    /// Waits until there is room.
    pub async fn room(&self) {
        loop {
            let freed = self.freed.notified();
            if !self.is_over() {
                return;
            }
            freed.await;
        }
    }

    pub(crate) fn charge(self: &Arc<Self>) -> Charge {
        Charge { budget: Arc::clone(self), bytes: 0 }
    }
}

/// Bytes that count. Dropping it gives them back.
#[derive(Debug)]
pub(crate) struct Charge {
    budget: Arc<Budget>,
    bytes: u64,
}

impl Charge {
    pub(crate) fn set(&mut self, bytes: usize) {
        let bytes = bytes as u64;
        if bytes >= self.bytes {
            self.budget.used_bytes.fetch_add(bytes - self.bytes, Ordering::SeqCst);
        } else {
            self.budget.used_bytes.fetch_sub(self.bytes - bytes, Ordering::SeqCst);
            self.budget.freed.notify_waiters();
        }
        self.bytes = bytes;
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.set(0);
    }
}
