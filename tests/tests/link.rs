//! Both ends of the link over loopback, with real TLS: who gets in, who does not, and what a cut
//! does.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use limb::ca::{AgentKey, HomeCa};
use limb::rpc::server::serve;
use limb_agent::leash::Leash;
use limb_agent::link::channels::Channels as _;
use limb_agent::link::{EnrolError, Link, LinkError, boot_id, control};
use limb_common::assignment::Order;
use limb_common::boot::{BootSettings, HostKind};
use limb_common::clock::{boottime, unix_ms};
use limb_common::identity::{ALPN_AGENT, ALPN_ENROL, AgentIdentity, HOME_SERVER_NAME};
use limb_common::report::BoxEvent;
use limb_common::task::{self, Task};
use limb_proto::v1;
use limb_proto::v1::control_client::ControlClient;
use limb_proto::v1::enrol_client::EnrolClient;
use limb_tests::desk::{TOKEN, TestDesk};
use limb_tests::proxy::Proxy;
use rustls_pki_types::pem::PemObject as _;
use rustls_pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Status};

const PATIENCE: Duration = Duration::from_secs(60);
const TTL: Duration = Duration::from_secs(600);

struct Home {
    address: SocketAddr,
    ca: Arc<HomeCa>,
    desk: Arc<TestDesk>,
    stop: CancellationToken,
    _serving: Task<()>,
    _dir: tempfile::TempDir,
}

