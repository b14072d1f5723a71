//! Encodings of chunks.

use limb_proto::v1::ChunkEncoding;

use super::WireError;
use crate::codec::Encoding;

impl From<Encoding> for ChunkEncoding {
    fn from(encoding: Encoding) -> Self {
        match encoding {
            Encoding::Raw => Self::Unspecified,
            Encoding::Zstd => Self::Zstd,
            Encoding::Planes2 => Self::Planes2,
            Encoding::Planes4 => Self::Planes4,
        }
    }
}

/// From the number in a piece.
///
/// # Errors
/// There is no such encoding.
pub fn encoding(number: i32) -> Result<Encoding, WireError> {
    match ChunkEncoding::try_from(number) {
        Ok(ChunkEncoding::Unspecified) => Ok(Encoding::Raw),
        Ok(ChunkEncoding::Zstd) => Ok(Encoding::Zstd),
        Ok(ChunkEncoding::Planes2) => Ok(Encoding::Planes2),
        Ok(ChunkEncoding::Planes4) => Ok(Encoding::Planes4),
        Err(_) => Err(WireError::new("FetchPiece.encoding", format!("{number} is not known"))),
    }
}
