#!/usr/bin/env python3
"""`limb snapshot create` at scale: many small files first and again, large files beside b3sum.

    bench/snapshot.py [--files 1000000] [--large-gib 4] [--reps 3] [--build target/release] [--other DIR]

Prints a table and writes target/bench/snapshot.json. All files lie on a tmpfs (warm, and their disk
is not what is measured), limb's state under target/bench. Needs root, and b3sum for the large ones.
With --other the build there is measured too, in turns with this one. What is measured in one run is
measured in turns: on a busy machine compare ratios, and the best of them.
"""
import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time

from million import ROOT, make_files, measured

WORK = os.path.join(ROOT, "target", "bench", "snapshot")
LARGE = 256 << 20


def make_large(root, gib):
    os.makedirs(root)
    noise = os.urandom(1 << 20)
    for number in range(gib * (1 << 30) // LARGE):
        with open(f"{root}/{number:03d}.bin", "wb", buffering=0) as file:
            for piece in range(LARGE >> 20):
                file.write(piece.to_bytes(8, "little") + (noise[number:] + noise[:number])[8:])


def freeze(build, source, state):
    folders = {f"XDG_{what}_HOME": f"{state}/{what.lower()}" for what in ("STATE", "CONFIG")}
    env = dict(os.environ, XDG_RUNTIME_DIR=state, **folders)
    row, said = measured([os.path.join(build, "limb"), "-q", "snapshot", "create", source], env)
    return row, said.split()[0]


def fresh(name):
    path = os.path.join(WORK, "state", name)
    shutil.rmtree(path, ignore_errors=True)
    os.makedirs(path)
    return path


def small_files(rows, builds, source, args):
    make_files(source, args.files)
    time.sleep(2.1)                    # a file changed less than 2 s before it is read is read again
    for _ in range(args.reps):
        for name, build in builds.items():
            state = fresh(name)
            first, identity = freeze(build, source, state)
            rows.setdefault(f"{name} first", []).append(first)
            for _ in range(2):
                again, same = freeze(build, source, state)
                rows.setdefault(f"{name} unchanged", []).append(again)
                if same != identity:
                    sys.exit("an unchanged tree has another identity")


def large_files(rows, builds, source, args):
    make_large(source + "/large", args.large_gib)
    files = sorted(os.path.join(source, "large", name) for name in os.listdir(source + "/large"))
    time.sleep(2.1)
    for _ in range(args.reps):
        took, _ = measured([shutil.which("b3sum") or sys.exit("no b3sum"), *files], os.environ)
        rows.setdefault("b3sum large", []).append(took)
        for name, build in builds.items():
            row, _ = freeze(build, source + "/large", fresh(name))
            row["of_b3sum"] = took["s"] / row["s"]
            rows.setdefault(f"{name} large", []).append(row)


def shown(name, samples, count, unit):
    median = statistics.median(row["s"] for row in samples)
    best = min(row["s"] for row in samples)
    cpu = statistics.median(row["cpu_s"] for row in samples)
    rss = max(row["rss_mib"] for row in samples)
    line = f"{name:18} {median:7.2f} s (best {best:6.2f}): {count / median:10.0f} {unit}/s, {cpu:6.1f} s of CPU, {rss:5.0f} MiB"
    ratios = [row["of_b3sum"] for row in samples if "of_b3sum" in row]
    if ratios:
        line += f", {statistics.median(ratios):.2f} of b3sum (best {max(ratios):.2f})"
    return line


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--large-gib", type=int, default=4)
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--build", default=os.path.join(ROOT, "target", "release"))
    parser.add_argument("--other")
    args = parser.parse_args()
    builds = {"limb": os.path.realpath(args.build)} | ({"other": os.path.realpath(args.other)} if args.other else {})
    shutil.rmtree(WORK, ignore_errors=True)
    source = WORK + "/source"
    os.makedirs(source)
    size = args.files * 5 // 1000 + args.large_gib * 1040 + 64
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}m,nr_inodes=0", "limb-bench", source], check=True)
    rows = {}
    try:
        if args.large_gib:
            large_files(rows, builds, source, args)
            shutil.rmtree(source + "/large")
        if args.files:
            small_files(rows, builds, source, args)
    finally:
        subprocess.run(["umount", "-l", source])
    for name, samples in rows.items():
        large = name.endswith("large")
        print(shown(name, samples, args.large_gib * 1024 if large else args.files, "MiB" if large else "files"))
    with open(os.path.join(ROOT, "target", "bench", "snapshot.json"), "w") as file:
        json.dump(rows, file, indent=1)
    shutil.rmtree(WORK, ignore_errors=True)


if __name__ == "__main__":
    main()
