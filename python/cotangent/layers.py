# SPDX-License-Identifier: Apache-2.0
"""Layers that models build from the functions."""
from __future__ import annotations

from typing import Any, Iterable, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from .modules import CausalConv1d, HyperConnection, Unmixed
from .ops.dropout import dropout


class LinearDropoutResidual(nn.Linear):
    """residual + dropout(act(linear(x))), the end of an attention or MLP block. The bias, the activation, the dropout and
    the residual are one pass over the product.

    Parameters and state_dict are those of torch.nn.Linear. In eval mode nothing is dropped."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        p: float = 0.1,
        *,
        bias: bool = True,
        activation: Optional[str] = None,
        device: Any = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.p, self.activation = p, activation

    def forward(self, x: Tensor, residual: Optional[Tensor] = None) -> Tensor:
        """x [..., in_features], residual [..., out_features]."""
        y: Tensor = dropout(nn.functional.linear(x, self.weight), self.p, self.training, bias=self.bias,
                            activation=self.activation, residual=residual)  # fmt: skip
        return y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}, activation={self.activation}"


class MambaFront(nn.Module):
    """The front of a Mamba block: a projection, and a causal convolution over some of its columns.

    x [B,T,D] -> the parts of the projection [B,T,size], in its order, one of them convolved. `before` and `after` are the
    sizes of the parts in front of the convolved columns and behind them:

        Mamba    MambaFront(D, inner, after=[inner])                                 -> x, z
        Mamba-2  MambaFront(D, inner + 2 * groups * state, before=[inner], after=[heads])    -> z, xBC, dt

    The convolution reads the columns of the projection without a copy. Parameters: in_proj.weight, conv1d.weight
    [conv_dim, width] and conv1d.bias. load_state_dict reads these names from the state_dict of a Mamba layer, also with a
    weight [conv_dim,1,width]. The layer's other parameters need strict=False."""

    def __init__(
        self,
        dim: int,
        conv_dim: int,
        *,
        before: Sequence[int] = (),
        after: Sequence[int] = (),
        width: int = 4,
        bias: bool = False,
        conv_bias: bool = True,
        activation: Optional[str] = "silu",
        device: Any = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        self.sizes, self.convolved = [*before, conv_dim, *after], len(before)
        self.in_proj = nn.Linear(dim, sum(self.sizes), bias=bias, device=device, dtype=dtype)
        self.conv1d = CausalConv1d(conv_dim, width, bias=conv_bias, activation=activation, channel_last=True, device=device,
                                   dtype=dtype)  # fmt: skip

    def forward(self, x: Tensor, *, return_final_state: bool = False, **options: Any) -> "Tuple[Tensor, ...]":
        """options: initial_state, seq_idx and cu_seqlens of cotangent.causal_conv1d. With return_final_state the last
        result is the state of the convolution [B, conv_dim, width-1]. step takes it as its conv_state:

            *parts, state = front(prompt, return_final_state=True)
            with torch.no_grad():
                parts = front.step(token, state)    # token [B,D]; updates state
        """
        parts = list(self.in_proj(x).split(self.sizes, -1))
        result = self.conv1d(parts[self.convolved], return_final_state=return_final_state, **options)
        parts[self.convolved] = result[0] if return_final_state else result
        return (*parts, result[1]) if return_final_state else tuple(parts)

    def step(self, x: Tensor, conv_state: Tensor, **options: Any) -> "Tuple[Tensor, ...]":
        """Decodes one token: x [B,D] -> the parts [B,size]. conv_state [N, conv_dim, S >= width-1] is updated. options:
        those of cotangent.causal_conv1d_update."""
        parts = list(self.in_proj(x).split(self.sizes, -1))
        parts[self.convolved] = self.conv1d.step(parts[self.convolved], conv_state, **options)
        return tuple(parts)


class HyperConnectionStack(nn.Module):
    """Layers that are connected by hyper-connections: x [B,T,D] -> [B,T,D].

    Each layer is any module from [B,T,D] to [B,T,D], without a residual of its own. The input is expanded to n streams,
    each layer is wrapped in HyperConnection, and the streams are summed at the end. Initially each stream is about
    what a residual network computes. The result is the sum of n streams, so it is about n times as large. A norm usually
    follows.

    load_state_dict(..., strict=False) also reads the checkpoint of a torch.nn.ModuleList of the layers."""

    def __init__(
        self, layers: Iterable[nn.Module], dim: int, streams: int = 4, *, sinkhorn_iterations: int = 20, device: Any = None
    ) -> None:
        super().__init__()
        self.streams = streams
        self.layers = nn.ModuleList(
            HyperConnection(layer, dim, streams, sinkhorn_iterations=sinkhorn_iterations, device=device) for layer in layers
        )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        for name in [name for name in state_dict if name.startswith(prefix)]:
            rest = name[len(prefix) :]
            if rest.split(".")[0].isdigit():
                state_dict[f"{prefix}layers.{rest}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """Further arguments go to every layer. A layer's further results are dropped."""
        streams: Any = HyperConnection.expand(x, self.streams)
        for index, layer in enumerate(self.layers):
            result = layer(streams, *arguments, unmixed=index + 1 < len(self.layers), **options)
            streams = result[0] if isinstance(result, tuple) and not isinstance(result, Unmixed) else result
        return HyperConnection.reduce(streams)
