//! When and how far to read ahead: pure, stepped by each read that the kernel sends.
//!
//! Streams are found per inode (two programs that read one file help each other) and by byte
//! ranges (a chunk is read in eight pieces of 128 KiB or in one). A stream is proven by two
//! contiguous reads, or by a large one of a large file's beginning; its window starts at two chunks
//! and grows each time the reader has crossed it. Two reads in a row that belong to no stream halve
//! the windows of that file. A stream may also be expected, from what the file is: it has the whole
//! window until it is disproved.
//!
//! How far a run goes is learned from the file's last ones: where they ended early (records of a few
//! megabytes in random order; a map whose faults the kernel widens), nothing beyond is asked for,
//! until a run goes on past that, and then as much again as it has gone.
//!
//! Invariant: reads that touch nothing contiguous cause no read-ahead at all, so random access
//! fetches the chunks that it asks for and no others. Nothing is ever cancelled: a reader that
//! skips forward finds what is on its way.

use std::collections::{HashMap, VecDeque};
use std::ops::Range;

use limb_common::chunk::CHUNK_BYTES_U64;
use limb_common::manifest::Inode;

/// Streams tracked in one file: eight loader threads over one shard.
const MAX_STREAMS: usize = 8;
/// Files remembered; a training set of small files must not grow this.
const MAX_FILES: usize = 4096;
/// A stream counts as active while it is among the last so many sequential reads.
const RECENT_READS: usize = 64;
const FIRST_WINDOW_CHUNKS: u64 = 2;
/// The same for a file so large that its first two reads are worth more trust.
const FIRST_WINDOW_LARGE_CHUNKS: u64 = 16;
const LARGE_FILE_BYTES: u64 = 64 << 20;
/// Who read so far in order will go on: the window grows to what the link needs at once.
const TRUSTED_CHUNKS: u64 = 8;
/// Who asks for so much of a file's beginning copies it; who looks at its head asks for less (the
/// kernel makes 16 KiB of a read of 4).
const COPY_READ_BYTES: u64 = 128 << 10;
const MIN_WINDOW_BYTES: u64 = 2 << 20;
/// Runs of a file that tell of its next ones.
const LAST_RUNS: usize = 8;
/// Who goes so far is no matter of runs.
const LONG_RUN_BYTES: u64 = 16 << 20;
/// Six times 1 Gbit/s at 80 ms.
const MAX_WINDOW_BYTES: u64 = 64 << 20;
/// Until the link has been measured.
const UNMEASURED_WINDOW_BYTES: u64 = 16 << 20;

#[derive(Debug, Default)]
pub(super) struct ReadAhead {
    files: HashMap<Inode, FileStreams>,
    /// Serial numbers of the streams that were read last.
    recent: VecDeque<u64>,
    reads: u64,
    streams_seen: u64,
}

#[derive(Debug, Default)]
struct FileStreams {
    streams: Vec<Stream>,
    /// How far the last ones went that nobody goes on with.
    runs: VecDeque<u64>,
    strays: u32,
    used_at: u64,
    /// Once is enough: what was disproved is not expected again.
    expected: bool,
}

#[derive(Debug)]
struct Stream {
    serial: u64,
    /// Where its contiguous run began; 0: not known any more (no read ends there).
    start: u64,
    began: u64,
    /// The byte after the furthest that was read.
    next: u64,
    /// 0: not proven.
    window_chunks: u64,
    /// Reading past this byte doubles the window.
    widen_at: u64,
    /// Chunks before this one were asked for already.
    ahead_to: u64,
    /// Nobody has read all of a window of it yet.
    only_expected: bool,
    used_at: u64,
}

/// One read, as the kernel asked.
#[derive(Clone, Copy, Debug)]
pub(super) struct Read {
    pub(super) inode: Inode,
    pub(super) offset: u64,
    pub(super) len: u64,
    pub(super) file_bytes: u64,
}

/// What a read says about those that will follow.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Step {
    /// To be asked for now, each chunk of a stream once.
    pub(super) ask: Range<u64>,
    /// It belongs to a stream that goes on.
    pub(super) sequential: bool,
    /// What of the stream's window the kernel, which looks one chunk ahead itself, does not ask for
    /// yet.
    pub(super) before: Range<u64>,
}

