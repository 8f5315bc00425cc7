# SPDX-License-Identifier: Apache-2.0
"""Dropout fused with bias, activation and residual. include/cotangent/dropout.h is the manual. It has the formulas and
the rule that generates masks."""
from __future__ import annotations

from typing import Any, Callable, Optional

import torch
from torch import Tensor

from .. import _C
from ._define import define, gradients_like
from ._options import activation_number, cast, flag, need_tensors, number, random_seed, seed_number


def _gradients(
    dy: Tensor, x: Any, bias: Any, mask: Any, mask_bits: Any, seed_tensor: Any, offset_tensor: Any, activation: int,
    p: float, scale: float, seed: int, offset: int, _wanted: "list[bool]",
) -> Any:  # fmt: skip
    return gradients_like((dy, bias), _wanted)


_backward = define(
    "dropout_backward(Tensor dy, Tensor? x, Tensor? bias, Tensor? mask, Tensor? mask_bits, Tensor? seed_tensor, "
    "Tensor? offset_tensor, int activation, float p, float scale, SymInt seed, SymInt offset, bool[] _wanted) "
    "-> (Tensor dx, Tensor dbias)",
    _gradients,
)


def _outputs(
    x: Tensor, bias: Any, residual: Any, mask: Any, mask_bits: Any, seed_tensor: Any, offset_tensor: Any,
    activation: int, p: float, scale: float, seed: int, offset: int, _export: int,
) -> Any:  # fmt: skip
    mask_out = x.new_empty(x.shape, dtype=torch.uint8) if _export == 1 else None
    bits = x.new_empty((*x.shape[:-1], (x.shape[-1] + 7) // 8), dtype=torch.uint8) if _export == 2 else None
    return torch.empty_like(x), mask_out, bits


def _jvp(
    tangents: "dict[str, Any]", x: Tensor, bias: Any, residual: Any, mask: Any, mask_bits: Any, seed_tensor: Any,
    offset_tensor: Any, activation: int, p: float, scale: float, seed: int, offset: int, _export: int,
) -> Any:  # fmt: skip
    dx, dbias, dy = tangents["x"], tangents["bias"], tangents["residual"]
    if dx is not None or dbias is not None:
        dz = torch.zeros_like(x) if dx is None else dx
        dz = dz if dbias is None else dz + dbias.to(x.dtype)
        # The op is elementwise, so its Jacobian is diagonal and equal to its transpose.
        dy_x = _backward(
            dz, x if activation else None, bias if activation else None, mask, mask_bits, seed_tensor, offset_tensor,
            activation, p, scale, seed, offset, [True, False],
        )[0]  # fmt: skip
        dy = dy_x if dy is None else dy + dy_x
    return dy, None, None


_forward = define(
    "dropout_forward(Tensor x, Tensor? bias, Tensor? residual, Tensor? mask, Tensor? mask_bits, Tensor? seed_tensor, "
    "Tensor? offset_tensor, int activation, float p, float scale, SymInt seed, SymInt offset, int _export) "
    "-> (Tensor y, Tensor mask_out, Tensor mask_bits_out)",
    _outputs,
    _backward,
    passthrough={"residual": "y"},
    jvp=_jvp,
    unsaved=lambda x, bias, residual, mask, bits, seed, offset, activation, *others: () if activation else ("x",),
)

_EXPORTS = {None: 0, "bytes": 1, "bits": 2}


def dropout(
    x: Tensor,
    p: float,
    training: bool = True,
    *,
    bias: Optional[Tensor] = None,
    activation: Optional[str] = None,
    residual: Optional[Tensor] = None,
    mask: Optional[Tensor] = None,
    mask_bits: Optional[Tensor] = None,
    scale: Optional[float] = None,
    seed: Optional[int] = None,
    offset: int = 0,
    seed_tensor: Optional[Tensor] = None,
    offset_tensor: Optional[Tensor] = None,
    return_mask: Optional[str] = None,
) -> Any:
    """Dropout with an optional bias and activation before it, and an optional residual after it:

        y = scale * m * act(x + bias) + residual
        m is the mask: 1 for a kept element, 0 for a dropped one

    m is generated from `seed` and `offset` and not stored, unless you pass `mask` or mask_bits. The backward generates
    it again. include/cotangent/dropout.h has the rule (Philox).

    x, residual    [..., D], any strides, 1 to 6 axes. If their dtypes differ, both are cast as in PyTorch's addition
    p              the probability of dropping an element, 0 to 1, without a default. cotangent.attention calls it dropout_p
    training       False: `y = act(x + bias) + residual`. p, `mask`, mask_bits and `scale` are ignored
    bias           [D]
    activation     None, "relu", "silu" or "swish" (the same), "gelu" or "gelu_erf" (the same), or "gelu_tanh"
    mask           uint8 or bool, with the shape of x. 1 or True: the element is kept. 0 or False: it is dropped. Of
                   other numbers only the lowest bit counts
    mask_bits      uint8 [..., ceil(D/8)]: column d is kept where bit d%8 of byte d/8 is 1
    scale          None: 1/(1-p) with a given mask, and dropout_scale(p) with a generated one. 0: everything is dropped
    seed, offset   determine the generated mask. Different offsets give independent masks: if you pass your own seed,
                   use another offset in each step and layer. Without `seed` and seed_tensor, a seed is drawn from
                   PyTorch's generator of the device of x. torch.manual_seed controls this seed, and each replay of a
                   CUDA graph generates another mask
    seed_tensor, offset_tensor     int32 [2] (low word, high word), on the device of x. They are added to `seed` and
                   `offset` when the work runs
    return_mask    "bytes" or "bits": the result is (y, m). "bytes" returns m in the form of `mask`, "bits" in the form
                   of mask_bits. To get the same y from m in another call, pass m as `mask` or mask_bits, and
                   scale=dropout_scale(p), which is the scale of a generated mask

    A dropped element is exactly 0 before the residual is added. Differentiable once, in x, `bias` and `residual`.
    Dtypes: float32, float16, bfloat16; on the CPU also float64. Raises ValueError or TypeError, which name the wrong
    argument, or NotImplementedError (float64 on a GPU).

    >>> x, residual, bias = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8)
    >>> y, m = cotangent.dropout(x, 0.5, bias=bias, activation="gelu", residual=residual, return_mask="bytes")
    >>> torch.equal(y[m == 0], residual[m == 0])
    True
    """
    need_tensors("dropout", x=x)
    if return_mask not in tuple(_EXPORTS):
        raise ValueError(f"dropout: return_mask is {return_mask!r}, expected None, 'bytes' or 'bits'")
    if residual is not None:
        need_tensors("dropout", residual=residual)
        if residual.dtype != x.dtype and not x.is_complex():
            wide = torch.promote_types(x.dtype, residual.dtype)
            x, residual = x.to(wide), cast("dropout", "residual", residual, wide)
    training = flag("dropout", "training", training)
    if scale == 0 and training:  # in the C struct 0 means "not given", so this is computed with p = 1 and the mask of p
        with torch.no_grad():
            _, kept = dropout(
                x, p, mask=mask, mask_bits=mask_bits, seed=seed, offset=offset, seed_tensor=seed_tensor,
                offset_tensor=offset_tensor, return_mask=return_mask or "bits",
            )  # fmt: skip
        y = dropout(x, 1.0, bias=bias, activation=activation, residual=residual)
        return y if return_mask is None else (y, kept)
    if not training:
        p, mask, mask_bits, scale = 0.0, None, None, None
    drawn = mask is None and mask_bits is None
    if drawn and seed is None and seed_tensor is None and number("dropout", "p", p) > 0:
        seed_tensor = random_seed(x.device)
    y, mask_out, bits_out = _forward(
        x, bias, residual, mask, mask_bits, seed_tensor, offset_tensor, activation_number("dropout", activation), p,
        scale or 0.0, seed_number(seed), offset, _EXPORTS[return_mask],
    )  # fmt: skip
    return y if return_mask is None else (y, mask_out if return_mask == "bytes" else bits_out)


def dropout_scale(p: float) -> float:
    """Returns the factor that multiplies the kept elements if the mask is generated: 65536 / (65536 - round(65536 p)),
    and 0 for p = 1. It is 1/(1-p) for p rounded to a multiple of 1/65536, because the mask has 16 random bits for each
    element.

    >>> cotangent.dropout_scale(0.5)
    2.0
    """
    if not 0 <= number("dropout_scale", "p", p) <= 1:
        raise ValueError(f"dropout_scale: p is {p}, expected 0 to 1")
    return _C.dropout_scale(p)


def _example(randn: "Callable[..., Tensor]") -> Tensor:
    return dropout(randn(4, 8), 0.5, bias=randn(8), activation="gelu")
