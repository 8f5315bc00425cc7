# SPDX-License-Identifier: Apache-2.0
"""Attention and convolution of Hugging Face transformers.

    import cotangent.integrations.transformers
    cotangent.integrations.transformers.enable()
    from transformers import AutoModelForCausalLM
    model = AutoModelForCausalLM.from_pretrained(..., attn_implementation="cotangent")

enable() adds an attention function and its mask function. The mask function describes causal masks, windows, padding
and packed sequences by a few numbers. Kernels then skip masked tiles. Every other mask becomes a bias [B,1,Tq,Tk].

Inside cotangent.distributed.context_parallel, the inputs of the model are the tokens of one rank. Its attention is over
the tokens of all ranks."""
from __future__ import annotations

import importlib
import inspect
import math
import sys
import warnings
from typing import Any, Callable, NamedTuple, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import compat
from ..compat._arguments import refuse
from ..ops.attention import attention, attention_varlen

__all__ = ["attention_forward", "attention_mask", "disable", "enable"]


class Segments(NamedTuple):
    """Sequences inside a batch [B,T] that is flattened to [B*T]."""

    cu_seqlens: Tensor  # int32 [N+1]
    used: Optional[Tensor]  # int32 [N]: tokens of each sequence, None: all
    max_seqlen: int


class Mask(NamedTuple):
    """The mask of a batch. A MaskTensor [B,Tk] has it as its attribute `_cotangent`."""

    causal: bool
    window: Optional[Tuple[int, int]]
    keys: Optional[int]  # the first keys of a static cache that are filled, None: all
    padding: Optional[Tensor]  # bool [B,Tk], True: a token. None: no padding
    lengths: Optional[Tensor]  # int32 [B]: the tokens of each batch element, if all padding is on the right
    segments: Optional[Segments]  # packed sequences; or the tokens between left and right padding
    one_sequence: bool = False  # an attention_mask without padding was given: the positions do not pack sequences


class MaskTensor(Tensor):
    """A bool mask [B,Tk] with the attribute `_cotangent`, which moves to another device with it."""

    _cotangent: Mask

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            result = function(*args, **(kwargs or {}))
        if function in (Tensor.to, Tensor.cuda, Tensor.cpu) and result is not args[0] and result.dtype == torch.bool:
            return _with_mask(result, _moved(args[0]._cotangent, result.device))
        return result


def _with_mask(tokens: Tensor, mask: Mask) -> Tensor:
    tensor = tokens.as_subclass(MaskTensor)
    tensor._cotangent = mask
    return tensor


