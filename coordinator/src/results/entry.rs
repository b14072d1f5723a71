//! What an agent asks of home, in home's own words, and what home answers.

use bytes::Bytes;
use limb_common::assignment::OutputNumber;
use limb_common::id::Digest;

/// One ordered request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub seq: u64,
    pub output: OutputNumber,
    pub op: Op,
}

/// Whose bytes a new file starts from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Base {
    Nothing,
    /// Another file of this attempt, in its newest published state.
    File(u64),
    /// An inode of the lower set.
    Lower(u64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PublishKind {
    Final,
    Snapshot,
    Grown,
}

/// Paths are raw: they are checked when the entry is planned, so that a bad one is refused by
/// its number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Op {
    Created { file: u64, path: Vec<u8>, mode: u32, base: Base },
    Published(Publication),
    Renamed { from: Vec<u8>, to: Vec<u8>, no_replace: bool, exchange: bool },
    Removed { path: Vec<u8>, directory: bool },
    DirectoryMade { path: Vec<u8>, mode: u32 },
    SymlinkMade { path: Vec<u8>, target: Vec<u8> },
    HardLinkMade { existing: Vec<u8>, path: Vec<u8> },
    AttributesSet { path: Vec<u8>, mode: Option<u32>, mtime_ns: Option<i64> },
    XattrSet { path: Vec<u8>, name: Vec<u8>, value: Option<Vec<u8>> },
    Abandoned { file: u64, keep: bool, path: Vec<u8>, size: u64 },
}

/// The content of a file becomes visible.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Publication {
    pub file: u64,
    pub path: Vec<u8>,
    pub size: u64,
    pub root: Digest,
    pub mode: u32,
    pub mtime_ns: i64,
    pub kind: PublishKind,
}

/// A whole chunk, its pieces joined, not yet checked against its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Chunk {
    pub id: ChunkName,
    pub bytes: Bytes,
    pub value: Digest,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ChunkName {
    pub output: OutputNumber,
    pub file: u64,
    pub index: u64,
    pub generation: u64,
}

/// What came in, in the order in which it came.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Item {
    Chunk(Chunk),
    Entry(Entry),
}

/// What the agent may now believe.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Acks {
    pub durable_seq: u64,
    pub chunks: Vec<ChunkName>,
    pub refused: Vec<Refusal>,
    pub chunks_refused: Vec<(ChunkName, i32)>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub seq: u64,
    pub errno: i32,
    pub detail: String,
}
