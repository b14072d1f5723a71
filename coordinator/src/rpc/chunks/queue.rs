//! Which request of a stream comes next: a pure queue of four priorities.

use std::collections::{HashMap, VecDeque};

use limb_common::assignment::{OutputNumber, SetNumber};
use limb_common::manifest::Inode;
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Address {
    Set { set: SetNumber, inode: Inode, index: u64 },
    Result { output: OutputNumber, file: u64, index: u64 },
}

/// One chunk that a client wants.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) id: u64,
    /// Tells two uses of one id apart, the first of which was cancelled.
    pub(super) ticket: u64,
    pub(super) priority: Priority,
    pub(super) address: Address,
    /// Where to go on: earlier bytes were sent before the client stalled.
    pub(super) offset: usize,
}

pub(super) enum Message {
    Want { id: u64, priority: Priority, address: Address },
    Cancel { id: u64 },
}

impl TryFrom<v1::FetchRequest> for Message {
    type Error = Status;

    fn try_from(request: v1::FetchRequest) -> Result<Self, Status> {
        let id = request.id;
        let address = match request.what {
            Some(What::SetChunk(v1::SetChunk { set, inode, index })) => {
                Address::Set { set: SetNumber(set), inode: Inode(inode), index }
            }
            Some(What::ResultChunk(v1::ResultChunk { output, file, index })) => {
                Address::Result { output: OutputNumber(output), file, index }
            }
            Some(What::Cancel(true)) => return Ok(Self::Cancel { id }),
            Some(What::Cancel(false)) | None => {
                return Err(Status::invalid_argument("FetchRequest.what is missing"));
            }
        };
        let priority = match request.priority {
            0 => Priority::Demand,
            1 => Priority::ReadAhead,
            2 => Priority::Trace,
            3 => Priority::Background,
            _ => return Err(Status::invalid_argument("FetchRequest.priority is not known")),
        };
        Ok(Self::Want { id, priority, address })
    }
}

/// What a stream was asked and has not answered.
#[derive(Debug, Default)]
pub(super) struct Queue {
    waiting: [VecDeque<Wanted>; PRIORITIES],
    /// The ticket of each open id, waiting or being answered.
    open: HashMap<u64, u64>,
    next_ticket: u64,
}

impl Queue {
    pub(super) fn push(&mut self, id: u64, priority: Priority, address: Address) -> Result<(), Status> {
        if self.open.len() >= MAX_OPEN {
            return Err(Status::resource_exhausted("too many requests are open on this stream"));
        }
        let ticket = self.next_ticket;
        if self.open.insert(id, ticket).is_some() {
            return Err(Status::invalid_argument("this FetchRequest.id is open already"));
        }
        self.next_ticket += 1;
        let wanted = Wanted { id, ticket, priority, address, offset: 0 };
        self.waiting[priority as usize].push_back(wanted);
        Ok(())
    }

    /// To the front of its kind, if it is still wanted.
    pub(super) fn put_back(&mut self, wanted: Wanted) {
        if self.is_open(&wanted) {
            self.waiting[wanted.priority as usize].push_front(wanted);
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

    pub(super) fn is_open(&self, wanted: &Wanted) -> bool {
        self.open.get(&wanted.id) == Some(&wanted.ticket)
    }

    pub(super) fn close(&mut self, wanted: &Wanted) {
        if self.is_open(wanted) {
            self.open.remove(&wanted.id);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.open.is_empty()
    }
}
