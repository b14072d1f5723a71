//! One `Fetch` stream: one task that takes requests, reads chunks and sends pieces.
//!
//! ```text
//! requests → Queue → reads in flight → ready → one piece at a time → client
//!                         ↑ budget, reads      ↑ the most urgent first, equals in turn
//! ```

use std::collections::{HashMap, HashSet, VecDeque};
use std::future::Future;
use std::ops::Range;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use limb_common::assignment::SetNumber;
use limb_common::chunk::CHUNK_BYTES;
use limb_common::codec::{self, Encoding};
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

/// Answers of one stream being read or ready to send, for demand and for the rest.
const IN_HAND: usize = 6;
/// Files whose change was told, so that it is told once.
const MAX_TOLD: usize = 10_000;
const CHUNK_KIB: u32 = 1024;
/// Demand no longer than this is sent without credit, before any other: somebody waits for a few
/// bytes. A whole chunk that is demanded is as heavy as one that is read ahead.
const LIGHT_BYTES: usize = 64 << 10;
/// Less is not worth a message of its own while the client gives credit in drops.
const LEAST_PIECE_BYTES: u64 = 16 << 10;

type Out = mpsc::Sender<Result<v1::FetchPiece, Status>>;
type Room = Result<OwnedPermit<Result<v1::FetchPiece, Status>>, mpsc::error::SendError<()>>;
type Reserving = Pin<Box<dyn Future<Output = Room> + Send>>;
type Reading = Pin<Box<dyn Future<Output = (Wanted, Outcome)> + Send>>;

/// What a read came to.
struct Outcome {
    /// As it is sent.
    body: Result<Bytes, v1::FetchFailure>,
    encoding: Encoding,
    /// Files of a pack that are not in the bytes.
    missing: Vec<v1::MissingFile>,
    /// Of a part.
    proof: Bytes,
    /// Files that are not what was frozen.
    changed: Vec<(SetNumber, Inode, Vec<u8>)>,
    /// Held until the last byte is sent.
    budget: Option<OwnedSemaphorePermit>,
}

struct Ready {
    wanted: Wanted,
    body: Result<Bytes, v1::FetchFailure>,
    encoding: Encoding,
    missing: Vec<v1::MissingFile>,
    proof: Bytes,
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
    credit: Credit,
    /// The client takes nothing; what was read for it was let go.
    parked: bool,
}

/// What may be sent beside light demand.
#[derive(Debug, Default)]
struct Credit {
    sent_bytes: u64,
    /// `None`: the client gave no limit.
    limit_bytes: Option<u64>,
}

impl Credit {
    fn left(&self) -> u64 {
        self.limit_bytes.map_or(u64::MAX, |limit| limit.saturating_sub(self.sent_bytes))
    }

