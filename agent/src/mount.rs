//! What the job sees of home: file systems over FUSE. The file-system logic stands in types that
//! know nothing of FUSE; thin adapters bind them.
//!
//! Never: let a FUSE thread wait for the network, or touch a path inside one of our own mounts.

pub mod read;
pub mod session;
pub mod write;
