//! Real programs over the mounts: what people run, unchanged.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ffi::OsStr;
use std::fs;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;

use limb_tests::home::{Home, binaries, lacks, lacks_fuse};

fn zoo(root: &Path) {
    fs::create_dir_all(root.join("deep/er/est")).unwrap();
    let names: [&[u8]; 6] =
        [b"with space", b"new\nline", b"\xff\xfe non-utf8", b"-dash", "ünïcode".as_bytes(), &[b'n'; 255]];
    for (index, name) in names.iter().enumerate() {
        fs::write(
            root.join(OsStr::from_bytes(name)),
            vec![b'a' + u8::try_from(index).unwrap(); index * 70_000],
        )
        .unwrap();
    }
    fs::write(root.join("empty"), "").unwrap();
    fs::write(root.join("deep/er/est/script"), "#!/bin/sh\necho script ran\n").unwrap();
    fs::set_permissions(root.join("deep/er/est/script"), fs::Permissions::from_mode(0o755)).unwrap();
    fs::set_permissions(root.join("empty"), fs::Permissions::from_mode(0o600)).unwrap();
    symlink("deep/er", root.join("link")).unwrap();
    symlink("/nonexistent/target", root.join("dangling")).unwrap();
    fs::hard_link(root.join("with space"), root.join("deep/hard")).unwrap();
    let sparse = fs::File::create(root.join("sparse")).unwrap();
    sparse.set_len(50 << 20).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&sparse, b"tail", (50 << 20) - 4).unwrap();
    fs::write(root.join("big"), (0..5_000_000_u32).flat_map(|n| n.to_le_bytes()).collect::<Vec<u8>>())
        .unwrap();
}

fn same_tree(a: &Path, b: &Path) {
    let out = Command::new("rsync")
        .args(["-aHn", "--checksum", "--delete", "--itemize-changes"])
        .arg(format!("{}/", a.display()))
        .arg(format!("{}/", b.display()))
        .output()
        .expect("rsync is installed");
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let differences: Vec<_> =
        text.lines().filter(|line| !line.starts_with(".d..t") && !line.starts_with(".L..t")).collect();
    assert_eq!(differences, Vec::<&str>::new(), "{} and {} differ", a.display(), b.display());
}

#[test]
fn copying_programs_see_and_make_the_same_tree() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    zoo(&home.path("src/zoo"));
    // Absolute link targets are refused in results, so what is written leaves the dangling one out.
    let ended = home.run(
        "copies",
        "mounts: {/zoo: \"{root}/src/zoo\"}\n\
         outputs: {/out: {dest: \"{root}/dest/copies\"}}\n\
         run: |\n  set -e\n  /zoo/deep/er/est/script\n  test -z \"$(find /zoo -newermt '+1 day')\"\n  \
         mkdir /out/cp /out/rsync /out/tar\n  \
         cd /zoo; find . -name dangling -prune -o -mindepth 1 -maxdepth 1 -print0 | xargs -0 cp -a -t /out/cp\n  \
         rsync -aH --exclude dangling /zoo/ /out/rsync/\n  \
         tar -C /zoo --exclude ./dangling -cf - . | tar -C /out/tar -xf -\n  \
         (cd /zoo; find . -type f -print0 | sort -z | xargs -0 sha256sum) > /tmp/sums\n  \
         cd /out/rsync; sha256sum --quiet -c /tmp/sums\n  \
         ! cp -a /zoo/dangling /out/dangling 2>/tmp/refused; cat /tmp/refused\n  \
         du -s --apparent-size /zoo | cut -f1\n  test \"$(stat -c %b /zoo/sparse)\" -lt 10000\n",
    );
    assert_eq!(ended.code, 0, "{ended:?}\n{}", home.events("copies"));
    assert!(ended.stdout.contains("script ran"));
    fs::remove_file(home.path("src/zoo/dangling")).unwrap();
    for copy in ["cp", "rsync", "tar"] {
        same_tree(&home.path("src/zoo"), &home.path(format!("dest/copies/{copy}")));
    }
    assert!(!home.path("dest/copies/dangling").exists());
}

