# SPDX-License-Identifier: Apache-2.0
"""Four functions of flash_attn_interface (FlashAttention 3), with its signatures and semantics. With
return_attn_probs=True the result is (out, softmax_lse). window_size is (left, right) as in cotangent.attention.

num_splits, pack_gqa, sm_margin and `deterministic` are accepted and have no effect: results are always deterministic.
Arguments that change results and that no kernel supports (qv, the descales, attention_chunk) raise
NotImplementedError. On Hopper, heads that are expanded (k or v with stride 0) run the portable GPU kernels, which are
slower: docs/guide/performance.md has all conditions of the fast kernels."""
from __future__ import annotations

from typing import Any, Optional, Tuple, Union

from torch import Tensor

from ..ops.attention import attention, attention_varlen
from ..ops._options import need_tensors
from ._arguments import refuse, unpack
from . import flash_attn as version_2
from .flash_attn import length, options, run

__all__ = ["flash_attn_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    qv: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    window_size: Tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q [B,Tq,H,d] to k [B,Tk,Hkv,d] and v [B,Tk,Hkv,d_v], as cotangent.attention.

    >>> from cotangent.compat.flash_attn_interface import flash_attn_func
    >>> q, k, v = torch.randn(3, 2, 100, 4, 64)
    >>> flash_attn_func(q, k, v, causal=True).shape
    torch.Size([2, 100, 4, 64])
    """
    refuse("flash_attn_func", qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
           attention_chunk=attention_chunk)  # fmt: skip
    return run(
        "flash_attn_func", attention, q, k, v, return_lse=return_attn_probs,
        **options(softmax_scale, causal, window_size, softcap),
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    qv: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    window_size: Tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Optional[bool] = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of packed sequences q [total_q,H,d], k [total_k,Hkv,d] and v [total_k,Hkv,d_v], as
    cotangent.attention_varlen.

    >>> from cotangent.compat.flash_attn_interface import flash_attn_varlen_func
    >>> q, k, v = torch.randn(3, 10, 4, 64)
    >>> cu_seqlens = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 7, 7, causal=True).shape
    torch.Size([10, 4, 64])
    """
    refuse("flash_attn_varlen_func", qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale,
           attention_chunk=attention_chunk)  # fmt: skip
    return run(
        "flash_attn_varlen_func", attention_varlen, q, k, v, cu_seqlens_q, cu_seqlens_k, length(max_seqlen_q),
        length(max_seqlen_k), seqused_q=seqused_q, seqused_k=seqused_k, return_lse=return_attn_probs,
        **options(softmax_scale, causal, window_size, softcap),
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    window_size: Tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: Optional[int] = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of a packed qkv [B,T,3,H,d], or of a packed qkv [B,T,H+2*Hkv,d] with num_heads_q, which is H.

    >>> from cotangent.compat.flash_attn_interface import flash_attn_qkvpacked_func
    >>> flash_attn_qkvpacked_func(torch.randn(2, 100, 3, 4, 64), causal=True).shape
    torch.Size([2, 100, 4, 64])
    """
    need_tensors("flash_attn_qkvpacked_func", qkv=qkv)
    if not qkv.is_floating_point():
        raise TypeError(f"flash_attn_qkvpacked_func: qkv has dtype {qkv.dtype}, expected a floating-point dtype")
    if qkv.dim() == 5:
        q, k, v = unpack("flash_attn_qkvpacked_func", "qkv", qkv, 2, 3)
    elif num_heads_q is None:
        raise ValueError(f"flash_attn_qkvpacked_func: num_heads_q is needed where qkv has {qkv.dim()} axes")
    else:
        rest = qkv.shape[2] - num_heads_q if qkv.dim() == 4 and isinstance(num_heads_q, int) else 0
        if rest < 1 or rest % 2 != 0 or num_heads_q < 1:
            raise ValueError(
                f"flash_attn_qkvpacked_func: qkv has shape {tuple(qkv.shape)}, num_heads_q is {num_heads_q!r}, expected "
                "[B,T,H+2*Hkv,d] and H"
            )
        heads_kv = rest // 2
        q, k, v = qkv.split([num_heads_q, heads_kv, heads_kv], 2)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size, attention_chunk, softcap,
        return_attn_probs=return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    qv: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    cache_seqlens: Optional[Union[int, Tensor]] = None,
    cache_batch_idx: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    page_table: Optional[Tensor] = None,
    cu_seqlens_q: Optional[Tensor] = None,
    cu_seqlens_k_new: Optional[Tensor] = None,
    max_seqlen_q: Optional[int] = None,
    rotary_seqlens: Optional[Tensor] = None,
    q_descale: Optional[Tensor] = None,
    k_descale: Optional[Tensor] = None,
    v_descale: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Optional[Tensor] = None,
    num_splits: int = 0,
    pack_gqa: Optional[bool] = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Decoding, as flash_attn_with_kvcache of version 2. scheduler_metadata has no effect. Paged caches, packed
    queries, left padding, batch indices and rotary embeddings raise NotImplementedError.

    >>> from cotangent.compat.flash_attn_interface import flash_attn_with_kvcache
    >>> q, k_cache, v_cache = torch.randn(2, 1, 4, 64), torch.zeros(2, 100, 4, 64), torch.zeros(2, 100, 4, 64)
    >>> k, v = torch.randn(2, 2, 1, 4, 64)                 # one new token
    >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=7, causal=True)
    >>> torch.equal(k_cache[:, 7:8], k)
    True
    """
    refuse("flash_attn_with_kvcache", qv=qv, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
           cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad, page_table=page_table,
           cu_seqlens_q=cu_seqlens_q, cu_seqlens_k_new=cu_seqlens_k_new, rotary_seqlens=rotary_seqlens,
           q_descale=q_descale, k_descale=k_descale, v_descale=v_descale, attention_chunk=attention_chunk)  # fmt: skip
    return version_2.flash_attn_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, return_softmax_lse=return_softmax_lse,
    )  # fmt: skip
