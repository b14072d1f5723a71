//! Mounting and unmounting, with file systems that panic, hang or are mounted over.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/memory.rs"]
mod memory;
#[path = "support/mounted.rs"]
mod mounted;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, OpenFlags, ReplyAttr,
    ReplyEmpty, ReplyEntry, ReplyOpen, Request,
};
use limb_agent::mount::session::{MountError, MountOptions, MountSession};
use memory::{SetBuilder, noise};
use mounted::{Mounted, cannot_mount, ended_within};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use tokio_util::sync::CancellationToken;

/// `panic` panics; `hang` is never answered; everything else is an empty file.
struct Troubled {
    never: std::sync::Mutex<Vec<ReplyEntry>>,
    hung: mpsc::SyncSender<()>,
}

fn attr(number: u64, kind: FileType) -> FileAttr {
    let time = std::time::SystemTime::UNIX_EPOCH;
    FileAttr {
        ino: INodeNo(number),
        size: 0,
        blocks: 0,
        atime: time,
        mtime: time,
        ctime: time,
        crtime: time,
        kind,
        perm: 0o755,
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        blksize: 4096,
        flags: 0,
    }
}

impl Filesystem for Troubled {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str() {
            Some("panic") => panic!("ordered by the test"),
            Some("hang") => {
                self.never.lock().unwrap().push(reply);
                let _full = self.hung.try_send(());
            }
            _ => reply.entry(&Duration::ZERO, &attr(2, FileType::RegularFile), Generation(0)),
        }
    }
    fn getattr(&self, _: &Request, inode: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let kind = if inode.0 == 1 { FileType::Directory } else { FileType::RegularFile };
        reply.attr(&Duration::from_secs(60), &attr(inode.0, kind));
    }
    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        reply.opened(FileHandle(0), FopenFlags::empty());
    }
    fn flush(&self, _: &Request, _: INodeNo, _: FileHandle, _: fuser::LockOwner, reply: ReplyEmpty) {
        reply.error(Errno::ENOSYS);
    }
}

fn troubled(path: &Path) -> (MountSession, mpsc::Receiver<()>) {
    let (hung, told) = mpsc::sync_channel(16);
    let fs = Troubled { never: std::sync::Mutex::default(), hung };
    let options = MountOptions {
        path: path.to_owned(),
        read_only: false,
        name: "troubled".to_owned(),
        stop: CancellationToken::new(),
    };
    (MountSession::mount(fs, options).unwrap(), told)
}

/// By number and place: another test's mount may have the number by now.
fn listed(minor: u32, path: &Path) -> bool {
    let (number, place) = (format!(" 0:{minor} "), format!(" {} ", path.display()));
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    table.lines().any(|line| line.contains(&number) && line.contains(&place))
}

#[test]
fn a_handler_that_panics_answers_eio_and_the_mount_lives_on() {
    if cannot_mount("a_handler_that_panics_answers_eio_and_the_mount_lives_on") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (session, _told) = troubled(directory.path());
    // More often than there are threads.
    for _ in 0..20 {
        let refused = directory.path().join("panic").metadata().unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EIO));
    }
    assert!(directory.path().join("fine").metadata().unwrap().is_file());
    session.unmount().unwrap();
    assert!(!listed(session.minor(), directory.path()));
}

#[test]
fn a_hung_lookup_and_an_open_file_hold_nobody() {
    if cannot_mount("a_hung_lookup_and_an_open_file_hold_nobody") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (session, told) = troubled(directory.path());
    let open = File::open(directory.path().join("fine")).unwrap();
    let child = Command::new("stat")
        .arg(directory.path().join("hang"))
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    told.recv_timeout(Duration::from_secs(20)).unwrap();
    session.unmount().unwrap();
    assert!(!listed(session.minor(), directory.path()));
    assert!(!ended_within(child, Duration::from_secs(1)).expect("freed").status.success());
    assert!(open.metadata().is_err(), "the connection is gone");
}

#[test]
fn what_came_to_the_same_path_since_is_left_alone() {
    if cannot_mount("what_came_to_the_same_path_since_is_left_alone") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let (session, _told) = troubled(directory.path());
    umount2(directory.path(), MntFlags::MNT_DETACH).unwrap();
    mount(Some("limb-test"), directory.path(), Some("tmpfs"), MsFlags::empty(), None::<&str>).unwrap();
    fs::write(directory.path().join("precious"), "x").unwrap();
    session.unmount().unwrap();
    drop(session);
    assert_eq!(fs::read_to_string(directory.path().join("precious")).unwrap(), "x");
    umount2(directory.path(), MntFlags::MNT_DETACH).unwrap();
}

