//! What the writable mount refuses, and what it leaves to the kernel. Home is away all the time:
//! none of this needs it.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a test that is skipped says so")]

use std::ffi::CString;
use std::fs::{self, File, Permissions};
use std::io::{self, Write as _};
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use limb_agent::fetch::{ChunkAddress, ChunkSource, FetchError, FetchFuture, Priority};
use limb_agent::mount::session::{MountOptions, MountSession};
use limb_agent::mount::write::WriteFs;
use limb_agent::results::outbox::{Outbox, OutboxSettings};
use limb_agent::results::output::{Output, OutputSettings};
use limb_agent::results::tree::TreeSettings;
use limb_common::assignment::{Durability, OutputNumber};
use limb_common::chunk::{ChunkId, VerifiedChunk};
use nix::errno::Errno;
use nix::sys::statvfs::statvfs;
use tokio_util::sync::CancellationToken;

const QUOTA_BYTES: u64 = 8 << 20;
const QUOTA_INODES: u64 = 40;

/// Nothing is ever read back in these tests.
struct Nobody;

impl ChunkSource for Nobody {
    fn fetch(&self, _: ChunkAddress, _: ChunkId, _: Priority) -> FetchFuture {
        Box::pin(std::future::ready(Err(FetchError::NotFound)))
    }
    fn cached(&self, _: &ChunkId) -> Option<VerifiedChunk> {
        None
    }
}

/// Fields are dropped in this order: the mount before what answers it.
struct Mount {
    session: MountSession,
    stop: CancellationToken,
    directory: tempfile::TempDir,
    runtime: Option<tokio::runtime::Runtime>,
}

impl Drop for Mount {
    fn drop(&mut self) {
        self.session.unmount().unwrap();
        self.runtime.take().unwrap().shutdown_background();
    }
}

fn mounted(test: &str, durability: Durability) -> Option<Mount> {
    if !Path::new("/dev/fuse").exists() || !nix::unistd::geteuid().is_root() {
        // Written past the test runner's capture: a skip must be seen.
        drop(writeln!(std::io::stderr(), "SKIPPED {test}: needs root and /dev/fuse"));
        return None;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let stop = CancellationToken::new();
    let limits = OutboxSettings { dirty_bytes: 64 << 20, clean_bytes: 1 << 20 };
    let outbox = Outbox::new(limits, Box::new(|_| {}), stop.clone());
    let output = Output::new(OutputSettings {
        tree: TreeSettings {
            output: OutputNumber(1),
            lower: None,
            owner: (0, 0),
            quota_bytes: Some(QUOTA_BYTES),
            quota_inodes: Some(QUOTA_INODES),
            outbox: Some(outbox),
        },
        durability,
        lower_set: None,
        source: Arc::new(Nobody),
        stop: stop.clone(),
    });
    let directory = tempfile::tempdir().unwrap();
    let options = MountOptions {
        path: directory.path().to_owned(),
        read_only: false,
        name: "rules-test".to_owned(),
        stop: stop.clone(),
    };
    let session = MountSession::mount(WriteFs::new(output, runtime.handle().clone()), options).unwrap();
    Some(Mount { session, stop, directory, runtime: Some(runtime) })
}

impl Mount {
    fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.directory.path().join(name)
    }

    fn c_path(&self, name: &str) -> CString {
        CString::new(self.path(name).as_os_str().as_bytes()).unwrap()
    }
}

fn code<T>(result: io::Result<T>) -> Option<Errno> {
    result.err().and_then(|error| error.raw_os_error()).map(Errno::from_raw)
}

/// What a system call that answers -1 said.
fn called(answer: libc::c_int) -> Option<Errno> {
    (answer != 0).then(Errno::last)
}

#[test]
fn names_that_are_limbs_and_kinds_that_are_no_results_are_refused() {
    let Some(mount) = mounted("names_that_are_limbs", Durability::None) else { return };
    for name in [".limb", ".limb-x", ".limbo"] {
        assert_eq!(code(fs::write(mount.path(name), "x")), Some(Errno::EPERM), "{name}");
        assert_eq!(code(fs::create_dir(mount.path(name))), Some(Errno::EPERM), "{name}");
    }
    fs::write(mount.path("f"), "x").unwrap();
    assert_eq!(code(fs::rename(mount.path("f"), mount.path(".limb-f"))), Some(Errno::EPERM));
    let long = "n".repeat(256);
    assert_eq!(code(fs::write(mount.path(&long), "x")), Some(Errno::ENAMETOOLONG));
    fs::write(mount.path(&long[1..]), "x").unwrap();
    let pipe = nix::unistd::mkfifo(&mount.path("pipe"), nix::sys::stat::Mode::S_IRUSR);
    assert_eq!(pipe, Err(Errno::EPERM));
    assert_eq!(code(std::os::unix::net::UnixListener::bind(mount.path("socket"))), Some(Errno::EPERM));
}

