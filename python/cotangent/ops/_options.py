# SPDX-License-Identifier: Apache-2.0
"""What several functions take alike."""
from __future__ import annotations

from typing import Optional, Sequence

import torch
from torch import Tensor

# cot_activation
_ACTIVATIONS = {"silu": 1, "relu": 2, "gelu_tanh": 3, "gelu": 4}
_OTHER_NAMES = {"swish": "silu"}


def activation_number(name: Optional[str], served: Sequence[str] = tuple(_ACTIVATIONS)) -> int:
    """The library's number of an activation; ValueError for a name that is not among those served."""
    if name is None:
        return 0
    known = _OTHER_NAMES.get(name, name)
    if known not in served:
        raise ValueError(f"activation is {name!r}, expected None or one of {', '.join(served)}")
    return _ACTIVATIONS[known]


def random_seed(device: torch.device) -> Tensor:
    """A seed for the library's own generator from PyTorch's, in the device's memory: nothing waits for it, and a
    captured graph draws another at each replay."""
    return torch.randint(-(2**31), 2**31 - 1, (2,), dtype=torch.int32, device=device)
