//! Runs that go on where earlier runs with the same destination stopped.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use limb_tests::home::{Home, lacks, lacks_fuse};
use limb_tests::wait::wait_for;

const OUT: &str = "outputs: {/ckpt: {dest: \"{root}/dest/ckpt\"}}\n";

/// Names and contents below a directory.
fn tree(root: &Path) -> BTreeMap<String, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut open = vec![root.to_owned()];
    while let Some(at) = open.pop() {
        for entry in fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            if path.symlink_metadata().unwrap().is_dir() {
                open.push(path);
                continue;
            }
            let name = path.strip_prefix(root).unwrap().to_string_lossy().into_owned();
            found.insert(name, fs::read(&path).unwrap());
        }
    }
    found
}

/// What a job wrote with `yes WORD | head -c BYTES`.
fn filled(word: &str, bytes: usize) -> Vec<u8> {
    format!("{word}\n").into_bytes().into_iter().cycle().take(bytes).collect()
}

#[test]
fn a_second_run_sees_appends_rotates_and_removes_what_the_first_left() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    let ended = home.run(
        "first",
        &format!(
            "{OUT}run: |\n  set -e +o pipefail\n  cd /ckpt\n  mkdir old\n  yes one | head -c 70000 > old/step-1\n  \
             yes two | head -c 3000000 > previous\n  yes three | head -c 3000000 > latest\n  \
             for step in 1 2 3; do echo \"step $step\" >> metrics.log; done\n"
        ),
    );
    assert_eq!(ended.code, 0, "{ended:?}\n{}", home.log());
    // By hand, between the runs: one name that the job never uses, and one that it will.
    home.write("dest/ckpt/notes.txt", "mine\n");
    home.write("dest/ckpt/step-4", "mine too\n");

    let ended = home.run(
        "second",
        &format!(
            "{OUT}run: |\n  set -e +o pipefail\n  cd /ckpt\n  ls | tr '\\n' ' '; echo\n  sha256sum latest previous old/step-1\n  \
             exec 3< previous\n  head -c 4 <&3 > /tmp/start\n  \
             mv latest previous\n  yes four | head -c 3000000 > latest\n  \
             cat /tmp/start - <&3 | sha256sum\n  sha256sum previous latest\n  \
             echo \"step 4\" >> metrics.log\n  cat metrics.log\n  rm old/step-1\n  rmdir old\n  \
             yes five | head -c 100 > step-4\n  ls | tr '\\n' ' '; echo\n"
        ),
    );
    assert_eq!(ended.code, 0, "{ended:?}\n{}\n{}", home.events("second"), home.log());
    let lines: Vec<_> = ended.stdout.lines().collect();
    assert_eq!(lines[0], "latest metrics.log old previous ", "the owner's own files are not shown");
    let sums: Vec<_> =
        lines.iter().filter_map(|line| line.split(' ').next().filter(|w| w.len() == 64)).collect();
    let (three, two) = (sums[0], sums[1]);
    assert_eq!(sums[3], two, "a file that was replaced stays readable for who has it open");
    assert_eq!(sums[4], three, "previous is what latest was");
    assert_ne!(sums[5], three);
    assert!(ended.stdout.contains("step 1\nstep 2\nstep 3\nstep 4\n"), "{}", ended.stdout);
    assert_eq!(lines.last(), Some(&"latest metrics.log previous step-4 "));

    let mut found = tree(&home.path("dest/ckpt"));
    let aside: Vec<_> = found.keys().filter(|name| name.starts_with("step-4.owner-")).cloned().collect();
    assert_eq!(aside.len(), 1, "{:?}", found.keys());
    assert_eq!(found.remove(&aside[0]).unwrap(), b"mine too\n");
    let expected: BTreeMap<_, _> = [
        ("latest", filled("four", 3_000_000)),
        ("metrics.log", b"step 1\nstep 2\nstep 3\nstep 4\n".to_vec()),
        ("notes.txt", b"mine\n".to_vec()),
        ("previous", filled("three", 3_000_000)),
        ("step-4", filled("five", 100)),
    ]
    .map(|(name, content)| (name.to_owned(), content))
    .into();
    assert!(found == expected, "{:?}", found.keys());
    assert!(home.events("second").contains(&aside[0]), "{}", home.events("second"));
    let verify = home.say(&["results", "verify", "second"]);
    assert_eq!(verify.code, 0, "{verify:?}");
    home.assert_no_box_left();
}

