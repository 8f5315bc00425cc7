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
H d = 2048. OPTIONS has further shapes and options, which `cotangent bench attention` has too. A peer that does not support
a case is left out of it. Our rows have "ours". turn_ms is a call's time in the rounds. From 4k
tokens on each kernel also works for --load seconds alone: ms is then its time in the second half, with the clock and the
energy of that time; burst_ms is one call before it, after idleness.
"""
import ctypes
import dataclasses
import functools
import statistics
import sys
import time

import library
import protocol
import torch
import torch.nn.functional as functional



@dataclasses.dataclass(frozen=True)
class Shape:
    """A case: B sequences of T tokens, H query heads and kv_heads of keys and values (0: H), v with dv columns (0: d)."""
    B: int
    H: int
    T: int
    d: int
    dtype: str = "bf16"
    causal: bool = True
    kv_heads: int = 0
    dv: int = 0
    window_left: int = -1  # keys to the left of the diagonal; -1: all
    softcap: float = 0.0
    packed: bool = False  # the B sequences are one tensor of B T tokens, with cu_seqlens

    def text(self):
        """As bench names the shape."""
        return f"B{self.B} H{self.H}/{self.kv_heads or self.H} T{self.T}/{self.T} d{self.d}/{self.dv or self.d}"

    def options(self):
        """As bench names the options."""
        return (("causal" if self.causal else "full") + (f"+window{self.window_left},0" if self.window_left >= 0 else "")
                + (f"+softcap{self.softcap:g}" if self.softcap else "") + ("+packed" if self.packed else ""))

    def flops(self, direction):
        """The queries and keys of a causal mask or a window count one by one; the products of d and dv columns apart."""
        keys = self.window_left + 1 if self.window_left >= 0 else self.T
        pairs = self.T * self.T if not self.causal else keys * (keys + 1) // 2 + (self.T - keys) * keys
        columns = 6 * self.d + 4 * (self.dv or self.d) if direction == "backward" else 2 * (self.d + (self.dv or self.d))
        return self.B * self.H * pairs * columns


SHAPES = [Shape(1, 8, 2048, 128), Shape(1, 8, 2048, 128, "f16"), Shape(1, 8, 2048, 128, "f32"),
          Shape(1, 8, 2048, 128, causal=False), Shape(1, 8, 2048, 128, "f32", False), Shape(1, 16, 2048, 64),
          Shape(1, 4, 2048, 256), Shape(4, 8, 512, 128)]
SHAPES_CUDA = [Shape(16384 // T, 2048 // d, T, d, causal=causal) for d in (64, 128, 256) for causal in (False, True)
               for T in (512, 1024, 2048, 4096, 8192, 16384)]
OPTIONS = [Shape(1, 16, 16384, 128, window_left=1024), Shape(4, 16, 4096, 128, softcap=30),
           Shape(4, 16, 4096, 128, kv_heads=2), Shape(1, 16, 16384, 128, kv_heads=2), Shape(4, 16, 4096, 128, packed=True),
           Shape(8, 32, 2048, 128, kv_heads=8, packed=True), Shape(2, 32, 8192, 128, kv_heads=8, packed=True),
           Shape(32, 32, 512, 64, packed=True), Shape(4, 16, 4096, 192, dv=128), Shape(4, 16, 4096, 192),
           Shape(4, 16, 4096, 96)]
LOAD_GRAPH_SECONDS, IDLE_SECONDS, LOAD_TOKENS = 20e-3, 0.4, 4096


def row_of(direction, shape, device, kernel, seconds, order="", **figures):
    flops = shape.flops(direction)
    return protocol.row_of(device, "attention", direction, kernel, shape.dtype, "bhtd" if device == "cpu" else "bthd",
                           shape.text(), shape.options() + order, ms=1e3 * seconds, flops=flops,
                           tflops=1e-12 * flops / seconds, **figures)


def measure(direction, shape, options):
    """On the CPU."""
    size, causal = (shape.B, shape.H, shape.T, shape.d), shape.causal
    q, k, v, dout = (protocol.normal(size, shape.dtype, "cpu") for _ in range(4))
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
        B, H, T = shape.B, shape.H, shape.T
        kv_heads, dv = shape.kv_heads or H, shape.dv or shape.d
        tokens = (B * T,) if shape.packed else (B, T)
        sizes = {"q": (H, shape.d), "k": (kv_heads, shape.d), "v": (kv_heads, dv), "dout": (H, dv)}
        self.tensors = {key: protocol.normal(tokens + size, shape.dtype, "cuda") for key, size in sizes.items()}
        self.out = torch.empty_like(self.tensors["dout"])
        self.lse = torch.empty((H, B * T) if shape.packed else (B, H, T), device="cuda")
        self.cu_seqlens = torch.arange(0, B * T + 1, T, dtype=torch.int32, device="cuda") if shape.packed else None
        self.shape, self.flash_attention_3_library = shape, flash_attention_3_library
        self.direction, self.ours, self.errors, self.calls = direction, ours, {}, {}
        self.forward = ours.call("attention_forward", "out lse", **self.inputs(), out=self.out, lse=self.lse)
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
        """Of our calls."""
        shape = self.shape
        window = {"window": 1, "window_left": shape.window_left, "window_right": -1} if shape.window_left >= 0 else {}
        packed = {"cu_seqlens_q": self.cu_seqlens, "cu_seqlens_k": self.cu_seqlens, "max_seqlen_q": shape.T,
                  "max_seqlen_k": shape.T} if shape.packed else {}
        return {key: self.tensors[key] for key in "qkv"} | {"causal": shape.causal, "softcap": shape.softcap} | window | packed

    def gradients(self):
        return [torch.empty_like(self.tensors[key]) for key in ("q", "k", "v")]

    def cotangent(self):
        if self.direction == "forward":
            return {"cotangent": self.forward}

        def backward(nondeterministic):
            dq, dk, dv = self.gradients()
            return self.ours.call("attention_backward", "dq dk dv", **self.inputs(), allow_nondeterminism=nondeterministic,
                                  lse=self.lse, out=self.out, dout=self.tensors["dout"], dq=dq, dk=dk, dv=dv)
        return {"cotangent": backward(0), "cotangent+nondeterministic": backward(1)}

    def cudnn(self):
        name, shape = f"cuDNN {torch.backends.cudnn.version()} through torch {torch.__version__}", self.shape
        if shape.window_left >= 0 or shape.softcap or shape.packed:
            raise LookupError("torch's operator has no window, softcap or cu_seqlens")
        q, k, v, dout = (x.transpose(1, 2) for x in self.tensors.values())
        scale = q.shape[-1] ** -0.5
        forward = torch.ops.aten._scaled_dot_product_cudnn_attention
        if self.direction == "forward":
            return {name: lambda: forward(q, k, v, None, True, 0.0, shape.causal, False, scale=scale)}
        out, lse, cu_q, cu_k, max_q, max_k, seed, offset, _ = forward(q, k, v, None, True, 0.0, shape.causal, False,
                                                                      scale=scale)
        backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        return {name: lambda: backward(dout, q, k, v, out, lse, seed, offset, None, cu_q, cu_k, max_q, max_k, 0.0,
                                       shape.causal, scale=scale)}

    def flash_attention_4(self):
        import importlib.metadata
        from flash_attn.cute import interface
        name = f"FlashAttention-4 {importlib.metadata.version('flash-attn-4')}"
        shape, (q, k, v, dout) = self.shape, self.tensors.values()
        options = {"causal": shape.causal}
        if shape.window_left >= 0:  # a causal mask is window_size_right = 0 there
            options = {"window_size_left": shape.window_left, "window_size_right": 0}
        if shape.softcap:
            options["softcap"] = shape.softcap
        if shape.packed:
            options |= {"cu_seqlens_q": self.cu_seqlens, "cu_seqlens_k": self.cu_seqlens, "max_seqlen_q": shape.T,
                        "max_seqlen_k": shape.T}
        out, lse = interface._flash_attn_fwd(q, k, v, return_lse=True, **options)[:2]
        if self.direction == "forward":
            return {name: lambda: interface._flash_attn_fwd(q, k, v, return_lse=True, out=out, lse=lse, **options)}

        def backward(deterministic):
            dq, dk, dv = self.gradients()
            return lambda: interface._flash_attn_bwd(q, k, v, out, dout, lse, deterministic=deterministic, dq=dq, dk=dk, dv=dv,
                                                     **options)
        return {name: backward(False), f"{name} deterministic": backward(True)}

    def flash_attention_3(self):
        shape = self.shape
        if self.direction == "forward":
            raise LookupError("only its backward is built (build_flash_attention_3.sh)")
        if shape != Shape(shape.B, shape.H, shape.T, shape.d, "bf16", shape.causal):
            raise LookupError("flash_attention_3.cu has no options")
        if self.flash_attention_3_library is None:
            raise LookupError("no --flash-attention-3 FILE")
        backward_of, bytes_of = (getattr(self.flash_attention_3_library, f"peer_flash_attention_3_{name}_{shape.d}")
                                 for name in ("backward", "workspace"))
        bytes_of.restype = ctypes.c_int64
        q, k, v, dout = self.tensors.values()

        def backward(deterministic):
            gradients = self.gradients()
            workspace = torch.empty(bytes_of(shape.B, shape.H, shape.T), dtype=torch.uint8, device="cuda")
            pointers = [ctypes.c_void_p(x.data_ptr()) for x in (q, k, v, self.out, dout, self.lse, *gradients, workspace)]
            keep = (gradients, workspace)
            return lambda keep=keep: backward_of(shape.B, shape.H, shape.T, int(shape.causal), deterministic, *pointers,
                                                 ctypes.c_void_p(torch.cuda.current_stream().cuda_stream))
        if shape.d == 256:  # no deterministic mode
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
        print(f"{peer} does not support {direction} {shape.text()} {shape.options()}: {error}", file=sys.stderr)
    timings = protocol.interleave({name: [call] for name, call in case.calls.items() if options.peer in name}, "cuda")
    rows = []
    for name, (turn, plain) in timings.items():
        kernel = name.removesuffix("+nondeterministic")
        row = row_of(direction, shape, "cuda", kernel, turn, name.removeprefix(kernel), turn_ms=1e3 * turn)
        row |= {"graph": False} if plain else {}
        if shape.T >= LOAD_TOKENS and options.load > 0:
            burst, loaded, use = under_load(case.calls[name], options.load, power)
            row |= {"burst_ms": 1e3 * burst, "ms": 1e3 * loaded, "tflops": 1e-12 * row["flops"] / loaded} | use
            if use:
                row["pj_per_flop"] = 1e12 * use["watts"] * loaded / row["flops"]
        rows.append(row)
    print(direction, shape.text(), shape.options(),
          *(f"{row['kernel']}{row['options'].removeprefix(shape.options())} {row['tflops']:.0f}" for row in rows),
          file=sys.stderr, flush=True)
    return rows


def cases(options, ours):
    power = library.Power() if options.device == "cuda" else None
    flash_attention_3_library = ctypes.CDLL(options.flash_attention_3) if options.flash_attention_3 else None
    for direction in ("forward", "backward"):
        for shape in SHAPES if options.device == "cpu" else SHAPES_CUDA + OPTIONS:
            text = f"{direction} {shape.dtype} {shape.text()} {shape.options()}"
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
