//! Does the effects of a batch, in order. Each may have been done before, in a life that ended
//! half-way: whether it was is told by (dev, ino).

use std::collections::{BTreeMap, HashMap};
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use limb_common::clock;
use nix::errno::Errno;
use nix::fcntl::OFlag;

use super::disk::{
    Directories, Disk, DiskError, Ident, Kind, Over, Seen, look, look_at_open, open_in, user_xattrs,
};
use super::effect::{After, Effect, Intent, Where, Written};
use super::entry::Refusal;
use super::names::{ResultPath, with_ending};
use super::pins::Pin;
use super::table;
use super::writer::Output;
use super::{AttemptId, ResultsError};
use crate::database::Database;

/// What limb knows to stand under a name.
#[derive(Clone, Copy, Debug)]
pub(super) struct Owned {
    pub(super) ident: Ident,
    pub(super) kind: Kind,
    size: u64,
    mtime_ns: i64,
    pub(super) open: bool,
    /// This attempt's number for it.
    pub(super) file: Option<u64>,
}

impl From<&Written> for Owned {
    fn from(what: &Written) -> Self {
        let Written { ident, kind, size, mtime_ns, open, .. } = what;
        Self { ident: *ident, kind: *kind, size: *size, mtime_ns: *mtime_ns, open: *open, file: None }
    }
}

impl Owned {
    fn after(what: &Written, after: After) -> Self {
        Self { file: after.file(), ..Self::from(what) }
    }

    /// Is what stands there still what limb put there?
    pub(super) fn matches(&self, seen: &Seen) -> bool {
        let unchanged = match self.kind {
            Kind::File => self.open || (self.size == seen.size && self.mtime_ns == seen.mtime_ns),
            Kind::Directory | Kind::Symlink | Kind::Other => true,
        };
        self.ident == seen.ident && self.kind == seen.kind && unchanged
    }
}

/// Names as they are after the effects so far; what is not in it stands in the table.
#[derive(Debug)]
pub(super) struct Overlay {
    id: AttemptId,
    names: HashMap<(u32, Vec<u8>), Option<Owned>>,
    /// What the batch makes of files, whichever of their names it went by: a size (`None`: as it
    /// was) and an mtime.
    states: HashMap<Ident, Vec<(Option<u64>, i64)>>,
}

impl Overlay {
    pub(super) fn new(id: &AttemptId) -> Self {
        Self { id: id.clone(), names: HashMap::new(), states: HashMap::new() }
    }

    pub(super) fn put(&mut self, output: u32, path: &[u8], owned: Option<Owned>) {
        self.names.insert((output, path.to_vec()), owned);
    }

    /// A file gets this mtime (and size), under all its names; now, or in the life before.
    pub(super) fn changes(&mut self, ident: Ident, size: Option<u64>, mtime_ns: i64) {
        self.states.entry(ident).or_default().push((size, mtime_ns));
        for owned in self.names.values_mut().flatten().filter(|owned| owned.ident == ident) {
            owned.mtime_ns = mtime_ns;
            owned.size = size.unwrap_or(owned.size);
        }
    }

    /// Is what stands there still what limb put there?
    fn is_ours(&self, owned: &Owned, seen: &Seen) -> bool {
        let states = self.states.get(&seen.ident).map_or(&[][..], Vec::as_slice);
        let changed = |(size, mtime_ns): &(Option<u64>, i64)| Owned {
            size: size.unwrap_or(owned.size),
            mtime_ns: *mtime_ns,
            ..*owned
        };
        owned.matches(seen) || states.iter().any(|state| changed(state).matches(seen))
    }

    pub(super) fn id(&self) -> &AttemptId {
        &self.id
    }

    /// Has this batch given the file a name besides this one?
    pub(super) fn gives_other_name(&self, output: u32, path: &[u8], ident: Ident) -> bool {
        self.names.iter().any(|((number, name), owned)| {
            *number == output && name != path && owned.is_some_and(|owned| owned.ident == ident)
        })
    }

    /// As far as this batch knows.
    pub(super) fn known(&self, output: u32, path: &[u8]) -> Option<Option<Owned>> {
        self.names.get(&(output, path.to_vec())).copied()
    }

