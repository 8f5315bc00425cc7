# SPDX-License-Identifier: Apache-2.0
"""Cotangent: kernels for training sequence models, forward and backward, as PyTorch ops.

docs/guide/python.md is the manual."""
from typing import Any

try:
    import torch as _torch  # first, so that cotangent shares torch's OpenMP runtime

    if tuple(int(part) for part in _torch.__version__.split(".")[:2]) < (2, 4):
        raise ImportError(f"torch is {_torch.__version__}, expected 2.4 or later")
    from ._C import version as __version__
    from .modules import Attention, BiasDropoutResidual, CausalConv1d, HyperConnection
    from .ops.attention import attention, attention_varlen
    from .ops.causal_conv1d import causal_conv1d, causal_conv1d_update
    from .ops.causal_conv1d_dense import causal_conv1d_dense
    from .ops.dropout import dropout, dropout_scale
    from .ops.mhc import mhc_post, mhc_pre, mhc_sinkhorn
    from .ops.queue import check
except ImportError as error:  # raised at the first use, so that python -m cotangent.doctor can start and explain it
    _missing = error

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"cotangent cannot be used here: {_missing} (python -m cotangent.doctor)") from _missing


__all__ = [
    "Attention",
    "BiasDropoutResidual",
    "CausalConv1d",
    "HyperConnection",
    "__version__",
    "attention",
    "attention_varlen",
    "causal_conv1d",
    "causal_conv1d_dense",
    "causal_conv1d_update",
    "check",
    "dropout",
    "dropout_scale",
    "mhc_post",
    "mhc_pre",
    "mhc_sinkhorn",
]
