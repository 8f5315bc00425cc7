# SPDX-License-Identifier: Apache-2.0
"""FLOP formulas of cotangent's ops for torch.utils.flop_counter.FlopCounterMode. Importing cotangent registers them.

The counts follow PyTorch's rules: a multiplication and an addition of a product are 2, elementwise work is 0, and masks
do not lower the count of attention. With packed sequences each sequence counts with its own length, if the lengths are
known. The backward of attention has 5 products and the forward 2.

>>> from torch.utils.flop_counter import FlopCounterMode
>>> q, k, v = torch.randn(3, 1, 100, 4, 64)
>>> with FlopCounterMode(display=False) as counter:
...     out = cotangent.attention(q, k, v)
>>> counter.get_total_flops()                # 2 products, 2 * 100 * 100 * 4 * 64 each
10240000
"""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..ops._define import registered_ops


def _pairs(q: Tensor, k: Tensor, cu_q: Any, cu_k: Any, max_q: int, max_k: int) -> int:
    """Pairs of a query and a key, over the batch."""
    if cu_q is None:
        return q.shape[0] * q.shape[1] * k.shape[1]
    if cu_q.is_meta or isinstance(cu_q, torch._subclasses.FakeTensor):
        return (cu_q.shape[0] - 1) * max_q * max_k  # the values are not known
    return int((cu_q.diff().long() * cu_k.diff().long()).sum())


def _attention(q: Tensor, k: Tensor, v: Tensor, cu_q: Any = None, cu_k: Any = None, *others: Any, **ignored: Any) -> int:
    max_q, max_k = others[16:18] if len(others) > 17 else (0, 0)
    return 2 * q.shape[-2] * _pairs(q, k, cu_q, cu_k, max_q, max_k) * (q.shape[-1] + v.shape[-1])


def _attention_backward(q: Tensor, k: Tensor, v: Tensor, cu_q: Any = None, cu_k: Any = None, *others: Any,
                        **ignored: Any) -> int:  # fmt: skip
    max_q, max_k = others[16:18]
    return 2 * q.shape[-2] * _pairs(q, k, cu_q, cu_k, max_q, max_k) * (3 * q.shape[-1] + 2 * v.shape[-1])


def _wanted(arguments: Any, *positions: int) -> int:
    """How many of the gradients at these positions the call computes."""
    return sum(arguments[-1][position] for position in positions)


def _conv(x: Tensor, weight: Tensor, *others: Any, **ignored: Any) -> int:
    return 2 * x.numel() * weight.shape[-1]


def _conv_backward(x: Tensor, weight: Tensor, *others: Any, **ignored: Any) -> int:
    return _conv(x, weight) * _wanted(others, 0, 1)


def _conv_backward_into(x: Tensor, weight: Tensor, *others: Any, **ignored: Any) -> int:
    return _conv(x, weight) * (1 + _wanted(others, 0))  # dx is always computed


def _update(x: Tensor, conv_state: Tensor, weight: Tensor, *others: Any, **ignored: Any) -> int:
    return 2 * x.numel() * weight.shape[-1]


def _dense(x: Tensor, weight: Tensor, *others: Any, **ignored: Any) -> int:
    return 2 * x.shape[0] * x.shape[2] * weight.numel()


def _dense_backward(x: Tensor, weight: Tensor, *others: Any, **ignored: Any) -> int:
    return _dense(x, weight) * _wanted(others, 0, 1)


def _mhc_pre(x: Tensor, phi: Tensor, *others: Any, **ignored: Any) -> int:
    return 2 * x.shape[0] * x.shape[1] * phi.numel() + 2 * x.numel()


def _mhc_pre_backward(x: Tensor, phi: Tensor, *others: Any, **ignored: Any) -> int:
    products = 2 * x.shape[0] * x.shape[1] * phi.numel()
    return products * _wanted(others, 0, 1) + 2 * x.numel() * (1 + _wanted(others, 0))


def _mhc_post(x: Tensor, *others: Any, **ignored: Any) -> int:
    return 2 * x.numel() * (x.shape[2] + 1)


def _mhc_post_backward(x: Tensor, *others: Any, **ignored: Any) -> int:
    n = x.shape[2]
    return 2 * x.numel() * (n * _wanted(others, 0, 3) + _wanted(others, 1, 2))


def _mhc_post_pre(x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor, phi: Tensor, *others: Any, **ignored: Any) -> int:
    return _mhc_post(x) + _mhc_pre(x, phi)


def _mhc_post_pre_backward(
    x: Tensor, f: Tensor, h_post: Tensor, h_res: Tensor, phi: Tensor, *others: Any, **ignored: Any
) -> int:
    """Does not count the second computation of y on a CPU. g, the gradient of y, is needed for the gradients of post's
    inputs."""
    n, products = x.shape[2], 2 * x.shape[0] * x.shape[1] * phi.numel()
    needs_g = min(1, _wanted(others, 0, 1, 2, 3))
    pre = products * (needs_g + _wanted(others, 4)) + 2 * x.numel() * (1 + needs_g)
    return pre + 2 * x.numel() * (n * _wanted(others, 0, 3) + _wanted(others, 1, 2))


_FORMULAS = {
    "attention_forward": _attention,
    "attention_backward": _attention_backward,
    "causal_conv1d_forward": _conv,
    "causal_conv1d_backward": _conv_backward,
    "causal_conv1d_backward_into": _conv_backward_into,
    "causal_conv1d_update": _update,
    "causal_conv1d_dense_forward": _dense,
    "causal_conv1d_dense_backward": _dense_backward,
    "mhc_pre_forward": _mhc_pre,
    "mhc_pre_backward": _mhc_pre_backward,
    "mhc_post_forward": _mhc_post,
    "mhc_post_backward": _mhc_post_backward,
    "mhc_post_pre_forward": _mhc_post_pre,
    "mhc_post_pre_backward": _mhc_post_pre_backward,
}


def _register() -> bool:
    """Registers the formulas. Returns False if this torch has no registry."""
    try:
        from torch.utils.flop_counter import flop_registry, register_flop_formula
    except ImportError:
        return False
    for name, formula in _FORMULAS.items():
        op = getattr(registered_ops, name)
        if op not in flop_registry:
            registered: Any = register_flop_formula(op, get_raw=True)
            registered(formula)
    return True
