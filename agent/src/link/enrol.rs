//! Enrolment: one key, made on the box, and the token of the boot settings become a certificate.
//! A reply that was lost is asked for again with the same key until the boot budget is spent.

use std::sync::Arc;
use std::time::Duration;

use limb_common::certificate::{self, CertificateError};
use limb_common::clock::{BootInstant, boottime};
use limb_common::error::chain;
use limb_common::identity::{ALPN_ENROL, AgentIdentity};
use limb_common::secret::Secret;
use limb_common::wire::PROTOCOL;
use limb_proto::v1;
use limb_proto::v1::enrol_client::EnrolClient;
use rcgen::{CertificateParams, DistinguishedName, KeyPair};
use rustls_pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use tokio::time::timeout;
use tonic::Code;

use super::connect::{Use, channel};
use super::dial::{Backoff, Dialer};
use super::tls::{Credentials, HomeTime, HomeTrust, TlsError};
use crate::leash::Leash;

/// One try: dial, handshake, home's durable write.
const TRY_TIMEOUT: Duration = Duration::from_secs(15);

#[derive(Debug, thiserror::Error)]
pub enum EnrolError {
    #[error("home refused this box: {0}")]
    Refused(String),
    #[error("home was not reached within the boot budget; the last try failed: {last}")]
    BudgetSpent { last: String },
    #[error("home's certificate for this box cannot be used")]
    BadCertificate(#[from] CertificateError),
    #[error("could not make a key")]
    Key(#[from] rcgen::Error),
    #[error(transparent)]
    Tls(#[from] TlsError),
}

/// What this box shows and may spend at enrolment.
#[derive(Debug)]
pub(super) struct Ticket {
    pub(super) token: Secret<Vec<u8>>,
    pub(super) boot_id: String,
    pub(super) deadline: BootInstant,
}

/// A certificate as it came from home.
pub(super) struct Granted {
    pub(super) identity: AgentIdentity,
    pub(super) credentials: Credentials,
    pub(super) not_after_unix_ms: u64,
    pub(super) home_unix_ms: u64,
    /// When the request that was answered was sent: the lease counts from here.
    pub(super) sent: BootInstant,
}

/// The box's key for a life: it never leaves the box.
pub(super) struct BoxKey {
    key: KeyPair,
    pub(super) csr_der: Vec<u8>,
}

impl BoxKey {
    pub(super) fn generate() -> Result<Self, rcgen::Error> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        let csr_der = params.serialize_request(&key)?.der().to_vec();
        Ok(Self { key, csr_der })
    }

    pub(super) fn credentials(&self, certificate_der: Vec<u8>) -> Credentials {
        Credentials {
            certificate: CertificateDer::from(certificate_der),
            key: PrivatePkcs8KeyDer::from(self.key.serialize_der()).into(),
        }
    }
}

pub(super) async fn enrol(
    dialer: &Arc<Dialer>,
    trust: &HomeTrust,
    time: &HomeTime,
    key: &BoxKey,
    ticket: &Ticket,
    leash: &Leash,
) -> Result<Granted, EnrolError> {
    let config = trust.config(ALPN_ENROL, None)?;
    let mut backoff = Backoff::default();
    loop {
        // A fresh channel each time: home closes a connection for enrolment after one call.
        let channel = channel(Arc::clone(dialer), Arc::clone(&config), leash.clone(), Use::Control);
        let request = v1::EnrolRequest {
            token: ticket.token.expose().clone().into(),
            csr_der: key.csr_der.clone().into(),
            boot_id: ticket.boot_id.clone(),
            agent_version: env!("CARGO_PKG_VERSION").to_owned(),
            protocol: PROTOCOL,
        };
        let sent = boottime();
        let last = match timeout(TRY_TIMEOUT, EnrolClient::new(channel).enrol(request)).await {
            Ok(Ok(reply)) => {
                let reply = reply.into_inner();
                time.learn(reply.home_unix_ms);
                let credentials = key.credentials(reply.certificate_der.into());
                let own = certificate::agent(&credentials.certificate)?;
                return Ok(Granted {
                    identity: own.identity,
                    credentials,
                    not_after_unix_ms: own.not_after_unix_ms,
                    home_unix_ms: reply.home_unix_ms,
                    sent,
                });
            }
            Ok(Err(status)) if is_refusal(status.code()) => {
                return Err(EnrolError::Refused(status.message().to_owned()));
            }
            Ok(Err(status)) => chain(&status),
            Err(_) => "no answer".to_owned(),
        };
        tracing::info!(last, "enrolment failed; trying again");
        let pause = backoff.after_failure();
        if boottime() + pause >= ticket.deadline {
            return Err(EnrolError::BudgetSpent { last });
        }
        tokio::time::sleep(pause).await;
    }
}

/// Home understood and said no; asking again would only be noise.
pub(super) fn is_refusal(code: Code) -> bool {
    matches!(
        code,
        Code::PermissionDenied
            | Code::InvalidArgument
            | Code::FailedPrecondition
            | Code::Unauthenticated
            | Code::Unimplemented
    )
}
