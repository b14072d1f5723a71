//! The edge between messages and the domain: fallible conversions, and the limits that both
//! sides of the link hold each other to.

pub mod assignment;
pub mod encoding;
pub mod order;
pub mod report;

/// Raised when a change is not understood by the previous release.
pub const PROTOCOL: u32 = 1;

/// Largest piece of bulk data in one message: four per chunk keeps demand overtaking possible
/// (64–256 KiB messages were the fastest in tonic on two cores).
pub const PIECE_BYTES: usize = 256 * 1024;

/// Files of one pack, and their bytes in all.
pub const MAX_PACK_FILES: usize = 256;
pub const MAX_PACK_BYTES: usize = 1 << 20;

/// Largest message that either side accepts. A bulk piece and its headers fit; nothing larger is
/// ever sent in one message but an assignment.
pub const MAX_MESSAGE_BYTES: usize = 4 * 1024 * 1024;

/// HTTP/2 windows on bulk connections: 2 × bandwidth × delay at 10 Gbit/s and 25 ms, and the
/// fastest measured at 1 Gbit/s and 80 ms (tonic's defaults give 18 MB/s there, these 105).
pub const BULK_STREAM_WINDOW_BYTES: u32 = 64 * 1024 * 1024;
pub const BULK_CONNECTION_WINDOW_BYTES: u32 = 128 * 1024 * 1024;

/// The same on home's side of every connection. Smaller: windows × agents is what home may have
/// to hold, and 16 MiB still carry 1 Gbit/s over 120 ms.
pub const HOME_STREAM_WINDOW_BYTES: u32 = 16 * 1024 * 1024;
pub const HOME_CONNECTION_WINDOW_BYTES: u32 = 32 * 1024 * 1024;

/// Control connections carry beats and orders, and an assignment once.
pub const CONTROL_STREAM_WINDOW_BYTES: u32 = 1024 * 1024;
pub const CONTROL_CONNECTION_WINDOW_BYTES: u32 = 2 * 1024 * 1024;

/// A beat or its answer on the wire.
pub const MAX_BEAT_BYTES: usize = 64;

/// A message does not say what it must.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {why}")]
pub struct WireError {
    pub field: &'static str,
    pub why: String,
}

impl WireError {
    pub(crate) fn new(field: &'static str, why: impl Into<String>) -> Self {
        Self { field, why: why.into() }
    }

    pub(crate) fn missing(field: &'static str) -> Self {
        Self::new(field, "is missing")
    }
}

/// Milliseconds, saturating: a duration of half a billion years is as good as a longer one.
#[must_use]
pub fn ms(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}
