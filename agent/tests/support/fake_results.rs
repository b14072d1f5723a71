//! A home that takes results over real gRPC on loopback, applies the journal to a tree in memory,
//! checks every hash, and can be told to cut, to stall, to hold its word back and to refuse.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::pin::Pin;
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use limb_agent::fetch::{ChunkAddress, ChunkSource, FetchError, FetchFuture, Priority};
use limb_agent::link::channels::{ChannelError, ChannelFuture, Channels};
use limb_common::chunk::{CHUNK_BYTES, ChunkId, Position, VerifiedChunk, value_of};
use limb_common::id::Digest;
use limb_proto::v1::results_server::{Results, ResultsServer};
use limb_proto::v1::{self, journal_entry, journal_frame};
use tokio::net::TcpListener;
use tokio::sync::{mpsc, watch};
use tokio_stream::wrappers::{ReceiverStream, TcpListenerStream};
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status, Streaming};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    Directory,
    File(Arc<Vec<u8>>),
    Symlink(Vec<u8>),
}

#[derive(Default)]
struct Part {
    bytes: Vec<u8>,
    generations: HashMap<u64, u64>,
}

#[derive(Default)]
pub(crate) struct Shelf {
    pub(crate) seq: u64,
    pub(crate) visible: BTreeMap<Vec<u8>, Seen>,
    pub(crate) modes: BTreeMap<Vec<u8>, u32>,
    pub(crate) partial: BTreeMap<Vec<u8>, Vec<u8>>,
    parts: HashMap<u64, Part>,
    finished: HashMap<u64, Arc<Vec<u8>>>,
    refusals: Vec<v1::EntryRefused>,
    /// Every publish: path, size, kind.
    pub(crate) published: Vec<(Vec<u8>, u64, i32)>,
    pub(crate) chunks_taken: usize,
    /// Things that an honest agent never sends.
    pub(crate) offences: Vec<String>,
    lower: HashMap<(u64, u64), Vec<u8>>,
}

/// What becomes of bytes that the box wants back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reads {
    Served,
    /// Answered when it is this no more, with what home has then.
    Held,
    Lost,
    Flipped,
}

pub(crate) struct State {
    pub(crate) shelf: Mutex<Shelf>,
    /// The next streams end after so many frames.
    pub(crate) cuts: Mutex<VecDeque<usize>>,
    /// Nothing is acknowledged (but all is taken).
    pub(crate) held: watch::Sender<bool>,
    /// Nothing is read.
    pub(crate) stalled: watch::Sender<bool>,
    /// Publishes under these names are refused.
    pub(crate) refuse: Mutex<BTreeMap<Vec<u8>, i32>>,
    pub(crate) changed: watch::Sender<u64>,
    pub(crate) frames: watch::Sender<usize>,
    pub(crate) reads: watch::Sender<Reads>,
    /// How often bytes were wanted back.
    pub(crate) read_asks: watch::Sender<usize>,
}

#[derive(Clone)]
pub(crate) struct FakeHome(pub(crate) Arc<State>);

impl FakeHome {
    pub(crate) fn new() -> Self {
        Self(Arc::new(State {
            shelf: Mutex::default(),
            cuts: Mutex::default(),
            held: watch::Sender::new(false),
            stalled: watch::Sender::new(false),
            refuse: Mutex::default(),
            changed: watch::Sender::new(0),
            frames: watch::Sender::new(0),
            reads: watch::Sender::new(Reads::Served),
            read_asks: watch::Sender::new(0),
        }))
    }

    /// What lies in the lower set, by inode and chunk.
    pub(crate) fn lower(&self, inode: u64, index: u64, bytes: &[u8]) {
        self.0.shelf.lock().unwrap().lower.insert((inode, index), bytes.to_vec());
    }

    pub(crate) fn show(&self, path: &[u8], seen: Seen) {
        self.0.shelf.lock().unwrap().visible.insert(path.to_vec(), seen);
    }

    pub(crate) fn file(&self, path: &str) -> Option<Arc<Vec<u8>>> {
        match self.0.shelf.lock().unwrap().visible.get(path.as_bytes()) {
            Some(Seen::File(bytes)) => Some(Arc::clone(bytes)),
            _ => None,
        }
    }

