//! The box for these tests: the real tree, outbox, uplink and chunk link, without FUSE. Calls are
//! made as the kernel makes them.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use limb_agent::fetch::{Fetcher, FetcherLimits};
use limb_agent::link::channels::{ChannelError, ChannelFuture, Channels};
use limb_agent::link::chunks::{ChunkPatience, GrpcChunks};
use limb_agent::link::results::Uplink;
use limb_agent::results::outbox::{Outbox, OutboxSettings, Refusal};
use limb_agent::results::output::{Output, OutputSettings, Settling};
use limb_agent::results::tree::{Attributes, AttributesKind, Creation, OpenMode, TreeSettings};
use limb_common::assignment::Durability;
use limb_common::manifest::Manifest;
use limb_common::report::DrainReport;
use nix::errno::Errno;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;

use crate::home::{Home, LOWER, OUTPUT};

pub(crate) const ROOT: u64 = 1;
pub(crate) const WIDE: OutboxSettings = OutboxSettings { dirty_bytes: 256 << 20, clean_bytes: 2 << 20 };
const HOW: Creation = Creation { mode: 0o644, uid: 0, gid: 0 };

struct Dialer(SocketAddr);

impl Channels for Dialer {
    fn bulk(&self) -> ChannelFuture {
        let address = self.0;
        Box::pin(async move {
            let unreachable = |error| ChannelError::Unreachable { source: Box::new(error) };
            tonic::transport::Endpoint::from_shared(format!("http://{address}"))
                .unwrap()
                .connect_timeout(Duration::from_secs(2))
                .connect()
                .await
                .map_err(unreachable)
        })
    }
}

/// What a name shows. Times are of files only.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Shown {
    Directory { mode: u32 },
    File { mode: u32, links: u64, size: u64, hash: String, mtime_ns: i64 },
    Symlink(Vec<u8>),
}

pub(crate) type Listing = BTreeMap<String, Shown>;

pub(crate) struct Agent {
    pub(crate) output: Arc<Output>,
    pub(crate) outbox: Arc<Outbox>,
    pub(crate) refusals: Arc<Mutex<Vec<Refusal>>>,
    stop: CancellationToken,
    _settling: Settling,
    _uplink: Uplink,
    pub(crate) runtime: Option<Runtime>,
}

impl Agent {
    pub(crate) fn new(home: &Home, limits: OutboxSettings, lower: Option<Manifest>) -> Self {
        Self::with(home, limits, lower, Durability::Fsync, |_| ())
    }

    pub(crate) fn with(
        home: &Home,
        limits: OutboxSettings,
        lower: Option<Manifest>,
        durability: Durability,
        change: impl FnOnce(&mut TreeSettings),
    ) -> Self {
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let inside = runtime.enter();
        let refusals: Arc<Mutex<Vec<Refusal>>> = Arc::default();
        let (told, stop) = (Arc::clone(&refusals), CancellationToken::new());
        let outbox =
            Outbox::new(limits, Box::new(move |refusal| told.lock().unwrap().push(refusal)), stop.clone());
        let channels: Arc<dyn Channels> = Arc::new(Dialer(home.proxy.address()));
        let transport = GrpcChunks::new(Arc::clone(&channels), ChunkPatience::default(), stop.clone());
        let limits = FetcherLimits::with_cache(1 << 20);
        let fetcher = Fetcher::new(Arc::new(transport), limits, runtime.handle().clone(), &stop);
        let mut tree = TreeSettings {
            output: OUTPUT,
            lower,
            owner: (0, 0),
            quota_bytes: None,
            quota_inodes: None,
            outbox: Some(Arc::clone(&outbox)),
        };
        change(&mut tree);
        let output = Output::new(OutputSettings {
            tree,
            durability,
            lower_set: Some(LOWER),
            source: Arc::new(fetcher),
            stop: stop.clone(),
        });
        let settling = output.start();
        let uplink = Uplink::start(Arc::clone(&outbox), channels, home.who.epoch);
        drop(inside);
        Self { output, outbox, refusals, stop, _settling: settling, _uplink: uplink, runtime: Some(runtime) }
    }

    pub(crate) fn block_on<T>(&self, future: impl Future<Output = T>) -> T {
        let bounded = async { tokio::time::timeout(Duration::from_secs(60), future).await };
        self.runtime.as_ref().unwrap().block_on(bounded).expect("it ends")
    }

