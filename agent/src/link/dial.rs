//! The one way out of the box: TCP to home's address, an IP literal. Names are never resolved
//! (a static binary that calls getaddrinfo can crash in foreign NSS modules), and there is no
//! other destination.

use std::io;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use limb_common::clock::{BootInstant, boottime};
use rand::Rng as _;
use tokio::net::TcpStream;
use tokio::time::timeout;

/// Three lost SYNs.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(7);
const BACKOFF_FIRST: Duration = Duration::from_millis(100);
/// A link that comes back is noticed within this.
const BACKOFF_LONGEST: Duration = Duration::from_secs(4);
/// A connection that lived this long was a good one.
const GOOD_LIFE: Duration = Duration::from_secs(10);

#[derive(Debug, thiserror::Error)]
#[error("home's address {0:?} is not IP:PORT; hint: the boot settings must carry an IP literal")]
pub struct InvalidAddress(String);

/// Dials home and nobody else.
#[derive(Debug)]
pub struct Dialer {
    home: SocketAddr,
    backoff: Mutex<Backoff>,
    /// The shortest that a connection took, in microseconds; 0: none was made.
    round_trip_us: AtomicU64,
}

impl Dialer {
    /// # Errors
    /// [`InvalidAddress`] for anything but an IP literal with a port.
    pub fn new(address: &str) -> Result<Self, InvalidAddress> {
        let home = address.parse().map_err(|_| InvalidAddress(address.to_owned()))?;
        Ok(Self { home, backoff: Mutex::default(), round_trip_us: AtomicU64::new(0) })
    }

    /// Connects, after a jittered pause when the last tries failed or their connections died
    /// young.
    ///
    /// # Errors
    /// The system's reason, or a timeout.
    pub(super) async fn dial(&self) -> io::Result<TcpStream> {
        let pause = self.backoff.lock().unwrap_or_else(PoisonError::into_inner).before_dial(boottime());
        tokio::time::sleep(pause).await;
        let begun = boottime();
        let tcp = timeout(CONNECT_TIMEOUT, TcpStream::connect(self.home))
            .await
            .map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        tcp.set_nodelay(true)?;
        let took = boottime().saturating_since(begun).as_micros();
        let took = u64::try_from(took).unwrap_or(u64::MAX).max(1);
        let shorter = |least: u64| (least == 0 || took < least).then_some(took);
        let _longer: Result<u64, u64> =
            self.round_trip_us.fetch_update(Ordering::Relaxed, Ordering::Relaxed, shorter);
        Ok(tcp)
    }

    /// The shortest time that a connection took.
    pub(super) fn round_trip(&self) -> Option<Duration> {
        let us = self.round_trip_us.load(Ordering::Relaxed);
        (us > 0).then(|| Duration::from_micros(us))
    }

    /// The handshake went through.
    pub(super) fn connected(&self) {
        self.backoff.lock().unwrap_or_else(PoisonError::into_inner).connected_at = Some(boottime());
    }
}

/// How long to wait before the next try.
#[derive(Debug, Default)]
pub(super) struct Backoff {
    tries: u32,
    connected_at: Option<BootInstant>,
}

impl Backoff {
    fn before_dial(&mut self, now: BootInstant) -> Duration {
        if let Some(since) = self.connected_at.take() {
            // Several connections are opened side by side; only deaths count as failures, and
            // a young connection may well be alive: so one good handshake starts anew.
            self.tries = u32::from(now.saturating_since(since) < GOOD_LIFE);
            return Duration::ZERO;
        }
        let pause = self.pause();
        self.tries = self.tries.saturating_add(1);
        pause
    }

    fn pause(&self) -> Duration {
        if self.tries == 0 {
            return Duration::ZERO;
        }
        let ceiling = BACKOFF_FIRST.saturating_mul(1 << self.tries.min(10)).min(BACKOFF_LONGEST);
        ceiling.mul_f64(0.5 + 0.5 * f64::from(rand::rng().next_u32()) / f64::from(u32::MAX))
    }

    /// The next pause of a caller that counts its own failures.
    pub(super) fn after_failure(&mut self) -> Duration {
        self.tries = self.tries.saturating_add(1);
        self.pause()
    }

    pub(super) fn reset(&mut self) {
        self.tries = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ip_literals_are_dialled() {
        assert!(Dialer::new("127.0.0.1:4242").is_ok() && Dialer::new("[fd7a::1]:1").is_ok());
        for bad in ["home.example:4242", "localhost:1", "127.0.0.1", ""] {
            assert!(Dialer::new(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn pauses_grow_to_their_bound_and_are_jittered() {
        let mut backoff = Backoff::default();
        let now = BootInstant::from_duration(Duration::from_secs(1));
        assert_eq!(backoff.before_dial(now), Duration::ZERO);
        let pauses: Vec<_> = (0..12).map(|_| backoff.before_dial(now)).collect();
        assert!(pauses[0] >= BACKOFF_FIRST && pauses[0] <= BACKOFF_FIRST * 2);
        assert!(pauses.iter().all(|pause| *pause <= BACKOFF_LONGEST));
        assert!(pauses[8..].iter().all(|pause| *pause >= BACKOFF_LONGEST / 2));
    }
}
