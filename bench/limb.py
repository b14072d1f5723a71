"""limb in the lab: its coordinator in the home namespace, every agent entering the box's.

Each run is a fresh agent with fresh mounts and an empty cache. While it runs, the agent's CPU time
and memory are sampled; only the agent is looked at, never the job, which may stand in an exec.
"""
import os
import shutil
import subprocess
import textwrap
import threading
import time

import lab as ground

TICK = os.sysconf("SC_CLK_TCK")
SAMPLE_EVERY_S = 0.05
MIB = 1 << 20


class Limb:
    """`loopback`: home and box are one place, without the simulated link between them."""

    def __init__(self, lab, build, loopback=False):
        self.lab, self.build = lab, build
        self.dir = os.path.join(lab.work, "limb-loopback" if loopback else "limb")
        self.limb = os.path.join(build, "limb")
        self.job, self.pidfile = self.dir + "/job", self.dir + "/agent.pid"
        self.env = dict(os.environ, XDG_STATE_HOME=self.dir + "/state", XDG_CONFIG_HOME=self.dir + "/config",
                        XDG_RUNTIME_DIR=self.dir + "/run")
        for folder in (self.job, self.dir + "/run", self.dir + "/config/limb"):
            os.makedirs(folder)
        shutil.copy(ground.WORK_PY, self.job)
        side, address = ("home", ground.LOOPBACK) if loopback else ("box", ground.HOME_IP)
        enter = " ".join(lab.lab.argv(side, [os.path.join(build, "limb-agent")]))
        self.write("agent", f'#!/bin/sh\necho $$ > {self.pidfile}\nexec {enter} "$@"\n', 0o755)
        self.write("config/limb/limb.toml", f'listen = "{address}:7443"\nagent = "{self.dir}/agent"\n')

    def write(self, name, text, mode=0o644):
        path = os.path.join(self.dir, name)
        with open(path, "w") as f:
            f.write(text)
        os.chmod(path, mode)
        return path

    def run(self, arguments, mounts, cap, cache_mib=512, output=None, trace=False, push=False):
        """work.py as a job: `mounts` says which home directory stands where. Its result, with the
        agent's figures over the time of the work. Without `trace`, nothing is known of earlier runs."""
        outputs = f"outputs: {{/out: {{dest: {output}}}}}" if output else ""
        path = self.write("job.yaml", textwrap.dedent(f"""\
            name: bench
            workdir: {self.job}
            resources: {{infra: [local]}}
            mounts: {{{', '.join(f'{at}: {source}' for at, source in mounts.items())}}}
            {outputs}
            cache: {{memory: {cache_mib}MiB}}
            trace: {"on" if trace else "off"}
            push: {"on" if push else "off"}
            run: {ground.PYTHON} work.py {' '.join(arguments)} --cap {cap} --wire {self.lab.wire}
            """))
        with Sampler(self.pidfile) as sampler:
            try:
                done = self.say("run", "-y", path, timeout=cap + 180)
            except subprocess.TimeoutExpired:
                self.stop()
                raise ground.WorkFailed(f"limb run did not end in {cap + 180:.0f} s") from None
        result = ground.result(done)
        return result | {"agent": sampler.between(result["t0"], result["t1"])}

    def say(self, *arguments, timeout=60):
        return self.lab.lab.run("home", [self.limb, *arguments], env=self.env, timeout=timeout)

    def stop(self):
        """Ends the coordinator; what still runs in the namespaces ends with the lab."""
        self.say("serve", "--stop")


class Sampler(threading.Thread):
    """CPU seconds and memory of the agent that writes its process id into `pidfile`."""

    def __init__(self, pidfile):
        super().__init__(daemon=True)
        self.pidfile, self.samples, self.end = pidfile, [], threading.Event()
        if os.path.exists(pidfile):
            os.unlink(pidfile)

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.end.set()
        self.join()

    def run(self):
        while not self.end.wait(SAMPLE_EVERY_S):
            try:
                with open(self.pidfile) as f:
                    pid = int(f.read())
                status = dict(line.split(":", 1) for line in open(f"/proc/{pid}/status") if ":" in line)
                # Under its own name it has done its last exec: from then on /proc/PID/stat cannot block.
                if status["Name"].strip() != "limb-agent":
                    continue
                fields = open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()
                anon, shared = (int(status[key].split()[0]) << 10 for key in ("RssAnon", "RssShmem"))
            except (OSError, ValueError, KeyError, IndexError):
                continue                        # not there yet, or there no more
            self.samples.append((time.monotonic(), (int(fields[11]) + int(fields[12])) / TICK, anon, shared))

    def between(self, t0, t1):
        inside = [s for s in self.samples if t0 <= s[0] <= t1]
        if len(inside) < 2:
            return None
        (start, cpu0, *_), (end, cpu1, *_) = inside[0], inside[-1]
        return {"cores": (cpu1 - cpu0) / (end - start), "anon_mib": max(s[2] for s in inside) / MIB,
                "shared_mib": max(s[3] for s in inside) / MIB}