def _moved(value: Any, device: torch.device) -> Any:
    """The tensors of a Mask on another device."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(part, device) for part in value))
    return value.to(device) if isinstance(value, Tensor) else value


class Band(NamedTuple):
    """Key j is visible to query i if i - left <= j <= i + right and both are in one packed sequence."""

    left: float
    right: float
    packed: Optional[Tensor] = None  # integers [B,T]: the number of the sequence of each token


# ---- mask functions of transformers -----------------------------------------------------------------------


def _cells(function: Any) -> "dict[str, Any]":
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    return dict(zip(function.__code__.co_freevars, values))


class _Recognizer:
    """Translates mask functions of transformers.masking_utils to bands. transformers composes them as closures."""

    def __init__(self, masks: Any) -> None:
        any_mask = masks.causal_mask_function
        self.causal, self.bidirectional = any_mask, masks.bidirectional_mask_function
        self.both = masks.and_masks(any_mask).__code__
        self.window = masks.sliding_window_overlay(1).__code__
        self.window_both_sides = masks.sliding_window_bidirectional_overlay(1).__code__
        self.packed = masks.packed_sequence_mask_function(None).__code__
        remap = getattr(masks, "remap_positions_for_packed_sequence", None)  # from transformers 5.18 on
        self.remapped = remap(any_mask, None).__code__ if remap else None

    def band(self, function: Any) -> Optional[Band]:
        """The band of a mask function, or None for a function that this class does not support."""
        if function is self.causal:
            return Band(math.inf, 0)
        if function is self.bidirectional:
            return Band(math.inf, math.inf)
        code = getattr(function, "__code__", None)
        if code is self.window:
            return Band(_cells(function)["sliding_window"] - 1, math.inf)
        if code is self.window_both_sides:
            size = _cells(function)["sliding_window"]
            return Band(size, size)
        if code is self.packed:
            return Band(math.inf, math.inf, _cells(function)["packed_sequence_mask"])
        if code is not None and code is self.remapped:  # inside a packed sequence, positions differ as indices do
            return self.band(_cells(function)["mask_function"])
        if code is not self.both:
            return None
        parts = [self.band(part) for part in _cells(function)["mask_functions"]]
        bands = [part for part in parts if part is not None]
        packed = [band.packed for band in bands if band.packed is not None]
        if len(bands) < len(parts) or len(packed) > 1:
            return None
        return Band(min(b.left for b in bands), min(b.right for b in bands), packed[0] if packed else None)

    def verify(self, masks: Any) -> bool:
        """Whether the bands equal the masks of this version of transformers."""
        q, k = torch.arange(9)[:, None], torch.arange(9)[None, :]
        first = torch.zeros((), dtype=torch.int64)
        sequences, positions = torch.tensor([[0] * 4 + [1] * 5]), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
        window = masks.sliding_window_causal_mask_function(3)
        if hasattr(masks, "packed_sequence_compatibility_function"):
            packed = masks.packed_sequence_compatibility_function(window, positions, sequences)
        else:
            packed = masks.and_masks(window, masks.packed_sequence_mask_function(sequences))
        for function in (
            masks.causal_mask_function,
            masks.bidirectional_mask_function,
            window,
            masks.sliding_window_bidirectional_mask_function(3),
            packed,
        ):
            band = self.band(function)
            if band is None:
                return False
            visible = (k >= q - band.left) & (k <= q + band.right)
            if band.packed is not None:
                visible = visible & (band.packed[0, q] == band.packed[0, k])
            if not torch.equal(visible, function(first, first, q, k).expand(9, 9)):
                return False
        return True


_recognizer: Optional[_Recognizer] = None


def _segments(starts: Tensor) -> Segments:
    """The sequences of a batch [B,T] whose first tokens are marked True."""
    starts = starts.clone()
    starts[:, 0] = True
    first = starts.flatten().nonzero().flatten()
    ends = F.pad(first, (0, 1), value=starts.numel()).to(torch.int32)
    return Segments(ends, None, int(ends.diff().max()))


def _with_padding(mask: Mask, tokens: Tensor, queries: int) -> Mask:
    """Adds padding to a mask. tokens: bool [B,Tk]."""
    if tokens.all():
        return mask
    B, T = tokens.shape
    if queries != T:
        return mask._replace(padding=tokens)
    count, first = tokens.sum(-1, dtype=torch.int32), tokens.int().argmax(-1)
    column = torch.arange(T, device=tokens.device)
    together = (column >= first[:, None]) & (column < (first + count)[:, None])
    if not torch.equal(together, tokens):
        return mask._replace(padding=tokens)
    if not first.any():
        return mask._replace(padding=tokens, lengths=count)
    # Sequence b + 1 begins at the first token of batch element b and ends before that of the next one. Its used part is
    # the tokens of batch element b. Sequence 0 holds the padding before the first token, and nothing of it is used.
    starts = torch.arange(B, device=tokens.device) * T + first
    ends = F.pad(F.pad(starts, (1, 0)), (0, 1), value=B * T).to(torch.int32)
    return mask._replace(padding=tokens, segments=Segments(ends, F.pad(count, (1, 0)), int(ends.diff().max())))


_with_interface: "dict[type, bool]" = {}


@torch.compiler.assume_constant_result  # type: ignore
def _uses_interface(config: type) -> bool:
    """Whether the models of a config class call the functions of AttentionInterface. Their module then names
    ALL_ATTENTION_FUNCTIONS, or has classes of a module that does. Models of other packages are not known: True."""
    name = config.__module__.replace("configuration_", "modeling_")
    if not name.startswith("transformers.models.") or ".modeling_" not in name:
        return True
    if config not in _with_interface:
        model = importlib.import_module(name)
        others = {getattr(value, "__module__", "") for value in vars(model).values() if isinstance(value, type)}
        modules = [model, *(sys.modules.get(name) for name in others if name.startswith("transformers.models."))]
        _with_interface[config] = any(hasattr(module, "ALL_ATTENTION_FUNCTIONS") for module in modules)
    return _with_interface[config]


def _need_interface(config: Any) -> None:
    """A model that computes its attention itself would use None or a MaskTensor as a mask of its own."""
    if config is not None and not _uses_interface(type(config)):
        raise NotImplementedError(
            f"attn_implementation: the model of {type(config).__name__} computes its attention itself, expected one that "
            "uses AttentionInterface of transformers"
        )


def attention_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Optional[Callable[..., Any]] = None,
    attention_mask: Optional[Tensor] = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = True,
    use_vmap: bool = False,
    device: Any = "cpu",
    **options: Any,
) -> Optional[Tensor]:
    """The mask function of enable(), which transformers calls. It returns None for a plain causal mask, a MaskTensor
    [B,Tk] for a mask that a few numbers describe, or else a bool mask [B,1,Tq,Tk]."""
    from transformers import masking_utils as masks

    _need_interface(options.get("config"))
    mask_function = masks.causal_mask_function if mask_function is None else mask_function
    if _context() is not None:
        return _mask_in_context_parallel(mask_function, attention_mask, batch_size, q_length, kv_length, device)
    band = None
    known = isinstance(q_offset, int) and isinstance(kv_offset, int) and not use_vmap
    if known and torch.compiler.is_compiling():
        # The values of tensors and the parts of composed mask functions are not known here.
        plain = mask_function is masks.causal_mask_function and attention_mask is None and allow_is_causal_skip
        if plain and q_offset + q_length == kv_offset + kv_length:
            return None
    elif known and _recognizer is not None:
        band = _recognizer.band(mask_function)
    if band is not None:
        causal = band.right == 0
        window: Any = tuple(-1 if side >= kv_length - 1 else int(side) for side in (band.left, band.right))
        window = None if window[0] == -1 and (causal or window[1] == -1) else window
        filled = q_offset + q_length - kv_offset  # the keys up to the last query
        skip = allow_is_causal_skip or band.packed is not None if causal else allow_is_bidirectional_skip
        aligned = filled <= kv_length if causal else window is None or (q_length, q_offset) == (kv_length, kv_offset)
    if band is None or not skip or not aligned:
        return masks.sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, allow_is_causal_skip=False,
            allow_is_bidirectional_skip=False, use_vmap=use_vmap, device=device, **options,
        )  # fmt: skip
    mask = Mask(causal, window, filled if causal and filled < kv_length else None, None, None, None)
    if attention_mask is not None:
        tokens = F.pad(attention_mask, (0, max(kv_length + kv_offset - attention_mask.shape[-1], 0)))
        tokens = tokens[:, kv_offset : kv_offset + (mask.keys or kv_length)].bool()
        mask = _with_padding(mask, tokens, q_length)
    if band.packed is not None:
        if mask.padding is not None:
            raise NotImplementedError("attention_mask with padding is not supported by cotangent for packed sequences")
        packed = band.packed.expand(batch_size, -1)
        mask = mask._replace(segments=_segments(F.pad(packed.diff(dim=-1) != 0, (1, 0))))
    elif attention_mask is not None and mask.padding is None:
        mask = mask._replace(one_sequence=True)
    if mask == (True, None, None, None, None, None, False):
        return None
    if mask.padding is None:
        return _with_mask(torch.ones(batch_size, kv_length, dtype=torch.bool, device=device), mask)
    return _with_mask(mask.padding.clone(), mask)


# ---- sequences that are cut over the ranks of a group ---------------------------------------------------------


def _context() -> Any:
    """The active context_parallel, or None."""
    distributed = sys.modules.get(__name__.rpartition(".integrations")[0] + ".distributed")
    return None if distributed is None else distributed.current_context()


def _mask_in_context_parallel(
    mask_function: Any, tokens: Optional[Tensor], batch_size: int, q_length: int, kv_length: int, device: Any
) -> Tensor:
    """The mask inside context_parallel: causal, with or without a window. The positions of a cut sequence have gaps,
    which transformers mistakes for the ends of packed sequences. Packed sequences come from
    context_parallel(cu_seqlens=...)."""
    band = None if _recognizer is None else _recognizer.band(mask_function)
    if band is None:
        raise NotImplementedError("context_parallel: this mask is not supported, expected a causal or full mask or a window")
    if q_length != kv_length:
        raise NotImplementedError(f"context_parallel: {q_length} queries and {kv_length} keys, expected no cache")
    if tokens is not None and not tokens.all():
        raise NotImplementedError("context_parallel: attention_mask has padding, expected none (cu_seqlens packs sequences)")
    window: Any = tuple(-1 if side == math.inf else int(side) for side in (band.left, band.right))
    mask = Mask(band.right == 0, None if window in ((-1, -1), (-1, 0)) else window, None, None, None, None)
    return _with_mask(torch.ones(batch_size, kv_length, dtype=torch.bool, device=device), mask)


def _attend_to_all_ranks(context: Any, query: Tensor, key: Tensor, value: Tensor, options: "dict[str, Any]") -> Tensor:
    """The attention of this rank's queries to the keys of all ranks."""
    from .. import distributed

    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    where = dict(group=context.group, cut=context.cut, stripe=context.stripe, head_ranks=context.head_ranks,
                 all_gather=context.all_gather, q_length=context.length, k_length=context.length)  # fmt: skip
    if context.cu_seqlens is None:
        out: Tensor = distributed.attention(q, k, v, **options, **where)
        return out
    if q.shape[0] != 1:
        raise NotImplementedError(f"context_parallel: cu_seqlens with a batch of {q.shape[0]}, expected 1")
    ends, max_seqlen = context.cu_seqlens, context.max_seqlen
    out = distributed.attention_varlen(q[0], k[0], v[0], ends, ends, max_seqlen, max_seqlen, **options, **where)
    return out[None]


