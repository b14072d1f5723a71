//! A directory at home, frozen for real, and a mount of it that reaches it over mutual TLS through a
//! cable. Home serves the set itself, or a fake that misbehaves to order answers in its place.

use std::collections::HashMap;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use limb::ca::HomeCa;
use limb::rpc::chunks::{ChunkService, ResultChunkFuture, ResultReadError, ResultReader, SourceEvents};
use limb::rpc::server::serve;
use limb::snapshot::{LinkPolicy, Snapshot, SnapshotRequest, Snapshots};
use limb_agent::fetch::{FetchError, Fetcher, FetcherLimits};
use limb_agent::leash::Leash;
use limb_agent::link::chunks::{ChunkPatience, GrpcChunks, fetch_manifest};
use limb_agent::link::{Link, boot_id};
use limb_agent::mount::read::{Owner, ReadFs, ReadFsOptions};
use limb_agent::mount::session::{MountOptions, MountSession};
use limb_common::assignment::{OutputNumber, SetNumber, SetSpec};
use limb_common::boot::{BootSettings, HostKind};
use limb_common::chunk::CHUNK_BYTES_U64;
use limb_common::class::DataClass;
use limb_common::clock::{boottime, unix_ms};
use limb_common::identity::AgentIdentity;
use limb_common::manifest::{ChunkRef, Inode, Manifest, NodeKind};
use limb_common::task::Task;
use limb_proto::v1::chunks_server::ChunksServer;
use limb_tests::desk::{TOKEN, TestDesk};
use limb_tests::proxy::Proxy;
use limb_tests::wait::wait_for;
use tokio::runtime::Runtime;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use crate::fake_chunks::{FakeChunks, State};

const SET: SetNumber = SetNumber(3);
/// So that what is silent is found soon.
const PATIENCE: ChunkPatience = ChunkPatience { stream: Duration::from_millis(500) };

/// Who answers for the chunks.
pub(crate) enum Serving {
    /// Home's own service.
    Home,
    /// The same bytes, from a fake that breaks to order.
    Fake,
}

struct Nothing;

impl ResultReader for Nothing {
    fn read_chunk(&self, _: &AgentIdentity, _: OutputNumber, _: u64, _: u64) -> ResultChunkFuture {
        Box::pin(std::future::ready(Err(ResultReadError::NotFound)))
    }
}

impl SourceEvents for Nothing {
    fn on_source_changed(&self, _: &AgentIdentity, _: SetNumber, _: &[u8]) {}
}

