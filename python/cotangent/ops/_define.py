# SPDX-License-Identifier: Apache-2.0
"""Registers an op of the library as an op of torch. Its schemas have the names of the C argument structs.

    forward = define("NAME_forward(Tensor x, ...) -> (Tensor y, ...)", outputs, backward)

registers torch.ops.cotangent.NAME_forward with kernels for the CPU and CUDA, a fake kernel, autograd and autocast. It
returns a function that calls the op, or directly the op's kernel if no part of torch has to intercept the call. Errors
of this function have the names of Python.

- An argument or result sets the member of `cot_NAME_forward_args` with the same name. Names that begin with `_` exist
  only in Python. A result that is None is an absent output for the library.
- `outputs(*arguments)` allocates the results. A fake kernel does nothing else. A real kernel then calls the library.
- The arguments of a backward are matched by name. An input or result of the forward is saved for it. `dy` is the
  gradient of the result `y`. If autograd has no gradient for `y`, `dy` is None if the schema says Tensor?, else zeros.
  A result `y` is differentiable only if the backward has an argument `dy`. `_wanted` has one bool for each result `dx`
  of the backward: whether the gradient of the input `x` is needed.
"""
from __future__ import annotations

from functools import partial
from operator import itemgetter
from typing import Any, Callable, Optional, Sequence

import torch
from torch import Tensor
from torch._functorch.utils import enable_single_level_autograd_function
from torch.autograd import forward_ad

from .. import _C
from .._namespace import NAMESPACE
from ._options import is_tensor, with_python_names, wrong_type

_library = torch.library.Library(NAMESPACE, "DEF")
registered_ops: Any = getattr(torch.ops, NAMESPACE)  # torch.ops.cotangent
_below_autograd = torch._C._AutoDispatchBelowAutograd
_autocast_keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)


_transforms_active = torch._C._are_functorch_transforms_active
# For _C.route: the types of tensors that no part of torch intercepts, and functions that return a nonzero number or
# True if a part of torch may intercept a call before its kernel.
_C.set_guards(
    (Tensor, torch.nn.Parameter),
    forward_ad,
    torch.is_grad_enabled,
    (
        torch._C._len_torch_dispatch_stack,
        torch._C._len_torch_function_stack,
        torch._C._is_any_autocast_enabled,
        _transforms_active,
        torch._C._autograd._profiler_enabled,
        torch._C._get_tracing_state,
    ),
)
_BY_DISPATCHER, _ON_CPU, _ON_CUDA, _WITH_GRADIENT = 0, 1, 2, 4  # _C.route


# For outputs(...): a tensor or an axis is missing. The library then names it.
_MISSING = (AttributeError, IndexError, TypeError, ValueError)


