//! The service over a real connection on loopback.

use std::collections::HashMap;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::Ordering;

use limb_common::chunk::CHUNK_BYTES;
use limb_common::class::DataClass;
use limb_common::manifest::{ChunkRef, Manifest, NodeKind};
use limb_proto::v1::chunks_client::ChunksClient;
use limb_proto::v1::fetch_failure::Kind;
use limb_proto::v1::fetch_piece::Body;
use limb_proto::v1::fetch_request::What;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Server};

use super::*;
use crate::rpc::fake_desk::{FakeDesk, identity};
use crate::snapshot::{LinkPolicy, Snapshot, SnapshotRequest};

struct FakeResults;

impl ResultReader for FakeResults {
    fn read_chunk(&self, _: &AgentIdentity, _: OutputNumber, file: u64, _: u64) -> ResultChunkFuture {
        Box::pin(async move {
            if file == 1 { Ok(Bytes::from_static(b"result")) } else { Err(ResultReadError::NotFound) }
        })
    }
}

#[derive(Default)]
struct Told(Mutex<Vec<Vec<u8>>>, Mutex<(usize, usize)>);

impl SourceEvents for Told {
    fn on_source_changed(&self, _: &AgentIdentity, _: SetNumber, path: &[u8]) {
        self.0.lock().unwrap().push(path.to_vec());
    }

    fn on_encoded(&self, _: &AgentIdentity, plain: usize, wire: usize) {
        let mut told = self.1.lock().unwrap();
        *told = (told.0 + plain, told.1 + wire);
    }
}

const SET: u32 = 7;
const LIMITS: Limits = Limits {
    liveness_every: Duration::from_secs(3),
    stall: STALL,
    bulk_budget_bytes: BULK_BUDGET_BYTES,
    demand_budget_bytes: DEMAND_BUDGET_BYTES,
};

struct Home {
    _dir: tempfile::TempDir,
    source: PathBuf,
    snapshot: Snapshot,
    desk: Arc<FakeDesk>,
    told: Arc<Told>,
    address: String,
    _server: Task<()>,
}

impl Home {
    async fn start(fill: impl FnOnce(&std::path::Path), limits: Limits) -> Self {
        Self::configured(fill, limits, true).await
    }

    async fn configured(fill: impl FnOnce(&std::path::Path), limits: Limits, compress: bool) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let source = dir.path().join("source");
        std::fs::create_dir(&source).unwrap();
        fill(&source);
        let snapshots = Snapshots::open(&dir.path().join("state")).unwrap();
        let request = SnapshotRequest {
            source: source.clone(),
            class: DataClass::Internal,
            copy_all: false,
            links: LinkPolicy::Keep,
        };
        let snapshot = snapshots.create_async(request, |_| {}).await.unwrap();
        let sets = HashMap::from([(SetNumber(SET), snapshot.id)]);
        let desk = Arc::new(FakeDesk::new(sets));
        let told = Arc::new(Told::default());
        let service = ChunkService::with_limits(
            Arc::clone(&desk) as Arc<dyn Desk>,
            snapshots,
            Arc::new(FakeResults),
            Arc::clone(&told) as Arc<dyn SourceEvents>,
            limits,
        )
        .compressing(compress);
        let who = identity();
        let identify = move |mut request: Request<()>| {
            request.extensions_mut().insert(who.clone());
            Ok(request)
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let service = InterceptedService::new(service.into_server(), identify);
        let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
        let server = limb_common::task::spawn("server", async move {
            Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap();
        });
        Self { _dir: dir, source, snapshot, desk, told, address, _server: server }
    }

    async fn plain(fill: impl FnOnce(&std::path::Path)) -> Self {
        Self::start(fill, LIMITS).await
    }

    async fn client(&self) -> ChunksClient<Channel> {
        ChunksClient::connect(self.address.clone()).await.unwrap()
    }

