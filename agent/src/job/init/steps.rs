//! pid 1's work: one step after the other, reaping whatever ends in between.

use std::os::fd::AsFd as _;
use std::os::unix::net::UnixStream;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::{Signal, kill};
use nix::sys::signalfd::SignalFd;
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::exec::{Refused, start};
use crate::job::messages::{Order, Step, Told, tell};

/// Every process in this namespace but ourselves.
const EVERYBODY: Pid = Pid::from_raw(-1);

/// Returns when the job has ended; whoever is left ends with us. After a SIGTERM it returns when
/// nobody is left: a shell dies of it at once, its children may be saving a checkpoint.
pub(super) fn run_all(socket: &UnixStream, signals: &SignalFd, order: &Order) {
    let mut stopping = false;
    for step in &order.steps {
        let main = match start(order, step) {
            Ok(pid) => pid,
            Err(Refused { code, why }) => {
                tell(socket, &Told::CouldNotStart { step: step.step, code, why });
                break;
            }
        };
        tell(socket, &Told::Started(step.step));
        let told = wait_for(main, step.step, signals, &mut stopping);
        let goes_on =
            told == Told::Exited { step: step.step, code: 0 } && step.step == Step::Setup && !stopping;
        if !goes_on {
            tell(socket, &told);
            break;
        }
    }
    while stopping {
        match reap_one() {
            Reaped::Ended(..) => {}
            Reaped::NothingYet => rest(signals, &mut stopping),
            Reaped::NoneLeft => break,
        }
    }
}

/// Waits for the step's main process; an agent that orders a stop is passed on to everybody.
fn wait_for(main: Pid, step: Step, signals: &SignalFd, stopping: &mut bool) -> Told {
    loop {
        match reap_one() {
            Reaped::Ended(pid, told) if pid == main => return told.into_told(step),
            Reaped::Ended(..) => {}
            Reaped::NothingYet => rest(signals, stopping),
            // Cannot be: the main process is our child until we have reaped it.
            Reaped::NoneLeft => return Told::Signalled { step, signal: libc::SIGKILL },
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ending {
    Code(i32),
    Signal(i32),
}

impl Ending {
    fn into_told(self, step: Step) -> Told {
        match self {
            Self::Code(code) => Told::Exited { step, code },
            Self::Signal(signal) => Told::Signalled { step, signal },
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reaped {
    Ended(Pid, Ending),
    NothingYet,
    NoneLeft,
}

fn reap_one() -> Reaped {
    loop {
        match waitpid(EVERYBODY, Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::Exited(pid, code)) => return Reaped::Ended(pid, Ending::Code(code)),
            Ok(WaitStatus::Signaled(pid, signal, _)) => {
                return Reaped::Ended(pid, Ending::Signal(signal as i32));
            }
            Ok(WaitStatus::StillAlive) => return Reaped::NothingYet,
            // Stops and traces are not ends.
            Ok(_) | Err(Errno::EINTR) => {}
            Err(_) => return Reaped::NoneLeft,
        }
    }
}

/// Sleeps until a child ends or an order comes.
fn rest(signals: &SignalFd, stopping: &mut bool) {
    let _woken = poll(&mut [PollFd::new(signals.as_fd(), PollFlags::POLLIN)], PollTimeout::NONE);
    while let Ok(Some(signal)) = signals.read_signal() {
        if i32::try_from(signal.ssi_signo) == Ok(Signal::SIGTERM as i32) {
            *stopping = true;
            let _sent = kill(EVERYBODY, Signal::SIGTERM);
            // A stopped process takes the signal only when it runs.
            let _woken = kill(EVERYBODY, Signal::SIGCONT);
        }
    }
}
