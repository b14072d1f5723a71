//! What ends this box when home is gone. An OS thread with its own timer holds the deadline; on
//! expiry it destroys, in order, everything that this agent holds:
//!
//! ```text
//!   armed ──▶ over ──▶ abort mounts ─▶ kill job ─▶ drop keys ─▶ unmount, wipe ─▶ power off
//! ```
//!
//! Every step has a bound and a thread of its own, so that a frozen one delays the next by its
//! bound and blocks none. All together take at most 2 s.
//!
//! Invariants: what is over stays over; the deadline is checked again ([`Leash::guard`]) right
//! before every outward effect, since a stopped process wakes with its timers late.
//! Never: the async runtime, tonic, or anything that may panic.

use std::os::fd::AsFd as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError, mpsc};
use std::thread;
use std::time::Duration;

use limb_common::clock::{BootInstant, boottime};
use limb_common::lease::LeaseOver;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::time::TimeSpec;
use nix::sys::timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags};

/// The thread looks at least this often, whatever its timer says.
const TICK: u16 = 100;

const UNARMED: u64 = u64::MAX;
const OVER: u64 = 0;

/// When in the destruction a step runs. The order is the order of the variants.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Stage {
    /// Pending FUSE requests are answered: a job blocked on one ignores SIGKILL.
    AbortMounts,
    KillJob,
    DropKeys,
    /// Unmount and remove the private directory.
    Wipe,
    /// Runs on expiry only; an ordered end returns to `main` instead.
    PowerOff,
}

const STAGES: [Stage; 5] =
    [Stage::AbortMounts, Stage::KillJob, Stage::DropKeys, Stage::Wipe, Stage::PowerOff];

impl Stage {
    /// The bounds add up to 2 s.
    fn bound(self) -> Duration {
        Duration::from_millis(match self {
            Self::AbortMounts => 300,
            Self::KillJob => 500,
            Self::DropKeys => 100,
            Self::Wipe => 900,
            Self::PowerOff => 200,
        })
    }
}

type Work = Box<dyn FnOnce() + Send>;

struct Step {
    stage: Stage,
    name: &'static str,
    work: Work,
}

struct Shared {
    /// Nanoseconds of CLOCK_BOOTTIME; [`UNARMED`] or [`OVER`] at the ends.
    deadline: AtomicU64,
    steps: Mutex<Vec<Step>>,
    /// Why it was tripped before its time.
    reason: Mutex<&'static str>,
}

/// Handle to the leash. Clones are the same leash.
#[derive(Clone)]
pub struct Leash {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Leash {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Leash").field("deadline", &self.shared.deadline).finish_non_exhaustive()
    }
}

