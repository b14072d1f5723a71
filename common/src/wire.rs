//! The edge between messages and the domain: fallible conversions, and the limits that both
//! sides of the link hold each other to.

/// Raised when a change is not understood by the previous release.
pub const PROTOCOL: u32 = 1;

/// Largest piece of bulk data in one message: four per chunk keeps demand overtaking possible
/// (64–256 KiB messages were the fastest in tonic on two cores).
pub const PIECE_BYTES: usize = 256 * 1024;

/// Largest message that either side accepts. A bulk piece and its headers fit; nothing larger is
/// ever sent in one message but an assignment.
pub const MAX_MESSAGE_BYTES: usize = 4 * 1024 * 1024;

/// HTTP/2 windows on bulk connections: 2 × bandwidth × delay at 10 Gbit/s and 25 ms, and the
/// fastest measured at 1 Gbit/s and 80 ms (tonic's defaults give 18 MB/s there, these 105).
pub const BULK_STREAM_WINDOW_BYTES: u32 = 64 * 1024 * 1024;
pub const BULK_CONNECTION_WINDOW_BYTES: u32 = 128 * 1024 * 1024;
