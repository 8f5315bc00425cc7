# SPDX-License-Identifier: Apache-2.0
"""softmax(Q K^T) V. include/cotangent/attention.h is the manual and has the formulas."""
from __future__ import annotations

import math
import re
from typing import Any, Callable, Optional, Tuple

import torch
from torch import Tensor

from ._define import _match_layout, define, gradients_like
from ._options import flag, need_tensors, number, pair, random_seed, rename_arguments, seed_number

_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_q, Tensor? seqused_k, "
    "Tensor? sink, Tensor? alibi_slopes, Tensor? bias, Tensor? dropout_seed_tensor, Tensor? dropout_offset_tensor"
)
_OPTIONS = (
    "int causal, int window, SymInt window_left, SymInt window_right, float scale, float softcap, float dropout_p, "
    "SymInt dropout_seed, SymInt dropout_offset, SymInt max_seqlen_q, SymInt max_seqlen_k"
)


def _folds(q: Any, k: Any, v: Any, cu_q: Any, cu_k: Any, used_q: Any, used_k: Any, sink: Any, slopes: Any, bias: Any,
           dropout_seed_tensor: Any, dropout_offset_tensor: Any, causal: Any, window: Any, left: Any, right: Any,
           scale: Any, softcap: Any, dropout_p: float, *others: Any) -> bool:  # fmt: skip
    """Whether vmap may fold its axis into the batch. Not with dropout, because the mask depends on the index in the
    batch, and not with slopes or a bias, which may have their own batch axis."""
    return cu_q is None and cu_k is None and slopes is None and bias is None and dropout_p == 0


# A bias at or below the lowest number of float16 masks the key. Padding masks contain the lowest number of their dtype,
# or a number such as -1e9. If all keys of a query had such a bias, the gradient would be wrong: next to such a large
# number, float32 cannot represent the scores, and exp(s - lse) would be 1 for each key.
MASKED = -65504.0
_BIAS = 9  # its position in both schemas


def _with_masks(wanted: bool, *arguments: Any) -> "tuple[Any, ...]":
    """The arguments with -inf where the bias masks a key. Runs below autograd, so the gradient of the changed bias is
    returned for the given bias. It is 0 where a key is masked."""
    bias = arguments[_BIAS]
    if bias is None or not bias.is_floating_point() or bias.layout is not torch.strided:
        return arguments
    # If no gradient is needed, expanded axes are dropped, so that each element is read once. A gradient has full axes.
    if not wanted:
        for axis, stride in enumerate(bias.stride()):
            bias = bias.narrow(axis, 0, 1) if stride == 0 and bias.shape[axis] > 1 else bias
    bias = torch.nn.functional.threshold(bias, MASKED, -math.inf)
    return (*arguments[:_BIAS], bias, *arguments[_BIAS + 1 :])


def _gradients(q: Tensor, k: Tensor, v: Tensor, cu_q: Any, cu_k: Any, used_q: Any, used_k: Any, sink: Any, slopes: Any,
               bias: Any, *others: Any) -> Any:  # fmt: skip
    inputs = (q, k, v, sink, bias)
    return gradients_like(inputs, others[-1])


_backward = define(
    f"attention_backward({_INPUTS}, {_OPTIONS}, int allow_nondeterminism, Tensor out, Tensor lse, Tensor dout, "
    "Tensor? dlse, bool[] _wanted) -> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink, Tensor dbias)",
    _gradients,
    batched=("q", "k", "v", "seqused_q", "seqused_k", "out", "lse", "dout", "dlse", "dq", "dk", "dv"),
    folds=_folds,
    prepare=lambda *arguments: _with_masks(arguments[-1][4], *arguments),
)


