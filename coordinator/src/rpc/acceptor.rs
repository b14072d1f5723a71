//! From a TCP connection to one whose other end is known. ALPN chooses: a connection for
//! enrolment shows no certificate and may do nothing else; every other one shows the agent's.
//!
//! Never: end because of one connection, hold a slot for a silent one, or resume a TLS session
//! (resumption copies the old chain and verifies nothing).

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use limb_common::identity::{ALPN_AGENT, ALPN_ENROL};
use limb_common::{certificate, clock, task};
use rustls::ServerConfig;
use rustls::server::{Acceptor, NoServerSessionStorage, WebPkiClientVerifier};
use rustls_pki_types::CertificateDer;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc};
use tokio::time::{Interval, timeout};
use tokio_rustls::LazyConfigAcceptor;
use tokio_rustls::server::TlsStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Connected;

use super::access::Peer;
use super::desk::Desk;
use super::server::ServeError;
use crate::ca::{HomeCa, ServerCertificate};

/// Two round trips over the worst link, and no more.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(2);
/// From the end of the handshake to HTTP/2's first byte; pings guard what comes after it.
const PREFACE_TIMEOUT: Duration = Duration::from_secs(5);
/// An enrolment is one call.
const ENROL_CONNECTION_LIFE: Duration = Duration::from_secs(30);
/// How often a connection asks whether it may go on.
const LIVENESS_INTERVAL: Duration = Duration::from_secs(1);
/// What the connection of an ended attempt still gets: its next call is told `refused`, which ends
/// the agent at once. A silent cut would let it try until its lease is over.
const REFUSAL_TIME: Duration = Duration::from_secs(5);
/// Handshakes at once. Each ends within [`HANDSHAKE_TIMEOUT`], so silent connections delay a
/// legitimate one by that long at most.
const MAX_HANDSHAKES: usize = 256;
/// Connections for enrolment at once: they have proved nothing, so they may not crowd out agents.
const MAX_ENROLLING: usize = 64;
/// Connections of agents at once: some hundred boxes with a control and a few bulk ones each.
const MAX_AGENTS: usize = 1024;
/// Out of file descriptors, most likely: pause instead of spinning.
const ACCEPT_ERROR_PAUSE: Duration = Duration::from_millis(50);
/// Accepted connections that wait for the HTTP/2 server; it takes them at once.
const READY_CONNECTIONS: usize = 16;

/// Where TCP connections come from. A trait so that a test can make accepting fail.
pub(super) trait Accept: Send + Sync + 'static {
    fn accept(&self) -> impl Future<Output = io::Result<TcpStream>> + Send;
}

impl Accept for TcpListener {
    async fn accept(&self) -> io::Result<TcpStream> {
        Self::accept(self).await.map(|(stream, _)| stream)
    }
}

/// What a handshake is checked with.
pub(super) struct Gate {
    enrol: Arc<ServerConfig>,
    agent: Arc<ServerConfig>,
    ca: Arc<HomeCa>,
    desk: Arc<dyn Desk>,
    enrolling: Arc<Semaphore>,
    agents: Arc<Semaphore>,
    /// Cancelled when connections must go, whatever they are doing.
    cut: CancellationToken,
}

