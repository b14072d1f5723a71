//! fio, which checks each block that it reads against what it wrote into it.

use std::path::Path;
use std::process::{Command, Stdio};

use limb_tests::home::lacks;

use crate::rig::{Rig, Serving};
use crate::{TTL, cannot_run, is_long};

fn fio(arguments: &[&str], file: &Path, elsewhere: &Path) {
    let ended = Command::new("timeout")
        .args(["600", "fio", "--bs=64k", "--verify=crc32c", "--verify_interval=4k", "--verify_fatal=1"])
        .args(arguments)
        .arg("--filename")
        .arg(file)
        .current_dir(elsewhere)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let (said, complained) = (String::from_utf8_lossy(&ended.stdout), String::from_utf8_lossy(&ended.stderr));
    assert!(ended.status.success(), "fio {arguments:?}: {}\n{said}\n{complained}", ended.status);
}

#[test]
fn fio_verifies_what_it_reads_in_order_at_random_and_mapped() {
    let there = Command::new("fio").arg("--version").stdout(Stdio::null()).status().is_ok();
    if cannot_run() || lacks("fio is not installed (apt install fio)", there) {
        return;
    }
    let elsewhere = tempfile::tempdir().unwrap();
    let size = if is_long() { "--size=64M" } else { "--size=6M" };
    let rig = Rig::new(Serving::Home, 3 << 20, TTL, |root| {
        let layout = ["--name=layout", size, "--rw=write", "--do_verify=0", "--ioengine=psync"];
        fio(&layout, &root.join("f"), elsewhere.path());
    });
    let file = rig.mounted().join("f");
    for (engine, order) in [
        ("psync", "read"),
        ("psync", "randread"),
        ("mmap", "read"),
        ("mmap", "randread"),
        ("libaio", "randread"),
    ] {
        let (engine, order) = (format!("--ioengine={engine}"), format!("--rw={order}"));
        fio(&["--name=reading", "--readonly", size, &engine, &order], &file, elsewhere.path());
    }
    let both = ["--name=reading", "--readonly", size, "--rw=randread", "--numjobs=4", "--ioengine=psync"];
    fio(&both, &file, elsewhere.path());
    assert_eq!(*rig.problems.lock().unwrap(), []);
    rig.assert_nothing_left();
}
