//! The read-only mount, for real: the kernel and ordinary programs are the judges.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/memory.rs"]
mod memory;
#[path = "support/mounted.rs"]
mod mounted;

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::fd::AsFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

use limb_agent::fetch::{FetchError, Priority};
use limb_common::chunk::CHUNK_BYTES;
use limb_common::manifest::{Inode, NodeMeta};
use memory::{Fault, SetBuilder, meta, noise};
use mounted::{Mounted, OWNER, cannot_mount, ended_within, python, shell};

const CACHE: u64 = 256 << 20;

/// Every odd thing that a working set may hold.
fn odd_set() -> SetBuilder {
    let mut set = SetBuilder::new();
    let root = set.root();
    set.file(root, b"empty", Vec::new());
    set.file(root, b"small", noise(1, 777));
    set.file(root, b"exactly one chunk", noise(2, CHUNK_BYTES));
    set.file(root, b"one byte more", noise(3, CHUNK_BYTES + 1));
    set.file(root, b"line\nbreak", noise(4, 10));
    set.file(root, &[b'n'; 255], noise(5, 20));
    set.file(root, b"not \xff\xfe utf-8 \\ \"quoted\" 'so'", noise(6, 30));
    let mut sparse = vec![0; 5 * CHUNK_BYTES + 99];
    sparse[2 * CHUNK_BYTES..3 * CHUNK_BYTES].copy_from_slice(&noise(7, CHUNK_BYTES));
    set.file(root, b"sparse", sparse);
    let deep = set.directory(root, b"deep");
    let deeper = set.directory(deep, b"deeper");
    let linked = set.file(deeper, b"linked", noise(8, 3 * CHUNK_BYTES + 17));
    set.manifest.link(root, b"hard link", linked).unwrap();
    set.symlink(root, b"to deep", b"deep/deeper");
    set.symlink(deep, b"dangling", b"/nowhere/\xff");
    set.directory(root, b"empty directory");
    let attributes: BTreeMap<_, _> = [(b"user.colour".to_vec(), b"blue\0\xff".to_vec())].into();
    set.file_with(root, b"tool", noise(9, 50), NodeMeta { mode: 0o755, xattrs: attributes, ..meta(0) });
    set
}

#[test]
fn odd_names_links_holes_and_times_are_what_the_manifest_says() {
    if cannot_mount("odd_names_links_holes_and_times_are_what_the_manifest_says") {
        return;
    }
    let mount = Mounted::new(odd_set(), CACHE);
    let names: BTreeSet<_> =
        fs::read_dir(mount.directory.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 13);
    assert!(names.contains(OsStr::new("line\nbreak")));
    assert!(names.contains(OsStr::from_bytes(&[b'n'; 255])));
    let stat = |name: &str| mount.path(name).symlink_metadata().unwrap();

    let linked = stat("deep/deeper/linked");
    assert_eq!((linked.nlink(), linked.ino()), (2, stat("hard link").ino()));
    assert_eq!((linked.uid(), linked.gid()), (OWNER.uid, OWNER.gid));
    assert_eq!((linked.mode() & 0o7777, linked.blksize()), (0o644, 1 << 20));
    assert_eq!((linked.mtime(), linked.mtime_nsec()), (1_234_567_890, 123_456_789));
    assert_eq!((stat("sparse").size(), stat("sparse").blocks()), (5 * CHUNK_BYTES as u64 + 99, 2048));
    assert_eq!(stat("empty").blocks(), 0);
    assert!(stat("deep").blocks() >= 1);
    assert_eq!(fs::read_link(mount.path("deep/dangling")).unwrap().as_os_str().as_bytes(), b"/nowhere/\xff");
    assert_eq!(fs::read_dir(mount.path("to deep")).unwrap().count(), 1);

    let long = mount.path(OsStr::from_bytes(&[b'x'; 256]));
    assert_eq!(long.metadata().unwrap_err().raw_os_error(), Some(libc::ENAMETOOLONG));
    for _ in 0..3 {
        assert_eq!(mount.path("missing").metadata().unwrap_err().kind(), io::ErrorKind::NotFound);
    }
    let writes = [
        fs::write(mount.path("new"), "x").unwrap_err(),
        fs::remove_file(mount.path("small")).unwrap_err(),
        fs::rename(mount.path("small"), mount.path("other")).unwrap_err(),
        File::options().write(true).open(mount.path("small")).unwrap_err(),
        fs::create_dir(mount.path("made")).unwrap_err(),
    ];
    for refused in writes {
        assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
    }
    let space = nix::sys::statvfs::statvfs(mount.directory.path()).unwrap();
    assert_eq!((space.blocks_available(), space.name_max()), (0, 255));
    assert!(space.blocks() * space.fragment_size() >= mount.manifest.total_bytes());
    assert_eq!(mount.home.asks(), 0, "metadata must cost no round trip");
}