#[test]
fn git_works_from_and_into_the_mounts() {
    if lacks_fuse() {
        return;
    }
    let mut home = Home::new();
    home.serve();
    let repo = home.path("src/repo");
    fs::create_dir_all(&repo).unwrap();
    let git = |arguments: &[&str]| {
        let status = Command::new("git")
            .current_dir(&repo)
            .args(["-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"])
            .args(arguments)
            .output()
            .unwrap();
        assert!(status.status.success(), "{status:?}");
    };
    git(&["init", "-q"]);
    for n in 0..50 {
        fs::write(repo.join(format!("f{n}")), format!("{n}\n").repeat(1000)).unwrap();
    }
    git(&["add", "."]);
    git(&["commit", "-qm", "first"]);
    let ended = home.run(
        "git",
        "mounts: {/repo: \"{root}/src/repo\"}\noutputs: {/out: {dest: \"{root}/dest/git\"}}\n\
         run: |\n  set -e\n  git config --global --add safe.directory '*'\n  git clone -q --no-hardlinks /repo /out/clone\n  cd /out/clone\n  \
         echo more >> f1\n  git -c user.name=t -c user.email=t@example.org commit -qam second\n  git fsck --full\n  git status --porcelain\n",
    );
    assert_eq!(ended.code, 0, "{ended:?}");
    let fsck = Command::new("git")
        .current_dir(home.path("dest/git/clone"))
        .args(["fsck", "--full"])
        .output()
        .unwrap();
    assert!(fsck.status.success(), "{fsck:?}");
    let log = Command::new("git")
        .current_dir(home.path("dest/git/clone"))
        .args(["log", "--oneline"])
        .output()
        .unwrap();
    assert_eq!(String::from_utf8_lossy(&log.stdout).lines().count(), 2);
}

#[test]
fn python_maps_files_and_saves_tensors() {
    if lacks_fuse() {
        return;
    }
    let python = binaries().join("../demo/venv/bin/python");
    if lacks("no Python environment; tests/setup test makes it", python.exists()) {
        return;
    }
    let mut home = Home::new();
    home.serve();
    fs::create_dir_all(home.path("src/data")).unwrap();
    let make = Command::new(&python).arg("-c").arg(format!(
        "import numpy as np; from safetensors.numpy import save_file; d='{}'; a=np.arange(3_000_000, dtype=np.float32); \
         np.save(d+'/a.npy', a); save_file({{'w': a.reshape(1000, 3000), 'b': np.ones(7)}}, d+'/m.safetensors')",
        home.path("src/data").display()
    )).status().unwrap();
    assert!(make.success());
    home.write(
        "src/work/job.py",
        r#"
import mmap, os, numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file, load_file
a = np.load('/data/a.npy', mmap_mode='r')
assert a[123456] == 123456 and a[::4096].sum() == np.arange(3_000_000, dtype=np.float32)[::4096].sum()
with open('/data/a.npy', 'rb') as f:
    m = mmap.mmap(f.fileno(), 0, prot=mmap.PROT_READ)
    total = sum(m[i] for i in range(0, len(m), 4096))
with safe_open('/data/m.safetensors', 'np') as f:
    assert f.get_slice('w')[17:18].ravel()[5] == 17 * 3000 + 5
for step in range(3):
    save_file({'w': a.reshape(1000, 3000) + step}, '/out/ckpt.safetensors')
back = load_file('/out/ckpt.safetensors')
assert back['w'][3, 4] == 3 * 3000 + 4 + 2
mm = np.memmap('/out/mapped.bin', dtype=np.int64, mode='w+', shape=(300_000,))
mm[:] = np.arange(300_000); mm.flush(); del mm
assert np.fromfile('/out/mapped.bin', dtype=np.int64).sum() == sum(range(300_000))
import sqlite3
for where in ('work.db', '/out/results.db'):
    db = sqlite3.connect(where)
    db.execute('create table t (x integer)')
    for i in range(200):
        db.execute('insert into t values (?)', (i,))
        if i % 50 == 0: db.commit()
    db.commit()
    assert db.execute('select count(*), sum(x) from t').fetchone() == (200, 19900)
    assert db.execute('pragma integrity_check').fetchone()[0] == 'ok'
    db.close()
print('all well')
"#,
    );
    let ended = home.run(
        "python",
        &format!(
            "workdir: \"{{root}}/src/work\"\nmounts: {{/data: \"{{root}}/src/data\"}}\noutputs: {{/out: {{dest: \"{{root}}/dest/python\"}}}}\n\
             run: {} job.py\n",
            python.canonicalize().map_or(python.clone(), |_| fs::canonicalize(python.parent().unwrap()).unwrap().join("python")).display()
        ),
    );
    assert_eq!(ended.code, 0, "{ended:?}\n{}", home.events("python"));
    assert!(ended.stdout.contains("all well"));
    let verify = home.say(&["results", "verify", "python"]);
    assert_eq!(verify.code, 0, "{verify:?}");
    let mapped = home.read("dest/python/mapped.bin").unwrap();
    assert_eq!(mapped.len(), 8 * 300_000);
    assert_eq!(mapped[8 * 299_999..], 299_999_i64.to_le_bytes());
}

