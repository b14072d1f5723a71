//! Pushing into the page cache: that readers find the right bytes there and are still seen, and that
//! a push which hangs holds up nobody. Readers are processes of their own: one that is stuck in a
//! mount of its own process could not be killed.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/memory.rs"]
mod memory;
#[path = "support/mounted.rs"]
mod mounted;

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use limb_agent::fetch::{ChunkAddress, ChunkSource as _, Priority};
use limb_agent::mount::session::Stored;
use limb_common::assignment::SetNumber;
use limb_common::chunk::CHUNK_BYTES;
use limb_common::clock::boottime;
use limb_common::manifest::{ChunkRef, Inode};
use memory::{SetBuilder, noise};
use mounted::{Mounted, cannot_mount, ended_within, python};

const CACHE: u64 = 256 << 20;
const CHUNKS: usize = 48;
const BOUND: Duration = Duration::from_secs(20);

fn one_file(bytes: &[u8]) -> SetBuilder {
    let mut set = SetBuilder::new();
    set.file(set.root(), b"f", bytes.to_vec());
    set
}

fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
    let end = boottime() + BOUND;
    while !holds() {
        assert!(boottime() < end, "{what}");
        std::thread::yield_now();
    }
}

/// Everything of this file is in the agent's memory, and nobody has read it.
fn fetch_all(mount: &Mounted, name: &[u8]) -> Inode {
    let inode = mount.manifest.resolve(name).unwrap();
    let node = mount.manifest.node(inode).unwrap();
    for index in 0..node.chunk_count() {
        let Some(ChunkRef::Data(id)) = node.chunk(index) else { continue };
        let address = ChunkAddress::Set { set: SetNumber(0), inode, index };
        mount.fetcher.prefetch(address, id, Priority::Background);
        wait_for("a chunk to come", || mount.fetcher.has(&id));
    }
    inode
}

/// Reads eight chunks of argv[1], waits until three lie in the page cache but for their first page, and
/// prints which. The kernel itself reads ahead of the last one that was read, into the next.
const LOOK: &str = "import ctypes,mmap,os,sys,time\n\
    f=os.open(sys.argv[1],os.O_RDONLY); M=1<<20; n=os.fstat(f).st_size; libc=ctypes.CDLL(None,use_errno=True)\n\
    libc.mmap.restype=ctypes.c_void_p\n\
    libc.mmap.argtypes=[ctypes.c_void_p,ctypes.c_size_t,ctypes.c_int,ctypes.c_int,ctypes.c_int,ctypes.c_long]\n\
    for at in range(8): assert len(os.pread(f,M,at*M))==M\n\
    at=libc.mmap(None,n,1,1,f,0); end=time.monotonic()+20; pages=(n+4095)//4096; v=(ctypes.c_ubyte*pages)()\n\
    while True:\n\
    \x20assert libc.mincore(ctypes.c_void_p(at),ctypes.c_size_t(n),v)==0\n\
    \x20of=[[b&1 for b in v[c:c+256]] for c in range(0,pages,256)]\n\
    \x20pushed=[i for i,c in enumerate(of) if i>=10 and not c[0] and all(c[1:])]\n\
    \x20if len(pushed)>=3: print(*pushed); break\n\
    \x20assert time.monotonic()<end, [sum(c) for c in of]\n";

