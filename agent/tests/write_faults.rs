//! What the writable mount keeps when home is away, has lost something or is slow: nobody gets
//! other bytes than were written, and nobody waits who needs nothing from home.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/fake_results.rs"]
mod fake_results;
#[path = "support/results_rig.rs"]
mod results_rig;

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Write as _};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};

use fake_results::Reads;
use limb_agent::results::outbox::OutboxSettings;
use limb_common::assignment::Durability;
use nix::errno::Errno;
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use results_rig::{Rig, WIDE, noise, rig, wait_for};

const MIB: usize = 1 << 20;
/// Nothing that home has stays in the box's memory.
const FORGETFUL: OutboxSettings = OutboxSettings { dirty_bytes: 64 << 20, clean_bytes: 0 };

fn code<T>(result: io::Result<T>) -> Option<Errno> {
    result.err().and_then(|error| error.raw_os_error()).map(Errno::from_raw)
}

/// Makes the kernel forget what it has of a file. What is read next comes from us.
fn forgotten_by_the_kernel(path: &Path) -> File {
    let file = File::open(path).unwrap();
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED).unwrap();
    posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_RANDOM).unwrap();
    file
}

fn read_anew(path: &Path) -> io::Result<Vec<u8>> {
    let file = forgotten_by_the_kernel(path);
    let mut got = vec![0; usize::try_from(file.metadata()?.len()).unwrap()];
    file.read_exact_at(&mut got, 0).map(|()| got)
}

#[test]
fn what_home_cannot_give_back_is_an_error_and_never_zeros() {
    let Some(rig) = rig("what_home_cannot_give_back", FORGETFUL, Durability::Fsync) else { return };
    let bytes = noise(1, 3 * MIB + 777);
    fs::write(rig.path("f"), &bytes).unwrap();
    rig.check_home();
    for reads in [Reads::Lost, Reads::Flipped] {
        rig.home.0.reads.send_replace(reads);
        assert_eq!(code(read_anew(&rig.path("f"))), Some(Errno::EIO), "{reads:?}");
        let file = OpenOptions::new().write(true).open(rig.path("f")).unwrap();
        // Each of these keeps some of the old bytes, so it cannot be done without them.
        assert_eq!(code(file.write_all_at(b"x", MIB as u64 + 5)), Some(Errno::EIO), "{reads:?}");
        assert_eq!(code(file.set_len(MIB as u64 + 5)), Some(Errno::EIO), "{reads:?}");
        let mut log = OpenOptions::new().append(true).open(rig.path("f")).unwrap();
        assert_eq!(code(log.write_all(b"x")), Some(Errno::EIO), "{reads:?}");
        // This does not.
        file.write_all_at(&bytes[MIB..2 * MIB], MIB as u64).unwrap();
        drop((file, log));
        rig.home.0.reads.send_replace(Reads::Served);
        rig.check_home();
        assert!(*rig.home.file("f").unwrap() == bytes, "{reads:?}");
        assert!(read_anew(&rig.path("f")).unwrap() == bytes, "{reads:?}");
    }
}

#[test]
fn an_append_to_what_only_home_has_keeps_it() {
    let Some(rig) = rig("an_append_to_what_only_home_has", FORGETFUL, Durability::Fsync) else { return };
    for size in [1, MIB - 1, MIB, MIB + 1, 2 * MIB + 5] {
        let mut wanted = noise(size as u64, size);
        fs::write(rig.path("log"), &wanted).unwrap();
        rig.check_home();
        for round in 0..3_u8 {
            let line = vec![round; 700_001];
            let mut log = OpenOptions::new().append(true).open(rig.path("log")).unwrap();
            log.write_all(&line).unwrap();
            wanted.extend_from_slice(&line);
            assert_eq!(log.metadata().unwrap().len(), wanted.len() as u64);
            drop(log);
            rig.check_home();
        }
        assert!(*rig.home.file("log").unwrap() == wanted, "{size}");
        assert!(read_anew(&rig.path("log")).unwrap() == wanted, "{size}");
    }
}