    fn allows(&self, rest: u64) -> bool {
        self.left() >= rest.min(LEAST_PIECE_BYTES)
    }
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
        credit: Credit::default(),
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
        // Runs while something is ready and nothing of it leaves.
        let mut stalled_since: Option<tokio::time::Instant> = None;
        let stall = tokio::time::sleep(limits.stall);
        tokio::pin!(stall);
        loop {
            self.start_reads();
            if self.ready.is_empty() || self.parked {
                stalled_since = None;
            } else if stalled_since.is_none() {
                let now = tokio::time::Instant::now();
                stalled_since = Some(now);
                stall.as_mut().reset(now + limits.stall);
            }
            if room.is_none() && (self.parked || self.next_to_send().is_some()) {
                room = Some(Box::pin(out.clone().reserve_owned()));
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
                    stalled_since = None;
                    self.parked = false;
                    let permit = permit.map_err(|_| Status::cancelled("the client has gone"))?;
                    self.send(permit);
                }
                () = &mut stall, if stalled_since.is_some() => {
                    // Without room the client reads nothing; with it, it only gives no credit.
                    self.parked = room.is_some();
                    self.let_go();
                }
            }
        }
    }

    fn take(&mut self, request: v1::FetchRequest) -> Result<(), Status> {
        match Message::try_from(request)? {
            Message::Want { id, priority, address, encoded } => {
                self.queue.push(id, priority, address, encoded)?;
            }
            Message::Credit { bytes } => {
                // Never back: two messages that crossed would otherwise stop the stream.
                let limit = self.credit.limit_bytes.unwrap_or(0);
                self.credit.limit_bytes = Some(limit.max(bytes));
            }
            Message::Raise { id, priority } => {
                self.queue.raise(id, priority);
                if let Some(ready) = self.ready.iter_mut().find(|ready| ready.wanted.id == id)
                    && let Some(priority) = self.queue.priority(&ready.wanted)
                {
                    if priority.is_demand() && !ready.wanted.priority.is_demand() {
                        self.bulk_in_hand -= 1;
                        self.demand_in_hand += 1;
                    }
                    ready.wanted.priority = priority;
                }
            }
            Message::Cancel { id } => {
                self.queue.cancel(id);
                let gone = self.ready.iter().position(|ready| self.queue.priority(&ready.wanted).is_none());
                if let Some(ready) = gone.and_then(|at| self.ready.remove(at)) {
                    self.out_of_hand(&ready.wanted);
                }
            }
        }
        Ok(())
    }

    fn start_reads(&mut self) {
        while !self.parked && self.demand_in_hand < IN_HAND {
            let Some(wanted) = self.queue.pop_demand() else { break };
            self.demand_in_hand += 1;
            self.reading.push(Box::pin(read(Arc::clone(&self.session), wanted)));
        }
        while !self.parked && self.bulk_in_hand < IN_HAND && self.credit.left() > 0 {
            let Some(wanted) = self.queue.pop_bulk() else { break };
            self.bulk_in_hand += 1;
            self.reading.push(Box::pin(read(Arc::clone(&self.session), wanted)));
        }
    }

    fn out_of_hand(&mut self, wanted: &Wanted) {
        let in_hand =
            if wanted.priority.is_demand() { &mut self.demand_in_hand } else { &mut self.bulk_in_hand };
        *in_hand -= 1;
    }

    fn finish_read(&mut self, mut wanted: Wanted, outcome: Outcome) {
        for (set, inode, path) in outcome.changed {
            if self.told.len() < MAX_TOLD && self.told.insert((set, inode)) {
                self.session.shared.events.on_source_changed(&self.session.who, set, &path);
            }
        }
        if self.parked {
            self.out_of_hand(&wanted);
            self.queue.put_back(wanted);
            return;
        }
        let Some(priority) = self.queue.priority(&wanted) else { return self.out_of_hand(&wanted) };
        if priority.is_demand() && !wanted.priority.is_demand() {
            self.bulk_in_hand -= 1;
            self.demand_in_hand += 1;
        }
        wanted.priority = priority;
        let Outcome { body, encoding, missing, proof, budget, .. } = outcome;
        self.ready.push_back(Ready { wanted, body, encoding, missing, proof, _budget: budget });
    }

    /// The most urgent answer. Demand before the rest and light demand before all; demand in turn, so
    /// that one does not wait for all of another; the rest in the order in which it was asked for,
    /// because that is the order in which it will be read. Nothing but light demand without credit.
    fn next_to_send(&self) -> Option<usize> {
        let may = |ready: &Ready| ready.is_light() || self.credit.allows(ready.left_bytes());
        let best = self.ready.iter().enumerate().filter(|(_, ready)| may(ready)).min_by_key(|(_, ready)| {
            let Wanted { priority, ticket, .. } = ready.wanted;
            (priority, !ready.is_light(), if priority.is_demand() { 0 } else { ticket })
        });
        best.map(|(at, _)| at)
    }

    fn send(&mut self, permit: OwnedPermit<Result<v1::FetchPiece, Status>>) {
        let Some(mut ready) = self.next_to_send().and_then(|at| self.ready.remove(at)) else { return };
        let id = ready.wanted.id;
        let counted = !ready.is_light();
        let (body, last) = match &ready.body {
            Err(failure) => (Body::Failure(failure.clone()), true),
            Ok(bytes) => {
                // A chunk read again after a stall has the same bytes: its hash says so, and the same
                // bytes are encoded as before.
                let start = ready.wanted.offset.min(bytes.len());
                let most = if counted { self.credit.left() } else { u64::MAX };
                let piece = PIECE_BYTES.min(usize::try_from(most).unwrap_or(PIECE_BYTES));
                let end = bytes.len().min(start + piece);
                ready.wanted.offset = end;
                if counted {
                    self.credit.sent_bytes += (end - start) as u64;
                }
                (Body::Data(bytes.slice(start..end)), end == bytes.len())
            }
        };
        let (missing, proof) = (std::mem::take(&mut ready.missing), std::mem::take(&mut ready.proof));
        let encoding = v1::ChunkEncoding::from(ready.encoding).into();
        permit.send(Ok(v1::FetchPiece { id, body: Some(body), last, missing, counted, proof, encoding }));
        if last {
            self.out_of_hand(&ready.wanted);
            self.queue.close(&ready.wanted);
        } else {
            self.ready.push_back(ready);
        }
    }

    /// What is read again when the client goes on need not be held for it meanwhile.
    fn let_go(&mut self) {
        tracing::debug!(who = %self.session.who, parked = self.parked, "a client takes nothing");
        while let Some(ready) = self.ready.pop_back() {
            self.out_of_hand(&ready.wanted);
            self.queue.put_back(ready.wanted);
        }
    }
}

