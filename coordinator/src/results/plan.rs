//! From an entry to an effect: names checked, content proven, copies made in `.limb`. Nothing
//! that the owner sees changes here.

use std::fs::File;
use std::os::fd::AsFd as _;

use limb_common::chunk::CHUNK_BYTES_U64;
use nix::errno::Errno;
use nix::fcntl::OFlag;

use super::ResultsError;
use super::disk::{DiskError, Kind, MAX_XATTR_BYTES, Seen, look, look_at_open, open_in};
use super::effect::{After, Effect, Intent, Where, Written};
use super::entry::{Entry, Op, Publication, PublishKind};
use super::execute::{Overlay, Owned, directory_mode, file_mode};
use super::names::{ResultPath, target_stays_inside};
use super::part::{Grown, flatten, value_at};
use super::redo::Batch;
use super::writer::{Output, Writer, open_part};

/// Largest file that is copied for a snapshot where there are no clones: 64 MiB is a second on a
/// slow disk.
const COPY_BYTES: u64 = 64 * CHUNK_BYTES_U64;

/// No effect, for the file system's or the contract's reason.
pub(super) enum No {
    Because(Errno, &'static str),
    Fatal(ResultsError),
}

impl From<Errno> for No {
    fn from(errno: Errno) -> Self {
        Self::Because(errno, "")
    }
}

impl From<DiskError> for No {
    fn from(error: DiskError) -> Self {
        match error {
            DiskError::Os(errno) => errno.into(),
            DiskError::Stopped => Self::Fatal(ResultsError::Stopped),
        }
    }
}

impl From<ResultsError> for No {
    fn from(error: ResultsError) -> Self {
        Self::Fatal(error)
    }
}

pub(super) type Planned = Result<Effect, No>;

pub(super) fn settle(planned: Planned) -> Result<Effect, ResultsError> {
    match planned {
        Ok(effect) => Ok(effect),
        Err(No::Because(errno, "")) => Ok(Effect::refused(errno, errno.desc())),
        Err(No::Because(errno, detail)) => Ok(Effect::refused(errno, detail)),
        Err(No::Fatal(error)) => Err(error),
    }
}

pub(super) struct Planner<'a> {
    writer: &'a mut Writer,
    overlay: Overlay,
    batch: Batch,
    /// What must be on disk before the batch is recorded: (seq, open file).
    unsynced: Vec<(u64, File)>,
}

impl<'a> Planner<'a> {
    pub(super) fn new(writer: &'a mut Writer) -> Self {
        let overlay = Overlay::new(&writer.id);
        Self { writer, overlay, batch: Batch::default(), unsynced: Vec::new() }
    }

    /// Must this entry wait until those before it are committed?
    pub(super) fn must_wait(&self, entry: &Entry) -> bool {
        self.batch.refuses(entry, |path| match self.own(entry.output.0, path) {
            Ok(owned) => owned.map(|owned| owned.ident),
            // It will be refused, whenever.
            Err(_) => None,
        })
    }

    /// Takes note of an effect. `true`: nothing may follow in this batch.
    pub(super) fn ends_batch(&mut self, intent: &Intent) -> bool {
        self.batch.add(intent.output, &intent.effect)
    }

    /// Directories that move or go change what every path below means: such an entry is a batch
    /// of its own.
    pub(super) fn stands_alone(&self, entry: &Entry) -> Result<bool, ResultsError> {
        Ok(match &entry.op {
            Op::Removed { directory, .. } => *directory,
            Op::Renamed { from, .. } => match self.overlay.known(entry.output.0, from) {
                Some(known) => known.is_some_and(|owned| owned.kind == Kind::Directory),
                None => match self.writer.outputs.get(&entry.output.0).map(|home| home.find(from)) {
                    Some(Ok(Some((_, _, seen)))) => seen.kind == Kind::Directory,
                    Some(Ok(None) | Err(_)) | None => false,
                },
            },
            Op::Created { .. }
            | Op::Published(_)
            | Op::DirectoryMade { .. }
            | Op::SymlinkMade { .. }
            | Op::HardLinkMade { .. }
            | Op::AttributesSet { .. }
            | Op::XattrSet { .. }
            | Op::Abandoned { .. } => false,
        })
    }

