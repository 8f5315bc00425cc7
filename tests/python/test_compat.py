# SPDX-License-Identifier: Apache-2.0
"""Functions under the names of other packages, compared with plain formulas: those packages have no CPU kernels."""
import importlib.metadata
import importlib.util
import inspect
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from test_attention import formula, inputs
from test_causal_conv1d import formula as convolution
from test_torch import has_attention

from cotangent import compat
from cotangent.compat.bert_padding import pad_input, unpad_input
from cotangent.compat.causal_conv1d import causal_conv1d_fn, causal_conv1d_update, causal_conv1d_varlen_states
from cotangent.compat.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)
from cotangent.compat import flash_attn_interface
from cotangent.compat.sdpa import scaled_dot_product_attention

close = dict(rtol=1e-4, atol=1e-5)


@pytest.fixture
def with_attention(device):
    if not has_attention(device):
        pytest.skip("no kernel of this device supports attention yet")


def test_causal_conv1d(device):
    x, weight, bias = (torch.randn(s, device=device) for s in ((2, 8, 11), (8, 4), (8,)))
    state, into = torch.randn(2, 8, 3, device=device), torch.empty(2, 8, 3, device=device)
    out, final = causal_conv1d_fn(x, weight, bias, None, state, True, into, "swish")
    expected, last = convolution(x, weight, bias, "silu", state)
    torch.testing.assert_close(out, expected, **close)
    assert final is into and torch.equal(into, last)
    torch.testing.assert_close(causal_conv1d_fn(x, weight, activation=None), convolution(x, weight)[0], **close)
    torch.testing.assert_close(
        causal_conv1d_update(x[:, :, 0], into.clone(), weight, bias, "silu"),
        convolution(torch.cat([x, x[:, :, :1]], 2), weight, bias, "silu", state)[0][:, :, -1], **close,
    )  # fmt: skip


def test_final_states_have_their_gradient(device):
    """Final states have a gradient, also with final_states_out: as a result or as the filled tensor, which may be a
    part of a cache."""
    x, weight, state = (torch.randn(s, device=device) for s in ((2, 8, 11), (8, 4), (2, 8, 3)))
    for T in (11, 2):  # with 2 inputs, the final states keep a part of the initial states
        by_y, by_state = torch.randn(2, 8, T, device=device), torch.randn(2, 8, 3, device=device)

        def gradients(convolution):
            leaves = [t.clone().requires_grad_() for t in (x[:, :, :T], weight, state)]
            y, final = convolution(*leaves)
            return torch.autograd.grad((y * by_y).sum() + (final * by_state).sum(), leaves)

        def filled(x, weight, state, into=None):
            into = torch.empty(2, 8, 3, device=device) if into is None else into
            return causal_conv1d_fn(x, weight, None, None, state, True, into, "silu")[0], into

        def cached(x, weight, state):
            cache = torch.zeros(4, 2, 8, 3, device=device)
            y, _ = filled(x, weight, state, cache[1])
            return y, cache.sum(0)

        def returned(x, weight, state):
            return causal_conv1d_fn(x, weight, None, None, state, True, torch.empty(2, 8, 3, device=device), "silu")

        expected = gradients(lambda x, w, s: convolution(x, w, None, "silu", s))
        for way in (filled, returned, cached):
            for found, wanted in zip(gradients(way), expected):
                torch.testing.assert_close(found, wanted, **close)
    with torch.no_grad():
        into = torch.empty(2, 8, 3, device=device)
        assert not causal_conv1d_fn(x.requires_grad_(), weight, None, None, None, True, into)[1].requires_grad
    with pytest.raises(ValueError, match=r"final_states_out has shape \(2, 8, 4\)"):
        causal_conv1d_fn(x, weight, None, None, None, True, torch.empty(2, 8, 4, device=device))


def test_varlen_states(device):
    x = torch.randn(9, 5, device=device)
    ends = torch.tensor([0, 2, 2, 9], dtype=torch.int32, device=device)
    states = causal_conv1d_varlen_states(x, ends, 4)
    assert states.shape == (3, 5, 4)
    assert torch.equal(states[0], F.pad(x[0:2].t(), (2, 0)))
    assert (states[1] == 0).all()
    assert torch.equal(states[2], x[5:9].t())


