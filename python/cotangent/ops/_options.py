# SPDX-License-Identifier: Apache-2.0
"""Checks and conversions of arguments that several functions share."""
from __future__ import annotations

import re
from typing import Any, Mapping, Optional, Sequence

import torch
from torch import Tensor


def wrong_type(call: str, name: str, value: Any, expected: str) -> TypeError:
    """The exception for an argument with a wrong type."""
    found = "None" if value is None else f"a {type(value).__name__}"
    return TypeError(f"{call}: {name} is {found}, expected {expected}")


def is_tensor(value: Any) -> bool:
    """Whether torch accepts the value as a tensor. torch.fx traces with objects that only behave like tensors."""
    return isinstance(value, Tensor) or hasattr(type(value), "__torch_function__")


def need_tensors(call: str, **values: Any) -> None:
    """Raises TypeError for the first value that is not a dense tensor."""
    for name, value in values.items():
        if not is_tensor(value):
            raise wrong_type(call, name, value, "a Tensor")
        if isinstance(value, Tensor) and value.layout is not torch.strided:
            raise TypeError(f"{call}: {name} has layout {value.layout}, expected a dense tensor")


def flag(call: str, name: str, value: Any) -> bool:
    """Checks an argument that is True or False."""
    if value is not True and value is not False:
        if value is None or not hasattr(type(value), "__bool__"):  # strings and lists have no __bool__
            raise wrong_type(call, name, value, "True or False")
        value = bool(value)
    return value


def number(call: str, name: str, value: Any) -> Any:
    """Checks that an argument is a number, for arguments that Python compares before the library checks them."""
    if not hasattr(type(value), "__float__"):
        raise wrong_type(call, name, value, "a number")
    return value


def pair(call: str, name: str, value: Any) -> Any:
    """Checks an argument that is a pair of numbers."""
    try:
        first, second = value
    except (TypeError, ValueError):
        raise TypeError(f"{call}: {name} is {value!r}, expected a pair (left, right)") from None
    return first, second


def rename_arguments(message: str, names: "Mapping[str, str]") -> str:
    """The message with other names of arguments. names: {the name in the message: the name of the caller's argument}."""
    return re.sub(rf"\b({'|'.join(names)})\b", lambda found: names[found[0]], message)


# The library's names of dtypes.
_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16", "f64": "float64", "i32": "int32", "i64": "int64",
           "u8": "uint8"}  # fmt: skip


def with_python_names(error: Exception) -> Exception:
    """An error of the library with the names of Python: `attention: k has dtype torch.float16` for `attention_forward: k
    has dtype f16`."""
    text = re.sub(r"(?<![:\w])([a-z]\w*)_forward: ", r"\1: ", str(error))
    text = re.sub(rf"\b({'|'.join(_DTYPES)})\b", lambda found: f"torch.{_DTYPES[found[0]]}", text)
    return error if text == str(error) else type(error)(text)


def cast(call: str, name: str, value: Any, dtype: torch.dtype) -> Tensor:
    """Casts a tensor of real numbers to `dtype`."""
    if isinstance(value, Tensor) and value.dtype == dtype and not dtype.is_complex:
        return value
    need_tensors(call, **{name: value})
    if value.is_complex():
        raise TypeError(f"{call}: {name} has dtype {value.dtype}, expected real numbers")
    return value.to(dtype)


# cot_activation
_ACTIVATIONS = {"silu": 1, "relu": 2, "gelu_tanh": 3, "gelu": 4}
_ALIASES = {"swish": "silu", "gelu_erf": "gelu"}


def activation_number(call: str, name: Optional[str], supported: Sequence[str] = tuple(_ACTIVATIONS)) -> int:
    """The library's number of an activation. Raises ValueError for a name that is neither in `supported` nor an alias of
    a name in it."""
    if name is None:
        return 0
    known = _ALIASES.get(name, name) if isinstance(name, str) else None
    if known not in supported:
        names = [*supported, *(alias for alias, meaning in _ALIASES.items() if meaning in supported)]
        wrong = ValueError if isinstance(name, str) else TypeError
        raise wrong(f"{call}: activation is {name!r}, expected None or one of {', '.join(names)}")
    return _ACTIVATIONS[known]


def seed_number(seed: Optional[int]) -> int:
    """A seed as a signed number of 64 bits, which the schemas of ops need. None gives 0."""
    if seed is None or not isinstance(seed, int) or not 2**63 <= seed < 2**64:
        return seed or 0
    return seed - 2**64


def random_seed(device: torch.device) -> Tensor:
    """A seed for the library's generator, drawn from PyTorch's generator in device memory. There is no synchronisation,
    and a captured graph draws a new seed at each replay."""
    return torch.randint(-(2**31), 2**31 - 1, (2,), dtype=torch.int32, device=device)


def silu_slope(z: Tensor) -> Tensor:
    """The derivative of SiLU at z."""
    s = torch.sigmoid(z)
    return s * (1 + z * (1 - s))
