use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use proptest::prelude::*;

use super::*;

const BASE: &str = "/home/ada/project";

fn parse(text: &str) -> Result<JobFile, JobFileError> {
    JobFile::parse(text, "job.yaml", Path::new(BASE))
}

fn error(text: &str) -> String {
    parse(text).unwrap_err().to_string()
}

#[test]
fn the_whole_format_is_read() {
    let job = parse(
        r#"
name: sft-llama
workdir: .
resources: {infra: [local, lambda/us-east-1], max_price: 45.00}
image: null
env: {MODEL: x, LEVEL: 0755, ON: true, RATIO: 1.50, EMPTY: "", HF_TOKEN: null, USER: null}
secrets: [HF_TOKEN]
mounts:
  /data: {source: /tank/data, class: public, links: follow}
  /weights/: ../models/llama
outputs: {/ckpt: {dest: "runs/{name}/ckpt", durability: close}, /logs: /tank/logs}
setup: |
  pip install -r requirements.txt
run: |
  torchrun train.py
limits: {max_duration: 6h, max_cost: 2.50, boot_timeout: 10m, stop_duration: 90s, disconnect_grace: 1m, memory: 64GB}
retry: {on_events: [lost], max_attempts: 3}
notify: []
"#,
    )
    .unwrap();
    assert_eq!(job.name, "sft-llama");
    assert_eq!(job.workdir.as_ref().unwrap().path, Path::new(BASE));
    assert_eq!(job.resources.infra[1].region.as_deref(), Some("us-east-1"));
    assert_eq!(job.resources.max_price, Some(Micros(45_000_000)));
    let literal = |name: &str| job.env.iter().find(|entry| entry.name == name).unwrap().value.clone();
    assert_eq!(literal("LEVEL"), EnvValue::Literal("0755".into()));
    assert_eq!(literal("ON"), EnvValue::Literal("true".into()));
    assert_eq!(literal("RATIO"), EnvValue::Literal("1.50".into()));
    assert_eq!(literal("EMPTY"), EnvValue::Literal(String::new()));
    assert_eq!(job.mounts[0].source.links, Links::Follow);
    assert_eq!(job.mounts[0].source.class, DataClass::Public);
    assert_eq!(job.mounts[1].path, PathBuf::from("/weights"));
    assert_eq!(job.mounts[1].source.path, Path::new("/home/ada/models/llama"));
    assert_eq!(job.outputs[0].durability, Durability::Close);
    assert_eq!(job.outputs[0].dest.render("n", "r-1", 2), Path::new("/home/ada/project/runs/n/ckpt"));
    assert_eq!(job.limits.max_cost, Micros(2_500_000));
    assert_eq!(job.limits.stop_duration, Duration::from_secs(90));
    assert_eq!(job.limits.memory_bytes, Some(64_000_000_000));
    assert_eq!(job.retry, Retry { on_events: vec![RetryEvent::Lost], max_attempts: 3 });
    assert_eq!(job.command, Command::Script("torchrun train.py\n".into()));
    assert_eq!(job.wanted(), Wanted { env: vec!["USER"], secrets: vec!["HF_TOKEN"] });
    assert_eq!(job.class(), DataClass::Internal);
}

#[test]
fn the_shortest_job_has_every_limit() {
    let job = parse("run: echo hello").unwrap();
    assert_eq!(job.name, "job");
    assert_eq!(job.limits, Limits::default());
    assert_eq!(job.retry.max_attempts, 1);
    assert_eq!(job.workdir, None);
    assert_eq!(job.class(), DataClass::Public);
}

#[test]
fn aliases_mean_the_same() {
    let job = parse("commands: [cd src, make]").unwrap();
    assert_eq!(job.command, Command::Script("cd src\nmake".into()));
    insta::assert_snapshot!(error("run: a\ncommands: [b]"), @"job.yaml:2: `run` and its alias `commands` are both there (the other on line 1)");
    insta::assert_snapshot!(error("run: a\naccelerators: H100:8"), @"job.yaml:2: `accelerators` is not built yet; hint: leave it out; the `local` provider has the hardware of this machine and nothing else");
}