    /// The directory of a path, and the last name.
    pub(crate) fn parent<'a>(&self, path: &'a str) -> Result<(u64, &'a [u8]), Errno> {
        let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
        let mut at = ROOT;
        for part in above.split('/').filter(|part| !part.is_empty()) {
            at = self.output.tree().lookup(at, part.as_bytes())?.inode;
        }
        Ok((at, name.as_bytes()))
    }

    pub(crate) fn find(&self, path: &str) -> Result<Attributes, Errno> {
        let (parent, name) = self.parent(path)?;
        self.output.tree().lookup(parent, name)
    }

    /// open(2) with O_CREAT.
    pub(crate) fn open(&self, path: &str, mode: OpenMode) -> Result<(u64, u64), Errno> {
        let (parent, name) = self.parent(path)?;
        let mut tree = self.output.tree();
        match tree.create(parent, name, HOW, mode) {
            Err(Errno::EEXIST) => {
                let inode = tree.lookup(parent, name)?.inode;
                Ok((inode, tree.open(inode, mode)?))
            }
            made => made.map(|(attributes, handle)| (attributes.inode, handle)),
        }
    }

    pub(crate) fn create(&self, path: &str) -> (u64, u64) {
        self.open(path, OpenMode { write: true, append: false, truncate: true }).unwrap()
    }

    pub(crate) fn write(&self, inode: u64, offset: u64, data: &[u8]) -> Result<(), Errno> {
        match self.output.write_now(inode, offset, data) {
            Some(done) => done,
            None => self.block_on(self.output.write(inode, offset, data)),
        }
    }

    pub(crate) fn sync(&self, inode: u64) -> Result<(), Errno> {
        self.block_on(self.output.sync(inode))
    }

    /// The whole of a small file, closed.
    pub(crate) fn put(&self, path: &str, data: &[u8]) {
        let (inode, handle) = self.create(path);
        self.write(inode, 0, data).unwrap();
        self.release(handle);
    }

    pub(crate) fn release(&self, handle: u64) {
        self.output.tree().release(handle).unwrap();
    }

    pub(crate) fn make_directory(&self, path: &str) -> Result<(), Errno> {
        let (parent, name) = self.parent(path)?;
        let how = Creation { mode: 0o755, ..HOW };
        self.output.tree().make_directory(parent, name, how).map(drop)
    }

    pub(crate) fn symlink(&self, path: &str, target: &str) -> Result<(), Errno> {
        let (parent, name) = self.parent(path)?;
        self.output.tree().make_symlink(parent, name, target.as_bytes(), HOW).map(drop)
    }

    pub(crate) fn rename(&self, from: &str, to: &str) -> Result<(), Errno> {
        let (from, to) = (self.parent(from)?, self.parent(to)?);
        self.output.tree().rename(from, to, false)
    }

    pub(crate) fn link(&self, from: &str, to: &str) -> Result<(), Errno> {
        let (inode, (parent, name)) = (self.find(from)?.inode, self.parent(to)?);
        self.output.tree().link(inode, parent, name).map(drop)
    }

    pub(crate) fn unlink(&self, path: &str) -> Result<(), Errno> {
        let (parent, name) = self.parent(path)?;
        self.output.tree().unlink(parent, name)
    }

    pub(crate) fn remove_directory(&self, path: &str) -> Result<(), Errno> {
        let (parent, name) = self.parent(path)?;
        self.output.tree().remove_directory(parent, name)
    }

    pub(crate) fn read(&self, inode: u64) -> Result<Vec<u8>, Errno> {
        let size = self.output.tree().attributes(inode)?.size;
        self.block_on(self.output.read(inode, 0, usize::try_from(size).unwrap()))
    }

    /// Every name of the inode.
    pub(crate) fn names_of(&self, inode: u64) -> Vec<String> {
        let mut names = Vec::new();
        self.walk(ROOT, "", &mut |path, attributes| {
            if attributes.inode == inode {
                names.push(path.to_owned());
            }
        });
        names
    }

    fn walk(&self, inode: u64, path: &str, look: &mut dyn FnMut(&str, &Attributes)) {
        let listed = self.output.tree().read_directory(inode, 0).unwrap();
        for (_, attributes, name) in listed {
            let name = String::from_utf8(name).unwrap();
            let path = if path.is_empty() { name } else { format!("{path}/{name}") };
            look(&path, &attributes);
            if attributes.kind == AttributesKind::Directory {
                self.walk(attributes.inode, &path, look);
            }
        }
    }

    /// What the job sees, as it should look at home.
    pub(crate) fn listing(&self) -> Listing {
        let mut all = Vec::new();
        self.walk(ROOT, "", &mut |path, attributes| all.push((path.to_owned(), *attributes)));
        let shown = all.into_iter().map(|(path, attributes)| {
            let mode = attributes.mode & 0o777;
            let shown = match attributes.kind {
                AttributesKind::Directory => Shown::Directory { mode: mode | 0o700 },
                AttributesKind::Symlink => {
                    Shown::Symlink(self.output.tree().read_link(attributes.inode).unwrap())
                }
                AttributesKind::File => {
                    let bytes = self.read(attributes.inode).unwrap_or_else(|error| panic!("{path}: {error}"));
                    Shown::File {
                        mode: mode | 0o600,
                        links: attributes.nlink.into(),
                        size: attributes.size,
                        hash: hash(&bytes),
                        mtime_ns: attributes.mtime_ns,
                    }
                }
            };
            (path, shown)
        });
        shown.collect()
    }

    pub(crate) fn drain(&self) -> DrainReport {
        self.block_on(self.outbox.drain(Duration::from_secs(50)))
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.stop.cancel();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

pub(crate) fn hash(bytes: &[u8]) -> String {
    blake3::hash(bytes).to_hex()[..16].to_owned()
}

/// What the owner sees at home.
pub(crate) fn listing_of(directory: &Path) -> Listing {
    let mut found = Listing::new();
    list(directory, "", &mut found);
    found
}

fn list(directory: &Path, prefix: &str, found: &mut Listing) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        if prefix.is_empty() && name == ".limb" {
            continue;
        }
        let path = if prefix.is_empty() { name } else { format!("{prefix}/{name}") };
        let meta = entry.path().symlink_metadata().unwrap();
        let mode = meta.permissions().mode() & 0o7777;
        let shown = if meta.is_dir() {
            list(&entry.path(), &path, found);
            Shown::Directory { mode }
        } else if meta.is_symlink() {
            use std::os::unix::ffi::OsStringExt as _;
            Shown::Symlink(std::fs::read_link(entry.path()).unwrap().into_os_string().into_vec())
        } else {
            Shown::File {
                mode,
                links: meta.nlink(),
                size: meta.len(),
                hash: hash(&std::fs::read(entry.path()).unwrap()),
                mtime_ns: meta.mtime() * 1_000_000_000 + meta.mtime_nsec(),
            }
        };
        found.insert(path, shown);
    }
}
