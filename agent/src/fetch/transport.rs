//! What brings raw bytes: the link, or a test's memory.

use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;

use bytes::Bytes;
use futures_util::future::join_all;
use limb_common::assignment::SetNumber;
use limb_common::chunk::{ChunkId, group_bytes, group_values, proof};
use limb_common::id::Digest;
use limb_common::manifest::Inode;
use tokio::sync::watch;

use super::{ChunkAddress, Priority};

/// One chunk that is wanted.
#[derive(Clone, Debug)]
pub struct Ask {
    pub address: ChunkAddress,
    pub len: u32,
    /// May rise while the answer is awaited: somebody began to wait for what was read ahead.
    pub priority: watch::Receiver<Priority>,
}

/// Small files, of one chunk each, that travel as one.
#[derive(Clone, Debug)]
pub struct PackAsk {
    pub set: SetNumber,
    /// With their lengths, in the order in which they will be wanted.
    pub files: Arc<[(Inode, u32)]>,
    pub priority: watch::Receiver<Priority>,
}

/// A run of groups of one chunk.
#[derive(Clone, Debug)]
pub struct PartAsk {
    pub set: SetNumber,
    pub inode: Inode,
    pub index: u64,
    /// The chunk that it is part of.
    pub id: ChunkId,
    pub groups: Range<usize>,
    pub priority: watch::Receiver<Priority>,
}

/// The other side answered, but not with the bytes.
#[derive(Clone, Debug, thiserror::Error, PartialEq, Eq)]
pub enum TransportError {
    #[error("the file at home is not the one that was frozen: {detail}")]
    SourceChanged { detail: String },
    #[error("home has no such chunk")]
    NotFound,
    #[error("home could not read it: {detail}")]
    Io { detail: String },
    /// More or other pieces than a chunk has.
    #[error("the answer is garbled: {detail}")]
    Garbled { detail: String },
    #[error("the transport is closed")]
    Closed,
}

pub type TransportFuture = Pin<Box<dyn Future<Output = Result<Bytes, TransportError>> + Send>>;
/// The bytes, and what proves them.
pub type PartFuture = Pin<Box<dyn Future<Output = Result<(Bytes, Vec<Digest>), TransportError>> + Send>>;
pub type PackFuture = Pin<Box<dyn Future<Output = Vec<Result<Bytes, TransportError>>> + Send>>;

/// Brings bytes that nobody has verified yet. Waits through cuts of the link for ever; dropping
/// the future cancels the ask.
pub trait ChunkTransport: Send + Sync + 'static {
    fn fetch(&self, ask: Ask) -> TransportFuture;

    /// One answer for each file, in order. Each by itself where packs are not known.
    fn fetch_pack(&self, ask: PackAsk) -> PackFuture {
        let asks = ask.files.iter().map(|&(inode, len)| {
            let address = ChunkAddress::Set { set: ask.set, inode, index: 0 };
            self.fetch(Ask { address, len, priority: ask.priority.clone() })
        });
        Box::pin(join_all(asks.collect::<Vec<_>>()))
    }

    /// From the whole chunk where parts are not known.
    fn fetch_part(&self, PartAsk { set, inode, index, id, groups, priority }: PartAsk) -> PartFuture {
        let address = ChunkAddress::Set { set, inode, index };
        let whole = self.fetch(Ask { address, len: id.len, priority });
        Box::pin(async move {
            let bytes = whole.await?;
            let range = group_bytes(id.len, &groups);
            if bytes.len() != id.len as usize {
                return Err(TransportError::Garbled { detail: format!("{} bytes came", bytes.len()) });
            }
            Ok((bytes.slice(range), proof(&group_values(id.position, &bytes), &groups)))
        })
    }

    /// Bandwidth × delay of the way home in bytes; `None` until enough was measured.
    fn bandwidth_delay_bytes(&self) -> Option<u64> {
        None
    }
}
