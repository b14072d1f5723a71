//! Room that an entry gives, for what comes behind it in the same breath.

use std::path::Path;

use limb_common::chunk::CHUNK_BYTES;
use nix::errno::Errno;
use nix::mount::{MntFlags, MsFlags};

use super::tests::{Bench, bytes, chunk, chunks, created, fast_dir, published, tree};
use super::*;

fn abandoned(file: u64) -> Op {
    Op::Abandoned { file, keep: false, path: b"refused".to_vec(), size: 0 }
}

fn removed(path: &str) -> Op {
    Op::Removed { path: path.into(), directory: false }
}

/// A file that is written anew, all of it in one feed behind what gives the room.
fn over_again(bench: &mut Bench, first: Op, file: u64, path: &str, content: &[u8]) -> Vec<Item> {
    let mut items = vec![bench.entry(first), bench.entry(created(file, path))];
    items.extend(chunks(file, 1, content));
    items.push(bench.entry(published(file, path, content, PublishKind::Final)));
    items
}

fn nothing_was_refused(acks: &Acks) -> bool {
    acks.refused.is_empty() && acks.chunks_refused.is_empty()
}

#[tokio::test]
async fn who_starts_over_at_the_quota_finds_the_room_of_what_was_refused() {
    let quota = |begin| OutputBegin { quota_bytes: Some(5_000), quota_inodes: Some(2), ..begin };
    let mut bench = Bench::with(fast_dir(), quota).await;
    assert_eq!(bench.put(1, "f", &bytes(6000, 1)).await, 0);
    let mut items = vec![bench.entry(created(2, "f"))];
    items.push(chunk(2, 0, 1, &bytes(4000, 2)));
    assert!(nothing_was_refused(&bench.feed(items).await));
    let content = bytes(4000, 3);
    let items = over_again(&mut bench, abandoned(2), 3, "f", &content);
    let acks = bench.feed(items).await;
    assert!(nothing_was_refused(&acks), "{acks:?}");
    assert_eq!(bench.read("f"), content);

    // Names are room too: of a file, and of a directory.
    for (file, name) in [(4, "g"), (5, "h"), (6, "i")] {
        assert_eq!(bench.put(file, name, b"").await, 0);
    }
    let mut items = over_again(&mut bench, removed("g"), 7, "j", b"");
    items.push(bench.entry(removed("h")));
    items.push(bench.entry(Op::DirectoryMade { path: b"d".to_vec(), mode: 0o755 }));
    let acks = bench.feed(items).await;
    assert!(nothing_was_refused(&acks), "{acks:?}");
    assert!(bench.dest.join("d").is_dir());
    assert_eq!(bench.put(8, "k", b"").await, Errno::EDQUOT as i32);
}

/// A destination of this size. `None`: without the right to mount there is nothing to test.
async fn small_disk(bytes: u64) -> Option<(Bench, Mounted)> {
    let dir = fast_dir();
    let small = dir.path().join("dest");
    std::fs::create_dir(&small).unwrap();
    let mounted = Mounted::new(&small, bytes)?;
    Some((Bench::with(dir, |begin| begin).await, mounted))
}

struct Mounted(std::path::PathBuf);

impl Mounted {
    fn new(at: &Path, bytes: u64) -> Option<Self> {
        let size = format!("size={bytes}");
        let none = Some("none");
        nix::mount::mount(none, at, Some("tmpfs"), MsFlags::empty(), Some(size.as_str())).ok()?;
        Some(Self(at.to_owned()))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _gone = nix::mount::umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

#[tokio::test]
async fn who_starts_over_on_a_full_disk_finds_the_room_of_what_was_refused() {
    let Some((mut bench, _mounted)) = small_disk(2 * CHUNK_BYTES as u64).await else { return };
    let too_much = bytes(4 * CHUNK_BYTES, 1);
    assert_eq!(bench.put(1, "f", &too_much).await, Errno::ENOSPC as i32);
    let content = bytes(CHUNK_BYTES + 5, 2);
    let items = over_again(&mut bench, abandoned(1), 2, "f", &content);
    let acks = bench.feed(items).await;
    assert!(nothing_was_refused(&acks), "{acks:?}");
    assert_eq!(tree(&bench.dest), [("f".to_owned(), content)].into());
}

/// The copy that a sync shows needs the room of what was removed just before.
#[tokio::test]
async fn a_removal_gives_its_room_to_the_publish_behind_it() {
    let Some((mut bench, _mounted)) = small_disk(2 * CHUNK_BYTES as u64).await else { return };
    assert_eq!(bench.put(1, "old", &bytes(CHUNK_BYTES, 1)).await, 0);
    let content = bytes(CHUNK_BYTES, 2);
    let mut items = vec![bench.entry(created(2, "new"))];
    items.extend(chunks(2, 1, &content));
    assert!(nothing_was_refused(&bench.feed(items).await));
    let items =
        vec![bench.entry(removed("old")), bench.entry(published(2, "new", &content, PublishKind::Snapshot))];
    let acks = bench.feed(items).await;
    assert!(nothing_was_refused(&acks), "{acks:?}");
    assert_eq!(tree(&bench.dest), [("new".to_owned(), content)].into());
}

/// A log grows where the owner looks until the disk is full: it stays what it was, and grows on
/// once there is room.
#[tokio::test]
async fn a_file_that_cannot_grow_stays_what_it_was() {
    let Some((mut bench, _mounted)) = small_disk(8 * CHUNK_BYTES as u64).await else { return };
    let whole = bytes(3 * CHUNK_BYTES, 1);
    let first = &whole[..CHUNK_BYTES / 2];
    let mut items = vec![bench.entry(created(1, "log"))];
    items.extend(chunks(1, 1, first));
    items.push(bench.entry(published(1, "log", first, PublishKind::Grown)));
    assert!(nothing_was_refused(&bench.feed(items).await));
    // The part has room for all of it, what the owner sees has not.
    assert!(nothing_was_refused(&bench.feed(chunks(1, 2, &whole)).await));
    let full = bench.dest.join("full");
    let ballast = |mib: usize| std::fs::write(&full, bytes(mib * CHUNK_BYTES, 3));
    ballast(4).expect("8 MiB, half a MiB of log, 3 MiB of part");
    let grown = |bench: &mut Bench| vec![bench.entry(published(1, "log", &whole, PublishKind::Grown))];
    let items = grown(&mut bench);
    let acks = bench.feed(items).await;
    assert_eq!(acks.refused.iter().map(|refusal| refusal.errno).collect::<Vec<_>>(), [Errno::ENOSPC as i32]);
    assert!(bench.read("log") == first, "it has {} bytes", bench.read("log").len());
    std::fs::remove_file(&full).unwrap();
    let items = grown(&mut bench);
    assert!(nothing_was_refused(&bench.feed(items).await));
    assert!(tree(&bench.dest) == [("log".to_owned(), whole)].into(), "something else stands there");
}