    pub(super) fn effect(&mut self, entry: &Entry) -> Result<Effect, ResultsError> {
        let number = entry.output.0;
        if !self.writer.outputs.contains_key(&number) {
            return Ok(Effect::refused(Errno::EINVAL, "no such output"));
        }
        settle(match &entry.op {
            Op::Created { file, path, base, .. } => {
                return self.writer.create(number, *file, path, *base);
            }
            Op::Published(publication) => self.publish(entry.seq, number, publication),
            Op::Renamed { from, to, no_replace, exchange } => {
                self.rename(number, from, to, *no_replace, *exchange)
            }
            Op::Removed { path, directory } => self.remove(number, path, *directory),
            Op::DirectoryMade { path, mode } => self.directory(entry.seq, number, path, *mode),
            Op::SymlinkMade { path, target } => self.symlink(entry.seq, number, path, target),
            Op::HardLinkMade { existing, path } => self.hard_link(number, existing, path),
            Op::AttributesSet { path, mode, mtime_ns } => self.attributes(number, path, *mode, *mtime_ns),
            Op::XattrSet { path, name, value } => self.xattr(number, path, name, value.as_deref()),
            Op::Abandoned { file, keep, path, size } => {
                self.writer.abandon(number, *file, *keep, path, *size)
            }
        })
    }

    /// Everything that was prepared reaches the disk; what does not is refused.
    pub(super) fn make_durable(&mut self, batch: &mut [Intent]) -> Result<(), ResultsError> {
        let (seqs, files): (Vec<_>, Vec<_>) = self.unsynced.drain(..).unzip();
        for (seq, synced) in seqs.into_iter().zip(self.writer.disk.sync_all(&files)) {
            match synced {
                Ok(()) => {}
                Err(DiskError::Os(errno)) => {
                    if let Some(intent) = batch.iter_mut().find(|intent| intent.seq == seq) {
                        intent.effect = Effect::refused(errno, "could not be made durable");
                    }
                }
                Err(DiskError::Stopped) => return Err(ResultsError::Stopped),
            }
        }
        if !batch.iter().all(|intent| intent.effect.is_quiet()) {
            for output in self.writer.outputs.values() {
                // Names in `.limb` that the intents speak of.
                self.writer.disk.sync(&output.limb)?;
            }
        }
        Ok(())
    }

    /// As [`Writer::drop_pins`].
    pub(super) fn drop_pins(&mut self, output: u32) -> Result<bool, DiskError> {
        self.writer.drop_pins(output)
    }

    fn output(&self, number: u32) -> Result<&Output, No> {
        self.writer.outputs.get(&number).ok_or(No::Because(Errno::EINVAL, "no such output"))
    }

    /// What limb put under this name, if it is still that.
    fn own(&self, number: u32, path: &[u8]) -> Result<Option<Owned>, No> {
        ResultPath::parse(path)?;
        if let Some(known) = self.overlay.known(number, path) {
            return Ok(known);
        }
        let home = self.output(number)?;
        let Some((_, _, seen)) = home.find(path)? else { return Ok(None) };
        let owned = self.overlay.get(&self.writer.database, home, path)?;
        Ok(owned.filter(|owned| owned.matches(&seen)))
    }

    // ------------------------------------------------------------------ content

