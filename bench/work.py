"""The workloads that bench/link.py times, run beside the mount under test. Standard library only.

    work.py seq FILE | tree DIRECTORY | write FILE BYTES
Prints one JSON object.
"""
import json
import os
import sys
import time

MIB = 1 << 20


def seq(path):
    total = 0
    with open(path, "rb", buffering=0) as f:
        buffer = bytearray(MIB)
        while n := f.readinto(buffer):
            total += n
    return {"bytes": total}


def tree(path):
    files = total = 0
    for folder, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            with open(os.path.join(folder, name), "rb") as f:
                total += len(f.read())
            files += 1
    return {"files": files, "bytes": total}


def write(path, size):
    block, left = os.urandom(4 * MIB), size
    start = time.monotonic()
    with open(path + ".tmp", "wb", buffering=0) as f:
        while left > 0:
            left -= f.write(block[:min(len(block), left)])
        written = time.monotonic() - start
        os.fsync(f.fileno())
    os.rename(path + ".tmp", path)
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(folder)          # durable under its name; sshfs answers this at once
    except OSError:
        pass
    os.close(folder)
    return {"bytes": size, "write_s": written}


def main():
    what, path, *rest = sys.argv[1:]
    start = time.monotonic()
    result = {"seq": seq, "tree": tree, "write": write}[what](path, *map(int, rest))
    result |= {"what": what, "seconds": time.monotonic() - start}
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
