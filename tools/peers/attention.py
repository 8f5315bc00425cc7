#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times attention's peers on the shapes of `cotangent bench attention` that they have.

    tools/peers/attention.py [--device cpu|cuda] [--threads N] [--only TEXT] [--peer TEXT] [--json FILE] [--library FILE]
                             [--seconds N] [--load N] [--flash-attention-3 FILE]

Needs torch (pip install torch), which nothing else in this repository does. Prints JSON rows with keys of
`cotangent bench --json`, timed as protocol.py describes. On the CPU the peer is F.scaled_dot_product_attention on
contiguous [B,H,T,d], and its autograd; our library is not timed there. On a GPU the peers are cuDNN, FlashAttention-4
(flash_attn.cute), those that can be imported, and the backward of FlashAttention-3 in the library FILE that
build_flash_attention_3.sh builds. Tensors are [B,T,H,d], in the setting of FlashAttention-3's paper: 16k tokens with
H d = 2048. Our rows have "ours". turn_ms is a call's time in the rounds. From 4k
tokens on each kernel also works for --load seconds alone: ms is then its time in the second half, with the clock and the
energy of that time; burst_ms is one call before it, after idleness.
"""
import ctypes
import functools
import statistics
import sys
import time

import library
import protocol
import torch
import torch.nn.functional as functional

SHAPES = [(1, 8, 2048, 128, "bf16", True), (1, 8, 2048, 128, "f16", True), (1, 8, 2048, 128, "f32", True),
          (1, 8, 2048, 128, "bf16", False), (1, 8, 2048, 128, "f32", False), (1, 16, 2048, 64, "bf16", True),
          (1, 4, 2048, 256, "bf16", True), (4, 8, 512, 128, "bf16", True)]
SHAPES_CUDA = [(16384 // T, 2048 // d, T, d, "bf16", causal) for d in (64, 128, 256) for causal in (False, True)
               for T in (512, 1024, 2048, 4096, 8192, 16384)]
LOAD_GRAPH_SECONDS, IDLE_SECONDS, LOAD_TOKENS = 20e-3, 0.4, 4096


def row_of(direction, shape, device, kernel, seconds, order="", **figures):
    B, H, T, d, name, causal = shape
    pairs = B * H * (T * (T + 1) // 2 if causal else T * T)
    flops = pairs * d * (10 if direction == "backward" else 4)
    return protocol.row_of(
        device, "attention", direction, kernel, name, "bhtd" if device == "cpu" else "bthd",
        f"B{B} H{H}/{H} T{T}/{T} d{d}/{d}", ("causal" if causal else "full") + order,
        ms=1e3 * seconds, flops=flops, tflops=1e-12 * flops / seconds, **figures)


def measure(direction, shape, options):
    """On the CPU."""
    B, H, T, d, name, causal = shape
    q, k, v, dout = (protocol.normal((B, H, T, d), name, "cpu") for _ in range(4))
    attention = functional.scaled_dot_product_attention
    kernel = f"torch {torch.__version__} sdpa"
    if options.peer not in kernel:
        return []
    if direction == "backward":
        for x in (q, k, v):
            x.requires_grad_(True)
        out = attention(q, k, v, is_causal=causal)
        timings = protocol.interleave({kernel: [lambda: torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)]}, "cpu")
    else:
        with torch.no_grad():
            timings = protocol.interleave({kernel: [lambda: attention(q, k, v, is_causal=causal)]}, "cpu")
    return [row_of(direction, shape, "cpu", kernel, timings[kernel][0])]


class Case:
    """Inputs and results of one shape on the GPU, and the calls of all that support it: {name: function}."""

    def __init__(self, direction, shape, ours, flash_attention_3_library):
        B, H, T, d, name, self.causal = self.shape = shape
        self.flash_attention_3_library = flash_attention_3_library
        self.tensors = {key: protocol.normal((B, T, H, d), name, "cuda") for key in ("q", "k", "v", "dout")}
        self.out, self.lse = torch.empty_like(self.tensors["q"]), torch.empty((B, H, T), device="cuda")
        self.direction, self.ours, self.errors, self.calls = direction, ours, {}, {}
        self.forward = ours.call("attention_forward", "out lse", **self.inputs(), causal=self.causal, out=self.out,
                                 lse=self.lse)
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

        def backward(nondeterministic):
            dq, dk, dv = self.gradients()
            return self.ours.call("attention_backward", "dq dk dv", **self.inputs(), causal=self.causal,
                                  allow_nondeterminism=nondeterministic, lse=self.lse, out=self.out, dout=self.tensors["dout"],
                                  dq=dq, dk=dk, dv=dv)
        return {"cotangent": backward(0), "cotangent+nondeterministic": backward(1)}

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
        B, H, T, d, *_ = self.shape
        if self.direction == "forward":
            raise LookupError("only its backward is built (build_flash_attention_3.sh)")
        if self.flash_attention_3_library is None:
            raise LookupError("no --flash-attention-3 FILE")
        backward_of, bytes_of = (getattr(self.flash_attention_3_library, f"peer_flash_attention_3_{name}_{d}")
                                 for name in ("backward", "workspace"))
        bytes_of.restype = ctypes.c_int64
        q, k, v, dout = self.tensors.values()

        def backward(deterministic):
            gradients = self.gradients()
            workspace = torch.empty(bytes_of(B, H, T), dtype=torch.uint8, device="cuda")
            pointers = [ctypes.c_void_p(x.data_ptr()) for x in (q, k, v, self.out, dout, self.lse, *gradients, workspace)]
            keep = (gradients, workspace)
            return lambda keep=keep: backward_of(B, H, T, int(self.causal), deterministic, *pointers,
                                                 ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        if d == 256:  # no deterministic mode
            return {"FlashAttention-3": backward(0)}
        return {"FlashAttention-3": backward(0), "FlashAttention-3 deterministic": backward(1)}


def under_load(call, seconds, power):
    """Of one call: seconds after idleness, seconds in the second half of the load, and what the GPU used meanwhile."""
    single, many = (protocol.GraphTimer([call], length) for length in (0, LOAD_GRAPH_SECONDS))
    bursts = []
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


def measure_cuda(direction, shape, ours, flash_attention_3_library, power, options):
    """All that support the shape, in turns; from LOAD_TOKENS on under load besides."""
    case = Case(direction, shape, ours, flash_attention_3_library)
    for peer, error in case.errors.items():
        print(f"{peer} does not take {direction} {shape}: {error}", file=sys.stderr)
    timings = protocol.interleave({name: [call] for name, call in case.calls.items() if options.peer in name}, "cuda")
    rows = []
    for name, (turn, plain) in timings.items():
        kernel = name.removesuffix("+nondeterministic")
        row = row_of(direction, shape, "cuda", kernel, turn, name.removeprefix(kernel), turn_ms=1e3 * turn)
        row |= {"graph": False} if plain else {}
        if shape[2] >= LOAD_TOKENS and options.load > 0:
            burst, loaded, use = under_load(case.calls[name], options.load, power)
            row |= {"burst_ms": 1e3 * burst, "ms": 1e3 * loaded, "tflops": 1e-12 * row["flops"] / loaded} | use
            if use:
                row["pj_per_flop"] = 1e12 * use["watts"] * loaded / row["flops"]
        rows.append(row)
    print(direction, shape, *(f"{row['kernel']}{row['options'].removeprefix('causal').removeprefix('full')} {row['tflops']:.0f}"
                              for row in rows), file=sys.stderr, flush=True)
    return rows


def cases(options, ours):
    power = library.Power() if options.device == "cuda" else None
    flash_attention_3_library = ctypes.CDLL(options.flash_attention_3) if options.flash_attention_3 else None
    for direction in ("forward", "backward"):
        for shape in SHAPES if options.device == "cpu" else SHAPES_CUDA:
            B, H, T, d, name, causal = shape
            text = f"{direction} {name} B{B} H{H} T{T} d{d} {'causal' if causal else 'full'}"
            yield text, (functools.partial(measure, direction, shape, options) if options.device == "cpu" else
                         functools.partial(measure_cuda, direction, shape, ours, flash_attention_3_library, power, options))


def main():
    parser = protocol.parser_of(__doc__)
    parser.add_argument("--load", type=float, default=3, help="seconds of load a kernel, on a GPU; 0: rounds alone")
    parser.add_argument("--flash-attention-3", help="a library that build_flash_attention_3.sh built")
    options, ours = protocol.begin(parser)
    if options.device == "cuda" and ours is None:
        sys.exit("attention.py: a GPU run needs our library (--library FILE)")
    protocol.run(cases(options, ours), options)


if __name__ == "__main__":
    main()
