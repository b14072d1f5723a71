//! Who may call what: one table, consulted before any service sees a request. What is not in it
//! is refused.
//!
//! Invariant: a service finds an [`AgentIdentity`] in a request's extensions only if the
//! connection showed its certificate and the attempt is live at this very call.
//!
//! [`AgentIdentity`]: limb_common::identity::AgentIdentity

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::task::{Context, Poll};

use futures_util::future::Either;
use http::{Request, Response};
use limb_common::certificate::AgentCertificate;
use limb_common::clock;
use tonic::Status;
use tonic::body::Body;
use tower::{Layer, Service};

use super::desk::Desk;

/// What a call needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Requires {
    /// Nothing but the token in the message; and a connection made for that.
    Token,
    /// A certificate of a live attempt.
    Certificate,
}

/// Every call that the agents' port answers.
pub const TABLE: &[(&str, Requires)] = &[
    ("/limb.v1.Enrol/Enrol", Requires::Token),
    ("/limb.v1.Control/Beat", Requires::Certificate),
    ("/limb.v1.Control/Orders", Requires::Certificate),
    ("/limb.v1.Control/Assignment", Requires::Certificate),
    ("/limb.v1.Control/Report", Requires::Certificate),
    ("/limb.v1.Control/RenewCertificate", Requires::Certificate),
    ("/limb.v1.Chunks/Manifest", Requires::Certificate),
    ("/limb.v1.Chunks/Fetch", Requires::Certificate),
    ("/limb.v1.Results/Journal", Requires::Certificate),
    ("/limb.v1.Logs/Append", Requires::Certificate),
    ("/limb.v1.Traces/Plan", Requires::Certificate),
    ("/limb.v1.Traces/Record", Requires::Certificate),
];

/// What a path needs; `None`: nobody may call it.
#[must_use]
pub fn required(path: &str) -> Option<Requires> {
    TABLE.iter().find(|(known, _)| *known == path).map(|(_, requires)| *requires)
}

/// The other end of a connection, as its handshake proved it.
#[derive(Clone, Debug)]
pub(super) enum Peer {
    Enrolling,
    Agent(AgentCertificate),
}

impl Peer {
    /// May this connection go on? Asked at every call, and by timer for long streams.
    pub(super) fn is_live(&self, desk: &dyn Desk) -> bool {
        match self {
            Self::Enrolling => true,
            Self::Agent(agent) => clock::unix_ms() < agent.not_after_unix_ms && desk.is_live(&agent.identity),
        }
    }
}

/// Puts [`Access`] in front of the services.
#[derive(Clone)]
pub(super) struct AccessLayer {
    pub(super) desk: Arc<dyn Desk>,
}

impl<S> Layer<S> for AccessLayer {
    type Service = Access<S>;

    fn layer(&self, inner: S) -> Access<S> {
        Access { inner, desk: Arc::clone(&self.desk) }
    }
}

#[derive(Clone)]
pub(super) struct Access<S> {
    inner: S,
    desk: Arc<dyn Desk>,
}

impl<S> Access<S> {
    fn admit(&self, request: &mut Request<Body>) -> Result<(), Status> {
        // One answer for all that is wrong: a caller learns nothing about what exists.
        let refused = || Status::permission_denied("refused");
        let requires = required(request.uri().path()).ok_or_else(refused)?;
        let peer = request.extensions().get::<Peer>().cloned().ok_or_else(refused)?;
        match (requires, peer) {
            (Requires::Token, Peer::Enrolling) => Ok(()),
            (Requires::Certificate, peer @ Peer::Agent(_)) if !peer.is_live(self.desk.as_ref()) => {
                Err(refused())
            }
            (Requires::Certificate, Peer::Agent(agent)) => {
                request.extensions_mut().insert(agent.identity);
                Ok(())
            }
            (Requires::Token, Peer::Agent(_)) | (Requires::Certificate, Peer::Enrolling) => Err(refused()),
        }
    }
}

impl<S> Service<Request<Body>> for Access<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible>,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Either<Ready<Result<Response<Body>, Infallible>>, S::Future>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        match self.admit(&mut request) {
            Ok(()) => Either::Right(self.inner.call(request)),
            Err(status) => {
                tracing::debug!(path = request.uri().path(), "a call was refused");
                Either::Left(ready(Ok(status.into_http())))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use limb_proto::RPC_PATHS;

    use super::*;

    #[test]
    fn every_rpc_has_its_requirement_and_the_owners_are_not_for_agents() {
        for path in RPC_PATHS {
            if path.starts_with("/limb.v1.Owner/") {
                assert_eq!(required(path), None, "{path} is for the unix socket only");
            } else {
                let expected =
                    if *path == "/limb.v1.Enrol/Enrol" { Requires::Token } else { Requires::Certificate };
                assert_eq!(required(path), Some(expected), "{path} has no line in the table");
            }
        }
        for (path, _) in TABLE {
            assert!(RPC_PATHS.contains(path), "{path} is in the table but not in the protocol");
        }
        for path in ["", "/", "/limb.v1.Control/Nothing", "/limb.v1.Enrol/Enrol/", "/limb.v1.control/beat"] {
            assert_eq!(required(path), None);
        }
    }
}
