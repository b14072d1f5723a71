//! Random scripts: file calls, and what happens to the link and to home meanwhile. One seed gives
//! one script.
//!
//! Not promised, and so not asked for: the bytes of a file that was published, lost its last name
//! while it was open, and is no longer in the box's memory.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use limb_agent::results::tree::{OpenMode, SetAttributes};
use nix::errno::Errno;

use crate::agent::{Agent, listing_of};
use crate::home::Home;

const MIB: u64 = 1 << 20;
const DIRECTORIES: [&str; 3] = ["d", "d/e", "g"];
const FILES: [&str; 7] = ["a", "b", "d/a", "d/b", "d/e/a", "g/a", "log"];
const OFFSETS: [u64; 7] = [0, 1, 5000, MIB - 1, MIB, 2 * MIB - 7, 2 * MIB + 5];
const LENGTHS: [u64; 5] = [1, 4096, 100_000, MIB, MIB + 3];
const MAX_HANDLES: usize = 4;

/// SplitMix64: small, and the same everywhere.
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    fn one<T: Copy>(&mut self, of: &[T]) -> T {
        of[usize::try_from(self.below(of.len() as u64)).unwrap()]
    }

    pub(crate) fn bytes(&mut self, len: u64) -> Vec<u8> {
        let mut out = vec![0; usize::try_from(len).unwrap()];
        blake3::Hasher::new().update(&self.next().to_le_bytes()).finalize_xof().fill(&mut out);
        out
    }
}

/// Every content that any file ever had: what the owner may see.
#[derive(Default)]
struct Legal {
    whole: HashSet<[u8; 32]>,
    /// Contents of appended files; the owner may see any beginning of them while they grow.
    growing: Vec<Vec<u8>>,
}

impl Legal {
    fn allows(&self, bytes: &[u8]) -> bool {
        self.whole.contains(blake3::hash(bytes).as_bytes())
            || self.growing.iter().any(|whole| whole.starts_with(bytes))
    }
}

/// Looks at the owner's directory all the time.
struct Watcher {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<Vec<String>>>,
}

impl Watcher {
    fn start(dest: PathBuf, legal: Arc<Mutex<Legal>>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let ended = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut torn = Vec::new();
            while !ended.load(Ordering::SeqCst) && torn.is_empty() {
                look(&dest, true, &legal, &mut torn);
                std::thread::park_timeout(std::time::Duration::from_millis(1));
            }
            torn
        });
        Self { stop, thread: Some(thread) }
    }

    fn end(mut self) -> Vec<String> {
        self.stop.store(true, Ordering::SeqCst);
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
    }
}

fn look(directory: &Path, top: bool, legal: &Mutex<Legal>, torn: &mut Vec<String>) {
    let Ok(entries) = std::fs::read_dir(directory) else { return };
    for entry in entries.flatten() {
        let Ok(kind) = entry.file_type() else { continue };
        if kind.is_dir() && !(top && entry.file_name() == ".limb") {
            look(&entry.path(), false, legal, torn);
        }
        if kind.is_file()
            && let Ok(bytes) = std::fs::read(entry.path())
            && !legal.lock().unwrap().allows(&bytes)
        {
            torn.push(format!("{} with {} bytes", entry.path().display(), bytes.len()));
        }
    }
}

struct Handle {
    number: u64,
    inode: u64,
    write: bool,
    append: bool,
}

pub(crate) struct Player<'a> {
    home: &'a mut Home,
    agent: &'a Agent,
    random: Random,
    handles: Vec<Handle>,
    contents: HashMap<u64, Vec<u8>>,
    legal: Arc<Mutex<Legal>>,
    cut: bool,
    /// Told when it fails.
    said: Vec<String>,
}

impl<'a> Player<'a> {
    pub(crate) fn new(home: &'a mut Home, agent: &'a Agent, seed: u64) -> Self {
        let mut legal = Legal::default();
        legal.whole.insert(*blake3::hash(b"").as_bytes());
        Self {
            home,
            agent,
            random: Random::new(seed),
            handles: Vec::new(),
            contents: HashMap::new(),
            legal: Arc::new(Mutex::new(legal)),
            cut: false,
            said: Vec::new(),
        }
    }

    /// Plays so many steps and then compares. `Err`: what is wrong, and the script.
    pub(crate) fn play(mut self, steps: usize) -> Result<(), String> {
        let watcher = Watcher::start(self.home.dest.clone(), Arc::clone(&self.legal));
        let mut result = Ok(());
        for _ in 0..steps {
            result = self.step();
            if result.is_err() {
                break;
            }
        }
        let result = result.and_then(|()| self.end());
        let torn = watcher.end();
        let torn = if torn.is_empty() { Ok(()) } else { Err(format!("torn: {torn:?}")) };
        result.and(torn).map_err(|wrong| format!("{wrong}\nscript:\n  {}", self.said.join("\n  ")))
    }

    fn say(&mut self, text: String) {
        self.said.push(text);
    }

