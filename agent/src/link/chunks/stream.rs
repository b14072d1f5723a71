//! The task that owns the stream: connects, asks, collects, and starts again after each cut.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use limb_common::clock;
use limb_common::error::chain;
use limb_common::wire::MAX_MESSAGE_BYTES;
use limb_proto::v1::chunks_client::ChunksClient;
use limb_proto::v1::{FetchPiece, FetchRequest};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;
use tonic::Streaming;

use super::backoff::Backoff;
use super::desk::Desk;
use super::{ChunkPatience, Command};
use crate::link::channels::{ChannelError, Channels};

/// Requests that may lie between us and HTTP/2; more wait in the desk, where they can be taken
/// back.
const REQUESTS: usize = 64;
/// How often silence is looked for.
const TICK: Duration = Duration::from_millis(250);

/// Why a stream is over.
#[derive(Debug, thiserror::Error)]
enum Cut {
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error("home refused or lost the stream")]
    Status(#[source] Box<tonic::Status>),
    #[error("home ended the stream")]
    Ended,
    #[error("nothing came for {0:?}")]
    Silence(Duration),
    #[error("home did not answer the stream's opening within {0:?}")]
    Opening(Duration),
}

struct Stream {
    requests: mpsc::Sender<FetchRequest>,
    pieces: Streaming<FetchPiece>,
}

pub(super) async fn drive(
    channels: Arc<dyn Channels>,
    mut commands: mpsc::Receiver<Command>,
    patience: ChunkPatience,
    stop: CancellationToken,
) {
    let mut desk = Desk::default();
    let mut backoff = Backoff::new();
    let life = async {
        loop {
            while desk.is_empty() {
                let Some(command) = commands.recv().await else { return };
                desk.take(command, now(), false);
            }
            desk.ask_all_again(now());
            let cut = match connect(&*channels, &mut desk, &mut commands, patience).await {
                None => return,
                Some(Err(cut)) => cut,
                Some(Ok(stream)) => {
                    match serve(stream, &mut desk, &mut commands, patience, &mut backoff).await {
                        None => return,
                        Some(cut) => cut,
                    }
                }
            };
            let pause = backoff.next_pause();
            tracing::info!(?pause, cause = chain(&cut), "the chunk stream is cut; asking again");
            if listen(&mut desk, &mut commands, false, tokio::time::sleep(pause)).await.is_none() {
                return;
            }
        }
    };
    tokio::select! {
        biased;
        () = stop.cancelled() => {}
        () = life => {}
    }
}

/// Waits for `event` and goes on taking commands meanwhile. `None`: nobody asks any more.
async fn listen<T>(
    desk: &mut Desk,
    commands: &mut mpsc::Receiver<Command>,
    connected: bool,
    event: impl Future<Output = T>,
) -> Option<T> {
    let mut event = pin!(event);
    loop {
        tokio::select! {
            done = &mut event => return Some(done),
            command = commands.recv() => desk.take(command?, now(), connected),
        }
    }
}

async fn connect(
    channels: &dyn Channels,
    desk: &mut Desk,
    commands: &mut mpsc::Receiver<Command>,
    patience: ChunkPatience,
) -> Option<Result<Stream, Cut>> {
    // What is asked first travels with the opening: it costs no round trip of its own.
    let (requests, sent) = mpsc::channel(REQUESTS);
    while let (Ok(permit), true) = (requests.try_reserve(), !desk.outbox.is_empty()) {
        if let Some(request) = desk.outbox.pop_front() {
            permit.send(request);
        }
    }
    let open = async {
        let channel = channels.bulk().await?;
        let mut client = ChunksClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES);
        let opened = client.fetch(ReceiverStream::new(sent)).await;
        let pieces = opened.map_err(|status| Cut::Status(Box::new(status)))?.into_inner();
        Ok(Stream { requests, pieces })
    };
    let bounded = tokio::time::timeout(patience.stream, open);
    let opened = listen(desk, commands, true, bounded).await?;
    Some(opened.unwrap_or(Err(Cut::Opening(patience.stream))))
}

/// Until the stream is cut. `None`: nobody asks any more.
async fn serve(
    stream: Stream,
    desk: &mut Desk,
    commands: &mut mpsc::Receiver<Command>,
    patience: ChunkPatience,
    backoff: &mut Backoff,
) -> Option<Cut> {
    let Stream { requests, mut pieces } = stream;
    desk.restart_patience(now());
    let mut tick = tokio::time::interval(TICK.min(patience.stream / 2));
    loop {
        tokio::select! {
            piece = pieces.message() => match piece {
                Ok(Some(piece)) => {
                    backoff.reset();
                    desk.piece(piece, now());
                }
                Ok(None) => return Some(Cut::Ended),
                Err(status) => return Some(Cut::Status(Box::new(status))),
            },
            command = commands.recv() => desk.take(command?, now(), true),
            permit = requests.reserve(), if !desk.outbox.is_empty() => match (permit, desk.outbox.pop_front()) {
                (Ok(permit), Some(request)) => permit.send(request),
                (Err(_), _) => return Some(Cut::Ended),
                (Ok(_), None) => {}
            },
            _ = tick.tick() => {
                desk.sweep();
                let (silence, wait) = (desk.silence(now()), desk.longest_wait(now()));
                if silence > patience.stream || wait > patience.chunk {
                    return Some(Cut::Silence(silence.max(wait)));
                }
            }
        }
    }
}

fn now() -> Duration {
    clock::boottime().since_boot()
}