#[test]
fn what_cannot_be_mounted_leaves_nothing_behind() {
    if cannot_mount("what_cannot_be_mounted_leaves_nothing_behind") {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let attempt = |path: &Path, name: &str| {
        let (hung, _told) = mpsc::sync_channel(1);
        let fs = Troubled { never: std::sync::Mutex::default(), hung };
        let name = name.to_owned();
        let stop = CancellationToken::new();
        MountSession::mount(fs, MountOptions { path: path.to_owned(), read_only: true, name, stop })
    };
    assert!(matches!(attempt(directory.path(), "a,allow_root"), Err(MountError::BadName(_))));
    let missing = directory.path().join("missing");
    assert!(matches!(attempt(&missing, "x"), Err(MountError::MountPoint { .. })));
    let file = directory.path().join("file");
    fs::write(&file, "").unwrap();
    assert!(matches!(attempt(&file, "x"), Err(MountError::MountPoint { .. })));
    let table = fs::read_to_string("/proc/self/mountinfo").unwrap();
    assert!(!table.contains(&*directory.path().to_string_lossy()));
}

#[test]
fn dropping_a_session_unmounts() {
    if cannot_mount("dropping_a_session_unmounts") {
        return;
    }
    let mut set = SetBuilder::new();
    set.file(set.root(), b"f", noise(1, 10));
    let mounted = Mounted::new(set, 1 << 20);
    let (minor, place) = (mounted.session.minor(), mounted.path(""));
    let place = place.components().as_path().to_owned();
    assert!(listed(minor, &place));
    drop(mounted);
    assert!(!listed(minor, &place));
}

/// Run by `a_normal_user_mounts_through_fusermount3`, as that user.
#[test]
#[ignore = "needs to be a normal user: another test runs it"]
fn as_a_normal_user() {
    assert!(!nix::unistd::geteuid().is_root());
    let mut set = SetBuilder::new();
    set.file(set.root(), b"f", noise(1, 3 << 20));
    set.file(set.root(), b"g", noise(2, 3 << 20));
    let mounted = Mounted::new(set, 64 << 20);
    assert!(fs::read(mounted.path("f")).unwrap() == noise(1, 3 << 20));
    mounted.home.stalled.send_replace(true);
    let child = Command::new("cat").arg(mounted.path("g")).stdout(Stdio::null()).spawn().unwrap();
    let mut asked = mounted.home.asked.subscribe();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let inode = mounted.manifest.resolve(b"g").unwrap();
    runtime.block_on(async {
        let asks = asked.wait_for(|asked| asked.iter().any(|ask| ask.0 == inode));
        tokio::time::timeout(Duration::from_secs(20), asks).await.unwrap().unwrap();
    });
    mounted.session.abort().unwrap();
    assert!(!ended_within(child, Duration::from_secs(1)).expect("freed").status.success());
    let (minor, place) = (mounted.session.minor(), mounted.path(""));
    let place = place.components().as_path().to_owned();
    drop(mounted);
    assert!(!listed(minor, &place));
    println!("mounted and unmounted as a normal user");
}

#[test]
fn a_normal_user_mounts_through_fusermount3() {
    let name = "a_normal_user_mounts_through_fusermount3";
    let there = |program: &str| Command::new(program).arg("--version").output().is_ok();
    if cannot_mount(name) || !["fusermount3", "setpriv", "unshare"].into_iter().all(there) {
        writeln!(
            std::io::stderr(),
            "SKIPPED {name}: needs root, /dev/fuse, fusermount3, setpriv and unshare"
        )
        .unwrap();
        return;
    }
    // A /dev/fuse for everybody, as udev makes it, seen by nobody but this test.
    let script = "mknod -m 666 \"$1/fuse\" c 10 229 && mount --bind \"$1/fuse\" /dev/fuse && shift && \
        exec setpriv --reuid=65534 --regid=65534 --clear-groups -- \"$@\"";
    let directory = tempfile::tempdir().unwrap();
    let program = directory.path().join("test");
    fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    std::os::unix::fs::chown(directory.path(), Some(65534), Some(65534)).unwrap();
    let child = Command::new("unshare")
        .args(["--mount", "sh", "-c", script, "sh"])
        .args([directory.path(), &program])
        .args(["--ignored", "--exact", "as_a_normal_user", "--nocapture"])
        .env("TMPDIR", directory.path())
        .current_dir("/")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let output = ended_within(child, Duration::from_secs(60)).expect("ends");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    let complaint = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(said.contains("mounted and unmounted as a normal user"), "{said}{complaint}");
}
