//! Home's own certificate authority: made on first use, known to nobody but this home's boxes.
//! It names home's server (`serverAuth` only) and agents (`clientAuth` only), so that an agent's
//! certificate can never speak for home.
//!
//! Never: take a name from a request. A CSR gives a public key; every name is home's own.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use limb_common::id::{Digest, HomeId};
use limb_common::identity::{AgentIdentity, HOME_SERVER_NAME};
use rand::Rng as _;
use rcgen::string::Ia5String;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateSigningRequestParams, DistinguishedName, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, PublicKeyData as _, SanType,
    SerialNumber,
};
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, CertificateSigningRequestDer, PrivateKeyDer, PrivatePkcs8KeyDer};

/// Life of an agent's certificate: short, because it is never revoked, only outlived.
pub const AGENT_CERTIFICATE_LIFE: Duration = Duration::from_secs(55 * 60);
/// Certificates begin a little in the past: a box's clock may be behind. Life and backdating
/// together are at most an hour.
const BACKDATED: Duration = Duration::from_secs(5 * 60);
const CA_LIFE: Duration = Duration::from_secs(20 * 365 * 86_400);
/// Made anew at every start of the coordinator.
const SERVER_CERTIFICATE_LIFE: Duration = Duration::from_secs(2 * 365 * 86_400);
/// A P-256 CSR has about 300 bytes.
const MAX_CSR_BYTES: usize = 4096;
const FILE_NAME: &str = "ca.pem";

#[derive(Debug, thiserror::Error)]
pub enum CaError {
    #[error("could not {doing} home's certificate authority {}", path.display())]
    File { doing: &'static str, path: PathBuf, source: io::Error },
    #[error(
        "home's certificate authority {} cannot be read; hint: boxes that are running trust only this file: restore it from a backup, or move it away to begin anew",
        path.display()
    )]
    Damaged { path: PathBuf },
    #[error("the certificate request cannot be used")]
    BadRequest,
    #[error("could not sign a certificate")]
    Sign(#[source] rcgen::Error),
}

/// A key that an agent made, proven by the signature of its request.
#[derive(Debug)]
pub struct AgentKey {
    request: CertificateSigningRequestParams,
}

impl AgentKey {
    /// Reads a CSR and checks its own signature.
    ///
    /// # Errors
    /// [`CaError::BadRequest`], without a reason: it came from outside.
    pub fn from_csr(der: &[u8]) -> Result<Self, CaError> {
        if der.len() > MAX_CSR_BYTES {
            return Err(CaError::BadRequest);
        }
        CertificateSigningRequestParams::from_der(&CertificateSigningRequestDer::from(der))
            .map(|request| Self { request })
            .map_err(|_| CaError::BadRequest)
    }

    /// BLAKE3 of the public key.
    #[must_use]
    pub fn hash(&self) -> Digest {
        Digest::of(self.request.public_key.der_bytes())
    }
}

/// A certificate that home has just signed for an agent.
#[derive(Clone, Debug)]
pub struct SignedCertificate {
    pub der: Vec<u8>,
    pub not_after_unix_ms: u64,
}

/// Home's server certificate with its key.
pub(crate) struct ServerCertificate {
    pub(crate) chain: Vec<CertificateDer<'static>>,
    pub(crate) key: PrivateKeyDer<'static>,
}

/// The authority. One per state directory.
#[derive(Debug)]
pub struct HomeCa {
    home: HomeId,
    certificate_pem: String,
    certificate: CertificateDer<'static>,
    issuer: Issuer<'static, KeyPair>,
}

impl HomeCa {
    /// Opens the authority in `dir`, or makes it. The caller holds the coordinator's lock.
    ///
    /// # Errors
    /// The file cannot be read or written, or is damaged; a damaged one is never replaced.
    pub fn open_or_create(dir: &Path, home: HomeId, now_unix_ms: u64) -> Result<Self, CaError> {
        let path = dir.join(FILE_NAME);
        match fs::read_to_string(&path) {
            Ok(text) => Self::parse(&text, home).ok_or(CaError::Damaged { path }),
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                let text = generate(&home, now_unix_ms).map_err(CaError::Sign)?;
                write_private(dir, &path, &text)?;
                Self::parse(&text, home).ok_or(CaError::Damaged { path })
            }
            Err(source) => Err(CaError::File { doing: "read", path, source }),
        }
    }

    fn parse(text: &str, home: HomeId) -> Option<Self> {
        let (key, certificate_pem) = text.split_at(text.find("-----BEGIN CERTIFICATE-----")?);
        let key = KeyPair::from_pem(key).ok()?;
        let certificate = CertificateDer::from_pem_slice(certificate_pem.as_bytes()).ok()?;
        let issuer = Issuer::from_ca_cert_der(&certificate, key).ok()?;
        Some(Self { home, certificate_pem: certificate_pem.to_owned(), certificate, issuer })
    }

    /// For boot settings.
    #[must_use]
    pub fn certificate_pem(&self) -> &str {
        &self.certificate_pem
    }

    #[must_use]
    pub fn home(&self) -> &HomeId {
        &self.home
    }

    pub(crate) fn certificate(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// A certificate for this key under home's name for its holder.
    ///
    /// # Errors
    /// [`CaError::Sign`].
    pub fn sign_agent(
        &self,
        key: &AgentKey,
        who: &AgentIdentity,
        now_unix_ms: u64,
    ) -> Result<SignedCertificate, CaError> {
        let uri = Ia5String::try_from(who.to_string()).map_err(CaError::Sign)?;
        let mut params = leaf(ExtendedKeyUsagePurpose::ClientAuth, now_unix_ms, AGENT_CERTIFICATE_LIFE);
        params.subject_alt_names = vec![SanType::URI(uri)];
        let certificate = params.signed_by(&key.request.public_key, &self.issuer).map_err(CaError::Sign)?;
        Ok(SignedCertificate {
            der: certificate.der().to_vec(),
            not_after_unix_ms: (now_unix_ms / 1000 + AGENT_CERTIFICATE_LIFE.as_secs()) * 1000,
        })
    }

    pub(crate) fn server_certificate(&self, now_unix_ms: u64) -> Result<ServerCertificate, CaError> {
        let key = KeyPair::generate().map_err(CaError::Sign)?;
        let mut params = leaf(ExtendedKeyUsagePurpose::ServerAuth, now_unix_ms, SERVER_CERTIFICATE_LIFE);
        let name = Ia5String::try_from(HOME_SERVER_NAME).map_err(CaError::Sign)?;
        params.subject_alt_names = vec![SanType::DnsName(name)];
        let certificate = params.signed_by(&key, &self.issuer).map_err(CaError::Sign)?;
        Ok(ServerCertificate {
            chain: vec![certificate.der().clone()],
            key: PrivatePkcs8KeyDer::from(key.serialize_der()).into(),
        })
    }
}

