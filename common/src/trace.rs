//! Access traces: which chunks of a set a job touched first, in order. A frame is what travels and
//! what home keeps: three columns of 32-bit numbers under zstd.
//!
//! A trace is a hint and comes from the other side: [`decode`] is bounded in memory and time, and
//! [`of_set`] drops what a manifest does not have. Never: trust a number in it otherwise.

use std::io::{self, Read as _, Write as _};
use std::time::Duration;

use zstd::stream::{read, write};

use crate::manifest::{ChunkRef, Inode, Manifest, Node};

/// First touches that are kept: 1 TiB of large files, or a million small ones; 12 MiB of memory.
pub const MAX_TOUCHES: usize = 1 << 20;
/// A frame on the wire and on home's disk. A million touches in random order are 5 MiB.
pub const MAX_FRAME_BYTES: usize = 8 << 20;

const MAGIC: &[u8; 8] = b"LIMBTRC\x01";
const COLUMNS: usize = 3;
/// zstd's default: the columns are short of patterns, and nobody waits.
const LEVEL: i32 = 3;
/// Memory for decoding: what [`LEVEL`] needs, and no more because a frame asks for it.
const WINDOW_LOG: u32 = 23;
/// Numbers encoded at once.
const STEP: usize = 4096;
const HIT: u32 = 1 << 31;

/// A frame cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    #[error("the trace is no frame")]
    Frame(#[source] io::Error),
    #[error("the trace is malformed: {0}")]
    Malformed(&'static str),
}

/// The first touch of one chunk: 12 bytes, since there may be millions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Touch {
    inode: u32,
    index: u32,
    /// On the box: milliseconds, and whether it was there. At home: runs since it was touched last.
    pub note: u32,
}

impl Touch {
    /// `None`: a number that no trace can hold (a file of more than 4 PiB, four billion files).
    #[must_use]
    pub fn new(inode: Inode, index: u64, note: u32) -> Option<Self> {
        Some(Self { inode: u32::try_from(inode.0).ok()?, index: u32::try_from(index).ok()?, note })
    }

    /// When it was, since the mounts were made, and whether the bytes were on the box by then.
    #[must_use]
    pub fn note_of(after: Duration, hit: bool) -> u32 {
        let millis = u32::try_from(after.as_millis()).unwrap_or(u32::MAX).min(HIT - 1);
        if hit { millis | HIT } else { millis }
    }

    #[must_use]
    pub fn with_note(self, note: u32) -> Self {
        Self { note, ..self }
    }

    #[must_use]
    pub fn inode(&self) -> Inode {
        Inode(u64::from(self.inode))
    }

    #[must_use]
    pub fn index(&self) -> u64 {
        u64::from(self.index)
    }

    /// The file, and the number of the chunk in the manifest, if it is one with bytes.
    #[must_use]
    pub fn find<'m>(&self, manifest: &'m Manifest) -> Option<(Node<'m>, u64)> {
        let node = manifest.node(self.inode())?;
        match node.chunk(self.index())? {
            ChunkRef::Data(_) => Some((node, node.chunk_number(self.index())?)),
            ChunkRef::Hole { .. } => None,
        }
    }
}

/// One bit for each chunk of a manifest.
#[derive(Clone, Debug)]
pub struct ChunkSet(Vec<u64>);

impl ChunkSet {
    #[must_use]
    pub fn of(manifest: &Manifest) -> Self {
        Self(vec![0; usize::try_from(manifest.chunk_total().div_ceil(64)).unwrap_or(0)])
    }

    /// Whether it was not in there yet.
    pub fn insert(&mut self, number: u64) -> bool {
        let Some((word, bit)) = place(number) else { return false };
        self.0.get_mut(word).is_some_and(|word| {
            let new = *word & bit == 0;
            *word |= bit;
            new
        })
    }

    #[must_use]
    pub fn contains(&self, number: u64) -> bool {
        place(number).and_then(|(word, bit)| Some(self.0.get(word)? & bit != 0)).unwrap_or(false)
    }
}

