# SPDX-License-Identifier: Apache-2.0
"""Cotangent as an implementation of flash attention inside PyTorch, where torch.nn.attention has a registry of them:

    torch.nn.attention.activate_flash_attention_impl("cotangent")

Then scaled_dot_product_attention calls cotangent wherever it selects flash attention, on CUDA and on the CPU, and so does
torch.nn.attention.varlen. `restore_flash_attention_impl()` reverts it. Importing cotangent registers the name."""
from __future__ import annotations

import warnings
from typing import Any, Optional, Tuple

import torch
from torch import Tensor

from ..compat._arguments import refuse, renamed
from ..compat.sdpa import as_bias, upper_left
from ..ops._options import random_seed
from ..ops.attention import _run_backward, attention, attention_varlen

_NAMES = dict(q="query", k="key", v="value", bias="attn_mask", attn_bias="attn_mask", dout="grad_out", lse="logsumexp",
              cu_seqlens_q="cum_seq_q", cu_seqlens_k="cum_seq_k", max_seqlen_q="max_q", max_seqlen_k="max_k")  # fmt: skip


def _call(function: str, run: Any, *arguments: Any, **options: Any) -> Any:
    """run(...) without autograd. Errors have PyTorch's names of the arguments."""
    try:
        with torch.no_grad():
            return run(*arguments, **options)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise renamed(function, error, **_NAMES) from None


def _new_seed(q: Tensor, dropout_p: float) -> "Tuple[Optional[Tensor], Tensor]":
    """The seed of a dropout mask, as cotangent takes it and as the rng_state that PyTorch keeps for the backward."""
    if dropout_p == 0:
        return None, torch.zeros(2, dtype=torch.uint64, device=q.device)
    seed = random_seed(q.device)
    return seed, torch.cat([seed, torch.zeros_like(seed)]).view(torch.uint64)


def _kept_seed(rng_state: Tensor, dropout_p: float) -> Optional[Tensor]:
    return rng_state.view(torch.int32)[:2] if dropout_p > 0 else None


def _shape_options(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> "Tuple[Tensor, Tensor, dict[str, Any]]":
    """k, v and options for a mask that is aligned to the upper left corner."""
    keys, causal, window = upper_left(q.shape[1], k.shape[1], is_causal)
    return k[:, :keys], v[:, :keys], dict(causal=causal, window=window)


# ---- scaled_dot_product_attention: [B,H,T,d] --------------------------------------------------------------


def _forward(function: str, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, bias: Optional[Tensor],
             scale: Optional[float], dropout_p: float, seed: Optional[Tensor]) -> "Tuple[Tensor, Tensor]":  # fmt: skip
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    k, v, options = _shape_options(q, k, v, is_causal)
    out, lse = _call(function, attention, q, k, v, attn_bias=bias, scale=scale, dropout_p=dropout_p, dropout_seed_tensor=seed,
                     return_lse=True, **options)  # fmt: skip
    return out.transpose(1, 2), lse


def _backward(function: str, grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, lse: Tensor,
              is_causal: bool, bias: Optional[Tensor], scale: Optional[float], dropout_p: float,
              seed: Optional[Tensor]) -> "list[Tensor]":  # fmt: skip
    q, k, v, o, do = (x.transpose(1, 2) for x in (query, key, value, out, grad_out))
    shorter_k, shorter_v, options = _shape_options(q, k, v, is_causal)
    found = _call(function, _run_backward, q, shorter_k, shorter_v, o, lse, do, attn_bias=bias,
                  scale=scale, dropout_p=dropout_p, dropout_seed_tensor=seed, wanted=(True, True, True, False, False),
                  **options)  # fmt: skip
    gradients = []
    for gradient, whole in zip(found, (q, k, v)):
        if gradient.shape[1] < whole.shape[1]:  # keys that no query attends to
            full = torch.zeros_like(whole)
            full[:, : gradient.shape[1]] = gradient
            gradient = full
        gradients.append(gradient.transpose(1, 2))
    return gradients


def _cpu_forward(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, *,
                 attn_mask: Optional[Tensor] = None, scale: Optional[float] = None) -> Any:  # fmt: skip
    function = "_scaled_dot_product_flash_attention_for_cpu"
    refuse(function, dropout_p=dropout_p)
    bias = None if attn_mask is None else as_bias(attn_mask, query.dtype)
    out, lse = _forward(function, query, key, value, is_causal, bias, scale, 0.0, None)
    return out, lse.transpose(1, 2).contiguous().transpose(1, 2)  # the strides that PyTorch promises to its compiler


def _cpu_backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
                  dropout_p: float, is_causal: bool, *, attn_mask: Optional[Tensor] = None,
                  scale: Optional[float] = None) -> Any:  # fmt: skip
    bias = None if attn_mask is None else as_bias(attn_mask, query.dtype)
    gradients = _backward("_scaled_dot_product_flash_attention_for_cpu_backward", grad_out, query, key, value, out,
                          logsumexp, is_causal, bias, scale, 0.0, None)  # fmt: skip
    return tuple(g.transpose(1, 2).contiguous().transpose(1, 2) for g in gradients)


def _cuda_forward(query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False,
                  return_debug_mask: bool = False, *, scale: Optional[float] = None) -> Any:  # fmt: skip
    function = "_scaled_dot_product_flash_attention"
    refuse(function, return_debug_mask=return_debug_mask)
    seed, rng_state = _new_seed(query, dropout_p)
    out, lse = _forward(function, query, key, value, is_causal, None, scale, dropout_p, seed)
    offset = torch.zeros((), dtype=torch.uint64, device=query.device)
    return out, lse, None, None, query.shape[2], key.shape[2], rng_state, offset, query.new_empty(0)


