//! One `Fetch` stream: one task that takes requests, reads chunks and sends pieces.
//!
//! ```text
//! requests → Queue → reads in flight → ready → one piece at a time → client
//!                         ↑ budget, reads      ↑ the most urgent first, equals in turn
//! ```

use std::collections::{HashMap, HashSet, VecDeque};
use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use limb_common::assignment::SetNumber;
use limb_common::chunk::CHUNK_BYTES;
use limb_common::identity::AgentIdentity;
use limb_common::manifest::{ChunkRef, Inode};
use limb_common::wire::PIECE_BYTES;
use limb_proto::v1;
use limb_proto::v1::fetch_failure::Kind;
use limb_proto::v1::fetch_piece::Body;
use tokio::sync::mpsc::OwnedPermit;
use tokio::sync::{OwnedSemaphorePermit, mpsc};
use tonic::{Status, Streaming};

use super::queue::{Address, Message, Priority, Queue, Wanted};
use super::{Lane, OpenError, ResultReadError, Shared, over};
use crate::snapshot::{LoadedSnapshot, ReadError};

/// Chunks of one stream being read or ready to send, per lane.
const IN_HAND: usize = 8;
/// Files whose change was told, so that it is told once.
const MAX_TOLD: usize = 10_000;
const CHUNK_KIB: u32 = 1024;

type Out = mpsc::Sender<Result<v1::FetchPiece, Status>>;
type Room = Result<OwnedPermit<Result<v1::FetchPiece, Status>>, mpsc::error::SendError<()>>;
type Reserving = Pin<Box<dyn Future<Output = Room> + Send>>;
type Reading = Pin<Box<dyn Future<Output = (Wanted, Outcome)> + Send>>;

/// What a read came to.
struct Outcome {
    body: Result<Bytes, v1::FetchFailure>,
    /// A file that is not what was frozen.
    changed: Option<(SetNumber, Inode, Vec<u8>)>,
    /// Held until the last byte is sent.
    budget: Option<OwnedSemaphorePermit>,
}

struct Ready {
    wanted: Wanted,
    body: Result<Bytes, v1::FetchFailure>,
    _budget: Option<OwnedSemaphorePermit>,
}

/// Who asks, and the sets that they opened on this stream.
struct Session {
    shared: Arc<Shared>,
    who: AgentIdentity,
    sets: Mutex<HashMap<SetNumber, Arc<LoadedSnapshot>>>,
}

struct Pump {
    session: Arc<Session>,
    queue: Queue,
    reading: FuturesUnordered<Reading>,
    demand_in_hand: usize,
    bulk_in_hand: usize,
    ready: VecDeque<Ready>,
    told: HashSet<(SetNumber, Inode)>,
    /// The client takes nothing; what was read for it was let go.
    parked: bool,
}

pub(super) async fn serve(
    shared: Arc<Shared>,
    who: AgentIdentity,
    requests: Streaming<v1::FetchRequest>,
    out: Out,
) {
    let pump = Pump {
        session: Arc::new(Session { shared, who, sets: Mutex::default() }),
        queue: Queue::default(),
        reading: FuturesUnordered::new(),
        demand_in_hand: 0,
        bulk_in_hand: 0,
        ready: VecDeque::new(),
        told: HashSet::new(),
        parked: false,
    };
    if let Err(status) = Box::pin(pump.run(requests, out.clone())).await {
        // Nobody may be reading: the attempt's end must not wait for them.
        let _full_or_gone = out.try_send(Err(status));
    }
}

impl Pump {
    async fn run(mut self, mut requests: Streaming<v1::FetchRequest>, out: Out) -> Result<(), Status> {
        let limits = self.session.shared.limits;
        let mut liveness = tokio::time::interval(limits.liveness_every);
        let mut asking = true;
        let mut room: Option<Reserving> = None;
        let stall = tokio::time::sleep(limits.stall);
        tokio::pin!(stall);
        loop {
            self.start_reads();
            let sending = self.parked || !self.ready.is_empty();
            if sending && room.is_none() {
                room = Some(Box::pin(out.clone().reserve_owned()));
                stall.as_mut().reset(tokio::time::Instant::now() + limits.stall);
            }
            if !asking && self.queue.is_empty() {
                return Ok(());
            }
            tokio::select! {
                biased;
                _ = liveness.tick() => {
                    if !self.session.shared.desk.is_live(&self.session.who) {
                        return Err(over());
                    }
                }
                request = requests.next(), if asking => match request {
                    Some(request) => self.take(request?)?,
                    None => asking = false,
                },
                Some((wanted, outcome)) = self.reading.next(), if !self.reading.is_empty() => {
                    self.finish_read(wanted, outcome);
                }
                permit = wait_for(&mut room), if room.is_some() => {
                    room = None;
                    self.parked = false;
                    let permit = permit.map_err(|_| Status::cancelled("the client has gone"))?;
                    self.send(permit);
                }
                () = &mut stall, if room.is_some() && !self.parked => self.park(),
            }
        }
    }

