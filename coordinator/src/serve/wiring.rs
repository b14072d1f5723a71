//! Where the parts meet: snapshots, results and logs behind what the lifecycle, the agents' port
//! and the owner ask of them.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use limb_common::assignment::SetNumber;
use limb_common::class::DataClass;
use limb_common::error;
use limb_common::id::{AttemptNumber, RunId};
use limb_common::identity::AgentIdentity;
use limb_common::task::{self, Task};
use limb_common::units::show_bytes;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;

use super::ServeError;
use crate::ca::HomeCa;
use crate::database::Database;
use crate::ledger::{self, Ledger};
use crate::lifecycle::Lifecycle;
use crate::lifecycle::desk::FrontDesk;
use crate::lifecycle::seam::{Finished, Lower, Outputs, OutputsError, OutputsFuture};
use crate::logs::Logs;
use crate::results::{self, AttemptId, OutputBegin, ResultsHome};
use crate::rpc::chunks::{ChunkService, SourceEvents};
use crate::rpc::desk::{Desk, OutputHome};
use crate::rpc::logs::LogService;
use crate::rpc::results::ResultService;
use crate::rpc::server::{self, ServeError as AgentsError};
use crate::rpc::traces::TraceService;
use crate::settings::Settings;
use crate::snapshot::{FileIdentity, Registration, Snapshots};

/// Everybody's tables, in one file.
pub(super) const SCHEMAS: &[&str] = &[ledger::SCHEMA, results::SCHEMA];

/// Notes on their way to the ledger; whoever makes them must not wait, so more are dropped (they
/// are logged all the same).
const NOTES: usize = 1_024;

/// The three stores of data at home. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Data {
    snapshots: Snapshots,
    results: ResultsHome,
    logs: Logs,
    notes: mpsc::Sender<Note>,
    state_dir: Arc<std::path::Path>,
    compress: bool,
    sent: Arc<Mutex<HashMap<(RunId, AttemptNumber), Sent>>>,
    _noting: Arc<Task<()>>,
}

/// What an attempt was sent that might have been compressed.
#[derive(Clone, Copy, Debug, Default)]
struct Sent {
    plain_bytes: u64,
    wire_bytes: u64,
}

/// Something that a run's events should say.
#[derive(Debug)]
struct Note {
    run: RunId,
    attempt: AttemptNumber,
    kind: &'static str,
    text: String,
}

impl Data {
    pub(super) async fn open(
        settings: &Settings,
        database: &Database,
        ledger: &Ledger,
    ) -> Result<Self, ServeError> {
        let (notes, mut queue) = mpsc::channel::<Note>(NOTES);
        let noting = task::spawn("notes", {
            let ledger = ledger.clone();
            async move {
                while let Some(Note { run, attempt, kind, text }) = queue.recv().await {
                    if let Err(problem) = ledger.note(&run, attempt, kind, text).await {
                        tracing::error!(error = error::chain(&problem), "the ledger did not take a note");
                    }
                }
            }
        });
        let sink = notes.clone();
        let results = ResultsHome::new(
            database.clone(),
            Arc::new(move |event| {
                say(
                    &sink,
                    Note { run: event.run, attempt: event.attempt, kind: "results", text: event.text },
                );
            }),
        );
        results.recover().await.map_err(|e| ServeError::Results(Box::new(e)))?;
        Ok(Self {
            snapshots: Snapshots::open(&settings.state_dir)?,
            results,
            logs: Logs::with_quota(&settings.state_dir, settings.log_quota_bytes),
            notes,
            state_dir: settings.state_dir.as_path().into(),
            compress: settings.compress,
            sent: Arc::default(),
            _noting: Arc::new(noting),
        })
    }

    pub(crate) fn snapshots(&self) -> &Snapshots {
        &self.snapshots
    }

    /// Where the changes that jobs leave in their workdirs come home.
    pub(crate) fn changes_home(&self) -> PathBuf {
        self.state_dir.join("workdir.changes")
    }

    pub(crate) fn results(&self) -> &ResultsHome {
        &self.results
    }

    pub(crate) fn logs(&self) -> &Logs {
        &self.logs
    }

    pub(super) fn outputs(&self) -> Arc<dyn Outputs> {
        Arc::new(self.clone())
    }

    pub(super) fn serve_agents(
        &self,
        listener: TcpListener,
        ca: Arc<HomeCa>,
        lifecycle: &Arc<Lifecycle>,
        stop: CancellationToken,
    ) -> impl Future<Output = Result<(), AgentsError>> + Send + use<> {
        let desk: Arc<dyn Desk> = Arc::new(FrontDesk(Arc::clone(lifecycle)));
        let chunks = ChunkService::new(
            Arc::clone(&desk),
            self.snapshots.clone(),
            Arc::new(self.results.clone()),
            Arc::new(self.clone()),
        )
        .compressing(self.compress);
        let routes = Routes::new(chunks.into_server())
            .add_service(ResultService::new(Arc::clone(&desk), self.results.clone()).into_server())
            .add_service(TraceService::new(Arc::clone(&desk), self.snapshots.clone()).into_server())
            .add_service(LogService::new(Arc::clone(&desk), self.logs.clone()).into_server());
        server::serve(listener, ca, desk, routes, stop)
    }
}

