# SPDX-License-Identifier: Apache-2.0
"""The functions of flash_attn.cute (FlashAttention 4), with its signatures and semantics. They return (out, lse), where
lse is None unless return_lse is True. window_size is (left, right) as in cotangent.attention, and None is no limit.

num_splits, pack_gqa, `deterministic`, min_seqlen_k and the arguments that plan the work are accepted and have no
effect: results are always deterministic. Arguments that change results and that no kernel supports (qv, score_mod,
mask_mod, block sparsity, page_table) raise NotImplementedError.

On Hopper, heads that are expanded (k or v with stride 0) run the portable GPU kernels, which are slower:
docs/guide/performance.md has all conditions of the fast kernels.

PyTorch calls _flash_attn_fwd and _flash_attn_bwd of this module after
torch.nn.attention.activate_flash_attention_impl("FA4")."""
from __future__ import annotations

from typing import Any, Callable, Optional, Tuple

import torch
from torch import Tensor

from ..ops.attention import _run_backward, attention, attention_varlen
from ..ops._options import need_tensors, pair
from ._arguments import refuse
from .flash_attn import length, run

__all__ = ["_flash_attn_bwd", "_flash_attn_fwd", "flash_attn_func", "flash_attn_varlen_func"]

Side = Optional[int]  # of a window: None or a negative number is no limit


_NAMES = dict(sink="learnable_sink")


def _window(function: str, causal: bool, left: Side, right: Side) -> "Optional[Tuple[int, int]]":
    for side in (left, right):
        if side is not None and not hasattr(type(side), "__index__"):
            raise TypeError(f"{function}: window_size is {(left, right)!r}, expected integers or None")
    left, right = (-1 if side is None or side < 0 else side for side in (left, right))
    if causal and (left, right) != (-1, -1):
        return left, 0
    return None if (left, right) == (-1, -1) else (left, right)


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Optional[Tensor] = None,
    gather_kv_indices: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: "Tuple[Side, Side]" = (None, None),
    learnable_sink: Optional[Tensor] = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    score_mod: Optional[Callable[..., Any]] = None,
    score_mod_bwd: Optional[Callable[..., Any]] = None,
    mask_mod: Optional[Callable[..., Any]] = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    block_sparse_tensors: Any = None,
    block_sparse_tensors_bwd: Any = None,
    return_lse: bool = False,
) -> "Tuple[Tensor, Optional[Tensor]]":
    """Attention of q [B,Tq,H,d] to k [B,Tk,Hkv,d] and v [B,Tk,Hkv,d_v], as cotangent.attention. learnable_sink [H] is
    its sink.

    >>> from cotangent.compat.flash_attn_cute import flash_attn_func
    >>> q, k, v = torch.randn(3, 2, 100, 4, 64)
    >>> out, lse = flash_attn_func(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([2, 100, 4, 64]), torch.Size([2, 4, 100]))
    """
    refuse("flash_attn_func", qv=qv, gather_kv_indices=gather_kv_indices, score_mod=score_mod,
           score_mod_bwd=score_mod_bwd, mask_mod=mask_mod, aux_tensors=aux_tensors, aux_scalars=aux_scalars,
           block_sparse_tensors=block_sparse_tensors, block_sparse_tensors_bwd=block_sparse_tensors_bwd)  # fmt: skip
    out, lse = run(
        "flash_attn_func", attention, q, k, v, causal=causal, scale=softmax_scale, softcap=softcap,
        window=_window("flash_attn_func", causal, *pair("flash_attn_func", "window_size", window_size)),
        sink=learnable_sink, return_lse=True, renames=_NAMES,
    )  # fmt: skip
    return out, lse if return_lse else None


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    min_seqlen_k: Optional[int] = None,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    gather_kv_indices: Optional[Tensor] = None,
    page_table: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: "Tuple[Side, Side]" = (None, None),
    learnable_sink: Optional[Tensor] = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    score_mod: Optional[Callable[..., Any]] = None,
    score_mod_bwd: Optional[Callable[..., Any]] = None,
    mask_mod: Optional[Callable[..., Any]] = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_scalars: Any = None,
    return_lse: bool = False,
    scheduler_metadata: Any = None,
    seqlen_k_per_split: Optional[int] = None,
    disable_scheduler_metadata: bool = False,
) -> "Tuple[Tensor, Optional[Tensor]]":
    """Attention of packed sequences q [total_q,H,d], k [total_k,Hkv,d] and v [total_k,Hkv,d_v], as
    cotangent.attention_varlen. Without cu_seqlens_q and cu_seqlens_k, q, k and v have the shapes of flash_attn_func.
    seqused_q and seqused_k are int32 [B].

    >>> from cotangent.compat.flash_attn_cute import flash_attn_varlen_func
    >>> q, k, v = torch.randn(3, 10, 4, 64)
    >>> cu_seqlens = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> out, _ = flash_attn_varlen_func(q, k, v, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens, causal=True)
    >>> out.shape
    torch.Size([10, 4, 64])
    """
    refuse("flash_attn_varlen_func", qv=qv, gather_kv_indices=gather_kv_indices, page_table=page_table,
           score_mod=score_mod, score_mod_bwd=score_mod_bwd, mask_mod=mask_mod,
           block_sparse_tensors=block_sparse_tensors, aux_tensors=aux_tensors, aux_scalars=aux_scalars)  # fmt: skip
    out, lse = _forward(
        "flash_attn_varlen_func", q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal,
        scale=softmax_scale, softcap=softcap, sink=learnable_sink, seqused_q=seqused_q, seqused_k=seqused_k,
        window=_window("flash_attn_varlen_func", causal, *pair("flash_attn_varlen_func", "window_size", window_size)),
    )  # fmt: skip
    return out, lse if return_lse else None


