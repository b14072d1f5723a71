//! Calls on the bytes of files: open, read, write, truncate, sync, release.

use bytes::Bytes;
use nix::errno::Errno;

use super::{Closed, Handle, MAX_FILE_BYTES, OpenMode, Stake, Tree};
use crate::results::content::{Missing, Piece};
use crate::results::namespace::Kind;
use crate::results::outbox::PublishKind;

/// A larger file that loses its name while it is open is readable as far as it is in memory.
const MAX_PINNED_BYTES: u64 = 2 << 30;

impl Tree {
    /// Opens a file that exists. Truncating needs no old bytes, so this never waits.
    pub fn open(&mut self, inode: u64, mode: OpenMode) -> Result<u64, Errno> {
        self.names.file(inode)?;
        if mode.truncate {
            self.truncate_to_nothing(inode)?;
        }
        let file = self.names.file_mut(inode)?;
        file.opens += 1;
        if mode.write {
            // Who goes on with a torn file does not make a log of it.
            let first = file.writers == 0 && !file.torn;
            file.appending = mode.append && (file.appending || first);
            if file.writers == 0 {
                file.changes_before = file.changes;
            }
            file.writers += 1;
        }
        self.next_handle += 1;
        self.handles.insert(self.next_handle, Handle { inode, mode, died_at: None });
        Ok(self.next_handle)
    }

    fn truncate_to_nothing(&mut self, inode: u64) -> Result<(), Errno> {
        let file = self.names.file_mut(inode)?;
        if file.writers == 0 {
            // Nothing is left of what a dead writer left.
            file.torn = false;
        }
        if file.content.size == 0 {
            return Ok(());
        }
        self.begin(inode, true);
        self.apply_size(inode, 0)
    }

    /// What must be fetched before [`Self::resize`] to this size.
    pub(crate) fn missing_for_resize(&mut self, inode: u64, size: u64) -> Result<Vec<Missing>, Errno> {
        Ok(self.names.file_mut(inode)?.content.missing_for_resize(size))
    }

    pub(crate) fn missing_for_write(
        &mut self,
        inode: u64,
        offset: u64,
        len: usize,
    ) -> Result<Vec<Missing>, Errno> {
        let old = self.names.file(inode)?.content.size;
        // What will be refused needs, and holds, nothing.
        self.check_growth(end_of(offset, len)?.saturating_sub(old))?;
        Ok(self.names.file_mut(inode)?.content.missing_for_write(offset, len))
    }

    /// Whether what was fetched for this is still what a reader should get.
    pub(crate) fn lacks(&self, inode: u64, missing: &Missing) -> bool {
        self.names.file(inode).is_ok_and(|file| file.content.lacks(missing))
    }

    pub(crate) fn install(&mut self, inode: u64, missing: &Missing, bytes: Bytes) {
        if let Ok(file) = self.names.file_mut(inode) {
            file.content.install(missing, bytes);
        }
    }

    /// ftruncate; nothing is missing. Truncating a file that nobody has open for writing
    /// (truncate(2)) publishes at once: no release will follow.
    pub(crate) fn resize(&mut self, inode: u64, size: u64) -> Result<(), Errno> {
        if size > MAX_FILE_BYTES {
            return Err(Errno::EFBIG);
        }
        let file = self.names.file(inode)?;
        let (old, writers) = (file.content.size, file.writers);
        self.check_growth(size.saturating_sub(old))?;
        if size != old {
            self.begin(inode, size == 0);
            self.apply_size(inode, size)?;
        }
        if writers == 0 {
            self.names.file_mut(inode)?.torn = false;
            self.end_life(inode);
        }
        Ok(())
    }

    fn apply_size(&mut self, inode: u64, size: u64) -> Result<(), Errno> {
        let budget = std::sync::Arc::clone(&self.budget);
        let file = self.names.file_mut(inode)?;
        let old = file.content.size;
        file.content.resize(size, &budget);
        self.account(old, size);
        self.changed(inode)
    }

    fn account(&mut self, old: u64, new: u64) {
        self.used_bytes = self.used_bytes.saturating_sub(old).saturating_add(new);
    }

    /// Notes that the bytes are other than what home has.
    fn changed(&mut self, inode: u64) -> Result<(), Errno> {
        let (now, now_ns) = (self.now, self.now_ns);
        let node = self.names.node_mut(inode)?;
        node.mtime_ns = now_ns;
        node.ctime_ns = now_ns;
        node.touched = true;
        node.mode &= 0o1777;
        if let Kind::File(file) = &mut node.kind {
            file.changed = true;
            file.changes += 1;
            file.flushed = false;
            file.last_write = now;
        }
        self.unsettled.insert(inode);
        Ok(())
    }

