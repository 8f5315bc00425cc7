#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times training steps of the hybrid presets of train_lm, written in PyTorch: convolutions, attention and SwiGLU, and mHC.

    tools/peers/train_hybrid.py [--model hybrid-mhc-130m|hybrid-130m|tiny] [--whole] [options of train_gpt2.py]

The model has the formulas and sizes of `train_lm --preset hybrid-mhc-130m`. The streams are bf16. Each connected block
(post of the block before, pre, the block) goes through torch.compile, once for each kind of block. --whole compiles the
whole model instead; its Sinkhorn iterations are 960 steps of one graph. Timed as in train_gpt2.py. Prints one JSON row.
"""
import argparse

import torch
import torch.nn.functional as functional
import train_gpt2

# layers, heads, width, MLP, vocabulary, one block of attention in so many, streams
MODELS = {"hybrid-mhc-130m": (12, 12, 768, 2048, 50304, 4, 4), "hybrid-130m": (12, 12, 768, 2048, 50304, 4, 0),
          "tiny": (4, 4, 32, 48, 256, 2, 4)}
KERNEL, NORM_EPS, HC_EPS, POST_SCALE, ITERATIONS = 4, 1e-6, 1e-6, 2.0, 20


class RMSNorm(torch.nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(width))

    def forward(self, x):
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + NORM_EPS) * self.gain).to(x.dtype)


class Convolution(torch.nn.Module):
    def __init__(self, width, rotations):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(width, 2 * width, bias=False), torch.nn.Linear(width, width, bias=False)
        self.weight, self.bias = torch.nn.Parameter(torch.randn(width, KERNEL) / 2), torch.nn.Parameter(torch.zeros(width))

    def forward(self, x):
        u, gate = self.inner(x).chunk(2, dim=-1)
        padded = functional.pad(u.float(), (0, 0, KERNEL - 1, 0))  # compiled: one kernel with the gate
        c = self.bias + sum(padded[:, k:k + u.shape[1]] * self.weight[:, k] for k in range(KERNEL))
        return self.outer((functional.silu(c) * gate).to(x.dtype))


class Attention(torch.nn.Module):
    def __init__(self, width, rotations):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(width, 3 * width, bias=False), torch.nn.Linear(width, width, bias=False)
        self.rotations = rotations  # cosines and sines [time,size/2]

    def rotate(self, x):
        a, b = x.float().chunk(2, dim=-1)
        cosine, sine = self.rotations[0], self.rotations[1]
        return torch.cat([a * cosine - b * sine, a * sine + b * cosine], dim=-1).to(x.dtype)

    def forward(self, x):
        B, T, C = x.shape
        size = 2 * self.rotations[0].shape[1]
        q, k, v = (part.view(B, T, C // size, size).transpose(1, 2) for part in self.inner(x).split(C, dim=2))
        return self.outer(train_gpt2.attention(self.rotate(q), self.rotate(k), v).transpose(1, 2).reshape(B, T, C))


class MLP(torch.nn.Module):
    def __init__(self, width, mlp):
        super().__init__()
        self.inner, self.outer = torch.nn.Linear(width, 2 * mlp, bias=False), torch.nn.Linear(mlp, width, bias=False)

    def forward(self, x):
        a, gate = self.inner(x).chunk(2, dim=-1)
        return self.outer(functional.silu(a) * gate)


class Block(torch.nn.Module):
    """x + branch(norm(x)) without streams."""

    def __init__(self, width, branch):
        super().__init__()
        self.norm, self.branch = RMSNorm(width), branch

    def forward(self, x):
        return x + self.branch(self.norm(x))


def post(x, f, h_post, h_res):
    mixed = (h_res.unsqueeze(-1) * x.float().unsqueeze(-2)).sum(-3)  # sum over i of h_res[i,o] x[i]
    return (mixed + h_post.unsqueeze(-1) * f.float().unsqueeze(-2)).to(x.dtype)


def sinkhorn(logits):
    h_res = torch.softmax(logits, -1) + HC_EPS
    h_res = h_res / (h_res.sum(-2, keepdim=True) + HC_EPS)
    for _ in range(ITERATIONS - 1):
        h_res = h_res / (h_res.sum(-1, keepdim=True) + HC_EPS)
        h_res = h_res / (h_res.sum(-2, keepdim=True) + HC_EPS)
    return h_res


class ConnectedBlock(torch.nn.Module):
    """post of the block before, then pre and the branch of this block."""

    def __init__(self, width, branch, streams):
        super().__init__()
        n = streams
        self.norm, self.branch = RMSNorm(width), branch
        self.phi = torch.nn.Parameter(torch.randn(n * (n + 2), n * width) / (n * width)**0.5)
        self.alpha, self.gamma = torch.nn.Parameter(torch.full((3,), 0.01)), torch.nn.Parameter(torch.ones(n, width))
        self.bias = torch.nn.Parameter(torch.cat([torch.full((n,), -1.0986), torch.zeros(n), (8 * torch.eye(n) - 8).flatten()]))

    def forward(self, x, f, h_post, h_res):
        x = x if f is None else post(x, f, h_post, h_res)
        n, wide = x.shape[-2], x.float()
        inv_rms = torch.rsqrt(wide.square().mean((-2, -1)) + NORM_EPS).unsqueeze(-1)
        scale = torch.cat([self.alpha[0:1].expand(n), self.alpha[1:2].expand(n), self.alpha[2:3].expand(n * n)])
        z = functional.linear(x.flatten(-2), self.phi * self.gamma.flatten()).float() * inv_rms * scale + self.bias
        h_pre = torch.sigmoid(z[..., :n]) + HC_EPS
        h_in = (h_pre.unsqueeze(-1) * wide).sum(-2).to(x.dtype)
        h_res = sinkhorn(z[..., 2 * n:].unflatten(-1, (n, n)))
        return x, self.branch(self.norm(h_in)), POST_SCALE * torch.sigmoid(z[..., n:2 * n]), h_res


class Hybrid(torch.nn.Module):
    def __init__(self, layers, heads, width, mlp, vocabulary, attention, streams, context, device):
        super().__init__()
        half, self.streams = width // heads // 2, streams
        angles = torch.arange(context)[:, None] * 10000.0**(-torch.arange(half) / half)
        rotations = torch.stack([angles.cos(), angles.sin()]).to(device)
        self.tokens, self.head = torch.nn.Embedding(vocabulary, width), torch.nn.Linear(width, vocabulary, bias=False)
        branches = []
        for layer in range(layers):
            branches += [(Attention if (layer + 1) % attention == 0 else Convolution)(width, rotations), MLP(width, mlp)]
        self.blocks = torch.nn.ModuleList(ConnectedBlock(width, branch, streams) if streams else Block(width, branch)
                                          for branch in branches)
        self.norm = RMSNorm(width)

    def forward(self, inputs, targets):
        x = self.tokens(inputs)
        if torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.bfloat16)
        if self.streams:
            x, f, h_post, h_res = x.unsqueeze(-2).expand(-1, -1, self.streams, -1).contiguous(), None, None, None
            for block in self.blocks:
                x, f, h_post, h_res = block(x, f, h_post, h_res)
            x = post(x, f, h_post, h_res).float().sum(-2).to(x.dtype)
        else:
            for block in self.blocks:
                x = block(x)
        logits = self.head(self.norm(x))
        return functional.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def optimizer_of(model, device):
    decays = [p for name, p in model.named_parameters() if name.split(".")[-2] in ("inner", "outer", "head")]
    others = [p for name, p in model.named_parameters() if name.split(".")[-2] not in ("inner", "outer", "head")]
    return torch.optim.AdamW([{"params": decays, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
                             lr=6e-4, betas=(0.9, 0.98), eps=1e-8, fused=device == "cuda")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    train_gpt2.add_options(parser, MODELS)
    parser.add_argument("--whole", action="store_true")
    options = parser.parse_args()
    layers, heads, width, mlp, vocabulary, attention, streams = MODELS[options.model]
    torch.manual_seed(1)
    torch.set_float32_matmul_precision("high")
    backend = train_gpt2.choose_attention(options, heads, width // heads)
    model = Hybrid(*MODELS[options.model], options.context, options.device).to(options.device)
    compiled = model
    if not options.eager and (options.whole or not streams):
        compiled = torch.compile(model, mode=options.mode)
    elif not options.eager:
        for block in model.blocks:
            block.compile(mode=options.mode)
    optimizer = optimizer_of(model, options.device)
    products = sum(p.numel() for p in optimizer.param_groups[0]["params"])
    flops = 6 * products + 6 * (layers // attention) * width * options.context  # of a token: as train_lm counts them
    measured = {"trained": options.model, "attention": backend, "compiled": "whole" if compiled is not model else "blocks"}
    train_gpt2.measure(model, compiled, optimizer, options, measured, flops)


if __name__ == "__main__":
    main()
