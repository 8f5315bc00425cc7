#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains GPT-2 with train_lm and with PyTorch, on the same batches from the same initial weights, and compares the losses.

    tools/peers/compare_losses.py PROGRAM FILE... [--seeds N] [--steps N] [--json FILE] [--backend cuda|cpu] [sizes]

PROGRAM is train_lm. The tokens are the bytes of the files, of which the last 10 % are held out. Both train in bf16 with
float32 masters (--backend cpu: in float32), with the same AdamW, learning rates and clipping; PyTorch runs under autocast
through torch.compile. `training` is the mean loss of the last 50 steps, `validation` that of 64 held-out windows after the
last step. Exit status 1 if the means of a loss over the seeds differ by more than the spread of the seeds (the larger
maximum - minimum of the two).
"""
import argparse
import json
import math
import pathlib
import struct
import subprocess
import sys
import tempfile
import time

import compare_gradients
import torch
import train_gpt2

RATE, LAST, WINDOWS, MASK = 6e-4, 50, 64, (1 << 64) - 1
SIZES = {"steps": 1000, "batch": 256, "context": 256, "layers": 4, "width": 256, "heads": 4}


# ---- the batches of train_lm: random.h and data.c


class Stream:
    def __init__(self, seed, name):
        self.state = seed
        self.state = self.next() ^ name
        self.state = self.next()

    def next(self):
        self.state = z = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)


def batches(tokens, context, batch, seed):
    """Yields [batch,context+1] forever."""
    windows = (len(tokens) - context) // context
    places = torch.arange(context + 1)
    epoch, order = 0, []
    while True:
        while len(order) < batch:
            stream, shuffled = Stream(seed, epoch), [0] * windows
            offset = stream.next() % context
            for i in range(windows):
                j = stream.next() % (i + 1)
                shuffled[i] = shuffled[j]
                shuffled[j] = i
            order += [offset + index * context for index in shuffled]
            epoch += 1
        first, order = torch.tensor(order[:batch]), order[batch:]
        yield tokens[first[:, None] + places]


def held_out(tokens, context):
    available = (len(tokens) - 1) // context
    count = min(available, WINDOWS)
    first = torch.tensor([i * available // count * context for i in range(count)])
    return tokens[first[:, None] + torch.arange(context + 1)]


def learning_rate(step, steps):
    warmup = steps // 20
    if step < warmup:
        return RATE * step / warmup
    part = (step - warmup) / (steps - warmup) if steps > warmup else 1
    return RATE * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * part)))


# ---- the two runs


def arguments(options, seed):
    return ["--arch", "gpt2", "--layers", options.layers, "--width", options.width, "--heads", options.heads, "--kv-heads",
            options.heads, "--context", options.context, "--vocabulary", 256, "--dropout", 0, "--weight-decay", 0.1,
            "--clip", 1, "--seed", seed, "--sample", 0, "--quiet"]


def train_lm(options, folder, seed, *more):
    command = [options.program, "--tokens", folder / "training.bin", "--validation", folder / "validation.bin", "--out",
               folder / "out", *arguments(options, seed), *more]
    result = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f"compare_losses: {result.stderr.strip()}")
    return result.stdout


def train_ours(options, folder, seed):
    log = folder / "log"
    train_lm(options, folder, seed, "--backend", options.backend, "--batch", options.batch, "--steps", options.steps, "--lr",
             RATE, "--log", log)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    return [line["loss"] for line in lines], lines[-1]["validation"]


def train_peer(options, folder, seed, data):
    """From the weights of train_lm with that seed: a step with the learning rate 0 changes none."""
    train_lm(options, folder, seed, "--backend", options.backend, "--batch", 1, "--steps", 1, "--lr", 0, "--export",
             folder / "model")
    values = compare_gradients.read_tensors(folder / "model/model.safetensors")
    cuda = options.backend == "cuda"
    device = "cuda" if cuda else "cpu"
    model = train_gpt2.GPT2(options.layers, options.heads, options.width, 256, options.context).to(device)
    with torch.no_grad():
        for parameter, name, transposed in compare_gradients.names_of(model):
            parameter.copy_(values[name].T if transposed else values[name])
    optimizer = train_gpt2.optimizer_of(model, device)
    compiled = torch.compile(model) if cuda else model
    losses, draw = [], batches(data[0], options.context, options.batch, seed)

    def loss_of(function, rows):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=cuda):
            return function(rows[:, :-1].contiguous(), rows[:, 1:].contiguous())

    for step in range(1, options.steps + 1):
        loss = loss_of(compiled, next(draw).to(device, non_blocking=True).long())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, options.steps)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())
    with torch.no_grad():
        validation = loss_of(model, held_out(data[1], options.context).to(device).long()).item()
    return torch.stack(losses).tolist(), validation


def write_tokens(path, tokens):
    with open(path, "wb") as file:
        file.write(struct.pack("<256i", 20240520, 1, len(tokens), *[0] * 253))
        file.write(tokens.numpy().astype("<u2").tobytes())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("files", nargs="+", type=pathlib.Path)
    for name, value in {"seeds": 3, **SIZES}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--backend", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--json")
    options = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    text = b"".join(path.read_bytes() for path in options.files)
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    data = tokens[:len(tokens) * 9 // 10], tokens[len(tokens) * 9 // 10:]
    rows, device = [], torch.cuda.get_device_name() if options.backend == "cuda" else "cpu"
    print(f"{len(data[0])} tokens to train on, {len(data[1])} held out")
    print("seed  library   training  validation   step 1  seconds")
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        write_tokens(folder / "training.bin", data[0]), write_tokens(folder / "validation.bin", data[1])
        for seed in range(1, options.seeds + 1):
            for library in "cotangent", f"PyTorch {torch.__version__.split('+')[0]}":
                start = time.perf_counter()
                losses, validation = (train_ours(options, folder, seed) if library == "cotangent"
                                      else train_peer(options, folder, seed, data))
                row = {"op": "training_loss", "library": library, "seed": seed, "first": round(losses[0], 5),
                       "training": round(sum(losses[-LAST:]) / len(losses[-LAST:]), 5),
                       "validation": round(validation, 5), **{key: getattr(options, key) for key in SIZES},
                       "tokens": len(data[0]), "device": device}
                rows.append(row)
                print(f"{seed:4}  {library.split()[0]:9} {row['training']:8.4f}  {row['validation']:10.4f}  {row['first']:7.4f}"
                      f"  {time.perf_counter() - start:7.1f}", flush=True)
    apart = False
    for loss in "training", "validation":
        ours, theirs = ([row[loss] for row in rows if (row["library"] == "cotangent") == own] for own in (True, False))
        difference = sum(ours) / len(ours) - sum(theirs) / len(theirs)
        spread = max(max(ours) - min(ours), max(theirs) - min(theirs))
        apart |= abs(difference) > spread
        print(f"{loss}: the means differ by {difference:+.4f}, the seeds by {spread:.4f}")
    if options.json:
        pathlib.Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    return apart


if __name__ == "__main__":
    sys.exit(main())
