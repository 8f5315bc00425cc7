# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from typing import Any


def refuse(function: str, **arguments: Any) -> None:
    """NotImplementedError for the first argument that is set: part of the signature, but no kernel serves it."""
    for name, value in arguments.items():
        if value is not None and value is not False and not (isinstance(value, (int, float)) and value == 0):
            raise NotImplementedError(f"{function}: {name} is not served by cotangent")
