//! One attempt's results: chunks into parts, entries into batches. Runs on blocking threads, one
//! call at a time.
//!
//! Invariant: nothing is pending between two calls of [`Writer::feed`]; a call that failed leaves
//! a writer that must be thrown away and loaded again (what is on disk and in the table decides).

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::fs::File;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use limb_common::chunk::{CHUNK_BYTES, CHUNK_BYTES_U64, Position, value_of};
use limb_common::clock;
use nix::errno::Errno;
use nix::fcntl::OFlag;

use super::disk::{Directories, Disk, DiskError, Seen, Step, look, look_at_open, open_beneath, open_in};
use super::effect::{After, Effect, Intent, Where};
use super::entry::{Acks, Chunk, ChunkName, Entry, Item, Op, Refusal};
use super::execute::{Executor, Overlay};
use super::names::ResultPath;
use super::part::{Grown, Part, Stored};
use super::pins::{Pin, part_name};
use super::plan::Planner;
use super::table::{self, FileState};
use super::{AttemptId, EventSink, ResultEvent, ResultsError};
use crate::database::Database;

/// Entries that share one commit: enough that the two commits of a batch cost nothing per file,
/// few enough that an fsync behind them waits for less than a second.
const BATCH_ENTRIES: usize = 256;
/// Chunk bytes that share one fdatasync.
const SYNC_BYTES: u64 = 64 * CHUNK_BYTES_U64;
/// The box keeps the quota to the byte, as a file system does. Home has the old version of a file
/// beside its new part, so an honest job may need twice as much here; more is refused.
const OLD_AND_NEW: u64 = 2;
/// A file index beyond this would overflow offsets (2^62 bytes).
const MAX_INDEX: u64 = 1 << 42;
pub(super) const LIMB_DIRECTORY: &[u8] = b".limb";

/// An output of the attempt, opened.
#[derive(Debug)]
pub(super) struct Output {
    pub(super) number: u32,
    pub(super) dest: Vec<u8>,
    pub(super) root: OwnedFd,
    pub(super) limb: Arc<OwnedFd>,
    pub(super) lower: Option<Vec<u8>>,
    pub(super) quota_bytes: Option<u64>,
    pub(super) quota_inodes: Option<u64>,
    /// Published by this run under this destination.
    pub(super) used_bytes: u64,
    pub(super) used_names: u64,
    /// In parts that are not published yet.
    pub(super) part_bytes: u64,
    pub(super) part_count: u64,
    /// Parts were made whose names in `.limb` are not durable yet.
    pub(super) new_parts: bool,
}

impl Output {
    /// Would this many more names be too many?
    pub(super) fn names_full(&self, more: u64) -> bool {
        let all = self.used_names + self.part_count + more;
        self.quota_inodes.is_some_and(|quota| all > quota.saturating_mul(OLD_AND_NEW))
    }

    /// Would this many more bytes be too many?
    pub(super) fn bytes_full(&self, more: u64) -> bool {
        let all = self.used_bytes + self.part_bytes + more;
        self.quota_bytes.is_some_and(|quota| all > quota.saturating_mul(OLD_AND_NEW))
    }

    /// Opens a visible path if it is there: its directory, and what it is.
    pub(super) fn find(&self, path: &[u8]) -> Result<Option<(OwnedFd, ResultPath, Seen)>, Errno> {
        let path = ResultPath::parse(path)?;
        let parent = match open_beneath(&self.root, path.parent()) {
            Err(Errno::ENOENT | Errno::ENOTDIR) => return Ok(None),
            other => other?,
        };
        Ok(look(&parent, path.name())?.map(|seen| (parent, path, seen)))
    }
}

pub(super) struct Writer {
    pub(super) id: AttemptId,
    pub(super) database: Database,
    pub(super) disk: Disk,
    pub(super) events: Arc<EventSink>,
    pub(super) outputs: BTreeMap<u32, Output>,
    pub(super) files: HashMap<(u32, u64), Part>,
    pub(super) applied: u64,
    pub(super) pending: VecDeque<Pending>,
    pub(super) unsynced: Vec<ChunkName>,
    pub(super) unsynced_bytes: u64,
    /// Oldest first.
    pub(super) pins: VecDeque<Pin>,
}

