//! Following a run: its output byte for byte, its events as lines, ctrl-C as a question, and a
//! coordinator that dies in between.
//!
//! Invariant: a byte of output is written once, in order, however often the connection broke:
//! the offset of the next byte is what a new connection starts from.

use std::future::Future;
use std::time::Duration;

use limb_common::phase::LimbExit;
use limb_proto::v1::{Event, EventsRequest, ListRunsRequest, LogChunk, LogsRequest, RunInfo, StopRequest};
use tokio::sync::oneshot;
use tonic::{Status, Streaming};

use super::client::{self, Owner, Start};
use super::render;
use super::talk::{Failure, Talk, Wait, clean};
use crate::settings::Settings;

/// How often a wait looks at the clock.
pub(super) const TICK: Duration = Duration::from_millis(500);
/// A supervised coordinator is back within this; after it, this client starts one.
const RESTART_GRACE: Duration = Duration::from_secs(3);
/// Between two tries to reach a coordinator.
const REDIAL: Duration = Duration::from_millis(250);
/// Output that the coordinator already has arrives within this after the run is over.
const LAST_OUTPUT: Duration = Duration::from_secs(10);

/// What `limb run` follows.
#[derive(Debug)]
pub(super) struct Interest {
    pub(super) run_id: String,
    /// stdout is kept for the JSON document.
    pub(super) output_to_stderr: bool,
}

/// How following ended.
#[derive(Debug)]
pub(super) enum End {
    Final(Box<RunInfo>),
    Detached(String),
}

/// Awaits while the wait on the screen goes on.
pub(super) async fn ticking<F: Future>(wait: &mut Wait, future: F) -> F::Output {
    let mut future = std::pin::pin!(future);
    loop {
        match tokio::time::timeout(TICK, future.as_mut()).await {
            Ok(output) => return output,
            Err(_) => wait.tick(),
        }
    }
}

/// What has been seen of a run, so that a new connection starts where the old one broke.
#[derive(Debug, Default)]
struct Seen {
    event_seq: u64,
    attempt: u32,
    offset: u64,
}

struct Follower<'a> {
    talk: &'a Talk,
    interest: &'a Interest,
    seen: Seen,
    wait: Option<Wait>,
    /// Nobody reads the output any more; the run goes on.
    output_gone: bool,
}

/// Follows until the ledger says that the run is over, or the owner detaches.
pub(super) async fn to_the_end(
    settings: &Settings,
    talk: &Talk,
    mut owner: Owner,
    interest: Interest,
) -> Result<End, Failure> {
    let mut interrupts = Interrupts::listen()?;
    let mut follower = Follower {
        talk,
        interest: &interest,
        seen: Seen::default(),
        wait: Some(talk.wait("waiting for a box")),
        output_gone: false,
    };
    loop {
        match follower.connected(&mut owner, &mut interrupts).await {
            Ok(Round::Detached) => return Ok(End::Detached(interest.run_id.clone())),
            Ok(Round::Over) => {
                if let Some(info) = final_info(&mut owner, &interest.run_id).await {
                    return Ok(End::Final(Box::new(info)));
                }
            }
            Err(status) if is_refusal(&status) => return Err(Failure::status(&status)),
            Err(status) => {
                follower.say(&format!(
                    "the coordinator does not answer ({}); the run goes on",
                    clean(status.message())
                ));
            }
        }
        owner = reconnect(settings, &mut follower, &mut interrupts).await?;
    }
}

/// Asking again would get the same answer.
fn is_refusal(status: &Status) -> bool {
    matches!(Failure::status(status).exit, LimbExit::Refused)
}

