//! Bringing what was admitted: the tasks that ask the transport, verify, try again, and tell who
//! waits.

use std::sync::{Arc, MutexGuard, PoisonError};

use limb_common::assignment::SetNumber;
use limb_common::chunk::{ChunkId, HashMismatch, VerifiedChunk, VerifiedPart};
use limb_common::task;
use tokio::sync::watch;

use super::state::{LoadNumber, Origin, Start, State};
use super::{IO_PAUSE, Inner, REFETCHES};
use crate::fetch::parts::PartKey;
use crate::fetch::{Ask, ChunkAddress, FetchError, PackAsk, PartAsk, Priority, TransportError};

/// Ends a load and its flights also when its task panics, so that nobody waits for ever.
struct Landing {
    inner: Arc<Inner>,
    load: LoadNumber,
    /// Not landed yet.
    coming: Vec<(ChunkId, ChunkAddress)>,
}

impl Landing {
    fn land(&mut self, id: ChunkId, origin: Origin, outcome: Result<VerifiedChunk, FetchError>) {
        self.coming.retain(|(other, _)| *other != id);
        let waiters = self.inner.lock().land(id, origin, &outcome);
        for waiter in waiters {
            // A reader that was killed meanwhile does not wait any more.
            let _gone: Result<(), _> = waiter.send(outcome.clone());
        }
    }
}

impl Drop for Landing {
    fn drop(&mut self) {
        let lost = if self.inner.stop.is_cancelled() {
            FetchError::Closed
        } else {
            FetchError::Io { detail: "the fetch ended without an answer".to_owned() }
        };
        for (id, _) in std::mem::take(&mut self.coming) {
            self.land(id, Origin::Home, Err(lost.clone()));
        }
        let mut state = self.inner.lock();
        state.loads.remove(&self.load);
        let starts = self.inner.admitted(&mut state);
        drop(state);
        self.inner.start_all(starts);
    }
}

/// The same for a part.
pub(super) struct PartLanding {
    pub(super) inner: Arc<Inner>,
    pub(super) key: PartKey,
    pub(super) bytes: u64,
    pub(super) outcome: Option<Result<VerifiedPart, FetchError>>,
}

impl Drop for PartLanding {
    fn drop(&mut self) {
        let lost = || FetchError::Io { detail: "the fetch ended without an answer".to_owned() };
        let outcome = self.outcome.take().unwrap_or_else(|| Err(lost()));
        let mut state = self.inner.lock();
        let waiters = state.parts.land(&self.key, &outcome);
        state.in_flight_bytes -= self.bytes;
        if outcome.is_ok() {
            state.stats.fetched_parts += 1;
            state.stats.fetched_bytes += self.bytes;
        }
        let starts = self.inner.admitted(&mut state);
        drop(state);
        for waiter in waiters {
            // A reader that was killed meanwhile does not wait any more.
            let _gone: Result<(), _> = waiter.send(outcome.clone());
        }
        self.inner.start_all(starts);
    }
}

/// How often an answer may be wrong or not come before a reader is told.
#[derive(Default)]
struct Tries {
    mismatches: u32,
    failures: u32,
}

impl Tries {
    /// What to tell the reader, if it is not worth another try.
    async fn after(&mut self, inner: &Inner, error: TransportError) -> Option<FetchError> {
        match error {
            TransportError::SourceChanged { detail } => Some(FetchError::SourceChanged { detail }),
            TransportError::NotFound => Some(FetchError::NotFound),
            TransportError::Closed => Some(FetchError::Closed),
            TransportError::Io { detail } => {
                self.failures += 1;
                if self.failures > REFETCHES {
                    return Some(FetchError::Io { detail });
                }
                tokio::time::sleep(IO_PAUSE * self.failures).await;
                None
            }
            TransportError::Garbled { detail } => {
                self.mismatches += 1;
                inner.lock().stats.mismatches += 1;
                tracing::warn!(mismatches = self.mismatches, detail, "home sent not what was asked for");
                (self.mismatches > REFETCHES).then_some(FetchError::Corrupt { detail })
            }
        }
    }
}

fn garbled(mismatch: HashMismatch) -> TransportError {
    TransportError::Garbled { detail: mismatch.to_string() }
}

