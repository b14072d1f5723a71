//! Home: the coordinator and the command line that talks to it.

pub mod database;
pub mod rpc;
