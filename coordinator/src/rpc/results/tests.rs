//! The journal over a real connection.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::Ordering;

use limb_common::chunk::{Position, value_of};
use limb_common::task::Task;
use limb_proto::v1::results_client::ResultsClient;
use tokio_stream::wrappers::ReceiverStream;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Server};

use super::super::fake_desk::{FakeDesk, identity};
use super::*;
use crate::database::Database;
use crate::results::{OutputBegin, SCHEMA};

struct Home {
    _dir: tempfile::TempDir,
    dest: PathBuf,
    desk: Arc<FakeDesk>,
    client: ResultsClient<Channel>,
    _server: Task<()>,
}

async fn start() -> Home {
    let dir = tempfile::tempdir().unwrap();
    let (who, desk) = (identity(), Arc::new(FakeDesk::new(HashMap::new())));
    let database = Database::open(&dir.path().join("limb.db"), &[SCHEMA]).unwrap();
    let results = ResultsHome::new(database, Arc::new(|_| ()));
    let dest = dir.path().join("dest");
    let id = AttemptId { run: who.run.clone(), attempt: who.attempt };
    let output = OutputBegin {
        output: OutputNumber(1),
        dest: dest.clone(),
        lower: None,
        quota_bytes: None,
        quota_inodes: None,
    };
    results.begin(&id, vec![output]).await.unwrap();
    let identify = move |mut request: Request<()>| {
        request.extensions_mut().insert(who.clone());
        Ok(request)
    };
    let service = ResultService::new(Arc::clone(&desk) as Arc<dyn Desk>, results);
    let service = InterceptedService::new(service.into_server(), identify);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    let server = limb_common::task::spawn("server", async move {
        Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap();
    });
    let client = ResultsClient::connect(address).await.unwrap();
    Home { _dir: dir, dest, desk, client, _server: server }
}

struct Agent {
    frames: Sender,
    acks: Streaming<v1::JournalAck>,
}

#[derive(Clone)]
struct Sender(mpsc::Sender<v1::JournalFrame>);

impl Agent {
    async fn open(home: &mut Home) -> Result<(Self, u64), Status> {
        let (frames, sent) = mpsc::channel(64);
        let open = v1::journal_frame::Body::Open(v1::JournalOpen { epoch: 1 });
        frames.send(v1::JournalFrame { body: Some(open) }).await.unwrap();
        let acks = home.client.journal(ReceiverStream::new(sent)).await?.into_inner();
        let mut agent = Self { frames: Sender(frames), acks };
        let standing = agent.acks.message().await?.unwrap();
        Ok((agent, standing.durable_seq))
    }

    async fn entry(&self, seq: u64, op: v1::journal_entry::Op) {
        self.frames.entry(seq, op).await;
    }

    async fn chunk(&self, file: u64, index: u64, data: &[u8]) {
        self.frames.chunk(file, index, data).await;
    }

    /// Why the stream ended.
    async fn end(&mut self) -> Status {
        loop {
            if let Err(status) = self.acks.message().await.map(|ack| ack.expect("an error ends it")) {
                return status;
            }
        }
    }

    async fn until(&mut self, seq: u64) -> Vec<v1::ChunkStored> {
        let mut stored = Vec::new();
        loop {
            let ack = self.acks.message().await.unwrap().unwrap();
            stored.extend(ack.chunks);
            if ack.durable_seq >= seq {
                return stored;
            }
        }
    }
}

impl Sender {
    async fn entry(&self, seq: u64, op: v1::journal_entry::Op) {
        let entry = v1::JournalEntry { seq, output: 1, op: Some(op) };
        self.0.send(v1::JournalFrame { body: Some(v1::journal_frame::Body::Entry(entry)) }).await.unwrap();
    }

    async fn chunk(&self, file: u64, index: u64, data: &[u8]) {
        let value = value_of(Position::Subtree { index }, data);
        let mut offset = 0;
        for piece in data.chunks(PIECE_BYTES) {
            let piece_offset = u32::try_from(offset).unwrap();
            offset += piece.len();
            let chunk = v1::UploadChunk {
                output: 1,
                file,
                index,
                generation: 1,
                piece_offset,
                data: piece.to_vec().into(),
                last: offset == data.len(),
                value: value.0.to_vec().into(),
                chunk_len: u32::try_from(data.len()).unwrap(),
            };
            let body = Some(v1::journal_frame::Body::Chunk(chunk));
            self.0.send(v1::JournalFrame { body }).await.unwrap();
        }
    }
}

fn created(file: u64, path: impl Into<bytes::Bytes>) -> v1::journal_entry::Op {
    v1::journal_entry::Op::Created(v1::FileCreated { file, path: path.into(), mode: 0o644, base: None })
}

