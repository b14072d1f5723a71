use proptest::prelude::*;

use super::*;

const CHUNK: usize = 1 << 20;

fn noise(len: usize, seed: u64) -> Vec<u8> {
    let mut out = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
    out
}

/// Normal numbers (Box–Muller) of the size that weights have.
fn normal(count: usize) -> Vec<f32> {
    let unit = |bytes: &[u8; 4]| (f64::from(u32::from_le_bytes(*bytes)) + 0.5) / 4_294_967_296.0;
    let noise = noise(count * 8, 11);
    let (words, _) = noise.as_chunks::<4>();
    let (pairs, _) = words.as_chunks::<2>();
    let number = |[first, second]: &[[u8; 4]; 2]| {
        let radius = (-2.0 * unit(first).ln()).sqrt();
        #[expect(clippy::cast_possible_truncation, reason = "fp32 is what is wanted")]
        let weight = (0.05 * radius * (std::f64::consts::TAU * unit(second)).cos()) as f32;
        weight
    };
    pairs.iter().map(number).collect()
}

fn fp32() -> Bytes {
    normal(CHUNK / 4).iter().flat_map(|x| x.to_le_bytes()).collect()
}

fn bf16() -> Bytes {
    let rounded = |x: &f32| u16::try_from((x.to_bits() + 0x8000) >> 16).unwrap();
    normal(CHUNK / 2).iter().map(rounded).flat_map(u16::to_le_bytes).collect()
}

fn text() -> Bytes {
    let line = |n: u32| {
        let word = ["loss", "grad", "step", "epoch", "token", "lr"]
            [(n.wrapping_mul(2_654_435_761) >> 29) as usize % 6];
        format!("{{\"{word}\": {}, \"at\": {n}}}\n", n.wrapping_mul(40_503) % 9973)
    };
    let mut text: Vec<u8> = (0..60_000).flat_map(|n| line(n).into_bytes()).collect();
    text.truncate(CHUNK);
    text.into()
}

fn goes_round(plain: &Bytes) -> (Encoding, f64) {
    let (encoding, body) = encode(plain);
    assert_eq!(decode(encoding, body.clone(), plain.len()).unwrap(), plain);
    assert_eq!(encode(plain), (encoding, body.clone()), "the same bytes come out the same");
    (encoding, body.len() as f64 / plain.len() as f64)
}

#[test]
fn weights_and_text_shrink_and_noise_stays() {
    let (encoding, ratio) = goes_round(&bf16());
    assert!(encoding == Encoding::Planes2 && ratio < 0.70, "{encoding:?} {ratio}");
    let (encoding, ratio) = goes_round(&fp32());
    assert!(encoding == Encoding::Planes4 && ratio < 0.86, "{encoding:?} {ratio}");
    let (encoding, ratio) = goes_round(&text());
    assert!(encoding == Encoding::Zstd && ratio < 0.4, "{encoding:?} {ratio}");
    let noise = Bytes::from(noise(CHUNK, 1));
    let (encoding, body) = encode(&noise);
    assert_eq!((encoding, body.as_ptr()), (Encoding::Raw, noise.as_ptr()), "not even copied");
}

/// A header of any length stands before the numbers of a file.
#[test]
fn where_a_tensor_begins_does_not_matter() {
    let (plain, whole) = (bf16(), goes_round(&bf16()).1);
    for start in 1..8 {
        let (encoding, ratio) = goes_round(&plain.slice(start..));
        assert!(encoding == Encoding::Planes2 && (ratio - whole).abs() < 0.01, "{start}: {ratio}");
    }
    let mut header = text().slice(..100_001).to_vec();
    header.extend_from_slice(&plain[..CHUNK - 100_001]);
    let (_, ratio) = goes_round(&header.into());
    assert!(ratio < 0.77, "{ratio}");
}

#[test]
fn a_frame_that_promises_or_holds_more_is_refused() {
    let bomb = zstd::bulk::compress(&vec![0; 64 << 20], 1).unwrap();
    assert!(bomb.len() < CHUNK / 64);
    assert_eq!(decode(Encoding::Zstd, bomb.clone().into(), CHUNK), Err(DecodeError::Zstd(CHUNK)));
    let mut planes = Vec::new();
    for len in [bomb.len(), 0] {
        planes.extend_from_slice(&u32::try_from(len).unwrap().to_le_bytes());
    }
    planes.extend_from_slice(&bomb);
    assert_eq!(decode(Encoding::Planes2, planes.into(), CHUNK), Err(DecodeError::Zstd(CHUNK / 2)));
    // A plane of no bytes is none.
    assert_eq!(decode(Encoding::Planes2, vec![0; 8].into(), 0), Ok(Bytes::new()));
    let short = decode(Encoding::Planes2, vec![0; 8].into(), 10);
    assert_eq!(short, Err(DecodeError::Length { found: 0, expected: 5 }));
}

const ENCODINGS: [Encoding; 4] = [Encoding::Raw, Encoding::Zstd, Encoding::Planes2, Encoding::Planes4];

fn encoding() -> impl Strategy<Value = Encoding> {
    proptest::sample::select(&ENCODINGS[..])
}

/// Words that repeat, with some noise.
fn plain() -> impl Strategy<Value = Vec<u8>> {
    let byte = prop_oneof![4 => 60..68_u8, 1 => any::<u8>()];
    prop_oneof![proptest::collection::vec(byte, 0..4000), proptest::collection::vec(any::<u8>(), 0..4000)]
}

proptest! {
    #[test]
    fn every_encoding_goes_round(plain in plain(), encoding in encoding()) {
        let body = encode_as(encoding, &plain, CHUNK).unwrap_or_else(|| plain.clone());
        let decoded = decode(encoding, body.into(), plain.len());
        prop_assert_eq!(decoded, Ok(plain.clone().into()));
        let (encoding, body) = encode(&plain.clone().into());
        prop_assert!(body.len() <= plain.len());
        prop_assert_eq!(decode(encoding, body, plain.len()), Ok(plain.into()));
    }

    #[test]
    fn whatever_comes_is_the_promised_length_or_an_error(
        plain in plain(),
        encoding in encoding(),
        cut in any::<prop::sample::Index>(),
        flips in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        promised in prop_oneof![Just(None), (0..5000_usize).prop_map(Some)],
        truncated: bool,
    ) {
        let mut body = encode_as(encoding, &plain, CHUNK).unwrap_or_else(|| plain.clone());
        for (at, bits) in flips {
            if !body.is_empty() {
                let at = at.index(body.len());
                body[at] ^= bits;
            }
        }
        if truncated {
            body.truncate(cut.index(body.len() + 1));
        }
        let len = promised.unwrap_or(plain.len());
        if let Ok(decoded) = decode(encoding, body.into(), len) {
            prop_assert_eq!(decoded.len(), len);
        }
    }

    #[test]
    fn garbage_is_the_promised_length_or_an_error(
        body in proptest::collection::vec(any::<u8>(), 0..600),
        encoding in encoding(),
        len in 0..5000_usize,
    ) {
        if let Ok(decoded) = decode(encoding, body.into(), len) {
            prop_assert_eq!(decoded.len(), len);
        }
    }
}
