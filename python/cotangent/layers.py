# SPDX-License-Identifier: Apache-2.0
"""Layers: classes of torch.nn.Module that hold the parameters of the functions."""
from __future__ import annotations

import math
from typing import Any, Callable, Iterable, NamedTuple, Optional, Sequence, Tuple

import torch
from torch import Tensor, nn

from ._context import refuse_in_context_parallel
from ._rotary import rotary_table, rotate, token_positions
from .ops._options import need_tensors
from .ops.attention import attention, attention_varlen
from .ops.causal_conv1d import causal_conv1d, causal_conv1d_update
from .ops.dropout import dropout
from .ops.mhc import mhc_post, mhc_post_pre, mhc_pre

__all__ = [
    "Attention", "BiasDropoutResidual", "CausalConv1d", "HyperConnection", "HyperConnectionStack",
    "LinearDropoutResidual", "MambaInProjConv1d", "PendingPost",
]  # fmt: skip


def _keep_float32(function: "Callable[[Tensor], Tensor]") -> "Callable[[Tensor], Tensor]":
    """Wraps the function that nn.Module._apply gets, so that it never casts to float16 or bfloat16: the result is then
    float32. The function still moves parameters to another device."""

    def apply(tensor: Tensor) -> Tensor:
        result = function(tensor)
        if result.dtype not in (torch.float16, torch.bfloat16):
            return result
        return tensor.to(result.device, torch.float32)

    return apply


def _check_axes(call: str, x: Tensor, axes: int, shape: str) -> None:
    """Raises TypeError if x is no tensor, and ValueError if it does not have as many axes as its shape."""
    need_tensors(call, x=x)
    if isinstance(x, Tensor) and x.dim() != axes:  # torch.fx traces with other objects
        raise ValueError(f"{call}: x has {x.dim()} {'axis' if x.dim() == 1 else 'axes'}, expected {axes}: {shape}")


def _check_size(call: str, x: Tensor, axis: int, size: int, argument: str, hint: str = "") -> None:
    """Raises ValueError if this axis of x does not have this size. argument: the constructor's argument for the size."""
    if isinstance(x, Tensor) and x.shape[axis] != size:
        which = "the last axis" if axis in (-1, x.dim() - 1) else f"axis {axis}"
        raise ValueError(f"{call}: {which} of x has size {x.shape[axis]}, expected {argument}={size}{hint}")