    /// Writes; nothing is missing and there is room in the budget.
    pub(crate) fn write(&mut self, inode: u64, offset: u64, data: &[u8]) -> Result<(), Errno> {
        let end = end_of(offset, data.len())?;
        let old = self.names.file(inode)?.content.size;
        self.check_growth(end.saturating_sub(old))?;
        if data.is_empty() {
            return Ok(());
        }
        self.begin(inode, false);
        let budget = std::sync::Arc::clone(&self.budget);
        let output = self.settings.output;
        let file = self.names.file_mut(inode)?;
        let passed = file.content.write(offset, data, &budget);
        let new = file.content.size;
        if let Some(outbox) = self.settings.outbox.clone() {
            for index in passed {
                if let Some(chunk) = file.content.seal(output, index) {
                    outbox.push_chunk(&chunk);
                }
            }
        }
        self.account(old, new);
        self.changed(inode)
    }

    pub(crate) fn read(&self, inode: u64, offset: u64, len: usize) -> Result<Vec<Piece>, Errno> {
        Ok(self.names.file(inode)?.content.read(offset, len))
    }

    /// Mode 0: the file is at least this long afterwards. Space is a promise of the quota only.
    pub(crate) fn allocate_size(&self, inode: u64, offset: u64, len: u64, mode: i32) -> Result<u64, Errno> {
        if mode != 0 {
            return Err(Errno::EOPNOTSUPP);
        }
        let end = offset.checked_add(len).ok_or(Errno::EFBIG)?;
        Ok(self.names.file(inode)?.content.size.max(end))
    }

    /// Publishes what fsync promises. Returns the seq to wait for.
    pub fn sync(&mut self, inode: u64) -> Result<u64, Errno> {
        let file = self.names.file(inode)?;
        let unpublished = file.changed || !file.at_home;
        if unpublished && self.names.path(inode).is_some() {
            let kind = if self.grows(inode) { PublishKind::Grown } else { self.snapshot_kind(inode) };
            self.publish(inode, kind);
        }
        Ok(self.names.with_parents(inode).map(|inode| self.last_seq_of(inode)).max().unwrap_or(0))
    }

    /// A torn file has no writer whose release would end its life.
    pub(super) fn snapshot_kind(&self, inode: u64) -> PublishKind {
        let written = self.names.file(inode).is_ok_and(|file| file.writers > 0);
        if written { PublishKind::Snapshot } else { PublishKind::Final }
    }

    /// A sticky error of the file.
    #[must_use]
    pub fn error_of(&self, inode: u64) -> Option<Errno> {
        self.settings.outbox.as_ref()?.error_of(self.settings.output, inode)
    }

    /// The file's newest id at home: the one that goes on, else the last finished one.
    pub(crate) fn newest_file(&self, inode: u64) -> Option<u64> {
        let content = &self.names.file(inode).ok()?.content;
        content.upload.as_ref().map(|upload| upload.file).or(content.finished)
    }

    /// The inode behind a handle.
    pub fn inode_of(&self, handle: u64) -> Result<u64, Errno> {
        self.handles.get(&handle).map(|handle| handle.inode).ok_or(Errno::EBADF)
    }

    /// Whether the handle may write.
    #[must_use]
    pub fn is_writer(&self, handle: u64) -> bool {
        self.handles.get(&handle).is_some_and(|handle| handle.mode.write)
    }

    /// What depends on how a descriptor of this handle is closed.
    #[must_use]
    pub fn stake(&self, handle: u64) -> Stake {
        let Some(handle) = self.handles.get(&handle).filter(|handle| handle.mode.write) else {
            return Stake::Nothing;
        };
        let Ok(file) = self.names.file(handle.inode) else { return Stake::Nothing };
        if self.settings.outbox.is_none() {
            return Stake::Nothing;
        }
        match (file.changed || !file.at_home, handle.died_at) {
            (false, _) => Stake::Nothing,
            (true, None) => Stake::Unpublished,
            (true, Some(_)) => Stake::Torn,
        }
    }

