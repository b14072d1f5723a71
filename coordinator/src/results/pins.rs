//! Bytes that lose their name at home while the box may still read them: files of the lower set
//! and files that this attempt published itself, when the journal replaces or removes them. Each
//! is linked into `.limb` just before, and goes with the attempt.
//!
//! Never: in the way of new results. All pins of an output together hold at most as much as is
//! still free beside them; the oldest go first, and all of them when the disk is full.
//!
//! A file that was published in place and goes on being written is linked as the part that it is.

use std::fs::File;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::MetadataExt as _;

use nix::fcntl::OFlag;

use super::ResultsError;
use super::disk::{DiskError, Ident, Kind, look, open_in};
use super::effect::Where;
use super::execute::{Executor, Owned, Refused};
use super::lifecycle::bytes_path;
use super::names::ResultPath;
use super::table;
use super::writer::{LIMB_DIRECTORY, Output, Writer};

const OLD: &str = ".old";
const LOWER: &str = ".lower";

/// A link in `.limb`.
#[derive(Clone, Debug)]
pub(super) struct Pin {
    output: u32,
    name: Vec<u8>,
    bytes: u64,
}

pub(super) fn part_name(prefix: &str, output: u32, file: u64) -> Vec<u8> {
    format!("{prefix}{output}-{file}.part").into_bytes()
}

/// Where a file that this attempt published is pinned.
pub(super) fn old_name(prefix: &str, output: u32, file: u64) -> Vec<u8> {
    format!("{prefix}{output}-{file}{OLD}").into_bytes()
}

/// Where a file of a lower set is pinned. While it is, nothing else can have its number.
pub(super) fn lower_name(prefix: &str, ident: Ident) -> Vec<u8> {
    format!("{prefix}{:x}-{:x}{LOWER}", ident.dev, ident.ino).into_bytes()
}

/// A pinned file and its size.
pub(super) fn open(home: &Output, name: &[u8]) -> Option<(File, u64)> {
    let file = open_in(&home.limb, name, OFlag::O_RDONLY).ok()?;
    let size = file.metadata().ok()?.len();
    Some((file, size))
}

impl Executor<'_> {
    /// Keeps what stands under a name that is about to be taken by `file`, or to go. A file system
    /// without links has no pins: then a late reader on the box gets EIO, never other bytes.
    pub(super) fn pin(
        &mut self,
        output: &Output,
        (parent, path): (BorrowedFd<'_>, &ResultPath),
        owned: Owned,
        file: Option<u64>,
    ) -> Result<(), Refused> {
        let at = (parent, path.name());
        let Some(seen) = look(at.0, at.1)?.filter(|seen| seen.kind == Kind::File) else { return Ok(()) };
        let counts = !owned.open;
        let name = match owned.file {
            Some(old) if file == Some(old) => return Ok(()),
            Some(old) if owned.open => part_name(&self.prefix, output.number, old),
            // Late readers find the bytes by that one, and the owner counts no link that is not his.
            Some(_) if self.has_other_name(output, path.as_bytes(), seen.ident)? => return Ok(()),
            Some(old) => old_name(&self.prefix, output.number, old),
            None if self.is_lower(output, seen.ident)? => lower_name(&self.prefix, seen.ident),
            None => return Ok(()),
        };
        if let Some(there) = look(&output.limb, &name)? {
            if there.ident == seen.ident {
                return Ok(());
            }
            self.disk.unlink(output.limb.as_fd(), &name)?;
        }
        match self.disk.link(at, (output.limb.as_fd(), &name)) {
            Ok(()) if counts => self.pinned.push(Pin { output: output.number, name, bytes: seen.size }),
            Ok(()) => {}
            Err(DiskError::Stopped) => return Err(DiskError::Stopped.into()),
            Err(DiskError::Os(errno)) => tracing::debug!(%errno, "bytes lose their name without a pin"),
        }
        Ok(())
    }

    /// Does a file of this attempt keep another of its names, as far as this batch knows?
    fn has_other_name(&self, output: &Output, path: &[u8], ident: Ident) -> Result<bool, ResultsError> {
        let (id, dest) = (self.overlay.id().clone(), output.dest.clone());
        let recorded = self.database.read_blocking(move |db| table::names_of_ident(db, &id, &dest, ident))?;
        let stands = |name: &[u8]| match self.overlay.known(output.number, name) {
            Some(known) => known.is_some_and(|owned| owned.ident == ident),
            None => true,
        };
        let recorded = recorded.iter().any(|name| name != path && stands(name));
        Ok(recorded || self.overlay.gives_other_name(output.number, path, ident))
    }

    fn is_lower(&self, output: &Output, ident: Ident) -> Result<bool, ResultsError> {
        let Some(manifest) = output.lower.clone() else { return Ok(false) };
        self.database.read_blocking(move |db| table::is_lower(db, &manifest, ident))
    }

    /// The links are durable before the names that they stand in for are gone.
    pub(super) fn sync_pins(&self) -> Result<(), ResultsError> {
        for output in self.outputs.values() {
            if self.pinned.iter().any(|pin| pin.output == output.number) {
                self.disk.sync(&output.limb)?;
            }
        }
        Ok(())
    }
}

