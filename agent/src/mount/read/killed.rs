//! Whether somebody who waits for a read was killed meanwhile. The kernel lets a reader die at once
//! where it waits for a page; of a request that was sent to us for one page alone (a mapping with
//! MADV_RANDOM, a page after a failed read-ahead) it waits for the answer, whatever SIGKILL says, and
//! fuser does not pass its interrupts on. So who has waited for long is looked at.
//!
//! Never: read more of a thread than `status`; `stat` would wait for one that is in execve.

use std::time::Duration;

/// A reader that waits for so long waits for the link. Also how long a killed one lives on.
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Returns when this thread is about to die of a signal. Never, where it is not known (0).
pub(super) async fn killed(thread: u32) {
    if thread == 0 {
        return std::future::pending().await;
    }
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        let status = std::fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
        if must_die(&status) {
            return;
        }
    }
}

/// The kernel makes a SIGKILL for each thread of every signal that ends a program.
fn must_die(status: &str) -> bool {
    let own = status.lines().find_map(|line| line.strip_prefix("SigPnd:"));
    let pending = own.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    pending.is_some_and(|mask| mask & (1 << (libc::SIGKILL - 1)) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_pending_kill_counts() {
        let status = |mask: &str| format!("Name:\tcat\nSigPnd:\t{mask}\nShdPnd:\t0000000000000100\n");
        assert!(must_die(&status("0000000000000100")) && must_die(&status("0000000000004101")));
        assert!(!must_die(&status("0000000000000000")) && !must_die(&status("0000000000004000")));
        assert!(!must_die("") && !must_die("SigPnd:\tx\n"));
    }
}
