//! The wire: generated messages, clients and servers. Nothing but generated code and the
//! redacting `Debug` of messages that carry secrets lives here.
//!
//! These types must appear only in `limb_common::wire`, the agent's `link` and the
//! coordinator's `rpc`; everything else speaks the domain's types.

#[allow(
    missing_debug_implementations,
    unreachable_pub,
    clippy::all,
    clippy::pedantic,
    clippy::restriction,
    clippy::use_self,
    clippy::allow_attributes_without_reason,
    reason = "generated code"
)]
pub mod v1 {
    tonic::include_proto!("limb.v1");
}

include!(concat!(env!("OUT_DIR"), "/rpc_paths.rs"));

macro_rules! redacted {
    ($($type:ident),*) => {$(
        impl std::fmt::Debug for v1::$type {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(concat!(stringify!($type), "([redacted])"))
            }
        }
    )*};
}
redacted!(EnvVar, EnvPair, EnrolRequest);

#[cfg(test)]
mod tests {
    use prost::Message as _;

    use super::v1::{BeatReply, BeatRequest};

    #[test]
    fn the_widest_beat_fits_into_64_bytes_each_way() {
        let request = BeatRequest { epoch: u64::MAX, seq: u64::MAX, lease_remaining_ms: u64::MAX };
        assert!(request.encoded_len() <= 64);
        assert!(BeatReply { renewed: true, ttl_ms: u64::MAX }.encoded_len() <= 64);
    }
}
