# SPDX-License-Identifier: Apache-2.0
"""Manifold-constrained hyper-connections: pre, Sinkhorn, post, post_pre. include/cotangent/mhc.h is the manual and has
the formulas."""
from __future__ import annotations

from typing import Any, Callable, Optional

import torch
from torch import Tensor

from ._define import define, gradients_like
from ._options import cast, flag, need_tensors


def _coefficients_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


# ---- pre --------------------------------------------------------------------------------------------------


def _pre_gradients(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Any, inv_rms: Any, h_mix: Any, h_pre: Any, h_post: Any,
    dh_in: Any, dh_post: Any, dh_res_logits: Any, dh_res: Any, hc_eps: float, post_scale: float, sinkhorn_eps: float,
    sinkhorn_iterations: int, _wanted: "list[bool]",
) -> Any:  # fmt: skip
    inputs = (x, phi, alpha, bias, gamma)
    return gradients_like(inputs, _wanted)


_pre_backward = define(
    "mhc_pre_backward(Tensor x, Tensor phi, Tensor alpha, Tensor bias, Tensor? gamma, Tensor inv_rms, Tensor h_mix, "
    "Tensor h_pre, Tensor h_post, Tensor dh_in, Tensor dh_post, Tensor? dh_res_logits, Tensor? dh_res, float hc_eps, "
    "float post_scale, float sinkhorn_eps, int sinkhorn_iterations, bool[] _wanted) "
    "-> (Tensor dx, Tensor dphi, Tensor dalpha, Tensor dbias, Tensor dgamma)",
    _pre_gradients,
    batched=("x", "inv_rms", "h_mix", "h_pre", "h_post", "dh_in", "dh_post", "dh_res_logits", "dh_res", "dx"),
)


def _pre_outputs(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Any, norm_eps: float, hc_eps: float, post_scale: float,
    sinkhorn_eps: float, sinkhorn_iterations: int, _sinkhorn: bool,
) -> Any:  # fmt: skip
    B, T, n, D = x.shape
    dtype = _coefficients_dtype(x)
    square = x.new_empty((B, T, n, n), dtype=dtype)
    h_pre, h_post = x.new_empty((B, T, n), dtype=dtype), x.new_empty((B, T, n), dtype=dtype)
    inv_rms, h_mix = x.new_empty((B, T), dtype=dtype), x.new_empty((B, T, phi.shape[0]), dtype=dtype)
    h_res_logits, h_res = (None, square) if _sinkhorn else (square, None)
    return x.new_empty((B, T, D)), h_post, h_res_logits, h_res, h_pre, inv_rms, h_mix


_pre_forward = define(
    "mhc_pre_forward(Tensor x, Tensor phi, Tensor alpha, Tensor bias, Tensor? gamma, float norm_eps, float hc_eps, "
    "float post_scale, float sinkhorn_eps, int sinkhorn_iterations, bool _sinkhorn) -> (Tensor h_in, Tensor h_post, "
    "Tensor h_res_logits, Tensor h_res, Tensor h_pre, Tensor inv_rms, Tensor h_mix)",
    _pre_outputs,
    _pre_backward,
    batched=("x", "h_in", "h_post", "h_res_logits", "h_res", "h_pre", "inv_rms", "h_mix"),
)


