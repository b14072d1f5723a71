//! The working set as a read-only file system. Metadata comes from the manifest with no round
//! trip and the kernel may keep it for a year; bytes come from a [`ChunkSource`].
//!
//! FUSE threads never wait: what is in memory is answered at once, the rest from a task.
//!
//! Never: answer a read with fewer bytes than were asked for, except at the end of the file (the
//! page cache takes a short reply for the end), or with anything in place of what is missing.

mod adapter;
mod ahead;
mod tree;

pub use tree::{Attributes, Entry, Owner, Part, Seek, Tree, TreeError};

use std::collections::HashSet;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fuser::{InitFlags, ReplyData};
use futures_util::future::join_all;
use limb_common::assignment::SetNumber;
use limb_common::chunk::{CHUNK_BYTES, VerifiedChunk};
use limb_common::manifest::{ChunkRef, Inode, Manifest};
use limb_common::task;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use self::ahead::{Read, ReadAhead};
use crate::fetch::{ChunkAddress, ChunkSource, FetchError, FetchFuture, Priority};

/// Called once per file whose bytes cannot be had, with the file's path in the set.
pub type OnProblem = Arc<dyn Fn(&Path, &FetchError) + Send + Sync>;

/// What a read-only mount is made of.
pub struct ReadFsOptions {
    pub manifest: Manifest,
    pub set: SetNumber,
    pub source: Arc<dyn ChunkSource>,
    pub owner: Owner,
    pub on_problem: OnProblem,
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
    on_problem: OnProblem,
    reported: Mutex<HashSet<Inode>>,
    stop: CancellationToken,
}

/// One part of a reply.
enum Piece {
    Zeros(usize),
    Here(VerifiedChunk, std::ops::Range<usize>),
    Coming(FetchFuture, std::ops::Range<usize>),
}

/// What of a [`Piece`] is known after waiting.
enum Ready {
    Zeros(usize),
    Bytes(VerifiedChunk, std::ops::Range<usize>),
}

impl ReadFs {
    #[must_use]
    pub fn new(options: ReadFsOptions) -> Self {
        let ReadFsOptions { manifest, set, source, owner, on_problem, stop, runtime } = options;
        let core = Core {
            tree: Tree::new(manifest, owner),
            set,
            source,
            ahead: Mutex::default(),
            on_problem,
            reported: Mutex::default(),
            stop,
        };
        Self { core: Arc::new(core), runtime, granted: InitFlags::empty() }
    }

    fn answer_read(&self, inode: Inode, offset: u64, len: u64, reply: ReplyData) {
        let parts = match self.core.tree.span(inode, offset, len) {
            Ok(parts) => parts,
            Err(error) => return reply.error(adapter::errno(error)),
        };
        let pieces: Vec<_> = parts.into_iter().map(|part| self.core.piece(inode, part)).collect();
        self.core.read_ahead(inode, offset, len);
        if pieces.iter().any(|piece| matches!(piece, Piece::Coming(..))) {
            let core = Arc::clone(&self.core);
            let _runtime = self.runtime.enter();
            task::detach("read", async move { core.answer_later(inode, pieces, reply).await });
            return;
        }
        let ready = pieces.into_iter().filter_map(|piece| match piece {
            Piece::Zeros(len) => Some(Ready::Zeros(len)),
            Piece::Here(chunk, range) => Some(Ready::Bytes(chunk, range)),
            Piece::Coming(..) => None,
        });
        send(reply, &ready.collect::<Vec<_>>());
    }
}

impl Core {
    fn piece(&self, inode: Inode, part: Part) -> Piece {
        match part {
            Part::Zeros { len } => Piece::Zeros(len),
            Part::Data { index, id, from, to } => match self.source.cached(&id) {
                Some(chunk) => Piece::Here(chunk, from..to),
                None => {
                    let address = ChunkAddress::Set { set: self.set, inode, index };
                    Piece::Coming(self.source.fetch(address, id, Priority::Demand), from..to)
                }
            },
        }
    }

    fn read_ahead(&self, inode: Inode, offset: u64, len: u64) {
        let Some(node) = self.tree.manifest().node(inode) else { return };
        let bandwidth_delay = self.source.bandwidth_delay_bytes();
        let read = Read { inode, offset, len, file_bytes: node.size };
        let wanted = lock(&self.ahead).on_read(read, bandwidth_delay);
        for index in wanted {
            if let Some(ChunkRef::Data(id)) = node.chunk(index) {
                let address = ChunkAddress::Set { set: self.set, inode, index };
                self.source.prefetch(address, id, Priority::ReadAhead);
            }
        }
    }

    async fn answer_later(&self, inode: Inode, pieces: Vec<Piece>, reply: ReplyData) {
        let waited = join_all(pieces.into_iter().map(|piece| async move {
            Ok::<_, FetchError>(match piece {
                Piece::Zeros(len) => Ready::Zeros(len),
                Piece::Here(chunk, range) => Ready::Bytes(chunk, range),
                Piece::Coming(chunk, range) => Ready::Bytes(chunk.await?, range),
            })
        }));
        let ready = tokio::select! {
            biased;
            () = self.stop.cancelled() => Err(FetchError::Closed),
            ready = waited => ready.into_iter().collect::<Result<Vec<_>, _>>(),
        };
        match ready {
            Ok(ready) => send(reply, &ready),
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
            Ready::Bytes(chunk, range) => chunk.bytes().get(range.clone()),
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
