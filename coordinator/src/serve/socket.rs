//! The owner's socket: 0600, and each peer is asked for its user id. Both ends are here.

use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use futures_util::StreamExt as _;
use hyper_util::rt::TokioIo;
use limb_proto::v1::owner_client::OwnerClient;
use limb_proto::v1::owner_server::OwnerServer;
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::{Channel, Endpoint, Server};

use super::ServeError;
use crate::owner::OwnerService;

/// A listing of a hundred thousand results fits; both ends are the same user's.
const MAX_OWNER_MESSAGE_BYTES: usize = 64 * 1024 * 1024;
/// sun_path of sockaddr_un, without its NUL.
const LONGEST_PATH_BYTES: usize = 107;

/// Serves the owner until `stop`. The caller holds the coordinator's lock, so that a socket file
/// that is there already is nobody's.
pub(super) async fn serve(
    path: &Path,
    owner: OwnerService,
    stop: CancellationToken,
) -> Result<(), ServeError> {
    let failed = |source| ServeError::Socket { path: path.to_owned(), source };
    let listener = bind(path).map_err(failed)?;
    let me = nix::unistd::geteuid().as_raw();
    let peers = UnixListenerStream::new(listener).filter_map(move |peer| async move {
        match peer {
            Ok(stream) => match stream.peer_cred() {
                Ok(who) if who.uid() == me => Some(Ok(stream)),
                Ok(who) => {
                    tracing::warn!(uid = who.uid(), "somebody else tried the owner's socket");
                    None
                }
                Err(_) => None,
            },
            Err(error) => Some(Err(error)),
        }
    });
    let service = OwnerServer::new(owner)
        .max_decoding_message_size(MAX_OWNER_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_OWNER_MESSAGE_BYTES);
    let served = Server::builder()
        .add_service(service)
        .serve_with_incoming_shutdown(peers, stop.cancelled_owned())
        .await
        .map_err(ServeError::Owner);
    // The file says that somebody listens. It is ours as long as the lock is.
    drop(std::fs::remove_file(path));
    served
}

fn bind(path: &Path) -> std::io::Result<UnixListener> {
    use std::os::unix::ffi::OsStrExt as _;
    if path.as_os_str().as_bytes().len() > LONGEST_PATH_BYTES {
        return Err(std::io::Error::new(
            std::io::ErrorKind::InvalidInput,
            format!(
                "the path has more than {LONGEST_PATH_BYTES} bytes; hint: set `socket` to a shorter one, like /run/user/UID/limb.sock"
            ),
        ));
    }
    match std::fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => std::fs::remove_file(path)?,
        Ok(_) => {
            return Err(std::io::Error::new(
                std::io::ErrorKind::InvalidInput,
                "something that is no socket has its place; hint: move it away, or set `socket` to another path",
            ));
        }
        Err(_) => {}
    }
    let listener = UnixListener::bind(path)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}

/// No coordinator answers there.
#[derive(Debug, thiserror::Error)]
#[error("no coordinator answers at {}", path.display())]
pub struct NotRunning {
    path: PathBuf,
    #[source]
    source: tonic::transport::Error,
}

/// A client of the coordinator that listens there.
///
/// # Errors
/// [`NotRunning`].
pub async fn connect(path: &Path) -> Result<OwnerClient<Channel>, NotRunning> {
    let to = path.to_owned();
    // The name is not used: a unix socket has none.
    let channel = Endpoint::from_static("http://home.limb")
        .connect_with_connector(tower::service_fn(move |_| {
            let to = to.clone();
            async move { UnixStream::connect(to).await.map(TokioIo::new) }
        }))
        .await
        .map_err(|source| NotRunning { path: path.to_owned(), source })?;
    Ok(OwnerClient::new(channel)
        .max_decoding_message_size(MAX_OWNER_MESSAGE_BYTES)
        .max_encoding_message_size(MAX_OWNER_MESSAGE_BYTES))
}
