//! The output's file system, without FUSE, time or waiting: what a call does to names, bytes and
//! the outbox. One lock around it makes each call atomic.
//!
//! A file whose last writer was killed is torn: it stays private, readable and ready to be gone on
//! with, until somebody alive writes on and closes it, syncs or renames it, or the job ends.
//!
//! Never: publish bytes that the writer has not released, synced or renamed; journal a name before
//! the content that belongs under it.
//!
//! Invariant: with an outbox, applying its entries to the lower set gives this tree, but for files
//! that are still being written.

mod changes;
mod files;
mod names;

pub use changes::{Change, ChangeKind};
pub use names::Creation;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;

use limb_common::assignment::OutputNumber;
use limb_common::manifest::Manifest;
use nix::errno::Errno;

use super::budget::Budget;
use super::chunk::PublishedChunk;
use super::namespace::{Kind, Namespace};
use super::outbox::{Op, Outbox, Publish, PublishKind};

/// Beyond this the list of holes alone would be a burden.
const MAX_FILE_BYTES: u64 = 4 << 40;
/// A writer that pauses this long has its chunks sent.
const IDLE: Duration = Duration::from_millis(200);
/// How often an appended file grows at home.
const GROW_EVERY: Duration = Duration::from_secs(1);

#[derive(Debug)]
pub struct TreeSettings {
    pub output: OutputNumber,
    /// What the lineage left at home.
    pub lower: Option<Manifest>,
    /// uid and gid that everything of the lower set, and the root, belong to.
    pub owner: (u32, u32),
    pub quota_bytes: Option<u64>,
    pub quota_inodes: Option<u64>,
    /// Where changes go; none: nothing leaves the box.
    pub outbox: Option<Arc<Outbox>>,
}

/// What stat shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Attributes {
    pub inode: u64,
    pub kind: AttributesKind,
    pub size: u64,
    pub blocks: u64,
    pub mode: u32,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    pub mtime_ns: i64,
    pub ctime_ns: i64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AttributesKind {
    Directory,
    File,
    Symlink,
}

/// What setattr may change besides the size.
#[derive(Clone, Copy, Debug, Default)]
pub struct SetAttributes {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub mtime_ns: Option<i64>,
}

/// How a file is opened.
#[derive(Clone, Copy, Debug, Default)]
pub struct OpenMode {
    pub write: bool,
    pub append: bool,
    pub truncate: bool,
}

#[derive(Debug)]
struct Handle {
    inode: u64,
    mode: OpenMode,
    /// Closed last by a process that was killed: the file's `changes` at that moment.
    died_at: Option<u64>,
}

/// How a descriptor was closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    /// By close(2) or an ordinary exit of the process that opened it.
    ByOpener,
    /// The same, by another process that inherited it, or whose part nobody asked for.
    ByOther,
    /// Because its process was killed by a signal.
    ByDeath,
}

/// What a close of a handle decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stake {
    Nothing,
    /// Bytes that were never shown.
    Unpublished,
    /// The same, and a process that shared this handle was killed.
    Torn,
}

/// Space in an output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Usage {
    pub used_bytes: u64,
    pub limit_bytes: Option<u64>,
    pub used_inodes: u64,
    pub limit_inodes: Option<u64>,
}

#[derive(Debug)]
pub struct Tree {
    pub(super) names: Namespace,
    settings: TreeSettings,
    budget: Arc<Budget>,
    handles: HashMap<u64, Handle>,
    next_handle: u64,
    /// Files with bytes that were not sealed, or growth that was not published.
    unsettled: BTreeSet<u64>,
    used_bytes: u64,
    used_inodes: u64,
    fenced: bool,
    last_seq: u64,
    now_ns: i64,
    now: Duration,
}

impl Tree {
    #[must_use]
    pub fn new(settings: TreeSettings, now_ns: i64) -> Self {
        let names = Namespace::new(settings.lower.clone(), settings.owner, now_ns);
        let budget =
            settings.outbox.as_ref().map_or_else(|| Budget::new(u64::MAX), |out| Arc::clone(out.budget()));
        let lower = settings.lower.as_ref();
        Self {
            names,
            budget,
            handles: HashMap::new(),
            next_handle: 0,
            unsettled: BTreeSet::new(),
            used_bytes: lower.map_or(0, Manifest::total_bytes),
            used_inodes: lower.map_or(1, Manifest::inode_count),
            fenced: false,
            last_seq: 0,
            now_ns,
            now: Duration::ZERO,
            settings,
        }
    }

    /// Tells the time: wall clock for attributes, since boot for pauses.
    pub fn tick(&mut self, now_ns: i64, now: Duration) {
        self.now_ns = now_ns;
        self.now = now;
    }

    #[must_use]
    pub fn output(&self) -> OutputNumber {
        self.settings.output
    }

