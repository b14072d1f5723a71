//! What of a run's results is a checkpoint, while the run goes on and afterwards.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use limb_tests::home::{Home, lacks_fuse};
use limb_tests::wait::wait_for;

/// Steps 900 and then 100, the second of which lacks its marker until the job is stopped.
const TRAINING: &str = "outputs: {/ckpt: {dest: \"{root}/dest/ckpt\"}}\nrun: |\n  \
    save() { mkdir -p /ckpt/$1; head -c 300000 /dev/urandom > /ckpt/$1/model.safetensors; }\n  \
    state() { echo '{\"global_step\": 1}' > /ckpt/$1/trainer_state.json; }\n  \
    trap 'state checkpoint-100; exit 0' TERM\n  \
    save checkpoint-900\n  state checkpoint-900\n  sync /ckpt/checkpoint-900/*\n  \
    save checkpoint-100\n  sync /ckpt/checkpoint-100/*\n  echo saved\n  \
    while true; do sleep 1; done\n";

fn checkpoints(home: &Home) -> Vec<(String, u64, bool)> {
    let listed = home.say(&["results", "ls", "training", "--checkpoints", "--json"]);
    let rows: Vec<serde_json::Value> = serde_json::from_str(&listed.stdout).unwrap_or_default();
    let row = |row: &serde_json::Value| {
        let (path, step) = (row["path"].as_str()?.to_owned(), row["step"].as_u64()?);
        Some((path, step, row["complete"].as_bool()?))
    };
    rows.iter().filter_map(row).collect()
}

#[test]
fn the_newest_complete_checkpoint_is_found_and_followed_and_no_half_of_one_is_copied() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    let job = home.job("training", TRAINING);
    let run = home.start(&["run", "-y", &job]);
    let both = |second: bool| {
        vec![("checkpoint-900".to_owned(), 900, true), ("checkpoint-100".to_owned(), 100, second)]
    };
    wait_for("both checkpoints", || (checkpoints(&home) == both(false)).then_some(()));
    let shown = home.say(&["results", "ls", "training"]).stdout;
    assert!(shown.contains("incomplete: no trainer_state.json yet"), "{shown}");

    let newest = home.path("newest").to_string_lossy().into_owned();
    let get = ["results", "get", "training", "--newest-checkpoint", "--to", &newest];
    assert_eq!(home.say(&get).code, 0);
    assert!(home.path("newest/checkpoint-900/model.safetensors").exists());
    assert!(home.path("newest/checkpoint-900/trainer_state.json").exists());
    assert!(!home.path("newest/checkpoint-100").exists(), "it is not complete");

    let followed = home.path("followed").to_string_lossy().into_owned();
    let watch = home.start(&["results", "get", "training", "--watch", "--to", &followed]);
    wait_for("what is complete", || {
        home.read("followed/checkpoint-900/trainer_state.json")?;
        home.read("followed/checkpoint-900/model.safetensors")
    });
    assert!(!home.path("followed/checkpoint-100").exists(), "it is not complete");

    assert_eq!(home.say(&["stop", "training"]).code, 0);
    let ended = run.wait();
    assert_eq!(ended.code, 0, "{ended:?}\n{}", home.log());
    let watched = watch.wait();
    assert_eq!(watched.code, 0, "{watched:?}");
    assert_eq!(checkpoints(&home), both(true), "what came last is last, whatever its number");
    for file in ["checkpoint-900/model.safetensors", "checkpoint-100/model.safetensors"] {
        let at_home = home.read(format!("dest/ckpt/{file}")).unwrap();
        assert_eq!(home.read(format!("followed/{file}")).unwrap(), at_home, "{file}");
    }
    // What is the owner's there is not overwritten: the newest is another one now, beside it.
    assert_eq!(home.say(&get).code, 0);
    assert!(home.path("newest/checkpoint-100/trainer_state.json").exists());
    home.assert_no_box_left();
}

#[test]
fn who_asks_for_a_checkpoint_where_there_is_none_is_told_what_is_missing() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    let ended = home.run(
        "training",
        "outputs: {/ckpt: {dest: \"{root}/dest/ckpt\"}}\nrun: |\n  mkdir /ckpt/checkpoint-7\n  \
         echo weights > /ckpt/checkpoint-7/model.safetensors\n",
    );
    assert_eq!(ended.code, 0, "{ended:?}");
    let to = home.path("to").to_string_lossy().into_owned();
    let refused = home.say(&["results", "get", "training", "--newest-checkpoint", "--to", &to]);
    assert_ne!(refused.code, 0);
    assert!(
        refused.stderr.contains("checkpoint-7 is not complete")
            && refused.stderr.contains("trainer_state.json"),
        "{refused:?}"
    );
    assert!(!home.path("to").exists(), "nothing was copied");
}