impl Gate {
    pub(super) fn new(
        ca: Arc<HomeCa>,
        desk: Arc<dyn Desk>,
        cut: CancellationToken,
    ) -> Result<Self, ServeError> {
        let server = ca.server_certificate(clock::unix_ms())?;
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut roots = rustls::RootCertStore::empty();
        roots.add(ca.certificate().clone())?;
        let verifier =
            WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(&provider)).build()?;
        let builder = || {
            ServerConfig::builder_with_provider(Arc::clone(&provider))
                .with_protocol_versions(&[&rustls::version::TLS13])
        };
        let enrol = finish(builder()?.with_no_client_auth(), &server, ALPN_ENROL)?;
        let agent = finish(builder()?.with_client_cert_verifier(verifier), &server, ALPN_AGENT)?;
        Ok(Self {
            enrol,
            agent,
            ca,
            desk,
            enrolling: Arc::new(Semaphore::new(MAX_ENROLLING)),
            agents: Arc::new(Semaphore::new(MAX_AGENTS)),
            cut,
        })
    }

    /// `None`: closed, for a reason that concerns only this connection.
    async fn admit(&self, tcp: TcpStream) -> Option<AgentConnection> {
        drop(tcp.set_nodelay(true));
        let start = LazyConfigAcceptor::new(Acceptor::default(), tcp).await.ok()?;
        let offers = |protocol: &[u8]| {
            start.client_hello().alpn().is_some_and(|mut offered| offered.any(|name| name == protocol))
        };
        let enrolling = offers(ALPN_ENROL);
        if !enrolling && !offers(ALPN_AGENT) {
            return None;
        }
        let config = if enrolling { &self.enrol } else { &self.agent };
        let tls = start
            .into_stream(Arc::clone(config))
            .await
            .inspect_err(|error| tracing::debug!(%error, "a handshake failed"))
            .ok()?;
        let slots = if enrolling { &self.enrolling } else { &self.agents };
        let Ok(slot) = Arc::clone(slots).try_acquire_owned() else {
            tracing::warn!(enrolling, "too many connections: one more was closed");
            return None;
        };
        let peer = if enrolling {
            Peer::Enrolling
        } else {
            let shown = tls.get_ref().1.peer_certificates().and_then(<[CertificateDer<'_>]>::first)?;
            let agent = certificate::agent(shown).ok()?;
            if agent.identity.home != *self.ca.home() {
                return None;
            }
            Peer::Agent(agent)
        };
        Some(AgentConnection {
            tls,
            peer,
            opened: clock::boottime(),
            has_spoken: false,
            ended: None,
            liveness: tokio::time::interval(LIVENESS_INTERVAL),
            desk: Arc::clone(&self.desk),
            cut: self.cut.clone(),
            _slot: slot,
        })
    }
}

fn finish(
    builder: rustls::ConfigBuilder<ServerConfig, rustls::server::WantsServerCert>,
    server: &ServerCertificate,
    alpn: &[u8],
) -> Result<Arc<ServerConfig>, rustls::Error> {
    let mut config = builder.with_single_cert(server.chain.clone(), server.key.clone_key())?;
    config.alpn_protocols = vec![alpn.to_vec()];
    config.session_storage = Arc::new(NoServerSessionStorage {});
    config.send_tls13_tickets = 0;
    config.max_early_data_size = 0;
    Ok(Arc::new(config))
}

/// Accepts until `stop`; hands over what passed the gate.
pub(super) fn start(
    listener: impl Accept,
    gate: Gate,
    stop: CancellationToken,
) -> (task::Task<()>, mpsc::Receiver<AgentConnection>) {
    let (ready, connections) = mpsc::channel(READY_CONNECTIONS);
    let gate = Arc::new(gate);
    let handshakes = Arc::new(Semaphore::new(MAX_HANDSHAKES));
    let accepting = task::spawn("accept agents", async move {
        loop {
            let next = async {
                let slot = Arc::clone(&handshakes).acquire_owned().await;
                (slot, listener.accept().await)
            };
            let (slot, accepted) = tokio::select! {
                () = stop.cancelled() => return,
                next = next => next,
            };
            let tcp = match accepted {
                Ok(tcp) => tcp,
                Err(error) => {
                    tracing::warn!(%error, "could not accept a connection; trying again");
                    tokio::time::sleep(ACCEPT_ERROR_PAUSE).await;
                    continue;
                }
            };
            let (gate, ready) = (Arc::clone(&gate), ready.clone());
            task::detach("handshake", async move {
                let admitted = timeout(HANDSHAKE_TIMEOUT, gate.admit(tcp)).await.ok().flatten();
                drop(slot);
                if let Some(connection) = admitted {
                    // Refused only when the server has ended.
                    drop(ready.send(connection).await);
                }
            });
        }
    });
    (accepting, connections)
}

/// A connection whose other end is known, and which ends itself when that end loses its right.
pub(super) struct AgentConnection {
    tls: TlsStream<TcpStream>,
    peer: Peer,
    opened: clock::BootInstant,
    has_spoken: bool,
    /// Since when its other end has no right to it any more.
    ended: Option<clock::BootInstant>,
    liveness: Interval,
    desk: Arc<dyn Desk>,
    cut: CancellationToken,
    _slot: OwnedSemaphorePermit,
}

impl AgentConnection {
    fn may_go_on(&mut self) -> bool {
        let now = clock::boottime();
        let age = now.saturating_since(self.opened);
        let too_quiet = !self.has_spoken && age > PREFACE_TIMEOUT;
        let too_old = matches!(self.peer, Peer::Enrolling) && age > ENROL_CONNECTION_LIFE;
        if self.peer.is_live(self.desk.as_ref()) {
            self.ended = None;
        } else {
            self.ended.get_or_insert(now);
        }
        let was_told = self.ended.is_some_and(|since| now.saturating_since(since) > REFUSAL_TIME);
        !too_quiet && !too_old && !was_told && !self.cut.is_cancelled()
    }
}

impl AsyncRead for AgentConnection {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        // HTTP/2 reads at all times, so this timer runs as long as the connection does.
        while self.liveness.poll_tick(context).is_ready() {
            if !self.may_go_on() {
                return Poll::Ready(Err(io::ErrorKind::ConnectionAborted.into()));
            }
        }
        let before = buffer.filled().len();
        let read = ready!(Pin::new(&mut self.tls).poll_read(context, buffer));
        self.has_spoken |= buffer.filled().len() > before;
        Poll::Ready(read)
    }
}