#[test]
fn a_shorter_version_leaves_nothing_of_a_longer_one() {
    for limits in [WIDE, FORGETFUL] {
        let Some(rig) = rig("a_shorter_version", limits, Durability::Fsync) else { return };
        let long = noise(2, 3 * MIB + 777);
        for len in [0, 1, MIB - 1, MIB, MIB + 1, 2 * MIB + 5] {
            let short = noise(3, len);
            let begin = |name: &str| {
                fs::write(rig.path(name), &long).unwrap();
                rig.check_home();
                OpenOptions::new().read(true).write(true).open(rig.path(name)).unwrap()
            };
            drop(begin("opened anew"));
            fs::write(rig.path("opened anew"), &short).unwrap();

            let cut = begin("cut");
            cut.set_len(len as u64).unwrap();
            cut.write_all_at(&short, 0).unwrap();
            drop(cut);

            // Cut and then longer again: what comes after the cut is zeros.
            let grown = begin("grown");
            grown.set_len(len as u64).unwrap();
            grown.write_all_at(b"end", 3 * MIB as u64).unwrap();
            drop(grown);

            drop(begin("replaced"));
            fs::write(rig.path("replaced.tmp"), &short).unwrap();
            fs::rename(rig.path("replaced.tmp"), rig.path("replaced")).unwrap();

            rig.check_home();
            let mut with_zeros = long[..len].to_vec();
            with_zeros.resize(3 * MIB, 0);
            with_zeros.extend_from_slice(b"end");
            let wanted =
                [("opened anew", &short), ("cut", &short), ("grown", &with_zeros), ("replaced", &short)];
            for (name, wanted) in wanted {
                assert!(*rig.home.file(name).unwrap() == *wanted, "{name} {len} at home");
                assert!(read_anew(&rig.path(name)).unwrap() == *wanted, "{name} {len}");
            }
        }
    }
}

#[test]
fn a_rename_while_an_fsync_waits_brings_the_file_home_under_its_new_name() {
    let Some(rig) = rig("a_rename_while_an_fsync_waits", WIDE, Durability::Fsync) else { return };
    let bytes = noise(4, 24 * MIB + 5);
    // While home holds its word back, while nothing gets there, and at once afterwards. The kernel
    // renames no file that is being synced, so the rename waits with it.
    for name in ["held", "stalled", "after"] {
        let (temporary, last) = (rig.path(&format!("{name}.tmp")), rig.path(name));
        rig.home.0.held.send_replace(name == "held");
        rig.home.0.stalled.send_replace(name == "stalled");
        let mut file = File::create(&temporary).unwrap();
        file.write_all(&bytes).unwrap();
        let syncing = std::thread::spawn(move || {
            file.sync_all().unwrap();
        });
        if name == "held" {
            rig.home.wait_until("the content", |shelf| shelf.visible.contains_key(&b"held.tmp"[..]));
        } else if name == "after" {
            syncing.join().unwrap();
            fs::rename(&temporary, &last).unwrap();
            rig.check_home();
            break;
        }
        let renaming = std::thread::spawn(move || fs::rename(temporary, last).unwrap());
        assert!(!syncing.is_finished(), "{name}");
        rig.home.0.held.send_replace(false);
        rig.home.0.stalled.send_replace(false);
        syncing.join().unwrap();
        renaming.join().unwrap();
        rig.check_home();
    }
    for name in ["held", "stalled", "after"] {
        assert!(*rig.home.file(name).unwrap() == bytes, "{name}");
        assert!(rig.home.file(&format!("{name}.tmp")).is_none(), "{name}");
    }
}

