//! Chunks and manifests over real gRPC on loopback, with cuts, silence and lies.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/fake_chunks.rs"]
mod fake_chunks;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fake_chunks::{Mood, State, start};
use limb_agent::fetch::{Ask, ChunkAddress, ChunkTransport as _, Priority, TransportError};
use limb_agent::link::chunks::{ChunkPatience, GrpcChunks, ManifestFetchError, fetch_manifest};
use limb_common::assignment::{SetNumber, SetSpec};
use limb_common::id::Digest;
use limb_common::manifest::{Inode, ManifestBuilder, NewNode, NodeMeta, ROOT};
use limb_proto::v1;
use limb_proto::v1::fetch_request::What;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

const LEN: usize = 1 << 20;
const SOON: ChunkPatience = ChunkPatience { stream: Duration::from_millis(400) };

fn bytes_of(index: u64) -> Bytes {
    let mut out = vec![0; LEN];
    blake3::Hasher::new().update(&index.to_le_bytes()).finalize_xof().fill(&mut out);
    out.into()
}

fn home(chunks: u64, moods: &[Mood]) -> Arc<State> {
    let state = State {
        chunks: (0..chunks).map(|index| ((3, 7, index), bytes_of(index))).collect(),
        moods: std::sync::Mutex::new(moods.iter().copied().collect()),
        ..State::default()
    };
    Arc::new(state)
}

