//! Words of `W` bytes as `W` planes, and back. A last word may be cut short.

/// Length of plane `at` of so many bytes.
pub(super) const fn len_of(width: usize, plain_len: usize, at: usize) -> usize {
    plain_len.saturating_sub(at).div_ceil(width)
}

pub(super) fn split<const W: usize>(plain: &[u8]) -> [Vec<u8>; W] {
    let (words, tail) = plain.as_chunks::<W>();
    std::array::from_fn(|at| {
        let mut plane = Vec::with_capacity(words.len() + 1);
        plane.extend(words.iter().map(|word| word[at]));
        plane.extend(tail.get(at));
        plane
    })
}

/// Planes of the lengths that [`len_of`] says.
pub(super) fn join<const W: usize>(planes: [&[u8]; W], plain_len: usize) -> Vec<u8> {
    let mut plain = vec![0; plain_len];
    let (words, tail) = plain.as_chunks_mut::<W>();
    let whole = planes.map(|plane| &plane[..words.len().min(plane.len())]);
    let count = whole.iter().map(|plane| plane.len()).min().unwrap_or(0).min(words.len());
    // Of one length that the compiler knows to be one: it makes this a few wide instructions.
    let whole = whole.map(|plane| &plane[..count]);
    for (at, word) in words[..count].iter_mut().enumerate() {
        *word = std::array::from_fn(|k| whole[k][at]);
    }
    for (byte, plane) in tail.iter_mut().zip(planes) {
        *byte = plane.last().copied().unwrap_or(0);
    }
    plain
}
