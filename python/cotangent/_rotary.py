# SPDX-License-Identifier: Apache-2.0
"""Rotary position embeddings (RoPE) in plain PyTorch."""
from __future__ import annotations

from typing import Optional, Tuple, Union

import torch
from torch import Tensor


def rotary_table(length: int, dim: int, base: float, device: torch.device) -> "Tuple[Tensor, Tensor]":
    """cos and sin [length, dim / 2] in float32: the angle of position t and pair i is t * base^(-2 i / dim)."""
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=device) / dim)
    angle = torch.outer(torch.arange(length, dtype=torch.float64, device=device), frequency)
    return angle.cos().float(), angle.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Rotates pairs of columns of x [...,H,d]. cos and sin [...,1,r/2] belong to the first r <= d columns. Pairs are
    columns (i, i + r/2), or with interleaved (2 i, 2 i + 1). The result has the dtype of x."""
    half = cos.shape[-1]
    part = x[..., : 2 * half]
    first, second = (part[..., 0::2], part[..., 1::2]) if interleaved else (part[..., :half], part[..., half:])
    cos, sin = cos.to(torch.promote_types(x.dtype, torch.float32)), sin.to(torch.promote_types(x.dtype, torch.float32))
    rotated = first * cos - second * sin, first * sin + second * cos
    joined = torch.stack(rotated, -1).flatten(-2) if interleaved else torch.cat(rotated, -1)
    return torch.cat([joined.to(x.dtype), x[..., 2 * half :]], -1)


def token_positions(cu_seqlens: Tensor, total: int) -> "Tuple[Tensor, Tensor]":
    """The sequence and the position of each of `total` packed tokens."""
    row = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens[1:].long(), row, right=True).clamp_max(max(cu_seqlens.shape[0] - 2, 0))
    return sequence, row - cu_seqlens.long()[sequence]


def positions_of(
    T: int, device: torch.device, offsets: "Union[int, Tensor]", cu_seqlens: Optional[Tensor]
) -> Tensor:
    """The positions of the tokens: [T], or [B,T] if offsets is a tensor [B]; with cu_seqlens [total], T = total."""
    if cu_seqlens is not None:
        sequence, position = token_positions(cu_seqlens, T)
        return position + (offsets if isinstance(offsets, int) else offsets.long()[sequence])
    position = torch.arange(T, device=device)
    return position + (offsets if isinstance(offsets, int) else offsets.long()[:, None])
