//! Orders.

use std::time::Duration;

use limb_proto::v1;

use super::{WireError, ms};
use crate::assignment::Order;

impl From<&Order> for v1::Order {
    fn from(order: &Order) -> Self {
        match order {
            Order::Run => Self { kind: v1::order::Kind::Run.into(), ..Self::default() },
            Order::Stop { reason, grace, drain } => Self {
                kind: v1::order::Kind::Stop.into(),
                reason: reason.clone(),
                grace_ms: ms(*grace),
                drain_ms: ms(*drain),
            },
            Order::Die { reason } => {
                Self { kind: v1::order::Kind::Die.into(), reason: reason.clone(), ..Self::default() }
            }
        }
    }
}

impl TryFrom<v1::Order> for Order {
    type Error = WireError;

    fn try_from(order: v1::Order) -> Result<Self, WireError> {
        let unknown = || WireError::new("order.kind", format!("{} is unknown", order.kind));
        match v1::order::Kind::try_from(order.kind).map_err(|_| unknown())? {
            v1::order::Kind::Unspecified => Err(unknown()),
            v1::order::Kind::Run => Ok(Self::Run),
            v1::order::Kind::Stop => Ok(Self::Stop {
                reason: order.reason,
                grace: Duration::from_millis(order.grace_ms),
                drain: Duration::from_millis(order.drain_ms),
            }),
            v1::order::Kind::Die => Ok(Self::Die { reason: order.reason }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_travel_and_unknown_kinds_are_errors() {
        for order in [
            Order::Run,
            Order::Stop {
                reason: "budget".into(),
                grace: Duration::from_secs(9),
                drain: Duration::from_secs(60),
            },
            Order::Die { reason: "done".into() },
        ] {
            assert_eq!(Order::try_from(v1::Order::from(&order)).unwrap(), order);
        }
        for kind in [0, 99] {
            assert!(Order::try_from(v1::Order { kind, ..v1::Order::default() }).is_err());
        }
    }
}
