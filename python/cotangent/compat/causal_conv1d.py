# SPDX-License-Identifier: Apache-2.0
"""The functions of the package causal_conv1d, with its signatures and semantics, for any width, layout and dtype. Those
whose names end in _ref are references in plain PyTorch: they compute in the dtype of the weight and return the dtype of
x."""
from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from .._context import refuse_in_context_parallel
from ..ops.causal_conv1d import causal_conv1d, causal_conv1d_update as _update
from ..ops._options import need_tensors
from ._arguments import renamed
from ._causal_conv1d_ref import causal_conv1d_ref, causal_conv1d_update_ref, causal_conv1d_varlen_states_ref

__all__ = [
    "causal_conv1d_fn", "causal_conv1d_ref", "causal_conv1d_update", "causal_conv1d_update_ref",
    "causal_conv1d_varlen_states", "causal_conv1d_varlen_states_ref",
]  # fmt: skip


def causal_conv1d_fn(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    seq_idx: Optional[Tensor] = None,
    initial_states: Optional[Tensor] = None,
    return_final_states: bool = False,
    final_states_out: Optional[Tensor] = None,
    activation: Optional[str] = None,
) -> Any:
    """Causal convolution of x [B,D,T] with `weight` [D,K], `bias` [D], seq_idx [B,T] and initial_states [B,D,K-1], as
    in cotangent.causal_conv1d. Returns out with the shape of x. With return_final_states=True it returns (out,
    final_states). If final_states_out is given, the final states are copied to it and it is returned. Gradients flow
    through it.

    >>> from cotangent.compat.causal_conv1d import causal_conv1d_fn
    >>> causal_conv1d_fn(torch.randn(2, 32, 100), torch.randn(32, 4), activation="silu").shape
    torch.Size([2, 32, 100])
    """
    refuse_in_context_parallel("causal_conv1d_fn", "causal_conv1d")
    try:
        result = causal_conv1d(
            x, weight, bias, activation, initial_state=initial_states, seq_idx=seq_idx, return_final_state=return_final_states
        )
    except (NotImplementedError, TypeError, ValueError) as error:
        raise renamed("causal_conv1d_fn", error, initial_state="initial_states",
                      return_final_state="return_final_states") from None  # fmt: skip
    if not return_final_states or final_states_out is None:
        return result
    out, states = result
    need_tensors("causal_conv1d_fn", final_states_out=final_states_out)
    if final_states_out.shape != states.shape or final_states_out.device != states.device:
        raise ValueError(
            f"causal_conv1d_fn: final_states_out has shape {tuple(final_states_out.shape)} on {final_states_out.device}, "
            f"expected {tuple(states.shape)} on {states.device}"
        )
    return out, final_states_out.copy_(states)


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    activation: Optional[str] = None,
    cache_seqlens: Optional[Tensor] = None,
    conv_state_indices: Optional[Tensor] = None,
) -> Tensor:
    """One or more steps of decoding for x [B,D] or [B,D,T], as in cotangent.causal_conv1d_update. conv_state [N,D,S]
    with S >= K-1 is updated in place. Returns out with the shape of x.

    >>> from cotangent.compat.causal_conv1d import causal_conv1d_update
    >>> causal_conv1d_update(torch.randn(2, 32), torch.zeros(2, 32, 3), torch.randn(32, 4)).shape
    torch.Size([2, 32])
    """
    return _update(
        x, conv_state, weight, bias, activation, cache_seqlens=cache_seqlens, conv_state_indices=conv_state_indices
    )


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """Returns the last state_len inputs of each packed sequence [N,D,state_len], with zeros before the start of a
    sequence. x is [total,D], and cu_seqlens is [N+1]. There is no gradient. The call does not wait for the GPU.

    >>> from cotangent.compat.causal_conv1d import causal_conv1d_varlen_states
    >>> x, cu_seqlens = torch.tensor([[1.], [2.], [3.]]), torch.tensor([0, 1, 3])  # two sequences
    >>> causal_conv1d_varlen_states(x, cu_seqlens, 2)
    tensor([[[0., 1.]],
    <BLANKLINE>
            [[2., 3.]]])
    """
    need_tensors("causal_conv1d_varlen_states", x=x, cu_seqlens=cu_seqlens)
    if x.dim() != 2 or cu_seqlens.dim() != 1 or x.device != cu_seqlens.device:
        raise ValueError(
            f"causal_conv1d_varlen_states: x has shape {tuple(x.shape)} on {x.device}, cu_seqlens {tuple(cu_seqlens.shape)} "
            f"on {cu_seqlens.device}, expected [total,D] and [N+1] on one device"
        )
    if cu_seqlens.is_floating_point() or cu_seqlens.is_complex():
        raise TypeError(f"causal_conv1d_varlen_states: cu_seqlens has dtype {cu_seqlens.dtype}, expected integers")
    if not isinstance(state_len, int) or not 0 <= state_len < 2**31:
        raise TypeError(f"causal_conv1d_varlen_states: state_len is {state_len!r}, expected a length")
    with torch.no_grad():
        start, end = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
        row = end - state_len + torch.arange(state_len, device=x.device)
        inside = row >= start
        if x.shape[0] == 0:
            return x.new_zeros((start.shape[0], state_len, x.shape[1])).transpose(1, 2)
        return x[row.clamp_min(0)].masked_fill(~inside[..., None], 0).transpose(1, 2)