impl ReadAhead {
    /// Takes note of a read.
    pub(super) fn on_read(&mut self, read: Read, bandwidth_delay_bytes: Option<u64>) -> Step {
        let Read { inode, offset, len, file_bytes } = read;
        let end = offset.saturating_add(len).min(file_bytes);
        if offset >= end {
            return Step::default();
        }
        self.reads += 1;
        self.forget_old_files();
        let cap_chunks = self.window_cap(bandwidth_delay_bytes);
        let file = self.files.entry(inode).or_default();
        file.used_at = self.reads;
        let begins_a_copy = offset == 0 && len >= COPY_READ_BYTES && file_bytes >= LARGE_FILE_BYTES;
        let index = match file.find(offset, end) {
            Some(index) => index,
            None => {
                self.streams_seen += 1;
                let stream = Stream::new(self.streams_seen, offset, end, self.reads);
                if !begins_a_copy {
                    file.stray(stream);
                    return Step::default();
                }
                file.open(stream)
            }
        };
        file.strays = 0;
        let usual_run = file.usual_run();
        let stream = &mut file.streams[index];
        stream.used_at = self.reads;
        let ask = stream.advance(offset, end, file_bytes, cap_chunks, usual_run);
        let horizon = stream.horizon(usual_run);
        let before = stream.before(horizon.min(file_bytes));
        self.recent.push_back(stream.serial);
        if self.recent.len() > RECENT_READS {
            self.recent.pop_front();
        }
        Step { ask, sequential: horizon > end, before }
    }

    /// This file, whose first bytes were just read, will be read to its end, as far as its kind tells:
    /// says which chunks to ask for now. Two reads elsewhere disprove it.
    pub(super) fn expect(
        &mut self,
        inode: Inode,
        file_bytes: u64,
        bandwidth_delay_bytes: Option<u64>,
    ) -> Range<u64> {
        let cap_chunks = self.window_cap(bandwidth_delay_bytes);
        let Some(file) = self.files.get_mut(&inode) else { return 0..0 };
        if std::mem::replace(&mut file.expected, true) {
            return 0..0;
        }
        let usual_run = file.usual_run();
        let first = file.streams.iter_mut().min_by_key(|stream| stream.next);
        first.map_or(0..0, |stream| stream.expect(file_bytes, cap_chunks, usual_run))
    }

    /// Eight times what the link holds, shared by the streams that are active: some is on its way,
    /// some lies at home's end of it, and what came before its turn, because another lane is slower,
    /// waits here while the lanes go on.
    fn window_cap(&self, bandwidth_delay_bytes: Option<u64>) -> u64 {
        let bytes = bandwidth_delay_bytes.map_or(UNMEASURED_WINDOW_BYTES, |bytes| {
            let mut active: Vec<_> = self.recent.iter().collect();
            active.sort_unstable();
            active.dedup();
            (bytes.saturating_mul(8) / (active.len().max(1) as u64)).clamp(MIN_WINDOW_BYTES, MAX_WINDOW_BYTES)
        });
        bytes.div_ceil(CHUNK_BYTES_U64)
    }

    /// Nobody did ask for the chunks that the last read of this file brought up: they are offered
    /// again.
    pub(super) fn not_asked(&mut self, inode: Inode, chunks: &Range<u64>) {
        let Some(file) = self.files.get_mut(&inode).filter(|_| !chunks.is_empty()) else { return };
        for stream in file.streams.iter_mut().filter(|stream| stream.ahead_to == chunks.end) {
            stream.ahead_to = chunks.start;
        }
    }

    fn forget_old_files(&mut self) {
        if self.files.len() < MAX_FILES {
            return;
        }
        let half = self.reads.saturating_sub(MAX_FILES as u64 / 2);
        self.files.retain(|_, file| file.used_at > half);
        if self.files.len() >= MAX_FILES {
            self.files.clear();
        }
    }
}

impl FileStreams {
    fn find(&self, offset: u64, end: u64) -> Option<usize> {
        let by = |test: &dyn Fn(&Stream) -> bool| self.streams.iter().position(test);
        by(&|stream| stream.next == offset)
            .or_else(|| by(&|stream| stream.window_chunks > 0 && stream.is_near(offset, end)))
            // Two threads of the session may see two contiguous reads in the other order.
            .or_else(|| by(&|stream| stream.window_chunks == 0 && stream.start == end))
    }

    fn stray(&mut self, stream: Stream) {
        self.strays += 1;
        if self.strays >= 2 {
            self.strays = 0;
            for stream in self.streams.iter_mut().filter(|stream| stream.window_chunks > 0) {
                stream.window_chunks /= 2;
                if stream.only_expected || stream.window_chunks < FIRST_WINDOW_CHUNKS {
                    stream.only_expected = false;
                    stream.window_chunks = 0;
                    // It is to be proven anew, by what follows it only.
                    stream.start = 0;
                }
            }
        }
        self.open(stream);
    }