    fn publish(&mut self, seq: u64, number: u32, wanted: &Publication) -> Planned {
        let path = ResultPath::parse(&wanted.path)?;
        let (disk, key) = (self.writer.disk.clone(), (number, wanted.file));
        let home = self.writer.outputs.get(&number).ok_or(Errno::EINVAL)?;
        let part = self
            .writer
            .files
            .get_mut(&key)
            .ok_or(No::Because(Errno::ENOENT, "no such open file; was its FileCreated refused?"))?;
        let file = open_part(home, part)?;
        let values = part.prove(&disk, &file, wanted.size, wanted.root).map_err(|error| match error {
            DiskError::Os(Errno::EIO) => {
                No::Because(Errno::EIO, "the content at home does not have this hash")
            }
            other => other.into(),
        })?;
        let same_file = part.intended == wanted.path;
        let ready = Ready { seq, number, wanted, path, file, values: flatten(&values), same_file };
        let (place, grown) = (part.place.clone(), part.grown.clone());
        if let Some(grown) = grown
            && wanted.kind != PublishKind::Snapshot
            && let Where::Private(part) = &place
            && self.still_a_prefix(&ready, &grown)?
        {
            return self.grow(&ready, &grown, part);
        }
        let after = Self::after(wanted);
        match (wanted.kind, place) {
            (PublishKind::Final, Where::Private(name)) => self.place(ready, name, after, false),
            (PublishKind::Final | PublishKind::Snapshot, Where::Visible(visible))
                if visible == wanted.path =>
            {
                self.already_there(&ready, wanted.kind)
            }
            (PublishKind::Snapshot, Where::Private(name)) => match self.copy_of(&ready, Some(COPY_BYTES))? {
                Some(copy) => self.place_copy(ready, copy, after),
                None => self.place(ready, name, After::InPlace { file: wanted.file }, true),
            },
            (PublishKind::Grown, _) | (PublishKind::Final, Where::Visible(_)) => {
                let copy = self.copy_of(&ready, None)?.ok_or(Errno::EIO)?;
                self.place_copy(ready, copy, after)
            }
            (PublishKind::Snapshot, Where::Visible(_)) => {
                let copy = self.copy_of(&ready, None)?.ok_or(Errno::EIO)?;
                self.place_copy(ready, copy, After::NoFile)
            }
        }
    }

    fn after(wanted: &Publication) -> After {
        let file = wanted.file;
        match wanted.kind {
            PublishKind::Final => After::Final { file },
            PublishKind::Snapshot => After::PartStays { file },
            PublishKind::Grown => After::Grows { file },
        }
    }

    /// `.limb/NAME` is made ready and will take the name.
    fn place(&mut self, ready: Ready<'_>, name: Vec<u8>, after: After, open: bool) -> Planned {
        let disk = &self.writer.disk;
        let home = self.output(ready.number)?;
        disk.set_mode(&ready.file, file_mode(ready.wanted.mode))?;
        disk.set_mtime(home.limb.as_fd(), &name, ready.wanted.mtime_ns)?;
        let what = ready.written(look_at_open(&ready.file)?, open);
        self.overlay.put(ready.number, ready.path.as_bytes(), Some((&what).into()));
        let (path, keeps_xattrs) = (ready.path.as_bytes().to_vec(), ready.same_file);
        self.unsynced.push((ready.seq, ready.file));
        Ok(Effect::Place { source: name, path, what, after, keeps_xattrs })
    }

    fn place_copy(&mut self, ready: Ready<'_>, copy: File, after: After) -> Planned {
        let name = self.writer.prepared_name(ready.seq);
        self.place(Ready { file: copy, ..ready }, name, after, false)
    }