/// A rented box cannot look at home's disk; a local one could, and must not.
#[test]
fn the_agent_opens_no_path_of_homes() {
    if lacks_fuse() || lacks("strace is not installed", Path::new("/usr/bin/strace").exists()) {
        return;
    }
    let mut home = Home::new();
    home.write("src/data/file", vec![1_u8; 2 << 20]);
    home.write("src/work/x", "x");
    let trace = home.path("run/trace");
    let wrapper = home.write(
        "run/agent",
        format!(
            "#!/bin/sh\nexec strace -f -qq -e trace=%file -s 4096 -o {} {} \"$@\"\n",
            trace.display(),
            binaries().join("limb-agent").display()
        ),
    );
    fs::set_permissions(&wrapper, fs::Permissions::from_mode(0o755)).unwrap();
    let settings = fs::read_to_string(home.path("config/limb/limb.toml")).unwrap();
    let settings: String = settings
        .lines()
        .map(|line| {
            if line.starts_with("agent") {
                format!("agent = \"{}\"\n", wrapper.display())
            } else {
                format!("{line}\n")
            }
        })
        .collect();
    home.write("config/limb/limb.toml", settings);
    home.serve();
    let ended = home.run(
        "traced",
        "workdir: \"{root}/src/work\"\nmounts: {/data: \"{root}/src/data\"}\noutputs: {/out: {dest: \"{root}/dest/traced\"}}\nrun: cp /data/file /out/file\n",
    );
    assert_eq!(ended.code, 0, "{ended:?}");
    assert_eq!(home.read("dest/traced/file").map(|b| b.len()), Some(2 << 20));
    let text = String::from_utf8_lossy(&fs::read(&trace).unwrap()).into_owned();
    assert!(text.contains("/dev/fuse"), "the trace shows the agent at work");
    let forbidden: Vec<_> = [
        "src",
        "dest",
        "state/limb/limb.db",
        "state/limb/store",
        "state/limb/snapshots",
        "state/limb/ca",
        "config",
    ]
    .iter()
    .map(|part| home.path(part).to_string_lossy().into_owned())
    .collect();
    let opened: Vec<_> =
        text.lines().filter(|line| forbidden.iter().any(|path| line.contains(path.as_str()))).collect();
    assert_eq!(opened, Vec::<&str>::new(), "the agent touched home's own files");
}

#[test]
fn a_normal_user_can_run_too() {
    if lacks_fuse()
        || lacks("only root can start the test as somebody else", nix::unistd::geteuid().is_root())
    {
        return;
    }
    if lacks("fusermount3 is not installed", Path::new("/usr/bin/fusermount3").exists()) {
        return;
    }
    let mut home = Home::of_user(65_534);
    home.write("src/data/file", "for anybody\n");
    home.serve();
    let ended = home.run(
        "user",
        "mounts: {/data: \"{root}/src/data\"}\noutputs: {/out: {dest: \"{root}/dest/user\"}}\nrun: |\n  id -u\n  cat /data/file\n  cp /data/file /out/file\n  echo w > in-workdir\n",
    );
    assert_eq!(ended.code, 0, "{ended:?}\n{}", home.log());
    assert!(ended.stdout.contains("for anybody"), "{ended:?}");
    assert_eq!(home.read("dest/user/file").as_deref(), Some(&b"for anybody\n"[..]));
    home.assert_no_box_left();
}
