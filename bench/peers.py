"""What a user would take instead of limb: mounts, and copying everything first.

The mounts' recipes are those of tests/linklab/bench_tools.py; for each work the variant is taken
that tests/linklab/RESULTS.md shows to be that tool's best.
"""
import os
import shutil
import subprocess
import time

import lab as ground

# tool: (what it needs, its best variant, {work: the variant that is better there})
MOUNTS = {
    "sshfs": (["sshfs"], "sshfs-tuned", {"rand": "sshfs", "readers": "sshfs"}),
    "rclone webdav": (["rclone"], "rclone-webdav-full", {}),
    "rclone http": (["rclone"], "rclone-http-full", {}),
    "s3fs": (["s3fs", "node", ground.bench_tools.S3RVER], "s3fs", {"warm": "s3fs-tuned"}),
}
SSH = "ssh -F {etc}/ssh_config"
COPIES = {
    "tar|ssh": (["tar", "ssh"], SSH + " -c aes128-gcm@openssh.com home 'cd {data} && tar cf - {name}' | tar xf - -C {copy}"),
    "rsync": (["rsync"], "rsync -a --inplace -e '" + SSH + "' home:{data}/{name} {copy}/"),
}


def missing():
    """{tool: what this machine lacks for it}."""
    needs = {tool: entry[0] for tool, entry in (MOUNTS | COPIES).items()}
    return {tool: f"no {os.path.basename(lack[0])} here" for tool, programs in needs.items()
            if (lack := [p for p in programs if not shutil.which(p)])}


def mounted(lab, tool, work, arguments, cap):
    """work.py over a fresh mount of home's data."""
    _, best, better = MOUNTS[tool]
    try:
        try:
            ground.bench_tools.MOUNTS[better.get(work, best)](lab)
        except RuntimeError as error:
            raise ground.WorkFailed(str(error)[-200:]) from error
        return lab.run_work(arguments, cap)
    finally:
        lab.unmount()
        if lab.server:
            lab.stop(lab.server)
            lab.procs.remove(lab.server)
            lab.server = None
        shutil.rmtree(lab.cache, ignore_errors=True)


def copied(lab, tool, name, all_bytes, all_files, cap):
    """The whole set onto the box's disk; what is there when the time is up counts."""
    shutil.rmtree(lab.copy, ignore_errors=True)
    os.makedirs(lab.copy)
    line = COPIES[tool][1].format(etc=lab.etc, data=lab.data, name=name, copy=lab.copy)
    start = time.monotonic()
    ran = subprocess.run(lab.lab.argv("box", ["timeout", str(cap), "bash", "-o", "pipefail", "-c", line]),
                         capture_output=True, text=True)
    secs = time.monotonic() - start
    if ran.returncode not in (0, 124):
        raise ground.WorkFailed(f"{tool}: {ran.stderr.strip()[-200:]}")
    sizes = [os.stat(os.path.join(folder, n)).st_size for folder, _, names in os.walk(lab.copy) for n in names]
    shutil.rmtree(lab.copy, ignore_errors=True)
    share = 1 if ran.returncode == 0 else min(1, sum(sizes) / all_bytes)
    return {"what": "copy", "secs": secs, "done": share, "all": 1, "bytes": int(share * all_bytes),
            "files": int(share * all_files)}
