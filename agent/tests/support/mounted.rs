//! A set mounted for real, and programs that are run on it with a bound.
#![allow(dead_code, reason = "each test program uses a part of it")]
#![allow(clippy::print_stdout, clippy::print_stderr, reason = "a test that is skipped says so")]

use std::io::Write as _;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use limb_agent::fetch::{ChunkTransport, FetchError, Fetcher, FetcherLimits, Spill};
use limb_agent::mount::read::{Owner, PushStats, Pusher, ReadFs, ReadFsOptions};
use limb_agent::mount::session::{MountOptions, MountSession};
use limb_agent::trace::{SetTrace, Shares, replay};
use limb_common::assignment::SetNumber;
use limb_common::manifest::{Manifest, NodeOrder};
use limb_common::trace::Touch;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

use crate::memory::{Home, SetBuilder};

/// No program in these tests needs nearly so long.
const BOUND: Duration = Duration::from_secs(120);

pub(crate) const OWNER: Owner = Owner { uid: 1234, gid: 4321 };

/// Fields are dropped in this order: the mount before what answers it.
pub(crate) struct Mounted {
    pub(crate) session: MountSession,
    pub(crate) stop: CancellationToken,
    pub(crate) fetcher: Fetcher,
    pub(crate) home: Home,
    pub(crate) order: NodeOrder,
    pub(crate) manifest: Manifest,
    pub(crate) problems: Arc<Mutex<Vec<(PathBuf, FetchError)>>>,
    pub(crate) trace: Arc<SetTrace>,
    /// Of what is pushed into the page cache, where that is on.
    pub(crate) pushed: Option<Arc<PushStats>>,
    pub(crate) directory: tempfile::TempDir,
    runtime: Option<Runtime>,
}

impl Drop for Mounted {
    fn drop(&mut self) {
        self.home.stalled.send_replace(false);
        self.session.unmount().unwrap();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

/// True, after saying so loudly, where FUSE cannot be mounted.
pub(crate) fn cannot_mount(test: &str) -> bool {
    let able = Path::new("/dev/fuse").exists() && nix::unistd::geteuid().is_root();
    if !able {
        // Written past the test runner's capture: a skip must be seen.
        drop(writeln!(std::io::stderr(), "SKIPPED {test}: needs root and /dev/fuse"));
    }
    !able
}

impl Mounted {
    pub(crate) fn new(set: SetBuilder, cache_bytes: u64) -> Self {
        Self::over(set, cache_bytes, |home| Arc::new(home.clone()))
    }

    /// With a transport of the test's own, made within the runtime that will drive it.
    pub(crate) fn over(
        set: SetBuilder,
        cache_bytes: u64,
        transport: impl FnOnce(&Home) -> Arc<dyn ChunkTransport>,
    ) -> Self {
        Self::made(set, cache_bytes, None, false, transport)
    }

    pub(crate) fn spilling(set: SetBuilder, cache_bytes: u64, spill: Spill) -> Self {
        Self::made(set, cache_bytes, Some(spill), false, |home| Arc::new(home.clone()))
    }

    pub(crate) fn pushing(set: SetBuilder, cache_bytes: u64) -> Self {
        Self::made(set, cache_bytes, None, true, |home| Arc::new(home.clone()))
    }

    fn made(
        set: SetBuilder,
        cache_bytes: u64,
        spill: Option<Spill>,
        push: bool,
        transport: impl FnOnce(&Home) -> Arc<dyn ChunkTransport>,
    ) -> Self {
        let (manifest, order, home) = set.finish();
        let home = Home(Arc::new(home));
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let stop = CancellationToken::new();
        let limits = FetcherLimits::with_cache(cache_bytes);
        let transport = {
            let _runtime = runtime.enter();
            transport(&home)
        };
        let fetcher = Fetcher::spilling(transport, limits, spill, runtime.handle().clone(), &stop);
        let problems: Arc<Mutex<Vec<(PathBuf, FetchError)>>> = Arc::default();
        let seen = Arc::clone(&problems);
        let trace = Arc::new(SetTrace::new(SetNumber(0), manifest.clone(), Arc::default()));
        let pushed: Option<Arc<PushStats>> = push.then(Arc::default);
        let source = Arc::new(fetcher.clone());
        let push = pushed.clone().map(|stats| Pusher::new(manifest.clone(), source, stats));
        let (pusher, push) = push.unzip();
        let fs = ReadFs::new(ReadFsOptions {
            manifest: manifest.clone(),
            set: SetNumber(0),
            source: Arc::new(fetcher.clone()),
            owner: OWNER,
            on_problem: Arc::new(move |path, error| {
                seen.lock().unwrap().push((path.to_owned(), error.clone()));
            }),
            trace: Some(Arc::clone(&trace)),
            push,
            stop: stop.clone(),
            runtime: runtime.handle().clone(),
        });
        let directory = tempfile::tempdir().unwrap();
        let options = MountOptions {
            path: directory.path().to_owned(),
            read_only: true,
            name: "test".to_owned(),
            stop: stop.clone(),
        };
        let session = MountSession::mount(fs, options).unwrap();
        pusher.into_iter().for_each(|pusher| pusher.start(session.storer()).unwrap());
        let runtime = Some(runtime);
        Self { session, stop, fetcher, home, order, manifest, problems, trace, pushed, directory, runtime }
    }

    /// Reads ahead by a plan; the receiver hears when that has ended.
    pub(crate) fn read_ahead_by(&self, plan: Vec<Touch>) -> mpsc::Receiver<()> {
        let (tell, told) = mpsc::channel();
        let replaying =
            replay(Arc::clone(&self.trace), plan, Arc::new(self.fetcher.clone()), Shares::default());
        self.runtime.as_ref().unwrap().spawn(async move {
            replaying.await;
            let _gone = tell.send(());
        });
        told
    }

    pub(crate) fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.directory.path().join(name)
    }
}

/// Waits for a child on another thread, so that the wait has a bound.
pub(crate) fn ended_within(mut child: Child, bound: Duration) -> Option<Output> {
    let pid = nix::unistd::Pid::from_raw(i32::try_from(child.id()).unwrap());
    let (tell, told) = mpsc::channel();
    child.stdin.take();
    let waiter = std::thread::spawn(move || {
        let _late = tell.send(child.wait_with_output().unwrap());
    });
    let ended = told.recv_timeout(bound).ok();
    if ended.is_none() {
        nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL).unwrap();
        return None;
    }
    waiter.join().unwrap();
    ended
}

/// Runs a program to its end and gives what it printed.
pub(crate) fn run(program: &str, arguments: &[&std::ffi::OsStr], directory: &Path) -> String {
    let child = Command::new(program)
        .args(arguments)
        .current_dir(directory)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap_or_else(|error| panic!("{program}: {error}"));
    let output = ended_within(child, BOUND).unwrap_or_else(|| panic!("{program} did not end"));
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.success(),
        "{program}: code {:?} signal {:?}: {said}",
        output.status.code(),
        output.status.signal()
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(crate) fn shell(script: &str, arguments: &[&Path]) -> String {
    let mut all: Vec<&std::ffi::OsStr> = vec!["-ec".as_ref(), script.as_ref(), "sh".as_ref()];
    all.extend(arguments.iter().map(|path| path.as_os_str()));
    run("bash", &all, Path::new("/"))
}

pub(crate) fn python(script: &str, arguments: &[&Path]) -> String {
    let mut all: Vec<&std::ffi::OsStr> = vec!["-c".as_ref(), script.as_ref()];
    all.extend(arguments.iter().map(|path| path.as_os_str()));
    run("python3", &all, Path::new("/"))
}
