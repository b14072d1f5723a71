//! `limb doctor`: does this machine have what limb needs? One line per thing, with what to do.
//!
//! Never: change anything.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use limb_common::phase::LimbExit;
use limb_proto::v1::StatusRequest;
use serde_json::{Value, json};

use super::client;
use super::run::exit_code;
use super::talk::{Failure, Talk, clean, print, print_json};
use crate::settings::Settings;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Ok,
    /// Something will be slower, or a choice is missing.
    Warn,
    /// Runs will fail.
    Fail,
}

impl Verdict {
    fn word(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Warn => "warn",
            Self::Fail => "FAIL",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Check {
    what: &'static str,
    verdict: Verdict,
    text: String,
    hint: &'static str,
}

impl Check {
    fn ok(what: &'static str, text: impl Into<String>) -> Self {
        Self { what, verdict: Verdict::Ok, text: text.into(), hint: "" }
    }

    fn warn(what: &'static str, text: impl Into<String>, hint: &'static str) -> Self {
        Self { what, verdict: Verdict::Warn, text: text.into(), hint }
    }

    fn fail(what: &'static str, text: impl Into<String>, hint: &'static str) -> Self {
        Self { what, verdict: Verdict::Fail, text: text.into(), hint }
    }
}

pub(super) async fn doctor(settings: &Settings, talk: &Talk, as_json: bool) -> Result<ExitCode, Failure> {
    let checks = [
        fuse_device(Path::new("/dev/fuse")),
        fusermount(nix::unistd::geteuid().is_root(), find_program("fusermount3")),
        user_namespaces(nix::unistd::geteuid().is_root()),
        state_dir(&settings.state_dir),
        agent(&settings.agent),
        clock(limb_common::clock::unix_ms()),
        coordinator(settings).await,
    ];
    if as_json {
        print_json(&Value::Array(checks.iter().map(as_value).collect()))?;
    } else {
        print(&checks.iter().map(line).collect::<Vec<_>>().join("\n"))?;
    }
    let failed = checks.iter().filter(|check| check.verdict == Verdict::Fail).count();
    if failed == 0 {
        talk.say("ready for `limb run`");
        return Ok(ExitCode::SUCCESS);
    }
    talk.insist(&format!("{failed} of {} checks failed: runs on this machine will fail", checks.len()));
    Ok(exit_code(LimbExit::Refused.code()))
}

fn line(check: &Check) -> String {
    let hint = if check.hint.is_empty() { String::new() } else { format!("\n      hint: {}", check.hint) };
    format!("{:<5} {}: {}{hint}", check.verdict.word(), check.what, clean(&check.text))
}

fn as_value(check: &Check) -> Value {
    let verdict = check.verdict.word().to_ascii_lowercase();
    json!({ "check": check.what, "verdict": verdict, "text": check.text, "hint": check.hint })
}

fn fuse_device(path: &Path) -> Check {
    const WHAT: &str = "/dev/fuse";
    match std::fs::File::options().read(true).write(true).open(path) {
        Ok(file) if file.metadata().is_ok_and(|meta| meta.file_type().is_char_device()) => {
            Check::ok(WHAT, "can be opened")
        }
        Ok(_) => Check::fail(WHAT, "is not a device", "modprobe fuse"),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            Check::fail(WHAT, "is missing", "modprobe fuse; in a container: --device /dev/fuse")
        }
        Err(error) => Check::fail(WHAT, error.to_string(), "chmod 666 /dev/fuse, as distributions have it"),
    }
}

fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH")?;
    std::env::split_paths(&path).map(|dir| dir.join(name)).find(|path| path.is_file())
}

/// Root mounts by itself.
fn fusermount(root: bool, found: Option<PathBuf>) -> Check {
    const WHAT: &str = "fusermount3";
    match found {
        Some(path) => Check::ok(WHAT, path.to_string_lossy()),
        None if root => Check::ok(WHAT, "not there, and not needed by root"),
        None => Check::fail(WHAT, "is missing", "apt install fuse3"),
    }
}

/// The job's private view of the machine needs them where the agent is not root.
fn user_namespaces(root: bool) -> Check {
    const WHAT: &str = "user namespaces";
    let number =
        |path: &str| std::fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<u64>().ok());
    let most = number("/proc/sys/user/max_user_namespaces");
    let debian = number("/proc/sys/kernel/unprivileged_userns_clone");
    let apparmor = number("/proc/sys/kernel/apparmor_restrict_unprivileged_userns");
    if root {
        return Check::ok(WHAT, "not needed by root");
    }
    if most == Some(0) || debian == Some(0) {
        return Check::warn(
            WHAT,
            "are switched off: the job sees this machine's own file system",
            "sysctl user.max_user_namespaces=10000 (Debian: kernel.unprivileged_userns_clone=1)",
        );
    }
    if apparmor == Some(1) {
        return Check::warn(
            WHAT,
            "may be restricted by AppArmor: the job may see this machine's own file system",
            "sysctl kernel.apparmor_restrict_unprivileged_userns=0, or a profile for limb-agent",
        );
    }
    Check::ok(WHAT, "may be used")
}

