#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""The convolution branch of a Mamba block: training on whole sequences, and decoding token by token.

The scan is left out: a gated projection stands in its place."""
import torch
import torch.nn.functional as F
from torch import nn

import cotangent


class MambaBlock(nn.Module):
    def __init__(self, dim, inner, width=4):
        super().__init__()
        self.in_conv = cotangent.MambaInProjConv1d(dim, inner, sizes_after=[inner], width=width)
        self.out_proj = nn.Linear(inner, dim, bias=False)

    def forward(self, x):
        """x [B,T,dim] -> [B,T,dim]"""
        u, gate = self.in_conv(x)  # u is convolved
        return self.out_proj(u * F.silu(gate))

    def new_state(self, batch):
        """The last width-1 inputs of the convolution, here zeros."""
        conv = self.in_conv.conv1d
        return conv.weight.new_zeros(batch, conv.channels, conv.width - 1)

    def step(self, x, conv_state):
        """One token: x [B,dim] -> [B,dim]. Updates conv_state."""
        u, gate = self.in_conv.step(x, conv_state)
        return self.out_proj(u * F.silu(gate))


def main():
    torch.manual_seed(0)
    block = MambaBlock(64, 128)
    x = torch.randn(2, 16, 64)
    y = block(x)
    y.square().mean().backward()
    with torch.no_grad():
        state = block.new_state(2)
        decoded = torch.stack([block.step(x[:, t], state) for t in range(x.shape[1])], 1)
    print(f"decoding differs from the forward by at most {(decoded - y).abs().max():.1e}")
    torch.testing.assert_close(decoded, y)


if __name__ == "__main__":
    main()
