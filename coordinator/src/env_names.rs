//! Every environment variable that limb reads, in one place.

/// The settings file itself.
pub const CONFIG: &str = "LIMB_CONFIG";
pub const LISTEN: &str = "LIMB_LISTEN";
pub const ADVERTISE: &str = "LIMB_ADVERTISE";
pub const AGENT: &str = "LIMB_AGENT";
pub const STATE_DIR: &str = "LIMB_STATE_DIR";
pub const SOCKET: &str = "LIMB_SOCKET";
pub const PROVIDER: &str = "LIMB_PROVIDER";
pub const IDLE_EXIT: &str = "LIMB_IDLE_EXIT";
pub const COMPRESS: &str = "LIMB_COMPRESS";
pub const LOG_QUOTA: &str = "LIMB_LOG_QUOTA";
/// What the coordinator writes to its own log (a tracing filter).
pub const LOG: &str = "LIMB_LOG";

// Not ours, but read.
pub const HOME: &str = "HOME";
pub const XDG_CONFIG_HOME: &str = "XDG_CONFIG_HOME";
pub const XDG_STATE_HOME: &str = "XDG_STATE_HOME";
pub const NO_COLOR: &str = "NO_COLOR";
pub const TERM: &str = "TERM";

/// Those that are limb's own, with what they set, for the reference.
pub const OURS: [(&str, &str); 11] = [
    (CONFIG, "path of limb.toml"),
    (LISTEN, "setting `listen`"),
    (ADVERTISE, "setting `advertise`"),
    (AGENT, "setting `agent`"),
    (STATE_DIR, "setting `state_dir`"),
    (SOCKET, "setting `socket`"),
    (PROVIDER, "setting `provider`"),
    (IDLE_EXIT, "setting `idle_exit`"),
    (COMPRESS, "setting `compress`"),
    (LOG_QUOTA, "setting `log_quota`"),
    (LOG, "setting `log`"),
];
