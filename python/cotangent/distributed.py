# SPDX-License-Identifier: Apache-2.0
"""Attention and convolution of sequences that are cut over the ranks of a process group (context parallelism).

    import cotangent.distributed as cp

    x = cp.shard(x, dim=1, cut="zigzag")                  # [B, T, ...] -> the tokens of this rank
    out = cp.attention(q, k, v, causal=True, cut="zigzag")
    cp.all_reduce_gradients(model.parameters())

docs/guide/context_parallel_pytorch.md has whole programs. The examples of the docstrings also need
`import torch, torch.distributed as dist` and dist.init_process_group("gloo"). Arguments that all functions share:

group   a ProcessGroup, a DeviceMesh with one dimension, the name of a group, or None for the default group. CPU tensors
        need the backend gloo. CUDA tensors need NCCL, and each rank needs a GPU of its own
cut     which tokens of a sequence of T tokens a rank holds, always in ascending order. It has no default: pass the same
        cut and stripe to every function. Ranks compare the arguments of one call, so different cuts on two ranks raise
        an error. Different cuts in two calls, such as shard and attention, do not: the result is wrong. "contiguous":
        one range. "zigzag": one chunk from the front, and its mirror image from the back. "striped": stripes of
        `stripe` tokens; stripe i belongs to rank i modulo the number of ranks. T need not be a multiple of the number
        of ranks. include/cotangent/parallel.h has the formulas
stripe  the tokens of a stripe. It is required with cut="striped": any number from 1; 128 or more is fast. With the other
        cuts it is 0
q_length, k_length, length
        the number of tokens of the whole sequence. Attention has one for the queries and one for the keys. By default this
        rank's tokens times the number of ranks: pass them if the ranks have different numbers of tokens. `positions` has
        no default

Every rank makes the same calls in the same order, forward and backward. At the start of a call, all ranks compare their
arguments. Three kinds of errors are possible:

- The arguments of the ranks differ. Every rank gets RuntimeError with the rank and the name of the argument.
- The arguments of one rank are invalid. This rank gets the exception of the function in cotangent with the same name.
  The others get RuntimeError. In these two cases nothing has been written, and the group stays usable.
- A rank fails, leaves, or does not answer within the timeout of prepare_group(). Every rank gets RuntimeError, and so does
  every later call: destroy the process group and create a new one.

Gradients. The loss of the whole sequence is the sum of the losses of the ranks. So the gradient of a tensor that all
ranks share is the sum of the gradients of the ranks. all_reduce_gradients adds them. DDP and FSDP2 add them and divide
by the number of ranks. docs/guide/context_parallel_pytorch.md has a table: which loss needs which factor.

CUDA tensors. A call returns when the ranks have compared their arguments and its work is enqueued on the current
stream. If a rank dies after that, the work of the others never ends. check_group() and the next call then raise
RuntimeError. Call check_group() before torch.cuda.synchronize(), which would wait for ever. A CUDA graph cannot capture
a call. Each call needs memory for its results in float32 and for the keys and values of three ranks, with all_gather
for those of all ranks. The group keeps this memory for the next call."""
from __future__ import annotations

import re
import threading
import weakref
from contextlib import contextmanager, suppress
from ctypes import CDLL, Structure, byref, c_char, c_int, c_uint8, c_void_p
from datetime import timedelta
from functools import partial
from typing import Any, Callable, Iterable, Iterator, NamedTuple, Optional, Sequence, Tuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from . import _C
from ._context import contexts
from ._namespace import NAMESPACE
from .ops import attention as _attention, causal_conv1d as _conv
from .ops._define import _MISSING, _as_tuple, define, gradients_like, registered_ops
from .ops._options import activation_number, flag, need_tensors, number, pair, random_seed, seed_number

__all__ = [
    "all_reduce", "all_reduce_gradients", "attention", "attention_varlen", "causal_conv1d", "check_group",
    "context_parallel", "positions", "prepare_group", "shard", "unshard",
]  # fmt: skip

# cot_cut
_CUTS = {"contiguous": 0, "zigzag": 1, "striped": 2}


# ---- groups -----------------------------------------------------------------------------------------------


