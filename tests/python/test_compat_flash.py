# SPDX-License-Identifier: Apache-2.0
"""The functions of versions 3 and 4 of FlashAttention, and how other packages find them."""
import importlib.metadata
import inspect

import pytest
import torch
from test_attention import formula, inputs
from test_torch import has_attention

from cotangent import compat
from cotangent.compat import flash_attn, flash_attn_cute, flash_attn_interface

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