    /// A descriptor of a writer was closed. After one that was killed it takes its opener, or
    /// somebody who wrote on, to say by closing it that the file is whole: a worker that merely
    /// inherited the descriptor of a dead parent says nothing.
    pub fn flushed(&mut self, handle: u64, how: Closed) {
        let Some(handle) = self.handles.get_mut(&handle).filter(|handle| handle.mode.write) else { return };
        let Ok(file) = self.names.file_mut(handle.inode) else { return };
        file.flushed = true;
        handle.died_at = match (how, handle.died_at) {
            (Closed::ByDeath, _) => Some(file.changes),
            (Closed::ByOther, Some(at)) if at == file.changes => Some(at),
            (Closed::ByOpener | Closed::ByOther, _) => None,
        };
    }

    /// Whether the file under this name was closed and its release is still to come: a rename
    /// that waits for it saves home a copy.
    pub(crate) fn is_closing(&mut self, parent: u64, name: &[u8]) -> bool {
        let found = self.names.find(parent, name).ok().flatten();
        found
            .and_then(|inode| self.names.file(inode).ok())
            .is_some_and(|file| file.writers > 0 && file.flushed && file.content.upload.is_some())
    }

    /// What has to be fetched before the file under this name loses it, because somebody has it
    /// open; what is in memory is kept there from now on.
    pub(crate) fn pin_open(&mut self, parent: u64, name: &[u8]) -> Option<(u64, Vec<Missing>)> {
        let inode = self.names.find(parent, name).ok().flatten()?;
        let node = self.names.node_mut(inode).ok()?;
        let last = node.names.len() == 1;
        let Kind::File(file) = &mut node.kind else { return None };
        if !last || file.opens == 0 || file.content.size > MAX_PINNED_BYTES {
            return None;
        }
        Some((inode, file.content.pin())).filter(|(_, missing)| !missing.is_empty())
    }

    /// Whether any handle may still write.
    #[must_use]
    pub fn is_being_written(&self) -> bool {
        self.handles.values().any(|handle| handle.mode.write)
    }

    /// The last descriptor of a handle was closed.
    pub fn release(&mut self, handle: u64) -> Result<(), Errno> {
        let Handle { inode, mode, died_at } = self.handles.remove(&handle).ok_or(Errno::EBADF)?;
        let file = self.names.file_mut(inode)?;
        file.opens = file.opens.saturating_sub(1);
        if mode.write {
            file.writers = file.writers.saturating_sub(1);
        }
        let unwritten = file.writers == 0;
        if died_at.is_some() {
            file.torn = true;
            // None of those who have it open now can carry on for the dead.
            file.changes_before = u64::MAX;
        } else if mode.write && unwritten && file.changes > file.changes_before {
            file.torn = false;
        }
        // Also after a reader that created the file: nobody else will publish it.
        if unwritten && self.names.path(inode).is_some() {
            self.end_life(inode);
        }
        self.collect(inode);
        Ok(())
    }

    /// The last writer has gone: the file's life at home ends with a final publish; after the
    /// fence, with a partial file, unless it only ever grew or was published as it is. Before the
    /// fence a torn file's life goes on.
    pub(super) fn end_life(&mut self, inode: u64) {
        let Ok(file) = self.names.file(inode) else { return };
        if file.content.upload.is_none() {
            return;
        }
        let Some(path) = self.names.path(inode) else {
            self.abandon(inode, false, b"unlinked".to_vec());
            return;
        };
        let whole = !file.changed && file.at_home;
        let half = (self.fenced || file.torn) && !whole && !self.grows(inode);
        match (half, self.fenced) {
            (true, true) => self.abandon(inode, true, path),
            (true, false) => {}
            (false, _) => self.publish(inode, PublishKind::Final),
        }
    }

    /// Forgets a file that has neither name nor handle.
    pub(super) fn collect(&mut self, inode: u64) {
        let unlinked = self.names.node(inode).is_ok_and(|node| node.names.is_empty());
        let closed = self.names.file(inode).is_ok_and(|file| file.opens == 0);
        if unlinked && closed {
            self.drop_refused(inode);
            self.abandon(inode, false, b"unlinked".to_vec());
        }
        if let Some(node) = self.names.collect(inode) {
            self.unsettled.remove(&inode);
            if let Some(outbox) = &self.settings.outbox {
                outbox.supersede(self.settings.output, inode, u64::MAX);
            }
            self.used_inodes = self.used_inodes.saturating_sub(1);
            if let Kind::File(file) = &node.kind {
                self.used_bytes = self.used_bytes.saturating_sub(file.content.size);
            }
        }
    }
}

/// Where a write ends.
fn end_of(offset: u64, len: usize) -> Result<u64, Errno> {
    offset.checked_add(len as u64).filter(|end| *end <= MAX_FILE_BYTES).ok_or(Errno::EFBIG)
}
