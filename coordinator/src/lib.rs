//! Home: the coordinator and the command line that talks to it.

pub mod ca;
pub mod cli;
pub mod database;
pub mod env_names;
pub mod ledger;
pub mod lifecycle;
pub mod logs;
pub mod owner;
pub mod provider;
pub mod results;
pub mod rpc;
pub mod serve;
pub mod settings;
pub mod snapshot;