# ---- attention --------------------------------------------------------------------------------------------


def _kept(tensor: Tensor, name: str, key: Any, make: Callable[[], Any]) -> Any:
    """make(), kept as an attribute of the tensor for the next layers, until the tensor is changed in place. Results of
    inference mode cannot be used for training, and inference tensors do not count their changes."""
    if torch.compiler.is_compiling() or tensor.is_inference():
        return make()
    key = (key, tensor._version, torch.is_inference_mode_enabled())
    kept = getattr(tensor, name, None)
    if kept is None or kept[0] != key:
        kept = (key, make())
        setattr(tensor, name, kept)
    return kept[1]


def _as_bias(mask: Tensor, q: Tensor) -> Tensor:
    """A bias from a mask [B,1,Tq,Tk] or [B,1,1,Tk]. The bias of a bool mask is kept for the next layers."""
    if mask.dtype != torch.bool:
        return mask.to(q.dtype) if torch.float64 in (mask.dtype, q.dtype) else mask
    bias: Tensor = _kept(mask, "_cotangent_bias", q.dtype,
                         lambda: torch.zeros_like(mask, dtype=q.dtype).masked_fill(~mask, -math.inf))  # fmt: skip
    return bias


def _within_sequences(mask: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, B: int, T: int) -> Tensor:
    """A mask [B or 1,H or 1,T,T] that also masks the keys of other packed sequences. It is the same if the mask has
    done so already. No value is read on the CPU, so a compiled model can run it."""
    token = torch.arange(B * T, device=mask.device)
    q, k = (torch.searchsorted(ends.long(), token, right=True).view(B, 1, T) for ends in (cu_seqlens_q, cu_seqlens_k))
    other = q[..., :, None] != k[..., None, :]
    return mask & ~other if mask.dtype == torch.bool else mask.masked_fill(other, -math.inf)