    fn take(&mut self, request: v1::FetchRequest) -> Result<(), Status> {
        match Message::try_from(request)? {
            Message::Want { id, priority, address } => self.queue.push(id, priority, address),
            Message::Cancel { id } => {
                self.queue.cancel(id);
                let queue = &self.queue;
                let (mut demand, mut bulk) = (0, 0);
                self.ready.retain(|ready| {
                    let keep = queue.is_open(&ready.wanted);
                    if !keep {
                        *(if ready.wanted.priority == Priority::Demand { &mut demand } else { &mut bulk }) +=
                            1;
                    }
                    keep
                });
                self.demand_in_hand -= demand;
                self.bulk_in_hand -= bulk;
                Ok(())
            }
        }
    }

    fn start_reads(&mut self) {
        while !self.parked && self.demand_in_hand < IN_HAND {
            let Some(wanted) = self.queue.pop_demand() else { break };
            self.demand_in_hand += 1;
            self.reading.push(Box::pin(read(Arc::clone(&self.session), wanted)));
        }
        while !self.parked && self.bulk_in_hand < IN_HAND {
            let Some(wanted) = self.queue.pop_bulk() else { break };
            self.bulk_in_hand += 1;
            self.reading.push(Box::pin(read(Arc::clone(&self.session), wanted)));
        }
    }

    fn out_of_hand(&mut self, wanted: &Wanted) {
        let in_hand = match wanted.priority {
            Priority::Demand => &mut self.demand_in_hand,
            Priority::ReadAhead | Priority::Trace | Priority::Background => &mut self.bulk_in_hand,
        };
        *in_hand -= 1;
    }

    fn finish_read(&mut self, wanted: Wanted, outcome: Outcome) {
        if let Some((set, inode, path)) = outcome.changed
            && self.told.len() < MAX_TOLD
            && self.told.insert((set, inode))
        {
            self.session.shared.events.on_source_changed(&self.session.who, set, &path);
        }
        if self.parked {
            self.out_of_hand(&wanted);
            self.queue.put_back(wanted);
        } else if self.queue.is_open(&wanted) {
            self.ready.push_back(Ready { wanted, body: outcome.body, _budget: outcome.budget });
        } else {
            self.out_of_hand(&wanted);
        }
    }

    /// One piece of the most urgent answer; then its equals have their turn.
    fn send(&mut self, permit: OwnedPermit<Result<v1::FetchPiece, Status>>) {
        let best = self.ready.iter().map(|ready| ready.wanted.priority).min();
        let at = self.ready.iter().position(|ready| Some(ready.wanted.priority) == best);
        let Some(mut ready) = at.and_then(|at| self.ready.remove(at)) else { return };
        let id = ready.wanted.id;
        let (body, last) = match &ready.body {
            Err(failure) => (Body::Failure(failure.clone()), true),
            Ok(bytes) => {
                // A chunk read again after a stall has the same bytes: its hash says so.
                let start = ready.wanted.offset.min(bytes.len());
                let end = bytes.len().min(start + PIECE_BYTES);
                ready.wanted.offset = end;
                (Body::Data(bytes.slice(start..end)), end == bytes.len())
            }
        };
        permit.send(Ok(v1::FetchPiece { id, body: Some(body), last }));
        if last {
            self.out_of_hand(&ready.wanted);
            self.queue.close(&ready.wanted);
        } else {
            self.ready.push_back(ready);
        }
    }

    fn park(&mut self) {
        tracing::debug!(who = %self.session.who, "a client reads nothing; its chunks are let go");
        self.parked = true;
        while let Some(ready) = self.ready.pop_back() {
            self.out_of_hand(&ready.wanted);
            self.queue.put_back(ready.wanted);
        }
    }
}

async fn wait_for(room: &mut Option<Reserving>) -> Room {
    match room {
        Some(room) => room.as_mut().await,
        None => std::future::pending().await,
    }
}