def mhc_pre(
    x: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Optional[Tensor] = None,
    *,
    sinkhorn: bool = True,
    sinkhorn_iterations: int = 20,
    sinkhorn_eps: float = 1e-6,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    post_scale: float = 2.0,
) -> "tuple[Tensor, Tensor, Tensor]":
    """Mixes the n residual streams of each token into the input of a layer, and computes the coefficients of mhc_post,
    as in "mHC: Manifold-Constrained Hyper-Connections" (DeepSeek, 2025, https://arxiv.org/abs/2512.24880).

    x         [B,T,n,D], the residual streams, any strides; on a GPU n <= 8
    phi       [M, n*D] with M = n*n + 2n. The rows are n for pre, n for post and n*n for res, in this order
    alpha     [3]: the factors of pre, post and res
    bias      [M], in the order of the rows of phi
    gamma     [n,D], the weight of the norm. None: ones
    sinkhorn  True: the last result is h_res. False: it is h_res_logits, the input of mhc_sinkhorn
    sinkhorn_iterations, sinkhorn_eps
              iterations and eps of mhc_sinkhorn
    norm_eps  is added to the mean square of x: the eps of the norm
    hc_eps    is added to h_pre, so that no stream has the weight 0
    post_scale
              the limit of h_post, whose values are between 0 and post_scale

    For each token, with flat index k = i*D + d:

        inv_rms = 1 / sqrt(mean_k x[k]^2 + norm_eps)
        z       = alpha[group] * (phi @ (gamma * x).flatten()) * inv_rms + bias
                  group is pre, post or res, by the row of phi
        h_pre   = sigmoid(z_pre) + hc_eps
        h_post  = post_scale * sigmoid(z_post)
        h_in[d] = sum_i h_pre[i] * x[i,d]
        h_res   = mhc_sinkhorn(h_res_logits), where h_res_logits is z_res as [n,n]

    Returns (h_in, h_post, h_res). h_in [B,T,D] is an activation, in the dtype of x: the input of the layer. h_post
    [B,T,n] and h_res [B,T,n,n] are coefficients, as h_pre is: weights of the streams, without an axis D. The rows and
    columns of h_res sum to about 1. phi, alpha, `bias` and gamma are cast to float32 (float64 if x is float64), and
    the coefficients have this dtype. Differentiable once, in all inputs. Raises ValueError or TypeError,
    which name the wrong argument, or NotImplementedError (on a GPU: float64, n > 8).

    >>> x = torch.randn(1, 16, 4, 32)                                         # 4 residual streams of 32 columns
    >>> phi, alpha, bias = torch.randn(24, 128), torch.ones(3), torch.zeros(24)  # 24 = 4 * 4 + 2 * 4
    >>> h_in, h_post, h_res = cotangent.mhc_pre(x, phi, alpha, bias)
    >>> h_in.shape, h_post.shape, h_res.shape
    (torch.Size([1, 16, 32]), torch.Size([1, 16, 4]), torch.Size([1, 16, 4, 4]))
    """
    if not isinstance(x, Tensor):
        need_tensors("mhc_pre", x=x)
    dtype = _coefficients_dtype(x)
    phi, alpha = cast("mhc_pre", "phi", phi, dtype), cast("mhc_pre", "alpha", alpha, dtype)
    bias = cast("mhc_pre", "bias", bias, dtype)
    gamma = None if gamma is None else cast("mhc_pre", "gamma", gamma, dtype)
    h_in, h_post, h_res_logits, h_res, *_ = _pre_forward(
        x, phi, alpha, bias, gamma, norm_eps, hc_eps, post_scale, sinkhorn_eps, sinkhorn_iterations,
        flag("mhc_pre", "sinkhorn", sinkhorn),
    )  # fmt: skip
    return h_in, h_post, h_res if sinkhorn else h_res_logits


# ---- sinkhorn ---------------------------------------------------------------------------------------------

_sinkhorn_backward = define(
    "mhc_sinkhorn_backward(Tensor h_res_logits, Tensor dh_res, float eps, int iterations) -> Tensor dh_res_logits",
    lambda h_res_logits, *others: torch.empty_like(h_res_logits),
    batched=("h_res_logits", "dh_res", "dh_res_logits"),
)
_sinkhorn_forward = define(
    "mhc_sinkhorn_forward(Tensor h_res_logits, float eps, int iterations) -> Tensor h_res",
    lambda h_res_logits, *others: torch.empty_like(h_res_logits),
    _sinkhorn_backward,
    batched=("h_res_logits", "h_res"),
)


