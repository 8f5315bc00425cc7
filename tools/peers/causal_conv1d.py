#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times PyTorch's own causal convolution on the cases of `cotangent bench causal_conv1d`, and its copy.

    tools/peers/causal_conv1d.py [--device cpu|cuda] [--threads N] [--only TEXT] [--json FILE]

Needs torch (pip install torch), which nothing else in this repository does. Prints JSON rows with the keys of
`cotangent bench --json`; `ceiling` is torch's copy_ at the same footprint, and a row of its own, op "copy", is torch's
copy_ beyond the caches. Kernels are F.conv1d(groups=D) + F.silu, eager, and its autograd. Weights are of x's dtype,
because conv1d accepts no other.
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
    sys.exit("causal_conv1d.py: torch is not installed (pip install torch)")

K = 4
BEYOND_CACHES = 8 * 2048 * 8192 * 4 * 2  # bytes read and written: the largest forward of bench
SHAPES = [(8, 2048, 8192, "f32"), (2, 1024, 2048, "f32"), (2, 1024, 2048, "bf16"), (2, 1024, 2048, "f16"),
          (1, 128, 1024, "f32"), (1, 128, 1024, "bf16")]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
SAMPLE_SECONDS, SAMPLES, SAMPLES_LEAST, CASE_SECONDS = 0.01, 9, 3, 12


def seconds_of(call, device):
    """The median of several samples, each of as many calls as fill a hundredth of a second, as bench does."""
    def sample(calls):
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / calls

    begin = time.perf_counter()
    sample(1)
    once = sample(1)
    calls = int(SAMPLE_SECONDS / once) + 1 if once < SAMPLE_SECONDS else 1
    samples = []
    for number in range(SAMPLES):
        if number >= SAMPLES_LEAST and time.perf_counter() - begin > CASE_SECONDS:
            break
        samples.append(sample(calls))
    return statistics.median(samples)


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


def convolve(x, weight, bias, silu):
    y = functional.conv1d(x, weight, bias, padding=K - 1, groups=x.shape[1])[..., :x.shape[2]]
    return functional.silu(y) if silu else y


def normal(shape, dtype, device):
    """Normal, rounded to the dtype, as bench's inputs are."""
    return torch.randn(shape, device=device).to(dtype)


def cases():
    for direction in ("forward", "backward"):
        for number, (B, D, T, dtype) in enumerate(SHAPES):
            for layout in ("channel-first", "channel-last"):
                for silu in ((True,) if number == 0 else (True, False)):
                    yield direction, B, D, T, dtype, layout, silu


def measure(case, device):
    direction, B, D, T, name, layout, silu = case
    dtype = DTYPES[name]
    size = 4 if name == "f32" else 2

    def data():
        if layout == "channel-first":
            return normal((B, D, T), dtype, device)
        return normal((B, T, D), dtype, device).transpose(1, 2)

    backward = direction == "backward"
    x = data().requires_grad_(backward)
    weight = normal((D, 1, K), dtype, device).requires_grad_(backward)
    bias = normal((D,), dtype, device).requires_grad_(backward)
    if backward:
        y = convolve(x, weight, bias, silu)
        dy = data()
        seconds = seconds_of(lambda: torch.autograd.grad(y, (x, weight, bias), dy, retain_graph=True), device)
    else:
        with torch.no_grad():
            seconds = seconds_of(lambda: convolve(x, weight, bias, silu), device)
    parameters = D * (K + 1) * size
    footprint = (3 * B * D * T * size + 2 * parameters) if backward else (2 * B * D * T * size + parameters)
    ceiling = copy_bandwidth(footprint, device)
    return row(device, "causal_conv1d", direction, f"torch {torch.__version__} eager", name, layout,
               f"B{B} D{D} T{T} K{K}", f"w={name}" + ("+silu" if silu else "") + "+bias", footprint, seconds, ceiling)


def row(device, op, direction, kernel, dtype, layout, shape, options, footprint, seconds, ceiling):
    return {
        "op": op, "direction": direction, "kernel": kernel, "backend": device, "dtype": dtype, "layout": layout,
        "shape": shape, "options": options, "threads": torch.get_num_threads() if device == "cpu" else 0,
        "ms": 1e3 * seconds, "bytes": footprint, "gbps": 1e-9 * footprint / seconds, "ceiling": 1e-9 * ceiling,
        "ratio": footprint / seconds / ceiling, "footprint": footprint, "device": device_name(device),
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
        sys.exit("causal_conv1d.py: torch sees no CUDA device")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    beyond = copy_bandwidth(BEYOND_CACHES, options.device)
    rows = [row(options.device, "copy", "", f"torch {torch.__version__} copy_", "f32", "", "", "beyond the caches",
                BEYOND_CACHES, BEYOND_CACHES / beyond, beyond)]
    for case in cases():
        direction, B, D, T, dtype, layout, silu = case
        text = f"{direction} {dtype} {layout} B{B} D{D} T{T} K{K} w={dtype}{'+silu' if silu else ''}+bias"
        if options.only in text:
            rows.append(measure(case, options.device))
    text = json.dumps(rows, indent=1) + "\n"
    if options.json:
        pathlib.Path(options.json).write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
