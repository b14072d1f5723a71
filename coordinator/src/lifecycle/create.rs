//! Asking for a box, and looking for one that may have been made.
//!
//! Never: a second create for one intent. Where the answer is lost the box is looked for by tag
//! and name, for as long as the provider may take to show it.

use limb_common::boot::{BootSettings, HostKind};
use limb_common::error;
use limb_common::id::Digest;
use limb_common::phase::{Event, NotStarted};
use limb_common::units::Micros;

use super::live::{LOWER_SETS, outputs_of};
use super::saga::Next;
use super::{Lifecycle, LifecycleError};
use crate::ledger::{AttemptRow, LowerRow, RunRow};
use crate::provider::{CreateRequest, ErrorClass, Instance, Offer, ProviderError, tags};

impl Lifecycle {
    pub(super) async fn ask_for_box(
        &self,
        row: &RunRow,
        attempt: &AttemptRow,
    ) -> Result<Next, LifecycleError> {
        if let Some(cause) = row.stop.clone() {
            self.apply(attempt, Event::StopAsked { cause }).await?;
            return Ok(Next::Again);
        }
        let Some(lowers) = &attempt.lowers else { return self.prepare(row, attempt).await };
        self.adopt(&row.spec, &AttemptRow { lowers: Some(lowers.clone()), ..attempt.clone() });
        let provider = self.provider(&attempt.provider)?;
        let token = {
            use rand::Rng as _;
            let mut token = [0_u8; 32];
            rand::rng().fill_bytes(&mut token);
            token
        };
        let expires = self.parts.clock.unix_ms() + row.spec.boot_timeout_ms;
        self.parts.ledger.create_asked(&attempt.run, attempt.number, Digest::of(&token), expires).await?;
        let capabilities = provider.capabilities();
        let request = CreateRequest {
            name: attempt.box_name.clone(),
            tags: tags(self.parts.ledger.home(), &attempt.run, attempt.number, attempt.deadline_unix_ms),
            offer: Offer {
                name: attempt.offer.clone(),
                price_per_hour: Micros(attempt.price_micros_per_hour),
            },
            idempotency_key: attempt.box_name.clone(),
            boot: BootSettings {
                home_address: self.parts.endpoint.address.clone(),
                ca_certificate_pem: self.parts.endpoint.ca_certificate_pem.clone(),
                token: Digest(token).to_hex(),
                private_dir: "/run/limb".into(),
                host: if capabilities.is_local { HostKind::Process } else { HostKind::Machine },
                boot_budget_ms: row.spec.boot_timeout_ms,
                hide: Vec::new(),
                run_label: attempt.run.to_string(),
            },
        };
        let answer = tokio::time::timeout(capabilities.create_timeout, provider.create(request)).await;
        let answer = answer.unwrap_or_else(|_| {
            Err(ProviderError::new(provider.name(), ErrorClass::Ambiguous, "no answer in time"))
        });
        self.take_answer(attempt, answer).await
    }

    async fn take_answer(
        &self,
        attempt: &AttemptRow,
        answer: Result<Instance, ProviderError>,
    ) -> Result<Next, LifecycleError> {
        match answer {
            Ok(instance) => {
                self.seen(attempt, &instance).await?;
            }
            Err(refusal) => {
                let text = error::chain(&refusal);
                let event = match refusal.not_started() {
                    Some(why) => Event::CreateRefused { why, text },
                    None => Event::CreateAmbiguous { text },
                };
                self.apply(attempt, event).await?;
            }
        }
        Ok(Next::Again)
    }

    async fn seen(&self, attempt: &AttemptRow, instance: &Instance) -> Result<(), LifecycleError> {
        self.parts
            .ledger
            .instance_seen(&attempt.run, attempt.number, instance.id.clone(), instance.created_unix_ms)
            .await?;
        self.wake(&attempt.run);
        Ok(())
    }

    /// Destinations locked, journal open, what is there frozen: before a box costs anything.
    async fn prepare(&self, row: &RunRow, attempt: &AttemptRow) -> Result<Next, LifecycleError> {
        let outputs = outputs_of(&row.spec, attempt);
        let who = self.with_live(attempt, |live| live.identity.clone());
        let Some(who) = who else {
            self.adopt(&row.spec, attempt);
            return Ok(Next::Again);
        };
        let dests = outputs.iter().map(|output| output.dest.clone()).collect();
        let prepared = match self.parts.outputs.lock(&attempt.run, dests).await {
            Ok(()) => self.parts.outputs.begin(&who, outputs).await,
            Err(error) => Err(error),
        };
        let lowers = match prepared {
            Ok(lowers) => lowers,
            Err(source) => {
                // Nothing costs yet; an attempt that cannot write is no attempt.
                let text = format!("the results cannot be written at home: {}", error::chain(&*source));
                self.parts.ledger.apply(&attempt.run, attempt.number, Event::CreateAsked).await?;
                self.apply(attempt, Event::CreateRefused { why: NotStarted::Refused, text }).await?;
                return Ok(Next::Again);
            }
        };
        let rows = lowers
            .into_iter()
            .map(|lower| LowerRow {
                output: lower.output.0,
                set: LOWER_SETS + lower.output.0,
                manifest_id: lower.manifest_id.to_hex(),
                manifest_bytes: lower.manifest_bytes,
            })
            .collect();
        self.parts.ledger.set_lowers(&attempt.run, attempt.number, rows).await?;
        Ok(Next::Again)
    }

    /// The create's fate is unknown: look until the provider must have shown a box if there is one.
    pub(super) async fn quarantine(
        &self,
        row: &RunRow,
        attempt: &AttemptRow,
    ) -> Result<Next, LifecycleError> {
        // A stop that came meanwhile meets the box when it appears.
        if let (Some(cause), None) = (row.stop.clone(), &attempt.state.stop) {
            self.apply(attempt, Event::StopAsked { cause }).await?;
        }
        let provider = self.provider(&attempt.provider)?;
        let capabilities = provider.capabilities();
        let now = self.now();
        let since = self.with_live(attempt, |live| *live.quarantined_since.get_or_insert(now)).unwrap_or(now);
        // Asked before the list is: a list that began after the end is the last one.
        let over = now >= since + capabilities.quarantine;
        let next = Next::WaitUntil(now + capabilities.quarantine_interval);
        let listed = tokio::time::timeout(capabilities.call_timeout, provider.list()).await;
        let boxes = match listed {
            Ok(Ok(boxes)) => boxes,
            Ok(Err(problem)) => {
                tracing::warn!(run = %attempt.run, error = error::chain(&problem), "the provider's list failed");
                return Ok(next);
            }
            Err(_) => return Ok(next),
        };
        let ours = boxes
            .iter()
            .filter(|found| !found.is_gone() && found.is_of(self.parts.ledger.home()))
            .filter(|found| found.attempt() == Some((attempt.run.clone(), attempt.number)))
            .filter(|found| found.name == attempt.box_name)
            // Two of one intent: the elder is kept, the sweep destroys the other.
            .min_by_key(|found| (found.created_unix_ms, found.id.clone()));
        match ours {
            Some(found) => {
                self.seen(attempt, found).await?;
                Ok(Next::Again)
            }
            None if over => {
                self.apply(attempt, Event::QuarantineEmpty).await?;
                Ok(Next::Again)
            }
            None => Ok(next),
        }
    }
}