#[test]
fn unknown_keys_name_line_and_neighbour() {
    insta::assert_snapshot!(error("run: a\n\nmount: {}\n"), @"job.yaml:3: unknown key `mount`; hint: did you mean `mounts`?");
    insta::assert_snapshot!(error("run: a\nlimits:\n  max_duraton: 5m\n"), @"job.yaml:3: unknown key `max_duraton` in `limits`; hint: did you mean `max_duration`?");
    insta::assert_snapshot!(error("run: a\nmounts:\n  /d:\n    src: x\n"), @"job.yaml:4: unknown key `src` in `mounts./d`; hint: known here: source, class, links");
    insta::assert_snapshot!(error("run: a\nzebra: 1\n"), @"job.yaml:2: unknown key `zebra`; hint: known here: name, workdir, resources, image, env, secrets, mounts, outputs, setup, run, limits, retry, trace, push, cache, notify, commands, accelerators");
    insta::assert_snapshot!(error("run: a\n? [x]\n: 1\n"), @"job.yaml:2: unknown key `a list`; hint: known here: name, workdir, resources, image, env, secrets, mounts, outputs, setup, run, limits, retry, trace, push, cache, notify, commands, accelerators");
}

#[test]
fn what_is_not_built_is_refused_by_name() {
    insta::assert_snapshot!(error("run: a\nimage: ubuntu\n"), @"job.yaml:2: `image` is not built yet; hint: leave it out or say `image: null`: the job runs on the box's own system");
    insta::assert_snapshot!(error("run: a\nnotify: [https://ntfy.sh/x]\n"), @"job.yaml:2: `notify` is not built yet; hint: leave it out; `limb events -f RUN` says what happens");
    insta::assert_snapshot!(error("run: a\nresources:\n  gpu: H100\n"), @"job.yaml:3: `resources.gpu` is not built yet; hint: leave it out; the `local` provider has the hardware of this machine and nothing else");
    insta::assert_snapshot!(error("run: a\nlimits: {gpu_idle: 30m}\n"), @"job.yaml:2: `limits.gpu_idle` is not built yet; hint: leave it out; `max_duration` and `max_cost` hold");
}

