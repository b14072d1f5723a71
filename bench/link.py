#!/usr/bin/env python3
"""limb beside sshfs over a simulated link, in one run: sequential read, small files, checkpoint.

    bench/link.py [--profile fibre] [--reps 3] [--only limb|sshfs] [--out target/bench/link.json]

Home and box are two network namespaces joined by linklab; the limb coordinator and an sshd run at
home, the agent and sshfs on the box. Every repetition starts cold (a fresh mount; sshfs: a fresh
mount, no page cache). Root only. Figures go to the JSON file and a table to stdout.
"""
import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import textwrap

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
sys.path.insert(0, os.path.join(ROOT, "tests", "linklab"))
import labutil  # noqa: E402

MIB = 1 << 20
SEQ, FILES, CHECKPOINT = 256 * MIB, 250, 256 * MIB
HOME_IP = "10.77.0.1"


class Bench:
    def __init__(self, profile, build):
        self.lab = labutil.Bench("lb")
        self.profile = profile
        self.work = os.path.join(ROOT, "target", "bench", "work")
        self.data, self.dest = self.work + "/home/data", self.work + "/home/dest"
        self.mnt, self.etc = self.work + "/mnt", self.work + "/etc"
        self.sshd = None
        self.env = dict(os.environ, XDG_STATE_HOME=self.work + "/state", XDG_CONFIG_HOME=self.work + "/config",
                        XDG_RUNTIME_DIR=self.work + "/run")
        self.build = os.path.join(ROOT, "target", build)
        self.limb = os.path.join(self.build, "limb")

    def __enter__(self):
        shutil.rmtree(self.work, ignore_errors=True)
        for folder in (self.work + "/home", self.mnt, self.etc, self.work + "/run", self.work + "/config/limb", "/run/sshd"):
            os.makedirs(folder, exist_ok=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4g", "limb-bench", self.work + "/home"], check=True)
        os.makedirs(self.data + "/tree")
        os.makedirs(self.dest)
        self.make_data()
        self.lab.linklab("up", "--profile", self.profile)
        self.make_ssh()
        self.make_limb()
        return self

    def __exit__(self, *_):
        subprocess.run(["nsenter", f"--net=/run/netns/{self.lab.ns['home']}", "--", self.limb, "serve", "--stop"],
                       env=self.env, capture_output=True)
        if self.sshd:
            self.sshd.send_signal(signal.SIGTERM)
            self.sshd.wait()
        subprocess.run(["umount", "-l", self.mnt], capture_output=True)
        self.lab.linklab("down", check=False)
        subprocess.run(["umount", "-l", self.work + "/home"], capture_output=True)
        shutil.rmtree(self.work, ignore_errors=True)

    def make_data(self):
        with open(self.data + "/big.bin", "wb") as f:
            for _ in range(SEQ // (16 * MIB)):
                f.write(os.urandom(16 * MIB))
        rng, blob = random.Random(3), os.urandom(16 * MIB)
        for i in range(FILES):
            folder = f"{self.data}/tree/d{i // 100:03}"
            os.makedirs(folder, exist_ok=True)
            n = rng.randint(4096, 40960)
            o = rng.randrange(0, len(blob) - n)
            with open(f"{folder}/f{i % 100:03}.bin", "wb") as f:
                f.write(blob[o:o + n])

    def make_ssh(self):
        for key in ("key", "hostkey"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", f"{self.etc}/{key}"], check=True)
        shutil.copy(self.etc + "/key.pub", self.etc + "/authorized")
        with open(self.etc + "/sshd_config", "w") as f:
            f.write(textwrap.dedent(f"""\
                Port 2222
                ListenAddress {HOME_IP}
                HostKey {self.etc}/hostkey
                AuthorizedKeysFile {self.etc}/authorized
                PermitRootLogin prohibit-password
                PasswordAuthentication no
                KbdInteractiveAuthentication no
                UsePAM no
                StrictModes no
                PidFile none
                Subsystem sftp internal-sftp
                """))
        self.sshd = self.lab.start("home", ["/usr/sbin/sshd", "-D", "-e", "-f", self.etc + "/sshd_config"])

    def make_limb(self):
        wrapper = self.work + "/agent-in-the-box"
        agent = os.path.join(self.build, "limb-agent")
        with open(wrapper, "w") as f:
            f.write(f'#!/bin/sh\nexec nsenter --net=/run/netns/{self.lab.ns["box"]} -- {agent} "$@"\n')
        os.chmod(wrapper, 0o755)
        with open(self.work + "/config/limb/limb.toml", "w") as f:
            f.write(f'listen = "{HOME_IP}:7443"\nagent = "{wrapper}"\n')

    # -- one cold measurement each ---------------------------------------------------------
    def with_limb(self, what):
        shutil.rmtree(self.dest, ignore_errors=True)
        os.makedirs(self.dest)
        job = self.work + "/job.yaml"
        with open(job, "w") as f:
            f.write(textwrap.dedent(f"""\
                name: bench
                workdir: {ROOT}/bench
                resources: {{infra: [local]}}
                mounts: {{/data: {self.data}}}
                outputs: {{/out: {{dest: {self.dest}}}}}
                run: python3 work.py {self.command(what, '/data', '/out')}
                """))
        out = self.lab.run("home", [self.limb, "run", "-y", job], env=self.env)
        if out.returncode:
            raise RuntimeError(f"limb run: {out.returncode}\n{out.stdout}\n{out.stderr}")
        return self.result(out.stdout)

    def with_sshfs(self, what):
        target = f"root@{HOME_IP}:{self.work}/home"
        mounted = self.lab.run("box", [
            "sshfs", "-p", "2222", "-o", f"IdentityFile={self.etc}/key,StrictHostKeyChecking=no",
            "-o", "UserKnownHostsFile=/dev/null,cache_timeout=3600", target, self.mnt])
        if mounted.returncode or not os.path.ismount(self.mnt):
            raise RuntimeError(f"sshfs did not mount: {mounted.stderr}")
        try:
            command = self.command(what, self.mnt + "/data", self.mnt + "/dest").split()
            out = self.lab.run("box", ["python3", ROOT + "/bench/work.py", *command])
            if out.returncode:
                raise RuntimeError(f"{command} over sshfs: {out.stderr}")
            return self.result(out.stdout)
        finally:
            # sshfs is its own process: wait until it has gone, or the next mount meets it.
            subprocess.run(["umount", self.mnt], capture_output=True)
            subprocess.run(["umount", "-l", self.mnt], capture_output=True)

    @staticmethod
    def command(what, data, out):
        return {"seq": f"seq {data}/big.bin", "tree": f"tree {data}/tree",
                "write": f"write {out}/checkpoint.bin {CHECKPOINT}"}[what]

    @staticmethod
    def result(text):
        line = next(line for line in text.splitlines() if line.startswith("RESULT "))
        return json.loads(line.removeprefix("RESULT "))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--profile", default="fibre")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--only")
    parser.add_argument("--build", default="release", help="debug is for trying the script itself")
    parser.add_argument("--out", default=os.path.join(ROOT, "target", "bench", "link.json"))
    args = parser.parse_args()
    rows = []
    with Bench(args.profile, args.build) as bench:
        tools = {"limb": bench.with_limb, "sshfs": bench.with_sshfs}
        for rep in range(args.reps):
            for what in ("seq", "tree", "write"):
                for tool, measure in tools.items():
                    if args.only in (None, tool):
                        row = {"tool": tool, "rep": rep, "profile": args.profile} | measure(what)
                        rows.append(row)
                        print(json.dumps(row), file=sys.stderr, flush=True)
    os.makedirs(os.path.dirname(args.out), exist_ok=True)
    with open(args.out, "w") as f:
        json.dump(rows, f, indent=1)
    print("| workload | tool | seconds min/median/max | MB/s (median) | files/s |\n|---|---|---|---|---|")
    for what in ("seq", "tree", "write"):
        for tool in ("limb", "sshfs"):
            some = [r for r in rows if r["what"] == what and r["tool"] == tool]
            if some:
                s = sorted(r["seconds"] for r in some)
                mid = statistics.median(s)
                files = f"{some[0]['files'] / mid:.0f}" if "files" in some[0] else ""
                print(f"| {what} | {tool} | {s[0]:.2f}/{mid:.2f}/{s[-1]:.2f} | {some[0]['bytes'] / mid / 1e6:.1f} | {files} |")


if __name__ == "__main__":
    main()
