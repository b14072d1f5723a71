//! The fetcher over a home in memory that misbehaves to order.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/memory.rs"]
mod memory;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use limb_agent::fetch::{
    ChunkAddress, ChunkSource as _, FetchError, Fetcher, FetcherLimits, Priority, TransportError,
};
use limb_common::assignment::SetNumber;
use limb_common::chunk::{CHUNK_BYTES, ChunkId};
use limb_common::manifest::{ChunkRef, Inode, Manifest};
use memory::{Fault, Home, SetBuilder, noise};
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

struct Setup {
    home: Home,
    fetcher: Fetcher,
    file: Inode,
    manifest: Manifest,
    stop: CancellationToken,
    bytes: Vec<u8>,
}

/// One file of so many chunks, and a budget of so many in flight.
fn setup(chunks: usize, in_flight_chunks: u64) -> Setup {
    let mut set = SetBuilder::new();
    let bytes = noise(1, chunks * CHUNK_BYTES - 5);
    let draft = set.file(set.root(), b"f", bytes.clone());
    let (manifest, order, home) = set.finish();
    let home = Home(Arc::new(home));
    let stop = CancellationToken::new();
    let limits =
        FetcherLimits { cache_bytes: 64 << 20, in_flight_bytes: in_flight_chunks * CHUNK_BYTES as u64 };
    let fetcher = Fetcher::new(Arc::new(home.clone()), limits, Handle::current(), &stop);
    Setup { home, fetcher, file: order.inode(draft), manifest, stop, bytes }
}

impl Setup {
    fn chunk(&self, index: u64) -> (ChunkAddress, ChunkId) {
        let Some(ChunkRef::Data(id)) = self.manifest.node(self.file).unwrap().chunk(index) else {
            panic!("chunk {index} is a hole")
        };
        (ChunkAddress::Set { set: SetNumber(0), inode: self.file, index }, id)
    }