def test_flash_attn(device, with_attention):
    q, k, v = inputs(device)
    out, lse, probabilities = flash_attn_func(q, k, v, causal=True, window_size=(4, 7), softcap=3.0, softmax_scale=0.4,
                                              return_attn_probs=True)  # fmt: skip
    expected, expected_lse = formula(q, k, v, causal=True, window=(4, 0), softcap=3.0, scale=0.4)
    torch.testing.assert_close(out, expected, **close)
    torch.testing.assert_close(lse, expected_lse, **close)
    assert probabilities is None
    slopes = torch.rand(4, device=device)
    torch.testing.assert_close(flash_attn_func(q, k, v, alibi_slopes=slopes), formula(q, k, v, slopes=slopes)[0], **close)
    kv = torch.stack([k, v], 2)
    torch.testing.assert_close(flash_attn_kvpacked_func(q, kv), formula(q, k, v)[0], **close)
    qkv = torch.randn(2, 9, 3, 4, 16, device=device)
    torch.testing.assert_close(flash_attn_qkvpacked_func(qkv, causal=True), formula(*qkv.unbind(2), causal=True)[0], **close)
    out, lse = flash_attn_interface.flash_attn_func(q, k, v, causal=True, return_attn_probs=True)
    torch.testing.assert_close(out, formula(q, k, v, causal=True)[0], **close)
    heads = torch.cat([q[:, :, :4], k[:, :13], v[:, :13]], 2)
    torch.testing.assert_close(flash_attn_interface.flash_attn_qkvpacked_func(heads, num_heads_q=4),
                               formula(q, k[:, :13], v[:, :13])[0], **close)  # fmt: skip


def test_flash_attn_varlen(device, with_attention):
    mask = torch.tensor([[1] * 7 + [0] * 2, [1] * 9, [1] * 3 + [0] * 6], device=device)
    qkv = torch.randn(3, 9, 3, 4, 16, device=device)
    packed, indices, ends, max_seqlen, lengths = unpad_input(qkv, mask)
    assert lengths.tolist() == [7, 9, 3] and max_seqlen == 9 and ends.tolist() == [0, 7, 16, 19]
    expected = torch.zeros(3, 9, 4, 16, device=device)
    for b, n in enumerate((7, 9, 3)):
        expected[b, :n] = formula(*qkv[b : b + 1, :n].unbind(2), causal=True)[0][0]
    q, k, v = packed.unbind(1)
    for out in (
        flash_attn_varlen_qkvpacked_func(packed, ends, max_seqlen, causal=True),
        flash_attn_varlen_kvpacked_func(q, packed[:, 1:], ends, ends, max_seqlen, max_seqlen, causal=True),
        flash_attn_varlen_func(q, k, v, ends, ends, max_seqlen, max_seqlen, causal=True),
        flash_attn_interface.flash_attn_varlen_func(q, k, v, ends, ends, max_seqlen, max_seqlen, causal=True),
    ):
        torch.testing.assert_close(pad_input(out, indices, 3, 9), expected, **close)


def test_kvcache(device, with_attention):
    q, k, v = inputs(device, Tq=2, Tk=12)
    new = [torch.randn(2, 2, 2, 16, device=device) for _ in range(2)]
    lengths = torch.tensor([3, 7], dtype=torch.int32, device=device)
    out = flash_attn_with_kvcache(q, k, v, *new, cache_seqlens=lengths, causal=True)
    for b, n in enumerate((3, 7)):
        assert torch.equal(k[b, n : n + 2], new[0][b])
        torch.testing.assert_close(out[b : b + 1], formula(q[b : b + 1], k[b : b + 1, : n + 2], v[b : b + 1, : n + 2],
                                                           causal=True)[0], **close)  # fmt: skip