#[test]
fn ordinary_programs_copy_the_set_whole() {
    if cannot_mount("ordinary_programs_copy_the_set_whole") {
        return;
    }
    let mount = Mounted::new(odd_set(), CACHE);
    let elsewhere = tempfile::tempdir().unwrap();
    let (copied, packed) = (elsewhere.path().join("copied"), elsewhere.path().join("packed"));
    fs::create_dir(&packed).unwrap();
    shell("cp -a \"$1\" \"$2\"", &[mount.directory.path(), &copied]);
    shell("tar -C \"$1\" -cSf - . | tar -C \"$2\" -xf -", &[mount.directory.path(), &packed]);
    for copy in [&copied, &packed] {
        shell("diff -r --no-dereference \"$1\" \"$2\"", &[mount.directory.path(), copy]);
    }
    let sums = elsewhere.path().join("sums");
    shell("cd \"$1\"; sha256sum small sparse 'one byte more' deep/deeper/linked > \"$2\"", &[&copied, &sums]);
    shell("cd \"$1\"; sha256sum --strict -c \"$2\"", &[mount.directory.path(), &sums]);
    let linked = copied.join("hard link").metadata().unwrap();
    assert_eq!(linked.ino(), copied.join("deep/deeper/linked").metadata().unwrap().ino());
    let bytes = |name: &str| fs::read(copied.join(name)).unwrap();
    assert_eq!(bytes("deep/deeper/linked"), noise(8, 3 * CHUNK_BYTES + 17));
    assert_eq!(bytes("one byte more"), noise(3, CHUNK_BYTES + 1));
    assert_eq!(copied.join("small").metadata().unwrap().mtime_nsec(), 123_456_789);
    let colour = python(
        "import os,sys; print(os.getxattr(sys.argv[1],'user.colour'), os.listxattr(sys.argv[1]))",
        &[&mount.path("tool")],
    );
    assert_eq!(colour.trim(), "b'blue\\x00\\xff' ['user.colour']");
    let ends = python(
        "import os,sys\nf=os.open(sys.argv[1],os.O_RDONLY)\nM=1<<20\n\
         print(os.lseek(f,0,os.SEEK_DATA)//M, os.lseek(f,2*M,os.SEEK_HOLE)//M)",
        &[&mount.path("sparse")],
    );
    assert_eq!(ends.trim(), "2 3");
    let inode = mount.manifest.resolve(b"sparse").unwrap();
    let of_sparse: Vec<_> = mount
        .home
        .counts()
        .into_keys()
        .filter(|(asked, _)| *asked == inode)
        .map(|(_, index)| index)
        .collect();
    assert_eq!(of_sparse, [2], "holes are never fetched");
    assert_eq!(*mount.problems.lock().unwrap(), []);
}