class CausalConv1d(nn.Module):
    """The function cotangent.causal_conv1d with its parameters `weight` [channels, width] and `bias` [channels].

    channels      D
    width         K, the filter width (kernel_size of torch.nn.Conv1d, d_conv of mamba_ssm)
    activation    as in cotangent.causal_conv1d
    channel_last  True: input and output are [B,T,D], as in the other layers, without a copy. False: [B,D,T], as in
                  torch.nn.Conv1d. It is not torch.channels_last, a memory format for images

    Parameters are initialised as those of torch.nn.Conv1d with groups=channels. load_state_dict also reads the state of
    such a Conv1d: a weight [D,1,K] becomes [D,K].

    >>> conv = cotangent.CausalConv1d(32, width=4, activation="silu", channel_last=True)
    >>> conv(torch.randn(2, 100, 32)).shape
    torch.Size([2, 100, 32])
    """

    def __init__(
        self,
        channels: int,
        width: int = 4,
        *,
        bias: bool = True,
        activation: Optional[str] = None,
        channel_last: bool = False,
        device: Any = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        self.channels, self.width = channels, width
        self.activation, self.channel_last = activation, channel_last
        self.weight = nn.Parameter(torch.empty(channels, width, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(channels, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.width)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        weight = state_dict.get(prefix + "weight")
        if weight is not None and weight.dim() == 3 and weight.shape[1] == 1:
            state_dict[prefix + "weight"] = weight.squeeze(1)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def forward(
        self,
        x: Tensor,
        *,
        initial_state: Optional[Tensor] = None,
        seq_idx: Optional[Tensor] = None,
        cu_seqlens: Optional[Tensor] = None,
        return_final_state: bool = False,
    ) -> Any:
        """x [B,D,T], or [B,T,D] with channel_last=True. The other arguments are those of cotangent.causal_conv1d.
        States are [B,D,K-1], also with channel_last=True."""
        refuse_in_context_parallel("CausalConv1d", "causal_conv1d")
        if self.channel_last:
            _check_axes("CausalConv1d", x, 3, "[B,T,D]")
            _check_size("CausalConv1d", x, 2, self.channels, "channels", " (channel_last=False takes [B,D,T])")
        else:
            _check_axes("CausalConv1d", x, 3, "[B,D,T]")
            _check_size("CausalConv1d", x, 1, self.channels, "channels", " (channel_last=True takes [B,T,D])")
        result = causal_conv1d(
            x.transpose(1, 2) if self.channel_last else x, self.weight, self.bias, self.activation,
            initial_state=initial_state, seq_idx=seq_idx, cu_seqlens=cu_seqlens, return_final_state=return_final_state,
        )  # fmt: skip
        if not self.channel_last:
            return result
        return (result[0].transpose(1, 2), *result[1:]) if isinstance(result, tuple) else result.transpose(1, 2)

    def step(
        self,
        x: Tensor,
        conv_state: Tensor,
        *,
        cache_seqlens: Optional[Tensor] = None,
        conv_state_indices: Optional[Tensor] = None,
    ) -> Tensor:
        """Decodes one token x [B,D], and updates conv_state [N,D,S] with S >= K-1 in place. cache_seqlens and
        conv_state_indices are those of cotangent.causal_conv1d_update. Call it under torch.no_grad(): a backward
        through it raises NotImplementedError."""
        return causal_conv1d_update(
            x, conv_state, self.weight, self.bias, self.activation, cache_seqlens=cache_seqlens,
            conv_state_indices=conv_state_indices,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return f"{self.channels}, width={self.width}, bias={self.bias is not None}, activation={self.activation}"


class BiasDropoutResidual(nn.Module):
    """`residual + dropout(act(x + bias))` in one pass. Use it after the last nn.Linear of a block, and create that
    nn.Linear with bias=False. p is the dropout probability, without a default. In eval mode nothing is dropped.

    >>> layer = cotangent.BiasDropoutResidual(32, p=0.1, activation="gelu")
    >>> layer(torch.randn(2, 100, 32), residual=torch.randn(2, 100, 32)).shape
    torch.Size([2, 100, 32])
    """

    def __init__(
        self,
        features: int,
        p: float,
        *,
        bias: bool = True,
        activation: Optional[str] = None,
        device: Any = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        self.features, self.p, self.activation = features, p, activation
        self.bias = nn.Parameter(torch.zeros(features, device=device, dtype=dtype)) if bias else None

    def forward(self, x: Tensor, residual: Optional[Tensor] = None) -> Tensor:
        """x and `residual` are [..., features]. None: no residual is added."""
        return dropout(
            x, self.p, self.training, bias=self.bias, activation=self.activation, residual=residual
        )

    def extra_repr(self) -> str:
        return f"{self.features}, p={self.p}, bias={self.bias is not None}, activation={self.activation}"


class PendingPost(NamedTuple):
    """The arguments of a call of cotangent.mhc_post that has not run yet: the residual streams x before a layer, the
    output f of the layer, and the coefficients. HyperConnection returns it with defer_post=True. The next
    HyperConnection takes it as its x.

    >>> layer = cotangent.HyperConnection(torch.nn.Linear(32, 32), 32, num_streams=4)
    >>> pending = layer(layer.to_streams(torch.randn(2, 100, 32)), defer_post=True)
    >>> cotangent.mhc_post(*pending).shape
    torch.Size([2, 100, 4, 32])
    """

    x: Tensor
    f: Tensor
    h_post: Tensor
    h_res: Tensor


def _to_streams(x: Tensor, num_streams: int) -> Tensor:
    return x.unsqueeze(2).repeat(1, 1, num_streams, 1)


class _OwnStreams:
    """Decorates a static method f(x, num_streams) of HyperConnection. On an instance, num_streams is by default that of
    the instance."""

    def __init__(self, method: Any) -> None:
        self.function: "Callable[..., Tensor]" = method.__func__

    def __get__(self, instance: "Optional[HyperConnection]", owner: Any) -> "Callable[..., Tensor]":
        function = self.function
        if instance is None:
            return function
        own = instance.num_streams
        return lambda x, num_streams=None: function(x, own if num_streams is None else num_streams)


class HyperConnection(nn.Module):
    """Connects a layer to n residual streams x [B,T,n,D], where D is dim and n is num_streams. For the streams x it
    returns the streams y:

        h_in, h_post, h_res = cotangent.mhc_pre(x, phi, alpha, bias, gamma)
        y = cotangent.mhc_post(x, layer(h_in), h_post, h_res)

    `layer` is any module from [B,T,D] to [B,T,D]. Further arguments of `forward` are passed to it. If the layer returns
    a tuple, `forward` returns (y, rest of the tuple...). Before the first layer, connection.to_streams(x) copies an input
    [B,T,D] to the n streams. HyperConnection.to_streams(x, n) does so without an instance. After the last layer, `reduce`
    sums the streams.

    Parameters: `phi` [n*n+2n, n*D], `alpha` [3], `bias` [n*n+2n], `gamma` [n,D]. They are float32, and stay float32 in
    model.bfloat16(), model.half() and model.to(dtype). At initialisation the input of the layer is about the mean of
    the streams. The output of the layer is added to every stream with a weight of about 1. A stream gets almost nothing
    from the other streams. Initial values:

    phi    normal, with standard deviation `(n*D) ** -0.5`
    alpha  0.01
    gamma  1
    bias   for pre log(1 / (n-1)), so that its sigmoid is 1/n (n = 1: 0.999). For post 0. For res 8 on the diagonal of
           the matrix and 0 elsewhere, so that h_res is close to the identity

    Between two layers, cotangent.mhc_post_pre computes the mhc_post of the first layer and the mhc_pre of the second in
    one call. To use it, call the first HyperConnection with defer_post=True. It then returns a PendingPost instead of
    the streams. Pass the PendingPost to the second HyperConnection as its x. HyperConnectionStack does so.

    load_state_dict(..., strict=False) also reads the checkpoint of the layer alone.

    >>> first, second = (cotangent.HyperConnection(torch.nn.Linear(32, 32), 32, num_streams=4) for _ in range(2))
    >>> streams = first.to_streams(torch.randn(2, 100, 32))
    >>> streams = second(first(streams, defer_post=True))
    >>> streams.shape, first.reduce(streams).shape
    (torch.Size([2, 100, 4, 32]), torch.Size([2, 100, 32]))
    """

    def __init__(
        self, layer: nn.Module, dim: int, num_streams: int = 4, *, sinkhorn_iterations: int = 20, device: Any = None
    ) -> None:
        super().__init__()
        self.layer, self.dim, self.num_streams, self.sinkhorn_iterations = layer, dim, num_streams, sinkhorn_iterations
        rows = num_streams * num_streams + 2 * num_streams
        self.phi = nn.Parameter(torch.empty(rows, num_streams * dim, device=device, dtype=torch.float32))
        self.alpha = nn.Parameter(torch.empty(3, device=device, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(rows, device=device, dtype=torch.float32))
        self.gamma = nn.Parameter(torch.empty(num_streams, dim, device=device, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        n = self.num_streams
        with torch.no_grad():
            nn.init.normal_(self.phi, std=(n * self.dim) ** -0.5)
            self.alpha.fill_(0.01)
            self.gamma.fill_(1)
            self.bias.zero_()  # h_post = 2 sigmoid(0) = 1
            share = 1 / n if n > 1 else 1 - 1e-3
            self.bias[:n] = math.log(share / (1 - share))  # h_pre = sigmoid = 1/n
            self.bias[2 * n :] = (8 * torch.eye(n)).flatten()  # h_res is nearly the identity

    def _apply(self, fn: "Callable[[Tensor], Tensor]", recurse: bool = True) -> "HyperConnection":
        if recurse:
            for child in self.children():
                child._apply(fn)
        return super()._apply(_keep_float32(fn), recurse=False)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        names = [name[len(prefix) :] for name in state_dict if name.startswith(prefix)]
        inner = set(self.layer.state_dict())
        own = [name for name in ("phi", "alpha", "bias", "gamma") if name in names]
        if len(own) < 4 and all(name in inner for name in own):  # the checkpoint of the layer alone
            has_child = any(name in inner for name in names if name.startswith("layer."))  # a child named "layer"
            for name in names:
                if has_child or not name.startswith("layer."):
                    state_dict[f"{prefix}layer.{name}"] = state_dict.pop(prefix + name)
        super()._load_from_state_dict(state_dict, prefix, *others)

    @_OwnStreams
    @staticmethod
    def to_streams(x: Tensor, num_streams: int) -> Tensor:
        """Copies an input x [B,T,D] to n residual streams [B,T,n,D], where n is num_streams. Call it before the first
        layer. With an instance, connection.to_streams(x) takes the number of streams of the connection."""
        return _to_streams(x, num_streams)

    @staticmethod
    def reduce(x: Tensor) -> Tensor:
        """Sums the residual streams: [B,T,n,D] -> [B,T,D]. Call it after the last layer."""
        return x.sum(2)

    def forward(self, x: Any, *arguments: Any, defer_post: bool = False, **options: Any) -> Any:
        """x is [B,T,n,D], or a PendingPost of the HyperConnection before this one. defer_post=True: the result is a
        PendingPost instead of the streams. The layer gets all other arguments."""
        parameters, iterations = (self.phi, self.alpha, self.bias, self.gamma), self.sinkhorn_iterations
        streams = x.x if isinstance(x, PendingPost) else x
        _check_axes("HyperConnection", streams, 4, "[B,T,n,D]")
        _check_size("HyperConnection", streams, 2, self.num_streams, "num_streams")
        _check_size("HyperConnection", streams, 3, self.dim, "dim")
        if isinstance(x, PendingPost):
            x, h_in, h_post, h_res = mhc_post_pre(*x, *parameters, sinkhorn_iterations=iterations)
        else:
            h_in, h_post, h_res = mhc_pre(x, *parameters, sinkhorn_iterations=iterations)
        result = self.layer(h_in, *arguments, **options)
        f, rest = (result[0], result[1:]) if isinstance(result, tuple) else (result, ())
        y = PendingPost(x, f, h_post, h_res) if defer_post else mhc_post(x, f, h_post, h_res)
        return (y, *rest) if rest else y

    def extra_repr(self) -> str:
        return f"dim={self.dim}, num_streams={self.num_streams}"


class Attention(nn.Module):
    """Self-attention with its projections: x [B,T,D] -> [B,T,D].

    dim               D
    num_heads         the number of query heads
    causal            True: a token attends to itself and the tokens before it. False: to all tokens. It has no default
    num_kv_heads      the number of key-value heads, a divisor of num_heads (GQA). None: num_heads
    head_dim          the size of a head. None: `dim / num_heads`
    window, softcap, dropout_p, deterministic
                      as in cotangent.attention. In eval mode nothing is dropped
    use_sink          True: each head has a learned attention sink. The sinks are float32, or float64 in a float64
                      layer. They stay float32 in model.bfloat16(), model.half() and model.to(dtype)
    proj_bias         True: the linear projections have a bias
    rope_base         rotary position embeddings (RoPE) with this base (rope_theta of Hugging Face), for example 10000.
                      None: no position embeddings. Scaled RoPE (linear, yarn, llama3) is not supported
    rope_dim          how many columns of a head are rotated: the first rope_dim. None: all
    rope_interleaved  True: the columns 2i and 2i+1 are a pair, as in GPT-J. False: the columns i and `i + rope_dim/2`,
                      as in Llama
    qk_norm_eps       the eps of an RMSNorm of each query and key head, as in Qwen3. None: no norm

    Parameters: qkv.weight (the rows of q, then those of k, then those of v) and out.weight; with proj_bias=True also
    qkv.bias and out.bias; with qk_norm_eps also q_norm.weight and k_norm.weight; with use_sink=True also
    `sink` [num_heads].

    The layer has no argument for padding or for attn_bias: pack the sequences (see `forward`), or call cotangent.attention.
    load_state_dict also reads the names of other implementations: q_proj, k_proj, v_proj and o_proj; `Wqkv`;
    in_proj_weight and in_proj_bias; out_proj; `sinks`. The options must fit the checkpoint:

    - torch.nn.MultiheadAttention: Attention(dim, heads, causal=False, proj_bias=True), or proj_bias=False if it has
      bias=False.
    - Qwen2, which has a bias for q, k and v only: proj_bias=True and strict=False, then layer.out.bias.data.zero_().

    In a bfloat16 model, `sink` has another dtype than the other parameters. FSDP2 needs one dtype in each group:
    docs/guide/many_gpus.md has the order of the calls of fully_shard.

    >>> layer = cotangent.Attention(64, num_heads=8, causal=True, num_kv_heads=2, rope_base=10000)
    >>> layer(torch.randn(2, 100, 64)).shape
    torch.Size([2, 100, 64])
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        causal: bool,
        num_kv_heads: Optional[int] = None,
        head_dim: Optional[int] = None,
        window: Optional[Tuple[int, int]] = None,
        softcap: float = 0.0,
        dropout_p: float = 0.0,
        use_sink: bool = False,
        proj_bias: bool = False,
        rope_base: Optional[float] = None,
        rope_dim: Optional[int] = None,
        rope_interleaved: bool = False,
        qk_norm_eps: Optional[float] = None,
        deterministic: bool = True,
        device: Any = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        sizes = dict(num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim, rope_dim=rope_dim)
        for name, value in sizes.items():
            if value is not None and value < 1:
                raise ValueError(f"Attention: {name} is {value}, expected 1 or more")
        if rope_base is not None and not rope_base > 0:
            raise ValueError(f"Attention: rope_base is {rope_base}, expected a positive number")
        if rope_dim is not None and rope_base is None:
            raise ValueError(f"Attention: rope_dim is {rope_dim}, expected None without rope_base")
        if head_dim is None and dim % num_heads != 0:
            raise ValueError(f"Attention: num_heads is {num_heads}, expected a divisor of dim={dim} (or head_dim)")
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads or num_heads
        self.head_dim = head_dim or dim // num_heads
        if num_heads % self.num_kv_heads != 0:
            raise ValueError(f"Attention: num_kv_heads is {num_kv_heads}, expected a divisor of num_heads={num_heads}")
        self.causal, self.window, self.softcap, self.dropout_p = causal, window, softcap, dropout_p
        self.deterministic = deterministic
        rows = (num_heads + 2 * self.num_kv_heads) * self.head_dim
        self.qkv = nn.Linear(dim, rows, bias=proj_bias, device=device, dtype=dtype)
        self.out = nn.Linear(num_heads * self.head_dim, dim, bias=proj_bias, device=device, dtype=dtype)
        wide = torch.promote_types(self.qkv.weight.dtype, torch.float32)
        self.sink = nn.Parameter(torch.zeros(num_heads, device=device, dtype=wide)) if use_sink else None
        self.rope_base, self.rope_interleaved = rope_base, rope_interleaved
        self.rope_dim = rope_dim or self.head_dim
        if rope_base is not None and (self.rope_dim % 2 != 0 or self.rope_dim > self.head_dim):
            raise ValueError(f"Attention: rope_dim is {self.rope_dim}, expected an even number up to head_dim={self.head_dim}")
        if isinstance(qk_norm_eps, bool):
            raise TypeError(f"Attention: qk_norm_eps is {qk_norm_eps}, expected None or the eps of the norm, for example 1e-6")
        self.q_norm = None if qk_norm_eps is None else nn.RMSNorm(self.head_dim, qk_norm_eps, device=device, dtype=dtype)
        self.k_norm = None if qk_norm_eps is None else nn.RMSNorm(self.head_dim, qk_norm_eps, device=device, dtype=dtype)
        self._table: "Optional[Tuple[Tensor, Tensor]]" = None  # cos and sin of the first positions

    def _apply(self, fn: "Callable[[Tensor], Tensor]", recurse: bool = True) -> "Attention":
        if recurse:
            for child in self.children():
                child._apply(fn)
        return super()._apply(_keep_float32(fn), recurse=False)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        for kind in ("weight", "bias"):
            parts = [f"{prefix}{name}_proj.{kind}" for name in "qkv"]
            if all(part in state_dict for part in parts):
                state_dict[f"{prefix}qkv.{kind}"] = torch.cat([state_dict.pop(part) for part in parts])
            for theirs, ours in ((f"Wqkv.{kind}", f"qkv.{kind}"), (f"in_proj_{kind}", f"qkv.{kind}"),
                                 (f"o_proj.{kind}", f"out.{kind}"), (f"out_proj.{kind}", f"out.{kind}")):  # fmt: skip
                if prefix + theirs in state_dict:
                    state_dict[prefix + ours] = state_dict.pop(prefix + theirs)
        if prefix + "sinks" in state_dict:
            state_dict[prefix + "sink"] = state_dict.pop(prefix + "sinks")
        super()._load_from_state_dict(state_dict, prefix, *others)

    def _project(self, x: Tensor, positions: Optional[Tensor], max_length: int) -> "Tuple[Tensor, Tensor, Tensor]":
        """q, k and v [...,H,d] with their norms and rotations. positions: [...] below `max_length`; None: 0, 1, 2, ..."""
        counts = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        qkv = self.qkv(x).split([count * self.head_dim for count in counts], -1)
        q, k, v = (part.unflatten(-1, (count, self.head_dim)) for part, count in zip(qkv, counts))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.rope_base is not None:
            table = self._table
            if torch.compiler.is_compiling():  # one graph for every length
                table = rotary_table(max_length, self.rope_dim, self.rope_base, x.device)
            elif table is None or table[0].shape[0] < max_length or table[0].device != x.device:
                size = max(64, 1 << (max_length - 1).bit_length())
                with torch.inference_mode(False):  # training can use the table later
                    table = self._table = rotary_table(size, self.rope_dim, self.rope_base, x.device)
            cos, sin = (t[:max_length] if positions is None else t[positions] for t in table)
            cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
            q, k = rotate(q, cos, sin, self.rope_interleaved), rotate(k, cos, sin, self.rope_interleaved)
        return q, k, v

    def _options(self) -> "dict[str, Any]":
        return dict(causal=self.causal, window=self.window, softcap=self.softcap, sink=self.sink,
                    deterministic=self.deterministic)  # fmt: skip

    def forward(
        self, x: Tensor, cu_seqlens: Optional[Tensor] = None, max_seqlen: Optional[int] = None
    ) -> Tensor:
        """x is [B,T,D], or [total,D] for packed (varlen) sequences. These need cu_seqlens (int32 [N+1], as in
        cotangent.attention_varlen) and max_seqlen, the length of the longest sequence or more. Rotary positions begin
        at 0 in each sequence or batch element: there is no argument for other positions."""
        if (cu_seqlens is None) != (max_seqlen is None):
            missing, given = ("max_seqlen", "cu_seqlens") if max_seqlen is None else ("cu_seqlens", "max_seqlen")
            raise ValueError(f"Attention: {missing} is None, expected a value because {given} is given")
        refuse_in_context_parallel("Attention", "attention")
        if cu_seqlens is None:
            _check_axes("Attention", x, 3, "[B,T,D]")
        else:
            _check_axes("Attention", x, 2, "[total,D] with cu_seqlens")
        _check_size("Attention", x, -1, self.qkv.in_features, "dim")
        options = dict(self._options(), dropout_p=self.dropout_p if self.training else 0.0)
        if cu_seqlens is None or max_seqlen is None:
            q, k, v = self._project(x, None, x.shape[-2])
            y = attention(q, k, v, **options)
        else:
            positions = token_positions(cu_seqlens, x.shape[0])[1] if self.rope_base is not None else None
            if positions is not None:
                positions = positions.clamp(0, max(max_seqlen - 1, 0))
            q, k, v = self._project(x, positions, max_seqlen)
            y = attention_varlen(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)
        return self.out(y.flatten(-2))

    @torch.no_grad()
    def step(self, x: Tensor, k_cache: Tensor, v_cache: Tensor, cache_seqlens: Tensor) -> Tensor:
        """Decodes Tn new tokens x [B,Tn,D], or one token x [B,D], and returns y like x.

        k_cache, v_cache  [B,max_length,num_kv_heads,head_dim], in the dtype of the weights; under autocast, in its dtype.
                          `step` writes the new keys and values after those of the old tokens
        cache_seqlens     int32 or int64 [B]: how many tokens of each batch element are in the caches, from 0 to
                          `max_length - Tn`. `step` does not change it: add Tn after the call. On a CPU other values raise
                          ValueError. On a GPU, and in compiled code, they are not checked. A value that is too large
                          then fails PyTorch's index assertion, and on a GPU the process must be restarted. A negative
                          value overwrites the end of the cache, without an error

        There is no dropout and no gradient. With causal=False the call raises ValueError. `step` runs the kernels of
        training. On a GPU they do not divide the keys of a query among thread blocks (no split-KV, as flash-decoding
        has), so it is slow for few sequences.

            k_cache, v_cache = torch.zeros(2, B, max_length, layer.num_kv_heads, layer.head_dim)
            cache_seqlens = torch.zeros(B, dtype=torch.int32)
            y = layer.step(prompt, k_cache, v_cache, cache_seqlens)      # prompt [B,Tn,D]
            cache_seqlens += prompt.shape[1]
            y = layer.step(token, k_cache, v_cache, cache_seqlens)       # token [B,D]
            cache_seqlens += 1"""
        need_tensors("Attention.step", x=x, k_cache=k_cache, v_cache=v_cache, cache_seqlens=cache_seqlens)
        if not self.causal:
            raise ValueError("Attention.step: causal is False, expected True: old tokens do not attend to new ones")
        if x.dim() != 2:
            _check_axes("Attention.step", x, 3, "[B,Tn,D], or 2: [B,D]")
        _check_size("Attention.step", x, -1, self.qkv.in_features, "dim")
        new = x.unsqueeze(1) if x.dim() == 2 else x
        expected = (new.shape[0], k_cache.shape[1], self.num_kv_heads, self.head_dim)
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            if cache.shape != expected:
                raise ValueError(f"Attention.step: {name} has shape {tuple(cache.shape)}, expected {expected}")
        self._check_cache_seqlens(cache_seqlens, new.shape[0], new.shape[1], k_cache.shape[1])
        positions = cache_seqlens[:, None].long() + torch.arange(new.shape[1], device=x.device)
        q, k, v = self._project(new, positions, k_cache.shape[1])
        for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            if cache.dtype != q.dtype:
                raise TypeError(f"Attention.step: {name} has dtype {cache.dtype}, expected {q.dtype} as q")
        row = torch.arange(new.shape[0], device=x.device)[:, None]
        before = k_cache[row, positions], v_cache[row, positions]
        k_cache[row, positions], v_cache[row, positions] = k, v
        used = (cache_seqlens + new.shape[1]).to(torch.int32)
        try:
            y: Tensor = self.out(attention(q, k_cache, v_cache, seqused_k=used, **self._options()).flatten(-2))
        except Exception:  # a call that fails has written nothing
            k_cache[row, positions], v_cache[row, positions] = before
            raise
        return y.reshape(x.shape)

    @staticmethod
    def _check_cache_seqlens(lengths: Tensor, B: int, Tn: int, max_length: int) -> None:
        if lengths.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"Attention.step: cache_seqlens has dtype {lengths.dtype}, expected torch.int32 or torch.int64")
        if lengths.shape != (B,):
            raise ValueError(f"Attention.step: cache_seqlens has shape {tuple(lengths.shape)}, expected {(B,)}")
        if lengths.device.type != "cpu" or B == 0 or torch.compiler.is_compiling():  # no wait for a GPU
            return
        least, most = int(lengths.min()), int(lengths.max())
        if Tn > max_length:
            raise ValueError(f"Attention.step: x has {Tn} tokens, more than the {max_length} positions of k_cache")
        if least < 0 or most + Tn > max_length:
            raise ValueError(
                f"Attention.step: cache_seqlens has {least if least < 0 else most}, expected 0 to {max_length - Tn}: x has "
                f"{Tn} tokens, k_cache has {max_length} positions"
            )

    def extra_repr(self) -> str:
        rope = "" if self.rope_base is None else f", rope_base={self.rope_base}"
        heads = f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, head_dim={self.head_dim}"
        return f"{heads}, causal={self.causal}{rope}"


class LinearDropoutResidual(nn.Linear):
    """`residual + dropout(act(linear(x)))`, the end of an attention or MLP block. After the matrix product, one pass
    adds the bias, applies the activation and the dropout, and adds the residual.

    Parameters and state_dict are those of torch.nn.Linear. p is the dropout probability. In eval mode nothing is
    dropped.

    >>> layer = cotangent.LinearDropoutResidual(64, 32, p=0.1)
    >>> layer(torch.randn(2, 100, 64), residual=torch.randn(2, 100, 32)).shape
    torch.Size([2, 100, 32])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        p: float,
        *,
        bias: bool = True,
        activation: Optional[str] = None,
        device: Any = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.p, self.activation = p, activation

    def forward(self, x: Tensor, residual: Optional[Tensor] = None) -> Tensor:
        """x is [..., in_features], and `residual` [..., out_features]. None: no residual is added."""
        y: Tensor = dropout(nn.functional.linear(x, self.weight), self.p, self.training, bias=self.bias,
                            activation=self.activation, residual=residual)  # fmt: skip
        return y

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, p={self.p}, activation={self.activation}"


class MambaInProjConv1d(nn.Module):
    """The first part of a Mamba block: its input projection, and a causal convolution over some of its columns.

    The columns of the projection are divided into parts. One part, of conv_dim columns, is convolved. sizes_before
    and sizes_after are the sizes of the parts before and after it. For x [B,T,D] the layer returns all parts in order, each
    [B,T,size]:

        x, z = MambaInProjConv1d(D, inner, sizes_after=[inner])(x)                          # Mamba
        z, xBC, dt = MambaInProjConv1d(D, inner + 2 * groups * state,
                                       sizes_before=[inner], sizes_after=[heads])(x)        # Mamba-2

    dim        D
    width      K, the filter width of the convolution (d_conv of mamba_ssm)
    bias       True: the projection has a bias. The name is that of mamba_ssm
    conv_bias  True: the convolution has a bias. The name is that of mamba_ssm

    The convolution reads the columns of the projection without a copy. Parameters: in_proj.weight, conv1d.weight
    [conv_dim, width] and conv1d.bias. load_state_dict reads these names from the state_dict of a Mamba layer, also with
    a weight [conv_dim,1,width]. That state_dict has more parameters, so pass strict=False.

    >>> layer = cotangent.MambaInProjConv1d(32, 64, sizes_after=[64])
    >>> x, z = layer(torch.randn(2, 100, 32))
    >>> x.shape, z.shape
    (torch.Size([2, 100, 64]), torch.Size([2, 100, 64]))
    """

    def __init__(
        self,
        dim: int,
        conv_dim: int,
        *,
        sizes_before: Sequence[int] = (),
        sizes_after: Sequence[int] = (),
        width: int = 4,
        bias: bool = False,
        conv_bias: bool = True,
        activation: Optional[str] = "silu",
        device: Any = None,
        dtype: Optional[torch.dtype] = None,
    ) -> None:
        super().__init__()
        self.sizes, self.convolved = [*sizes_before, conv_dim, *sizes_after], len(sizes_before)
        self.in_proj = nn.Linear(dim, sum(self.sizes), bias=bias, device=device, dtype=dtype)
        self.conv1d = CausalConv1d(conv_dim, width, bias=conv_bias, activation=activation, channel_last=True, device=device,
                                   dtype=dtype)  # fmt: skip

    def forward(
        self,
        x: Tensor,
        *,
        initial_state: Optional[Tensor] = None,
        seq_idx: Optional[Tensor] = None,
        cu_seqlens: Optional[Tensor] = None,
        return_final_state: bool = False,
    ) -> "Tuple[Tensor, ...]":
        """x is [B,T,D]. initial_state, seq_idx and cu_seqlens are those of cotangent.causal_conv1d. With
        return_final_state=True the last result is the state of the convolution [B, conv_dim, width-1]. Pass it to
        `step` as conv_state:

            *parts, state = layer(prompt, return_final_state=True)
            with torch.no_grad():
                parts = layer.step(token, state)    # token [B,D]; updates state
        """
        refuse_in_context_parallel("MambaInProjConv1d", "causal_conv1d")
        _check_axes("MambaInProjConv1d", x, 3, "[B,T,D]")
        _check_size("MambaInProjConv1d", x, -1, self.in_proj.in_features, "dim")
        parts = list(self.in_proj(x).split(self.sizes, -1))
        result = self.conv1d(
            parts[self.convolved], initial_state=initial_state, seq_idx=seq_idx, cu_seqlens=cu_seqlens,
            return_final_state=return_final_state,
        )  # fmt: skip
        parts[self.convolved] = result[0] if return_final_state else result
        return (*parts, result[1]) if return_final_state else tuple(parts)

    def step(
        self,
        x: Tensor,
        conv_state: Tensor,
        *,
        cache_seqlens: Optional[Tensor] = None,
        conv_state_indices: Optional[Tensor] = None,
    ) -> "Tuple[Tensor, ...]":
        """Decodes one token x [B,D]: returns the parts [B,size], and updates conv_state [N, conv_dim, S] with S >=
        width-1 in place. cache_seqlens and conv_state_indices are those of cotangent.causal_conv1d_update. Call it
        under torch.no_grad(): a backward through it raises NotImplementedError."""
        parts = list(self.in_proj(x).split(self.sizes, -1))
        parts[self.convolved] = self.conv1d.step(
            parts[self.convolved], conv_state, cache_seqlens=cache_seqlens, conv_state_indices=conv_state_indices
        )
        return tuple(parts)


class HyperConnectionStack(nn.Module):
    """A list of layers with hyper-connections between them: x [B,T,D] -> [B,T,D].

    Each layer is any module from [B,T,D] to [B,T,D], without a residual of its own. The stack copies its input to n
    residual streams (num_streams), wraps each layer in a HyperConnection, and returns the sum of the streams. At
    initialisation each stream is about the output of a residual network of the same layers. The sum is about n times as
    large: apply a norm to it.

    load_state_dict(..., strict=False) also reads the checkpoint of a torch.nn.ModuleList of the layers.

    >>> stack = cotangent.HyperConnectionStack([torch.nn.Linear(32, 32) for _ in range(6)], 32, num_streams=4)
    >>> stack(torch.randn(2, 100, 32)).shape
    torch.Size([2, 100, 32])
    """

    def __init__(
        self, layers: Iterable[nn.Module], dim: int, num_streams: int = 4, *, sinkhorn_iterations: int = 20, device: Any = None
    ) -> None:
        super().__init__()
        self.num_streams = num_streams
        self.layers = nn.ModuleList(
            HyperConnection(layer, dim, num_streams, sinkhorn_iterations=sinkhorn_iterations, device=device) for layer in layers
        )

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *others: Any) -> None:
        for name in [name for name in state_dict if name.startswith(prefix)]:
            rest = name[len(prefix) :]
            if rest.split(".")[0].isdigit():
                state_dict[f"{prefix}layers.{rest}"] = state_dict.pop(name)
        super()._load_from_state_dict(state_dict, prefix, *others)

    def forward(self, x: Tensor, *arguments: Any, **options: Any) -> Tensor:
        """x is [B,T,D]. Every layer gets all other arguments. If a layer returns a tuple, only its first element is
        used."""
        _check_axes("HyperConnectionStack", x, 3, "[B,T,D]")
        streams: Any = _to_streams(x, self.num_streams)  # torch.compile does not support the decorated method on the class
        for index, layer in enumerate(self.layers):
            result = layer(streams, *arguments, defer_post=index + 1 < len(self.layers), **options)
            streams = result[0] if isinstance(result, tuple) and not isinstance(result, PendingPost) else result
        return HyperConnection.reduce(streams)
