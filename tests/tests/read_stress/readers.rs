//! Many readers, readers that die, and pages that are dropped under those who read.

use std::fs::File;
use std::os::fd::AsFd as _;
use std::os::unix::fs::FileExt as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use limb_tests::wait::{wait_for, wait_up_to};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use nix::sched::{CpuSet, sched_setaffinity};
use nix::unistd::Pid;
use proptest::prelude::Rng as _;
use proptest::test_runner::{RngAlgorithm, TestRng};

use crate::fake_chunks::Fault;
use crate::ops::same;
use crate::rig::{Rig, Serving};
use crate::tree::noise;
use crate::{TTL, all_end, cannot_run, is_long};

const MIB: u64 = 1 << 20;

fn chance(seed: u8) -> TestRng {
    TestRng::from_seed(RngAlgorithm::ChaCha, &[seed; 32])
}

fn forget(file: &File, at: u64, len: u64) {
    let advice = PosixFadviseAdvice::POSIX_FADV_DONTNEED;
    posix_fadvise(file.as_fd(), at.cast_signed(), len.cast_signed(), advice).unwrap();
}

fn read_and_compare(file: &File, whole: &[u8], at: u64, len: u64) -> Result<(), String> {
    let from = usize::try_from(at).unwrap();
    let to = usize::try_from(at + len).unwrap().min(whole.len());
    let mut got = vec![0; to - from];
    file.read_exact_at(&mut got, at).map_err(|error| format!("{error} at {at}"))?;
    same(&got, &whole[from..to], at)
}

/// Sixty-four who never pause, and nobody stops before everybody has read enough: who got no turn
/// would keep all of them running.
#[test]
fn sixty_four_readers_on_two_cores_all_get_on() {
    if cannot_run() {
        return;
    }
    const READERS: usize = 64;
    let enough: u64 = if is_long() { 400 } else { 25 };
    // All threads that the rig starts stay on these too.
    let mut cores = CpuSet::new();
    (0..2.min(std::thread::available_parallelism().unwrap().get())).for_each(|core| cores.set(core).unwrap());
    std::thread::scope(|scope| {
        scope.spawn(|| {
            sched_setaffinity(Pid::from_raw(0), &cores).unwrap();
            let files: Vec<Vec<u8>> = (0..8).map(|seed| noise(seed, 5 * MIB + seed * 1000)).collect();
            let rig = Rig::new(Serving::Home, 12 << 20, TTL, |root| {
                for (number, bytes) in files.iter().enumerate() {
                    std::fs::write(root.join(number.to_string()), bytes).unwrap();
                }
            });
            let done: Vec<AtomicU64> = (0..READERS).map(|_| AtomicU64::new(0)).collect();
            let readers = (0..READERS).map(|reader| {
                let (rig, files, done) = (&rig, &files, &done);
                Box::new(move || {
                    let mut chance = chance(u8::try_from(reader).unwrap());
                    while done.iter().any(|done| done.load(Ordering::SeqCst) < enough) {
                        let which = usize::try_from(chance.next_u64() % 8).unwrap();
                        let whole = &files[which];
                        let file = File::open(rig.mounted().join(which.to_string())).unwrap();
                        let at = chance.next_u64() % whole.len() as u64;
                        read_and_compare(&file, whole, at, 1 + chance.next_u64() % 200_000)?;
                        if chance.next_u64().is_multiple_of(4) {
                            forget(&file, 0, 0);
                        }
                        done[reader].fetch_add(1, Ordering::SeqCst);
                    }
                    Ok(())
                }) as Box<dyn FnOnce() -> Result<(), String> + Send>
            });
            all_end(&rig, readers.collect()).unwrap();
            assert_eq!(*rig.problems.lock().unwrap(), []);
            rig.assert_nothing_left();
        });
    });
}

#[test]
fn pages_dropped_at_the_borders_of_chunks_come_back_right() {
    if cannot_run() {
        return;
    }
    let whole = noise(31, 6 * MIB + 5);
    let rig = Rig::new(Serving::Home, 3 << 20, TTL, |root| std::fs::write(root.join("f"), &whole).unwrap());
    let turns: u64 = if is_long() { 20_000 } else { 400 };
    let reading = AtomicU64::new(4);
    let mut all: Vec<Box<dyn FnOnce() -> Result<(), String> + Send>> = Vec::new();
    for seed in 0..2 {
        let (rig, reading) = (&rig, &reading);
        all.push(Box::new(move || {
            let file = File::open(rig.mounted().join("f")).unwrap();
            let mut chance = chance(100 + seed);
            while reading.load(Ordering::SeqCst) > 0 {
                let border = chance.next_u64() % 7 * MIB;
                let before = chance.next_u64() % 3 * 4096;
                forget(&file, border.saturating_sub(before), 4096 + chance.next_u64() % (256 << 10));
            }
            Ok(())
        }));
    }
    for seed in 0..4 {
        let (rig, reading, whole) = (&rig, &reading, &whole);
        all.push(Box::new(move || {
            let file = File::open(rig.mounted().join("f")).unwrap();
            let mut chance = chance(seed);
            let outcome = (0..turns).try_for_each(|_| {
                let border = (1 + chance.next_u64() % 6) * MIB;
                let at = border - chance.next_u64() % 10_000;
                read_and_compare(&file, whole, at, 1 + chance.next_u64() % 20_000)
            });
            reading.fetch_sub(1, Ordering::SeqCst);
            outcome
        }));
    }
    all_end(&rig, all).unwrap();
    assert_eq!(*rig.problems.lock().unwrap(), []);
    rig.assert_nothing_left();
}

