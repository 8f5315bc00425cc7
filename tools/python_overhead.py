#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the overhead of a call from Python over the C call, forward and backward, for each layer.

Times are in microseconds of the calling thread, the best of many short rounds. The shapes are so small that the time of
the kernels is negligible. The floors are those of autograd functions in Python without a kernel: one does nothing, the
other allocates its results. The difference to a floor is the overhead of this package.

    python_overhead.py [--device cuda]
"""
import argparse
import time

import torch

import cotangent
from cotangent import _C


def best(call, repeats, rounds):
    times = []
    for _ in range(rounds):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        times.append((time.perf_counter() - start) / repeats)
    return min(times) * 1e6


class Nothing(torch.autograd.Function):
    """Saves what a convolution saves. Its backward returns tensors that exist already."""

    @staticmethod
    def forward(ctx, x, weight, bias, results):
        ctx.save_for_backward(x, weight, bias)
        ctx.results = results
        return results[0].view_as(results[0])

    @staticmethod
    def backward(ctx, dy):
        ctx.saved_tensors
        return (*ctx.results, None)


class Allocating(Nothing):
    """The same, but it allocates its results."""

    @staticmethod
    def forward(ctx, x, weight, bias, results):
        ctx.save_for_backward(x, weight, bias)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx, dy):
        return (*[torch.empty_like(tensor) for tensor in ctx.saved_tensors], None)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=50, help="few enough that a GPU's launch queue does not fill up")
    parser.add_argument("--rounds", type=int, default=500)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    counts = arguments.repeats, arguments.rounds
    torch.set_num_threads(1)
    x = torch.randn(1, 64, 64, device=device)
    weight = torch.randn(64, 4, device=device)
    bias = torch.randn(64, device=device)
    y, dy = torch.empty_like(x), torch.randn_like(x)
    gradients = torch.empty_like(x), torch.empty_like(weight), torch.empty_like(bias)
    forward = _C.plan("causal_conv1d_forward", ("x", "weight", "bias", "activation", "y"))
    forward_values = (x, weight, bias, 1, y)
    backward = _C.plan("causal_conv1d_backward", ("x", "weight", "bias", "activation", "dy", "dx", "dweight", "dbias"))
    backward_values = (x, weight, bias, 1, dy, *gradients)
    op = torch.ops.cotangent.causal_conv1d_forward.default
    other_arguments = (None, None, None, 1, False)
    if device.type == "cuda":
        number = x.get_device()
        stream = torch._C._cuda_getCurrentRawStream

        def workspace(place, size):
            return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", place))

        def run(plan, values):
            _C.run_cuda(plan, number, stream(number), workspace, *values)
    else:
        number = -1

        def run(plan, values):
            _C.run_cpu(plan, torch.get_num_threads(), *values)

    def in_c(plan, values):
        return min(_C.time_call(plan, number, counts[0], *values) for _ in range(counts[1])) * 1e6

    def call():
        return cotangent.causal_conv1d(*inputs, "silu")

    def differentiate(output):
        return best(lambda: torch.autograd.grad(output, inputs, dy, retain_graph=True), *counts)

    inputs = x, weight, bias
    c_forward, c_backward = in_c(forward, forward_values), in_c(backward, backward_values)
    reading = best(lambda: run(forward, forward_values), *counts)
    reading_backward = best(lambda: run(backward, backward_values), *counts)
    allocating = best(lambda: torch.empty_like(x), *counts)
    allocating_backward = best(lambda: [torch.empty_like(tensor) for tensor in inputs], *counts)
    with torch.no_grad():
        through_dispatcher = best(lambda: op(*inputs, *other_arguments), *counts)
        public_function = best(call, *counts)
    inputs = tuple(tensor.clone().requires_grad_() for tensor in inputs)
    recording = best(call, *counts)
    recording_nothing = best(lambda: Nothing.apply(*inputs, gradients), *counts)
    recording_allocating = best(lambda: Allocating.apply(*inputs, gradients), *counts)
    differentiating = differentiate(call())
    differentiating_nothing = differentiate(Nothing.apply(*inputs, gradients))
    differentiating_allocating = differentiate(Allocating.apply(*inputs, gradients))
    print(f"causal_conv1d on {device}, torch {torch.__version__}; microseconds a call")
    for name, value in (
        ("forward: the C call", c_forward),
        ("reading the tensors", reading - c_forward),
        ("allocating y", allocating),
        ("the public function", public_function - reading - allocating),
        ("autograd's record", recording - public_function),
        ("an autograd function that does nothing", recording_nothing),
        ("an autograd function that allocates y", recording_allocating),
        ("overhead without gradients", public_function - c_forward),
        ("overhead with gradients", recording - c_forward),
        ("the same over the function that allocates", recording - c_forward - recording_allocating),
        ("overhead through torch's dispatcher", through_dispatcher - c_forward),
        ("backward: the C call", c_backward),
        ("reading the tensors", reading_backward - c_backward),
        ("allocating the gradients", allocating_backward),
        ("an autograd function that does nothing", differentiating_nothing),
        ("a function that allocates the gradients", differentiating_allocating),
        ("overhead with torch's engine", differentiating - c_backward),
        ("the same over the function that does nothing", differentiating - c_backward - differentiating_nothing),
        ("the same over the function that allocates", differentiating - c_backward - differentiating_allocating),
    ):
        print(f"  {name:44s} {value:7.2f}")


if __name__ == "__main__":
    main()