def _workspace(device: int, size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", device))


def _kernels(
    plan: Any, outputs: Callable[..., Any], op: Any, prepare: "Optional[Callable[..., tuple[Any, ...]]]"
) -> "tuple[Callable[..., Any], Callable[..., Any]]":
    """The CPU kernel and the CUDA kernel of an op whose results `outputs` allocates."""
    current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # absent in a torch without CUDA
    get_num_threads, result_count = torch.get_num_threads, len(op._schema.returns)

    def cpu(*arguments: Any) -> Any:
        try:
            results = outputs(*arguments)
        except _MISSING:
            results = (None,) * result_count
        if prepare is not None:
            arguments = prepare(*arguments)
        _C.run_cpu(plan, get_num_threads(), *arguments, *_as_tuple(results))
        return results

    def cuda(*arguments: Any) -> Any:
        try:
            results = outputs(*arguments)
        except _MISSING:
            results = (None,) * result_count
        if prepare is not None:
            arguments = prepare(*arguments)
        for value in arguments:
            if isinstance(value, Tensor) and value.is_cuda:
                device = value.get_device()
                break
        _C.run_cuda(plan, device, current_stream(device), _workspace, *arguments, *_as_tuple(results))
        return results

    return cpu, cuda


def _fake(name: str, names: Sequence[str], outputs: Callable[..., Any]) -> Callable[..., Any]:
    """The fake kernel. The dispatcher also chooses it if one of the tensors is on the device meta."""

    def fake(*arguments: Any) -> Any:
        first: "Optional[tuple[str, torch.device]]" = None
        for tensor_name, value in zip(names, arguments):
            if not isinstance(value, Tensor):
                continue
            if first is None:
                first = tensor_name, value.device
            elif value.device != first[1]:
                raise ValueError(
                    f"{name}: {tensor_name} is on {value.device}, {first[0]} is on {first[1]}: expected one device"
                )
        try:
            return outputs(*arguments)
        except (IndexError, ValueError) as error:  # an axis is missing
            shapes = [f"{n} has shape {tuple(v.shape)}" for n, v in zip(names, arguments) if isinstance(v, Tensor)]
            raise ValueError(f"{name}: {', '.join(shapes)}: {error}") from error

    return fake


def _check_types(op: Any, arguments: Sequence[Any]) -> None:
    """Raises TypeError for an argument whose type the op's schema does not allow."""
    for argument, value in zip(op._schema.arguments, arguments):
        kind = str(argument.type)
        if value is None and "Optional" in kind:
            continue
        if "Tensor" in kind:
            good, expected = is_tensor(value), "a Tensor"
        elif kind == "float":
            good, expected = hasattr(type(value), "__float__"), "a number"
        elif kind in ("int", "SymInt"):
            good, expected = hasattr(type(value), "__index__") or isinstance(value, torch.SymInt), "an integer"
        else:
            continue
        if not good:
            name = op._schema.name.split("::")[1]
            raise wrong_type(name, argument.name.lstrip("_"), value, expected)


def _as_tuple(results: Any) -> "tuple[Any, ...]":
    return results if isinstance(results, tuple) else (results,)


def gradients_like(inputs: "Sequence[Optional[Tensor]]", wanted: Sequence[bool]) -> "tuple[Optional[Tensor], ...]":
    """Allocates the gradients of the inputs that exist and whose gradient is wanted."""
    return tuple([torch.empty_like(x) if want and x is not None else None for x, want in zip(inputs, wanted)])


def _picker(positions: "Sequence[int]") -> "Callable[[Sequence[Any]], tuple[Any, ...]]":
    """A function that returns the tuple of the values at these positions."""
    if len(positions) > 1:
        return itemgetter(*positions)
    return lambda values: tuple([values[i] for i in positions])


class _Autograd:
    """The relations between a forward op and its backward op for autograd, derived from their schemas."""

    def __init__(
        self,
        forward: Any,
        backward: Any,
        passthrough: "dict[str, str]",
        unsaved: "Optional[Callable[..., Sequence[str]]]",
    ) -> None:
        self.forward, self.backward, self.unsaved = forward, backward, unsaved
        self.inputs = inputs = [argument.name for argument in forward._schema.arguments]
        results = [result.name for result in forward._schema.returns]
        gradients = [result.name for result in backward.op._schema.returns]
        self.wanted = [inputs.index(name[1:]) for name in gradients]
        # Positions of the values that are saved for the backward.
        self.saved: "list[int]" = []
        self.saved_results: "list[int]" = []
        self.plain: "list[int]" = []
        self.differentiable: "list[int]" = []  # results whose gradient is an argument
        self.filled: "list[bool]" = []  # for each of them: a gradient of None becomes zeros
        sources: "list[tuple[list[int], int]]" = []  # of each argument of the backward: (list, position)
        wanted: "list[int]" = []
        for argument in backward.op._schema.arguments:
            name = argument.name if "_" + argument.name not in inputs else "_" + argument.name
            kind = str(argument.type)
            if name == "_wanted":
                positions, position = wanted, 0
            elif name in inputs:
                positions, position = self.saved if "Tensor" in kind else self.plain, inputs.index(name)
            elif name in results:
                positions, position = self.saved_results, results.index(name)
            else:
                positions, position = self.differentiable, results.index(name[1:])
                self.filled.append("Optional" not in kind)
            sources.append((positions, len(positions)))
            positions.append(position)
        # The positions of the backward's arguments in (*saved, *saved results, *plain, wanted, *gradients).
        self.order: "list[int]" = []
        groups = (self.saved, self.saved_results, self.plain, [0], self.differentiable)
        for positions, position in sources:
            group = 3 if positions is wanted else next(i for i, g in enumerate(groups) if g is positions)
            self.order.append(sum(len(g) for g in groups[:group]) + position)
        self.no_gradient = [i for i in range(len(results)) if i not in self.differentiable]
        # The source of each input's gradient: a result of the backward, or (passthrough) the gradient of a forward's
        # result.
        self.to_inputs = [gradients.index("d" + name) if "d" + name in gradients else None for name in inputs]
        self.passthrough = [(inputs.index(name), results.index(result)) for name, result in passthrough.items()]


def _match_layout(
    gradient: Optional[Tensor], shape: Any, stride: Any, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """Copies a gradient to the layout of its result if their contiguous axes differ. Otherwise the slower kernels for
    any layout would run: the gradient of a sum has strides of 0, that of a transposed layer the other order of axes."""
    if gradient is None:
        return torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_()
    strides = gradient.stride()
    if not gradient._is_zerotensor() and (  # a zero tensor has no memory
        strides == stride
        or all(given == 1 or wanted != 1 or size <= 1 for given, wanted, size in zip(strides, stride, shape))
    ):
        return gradient
    return gradient.new_empty_strided(shape, stride, dtype=dtype).copy_(gradient)  # mapped by vmap if the gradient is


def _zeros_of_subclass(gradients: "Sequence[Optional[Tensor]]", layout: Any) -> Optional[Tensor]:
    """Zeros for a missing gradient if the other gradients belong to a subclass, for example DTensor."""
    for other in gradients:
        if other is not None and type(other) is not Tensor:
            return other.new_zeros(layout[0], dtype=layout[2])
    return None


def _redispatch(op: Any, arguments: Sequence[Any]) -> Any:
    """Calls the op without autograd; inside a function transform, without autograd of this level. The levels below need
    the grad modes, which torch.autograd.Function disables in its forward: without them their gradients would be
    zeros."""
    if not _transforms_active():
        with _below_autograd():
            return op(*arguments)
    with torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True), _below_autograd():
        return op(*arguments)


def _differentiable(spec: _Autograd, run: Callable[..., Any]) -> Any:
    """The autograd function of an op whose forward is run(*arguments)."""
    inputs, unsaved, no_gradient, passthrough = spec.inputs, spec.unsaved, spec.no_gradient, spec.passthrough
    saved_inputs, saved_results, plain = _picker(spec.saved), _picker(spec.saved_results), _picker(spec.plain)
    wanted, in_order = _picker(spec.wanted), _picker(spec.order)
    differentiable, filled = _picker(spec.differentiable), spec.filled
    # The gradient of each input: the results of the backward, then None.
    to_inputs = _picker([len(spec.wanted) if i is None else i for i in spec.to_inputs])

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            results = run(*arguments)
            outputs_tuple = _as_tuple(results)
            saved = saved_inputs(arguments)
            if unsaved is not None:
                skipped = unsaved(*arguments)
                saved = tuple([None if inputs[i] in skipped else arguments[i] for i in spec.saved])
            ctx.save_for_backward(*saved, *saved_results(outputs_tuple))
            ctx.plain = plain(arguments)
            ctx.layouts = [
                None if y is None else (y.shape, y.stride(), y.dtype, y.device) for y in differentiable(outputs_tuple)
            ]
            ctx.set_materialize_grads(False)
            if no_gradient:
                ctx.mark_non_differentiable(*[outputs_tuple[i] for i in no_gradient if outputs_tuple[i] is not None])
            return results

        @staticmethod
        def backward(ctx: Any, *gradients: Optional[Tensor]) -> Any:
            needs_gradient = ctx.needs_input_grad
            values = [*ctx.saved_tensors, *ctx.plain, [*wanted(needs_gradient)]]
            for gradient, fill, layout in zip(differentiable(gradients), filled, ctx.layouts):
                if gradient is not None and gradient.stride() == layout[1] and not gradient._is_zerotensor():
                    values.append(gradient)
                    continue
                if gradient is None and fill:
                    gradient = _zeros_of_subclass(gradients, layout)
                values.append(_match_layout(gradient, *layout) if gradient is not None or fill else None)
            arguments = in_order(values)
            try:
                results = spec.backward(*arguments)
            except TypeError:
                # torch.autograd.grad(is_grads_batched=True) has its own vmap. Its tensors have no memory for a kernel,
                # so the dispatcher calls the op for each sample.
                if not torch._C._dispatch_tls_is_dispatch_key_included("VmapMode"):
                    raise
                results = spec.backward.op(*arguments)
            computed = to_inputs((*_as_tuple(results), None))
            if not passthrough:
                return computed
            others = list(computed)
            for target, result in passthrough:
                others[target] = gradients[result] if needs_gradient[target] else None
            return tuple(others)

    return Function


def _refuse_gradient(op: Any, why: str, run: Callable[..., Any]) -> Any:
    class Refused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            return _redispatch(op, arguments)

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            raise NotImplementedError(f"cotangent::{op._schema.name.split('::')[1]} {why}")

    return Refused


def _with_autograd(
    op: Any,
    kernels: "tuple[Callable[..., Any], Callable[..., Any]]",
    make_function: Callable[..., Any],
    tensors: "tuple[int, ...]",
    jvp: Optional[Callable[..., Any]],
) -> "tuple[Callable[..., Any], Callable[..., Any]]":
    """The op's kernel for autograd, and the function that users call. Both record the call only if a gradient is
    needed. make_function(run): the op's autograd function with run(*arguments) as its forward."""

    def run(*arguments: Any) -> Any:
        place = route(arguments, tensors) & ~_WITH_GRADIENT
        return kernels[place - 1](*arguments) if place != _BY_DISPATCHER else _redispatch(op, arguments)

    # Function.apply checks in Python for functorch's wrappers, which the dispatcher has removed already. The check is
    # 25 % of the cost of recording a call.
    apply = super(torch.autograd.Function, make_function(run)).apply
    route = _C.route
    runs: "dict[int, Callable[..., Any]]" = {}  # by the route
    for place, kernel in zip((_ON_CPU, _ON_CUDA), kernels):
        runs[place] = kernel
        runs[place | _WITH_GRADIENT] = super(torch.autograd.Function, make_function(kernel)).apply
    is_compiling = torch.compiler.is_compiling
    op_name, names = op._schema.name, [argument.name for argument in op._schema.arguments]

    def needs_gradient(arguments: Sequence[Any]) -> bool:
        if torch.is_grad_enabled():
            for i in tensors:
                if arguments[i] is not None and arguments[i].requires_grad:
                    return True
        return False

    def forward_mode(run: Any, arguments: Sequence[Any]) -> Any:
        """The result of run(*arguments) with its tangents, or None if no argument has a tangent."""
        duals = {i: forward_ad.unpack_dual(arguments[i], level=0) for i in tensors if arguments[i] is not None}
        if all(dual.tangent is None for dual in duals.values()):
            return None
        if jvp is None:
            raise NotImplementedError(f"{op_name} has no forward-mode derivative (torch.func.jvp, jacfwd, linearize)")
        primals = [duals[i].primal if i in duals else value for i, value in enumerate(arguments)]
        tangents = jvp({name: duals[i].tangent if i in duals else None for i, name in enumerate(names)}, *primals)
        results = tuple(
            result if tangent is None else forward_ad.make_dual(result, tangent, level=0)
            for result, tangent in zip(_as_tuple(run(*primals)), _as_tuple(tangents))
        )
        return results if len(results) > 1 else results[0]

    def autograd(*arguments: Any) -> Any:
        if forward_ad._current_level >= 0 or _transforms_active():  # compiled code enters a level without Python
            results = forward_mode(autograd, arguments)
            if results is not None:
                return results
        if needs_gradient(arguments):
            if not _transforms_active():
                return apply(*arguments)
            with enable_single_level_autograd_function():  # the dispatcher calls this kernel once per level
                return apply(*arguments)
        with _below_autograd():
            return op(*arguments)

    def call(*arguments: Any) -> Any:
        if is_compiling():
            results = forward_mode(op, arguments) if forward_ad._current_level >= 0 else None
            return op(*arguments) if results is None else results
        try:
            place = route(arguments, tensors)
            if place == _BY_DISPATCHER:
                _check_types(op, arguments)
                return op(*arguments)
            return runs[place](*arguments)
        except (NotImplementedError, TypeError, ValueError) as error:
            renamed = with_python_names(error)
            if renamed is error:
                raise
            raise renamed from None

    written = [i for i, argument in enumerate(op._schema.arguments) if argument.alias_info is not None]
    return (_counting(autograd, op, written), _counting(call, op, written)) if written else (autograd, call)


def _counting(run: Callable[..., Any], op: Any, written: "Sequence[int]") -> Callable[..., Any]:
    """run, for an op that changes the arguments `written` in place: autograd then sees that their values have changed."""

    def counted(*arguments: Any) -> Any:
        changed = [arguments[i] for i in written if isinstance(arguments[i], Tensor)]
        if torch.is_grad_enabled() and any(x.is_leaf and x.requires_grad for x in changed):
            raise RuntimeError(f"{op._schema.name}: a leaf that requires a gradient cannot be changed in place")
        results = run(*arguments)
        if not torch.compiler.is_compiling():
            for x in changed:
                if not x.is_inference():
                    torch.autograd.graph.increment_version(x)
        return results

    return counted


def _in_vmap(op: Any, batched: Sequence[str], folds: Callable[..., bool]) -> Callable[..., Any]:
    """The rule of the op for vmap. If every mapped argument and every result has a batch axis, the mapped axis is
    folded into it. Otherwise, for example for a weight's gradient per sample, the op runs once for each index."""
    names = [argument.name for argument in op._schema.arguments]
    results = [result.name for result in op._schema.returns]
    aliases = [argument.alias_info for argument in op._schema.arguments]  # torch 2.5 has no argument.is_write
    written = [i for i, alias in enumerate(aliases) if alias is not None and alias.is_write]

    def foldable(mapped: Sequence[int], arguments: Sequence[Any]) -> bool:
        if not all(names[i] in batched for i in mapped) or not folds(*arguments):
            return False
        wanted = dict(zip([n[1:] for n in results], arguments[-1])) if names[-1] == "_wanted" else {}
        return all(result in batched or not wanted.get(result[1:], True) for result in results)

    def rule(info: Any, in_dims: Sequence[Optional[int]], *arguments: Any) -> Any:
        count, mapped = info.batch_size, [i for i, axis in enumerate(in_dims) if isinstance(axis, int)]
        if count == 0:
            raise ValueError(f"{op._schema.name}: vmap over an axis of size 0 is not supported")
        for i in written:
            if i not in mapped:
                raise ValueError(f"{op._schema.name}: {names[i]} is changed in place, expected it mapped by vmap too")
        moved = [value.movedim(in_dims[i], 0) if i in mapped else value for i, value in enumerate(arguments)]
        if foldable(mapped, moved) and all(moved[i].dim() > 1 for i in mapped):
            for i, value in enumerate(moved):
                if names[i] in batched and value is not None:
                    moved[i] = (value if i in mapped else value.expand(count, *value.shape)).flatten(0, 1)
            folded = _as_tuple(op(*moved))
            stacked = [None if y is None else y.unflatten(0, (count, y.shape[0] // count)) for y in folded]
        else:
            calls = [
                _as_tuple(op(*[value[n] if i in mapped else value for i, value in enumerate(moved)]))
                for n in range(count)
            ]
            stacked = [None if ys[0] is None else torch.stack(ys) for ys in zip(*calls)]
        axes = tuple(None if y is None else 0 for y in stacked)
        return (tuple(stacked), axes) if len(stacked) > 1 else (stacked[0], axes[0])

    return rule


def _autocast(op: Any, names: Sequence[str], device_type: str) -> Callable[..., Any]:
    low = [argument.name in names for argument in op._schema.arguments]

    def autocast(*arguments: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        cast = [
            value.to(dtype)
            if is_low and isinstance(value, Tensor) and value.is_floating_point() and value.dtype != torch.float64
            else value
            for value, is_low in zip(arguments, low)
        ]
        with torch._C._ExcludeDispatchKeyGuard(_autocast_keys):
            return op(*cast)

    return autocast


def define(
    schema: str,
    outputs: Callable[..., Any],
    backward: Any = None,
    *,
    autocast: Sequence[str] = (),
    passthrough: "Optional[dict[str, str]]" = None,
    unsaved: Optional[Callable[..., Sequence[str]]] = None,
    no_gradient: str = "has no gradient of its own: gradients of gradients are not supported",
    jvp: Optional[Callable[..., Any]] = None,
    batched: Sequence[str] = (),
    folds: Callable[..., bool] = lambda *arguments: True,
    prepare: "Optional[Callable[..., tuple[Any, ...]]]" = None,
    function: Optional[str] = None,
    kernels: Callable[..., Any] = _kernels,
) -> Any:
    """Registers an op and returns a function that calls it. The function's attribute `op` is the op.

    schema, outputs, backward   see above
    autocast                    the arguments that autocast casts to its dtype
    passthrough                 {input: result}: the gradient of the input is the gradient of the result
    unsaved(*arguments)         the inputs that the backward of this call does not need
    no_gradient                 the error message if an op without backward is differentiated
    jvp({input: its tangent or None}, *arguments)
                                the tangents of the results; without it the op refuses forward mode
    batched                     the arguments and results whose first axis is the batch
    folds(*arguments)           whether vmap may fold its axis into the batch
    prepare(*arguments)         the values that the library gets instead of the arguments
    function                    the function cot_... of the library, if its name differs from the schema's
    kernels                     makes the kernels for the CPU and CUDA"""
    name = schema[: schema.index("(")]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    op = getattr(registered_ops, name).default
    names = [argument.name for argument in op._schema.arguments]
    tensors = tuple(i for i, argument in enumerate(op._schema.arguments) if "Tensor" in str(argument.type))
    members = [*names, *[result.name for result in op._schema.returns]]
    plan = _C.plan(function or name, tuple(None if member.startswith("_") else member for member in members))
    cpu, cuda = kernels(plan, outputs, op, prepare)
    _library.impl(name, cpu, "CPU")
    _library.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", _fake(name, names, outputs), lib=_library)
    if backward is not None:
        spec = _Autograd(op, backward, passthrough or {}, unsaved)
        autograd, call = _with_autograd(op, (cpu, cuda), partial(_differentiable, spec), tensors, jvp)
    else:
        autograd, call = _with_autograd(op, (cpu, cuda), partial(_refuse_gradient, op, no_gradient), tensors, jvp)
    _library.impl(name, autograd, "Autograd")
    if hasattr(torch.library, "register_vmap"):  # since 2.5; older versions loop over ops that change nothing in place
        torch.library.register_vmap(f"{NAMESPACE}::{name}", _in_vmap(op, batched, folds), lib=_library)
    if autocast:
        _library.impl(name, _autocast(op, autocast, "cpu"), "AutocastCPU")
        _library.impl(name, _autocast(op, autocast, "cuda"), "AutocastCUDA")
    call.op = op  # type: ignore[attr-defined]
    return call