def mhc_sinkhorn(h_res_logits: Tensor, iterations: int = 20, eps: float = 1e-6) -> Tensor:
    """Turns the logits h_res_logits [B,T,n,n] into h_res [B,T,n,n], whose rows and columns sum to about 1: a softmax of
    each row, and then columns and rows are divided by their sums in turn.

        h_res = softmax(h_res_logits, dim=-1) + eps
        h_res /= h_res.sum(-2, keepdim=True) + eps
        then iterations-1 times:
            h_res /= h_res.sum(-1, keepdim=True) + eps
            h_res /= h_res.sum(-2, keepdim=True) + eps

    `iterations` is 1 to 4096. Dtypes: float32, on the CPU also float64. Differentiable once, through all iterations.
    Raises ValueError or TypeError, which name the wrong argument, or NotImplementedError (on a GPU: float64, n > 8).

    >>> h_res = cotangent.mhc_sinkhorn(torch.randn(1, 16, 4, 4))
    >>> torch.allclose(h_res.sum(-2), torch.ones(1, 16, 4), atol=1e-4)
    True
    """
    return _sinkhorn_forward(h_res_logits, eps, iterations)


# ---- post -------------------------------------------------------------------------------------------------


def _post_gradients(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor, dy: Any, h_res_is_out_in: int, _wanted: Any) -> Any:
    return gradients_like((x, f, h_post, h_res), _wanted)


_post_backward = define(
    "mhc_post_backward(Tensor x, Tensor f, Tensor h_post, Tensor h_res, Tensor dy, int h_res_is_out_in, bool[] _wanted) "
    "-> (Tensor dx, Tensor df, Tensor dh_post, Tensor dh_res)",
    _post_gradients,
    batched=("x", "f", "h_post", "h_res", "dy", "dx", "df", "dh_post", "dh_res"),
)


def _post_jvp(tangents: "dict[str, Any]", x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor, h_res_is_out_in: int) -> Any:
    dx, df, dh_post, dh_res = (
        torch.zeros_like(value) if tangents[name] is None else tangents[name]
        for name, value in (("x", x), ("f", f), ("h_post", h_post), ("h_res", h_res))
    )
    return _post_forward(dx, df, h_post, h_res, h_res_is_out_in) + _post_forward(x, f, dh_post, dh_res, h_res_is_out_in)


_post_forward = define(
    "mhc_post_forward(Tensor x, Tensor f, Tensor h_post, Tensor h_res, int h_res_is_out_in) -> Tensor y",
    lambda x, *others: torch.empty_like(x),
    _post_backward,
    jvp=_post_jvp,
    batched=("x", "f", "h_post", "h_res", "y"),
)


def mhc_post(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor, *, h_res_is_out_in: bool = False) -> Tensor:
    """Computes the new residual streams y from the old streams x and the output f of the layer. For each token:

        y[o] = h_post[o] * f + sum_i h_res[i,o] * x[i]

    x                [B,T,n,D], the residual streams, as in mhc_pre
    f                [B,T,D], the output of the layer. It is cast to the dtype of x
    h_post           [B,T,n], from mhc_pre, float32 (float64 if x is float64)
    h_res            [B,T,n,n], from mhc_pre, in the dtype of h_post
    h_res_is_out_in  the order of the last two axes of h_res. False: [in,out], and y has the transpose of h_res times x,
                     as in the kernels of DeepSeek and Megatron. True: [out,in], and y has h_res times x, as in the
                     paper (see mhc_pre): the sum is over h_res[o,i] * x[i]. Pass True if the weights were trained with
                     the order of the paper

    Returns y, with the shape and dtype of x. Differentiable once, in all inputs. Raises ValueError or TypeError, which
    name the wrong argument, or NotImplementedError (on a GPU: float64, n > 8).

    >>> x, f = torch.randn(1, 16, 4, 32), torch.randn(1, 16, 32)
    >>> h_post, h_res = torch.ones(1, 16, 4), torch.eye(4).expand(1, 16, 4, 4)
    >>> y = cotangent.mhc_post(x, f, h_post, h_res)
    >>> torch.allclose(y, x + f.unsqueeze(2))   # h_res is the identity: the output is added to each stream
    True
    """
    if not isinstance(x, Tensor):
        need_tensors("mhc_post", x=x)
    return _post_forward(x, cast("mhc_post", "f", f, x.dtype), h_post, h_res, h_res_is_out_in)


