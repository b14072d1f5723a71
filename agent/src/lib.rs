//! The agent: a temporary limb. It dials home, mounts what home serves, runs the job, sends
//! home what the job writes, and ends itself when home is gone.
//!
//! It listens on nothing and holds no credential but its own short-lived certificate.

pub mod fetch;
pub mod host;
pub mod job;
pub mod leash;
pub mod link;
pub mod logs;
pub mod mount;
pub mod results;
pub mod run;
pub mod trace;
