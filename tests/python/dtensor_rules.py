# SPDX-License-Identifier: Apache-2.0
"""Run by test_dtensor.py on two processes: each op on shards gives the results and gradients of the whole tensors, and
keeps the placements of its rule."""
import os
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import cotangent
import cotangent.integrations.dtensor as dtensor

R = Replicate()


def compare(about, run, tensors, placements, result, **options):
    """run(*tensors) on whole tensors and on shards. result: the expected placement of the first result."""
    whole = [t.clone().requires_grad_() if t.is_floating_point() else t for t in tensors]
    shards = [distribute_tensor(t, mesh, [p]) for t, p in zip(tensors, placements)]
    shards = [t.requires_grad_() if t.is_floating_point() else t for t in shards]
    expected, found = (as_tuple(run(*x, **options)) for x in (whole, shards))
    assert found[0].placements == (result,), f"{about}: placement {found[0].placements}, expected {result}"
    generator = torch.Generator().manual_seed(7)
    total = torch.zeros(())
    for a, b in zip(found, expected):
        torch.testing.assert_close(a.full_tensor(), b, rtol=1e-4, atol=1e-5, msg=lambda text: f"{about}: {text}")
        weight = torch.randn(b.shape, generator=generator)
        (a * distribute_tensor(weight, mesh, a.placements)).sum().full_tensor().backward(retain_graph=True)
        total = total + (b * weight).sum()
    total.backward()
    for i, (a, b) in enumerate(zip(shards, whole)):
        if b.is_floating_point():
            torch.testing.assert_close(a.grad.full_tensor(), b.grad, rtol=1e-4, atol=1e-4, msg=lambda text: f"{about}, {i}: {text}")


def as_tuple(x):
    return x if isinstance(x, tuple) else (x,)


def attention(q, k, v, *others, names=(), **options):
    return cotangent.attention(q, k, v, causal=True, return_lse=True, **dict(zip(names, others)), **options)


def main():
    randn = torch.randn
    q, k, v = (randn(4, 6, h, 8) for h in (4, 2, 2))
    sink, slopes, bias = randn(4), torch.rand(4, 4), randn(4, 4, 6, 6)
    all_names = ("sink", "attn_bias")
    for shard in (Shard(0), Shard(2), R):
        compare("attention", attention, (q, k, v), [shard] * 3, shard)
    compare("attention, batch", attention, (q, k, v, sink, bias), [Shard(0)] * 3 + [R, Shard(0)], Shard(0), names=all_names)
    compare("attention, heads", attention, (q, k, v, sink, bias), [Shard(2)] * 3 + [Shard(0), Shard(1)], Shard(2), names=all_names)
    compare("attention, one bias", attention, (q, k, v, sink, bias[:1, :1]), [Shard(2)] * 3 + [R, R], Shard(2), names=all_names)
    compare("attention, time", attention, (q, k, v), [Shard(1)] * 3, R)
    # 3 key heads cannot be split evenly: a device would read the wrong head.
    odd = (randn(2, 6, 6, 8), randn(2, 6, 3, 8), randn(2, 6, 3, 8))
    compare("attention, 3 key heads", attention, odd, [Shard(2)] * 3, R)
    # A generated mask numbers the rows of the whole batch.
    compare("attention, dropout", attention, (q, k, v), [Shard(0)] * 3, R, dropout_p=0.3, dropout_seed=5)
    with torch.no_grad():
        dq, dslopes = (distribute_tensor(t, mesh, [Shard(0)]) for t in (q, slopes))
        dk = distribute_tensor(k, mesh, [Shard(0)])
        out = cotangent.attention(dq, dk, dk, alibi_slopes=dslopes)
        torch.testing.assert_close(out.full_tensor(), cotangent.attention(q, k, k, alibi_slopes=slopes))
    ends = torch.tensor([0, 2, 6], dtype=torch.int32)
    packed = [t.flatten(0, 1)[:6].contiguous() for t in (q, k, v)]
    compare("attention, packed", lambda q, k, v, e: cotangent.attention_varlen(q, k, v, e, e, 4, 4), (*packed, ends),
            [Shard(1)] * 3 + [R], Shard(1))  # fmt: skip

    x, weight, bias, state = randn(4, 6, 9), randn(6, 4), randn(6), randn(4, 6, 3)

    def conv(x, weight, bias, state):
        return cotangent.causal_conv1d(x, weight, bias, "silu", initial_state=state, return_final_state=True)

    compare("conv, batch", conv, (x, weight, bias, state), [Shard(0), R, R, Shard(0)], Shard(0))
    compare("conv, channels", conv, (x, weight, bias, state), [Shard(1), Shard(0), Shard(0), Shard(1)], Shard(1))

    def dense(x, weight, bias):
        return cotangent.causal_conv1d_dense(x, weight, bias, "silu")

    weight, bias = randn(8, 6, 4), randn(8)
    compare("dense, batch", dense, (x, weight, bias), [Shard(0), R, R], Shard(0))
    compare("dense, channels", dense, (x, weight, bias), [R, Shard(0), Shard(0)], Shard(1))

    def dropout(x, residual, bias):
        return cotangent.dropout(x, 0.0, bias=bias, residual=residual, activation="gelu")

    x, residual, bias = randn(4, 6, 8), randn(4, 6, 8), randn(8)
    for axis, placement in ((0, R), (1, R), (2, Shard(0))):
        compare("dropout", dropout, (x, residual, bias), [Shard(axis), Shard(axis), placement], Shard(axis))
    compare("dropout, mask", lambda x: cotangent.dropout(x, 0.3, seed=3), (x,), [Shard(0)], R)

    streams, phi, alpha, bias, gamma = randn(4, 6, 2, 8), randn(8, 16), randn(3), randn(8), randn(2, 8)
    for axis in (0, 1):
        for sinkhorn in (True, False):
            compare("mhc_pre", cotangent.mhc_pre, (streams, phi, alpha, bias, gamma), [Shard(axis), R, R, R, R], Shard(axis),
                    sinkhorn=sinkhorn)  # fmt: skip
        compare("mhc_sinkhorn", cotangent.mhc_sinkhorn, (randn(4, 6, 2, 2),), [Shard(axis)], Shard(axis))
        post = (streams, randn(4, 6, 8), randn(4, 6, 2), randn(4, 6, 2, 2))
        compare("mhc_post", cotangent.mhc_post, post, [Shard(axis)] * 4, Shard(axis))
        for sinkhorn in (True, False):
            compare("mhc_post_pre", cotangent.mhc_post_pre, (*post, phi, alpha, bias, gamma), [Shard(axis)] * 4 + [R] * 4, Shard(axis),
                    sinkhorn=sinkhorn)  # fmt: skip
    print("sharded ops agree")


if __name__ == "__main__":
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    dtensor.enable()
    main()
    dist.destroy_process_group()
    # The mesh keeps threads of the group alive. With PyTorch 2.13 an interpreter that exits with such threads sometimes aborts
    # ("terminate called without an active exception"), also in a program without cotangent.
    sys.stdout.flush()
    os._exit(0)
