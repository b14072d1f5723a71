//! The working set as a read-only file system. Metadata comes from the manifest with no round
//! trip and the kernel may keep it for a year; bytes come from a [`ChunkSource`].
//!
//! FUSE threads never wait: what is in memory is answered at once, the rest from a task.
//!
//! Never: answer a read with fewer bytes than were asked for, except at the end of the file (the
//! page cache takes a short reply for the end), or with anything in place of what is missing.

mod adapter;
mod ahead;
mod killed;
mod push;
mod tensors;
mod tour;
mod tree;

pub use push::{PushStats, Pusher, Pushing};
pub use tree::{Attributes, Entry, Owner, Part, Seek, Tree, TreeError};

use std::collections::HashSet;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fuser::{InitFlags, ReplyData};
use futures_util::future::join_all;
use limb_common::assignment::SetNumber;
use limb_common::chunk::{CHUNK_BYTES, CHUNK_BYTES_U64, ChunkId, VerifiedSlice};
use limb_common::manifest::{ChunkRef, Inode, Manifest};
use limb_common::task;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use self::ahead::{Read, ReadAhead, Step};
use self::push::Reading;
use self::tour::{Stop, Tours};
use crate::fetch::{ChunkAddress, ChunkSource, FetchError, Priority, SliceFuture};
use crate::trace::SetTrace;

/// Called once per file whose bytes cannot be had, with the file's path in the set.
pub type OnProblem = Arc<dyn Fn(&Path, &FetchError) + Send + Sync>;

/// What a read-only mount is made of.
pub struct ReadFsOptions {
    pub manifest: Manifest,
    pub set: SetNumber,
    pub source: Arc<dyn ChunkSource>,
    pub owner: Owner,
    pub on_problem: OnProblem,
    /// Told of every first touch.
    pub trace: Option<Arc<SetTrace>>,
    /// What is here is pushed into the page cache before a sequential reader comes to it.
    pub push: Option<Pushing>,
    /// The mount's own: when it fires, every read that waits is answered with EIO.
    pub stop: CancellationToken,
    /// Reads that wait for the network are answered from here.
    pub runtime: Handle,
}

impl std::fmt::Debug for ReadFsOptions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReadFsOptions")
            .field("manifest", &self.manifest)
            .field("set", &self.set)
            .field("owner", &self.owner)
            .finish_non_exhaustive()
    }
}

/// The read-only file system; give it to [`super::session::MountSession::mount`].
pub struct ReadFs {
    core: Arc<Core>,
    runtime: Handle,
    granted: InitFlags,
}

impl std::fmt::Debug for ReadFs {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReadFs").field("tree", &self.core.tree).finish_non_exhaustive()
    }
}

struct Core {
    tree: Tree,
    set: SetNumber,
    source: Arc<dyn ChunkSource>,
    ahead: Mutex<ReadAhead>,
    tours: Mutex<Tours>,
    on_problem: OnProblem,
    trace: Option<Arc<SetTrace>>,
    push: Option<Pushing>,
    reported: Mutex<HashSet<Inode>>,
    stop: CancellationToken,
}

/// What a read says about those that will follow.
#[derive(Debug, Default)]
struct Ahead {
    /// To be asked for now.
    chunks: Range<u64>,
    /// The rest of the chunks that this read touches will be wanted too.
    whole: bool,
    /// Before the reader by more than what the kernel itself may be asking for now.
    push: Range<u64>,
}

/// Of a file no larger than this nobody wants a part: it is read from end to end.
const WHOLE_FILE_BYTES: u64 = 64 << 10;

/// One part of a reply.
enum Piece {
    Zeros(usize),
    Here(VerifiedSlice),
    Coming(SliceFuture),
}

/// What of a [`Piece`] is known after waiting.
enum Ready {
    Zeros(usize),
    Bytes(VerifiedSlice),
}

