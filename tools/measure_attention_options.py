#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times cotangent.attention with the options that the Hopper kernels do not support, and in float32, from Python.

    tools/measure_attention_options.py [--device cuda] [--tokens 16384] [--length 4096] [--width 2048] [--json FILE] [--commit TEXT]

Every case has a causal mask, `tokens` tokens in sequences of `length`, and heads times head size = `width`. A time is the
median of 15 rounds of 4 calls between two CUDA events (on the CPU: of one call). TFLOP/s count as the FlashAttention papers
do: 4 B H T T d forward, 2.5 times that backward, half of it for the mask. The case "none" also times the forward of
PyTorch's scaled_dot_product_attention. --commit is written into the record, which
`make tables` reads from bench/results/DATE-DEVICE-attention_options.json."""
import argparse
import datetime
import json
import statistics
import time

import torch
import torch.nn.functional as F

import cotangent

OPTIONS = ("none", "dropout", "alibi", "bias", "bias with gradient", "k expanded")


def seconds(call, device):
    """The time of one call."""
    call()
    times = []
    for _ in range(15 if device == "cuda" else 1):
        if device == "cuda":
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            for _ in range(4):
                call()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) / 4000)
        else:
            begin = time.perf_counter()
            call()
            times.append(time.perf_counter() - begin)
    return statistics.median(times)


def measure(arguments, option, dtype, d):
    B, T, H = arguments.tokens // arguments.length, arguments.length, arguments.width // d

    def randn(*shape):
        return torch.randn(*shape, device=arguments.device, dtype=dtype)

    q, k, v = (randn(B, T, H, d).requires_grad_() for _ in range(3))
    if option == "k expanded":
        k = randn(B, T, 1, d).expand(B, T, H, d)
    options = {
        "dropout": lambda: dict(dropout_p=0.1),
        "alibi": lambda: dict(alibi_slopes=2.0 ** -torch.arange(1, H + 1, device=arguments.device).float()),
        "bias": lambda: dict(attn_bias=randn(1, H, T, T)),
        "bias with gradient": lambda: dict(attn_bias=randn(1, H, T, T).requires_grad_()),
    }.get(option, dict)()  # fmt: skip
    leaves = [x for x in (q, k, v, options.get("attn_bias")) if x is not None and x.requires_grad]
    out, dout = cotangent.attention(q, k, v, causal=True, **options), randn(B, T, H, d)
    with torch.no_grad():
        forward = seconds(lambda: cotangent.attention(q, k, v, causal=True, **options), arguments.device)
    backward = seconds(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True), arguments.device)
    peer = {}
    if option == "none":
        def sdpa():
            with torch.no_grad():
                F.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)

        peer["sdpa_forward_ms"] = 1e3 * seconds(sdpa, arguments.device)
    work = 2e-12 * B * H * T * T * d
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "CPU"
    return dict(op="attention_options", device=name, backend=arguments.device, date=datetime.date.today().isoformat(),
                commit=arguments.commit, torch=torch.__version__, case=option, dtype=str(dtype).removeprefix("torch."),
                shape=f"B{B} H{H} T{T} d{d}", forward_ms=1e3 * forward, backward_ms=1e3 * backward,
                forward_tflops=work / forward, backward_tflops=2.5 * work / backward, **peer)  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    for name, default in (("tokens", 16384), ("length", 4096), ("width", 2048)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--commit", default="")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    rows = []
    for d in (64, 128):
        for option, dtype in [*((option, torch.bfloat16) for option in OPTIONS), ("none", torch.float32)]:
            rows.append(measure(arguments, option, dtype, d))
            print("{case:20s} {dtype:9s} {shape:20s} forward {forward_ms:8.3f} ms {forward_tflops:7.1f} TFLOP/s, "
                  "backward {backward_ms:8.3f} ms {backward_tflops:7.1f} TFLOP/s".format(**rows[-1]), flush=True)
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
