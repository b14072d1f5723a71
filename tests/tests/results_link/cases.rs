//! What is promised of both ends together, one case each.

use limb_agent::results::outbox::OutboxSettings;
use limb_agent::results::tree::OpenMode;
use limb_common::assignment::Durability;
use limb_tests::home::lacks;
use limb_tests::wait::wait_for;
use nix::errno::Errno;

use crate::agent::{Agent, WIDE, listing_of};
use crate::home::Home;
use crate::script::Random;

const MIB: u64 = 1 << 20;
const EDIT: OpenMode = OpenMode { write: true, append: false, truncate: false };

fn noise(seed: u64, len: u64) -> Vec<u8> {
    Random::new(seed).bytes(len)
}

/// Ends the attempt of `agent` and gives one that begins on what it left.
fn next(home: &mut Home, agent: Agent) -> Agent {
    assert!(agent.drain().complete);
    drop(agent);
    let manifest = home.next_attempt();
    Agent::new(home, WIDE, Some(manifest))
}

fn assert_same(home: &Home, agent: &Agent) {
    let report = agent.drain();
    let refused = agent.refusals.lock().unwrap().clone();
    assert!(report.complete && refused.is_empty(), "{report:?} {refused:?}");
    assert_eq!(agent.listing(), listing_of(&home.dest));
    assert_eq!(*home.events.lock().unwrap(), Vec::<String>::new());
}

#[test]
fn a_second_attempt_goes_on_with_what_the_first_left() {
    let mut home = Home::new();
    let first = Agent::new(&home, WIDE, None);
    first.make_directory("d").unwrap();
    let (big, moved, old) = (noise(1, 3 * MIB + 77), noise(2, 2 * MIB), noise(3, 5000));
    for (path, content) in
        [("big", &big), ("d/moved", &moved), ("old", &old), ("gone", &old), ("kept", &moved)]
    {
        first.put(path, content);
    }
    first.link("kept", "d/kept").unwrap();
    first.symlink("link", "d/moved").unwrap();
    assert_same(&home, &first);
    let before = first.listing();

    let second = next(&mut home, first);
    assert_eq!(second.listing(), before, "exactly what was published, read through the chunk service");

    // Edited in place: what is not written comes from the base at home.
    let (inode, handle) = second.open("big", EDIT).unwrap();
    second.write(inode, MIB - 5, b"0123456789").unwrap();
    second.release(handle);
    second.rename("d/moved", "old").unwrap();
    second.unlink("gone").unwrap();
    assert_same(&home, &second);
    let mut edited = big;
    edited[usize::try_from(MIB).unwrap() - 5..][..10].copy_from_slice(b"0123456789");
    assert_eq!(std::fs::read(home.path("big")).unwrap(), edited);

    // A file of the lower set under its new name, and one that stands in its old place.
    second.put("d/moved", &noise(4, 10));
    let (inode, handle) = second.open("old", EDIT).unwrap();
    second.write(inode, 2 * MIB, b"tail").unwrap();
    second.sync(inode).unwrap();
    second.release(handle);
    second.rename("d", "e").unwrap();
    let (inode, handle) = second.open("e/kept", EDIT).unwrap();
    second.write(inode, 0, b"both names").unwrap();
    second.release(handle);
    assert_same(&home, &second);

    let third = next(&mut home, second);
    assert_eq!(third.listing(), listing_of(&home.dest));
}

#[test]
fn what_the_kill_fence_cut_short_is_kept_beside_its_name() {
    let mut home = Home::new();
    let agent = Agent::new(&home, WIDE, None);
    agent.put("whole", b"whole");
    let (inode, handle) = agent.open("whole", EDIT).unwrap();
    agent.write(inode, 0, b"half").unwrap();
    let half = noise(1, MIB + 10);
    let (fresh, fresh_handle) = agent.create("fresh");
    agent.write(fresh, 0, &half).unwrap();
    let append = OpenMode { write: true, append: true, truncate: false };
    let (log, log_handle) = agent.open("log", append).unwrap();
    agent.write(log, 0, b"a line\n").unwrap();
    home.proxy.cut();
    agent.output.fence();
    for handle in [handle, fresh_handle, log_handle] {
        agent.release(handle);
    }
    agent.output.abandon_open();
    home.proxy.restore();
    let report = agent.drain();
    assert!(report.complete, "{report:?}");
    assert_eq!(report.unsaved.len(), 2, "{report:?}");
    let read = |path: &str| std::fs::read(home.path(path)).unwrap();
    assert_eq!(read("whole"), b"whole");
    assert_eq!(read("whole.partial"), b"halfe");
    assert_eq!(read("fresh.partial"), half);
    assert_eq!(read("log"), b"a line\n", "what only grows is whole at any length");
    let mut partials = home.finish().partials;
    partials.sort();
    let wanted = ["fresh.partial", "whole.partial"];
    assert_eq!(partials, wanted.map(|name| home.path(name).to_string_lossy().into_owned()));
    assert!(!home.path("fresh").exists() && !home.path(".limb").exists());
    home.crash();
}

/// A box that dies says nothing: home itself ends its files.
#[test]
fn what_a_dead_box_left_open_is_kept_and_named() {
    let home = Home::new();
    let agent = Agent::new(&home, WIDE, None);
    let (inode, _handle) = agent.create("open");
    agent.write(inode, 0, &noise(1, 2 * MIB)).unwrap();
    wait_for("the chunks to be at home", || agent.outbox.budget().used_bytes().eq(&0).then_some(()));
    drop(agent);
    let finished = home.finish();
    assert_eq!(finished.partials, [home.path("open.partial").to_string_lossy().into_owned()]);
    assert_eq!(std::fs::read(home.path("open.partial")).unwrap(), noise(1, 2 * MIB));
}

