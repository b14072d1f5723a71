//! From what was typed to the message that a coordinator understands: the job file as text, the
//! values that it leaves to the submitter, the directory where its relative paths start.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use limb_common::jobfile::{ARGV_FILE_NAME, ArgvJob, JobFile};
use limb_proto::v1::{EnvPair, JobSource};

use super::args::JobArgs;
use super::talk::Failure;

/// Longest job file: a person wrote it.
const MAX_JOB_FILE_BYTES: u64 = 1024 * 1024;

/// Reads and checks the job here, so that what is wrong with it is said before a coordinator is
/// even started.
pub(super) fn source(args: &JobArgs) -> Result<JobSource, Failure> {
    let cwd = std::env::current_dir().context("the current directory is gone").map_err(Failure::refused)?;
    let argv: Vec<Vec<u8>> = args.argv.iter().map(|word| word.clone().into_vec()).collect();
    let (yaml, file_name, base, parsed) = match &args.job {
        Some(path) => {
            let yaml = read(path).map_err(Failure::refused)?;
            let name = path.to_string_lossy().into_owned();
            let base = cwd.join(path).parent().map_or_else(|| cwd.clone(), Path::to_owned);
            let parsed = JobFile::parse(&yaml, &name, &base).map_err(Failure::refused)?;
            (yaml, name, base, parsed)
        }
        None => {
            let flags = flags(args);
            let yaml = flags.to_yaml(&argv).map_err(Failure::refused)?;
            let parsed = JobFile::from_argv(&flags, &cwd, argv.clone()).map_err(Failure::refused)?;
            (yaml, ARGV_FILE_NAME.to_owned(), cwd, parsed)
        }
    };
    let values = |names: &[&str]| -> Result<BTreeMap<String, String>, Failure> {
        let mut found = BTreeMap::new();
        for name in names {
            if let Some(value) = std::env::var_os(name) {
                let value = value.into_string().map_err(|_| {
                    Failure::refused(anyhow::anyhow!("the variable `{name}` is not UTF-8 text"))
                })?;
                found.insert((*name).to_owned(), value);
            }
        }
        Ok(found)
    };
    let wanted = parsed.wanted();
    let (env, secrets) = (values(&wanted.env)?, values(&wanted.secrets)?);
    // Says which line asks for a value that is not there.
    drop(parsed.bind(&env, &secrets).map_err(Failure::refused)?);
    Ok(JobSource {
        yaml,
        file_name,
        base_dir: text(base)?,
        env: pairs(env),
        secrets: pairs(secrets),
        provider: args.on.clone().unwrap_or_default(),
        argv: argv.into_iter().map(Into::into).collect(),
    })
}

fn flags(args: &JobArgs) -> ArgvJob {
    ArgvJob {
        name: args.name.clone(),
        workdir: args.workdir.clone(),
        mounts: args.mount.clone(),
        outputs: args.output.clone(),
        env: args.env.clone(),
        secrets: args.secret.clone(),
        max_duration: args.max_duration.clone(),
        max_cost: args.max_cost.clone(),
        stop_duration: args.stop_duration.clone(),
        disconnect_grace: args.disconnect_grace.clone(),
        trace: args.trace.clone(),
        push: args.push.clone(),
        cache_memory: args.cache_memory.clone(),
        cache_disk: args.cache_disk.clone(),
    }
}

fn read(path: &Path) -> anyhow::Result<String> {
    let name = path.display();
    let size = std::fs::metadata(path).with_context(|| format!("could not read the job file {name}"))?.len();
    anyhow::ensure!(
        size <= MAX_JOB_FILE_BYTES,
        "{name} has {size} bytes, more than the {MAX_JOB_FILE_BYTES} of any job file; hint: is it one?"
    );
    std::fs::read_to_string(path).with_context(|| format!("could not read the job file {name}"))
}

fn text(path: PathBuf) -> Result<String, Failure> {
    path.into_os_string().into_string().map_err(|path| {
        Failure::refused(anyhow::anyhow!(
            "the directory {} is not UTF-8 text; hint: put the job file into another one",
            path.display()
        ))
    })
}

fn pairs(values: BTreeMap<String, String>) -> Vec<EnvPair> {
    values.into_iter().map(|(name, value)| EnvPair { name, value }).collect()
}