def _longest(cu_seqlens: Tensor) -> int:
    return int(cu_seqlens.diff().max()) if cu_seqlens.numel() > 1 else 0


def _forward(function: str, q: Tensor, k: Tensor, v: Tensor, cu_q: Optional[Tensor], cu_k: Optional[Tensor],
             max_q: Optional[int], max_k: Optional[int], **options: Any) -> Any:  # fmt: skip
    """attention, or attention_varlen with cu_q and cu_k. A missing length of the longest sequence is computed, which
    waits for the device."""
    if (cu_q is None) != (cu_k is None):
        missing = "cu_seqlens_q" if cu_q is None else "cu_seqlens_k"
        raise NotImplementedError(f"{function}: {missing} is None, expected cu_seqlens_q and cu_seqlens_k or neither")
    if cu_q is None or cu_k is None:
        return run(function, attention, q, k, v, return_lse=True, renames=_NAMES, **options)
    need_tensors(function, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    max_q = _longest(cu_q) if max_q is None else max_q
    max_k = _longest(cu_k) if max_k is None else max_k
    return run(
        function, attention_varlen, q, k, v, cu_q, cu_k, length(max_q), length(max_k), return_lse=True, renames=_NAMES,
        **options,
    )  # fmt: skip


def _flash_attn_fwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qv: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    min_seqlen_k: Optional[int] = None,
    page_table: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    softcap: Optional[float] = None,
    window_size_left: Side = None,
    window_size_right: Side = None,
    learnable_sink: Optional[Tensor] = None,
    *,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    return_lse: bool = False,
    out: Optional[Tensor] = None,
    lse: Optional[Tensor] = None,
    **others: Any,
) -> "Tuple[Tensor, Optional[Tensor]]":
    """The forward without autograd: (out, lse). A given out or lse is overwritten."""
    refuse("_flash_attn_fwd", qv=qv, page_table=page_table, **others)
    with torch.no_grad():
        found, found_lse = _forward(
            "_flash_attn_fwd", q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal=causal,
            scale=softmax_scale, softcap=softcap or 0.0, sink=learnable_sink, seqused_q=seqused_q,
            seqused_k=seqused_k, window=_window("_flash_attn_fwd", causal, window_size_left, window_size_right),
        )  # fmt: skip
        found = found if out is None else out.copy_(found)
        found_lse = found_lse if lse is None else lse.copy_(found_lse)
    return found, found_lse if return_lse or lse is not None else None


def _flash_attn_bwd(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    dout: Tensor,
    lse: Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    softcap: float = 0.0,
    window_size_left: Side = None,
    window_size_right: Side = None,
    *,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k: Optional[Tensor] = None,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    max_seqlen_k: Optional[int] = None,
    deterministic: bool = False,
    pack_gqa: bool = False,
    dq: Optional[Tensor] = None,
    dk: Optional[Tensor] = None,
    dv: Optional[Tensor] = None,
    dlse: Optional[Tensor] = None,
    learnable_sink: Optional[Tensor] = None,
    **others: Any,
) -> "Tuple[Tensor, ...]":
    """The backward: (dq, dk, dv), with learnable_sink (dq, dk, dv, dsink). Given dq, dk and dv are overwritten."""
    refuse("_flash_attn_bwd", **others)
    if cu_seqlens_q is not None and cu_seqlens_k is not None:
        max_seqlen_q = _longest(cu_seqlens_q) if max_seqlen_q is None else max_seqlen_q
        max_seqlen_k = _longest(cu_seqlens_k) if max_seqlen_k is None else max_seqlen_k
    *found, dsink, _ = run(
        "_flash_attn_bwd", _run_backward, q, k, v, out, lse, dout, cu_seqlens=(cu_seqlens_q, cu_seqlens_k),
        max_seqlens=(length(max_seqlen_q), length(max_seqlen_k)), seqused=(seqused_q, seqused_k), causal=causal,
        window=_window("_flash_attn_bwd", causal, window_size_left, window_size_right), scale=softmax_scale,
        softcap=softcap, sink=learnable_sink, dlse=dlse, renames=_NAMES,
    )  # fmt: skip
    into = (dq, dk, dv)
    found = [x if given is None else given.copy_(x) for x, given in zip(found, into)]
    return (*found, dsink) if learnable_sink is not None else tuple(found)
