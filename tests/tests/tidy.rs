//! The shape of the code as tests: which crate may depend on which, where wire types may appear,
//! how long a file may get. A rule that is wrong is changed here, with its reason.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("the tests crate lies in the workspace").to_owned()
}

fn rust_files(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            rust_files(&path, found);
        } else if path.extension().is_some_and(|extension| extension == "rs") {
            found.push(path);
        }
    }
}

/// (path relative to the workspace, text before the file's own tests)
fn production() -> Vec<(String, String)> {
    let root = root();
    let mut files = Vec::new();
    for krate in ["proto", "common", "agent", "coordinator"] {
        rust_files(&root.join(krate).join("src"), &mut files);
    }
    files
        .into_iter()
        // A file of tests alone (`foo/tests.rs`) is not production code.
        .filter(|path| path.file_stem().is_some_and(|stem| !stem.to_string_lossy().ends_with("tests")))
        .map(|path| {
            let text = fs::read_to_string(&path).unwrap();
            let code = text.split("#[cfg(test)]").next().unwrap_or_default().to_owned();
            (path.strip_prefix(&root).unwrap().to_string_lossy().into_owned(), code)
        })
        .collect()
}

/// The code alone: a header may well say what must not be used.
fn uses(code: &str, word: &str) -> bool {
    code.lines().any(|line| !line.trim_start().starts_with("//") && line.contains(word))
}

fn offenders(hit: impl Fn(&str, &str) -> bool) -> Vec<String> {
    production().into_iter().filter(|(path, code)| hit(path, code)).map(|(path, _)| path).collect()
}

const NONE: Vec<String> = Vec::new();

#[test]
fn every_crate_takes_the_workspace_lints() {
    for krate in ["proto", "common", "agent", "coordinator", "tests"] {
        let manifest = fs::read_to_string(root().join(krate).join("Cargo.toml")).unwrap();
        assert!(manifest.contains("[lints]\nworkspace = true"), "{krate} does not take the workspace lints");
    }
}

/// proto ← common ← {agent, coordinator} ← tests. The box's code and home's never meet.
#[test]
fn crates_depend_one_way() {
    let allowed = [
        ("proto", vec![]),
        ("common", vec!["limb-proto"]),
        ("agent", vec!["limb-proto", "limb-common"]),
        ("coordinator", vec!["limb-proto", "limb-common"]),
    ];
    for (krate, may) in allowed {
        let manifest = fs::read_to_string(root().join(krate).join("Cargo.toml")).unwrap();
        for line in manifest.lines() {
            let name = line.split('.').next().unwrap_or_default().trim();
            if ["limb", "limb-proto", "limb-common", "limb-agent"].contains(&name)
                && line.contains(".workspace")
            {
                assert!(may.contains(&name), "{krate} must not depend on {name}");
            }
        }
    }
}

/// Messages stay at the edges: what they mean is said in the domain's own types.
#[test]
fn wire_types_appear_only_at_the_edges() {
    let edges = [
        "proto/",
        "common/src/wire",
        "agent/src/link",
        "coordinator/src/rpc",
        // The owner's side: the service, and the commands that are its clients.
        "coordinator/src/owner",
        "coordinator/src/serve",
        "coordinator/src/cli",
    ];
    let found =
        offenders(|path, code| uses(code, "limb_proto") && !edges.iter().any(|edge| path.starts_with(edge)));
    assert_eq!(found, NONE);
}

/// The leash must work when everything else is stuck.
#[test]
fn the_leash_knows_neither_the_runtime_nor_the_wire() {
    let found = offenders(|path, code| {
        path.starts_with("agent/src/leash")
            && ["tonic", "tokio::", "limb_proto"].iter().any(|word| uses(code, word))
    });
    assert_eq!(found, NONE);
}

/// The file systems know what a chunk is, not how it travels.
#[test]
fn file_systems_know_nothing_of_the_wire() {
    let found = offenders(|path, code| {
        (path.starts_with("agent/src/mount") || path.starts_with("agent/src/results"))
            && (uses(code, "tonic") || uses(code, "limb_proto"))
    });
    assert_eq!(found, NONE);
}

/// Pure cores do no I/O.
#[test]
fn the_domain_opens_no_socket_and_no_database() {
    let found = offenders(|path, code| {
        path.starts_with("common/src")
            && ["tokio::net", "fuser::", "rusqlite"].iter().any(|word| code.contains(word))
    });
    assert_eq!(found, NONE);
}

#[test]
fn no_file_is_longer_than_can_be_read() {
    let found = offenders(|_, code| code.lines().count() > 600);
    assert_eq!(found, NONE, "split by idea");
}

#[test]
fn modules_are_files_beside_their_folder() {
    let mut files = Vec::new();
    for krate in ["proto", "common", "agent", "coordinator", "tests"] {
        rust_files(&root().join(krate).join("src"), &mut files);
    }
    files.retain(|path| path.ends_with("mod.rs"));
    assert_eq!(files, Vec::<PathBuf>::new());
}

#[test]
fn every_module_says_what_it_is() {
    let found = offenders(|_, code| !code.trim_start().starts_with("//!"));
    assert_eq!(found, NONE, "a module starts with a header: what it is, what it must never do");
}

#[test]
fn nothing_unfinished_is_left_in_production_code() {
    let words = ["todo!(", "unimplemented!(", "FIXME", "XXX"];
    let found = offenders(|_, code| words.iter().any(|word| code.contains(word)));
    assert_eq!(found, NONE);
}
