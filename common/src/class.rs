//! How far data may travel. Ordered: a stricter class is greater, so the class of a run is the
//! maximum over its inputs.

use std::fmt;

use serde::{Deserialize, Serialize};

/// `public < internal < regulated < sealed`. What carries no label is `internal`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DataClass {
    Public,
    #[default]
    Internal,
    Regulated,
    /// Never leaves home.
    Sealed,
}

impl DataClass {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Public => "public",
            Self::Internal => "internal",
            Self::Regulated => "regulated",
            Self::Sealed => "sealed",
        }
    }
}

impl fmt::Display for DataClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A working set's data may go to a provider: only [`clear`] makes one, so code that serves data
/// cannot be reached without the verdict.
#[derive(Clone, Debug)]
pub struct Cleared {
    class: DataClass,
}

impl Cleared {
    #[must_use]
    pub fn class(&self) -> DataClass {
        self.class
    }
}

/// The data may not go there.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum NotCleared {
    #[error(
        "data of class `sealed` never leaves home, not even to a local box; hint: remove the set from the job or lower its class at its source"
    )]
    Sealed,
    #[error(
        "data of class `{class}` may not go to provider `{provider}`: until a policy names its controls it serves only `public`; hint: run it `--on local`, or label the set `class: public` if anybody may see it"
    )]
    ProviderNotTrusted { class: DataClass, provider: String },
}

/// The verdict, before any money is spent. A local box is home itself.
///
/// # Errors
/// Says which rule failed and what would satisfy it.
pub fn clear(class: DataClass, provider: &str, provider_is_local: bool) -> Result<Cleared, NotCleared> {
    match class {
        DataClass::Sealed => Err(NotCleared::Sealed),
        DataClass::Public => Ok(Cleared { class }),
        DataClass::Internal | DataClass::Regulated if provider_is_local => Ok(Cleared { class }),
        DataClass::Internal | DataClass::Regulated => {
            Err(NotCleared::ProviderNotTrusted { class, provider: provider.to_owned() })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stricter_is_greater_and_unlabelled_is_internal() {
        assert!(DataClass::Public < DataClass::Internal);
        assert!(DataClass::Internal < DataClass::Regulated);
        assert!(DataClass::Regulated < DataClass::Sealed);
        assert_eq!(DataClass::default(), DataClass::Internal);
    }

    #[test]
    fn only_public_data_may_leave_without_a_policy() {
        assert!(clear(DataClass::Public, "lambda", false).is_ok());
        assert!(clear(DataClass::Internal, "local", true).is_ok());
        assert!(clear(DataClass::Internal, "lambda", false).is_err());
        assert_eq!(clear(DataClass::Sealed, "local", true).unwrap_err(), NotCleared::Sealed);
    }
}