    async fn fetcher(&self) -> Fetcher {
        let (asking, requests) = mpsc::channel(MAX_ASKED);
        let requests = tokio_stream::wrappers::ReceiverStream::new(requests);
        let replies = self.client().await.fetch(requests).await.unwrap().into_inner();
        Fetcher { asking, replies, partial: HashMap::new(), encoded: false, encodings: HashMap::new() }
    }

    fn inode(&self, path: &str) -> u64 {
        self.snapshot.manifest.resolve(path.as_bytes()).unwrap().0
    }
}

const MAX_ASKED: usize = 1000;

struct Fetcher {
    asking: mpsc::Sender<v1::FetchRequest>,
    replies: Streaming<v1::FetchPiece>,
    partial: HashMap<u64, Vec<u8>>,
    /// Asks for encodings, and gets what comes as it is.
    encoded: bool,
    encodings: HashMap<u64, i32>,
}

type Got = (u64, Result<Vec<u8>, v1::FetchFailure>);

impl Fetcher {
    async fn ask(&self, id: u64, priority: u32, what: What) {
        self.asking
            .send(v1::FetchRequest { id, what: Some(what), priority, encoded: self.encoded })
            .await
            .unwrap();
    }

    async fn ask_set(&self, id: u64, priority: u32, inode: u64, index: u64) {
        self.ask(id, priority, What::SetChunk(v1::SetChunk { set: SET, inode, index })).await;
    }

    /// The next answer that is complete.
    async fn answer(&mut self) -> Result<Got, Status> {
        loop {
            let piece = self.replies.message().await?.expect("the stream is still open");
            let encoding = *self.encodings.entry(piece.id).or_insert(piece.encoding);
            assert_eq!(encoding, piece.encoding, "one encoding an answer");
            match piece.body.unwrap() {
                Body::Failure(failure) => return Ok((piece.id, Err(failure))),
                Body::Data(data) => {
                    assert!(data.len() <= PIECE_BYTES);
                    self.partial.entry(piece.id).or_default().extend_from_slice(&data);
                }
            }
            if piece.last {
                return Ok((piece.id, Ok(self.partial.remove(&piece.id).unwrap())));
            }
        }
    }
}

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut out = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
    out
}

fn chunk_of(file: &[u8], index: u64) -> &[u8] {
    let start = usize::try_from(index).unwrap() * CHUNK_BYTES;
    &file[start..file.len().min(start + CHUNK_BYTES)]
}

