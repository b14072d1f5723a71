//! A home that serves chunks over real gRPC on loopback and can be told to misbehave.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::collections::{HashMap, VecDeque};
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use limb_agent::link::channels::{ChannelError, ChannelFuture, Channels};
use limb_common::chunk::{Position, group_bytes, group_values, proof};
use limb_common::codec::{Encoding, encode};
use limb_proto::v1;
use limb_proto::v1::chunks_server::{Chunks, ChunksServer};
use limb_proto::v1::fetch_request::What;
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
    Bomb,
}

/// What is wrong with one answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    FlipByte,
    Short,
    /// A piece comes twice.
    PieceTwice,
    /// The pieces come in another order.
    Reordered,
    /// The bytes of another chunk.
    Neighbour,
    /// Home says that it could not read.
    Unreadable,
    /// The whole answer comes twice, which harms nobody.
    AnswerTwice,
    /// It never comes, while the stream goes on.
    Silence,
}

impl Fault {
    /// A reader is told after three of these in a row; of so many in all, never.
    const BORNE: u32 = 2;

    fn is_borne_without_end(self) -> bool {
        matches!(self, Self::AnswerTwice | Self::Silence)
    }
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
    /// For the next answers, from the front, but no more to one chunk than a reader never notices.
    pub(crate) faults: Mutex<VecDeque<Fault>>,
    pub(crate) faults_done: Mutex<HashMap<Key, u32>>,
    /// For every answer of these chunks.
    pub(crate) spoiled: Mutex<HashMap<Key, Fault>>,
    /// While true requests are taken and nothing is sent.
    pub(crate) held: watch::Sender<bool>,
    /// Of files by set and inode; only of those that are here parts and packs are known.
    pub(crate) sizes: HashMap<(u32, u64), u64>,
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
    let mut held = state.held.subscribe();
    while let Ok(Some(request)) = requests.message().await {
        if !matches!(request.what, Some(What::Credit(_))) {
            state.requests.send_modify(|all| all.push((number, request.clone())));
        }
        let Some(asked) = asked(&state, &request) else { continue };
        if mood == Mood::Mute {
            continue;
        }
        if held.wait_for(|held| !held).await.is_err() {
            return;
        }
        for piece in answer(&state, &asked, &request, mood) {
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

/// What a request wants: the chunks that it is about, and how to make the answer from their bytes.
enum Asked {
    Chunk(Key),
    Files(Vec<Key>),
    Part { key: Key, groups: std::ops::Range<usize> },
}

fn asked(state: &State, request: &v1::FetchRequest) -> Option<Asked> {
    match request.what.clone()? {
        What::SetChunk(v1::SetChunk { set, inode, index }) => Some(Asked::Chunk((set, inode, index))),
        What::SetFiles(v1::SetFiles { set, inodes }) if !state.sizes.is_empty() => {
            Some(Asked::Files(inodes.into_iter().map(|inode| (set, inode, 0)).collect()))
        }
        What::SetPart(v1::SetPart { set, inode, index, first, count }) if !state.sizes.is_empty() => {
            let groups = first as usize..(first + count) as usize;
            Some(Asked::Part { key: (set, inode, index), groups })
        }
        _ => None,
    }
}

impl State {
    fn fault_of(&self, key: Key) -> Option<Fault> {
        if let Some(fault) = self.spoiled.lock().unwrap().get(&key) {
            return Some(*fault);
        }
        let mut faults = self.faults.lock().unwrap();
        let next = *faults.front()?;
        let mut done = self.faults_done.lock().unwrap();
        let count = done.entry(key).or_default();
        if !next.is_borne_without_end() {
            if *count == Fault::BORNE {
                return None;
            }
            *count += 1;
        }
        faults.pop_front()
    }

    /// Never the right bytes, unless there are none.
    fn spoil(&self, key: Key, bytes: &Bytes, fault: Fault) -> Bytes {
        let flipped = || {
            let mut bytes = bytes.to_vec();
            let middle = bytes.len() / 2;
            bytes.iter_mut().skip(middle).take(1).for_each(|byte| *byte ^= 1);
            Bytes::from(bytes)
        };
        match fault {
            Fault::FlipByte => flipped(),
            // So few may be the same in another order.
            Fault::Reordered if bytes.len() < 64 => flipped(),
            Fault::Short => bytes.slice(..bytes.len().saturating_sub(1)),
            Fault::Neighbour => {
                let other = |(other, found): (&Key, &Bytes)| {
                    (*other != key && found.len() >= bytes.len()).then(|| found.slice(..bytes.len()))
                };
                self.chunks.iter().find_map(other).filter(|other| other != bytes).unwrap_or_else(flipped)
            }
            Fault::PieceTwice
            | Fault::Reordered
            | Fault::Unreadable
            | Fault::AnswerTwice
            | Fault::Silence => bytes.clone(),
        }
    }
}

fn answer(state: &State, asked: &Asked, request: &v1::FetchRequest, mood: Mood) -> Vec<v1::FetchPiece> {
    let id = request.id;
    let failed = |(kind, detail): Failure| {
        let body = v1::fetch_piece::Body::Failure(v1::FetchFailure { kind: kind.into(), detail });
        vec![v1::FetchPiece { id, last: true, body: Some(body), ..v1::FetchPiece::default() }]
    };
    let key = match asked {
        Asked::Chunk(key) | Asked::Part { key, .. } => *key,
        Asked::Files(keys) => keys[0],
    };
    if let Some(failure) = state.failures.lock().unwrap().get(&key).cloned() {
        return failed(failure);
    }
    let fault = state.fault_of(key);
    if fault == Some(Fault::Unreadable) {
        return failed((v1::fetch_failure::Kind::Io, "bad sector".to_owned()));
    }
    let (mut missing, mut proved) = (Vec::new(), Vec::new());
    let plain: Option<Bytes> = match asked {
        Asked::Chunk(key) => state.chunks.get(key).cloned(),
        Asked::Files(keys) => {
            let mut all = Vec::new();
            for (at, key) in (0..).zip(keys) {
                // One that is bad for ever is also bad in a pack.
                let spoiled = state.spoiled.lock().unwrap().get(key).copied();
                match (state.chunks.get(key), spoiled) {
                    (Some(bytes), None) => all.extend_from_slice(bytes),
                    (Some(bytes), Some(_)) => {
                        all.extend_from_slice(&state.spoil(*key, bytes, Fault::FlipByte));
                    }
                    (None, _) => missing.push(v1::MissingFile { at, ..v1::MissingFile::default() }),
                }
            }
            Some(all.into())
        }
        Asked::Part { key, groups } => state.chunks.get(key).map(|bytes| {
            let position = Position::of(state.sizes[&(key.0, key.1)], key.2);
            let proof = proof(&group_values(position, bytes), groups);
            proved = proof.iter().flat_map(|value| value.0).collect();
            bytes.slice(group_bytes(u32::try_from(bytes.len()).unwrap(), groups))
        }),
    };
    let Some(plain) = plain else { return failed((v1::fetch_failure::Kind::NotFound, String::new())) };
    let plain = fault.map_or_else(|| plain.clone(), |fault| state.spoil(key, &plain, fault));
    let (encoding, bytes) = match mood {
        Mood::Bomb => (Encoding::Zstd, zstd::encode_all(&vec![0_u8; 64 << 20][..], 1).unwrap().into()),
        Mood::Serve | Mood::CutAfter(_) | Mood::Mute | Mood::TooMuch if request.encoded => encode(&plain),
        Mood::Serve | Mood::CutAfter(_) | Mood::Mute | Mood::TooMuch => (Encoding::Raw, plain),
    };
    // No piece is the whole of an answer that has more than one byte, so that there is an order.
    let piece = (256 * 1024).min(bytes.len().div_ceil(2)).max(1);
    let mut pieces: Vec<Bytes> = bytes.chunks(piece).map(Bytes::copy_from_slice).collect();
    if pieces.is_empty() {
        pieces.push(Bytes::new());
    }
    match fault {
        Some(Fault::PieceTwice) => pieces.push(pieces[0].clone()),
        Some(Fault::Reordered) => pieces.reverse(),
        Some(Fault::AnswerTwice) => pieces.extend(pieces.clone()),
        Some(Fault::Silence) => pieces.clear(),
        _ => {}
    }
    if mood == Mood::TooMuch {
        pieces.push(Bytes::from_static(b"more"));
    }
    let count = pieces.len();
    let mut proof = Bytes::from(proved);
    let ends = |at: usize| at + 1 == count || (fault == Some(Fault::AnswerTwice) && at + 1 == count / 2);
    pieces
        .into_iter()
        .enumerate()
        .map(|(at, data)| v1::FetchPiece {
            id,
            last: ends(at),
            encoding: v1::ChunkEncoding::from(encoding).into(),
            missing: std::mem::take(&mut missing),
            proof: std::mem::take(&mut proof),
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
