//! The key under which chunks lie on the box's disk: drawn at random, in one page that is never
//! swapped, never in a core dump and empty in a forked child. With it goes all that it sealed.
//!
//! Never: hand out the key, or leave a copy of it anywhere else in memory.

use std::hint::black_box;
use std::io;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use limb_common::chunk::{ChunkId, Position};
use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mlock, mmap_anonymous, munmap};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, Tag, UnboundKey};
use ring::rand::{SecureRandom as _, SystemRandom};
use zeroize::Zeroize as _;

/// A page everywhere that limb runs, or a part of one.
const PAGE_BYTES: usize = 4096;
/// Where the raw key stands while it is expanded.
const RAW_AT: usize = 2048;
const RAW_BYTES: usize = 32;
/// More stack than the expansion of a key uses.
const STACK_BYTES: usize = 32 << 10;

const _: () = assert!(size_of::<LessSafeKey>() <= RAW_AT);

/// There is no place for a key, or no randomness.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("the kernel gave no page that stays in memory; hint: `ulimit -l` must allow one page")]
    Page(#[source] io::Error),
    #[error("the kernel gave no random bytes")]
    Random,
}

/// Names one writing of one slot. No two may be equal under one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WriteNumber {
    pub(super) slot: u32,
    /// Of all writings of this key, so it alone is unique.
    pub(super) counter: u64,
}

/// The expanded key in its page.
pub(super) struct LockedKey {
    page: NonNull<LessSafeKey>,
}

// SAFETY: the page belongs to this value alone and is only read until it is dropped; a
// `LessSafeKey` may be used from all threads.
unsafe impl Send for LockedKey {}
// SAFETY: as above.
unsafe impl Sync for LockedKey {}

impl std::fmt::Debug for LockedKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("LockedKey([redacted])")
    }
}

impl LockedKey {
    /// # Errors
    /// No page could be locked, or no random bytes were there.
    pub(super) fn random() -> Result<Self, KeyError> {
        let length = NonZeroUsize::MIN.saturating_add(PAGE_BYTES - 1);
        let (read_write, private) = (ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_PRIVATE);
        // SAFETY: a new mapping where the kernel wants it touches nothing else.
        let page = unsafe { mmap_anonymous(None, length, read_write, private) };
        let page = page.map_err(|errno| KeyError::Page(errno.into()))?;
        let locked = Self { page: page.cast() };
        // SAFETY: the page was just mapped and is ours.
        let kept = unsafe {
            mlock(page, PAGE_BYTES)
                .and_then(|()| madvise(page, PAGE_BYTES, MmapAdvise::MADV_DONTDUMP))
                .and_then(|()| madvise(page, PAGE_BYTES, MmapAdvise::MADV_WIPEONFORK))
        };
        kept.map_err(|errno| KeyError::Page(errno.into()))?;
        let made = expand_in(page.cast());
        scrub_stack();
        made?;
        Ok(locked)
    }

    fn key(&self) -> &LessSafeKey {
        // SAFETY: `random` wrote it there before anybody got this value, and it lives until drop.
        unsafe { self.page.as_ref() }
    }

    /// Seals in place. `None` never happens for a chunk's length.
    pub(super) fn seal(&self, number: WriteNumber, id: &ChunkId, bytes: &mut [u8]) -> Option<Tag> {
        let aad = Aad::from(name_of(id));
        self.key().seal_in_place_separate_tag(nonce(number), aad, bytes).ok()
    }

    /// Opens in place; whether it was what was sealed. If not, the bytes mean nothing.
    pub(super) fn open(&self, number: WriteNumber, id: &ChunkId, tag: Tag, bytes: &mut [u8]) -> bool {
        let aad = Aad::from(name_of(id));
        self.key().open_in_place_separate_tag(nonce(number), aad, tag, bytes, 0..).is_ok()
    }
}

impl Drop for LockedKey {
    fn drop(&mut self) {
        // SAFETY: the page is mapped, writable and nobody else's; an expanded key has no drop glue.
        unsafe {
            std::slice::from_raw_parts_mut(self.page.cast::<u8>().as_ptr(), PAGE_BYTES).zeroize();
            // Unlocked with it.
            let _kept: nix::Result<()> = munmap(self.page.cast(), PAGE_BYTES);
        }
    }
}

/// Draws a key into the page and puts its expansion at the page's start. Its own function, so
/// that what it leaves on the stack lies where [`scrub_stack`] writes.
#[inline(never)]
fn expand_in(page: NonNull<u8>) -> Result<(), KeyError> {
    // SAFETY: both lie in the page, which the caller owns; see the assertion above.
    unsafe {
        let raw = std::slice::from_raw_parts_mut(page.add(RAW_AT).as_ptr(), RAW_BYTES);
        SystemRandom::new().fill(raw).map_err(|_| KeyError::Random)?;
        let expanded = UnboundKey::new(&AES_256_GCM, raw).map(LessSafeKey::new);
        raw.zeroize();
        page.cast::<LessSafeKey>().write(expanded.map_err(|_| KeyError::Random)?);
    }
    Ok(())
}

#[inline(never)]
fn scrub_stack() {
    let mut stack = [0_u8; STACK_BYTES];
    stack.zeroize();
    black_box(&mut stack);
}

fn nonce(number: WriteNumber) -> Nonce {
    let mut bytes = [0; NONCE_LEN];
    let (slot, counter) = bytes.split_at_mut(4);
    slot.copy_from_slice(&number.slot.to_be_bytes());
    counter.copy_from_slice(&number.counter.to_be_bytes());
    Nonce::assume_unique_for_key(bytes)
}

/// A chunk's whole name, so that nothing opens as another chunk.
fn name_of(id: &ChunkId) -> [u8; 45] {
    let (kind, index) = match id.position {
        Position::Whole => (0, 0),
        Position::Subtree { index } => (1, index),
    };
    let mut name = [0; 45];
    name[..32].copy_from_slice(&id.hash.0);
    name[32] = kind;
    name[33..41].copy_from_slice(&index.to_be_bytes());
    name[41..].copy_from_slice(&id.len.to_be_bytes());
    name
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_sealed_opens_as_itself_and_as_nothing_else() {
        let key = LockedKey::random().unwrap();
        let plain: Vec<u8> = b"canary ".repeat(1000);
        let id = ChunkId::of(Position::Subtree { index: 3 }, &plain);
        let number = WriteNumber { slot: 7, counter: 9 };
        let mut sealed = plain.clone();
        let tag = key.seal(number, &id, &mut sealed).unwrap();
        assert!(!sealed.windows(6).any(|window| window == b"canary"));
        let opens = |key: &LockedKey, number, id: &ChunkId, flip: usize| {
            let mut bytes = sealed.clone();
            bytes[flip / 8] ^= u8::from(flip > 0) << (flip % 8);
            key.open(number, id, tag, &mut bytes) && bytes == plain
        };
        assert!(opens(&key, number, &id, 0));
        assert!(!opens(&key, number, &id, 4321));
        assert!(!opens(&key, WriteNumber { counter: 10, ..number }, &id, 0));
        assert!(!opens(&key, WriteNumber { slot: 8, ..number }, &id, 0));
        assert!(!opens(&key, number, &ChunkId { position: Position::Subtree { index: 4 }, ..id }, 0));
        assert!(!opens(&LockedKey::random().unwrap(), number, &id, 0), "every key is another one");
        assert_eq!(format!("{key:?}"), "LockedKey([redacted])");
    }
}
