# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from typing import Any, Tuple

from torch import Tensor

from ..ops._options import need_tensors, rename_arguments


def refuse(function: str, **arguments: Any) -> None:
    """Raises NotImplementedError for the first argument that is set. These arguments are in the signature, but no
    kernel supports them."""
    for name, value in arguments.items():
        if value is not None and value is not False and not (isinstance(value, (int, float)) and value == 0):
            raise NotImplementedError(f"{function}: {name} is not supported by cotangent")


def renamed(function: str, error: Exception, **names: str) -> Exception:
    """The error with the argument names of `function` instead of those of the op. names: {the op's name: its own
    name}."""
    text = re.sub(r"^\w+: ", "", str(error))
    return type(error)(f"{function}: {rename_arguments(text, names)}")


def same_device(function: str, **tensors: Any) -> None:
    """Raises ValueError for the first tensor whose device is not that of the first tensor in `tensors`."""
    first, *others = tensors
    for name in others:
        if tensors[name] is not None and tensors[name].device != tensors[first].device:
            raise ValueError(f"{function}: {name} is on {tensors[name].device}, {first} is on {tensors[first].device}")


def unpack(function: str, name: str, packed: Any, axis: int, count: int) -> "Tuple[Tensor, ...]":
    """The tensors [...,H,d] along an axis of a packed tensor."""
    need_tensors(function, **{name: packed})
    if not packed.is_floating_point():
        raise TypeError(f"{function}: {name} has dtype {packed.dtype}, expected a floating-point dtype")
    if packed.dim() != axis + 3 or packed.shape[axis] != count:
        raise ValueError(
            f"{function}: {name} has shape {tuple(packed.shape)}, expected {axis + 3} axes and {count} at axis {axis}"
        )
    return packed.unbind(axis)