class _Transport:
    """The transfers of a group, on the ProcessGroup. The library starts every transfer and waits for it.

    At the start, each rank posts a receive for a notice of every other rank. A rank that fails sends its reason to all
    ranks. Then it closes its connections: gloo does so when a wait exceeds its timeout. The waits of the other ranks
    then fail at once, and each rank reads the notice."""

    FIRST_TAG = 0x636F7400  # keeps the tags of the user free; the notices have this tag

    def __init__(self, group: Any) -> None:
        self.group = weakref.ref(group)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.ranks = dist.get_process_group_ranks(group)
        self.transfers: "dict[int, tuple[Any, Tensor]]" = {}
        self.count = 0
        self.notices = [
            (torch.zeros(320, dtype=torch.uint8), peer) for peer in range(self.size) if peer != self.rank
        ]
        self.receives = [self._start(True, peer, self.FIRST_TAG, notice) for notice, peer in self.notices]

    def _start(self, receive: bool, peer: int, tag: int, memory: Tensor) -> Any:
        transfer = dist.irecv if receive else dist.isend
        return transfer(memory, self.ranks[peer], group=self.group(), tag=tag)

    def start(self, receive: int, peer: int, tag: int, address: int, size: int) -> int:
        memory = torch.frombuffer((c_uint8 * size).from_address(address), dtype=torch.uint8)
        self.count += 1
        try:
            self.transfers[self.count] = self._start(bool(receive), peer, self.FIRST_TAG + 1 + tag, memory), memory
        except Exception as error:
            raise self._explained(error) from error
        return self.count

    def wait(self, transfer: int, seconds: float) -> None:
        try:
            self.transfers[transfer][0].wait(timedelta(seconds=seconds))
        except Exception as error:
            raise self._explained(error) from error
        del self.transfers[transfer]

    def _explained(self, error: Exception) -> Exception:
        """The notice of another rank, or gloo's message without its source line and advice."""
        for notice, _ in self.notices:
            if notice[0] != 0:
                return RuntimeError(bytes(notice.tolist()).rstrip(b"\0").decode(errors="replace"))
        return RuntimeError(re.sub(r"^\[\S*\] ", "", str(error)).split(". ")[0].split("\n")[0])

    def abort(self, reason: str) -> None:
        text = reason.encode()[:319]
        notice = torch.zeros(320, dtype=torch.uint8)
        notice[: len(text)] = torch.tensor(list(text), dtype=torch.uint8)
        sends = []
        for _, peer in self.notices:
            with suppress(Exception):  # the peer has left
                sends.append(self._start(False, peer, self.FIRST_TAG, notice))
        for send in sends:
            with suppress(Exception):
                send.wait(timedelta(seconds=1))
        self.transfers.clear()
        for _, peer in self.notices:
            with suppress(Exception):  # expected: no rank sends with this tag
                self._start(True, peer, self.FIRST_TAG - 1, notice).wait(timedelta(milliseconds=1))


class _Group(NamedTuple):
    handle: Any  # of _C.make_group or _C.make_nccl_group
    rank: int
    device: "Optional[int]"  # None: the CPU
    lock: threading.Lock  # one thread at a time may use the handle

    def place(self) -> int:
        """Where a call runs: the number of threads, or the current stream."""
        return torch.get_num_threads() if self.device is None else int(torch.cuda.current_stream(self.device).cuda_stream)


# The handles of a ProcessGroup: one for CPU tensors, and one for each GPU whose tensors this rank has passed.
_groups: "weakref.WeakKeyDictionary[Any, dict[Optional[int], _Group]]" = weakref.WeakKeyDictionary()
_timeouts: "weakref.WeakKeyDictionary[Any, float]" = weakref.WeakKeyDictionary()  # of prepare_group() without a device


def _name_of(group: Any) -> str:
    """The name of a group, for the schemas of ops."""
    if isinstance(group, str):
        return group
    if group is None:
        group = dist.group.WORLD
        if group is None:
            raise ValueError("cotangent.distributed: call torch.distributed.init_process_group first")
    elif hasattr(group, "get_group"):
        if group.ndim != 1:
            raise ValueError(f"cotangent.distributed: the DeviceMesh has {group.ndim} dimensions, expected 1")
        group = group.get_group()
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"cotangent.distributed: group is {group!r}, expected a ProcessGroup of this rank, a DeviceMesh "
                        "with one dimension, or a name")  # fmt: skip
    return str(group.group_name)


_process_group: Any = getattr(distributed_c10d, "_resolve_process_group")  # by name, as functional collectives do


@torch.compiler.assume_constant_result  # type: ignore
def _size_of(group: str) -> int:
    return int(dist.get_world_size(_process_group(group)))


class _UniqueId(Structure):
    """ncclUniqueId"""

    _fields_ = [("internal", c_char * 128)]


_NCCL = "libnccl.so.2"  # which torch has loaded


def _exchange(process_group: Any, own: bytes, timeout: float) -> "list[bytes]":
    """The bytes of all ranks."""
    backends = str(dist.get_backend_config(process_group))
    device = torch.device("cpu" if "cpu" in backends else "cuda")
    mine = torch.tensor(list(own), dtype=torch.uint8, device=device)
    every = [torch.empty_like(mine) for _ in range(dist.get_world_size(process_group))]
    dist.all_gather(every, mine, group=process_group, async_op=True).wait(timedelta(seconds=timeout))
    return [bytes(each.tolist()) for each in every]