/// The run's end as the ledger has it, if it is over.
async fn final_info(owner: &mut Owner, run_id: &str) -> Option<RunInfo> {
    let request = ListRunsRequest { all: true, run: run_id.to_owned() };
    let runs = owner.list_runs(request).await.ok()?.into_inner().runs;
    let info = runs.into_iter().find(|run| run.run_id == run_id)?;
    // A run that ended before its first attempt has no outcome.
    let over = info.outcome.as_ref().map_or(info.ended_unix_ms > 0, |outcome| outcome.r#final);
    over.then_some(info)
}

pub(super) fn is_over(info: &RunInfo) -> bool {
    info.ended_unix_ms > 0
}

async fn reconnect(
    settings: &Settings,
    follower: &mut Follower<'_>,
    interrupts: &mut Interrupts,
) -> Result<Owner, Failure> {
    let mut wait = follower.talk.wait("looking for the coordinator");
    let mut redialled = std::pin::pin!(redial(settings));
    loop {
        tokio::select! {
            owner = redialled.as_mut() => return owner,
            () = tokio::time::sleep(TICK) => wait.tick(),
            () = interrupts.next() => {
                return Err(Failure::new(
                    LimbExit::NoCoordinator,
                    anyhow::anyhow!("interrupted while no coordinator answers; the run may go on; hint: `limb serve`, then `limb stop {}`", follower.interest.run_id),
                ));
            }
        }
    }
}

/// The coordinator again: the one that comes back by itself, else one that this client starts,
/// unless it was stopped on purpose.
pub(super) async fn redial(settings: &Settings) -> Result<Owner, Failure> {
    let began = limb_common::clock::boottime();
    loop {
        if let Ok(owner) = client::dial(settings).await {
            return Ok(owner);
        }
        let waited = limb_common::clock::boottime().saturating_since(began);
        if waited > RESTART_GRACE || crate::serve::stopped::is_remembered(&settings.state_dir) {
            return client::connect(settings, Start::IfNeeded).await;
        }
        tokio::time::sleep(REDIAL).await;
    }
}

enum Round {
    /// Both streams ended.
    Over,
    Detached,
}

impl Follower<'_> {
    /// Follows over one connection.
    async fn connected(&mut self, owner: &mut Owner, interrupts: &mut Interrupts) -> Result<Round, Status> {
        let run = self.interest.run_id.clone();
        let mut events = Some(
            owner
                .events(EventsRequest { run: run.clone(), follow: true, after_seq: self.seen.event_seq })
                .await?
                .into_inner(),
        );
        // Attempt 0: all of them in turn. One that is named ends with itself.
        let mut attempt = self.seen.attempt;
        let mut logs = Some(open_logs(owner, &run, attempt, self.seen.offset).await?);
        let mut tick = tokio::time::interval(TICK);
        let mut events_over = None;
        while events.is_some() || logs.is_some() {
            // What the coordinator still has is printed; one that forgets to hang up is not waited for.
            if events_over
                .is_some_and(|over| limb_common::clock::boottime().saturating_since(over) > LAST_OUTPUT)
            {
                break;
            }
            tokio::select! {
                event = next(&mut events) => match event? {
                    Some(event) => self.event(&event),
                    None => events_over = Some(limb_common::clock::boottime()),
                },
                chunk = next(&mut logs) => match chunk? {
                    Some(chunk) => self.chunk(&chunk),
                    None if attempt > 0 && events.is_some() => {
                        attempt += 1;
                        logs = Some(open_logs(owner, &run, attempt, 0).await?);
                    }
                    None => {}
                },
                () = interrupts.next() => {
                    if self.interrupted(owner, interrupts).await? {
                        return Ok(Round::Detached);
                    }
                }
                _ = tick.tick() => if let Some(wait) = &mut self.wait { wait.tick() },
            }
        }
        Ok(Round::Over)
    }

    fn event(&mut self, event: &Event) {
        self.seen.event_seq = event.seq;
        let line = event_line(event);
        if let Some(wait) = &mut self.wait {
            wait.update(&line);
        }
        if !self.talk.quiet && (self.talk.verbose || !is_routine(&event.kind)) {
            self.say(&format!("limb: {line}"));
        }
    }

    fn say(&self, line: &str) {
        match &self.wait {
            Some(wait) => wait.above(self.talk, line),
            None => self.talk.say(line),
        }
    }

    fn chunk(&mut self, chunk: &LogChunk) {
        if chunk.data.is_empty() {
            return;
        }
        // From here on the screen is the job's.
        self.wait = None;
        self.seen.attempt = chunk.attempt;
        self.seen.offset = chunk.offset.saturating_add(chunk.data.len() as u64);
        if self.output_gone {
            return;
        }
        let written = if self.interest.output_to_stderr {
            write_all(&mut std::io::stderr().lock(), &chunk.data)
        } else {
            write_all(&mut std::io::stdout().lock(), &chunk.data)
        };
        if written.is_err() {
            self.output_gone = true;
            self.talk.say("limb: nobody reads the output any more; the run goes on");
        }
    }

    /// `true`: detach. The first ctrl-C asks where somebody can answer; the second one, and any
    /// where nobody can, stops.
    async fn interrupted(&mut self, owner: &mut Owner, interrupts: &mut Interrupts) -> Result<bool, Status> {
        self.wait = None;
        if self.talk.interactive() {
            self.talk.insist("\nstop or detach? [s/d] (ctrl-C again: stop)");
            let answer = tokio::select! {
                answer = ask() => answer,
                () = interrupts.next() => Answer::Stop,
            };
            if answer == Answer::Detach {
                return Ok(true);
            }
        }
        self.talk.insist("stopping: the job gets SIGTERM, results are drained, the box is destroyed …");
        let request = StopRequest { run: self.interest.run_id.clone(), reason: "interrupted".to_owned() };
        owner.stop(request).await?;
        self.wait = Some(self.talk.wait("stopping"));
        Ok(false)
    }
}

