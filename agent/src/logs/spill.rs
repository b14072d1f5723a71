//! A bounded first-in-first-out of bytes in an unlinked file. A file that cannot be had or
//! written is an empty place: the caller keeps what it can in RAM.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

#[derive(Debug)]
pub(super) struct Spill {
    directory: PathBuf,
    file: Option<File>,
    capacity: u64,
    /// Position of the oldest byte, in the ring.
    head: u64,
    len: u64,
}

impl Spill {
    pub(super) fn new(directory: &Path, capacity: u64) -> Self {
        Self { directory: directory.to_owned(), file: None, capacity, head: 0, len: 0 }
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Adds `bytes` at the end. False: there is no room.
    pub(super) fn push(&mut self, bytes: &[u8]) -> bool {
        let count = bytes.len() as u64;
        if self.len + count > self.capacity {
            return false;
        }
        match self.write(bytes) {
            Ok(()) => {
                self.len += count;
                true
            }
            Err(error) => {
                tracing::debug!(%error, "no room for the job's output outside of RAM");
                false
            }
        }
    }

    fn write(&mut self, bytes: &[u8]) -> io::Result<()> {
        if self.file.is_none() {
            self.file = Some(unlinked(&self.directory)?);
        }
        let Some(file) = &self.file else { return Ok(()) };
        let tail = (self.head + self.len) % self.capacity;
        let until_end = usize::try_from(self.capacity - tail).unwrap_or(usize::MAX).min(bytes.len());
        let (first, second) = bytes.split_at(until_end);
        file.write_all_at(first, tail)?;
        file.write_all_at(second, 0)
    }

    /// Moves up to `most` of the oldest bytes to the end of `to`. Gives the number of bytes that
    /// cannot be read and are lost.
    pub(super) fn pop_into(&mut self, to: &mut VecDeque<u8>, most: usize) -> u64 {
        let Some(file) = &self.file else { return 0 };
        let count = usize::try_from(self.len).unwrap_or(usize::MAX).min(most);
        let until_end = usize::try_from(self.capacity - self.head).unwrap_or(usize::MAX).min(count);
        let mut bytes = vec![0; count];
        let (first, second) = bytes.split_at_mut(until_end);
        let read = file.read_exact_at(first, self.head).and_then(|()| file.read_exact_at(second, 0));
        self.head = (self.head + count as u64) % self.capacity.max(1);
        self.len -= count as u64;
        if self.len == 0 {
            self.head = 0;
            // Gives the room back; a file that keeps it is bounded anyway.
            let _emptied = file.set_len(0);
        }
        match read {
            Ok(()) => {
                to.extend(bytes);
                0
            }
            Err(error) => {
                tracing::warn!(%error, "some of the job's output is lost");
                count as u64
            }
        }
    }
}

fn unlinked(directory: &Path) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).write(true).mode(0o600);
    if let Ok(file) = options.clone().custom_flags(libc::O_TMPFILE).open(directory) {
        return Ok(file);
    }
    let path = directory.join(format!("log-spill-{}", std::process::id()));
    let file = options.create_new(true).open(&path)?;
    std::fs::remove_file(path)?;
    Ok(file)
}
