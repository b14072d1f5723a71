//! The helper under which a job runs: `limb-agent job-init`, with a socket as its standard
//! input and the log pipe as its output. It starts no threads.
//!
//! The outer process stays outside of the job's PID namespace: it kills the inner one when the
//! socket ends and reports, by its own end, that the whole tree is gone (and, on the owner's
//! machine, holds a part of the box's life until then). The inner one is pid 1:
//! it builds the view, runs the steps, reaps, and ends.
//!
//! Never: read an argument, or leave a descriptor open for the job.

mod exec;
mod steps;

use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::process::ExitCode;

use limb_common::life;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl;
use nix::sys::signal::{SigSet, Signal, kill};
use nix::sys::signalfd::{SfdFlags, SignalFd};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::{ForkResult, Pid, fork, getegid, geteuid, setsid};

use super::messages::{Order, TERMINATE, Told, read_order, tell};
use super::view::ViewError;

const HINT: &str = "hint: run the agent as root, or allow unprivileged user namespaces \
                    (sysctl kernel.unprivileged_userns_clone=1, \
                    kernel.apparmor_restrict_unprivileged_userns=0)";

/// The whole of `limb-agent job-init`. To be called before the program starts any thread.
#[must_use]
pub fn main() -> ExitCode {
    let _leader = setsid();
    // Its end is the agent's end. Death with the parent would be quicker than it may be: this
    // process must outlive the tree, as the proof that there still is one.
    let Ok(socket) = take_socket() else { return ExitCode::FAILURE };
    if let Err(error) = stand_for_the_tree() {
        tell(&socket, &Told::ViewFailed(format!("the tree cannot be accounted for: {error}")));
        return ExitCode::FAILURE;
    }
    let Ok(order) = read_order(&socket) else { return ExitCode::FAILURE };
    // The agent must outlive the job when memory runs out.
    let _said = std::fs::write("/proc/self/oom_score_adj", "500");
    let in_user_namespace = match new_namespaces() {
        Ok(user) => user,
        Err(errno) => {
            tell(&socket, &Told::NoNamespaces(format!("{errno}\n  {HINT}")));
            return ExitCode::FAILURE;
        }
    };
    // SAFETY: this process has one thread, so the child may go on as an ordinary process.
    match unsafe { fork() } {
        Ok(ForkResult::Child) => inner(&socket, order, in_user_namespace),
        Ok(ForkResult::Parent { child }) => {
            drop(order);
            outer(&socket, child)
        }
        Err(errno) => {
            tell(&socket, &Told::NoNamespaces(format!("no pid 1: {errno}")));
            ExitCode::FAILURE
        }
    }
}

/// Where the box is processes on somebody's machine: holds a part of its life.
fn stand_for_the_tree() -> std::io::Result<()> {
    let Some(named) = std::env::var_os(life::VARIABLE) else { return Ok(()) };
    let fd = named.to_str().and_then(|text| text.parse().ok()).filter(|fd| *fd > 2);
    life::join_tree(fd.ok_or_else(|| std::io::Error::from(std::io::ErrorKind::InvalidInput))?)
}

/// Moves the socket off standard input, where /dev/null takes its place.
fn take_socket() -> std::io::Result<UnixStream> {
    let socket = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    let null = std::fs::File::open("/dev/null")?;
    nix::unistd::dup2_stdin(&null)?;
    Ok(socket)
}

/// New mount, PID and IPC namespaces; where that takes a user namespace, that too. True: it did.
fn new_namespaces() -> Result<bool, Errno> {
    let own = CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWPID | CloneFlags::CLONE_NEWIPC;
    match unshare(own) {
        Ok(()) => return Ok(false),
        Err(Errno::EPERM) => {}
        Err(errno) => return Err(errno),
    }
    let (uid, gid) = (geteuid(), getegid());
    unshare(own | CloneFlags::CLONE_NEWUSER)?;
    let write = |path: &str, text: String| {
        std::fs::write(path, text).map_err(|error| error.raw_os_error().map_or(Errno::EIO, Errno::from_raw))
    };
    // Not there before Linux 3.19, and not needed there.
    let _denied = write("/proc/self/setgroups", "deny".to_owned());
    write("/proc/self/uid_map", format!("{uid} {uid} 1"))?;
    write("/proc/self/gid_map", format!("{gid} {gid} 1"))?;
    Ok(true)
}

