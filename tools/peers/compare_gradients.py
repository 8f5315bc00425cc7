#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the gradients of one step of train_lm and of PyTorch with float64, for every parameter of a GPT-2.

    train_lm --arch gpt2 --dropout 0 --lr 0 --steps 1 --export DIR --gradients FILE ...     # or --preset gpt2-124m
    tools/peers/compare_gradients.py DIR FILE [--device cuda|cpu] [--dtype bf16|f32] [--sequences N]
                                          [--json JSON]

The error of a parameter is the norm of (gradient - exact), divided by the norm of exact. `ratio` is train_lm's error divided
by PyTorch's, whose model (train_gpt2.py) runs under autocast in --dtype, without torch.compile. --sequences: how many run at a
time. Exit status 1 if a ratio exceeds --limit.
"""
import argparse
import json
import struct
import sys

import torch
import train_gpt2

DTYPES = {"F32": torch.float32, "F64": torch.float64, "I32": torch.int32}


def read_tensors(path):
    with open(path, "rb") as file:
        size, = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(size))
        data = bytearray(file.read())
    tensors = {}
    for name, entry in header.items():
        if name != "__metadata__":
            (begin, end), dtype = entry["data_offsets"], DTYPES[entry["dtype"]]
            tensors[name.removeprefix("transformer.")] = torch.frombuffer(
                data, dtype=dtype, count=(end - begin) // dtype.itemsize, offset=begin).reshape(entry["shape"])
    return tensors


def names_of(model):
    """The parameters of train_gpt2.GPT2 and their names in a file; whether the file has the matrix transposed."""
    parts = {"attn_in": "attn.c_attn", "attn_out": "attn.c_proj", "mlp_in": "mlp.c_fc", "mlp_out": "mlp.c_proj"}
    for name, parameter in model.named_parameters():
        part = name.split(".")
        if part[0] == "blocks":
            yield parameter, f"h.{part[1]}.{parts.get(part[2], part[2])}.{part[3]}", part[2] in parts and part[3] == "weight"
        else:
            yield parameter, {"tokens": "wte", "positions": "wpe", "norm": "ln_f"}[part[0]] + "." + part[1], False


def gradients(values, config, inputs, targets, options, exact):
    """The gradients by name, as the file has them, in float64."""
    model = train_gpt2.GPT2(config["n_layer"], config["n_head"], config["n_embd"], config["vocab_size"], config["n_positions"])
    model = model.to(options.device, torch.float64 if exact else torch.float32)
    names = list(names_of(model))
    with torch.no_grad():
        for parameter, name, transposed in names:
            parameter.copy_(values[name].T if transposed else values[name])
    autocast = torch.autocast(options.device, dtype=torch.bfloat16, enabled=not exact and options.dtype == "bf16")
    for first in range(0, len(inputs), options.sequences):
        some = slice(first, first + options.sequences)
        with autocast:
            loss = model(inputs[some].to(options.device).long(), targets[some].to(options.device).long())
        (loss * len(inputs[some]) / len(inputs)).backward()
    return {name: (p.grad.T if transposed else p.grad).double().cpu() for p, name, transposed in names}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder")
    parser.add_argument("file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", choices=("bf16", "f32"), default="bf16")
    parser.add_argument("--sequences", type=int, default=2)
    parser.add_argument("--limit", type=float, default=1.5)
    parser.add_argument("--json", help="write a row for bench/results here")
    options = parser.parse_args()
    with open(f"{options.folder}/config.json") as file:
        config = json.load(file)
    values, ours = read_tensors(f"{options.folder}/model.safetensors"), read_tensors(options.file)
    inputs, targets = ours.pop("inputs"), ours.pop("targets")
    exact, peer = (gradients(values, config, inputs, targets, options, which) for which in (True, False))
    rows = []
    for name, expected in exact.items():
        norm = expected.norm().item()
        mine, theirs = ((g[name].double() - expected).norm().item() / norm for g in (ours, peer))
        rows.append((mine / theirs if theirs > 0 else float(mine > 0), mine, theirs, name))
    rows.sort(reverse=True)
    print(f"{'ratio':>7} {'train_lm':>10} {'torch':>10}  parameter")
    for row in rows[:8] + rows[len(rows) // 2:len(rows) // 2 + 1]:
        print("%7.3f %10.3e %10.3e  %s" % row)
    above = sum(row[0] > options.limit for row in rows)
    print(f"{len(rows)} parameters, {above} with a ratio above {options.limit}; median {rows[len(rows) // 2][0]:.3f}")
    if options.json:
        row = {"op": "training_gradients", "dtype": options.dtype, "batch": len(inputs), "context": inputs.shape[1],
               "parameters": len(rows), "ratio": round(rows[0][0], 3), "parameter": rows[0][3], "error": rows[0][1],
               "peer_error": rows[0][2], "median": round(rows[len(rows) // 2][0], 3),
               "peer": f"PyTorch {torch.__version__.split('+')[0]}"}  # fmt: skip
        with open(options.json, "w") as file:
            json.dump([row], file, indent=1)
            file.write("\n")
    return above > 0


if __name__ == "__main__":
    sys.exit(main())