def _nccl_handle(process_group: Any, device: int, timeout: float) -> Any:
    """A handle over a NCCL communicator of its own. The ranks exchange NCCL's id on the ProcessGroup. The communicator
    of torch is not used: it is private, and torch creates it when it needs it."""
    rank, size = dist.get_rank(process_group), dist.get_world_size(process_group)
    unique, comm, why = _UniqueId(), c_void_p(), ""
    try:
        nccl = CDLL(_NCCL)
        result = nccl.ncclGetUniqueId(byref(unique))
        why = f"ncclGetUniqueId returned {result}" if result else ""
    except (OSError, AttributeError) as error:
        why = str(error)
    # All ranks learn of a failure before any of them waits in NCCL.
    own = bytes([not why]) + (bytes(unique) if not why else why.encode()[:128].ljust(128, b"\0"))
    for other, each in enumerate(_exchange(process_group, own, timeout)):
        if not each[0]:
            reason = each[1:].rstrip(b"\0").decode(errors="replace")
            raise RuntimeError(f"cotangent.distributed: rank {other} has no NCCL for CUDA tensors: {reason}")
        if other == 0:
            unique = _UniqueId.from_buffer_copy(each[1:])
    with torch.cuda.device(device):
        nccl.ncclCommInitRank.argtypes = [c_void_p, c_int, _UniqueId, c_int]
        result = nccl.ncclCommInitRank(byref(comm), size, unique, rank)
        if result:
            raise RuntimeError(f"cotangent.distributed: rank {rank}: ncclCommInitRank returned {result}")
        try:
            return _C.make_nccl_group(comm.value or 0, device, timeout)  # duplicates the communicator
        finally:
            nccl.ncclCommDestroy(comm)


def _cpu_handle(process_group: Any, timeout: float) -> Any:
    backends = str(dist.get_backend_config(process_group))
    if "cpu" not in backends:
        raise ValueError(f"cotangent.distributed: the group has the backends {backends}, expected one for the CPU "
                         "(init_process_group('cpu:gloo,cuda:nccl'))")  # fmt: skip
    transport = _Transport(process_group)
    return _C.make_group(transport, transport.rank, transport.size, timeout)


def _group(name: str, device: "Optional[int]" = None, timeout: "Optional[float]" = None) -> _Group:
    """The library's handle for a group and a device; None: the CPU. All ranks must make the first call."""
    process_group = _process_group(name)
    handles = _groups.setdefault(process_group, {})
    found = handles.get(device)
    if found is None:
        if timeout is None:
            timeout = _timeouts.get(process_group, 30.0)
        handle = (
            _cpu_handle(process_group, timeout) if device is None else _nccl_handle(process_group, device, timeout)
        )
        found = handles[device] = _Group(handle, dist.get_rank(process_group), device, threading.Lock())
    return found


def _group_of(name: str, x: Tensor) -> _Group:
    """The handle for the device of a tensor."""
    return _group(name, x.get_device() if x.is_cuda else None)


_IN_USE = "prepare_group: the group is already in use, expected prepare_group() before all other calls"


def prepare_group(group: Any = None, *, timeout: float = 30.0, device: Any = None) -> None:
    """Prepares the group: sets its timeout and, with device=, creates its connections. All ranks must call it, before
    the first call of the group. Without prepare_group() the timeout is 30 seconds. Raises ValueError if the group
    is already in use, with a device only if it is in use on this device.

    device   None: the timeout is for tensors on every device, and the first call with a tensor on a device prepares
             the group for this device. "cpu" or "cuda": prepares the group for this device now, with this timeout
    timeout  how many seconds a rank waits for another rank without any progress. It must be longer than the time that
             one rank computes between two calls of this module while the others wait. On a GPU it must also be longer
             than the longest call

    >>> group = dist.new_group(backend="gloo")
    >>> cp.prepare_group(group, timeout=600)     # a rank may compute for 10 minutes before it answers
    >>> positions = cp.positions(100, group=group, cut="zigzag")
    """
    name, seconds = _name_of(group), float(number("prepare_group", "timeout", timeout))
    process_group = _process_group(name)
    if device is None:
        if process_group in _timeouts or _groups.get(process_group):
            raise ValueError(_IN_USE)
        _timeouts[process_group] = seconds
        return
    place = torch.device(device)
    if place.type not in ("cpu", "cuda"):
        raise ValueError(f"prepare_group: device is {place}, expected cpu or cuda")
    index = None if place.type == "cpu" else torch.cuda.current_device() if place.index is None else place.index
    if index in _groups.get(process_group, {}):
        raise ValueError(_IN_USE)
    _group(name, index, seconds)


def check_group(group: Any = None) -> None:
    """Waits for the work of the last call with CUDA tensors, at most for the timeout of prepare_group(). Raises
    RuntimeError if a rank has failed. The results of that call are then undefined, and its work on the GPU has ended.
    Does nothing for a group without such calls. The other ranks need not call it.

    >>> cp.check_group()  # before torch.cuda.synchronize(), and before a checkpoint is saved
    """
    for found in list(_groups.get(_process_group(_name_of(group)), {}).values()):
        with found.lock:
            _C.check_group(found.handle)


