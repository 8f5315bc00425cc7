#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""A model that imports flash_attn, here with cotangent's function of that name. The package flash_attn is not needed.

After install(), `import flash_attn` finds cotangent.compat.flash_attn. The result is compared with PyTorch's attention."""
import cotangent.compat

cotangent.compat.install("flash_attn")  # before the import of the model, here the next lines

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from flash_attn import flash_attn_func  # noqa: E402
from torch import nn  # noqa: E402


class SelfAttention(nn.Module):
    """Causal self-attention in a window, as models with flash_attn write it."""

    def __init__(self, dim, heads, window):
        super().__init__()
        self.heads, self.window = heads, window
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)

    def split(self, x):
        return self.qkv(x).unflatten(-1, (3, self.heads, -1)).unbind(2)  # q, k, v: [B,T,H,d]

    def forward(self, x):
        y = flash_attn_func(*self.split(x), causal=True, window_size=(self.window, 0))
        return self.out(y.flatten(2))

    def reference(self, x):
        """The same with PyTorch's attention, which needs [B,H,T,d] and a mask."""
        distance = torch.arange(x.shape[1], device=x.device)[:, None] - torch.arange(x.shape[1], device=x.device)
        mask = (distance >= 0) & (distance <= self.window)
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in self.split(x)), attn_mask=mask)
        return self.out(y.transpose(1, 2).flatten(2))


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = SelfAttention(dim=256, heads=4, window=31).to(device, torch.bfloat16)
    x = torch.randn(2, 128, 256, device=device, dtype=torch.bfloat16)
    y, expected = model(x), model.reference(x)
    y.float().square().mean().backward()
    difference = (y - expected).abs().max().item()
    print(f"flash_attn is {flash_attn_func.__module__}")
    print(f"largest difference from PyTorch: {difference:.1e}")
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)


if __name__ == "__main__":
    main()
