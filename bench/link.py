#!/usr/bin/env python3
"""limb beside sshfs over a simulated link, in one run: sequential read, small files, checkpoint.

    bench/link.py [--profile fibre] [--reps 3] [--only limb|sshfs] [--scale 0.1] [--build DIR]
                  [--out target/bench/link.json]

The short benchmark; bench/read.py is the thorough one for reads. Every repetition starts cold (a
fresh agent; a fresh mount). sshfs runs with its defaults and attributes cached for an hour. Root
only. Figures go to the JSON file and a table to stdout.
"""
import argparse
import json
import os
import statistics
import sys

import data
import lab as ground
from limb import Limb

MIB = 1 << 20
SEQ, FILES, CHECKPOINT = 256 * MIB, 250, 256 * MIB
WORKS = ("seq", "tree", "write")
SSHFS = ground.bench_tools.sshfs("-o", "cache_timeout=3600")


class Bench:
    def __init__(self, lab, build, scale):
        self.lab, self.checkpoint = lab, int(CHECKPOINT * scale)
        self.limb = Limb(lab, build)
        self.dest = lab.home + "/dest"
        os.makedirs(self.dest)
        self.files, _, self.tar_bytes = data.tree_figures(lab.data + "/tree")

    def command(self, what, source, out):
        return {"seq": ["seq", f"{source}/seq/big.bin"],
                "tree": ["tree", f"{source}/tree", "--files", str(self.files), "--tar-bytes", str(self.tar_bytes)],
                "write": ["write", f"{out}/checkpoint.bin", "--limit", str(self.checkpoint)]}[what]

    def with_limb(self, what):
        return self.limb.run(self.command(what, "/data", "/out"), {"/data": self.lab.data}, 120, output=self.dest)

    def with_sshfs(self, what):
        try:
            SSHFS(self.lab)
            return self.lab.run_work(self.command(what, self.lab.mnt, self.lab.mnt + "/up"), 120)
        finally:
            self.lab.unmount()


def make_data(root, scale):
    os.makedirs(root + "/seq")
    data.noise(root + "/seq/big.bin", int(SEQ * scale))
    data.tree(root + "/tree", int(FILES * scale))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", default="fibre", help="of `tests/linklab/linklab profiles`")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--only", choices=["limb", "sshfs"])
    parser.add_argument("--scale", type=float, default=1.0, help="less data for a quick look")
    parser.add_argument("--build", default=os.path.join(ground.ROOT, "target", "release"), help="where limb and limb-agent are")
    parser.add_argument("--out", default=os.path.join(ground.OUT, "link.json"))
    args = parser.parse_args()
    samples = []
    with ground.Lab(lambda root: make_data(root, args.scale), 4 * ground.GIB) as lab:
        lab.lab.linklab("set", "--profile", args.profile)
        bench = Bench(lab, os.path.abspath(args.build), args.scale)
        tools = {"limb": bench.with_limb, "sshfs": bench.with_sshfs}
        try:
            for rep in range(args.reps):
                for what in WORKS:
                    for tool in (t for t in tools if args.only in (None, t)):
                        samples.append({"tool": tool, "rep": rep, "profile": args.profile} | tools[tool](what))
                        print(json.dumps(samples[-1]), file=sys.stderr, flush=True)
        finally:
            bench.limb.stop()
    os.makedirs(os.path.dirname(args.out), exist_ok=True)
    with open(args.out, "w") as f:
        json.dump(samples, f, indent=1)
    table(samples)


def table(samples):
    print("| workload | tool | seconds min/median/max | MB/s (median) | files/s |\n|---|---|---|---|---|")
    for what in WORKS:
        for tool in ("limb", "sshfs"):
            some = [s for s in samples if s["what"] == what and s["tool"] == tool]
            if some:
                secs = [s["secs"] for s in some]
                rate, files = (statistics.median(s.get(key, 0) / s["secs"] for s in some) for key in ("bytes", "files"))
                print(f"| {what} | {tool} | {min(secs):.2f}/{statistics.median(secs):.2f}/{max(secs):.2f} | "
                      f"{rate / 1e6:.1f} | {f'{files:.0f}' if files else ''} |")


if __name__ == "__main__":
    main()
