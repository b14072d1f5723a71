//! Generated source trees: every size at a border, sparse files, hard links, deep and odd names.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use proptest::prelude::*;

const MIB: u64 = 1 << 20;

/// Bytes that differ everywhere and are the same every time.
pub(crate) fn noise(seed: u64, len: u64) -> Vec<u8> {
    let mut out = vec![0; usize::try_from(len).unwrap()];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
    out
}

#[derive(Clone, Debug)]
pub(crate) enum Content {
    Noise(u64),
    /// Lines of text: compresses.
    Text(u64),
    /// So many bytes, of which only those chunks are not zero.
    Sparse {
        size: u64,
        data: BTreeSet<u64>,
    },
    /// Another name of an earlier file.
    Link(prop::sample::Index),
}

#[derive(Clone, Debug)]
pub(crate) struct FileSpec {
    content: Content,
    depth: usize,
    name: u8,
}

fn size() -> impl Strategy<Value = u64> {
    prop_oneof![
        Just(0),
        Just(1),
        (1_u64..4, -1_i64..=1).prop_map(|(pages, off)| (pages * 4096).saturating_add_signed(off)),
        (-1_i64..=1).prop_map(|off| 65536_u64.saturating_add_signed(off)),
        (1_u64..4, -1_i64..=1).prop_map(|(chunks, off)| (chunks * MIB).saturating_add_signed(off)),
        (1_u64..4, -1_i64..=1).prop_map(|(chunks, off)| (chunks * MIB + 16384).saturating_add_signed(off)),
        2..5 * MIB,
    ]
}

fn file() -> impl Strategy<Value = FileSpec> {
    let content = prop_oneof![
        6 => size().prop_map(Content::Noise),
        1 => size().prop_map(Content::Text),
        2 => (1..7 * MIB, prop::collection::btree_set(0_u64..7, 0..3))
            .prop_map(|(size, data)| Content::Sparse { size, data }),
        1 => any::<prop::sample::Index>().prop_map(Content::Link),
    ];
    (content, prop_oneof![3 => Just(0_usize), 2 => Just(1), 1 => 2_usize..30], 0_u8..6)
        .prop_map(|(content, depth, name)| FileSpec { content, depth, name })
}

pub(crate) fn tree() -> impl Strategy<Value = Vec<FileSpec>> {
    prop::collection::vec(file(), 2..10)
}

fn name(kind: u8, number: usize) -> OsString {
    OsString::from_vec(match kind {
        0 => format!("line\nbreak {number}").into_bytes(),
        1 => [b"not \xff\xfe utf-8 ".as_slice(), number.to_string().as_bytes()].concat(),
        2 => format!("{number:n>255}").into_bytes(),
        3 => format!(" \\'\"$*{number} ").into_bytes(),
        _ => format!("file {number}").into_bytes(),
    })
}

/// Writes it and says where each file lies.
pub(crate) fn plant(specs: &[FileSpec], root: &Path) -> Vec<PathBuf> {
    let mut paths: Vec<PathBuf> = Vec::new();
    for (number, spec) in specs.iter().enumerate() {
        let directory: PathBuf = (0..spec.depth).map(|level| format!("d{level}")).collect();
        fs::create_dir_all(root.join(&directory)).unwrap();
        let path = directory.join(name(spec.name, number));
        let place = root.join(&path);
        let seed = number as u64 + 1;
        match &spec.content {
            Content::Link(earlier) if !paths.is_empty() => {
                fs::hard_link(root.join(earlier.get(&paths)), &place).unwrap();
            }
            Content::Link(_) => fs::write(&place, b"x").unwrap(),
            Content::Noise(size) => fs::write(&place, noise(seed, *size)).unwrap(),
            Content::Text(size) => {
                let lines = (0..).flat_map(|line: u64| {
                    format!("step {line}: loss 0.{}\n", line * 7919 % 9973).into_bytes()
                });
                let text: Vec<u8> = lines.take(usize::try_from(*size).unwrap()).collect();
                fs::write(&place, text).unwrap();
            }
            Content::Sparse { size, data } => {
                let made = File::create(&place).unwrap();
                made.set_len(*size).unwrap();
                for &chunk in data.iter().filter(|&&chunk| chunk * MIB < *size) {
                    let len = (size - chunk * MIB).min(MIB);
                    made.write_all_at(&noise(seed + chunk, len), chunk * MIB).unwrap();
                }
            }
        }
        paths.push(path);
    }
    paths
}