#[test]
fn mmap_page_by_page_reads_the_right_bytes() {
    if cannot_mount("mmap_page_by_page_reads_the_right_bytes") {
        return;
    }
    let bytes = noise(11, 12 * CHUNK_BYTES + 4097);
    let mut set = SetBuilder::new();
    set.file(set.root(), b"weights", bytes.clone());
    let mount = Mounted::new(set, CACHE);
    let outside = tempfile::NamedTempFile::new().unwrap();
    fs::write(outside.path(), &bytes).unwrap();
    let script = "import mmap,sys\n\
        a=open(sys.argv[1],'rb'); b=open(sys.argv[2],'rb').read()\n\
        m=mmap.mmap(a.fileno(),0,prot=mmap.PROT_READ)\n\
        pages=range(0,len(b),4096)\n\
        assert len(m)==len(b)\n\
        assert all(m[p:p+4096]==b[p:p+4096] for p in pages)\n\
        assert m[len(b)//3:len(b)//2]==b[len(b)//3:len(b)//2]\n\
        print('same')";
    assert_eq!(python(script, &[&mount.path("weights"), outside.path()]).trim(), "same");
    assert!(mount.home.counts().values().all(|&count| count == 1), "no chunk is fetched twice");
}

#[test]
fn readers_that_drop_the_page_cache_never_see_a_short_read() {
    if cannot_mount("readers_that_drop_the_page_cache_never_see_a_short_read") {
        return;
    }
    let bytes = noise(12, 6 * CHUNK_BYTES + 100);
    let mut set = SetBuilder::new();
    set.file(set.root(), b"f", bytes.clone());
    // A small cache: what was dropped by the kernel often has to come again.
    let mount = Mounted::new(set, 3 << 20);
    let outside = tempfile::NamedTempFile::new().unwrap();
    fs::write(outside.path(), &bytes).unwrap();
    let script = "import os,sys,random,threading\n\
        b=open(sys.argv[2],'rb').read(); M=1<<20; bad=[]\n\
        def work(n):\n\
        \x20 r=random.Random(n); f=os.open(sys.argv[1],os.O_RDONLY)\n\
        \x20 for _ in range(60):\n\
        \x20  o=max(0,M*r.randint(1,6)-r.randint(0,300000)); l=r.randint(1,700000)\n\
        \x20  os.posix_fadvise(f,0,0,os.POSIX_FADV_DONTNEED)\n\
        \x20  g=os.pread(f,l,o)\n\
        \x20  if g!=b[o:o+l]: bad.append((n,o,l,len(g)))\n\
        t=[threading.Thread(target=work,args=(n,)) for n in range(6)]\n\
        [x.start() for x in t]; [x.join() for x in t]\n\
        print(bad)";
    assert_eq!(python(script, &[&mount.path("f"), outside.path()]).trim(), "[]");
}

#[test]
fn sixty_four_readers_at_once_get_their_bytes() {
    if cannot_mount("sixty_four_readers_at_once_get_their_bytes") {
        return;
    }
    let mut set = SetBuilder::new();
    for number in 0..8_u64 {
        set.file(set.root(), number.to_string().as_bytes(), noise(number, 4 * CHUNK_BYTES + 11));
    }
    let mount = Mounted::new(set, CACHE);
    *mount.home.delay.lock().unwrap() = Duration::from_millis(5);
    std::thread::scope(|scope| {
        for reader in 0..64_u64 {
            let path = mount.path((reader % 8).to_string());
            scope.spawn(move || {
                let whole = noise(reader % 8, 4 * CHUNK_BYTES + 11);
                let file = File::open(path).unwrap();
                let mut got = vec![0; 300_001];
                for step in 0..14_u64 {
                    let at = usize::try_from((reader * 77_777 + step * 300_001) % 4_000_000).unwrap();
                    let read = file.read_at(&mut got, at as u64).unwrap();
                    assert_eq!(read, got.len().min(whole.len() - at));
                    assert!(got[..read] == whole[at..at + read]);
                }
            });
        }
    });
    assert!(mount.home.counts().values().all(|&count| count == 1), "each chunk came once");
}