const SEQUENTIAL: &str = "import sys\nopen(sys.argv[1],'rb',buffering=0).read()";
const RANDOM: &str = "import os,sys\nf=os.open(sys.argv[1],os.O_RDONLY)\n\
    os.posix_fadvise(f,0,0,os.POSIX_FADV_RANDOM)\nos.pread(f,4096,1<<20)";
const MAPPED: &str = "import mmap,os,sys\nf=os.open(sys.argv[1],os.O_RDONLY)\n\
    m=mmap.mmap(f,0,prot=mmap.PROT_READ)\nm[(1<<20)+5]";
const MAPPED_AT_RANDOM: &str = "import mmap,os,sys\nf=os.open(sys.argv[1],os.O_RDONLY)\n\
    m=mmap.mmap(f,0,prot=mmap.PROT_READ)\nm.madvise(mmap.MADV_RANDOM)\nm[(1<<20)+5]";

fn start(script: &str, path: &Path) -> Child {
    let mut command = Command::new("python3");
    command.arg("-c").arg(script).arg(path).stdin(Stdio::null()).stdout(Stdio::null());
    command.spawn().unwrap()
}

#[test]
fn a_reader_that_is_killed_dies_at_once_and_leaves_nothing() {
    if cannot_run() {
        return;
    }
    let whole = noise(32, 4 * MIB);
    for script in [SEQUENTIAL, RANDOM, MAPPED, MAPPED_AT_RANDOM] {
        let rig =
            Rig::new(Serving::Fake, 64 << 20, TTL, |root| std::fs::write(root.join("f"), &whole).unwrap());
        rig.state.held.send_replace(true);
        let mut readers: Vec<_> = (0..3).map(|_| start(script, &rig.mounted().join("f"))).collect();
        wait_for("a reader to wait for home", || {
            (rig.fetcher.stats().in_flight_bytes > 0 && !rig.state.requests.borrow().is_empty()).then_some(())
        });
        for reader in &mut readers {
            reader.kill().unwrap();
        }
        // Nothing has come by then, and nothing would.
        for reader in &mut readers {
            let bound = Duration::from_secs(10);
            let status = wait_up_to(bound, &format!("the killed reader to be gone: {script}"), || {
                reader.try_wait().unwrap()
            });
            assert_eq!(status.signal(), Some(libc::SIGKILL));
        }
        rig.state.held.send_replace(false);
        let file = File::open(rig.mounted().join("f")).unwrap();
        read_and_compare(&file, &whole, 0, 4 * MIB).unwrap();
        assert_eq!(*rig.problems.lock().unwrap(), []);
        rig.assert_nothing_left();
    }
}

#[test]
fn a_mapped_page_that_cannot_be_had_is_sigbus_and_its_neighbours_are_there() {
    if cannot_run() {
        return;
    }
    let whole = noise(33, 3 * MIB);
    let rig = Rig::new(Serving::Fake, 64 << 20, TTL, |root| std::fs::write(root.join("f"), &whole).unwrap());
    rig.spoil(Path::new("f"), 1, Fault::Neighbour);
    let path = rig.mounted().join("f");
    let read = |at: u64| {
        let script = format!(
            "import mmap,os,sys\nf=os.open(sys.argv[1],os.O_RDONLY)\n\
             m=mmap.mmap(f,0,prot=mmap.PROT_READ)\nsys.exit(m[{at}])"
        );
        let mut child = start(&script, &path);
        wait_for("the reader of a page to end", || child.try_wait().unwrap())
    };
    for at in [0, MIB - 1, 2 * MIB, 3 * MIB - 1] {
        assert_eq!(read(at).code(), Some(i32::from(whole[usize::try_from(at).unwrap()])), "at {at}");
    }
    for at in [MIB, 2 * MIB - 1] {
        assert_eq!(read(at).signal(), Some(libc::SIGBUS), "at {at}");
    }
    // It comes right: so does the next reader.
    rig.state.spoiled.lock().unwrap().clear();
    assert_eq!(read(MIB).code(), Some(i32::from(whole[1 << 20])));
}
