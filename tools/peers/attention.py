#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times attention's peers on the shapes of `cotangent bench attention` that they have.

    tools/peers/attention.py [--device cpu|cuda] [--threads N] [--only TEXT] [--json FILE] [--library FILE] [--load SECONDS]

Needs torch (pip install torch), which nothing else in this repository does. Prints JSON rows with keys of
`cotangent bench --json`. On the CPU the peer is F.scaled_dot_product_attention on contiguous [B,H,T,d], and its autograd.
On a GPU the peers are cuDNN, FlashAttention-4 (flash_attn.cute) and FlashAttention-3 (flash_attn_interface), those that
can be imported, on [B,T,H,d], in the setting of FlashAttention-3's paper: 16k tokens with H d = 2048. Our own kernels run
beside them in the same process, from --library (rows with "ours"). All of a case take turns of 8 ms (turn_ms), each a
CUDA graph. From 4k tokens on each works for --load seconds besides, one after the other: the second half is ms, with the
clock and the energy of that time; burst_ms is one call before it, after idleness.
"""
import argparse
import datetime
import json
import math
import pathlib
import platform
import statistics
import sys
import time

try:
    import torch
    import torch.nn.functional as functional
    import library
except ImportError:
    sys.exit("attention.py: torch is not installed (pip install torch)")

SHAPES = [(1, 8, 2048, 128, "bf16", True), (1, 8, 2048, 128, "f16", True), (1, 8, 2048, 128, "f32", True),
          (1, 8, 2048, 128, "bf16", False), (1, 8, 2048, 128, "f32", False), (1, 16, 2048, 64, "bf16", True),
          (1, 4, 2048, 256, "bf16", True), (4, 8, 512, 128, "bf16", True)]
SHAPES_CUDA = [(16384 // T, 2048 // d, T, d, "bf16", causal) for d in (64, 128, 256) for causal in (False, True)
               for T in (512, 1024, 2048, 4096, 8192, 16384)]
DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
SAMPLES, CASE_SECONDS = 9, 12
TURN_SECONDS, LOAD_GRAPH_SECONDS, IDLE_SECONDS, LOAD_TOKENS = 8e-3, 20e-3, 0.7, 4096


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


class Case:
    """Inputs and results of one shape on the GPU, and the calls of all that serve it: {name: function}."""

    def __init__(self, direction, shape, ours):
        B, H, T, d, name, self.causal = shape
        self.tensors = {key: torch.randn((B, T, H, d), device="cuda").to(DTYPES[name]) for key in ("q", "k", "v", "dout")}
        self.out, self.lse = torch.empty_like(self.tensors["q"]), torch.empty((B, H, T), device="cuda")
        self.direction, self.ours, self.errors, self.calls = direction, ours, {}, {}
        self.forward = ours.forward(**self.inputs(), causal=self.causal, out=self.out, lse=self.lse)
        self.forward()
        for make in (self.cotangent, self.cudnn, self.flash_attention_4, self.flash_attention_3):
            try:
                calls = make()
                for call in calls.values():
                    call()
                torch.cuda.synchronize()
                self.calls.update(calls)
            except Exception as error:  # a peer may lack anything: the wheel, the shape, memory
                self.errors[make.__name__] = str(error).splitlines()[0] if str(error) else type(error).__name__

    def inputs(self):
        return {key: self.tensors[key] for key in ("q", "k", "v")}

    def gradients(self):
        return [torch.empty_like(self.tensors[key]) for key in ("q", "k", "v")]

    def cotangent(self):
        if self.direction == "forward":
            return {"cotangent": self.forward}

        def backward(any_order):
            dq, dk, dv = self.gradients()
            return self.ours.backward(**self.inputs(), causal=self.causal, allow_nondeterminism=any_order, lse=self.lse,
                                      out=self.out, dout=self.tensors["dout"], dq=dq, dk=dk, dv=dv)
        return {"cotangent": backward(0), "cotangent+any-order": backward(1)}

    def cudnn(self):
        name = f"cuDNN {torch.backends.cudnn.version()} through torch {torch.__version__}"
        q, k, v, dout = (x.transpose(1, 2) for x in self.tensors.values())
        scale = q.shape[-1] ** -0.5
        forward = torch.ops.aten._scaled_dot_product_cudnn_attention
        if self.direction == "forward":
            return {name: lambda: forward(q, k, v, None, True, 0.0, self.causal, False, scale=scale)}
        out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = forward(q, k, v, None, True, 0.0, self.causal, False,
                                                                      scale=scale)
        backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        return {name: lambda: backward(dout, q, k, v, out, lse, seed, offset, None, cu_q, cu_k, max_q, max_k, 0.0,
                                       self.causal, scale=scale)}

    def flash_attention_4(self):
        import importlib.metadata
        from flash_attn.cute import interface
        name = f"FlashAttention-4 {importlib.metadata.version('flash-attn-4')}"
        q, k, v, dout = self.tensors.values()
        out, lse = interface._flash_attn_fwd(q, k, v, causal=self.causal, return_lse=True)[:2]
        if self.direction == "forward":
            return {name: lambda: interface._flash_attn_fwd(q, k, v, causal=self.causal, return_lse=True, out=out, lse=lse)}

        def backward(deterministic):
            dq, dk, dv = self.gradients()
            return lambda: interface._flash_attn_bwd(q, k, v, out, dout, lse, causal=self.causal,
                                                     deterministic=deterministic, dq=dq, dk=dk, dv=dv)
        return {name: backward(False), f"{name} deterministic": backward(True)}

    def flash_attention_3(self):
        import flash_attn_interface
        q, k, v, dout = self.tensors.values()
        if self.direction == "forward":
            return {"FlashAttention-3": lambda: flash_attn_interface.flash_attn_func(q, k, v, causal=self.causal)}
        inputs = [x.detach().requires_grad_(True) for x in (q, k, v)]
        out = flash_attn_interface.flash_attn_func(*inputs, causal=self.causal)
        out = out[0] if isinstance(out, tuple) else out
        return {"FlashAttention-3": lambda: torch.autograd.grad(out, inputs, dout, retain_graph=True)}


class Replayed:
    """As many calls as take `seconds`, in a CUDA graph; without one where a peer cannot be captured."""

    def __init__(self, call, seconds):
        self.call, self.count = call, 1
        once = min(self.once() for _ in range(2))
        self.count = max(1, round(seconds / max(once, 1e-6)))
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                for _ in range(self.count):
                    call()
            self.graph = graph
            graph.replay()
        except RuntimeError:
            self.graph = None
        torch.cuda.synchronize()

    graph = None

    def once(self):
        """Seconds of a call, the mean of those of one replay."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        if self.graph is not None:
            self.graph.replay()
        else:
            for _ in range(self.count):
                self.call()
        end.record()
        end.synchronize()
        return 1e-3 * begin.elapsed_time(end) / self.count


