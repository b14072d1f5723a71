//! What readers do, each step on the mount and on the source directory alike. The source is the
//! judge of every byte; where SEEK_DATA and SEEK_HOLE must stop, the manifest is.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use limb_common::manifest::{ChunkRef, Manifest};
use memmap2::{Advice, MmapOptions};
use nix::fcntl::{PosixFadviseAdvice, posix_fadvise};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

/// Where in a file: around a chunk's border, or anywhere.
#[derive(Clone, Debug)]
pub(crate) enum Place {
    Border { chunk: u64, off: i64 },
    Anywhere(f64),
}

impl Place {
    fn in_file(&self, size: u64) -> u64 {
        match self {
            Self::Border { chunk, off } => (chunk * MIB).saturating_add_signed(*off),
            #[allow(
                clippy::cast_possible_truncation,
                clippy::cast_sign_loss,
                clippy::cast_precision_loss,
                reason = "anywhere is near enough"
            )]
            Self::Anywhere(share) => (size as f64 * share) as u64,
        }
    }
}

#[derive(Clone, Debug)]
pub(crate) enum Op {
    Read {
        at: Place,
        len: u64,
    },
    /// So many pieces in a row.
    Sequence {
        at: Place,
        piece: u64,
        count: u64,
    },
    Map {
        at: Place,
        len: u64,
        random: bool,
    },
    Seek {
        at: Place,
        data: bool,
    },
    Forget {
        at: Place,
        len: u64,
    },
    Advise {
        random: bool,
    },
    Duplicate,
    Close,
    Stat,
    List,
}

#[derive(Clone, Debug)]
pub(crate) struct Step {
    pub(crate) file: prop::sample::Index,
    pub(crate) op: Op,
}

fn place() -> impl Strategy<Value = Place> {
    prop_oneof![
        (0_u64..6, prop_oneof![-2_i64..=2, -4097_i64..=4097, Just(16384), Just(-16384)])
            .prop_map(|(chunk, off)| Place::Border { chunk, off }),
        (0.0..1.05).prop_map(Place::Anywhere),
    ]
}

fn len() -> impl Strategy<Value = u64> {
    prop_oneof![0_u64..3, 1_u64..9000, 1..3 * MIB]
}

pub(crate) fn step() -> impl Strategy<Value = Step> {
    let op = prop_oneof![
        8 => (place(), len()).prop_map(|(at, len)| Op::Read { at, len }),
        4 => (place(), prop_oneof![Just(4096), 1_u64..200_000, Just(MIB)], 1_u64..20)
            .prop_map(|(at, piece, count)| Op::Sequence { at, piece, count }),
        4 => (place(), 1..MIB, any::<bool>()).prop_map(|(at, len, random)| Op::Map { at, len, random }),
        3 => (place(), any::<bool>()).prop_map(|(at, data)| Op::Seek { at, data }),
        4 => (place(), len()).prop_map(|(at, len)| Op::Forget { at, len }),
        1 => any::<bool>().prop_map(|random| Op::Advise { random }),
        2 => Just(Op::Duplicate),
        2 => Just(Op::Close),
        1 => Just(Op::Stat),
        1 => Just(Op::List),
    ];
    (any::<prop::sample::Index>(), op).prop_map(|(file, op)| Step { file, op })
}

/// Both trees, and what can never be read of the mounted one.
pub(crate) struct World<'a> {
    pub(crate) mounted: &'a Path,
    pub(crate) source: &'a Path,
    pub(crate) manifest: &'a Manifest,
    pub(crate) paths: &'a [PathBuf],
    /// File and chunk. Hard links of such a file are there too.
    pub(crate) spoiled: &'a BTreeSet<(PathBuf, u64)>,
}

struct Pair {
    mounted: File,
    source: File,
    size: u64,
}

pub(crate) fn play(world: &World<'_>, steps: &[Step]) -> Result<(), String> {
    let mut open: BTreeMap<&Path, Pair> = BTreeMap::new();
    for (number, step) in steps.iter().enumerate() {
        let path = step.file.get(world.paths).as_path();
        let wrong = |what: String| format!("step {number} {:?} of {path:?}: {what}", step.op);
        if let Op::Close = step.op {
            open.remove(path);
            continue;
        }
        if !open.contains_key(path) {
            open.insert(path, world.open(path).map_err(|error| wrong(error.to_string()))?);
        }
        world.step(path, open.get_mut(path).unwrap(), &step.op).map_err(wrong)?;
    }
    Ok(())
}

