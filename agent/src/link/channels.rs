//! Where connections to home come from, for those who speak over them. The dialer and its TLS
//! stand behind this trait, so that the data plane knows neither keys nor sockets.

use std::error::Error;
use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use tonic::transport::Channel;

/// There is no connection now.
#[derive(Debug, thiserror::Error)]
pub enum ChannelError {
    /// Worth another try after a pause: the link may come back.
    #[error("home cannot be reached now")]
    Unreachable {
        #[source]
        source: Box<dyn Error + Send + Sync>,
    },
    /// The agent is ending, or home refuses this attempt for good.
    #[error("the link to home is closed")]
    Closed,
}

pub type ChannelFuture = Pin<Box<dyn Future<Output = Result<Channel, ChannelError>> + Send>>;

/// Gives connections with the attempt's current certificate.
pub trait Channels: Send + Sync + 'static {
    /// A connection for bulk data: never the one that carries the lease's beats. May be one that
    /// exists already; a caller whose stream broke asks again and gets one that is not broken.
    fn bulk(&self) -> ChannelFuture;

    /// The shortest time that a TCP connection to home took; `None` where it is not known.
    fn round_trip(&self) -> Option<Duration> {
        None
    }
}