    fn step(&mut self) -> Result<(), String> {
        match self.random.below(100) {
            0..18 => self.open(),
            18..45 => self.write()?,
            45..50 => self.resize()?,
            50..58 => return self.sync(),
            58..70 => self.close(),
            70..90 => self.names(),
            90..93 => self.attributes(),
            93..96 => return self.read(),
            _ => self.fault(),
        }
        Ok(())
    }

    fn open(&mut self) {
        if self.handles.len() == MAX_HANDLES {
            return;
        }
        let path = self.random.one(&FILES);
        let append = path == "log" && self.random.below(8) > 0;
        let truncate = !append && self.random.below(3) == 0;
        let write = append || truncate || self.random.below(5) > 0;
        let opened = self.agent.open(path, OpenMode { write, append, truncate });
        self.say(format!("open {path} write={write} append={append} truncate={truncate}: {opened:?}"));
        if let Ok((inode, number)) = opened {
            let content = self.contents.entry(inode).or_default();
            if truncate {
                content.clear();
            }
            self.handles.push(Handle { number, inode, write, append });
        }
    }

    /// Where a step wants a handle: one of those that fit.
    fn pick(&mut self, write: bool) -> Option<usize> {
        let fit: Vec<usize> =
            (0..self.handles.len()).filter(|at| !write || self.handles[*at].write).collect();
        (!fit.is_empty()).then(|| self.random.one(&fit))
    }

    fn write(&mut self) -> Result<(), String> {
        let Some(at) = self.pick(true) else { return Ok(()) };
        let (inode, append) = (self.handles[at].inode, self.handles[at].append);
        let size = self.contents[&inode].len() as u64;
        let offset = if append { size } else { self.random.one(&OFFSETS) };
        let len = if append { 1 + self.random.below(30_000) } else { self.random.one(&LENGTHS) };
        let bytes = self.random.bytes(len);
        let content = self.contents.get_mut(&inode).unwrap();
        let (from, to) = (usize::try_from(offset).unwrap(), usize::try_from(offset + len).unwrap());
        content.resize(content.len().max(to), 0);
        content[from..to].copy_from_slice(&bytes);
        self.legalise(inode, append);
        self.say(format!("write {inode} at {offset} len {len}"));
        let agent = self.agent;
        let done = agent.output.write_now(inode, offset, &bytes).unwrap_or_else(|| {
            // Bytes of before come from home, or there is no room.
            self.heal();
            agent.block_on(agent.output.write(inode, offset, &bytes))
        });
        match done {
            // What lost its name can lose its published bytes with it; see the module's header.
            Err(Errno::EIO) if agent.names_of(inode).is_empty() => {
                self.say(format!("{inode} cannot be written any more"));
                self.forget(inode);
                Ok(())
            }
            done => done.map_err(|error| format!("write {inode}: {error}")),
        }
    }

    fn legalise(&self, inode: u64, growing: bool) {
        let content = &self.contents[&inode];
        let mut legal = self.legal.lock().unwrap();
        legal.whole.insert(*blake3::hash(content).as_bytes());
        if growing {
            match legal.growing.iter_mut().find(|old| content.starts_with(old)) {
                Some(old) => old.clone_from(content),
                None => legal.growing.push(content.clone()),
            }
        }
    }

    fn resize(&mut self) -> Result<(), String> {
        let by_path = self.random.below(3) == 0;
        let inode = if by_path {
            let path = self.random.one(&FILES);
            match self.agent.find(path) {
                Ok(found) if self.contents.contains_key(&found.inode) => found.inode,
                _ => return Ok(()),
            }
        } else {
            match self.pick(true) {
                Some(at) => self.handles[at].inode,
                None => return Ok(()),
            }
        };
        let size = if self.random.below(2) == 0 { 0 } else { self.random.below(3 * MIB) };
        let content = self.contents.get_mut(&inode).unwrap();
        let longer = size > content.len() as u64;
        content.resize(usize::try_from(size).unwrap(), 0);
        // A log that is made longer grows where the owner looks.
        let growing = longer && self.handles.iter().any(|handle| handle.inode == inode && handle.append);
        self.legalise(inode, growing);
        self.say(format!("truncate {inode} to {size}"));
        self.heal();
        let done = self.agent.block_on(self.agent.output.resize(inode, size));
        if done == Err(Errno::EIO) && self.agent.names_of(inode).is_empty() {
            self.forget(inode);
            return Ok(());
        }
        done.map_err(|error| format!("truncate: {error}"))
    }