#[test]
fn a_corrupt_chunk_is_an_error_with_a_name_and_hides_nothing_else() {
    if cannot_mount("a_corrupt_chunk_is_an_error_with_a_name_and_hides_nothing_else") {
        return;
    }
    let bytes = noise(13, 3 * CHUNK_BYTES);
    let mut set = SetBuilder::new();
    let folder = set.directory(set.root(), b"folder");
    let draft = set.file(folder, b"bad one", bytes.clone());
    let mount = Mounted::new(set, CACHE);
    mount.home.spoil(mount.order.inode(draft), 1, vec![Fault::FlipByte; 40]);
    let file = File::open(mount.path("folder/bad one")).unwrap();
    nix::fcntl::posix_fadvise(file.as_fd(), 0, 0, nix::fcntl::PosixFadviseAdvice::POSIX_FADV_RANDOM).unwrap();
    let mut got = vec![0; 4096];
    for _ in 0..2 {
        let refused = file.read_exact_at(&mut got, CHUNK_BYTES as u64 + 8192).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EIO));
    }
    for at in [0, CHUNK_BYTES - 4096, 2 * CHUNK_BYTES] {
        file.read_exact_at(&mut got, at as u64).unwrap();
        assert_eq!(got, bytes[at..at + 4096]);
    }
    let problems = mount.problems.lock().unwrap().clone();
    assert_eq!(problems.len(), 1, "once per file: {problems:?}");
    assert_eq!(problems[0].0, Path::new("folder/bad one"));
    assert!(matches!(problems[0].1, FetchError::Corrupt { .. }));
}

#[test]
fn two_hundred_thousand_entries_are_listed() {
    if cannot_mount("two_hundred_thousand_entries_are_listed") {
        return;
    }
    const COUNT: usize = 200_000;
    let mut set = SetBuilder::new();
    let wide = set.directory(set.root(), b"wide");
    for number in 0..COUNT {
        set.file(wide, format!("entry {number:06}").as_bytes(), Vec::new());
    }
    let mount = Mounted::new(set, CACHE);
    for _ in 0..2 {
        let names: BTreeSet<_> =
            fs::read_dir(mount.path("wide")).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names.len(), COUNT);
    }
    let counted = shell("find \"$1\" -type f -size 0 | wc -l", &[&mount.path("wide")]);
    assert_eq!(counted.trim(), COUNT.to_string());
    assert_eq!(mount.home.asks(), 0);
}

/// A reader that is blocked in the mount, as a process of its own.
fn blocked_reader(mount: &Mounted, name: &str) -> std::process::Child {
    mount.home.stalled.send_replace(true);
    let child = Command::new("cat")
        .arg(mount.path(name))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    wait_until_asked(mount, |asked| asked.iter().any(|ask| ask.2 == Priority::Demand));
    child
}

fn wait_until_asked(mount: &Mounted, enough: impl Fn(&[(Inode, u64, Priority)]) -> bool) {
    let mut asked = mount.home.asked.subscribe();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let asks = asked.wait_for(|asked| enough(asked));
        tokio::time::timeout(Duration::from_secs(20), asks).await.unwrap().unwrap();
    });
}

fn one_file(chunks: usize) -> SetBuilder {
    let mut set = SetBuilder::new();
    set.file(set.root(), b"f", noise(14, chunks * CHUNK_BYTES));
    set
}

#[test]
fn an_abort_frees_a_blocked_reader_within_a_second() {
    if cannot_mount("an_abort_frees_a_blocked_reader_within_a_second") {
        return;
    }
    let mount = Mounted::new(one_file(3), CACHE);
    let child = blocked_reader(&mount, "f");
    mount.session.abort().unwrap();
    let ended = ended_within(child, Duration::from_secs(1)).expect("freed within a second");
    assert!(!ended.status.success());
    mount.session.abort().unwrap();
    mount.session.unmount().unwrap();
    mount.session.unmount().unwrap();
    mount.session.abort().unwrap();
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!table.contains(&format!(" 0:{} ", mount.session.minor())));
}

#[test]
fn the_stop_token_alone_frees_a_blocked_reader() {
    if cannot_mount("the_stop_token_alone_frees_a_blocked_reader") {
        return;
    }
    let mount = Mounted::new(one_file(3), CACHE);
    let child = blocked_reader(&mount, "f");
    mount.stop.cancel();
    let ended = ended_within(child, Duration::from_secs(1)).expect("freed within a second");
    assert!(String::from_utf8_lossy(&ended.stderr).contains("Input/output error"));
    assert_eq!(*mount.problems.lock().unwrap(), [], "ending is no problem of the file");
}