#[test]
fn links_that_would_leave_the_output_are_refused_and_others_are_not() {
    let Some(mount) = mounted("links_that_would_leave", Durability::None) else { return };
    fs::create_dir(mount.path("d")).unwrap();
    for target in ["/etc/passwd", "..", "../x", "d/../../x"] {
        assert_eq!(code(symlink(target, mount.path("link"))), Some(Errno::EPERM), "{target}");
    }
    symlink("not-there-yet", mount.path("latest")).unwrap();
    symlink("../f", mount.path("d/up")).unwrap();
    assert_eq!(code(fs::rename(mount.path("d/up"), mount.path("up"))), Some(Errno::EPERM));
}

#[test]
fn set_id_bits_do_not_stay() {
    let Some(mount) = mounted("set_id_bits_do_not_stay", Durability::None) else { return };
    fs::write(mount.path("f"), "x").unwrap();
    fs::set_permissions(mount.path("f"), Permissions::from_mode(0o6755)).unwrap();
    assert_eq!(fs::metadata(mount.path("f")).unwrap().mode() & 0o7777, 0o755);
}

#[test]
fn only_user_attributes_are_kept() {
    let Some(mount) = mounted("only_user_attributes_are_kept", Durability::None) else { return };
    fs::write(mount.path("f"), "x").unwrap();
    let set = |name: &str| {
        let (path, name) = (mount.c_path("f"), CString::new(name).unwrap());
        // SAFETY: both strings end with NUL and the value is one byte long, as said.
        called(unsafe { libc::setxattr(path.as_ptr(), name.as_ptr(), b"v".as_ptr().cast(), 1, 0) })
    };
    assert_eq!(set("user.colour"), None);
    assert_eq!(set("trusted.x"), Some(Errno::EOPNOTSUPP));
}

#[test]
fn names_are_exchanged_by_nobody_and_kept_when_asked() {
    let Some(mount) = mounted("names_are_exchanged_by_nobody", Durability::None) else { return };
    fs::write(mount.path("a"), "a").unwrap();
    fs::write(mount.path("b"), "b").unwrap();
    let rename = |flags| {
        let (from, to) = (mount.c_path("a"), mount.c_path("b"));
        // SAFETY: both strings end with NUL.
        called(unsafe { libc::renameat2(libc::AT_FDCWD, from.as_ptr(), libc::AT_FDCWD, to.as_ptr(), flags) })
    };
    assert_eq!(rename(libc::RENAME_EXCHANGE), Some(Errno::EINVAL));
    assert_eq!(rename(libc::RENAME_NOREPLACE), Some(Errno::EEXIST));
    assert_eq!(rename(0), None);
    assert_eq!(fs::read_to_string(mount.path("b")).unwrap(), "a");
}

#[test]
fn fallocate_lengthens_and_does_nothing_else() {
    let Some(mount) = mounted("fallocate_lengthens", Durability::None) else { return };
    let file = File::create(mount.path("f")).unwrap();
    // SAFETY: an open descriptor and plain numbers.
    let allocate = |mode, len| called(unsafe { libc::fallocate(file.as_raw_fd(), mode, 0, len) });
    assert_eq!(allocate(0, 5000), None);
    assert_eq!(fs::read(mount.path("f")).unwrap(), [0; 5000]);
    for mode in [libc::FALLOC_FL_KEEP_SIZE, libc::FALLOC_FL_ZERO_RANGE] {
        assert_eq!(allocate(mode, 9000), Some(Errno::EOPNOTSUPP), "{mode}");
    }
    let punch = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    assert_eq!(allocate(punch, 4096), Some(Errno::EOPNOTSUPP));
    assert_eq!(file.metadata().unwrap().len(), 5000);
}