    pub(super) fn get(
        &self,
        database: &Database,
        output: &Output,
        path: &[u8],
    ) -> Result<Option<Owned>, ResultsError> {
        if let Some(known) = self.names.get(&(output.number, path.to_vec())) {
            return Ok(*known);
        }
        let (dest, path) = (output.dest.clone(), path.to_vec());
        let row = database.read_blocking(move |db| table::name(db, &dest, &path))?;
        Ok(row.map(|row| Owned { file: row.file_of(&self.id), ..Owned::from(&row.what) }))
    }
}

pub(super) struct Executor<'a> {
    pub(super) database: &'a Database,
    pub(super) disk: &'a Disk,
    pub(super) outputs: &'a BTreeMap<u32, Output>,
    pub(super) overlay: Overlay,
    pub(super) directories: Directories,
    /// What every private name of the attempt starts with.
    pub(super) prefix: String,
    pub(super) pinned: Vec<Pin>,
    pub(super) events: Vec<String>,
}

/// An effect either is there now, or the owner's file system said no.
type Done = Result<(), Refused>;

/// Why an effect has no effect.
pub(super) enum Refused {
    Because(Errno, String),
    Fatal(ResultsError),
}

impl From<DiskError> for Refused {
    fn from(error: DiskError) -> Self {
        match error {
            DiskError::Os(errno) => Self::Because(errno, String::new()),
            DiskError::Stopped => Self::Fatal(ResultsError::Stopped),
        }
    }
}

impl From<Errno> for Refused {
    fn from(errno: Errno) -> Self {
        Self::Because(errno, String::new())
    }
}

impl From<ResultsError> for Refused {
    fn from(error: ResultsError) -> Self {
        Self::Fatal(error)
    }
}

