//! Access traces over the link: the plan from home, and what this job touched to home. Hints both:
//! what fails is tried again later, or not at all.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use limb_common::assignment::SetNumber;
use limb_common::error::chain;
use limb_common::trace::{self, MAX_FRAME_BYTES, Touch};
use limb_common::wire::{MAX_MESSAGE_BYTES, PIECE_BYTES};
use limb_proto::v1;
use limb_proto::v1::traces_client::TracesClient;
use tokio::time::timeout;

use super::channels::{ChannelError, Channels};
use super::dial::Backoff;
use super::enrol::is_refusal;
use crate::trace::SetTrace;

/// No piece for so long: the stream is dead.
const PATIENCE: Duration = Duration::from_secs(30);

/// One in so many of what home has must be new.
const GROWTH: usize = 4;

/// Nothing came, or nothing was taken.
#[derive(Debug, thiserror::Error)]
pub enum TraceLinkError {
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error("home did not answer")]
    Status(#[from] tonic::Status),
    #[error("nothing happened for {PATIENCE:?}")]
    Silence,
    #[error("what came is no trace")]
    Plan(#[from] trace::TraceError),
    #[error("the trace is too long")]
    TooLong,
    #[error("the trace could not be packed")]
    Packing(#[source] std::io::Error),
}

/// What earlier runs touched of a set; nothing where home knows nothing or sends nonsense. Waits
/// through cuts.
pub async fn plan(channels: &dyn Channels, set: SetNumber) -> Vec<Touch> {
    let mut backoff = Backoff::default();
    loop {
        match ask(channels, set).await {
            Ok(plan) => return plan,
            Err(TraceLinkError::Status(status)) if is_refusal(status.code()) => return Vec::new(),
            Err(
                error @ (TraceLinkError::Plan(_)
                | TraceLinkError::TooLong
                | TraceLinkError::Packing(_)
                | TraceLinkError::Channel(ChannelError::Closed)),
            ) => {
                tracing::warn!(set = set.0, error = chain(&error), "no plan of what to read ahead");
                return Vec::new();
            }
            Err(
                error @ (TraceLinkError::Status(_)
                | TraceLinkError::Silence
                | TraceLinkError::Channel(ChannelError::Unreachable { .. })),
            ) => tracing::debug!(set = set.0, error = chain(&error), "no plan yet"),
        }
        tokio::time::sleep(backoff.after_failure()).await;
    }
}

async fn ask(channels: &dyn Channels, set: SetNumber) -> Result<Vec<Touch>, TraceLinkError> {
    let channel = within(channels.bulk()).await??;
    let mut client = TracesClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES);
    let mut pieces = within(client.plan(v1::TracePlanRequest { set: set.0 })).await??.into_inner();
    let mut frame = Vec::new();
    while let Some(piece) = within(pieces.message()).await?? {
        if frame.len() + piece.data.len() > MAX_FRAME_BYTES {
            return Err(TraceLinkError::TooLong);
        }
        frame.extend_from_slice(&piece.data);
    }
    if frame.is_empty() { Ok(Vec::new()) } else { Ok(trace::decode(&frame)?) }
}

/// Sends all that was touched so far.
///
/// # Errors
/// [`TraceLinkError`]; nothing is lost but a hint.
pub async fn record(
    channels: &dyn Channels,
    set: SetNumber,
    touches: Vec<Touch>,
) -> Result<(), TraceLinkError> {
    let packed = tokio::task::spawn_blocking(move || trace::encode(&touches)).await;
    let mut frame: Bytes =
        packed.map_err(|join| TraceLinkError::Packing(join.into()))?.map_err(TraceLinkError::Packing)?.into();
    let channel = within(channels.bulk()).await??;
    let mut client = TracesClient::new(channel).max_encoding_message_size(MAX_MESSAGE_BYTES);
    let pieces = std::iter::from_fn(move || {
        let data = frame.split_to(frame.len().min(PIECE_BYTES));
        (!data.is_empty()).then_some(v1::TracePiece { data, set: set.0 })
    });
    within(client.record(tokio_stream::iter(pieces))).await??;
    Ok(())
}

/// The traces of one box on their way home.
#[derive(Debug, Default)]
pub struct Outgoing(Mutex<Vec<Sent>>);

#[derive(Debug)]
struct Sent {
    trace: Arc<SetTrace>,
    touches: usize,
}

impl Outgoing {
    pub fn add(&self, trace: Arc<SetTrace>) {
        self.lock().push(Sent { trace, touches: 0 });
    }

    #[must_use]
    pub fn traces(&self) -> Vec<Arc<SetTrace>> {
        self.lock().iter().map(|sent| Arc::clone(&sent.trace)).collect()
    }

    /// Now and then, so that a box that is lost leaves a trace too; each when it has grown by a
    /// quarter, so that all its sendings together are five traces long. Never ends.
    pub async fn keep_sending(&self, channels: &dyn Channels, every: Duration) {
        loop {
            tokio::time::sleep(every).await;
            self.send(channels, GROWTH).await;
        }
    }

    /// All that home does not have.
    pub async fn send_all(&self, channels: &dyn Channels) {
        self.send(channels, usize::MAX).await;
    }

    async fn send(&self, channels: &dyn Channels, growth: usize) {
        let grown = |sent: &Sent| {
            let len = sent.trace.len();
            (len > sent.touches + sent.touches / growth).then(|| Arc::clone(&sent.trace))
        };
        let due: Vec<_> = self.lock().iter().filter_map(grown).collect();
        for trace in due {
            let touches = trace.touches();
            let len = touches.len();
            match record(channels, trace.set(), touches).await {
                Ok(()) => {
                    let mut all = self.lock();
                    let own = all.iter_mut().find(|sent| sent.trace.set() == trace.set());
                    if let Some(sent) = own {
                        sent.touches = sent.touches.max(len);
                    }
                }
                Err(error) => {
                    tracing::info!(set = trace.set().0, error = chain(&error), "a trace did not get home");
                }
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Sent>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn within<T>(event: impl Future<Output = T>) -> Result<T, TraceLinkError> {
    timeout(PATIENCE, event).await.map_err(|_| TraceLinkError::Silence)
}
