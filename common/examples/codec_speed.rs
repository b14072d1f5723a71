//! `cargo run --release -p limb-common --example codec_speed -- FILE…`: what the codec makes of each
//! file, chunk by chunk on one core. The figures of docs/performance.md.
#![allow(clippy::print_stdout, clippy::unwrap_used, reason = "a tool for people")]

use std::time::Duration;

use bytes::Bytes;
use limb_common::chunk::CHUNK_BYTES;
use limb_common::clock;
use limb_common::codec::{Encoding, decode, encode};

fn main() {
    for path in std::env::args().skip(1) {
        let file = Bytes::from(std::fs::read(&path).unwrap());
        let mut wire = 0;
        let (mut encoding_took, mut decoding_took) = (Duration::ZERO, Duration::ZERO);
        let mut kinds = [0; 4];
        for start in (0..file.len()).step_by(CHUNK_BYTES) {
            let plain = file.slice(start..file.len().min(start + CHUNK_BYTES));
            let began = clock::boottime();
            let (encoding, body) = encode(&plain);
            let encoded = clock::boottime();
            wire += body.len();
            kinds[encoding as usize] += 1;
            if encoding != Encoding::Raw {
                assert!(decode(encoding, body, plain.len()).unwrap() == plain);
                decoding_took += clock::boottime().saturating_since(encoded);
            }
            encoding_took += encoded.saturating_since(began);
        }
        let rate = |took: Duration| file.len() as f64 / 1e6 / took.as_secs_f64().max(1e-9);
        println!(
            "{path}: {} MiB, ratio {:.3}, encode {:.0} MB/s, decode {:.0} MB/s, raw/zstd/planes2/planes4 {kinds:?}",
            file.len() >> 20,
            wire as f64 / file.len() as f64,
            rate(encoding_took),
            rate(decoding_took),
        );
    }
}