def _cut_number(call: str, cut: Any) -> int:
    if cut not in _CUTS:
        raise ValueError(f"{call}: cut is {cut!r}, expected one of {', '.join(_CUTS)}")
    return _CUTS[cut]


# ---- calls of the library -----------------------------------------------------------------------------------


def _group_kernels(
    shared: "Callable[..., Sequence[str]]", plan: Any, outputs: Callable[..., Any], op: Any, prepare: Any
) -> "tuple[Callable[..., Any], Callable[..., Any]]":
    """The kernels of an op over a group. shared(**arguments): the names of the results of which the library computes
    the whole on every rank. All ranks but the first return zeros for them."""
    names = [argument.name for argument in op._schema.arguments]
    results_names = [result.name for result in op._schema.returns]

    def kernel(*arguments: Any) -> Any:
        given = dict(zip(names, arguments))
        first = next(value for value in arguments if isinstance(value, Tensor))
        group = _group_of(given["_group"], first)
        try:
            results = outputs(*arguments)
        except _MISSING:
            results = (None,) * len(results_names)
        if prepare is not None:
            arguments = prepare(*arguments)
        with group.lock:
            _C.run_group(
                plan, group.handle, group.place(), given["_cut"], given["_stripe"], given.get("_head_ranks", 0),
                given.get("_length", 0), given.get("_all_gather", 0), *arguments, *_as_tuple(results),
            )  # fmt: skip
        if group.rank > 0:
            for name in shared(**given):
                result = _as_tuple(results)[results_names.index(name)]
                if result is not None:
                    result.zero_()
        return results

    return kernel, kernel


def _shared_gradients_of_attention(bias: Any, cu_seqlens_q: Any, **others: Any) -> "Sequence[str]":
    bias_is_shared = bias is not None and (cu_seqlens_q is not None or (bias.dim() == 4 and bias.shape[2] == 1))
    return ("dsink", "dbias") if bias_is_shared else ("dsink",)


def _no_shared_results(**arguments: Any) -> "Sequence[str]":
    return ()


_PLACE = "str _group, int _cut, SymInt _stripe"
_LENGTHS = f"SymInt q_length, SymInt k_length, {_PLACE}, int _head_ranks, bool _all_gather"

_attention_backward = define(
    f"parallel_attention_backward({_attention._INPUTS}, {_attention._OPTIONS}, int allow_nondeterminism, {_LENGTHS}, "
    "Tensor out, Tensor lse, Tensor dout, Tensor? dlse, bool[] _wanted) "
    "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dsink, Tensor dbias)",
    _attention._gradients,
    prepare=lambda *arguments: _attention._with_masks(arguments[-1][4], *arguments),
    function="attention_backward",
    kernels=partial(_group_kernels, _shared_gradients_of_attention),
)

_attention_forward = define(
    f"parallel_attention_forward({_attention._INPUTS}, {_attention._OPTIONS}, int _allow_nondeterminism, {_LENGTHS}) "
    "-> (Tensor out, Tensor lse)",
    _attention._outputs,
    _attention_backward,
    autocast=("q", "k", "v"),
    prepare=lambda *arguments: _attention._with_masks(False, *arguments),
    function="attention_forward",
    kernels=partial(_group_kernels, _no_shared_results),
)


def _whole_state_gradient(*arguments: Any) -> "tuple[Any, ...]":
    """Every rank has the whole final state, so the gradient of the state is the sum over the ranks."""
    x, weight, _, initial_state, _, cu_seqlens, _, with_state, _, group = arguments[:10]
    if not with_state:
        return arguments
    *before, gradient, wanted = arguments
    if gradient is None:
        rows = x.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
        like = x if initial_state is None else initial_state
        gradient = like.new_zeros((rows, x.shape[1], max(weight.shape[1] - 1, 0)))
    return (*before, _sum(gradient.contiguous(), group), wanted)


_conv_backward = define(
    "parallel_causal_conv1d_backward(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? seq_idx, "
    f"Tensor? cu_seqlens, int activation, bool _final_state, SymInt _length, {_PLACE}, Tensor dy, "
    "Tensor? dfinal_state, bool[] _wanted) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial_state)",
    lambda x, weight, bias, initial_state, *others: gradients_like((x, weight, bias, initial_state), others[-1]),
    prepare=_whole_state_gradient,
    function="causal_conv1d_backward",
    kernels=partial(_group_kernels, lambda **arguments: ("dweight", "dbias", "dinitial_state")),
)

_conv_forward = define(
    "parallel_causal_conv1d_forward(Tensor x, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? seq_idx, "
    f"Tensor? cu_seqlens, int activation, bool _final_state, SymInt _length, {_PLACE}) "
    "-> (Tensor y, Tensor final_state)",
    lambda *arguments: _conv._outputs(*arguments[:8]),
    _conv_backward,
    autocast=("x",),
    function="causal_conv1d_forward",
    kernels=partial(_group_kernels, _no_shared_results),
)