impl ReadFs {
    #[must_use]
    pub fn new(options: ReadFsOptions) -> Self {
        let ReadFsOptions { manifest, set, source, owner, on_problem, trace, push, stop, runtime } = options;
        let core = Core {
            tree: Tree::new(manifest, owner),
            set,
            source,
            ahead: Mutex::default(),
            tours: Mutex::default(),
            on_problem,
            trace,
            push,
            reported: Mutex::default(),
            stop,
        };
        Self { core: Arc::new(core), runtime, granted: InitFlags::empty() }
    }

    fn answer_read(&self, thread: u32, inode: Inode, offset: u64, len: u64, reply: ReplyData) {
        let parts = match self.core.tree.span(inode, offset, len) {
            Ok(parts) => parts,
            Err(error) => return reply.error(adapter::errno(error)),
        };
        let reading = self.core.push.as_ref().map(|push| push.reading(inode, offset, len));
        let ahead = self.core.look_ahead(inode, offset, len);
        let whole = ahead.whole;
        let pieces: Vec<_> = parts.into_iter().map(|part| self.core.piece(inode, part, whole)).collect();
        // What somebody waits for was asked for first.
        self.core.ask_ahead(inode, offset, ahead.chunks);
        if let Some(push) = &self.core.push {
            push.hand_over(inode, ahead.push);
        }
        if offset == 0 && !self.core.plan_leads(inode, 0) {
            self.core.tour_ahead(inode);
        }
        if pieces.iter().any(|piece| matches!(piece, Piece::Coming(_))) {
            let core = Arc::clone(&self.core);
            let _runtime = self.runtime.enter();
            let read = async move { core.answer_later(thread, inode, offset, pieces, reply, reading).await };
            task::detach("read", read);
            return;
        }
        let ready = pieces.into_iter().filter_map(|piece| match piece {
            Piece::Zeros(len) => Some(Ready::Zeros(len)),
            Piece::Here(slice) => Some(Ready::Bytes(slice)),
            Piece::Coming(_) => None,
        });
        let ready: Vec<_> = ready.collect();
        send(reply, &ready);
        drop(reading);
        self.core.expect_tensors(inode, offset, &ready);
    }
}

impl Core {
    fn piece(&self, inode: Inode, part: Part, whole: bool) -> Piece {
        match part {
            Part::Zeros { len } => Piece::Zeros(len),
            Part::Data { index, id, from, to } => {
                let here = self.source.cached_slice(&id, from..to);
                let all = whole || to - from == id.len as usize;
                let trace = self.trace.as_ref();
                let planned = trace.is_some_and(|trace| trace.touch(inode, index, here.is_some(), all));
                match here {
                    Some(slice) => Piece::Here(slice),
                    None => Piece::Coming(self.coming(inode, index, id, from..to, whole || planned)),
                }
            }
        }
    }

    fn coming(&self, inode: Inode, index: u64, id: ChunkId, range: Range<usize>, whole: bool) -> SliceFuture {
        let address = ChunkAddress::Set { set: self.set, inode, index };
        if !whole {
            return self.source.fetch_slice(address, id, range);
        }
        let chunk = self.source.fetch(address, id, Priority::Demand);
        Box::pin(async move {
            let outside = || FetchError::Io { detail: "outside of the chunk".to_owned() };
            chunk.await?.slice(range).ok_or_else(outside)
        })
    }

    /// What this read says about those that will follow.
    fn look_ahead(&self, inode: Inode, offset: u64, len: u64) -> Ahead {
        let Some(node) = self.tree.manifest().node(inode) else { return Ahead::default() };
        let bandwidth_delay = self.source.bandwidth_delay_bytes();
        let read = Read { inode, offset, len, file_bytes: node.size };
        let Step { ask, sequential, before } = lock(&self.ahead).on_read(read, bandwidth_delay);
        tracing::trace!(inode = inode.0, offset, len, sequential, ?ask, "read");
        let whole = sequential || node.size <= WHOLE_FILE_BYTES || self.source.whole_pays(node.size);
        Ahead { chunks: ask, whole, push: before }
    }

