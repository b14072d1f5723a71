//! Identifiers, each its own type so that one cannot stand where another is meant.
//!
//! All are opaque: a provider or a tailnet that sees one learns nothing about the owner, the job
//! or the data (names of runs never leave home).

use std::fmt;

use rand::Rng as _;
use serde::{Deserialize, Serialize};

/// A text is not an identifier of the kind that was asked for.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error("{text:?} is not a valid {kind}")]
pub struct InvalidId {
    kind: &'static str,
    text: String,
}

macro_rules! opaque_id {
    ($(#[$doc:meta])* $name:ident, $kind:literal, $prefix:literal) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String", into = "String")]
        pub struct $name(String);

        impl $name {
            /// A fresh one: 60 random bits in lower-case base 32, so that it is a valid DNS
            /// label, tag and file name everywhere.
            #[must_use]
            pub fn random() -> Self {
                Self(format!(concat!($prefix, "{}"), random_base32()))
            }

            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl std::str::FromStr for $name {
            type Err = InvalidId;
            fn from_str(text: &str) -> Result<Self, InvalidId> {
                let tail = text.strip_prefix($prefix).unwrap_or_default();
                let ok = tail.len() == ID_CHARS
                    && tail.bytes().all(|b| ALPHABET.contains(&b));
                ok.then(|| Self(text.to_owned()))
                    .ok_or_else(|| InvalidId { kind: $kind, text: text.to_owned() })
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidId;
            fn try_from(text: String) -> Result<Self, InvalidId> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(id: $name) -> Self {
                id.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}

/// Crockford's alphabet without look-alikes.
const ALPHABET: &[u8; 32] = b"0123456789abcdefghjkmnpqrstvwxyz";
const ID_CHARS: usize = 12;

fn random_base32() -> String {
    let mut rng = rand::rng();
    (0..ID_CHARS).map(|_| char::from(ALPHABET[usize::from(rng.next_u32().to_le_bytes()[0] & 31)])).collect()
}

opaque_id!(
    /// One submission of a job file.
    RunId, "run id", "r-"
);
opaque_id!(
    /// The home whose coordinator owns a run; the owner tag on every box.
    HomeId, "home id", "h-"
);

/// What a provider calls a box. Its form is the provider's own.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct InstanceId(String);

impl InstanceId {
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for InstanceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Which box of a run, counted from 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct AttemptNumber(pub u32);

impl fmt::Display for AttemptNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// Fences one attempt's agent from every other: strictly increasing within a home.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct LeaseEpoch(pub u64);

impl fmt::Display for LeaseEpoch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

/// 32 bytes of BLAKE3. Printed as `b3sum` prints it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Digest(pub [u8; 32]);

impl Digest {
    /// The ordinary BLAKE3 hash of `bytes`.
    #[must_use]
    pub fn of(bytes: &[u8]) -> Self {
        Self(*blake3::hash(bytes).as_bytes())
    }

    #[must_use]
    pub fn to_hex(self) -> String {
        blake3::Hash::from_bytes(self.0).to_hex().to_string()
    }
}

impl fmt::Debug for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_hex()[..16])
    }
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.to_hex())
    }
}

impl TryFrom<&[u8]> for Digest {
    type Error = InvalidId;
    fn try_from(bytes: &[u8]) -> Result<Self, InvalidId> {
        bytes
            .try_into()
            .map(Self)
            .map_err(|_| InvalidId { kind: "32-byte hash", text: format!("{} bytes", bytes.len()) })
    }
}

impl std::str::FromStr for Digest {
    type Err = InvalidId;
    fn from_str(text: &str) -> Result<Self, InvalidId> {
        blake3::Hash::from_hex(text)
            .map(|hash| Self(*hash.as_bytes()))
            .map_err(|_| InvalidId { kind: "BLAKE3 hash", text: text.to_owned() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_ids_parse_back_and_others_are_refused() {
        let id = RunId::random();
        assert_eq!(id.as_str().parse::<RunId>().unwrap(), id);
        for bad in ["", "r-", "r-short", "h-0123456789ab", "r-0123456789a!", "r-0123456789abc"] {
            assert!(bad.parse::<RunId>().is_err(), "{bad}");
        }
    }
}