def test_a_refused_kvcache_call_writes_nothing(device):
    q, new = torch.ones(2, 1, 4, 16, device=device), torch.ones(2, 1, 2, 16, device=device)
    lengths = torch.tensor([3, 8], dtype=torch.int32, device=device)
    wrong = [
        (dict(q=q[:, :, :3]), "q has H=3"),
        (dict(q=q[:1]), "B="),
        (dict(q=q.half()), "dtype"),
        (dict(q=q[0]), "q has"),
        (dict(v=torch.ones(2, 2, 2, 16, device=device)), "v has T=2, k has T=1"),
        (dict(v_cache=torch.zeros(2, 4, 2, 16, device=device)), "v_cache"),
        (dict(alibi_slopes=torch.ones(3, device=device)), "alibi_slopes"),
        (dict(softmax_scale=0), "softmax_scale"),
        (dict(softcap=-1.0), "softcap"),
        (dict(window_size=(1, 2, 3)), "window_size"),
        (dict(cache_seqlens=8), "cache_seqlens has 8, expected 0 to 7"),
        (dict(cache_seqlens=-1), "cache_seqlens has -1"),
    ]
    if device.type == "cpu":  # on a GPU the lengths are not read
        wrong.append((dict(cache_seqlens=lengths), "cache_seqlens has 8"))
        wrong.append((dict(cache_seqlens=lengths - 4), "cache_seqlens has -1"))
    for options, message in wrong:
        caches = dict(k_cache=torch.zeros(2, 8, 2, 16, device=device), v_cache=torch.zeros(2, 8, 2, 16, device=device))
        call = dict(dict(q=q, k=new, v=new, cache_seqlens=3, **caches), **options)
        with pytest.raises((TypeError, ValueError), match=message):
            flash_attn_with_kvcache(**call)
        assert not call["k_cache"].any() and not call["v_cache"].any(), message


def test_what_no_kernel_serves_is_named(device):
    q = torch.zeros(1, 1, 1, 8, device=device)
    with pytest.raises(NotImplementedError, match="flash_attn_func: qv is not supported"):
        flash_attn_interface.flash_attn_func(q, q, q, qv=q)
    with pytest.raises(ValueError, match="qkv has shape .* num_heads_q is 4"):
        flash_attn_interface.flash_attn_qkvpacked_func(torch.zeros(1, 2, 7, 8, device=device), num_heads_q=4)
    with pytest.raises(NotImplementedError, match="flash_attn_varlen_func: block_table"):
        flash_attn_varlen_func(q, q, q, q, q, 1, 1, block_table=q)
    with pytest.raises(NotImplementedError, match="flash_attn_with_kvcache: rotary_cos"):
        flash_attn_with_kvcache(q, q, q, rotary_cos=q)


@pytest.mark.parametrize("L, S", [(5, 5), (7, 4), (4, 7)])
def test_sdpa(device, with_attention, L, S):
    q, k, v = (torch.randn(2, 4, T, 8, device=device) for T in (L, S, S))
    keep = torch.rand(L, S, device=device) < 0.7
    keep[:, 0] = True
    numbers = torch.randn(2, 1, L, S, device=device)
    for options in (dict(), dict(is_causal=True), dict(attn_mask=keep), dict(attn_mask=numbers), dict(scale=0.3),
                    dict(attn_mask=keep[None].expand(4, L, S))):  # fmt: skip
        torch.testing.assert_close(scaled_dot_product_attention(q, k, v, **options),
                                   F.scaled_dot_product_attention(q, k, v, **options), **close)  # fmt: skip
    shared = [t[:, :2].repeat_interleave(2, 1) for t in (k, v)]
    torch.testing.assert_close(scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
                               F.scaled_dot_product_attention(q, *shared), **close)  # fmt: skip
    for shape in ((4,), (2, 3, 4)):
        q, k, v = (torch.randn(*shape, T, 8, device=device) for T in (L, S, S))
        for options in (dict(is_causal=True), dict(attn_mask=keep)):
            torch.testing.assert_close(scaled_dot_product_attention(q, k, v, **options),
                                       F.scaled_dot_product_attention(q, k, v, **options), **close)  # fmt: skip


@pytest.mark.parametrize("L, S", [(0, 5), (5, 0)])
@pytest.mark.parametrize("shape", [(2, 4), (2, 3, 4), ()])
def test_sdpa_of_nothing(device, with_attention, shape, L, S):
    q, k = (torch.randn(*shape, T, 8, device=device) for T in (L, S))
    assert torch.equal(scaled_dot_product_attention(q, k, k), torch.zeros(*shape, L, 8, device=device))


