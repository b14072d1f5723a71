//! What both ends read out of a certificate after rustls has verified it.
//!
//! Never: a verdict. Signatures and chains are rustls's part; this only reads.

use rustls_pki_types::CertificateDer;
use x509_parser::extensions::{GeneralName, ParsedExtension};
use x509_parser::prelude::{FromDer as _, X509Certificate};

use crate::identity::AgentIdentity;

/// The certificate cannot be used.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CertificateError {
    #[error("the certificate cannot be read")]
    Unreadable,
    #[error("the certificate is not for a client")]
    NotForClients,
    #[error("the certificate names no agent, or more than one")]
    NoIdentity,
}

/// From when until when a certificate is valid, in milliseconds since 1970.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    pub not_before_unix_ms: u64,
    pub not_after_unix_ms: u64,
}

/// An agent, and until when its certificate speaks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AgentCertificate {
    pub identity: AgentIdentity,
    pub not_after_unix_ms: u64,
}

/// # Errors
/// [`CertificateError::Unreadable`].
pub fn validity(der: &CertificateDer<'_>) -> Result<Validity, CertificateError> {
    parse(der).map(|certificate| validity_of(&certificate))
}

/// Reads an agent's certificate: client use only, exactly one identity.
///
/// # Errors
/// Says what is wrong with it.
pub fn agent(der: &CertificateDer<'_>) -> Result<AgentCertificate, CertificateError> {
    let certificate = parse(der)?;
    let usage = certificate
        .extended_key_usage()
        .map_err(|_| CertificateError::Unreadable)?
        .ok_or(CertificateError::NotForClients)?
        .value;
    if !usage.client_auth || usage.server_auth || usage.any {
        return Err(CertificateError::NotForClients);
    }
    let mut identities = certificate.extensions().iter().flat_map(|extension| {
        match extension.parsed_extension() {
            ParsedExtension::SubjectAlternativeName(names) => names.general_names.as_slice(),
            // The foreign enum has dozens of other extensions; none carries names.
            _ => &[],
        }
    });
    let (Some(GeneralName::URI(uri)), None) = (identities.next(), identities.next()) else {
        return Err(CertificateError::NoIdentity);
    };
    let identity = uri.parse().map_err(|_| CertificateError::NoIdentity)?;
    Ok(AgentCertificate { identity, not_after_unix_ms: validity_of(&certificate).not_after_unix_ms })
}

fn parse<'a>(der: &'a CertificateDer<'_>) -> Result<X509Certificate<'a>, CertificateError> {
    match X509Certificate::from_der(der) {
        Ok(([], certificate)) => Ok(certificate),
        Ok(_) | Err(_) => Err(CertificateError::Unreadable),
    }
}

fn validity_of(certificate: &X509Certificate<'_>) -> Validity {
    let ms = |seconds: i64| u64::try_from(seconds).unwrap_or(0).saturating_mul(1000);
    Validity {
        not_before_unix_ms: ms(certificate.validity().not_before.timestamp()),
        not_after_unix_ms: ms(certificate.validity().not_after.timestamp()),
    }
}
