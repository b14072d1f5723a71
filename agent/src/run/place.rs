//! Where the job will stand: every set mounted read-only, every output mounted read-write with
//! its way home, the workdir with its layer. All of it below the private directory; the job's own
//! view shows it at the paths that the assignment names.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use limb_common::assignment::{Assignment, CacheSpec, Durability, OutputSpec, SetSpec, WORKDIR_CHANGES};
use limb_common::manifest::{Manifest, ROOT};
use limb_common::report::BoxEvent;
use tokio::runtime::Handle;
use tokio_util::sync::CancellationToken;

use super::cache::Ground;
use super::traces::Traces;
use crate::fetch::{ChunkSource, FetchError, Fetcher, FetcherLimits};
use crate::job::layer::WorkdirLayer;
use crate::job::{Access, Bind, View, Workdir};
use crate::leash::{Leash, Stage};
use crate::link::Link;
use crate::link::channels::Channels;
use crate::link::chunks::{ChunkPatience, GrpcChunks, ManifestFetchError, fetch_manifest};
use crate::link::control::Reporter;
use crate::link::results::Uplink;
use crate::mount::read::{Owner, PushStats, Pusher, ReadFs, ReadFsOptions};
use crate::mount::session::{MountError, MountOptions, MountSession};
use crate::mount::write::WriteFs;
use crate::results::output::Settling;
use crate::results::{Outbox, OutboxSettings, Output, OutputSettings, Refusal, TreeSettings};

/// Written and not yet at home, before writers wait.
const DIRTY_BYTES: u64 = 512 << 20;
/// At home, and still here to be read back.
const CLEAN_BYTES: u64 = 128 << 20;

/// Buffers of a program that streams, and its manifests.
const OWN_BYTES: u64 = 256 << 20;

/// What the agent may come to hold, with what is on its way: the job must leave so much.
pub(super) fn agent_bytes(cache: &CacheSpec) -> u64 {
    let FetcherLimits { cache_bytes, in_flight_bytes } = FetcherLimits::with_cache(cache.memory_bytes);
    cache_bytes.saturating_add(in_flight_bytes + DIRTY_BYTES + CLEAN_BYTES + OWN_BYTES)
}

/// The job's place could not be made.
#[derive(Debug, thiserror::Error)]
pub(super) enum PlaceError {
    #[error("the manifest of {what} did not come")]
    Manifest { what: String, source: ManifestFetchError },
    #[error("could not mount {what}")]
    Mount { what: String, source: MountError },
    #[error("could not use the private directory")]
    Directory(#[from] io::Error),
    #[error("the set for {} is not one file", path.display())]
    NotOneFile { path: PathBuf },
}

/// Who uses a mount: one of ours still carries results home when the job's were aborted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    ByJob,
    ByAgent,
}

/// Every mount that this agent made. Shared with the leash, which ends them.
#[derive(Clone, Debug, Default)]
pub(super) struct Mounts(Arc<Mutex<Vec<Mounted>>>);

#[derive(Clone, Debug)]
struct Mounted {
    seen: Seen,
    session: Arc<MountSession>,
}

impl Mounts {
    /// Puts their end into the leash's order of destruction, the wipe after the unmounting.
    pub(super) fn register(&self, leash: &Leash, private_dir: &Path) {
        let mounts = self.clone();
        leash.register(Stage::AbortMounts, "mounts", move || abort(mounts.all()));
        let (mounts, private_dir) = (self.clone(), private_dir.to_owned());
        leash.register(Stage::Wipe, "private directory", move || {
            mounts.unmount();
            if let Err(error) = crate::host::wipe(&private_dir) {
                tracing::error!(%error, dir = %private_dir.display(), "could not wipe everything");
            }
        });
    }

    /// Answers all pending requests of the job with an error, so that it can be killed also when
    /// it is blocked in one.
    pub(super) fn abort_the_jobs(&self) {
        abort(self.all().into_iter().filter(|mount| mount.seen == Seen::ByJob));
    }

    fn unmount(&self) {
        for mount in self.all().into_iter().rev() {
            if let Err(error) = mount.session.unmount() {
                tracing::warn!(error = limb_common::error::chain(&error), "a mount could not be ended");
            }
        }
    }