    pub(crate) async fn serve(&self) -> Arc<dyn Channels> {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let service = ResultsServer::new(self.clone()).max_decoding_message_size(4 << 20);
        limb_common::task::detach("fake-home", async move {
            tonic::transport::Server::builder()
                .add_service(service)
                .serve_with_incoming(TcpListenerStream::new(listener))
                .await
                .unwrap();
        });
        Arc::new(Loopback(format!("http://{address}")))
    }

    /// Waits until home's tree is as wanted.
    pub(crate) fn wait_until(&self, what: &str, mut holds: impl FnMut(&Shelf) -> bool) {
        for _ in 0..4000 {
            if holds(&self.0.shelf.lock().unwrap()) {
                return;
            }
            std::thread::park_timeout(std::time::Duration::from_millis(5));
        }
        panic!("never came: {what}; {:?}", self.0.shelf.lock().unwrap().published);
    }
}

struct Loopback(String);

impl Channels for Loopback {
    fn bulk(&self) -> ChannelFuture {
        let to = self.0.clone();
        Box::pin(async move {
            let endpoint = tonic::transport::Endpoint::new(to).unwrap();
            endpoint.connect().await.map_err(|error| ChannelError::Unreachable { source: Box::new(error) })
        })
    }
}

type Acks = Pin<Box<dyn Stream<Item = Result<v1::JournalAck, Status>> + Send>>;

#[tonic::async_trait]
impl Results for FakeHome {
    type JournalStream = Acks;

    async fn journal(&self, request: Request<Streaming<v1::JournalFrame>>) -> Result<Response<Acks>, Status> {
        let mut frames = request.into_inner();
        let (acks, out) = mpsc::channel(64);
        let home = self.clone();
        let cut = self.0.cuts.lock().unwrap().pop_front().unwrap_or(usize::MAX);
        limb_common::task::detach("fake-journal", async move {
            let first = home.ack(Vec::new());
            let _gone = acks.send(Ok(first)).await;
            let mut pending: Option<(v1::UploadChunk, Vec<u8>)> = None;
            let mut count = 0;
            let mut owed = Vec::new();
            let mut held = home.0.held.subscribe();
            loop {
                let mut stalled = home.0.stalled.subscribe();
                stalled.wait_for(|stalled| !*stalled).await.unwrap();
                let frame = tokio::select! {
                    frame = frames.next() => frame,
                    Ok(()) = held.changed() => {
                        if !*held.borrow() {
                            let _gone = acks.send(Ok(home.ack(std::mem::take(&mut owed)))).await;
                        }
                        continue;
                    }
                };
                let Some(Ok(frame)) = frame else { return };
                count += 1;
                let stored = home.take(frame, &mut pending);
                home.0.frames.send_modify(|count| *count += 1);
                owed.extend(stored);
                if count >= cut {
                    let _gone = acks.send(Err(Status::unavailable("cut"))).await;
                    return;
                }
                if !*home.0.held.borrow() {
                    let ack = home.ack(std::mem::take(&mut owed));
                    for _twice in 0..2 {
                        let _gone = acks.send(Ok(ack.clone())).await;
                    }
                }
                home.0.changed.send_modify(|changed| *changed += 1);
            }
        });
        Ok(Response::new(Box::pin(ReceiverStream::new(out))))
    }
}

impl FakeHome {
    fn ack(&self, chunks: Vec<v1::ChunkStored>) -> v1::JournalAck {
        let shelf = self.0.shelf.lock().unwrap();
        v1::JournalAck {
            durable_seq: shelf.seq,
            chunks,
            refused: shelf.refusals.clone(),
            chunks_refused: Vec::new(),
        }
    }

    fn take(
        &self,
        frame: v1::JournalFrame,
        pending: &mut Option<(v1::UploadChunk, Vec<u8>)>,
    ) -> Option<v1::ChunkStored> {
        let mut shelf = self.0.shelf.lock().unwrap();
        match frame.body.unwrap() {
            journal_frame::Body::Open(_) => None,
            journal_frame::Body::Chunk(piece) => {
                let mut so_far = pending.take().map_or(Vec::new(), |(_, bytes)| bytes);
                if piece.piece_offset as usize != so_far.len() || piece.data.len() > 256 * 1024 {
                    shelf.offences.push("piece out of order".to_owned());
                }
                so_far.extend_from_slice(&piece.data);
                if !piece.last {
                    *pending = Some((piece, so_far));
                    return None;
                }
                shelf.chunk(&piece, &so_far);
                Some(v1::ChunkStored {
                    output: piece.output,
                    file: piece.file,
                    index: piece.index,
                    generation: piece.generation,
                })
            }
            journal_frame::Body::Entry(entry) => {
                let refuse = self.0.refuse.lock().unwrap();
                shelf.entry(entry, &refuse);
                None
            }
        }
    }
}