/// An entry that waits for its batch.
pub(super) enum Pending {
    /// Its effect is known: the part was made at once, so that chunks can follow.
    Ready(Intent),
    Entry(Entry),
}

impl Pending {
    fn seq(&self) -> u64 {
        match self {
            Self::Ready(intent) => intent.seq,
            Self::Entry(entry) => entry.seq,
        }
    }

    /// Does it take the file's content as it is now?
    fn fixes(&self, output: u32, file: u64) -> bool {
        match self {
            Self::Ready(_) => false,
            Self::Entry(entry) => {
                let named = match &entry.op {
                    Op::Published(publication) => publication.file,
                    Op::Abandoned { file, .. } => *file,
                    Op::Created { .. }
                    | Op::Renamed { .. }
                    | Op::Removed { .. }
                    | Op::DirectoryMade { .. }
                    | Op::SymlinkMade { .. }
                    | Op::HardLinkMade { .. }
                    | Op::AttributesSet { .. }
                    | Op::XattrSet { .. } => return false,
                };
                entry.output.0 == output && named == file
            }
        }
    }
}

impl Writer {
    /// Where the journal stands, and everything that was refused so far.
    pub(super) fn standing(&mut self) -> Result<Acks, ResultsError> {
        let id = self.id.clone();
        let refused = self.database.read_blocking(move |db| table::refusals(db, &id))?;
        Ok(Acks { durable_seq: self.applied, refused, ..Acks::default() })
    }

    pub(super) fn feed(&mut self, items: Vec<Item>, sync: bool) -> Result<Acks, ResultsError> {
        let mut acks = Acks::default();
        for item in items {
            match item {
                Item::Chunk(chunk) => self.chunk(&chunk, &mut acks)?,
                Item::Entry(entry) => self.enqueue(entry, &mut acks)?,
            }
        }
        self.apply(&mut acks)?;
        if sync || self.unsynced_bytes >= SYNC_BYTES {
            self.sync(&mut acks)?;
        }
        acks.durable_seq = self.applied;
        Ok(acks)
    }

    pub(super) fn event(&self, text: String) {
        (self.events)(ResultEvent { run: self.id.run.clone(), attempt: self.id.attempt, text });
    }

    // ------------------------------------------------------------------ chunks

    fn chunk(&mut self, chunk: &Chunk, acks: &mut Acks) -> Result<(), ResultsError> {
        let ChunkName { output, file, index, .. } = chunk.id;
        if chunk.bytes.is_empty() || chunk.bytes.len() > CHUNK_BYTES || index >= MAX_INDEX {
            return Err(ResultsError::Protocol("a chunk is empty, too large or too far out"));
        }
        if value_of(Position::Subtree { index }, &chunk.bytes) != chunk.value {
            return Err(ResultsError::Protocol("a chunk does not have the hash that was sent with it"));
        }
        if self.pending.iter().any(|pending| pending.fixes(output.0, file)) {
            self.apply(acks)?;
        }
        let mut stored = self.store(chunk);
        while let Err(DiskError::Os(errno)) = stored
            && lacks_room(errno)
            && self.more_room(output.0, errno, acks)?
        {
            stored = self.store(chunk);
        }
        match stored {
            Ok(Taken::Written) => {
                self.unsynced.push(chunk.id);
                self.unsynced_bytes += chunk.bytes.len() as u64;
            }
            Ok(Taken::NotNeeded) => acks.chunks.push(chunk.id),
            Err(DiskError::Os(errno)) => {
                if let Some(part) = self.files.get_mut(&(output.0, file)) {
                    part.failed.insert(index, errno);
                }
                acks.chunks_refused.push((chunk.id, errno as i32));
            }
            Err(DiskError::Stopped) => return Err(ResultsError::Stopped),
        }
        Ok(())
    }