#[test]
fn verify_names_what_the_owner_changed_or_deleted_since() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    let ended = home.run(
        "verified",
        &format!(
            "{OUT}run: |\n  mkdir /ckpt/d\n  for n in kept changed d/deleted; do echo $n > /ckpt/$n; done\n"
        ),
    );
    assert_eq!(ended.code, 0, "{ended:?}");
    let verify = home.say(&["results", "verify", "verified"]);
    assert_eq!(verify.code, 0, "{verify:?}");
    // As long as before, so that only the hash tells.
    home.write("dest/ckpt/changed", "Changed\n");
    fs::remove_file(home.path("dest/ckpt/d/deleted")).unwrap();
    let verify = home.say(&["results", "verify", "verified"]);
    assert_eq!(verify.code, 74, "{verify:?}");
    let line = |name: &str| {
        let found = verify.stdout.lines().find(|line| line.contains(name));
        found.unwrap_or_else(|| panic!("{name} is not named: {verify:?}")).to_owned()
    };
    assert!(line("ckpt/changed").contains("changed: its hash is now"), "{verify:?}");
    assert!(line("ckpt/d/deleted").contains("missing"), "{verify:?}");
    assert!(!verify.stdout.contains("kept"), "{verify:?}");
    assert!(verify.stderr.contains("2 of 3"), "{verify:?}");
    // And for programs.
    let json = home.say(&["results", "verify", "verified", "--json"]);
    assert_eq!(json.code, 74, "{json:?}");
    let rows: serde_json::Value = serde_json::from_str(&json.stdout).unwrap();
    let bad = rows.as_array().unwrap().iter().filter(|row| row["ok"] == false).count();
    assert_eq!(bad, 2, "{rows}");
}

fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Header and bytes of a safetensors file: its writer puts the header's metadata in any order.
fn tensors(file: &[u8]) -> (serde_json::Value, &[u8]) {
    let (len, rest) = file.split_at(8);
    let len = usize::try_from(u64::from_le_bytes(len.try_into().unwrap())).unwrap();
    (serde_json::from_slice(&rest[..len]).unwrap(), &rest[len..])
}

/// The example, whole and in two runs: every tensor of every epoch has to be the same, bit for bit.
#[test]
fn training_that_was_stopped_and_run_again_equals_training_in_one_go() {
    const EPOCHS: usize = 12;
    let python = workspace().join("target/demo/venv/bin/python");
    let data = workspace().join("target/demo/digits-data");
    if lacks_fuse() || lacks("no target/demo (make demo sets it up)", python.exists() && data.exists()) {
        return;
    }
    let mut home = Home::new();
    home.serve();
    fs::create_dir(home.path("src/data")).unwrap();
    fs::copy(data.join("digits.csv.gz"), home.path("src/data/digits.csv.gz")).unwrap();
    fs::create_dir(home.path("src/work")).unwrap();
    fs::copy(workspace().join("examples/digits/train.py"), home.path("src/work/train.py")).unwrap();
    let yaml = |dest: &str| {
        format!(
            "workdir: \"{{root}}/src/work\"\nmounts: {{/data: \"{{root}}/src/data\"}}\n\
             outputs: {{/ckpt: {{dest: \"{{root}}/dest/{dest}\"}}}}\nenv: {{OMP_NUM_THREADS: \"1\"}}\n\
             run: exec {} train.py --data /data/digits.csv.gz --checkpoints /ckpt --epochs {EPOCHS}\n",
            python.display()
        )
    };
    let job = home.job("part", &yaml("parts"));
    let client = home.start(&["run", "-y", &job]);
    wait_for("four checkpoints at home", || {
        home.path("dest/parts/epoch-0004.safetensors").exists().then_some(())
    });
    let stop = home.say(&["stop", "part"]);
    assert_eq!(stop.code, 0, "{stop:?}");
    let stopped = client.wait();
    assert_ne!(stopped.code, 0, "{stopped:?}");
    let before = fs::read_dir(home.path("dest/parts")).unwrap().count();
    assert!(before < EPOCHS + 1, "it was stopped in time: {before} files\n{stopped:?}");
    let resumed = home.say(&["run", "-y", &job]);
    assert_eq!(resumed.code, 0, "{resumed:?}\n{}", home.log());
    assert!(resumed.stdout.contains("resuming after epoch"), "{resumed:?}");
    let whole = home.run("whole", &yaml("whole"));
    assert_eq!(whole.code, 0, "{whole:?}\n{}", home.log());

    let (mut parts, whole) = (tree(&home.path("dest/parts")), tree(&home.path("dest/whole")));
    // What the stop cut short stays beside it, named as that.
    parts.retain(|name, _| !name.contains(".partial"));
    assert_eq!(parts.keys().collect::<Vec<_>>(), whole.keys().collect::<Vec<_>>());
    for (name, content) in &whole {
        if name != "metrics.jsonl" {
            assert!(tensors(&parts[name]) == tensors(content), "{name} differs");
        }
    }
    // An epoch that was saved, but stopped before its line, has none.
    let lines = |tree: &BTreeMap<String, Vec<u8>>| {
        let text = String::from_utf8(tree["metrics.jsonl"].clone()).unwrap();
        text.lines().map(str::to_owned).collect::<Vec<_>>()
    };
    let (of_parts, of_whole) = (lines(&parts), lines(&whole));
    assert!(of_parts.len() + 1 >= of_whole.len(), "{of_parts:?}");
    assert!(of_parts.iter().all(|line| of_whole.contains(line)), "{of_parts:?}\n{of_whole:?}");
    assert_eq!(of_whole.len(), EPOCHS);
    home.assert_no_box_left();
}