fn access(path: &Path, mode: libc::c_int) -> bool {
    let Ok(text) = CString::new(path.as_os_str().as_bytes()) else { return false };
    // SAFETY: `text` is a NUL-terminated string that lives through the call.
    unsafe { libc::access(text.as_ptr(), mode) == 0 }
}

fn state_dir(dir: &Path) -> Check {
    const WHAT: &str = "state directory";
    // The nearest directory that exists decides whether it can be made.
    let Some(there) = dir.ancestors().find(|path| path.exists()) else {
        return Check::fail(WHAT, format!("{} has no parent", dir.display()), "--set state_dir=DIR");
    };
    if !access(there, libc::W_OK | libc::X_OK) {
        return Check::fail(
            WHAT,
            format!("{} cannot be written", there.display()),
            "chown it, or --set state_dir=DIR",
        );
    }
    let open = std::fs::metadata(dir).is_ok_and(|meta| meta.permissions().mode() & 0o077 != 0);
    if open {
        return Check::warn(
            WHAT,
            format!("{} can be read by others; the coordinator will close it", dir.display()),
            "chmod 700 it",
        );
    }
    Check::ok(WHAT, dir.to_string_lossy())
}

fn agent(path: &Path) -> Check {
    const WHAT: &str = "agent binary";
    if !path.is_file() {
        return Check::fail(
            WHAT,
            format!("{} is missing", path.display()),
            "install limb-agent beside limb, or --set agent=PATH",
        );
    }
    if !access(path, libc::X_OK) {
        return Check::fail(WHAT, format!("{} cannot be executed", path.display()), "chmod +x it");
    }
    Check::ok(WHAT, path.to_string_lossy())
}

/// limb did not exist before.
const EARLIEST_UNIX_MS: u64 = 1_767_225_600_000;
/// A clock that is further ahead than this release can be old.
const LATEST_UNIX_MS: u64 = 4_102_444_800_000;

fn clock(unix_ms: u64) -> Check {
    const WHAT: &str = "clock";
    let shown = super::render::moment(unix_ms, &jiff::tz::TimeZone::UTC);
    if (EARLIEST_UNIX_MS..LATEST_UNIX_MS).contains(&unix_ms) {
        return Check::ok(WHAT, format!("{shown} UTC"));
    }
    Check::fail(
        WHAT,
        format!("{shown} UTC cannot be right: certificates will not be valid"),
        "timedatectl set-ntp true",
    )
}

async fn coordinator(settings: &Settings) -> Check {
    const WHAT: &str = "coordinator";
    let Ok(mut owner) = client::dial(settings).await else {
        return Check::ok(WHAT, "none is running; a command starts one");
    };
    match owner.status(StatusRequest {}).await {
        Ok(reply) => {
            let status = reply.into_inner();
            let text = format!(
                "version {}, process {}, {} live runs, agents dial {}",
                status.version, status.pid, status.live_runs, status.agent_address
            );
            if status.version == env!("CARGO_PKG_VERSION") {
                Check::ok(WHAT, text)
            } else {
                Check::warn(WHAT, text, "it is of another version than this command: `limb serve --stop`")
            }
        }
        Err(status) => Check::warn(
            WHAT,
            format!("takes connections and does not answer: {}", status.message()),
            "`limb serve --stop`, then try again",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_check_says_what_to_do() {
        let dir = tempfile::tempdir().unwrap();
        let missing = agent(&dir.path().join("limb-agent"));
        assert_eq!(missing.verdict, Verdict::Fail);
        assert!(line(&missing).contains("hint: install limb-agent"));
        std::fs::write(dir.path().join("limb-agent"), "").unwrap();
        assert_eq!(agent(&dir.path().join("limb-agent")).verdict, Verdict::Fail);
        assert_eq!(fuse_device(&dir.path().join("nothing")).verdict, Verdict::Fail);
        assert_eq!(fuse_device(&dir.path().join("limb-agent")).text, "is not a device");
        assert_eq!(fusermount(true, None).verdict, Verdict::Ok);
        assert_eq!(fusermount(false, None).verdict, Verdict::Fail);
        assert_eq!(state_dir(&dir.path().join("a/b")).verdict, Verdict::Ok);
        assert_eq!(clock(0).verdict, Verdict::Fail);
        assert_eq!(clock(EARLIEST_UNIX_MS).verdict, Verdict::Ok);
        insta::assert_snapshot!(line(&Check::warn("x", "y\n\u{1b}[2J", "z")), @r"
        warn  x: y [2J
              hint: z
        ");
    }
}
