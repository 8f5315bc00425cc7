#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times PyTorch's dropout with bias, activation and residual on cases of `cotangent bench dropout`, ours, and the copy.

    tools/peers/dropout.py [--device cpu|cuda] [--threads N] [--only TEXT] [--peer TEXT] [--json FILE] [--library FILE]
                           [--seconds N]

Needs torch (pip install torch), which nothing else in this repository does. Prints JSON rows with keys of
`cotangent bench --json`, timed as protocol.py describes. `bytes` are those that a generated mask needs, `ceiling` is
torch's copy_ at that footprint. Our rows have "ours". The forward is F.dropout(act(x + bias), p) + residual with what
autograd saves, the backward autograd's, down to dx and dbias: each eager, and on a GPU compiled by torch.compile too.
"""
import functools

import library
import protocol
import torch
import torch.nn.functional as functional

P = 0.1
SHAPES = {"cpu": [(8192, 1024, "f32", "none"), (8192, 1024, "bf16", "none"), (8192, 1024, "f32", "gelu_tanh")],
          "cuda": [(32768, 4096, "bf16", "none"), (32768, 4096, "bf16", "gelu_tanh"), (32768, 4096, "f32", "none"),
                   (32768, 4097, "bf16", "none"), (32768, 1024, "bf16", "none")]}
ACTIVATIONS = {"none": lambda z: z, "gelu_tanh": lambda z: functional.gelu(z, approximate="tanh")}


# ---- one case: data are x, bias, residual and dy


def peer_call(drop, direction):
    """A function from the data to the peer's call."""
    def call_on(data):
        x, bias, residual, dy = data
        if direction == "forward":
            return lambda: drop(x, bias, residual)
        y = drop(x, bias, residual)
        return lambda: torch.autograd.grad(y, (x, bias), dy, retain_graph=True)
    return call_on


def our_call(ours, direction, activation, p=P):
    def call_on(data):
        x, bias, residual, dy = (value.detach() for value in data)
        options = {"activation": library.ACTIVATIONS[activation], "p": p, "seed": 1, "offset": 2}
        if direction == "forward":
            return ours.call("dropout_forward", "y", **options, x=x, bias=bias, residual=residual, y=torch.empty_like(x))
        inputs = {"x": x, "bias": bias} if activation != "none" else {}
        return ours.call("dropout_backward", "dx dbias", **options, **inputs, dy=dy, dx=torch.empty_like(dy),
                         dbias=torch.empty_like(bias))
    return call_on


def data_of(R, D, dtype, device):
    x, bias, residual, dy = (protocol.normal(shape, dtype, device) for shape in ((R, D), (D,), (R, D), (R, D)))
    return x.requires_grad_(), bias.requires_grad_(), residual, dy


def measure(direction, shape, options, ours):
    R, D, dtype, activation = shape
    tensors = 3 if direction == "forward" else 2 + (activation != "none")
    footprint = (tensors * R * D + D) * protocol.DTYPES[dtype].itemsize

    def drop(x, bias, residual):
        return functional.dropout(ACTIVATIONS[activation](x + bias), P, training=True) + residual

    torch._dynamo.reset()  # each case is compiled for its own shapes
    makers = {"cotangent": our_call(ours, direction, activation)} if ours is not None else {}
    makers[f"torch {torch.__version__} eager"] = peer_call(drop, direction)
    if options.device == "cuda":
        makers[f"torch {torch.__version__} compiled"] = peer_call(torch.compile(drop, dynamic=False), direction)
    data = [data_of(R, D, dtype, options.device) for _ in range(protocol.copies_for(footprint, options.device))]
    return protocol.memory_rows(makers, data, footprint, options, own_options=" generated", op="dropout", direction=direction,
                                dtype=dtype, layout="contiguous", shape=f"R{R} D{D}",
                                options=f"{activation}+bias{'+residual' if direction == 'forward' else ''} p={P}")


def cases(options, ours):
    for shape in SHAPES[options.device]:
        R, D, dtype, activation = shape
        for direction in ("forward", "backward"):
            yield (f"{direction} {dtype} {activation} R{R} D{D}", functools.partial(measure, direction, shape, options, ours))


def main():
    options, ours = protocol.begin(protocol.parser_of(__doc__))
    protocol.run(cases(options, ours), options)


if __name__ == "__main__":
    main()
