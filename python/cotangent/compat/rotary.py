# SPDX-License-Identifier: Apache-2.0
"""apply_rotary_emb of flash_attn.layers.rotary, in plain PyTorch."""
from __future__ import annotations

from typing import Optional, Union

from torch import Tensor

from .._rotary import positions_of, rotate
from ..ops._options import need_tensors

__all__ = ["apply_rotary_emb"]


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: "Union[int, Tensor]" = 0,
    cu_seqlens: Optional[Tensor] = None,
    max_seqlen: Optional[int] = None,
) -> Tensor:
    """Rotates the first r columns of x [B,T,H,d], or of packed x [total,H,d] with cu_seqlens. cos and sin are
    [max_length,r/2]. Token t of a sequence has position t + seqlen_offsets (a number, or a tensor [B]). With inplace=True,
    x is overwritten and returned. max_seqlen is not needed.

    >>> from cotangent.compat.rotary import apply_rotary_emb
    >>> angles = torch.arange(100)[:, None] * 10000 ** (-torch.arange(32) / 32)
    >>> apply_rotary_emb(torch.randn(2, 100, 4, 64), angles.cos(), angles.sin()).shape
    torch.Size([2, 100, 4, 64])
    """
    need_tensors("apply_rotary_emb", x=x, cos=cos, sin=sin)
    axes = 3 if cu_seqlens is not None else 4
    if x.dim() != axes or cos.dim() != 2 or cos.shape != sin.shape or 2 * cos.shape[1] > x.shape[-1]:
        raise ValueError(
            f"apply_rotary_emb: x has shape {tuple(x.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}, expected "
            f"{'[total,H,d]' if axes == 3 else '[B,T,H,d]'} and [max_length,r/2] with r <= d"
        )
    position = positions_of(x.shape[0 if axes == 3 else 1], x.device, seqlen_offsets, cu_seqlens)
    y = rotate(x, cos[position].unsqueeze(-2), sin[position].unsqueeze(-2), interleaved)
    return x.copy_(y) if inplace else y
