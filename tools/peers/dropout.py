#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times PyTorch's dropout with bias, activation and residual on the shapes of `cotangent bench dropout`, and its copy.

    tools/peers/dropout.py [--device cpu|cuda] [--threads N] [--only TEXT] [--json FILE]

Needs torch (pip install torch), which nothing else in this repository does. Prints JSON rows with keys of
`cotangent bench --json`; `bytes` are those that a mask drawn again needs, `ceiling` is torch's copy_ at that footprint.
The forward is F.dropout(act(x + bias), p) + residual with what autograd saves, the backward autograd's, down to dx and
dbias: each eager, and on a GPU compiled by torch.compile too, on tensors that no cache holds.
"""
import argparse
import datetime
import json
import pathlib
import platform
import statistics
import sys
import time

try:
    import torch
    import torch._functorch.config
    import torch.nn.functional as functional
except ImportError:
    sys.exit("dropout.py: torch is not installed (pip install torch)")

torch._functorch.config.donated_buffer = False  # a compiled backward may run again on what the forward saved

P = 0.1
SHAPES = {"cpu": [(8192, 1024, "f32", "none"), (8192, 1024, "bf16", "none"), (8192, 1024, "f32", "gelu_tanh")],
          "cuda": [(32768, 4096, "bf16", "none"), (32768, 4096, "bf16", "gelu_tanh"), (32768, 4096, "f32", "none"),
                   (32768, 4097, "bf16", "none"), (32768, 1024, "bf16", "none")]}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}
ACTIVATIONS = {"none": lambda z: z, "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh")}
SAMPLES, CASE_SECONDS = 15, 12


def seconds_of(call, device):
    """The median of several calls after three more; on a GPU between events, without the launches' own time."""
    samples = []
    begin = time.perf_counter()
    for number in range(SAMPLES + 3):
        if number > 5 and time.perf_counter() - begin > CASE_SECONDS:
            break
        if device == "cuda":
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            first.record()
            call()
            last.record()
            torch.cuda.synchronize()
            samples.append(1e-3 * first.elapsed_time(last))
        else:
            before = time.perf_counter()
            call()
            samples.append(time.perf_counter() - before)
    return statistics.median(samples[3:])


def copy_bandwidth(footprint, device):
    """Bytes read and written a second by copy_ of half the footprint."""
    source = torch.ones(footprint // 8, device=device)
    target = torch.zeros_like(source)
    return 2 * source.numel() * 4 / seconds_of(lambda: target.copy_(source), device)


def device_name(device):
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def measure(shape, device):
    R, D, name, activation = shape
    size = 4 if name == "f32" else 2

    def normal(*sizes):
        return torch.randn(sizes, device=device).to(DTYPES[name])

    def drop(x, bias, residual):
        return functional.dropout(ACTIVATIONS[activation](x + bias), P, training=True) + residual

    rows = []
    for kernel in ("eager", "compiled") if device == "cuda" else ("eager",):
        call = torch.compile(drop) if kernel == "compiled" else drop
        x, bias, residual, dy = normal(R, D).requires_grad_(), normal(D).requires_grad_(), normal(R, D), normal(R, D)
        forward = seconds_of(lambda: call(x, bias, residual), device)
        y = call(x, bias, residual)
        backward = seconds_of(lambda: torch.autograd.grad(y, (x, bias), dy, retain_graph=True), device)
        tensors = {"forward": 3, "backward": 2 + (activation != "none")}
        for direction, seconds in (("forward", forward), ("backward", backward)):
            footprint = (tensors[direction] * R * D + D) * size
            ceiling = copy_bandwidth(footprint, device)
            rows.append({
                "op": "dropout", "direction": direction, "kernel": f"torch {torch.__version__} {kernel}",
                "backend": device, "dtype": name, "layout": "contiguous", "shape": f"R{R} D{D}",
                "options": f"{activation}+bias{'+residual' if direction == 'forward' else ''} p={P}",
                "threads": torch.get_num_threads() if device == "cpu" else 0, "ms": 1e3 * seconds, "bytes": footprint,
                "gbps": 1e-9 * footprint / seconds, "ceiling": 1e-9 * ceiling, "ratio": footprint / seconds / ceiling,
                "footprint": footprint, "device": device_name(device),
                "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            })
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads (all)")
    parser.add_argument("--only", default="", help="only shapes whose description contains this, as in 'bf16 none R32768'")
    parser.add_argument("--json", help="write the rows here instead of printing them")
    options = parser.parse_args()
    if options.threads is not None and options.threads < 1:
        parser.error("--threads must be 1 or more")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("dropout.py: torch sees no CUDA device")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = []
    for shape in SHAPES[options.device]:
        R, D, dtype, activation = shape
        if options.only in f"{dtype} {activation} R{R} D{D}":
            rows += measure(shape, options.device)
    text = json.dumps(rows, indent=1) + "\n"
    if options.json:
        pathlib.Path(options.json).write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
