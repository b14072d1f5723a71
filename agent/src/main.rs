//! The agent's program.

use std::process::ExitCode;

fn main() -> ExitCode {
    // First of all, before anything starts a thread: the job's helper is this program too.
    if std::env::args_os().nth(1).is_some_and(|word| word == "job-init") {
        return limb_agent::job::init::main();
    }
    ExitCode::FAILURE
}