    async fn fetch(&self, index: u64, priority: Priority) -> Result<(), FetchError> {
        let (address, id) = self.chunk(index);
        let chunk = self.fetcher.fetch(address, id, priority).await?;
        let from = usize::try_from(index).unwrap() * CHUNK_BYTES;
        assert_eq!(chunk.bytes()[..], self.bytes[from..(from + CHUNK_BYTES).min(self.bytes.len())]);
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_chunk_is_on_its_way_once_however_many_ask() {
    let setup = setup(2, 32);
    setup.home.stalled.send_replace(true);
    let (address, id) = setup.chunk(0);
    let asks: Vec<_> = (0..64).map(|_| setup.fetcher.fetch(address, id, Priority::Demand)).collect();
    setup.home.asked.subscribe().wait_for(|asked| !asked.is_empty()).await.unwrap();
    setup.home.stalled.send_replace(false);
    for ask in asks {
        assert_eq!(ask.await.unwrap().id(), id);
    }
    assert_eq!(setup.home.asks(), 1);
    setup.fetch(0, Priority::Demand).await.unwrap();
    assert!(setup.fetcher.cached(&id).is_some());
    assert_eq!(setup.home.asks(), 1);
    assert_eq!(setup.fetcher.stats().fetched_chunks, 1);
    assert_eq!(setup.fetcher.stats().in_flight_bytes, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_ahead_keeps_to_its_budget_and_demand_passes_it() {
    let setup = setup(40, 4);
    setup.home.stalled.send_replace(true);
    for index in 0..20 {
        let (address, id) = setup.chunk(index);
        setup.fetcher.prefetch(address, id, Priority::ReadAhead);
    }
    let mut asked = setup.home.asked.subscribe();
    asked.wait_for(|asked| asked.len() == 4).await.unwrap();
    // One that waits is demanded now, and one that nobody thought of.
    let (address, id) = setup.chunk(19);
    let raised = setup.fetcher.fetch(address, id, Priority::Demand);
    let (address, id) = setup.chunk(30);
    let fresh = setup.fetcher.fetch(address, id, Priority::Demand);
    asked.wait_for(|asked| asked.len() == 6).await.unwrap();
    let late = setup.home.asked.borrow()[4..].iter().map(|ask| (ask.1, ask.2)).collect::<Vec<_>>();
    assert!(late.contains(&(19, Priority::Demand)) && late.contains(&(30, Priority::Demand)), "{late:?}");
    assert_eq!(setup.fetcher.stats().in_flight_bytes, 6 * CHUNK_BYTES as u64);
    setup.home.stalled.send_replace(false);
    raised.await.unwrap();
    fresh.await.unwrap();
    // The rest follows by itself, each once, never more than the budget and the two.
    asked.wait_for(|asked| asked.len() == 21).await.unwrap();
    assert!(setup.home.most_in_flight() <= 6);
    assert!(setup.home.counts().values().all(|&count| count == 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_priority_of_what_is_on_its_way_rises() {
    let setup = setup(2, 32);
    setup.home.stalled.send_replace(true);
    let (address, id) = setup.chunk(0);
    setup.fetcher.prefetch(address, id, Priority::Background);
    setup.home.asked.subscribe().wait_for(|asked| asked.len() == 1).await.unwrap();
    let demanded = setup.fetcher.fetch(address, id, Priority::Demand);
    setup.home.stalled.send_replace(false);
    demanded.await.unwrap();
    assert_eq!(setup.home.asks(), 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_bytes_are_asked_for_again_and_then_refused() {
    let setup = setup(4, 32);
    setup.home.spoil(setup.file, 0, vec![Fault::FlipByte, Fault::Short]);
    setup.fetch(0, Priority::Demand).await.unwrap();
    assert_eq!(setup.home.asks(), 3);
    assert_eq!(setup.fetcher.stats().mismatches, 2);

    let garbled = Fault::Fail(TransportError::Garbled { detail: "too long".to_owned() });
    setup.home.spoil(setup.file, 1, vec![Fault::FlipByte, garbled, Fault::Short]);
    let refused = setup.fetch(1, Priority::Demand).await.unwrap_err();
    assert!(matches!(refused, FetchError::Corrupt { .. }), "{refused:?}");
    assert!(setup.fetcher.cached(&setup.chunk(1).1).is_none());
    // The next reader gets another chance.
    setup.fetch(1, Priority::Demand).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_home_says_is_passed_on() {
    let setup = setup(4, 32);
    let changed = TransportError::SourceChanged { detail: "size 5, was 7".to_owned() };
    setup.home.spoil(setup.file, 0, vec![Fault::Fail(changed)]);
    let said = setup.fetch(0, Priority::Demand).await.unwrap_err();
    assert_eq!(said, FetchError::SourceChanged { detail: "size 5, was 7".to_owned() });
    assert_eq!(setup.home.asks(), 1);

    let broken = || Fault::Fail(TransportError::Io { detail: "bad sector".to_owned() });
    setup.home.spoil(setup.file, 1, vec![broken(), broken()]);
    setup.fetch(1, Priority::Demand).await.unwrap();
    setup.home.spoil(setup.file, 2, vec![broken(), broken(), broken()]);
    let said = setup.fetch(2, Priority::Demand).await.unwrap_err();
    assert_eq!(said, FetchError::Io { detail: "bad sector".to_owned() });

    setup.home.spoil(setup.file, 3, vec![Fault::Panic]);
    assert!(matches!(setup.fetch(3, Priority::Demand).await, Err(FetchError::Io { .. })));
    setup.fetch(3, Priority::Demand).await.unwrap();
    assert_eq!(setup.fetcher.stats().in_flight_bytes, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn closing_ends_every_wait() {
    let setup = setup(20, 2);
    setup.home.stalled.send_replace(true);
    let waits: Vec<_> = (0..20)
        .map(|index| {
            let (address, id) = setup.chunk(index);
            let priority = if index < 4 { Priority::Demand } else { Priority::ReadAhead };
            setup.fetcher.fetch(address, id, priority)
        })
        .collect();
    setup.stop.cancel();
    for wait in waits {
        assert_eq!(wait.await, Err(FetchError::Closed));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_part_is_fetched_alone_verified_kept_and_shared() {
    let setup = setup(3, 32);
    let (address, id) = setup.chunk(0);
    let slice = |range: std::ops::Range<usize>| setup.fetcher.fetch_slice(address, id, range);
    let own = |range: std::ops::Range<usize>| setup.home.chunks()[&(setup.file, 0)].slice(range);
    let (one, same) = tokio::join!(slice(70_000..74_096), slice(70_000..74_096));
    assert_eq!(one.unwrap().bytes(), &own(70_000..74_096));
    assert_eq!(same.unwrap().bytes(), &own(70_000..74_096));
    // One group, once; what lies in it comes from memory.
    assert_eq!(setup.home.part_bytes.load(Ordering::SeqCst), 1 << 14);
    assert_eq!(setup.fetcher.cached_slice(&id, 65_536..80_000).unwrap().bytes(), &own(65_536..80_000));
    assert!(setup.fetcher.cached_slice(&id, 65_535..65_540).is_none());
    assert_eq!(setup.home.asks(), 0);

    // A flipped byte and a short proof are asked for again, then refused.
    setup.home.spoil(setup.file, 0, vec![Fault::FlipByte, Fault::Short]);
    assert_eq!(slice(0..10).await.unwrap().bytes(), &own(0..10));
    setup.home.spoil(setup.file, 0, vec![Fault::FlipByte, Fault::Short, Fault::FlipByte]);
    let refused = slice(200_000..200_010).await.unwrap_err();
    assert!(matches!(refused, FetchError::Corrupt { .. }), "{refused:?}");
    assert_eq!(setup.fetcher.stats().in_flight_bytes, 0);

    // Where the whole chunk is on its way, or all of it is asked for, that is waited for.
    let before = setup.home.part_bytes.load(Ordering::SeqCst);
    setup.home.stalled.send_replace(true);
    let (address, id) = setup.chunk(1);
    setup.fetcher.prefetch(address, id, Priority::ReadAhead);
    let part = setup.fetcher.fetch_slice(address, id, 5..9);
    setup.home.stalled.send_replace(false);
    assert_eq!(part.await.unwrap().bytes(), &setup.home.chunks()[&(setup.file, 1)].slice(5..9));
    let (address, id) = setup.chunk(2);
    setup.fetcher.fetch_slice(address, id, 0..id.len as usize).await.unwrap();
    assert_eq!((setup.home.asks(), setup.home.part_bytes.load(Ordering::SeqCst)), (2, before));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_part_that_lands_makes_room_for_what_waits() {
    let setup = setup(3, 1);
    setup.home.stalled.send_replace(true);
    let (address, id) = setup.chunk(0);
    let part = setup.fetcher.fetch_slice(address, id, 0..10);
    let (address, id) = setup.chunk(1);
    let ahead = setup.fetcher.fetch(address, id, Priority::ReadAhead);
    assert_eq!(setup.home.asks(), 0, "the part and a chunk are more than the budget");
    setup.home.stalled.send_replace(false);
    part.await.unwrap();
    tokio::time::timeout(Duration::from_secs(20), ahead).await.expect("it is never started").unwrap();
    assert_eq!(setup.fetcher.stats().in_flight_bytes, 0);
}

#[test]
fn who_asks_while_the_runtime_ends_is_told_so() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    let setup = runtime.block_on(async { setup(2, 32) });
    runtime.shutdown_timeout(Duration::from_secs(20));
    let (address, id) = setup.chunk(0);
    let (tell, told) = std::sync::mpsc::channel();
    // On a thread of its own: it must not hold up the test for ever.
    std::thread::spawn(move || {
        let asked = [setup.fetcher.fetch_slice(address, id, 0..10)];
        let asked = asked.into_iter().chain([setup.fetcher.fetch_slice(address, id, 0..id.len as usize)]);
        let other = tokio::runtime::Builder::new_current_thread().build().unwrap();
        for slice in asked {
            tell.send(other.block_on(slice).map(drop)).unwrap();
        }
    });
    for _ in 0..2 {
        let answer = told.recv_timeout(Duration::from_secs(20)).expect("an answer");
        assert!(matches!(answer, Err(FetchError::Io { .. } | FetchError::Closed)), "{answer:?}");
    }
}