#[test]
fn metadata_is_answered_while_every_read_is_stuck() {
    if cannot_mount("metadata_is_answered_while_every_read_is_stuck") {
        return;
    }
    let mut set = SetBuilder::new();
    for number in 0..20_u64 {
        set.file(set.root(), format!("f{number}").as_bytes(), noise(number, CHUNK_BYTES));
    }
    let mount = Mounted::new(set, CACHE);
    let children: Vec<_> = (0..20).map(|number| blocked_reader(&mount, &format!("f{number}"))).collect();
    let listed = shell("ls -l \"$1\" | wc -l; stat -f \"$1\" > /dev/null", &[mount.directory.path()]);
    assert_eq!(listed.trim(), "21");
    mount.home.stalled.send_replace(false);
    for child in children {
        assert!(ended_within(child, Duration::from_secs(20)).unwrap().status.success());
    }
}

#[test]
fn a_sequential_read_over_a_slow_link_is_read_ahead() {
    if cannot_mount("a_sequential_read_over_a_slow_link_is_read_ahead") {
        return;
    }
    let mut set = one_file(48);
    for number in 0..12_u64 {
        set.file(set.root(), format!("small {number}").as_bytes(), noise(number, 100));
    }
    let mount = Mounted::new(set, CACHE);
    *mount.home.delay.lock().unwrap() = Duration::from_millis(20);
    // The link is known by then, as one that gave 100 bytes in 20 ms: that must not hold it back.
    for number in 0..12_u64 {
        assert_eq!(fs::read(mount.path(format!("small {number}"))).unwrap(), noise(number, 100));
    }
    mount.home.asked.send_replace(Vec::new());
    let mut got = Vec::new();
    File::open(mount.path("f")).unwrap().read_to_end(&mut got).unwrap();
    assert!(got == noise(14, 48 * CHUNK_BYTES));
    let counts = mount.home.counts();
    assert_eq!(counts.len(), 48);
    assert!(counts.values().all(|&count| count == 1));
    assert!(mount.home.most_in_flight() >= 8, "{} at once", mount.home.most_in_flight());
    let demanded = mount.home.asked.borrow().iter().filter(|ask| ask.2 == Priority::Demand).count();
    assert!(demanded <= 12, "{demanded} chunks had to be waited for from the start");
    // As root the kernel's own window is one chunk.
    let window = format!("/sys/class/bdi/0:{}/read_ahead_kb", mount.session.minor());
    assert_eq!(fs::read_to_string(window).unwrap().trim(), "1024");
}

#[test]
fn a_file_of_tensors_is_read_ahead_from_its_first_bytes() {
    if cannot_mount("a_file_of_tensors_is_read_ahead_from_its_first_bytes") {
        return;
    }
    let tensors = [&200_u64.to_le_bytes(), &b"{\"w\":"[..], &noise(3, 40 * CHUNK_BYTES)].concat();
    let mut set = one_file(40);
    let draft = set.file(set.root(), b"called by a hash", tensors);
    let mount = Mounted::new(set, CACHE);
    let weights = mount.order.inode(draft);
    // The kernel reads nothing ahead of its own.
    let head = "import os,sys\nfor p in sys.argv[1:]:\n  f=os.open(p,os.O_RDONLY)\n  \
                os.posix_fadvise(f,0,0,os.POSIX_FADV_RANDOM)\n  os.pread(f,8,0)";
    python(head, &[&mount.path("f"), &mount.path("called by a hash")]);
    wait_until_asked(&mount, |asked| {
        asked.iter().filter(|ask| ask.0 == weights && ask.2 == Priority::ReadAhead).count() == 40
    });
    assert!(mount.home.asked.borrow().iter().all(|ask| ask.0 == weights || ask.1 == 0));
}

