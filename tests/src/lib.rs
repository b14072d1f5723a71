//! Shared parts of the end-to-end tests: a home of its own for each test, the real binaries, a
//! relay that can be cut, and waiting for conditions (never for time).

pub mod desk;
pub mod fake_provider;
pub mod home;
pub mod processes;
pub mod proxy;
pub mod wait;
