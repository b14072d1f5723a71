//! A home of its own: settings, state, sources and results under one temporary directory, the
//! real `limb` and `limb-agent`, and a check at the end that nothing of it is left running.

use std::fs;
use std::io::Write as _;
use std::net::TcpListener;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;

use crate::processes;
use crate::proxy::Proxy;
use crate::wait::wait_for;

#[derive(Debug)]
pub struct Home {
    root: tempfile::TempDir,
    coordinator: Option<Child>,
    proxy: Option<Proxy>,
    program: PathBuf,
    user: Option<u32>,
}

/// How a client ended.
#[derive(Debug)]
pub struct Ended {
    pub code: i32,
    pub stdout: String,
    pub stderr: String,
}

impl From<Output> for Ended {
    fn from(output: Output) -> Self {
        Self {
            code: output.status.code().unwrap_or(-1),
            stdout: String::from_utf8_lossy(&output.stdout).into_owned(),
            stderr: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

/// A client that runs beside the test.
#[derive(Debug)]
pub struct Client {
    child: Child,
    pub stdout: PathBuf,
    pub stderr: PathBuf,
}

impl Client {
    pub fn interrupt(&self) {
        signal(&self.child, Signal::SIGINT);
    }

    pub fn kill(&self) {
        signal(&self.child, Signal::SIGKILL);
    }

    /// What it has printed so far.
    #[must_use]
    pub fn out(&self) -> String {
        fs::read(&self.stdout).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default()
    }

    #[must_use]
    pub fn err(&self) -> String {
        fs::read(&self.stderr).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default()
    }

    /// # Panics
    /// When it does not end in time; the panic shows what it said.
    pub fn wait(mut self) -> Ended {
        let (stdout, stderr) = (self.stdout.clone(), self.stderr.clone());
        let read = |path: &Path| {
            fs::read(path).map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default()
        };
        let status =
            wait_for(&format!("the client to end; it said:\n{}\n{}", read(&stdout), read(&stderr)), || {
                self.child.try_wait().expect("a child can be waited for")
            });
        Ended { code: status.code().unwrap_or(-1), stdout: read(&stdout), stderr: read(&stderr) }
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

fn signal(child: &Child, signal: Signal) {
    let pid = Pid::from_raw(child.id().try_into().expect("pids are positive"));
    let _gone = kill(pid, signal);
}

/// `target/debug` (or wherever this test was built to).
///
/// # Panics
/// Never in a cargo test.
#[must_use]
pub fn binaries() -> PathBuf {
    let test = std::env::current_exe().expect("a running program has a path");
    test.ancestors().nth(2).expect("target/debug/deps/test").to_owned()
}

impl Default for Home {
    fn default() -> Self {
        Self::new()
    }
}

impl Home {
    /// # Panics
    /// When the temporary directory cannot be made.
    #[must_use]
    pub fn new() -> Self {
        Self::build("limb", false, None)
    }

    /// Boxes reach this home through a relay that can be cut.
    #[must_use]
    pub fn behind_a_cable() -> Self {
        Self::build("limb", true, None)
    }

    /// The program with the scriptable fake provider registered.
    #[must_use]
    pub fn with_fake_provider() -> Self {
        Self::build("limb-fake", false, None)
    }

    /// Everything runs as this user.
    #[must_use]
    pub fn of_user(uid: u32) -> Self {
        Self::build("limb", false, Some(uid))
    }

    fn build(program: &'static str, cable: bool, user: Option<u32>) -> Self {
        // Not under /tmp: a job's /tmp is its own, and the tests signal jobs through files.
        let place = if user.is_some() { std::env::temp_dir() } else { binaries().join("e2e") };
        fs::create_dir_all(&place).expect("a directory of ours");
        let root = tempfile::Builder::new().prefix("limb-").tempdir_in(place).expect("a temporary directory");
        let free = TcpListener::bind("127.0.0.1:0").and_then(|l| l.local_addr()).expect("a free port");
        let proxy = cable.then(|| Proxy::start(free));
        let bin = match user {
            None => binaries(),
            // The workspace may lie where another user cannot look.
            Some(_) => {
                let copies = root.path().join("bin");
                fs::create_dir(&copies).expect("a directory of ours");
                for name in [program, "limb-agent"] {
                    fs::copy(binaries().join(name), copies.join(name)).expect("the binaries are built");
                }
                copies
            }
        };
        let mut settings = format!("listen = \"{free}\"\nagent = \"{}\"\n", bin.join("limb-agent").display());
        if let Some(proxy) = &proxy {
            settings.push_str(&format!("advertise = \"{}\"\n", proxy.address()));
        }
        let home = Self { root, coordinator: None, proxy, program: bin.join(program), user };
        for directory in ["config/limb", "state", "run", "src", "dest", "cwd"] {
            fs::create_dir_all(home.path(directory)).expect("a directory of ours");
        }
        home.write("config/limb/limb.toml", settings);
        if let Some(uid) = user {
            let chown = Command::new("chown").args(["-R", &uid.to_string()]).arg(home.root.path()).status();
            assert!(chown.expect("chown runs").success());
        }
        home
    }

    #[must_use]
    pub fn path(&self, relative: impl AsRef<Path>) -> PathBuf {
        self.root.path().join(relative)
    }

    /// # Panics
    /// When the home was not made with a cable.
    #[must_use]
    pub fn cable(&self) -> &Proxy {
        self.proxy.as_ref().expect("made by behind_a_cable")
    }

    /// # Panics
    /// When the file cannot be written.
    pub fn write(&self, relative: impl AsRef<Path>, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(relative);
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent).expect("a directory of ours");
        }
        fs::write(&path, content).expect("a file of ours");
        path
    }

    /// Content of a file, or nothing yet.
    #[must_use]
    pub fn read(&self, relative: impl AsRef<Path>) -> Option<Vec<u8>> {
        fs::read(self.path(relative)).ok()
    }

    /// `limb …` with this home's environment.
    #[must_use]
    pub fn limb(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.program);
        command
            .args(arguments)
            .current_dir(self.path("cwd"))
            .env("XDG_CONFIG_HOME", self.path("config"))
            .env("XDG_STATE_HOME", self.path("state"))
            .env("XDG_RUNTIME_DIR", self.path("run"))
            .env("NO_COLOR", "1")
            .stdin(Stdio::null());
        if let Some(uid) = self.user {
            command.uid(uid).gid(uid).env("HOME", self.root.path());
        }
        command
    }

    /// Runs a command to its end.
    ///
    /// # Panics
    /// When the binary cannot be started.
    #[must_use]
    pub fn say(&self, arguments: &[&str]) -> Ended {
        self.limb(arguments).output().expect("the limb binary is built").into()
    }

    /// Starts a command and leaves it running.
    ///
    /// # Panics
    /// When the binary cannot be started.
    #[must_use]
    pub fn start(&self, arguments: &[&str]) -> Client {
        let number = fs::read_dir(self.path("run")).map(Iterator::count).unwrap_or_default();
        let stdout = self.path(format!("run/{number}.out"));
        let stderr = self.path(format!("run/{number}.err"));
        let child = self
            .limb(arguments)
            .stdout(fs::File::create(&stdout).expect("a file of ours"))
            .stderr(fs::File::create(&stderr).expect("a file of ours"))
            .spawn()
            .expect("the limb binary is built");
        Client { child, stdout, stderr }
    }

    /// Writes a job file; `{root}` in it stands for this home's directory.
    #[must_use]
    pub fn job(&self, name: &str, yaml: &str) -> String {
        let text = yaml.replace("{root}", &self.root.path().to_string_lossy());
        self.write(format!("cwd/{name}.yaml"), format!("name: {name}\n{text}")).to_string_lossy().into_owned()
    }

    /// Starts the coordinator in the foreground as a child of the test, so that it can be killed.
    ///
    /// # Panics
    /// When it does not answer.
    pub fn serve(&mut self) {
        assert!(self.coordinator.is_none(), "one coordinator at a time");
        let log = fs::File::options()
            .append(true)
            .create(true)
            .open(self.path("run/serve.log"))
            .expect("a file of ours");
        let child = self
            .limb(&["serve"])
            .env("LIMB_LOG", "info,limb=debug")
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("the limb binary is built");
        self.coordinator = Some(child);
        // Not by a command: that would start another one.
        let settings = self.say(&["config", "show", "--json"]).stdout;
        let settings: Value = serde_json::from_str(&settings).expect("settings are JSON");
        let socket = settings["socket"]["value"].as_str().expect("there is a socket").to_owned();
        wait_for("the coordinator to answer", || UnixStream::connect(&socket).ok());
    }

    /// `kill -9`.
    ///
    /// # Panics
    /// When there is none.
    pub fn kill_coordinator(&mut self) {
        let mut child = self.coordinator.take().expect("a coordinator runs");
        child.kill().expect("our child");
        child.wait().expect("our child");
    }

    /// `limb run -y JOB` to its end.
    #[must_use]
    pub fn run(&self, name: &str, yaml: &str) -> Ended {
        let job = self.job(name, yaml);
        self.say(&["run", "-y", &job])
    }

    /// One run as `ps` shows it, by name.
    #[must_use]
    pub fn ps(&self, name: &str) -> Option<Value> {
        let ended = self.say(&["ps", "-a", "--json"]);
        let list: Value = serde_json::from_str(&ended.stdout).ok()?;
        list.as_array()?.iter().rev().find(|run| run["name"] == name).cloned()
    }

    /// Kinds and texts of a run's events, one line each.
    #[must_use]
    pub fn events(&self, name: &str) -> String {
        self.say(&["events", name]).stdout
    }

    /// The coordinator's own log, for a failing test's message.
    #[must_use]
    pub fn log(&self) -> String {
        self.read("run/serve.log").map(|b| String::from_utf8_lossy(&b).into_owned()).unwrap_or_default()
    }

    /// Limb's processes that name this home, and all that they started.
    #[must_use]
    pub fn processes(&self) -> Vec<(i32, String)> {
        processes::of_home(self.root.path())
    }

    /// Pids of the agents of this home.
    #[must_use]
    pub fn agents(&self) -> Vec<i32> {
        processes::agents(&self.path("state/limb/local"))
    }

    /// Mount points under this home, as this process sees them.
    #[must_use]
    pub fn mounts(&self) -> Vec<String> {
        let needle = self.root.path().to_string_lossy().into_owned();
        fs::read_to_string("/proc/self/mountinfo")
            .unwrap_or_default()
            .lines()
            .filter(|line| line.contains(&needle))
            .map(str::to_owned)
            .collect()
    }

    /// # Panics
    /// When something of a box is still there.
    pub fn assert_no_box_left(&self) {
        wait_for("every box to be gone", || self.agents().is_empty().then_some(()));
        assert_eq!(self.mounts(), Vec::<String>::new(), "a mount was left behind");
        let boxes: Vec<_> = fs::read_dir(self.path("state/limb/local"))
            .map(|entries| entries.flatten().map(|entry| entry.path()).collect())
            .unwrap_or_default();
        assert_eq!(boxes, Vec::<PathBuf>::new(), "a box's directory was left behind");
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let kept = std::env::temp_dir().join("limb-e2e-last-failure.log");
            drop(fs::write(kept, self.log()));
        }
        drop(self.say(&["serve", "--stop"]));
        if let Some(mut child) = self.coordinator.take() {
            drop(child.kill());
            drop(child.wait());
        }
        // Whatever a failing test left: only processes that name this home's own directory.
        for (pid, _) in self.processes() {
            let _gone = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        for line in self.mounts() {
            if let Some(point) = line.split(' ').nth(4) {
                let _gone = nix::mount::umount2(point, nix::mount::MntFlags::MNT_DETACH);
            }
        }
    }
}

/// Says loudly that this machine lacks something, and whether to skip.
#[must_use]
pub fn lacks(what: &str, there: bool) -> bool {
    if !there {
        // Past the test runner's capture: a skip must be seen, and the lanes count these lines.
        let test = std::thread::current().name().unwrap_or("test").to_owned();
        drop(writeln!(std::io::stderr(), "SKIPPED {test}: {what}"));
    }
    !there
}

/// `true` when the test must be skipped because nothing can be mounted here.
#[must_use]
pub fn lacks_fuse() -> bool {
    lacks("no /dev/fuse on this machine", Path::new("/dev/fuse").exists())
}

/// `true` when the test must be skipped because no group of a job could limit its memory here.
#[must_use]
pub fn lacks_memory_controller() -> bool {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let v1 = own.lines().any(|line| line.split(':').nth(1) == Some("memory"))
        && Path::new("/sys/fs/cgroup/memory").is_dir();
    let v2 = own.lines().find_map(|line| line.strip_prefix("0::/")).is_some_and(|path| {
        let group = Path::new("/sys/fs/cgroup").join(path);
        let has = |file: &str| fs::read_to_string(group.join(file)).is_ok_and(|text| text.contains("memory"));
        // Groups with processes of their own give nothing on; the root of all is the exception.
        let is_root = !group.join("cgroup.type").exists();
        has("cgroup.subtree_control") || (is_root && has("cgroup.controllers"))
    });
    let is_root = nix::unistd::geteuid().is_root();
    lacks("no memory controller for a job on this machine", is_root && (v1 || v2))
}
