//! What a job sees, and what it cannot touch.

use std::fs;
use std::path::Path;

use limb_agent::job::changes::{ChangeKind, changes, keep};
use limb_agent::job::layer::WorkdirLayer;
use limb_agent::job::{Access, Bind, JobError, Workdir};

use crate::support::{Place, exit, read_only, run, text, try_run};

fn listing_of_root() -> Vec<std::ffi::OsString> {
    let mut names: Vec<_> = fs::read_dir("/").unwrap().flatten().map(|entry| entry.file_name()).collect();
    names.sort();
    names
}

#[test]
fn mount_points_appear_without_a_trace_on_the_host() {
    let place = Place::new();
    fs::create_dir_all(place.path("set/inner")).unwrap();
    fs::write(place.path("set/a"), "of the set").unwrap();
    fs::write(place.path("one.txt"), "one file").unwrap();
    fs::create_dir_all(place.path("results")).unwrap();
    let before = listing_of_root();
    let mut spec = place.script(
        "cat /limb-data/x/y/a /mnt/limb-a/b/a /limb-data/one.txt /etc/limb-file; ls /etc/passwd; \
         echo result >/ckpt-limb/r && cat /limb-data/x/y/inner/out/r; touch /limb-data/x/y/no 2>/dev/null || echo kept",
    );
    spec.view.mounts = vec![
        read_only(&place.path("set"), "/limb-data/x/y"),
        read_only(&place.path("set"), "/mnt/limb-a/b"),
        read_only(&place.path("one.txt"), "/limb-data/one.txt"),
        read_only(&place.path("one.txt"), "/etc/limb-file"),
        Bind { source: place.path("results"), target: "/ckpt-limb".into(), access: Access::ReadWrite },
        // Inside a read-only set, where it does not exist.
        Bind {
            source: place.path("results"),
            target: "/limb-data/x/y/inner/out".into(),
            access: Access::ReadWrite,
        },
    ];
    let (end, output) = run(spec);
    assert_eq!(text(&output), "of the setof the setone fileone file/etc/passwd\nresult\nkept");
    assert_eq!(end.how, exit(0));
    assert_eq!(listing_of_root(), before);
    assert!(!Path::new("/mnt/limb-a").exists() && !Path::new("/etc/limb-file").exists());
    assert_eq!(fs::read_to_string(place.path("results/r")).unwrap(), "result\n");
    assert!(!place.path("set/inner/out").exists());
}

#[test]
fn the_host_is_read_only_and_scratch_is_private() {
    let place = Place::new();
    fs::write("/tmp/limb-test-of-the-host", "").unwrap();
    let script = r#"
        for path in / /etc /usr /var /run /root /home /sys /proc/sys/kernel; do
            touch $path/limb-probe 2>/dev/null && echo "wrote $path"
        done
        for path in $HOME /tmp /var/tmp /dev/shm .; do touch $path/limb-probe || echo "not $path"; done
        ls /tmp $HOME /var/tmp; ls -d /tmp/limb-test-of-the-host 2>/dev/null
        mount -t tmpfs x /mnt 2>/dev/null && echo mounted
        mount -o remount,rw / 2>/dev/null && echo remounted
        umount /tmp 2>/dev/null && echo unmounted
        echo 1 >/dev/null; head -c 1 /dev/urandom | wc -c
        ls -d /proc/[0-9]* | wc -l; readlink -f /bin/sh; pwd; ls /"#;
    let (end, output) = run(place.script(script));
    fs::remove_file("/tmp/limb-test-of-the-host").unwrap();
    assert_eq!(end.how, exit(0));
    let said = text(&output);
    assert!(!said.contains("wrote ") && !said.contains("not ") && !said.contains("limb-test-of"), "{said}");
    assert!(!said.contains("mounted"), "{said}");
    assert!(said.contains("\n1\n"), "{said}");
    assert!(said.contains("/workdir"), "{said}");
    for path in ["/tmp", "/var/tmp", "/dev/shm", "/etc", "/"] {
        assert!(!Path::new(path).join("limb-probe").exists(), "{path}");
    }
}

#[test]
fn the_agents_private_directory_is_hidden() {
    // Not under /tmp, which is private anyway.
    let state = tempfile::Builder::new().prefix("limb-state-").tempdir_in("/var").unwrap();
    fs::write(state.path().join("key"), "x").unwrap();
    let place = Place::new();
    let mut spec = place.script(&format!("ls -A {}", state.path().display()));
    spec.view.hide.push(state.path().to_owned());
    let (end, output) = run(spec);
    assert_eq!((end.how, text(&output)), (exit(0), String::new()));
}

