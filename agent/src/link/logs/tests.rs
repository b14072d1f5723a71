use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use limb_common::task;
use limb_proto::v1::logs_server::{Logs, LogsServer};
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Request, Response, Status, Streaming};

use super::*;
use crate::link::channels::ChannelFuture;
use crate::logs::LogLimits;

const BOUND: Duration = Duration::from_secs(60);

/// Home's end: stores, acknowledges, and ends every stream after some frames.
#[derive(Debug, Default)]
struct Home {
    stored: Mutex<Vec<u8>>,
    streams: AtomicUsize,
    frames: AtomicUsize,
    /// 0: never.
    cut_after_frames: usize,
}

impl Home {
    fn store(&self, frame: &LogFrame) -> Result<u64, Status> {
        let mut stored = self.stored.lock().unwrap();
        let at = usize::try_from(frame.offset).unwrap();
        if at > stored.len() {
            return Err(Status::out_of_range("a gap"));
        }
        let known = (stored.len() - at).min(frame.data.len());
        assert_eq!(stored[at..at + known], frame.data[..known], "other bytes at the same offset");
        stored.extend_from_slice(&frame.data[known..]);
        Ok(stored.len() as u64)
    }
}

struct Service(Arc<Home>);

#[tonic::async_trait]
impl Logs for Service {
    type AppendStream = Pin<Box<dyn Stream<Item = Result<LogAck, Status>> + Send>>;

    async fn append(
        &self,
        request: Request<Streaming<LogFrame>>,
    ) -> Result<Response<Self::AppendStream>, Status> {
        let home = self.0.clone();
        home.streams.fetch_add(1, Ordering::Relaxed);
        let mut seen = 0;
        let acks = request.into_inner().filter_map(move |frame| {
            let frame = match frame {
                Ok(frame) => frame,
                Err(status) => return Some(Err(status)),
            };
            seen += 1;
            home.frames.fetch_add(1, Ordering::Relaxed);
            let stored = home.store(&frame);
            if home.cut_after_frames > 0 && seen > home.cut_after_frames {
                // The bytes are stored; nobody hears of it.
                return Some(Err(Status::unavailable("cut")));
            }
            // Not every frame has its own acknowledgement.
            (seen % 3 != 0 || frame.data.len() < FRAME_BYTES)
                .then(|| stored.map(|durable_offset| LogAck { durable_offset }))
        });
        Ok(Response::new(Box::pin(acks)))
    }
}

struct Dial {
    to: SocketAddr,
    unreachable_at_first: AtomicUsize,
}

impl Channels for Dial {
    fn bulk(&self) -> ChannelFuture {
        let to = self.to;
        let refused = self
            .unreachable_at_first
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1))
            .is_ok();
        Box::pin(async move {
            let unreachable = |source| ChannelError::Unreachable { source };
            if refused {
                return Err(unreachable("not yet".into()));
            }
            let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{to}")).unwrap();
            endpoint.connect().await.map_err(|error| unreachable(error.into()))
        })
    }
}

async fn serve(home: Arc<Home>) -> (Arc<Dial>, task::Task<()>) {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let to = listener.local_addr().unwrap();
    let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
    let server = task::spawn("home", async move {
        let router = tonic::transport::Server::builder().add_service(LogsServer::new(Service(home)));
        router.serve_with_incoming(incoming).await.unwrap();
    });
    (Arc::new(Dial { to, unreachable_at_first: AtomicUsize::new(2) }), server)
}

fn numbered_lines(bytes: usize) -> Vec<u8> {
    (0..bytes / 16).flat_map(|n| format!("{n:015}\n").into_bytes()).collect()
}

#[tokio::test]
async fn ten_mebibytes_arrive_byte_for_byte() {
    let home = Arc::new(Home::default());
    let (dial, _server) = serve(home.clone()).await;
    let dir = tempfile::tempdir().unwrap();
    // Small RAM, so that the spill takes part.
    let buffer = LogBuffer::new(dir.path(), LogLimits { ram_bytes: 1 << 20, spill_bytes: 64 << 20 });
    let sender = task::spawn("logs", send_logs(dial, buffer.clone()));
    let lines = numbered_lines(10 << 20);
    crate::logs::capture(std::io::Cursor::new(lines.clone()), buffer.clone()).unwrap();
    assert_eq!(tokio::time::timeout(BOUND, sender.join()).await.unwrap(), Some(true));
    assert!(*home.stored.lock().unwrap() == lines);
    assert_eq!(buffer.flush(BOUND).await, 0);
}

#[tokio::test]
async fn cuts_neither_repeat_nor_lose_a_byte() {
    let home = Arc::new(Home { cut_after_frames: 9, ..Home::default() });
    let (dial, _server) = serve(home.clone()).await;
    let dir = tempfile::tempdir().unwrap();
    let buffer = LogBuffer::new(dir.path(), LogLimits::default());
    let sender = task::spawn("logs", send_logs(dial, buffer.clone()));
    let mut bytes = numbered_lines(3 << 20);
    // Text cut in the middle of a character, and what is no text at all.
    bytes.extend(b"\xff\x00\xe2\x96\x88\xe2\x96");
    for piece in bytes.chunks(10_007) {
        buffer.append(piece);
        tokio::task::yield_now().await;
    }
    buffer.finish();
    assert_eq!(tokio::time::timeout(BOUND, sender.join()).await.unwrap(), Some(true));
    assert!(*home.stored.lock().unwrap() == bytes);
    assert!(home.streams.load(Ordering::Relaxed) > 3);
}

#[tokio::test]
async fn tiny_writes_travel_together() {
    let home = Arc::new(Home::default());
    let (dial, _server) = serve(home.clone()).await;
    let dir = tempfile::tempdir().unwrap();
    let buffer = LogBuffer::new(dir.path(), LogLimits::default());
    let _sender = task::spawn("logs", send_logs(dial, buffer.clone()));
    for _ in 0..20_000 {
        buffer.append(b".");
    }
    buffer.finish();
    assert_eq!(buffer.flush(BOUND).await, 0);
    assert_eq!(home.stored.lock().unwrap().len(), 20_000);
    assert!(home.frames.load(Ordering::Relaxed) < 20, "{home:?}");
}

#[tokio::test]
async fn a_flush_without_home_ends_in_time_and_says_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let buffer = LogBuffer::new(dir.path(), LogLimits::default());
    buffer.append(b"12345");
    assert_eq!(buffer.flush(Duration::from_millis(20)).await, 5);
}

#[tokio::test]
async fn a_job_that_prints_nothing_needs_no_stream() {
    let home = Arc::new(Home::default());
    let (dial, _server) = serve(home.clone()).await;
    let buffer = LogBuffer::new(std::path::Path::new("/nowhere"), LogLimits::default());
    buffer.finish();
    assert!(send_logs(dial, buffer).await);
    assert_eq!(home.streams.load(Ordering::Relaxed), 0);
}