/// Home refuses; the box hears of it where it asked, and the rest goes on.
fn refuses(home: &Home, durability: Durability, too_much: u64, errno: Errno) {
    let agent = Agent::with(home, WIDE, None, durability, |_| ());
    agent.put("old", b"old version");
    assert!(agent.drain().complete);
    let (inode, handle) = agent.create("old");
    agent.write(inode, 0, &noise(1, too_much)).unwrap();
    assert_eq!(agent.sync(inode), Err(errno));
    assert_eq!(agent.block_on(agent.output.flush(inode, true)), Err(errno), "close says it too");
    agent.release(handle);
    agent.make_directory("d").unwrap();
    let report = agent.drain();
    assert!(!report.complete, "a file is not as the job wrote it: {report:?}");
    assert_eq!(std::fs::read(home.path("old")).unwrap(), b"old version");
    assert!(home.path("d").is_dir(), "the rest goes on");
    // Starting over gives back what the refused bytes took.
    let (inode, handle) = agent.create("old");
    agent.write(inode, 0, b"new version").unwrap();
    agent.release(handle);
    agent.put("other", b"fits");
    let report = agent.drain();
    assert!(report.complete, "{report:?}");
    assert_eq!(std::fs::read(home.path("old")).unwrap(), b"new version");
    assert_eq!(std::fs::read(home.path("other")).unwrap(), b"fits");
    let refused = agent.refusals.lock().unwrap().clone();
    assert!(
        refused.iter().any(|refusal| refusal.path == b"old" && refusal.errno == errno as i32),
        "{refused:?}"
    );
    assert!(refused.iter().all(|refusal| refusal.path == b"old"), "{refused:?}");
}

#[test]
fn over_the_quota_home_refuses_and_the_old_version_stays() {
    let state = tempfile::tempdir().unwrap();
    let dest = state.path().join("dest");
    let home = Home::at(state, dest, |begin| begin.quota_bytes = Some(MIB));
    refuses(&home, Durability::Fsync, 4 * MIB, Errno::EDQUOT);
}

#[test]
fn a_full_disk_at_home_reaches_fsync_and_close() {
    if lacks("root, for a small tmpfs", nix::unistd::geteuid().is_root()) {
        return;
    }
    let state = tempfile::tempdir().unwrap();
    let dest = state.path().join("small");
    std::fs::create_dir(&dest).unwrap();
    let (kind, flags) = ("tmpfs", nix::mount::MsFlags::empty());
    nix::mount::mount(Some(kind), &dest, Some(kind), flags, Some("size=2m")).unwrap();
    let mut home = Home::at(state, dest.clone(), |_| ());
    let tested = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        refuses(&home, Durability::Close, 4 * MIB, Errno::ENOSPC);
    }));
    home.crash();
    nix::mount::umount2(&dest, nix::mount::MntFlags::MNT_DETACH).unwrap();
    tested.unwrap();
}

/// What a job may do within its quota on the box is not refused at home.
#[test]
fn a_job_within_its_quota_is_never_refused() {
    let state = tempfile::tempdir().unwrap();
    let dest = state.path().join("dest");
    let home = Home::at(state, dest, |begin| begin.quota_bytes = Some(4 * MIB));
    let limit = |tree: &mut limb_agent::results::tree::TreeSettings| tree.quota_bytes = Some(4 * MIB);
    let agent = Agent::with(&home, WIDE, None, Durability::Fsync, limit);
    for seed in 0..3 {
        let (inode, handle) = agent.create("f");
        agent.write(inode, 0, &noise(seed, 3 * MIB)).unwrap();
        agent.sync(inode).unwrap();
        agent.write(inode, 5, &noise(seed, MIB)).unwrap();
        agent.sync(inode).unwrap();
        assert_eq!(agent.write(inode, 3 * MIB, &noise(seed, MIB + 1)), Err(Errno::EDQUOT));
        agent.release(handle);
    }
    assert_same(&home, &agent);
}

#[test]
fn a_writer_waits_while_home_is_away_and_all_arrives() {
    const FILE: u64 = 8 * MIB;
    let mut home = Home::new();
    let small = OutboxSettings { dirty_bytes: 4 << 20, clean_bytes: 1 << 20 };
    let agent = Agent::new(&home, small, None);
    home.crash();
    let (far, most) = (std::sync::atomic::AtomicU64::new(0), small.dirty_bytes + 2 * MIB);
    std::thread::scope(|scope| {
        let writer = scope.spawn(|| {
            for file in 0..8 {
                let (inode, handle) = agent.create(&format!("f{file}"));
                for at in 0..FILE / MIB {
                    agent.write(inode, at * MIB, &noise(file * 100 + at, MIB)).unwrap();
                    far.fetch_add(MIB, std::sync::atomic::Ordering::SeqCst);
                }
                agent.release(handle);
            }
        });
        wait_for("the writer to have filled the budget", || agent.outbox.budget().is_over().then_some(()));
        let written = far.load(std::sync::atomic::Ordering::SeqCst);
        assert!(written <= most && !writer.is_finished(), "{written} bytes were taken");
        home.start();
        writer.join().unwrap();
    });
    assert!(far.into_inner() == 64 * MIB);
    assert_same(&home, &agent);
}

/// A chunk that is written again before home has answered: the window must not fill up with what
/// nobody waits for any more.
#[test]
fn overwriting_what_is_on_its_way_never_stalls_the_stream() {
    let home = Home::new();
    let agent = Agent::new(&home, WIDE, None);
    let (inode, handle) = agent.create("database");
    for turn in 0..200 {
        agent.write(inode, 0, &noise(turn, MIB)).unwrap();
    }
    agent.sync(inode).unwrap();
    agent.release(handle);
    assert_same(&home, &agent);
}
