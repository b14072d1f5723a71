//! Starts jobs and reads what they say.

use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use limb_agent::job::{Access, Bind, JobError, JobSpec, Limits, RunningJob, View, Workdir, base_env};
use limb_common::assignment::Command;
use limb_common::clock::boottime;
use limb_common::report::{EndedBy, JobEnd};

/// Longer than any of these jobs lives on a busy machine.
pub(crate) const BOUND: Duration = Duration::from_secs(60);

/// Waits for something about the machine, bounded.
pub(crate) fn wait_for(what: &str, mut holds: impl FnMut() -> bool) {
    let end = boottime() + BOUND;
    while !holds() {
        assert!(boottime() < end, "never came: {what}");
        std::thread::park_timeout(Duration::from_millis(5));
    }
}

pub(crate) fn program() -> PathBuf {
    std::env::var_os("LIMB_TEST_AGENT").map_or_else(|| env!("CARGO_BIN_EXE_limb-agent").into(), PathBuf::from)
}

/// A private directory like the agent's: gone with the test.
pub(crate) struct Place {
    pub(crate) dir: tempfile::TempDir,
}

impl Place {
    pub(crate) fn new() -> Self {
        let dir = tempfile::Builder::new().prefix("limb-job-test-").tempdir().unwrap();
        for name in ["root", "layer/upper", "layer/work", "lower"] {
            std::fs::create_dir_all(dir.path().join(name)).unwrap();
        }
        Self { dir }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    pub(crate) fn view(&self) -> View {
        View {
            staging: self.path("root"),
            mounts: Vec::new(),
            workdir: Workdir::Empty { layer: self.path("layer") },
            hide: vec![self.dir.path().to_owned()],
            home: "/home/job".into(),
        }
    }

    pub(crate) fn spec(&self, command: Command) -> JobSpec {
        let view = self.view();
        JobSpec {
            setup: None,
            command,
            env: base_env(&view),
            secrets: Vec::new(),
            cwd: None,
            view,
            limits: Limits::default(),
            init_program: program(),
        }
    }

    pub(crate) fn script(&self, text: &str) -> JobSpec {
        self.spec(Command::Script(text.to_owned()))
    }
}

pub(crate) fn argv(words: &[&str]) -> Command {
    Command::Argv(words.iter().map(|word| word.as_bytes().to_vec()).collect())
}

pub(crate) fn read_only(source: &Path, target: &str) -> Bind {
    Bind { source: source.to_owned(), target: target.into(), access: Access::ReadOnly }
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// Runs a job to its end: how, and all its output.
pub(crate) fn run(spec: JobSpec) -> (JobEnd, Vec<u8>) {
    try_run(spec).unwrap()
}

pub(crate) fn try_run(spec: JobSpec) -> Result<(JobEnd, Vec<u8>), JobError> {
    runtime().block_on(async {
        let mut job = RunningJob::start(spec).await?;
        let reader = read_all(&mut job);
        let end = tokio::time::timeout(BOUND, job.wait()).await.unwrap();
        assert!(job.is_gone());
        Ok((end, reader.join().unwrap()))
    })
}

pub(crate) fn read_all(job: &mut RunningJob) -> std::thread::JoinHandle<Vec<u8>> {
    let mut output = job.take_output().unwrap();
    std::thread::spawn(move || {
        let mut all = Vec::new();
        output.read_to_end(&mut all).unwrap();
        all
    })
}

pub(crate) fn text(output: &[u8]) -> String {
    String::from_utf8_lossy(output).trim().to_owned()
}

pub(crate) fn exit(code: i32) -> EndedBy {
    EndedBy::Exit(code)
}
