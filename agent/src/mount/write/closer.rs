//! Who closes a descriptor, and whether they do so because they were killed. The kernel sends
//! FLUSH from the closing thread and waits for our answer, so that thread can be looked at.
//!
//! Never: take what cannot be known for a death. A thread that is in no `/proc` of ours closes
//! its files in an orderly way as far as we know.
//!
//! Never: read `stat` or a link below `/proc/PID/ns` of a thread that is not ending. execve closes
//! files while it holds the lock that those reads take, so the reader and the thread would wait
//! for each other for good. `statm` and `status` take no such lock.

/// The kernel's PF_EXITING: the thread is past the point where it could run on.
const EXITING: u64 = 0x4;
/// The kernel's PF_SIGNALED: a signal ended the thread. Also set in the other threads of a program
/// that calls exit(3), which are taken down by a SIGKILL from within.
const SIGNALED: u64 = 0x400;
/// The low bits of a wait status: the signal, 0 after exit(2).
const SIGNAL_BITS: u64 = 0x7f;

/// Where numbers stand in `/proc/PID/stat`, counted from the field after the program's name
/// (field 3 in proc(5)).
const FLAGS: usize = 9 - 3;
const EXIT_CODE: usize = 52 - 3;

/// The process that a thread belongs to: FUSE names the thread.
pub(super) fn process_of(thread: u32) -> u32 {
    let status = std::fs::read_to_string(format!("/proc/{thread}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("Tgid:"));
    line.and_then(|text| text.trim().parse().ok()).unwrap_or(thread)
}

/// Whether this thread is ending because its process was killed by a signal. 0 stands for a
/// thread that the kernel could not name to us.
pub(super) fn was_killed(thread: u32) -> bool {
    if thread == 0 || !has_left_its_memory(thread) {
        return false;
    }
    let stat = std::fs::read(format!("/proc/{thread}/stat")).ok();
    // The kernel asks for the same right to show this link as to show the exit code.
    let may_see = || std::fs::read_link(format!("/proc/{thread}/ns/user")).is_ok();
    stat.and_then(|stat| killed(&stat, may_see)).unwrap_or(false)
}

/// An ending thread gives up its memory before it closes its files; `statm` then counts none of
/// it. A thread that executes a program has the new program's memory by then. Asked at each close
/// of a file that was written: `status` says the same and takes the kernel twice as long.
fn has_left_its_memory(thread: u32) -> bool {
    std::fs::read(format!("/proc/{thread}/statm")).is_ok_and(|pages| pages.starts_with(b"0 "))
}

fn killed(stat: &[u8], may_see_code: impl FnOnce() -> bool) -> Option<bool> {
    // The name may hold anything, so its end is the last parenthesis.
    let after = stat.iter().rposition(|byte| *byte == b')')? + 1;
    let text = std::str::from_utf8(stat.get(after..)?).ok()?;
    let fields: Vec<&str> = text.split_ascii_whitespace().collect();
    let number = |index: usize| fields.get(index)?.parse::<u64>().ok();
    let flags = number(FLAGS)?;
    if flags & EXITING == 0 {
        return Some(false);
    }
    // The thread's own code is its group's: the kernel's do_group_exit sees to that. Who may not
    // see it is shown 0.
    match number(EXIT_CODE) {
        Some(code @ 1..) => Some(code & SIGNAL_BITS != 0),
        Some(0) | None => Some(flags & SIGNALED != 0 && !may_see_code()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stat(name: &str, flags: u64, code: u64) -> Vec<u8> {
        let mut fields = vec![0_u64; 50];
        fields[FLAGS] = flags;
        fields[EXIT_CODE] = code;
        let rest: Vec<String> = fields[1..].iter().map(u64::to_string).collect();
        format!("7 ({name}) R {}\n", rest.join(" ")).into_bytes()
    }

    #[test]
    fn the_exit_code_decides_and_the_flags_stand_in_for_it() {
        let seen = |flags, code| killed(&stat("a) R (b", flags, code), || true);
        assert_eq!(seen(SIGNALED, 9), Some(false), "it is not ending");
        assert_eq!(seen(EXITING, 0), Some(false));
        assert_eq!(seen(EXITING, 3 << 8), Some(false));
        assert_eq!(seen(EXITING | SIGNALED, 0), Some(false), "exit of a program with threads");
        assert_eq!(seen(EXITING | SIGNALED, 1 << 8), Some(false));
        assert_eq!(seen(EXITING | SIGNALED, 9), Some(true));
        assert_eq!(seen(EXITING | SIGNALED, 11 | 0x80), Some(true), "with a core dump");
        let hidden = |flags| killed(&stat("a", flags, 0), || false);
        assert_eq!(hidden(EXITING | SIGNALED), Some(true));
        assert_eq!(hidden(EXITING), Some(false));
        assert_eq!(killed(b"7 (x) R 1 2", || true), None);
        assert_eq!(killed(b"", || true), None);
        assert!(!was_killed(0) && !was_killed(std::process::id()));
    }
}
