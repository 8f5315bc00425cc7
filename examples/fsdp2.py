#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Trains a small GPT under FSDP2 (fully_shard): torchrun --nproc-per-node 2 examples/fsdp2.py

It needs torch 2.6 or later. Each rank has its own sequences, and a part of the parameters. With a GPU for each rank it
runs on GPUs, else on the CPU."""
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import cotangent

DIM, HEADS, LAYERS, LENGTH, BYTES = 64, 4, 2, 64, 256


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(2))
        self.attention = cotangent.Attention(DIM, HEADS, causal=True, rope_base=10000)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x):
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


def main():
    gpu = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if gpu else "gloo")
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    torch.manual_seed(0)  # the same parameters on every rank
    model = nn.Sequential(nn.Embedding(BYTES, DIM), *(Block() for _ in range(LAYERS)), nn.Linear(DIM, BYTES)).to(device)
    for block in model[1:-1]:  # first the blocks, then the whole model
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # after fully_shard: it replaces the parameters
    text = torch.tensor(list(b"The gradient flows backward through every kernel. " * 40), device=device)
    torch.manual_seed(1 + dist.get_rank())  # other sequences on each rank
    for step in range(31):
        tokens = text[torch.randint(len(text) - LENGTH, (8, 1)).to(device) + torch.arange(LENGTH + 1, device=device)]
        with torch.autocast(device.type, torch.bfloat16, enabled=gpu):
            loss = nn.functional.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # FSDP2 averages the gradients over the ranks
        optimizer.step()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
