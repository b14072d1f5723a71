"""The ground that every benchmark stands on: a home and a box joined by linklab, an sshd at home,
a place for data (in memory where it fits), the link's settings and its ceiling.

Extends the set-up of tests/linklab/bench_tools.py, so that its recipes for sshfs, rclone and s3fs
mount here too. Root only.
"""
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
OUT = os.path.join(ROOT, "target", "bench")
sys.path.insert(0, os.path.join(ROOT, "tests", "linklab"))
import bench_tools  # noqa: E402
import labutil  # noqa: E402

HOME_IP, BOX_IP, LOOPBACK = bench_tools.HOME_IP, bench_tools.BOX_IP, "127.0.0.1"
WORK_PY = os.path.join(ROOT, "bench", "work.py")
VENV = os.path.join(OUT, "venv", "bin", "python")
PYTHON = VENV if os.path.exists(VENV) else sys.executable
bench_tools.S3RVER = os.path.join(OUT, "s3", "node_modules", ".bin", "s3rver")
GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Link:
    """`mbit` is what home can send; the other direction is as fast or, with `down`, faster."""
    mbit: float
    rtt_ms: float
    down: float = 0

    @property
    def rate(self):
        """MB/s; unlimited is 0."""
        return self.mbit / 8

    def __str__(self):
        if not self.rtt_ms:
            return "loopback"
        return (f"{self.mbit / 1000:g} Gbit/s" if self.mbit >= 1000 else f"{self.mbit:g} Mbit/s") + f" {self.rtt_ms:g} ms"


LINKS = {
    "fibre": Link(1000, 40),
    "far": Link(1000, 80),
    "mid": Link(300, 80),
    "near": Link(300, 40),
    "uplink": Link(30, 30, down=300),
    "loopback": Link(0, 0),
}


class WorkFailed(Exception):
    """The work, or the tool that was to carry it, failed; the message is for the table."""


def result(done):
    """What work.py printed, out of a finished process."""
    for line in done.stdout.splitlines():
        if line.startswith("RESULT "):
            return json.loads(line.removeprefix("RESULT "))
    said = (done.stdout + done.stderr).splitlines()
    told = [line for line in said if "rror" in line] or said or ["nothing was said"]
    raise WorkFailed(f"ended with {done.returncode}: {told[-1][:200]}")


class Lab(bench_tools.Setup):
    def __init__(self, make_data, data_bytes, tcp="stock"):
        super().__init__(os.path.join(OUT, "work"), "unshaped", tcp)
        self.lab = labutil.Bench("lb")
        self.data_bytes, self.fill = data_bytes, make_data
        self.wire = f"/run/linklab/{self.lab.name}/fwd.sock"
        self.server = self.mounter = None

    def __enter__(self):
        self.remove_work()
        for folder in (self.home, self.box, self.mnt, self.etc, "/run/sshd"):
            os.makedirs(folder, exist_ok=True)
        try:
            free = next(int(line.split()[1]) << 10 for line in open("/proc/meminfo") if line.startswith("MemAvail"))
            for folder, size in ((self.home, self.data_bytes + GIB), (self.box, 2 * GIB)):
                free -= size
                if free > 4 * GIB:              # else: plain files on the disk
                    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "limb-bench", folder], check=True)
            os.makedirs(self.data + "/up")
            self.fill(self.data)
            self.lab.linklab("up", "--profile", self.profile, "--tcp", self.tcp)
            self.make_ssh()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc):
        super().__exit__(*exc)
        self.remove_work()

    def remove_work(self):
        for folder in (self.mnt, self.home, self.box):
            while os.path.ismount(folder) and not subprocess.run(["umount", "-l", folder]).returncode:
                pass
        shutil.rmtree(self.work, ignore_errors=True)

    def set_link(self, link):
        """Whatever was set before is forgotten."""
        self.lab.linklab("set", "--profile", "unshaped")
        if link.rtt_ms:
            self.lab.linklab("set", f"rtt={link.rtt_ms}ms", f"rate={link.down or link.mbit}mbit", "queue=50ms")
            self.lab.linklab("set", "h2b", f"rate={link.mbit}mbit")

    def run_work(self, arguments, cap):
        """work.py on the box's side, over whatever is mounted."""
        command = self.lab.argv("box", [PYTHON, WORK_PY, *arguments, "--cap", str(cap), "--wire", self.wire])
        try:
            return result(subprocess.run(command, capture_output=True, text=True, timeout=cap + 90))
        except subprocess.TimeoutExpired:
            raise WorkFailed(f"hung for {cap + 90:.0f} s") from None

    def iperf(self, size, streams, loopback=False):
        """MB/s that plain TCP carries from home to box, the same way and with the same settings."""
        side, address = ("home", LOOPBACK) if loopback else ("box", BOX_IP)
        server = self.lab.start(side, ["iperf3", "-s", "-1", "-B", address])
        try:
            for _ in range(50):
                ran = self.lab.run("home", ["iperf3", "-J", "-c", address, "-n", str(size), "-P", str(streams)])
                answer = json.loads(ran.stdout or "{}")
                if received := answer.get("end", {}).get("sum_received"):
                    return received["bits_per_second"] / 8e6
                time.sleep(0.1)
            raise WorkFailed(f"iperf3: {answer.get('error', ran.stderr)}")
        finally:
            self.stop(server)
