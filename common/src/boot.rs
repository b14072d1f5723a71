//! The boot settings: everything that an agent knows before it has spoken to home. A cloud box
//! gets them in its user-data, a local one in a file; nothing in them is worth stealing once the
//! token is used.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// The file that `limb-agent run --settings FILE` reads (JSON).
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct BootSettings {
    /// `IP:PORT` of home's agent listener.
    pub home_address: String,
    /// Home's CA certificate. Carried here in whole, so that there is no trust on first use.
    pub ca_certificate_pem: String,
    /// 64 hex digits; single use.
    pub token: String,
    /// The agent's own directory: mounts, sockets, scratch. Made by whoever starts the agent,
    /// wiped by the agent when it ends.
    pub private_dir: PathBuf,
    pub host: HostKind,
    /// Not enrolled by then: power off.
    pub boot_budget_ms: u64,
    /// Directories of this machine that the job must not see, beside the private one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hide: Vec<PathBuf>,
    /// Which run this is for, for log lines only; authority comes from the certificate.
    pub run_label: String,
}

/// What "power off" means here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum HostKind {
    /// The agent is a process on somebody's machine: end with everything that it started, and
    /// leave nothing in its private directory.
    Process,
    /// The agent owns the machine: power it off.
    Machine,
}

impl std::fmt::Debug for BootSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BootSettings")
            .field("home_address", &self.home_address)
            .field("token", &"[redacted]")
            .field("private_dir", &self.private_dir)
            .field("host", &self.host)
            .finish_non_exhaustive()
    }
}
