//! The control connection's traffic: beats, orders, the assignment, reports, fresh certificates.
//! Each survives a cut by asking again.

use std::sync::Arc;
use std::time::Duration;

use limb_common::assignment::{Assignment, Order};
use limb_common::clock::boottime;
use limb_common::error::chain;
use limb_common::lease::{PING_INTERVAL, PING_TIMEOUT, beat_interval};
use limb_common::report::{BoxEvent, Report};
use limb_common::task::{self, Task};
use limb_common::wire::{MAX_MESSAGE_BYTES, WireError, ms};
use limb_proto::v1;
use limb_proto::v1::control_client::ControlClient;
use tokio::sync::{mpsc, watch};
use tokio::time::timeout;
use tonic::transport::Channel;

use super::Link;
use super::dial::Backoff;
use super::enrol::{BoxKey, is_refusal};
use crate::leash::Leash;

/// A call on a live connection; a dead one is found by pings in the same time.
const CALL_TIMEOUT: Duration = PING_INTERVAL.saturating_add(PING_TIMEOUT);
/// A report waits for home's disk.
const REPORT_TIMEOUT: Duration = Duration::from_secs(30);
/// Reports that wait for the link. A box has a handful per life; a source that floods notices
/// waits here.
const QUEUED_REPORTS: usize = 256;
/// When a renewal of the certificate failed.
const RENEWAL_RETRY: Duration = Duration::from_secs(30);

#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    #[error("home refused: {0}")]
    Refused(String),
    #[error("home's message cannot be used")]
    Message(#[from] WireError),
    #[error("the agent is ending")]
    Closed,
}

fn client(channel: Channel) -> ControlClient<Channel> {
    ControlClient::new(channel)
        .max_decoding_message_size(MAX_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_MESSAGE_BYTES)
}

/// Asks for the assignment until home answers or the leash is over.
///
/// # Errors
/// Home refused, sent nonsense, or the lease is over.
pub async fn assignment(link: &Link) -> Result<Assignment, ControlError> {
    let mut backoff = Backoff::default();
    loop {
        link.leash().guard().map_err(|_| ControlError::Closed)?;
        let asked = timeout(CALL_TIMEOUT, client(link.control()).assignment(v1::AssignmentRequest {})).await;
        match asked {
            Ok(Ok(reply)) => return Ok(reply.into_inner().try_into()?),
            Ok(Err(status)) if is_refusal(status.code()) => {
                return Err(ControlError::Refused(status.message().to_owned()));
            }
            Ok(Err(status)) => tracing::debug!(error = chain(&status), "no assignment yet"),
            Err(_) => tracing::debug!("no assignment yet: no answer"),
        }
        tokio::time::sleep(backoff.after_failure()).await;
    }
}

/// Renews the lease until it is over. A refusal is the end: the leash trips at once.
pub fn beat(link: Arc<Link>, ttl: Duration) -> Task<()> {
    task::spawn("beats", async move {
        let leash = link.leash().clone();
        let mut ttl = ttl;
        for seq in 1.. {
            let sent = boottime();
            let remaining = leash.remaining(sent);
            if remaining.is_zero() {
                return;
            }
            let request = v1::BeatRequest {
                epoch: link.identity().epoch.0,
                seq,
                // Rounded up: a lease of half a millisecond is not over.
                lease_remaining_ms: ms(remaining).max(1),
            };
            match timeout(CALL_TIMEOUT, client(link.control()).beat(request)).await {
                Ok(Ok(reply)) if reply.get_ref().renewed => {
                    ttl = Duration::from_millis(reply.get_ref().ttl_ms);
                    if leash.renew(sent, ttl).is_err() {
                        return;
                    }
                }
                Ok(Ok(_)) => return leash.trip("home did not renew the lease"),
                Ok(Err(status)) if is_refusal(status.code()) => {
                    return leash.trip("home refused a heartbeat");
                }
                Ok(Err(status)) => tracing::debug!(error = chain(&status), "a heartbeat failed"),
                Err(_) => tracing::debug!("a heartbeat was not answered"),
            }
            let next = sent + beat_interval(ttl);
            tokio::time::sleep(next.saturating_since(boottime())).await;
        }
    })
}

