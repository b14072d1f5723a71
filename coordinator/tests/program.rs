//! The real binary where it needs no coordinator: usage, settings, completions, manual.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::process::{Command, Output, Stdio};

struct Home(tempfile::TempDir);

impl Home {
    fn limb(&self, arguments: &[&str]) -> Output {
        Command::new(env!("CARGO_BIN_EXE_limb"))
            .args(arguments)
            .env_clear()
            .env("XDG_CONFIG_HOME", self.0.path().join("config"))
            .env("XDG_STATE_HOME", self.0.path().join("state"))
            .current_dir(self.0.path())
            .stdin(Stdio::null())
            .output()
            .unwrap()
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn mistakes_on_the_command_line_are_said_on_stderr_with_a_code_of_limbs_own() {
    let home = Home(tempfile::tempdir().unwrap());
    for (arguments, words) in [
        (&["rnu"][..], "unrecognized subcommand"),
        (&["run"], "required"),
        (&["run", "a.yaml", "--", "b"], "cannot be used"),
        (&["cost", "--csv", "--json"], "cannot be used"),
        (&["config", "show", "--set", "lisen=1"], "did you mean `listen`"),
        (&["run", "missing.yaml"], "could not read the job file missing.yaml"),
        (&["run", "--mount", "x", "--", "true"], "--mount \"x\" cannot be read"),
        (&["run", "--env", "NOT_THERE", "--", "true"], "`NOT_THERE` is not set"),
        (&["cost", "--month", "May"], "is not a month"),
    ] {
        let output = home.limb(arguments);
        assert_eq!(output.status.code(), Some(64), "{arguments:?}: {}", text(&output.stderr));
        assert!(text(&output.stderr).contains(words), "{arguments:?}: {}", text(&output.stderr));
        assert!(output.stdout.is_empty(), "{arguments:?}");
    }
}

#[test]
fn a_bad_job_file_names_its_line_and_whose_code_it_is() {
    let home = Home(tempfile::tempdir().unwrap());
    std::fs::write(home.0.path().join("job.yaml"), "run: echo\nmounst: {}\n").unwrap();
    let output = home.limb(&["run", "-y", "job.yaml"]);
    assert_eq!(
        text(&output.stderr),
        "error: job.yaml:2: unknown key `mounst`\nhint: did you mean `mounts`?\nexit 64: limb: refused before anything was started\n"
    );
    let output = home.limb(&["run", "-y", "--json", "job.yaml"]);
    assert!(text(&output.stdout).contains("\"exit_origin\": \"limb: refused before anything was started\""));
    assert!(!home.0.path().join("state").exists(), "nothing was started");
}

/// Runs that are going on need their coordinator: looking at them brings it back, and in an empty
/// home it finds nothing and ends.
#[test]
fn ps_of_an_empty_home_says_that_nothing_is_running() {
    let home = Home(tempfile::tempdir().unwrap());
    let output = home.limb(&["ps"]);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let said = text(&output.stdout) + &text(&output.stderr);
    assert!(said.contains("nothing is running"), "{said}");
    assert_eq!(home.limb(&["ps", "--json"]).stdout, b"[]\n");
    assert_eq!(home.limb(&["serve", "--stop"]).status.code(), Some(0));
    // Stopped on purpose: looking does not start it again.
    let output = home.limb(&["ps"]);
    assert_eq!(output.status.code(), Some(76));
    assert!(text(&output.stderr).contains("hint: "), "{}", text(&output.stderr));
}

#[test]
fn settings_show_their_origin() {
    let home = Home(tempfile::tempdir().unwrap());
    std::fs::create_dir_all(home.0.path().join("config/limb")).unwrap();
    std::fs::write(home.0.path().join("config/limb/limb.toml"), "log_quota = \"5MB\"\n").unwrap();
    let output = home.limb(&["config", "show", "--set", "log=debug"]);
    let shown = text(&output.stdout);
    assert!(shown.contains("limb.toml:1") && shown.contains("--set") && shown.contains("default"), "{shown}");
    let output = home.limb(&["config", "show", "--json"]);
    let document: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(document["log_quota"]["origin"], "file");
    assert_eq!(document["provider"]["value"], "local");
    assert_eq!(document["advertise"]["value"], serde_json::Value::Null);
}

#[test]
fn completions_manual_and_help_are_data() {
    let home = Home(tempfile::tempdir().unwrap());
    for shell in ["bash", "zsh", "fish"] {
        let output = home.limb(&["completions", shell]);
        assert!(output.status.success() && text(&output.stdout).contains("limb"), "{shell}");
    }
    assert!(text(&home.limb(&["man"]).stdout).contains(".TH limb 1"));
    assert!(text(&home.limb(&["--help"]).stdout).contains("Usage: limb"));
    assert_eq!(home.limb(&["--version"]).status.code(), Some(0));
}

#[test]
fn a_reader_that_goes_away_is_no_panic() {
    let home = Home(tempfile::tempdir().unwrap());
    let mut child = Command::new(env!("CARGO_BIN_EXE_limb"))
        .args(["completions", "bash"])
        .current_dir(home.0.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let output = child.wait_with_output().unwrap();
    assert_eq!(text(&output.stderr), "");
    assert_eq!(output.status.code(), Some(0));
}
