use super::*;

type Happened = (&'static str, BootInstant);

fn recorder() -> (mpsc::Sender<Happened>, mpsc::Receiver<Happened>) {
    mpsc::channel()
}

fn record(sender: &mpsc::Sender<Happened>, name: &'static str) -> impl FnOnce() + Send + 'static {
    let sender = sender.clone();
    move || sender.send((name, boottime())).unwrap_or_default()
}

#[test]
fn expiry_runs_every_stage_in_order_past_a_frozen_step_within_two_seconds() {
    let leash = Leash::start().unwrap();
    let (sender, events) = recorder();
    let (_never, frozen) = mpsc::channel::<()>();
    // Registered in another order than they must run.
    leash.register(Stage::PowerOff, "power", record(&sender, "power"));
    leash.register(Stage::Wipe, "wipe", record(&sender, "wipe"));
    leash.register(Stage::KillJob, "frozen", move || frozen.recv().unwrap_or_default());
    leash.register(Stage::KillJob, "kill", record(&sender, "kill"));
    leash.register(Stage::DropKeys, "keys", record(&sender, "keys"));
    leash.register(Stage::AbortMounts, "abort", record(&sender, "abort"));
    let sent = boottime();
    let ttl = Duration::from_millis(300);
    leash.arm(sent, ttl).unwrap();
    let seen: Vec<_> = (0..5).map(|_| events.recv_timeout(Duration::from_secs(20)).unwrap()).collect();
    assert_eq!(
        seen.iter().map(|(name, _)| *name).collect::<Vec<_>>(),
        ["abort", "kill", "keys", "wipe", "power"]
    );
    assert!(seen[0].1 >= sent + ttl, "not before its time");
    assert!(!leash.is_alive());
    // 2 s by the bounds; the rest is a loaded machine's.
    assert!(seen[4].1.saturating_since(sent + ttl) < Duration::from_secs(4));
}

#[test]
fn renewals_keep_it_alive_and_what_is_over_stays_over() {
    let leash = Leash::start().unwrap();
    let (sender, events) = recorder();
    leash.register(Stage::Wipe, "wipe", record(&sender, "wipe"));
    assert!(leash.is_alive(), "unarmed, nothing expires");
    leash.arm(boottime(), Duration::from_millis(400)).unwrap();
    leash.renew(boottime(), Duration::from_secs(3600)).unwrap();
    // An old answer does not shorten a later grant.
    leash.renew(boottime(), Duration::from_millis(1)).unwrap();
    assert!(events.recv_timeout(Duration::from_millis(700)).is_err());
    assert!(leash.remaining(boottime()) > Duration::from_secs(3000));
    leash.trip("a test");
    assert!(leash.guard().is_err());
    assert_eq!(leash.renew(boottime(), Duration::from_secs(3600)), Err(LeaseOver));
    assert_eq!(leash.arm(boottime(), Duration::from_secs(3600)), Err(LeaseOver));
    assert_eq!(events.recv_timeout(Duration::from_secs(20)).unwrap().0, "wipe");
    assert!(!leash.is_alive());
}

#[test]
fn an_ordered_end_destroys_once_and_does_not_power_off() {
    let leash = Leash::start().unwrap();
    let (sender, events) = recorder();
    leash.register(Stage::Wipe, "wipe", record(&sender, "wipe"));
    leash.register(Stage::AbortMounts, "abort", record(&sender, "abort"));
    leash.register(Stage::PowerOff, "power", record(&sender, "power"));
    leash.destroy();
    leash.destroy();
    let names: Vec<_> = events.try_iter().map(|(name, _)| name).collect();
    assert_eq!(names, ["abort", "wipe"]);
}

#[test]
fn a_lease_that_passed_before_it_was_armed_is_over() {
    let leash = Leash::start().unwrap();
    assert_eq!(
        leash.arm(BootInstant::from_duration(Duration::ZERO), Duration::from_nanos(5)),
        Err(LeaseOver)
    );
    assert!(leash.guard().is_err());
}
