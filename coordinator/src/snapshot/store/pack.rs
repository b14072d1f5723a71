//! Many small files in one file of the store: one name and one fsync for thousands of them.
//!
//! ```text
//! bytes of each, gaps between | 48 B for each: content, offset u64, length u64 | count u64 | BLAKE3 of both | magic 8 B
//! ```
//!
//! Entries are sorted by content. A pack never changes: what is to go is left behind when the rest is
//! put into another one.
//! Never: vouch for the bytes. Who reads them knows their hash.

use std::collections::HashMap;
use std::fs::File;
use std::hash::{BuildHasherDefault, Hasher};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::sync::{Arc, Mutex};

use limb_common::id::Digest;

use super::{Place, Store, Temporary};
use crate::snapshot::{SnapshotError, lock};

const MAGIC: &[u8; 8] = b"LIMBPCK\x01";
const ENTRY_BYTES: usize = 48;
const TRAILER_BYTES: usize = 48;
/// Each thread fills a piece of the pack of its own, and writes it at once: 16 of the largest files.
const EXTENT_BYTES: usize = 1 << 20;
/// From this size on the next file goes into another pack, so that what is swept out of one costs
/// little to copy.
const PACK_BYTES: u64 = 256 << 20;

/// Entries that are loaded in the time of one search on the disk, of 20 small reads.
const LOADED_PER_QUESTION: usize = 256;

/// What a pack holds, as it stands at its end.
#[derive(Debug)]
pub(super) struct Contents {
    raw: Vec<u8>,
}

/// One of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    pub(super) content: Digest,
    pub(super) at: u64,
    pub(super) len: u64,
}

impl Entry {
    fn read(raw: &[u8]) -> Option<Self> {
        let number = |at: usize| raw.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
        Some(Self { content: Digest::try_from(raw.get(..32)?).ok()?, at: number(32)?, len: number(40)? })
    }
}

impl Contents {
    /// `None`: not a whole pack.
    pub(super) fn of(file: &File) -> io::Result<Option<Self>> {
        let Some(Shape { entries_at, count, hash }) = Shape::of(file)? else { return Ok(None) };
        let mut raw = vec![0; count * ENTRY_BYTES];
        file.read_exact_at(&mut raw, entries_at)?;
        Ok((hash_of(&raw, count) == hash).then_some(Self { raw }))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = Entry> {
        self.raw.chunks_exact(ENTRY_BYTES).filter_map(Entry::read)
    }

    fn find(&self, content: Digest) -> Option<Entry> {
        let entry = |at: usize| self.raw.get(at * ENTRY_BYTES..).and_then(Entry::read);
        search(self.raw.len() / ENTRY_BYTES, content, entry)
    }
}

/// What a pack that was there before holds, for somebody who asks often or seldom.
#[derive(Debug)]
pub(super) enum Held {
    Loaded(Contents),
    OnDisk(File),
}

impl Held {
    /// For about so many questions. `None`: not a whole pack.
    pub(super) fn of(file: File, questions: usize) -> io::Result<Option<Self>> {
        let Some(shape) = Shape::of(&file)? else { return Ok(None) };
        if shape.count / LOADED_PER_QUESTION > questions {
            return Ok(Some(Self::OnDisk(file)));
        }
        Ok(Contents::of(&file)?.map(Self::Loaded))
    }

    fn find(&self, content: Digest) -> Option<Entry> {
        match self {
            Self::Loaded(contents) => contents.find(content),
            Self::OnDisk(file) => find_in(file, content),
        }
    }
}

/// The end of a pack.
struct Shape {
    entries_at: u64,
    count: usize,
    hash: [u8; 32],
}

impl Shape {
    /// `None`: this is no pack, or not all of it.
    fn of(file: &File) -> io::Result<Option<Self>> {
        let len = file.metadata()?.len();
        let Some(trailer_at) = len.checked_sub(TRAILER_BYTES as u64) else { return Ok(None) };
        let mut raw = [0; TRAILER_BYTES];
        file.read_exact_at(&mut raw, trailer_at)?;
        let (count, rest) = raw.split_at(8);
        let (hash, magic) = rest.split_at(32);
        let shape = || {
            let count = usize::try_from(u64::from_le_bytes(count.try_into().ok()?)).ok()?;
            let entries_at = trailer_at.checked_sub(count.checked_mul(ENTRY_BYTES)? as u64)?;
            (magic == MAGIC).then_some(Self { entries_at, count, hash: hash.try_into().ok()? })
        };
        Ok(shape())
    }
}

/// Is it whole, as far as its end tells?
pub(super) fn is_whole(file: &File) -> bool {
    Shape::of(file).is_ok_and(|shape| shape.is_some())
}

/// Where this content is in a pack that nobody has read the entries of.
pub(super) fn find_in(file: &File, content: Digest) -> Option<Entry> {
    let Shape { entries_at, count, .. } = Shape::of(file).ok()??;
    search(count, content, |at| {
        let mut raw = [0; ENTRY_BYTES];
        file.read_exact_at(&mut raw, entries_at + (at * ENTRY_BYTES) as u64).ok()?;
        Entry::read(&raw)
    })
}

fn search(count: usize, content: Digest, entry: impl Fn(usize) -> Option<Entry>) -> Option<Entry> {
    let (mut low, mut high) = (0, count);
    while low < high {
        let middle = low + (high - low) / 2;
        let found = entry(middle)?;
        match found.content.cmp(&content) {
            std::cmp::Ordering::Equal => return Some(found),
            std::cmp::Ordering::Less => low = middle + 1,
            std::cmp::Ordering::Greater => high = middle,
        }
    }
    None
}

fn hash_of(entries: &[u8], count: usize) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new();
    hasher.update(entries).update(&(count as u64).to_le_bytes());
    *hasher.finalize().as_bytes()
}

