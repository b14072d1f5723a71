//! The driver against a stand-in agent: a script that ignores SIGTERM and leaves a child behind.

use std::os::unix::fs::PermissionsExt as _;

use limb_common::boot::{BootSettings, HostKind};
use limb_common::id::{AttemptNumber, HomeId, RunId};

use super::*;
use crate::provider::tags;

fn request(name: &str) -> CreateRequest {
    CreateRequest {
        name: name.to_owned(),
        tags: tags(&HomeId::random(), &RunId::random(), AttemptNumber(1), 5_000),
        offer: Offer { name: "this machine".to_owned(), price_per_hour: Micros(0) },
        idempotency_key: name.to_owned(),
        boot: BootSettings {
            home_address: "127.0.0.1:1".to_owned(),
            ca_certificate_pem: String::new(),
            token: "00".repeat(32),
            private_dir: PathBuf::new(),
            host: HostKind::Process,
            boot_budget_ms: 1_000,
            hide: Vec::new(),
            run_label: "test".to_owned(),
        },
    }
}

fn driver(dir: &Path, script: &str) -> Local {
    let agent = dir.join("limb-agent");
    std::fs::write(&agent, script).unwrap();
    std::fs::set_permissions(&agent, std::fs::Permissions::from_mode(0o700)).unwrap();
    Local::new(dir.join("local"), agent)
}

#[tokio::test]
async fn a_box_is_listed_ended_whole_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let script =
        "#!/bin/sh\ntrap '' TERM\n(setsid sleep 60 >/dev/null 2>&1 &)\nwhile :; do sleep 0.05; done\n";
    let local = driver(dir.path(), script);
    assert!(local.list().await.unwrap().is_empty());
    let made = local.create(request("lb-one")).await.unwrap();
    let listed = local.list().await.unwrap();
    assert_eq!(listed, std::slice::from_ref(&made));
    assert_eq!(listed[0].attempt().unwrap().1, AttemptNumber(1));
    // The same intent again cannot make a second box.
    assert_eq!(local.create(request("lb-one")).await.unwrap_err().class, ErrorClass::Ambiguous);
    local.terminate(&made.id).await.unwrap();
    assert!(local.list().await.unwrap().is_empty());
    assert!(
        process::Table::read().unwrap().agents(&dir.path().join("local/lb-one/settings.json")).is_empty()
    );
    // Gone is success.
    local.terminate(&made.id).await.unwrap();
}

#[tokio::test]
async fn a_box_that_powered_itself_off_is_stopped_until_it_is_terminated() {
    let dir = tempfile::tempdir().unwrap();
    let local = driver(dir.path(), "#!/bin/sh\nexit 0\n");
    let made = local.create(request("lb-two")).await.unwrap();
    let mut state = InstanceState::Running;
    for _ in 0..500 {
        state = local.list().await.unwrap()[0].state;
        if state == InstanceState::Stopped {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    assert_eq!(state, InstanceState::Stopped);
    local.terminate(&made.id).await.unwrap();
    assert!(local.list().await.unwrap().is_empty());
}

#[tokio::test]
async fn no_agent_is_a_refusal_and_leaves_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let local = Local::new(dir.path().join("local"), dir.path().join("absent"));
    assert_eq!(local.create(request("lb-three")).await.unwrap_err().class, ErrorClass::Refused);
    assert!(local.list().await.unwrap().is_empty());
    assert!(local.terminate(&InstanceId::new("../x")).await.is_err());
}