    /// Asks for these chunks, which a read at `offset` brought up.
    fn ask_ahead(&self, inode: Inode, offset: u64, chunks: Range<u64>) {
        let Some(node) = self.tree.manifest().node(inode) else { return };
        if self.plan_leads(inode, offset) {
            lock(&self.ahead).not_asked(inode, &chunks);
            return;
        }
        for index in chunks {
            if let Some(ChunkRef::Data(id)) = node.chunk(index) {
                let address = ChunkAddress::Set { set: self.set, inode, index };
                self.source.prefetch(address, id, Priority::ReadAhead);
            }
        }
    }

    /// A plan asks for what follows, and for nothing else than what will be read.
    fn plan_leads(&self, inode: Inode, offset: u64) -> bool {
        self.trace.as_ref().is_some_and(|trace| trace.leads(inode, offset / CHUNK_BYTES_U64))
    }

    /// The first bytes of a file may say how it will be read.
    fn expect_tensors(&self, inode: Inode, offset: u64, ready: &[Ready]) {
        let (0, Some(Ready::Bytes(head))) = (offset, ready.first()) else { return };
        let Some(node) = self.tree.manifest().node(inode) else { return };
        if node.chunk_count() < 2 || !tensors::holds_tensors(head.bytes(), node.size) {
            return;
        }
        let bandwidth_delay = self.source.bandwidth_delay_bytes();
        let chunks = lock(&self.ahead).expect(inode, node.size, bandwidth_delay);
        self.ask_ahead(inode, offset, chunks);
    }

    /// The files that somebody who reads file after file will want next.
    fn tour_ahead(&self, inode: Inode) {
        let stops =
            lock(&self.tours).on_visit(self.tree.manifest(), inode, self.source.bandwidth_delay_bytes());
        for stop in stops {
            match stop {
                Stop::Files(files) => self.source.prefetch_pack(self.set, &files, Priority::ReadAhead),
                Stop::Chunk { inode, index, id } => {
                    let address = ChunkAddress::Set { set: self.set, inode, index };
                    self.source.prefetch(address, id, Priority::ReadAhead);
                }
            }
        }
    }

    async fn answer_later(
        &self,
        thread: u32,
        inode: Inode,
        offset: u64,
        pieces: Vec<Piece>,
        reply: ReplyData,
        _until_answered: Option<Reading>,
    ) {
        let waited = join_all(pieces.into_iter().map(|piece| async move {
            Ok::<_, FetchError>(match piece {
                Piece::Zeros(len) => Ready::Zeros(len),
                Piece::Here(slice) => Ready::Bytes(slice),
                Piece::Coming(slice) => Ready::Bytes(slice.await?),
            })
        }));
        let ready = tokio::select! {
            biased;
            () = self.stop.cancelled() => Err(FetchError::Closed),
            // It hears no answer; who shares its pages asks for them again.
            () = killed::killed(thread) => return reply.error(fuser::Errno::EINTR),
            ready = waited => ready.into_iter().collect::<Result<Vec<_>, _>>(),
        };
        match ready {
            Ok(ready) => {
                send(reply, &ready);
                self.expect_tensors(inode, offset, &ready);
            }
            Err(error) => {
                self.report(inode, &error);
                reply.error(fuser::Errno::EIO);
            }
        }
    }

    fn report(&self, inode: Inode, error: &FetchError) {
        if *error == FetchError::Closed || !lock(&self.reported).insert(inode) {
            return;
        }
        let path = self.tree.path_of(inode);
        tracing::error!(path = %path.display(), %error, "a file cannot be read");
        (self.on_problem)(&path, error);
    }
}

/// Held for a few operations in memory only.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

static ZEROS: [u8; CHUNK_BYTES] = [0; CHUNK_BYTES];

fn send(reply: ReplyData, ready: &[Ready]) {
    let slices: Option<Vec<&[u8]>> = ready
        .iter()
        .map(|part| match part {
            Ready::Zeros(len) => ZEROS.get(..*len),
            Ready::Bytes(slice) => Some(&slice.bytes()[..]),
        })
        .collect();
    match slices.as_deref() {
        Some([]) => reply.data(&[]),
        Some([only]) => reply.data(only),
        Some(several) => reply.data(&several.concat()),
        // A verified chunk has the length that the manifest gave; this is only for the type.
        None => reply.error(fuser::Errno::EIO),
    }
}
