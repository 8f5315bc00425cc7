# SPDX-License-Identifier: Apache-2.0
"""Properties of all ops in PyTorch: opcheck, compile, autocast, a single derivative, streams, graphs, threads."""
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import cotangent
from cotangent import _C, attention, causal_conv1d, dropout, mhc_post, mhc_pre, mhc_sinkhorn

ops = torch.ops.cotangent


def randn(device, *shape):
    return torch.randn(*shape, device=device)


def calls(device):
    """Each op with inputs: (name, arguments)."""

    def f(*shape):
        return randn(device, *shape)

    x, weight, bias, state = f(2, 6, 9), f(6, 4), f(6), f(2, 6, 3)
    r, b = f(5, 11), f(11)
    streams, phi, alpha, coefficients, gamma = f(2, 3, 4, 8), f(24, 32), f(3), f(24), f(4, 8)
    q, k, v = f(2, 5, 4, 8), f(2, 7, 2, 8), f(2, 7, 2, 8)
    indices = [None] * 4
    yield "causal_conv1d_forward", (x, weight, bias, None, None, None, 1, False)
    yield "causal_conv1d_forward", (x, weight, None, state, None, None, 0, True)
    yield "causal_conv1d_backward", (x, weight, bias, state, None, None, 1, x, state, [True] * 4)
    yield "causal_conv1d_backward", (x, weight, None, None, None, None, 1, x, None, [False, True, False, False])
    yield "causal_conv1d_backward_into", (x, weight, bias, state, None, None, 1, x, state, x * 2, [True] * 3)
    yield "causal_conv1d_update", (x, state, weight, bias, None, None, 1)
    dense = f(5, 6, 4)
    yield "causal_conv1d_dense_forward", (x, dense, f(5), state, 1, True)
    yield "causal_conv1d_dense_forward", (x, dense, None, None, 0, False)
    yield "causal_conv1d_dense_backward", (x, dense, f(5), state, 1, f(2, 5, 9), state, [True] * 4)
    yield "dropout_forward", (r, b, r * 2, None, None, None, None, 2, 0.5, 0.0, 3, 4, 0)
    yield "dropout_forward", (r, None, None, None, None, None, None, 0, 0.5, 0.0, 3, 4, 1)
    yield "dropout_forward", (r, None, None, None, None, None, None, 0, 0.5, 0.0, 3, 4, 2)
    yield "dropout_backward", (r, r, b, None, None, None, None, 2, 0.5, 0.0, 3, 4, [True, True])
    yield "mhc_pre_forward", (streams, phi, alpha, coefficients, gamma, 1e-6, 1e-6, 2.0, 1e-6, 5, True)
    yield "mhc_pre_forward", (streams, phi, alpha, coefficients, None, 1e-6, 1e-6, 2.0, 1e-6, 5, False)
    yield "mhc_pre_backward", (
        streams, phi, alpha, coefficients, gamma, f(2, 3).abs() + 1, f(2, 3, 24), f(2, 3, 4), f(2, 3, 4), f(2, 3, 8),
        f(2, 3, 4), None, f(2, 3, 4, 4), 1e-6, 2.0, 1e-6, 5, [True] * 5,
    )  # fmt: skip
    halves = (streams, f(2, 3, 8), f(2, 3, 4), f(2, 3, 4, 4), phi, alpha, coefficients, gamma)
    yield "mhc_post_pre_forward", (*halves, 1e-6, 1e-6, 2.0, 1e-6, 5, 0, True)
    yield "mhc_post_pre_backward", (
        *halves, f(2, 3).abs() + 1, f(2, 3, 24), f(2, 3, 4), f(2, 3, 4), f(2, 3, 8), f(2, 3, 4), None, f(2, 3, 4, 4),
        streams, streams, 1e-6, 2.0, 1e-6, 5, 0, [True] * 8,
    )  # fmt: skip
    yield "mhc_sinkhorn_forward", (f(2, 3, 4, 4), 1e-6, 5)
    yield "mhc_sinkhorn_backward", (f(2, 3, 4, 4), f(2, 3, 4, 4), 1e-6, 5)
    yield "mhc_post_forward", (streams, f(2, 3, 8), f(2, 3, 4), f(2, 3, 4, 4), 0)
    yield "mhc_post_backward", (streams, f(2, 3, 8), f(2, 3, 4), f(2, 3, 4, 4), streams, 0, [True] * 4)
    if has_attention(device):
        options = (1, 0, 0, 0, 0.0, 0.0, 0.1, 3, 4, 0, 0)
        more = (f(4), None, f(1, 4, 1, 7), None, None)
        out, lse = ops.attention_forward(q, k, v, *indices, *more, *options, 0)
        yield "attention_forward", (q, k, v, *indices, *more, *options, 0)
        yield "attention_backward", (q, k, v, *indices, *more, *options, 0, out, lse, q, None, [True] * 5)