# ---- ops that are not calls of the library --------------------------------------------------------------------

_library = torch.library.Library(NAMESPACE, "FRAGMENT")
_pure = (torch.Tag.pt2_compliant_tag,)


def _sum(x: Tensor, group: str) -> Tensor:
    """The sum of the tensors of all ranks, in their order."""
    return _replace_by_sum(x.detach().clone(), group)


def _replace_by_sum(x: Tensor, group: str) -> Tensor:
    found = _group_of(group, x)
    with found.lock:
        _C.all_reduce(found.handle, found.place(), x)
    return x


def _rows(length: int, group: str, cut: int, stripe: int) -> bytes:
    process_group = _process_group(group)
    return _C.shard_positions(cut, stripe, length, dist.get_world_size(process_group), dist.get_rank(process_group))


def _rank_positions(length: int, group: str, cut: int, stripe: int) -> Tensor:
    rows = _rows(length, group, cut, stripe)
    return torch.frombuffer(bytearray(rows), dtype=torch.int64) if rows else torch.empty(0, dtype=torch.int64)


def _rank_positions_fake(length: int, group: str, cut: int, stripe: int) -> Tensor:
    return torch.empty(len(_rows(int(length), group, cut, int(stripe))) // 8, dtype=torch.int64)


def _gather(x: Tensor, axis: int, length: int, group: str, cut: int, stripe: int) -> Tensor:
    process_group = _process_group(group)
    size = dist.get_world_size(process_group)
    rows = [
        torch.frombuffer(bytearray(part), dtype=torch.int64) if part else torch.empty(0, dtype=torch.int64)
        for part in (_C.shard_positions(cut, stripe, length, size, rank) for rank in range(size))
    ]
    own = len(rows[dist.get_rank(process_group)])
    if x.shape[axis] != own:
        raise ValueError(
            f"unshard: x has {x.shape[axis]} tokens on dim {axis}, expected {own}: this rank's part of length={length}"
        )
    max_length = max(len(part) for part in rows)
    padded = x.new_zeros((max_length, *x.movedim(axis, 0).shape[1:]))
    padded[:own] = x.movedim(axis, 0)
    received = [torch.empty_like(padded) for _ in range(size)]
    dist.all_gather(received, padded, group=process_group)
    whole = x.new_empty((length, *padded.shape[1:]))
    for part, values in zip(rows, received):
        whole[part.to(x.device)] = values[: len(part)]
    return whole.movedim(0, axis).contiguous()


def _gather_fake(x: Tensor, axis: int, length: int, group: str, cut: int, stripe: int) -> Tensor:
    return x.new_empty((*x.shape[:axis], length, *x.shape[axis + 1 :]))


def _scatter(whole: Tensor, axis: int, group: str, cut: int, stripe: int) -> Tensor:
    rows = _rank_positions(whole.shape[axis], group, cut, stripe)
    return _sum(whole.contiguous(), group).index_select(axis, rows.to(whole.device))


def _scatter_fake(whole: Tensor, axis: int, group: str, cut: int, stripe: int) -> Tensor:
    rows = len(_rows(int(whole.shape[axis]), group, cut, int(stripe))) // 8
    return whole.new_empty((*whole.shape[:axis], rows, *whole.shape[axis + 1 :]))


def _shared_seed(like: Tensor, group: str) -> Tensor:
    """The seed that rank 0 draws. Every rank draws one, so that the generators of all ranks advance equally."""
    seed = random_seed(like.device)
    first = dist.get_rank(_process_group(group)) == 0
    return _sum(seed.double() if first else seed.new_zeros(2, dtype=torch.float64), group).to(torch.int32)


def _register(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any], tags: Any = _pure) -> Any:
    name = schema[: schema.index("(")]
    _library.define(schema, tags=tags)
    _library.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    return getattr(registered_ops, name).default


_positions_op = _register(
    "parallel_positions(SymInt length, str group, int cut, SymInt stripe) -> Tensor", _rank_positions, _rank_positions_fake
)
_gather_op = _register(
    "parallel_unshard(Tensor x, int axis, SymInt length, str group, int cut, SymInt stripe) -> Tensor",
    _gather, _gather_fake,
)  # fmt: skip
_scatter_op = _register(
    "parallel_unshard_backward(Tensor whole, int axis, str group, int cut, SymInt stripe) -> Tensor",
    _scatter, _scatter_fake,
)  # fmt: skip
_seed_op = _register(
    "parallel_seed(Tensor like, str group) -> Tensor", _shared_seed,
    lambda like, group: like.new_empty(2, dtype=torch.int32), (*_pure, torch.Tag.nondeterministic_seeded),
)  # fmt: skip


def _save_place(ctx: Any, inputs: Any, output: Any) -> None:
    _, ctx.axis, _, ctx.group, ctx.cut, ctx.stripe = inputs


