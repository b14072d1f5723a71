//! What brings a chunk's raw bytes: the link, or a test's memory.

use std::future::Future;
use std::pin::Pin;

use bytes::Bytes;
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

/// Brings bytes that nobody has verified yet. Waits through cuts of the link for ever; dropping
/// the future cancels the ask.
pub trait ChunkTransport: Send + Sync + 'static {
    fn fetch(&self, ask: Ask) -> TransportFuture;
}