async fn read(session: Arc<Session>, wanted: Wanted) -> (Wanted, Outcome) {
    let lane = match wanted.priority {
        Priority::Demand => &session.shared.demand,
        Priority::ReadAhead | Priority::Trace | Priority::Background => &session.shared.bulk,
    };
    let mut budget = Arc::clone(&lane.budget).acquire_many_owned(CHUNK_KIB).await.ok();
    let (body, changed) = match wanted.address {
        Address::Set { set, inode, index } => session.read_set(lane, set, inode, index).await,
        Address::Result { output, file, index } => {
            let read = session.shared.results.read_chunk(&session.who, output, file, index).await;
            (read.map_err(|error| of_result(&error)).and_then(fits), None)
        }
    };
    // What a small chunk does not need goes back at once.
    let used = body.as_ref().map_or(0, |bytes| bytes.len().div_ceil(1024));
    if let Some(budget) = &mut budget {
        drop(budget.split(usize::try_from(CHUNK_KIB).unwrap_or(0).saturating_sub(used)));
    }
    (wanted, Outcome { body, changed, budget })
}

/// The bytes or why not, and the file that is not what was frozen.
type SetRead = (Result<Bytes, v1::FetchFailure>, Option<(SetNumber, Inode, Vec<u8>)>);

impl Session {
    async fn read_set(&self, lane: &Lane, set: SetNumber, inode: Inode, index: u64) -> SetRead {
        let loaded = match self.set(set).await {
            Ok(loaded) => loaded,
            Err(OpenError::NotFound) => return (Err(not_found()), None),
            Err(OpenError::Unavailable(why)) => return (Err(failure(Kind::Io, why)), None),
        };
        let turn = Arc::clone(&lane.reads).acquire_owned().await;
        let reading = Arc::clone(&loaded);
        let read = tokio::task::spawn_blocking(move || reading.read_chunk(inode, index)).await;
        drop(turn);
        match read {
            Ok(Ok(chunk)) => (Ok(chunk.bytes().clone()), None),
            Ok(Err(ReadError::NotFound)) => (Err(not_found()), None),
            Ok(Err(error @ ReadError::Io { .. })) => {
                (Err(failure(Kind::Io, limb_common::error::chain(&error))), None)
            }
            Ok(Err(error @ ReadError::SourceChanged { .. })) => {
                if let Some(bytes) = self.read_moved(&loaded, inode, index).await {
                    return (Ok(bytes), None);
                }
                let detail = error.to_string();
                let ReadError::SourceChanged { path, .. } = error else {
                    return (Err(failure(Kind::SourceChanged, detail)), None);
                };
                (Err(failure(Kind::SourceChanged, detail)), Some((set, inode, path)))
            }
            Err(join) => (Err(failure(Kind::Io, join.to_string())), None),
        }
    }

    /// The set is earlier results, and this attempt itself has renamed the file since.
    async fn read_moved(&self, loaded: &LoadedSnapshot, inode: Inode, index: u64) -> Option<Bytes> {
        let manifest = loaded.manifest();
        let Some(ChunkRef::Data(id)) = manifest.node(inode)?.chunk(index) else { return None };
        let moved = self.shared.results.read_moved(&self.who, manifest.id(), inode, index);
        Some(id.verify(moved.await.ok()?).ok()?.bytes().clone())
    }

    async fn set(&self, set: SetNumber) -> Result<Arc<LoadedSnapshot>, OpenError> {
        let known = self.sets.lock().unwrap_or_else(PoisonError::into_inner).get(&set).cloned();
        if let Some(loaded) = known {
            return Ok(loaded);
        }
        let loaded = self.shared.open(&self.who, set).await?;
        self.sets.lock().unwrap_or_else(PoisonError::into_inner).insert(set, Arc::clone(&loaded));
        Ok(loaded)
    }
}

fn fits(bytes: Bytes) -> Result<Bytes, v1::FetchFailure> {
    let too_long = || failure(Kind::Io, "a chunk is longer than 1 MiB".to_owned());
    if bytes.len() > CHUNK_BYTES { Err(too_long()) } else { Ok(bytes) }
}

fn of_result(error: &ResultReadError) -> v1::FetchFailure {
    match error {
        ResultReadError::NotFound => not_found(),
        ResultReadError::Changed => failure(Kind::SourceChanged, error.to_string()),
        ResultReadError::Io(_) => failure(Kind::Io, limb_common::error::chain(error)),
    }
}

fn not_found() -> v1::FetchFailure {
    failure(Kind::NotFound, String::new())
}

fn failure(kind: Kind, detail: String) -> v1::FetchFailure {
    v1::FetchFailure { kind: kind.into(), detail }
}
