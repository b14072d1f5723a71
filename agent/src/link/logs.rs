//! Sends the job's output home, over whatever connection there is now.
//!
//! Never: decide what happens to the job. A log that cannot be sent waits in its buffer; home
//! says where to go on from, and nothing is sent twice as new or left out.

use std::sync::Arc;
use std::time::Duration;

use limb_proto::v1::logs_client::LogsClient;
use limb_proto::v1::{LogAck, LogFrame};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

use super::channels::{ChannelError, Channels};
use crate::logs::{LogBuffer, OffsetMismatch};

/// Fewer bytes than this wait for company, for at most [`BATCH_PATIENCE`]: HTTP/2 peers end
/// connections that carry thousands of tiny frames.
const BATCH_BYTES: u64 = 4 << 10;
const BATCH_PATIENCE: Duration = Duration::from_millis(50);
/// A few milliseconds of a slow uplink, so that demand reads on the connection get their turn.
const FRAME_BYTES: usize = 64 << 10;
/// Sent and not acknowledged: 80 ms at 100 Mbit/s. Also what a cut makes us send again.
const WINDOW_BYTES: usize = 1 << 20;
/// Frames handed to the connection ahead of time.
const FRAMES_QUEUED: usize = 4;
/// Opening a stream, and the first word on it.
const OPEN_PATIENCE: Duration = Duration::from_secs(10);
/// Without an acknowledgement for this long a stream counts as dead.
const ACK_PATIENCE: Duration = Duration::from_secs(30);
const PAUSE_FIRST: Duration = Duration::from_millis(100);
const PAUSE_MOST: Duration = Duration::from_secs(2);

/// Why one stream ended.
#[derive(Debug, thiserror::Error)]
enum StreamEnd {
    #[error("no connection")]
    Channel(#[from] ChannelError),
    #[error("the stream broke: {0}")]
    Broken(#[from] tonic::Status),
    #[error("home closed the stream")]
    Closed,
    #[error("home does not answer")]
    Silent,
    #[error(transparent)]
    Mismatch(#[from] OffsetMismatch),
}

/// Sends until the buffer is finished and all of it is home, or the link is closed for good.
/// True: all of it is home. See [`LogBuffer::flush`] for waiting with a bound.
pub async fn send_logs(channels: Arc<dyn Channels>, buffer: Arc<LogBuffer>) -> bool {
    let mut pause = PAUSE_FIRST;
    loop {
        let before = buffer.acknowledged();
        match one_stream(&*channels, &buffer).await {
            Ok(()) => return true,
            Err(StreamEnd::Channel(ChannelError::Closed)) => return buffer.is_drained(),
            Err(StreamEnd::Mismatch(mismatch)) => tracing::warn!(%mismatch, "home's log is not ours"),
            Err(end) => tracing::debug!(%end, "the log goes on over a new stream"),
        }
        if buffer.acknowledged() > before {
            pause = PAUSE_FIRST;
        }
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(PAUSE_MOST);
    }
}

async fn one_stream(channels: &dyn Channels, buffer: &LogBuffer) -> Result<(), StreamEnd> {
    // Nothing is opened before there is something to say.
    let mut changes = buffer.changes();
    let _something = changes.wait_for(|_| buffer.has_outstanding() || buffer.is_drained()).await.is_ok();
    if buffer.is_drained() {
        return Ok(());
    }
    let channel = channels.bulk().await?;
    let (frames, queued) = mpsc::channel(FRAMES_QUEUED);
    let mut acks = tokio::time::timeout(OPEN_PATIENCE, open(channel, queued, &frames, buffer))
        .await
        .map_err(|_| StreamEnd::Silent)??;
    tokio::select! {
        end = push(buffer, frames) => end,
        end = hear(buffer, &mut acks) => end,
    }
}

/// Asks home where to go on from.
async fn open(
    channel: Channel,
    queued: mpsc::Receiver<LogFrame>,
    frames: &mpsc::Sender<LogFrame>,
    buffer: &LogBuffer,
) -> Result<tonic::Streaming<LogAck>, StreamEnd> {
    let hello = LogFrame { offset: buffer.acknowledged(), data: Vec::new().into() };
    frames.send(hello).await.map_err(|_| StreamEnd::Closed)?;
    let answer = LogsClient::new(channel).append(ReceiverStream::new(queued)).await?;
    let mut acks = answer.into_inner();
    let first = acks.message().await?.ok_or(StreamEnd::Closed)?;
    buffer.resume(first.durable_offset)?;
    Ok(acks)
}

/// Sends what there is, in batches. Ends only with the stream.
async fn push(buffer: &LogBuffer, frames: mpsc::Sender<LogFrame>) -> Result<(), StreamEnd> {
    let mut changes = buffer.changes();
    loop {
        let _some = changes.wait_for(|_| buffer.sendable(WINDOW_BYTES) > 0).await.is_ok();
        let enough = changes.wait_for(|_| buffer.sendable(WINDOW_BYTES) >= BATCH_BYTES);
        let _many = tokio::time::timeout(BATCH_PATIENCE, enough).await.is_ok();
        loop {
            let (offset, data) = buffer.next(FRAME_BYTES, WINDOW_BYTES);
            if data.is_empty() {
                break;
            }
            frames.send(LogFrame { offset, data: data.into() }).await.map_err(|_| StreamEnd::Closed)?;
        }
    }
}

/// Takes acknowledgements until everything is home.
async fn hear(buffer: &LogBuffer, acks: &mut tonic::Streaming<LogAck>) -> Result<(), StreamEnd> {
    let mut changes = buffer.changes();
    loop {
        if buffer.is_drained() {
            return Ok(());
        }
        let waits_for_home = buffer.has_in_flight();
        tokio::select! {
            ack = acks.message() => {
                let ack = ack?.ok_or(StreamEnd::Closed)?;
                buffer.acknowledge(ack.durable_offset)?;
            }
            // The job printed its last: perhaps there is nothing to wait for.
            _finished = changes.wait_for(|_| buffer.is_drained()) => {}
            () = tokio::time::sleep(ACK_PATIENCE), if waits_for_home => return Err(StreamEnd::Silent),
            // Something may be in flight by now: look again.
            () = tokio::time::sleep(ACK_PATIENCE), if !waits_for_home => {}
        }
    }
}

#[cfg(test)]
mod tests;
