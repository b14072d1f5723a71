//! Which request of a stream comes next: a pure queue of four priorities.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use limb_common::assignment::{OutputNumber, SetNumber};
use limb_common::manifest::Inode;
use limb_common::wire::MAX_PACK_FILES;
use limb_proto::v1;
use limb_proto::v1::fetch_request::What;
use tonic::Status;

/// Requests that one stream may have open: a read-ahead of 4 GiB. A well-behaved agent is far
/// below.
pub(super) const MAX_OPEN: usize = 4096;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) enum Priority {
    Demand,
    ReadAhead,
    Trace,
    Background,
}

const PRIORITIES: usize = 4;

impl Priority {
    pub(super) fn is_demand(self) -> bool {
        self == Self::Demand
    }
}

impl TryFrom<u32> for Priority {
    type Error = Status;

    fn try_from(level: u32) -> Result<Self, Status> {
        match level {
            0 => Ok(Self::Demand),
            1 => Ok(Self::ReadAhead),
            2 => Ok(Self::Trace),
            3 => Ok(Self::Background),
            _ => Err(Status::invalid_argument("FetchRequest.priority is not known")),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) enum Address {
    Set {
        set: SetNumber,
        inode: Inode,
        index: u64,
    },
    Result {
        output: OutputNumber,
        file: u64,
        index: u64,
    },
    /// Small files, one after the other.
    Files {
        set: SetNumber,
        inodes: Arc<[Inode]>,
    },
    /// A run of groups of one chunk.
    Part {
        set: SetNumber,
        inode: Inode,
        index: u64,
        first: u32,
        count: u32,
    },
}

/// One answer that a client wants.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) id: u64,
    /// In order of asking; also tells two uses of one id apart, the first of which was cancelled.
    pub(super) ticket: u64,
    pub(super) priority: Priority,
    pub(super) address: Address,
    /// The client reads encodings, and its link is slow enough for them to pay.
    pub(super) encoded: bool,
    /// Where to go on: earlier bytes were sent before the client stalled.
    pub(super) offset: usize,
}

pub(super) enum Message {
    Want { id: u64, priority: Priority, address: Address, encoded: bool },
    Cancel { id: u64 },
    Raise { id: u64, priority: Priority },
    Credit { bytes: u64 },
}

impl TryFrom<v1::FetchRequest> for Message {
    type Error = Status;

    fn try_from(request: v1::FetchRequest) -> Result<Self, Status> {
        let id = request.id;
        let priority = Priority::try_from(request.priority)?;
        let address = match request.what {
            Some(What::SetChunk(v1::SetChunk { set, inode, index })) => {
                Address::Set { set: SetNumber(set), inode: Inode(inode), index }
            }
            Some(What::ResultChunk(v1::ResultChunk { output, file, index })) => {
                Address::Result { output: OutputNumber(output), file, index }
            }
            Some(What::SetFiles(v1::SetFiles { set, inodes })) => {
                if inodes.is_empty() || inodes.len() > MAX_PACK_FILES {
                    return Err(Status::invalid_argument("SetFiles.inodes has none or too many"));
                }
                Address::Files { set: SetNumber(set), inodes: inodes.into_iter().map(Inode).collect() }
            }
            Some(What::SetPart(v1::SetPart { set, inode, index, first, count })) => {
                Address::Part { set: SetNumber(set), inode: Inode(inode), index, first, count }
            }
            Some(What::Cancel(true)) => return Ok(Self::Cancel { id }),
            Some(What::Raise(true)) => return Ok(Self::Raise { id, priority }),
            Some(What::Credit(bytes)) => return Ok(Self::Credit { bytes }),
            Some(What::Cancel(false) | What::Raise(false)) | None => {
                return Err(Status::invalid_argument("FetchRequest.what is missing"));
            }
        };
        Ok(Self::Want { id, priority, address, encoded: request.encoded })
    }
}

/// What a stream was asked and has not answered.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: [VecDeque<Wanted>; PRIORITIES],
    /// Ticket and priority of each open id, waiting or being answered.
    open: HashMap<u64, (u64, Priority)>,
    next_ticket: u64,
}

impl Queue {
    pub(super) fn push(
        &mut self,
        id: u64,
        priority: Priority,
        address: Address,
        encoded: bool,
    ) -> Result<(), Status> {
        if self.open.len() >= MAX_OPEN {
            return Err(Status::resource_exhausted("too many requests are open on this stream"));
        }
        let ticket = self.next_ticket;
        if self.open.insert(id, (ticket, priority)).is_some() {
            return Err(Status::invalid_argument("this FetchRequest.id is open already"));
        }
        self.next_ticket += 1;
        let wanted = Wanted { id, ticket, priority, address, encoded, offset: 0 };
        self.waiting[priority as usize].push_back(wanted);
        Ok(())
    }

    /// To the front of its kind, if it is still wanted.
    pub(super) fn put_back(&mut self, mut wanted: Wanted) {
        if let Some(priority) = self.priority(&wanted) {
            wanted.priority = priority;
            self.waiting[priority as usize].push_front(wanted);
        }
    }

    pub(super) fn pop_demand(&mut self) -> Option<Wanted> {
        self.waiting[Priority::Demand as usize].pop_front()
    }

    pub(super) fn pop_bulk(&mut self) -> Option<Wanted> {
        self.waiting[1..].iter_mut().find_map(VecDeque::pop_front)
    }

    pub(super) fn cancel(&mut self, id: u64) {
        if self.open.remove(&id).is_some() {
            // Cancelled ones are removed at once: otherwise a client could pile them up.
            self.waiting.iter_mut().for_each(|queue| queue.retain(|wanted| wanted.id != id));
        }
    }

    /// Only upwards; an id that is answered already is no mistake, the two crossed on the way.
    pub(super) fn raise(&mut self, id: u64, priority: Priority) {
        let Some((_, now)) = self.open.get_mut(&id).filter(|(_, now)| priority < *now) else { return };
        let before = std::mem::replace(now, priority);
        let queue = &mut self.waiting[before as usize];
        let waits = queue.iter().position(|wanted| wanted.id == id).and_then(|at| queue.remove(at));
        if let Some(mut wanted) = waits {
            wanted.priority = priority;
            self.waiting[priority as usize].push_back(wanted);
        }
    }

    /// Its priority now; `None`: it is not wanted any more.
    pub(super) fn priority(&self, wanted: &Wanted) -> Option<Priority> {
        let (ticket, priority) = self.open.get(&wanted.id)?;
        (*ticket == wanted.ticket).then_some(*priority)
    }

    pub(super) fn close(&mut self, wanted: &Wanted) {
        if self.priority(wanted).is_some() {
            self.open.remove(&wanted.id);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }
}