def _packed_by_positions(position_ids: Any, B: int, T: int) -> Optional[Segments]:
    """The packed sequences of position ids [B,T] or [1,T]: a sequence ends where the next position is not one more.
    None if every batch element is one sequence. The result is kept for the next layers."""
    if not isinstance(position_ids, Tensor) or position_ids.dim() != 2 or position_ids.shape[1] != T:
        return None
    if torch.compiler.is_compiling() or position_ids.shape[0] not in (1, B):
        return None

    def find() -> Optional[Segments]:
        starts = F.pad(position_ids.diff(dim=-1) != 1, (1, 0))
        return _segments(starts.expand(B, T)) if starts.any() else None

    segments: Optional[Segments] = _kept(position_ids, "_cotangent_segments", (B, T), find)
    return segments


def attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Optional[Tensor],
    dropout: float = 0.0,
    scaling: Optional[float] = None,
    sliding_window: Optional[int] = None,
    softcap: Optional[float] = None,
    is_causal: Optional[bool] = None,
    s_aux: Optional[Tensor] = None,
    position_bias: Optional[Tensor] = None,
    position_ids: Optional[Tensor] = None,
    cu_seq_lens_q: Optional[Tensor] = None,
    cu_seq_lens_k: Optional[Tensor] = None,
    max_length_q: Any = None,
    max_length_k: Any = None,
    cache: Any = None,
    block_table: Optional[Tensor] = None,
    head_mask: Optional[Tensor] = None,
    output_attentions: bool = False,
    **others: Any,
) -> "Tuple[Tensor, None]":
    """The attention function of enable(), which transformers calls: `query` [B,H,Tq,d], `key` [B,Hkv,Tk,d], `value`
    [B,Hkv,Tk,d_v] -> (out [B,Tq,H,d_v], None).

    attention_mask  None, a result of the function attention_mask, or any mask [B or 1, H or 1, Tq, Tk]. It is bool, or
                    it has numbers that are added to the scores. A number of -65504 or less masks the key
    s_aux           [H]: an attention sink for each head
    position_bias   [1 or B,H,Tq,Tk], added to the scores; has a gradient
    position_ids    [B,T]: packed sequences, if a batch element has several and attention_mask is None
    cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k
                    packed sequences of the flattened batch, as DataCollatorWithFlattening gives them

    Paged caches, head_mask and output_attentions raise NotImplementedError."""
    refuse("attn_implementation", cache=cache, block_table=block_table, head_mask=head_mask,
           output_attentions=output_attentions)  # fmt: skip
    mask: Optional[Mask] = getattr(attention_mask, "_cotangent", None)
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    window = None
    if attention_mask is not None and attention_mask.dim() == 4:
        causal = False  # the mask contains it
    elif mask is not None:
        causal, window = mask.causal, mask.window
    else:
        if sliding_window is not None and (sliding_window < key.shape[2] or _context() is not None):
            window = (sliding_window - 1, 0 if causal else sliding_window - 1)
        mask = Mask(causal, window, None, None, None, None)
        if attention_mask is not None:  # a copy of a mask [B,Tk], which has lost its attribute
            tokens = attention_mask[:, -key.shape[2] :].bool()
            mask = _with_padding(mask, F.pad(tokens, (0, key.shape[2] - tokens.shape[1])), query.shape[2])
    sink = s_aux if s_aux is None or torch.float64 not in (s_aux.dtype, query.dtype) else s_aux.to(query.dtype)
    context = _context()
    if context is not None:
        if mask is None or mask.padding is not None or position_bias is not None or query.shape[2] != key.shape[2]:
            raise NotImplementedError("context_parallel: expected a causal or full mask or a window, no padding, "
                                      "position_bias or cache")  # fmt: skip
        given: "dict[str, Any]" = dict(
            causal=causal, window=window, scale=scaling, softcap=softcap or 0.0, dropout_p=dropout, sink=sink
        )
        return _attend_to_all_ranks(context, query, key, value, given), None
    if mask is not None and mask.keys is not None:
        key, value = key[:, :, : mask.keys], value[:, :, : mask.keys]
    q, k, v = (x.transpose(1, 2) for x in (query, key, value))
    B, Tq, Tk = q.shape[0], q.shape[1], k.shape[1]
    if k.shape[0] != B:  # a learned query or a shared key
        B = max(B, k.shape[0])
        q, k, v = (x.expand(B, -1, -1, -1) for x in (q, k, v))

    options: "dict[str, Any]" = dict(
        causal=causal and Tq > 1, window=window, scale=scaling, softcap=softcap or 0.0, dropout_p=dropout, sink=sink
    )
    segments, lengths = (mask.segments, mask.lengths) if mask is not None else (None, None)
    bias = None
    if mask is None:
        assert attention_mask is not None
        if cu_seq_lens_q is not None and Tq == Tk == attention_mask.shape[-1]:
            ends = cu_seq_lens_q if cu_seq_lens_k is None else cu_seq_lens_k
            attention_mask = _within_sequences(attention_mask, cu_seq_lens_q, ends, B, Tq)
        bias = _as_bias(attention_mask, q)[..., :Tk]
    elif mask.padding is None and segments is None and Tq == Tk and Tq > 1:
        if cu_seq_lens_q is not None and cu_seq_lens_k is not None and max_length_q is not None:
            max_seqlen = max(int(max_length_q), int(max_length_q if max_length_k is None else max_length_k))
            same = cu_seq_lens_q is cu_seq_lens_k or torch.compiler.is_compiling() or torch.equal(cu_seq_lens_q, cu_seq_lens_k)
            if not same:
                raise NotImplementedError("cotangent attention: cu_seq_lens_k must equal cu_seq_lens_q")
            segments = Segments(cu_seq_lens_q.to(torch.int32), None, max_seqlen)
        elif not mask.one_sequence:
            segments = _packed_by_positions(position_ids, B, Tq)
    if mask is not None and mask.padding is not None and (position_bias is not None or (segments, lengths) == (None, None)):
        bias, segments, lengths = _as_bias(mask.padding[:, None, None, :], q), None, None
    if position_bias is not None:
        if segments is not None:
            raise NotImplementedError(
                "attn_implementation: position_bias is not supported by cotangent for packed sequences"
            )
        position_bias = position_bias[..., :Tk]
        bias = position_bias if bias is None else position_bias + bias
    if segments is None:
        out = attention(q, k, v, attn_bias=bias, seqused_q=lengths, seqused_k=lengths, **options)
        return out, None
    ends, max_seqlen = segments.cu_seqlens, segments.max_seqlen
    out = attention_varlen(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), ends, ends, max_seqlen, max_seqlen, seqused_q=segments.used,
        seqused_k=segments.used, **options,
    )  # fmt: skip
    return out.unflatten(0, (B, Tq)), None


