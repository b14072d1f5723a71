//! Access traces over real gRPC on loopback, with a home that misbehaves.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "support/memory.rs"]
mod memory;

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use limb_agent::link::channels::{ChannelError, ChannelFuture, Channels};
use limb_agent::link::traces::{Outgoing, plan};
use limb_agent::trace::{SetTrace, TouchBudget};
use limb_common::assignment::SetNumber;
use limb_common::manifest::Inode;
use limb_common::task::Task;
use limb_common::trace::{self, MAX_FRAME_BYTES, Touch};
use limb_proto::v1;
use limb_proto::v1::traces_server::{Traces, TracesServer};
use memory::SetBuilder;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_stream::Stream;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, Streaming};

const BOUND: Duration = Duration::from_secs(20);
const SET: SetNumber = SetNumber(3);

type Pieces = Vec<Result<v1::TracePiece, Status>>;

#[derive(Default)]
struct State {
    /// Answers to the question for a plan, from the front.
    plans: Mutex<VecDeque<Result<Pieces, Status>>>,
    /// What was sent: set and number of touches.
    recorded: watch::Sender<Vec<(u32, usize)>>,
    refusals: Mutex<usize>,
}

#[derive(Clone)]
struct FakeTraces(Arc<State>);

#[tonic::async_trait]
impl Traces for FakeTraces {
    type PlanStream = Pin<Box<dyn Stream<Item = Result<v1::TracePiece, Status>> + Send>>;

    async fn plan(&self, _: Request<v1::TracePlanRequest>) -> Result<Response<Self::PlanStream>, Status> {
        let answer = self.0.plans.lock().unwrap().pop_front().expect("one question more than expected");
        Ok(Response::new(Box::pin(tokio_stream::iter(answer?))))
    }

    async fn record(
        &self,
        request: Request<Streaming<v1::TracePiece>>,
    ) -> Result<Response<v1::TraceRecorded>, Status> {
        let (mut pieces, mut frame, mut set) = (request.into_inner(), Vec::new(), None);
        while let Some(piece) = pieces.message().await? {
            set.get_or_insert(piece.set);
            frame.extend_from_slice(&piece.data);
        }
        {
            let mut left = self.0.refusals.lock().unwrap();
            if *left > 0 {
                *left -= 1;
                return Err(Status::unavailable("not now"));
            }
        }
        let touches = trace::decode(&frame).unwrap().len();
        self.0.recorded.send_modify(|all| all.push((set.unwrap(), touches)));
        Ok(Response::new(v1::TraceRecorded {}))
    }
}

struct Loopback(SocketAddr);

impl Channels for Loopback {
    fn bulk(&self) -> ChannelFuture {
        let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{}", self.0)).unwrap();
        let unreachable = |error| ChannelError::Unreachable { source: Box::new(error) };
        Box::pin(async move { endpoint.connect().await.map_err(unreachable) })
    }
}

async fn start() -> (Arc<State>, Loopback, Task<()>) {
    let state: Arc<State> = Arc::default();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let server = tonic::transport::Server::builder()
        .add_service(TracesServer::new(FakeTraces(Arc::clone(&state))))
        .serve_with_incoming(TcpListenerStream::new(listener));
    let task = limb_common::task::spawn("fake home", async move { server.await.unwrap() });
    (state, Loopback(address), task)
}

fn piece(data: impl Into<Bytes>) -> Result<v1::TracePiece, Status> {
    Ok(v1::TracePiece { data: data.into(), set: 0 })
}

#[tokio::test]
async fn a_plan_comes_over_cuts_and_nonsense_is_no_plan() {
    let (state, channels, _server) = start().await;
    let touches: Vec<_> = (1..2000).map(|inode| Touch::new(Inode(inode), inode % 7, 0).unwrap()).collect();
    let frame = trace::encode(&touches).unwrap();
    let (front, back) = frame.split_at(100);
    let cut = || Status::unavailable("cut");
    let asked = |answers: Vec<Result<Pieces, Status>>| {
        *state.plans.lock().unwrap() = answers.into();
        tokio::time::timeout(BOUND, plan(&channels, SET))
    };
    let whole = || Ok(vec![piece(front.to_vec()), piece(back.to_vec())]);
    assert_eq!(asked(vec![whole()]).await.unwrap(), touches);
    let late = vec![Err(cut()), Ok(vec![piece(front.to_vec()), Err(cut())]), whole()];
    assert_eq!(asked(late).await.unwrap(), touches);
    let too_much = (0..MAX_FRAME_BYTES / (256 << 10) + 1).map(|_| piece(vec![0; 256 << 10])).collect();
    for nonsense in [
        Ok(vec![]),
        Ok(vec![piece(front.to_vec())]),
        Ok(vec![piece(b"nonsense".as_slice())]),
        Ok(too_much),
        Err(Status::permission_denied("refused")),
        Err(Status::unimplemented("an older home")),
    ] {
        assert_eq!(asked(vec![nonsense]).await.unwrap(), []);
    }
}

#[tokio::test]
async fn what_was_touched_goes_home_before_the_end_and_again_when_it_has_grown() {
    let (state, channels, _server) = start().await;
    let mut set = SetBuilder::new();
    for number in 0..100_u64 {
        set.file(set.root(), format!("{number:03}").as_bytes(), vec![7; 10]);
    }
    let (manifest, ..) = set.finish();
    let trace = Arc::new(SetTrace::new(SET, manifest, Arc::new(TouchBudget::of(60))));
    let outgoing = Outgoing::default();
    outgoing.add(Arc::clone(&trace));
    let touch = |files: std::ops::Range<u64>| {
        files.for_each(|file| assert!(!trace.touch(Inode(2 + file), 0, false, true)))
    };
    let mut recorded = state.recorded.subscribe();
    let mut sent = async |count: usize| {
        let sending = outgoing.keep_sending(&channels, Duration::from_millis(5));
        let heard = tokio::time::timeout(BOUND, recorded.wait_for(|all| all.len() >= count));
        tokio::select! {
            () = sending => unreachable!(),
            all = heard => all.unwrap().unwrap().clone(),
        }
    };
    *state.refusals.lock().unwrap() = 2;
    touch(0..20);
    assert_eq!(sent(1).await, [(SET.0, 20)]);
    // A quarter more, and one: four alone would not have been enough.
    touch(0..25);
    outgoing.send_all(&channels).await;
    outgoing.send_all(&channels).await;
    assert_eq!(*state.recorded.borrow(), [(SET.0, 20), (SET.0, 25)]);
    touch(25..30);
    touch(30..99);
    assert_eq!(sent(3).await[2], (SET.0, 60), "the budget is sixty");
    assert_eq!(trace.figures().touches, 99);
}
