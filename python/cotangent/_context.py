# SPDX-License-Identifier: Apache-2.0
"""The active blocks of cotangent.distributed.context_parallel. The layers check them without importing torch.distributed."""
from __future__ import annotations

from typing import Any

contexts: "list[Any]" = []  # the innermost block is the last


def refuse_in_context_parallel(name: str, function: str) -> None:
    """Raises NotImplementedError inside context_parallel: `name` would use only the tokens of its own rank."""
    if contexts:
        raise NotImplementedError(
            f"{name}: not supported inside context_parallel, where it would use only the tokens of this rank; expected "
            f"cotangent.distributed.{function}"
        )
