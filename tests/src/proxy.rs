//! A TCP relay between the box and home that can be cut like a cable: bytes stop, connections
//! stay, nobody is told. It can also forget its connections, swallow what they carry, and be slow.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use limb_common::clock::{BootInstant, boottime};

#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    state: Arc<State>,
}

#[derive(Debug)]
struct State {
    cut: Mutex<bool>,
    changed: Condvar,
    /// Both ends of every connection so far.
    open: Mutex<Vec<TcpStream>>,
    ended: AtomicBool,
    down_bytes: AtomicU64,
    up_bytes: AtomicU64,
    connections: AtomicU64,
    /// Connections of an older generation are deaf.
    generation: AtomicU64,
    /// Bytes per second from home to the box, all connections together; 0: as fast as it goes.
    rate: AtomicU64,
    /// When the wire to the box is free again.
    free_at: Mutex<BootInstant>,
}

impl Proxy {
    /// Relays to `target` from a port of its own.
    ///
    /// # Panics
    /// When loopback cannot be bound.
    #[must_use]
    pub fn start(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").expect("loopback can be bound");
        let address = listener.local_addr().expect("a bound socket has an address");
        let state = Arc::new(State {
            cut: Mutex::new(false),
            changed: Condvar::new(),
            open: Mutex::default(),
            ended: AtomicBool::new(false),
            down_bytes: AtomicU64::new(0),
            up_bytes: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            generation: AtomicU64::new(0),
            rate: AtomicU64::new(0),
            free_at: Mutex::new(boottime()),
        });
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if shared.ended.load(Ordering::SeqCst) {
                    return;
                }
                shared.connections.fetch_add(1, Ordering::SeqCst);
                let Ok(server) = TcpStream::connect(target) else { continue };
                {
                    let mut open = shared.open.lock().expect("no holder panics");
                    open.retain(|stream| stream.peer_addr().is_ok());
                    open.extend([&client, &server].into_iter().filter_map(|end| end.try_clone().ok()));
                }
                let pairs = [
                    (client.try_clone(), server.try_clone(), true),
                    (server.try_clone(), client.try_clone(), false),
                ];
                for (from, to, up) in pairs {
                    if let (Ok(from), Ok(to)) = (from, to) {
                        let shared = Arc::clone(&shared);
                        let born = shared.generation.load(Ordering::SeqCst);
                        std::thread::spawn(move || relay(from, to, up, born, &shared));
                    }
                }
            }
        });
        Self { address, state }
    }

    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Nothing passes any more, in either direction; open connections look alive.
    pub fn cut(&self) {
        self.set(true);
    }

    pub fn restore(&self) {
        self.set(false);
    }

    /// Breaks every connection, as a router does that forgets them. What was on its way is lost.
    pub fn reset(&self) {
        for stream in self.state.open.lock().expect("no holder panics").drain(..) {
            drop(stream.shutdown(Shutdown::Both));
        }
        self.state.changed.notify_all();
    }

    /// Whatever the connections of now carry from now on is lost, for ever, and they look alive;
    /// new ones work.
    pub fn swallow(&self) {
        self.state.generation.fetch_add(1, Ordering::SeqCst);
    }

    /// From home to the box no more than so many bytes pass in a second, over all connections
    /// together and in turn; 0 takes the limit away.
    pub fn slow(&self, bytes_per_second: u64) {
        self.state.rate.store(bytes_per_second, Ordering::SeqCst);
    }

    /// Connections that the box has made so far.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.state.connections.load(Ordering::SeqCst)
    }

    /// Bytes that went from home to the box.
    #[must_use]
    pub fn down_bytes(&self) -> u64 {
        self.state.down_bytes.load(Ordering::SeqCst)
    }

    /// Bytes that went from the box to home.
    #[must_use]
    pub fn up_bytes(&self) -> u64 {
        self.state.up_bytes.load(Ordering::SeqCst)
    }

    fn set(&self, cut: bool) {
        *self.state.cut.lock().expect("no holder panics") = cut;
        self.state.changed.notify_all();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.state.ended.store(true, Ordering::SeqCst);
        self.set(false);
        // Wakes the accept loop so that it sees the end.
        drop(TcpStream::connect(self.address));
    }
}

impl State {
    /// Returns when the wire has carried so much.
    fn carry(&self, bytes: u64) {
        let rate = self.rate.load(Ordering::SeqCst);
        if rate == 0 {
            return;
        }
        let done = {
            let mut free_at = self.free_at.lock().expect("no holder panics");
            let begins = (*free_at).max(boottime());
            *free_at = begins + Duration::from_micros(bytes * 1_000_000 / rate);
            *free_at
        };
        loop {
            let left = done.saturating_since(boottime());
            if left.is_zero() || self.ended.load(Ordering::SeqCst) {
                return;
            }
            std::thread::park_timeout(left);
        }
    }
}

fn relay(mut from: TcpStream, mut to: TcpStream, up: bool, born: u64, state: &State) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let count = match from.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(count) => count,
        };
        if !up {
            state.carry(count as u64);
        }
        let mut cut = state.cut.lock().expect("no holder panics");
        while *cut && !state.ended.load(Ordering::SeqCst) {
            cut = state.changed.wait(cut).expect("no holder panics");
        }
        drop(cut);
        if state.generation.load(Ordering::SeqCst) > born {
            continue;
        }
        let counter = if up { &state.up_bytes } else { &state.down_bytes };
        counter.fetch_add(count as u64, Ordering::SeqCst);
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    drop(to.shutdown(Shutdown::Both));
    drop(from.shutdown(Shutdown::Both));
}
