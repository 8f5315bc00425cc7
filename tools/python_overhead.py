#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the overhead of a forward call from Python over the C call, for each layer.

Times are in microseconds of the calling thread, the best of several rounds. The shapes are so small that the time of the
kernels is negligible.

    python_overhead.py [--device cuda]
"""
import argparse
import time

import torch

import cotangent
from cotangent import _C


def best(call, repeats, rounds=7):
    times = []
    for _ in range(rounds):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        times.append((time.perf_counter() - start) / repeats)
    return min(times) * 1e6


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--repeats", type=int, default=500, help="few enough that a GPU's launch queue does not fill up")
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    repeats = arguments.repeats
    torch.set_num_threads(1)
    x = torch.randn(1, 64, 64, device=device)
    weight = torch.randn(64, 4, device=device)
    bias = torch.randn(64, device=device)
    y = torch.empty_like(x)
    plan = _C.plan("causal_conv1d_forward", ("x", "weight", "bias", "activation", "y"))
    values = (x, weight, bias, 1, y)
    op = torch.ops.cotangent.causal_conv1d_forward.default
    other_arguments = (None, None, None, 1, False)
    if device.type == "cuda":
        number = x.get_device()
        stream = torch._C._cuda_getCurrentRawStream

        def run():
            _C.run_cuda(plan, number, stream(number), None, *values)
    else:
        number = -1

        def run():
            _C.run_cpu(plan, torch.get_num_threads(), *values)

    def call():
        cotangent.causal_conv1d(x, weight, bias, "silu")

    c_call = min(_C.time_call(plan, number, repeats, *values) for _ in range(7)) * 1e6
    reading = best(run, repeats)
    allocating = best(lambda: torch.empty_like(x), repeats)
    with torch.no_grad():
        through_dispatcher = best(lambda: op(x, weight, bias, *other_arguments), repeats)
        public_function = best(call, repeats)
    weight.requires_grad_()
    recording = best(call, repeats)
    print(f"causal_conv1d forward on {device}, torch {torch.__version__}; microseconds a call")
    for name, value in (
        ("the C call", c_call),
        ("reading the tensors", reading - c_call),
        ("allocating y", allocating),
        ("the public function", public_function - reading - allocating),
        ("autograd's record", recording - public_function),
        ("overhead without gradients", public_function - c_call),
        ("overhead with gradients", recording - c_call),
        ("overhead through torch's dispatcher", through_dispatcher - c_call),
    ):
        print(f"  {name:42s} {value:7.2f}")


if __name__ == "__main__":
    main()
