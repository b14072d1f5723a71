//! The agent's side of the wire. Messages of the protocol appear only under here.

pub mod channels;
pub mod chunks;
pub mod logs;
pub mod results;