impl Shelf {
    fn chunk(&mut self, piece: &v1::UploadChunk, bytes: &[u8]) {
        self.chunks_taken += 1;
        if value_of(Position::Subtree { index: piece.index }, bytes).0[..] != piece.value[..] {
            self.offences.push("wrong value".to_owned());
        }
        let Some(part) = self.parts.get_mut(&piece.file) else {
            if !self.finished.contains_key(&piece.file) {
                self.offences.push("chunk before its file".to_owned());
            }
            return;
        };
        let known = part.generations.get(&piece.index).copied().unwrap_or(0);
        if known > piece.generation {
            return;
        }
        part.generations.insert(piece.index, piece.generation);
        let start = usize::try_from(piece.index).unwrap() * CHUNK_BYTES;
        let end = start + CHUNK_BYTES;
        if part.bytes.len() < end {
            part.bytes.resize(end, 0);
        }
        part.bytes[start..end].fill(0);
        part.bytes[start..start + bytes.len()].copy_from_slice(bytes);
    }

    fn entry(&mut self, entry: v1::JournalEntry, refuse: &BTreeMap<Vec<u8>, i32>) {
        if entry.seq <= self.seq {
            return;
        }
        if entry.seq != self.seq + 1 {
            self.offences.push(format!("gap: {} after {}", entry.seq, self.seq));
        }
        self.seq = entry.seq;
        let op = entry.op.unwrap();
        if let Err(errno) = self.apply(op, refuse) {
            self.refusals.push(v1::EntryRefused { seq: entry.seq, errno, detail: "refused".to_owned() });
        }
    }

    fn apply(&mut self, op: journal_entry::Op, refuse: &BTreeMap<Vec<u8>, i32>) -> Result<(), i32> {
        match op {
            journal_entry::Op::Created(created) => {
                let bytes = match created.base {
                    None => Vec::new(),
                    Some(v1::file_created::Base::BaseFile(file)) => {
                        self.finished.get(&file).map(|bytes| bytes.to_vec()).ok_or(libc::EINVAL)?
                    }
                    Some(v1::file_created::Base::BaseLowerInode(inode)) => {
                        let mut chunks: Vec<_> =
                            self.lower.iter().filter(|((of, _), _)| *of == inode).collect();
                        chunks.sort();
                        chunks.into_iter().flat_map(|(_, bytes)| bytes.clone()).collect()
                    }
                };
                self.parts.insert(created.file, Part { bytes, generations: HashMap::new() });
            }
            journal_entry::Op::Published(publish) => {
                if let Some(errno) = refuse.get(&publish.path[..]) {
                    return Err(*errno);
                }
                let part = self.parts.get_mut(&publish.file).ok_or(libc::ENOENT)?;
                let mut bytes = part.bytes.clone();
                bytes.resize(usize::try_from(publish.size).unwrap(), 0);
                if Digest::of(&bytes).0[..] != publish.root[..] {
                    self.offences.push(format!("wrong root for {:?}", publish.path));
                    return Err(libc::EIO);
                }
                let path = publish.path.to_vec();
                let bytes = Arc::new(bytes);
                if publish.kind == v1::file_published::Kind::Grown as i32
                    && let Some(Seen::File(before)) = self.visible.get(&path)
                    && !bytes.starts_with(before)
                {
                    self.offences.push(format!("{path:?} grew into something else"));
                }
                if publish.kind == v1::file_published::Kind::Final as i32 {
                    self.parts.remove(&publish.file);
                    self.finished.insert(publish.file, Arc::clone(&bytes));
                }
                self.published.push((path.clone(), publish.size, publish.kind));
                self.modes.insert(path.clone(), publish.mode);
                self.visible.insert(path, Seen::File(bytes));
            }
            journal_entry::Op::Renamed(renamed) => self.rename(&renamed.from, &renamed.to)?,
            journal_entry::Op::Removed(removed) => {
                let prefix = [&removed.path[..], b"/"].concat();
                if self.visible.keys().any(|path| path.starts_with(&prefix)) {
                    return Err(libc::ENOTEMPTY);
                }
                self.visible.remove(&removed.path[..]).ok_or(libc::ENOENT)?;
            }
            journal_entry::Op::DirectoryMade(made) => {
                self.visible.insert(made.path.to_vec(), Seen::Directory);
            }
            journal_entry::Op::SymlinkMade(made) => {
                self.visible.insert(made.path.to_vec(), Seen::Symlink(made.target.to_vec()));
            }
            journal_entry::Op::HardLinkMade(made) => {
                if self.visible.contains_key(&made.path[..]) {
                    return Err(libc::EEXIST);
                }
                let there = self.visible.get(&made.existing[..]).cloned().ok_or(libc::ENOENT)?;
                self.visible.insert(made.path.to_vec(), there);
                if let Some(mode) = self.modes.get(&made.existing[..]).copied() {
                    self.modes.insert(made.path.to_vec(), mode);
                }
            }
            journal_entry::Op::AttributesSet(set) => {
                if !self.visible.contains_key(&set.path[..]) {
                    return Err(libc::ENOENT);
                }
                if let Some(mode) = set.mode {
                    self.modes.insert(set.path.to_vec(), mode);
                }
            }
            journal_entry::Op::XattrSet(set) => {
                if !self.visible.contains_key(&set.path[..]) {
                    return Err(libc::ENOENT);
                }
            }
            journal_entry::Op::Abandoned(abandoned) => {
                let part = self.parts.remove(&abandoned.file).ok_or(libc::ENOENT)?;
                if abandoned.keep {
                    let mut bytes = part.bytes;
                    bytes.resize(usize::try_from(abandoned.size).unwrap(), 0);
                    self.partial.insert(abandoned.path.to_vec(), bytes);
                }
            }
        }
        Ok(())
    }

