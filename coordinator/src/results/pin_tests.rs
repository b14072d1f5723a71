//! What the box may still read after its name is gone at home, and attributes that a new publish
//! keeps.

use limb_common::chunk::CHUNK_BYTES;
use limb_common::id::{AttemptNumber, Digest};
use limb_common::manifest::{Inode, Manifest};
use nix::errno::Errno;

use super::disk::{GoOn, user_xattrs};
use super::tests::{Bench, OUT, begin, bytes, chunk, chunks, created, open_home, published, tree};
use super::*;

fn rename(from: &str, to: &str) -> Op {
    Op::Renamed { from: from.into(), to: to.into(), no_replace: false, exchange: false }
}

fn remove(path: &str) -> Op {
    Op::Removed { path: path.into(), directory: false }
}

/// Ends the attempt; the next one begins on what it left.
async fn next_attempt(bench: &mut Bench) -> Manifest {
    bench.home.finish(&bench.id).await.unwrap();
    let manifest = bench.home.lower(&bench.dest).await.unwrap().manifest;
    bench.id.attempt = AttemptNumber(bench.id.attempt.0 + 1);
    let output = OutputBegin { lower: Some(manifest.id()), ..begin(&bench.dest) };
    bench.home.begin(&bench.id, vec![output]).await.unwrap();
    (bench.journal, _) = bench.home.open_journal(bench.id.clone()).await.unwrap();
    bench.seq = 0;
    manifest
}

/// A coordinator that was killed and started again.
async fn restart(bench: &mut Bench) {
    bench.home = open_home(bench.dir.path(), &bench.events, Arc::new(GoOn));
    bench.home.recover().await.unwrap();
    (bench.journal, _) = bench.home.open_journal(bench.id.clone()).await.unwrap();
}

fn inode(manifest: &Manifest, path: &str) -> Inode {
    manifest.resolve(path.as_bytes()).unwrap()
}

async fn lower(bench: &Bench, manifest: Digest, inode: Inode, content: &[u8]) {
    for (data, index) in content.chunks(CHUNK_BYTES).zip(0..) {
        let read = bench.home.lower_chunk(&bench.id, manifest, inode, index).await;
        assert!(read.unwrap().as_ref() == data, "chunk {index} of {inode:?}");
    }
}

fn in_limb(bench: &Bench) -> usize {
    std::fs::read_dir(bench.dest.join(".limb")).map_or(0, Iterator::count)
}

#[tokio::test]
async fn earlier_results_stay_readable_while_the_job_rotates_replaces_and_removes_them() {
    let mut bench = Bench::new().await;
    assert_eq!(bench.apply(Op::DirectoryMade { path: b"d".to_vec(), mode: 0o755 }).await, 0);
    let contents: Vec<_> = (1..=4_u8).map(|seed| bytes(CHUNK_BYTES + usize::from(seed), seed)).collect();
    let names = ["latest", "previous", "oldest", "d/kept"];
    for (number, name) in (1..).zip(names) {
        assert_eq!(bench.put(number, name, &contents[usize::try_from(number).unwrap() - 1]).await, 0);
    }
    let manifest = next_attempt(&mut bench).await;
    let check = async |bench: &Bench| {
        for (name, content) in names.iter().zip(&contents) {
            lower(bench, manifest.id(), inode(&manifest, name), content).await;
        }
    };
    // mv previous oldest; mv latest previous; a new latest; rm oldest; mv d e; rm e/kept.
    for op in [rename("previous", "oldest"), rename("latest", "previous")] {
        assert_eq!(bench.apply(op).await, 0);
        check(&bench).await;
    }
    assert_eq!(bench.put(1, "latest", b"new").await, 0);
    for op in [remove("oldest"), rename("d", "e"), remove("e/kept")] {
        assert_eq!(bench.apply(op).await, 0);
        check(&bench).await;
    }
    assert_eq!(bench.put(2, "previous", b"newer").await, 0);
    check(&bench).await;
    restart(&mut bench).await;
    check(&bench).await;
    let expected = [("latest", &b"new"[..]), ("previous", b"newer")];
    assert_eq!(tree(&bench.dest), expected.map(|(n, c)| (n.to_owned(), c.to_vec())).into());
    assert_eq!(bench.events.lock().unwrap().len(), 0);
    bench.home.finish(&bench.id).await.unwrap();
    assert!(!bench.dest.join(".limb").exists(), "pins end with the attempt");
    assert!(
        bench.home.lower_chunk(&bench.id, manifest.id(), inode(&manifest, "latest"), 0).await.is_err(),
        "and so does the right to read"
    );
}