impl Writer {
    /// Takes note of new pins, and lets old ones go where they hold too much.
    pub(super) fn keep_pins(&mut self, new: Vec<Pin>) -> Result<(), ResultsError> {
        if new.is_empty() {
            return Ok(());
        }
        self.pins.extend(new);
        let room: Vec<(u32, u64)> =
            self.outputs.values().map(|output| (output.number, free_bytes(output))).collect();
        for (number, free) in room {
            let of_this = |pin: &&Pin| pin.output == number;
            let mut held: u64 = self.pins.iter().filter(of_this).map(|pin| pin.bytes).sum();
            while held > free {
                let Some(at) = self.pins.iter().position(|pin| pin.output == number) else { break };
                let Some(pin) = self.pins.remove(at) else { break };
                held = held.saturating_sub(pin.bytes);
                self.let_go(&pin)?;
            }
        }
        Ok(())
    }

    /// Makes room. `false`: there was nothing to let go.
    pub(super) fn drop_pins(&mut self, output: u32) -> Result<bool, DiskError> {
        let (gone, kept): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.pins).into_iter().partition(|pin| pin.output == output);
        self.pins = kept.into();
        gone.iter().try_for_each(|pin| self.let_go(pin))?;
        Ok(!gone.is_empty())
    }

    fn let_go(&self, pin: &Pin) -> Result<(), DiskError> {
        let Some(home) = self.outputs.get(&pin.output) else { return Ok(()) };
        match self.disk.unlink(home.limb.as_fd(), &pin.name) {
            Err(DiskError::Stopped) => Err(DiskError::Stopped),
            // Swept at the end of the attempt.
            Ok(()) | Err(DiskError::Os(_)) => Ok(()),
        }
    }

    /// Pins of an earlier life.
    pub(super) fn load_pins(&mut self) {
        let mut found = Vec::new();
        for home in self.outputs.values() {
            let entries = std::fs::read_dir(bytes_path(&home.dest).join(bytes_path(LIMB_DIRECTORY)));
            for entry in entries.into_iter().flatten().flatten() {
                let name = entry.file_name().into_vec();
                let ours = name.starts_with(self.prefix().as_bytes())
                    && (name.ends_with(OLD.as_bytes()) || name.ends_with(LOWER.as_bytes()));
                if let (true, Ok(stat)) = (ours, entry.metadata()) {
                    let pin = Pin { output: home.number, name, bytes: stat.len() };
                    found.push(((stat.ctime(), stat.ctime_nsec()), pin));
                }
            }
        }
        found.sort_by_key(|(changed, _)| *changed);
        self.pins = found.into_iter().map(|(_, pin)| pin).collect();
    }

    /// A file that was published in place lost its name to `other` (or to nobody): its part is the
    /// link that was made.
    pub(super) fn part_lost_its_name(&mut self, output: u32, path: &[u8], other: Option<Ident>) {
        let prefix = self.prefix();
        for ((number, file), part) in &mut self.files {
            let here = *number == output && part.place == Where::Visible(path.to_vec());
            if here && other != Some(part.ident) {
                part.place = Where::Private(part_name(&prefix, output, *file));
            }
        }
    }
}

/// What the owner's file system still has for everybody.
fn free_bytes(home: &Output) -> u64 {
    nix::sys::statvfs::fstatvfs(home.limb.as_fd())
        .map_or(0, |stat| stat.blocks_available().saturating_mul(stat.fragment_size()))
}