#[test]
fn a_reader_finds_what_was_pushed_and_is_seen_where_it_is_and_not_before() {
    if cannot_mount("a_reader_finds_what_was_pushed_and_is_seen_where_it_is_and_not_before") {
        return;
    }
    let bytes = noise(14, CHUNKS * CHUNK_BYTES);
    let mount = Mounted::pushing(one_file(&bytes), CACHE);
    let inode = fetch_all(&mount, b"f");
    let found = python(LOOK, &[&mount.path("f")]);
    let pushed: Vec<u64> = found.split_whitespace().map(|word| word.parse().unwrap()).collect();
    let touched: Vec<u64> = mount.trace.touches().iter().map(|touch| touch.index()).collect();
    assert!(touched.iter().all(|index| !pushed.contains(index)), "{touched:?} {pushed:?}");

    let script = "import sys\nb=open(sys.argv[1],'rb',buffering=0); a=open(sys.argv[2],'rb').read(); g=b''\n\
                  while c:=b.read(1<<20): g+=c\nprint(g==a)";
    let outside = tempfile::NamedTempFile::new().unwrap();
    fs::write(outside.path(), &bytes).unwrap();
    assert_eq!(python(script, &[&mount.path("f"), outside.path()]).trim(), "True");
    let touched = mount.trace.touches();
    assert!(touched.iter().all(|touch| touch.inode() == inode));
    let touched: Vec<u64> = touched.iter().map(|touch| touch.index()).collect();
    assert_eq!(touched, (0..CHUNKS as u64).collect::<Vec<_>>());
    assert_eq!(mount.trace.figures().hits, CHUNKS as u64);
    assert!(mount.pushed.as_ref().unwrap().chunks() > CHUNKS as u64 / 2, "{:?}", mount.pushed);
    assert!(mount.home.counts().values().all(|&count| count == 1));
}

#[test]
fn a_stream_is_read_ahead_also_where_its_chunks_are_pushed() {
    if cannot_mount("a_stream_is_read_ahead_also_where_its_chunks_are_pushed") {
        return;
    }
    let bytes = noise(14, CHUNKS * CHUNK_BYTES);
    let mount = Mounted::pushing(one_file(&bytes), CACHE);
    *mount.home.delay.lock().unwrap() = Duration::from_millis(20);
    // It reads slower than the link brings: what is ahead is here when it comes.
    let script = "import os,sys,time\nf=os.open(sys.argv[1],os.O_RDONLY)\n\
                  for at in range(48): os.pread(f,1<<20,at<<20); time.sleep(0.01)";
    python(script, &[&mount.path("f")]);
    let counts = mount.home.counts();
    assert!(counts.len() == CHUNKS && counts.values().all(|&count| count == 1));
    let demanded = mount.home.asked.borrow().iter().filter(|ask| ask.2 == Priority::Demand).count();
    assert!(demanded <= 12, "{demanded} chunks had to be waited for from the start");
    assert!(mount.pushed.as_ref().unwrap().chunks() >= 10, "{:?}", mount.pushed);
    assert_eq!(mount.trace.len(), CHUNKS);
}

/// Readers in order, by pages of a mapping and at random, of which some throw away what the kernel holds.
const ALL_KINDS: &str = "import mmap,os,random,sys,threading\n\
    b=open(sys.argv[2],'rb').read(); M=1<<20; bad=[]\n\
    def same(a,o): \n\
    \x20if a!=b[o:o+len(a)]: bad.append((o,len(a)))\n\
    def drop(f): os.posix_fadvise(f,0,0,os.POSIX_FADV_DONTNEED)\n\
    def reads(n):\n\
    \x20f=os.open(sys.argv[1],os.O_RDONLY); step=(M,300001,65536)[n%3]\n\
    \x20for _ in range(3):\n\
    \x20 for o in range(0,len(b),step):\n\
    \x20  g=os.pread(f,step,o); same(g,o)\n\
    \x20  if len(g)!=min(step,len(b)-o): bad.append(('short',o))\n\
    \x20 if n%2: drop(f)\n\
    def pages(n):\n\
    \x20f=os.open(sys.argv[1],os.O_RDONLY)\n\
    \x20m=mmap.mmap(f,0,prot=mmap.PROT_READ)\n\
    \x20for turn in range(2):\n\
    \x20 for o in range(0,len(b),4096): same(m[o:o+4096],o)\n\
    \x20 m.madvise(mmap.MADV_DONTNEED); drop(f)\n\
    def populated(n):\n\
    \x20f=os.open(sys.argv[1],os.O_RDONLY)\n\
    \x20for turn in range(3):\n\
    \x20 m=mmap.mmap(f,0,flags=mmap.MAP_SHARED|mmap.MAP_POPULATE,prot=mmap.PROT_READ); same(m[:],0); m.close(); drop(f)\n\
    def drops(n):\n\
    \x20f=os.open(sys.argv[1],os.O_RDONLY); r=random.Random(n)\n\
    \x20for _ in range(300):\n\
    \x20 o=4096*r.randrange(len(b)//4096); os.posix_fadvise(f,o,4*M,os.POSIX_FADV_DONTNEED)\n\
    \x20 l=r.randrange(1,200000); same(os.pread(f,l,o),o)\n\
    t=[threading.Thread(target=k,args=(n,)) for n,k in enumerate([reads]*6+[pages]*3+[populated]*2+[drops]*3)]\n\
    [x.start() for x in t]; [x.join() for x in t]\n\
    print(bad, os.fstat(os.open(sys.argv[1],os.O_RDONLY)).st_size==len(b))";

