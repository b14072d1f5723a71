//! The same way with the kernel and ordinary programs in front of it.

use std::process::{Command, Stdio};
use std::sync::Arc;

use limb_agent::mount::session::{MountOptions, MountSession};
use limb_agent::mount::write::WriteFs;
use limb_tests::home::{lacks, lacks_fuse};
use tokio_util::sync::CancellationToken;

use crate::agent::{Agent, WIDE, listing_of};
use crate::home::Home;

const PROGRAM: &str = r#"
import mmap, os, sys
home = sys.argv[1]
def noise(n, seed):
    out, x = bytearray(n), seed
    for i in range(0, n, 997):
        x = (x * 1103515245 + 12345) & 0x7fffffff
        out[i] = x & 255
    return bytes(out)
def at_home(path, wanted):
    found = open(os.path.join(home, path), "rb").read()
    assert found == wanted, (path, len(found), len(wanted))

# A shared mapping.
size = 3 * 1048576 + 5
with open("mapped", "w+b") as f:
    f.truncate(size)
    with mmap.mmap(f.fileno(), size) as m:
        content = bytearray(size)
        for at in (0, 4095, 1048570, 2097152, size - 10):
            m[at:at + 10] = b"0123456789"
            content[at:at + 10] = b"0123456789"
        m.flush()
        os.fsync(f.fileno())
        at_home("mapped", bytes(content))

# A log that grows.
log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
lines = b""
for i in range(300):
    line = b"line %d\n" % i
    os.write(log, line)
    lines += line
    if i % 100 == 99:
        os.fsync(log)
        at_home("log", lines)
os.close(log)

# A checkpoint, as everybody writes it.
for turn in range(3):
    data = noise(2 * 1048576 + turn, turn)
    with open("ckpt.tmp", "wb") as f:
        f.write(data)
        f.flush()
        os.fsync(f.fileno())
    os.rename("ckpt.tmp", "ckpt")
fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY)
os.fsync(fd)
os.close(fd)
at_home("ckpt", data)
assert not os.path.exists(os.path.join(home, "ckpt.tmp"))

# Used after it lost its name.
with open("gone", "w+b") as f:
    f.write(noise(1500000, 7))
    f.flush()
    os.fsync(f.fileno())
    os.unlink("gone")
    f.write(b"more")
    f.flush()
    os.fsync(f.fileno())

os.makedirs("d/e")
os.link("ckpt", "d/same")
os.symlink("../log", "d/link")
os.chmod("log", 0o600)
os.utime("log", ns=(1, 1234567890123456789))
with open("ckpt", "r+b") as f:
    f.seek(1048570)
    f.write(b"crosses the border")
os.truncate("mapped", 1048577)
"#;

const SHELL: &str = "set -e; cp -a d copy; dd if=/dev/zero of=sparse bs=1 count=1 seek=4M status=none; \
    tar cf all.tar d log; mv all.tar d/e/; rm -r copy; echo more >> log; touch -d 2001-02-03 d/e/all.tar";

#[test]
fn ordinary_programs_write_through_the_mount() {
    if lacks_fuse() || lacks("root, to mount", nix::unistd::geteuid().is_root()) {
        return;
    }
    let home = Home::new();
    let agent = Agent::new(&home, WIDE, None);
    let point = tempfile::tempdir().unwrap();
    let handle = agent.runtime.as_ref().unwrap().handle().clone();
    let options = MountOptions {
        path: point.path().to_owned(),
        read_only: false,
        name: "results-test".to_owned(),
        stop: CancellationToken::new(),
    };
    let session = MountSession::mount(WriteFs::new(Arc::clone(&agent.output), handle), options).unwrap();
    let run = |program: &str, arguments: &[&str]| {
        let mut command = Command::new("timeout");
        command.arg("100").arg(program).args(arguments).current_dir(point.path()).stdin(Stdio::null());
        let ended = command.output().unwrap();
        let said = String::from_utf8_lossy(&ended.stderr).into_owned();
        assert!(ended.status.success(), "{program}: {:?} {said}", ended.status);
    };
    run("python3", &["-c", PROGRAM, home.dest.to_str().unwrap()]);
    run("bash", &["-c", SHELL]);
    session.unmount().unwrap();
    let report = agent.drain();
    let refused = agent.refusals.lock().unwrap().clone();
    assert!(report.complete && refused.is_empty(), "{report:?} {refused:?}");
    assert_eq!(agent.listing(), listing_of(&home.dest));
}
