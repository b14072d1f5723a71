#!/usr/bin/env python3
"""Reading through limb beside its peers and the link's ceiling, in one run.

    bench/read.py [--work seq,rand,…] [--links fibre,far,…] [--reps 3] [--only limb,sshfs,…]
                  [--scale 0.02] [--build DIR] [--out target/bench/read.json]

Home and box are two network namespaces joined by linklab. Every sample is cold: a fresh agent or a
fresh mount. Repetitions are the outer loop, so that noise spreads over all tools. A work that time
cuts short counts with its rate, and the table says how much of it was done. bench/rows.py has the
rows, bench/peers.py the peers. Writes JSON, a chart beside it, and a table to stdout. Root only.
"""
import argparse
import json
import os
import signal
import statistics
import sys
import types

import data
import lab as ground
import peers
import report
import rows
from limb import Limb

MIB = 1 << 20
IPERF_BYTES = 1024 * MIB
PLAIN_BYTES = 256 * MIB
PUSHING = "limb-push"                # limb with `push: on`, beside limb where --only names it


class Session:
    """The samples of one run: {measure: {tool: [sample]}} and what the links can carry."""

    def __init__(self, args, chosen):
        self.args, self.rows = args, chosen
        self.measures = list(dict.fromkeys(row.measure for row in chosen))
        self.plan = data.Plan(args.scale)
        self.sets = list(dict.fromkeys(s for m in self.measures for s in (m.data, m.also) if s))
        self.tools = ["limb", *peers.MOUNTS, *peers.COPIES]
        if args.only:
            self.tools = [tool for tool in [*self.tools, PUSHING] if tool in args.only.split(",")]
        self.absent, self.no_data, self.figures = peers.missing(), {}, {}
        self.traced = set()                # measures whose trace is at home
        self.samples = {m: {tool: [] for tool in self.tools_of(m)} for m in self.measures}
        self.iperf, self.page_cache, self.busy = {}, [], []

    def tools_of(self, measure):
        return [tool for tool in self.tools if tool in ("limb", PUSHING) or (tool in peers.MOUNTS and measure.mounts)
                or (tool in peers.COPIES and measure.copies)]

    def make_data(self, root):
        self.no_data = data.make(root, self.sets, self.plan)
        for name in self.sets:
            files, size, tar_bytes = data.tree_figures(f"{root}/{name}")
            self.figures[name] = types.SimpleNamespace(files=files, bytes=size, tar_bytes=tar_bytes)

    def run(self):
        with ground.Lab(self.make_data, self.plan.bytes_of(self.sets), self.args.tcp) as self.lab:
            self.limbs = {}
            try:
                for rep in range(self.args.reps):
                    for name in dict.fromkeys(m.link for m in self.measures):
                        self.one_link(rep, name)
            finally:
                for limb in self.limbs.values():
                    limb.stop()

    def one_link(self, rep, name):
        link = ground.LINKS[name]
        self.lab.set_link(link)
        self.measure_ceilings(rep, name)
        for measure in (m for m in self.measures if m.link == name):
            if measure.work == "warm":
                self.measure_page_cache(rep, measure)
            for tool in self.tools_of(measure):
                self.busy.append(ground.labutil.wait_quiet(self.args.quiet_wait))
                try:
                    sample = self.sample(measure, tool)
                except ground.WorkFailed as error:
                    sample = {"error": str(error)}
                self.samples[measure][tool].append(sample)
                self.say({"rep": rep, "work": measure.work, "data": measure.data, "link": name, "tool": tool,
                          "busy_before": round(self.busy[-1], 2)} | sample)

    def sample(self, measure, tool):
        """One cold run of the work by one tool."""
        if lacks := self.no_data.get(measure.data) or self.absent.get(tool):
            raise ground.WorkFailed(lacks)
        figures = self.figures[measure.data]
        if tool in ("limb", PUSHING):
            mounts = {f"/data/{name}": f"{self.lab.data}/{name}" for name in (measure.data, measure.also) if name}
            limb = self.limb(measure.link == "loopback")
            arguments = measure.arguments("/data", figures)
            if measure.traced and measure not in self.traced:
                # Without a trace each of its reads costs a round trip, and what is not read is not in the trace.
                first = limb.run(arguments, mounts, 10 * self.args.limb_cap, measure.cache_mib, trace=True)
                if first["done"] < first["all"]:
                    raise ground.WorkFailed(f"the run that leaves the trace read only {first['done']} of {first['all']}")
                self.traced.add(measure)
            return limb.run(arguments, mounts, self.args.limb_cap, measure.cache_mib, trace=measure.traced,
                            push=tool == PUSHING)
        if tool in peers.MOUNTS:
            return peers.mounted(self.lab, tool, measure.work, measure.arguments(self.lab.mnt, figures),
                                 measure.cap * self.args.cap)
        return peers.copied(self.lab, tool, measure.data, figures.bytes, figures.files, 6 * self.args.cap)

    def limb(self, loopback):
        if loopback not in self.limbs:
            self.limbs[loopback] = Limb(self.lab, self.args.build, loopback)
        return self.limbs[loopback]

    def measure_ceilings(self, rep, name):
        size = max(int(IPERF_BYTES * self.args.scale), 16 * MIB)
        if any(row.measure.link == name and row.says.startswith(rows.IPERF) for row in self.rows):
            for streams in (1, 4):
                try:
                    rate = self.lab.iperf(size, streams, loopback=name == "loopback")
                except ground.WorkFailed as error:
                    self.say({"rep": rep, "link": name, "iperf3": streams, "error": str(error)})
                    continue
                self.iperf.setdefault(name, {}).setdefault(streams, []).append(rate)
                self.say({"rep": rep, "link": name, "iperf3": streams, "mb_s": rate})

    def measure_page_cache(self, rep, measure):
        plain = self.lab.work + "/plain.bin"
        if not os.path.exists(plain):
            data.noise(plain, PLAIN_BYTES)
        sample = self.lab.run_work(["warm", plain], self.args.limb_cap)
        self.page_cache.append(rows.rate(sample, None))
        self.say({"rep": rep, "work": measure.work, "page cache": self.page_cache[-1]})

    @staticmethod
    def say(line):
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in line.items()}), file=sys.stderr, flush=True)

    # -- what came out -----------------------------------------------------------------------
    def ceilings(self, row):
        """What a row's ceiling is made of."""
        of_link = [statistics.median(rates) for rates in self.iperf.get(row.measure.link, {}).values()]

        def limb(work):
            for other in self.rows:
                if (other.work, other.measure.link) == (work, row.measure.link):
                    samples = self.samples[other.measure].get("limb", [])
                    return report.spread(samples, lambda s: other.value(s, None)).get("median")
            return None

        figures = self.figures[row.measure.data]
        return types.SimpleNamespace(
            iperf=max(of_link, default=None), link=ground.LINKS[row.measure.link], limb=limb,
            page_cache=statistics.median(self.page_cache) if self.page_cache else None,
            mean_file=figures.bytes / max(figures.files, 1))

    def made_rows(self):
        return [report.row_of(row, ground.LINKS[row.measure.link], self.samples[row.measure],
                              row.ceiling(self.ceilings(row))) for row in self.rows]

    def about(self):
        return {"reps": self.args.reps, "scale": self.args.scale, "tcp": self.args.tcp, "cores": os.cpu_count(),
                "busy_before_samples": statistics.median(self.busy) if self.busy else None, "iperf_mb_s": self.iperf,
                "cap_s": self.args.cap}

    def all_samples(self):
        return [{"work": m.work, "data": m.data, "link": m.link, "tool": tool} | sample
                for m, tools in self.samples.items() for tool, samples in tools.items() for sample in samples]