    pub fn attributes(&self, inode: u64) -> Result<Attributes, Errno> {
        let node = self.names.node(inode)?;
        let links = u32::try_from(node.names.len()).unwrap_or(u32::MAX);
        let (kind, size, blocks, nlink) = match &node.kind {
            Kind::Directory(_) => (AttributesKind::Directory, 4096, 8, 2),
            Kind::Symlink(target) => (AttributesKind::Symlink, target.len() as u64, 0, links),
            Kind::File(file) => {
                let known = if node.from_lower { links.max(self.names.lower_links(inode)) } else { links };
                let nlink = if links == 0 {
                    0
                } else if node.touched {
                    links
                } else {
                    known
                };
                (AttributesKind::File, file.content.size, file.content.blocks(), nlink)
            }
        };
        let (mode, uid, gid) = (node.mode, node.uid, node.gid);
        let (mtime_ns, ctime_ns) = (node.mtime_ns, node.ctime_ns);
        Ok(Attributes { inode, kind, size, blocks, mode, nlink, uid, gid, mtime_ns, ctime_ns })
    }

    #[must_use]
    pub fn usage(&self) -> Usage {
        Usage {
            used_bytes: self.used_bytes,
            limit_bytes: self.settings.quota_bytes,
            used_inodes: self.used_inodes,
            limit_inodes: self.settings.quota_inodes,
        }
    }

    fn no_space(&self) -> Errno {
        if self.settings.outbox.is_some() { Errno::EDQUOT } else { Errno::ENOSPC }
    }

    fn check_growth(&self, more: u64) -> Result<(), Errno> {
        let fits = self
            .settings
            .quota_bytes
            .is_none_or(|quota| self.used_bytes.checked_add(more).is_some_and(|sum| sum <= quota));
        if fits { Ok(()) } else { Err(self.no_space()) }
    }

    /// Appends an entry to the outbox, if there is one.
    fn push(&mut self, inode: u64, op: Op) {
        let Some(outbox) = &self.settings.outbox else { return };
        let seq = outbox.push(self.settings.output, inode, op);
        self.last_seq = seq;
        if let Ok(node) = self.names.node_mut(inode) {
            node.last_seq = seq;
        }
    }

    /// Seals what is dirty in a file and queues it.
    fn seal_all(&mut self, inode: u64) {
        let Some(outbox) = self.settings.outbox.clone() else { return };
        let output = self.settings.output;
        let Ok(file) = self.names.file_mut(inode) else { return };
        for index in file.content.dirty_indexes() {
            if let Some(chunk) = file.content.seal(output, index) {
                outbox.push_chunk(&chunk);
            }
        }
    }

    /// The content as it is now becomes visible at home under the file's first name, and its other
    /// names follow.
    fn publish(&mut self, inode: u64, kind: PublishKind) {
        if self.settings.outbox.is_none() {
            return;
        }
        let Some(path) = self.names.path(inode) else { return };
        self.begin(inode, false);
        self.seal_all(inode);
        let Ok(node) = self.names.node(inode) else { return };
        let (mode, mtime_ns) = (node.mode, node.mtime_ns);
        let Ok(file) = self.names.file(inode) else { return };
        let Some(upload) = &file.content.upload else { return };
        // The first growth is a copy that takes one name; later ones go into that file itself.
        let renews = kind != PublishKind::Grown || !upload.grown;
        let publish = Publish {
            file: upload.file,
            path: path.clone(),
            size: file.content.size,
            chunks: file.content.published(),
            mode,
            mtime_ns,
            kind,
        };
        self.push(inode, Op::Published(publish));
        let now = self.now;
        if let Ok(file) = self.names.file_mut(inode) {
            file.changed = false;
            file.at_home = true;
            file.last_grown = now;
            if let Some(upload) = &mut file.content.upload {
                upload.grown = kind == PublishKind::Grown;
            }
            if kind == PublishKind::Final {
                file.torn = false;
                file.content.finish();
                self.unsettled.remove(&inode);
            }
        }
        if renews {
            self.publish_names_and_xattrs(inode, &path);
        }
    }

    /// A publish replaces one name by a new file at home: further names and attributes are set anew.
    fn publish_names_and_xattrs(&mut self, inode: u64, path: &[u8]) {
        let Ok(node) = self.names.node(inode) else { return };
        let others: Vec<Vec<u8>> = node
            .names
            .iter()
            .map(|(parent, name)| self.names.path_in(*parent, name))
            .filter(|other| other != path)
            .collect();
        let xattrs: Vec<_> = node.xattrs.clone().into_iter().collect();
        for other in others {
            self.push(inode, Op::Removed { path: other.clone(), directory: false });
            self.push(inode, Op::HardLinkMade { existing: path.to_vec(), path: other });
        }
        for (name, value) in xattrs {
            self.push(inode, Op::XattrSet { path: path.to_vec(), name, value: Some(value) });
        }
    }