#[test]
fn random_reads_fetch_what_they_touch_and_nothing_else() {
    if cannot_mount("random_reads_fetch_what_they_touch_and_nothing_else") {
        return;
    }
    let mount = Mounted::new(one_file(64), CACHE);
    let file = File::open(mount.path("f")).unwrap();
    nix::fcntl::posix_fadvise(file.as_fd(), 0, 0, nix::fcntl::PosixFadviseAdvice::POSIX_FADV_RANDOM).unwrap();
    let whole = noise(14, 64 * CHUNK_BYTES);
    let mut touched = BTreeSet::new();
    let mut got = vec![0; 4096];
    for step in 0..40_usize {
        let at = step * 7_654_321 % (64 * CHUNK_BYTES) / 8192 * 8192;
        touched.insert((at / CHUNK_BYTES) as u64);
        file.read_exact_at(&mut got, at as u64).unwrap();
        assert_eq!(got, whole[at..at + 4096]);
    }
    let fetched: BTreeSet<_> = mount.home.counts().into_keys().map(|(_, index)| index).collect();
    assert_eq!(fetched, touched);
}

#[test]
fn over_a_slow_link_random_reads_fetch_no_more_than_their_groups() {
    if cannot_mount("over_a_slow_link_random_reads_fetch_no_more_than_their_groups") {
        return;
    }
    let bytes = noise(21, 24 * CHUNK_BYTES + 999);
    let mut set = SetBuilder::new();
    let draft = set.file(set.root(), b"weights", bytes.clone());
    let mount = Mounted::new(set, CACHE);
    mount.home.bandwidth_delay_bytes.store(100_000, Ordering::SeqCst);
    let file = File::open(mount.path("weights")).unwrap();
    nix::fcntl::posix_fadvise(file.as_fd(), 0, 0, nix::fcntl::PosixFadviseAdvice::POSIX_FADV_RANDOM).unwrap();
    let mut got = vec![0; 4096];
    for step in 0..200_usize {
        let at = step * 7_777_777 % (bytes.len() - got.len());
        file.read_exact_at(&mut got, at as u64).unwrap();
        assert!(got == bytes[at..at + got.len()]);
    }
    assert_eq!(mount.home.asks(), 0, "a whole chunk was asked for");
    let fetched = mount.home.part_bytes.load(Ordering::SeqCst);
    assert!(fetched <= 200 * (2 << 14), "{fetched}");
    // The end of the file, where the last group is short; and one whose bytes are wrong.
    file.read_exact_at(&mut got[..999], 24 << 20).unwrap();
    assert!(got[..999] == bytes[24 << 20..]);
    mount.home.spoil(mount.order.inode(draft), 23, vec![Fault::FlipByte; 9]);
    let refused = file.read_exact_at(&mut got, (24 << 20) - 4096).unwrap_err();
    assert_eq!(refused.raw_os_error(), Some(nix::libc::EIO));
    assert!(matches!(mount.problems.lock().unwrap()[..], [(_, FetchError::Corrupt { .. })]));
}

#[test]
fn space_numbers_and_long_names_are_what_programs_expect() {
    if cannot_mount("space_numbers_and_long_names_are_what_programs_expect") {
        return;
    }
    let mut set = SetBuilder::new();
    let sizes =
        [0, 1, 511, 512, 513, 4096, CHUNK_BYTES - 1, CHUNK_BYTES, CHUNK_BYTES + 1, 2 * CHUNK_BYTES + 5];
    let folder = set.directory(set.root(), b"d");
    for size in sizes {
        set.file(folder, size.to_string().as_bytes(), noise(size as u64, size));
    }
    let accents = "\u{e9}".repeat(127) + "x";
    set.file(set.root(), accents.as_bytes(), Vec::new());
    let mount = Mounted::new(set, CACHE);
    for size in sizes {
        let stat = mount.path(format!("d/{size}")).metadata().unwrap();
        assert_eq!((stat.size(), stat.blocks()), (size as u64, size.div_ceil(512) as u64));
    }
    mount.path(&accents).metadata().unwrap();
    let longer = mount.path(accents + "x").metadata().unwrap_err();
    assert_eq!(longer.raw_os_error(), Some(libc::ENAMETOOLONG));
    let script = "import os,sys\n\
        all=[e for d in (sys.argv[1],sys.argv[1]+'/d') for e in os.scandir(d)]\n\
        assert all and [e.inode() for e in all]==[e.stat(follow_symlinks=False).st_ino for e in all]\n\
        assert len({e.inode() for e in all})==len(all)==12 and max(e.inode() for e in all)<2**31";
    python(script, &[mount.directory.path()]);
    assert_eq!(mount.home.asks(), 0);
}