    /// What waits may give room: a part that goes, a name that is replaced. The box sent it first
    /// and counts on it. After that pins are worth less than results. `false`: that was all.
    fn more_room(&mut self, output: u32, errno: Errno, acks: &mut Acks) -> Result<bool, ResultsError> {
        if !self.pending.is_empty() {
            self.apply(acks)?;
            return Ok(true);
        }
        Ok(errno == Errno::ENOSPC && self.drop_pins(output)?)
    }

    fn store(&mut self, chunk: &Chunk) -> Result<Taken, DiskError> {
        let ChunkName { output, file, index, generation } = chunk.id;
        let key = (output.0, file);
        let Some(part) = self.files.get_mut(&key) else {
            let id = self.id.clone();
            let state = self.database.read_blocking(move |db| table::file_state(db, &id, key.0, key.1));
            return match state {
                Ok(Some((FileState::Final | FileState::Abandoned, _))) => Ok(Taken::NotNeeded),
                Ok(Some(_) | None) => Err(Errno::ENOENT.into()),
                Err(_) => Err(Errno::EIO.into()),
            };
        };
        let Some(home) = self.outputs.get_mut(&key.0) else { return Err(Errno::EINVAL.into()) };
        if part.chunks.get(&index).is_some_and(|known| known.generation > generation) {
            return Ok(Taken::NotNeeded);
        }
        let len = u32::try_from(chunk.bytes.len()).unwrap_or(u32::MAX);
        let end = index * CHUNK_BYTES_U64 + u64::from(len);
        let growth = end.saturating_sub(part.extent);
        if growth > 0 && home.bytes_full(growth) {
            return Err(Errno::EDQUOT.into());
        }
        let opened = open_part(home, part)?;
        let whole = (index == 0).then(|| value_of(Position::Whole, &chunk.bytes));
        let stored = Stored { generation, len, value: chunk.value, whole };
        part.write(&self.disk, &opened, index, &chunk.bytes, stored)?;
        home.part_bytes += growth;
        Ok(Taken::Written)
    }

    /// Makes the chunks that were written durable.
    fn sync(&mut self, acks: &mut Acks) -> Result<(), ResultsError> {
        let keys: BTreeSet<_> = self.unsynced.iter().map(|name| (name.output.0, name.file)).collect();
        let mut failed = HashMap::new();
        for key in keys {
            let Some((home, part)) = self.outputs.get(&key.0).zip(self.files.get(&key)) else { continue };
            match open_part(home, part).map_err(DiskError::from).and_then(|file| self.disk.sync_data(&file)) {
                Ok(()) => {}
                Err(DiskError::Os(errno)) => drop(failed.insert(key, errno)),
                Err(DiskError::Stopped) => return Err(ResultsError::Stopped),
            }
        }
        for home in self.outputs.values_mut().filter(|home| home.new_parts) {
            // Bytes without a name would be lost with the power all the same.
            self.disk.sync(&home.limb)?;
            home.new_parts = false;
        }
        self.unsynced_bytes = 0;
        for name in std::mem::take(&mut self.unsynced) {
            let key = (name.output.0, name.file);
            match failed.get(&key) {
                None => acks.chunks.push(name),
                Some(errno) => {
                    if let Some(part) = self.files.get_mut(&key) {
                        part.chunks.remove(&name.index);
                        part.failed.insert(name.index, *errno);
                    }
                    acks.chunks_refused.push((name, *errno as i32));
                }
            }
        }
        Ok(())
    }

    // ------------------------------------------------------------------ entries

