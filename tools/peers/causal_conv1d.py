#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times causal convolutions of Python packages on the cases of `cotangent bench causal_conv1d`, ours, and the copy.

    tools/peers/causal_conv1d.py [--device cpu|cuda] [--threads N] [--only TEXT] [--peer TEXT] [--json FILE] [--library FILE]
                                 [--seconds N]

Needs torch (pip install torch), which nothing else in this repository does. Prints JSON rows with the keys of
`cotangent bench --json`, timed as protocol.py describes. `ceiling` is torch's copy_ at the same footprint, and a row of its
own, op "copy", is torch's copy_ beyond the caches. Our rows have "ours". Weights are of x's dtype, because conv1d accepts no
other. The peers, forward and autograd:

    eager           F.conv1d(groups=D) + F.silu
    compile         the same through torch.compile
    compile, taps   K shifted products, added up, which torch.compile fuses into kernels of its own
    causal_conv1d   that package, where it is installed
    fla             flash-linear-attention, where it is installed

A peer that fails on a case is left out, with the reason on standard error.
"""
import functools
import importlib.metadata
import os
import sys

import library
import protocol
import torch
import torch.nn.functional as functional

K = 4
BEYOND_CACHES = 8 * 2048 * 8192 * 4 * 2  # bytes read and written: the largest forward of bench
SHAPES = {"cpu": [(8, 2048, 8192, "f32"), (2, 1024, 2048, "f32"), (2, 1024, 2048, "bf16"),
                  (2, 1024, 2048, "f16"),
                  (1, 128, 1024, "f32"), (1, 128, 1024, "bf16")],
          "cuda": [(8, 4096, 4096, "bf16"), (2, 2048, 2048, "bf16"), (8, 4096, 4096, "f32"), (8, 4096, 4096, "f16"),
                   (1, 1536, 16384, "bf16")]}


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


def peers(device):
    """{name: a function that makes the peer's function}, of what is installed."""
    version = f"torch {protocol.torch_version()}"
    found = {f"{version} eager": lambda: convolve}
    if device == "cuda":
        found[f"{version} compile"] = lambda: torch.compile(convolve, dynamic=False)
        found[f"{version} compile, taps"] = lambda: torch.compile(add_taps, dynamic=False)
        for name, package in ("causal_conv1d", package_causal_conv1d), ("fla", package_fla):
            try:
                call = package()
                found[f"{name} {importlib.metadata.version('flash-linear-attention' if name == 'fla' else name)}"] = (
                    lambda call=call: call)
            except ImportError as error:
                print(f"causal_conv1d.py: {name} is left out: {error}", file=sys.stderr)
    return found


# ---- one case: data are x, weight, bias and dy


def peer_call(make, direction, silu):
    """A function from the data to the peer's call."""
    function = make()

    def call_on(data):
        x, weight, bias, dy = data
        if direction == "forward":
            return lambda: function(x, weight, bias, silu)
        y = function(x, weight, bias, silu)
        return lambda: torch.autograd.grad(y, (x, weight, bias), dy, retain_graph=True)
    return call_on


def our_call(ours, direction, silu):
    def call_on(data):
        x, weight, bias, dy = (value.detach() for value in data)
        inputs = {"activation": library.ACTIVATIONS["silu" if silu else "none"], "x": x, "weight": weight, "bias": bias}
        if direction == "forward":
            return ours.call("causal_conv1d_forward", "y", **inputs, y=torch.empty_like(x))
        return ours.call("causal_conv1d_backward", "dx dweight dbias", **inputs, dy=dy, dx=torch.empty_like(x),
                         dweight=torch.empty_like(weight), dbias=torch.empty_like(bias))
    return call_on


def data_of(case, device):
    direction, B, D, T, dtype, layout, silu = case

    def like_x():
        if layout == "channel-first":
            return protocol.normal((B, D, T), dtype, device)
        return protocol.normal((B, T, D), dtype, device).transpose(1, 2)

    backward = direction == "backward"
    parameters = [protocol.normal(shape, dtype, device).requires_grad_(backward) for shape in ((D, K), (D,))]
    return like_x().requires_grad_(backward), *parameters, like_x()


def options_of(dtype, silu):
    return f"w={dtype}{'+silu' if silu else ''}+bias"


def measure(case, options, found, ours):
    direction, B, D, T, dtype, layout, silu = case
    backward, size = direction == "backward", protocol.DTYPES[dtype].itemsize
    footprint = (3 if backward else 2) * B * D * T * size + (2 if backward else 1) * D * (K + 1) * size
    torch._dynamo.reset()  # each case is compiled for its own shapes
    makers = {"cotangent": our_call(ours, direction, silu)} if ours is not None else {}
    makers |= {name: peer_call(make, direction, silu) for name, make in found.items()}
    data = [data_of(case, options.device) for _ in range(protocol.copies_for(footprint, options.device))]
    with torch.set_grad_enabled(backward):
        return protocol.memory_rows(makers, data, footprint, options, op="causal_conv1d", direction=direction, dtype=dtype,
                                    layout=layout, shape=f"B{B} D{D} T{T} K{K}", options=options_of(dtype, silu))


def copy_row(device):
    _, rate = protocol.interleave_with_copy({}, BEYOND_CACHES, device)
    return protocol.row_of(device, "copy", "", f"torch {protocol.torch_version()} copy_", "f32", "", "", "beyond the caches",
                           ms=1e3 * BEYOND_CACHES / rate, bytes=BEYOND_CACHES, gbps=1e-9 * rate, ceiling=1e-9 * rate,
                           ratio=1.0, footprint=BEYOND_CACHES)


def cases(options, found, ours):
    for number, (B, D, T, dtype) in enumerate(SHAPES[options.device]):
        for direction in ("forward", "backward"):
            for layout in ("channel-first", "channel-last"):
                for silu in ((True,) if number == 0 or options.device == "cuda" else (True, False)):
                    case = direction, B, D, T, dtype, layout, silu
                    text = f"{direction} {dtype} {layout} B{B} D{D} T{T} K{K} {options_of(dtype, silu)}"
                    yield text, functools.partial(measure, case, options, found, ours)


def main():
    options, ours = protocol.begin(protocol.parser_of(__doc__))
    sys.path.remove(os.path.dirname(protocol.__file__))  # this folder: the file is called like one of the packages
    rows = [copy_row(options.device)]
    protocol.run(cases(options, peers(options.device), ours), options, rows)


if __name__ == "__main__":
    main()
