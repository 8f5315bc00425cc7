#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times the formulas of cotangent/mhc.h written in PyTorch, on the cases of `cotangent bench --backend cuda`.

    tools/peers/mhc.py [--device cpu|cuda] [--threads N] [--only TEXT] [--json FILE]

Needs torch (pip install torch), which nothing else in this repository does. Prints JSON rows with the keys of
`cotangent bench --json`; `ceiling` is torch's copy_ at the same footprint. Kernels are the plain formulas, eager and
through torch.compile, and their autograd. Calls take turns over copies of their inputs that push each other out of the
cache, as bench's do.
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
except ImportError:
    sys.exit("mhc.py: torch is not installed (pip install torch)")

ITERATIONS, EPS, POST_SCALE = 20, 1e-6, 2.0
BEYOND_CACHES = 300e6  # bytes that the copies of a case come to, together
SHAPES = [(8192, 4, 4096, "bf16"), (8192, 4, 7168, "bf16"), (8192, 4, 1280, "bf16"), (40, 4, 4096, "bf16"),
          (8192, 2, 4096, "bf16"), (4096, 8, 4096, "bf16")]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
SIZES = {"f32": 4, "bf16": 2, "f16": 2}
CALLS, SAMPLES, CASE_SECONDS = 20, 9, 12


def pre(x, phi, alpha, bias):
    """h_in, h_post, h_res; x [T,n,D]."""
    T, n, D = x.shape
    flat = x.float().reshape(T, n * D)
    inv_rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
    u = (flat @ phi.t()) * inv_rms
    scale = torch.cat([alpha[0:1].expand(n), alpha[1:2].expand(n), alpha[2:3].expand(n * n)])
    z = u * scale + bias
    h_pre = torch.sigmoid(z[:, :n]) + EPS
    h_post = POST_SCALE * torch.sigmoid(z[:, n:2 * n])
    h_in = (h_pre.unsqueeze(-1) * x.float()).sum(1).to(x.dtype)
    return h_in, h_post, z[:, 2 * n:].reshape(T, n, n)


def sinkhorn(h_res):
    A = torch.softmax(h_res, -1) + EPS
    A = A / (A.sum(-2, keepdim=True) + EPS)
    for _ in range(ITERATIONS - 1):
        A = A / (A.sum(-1, keepdim=True) + EPS)
        A = A / (A.sum(-2, keepdim=True) + EPS)
    return A


def post(x, f, h_post, A):
    """y [T,n,D]."""
    y = torch.einsum("tio,tid->tod", A, x.float()) + h_post.unsqueeze(-1) * f.float().unsqueeze(1)
    return y.to(x.dtype)


def case_of(op, T, n, D, dtype, device):
    """The function, its inputs, and the bytes of inputs and outputs, forward and backward."""
    M, e, like_x = n * (n + 2), SIZES[dtype], DTYPES[dtype]

    def normal(*shape, kind=torch.float32, scale=1.0):
        return (scale * torch.randn(shape, device=device)).to(kind)

    if op == "mhc_pre":
        inputs = [normal(T, n, D, kind=like_x), normal(M, n * D, scale=(n * D)**-0.5), normal(3), normal(M)]
        small = 4 * (M * n * D + M + 3) + 4 * T * (2 * M + 1)
        return pre, inputs, (n + 1) * T * D * e + small, (2 * n + 1) * T * D * e + 2 * small
    if op == "mhc_sinkhorn":
        return sinkhorn, [normal(T, n, n)], 8 * T * n * n, 12 * T * n * n
    inputs = [normal(T, n, D, kind=like_x), normal(T, D, kind=like_x), normal(T, n), normal(T, n, n)]
    small = 4 * T * (n * n + n)
    return post, inputs, (2 * n + 1) * T * D * e + small, (3 * n + 2) * T * D * e + 2 * small


def seconds_of(calls, device):
    """The median over samples of CALLS calls each, going around in `calls`."""
    def sample():
        if device == "cuda":
            torch.cuda.synchronize()
        begin = time.perf_counter()
        for number in range(CALLS):
            calls[number % len(calls)]()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - begin) / CALLS

    begin = time.perf_counter()
    sample()
    samples = []
    while len(samples) < 3 or (len(samples) < SAMPLES and time.perf_counter() - begin < CASE_SECONDS):
        samples.append(sample())
    return statistics.median(samples)


def copy_bandwidth(footprint, device):
    """Bytes read and written a second by copy_ of half the footprint."""
    copies = max(1, int(BEYOND_CACHES // footprint) + 1)
    pairs = [(torch.ones(int(footprint) // 8, device=device), torch.zeros(int(footprint) // 8, device=device))
             for _ in range(copies)]
    seconds = seconds_of([lambda pair=pair: pair[1].copy_(pair[0]) for pair in pairs], device)
    return 8 * pairs[0][0].numel() / seconds


def gradients(function, inputs):
    """A call that computes the gradients of all inputs, given random ones of the outputs."""
    leaves = [value.detach().requires_grad_() for value in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    upstream = [torch.randn_like(value) for value in outputs]
    return lambda: torch.autograd.grad(outputs, leaves, upstream, retain_graph=True)


def device_name(device):
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def measure(op, shape, device, wanted):
    T, n, D, dtype = shape
    function, _, forward_bytes, backward_bytes = case_of(op, *shape, device)
    for kernel in ("eager", "compile"):
        torch._dynamo.reset()
        run = torch.compile(function, dynamic=False) if kernel == "compile" else function
        for direction, footprint in (("forward", forward_bytes), ("backward", backward_bytes)):
            text = f"{op} {direction} {dtype} B1 T{T} n{n} D{D} {kernel}"
            if wanted not in text:
                continue
            copies = [case_of(op, *shape, device)[1] for _ in range(int(BEYOND_CACHES // footprint) + 1)]
            if direction == "forward":
                calls = [lambda inputs=inputs: run(*inputs) for inputs in copies]
                with torch.no_grad():
                    seconds = seconds_of(calls, device)
            else:
                seconds = seconds_of([gradients(run, inputs) for inputs in copies], device)
            ceiling = copy_bandwidth(footprint, device)
            yield {
                "op": op, "direction": direction, "kernel": f"torch {torch.__version__} {kernel}", "backend": device,
                "dtype": dtype if op != "mhc_sinkhorn" else "f32", "layout": "token-major",
                "shape": f"B1 T{T} n{n}" + (f" D{D}" if op != "mhc_sinkhorn" else ""), "options": "",
                "threads": torch.get_num_threads() if device == "cpu" else 0, "ms": 1e3 * seconds,
                "bytes": footprint, "gbps": 1e-9 * footprint / seconds, "ceiling": 1e-9 * ceiling,
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
        sys.exit("mhc.py: torch sees no CUDA device")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows = []
    for op in ("mhc_pre", "mhc_sinkhorn", "mhc_post"):
        for shape in SHAPES:
            if op != "mhc_sinkhorn" or shape[2] == 4096:
                rows += measure(op, shape, options.device, options.only)
    text = json.dumps(rows, indent=1) + "\n"
    if options.json:
        pathlib.Path(options.json).write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
