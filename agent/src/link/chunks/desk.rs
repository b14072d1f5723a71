//! Everything outstanding, and what must be said to home about it. No I/O: the stream's task
//! feeds it and sends what lies in [`Desk::outbox`].

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use limb_proto::v1;
use tokio::sync::oneshot;

use super::{Answer, Command, Wanted};
use crate::fetch::{ChunkAddress, Priority, TransportError};

#[derive(Debug, Default)]
pub(super) struct Desk {
    /// By the number that the asker chose.
    outstanding: BTreeMap<u64, Outstanding>,
    /// From the stream's own ids. Ids of cancelled asks are absent: their pieces are ignored.
    by_id: HashMap<u64, u64>,
    last_id: u64,
    pub(super) outbox: VecDeque<v1::FetchRequest>,
    /// The last piece, or since when something is outstanding.
    active_at: Duration,
}

#[derive(Debug)]
struct Outstanding {
    wanted: Wanted,
    tell: oneshot::Sender<Answer>,
    /// On the current stream.
    id: Option<u64>,
    got: BytesMut,
    active_at: Duration,
}

impl Desk {
    pub(super) fn is_empty(&self) -> bool {
        self.outstanding.is_empty()
    }

    pub(super) fn take(&mut self, command: Command, now: Duration, connected: bool) {
        match command {
            Command::Ask { number, wanted, tell } => {
                if self.outstanding.is_empty() {
                    self.active_at = now;
                }
                let entry = Outstanding { wanted, tell, id: None, got: BytesMut::new(), active_at: now };
                self.outstanding.insert(number, entry);
                if connected {
                    self.say(number, now);
                }
            }
            Command::Raise { number, priority } => {
                let Some(entry) = self.outstanding.get_mut(&number) else { return };
                entry.wanted.priority = priority;
                if connected && entry.got.is_empty() {
                    let old = entry.id.take();
                    self.say(number, now);
                    self.take_back(old);
                }
            }
            Command::Cancel { number } => {
                if let Some(entry) = self.outstanding.remove(&number) {
                    self.take_back(entry.id);
                }
            }
        }
    }

    /// A new stream knows nothing: everything is asked again, the most urgent first.
    pub(super) fn ask_all_again(&mut self, now: Duration) {
        self.outbox.clear();
        self.by_id.clear();
        self.active_at = now;
        let mut numbers: Vec<_> =
            self.outstanding.iter().map(|(number, entry)| (entry.wanted.priority, *number)).collect();
        numbers.sort_unstable();
        for (_, number) in numbers {
            self.say(number, now);
        }
    }

    /// Opening a stream may have taken long; only now can pieces come.
    pub(super) fn restart_patience(&mut self, now: Duration) {
        self.active_at = now;
        self.outstanding.values_mut().for_each(|entry| entry.active_at = now);
    }

    fn say(&mut self, number: u64, now: Duration) {
        let Some(entry) = self.outstanding.get_mut(&number) else { return };
        self.last_id += 1;
        let id = self.last_id;
        entry.id = Some(id);
        entry.got.clear();
        entry.active_at = now;
        self.by_id.insert(id, number);
        self.outbox.push_back(v1::FetchRequest {
            id,
            what: Some(what(entry.wanted.address)),
            priority: level(entry.wanted.priority),
        });
    }

    fn take_back(&mut self, id: Option<u64>) {
        let Some(id) = id else { return };
        self.by_id.remove(&id);
        let unsent = self.outbox.iter().position(|request| request.id == id);
        match unsent {
            Some(at) => drop(self.outbox.remove(at)),
            None => self.outbox.push_back(v1::FetchRequest {
                id,
                what: Some(v1::fetch_request::What::Cancel(true)),
                priority: 0,
            }),
        }
    }

    pub(super) fn piece(&mut self, piece: v1::FetchPiece, now: Duration) {
        self.active_at = now;
        let Some(&number) = self.by_id.get(&piece.id) else { return };
        let Some(entry) = self.outstanding.get_mut(&number) else { return };
        entry.active_at = now;
        let len = entry.wanted.len as usize;
        let answer = match piece.body {
            Some(v1::fetch_piece::Body::Data(data)) => {
                if entry.got.len() + data.len() > len {
                    let detail = format!("more than {len} bytes came");
                    Some(Err(TransportError::Garbled { detail }))
                } else {
                    if entry.got.capacity() < len {
                        entry.got.reserve(len);
                    }
                    entry.got.extend_from_slice(&data);
                    piece.last.then(|| Ok(entry.got.split().freeze()))
                }
            }
            Some(v1::fetch_piece::Body::Failure(failure)) => Some(Err(refusal(failure))),
            None => Some(Err(TransportError::Garbled { detail: "a piece has no body".to_owned() })),
        };
        if let Some(answer) = answer {
            self.finish(number, piece.id, piece.last, answer);
        }
    }

    fn finish(&mut self, number: u64, id: u64, last: bool, answer: Result<Bytes, TransportError>) {
        self.by_id.remove(&id);
        let garbled = matches!(answer, Err(TransportError::Garbled { .. }));
        if let Some(entry) = self.outstanding.remove(&number) {
            // The asker may be gone since.
            let _gone: Result<(), _> = entry.tell.send(answer);
        }
        if garbled && !last {
            self.take_back(Some(id));
        }
    }

    /// Forgets what nobody waits for.
    pub(super) fn sweep(&mut self) {
        let gone: Vec<_> = self
            .outstanding
            .iter()
            .filter(|(_, entry)| entry.tell.is_closed())
            .map(|(number, _)| *number)
            .collect();
        for number in gone {
            if let Some(entry) = self.outstanding.remove(&number) {
                self.take_back(entry.id);
            }
        }
    }

    /// How long nothing has come although something should.
    pub(super) fn silence(&self, now: Duration) -> Duration {
        if self.is_empty() { Duration::ZERO } else { now.saturating_sub(self.active_at) }
    }

    /// The longest that a demanded chunk has waited for its next piece.
    pub(super) fn longest_wait(&self, now: Duration) -> Duration {
        self.outstanding
            .values()
            .filter(|entry| entry.wanted.priority == Priority::Demand)
            .map(|entry| now.saturating_sub(entry.active_at))
            .max()
            .unwrap_or_default()
    }
}

fn what(address: ChunkAddress) -> v1::fetch_request::What {
    match address {
        ChunkAddress::Set { set, inode, index } => {
            v1::fetch_request::What::SetChunk(v1::SetChunk { set: set.0, inode: inode.0, index })
        }
        ChunkAddress::Result { output, file, index } => {
            v1::fetch_request::What::ResultChunk(v1::ResultChunk { output: output.0, file, index })
        }
    }
}

fn level(priority: Priority) -> u32 {
    match priority {
        Priority::Demand => 0,
        Priority::ReadAhead => 1,
        Priority::Trace => 2,
        Priority::Background => 3,
    }
}

fn refusal(failure: v1::FetchFailure) -> TransportError {
    use v1::fetch_failure::Kind;
    let (kind, detail) = (failure.kind(), failure.detail);
    match kind {
        Kind::NotFound => TransportError::NotFound,
        Kind::SourceChanged => TransportError::SourceChanged { detail },
        Kind::Io => TransportError::Io { detail },
        Kind::Unspecified => {
            TransportError::Garbled { detail: format!("a failure of no known kind: {detail}") }
        }
    }
}