    fn enqueue(&mut self, entry: Entry, acks: &mut Acks) -> Result<(), ResultsError> {
        let next = self.pending.back().map_or(self.applied, Pending::seq) + 1;
        if entry.seq < next {
            return Ok(());
        }
        if entry.seq > next {
            return Err(ResultsError::Protocol("a journal entry is missing before this one"));
        }
        let pending = match &entry.op {
            Op::Created { file, path, base, .. } => {
                if *base != super::Base::Nothing {
                    self.apply(acks)?;
                }
                let mut effect = self.create(entry.output.0, *file, path, *base)?;
                while let Some(errno) = effect.lacks_room()
                    && self.more_room(entry.output.0, errno, acks)?
                {
                    effect = self.create(entry.output.0, *file, path, *base)?;
                }
                Pending::Ready(Intent { seq: entry.seq, output: entry.output.0, effect })
            }
            Op::Published(_)
            | Op::Renamed { .. }
            | Op::Removed { .. }
            | Op::DirectoryMade { .. }
            | Op::SymlinkMade { .. }
            | Op::HardLinkMade { .. }
            | Op::AttributesSet { .. }
            | Op::XattrSet { .. }
            | Op::Abandoned { .. } => Pending::Entry(entry),
        };
        self.pending.push_back(pending);
        if self.pending.len() >= BATCH_ENTRIES {
            self.apply(acks)?;
        }
        Ok(())
    }

    /// Applies everything that waits.
    fn apply(&mut self, acks: &mut Acks) -> Result<(), ResultsError> {
        while !self.pending.is_empty() {
            let batch = self.plan()?;
            self.commit(&batch, acks)?;
        }
        Ok(())
    }

    /// Takes entries off the queue as long as each can be planned without the effects of those
    /// before it having happened.
    fn plan(&mut self) -> Result<Vec<Intent>, ResultsError> {
        let mut queue = std::mem::take(&mut self.pending);
        let mut planner = Planner::new(self);
        let mut batch: Vec<Intent> = Vec::new();
        while let Some(next) = queue.front() {
            let alone = match next {
                Pending::Ready(_) => false,
                Pending::Entry(entry) => planner.stands_alone(entry)?,
            };
            let again = match next {
                Pending::Ready(_) => false,
                Pending::Entry(_) => batch.iter().any(|done| {
                    done.effect.file().is_some_and(|file| {
                        !matches!(done.effect, Effect::Created { .. }) && next.fixes(done.output, file)
                    })
                }),
            };
            let waits = match next {
                Pending::Ready(_) => false,
                Pending::Entry(entry) => planner.must_wait(entry),
            };
            if (alone || again || waits) && !batch.is_empty() {
                break;
            }
            let intent = match queue.pop_front() {
                Some(Pending::Ready(intent)) => intent,
                Some(Pending::Entry(entry)) => {
                    let mut effect = planner.effect(&entry)?;
                    if let Some(errno) = effect.lacks_room() {
                        if batch.iter().any(|done| !done.effect.is_quiet()) {
                            // Those before it may give room once they are done.
                            queue.push_front(Pending::Entry(entry));
                            break;
                        }
                        if errno == Errno::ENOSPC && planner.drop_pins(entry.output.0)? {
                            effect = planner.effect(&entry)?;
                        }
                    }
                    Intent { seq: entry.seq, output: entry.output.0, effect }
                }
                None => break,
            };
            let last = planner.ends_batch(&intent);
            batch.push(intent);
            if alone || last {
                break;
            }
        }
        planner.make_durable(&mut batch)?;
        self.pending = queue;
        Ok(batch)
    }

    fn commit(&mut self, batch: &[Intent], acks: &mut Acks) -> Result<(), ResultsError> {
        if batch.iter().any(|intent| !intent.effect.is_quiet()) {
            let (id, intents, disk) = (self.id.clone(), batch.to_vec(), self.disk.clone());
            self.database.write_blocking(move |db| {
                table::put_intents(db, &id, &intents)?;
                Ok::<_, ResultsError>(disk.step(Step::Commit)?)
            })?;
        }
        let refused = self.carry_out(batch)?;
        acks.refused.extend(refused);
        // What went with its file (published or dropped) needs no sync of its own.
        let (still, gone): (Vec<_>, Vec<_>) = std::mem::take(&mut self.unsynced)
            .into_iter()
            .partition(|name| self.files.contains_key(&(name.output.0, name.file)));
        self.unsynced = still;
        acks.chunks.extend(gone);
        Ok(())
    }

