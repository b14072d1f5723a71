//! The driver against stand-in agents: scripts that ignore SIGTERM, leave children behind, stop,
//! die, or are born late.

use std::io::Read as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicI32, Ordering};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

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

/// Whether it runs; one that only waits to be collected does not.
fn is_alive(pid: i32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    status.contains("State:") && !status.contains("State:\tZ")
}

async fn until<T>(what: &str, mut look: impl AsyncFnMut() -> Option<T>) -> T {
    for _ in 0..3_000 {
        if let Some(found) = look().await {
            return found;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("waited in vain for {what}");
}

async fn pid_in(file: &Path) -> i32 {
    until("a pid", async || std::fs::read_to_string(file).ok()?.trim().parse().ok()).await
}

async fn wait_until_stopped(local: &Local) {
    let stopped = async || (local.list().await.unwrap()[0].state == InstanceState::Stopped).then_some(());
    until("the box to be stopped", stopped).await;
}

/// The end of a stand-in's script: it stays as long as the test's directory does, so that nothing
/// is left of a test that failed, and no longer than a test may take, so that nothing is left of
/// one that was killed.
fn stay(dir: &Path) -> String {
    format!("n=0; while [ -d {} ] && [ $n -lt 1200 ]; do sleep 0.05; n=$((n+1)); done\n", dir.display())
}

/// An agent that says who it is and then does nothing.
fn idle(dir: &Path) -> (Local, PathBuf) {
    let pid = dir.join("pid");
    let script = format!("#!/bin/sh\necho $$ >{}\n{}", pid.display(), stay(dir));
    (driver(dir, &script), pid)
}

#[tokio::test]
async fn a_box_is_listed_ended_whole_and_removed() {
    let dir = tempfile::tempdir().unwrap();
    let script = format!(
        "#!/bin/sh\ntrap '' TERM\n(setsid sh -c 'echo $$ >{}; exec sleep 60' >/dev/null 2>&1 &)\n\
         {}",
        dir.path().join("stray").display(),
        stay(dir.path())
    );
    let local = driver(dir.path(), &script);
    assert!(local.list().await.unwrap().is_empty());
    let made = local.create(request("lb-one")).await.unwrap();
    let listed = local.list().await.unwrap();
    assert_eq!(listed, std::slice::from_ref(&made));
    assert_eq!(listed[0].attempt().unwrap().1, AttemptNumber(1));
    let stray = pid_in(&dir.path().join("stray")).await;
    // The same intent again cannot make a second box.
    assert_eq!(local.create(request("lb-one")).await.unwrap_err().class, ErrorClass::Ambiguous);
    local.terminate(&made.id).await.unwrap();
    assert!(local.list().await.unwrap().is_empty());
    assert!(!is_alive(stray), "what the agent had detached is gone too");
    // Gone is success.
    local.terminate(&made.id).await.unwrap();
}

#[tokio::test]
async fn a_box_that_powered_itself_off_is_stopped_until_it_is_terminated() {
    let dir = tempfile::tempdir().unwrap();
    let local = driver(dir.path(), "#!/bin/sh\nexit 0\n");
    let made = local.create(request("lb-two")).await.unwrap();
    wait_until_stopped(&local).await;
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

#[tokio::test]
async fn an_agent_that_was_killed_is_noticed_and_one_that_was_stopped_is_destroyed() {
    let dir = tempfile::tempdir().unwrap();
    let (local, pid) = idle(dir.path());
    let made = local.create(request("lb-killed")).await.unwrap();
    kill(Pid::from_raw(pid_in(&pid).await), Signal::SIGKILL).unwrap();
    wait_until_stopped(&local).await;
    local.terminate(&made.id).await.unwrap();
    std::fs::remove_file(&pid).unwrap();

    let made = local.create(request("lb-halted")).await.unwrap();
    let agent = pid_in(&pid).await;
    kill(Pid::from_raw(agent), Signal::SIGSTOP).unwrap();
    assert_eq!(local.list().await.unwrap()[0].state, InstanceState::Running);
    local.terminate(&made.id).await.unwrap();
    assert!(!is_alive(agent));
    assert!(local.list().await.unwrap().is_empty());
}

#[tokio::test]
async fn who_only_stands_in_the_boxs_directory_is_left_alone() {
    let dir = tempfile::tempdir().unwrap();
    let (local, pid) = idle(dir.path());
    let made = local.create(request("lb-looked-at")).await.unwrap();
    let agent = pid_in(&pid).await;
    let home = dir.path().join("local/lb-looked-at");
    // An owner who looks around, with everything that could be mistaken for the box's.
    let mut shell = Command::new("sleep")
        .arg("60")
        .current_dir(&home)
        .env("LIMB_BOX", &home)
        .env("PLACE", home.join("settings.json"))
        .spawn()
        .unwrap();
    local.terminate(&made.id).await.unwrap();
    assert!(!is_alive(agent));
    assert!(shell.try_wait().unwrap().is_none(), "the owner's shell was killed");
    shell.kill().unwrap();
    shell.wait().unwrap();
    // With the agent gone, its number is nobody's.
    local.terminate(&made.id).await.unwrap();
}

/// Where a child that is being born waits for a byte; none in all tests but one.
static CRADLE: AtomicI32 = AtomicI32::new(-1);

/// Between fork and the agent's lock.
pub(super) fn wait_before_birth() {
    let fd = CRADLE.load(Ordering::Relaxed);
    if fd >= 0 {
        let mut byte = [0_u8];
        // SAFETY: the buffer lives through the call.
        let _woken = unsafe { libc::read(fd, byte.as_mut_ptr().cast(), 1) };
    }
}

/// Run by the next test in a process of its own, which is killed in the middle of the start.
#[tokio::test]
#[ignore = "the other half of a_coordinator_killed_at_the_moment_of_the_start_loses_no_box"]
async fn coordinator_that_will_be_killed() {
    let Some(dir) = std::env::var_os("LIMB_TEST_COORDINATOR") else { return };
    // Not number 0: the child's own standard input takes its place.
    let cradle = nix::unistd::dup(std::io::stdin()).unwrap();
    CRADLE.store(cradle.as_raw_fd(), Ordering::Relaxed);
    let (local, _) = idle(Path::new(&dir));
    let _never = local.create(request("lb-half-born")).await;
}

/// A child whose parent was killed: nobody else would end it if the test failed.
struct Late(i32);

impl Drop for Late {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _gone = kill(Pid::from_raw(self.0), Signal::SIGKILL);
        }
    }
}

#[tokio::test]
async fn a_coordinator_killed_at_the_moment_of_the_start_loses_no_box() {
    let dir = tempfile::tempdir().unwrap();
    let (cradle, release) = std::io::pipe().unwrap();
    let mut coordinator = Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "provider::local::tests::coordinator_that_will_be_killed"])
        .env("LIMB_TEST_COORDINATOR", dir.path())
        .stdin(Stdio::from(cradle))
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let local = Local::new(dir.path().join("local"), dir.path().join("limb-agent"));
    let parent = format!("PPid:\t{}\n", coordinator.id());
    let forked = || {
        std::fs::read_dir("/proc").ok()?.flatten().find_map(|entry| {
            let status = std::fs::read_to_string(entry.path().join("status")).ok()?;
            status.contains(&parent).then(|| entry.file_name().to_str()?.parse::<i32>().ok())?
        })
    };
    let child = until("the fork", async || forked()).await;
    let _late = Late(child);
    coordinator.kill().unwrap();
    let mut said = String::new();
    drop(coordinator.stdout.take().map(|mut out| out.read_to_string(&mut said)));
    coordinator.wait().unwrap();
    let listed = local.list().await.unwrap();
    assert_eq!((listed.len(), listed[0].state), (1, InstanceState::Running), "{said}");
    // Somebody ends the box while its process has neither a lock nor a program of its own.
    let ending = {
        let (local, id) = (local.clone(), listed[0].id.clone());
        limb_common::task::spawn("the end", async move { local.terminate(&id).await })
    };
    assert!(is_alive(child));
    drop(release);
    ending.join().await.unwrap().unwrap();
    until("the late child to end", async || (!is_alive(child)).then_some(())).await;
    assert!(local.list().await.unwrap().is_empty());
}
