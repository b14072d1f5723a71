//! `limb`: hands the machine's own edges to the program.

use std::process::ExitCode;

fn main() -> ExitCode {
    limb::cli::main(&limb::cli::Edges::default())
}