async fn open_logs(
    owner: &mut Owner,
    run: &str,
    attempt: u32,
    offset: u64,
) -> Result<Streaming<LogChunk>, Status> {
    let request = LogsRequest { run: run.to_owned(), follow: true, offset, attempt };
    Ok(owner.logs(request).await?.into_inner())
}

/// The next message; a stream that ended becomes `None` and is not asked again.
async fn next<T>(stream: &mut Option<Streaming<T>>) -> Result<Option<T>, Status> {
    let Some(open) = stream else { return std::future::pending().await };
    let message = open.message().await?;
    if message.is_none() {
        *stream = None;
    }
    Ok(message)
}

fn write_all(out: &mut impl std::io::Write, bytes: &[u8]) -> std::io::Result<()> {
    out.write_all(bytes)?;
    out.flush()
}

/// Steps that every run takes, and what the three lines of the ending say anyway. They show in
/// the progress line, with `-v`, and in `limb events`.
fn is_routine(kind: &str) -> bool {
    const STEPS: [&str; 9] = [
        "submitted",
        "create-asked",
        "job-started",
        "job-ended",
        "results-drained",
        "data-settled",
        "terminate-asked",
        "destroy-confirmed",
        "run-ended",
    ];
    kind.starts_with("boot") || kind.starts_with("report-") || STEPS.contains(&kind)
}

fn event_line(event: &Event) -> String {
    let text = if event.text.is_empty() { &event.kind } else { &event.text };
    if event.attempt > 1 { format!("attempt {}: {}", event.attempt, clean(text)) } else { clean(text) }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Stop,
    Detach,
}

/// Reads one line from the terminal, on a thread of its own: a read cannot be cancelled, and the
/// runtime must not wait for it.
async fn ask() -> Answer {
    let (reply, answer) = oneshot::channel();
    let reader = std::thread::Builder::new().name("limb-answer".to_owned()).spawn(move || {
        let mut line = String::new();
        let read = std::io::stdin().read_line(&mut line);
        drop(reply.send(read.map(|_| line).unwrap_or_default()));
    });
    if reader.is_err() {
        return Answer::Stop;
    }
    meant(&answer.await.unwrap_or_default())
}

/// A terminal that went away (end of input) must not stop a job that runs for days.
fn meant(line: &str) -> Answer {
    match line.trim().to_ascii_lowercase().as_str() {
        "s" | "stop" => Answer::Stop,
        "d" | "detach" => Answer::Detach,
        _ if line.is_empty() => Answer::Detach,
        _ => Answer::Stop,
    }
}

/// ctrl-C, from now on.
struct Interrupts(tokio::signal::unix::Signal);

impl Interrupts {
    fn listen() -> Result<Self, Failure> {
        Ok(Self(tokio::signal::unix::signal(tokio::signal::unix::SignalKind::interrupt())?))
    }

    async fn next(&mut self) {
        if self.0.recv().await.is_none() {
            std::future::pending::<()>().await;
        }
    }
}

mod look;
pub(super) use look::{events, logs};

fn full_event_line(event: &Event, zone: &jiff::tz::TimeZone) -> String {
    let at = render::moment(event.at_unix_ms, zone);
    format!("{at}  {}  {:<18}  {}", event.attempt, clean(&event.kind), clean(&event.text))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_clear_answer_stops_and_a_lost_terminal_detaches() {
        assert_eq!(meant("s\n"), Answer::Stop);
        assert_eq!(meant("Detach\n"), Answer::Detach);
        assert_eq!(meant(""), Answer::Detach);
        assert_eq!(meant("\n"), Answer::Stop);
    }

    #[test]
    fn an_events_text_cannot_forge_a_line() {
        let event = Event {
            seq: 1,
            at_unix_ms: 1_000,
            attempt: 2,
            kind: "notice".into(),
            text: "x\n\u{1b}[2Jbox destroyed: confirmed".into(),
            json: String::new(),
        };
        assert_eq!(event_line(&event), "attempt 2: x [2Jbox destroyed: confirmed");
        assert_eq!(
            full_event_line(&event, &jiff::tz::TimeZone::UTC),
            "1970-01-01 00:00:01  2  notice              x [2Jbox destroyed: confirmed"
        );
    }
}
