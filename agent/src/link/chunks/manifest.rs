//! A set's manifest: streamed, decompressed within its known length, verified, and mapped from a
//! sealed file in memory that nobody can change any more.

use std::fs::File;
use std::io::{self, Write};
use std::time::Duration;

use limb_common::assignment::SetSpec;
use limb_common::error::chain;
use limb_common::manifest::{Manifest, ManifestError};
use limb_common::wire::MAX_MESSAGE_BYTES;
use limb_proto::v1::ManifestRequest;
use limb_proto::v1::chunks_client::ChunksClient;
use memmap2::Mmap;
use nix::fcntl::{FcntlArg, SealFlag, fcntl};
use nix::sys::memfd::{MFdFlags, memfd_create};
use tokio_util::sync::CancellationToken;
use zstd::stream::write::Decoder;

use super::backoff::Backoff;
use crate::link::channels::{ChannelError, Channels};

/// No piece for so long: the stream is dead.
const PATIENCE: Duration = Duration::from_secs(10);
/// More wrong answers than this are no accident of the link.
const REFETCHES: u32 = 2;

/// The manifest cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum ManifestFetchError {
    #[error("home has no such set for this attempt")]
    NotFound,
    #[error("home sent something else than the manifest that it announced, more than once: {detail}")]
    Corrupt { detail: String },
    #[error("the manifest cannot be kept in memory; hint: the box has too little of it")]
    Memory {
        #[source]
        source: io::Error,
    },
    #[error("the agent is ending")]
    Closed,
}

/// How one attempt ended.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Channel(#[from] ChannelError),
    #[error("the stream broke")]
    Status(#[from] tonic::Status),
    #[error("nothing came for {PATIENCE:?}")]
    Silence,
    #[error("{0}")]
    Wrong(String),
    #[error("no memory")]
    Memory(#[source] io::Error),
}

/// Fetches a set's manifest. Waits through cuts for as long as it takes.
///
/// # Errors
/// [`ManifestFetchError`]; `Closed` once `stop` is cancelled.
pub async fn fetch_manifest(
    channels: &dyn Channels,
    spec: &SetSpec,
    stop: &CancellationToken,
) -> Result<Manifest, ManifestFetchError> {
    let life = async {
        let mut backoff = Backoff::new();
        let mut wrong = 0;
        loop {
            let failure = match attempt(channels, spec).await {
                Ok(manifest) => return Ok(manifest),
                Err(failure) => failure,
            };
            tracing::info!(
                set = spec.set.0,
                cause = chain(&failure),
                "the manifest did not arrive; asking again"
            );
            match failure {
                Failure::Status(status) if status.code() == tonic::Code::NotFound => {
                    return Err(ManifestFetchError::NotFound);
                }
                Failure::Memory(source) => return Err(ManifestFetchError::Memory { source }),
                Failure::Channel(ChannelError::Closed) => return Err(ManifestFetchError::Closed),
                Failure::Wrong(detail) => {
                    wrong += 1;
                    if wrong > REFETCHES {
                        return Err(ManifestFetchError::Corrupt { detail });
                    }
                }
                Failure::Channel(ChannelError::Unreachable { .. })
                | Failure::Status(_)
                | Failure::Silence => {}
            }
            tokio::time::sleep(backoff.next_pause()).await;
        }
    };
    tokio::select! {
        biased;
        () = stop.cancelled() => Err(ManifestFetchError::Closed),
        outcome = life => outcome,
    }
}

async fn attempt(channels: &dyn Channels, spec: &SetSpec) -> Result<Manifest, Failure> {
    let channel = within(channels.bulk()).await??;
    let mut client = ChunksClient::new(channel).max_decoding_message_size(MAX_MESSAGE_BYTES);
    let request = ManifestRequest { set: spec.set.0 };
    let mut pieces = within(client.manifest(request)).await??.into_inner();
    let file = memfd_create("limb-manifest", MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)
        .map_err(|errno| Failure::Memory(errno.into()))?;
    let bounded = Bounded { file: File::from(file), left: spec.manifest_bytes, over: false };
    let mut decoder = Decoder::new(bounded).map_err(Failure::Memory)?;
    while let Some(piece) = within(pieces.message()).await?? {
        decoder.write_all(&piece.data).map_err(|error| failed(&error, decoder.get_ref()))?;
    }
    decoder.flush().map_err(|error| failed(&error, decoder.get_ref()))?;
    let bounded = decoder.into_inner();
    if bounded.left != 0 {
        return Err(Failure::Wrong(format!("{} bytes are missing", bounded.left)));
    }
    let expected = spec.manifest_id;
    // Hashing and checking a million entries takes long enough to be in the way of the link.
    let opened = tokio::task::spawn_blocking(move || {
        let bytes = Sealed::seal(&bounded.file).map_err(Failure::Memory)?;
        Manifest::open(bytes, expected).map_err(|error: ManifestError| Failure::Wrong(error.to_string()))
    });
    opened.await.map_err(|error| Failure::Wrong(error.to_string()))?
}

async fn within<T>(event: impl Future<Output = T>) -> Result<T, Failure> {
    tokio::time::timeout(PATIENCE, event).await.map_err(|_| Failure::Silence)
}

fn failed(error: &io::Error, bounded: &Bounded) -> Failure {
    if bounded.over {
        Failure::Wrong("it is longer than announced".to_owned())
    } else if error.kind() == io::ErrorKind::StorageFull || error.raw_os_error() == Some(libc::ENOMEM) {
        Failure::Memory(io::Error::new(error.kind(), error.to_string()))
    } else {
        Failure::Wrong(error.to_string())
    }
}

/// Takes no more than was announced, whatever the compressed bytes swell to.
#[derive(Debug)]
struct Bounded {
    file: File,
    left: u64,
    over: bool,
}

impl Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if bytes.len() as u64 > self.left {
            self.over = true;
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        let written = self.file.write(bytes)?;
        self.left -= written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// A mapping of a file that the kernel lets nobody write, grow or shrink.
#[derive(Debug)]
struct Sealed(Mmap);

impl Sealed {
    fn seal(file: &File) -> io::Result<Self> {
        let seals =
            SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_WRITE | SealFlag::F_SEAL_SEAL;
        fcntl(file, FcntlArg::F_ADD_SEALS(seals))?;
        // SAFETY: the file is sealed against writing and shrinking, so the mapped bytes never
        // change and never vanish.
        Ok(Self(unsafe { Mmap::map(file)? }))
    }
}

impl AsRef<[u8]> for Sealed {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}
