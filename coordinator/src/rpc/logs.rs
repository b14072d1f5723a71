//! Service `Logs`: what a job prints, into [`crate::logs`]. Which attempt's log it is comes from
//! the certificate alone.

use std::sync::Arc;

use futures_util::{FutureExt as _, StreamExt as _};
use limb_proto::v1;
use limb_proto::v1::logs_server::LogsServer;
use tonic::{Request, Response, Status, Streaming};

use super::caller;
use super::desk::Desk;
use super::worked::{Liveness, Out, Worked, check_live};
use crate::logs::{LogError, LogFile, Logs};

/// Frames that one fdatasync covers, if they are there already.
const BATCH_BYTES: usize = 1 << 20;
/// Acknowledgements that wait for the transport. Each replaces those before it.
const ACKS: usize = 4;

/// The service's implementation.
#[derive(Clone)]
pub struct LogService {
    desk: Arc<dyn Desk>,
    logs: Logs,
}

impl std::fmt::Debug for LogService {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LogService").field("logs", &self.logs).finish_non_exhaustive()
    }
}

impl LogService {
    #[must_use]
    pub fn new(desk: Arc<dyn Desk>, logs: Logs) -> Self {
        Self { desk, logs }
    }

    /// With the limits that belong to it.
    #[must_use]
    pub fn into_server(self) -> LogsServer<Self> {
        LogsServer::new(self).max_decoding_message_size(limb_common::wire::MAX_MESSAGE_BYTES)
    }
}

#[tonic::async_trait]
impl v1::logs_server::Logs for LogService {
    type AppendStream = Worked<v1::LogAck>;

    async fn append(
        &self,
        request: Request<Streaming<v1::LogFrame>>,
    ) -> Result<Response<Self::AppendStream>, Status> {
        let who = caller(&request)?;
        check_live(self.desk.as_ref(), &who)?;
        let logs = self.logs.clone();
        let (run, attempt) = (who.run.clone(), who.attempt);
        let log = blocking(move || logs.attempt(&run, attempt)).await?;
        let (liveness, frames) = (Liveness::new(Arc::clone(&self.desk), who), request.into_inner());
        Ok(Response::new(Worked::start("log", ACKS, |out| take(liveness, log, frames, out))))
    }
}

async fn take(
    mut liveness: Liveness,
    log: Arc<LogFile>,
    mut frames: Streaming<v1::LogFrame>,
    out: Out<v1::LogAck>,
) -> Result<(), Status> {
    loop {
        let first = tokio::select! {
            live = liveness.look() => {
                live?;
                continue;
            }
            frame = frames.next() => match frame {
                Some(frame) => frame?,
                None => return Ok(()),
            },
        };
        let mut bytes = first.data.len();
        let mut batch = vec![first];
        let mut ended = None;
        while bytes < BATCH_BYTES && ended.is_none() {
            match frames.next().now_or_never() {
                Some(Some(Ok(frame))) => {
                    bytes += frame.data.len();
                    batch.push(frame);
                }
                Some(Some(Err(status))) => ended = Some(Err(status)),
                Some(None) => ended = Some(Ok(())),
                None => break,
            }
        }
        let writing = Arc::clone(&log);
        let (durable_offset, refused) = blocking(move || {
            let refused = batch.iter().find_map(|frame| writing.append(frame.offset, &frame.data).err());
            // What came before a refused frame is durable and acknowledged all the same.
            Ok((writing.sync()?, refused))
        })
        .await?;
        if out.send(Ok(v1::LogAck { durable_offset })).await.is_err() {
            return Ok(());
        }
        if let Some(error) = refused {
            return Err(status_of(&error));
        }
        if let Some(end) = ended {
            return end;
        }
    }
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, LogError> + Send + 'static,
) -> Result<T, Status> {
    tokio::task::spawn_blocking(work)
        .await
        .map_err(|join| Status::internal(join.to_string()))?
        .map_err(|error| status_of(&error))
}

