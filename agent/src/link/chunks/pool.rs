//! The task that owns everything outstanding: takes commands and what the lanes tell, deals, and
//! sends what the desk wants said.

use std::sync::Arc;
use std::time::Duration;

use limb_common::clock;
use limb_common::task::{self, Task};
use limb_proto::v1::FetchRequest;
use tokio::sync::mpsc::error::TrySendError;
use tokio::sync::{Notify, mpsc, watch};
use tokio_util::sync::CancellationToken;

use super::desk::Desk;
use super::lane::{self, Event};
use super::{ChunkPatience, Command};
use crate::link::channels::Channels;

/// Pieces between the lanes and the pool, 256 KiB each at most.
const EVENTS: usize = 32;
/// How often silence is looked for.
const TICK: Duration = Duration::from_millis(250);

struct Pool {
    channels: Arc<dyn Channels>,
    patience: ChunkPatience,
    desk: Desk,
    lanes: Vec<LaneEnd>,
    events: mpsc::Sender<Event>,
}

/// The pool's end of a lane.
struct LaneEnd {
    requests: Option<mpsc::Sender<FetchRequest>>,
    silence: Arc<Notify>,
    _task: Task<()>,
}

pub(super) async fn drive(
    channels: Arc<dyn Channels>,
    mut commands: mpsc::Receiver<Command>,
    bandwidth_delay: watch::Sender<Option<u64>>,
    patience: ChunkPatience,
    stop: CancellationToken,
) {
    let (events, mut told) = mpsc::channel(EVENTS);
    let mut pool = Pool { channels, patience, desk: Desk::default(), lanes: Vec::new(), events };
    let mut tick = tokio::time::interval(TICK.min(patience.stream / 2));
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            _ = tick.tick() => pool.look_for_silence(),
            command = commands.recv() => match command {
                Some(command) => pool.desk.take(command),
                None => return,
            },
            Some(event) = told.recv() => pool.hear(event),
        }
        while let Ok(command) = commands.try_recv() {
            pool.desk.take(command);
        }
        while let Ok(event) = told.try_recv() {
            pool.hear(event);
        }
        pool.desk.deal(now());
        if pool.desk.wants_lane() {
            pool.add_lane();
        }
        pool.send();
        let measured = pool.desk.bandwidth_delay_bytes();
        bandwidth_delay.send_if_modified(|last| std::mem::replace(last, measured) != measured);
    }
}

impl Pool {
    fn add_lane(&mut self) {
        let number = self.desk.add_lane();
        let silence = Arc::new(Notify::new());
        let (channels, events) = (Arc::clone(&self.channels), self.events.clone());
        let life = lane::run(number, channels, events, Arc::clone(&silence), self.patience.stream);
        self.lanes.push(LaneEnd { requests: None, silence, _task: task::spawn("chunk lane", life) });
    }

    fn hear(&mut self, event: Event) {
        match event {
            Event::Opening { lane, requests } => {
                self.desk.opened(lane, now());
                if let Some(end) = self.lanes.get_mut(lane) {
                    end.requests = Some(requests);
                }
            }
            Event::Open { lane, round_trip } => {
                self.desk.answered(lane, now());
                if let Some(took) = round_trip {
                    self.desk.round_trip(now(), took);
                }
            }
            Event::Piece { lane, piece } => self.desk.piece(lane, piece, now()),
            Event::Cut { lane } => {
                self.desk.cut(lane);
                if let Some(end) = self.lanes.get_mut(lane) {
                    end.requests = None;
                }
            }
        }
    }

    fn look_for_silence(&mut self) {
        self.desk.sweep(now(), self.patience.stream);
        tracing::trace!(desk = ?self.desk.describe(), "chunks");
        for number in self.desk.silent_lanes(now(), self.patience.stream) {
            if let Some(end) = self.lanes.get(number) {
                end.silence.notify_waiters();
            }
        }
    }

    /// What a lane has no room for now is sent at the next turn.
    fn send(&mut self) {
        for (number, end) in self.lanes.iter().enumerate() {
            let (Some(requests), Some(outbox)) = (&end.requests, self.desk.outbox(number)) else { continue };
            while let Some(request) = outbox.pop_front() {
                if let Err(TrySendError::Full(request)) = requests.try_send(request) {
                    outbox.push_front(request);
                    break;
                }
            }
        }
    }
}

fn now() -> Duration {
    clock::boottime().since_boot()
}
