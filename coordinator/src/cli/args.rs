//! What can be typed. Help, completions, man pages and docs/reference come from here.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

/// Run a job on a rented machine that sees your data as if it were here, brings its results home
/// while it runs, and is gone afterwards.
#[derive(Debug, Parser)]
#[command(name = "limb", version, max_term_width = 100, disable_help_subcommand = true)]
pub(super) struct Cli {
    #[command(flatten)]
    pub(super) common: Common,
    #[command(subcommand)]
    pub(super) command: Command,
}

#[derive(Debug, Args)]
pub(super) struct Common {
    /// Settings file [default: $XDG_CONFIG_HOME/limb/limb.toml]
    #[arg(long, global = true, value_name = "FILE")]
    pub(super) config: Option<PathBuf>,
    /// One setting, over environment and file (see `limb config show`)
    #[arg(long, global = true, value_name = "KEY=VALUE")]
    pub(super) set: Vec<String>,
    /// Say less on stderr: errors, money and the box's end
    #[arg(short, long, global = true)]
    pub(super) quiet: bool,
    /// Say more on stderr
    #[arg(short, long, global = true, action = clap::ArgAction::Count, conflicts_with = "quiet")]
    pub(super) verbose: u8,
}

#[derive(Debug, Subcommand)]
pub(super) enum Command {
    /// Plan, confirm, run, stream, bring home, destroy; ends with the job's own exit code
    Run(RunArgs),
    /// What `run` would do and what it would cost at most; starts nothing
    Plan(PlanArgs),
    /// Runs that are not over (`-a`: all)
    Ps(PsArgs),
    /// The job's output, byte for byte
    Logs(LogsArgs),
    /// What happened to a run
    Events(EventsArgs),
    /// Stop a run: the job gets SIGTERM, results are drained, the box is destroyed
    Stop(StopArgs),
    /// What came home
    #[command(subcommand)]
    Results(ResultsCommand),
    /// Frozen working sets
    #[command(subcommand)]
    Snapshot(SnapshotCommand),
    /// What was paid, from the ledger
    Cost(CostArgs),
    /// Compare every provider's list with the ledger and destroy what nobody explains
    Reap(ReapArgs),
    /// The coordinator itself
    Serve(ServeArgs),
    /// limb's settings
    #[command(subcommand)]
    Config(ConfigCommand),
    /// Does this machine have what limb needs?
    Doctor(DoctorArgs),
    /// Completions for a shell, on stdout
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
    /// The manual page, on stdout
    Man(ManArgs),
}

/// A job: a file, or a command with flags.
#[derive(Debug, Args)]
pub(super) struct JobArgs {
    /// The job file
    #[arg(value_name = "JOB.yaml", required_unless_present = "argv", conflicts_with = "argv")]
    pub(super) job: Option<PathBuf>,
    /// Where to run: a provider's name, like `local`
    #[arg(long, value_name = "PROVIDER")]
    pub(super) on: Option<String>,
    /// Name of the run (with `-- CMD`)
    #[arg(long, requires = "argv")]
    pub(super) name: Option<String>,
    /// Copied along, writable on the box, the job's cwd (with `-- CMD`)
    #[arg(long, value_name = "DIR", requires = "argv")]
    pub(super) workdir: Option<String>,
    /// A directory or file of home that the job reads, where it sees it, and its data class
    #[arg(long, value_name = "SRC:PATH[:CLASS]", requires = "argv")]
    pub(super) mount: Vec<String>,
    /// A directory that the job writes, and where that lands at home
    #[arg(long, value_name = "PATH:DEST", requires = "argv")]
    pub(super) output: Vec<String>,
    /// A variable for the job; without a value, yours
    #[arg(long, value_name = "NAME[=VALUE]", requires = "argv")]
    pub(super) env: Vec<String>,
    /// A variable of yours that is nobody else's business
    #[arg(long, value_name = "NAME", requires = "argv")]
    pub(super) secret: Vec<String>,
    /// Ends the job [default: 24h]
    #[arg(long, value_name = "DURATION", requires = "argv")]
    pub(super) max_duration: Option<String>,
    /// Ends the job before it costs more dollars, all attempts together [default: 25.00]
    #[arg(long, value_name = "DOLLARS", requires = "argv")]
    pub(super) max_cost: Option<String>,
    /// From a stop to the end of the box: half of it (60s at most) between SIGTERM and SIGKILL, the rest for results on their way [default: 5m]
    #[arg(long, value_name = "DURATION", requires = "argv")]
    pub(super) stop_duration: Option<String>,
    /// How long the box goes on without hearing from home [default: 20m]
    #[arg(long, value_name = "DURATION", requires = "argv")]
    pub(super) disconnect_grace: Option<String>,
    /// Record which data the job touches first, and read it ahead when the job runs again [default: on]
    #[arg(long, value_name = "on|off", requires = "argv")]
    pub(super) trace: Option<String>,
    /// Put what is on the box into the page cache before a sequential reader comes to it [default: off]
    #[arg(long, value_name = "on|off", requires = "argv")]
    pub(super) push: Option<String>,
    /// Memory on the box for what the job has read [default: 512MiB]
    #[arg(long, value_name = "SIZE", requires = "argv")]
    pub(super) cache_memory: Option<String>,
    /// Disk on the box for more of it, encrypted under a key that ends with the agent [default: off]
    #[arg(long, value_name = "SIZE", requires = "argv")]
    pub(super) cache_disk: Option<String>,
    /// The command, executed without a shell
    #[arg(last = true, value_name = "CMD")]
    pub(super) argv: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(super) struct RunArgs {
    #[command(flatten)]
    pub(super) job: JobArgs,
    /// Do not ask
    #[arg(short, long)]
    pub(super) yes: bool,
    /// Submit, print the run's id and return; `limb logs -f` follows it
    #[arg(short, long)]
    pub(super) detach: bool,
    /// Rent although no service manager would restart a coordinator that dies
    #[arg(long)]
    pub(super) unsupervised: bool,
    /// One JSON document at the end, on stdout; the job's output goes to stderr
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Args)]
pub(super) struct PlanArgs {
    #[command(flatten)]
    pub(super) job: JobArgs,
    /// JSON, on stdout
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Args)]
pub(super) struct PsArgs {
    /// Runs that are over, too
    #[arg(short, long)]
    pub(super) all: bool,
    /// JSON, on stdout
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Args)]
pub(super) struct LogsArgs {
    /// A run's id or name (of runs with one name, the newest)
    pub(super) run: String,
    /// Go on until the run is over
    #[arg(short, long)]
    pub(super) follow: bool,
    /// Start at this byte
    #[arg(long, default_value_t = 0, value_name = "BYTES")]
    pub(super) offset: u64,
    /// Only this attempt's [default: all, in order]
    #[arg(long, default_value_t = 0, hide_default_value = true, value_name = "NUMBER")]
    pub(super) attempt: u32,
}

