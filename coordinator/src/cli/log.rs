//! The coordinator's own log, on stderr: whoever starts it says where that goes.

use tracing_subscriber::EnvFilter;

use super::talk::Failure;

/// From here on what the coordinator does is written down. `filter` is the setting `log`.
pub(super) fn start(filter: &str) -> Result<(), Failure> {
    let filter = EnvFilter::try_new(filter).map_err(|error| {
        Failure::refused(anyhow::anyhow!(
            "the setting `log` cannot be {filter:?}: {error}; hint: write it like `info` or `limb=debug`"
        ))
    })?;
    // A test's program may have a log of its own already.
    drop(
        tracing_subscriber::fmt()
            .with_env_filter(filter)
            .with_writer(std::io::stderr)
            .with_ansi(false)
            .try_init(),
    );
    Ok(())
}