fn place(number: u64) -> Option<(usize, u64)> {
    Some((usize::try_from(number / 64).ok()?, 1 << (number % 64)))
}

/// Those that the set has, each once, in order.
#[must_use]
pub fn of_set(manifest: &Manifest, mut touches: Vec<Touch>) -> Vec<Touch> {
    let mut seen = ChunkSet::of(manifest);
    touches.retain(|touch| touch.find(manifest).is_some_and(|(_, number)| seen.insert(number)));
    touches
}

/// # Errors
/// zstd's.
pub fn encode(touches: &[Touch]) -> io::Result<Vec<u8>> {
    let touches = touches.get(..MAX_TOUCHES).unwrap_or(touches);
    let mut encoder = write::Encoder::new(Vec::new(), LEVEL)?;
    encoder.write_all(MAGIC)?;
    encoder.write_all(&u32::try_from(touches.len()).unwrap_or(u32::MAX).to_le_bytes())?;
    let mut step = Vec::with_capacity(4 * STEP);
    let columns: [fn(&Touch) -> u32; COLUMNS] =
        [|touch| touch.inode, |touch| touch.index, |touch| touch.note];
    for column in columns {
        for some in touches.chunks(STEP) {
            step.clear();
            step.extend(some.iter().flat_map(|touch| column(touch).to_le_bytes()));
            encoder.write_all(&step)?;
        }
    }
    encoder.finish()
}

