//! One program of the job, from fork to execve.

use std::ffi::{CString, OsStr};
use std::fs;
use std::io::{Read as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::signal::SigSet;
use nix::sys::stat::{Mode, umask};
use nix::unistd::{ForkResult, Pid, chdir, execve, fork, pipe2, setsid};

use crate::job::messages::{Order, StepOrder};

/// What a container's root may do, plus what training code asks for: nice, mlock, ptrace. It may
/// not mount, so that the view stays what it is.
const KEPT_CAPABILITIES: [u8; 17] = [
    0,  // CHOWN
    1,  // DAC_OVERRIDE
    3,  // FOWNER
    4,  // FSETID
    5,  // KILL
    6,  // SETGID
    7,  // SETUID
    8,  // SETPCAP
    10, // NET_BIND_SERVICE
    13, // NET_RAW
    14, // IPC_LOCK
    18, // SYS_CHROOT
    19, // SYS_PTRACE
    23, // SYS_NICE
    24, // SYS_RESOURCE
    29, // AUDIT_WRITE
    31, // SETFCAP
];
/// The kernel knows 41; it refuses numbers that it does not know.
const CAPABILITIES: u8 = 64;
/// What a shell says.
const NOT_FOUND: i32 = 127;
const NOT_EXECUTABLE: i32 = 126;

pub(super) struct Refused {
    pub(super) code: i32,
    pub(super) why: String,
}

/// Starts the step's program in a session of its own.
pub(super) fn start(order: &Order, step: &StepOrder) -> Result<Pid, Refused> {
    let argv = c_strings(&step.argv)?;
    let env = c_strings(&order.env)?;
    let name = step.argv.first().map(Vec::as_slice).unwrap_or_default();
    let cwd = PathBuf::from(OsStr::from_bytes(&order.cwd));
    chdir(&cwd)
        .map_err(|errno| refused(NOT_EXECUTABLE, format!("cannot start in {}: {errno}", cwd.display())))?;
    let program = find(name, &order.env)?;
    let path = c_string(program.as_os_str().as_bytes())?;
    let (answer, ask) =
        pipe2(OFlag::O_CLOEXEC).map_err(|errno| refused(NOT_EXECUTABLE, errno.to_string()))?;
    // SAFETY: this process has one thread, so the child may go on as an ordinary process.
    match unsafe { fork() } {
        Ok(ForkResult::Child) => {
            drop(answer);
            let errno = become_program(&path, &argv, &env);
            let _told = fs::File::from(ask).write_all(&(errno as i32).to_le_bytes());
            // SAFETY: ends this process at once, without running what the parent registered.
            unsafe { libc::_exit(NOT_EXECUTABLE) }
        }
        Ok(ForkResult::Parent { child }) => {
            drop(ask);
            let mut errno = [0; 4];
            match fs::File::from(answer).read_exact(&mut errno) {
                // It closed on exec.
                Err(_) => Ok(child),
                Ok(()) => Err(explain(Errno::from_raw(i32::from_le_bytes(errno)), &program)),
            }
        }
        Err(errno) => Err(refused(NOT_EXECUTABLE, format!("no new process: {errno}"))),
    }
}

/// Returns only if the program could not be executed.
fn become_program(path: &CString, argv: &[CString], env: &[CString]) -> Errno {
    let _leader = setsid();
    umask(Mode::from_bits_truncate(0o022));
    for signal in 1..=libc::SIGRTMAX() {
        // SAFETY: the default action runs no code of ours; some signals refuse, which is fine.
        let _before = unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    let _unblocked = SigSet::all().thread_unblock();
    for capability in (0..CAPABILITIES).filter(|number| !KEPT_CAPABILITIES.contains(number)) {
        // SAFETY: plain numbers; refused without the right to, which is fine.
        let _dropped =
            unsafe { libc::prctl(libc::PR_CAPBSET_DROP, libc::c_ulong::from(capability), 0, 0, 0) };
    }
    // SAFETY: plain numbers; marks descriptors, closes none before the exec.
    let marked = unsafe {
        libc::syscall(libc::SYS_close_range, 3, u32::MAX, 4 /* CLOSE_RANGE_CLOEXEC */)
    };
    if marked != 0 {
        close_on_exec_one_by_one();
    }
    match execve(path, argv, env) {
        Ok(never) => match never {},
        Err(errno) => errno,
    }
}

/// Linux before 5.11.
fn close_on_exec_one_by_one() {
    for entry in fs::read_dir("/proc/self/fd").into_iter().flatten().flatten() {
        let number = entry.file_name().to_str().and_then(|name| name.parse::<i32>().ok());
        if let Some(fd) = number.filter(|fd| *fd > 2) {
            // SAFETY: sets a flag; a number that is no descriptor is refused.
            let _marked = unsafe { libc::fcntl(fd, libc::F_SETFD, libc::FD_CLOEXEC) };
        }
    }
}

/// Looks `name` up as execvp does, in the job's own PATH and the job's own view.
fn find(name: &[u8], env: &[Vec<u8>]) -> Result<PathBuf, Refused> {
    let shown = String::from_utf8_lossy(name).into_owned();
    if name.is_empty() {
        return Err(refused(NOT_FOUND, "no program was named".to_owned()));
    }
    if name.contains(&b'/') {
        return Ok(PathBuf::from(OsStr::from_bytes(name)));
    }
    let path =
        env.iter().find_map(|pair| pair.strip_prefix(b"PATH=")).unwrap_or(b"/usr/local/bin:/usr/bin:/bin");
    let mut found_unusable = None;
    for directory in path.split(|byte| *byte == b':') {
        let directory = if directory.is_empty() { b"." } else { directory };
        let candidate = Path::new(OsStr::from_bytes(directory)).join(OsStr::from_bytes(name));
        let Ok(meta) = fs::metadata(&candidate) else { continue };
        if meta.is_file() && meta.permissions().mode() & 0o111 != 0 {
            return Ok(candidate);
        }
        found_unusable.get_or_insert(candidate);
    }
    match found_unusable {
        Some(candidate) => Err(refused(
            NOT_EXECUTABLE,
            format!("{} is not executable\n  hint: chmod +x at home", candidate.display()),
        )),
        None => Err(refused(NOT_FOUND, format!("{shown}: no such program in PATH"))),
    }
}

/// Says why in the words of the person who has to mend it.
fn explain(errno: Errno, program: &Path) -> Refused {
    let shown = program.display();
    match errno {
        Errno::ENOENT if program.exists() => {
            let why = match interpreter(program) {
                Some(name) => format!("{shown}: its interpreter {name} does not exist"),
                None => format!("{shown}: the loader it was linked for does not exist"),
            };
            refused(NOT_EXECUTABLE, why)
        }
        Errno::ENOENT | Errno::ENOTDIR => refused(NOT_FOUND, format!("{shown}: no such file")),
        Errno::ENOEXEC => refused(
            NOT_EXECUTABLE,
            format!("{shown} is neither a program nor a script\n  hint: start it with a line like #!/bin/sh"),
        ),
        Errno::EACCES if program.is_dir() => refused(NOT_EXECUTABLE, format!("{shown} is a directory")),
        Errno::EACCES => refused(
            NOT_EXECUTABLE,
            format!("{shown}: it or its interpreter is not executable\n  hint: chmod +x at home"),
        ),
        Errno::E2BIG => refused(
            NOT_EXECUTABLE,
            format!("{shown}: arguments and environment are too long\n  hint: put a long script into a file"),
        ),
        other => refused(NOT_EXECUTABLE, format!("{shown}: {other}")),
    }
}

fn interpreter(program: &Path) -> Option<String> {
    let mut head = [0; 256];
    let count = fs::File::open(program).ok()?.read(&mut head).ok()?;
    let line = head.get(..count)?.strip_prefix(b"#!")?.split(|byte| *byte == b'\n').next()?;
    let text = String::from_utf8_lossy(line);
    // A line that ends in \r is the usual reason why an interpreter "does not exist".
    text.trim_start_matches([' ', '\t']).split([' ', '\t']).next().map(|name| format!("{name:?}"))
}

fn refused(code: i32, why: String) -> Refused {
    Refused { code, why }
}

fn c_strings(all: &[Vec<u8>]) -> Result<Vec<CString>, Refused> {
    all.iter().map(|bytes| c_string(bytes)).collect()
}

fn c_string(bytes: &[u8]) -> Result<CString, Refused> {
    CString::new(bytes).map_err(|_| refused(NOT_EXECUTABLE, "an argument contains a NUL byte".to_owned()))
}
