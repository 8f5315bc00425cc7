# SPDX-License-Identifier: Apache-2.0
"""The functions of versions 3 and 4 of FlashAttention, and how other packages find them."""
import importlib.metadata
import inspect

import pytest
import torch
from test_attention import formula, inputs
from test_torch import has_attention

import cotangent
from cotangent import compat
from cotangent._rotary import rotary_table
from cotangent.compat import bert_padding, flash_attn, flash_attn_cute, flash_attn_interface
from cotangent.compat.rotary import apply_rotary_emb

close = dict(rtol=1e-4, atol=1e-5)


@pytest.fixture(autouse=True)
def with_attention(device):
    if not has_attention(device):
        pytest.skip("no kernel of this device supports attention yet")


@pytest.fixture
def installed():
    compat.install()
    yield
    compat.uninstall()


def test_distributions(installed):
    """transformers asks which distribution has a package, to tell the versions of flash_attn apart."""
    found = importlib.metadata.packages_distributions()
    assert found["flash_attn"] == ["flash_attn", "flash_attn_4"]
    assert found["flash_attn_interface"] == ["flash_attn_3"] and found["causal_conv1d"] == ["causal_conv1d"]
    assert importlib.metadata.version("flash-attn-3") == "3.0.0"
    compat.uninstall()
    assert "flash_attn" not in importlib.metadata.packages_distributions()


def test_installs_one_package():
    with pytest.raises(ValueError, match="'flash' is not one of causal_conv1d, flash_attn"):
        compat.install("flash")
    compat.install("causal_conv1d")
    try:
        import causal_conv1d

        assert causal_conv1d.causal_conv1d_fn is compat.causal_conv1d.causal_conv1d_fn
        assert "flash_attn" not in importlib.metadata.packages_distributions()
        with pytest.raises(ImportError):
            import flash_attn  # noqa: F401
        compat.install()  # adds the others
        import flash_attn.cute.interface as cute

        assert cute.flash_attn_func is flash_attn_cute.flash_attn_func
        assert "flash_attn" in importlib.metadata.packages_distributions()
    finally:
        compat.uninstall()


def test_kvcache_of_version_3(device):
    q, k, v = inputs(device, Tq=1, Tk=9)
    used = torch.tensor([5, 9], dtype=torch.int32, device=device)
    options = dict(cache_seqlens=used, causal=True, softcap=3.0, window_size=(4, 0))
    out, lse = flash_attn_interface.flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **options)
    expected, expected_lse = flash_attn.flash_attn_with_kvcache(q, k, v, return_softmax_lse=True, **options)
    assert torch.equal(out, expected) and torch.equal(lse, expected_lse)
    torch.testing.assert_close(
        out[:1], formula(q[:1], k[:1, :5], v[:1, :5], causal=True, softcap=3.0, window=(4, 0))[0], **close
    )
    for name in ("page_table", "qv", "cu_seqlens_q", "k_descale", "rotary_cos", "attention_chunk"):
        with pytest.raises(NotImplementedError, match=f"flash_attn_with_kvcache: {name} is not supported"):
            flash_attn_interface.flash_attn_with_kvcache(q, k, v, **{name: q})


def test_version_4(device):
    q, k, v = inputs(device)
    sink = torch.randn(q.shape[2], device=device)
    for window, expected in (((None, None), None), ((3, None), (3, 0)), ((3, -1), (3, 0))):
        out, lse = flash_attn_cute.flash_attn_func(q, k, v, causal=True, window_size=window, learnable_sink=sink, softcap=2.0,
                                                   return_lse=True)  # fmt: skip
        wanted, wanted_lse = formula(q, k, v, sink, causal=True, window=expected, softcap=2.0)
        torch.testing.assert_close(out, wanted, **close)
        torch.testing.assert_close(lse, wanted_lse, **close)
    out, lse = flash_attn_cute.flash_attn_func(q, k, v, window_size=(None, 2))
    assert lse is None
    torch.testing.assert_close(out, formula(q, k, v, window=(-1, 2))[0], **close)
    for name in ("qv", "score_mod", "mask_mod", "block_sparse_tensors", "aux_tensors"):
        with pytest.raises(NotImplementedError, match=f"flash_attn_func: {name} is not supported"):
            flash_attn_cute.flash_attn_func(q, k, v, **{name: q})