impl Ready {
    fn is_light(&self) -> bool {
        let len = self.body.as_ref().map_or(0, Bytes::len);
        self.wanted.priority.is_demand() && len <= LIGHT_BYTES
    }

    fn left_bytes(&self) -> u64 {
        self.body.as_ref().map_or(0, |bytes| bytes.len().saturating_sub(self.wanted.offset) as u64)
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
    let budget = Arc::clone(&lane.budget).acquire_many_owned(CHUNK_KIB).await.ok();
    let mut outcome = match &wanted.address {
        &Address::Set { set, inode, index } => session.read_set(lane, set, inode, index).await,
        &Address::Result { output, file, index } => {
            let read = session.shared.results.read_chunk(&session.who, output, file, index).await;
            Outcome::from(read.map_err(|error| of_result(&error)).and_then(fits))
        }
        &Address::Part { set, inode, index, first, count } => {
            let groups = first as usize..(first as usize).saturating_add(count as usize);
            session.read_part(lane, set, inode, index, groups).await
        }
        Address::Files { set, inodes } => session.read_files(lane, *set, Arc::clone(inodes)).await,
    };
    if wanted.encoded && session.shared.compress && !matches!(wanted.address, Address::Part { .. }) {
        outcome.encode(&session, lane).await;
    }
    outcome.budget = budget;
    // What a small chunk does not need goes back at once.
    let used = outcome.body.as_ref().map_or(0, |bytes| bytes.len().div_ceil(1024));
    if let Some(budget) = &mut outcome.budget {
        drop(budget.split(usize::try_from(CHUNK_KIB).unwrap_or(0).saturating_sub(used)));
    }
    (wanted, outcome)
}

impl From<Result<Bytes, v1::FetchFailure>> for Outcome {
    fn from(body: Result<Bytes, v1::FetchFailure>) -> Self {
        let (missing, proof, changed) = (Vec::new(), Bytes::new(), Vec::new());
        Self { body, encoding: Encoding::Raw, missing, proof, changed, budget: None }
    }
}

impl Outcome {
    /// Says the same in fewer bytes, where that is possible without much work.
    async fn encode(&mut self, session: &Session, lane: &Lane) {
        let Ok(plain) = &self.body else { return };
        let (plain, plain_len) = (plain.clone(), plain.len());
        let turn = Arc::clone(&lane.encoders).acquire_owned().await;
        let encoded = tokio::task::spawn_blocking(move || codec::encode(&plain)).await;
        drop(turn);
        // Without it, they go as they are.
        if let Ok((encoding, body)) = encoded {
            session.shared.events.on_encoded(&session.who, plain_len, body.len());
            (self.encoding, self.body) = (encoding, Ok(body));
        }
    }
}

impl Session {
    async fn read_set(&self, lane: &Lane, set: SetNumber, inode: Inode, index: u64) -> Outcome {
        let loaded = match self.set(set).await {
            Ok(loaded) => loaded,
            Err(OpenError::NotFound) => return Err(not_found()).into(),
            Err(OpenError::Unavailable(why)) => return Err(failure(Kind::Io, why)).into(),
        };
        let turn = Arc::clone(&lane.reads).acquire_owned().await;
        let reading = Arc::clone(&loaded);
        let read = tokio::task::spawn_blocking(move || reading.read_chunk(inode, index)).await;
        drop(turn);
        match read {
            Ok(Ok(chunk)) => Ok(chunk.bytes().clone()).into(),
            Ok(Err(error)) => {
                if matches!(error, ReadError::SourceChanged { .. })
                    && let Some(bytes) = self.read_moved(&loaded, inode, index).await
                {
                    return Ok(bytes).into();
                }
                let (failure, path) = refusal(error);
                let changed = path.map(|path| (set, inode, path)).into_iter().collect();
                Outcome { changed, ..Outcome::from(Err(failure)) }
            }
            Err(join) => Err(failure(Kind::Io, join.to_string())).into(),
        }
    }

