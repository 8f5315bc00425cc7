# SPDX-License-Identifier: Apache-2.0
"""PyTorch's scaled_dot_product_attention, computed by cotangent's attention.

On Hopper, calls in float32, and calls with attn_mask, dropout_p > 0 or heads that are expanded (key or value with
stride 0), run the portable GPU kernels, which are slower: docs/guide/performance.md has their times."""
from __future__ import annotations

import math
from typing import Any, ContextManager, Optional, Tuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..ops._options import flag, need_tensors
from ..ops.attention import attention
from ._arguments import renamed

__all__ = ["disable", "enable", "override", "scaled_dot_product_attention"]


def upper_left(queries: int, keys: int, is_causal: bool) -> "Tuple[int, bool, Optional[Tuple[int, int]]]":
    """Converts PyTorch's causal mask, which is aligned to the upper left corner, to the options of cotangent.attention,
    whose masks are aligned to the lower right corner. Returns the number of keys that some query attends to, causal and
    window."""
    if not is_causal:
        return keys, False, None
    if keys > queries:
        return queries, True, None
    return (keys, True, None) if keys == queries else (keys, False, (-1, queries - keys))


def as_bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask of PyTorch as a bias with 4 axes: -inf where a bool mask is False."""
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=dtype).masked_fill(mask.logical_not(), float("-inf"))
    return mask[(None,) * (4 - mask.dim())]


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
    """As torch.nn.functional.scaled_dot_product_attention: `query` is [...,H,L,E], `key` [...,Hkv,S,E] and `value`
    [...,Hkv,S,Ev]. With 3 axes, the first axis is the batch, and there are no heads. With 2 axes there is no batch
    either. The axes before L and S broadcast.

    attn_mask broadcasts to [...,H,L,S]. It is bool, True where a key is visible, or it is added to the scores. Numbers
    at or below -65504 mask the key, as False does. With is_causal, query i attends to the keys 0 to i (upper left
    corner). Returns [...,H,L,Ev]. A query that attends to no key gets 0.

    >>> from cotangent.compat.sdpa import scaled_dot_product_attention
    >>> query, key, value = torch.randn(3, 2, 4, 100, 64)
    >>> scaled_dot_product_attention(query, key, value, is_causal=True).shape
    torch.Size([2, 4, 100, 64])
    """
    name = "scaled_dot_product_attention"
    if flag(name, "is_causal", is_causal) and attn_mask is not None:
        raise ValueError(f"{name}: attn_mask and is_causal are both given, expected at most one")
    need_tensors(name, query=query, key=key, value=value)
    shapes = dict(query=query.shape, key=key.shape, value=value.shape)
    for argument, shape in shapes.items():
        if len(shape) < 2:
            raise ValueError(f"{name}: {argument} has {len(shape)} axes, expected 2 or more")
    axes = max(len(shape) for shape in shapes.values())
    if axes < 4:  # a batch without heads
        query, key, value = (x.unsqueeze(-3) for x in (query, key, value))
        shapes = dict(query=query.shape, key=key.shape, value=value.shape)
    heads_q, heads_k, heads_v = (shape[-3] if len(shape) > 2 else 1 for shape in shapes.values())
    heads = max(heads_q, heads_k, heads_v)
    if heads_k not in (heads, 1) and not flag(name, "enable_gqa", enable_gqa):
        raise ValueError(f"{name}: key has {heads_k} heads, expected {heads_q} as query, or enable_gqa=True")
    try:
        leading = torch.broadcast_shapes(*(shape[:-3] for shape in shapes.values()))
    except RuntimeError:
        found = ", ".join(f"{argument} has shape {tuple(shape)}" for argument, shape in shapes.items())
        raise ValueError(f"{name}: {found}, expected batch axes that broadcast") from None

    def by_heads(x: Tensor, count: int) -> Tensor:  # to [B,T,H,d], without a copy if the leading axes allow it
        x = x.expand(*leading, count, *x.shape[-2:])
        return x.reshape(math.prod(leading), *x.shape[-3:]).transpose(1, 2)

    heads_kv = max(heads_k, heads_v) if 1 in (heads_k, heads_v) else heads_k
    q, k, v = by_heads(query, heads), by_heads(key, heads_kv), by_heads(value, heads_kv if heads_v == 1 else heads_v)
    L, S = q.shape[1], k.shape[1]
    keys, causal, window = upper_left(L, S, is_causal)
    k, v = k[:, :keys], v[:, :keys]
    bias = None
    if attn_mask is not None:
        need_tensors(name, attn_mask=attn_mask)
        scores = (*leading, L, S) if axes < 4 else (*leading, heads, L, S)
        if attn_mask.dim() > axes or any(m not in (1, s) for m, s in zip(attn_mask.shape[::-1], scores[::-1])):
            raise ValueError(
                f"{name}: attn_mask has shape {tuple(attn_mask.shape)}, which does not broadcast to {tuple(scores)}"
            )
        bias = attn_mask.unsqueeze(-3) if axes < 4 and attn_mask.dim() == 3 else attn_mask
        if len(leading) > 1 and bias.dim() > 3:
            bias = bias.expand(*leading, *bias.shape[-3:]).reshape(math.prod(leading), *bias.shape[-3:])
        bias = as_bias(bias, q.dtype)
    try:
        out = attention(q, k, v, causal=causal, window=window, scale=scale, dropout_p=dropout_p, attn_bias=bias)
    except (NotImplementedError, TypeError, ValueError) as error:
        names = dict(q="query", k="key", v="value", attn_bias="attn_mask")
        raise renamed(name, error, **names) from None
    out = out.transpose(1, 2)
    out = out.reshape(*leading, *out.shape[1:])
    return out.squeeze(-3) if axes < 4 else out


_torch_sdpa = torch.nn.functional.scaled_dot_product_attention


_replaced_by: "list[Any]" = []  # enable(), and each block of override() that is open
_previous: Any = _torch_sdpa  # what torch.nn.functional had before


def _replace(user: Any) -> None:
    global _previous
    if not _replaced_by:
        _previous = torch.nn.functional.scaled_dot_product_attention
        torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
    _replaced_by.append(user)


def _restore(user: Any) -> None:
    _replaced_by.remove(user)
    if not _replaced_by:
        torch.nn.functional.scaled_dot_product_attention = _previous


def enable() -> None:
    """After this call every call of torch.nn.functional.scaled_dot_product_attention runs cotangent.attention, in all
    threads. Calls that cotangent does not support raise NotImplementedError. Call it before you import the model:
    modules that have imported the function by its name keep PyTorch's. override() replaces it in these too. A second
    call has no effect, and disable() reverts it.

    >>> cotangent.compat.sdpa.enable()
    >>> query, key, value = torch.randn(3, 2, 4, 100, 64)
    >>> out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    >>> cotangent.compat.sdpa.disable()
    """
    if enable not in _replaced_by:
        _replace(enable)


def disable() -> None:
    """Reverts enable(). Modules that have imported cotangent's function keep it. Without enable() it has no effect.

    >>> cotangent.compat.sdpa.enable()
    >>> cotangent.compat.sdpa.disable()
    """
    if enable in _replaced_by:
        _restore(enable)


class _Mode(TorchFunctionMode):
    def __enter__(self) -> Any:
        _replace(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> Any:
        _restore(self)
        return super().__exit__(*error)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (scaled_dot_product_attention if function is _torch_sdpa else function)(*args, **(kwargs or {}))


def override() -> "ContextManager[Any]":
    """Returns a TorchFunctionMode. Inside `with cotangent.compat.sdpa.override():` every call of PyTorch's
    scaled_dot_product_attention runs cotangent.attention, also in modules that have imported the function by its name.
    Calls that cotangent does not support raise NotImplementedError. In eager mode every function of torch goes through
    the mode, which costs time; enable() costs no time. Until the block ends, the function in torch.nn.functional is
    replaced for all threads.

    >>> query, key, value = torch.randn(3, 2, 4, 100, 64)
    >>> with cotangent.compat.sdpa.override():
    ...     out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    """
    return _Mode()