    fn all(&self) -> Vec<Mounted> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn add(&self, seen: Seen, session: Arc<MountSession>) {
        let mounted = Mounted { seen, session };
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(mounted);
    }
}

fn abort(mounts: impl IntoIterator<Item = Mounted>) {
    for mount in mounts {
        if let Err(error) = mount.session.abort() {
            tracing::warn!(error = limb_common::error::chain(&error), "a mount could not be aborted");
        }
    }
}

/// What the read mounts share.
#[derive(Clone, Copy)]
struct Feed<'a> {
    source: &'a Arc<Fetcher>,
    traces: Option<&'a Traces>,
    pushed: Option<&'a Arc<PushStats>>,
}

/// What every part of a place needs.
pub(super) struct Builder<'a> {
    pub(super) link: &'a Arc<Link>,
    pub(super) mounts: &'a Mounts,
    pub(super) reporter: &'a Reporter,
    pub(super) private_dir: &'a Path,
    /// What the job must not see beside it.
    pub(super) hide: &'a [PathBuf],
    /// Cancelled when the agent ends.
    pub(super) stop: &'a CancellationToken,
}

/// The job's place.
#[derive(Debug)]
pub(super) struct Place {
    pub(super) binds: Vec<Bind>,
    pub(super) outputs: Vec<Arc<Output>>,
    pub(super) outbox: Arc<Outbox>,
    pub(super) layer: WorkdirLayer,
    pub(super) workdir_lower: Option<PathBuf>,
    /// Where changed workdir files are to be put, if home wants them: not the job's, so no fence
    /// stands before it.
    pub(super) changes_to: Option<(Arc<Output>, PathBuf)>,
    /// Where first touches are recorded; none: the job says `trace: off`.
    pub(super) traces: Option<Traces>,
    pub(super) source: Arc<Fetcher>,
    /// None: the job does not say `push: on`.
    pub(super) pushed: Option<Arc<PushStats>>,
    workdir_manifest: Option<(Manifest, SetSpec)>,
    _uplink: Uplink,
    _settling: Vec<Settling>,
}

