//! A home in memory: a set's bytes behind [`ChunkTransport`], with faults to order.
#![allow(dead_code, reason = "each test program uses a part of it")]

use std::collections::HashMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use limb_agent::fetch::{
    Ask, ChunkAddress, ChunkTransport, PartAsk, PartFuture, Priority, TransportError, TransportFuture,
};
use limb_common::chunk::{CHUNK_BYTES, Position, group_bytes, group_values, proof, value_of};
use limb_common::manifest::{Draft, Inode, Manifest, ManifestBuilder, NewNode, NodeMeta, NodeOrder};
use tokio::sync::watch;

/// Bytes that differ everywhere and are the same every time.
pub(crate) fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut out = vec![0; len];
    blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof().fill(&mut out);
    out
}

pub(crate) fn meta(mode: u32) -> NodeMeta {
    NodeMeta { mode, mtime_ns: 1_234_567_890_123_456_789, ..NodeMeta::default() }
}

/// Builds a manifest and keeps the bytes.
pub(crate) struct SetBuilder {
    pub(crate) manifest: ManifestBuilder,
    /// With the number of the chunk at which the bytes begin.
    contents: Vec<(Draft, u64, Vec<u8>)>,
}

impl SetBuilder {
    pub(crate) fn new() -> Self {
        Self { manifest: ManifestBuilder::new(meta(0o755)), contents: Vec::new() }
    }

    pub(crate) fn root(&self) -> Draft {
        self.manifest.root()
    }

    /// Chunks that are all zeros become holes.
    pub(crate) fn file(&mut self, parent: Draft, name: &[u8], bytes: Vec<u8>) -> Draft {
        self.file_with(parent, name, bytes, meta(0o644))
    }

    pub(crate) fn file_with(&mut self, parent: Draft, name: &[u8], bytes: Vec<u8>, meta: NodeMeta) -> Draft {
        self.file_after_hole(parent, name, 0, bytes, meta)
    }

    /// A hole of so many chunks, then these bytes.
    pub(crate) fn file_after_hole(
        &mut self,
        parent: Draft,
        name: &[u8],
        hole_chunks: u64,
        bytes: Vec<u8>,
        meta: NodeMeta,
    ) -> Draft {
        let size = hole_chunks * CHUNK_BYTES as u64 + bytes.len() as u64;
        let data = bytes.chunks(CHUNK_BYTES).zip(hole_chunks..).map(|(chunk, index)| {
            chunk.iter().any(|&byte| byte != 0).then(|| value_of(Position::of(size, index), chunk))
        });
        let chunks = (0..hole_chunks).map(|_| None).chain(data).collect();
        let draft = self.manifest.add(parent, name, NewNode::File { size, chunks }, meta).unwrap();
        self.contents.push((draft, hole_chunks, bytes));
        draft
    }

    pub(crate) fn directory(&mut self, parent: Draft, name: &[u8]) -> Draft {
        self.manifest.add(parent, name, NewNode::Directory, meta(0o755)).unwrap()
    }

    pub(crate) fn symlink(&mut self, parent: Draft, name: &[u8], target: &[u8]) -> Draft {
        let node = NewNode::Symlink { target: target.to_vec() };
        self.manifest.add(parent, name, node, meta(0o777)).unwrap()
    }

    pub(crate) fn finish(self) -> (Manifest, NodeOrder, MemoryHome) {
        let (manifest, order) = self.manifest.build();
        let chunks = self
            .contents
            .iter()
            .flat_map(|(draft, first, bytes)| {
                let inode = order.inode(*draft);
                bytes
                    .chunks(CHUNK_BYTES)
                    .zip(*first..)
                    .map(move |(chunk, index)| ((inode, index), Bytes::copy_from_slice(chunk)))
            })
            .collect();
        (manifest, order, MemoryHome::new(chunks))
    }
}

/// What goes wrong with a chunk, each time that it is asked for, from the front.
#[derive(Clone, Debug)]
pub(crate) enum Fault {
    FlipByte,
    Short,
    Fail(TransportError),
    Panic,
}

pub(crate) struct MemoryHome {
    chunks: HashMap<(Inode, u64), Bytes>,
    faults: Mutex<HashMap<(Inode, u64), Vec<Fault>>>,
    pub(crate) delay: Mutex<Duration>,
    /// While true nothing is answered.
    pub(crate) stalled: watch::Sender<bool>,
    /// Every ask, in order, with the priority that it had then.
    pub(crate) asked: watch::Sender<Vec<(Inode, u64, Priority)>>,
    /// What the link is said to hold: much, unless the test says otherwise.
    pub(crate) bandwidth_delay_bytes: AtomicU64,
    /// Bytes of parts that were sent.
    pub(crate) part_bytes: AtomicUsize,
    in_flight: AtomicUsize,
    most_in_flight: AtomicUsize,
}

