//! The agents' port. Chosen once and kept: running boxes dial the port that they were told.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::net::TcpListener;

use super::ServeError;
use crate::ledger::Ledger;

const META_PORT: &str = "agent-port";
/// A port that running boxes know is waited for: its last holder may just be ending.
const TRIES: u32 = 20;
const PAUSE: Duration = Duration::from_millis(250);

pub(super) async fn agents(
    ledger: &Ledger,
    wanted: SocketAddr,
) -> Result<(TcpListener, SocketAddr), ServeError> {
    let kept: Option<u16> = match wanted.port() {
        0 => ledger.meta(META_PORT).await?.and_then(|text| text.parse().ok()),
        port => Some(port),
    };
    let boxes_know_it = !ledger.open_attempts().await?.is_empty();
    let listener = match kept {
        None => bind(wanted).await?,
        Some(port) => {
            let address = SocketAddr::new(wanted.ip(), port);
            let tries = if boxes_know_it || wanted.port() != 0 { TRIES } else { 1 };
            match bind_patiently(address, tries).await {
                Ok(listener) => listener,
                Err(_) if !boxes_know_it && wanted.port() == 0 => bind(wanted).await?,
                Err(error) => return Err(error),
            }
        }
    };
    let address = listener.local_addr().map_err(|source| ServeError::Listen { address: wanted, source })?;
    ledger.set_meta(META_PORT, address.port().to_string()).await?;
    Ok((listener, address))
}

async fn bind(address: SocketAddr) -> Result<TcpListener, ServeError> {
    TcpListener::bind(address).await.map_err(|source| ServeError::Listen { address, source })
}

async fn bind_patiently(address: SocketAddr, tries: u32) -> Result<TcpListener, ServeError> {
    for _ in 1..tries {
        if let Ok(listener) = bind(address).await {
            return Ok(listener);
        }
        tokio::time::sleep(PAUSE).await;
    }
    bind(address).await
}
