//! The link during a read: silent, dead, cut and back, slow.

use std::fs::File;
use std::io::Read as _;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use limb_tests::wait::wait_for;

use crate::ops::same;
use crate::rig::{Rig, Serving};
use crate::tree::noise;
use crate::{TTL, all_end, cannot_run};

const MIB: u64 = 1 << 20;

/// Reads a file of so many MiB from end to end, over a wire that carries 8 MiB a second, while
/// `trouble` does what it does; it is called when the reader is in the middle of it.
fn read_through(
    serving: Serving,
    ttl: Duration,
    size_mib: u64,
    trouble: impl FnOnce(&Rig, &AtomicU64) + Send,
) {
    let whole = noise(41, size_mib * MIB + 77);
    let rig = Rig::new(serving, 64 << 20, ttl, |root| std::fs::write(root.join("f"), &whole).unwrap());
    rig.proxy.slow(8 << 20);
    let progress = AtomicU64::new(0);
    let reader = || {
        let mut file = File::open(rig.mounted().join("f")).unwrap();
        let mut got = vec![0; 128 << 10];
        let mut at = 0;
        loop {
            let count = file.read(&mut got).map_err(|error| format!("{error} at {at}"))?;
            if count == 0 {
                break;
            }
            same(&got[..count], &whole[at..at + count], at as u64)?;
            at += count;
            progress.store(at as u64, Ordering::SeqCst);
        }
        if at == whole.len() { Ok(()) } else { Err(format!("the file ended at {at}")) }
    };
    let makes_trouble = || {
        wait_for("the read to be under way", || (progress.load(Ordering::SeqCst) >= MIB).then_some(()));
        assert!(progress.load(Ordering::SeqCst) < whole.len() as u64, "over before anything happened");
        trouble(&rig, &progress);
        Ok(())
    };
    all_end(&rig, vec![Box::new(reader), Box::new(makes_trouble)]).unwrap();
    assert_eq!(*rig.problems.lock().unwrap(), []);
    rig.assert_nothing_left();
}

/// New streams are opened, to no avail.
fn redials(rig: &Rig) {
    let before = rig.proxy.connections();
    wait_for("the box to dial again", || (rig.proxy.connections() >= before + 2).then_some(()));
}

#[test]
fn a_home_that_takes_requests_and_sends_nothing_is_waited_for() {
    if cannot_run() {
        return;
    }
    read_through(Serving::Fake, TTL, 12, |rig, _| {
        rig.state.held.send_replace(true);
        let before = *rig.state.streams.lock().unwrap();
        wait_for("another stream to be tried", || {
            (*rig.state.streams.lock().unwrap() >= before + 2).then_some(())
        });
        rig.state.held.send_replace(false);
    });
}

#[test]
fn a_cable_that_is_cut_while_one_reads_is_waited_for() {
    if cannot_run() {
        return;
    }
    read_through(Serving::Home, TTL, 12, |rig, _| {
        rig.proxy.cut();
        redials(rig);
        rig.proxy.restore();
    });
}

#[test]
fn a_connection_that_swallows_everything_is_replaced_while_one_reads() {
    if cannot_run() {
        return;
    }
    read_through(Serving::Home, TTL, 12, |rig, _| {
        for _ in 0..2 {
            let before = rig.proxy.connections();
            rig.proxy.swallow();
            wait_for("the box to dial again", || (rig.proxy.connections() > before).then_some(()));
        }
    });
}

#[test]
fn connections_that_break_again_and_again_only_cost_time() {
    if cannot_run() {
        return;
    }
    read_through(Serving::Home, TTL, 12, |rig, progress| {
        for _ in 0..5 {
            let (before, from) = (rig.proxy.connections(), progress.load(Ordering::SeqCst));
            rig.proxy.reset();
            wait_for("the read to go on", || {
                let on = progress.load(Ordering::SeqCst) > from || rig.proxy.connections() > before;
                on.then_some(())
            });
        }
    });
}

/// The lease is so short that heartbeats which had to wait for the bytes before them would end it.
#[test]
fn heartbeats_keep_a_short_lease_alive_while_the_wire_is_full_and_halved() {
    if cannot_run() {
        return;
    }
    const SIZE_MIB: u64 = 20;
    let ttl = Duration::from_secs(4);
    read_through(Serving::Home, ttl, SIZE_MIB, |rig, progress| {
        let beating = rig.beat(ttl);
        for rate in [4 << 20, 2 << 20, 1 << 20] {
            rig.proxy.slow(rate);
            let (beats, read) = (*rig.desk.beats.borrow(), progress.load(Ordering::SeqCst));
            wait_for("beats on a full wire", || (*rig.desk.beats.borrow() >= beats + 2).then_some(()));
            wait_for("the read to go on", || (progress.load(Ordering::SeqCst) > read).then_some(()));
        }
        assert!(progress.load(Ordering::SeqCst) < SIZE_MIB * MIB, "the wire was not full any more");
        rig.proxy.slow(16 << 20);
        wait_for("the end of the file", || (progress.load(Ordering::SeqCst) > SIZE_MIB * MIB).then_some(()));
        assert!(rig.link.leash().is_alive(), "the lease is over");
        drop(beating);
    });
}