fn ask(index: u64, priority: &watch::Sender<Priority>) -> Ask {
    let address = ChunkAddress::Set { set: SetNumber(3), inode: Inode(7), index };
    Ask { address, len: u32::try_from(LEN).unwrap(), priority: priority.subscribe() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_chunks_arrive_over_few_streams() {
    let state = home(24, &[]);
    let (channels, _server) = start(Arc::clone(&state), 0).await;
    let link = GrpcChunks::new(Arc::new(channels), ChunkPatience::default(), CancellationToken::new());
    let demand = watch::Sender::new(Priority::Demand);
    let all = futures_util::future::join_all((0..24).map(|index| link.fetch(ask(index, &demand)))).await;
    for (index, answer) in (0..).zip(all) {
        assert_eq!(answer.unwrap(), bytes_of(index));
    }
    let streams = *state.streams.lock().unwrap();
    assert!((1..=4).contains(&streams), "{streams} streams");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cuts_refusals_and_silence_only_cost_time() {
    let state = home(12, &[Mood::CutAfter(5), Mood::Mute, Mood::CutAfter(0), Mood::CutAfter(9)]);
    let (channels, _server) = start(Arc::clone(&state), 2).await;
    let link = GrpcChunks::new(Arc::new(channels), SOON, CancellationToken::new());
    let demand = watch::Sender::new(Priority::Demand);
    let all = futures_util::future::join_all((0..12).map(|index| link.fetch(ask(index, &demand)))).await;
    for (index, answer) in (0..).zip(all) {
        assert_eq!(answer.unwrap(), bytes_of(index));
    }
    let streams = *state.streams.lock().unwrap();
    assert!(streams >= 4, "{streams} streams, so that nothing went wrong");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_home_refuses_is_said_and_too_many_bytes_are_not_kept() {
    let state = home(3, &[Mood::TooMuch; 8]);
    let changed = (v1::fetch_failure::Kind::SourceChanged, "mtime differs".to_owned());
    state.failures.lock().unwrap().insert((3, 7, 1), changed);
    let (channels, _server) = start(Arc::clone(&state), 0).await;
    let link = GrpcChunks::new(Arc::new(channels), ChunkPatience::default(), CancellationToken::new());
    let demand = watch::Sender::new(Priority::Demand);
    assert!(matches!(link.fetch(ask(0, &demand)).await, Err(TransportError::Garbled { .. })));
    let changed = link.fetch(ask(1, &demand)).await;
    assert_eq!(changed, Err(TransportError::SourceChanged { detail: "mtime differs".to_owned() }));
    assert_eq!(link.fetch(ask(99, &demand)).await, Err(TransportError::NotFound));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_raise_is_said_and_a_drop_cancels() {
    let state = home(3, &[Mood::Mute; 8]);
    let (channels, _server) = start(Arc::clone(&state), 0).await;
    let stop = CancellationToken::new();
    let link = GrpcChunks::new(Arc::new(channels), ChunkPatience::default(), stop.clone());
    let priority = watch::Sender::new(Priority::ReadAhead);
    let mut requests = state.requests.subscribe();
    let raised = limb_common::task::spawn("raised", link.fetch(ask(0, &priority)));
    let first = requests.wait_for(|all| all.len() == 1).await.unwrap()[0].1.clone();
    assert_eq!(first.priority, 1);
    priority.send_replace(Priority::Demand);
    let said = requests.wait_for(|all| all.len() == 2).await.unwrap()[1].1.clone();
    assert_eq!((said.id, said.priority, said.what), (first.id, 0, Some(What::Raise(true))));
    drop(raised);
    let last = requests.wait_for(|all| all.len() == 3).await.unwrap()[2].1.clone();
    assert_eq!((last.id, last.what), (first.id, Some(What::Cancel(true))));

    let waiting = limb_common::task::spawn("waiting", link.fetch(ask(1, &priority)));
    requests.wait_for(|all| all.len() == 4).await.unwrap();
    stop.cancel();
    assert_eq!(waiting.join().await, Some(Err(TransportError::Closed)));
}

/// A manifest, and its compressed bytes in small pieces.
fn manifest() -> (SetSpec, Vec<Bytes>) {
    let mut builder = ManifestBuilder::new(NodeMeta { mode: 0o755, ..NodeMeta::default() });
    for number in 0..3000 {
        let node = NewNode::Symlink { target: format!("target {number}").into_bytes() };
        builder.add(builder.root(), format!("name {number}").as_bytes(), node, NodeMeta::default()).unwrap();
    }
    let (bytes, _) = builder.finish();
    let spec =
        SetSpec { set: SetNumber(3), manifest_id: Digest::of(&bytes), manifest_bytes: bytes.len() as u64 };
    let packed = zstd::encode_all(&bytes[..], 1).unwrap();
    (spec, packed.chunks(1000).map(Bytes::copy_from_slice).collect())
}

async fn ask_manifest(
    spec: &SetSpec,
    answers: Vec<Result<Vec<Bytes>, tonic::Status>>,
) -> Result<limb_common::manifest::Manifest, ManifestFetchError> {
    let state = home(0, &[]);
    *state.manifests.lock().unwrap() = answers.into();
    let (channels, _server) = start(state, 1).await;
    fetch_manifest(&channels, spec, &CancellationToken::new()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_manifest_arrives_over_cuts_and_is_sealed() {
    let (spec, pieces) = manifest();
    // An empty last piece stands for a cut.
    let cut: Vec<_> = pieces[..3].iter().cloned().chain([Bytes::new()]).collect();
    let ended_early = pieces[..2].to_vec();
    let opened = ask_manifest(&spec, vec![Ok(cut), Ok(ended_early), Ok(pieces)]).await.unwrap();
    assert_eq!(opened.id(), spec.manifest_id);
    let child = opened.lookup(ROOT, b"name 77").unwrap();
    assert_eq!(opened.node(child).unwrap().target(), Some(b"target 77".as_slice()));
    let other = opened.clone();
    drop(opened);
    assert_eq!(other.inode_count(), 3001);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_manifest_that_is_another_or_swells_is_refused() {
    let (spec, pieces) = manifest();
    let other = SetSpec { manifest_id: Digest([9; 32]), ..spec.clone() };
    let refused = ask_manifest(&other, vec![Ok(pieces.clone())]).await.unwrap_err();
    assert!(matches!(refused, ManifestFetchError::Corrupt { .. }), "{refused:?}");

    let bomb = zstd::encode_all(&vec![0_u8; 64 << 20][..], 1).unwrap();
    let refused = ask_manifest(&spec, vec![Ok(vec![bomb.into()])]).await.unwrap_err();
    assert!(
        matches!(&refused, ManifestFetchError::Corrupt { detail } if detail.contains("longer")),
        "{refused:?}"
    );

    let garbage = Bytes::from_static(b"no zstd at all");
    let refused = ask_manifest(&spec, vec![Ok(vec![garbage])]).await.unwrap_err();
    assert!(matches!(refused, ManifestFetchError::Corrupt { .. }), "{refused:?}");

    let missing = ask_manifest(&spec, vec![Err(tonic::Status::not_found("unknown or forbidden"))]).await;
    assert!(matches!(missing, Err(ManifestFetchError::NotFound)));
}

fn lines(seed: u64) -> Bytes {
    let lines: String =
        (0..60_000).map(|n| format!("{seed} step {n}: loss 0.{}\n", n * 7919 % 9973)).collect();
    Bytes::from(lines).slice(..LEN)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_far_home_is_asked_for_encodings_and_a_near_one_is_not() {
    for (round_trip, far) in [(Duration::from_millis(40), true), (Duration::from_micros(200), false)] {
        let mut state = Arc::into_inner(home(6, &[])).unwrap();
        // Every other one compresses.
        state.chunks.extend((0..3).map(|index| ((3, 7, 2 * index), lines(index))));
        let state = Arc::new(state);
        let (mut channels, _server) = start(Arc::clone(&state), 0).await;
        channels.round_trip = Some(round_trip);
        let link = GrpcChunks::new(Arc::new(channels), ChunkPatience::default(), CancellationToken::new());
        let ahead = watch::Sender::new(Priority::ReadAhead);
        // The first opening may carry asks from before anything was measured.
        link.fetch(ask(0, &ahead)).await.unwrap();
        for index in 0..6 {
            assert_eq!(link.fetch(ask(index, &ahead)).await.unwrap(), state.chunks[&(3, 7, index)]);
        }
        let asked: Vec<_> = state.requests.borrow().iter().skip(1).map(|(_, one)| one.encoded).collect();
        assert_eq!(asked, [far; 6], "{round_trip:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_encoded_answer_that_is_not_the_chunk_is_garbled() {
    // Whichever stream it is asked on.
    let state = home(1, &[Mood::Bomb; 8]);
    let (channels, _server) = start(state, 0).await;
    let link = GrpcChunks::new(Arc::new(channels), ChunkPatience::default(), CancellationToken::new());
    let demand = watch::Sender::new(Priority::Demand);
    let error = link.fetch(ask(0, &demand)).await.unwrap_err();
    assert!(matches!(error, TransportError::Garbled { .. }), "{error:?}");
}
