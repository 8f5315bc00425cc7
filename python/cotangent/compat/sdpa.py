# SPDX-License-Identifier: Apache-2.0
"""PyTorch's scaled_dot_product_attention, computed by cotangent's attention."""
from __future__ import annotations

from typing import Optional

import torch
from torch import Tensor

from ..ops._options import flag, need_tensors
from ..ops.attention import attention
from ._arguments import renamed

__all__ = ["scaled_dot_product_attention"]


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Optional[Tensor] = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: Optional[float] = None,
    enable_gqa: bool = False,
) -> Tensor:
    """As torch.nn.functional.scaled_dot_product_attention: query [...,H,L,E], key [...,Hkv,S,E], value [...,Hkv,S,Ev].

    With 3 axes, the first axis is a batch without heads. attn_mask broadcasts to [...,H,L,S]. It is bool, True where a
    key is visible, or it is added to the scores. Numbers at or below -65504 mask the key, as False does. With
    is_causal, query i sees the keys 0 to i (upper left corner). Returns [...,H,L,Ev]. A query that sees no key gets
    0."""
    if flag("scaled_dot_product_attention", "is_causal", is_causal) and attn_mask is not None:
        raise ValueError("scaled_dot_product_attention: attn_mask and is_causal are both given, expected at most one")
    need_tensors("scaled_dot_product_attention", query=query, key=key, value=value)
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 3 or tensor.dim() != query.dim():
            raise ValueError(
                f"scaled_dot_product_attention: {name} has {tensor.dim()} axes, expected 3 or more and as many as query"
            )
    leading = query.shape[:-3] if query.dim() > 3 else query.shape[:1]

    def by_heads(x: Tensor) -> Tensor:  # to [B,T,H,d], without a copy if the leading axes allow it
        x = x if query.dim() > 3 else x.unsqueeze(-3)
        return x.reshape(-1, *x.shape[-3:]).transpose(1, 2)

    q, k, v = by_heads(query), by_heads(key), by_heads(value)
    if q.shape[2] != k.shape[2] and not flag("scaled_dot_product_attention", "enable_gqa", enable_gqa):
        raise ValueError(f"scaled_dot_product_attention: key has {k.shape[2]} heads, query {q.shape[2]} (enable_gqa)")
    L, S = q.shape[1], key.shape[-2]
    causal, window = False, None
    if is_causal and S > L:  # no query sees the keys from L on
        k, v, causal = k[:, :L], v[:, :L], True
    elif is_causal:  # the library's diagonal ends in the lower right corner
        causal, window = L == S, (-1, L - S) if L > S else None
    bias = None
    if attn_mask is not None:
        need_tensors("scaled_dot_product_attention", attn_mask=attn_mask)
        scores = (*query.shape[:-1], S)
        if attn_mask.dim() > query.dim() or any(m not in (1, s) for m, s in zip(attn_mask.shape[::-1], scores[::-1])):
            raise ValueError(
                f"scaled_dot_product_attention: attn_mask has shape {tuple(attn_mask.shape)}, which does not broadcast to "
                f"{tuple(scores)}"
            )
        bias = attn_mask
        if attn_mask.dtype == torch.bool:
            bias = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill(attn_mask.logical_not(), float("-inf"))
        if query.dim() == 3 and bias.dim() == 3:
            bias = bias.unsqueeze(1)
        elif query.dim() > 4:
            bias = bias.expand(*leading, *([-1] * 3)) if bias.dim() >= query.dim() else bias
            bias = bias.reshape(-1, *bias.shape[-3:]) if bias.dim() >= 3 else bias
        bias = bias[(None,) * (4 - bias.dim())]
    try:
        out = attention(q, k, v, causal=causal, window=window, scale=scale, dropout_p=dropout_p, bias=bias)
    except (NotImplementedError, TypeError, ValueError) as error:
        names = dict(q="query", k="key", v="value", bias="attn_mask")
        raise renamed("scaled_dot_product_attention", error, **names) from None
    out = out.transpose(1, 2)
    return out.squeeze(1) if query.dim() == 3 else out.reshape(*leading, *out.shape[1:])