def under_load(call, seconds, power):
    """Of one call: seconds after idleness, seconds in the second half of the load, and what the GPU used meanwhile."""
    single, many, bursts = Replayed(call, 0), Replayed(call, LOAD_GRAPH_SECONDS), []
    for _ in range(3):
        time.sleep(IDLE_SECONDS)
        bursts.append(single.once())

    def work():
        begin, samples = time.perf_counter(), []
        while (now := time.perf_counter()) < begin + seconds:
            samples.append((now, many.once()))
        middle = begin + seconds / 2
        return middle, statistics.median(sample for moment, sample in samples if moment >= middle)
    (middle, median), readings = power.watch(work)
    return statistics.median(bursts), median, library.use_since(readings, middle)


def measure_cuda(direction, shape, ours, power, load_seconds):
    """All that serve the shape, in turns; from LOAD_TOKENS on under load besides."""
    case = Case(direction, shape, ours)
    for peer, error in case.errors.items():
        print(f"{peer} does not take {direction} {shape}: {error}", file=sys.stderr)
    turns = {name: Replayed(call, TURN_SECONDS) for name, call in case.calls.items()}
    samples = {name: [] for name in turns}
    for number in range(SAMPLES):
        names = list(turns)
        for name in names[number % len(names):] + names[:number % len(names)]:
            samples[name].append(turns[name].once())
    turns.clear()
    rows = []
    for name, call in case.calls.items():
        turn = statistics.median(samples[name])
        row = row_of(direction, shape, "cuda", name.removesuffix("+any-order"), turn) | {"turn_ms": 1e3 * turn}
        row["options"] += "+any-order" if name.endswith("+any-order") else ""
        if name.startswith("cotangent"):
            row |= {"ours": True, "chosen": True}
        if shape[2] >= LOAD_TOKENS and load_seconds > 0:
            burst, loaded, use = under_load(call, load_seconds, power)
            row |= {"burst_ms": 1e3 * burst, "ms": 1e3 * loaded, "tflops": 1e-12 * row["flops"] / loaded} | use
            if use:
                row["pj_per_flop"] = 1e12 * use["watts"] * loaded / row["flops"]
        rows.append(row)
    print(direction, shape, *(f"{row['kernel']}{row['options'].removeprefix('causal').removeprefix('full')} {row['tflops']:.0f}"
                              for row in rows), file=sys.stderr, flush=True)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads (all)")
    parser.add_argument("--only", default="", help="only cases whose description contains this")
    parser.add_argument("--json", help="write the rows here instead of printing them")
    parser.add_argument("--library", default="build/libcotangent.so", help="of our own kernels, on a GPU")
    parser.add_argument("--load", type=float, default=3, help="seconds of load a kernel, on a GPU; 0: turns alone")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further case after this time")
    options = parser.parse_args()
    if options.threads is not None and options.threads < 1:
        parser.error("--threads must be 1 or more")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("attention.py: torch sees no CUDA device")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows, begin, ours, power = [], time.perf_counter(), None, None
    if options.device == "cuda":
        torch.cuda.set_stream(torch.cuda.Stream())
        ours, power = library.Library(options.library, torch.cuda.current_stream()), library.Power()
    for direction in ("forward", "backward"):
        for shape in SHAPES if options.device == "cpu" else SHAPES_CUDA:
            B, H, T, d, name, causal = shape
            text = f"{direction} {name} B{B} H{H} T{T} d{d} {'causal' if causal else 'full'}"
            if options.only not in text or time.perf_counter() - begin > options.seconds:
                continue
            if options.device == "cpu":
                rows += measure(direction, shape)
                continue
            rows += measure_cuda(direction, shape, ours, power, options.load)
            torch.cuda.empty_cache()
    text = json.dumps(rows, indent=1) + "\n"
    if options.json:
        pathlib.Path(options.json).write_text(text)
    else:
        sys.stdout.write(text)


if __name__ == "__main__":
    main()
