//! The agent-facing services. Messages become domain values here and nowhere deeper; identity
//! comes from the certificate, and [`Desk`] says what that identity may have.
//!
//! Never: trust a run, attempt or path that a message names.

mod acceptor;
pub mod access;
pub mod chunks;
mod control;
pub mod desk;
mod enrol;
#[cfg(test)]
mod fake_desk;
pub mod logs;
pub mod results;
pub mod server;
pub mod traces;
mod worked;

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

/// What a caller is told when the desk says no. A refusal says nothing more; trouble at home is
/// logged here, because the agent can do nothing about it but ask again.
#[must_use]
pub fn desk_status(error: desk::DeskError) -> Status {
    match &error {
        desk::DeskError::Refused(why) => {
            tracing::info!(why, "an agent was refused");
            Status::permission_denied("refused")
        }
        desk::DeskError::Unavailable(_) => home_status(&error),
    }
}

/// Trouble of home's own.
pub(crate) fn home_status(error: &(dyn std::error::Error + 'static)) -> Status {
    tracing::error!(error = limb_common::error::chain(error), "home could not answer an agent");
    Status::unavailable("home cannot answer now")
}