    /// The part is the visible file already.
    fn already_there(&mut self, ready: &Ready<'_>, kind: PublishKind) -> Planned {
        let home = self.output(ready.number)?;
        let (parent, path, _) = home.find(ready.path.as_bytes())?.ok_or(Errno::ENOENT)?;
        let disk = &self.writer.disk;
        disk.set_mode(&ready.file, file_mode(ready.wanted.mode))?;
        disk.set_mtime(parent.as_fd(), path.name(), ready.wanted.mtime_ns)?;
        let (open, after) = match kind {
            PublishKind::Final => (false, After::Final { file: ready.wanted.file }),
            PublishKind::Snapshot | PublishKind::Grown => (true, After::InPlace { file: ready.wanted.file }),
        };
        let what = ready.written(look_at_open(&ready.file)?, open);
        self.overlay.put(ready.number, ready.path.as_bytes(), Some((&what).into()));
        self.unsynced.push((ready.seq, ready.file.try_clone().map_err(DiskError::from)?));
        Ok(Effect::Settle { path: ready.path.as_bytes().to_vec(), what, after })
    }

    fn grow(&mut self, ready: &Ready<'_>, grown: &Grown, part: &[u8]) -> Planned {
        let seen = Seen {
            ident: grown.ident,
            kind: Kind::File,
            size: ready.wanted.size,
            mtime_ns: ready.wanted.mtime_ns,
            mode: ready.wanted.mode,
        };
        let what = ready.written(seen, false);
        self.overlay.put(ready.number, ready.path.as_bytes(), Some((&what).into()));
        // The part itself must be durable: the append may have to be done again from it.
        self.unsynced.push((ready.seq, ready.file.try_clone().map_err(DiskError::from)?));
        let after = match ready.wanted.kind {
            PublishKind::Final => After::Final { file: ready.wanted.file },
            PublishKind::Snapshot | PublishKind::Grown => After::Grows { file: ready.wanted.file },
        };
        let path = ready.path.as_bytes().to_vec();
        Ok(Effect::Grow { part: part.to_vec(), path, from: grown.size, what, after })
    }

    /// Is what is visible under this name (which may be another one of it) limb's own, and the
    /// beginning of what is to be visible?
    fn still_a_prefix(&self, ready: &Ready<'_>, grown: &Grown) -> Result<bool, No> {
        let size = ready.wanted.size;
        let owned = self.own(ready.number, &ready.wanted.path)?;
        if size < grown.size || owned.is_none_or(|owned| owned.ident != grown.ident) {
            return Ok(false);
        }
        let whole = grown.size / CHUNK_BYTES_U64;
        let tree = grown.size > CHUNK_BYTES_U64;
        if tree && (0..whole).any(|i| value_at(&grown.values, i) != value_at(&ready.values, i)) {
            return Ok(false);
        }
        let from = if tree { whole * CHUNK_BYTES_U64 } else { 0 };
        let len = usize::try_from(grown.size - from).unwrap_or(0);
        let home = self.output(ready.number)?;
        let Some((parent, path, seen)) = home.find(&ready.wanted.path)? else { return Ok(false) };
        if seen.ident != grown.ident {
            return Ok(false);
        }
        let visible = open_in(&parent, path.name(), OFlag::O_RDONLY)?;
        let (mut old, mut new) = (vec![0; len], vec![0; len]);
        read_exact(&visible, &mut old, from)?;
        read_exact(&ready.file, &mut new, from)?;
        Ok(old == new)
    }

    /// A clone of the part, or a copy where there are none and the file is not too large.
    fn copy_of(&self, ready: &Ready<'_>, limit: Option<u64>) -> Result<Option<File>, No> {
        let (disk, size) = (&self.writer.disk, ready.wanted.size);
        let home = self.output(ready.number)?;
        let name = self.writer.prepared_name(ready.seq);
        let copy = open_in(&home.limb, &name, OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_TRUNC)?;
        let result = if disk.try_clone(&ready.file, &copy)? {
            Ok(true)
        } else if limit.is_none_or(|limit| size <= limit) {
            disk.set_len(&copy, size).and_then(|()| disk.copy(&ready.file, &copy, 0, size)).map(|()| true)
        } else {
            Ok(false)
        };
        match result {
            Ok(true) => Ok(Some(copy)),
            Ok(false) | Err(DiskError::Os(_)) => {
                disk.unlink(home.limb.as_fd(), &name)?;
                result.map(|_| None).map_err(No::from)
            }
            Err(DiskError::Stopped) => Err(No::Fatal(ResultsError::Stopped)),
        }
    }