/// The leash's thread could not be started.
#[derive(Debug, thiserror::Error)]
pub enum LeashError {
    #[error("could not make the leash's timer")]
    Timer(#[from] nix::Error),
    #[error("could not start the leash's thread")]
    Thread(#[from] std::io::Error),
}

impl Leash {
    /// Starts the thread. Until [`Self::arm`] nothing is granted and nothing expires.
    ///
    /// # Errors
    /// No timer or no thread; an agent without a leash must not go on.
    pub fn start() -> Result<Self, LeashError> {
        let shared = Arc::new(Shared {
            deadline: AtomicU64::new(UNARMED),
            steps: Mutex::new(Vec::new()),
            reason: Mutex::new("home has not renewed the lease in time"),
        });
        let timer =
            TimerFd::new(ClockId::CLOCK_BOOTTIME, TimerFlags::TFD_NONBLOCK | TimerFlags::TFD_CLOEXEC)?;
        let watched = Arc::clone(&shared);
        thread::Builder::new().name("leash".to_owned()).spawn(move || watch(&watched, &timer))?;
        Ok(Self { shared })
    }

    /// The first lease. A second call is a renewal.
    ///
    /// # Errors
    /// [`LeaseOver`] when it has passed already.
    pub fn arm(&self, sent: BootInstant, ttl: Duration) -> Result<(), LeaseOver> {
        let deadline = nanos(sent + ttl);
        let armed =
            self.shared.deadline.compare_exchange(UNARMED, deadline, Ordering::AcqRel, Ordering::Acquire);
        match armed {
            Ok(_) => self.guard(),
            Err(_) => self.renew(sent, ttl),
        }
    }

    /// Home answered a beat that was sent at `sent`.
    ///
    /// # Errors
    /// [`LeaseOver`]: too late, for ever.
    pub fn renew(&self, sent: BootInstant, ttl: Duration) -> Result<(), LeaseOver> {
        let deadline = nanos(sent + ttl);
        let update = |current| {
            let alive = current != OVER && nanos(boottime()) < current;
            // Only arming ends the unarmed state, and only expiry shortens.
            alive.then(|| if current == UNARMED { UNARMED } else { deadline.max(current) })
        };
        self.shared
            .deadline
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, update)
            .map(drop)
            .map_err(|_| LeaseOver)
    }

    /// To be asked right before each outward effect.
    ///
    /// # Errors
    /// [`LeaseOver`]: leave it undone.
    pub fn guard(&self) -> Result<(), LeaseOver> {
        if self.is_alive() { Ok(()) } else { Err(LeaseOver) }
    }

    #[must_use]
    pub fn is_alive(&self) -> bool {
        nanos(boottime()) < self.shared.deadline.load(Ordering::Acquire)
    }

    /// What is left at `now`; a very long time before it is armed.
    #[must_use]
    pub fn remaining(&self, now: BootInstant) -> Duration {
        Duration::from_nanos(self.shared.deadline.load(Ordering::Acquire).saturating_sub(nanos(now)))
    }

    /// The lease is over now, whatever the deadline says.
    pub fn trip(&self, reason: &'static str) {
        *self.shared.reason.lock().unwrap_or_else(PoisonError::into_inner) = reason;
        self.shared.deadline.store(OVER, Ordering::Release);
    }

    /// Adds a step of the destruction. Steps of one stage run side by side.
    pub fn register(&self, stage: Stage, name: &'static str, work: impl FnOnce() + Send + 'static) {
        let step = Step { stage, name, work: Box::new(work) };
        self.shared.steps.lock().unwrap_or_else(PoisonError::into_inner).push(step);
    }

    /// The ordered end: the same destruction without the power-off. The steps can run only once,
    /// so an expiry at the same time does no harm.
    pub fn destroy(&self) {
        destroy(&self.shared, Stage::PowerOff);
    }
}

fn watch(shared: &Shared, timer: &TimerFd) {
    loop {
        let deadline = shared.deadline.load(Ordering::Acquire);
        if deadline == OVER || nanos(boottime()) >= deadline {
            // A renewal may have come in between; then go on.
            let over = shared.deadline.compare_exchange(deadline, OVER, Ordering::AcqRel, Ordering::Acquire);
            if over.is_ok() {
                break;
            }
            continue;
        }
        if deadline != UNARMED {
            // The timer is for punctuality only; the tick bounds what its failure could do.
            let _unset: nix::Result<()> = timer.set(
                Expiration::OneShot(TimeSpec::from_duration(Duration::from_nanos(deadline))),
                TimerSetTimeFlags::TFD_TIMER_ABSTIME,
            );
        }
        let mut watched = [PollFd::new(timer.as_fd(), PollFlags::POLLIN)];
        let _woken: nix::Result<i32> = poll(&mut watched, PollTimeout::from(TICK));
    }
    let reason = *shared.reason.lock().unwrap_or_else(PoisonError::into_inner);
    tracing::error!(reason, "the lease is over: destroying everything here");
    destroy(shared, Stage::PowerOff);
    run_stage(shared, Stage::PowerOff);
}

fn destroy(shared: &Shared, before: Stage) {
    for stage in STAGES.into_iter().filter(|stage| *stage < before) {
        run_stage(shared, stage);
    }
}

fn run_stage(shared: &Shared, stage: Stage) {
    let due: Vec<Step> = {
        let mut steps = shared.steps.lock().unwrap_or_else(PoisonError::into_inner);
        steps.extract_if(.., |step| step.stage == stage).collect()
    };
    let (done, results) = mpsc::channel();
    let mut waiting = 0;
    for Step { name, work, .. } in due {
        let done = done.clone();
        // Shared, so that a machine out of threads still gets the step done, if without a bound.
        let work = Arc::new(Mutex::new(Some(work)));
        let theirs = Arc::clone(&work);
        let run = move || {
            let taken = theirs.lock().unwrap_or_else(PoisonError::into_inner).take();
            if let Some(work) = taken {
                work();
            }
            // Nobody listens any more when this was too late.
            let _too_late = done.send(name).is_err();
        };
        match thread::Builder::new().name("destroy".to_owned()).spawn(run) {
            Ok(_) => waiting += 1,
            Err(_) => {
                let taken = work.lock().unwrap_or_else(PoisonError::into_inner).take();
                if let Some(work) = taken {
                    work();
                }
            }
        }
    }
    let end = boottime() + stage.bound();
    while waiting > 0 {
        match results.recv_timeout(end.saturating_since(boottime())) {
            Ok(_) => waiting -= 1,
            Err(_) => {
                tracing::error!(?stage, waiting, "a step of the destruction did not end in time; going on");
                return;
            }
        }
    }
}

fn nanos(instant: BootInstant) -> u64 {
    u64::try_from(instant.since_boot().as_nanos()).unwrap_or(UNARMED - 1).clamp(OVER + 1, UNARMED - 1)
}

#[cfg(test)]
#[path = "leash_tests.rs"]
mod tests;
