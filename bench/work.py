"""The workloads that the benchmarks time, run on the box beside the mount under test.

    work.py seq FILE [--limit BYTES]       read(2), 1 MiB at a time
    work.py mmap FILE [--limit BYTES]      the same bytes through mmap, in page order
    work.py tensors FILE                   every tensor of a safetensors file, with that library
    work.py rand FILE [--count N]          N reads of 4 KiB to 1 MiB at random places, by mmap
    work.py readers FILE [--span BYTES]    32 threads, each reading 16 KiB at random places
    work.py first DIR [--beside FILE]      the first 4 KiB of each file in DIR, each file cold;
                                           with FILE: while that one is being read from front to end
    work.py tree DIR --tar-bytes N --files N   tar of the directory into a pipe
    work.py shuffle DIR                    every file below it, in pieces of 1 MiB, in one shuffled order
                                           by four threads
    work.py warm FILE [--limit BYTES]      read once, then three times more; the latter count
    work.py held FILE [--limit BYTES]      read once, then five times more, each time after the page cache
                                           was told to forget it; the latter count
    work.py held-mmap FILE, held-random FILE    the same through mmap in page order, and so with MADV_RANDOM
    work.py write FILE --limit BYTES       a checkpoint: write, fsync, rename, fsync

Every workload ends after --cap seconds and says how much of it was done. With --wire SOCKET (of
linklab) it also says what the link carried from home to box meanwhile. Prints one line,
`RESULT {json}`; t0 and t1 are CLOCK_MONOTONIC. Standard library only, but for `tensors`.
"""
import argparse
import concurrent.futures
import ctypes
import json
import math
import mmap
import os
import random
import socket
import statistics
import subprocess
import threading
import time

MIB = 1 << 20
READERS, READER_BYTES = 32, 16 << 10
SHUFFLE_READERS = 4
now = time.monotonic


class Clock:
    """Starts when the work does; knows when its time is up."""

    def __init__(self, cap, wire):
        self.cap, self.wire = cap, wire
        self.start()

    def start(self):
        self.wire0 = carried(self.wire)
        self.t0 = now()

    def is_up(self):
        return now() - self.t0 > self.cap

    def result(self, **figures):
        t1 = now()
        out = {"secs": t1 - self.t0, "t0": self.t0, "t1": t1} | figures
        if self.wire:
            out["wire_bytes"] = carried(self.wire) - self.wire0
        return out


def carried(wire):
    """Bytes that have left the link on the box's side so far."""
    if not wire:
        return 0
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(wire)
        s.sendall(b"stats\n")
        text = b""
        while part := s.recv(65536):
            text += part
    return json.loads(text)["h2b"]["out_bytes"]


def settle(wire):
    """Wait until the link carries nothing (what an earlier file's read-ahead still fetches)."""
    end = now() + 5
    seen = -1
    while wire and now() < end and (sofar := carried(wire)) > seen + 20_000:
        seen = sofar
        time.sleep(0.3)


def read_all(path, limit, is_up):
    """read(2) until the limit, the file's end or the time's."""
    got, buffer = 0, bytearray(MIB)
    with open(path, "rb", buffering=0) as f:
        while got < limit and not is_up() and (n := f.readinto(buffer)):
            got += n
    return got


def seq(a, clock):
    size = min(a.limit, os.stat(a.path).st_size)
    clock.start()
    got = read_all(a.path, size, clock.is_up)
    return clock.result(done=got, all=size, bytes=got)


def mapped(a, clock):
    size = min(a.limit, os.stat(a.path).st_size)
    clock.start()
    got = map_all(a.path, size, clock.is_up)
    return clock.result(done=got, all=size, bytes=got)


def map_all(path, size, is_up, advice=mmap.MADV_NORMAL):
    got = 0
    with open(path, "rb") as f, mmap.mmap(f.fileno(), size, prot=mmap.PROT_READ) as m:
        m.madvise(advice)
        while got < size and not is_up():
            got += len(m[got:got + MIB])
    return got


def tensors(a, clock):
    import ml_dtypes  # noqa: F401, tells numpy what bf16 is
    from safetensors import safe_open
    size = os.stat(a.path).st_size
    clock.start()
    got = 0
    with safe_open(a.path, framework="numpy") as f:
        for name in f.offset_keys():
            got += f.get_tensor(name).nbytes
            if clock.is_up():
                break
        else:
            size = got
    return clock.result(done=got, all=size, bytes=got)