fn generate(home: &HomeId, now_unix_ms: u64) -> Result<String, rcgen::Error> {
    let key = KeyPair::generate()?;
    let mut params = dated(now_unix_ms, CA_LIFE);
    params.distinguished_name.push(DnType::CommonName, format!("limb home {home}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    let certificate = params.self_signed(&key)?;
    Ok(format!("{}{}", key.serialize_pem(), certificate.pem()))
}

fn leaf(usage: ExtendedKeyUsagePurpose, now_unix_ms: u64, life: Duration) -> CertificateParams {
    let mut params = dated(now_unix_ms, life);
    params.is_ca = IsCa::ExplicitNoCa;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    params.extended_key_usages = vec![usage];
    params.use_authority_key_identifier_extension = true;
    params
}

fn dated(now_unix_ms: u64, life: Duration) -> CertificateParams {
    let mut params = CertificateParams::default();
    let epoch = rcgen::date_time_ymd(1970, 1, 1);
    let now = Duration::from_secs(now_unix_ms / 1000);
    params.not_before = epoch + now.saturating_sub(BACKDATED);
    params.not_after = epoch + now + life;
    let mut serial = [0; 16];
    rand::rng().fill_bytes(&mut serial);
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    params.distinguished_name = DistinguishedName::new();
    params
}

/// The whole file or none, readable by its owner alone from its first byte on.
fn write_private(dir: &Path, path: &Path, text: &str) -> Result<(), CaError> {
    let part = dir.join(format!("{FILE_NAME}.part"));
    let write = || -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&part)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&part, path)?;
        File::open(dir)?.sync_all()
    };
    write().map_err(|source| CaError::File { doing: "write", path: path.to_owned(), source })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use limb_common::certificate;
    use limb_common::id::{AttemptNumber, LeaseEpoch, RunId};

    use super::*;

    const NOW: u64 = 1_800_000_000_000;

    #[test]
    fn it_is_made_once_kept_private_and_a_damaged_one_is_not_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let home = HomeId::random();
        let first = HomeCa::open_or_create(dir.path(), home.clone(), NOW).unwrap();
        let again = HomeCa::open_or_create(dir.path(), home.clone(), NOW + 5).unwrap();
        assert_eq!(first.certificate_pem(), again.certificate_pem());
        let path = dir.path().join(FILE_NAME);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        fs::write(&path, "nonsense").unwrap();
        assert!(matches!(HomeCa::open_or_create(dir.path(), home, NOW), Err(CaError::Damaged { .. })));
        assert_eq!(fs::read(&path).unwrap(), b"nonsense");
    }

    #[test]
    fn a_csr_gives_a_key_and_no_name() {
        let dir = tempfile::tempdir().unwrap();
        let ca = HomeCa::open_or_create(dir.path(), HomeId::random(), NOW).unwrap();
        let who = AgentIdentity {
            home: ca.home().clone(),
            run: RunId::random(),
            attempt: AttemptNumber(1),
            epoch: LeaseEpoch(7),
        };
        let mut greedy = CertificateParams::new([HOME_SERVER_NAME.to_owned()]).unwrap();
        greedy.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        greedy.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let csr = greedy.serialize_request(&KeyPair::generate().unwrap()).unwrap();
        let key = AgentKey::from_csr(csr.der()).unwrap();
        let signed = ca.sign_agent(&key, &who, NOW).unwrap();
        let der = CertificateDer::from(signed.der);
        let read = certificate::agent(&der).unwrap();
        assert_eq!(read.identity, who);
        assert_eq!(read.not_after_unix_ms, signed.not_after_unix_ms);
        let validity = certificate::validity(&der).unwrap();
        assert!(validity.not_after_unix_ms - validity.not_before_unix_ms <= 3_600_000);
        assert!(certificate::agent(&ca.server_certificate(NOW).unwrap().chain[0]).is_err());
    }

    #[test]
    fn a_csr_whose_signature_is_not_its_own_is_refused() {
        let csr = CertificateParams::default().serialize_request(&KeyPair::generate().unwrap()).unwrap();
        let mut forged = csr.der().to_vec();
        let last = forged.len() - 1;
        forged[last] ^= 1;
        assert!(AgentKey::from_csr(&forged).is_err());
        assert!(AgentKey::from_csr(&vec![0; MAX_CSR_BYTES + 1]).is_err());
        assert!(AgentKey::from_csr(csr.der()).is_ok());
    }
}
