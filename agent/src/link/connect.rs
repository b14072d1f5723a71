//! From a dialled socket to an HTTP/2 channel: the handshake with its timeout, pings, windows.
//!
//! Invariant: no byte leaves through a channel once the leash is over; the check stands at the
//! socket, so it covers every service.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use http::Uri;
use hyper_util::rt::TokioIo;
use limb_common::identity::HOME_SERVER_NAME;
use limb_common::lease::{PING_INTERVAL, PING_TIMEOUT};
use limb_common::wire::{
    BULK_CONNECTION_WINDOW_BYTES, BULK_STREAM_WINDOW_BYTES, CONTROL_CONNECTION_WINDOW_BYTES,
    CONTROL_STREAM_WINDOW_BYTES,
};
use rustls::ClientConfig;
use rustls_pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tonic::transport::{Channel, Endpoint};
use tower::service_fn;

use super::dial::Dialer;
use crate::leash::Leash;

/// Longer than home's own: home gives up first and says so.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Use {
    Control,
    Bulk,
}

/// A channel that connects when it is first used, and again whenever it broke.
pub(super) fn channel(dialer: Arc<Dialer>, config: Arc<ClientConfig>, leash: Leash, purpose: Use) -> Channel {
    let (stream_window, connection_window) = match purpose {
        Use::Control => (CONTROL_STREAM_WINDOW_BYTES, CONTROL_CONNECTION_WINDOW_BYTES),
        Use::Bulk => (BULK_STREAM_WINDOW_BYTES, BULK_CONNECTION_WINDOW_BYTES),
    };
    // The scheme says only that tonic must not add a second TLS.
    Endpoint::from_static("http://home.limb")
        .initial_stream_window_size(stream_window)
        .initial_connection_window_size(connection_window)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true)
        .connect_with_connector_lazy(service_fn(move |_: Uri| {
            let (dialer, config, leash) = (Arc::clone(&dialer), Arc::clone(&config), leash.clone());
            async move { connect(&dialer, config, leash).await.map(TokioIo::new) }
        }))
}

async fn connect(dialer: &Dialer, config: Arc<ClientConfig>, leash: Leash) -> io::Result<GuardedStream> {
    leash.guard().map_err(io::Error::other)?;
    let tcp = dialer.dial().await?;
    let name = ServerName::try_from(HOME_SERVER_NAME).map_err(io::Error::other)?;
    let tls = timeout(HANDSHAKE_TIMEOUT, TlsConnector::from(config).connect(name, tcp))
        .await
        .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
    dialer.connected();
    Ok(GuardedStream { tls, leash })
}

/// A connection through which nothing goes out when the lease is over.
struct GuardedStream {
    tls: TlsStream<TcpStream>,
    leash: Leash,
}

impl AsyncRead for GuardedStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tls).poll_read(context, buffer)
    }
}

impl AsyncWrite for GuardedStream {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        if let Err(over) = self.leash.guard() {
            return Poll::Ready(Err(io::Error::other(over)));
        }
        Pin::new(&mut self.tls).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if let Err(over) = self.leash.guard() {
            return Poll::Ready(Err(io::Error::other(over)));
        }
        Pin::new(&mut self.tls).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.tls).poll_shutdown(context)
    }
}