    /// Begins a life of the file at home, if none is going on.
    fn begin(&mut self, inode: u64, fresh: bool) {
        let Some(outbox) = self.settings.outbox.clone() else { return };
        if self.names.lower_links(inode) > 1 {
            self.names.load_all();
        }
        let named = self.names.path(inode);
        // What has no name will never be published: home only keeps its bytes for us, and the base
        // may be gone with the name.
        let fresh = fresh || named.is_none();
        if fresh {
            self.drop_refused(inode);
        }
        let path = named.unwrap_or_else(|| b"unlinked".to_vec());
        let Ok(node) = self.names.node_mut(inode) else { return };
        let mode = node.mode;
        let Kind::File(file) = &mut node.kind else { return };
        if file.content.upload.is_some() {
            return;
        }
        let id = outbox.new_file();
        let base = file.content.begin(id, fresh);
        outbox.clear_error(self.settings.output, inode);
        if base == super::content::Base::Nothing {
            outbox.supersede(self.settings.output, inode, id);
        }
        self.push(inode, Op::Created { file: id, path, mode, base });
    }

    /// A life that home refused to publish still takes room there. Once nothing builds on it, it
    /// goes, so that a job that starts over on a full disk finds room.
    fn drop_refused(&mut self, inode: u64) {
        let Some(outbox) = &self.settings.outbox else { return };
        let Ok(file) = self.names.file(inode) else { return };
        let refused = outbox.error_of(self.settings.output, inode).is_some();
        if let (true, None, Some(file)) = (refused, &file.content.upload, file.content.finished) {
            let path = b"refused".to_vec();
            self.push(inode, Op::Abandoned { file, keep: false, path, size: 0, chunks: Vec::new() });
        }
    }

    /// What the file's life at home ends with when it is never published.
    fn abandon(&mut self, inode: u64, keep: bool, path: Vec<u8>) {
        if keep {
            self.seal_all(inode);
        }
        let Ok(file) = self.names.file_mut(inode) else { return };
        let size = file.content.size;
        let chunks: Vec<(u64, PublishedChunk)> = if keep { file.content.published() } else { Vec::new() };
        let Some(upload) = file.content.upload.take() else { return };
        self.unsettled.remove(&inode);
        self.push(inode, Op::Abandoned { file: upload.file, keep, path, size, chunks });
    }

    // ---- what time brings

    /// Seals what its writer has left alone, and lets appended files grow at home.
    pub fn settle(&mut self) {
        let now = self.now;
        for inode in self.unsettled.clone() {
            let Ok(file) = self.names.file(inode) else {
                self.unsettled.remove(&inode);
                continue;
            };
            let idle = now.saturating_sub(file.last_write) >= IDLE;
            let grown = file.changed
                && self.grows(inode)
                && !self.fenced
                && now.saturating_sub(file.last_grown) >= GROW_EVERY;
            if grown {
                self.publish(inode, PublishKind::Grown);
            } else if idle {
                self.seal_all(inode);
            }
            let settled = self.names.file(inode).is_ok_and(|file| !file.content.is_dirty())
                && !(self.grows(inode) && self.names.file(inode).is_ok_and(|file| file.changed));
            if settled {
                self.unsettled.remove(&inode);
            }
        }
    }

    /// Whether the file is one that is only appended to, and still named.
    fn grows(&self, inode: u64) -> bool {
        self.names.path(inode).is_some()
            && self.names.file(inode).is_ok_and(|file| {
                file.appending && file.content.upload.as_ref().is_some_and(|upload| upload.append_only)
            })
    }

    /// Over budget: what is dirty must move so that it can be acknowledged.
    pub fn seal_everything(&mut self) {
        for inode in self.unsettled.clone() {
            self.seal_all(inode);
        }
    }

    /// Whether anybody still holds a handle. The kernel tells of a close later than the closer.
    #[must_use]
    pub fn has_handles(&self) -> bool {
        !self.handles.is_empty()
    }

    /// From now on a release publishes nothing that was not published before.
    pub fn fence(&mut self) {
        self.fenced = true;
    }

    #[must_use]
    pub fn is_fenced(&self) -> bool {
        self.fenced
    }

    /// After the fence: files that are torn or still open for writing end here, kept as partial ones.
    pub fn abandon_open(&mut self) {
        let open: Vec<u64> = self
            .names
            .inodes()
            .filter(|(_, node)| matches!(&node.kind, Kind::File(file) if file.content.upload.is_some()))
            .map(|(inode, _)| inode)
            .collect();
        for inode in open {
            self.end_life(inode);
        }
    }

    /// Everything that was journaled so far.
    #[must_use]
    pub fn last_seq(&self) -> u64 {
        self.last_seq
    }

    #[must_use]
    pub fn last_seq_of(&self, inode: u64) -> u64 {
        self.names.node(inode).map_or(0, |node| node.last_seq)
    }
}