    /// fsync in whatever state the link is; then all is healed, and what it promised is looked at.
    fn sync(&mut self) -> Result<(), String> {
        let Some(at) = self.pick(false) else { return Ok(()) };
        let inode = self.handles[at].inode;
        self.say(format!("fsync {inode}"));
        let output = Arc::clone(&self.agent.output);
        let synced = {
            let _inside = self.agent.runtime.as_ref().unwrap().enter();
            limb_common::task::spawn("fsync", async move { output.sync(inode).await })
        };
        self.heal();
        let done = self.agent.block_on(synced.join()).expect("no panic");
        done.map_err(|error| format!("fsync {inode}: {error}"))?;
        for name in self.agent.names_of(inode) {
            let found = std::fs::read(self.home.path(&name));
            let found = found.map_err(|error| format!("fsynced {name} is not at home: {error}"))?;
            if found != self.contents[&inode] {
                let (is, wanted) = (found.len(), self.contents[&inode].len());
                return Err(format!("fsynced {name} has {is} bytes at home, not those {wanted}"));
            }
        }
        Ok(())
    }

    fn forget(&mut self, inode: u64) {
        let (gone, kept) =
            std::mem::take(&mut self.handles).into_iter().partition(|handle| handle.inode == inode);
        self.handles = kept;
        let gone: Vec<Handle> = gone;
        gone.into_iter().for_each(|handle| self.agent.release(handle.number));
    }

    fn close(&mut self) {
        if let Some(at) = self.pick(false) {
            let handle = self.handles.swap_remove(at);
            self.say(format!("close {}", handle.inode));
            self.agent.release(handle.number);
        }
    }

    fn names(&mut self) {
        let (one, two) = (self.random.one(&FILES), self.random.one(&FILES));
        let (here, there) = (self.random.one(&DIRECTORIES), self.random.one(&DIRECTORIES));
        let agent = self.agent;
        let text = match self.random.below(10) {
            0..3 => format!("rename {one} {two}: {:?}", agent.rename(one, two)),
            3 => format!("rename {here} {there}: {:?}", agent.rename(here, there)),
            4 => format!("unlink {one}: {:?}", agent.unlink(one)),
            5 => format!("rmdir {here}: {:?}", agent.remove_directory(here)),
            6 => format!("link {one} {two}: {:?}", agent.link(one, two)),
            7 => format!("symlink {one}: {:?}", agent.symlink(one, "b")),
            _ => format!("mkdir {here}: {:?}", agent.make_directory(here)),
        };
        self.say(text);
    }

    fn attributes(&mut self) {
        let path =
            if self.random.below(4) == 0 { self.random.one(&DIRECTORIES) } else { self.random.one(&FILES) };
        let mode = [0o600, 0o640, 0o755, 0o444][usize::try_from(self.random.below(4)).unwrap()];
        let mtime_ns = i64::try_from(self.random.below(1 << 60)).unwrap();
        let set = if self.random.below(2) == 0 {
            SetAttributes { mode: Some(mode), ..SetAttributes::default() }
        } else {
            SetAttributes { mtime_ns: Some(mtime_ns), ..SetAttributes::default() }
        };
        if let Ok(found) = self.agent.find(path) {
            let done = self.agent.output.tree().set_attributes(found.inode, set);
            self.say(format!("attributes {path} {set:?}: {:?}", done.map(drop)));
        }
    }

    fn read(&mut self) -> Result<(), String> {
        let Some(at) = self.pick(false) else { return Ok(()) };
        let inode = self.handles[at].inode;
        if self.agent.names_of(inode).is_empty() {
            return Ok(());
        }
        self.say(format!("read {inode}"));
        self.heal();
        let found = self.agent.read(inode).map_err(|error| format!("read {inode}: {error}"))?;
        let same = found == self.contents[&inode];
        if same { Ok(()) } else { Err(format!("read {inode}: other bytes than were written")) }
    }

    fn fault(&mut self) {
        match self.random.below(4) {
            0 => {
                self.say("cut".to_owned());
                self.cut = true;
                self.home.proxy.cut();
            }
            1 => {
                self.say("reset".to_owned());
                self.home.proxy.reset();
            }
            2 => {
                self.say("home crashes".to_owned());
                self.home.crash();
            }
            _ => self.heal(),
        }
    }

    fn heal(&mut self) {
        if self.cut || !self.home.is_up() {
            self.say("heal".to_owned());
        }
        self.cut = false;
        self.home.proxy.restore();
        self.home.start();
    }

    fn end(&mut self) -> Result<(), String> {
        for handle in std::mem::take(&mut self.handles) {
            self.agent.release(handle.number);
        }
        self.heal();
        let report = self.agent.drain();
        let refused = self.agent.refusals.lock().unwrap().clone();
        if !report.complete || !refused.is_empty() {
            return Err(format!("not everything got home: {report:?} {refused:?}"));
        }
        let (box_side, home_side) = (self.agent.listing(), listing_of(&self.home.dest));
        let mut wrong = Vec::new();
        for path in box_side.keys().chain(home_side.keys()).collect::<std::collections::BTreeSet<_>>() {
            let (ours, theirs) = (box_side.get(path), home_side.get(path));
            if ours != theirs {
                wrong.push(format!("{path}: on the box {ours:?}, at home {theirs:?}"));
            }
        }
        let events = self.home.events.lock().unwrap().clone();
        if wrong.is_empty() && events.is_empty() { Ok(()) } else { Err(format!("{wrong:#?} {events:?}")) }
    }
}
