#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A small GPT of the package's layers: pre-norm decoder blocks, in training and in decoding."""
import torch
import torch.nn.functional as F
from torch import nn

import cotangent


class Block(nn.Module):
    def __init__(self, dim, num_heads, p):
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.attn = cotangent.Attention(dim, num_heads, causal=True, num_kv_heads=num_heads // 2, rope_base=10000)
        self.attn_out = cotangent.BiasDropoutResidual(dim, p, bias=False)  # the projection is inside Attention, without a bias
        self.mlp_in = nn.Linear(dim, 4 * dim)
        self.mlp_out = cotangent.LinearDropoutResidual(4 * dim, dim, p)

    def mlp(self, x):
        return self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))), residual=x)

    def forward(self, x):
        """x [B,T,dim] -> [B,T,dim]"""
        return self.mlp(self.attn_out(self.attn(self.attn_norm(x)), residual=x))

    def step(self, x, k_cache, v_cache, cache_seqlens):
        """New tokens: x [B,Tn,dim] -> [B,Tn,dim]. Updates the caches."""
        return self.mlp(self.attn_out(self.attn.step(self.attn_norm(x), k_cache, v_cache, cache_seqlens), residual=x))


class GPT(nn.Module):
    def __init__(self, dim=64, num_heads=4, num_layers=2, p=0.1, vocabulary=256):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocabulary, dim), nn.RMSNorm(dim)
        self.blocks = nn.ModuleList(Block(dim, num_heads, p) for _ in range(num_layers))
        self.head = nn.Linear(dim, vocabulary, bias=False)

    def forward(self, tokens):
        """tokens [B,T] -> logits [B,T,vocabulary]"""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def new_caches(self, batch, max_length):
        """The keys and values of each block, and the number of tokens in them."""
        attn, weight = self.blocks[0].attn, self.head.weight
        shape = (2, batch, max_length, attn.num_kv_heads, attn.head_dim)
        return [weight.new_zeros(shape) for _ in self.blocks], torch.zeros(batch, dtype=torch.int32, device=weight.device)

    def step(self, tokens, caches, cache_seqlens):
        """New tokens [B,Tn] -> logits [B,Tn,vocabulary]. Updates the caches and cache_seqlens."""
        x = self.embedding(tokens)
        for block, (k_cache, v_cache) in zip(self.blocks, caches):
            x = block.step(x, k_cache, v_cache, cache_seqlens)
        cache_seqlens += tokens.shape[1]
        return self.head(self.norm(x))


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = b"The gradient flows backward through every kernel. " * 40
    data = torch.tensor(list(text), device=device)
    model = GPT().to(device)
    compiled = torch.compile(model) if device == "cuda" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(41):
        starts = torch.randint(len(data) - 65, (8, 1), device=device)
        tokens = data[starts + torch.arange(65, device=device)]
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):  # on a CPU float32 is fast too
            logits = compiled(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.2f}")

    model.eval()
    with torch.no_grad():
        prompt = data[None, :20]
        caches, cache_seqlens = model.new_caches(1, max_length=64)
        logits = [model.step(prompt, caches, cache_seqlens)]
        written = [prompt]
        while cache_seqlens < 64:
            written.append(logits[-1][:, -1:].argmax(-1))
            logits.append(model.step(written[-1], caches, cache_seqlens))
        written, logits = torch.cat(written, 1), torch.cat(logits, 1)
        whole = model(written)
    print(bytes(written[0].tolist()).decode(errors="replace"))
    print(f"decoding differs from the forward by at most {(logits - whole).abs().max():.1e}")
    torch.testing.assert_close(logits, whole, rtol=1e-3, atol=1e-3)


if __name__ == "__main__":
    main()