impl MemoryHome {
    pub(crate) fn new(chunks: HashMap<(Inode, u64), Bytes>) -> Self {
        Self {
            chunks,
            faults: Mutex::default(),
            delay: Mutex::default(),
            stalled: watch::Sender::new(false),
            asked: watch::Sender::new(Vec::new()),
            bandwidth_delay_bytes: AtomicU64::new(8 << 20),
            part_bytes: AtomicUsize::new(0),
            in_flight: AtomicUsize::new(0),
            most_in_flight: AtomicUsize::new(0),
        }
    }

    pub(crate) fn chunks(&self) -> &HashMap<(Inode, u64), Bytes> {
        &self.chunks
    }

    pub(crate) fn spoil(&self, inode: Inode, index: u64, faults: Vec<Fault>) {
        self.faults.lock().unwrap().insert((inode, index), faults);
    }

    pub(crate) fn most_in_flight(&self) -> usize {
        self.most_in_flight.load(Ordering::SeqCst)
    }

    pub(crate) fn asks(&self) -> usize {
        self.asked.borrow().len()
    }

    /// How often each chunk was asked for.
    pub(crate) fn counts(&self) -> HashMap<(Inode, u64), usize> {
        let mut counts = HashMap::new();
        for (inode, index, _) in self.asked.borrow().iter() {
            *counts.entry((*inode, *index)).or_default() += 1;
        }
        counts
    }

    fn next_fault(&self, key: (Inode, u64)) -> Option<Fault> {
        let mut faults = self.faults.lock().unwrap();
        let queue = faults.get_mut(&key)?;
        if queue.is_empty() { None } else { Some(queue.remove(0)) }
    }
}

struct Flying<'a>(&'a AtomicUsize);

impl Drop for Flying<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Shared by the fetcher and the test.
#[derive(Clone)]
pub(crate) struct Home(pub(crate) std::sync::Arc<MemoryHome>);

impl std::ops::Deref for Home {
    type Target = MemoryHome;
    fn deref(&self) -> &MemoryHome {
        &self.0
    }
}

impl ChunkTransport for Home {
    fn fetch(&self, ask: Ask) -> TransportFuture {
        let home = self.clone();
        Box::pin(async move {
            let ChunkAddress::Set { inode, index, .. } = ask.address else {
                return Err(TransportError::NotFound);
            };
            let now = home.in_flight.fetch_add(1, Ordering::SeqCst) + 1;
            let _flying = Flying(&home.in_flight);
            home.most_in_flight.fetch_max(now, Ordering::SeqCst);
            let priority = *ask.priority.borrow();
            home.asked.send_modify(|asked| asked.push((inode, index, priority)));
            let delay = *home.delay.lock().unwrap();
            if delay > Duration::ZERO {
                tokio::time::sleep(delay).await;
            }
            let mut stalled = home.stalled.subscribe();
            stalled.wait_for(|stalled| !stalled).await.map_err(|_| TransportError::Closed)?;
            let bytes = home.chunks.get(&(inode, index)).cloned().ok_or(TransportError::NotFound)?;
            match home.next_fault((inode, index)) {
                None => Ok(bytes),
                Some(Fault::FlipByte) => {
                    let mut bytes = bytes.to_vec();
                    let middle = bytes.len() / 2;
                    bytes[middle] ^= 1;
                    Ok(bytes.into())
                }
                Some(Fault::Short) => Ok(bytes.slice(..bytes.len() - 1)),
                Some(Fault::Fail(error)) => Err(error),
                Some(Fault::Panic) => panic!("ordered by the test"),
            }
        })
    }

    fn fetch_part(&self, ask: PartAsk) -> PartFuture {
        let home = self.clone();
        Box::pin(async move {
            let whole = home.chunks.get(&(ask.inode, ask.index)).cloned().ok_or(TransportError::NotFound)?;
            let mut stalled = home.stalled.subscribe();
            stalled.wait_for(|stalled| !stalled).await.map_err(|_| TransportError::Closed)?;
            let mut proof = proof(&group_values(ask.id.position, &whole), &ask.groups);
            let mut bytes = whole.slice(group_bytes(ask.id.len, &ask.groups));
            home.part_bytes.fetch_add(bytes.len(), Ordering::SeqCst);
            match home.next_fault((ask.inode, ask.index)) {
                None => {}
                Some(Fault::FlipByte) => {
                    let mut flipped = bytes.to_vec();
                    flipped[0] ^= 1;
                    bytes = flipped.into();
                }
                Some(Fault::Short) => drop(proof.pop()),
                Some(Fault::Fail(error)) => return Err(error),
                Some(Fault::Panic) => panic!("ordered by the test"),
            }
            Ok((bytes, proof))
        })
    }

    fn bandwidth_delay_bytes(&self) -> Option<u64> {
        Some(self.bandwidth_delay_bytes.load(Ordering::SeqCst))
    }
}