#[tokio::test(flavor = "multi_thread")]
async fn every_chunk_of_a_set_comes_back_and_nothing_else_does() {
    let home = Home::plain(|source| {
        std::fs::create_dir(source.join("d")).unwrap();
        std::fs::write(source.join("d/big"), noise(3 * CHUNK_BYTES + 1, 1)).unwrap();
        std::fs::write(source.join("small"), b"small").unwrap();
        std::fs::write(source.join("zeros"), vec![0; 10]).unwrap();
    })
    .await;
    let mut fetcher = home.fetcher().await;
    let tree = &home.snapshot.manifest;
    for number in 1..=tree.inode_count() {
        let node = tree.node(limb_common::manifest::Inode(number)).unwrap();
        for index in 0..node.chunk_count() {
            fetcher.ask_set(1, 0, number, index).await;
            let (_, got) = fetcher.answer().await.unwrap();
            match node.chunk(index).unwrap() {
                ChunkRef::Data(id) => drop(id.verify(got.unwrap().into()).unwrap()),
                ChunkRef::Hole { .. } => assert_eq!(got.unwrap_err().kind(), Kind::NotFound),
            }
        }
        if node.kind == NodeKind::Directory {
            fetcher.ask_set(1, 0, number, 0).await;
            assert_eq!(fetcher.answer().await.unwrap().1.unwrap_err().kind(), Kind::NotFound);
        }
    }
    let set = |set, inode, index| What::SetChunk(v1::SetChunk { set, inode, index });
    let result = |file| What::ResultChunk(v1::ResultChunk { output: 0, file, index: 0 });
    let small = home.inode("small");
    for what in
        [set(SET + 1, small, 0), set(SET, small, 1), set(SET, 0, 0), set(SET, u64::MAX, u64::MAX), result(2)]
    {
        fetcher.ask(2, 0, what.clone()).await;
        let failure = fetcher.answer().await.unwrap().1.unwrap_err();
        assert_eq!((failure.kind(), failure.detail.as_str()), (Kind::NotFound, ""), "{what:?}");
    }
    fetcher.ask(3, 1, result(1)).await;
    assert_eq!(fetcher.answer().await.unwrap(), (3, Ok(b"result".to_vec())));
    // A message that means nothing ends the stream.
    fetcher.asking.send(v1::FetchRequest { id: 4, what: None, priority: 0, encoded: false }).await.unwrap();
    assert_eq!(fetcher.answer().await.unwrap_err().code(), tonic::Code::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_manifest_arrives_whole_and_only_for_sets_of_this_attempt() {
    let home = Home::plain(|source| {
        for file in 0..3000 {
            std::fs::write(source.join(format!("file number {file}")), [1]).unwrap();
        }
    })
    .await;
    let mut client = home.client().await;
    let mut pieces = client.manifest(v1::ManifestRequest { set: SET }).await.unwrap().into_inner();
    let mut frame = Vec::new();
    while let Some(piece) = pieces.message().await.unwrap() {
        assert!(piece.data.len() <= PIECE_BYTES);
        frame.extend_from_slice(&piece.data);
    }
    let bytes = zstd::decode_all(frame.as_slice()).unwrap();
    assert_eq!(Manifest::open(bytes, home.snapshot.id).unwrap().inode_count(), 3001);
    let other = client.manifest(v1::ManifestRequest { set: SET + 1 }).await.unwrap_err();
    assert_eq!(other.code(), tonic::Code::NotFound);
    home.desk.live.store(false, Ordering::Relaxed);
    let dead = client.manifest(v1::ManifestRequest { set: SET }).await.unwrap_err();
    assert_eq!(dead.code(), tonic::Code::PermissionDenied);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_changed_source_is_named_once_and_its_other_chunks_still_come() {
    let home = Home::plain(|source| {
        std::fs::write(source.join("big"), noise(3 * CHUNK_BYTES, 2)).unwrap();
    })
    .await;
    let file = std::fs::OpenOptions::new().write(true).open(home.source.join("big")).unwrap();
    file.write_all_at(b"!", (1 << 20) + 9).unwrap();
    let inode = home.inode("big");
    let mut fetcher = home.fetcher().await;
    for _ in 0..2 {
        fetcher.ask_set(1, 0, inode, 1).await;
        let failure = fetcher.answer().await.unwrap().1.unwrap_err();
        assert_eq!(failure.kind(), Kind::SourceChanged);
        assert!(failure.detail.starts_with("big is not what was frozen"), "{}", failure.detail);
    }
    assert_eq!(*home.told.0.lock().unwrap(), [b"big".to_vec()]);
    fetcher.ask_set(2, 0, inode, 2).await;
    assert_eq!(fetcher.answer().await.unwrap().1.unwrap(), chunk_of(&noise(3 * CHUNK_BYTES, 2), 2));
}

#[tokio::test(flavor = "multi_thread")]
async fn demand_overtakes_what_was_asked_before_it() {
    const CHUNKS: u64 = 60;
    let bytes = noise(60 * CHUNK_BYTES, 3);
    let home = Home::plain(|source| std::fs::write(source.join("big"), &bytes).unwrap()).await;
    let inode = home.inode("big");
    let mut fetcher = home.fetcher().await;
    for index in 0..CHUNKS - 1 {
        fetcher.ask_set(index, 1, inode, index).await;
    }
    fetcher.ask_set(CHUNKS - 1, 0, inode, CHUNKS - 1).await;
    let mut order = Vec::new();
    for _ in 0..CHUNKS {
        let (id, got) = fetcher.answer().await.unwrap();
        assert!(got.unwrap() == chunk_of(&bytes, id));
        order.push(id);
    }
    let place = order.iter().position(|&id| id == CHUNKS - 1).unwrap();
    assert!(place < 20, "{order:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_cancelled_is_not_sent() {
    let bytes = noise(60 * CHUNK_BYTES, 4);
    let home = Home::plain(|source| std::fs::write(source.join("big"), &bytes).unwrap()).await;
    let inode = home.inode("big");
    let mut fetcher = home.fetcher().await;
    for index in 0..59 {
        fetcher.ask_set(index, 2, inode, index).await;
    }
    for id in 0..59 {
        fetcher.ask(id, 0, What::Cancel(true)).await;
    }
    // The id may be used again at once, for something else.
    fetcher.ask_set(0, 3, inode, 59).await;
    let mut whole = 0;
    loop {
        fetcher.partial.remove(&0);
        let (id, got) = fetcher.answer().await.unwrap();
        if id == 0 && got.is_ok_and(|got| got == chunk_of(&bytes, 59)) {
            break;
        }
        whole += 1;
    }
    assert!(whole < 30, "{whole} cancelled chunks came all the same");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_reads_nothing_neither_holds_memory_nor_loses_anything() {
    let bytes = noise(40 * CHUNK_BYTES, 5);
    // Room for six chunks in all: less than one stream may have in hand.
    let limits = Limits { stall: Duration::from_millis(50), bulk_budget_bytes: 6 * CHUNK_BYTES, ..LIMITS };
    let home = Home::start(|source| std::fs::write(source.join("big"), &bytes).unwrap(), limits).await;
    let inode = home.inode("big");
    let mut lazy = home.fetcher().await;
    for index in 0..40 {
        lazy.ask_set(index, 1, inode, index).await;
    }
    let mut busy = home.fetcher().await;
    for index in 0..40 {
        busy.ask_set(index, 1, inode, index).await;
    }
    for _ in 0..40 {
        let (id, got) = busy.answer().await.unwrap();
        assert!(got.unwrap() == chunk_of(&bytes, id));
    }
    for _ in 0..40 {
        let (id, got) = lazy.answer().await.unwrap();
        assert!(got.unwrap() == chunk_of(&bytes, id));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_ends_with_its_attempt() {
    let limits = Limits { liveness_every: Duration::from_millis(20), ..LIMITS };
    let home = Home::start(|_| {}, limits).await;
    let mut fetcher = home.fetcher().await;
    home.desk.live.store(false, Ordering::Relaxed);
    assert_eq!(fetcher.answer().await.unwrap_err().code(), tonic::Code::PermissionDenied);
}

#[tokio::test(flavor = "multi_thread")]
async fn too_many_open_requests_and_an_id_used_twice_are_refused() {
    let home = Home::plain(|source| std::fs::write(source.join("f"), b"f").unwrap()).await;
    let fetcher = home.fetcher().await;
    let inode = home.inode("f");
    let mut twice = queue::Queue::default();
    let address =
        || queue::Address::Set { set: SetNumber(0), inode: limb_common::manifest::Inode(1), index: 0 };
    for id in 0..queue::MAX_OPEN as u64 {
        twice.push(id, queue::Priority::Trace, address(), false).unwrap();
    }
    assert_eq!(
        twice.push(u64::MAX, queue::Priority::Demand, address(), false).unwrap_err().code(),
        tonic::Code::ResourceExhausted
    );
    twice.cancel(3);
    assert!(twice.push(2, queue::Priority::Demand, address(), false).is_err());
    twice.push(3, queue::Priority::Demand, address(), false).unwrap();
    assert_eq!(twice.pop_demand().unwrap().id, 3);
    fetcher.ask_set(1, 9, inode, 0).await;
    let mut fetcher = fetcher;
    assert_eq!(fetcher.answer().await.unwrap_err().code(), tonic::Code::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pack_brings_small_files_and_names_those_that_are_missing() {
    let home = Home::plain(|source| {
        for number in 0..5_u64 {
            std::fs::write(source.join(format!("f{number}")), noise(10_000, number)).unwrap();
        }
        std::fs::write(source.join("g"), noise(CHUNK_BYTES + 1, 9)).unwrap();
        std::fs::write(source.join("h"), noise(100_000, 8)).unwrap();
    })
    .await;
    let changed = std::fs::OpenOptions::new().write(true).open(home.source.join("h")).unwrap();
    changed.write_all_at(b"!", 9).unwrap();
    let mut fetcher = home.fetcher().await;
    let names = ["f0", "f3", "g", "h", "f4"];
    let inodes = names.iter().map(|name| home.inode(name)).collect();
    fetcher.ask(1, 1, What::SetFiles(v1::SetFiles { set: SET, inodes })).await;
    let piece = fetcher.replies.message().await.unwrap().unwrap();
    assert!(piece.last && piece.counted);
    let expected = [noise(10_000, 0), noise(10_000, 3), noise(10_000, 4)].concat();
    assert!(matches!(piece.body, Some(Body::Data(data)) if data == expected));
    let why = |at: usize| piece.missing[at].failure.as_ref().unwrap().kind();
    assert_eq!((piece.missing[0].at, why(0)), (2, Kind::NotFound));
    assert_eq!((piece.missing[1].at, why(1)), (3, Kind::SourceChanged));
    assert_eq!(*home.told.0.lock().unwrap(), [b"h".to_vec()]);
    // Files of another set, or far too many.
    fetcher.ask(2, 1, What::SetFiles(v1::SetFiles { set: SET + 1, inodes: vec![1] })).await;
    assert_eq!(fetcher.answer().await.unwrap().1.unwrap_err().kind(), Kind::NotFound);
    fetcher.ask(3, 1, What::SetFiles(v1::SetFiles { set: SET, inodes: vec![1; 257] })).await;
    assert_eq!(fetcher.answer().await.unwrap_err().code(), tonic::Code::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_but_light_demand_passes_without_credit() {
    let bytes = noise(4 * CHUNK_BYTES + 60_000, 6);
    let limits = Limits { stall: Duration::from_millis(20), ..LIMITS };
    let home = Home::start(|source| std::fs::write(source.join("big"), &bytes).unwrap(), limits).await;
    let inode = home.inode("big");
    let mut fetcher = home.fetcher().await;
    fetcher.ask(0, 0, What::Credit(100_000)).await;
    fetcher.ask_set(1, 1, inode, 0).await;
    let first = fetcher.replies.message().await.unwrap().unwrap();
    assert!(first.counted && !first.last && first.id == 1);
    assert!(matches!(first.body, Some(Body::Data(data)) if data == bytes[..100_000]));
    // A few bytes come at once; a whole chunk waits for credit, whoever waits for it.
    fetcher.ask_set(2, 0, inode, 1).await;
    fetcher.ask_set(3, 0, inode, 4).await;
    assert_eq!(fetcher.answer().await.unwrap(), (3, Ok(chunk_of(&bytes, 4).to_vec())));
    // With credit the rest comes, what was let go meanwhile from where it was; an older credit takes
    // nothing back.
    fetcher.ask(0, 0, What::Credit(3 * CHUNK_BYTES as u64)).await;
    fetcher.ask(0, 0, What::Credit(5)).await;
    for _ in 0..2 {
        let (id, got) = fetcher.answer().await.unwrap();
        let whole = if id == 1 { &bytes[100_000..CHUNK_BYTES] } else { chunk_of(&bytes, 1) };
        assert!(got.unwrap() == whole, "{id}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_comes_with_its_proof_and_a_changed_one_does_not_come() {
    let bytes = noise(2 * CHUNK_BYTES + 50_000, 7);
    let home = Home::plain(|source| std::fs::write(source.join("big"), &bytes).unwrap()).await;
    let inode = home.inode("big");
    let part = |index, first, count| What::SetPart(v1::SetPart { set: SET, inode, index, first, count });
    let ids: Vec<_> = {
        let node = home.snapshot.manifest.node(limb_common::manifest::Inode(inode)).unwrap();
        (0..3)
            .map(|index| match node.chunk(index).unwrap() {
                ChunkRef::Data(id) => id,
                ChunkRef::Hole { .. } => panic!("no hole was written"),
            })
            .collect()
    };
    let mut fetcher = home.fetcher().await;
    // Twice each: the second time the values are known.
    for (index, first, count) in [(0, 3, 2), (1, 0, 1), (1, 63, 1), (2, 3, 1), (0, 3, 2), (1, 0, 64)] {
        fetcher.ask(1, 0, part(index, first, count)).await;
        let mut got = Vec::new();
        let mut proof = Vec::new();
        loop {
            let piece = fetcher.replies.message().await.unwrap().unwrap();
            proof.extend(
                piece.proof.chunks_exact(32).map(|value| limb_common::id::Digest(value.try_into().unwrap())),
            );
            let Some(Body::Data(data)) = piece.body else { panic!("{piece:?}") };
            got.extend_from_slice(&data);
            if piece.last {
                break;
            }
        }
        let groups = first as usize..(first + count) as usize;
        ids[usize::try_from(index).unwrap()].verify_part(groups, got.into(), &proof).unwrap();
    }
    for (index, first, count) in [(0, 64, 1), (2, 0, 5), (2, 0, 0), (3, 0, 1), (0, u32::MAX, u32::MAX)] {
        fetcher.ask(1, 0, part(index, first, count)).await;
        assert_eq!(fetcher.answer().await.unwrap().1.unwrap_err().kind(), Kind::NotFound, "{first}");
    }
    let file = std::fs::OpenOptions::new().write(true).open(home.source.join("big")).unwrap();
    file.write_all_at(b"!", 4 * 16_384).unwrap();
    fetcher.ask(1, 0, part(0, 3, 2)).await;
    assert_eq!(fetcher.answer().await.unwrap().1.unwrap_err().kind(), Kind::SourceChanged);
    assert_eq!(*home.told.0.lock().unwrap(), [b"big".to_vec()]);
}

/// Lines, then bytes without order.
fn mixed() -> (Vec<u8>, Vec<u8>) {
    let lines: String = (0..200_000).map(|n| format!("step {n}: loss 0.{}\n", n * 7919 % 9973)).collect();
    (lines.into_bytes()[..2 * CHUNK_BYTES + 5000].to_vec(), noise(CHUNK_BYTES, 3))
}

async fn encoded_home(compress: bool, stall: Duration) -> Home {
    let fill = |source: &std::path::Path| {
        let (text, noise) = mixed();
        std::fs::write(source.join("text"), &text).unwrap();
        std::fs::write(source.join("noise"), noise).unwrap();
        std::fs::write(source.join("a"), &text[..3000]).unwrap();
        std::fs::write(source.join("b"), &text[3000..9000]).unwrap();
    };
    Home::configured(fill, Limits { stall, ..LIMITS }, compress).await
}

#[tokio::test(flavor = "multi_thread")]
async fn what_compresses_is_sent_compressed_to_those_who_ask_for_it() {
    use limb_common::codec::{Encoding, decode};
    let (text, noise) = mixed();
    for (compress, asks) in [(true, true), (true, false), (false, true)] {
        let home = encoded_home(compress, STALL).await;
        let mut fetcher = home.fetcher().await;
        fetcher.encoded = asks;
        let expected = if compress && asks { Encoding::Zstd } else { Encoding::Raw };
        for index in 0..3 {
            fetcher.ask_set(index, 1, home.inode("text"), index).await;
            let (_, got) = fetcher.answer().await.unwrap();
            let encoding = limb_common::wire::encoding::encoding(fetcher.encodings[&index]).unwrap();
            assert_eq!(encoding, expected, "{compress} {asks} {index}");
            let (plain, got) = (chunk_of(&text, index), got.unwrap());
            assert!(expected == Encoding::Raw || got.len() < plain.len() / 2);
            assert_eq!(decode(encoding, got.into(), plain.len()).unwrap(), plain);
        }
        fetcher.ask_set(3, 0, home.inode("noise"), 0).await;
        assert_eq!(fetcher.answer().await.unwrap(), (3, Ok(noise.clone())));
        assert_eq!(fetcher.encodings[&3], 0);
        let inodes = vec![home.inode("b"), home.inode("a")];
        fetcher.ask(4, 1, What::SetFiles(v1::SetFiles { set: SET, inodes })).await;
        let (_, got) = fetcher.answer().await.unwrap();
        let encoding = limb_common::wire::encoding::encoding(fetcher.encodings[&4]).unwrap();
        assert_eq!(encoding, expected);
        let plain = [&text[3000..9000], &text[..3000]].concat();
        assert_eq!(decode(encoding, got.unwrap().into(), 9000).unwrap(), plain);
        // Groups have proofs of their own.
        let part = v1::SetPart { set: SET, inode: home.inode("text"), index: 1, first: 2, count: 3 };
        fetcher.ask(5, 0, What::SetPart(part)).await;
        let group = 16 << 10;
        let plain = &chunk_of(&text, 1)[2 * group..5 * group];
        assert_eq!(fetcher.answer().await.unwrap(), (5, Ok(plain.to_vec())));
        assert_eq!(fetcher.encodings[&5], 0);
        let told = *home.told.1.lock().unwrap();
        let (wire, plain) = (told.1, if compress && asks { text.len() + noise.len() + 9000 } else { 0 });
        assert!(told.0 == plain && wire <= plain, "{told:?} {plain}");
    }
}

/// What was let go while the client gave no credit is encoded again and must go on where it was.
#[tokio::test(flavor = "multi_thread")]
async fn a_compressed_answer_survives_a_stall() {
    let (text, _) = mixed();
    let home = encoded_home(true, Duration::from_millis(20)).await;
    let mut fetcher = home.fetcher().await;
    fetcher.encoded = true;
    fetcher.ask(0, 0, What::Credit(50_000)).await;
    fetcher.ask_set(1, 1, home.inode("text"), 0).await;
    let first = fetcher.replies.message().await.unwrap().unwrap();
    assert!(first.counted && !first.last && first.encoding != 0);
    let Some(Body::Data(data)) = first.body else { panic!("no data") };
    assert_eq!(data.len(), 50_000, "credit is of what is sent");
    fetcher.partial.insert(1, data.to_vec());
    // Time for it to be let go: each of these is one stall at least.
    for id in 2..5 {
        fetcher.ask_set(id, 1, home.inode("text"), 1).await;
        fetcher.ask_set(100 + id, 0, home.inode("a"), 0).await;
        assert_eq!(fetcher.answer().await.unwrap().0, 100 + id);
    }
    fetcher.ask(0, 0, What::Credit(u64::MAX)).await;
    let got = loop {
        // What was let go is read again all at once.
        let (id, got) = fetcher.answer().await.unwrap();
        if id == 1 {
            break got.unwrap();
        }
    };
    let encoding = limb_common::wire::encoding::encoding(first.encoding).unwrap();
    let plain = limb_common::codec::decode(encoding, got.into(), CHUNK_BYTES).unwrap();
    assert!(plain == chunk_of(&text, 0));
}
