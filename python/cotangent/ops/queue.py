# SPDX-License-Identifier: Apache-2.0
"""What the device has to say after a call."""
from __future__ import annotations

from typing import Union

import torch

from .. import _C


def check(device: "Union[torch.device, str, None]" = None) -> None:
    """Waits for what a GPU was given to do, and raises ValueError with the first fault that a kernel has met in index
    data (cu_seqlens out of order, a state index out of range) since the last check: the host does not look at index
    data on a GPU, so that kernels clamp or skip what is wrong in it. device: the current one unless given; on the CPU
    index data is looked at before a call, and there is nothing to check."""
    where = torch.device("cuda" if device is None else device)
    if where.type != "cuda":
        return
    number = torch.cuda.current_device() if where.index is None else where.index
    torch.cuda.synchronize(number)
    _C.check_cuda(number)