/// Follows home's orders. The receiver begins with `Run` and sees the newest order.
pub fn orders(link: Arc<Link>) -> (Task<()>, watch::Receiver<Order>) {
    let (newest, orders) = watch::channel(Order::Run);
    let following = task::spawn("orders", async move {
        let mut backoff = Backoff::default();
        while link.leash().is_alive() {
            match follow(&link, &newest).await {
                Ok(()) => backoff.reset(),
                Err(error) => tracing::debug!(%error, "orders are interrupted"),
            }
            tokio::time::sleep(backoff.after_failure()).await;
        }
    });
    (following, orders)
}

async fn follow(
    link: &Link,
    newest: &watch::Sender<Order>,
) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let mut control = client(link.control());
    let mut stream = timeout(CALL_TIMEOUT, control.orders(v1::OrdersRequest {})).await??.into_inner();
    while let Some(message) = stream.message().await? {
        let order = Order::try_from(message)?;
        newest.send_if_modified(|current| {
            let is_new = *current != order;
            if is_new {
                *current = order;
            }
            is_new
        });
    }
    Ok(())
}

/// Queues reports; each is dropped only when home has it on disk.
#[derive(Clone, Debug)]
pub struct Reporter {
    queue: mpsc::Sender<BoxEvent>,
    /// How many were queued, how many are home.
    progress: Arc<watch::Sender<(u64, u64)>>,
}

impl Reporter {
    /// Sends in order, over any number of cuts.
    pub fn start(link: Arc<Link>) -> (Task<()>, Self) {
        let (queue, events) = mpsc::channel(QUEUED_REPORTS);
        let progress = Arc::new(watch::channel((0, 0)).0);
        let sending = task::spawn("reports", send_reports(link, events, Arc::clone(&progress)));
        (sending, Self { queue, progress })
    }

    /// Queues an event; waits only when very many wait already.
    pub async fn report(&self, event: BoxEvent) {
        if self.queue.send(event).await.is_ok() {
            self.progress.send_modify(|(queued, _)| *queued += 1);
        }
    }

    /// The same from a place that must not wait; false: the queue was full and the event is lost.
    #[must_use]
    pub fn try_report(&self, event: BoxEvent) -> bool {
        let queued = self.queue.try_send(event).is_ok();
        if queued {
            self.progress.send_modify(|(queued, _)| *queued += 1);
        }
        queued
    }

    /// Waits until home has all that was queued. Bounded by the leash: its expiry ends the agent.
    pub async fn flush(&self) {
        // The sender is held right here, so the channel cannot close.
        drop(self.progress.subscribe().wait_for(|(queued, home)| home >= queued).await);
    }
}

async fn send_reports(
    link: Arc<Link>,
    mut events: mpsc::Receiver<BoxEvent>,
    progress: Arc<watch::Sender<(u64, u64)>>,
) {
    let mut seq = 0;
    while let Some(event) = events.recv().await {
        seq += 1;
        let report = Report { seq, box_uptime: boottime().since_boot(), event };
        let mut backoff = Backoff::default();
        while link.leash().is_alive() {
            let mut control = client(link.control());
            match timeout(REPORT_TIMEOUT, control.report(v1::ReportRequest::from(&report))).await {
                Ok(Ok(_)) => break,
                Ok(Err(status)) if is_refusal(status.code()) => {
                    tracing::error!(seq, error = chain(&status), "home refused a report");
                    break;
                }
                Ok(Err(status)) => tracing::debug!(seq, error = chain(&status), "a report failed"),
                Err(_) => tracing::debug!(seq, "a report was not answered"),
            }
            tokio::time::sleep(backoff.after_failure()).await;
        }
        progress.send_modify(|(_, home)| *home += 1);
    }
}

/// Gets a fresh certificate at half of each one's life. New connections use it; old ones end
/// when their certificate does, and their streams go on over new ones.
pub fn renew_certificates(link: Arc<Link>) -> Task<()> {
    task::spawn("certificate renewal", async move {
        let leash: Leash = link.leash().clone();
        let mut pause = link.half_life();
        loop {
            tokio::time::sleep(pause).await;
            if !leash.is_alive() {
                return;
            }
            pause = match renew_once(&link).await {
                Ok(()) => link.half_life(),
                Err(error) => {
                    tracing::warn!(%error, "could not renew the certificate; trying again");
                    RENEWAL_RETRY
                }
            };
        }
    })
}

pub(super) async fn renew_once(link: &Link) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
    let key = BoxKey::generate()?;
    let request = v1::RenewCertificateRequest { csr_der: key.csr_der.clone().into() };
    let reply = timeout(CALL_TIMEOUT, client(link.control()).renew_certificate(request)).await??.into_inner();
    link.install(key.credentials(reply.certificate_der.into()))?;
    Ok(())
}