    /// Something that home decided, not the box: journaled all the same.
    pub(super) fn commit_own(&mut self, intent: Intent) -> Result<(), ResultsError> {
        self.commit(&[intent], &mut Acks::default())
    }

    /// Effects, directories, outcome. Also what recovery does with the intents it finds.
    pub(super) fn carry_out(&mut self, batch: &[Intent]) -> Result<Vec<Refusal>, ResultsError> {
        let mut executor = Executor {
            database: &self.database,
            disk: &self.disk,
            outputs: &self.outputs,
            overlay: Overlay::new(&self.id),
            directories: Directories::default(),
            prefix: self.prefix(),
            pinned: Vec::new(),
            events: Vec::new(),
        };
        let mut outcomes = Vec::with_capacity(batch.len());
        for intent in batch {
            outcomes.push(executor.run(intent)?);
        }
        executor.sync_pins()?;
        executor.directories.sync(&self.disk)?;
        let (events, pinned) = (std::mem::take(&mut executor.events), std::mem::take(&mut executor.pinned));
        let applied = batch.last().map_or(self.applied, |intent| intent.seq);
        let dests: HashMap<u32, Vec<u8>> =
            self.outputs.iter().map(|(number, output)| (*number, output.dest.clone())).collect();
        let (id, intents, disk, refused) =
            (self.id.clone(), batch.to_vec(), self.disk.clone(), outcomes.clone());
        let now = clock::unix_ms();
        let deltas = self.database.write_blocking(move |db| {
            let mut deltas = Vec::with_capacity(intents.len());
            for (intent, refused) in intents.iter().zip(&refused) {
                let dest = dests.get(&intent.output).map_or(&[][..], Vec::as_slice);
                deltas.push((intent.output, table::record(db, &id, dest, intent, refused.as_ref(), now)?));
            }
            table::finish_batch(db, &id, applied)?;
            disk.step(Step::Commit)?;
            Ok::<_, ResultsError>(deltas)
        })?;
        self.applied = self.applied.max(applied);
        for (output, delta) in deltas {
            if let Some(output) = self.outputs.get_mut(&output) {
                output.used_bytes = output.used_bytes.saturating_add_signed(delta.bytes);
                output.used_names = output.used_names.saturating_add_signed(delta.names);
            }
        }
        events.into_iter().for_each(|text| self.event(text));
        let mut refusals = Vec::new();
        for (intent, outcome) in batch.iter().zip(outcomes) {
            match (outcome, &intent.effect) {
                (Some(refusal), _) => refusals.push(refusal),
                (None, Effect::Refused { errno, detail }) => {
                    refusals.push(Refusal { seq: intent.seq, errno: *errno, detail: detail.clone() });
                }
                (None, effect) => self.settle(intent.output, effect)?,
            }
        }
        self.count_parts();
        self.keep_pins(pinned)?;
        Ok(refusals)
    }

