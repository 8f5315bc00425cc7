# SPDX-License-Identifier: Apache-2.0
"""Faults that kernels on a GPU report after a call."""
from __future__ import annotations

from typing import Union

import torch

from .. import _C


def check_index_data(device: "Union[torch.device, str, None]" = None) -> None:
    """Reports invalid index data on a GPU, for example decreasing cu_seqlens or a state index out of range. Calls do
    not check index data on a GPU: kernels clamp or skip invalid values. check_index_data waits for the GPU. Then it
    raises ValueError with the first fault that a kernel has found since the last check.

    `device` is the GPU to check, by default the current one. For a CPU the function does nothing, because each call
    checks its index data.

    >>> cotangent.check_index_data("cpu")  # on a GPU: after a step, without an argument
    """
    where = torch.device("cuda" if device is None else device)
    if where.type != "cuda":
        return
    number = torch.cuda.current_device() if where.index is None else where.index
    torch.cuda.synchronize(number)
    _C.check_cuda(number)