#[test]
fn what_was_written_is_read_at_once_while_home_takes_nothing() {
    let Some(rig) = rig("what_was_written_is_read_at_once", WIDE, Durability::Fsync) else { return };
    rig.home.0.stalled.send_replace(true);
    for number in 0..20_u64 {
        let (name, moved) = (format!("f{number}"), format!("moved {number}"));
        assert_eq!(code(fs::metadata(rig.path(&name))), Some(Errno::ENOENT));
        let mut wanted = noise(number, MIB - 10 + usize::try_from(number).unwrap());
        fs::write(rig.path(&name), &wanted).unwrap();
        let reader = File::open(rig.path(&name)).unwrap();
        assert!(fs::read(rig.path(&name)).unwrap() == wanted, "{name}");
        let mut log = OpenOptions::new().append(true).open(rig.path(&name)).unwrap();
        log.write_all(b"and more than a border away").unwrap();
        wanted.extend_from_slice(b"and more than a border away");
        // A handle from before sees the size and the bytes of now.
        assert_eq!(reader.metadata().unwrap().len(), wanted.len() as u64);
        let mut tail = [0; 30];
        reader.read_exact_at(&mut tail, wanted.len() as u64 - 30).unwrap();
        assert_eq!(tail, wanted[wanted.len() - 30..]);
        fs::rename(rig.path(&name), rig.path(&moved)).unwrap();
        assert!(read_anew(&rig.path(&moved)).unwrap() == wanted, "{moved}");
        assert_eq!(code(fs::metadata(rig.path(&name))), Some(Errno::ENOENT));
        assert_eq!(fs::read_dir(rig.directory.path()).unwrap().count() as u64, number + 1);
    }
    rig.home.0.stalled.send_replace(false);
    rig.check_home();
}

fn in_the_background<T: Send + 'static>(
    count: usize,
    work: impl Fn(usize) -> T + Send + Clone + 'static,
) -> Vec<std::thread::JoinHandle<T>> {
    let one = |number| {
        let work = work.clone();
        std::thread::spawn(move || work(number))
    };
    (0..count).map(one).collect()
}

fn names_and_attributes_are_answered(rig: &Rig) {
    rig.shell(
        "ls -l > /dev/null; df . > /dev/null; stat -f . > /dev/null; du -s . > /dev/null
         mkdir new; : > new/file; mv new/file new/moved; ln new/moved new/second; ln -s moved new/link
         chmod 600 new/moved; touch -d 2001-02-03 new/moved; cat new/moved; rm -r new",
    );
}

#[test]
fn names_and_attributes_never_wait_for_bytes() {
    let limits = OutboxSettings { dirty_bytes: 4 << 20, clean_bytes: 0 };
    let Some(rig) = rig("names_and_attributes_never_wait", limits, Durability::Fsync) else { return };
    for number in 0..20 {
        fs::write(rig.path(&format!("old {number}")), noise(number, 5000)).unwrap();
    }
    rig.check_home();
    rig.home.0.held.send_replace(true);
    rig.home.0.reads.send_replace(Reads::Held);
    let root = rig.directory.path().to_owned();
    let path = move |name: String| root.join(name);
    let under = path.clone();
    let readers = in_the_background(20, move |number| {
        read_anew(&under(format!("old {number}"))).unwrap() == noise(number as u64, 5000)
    });
    wait_for("readers that wait", || *rig.home.0.read_asks.borrow() >= 20);
    let under = path.clone();
    let syncers = in_the_background(20, move |number| {
        let mut file = File::create(under(format!("synced {number}"))).unwrap();
        file.write_all(b"x").unwrap();
        file.sync_all().is_ok()
    });
    let writers = in_the_background(20, move |number| {
        fs::write(path(format!("big {number}")), noise(number as u64, MIB)).is_ok()
    });
    wait_for("a full budget", || rig.outbox.budget().is_over());
    names_and_attributes_are_answered(&rig);
    assert!(!readers.iter().chain(&syncers).any(std::thread::JoinHandle::is_finished));
    assert!(!writers.iter().all(std::thread::JoinHandle::is_finished));
    rig.home.0.held.send_replace(false);
    rig.home.0.reads.send_replace(Reads::Served);
    for thread in readers.into_iter().chain(syncers).chain(writers) {
        assert!(thread.join().unwrap());
    }
    rig.check_home();
}

const MAPPING: &str = "import mmap,sys\nf=open('mapped','w+b'); f.truncate(12<<20)\n\
    m=mmap.mmap(f.fileno(),0)\nfor p in range(0,12<<20,4096): m[p:p+8]=p.to_bytes(8,'big')\n\
    m.flush(); m.close(); f.close()\n";

