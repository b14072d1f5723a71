//! The cache on the box's disk, behind the real fetcher and under a real mount: what it serves,
//! what it promises, and that a killed agent leaves nothing on the disk that anybody can read.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(
    clippy::print_stdout,
    clippy::print_stderr,
    reason = "the child talks to its parent, a skip is said"
)]

#[path = "support/loop_disk.rs"]
mod loop_disk;
#[path = "support/memory.rs"]
mod memory;
#[path = "support/mounted.rs"]
mod mounted;

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, mpsc};

use limb_agent::fetch::{
    ChunkAddress, ChunkSource as _, Fetcher, FetcherLimits, Priority, Spill, SpillEvent, SpillSettings,
};
use limb_common::assignment::SetNumber;
use limb_common::chunk::{CHUNK_BYTES, CHUNK_BYTES_U64, ChunkId};
use limb_common::manifest::{ChunkRef, Inode, Manifest};
use loop_disk::{LoopDisk, cannot_mount_disks};
use memchr::memmem;
use memory::{Home, SetBuilder, noise};
use mounted::Mounted;
use nix::unistd::Pid;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

const MEMORY_BYTES: u64 = 64 << 20;

fn settings(dir: &Path, disk_bytes: u64) -> (SpillSettings, mpsc::Receiver<SpillEvent>) {
    let (tell, told) = mpsc::channel();
    let on_event = Box::new(move |event| drop(tell.send(event)));
    let dir = dir.to_owned();
    (SpillSettings { dir, disk_bytes, memory_bytes: MEMORY_BYTES, on_event }, told)
}

/// A directory on a disk: /tmp may be memory.
fn on_disk() -> tempfile::TempDir {
    tempfile::tempdir_in(Path::new(env!("CARGO_MANIFEST_DIR")).join("../target")).unwrap()
}

/// One file of so many chunks behind a fetcher with a disk.
struct Setup {
    home: Home,
    fetcher: Fetcher,
    file: Inode,
    manifest: Manifest,
    bytes: Vec<u8>,
    events: mpsc::Receiver<SpillEvent>,
    _stop: CancellationToken,
}

fn setup(chunks: usize, dir: &Path, disk_bytes: u64) -> Setup {
    let mut set = SetBuilder::new();
    let bytes = noise(1, chunks * CHUNK_BYTES);
    let draft = set.file(set.root(), b"f", bytes.clone());
    let (manifest, order, home) = set.finish();
    let home = Home(Arc::new(home));
    let stop = CancellationToken::new();
    let (settings, events) = settings(dir, disk_bytes);
    let spill = Spill::open(settings).unwrap();
    let limits = FetcherLimits::with_cache(MEMORY_BYTES);
    let fetcher = Fetcher::spilling(Arc::new(home.clone()), limits, Some(spill), Handle::current(), &stop);
    Setup { home, fetcher, file: order.inode(draft), manifest, bytes, events, _stop: stop }
}

impl Setup {
    fn chunk(&self, index: u64) -> (ChunkAddress, ChunkId) {
        let Some(ChunkRef::Data(id)) = self.manifest.node(self.file).unwrap().chunk(index) else {
            panic!("chunk {index} is a hole")
        };
        (ChunkAddress::Set { set: SetNumber(0), inode: self.file, index }, id)
    }

