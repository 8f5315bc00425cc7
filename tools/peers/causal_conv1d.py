#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times causal convolutions of Python packages on the cases of `cotangent bench causal_conv1d`, and torch's copy.

    tools/peers/causal_conv1d.py [--device cpu|cuda] [--threads N] [--only TEXT] [--peer TEXT] [--json FILE]

Needs torch (pip install torch), which nothing else in this repository does. Prints JSON rows with the keys of
`cotangent bench --json`; `ceiling` is torch's copy_ at the same footprint, and a row of its own, op "copy", is torch's
copy_ beyond the caches. Weights are of x's dtype, because conv1d accepts no other. The peers, forward and autograd:

    eager           F.conv1d(groups=D) + F.silu
    compile         the same through torch.compile
    compile, taps   K shifted products, added up, which torch.compile fuses into kernels of its own
    causal_conv1d   that package, where it is installed
    fla             flash-linear-attention, where it is installed

Times on cuda are of a CUDA graph with many calls, over as many copies of the data as push each other out of the cache, as
bench's are. A peer that fails on a case is left out, with the reason on standard error.
"""
import argparse
import datetime
import importlib.metadata
import json
import pathlib
import platform
import statistics
import sys
import time

sys.path.pop(0) # this folder: the file is called like one of the packages

try:
    import torch
    import torch.nn.functional as functional
except ImportError:
    sys.exit("causal_conv1d.py: torch is not installed (pip install torch)")

K = 4
BEYOND_CACHES = 8 * 2048 * 8192 * 4 * 2  # bytes read and written: the largest forward of bench
SHAPES = {"cpu": [(8, 2048, 8192, "f32"), (2, 1024, 2048, "f32"), (2, 1024, 2048, "bf16"),
                  (2, 1024, 2048, "f16"),
                  (1, 128, 1024, "f32"), (1, 128, 1024, "bf16")],
          "cuda": [(8, 4096, 4096, "bf16"), (2, 2048, 2048, "bf16"), (8, 4096, 4096, "f32"), (8, 4096, 4096, "f16"),
                   (1, 1536, 16384, "bf16")]}
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
SAMPLE_SECONDS, SAMPLES, SAMPLES_LEAST, CASE_SECONDS = 0.01, 9, 3, 12


GRAPH_SECONDS, REPLAYS, FLUSH, MAX_COPIES, MAX_CALLS = 2e-3, 15, 4, 64, 256 # on cuda


def seconds_on_host(call):
    """The median of several samples, each of as many calls as fill a hundredth of a second, as bench does."""
    def sample(calls):
        begin = time.perf_counter()
        for _ in range(calls):
            call()
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


def copies_for(footprint, device):
    """So many copies of the data that each has left the cache when its turn comes again."""
    if device == "cpu":
        return 1
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    return min(MAX_COPIES, int(FLUSH * cache / footprint) + 1)


def seconds_on_device(calls):
    """Of one of the calls, which take turns in a graph that is replayed."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def measure(count, replays):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            for number in range(count):
                calls[number % len(calls)]()
        graph.replay()
        samples = []
        for _ in range(replays):
            begin.record()
            graph.replay()
            end.record()
            end.synchronize()
            samples.append(1e-3 * begin.elapsed_time(end) / count)
        return statistics.median(samples)

    for call in calls: # what a first call compiles or loads
        call()
    once = measure(len(calls), 1)
    wanted = max(len(calls), min(MAX_CALLS, int(GRAPH_SECONDS / once)))
    return measure(wanted // len(calls) * len(calls), REPLAYS)


def copy_bandwidth(footprint, device):
    """Bytes read and written a second by copy_ of half the footprint."""
    pairs = [(torch.ones(footprint // 8, device=device), torch.zeros(footprint // 8, device=device))
             for _ in range(copies_for(footprint, device))]
    calls = [lambda pair=pair: pair[1].copy_(pair[0]) for pair in pairs]
    seconds = seconds_on_device(calls) if device == "cuda" else seconds_on_host(calls[0])
    return 2 * pairs[0][0].numel() * 4 / seconds


def device_name(device):
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


# ---- the peers: x [B,D,T], weight [D,K], bias [D] -> y like x


def convolve(x, weight, bias, silu):
    y = functional.conv1d(x, weight[:, None], bias, padding=K - 1, groups=x.shape[1])[..., :x.shape[2]]
    return functional.silu(y) if silu else y


def add_taps(x, weight, bias, silu):
    T = x.shape[2]
    padded = functional.pad(x, (K - 1, 0)).float()
    y = bias.float()[:, None] + sum(weight[:, k, None].float() * padded[..., k:k + T] for k in range(K))
    return (functional.silu(y) if silu else y).to(x.dtype)


def package_causal_conv1d():
    from causal_conv1d import causal_conv1d_fn
    return lambda x, weight, bias, silu: causal_conv1d_fn(x, weight, bias, activation="silu" if silu else None)


def package_fla():
    from fla.modules.convolution import causal_conv1d

    def call(x, weight, bias, silu):
        y = causal_conv1d(x.transpose(1, 2), weight, bias, activation="silu" if silu else None)
        return (y[0] if isinstance(y, tuple) else y).transpose(1, 2)

    return call


def compiled(function):
    torch._dynamo.reset() # each case is compiled for its own shapes
    return torch.compile(function, dynamic=False)


def peers(device):
    """{name: a function that makes the call}, of what is installed."""
    version = f"torch {torch.__version__.split('+')[0]}"
    found = {f"{version} eager": lambda: convolve}
    if device == "cuda":
        found[f"{version} compile"] = lambda: compiled(convolve)
        found[f"{version} compile, taps"] = lambda: compiled(add_taps)
        for name, package in ("causal_conv1d", package_causal_conv1d), ("fla", package_fla):
            try:
                call = package()
                found[f"{name} {importlib.metadata.version('flash-linear-attention' if name == 'fla' else name)}"] = (
                    lambda call=call: call)
            except ImportError as error:
                print(f"causal_conv1d.py: {name} is left out: {error}", file=sys.stderr)
    return found


def normal(shape, dtype, device):
    """Normal, rounded to the dtype, as bench's inputs are."""
    return torch.randn(shape, device=device).to(dtype)


def cases(device):
    for number, (B, D, T, dtype) in enumerate(SHAPES[device]):
        for direction in ("forward", "backward"):
            for layout in ("channel-first", "channel-last"):
                for silu in ((True,) if number == 0 or device == "cuda" else (True, False)):
                    yield direction, B, D, T, dtype, layout, silu


def measure(case, device, name, make):
    direction, B, D, T, dtype_name, layout, silu = case
    dtype = DTYPES[dtype_name]
    size = 4 if dtype_name == "f32" else 2
    backward = direction == "backward"
    parameters = D * (K + 1) * size
    footprint = (3 * B * D * T * size + 2 * parameters) if backward else (2 * B * D * T * size + parameters)
    function = make()

    def data():
        if layout == "channel-first":
            return normal((B, D, T), dtype, device)
        return normal((B, T, D), dtype, device).transpose(1, 2)

    def call():
        """With data of its own."""
        x = data().requires_grad_(backward)
        weight = normal((D, K), dtype, device).requires_grad_(backward)
        bias = normal((D,), dtype, device).requires_grad_(backward)
        if not backward:
            return lambda: function(x, weight, bias, silu)
        y, dy = function(x, weight, bias, silu), data()
        return lambda: torch.autograd.grad(y, (x, weight, bias), dy, retain_graph=True)

    with torch.set_grad_enabled(backward):
        calls = [call() for _ in range(copies_for(footprint, device))]
        seconds = seconds_on_device(calls) if device == "cuda" else seconds_on_host(calls[0])
    del calls
    ceiling = copy_bandwidth(footprint, device)
    return row(device, "causal_conv1d", direction, name, dtype_name, layout, f"B{B} D{D} T{T} K{K}",
               f"w={dtype_name}" + ("+silu" if silu else "") + "+bias", footprint, seconds, ceiling)


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
    parser.add_argument("--peer", default="", help="only peers whose name contains this")
    parser.add_argument("--json", help="write the rows here instead of printing them")
    options = parser.parse_args()
    if options.threads is not None and options.threads < 1:
        parser.error("--threads must be 1 or more")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("causal_conv1d.py: torch sees no CUDA device")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    if options.device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream()) # one that can be captured, for autograd's kernels too
    beyond = copy_bandwidth(BEYOND_CACHES, options.device)
    rows = [row(options.device, "copy", "", f"torch {torch.__version__.split('+')[0]} copy_", "f32", "", "",
                "beyond the caches", BEYOND_CACHES, BEYOND_CACHES / beyond, beyond)]
    found = {name: make for name, make in peers(options.device).items() if options.peer in name}
    for case in cases(options.device):
        direction, B, D, T, dtype, layout, silu = case
        text = f"{direction} {dtype} {layout} B{B} D{D} T{T} K{K} w={dtype}{'+silu' if silu else ''}+bias"
        for name, make in found.items():
            if options.only not in text:
                continue
            try:
                rows.append(measure(case, options.device, name, make))
            except Exception as error: # whatever a package throws: the others go on
                print(f"causal_conv1d.py: {name} is left out of {text}: {type(error).__name__}: "
                      f"{str(error).splitlines()[0] if str(error) else ''}", file=sys.stderr)
            if options.json: # after each: compiling takes minutes
                pathlib.Path(options.json).write_text(json.dumps(rows, indent=1) + "\n")
    if not options.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
