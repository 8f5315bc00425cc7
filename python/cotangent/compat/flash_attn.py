# SPDX-License-Identifier: Apache-2.0
"""The functions of the package flash_attn, version 2, with its signatures and semantics, for any head size (on a GPU up
to 256).

q               [B,Tq,H,d]; k and v are [B,Tk,Hkv,d]. A packed qkv is [B,T,3,H,d], and a packed kv is [B,Tk,2,Hkv,d]. In
                the varlen functions one axis of all tokens replaces B and T, for example in q [total_q,H,d]
softmax_scale   None: 1/sqrt(d)
window_size     (left, right), as `window` of cotangent.attention
deterministic   has no effect: results are always deterministic
return_attn_probs
                True: the result is (out, softmax_lse, S_dmask). Without dropout S_dmask is None. With dropout it has
                the probabilities [B,H,Tq,Tk], negative where they were dropped. Use it only in tests, because it needs
                memory for every query-key pair

On Hopper, calls with dropout_p > 0, alibi_slopes or heads that are expanded (k or v with stride 0) run the portable GPU
kernels, which are slower: docs/guide/performance.md has their times.

Two results differ from those of flash_attn. Dropout masks follow cotangent's rule. A query that attends to no key has
softmax_lse = -inf, where flash_attn returns +inf."""
from __future__ import annotations

from typing import Any, Optional, Tuple, Union

import torch
from torch import Tensor

from .._rotary import token_positions
from ..ops.attention import _run_backward, attention, attention_varlen
from ..ops._options import flag, need_tensors, number, pair, random_seed
from ._arguments import refuse, renamed, same_device, unpack

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "_flash_attn_backward",
    "_flash_attn_forward",
    "_flash_attn_varlen_backward",
    "_flash_attn_varlen_forward",
]

Window = Tuple[int, int]


def options(softmax_scale: Optional[float], causal: bool, window_size: Window, softcap: float) -> "dict[str, Any]":
    """The options of cotangent.attention for these options of flash_attn."""
    sides = pair("flash_attn", "window_size", window_size)
    left, right = (-1 if isinstance(side, int) and side < 0 else side for side in sides)
    window = None if (left, right) == (-1, -1) else (left, 0 if causal else right)
    return dict(causal=causal, window=window, scale=softmax_scale, softcap=softcap)


def length(value: Any) -> Any:
    """Converts a length that may be a tensor of one element. Other values are returned unchanged, and the op refuses
    them."""
    return int(value) if isinstance(value, Tensor) and value.numel() == 1 else value


def run(function: str, attend: Any, *tensors: Any, renames: "Optional[dict[str, str]]" = None, **arguments: Any) -> Any:
    """Calls attend(*tensors, **arguments). Errors have flash_attn's names of the arguments. renames: {cotangent's name:
    flash_attn's}, besides those of all functions."""
    try:
        return attend(*tensors, **arguments)
    except (NotImplementedError, TypeError, ValueError) as error:
        names = dict(scale="softmax_scale", window="window_size", window_left="window_size[0]",
                     window_right="window_size[1]", return_lse="return_attn_probs")  # fmt: skip
        raise renamed(function, error, **{**names, **(renames or {})}) from None


def _signed_probabilities(q: Tensor, k: Tensor, seed: Tensor, dropout_p: float, lengths: "Tuple[Any, ...]",
                          options: "dict[str, Any]") -> Tensor:  # fmt: skip
    """S_dmask: the probabilities [B,H,Tq,Tk], negative where the dropout mask of this seed drops them. lengths:
    (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k) of packed sequences, or ().

    Attention with the columns of the identity as values returns the probabilities. With q = k = 0 they cannot
    underflow, so that their zeros are the mask."""
    if lengths:
        position, attend = token_positions(lengths[1], k.shape[0])[1], attention_varlen
        columns = lengths[3]
    else:
        columns, attend = k.shape[1], attention  # type: ignore[assignment]
        position = torch.arange(columns, device=k.device)
    shape = (*k.shape[:-1], columns)
    identity = torch.nn.functional.one_hot(position.clamp_max(columns - 1), columns).to(k.dtype)
    values = identity[:, None, :].expand(shape)
    plain = {name: value for name, value in options.items() if name in ("causal", "window")}
    parts = []
    with torch.no_grad():
        for v in values.split(256, -1):  # the largest head size on a GPU
            found = attend(q, k, v, *lengths, **options)
            kept = attend(torch.zeros_like(q), torch.zeros_like(k), v, *lengths, dropout_p=dropout_p, dropout_seed_tensor=seed,
                          **plain)  # fmt: skip
            parts.append(torch.where(kept > 0, found, -found))
        S = torch.cat(parts, -1)
        if lengths:
            sequence, row = token_positions(lengths[0], q.shape[0])
            padded = S.new_zeros((lengths[0].shape[0] - 1, lengths[2], *S.shape[1:]))
            padded[sequence, row] = S
            S = padded
    return S.transpose(1, 2)