def _cuda_backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
                   cum_seq_q: Optional[Tensor], cum_seq_k: Optional[Tensor], max_q: int, max_k: int, dropout_p: float,
                   is_causal: bool, philox_seed: Tensor, philox_offset: Tensor, *,
                   scale: Optional[float] = None) -> Any:  # fmt: skip
    function = "_scaled_dot_product_flash_attention_backward"
    refuse(function, cum_seq_q=cum_seq_q, cum_seq_k=cum_seq_k)
    return tuple(_backward(function, grad_out, query, key, value, out, logsumexp, is_causal, None, scale, dropout_p,
                           _kept_seed(philox_seed, dropout_p)))  # fmt: skip


# ---- _flash_attention_forward: [B,T,H,d] or packed [total,H,d] --------------------------------------------


def _window(is_causal: bool, left: Optional[int], right: Optional[int]) -> Any:
    left, right = (-1 if side is None else side for side in (left, right))
    return None if (left, right) == (-1, -1) else (left, 0 if is_causal else right)


def _flash_forward(query: Tensor, key: Tensor, value: Tensor, cum_seq_q: Optional[Tensor], cum_seq_k: Optional[Tensor],
                   max_q: int, max_k: int, dropout_p: float, is_causal: bool, return_debug_mask: bool, *,
                   scale: Optional[float] = None, window_size_left: Optional[int] = None,
                   window_size_right: Optional[int] = None, seqused_k: Optional[Tensor] = None,
                   alibi_slopes: Optional[Tensor] = None, block_table: Optional[Tensor] = None,
                   num_splits: Optional[int] = None) -> Any:  # fmt: skip
    function = "_flash_attention_forward"
    refuse(function, return_debug_mask=return_debug_mask, block_table=block_table)
    seed, rng_state = _new_seed(query, dropout_p)
    options: "dict[str, Any]" = dict(
        causal=is_causal, window=_window(is_causal, window_size_left, window_size_right), scale=scale,
        dropout_p=dropout_p, dropout_seed_tensor=seed, seqused_k=seqused_k, alibi_slopes=alibi_slopes, return_lse=True,
    )  # fmt: skip
    if cum_seq_q is None:
        out, lse = _call(function, attention, query, key, value, **options)
    else:
        out, lse = _call(function, attention_varlen, query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, **options)
    return out, lse, rng_state, torch.zeros((), dtype=torch.uint64, device=query.device), query.new_empty(0)


def _flash_forward_into(out: Tensor, *arguments: Any, **options: Any) -> Tensor:
    found, lse, *_ = _flash_forward(*arguments, **options)
    out.copy_(found)
    return lse


def _flash_backward(grad_out: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, logsumexp: Tensor,
                    cum_seq_q: Optional[Tensor], cum_seq_k: Optional[Tensor], max_q: int, max_k: int, dropout_p: float,
                    is_causal: bool, rng_state: Tensor, unused: Tensor, *, scale: Optional[float] = None,
                    window_size_left: Optional[int] = None, window_size_right: Optional[int] = None) -> Any:  # fmt: skip
    packed = cum_seq_q is not None
    return tuple(_call(
        "_flash_attention_backward", _run_backward, query, key, value, out, logsumexp, grad_out,
        cu_seqlens=(cum_seq_q, cum_seq_k), max_seqlens=(max_q, max_k) if packed else (0, 0), causal=is_causal,
        window=_window(is_causal, window_size_left, window_size_right), scale=scale, dropout_p=dropout_p,
        dropout_seed_tensor=_kept_seed(rng_state, dropout_p), wanted=(True, True, True, False, False),
    )[:3])  # fmt: skip


# ---- registration -----------------------------------------------------------------------------------------

_KERNELS = {
    "CPU": {
        "_scaled_dot_product_flash_attention_for_cpu": _cpu_forward,
        "_scaled_dot_product_flash_attention_for_cpu_backward": _cpu_backward,
    },
    "CUDA": {
        "_scaled_dot_product_flash_attention": _cuda_forward,
        "_scaled_dot_product_flash_attention_backward": _cuda_backward,
        "_flash_attention_forward": _flash_forward,
        "_flash_attention_forward_no_dropout_inplace": _flash_forward_into,
        "_flash_attention_backward": _flash_backward,
    },
}


class _Handle:
    """Keeps the kernels registered until remove()."""

    def __init__(self, libraries: "list[Any]") -> None:
        self.libraries = libraries

    def remove(self) -> None:
        for library in self.libraries:
            library._destroy()
        self.libraries = []


def _activate() -> _Handle:
    libraries = []
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Warning only once for all operators")
        for key, kernels in _KERNELS.items():
            if key == "CUDA" and torch.version.cuda is None:
                continue
            library = torch.library.Library("aten", "IMPL", key)
            for name, kernel in kernels.items():
                if hasattr(torch.ops.aten, name):
                    library.impl(name, kernel, key)
            libraries.append(library)
    return _Handle(libraries)


def _register() -> bool:
    """Registers the name "cotangent" with torch.nn.attention. Returns False if this torch has no registry."""
    try:
        from torch.nn.attention import register_flash_attention_impl
    except ImportError:
        return False
    register_flash_attention_impl("cotangent", register_fn=_activate)
    return True