#[test]
fn every_way_to_copy_a_file_out_gives_its_bytes() {
    if cannot_mount("every_way_to_copy_a_file_out_gives_its_bytes") {
        return;
    }
    let bytes = noise(31, 3 * CHUNK_BYTES + 777);
    let mut set = SetBuilder::new();
    set.file(set.root(), b"f", bytes.clone());
    // Far less than the file: most of it comes more than once.
    let mount = Mounted::new(set, 1 << 20);
    let outside = tempfile::tempdir().unwrap();
    let script = "import os,sys,errno,mmap\nsource,to=sys.argv[1:]; n=os.path.getsize(source)\n\
        def copy(name,how):\n\
        \x20 s=os.open(source,os.O_RDONLY); t=os.open(to+'/'+name,os.O_WRONLY|os.O_CREAT); done=0\n\
        \x20 os.posix_fadvise(s,0,0,os.POSIX_FADV_DONTNEED)\n\
        \x20 while done<n:\n\
        \x20  try: got=how(s,t,n-done)\n\
        \x20  except OSError as e: assert e.errno==errno.EXDEV and done==0,e; os.unlink(to+'/'+name); return\n\
        \x20  assert got>0; done+=got\n\
        \x20 assert how(s,t,10)==0\n\
        copy('ranged',os.copy_file_range)\n\
        copy('sent',lambda s,t,k: os.sendfile(t,s,None,k))\n\
        d=os.open(source,os.O_RDONLY|os.O_DIRECT); b=mmap.mmap(-1,1<<20); t=open(to+'/direct','wb'); at=0\n\
        while at<n:\n\
        \x20 got=os.preadv(d,[memoryview(b)[:700416]],at); assert got==min(700416,n-at),got\n\
        \x20 t.write(b[:got]); at+=got";
    python(script, &[&mount.path("f"), outside.path()]);
    let copies = "cp --reflink=auto \"$1\" \"$2\"/cloned; dd if=\"$1\" of=\"$2\"/pieces bs=999999 status=none; \
                  cat \"$1\" | cat > \"$2\"/spliced; ! cp --reflink=always \"$1\" \"$2\"/never 2> /dev/null; \
                  test ! -s \"$2\"/never; rm -f \"$2\"/never";
    shell(copies, &[&mount.path("f"), outside.path()]);
    let copies: Vec<_> = fs::read_dir(outside.path()).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert!(copies.len() >= 5);
    for copy in copies {
        assert!(fs::read(&copy).unwrap() == bytes, "{}", copy.display());
    }
}

#[test]
fn pages_touched_in_order_are_read_ahead_as_reads_are() {
    if cannot_mount("pages_touched_in_order_are_read_ahead_as_reads_are") {
        return;
    }
    let mount = Mounted::new(one_file(48), CACHE);
    *mount.home.delay.lock().unwrap() = Duration::from_millis(20);
    let script = "import mmap,sys\nf=open(sys.argv[1],'rb'); m=mmap.mmap(f.fileno(),0,prot=mmap.PROT_READ)\n\
                  print(sum(m[p] for p in range(0,len(m),4096)))";
    let sum: usize = noise(14, 48 * CHUNK_BYTES).iter().step_by(4096).map(|&byte| usize::from(byte)).sum();
    assert_eq!(python(script, &[&mount.path("f")]).trim(), sum.to_string());
    let counts = mount.home.counts();
    assert!(counts.len() == 48 && counts.values().all(|&count| count == 1));
    assert!(mount.home.most_in_flight() >= 8, "{} at once", mount.home.most_in_flight());
}