impl Executor<'_> {
    /// `Some` refusal: it did not happen and will not.
    pub(super) fn run(&mut self, intent: &Intent) -> Result<Option<Refusal>, ResultsError> {
        let Some(output) = self.outputs.get(&intent.output) else { return Ok(None) };
        match self.effect(output, &intent.effect) {
            Ok(()) => Ok(None),
            Err(Refused::Because(errno, detail)) => {
                let detail = if detail.is_empty() { errno.desc().to_owned() } else { detail };
                Ok(Some(Refusal { seq: intent.seq, errno: errno as i32, detail }))
            }
            Err(Refused::Fatal(error)) => Err(error),
        }
    }

    fn effect(&mut self, output: &Output, effect: &Effect) -> Done {
        match effect {
            Effect::Nothing | Effect::Refused { .. } | Effect::Created { .. } => Ok(()),
            Effect::Place { source, path, what, after, keeps_xattrs } => {
                self.place(output, source, (path, what, *after), *keeps_xattrs)
            }
            Effect::Settle { path, what, after } => {
                self.overlay.changes(what.ident, Some(what.size), what.mtime_ns);
                self.overlay.put(output.number, path, Some(Owned::after(what, *after)));
                Ok(())
            }
            Effect::Grow { part, path, from, what, after } => {
                self.grow(output, part, *from, (path, what, *after))
            }
            Effect::Rename { from, to, ident, no_replace, .. } => {
                self.rename(output, from, to, *ident, *no_replace)
            }
            Effect::Remove { path, ident, directory } => self.remove(output, path, *ident, *directory),
            Effect::Link { existing, path, ident } => self.link(output, existing, path, *ident),
            Effect::Attributes { path, ident, mode, mtime_ns } => {
                self.attributes(output, path, *ident, *mode, *mtime_ns)
            }
            Effect::Xattr { path, ident, name, value } => {
                let Some((_, _, file)) = self.open_own(output, path, *ident)? else { return Ok(()) };
                self.disk.set_xattr(&file, name, value.as_deref())?;
                Ok(self.disk.sync(&file)?)
            }
            Effect::Partial { source, path, ident, .. } => self.partial(output, source, path, *ident),
            Effect::Drop { part, .. } => match self.disk.unlink(output.limb.as_fd(), part) {
                Err(DiskError::Os(Errno::ENOENT)) => Ok(()),
                other => Ok(other?),
            },
        }
    }

    /// The directory that holds `path`, and the name in it.
    fn parent(
        &mut self,
        output: &Output,
        path: &[u8],
        make: bool,
    ) -> Result<(Arc<OwnedFd>, ResultPath), Refused> {
        let path = ResultPath::parse(path)?;
        let root = output.root.as_fd();
        let fd = self.directories.open(self.disk, output.number, root, path.parent(), make)?;
        self.directories.touch(output.number, path.parent());
        Ok((fd, path))
    }

    fn place(
        &mut self,
        output: &Output,
        source: &[u8],
        (path, what, after): (&[u8], &Written, After),
        keeps_xattrs: bool,
    ) -> Done {
        let waiting = look(&output.limb, source)?;
        if waiting.is_none_or(|seen| seen.ident != what.ident) {
            // It took the name in an earlier life.
            self.overlay.put(output.number, path, Some(Owned::after(what, after)));
            return Ok(());
        }
        let (parent, parsed) = self.parent(output, path, true)?;
        if what.kind == Kind::Directory
            && look(&parent, parsed.name())?.is_some_and(|seen| seen.kind == Kind::Directory)
        {
            // A directory that is there already is shared.
            self.disk.remove_directory(output.limb.as_fd(), source)?;
            return Ok(());
        }
        if look(&parent, parsed.name())?.is_some_and(|seen| seen.ident == what.ident) {
            // A part that lost one of its names and has another; rename(2) would leave both.
            self.disk.unlink(output.limb.as_fd(), source)?;
            self.overlay.put(output.number, path, Some(Owned::after(what, after)));
            return Ok(());
        }
        let over = self.make_room(output, &parent, &parsed, false, after.file())?;
        if keeps_xattrs && over == Over::Replace && what.kind == Kind::File {
            self.hand_on_xattrs((parent.as_fd(), &parsed), (output.limb.as_fd(), source))?;
        }
        self.disk.rename((output.limb.as_fd(), source), (parent.as_fd(), parsed.name()), over)?;
        self.overlay.put(output.number, path, Some(Owned::after(what, after)));
        Ok(())
    }

    /// A publish that replaces a file has its attributes from the first moment.
    fn hand_on_xattrs(&mut self, from: (BorrowedFd<'_>, &ResultPath), to: (BorrowedFd<'_>, &[u8])) -> Done {
        if look(from.0, from.1.name())?.is_none_or(|seen| seen.kind != Kind::File) {
            return Ok(());
        }
        let xattrs = user_xattrs(&open_in(from.0, from.1.name(), OFlag::O_RDONLY)?);
        if xattrs.is_empty() {
            return Ok(());
        }
        let file = open_in(to.0, to.1, OFlag::O_RDWR)?;
        for (name, value) in &xattrs {
            match self.disk.set_xattr(&file, name, Some(value)) {
                Ok(()) => {}
                Err(DiskError::Stopped) => return Err(DiskError::Stopped.into()),
                Err(DiskError::Os(errno)) => self.events.push(format!(
                    "{} lost an extended attribute: {}",
                    from.1.text(),
                    errno.desc()
                )),
            }
        }
        Ok(self.disk.sync(&file)?)
    }

    /// What stands under the name is limb's own (may be replaced) or is moved aside. `file` is the
    /// one that comes.
    fn make_room(
        &mut self,
        output: &Output,
        parent: &OwnedFd,
        path: &ResultPath,
        no_replace: bool,
        file: Option<u64>,
    ) -> Result<Over, Refused> {
        let Some(seen) = look(parent, path.name())? else { return Ok(Over::Keep) };
        let owned = self.overlay.get(self.database, output, path.as_bytes())?;
        let ours = owned.is_some_and(|owned| self.overlay.is_ours(&owned, &seen));
        if ours && no_replace {
            return Err(Errno::EEXIST.into());
        }
        if seen.kind == Kind::Directory {
            return if ours {
                Ok(Over::Replace)
            } else {
                Err(Refused::Because(Errno::EISDIR, "a directory of the owner has this name".to_owned()))
            };
        }
        if let Some(owned) = owned.filter(|_| ours) {
            self.pin(output, (parent.as_fd(), path), owned, file)?;
            return Ok(Over::Replace);
        }
        self.set_aside(parent, path)?;
        Ok(Over::Keep)
    }

    fn set_aside(&mut self, parent: &OwnedFd, path: &ResultPath) -> Done {
        let seconds = clock::unix_ms() / 1000;
        for turn in 1_u32.. {
            let ending =
                if turn == 1 { format!(".owner-{seconds}") } else { format!(".owner-{seconds}.{turn}") };
            let name = with_ending(path.name(), &ending);
            match self.disk.rename((parent.as_fd(), path.name()), (parent.as_fd(), &name), Over::Keep) {
                Err(DiskError::Os(Errno::EEXIST)) => {}
                Err(other) => return Err(other.into()),
                Ok(()) => {
                    let kept = path.with_name(&name).text();
                    self.events.push(format!(
                        "{} was not limb's (or was changed at home): kept as {kept}",
                        path.text()
                    ));
                    return Ok(());
                }
            }
        }
        Err(Errno::EEXIST.into())
    }

    fn grow(
        &mut self,
        output: &Output,
        part: &[u8],
        from: u64,
        (path, what, after): (&[u8], &Written, After),
    ) -> Done {
        self.overlay.changes(what.ident, Some(what.size), what.mtime_ns);
        let Some((parent, parsed, visible)) = self.open_own(output, path, what.ident)? else { return Ok(()) };
        let source = open_in(&output.limb, part, OFlag::O_RDONLY)?;
        let before = look_at_open(&visible)?;
        let append = || {
            self.disk.copy(&source, &visible, from, what.size)?;
            self.disk.set_len(&visible, what.size)?;
            self.disk.set_mode(&visible, file_mode(what.mode))?;
            self.disk.set_mtime(parent.as_fd(), parsed.name(), what.mtime_ns)?;
            self.disk.sync(&visible)
        };
        if let Err(error) = append() {
            if matches!(error, DiskError::Os(_)) && before.size == from {
                // Longer than it is known to be, it would be taken for the owner's.
                self.disk.set_len(&visible, from)?;
                self.disk.set_mtime(parent.as_fd(), parsed.name(), before.mtime_ns)?;
            }
            return Err(error.into());
        }
        self.overlay.put(output.number, path, Some(Owned::after(what, after)));
        Ok(())
    }

    /// Opens a name if it is still this file.
    fn open_own(
        &mut self,
        output: &Output,
        path: &[u8],
        ident: Ident,
    ) -> Result<Option<(Arc<OwnedFd>, ResultPath, File)>, Refused> {
        let (parent, parsed) = match self.parent(output, path, false) {
            Err(Refused::Because(Errno::ENOENT, _)) => return Ok(None),
            other => other?,
        };
        let Some(seen) = look(&parent, parsed.name())?.filter(|seen| seen.ident == ident) else {
            return Ok(None);
        };
        let flags = match seen.kind {
            Kind::File => OFlag::O_RDWR,
            Kind::Directory => OFlag::O_RDONLY | OFlag::O_DIRECTORY,
            Kind::Symlink | Kind::Other => return Ok(None),
        };
        let file = open_in(&parent, parsed.name(), flags)?;
        Ok(Some((parent, parsed, file)))
    }

    fn rename(&mut self, output: &Output, from: &[u8], to: &[u8], ident: Ident, no_replace: bool) -> Done {
        let owned = self.overlay.get(self.database, output, from)?;
        let source = match self.parent(output, from, false) {
            Err(Refused::Because(Errno::ENOENT, _)) => None,
            other => Some(other?),
        };
        let seen = match &source {
            Some((parent, path)) => look(parent, path.name())?.filter(|seen| seen.ident == ident),
            None => None,
        };
        if let (Some((parent, path)), Some(seen)) = (source, seen) {
            let (target, to_path) = self.parent(output, to, true)?;
            let there = look(&target, to_path.name())?;
            let over = if seen.kind == Kind::Directory {
                match there {
                    Some(there) if there.kind != Kind::Directory => return Err(Errno::ENOTDIR.into()),
                    Some(_) | None => self.make_room(output, &target, &to_path, no_replace, None)?,
                }
            } else if there.is_some_and(|there| there.kind == Kind::Directory) {
                return Err(Errno::EISDIR.into());
            } else {
                self.make_room(output, &target, &to_path, no_replace, None)?
            };
            self.disk.rename((parent.as_fd(), path.name()), (target.as_fd(), to_path.name()), over)?;
            if over == Over::Replace && there.is_some_and(|there| there.ident == ident) {
                // rename(2) leaves both names of one file.
                self.disk.unlink(parent.as_fd(), path.name())?;
            }
        }
        self.overlay.put(output.number, from, None);
        self.overlay.put(output.number, to, owned);
        Ok(())
    }

    fn remove(&mut self, output: &Output, path: &[u8], ident: Ident, directory: bool) -> Done {
        let (parent, parsed) = match self.parent(output, path, false) {
            Err(Refused::Because(Errno::ENOENT, _)) => return Ok(()),
            other => other?,
        };
        let there = look(&parent, parsed.name())?;
        if there.is_some_and(|seen| seen.ident == ident && (seen.kind == Kind::Directory) == directory) {
            if directory {
                self.disk.remove_directory(parent.as_fd(), parsed.name())?;
            } else {
                if let Some(owned) = self.overlay.get(self.database, output, path)? {
                    self.pin(output, (parent.as_fd(), &parsed), owned, None)?;
                }
                self.disk.unlink(parent.as_fd(), parsed.name())?;
            }
        }
        self.overlay.put(output.number, path, None);
        Ok(())
    }

    fn link(&mut self, output: &Output, existing: &[u8], path: &[u8], ident: Ident) -> Done {
        let owned = self.overlay.get(self.database, output, existing)?;
        let (from, from_path) = match self.parent(output, existing, false) {
            Err(Refused::Because(Errno::ENOENT, _)) => return Ok(()),
            other => other?,
        };
        let (to, to_path) = self.parent(output, path, true)?;
        let there = look(&to, to_path.name())?;
        let source = look(&from, from_path.name())?;
        let done = there.is_some_and(|seen| seen.ident == ident);
        if !done && source.is_some_and(|seen| seen.ident == ident) {
            self.make_room(output, &to, &to_path, true, None)?;
            self.disk.link((from.as_fd(), from_path.name()), (to.as_fd(), to_path.name()))?;
        }
        self.overlay.put(output.number, path, owned);
        Ok(())
    }

    fn attributes(
        &mut self,
        output: &Output,
        path: &[u8],
        ident: Ident,
        mode: Option<u32>,
        mtime_ns: Option<i64>,
    ) -> Done {
        if let Some(mtime_ns) = mtime_ns {
            self.overlay.changes(ident, None, mtime_ns);
        }
        let Some((parent, parsed, file)) = self.open_own(output, path, ident)? else { return Ok(()) };
        let directory = file.metadata().map_err(DiskError::from)?.is_dir();
        if let Some(mode) = mode {
            self.disk.set_mode(&file, if directory { directory_mode(mode) } else { file_mode(mode) })?;
        }
        if let Some(mtime_ns) = mtime_ns {
            self.disk.set_mtime(parent.as_fd(), parsed.name(), mtime_ns)?;
        }
        Ok(self.disk.sync(&file)?)
    }

    fn partial(&mut self, output: &Output, source: &Where, path: &[u8], ident: Ident) -> Done {
        let (parent, parsed) = self.parent(output, path, true)?;
        let (from, name) = match source {
            Where::Private(name) => (Arc::clone(&output.limb), name.clone()),
            Where::Visible(visible) => {
                let (fd, visible) = self.parent(output, visible, false)?;
                self.overlay.put(output.number, visible.as_bytes(), None);
                (fd, visible.name().to_vec())
            }
        };
        if look(&from, &name)?.is_some_and(|seen| seen.ident == ident) {
            self.disk.rename((from.as_fd(), &name), (parent.as_fd(), parsed.name()), Over::Keep)?;
        }
        Ok(())
    }
}

/// The job's bits, but never set-id, and never so that the owner cannot read or replace it.
pub(super) fn file_mode(mode: u32) -> u32 {
    mode & 0o777 | 0o600
}

pub(super) fn directory_mode(mode: u32) -> u32 {
    mode & 0o777 | 0o700
}
