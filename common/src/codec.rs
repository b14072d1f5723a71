//! Chunks on the wire in fewer bytes: how home says the same in less, and how the agent reads it.
//!
//! ```text
//! plain → sample → what would it save? → nothing much: as it is
//!                                      → repeats: zstd
//!                                      → numbers: byte planes, each with zstd or as it is
//! ```
//!
//! The byte planes of words of W bytes are W strings: all first bytes, all second bytes and so on.
//! In weights the plane of sign and exponent has a third of its bits to say, those of the mantissa
//! all of them. Which width pays is seen in the sample, so no file format is looked at; where a
//! tensor begins only decides which plane is which.
//!
//! Never: lossy; what a decoder was not promised. [`decode`] is total: whatever the bytes are, it
//! gives `plain_len` bytes or an error, in memory of a small multiple of that. Whether they are the
//! right ones, their hash says.

mod planes;
mod sample;

use bytes::Bytes;
use zstd::bulk::Compressor;

use planes::{join, split};

/// What a body is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Encoding {
    #[default]
    Raw,
    /// One zstd frame.
    Zstd,
    /// Planes of 2-byte words: bf16, fp16, 16-bit integers.
    Planes2,
    /// Planes of 4-byte words: fp32, 32-bit integers.
    Planes4,
}

/// Bytes that are not what their encoding says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("not {0} bytes in zstd")]
    Zstd(usize),
    #[error("the planes have other lengths than they must")]
    Planes,
    #[error("{found} bytes where {expected} were expected")]
    Length { found: usize, expected: usize },
}

/// Fewer are not worth a look: a frame of their own costs more.
const LEAST_BYTES: usize = 512;
/// What does not save a twelfth is not worth the decoding.
const SAVES_AT_LEAST: usize = 12;
/// The fastest level that still finds what repeats: 400 MB/s and more on one core.
const LEVEL: i32 = 1;
/// Planes are near-random but for their distribution: a match is chance unless it is near or long,
/// and costs more time and bits than the entropy coder needs for the same bytes. So zstd looks for
/// few: the longest, with the smallest table that it has.
const PLANE_MIN_MATCH: u32 = 7;
const PLANE_HASH_LOG: u32 = 6;
/// Before the planes: the length of each as little-endian `u32`.
const PLANE_HEADER_BYTES: usize = 4;

/// The least that these bytes can be said in without much work; [`Encoding::Raw`] shares them.
/// The same bytes always come out the same.
#[must_use]
pub fn encode(plain: &Bytes) -> (Encoding, Bytes) {
    let most = plain.len() - plain.len() / SAVES_AT_LEAST;
    let encoding = if plain.len() < LEAST_BYTES { Encoding::Raw } else { sample::choose(plain, most) };
    encode_as(encoding, plain, most).map_or((Encoding::Raw, plain.clone()), |body| (encoding, body.into()))
}

/// `None`: raw, or longer than `most`.
fn encode_as(encoding: Encoding, plain: &[u8], most: usize) -> Option<Vec<u8>> {
    match encoding {
        Encoding::Raw => None,
        Encoding::Zstd => pack(&mut Compressor::new(LEVEL).ok()?, plain, most),
        Encoding::Planes2 => encode_planes::<2>(plain, most),
        Encoding::Planes4 => encode_planes::<4>(plain, most),
    }
}

fn encode_planes<const W: usize>(plain: &[u8], most: usize) -> Option<Vec<u8>> {
    use zstd::zstd_safe::CParameter;
    let mut zstd = Compressor::new(LEVEL).ok()?;
    zstd.set_parameter(CParameter::MinMatch(PLANE_MIN_MATCH)).ok()?;
    zstd.set_parameter(CParameter::HashLog(PLANE_HASH_LOG)).ok()?;
    let mut body = vec![0; W * PLANE_HEADER_BYTES];
    let planes = split::<W>(plain);
    for (plane, at) in planes.iter().zip(0..) {
        let shrinks = sample::plane_shrinks(plane);
        let most = plane.len() - plane.len() / SAVES_AT_LEAST;
        let packed = if shrinks { pack(&mut zstd, plane, most) } else { None };
        let packed = packed.as_deref().unwrap_or(plane);
        let len = u32::try_from(packed.len()).ok()?;
        let header = at * PLANE_HEADER_BYTES;
        body.get_mut(header..header + PLANE_HEADER_BYTES)?.copy_from_slice(&len.to_le_bytes());
        body.extend_from_slice(packed);
    }
    (body.len() <= most).then_some(body)
}

/// `None`: it would be longer than `most`.
fn pack(zstd: &mut Compressor<'_>, plain: &[u8], most: usize) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(most);
    zstd.compress_to_buffer(plain, &mut out).ok()?;
    (out.len() <= most).then_some(out)
}

/// The `plain_len` bytes that [`encode`] was given.
///
/// # Errors
/// [`DecodeError`]: the body is not that many bytes in this encoding.
pub fn decode(encoding: Encoding, body: Bytes, plain_len: usize) -> Result<Bytes, DecodeError> {
    match encoding {
        Encoding::Raw if body.len() == plain_len => Ok(body),
        Encoding::Raw => Err(DecodeError::Length { found: body.len(), expected: plain_len }),
        Encoding::Zstd => unpack(&body, plain_len).map(Bytes::from),
        Encoding::Planes2 => decode_planes::<2>(&body, plain_len).map(Bytes::from),
        Encoding::Planes4 => decode_planes::<4>(&body, plain_len).map(Bytes::from),
    }
}

fn decode_planes<const W: usize>(body: &[u8], plain_len: usize) -> Result<Vec<u8>, DecodeError> {
    let (header, mut rest) = body.split_at_checked(W * PLANE_HEADER_BYTES).ok_or(DecodeError::Planes)?;
    let (lens, _) = header.as_chunks::<PLANE_HEADER_BYTES>();
    let mut planes: [std::borrow::Cow<'_, [u8]>; W] = [const { std::borrow::Cow::Borrowed(&[]) }; W];
    for ((plane, len), at) in planes.iter_mut().zip(lens).zip(0..) {
        let packed_len = usize::try_from(u32::from_le_bytes(*len)).map_err(|_| DecodeError::Planes)?;
        let (packed, others) = rest.split_at_checked(packed_len).ok_or(DecodeError::Planes)?;
        rest = others;
        let len = planes::len_of(W, plain_len, at);
        *plane = match packed_len.cmp(&len) {
            std::cmp::Ordering::Equal => packed.into(),
            std::cmp::Ordering::Less => unpack(packed, len)?.into(),
            std::cmp::Ordering::Greater => return Err(DecodeError::Planes),
        };
    }
    if !rest.is_empty() {
        return Err(DecodeError::Planes);
    }
    Ok(join(planes.each_ref().map(AsRef::as_ref), plain_len))
}

/// The decoder writes into `len` bytes and no further, whatever the frame says of itself.
fn unpack(packed: &[u8], len: usize) -> Result<Vec<u8>, DecodeError> {
    let mut out = vec![0; len];
    let mut zstd = zstd::bulk::Decompressor::new().map_err(|_| DecodeError::Zstd(len))?;
    let found = zstd.decompress_to_buffer(packed, out.as_mut_slice()).map_err(|_| DecodeError::Zstd(len))?;
    if found == len { Ok(out) } else { Err(DecodeError::Length { found, expected: len }) }
}

#[cfg(test)]
mod tests;
