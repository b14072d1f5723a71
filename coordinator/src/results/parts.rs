//! The beginning and the unpublished end of a part: made (from nothing or from a base), kept as
//! NAME.partial, or dropped.

use std::fs::File;
use std::os::fd::AsFd as _;

use limb_common::chunk::{CHUNK_BYTES_U64, chunk_len};
use limb_common::id::Digest;
use nix::errno::Errno;
use nix::fcntl::OFlag;

use super::ResultsError;
use super::disk::{Kind, look_at_open, open_in};
use super::effect::{Effect, Where};
use super::entry::Base;
use super::execute::Owned;
use super::names::{ResultPath, with_ending};
use super::part::{Part, Stored};
use super::plan::{No, Planned, settle};
use super::table;
use super::writer::{Output, Writer, open_part};

impl Writer {
    /// Makes a part at once: its chunks follow before its entry is committed.
    pub(super) fn create(
        &mut self,
        number: u32,
        file: u64,
        path: &[u8],
        base: Base,
    ) -> Result<Effect, ResultsError> {
        settle(self.try_create(number, file, path, base))
    }

    fn try_create(&mut self, number: u32, file: u64, path: &[u8], base: Base) -> Planned {
        ResultPath::parse(path)?;
        if self.files.contains_key(&(number, file)) {
            return Err(No::Because(Errno::EEXIST, "this file number was used before"));
        }
        let part_name = self.part_name(number, file);
        let home = self.outputs.get(&number).ok_or(No::Because(Errno::EINVAL, "no such output"))?;
        if home.names_full(1) {
            return Err(No::Because(Errno::EDQUOT, "the output's quota of files is used up"));
        }
        let base = match base {
            Base::Nothing => None,
            Base::File(other) => {
                let id = self.id.clone();
                let row =
                    self.database.read_blocking(move |db| table::name_of_file(db, &id, number, other))?;
                Some(row.ok_or(No::Because(Errno::ENOENT, "the base is not published"))?)
            }
            Base::Lower(inode) => Some(self.lower_name(home, inode)?),
        };
        let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_TRUNC;
        let opened = open_in(&home.limb, &part_name, flags)?;
        let ident = look_at_open(&opened)?.ident;
        let mut part = Part::new(Where::Private(part_name.clone()), ident, path.to_vec(), 0);
        if let Some(base) = base
            && let Err(no) = self.start_from(home, &opened, &base, &mut part)
        {
            self.disk.unlink(home.limb.as_fd(), &part_name)?;
            return Err(no);
        }
        if let Some(home) = self.outputs.get_mut(&number) {
            home.part_bytes += part.extent;
            home.part_count += 1;
            home.new_parts = true;
        }
        self.files.insert((number, file), part);
        Ok(Effect::Created { file, path: path.to_vec() })
    }

    fn lower_name(&self, home: &Output, inode: u64) -> Result<table::Name, No> {
        let (lower, dest) = (home.lower.clone(), home.dest.clone());
        let row = self.database.read_blocking(move |db| {
            let Some(manifest) = lower else { return Ok(None) };
            table::lower_name(db, &dest, &manifest, inode)
        })?;
        row.ok_or(No::Because(Errno::ENOENT, "the base is not here any more"))
    }

    /// The part begins with the base's bytes, by clone where the file system has them.
    fn start_from(
        &self,
        home: &Output,
        opened: &File,
        base: &table::Name,
        part: &mut Part,
    ) -> Result<(), No> {
        let gone = No::Because(Errno::ESTALE, "the base was changed or removed at home");
        let Some((parent, path, seen)) = home.find(&base.path)? else { return Err(gone) };
        if !Owned::from(&base.what).matches(&seen) || seen.kind != Kind::File {
            return Err(gone);
        }
        if home.bytes_full(seen.size) {
            return Err(No::Because(Errno::EDQUOT, "the output's quota of bytes is used up"));
        }
        let source = open_in(&parent, path.name(), OFlag::O_RDONLY)?;
        if !self.disk.try_clone(&source, opened)? {
            self.disk.set_len(opened, seen.size)?;
            self.disk.copy(&source, opened, 0, seen.size)?;
        }
        part.extent = seen.size;
        if seen.size > CHUNK_BYTES_U64 && !base.what.open {
            let values = base.what.values.chunks_exact(32).zip(0..);
            part.chunks = values
                .filter_map(|(raw, index)| {
                    let value = Digest(raw.try_into().ok()?);
                    let len = chunk_len(seen.size, index);
                    Some((index, Stored { generation: 0, len, value, whole: None }))
                })
                .collect();
        }
        Ok(())
    }

    /// What was not published goes, or stays beside the name it was meant to have.
    pub(super) fn abandon(&mut self, number: u32, file: u64, keep: bool, path: &[u8], size: u64) -> Planned {
        let Some(part) = self.files.get(&(number, file)) else { return Ok(Effect::Nothing) };
        let part_name = self.part_name(number, file);
        let size = if keep { size.min(part.extent) } else { 0 };
        match &part.place {
            Where::Private(_) if size == 0 => Ok(Effect::Drop { file, part: part_name }),
            Where::Private(_) | Where::Visible(_) => {
                let path = if path.is_empty() { part.intended.clone() } else { path.to_vec() };
                self.keep_partial(number, file, &path, Some(size))
            }
        }
    }

    pub(super) fn partial_effect(&self, number: u32, file: u64) -> Result<Effect, ResultsError> {
        let Some(part) = self.files.get(&(number, file)) else { return Ok(Effect::Nothing) };
        if part.extent == 0 {
            return Ok(Effect::Drop { file, part: self.part_name(number, file) });
        }
        settle(self.keep_partial(number, file, &part.intended.clone(), None))
    }

    fn keep_partial(&self, number: u32, file: u64, path: &[u8], size: Option<u64>) -> Planned {
        let (Some(home), Some(part)) = (self.outputs.get(&number), self.files.get(&(number, file))) else {
            return Ok(Effect::Nothing);
        };
        let opened = match open_part(home, part) {
            // Published in place and then removed or replaced: nothing is left to keep.
            Err(Errno::ENOENT) if part.place != Where::Private(self.part_name(number, file)) => {
                return Ok(Effect::Drop { file, part: self.part_name(number, file) });
            }
            other => other?,
        };
        if let (Some(size), Where::Private(_)) = (size, &part.place) {
            self.disk.set_len(&opened, size)?;
        }
        self.disk.sync(&opened)?;
        let path = ResultPath::parse(path)?;
        let mut free = path.clone();
        for turn in 1_u32.. {
            let ending = if turn == 1 { ".partial".to_owned() } else { format!(".partial.{turn}") };
            free = path.with_name(&with_ending(path.name(), &ending));
            if home.find(free.as_bytes())?.is_none() {
                break;
            }
        }
        Ok(Effect::Partial {
            file,
            source: part.place.clone(),
            path: free.as_bytes().to_vec(),
            ident: part.ident,
        })
    }
}
