//! The agents' port. One HTTP/2 server behind the acceptor and the access table.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use limb_common::lease::{PING_INTERVAL, PING_TIMEOUT};
use limb_common::task;
use limb_common::wire::{HOME_CONNECTION_WINDOW_BYTES, HOME_STREAM_WINDOW_BYTES, MAX_MESSAGE_BYTES};
use limb_proto::v1::control_server::ControlServer;
use limb_proto::v1::enrol_server::EnrolServer;
use tokio::net::TcpListener;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::transport::Server;

use super::acceptor::{Accept, Gate};
use super::access::AccessLayer;
use super::control::ControlService;
use super::desk::Desk;
use super::enrol::EnrolService;
use crate::ca::{CaError, HomeCa};

/// Streams at once on one connection. An agent needs a handful; 64 leaves room for bursts of
/// unary calls.
const MAX_STREAMS: u32 = 64;
const MAX_HEADER_BYTES: u32 = 16 * 1024;
/// Token, CSR and two short texts.
const MAX_ENROL_BYTES: usize = 16 * 1024;
/// After a stop: how long calls in progress may finish.
const DRAIN: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    #[error("could not set up home's TLS")]
    Tls(#[from] rustls::Error),
    #[error("could not set up the check of agents' certificates")]
    Verifier(#[from] rustls::client::VerifierBuilderError),
    #[error(transparent)]
    Ca(#[from] CaError),
    #[error("the agents' port failed")]
    Http(#[from] tonic::transport::Error),
}

/// Serves agents until `stop` is cancelled. `data` holds the other services (Chunks, Results,
/// Logs); enrolment and control are added here.
///
/// # Errors
/// TLS cannot be set up. No connection's failure ends it.
pub async fn serve(
    listener: TcpListener,
    ca: Arc<HomeCa>,
    desk: Arc<dyn Desk>,
    data: Routes,
    stop: CancellationToken,
) -> Result<(), ServeError> {
    serve_on(listener, ca, desk, data, stop).await
}

pub(super) async fn serve_on(
    listener: impl Accept,
    ca: Arc<HomeCa>,
    desk: Arc<dyn Desk>,
    data: Routes,
    stop: CancellationToken,
) -> Result<(), ServeError> {
    let cut = CancellationToken::new();
    let gate = Gate::new(Arc::clone(&ca), Arc::clone(&desk), cut.clone())?;
    let (_accepting, connections) = super::acceptor::start(listener, gate, stop.clone());
    let routes = data
        .add_service(
            EnrolServer::new(EnrolService::new(Arc::clone(&ca), Arc::clone(&desk)))
                .max_decoding_message_size(MAX_ENROL_BYTES),
        )
        .add_service(
            ControlServer::new(ControlService::new(ca, Arc::clone(&desk)))
                .max_decoding_message_size(MAX_MESSAGE_BYTES)
                .max_encoding_message_size(MAX_MESSAGE_BYTES),
        );
    let _cutting = task::spawn("cut connections", {
        let (stop, cut) = (stop.clone(), cut.clone());
        async move {
            stop.cancelled().await;
            tokio::time::sleep(DRAIN).await;
            cut.cancel();
        }
    });
    // Whatever ends this function also ends its connections.
    let _cut_at_the_end = cut.drop_guard();
    Server::builder()
        .layer(AccessLayer { desk })
        .initial_stream_window_size(HOME_STREAM_WINDOW_BYTES)
        .initial_connection_window_size(HOME_CONNECTION_WINDOW_BYTES)
        .max_concurrent_streams(MAX_STREAMS)
        .http2_keepalive_interval(Some(PING_INTERVAL))
        .http2_keepalive_timeout(Some(PING_TIMEOUT))
        .http2_max_header_list_size(MAX_HEADER_BYTES)
        .add_routes(routes)
        .serve_with_incoming_shutdown(
            ReceiverStream::new(connections).map(Ok::<_, std::io::Error>),
            stop.cancelled_owned(),
        )
        .await?;
    Ok(())
}
