//! A process whose FUSE request was taken and not answered ignores SIGKILL. Aborting the mount first frees it.

use std::ffi::OsStr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, UNIX_EPOCH};

use fuser::{
    Errno, FileAttr, FileHandle, FileType, Filesystem, Generation, INodeNo, OpenFlags, ReplyAttr, ReplyEntry,
    ReplyOpen, Request,
};
use limb_agent::job::RunningJob;
use limb_agent::mount::session::{MountOptions, MountSession};
use limb_common::report::EndedBy;
use tokio_util::sync::CancellationToken;

use crate::support::{BOUND, Place, argv, read_only, runtime};

/// One file, `stalled`, whose opens are taken and never answered.
struct Stalled {
    opens: tokio::sync::mpsc::UnboundedSender<()>,
    kept: Arc<Mutex<Vec<ReplyOpen>>>,
}

const TTL: Duration = Duration::from_secs(60);

fn attributes(ino: INodeNo) -> FileAttr {
    let root = ino == INodeNo::ROOT;
    FileAttr {
        ino,
        size: 1 << 20,
        blocks: 1,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: if root { FileType::Directory } else { FileType::RegularFile },
        perm: if root { 0o755 } else { 0o644 },
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        flags: 0,
        blksize: 4096,
    }
}

impl Filesystem for Stalled {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        if name == "stalled" {
            reply.entry(&TTL, &attributes(INodeNo(2)), Generation(0));
        } else {
            reply.error(Errno::ENOENT);
        }
    }

    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        reply.attr(&TTL, &attributes(ino));
    }

    fn open(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        self.kept.lock().unwrap().push(reply);
        let _test_is_over = self.opens.send(());
    }
}

#[test]
fn a_process_stuck_in_fuse_is_killed_once_the_mount_is_aborted() {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    let place = Place::new();
    let (opens, mut opened) = tokio::sync::mpsc::unbounded_channel();
    let kept = Arc::new(Mutex::new(Vec::new()));
    let options = MountOptions {
        path: place.path("lower"),
        read_only: true,
        name: "test-stalled".to_owned(),
        stop: CancellationToken::new(),
    };
    let session = MountSession::mount(Stalled { opens, kept: kept.clone() }, options).unwrap();
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
    drop(kept);
}