/// Hashes need no hashing.
#[derive(Debug, Default)]
struct FirstBytes(u64);

impl Hasher for FirstBytes {
    fn write(&mut self, bytes: &[u8]) {
        if let Some(Ok(first)) = bytes.get(..8).map(TryInto::try_into) {
            self.0 = u64::from_le_bytes(first);
        }
    }

    fn write_usize(&mut self, _len: usize) {}

    fn finish(&self) -> u64 {
        self.0
    }
}

/// Puts small files into new packs, from several threads. Nothing of it is in the store before
/// [`Self::finish`].
#[derive(Debug)]
pub(in crate::snapshot) struct Packer<'a> {
    store: &'a Store,
    before: Vec<(u64, Held)>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    packs: Vec<Open>,
    placed: HashMap<Digest, Place, BuildHasherDefault<FirstBytes>>,
}

#[derive(Debug)]
struct Open {
    id: u64,
    target: Arc<Temporary>,
    /// Where the next extent begins.
    next: u64,
    /// Where the written bytes end.
    end: u64,
    entries: Vec<Entry>,
}

/// One thread's way into a [`Packer`].
#[derive(Debug)]
pub(in crate::snapshot) struct Filler<'a> {
    packer: &'a Packer<'a>,
    extent: Option<Extent>,
}

#[derive(Debug)]
struct Extent {
    pack: usize,
    id: u64,
    target: Arc<Temporary>,
    at: u64,
    bytes: Vec<u8>,
}

impl<'a> Packer<'a> {
    /// `before`: packs whose contents need not be put anywhere again.
    pub(super) fn new(store: &'a Store, before: Vec<(u64, Held)>) -> Self {
        Self { store, before, state: Mutex::default() }
    }

    pub(in crate::snapshot) fn filler(&'a self) -> Filler<'a> {
        Filler { packer: self, extent: None }
    }

    fn there(&self, content: Digest, size: u64) -> Option<Place> {
        let packed = self.before.iter().find_map(|(pack, held)| {
            held.find(content).map(|Entry { at, .. }| Place::Pack { pack: *pack, at })
        });
        packed.or_else(|| self.store.contains(content, size).then_some(Place::File))
    }

    fn extent(&self, state: &mut State) -> Result<Extent, SnapshotError> {
        if state.packs.last().is_none_or(|pack| pack.next >= PACK_BYTES) {
            state.packs.push(Open {
                // Positive and not 0 in every table that names it.
                id: rand::random::<u64>() >> 1 | 1,
                target: Arc::new(self.store.temporary()?),
                next: 0,
                end: 0,
                entries: Vec::new(),
            });
        }
        let pack = state.packs.len() - 1;
        let open = &mut state.packs[pack];
        let at = open.next;
        open.next += EXTENT_BYTES as u64;
        let (id, target) = (open.id, Arc::clone(&open.target));
        Ok(Extent { pack, id, target, at, bytes: Vec::with_capacity(EXTENT_BYTES) })
    }

    /// Durable when it returns; every filler must have been finished.
    pub(in crate::snapshot) fn finish(self) -> Result<(), SnapshotError> {
        let packs = self.state.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner).packs;
        let any = !packs.is_empty();
        for Open { id, target, end, mut entries, .. } in packs {
            entries.sort_unstable_by_key(|entry| entry.content);
            let mut tail = Vec::with_capacity(entries.len() * ENTRY_BYTES + TRAILER_BYTES);
            for Entry { content, at, len } in &entries {
                tail.extend_from_slice(&content.0);
                tail.extend_from_slice(&at.to_le_bytes());
                tail.extend_from_slice(&len.to_le_bytes());
            }
            let hash = hash_of(&tail, entries.len());
            tail.extend_from_slice(&(entries.len() as u64).to_le_bytes());
            tail.extend_from_slice(&hash);
            tail.extend_from_slice(MAGIC);
            let write = || {
                target.file.write_all_at(&tail, end)?;
                target.file.sync_all()
            };
            write().map_err(target.failed())?;
            self.store.name_pack(id, target)?;
        }
        if any { self.store.sync_packs() } else { Ok(()) }
    }
}

