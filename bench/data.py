"""The data that the benchmarks read, made new for every run: nothing of it compresses or repeats,
except the tensors (bench/make_tensors.py says what those are)."""
import dataclasses
import os
import random
import subprocess

import lab

MIB = 1 << 20
BLOCK = 16 * MIB
TREE_FOLDER = 100
FIRST_FILES, FIRST_BYTES = 6, 16 * MIB


@dataclasses.dataclass(frozen=True)
class Plan:
    """How much of everything; `scale` shrinks it all for a quick look."""
    scale: float = 1.0

    def sized(self, size):
        return max(int(size * self.scale) // MIB, 4) * MIB

    @property
    def seq(self):
        return self.sized(1024 * MIB)

    @property
    def rand(self):
        return self.sized(8192 * MIB)

    @property
    def tree(self):
        return max(int(20_000 * self.scale), 50)

    def bytes_of(self, names):
        """An upper bound of what make() writes."""
        sizes = {"big": self.seq, "bf16": self.seq + 64 * MIB, "rand": self.rand,
                 "first": FIRST_FILES * FIRST_BYTES, "tree": self.tree * (44 << 10)}
        return sum(sizes[name] for name in names)


def make(root, names, plan):
    """Each set is a directory below `root`. Answers with what could not be made: {name: why}."""
    missing = {}
    for name in names:
        os.makedirs(f"{root}/{name}")
        if name == "big":
            noise(f"{root}/big/big.bin", plan.seq)
        elif name == "rand":
            noise(f"{root}/rand/rand.bin", plan.rand)
        elif name == "first":
            for i in range(FIRST_FILES):
                noise(f"{root}/first/f{i}.bin", FIRST_BYTES)
        elif name == "tree":
            tree(f"{root}/tree", plan.tree)
        elif name == "bf16":
            made = subprocess.run([lab.PYTHON, os.path.join(lab.ROOT, "bench", "make_tensors.py"),
                                   f"{root}/bf16/model.safetensors", str(plan.seq)], capture_output=True, text=True)
            if made.returncode:
                missing[name] = "no tensors: " + (made.stderr.strip().splitlines() or ["?"])[-1][:120]
    return missing


def noise(path, size):
    with open(path, "wb") as f:
        while size > 0:
            size -= f.write(os.urandom(min(BLOCK, size)))


def tree(root, files):
    """Files of 4 to 40 KiB, slices of one block at unequal places."""
    rng, blob = random.Random(3), os.urandom(BLOCK)
    for i in range(files):
        folder = f"{root}/d{i // TREE_FOLDER:03}"
        if i % TREE_FOLDER == 0:
            os.makedirs(folder)
        size = rng.randint(4096, 40960)
        start = rng.randrange(0, len(blob) - size)
        with open(f"{folder}/f{i % TREE_FOLDER:03}.bin", "wb") as f:
            f.write(blob[start:start + size])


def tree_figures(root):
    """(files, their bytes, bytes of a tar of them)."""
    sizes = [os.stat(os.path.join(folder, name)).st_size for folder, _, names in os.walk(root) for name in names]
    return len(sizes), sum(sizes), sum(512 + -(-size // 512) * 512 for size in sizes)