impl AsyncWrite for AgentConnection {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.tls).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tls).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tls).poll_shutdown(context)
    }
}

impl Connected for AgentConnection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        self.peer.clone()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use limb_common::id::HomeId;
    use limb_common::identity::HOME_SERVER_NAME;
    use rustls::pki_types::ServerName;

    use super::*;
    use crate::rpc::fake_desk::FakeDesk;

    struct Stumbling {
        failures: AtomicU32,
        listener: TcpListener,
    }

    impl Accept for Stumbling {
        async fn accept(&self) -> io::Result<TcpStream> {
            if self.failures.fetch_sub(1, Ordering::SeqCst) > 0 {
                return Err(io::Error::from_raw_os_error(libc::EMFILE));
            }
            self.failures.store(0, Ordering::SeqCst);
            Accept::accept(&self.listener).await
        }
    }

    #[tokio::test]
    async fn accepting_goes_on_after_errors() {
        let dir = tempfile::tempdir().unwrap();
        let ca = HomeCa::open_or_create(dir.path(), HomeId::random(), clock::unix_ms()).unwrap();
        let ca = Arc::new(ca);
        let mut roots = rustls::RootCertStore::empty();
        roots.add(ca.certificate().clone()).unwrap();
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let mut config = rustls::ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        config.alpn_protocols = vec![ALPN_ENROL.to_vec()];
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let gate =
            Gate::new(ca, Arc::new(FakeDesk::new(std::collections::HashMap::new())), stop.clone()).unwrap();
        let stumbling = Stumbling { failures: AtomicU32::new(5), listener };
        let (_accepting, mut connections) = start(stumbling, gate, stop);
        let tcp = TcpStream::connect(address).await.unwrap();
        let name = ServerName::try_from(HOME_SERVER_NAME).unwrap();
        let connecting = tokio_rustls::TlsConnector::from(Arc::new(config)).connect(name, tcp);
        let (tls, accepted) = tokio::join!(connecting, connections.recv());
        assert!(tls.is_ok() && accepted.is_some());
    }
}