fn published(file: u64, path: impl Into<bytes::Bytes>, content: &[u8]) -> v1::journal_entry::Op {
    v1::journal_entry::Op::Published(v1::FilePublished {
        file,
        path: path.into(),
        size: content.len() as u64,
        root: Digest::of(content).0.to_vec().into(),
        mode: 0o644,
        mtime_ns: 1,
        kind: v1::file_published::Kind::Final.into(),
        holes: Vec::new(),
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_gets_home_over_a_cut() {
    let mut home = start().await;
    let content: Vec<u8> = (0..CHUNK_BYTES + 300_000).map(|i| u8::try_from(i % 251).unwrap()).collect();
    let (mut agent, standing) = Agent::open(&mut home).await.unwrap();
    assert_eq!(standing, 0);
    agent.entry(1, created(1, "f")).await;
    agent.chunk(1, 0, &content[..CHUNK_BYTES]).await;
    agent.until(1).await;
    // No entry waits for this chunk: the timer makes it durable.
    let mut stored = Vec::new();
    while stored.is_empty() {
        stored = agent.acks.message().await.unwrap().unwrap().chunks;
    }
    assert_eq!((stored[0].file, stored[0].index), (1, 0));
    drop(agent);
    let (mut agent, standing) = Agent::open(&mut home).await.unwrap();
    assert_eq!(standing, 1);
    agent.entry(1, created(1, "f")).await;
    agent.chunk(1, 1, &content[CHUNK_BYTES..]).await;
    agent.entry(2, published(1, "f", &content)).await;
    agent.until(2).await;
    assert_eq!(std::fs::read(home.dest.join("f")).unwrap(), content);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_newer_stream_ends_the_older_and_a_dead_attempt_gets_none() {
    let mut home = start().await;
    let (mut older, _) = Agent::open(&mut home).await.unwrap();
    let (mut newer, _) = Agent::open(&mut home).await.unwrap();
    older.entry(1, created(1, "f")).await;
    assert_eq!(older.acks.message().await.unwrap_err().code(), tonic::Code::Aborted);
    newer.entry(1, created(1, "f")).await;
    newer.until(1).await;
    home.desk.live.store(false, Ordering::Relaxed);
    // Re-checked by timer on a stream that is open.
    assert_eq!(newer.acks.message().await.unwrap_err().code(), tonic::Code::PermissionDenied);
    assert_eq!(Agent::open(&mut home).await.err().unwrap().code(), tonic::Code::PermissionDenied);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_breaks_the_contract_ends_the_stream() {
    let mut home = start().await;
    let chunk = |piece_offset, data: &'static [u8], value: [u8; 32]| v1::UploadChunk {
        output: 1,
        file: 1,
        index: 0,
        generation: 1,
        piece_offset,
        data: data.into(),
        last: true,
        value: value.to_vec().into(),
        chunk_len: u32::try_from(data.len()).unwrap(),
    };
    let right = value_of(Position::Subtree { index: 0 }, b"x").0;
    let bad = [
        chunk(0, b"x", [0; 32]),
        chunk(1, b"x", right),
        chunk(0, b"", right),
        v1::UploadChunk { chunk_len: 2, ..chunk(0, b"x", right) },
        v1::UploadChunk { index: u64::MAX, ..chunk(0, b"x", right) },
        v1::UploadChunk { value: b"short"[..].into(), ..chunk(0, b"x", right) },
    ];
    for (chunk, case) in bad.into_iter().zip(0..) {
        let (mut agent, _) = Agent::open(&mut home).await.unwrap();
        let body = Some(v1::journal_frame::Body::Chunk(chunk));
        agent.frames.0.send(v1::JournalFrame { body }).await.unwrap();
        let status = agent.end().await;
        assert_eq!(status.code(), tonic::Code::InvalidArgument, "{case}: {status}");
    }
    let (mut agent, _) = Agent::open(&mut home).await.unwrap();
    agent.entry(5, created(1, "f")).await;
    assert_eq!(agent.end().await.code(), tonic::Code::InvalidArgument);
}

/// `cargo test -p limb --lib small_files_a_second -- --ignored --nocapture`
#[tokio::test(flavor = "multi_thread")]
#[ignore = "a measurement"]
async fn small_files_a_second() {
    const FILES: u64 = 5000;
    let mut home = start().await;
    let (mut agent, _) = Agent::open(&mut home).await.unwrap();
    let began = clock::boottime();
    let sender = limb_common::task::spawn("sender", {
        let frames = agent.frames.clone();
        async move {
            for file in 1..=FILES {
                let content = [u8::try_from(file % 251).unwrap(); 4096];
                let path = format!("f{file}");
                frames.entry(2 * file - 1, created(file, path.clone())).await;
                frames.chunk(file, 0, &content).await;
                frames.entry(2 * file, published(file, path, &content)).await;
            }
        }
    });
    agent.until(2 * FILES).await;
    let took = clock::boottime().saturating_since(began).as_secs_f64();
    drop(sender);
    assert_eq!(std::fs::read_dir(&home.dest).unwrap().count(), 5001, "and .limb");
    println!("{FILES} files of 4 KiB in {took:.2} s: {:.0} a second", FILES as f64 / took);
}