impl Builder<'_> {
    pub(super) async fn place(&self, assignment: &Assignment) -> Result<Place, PlaceError> {
        let channels: Arc<dyn Channels> = Arc::clone(self.link) as _;
        let chunks = GrpcChunks::new(Arc::clone(&channels), ChunkPatience::default(), self.stop.clone());
        let ground = Ground {
            private_dir: self.private_dir,
            reporter: self.reporter,
            leash: self.link.leash(),
            stop: self.stop,
        };
        let source = super::cache::fetcher(&assignment.cache, Arc::new(chunks), &ground);
        let traces = assignment.trace.then(|| Traces::start(Arc::clone(&channels), source.clone()));
        let pushed: Option<Arc<PushStats>> = assignment.push.then(Arc::default);
        let feed = Feed { source: &source, traces: traces.as_ref(), pushed: pushed.as_ref() };
        let outbox = self.outbox();
        let uplink = Uplink::start(Arc::clone(&outbox), channels, self.link.identity().epoch);
        let mut binds = Vec::new();
        for spec in &assignment.mounts {
            let target = path_of(&spec.path);
            let manifest = self.manifest(&spec.set, &target.display().to_string()).await?;
            let mounted = self.mount_set(&spec.set, &manifest, feed, "set")?;
            let shown = if spec.single_file {
                mounted.join(only_name(&manifest).ok_or(PlaceError::NotOneFile { path: target.clone() })?)
            } else {
                mounted
            };
            binds.push(Bind { source: shown, target, access: Access::ReadOnly });
        }
        let mut outputs = Vec::new();
        let mut settling = Vec::new();
        let mut changes_to = None;
        for spec in &assignment.outputs {
            let (output, mounted) = self.mount_output(spec, &source, &outbox).await?;
            settling.push(output.start());
            if spec.path == WORKDIR_CHANGES {
                changes_to = Some((output, mounted));
            } else {
                outputs.push(output);
                binds.push(Bind { source: mounted, target: path_of(&spec.path), access: Access::ReadWrite });
            }
        }
        let (workdir_lower, workdir_manifest) = match &assignment.workdir {
            Some(set) => {
                let manifest = self.manifest(set, "the workdir").await?;
                let lower = self.mount_set(set, &manifest, feed, "workdir")?;
                (Some(lower), Some((manifest, set.clone())))
            }
            None => (None, None),
        };
        let layer = WorkdirLayer::create(self.private_dir, "workdir-layer")?;
        Ok(Place {
            binds,
            outputs,
            outbox,
            layer,
            workdir_lower,
            changes_to,
            traces,
            source,
            pushed,
            workdir_manifest,
            _uplink: uplink,
            _settling: settling,
        })
    }

    /// A writable workdir of our own, for a kernel that refuses an overlay over FUSE. Nothing of
    /// it goes home by itself: [`super::keeping`] does that.
    pub(super) fn ready_workdir(&self, place: &Place) -> Result<(Arc<Output>, PathBuf), PlaceError> {
        let stop = self.stop.child_token();
        let (lower, lower_set) = match &place.workdir_manifest {
            Some((manifest, set)) => (Some(manifest.clone()), Some(set.set)),
            None => (None, None),
        };
        let output = Output::new(OutputSettings {
            tree: TreeSettings {
                output: limb_common::assignment::OutputNumber(u32::MAX),
                lower,
                owner: (owner().uid, owner().gid),
                quota_bytes: None,
                quota_inodes: None,
                outbox: None,
            },
            durability: Durability::None,
            lower_set,
            source: Arc::clone(&place.source) as Arc<dyn ChunkSource>,
            stop: stop.clone(),
        });
        let fs = WriteFs::new(Arc::clone(&output), Handle::current());
        let mount = self.mount(fs, ("workdir-rw", Seen::ByJob), false, stop, "the workdir")?;
        Ok((output, mount.path().to_owned()))
    }

    fn outbox(&self) -> Arc<Outbox> {
        let reporter = self.reporter.clone();
        let refused = Box::new(move |refusal: Refusal| {
            let path = String::from_utf8_lossy(&refusal.path);
            let text = format!("{path}: home refused it: {}", refusal.detail);
            notice(&reporter, "result-refused", text);
        });
        let settings = OutboxSettings { dirty_bytes: DIRTY_BYTES, clean_bytes: CLEAN_BYTES };
        Outbox::new(settings, refused, self.stop.clone())
    }

    async fn manifest(&self, set: &SetSpec, what: &str) -> Result<Manifest, PlaceError> {
        fetch_manifest(self.link.as_ref(), set, self.stop)
            .await
            .map_err(|source| PlaceError::Manifest { what: what.to_owned(), source })
    }

    fn mount_set(
        &self,
        set: &SetSpec,
        manifest: &Manifest,
        feed: Feed<'_>,
        kind: &str,
    ) -> Result<PathBuf, PlaceError> {
        let stop = self.stop.child_token();
        let reporter = self.reporter.clone();
        let source = Arc::clone(feed.source) as Arc<dyn ChunkSource>;
        let push =
            feed.pushed.map(|stats| Pusher::new(manifest.clone(), Arc::clone(&source), Arc::clone(stats)));
        let (pusher, push) = push.unzip();
        let fs = ReadFs::new(ReadFsOptions {
            manifest: manifest.clone(),
            set: set.set,
            source,
            owner: owner(),
            on_problem: Arc::new(move |path, error| {
                let kind = match error {
                    FetchError::SourceChanged { .. } => "source-changed",
                    FetchError::Corrupt { .. } => "corrupt-data",
                    FetchError::NotFound | FetchError::Io { .. } => "unreadable",
                    FetchError::Closed => return,
                };
                notice(&reporter, kind, format!("{}: {error}", path.display()));
            }),
            trace: feed.traces.map(|traces| traces.begin(set.set, manifest)),
            push,
            stop: stop.clone(),
            runtime: Handle::current(),
        });
        let name = format!("{kind}-{}", set.set.0);
        let mount = self.mount(fs, (&name, Seen::ByJob), true, stop, kind)?;
        if let Some(pusher) = pusher
            && let Err(error) = pusher.start(mount.storer())
        {
            tracing::warn!(mount = name, %error, "nothing will be pushed into the page cache");
        }
        Ok(mount.path().to_owned())
    }

    async fn mount_output(
        &self,
        spec: &OutputSpec,
        source: &Arc<Fetcher>,
        outbox: &Arc<Outbox>,
    ) -> Result<(Arc<Output>, PathBuf), PlaceError> {
        let what = path_of(&spec.path).display().to_string();
        let lower = match &spec.lower {
            Some(set) => Some(self.manifest(set, &what).await?),
            None => None,
        };
        let stop = self.stop.child_token();
        let output = Output::new(OutputSettings {
            tree: TreeSettings {
                output: spec.output,
                lower,
                owner: (owner().uid, owner().gid),
                quota_bytes: spec.quota_bytes,
                quota_inodes: spec.quota_inodes,
                outbox: Some(Arc::clone(outbox)),
            },
            durability: spec.durability,
            lower_set: spec.lower.as_ref().map(|set| set.set),
            source: Arc::clone(source) as Arc<dyn ChunkSource>,
            stop: stop.clone(),
        });
        let fs = WriteFs::new(Arc::clone(&output), Handle::current());
        let seen = if spec.path == WORKDIR_CHANGES { Seen::ByAgent } else { Seen::ByJob };
        let mount = self.mount(fs, (&format!("output-{}", spec.output.0), seen), false, stop, &what)?;
        Ok((output, mount.path().to_owned()))
    }

    fn mount(
        &self,
        fs: impl fuser::Filesystem,
        (name, seen): (&str, Seen),
        read_only: bool,
        stop: CancellationToken,
        what: &str,
    ) -> Result<Arc<MountSession>, PlaceError> {
        let path = self.private_dir.join("mounts").join(name);
        fs::create_dir_all(&path)?;
        let options = MountOptions { path, read_only, name: name.to_owned(), stop };
        let mount = MountSession::mount(fs, options)
            .map_err(|source| PlaceError::Mount { what: what.to_owned(), source })?;
        let session = Arc::new(mount);
        self.mounts.add(seen, Arc::clone(&session));
        Ok(session)
    }
}