#[test]
fn bytes_are_right_however_they_are_read_and_dropped_while_they_are_pushed() {
    if cannot_mount("bytes_are_right_however_they_are_read_and_dropped_while_they_are_pushed") {
        return;
    }
    let bytes = noise(15, 20 * CHUNK_BYTES + 70_001);
    let outside = tempfile::NamedTempFile::new().unwrap();
    fs::write(outside.path(), &bytes).unwrap();
    let mount = Mounted::pushing(one_file(&bytes), CACHE);
    let said = python(ALL_KINDS, &[&mount.path("f"), outside.path()]);
    assert_eq!(said.trim(), "[] True");
    assert!(mount.pushed.as_ref().unwrap().chunks() > 0);
}

#[test]
fn a_file_larger_than_the_cache_is_right_mapped_in_page_order_and_populated_with_and_without_pushing() {
    let name =
        "a_file_larger_than_the_cache_is_right_mapped_in_page_order_and_populated_with_and_without_pushing";
    if cannot_mount(name) {
        return;
    }
    let bytes = noise(16, 40 * CHUNK_BYTES + 4097);
    let outside = tempfile::NamedTempFile::new().unwrap();
    fs::write(outside.path(), &bytes).unwrap();
    let script = "import mmap,os,sys\na=open(sys.argv[1],'rb'); b=open(sys.argv[2],'rb').read(); ok=True\n\
        for flags in (mmap.MAP_SHARED, mmap.MAP_PRIVATE|mmap.MAP_POPULATE, mmap.MAP_SHARED|mmap.MAP_POPULATE):\n\
        \x20m=mmap.mmap(a.fileno(),0,flags=flags,prot=mmap.PROT_READ)\n\
        \x20ok=ok and len(m)==len(b) and all(m[p:p+4096]==b[p:p+4096] for p in range(0,len(b),4096))\n\
        \x20m.close(); os.posix_fadvise(a.fileno(),0,0,os.POSIX_FADV_DONTNEED)\n\
        print(ok)";
    for new in [Mounted::new, Mounted::pushing] {
        let mount = new(one_file(&bytes), 8 << 20);
        assert_eq!(python(script, &[&mount.path("f"), outside.path()]).trim(), "True");
    }
}

fn reader(path: &Path) -> Child {
    let script = "import os,sys\nf=os.open(sys.argv[1],os.O_RDONLY)\nos.pread(f,1<<20,0)";
    Command::new("python3").arg("-c").arg(script).arg(path).stderr(Stdio::null()).spawn().unwrap()
}

/// A push of the chunk that a reader waits for, on a thread of its own, stuck by now.
fn stuck(mount: &Mounted, bytes: Vec<u8>) -> mpsc::Receiver<Stored> {
    let inode = mount.manifest.resolve(b"f").unwrap();
    let (tell, told) = mpsc::channel();
    let (tell_id, id) = mpsc::channel();
    let storer = mount.session.storer();
    std::thread::spawn(move || {
        tell_id.send(nix::unistd::gettid()).unwrap();
        let _late = tell.send(storer.store(inode, 0, &bytes).unwrap());
    });
    let stat = format!("/proc/self/task/{}/stat", id.recv().unwrap());
    wait_for("the push to wait for the page", || fs::read_to_string(&stat).unwrap().contains(") D "));
    assert!(told.try_recv().is_err());
    told
}

