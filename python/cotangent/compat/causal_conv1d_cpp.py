# SPDX-License-Identifier: Apache-2.0
"""The functions of causal_conv1d.cpp_functions: the convolution without autograd. The fused paths of mamba_ssm call
them from their own autograd functions."""
from __future__ import annotations

from typing import Optional, Tuple

import torch
from torch import Tensor

from .._context import refuse_in_context_parallel
from ..ops._define import _match_layout
from ..ops._options import flag, need_tensors
from ..ops.causal_conv1d import _backward, _backward_into, _forward, _update
from ._arguments import renamed

__all__ = ["causal_conv1d_bwd_function", "causal_conv1d_fwd_function", "causal_conv1d_update_function"]


def _activation(function: str, silu_activation: bool) -> int:
    return int(flag(function, "silu_activation", silu_activation))  # cot_activation: 1 is SiLU


def _check_like(function: str, name: str, tensor: Tensor, shape: "Tuple[int, ...]", device: torch.device) -> None:
    need_tensors(function, **{name: tensor})
    if tuple(tensor.shape) != tuple(shape) or tensor.device != device:
        raise ValueError(
            f"{function}: {name} has {tensor.dim()} axes, shape {tuple(tensor.shape)} on {tensor.device}, expected "
            f"{tuple(shape)} on {device} as x"
        )


def causal_conv1d_fwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    seq_idx: Optional[Tensor],
    initial_states: Optional[Tensor],
    final_states_out: Optional[Tensor],
    silu_activation: bool,
) -> Tensor:
    """Returns the output, with the shape of x [B,D,T]. A given final_states_out [B,D,K-1] is overwritten.

    >>> from cotangent.compat.causal_conv1d_cpp import causal_conv1d_fwd_function
    >>> x, weight = torch.tensor([[[1., 2., 3., 4.]]]), torch.ones(1, 3)
    >>> causal_conv1d_fwd_function(x, weight, None, None, None, None, False)
    tensor([[[1., 3., 6., 9.]]])
    """
    refuse_in_context_parallel("causal_conv1d_fwd_function", "causal_conv1d")
    activation = _activation("causal_conv1d_fwd_function", silu_activation)
    try:
        with torch.no_grad():
            out, states = _forward(x, weight, bias, initial_states, seq_idx, None, activation, final_states_out is not None)
            if final_states_out is not None:
                _check_like("causal_conv1d_fwd_function", "final_states_out", final_states_out, states.shape, x.device)
                final_states_out.copy_(states)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise renamed("causal_conv1d_fwd_function", error, initial_state="initial_states") from None
    return out


def causal_conv1d_bwd_function(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    dout: Tensor,
    seq_idx: Optional[Tensor],
    initial_states: Optional[Tensor],
    dfinal_states: Optional[Tensor],
    dx: Optional[Tensor],
    return_dinitial_states: bool,
    silu_activation: bool,
) -> "Tuple[Tensor, Tensor, Optional[Tensor], Optional[Tensor]]":
    """Returns (dx, `dweight`, `dbias`, dinitial_states). A given dx is overwritten. Without `bias`, `dbias` is None.
    Without return_dinitial_states, dinitial_states is None.

    >>> from cotangent.compat.causal_conv1d_cpp import causal_conv1d_bwd_function
    >>> x, weight, dout = torch.tensor([[[1., 2., 3., 4.]]]), torch.ones(1, 3), torch.ones(1, 1, 4)
    >>> dx, dweight, _, _ = causal_conv1d_bwd_function(x, weight, None, dout, None, None, None, None, False, False)
    >>> dx, dweight
    (tensor([[[3., 3., 2., 1.]]]), tensor([[ 3.,  6., 10.]]))
    """
    name = "causal_conv1d_bwd_function"
    need_tensors(name, x=x, weight=weight, dout=dout)
    _check_like(name, "dout", dout, x.shape, x.device)
    if dx is not None:
        _check_like(name, "dx", dx, x.shape, x.device)
        if dx.dtype != x.dtype:
            raise TypeError(f"{name}: dx has dtype {dx.dtype}, expected {x.dtype} as x")
    activation = _activation(name, silu_activation)
    return_dinitial_states = flag(name, "return_dinitial_states", return_dinitial_states)
    if return_dinitial_states and initial_states is None:
        initial_states = x.new_zeros((x.shape[0], x.shape[1], weight.shape[1] - 1))
    wanted = [True, bias is not None, return_dinitial_states]
    try:
        with torch.no_grad():
            dy = _match_layout(dout, x.shape, x.stride(), x.dtype, x.device)
            inputs = (x, weight, bias, initial_states, seq_idx, None, activation, dy, dfinal_states)
            if dx is None:
                dx, *others = _backward(*inputs, [True, *wanted])
            else:
                others = _backward_into(*inputs, dx, wanted)
    except (NotImplementedError, TypeError, ValueError) as error:
        names = dict(initial_state="initial_states", dfinal_state="dfinal_states", dy="dout")
        raise renamed(name, error, **names) from None
    return (dx, *others)


def causal_conv1d_update_function(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Optional[Tensor],
    silu_activation: bool,
    cache_seqlens: Optional[Tensor],
    conv_state_indices: Optional[Tensor],
) -> Tensor:
    """Returns the output, with the shape of x. conv_state is updated in place.

    >>> from cotangent.compat.causal_conv1d_cpp import causal_conv1d_update_function
    >>> conv_state = torch.tensor([[[1., 2.]]])
    >>> causal_conv1d_update_function(torch.tensor([[3.]]), conv_state, torch.ones(1, 3), None, False, None, None)
    tensor([[6.]])
    """
    activation = _activation("causal_conv1d_update_function", silu_activation)
    with torch.no_grad():
        y: Tensor = _update(x, conv_state, weight, bias, cache_seqlens, conv_state_indices, activation)
    return y
