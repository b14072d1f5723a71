//! A writer is read from disk and table: what an earlier life began is finished, what it left open
//! goes on.

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::os::fd::AsFd as _;
use std::sync::Arc;

use nix::errno::Errno;
use nix::fcntl::OFlag;

use super::disk::{Disk, DiskError, look_at_open, open_beneath, open_in, open_root};
use super::effect::Where;
use super::lifecycle::{bytes_path, make_dest};
use super::part::{Grown, Part};
use super::table::{self, FileState, OutputRow};
use super::writer::{LIMB_DIRECTORY, Output, Writer};
use super::{AttemptId, EventSink, ResultsError};
use crate::database::Database;

impl Output {
    fn open(row: OutputRow, disk: &Disk) -> Result<Self, ResultsError> {
        let path = bytes_path(&row.dest);
        let failed = |source| ResultsError::Destination { path: path.clone(), source };
        let root = match open_root(&path) {
            // The owner removed it: what still comes, or is kept, gets a new one.
            Err(Errno::ENOENT) => open_root(&bytes_path(&make_dest(&path)?)),
            other => other,
        }
        .map_err(failed)?;
        match disk.make_directory(root.as_fd(), LIMB_DIRECTORY, 0o700) {
            Ok(()) => disk.sync(&root)?,
            Err(DiskError::Os(Errno::EEXIST)) => {}
            Err(DiskError::Os(errno)) => return Err(failed(errno)),
            Err(DiskError::Stopped) => return Err(ResultsError::Stopped),
        }
        let limb = Arc::new(open_beneath(&root, LIMB_DIRECTORY).map_err(failed)?);
        Ok(Self {
            number: row.output,
            dest: row.dest,
            root,
            limb,
            lower: row.lower,
            quota_bytes: row.quota_bytes,
            quota_inodes: row.quota_inodes,
            used_bytes: 0,
            used_names: 0,
            part_bytes: 0,
            part_count: 0,
            new_parts: false,
        })
    }
}

impl Writer {
    /// Reads the attempt as it stands and finishes what an earlier life began.
    pub(super) fn load(
        database: &Database,
        disk: &Disk,
        events: &Arc<EventSink>,
        id: &AttemptId,
    ) -> Result<Self, ResultsError> {
        let wanted = id.clone();
        let (state, rows) = database.read_blocking(move |db| {
            Ok::<_, ResultsError>((table::attempt(db, &wanted)?, table::outputs(db, &wanted)?))
        })?;
        let (applied, ended) = state.ok_or(ResultsError::UnknownAttempt)?;
        if ended {
            return Err(ResultsError::Ended);
        }
        let mut outputs = BTreeMap::new();
        for row in rows {
            outputs.insert(row.output, Output::open(row, disk)?);
        }
        let mut writer = Self {
            id: id.clone(),
            database: database.clone(),
            disk: disk.clone(),
            events: Arc::clone(events),
            outputs,
            files: HashMap::new(),
            applied,
            pending: VecDeque::new(),
            unsynced: Vec::new(),
            unsynced_bytes: 0,
            pins: VecDeque::new(),
        };
        writer.load_pins();
        writer.redo()?;
        writer.load_files()?;
        writer.load_usage()?;
        Ok(writer)
    }

    fn redo(&mut self) -> Result<(), ResultsError> {
        let id = self.id.clone();
        let intents = self.database.read_blocking(move |db| table::intents(db, &id))?;
        if !intents.is_empty() {
            tracing::info!(count = intents.len(), "finishing results that an earlier life began");
            self.carry_out(&intents)?;
        }
        Ok(())
    }

    fn load_files(&mut self) -> Result<(), ResultsError> {
        let id = self.id.clone();
        let rows = self.database.read_blocking(move |db| {
            let mut rows = Vec::new();
            for (output, file, state, path) in table::open_files(db, &id)? {
                rows.push((output, file, state, path, table::name_of_file(db, &id, output, file)?));
            }
            Ok::<_, ResultsError>(rows)
        })?;
        for (output, file, state, path, name) in rows {
            let part_name = self.part_name(output, file);
            let Some(home) = self.outputs.get(&output) else { continue };
            let mut part = match (state, &name) {
                (FileState::InPlace, Some(name)) => {
                    let place = Where::Visible(name.path.clone());
                    let extent = home.find(&name.path).ok().flatten().map_or(0, |(_, _, seen)| seen.size);
                    Part::new(place, name.what.ident, path, extent)
                }
                _ => {
                    let flags = OFlag::O_RDWR | OFlag::O_CREAT;
                    let opened = open_in(&home.limb, &part_name, flags).map_err(ResultsError::Disk)?;
                    let seen = look_at_open(&opened).map_err(ResultsError::Disk)?;
                    Part::new(Where::Private(part_name), seen.ident, path, seen.size)
                }
            };
            if let (FileState::Grows, Some(name)) = (state, name) {
                let (ident, size) = (name.what.ident, name.what.size);
                part.grown = Some(Grown { path: name.path, ident, size, values: name.what.values });
                self.cut_back(home, &part)?;
            }
            self.files.insert((output, file), part);
        }
        Ok(())
    }

    /// A visible file that grew past what was committed is cut back to it.
    fn cut_back(&self, home: &Output, part: &Part) -> Result<(), ResultsError> {
        let Some(grown) = &part.grown else { return Ok(()) };
        let Ok(Some((parent, path, seen))) = home.find(&grown.path) else { return Ok(()) };
        if seen.ident == grown.ident && seen.size > grown.size {
            let file = open_in(&parent, path.name(), OFlag::O_RDWR).map_err(ResultsError::Disk)?;
            self.disk.set_len(&file, grown.size)?;
        }
        Ok(())
    }

    fn load_usage(&mut self) -> Result<(), ResultsError> {
        for output in self.outputs.values_mut() {
            let (run, dest) = (self.id.run.clone(), output.dest.clone());
            (output.used_bytes, output.used_names) =
                self.database.read_blocking(move |db| table::used(db, &run, &dest))?;
        }
        self.count_parts();
        Ok(())
    }
}