def _outputs(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> Any:
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    rows = (q.shape[0], q.shape[2], q.shape[1]) if q.dim() == 4 else (q.shape[1], q.shape[0])
    out = torch.empty_like(q) if q.shape[-1] == v.shape[-1] else q.new_empty((*q.shape[:-1], v.shape[-1]))
    return out, q.new_empty(rows, dtype=dtype)


_forward = define(
    f"attention_forward({_INPUTS}, {_OPTIONS}, int _allow_nondeterminism) -> (Tensor out, Tensor lse)",
    _outputs,
    _backward,
    autocast=("q", "k", "v"),
    batched=("q", "k", "v", "seqused_q", "seqused_k", "out", "lse"),
    folds=_folds,
    prepare=lambda *arguments: _with_masks(False, *arguments),
)


# The names of the op's arguments in the Python functions.
_PYTHON_NAMES = {
    "bias": "attn_bias",
    "window_left": "window[0]",
    "window_right": "window[1]",
}


def _with_python_names(call: str, error: Exception) -> Exception:
    """An error of the op with the names of the Python function `call`, whose scale=None is the op's scale of 0."""
    text = re.sub(r"(?<![:\w])attention(_forward)?: ", f"{call}: ", rename_arguments(str(error), _PYTHON_NAMES))
    text = re.sub(r"(: scale is .*, expected) 0 or ", r"\1 None or ", text)
    return error if text == str(error) else type(error)(text)


def _refuse_bool_bias(call: str, bias: Any) -> None:
    """Raises TypeError for a bool mask, which PyTorch accepts as attn_mask."""
    if isinstance(bias, Tensor) and bias.dtype == torch.bool:
        raise TypeError(f"{call}: attn_bias has dtype torch.bool, expected a float tensor: 0, or -inf where a key is masked")


def _run(
    call: str, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Any, max_seqlens: Any, causal: bool, window: Any, scale: Any,
    softcap: float, dropout_p: float, dropout_seed: Any, dropout_offset: int, dropout_seed_tensor: Any,
    dropout_offset_tensor: Any, seqused: Any, sink: Any, alibi_slopes: Any, attn_bias: Any, deterministic: bool, return_lse: bool,
) -> Any:  # fmt: skip
    if number(call, "dropout_p", dropout_p) > 0 and dropout_seed is None and dropout_seed_tensor is None:
        need_tensors(call, q=q)
        dropout_seed_tensor = random_seed(q.device)
    if scale == 0:
        raise ValueError(f"{call}: scale is 0, expected None (1/sqrt(d)) or another number")
    _refuse_bool_bias(call, attn_bias)
    left, right = (0, 0) if window is None else pair(call, "window", window)
    nondeterministic, with_lse = not flag(call, "deterministic", deterministic), flag(call, "return_lse", return_lse)
    try:
        out, lse = _forward(
            q, k, v, *cu_seqlens, *seqused, sink, alibi_slopes, attn_bias, dropout_seed_tensor, dropout_offset_tensor,
            causal, window is not None, left, right, scale or 0.0, softcap, dropout_p, seed_number(dropout_seed),
            dropout_offset, *max_seqlens, nondeterministic,
        )  # fmt: skip
    except (NotImplementedError, TypeError, ValueError) as error:
        raise _with_python_names(call, error) from None
    return (out, lse) if with_lse else out


def _run_backward(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, dout: Tensor, *, dlse: Any = None,
    cu_seqlens: Any = (None, None), max_seqlens: Any = (0, 0), seqused: Any = (None, None), causal: bool = False,
    window: Any = None, scale: Optional[float] = None, softcap: float = 0.0, dropout_p: float = 0.0,
    dropout_seed_tensor: Any = None, dropout_offset_tensor: Any = None, sink: Any = None, alibi_slopes: Any = None,
    attn_bias: Any = None, deterministic: bool = True,
    wanted: "tuple[bool, ...]" = (True, True, True, True, True),
) -> Any:  # fmt: skip
    """The gradients (dq, dk, dv, dsink, dbias) from saved results, for the functions of other packages that have no
    autograd. The arguments are those of attention_varlen."""
    left, right = (0, 0) if window is None else pair("attention", "window", window)
    wanted = (*wanted[:3], wanted[3] and sink is not None, wanted[4] and attn_bias is not None)
    with torch.no_grad():
        dout = _match_layout(dout, out.shape, out.stride(), out.dtype, out.device)
        return _backward(
            q, k, v, *cu_seqlens, *seqused, sink, alibi_slopes, attn_bias, dropout_seed_tensor, dropout_offset_tensor, causal,
            window is not None, left, right, scale or 0.0, softcap, dropout_p, 0, 0, *(m or 0 for m in max_seqlens),
            not deterministic, out, lse, dout, dlse, [*wanted],
        )  # fmt: skip


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    window: Optional[Tuple[int, int]] = None,
    scale: Optional[float] = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: Optional[int] = None,
    dropout_offset: int = 0,
    dropout_seed_tensor: Optional[Tensor] = None,
    dropout_offset_tensor: Optional[Tensor] = None,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    sink: Optional[Tensor] = None,
    alibi_slopes: Optional[Tensor] = None,
    attn_bias: Optional[Tensor] = None,
    deterministic: bool = True,
    return_lse: bool = False,
) -> Any:
    """Computes `out = dropout(softmax(s)) v`. The scores s are never stored:

        s = cap(scale * q k^T) - alibi + attn_bias, and s = -inf where a key is masked

    q              [B,Tq,H,d], any strides; fastest if the last axis is contiguous, as in k and v
    k              [B,Tk,Hkv,d]. H is a multiple of Hkv: query head h uses the key head h // (H/Hkv)
    v              [B,Tk,Hkv,d_v]
    causal         True: query i attends to key j if j <= i + Tk - Tq. So the last query attends to all keys, as in
                   flash_attn
    window         (left, right), as window_size of flash_attn: query i attends to key j if i + Tk - Tq - left <= j <=
                   i + Tk - Tq + right. -1: no limit on that side. left does not count the token itself: a window of w
                   tokens is (w-1, 0), so sliding_window=4096 of Hugging Face is (4095, 0). With causal=True, right is 0
                   or -1; flash_attn also accepts right > 0
    scale          None: 1/sqrt(d). 0 is an error
    softcap        `cap(x) = softcap * tanh(x / softcap)`. 0: `cap(x) = x`
    dropout_p      the probability of dropping an element of softmax(s). The function has no training mode: pass 0.0 in
                   model.eval()
    dropout_seed, dropout_offset, dropout_seed_tensor, dropout_offset_tensor
                   they determine the dropout mask, as seed, offset, seed_tensor and offset_tensor of cotangent.dropout
    seqused_q, seqused_k   int32 [B]: how many queries and keys of each batch element are used. They take the place of
                   Tq and Tk in the masks. Queries beyond seqused_q get out = 0 and lse = -inf
    sink           [H]: an attention sink for each head, as in gpt-oss. exp(sink[h]) is added to the denominator of the
                   softmax. It has a gradient
    alibi_slopes   [H] or [B,H]: alibi = slope * |i + Tk - Tq - j|, without a gradient
    attn_bias      [B or 1, H or 1, Tq or 1, Tk or 1]: an additive score mask (attn_mask of PyTorch). It is added to the
                   scores, and has a gradient. A value of -65504 (the lowest number of float16) or less masks the key,
                   as -inf does. To apply this rule, each call makes one copy of attn_bias
    deterministic  True, the default: the same bits on every run. False: on a GPU the backward may add the parts of dq in
                   any order, so dq may have other bits in each run. On Hopper this is so mainly for long sequences and
                   GQA. docs/guide/reproducibility.md lists the calls, and the measured times. In all other calls, and on
                   the CPU, False has no effect
    return_lse     True: the result is (out, lse)

    Returns out [B,Tq,H,d_v] in the dtype of q. lse [B,H,Tq] is the logarithm of the sum of exp(s) over the keys and the
    sink, in float32 (float64 if q is float64). flash_attn calls it softmax_lse. Both have gradients. A query that
    attends to no key has out = 0 and lse = -inf; with a sink it has lse equal to `sink`.

    Dtypes of q, k and v: float32, float16, bfloat16, on the CPU also float64. `sink`, alibi_slopes and attn_bias have
    any of float32, float16 and bfloat16. If q is float64, they are float64 too. Train in bfloat16: in float16 dk can lose bits
    (docs/guide/accuracy.md). On a GPU d and d_v are at most 256. Autocast casts q, k and v. Differentiable once, in q, k, v,
    `sink` and attn_bias. Raises ValueError or TypeError, which name the wrong argument, or NotImplementedError (on a GPU:
    float64, d or d_v above 256).

    On Hopper these calls run the portable GPU kernels, which are slower: dropout_p > 0, alibi_slopes, attn_bias, float32, and
    heads that are expanded (k or v with stride 0). docs/guide/performance.md has their times and all conditions.

    >>> q = torch.randn(2, 128, 8, 64, requires_grad=True)  # 8 query heads
    >>> k, v = torch.randn(2, 2, 128, 2, 64)                # 2 key-value heads
    >>> out, lse = cotangent.attention(q, k, v, causal=True, return_lse=True)
    >>> out.shape, lse.shape
    (torch.Size([2, 128, 8, 64]), torch.Size([2, 8, 128]))
    >>> out.sum().backward()                                # q.grad has the gradient
    """
    return _run(
        "attention", q, k, v, (None, None), (0, 0), causal, window, scale, softcap, dropout_p, dropout_seed,
        dropout_offset, dropout_seed_tensor, dropout_offset_tensor, (seqused_q, seqused_k), sink, alibi_slopes, attn_bias,
        deterministic, return_lse,
    )  # fmt: skip