def _attend(
    function: str, q: Tensor, k: Tensor, v: Tensor, lengths: "Tuple[Any, ...]", dropout_p: float,
    with_probabilities: bool, **options: Any,
) -> "Tuple[Tensor, Tensor, Optional[Tensor], Optional[Tensor]]":  # fmt: skip
    """(out, lse, S_dmask, seed). S_dmask and seed are None without dropout."""
    seed = None
    if number(function, "dropout_p", dropout_p) > 0:
        need_tensors(function, q=q)
        seed = random_seed(q.device)
    attend = attention_varlen if lengths else attention
    out, lse = run(function, attend, q, k, v, *lengths, dropout_p=dropout_p, dropout_seed_tensor=seed, return_lse=True, **options)
    S_dmask = None
    if seed is not None and flag("flash_attn", "return_attn_probs", with_probabilities):
        S_dmask = _signed_probabilities(q, k, seed, dropout_p, lengths, options)
    return out, lse, S_dmask, seed


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q [B,Tq,H,d] to k and v [B,Tk,Hkv,d], as flash_attn.flash_attn_func.

    >>> from cotangent.compat.flash_attn import flash_attn_func
    >>> q, k, v = torch.randn(3, 2, 100, 4, 64)
    >>> flash_attn_func(q, k, v, causal=True).shape
    torch.Size([2, 100, 4, 64])
    """
    out, lse, S_dmask, _ = _attend(
        "flash_attn_func", q, k, v, (), dropout_p, return_attn_probs, alibi_slopes=alibi_slopes,
        **options(softmax_scale, causal, window_size, softcap),
    )  # fmt: skip
    return (out, lse, S_dmask) if flag("flash_attn", "return_attn_probs", return_attn_probs) else out


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Optional[Tensor] = None,
) -> Any:
    """Attention of packed sequences q [total_q,H,d], k and v [total_k,Hkv,d], as flash_attn.flash_attn_varlen_func. See
    cotangent.attention_varlen for cu_seqlens_q and the other lengths.

    >>> from cotangent.compat.flash_attn import flash_attn_varlen_func
    >>> q, k, v = torch.randn(3, 10, 4, 64)
    >>> cu_seqlens = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 7, 7, causal=True).shape
    torch.Size([10, 4, 64])
    """
    refuse("flash_attn_varlen_func", block_table=block_table)
    lengths = (cu_seqlens_q, cu_seqlens_k, length(max_seqlen_q), length(max_seqlen_k))
    out, lse, S_dmask, _ = _attend(
        "flash_attn_varlen_func", q, k, v, lengths, dropout_p, return_attn_probs, alibi_slopes=alibi_slopes,
        **options(softmax_scale, causal, window_size, softcap),
    )  # fmt: skip
    return (out, lse, S_dmask) if flag("flash_attn", "return_attn_probs", return_attn_probs) else out


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of a packed qkv [B,T,3,H,d]. It is not copied.

    >>> from cotangent.compat.flash_attn import flash_attn_qkvpacked_func
    >>> flash_attn_qkvpacked_func(torch.randn(2, 100, 3, 4, 64), causal=True).shape
    torch.Size([2, 100, 4, 64])
    """
    q, k, v = unpack("flash_attn_qkvpacked_func", "qkv", qkv, 2, 3)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of q [B,Tq,H,d] to a packed kv [B,Tk,2,Hkv,d].

    >>> from cotangent.compat.flash_attn import flash_attn_kvpacked_func
    >>> flash_attn_kvpacked_func(torch.randn(2, 100, 4, 64), torch.randn(2, 100, 2, 4, 64)).shape
    torch.Size([2, 100, 4, 64])
    """
    k, v = unpack("flash_attn_kvpacked_func", "kv", kv, 2, 2)
    need_tensors("flash_attn_kvpacked_func", q=q)
    same_device("flash_attn_kvpacked_func", q=q, kv=kv)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of packed sequences, for a packed qkv [total,3,H,d].

    >>> from cotangent.compat.flash_attn import flash_attn_varlen_qkvpacked_func
    >>> cu_seqlens = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> flash_attn_varlen_qkvpacked_func(torch.randn(10, 3, 4, 64), cu_seqlens, 7, causal=True).shape
    torch.Size([10, 4, 64])
    """
    q, k, v = unpack("flash_attn_varlen_qkvpacked_func", "qkv", qkv, 1, 3)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, dropout_p, softmax_scale, causal, window_size,
        softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of packed sequences, for q [total_q,H,d] and a packed kv [total_k,2,Hkv,d].

    >>> from cotangent.compat.flash_attn import flash_attn_varlen_kvpacked_func
    >>> cu_seqlens = torch.tensor([0, 3, 10], dtype=torch.int32)
    >>> q, kv = torch.randn(10, 4, 64), torch.randn(10, 2, 4, 64)
    >>> flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens, cu_seqlens, 7, 7, causal=True).shape
    torch.Size([10, 4, 64])
    """
    k, v = unpack("flash_attn_varlen_kvpacked_func", "kv", kv, 1, 2)
    need_tensors("flash_attn_varlen_kvpacked_func", q=q)
    same_device("flash_attn_varlen_kvpacked_func", q=q, kv=kv)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size, softcap, alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Optional[Tensor] = None,
    v: Optional[Tensor] = None,
    rotary_cos: Optional[Tensor] = None,
    rotary_sin: Optional[Tensor] = None,
    cache_seqlens: Optional[Union[int, Tensor]] = None,
    cache_batch_idx: Optional[Tensor] = None,
    cache_leftpad: Optional[Tensor] = None,
    block_table: Optional[Tensor] = None,
    softmax_scale: Optional[float] = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Optional[Tensor] = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Decoding. New k and v [B,Tn,Hkv,d] are written in place to the caches [B,Tk,Hkv,d], from position cache_seqlens
    on. q then attends to the first cache_seqlens + Tn keys of the caches. Without k and v it attends to the first
    cache_seqlens keys. cache_seqlens=None means 0 with k and v, and Tk without them. num_splits has no effect. Rotary
    embeddings, paged caches, left padding and batch indices are not supported.

    With k and v, cache_seqlens must be 0 to Tk - Tn. On a CPU other values raise ValueError. A tensor on a GPU is not
    checked. A value that is too large then fails PyTorch's index assertion, and the process must be restarted. A
    negative value overwrites the end of the cache, without an error.

    >>> from cotangent.compat.flash_attn import flash_attn_with_kvcache
    >>> q, k_cache, v_cache = torch.randn(2, 1, 4, 64), torch.zeros(2, 100, 4, 64), torch.zeros(2, 100, 4, 64)
    >>> k, v = torch.randn(2, 2, 1, 4, 64)                 # one new token
    >>> out = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=7, causal=True)
    >>> torch.equal(k_cache[:, 7:8], k)
    True
    """
    refuse("flash_attn_with_kvcache", rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_batch_idx=cache_batch_idx,
           cache_leftpad=cache_leftpad, block_table=block_table)  # fmt: skip
    need_tensors("flash_attn_with_kvcache", q=q, k_cache=k_cache, v_cache=v_cache)
    if k_cache.dim() != 4 or v_cache.dim() != 4:
        raise ValueError(
            f"flash_attn_with_kvcache: k_cache has {k_cache.dim()} axes, v_cache {v_cache.dim()}, expected 4 of both"
        )
    if (k is None) != (v is None):
        raise ValueError(f"flash_attn_with_kvcache: {'k' if k is None else 'v'} is None, expected k and v or neither")
    if k is not None:
        need_tensors("flash_attn_with_kvcache", k=k, v=v)
    same_device("flash_attn_with_kvcache", q=q, k_cache=k_cache, v_cache=v_cache, k=k, v=v)
    function = "flash_attn_with_kvcache"
    arguments: "dict[str, Any]" = dict(alibi_slopes=alibi_slopes, renames=dict(k="k_cache", v="v_cache", seqused_k="cache_seqlens"),
                                       **options(softmax_scale, causal, window_size, softcap))  # fmt: skip
    B, Tk = k_cache.shape[:2]
    if cache_seqlens is None:
        used = torch.full((B,), Tk if k is None else 0, dtype=torch.int32, device=q.device)
    elif isinstance(cache_seqlens, int):
        used = torch.full((B,), cache_seqlens, dtype=torch.int32, device=q.device)
    else:
        need_tensors("flash_attn_with_kvcache", cache_seqlens=cache_seqlens)
        used = cache_seqlens
        same_device("flash_attn_with_kvcache", q=q, cache_seqlens=used)
        if used.shape != (B,) or used.is_floating_point() or used.is_complex():
            raise ValueError(
                f"flash_attn_with_kvcache: cache_seqlens is {used.dtype} {tuple(used.shape)}, expected integers {(B,)}"
            )
    if k is not None and v is not None:
        for name, new, cache in (("k", k, k_cache), ("v", v, v_cache)):
            if new.dim() != 4 or new.shape[0] != B or new.shape[2:] != cache.shape[2:] or new.dtype != cache.dtype:
                raise ValueError(
                    f"{function}: {name} is {new.dtype} {tuple(new.shape)}, expected {cache.dtype} "
                    f"[{B},T,{cache.shape[2]},{cache.shape[3]}] as {name}_cache"
                )
        if v.shape[1] != k.shape[1]:
            raise ValueError(f"{function}: v has T={v.shape[1]}, k has T={k.shape[1]}")
        first = last = 0
        if isinstance(cache_seqlens, int):
            first = last = cache_seqlens
        elif B > 0 and used.device.type == "cpu" and not torch.compiler.is_compiling():
            first, last = int(used.min()), int(used.max())  # not on a GPU, where reading them would synchronise
        if first < 0 or last + k.shape[1] > Tk:
            raise ValueError(
                f"{function}: cache_seqlens has {first if first < 0 else last}, expected 0 to {Tk - k.shape[1]}: k has "
                f"T={k.shape[1]}, k_cache has T={Tk}"
            )
        rows = torch.arange(B, device=q.device)[:, None]
        columns = used[:, None].long() + torch.arange(k.shape[1], device=q.device)
        used = used + k.shape[1]
        with torch.no_grad():
            # Attention over no queries only checks the arguments, so that a refused call does not write the caches.
            none = q[:, :0] if q.dim() == 4 and q.layout is torch.strided else q
            run(function, attention, none, k_cache, v_cache, seqused_k=used.to(torch.int32), **arguments)
            k_cache[rows, columns], v_cache[rows, columns] = k, v
    out, lse = run(function, attention, q, k_cache, v_cache, seqused_k=used.to(torch.int32), return_lse=True,
                   **arguments)  # fmt: skip
    return (out, lse) if return_softmax_lse else out


