//! Access traces over a real mount: what is recorded, and what a plan of it brings.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/memory.rs"]
mod memory;
#[path = "support/mounted.rs"]
mod mounted;

use std::fs;
use std::io::Read as _;
use std::time::Duration;

use limb_agent::fetch::{Priority, TransportError};
use limb_common::chunk::CHUNK_BYTES;
use limb_common::manifest::Inode;
use limb_common::trace::Touch;
use memory::{Fault, SetBuilder, noise};
use mounted::{Mounted, cannot_mount};

const CACHE: u64 = 256 << 20;
const FILES: u64 = 500;
const BOUND: Duration = Duration::from_secs(60);

/// Small files in directories of 50.
fn small_files() -> SetBuilder {
    let mut set = SetBuilder::new();
    let mut directory = set.root();
    for number in 0..FILES {
        if number % 50 == 0 {
            directory = set.directory(set.root(), format!("d{:02}", number / 50).as_bytes());
        }
        let bytes = noise(number, 3000 + usize::try_from(number).unwrap() * 37);
        set.file(directory, number.to_string().as_bytes(), bytes);
    }
    set
}

/// Every file once, in an order that is no walk.
fn read_shuffled(mount: &Mounted) {
    let mut order: Vec<_> = (0..FILES).collect();
    order.sort_by_key(|number| noise(*number, 8));
    for number in order {
        let bytes = fs::read(mount.path(format!("d{:02}/{number}", number / 50))).unwrap();
        assert!(bytes == noise(number, 3000 + usize::try_from(number).unwrap() * 37));
    }
}

#[test]
fn the_second_reader_in_a_shuffled_order_finds_nearly_everything_in_memory() {
    if cannot_mount("the_second_reader_in_a_shuffled_order_finds_nearly_everything_in_memory") {
        return;
    }
    let first = Mounted::new(small_files(), CACHE);
    read_shuffled(&first);
    let plan = first.trace.touches();
    assert_eq!(plan.len() as u64, FILES);
    let figures = first.trace.figures();
    assert!(figures.hits < FILES * 9 / 10, "without a plan: {figures:?}");
    assert_eq!((figures.planned_chunks, figures.foreseen), (0, 0));

    let second = Mounted::new(small_files(), CACHE);
    let ended = second.read_ahead_by(plan.clone());
    ended.recv_timeout(BOUND).unwrap();
    read_shuffled(&second);
    let figures = second.trace.figures();
    assert!(figures.hits * 100 >= figures.touches * 95, "{figures:?}");
    assert_eq!((figures.touches, figures.foreseen, figures.planned_chunks), (FILES, FILES, FILES));
    assert_eq!(figures.ahead_bytes, 0);
    assert_eq!(figures.planned_bytes, second.manifest.total_bytes());
    // In the plan's order, each once, and nothing of it as demand.
    let asked: Vec<_> = second.home.asked.borrow().clone();
    assert!(asked.iter().all(|(_, _, priority)| *priority == Priority::Trace), "{asked:?}");
    assert_eq!(asked.len() as u64, FILES);
    let same = |plan: &[Touch]| plan.iter().map(|touch| (touch.inode(), touch.index())).collect::<Vec<_>>();
    assert_eq!(same(&second.trace.touches()), same(&plan));
}

#[test]
fn a_plan_larger_than_the_cache_waits_for_its_reader_and_pushes_out_nothing_unread() {
    if cannot_mount("a_plan_larger_than_the_cache_waits_for_its_reader_and_pushes_out_nothing_unread") {
        return;
    }
    const CHUNKS: usize = 160;
    let mut set = SetBuilder::new();
    let draft = set.file(set.root(), b"large", noise(1, CHUNKS * CHUNK_BYTES));
    let mount = Mounted::new(set, 64 << 20);
    let inode = mount.order.inode(draft);
    // Far from the order in which a stream would be read ahead.
    let order: Vec<_> = (0..CHUNKS as u64).map(|at| at * 77 % CHUNKS as u64).collect();
    let plan = order.iter().map(|&index| Touch::new(inode, index, 0).unwrap()).collect();
    let ended = mount.read_ahead_by(plan);
    let room = 64 * 3 / 4 / 2 * (1 << 20);
    let mut asked = mount.home.asked.subscribe();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let full = runtime.block_on(async {
        let full = asked.wait_for(|asked| asked.len() == 24);
        tokio::time::timeout(BOUND, full).await.unwrap().unwrap().len()
    });
    assert!(mount.trace.figures().ahead_bytes <= room, "{full} {:?}", mount.trace.figures());
    assert!(ended.try_recv().is_err());
    let file = fs::File::open(mount.path("large")).unwrap();
    let mut piece = vec![0; 4096];
    for &index in &order {
        use std::os::unix::fs::FileExt as _;
        file.read_exact_at(&mut piece, index * CHUNK_BYTES as u64).unwrap();
        let ahead = mount.trace.figures().ahead_bytes;
        assert!(ahead <= room, "{ahead}");
    }
    ended.recv_timeout(BOUND).unwrap();
    assert_eq!(mount.home.part_bytes.load(std::sync::atomic::Ordering::SeqCst), 0);
    let counts = mount.home.counts();
    assert_eq!(counts.len(), CHUNKS);
    let again: Vec<_> = counts.iter().filter(|(_, count)| **count > 1).collect();
    assert!(again.is_empty(), "fetched more than once: {again:?}");
}