impl Place {
    pub(super) fn view(&self, private_dir: &Path, hide: &[PathBuf], workdir: Workdir) -> io::Result<View> {
        let staging = private_dir.join("staging");
        fs::create_dir_all(&staging)?;
        Ok(View {
            staging,
            mounts: self.binds.clone(),
            workdir,
            hide: hidden(private_dir, hide),
            home: PathBuf::from(crate::job::view::HOME),
        })
    }

    pub(super) fn layered_workdir(&self) -> Workdir {
        let layer = self.layer.path().to_owned();
        match &self.workdir_lower {
            Some(lower) => Workdir::Overlay { lower: lower.clone(), layer },
            None => Workdir::Empty { layer },
        }
    }
}

/// The private directory, and what the settings name. One below another is hidden with it: shown
/// again as an empty directory it would tell its name.
fn hidden(private_dir: &Path, named: &[PathBuf]) -> Vec<PathBuf> {
    let all: Vec<&Path> = named.iter().map(PathBuf::as_path).chain([private_dir]).collect();
    let is_inner = |path: &Path| all.iter().any(|other| *other != path && path.starts_with(other));
    all.iter().filter(|path| !is_inner(path)).map(|path| path.to_path_buf()).collect()
}

pub(super) fn notice(reporter: &Reporter, kind: &str, text: String) {
    tracing::warn!(kind, text, "noticed");
    if !reporter.try_report(BoxEvent::Noticed { kind: kind.to_owned(), text }) {
        tracing::error!("too many notices wait for home: one was lost");
    }
}

/// Files appear as the job's own.
fn owner() -> Owner {
    Owner { uid: nix::unistd::geteuid().as_raw(), gid: nix::unistd::getegid().as_raw() }
}

fn path_of(bytes: &[u8]) -> PathBuf {
    PathBuf::from(OsStr::from_bytes(bytes))
}

fn only_name(manifest: &Manifest) -> Option<PathBuf> {
    let root = manifest.node(ROOT)?;
    let mut children = root.children();
    let (name, _) = children.next()?;
    children.next().is_none().then(|| path_of(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_under_something_hidden_is_not_shown_as_an_empty_directory() {
        let private = Path::new("/state/local/box/private");
        assert_eq!(hidden(private, &[]), [private]);
        assert_eq!(hidden(private, &["/state".into()]), [Path::new("/state")]);
        assert_eq!(hidden(private, &["/stat".into()]), [Path::new("/stat"), private]);
    }
}