    fn rename(&mut self, from: &[u8], to: &[u8]) -> Result<(), i32> {
        let moved = self.visible.remove(from).ok_or(libc::ENOENT)?;
        self.visible.insert(to.to_vec(), moved);
        if let Some(mode) = self.modes.remove(from) {
            self.modes.insert(to.to_vec(), mode);
        }
        let prefix = [from, b"/"].concat();
        let below: Vec<_> = self.visible.keys().filter(|path| path.starts_with(&prefix)).cloned().collect();
        for path in below {
            let seen = self.visible.remove(&path).unwrap();
            let moved = [to, b"/", &path[prefix.len()..]].concat();
            if let Some(mode) = self.modes.remove(&path) {
                self.modes.insert(moved.clone(), mode);
            }
            self.visible.insert(moved, seen);
        }
        Ok(())
    }

    fn read_back(&self, address: ChunkAddress) -> Option<Vec<u8>> {
        match address {
            ChunkAddress::Set { inode, index, .. } => self.lower.get(&(inode.0, index)).cloned(),
            ChunkAddress::Result { file, index, .. } => {
                let whole = self.finished.get(&file).map(|bytes| &bytes[..]);
                let bytes = whole.or_else(|| self.parts.get(&file).map(|part| &part.bytes[..]))?;
                let start = usize::try_from(index).unwrap() * CHUNK_BYTES;
                Some(bytes.get(start..bytes.len().min(start + CHUNK_BYTES))?.to_vec())
            }
        }
    }
}

impl ChunkSource for FakeHome {
    fn fetch(&self, address: ChunkAddress, id: ChunkId, _priority: Priority) -> FetchFuture {
        let home = self.clone();
        Box::pin(async move {
            home.0.read_asks.send_modify(|asks| *asks += 1);
            let mut reads = home.0.reads.subscribe();
            let reads = *reads.wait_for(|reads| *reads != Reads::Held).await.unwrap();
            let found = home.0.shelf.lock().unwrap().read_back(address);
            let found = found.filter(|_| reads != Reads::Lost);
            let mut bytes = found.ok_or(FetchError::NotFound)?;
            bytes.truncate(id.len as usize);
            if reads == Reads::Flipped {
                bytes[0] ^= 1;
            }
            id.verify(Bytes::from(bytes)).map_err(|error| FetchError::Corrupt { detail: error.to_string() })
        })
    }

    fn cached(&self, _id: &ChunkId) -> Option<VerifiedChunk> {
        None
    }
}
