#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times PyTorch's own attention on the shapes of `cotangent bench attention` that it has.

    tools/peers/attention.py [--device cpu|cuda] [--threads N] [--only TEXT] [--json FILE]

Needs torch (pip install torch), which nothing else in this repository does. Prints JSON rows with keys of
`cotangent bench --json`. The kernel is F.scaled_dot_product_attention on contiguous [B,H,T,d], and its autograd.
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
    import torch.nn.functional as functional
except ImportError:
    sys.exit("attention.py: torch is not installed (pip install torch)")

SHAPES = [(1, 8, 2048, 128, "bf16", True), (1, 8, 2048, 128, "f16", True), (1, 8, 2048, 128, "f32", True),
          (1, 8, 2048, 128, "bf16", False), (1, 8, 2048, 128, "f32", False), (1, 16, 2048, 64, "bf16", True),
          (1, 4, 2048, 256, "bf16", True), (4, 8, 512, 128, "bf16", True)]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
SAMPLES, CASE_SECONDS = 9, 12


def seconds_of(call, device):
    """The median of several calls, one of them left out."""
    samples = []
    begin = time.perf_counter()
    for number in range(SAMPLES + 1):
        if number > 3 and time.perf_counter() - begin > CASE_SECONDS:
            break
        before = time.perf_counter()
        call()
        if device == "cuda":
            torch.cuda.synchronize()
        samples.append(time.perf_counter() - before)
    return statistics.median(samples[1:])


def device_name(device):
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def measure(direction, shape, device):
    B, H, T, d, name, causal = shape
    backward = direction == "backward"
    q, k, v, dout = (torch.randn((B, H, T, d), device=device).to(DTYPES[name]) for _ in range(4))
    if backward:
        for x in (q, k, v):
            x.requires_grad_(True)
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        seconds = seconds_of(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True), device)
    else:
        with torch.no_grad():
            seconds = seconds_of(lambda: functional.scaled_dot_product_attention(q, k, v, is_causal=causal), device)
    pairs = B * H * (T * (T + 1) // 2 if causal else T * T)
    flops = pairs * d * (10 if backward else 4)
    return {
        "op": "attention", "direction": direction, "kernel": f"torch {torch.__version__} sdpa", "backend": device,
        "dtype": name, "layout": "bhtd", "shape": f"B{B} H{H}/{H} T{T}/{T} d{d}/{d}",
        "options": "causal" if causal else "full", "threads": torch.get_num_threads() if device == "cpu" else 0,
        "ms": 1e3 * seconds, "flops": flops, "tflops": 1e-12 * flops / seconds, "device": device_name(device),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads (all)")
    parser.add_argument("--only", default="", help="only cases whose description contains this")
    parser.add_argument("--json", help="write the rows here instead of printing them")
    options = parser.parse_args()
    if options.threads is not None and options.threads < 1:
        parser.error("--threads must be 1 or more")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("attention.py: torch sees no CUDA device")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = []
    for direction in ("forward", "backward"):
        for shape in SHAPES:
            B, H, T, d, name, causal = shape
            text = f"{direction} {name} B{B} H{H} T{T} d{d} {'causal' if causal else 'full'}"
            if options.only in text:
                rows.append(measure(direction, shape, options.device))
    text = json.dumps(rows, indent=1) + "\n"
    if options.json:
        pathlib.Path(options.json).write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
