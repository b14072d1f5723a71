//! A home that serves chunks over real gRPC on loopback and can be told to misbehave.

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use limb_agent::link::channels::{ChannelError, ChannelFuture, Channels};
use limb_common::codec::{Encoding, encode};
use limb_proto::v1;
use limb_proto::v1::chunks_server::{Chunks, ChunksServer};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::Stream;
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tonic::{Request, Response, Status, Streaming};

/// Set, inode, index.
type Key = (u32, u64, u64);
type Failure = (v1::fetch_failure::Kind, String);

/// What the next stream does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mood {
    Serve,
    /// Break the stream after so many pieces.
    CutAfter(usize),
    /// Take requests, answer nothing.
    Mute,
    /// One piece too many for each chunk.
    TooMuch,
    /// Chunks that say to be zstd frames, and are such of far more than was asked for.
    #[allow(dead_code, reason = "not every test that includes this file lies so")]
    Bomb,
}

#[derive(Default)]
pub(crate) struct State {
    pub(crate) chunks: HashMap<Key, Bytes>,
    /// One for each stream that is opened; then `Serve`.
    pub(crate) moods: Mutex<VecDeque<Mood>>,
    /// Every request of every stream: (stream, request).
    pub(crate) requests: watch::Sender<Vec<(usize, v1::FetchRequest)>>,
    pub(crate) streams: Mutex<usize>,
    pub(crate) failures: Mutex<HashMap<Key, Failure>>,
    /// Pieces of each answer to the manifest's question, from the front; then the last for ever.
    pub(crate) manifests: Mutex<VecDeque<Result<Vec<Bytes>, Status>>>,
}

#[derive(Clone)]
pub(crate) struct FakeChunks(pub(crate) Arc<State>);

type Pieces<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

#[tonic::async_trait]
impl Chunks for FakeChunks {
    type ManifestStream = Pieces<v1::ManifestPiece>;
    type FetchStream = Pieces<v1::FetchPiece>;

    async fn manifest(
        &self,
        _request: Request<v1::ManifestRequest>,
    ) -> Result<Response<Self::ManifestStream>, Status> {
        let mut answers = self.0.manifests.lock().unwrap();
        let answer = if answers.len() > 1 { answers.pop_front() } else { answers.front().cloned() };
        let pieces = answer.unwrap_or_else(|| Err(Status::not_found("no such set")))?;
        let cut = pieces.last().is_some_and(Bytes::is_empty);
        let mut items: Vec<_> = pieces.into_iter().map(|data| Ok(v1::ManifestPiece { data })).collect();
        if cut {
            items.push(Err(Status::unavailable("cut")));
        }
        Ok(Response::new(Box::pin(tokio_stream::iter(items))))
    }

    async fn fetch(
        &self,
        request: Request<Streaming<v1::FetchRequest>>,
    ) -> Result<Response<Self::FetchStream>, Status> {
        let state = Arc::clone(&self.0);
        let number = {
            let mut streams = state.streams.lock().unwrap();
            *streams += 1;
            *streams
        };
        let mood = state.moods.lock().unwrap().pop_front().unwrap_or(Mood::Serve);
        let (send, receive) = mpsc::channel(16);
        let work = serve(state, number, mood, request.into_inner(), send);
        limb_common::task::detach("fake", work);
        Ok(Response::new(Box::pin(ReceiverStream::new(receive))))
    }
}

