# SPDX-License-Identifier: Apache-2.0
"""The functions of the package causal_conv1d: their signatures and semantics, with any width, layout and dtype."""
from __future__ import annotations

from typing import Any, Optional

import torch
from torch import Tensor

from ..ops.causal_conv1d import causal_conv1d, causal_conv1d_update as _update

__all__ = ["causal_conv1d_fn", "causal_conv1d_update", "causal_conv1d_varlen_states"]


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
    """x [B,D,T], weight [D,K], bias [D], seq_idx [B,T], initial_states [B,D,K-1]; out like x, and with
    return_final_states (out, final_states): into final_states_out, if that is given. See cotangent.causal_conv1d."""
    result = causal_conv1d(
        x, weight, bias, activation, initial_state=initial_states, seq_idx=seq_idx, return_final_state=return_final_states
    )
    if not return_final_states or final_states_out is None:
        return result
    with torch.no_grad():
        final_states_out.copy_(result[1])
    return result[0], final_states_out


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    activation: Optional[str] = None,
    cache_seqlens: Optional[Tensor] = None,
    conv_state_indices: Optional[Tensor] = None,
) -> Tensor:
    """x [B,D] or [B,D,T]; conv_state [N,D,S >= K-1] in place; out like x. See cotangent.causal_conv1d_update."""
    return _update(
        x, conv_state, weight, bias, activation, cache_seqlens=cache_seqlens, conv_state_indices=conv_state_indices
    )


def causal_conv1d_varlen_states(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """The last state_len inputs of each packed sequence: x [total,D], cu_seqlens [N+1] -> [N,D,state_len], zeros before
    a sequence's start. No gradient, and no synchronisation."""
    with torch.no_grad():
        start, end = cu_seqlens[:-1, None].long(), cu_seqlens[1:, None].long()
        row = end - state_len + torch.arange(state_len, device=x.device)
        inside = row >= start
        if x.shape[0] == 0:
            return x.new_zeros((start.shape[0], state_len, x.shape[1])).transpose(1, 2)
        return x[row.clamp_min(0)].masked_fill(~inside[..., None], 0).transpose(1, 2)
