//! What we ask of the kernel at INIT. fuser grants itself anything that the kernel offers, also
//! what it cannot serve (io_uring, extended setxattr, idmapped mounts …) and then hangs or
//! panics; so only what is listed here is ever requested.

use fuser::{InitFlags, KernelConfig};

const SERVED: InitFlags = InitFlags::FUSE_ASYNC_READ
    .union(InitFlags::FUSE_BIG_WRITES)
    .union(InitFlags::FUSE_ATOMIC_O_TRUNC)
    .union(InitFlags::FUSE_DONT_MASK)
    .union(InitFlags::FUSE_AUTO_INVAL_DATA)
    .union(InitFlags::FUSE_DO_READDIRPLUS)
    .union(InitFlags::FUSE_READDIRPLUS_AUTO)
    .union(InitFlags::FUSE_NO_OPEN_SUPPORT)
    .union(InitFlags::FUSE_NO_OPENDIR_SUPPORT)
    .union(InitFlags::FUSE_PARALLEL_DIROPS)
    .union(InitFlags::FUSE_HANDLE_KILLPRIV)
    .union(InitFlags::FUSE_MAX_PAGES)
    .union(InitFlags::FUSE_CACHE_SYMLINKS)
    .union(InitFlags::FUSE_EXPLICIT_INVAL_DATA);

/// Requests what of `wanted` fuser can serve and the kernel offers; returns that.
pub fn request_capabilities(config: &mut KernelConfig, wanted: InitFlags) -> InitFlags {
    let unserved = wanted.difference(SERVED);
    if !unserved.is_empty() {
        tracing::warn!(?unserved, "not requested: fuser cannot serve it");
    }
    let granted = wanted & SERVED & config.capabilities();
    match config.add_capabilities(granted) {
        Ok(()) => granted,
        Err(refused) => granted.difference(refused),
    }
}