#[test]
fn values_are_checked_where_they_stand() {
    insta::assert_snapshot!(error("run: a\nlimits: {max_duration: 90}\n"), @r#"job.yaml:2: `max_duration`: "90" is not a duration; hint: write it like 90s, 2m, 6h or 1h30m"#);
    insta::assert_snapshot!(error("run: a\nlimits: {max_duration: 0s}\n"), @"job.yaml:2: `max_duration` cannot be zero; hint: there is no way to switch a limit off; say a long one");
    insta::assert_snapshot!(error("run: a\nlimits: {max_cost: lots}\n"), @r#"job.yaml:2: `max_cost`: "lots" is not a sum of money; hint: write it like 25.00 (dollars)"#);
    insta::assert_snapshot!(error("run: a\nlimits: {disconnect_grace: 2h}\n"), @"job.yaml:2: `disconnect_grace` is longer than a box's certificate can cover; hint: 25m is the most");
    insta::assert_snapshot!(error("run: a\nlimits: {memory: much}\n"), @r#"job.yaml:2: `memory`: "much" is not a size; hint: write it like 512MB, 64GB or 1GiB"#);
    insta::assert_snapshot!(error("run: a\nlimits: {memory: 64}\n"), @"job.yaml:2: `memory`: a job cannot live on 64 bytes; hint: 16MiB is the least; write it like 512MB or 64GB");
    insta::assert_snapshot!(error("run: a\nlimits: {max_cost: [1]}\n"), @"job.yaml:2: `max_cost` must be a single value, not a list");
    insta::assert_snapshot!(error("run: a\nlimits: 6h\n"), @"job.yaml:2: `limits` must be a mapping, not a single value");
    insta::assert_snapshot!(error("run: a\nname: ../x\n"), @r#"job.yaml:2: "../x" cannot be a name; hint: use at most 63 letters, digits, `.`, `_` and `-`, a letter or digit first: it becomes a directory name"#);
    insta::assert_snapshot!(error("run: a\nretry: {max_attempts: 0}\n"), @r#"job.yaml:2: `max_attempts` must be a whole number from 1 to 100, not "0""#);
    insta::assert_snapshot!(error("run: a\nretry: {on_events: [lst]}\n"), @r#"job.yaml:2: `on_events` cannot be "lst"; hint: did you mean `lost`?"#);
    insta::assert_snapshot!(error("run: a\nmounts: {/d: {source: x, class: secret}}\n"), @r#"job.yaml:2: `class` cannot be "secret"; hint: one of public, internal, regulated, sealed"#);
    insta::assert_snapshot!(error("run: a\nresources: {infra: [a/b/c]}\n"), @r#"job.yaml:2: "a/b/c" is not a place to run; hint: say a provider, like `local`, or `provider/region`"#);
    insta::assert_snapshot!(error("run: a\nenv: {2X: 1}\n"), @r#"job.yaml:2: "2X" cannot be the name of a variable; hint: use letters, digits and `_`, no digit first"#);
    insta::assert_snapshot!(error("run: a\nenv: {X: [1]}\n"), @"job.yaml:2: `X` must be a single value, not a list");
}

#[test]
fn paths_on_the_box_are_places_of_their_own() {
    insta::assert_snapshot!(error("run: a\nmounts: {data: x}\n"), @"job.yaml:2: `data` is not an absolute path; hint: name a directory of its own, like /data");
    insta::assert_snapshot!(error("run: a\nmounts: {/proc/x: x}\n"), @"job.yaml:2: nothing can be mounted in `/proc`: it is the kernel's; hint: name a directory of its own, like /data");
    insta::assert_snapshot!(error("run: a\nmounts: {//: x}\n"), @"job.yaml:2: nothing can be mounted over `/`; hint: name a directory of its own, like /data");
    insta::assert_snapshot!(error("run: a\nmounts: {/a/../b: x}\n"), @"job.yaml:2: `/a/../b` has `.` or `..` in it; hint: name a directory of its own, like /data");
    insta::assert_snapshot!(error("run: a\nmounts:\n  /d: x\noutputs:\n  /d/out: y\n"), @"job.yaml:5: the output `/d/out` and the mount `/d` (line 3) are inside each other; hint: give each a place of its own");
    insta::assert_snapshot!(error("run: a\noutputs:\n  /a: r/{name}\n  /b: r/{name}/b\n"), @"job.yaml:4: the destination `/home/ada/project/r/{name}/b` and the destination `/home/ada/project/r/{name}` (line 3) are inside each other; hint: give each a place of its own");
    parse("run: a\nmounts: {/procedure: x, /data: y, /data2: z}\n").unwrap();
}

#[test]
fn destinations_know_three_words() {
    insta::assert_snapshot!(error("run: a\noutputs: {/o: \"r/{nmae}\"}\n"), @"job.yaml:2: unknown placeholder `{nmae}`; hint: did you mean {name}?");
    insta::assert_snapshot!(error("run: a\noutputs: {/o: \"r/{date}\"}\n"), @"job.yaml:2: unknown placeholder `{date}`; hint: a destination may hold {name}, {run} and {attempt}");
    insta::assert_snapshot!(error("run: a\noutputs: {/o: \"r/{name\"}\n"), @"job.yaml:2: `r/{name` has a `{` without its `}`");
    insta::assert_snapshot!(error("run: a\noutputs: {/o: {durability: fsync}}\n"), @"job.yaml:2: `outputs./o` has no `dest`");
    let job = parse("run: a\noutputs: {/o: \"/t/{name}-{run}/{attempt}\"}\n").unwrap();
    assert_eq!(job.outputs[0].dest.render("n", "r-0", 3), Path::new("/t/n-r-0/3"));
    assert!(job.outputs[0].dest.names_attempt());
}

#[test]
fn broken_yaml_names_its_line() {
    for (text, said) in [
        ("run: a\nenv: {A: 1\nname: [x\n", "not closed"),
        ("run: a\nenv: [x\n", "`{` or `[` was opened and is not closed"),
        ("run: a\nenv: x]\nfoo: ]\n", "closes what was not opened"),
        ("run: \"a\nname: x\n", "a quote was opened and is not closed"),
        ("run: 'a' b\n", "behind the closing quote"),
        ("run: \"a\\qb\"\n", "means nothing in double quotes"),
        ("run: a\nname: x\nname: y\n", "the key `name` is there twice"),
        ("run: a\nlimits:\n\tmax_cost: 1\n", "a tab indents this line"),
        ("run: echo a: b\n", "a second `: ` stands in this line"),
        ("run: a\nname: @x\n", "a value cannot begin with `@`"),
        ("run: a\nname: `x\n", "a value cannot begin with ``"),
        ("run: a\nname: *x\n", "`*`"),
        ("run: a\nname: !!foo x\n", "`!`"),
        ("run: a\n---\nrun: b\n", "a second document begins here"),
        ("run: a\nname\n", "does not fit"),
        ("run: a\n  name: x\n", "does not fit"),
        ("run: |\n  a\n b\nname: x\n", "not valid YAML: "),
        ("- a\nrun: b\n", "not valid YAML: "),
    ] {
        let told = error(text);
        assert!(told.contains(said), "{text:?}: {told}");
        assert!(told.starts_with("job.yaml:") && told.contains("; hint: "), "{text:?}: {told}");
        for theirs in
            ["block", "scalar", "flow", "token", "node", "parser", "error:", "expected ", "simple key"]
        {
            assert!(!told.contains(theirs), "{text:?}: {told}");
        }
        let line = told.split(':').nth(1).and_then(|line| line.parse::<usize>().ok());
        assert!(line.is_some_and(|line| line <= text.lines().count() + 1), "{told}");
    }
    insta::assert_snapshot!(error("- a\n"), @"job.yaml:1: a job file is a mapping of keys like `run:`, not a list");
    insta::assert_snapshot!(error(""), @"job.yaml: there is no `run:`; hint: say what to run, like `run: python train.py`");
    insta::assert_snapshot!(error("run: ''"), @"job.yaml:1: `run` is empty");
}

#[test]
fn secrets_never_stand_in_the_file() {
    insta::assert_snapshot!(error("run: a\nsecrets: {K: v}\n"), @"job.yaml:2: `secrets` is a list of names, never of values; hint: say `secrets: [HF_TOKEN]`; the value comes from the environment of `limb run`");
    insta::assert_snapshot!(error("run: a\nenv: {K: v}\nsecrets: [K]\n"), @"job.yaml:2: the secret `K` has its value in the file; hint: say `K: null`, or leave it out of `env`");
    let job = parse("run: a\nenv: {K: null, U: null}\nsecrets: [K]\n").unwrap();
    let map = |name: &str| BTreeMap::from([(name.to_owned(), "$*'\"\n".to_owned())]);
    insta::assert_snapshot!(job.bind(&map("U"), &BTreeMap::new()).unwrap_err(), @"job.yaml:3: the secret `K` is not set where the job was submitted; hint: export K, or give it a value in the file");
    insta::assert_snapshot!(job.bind(&BTreeMap::new(), &map("K")).unwrap_err(), @"job.yaml:2: the variable `U` is not set where the job was submitted; hint: export U, or give it a value in the file");
    let bound = job.bind(&map("U"), &map("K")).unwrap();
    assert_eq!(bound.env, [("U".to_owned(), "$*'\"\n".to_owned())]);
    assert_eq!(bound.secrets[0].1.expose(), "$*'\"\n");
    assert!(!format!("{bound:?}").contains("secrets: [(\"K\", \"$"));
}

#[test]
fn home_is_expanded_and_other_homes_are_refused() {
    let at = |text: &str| paths::at_home(text, Path::new(BASE), Some(Path::new("/home/ada")));
    assert_eq!(at("~"), Ok(PathBuf::from("/home/ada")));
    assert_eq!(at("~/d/./e/../f"), Ok(PathBuf::from("/home/ada/d/f")));
    assert_eq!(at("../../.."), Ok(PathBuf::from("/")));
    assert!(at("~bob/x").is_err() && at("").is_err() && at("a\0b").is_err());
    assert!(paths::at_home("~", Path::new(BASE), None).is_err());
}

#[test]
fn flags_are_the_same_keys() {
    let argv = vec![b"/usr/bin/python3".to_vec(), b"t.py".to_vec(), b"\xff".to_vec()];
    let flags = ArgvJob {
        workdir: Some(".".into()),
        mounts: vec!["./a:b:/data".into(), "/x:/y:public".into()],
        outputs: vec!["/o:r/{name}".into()],
        env: vec!["A=b=c".into(), "USER".into(), "Q=\u{1F980}\"'$*".into()],
        max_cost: Some("1.50".into()),
        ..ArgvJob::default()
    };
    let job = JobFile::from_argv(&flags, Path::new(BASE), argv.clone()).unwrap();
    assert_eq!(job.name, "python3");
    assert_eq!(job.command, Command::Argv(argv.clone()));
    let mount = |at: &str| job.mounts.iter().find(|mount| mount.path == Path::new(at)).unwrap();
    assert_eq!(mount("/data").source.path, Path::new("/home/ada/project/a:b"));
    assert_eq!(mount("/y").source.class, DataClass::Public);
    assert_eq!(job.env.iter().find(|e| e.name == "A").unwrap().value, EnvValue::Literal("b=c".into()));
    assert_eq!(
        job.env.iter().find(|e| e.name == "Q").unwrap().value,
        EnvValue::Literal("\u{1F980}\"'$*".into())
    );
    assert_eq!(job.wanted().env, ["USER"]);
    assert_eq!(job.limits.max_cost, Micros(1_500_000));
    let fails = |flags: ArgvJob| JobFile::from_argv(&flags, Path::new(BASE), argv.clone()).unwrap_err();
    insta::assert_snapshot!(fails(ArgvJob { mounts: vec!["data".into()], ..ArgvJob::default() }), @r#"command line: --mount "data" cannot be read; hint: write it like --mount ./data:/data or --mount ./data:/data:public"#);
    insta::assert_snapshot!(fails(ArgvJob { outputs: vec!["o:x".into()], ..ArgvJob::default() }), @r#"command line: --output "o:x" cannot be read; hint: write it like --output /ckpt:./runs/{name}"#);
    insta::assert_snapshot!(fails(ArgvJob { max_duration: Some("5".into()), ..ArgvJob::default() }), @r#"command line: `max_duration`: "5" is not a duration; hint: write it like 90s, 2m, 6h or 1h30m"#);
}

proptest! {
    #[test]
    fn no_text_makes_the_reader_panic(text in "\\PC{0,200}") {
        drop(parse(&text));
    }

    #[test]
    fn no_shape_makes_the_reader_panic(
        lines in prop::collection::vec(
            (0..4_usize, prop::sample::select(vec![
                "name", "workdir", "resources", "env", "mounts", "outputs", "limits", "retry", "run", "secrets",
                "infra", "/a", "source", "dest", "-", "? x", "*a", "&a", "<<", "!!int", "{", "[", "\u{0}",
            ]), prop::sample::select(vec![
                "", " x", " 1", " null", " {a: b}", " [1, 2]", " |", " \"\\0\"", " .nan", " *a", " &a x", " !!bool 3",
            ])),
            0..12,
        )
    ) {
        let text: String =
            lines.iter().map(|(indent, key, value)| format!("{}{key}:{value}\n", "  ".repeat(*indent))).collect();
        drop(parse(&text));
    }

    #[test]
    fn a_read_job_has_absolute_separate_paths(a in "/[a-z./]{0,8}", b in "/[a-z./]{0,8}", d in "[a-z./~]{1,8}") {
        if let Ok(job) = parse(&format!("run: x\nmounts: {{\"{a}\": /s}}\noutputs: {{\"{b}\": \"{d}\"}}\n")) {
            prop_assert!(job.mounts[0].path.is_absolute() && job.outputs[0].path.is_absolute());
            prop_assert!(!paths::nested(&job.mounts[0].path, &job.outputs[0].path));
            prop_assert!(job.outputs[0].dest.as_path().is_absolute());
        }
    }
}

#[test]
fn unquoted_braces_in_a_flow_mapping_are_named() {
    for text in [
        "run: a\noutputs: {/out: {dest: /x/{name}}}\n",
        "run: a\noutputs: {/out: {dest: /x/{name}, durability: close}}\n",
        "run: a\noutputs:\n  /out: {dest: /x/{name}}\n",
    ] {
        let said = error(text);
        assert!(said.ends_with("hint: quote a value that contains braces: \"/x/{name}\""), "{text}: {said}");
    }
    parse("run: a\noutputs: {/out: {dest: \"/x/{name}\"}}\n").unwrap();
    assert!(!error("run: a\noutputs: {/out: {dest: \"/x/{name}\"}\nenv: [\n").contains("contains braces"));
}

#[test]
fn the_access_trace_is_on_unless_the_job_says_off() {
    let trace = |line: &str| parse(&format!("run: a\n{line}")).map(|job| job.trace);
    assert_eq!(trace(""), Ok(true));
    assert_eq!(trace("trace: on\n"), Ok(true));
    assert_eq!(trace("trace: off\n"), Ok(false));
    insta::assert_snapshot!(error("run: a\ntrace: of\n"), @"job.yaml:2: `trace` cannot be \"of\"; hint: did you mean `on`?");
    insta::assert_snapshot!(error("run: a\ntrace: 1\n"), @"job.yaml:2: `trace` cannot be \"1\"; hint: one of on, off");
}

#[test]
fn nothing_is_pushed_into_the_page_cache_unless_the_job_says_on() {
    let push = |line: &str| parse(&format!("run: a\n{line}")).map(|job| job.push);
    assert_eq!(push(""), Ok(false));
    assert_eq!(push("push: on\n"), Ok(true));
    assert_eq!(push("push: off\n"), Ok(false));
    insta::assert_snapshot!(error("run: a\npush: yes\n"), @"job.yaml:2: `push` cannot be \"yes\"; hint: one of on, off");
    let flags = ArgvJob { push: Some("on".to_owned()), ..ArgvJob::default() };
    assert!(JobFile::from_argv(&flags, Path::new("/"), vec![b"true".to_vec()]).unwrap().push);
}

#[test]
fn the_cache_is_in_memory_unless_the_job_asks_for_a_disk() {
    let cache = |text: &str| parse(&format!("run: a\n{text}")).map(|job| job.cache);
    assert_eq!(cache(""), Ok(CacheSpec { memory_bytes: 512 << 20, disk_bytes: 0, dir: None }));
    assert_eq!(cache("cache:\n"), Ok(CacheSpec::default()));
    assert_eq!(cache("cache: {disk: off}\n"), Ok(CacheSpec::default()));
    assert_eq!(
        cache("cache: {memory: 1GiB, disk: 20GB, dir: /mnt/nvme}\n"),
        Ok(CacheSpec { memory_bytes: 1 << 30, disk_bytes: 20_000_000_000, dir: Some("/mnt/nvme".into()) })
    );
    insta::assert_snapshot!(error("run: a\ncache: {ram: 1GiB}\n"), @"job.yaml:2: unknown key `ram` in `cache`; hint: known here: memory, disk, dir");
    insta::assert_snapshot!(error("run: a\ncache: {memory: 1MiB}\n"), @"job.yaml:2: `cache.memory` cannot hold what is read ahead; hint: 64MiB is the least, 512MiB the default");
    insta::assert_snapshot!(error("run: a\ncache: {disk: much}\n"), @r#"job.yaml:2: `cache.disk`: "much" is not a size; hint: write it like 512MB, 64GB or 1GiB"#);
    insta::assert_snapshot!(error("run: a\ncache: {dir: /mnt}\n"), @"job.yaml:2: `cache.dir` is for a cache on the disk, and there is none; hint: say how large it may get, like `disk: 20GiB`");
    insta::assert_snapshot!(error("run: a\ncache: {disk: 1GiB, dir: mnt}\n"), @"job.yaml:2: `cache.dir`: `mnt` is not an absolute path; hint: name a directory of its own, like /data");
    let regulated = "run: a\nmounts: {/d: {source: /d, class: regulated}}\n";
    assert!(parse(&format!("{regulated}cache: {{memory: 1GiB}}\n")).is_ok());
    insta::assert_snapshot!(error(&format!("{regulated}cache: {{disk: 1GiB}}\n")), @"job.yaml:3: data of class `regulated` does not go to a box's disk, not even sealed; hint: leave out `cache.disk`");
}

#[test]
fn the_flags_of_the_cache_are_its_keys() {
    let flags =
        ArgvJob { cache_memory: Some("1GiB".into()), cache_disk: Some("2GiB".into()), ..ArgvJob::default() };
    let job = JobFile::from_argv(&flags, Path::new("/base"), vec![b"true".to_vec()]).unwrap();
    assert_eq!(job.cache, CacheSpec { memory_bytes: 1 << 30, disk_bytes: 2 << 30, dir: None });
}