    // ------------------------------------------------------------------ names

    fn rename(&mut self, number: u32, from: &[u8], to: &[u8], no_replace: bool, exchange: bool) -> Planned {
        ResultPath::parse(to)?;
        if exchange {
            return Err(No::Because(Errno::EINVAL, "names are not exchanged at home"));
        }
        let owned =
            self.own(number, from)?.ok_or(No::Because(Errno::ENOENT, "limb has no such file at home"))?;
        let two_names_of_one = owned.kind != Kind::Directory
            && self.own(number, to)?.is_some_and(|there| there.ident == owned.ident);
        if from == to || two_names_of_one {
            return Ok(Effect::Nothing);
        }
        self.overlay.put(number, from, None);
        self.overlay.put(number, to, Some(owned));
        let directory = owned.kind == Kind::Directory;
        Ok(Effect::Rename { from: from.to_vec(), to: to.to_vec(), ident: owned.ident, directory, no_replace })
    }

    fn remove(&mut self, number: u32, path: &[u8], directory: bool) -> Planned {
        let Some(owned) = self.own(number, path)? else {
            if self.overlay.known(number, path).is_none() && self.output(number)?.find(path)?.is_some() {
                let text = String::from_utf8_lossy(path);
                self.writer
                    .event(format!("the job removed {text}, which is not limb's (any more): it stays"));
            }
            return Ok(Effect::Nothing);
        };
        match (directory, owned.kind) {
            (true, Kind::Directory) | (false, Kind::File | Kind::Symlink | Kind::Other) => {}
            (true, Kind::File | Kind::Symlink | Kind::Other) => return Err(Errno::ENOTDIR.into()),
            (false, Kind::Directory) => return Err(Errno::EISDIR.into()),
        }
        self.overlay.put(number, path, None);
        Ok(Effect::Remove { path: path.to_vec(), ident: owned.ident, directory })
    }

    fn directory(&mut self, seq: u64, number: u32, path: &[u8], mode: u32) -> Planned {
        if self.own(number, path)?.is_some_and(|owned| owned.kind == Kind::Directory) {
            return Ok(Effect::Nothing);
        }
        let name = self.new_name(seq, number)?;
        let (disk, home) = (&self.writer.disk, self.output(number)?);
        match disk.make_directory(home.limb.as_fd(), &name, 0o700) {
            Ok(()) | Err(DiskError::Os(Errno::EEXIST)) => {}
            Err(other) => return Err(other.into()),
        }
        let made = open_in(&home.limb, &name, OFlag::O_RDONLY | OFlag::O_DIRECTORY)?;
        disk.set_mode(&made, directory_mode(mode))?;
        let what = plain(look_at_open(&made)?, mode & 0o777, Vec::new());
        self.unsynced.push((seq, made));
        Ok(self.place_plain(number, name, path, what))
    }

    fn symlink(&mut self, seq: u64, number: u32, path: &[u8], target: &[u8]) -> Planned {
        if !target_stays_inside(&ResultPath::parse(path)?, target) {
            return Err(No::Because(Errno::EPERM, "the link leads out of the output"));
        }
        let name = self.new_name(seq, number)?;
        let (disk, home) = (&self.writer.disk, self.output(number)?);
        match disk.unlink(home.limb.as_fd(), &name) {
            Ok(()) | Err(DiskError::Os(Errno::ENOENT)) => {}
            Err(other) => return Err(other.into()),
        }
        disk.symlink(target, home.limb.as_fd(), &name)?;
        let seen = look(&home.limb, &name)?.ok_or(Errno::EIO)?;
        Ok(self.place_plain(number, name, path, plain(seen, 0o777, target.to_vec())))
    }

