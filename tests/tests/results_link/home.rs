//! Home for these tests: the real results, chunks and their services over a database and a
//! destination that outlive any number of crashes.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use limb::database::Database;
use limb::results::{AttemptId, Finished, OutputBegin, ResultEvent, ResultsHome, SCHEMA, Step, Steps};
use limb::rpc::chunks::{ChunkService, SourceEvents};
use limb::rpc::desk::Desk;
use limb::rpc::results::ResultService;
use limb::snapshot::{FileIdentity, Registration, Snapshots};
use limb_common::assignment::{OutputNumber, SetNumber};
use limb_common::class::DataClass;
use limb_common::id::{AttemptNumber, Digest, HomeId, LeaseEpoch, RunId};
use limb_common::identity::AgentIdentity;
use limb_common::manifest::Manifest;
use limb_tests::desk::TestDesk;
use limb_tests::proxy::Proxy;
use tokio::runtime::Runtime;
use tonic::Request;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::Server;

pub(crate) const OUTPUT: OutputNumber = OutputNumber(1);
pub(crate) const LOWER: SetNumber = SetNumber(9);

/// Whether this life of home still has power: without it no durable step happens any more.
#[derive(Debug, Default)]
struct Power {
    gone: AtomicBool,
}

impl Steps for Power {
    fn before(&self, _: Step) -> bool {
        !self.gone.load(Ordering::SeqCst)
    }
}

struct Quiet;

impl SourceEvents for Quiet {
    fn on_source_changed(&self, _: &AgentIdentity, _: SetNumber, _: &[u8]) {}
}

struct Life {
    runtime: Runtime,
    results: ResultsHome,
    power: Arc<Power>,
}

pub(crate) struct Home {
    state: tempfile::TempDir,
    pub(crate) dest: PathBuf,
    pub(crate) who: AgentIdentity,
    begin: OutputBegin,
    sets: HashMap<SetNumber, Digest>,
    pub(crate) events: Arc<Mutex<Vec<String>>>,
    /// Held across lives: a box that dials while home is down waits in its queue.
    listener: std::net::TcpListener,
    pub(crate) proxy: Proxy,
    life: Option<Life>,
}

impl Home {
    pub(crate) fn new() -> Self {
        let state = tempfile::tempdir().unwrap();
        let dest = state.path().join("dest");
        Self::at(state, dest, |_| ())
    }

    /// With another destination, or limits.
    pub(crate) fn at(state: tempfile::TempDir, dest: PathBuf, change: impl FnOnce(&mut OutputBegin)) -> Self {
        std::fs::create_dir_all(&dest).unwrap();
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        listener.set_nonblocking(true).unwrap();
        let mut begin = OutputBegin {
            output: OUTPUT,
            dest: dest.clone(),
            lower: None,
            quota_bytes: None,
            quota_inodes: None,
        };
        change(&mut begin);
        let who = AgentIdentity {
            home: HomeId::random(),
            run: RunId::random(),
            attempt: AttemptNumber(1),
            epoch: LeaseEpoch(1),
        };
        let proxy = Proxy::start(listener.local_addr().unwrap());
        let mut home = Self {
            state,
            dest,
            who,
            begin,
            sets: HashMap::new(),
            events: Arc::default(),
            listener,
            proxy,
            life: None,
        };
        home.start();
        home
    }

    pub(crate) fn id(&self) -> AttemptId {
        AttemptId { run: self.who.run.clone(), attempt: self.who.attempt }
    }

    pub(crate) fn is_up(&self) -> bool {
        self.life.is_some()
    }

    /// A new process over what the last one left.
    pub(crate) fn start(&mut self) {
        if self.life.is_some() {
            return;
        }
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let _inside = runtime.enter();
        let database = Database::open(&self.state.path().join("limb.db"), &[SCHEMA]).unwrap();
        let (power, events) = (Arc::new(Power::default()), Arc::clone(&self.events));
        let told = Arc::new(move |event: ResultEvent| events.lock().unwrap().push(event.text));
        let results = ResultsHome::with_steps(database, told, Arc::clone(&power) as Arc<dyn Steps>);
        runtime.block_on(results.recover()).unwrap();
        runtime.block_on(results.begin(&self.id(), vec![self.begin.clone()])).unwrap();
        let snapshots = Snapshots::open(&self.state.path().join("snapshots")).unwrap();
        let desk: Arc<dyn Desk> = TestDesk::serving(self.who.clone(), self.sets.clone());
        let who = self.who.clone();
        let identify = move |mut request: Request<()>| {
            request.extensions_mut().insert(who.clone());
            Ok(request)
        };
        let journal = ResultService::new(Arc::clone(&desk), results.clone()).into_server();
        let chunks =
            ChunkService::new(desk, snapshots, Arc::new(results.clone()), Arc::new(Quiet)).into_server();
        let listener = tokio::net::TcpListener::from_std(self.listener.try_clone().unwrap()).unwrap();
        let serving = Server::builder()
            .add_service(InterceptedService::new(journal, identify.clone()))
            .add_service(InterceptedService::new(chunks, identify))
            .serve_with_incoming(tokio_stream::wrappers::TcpListenerStream::new(listener));
        limb_common::task::detach("home", async move { serving.await.unwrap() });
        self.life = Some(Life { runtime, results, power });
    }

    /// Power goes: no durable step happens any more, and every connection dies.
    pub(crate) fn crash(&mut self) {
        let Some(Life { runtime, results, power }) = self.life.take() else { return };
        power.gone.store(true, Ordering::SeqCst);
        drop(results);
        runtime.shutdown_timeout(Duration::from_secs(30));
        self.proxy.reset();
    }

    pub(crate) fn finish(&self) -> Finished {
        let life = self.life.as_ref().unwrap();
        life.runtime.block_on(life.results.finish(&self.id())).unwrap()
    }

    /// Ends the attempt and begins the next one on what it left.
    pub(crate) fn next_attempt(&mut self) -> Manifest {
        self.finish();
        let life = self.life.as_ref().unwrap();
        let lower = life.runtime.block_on(life.results.lower(&self.dest)).unwrap();
        assert_eq!(lower.left_out, Vec::<String>::new());
        let files = lower.files.into_iter().map(|file| {
            let identity = FileIdentity {
                dev: file.dev,
                ino: file.ino,
                size: file.size,
                mtime_ns: file.mtime_ns,
                ctime_ns: file.ctime_ns,
            };
            (file.inode, file.path, identity)
        });
        let registration = Registration {
            source: self.dest.clone(),
            class: DataClass::Internal,
            manifest: lower.manifest.clone(),
            files: files.collect(),
        };
        Snapshots::open(&self.state.path().join("snapshots")).unwrap().register(registration).unwrap();
        self.sets.insert(LOWER, lower.manifest.id());
        self.begin.lower = Some(lower.manifest.id());
        self.who.attempt = AttemptNumber(self.who.attempt.0 + 1);
        self.who.epoch = LeaseEpoch(self.who.epoch.0 + 1);
        self.crash();
        self.start();
        lower.manifest
    }

    pub(crate) fn path(&self, path: impl AsRef<Path>) -> PathBuf {
        self.dest.join(path)
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        self.crash();
    }
}