def attention_varlen(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    causal: bool = False,
    window: Optional[Tuple[int, int]] = None,
    scale: Optional[float] = None,
    softcap: float = 0.0,
    dropout_p: float = 0.0,
    dropout_seed: Optional[int] = None,
    dropout_offset: int = 0,
    dropout_seed_tensor: Optional[Tensor] = None,
    dropout_offset_tensor: Optional[Tensor] = None,
    seqused_q: Optional[Tensor] = None,
    seqused_k: Optional[Tensor] = None,
    sink: Optional[Tensor] = None,
    alibi_slopes: Optional[Tensor] = None,
    attn_bias: Optional[Tensor] = None,
    deterministic: bool = True,
    return_lse: bool = False,
) -> Any:
    """cotangent.attention for packed (varlen) sequences: q [total_q,H,d], k [total_k,Hkv,d], v [total_k,Hkv,d_v].
    total_q and total_k are the tokens of all sequences.

    cu_seqlens_q, cu_seqlens_k   int32 [N+1]: sequence b has the queries cu_seqlens_q[b] to cu_seqlens_q[b+1] - 1, and
                                 the keys and values cu_seqlens_k[b] to cu_seqlens_k[b+1] - 1. Both start at 0 and never
                                 decrease
    max_seqlen_q, max_seqlen_k   the length of the longest sequence, or more. On a GPU the call itself raises no error
                                 for wrong values here and in cu_seqlens, and its results are wrong.
                                 cotangent.check_index_data() raises the error later: call it after a batch
    attn_bias                    [N or 1, H or 1, max_seqlen_q or 1, max_seqlen_k or 1]

    The other arguments are those of cotangent.attention, with N in the place of B. Returns out [total_q,H,d_v]. With
    return_lse=True it returns (out, lse) with lse [H,total_q].

    >>> cu_seqlens = torch.tensor([0, 3, 10], dtype=torch.int32)  # two sequences, of 3 and 7 tokens
    >>> q, k, v = torch.randn(3, 10, 4, 64)
    >>> out = cotangent.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 7, 7, causal=True)
    >>> torch.allclose(out[3], v[3])                              # the first token of the second sequence
    True
    """
    return _run(
        "attention_varlen", q, k, v, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), causal, window, scale,
        softcap, dropout_p, dropout_seed, dropout_offset, dropout_seed_tensor, dropout_offset_tensor,
        (seqused_q, seqused_k), sink, alibi_slopes, attn_bias, deterministic, return_lse,
    )  # fmt: skip


def _example(randn: "Callable[..., Tensor]") -> Tensor:
    return attention(randn(1, 4, 2, 16), randn(1, 4, 2, 16), randn(1, 4, 2, 16), causal=True)