def _gather_backward(ctx: Any, gradient: Tensor) -> Any:
    return _scatter_op(gradient, ctx.axis, ctx.group, ctx.cut, ctx.stripe), None, None, None, None, None


torch.library.register_autograd(
    f"{NAMESPACE}::parallel_unshard", _gather_backward, setup_context=_save_place, lib=_library
)


# ---- cuts ---------------------------------------------------------------------------------------------------


def positions(
    length: int, *, group: Any = None, cut: str, stripe: int = 0, device: Any = None
) -> Tensor:
    """Returns the positions of this rank's tokens in the whole sequence of `length` tokens: int64 [tokens of this
    rank]. Pass them to rotary embeddings (position_ids), or make masks from them.

    >>> cp.positions(6, cut="zigzag")        # one rank has all tokens
    tensor([0, 1, 2, 3, 4, 5])
    """
    rows: Tensor = _positions_op(length, _name_of(group), _cut_number("positions", cut), stripe)
    return rows if device is None else rows.to(device)


def shard(x: Tensor, *, dim: int, group: Any = None, cut: str, stripe: int = 0) -> Tensor:
    """Copies this rank's tokens from a whole tensor of any dtype. dim is the axis of the tokens. There is no
    communication. Differentiable: the gradient has zeros for the tokens of the other ranks.

    >>> x = torch.randn(2, 100, 64)          # the same on every rank
    >>> part = cp.shard(x, dim=1, cut="zigzag")  # with 2 ranks: 50 tokens
    """
    need_tensors("shard", x=x)
    return x.index_select(dim, positions(x.shape[dim], group=group, cut=cut, stripe=stripe, device=x.device))


def unshard(
    x: Tensor, *, dim: int, length: Optional[int] = None, group: Any = None, cut: str, stripe: int = 0
) -> Tensor:
    """The inverse of `shard`: every rank gets the tensor with the tokens of all ranks, of any dtype. dim is the axis of
    the tokens. `length` is the number of tokens of the whole sequence, by default this rank's tokens times the number
    of ranks. The backward adds the gradients of all ranks. If every rank computes the same loss from the result, divide
    the loss by the number of ranks. DDP and FSDP2 divide already.

    >>> x = torch.randn(2, 100, 64)
    >>> part = cp.shard(x, dim=1, cut="zigzag")
    >>> torch.equal(cp.unshard(part, dim=1, length=100, cut="zigzag"), x)
    True
    """
    need_tensors("unshard", x=x)
    name, axis = _name_of(group), dim % x.dim()
    length = _whole_length("unshard", x, axis, length, name)
    whole: Tensor = _gather_op(x, axis, length, name, _cut_number("unshard", cut), stripe)
    return whole


def _whole_length(call: str, x: Any, axis: int, length: Optional[int], group: str) -> Any:
    """The number of tokens of the whole sequence."""
    if length is not None:
        return length
    need_tensors(call, x=x)
    return x.shape[axis] * _size_of(group) if x.dim() > axis else 0


# ---- sums ---------------------------------------------------------------------------------------------------


def all_reduce(x: Tensor, *, group: Any = None) -> Tensor:
    """Replaces x on every rank by the sum of the x of all ranks, and returns it. The sum is computed in float64, in the
    order of the ranks, and rounded once. So it has the same bits in every run. x has any float dtype, and the sum has
    no gradient.

    >>> loss = torch.tensor(2.5)             # of the tokens of this rank
    >>> cp.all_reduce(loss)                  # of all tokens
    tensor(2.5000)
    """
    need_tensors("all_reduce", x=x)
    if x.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"all_reduce: x is on {x.device}, expected the CPU or a GPU")
    _replace_by_sum(x.detach(), _name_of(group))
    return x


def all_reduce_gradients(parameters: "Iterable[Tensor]", *, group: Any = None) -> None:
    """Replaces the gradient of every parameter by the sum over all ranks, as all_reduce does. Use it for models without
    DDP and FSDP2. Parameters without a gradient are skipped. They must be the same ones on every rank.

    >>> model = torch.nn.Linear(64, 64)
    >>> model(torch.randn(2, 100, 64)).sum().backward()
    >>> cp.all_reduce_gradients(model.parameters())
    """
    by_kind: "dict[Any, list[Tensor]]" = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_kind.setdefault((parameter.grad.dtype, parameter.grad.device), []).append(parameter.grad)
    for gradients in by_kind.values():
        total = all_reduce(torch.cat([gradient.detach().flatten() for gradient in gradients]), group=group)
        for gradient, part in zip(gradients, total.split([gradient.numel() for gradient in gradients])):
            gradient.detach().copy_(part.view(gradient.shape))


# ---- attention ------------------------------------------------------------------------------------------------


