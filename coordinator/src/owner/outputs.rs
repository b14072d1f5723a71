//! Results as the owner's commands see them.

use limb_common::task;
use limb_proto::v1 as proto;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::{OwnerService, Replies, STREAM_DEPTH, internal};
use crate::ledger::RunRow;
use crate::results::{Listed, ListedKind, Problem};

impl OwnerService {
    pub(super) async fn result_files(&self, row: &RunRow) -> Result<Vec<proto::ResultFile>, Status> {
        let listed = self.data.results().list(&row.run).await.map_err(|e| internal(&e))?;
        Ok(listed.into_iter().map(|found| result_file(row, found)).collect())
    }

    pub(super) async fn verify_files(&self, row: RunRow) -> Result<Replies<proto::VerifiedFile>, Status> {
        let files = self.result_files(&row).await?;
        let (replies, stream) = mpsc::channel(STREAM_DEPTH);
        let this = self.clone();
        task::detach("verify results", async move {
            tokio::select! {
                () = replies.closed() => {}
                () = this.send_verdicts(&row, files, &replies) => {}
            }
        });
        Ok(Box::pin(ReceiverStream::new(stream)))
    }

    async fn send_verdicts(
        &self,
        row: &RunRow,
        files: Vec<proto::ResultFile>,
        replies: &mpsc::Sender<Result<proto::VerifiedFile, Status>>,
    ) {
        let verified = match self.data.results().verify(&row.run).await {
            Ok(verified) => verified,
            Err(problem) => {
                drop(replies.send(Err(internal(&problem))).await);
                return;
            }
        };
        for file in files.into_iter().filter(|file| !file.b3sum.is_empty()) {
            let full = std::path::Path::new(&file.dest).join(bytes_path(&file.path));
            let problem = verified.problems.iter().find_map(|problem| match problem {
                Problem::Missing { path } if *path == full => Some("missing".to_owned()),
                Problem::Mismatch { path, found, .. } if *path == full => {
                    Some(format!("changed: its hash is now {found}"))
                }
                Problem::Unreadable { path, errno } if *path == full => {
                    Some(format!("unreadable: {}", std::io::Error::from_raw_os_error(*errno)))
                }
                Problem::Missing { .. } | Problem::Mismatch { .. } | Problem::Unreadable { .. } => None,
            });
            let ok = problem.is_none();
            let verdict = problem.unwrap_or_else(|| "ok".to_owned());
            let said = proto::VerifiedFile { file: Some(file), verdict, ok };
            if replies.send(Ok(said)).await.is_err() {
                return;
            }
        }
    }
}

fn bytes_path(bytes: &[u8]) -> &std::path::Path {
    use std::os::unix::ffi::OsStrExt as _;
    std::path::Path::new(std::ffi::OsStr::from_bytes(bytes))
}

/// The destination that a path is under, and the path below it.
fn result_file(row: &RunRow, found: Listed) -> proto::ResultFile {
    use std::os::unix::ffi::OsStrExt as _;
    let home = row.spec.outputs.iter().find_map(|output| {
        let dest = output.dest_of(&row.spec.name, &row.run, found.attempt);
        // The journal knows destinations by their real path.
        let real = dest.canonicalize().unwrap_or_else(|_| dest.clone());
        let below = found.path.strip_prefix(&real).or_else(|_| found.path.strip_prefix(&dest)).ok()?;
        Some((output.path.display().to_string(), found.path.clone(), below.to_owned()))
    });
    let (output, dest, below) = match home {
        Some((output, full, below)) => {
            let depth = below.components().count();
            let dest = full.ancestors().nth(depth).unwrap_or(&full).display().to_string();
            (output, dest, below)
        }
        None => (String::new(), "/".to_owned(), found.path.clone()),
    };
    proto::ResultFile {
        path: below.as_os_str().as_bytes().to_vec().into(),
        output,
        dest,
        size: found.size,
        b3sum: found.root.map(|root| root.to_hex()).unwrap_or_default(),
        published_unix_ms: found.published_unix_ms,
        state: match found.kind {
            ListedKind::File => "published",
            ListedKind::Directory => "directory",
            ListedKind::Symlink => "symlink",
            ListedKind::Partial => "partial",
        }
        .to_owned(),
        run_id: row.run.to_string(),
    }
}