# ---- post_pre ---------------------------------------------------------------------------------------------


def _post_pre_gradients(
    x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Any, inv_rms: Any,
    h_mix: Any, h_pre: Any, next_h_post: Any, dh_in: Any, dnext_h_post: Any, dh_res_logits: Any, dnext_h_res: Any, dy: Any, y: Any,
    hc_eps: float, post_scale: float, sinkhorn_eps: float, sinkhorn_iterations: int, h_res_is_out_in: int,
    _wanted: "list[bool]",
) -> Any:  # fmt: skip
    return gradients_like((x, f, h_post, h_res, phi, alpha, bias, gamma), _wanted)


def _post_pre_without_y(*arguments: Any) -> "tuple[Any, ...]":
    """Drops y on a CPU, where the backward computes it again from x and f, which it reads anyway. On a GPU the backward
    reads y. The next layer saves y too, as its x, so y needs no memory of its own."""
    position = 17
    return arguments if arguments[0].is_cuda else (*arguments[:position], None, *arguments[position + 1 :])


_post_pre_backward = define(
    "mhc_post_pre_backward(Tensor x, Tensor f, Tensor h_post, Tensor h_res, Tensor phi, Tensor alpha, Tensor bias, "
    "Tensor? gamma, Tensor inv_rms, Tensor h_mix, Tensor h_pre, Tensor next_h_post, Tensor dh_in, Tensor dnext_h_post, "
    "Tensor? dh_res_logits, Tensor? dnext_h_res, Tensor? dy, Tensor? y, float hc_eps, float post_scale, float sinkhorn_eps, "
    "int sinkhorn_iterations, int h_res_is_out_in, bool[] _wanted) -> (Tensor dx, Tensor df, Tensor dh_post, Tensor dh_res, "
    "Tensor dphi, Tensor dalpha, Tensor dbias, Tensor dgamma)",
    _post_pre_gradients,
    batched=("x", "f", "h_post", "h_res", "inv_rms", "h_mix", "h_pre", "next_h_post", "dh_in", "dnext_h_post", "dh_res_logits",
             "dnext_h_res", "dy", "y", "dx", "df", "dh_post", "dh_res"),
    prepare=_post_pre_without_y,
)  # fmt: skip


def _post_pre_outputs(
    x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Any,
    norm_eps: float, hc_eps: float, post_scale: float, sinkhorn_eps: float, sinkhorn_iterations: int, h_res_is_out_in: int,
    _sinkhorn: bool,
) -> Any:  # fmt: skip
    return torch.empty_like(x), *_pre_outputs(
        x, phi, alpha, bias, gamma, norm_eps, hc_eps, post_scale, sinkhorn_eps, sinkhorn_iterations, _sinkhorn
    )


_post_pre_forward = define(
    "mhc_post_pre_forward(Tensor x, Tensor f, Tensor h_post, Tensor h_res, Tensor phi, Tensor alpha, Tensor bias, "
    "Tensor? gamma, float norm_eps, float hc_eps, float post_scale, float sinkhorn_eps, int sinkhorn_iterations, "
    "int h_res_is_out_in, bool _sinkhorn) -> (Tensor y, Tensor h_in, Tensor next_h_post, Tensor h_res_logits, Tensor next_h_res, "
    "Tensor h_pre, Tensor inv_rms, Tensor h_mix)",
    _post_pre_outputs,
    _post_pre_backward,
    batched=("x", "f", "h_post", "h_res", "y", "h_in", "next_h_post", "h_res_logits", "next_h_res", "h_pre", "inv_rms", "h_mix"),
)


