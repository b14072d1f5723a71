//! TLS 1.3 to home: one CA (from the boot settings), one name, no session resumption. Validity is
//! judged by home's time: a rented box may come up with any clock.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use limb_common::certificate::{Validity, validity};
use limb_common::clock;
use rustls::client::Resumption;
use rustls::client::WebPkiServerVerifier;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("the boot settings' CA certificate cannot be read")]
    CaCertificate,
    #[error("could not set up TLS")]
    Setup(#[from] rustls::Error),
    #[error("could not set up the check of home's certificate")]
    Verifier(#[from] rustls::client::VerifierBuilderError),
}

/// Home's clock, as far as it is known: home's wall clock minus this boot's.
#[derive(Debug, Default)]
pub struct HomeTime {
    /// Home's unix milliseconds at this box's boot; 0: home has not spoken yet.
    at_boot_ms: AtomicU64,
}

impl HomeTime {
    /// Home said that it is `home_unix_ms` now.
    pub fn learn(&self, home_unix_ms: u64) {
        let up = limb_common::wire::ms(clock::boottime().since_boot());
        self.at_boot_ms.store(home_unix_ms.saturating_sub(up).max(1), Ordering::Release);
    }

    /// Home's time now; the box's own until home has spoken.
    #[must_use]
    pub fn unix_ms(&self) -> u64 {
        match self.at_boot_ms.load(Ordering::Acquire) {
            0 => clock::unix_ms(),
            at_boot => at_boot.saturating_add(limb_common::wire::ms(clock::boottime().since_boot())),
        }
    }

    /// The time at which to judge a certificate. Before home has spoken, a box clock outside the
    /// certificate's life is taken for wrong and the certificate's own beginning used: chain and
    /// name are verified all the same, and the authority is home's alone.
    fn to_judge(&self, validity: Validity) -> UnixTime {
        let now_ms = self.unix_ms();
        let known = self.at_boot_ms.load(Ordering::Acquire) > 0;
        let inside = (validity.not_before_unix_ms..=validity.not_after_unix_ms).contains(&now_ms);
        let now_ms = if known || inside { now_ms } else { validity.not_before_unix_ms };
        UnixTime::since_unix_epoch(Duration::from_millis(now_ms))
    }
}

/// An agent's certificate with its key.
pub(super) struct Credentials {
    pub(super) certificate: CertificateDer<'static>,
    pub(super) key: PrivateKeyDer<'static>,
}

/// Makes client configurations that trust only this home.
#[derive(Debug)]
pub(super) struct HomeTrust {
    verifier: Arc<HomeVerifier>,
}

impl HomeTrust {
    pub(super) fn new(ca_pem: &str, time: Arc<HomeTime>) -> Result<Self, TlsError> {
        let ca = CertificateDer::from_pem_slice(ca_pem.as_bytes()).map_err(|_| TlsError::CaCertificate)?;
        let mut roots = RootCertStore::empty();
        roots.add(ca)?;
        let inner = WebPkiServerVerifier::builder_with_provider(
            Arc::new(roots),
            Arc::new(rustls::crypto::ring::default_provider()),
        )
        .build()?;
        Ok(Self { verifier: Arc::new(HomeVerifier { inner, time }) })
    }

    pub(super) fn config(
        &self,
        alpn: &[u8],
        credentials: Option<&Credentials>,
    ) -> Result<Arc<ClientConfig>, TlsError> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let builder = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&rustls::version::TLS13])?
            .dangerous()
            .with_custom_certificate_verifier(Arc::clone(&self.verifier) as Arc<_>);
        let mut config = match credentials {
            Some(own) => builder.with_client_auth_cert(vec![own.certificate.clone()], own.key.clone_key())?,
            None => builder.with_no_client_auth(),
        };
        config.alpn_protocols = vec![alpn.to_vec()];
        config.resumption = Resumption::disabled();
        Ok(Arc::new(config))
    }
}

/// WebPKI's verifier, asked with home's time instead of the box's.
#[derive(Debug)]
struct HomeVerifier {
    inner: Arc<WebPkiServerVerifier>,
    time: Arc<HomeTime>,
}

impl ServerCertVerifier for HomeVerifier {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        _box_time: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let validity = validity(end_entity)
            .map_err(|_| rustls::Error::InvalidCertificate(rustls::CertificateError::BadEncoding))?;
        let now = self.time.to_judge(validity);
        self.inner.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls12_signature(message, certificate, signature)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls13_signature(message, certificate, signature)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}
