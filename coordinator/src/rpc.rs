//! The agent-facing services. Messages become domain values here and nowhere deeper; identity
//! comes from the certificate, and [`Desk`] says what that identity may have.
//!
//! Never: trust a run, attempt or path that a message names.

pub mod chunks;
pub mod desk;
#[cfg(test)]
mod fake_desk;
pub mod logs;
pub mod results;

use limb_common::identity::AgentIdentity;
use tonic::{Request, Status};

/// Who calls. The connection's acceptor put it there after checking the certificate.
///
/// # Errors
/// `Unauthenticated` where no agent certificate was shown.
pub fn caller<T>(request: &Request<T>) -> Result<AgentIdentity, Status> {
    request
        .extensions()
        .get::<AgentIdentity>()
        .cloned()
        .ok_or_else(|| Status::unauthenticated("this call needs an agent certificate"))
}