def mhc_post_pre(
    x: Tensor,
    f: Tensor,
    h_post: Tensor,
    h_res: Tensor,
    phi: Tensor,
    alpha: Tensor,
    bias: Tensor,
    gamma: Optional[Tensor] = None,
    *,
    h_res_is_out_in: bool = False,
    sinkhorn: bool = True,
    sinkhorn_iterations: int = 20,
    sinkhorn_eps: float = 1e-6,
    norm_eps: float = 1e-6,
    hc_eps: float = 1e-6,
    post_scale: float = 2.0,
) -> "tuple[Tensor, Tensor, Tensor, Tensor]":
    """mhc_post of a layer and mhc_pre of the next layer in one call, which reads and writes the residual streams once.

        y = mhc_post(x, f, h_post, h_res, h_res_is_out_in=h_res_is_out_in)
        h_in, next_h_post, next_h_res = mhc_pre(y, phi, alpha, bias, gamma, ...)

    x, f, h_post, h_res, h_res_is_out_in
              as in mhc_post. h_res_is_out_in applies to the input h_res only: pass next_h_res to the next
              call unchanged, with the same h_res_is_out_in
    phi, alpha, bias, gamma
              as in mhc_pre, of the next layer

    The other arguments are those of mhc_pre. Returns (y, h_in, next_h_post, next_h_res). The backward keeps the
    gradient of y in float32 (float64 if x is float64). The two calls would round it to the dtype of x. Differentiable
    once, in all inputs. Raises the errors of mhc_post and mhc_pre.

    >>> x, phi, alpha, bias = torch.randn(1, 16, 4, 32), torch.randn(24, 128), torch.ones(3), torch.zeros(24)
    >>> h_in, h_post, h_res = cotangent.mhc_pre(x, phi, alpha, bias)
    >>> f = torch.tanh(h_in)                    # the first layer
    >>> y, h_in, h_post, h_res = cotangent.mhc_post_pre(x, f, h_post, h_res, phi, alpha, bias)
    >>> y.shape, h_in.shape                     # h_in is the input of the second layer
    (torch.Size([1, 16, 4, 32]), torch.Size([1, 16, 32]))
    """
    if not isinstance(x, Tensor):
        need_tensors("mhc_post_pre", x=x)
    dtype = _coefficients_dtype(x)
    f = cast("mhc_post_pre", "f", f, x.dtype)
    phi, alpha = cast("mhc_post_pre", "phi", phi, dtype), cast("mhc_post_pre", "alpha", alpha, dtype)
    bias = cast("mhc_post_pre", "bias", bias, dtype)
    gamma = None if gamma is None else cast("mhc_post_pre", "gamma", gamma, dtype)
    y, h_in, next_h_post, h_res_logits, next_h_res, *_ = _post_pre_forward(
        x, f, h_post, h_res, phi, alpha, bias, gamma, norm_eps, hc_eps, post_scale, sinkhorn_eps, sinkhorn_iterations,
        h_res_is_out_in, flag("mhc_post_pre", "sinkhorn", sinkhorn),
    )  # fmt: skip
    return y, h_in, next_h_post, next_h_res if sinkhorn else h_res_logits


def _example(randn: "Callable[..., Tensor]") -> Tensor:
    x, phi, alpha, bias = randn(1, 3, 4, 16), randn(24, 64), randn(3), randn(24)
    h, h_post, h_res = mhc_pre(x, phi, alpha, bias)
    y, h, h_post, h_res = mhc_post_pre(x, h, h_post, h_res, phi, alpha, bias)
    return mhc_post(y, h, h_post, h_res)
