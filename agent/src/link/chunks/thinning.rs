//! How much of what is asked for comes over the wire: plain bytes against those that came for
//! them, over the last answers.

/// A few read-ahead windows: the next file may be another kind.
const MEMORY_BYTES: u64 = 16 << 20;
/// What is asked for must not grow without bounds because zeros came.
const MOST: u64 = 4;

#[derive(Debug, Default)]
pub(super) struct Thinning {
    plain_bytes: u64,
    wire_bytes: u64,
}

impl Thinning {
    pub(super) fn add(&mut self, plain: u64, wire: u64) {
        self.plain_bytes += plain;
        self.wire_bytes += wire;
        while self.plain_bytes > MEMORY_BYTES {
            self.plain_bytes /= 2;
            self.wire_bytes /= 2;
        }
    }

    /// What to expect for so much.
    pub(super) fn wire(&self, plain: u64) -> u64 {
        let (of, is) = self.ratio();
        plain.saturating_mul(is) / of
    }

    /// What to ask for so that so much comes.
    pub(super) fn plain(&self, wire: u64) -> u64 {
        let (is, of) = self.ratio();
        wire.saturating_mul(is) / of
    }

    /// Plain to wire, neither 0.
    fn ratio(&self) -> (u64, u64) {
        let plain = self.plain_bytes.max(1);
        (plain, self.wire_bytes.clamp(plain.div_ceil(MOST), plain))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn the_last_answers_count() {
        let mut thinning = Thinning::default();
        assert_eq!((thinning.wire(MIB), thinning.plain(MIB)), (MIB, MIB));
        (0..100).for_each(|_| thinning.add(3 * MIB, 2 * MIB));
        assert!(
            thinning.plain(MIB).abs_diff(MIB * 3 / 2) < 100 && thinning.wire(MIB).abs_diff(MIB * 2 / 3) < 100
        );
        (0..100).for_each(|_| thinning.add(MIB, 0));
        assert_eq!((thinning.wire(MIB), thinning.plain(MIB)), (MIB / 4, 4 * MIB));
        (0..100).for_each(|_| thinning.add(MIB, MIB));
        assert!(thinning.wire(MIB) > MIB - MIB / 20);
    }
}
