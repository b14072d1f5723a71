//! Everything of the read side together: kernel, mount, fetcher and gRPC on loopback, over a
//! link that is cut again and again.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/fake_chunks.rs"]
mod fake_chunks;
#[path = "support/memory.rs"]
mod memory;
#[path = "support/mounted.rs"]
mod mounted;

use std::sync::Arc;

use fake_chunks::{Mood, State};
use limb_agent::link::chunks::{ChunkPatience, GrpcChunks};
use limb_common::chunk::CHUNK_BYTES;
use memory::{SetBuilder, noise};
use mounted::{Mounted, cannot_mount};
use tokio_util::sync::CancellationToken;

#[test]
fn files_are_whole_over_a_link_that_is_cut_again_and_again() {
    if cannot_mount("files_are_whole_over_a_link_that_is_cut_again_and_again") {
        return;
    }
    let mut set = SetBuilder::new();
    for number in 0..4_u64 {
        set.file(set.root(), number.to_string().as_bytes(), noise(number, 8 * CHUNK_BYTES + 333));
    }
    set.file(set.root(), b"tiny", noise(9, 5));
    let server_runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let mut state = None;
    let mut server = None;
    let mount = Mounted::over(set, 64 << 20, |home| {
        let chunks = home
            .chunks()
            .iter()
            .map(|((inode, index), bytes)| ((0, inode.0, *index), bytes.clone()))
            .collect();
        let cuts = (0..12).map(|cut| Mood::CutAfter(3 + cut * 5)).collect();
        let made = Arc::new(State { chunks, moods: std::sync::Mutex::new(cuts), ..State::default() });
        state = Some(Arc::clone(&made));
        let (channels, task) = server_runtime.block_on(fake_chunks::start(made, 1));
        server = Some(task);
        Arc::new(GrpcChunks::new(Arc::new(channels), ChunkPatience::default(), CancellationToken::new()))
    });
    std::thread::scope(|scope| {
        for number in 0..4_u64 {
            let path = mount.path(number.to_string());
            scope.spawn(move || {
                assert!(std::fs::read(path).unwrap() == noise(number, 8 * CHUNK_BYTES + 333));
            });
        }
    });
    assert_eq!(std::fs::read(mount.path("tiny")).unwrap(), noise(9, 5));
    assert!(*state.unwrap().streams.lock().unwrap() >= 4, "the link was cut");
    assert_eq!(*mount.problems.lock().unwrap(), []);
    drop(mount);
    drop(server);
    server_runtime.shutdown_background();
}
