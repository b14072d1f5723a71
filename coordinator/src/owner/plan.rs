//! From a job file to what would happen: read, judged, frozen, priced. `Plan` shows it, `Submit`
//! makes it a run.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use limb_common::assignment::{Durability, WORKDIR_CHANGES};
use limb_common::class::{self, DataClass};
use limb_common::jobfile::{BoundEnv, Command, JobFile, Links, RetryEvent, Source};
use limb_common::units::Micros;
use limb_proto::v1 as proto;
use tonic::Status;

use super::{OwnerService, dests, internal, refused};
use crate::ledger::runs::durability_word;
use crate::ledger::{OutputRow, RunSpec, SetRow};
use crate::lifecycle::limits::Budget;
use crate::provider::{Offer, Provider};
use crate::snapshot::{LinkPolicy, Progress, Snapshot, SnapshotRequest};

/// Told what is hashed, and how far.
pub(super) type Told = Arc<dyn Fn(&Path, Progress) + Send + Sync>;

/// A job that was read and bound to where it would run.
#[derive(Debug)]
pub(super) struct Draft {
    pub(super) job: JobFile,
    pub(super) bound: BoundEnv,
    pub(super) provider: Arc<dyn Provider>,
    pub(super) offer: Offer,
    /// None: the provider has nothing under the job's `max_price`, said in words.
    pub(super) verdict: Result<String, String>,
}

/// A draft whose sets are frozen.
pub(super) struct Frozen {
    pub(super) draft: Draft,
    pub(super) workdir: Option<Snapshot>,
    pub(super) mounts: Vec<Snapshot>,
    /// The strictest of all that goes along.
    pub(super) class: DataClass,
}

fn invalid(problem: impl std::fmt::Display) -> Status {
    Status::invalid_argument(problem.to_string())
}

impl OwnerService {
    pub(super) async fn draft(&self, source: proto::JobSource) -> Result<Draft, Status> {
        let base = Path::new(&source.base_dir);
        let argv: Vec<Vec<u8>> = source.argv.iter().map(|word| word.to_vec()).collect();
        let job = if argv.is_empty() {
            JobFile::parse(&source.yaml, &source.file_name, base)
        } else {
            JobFile::parse_with_argv(&source.yaml, &source.file_name, base, argv)
        }
        .map_err(invalid)?;
        let pairs = |pairs: &[proto::EnvPair]| -> BTreeMap<String, String> {
            pairs.iter().map(|pair| (pair.name.clone(), pair.value.clone())).collect()
        };
        self.check_dests(&job).await?;
        let bound = job.bind(&pairs(&source.env), &pairs(&source.secrets)).map_err(invalid)?;
        let provider = self.choose_provider(&source.provider, &job)?;
        let offers =
            provider.offers().await.map_err(|e| Status::unavailable(limb_common::error::chain(&e)))?;
        let affordable =
            |offer: &Offer| job.resources.max_price.is_none_or(|most| offer.price_per_hour <= most);
        let offer = offers.iter().find(|offer| affordable(offer)).cloned().ok_or_else(|| {
            Status::failed_precondition(format!(
                "provider `{}` offers nothing within `max_price`; hint: raise it",
                provider.name()
            ))
        })?;
        let verdict = verdict(job.class(), &*provider);
        Ok(Draft { job, bound, provider, offer, verdict })
    }

    /// A place that cannot take the results is refused before a byte of a source is read.
    async fn check_dests(&self, job: &JobFile) -> Result<(), Status> {
        let dests: Vec<_> =
            job.outputs.iter().map(|output| output.dest.render(&job.name, "{run}", 1)).collect();
        let (places, settings) = (dests.clone(), Arc::clone(&self.settings));
        let look = move || places.iter().try_for_each(|dest| dests::check(dest, &settings.state_dir));
        let looked = tokio::task::spawn_blocking(look).await.map_err(|problem| internal(&problem))?;
        looked.map_err(|problem| invalid(limb_common::error::chain(&problem)))?;
        for dest in dests {
            self.data.results().check_free(&dest).await.map_err(|problem| refused(&problem))?;
        }
        Ok(())
    }

    fn choose_provider(&self, on: &str, job: &JobFile) -> Result<Arc<dyn Provider>, Status> {
        let providers = self.lifecycle.providers();
        let wanted: Vec<&str> = if !on.is_empty() {
            vec![on]
        } else if job.resources.infra.is_empty() {
            vec![&self.settings.provider]
        } else {
            job.resources.infra.iter().map(|infra| infra.provider.as_str()).collect()
        };
        if let Some(infra) = job.resources.infra.iter().find(|infra| on.is_empty() && infra.region.is_some())
        {
            return Err(Status::failed_precondition(format!(
                "`infra: {}/{}`: choosing a region is not built yet; hint: name the provider alone",
                infra.provider,
                infra.region.as_deref().unwrap_or_default()
            )));
        }
        wanted.iter().find_map(|name| providers.get(name)).cloned().ok_or_else(|| {
            let known: Vec<_> = providers.names().collect();
            Status::failed_precondition(format!(
                "no provider `{}` here; hint: configured are {}",
                wanted.join("`, `"),
                known.join(", ")
            ))
        })
    }