/// A global budget, and not one for each file.
#[test]
fn hundreds_of_files_read_at_once_stay_within_the_budget() {
    if cannot_mount("hundreds_of_files_read_at_once_stay_within_the_budget") {
        return;
    }
    const FILES: u64 = 120;
    const READERS: usize = 16;
    let mut set = SetBuilder::new();
    for number in 0..FILES {
        set.file(set.root(), number.to_string().as_bytes(), noise(number, 2 * CHUNK_BYTES + 9));
    }
    let budget: u64 = 12 << 20;
    let mount = Mounted::new(set, budget);
    *mount.home.delay.lock().unwrap() = Duration::from_millis(1);
    // All are open before any is read on, each as the beginning of a stream.
    let outside = tempfile::NamedTempFile::new().unwrap();
    let script = "import os,sys\nfrom concurrent.futures import ThreadPoolExecutor as Pool\n\
        base,to,files,readers=sys.argv[1],sys.argv[2],int(sys.argv[3]),int(sys.argv[4])\n\
        fds=[os.open(f'{base}/{i}',os.O_RDONLY) for i in range(files)]\n\
        def read(fd,at,n):\n\
        \x20 got=b''\n\
        \x20 while len(got)<n and (b:=os.pread(fd,n-len(got),at+len(got))): got+=b\n\
        \x20 return got\n\
        pool=Pool(readers)\n\
        heads=list(pool.map(lambda fd:read(fd,0,300000),fds))\n\
        tails=list(pool.map(lambda fd:read(fd,300000,4<<20),fds))\n\
        open(to,'wb').writelines(b for pair in zip(heads,tails) for b in pair)";
    let (files, readers) = (FILES.to_string(), READERS.to_string());
    python(script, &[mount.directory.path(), outside.path(), Path::new(&files), Path::new(&readers)]);
    let wanted: Vec<u8> = (0..FILES).flat_map(|number| noise(number, 2 * CHUNK_BYTES + 9)).collect();
    assert!(fs::read(outside.path()).unwrap() == wanted);
    let asks = mount.home.asks() as u64;
    assert!(asks <= FILES * 3 * 6 / 5, "{asks} chunks were fetched for {}", FILES * 3);
    assert!(mount.home.most_in_flight() <= READERS * 2 + 12, "{} at once", mount.home.most_in_flight());
    assert!(mount.fetcher.stats().cached_bytes <= budget);
}

/// No system call moves more than 2 GiB less a page: copies come in pieces, and end.
#[test]
fn a_file_of_more_than_two_gibibytes_is_copied_whole() {
    if cannot_mount("a_file_of_more_than_two_gibibytes_is_copied_whole") {
        return;
    }
    let size: u64 = (2 << 30) + 5 * CHUNK_BYTES as u64 + 77;
    let tail = noise(1, CHUNK_BYTES + 77);
    let mut set = SetBuilder::new();
    let hole_chunks = (size - tail.len() as u64) / CHUNK_BYTES as u64;
    set.file_after_hole(set.root(), b"long", hole_chunks, tail.clone(), meta(0o644));
    let mount = Mounted::new(set, CACHE);
    let script = "import os,sys\nsource=os.open(sys.argv[1],os.O_RDONLY); size=os.fstat(source).st_size\n\
        null=os.open('/dev/null',os.O_WRONLY); done=0; calls=0\n\
        while n:=os.sendfile(null,source,done,size): done+=n; calls+=1\n\
        assert done==size and calls>=2,(done,size,calls)";
    python(script, &[&mount.path("long")]);
    let outside = tempfile::tempdir().unwrap();
    let copy = outside.path().join("copy");
    shell("cp --sparse=auto \"$1\" \"$2\"", &[&mount.path("long"), &copy]);
    let copied = File::open(&copy).unwrap();
    assert_eq!(copied.metadata().unwrap().len(), size);
    let mut got = vec![0; tail.len() + 10];
    copied.read_exact_at(&mut got, size - tail.len() as u64 - 10).unwrap();
    assert!(got[..10] == [0; 10] && got[10..] == tail);
}