    fn place_plain(&mut self, number: u32, source: Vec<u8>, path: &[u8], what: Written) -> Effect {
        self.overlay.put(number, path, Some((&what).into()));
        Effect::Place { source, path: path.to_vec(), what, after: After::NoFile, keeps_xattrs: false }
    }

    /// One more name, if the quota has room.
    fn new_name(&self, seq: u64, number: u32) -> Result<Vec<u8>, No> {
        if self.output(number)?.names_full(1) {
            return Err(No::Because(Errno::EDQUOT, "the output's quota of files is used up"));
        }
        Ok(self.writer.prepared_name(seq))
    }

    fn hard_link(&mut self, number: u32, existing: &[u8], path: &[u8]) -> Planned {
        ResultPath::parse(path)?;
        self.new_name(0, number)?;
        let owned = self.own(number, existing)?.ok_or(Errno::ENOENT)?;
        if owned.kind == Kind::Directory {
            return Err(Errno::EPERM.into());
        }
        self.overlay.put(number, path, Some(owned));
        Ok(Effect::Link { existing: existing.to_vec(), path: path.to_vec(), ident: owned.ident })
    }

    fn attributes(&mut self, number: u32, path: &[u8], mode: Option<u32>, mtime_ns: Option<i64>) -> Planned {
        // The output's own directory is the owner's; an unpublished file brings its attributes
        // with its publish.
        if path.is_empty() {
            return Ok(Effect::Nothing);
        }
        let Some(owned) = self.own(number, path)? else { return Ok(Effect::Nothing) };
        if let Some(mtime_ns) = mtime_ns {
            self.overlay.put(number, path, Some(owned));
            self.overlay.changes(owned.ident, None, mtime_ns);
        }
        let mode = mode.map(|mode| mode & 0o777);
        Ok(Effect::Attributes { path: path.to_vec(), ident: owned.ident, mode, mtime_ns })
    }

    fn xattr(&mut self, number: u32, path: &[u8], name: &[u8], value: Option<&[u8]>) -> Planned {
        if !name.starts_with(b"user.") || name.len() > 255 || name.contains(&0) {
            return Err(No::Because(Errno::EPERM, "only user.* attributes are kept"));
        }
        if value.is_some_and(|value| value.len() > MAX_XATTR_BYTES) {
            return Err(Errno::E2BIG.into());
        }
        let owned = self.own(number, path)?.ok_or(Errno::ENOENT)?;
        let value = value.map(<[u8]>::to_vec);
        Ok(Effect::Xattr { path: path.to_vec(), ident: owned.ident, name: name.to_vec(), value })
    }
}

/// A proven content on its way to a name.
struct Ready<'a> {
    seq: u64,
    number: u32,
    wanted: &'a Publication,
    path: ResultPath,
    file: File,
    values: Vec<u8>,
    /// It was created for this name (or is an edit of what stands there).
    same_file: bool,
}

impl Ready<'_> {
    fn written(&self, seen: Seen, open: bool) -> Written {
        Written {
            ident: seen.ident,
            kind: Kind::File,
            size: self.wanted.size,
            mtime_ns: seen.mtime_ns,
            mode: self.wanted.mode & 0o777,
            root: Some(self.wanted.root.0),
            values: self.values.clone(),
            open,
        }
    }
}

/// A directory, or a link with its target.
fn plain(seen: Seen, mode: u32, target: Vec<u8>) -> Written {
    Written {
        ident: seen.ident,
        kind: seen.kind,
        size: target.len() as u64,
        mtime_ns: seen.mtime_ns,
        mode,
        root: None,
        values: target,
        open: false,
    }
}

fn read_exact(file: &File, buffer: &mut [u8], at: u64) -> Result<(), DiskError> {
    use std::os::unix::fs::FileExt as _;
    Ok(file.read_exact_at(buffer, at)?)
}
