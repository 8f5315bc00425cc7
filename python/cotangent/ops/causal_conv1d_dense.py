# SPDX-License-Identifier: Apache-2.0
"""Dense causal convolution along time: forward with autograd. include/cotangent/causal_conv1d_dense.h is the manual and
has the formulas."""
from __future__ import annotations

from typing import Any, Callable, Optional

import torch
from torch import Tensor

from ._define import define, gradients_like
from ._options import activation_number, flag, silu_slope


def _gradients(
    x: Tensor, weight: Tensor, bias: Any, initial_state: Any, activation: int, dy: Tensor, dfinal_state: Any,
    _wanted: "list[bool]",
) -> Any:  # fmt: skip
    return gradients_like((x, weight, bias, initial_state), _wanted)


_backward = define(
    "causal_conv1d_dense_backward(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, int activation, "
    "Tensor dy, Tensor? dfinal_state, bool[] _wanted) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial_state)",
    _gradients,
    batched=("x", "initial_state", "dy", "dfinal_state", "dx", "dinitial_state"),
)


def _outputs(
    x: Tensor, weight: Tensor, bias: Any, initial_state: Any, activation: int, _final_state: bool
) -> Any:
    B, channels, T = x.shape[0], weight.shape[0], x.shape[2]
    if x.stride(1) == 1 and x.stride(2) != 1:  # channel-last in, channel-last out
        y = x.new_empty((B, T, channels)).transpose(1, 2)
    else:
        y = x.new_empty((B, channels, T))
    if not _final_state:
        return y, None
    shape = (B, x.shape[1], max(weight.shape[2] - 1, 0))
    return y, x.new_empty(shape) if initial_state is None else torch.empty_like(initial_state)


def _jvp(
    tangents: "dict[str, Any]", x: Tensor, weight: Tensor, bias: Any, initial_state: Any, activation: int,
    _final_state: bool,
) -> Any:  # fmt: skip
    dx, dweight, dbias, dstate = (tangents[name] for name in ("x", "weight", "bias", "initial_state"))
    dstate = torch.zeros_like(initial_state) if dstate is None and initial_state is not None else dstate
    dx = torch.zeros_like(x) if dx is None else dx
    dy, dfinal_state = _forward(dx, weight, None, dstate, 0, _final_state)
    if dweight is not None or dbias is not None:
        dweight = torch.zeros_like(weight) if dweight is None else dweight
        dy = dy + _forward(x, dweight, dbias, initial_state, 0, False)[0]
    if activation:
        dy = dy * silu_slope(_forward(x, weight, bias, initial_state, 0, False)[0])
    return dy, dfinal_state


_forward = define(
    "causal_conv1d_dense_forward(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, int activation, "
    "bool _final_state) -> (Tensor y, Tensor final_state)",
    _outputs,
    _backward,
    autocast=("x", "weight"),
    jvp=_jvp,
    batched=("x", "initial_state", "y", "final_state"),
)


def causal_conv1d_dense(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    activation: Optional[str] = None,
    *,
    initial_state: Optional[Tensor] = None,
    return_final_state: bool = False,
) -> Any:
    """Causal convolution of all input channels to all output channels (not depthwise):

        y[o,t] = act(bias[o] + sum_i sum_k weight[o,i,k] * xe[i,t+k])
        xe is x with K-1 time steps in front: initial_state, or zeros

    Without initial_state this is torch.nn.functional.conv1d with groups=1 on x with K-1 zeros in front.

    x                   [B,Din,T], any strides. For a channel-last [B,T,Din] tensor, the faster layout, pass
                        `x.transpose(1, 2)`. y is then also [B,Dout,T], with the channels contiguous in memory
    weight              [Dout,Din,K], any K >= 1. weight[:, :, K-1] multiplies x[t], and weight[:, :, 0] the oldest
                        input
    bias                [Dout]
    activation          None, "silu" or "swish" (the same)
    initial_state       [B,Din,K-1], the inputs before x
    return_final_state  True: the result is (y, final_state)

    Returns y [B,Dout,T] in the dtype of x. final_state [B,Din,K-1] has the last K-1 time steps of xe, before the
    convolution, in the dtype of initial_state or else of x.

    Dtypes: float32, float16 and bfloat16, independently for x, `weight`, `bias` and states; on the CPU also float64 for
    all of them. Different dtypes for x and `weight` are allowed, but slow on a GPU: the tensor-core kernels need one
    16-bit dtype for both. Autocast casts both. Differentiable once, in x, `weight`, `bias` and initial_state, through y
    and final_state. Raises ValueError, TypeError or NotImplementedError, which name the wrong argument.

    >>> x, weight = torch.ones(1, 2, 4), torch.ones(1, 2, 3)  # two input channels, one output channel
    >>> cotangent.causal_conv1d_dense(x, weight)
    tensor([[[2., 4., 6., 6.]]])
    """
    return_final_state = flag("causal_conv1d_dense", "return_final_state", return_final_state)
    y, final_state = _forward(
        x, weight, bias, initial_state, activation_number("causal_conv1d_dense", activation, ("silu",)),
        return_final_state,
    )  # fmt: skip
    return (y, final_state) if return_final_state else y


def _example(randn: "Callable[..., Tensor]") -> Tensor:
    return causal_conv1d_dense(randn(1, 8, 9), randn(6, 8, 4), randn(6))