def test_window_sides_below_minus_1(device, with_attention):
    q = torch.randn(1, 9, 2, 8, device=device)
    for left, right in ((-2, 3), (3, -5), (-2, -3)):
        theirs = flash_attn_func(q, q, q, window_size=(left, right))
        assert torch.equal(theirs, flash_attn_func(q, q, q, window_size=(max(left, -1), max(right, -1))))


def test_sdpa_refuses(device):
    q = torch.randn(1, 4, 3, 8, device=device)
    with pytest.raises(ValueError, match="attn_mask and is_causal are both given"):
        scaled_dot_product_attention(q, q, q, torch.ones(3, 3, device=device), is_causal=True)
    with pytest.raises(ValueError, match="key has 2 heads, expected 4 as query, or enable_gqa=True"):
        scaled_dot_product_attention(q, q[:, :2], q[:, :2])


def test_sdpa_of_a_query_that_sees_nothing(device, with_attention):
    q = torch.randn(1, 1, 2, 8, device=device, requires_grad=True)
    mask = torch.tensor([[True, False], [False, False]], device=device)
    y = scaled_dot_product_attention(q, q, q, mask)
    assert (y[0, 0, 1] == 0).all()
    y.sum().backward()
    assert torch.isfinite(q.grad).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sdpa_with_a_padding_mask_of_numbers(device, with_attention, dtype):
    """A mask as models build it: the lowest number of the dtype, expanded over the heads. Sequence 0 has no token."""
    q, k, v = (torch.randn(2, 4, 5, 8, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    keep = torch.tensor([[False] * 5, [True, True, True, False, False]], device=device)[:, None, None, :].expand(2, 4, 5, 5)
    numbers = torch.zeros(2, 1, 1, 5, device=device, dtype=dtype).masked_fill(~keep[:, :1, :1], torch.finfo(dtype).min)
    results = []
    for mask in (numbers.expand(2, 4, 5, 5), keep):
        y = scaled_dot_product_attention(q, k, v, mask)
        results.append((y, *torch.autograd.grad(y.float().square().sum(), (q, k, v))))
    for a, b in zip(*results):
        assert (a[0] == 0).all() and (a[1, :, :3] != 0).any()
        torch.testing.assert_close(a, b)


def test_without_torch():
    """Runs a separate interpreter in which torch cannot be imported."""
    code = "import sys; sys.modules['torch'] = None; import cotangent.compat"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and last.startswith("ImportError: cotangent cannot be used here: "), done.stderr
    assert "torch" in last and last.endswith("(python -m cotangent.doctor)")


def test_install():
    assert importlib.util.find_spec("flash_attn") is None  # the real package is not installed
    compat.install()
    try:
        import causal_conv1d
        import flash_attn
        import flash_attn.cute
        import flash_attn_interface as version_3
        from causal_conv1d.causal_conv1d_varlen import causal_conv1d_varlen_states as states
        from flash_attn.bert_padding import unpad_input as unpad
        from flash_attn.flash_attn_interface import flash_attn_func as function

        assert causal_conv1d.causal_conv1d_fn is causal_conv1d_fn and states is causal_conv1d_varlen_states
        assert flash_attn.flash_attn_func is flash_attn_func is function and unpad is unpad_input
        assert version_3.flash_attn_func is flash_attn_interface.flash_attn_func
        assert importlib.util.find_spec("flash_attn") is not None
        assert importlib.metadata.version("flash-attn") == flash_attn.__version__
        assert importlib.metadata.version("causal_conv1d") == causal_conv1d.__version__
        assert importlib.metadata.version("flash_attn_3") == version_3.__version__ == "3.0.0"
        assert importlib.metadata.version("flash_attn_4") == flash_attn.cute.__version__ == "4.0.0"
        assert "dropout_p" in inspect.signature(flash_attn.flash_attn_func).parameters
        compat.install()  # a second call has no effect
    finally:
        compat.uninstall()
    assert importlib.util.find_spec("flash_attn") is None
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        importlib.metadata.version("flash_attn")
