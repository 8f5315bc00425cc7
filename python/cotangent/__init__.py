# SPDX-License-Identifier: Apache-2.0
"""Cotangent: kernels for training sequence models, forward and backward, as PyTorch ops.

Functions: `attention`, `attention_varlen`, `causal_conv1d`, `causal_conv1d_update`, `causal_conv1d_dense`, `dropout`,
`dropout_scale`, `mhc_pre`, `mhc_sinkhorn`, `mhc_post`, `mhc_post_pre`. `check_index_data` reports invalid index data on
a GPU.

Layers (`torch.nn.Module`): `Attention`, `BiasDropoutResidual`, `CausalConv1d`, `HyperConnection`,
`HyperConnectionStack`, `LinearDropoutResidual`, `MambaInProjConv1d`. `HyperConnection(..., defer_post=True)` returns a
`PendingPost`.

Import these modules separately: `cotangent.compat`, `cotangent.distributed`, `cotangent.integrations.transformers`,
`cotangent.integrations.dtensor`.

The docstrings are the reference. Their examples begin with `import torch, cotangent`, those of `cotangent.compat` with
`import torch, cotangent.compat`. docs/guide/python.md is the guide. The C headers in include/cotangent have all
formulas, also those of the gradients. Such paths are those of the source repository. "Differentiable once" means that
the gradients cannot be differentiated again.
Letters of shapes:

B, T, D   batch; tokens (time steps); channels
H, Hkv    heads of q; heads of k and v
d, d_v    size of a head of q and k; size of a head of v
Tq, Tk    tokens of q; tokens of k and v
K         filter width of a convolution
n, M      residual streams of hyper-connections; M = n*n + 2n
N         number of packed sequences; in a cache of states, the number of its entries"""
from typing import Any

_functions: "dict[str, Any]" = {}
try:
    import torch as _torch  # first, so that cotangent shares torch's OpenMP runtime

    if tuple(int(part) for part in _torch.__version__.split(".")[:2]) < (2, 4):
        raise ImportError(f"torch is {_torch.__version__}, expected 2.4 or later")
    from ._C import version as __version__
    from .layers import (
        Attention,
        BiasDropoutResidual,
        CausalConv1d,
        HyperConnection,
        HyperConnectionStack,
        LinearDropoutResidual,
        MambaInProjConv1d,
        PendingPost,
    )
    from .ops import functions as _functions
    from .ops._queue import check_index_data

    globals().update(_functions)  # the generated __init__.pyi has them for type checkers
    from .integrations import flops as _flops, torch_attention as _torch_attention

    _torch_attention._register()
    _flops._register()
except ImportError as error:  # raised at the first use, so that python -m cotangent.doctor can start and explain it
    _missing = error

    def __getattr__(name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(f"cotangent cannot be used here: {_missing} (python -m cotangent.doctor)") from _missing


__all__ = [
    "Attention", "BiasDropoutResidual", "CausalConv1d", "HyperConnection", "HyperConnectionStack",
    "LinearDropoutResidual", "MambaInProjConv1d", "PendingPost", "__version__", "check_index_data", *_functions,
]  # fmt: skip
