//! What a chunk would come to, seen in a 32nd of it, so that one that does not compress costs next
//! to nothing.

use super::{Encoding, LEVEL};

/// Slices from all over the chunk: a file may change within it.
const SLICES: usize = 4;
const SLICE_BYTES: usize = 8 << 10;
/// Slices begin at a multiple of every width.
const ALIGN: usize = 8;
/// More planes for less than a hundredth are not worth it.
const MORE_PLANES: f64 = 0.99;
/// Of 8 bits a byte: above, an entropy coder saves too little.
const PLANE_SHRINKS: f64 = 7.6 / 8.0;

type Histogram = [u32; 256];

/// The encoding that promises to be shortest; raw, if none promises to be shorter than `most`.
pub(super) fn choose(plain: &[u8], most: usize) -> Encoding {
    let sample = sample(plain);
    let planes = histograms(&sample);
    let of_4 = planes.iter().map(entropy_bytes).sum::<f64>();
    let of_2 = (0..2).map(|at| entropy_bytes(&sum(&planes[at], &planes[at + 2]))).sum::<f64>();
    let zstd = zstd::bulk::compress(&sample, LEVEL).map_or(f64::INFINITY, |packed| packed.len() as f64);
    let limit = sample.len() as f64 * most as f64 / plain.len().max(1) as f64;
    let (planes, of_planes) =
        if of_4 < of_2 * MORE_PLANES { (Encoding::Planes4, of_4) } else { (Encoding::Planes2, of_2) };
    let (best, least) = if of_planes < zstd { (planes, of_planes) } else { (Encoding::Zstd, zstd) };
    if least <= limit { best } else { Encoding::Raw }
}

/// Would an entropy coder make this plane shorter?
pub(super) fn plane_shrinks(plane: &[u8]) -> bool {
    let sample = sample(plane);
    let planes = histograms(&sample);
    let all = planes.iter().skip(1).fold(planes[0], |all, one| sum(&all, one));
    entropy_bytes(&all) <= sample.len() as f64 * PLANE_SHRINKS
}

fn sample(plain: &[u8]) -> Vec<u8> {
    if plain.len() <= SLICES * SLICE_BYTES {
        return plain.to_vec();
    }
    let mut sample = Vec::with_capacity(SLICES * SLICE_BYTES);
    for at in 0..SLICES {
        // The middle of each quarter.
        let middle = plain.len() / (2 * SLICES) * (2 * at + 1);
        let start = (middle - SLICE_BYTES / 2) / ALIGN * ALIGN;
        sample.extend_from_slice(&plain[start..start + SLICE_BYTES]);
    }
    sample
}

/// Of each byte of a 4-byte word.
fn histograms(sample: &[u8]) -> [Histogram; 4] {
    let mut counts = [[0; 256]; 4];
    let (words, tail) = sample.as_chunks::<4>();
    for word in words {
        for (counts, byte) in counts.iter_mut().zip(word) {
            counts[usize::from(*byte)] += 1;
        }
    }
    for (counts, byte) in counts.iter_mut().zip(tail) {
        counts[usize::from(*byte)] += 1;
    }
    counts
}

fn sum(one: &Histogram, other: &Histogram) -> Histogram {
    std::array::from_fn(|byte| one[byte] + other[byte])
}

/// What bytes of this distribution come to, each said as briefly as how often it is allows.
fn entropy_bytes(counts: &Histogram) -> f64 {
    let all = f64::from(counts.iter().sum::<u32>());
    let bits = counts.iter().filter(|&&count| count > 0).map(|&count| {
        let count = f64::from(count);
        count * (all / count).log2()
    });
    bits.sum::<f64>() / 8.0
}