def test_version_4_packed(device):
    q, k, v = (x.flatten(0, 1) for x in inputs(device, Tq=9, Tk=9))
    ends = torch.tensor([0, 9, 18], dtype=torch.int32, device=device)
    separate = [x.unflatten(0, (2, 9)) for x in (q, k, v)]
    expected = formula(*separate, causal=True)[0].flatten(0, 1)
    for lengths in (dict(max_seqlen_q=9, max_seqlen_k=9), {}):
        out, _ = flash_attn_cute.flash_attn_varlen_func(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True, **lengths)
        torch.testing.assert_close(out, expected, **close)
    out, _ = flash_attn_cute.flash_attn_varlen_func(*separate, causal=True)
    torch.testing.assert_close(out.flatten(0, 1), expected, **close)
    with pytest.raises(NotImplementedError, match="cu_seqlens_k is None"):
        flash_attn_cute.flash_attn_varlen_func(q, k, v, cu_seqlens_q=ends)
    with pytest.raises(NotImplementedError, match="page_table is not supported"):
        flash_attn_cute.flash_attn_varlen_func(q, k, v, page_table=ends)


def test_version_4_without_autograd(device):
    """The pair of functions that PyTorch's registry of flash implementations calls."""
    q, k, v = (t.requires_grad_() for t in inputs(device))
    sink = torch.randn(q.shape[2], device=device, requires_grad=True)
    out, lse = flash_attn_cute.flash_attn_func(q, k, v, causal=True, window_size=(3, 0), learnable_sink=sink, return_lse=True)
    dout, dlse = torch.randn_like(out), torch.randn_like(lse)
    expected = torch.autograd.grad((out, lse), (q, k, v, sink), (dout, dlse))
    options = dict(causal=True, window_size_left=3, learnable_sink=sink)
    into = torch.empty_like(out)
    found, found_lse = flash_attn_cute._flash_attn_fwd(q, k, v, return_lse=True, out=into, **options)
    assert found is into and torch.equal(found, out) and torch.equal(found_lse, lse) and not found.requires_grad
    found = flash_attn_cute._flash_attn_bwd(q, k, v, out, dout, lse, dlse=dlse, **options)
    assert all(torch.equal(a, b) for a, b in zip(found, expected))
    with pytest.raises(NotImplementedError, match="_flash_attn_bwd: score_mod is not supported"):
        flash_attn_cute._flash_attn_bwd(q, k, v, out, dout, lse, score_mod=len)


def test_the_same_parameters_as_transformers_expects():
    """transformers reads the names of the parameters to learn what an implementation supports."""
    for function, names in (
        (flash_attn.flash_attn_varlen_func, ("dropout_p", "window_size", "softcap", "deterministic")),
        (flash_attn_interface.flash_attn_varlen_func, ("window_size", "softcap", "deterministic", "max_seqlen_q")),
        (flash_attn_cute.flash_attn_varlen_func, ("window_size", "softcap", "learnable_sink", "max_seqlen_k")),
        (flash_attn_interface.flash_attn_with_kvcache, ("page_table", "cache_seqlens")),
    ):
        assert set(names) <= set(inspect.signature(function).parameters)


# ---- dropout and the functions without autograd of version 2 ----------------------------------------------


def packing(device, packed):
    lengths = torch.tensor([0, 4, 13], dtype=torch.int32, device=device)
    return (lengths, lengths, 9, 9) if packed else ()