#[test]
fn a_hostile_plan_and_a_home_that_fails_do_no_harm() {
    if cannot_mount("a_hostile_plan_and_a_home_that_fails_do_no_harm") {
        return;
    }
    let mut set = SetBuilder::new();
    let root = set.root();
    let mut sparse = vec![0; 3 * CHUNK_BYTES];
    sparse[0] = 1;
    let sparse = set.file(root, b"sparse", sparse);
    let gone = set.file(root, b"gone", noise(2, 100));
    let good = set.file(root, b"good", noise(3, 100));
    let mount = Mounted::new(set, CACHE);
    let [sparse, gone, good] = [sparse, gone, good].map(|draft| mount.order.inode(draft));
    let changed = || Fault::Fail(TransportError::SourceChanged { detail: "test".to_owned() });
    mount.home.spoil(gone, 0, (0..20).map(|_| changed()).collect());
    let plan = [
        (Inode(0), 0),
        (Inode(1), 0),
        (Inode(u64::from(u32::MAX)), u64::from(u32::MAX)),
        (sparse, 1),
        (sparse, 99),
        (gone, 0),
        (good, 0),
        (good, 0),
        (good, 1),
    ];
    let plan = plan.into_iter().map(|(inode, index)| Touch::new(inode, index, u32::MAX).unwrap()).collect();
    mount.read_ahead_by(plan).recv_timeout(BOUND).unwrap();
    let figures = mount.trace.figures();
    assert_eq!((figures.planned_chunks, figures.planned_bytes), (2, 200));
    assert_eq!(fs::read(mount.path("good")).unwrap(), noise(3, 100));
    assert_eq!(mount.trace.figures().hits, 1);
    let mut read = String::new();
    let error = fs::File::open(mount.path("gone")).unwrap().read_to_string(&mut read).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
}

#[test]
fn four_readers_of_more_than_the_cache_holds_fetch_hardly_anything_twice() {
    if cannot_mount("four_readers_of_more_than_the_cache_holds_fetch_hardly_anything_twice") {
        return;
    }
    const SMALL: u64 = 2500;
    const CHUNKS: u64 = 90;
    let set = || {
        let mut set = SetBuilder::new();
        for number in 0..SMALL {
            let len = 4000 + usize::try_from(number).unwrap() * 17;
            set.file(set.root(), format!("f{number:05}").as_bytes(), noise(number, len));
        }
        set.file(set.root(), b"large", noise(SMALL, usize::try_from(CHUNKS).unwrap() * CHUNK_BYTES));
        set
    };
    let read = |mount: &Mounted| {
        use std::os::unix::fs::FileExt as _;
        let mut order: Vec<_> = (0..SMALL + CHUNKS).collect();
        order.sort_by_key(|piece| noise(*piece, 8));
        let queue = std::sync::Mutex::new(order.into_iter());
        let next = || queue.lock().unwrap().next();
        let one = || {
            let mut piece = vec![0; CHUNK_BYTES];
            while let Some(number) = next() {
                let (name, at) = if number < SMALL {
                    (format!("f{number:05}"), 0)
                } else {
                    ("large".to_owned(), (number - SMALL) * CHUNK_BYTES as u64)
                };
                let file = fs::File::open(mount.path(name)).unwrap();
                nix::fcntl::posix_fadvise(&file, 0, 0, nix::fcntl::PosixFadviseAdvice::POSIX_FADV_RANDOM)
                    .unwrap();
                assert!(file.read_at(&mut piece, at).unwrap() > 0);
            }
        };
        std::thread::scope(|scope| (0..4).for_each(|_| drop(scope.spawn(one))));
    };
    let first = Mounted::new(set(), CACHE);
    read(&first);
    let second = Mounted::new(set(), 64 << 20);
    let ended = second.read_ahead_by(first.trace.touches());
    read(&second);
    ended.recv_timeout(BOUND).unwrap();
    let (figures, fetched) = (second.trace.figures(), second.fetcher.stats().fetched_bytes);
    assert_eq!(figures.touches, SMALL + CHUNKS);
    assert!(figures.foreseen * 100 >= figures.touches * 80, "{figures:?}");
    let all = second.manifest.total_bytes();
    assert!(fetched * 100 <= all * 105, "{fetched} of {all}, {figures:?}");
}

#[test]
fn parts_of_chunks_leave_no_trace_and_streams_do() {
    if cannot_mount("parts_of_chunks_leave_no_trace_and_streams_do") {
        return;
    }
    let mut set = SetBuilder::new();
    let draft = set.file(set.root(), b"large", noise(1, 40 * CHUNK_BYTES));
    set.file(set.root(), b"middling", noise(2, 100_000));
    let mount = Mounted::new(set, CACHE);
    mount.home.bandwidth_delay_bytes.store(75_000, std::sync::atomic::Ordering::SeqCst);
    let script = "import os,sys\nf=os.open(sys.argv[1],os.O_RDONLY)\nos.posix_fadvise(f,0,0,os.POSIX_FADV_RANDOM)\n\
                  for at in range(40): os.pread(f,4096,(at*17%40<<20)+(at*40960%900000))";
    mounted::python(script, &[&mount.path("large")]);
    assert_eq!(mount.trace.len(), 0, "{:?}", mount.trace.touches());
    fs::read(mount.path("middling")).unwrap();
    assert_eq!(mount.trace.len(), 1);
    fs::read(mount.path("large")).unwrap();
    let inode = mount.order.inode(draft);
    let touched = mount.trace.touches().iter().filter(|touch| touch.inode() == inode).count();
    assert!((39..=40).contains(&touched), "{touched}");
}