def has_attention(device):
    q = torch.zeros(1, 1, 1, 8, device=device)
    try:
        attention(q, q, q)
    except NotImplementedError:
        return False
    return True


def test_opcheck(device):
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    seen = set()
    for name, arguments in calls(device):
        seen.add(name)
        op = getattr(ops, name).default
        differentiable = name.endswith("_forward")
        arguments = [a.detach().requires_grad_(differentiable) if isinstance(a, torch.Tensor) else a for a in arguments]
        torch.library.opcheck(op, tuple(arguments), test_utils=tests)
    registered = {name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if
                  name.startswith("cotangent::")}  # fmt: skip
    registered = {name for name in registered if not name.startswith("parallel_")}  # those of cotangent.distributed
    assert registered - seen <= {"attention_forward", "attention_backward"} - (seen if has_attention(device) else set())


def test_every_argument_of_the_headers_can_be_given():
    calls_of_the_library = _C.calls()
    headers = Path(__file__).parents[2] / "include" / "cotangent"
    for header in headers.glob("*.h"):
        for name, body in re.findall(r"struct cot_(\w+)_args \{(.*?)\}", header.read_text(), re.S):
            members = re.findall(r"^    \w+ \*?(\w+);", body, re.M)
            ours = {"struct_size", "workspace", "workspace_bytes"}
            assert calls_of_the_library[name] == tuple(m for m in members if m not in ours)
    with pytest.raises(ValueError, match="causal_conv1d_forward has no argument 'y2'"):
        _C.plan("causal_conv1d_forward", ("x", "y2"))
    with pytest.raises(ValueError, match="the library has no call convolution"):
        _C.plan("convolution", ())


SPOILED = {
    "an axis more": lambda t: t[None],
    "no axes": lambda t: t.flatten()[0],
    "an element less": lambda t: t[..., :-1],
    "nothing": lambda t: t[:0],
    "float64": lambda t: t.double(),
    "int32": lambda t: t.int(),
    "complex": lambda t: t.to(torch.complex64),
    "7 axes": lambda t: t.reshape(*t.shape, *[1] * (7 - t.dim())),
    "turned": lambda t: t.flip(0).transpose(0, -1),
    "one element everywhere": lambda t: t.flatten()[:1].reshape([1] * t.dim()).expand(t.shape),
    "not there": lambda t: None,
}


def test_whatever_is_spoiled_is_refused_by_name_or_served(device):
    served = refused = 0
    for name, arguments in calls(device):
        op = getattr(ops, name).default
        names = [argument.name for argument in op._schema.arguments]
        for i, argument in enumerate(arguments):
            if not isinstance(argument, torch.Tensor):
                continue
            for what, spoil in SPOILED.items():
                given = [a.clone() if isinstance(a, torch.Tensor) else a for a in arguments]
                given[i] = spoil(given[i])
                if given[i] is None and "Optional" not in str(op._schema.arguments[i].type):
                    continue
                try:
                    op(*given)
                    served += 1
                except (ValueError, TypeError, NotImplementedError) as error:
                    function = name[: -len("_into")] if name.endswith("_into") else name  # of the library
                    assert str(error).startswith((f"{name}: ", f"{function}: ")), f"{names[i]}, {what}: {error}"
                    refused += 1
    assert served > 20 and refused > 500


class Block(torch.nn.Module):
    """All ops in one layer."""

    def __init__(self, D=32, n=4, H=4, with_attention=True):
        super().__init__()
        self.n, self.H, self.with_attention = n, H, with_attention
        M = n * n + 2 * n
        self.phi = torch.nn.Parameter(torch.randn(M, n * D) / (n * D) ** 0.5)
        self.alpha = torch.nn.Parameter(torch.full((3,), 0.1))
        self.coefficients = torch.nn.Parameter(torch.randn(M))
        self.conv = torch.nn.Parameter(torch.randn(D, 4) / 2)
        self.bias = torch.nn.Parameter(torch.randn(D))
        self.qkv = torch.nn.Linear(D, 3 * D)

    def forward(self, x):
        streams = x[:, :, None].expand(-1, -1, self.n, -1).contiguous()
        h, h_post, h_res = mhc_pre(streams, self.phi, self.alpha, self.coefficients)
        h = causal_conv1d(h.transpose(1, 2), self.conv, self.bias, "silu").transpose(1, 2)
        q, k, v = self.qkv(h).unflatten(-1, (3, self.H, -1)).unbind(2)
        h = attention(q, k, v, causal=True) if self.with_attention else q + k * v
        h = dropout(h.flatten(2), 0.1, bias=self.bias, activation="gelu", residual=x, seed=5)
        logits = mhc_pre(streams, self.phi, self.alpha, self.coefficients, sinkhorn=False)[2]
        streams = mhc_post(streams, h, h_post, (h_res + mhc_sinkhorn(logits)) / 2)
        return dropout(streams.sum(2), 0.2, self.training)


