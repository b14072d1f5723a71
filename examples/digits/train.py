"""A two-layer classifier for 8x8 handwritten digits, in numpy.

Deterministic: the same epochs give the same weights whether they ran in one go or were resumed,
because every epoch draws from a generator seeded by its own number and the optimiser's state is
part of the checkpoint.
"""
import argparse
import gzip
import json
import os
import re
import sys

import numpy as np
from safetensors.numpy import load_file, save_file

HIDDEN, BATCH, RATE, MOMENTUM = 768, 64, 0.05, 0.9


def load(path):
    table = np.loadtxt(gzip.open(path, "rt"), delimiter=",", dtype=np.float32)
    images, labels = table[:, :-1] / 16.0, table[:, -1].astype(np.int64)
    order = np.random.default_rng(0).permutation(len(images))
    test, train = order[:360], order[360:]
    return images[train], labels[train], images[test], labels[test]


def shifted(images, rng):
    """Each image moved by up to one pixel: nine times the data that there is."""
    grid = np.pad(images.reshape(-1, 8, 8), ((0, 0), (1, 1), (1, 1)))
    out = np.empty((len(images), 8, 8), np.float32)
    for i, (dy, dx) in enumerate(rng.integers(0, 3, size=(len(images), 2))):
        out[i] = grid[i, dy:dy + 8, dx:dx + 8]
    return out.reshape(-1, 64)


def fresh():
    rng = np.random.default_rng(1)
    state = {
        "w1": rng.normal(0, 0.18, (64, HIDDEN)), "b1": np.zeros(HIDDEN),
        "w2": rng.normal(0, 0.09, (HIDDEN, 10)), "b2": np.zeros(10),
    }
    state |= {"m_" + name: np.zeros_like(value) for name, value in state.items()}
    return {name: value.astype(np.float32) for name, value in state.items()}


def forward(state, x):
    hidden = np.maximum(x @ state["w1"] + state["b1"], 0)
    logits = hidden @ state["w2"] + state["b2"]
    logits -= logits.max(axis=1, keepdims=True)
    p = np.exp(logits)
    return hidden, p / p.sum(axis=1, keepdims=True)


def step(state, x, y):
    hidden, p = forward(state, x)
    loss = -np.log(p[np.arange(len(y)), y] + 1e-9).mean()
    p[np.arange(len(y)), y] -= 1
    p /= len(y)
    back = (p @ state["w2"].T) * (hidden > 0)
    for name, gradient in (("w2", hidden.T @ p), ("b2", p.sum(0)), ("w1", x.T @ back), ("b1", back.sum(0))):
        state["m_" + name] = MOMENTUM * state["m_" + name] - RATE * gradient.astype(np.float32)
        state[name] = state[name] + state["m_" + name]
    return loss


def epoch(state, images, labels, number):
    rng = np.random.default_rng(1000 + number)
    losses = []
    for _ in range(9):
        order = rng.permutation(len(images))
        x, y = shifted(images, rng)[order], labels[order]
        losses += [step(state, x[i:i + BATCH], y[i:i + BATCH]) for i in range(0, len(x), BATCH)]
    return float(np.mean(losses))


def newest(directory):
    """The newest checkpoint that loads: a name is a promise, loading is the proof."""
    names = sorted(n for n in os.listdir(directory) if re.fullmatch(r"epoch-\d{4}\.safetensors", n))
    for name in reversed(names):
        try:
            return int(name[6:10]), load_file(os.path.join(directory, name))
        except Exception as error:
            print(f"skipping {name}: {error}", file=sys.stderr)
    return 0, None


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--data", required=True)
    parser.add_argument("--checkpoints", required=True)
    parser.add_argument("--epochs", type=int, default=40)
    args = parser.parse_args()

    train_x, train_y, test_x, test_y = load(args.data)
    done, state = newest(args.checkpoints)
    if state is None:
        state = fresh()
        print(f"starting: {len(train_x)} training images, {len(test_x)} test images", flush=True)
    else:
        print(f"resuming after epoch {done}", flush=True)

    accuracy = 0.0
    for number in range(done + 1, args.epochs + 1):
        loss = epoch(state, train_x, train_y, number)
        accuracy = float((forward(state, test_x)[1].argmax(1) == test_y).mean())
        path = os.path.join(args.checkpoints, f"epoch-{number:04}.safetensors")
        save_file(state, path, metadata={"epoch": str(number), "accuracy": f"{accuracy:.4f}"})
        with open(os.path.join(args.checkpoints, "metrics.jsonl"), "a") as log:
            log.write(json.dumps({"epoch": number, "loss": round(loss, 4), "accuracy": round(accuracy, 4)}) + "\n")
        print(f"epoch {number:3}  loss {loss:.4f}  accuracy {accuracy:.4f}", flush=True)
    if accuracy == 0.0:
        accuracy = float((forward(state, test_x)[1].argmax(1) == test_y).mean())
    print(f"done: {args.epochs} epochs, accuracy {accuracy:.4f}", flush=True)


if __name__ == "__main__":
    main()
