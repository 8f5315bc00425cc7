# SPDX-License-Identifier: Apache-2.0
"""Depthwise causal convolution along time: forward with autograd, and decoding. include/cotangent/causal_conv1d.h is
the manual and has the formulas."""
from __future__ import annotations

from typing import Any, Callable, Optional

import torch
from torch import Tensor

from ._define import define, gradients_like
from ._options import activation_number, flag, silu_slope


def _one_batch(x: Any, weight: Any, bias: Any, initial_state: Any, seq_idx: Any, cu_seqlens: Any, *others: Any) -> bool:
    return cu_seqlens is None  # packed sequences have batch 1


def _gradients(
    x: Tensor, weight: Tensor, bias: Any, initial_state: Any, seq_idx: Any, cu_seqlens: Any, activation: int,
    dy: Tensor, dfinal_state: Any, _wanted: "list[bool]",
) -> Any:  # fmt: skip
    inputs = (x, weight, bias, initial_state)
    return gradients_like(inputs, _wanted)


_backward = define(
    "causal_conv1d_backward(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? seq_idx, "
    "Tensor? cu_seqlens, int activation, Tensor dy, Tensor? dfinal_state, bool[] _wanted) "
    "-> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial_state)",
    _gradients,
    batched=("x", "initial_state", "seq_idx", "dy", "dfinal_state", "dx", "dinitial_state"),
    folds=_one_batch,
)

# The same with a given dx, of any layout, which is overwritten.
_backward_into = define(
    "causal_conv1d_backward_into(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? seq_idx, "
    "Tensor? cu_seqlens, int activation, Tensor dy, Tensor? dfinal_state, Tensor(a!) dx, bool[] _wanted) "
    "-> (Tensor dweight, Tensor dbias, Tensor dinitial_state)",
    lambda x, weight, bias, initial_state, *others: gradients_like((weight, bias, initial_state), others[-1]),
    function="causal_conv1d_backward",
)


def _outputs(
    x: Tensor, weight: Tensor, bias: Any, initial_state: Any, seq_idx: Any, cu_seqlens: Any, activation: int,
    _final_state: bool,
) -> Any:  # fmt: skip
    if not _final_state:
        return torch.empty_like(x), None
    rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    shape = (rows, x.shape[1], max(weight.shape[1] - 1, 0))
    return torch.empty_like(x), x.new_empty(shape) if initial_state is None else torch.empty_like(initial_state)


def _jvp(
    tangents: "dict[str, Any]", x: Tensor, weight: Tensor, bias: Any, initial_state: Any, seq_idx: Any, cu_seqlens: Any,
    activation: int, _final_state: bool,
) -> Any:  # fmt: skip
    packing = (seq_idx, cu_seqlens, 0)
    dx, dweight, dbias, dstate = (tangents[name] for name in ("x", "weight", "bias", "initial_state"))
    dstate = torch.zeros_like(initial_state) if dstate is None and initial_state is not None else dstate
    dx = torch.zeros_like(x) if dx is None else dx
    dy, dfinal_state = _forward(dx, weight, None, dstate, *packing, _final_state)
    if dweight is not None or dbias is not None:
        dweight = torch.zeros_like(weight) if dweight is None else dweight
        dy = dy + _forward(x, dweight, dbias, initial_state, *packing, False)[0]
    if activation:
        dy = dy * silu_slope(_forward(x, weight, bias, initial_state, *packing, False)[0])
    return dy, dfinal_state


_forward = define(
    "causal_conv1d_forward(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? seq_idx, "
    "Tensor? cu_seqlens, int activation, bool _final_state) -> (Tensor y, Tensor final_state)",
    _outputs,
    _backward,
    autocast=("x",),
    jvp=_jvp,
    batched=("x", "initial_state", "seq_idx", "y", "final_state"),
    folds=_one_batch,
)

