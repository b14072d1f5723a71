//! Jobs over a FUSE mount: one whose workdir lies on it, and one that waits for it in vain.
//! A process whose FUSE request was taken and not answered ignores SIGKILL. Aborting the mount first frees it.

use std::ffi::OsStr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation, INodeNo, LockOwner, OpenFlags,
    ReplyAttr, ReplyData, ReplyDirectory, ReplyEntry, ReplyOpen, Request,
};
use limb_agent::job::changes::{ChangeKind, changes};
use limb_agent::job::layer::WorkdirLayer;
use limb_agent::job::{JobError, RunningJob, Workdir};
use limb_agent::mount::session::{MountOptions, MountSession};
use limb_common::report::EndedBy;
use tokio_util::sync::CancellationToken;

use crate::support::{BOUND, Place, argv, read_only, runtime, text, try_run};

/// Two files: `stalled`, whose opens are taken and never answered, and `quick`.
struct Stalled {
    opens: tokio::sync::mpsc::UnboundedSender<()>,
    kept: Arc<Mutex<Vec<ReplyOpen>>>,
}

const STALLED: INodeNo = INodeNo(2);
const QUICK: INodeNo = INodeNo(3);
const CONTENT: &[u8] = b"from home\n";
const TTL: Duration = Duration::from_secs(60);

fn attributes(ino: INodeNo) -> FileAttr {
    let root = ino == INodeNo::ROOT;
    FileAttr {
        ino,
        size: CONTENT.len() as u64,
        blocks: 1,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: if root { FileType::Directory } else { FileType::RegularFile },
        perm: if root { 0o755 } else { 0o644 },
        nlink: 1,
        uid: nix::unistd::geteuid().as_raw(),
        gid: nix::unistd::getegid().as_raw(),
        rdev: 0,
        flags: 0,
        blksize: 4096,
    }
}

impl Filesystem for Stalled {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        match name.to_str() {
            Some("stalled") => reply.entry(&TTL, &attributes(STALLED), Generation(0)),
            Some("quick") => reply.entry(&TTL, &attributes(QUICK), Generation(0)),
            Some(_) | None => reply.error(Errno::ENOENT),
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &attributes(ino));
    }

    fn readdir(&self, _: &Request, _: INodeNo, _: FileHandle, offset: u64, mut reply: ReplyDirectory) {
        let all = [(STALLED, "stalled"), (QUICK, "quick")];
        for (number, (ino, name)) in (1..).zip(all) {
            if number > offset && reply.add(ino, number, FileType::RegularFile, name) {
                break;
            }
        }
        reply.ok();
    }

    fn read(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        _: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        reply.data(CONTENT.get(usize::try_from(offset).unwrap()..).unwrap_or_default());
    }

    fn open(&self, _: &Request, ino: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        if ino == QUICK {
            reply.opened(FileHandle(0), FopenFlags::empty());
            return;
        }
        self.kept.lock().unwrap().push(reply);
        let _test_is_over = self.opens.send(());
    }
}

fn mount(place: &Place, opens: tokio::sync::mpsc::UnboundedSender<()>) -> MountSession {
    let options = MountOptions {
        path: place.path("lower"),
        read_only: true,
        name: "test-stalled".to_owned(),
        stop: CancellationToken::new(),
    };
    MountSession::mount(Stalled { opens, kept: Arc::default() }, options).unwrap()
}

#[test]
pub(crate) fn a_set_on_fuse_is_a_writable_workdir() {
    if std::fs::File::options().read(true).write(true).open("/dev/fuse").is_err() {
        eprintln!("not checked: /dev/fuse is closed to this user");
        return;
    }
    let place = Place::new();
    let (opens, _opened) = tokio::sync::mpsc::unbounded_channel();
    let _session = mount(&place, opens);
    let layer = WorkdirLayer::create(place.dir.path(), "ram").unwrap();
    let mut spec = place.script("ls; cat quick; echo more >>quick; cat quick; rm stalled; ls; echo new >new");
    spec.view.workdir = Workdir::Overlay { lower: place.path("lower"), layer: layer.path().to_owned() };
    let (end, output) = match try_run(spec) {
        Err(JobError::OverlayRefused(why)) => {
            eprintln!("not checked: {why}");
            return;
        }
        other => other.unwrap(),
    };
    assert_eq!(text(&output), "quick\nstalled\nfrom home\nfrom home\nmore\nquick");
    assert_eq!(end.how, EndedBy::Exit(0));
    let found = changes(&layer.upper(), Some(&place.path("lower"))).unwrap();
    let names: Vec<_> = found.iter().map(|change| (change.path.to_str().unwrap(), change.kind)).collect();
    let wanted =
        [("new", ChangeKind::Created), ("quick", ChangeKind::Modified), ("stalled", ChangeKind::Removed)];
    assert_eq!(names, wanted);
}

#[test]
fn a_process_stuck_in_fuse_is_killed_once_the_mount_is_aborted() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let place = Place::new();
    let (opens, mut opened) = tokio::sync::mpsc::unbounded_channel();
    let session = mount(&place, opens);
    runtime().block_on(async {
        let mut spec = place.spec(argv(&["cat", "/limb-data/stalled"]));
        spec.view.mounts = vec![read_only(&place.path("lower"), "/limb-data")];
        let job = RunningJob::start(spec).await.unwrap();
        tokio::time::timeout(BOUND, opened.recv()).await.unwrap().unwrap();
        // Without the abort it stays, and says so in bounded time rather than hanging.
        job.kill_switch().fire();
        assert!(tokio::time::timeout(Duration::from_millis(300), job.wait()).await.is_err());
        job.kill(|| session.abort().unwrap()).await.unwrap();
        assert!(job.is_gone());
        assert_eq!(job.wait().await.how, EndedBy::Signal(9));
    });
}
