# SPDX-License-Identifier: Apache-2.0
"""The reference functions and cpp_functions of the package causal_conv1d."""
import pytest
import torch
from test_causal_conv1d import formula

import cotangent
from cotangent import compat
from cotangent.compat import causal_conv1d as conv
from cotangent.compat import causal_conv1d_cpp as cpp

close = dict(rtol=1e-4, atol=1e-5)


@pytest.fixture
def tensors(device):
    return tuple(torch.randn(s, device=device, requires_grad=True) for s in ((2, 8, 11), (8, 4), (8,), (2, 8, 3)))


def test_names():
    compat.install("causal_conv1d")
    try:
        from causal_conv1d.causal_conv1d_interface import causal_conv1d_ref, causal_conv1d_update_ref
        from causal_conv1d.causal_conv1d_varlen import causal_conv1d_varlen_states_ref
        from causal_conv1d.cpp_functions import causal_conv1d_bwd_function, causal_conv1d_fwd_function

        assert causal_conv1d_ref is conv.causal_conv1d_ref and causal_conv1d_update_ref is conv.causal_conv1d_update_ref
        assert causal_conv1d_varlen_states_ref is conv.causal_conv1d_varlen_states_ref
        assert causal_conv1d_fwd_function is cpp.causal_conv1d_fwd_function
        assert causal_conv1d_bwd_function is cpp.causal_conv1d_bwd_function
    finally:
        compat.uninstall()


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
def test_references(device, tensors, activation):
    x, weight, bias, state = tensors
    into = torch.empty(2, 8, 3, device=device)
    y, final = conv.causal_conv1d_ref(x, weight, bias, state, True, into, activation)
    expected, last = formula(x, weight, bias, activation and "silu", state)
    torch.testing.assert_close(y, expected, **close)
    assert final is into and torch.equal(into, last)
    torch.testing.assert_close(conv.causal_conv1d_ref(x, weight), conv.causal_conv1d_fn(x, weight), **close)
    with pytest.raises(NotImplementedError, match="activation is 'relu'"):
        conv.causal_conv1d_ref(x, weight, activation="relu")


@pytest.mark.parametrize("ring", [False, True])
@pytest.mark.parametrize("T", [None, 1, 3])
def test_update_reference(device, T, ring):
    weight, bias = torch.randn(8, 4, device=device), torch.randn(8, device=device)
    x = torch.randn(2, 8, device=device) if T is None else torch.randn(2, 8, T, device=device)
    used = torch.tensor([5, 11], dtype=torch.int32, device=device) if ring else None
    states = [torch.randn(2, 8, 6, device=device)]
    states.append(states[0].clone())
    found = conv.causal_conv1d_update_ref(x, states[0], weight, bias, "silu", used)
    expected = conv.causal_conv1d_update(x, states[1], weight, bias, "silu", used)
    torch.testing.assert_close(found, expected, **close)
    assert torch.equal(states[0], states[1])


def test_varlen_states_reference(device):
    x = torch.randn(9, 5, device=device)
    ends = torch.tensor([0, 2, 2, 9], dtype=torch.int32, device=device)
    for size in (1, 4):
        assert torch.equal(conv.causal_conv1d_varlen_states_ref(x, ends, size), conv.causal_conv1d_varlen_states(x, ends, size))


@pytest.mark.parametrize("silu", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_cpp_functions(device, tensors, silu, last):
    """Equal to the op and its autograd, also for channel-last inputs and a dx inside a larger tensor."""
    x, weight, bias, state = tensors
    if last:
        x = x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    activation = "silu" if silu else None
    expected, final = cotangent.causal_conv1d(x, weight, bias, activation, initial_state=state, return_final_state=True)
    into = torch.empty(2, 8, 3, device=device)
    out = cpp.causal_conv1d_fwd_function(x, weight, bias, None, state, into, silu)
    assert torch.equal(out, expected) and torch.equal(into, final) and not out.requires_grad
    dout, dfinal = torch.randn_like(out), torch.randn_like(final)
    wanted = torch.autograd.grad((expected, final), (x, weight, bias, state), (dout, dfinal))
    both = torch.empty(2, 16, 11, device=device)
    found = cpp.causal_conv1d_bwd_function(x, weight, bias, dout, None, state, dfinal, both[:, 8:], True, silu)
    assert found[0].data_ptr() == both[:, 8:].data_ptr()
    assert all(torch.equal(a, b) for a, b in zip(found, wanted))
    dx, dweight, dbias, dstate = cpp.causal_conv1d_bwd_function(x, weight, None, dout, None, None, None, None, False, silu)
    plain = cotangent.causal_conv1d(x, weight, None, activation)
    assert dbias is None and dstate is None
    assert all(torch.equal(a, b) for a, b in zip((dx, dweight), torch.autograd.grad(plain, (x, weight), dout)))
    idx = torch.tensor([[0] * 4 + [1] * 7] * 2, dtype=torch.int32, device=device)
    out = cpp.causal_conv1d_fwd_function(x, weight, bias, idx, None, None, silu)
    assert torch.equal(out, cotangent.causal_conv1d(x, weight, bias, activation, seq_idx=idx))
    states = [torch.randn(2, 8, 3, device=device)]
    states.append(states[0].clone())
    y = cpp.causal_conv1d_update_function(x[:, :, 0], states[0], weight, bias, silu, None, None)
    with torch.no_grad():
        assert torch.equal(y, cotangent.causal_conv1d_update(x[:, :, 0], states[1], weight, bias, activation))
    assert torch.equal(*states)
    with pytest.raises(ValueError, match="causal_conv1d_fwd_function: .*initial_states"):
        cpp.causal_conv1d_fwd_function(x, weight, bias, None, state[:, :, :1], None, silu)