_update = define(
    "causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias, Tensor? cache_seqlens, "
    "Tensor? conv_state_indices, int activation) -> Tensor y",
    lambda x, *others: torch.empty_like(x),
    autocast=("x",),
    no_gradient="has no gradient: it is for decoding",
)


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    activation: Optional[str] = None,
    *,
    initial_state: Optional[Tensor] = None,
    seq_idx: Optional[Tensor] = None,
    cu_seqlens: Optional[Tensor] = None,
    return_final_state: bool = False,
) -> Any:
    """Depthwise causal convolution:

        y[t] = act(bias + sum_k weight[k] * xe[t+k])
        xe is x with K-1 time steps in front: initial_state, or zeros

    x                   [B,D,T], any strides. For a channel-last [B,T,D] tensor pass `x.transpose(1, 2)`. y is then also
                        [B,D,T], with the channels contiguous in memory: y.transpose(1, 2) is a contiguous [B,T,D]
                        tensor
    weight              [D,K], any K >= 1. weight[:, K-1] multiplies x[t], and weight[:, 0] the oldest input
    bias                [D]
    activation          None, "silu" or "swish" (the same)
    initial_state       [B,D,K-1], the inputs before x (initial_states of the package causal_conv1d). With cu_seqlens it
                        is [N,D,K-1]
    seq_idx             int32 [B,T], the sequence of each time step. x[t'] contributes to y[t] only if both have the
                        same number. A negative number is padding (y = 0)
    cu_seqlens          int32 [N+1], for B = 1 and not with seq_idx: sequence n has the time steps cu_seqlens[n] to
                        cu_seqlens[n+1] - 1
    return_final_state  True: the result is (y, final_state)

    Returns y with the shape, dtype and layout of x. final_state [B,D,K-1] has the last K-1 time steps of xe, before the
    convolution. Its dtype is that of initial_state, or of x without one. With seq_idx, inputs that do not belong to the
    last sequence are 0 in final_state. With cu_seqlens it is [N,D,K-1], one state for each sequence.

    Dtypes: float32, float16 and bfloat16, independently for x, `weight`, `bias` and states; on the CPU also float64 for
    all of them. Autocast casts x. Differentiable once, in x, `weight`, `bias` and initial_state, through y and
    final_state. Raises ValueError, TypeError or NotImplementedError, which name the wrong argument.

    >>> x, weight = torch.tensor([[[1., 2., 3., 4.]]]), torch.ones(1, 3)
    >>> cotangent.causal_conv1d(x, weight)
    tensor([[[1., 3., 6., 9.]]])
    >>> y, state = cotangent.causal_conv1d(x, weight, return_final_state=True)
    >>> cotangent.causal_conv1d(x, weight, initial_state=state)  # the next four time steps
    tensor([[[8., 7., 6., 9.]]])
    """
    return_final_state = flag("causal_conv1d", "return_final_state", return_final_state)
    y, final_state = _forward(
        x, weight, bias, initial_state, seq_idx, cu_seqlens,
        activation_number("causal_conv1d", activation, ("silu",)), return_final_state,
    )  # fmt: skip
    return (y, final_state) if return_final_state else y


def causal_conv1d_update(
    x: Tensor,
    conv_state: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    activation: Optional[str] = None,
    *,
    cache_seqlens: Optional[Tensor] = None,
    conv_state_indices: Optional[Tensor] = None,
) -> Tensor:
    """One or more steps of decoding: returns y for the new tokens x, and updates conv_state in place.

        y[t] = act(bias + sum_k weight[k] * xe[t+k])
        xe is x with K-1 time steps in front: the last K-1 inputs in conv_state

    x                   [B,D] for one token, or [B,D,T]
    conv_state          [N,D,S] with S >= K-1, where N is the number of states: the last S inputs, oldest first. With
                        cache_seqlens it is a ring buffer: the input of position p is at index p mod S
    weight, bias        [D,K], [D]
    activation          as in causal_conv1d
    cache_seqlens       int32 [B]: the new tokens of batch element b are at the positions cache_seqlens[b] + t
    conv_state_indices  int32 [B]: the row of conv_state that belongs to each batch element. A negative number gives y =
                        0 and leaves the state unchanged. All other numbers must differ. None: batch element b has row b

    Returns y with the shape, dtype and layout of x. Not differentiable. Dtypes and errors as in causal_conv1d.

    >>> weight, conv_state = torch.ones(1, 3), torch.zeros(1, 1, 2)
    >>> tokens = [torch.tensor([[1.]]), torch.tensor([[2.]]), torch.tensor([[3.]])]
    >>> [cotangent.causal_conv1d_update(x, conv_state, weight).item() for x in tokens]
    [1.0, 3.0, 6.0]
    >>> conv_state
    tensor([[[2., 3.]]])
    """
    return _update(
        x, conv_state, weight, bias, cache_seqlens, conv_state_indices,
        activation_number("causal_conv1d_update", activation, ("silu",)),
    )  # fmt: skip


def _example(randn: "Callable[..., Tensor]") -> Tensor:
    with torch.no_grad():
        causal_conv1d_update(randn(1, 8), randn(1, 8, 3).detach(), randn(8, 4))
    return causal_conv1d(randn(1, 8, 9), randn(8, 4), randn(8), "silu")
