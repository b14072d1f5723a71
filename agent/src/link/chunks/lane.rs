//! One lane: the task that owns a stream. Connects, passes requests on and pieces back, and starts
//! again after each cut.

use std::sync::Arc;
use std::time::Duration;

use limb_common::clock;
use limb_common::error::chain;
use limb_common::wire::MAX_MESSAGE_BYTES;
use limb_proto::v1::chunks_client::ChunksClient;
use limb_proto::v1::{FetchPiece, FetchRequest};
use tokio::sync::{Notify, mpsc};
use tokio_stream::wrappers::ReceiverStream;

use super::backoff::Backoff;
use crate::link::channels::{ChannelError, Channels};

/// Requests between us and HTTP/2. More than a lane may have outstanding, so that the desk's
/// outbox is as good as always empty.
const REQUESTS: usize = 4096;

/// What a lane tells the pool.
#[derive(Debug)]
pub(super) enum Event {
    /// A stream is being opened; what is sent now travels with its opening and costs no round
    /// trip of its own.
    Opening {
        lane: usize,
        requests: mpsc::Sender<FetchRequest>,
    },
    /// Home answered it. With the shortest time that a connection took to home, where it is known.
    Open {
        lane: usize,
        round_trip: Option<Duration>,
    },
    Piece {
        lane: usize,
        piece: FetchPiece,
    },
    /// All that was outstanding on it is to be asked again.
    Cut {
        lane: usize,
    },
}

/// Why a stream is over.
#[derive(Debug, thiserror::Error)]
enum Cut {
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error("home refused or lost the stream")]
    Status(#[source] Box<tonic::Status>),
    #[error("home ended the stream")]
    Ended,
    #[error("nothing came for too long")]
    Silence,
    #[error("home did not answer the stream's opening within {0:?}")]
    Opening(Duration),
    #[error("nobody asks any more")]
    Unwanted,
}

/// Lives until the pool has gone. `silence` is notified when the pool gives the stream up.
pub(super) async fn run(
    lane: usize,
    channels: Arc<dyn Channels>,
    events: mpsc::Sender<Event>,
    silence: Arc<Notify>,
    patience: Duration,
) {
    let mut backoff = Backoff::new();
    loop {
        let since = clock::boottime();
        let cut = tokio::select! {
            cut = one_stream(lane, &*channels, &events, patience, &mut backoff) => cut,
            () = silence.notified() => Cut::Silence,
        };
        if events.send(Event::Cut { lane }).await.is_err() {
            return;
        }
        let pause = backoff.next_pause();
        let lived = clock::boottime().saturating_since(since);
        tracing::info!(lane, ?lived, ?pause, cause = chain(&cut), "a chunk stream is cut");
        tokio::time::sleep(pause).await;
    }
}

async fn one_stream(
    lane: usize,
    channels: &dyn Channels,
    events: &mpsc::Sender<Event>,
    patience: Duration,
    backoff: &mut Backoff,
) -> Cut {
    let (requests, sent) = mpsc::channel(REQUESTS);
    if events.send(Event::Opening { lane, requests }).await.is_err() {
        return Cut::Unwanted;
    }
    let open = async {
        let channel = channels.bulk().await?;
        let mut client = ChunksClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let opened = client.fetch(ReceiverStream::new(sent)).await;
        Ok::<_, Cut>(opened.map_err(|status| Cut::Status(Box::new(status)))?.into_inner())
    };
    let mut pieces = match tokio::time::timeout(patience, open).await {
        Ok(Ok(pieces)) => pieces,
        Ok(Err(cut)) => return cut,
        Err(_) => return Cut::Opening(patience),
    };
    if events.send(Event::Open { lane, round_trip: channels.round_trip() }).await.is_err() {
        return Cut::Unwanted;
    }
    loop {
        match pieces.message().await {
            Ok(Some(piece)) => {
                backoff.reset();
                if events.send(Event::Piece { lane, piece }).await.is_err() {
                    return Cut::Unwanted;
                }
            }
            Ok(None) => return Cut::Ended,
            Err(status) => return Cut::Status(Box::new(status)),
        }
    }
}
