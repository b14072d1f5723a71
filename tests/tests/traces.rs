//! The second run of a job reads ahead what the first one touched.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use limb_tests::home::{Home, lacks_fuse};

const WORDS: &str = "read ahead by trace: ";
const FILES: usize = 200;

/// Every file once, in an order that is no walk; then half of a large one.
const READ: &str = "while read f; do cat /data/$f; done < /data/order > /dev/null; \
                    head -c 2000000 /data/large > /dev/null";

fn job(rest: &str, command: &str) -> String {
    format!("mounts: {{/data: \"{{root}}/src/data\"}}\n{rest}run: \"{command}\"\n")
}

/// What the run says about its plan: (chunks, planned %, hit rate %).
fn plan_of(home: &Home, name: &str) -> Option<(usize, u64, u64)> {
    let events = home.events(name);
    let line = events.lines().find(|line| line.contains(WORDS))?.split_once(WORDS)?.1.to_owned();
    let numbers: Vec<u64> = line.split(' ').filter_map(|word| word.parse().ok()).collect();
    // "N chunks, X MiB planned; of T first reads P % were planned, hit rate Y %"
    let [chunks, .., planned, hits] = numbers[..] else { panic!("{line:?}") };
    Some((chunks.try_into().unwrap(), planned, hits))
}

#[test]
fn the_second_run_of_a_job_reads_ahead_what_the_first_touched() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    let mut order = String::new();
    for at in 0..FILES {
        let number = at * 73 % FILES;
        home.write(format!("src/data/d{}/f{number}", number % 7), vec![7; 3000 + number]);
        order.push_str(&format!("d{}/f{number}\n", number % 7));
    }
    home.write("src/data/order", order);
    home.write("src/data/large", (0..4_000_000_u32).flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>());
    let run = |name: &str, yaml: &str| {
        let ended = home.run(name, yaml);
        assert_eq!(ended.code, 0, "{ended:?}\n{}", home.log());
        plan_of(&home, name)
    };
    assert_eq!(run("first", &job("", READ)), None);
    let (chunks, planned, hits) = run("second", &job("", READ)).expect("the second run has a plan");
    // The files, their order, and two or three chunks of the large one.
    assert!((FILES + 3..FILES + 12).contains(&chunks), "{chunks}");
    assert!(planned >= 90 && (50..=100).contains(&hits), "{planned} % {hits} %\n{}", home.events("second"));

    // The environment is not part of it; the command, `setup`, the path and the data are.
    assert!(run("other-env", &job("env: {A: b}\n", READ)).is_some());
    assert_eq!(run("other-command", &job("", &format!("{READ}; true"))), None);
    assert_eq!(run("other-setup", &job("setup: \"true\"\n", READ)), None);
    let moved = job("", READ).replace("/data: ", "/elsewhere: ").replace("/data/", "/elsewhere/");
    assert_eq!(run("other-path", &moved.replace("src/elsewhere", "src/data")), None);
    assert_eq!(run("off", &job("trace: off\n", READ)), None);
    assert!(run("on", &job("trace: on\n", READ)).is_some());
    home.write("src/data/d0/more", "more");
    assert_eq!(run("other-data", &job("", READ)), None);

    // What was switched off left nothing either.
    let off = job("trace: off\n", &format!("{READ}; echo off"));
    assert_eq!(run("off-1", &off), None);
    assert_eq!(run("off-2", &off.replace("trace: off\n", "")), None);
    home.assert_no_box_left();
}