#[derive(Debug, Args)]
pub(super) struct EventsArgs {
    /// A run's id or name
    pub(super) run: String,
    /// Go on until the run is over
    #[arg(short, long)]
    pub(super) follow: bool,
    /// One JSON document per line
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Args)]
pub(super) struct StopArgs {
    /// A run's id or name
    pub(super) run: String,
    /// Kept in the ledger
    #[arg(long, default_value = "", hide_default_value = true)]
    pub(super) reason: String,
    /// JSON, on stdout
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Subcommand)]
pub(super) enum ResultsCommand {
    /// Files that came home, with their hashes, and what among them is a checkpoint
    Ls {
        /// A run's id or name
        run: String,
        /// Checkpoints only: the newest last, complete or not
        #[arg(long)]
        checkpoints: bool,
        /// JSON, on stdout
        #[arg(long)]
        json: bool,
    },
    /// Copy them somewhere, checked against their hashes
    Get {
        /// A run's id or name
        run: String,
        /// One file or directory of the results [default: all]
        path: Option<PathBuf>,
        /// Only the complete checkpoint that came last
        #[arg(long, conflicts_with_all = ["path", "watch"])]
        newest_checkpoint: bool,
        /// Go on until the run is over: copy what comes, each checkpoint once it is complete
        #[arg(long)]
        watch: bool,
        /// The directory to copy into
        #[arg(long, value_name = "DIR")]
        to: PathBuf,
        /// JSON, on stdout
        #[arg(long)]
        json: bool,
    },
    /// Hash every file again and compare
    Verify {
        /// A run's id or name
        run: String,
        /// JSON, on stdout
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Subcommand)]
pub(super) enum SnapshotCommand {
    /// Freeze a directory or file
    Create {
        /// The directory or file
        source: PathBuf,
        /// Make what links outside point at part of the set
        #[arg(long)]
        follow_links: bool,
        /// Copy every file, as for a workdir
        #[arg(long)]
        copy: bool,
        /// JSON, on stdout
        #[arg(long)]
        json: bool,
    },
    /// Snapshots that are kept
    Ls {
        /// JSON, on stdout
        #[arg(long)]
        json: bool,
    },
    /// What differs between two
    Diff {
        /// A snapshot's id, or its beginning
        before: String,
        /// The other one
        after: String,
        /// JSON, on stdout
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Args)]
pub(super) struct CostArgs {
    /// Only this month
    #[arg(long, value_name = "YYYY-MM", conflicts_with = "run")]
    pub(super) month: Option<String>,
    /// Only this run
    #[arg(long)]
    pub(super) run: Option<String>,
    /// Comma-separated, with exact micro-dollars
    #[arg(long, conflicts_with = "json")]
    pub(super) csv: bool,
    /// JSON, on stdout
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Args)]
pub(super) struct ReapArgs {
    /// Say what would be destroyed
    #[arg(long)]
    pub(super) dry_run: bool,
    /// JSON, on stdout
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Args)]
pub(super) struct ServeArgs {
    /// Run it as a child and start it again after a crash
    #[arg(long)]
    pub(super) supervise: bool,
    /// End the running coordinator, until the next `limb serve` or `limb run`; boxes of live runs go on until their leases end
    #[arg(long, conflicts_with = "supervise")]
    pub(super) stop: bool,
    /// With --stop: even while runs are live
    #[arg(long, requires = "stop")]
    pub(super) force: bool,
    /// Who starts it again after a crash
    #[arg(long, hide = true, conflicts_with_all = ["supervise", "stop"])]
    pub(super) supervised_by: Option<String>,
    /// A command started it: it ends when idle (setting `idle_exit`)
    #[arg(long, hide = true)]
    pub(super) idle_exit: bool,
}

#[derive(Debug, Subcommand)]
pub(super) enum ConfigCommand {
    /// Every setting, its value and where it comes from
    Show {
        /// JSON, on stdout
        #[arg(long)]
        json: bool,
    },
}

#[derive(Debug, Args)]
pub(super) struct DoctorArgs {
    /// JSON, on stdout
    #[arg(long)]
    pub(super) json: bool,
}

#[derive(Debug, Args)]
pub(super) struct ManArgs {
    /// Write every command's page into this directory
    #[arg(long, value_name = "DIR", conflicts_with = "markdown")]
    pub(super) all: Option<PathBuf>,
    /// The reference as Markdown (docs/reference/cli.md)
    #[arg(long)]
    pub(super) markdown: bool,
}
