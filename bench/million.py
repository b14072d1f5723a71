#!/usr/bin/env python3
"""A million files: frozen, frozen again unchanged, and looked at through the mount, on this machine.

    bench/million.py [--files 1000000] [--build target/release]

Prints a table and writes target/bench/million.json. Half of the files lie in one directory, half in
a thousand. Needs root (a tmpfs holds the files; without one their disk would be what is measured).
"""
import argparse
import json
import os
import shutil
import subprocess
import sys
import textwrap
import time

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
WORK = os.path.join(ROOT, "target", "bench", "million")

JOB = '''\
import json, os, random, subprocess, time
FLAT, TREE, STATS = "/data/flat", "/data/tree", 200_000
def took(what):
    begun = time.monotonic()
    count = what()
    return {"count": count, "s": time.monotonic() - begun}
def lines(command):
    return lambda: int(subprocess.check_output(command + " | wc -l", shell=True))
def scan():
    return sum(1 for d in os.scandir(TREE) for f in os.scandir(d) if f.stat())
names = [e.name for e in os.scandir(FLAT)]
random.Random(1).shuffle(names)
chosen = [f"{FLAT}/{name}" for name in names[:STATS]]
def stats():
    for path in chosen:
        os.stat(path)
    return len(chosen)
subprocess.run("echo 2 > /proc/sys/vm/drop_caches", shell=True)
found = {"ls_f": took(lines("ls -f " + FLAT)), "find": took(lines("find /data")), "scandir_stat": took(scan),
         "stat_cold": took(stats), "stat_cached": took(stats)}
print("RESULT", json.dumps(found), flush=True)
'''


def make_files(root, count):
    flat = os.path.join(root, "flat")
    os.makedirs(flat)
    for number in range(count // 2):
        with open(f"{flat}/{number:07d}.jpg", "wb", buffering=0) as file:
            file.write(b"%064d" % number)
    for number in range(count - count // 2):
        folder = f"{root}/tree/{number % 1000:04d}"
        if number < 1000:
            os.makedirs(folder)
        with open(f"{folder}/{number // 1000:06d}.txt", "wb", buffering=0) as file:
            file.write(b"%060d" % number)


def measured(command, env):
    """Wall seconds, CPU seconds and the largest resident size of one process and its children."""
    begun = time.monotonic()
    process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{command[1]} ended with {status}: {said}")
    return {"s": time.monotonic() - begun, "cpu_s": usage.ru_utime + usage.ru_stime, "rss_mib": usage.ru_maxrss / 1024}, said


def high_water(pid):
    for line in open(f"/proc/{pid}/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024


def through_the_mount(limb, env, source):
    """The job's figures, and the most memory that its agent had."""
    os.makedirs(WORK + "/job")
    for name, text in {"job/job.py": JOB, "job.yaml": f"""\
            name: million
            workdir: {WORK}/job
            resources: {{infra: [local]}}
            mounts: {{/data: {source}}}
            run: python3 job.py
            """, "agent": f'#!/bin/sh\necho $$ > {WORK}/pid\nexec {os.path.dirname(limb)}/limb-agent "$@"\n',
            "config/limb/limb.toml": f'agent = "{WORK}/agent"\n'}.items():
        with open(os.path.join(WORK, name), "w") as file:
            file.write(textwrap.dedent(text))
    os.chmod(WORK + "/agent", 0o755)
    process = subprocess.Popen([limb, "run", "-y", WORK + "/job.yaml"], env=env, stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    most, said = 0, []
    for line in process.stdout:
        said.append(line)
        if line.startswith("RESULT "):
            with open(WORK + "/pid") as file:
                most = high_water(int(file.read()))
    process.wait()
    found = [line for line in said if line.startswith("RESULT ")]
    if not found:
        sys.exit("".join(said))
    return json.loads(found[0].removeprefix("RESULT ")) | {"agent_rss_mib": most}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=1_000_000)
    parser.add_argument("--build", default=os.path.join(ROOT, "target", "release"))
    args = parser.parse_args()
    shutil.rmtree(WORK, ignore_errors=True)
    for folder in ("source", "config/limb", "state", "run"):
        os.makedirs(os.path.join(WORK, folder))
    env = dict(os.environ, XDG_STATE_HOME=WORK + "/state", XDG_CONFIG_HOME=WORK + "/config", XDG_RUNTIME_DIR=WORK + "/run")
    limb, source = os.path.join(os.path.realpath(args.build), "limb"), WORK + "/source"
    options = f"size={args.files * 5 // 1000 + 64}m,nr_inodes=0"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "limb-bench", source], check=True)
    try:
        make_files(source, args.files)
        rows = {"files": args.files}
        time.sleep(2.1)                # a file changed less than 2 s before it is read is read again
        rows["freeze"], first = measured([limb, "-q", "snapshot", "create", source], env)
        rows["freeze_unchanged"], again = measured([limb, "-q", "snapshot", "create", source], env)
        if first.split()[0] != again.split()[0]:
            sys.exit("an unchanged tree has another identity")
        rows |= through_the_mount(limb, env, source)
    finally:
        subprocess.run([limb, "serve", "--stop"], env=env, capture_output=True)
        subprocess.run(["umount", "-l", source])
    for name, row in rows.items():
        if isinstance(row, dict):
            count = row.pop("count", args.files)
            row |= {"count": count, "per_s": count / row["s"]}
            more = f", {row['cpu_s']:.1f} s of CPU, {row['rss_mib']:.0f} MiB" if "cpu_s" in row else ""
            print(f"{name:17} {count:9} in {row['s']:6.2f} s: {row['per_s']:9.0f}/s{more}")
    print(f"agent: {rows['agent_rss_mib']:.0f} MiB at most")
    with open(os.path.join(ROOT, "target", "bench", "million.json"), "w") as file:
        json.dump(rows, file, indent=1)
    shutil.rmtree(WORK, ignore_errors=True)


if __name__ == "__main__":
    main()