    async fn read_part(
        &self,
        lane: &Lane,
        set: SetNumber,
        inode: Inode,
        index: u64,
        groups: Range<usize>,
    ) -> Outcome {
        let loaded = match self.set(set).await {
            Ok(loaded) => loaded,
            Err(OpenError::NotFound) => return Err(not_found()).into(),
            Err(OpenError::Unavailable(why)) => return Err(failure(Kind::Io, why)).into(),
        };
        let turn = Arc::clone(&lane.reads).acquire_owned().await;
        let read = tokio::task::spawn_blocking(move || loaded.read_part(inode, index, &groups)).await;
        drop(turn);
        match read {
            Ok(Ok(part)) => Outcome { proof: part.proof, ..Outcome::from(Ok(part.bytes)) },
            Ok(Err(error)) => {
                let (failure, path) = refusal(error);
                let changed = path.map(|path| (set, inode, path)).into_iter().collect();
                Outcome { changed, ..Outcome::from(Err(failure)) }
            }
            Err(join) => Err(failure(Kind::Io, join.to_string())).into(),
        }
    }

    /// Small files of one set as one answer.
    async fn read_files(&self, lane: &Lane, set: SetNumber, inodes: Arc<[Inode]>) -> Outcome {
        let loaded = match self.set(set).await {
            Ok(loaded) => loaded,
            Err(OpenError::NotFound) => return Err(not_found()).into(),
            Err(OpenError::Unavailable(why)) => return Err(failure(Kind::Io, why)).into(),
        };
        let turn = Arc::clone(&lane.reads).acquire_owned().await;
        let (reading, wanted) = (Arc::clone(&loaded), Arc::clone(&inodes));
        let read = tokio::task::spawn_blocking(move || reading.read_files(&wanted)).await;
        drop(turn);
        let pack = match read {
            Ok(pack) => pack,
            Err(join) => return Err(failure(Kind::Io, join.to_string())).into(),
        };
        let mut outcome = Outcome::from(Ok(pack.bytes));
        for (at, error) in pack.missing {
            // A file that this attempt itself moved is found when it is asked for by itself.
            let (failure, path) = refusal(error);
            let inode = inodes.get(at).copied();
            outcome.changed.extend(path.zip(inode).map(|(path, inode)| (set, inode, path)));
            let at = u32::try_from(at).unwrap_or(u32::MAX);
            outcome.missing.push(v1::MissingFile { at, failure: Some(failure) });
        }
        outcome
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

/// What is said of a failed read, and the path of a file that is not what was frozen.
fn refusal(error: ReadError) -> (v1::FetchFailure, Option<Vec<u8>>) {
    match error {
        ReadError::NotFound => (not_found(), None),
        ReadError::Io { .. } => (failure(Kind::Io, limb_common::error::chain(&error)), None),
        ReadError::SourceChanged { .. } => {
            let detail = error.to_string();
            let ReadError::SourceChanged { path, .. } = error else { return (not_found(), None) };
            (failure(Kind::SourceChanged, detail), Some(path))
        }
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