/// A process that waits in msync, because it has written more than the box may hold.
fn a_process_that_waits_in_msync(rig: &Rig) -> Child {
    rig.home.0.held.send_replace(true);
    let child = Command::new("python3")
        .args(["-c", MAPPING])
        .current_dir(rig.directory.path())
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    wait_for("a full budget", || rig.outbox.budget().is_over());
    child
}

fn ended(child: &mut Child) -> ExitStatus {
    let mut status = None;
    wait_for("the end of the process", || {
        status = child.try_wait().unwrap();
        status.is_some()
    });
    status.unwrap()
}

#[test]
fn a_mapping_larger_than_the_budget_arrives_whole_or_ends_with_the_mount() {
    let limits = OutboxSettings { dirty_bytes: 4 << 20, clean_bytes: 0 };
    let test = "a_mapping_larger_than_the_budget";
    let Some(rig) = rig(test, limits, Durability::Fsync) else { return };
    let mut child = a_process_that_waits_in_msync(&rig);
    names_and_attributes_are_answered(&rig);
    rig.home.0.held.send_replace(false);
    assert!(ended(&mut child).success());
    rig.check_home();
    let mut wanted = vec![0; 12 * MIB];
    for (page, bytes) in wanted.chunks_mut(4096).enumerate() {
        bytes[..8].copy_from_slice(&(page as u64 * 4096).to_be_bytes());
    }
    assert!(*rig.home.file("mapped").unwrap() == wanted);
    let Some(rig) = results_rig::rig(test, limits, Durability::Fsync) else { return };
    let mut child = a_process_that_waits_in_msync(&rig);
    rig.session.abort().unwrap();
    assert!(!ended(&mut child).success());
}

#[test]
fn reads_across_the_borders_of_chunks_that_only_home_has_are_exact() {
    let Some(rig) = rig("reads_across_the_borders", FORGETFUL, Durability::Fsync) else { return };
    let bytes = noise(5, 5 * MIB + 100);
    fs::write(rig.path("f"), &bytes).unwrap();
    rig.check_home();
    std::thread::scope(|scope| {
        for reader in 0..4 {
            let (path, bytes) = (rig.path("f"), &bytes);
            scope.spawn(move || {
                for round in 0..40_usize {
                    let step = reader * 40 + round;
                    let at = (1 + step % 5) * MIB - step * 7919 % 300_000;
                    let mut got = vec![0; 1 + step * 104_729 % 700_000];
                    let read = forgotten_by_the_kernel(&path).read_at(&mut got, at as u64).unwrap();
                    assert_eq!(read, got.len().min(bytes.len() - at), "{at}");
                    assert!(got[..read] == bytes[at..at + read], "{at}");
                }
            });
        }
    });
}

/// A reader that mapped a checkpoint keeps the one that it mapped, whatever takes its name; also when
/// the kernel has dropped the pages and all bytes are at home.
#[test]
fn a_mapped_file_stays_what_it_was_when_another_takes_its_name() {
    let Some(rig) = rig("a_mapped_file_stays", FORGETFUL, Durability::Fsync) else { return };
    fs::write(rig.path("w.safetensors"), noise(1, 3_000_000)).unwrap();
    rig.check_home();
    let script = "import mmap,os,sys\nf=open('w.safetensors','rb'); m=mmap.mmap(f.fileno(),0,prot=mmap.PROT_READ)\n\
        before=bytes(m)\nprint('mapped',flush=True); sys.stdin.readline()\n\
        m.madvise(mmap.MADV_DONTNEED); os.posix_fadvise(f.fileno(),0,0,os.POSIX_FADV_DONTNEED)\n\
        assert bytes(m)==before\nassert open('w.safetensors','rb').read()!=before";
    let mut reader = Command::new("python3")
        .args(["-c", script])
        .current_dir(rig.directory.path())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(reader.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert_eq!(line, "mapped\n");
    fs::write(rig.path("tmp"), noise(2, 1_000_000)).unwrap();
    fs::rename(rig.path("tmp"), rig.path("w.safetensors")).unwrap();
    rig.check_home();
    drop(reader.stdin.take());
    assert!(ended(&mut reader).success());
    rig.check_home();
}
