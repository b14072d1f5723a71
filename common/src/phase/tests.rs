use proptest::prelude::*;

use super::*;
use crate::report::{EndedBy, JobEnd, JobStep};

fn instance() -> InstanceId {
    InstanceId::new("i-1")
}

fn ended(code: i32, stopped: bool) -> JobOutcome {
    JobOutcome::Ended { setup: false, how: HowEnded::Exit { code }, oom_killed: false, stopped }
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        Just(Event::CreateAsked),
        Just(Event::CreateRefused { why: NotStarted::NoCapacity, text: "full".to_owned() }),
        Just(Event::CreateAmbiguous { text: "timeout".to_owned() }),
        Just(Event::InstanceSeen { instance: instance() }),
        Just(Event::InstanceSeen { instance: InstanceId::new("i-2") }),
        Just(Event::QuarantineEmpty),
        Just(Event::NodeJoined),
        Just(Event::AgentEnrolled),
        Just(Event::SetupStarted),
        Just(Event::JobStarted),
        (0..3_i32, any::<bool>()).prop_map(|(code, stopped)| Event::JobEnded { how: ended(code, stopped) }),
        prop_oneof![
            Just(StopCause::Owner { reason: String::new() }),
            Just(StopCause::MaxCost),
            Just(StopCause::BootTimeout)
        ]
        .prop_map(|cause| Event::StopAsked { cause }),
        Just(Event::BoxLost { why: "silent".to_owned(), vanished: false }),
        (0..3_u64).prop_map(|files| Event::DataSettled { outcome: DataOutcome::Home { files, bytes: 1 } }),
        (0..3_u64).prop_map(|at_unix_ms| Event::DestroyConfirmed { at_unix_ms }),
    ]
}

fn play(events: &[Event]) -> Attempt {
    events.iter().fold(Attempt::default(), |attempt, event| next(&attempt, event).unwrap_or(attempt))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4096))]

    #[test]
    fn closed_means_no_box_and_all_outcomes(events in prop::collection::vec(any_event(), 0..40)) {
        let (mut attempt, mut box_may_exist) = (Attempt::default(), false);
        for event in &events {
            let Ok(after) = next(&attempt, event) else { continue };
            // An independent account of whether a box may exist.
            match event {
                Event::CreateAsked => box_may_exist = true,
                Event::CreateRefused { .. } | Event::QuarantineEmpty => box_may_exist = false,
                Event::DestroyConfirmed { .. } => box_may_exist = false,
                _ => {}
            }
            attempt = after;
            if attempt.phase == Phase::Closed {
                prop_assert!(!box_may_exist, "closed with a box: {events:?}");
                prop_assert!(attempt.job.is_some() && attempt.data.is_some() && attempt.destroy.is_some());
            }
        }
    }

    #[test]
    fn outcomes_and_the_stop_are_written_once(events in prop::collection::vec(any_event(), 0..40)) {
        let mut attempt = Attempt::default();
        for event in &events {
            let Ok(after) = next(&attempt, event) else { continue };
            prop_assert!(attempt.job.is_none() || attempt.job == after.job);
            prop_assert!(attempt.data.is_none() || attempt.data == after.data);
            prop_assert!(attempt.destroy.is_none() || attempt.destroy == after.destroy);
            prop_assert!(attempt.stop.is_none() || attempt.stop == after.stop);
            prop_assert!(attempt.phase != Phase::Closed || after.phase == Phase::Closed);
            attempt = after;
        }
    }

    /// Once a stop was asked no job starts and no box boots.
    #[test]
    fn a_stop_is_sticky(events in prop::collection::vec(any_event(), 0..40), at in 0..40_usize) {
        let at = at.min(events.len());
        let mut attempt = play(&events[..at]);
        attempt = next(&attempt, &Event::StopAsked { cause: StopCause::MaxDuration }).unwrap();
        for event in &events[at..] {
            attempt = next(&attempt, event).unwrap_or(attempt);
            let over = matches!(
                attempt.phase,
                Phase::Creating { .. } | Phase::Ending { .. } | Phase::Destroying { .. } | Phase::Closed
            );
            prop_assert!(over, "{:?} after a stop", attempt.phase);
        }
    }

    /// Each event twice in a row is the event once: a redo after a crash is harmless.
    #[test]
    fn events_are_idempotent(events in prop::collection::vec(any_event(), 0..40)) {
        let mut attempt = Attempt::default();
        for event in &events {
            let Ok(once) = next(&attempt, event) else { continue };
            if let Ok(twice) = next(&once, event) {
                prop_assert_eq!(&once, &twice);
            }
            attempt = once;
        }
    }

    /// From every reachable state, the teardown's own events lead to the end.
    #[test]
    fn the_end_is_always_reachable(events in prop::collection::vec(any_event(), 0..40)) {
        let mut attempt = play(&events);
        for event in [
            Event::StopAsked { cause: StopCause::Shutdown },
            Event::InstanceSeen { instance: instance() },
            Event::DataSettled { outcome: DataOutcome::Nothing },
            Event::DestroyConfirmed { at_unix_ms: 9 },
        ] {
            attempt = next(&attempt, &event).unwrap_or(attempt);
        }
        prop_assert_eq!(&attempt.phase, &Phase::Closed);
    }

    #[test]
    fn kept_states_read_back(events in prop::collection::vec(any_event(), 0..20)) {
        let attempt = play(&events);
        let text = serde_json::to_string(&attempt).unwrap();
        prop_assert_eq!(serde_json::from_str::<Attempt>(&text).unwrap(), attempt);
    }
}