#[tokio::test]
async fn own_files_stay_readable_after_they_were_replaced_or_removed() {
    let mut bench = Bench::new().await;
    assert_eq!(bench.put(1, "a", b"one").await, 0);
    // Placed and replaced in one batch.
    let mut items = vec![bench.entry(created(2, "a")), chunk(2, 0, 1, b"two")];
    items.push(bench.entry(published(2, "a", b"two", PublishKind::Final)));
    items.push(bench.entry(created(3, "tmp")));
    items.push(chunk(3, 0, 1, b"three"));
    items.push(bench.entry(published(3, "tmp", b"three", PublishKind::Final)));
    items.push(bench.entry(rename("tmp", "a")));
    items.push(bench.entry(remove("a")));
    assert_eq!(bench.feed(items).await.refused, vec![]);
    for life in 0..2 {
        for (file, content) in [(1, &b"one"[..]), (2, b"two"), (3, b"three")] {
            let read = bench.home.result_chunk(&bench.id, OUT, file, 0).await.unwrap();
            assert_eq!(read.as_ref(), content, "life {life}");
        }
        restart(&mut bench).await;
    }
    assert!(tree(&bench.dest).is_empty());
    assert_eq!(in_limb(&bench), 3);
    // Another attempt has its own numbers and reads none of it.
    let other = AttemptId { attempt: AttemptNumber(9), ..bench.id.clone() };
    bench.home.begin(&other, vec![begin(&bench.dest)]).await.unwrap();
    assert!(bench.home.result_chunk(&other, OUT, 1, 0).await.is_err());
    bench.home.finish(&bench.id).await.unwrap();
    assert_eq!(in_limb(&bench), 0);
}

/// As long as it has a name, the owner counts no more links than there are names; the last name
/// that goes leaves the bytes to late readers, also where both go in one batch.
#[tokio::test]
async fn a_file_that_loses_one_of_its_names_is_not_pinned() {
    use std::os::unix::fs::MetadataExt as _;
    let mut bench = Bench::new().await;
    for (file, name) in [(1, "a"), (2, "b")] {
        assert_eq!(bench.put(file, name, name.as_bytes()).await, 0);
    }
    let link = |existing: &str, path: &str| Op::HardLinkMade { existing: existing.into(), path: path.into() };
    let items = vec![bench.entry(link("a", "a2")), bench.entry(remove("a"))];
    assert_eq!(bench.feed(items).await.refused, vec![]);
    assert_eq!(bench.apply(link("b", "b2")).await, 0);
    assert_eq!(bench.apply(remove("b")).await, 0);
    for name in ["a2", "b2"] {
        assert_eq!(bench.dest.join(name).metadata().unwrap().nlink(), 1, "{name}");
    }
    assert_eq!(bench.apply(link("b2", "b")).await, 0);
    let items = vec![bench.entry(remove("a2")), bench.entry(remove("b")), bench.entry(remove("b2"))];
    assert_eq!(bench.feed(items).await.refused, vec![]);
    for (file, content) in [(1, b"a"), (2, b"b")] {
        let read = bench.home.result_chunk(&bench.id, OUT, file, 0).await.unwrap();
        assert_eq!(read.as_ref(), content);
    }
}

