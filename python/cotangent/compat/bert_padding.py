# SPDX-License-Identifier: Apache-2.0
"""Conversion between padded and packed batches, with the names of flash_attn.bert_padding. In plain PyTorch.
unpad_input synchronises with the device, because it needs the number of tokens."""
from __future__ import annotations

from typing import Optional, Tuple

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "index_first_axis", "index_put_first_axis", "pad_input", "unpad_input", "unpad_input_for_concatenated_sequences",
]  # fmt: skip


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """Returns the rows `indices` of x.

    >>> from cotangent.compat.bert_padding import index_first_axis
    >>> index_first_axis(torch.tensor([5, 6, 7]), torch.tensor([2, 0]))
    tensor([7, 5])
    """
    return x[indices]


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Returns a tensor with first_axis_dim rows: `values` at the rows `indices`, zeros elsewhere.

    >>> from cotangent.compat.bert_padding import index_put_first_axis
    >>> index_put_first_axis(torch.tensor([7, 5]), torch.tensor([2, 0]), 4)
    tensor([5, 0, 7, 0])
    """
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices, values)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Optional[Tensor] = None
) -> "Tuple[Tensor, Tensor, Tensor, int, Tensor]":
    """Packs the tokens of [B,T,...] where attention_mask [B,T] or unused_mask is 1. Returns (tokens [total,...], their
    indices in B*T, cu_seqlens int32 [B+1], the longest length, `used` int32 [B]). `used` counts the tokens of
    attention_mask in each sequence.

    >>> from cotangent.compat.bert_padding import unpad_input
    >>> x, mask = torch.tensor([[1, 2, 0], [3, 0, 0]]), torch.tensor([[1, 1, 0], [1, 0, 0]])
    >>> tokens, indices, cu_seqlens, max_seqlen, used = unpad_input(x, mask)
    >>> tokens, cu_seqlens, max_seqlen
    (tensor([1, 2, 3]), tensor([0, 2, 3], dtype=torch.int32), 2)
    """
    taken = attention_mask if unused_mask is None else attention_mask + unused_mask
    lengths = taken.sum(-1, dtype=torch.int32)
    indices = taken.flatten().nonzero().flatten()
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    used = attention_mask.sum(-1, dtype=torch.int32)
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, int(lengths.max()), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> "Tuple[Tensor, Tensor, Tensor, int]":
    """Packs [B,T,...] whose rows hold several sequences one after the other. attention_mask_in_length [B,T] begins with
    their lengths, and the rest of each row is 0. Returns (tokens [total,...], their indices in B*T, cu_seqlens int32
    [sequences+1], the longest length).

    >>> from cotangent.compat.bert_padding import unpad_input_for_concatenated_sequences
    >>> x, lengths = torch.tensor([[1, 2, 3, 0]]), torch.tensor([[2, 1, 0, 0]])  # sequences of 2 and of 1 token
    >>> tokens, indices, cu_seqlens, max_seqlen = unpad_input_for_concatenated_sequences(x, lengths)
    >>> tokens, cu_seqlens
    (tensor([1, 2, 3]), tensor([0, 2, 3], dtype=torch.int32))
    """
    used = attention_mask_in_length.sum(-1, keepdim=True)
    column = torch.arange(attention_mask_in_length.shape[-1], device=used.device)
    indices = (column < used).flatten().nonzero().flatten()
    lengths = attention_mask_in_length[attention_mask_in_length > 0]
    cu_seqlens = F.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return hidden_states.flatten(0, 1)[indices], indices, cu_seqlens, int(lengths.max())


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The inverse of unpad_input: [total,...] -> [B,T,...], with zeros where there is no token.

    >>> from cotangent.compat.bert_padding import pad_input
    >>> pad_input(torch.tensor([1, 2, 3]), torch.tensor([0, 1, 3]), 2, 3)
    tensor([[1, 2, 0],
            [3, 0, 0]])
    """
    return index_put_first_axis(hidden_states, indices, batch * seqlen).unflatten(0, (batch, seqlen))
