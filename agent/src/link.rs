//! The agent's side of the wire. Messages of the protocol appear only under here.
//!
//! [`Link`] is this box's standing with home: its identity, its current certificate, and the
//! connections made with it. Control has one of its own; each bulk stream gets one, so that no
//! stalled stream holds up a heartbeat or another stream.

pub mod channels;
pub mod chunks;
mod connect;
pub mod control;
mod dial;
mod enrol;
pub mod logs;
pub mod results;
mod tls;
pub mod traces;

use std::future::ready;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use limb_common::boot::BootSettings;
use limb_common::certificate;
use limb_common::clock::BootInstant;
use limb_common::identity::{ALPN_AGENT, AgentIdentity};
use limb_common::secret::Secret;
use rustls::ClientConfig;
use tonic::transport::Channel;

use self::channels::{ChannelError, ChannelFuture, Channels};
use self::connect::{Use, channel};
pub use self::dial::{Dialer, InvalidAddress};
pub use self::enrol::EnrolError;
pub use self::tls::{HomeTime, TlsError};
use crate::leash::Leash;

/// No link could be set up.
#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error(transparent)]
    Address(#[from] InvalidAddress),
    #[error("the boot settings' token is not 64 hex digits")]
    Token,
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(transparent)]
    Enrol(#[from] EnrolError),
}

/// This box's standing with home.
pub struct Link {
    dialer: Arc<Dialer>,
    trust: tls::HomeTrust,
    time: Arc<HomeTime>,
    leash: Leash,
    identity: AgentIdentity,
    enrolled_sent: BootInstant,
    current: Mutex<Current>,
}

struct Current {
    config: Arc<ClientConfig>,
    control: Channel,
    not_after_unix_ms: u64,
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("identity", &self.identity).finish_non_exhaustive()
    }
}

impl Link {
    /// Enrols this box; tries until the boot budget, counted from `started`, is spent.
    ///
    /// # Errors
    /// Settings that cannot be used, a refusal, or the budget is spent.
    pub async fn enrol(
        settings: &BootSettings,
        boot_id: &str,
        started: BootInstant,
        leash: Leash,
    ) -> Result<Self, LinkError> {
        let dialer = Arc::new(Dialer::new(&settings.home_address)?);
        let time = Arc::new(HomeTime::default());
        let trust = tls::HomeTrust::new(&settings.ca_certificate_pem, Arc::clone(&time))?;
        let ticket = enrol::Ticket {
            token: token_bytes(&settings.token).ok_or(LinkError::Token)?,
            boot_id: boot_id.to_owned(),
            deadline: started + Duration::from_millis(settings.boot_budget_ms),
        };
        let key = enrol::BoxKey::generate().map_err(EnrolError::Key)?;
        let granted = enrol::enrol(&dialer, &trust, &time, &key, &ticket, &leash).await?;
        tracing::info!(identity = %granted.identity, home_unix_ms = granted.home_unix_ms, "enrolled");
        let config = trust.config(ALPN_AGENT, Some(&granted.credentials))?;
        let control = channel(Arc::clone(&dialer), Arc::clone(&config), leash.clone(), Use::Control);
        Ok(Self {
            dialer,
            trust,
            time,
            leash,
            identity: granted.identity,
            enrolled_sent: granted.sent,
            current: Mutex::new(Current { config, control, not_after_unix_ms: granted.not_after_unix_ms }),
        })
    }

    #[must_use]
    pub fn identity(&self) -> &AgentIdentity {
        &self.identity
    }

    #[must_use]
    pub fn leash(&self) -> &Leash {
        &self.leash
    }

    /// When the enrolment that home answered was sent: the first lease counts from here.
    #[must_use]
    pub fn enrolled_sent(&self) -> BootInstant {
        self.enrolled_sent
    }

    /// Home's clock.
    #[must_use]
    pub fn home_time(&self) -> &HomeTime {
        &self.time
    }

    pub(crate) fn control(&self) -> Channel {
        self.current().control.clone()
    }

    /// Asks home for a fresh certificate now.
    ///
    /// # Errors
    /// Home could not be reached or refused.
    pub async fn renew_certificate(&self) -> Result<(), Box<dyn std::error::Error + Send + Sync>> {
        control::renew_once(self).await
    }

    /// From now on connections are made with these; existing ones go on to their own end.
    fn install(&self, credentials: tls::Credentials) -> Result<(), LinkError> {
        let own = certificate::agent(&credentials.certificate).map_err(EnrolError::BadCertificate)?;
        if own.identity != self.identity {
            return Err(EnrolError::Refused("the new certificate is for another box".to_owned()).into());
        }
        let config = self.trust.config(ALPN_AGENT, Some(&credentials))?;
        let control =
            channel(Arc::clone(&self.dialer), Arc::clone(&config), self.leash.clone(), Use::Control);
        *self.current() = Current { config, control, not_after_unix_ms: own.not_after_unix_ms };
        Ok(())
    }

    /// Half of what is left of the certificate's life.
    fn half_life(&self) -> Duration {
        Duration::from_millis(self.current().not_after_unix_ms.saturating_sub(self.time.unix_ms())) / 2
    }

    fn current(&self) -> MutexGuard<'_, Current> {
        self.current.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Channels for Link {
    fn bulk(&self) -> ChannelFuture {
        if !self.leash.is_alive() {
            return Box::pin(ready(Err(ChannelError::Closed)));
        }
        let config = Arc::clone(&self.current().config);
        let channel = channel(Arc::clone(&self.dialer), config, self.leash.clone(), Use::Bulk);
        Box::pin(ready(Ok(channel)))
    }

    fn round_trip(&self) -> Option<Duration> {
        self.dialer.round_trip()
    }
}

/// This machine's current boot; another boot is a dead box.
///
/// # Errors
/// `/proc` cannot be read.
pub fn boot_id() -> std::io::Result<String> {
    Ok(std::fs::read_to_string("/proc/sys/kernel/random/boot_id")?.trim().to_owned())
}

fn token_bytes(hex: &str) -> Option<Secret<Vec<u8>>> {
    let digits = hex.trim().as_bytes();
    let digit = |byte: u8| char::from(byte).to_digit(16).and_then(|value| u8::try_from(value).ok());
    let bytes: Option<Vec<u8>> =
        digits.chunks(2).map(|pair| Some(digit(*pair.first()?)? << 4 | digit(*pair.get(1)?)?)).collect();
    bytes.filter(|bytes| bytes.len() == 32).map(Secret::new)
}