/// Fields are dropped in this order: the mount before what answers it.
pub(crate) struct Rig {
    session: MountSession,
    pub(crate) fetcher: Fetcher,
    pub(crate) link: Arc<Link>,
    pub(crate) problems: Arc<Mutex<Vec<(PathBuf, FetchError)>>>,
    pub(crate) manifest: Manifest,
    pub(crate) desk: Arc<TestDesk>,
    pub(crate) proxy: Proxy,
    /// Of the fake.
    pub(crate) state: Arc<State>,
    pub(crate) source: PathBuf,
    point: tempfile::TempDir,
    stop: CancellationToken,
    _serving: Task<()>,
    runtime: Option<Runtime>,
    _home: tempfile::TempDir,
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.state.held.send_replace(false);
        self.proxy.restore();
        self.session.unmount().unwrap();
        self.stop.cancel();
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl Rig {
    /// Freezes what `fill` puts into a directory and mounts it. The lease lasts for `ttl`.
    pub(crate) fn new(serving: Serving, cache_bytes: u64, ttl: Duration, fill: impl FnOnce(&Path)) -> Self {
        let home = tempfile::tempdir().unwrap();
        let (source, point) = (home.path().join("source"), tempfile::tempdir().unwrap());
        std::fs::create_dir(&source).unwrap();
        fill(&source);
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let _inside = runtime.enter();
        let snapshots = Snapshots::open(&home.path().join("state")).unwrap();
        let request = SnapshotRequest {
            source: source.clone(),
            class: DataClass::Internal,
            copy_all: false,
            links: LinkPolicy::Keep,
        };
        let frozen = runtime.block_on(snapshots.create_async(request, |_| {})).unwrap();
        let state = Arc::new(state_of(&frozen, &source));
        let desk = TestDesk::reading(ttl, HashMap::from([(SET, frozen.id)]));
        let real = ChunkService::new(desk.clone(), snapshots, Arc::new(Nothing), Arc::new(Nothing));
        let routes = match serving {
            Serving::Home => Routes::new(real.into_server()),
            Serving::Fake => Routes::new(ChunksServer::new(FakeChunks(Arc::clone(&state)))),
        };
        let ca = Arc::new(HomeCa::open_or_create(home.path(), desk.who.home.clone(), unix_ms()).unwrap());
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let proxy = Proxy::start(listener.local_addr().unwrap());
        let stop = CancellationToken::new();
        let served = serve(listener, Arc::clone(&ca), desk.clone(), routes, stop.clone());
        let task = limb_common::task::spawn("home", async move { served.await.unwrap() });
        let link = runtime.block_on(enrol(&ca, &proxy, ttl));
        let chunks = GrpcChunks::new(Arc::clone(&link) as Arc<_>, PATIENCE, stop.clone());
        let manifest = match serving {
            Serving::Fake => frozen.manifest,
            Serving::Home => {
                let bytes = frozen.manifest.as_bytes().len() as u64;
                let spec = SetSpec { set: SET, manifest_id: frozen.id, manifest_bytes: bytes };
                runtime.block_on(fetch_manifest(&*link, &spec, &stop)).unwrap()
            }
        };
        let limits = FetcherLimits { cache_bytes, in_flight_bytes: 16 << 20 };
        let fetcher = Fetcher::new(Arc::new(chunks), limits, runtime.handle().clone(), &stop);
        let problems: Arc<Mutex<Vec<_>>> = Arc::default();
        let seen = Arc::clone(&problems);
        let fs = ReadFs::new(ReadFsOptions {
            manifest: manifest.clone(),
            set: SET,
            source: Arc::new(fetcher.clone()),
            owner: Owner { uid: 0, gid: 0 },
            on_problem: Arc::new(move |path: &Path, error: &FetchError| {
                seen.lock().unwrap().push((path.to_owned(), error.clone()));
            }),
            trace: None,
            push: None,
            stop: stop.clone(),
            runtime: runtime.handle().clone(),
        });
        let options = MountOptions {
            path: point.path().to_owned(),
            read_only: true,
            name: "stress".to_owned(),
            stop: stop.clone(),
        };
        let session = MountSession::mount(fs, options).unwrap();
        let (runtime, serving) = (Some(runtime), task);
        Self {
            session,
            fetcher,
            link,
            problems,
            manifest,
            desk,
            proxy,
            state,
            source,
            point,
            stop,
            _serving: serving,
            runtime,
            _home: home,
        }
    }

    pub(crate) fn mounted(&self) -> &Path {
        self.point.path()
    }

    pub(crate) fn inode(&self, path: &Path) -> Inode {
        use std::os::unix::ffi::OsStrExt as _;
        self.manifest.resolve(path.as_os_str().as_bytes()).unwrap()
    }

    /// Every answer for this chunk is wrong from now on.
    pub(crate) fn spoil(&self, path: &Path, index: u64, fault: crate::fake_chunks::Fault) {
        let key = (SET.0, self.inode(path).0, index);
        self.state.spoiled.lock().unwrap().insert(key, fault);
    }

    /// Runs on the agent's runtime until the rig ends.
    pub(crate) fn beat(&self, ttl: Duration) -> Task<()> {
        let _inside = self.runtime.as_ref().unwrap().enter();
        limb_agent::link::control::beat(Arc::clone(&self.link), ttl)
    }

    /// Frees everybody who waits in the mount.
    pub(crate) fn abort(&self) {
        self.session.abort().unwrap();
    }

    /// Nothing is on its way to nobody.
    pub(crate) fn assert_nothing_left(&self) {
        wait_for("everything that was asked for to land", || {
            (self.fetcher.stats().in_flight_bytes == 0).then_some(())
        });
    }
}

async fn enrol(ca: &HomeCa, proxy: &Proxy, ttl: Duration) -> Arc<Link> {
    let settings = BootSettings {
        home_address: proxy.address().to_string(),
        ca_certificate_pem: ca.certificate_pem().to_owned(),
        token: TOKEN.iter().map(|byte| format!("{byte:02x}")).collect(),
        private_dir: "/nonexistent".into(),
        host: HostKind::Process,
        boot_budget_ms: 30_000,
        hide: Vec::new(),
        run_label: "test".to_owned(),
    };
    let leash = Leash::start().unwrap();
    let link = Link::enrol(&settings, &boot_id().unwrap(), boottime(), leash).await.unwrap();
    link.leash().arm(link.enrolled_sent(), ttl).unwrap();
    Arc::new(link)
}

/// The frozen bytes, as the fake serves them.
fn state_of(frozen: &Snapshot, source: &Path) -> State {
    let (mut chunks, mut sizes) = (HashMap::new(), HashMap::new());
    for number in 0..=frozen.manifest.inode_count() {
        let Some(node) = frozen.manifest.node(Inode(number)) else { continue };
        if node.kind != NodeKind::File {
            continue;
        }
        sizes.insert((SET.0, number), node.size);
        let path = limb_agent::mount::read::Tree::new(frozen.manifest.clone(), Owner { uid: 0, gid: 0 })
            .path_of(Inode(number));
        let file = std::fs::File::open(source.join(path)).unwrap();
        for index in 0..node.chunk_count() {
            if let Some(ChunkRef::Data(id)) = node.chunk(index) {
                let mut bytes = vec![0; id.len as usize];
                file.read_exact_at(&mut bytes, index * CHUNK_BYTES_U64).unwrap();
                chunks.insert((SET.0, number, index), bytes.into());
            }
        }
    }
    State { chunks, sizes, ..State::default() }
}
