//! A writable mount over a home that checks every hash.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Duration;

use limb_agent::link::results::Uplink;
use limb_agent::mount::session::{MountOptions, MountSession};
use limb_agent::mount::write::WriteFs;
use limb_agent::results::outbox::{Outbox, OutboxSettings};
use limb_agent::results::output::{Output, OutputSettings, Settling};
use limb_agent::results::tree::TreeSettings;
use limb_common::assignment::{Durability, OutputNumber};
use limb_common::id::LeaseEpoch;
use tokio_util::sync::CancellationToken;

use crate::fake_results::{FakeHome, Reads, Seen};

/// Fields are dropped in this order: the mount before what answers it.
pub(crate) struct Rig {
    pub(crate) session: MountSession,
    pub(crate) home: FakeHome,
    pub(crate) outbox: Arc<Outbox>,
    pub(crate) output: Arc<Output>,
    _settling: Settling,
    _uplink: Uplink,
    pub(crate) directory: tempfile::TempDir,
    pub(crate) runtime: Option<tokio::runtime::Runtime>,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.home.0.held.send_replace(false);
        self.home.0.stalled.send_replace(false);
        self.home.0.reads.send_replace(Reads::Served);
        self.session.unmount().unwrap();
        self.runtime.take().unwrap().shutdown_background();
    }
}

pub(crate) const WIDE: OutboxSettings = OutboxSettings { dirty_bytes: 256 << 20, clean_bytes: 4 << 20 };

pub(crate) fn rig(test: &str, limits: OutboxSettings, durability: Durability) -> Option<Rig> {
    if !Path::new("/dev/fuse").exists() || !nix::unistd::geteuid().is_root() {
        // Written past the test runner's capture: a skip must be seen.
        drop(writeln!(std::io::stderr(), "SKIPPED {test}: needs root and /dev/fuse"));
        return None;
    }
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let home = FakeHome::new();
    let stop = CancellationToken::new();
    let outbox = Outbox::new(
        limits,
        Box::new(|refusal| drop(writeln!(std::io::stderr(), "{refusal:?}"))),
        stop.clone(),
    );
    let output = Output::new(OutputSettings {
        tree: TreeSettings {
            output: OutputNumber(1),
            lower: None,
            owner: (0, 0),
            quota_bytes: None,
            quota_inodes: None,
            outbox: Some(Arc::clone(&outbox)),
        },
        durability,
        lower_set: None,
        source: Arc::new(home.clone()),
        stop: stop.clone(),
    });
    let (settling, uplink) = runtime.block_on(async {
        let channels = home.serve().await;
        (output.start(), Uplink::start(Arc::clone(&outbox), channels, LeaseEpoch(1)))
    });
    let directory = tempfile::tempdir().unwrap();
    let fs = WriteFs::new(Arc::clone(&output), runtime.handle().clone());
    let options = MountOptions {
        path: directory.path().to_owned(),
        read_only: false,
        name: "results-test".to_owned(),
        stop,
    };
    let session = MountSession::mount(fs, options).unwrap();
    Some(Rig {
        session,
        home,
        outbox,
        output,
        _settling: settling,
        _uplink: uplink,
        directory,
        runtime: Some(runtime),
    })
}

impl Rig {
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(crate) fn shell(&self, script: &str) {
        let out = Command::new("timeout")
            .args(["100", "bash", "-euo", "pipefail", "-c", script])
            .current_dir(self.directory.path())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        assert!(out.status.success(), "{script}\n{}", String::from_utf8_lossy(&out.stderr));
    }

    /// Everything is home, and home is what the mount shows.
    pub(crate) fn check_home(&self) {
        let runtime = self.runtime.as_ref().unwrap();
        // The kernel tells of a last close some time after close(2).
        assert!(runtime.block_on(self.output.released(Duration::from_secs(10))));
        let report = runtime.block_on(self.outbox.drain(Duration::from_secs(60)));
        assert!(report.complete, "{report:?}");
        let (visible, modes) = {
            let shelf = self.home.0.shelf.lock().unwrap();
            assert_eq!(shelf.offences, Vec::<String>::new());
            (shelf.visible.clone(), shelf.modes.clone())
        };
        let mut count = 0;
        self.compare(self.directory.path(), (&visible, &modes), &mut count);
        assert_eq!(count, visible.len(), "home has more than the mount");
    }

    fn compare(&self, under: &Path, home: (&Visible, &Modes), count: &mut usize) {
        for entry in fs::read_dir(under).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(self.directory.path()).unwrap().to_str().unwrap();
            let kind = fs::symlink_metadata(&path).unwrap().file_type();
            *count += 1;
            match home.0.get(name.as_bytes()) {
                Some(Seen::Directory) if kind.is_dir() => self.compare(&path, home, count),
                Some(Seen::Symlink(_)) if kind.is_symlink() => {}
                Some(Seen::File(bytes)) if kind.is_file() => {
                    assert!(fs::read(&path).unwrap() == **bytes, "{name} differs");
                    let mode = fs::metadata(&path).unwrap().mode() & 0o7777;
                    assert_eq!(home.1[name.as_bytes()], mode, "mode of {name}");
                }
                other => panic!("{name}: at home: {}", other.is_some()),
            }
        }
    }
}

type Visible = BTreeMap<Vec<u8>, Seen>;
type Modes = BTreeMap<Vec<u8>, u32>;

pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
    out
}

/// Waits for something about the machine, bounded.
pub(crate) fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
    for _ in 0..4000 {
        if holds() {
            return;
        }
        std::thread::park_timeout(Duration::from_millis(5));
    }
    panic!("never came: {what}");
}
