//! Jobs as real processes, under the real helper of the real binary. Needs root; without it the
//! tests say so and pass, except those about user namespaces.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "job/support.rs"]
mod support;

#[path = "job/ends.rs"]
mod ends;
#[path = "job/environment.rs"]
mod environment;
#[path = "job/killing.rs"]
mod killing;
#[path = "job/over_fuse.rs"]
mod over_fuse;
#[path = "job/seen.rs"]
mod seen;
