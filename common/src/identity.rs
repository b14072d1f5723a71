//! Who an agent is: the four names that its certificate carries.

use std::fmt;
use std::str::FromStr;

use crate::id::{AttemptNumber, HomeId, LeaseEpoch, RunId};

/// One life of one box: written by home into the certificate as the URI
/// `limb://HOME/RUN/ATTEMPT/EPOCH`, and read back on every RPC.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct AgentIdentity {
    pub home: HomeId,
    pub run: RunId,
    pub attempt: AttemptNumber,
    pub epoch: LeaseEpoch,
}

/// The text in a certificate is not an agent's identity.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("not an agent identity: {0:?}")]
pub struct InvalidIdentity(String);

impl fmt::Display for AgentIdentity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "limb://{}/{}/{}/{}", self.home, self.run, self.attempt, self.epoch)
    }
}

impl FromStr for AgentIdentity {
    type Err = InvalidIdentity;

    fn from_str(text: &str) -> Result<Self, InvalidIdentity> {
        let parse = || {
            let mut parts = text.strip_prefix("limb://")?.split('/');
            let identity = Self {
                home: parts.next()?.parse().ok()?,
                run: parts.next()?.parse().ok()?,
                attempt: AttemptNumber(parts.next()?.parse().ok()?),
                epoch: LeaseEpoch(parts.next()?.parse().ok()?),
            };
            (parts.next().is_none() && identity.to_string() == text).then_some(identity)
        };
        parse().ok_or_else(|| InvalidIdentity(text.to_owned()))
    }
}

/// ALPN of a connection on which only `Enrol` may be called.
pub const ALPN_ENROL: &[u8] = b"limb-enrol/1";
/// ALPN of a connection that carries an agent's certificate.
pub const ALPN_AGENT: &[u8] = b"limb/1";
/// The name in home's server certificate; agents verify it against the CA of their boot settings.
pub const HOME_SERVER_NAME: &str = "home.limb";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_round_trips_and_is_canonical() {
        let identity = AgentIdentity {
            home: HomeId::random(),
            run: RunId::random(),
            attempt: AttemptNumber(2),
            epoch: LeaseEpoch(7),
        };
        assert_eq!(identity.to_string().parse::<AgentIdentity>().unwrap(), identity);
        for bad in
            [format!("{identity}/"), format!("{identity} "), identity.to_string().replace("/2/", "/02/")]
        {
            assert!(bad.parse::<AgentIdentity>().is_err(), "{bad}");
        }
    }
}