#[test]
fn a_view_that_cannot_be_built_says_why() {
    let place = Place::new();
    let mut spec = place.script("true");
    spec.view.mounts = vec![read_only(&place.path("not-there"), "/limb-data")];
    match try_run(spec) {
        Err(JobError::View(why)) => assert!(why.contains("not-there"), "{why}"),
        other => panic!("{other:?}"),
    }
    let mut spec = place.script("true");
    spec.view.mounts = vec![read_only(&place.path("lower"), "/proc/self")];
    assert!(matches!(try_run(spec), Err(JobError::View(_))));
}

#[test]
fn changes_of_an_overlaid_workdir_are_listed_and_kept() {
    let place = Place::new();
    let lower = place.path("lower");
    for name in ["same", "edited", "removed", "old/a", "old/b", "tree/deep/x"] {
        fs::create_dir_all(lower.join(name).parent().unwrap()).unwrap();
        fs::write(lower.join(name), name).unwrap();
    }
    let layer = WorkdirLayer::create(place.dir.path(), "ram").unwrap();
    let mut spec = place.script(
        "set -e; cat same >/dev/null; echo more >>edited; rm removed; rm -r old; mkdir old; echo n >old/new; \
         mkdir -p made/deep; head -c 5000 /dev/zero >made/deep/big; ln -s ../same made/link; \
         mv tree moved; chmod +x same; mkfifo pipe",
    );
    spec.view.workdir = Workdir::Overlay { lower: lower.clone(), layer: layer.path().to_owned() };
    let (end, output) = match try_run(spec) {
        Err(JobError::OverlayRefused(why)) => {
            eprintln!("not checked: {why}");
            return;
        }
        other => other.unwrap(),
    };
    assert_eq!(end.how, exit(0), "{}", text(&output));
    assert_eq!(fs::read_to_string(lower.join("edited")).unwrap(), "edited");
    let found = changes(&layer.upper(), Some(&lower)).unwrap();
    let names: Vec<(String, ChangeKind)> =
        found.iter().map(|change| (change.path.display().to_string(), change.kind)).collect();
    use ChangeKind::{Created, Modified, Removed, Special};
    let wanted = [
        ("edited", Modified),
        ("made/deep/big", Created),
        ("made/link", Created),
        ("moved/deep/x", Created),
        ("old/a", Removed),
        ("old/b", Removed),
        ("old/new", Created),
        ("pipe", Special),
        ("removed", Removed),
        ("same", Modified),
        ("tree", Removed),
    ];
    assert_eq!(names, wanted.map(|(name, kind)| (name.to_owned(), kind)));
    let to = place.path("changes");
    fs::create_dir(&to).unwrap();
    let kept = keep(&found, &layer.upper(), &to, 1000);
    assert_eq!(kept.left, ["pipe (not a file)", "made/deep/big (5000 bytes, over the cap)"]);
    assert_eq!(fs::read_to_string(to.join("edited")).unwrap(), "editedmore\n");
    assert_eq!(fs::read_link(to.join("made/link")).unwrap(), Path::new("../same"));
    assert_eq!(kept.removed.len(), 4);
    let path = layer.path().to_owned();
    drop(layer);
    assert!(!path.exists());
}

#[test]
fn a_virtual_environment_works_in_the_workdir() {
    let place = Place::new();
    let script = "python3 -m venv --without-pip env && env/bin/python -c 'import sys; print(sys.prefix)'";
    let (end, output) = run(place.script(script));
    assert_eq!((end.how, text(&output).as_str()), (exit(0), "/workdir/env"));
}

/// Run by the next test as a user without rights.
#[test]
#[ignore = "the other half of a_user_without_rights_gets_the_same_view"]
fn as_nobody() {
    assert!(!nix::unistd::geteuid().is_root());
    mount_points_appear_without_a_trace_on_the_host();
    the_host_is_read_only_and_scratch_is_private();
    changes_of_an_overlaid_workdir_are_listed_and_kept();
    crate::over_fuse::a_set_on_fuse_is_a_writable_workdir();
    a_virtual_environment_works_in_the_workdir();
}

#[test]
fn a_user_without_rights_gets_the_same_view() {
    use std::os::unix::fs::PermissionsExt as _;
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    // The build directory may be closed to others: bring both programs along.
    let dir = tempfile::Builder::new().prefix("limb-nobody-").tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let test = dir.path().join("test");
    fs::copy(std::env::current_exe().unwrap(), &test).unwrap();
    fs::copy(crate::support::program(), dir.path().join("limb-agent")).unwrap();
    let output = std::process::Command::new("setpriv")
        .args(["--reuid", "65534", "--regid", "65534", "--clear-groups"])
        .arg(&test)
        .args(["--ignored", "--exact", "seen::as_nobody", "--nocapture"])
        .env("TMPDIR", dir.path())
        .env("LIMB_TEST_AGENT", dir.path().join("limb-agent"))
        .current_dir(dir.path())
        .output()
        .unwrap();
    let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{said}");
    assert!(said.contains("1 passed"), "{said}");
}
