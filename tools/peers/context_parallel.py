#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times cotangent.distributed beside the context_parallel of PyTorch and an all-gather of K and V by hand, on the GPUs of one host.

    torchrun --nproc-per-node N tools/peers/context_parallel.py [--lengths T,T] [--heads H] [--repeats N] [--json FILE]

Causal attention in bf16, heads of 128, batch 1. The single call runs on one GPU, and the others on all. Each repeat times
every one of them once: forward, then forward and backward, between two barriers. The figures are medians of the wall time
of the slowest rank. share = single / (ranks * time). A peer that raises an exception has no figures, and the exception is
printed. `largest` is the largest difference of the output from that of the single call."""
import argparse
import contextlib
import json
import os
import statistics
import time

import torch
import torch.distributed as dist

import cotangent
import cotangent.distributed as cp

parser = argparse.ArgumentParser()
parser.add_argument("--lengths", default="32768,131072")
parser.add_argument("--heads", type=int, default=16)
parser.add_argument("--repeats", type=int, default=5)
parser.add_argument("--json")
options = parser.parse_args()

rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("cpu:gloo,cuda:nccl")
D = 128


def inputs(T):
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(1, T, options.heads, D, device=device, dtype=torch.bfloat16, generator=generator) for _ in range(4)]


def single(T, whole):
    """On rank 0 alone."""
    q, k, v, dout = whole
    return (q, k, v), dout, lambda q, k, v: cotangent.attention(q, k, v, causal=True), lambda out: out, ()


def ours(cut, head_ranks):
    def make(T, whole):
        place = dict(cut=cut)
        *x, dout = (cp.shard(t, dim=1, **place) for t in whole)
        run = lambda q, k, v: cp.attention(q, k, v, causal=True, head_ranks=head_ranks, q_length=T, k_length=T, **place)  # noqa: E731
        return x, dout, run, lambda out: cp.unshard(out, dim=1, length=T, **place), ()

    return make


class Gather(torch.autograd.Function):
    """The tensors of all ranks, concatenated along axis 0. Its gradient is the sum over the ranks, scattered."""

    @staticmethod
    def forward(ctx, x):
        out = x.new_empty(ranks * x.shape[0], *x.shape[1:])
        dist.all_gather_into_tensor(out, x.contiguous())
        return out

    @staticmethod
    def backward(ctx, gradient):
        out = gradient.new_empty(gradient.shape[0] // ranks, *gradient.shape[1:])
        dist.reduce_scatter_tensor(out, gradient.contiguous())
        return out


def all_gather(T, whole):
    """Every rank gathers all keys and values, and calls cotangent.attention for each of its two segments (zigzag)."""
    chunk = T // (2 * ranks)
    place = [2 * c if c < ranks else 2 * (2 * ranks - 1 - c) + 1 for c in range(2 * ranks)]  # of chunk c among the gathered
    *x, dout = (cp.shard(t, dim=1, cut="zigzag") for t in whole)

    def gathered(x):
        chunks = Gather.apply(x).view(2 * ranks, chunk, options.heads, D)
        return chunks[torch.tensor(place, device=device)].view(1, T, options.heads, D)

    def run(q, k, v):
        keys, values = gathered(k), gathered(v)
        parts = []
        for segment, q_part in zip((rank, 2 * ranks - 1 - rank), q.split(chunk, dim=1)):
            end = (segment + 1) * chunk
            parts.append(cotangent.attention(q_part, keys[:, :end], values[:, :end], causal=True))
        return torch.cat(parts, dim=1)

    return x, dout, run, lambda out: cp.unshard(out, dim=1, length=T, cut="zigzag"), ()


def torch_context_parallel(T, whole):
    """[B,H,T,d], cut in place."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel
    from torch.distributed.tensor.experimental._attention import context_parallel_unshard
    from torch.nn.attention import SDPBackend, sdpa_kernel

    mesh = init_device_mesh("cuda", (ranks,))
    q, k, v, dout = (t.transpose(1, 2).contiguous() for t in whole)
    with context_parallel(mesh, buffers=[q, k, v, dout], buffer_seq_dims=[2] * 4):
        *x, dout = (t.clone() for t in (q, k, v, dout))

    def run(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

    def collect(out):
        return context_parallel_unshard(mesh, [out], [2])[0].transpose(1, 2)

    contexts = (lambda: sdpa_kernel([SDPBackend.FLASH_ATTENTION]),
                lambda: context_parallel(mesh, buffers=[torch.zeros(2 * ranks, device=device)], buffer_seq_dims=[0]))  # fmt: skip
    return x, dout, run, collect, contexts


def timed(work):
    torch.cuda.synchronize()
    dist.barrier()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    seconds = torch.tensor([time.perf_counter() - begin], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return seconds.item()


class Candidate:
    def __init__(self, name, make, T, whole):
        self.name, self.alone = name, name == "single"
        self.forward, self.both = [], []
        x, self.dout, self.run, self.collect, self.contexts = make(T, whole)
        self.x = [t.detach().requires_grad_() for t in x]

    def call(self, backward):
        with contextlib.ExitStack() as stack:
            for context in self.contexts:  # the backward is inside too
                stack.enter_context(context())
            with torch.set_grad_enabled(backward):
                out = self.run(*self.x)
            if backward:
                torch.autograd.grad(out, self.x, self.dout)
        return out.detach()

    def repeat(self):
        for times, backward in ((self.forward, False), (self.both, True)):
            times.append(timed(lambda: None if self.alone and rank > 0 else self.call(backward)))  # noqa: B023


rows = []
for T in map(int, options.lengths.split(",")):
    whole = inputs(T)
    expected = None
    candidates = []
    makers = [("single", single), ("zigzag ring", ours("zigzag", 1)), ("heads", ours("contiguous", ranks)),
              ("all-gather by hand", all_gather), ("torch context_parallel", torch_context_parallel)]  # fmt: skip
    if ranks > 2 and ranks % 2 == 0:
        makers.insert(3, ("ring of 2 heads", ours("zigzag", 2)))
    for name, make in makers:
        try:
            candidate = Candidate(name, make, T, whole)
            out = candidate.collect(candidate.call(False))
            candidate.repeat()
        except Exception as error:
            if rank == 0:
                print(f"{name} at T = {T}: {type(error).__name__}: {str(error)[:300]}", flush=True)
            continue
        expected = out if name == "single" else expected
        candidate.largest = (out.float() - expected.float()).abs().max().item()
        candidate.forward, candidate.both = [], []
        candidates.append(candidate)
        del out
    for _ in range(options.repeats):
        for candidate in candidates:
            candidate.repeat()
    base = candidates[0]
    for candidate in candidates:
        row = dict(op="context_parallel", device=torch.cuda.get_device_name(device), torch=torch.__version__,
                   kernel=candidate.name, ranks=1 if candidate.alone else ranks, T=T, H=options.heads, d=D, dtype="bf16",
                   causal=True, largest=candidate.largest)  # fmt: skip
        for part in ("forward", "both"):
            seconds, alone = (statistics.median(getattr(c, part)) for c in (candidate, base))
            row[part] = dict(s=seconds, share=alone / (row["ranks"] * seconds))
        rows.append(row)
        if rank == 0:
            figures = "  ".join(f"{part} {1e3 * row[part]['s']:8.2f} ms {row[part]['share']:5.2f}" for part in ("forward", "both"))
            print(f"T {T:7d}  {candidate.name:24s} {figures}  largest {candidate.largest:.1e}", flush=True)
    cp.check_group()
    del candidates, whole, expected, base, candidate
    torch.cuda.empty_cache()
if rank == 0 and options.json:
    with open(options.json, "w") as file:
        file.write("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
dist.destroy_process_group()
