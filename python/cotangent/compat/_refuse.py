# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from typing import Any, Tuple

from torch import Tensor

from ..ops._options import need_tensors


def refuse(function: str, **arguments: Any) -> None:
    """NotImplementedError for the first argument that is set: part of the signature, but no kernel serves it."""
    for name, value in arguments.items():
        if value is not None and value is not False and not (isinstance(value, (int, float)) and value == 0):
            raise NotImplementedError(f"{function}: {name} is not served by cotangent")


def renamed(function: str, error: Exception, **names: str) -> Exception:
    """The error with the argument names of `function` in place of those of the op that it calls: {the op's: its own}."""
    text = re.sub(r"^\w+: ", "", str(error))
    text = re.sub(rf"\b({'|'.join(names)})\b", lambda found: names[found[0]], text)
    return type(error)(f"{function}: {text}")


def same_device(function: str, **tensors: Any) -> None:
    """ValueError for the first tensor that is not on the device of the very first."""
    first, *others = tensors
    for name in others:
        if tensors[name] is not None and tensors[name].device != tensors[first].device:
            raise ValueError(f"{function}: {name} is on {tensors[name].device}, {first} is on {tensors[first].device}")


def unpack(function: str, name: str, packed: Any, axis: int, count: int) -> "Tuple[Tensor, ...]":
    """The tensors [...,H,d] that lie along an axis of one."""
    need_tensors(function, **{name: packed})
    if not packed.is_floating_point():
        raise TypeError(f"{function}: {name} has dtype {packed.dtype}, expected a floating-point dtype")
    if packed.dim() != axis + 3 or packed.shape[axis] != count:
        raise ValueError(
            f"{function}: {name} has shape {tuple(packed.shape)}, expected {axis + 3} axes and {count} at axis {axis}"
        )
    return packed.unbind(axis)
