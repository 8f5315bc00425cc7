#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures the errors of cotangent and of PyTorch against float64.

    PYTHONPATH=build/python tools/peers/accuracy.py [--device cpu|cuda] [--json] [--commit TEXT] [--op TEXT]

The inputs are random numbers, rounded to the dtype. The exact results are the formulas in float64 on the same inputs. An
error is the norm of (result - exact), divided by the norm of exact. `rounding` is the error of the exact result, rounded
to the output's dtype: no result of this dtype can be better. PyTorch computes the formulas with its functions in the same
dtype, mhc with float32 in between. --json prints the rows for `make tables`."""
import argparse
import datetime
import json
import sys

import protocol
import torch
import torch.nn.functional as F
from mhc import sinkhorn

import cotangent

DTYPES = ("f32", "f16", "bf16")


def attention(q, k, v):
    if q.dtype == torch.float64:  # not by scaled_dot_product_attention: the formula itself
        scores = torch.einsum("bihd,bjhd->bhij", q, k) / q.shape[-1] ** 0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        return torch.einsum("bhij,bjhd->bihd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)
    return F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), is_causal=True).transpose(1, 2)


def causal_conv1d(x, weight, bias):
    return F.silu(F.conv1d(F.pad(x, (weight.shape[-1] - 1, 0)), weight.unsqueeze(1), bias, groups=x.shape[1]))


def causal_conv1d_dense(x, weight):
    return F.conv1d(F.pad(x, (weight.shape[-1] - 1, 0)), weight)


def dropout(x, bias, residual, mask):
    return F.gelu(x + bias, approximate="tanh") * mask / (1 - P) + residual


def wide(x):
    """The dtype of mhc's coefficients and sums."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def mhc_pre(x, phi, alpha, bias):
    n, streams = x.shape[2], x.to(wide(x))
    flat = streams.flatten(2)
    parts = (flat @ phi.t() * torch.rsqrt(flat.square().mean(-1, keepdim=True) + 1e-6)).split([n, n, n * n], -1)
    z_pre, z_post, z_res = (a * part + b for a, part, b in zip(alpha, parts, bias.split([n, n, n * n])))
    h_in = ((torch.sigmoid(z_pre) + 1e-6).unsqueeze(-1) * streams).sum(2)
    return h_in.to(x.dtype), 2 * torch.sigmoid(z_post), sinkhorn(z_res.unflatten(-1, (n, n)))


def mhc_post(x, f, h_post, h_res):
    streams, f = x.to(wide(x)), f.to(wide(x))
    return (h_post.unsqueeze(-1) * f.unsqueeze(2) + h_res.transpose(-1, -2) @ streams).to(x.dtype)


P = 0.1


def cases(device, dtype):
    """(op, case, cotangent's function, the formulas, the inputs, the names of the outputs)."""
    def randn(*shape, dtype=dtype, scale=1.0):
        return (scale * torch.randn(shape, device=device)).to(dtype)

    f32 = torch.float32
    heads = [randn(1, 1024, 4, 128) for _ in range(3)]
    yield ("attention", "causal, B1 T1024 H4 d128", lambda *a: cotangent.attention(*a, causal=True), attention,
           dict(zip("qkv", heads)), ["out"])
    yield ("causal_conv1d", "SiLU, B2 D256 T1024 K4", lambda *a: cotangent.causal_conv1d(*a, "silu"), causal_conv1d,
           {"x": randn(2, 256, 1024), "weight": randn(256, 4, scale=0.5), "bias": randn(256)}, ["y"])
    yield ("causal_conv1d_dense", "B2 T512, 256 to 256 channels, K4", cotangent.causal_conv1d_dense, causal_conv1d_dense,
           {"x": randn(2, 256, 512), "weight": randn(256, 256, 4, scale=1024**-0.5)}, ["y"])
    mask = (torch.rand(2048, 1024, device=device) >= P).to(torch.uint8)
    yield ("dropout", "GELU, bias, residual, p=0.1, R2048 D1024",
           lambda x, bias, residual: cotangent.dropout(x, P, bias=bias, activation="gelu_tanh", residual=residual, mask=mask),
           lambda *a: dropout(*a, mask.to(a[0].dtype)),
           {"x": randn(2048, 1024), "bias": randn(1024), "residual": randn(2048, 1024)}, ["y"])
    n, D, M = 4, 1024, 24
    parameters = {"phi": randn(M, n * D, dtype=f32, scale=(n * D)**-0.5), "alpha": randn(3, dtype=f32), "bias": randn(M, dtype=f32)}
    streams, f = randn(1, 512, n, D), randn(1, 512, D)
    yield "mhc_pre", "B1 T512 n4 D1024", cotangent.mhc_pre, mhc_pre, {"x": streams, **parameters}, ["h_in", "h_post", "h_res"]
    h_post = 2 * torch.rand(1, 512, n, device=device)
    h_res = sinkhorn(randn(1, 512, n, n, dtype=f32))
    yield "mhc_post", "B1 T512 n4 D1024", cotangent.mhc_post, mhc_post, {"x": streams, "f": f, "h_post": h_post, "h_res": h_res}, ["y"]
    if dtype == f32:
        yield ("mhc_sinkhorn", "20 iterations, B1 T2048 n4", cotangent.mhc_sinkhorn, sinkhorn,
               {"h_res_logits": randn(1, 2048, n, n)}, ["h_res"])


def results_of(function, inputs, upstream):
    """The outputs, then the gradients of the inputs, in float64. upstream: the outputs' gradients, or None to draw them."""
    leaves = [value.clone().requires_grad_() for value in inputs.values()]
    outputs = function(*leaves)
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    upstream = upstream or [torch.randn_like(output) for output in outputs]
    gradients = torch.autograd.grad(outputs, leaves, [g.to(output.dtype) for g, output in zip(upstream, outputs)])
    return [value.detach() for value in (*outputs, *gradients)], upstream


def measure(device, op_filter, commit):
    rows = []
    for name in DTYPES:
        for op, case, ours, formulas, inputs, outputs in cases(device, protocol.DTYPES[name]):
            if op_filter not in op:
                continue
            found, upstream = results_of(ours, inputs, None)
            peers, _ = results_of(formulas, inputs, upstream)
            exact, _ = results_of(formulas, {key: value.double() for key, value in inputs.items()}, upstream)
            for output, mine, peer, value in zip([*outputs, *("d" + key for key in inputs)], found, peers, exact):
                def error(result):
                    return ((result.double() - value).norm() / value.norm()).item()  # noqa: B023
                rows.append({"op": "accuracy", "of": op, "case": case, "dtype": name, "output": output,
                             "rounding": error(value.to(mine.dtype)), "error": error(mine), "peer_error": error(peer),
                             "peer": f"PyTorch {torch.__version__.split('+')[0]}", "device": protocol.device_name(device),
                             "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(), "commit": commit})
                print(f"{op} {case}, {name}, {output}: " + ", ".join(
                    f"{key} {rows[-1][key]:.2e}" for key in ("rounding", "error", "peer_error")), file=sys.stderr)
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--op", default="", help="only ops whose name contains this text")
    parser.add_argument("--commit", default="", help="is written into the rows")
    parser.add_argument("--json", action="store_true", help="print the rows")
    options = parser.parse_args()
    torch.manual_seed(0)
    rows = measure(options.device, options.op, options.commit)
    if options.json:
        print(json.dumps(rows, indent=1))
    return 0 if rows else 1


if __name__ == "__main__":
    sys.exit(main())