/// Its fsync showed the part itself (no clones here, and too large to copy); the job goes on
/// writing although the name is gone.
#[tokio::test]
async fn an_open_file_that_lost_its_name_goes_on() {
    let mut bench = Bench::new().await;
    let mut content = vec![7; 65 * CHUNK_BYTES + 3];
    for (file, path) in [(1, "removed"), (2, "replaced")] {
        let mut items = vec![bench.entry(created(file, path))];
        items.extend(chunks(file, 1, &content));
        items.push(bench.entry(published(file, path, &content, PublishKind::Snapshot)));
        assert_eq!(bench.feed(items).await.refused, vec![]);
    }
    assert_eq!(bench.apply(remove("removed")).await, 0);
    assert_eq!(bench.put(3, "replaced", b"other").await, 0);
    restart(&mut bench).await;
    content[0] = 8;
    for file in [1, 2] {
        let acks = bench.feed(vec![chunk(file, 0, 2, &content[..CHUNK_BYTES])]).await;
        assert_eq!((acks.chunks.len(), acks.chunks_refused.len()), (1, 0), "{file}");
        for (data, index) in content.chunks(CHUNK_BYTES).zip(0..) {
            let read = bench.home.result_chunk(&bench.id, OUT, file, index).await.unwrap();
            assert!(read.as_ref() == data, "chunk {index} of {file}");
        }
        let gone = Op::Abandoned { file, keep: false, path: Vec::new(), size: 0 };
        assert_eq!(bench.apply(gone).await, 0);
    }
    let finished = bench.home.finish(&bench.id).await.unwrap();
    assert_eq!(finished.partials, Vec::<String>::new());
    assert_eq!(tree(&bench.dest), [("replaced".to_owned(), b"other".to_vec())].into());
}

#[tokio::test]
async fn a_file_with_two_names_is_one_file_however_it_is_written() {
    use std::os::unix::fs::MetadataExt as _;
    let mut bench = Bench::new().await;
    let ino = |bench: &Bench, path: &str| bench.dest.join(path).metadata().unwrap().ino();
    let link = |from: &str, to: &str| Op::HardLinkMade { existing: from.into(), path: to.into() };
    // Appended to: the second name grows too, and goes on when the first is gone.
    let mut items = vec![bench.entry(created(1, "log")), chunk(1, 0, 1, b"one")];
    items.push(bench.entry(published(1, "log", b"one", PublishKind::Grown)));
    items.push(bench.entry(link("log", "log.1")));
    items.push(chunk(1, 0, 2, b"one two"));
    items.push(bench.entry(published(1, "log", b"one two", PublishKind::Grown)));
    assert_eq!(bench.feed(items).await.refused, vec![]);
    assert_eq!((bench.read("log.1"), ino(&bench, "log")), (b"one two".to_vec(), ino(&bench, "log.1")));
    assert_eq!(bench.home.verify(&bench.id.run).await.unwrap().problems, vec![]);
    restart(&mut bench).await;
    let before = ino(&bench, "log.1");
    let mut items = vec![bench.entry(remove("log")), chunk(1, 0, 3, b"one two three")];
    items.push(bench.entry(published(1, "log.1", b"one two three", PublishKind::Final)));
    assert_eq!(bench.feed(items).await.refused, vec![]);
    assert_eq!((bench.read("log.1"), ino(&bench, "log.1")), (b"one two three".to_vec(), before));
    // Shown in place (no clones here, and too large to copy): the name that is left is the file.
    let mut content = vec![7; 65 * CHUNK_BYTES + 3];
    let mut items = vec![bench.entry(created(2, "a"))];
    items.extend(chunks(2, 1, &content));
    items.push(bench.entry(published(2, "a", &content, PublishKind::Snapshot)));
    items.push(bench.entry(link("a", "b")));
    items.push(bench.entry(remove("a")));
    assert_eq!(bench.feed(items).await.refused, vec![]);
    restart(&mut bench).await;
    content[0] = 8;
    let mut items = vec![chunk(2, 0, 2, &content[..CHUNK_BYTES])];
    items.push(bench.entry(published(2, "b", &content, PublishKind::Final)));
    items.push(bench.entry(rename("b", "c")));
    assert_eq!(bench.feed(items).await.refused, vec![]);
    assert!(bench.read("c") == content);
    assert_eq!(tree(&bench.dest).into_keys().collect::<Vec<_>>(), ["c", "log.1"]);
    // Moved over its other name: both stay, and are free for the next files.
    let items = vec![bench.entry(link("log.1", "again")), bench.entry(rename("log.1", "again"))];
    assert_eq!(bench.feed(items).await.refused, vec![]);
    for (file, path) in [(3, "again"), (4, "log.1")] {
        assert_eq!(bench.put(file, path, b"next").await, 0);
    }
    assert_eq!(*bench.events.lock().unwrap(), Vec::<String>::new());
    assert_eq!(bench.home.verify(&bench.id.run).await.unwrap().problems, vec![]);
    bench.home.finish(&bench.id).await.unwrap();
    assert_eq!(bench.home.lower(&bench.dest).await.unwrap().left_out, Vec::<String>::new());
}