    /// What is in memory follows what is on disk.
    fn settle(&mut self, output: u32, effect: &Effect) -> Result<(), ResultsError> {
        match effect {
            Effect::Place { path, what, after, .. }
            | Effect::Settle { path, what, after }
            | Effect::Grow { path, what, after, .. } => {
                self.part_lost_its_name(output, path, Some(what.ident));
                match *after {
                    After::NoFile => {}
                    After::Final { file } => {
                        self.files.remove(&(output, file));
                        self.unlink_part(output, file)?;
                    }
                    After::PartStays { file } => {
                        if let Some(part) = self.files.get_mut(&(output, file)) {
                            part.grown = None;
                        }
                    }
                    After::InPlace { file } => {
                        if let Some(part) = self.files.get_mut(&(output, file)) {
                            part.place = Where::Visible(path.clone());
                        }
                    }
                    After::Grows { file } => {
                        if let Some(part) = self.files.get_mut(&(output, file)) {
                            let (ident, size, values) = (what.ident, what.size, what.values.clone());
                            part.grown = Some(Grown { path: path.clone(), ident, size, values });
                        }
                    }
                }
            }
            Effect::Rename { from, to, ident, .. } => {
                self.part_lost_its_name(output, to, Some(*ident));
                let (Ok(from), Ok(to)) = (ResultPath::parse(from), ResultPath::parse(to)) else {
                    return Ok(());
                };
                for ((number, _), part) in &mut self.files {
                    if *number != output {
                        continue;
                    }
                    if let Some(moved) = table::moved(&part.intended, &from, &to) {
                        part.intended = moved;
                    }
                    if let Where::Visible(path) = &mut part.place
                        && let Some(moved) = table::moved(path, &from, &to)
                    {
                        *path = moved;
                    }
                    if let Some(grown) = &mut part.grown
                        && let Some(moved) = table::moved(&grown.path, &from, &to)
                    {
                        grown.path = moved;
                    }
                }
            }
            Effect::Partial { file, .. } | Effect::Drop { file, .. } => {
                self.files.remove(&(output, *file));
            }
            Effect::Remove { path, .. } => self.part_lost_its_name(output, path, None),
            Effect::Nothing
            | Effect::Refused { .. }
            | Effect::Created { .. }
            | Effect::Link { .. }
            | Effect::Attributes { .. }
            | Effect::Xattr { .. } => {}
        }
        Ok(())
    }

    /// A part that a copy stood in for.
    fn unlink_part(&self, output: u32, file: u64) -> Result<(), ResultsError> {
        let Some(home) = self.outputs.get(&output) else { return Ok(()) };
        match self.disk.unlink(home.limb.as_fd(), &self.part_name(output, file)) {
            Err(DiskError::Stopped) => Err(ResultsError::Stopped),
            // Swept at the end of the attempt.
            Ok(()) | Err(DiskError::Os(_)) => Ok(()),
        }
    }

    pub(super) fn count_parts(&mut self) {
        for output in self.outputs.values_mut() {
            (output.part_bytes, output.part_count) = (0, 0);
        }
        for ((number, _), part) in &self.files {
            if let (Some(output), Where::Private(_)) = (self.outputs.get_mut(number), &part.place) {
                output.part_bytes += part.extent;
                output.part_count += 1;
            }
        }
    }

    // ------------------------------------------------------------------ names and loading

    /// What every private name of this attempt starts with.
    pub(super) fn prefix(&self) -> String {
        format!("{}-{}-", self.id.run, self.id.attempt)
    }

    pub(super) fn part_name(&self, output: u32, file: u64) -> Vec<u8> {
        part_name(&self.prefix(), output, file)
    }

    /// A private name for what an entry prepares.
    pub(super) fn prepared_name(&self, seq: u64) -> Vec<u8> {
        format!("{}{seq}.new", self.prefix()).into_bytes()
    }
}

/// Would it perhaps be done if something else went?
pub(super) fn lacks_room(errno: Errno) -> bool {
    matches!(errno, Errno::ENOSPC | Errno::EDQUOT)
}

enum Taken {
    Written,
    NotNeeded,
}

/// Opens a part wherever it lies; ENOENT when something else stands there.
pub(super) fn open_part(home: &Output, part: &Part) -> Result<File, Errno> {
    let file = match &part.place {
        Where::Private(name) => open_in(&home.limb, name, OFlag::O_RDWR)?,
        Where::Visible(path) => {
            let (parent, path, _) = home.find(path)?.ok_or(Errno::ENOENT)?;
            open_in(&parent, path.name(), OFlag::O_RDWR)?
        }
    };
    if look_at_open(&file)?.ident == part.ident { Ok(file) } else { Err(Errno::ENOENT) }
}
