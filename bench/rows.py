"""What bench/read.py measures, and the rows that it makes of it.

A measure is one work on one link over one set of data; a row is one figure out of a measure. Rows
that look at the same measure share its runs.
"""
import dataclasses
from collections.abc import Callable

# What a job gets that says nothing.
CACHE_BYTES = 512 << 20
ANONYMOUS_ALLOWED_MIB = (CACHE_BYTES >> 20) + 40
CORES_ALLOWED = 0.4
READERS_COUNT = 64


@dataclasses.dataclass(frozen=True)
class Measure:
    work: str                          # of bench/work.py
    link: str                          # of lab.LINKS
    data: str
    arguments: Callable                # (where the data stands, figures) -> work.py's arguments
    also: str = ""                     # a second set that must be there
    mounts: bool = True
    copies: bool = False
    cap: int = 1                       # mounts get this many times --cap seconds
    cache_mib: int = CACHE_BYTES >> 20 # of limb's agent
    traced: bool = False               # limb ran the same job before, and reads ahead by its trace


@dataclasses.dataclass(frozen=True)
class Row:
    work: str
    measure: Measure
    unit: str
    value: Callable                    # (a sample, its link) -> figure
    ceiling: Callable                  # (Ceilings) -> figure or None
    says: str                          # what the ceiling is
    lower: bool = False                # the smaller figure is the better one
    limb_only: bool = False
    note: str = ""


def whole(file):
    return lambda at, _: ["seq", f"{at}/{file}"]


def rate(sample, _link):
    return sample["bytes"] / 1e6 / sample["secs"]


def per_second(what):
    return lambda sample, _link: sample[what] / sample["secs"]


def rtts(sample, link):
    return 1e3 * sample["median_s"] / link.rtt_ms


def agent(figure):
    return lambda sample, _link: (sample.get("agent") or {}).get(figure)


SEQ = {link: Measure("seq", link, "big", whole("big/big.bin"), copies=True, cap=3) for link in ("fibre", "far", "mid")}
BF16 = Measure("seq", "near", "bf16", whole("bf16/model.safetensors"), copies=True, cap=3)
MMAP = Measure("mmap", "fibre", "big", lambda at, _: ["mmap", f"{at}/big/big.bin"], mounts=False)
TENSORS = Measure("tensors", "near", "bf16", lambda at, _: ["tensors", f"{at}/bf16/model.safetensors"], mounts=False)
RAND = Measure("rand", "fibre", "rand", lambda at, _: ["rand", f"{at}/rand/rand.bin"], cache_mib=1024)
READERS = Measure("readers", "mid", "rand", lambda at, _: ["readers", f"{at}/rand/rand.bin", "--span", str(4 * CACHE_BYTES),
                                                           "--count", str(READERS_COUNT)])
ALONE = Measure("first", "uplink", "first", lambda at, _: ["first", f"{at}/first"])
BESIDE = Measure("first", "uplink", "first", lambda at, _: ["first", f"{at}/first", "--beside", f"{at}/big/big.bin"],
                 also="big")
TREE = Measure("tree", "fibre", "tree", lambda at, figures: [
    "tree", f"{at}/tree", "--files", str(figures.files), "--tar-bytes", str(figures.tar_bytes)], copies=True)
TRACE = Measure("shuffle", "fibre", "tree", lambda at, _: ["shuffle", f"{at}"], also="big", mounts=False, traced=True)
WARM = Measure("warm", "fibre", "big", lambda at, _: ["warm", f"{at}/big/big.bin", "--limit", str(256 << 20)], cap=3)
HELD = {work: Measure(work, "loopback", "big", lambda at, _, work=work: [work, f"{at}/big/big.bin", "--limit", str(256 << 20)],
                      mounts=False, cache_mib=1024) for work in ("held", "held-mmap", "held-random")}
MMAP_LOOPBACK = Measure("mmap", "loopback", "big", lambda at, _: ["mmap", f"{at}/big/big.bin"], mounts=False)
LOOPBACK = Measure("seq", "loopback", "big", whole("big/big.bin"), mounts=False)

IPERF = "best of iperf3 -P 1 and -P 4"
ROWS = [
    *(Row("seq", SEQ[link], "MB/s", rate, lambda c: c.iperf, IPERF) for link in SEQ),
    Row("bf16", BF16, "MB/s", rate, lambda c: c.link.rate, "the link's rate"),
    Row("mmap", MMAP, "MB/s", rate, lambda c: c.limb("seq"), "limb's own read()"),
    Row("tensors", TENSORS, "MB/s", rate, lambda c: c.limb("bf16"), "limb's own read() of the same file"),
    Row("rand", RAND, "reads/s", per_second("done"), lambda _: None, "",
        note=f"over 8 GiB, with a cache of {RAND.cache_mib} MiB"),
    Row("first", ALONE, "RTT", rtts, lambda _: 1, "one round trip", lower=True),
    Row("beside", BESIDE, "RTT", rtts, lambda _: 1, "one round trip", lower=True,
        note="the first 4 KiB while another file is read at full speed"),
    Row("readers", READERS, "MB/s", rate, lambda c: c.iperf, IPERF, note="MB/s asked for by 32 readers"),
    Row("tree", TREE, "files/s", per_second("files"), lambda c: c.iperf and c.iperf * 1e6 / c.mean_file, IPERF),
    Row("trace", TRACE, "MB/s", rate, lambda c: c.iperf, IPERF,
        note="second run with an access trace: all of `tree` and of the file of `seq`, in 1 MiB pieces, in shuffled order"),
    Row("warm", WARM, "MB/s", rate, lambda c: c.page_cache, "the same read of a local file"),
    Row("loopback", LOOPBACK, "MB/s", rate, lambda c: c.iperf, IPERF + " over loopback (no TLS)"),
    Row("mmap", MMAP_LOOPBACK, "MB/s", rate, lambda c: c.limb("loopback"), "limb's own read()"),
    *(Row(work, measure, "MB/s", rate, lambda _: None, "", note="256 MiB that the agent has in memory and the kernel not")
      for work, measure in HELD.items()),
    Row("agent-cpu", SEQ["fibre"], "cores", agent("cores"), lambda _: CORES_ALLOWED, "allowed", lower=True, limb_only=True,
        note="user and system time of the agent over the time of the read"),
    Row("agent-memory", SEQ["fibre"], "MiB", agent("anon_mib"), lambda _: ANONYMOUS_ALLOWED_MIB,
        "cache and 40 MiB", lower=True, limb_only=True, note="highest RssAnon of the agent during the read"),
]