    /// With a disk that keeps up, whatever this machine's does.
    async fn read(&self, index: u64, priority: Priority) {
        let (address, id) = self.chunk(index);
        let chunk = self.fetcher.fetch(address, id, priority).await.unwrap();
        let from = usize::try_from(index).unwrap() * CHUNK_BYTES;
        assert!(chunk.bytes()[..] == self.bytes[from..from + CHUNK_BYTES], "chunk {index} has other bytes");
        self.fetcher.settle();
        let stats = self.fetcher.stats();
        assert!(stats.cached_bytes + stats.spill.queued_bytes <= MEMORY_BYTES, "{stats:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_memory_cannot_hold_comes_back_from_the_disk_and_not_from_home() {
    let dir = on_disk();
    let setup = setup(120, dir.path(), 256 << 20);
    for round in 0..3 {
        for index in 0..120 {
            setup.read(index, Priority::Demand).await;
        }
        assert_eq!(setup.home.asks(), 120, "round {round}");
    }
    let stats = setup.fetcher.stats();
    assert_eq!((stats.fetched_chunks, stats.spill.damaged, stats.spill.dropped), (120, 0, 0));
    assert!(stats.spill.hits >= 2 * 80, "{stats:?}");
    // A part of a chunk that the disk has is not worth asking home for.
    let (address, id) = setup.chunk(0);
    let part = setup.fetcher.fetch_slice(address, id, 5000..6000).await.unwrap();
    assert_eq!(part.bytes()[..], setup.bytes[5000..6000]);
    assert_eq!((setup.home.asks(), setup.fetcher.stats().fetched_parts), (120, 0));
    assert!(setup.events.try_recv().is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_pass_over_three_times_what_both_hold_leaves_what_is_used_again() {
    let dir = on_disk();
    let setup = setup(400, dir.path(), 64 << 20);
    let hot = 0..48;
    for _ in 0..2 {
        for index in hot.clone() {
            setup.read(index, Priority::Demand).await;
        }
    }
    for index in 100..400 {
        setup.read(index, Priority::Demand).await;
        assert!(setup.fetcher.stats().spill.held_bytes <= 64 << 20);
    }
    let before = setup.home.asks();
    for index in hot.clone() {
        setup.read(index, Priority::Demand).await;
    }
    let again = setup.home.asks() - before;
    assert!(again <= 4, "{again} of {} were fetched again", hot.end);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_read_ahead_within_the_room_is_still_there_for_its_reader() {
    let dir = on_disk();
    let setup = setup(90, dir.path(), 64 << 20);
    let room = setup.fetcher.room_ahead_bytes();
    let memory_and_disk = 64 << 20..128 << 20;
    assert!(memory_and_disk.contains(&room), "{room}");
    let fits = room.min(90 * CHUNK_BYTES_U64) / CHUNK_BYTES_U64;
    assert!(fits > 70, "more than memory alone holds");
    for index in 0..fits {
        setup.read(index, Priority::Trace).await;
    }
    // All of it is ahead still, and all the room is for it.
    assert!(setup.fetcher.room_ahead_bytes() >= fits * CHUNK_BYTES_U64);
    for index in 0..fits {
        setup.read(index, Priority::Demand).await;
    }
    assert!(setup.home.counts().values().all(|&count| count == 1), "something was pushed out unread");
}

/// A disk that others fill up, as on a rented box.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_disk_that_others_fill_up_is_left_to_them_with_one_event() {
    if cannot_mount_disks("a_disk_that_others_fill_up_is_left_to_them_with_one_event") {
        return;
    }
    let disk = LoopDisk::new(96 << 20);
    let setup = setup(120, disk.path(), 64 << 20);
    for index in 0..45 {
        setup.read(index, Priority::Demand).await;
    }
    assert!(setup.fetcher.stats().spill.held_bytes > 0);
    disk.fill();
    for index in 45..120 {
        setup.read(index, Priority::Demand).await;
    }
    let Ok(SpillEvent::Stopped { reason }) = setup.events.try_recv() else { panic!("it went on") };
    assert!(reason.contains("No space left"), "{reason}");
    assert!(setup.events.try_recv().is_err(), "one event");
    // What it had is the others' now; everything is served as before.
    assert!(disk.free_bytes() > 0);
    assert_eq!(setup.fetcher.stats().spill.held_bytes, 0);
    for index in (0..120).rev() {
        setup.read(index, Priority::Demand).await;
    }
}

/// What the child needs to know, and that it is one.
const CANARY: &str = "LIMB_TEST_CANARY";
const PRIVATE: &str = "LIMB_TEST_PRIVATE";
const PLAIN: &str = "LIMB_TEST_PLAIN";
const SPILLED: &str = "SPILLED ";

/// No test but the agent of the tests below: mounts a set full of the canary, has it read twice
/// and waits to be killed.
#[test]
fn the_agent_that_is_killed() {
    let (Ok(canary), Ok(private)) = (std::env::var(CANARY), std::env::var(PRIVATE)) else { return };
    limb_agent::host::harden().unwrap();
    let mut set = SetBuilder::new();
    let root = set.root();
    for number in 0..60 {
        let len = if number < 40 { 3 * CHUNK_BYTES } else { 70_000 };
        let mut bytes = Vec::with_capacity(len + 100);
        while bytes.len() < len {
            bytes.extend_from_slice(format!("{canary} {number} {}\n", bytes.len()).as_bytes());
        }
        bytes.truncate(len);
        set.file(root, format!("f{number}").as_bytes(), bytes);
    }
    let (settings, _events) = settings(Path::new(&private), 128 << 20);
    let spill = if std::env::var_os(PLAIN).is_some() {
        Spill::open_unsealed_for_test(settings)
    } else {
        Spill::open(settings)
    };
    let mounted = Mounted::spilling(set, MEMORY_BYTES, spill.unwrap());
    for number in (0..60).chain(0..60) {
        mounted::shell("cat \"$1\" > /dev/null", &[&mounted.path(format!("f{number}"))]);
        // Whatever the disk is like: nothing is dropped.
        mounted.fetcher.settle();
    }
    println!("\n{SPILLED}{}", mounted.fetcher.stats().spill.spilled_bytes);
    loop {
        std::thread::park();
    }
}

/// Killed with SIGKILL, also by a test that fails.
struct Agent(Child);

impl Drop for Agent {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

struct Killed {
    disk: LoopDisk,
    spilled_bytes: u64,
    canary: String,
    /// Pieces of the expanded key, of an agent that seals.
    key: Vec<[u8; 16]>,
}

/// Runs the agent on a disk of its own, looks at it, and kills it.
fn kill_one(plain: bool) -> Killed {
    let disk = LoopDisk::new(256 << 20);
    let private = disk.path().join("private");
    std::fs::create_dir(&private).unwrap();
    let canary = format!("canary-{:032x}", rand::random::<u128>());
    let mut command = Command::new("unshare");
    // Mounts of its own go with it.
    command.args(["--mount", "--propagation", "private"]).arg(std::env::current_exe().unwrap());
    command.args(["the_agent_that_is_killed", "--exact", "--nocapture", "--test-threads=1"]);
    command.env(CANARY, &canary).env(PRIVATE, &private).env("TMPDIR", &private);
    if plain {
        command.env(PLAIN, "1");
    }
    let mut agent = Agent(command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap());
    let lines = BufReader::new(agent.0.stdout.take().unwrap()).lines();
    let spilled = lines.map(Result::unwrap).find_map(|line| line.strip_prefix(SPILLED).map(str::to_owned));
    let key = if plain { Vec::new() } else { key_of(Pid::from_raw(i32::try_from(agent.0.id()).unwrap())) };
    disk.sync();
    drop(agent);
    let spilled_bytes = spilled.expect("the agent ended by itself").parse().unwrap();
    Killed { disk, spilled_bytes, canary, key }
}

/// From the one page that is locked, left out of dumps and empty in a child; and nowhere else in
/// the agent's memory is there a copy of it.
fn key_of(pid: Pid) -> Vec<[u8; 16]> {
    let core = std::fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let core = core.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    assert_eq!(core.split_whitespace().nth(4), Some("0"), "{core}");
    let memory = ProcessMemory::of(pid);
    let is_the_keys = |flags: &str| ["lo", "dd", "wf"].iter().all(|flag| flags.contains(flag));
    let pages: Vec<_> = memory.mappings.iter().filter(|(_, flags)| is_the_keys(flags)).collect();
    let [(page, _)] = pages[..] else { panic!("{} mappings are as the key's", pages.len()) };
    assert_eq!(page.end - page.start, 4096);
    let bytes = memory.read(page.start, 4096);
    // Round keys and tables; what holds few different bytes is no secret.
    let secret = |window: &[u8; 16]| window.iter().collect::<std::collections::HashSet<_>>().len() >= 10;
    let key: Vec<[u8; 16]> = bytes.as_chunks::<16>().0.iter().copied().filter(secret).collect();
    assert!(key.len() >= 15, "an expanded AES-256 key has 15 round keys, here are {}", key.len());
    for (mapping, flags) in &memory.mappings {
        if mapping == page || !flags.contains("wr") {
            continue;
        }
        for start in mapping.clone().step_by(16 << 20) {
            let len = usize::try_from((mapping.end - start).min((16 << 20) + 16)).unwrap();
            let bytes = memory.read(start, len);
            for (number, window) in key.iter().enumerate() {
                assert!(
                    memmem::find(&bytes, window).is_none(),
                    "piece {number} of the key is at {start:x} too"
                );
            }
        }
    }
    key
}

struct ProcessMemory {
    file: std::fs::File,
    /// With the kernel's flags.
    mappings: Vec<(std::ops::Range<u64>, String)>,
}

impl ProcessMemory {
    fn of(pid: Pid) -> Self {
        let file = std::fs::File::open(format!("/proc/{pid}/mem")).unwrap();
        let maps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
        let (mut mappings, mut last) = (Vec::new(), 0..0);
        for line in maps.lines() {
            if let Some(flags) = line.strip_prefix("VmFlags:") {
                mappings.push((last.clone(), flags.to_owned()));
            } else if let Some((start, end)) =
                line.split_whitespace().next().and_then(|range| range.split_once('-'))
            {
                let number = |text| u64::from_str_radix(text, 16);
                if let (Ok(start), Ok(end)) = (number(start), number(end)) {
                    last = start..end;
                }
            }
        }
        Self { file, mappings }
    }

    /// As far as it can be read: guard pages cannot.
    fn read(&self, start: u64, len: usize) -> Vec<u8> {
        use std::os::unix::fs::FileExt as _;
        let mut bytes = vec![0; len];
        let read = self.file.read_at(&mut bytes, start).unwrap_or(0);
        bytes.truncate(read);
        bytes
    }
}

fn files_below(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() { files_below(&path, found) } else { found.push(path) }
    }
}

#[test]
fn a_killed_agent_leaves_neither_data_nor_the_key_on_the_disk() {
    if cannot_mount_disks("a_killed_agent_leaves_neither_data_nor_the_key_on_the_disk") {
        return;
    }
    let Killed { disk, spilled_bytes, canary, key } = kill_one(false);
    assert!(spilled_bytes > 64 << 20, "{spilled_bytes} bytes were on the disk");
    let mut files = Vec::new();
    files_below(disk.path(), &mut files);
    assert_eq!(files, Vec::<PathBuf>::new(), "nothing has a name");
    let image = disk.into_image();
    assert!(memmem::find(&image, canary.as_bytes()).is_none(), "the canary is on the disk");
    for (number, window) in key.iter().enumerate() {
        assert!(memmem::find(&image, window).is_none(), "piece {number} of the key is on the disk");
    }
    // What was written is there all the same: noise, as much as was said.
    let filled = image.as_chunks::<4096>().0.iter().filter(|block| block.iter().any(|&byte| byte != 0));
    assert!(filled.count() * 4096 >= usize::try_from(spilled_bytes.min(120 << 20)).unwrap());
}

/// The test above can fail: the same agent without its seal leaves the data there.
#[test]
fn without_the_seal_a_killed_agent_leaves_data_on_the_disk() {
    if cannot_mount_disks("without_the_seal_a_killed_agent_leaves_data_on_the_disk") {
        return;
    }
    let Killed { disk, spilled_bytes, canary, .. } = kill_one(true);
    assert!(spilled_bytes > 64 << 20, "{spilled_bytes} bytes were on the disk");
    let image = disk.into_image();
    assert!(memmem::find_iter(&image, canary.as_bytes()).count() > 100_000);
}
