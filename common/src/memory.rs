//! How the allocator treats large buffers.

/// Buffers of 1 MiB come and go with every chunk. By default glibc gives them back to the kernel at
/// once and faults their pages in anew: a fifth of the CPU time of a transfer. Kept, they are
/// bounded by what is on its way at most. Called once, before there are threads.
pub fn keep_large_buffers() {
    #[cfg(target_env = "gnu")]
    {
        /// Larger ones are mapped and unmapped.
        const MAPPED_BYTES: libc::c_int = 32 << 20;
        /// This much may lie free at the top of a heap.
        const KEPT_BYTES: libc::c_int = 64 << 20;
        // SAFETY: mallopt only sets parameters of the allocator; a refusal changes nothing.
        unsafe {
            libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES);
            libc::mallopt(libc::M_TRIM_THRESHOLD, KEPT_BYTES);
        }
    }
}
