//! A TCP relay between the box and home that can be cut like a cable: bytes stop, connections
//! stay, nobody is told.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex};

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
        });
        let shared = Arc::clone(&state);
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if shared.ended.load(Ordering::SeqCst) {
                    return;
                }
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
                        std::thread::spawn(move || relay(from, to, up, &shared));
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

fn relay(mut from: TcpStream, mut to: TcpStream, up: bool, state: &State) {
    let mut buffer = vec![0; 64 * 1024];
    loop {
        let count = match from.read(&mut buffer) {
            Ok(0) | Err(_) => break,
            Ok(count) => count,
        };
        let mut cut = state.cut.lock().expect("no holder panics");
        while *cut && !state.ended.load(Ordering::SeqCst) {
            cut = state.changed.wait(cut).expect("no holder panics");
        }
        drop(cut);
        let counter = if up { &state.up_bytes } else { &state.down_bytes };
        counter.fetch_add(count as u64, Ordering::SeqCst);
        if to.write_all(&buffer[..count]).is_err() {
            break;
        }
    }
    drop(to.shutdown(Shutdown::Both));
    drop(from.shutdown(Shutdown::Both));
}
