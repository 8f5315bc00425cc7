# SPDX-License-Identifier: Apache-2.0
"""The reference functions of the package causal_conv1d, in plain PyTorch. They compute in the dtype of the weight and
return the dtype of x. Tests of models compare with them."""
from __future__ import annotations

from typing import Any, Optional

import torch
import torch.nn.functional as F
from torch import Tensor


def _activate(name: str, y: Tensor, activation: Optional[str]) -> Tensor:
    if activation not in (None, "silu", "swish"):
        raise NotImplementedError(f"{name}: activation is {activation!r}, expected None, 'silu' or 'swish'")
    return y if activation is None else F.silu(y)


def _convolve(xe: Tensor, weight: Tensor, bias: Optional[Tensor]) -> Tensor:
    """Correlates xe [B,D,T+K-1] with weight [D,K]."""
    return F.conv1d(xe, weight.unsqueeze(1), bias, groups=weight.shape[0])


def causal_conv1d_ref(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    initial_states: Optional[Tensor] = None,
    return_final_states: bool = False,
    final_states_out: Optional[Tensor] = None,
    activation: Optional[str] = None,
) -> Any:
    """As causal_conv1d_fn, without seq_idx.

    >>> from cotangent.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_ref
    >>> x, weight = torch.randn(2, 32, 100), torch.randn(32, 4)
    >>> torch.testing.assert_close(causal_conv1d_fn(x, weight), causal_conv1d_ref(x, weight))
    """
    width = weight.shape[1]
    given = x.to(weight.dtype)
    xe = F.pad(given, (width - 1, 0)) if initial_states is None else torch.cat([initial_states.to(given.dtype), given], -1)
    y = _activate("causal_conv1d_ref", _convolve(xe, weight, bias), activation).to(x.dtype)
    if not return_final_states:
        return y
    states = xe[..., xe.shape[-1] - (width - 1) :].to(x.dtype)
    return y, states if final_states_out is None else final_states_out.copy_(states)


def causal_conv1d_update_ref(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    activation: Optional[str] = None,
    cache_seqlens: Optional[Tensor] = None,
) -> Tensor:
    """As causal_conv1d_update, without conv_state_indices.

    >>> from cotangent.compat.causal_conv1d import causal_conv1d_update_ref
    >>> causal_conv1d_update_ref(torch.randn(2, 32), torch.zeros(2, 32, 3), torch.randn(32, 4)).shape
    torch.Size([2, 32])
    """
    new = x.unsqueeze(-1) if x.dim() == 2 else x
    T, size, width = new.shape[-1], conv_state.shape[-1], weight.shape[1]
    given = new.to(weight.dtype)
    if cache_seqlens is None:
        xe = torch.cat([conv_state.to(given.dtype), given], -1)
        conv_state.copy_(xe[..., xe.shape[-1] - size :])
    else:  # a ring buffer: the input of position p is in column p mod size
        before = (cache_seqlens[:, None].long() + torch.arange(1 - width, 0, device=x.device)) % size
        after = (cache_seqlens[:, None].long() + torch.arange(T, device=x.device)) % size
        columns = [c.unsqueeze(1).expand(-1, conv_state.shape[1], -1) for c in (before, after)]
        xe = torch.cat([conv_state.gather(2, columns[0]).to(given.dtype), given], -1)
        conv_state.scatter_(2, columns[1], new.to(conv_state.dtype))
    y = _convolve(xe[..., xe.shape[-1] - (T + width - 1) :], weight, bias)
    return _activate("causal_conv1d_update_ref", y, activation).to(x.dtype).reshape(x.shape)


def causal_conv1d_varlen_states_ref(x: Tensor, cu_seqlens: Tensor, state_len: int) -> Tensor:
    """As causal_conv1d_varlen_states. It waits for the device to read cu_seqlens.

    >>> from cotangent.compat.causal_conv1d import causal_conv1d_varlen_states_ref
    >>> x, cu_seqlens = torch.tensor([[1.], [2.], [3.]]), torch.tensor([0, 1, 3])  # two sequences
    >>> causal_conv1d_varlen_states_ref(x, cu_seqlens, 2)
    tensor([[[0., 1.]],
    <BLANKLINE>
            [[2., 3.]]])
    """
    ends = cu_seqlens.tolist()
    last = [x[max(start, end - state_len) : end].t() for start, end in zip(ends, ends[1:])]
    return torch.stack([F.pad(part, (state_len - part.shape[1], 0)) for part in last])