impl Inner {
    pub(super) fn start_part(
        self: &Arc<Self>,
        ask: PartAsk,
        mut landing: PartLanding,
        urgent: watch::Sender<Priority>,
    ) {
        let inner = Arc::clone(self);
        let _runtime = self.runtime.enter();
        task::detach("fetch part", async move {
            let stop = inner.stop.clone();
            landing.outcome = Some(tokio::select! {
                biased;
                () = stop.cancelled() => Err(FetchError::Closed),
                outcome = inner.bring_part(ask) => outcome,
            });
            drop(landing);
            drop(urgent);
        });
    }

    async fn bring_part(&self, ask: PartAsk) -> Result<VerifiedPart, FetchError> {
        let mut tries = Tries::default();
        loop {
            let answer = self.transport.fetch_part(ask.clone()).await;
            let verified = answer.and_then(|(bytes, proof)| {
                ask.id.verify_part(ask.groups.clone(), bytes, &proof).map_err(garbled)
            });
            match verified {
                Ok(part) => return Ok(part),
                Err(error) => {
                    if let Some(error) = tries.after(self, error).await {
                        return Err(error);
                    }
                }
            }
        }
    }

    /// What has room now, to be started without the lock.
    pub(super) fn admitted(&self, state: &mut State) -> Vec<Start> {
        if self.stop.is_cancelled() {
            return Vec::new();
        }
        std::iter::from_fn(|| state.admit_next(&self.limits)).collect()
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn start_all(self: &Arc<Self>, starts: impl IntoIterator<Item = Start>) {
        for Start { load, set, chunks, priority } in starts {
            let inner = Arc::clone(self);
            let landing = Landing { inner: Arc::clone(self), load, coming: chunks };
            let _runtime = self.runtime.enter();
            task::detach("fetch", async move {
                let stop = inner.stop.clone();
                tokio::select! {
                    biased;
                    () = stop.cancelled() => {}
                    () = inner.carry(set, landing, priority) => {}
                }
            });
        }
    }

    async fn carry(&self, set: Option<SetNumber>, mut landing: Landing, priority: watch::Receiver<Priority>) {
        if let Some(set) = set {
            self.bring_pack(set, &mut landing, &priority).await;
        }
        // A chunk by itself; or what a pack did not bring, each for its own answer.
        while let Some(&(id, address)) = landing.coming.first() {
            if let Some(chunk) = self.read_back(id).await {
                landing.land(id, Origin::Disk, Ok(chunk));
                continue;
            }
            let outcome = self.bring(id, address, priority.clone()).await;
            landing.land(id, Origin::Home, outcome);
        }
    }

    async fn bring_pack(&self, set: SetNumber, landing: &mut Landing, priority: &watch::Receiver<Priority>) {
        let inode_of = |address| match address {
            ChunkAddress::Set { inode, .. } => Some(inode),
            ChunkAddress::Result { .. } => None,
        };
        let chunks = landing.coming.clone();
        let files: Option<Arc<[_]>> =
            chunks.iter().map(|(id, address)| Some((inode_of(*address)?, id.len))).collect();
        let Some(files) = files.filter(|files| files.len() > 1) else { return };
        let answers = self.transport.fetch_pack(PackAsk { set, files, priority: priority.clone() }).await;
        for ((id, _), answer) in chunks.into_iter().zip(answers) {
            if let Ok(chunk) = answer.map_err(drop).and_then(|bytes| id.verify(bytes).map_err(drop)) {
                landing.land(id, Origin::Home, Ok(chunk));
            }
        }
    }

    async fn read_back(&self, id: ChunkId) -> Option<VerifiedChunk> {
        self.spill.as_ref()?.read(id).await
    }

    async fn bring(
        &self,
        id: ChunkId,
        address: ChunkAddress,
        priority: watch::Receiver<Priority>,
    ) -> Result<VerifiedChunk, FetchError> {
        let mut tries = Tries::default();
        loop {
            let ask = Ask { address, len: id.len, priority: priority.clone() };
            let answer = self.transport.fetch(ask).await;
            match answer.and_then(|bytes| id.verify(bytes).map_err(garbled)) {
                Ok(chunk) => return Ok(chunk),
                Err(error) => {
                    if let Some(error) = tries.after(self, error).await {
                        return Err(error);
                    }
                }
            }
        }
    }
}
