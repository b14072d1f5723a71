//! Where verified bytes come from. The mounts ask for a chunk by its address and its name; what
//! answers is this trait, so that file systems know nothing of gRPC.
//!
//! Never: hand out bytes that were not verified against the name they were asked for by.

mod cache;
mod fetcher;
mod parts;
mod spill;
mod transport;

pub use fetcher::{FetchStats, Fetcher, FetcherLimits};
pub use spill::{FileError, KeyError, Spill, SpillError, SpillEvent, SpillSettings, SpillStats};
pub use transport::{
    Ask, ChunkTransport, PackAsk, PackFuture, PartAsk, PartFuture, TransportError, TransportFuture,
};

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;

use limb_common::assignment::{OutputNumber, SetNumber};
use limb_common::chunk::{ChunkId, VerifiedChunk, VerifiedSlice};
use limb_common::manifest::Inode;

/// Where home finds a chunk. Home serves only what this attempt's certificate may see.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ChunkAddress {
    /// Of a frozen set.
    Set { set: SetNumber, inode: Inode, index: u64 },
    /// Of a file that this attempt itself sent home and no longer holds.
    Result { output: OutputNumber, file: u64, index: u64 },
}

/// Lower comes first, here and at home.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Somebody waits for it.
    Demand,
    ReadAhead,
    Trace,
    Background,
}

/// A chunk cannot be had.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum FetchError {
    #[error("the file at home is not the one that was frozen: {detail}")]
    SourceChanged { detail: String },
    #[error("home has no such chunk")]
    NotFound,
    #[error("home could not read it: {detail}")]
    Io { detail: String },
    #[error("home sent other bytes than were asked for, more than once: {detail}")]
    Corrupt { detail: String },
    /// The agent is ending; nobody waits for an answer any more.
    #[error("the fetcher is closed")]
    Closed,
}

pub type SliceFuture = Pin<Box<dyn Future<Output = Result<VerifiedSlice, FetchError>> + Send>>;
pub type FetchFuture = Pin<Box<dyn Future<Output = Result<VerifiedChunk, FetchError>> + Send>>;

/// Gives verified chunks. Waits through a dead link; ends only with an answer or `Closed`.
pub trait ChunkSource: Send + Sync + 'static {
    fn fetch(&self, address: ChunkAddress, id: ChunkId, priority: Priority) -> FetchFuture;

    /// Some bytes of a chunk, for somebody who waits: of the whole chunk if it is here or on its
    /// way, else no more than the groups that hold them.
    fn fetch_slice(&self, address: ChunkAddress, id: ChunkId, range: Range<usize>) -> SliceFuture {
        let whole = self.fetch(address, id, Priority::Demand);
        Box::pin(async move { slice_of(&whole.await?, range) })
    }

    /// Is it better to fetch whole chunks of such a file although only a part is asked for? The
    /// rest will be wanted, there is room for it, and it costs the reader little time.
    fn whole_pays(&self, _file_bytes: u64) -> bool {
        true
    }

    /// The slice if it is in memory already. Never blocks.
    fn cached_slice(&self, id: &ChunkId, range: Range<usize>) -> Option<VerifiedSlice> {
        self.cached(id)?.slice(range)
    }

    /// The chunk if it is in memory already. Never blocks, so a FUSE thread may call it.
    fn cached(&self, id: &ChunkId) -> Option<VerifiedChunk>;

    /// Would [`Self::cached`] give it? That is no use of it.
    fn has(&self, id: &ChunkId) -> bool {
        self.cached(id).is_some()
    }

    /// Somebody will probably ask for it soon. A hint: it may be dropped, and a failure shows
    /// only when somebody really asks.
    fn prefetch(&self, address: ChunkAddress, id: ChunkId, priority: Priority) {
        drop(self.fetch(address, id, priority));
    }

    /// The same for small files of one chunk each, which may travel as one: they will probably be
    /// read one after the other. At most [`limb_common::wire::MAX_PACK_FILES`] and
    /// [`limb_common::wire::MAX_PACK_BYTES`].
    fn prefetch_pack(&self, set: SetNumber, files: &[(Inode, ChunkId)], priority: Priority) {
        for &(inode, id) in files {
            self.prefetch(ChunkAddress::Set { set, inode, index: 0 }, id, priority);
        }
    }

    /// Of what is fetched before anybody asks: how many bytes will still be here when somebody does.
    fn room_ahead_bytes(&self) -> u64 {
        u64::MAX / 256
    }

    /// Bandwidth × delay of the way home in bytes; `None` until enough was measured.
    fn bandwidth_delay_bytes(&self) -> Option<u64> {
        None
    }
}

/// What callers ask for lies within the chunk; this is only for the type.
fn slice_of(chunk: &VerifiedChunk, range: Range<usize>) -> Result<VerifiedSlice, FetchError> {
    chunk.slice(range).ok_or_else(|| FetchError::Io { detail: "outside of the chunk".to_owned() })
}
