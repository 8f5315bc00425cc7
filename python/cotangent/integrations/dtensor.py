# SPDX-License-Identifier: Apache-2.0
"""Sharding rules of cotangent's ops for DTensor, PyTorch's distributed tensor:

    import cotangent.integrations.dtensor
    cotangent.integrations.dtensor.enable()

After enable(), an op runs on the shards of its inputs without communication, if they are sharded along one of these
axes:

attention            batch (not of packed sequences), or heads, if the number of key heads is a multiple of the number
                     of devices
causal_conv1d        batch (not with cu_seqlens) or channels
causal_conv1d_dense  batch, or output channels if the final state has no gradient
mhc_pre, mhc_sinkhorn, mhc_post, mhc_post_pre
                     batch or time
dropout              any axis, if `p` is 0 or a mask is given. With mask_bits any axis but the last one. If the last
                     axis is sharded, the bias is sharded too

Inputs with other placements are replicated first, which communicates. Attention with dropout and dropout with a
generated mask are always replicated: the generated mask depends on the index of an element in the whole tensor. The
gradient of a parameter that is replicated has the placement Partial: each device has a part of the sum."""
from __future__ import annotations

from typing import Any, Callable, Iterator

from ..ops._define import registered_ops

__all__ = ["enable"]


def _placements() -> Any:
    from torch.distributed.tensor import Partial, Replicate, Shard

    return Replicate(), Shard, Partial()


class _Rule:
    """One way to shard an op over a mesh dimension: the placement of each input and result, by name. Inputs and results
    that are not named are replicated. Inputs that are not tensors have no placement."""

    def __init__(self, **placements: Any) -> None:
        self.placements = placements


Rules = Callable[..., "Iterator[_Rule]"]


def _size(x: Any, axis: int) -> int:
    return 0 if x is None else int(x.shape[axis])


def _attention(backward: bool, **a: Any) -> "Iterator[_Rule]":
    _, Shard, Partial = _placements()
    q, k, bias, slopes = a["q"], a["k"], a["bias"], a["alibi_slopes"]
    if a["dropout_p"] > 0:
        return
    packed = a["cu_seqlens_q"] is not None
    heads, row = (1, 0) if packed else (2, 1)  # the axes of heads in q and in lse
    by_head: "dict[str, Any]" = {n: Shard(heads) for n in ("q", "k", "v", "out", "dout", "dq", "dk", "dv")}
    by_head.update(lse=Shard(row), dlse=Shard(row), sink=Shard(0), dsink=Shard(0))
    if bias is not None and _size(bias, 1) > 1:
        by_head.update(bias=Shard(1), dbias=Shard(1))
    elif bias is not None:
        by_head.update(dbias=Partial)
    if slopes is not None:
        by_head.update(alibi_slopes=Shard(len(slopes.shape) - 1))
    if k.shape[heads] % q.mesh.size() == 0:
        yield _Rule(**by_head)
    if not packed:
        by_batch: "dict[str, Any]" = {n: Shard(0) for n in ("q", "k", "v", "out", "dout", "dq", "dk", "dv", "lse", "dlse",
                                                            "seqused_q", "seqused_k")}  # fmt: skip
        by_batch.update(dsink=Partial)
        if bias is not None:
            by_batch.update(bias=Shard(0), dbias=Shard(0)) if _size(bias, 0) > 1 else by_batch.update(dbias=Partial)
        if slopes is not None and len(slopes.shape) == 2:
            by_batch.update(alibi_slopes=Shard(0))
        yield _Rule(**by_batch)


def _conv(backward: bool, **a: Any) -> "Iterator[_Rule]":
    _, Shard, Partial = _placements()
    states = ("x", "y", "dy", "dx", "initial_state", "final_state", "dinitial_state", "dfinal_state")
    parameters = ("weight", "bias", "dweight", "dbias")
    yield _Rule(**{n: Shard(1) for n in states}, **{n: Shard(0) for n in parameters})
    if a["cu_seqlens"] is None:
        yield _Rule(**{n: Shard(0) for n in (*states, "seq_idx")}, dweight=Partial, dbias=Partial)


def _dense(backward: bool, **a: Any) -> "Iterator[_Rule]":
    _, Shard, Partial = _placements()
    states = ("x", "y", "dy", "dx", "initial_state", "final_state", "dinitial_state", "dfinal_state")
    yield _Rule(**{n: Shard(0) for n in states}, dweight=Partial, dbias=Partial)
    # Each device has some output channels and the whole x, so dx is a partial sum. With dfinal_state this way is wrong:
    # every device would add its contribution to dinitial_state.
    if a.get("dfinal_state") is None:
        yield _Rule(
            **{n: Shard(0) for n in ("weight", "bias", "dweight", "dbias")}, y=Shard(1), dy=Shard(1), dx=Partial,
            dinitial_state=Partial,
        )  # fmt: skip