/// Waits for orders and for the end of the tree.
fn outer(socket: &UnixStream, inner: Pid) -> ExitCode {
    let Ok(signals) = block(&[Signal::SIGCHLD, Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP]) else {
        let _killed = kill(inner, Signal::SIGKILL);
        return ExitCode::FAILURE;
    };
    let mut listening = true;
    loop {
        // The child may have ended before its signal was blocked.
        if !matches!(waitpid(inner, Some(WaitPidFlag::WNOHANG)), Ok(WaitStatus::StillAlive)) {
            return ExitCode::SUCCESS;
        }
        let mut ready =
            [PollFd::new(signals.as_fd(), PollFlags::POLLIN), PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
        let watched = if listening { 2 } else { 1 };
        let _woken = poll(&mut ready[..watched], PollTimeout::NONE);
        if heard(&ready[0]) {
            let _which = signals.read_signal();
        }
        if listening && heard(&ready[1]) {
            listening = obey(socket.as_fd(), inner);
        }
    }
}

/// Carries out what came over the socket. False: there will be no more.
fn obey(socket: BorrowedFd<'_>, inner: Pid) -> bool {
    let mut byte = [0];
    match nix::unistd::read(socket, &mut byte) {
        Ok(1) if byte[0] == TERMINATE => {
            let _sent = kill(inner, Signal::SIGTERM);
            true
        }
        Ok(1..) | Err(Errno::EINTR | Errno::EAGAIN) => true,
        Ok(0) | Err(_) => {
            let _sent = kill(inner, Signal::SIGKILL);
            false
        }
    }
}

fn heard(fd: &PollFd<'_>) -> bool {
    fd.any().unwrap_or(false)
}

fn block(signals: &[Signal]) -> nix::Result<SignalFd> {
    let mut set = SigSet::empty();
    for signal in signals {
        set.add(*signal);
    }
    set.thread_block()?;
    SignalFd::with_flags(&set, SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK)
}

/// pid 1 of the job.
fn inner(socket: &UnixStream, order: Order, in_user_namespace: bool) -> ExitCode {
    let _tied = prctl::set_pdeathsig(Signal::SIGKILL);
    let _leader = setsid();
    if stand_for_the_tree().is_err() {
        return ExitCode::FAILURE;
    }
    let Ok(signals) = block(&[Signal::SIGCHLD, Signal::SIGTERM]) else { return ExitCode::FAILURE };
    // "0" is the writer itself; a group that cannot be entered is done without.
    let outside = order.cgroups.iter().filter(|entrance| std::fs::write(entrance, "0").is_err());
    let outside = outside.cloned().collect();
    let entered = super::view::build::enter(&order.view, in_user_namespace);
    match entered {
        Ok(()) => {}
        Err(error @ ViewError::Overlay(_)) => {
            tell(socket, &Told::OverlayRefused(error.to_string()));
            return ExitCode::FAILURE;
        }
        // Some systems give a user namespace and then no rights in it.
        Err(ViewError::Step { what, path, errno: errno @ (Errno::EPERM | Errno::EACCES) })
            if in_user_namespace =>
        {
            tell(socket, &Told::NoNamespaces(format!("{what} {path}: {errno}\n  {HINT}")));
            return ExitCode::FAILURE;
        }
        Err(error) => {
            tell(socket, &Told::ViewFailed(error.to_string()));
            return ExitCode::FAILURE;
        }
    }
    tell(socket, &Told::ViewReady { outside });
    steps::run_all(socket, &signals, &order);
    ExitCode::SUCCESS
}