# ---- switching on and off ---------------------------------------------------------------------------------


def enable(name: str = "cotangent", *, convolution: bool = True) -> None:
    """After this call attn_implementation=name selects cotangent's attention in every model that uses
    AttentionInterface. Call it before the model is built.

    name         the name for attn_implementation
    convolution  True: enable() also calls compat.install("causal_conv1d"), so that models which import causal_conv1d
                 use cotangent's convolution. These models look for the package when their Python module is imported:
                 call enable() before that

    disable() reverts it. Raises ImportError if transformers is missing, or if its sdpa_mask has no argument
    q_length. Warns if it does not recognise the mask functions of transformers: every mask then becomes a bias, which is
    slow, and context_parallel raises NotImplementedError. Warns too if a model was imported before.

    >>> import cotangent.integrations.transformers
    >>> cotangent.integrations.transformers.enable()
    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> config = LlamaConfig(vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4)
    >>> model = LlamaForCausalLM._from_config(config, attn_implementation="cotangent")
    >>> model(input_ids=torch.randint(61, (2, 100))).logits.shape
    torch.Size([2, 100, 61])
    >>> cotangent.integrations.transformers.disable()
    """
    import transformers
    from transformers import masking_utils as masks

    if "q_length" not in inspect.signature(masks.sdpa_mask).parameters:
        raise ImportError(f"transformers is {transformers.__version__}, expected a version whose sdpa_mask has q_length")
    global _recognizer
    try:
        recognizer = _Recognizer(masks)
        _recognizer = recognizer if recognizer.verify(masks) else None
    except (AttributeError, KeyError, TypeError):  # other mask functions
        _recognizer = None
    if _recognizer is None:
        warnings.warn(
            f"cotangent: the mask functions of transformers {transformers.__version__} are not recognised, so every mask "
            "becomes a bias, which is slow", stacklevel=2
        )  # fmt: skip
    transformers.AttentionInterface.register(name, attention_forward)
    transformers.AttentionMaskInterface.register(name, attention_mask)
    if not convolution:
        return
    early = [n for n, module in sys.modules.items()
             if n.startswith("transformers.models.") and ".modeling_" in n and hasattr(module, "causal_conv1d_fn")
             and getattr(sys.modules.get("causal_conv1d"), "causal_conv1d_fn", None)
             is not compat.causal_conv1d.causal_conv1d_fn]  # fmt: skip
    if early:
        warnings.warn(
            f"cotangent: {early[0]} was imported before enable(), so it keeps its own convolution", stacklevel=2
        )
    if "causal_conv1d" not in compat._replaced:
        compat.install("causal_conv1d")
        _installed_by.add(name)


def disable(name: str = "cotangent") -> None:
    """Reverts enable(name). Call model.set_attn_implementation("sdpa") first for each model that has this
    implementation. Model modules that have imported cotangent's convolution keep it.

    >>> import cotangent.integrations.transformers
    >>> cotangent.integrations.transformers.enable()
    >>> cotangent.integrations.transformers.disable()
    """
    import transformers

    for interface in (transformers.AttentionInterface, transformers.AttentionMaskInterface):
        interface._global_mapping.pop(name, None)
    if name in _installed_by:
        _installed_by.discard(name)
        compat.uninstall("causal_conv1d")


_installed_by: "set[str]" = set()  # the names whose enable() installed causal_conv1d