#[test]
fn a_quota_is_an_error_at_the_write_and_shows_in_df() {
    let Some(mount) = mounted("a_quota_is_an_error", Durability::None) else { return };
    let size = usize::try_from(QUOTA_BYTES).unwrap();
    fs::write(mount.path("fits"), vec![1; size - 4096]).unwrap();
    let space = statvfs(mount.directory.path()).unwrap();
    assert_eq!(space.blocks() * space.fragment_size(), QUOTA_BYTES);
    assert_eq!(space.blocks_available() * space.fragment_size(), 4096);
    assert_eq!(code(fs::write(mount.path("more"), vec![2; 8192])), Some(Errno::EDQUOT));
    fs::remove_file(mount.path("fits")).unwrap();
    fs::write(mount.path("more"), vec![2; 8192]).unwrap();
    let refused = (0..QUOTA_INODES).find_map(|n| code(File::create(mount.path(n.to_string()))));
    assert_eq!(refused, Some(Errno::EDQUOT));
}

#[test]
fn locks_hold_between_the_processes_of_the_box() {
    let Some(mount) = mounted("locks_hold", Durability::None) else { return };
    let file = File::create(mount.path("lock")).unwrap();
    let try_flock = |how: &str| {
        let script = "import fcntl,sys\nf=open(sys.argv[1],'r+b')\n\
                      getattr(fcntl,sys.argv[2])(f,fcntl.LOCK_EX|fcntl.LOCK_NB)\n";
        let arguments = [mount.path("lock").into_os_string(), how.into()];
        let done =
            std::process::Command::new("python3").args(["-c", script]).args(arguments).output().unwrap();
        let said = String::from_utf8_lossy(&done.stderr).into_owned();
        assert!(done.status.success() || said.contains("BlockingIOError"), "{said}");
        done.status.success()
    };
    assert!(try_flock("flock") && try_flock("lockf"));
    file.lock().unwrap();
    assert!(!try_flock("flock"));
    file.unlock().unwrap();
    assert!(try_flock("flock"));
    let mut whole: libc::flock = libc::flock { l_type: 0, l_whence: 0, l_start: 0, l_len: 0, l_pid: 0 };
    whole.l_type = libc::c_short::try_from(libc::F_WRLCK).unwrap();
    // SAFETY: an open descriptor and a lock that outlives the call.
    assert_eq!(called(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETLK, &raw const whole) }), None);
    assert!(!try_flock("lockf"));
}

#[test]
fn durability_none_waits_for_nobody() {
    let Some(mount) = mounted("durability_none_waits_for_nobody", Durability::None) else { return };
    fs::write(mount.path("f"), "x").unwrap();
    File::options().write(true).open(mount.path("f")).unwrap().sync_all().unwrap();
    File::open(mount.directory.path()).unwrap().sync_all().unwrap();
}

/// Home is gone and the lease ends: what waited for it fails, it never pretends.
fn fails_when_the_box_ends(
    mount: &Mount,
    waits: impl FnOnce(File) -> Option<Errno> + Send + 'static,
) -> Option<Errno> {
    let mut file = File::create(mount.path("f")).unwrap();
    file.write_all(b"x").unwrap();
    let (begins, began) = std::sync::mpsc::channel();
    let waiting = std::thread::spawn(move || {
        begins.send(()).unwrap();
        waits(file)
    });
    began.recv().unwrap();
    mount.stop.cancel();
    waiting.join().unwrap()
}

#[test]
fn an_fsync_that_home_never_answered_fails_when_the_box_ends() {
    let Some(mount) = mounted("an_fsync_that_home_never_answered", Durability::Fsync) else { return };
    assert_eq!(fails_when_the_box_ends(&mount, |file| code(file.sync_all())), Some(Errno::EIO));
}

#[test]
fn close_waits_for_home_only_where_that_was_chosen() {
    let close = |file: File| called(nix::unistd::close(file).map_or(-1, |()| 0));
    let Some(mount) = mounted("close_waits_for_home", Durability::Close) else { return };
    assert_eq!(fails_when_the_box_ends(&mount, close), Some(Errno::EIO));
    drop(mount);
    let Some(mount) = mounted("close_waits_for_home", Durability::Fsync) else { return };
    assert_eq!(fails_when_the_box_ends(&mount, close), None);
}
