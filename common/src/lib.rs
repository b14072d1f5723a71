//! The domain of limb: what home and the box must agree on, as pure code.
//!
//! Nothing here opens a socket, mounts a file system or asks for the time on its own; edges are
//! arguments. Secrets are typed, verified bytes are typed, money and times carry their unit.

pub mod assignment;
pub mod boot;
pub mod certificate;
pub mod checkpoint;
pub mod chunk;
pub mod class;
pub mod clock;
pub mod codec;
pub mod error;
pub mod id;
pub mod identity;
pub mod jobfile;
pub mod lease;
pub mod life;
pub mod manifest;
pub mod memory;
pub mod phase;
pub mod report;
pub mod secret;
pub mod task;
pub mod trace;
pub mod units;
pub mod wire;
