# SPDX-License-Identifier: Apache-2.0
"""Cotangent inside PyTorch: torch.nn.attention's registry of flash implementations, scaled_dot_product_attention and FLOP
counts."""
import contextlib

import pytest
import torch
import torch.nn.functional as F
from test_torch import has_attention
from tiny_models import OpRecorder
from torch._subclasses import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

import cotangent
from cotangent.compat import sdpa
from cotangent.integrations import flops, torch_attention

registry = pytest.importorskip("torch.nn.attention._registry")
close = dict(rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def with_attention(device):
    if not has_attention(device):
        pytest.skip("no kernel of this device supports attention yet")


@contextlib.contextmanager
def activated():
    torch.nn.attention.activate_flash_attention_impl("cotangent")
    try:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            yield
    finally:
        torch.nn.attention.restore_flash_attention_impl()


def gradients(run, tensors):
    out = run(*tensors)
    torch.manual_seed(5)
    return (out, *torch.autograd.grad(out, tensors, torch.randn(out.shape, device=out.device)))


@pytest.mark.parametrize("L, S", [(6, 6), (6, 9), (9, 6)])
def test_activated(on_cpu, monkeypatch, L, S):
    calls = []
    for name in ("attention", "_run_backward"):
        function = getattr(torch_attention, name)
        monkeypatch.setattr(torch_attention, name, lambda *a, _f=function, _n=name, **o: calls.append(_n) or _f(*a, **o))
    q, k, v = (torch.randn(2, 4, T, 16, requires_grad=True) for T in (L, S, S))
    mask = torch.rand(2, 1, L, S) < 0.7
    mask[..., 0] = True
    for options in ({}, dict(is_causal=True), dict(attn_mask=mask), dict(scale=0.3)):
        expected = gradients(lambda *x: F.scaled_dot_product_attention(*x, **options), (q, k, v))
        calls.clear()
        with activated():
            assert torch.nn.attention.current_flash_attention_impl() == "cotangent"
            found = gradients(lambda *x: F.scaled_dot_product_attention(*x, **options), (q, k, v))
        assert calls == ["attention", "_run_backward"]
        for a, b in zip(found, expected):
            torch.testing.assert_close(a, b, **close)
    calls.clear()
    F.scaled_dot_product_attention(q, k, v)
    assert not calls  # PyTorch's own kernel is back


def test_strides_are_those_that_the_compiler_expects(on_cpu):
    op, backward = (getattr(torch.ops.aten, f"_scaled_dot_product_flash_attention_for_cpu{x}").default for x in ("", "_backward"))
    for layout in (lambda x: x, lambda x: x.transpose(1, 2)):
        q = torch.randn(2, 4, 6, 16) if layout(torch.empty(1, 2, 3, 4)).shape[1] == 2 else torch.randn(2, 6, 4, 16)
        q = layout(q)
        with FakeTensorMode() as mode:
            x = mode.from_tensor(q)
            fake = op(x, x, x)
            fake_gradients = backward(x, x, x, x, *fake, 0.0, False)
        with activated():
            real = op(q, q, q)
            real_gradients = backward(q, q, q, q, *real, 0.0, False)
        for a, b in zip((*real, *real_gradients), (*fake, *fake_gradients)):
            assert a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def test_kernels_of_cuda(device):
    """The functions that are registered for CUDA, called with tensors of any device: results of PyTorch's schemas, and
    gradients with the same dropout mask."""
    q, k, v = (torch.randn(2, 3, 7, 16, device=device, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    for options in (dict(is_causal=True), dict(dropout_p=0.4), dict(scale=0.3)):
        out, lse, _, _, max_q, max_k, rng_state, offset, _ = torch_attention._cuda_forward(q, k, v, **options)
        assert (max_q, max_k) == (7, 7) and rng_state.dtype == offset.dtype == torch.uint64 and rng_state.shape == (2,)
        dropout_p, causal = options.get("dropout_p", 0.0), options.get("is_causal", False)
        seed = rng_state.view(torch.int32)[:2] if dropout_p else None
        expected = cotangent.attention(*(x.transpose(1, 2) for x in (q, k, v)), causal=causal, scale=options.get("scale"),
                                       dropout_p=dropout_p, dropout_seed_tensor=seed)  # fmt: skip
        assert torch.equal(out, expected.transpose(1, 2))
        wanted = torch.autograd.grad(expected, (q, k, v), dout.transpose(1, 2))
        found = torch_attention._cuda_backward(dout, q, k, v, out, lse, None, None, 7, 7, dropout_p, causal, rng_state,
                                               offset, scale=options.get("scale"))  # fmt: skip
        assert all(torch.equal(a, b) for a, b in zip(found, wanted))
    with pytest.raises(NotImplementedError, match="return_debug_mask is not supported"):
        torch_attention._cuda_forward(q, k, v, return_debug_mask=True)


@pytest.mark.parametrize("packed", [False, True])
def test_flash_attention_forward(device, packed):
    """The ops below torch.nn.attention.varlen, with windows, ALiBi and dropout."""
    shape = (16, 3, 16) if packed else (2, 8, 3, 16)
    q, k, v = (torch.randn(shape, device=device, requires_grad=True) for _ in range(3))
    ends = torch.tensor([0, 5, 16], dtype=torch.int32, device=device) if packed else None
    dout = torch.randn_like(q)
    slopes = torch.rand(3, device=device)
    for extra, wanted_options in (
        (dict(window_size_left=3, window_size_right=0), dict(window=(3, 0))),
        (dict(window_size_left=3), dict(window=(3, -1))),
        (dict(alibi_slopes=slopes), dict(alibi_slopes=slopes)),
    ):
        out, lse, rng_state, unused, _ = torch_attention._flash_forward(q, k, v, ends, ends, 11, 11, 0.2, False, False, **extra)
        options = dict(dropout_p=0.2, dropout_seed_tensor=rng_state.view(torch.int32)[:2], **wanted_options)
        if packed:
            expected = cotangent.attention_varlen(q, k, v, ends, ends, 11, 11, **options)
        else:
            expected = cotangent.attention(q, k, v, **options)
        assert torch.equal(out, expected)
        into = torch.empty_like(out)
        torch_attention._flash_forward_into(into, q, k, v, ends, ends, 11, 11, 0.0, True, False)
        if "alibi_slopes" in extra:
            continue
        found = torch_attention._flash_backward(dout, q, k, v, out, lse, ends, ends, 11, 11, 0.2, False, rng_state, unused, **extra)
        assert all(torch.equal(a, b) for a, b in zip(found, torch.autograd.grad(expected, (q, k, v), dout)))
    with pytest.raises(NotImplementedError, match="block_table is not supported"):
        torch_attention._flash_forward(q, k, v, ends, ends, 11, 11, 0.0, False, False, block_table=q)


# ---- scaled_dot_product_attention -------------------------------------------------------------------------

from torch.nn.functional import scaled_dot_product_attention as by_name  # noqa: E402


def test_override(device):
    q, k, v = (torch.randn(2, 4, 6, 16, device=device, requires_grad=True) for _ in range(3))
    expected = gradients(lambda *x: F.scaled_dot_product_attention(*x, is_causal=True), (q, k, v))
    for function in (F.scaled_dot_product_attention, by_name):
        recorder = OpRecorder()
        with sdpa.override(), recorder:
            found = gradients(lambda *x: function(*x, is_causal=True), (q, k, v))
        assert recorder.names == {"attention_forward", "attention_backward"}
        for a, b in zip(found, expected):
            torch.testing.assert_close(a, b, **close)
    layer = torch.nn.TransformerEncoderLayer(32, 4, 48, batch_first=True, device=device)
    recorder = OpRecorder()
    with sdpa.override(), recorder:
        layer(torch.randn(2, 6, 32, device=device)).sum().backward()
    assert recorder.names == {"attention_forward", "attention_backward"}


def test_enable():
    """enable() and blocks of override() in any order: PyTorch's function comes back when all of them have ended."""
    theirs, ours = F.scaled_dot_product_attention, sdpa.scaled_dot_product_attention
    sdpa.disable()
    assert F.scaled_dot_product_attention is theirs
    sdpa.enable()
    sdpa.enable()  # has no effect
    with sdpa.override():
        sdpa.disable()
        assert F.scaled_dot_product_attention is ours
    assert F.scaled_dot_product_attention is theirs
    with sdpa.override():
        with sdpa.override():
            sdpa.enable()
        assert F.scaled_dot_product_attention is ours
    assert F.scaled_dot_product_attention is ours
    sdpa.disable()
    sdpa.disable()  # has no effect
    assert F.scaled_dot_product_attention is theirs


@pytest.mark.parametrize(
    "shapes",
    [((5, 8), (7, 8), (7, 6)), ((3, 5, 8), (3, 7, 8), (3, 7, 8)), ((1, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
     ((2, 4, 5, 8), (1, 4, 7, 8), (2, 4, 7, 8)), ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)), ((2, 1, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
     ((2, 3, 4, 5, 8), (3, 4, 7, 8), (3, 4, 7, 8)), ((2, 3, 4, 5, 8), (1, 3, 4, 7, 8), (2, 1, 4, 7, 8)),
     ((2, 4, 5, 8), (4, 7, 8), (7, 8)), ((2, 4, 5, 8), (2, 4, 7, 8), (2, 1, 7, 8))],
)  # fmt: skip
def test_axes_that_broadcast(device, shapes):
    """Inputs with 2 axes, and batch or head axes of size 1 or absent."""
    tensors = [torch.randn(shape, device=device, requires_grad=True) for shape in shapes]
    keep = torch.rand(5, 7, device=device) < 0.7
    keep[:, 0] = True
    for options in ({}, dict(is_causal=True), dict(attn_mask=keep)):
        with sdpa_kernel(SDPBackend.MATH):
            expected = gradients(lambda *x: F.scaled_dot_product_attention(*x, **options), tensors)
        for a, b in zip(gradients(lambda *x: sdpa.scaled_dot_product_attention(*x, **options), tensors), expected):
            torch.testing.assert_close(a, b, **close)


def test_axes_that_do_not_broadcast(device):
    q = torch.randn(2, 4, 5, 8, device=device)
    with pytest.raises(ValueError, match="query has shape .*, expected batch axes that broadcast"):
        sdpa.scaled_dot_product_attention(q, torch.randn(3, 4, 5, 8, device=device), q)
    with pytest.raises(ValueError, match="key has 1 axes, expected 2 or more"):
        sdpa.scaled_dot_product_attention(q, q[0, 0, 0], q)


# ---- FLOP counts ------------------------------------------------------------------------------------------


def counted(run):
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def test_flop_counts(device):
    """Equal to the counts of PyTorch's ops for the same result."""
    assert flops._register()  # a second call has no effect
    q, k, v = (torch.randn(2, 4, T, 16, device=device, requires_grad=True) for T in (6, 9, 9))
    by_rows = [x.detach().transpose(1, 2).requires_grad_() for x in (q, k, v)]
    for backward in (False, True):

        def run(out):
            if backward:
                out.sum().backward()

        # The counter sees the forward of matmul, so that the recomputed scores of the backward are not in its count.
        scores = 2 * 2 * 4 * 6 * 9 * 16 if backward else 0
        plain = counted(lambda: run(torch.softmax(q @ k.transpose(-1, -2), -1) @ v))
        assert counted(lambda: run(cotangent.attention(*by_rows))) == plain + scores
        x, w = torch.randn(2, 6, 11, device=device, requires_grad=True), torch.randn(8, 6, 3, device=device, requires_grad=True)
        plain = counted(lambda: run(F.conv1d(F.pad(x, (2, 0)), w)))
        assert abs(counted(lambda: run(cotangent.causal_conv1d_dense(x, w))) / plain - 1) < 0.1
        w = torch.randn(6, 3, device=device, requires_grad=True)
        assert counted(lambda: run(cotangent.causal_conv1d(x, w))) == (3 if backward else 1) * 2 * x.numel() * 3
    into = (x.detach(), w.detach(), None, None, None, None, 0, x.detach(), None, torch.empty_like(x))
    for wanted in (False, True):
        count = counted(lambda: torch.ops.cotangent.causal_conv1d_backward_into(*into, [wanted, False, False]))
        assert count == (1 + wanted) * 2 * x.numel() * 3
    streams, n = torch.randn(2, 5, 4, 8, device=device), 4
    phi, f = torch.randn(24, 32, device=device), torch.randn(2, 5, 8, device=device)
    alpha, bias = torch.ones(3, device=device), torch.zeros(24, device=device)
    h_in, h_post, A = cotangent.mhc_pre(streams, phi, alpha, bias)
    plain = counted(lambda: (streams.flatten(2) @ phi.t(), h_post.unsqueeze(2) @ streams))
    assert counted(lambda: cotangent.mhc_pre(streams, phi, alpha, bias)) == plain
    assert counted(lambda: cotangent.mhc_post(streams, f, h_post, A)) == 2 * streams.numel() * (n + 1)


def test_flop_counts_of_packed_sequences(device):
    q = torch.randn(16, 4, 16, device=device)
    ends = torch.tensor([0, 5, 16], dtype=torch.int32, device=device)
    count = counted(lambda: cotangent.attention_varlen(q, q, q, ends, ends, 11, 11))
    assert count == 2 * 4 * (25 + 121) * 32
