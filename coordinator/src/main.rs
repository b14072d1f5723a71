//! `limb`: hands the machine's own edges to the program.

use std::process::ExitCode;

fn main() -> ExitCode {
    limb_common::memory::keep_large_buffers();
    limb::cli::main(&limb::cli::Edges::default())
}
