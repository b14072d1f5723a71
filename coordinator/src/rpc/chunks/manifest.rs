//! A manifest as one zstd frame, compressed as fast as the client takes it.

use std::io::Write as _;
use std::sync::Arc;

use bytes::Bytes;
use limb_common::identity::AgentIdentity;
use limb_common::wire::PIECE_BYTES;
use limb_proto::v1;
use tokio::sync::mpsc;
use tonic::Status;
use zstd::stream::write::Encoder;

use super::{Shared, over};
use crate::snapshot::LoadedSnapshot;

/// Compressed at once: a few milliseconds of work.
const STEP_BYTES: usize = 1 << 20;
/// zstd's own default: about 300 MB/s, half the size.
const LEVEL: i32 = 3;

/// The compressor, unless the frame is finished, and what it has ready.
type Step = (Option<Encoder<'static, Vec<u8>>>, Vec<u8>);
type Out = mpsc::Sender<Result<v1::ManifestPiece, Status>>;

pub(super) async fn send(shared: Arc<Shared>, who: AgentIdentity, loaded: Arc<LoadedSnapshot>, out: Out) {
    if let Err(status) = try_send(&shared, &who, &loaded, &out).await {
        // The client may have gone, and then nobody needs to know.
        drop(out.send(Err(status)).await);
    }
}

async fn try_send(
    shared: &Shared,
    who: &AgentIdentity,
    loaded: &Arc<LoadedSnapshot>,
    out: &Out,
) -> Result<(), Status> {
    let internal = |error: std::io::Error| Status::internal(format!("compression failed: {error}"));
    let len = loaded.manifest().as_bytes().len();
    let mut encoder = Encoder::new(Vec::new(), LEVEL).map_err(internal)?;
    encoder.set_pledged_src_size(Some(len as u64)).map_err(internal)?;
    let mut from = 0;
    loop {
        let (step, loaded) = (from..len.min(from + STEP_BYTES), Arc::clone(loaded));
        from = step.end;
        let is_last = from == len;
        let compress = move || -> std::io::Result<Step> {
            encoder.write_all(loaded.manifest().as_bytes().get(step).unwrap_or_default())?;
            if is_last {
                return Ok((None, encoder.finish()?));
            }
            let ready = std::mem::take(encoder.get_mut());
            Ok((Some(encoder), ready))
        };
        let (next, ready) = tokio::task::spawn_blocking(compress)
            .await
            .map_err(|join| Status::internal(join.to_string()))?
            .map_err(internal)?;
        let mut ready = Bytes::from(ready);
        while !ready.is_empty() {
            let data = ready.split_to(ready.len().min(PIECE_BYTES));
            deliver(shared, who, out, v1::ManifestPiece { data }).await?;
        }
        match next {
            Some(again) => encoder = again,
            None => return Ok(()),
        }
    }
}

/// Waits for the client, but not longer than its attempt lives.
async fn deliver(
    shared: &Shared,
    who: &AgentIdentity,
    out: &Out,
    piece: v1::ManifestPiece,
) -> Result<(), Status> {
    loop {
        if !shared.desk.is_live(who) {
            return Err(over());
        }
        match tokio::time::timeout(shared.limits.liveness_every, out.reserve()).await {
            Ok(Ok(permit)) => {
                permit.send(Ok(piece));
                return Ok(());
            }
            Ok(Err(_gone)) => return Err(Status::cancelled("the client has gone")),
            Err(_elapsed) => {}
        }
    }
}