fn status_of(error: &LogError) -> Status {
    match error {
        LogError::Io { path, source } => {
            tracing::error!(path = %path.display(), %source, "a log cannot be written");
            // Paths of home are none of the box's business.
            Status::unavailable("home could not store the log")
        }
        LogError::Gap { .. } => Status::out_of_range(error.to_string()),
        LogError::Closed => Status::permission_denied(error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;
    use std::sync::atomic::Ordering;

    use limb_common::identity::AgentIdentity;
    use limb_common::task::Task;
    use limb_proto::v1::logs_client::LogsClient;
    use tokio::sync::mpsc;
    use tokio_stream::wrappers::ReceiverStream;
    use tonic::service::interceptor::InterceptedService;
    use tonic::transport::{Channel, Server};

    use super::super::fake_desk::{FakeDesk, identity};
    use super::*;

    struct Home {
        dir: tempfile::TempDir,
        who: AgentIdentity,
        desk: Arc<FakeDesk>,
        logs: Logs,
        client: LogsClient<Channel>,
        _server: Task<()>,
    }

    async fn start() -> Home {
        let dir = tempfile::tempdir().unwrap();
        let (who, desk) = (identity(), Arc::new(FakeDesk::new(HashMap::new())));
        let logs = Logs::open(dir.path());
        let caller = who.clone();
        let identify = move |mut request: Request<()>| {
            request.extensions_mut().insert(caller.clone());
            Ok(request)
        };
        let service = LogService::new(Arc::clone(&desk) as Arc<dyn Desk>, logs.clone());
        let service = InterceptedService::new(service.into_server(), identify);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("http://{}", listener.local_addr().unwrap());
        let incoming = tokio_stream::wrappers::TcpListenerStream::new(listener);
        let server = limb_common::task::spawn("server", async move {
            Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap();
        });
        let client = LogsClient::connect(address).await.unwrap();
        Home { dir, who, desk, logs, client, _server: server }
    }

    struct Appender {
        frames: mpsc::Sender<v1::LogFrame>,
        acks: Streaming<v1::LogAck>,
    }

    impl Appender {
        async fn open(home: &mut Home) -> Result<Self, Status> {
            let (frames, sent) = mpsc::channel(16);
            let acks = home.client.append(ReceiverStream::new(sent)).await?.into_inner();
            Ok(Self { frames, acks })
        }

        async fn send(&mut self, offset: u64, data: &'static [u8]) -> Result<u64, Status> {
            self.frames.send(v1::LogFrame { offset, data: data.into() }).await.unwrap();
            self.acks.message().await.map(|ack| ack.unwrap().durable_offset)
        }
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn a_cut_stream_goes_on_from_what_is_durable() {
        let mut home = start().await;
        let mut first = Appender::open(&mut home).await.unwrap();
        assert_eq!(first.send(0, b"").await.unwrap(), 0);
        assert_eq!(first.send(0, b"hello ").await.unwrap(), 6);
        drop(first);
        let mut second = Appender::open(&mut home).await.unwrap();
        assert_eq!(second.send(0, b"").await.unwrap(), 6, "an empty frame asks where to go on");
        assert_eq!(second.send(3, b"lo world").await.unwrap(), 11);
        let path = home.dir.path().join(format!("runs/{}/1.log", home.who.run));
        assert_eq!(std::fs::read(&path).unwrap(), b"hello world");
        assert_eq!(second.send(20, b"gap").await.unwrap(), 11);
        assert_eq!(second.acks.message().await.unwrap_err().code(), tonic::Code::OutOfRange);
        assert_eq!(std::fs::read(&path).unwrap(), b"hello world");
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn neither_a_closed_log_nor_a_dead_attempt_takes_more() {
        let mut home = start().await;
        let mut stream = Appender::open(&mut home).await.unwrap();
        assert_eq!(stream.send(0, b"x").await.unwrap(), 1);
        home.logs.attempt(&home.who.run, home.who.attempt).unwrap().close().unwrap();
        assert_eq!(stream.send(1, b"y").await.unwrap(), 1);
        assert_eq!(stream.acks.message().await.unwrap_err().code(), tonic::Code::PermissionDenied);
        home.desk.live.store(false, Ordering::Relaxed);
        let refused = Appender::open(&mut home).await.err().unwrap();
        assert_eq!(refused.code(), tonic::Code::PermissionDenied);
    }
}