/// # Errors
/// [`TraceError`] for anything but what [`encode`] makes.
pub fn decode(frame: &[u8]) -> Result<Vec<Touch>, TraceError> {
    let malformed = |what| TraceError::Malformed(what);
    if frame.len() > MAX_FRAME_BYTES {
        return Err(malformed("too long"));
    }
    let mut decoder = read::Decoder::with_buffer(frame).map_err(TraceError::Frame)?;
    decoder.window_log_max(WINDOW_LOG).map_err(TraceError::Frame)?;
    let mut head = [0; 12];
    decoder.read_exact(&mut head).map_err(TraceError::Frame)?;
    let (magic, count) = head.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(malformed("not a trace of this version"));
    }
    let count = u32::from_le_bytes(count.try_into().unwrap_or_default()) as usize;
    if count > MAX_TOUCHES {
        return Err(malformed("too many touches"));
    }
    // Grows with what really comes: a short frame cannot ask for much.
    let mut touches: Vec<Touch> = Vec::new();
    let mut number = [0; 4];
    let mut next = || -> Result<u32, TraceError> {
        decoder.read_exact(&mut number).map_err(TraceError::Frame)?;
        Ok(u32::from_le_bytes(number))
    };
    for _ in 0..count {
        touches.push(Touch { inode: next()?, index: 0, note: 0 });
    }
    for touch in &mut touches {
        touch.index = next()?;
    }
    for touch in &mut touches {
        touch.note = next()?;
    }
    match decoder.read(&mut number) {
        Ok(0) => Ok(touches),
        Ok(_) => Err(malformed("more than it says")),
        Err(error) => Err(TraceError::Frame(error)),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::chunk::{Position, value_of};
    use crate::manifest::{ManifestBuilder, NewNode, NodeMeta};

    /// `/a` of two chunks and a hole between them, `/d/b` of one.
    fn set() -> Manifest {
        let mut builder = ManifestBuilder::new(NodeMeta::default());
        let value = |size, index, byte: u8| Some(value_of(Position::of(size, index), &[byte]));
        let (large, small) = ((2 << 20) + 1, 5);
        let root = builder.root();
        let chunks = vec![value(large, 0, 1), None, value(large, 2, 2)];
        builder.add(root, b"a", NewNode::File { size: large, chunks }, NodeMeta::default()).unwrap();
        let d = builder.add(root, b"d", NewNode::Directory, NodeMeta::default()).unwrap();
        let chunks = vec![value(small, 0, 3)];
        builder.add(d, b"b", NewNode::File { size: small, chunks }, NodeMeta::default()).unwrap();
        builder.build().0
    }

    fn touch(inode: u64, index: u64) -> Touch {
        Touch::new(Inode(inode), index, 0).unwrap()
    }

    #[test]
    fn what_a_set_does_not_have_is_dropped_and_the_rest_is_there_once() {
        let manifest = set();
        let [a, b] = [b"a".as_slice(), b"d/b"].map(|path| manifest.resolve(path).unwrap().0);
        let hostile = [
            touch(b, 0),
            touch(0, 0),
            touch(u64::from(u32::MAX), 0),
            touch(a, 2),
            touch(a, 1),
            touch(a, 3),
            touch(a, u64::from(u32::MAX)),
            touch(1, 0),
            touch(b, 0),
            touch(b, 1),
            touch(a, 0),
        ];
        assert_eq!(of_set(&manifest, hostile.to_vec()), [touch(b, 0), touch(a, 2), touch(a, 0)]);
        assert_eq!(manifest.chunk_total(), 4);
        assert!(!ChunkSet::of(&manifest).insert(u64::MAX));
    }

    #[test]
    fn hostile_frames_are_errors_and_cost_no_memory() {
        let frame = |raw: &[u8]| zstd::encode_all(raw, 3).unwrap();
        let head = |count: u32| [MAGIC.as_slice(), &count.to_le_bytes()].concat();
        let good = encode(&[touch(1, 2), touch(3, 4)]).unwrap();
        let mut with_tail = zstd::decode_all(good.as_slice()).unwrap();
        with_tail.push(0);
        let bomb = [head(u32::MAX), vec![0; 64 << 20]].concat();
        for bad in [
            Vec::new(),
            b"not zstd at all".to_vec(),
            good[..good.len() - 1].to_vec(),
            vec![0; MAX_FRAME_BYTES + 1],
            frame(b"LIMBTRC\x02\0\0\0\0"),
            frame(&head(2)),
            frame(&head(u32::MAX)),
            frame(&bomb),
            frame(&with_tail),
        ] {
            assert!(decode(&bad).is_err());
        }
        // Says that it needs a window of 2 GiB.
        let mut wide = write::Encoder::new(Vec::new(), 3).unwrap();
        wide.window_log(31).unwrap();
        wide.write_all(&zstd::decode_all(good.as_slice()).unwrap()).unwrap();
        assert!(decode(&wide.finish().unwrap()).is_err());
    }

    #[test]
    fn a_million_touches_in_no_order_fit_a_frame() {
        let touches: Vec<_> = (0..u32::try_from(MAX_TOUCHES).unwrap())
            .map(|at| (Inode(u64::from(at) * 2_654_435_761 % MAX_TOUCHES as u64), at))
            .map(|(inode, at)| Touch::new(inode, 0, at).unwrap())
            .collect();
        let frame = encode(&touches).unwrap();
        assert!(frame.len() <= MAX_FRAME_BYTES, "{}", frame.len());
        assert_eq!(decode(&frame).unwrap().len(), MAX_TOUCHES);
    }

    #[test]
    fn notes_hold_a_month() {
        assert_eq!(Touch::note_of(Duration::from_millis(7), false), 7);
        assert_eq!(Touch::note_of(Duration::from_secs(1 << 40), true), u32::MAX);
    }

    proptest! {
        #[test]
        fn a_trace_comes_back(all in proptest::collection::vec((any::<u32>(), any::<u32>(), any::<u32>()), 0..10_000)) {
            let touches: Vec<_> =
                all.into_iter().map(|(inode, index, note)| Touch { inode, index, note }).collect();
            prop_assert_eq!(decode(&encode(&touches).unwrap()).unwrap(), touches);
        }

        #[test]
        fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            drop(decode(&bytes));
            let mut spoilt = encode(&[touch(1, 2), touch(3, 4)]).unwrap();
            for (at, byte) in spoilt.iter_mut().zip(&bytes) {
                *at ^= byte & 1;
            }
            drop(decode(&spoilt));
        }
    }
}