impl Home {
    async fn start() -> Self {
        let desk = TestDesk::new(TTL);
        let dir = tempfile::tempdir().unwrap();
        let ca = Arc::new(HomeCa::open_or_create(dir.path(), desk.who.home.clone(), unix_ms()).unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let served =
            serve(listener, Arc::clone(&ca), desk.clone(), tonic::service::Routes::default(), stop.clone());
        let serving = task::spawn("home", async move { served.await.unwrap() });
        Self { address, ca, desk, stop, _serving: serving, _dir: dir }
    }

    fn settings(&self, address: SocketAddr) -> BootSettings {
        BootSettings {
            home_address: address.to_string(),
            ca_certificate_pem: self.ca.certificate_pem().to_owned(),
            token: TOKEN.iter().map(|byte| format!("{byte:02x}")).collect(),
            private_dir: "/nonexistent".into(),
            host: HostKind::Process,
            boot_budget_ms: 30_000,
            hide: Vec::new(),
            run_label: "test".to_owned(),
        }
    }

    async fn enrol(&self, address: SocketAddr) -> Result<Arc<Link>, LinkError> {
        enrol_with(&self.settings(address)).await
    }

    /// A certificate that home signed, for whoever and from whenever the test wants.
    fn forge(&self, who: &AgentIdentity, signed_at_ms: u64) -> Shown {
        let (key, csr) = key_and_csr();
        let signed = self.ca.sign_agent(&AgentKey::from_csr(&csr).unwrap(), who, signed_at_ms).unwrap();
        Shown { certificate: signed.der.into(), key }
    }

    fn channel(&self, alpn: &[u8], shown: Option<&Shown>) -> Channel {
        raw_channel(self.address, self.ca.certificate_pem(), alpn, shown)
    }
}

async fn enrol_with(settings: &BootSettings) -> Result<Arc<Link>, LinkError> {
    let leash = Leash::start().unwrap();
    let link = Link::enrol(settings, &boot_id().unwrap(), boottime(), leash).await?;
    link.leash().arm(link.enrolled_sent(), TTL).unwrap();
    Ok(Arc::new(link))
}

struct Shown {
    certificate: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
}

fn key_and_csr() -> (PrivateKeyDer<'static>, Vec<u8>) {
    let key = rcgen::KeyPair::generate().unwrap();
    let csr = rcgen::CertificateParams::default().serialize_request(&key).unwrap();
    (PrivatePkcs8KeyDer::from(key.serialize_der()).into(), csr.der().to_vec())
}

/// A client that is not ours: it shows what it likes.
fn raw_channel(address: SocketAddr, ca_pem: &str, alpn: &[u8], shown: Option<&Shown>) -> Channel {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(ca_pem.as_bytes()).unwrap()).unwrap();
    let builder =
        rustls::ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_root_certificates(roots);
    let mut config = match shown {
        Some(shown) => {
            builder.with_client_auth_cert(vec![shown.certificate.clone()], shown.key.clone_key()).unwrap()
        }
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = vec![alpn.to_vec()];
    let config = Arc::new(config);
    Endpoint::from_static("http://home.limb").connect_with_connector_lazy(tower::service_fn(
        move |_: tonic::transport::Uri| {
            let config = Arc::clone(&config);
            async move {
                let tcp = TcpStream::connect(address).await?;
                let name = ServerName::try_from(HOME_SERVER_NAME).unwrap();
                tokio_rustls::TlsConnector::from(config).connect(name, tcp).await.map(TokioIo::new)
            }
        },
    ))
}

async fn assignment(channel: Channel) -> Result<(), Status> {
    let mut client = ControlClient::new(channel);
    timeout(PATIENCE, client.assignment(v1::AssignmentRequest {})).await.unwrap().map(drop)
}

fn enrol_request(csr: &[u8]) -> v1::EnrolRequest {
    v1::EnrolRequest {
        token: TOKEN.to_vec().into(),
        csr_der: csr.to_vec().into(),
        boot_id: "b".to_owned(),
        agent_version: "t".to_owned(),
        protocol: limb_common::wire::PROTOCOL,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_for_one_key_and_may_be_shown_twice_by_it() {
    let home = Home::start().await;
    let (_, csr) = key_and_csr();
    for _ in 0..2 {
        let mut client = EnrolClient::new(home.channel(ALPN_ENROL, None));
        let reply = client.enrol(enrol_request(&csr)).await.unwrap().into_inner();
        assert_eq!(reply.epoch, home.desk.who.epoch.0);
    }
    let refused = home.enrol(home.address).await.unwrap_err();
    assert!(matches!(refused, LinkError::Enrol(EnrolError::Refused(_))), "{refused:?}");
    assert_eq!(*home.desk.alarms.borrow(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_enrolled_agent_is_served_and_stays_so_over_a_fresh_certificate() {
    let home = Home::start().await;
    let link = home.enrol(home.address).await.unwrap();
    assert_eq!(*link.identity(), home.desk.who);
    assert_eq!(control::assignment(&link).await.unwrap().run, home.desk.who.run);
    link.renew_certificate().await.unwrap();
    assert_eq!(control::assignment(&link).await.unwrap().run, home.desk.who.run);
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_live_certificate_of_this_home_is_served() {
    let home = Home::start().await;
    let who = home.desk.who.clone();
    assignment(home.channel(ALPN_AGENT, Some(&home.forge(&who, unix_ms())))).await.unwrap();
    // No certificate, an expired one, another home's, another epoch's.
    assignment(home.channel(ALPN_AGENT, None)).await.unwrap_err();
    let old = home.forge(&who, unix_ms() - 2 * 3_600_000);
    assignment(home.channel(ALPN_AGENT, Some(&old))).await.unwrap_err();
    let other = Home::start().await;
    let foreign = other.forge(&who, unix_ms());
    assignment(home.channel(ALPN_AGENT, Some(&foreign))).await.unwrap_err();
    let stale = AgentIdentity { epoch: limb_common::id::LeaseEpoch(who.epoch.0 - 1), ..who.clone() };
    let refused =
        assignment(home.channel(ALPN_AGENT, Some(&home.forge(&stale, unix_ms())))).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    let elsewhere = AgentIdentity { home: other.desk.who.home.clone(), ..who };
    assignment(home.channel(ALPN_AGENT, Some(&home.forge(&elsewhere, unix_ms())))).await.unwrap_err();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_for_enrolment_does_nothing_else_and_unknown_calls_are_refused() {
    let home = Home::start().await;
    let refused = assignment(home.channel(ALPN_ENROL, None)).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    let agent = home.channel(ALPN_AGENT, Some(&home.forge(&home.desk.who, unix_ms())));
    // An agent does not enrol again over its own connection, nor call the owner's service.
    let refused = EnrolClient::new(agent.clone()).enrol(enrol_request(&[])).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
    let mut owner = v1::owner_client::OwnerClient::new(agent);
    let refused = owner.status(v1::StatusRequest {}).await.unwrap_err();
    assert_eq!(refused.code(), Code::PermissionDenied);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_ended_attempt_is_cut_off_in_the_middle_of_a_stream() {
    let home = Home::start().await;
    let channel = home.channel(ALPN_AGENT, Some(&home.forge(&home.desk.who, unix_ms())));
    let mut client = ControlClient::new(channel);
    let mut orders = client.orders(v1::OrdersRequest {}).await.unwrap().into_inner();
    assert_eq!(orders.message().await.unwrap().unwrap().kind, i32::from(v1::order::Kind::Run));
    home.desk.live.store(false, Ordering::SeqCst);
    let ended = timeout(PATIENCE, orders.message()).await.unwrap();
    assert!(!matches!(ended, Ok(Some(_))), "the stream went on: {ended:?}");
}

/// A box that shows its own certificate as if it were home is not believed.
#[tokio::test(flavor = "multi_thread")]
async fn an_agents_certificate_does_not_make_a_home() {
    let home = Home::start().await;
    let shown = home.forge(&home.desk.who, unix_ms());
    let mut config =
        rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_protocol_versions(&[&rustls::version::TLS13])
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![shown.certificate.clone()], shown.key.clone_key())
            .unwrap();
    config.alpn_protocols = vec![ALPN_ENROL.to_vec()];
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let (believed, seen) = watch::channel(0u32);
    let _rogue = task::spawn("rogue", async move {
        loop {
            let (tcp, _) = listener.accept().await.unwrap();
            if acceptor.accept(tcp).await.is_ok() {
                believed.send_modify(|count| *count += 1);
            }
        }
    });
    let settings = BootSettings { boot_budget_ms: 1500, ..home.settings(address) };
    let failed = enrol_with(&settings).await.unwrap_err();
    assert!(matches!(failed, LinkError::Enrol(EnrolError::BudgetSpent { .. })), "{failed:?}");
    assert_eq!(*seen.borrow(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn three_hundred_silent_connections_do_not_lock_an_agent_out() {
    let home = Home::start().await;
    let mut silent = Vec::new();
    for _ in 0..300 {
        silent.push(TcpStream::connect(home.address).await.unwrap());
    }
    let link = timeout(Duration::from_secs(30), home.enrol(home.address)).await.unwrap().unwrap();
    control::assignment(&link).await.unwrap();
    drop(silent);
}

#[tokio::test(flavor = "multi_thread")]
async fn beats_orders_and_reports_survive_a_cut_of_some_seconds() {
    let home = Home::start().await;
    let proxy = Proxy::start(home.address);
    let link = home.enrol(proxy.address()).await.unwrap();
    let _beats = control::beat(Arc::clone(&link), Duration::from_secs(1));
    let (_following, mut orders) = control::orders(Arc::clone(&link));
    let (_sending, reporter) = control::Reporter::start(Arc::clone(&link));
    reporter.report(BoxEvent::SetupStarted).await;
    timeout(PATIENCE, reporter.flush()).await.unwrap();
    let mut beats = home.desk.beats.subscribe();
    timeout(PATIENCE, beats.wait_for(|count| *count >= 1)).await.unwrap().unwrap();

    proxy.cut();
    reporter.report(BoxEvent::JobStarted).await;
    let stop = Order::Stop {
        reason: "test".to_owned(),
        grace: Duration::from_secs(1),
        drain: Duration::from_secs(2),
    };
    home.desk.orders.send_replace(stop.clone());
    assert!(timeout(Duration::from_secs(4), reporter.flush()).await.is_err(), "nothing passes a cut");
    proxy.restore();

    timeout(PATIENCE, reporter.flush()).await.unwrap();
    assert_eq!(home.desk.reported(), [BoxEvent::SetupStarted, BoxEvent::JobStarted]);
    timeout(PATIENCE, orders.wait_for(|order| *order == stop)).await.unwrap().unwrap();
    let before = *beats.borrow();
    timeout(PATIENCE, beats.wait_for(|count| *count > before)).await.unwrap().unwrap();
    assert!(link.leash().is_alive());
}

/// Old connections swallow everything for ever; new ones work. Pings must find the dead ones.
#[tokio::test(flavor = "multi_thread")]
async fn a_half_open_connection_is_found_and_replaced() {
    let home = Home::start().await;
    let (address, swallow, _relaying) = swallowing_proxy(home.address).await;
    let link = home.enrol(address).await.unwrap();
    let (_sending, reporter) = control::Reporter::start(Arc::clone(&link));
    reporter.report(BoxEvent::SetupStarted).await;
    timeout(PATIENCE, reporter.flush()).await.unwrap();
    swallow.send_modify(|generation| *generation += 1);
    let since = boottime();
    reporter.report(BoxEvent::JobStarted).await;
    timeout(PATIENCE, reporter.flush()).await.expect("the dead connection was not replaced");
    // 10 s by the pings; the rest is a loaded machine's.
    assert!(boottime().saturating_since(since) < Duration::from_secs(40));
    assert_eq!(home.desk.reported().len(), 2);
}

async fn swallowing_proxy(target: SocketAddr) -> (SocketAddr, watch::Sender<u64>, Task<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (sender, generation) = watch::channel(0u64);
    let relaying = task::spawn("swallowing proxy", async move {
        loop {
            let (mut near, _) = listener.accept().await.unwrap();
            let mut generation = generation.clone();
            let born = *generation.borrow();
            task::detach("relay", async move {
                let mut far = TcpStream::connect(target).await.unwrap();
                let swallowing = async {
                    drop(generation.wait_for(|now| *now > born).await);
                };
                tokio::select! {
                    _ = tokio::io::copy_bidirectional(&mut near, &mut far) => return,
                    () = swallowing => {}
                }
                // Both sockets stay open, deaf, until the test ends.
                std::future::pending::<()>().await;
            });
        }
    });
    (address, sender, relaying)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_refused_beat_trips_the_leash_and_nothing_leaves_after_it() {
    let home = Home::start().await;
    let link = home.enrol(home.address).await.unwrap();
    control::assignment(&link).await.unwrap();
    home.desk.live.store(false, Ordering::SeqCst);
    let beats = control::beat(Arc::clone(&link), Duration::from_secs(1));
    timeout(PATIENCE, beats.join()).await.unwrap();
    assert!(!link.leash().is_alive());
    assert!(control::assignment(&link).await.is_err());
    assert!(link.bulk().await.is_err());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_home_ends_its_streams() {
    let home = Home::start().await;
    let channel = home.channel(ALPN_AGENT, Some(&home.forge(&home.desk.who, unix_ms())));
    let mut client = ControlClient::new(channel);
    let mut orders = client.orders(v1::OrdersRequest {}).await.unwrap().into_inner();
    orders.message().await.unwrap().unwrap();
    home.stop.cancel();
    let ended = timeout(PATIENCE, orders.message()).await.unwrap();
    assert!(!matches!(ended, Ok(Some(_))));
}