def resident(fd, size):
    """Bytes of an open file in the page cache: what the kernel asked for, and pushed pages."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + [ctypes.c_int] * 3 + [ctypes.c_long]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
    place = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    pages = ctypes.create_string_buffer(-(-size // mmap.PAGESIZE))
    if libc.mincore(place, size, pages):
        raise OSError(ctypes.get_errno(), "mincore")
    return (len(pages) - pages.raw.count(b"\0")) * mmap.PAGESIZE


def rand(a, clock):
    rng, size = random.Random(7), os.stat(a.path).st_size
    lengths = [int(math.exp(rng.uniform(math.log(4096), math.log(MIB)))) & ~63 for _ in range(a.count)]
    plan = [(rng.randrange(0, size - n) & ~63, n) for n in lengths]
    took, got = [], 0
    with open(a.path, "rb") as f, mmap.mmap(f.fileno(), size, prot=mmap.PROT_READ) as m:
        clock.start()
        for offset, n in plan:
            t = now()
            got += len(m[offset:offset + n])
            took.append(now() - t)
            if clock.is_up():
                break
        out = clock.result(done=len(took), all=a.count, bytes=got)
        # Before it is closed: another open may drop the pages.
        return out | {"asked_bytes": resident(f.fileno(), size), "p50_ms": 1e3 * statistics.median(took)}


def readers(a, clock):
    span = min(a.span, os.stat(a.path).st_size) - READER_BYTES

    def one(seed):
        rng, count = random.Random(seed), 0
        fd = os.open(a.path, os.O_RDONLY)
        while count < a.count and not clock.is_up():
            count += len(os.pread(fd, READER_BYTES, rng.randrange(0, span) & ~4095)) // READER_BYTES
        os.close(fd)
        return count

    clock.start()
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        reads = sum(pool.map(one, range(READERS)))
    asked = reads * READER_BYTES
    return clock.result(done=reads, all=READERS * a.count, bytes=asked, asked_bytes=asked)


def first(a, clock):
    names = sorted(os.listdir(a.path))
    end = threading.Event()
    if a.beside:
        bulk = threading.Thread(target=read_all, args=(a.beside, a.limit, end.is_set), daemon=True)
        bulk.start()
        time.sleep(2)             # well past slow start, so that the link is full
    took = []
    clock.start()
    for name in names:
        if not a.beside:
            settle(a.wire)
        t = now()
        fd = os.open(os.path.join(a.path, name), os.O_RDONLY)
        os.read(fd, 4096)
        took.append(now() - t)
        os.close(fd)
        if clock.is_up():
            break
        time.sleep(0.2)
    if a.beside and not bulk.is_alive():
        raise OSError(f"{a.beside} was read to its end before the other files were")
    end.set()
    return clock.result(done=len(took), all=len(names), bytes=4096 * len(took), median_s=statistics.median(took),
                        max_s=max(took))


def tree(a, clock):
    clock.start()
    got = 0
    tar = subprocess.Popen(["timeout", f"{a.cap:.1f}", "tar", "cf", "-", "-C", a.path, "."], stdout=subprocess.PIPE)
    while part := os.read(tar.stdout.fileno(), MIB):
        got += len(part)
    code = tar.wait()
    if code not in (0, 124):
        raise OSError(f"tar ended with {code}")
    files = a.files if code == 0 else int(a.files * min(1, got / a.tar_bytes))
    return clock.result(done=files, all=a.files, files=files, bytes=got)


def shuffle(a, clock):
    pieces = []
    for folder, folders, names in os.walk(a.path):
        folders.sort()
        for name in sorted(names):
            path = os.path.join(folder, name)
            pieces += [(path, at) for at in range(0, os.stat(path).st_size, MIB)]
    random.Random(5).shuffle(pieces)
    queue, taking = iter(pieces), threading.Lock()

    def one(_):
        done = got = 0
        while not clock.is_up():
            with taking:
                piece = next(queue, None)
            if piece is None:
                break
            fd = os.open(piece[0], os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)
            got += len(os.pread(fd, MIB, piece[1]))
            os.close(fd)
            done += 1
        return done, got

    clock.start()
    with concurrent.futures.ThreadPoolExecutor(SHUFFLE_READERS) as pool:
        done, got = map(sum, zip(*pool.map(one, range(SHUFFLE_READERS))))
    return clock.result(done=done, all=len(pieces), bytes=got)


def warm(a, clock):
    size = read_all(a.path, min(a.limit, os.stat(a.path).st_size), clock.is_up)
    passes = []
    clock.start()
    for _ in range(3):
        t = now()
        read_all(a.path, size, lambda: False)
        passes.append(now() - t)
    return clock.result(done=size, all=size, bytes=size) | {"secs": statistics.median(passes)}


def held(read):
    def work(a, clock):
        size = read_all(a.path, min(a.limit, os.stat(a.path).st_size), clock.is_up)
        passes = []
        clock.start()
        with open(a.path, "rb") as f:
            for _ in range(5):
                os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                t = now()
                read(a.path, size, lambda: False)
                passes.append(now() - t)
        return clock.result(done=size, all=size, bytes=size) | {"secs": statistics.median(passes)}
    return work


def map_at_random(path, size, is_up):
    return map_all(path, size, is_up, mmap.MADV_RANDOM)


def write(a, clock):
    block, left = os.urandom(4 * MIB), a.limit
    clock.start()
    with open(a.path + ".tmp", "wb", buffering=0) as f:
        while left > 0:
            left -= f.write(block[:min(len(block), left)])
        written = now() - clock.t0
        os.fsync(f.fileno())
    os.rename(a.path + ".tmp", a.path)
    folder = os.open(os.path.dirname(a.path), os.O_RDONLY)
    try:
        os.fsync(folder)          # durable under its name; sshfs answers this at once
    except OSError:
        pass
    os.close(folder)
    return clock.result(done=a.limit, all=a.limit, bytes=a.limit, written_s=written)


WORKS = {"seq": seq, "mmap": mapped, "tensors": tensors, "rand": rand, "readers": readers, "first": first,
         "tree": tree, "shuffle": shuffle, "warm": warm, "held": held(read_all), "held-mmap": held(map_all), "held-random": held(map_at_random),
         "write": write}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=WORKS)
    parser.add_argument("path")
    parser.add_argument("--cap", type=float, default=600)
    parser.add_argument("--limit", type=int, default=1 << 62)
    parser.add_argument("--span", type=int, default=1 << 62)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--files", type=int, default=0)
    parser.add_argument("--tar-bytes", type=int, default=1)
    parser.add_argument("--beside")
    parser.add_argument("--wire")
    a = parser.parse_args()
    print("RESULT " + json.dumps({"what": a.what} | WORKS[a.what](a, Clock(a.cap, a.wire))), flush=True)


if __name__ == "__main__":
    main()