    pub(super) async fn freeze(&self, draft: Draft, told: &Told) -> Result<Frozen, Status> {
        // Data that may not go is not even read.
        if let Err(why) = &draft.verdict {
            return Err(Status::permission_denied(why.clone()));
        }
        let workdir = match &draft.job.workdir {
            Some(source) => Some(self.freeze_set(source, true, told).await?),
            None => None,
        };
        let mut mounts = Vec::new();
        for mount in &draft.job.mounts {
            mounts.push(self.freeze_set(&mount.source, false, told).await?);
        }
        let class = mounts.iter().chain(&workdir).map(|set| set.class).max().unwrap_or(DataClass::Public);
        // A label inside a source may be stricter than the job file's.
        verdict(class, &*draft.provider).map_err(Status::permission_denied)?;
        Ok(Frozen { draft, workdir, mounts, class })
    }

    async fn freeze_set(&self, source: &Source, copy_all: bool, told: &Told) -> Result<Snapshot, Status> {
        let request = SnapshotRequest {
            source: source.path.clone(),
            class: source.class,
            copy_all,
            links: match source.links {
                Links::Keep => LinkPolicy::Keep,
                Links::Follow => LinkPolicy::Follow,
            },
        };
        let (path, told) = (source.path.clone(), Arc::clone(told));
        self.data
            .snapshots()
            .create_async(request, move |progress| told(&path, progress))
            .await
            .map_err(|e| refused(&e))
    }

    pub(super) async fn make_plan(
        &self,
        request: proto::PlanRequest,
        told: &Told,
    ) -> Result<proto::PlanReply, Status> {
        let draft = self.draft(request.job.unwrap_or_default()).await?;
        let at_most = budget(&draft).at_most();
        let mut reply = proto::PlanReply {
            name: draft.job.name.clone(),
            provider: draft.provider.name().to_owned(),
            offer: draft.offer.name.clone(),
            price_micros_per_hour: draft.offer.price_per_hour.0,
            at_most_micros: at_most.0,
            max_duration_ms: millis(draft.job.limits.max_duration),
            outputs: draft
                .job
                .outputs
                .iter()
                .map(|output| proto::PlanOutput {
                    path: output.path.display().to_string(),
                    // The run does not exist yet: what it will be called stays a placeholder.
                    dest: output.dest.render(&draft.job.name, "{run}", 1).display().to_string(),
                    durability: durability_word(output.durability).to_owned(),
                })
                .collect(),
            ..proto::PlanReply::default()
        };
        match &draft.verdict {
            Ok(words) => {
                reply.allowed = true;
                reply.verdict.clone_from(words);
            }
            Err(why) => {
                reply.verdict.clone_from(why);
                return Ok(reply);
            }
        }
        if !draft.provider.capabilities().is_local && self.standing.supervised_by.is_none() {
            reply.warnings.push(UNSUPERVISED.to_owned());
        }
        let frozen = self.freeze(draft, told).await?;
        let points = frozen.draft.job.mounts.iter().map(|mount| mount.path.display().to_string());
        let named = points.zip(&frozen.mounts);
        for (path, set) in frozen.workdir.iter().map(|set| ("workdir".to_owned(), set)).chain(named) {
            if !set.skipped.is_empty() {
                reply.warnings.push(format!(
                    "{}: {} devices, pipes, sockets or link loops are left out",
                    set.source.display(),
                    set.skipped.len()
                ));
            }
            reply.sets.push(proto::PlanSet {
                path,
                source: set.source.display().to_string(),
                files: set.files,
                bytes: set.bytes,
                class: set.class.to_string(),
                outside_links: set
                    .outside_links
                    .iter()
                    .map(|link| {
                        format!(
                            "{} -> {}",
                            String::from_utf8_lossy(&link.path),
                            String::from_utf8_lossy(&link.target)
                        )
                    })
                    .collect(),
            });
        }
        Ok(reply)
    }
}

/// Said where nobody would end a paid box if this process died.
pub(super) const UNSUPERVISED: &str = "nobody would start this coordinator again if it died, and no second reaper is \
                                       configured: a paid box could run on; hint: start it with `limb serve --supervise`, \
                                       or say --unsupervised";