impl World<'_> {
    fn open(&self, path: &Path) -> io::Result<Pair> {
        let (mounted, source) = (File::open(self.mounted.join(path))?, File::open(self.source.join(path))?);
        let size = source.metadata()?.size();
        Ok(Pair { mounted, source, size })
    }

    fn step(&self, path: &Path, pair: &mut Pair, op: &Op) -> Result<(), String> {
        match op {
            Op::Read { at, len } => self.read(path, pair, at.in_file(pair.size), *len),
            Op::Sequence { at, piece, count } => {
                let at = at.in_file(pair.size);
                (0..*count).try_for_each(|turn| self.read(path, pair, at + turn * piece, *piece))
            }
            Op::Map { at, len, random } => self.map(path, pair, at.in_file(pair.size), *len, *random),
            Op::Seek { at, data } => self.seek(path, pair, at.in_file(pair.size), *data),
            Op::Forget { at, len } => {
                let (at, len) = (at.in_file(pair.size).cast_signed(), len.cast_signed());
                let advice = PosixFadviseAdvice::POSIX_FADV_DONTNEED;
                posix_fadvise(pair.mounted.as_fd(), at, len, advice).map_err(|error| error.to_string())
            }
            Op::Advise { random } => {
                let advice = if *random {
                    PosixFadviseAdvice::POSIX_FADV_RANDOM
                } else {
                    PosixFadviseAdvice::POSIX_FADV_NORMAL
                };
                posix_fadvise(pair.mounted.as_fd(), 0, 0, advice).map_err(|error| error.to_string())
            }
            Op::Duplicate => {
                pair.mounted = pair.mounted.try_clone().map_err(|error| error.to_string())?;
                Ok(())
            }
            Op::Close => Ok(()),
            Op::Stat => same_attributes(&self.mounted.join(path), &self.source.join(path)),
            Op::List => {
                let directory = path.parent().unwrap_or(Path::new(""));
                let names = |root: &Path| -> BTreeSet<_> {
                    fs::read_dir(root.join(directory))
                        .unwrap()
                        .map(|entry| entry.unwrap().file_name())
                        .collect()
                };
                let (found, wanted) = (names(self.mounted), names(self.source));
                if found == wanted { Ok(()) } else { Err(format!("{found:?} are listed, not {wanted:?}")) }
            }
        }
    }

    /// From here on nothing can be read.
    fn first_spoiled(&self, path: &Path, at: u64, len: u64) -> Option<u64> {
        if len == 0 {
            return None;
        }
        let chunks = at / MIB..(at + len).div_ceil(MIB);
        let spoiled = { chunks }.find(|&index| self.spoiled.contains(&(path.to_owned(), index)));
        spoiled.map(|index| (index * MIB).max(at))
    }

    fn read(&self, path: &Path, pair: &Pair, at: u64, len: u64) -> Result<(), String> {
        let (mut got, mut wanted) = (vec![0; small(len)], vec![0; small(len)]);
        let (wanted_len, failed) = read_all(&pair.source, &mut wanted, at);
        assert!(failed.is_none(), "the source cannot be read: {failed:?}");
        let (got_len, failed) = read_all(&pair.mounted, &mut got, at);
        let end = match self.first_spoiled(path, at, wanted_len as u64) {
            None if failed.is_some() => {
                return Err(format!("{failed:?} after {got_len} of {wanted_len} bytes"));
            }
            None => wanted_len,
            Some(bad) => {
                let errno = failed.as_ref().and_then(io::Error::raw_os_error);
                if errno != Some(libc::EIO) {
                    return Err(format!("{failed:?} where every answer from {bad} on is wrong"));
                }
                small(bad - at)
            }
        };
        if got_len != end {
            return Err(format!("{got_len} bytes at {at}, not {end}; {failed:?}"));
        }
        same(&got[..end], &wanted[..end], at)
    }

    /// Never of what cannot be read: that would be SIGBUS.
    fn map(&self, path: &Path, pair: &Pair, at: u64, len: u64, random: bool) -> Result<(), String> {
        // Whole pages, as they are faulted in.
        let at = at / 4096 * 4096;
        let len = len.min(pair.size.saturating_sub(at));
        let len = self.first_spoiled(path, at, len).map_or(len, |bad| bad - at);
        if len == 0 {
            return Ok(());
        }
        let mut wanted = vec![0; small(len)];
        pair.source.read_exact_at(&mut wanted, at).unwrap();
        // SAFETY: the file is on a read-only mount of a frozen set; nothing changes or shortens it.
        let map = unsafe { MmapOptions::new().offset(at).len(small(len)).map(&pair.mounted) }
            .map_err(|error| error.to_string())?;
        map.advise(if random { Advice::Random } else { Advice::Normal })
            .map_err(|error| error.to_string())?;
        if random {
            // From the back: no window fits.
            for (page, start) in
                map.chunks(4096).zip((at..).step_by(4096)).collect::<Vec<_>>().into_iter().rev()
            {
                let from = small(start - at);
                same(page, &wanted[from..from + page.len()], start)?;
            }
            return Ok(());
        }
        same(&map, &wanted, at)
    }

    fn seek(&self, path: &Path, pair: &Pair, at: u64, data: bool) -> Result<(), String> {
        use std::os::unix::ffi::OsStrExt as _;
        let node = self.manifest.resolve(path.as_os_str().as_bytes()).and_then(|i| self.manifest.node(i));
        let node = node.ok_or("is not in the manifest")?;
        let is_data = |index: u64| matches!(node.chunk(index), Some(ChunkRef::Data(_)));
        let wanted = if at >= node.size {
            None
        } else {
            let found = (at / MIB..node.chunk_count()).find(|&index| is_data(index) == data);
            found.map(|index| (index * MIB).max(at)).or((!data).then_some(node.size))
        };
        let whence = if data { libc::SEEK_DATA } else { libc::SEEK_HOLE };
        // SAFETY: an open descriptor and two numbers.
        let found = unsafe { libc::lseek(pair.mounted.as_raw_fd(), at.cast_signed(), whence) };
        let found = if found < 0 {
            let errno = io::Error::last_os_error().raw_os_error();
            if errno != Some(libc::ENXIO) {
                return Err(format!("seek: {errno:?}"));
            }
            None
        } else {
            Some(found.cast_unsigned())
        };
        if found != wanted {
            return Err(format!("found at {found:?}, not {wanted:?}"));
        }
        // What is passed over as a hole has no data at home.
        let passed = if data { at..found.unwrap_or(pair.size.max(at)) } else { at..at };
        let mut bytes = vec![1; small(passed.end - passed.start)];
        pair.source.read_exact_at(&mut bytes, at).map_err(|error| error.to_string())?;
        if bytes.iter().all(|&byte| byte == 0) { Ok(()) } else { Err("data was passed over".to_owned()) }
    }
}

/// How many bytes there were, and what ended it but the end of the file.
fn read_all(file: &File, into: &mut [u8], at: u64) -> (usize, Option<io::Error>) {
    let mut done = 0;
    while done < into.len() {
        match file.read_at(&mut into[done..], at + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return (done, Some(error)),
        }
    }
    (done, None)
}

/// Without printing them.
pub(crate) fn same(got: &[u8], wanted: &[u8], at: u64) -> Result<(), String> {
    if got == wanted {
        return Ok(());
    }
    let first = got.iter().zip(wanted).position(|(a, b)| a != b).unwrap_or(got.len().min(wanted.len()));
    Err(format!("wrong byte at {} ({} bytes, {} wanted)", at + first as u64, got.len(), wanted.len()))
}

fn same_attributes(mounted: &Path, source: &Path) -> Result<(), String> {
    let of = |path: &Path| {
        let found = path.symlink_metadata().unwrap();
        (found.size(), found.mode(), found.mtime(), found.mtime_nsec(), found.nlink())
    };
    let (found, wanted) = (of(mounted), of(source));
    if found == wanted { Ok(()) } else { Err(format!("attributes {found:?}, not {wanted:?}")) }
}

fn small(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap()
}