def block_and_input(device):
    torch.manual_seed(1)
    block = Block(with_attention=has_attention(device)).to(device).eval()
    return block, torch.randn(2, 11, 32, device=device, requires_grad=True)


def run(block, x):
    y = block(x)
    parameters = [x, *block.parameters()]
    return [y, *torch.autograd.grad(y.square().sum(), parameters)]


def test_compiles_without_graph_breaks(device):
    block, x = block_and_input(device)
    expected = run(block, x)
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="inductor" if device.type == "cuda" else "aot_eager")
    for found, wanted in zip(run(compiled, x), expected):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    longer = torch.randn(3, 17, 32, device=device, requires_grad=True)  # dynamic shapes
    for found, wanted in zip(run(compiled, longer), run(block, longer)):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
    compiled.train()
    torch.manual_seed(3)
    first, second = compiled(x), compiled(x)
    assert not torch.equal(first, second)  # every call draws a new seed


def test_exports(device):
    block, x = block_and_input(device)
    program = torch.export.export(block, (x.detach(),))
    names = {str(node.target) for node in program.graph.nodes}
    assert {"cotangent.causal_conv1d_forward.default", "cotangent.mhc_post_forward.default"} <= names
    torch.testing.assert_close(program.module()(x.detach()), block(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(device, dtype):
    x, weight = randn(device, 2, 6, 9), randn(device, 6, 4).requires_grad_()
    with torch.autocast(device.type, dtype):
        y = causal_conv1d(x, weight, None, "silu")
        state = torch.zeros(2, 6, 3, device=device)
        assert cotangent.causal_conv1d_update(x[:, :, 0], state, weight).dtype == dtype
    assert y.dtype == dtype
    torch.testing.assert_close(y, causal_conv1d(x.to(dtype), weight, None, "silu"))
    y.float().sum().backward()
    assert weight.grad.dtype == torch.float32
    with torch.autocast(device.type, dtype):
        assert causal_conv1d(x.double(), weight.double()).dtype == torch.float64 if device.type == "cpu" else True
        if has_attention(device):
            q = randn(device, 1, 4, 2, 8)
            assert attention(q, q.to(dtype), q).dtype == dtype
        block, x = block_and_input(device)
        assert all(torch.isfinite(t).all() for t in run(block, x))


def test_direct_calls_respect_modes_profiler_and_subclasses(device):
    """A call goes directly to its kernel, except under modes, the profiler, subclasses and lazy conjugation or
    negation."""
    x, weight = randn(device, 2, 6, 9), randn(device, 6, 4)

    class Listener(TorchDispatchMode):
        heard: "list[str]" = []

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.heard.append(str(func))
            return func(*args, **(kwargs or {}))

    with Listener() as listener:
        causal_conv1d(x, weight)
    assert "cotangent.causal_conv1d_forward.default" in listener.heard
    with torch.profiler.profile() as profile:
        causal_conv1d(x, weight)
    assert "cotangent::causal_conv1d_forward" in [event.key for event in profile.key_averages()]
    assert torch.equal(causal_conv1d(torch._neg_view(x), weight), causal_conv1d(-x, weight))

    class Named(torch.Tensor):
        heard: "list[str]" = []

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            cls.heard.append(str(func))
            return super().__torch_function__(func, types, args, kwargs or {})

    causal_conv1d(x.as_subclass(Named), weight)
    assert any("causal_conv1d_forward" in name for name in Named.heard)


def test_gradients_of_gradients_are_refused(device):
    x, weight = randn(device, 1, 4, 8).requires_grad_(), randn(device, 4, 4).requires_grad_()
    (dx,) = torch.autograd.grad(causal_conv1d(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="causal_conv1d_backward has no gradient of its own"):
        dx.sum().backward()
    state = torch.zeros(1, 4, 3, device=device)
    with pytest.raises(NotImplementedError, match="causal_conv1d_update has no gradient: it is for decoding"):
        cotangent.causal_conv1d_update(x[:, :, 0], state, weight).sum().backward()


class Strides(TorchDispatchMode):
    """Records the strides of the gradients that the backward of causal_conv1d receives."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is ops.causal_conv1d_backward.default:
            self.found.append(args[7].stride())
        return function(*args, **(kwargs or {}))


def test_gradients_are_laid_out_like_results(device):
    """The gradient of a sum has strides of 0, that of a transpose another order. Without a copy, the slow kernels for
    any layout would run."""
    x, weight = randn(device, 2, 6, 9).requires_grad_(), randn(device, 6, 4)
    ones = torch.ones(2, 6, 9, device=device)
    wanted = torch.autograd.grad(causal_conv1d(x, weight), x, ones)[0]
    last = x.transpose(1, 2).contiguous().transpose(1, 2)
    for x_as_it_lies, use in (
        (x, lambda y: y.sum()),
        (x, lambda y: (y.transpose(1, 2).contiguous() * 1).sum()),
        (last, lambda y: (y * ones).sum()),
        (last, lambda y: y.sum()),
    ):
        y = causal_conv1d(x_as_it_lies, weight)
        with Strides() as strides:
            torch.testing.assert_close(torch.autograd.grad(use(y), x)[0], wanted)
        assert strides.found == [y.stride()]
    y = causal_conv1d(x, weight)
    sliced = torch.ones(2, 6, 20, device=device)[:, :, 3:12]
    with Strides() as strides:
        torch.autograd.grad(y, x, sliced)
    assert strides.found == [sliced.stride()]  # not copied


def test_same_bits_for_any_number_of_threads(on_cpu):
    block, x = block_and_input(torch.device("cpu"))
    before, results = torch.get_num_threads(), []
    conv = torch.randn(4, 64, 300), torch.randn(64, 4)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append([causal_conv1d(*conv), mhc_pre(x[:, :, None] * 1, torch.ones(3, 32), *(torch.ones(3),) * 2)[0]])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))


def test_python_threads(device):
    block, x = block_and_input(device)
    wanted, faults = [t.detach() for t in run(block, x)], []

    def work():
        for _ in range(5):
            found = run(block, x.detach().requires_grad_())
            if not all(torch.equal(f, w) for f, w in zip(found, wanted)):
                faults.append("other bits")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not faults


def test_checkpointing_draws_the_same_masks(device):
    x = randn(device, 16, 32).requires_grad_()
    y = torch.utils.checkpoint.checkpoint(lambda x: dropout(x * 2, 0.5), x, use_reentrant=False)
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)


def test_attention_is_deterministic_unless_told(device):
    if not has_attention(device):
        pytest.skip("no kernel of this device supports attention yet")

    class Flags(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function is ops.attention_backward.default:
                names = [argument.name for argument in function._schema.arguments]
                found.append(args[names.index("allow_nondeterminism")])
            return function(*args, **(kwargs or {}))

    q, found = randn(device, 1, 4, 2, 8).requires_grad_(), []
    for deterministic in (True, False):
        with Flags():
            attention(q, q, q, deterministic=deterministic).sum().backward()
    assert found == [0, 1]


# ---- on a GPU -----------------------------------------------------------------------------------------------


def test_other_streams(on_gpu, device):
    x, weight = torch.randn(8, 512, 4096, device=device), torch.randn(512, 4, device=device)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    wanted = F.silu(F.conv1d(F.pad(x * 2, (3, 0)), weight[:, None], groups=512))
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        y = causal_conv1d(x * 2, weight, None, "silu")
    stream.synchronize()
    torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-4)


def test_graph_capture(on_gpu, device):
    block, x = block_and_input(device)
    block.train()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(block, x)
    torch.cuda.current_stream().wait_stream(stream)
    block.eval()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(block, x)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    for found, wanted in zip(captured, run(block, x)):
        torch.testing.assert_close(found, wanted)
    ones, masks = torch.ones(256, 256, device=device), torch.cuda.CUDAGraph()
    with torch.cuda.graph(masks):
        y = dropout(ones, 0.5)
    drawn = []
    for _ in range(2):
        masks.replay()
        drawn.append(y.clone())
    assert not torch.equal(*drawn)


def test_tensors_of_two_devices(on_gpu, device):
    x, weight = torch.randn(1, 4, 8, device=device), torch.randn(4, 4)
    with pytest.raises(ValueError, match="weight is on the CPU, expected cuda:0"):
        causal_conv1d(x, weight)


def test_faults_of_index_data_are_reported(on_gpu, device):
    x, weight = torch.randn(1, 4, 8, device=device), torch.randn(4, 4, device=device)
    causal_conv1d(x, weight, cu_seqlens=torch.tensor([0, 6, 3, 8], dtype=torch.int32, device=device))
    with pytest.raises(ValueError, match=r"cu_seqlens\[2\] is out of order"):
        cotangent.check_index_data(device)
    cotangent.check_index_data(device)


# Prints the results of calls with all dtypes, and with strides of every kind.
RESULTS_OF_LAYOUTS = """
import sys
import torch

if sys.argv[1] == "attributes":
    del torch.Tensor.__dlpack_c_exchange_api__
import cotangent

torch.manual_seed(0)
for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
    x, weight = torch.randn(2, 6, 9).to(dtype), torch.nn.Parameter(torch.randn(6, 4).to(dtype))
    seq_idx = torch.tensor([[0, 0, 1, 1, 1, 2, 2, 2, 2]] * 2, dtype=torch.int32)
    for view in (x, x.mT.contiguous().mT, x[:, :, ::2], x[1:, 1:, 1:], x[:, :, :1], x[:0], x.expand(3, 2, 6, 9)[0]):
        y = cotangent.causal_conv1d(view, weight[-view.shape[1] :], seq_idx=seq_idx[: view.shape[0], : view.shape[2]])
        y.sum().backward()
        print(y.tolist(), y.stride(), weight.grad.tolist())
    for kept in (torch.bool, torch.uint8):
        mask = torch.randint(0, 2, (6, 9), dtype=torch.uint8).to(kept)
        print(cotangent.dropout(x[0], 0.5, mask=mask).tolist())
try:
    cotangent.causal_conv1d(torch.zeros(2, 6, 9, dtype=torch.int64), weight)
except TypeError as error:
    print(error)
"""


def test_both_ways_to_read_a_tensor_agree(on_cpu):
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch has no exchange API")
    done = [
        subprocess.run([sys.executable, "-c", RESULTS_OF_LAYOUTS, way], capture_output=True, text=True)
        for way in ("exchange", "attributes")
    ]
    assert [result.returncode for result in done] == [0, 0], done[1].stderr + done[0].stderr
    assert done[0].stdout == done[1].stdout and "x has dtype torch.int64" in done[0].stdout


# Calls run_cuda with a driver that executes nothing (tests/fake_cuda.c), for stand-ins of a GPU's tensors.
WITHOUT_A_GPU = """
import torch
from cotangent import _C


class OnGpu:
    def __init__(self, *shape, dtype=torch.float32):
        self.tensor = torch.zeros(*shape, dtype=dtype)
        self.dtype, self.shape = self.tensor.dtype, self.tensor.shape

    def stride(self):
        return self.tensor.stride()

    def data_ptr(self):
        return self.tensor.data_ptr()

    def get_device(self):
        return 0


sizes = []


def allocate(device, size):
    sizes.append((device, size))
    return OnGpu(size, dtype=torch.uint8)


def refuse(device, size):
    raise OverflowError("this allocator is full")


def allocate_late(device, size):
    "While PyTorch allocates, another thread may call the library on another stream."
    _C.run_cuda(backward, 0, 0, allocate, *values)
    return allocate(device, size)


x, dy, dx = (OnGpu(2, 8, 64) for _ in range(3))
weight, dweight = OnGpu(8, 4), OnGpu(8, 4)
forward = _C.plan("causal_conv1d_forward", ("x", "weight", "y"))
backward = _C.plan("causal_conv1d_backward", ("x", "weight", "dy", "dx", "dweight"))
values = (x, weight, dy, dx, dweight)
_C.run_cuda(forward, 0, 0, refuse, x, weight, dy)
assert sizes == []
_C.run_cuda(backward, 0, 0, allocate, *values)
assert len(sizes) == 1 and sizes[0][0] == 0 and sizes[0][1] > 0
_C.run_cuda(backward, 0, 0, allocate_late, *values)
assert sizes == 3 * sizes[:1]
try:
    _C.run_cuda(backward, 0, 0, refuse, *values)
except OverflowError as error:
    assert str(error) == "this allocator is full"
else:
    raise AssertionError("the allocator's exception is lost")
_C.run_cuda(backward, 0, 0, allocate, *values)
assert len(sizes) == 4
"""


def test_a_call_on_a_gpu_allocates_its_workspace_once():
    driver = Path(_C.__file__).parents[2] / "tests" / "fake_cuda"
    if not driver.exists():
        pytest.skip("this build has no fake driver")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_GPU], env={**os.environ, "LD_LIBRARY_PATH": str(driver)},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