fn set_of_two(bytes: &[u8]) -> SetBuilder {
    let mut set = one_file(bytes);
    set.file(set.root(), b"g", noise(2, 3 * CHUNK_BYTES));
    set
}

#[test]
fn a_push_that_hangs_holds_up_neither_other_readers_nor_the_abort() {
    if cannot_mount("a_push_that_hangs_holds_up_neither_other_readers_nor_the_abort") {
        return;
    }
    let bytes = noise(17, 4 * CHUNK_BYTES);
    let mount = Mounted::pushing(set_of_two(&bytes), CACHE);
    fetch_all(&mount, b"g");
    let asks = mount.home.asks();
    mount.home.stalled.send_replace(true);
    let waiting = reader(&mount.path("f"));
    wait_for("the reader's chunk to be asked for", || mount.home.asks() > asks);
    let push = stuck(&mount, bytes[..CHUNK_BYTES].to_vec());
    let other = ended_within(reader(&mount.path("g")), BOUND).unwrap();
    assert!(other.status.success(), "a reader of what is here gets on");

    let began = boottime();
    mount.session.abort().unwrap();
    // With an error, or with the right bytes that were pushed in time.
    assert!(ended_within(waiting, BOUND).is_some());
    let became = push.recv_timeout(BOUND).unwrap();
    let took = boottime().saturating_since(began);
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert!(matches!(became, Stored::Done | Stored::Ending));
    let inode = mount.manifest.resolve(b"f").unwrap();
    assert_eq!(mount.session.storer().store(inode, 0, &bytes).unwrap(), Stored::Ending);
    mount.session.unmount().unwrap();
}

#[test]
fn a_push_that_waited_for_a_reader_leaves_the_right_bytes() {
    if cannot_mount("a_push_that_waited_for_a_reader_leaves_the_right_bytes") {
        return;
    }
    let bytes = noise(17, 4 * CHUNK_BYTES);
    let mount = Mounted::pushing(set_of_two(&bytes), CACHE);
    mount.home.stalled.send_replace(true);
    let waiting = reader(&mount.path("f"));
    wait_for("the reader's chunk to be asked for", || mount.home.asks() > 0);
    let push = stuck(&mount, bytes[..CHUNK_BYTES].to_vec());
    mount.home.stalled.send_replace(false);
    assert!(ended_within(waiting, BOUND).unwrap().status.success());
    assert_eq!(push.recv_timeout(BOUND), Ok(Stored::Done));
    let outside = tempfile::NamedTempFile::new().unwrap();
    fs::write(outside.path(), &bytes).unwrap();
    let script = "import sys\nprint(open(sys.argv[1],'rb').read()==open(sys.argv[2],'rb').read())";
    assert_eq!(python(script, &[&mount.path("f"), outside.path()]).trim(), "True");
}

#[test]
fn the_pusher_ends_with_its_mount_and_the_kernel_may_not_know_the_file() {
    if cannot_mount("the_pusher_ends_with_its_mount_and_the_kernel_may_not_know_the_file") {
        return;
    }
    let bytes = noise(18, 8 * CHUNK_BYTES);
    for abort_first in [false, true] {
        let mount = Mounted::pushing(one_file(&bytes), CACHE);
        let inode = mount.manifest.resolve(b"f").unwrap();
        let storer = mount.session.storer();
        assert_eq!(storer.store(inode, 0, &bytes[..4096]).unwrap(), Stored::Done);
        assert!(ended_within(reader(&mount.path("f")), BOUND).unwrap().status.success());
        let stats = mount.pushed.clone().unwrap();
        if abort_first {
            mount.session.abort_handle().abort().unwrap();
        } else {
            mount.session.unmount().unwrap();
        }
        assert_eq!(storer.store(inode, 0, &bytes[..4096]).unwrap(), Stored::Ending);
        // The thread, the mount and this test hold it.
        wait_for("the thread to end", || Arc::strong_count(&stats) == 2);
    }
}