impl Filler<'_> {
    /// Where this content will be.
    pub(in crate::snapshot) fn put(&mut self, content: Digest, bytes: &[u8]) -> Result<Place, SnapshotError> {
        let len = bytes.len() as u64;
        if let Some(&place) = lock(&self.packer.state).placed.get(&content) {
            return Ok(place);
        }
        if let Some(place) = self.packer.there(content, len) {
            return Ok(place);
        }
        if self.extent.as_ref().is_some_and(|extent| extent.bytes.len() + bytes.len() > EXTENT_BYTES) {
            self.write()?;
        }
        let mut state = lock(&self.packer.state);
        // Another thread may have put it meanwhile.
        if let Some(&place) = state.placed.get(&content) {
            return Ok(place);
        }
        let extent = match self.extent.as_mut() {
            Some(extent) => extent,
            None => self.extent.insert(self.packer.extent(&mut state)?),
        };
        let at = extent.at + extent.bytes.len() as u64;
        let place = Place::Pack { pack: extent.id, at };
        extent.bytes.extend_from_slice(bytes);
        state.packs[extent.pack].entries.push(Entry { content, at, len });
        state.placed.insert(content, place);
        Ok(place)
    }

    fn write(&mut self) -> Result<(), SnapshotError> {
        let Some(Extent { pack, target, at, bytes, .. }) = self.extent.take() else { return Ok(()) };
        target.file.write_all_at(&bytes, at).map_err(target.failed())?;
        let open = &mut lock(&self.packer.state).packs[pack];
        open.end = open.end.max(at + bytes.len() as u64);
        Ok(())
    }

    /// Must be called: what it was given is written only now.
    pub(in crate::snapshot) fn finish(mut self) -> Result<(), SnapshotError> {
        self.write()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes of one pack with these files.
    fn packed(store: &Store, files: &[Vec<u8>]) -> (u64, Vec<Place>) {
        let packer = store.packer(files.len()).unwrap();
        let mut filler = packer.filler();
        let places: Vec<_> =
            files.iter().map(|bytes| filler.put(Digest::of(bytes), bytes).unwrap()).collect();
        filler.finish().unwrap();
        packer.finish().unwrap();
        let Some(&Place::Pack { pack, .. }) = places.first() else { panic!("{places:?}") };
        (pack, places)
    }

    #[test]
    fn a_pack_that_is_not_whole_is_none() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store")).unwrap();
        let files: Vec<Vec<u8>> = (0..20_u8).map(|number| vec![number; usize::from(number)]).collect();
        let (pack, places) = packed(&store, &files);
        let path = store.pack_path(pack);
        let whole = std::fs::read(&path).unwrap();
        for (bytes, &place) in files.iter().zip(&places) {
            let (content, size) = (Digest::of(bytes), bytes.len() as u64);
            assert_eq!(store.find(content, size), Some(place));
            let (file, at) = store.open_stored(content, place).unwrap();
            let mut read = vec![0; bytes.len()];
            file.read_exact_at(&mut read, at).unwrap();
            assert_eq!(&read, bytes);
        }
        assert_eq!(store.find(Digest::of(b"other"), 5), None);
        for len in 0..whole.len() {
            std::fs::write(&path, &whole[..len]).unwrap();
            assert!(store.packs().unwrap().is_empty(), "{len}");
            assert_eq!(store.find(Digest::of(&files[3]), 3), None);
        }
        // An entry that changed leads nobody astray who asks for all; who asks for one checks its bytes.
        for at in whole.len() - TRAILER_BYTES - 20 * ENTRY_BYTES..whole.len() {
            let mut bad = whole.clone();
            bad[at] ^= 0x10;
            std::fs::write(&path, &bad).unwrap();
            assert!(Contents::of(&File::open(&path).unwrap()).ok().flatten().is_none(), "{at}");
            let _: Option<Place> = store.find(Digest::of(&files[3]), 3);
        }
    }

    #[test]
    fn extents_and_packs_follow_each_other_and_threads_share_contents() {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("store")).unwrap();
        let bytes = |number: u32| number.to_le_bytes().repeat(1 + number as usize * 37 % 15_000);
        let packer = store.packer(100).unwrap();
        let work = || {
            let mut filler = packer.filler();
            let places: Vec<_> = (0..200)
                .map(|number| filler.put(Digest::of(&bytes(number)), &bytes(number)).unwrap())
                .collect();
            filler.finish().unwrap();
            places
        };
        let placed = crate::snapshot::threads::on_threads(4, &work);
        assert!(placed.windows(2).all(|pair| pair[0] == pair[1]));
        packer.finish().unwrap();
        for (number, &place) in (0..).zip(&placed[0]) {
            let (file, at) = store.open_stored(Digest::of(&bytes(number)), place).unwrap();
            let mut read = vec![0; bytes(number).len()];
            file.read_exact_at(&mut read, at).unwrap();
            assert_eq!(read, bytes(number), "{number}");
        }
        let held = store.packs().unwrap();
        // A large pack beside few questions is searched where it is.
        let small = store.packer(0).unwrap();
        assert_eq!(small.there(Digest::of(&bytes(7)), 1), Some(placed[0][7]));
        assert_eq!(held.len(), 1);
    }
}
