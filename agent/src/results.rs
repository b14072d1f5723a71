//! What the job writes: an in-memory tree that the job sees at once, and an outbox that brings it
//! home in the job's own order. FUSE and gRPC know this place; it knows neither.
//!
//! Never: tell the job that something is durable before home has said so, send a file under its
//! name before it is whole, or forget bytes that home has not acknowledged.
//!
//! ```text
//! job ─ FUSE ─ Output (async: waits, budget) ─ Tree (pure) ─ Outbox (ordered log) ─ link ─ home
//! ```

mod budget;
pub mod chunk;
mod content;
mod namespace;
pub mod outbox;
pub mod output;
pub mod tree;

pub use budget::Budget;
pub use outbox::{Op, Outbox, OutboxSettings, PublishKind, Refusal};
pub use output::{Change, ChangeKind, Output, OutputSettings};
pub use tree::{Attributes, SetAttributes, Tree, TreeSettings};