def _run_attention(
    call: str, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Any, max_seqlens: Any, group: Any, cut: str, stripe: int,
    head_ranks: int, all_gather: bool, lengths: Any, causal: bool, window: Any, scale: Any, softcap: float, dropout_p: float,
    dropout_seed: Any, dropout_offset: int, dropout_seed_tensor: Any, dropout_offset_tensor: Any, seqused: Any, sink: Any,
    alibi_slopes: Any, attn_bias: Any, deterministic: bool, return_lse: bool,
) -> Any:  # fmt: skip
    name, axis = _name_of(group), 0 if cu_seqlens[0] is not None else 1
    cut_number, return_lse = _cut_number(call, cut), flag(call, "return_lse", return_lse)
    if scale == 0:
        raise ValueError(f"{call}: scale is 0, expected None (1/sqrt(d)) or another number")
    _attention._refuse_bool_bias(call, attn_bias)
    left, right = (0, 0) if window is None else pair(call, "window", window)
    if number(call, "dropout_p", dropout_p) > 0 and dropout_seed is None and dropout_seed_tensor is None:
        need_tensors(call, q=q)
        dropout_seed_tensor = _seed_op(q, name)
    q_length, k_length = (_whole_length(call, x, axis, length, name) for x, length in zip((q, k), lengths))
    nondeterministic = not flag(call, "deterministic", deterministic)
    try:
        out, lse = _attention_forward(
            q, k, v, *cu_seqlens, *seqused, sink, alibi_slopes, attn_bias, dropout_seed_tensor, dropout_offset_tensor,
            causal, window is not None, left, right, scale or 0.0, softcap, dropout_p, seed_number(dropout_seed),
            dropout_offset, *max_seqlens, nondeterministic, q_length, k_length, name, cut_number, stripe, head_ranks,
            flag(call, "all_gather", all_gather),
        )  # fmt: skip
    except (NotImplementedError, RuntimeError, TypeError, ValueError) as error:
        raise _attention._with_python_names(call, error) from None
    return (out, lse) if return_lse else out


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    group: Any = None,
    cut: str,
    stripe: int = 0,
    head_ranks: int = 1,
    all_gather: bool = False,
    q_length: Optional[int] = None,
    k_length: Optional[int] = None,
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
    """cotangent.attention of the whole sequence. q, k and v have the tokens of this rank, and so do out, lse and the
    gradients.

    group, cut, stripe  see cotangent.distributed
    head_ranks          how many neighbouring ranks exchange heads (the Ulysses degree), a divisor of the number of
                        ranks. 1: ring attention. The number of ranks: DeepSpeed-Ulysses, without a ring. Between:
                        groups of head_ranks ranks exchange heads, and the groups form a ring. See
                        docs/guide/context_parallel_c.md. head_ranks > 1 needs H to be a multiple of head_ranks, Hkv a
                        multiple or a divisor of it, and no attn_bias: else an error
    all_gather          True: each rank gathers the keys and values that its tokens attend to, instead of the ring. It
                        was not measured over NCCL. It needs more memory: for these keys and values, and in the backward
                        for their gradients in float32. Start without it
    q_length, k_length  the number of queries and keys of the whole sequence, by default this rank's tokens times the
                        number of ranks
    attn_bias           [B or 1, H or 1, tokens of this rank or 1, Tk or 1], where Tk is the keys of the whole sequence
    seqused_q, seqused_k, sink, alibi_slopes, dropout_seed, dropout_offset, dropout_seed_tensor, dropout_offset_tensor
                        those of the whole sequence, the same on every rank. Without a seed, all ranks use the seed of
                        rank 0. The dropout mask is that of cotangent.attention on the whole sequence

    The other arguments are those of cotangent.attention.

    >>> q, k, v = (cp.shard(torch.randn(2, 100, 4, 16), dim=1, cut="zigzag") for _ in range(3))
    >>> out = cp.attention(q, k, v, causal=True, q_length=100, k_length=100, cut="zigzag")
    >>> out.shape == q.shape                 # the tokens of this rank
    True
    """
    return _run_attention(
        "attention", q, k, v, (None, None), (0, 0), group, cut, stripe, head_ranks, all_gather, (q_length, k_length), causal,
        window, scale, softcap, dropout_p, dropout_seed, dropout_offset, dropout_seed_tensor, dropout_offset_tensor,
        (seqused_q, seqused_k), sink, alibi_slopes, attn_bias, deterministic, return_lse,
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
    group: Any = None,
    cut: str,
    stripe: int = 0,
    head_ranks: int = 1,
    all_gather: bool = False,
    q_length: Optional[int] = None,
    k_length: Optional[int] = None,
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
    """cotangent.attention_varlen of all packed sequences. The axis of all tokens is cut, so a sequence may have tokens
    on several ranks. q, k and v have the tokens of this rank.

    cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, attn_bias
        those of cotangent.attention_varlen for all sequences, the same on every rank

    The other arguments are those of cotangent.distributed.attention.

    >>> cu_seqlens = torch.tensor([0, 30, 100], dtype=torch.int32)
    >>> q, k, v = (cp.shard(torch.randn(100, 4, 16), dim=0, cut="zigzag") for _ in range(3))
    >>> out = cp.attention_varlen(q, k, v, cu_seqlens, cu_seqlens, 70, 70, causal=True, q_length=100, k_length=100,
    ...                           cut="zigzag")
    >>> out.shape == q.shape
    True
    """
    return _run_attention(
        "attention_varlen", q, k, v, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k), group, cut, stripe,
        head_ranks, all_gather, (q_length, k_length), causal, window, scale, softcap, dropout_p, dropout_seed, dropout_offset,
        dropout_seed_tensor, dropout_offset_tensor, (seqused_q, seqused_k), sink, alibi_slopes, attn_bias, deterministic,
        return_lse,
    )  # fmt: skip