# ---- without autograd, for packages with their own autograd functions -------------------------------------


def _rng_state(q: Tensor, seed: Optional[Tensor]) -> Tensor:
    """rng_state int64 [2]: the seed and 0."""
    if seed is None:
        return torch.zeros(2, dtype=torch.int64, device=q.device)
    return torch.cat([seed, torch.zeros_like(seed)]).view(torch.int64)


def _flash_attn_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float,
    softmax_scale: Optional[float],
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    return_softmax: bool = False,
) -> "Tuple[Tensor, Tensor, Optional[Tensor], Tensor]":
    """(out, softmax_lse, S_dmask or None, rng_state)."""
    with torch.no_grad():
        out, lse, S_dmask, seed = _attend(
            "_flash_attn_forward", q, k, v, (), dropout_p, return_softmax, alibi_slopes=alibi_slopes,
            **options(softmax_scale, causal, (window_size_left, window_size_right), softcap),
        )  # fmt: skip
    return out, lse, S_dmask, _rng_state(q, seed)


def _flash_attn_varlen_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: Optional[float],
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    return_softmax: bool = False,
    block_table: Optional[Tensor] = None,
    leftpad_k: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    zero_tensors: bool = False,
    num_splits: int = 0,
) -> "Tuple[Tensor, Tensor, Optional[Tensor], Tensor]":
    """(out, softmax_lse, S_dmask or None, rng_state). zero_tensors and num_splits have no effect."""
    refuse("_flash_attn_varlen_forward", block_table=block_table, leftpad_k=leftpad_k)
    lengths = (cu_seqlens_q, cu_seqlens_k, length(max_seqlen_q), length(max_seqlen_k))
    with torch.no_grad():
        out, lse, S_dmask, seed = _attend(
            "_flash_attn_varlen_forward", q, k, v, lengths, dropout_p, return_softmax, alibi_slopes=alibi_slopes,
            seqused_k=seqused_k, **options(softmax_scale, causal, (window_size_left, window_size_right), softcap),
        )  # fmt: skip
    return out, lse, S_dmask, _rng_state(q, seed)


