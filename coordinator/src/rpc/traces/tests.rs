//! The service over a real connection on loopback.

use std::collections::HashMap;
use std::io::Read as _;

use limb_common::class::DataClass;
use limb_common::manifest::Inode;
use limb_common::task::Task;
use limb_proto::v1::traces_client::TracesClient;
use tonic::service::interceptor::InterceptedService;
use tonic::transport::{Channel, Server};

use super::*;
use crate::rpc::fake_desk::{FakeDesk, identity};
use crate::snapshot::{LinkPolicy, Snapshot, SnapshotRequest};

const SET: u32 = 7;
/// In the desk's map, and not traced.
const UNTRACED: u32 = 0;

struct Home {
    _dir: tempfile::TempDir,
    snapshot: Snapshot,
    desk: Arc<FakeDesk>,
    client: TracesClient<Channel>,
    _server: Task<()>,
}

async fn home() -> Home {
    let dir = tempfile::tempdir().unwrap();
    let source = dir.path().join("source");
    std::fs::create_dir(&source).unwrap();
    for name in ["a", "b", "c"] {
        std::fs::write(source.join(name), name).unwrap();
    }
    let snapshots = Snapshots::open(&dir.path().join("state")).unwrap();
    let (class, links) = (DataClass::Internal, LinkPolicy::Keep);
    let request = SnapshotRequest { source, class, copy_all: false, links };
    let snapshot = snapshots.create_async(request, |_| {}).await.unwrap();
    let sets = [SET, UNTRACED].map(|set| (SetNumber(set), snapshot.id));
    let desk = Arc::new(FakeDesk::new(HashMap::from(sets)));
    let service = TraceService::new(Arc::clone(&desk) as Arc<dyn Desk>, snapshots);
    let who = identity();
    let identify = move |mut request: Request<()>| {
        request.extensions_mut().insert(who.clone());
        Ok(request)
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let service = InterceptedService::new(service.into_server(), identify);
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    let server = limb_common::task::spawn("server", async move {
        Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap();
    });
    let client = TracesClient::connect(address).await.unwrap();
    Home { _dir: dir, snapshot, desk, client, _server: server }
}

impl Home {
    async fn record(&mut self, set: u32, frame: Vec<u8>) -> Result<(), tonic::Code> {
        let piece = move |data: &[u8]| v1::TracePiece { data: Bytes::copy_from_slice(data), set };
        let pieces: Vec<_> = frame.chunks(PIECE_BYTES).map(piece).collect();
        self.client.record(tokio_stream::iter(pieces)).await.map(drop).map_err(|status| status.code())
    }

    async fn plan(&mut self, set: u32) -> Result<Option<Vec<Touch>>, tonic::Code> {
        let mut pieces =
            self.client.plan(v1::TracePlanRequest { set }).await.map_err(|s| s.code())?.into_inner();
        let mut frame = Vec::new();
        while let Some(piece) = pieces.message().await.map_err(|status| status.code())? {
            frame.extend_from_slice(&piece.data);
        }
        Ok((!frame.is_empty()).then(|| trace::decode(&frame).unwrap()))
    }

    fn touch(&self, name: &str) -> Touch {
        Touch::new(self.snapshot.manifest.resolve(name.as_bytes()).unwrap(), 0, 0).unwrap()
    }
}

#[tokio::test]
async fn what_a_job_touched_is_its_next_plan() {
    let mut home = home().await;
    assert_eq!(home.plan(SET).await, Ok(None));
    let (a, b, c) = (home.touch("a"), home.touch("b"), home.touch("c"));
    home.record(SET, trace::encode(&[c, a.with_note(1 << 31 | 5)]).unwrap()).await.unwrap();
    home.record(SET, trace::encode(&[c, a, b]).unwrap()).await.unwrap();
    assert_eq!(home.plan(SET).await, Ok(Some(vec![c, a, b])));
    assert_eq!(home.plan(UNTRACED).await, Ok(None));
    assert_eq!(home.plan(1).await, Err(tonic::Code::PermissionDenied));
}

#[tokio::test]
async fn hostile_traces_leave_nothing_but_what_is_in_the_set() {
    let mut home = home().await;
    let code = tonic::Code::InvalidArgument;
    assert_eq!(home.record(SET, Vec::new()).await, Err(code));
    assert_eq!(home.record(SET, vec![0x28; 100]).await, Err(code));
    assert_eq!(home.record(SET, vec![0; MAX_FRAME_BYTES + 1]).await, Err(code));
    let bomb = zstd::encode_all(std::io::repeat(0).take(1 << 30), 3).unwrap();
    assert_eq!(home.record(SET, bomb).await, Err(code));
    assert_eq!(home.plan(SET).await, Ok(None));

    let a = home.touch("a");
    let touch = |inode, index| Touch::new(Inode(inode), index, u32::MAX).unwrap();
    let most = u64::from(u32::MAX);
    let hostile = [touch(0, 0), touch(1, 0), touch(most, most), touch(a.inode().0, 1), a, a];
    let frame = trace::encode(&hostile).unwrap();
    assert_eq!(home.record(UNTRACED, frame.clone()).await, Err(tonic::Code::FailedPrecondition));
    assert_eq!(home.record(1, frame.clone()).await, Err(tonic::Code::PermissionDenied));
    home.record(SET, frame.clone()).await.unwrap();
    assert_eq!(home.plan(SET).await, Ok(Some(vec![a])));

    home.desk.live.store(false, std::sync::atomic::Ordering::Relaxed);
    assert_eq!(home.record(SET, frame).await, Err(tonic::Code::PermissionDenied));
}