# ---- causal_conv1d --------------------------------------------------------------------------------------------


def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Optional[Tensor] = None,
    activation: Optional[str] = None,
    *,
    group: Any = None,
    cut: str,
    stripe: int = 0,
    length: Optional[int] = None,
    initial_state: Optional[Tensor] = None,
    seq_idx: Optional[Tensor] = None,
    cu_seqlens: Optional[Tensor] = None,
    return_final_state: bool = False,
) -> Any:
    """cotangent.causal_conv1d of the whole sequence. x and seq_idx have the time steps of this rank, and so do y and
    `dx`.

    group, cut, stripe  see cotangent.distributed
    length              the number of time steps of the whole sequence, by default this rank's time steps times the
                        number of ranks
    weight, bias, initial_state, cu_seqlens
                        those of the whole sequence, the same on every rank
    return_final_state  True: the result is (y, final_state). Every rank gets the final state of the whole sequence. The
                        backward adds its gradients of all ranks

    The other arguments are those of cotangent.causal_conv1d.

    >>> x = cp.shard(torch.randn(2, 32, 100), dim=2, cut="zigzag")
    >>> y = cp.causal_conv1d(x, torch.randn(32, 4), activation="silu", length=100, cut="zigzag")
    >>> y.shape == x.shape
    True
    """
    with_state, name = flag("causal_conv1d", "return_final_state", return_final_state), _name_of(group)
    y, final_state = _conv_forward(
        x, weight, bias, initial_state, seq_idx, cu_seqlens,
        activation_number("causal_conv1d", activation, ("silu",)), with_state,
        _whole_length("causal_conv1d", x, 2, length, name), name, _cut_number("causal_conv1d", cut), stripe,
    )  # fmt: skip
    return (y, final_state) if with_state else y


# ---- models of transformers -----------------------------------------------------------------------------------


class Context(NamedTuple):
    """The arguments of context_parallel."""

    group: str
    cut: str
    stripe: int
    head_ranks: int
    all_gather: bool
    length: Optional[int]
    cu_seqlens: Optional[Tensor]
    max_seqlen: int


def current_context() -> Optional[Context]:
    """The innermost context_parallel."""
    return contexts[-1] if contexts else None


@contextmanager
def context_parallel(
    group: Any = None, *, cut: str, stripe: int = 0, head_ranks: int = 1, all_gather: bool = False,
    length: Optional[int] = None, cu_seqlens: Optional[Tensor] = None,
) -> "Iterator[None]":  # fmt: skip
    """A `with` block for models of Hugging Face transformers with attn_implementation="cotangent" (see
    cotangent.integrations.transformers.enable). Inside it, their attention is cotangent.distributed.attention: the
    tokens of this rank attend to the tokens of all ranks. The block changes nothing else. In particular,
    cotangent.attention and PyTorch's scaled_dot_product_attention use only the tokens of this rank. (PyTorch has a
    context manager with the same name, which cuts buffers and replaces scaled_dot_product_attention.)

    group, cut, stripe, head_ranks, all_gather
                as in cotangent.distributed.attention
    length      the number of tokens of the whole sequence, by default this rank's tokens times the number of ranks
    cu_seqlens  int32 [N+1], where each packed sequence of the whole batch element begins. The batch must be 1

    Pass the result of `shard` to the model as input_ids, and that of `positions` as position_ids. Do not pass labels=
    to the model: its own loss does not see the next token if another rank has it. Shift the labels first, then cut them
    with `shard`, and compute the loss yourself. Run the backward inside the block, too: gradient checkpointing calls
    the attention again.

    The layers cotangent.Attention, CausalConv1d and MambaInProjConv1d, and the convolution of cotangent.compat, would
    use only the tokens of this rank. They raise NotImplementedError inside the block.

    >>> with cp.context_parallel(length=100, cut="zigzag"):
    ...     pass  # the forward and the backward of the model
    """
    max_seqlen = 0 if cu_seqlens is None else int(cu_seqlens.diff().max())
    _cut_number("context_parallel", cut)
    context = Context(_name_of(group), cut, stripe, head_ranks, all_gather, length, cu_seqlens, max_seqlen)
    contexts.append(context)
    try:
        yield
    finally:
        contexts.pop()