def _mhc(names: "tuple[str, ...]", partial: "tuple[str, ...]" = ()) -> Rules:
    def rules(backward: bool, **a: Any) -> "Iterator[_Rule]":
        _, Shard, Partial = _placements()
        for axis in (0, 1):
            yield _Rule(**{n: Shard(axis) for n in names}, **{n: Partial for n in partial})

    return rules


def _dropout(backward: bool, **a: Any) -> "Iterator[_Rule]":
    _, Shard, Partial = _placements()
    if a["p"] > 0 and a["mask"] is None and a["mask_bits"] is None:
        return
    x = a["dy"] if backward else a["x"]
    last = len(x.shape) - 1
    names = ("x", "residual", "mask", "y", "mask_out", "dy", "dx")
    for axis in range(last):
        yield _Rule(**{n: Shard(axis) for n in (*names, "mask_bits", "mask_bits_out")}, dbias=Partial)
    if a["mask_bits"] is None and a.get("_export") != 2:
        yield _Rule(**{n: Shard(last) for n in names}, bias=Shard(0), dbias=Shard(0))


_RULES: "dict[str, Rules]" = {
    "attention": _attention,
    "causal_conv1d": _conv,
    "causal_conv1d_dense": _dense,
    "mhc_pre": _mhc(("x", "h_in", "h_post", "h_res_logits", "h_res", "h_pre", "inv_rms", "h_mix", "dx", "dh_in", "dh_post",
                     "dh_res_logits", "dh_res"), ("dphi", "dalpha", "dbias", "dgamma")),
    "mhc_sinkhorn": _mhc(("h_res_logits", "h_res", "dh_res", "dh_res_logits")),
    "mhc_post": _mhc(("x", "f", "h_post", "h_res", "y", "dy", "dx", "df", "dh_post", "dh_res")),
    "mhc_post_pre": _mhc(("x", "f", "h_post", "h_res", "y", "h_in", "h_pre", "next_h_post", "h_res_logits", "next_h_res",
                          "inv_rms", "h_mix", "dx", "df", "dh_post", "dh_res", "dy", "dh_in", "dnext_h_post", "dh_res_logits", "dnext_h_res"),
                     ("dphi", "dalpha", "dbias", "dgamma")),
    "dropout": _dropout,
}  # fmt: skip


def _strategies(op: Any, rules: Rules, backward: bool) -> Callable[..., Any]:
    inputs = [argument.name for argument in op._schema.arguments]
    results = [result.name for result in op._schema.returns]

    def strategies(*arguments: Any) -> Any:
        replicate = _placements()[0]
        given = dict(zip(inputs, arguments))
        tensors = {name for name, value in given.items() if hasattr(value, "placements")}
        absent = _absent_results(op, given, results)
        ways = [_Rule(), *rules(backward, **given)]
        return [
            (
                [None if name in absent else way.placements.get(name, replicate) for name in results],
                [way.placements.get(name, replicate) if name in tensors else None for name in inputs],
            )
            for way in ways
        ]

    return strategies


def _absent_results(op: Any, given: "dict[str, Any]", results: "list[str]") -> "set[str]":
    """The results that are None for these arguments."""
    if "_wanted" in given:
        unsaved = ("x",)  # dropout without an activation does not save x, and still computes dx
        return {
            name
            for name, wanted in zip(results, given["_wanted"])
            if not wanted or (name[1:] not in unsaved and given.get(name[1:], 0) is None)
        }
    absent = set()
    if given.get("_final_state") is False:
        absent.add("final_state")
    if "_export" in given:
        absent |= {name for name, number in (("mask_out", 1), ("mask_bits_out", 2)) if given["_export"] != number}
    if "_sinkhorn" in given:
        absent.add("h_res_logits" if given["_sinkhorn"] else "next_h_res" if "next_h_res" in results else "h_res")
    return absent


def enable() -> None:
    """Adds the sharding rules of this module to PyTorch's. Needs torch.distributed. A second call has no effect. There is
    no disable(): PyTorch cannot remove rules. They change nothing for tensors that are not DTensors.

    >>> import cotangent.integrations.dtensor
    >>> cotangent.integrations.dtensor.enable()
    """
    from torch.distributed.tensor.experimental import register_sharding

    if _registered:
        return
    for name, rules in _RULES.items():
        for suffix in ("forward", "backward"):
            op = getattr(registered_ops, f"{name}_{suffix}").default
            register_sharding(op)(_strategies(op, rules, suffix == "backward"))
        _registered.append(name)


_registered: "list[str]" = []