async fn serve(
    state: Arc<State>,
    number: usize,
    mood: Mood,
    mut requests: Streaming<v1::FetchRequest>,
    send: mpsc::Sender<Result<v1::FetchPiece, Status>>,
) {
    let mut sent = 0;
    while let Ok(Some(request)) = requests.message().await {
        if !matches!(request.what, Some(v1::fetch_request::What::Credit(_))) {
            state.requests.send_modify(|all| all.push((number, request.clone())));
        }
        let Some(v1::fetch_request::What::SetChunk(chunk)) = request.what else { continue };
        if mood == Mood::Mute {
            continue;
        }
        let key = (chunk.set, chunk.inode, chunk.index);
        for piece in answer(&state, key, &request, mood) {
            if mood == Mood::CutAfter(sent) {
                let _gone = send.send(Err(Status::unavailable("cut"))).await;
                return;
            }
            sent += 1;
            if send.send(Ok(piece)).await.is_err() {
                return;
            }
        }
    }
}

fn answer(state: &State, key: Key, request: &v1::FetchRequest, mood: Mood) -> Vec<v1::FetchPiece> {
    let id = request.id;
    let failure = state.failures.lock().unwrap().get(&key).cloned();
    let failed = |kind: v1::fetch_failure::Kind, detail: String| {
        let body = v1::fetch_piece::Body::Failure(v1::FetchFailure { kind: kind.into(), detail });
        vec![v1::FetchPiece { id, last: true, body: Some(body), ..v1::FetchPiece::default() }]
    };
    if let Some((kind, detail)) = failure {
        return failed(kind, detail);
    }
    let Some(bytes) = state.chunks.get(&key) else {
        return failed(v1::fetch_failure::Kind::NotFound, String::new());
    };
    let (encoding, bytes) = match mood {
        Mood::Bomb => (Encoding::Zstd, zstd::encode_all(&vec![0_u8; 64 << 20][..], 1).unwrap().into()),
        Mood::Serve | Mood::CutAfter(_) | Mood::Mute | Mood::TooMuch if request.encoded => encode(bytes),
        Mood::Serve | Mood::CutAfter(_) | Mood::Mute | Mood::TooMuch => (Encoding::Raw, bytes.clone()),
    };
    let mut pieces: Vec<Bytes> = bytes.chunks(256 * 1024).map(Bytes::copy_from_slice).collect();
    if mood == Mood::TooMuch {
        pieces.push(Bytes::from_static(b"more"));
    }
    let count = pieces.len();
    pieces
        .into_iter()
        .enumerate()
        .map(|(at, data)| v1::FetchPiece {
            id,
            last: at + 1 == count,
            encoding: v1::ChunkEncoding::from(encoding).into(),
            body: Some(v1::fetch_piece::Body::Data(data)),
            ..v1::FetchPiece::default()
        })
        .collect()
}

/// Dials the fake; fails the first so many times.
pub(crate) struct FakeChannels {
    address: std::net::SocketAddr,
    refusals: Arc<Mutex<usize>>,
    /// What a connection is said to have taken.
    pub(crate) round_trip: Option<Duration>,
}

impl Channels for FakeChannels {
    fn round_trip(&self) -> Option<Duration> {
        self.round_trip
    }

    fn bulk(&self) -> ChannelFuture {
        let (address, refusals) = (self.address, Arc::clone(&self.refusals));
        Box::pin(async move {
            {
                let mut left = refusals.lock().unwrap();
                if *left > 0 {
                    *left -= 1;
                    return Err(ChannelError::Unreachable { source: "the router is off".into() });
                }
            }
            let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{address}")).unwrap();
            let unreachable = |error| ChannelError::Unreachable { source: Box::new(error) };
            endpoint.connect_timeout(Duration::from_secs(2)).connect().await.map_err(unreachable)
        })
    }
}

/// Serves until the returned task is dropped.
pub(crate) async fn start(state: Arc<State>, refusals: usize) -> (FakeChannels, limb_common::task::Task<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tonic::transport::Server::builder()
        .add_service(ChunksServer::new(FakeChunks(state)))
        .serve_with_incoming(TcpListenerStream::new(listener));
    let task = limb_common::task::spawn("fake home", async move {
        server.await.unwrap();
    });
    (FakeChannels { address, refusals: Arc::new(Mutex::new(refusals)), round_trip: None }, task)
}
