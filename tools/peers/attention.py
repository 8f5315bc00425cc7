#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times PyTorch's own attention on the shapes of `cotangent bench attention` that it has.

    tools/peers/attention.py [--device cpu|cuda] [--threads N] [--only TEXT] [--json FILE]

Needs torch (pip install torch), which nothing else in this repository does. Prints JSON rows with keys of
`cotangent bench --json`. On the CPU the kernel is F.scaled_dot_product_attention on contiguous [B,H,T,d], and its
autograd. On a GPU it is what stands behind that function, each by itself: cuDNN and FlashAttention-2, on [B,T,H,d] as
`cotangent bench` has them, and FlashAttention-3 where flash_attn_interface can be imported; in the setting of
FlashAttention-3's paper, 16k tokens with H d = 2048. Peers take turns, so that a slow moment hits them alike.
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
SHAPES_CUDA = [(16384 // T, 2048 // d, T, d, "bf16", causal) for d in (64, 128, 256) for causal in (False, True)
               for T in (512, 1024, 2048, 4096, 8192, 16384)]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
SAMPLES, CASE_SECONDS = 9, 12  # on a GPU a sample is as many calls as take SAMPLE_SECONDS
SAMPLE_SECONDS = 4e-3


def seconds_of(call):
    """The median of several calls, one of them left out."""
    samples = []
    begin = time.perf_counter()
    for number in range(SAMPLES + 1):
        if number > 3 and time.perf_counter() - begin > CASE_SECONDS:
            break
        before = time.perf_counter()
        call()
        samples.append(time.perf_counter() - before)
    return statistics.median(samples[1:])


def device_name(device):
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def row_of(direction, shape, device, kernel, seconds):
    B, H, T, d, name, causal = shape
    pairs = B * H * (T * (T + 1) // 2 if causal else T * T)
    flops = pairs * d * (10 if direction == "backward" else 4)
    return {
        "op": "attention", "direction": direction, "kernel": kernel, "backend": device,
        "dtype": name, "layout": "bhtd" if device == "cpu" else "bthd", "shape": f"B{B} H{H}/{H} T{T}/{T} d{d}/{d}",
        "options": "causal" if causal else "full", "threads": torch.get_num_threads() if device == "cpu" else 0,
        "ms": 1e3 * seconds, "flops": flops, "tflops": 1e-12 * flops / seconds, "device": device_name(device),
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }


def measure(direction, shape):
    """On the CPU."""
    B, H, T, d, name, causal = shape
    q, k, v, dout = (torch.randn((B, H, T, d)).to(DTYPES[name]) for _ in range(4))
    attention = functional.scaled_dot_product_attention
    if direction == "backward":
        for x in (q, k, v):
            x.requires_grad_(True)
        out = attention(q, k, v, is_causal=causal)
        seconds = seconds_of(lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True))
    else:
        with torch.no_grad():
            seconds = seconds_of(lambda: attention(q, k, v, is_causal=causal))
    return [row_of(direction, shape, "cpu", f"torch {torch.__version__} sdpa", seconds)]


def sdpa(backend):
    """One of the kernels behind scaled_dot_product_attention, for [B,T,H,d]."""
    def call(q, k, v, causal):
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with torch.nn.attention.sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
    return call


def flash_attention_3():
    try:
        import flash_attn_interface
    except ImportError:
        return None
    def call(q, k, v, causal):
        out = flash_attn_interface.flash_attn_func(q, k, v, causal=causal)
        return out[0] if isinstance(out, tuple) else out
    return call


def kernels_of_cuda():
    backends = torch.nn.attention.SDPBackend
    kernels = {f"cuDNN {torch.backends.cudnn.version()} through torch {torch.__version__}": sdpa(backends.CUDNN_ATTENTION),
               f"FlashAttention-2 of torch {torch.__version__}": sdpa(backends.FLASH_ATTENTION),
               "FlashAttention-3": flash_attention_3()}
    return {name: call for name, call in kernels.items() if call is not None}


def measure_cuda(direction, shape):
    """Seconds of work on the device for each peer: the median of samples of several calls, taken in turns."""
    B, H, T, d, name, causal = shape
    q, k, v, dout = (torch.randn((B, T, H, d), device="cuda").to(DTYPES[name]) for _ in range(4))
    calls = {}
    for kernel, attention in kernels_of_cuda().items():
        try:
            if direction == "backward":
                inputs = [x.detach().requires_grad_(True) for x in (q, k, v)]
                out = attention(*inputs, causal)
                call = lambda out=out, inputs=inputs: torch.autograd.grad(out, inputs, dout, retain_graph=True)
            else:
                call = lambda attention=attention: attention(q, k, v, causal)
            with torch.set_grad_enabled(direction == "backward"):
                call()
        except RuntimeError as error:
            print(f"{kernel} does not take {shape}: {str(error).splitlines()[0]}", file=sys.stderr)
            continue
        calls[kernel] = call

    def sample(call, count):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.set_grad_enabled(direction == "backward"):
            begin.record()
            for _ in range(count):
                call()
            end.record()
        torch.cuda.synchronize()
        return 1e-3 * begin.elapsed_time(end) / count

    counts = {kernel: max(1, int(SAMPLE_SECONDS / sample(call, 1))) for kernel, call in calls.items()}
    samples = {kernel: [] for kernel in calls}
    for _ in range(SAMPLES):
        for kernel, call in calls.items():
            samples[kernel].append(sample(call, counts[kernel]))
    return [row_of(direction, shape, "cuda", kernel, statistics.median(s)) for kernel, s in samples.items()]


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
        for shape in SHAPES if options.device == "cpu" else SHAPES_CUDA:
            B, H, T, d, name, causal = shape
            text = f"{direction} {name} B{B} H{H} T{T} d{d} {'causal' if causal else 'full'}"
            if options.only in text:
                rows += measure(direction, shape) if options.device == "cpu" else measure_cuda(direction, shape)
    text = json.dumps(rows, indent=1) + "\n"
    if options.json:
        pathlib.Path(options.json).write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