/// Needs to mount a small tmpfs; without the right to, there is nothing to test.
#[tokio::test]
async fn pins_never_take_the_room_of_new_results() {
    let dir = super::tests::fast_dir();
    let small = dir.path().join("dest");
    std::fs::create_dir(&small).unwrap();
    let flags = nix::mount::MsFlags::empty();
    if nix::mount::mount(Some("none"), &small, Some("tmpfs"), flags, Some("size=8m")).is_err() {
        return;
    }
    let mut bench = Bench::with(dir, |begin| begin).await;
    let mut worst = (0, 0);
    for file in 1..20_u8 {
        let refused = bench.put(file.into(), "latest", &bytes(2 * CHUNK_BYTES, file)).await;
        worst = (worst.0.max(refused), worst.1.max(in_limb(&bench)));
    }
    let last = bench.read("latest") == bytes(2 * CHUNK_BYTES, 19);
    // Alone it fits, beside a pin it does not.
    let large = bench.put(30, "large", &bytes(5 * CHUNK_BYTES, 1)).await;
    drop(bench.home);
    drop(bench.journal);
    nix::mount::umount2(&small, nix::mount::MntFlags::MNT_DETACH).unwrap();
    assert_eq!((worst.0, last, large), (0, true, 0));
    assert!((1..=2).contains(&worst.1), "{} pins", worst.1);
}

#[tokio::test]
async fn attributes_outlive_a_new_publish_of_the_same_file_and_no_other() {
    let mut bench = Bench::new().await;
    let xattr = |path: &str, value: &[u8]| Op::XattrSet {
        path: path.into(),
        name: b"user.k".to_vec(),
        value: Some(value.to_vec()),
    };
    let of = |bench: &Bench, path: &str| user_xattrs(&std::fs::File::open(bench.dest.join(path)).unwrap());
    let kept = vec![(b"user.k".to_vec(), b"v".to_vec())];
    assert_eq!(bench.put(1, "f", b"one").await, 0);
    if bench.apply(xattr("f", b"v")).await == Errno::ENOTSUP as i32 {
        return;
    }
    // Rewritten.
    assert_eq!(bench.put(2, "f", b"two").await, 0);
    assert_eq!(of(&bench, "f"), kept);
    // fsynced while it is edited, set in the same batch, then closed.
    let edit = Op::Created { file: 3, path: b"f".to_vec(), mode: 0o644, base: Base::File(2) };
    let mut items = vec![bench.entry(edit), chunk(3, 0, 1, b"three")];
    items.push(bench.entry(published(3, "f", b"three", PublishKind::Snapshot)));
    items.push(bench.entry(xattr("f", b"w")));
    items.push(bench.entry(published(3, "f", b"three", PublishKind::Final)));
    assert_eq!(bench.feed(items).await.refused, vec![]);
    assert_eq!(of(&bench, "f"), [(b"user.k".to_vec(), b"w".to_vec())]);
    // Grown, and grown again in place.
    let mut items = vec![bench.entry(created(4, "f")), chunk(4, 0, 1, b"four")];
    items.push(bench.entry(published(4, "f", b"four", PublishKind::Grown)));
    items.push(chunk(4, 0, 2, b"four and more"));
    items.push(bench.entry(published(4, "f", b"four and more", PublishKind::Final)));
    assert_eq!(bench.feed(items).await.refused, vec![]);
    assert_eq!(of(&bench, "f").len(), 1);
    // The next attempt has them from home.
    let manifest = next_attempt(&mut bench).await;
    assert_eq!(manifest.node(inode(&manifest, "f")).unwrap().xattrs().count(), 1);
    assert_eq!(bench.put(1, "f", b"five").await, 0);
    assert_eq!(of(&bench, "f").len(), 1);
    // Another file that takes the name has its own.
    assert_eq!(bench.put(2, "tmp", b"six").await, 0);
    assert_eq!(bench.apply(rename("tmp", "f")).await, 0);
    assert_eq!(of(&bench, "f"), []);
}