def choose(args):
    works, links = (set(given.split(",")) if given else None for given in (args.work, args.links))
    for given, known in ((works, {row.work for row in rows.ROWS}), (links, set(ground.LINKS)),
                         (set(args.only.split(",")) if args.only else None, {"limb", PUSHING, *peers.MOUNTS, *peers.COPIES})):
        if given and given - known:
            sys.exit(f"bench/read.py: there is no {', '.join(given - known)}; there are: {', '.join(sorted(known))}")
    return [row for row in rows.ROWS if (not works or row.work in works) and (not links or row.measure.link in links)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", help="rows, comma-separated (default: all)")
    parser.add_argument("--links", help="only rows on these links: " + ",".join(ground.LINKS))
    parser.add_argument("--only", help="tools, comma-separated: limb, limb-push, " + ", ".join([*peers.MOUNTS, *peers.COPIES]))
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--scale", type=float, default=1.0, help="less data for a quick look; such figures mean little")
    parser.add_argument("--cap", type=float, default=8, help="seconds for a peer's work (sequential reads 3x, copies 6x)")
    parser.add_argument("--limb-cap", type=float, default=120, help="seconds for limb's work")
    parser.add_argument("--tcp", default="stock", choices=["stock", "bbr", "big"])
    parser.add_argument("--quiet-wait", type=float, default=20, help="wait at most so long for a quiet machine")
    parser.add_argument("--build", default=os.path.join(ground.ROOT, "target", "release"), help="where limb and limb-agent are")
    parser.add_argument("--out", default=os.path.join(ground.OUT, "read.json"))
    args = parser.parse_args()
    args.build = os.path.abspath(args.build)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))       # the lab goes away when told to stop
    os.nice(-10)                                                # measured work goes before other work
    session = Session(args, choose(args))
    try:
        session.run()
    finally:
        if session.figures:
            made = session.made_rows()
            report.write(made, session.about(), session.all_samples(), args.out)
            print(report.table(made))


if __name__ == "__main__":
    main()