#[test]
fn teardown_comes_before_data_and_data_before_the_job() {
    let mut attempt = Attempt { job: Some(ended(3, false)), ..Attempt::default() };
    assert_eq!(attempt.exit(), LimbExit::TeardownUnconfirmed.into());
    attempt.destroy = Some(DestroyOutcome::Confirmed { at_unix_ms: 1 });
    attempt.data = Some(DataOutcome::Incomplete { files: 1, bytes: 1, unsaved: vec!["x".to_owned()] });
    assert_eq!(attempt.exit(), LimbExit::DataNotHome.into());
    attempt.data = Some(DataOutcome::Home { files: 1, bytes: 1 });
    assert_eq!(attempt.exit(), ExitVerdict { code: 3, origin: ExitOrigin::Job });
    attempt.job = Some(ended(0, true));
    attempt.stop = Some(StopCause::MaxCost);
    assert_eq!(attempt.exit(), LimbExit::LimitReached.into());
}

#[test]
fn a_job_that_never_began_is_not_the_jobs_own_end() {
    let gone = |job: JobOutcome, stop: Option<StopCause>| Attempt {
        phase: Phase::Closed,
        stop,
        job: Some(job),
        data: Some(DataOutcome::Nothing),
        destroy: Some(DestroyOutcome::Confirmed { at_unix_ms: 1 }),
    };
    let said = |step, how, stopped| JobOutcome::from(&JobEnd { step, how, oom_killed: false, stopped });
    let owner = || Some(StopCause::Owner { reason: String::new() });
    let no_mount = EndedBy::CouldNotStart { code: 126, why: "could not mount /data".to_owned() };
    let job = said(JobStep::Prepare, no_mount.clone(), false);
    assert_eq!(job.to_string(), "never started: could not mount /data");
    assert_eq!(gone(job, None).exit(), LimbExit::BootFailed.into());
    assert_eq!(
        gone(said(JobStep::Prepare, no_mount.clone(), true), owner()).exit(),
        LimbExit::Stopped.into()
    );
    let killed = EndedBy::Signal(9);
    assert_eq!(gone(said(JobStep::Prepare, killed.clone(), true), owner()).exit(), LimbExit::Stopped.into());
    assert_eq!(gone(said(JobStep::Prepare, killed, false), None).exit(), LimbExit::BootFailed.into());
    // A program of the job's own that cannot be executed is the job's.
    let own = gone(said(JobStep::Run, no_mount, false), None).exit();
    assert_eq!(own, ExitVerdict { code: 126, origin: ExitOrigin::Job });
}

#[test]
fn a_stop_during_setup_is_never_a_success() {
    let after = |code, cause| {
        let how = EndedBy::Exit(code);
        let end = JobEnd { step: JobStep::Setup, how, oom_killed: false, stopped: true };
        let attempt = Attempt {
            phase: Phase::Closed,
            stop: Some(cause),
            job: Some(JobOutcome::from(&end)),
            data: Some(DataOutcome::Nothing),
            destroy: Some(DestroyOutcome::Confirmed { at_unix_ms: 1 }),
        };
        attempt.exit()
    };
    let owner = || StopCause::Owner { reason: String::new() };
    assert_eq!(after(0, owner()), LimbExit::Stopped.into());
    assert_eq!(after(7, owner()), ExitVerdict { code: 7, origin: ExitOrigin::Setup });
    assert_eq!(after(0, StopCause::MaxCost), LimbExit::LimitReached.into());
}

#[test]
fn our_codes_do_not_collide_with_what_shells_and_programs_say() {
    for exit in [
        LimbExit::Refused,
        LimbExit::NoBox,
        LimbExit::Internal,
        LimbExit::Lost,
        LimbExit::BootFailed,
        LimbExit::LimitReached,
        LimbExit::DataNotHome,
        LimbExit::TeardownUnconfirmed,
        LimbExit::NoCoordinator,
        LimbExit::Stopped,
        LimbExit::AlreadyRunning,
        LimbExit::CannotStart,
    ] {
        assert!((3..126).contains(&exit.code()), "{exit:?}");
    }
}

#[test]
fn a_box_that_arrives_after_the_stop_is_destroyed() {
    let attempt = play(&[
        Event::CreateAsked,
        Event::StopAsked { cause: StopCause::Owner { reason: String::new() } },
        Event::InstanceSeen { instance: instance() },
    ]);
    assert_eq!(attempt.phase, Phase::Destroying { instance: instance() });
    assert!(matches!(attempt.job, Some(JobOutcome::NeverStarted { why: NotStarted::Stopped, .. })));
}