fn say(notes: &mpsc::Sender<Note>, note: Note) {
    tracing::info!(run = %note.run, kind = note.kind, text = note.text, "noted");
    if notes.try_send(note).is_err() {
        tracing::warn!("too many notes at once; one is only in this log");
    }
}

impl Outputs for Data {
    fn lock(&self, run: &RunId, dests: Vec<PathBuf>) -> OutputsFuture<()> {
        let (this, run) = (self.clone(), run.clone());
        Box::pin(async move {
            for dest in dests {
                this.results.lock_dest(&dest, &run).await?;
            }
            Ok(())
        })
    }

    fn begin(&self, who: &AgentIdentity, outputs: Vec<OutputHome>) -> OutputsFuture<Vec<Lower>> {
        let (this, who) = (self.clone(), who.clone());
        Box::pin(async move { this.begin_outputs(&who, outputs).await })
    }

    fn finish(&self, run: &RunId, attempt: AttemptNumber) -> OutputsFuture<Finished> {
        let (this, run) = (self.clone(), run.clone());
        Box::pin(async move {
            if this.logs.exists(&run, attempt) {
                this.logs.attempt(&run, attempt)?.close()?;
            }
            this.say_what_compression_saved(&run, attempt);
            let id = AttemptId { run, attempt };
            let results::Finished { files, bytes, partials, gone } = this.results.finish(&id).await?;
            Ok(Finished { files, bytes, partial: partials, gone })
        })
    }

    fn locked(&self) -> OutputsFuture<Vec<RunId>> {
        let this = self.clone();
        Box::pin(async move { Ok(this.results.locked_runs().await?) })
    }

    fn unlock(&self, run: &RunId) -> OutputsFuture<()> {
        let (this, run) = (self.clone(), run.clone());
        Box::pin(async move {
            this.results.unlock_dests(&run).await?;
            // Most jobs change nothing: an empty directory says nothing. One with files stays.
            drop(std::fs::remove_dir(this.changes_home().join(run.as_str())));
            Ok(())
        })
    }
}

impl Data {
    async fn begin_outputs(
        &self,
        who: &AgentIdentity,
        outputs: Vec<OutputHome>,
    ) -> Result<Vec<Lower>, OutputsError> {
        let (mut lowers, mut begins) = (Vec::new(), Vec::new());
        for home in outputs {
            let lower = self.results.lower(&home.dest).await?;
            for left in &lower.left_out {
                let text = format!(
                    "{left} below {} was changed or removed since it was published; the job does not see it",
                    home.dest.display()
                );
                say(&self.notes, Note { run: who.run.clone(), attempt: who.attempt, kind: "results", text });
            }
            let registration = Registration {
                source: home.dest.clone(),
                class: DataClass::default(),
                manifest: lower.manifest,
                files: lower
                    .files
                    .into_iter()
                    .map(|file| {
                        let identity = FileIdentity {
                            dev: file.dev,
                            ino: file.ino,
                            size: file.size,
                            mtime_ns: file.mtime_ns,
                            ctime_ns: file.ctime_ns,
                        };
                        (file.inode, file.path, identity)
                    })
                    .collect(),
            };
            let snapshots = self.snapshots.clone();
            let frozen = tokio::task::spawn_blocking(move || snapshots.register(registration)).await??;
            begins.push(OutputBegin {
                output: home.output,
                dest: home.dest,
                lower: Some(frozen.id),
                quota_bytes: home.quota_bytes,
                quota_inodes: home.quota_inodes,
            });
            lowers.push(Lower {
                output: home.output,
                manifest_id: frozen.id,
                manifest_bytes: frozen.manifest.as_bytes().len() as u64,
            });
        }
        let id = AttemptId { run: who.run.clone(), attempt: who.attempt };
        self.results.begin(&id, begins).await?;
        Ok(lowers)
    }
}

impl Data {
    fn say_what_compression_saved(&self, run: &RunId, attempt: AttemptNumber) {
        let mut all = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(Sent { plain_bytes, wire_bytes }) = all.remove(&(run.clone(), attempt)) else { return };
        drop(all);
        if wire_bytes < plain_bytes {
            let text = format!(
                "{} of what the job read were sent as {}",
                show_bytes(plain_bytes),
                show_bytes(wire_bytes)
            );
            say(&self.notes, Note { run: run.clone(), attempt, kind: "compressed", text });
        }
    }
}

impl SourceEvents for Data {
    fn on_encoded(&self, who: &AgentIdentity, plain_len: usize, wire_len: usize) {
        let mut all = self.sent.lock().unwrap_or_else(PoisonError::into_inner);
        let sent = all.entry((who.run.clone(), who.attempt)).or_default();
        sent.plain_bytes += plain_len as u64;
        sent.wire_bytes += wire_len as u64;
    }

    fn on_source_changed(&self, who: &AgentIdentity, set: SetNumber, path: &[u8]) {
        let text = format!(
            "{} (set {}) is not the file that was frozen: the job gets EIO for what is not read yet",
            String::from_utf8_lossy(path),
            set.0
        );
        let note = Note { run: who.run.clone(), attempt: who.attempt, kind: "source-changed", text };
        say(&self.notes, note);
    }
}