fn verdict(class: DataClass, provider: &dyn Provider) -> Result<String, String> {
    let is_local = provider.capabilities().is_local;
    match class::clear(class, provider.name(), is_local) {
        Ok(cleared) if is_local => Ok(format!("class `{}` may run here: it stays at home", cleared.class())),
        Ok(cleared) => Ok(format!("class `{}` may go to `{}`", cleared.class(), provider.name())),
        Err(why) => Err(why.to_string()),
    }
}

pub(super) fn budget(draft: &Draft) -> Budget {
    Budget {
        max_duration: draft.job.limits.max_duration,
        max_cost: draft.job.limits.max_cost,
        spent: Micros(0),
        price_per_hour: draft.offer.price_per_hour,
        stop_duration: draft.job.limits.stop_duration,
        destroy_allowance: draft.provider.capabilities().destroy_allowance,
    }
}

pub(super) fn millis(duration: std::time::Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl Frozen {
    /// What the ledger keeps.
    /// What the job leaves changed in its workdir comes home below `changes_home`, one directory
    /// per run.
    pub(super) fn spec(&self, changes_home: &Path) -> RunSpec {
        use std::os::unix::ffi::OsStrExt as _;
        let Draft { job, bound, provider, offer, .. } = &self.draft;
        let row = |set: u32, path: &[u8], snapshot: &Snapshot| SetRow {
            set,
            path: path.to_vec(),
            manifest_id: snapshot.id.to_hex(),
            manifest_bytes: snapshot.manifest.as_bytes().len() as u64,
            single_file: snapshot.single_file,
            source: snapshot.source.clone(),
        };
        let (script, argv) = match &job.command {
            Command::Script(script) => (Some(script.clone()), Vec::new()),
            Command::Argv(argv) => (None, argv.clone()),
        };
        let mut outputs: Vec<OutputRow> = (0..)
            .zip(&job.outputs)
            .map(|(number, output)| OutputRow {
                output: number,
                path: output.path.clone(),
                dest: output.dest.as_path().to_owned(),
                durability: durability_word(output.durability).to_owned(),
            })
            .collect();
        // Also of a job without a workdir: it has an empty one to write into.
        outputs.push(OutputRow {
            output: outputs.len().try_into().unwrap_or(u32::MAX),
            path: Path::new(std::ffi::OsStr::from_bytes(WORKDIR_CHANGES)).to_owned(),
            dest: changes_home.join("{run}"),
            durability: durability_word(Durability::None).to_owned(),
        });
        let retries = |event| job.retry.on_events.contains(&event);
        RunSpec {
            name: job.name.clone(),
            provider: provider.name().to_owned(),
            offer: offer.name.clone(),
            price_micros_per_hour: offer.price_per_hour.0,
            class: self.class,
            mounts: (1..)
                .zip(&self.mounts)
                .zip(&job.mounts)
                .map(|((set, snapshot), mount)| row(set, mount.path.as_os_str().as_bytes(), snapshot))
                .collect(),
            workdir: self.workdir.as_ref().map(|snapshot| row(0, b"", snapshot)),
            outputs,
            env: bound.env.clone(),
            setup: job.setup.clone(),
            script,
            argv,
            workdir_changes_cap_bytes: limb_common::jobfile::WORKDIR_CHANGES_CAP_BYTES,
            trace: job.trace,
            push: job.push,
            cache: job.cache.clone(),
            max_duration_ms: millis(job.limits.max_duration),
            max_cost_micros: job.limits.max_cost.0,
            boot_timeout_ms: millis(job.limits.boot_timeout),
            stop_duration_ms: millis(job.limits.stop_duration),
            disconnect_grace_ms: millis(job.limits.disconnect_grace),
            memory_bytes: job.limits.memory_bytes,
            retry_no_capacity: retries(RetryEvent::NoCapacity),
            retry_preemption: retries(RetryEvent::Preemption),
            retry_lost: retries(RetryEvent::Lost),
            max_attempts: job.retry.max_attempts,
        }
    }

    /// A run that could not even pay for its own ending is refused before it starts.
    pub(super) fn check_budget(&self) -> Result<(), Status> {
        let budget = budget(&self.draft);
        if budget.affords_a_box() {
            return Ok(());
        }
        Err(Status::failed_precondition(format!(
            "max_cost {} does not even cover the ending of a box at {} per hour; hint: raise max_cost or shorten stop_duration",
            budget.max_cost, budget.price_per_hour
        )))
    }
}

impl std::fmt::Debug for Frozen {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Frozen").field("class", &self.class).finish_non_exhaustive()
    }
}

impl From<crate::ledger::LedgerError> for Status {
    fn from(problem: crate::ledger::LedgerError) -> Self {
        internal(&problem)
    }
}