@pytest.mark.parametrize("packed", [False, True])
def test_probabilities_with_dropout(device, packed):
    """S_dmask has the probabilities, negative where they were dropped: it reproduces the output."""
    shape = (13,) if packed else (2, 9)
    q, k, v = (torch.randn(*shape, h, 16, device=device) for h in (4, 2, 2))
    options = dict(causal=True, window_size=(5, 0), return_attn_probs=True)
    function = flash_attn.flash_attn_varlen_func if packed else flash_attn.flash_attn_func
    p = 0.3
    out, lse, S = function(q, k, v, *packing(device, packed), dropout_p=p, **options)
    assert S.shape == (2, 4, 9, 9)
    dropped = S < 0
    assert 0.1 < dropped.sum() / (S != 0).sum() < 0.5
    kept = torch.where(dropped, 0, S) / (1 - round(65536 * p) / 65536)
    if packed:
        rows = [out[:4], out[4:]]
        keys = [v[:4], v[4:]]
    else:
        rows, keys = out, v
    for b in range(2):
        n = rows[b].shape[0]
        values = keys[b].repeat_interleave(2, 1)
        torch.testing.assert_close(torch.einsum("hij,jhd->ihd", kept[b, :, :n, :n], values), rows[b], **close)
        assert (S[b, :, n:] == 0).all() and (S[b, :, :, n:] == 0).all()
        torch.testing.assert_close(S[b, :, :n].abs().sum(-1), torch.ones(4, n, device=device), **close)
    assert function(q, k, v, *packing(device, packed), **options)[2] is None


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("p", [0.0, 0.4])
def test_version_2_without_autograd(device, packed, p):
    shape = (13,) if packed else (2, 9)
    q, k, v = (torch.randn(*shape, h, 16, device=device, requires_grad=True) for h in (4, 2, 2))
    name = "_flash_attn_varlen" if packed else "_flash_attn"
    forward, backward = (getattr(flash_attn, f"{name}_{way}") for way in ("forward", "backward"))
    options = dict(window_size_left=5, window_size_right=0, softcap=2.0)
    out, lse, S, rng_state = forward(q, k, v, *packing(device, packed), p, 0.3, True, **options)
    assert S is None and rng_state.dtype == torch.int64 and rng_state.shape == (2,) and not out.requires_grad
    seed = rng_state.view(torch.int32)[:2] if p else None
    arguments = dict(causal=True, window=(5, 0), scale=0.3, softcap=2.0, dropout_p=p, dropout_seed_tensor=seed)
    run = cotangent.attention_varlen if packed else cotangent.attention
    expected = run(q, k, v, *packing(device, packed), **arguments)
    assert torch.equal(out, expected)
    dout = torch.randn_like(out)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    sums = backward(dout, q, k, v, out, lse, *gradients, *packing(device, packed), p, 0.3, True, rng_state=rng_state, **options)
    for a, b in zip(gradients, torch.autograd.grad(expected, (q, k, v), dout)):
        assert torch.equal(a, b)
    torch.testing.assert_close(sums, (dout * out).sum(-1).transpose(-1, -2), **close)
    if p:
        with pytest.raises(ValueError, match="rng_state is None"):
            backward(dout, q, k, v, out, lse, *gradients, *packing(device, packed), p, 0.3, True)


def test_concatenated_sequences(device):
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [3, 2, 0, 0, 0, 0], [6, 0, 0, 0, 0, 0]], device=device)
    x = torch.arange(18, device=device).reshape(3, 6, 1)
    tokens, indices, ends, max_seqlen = bert_padding.unpad_input_for_concatenated_sequences(x, lengths)
    assert tokens.flatten().tolist() == indices.tolist() == [*range(5), *range(6, 11), *range(12, 18)]
    assert ends.tolist() == [0, 2, 5, 8, 10, 16] and ends.dtype == torch.int32 and max_seqlen == 6
    assert torch.equal(bert_padding.pad_input(tokens, indices, 3, 6)[1].flatten(), torch.tensor([6, 7, 8, 9, 10, 0], device=device))


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary(device, interleaved):
    """Scores depend on the distance of two tokens alone, and packed sequences begin at position 0."""
    cos, sin = rotary_table(32, 12, 100.0, torch.device(device))
    x = torch.randn(1, 1, 3, 16, device=device).expand(2, 9, 3, 16)
    y = apply_rotary_emb(x, cos, sin, interleaved)
    assert torch.equal(y[..., 12:], x[..., 12:]) and torch.equal(y[:, 0], x[:, 0])
    scores = torch.einsum("bihd,bjhd->bhij", y, y)
    torch.testing.assert_close(scores[..., 1:, 1:], scores[..., :-1, :-1], **close)
    angle = 3 * 100.0 ** (-2 / 12)  # position 3, pair 1
    a, b = (2, 3) if interleaved else (1, 7)
    expected = x[0, 0, 0, a] * torch.tensor(angle).cos() - x[0, 0, 0, b] * torch.tensor(angle).sin()
    torch.testing.assert_close(y[0, 3, 0, a], expected, **close)
    offset = apply_rotary_emb(x, cos, sin, interleaved, seqlen_offsets=torch.tensor([0, 4], device=device))
    torch.testing.assert_close(offset[1, :5], y[1, 4:], **close)
    ends = torch.tensor([0, 4, 9], dtype=torch.int32, device=device)
    packed = apply_rotary_emb(x[0].contiguous(), cos, sin, interleaved, cu_seqlens=ends)
    assert torch.equal(packed[4:], y[0, :5]) and torch.equal(packed[:4], y[0, :4])
    into = x.clone()
    assert apply_rotary_emb(into, cos, sin, interleaved, inplace=True) is into and torch.equal(into, y)
    with pytest.raises(ValueError, match="cos .*expected"):
        apply_rotary_emb(x, cos[:, :5], sin, interleaved)