    /// What the longest of the last runs was, once there are enough of them.
    fn usual_run(&self) -> Option<u64> {
        self.runs.iter().max().copied().filter(|_| self.runs.len() >= LAST_RUNS)
    }

    /// Where it is now.
    fn open(&mut self, stream: Stream) -> usize {
        if self.streams.len() >= MAX_STREAMS
            && let Some(oldest) = (0..self.streams.len()).min_by_key(|&at| self.streams[at].used_at)
        {
            let ended = self.streams.swap_remove(oldest);
            if self.runs.len() >= LAST_RUNS {
                self.runs.pop_front();
            }
            self.runs.push_back(ended.run());
        }
        self.streams.push(stream);
        self.streams.len() - 1
    }
}

impl Stream {
    fn new(serial: u64, offset: u64, end: u64, used_at: u64) -> Self {
        Self {
            serial,
            start: offset,
            began: offset,
            next: end,
            window_chunks: 0,
            widen_at: 0,
            ahead_to: 0,
            only_expected: false,
            used_at,
        }
    }

    /// Within a window behind, or within what is on its way or one window ahead.
    fn is_near(&self, offset: u64, end: u64) -> bool {
        let window = self.window_chunks * CHUNK_BYTES_U64;
        let furthest = (self.next + window).max(self.ahead_to.saturating_mul(CHUNK_BYTES_U64));
        end >= self.next.saturating_sub(window) && offset <= furthest
    }

    fn run(&self) -> u64 {
        self.next - self.began
    }

    /// Nobody is expected to read beyond this byte.
    fn horizon(&self, usual_run: Option<u64>) -> u64 {
        match usual_run {
            Some(usual) if self.run() <= usual && usual < LONG_RUN_BYTES => self.began + usual,
            Some(_) if self.run() < LONG_RUN_BYTES => self.began + 2 * self.run(),
            Some(_) | None => u64::MAX,
        }
    }

    fn advance(
        &mut self,
        offset: u64,
        end: u64,
        file_bytes: u64,
        cap_chunks: u64,
        usual_run: Option<u64>,
    ) -> Range<u64> {
        self.next = self.next.max(end);
        self.start = self.start.min(offset);
        self.began = self.began.min(offset);
        if self.window_chunks == 0 {
            self.window_chunks =
                if file_bytes < LARGE_FILE_BYTES { FIRST_WINDOW_CHUNKS } else { FIRST_WINDOW_LARGE_CHUNKS };
            self.widen_at = self.next + self.window_chunks * CHUNK_BYTES_U64;
        } else if self.next >= self.widen_at {
            let times = if self.window_chunks < TRUSTED_CHUNKS { 2 } else { 4 };
            self.window_chunks = (self.window_chunks * times).min(cap_chunks.max(FIRST_WINDOW_CHUNKS));
            self.widen_at = self.next + self.window_chunks * CHUNK_BYTES_U64;
            self.only_expected = false;
        }
        self.window_chunks = self.window_chunks.min(cap_chunks.max(FIRST_WINDOW_CHUNKS));
        self.ask(self.horizon(usual_run).min(file_bytes))
    }

    fn expect(&mut self, file_bytes: u64, cap_chunks: u64, usual_run: Option<u64>) -> Range<u64> {
        self.only_expected = self.window_chunks == 0;
        self.window_chunks = cap_chunks.max(FIRST_WINDOW_CHUNKS);
        self.widen_at = self.next + self.window_chunks * CHUNK_BYTES_U64;
        self.ask(self.horizon(usual_run).min(file_bytes))
    }

    /// What of the window, up to this byte, was not asked for yet.
    fn ask(&mut self, upto: u64) -> Range<u64> {
        let here = self.next.div_ceil(CHUNK_BYTES_U64);
        let from = self.ahead_to.max(here);
        let to = (here + self.window_chunks).min(upto.div_ceil(CHUNK_BYTES_U64));
        if from >= to {
            return 0..0;
        }
        self.ahead_to = to;
        from..to
    }

    fn before(&self, upto: u64) -> Range<u64> {
        let here = self.next.div_ceil(CHUNK_BYTES_U64);
        here + 1..(here + self.window_chunks).min(upto.div_ceil(CHUNK_BYTES_U64)).max(here + 1)
    }
}

#[cfg(test)]
mod tests;