def _gradients(function: str, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
               into: "Tuple[Optional[Tensor], ...]", dropout_p: float, rng_state: Optional[Tensor],
               **arguments: Any) -> Tensor:  # fmt: skip
    """Writes the gradients to the tensors that are given. Returns the sums of dout * out, which flash_attn calls
    softmax_d."""
    if number(function, "dropout_p", dropout_p) > 0 and rng_state is None:
        raise ValueError(f"{function}: rng_state is None, expected that of the forward, because dropout_p is {dropout_p}")
    seed = rng_state.view(torch.int32)[:2] if rng_state is not None and dropout_p > 0 else None
    wanted = (*(x is not None for x in into), False, False)
    found = run(function, _run_backward, q, k, v, out, lse, dout, dropout_p=dropout_p, dropout_seed_tensor=seed, wanted=wanted,
                **arguments)  # fmt: skip
    for target, gradient in zip(into, found):
        if target is not None:
            target.copy_(gradient)
    return (dout.float() * out.float()).sum(-1).transpose(-1, -2)


def _flash_attn_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Optional[Tensor],
    dk: Optional[Tensor],
    dv: Optional[Tensor],
    dropout_p: float,
    softmax_scale: Optional[float],
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    rng_state: Optional[Tensor] = None,
) -> Tensor:
    """Writes dq, dk and dv, and returns softmax_d [B,H,Tq]."""
    return _gradients(
        "_flash_attn_backward", dout, q, k, v, out, softmax_lse, (dq, dk, dv), dropout_p, rng_state,
        alibi_slopes=alibi_slopes, **options(softmax_scale, causal, (window_size_left, window_size_right), softcap),
    )  # fmt: skip


def _flash_attn_varlen_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    softmax_lse: Tensor,
    dq: Optional[Tensor],
    dk: Optional[Tensor],
    dv: Optional[Tensor],
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float,
    softmax_scale: Optional[float],
    causal: bool,
    window_size_left: int = -1,
    window_size_right: int = -1,
    softcap: float = 0.0,
    alibi_slopes: Optional[Tensor] = None,
    deterministic: bool = False,
    rng_state: Optional[Tensor] = None,
    zero_tensors: bool = False,
) -> Tensor:
    """Writes dq, dk and dv, and returns softmax_d [H,total_q]."""
    return _gradients(
        "_flash_attn_varlen_backward", dout, q, k, v, out, softmax_lse, (dq, dk, dv), dropout_p, rng_state,
        cu_seqlens=(cu_seqlens_q, cu_seqlens_k), max_seqlens=(length(max_seqlen_q), length(max_seqlen_k)),
        alibi_slopes=alibi_slopes, **options(softmax_scale, causal, (window_size_left, window_size_right), softcap),
    )  # fmt: skip
