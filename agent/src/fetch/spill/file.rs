//! The file behind the cache: without a name from its birth, so that it goes with the process,
//! however that ends. Read and written past the page cache where the file system can: the same
//! bytes twice in memory would be no cache, and errors of the disk come with the write.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::Path;

use limb_common::chunk::{CHUNK_BYTES, CHUNK_BYTES_U64};
use memmap2::MmapMut;
use nix::fcntl::{FallocateFlags, FcntlArg, OFlag, fallocate, fcntl};
use nix::sys::statfs::{FsType, TMPFS_MAGIC, fstatfs};
use nix::sys::statvfs::fstatvfs;

/// Disks want whole blocks.
pub(super) const BLOCK_BYTES: u64 = 4096;

/// Of linux/magic.h; nix has no name for it.
const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);

/// Here is no place for the cache.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    #[error("could not make a file there")]
    Create(#[source] io::Error),
    #[error("that directory lies in memory itself")]
    InMemory,
    #[error("the file system there cannot take back a part of a file")]
    NoHoles(#[source] io::Error),
}

/// What a slot is read into and written from: aligned to a page, as direct I/O needs it.
pub(super) struct Block(MmapMut);

impl Block {
    pub(super) fn new() -> io::Result<Self> {
        MmapMut::map_anon(CHUNK_BYTES).map(Self)
    }

    pub(super) fn bytes(&mut self) -> &mut [u8] {
        &mut self.0
    }
}

/// Slots of one chunk each; of a slot only what was written takes up disk.
#[derive(Debug)]
pub(super) struct SpillFile {
    file: File,
}

impl SpillFile {
    /// # Errors
    /// The directory is no place for it.
    pub(super) fn create(dir: &Path) -> Result<Self, FileError> {
        let this = Self { file: unnamed(dir).map_err(FileError::Create)? };
        let kind = fstatfs(&this.file).map_err(|errno| FileError::Create(errno.into()))?.filesystem_type();
        if [TMPFS_MAGIC, RAMFS_MAGIC].contains(&kind) {
            return Err(FileError::InMemory);
        }
        this.go_direct().map_err(FileError::Create)?;
        this.cut(0, 0).map_err(FileError::NoHoles)?;
        Ok(this)
    }

    /// Writes a first block, past the page cache if that goes.
    fn go_direct(&self) -> io::Result<()> {
        let mut block = Block::new()?;
        let plain = OFlag::from_bits_retain(fcntl(&self.file, FcntlArg::F_GETFL)?);
        let direct = fcntl(&self.file, FcntlArg::F_SETFL(plain | OFlag::O_DIRECT)).is_ok();
        if direct && self.write(0, 1, &mut block).is_ok() {
            return Ok(());
        }
        fcntl(&self.file, FcntlArg::F_SETFL(plain))?;
        self.write(0, 1, &mut block)
    }

    /// What a file system has left for us: others need some of it too.
    pub(super) fn room_bytes(&self) -> io::Result<u64> {
        let space = fstatvfs(&self.file)?;
        let free_bytes = space.blocks_available().saturating_mul(space.fragment_size());
        Ok(free_bytes - free_bytes / 8)
    }

    /// Writes the first `len` bytes of the block; what follows them up to the disk's block is
    /// zeroed, for it may be what somebody else had there.
    pub(super) fn write(&self, slot: u32, len: usize, block: &mut Block) -> io::Result<()> {
        let whole = len.next_multiple_of(usize::try_from(BLOCK_BYTES).unwrap_or(usize::MAX)).min(CHUNK_BYTES);
        let bytes = block.bytes();
        bytes[len..whole].fill(0);
        self.file.write_all_at(&bytes[..whole], start_of(slot))
    }

    pub(super) fn read(&self, slot: u32, len: usize, block: &mut Block) -> io::Result<()> {
        let whole = len.next_multiple_of(usize::try_from(BLOCK_BYTES).unwrap_or(usize::MAX)).min(CHUNK_BYTES);
        self.file.read_exact_at(&mut block.bytes()[..whole], start_of(slot))
    }

    /// Gives back what a slot takes up beyond its first `keep_bytes`.
    pub(super) fn cut(&self, slot: u32, keep_bytes: u64) -> io::Result<()> {
        let flags = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let (from, len) = (start_of(slot) + keep_bytes, CHUNK_BYTES_U64 - keep_bytes);
        let (from, len) = (i64::try_from(from), i64::try_from(len));
        let (Ok(from), Ok(len)) = (from, len) else { return Err(io::ErrorKind::FileTooLarge.into()) };
        Ok(fallocate(&self.file, flags, from, len)?)
    }

    /// What it takes up, as the file system counts.
    #[cfg(test)]
    pub(super) fn disk_bytes(&self) -> u64 {
        use std::os::unix::fs::MetadataExt as _;
        self.file.metadata().unwrap().blocks() * 512
    }

    /// From now on the disk is full: the descriptor becomes one of /dev/full.
    #[cfg(test)]
    pub(super) fn refuse(&self) {
        use std::os::fd::{AsRawFd as _, FromRawFd as _, IntoRawFd as _, OwnedFd};
        let full = OpenOptions::new().read(true).write(true).open("/dev/full").unwrap();
        // SAFETY: the number stays ours; it only points elsewhere from now on.
        let mut ours = unsafe { OwnedFd::from_raw_fd(self.file.as_raw_fd()) };
        nix::unistd::dup2(&full, &mut ours).unwrap();
        let _still_the_files = ours.into_raw_fd();
    }

    /// For the test that damages what lies there.
    #[cfg(test)]
    pub(super) fn flip(&self, slot: u32, at: usize) {
        let mut block = Block::new().unwrap();
        self.read(slot, at + 1, &mut block).unwrap();
        block.bytes()[at] ^= 0x10;
        self.write(slot, (at + 1).next_multiple_of(4096), &mut block).unwrap();
    }
}

fn start_of(slot: u32) -> u64 {
    u64::from(slot) * CHUNK_BYTES_U64
}

fn unnamed(dir: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).write(true).mode(0o600);
    // O_EXCL: nobody can give it a name later.
    match options.clone().custom_flags(libc::O_TMPFILE | libc::O_EXCL).open(dir) {
        Ok(file) => Ok(file),
        Err(error) if [Some(libc::EOPNOTSUPP), Some(libc::EISDIR)].contains(&error.raw_os_error()) => {
            let path = dir.join(format!(".limb-{:016x}", rand::random::<u64>()));
            let file = options.create_new(true).open(&path)?;
            fs::remove_file(&path)?;
            Ok(file)
        }
        Err(error) => Err(error),
    }
}
