# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.nn.functional as F
from support import compare

from cotangent import causal_conv1d, causal_conv1d_update


def formula(x, weight, bias=None, activation=None, initial_state=None, number=None):
    """Computes tap by tap. number [B,T+K-1]: the sequence of each column of the padded input; -1: none."""
    B, D, T = x.shape
    K = weight.shape[1]
    state = x.new_zeros(B, D, K - 1) if initial_state is None else initial_state
    xe = torch.cat([state, x], 2)
    z = x.new_zeros(B, D, T) if bias is None else bias[:, None].expand(B, D, T)
    for k in range(K):
        tap = weight[:, k, None] * xe[:, :, k : k + T]
        if number is not None:
            tap = tap * (number[:, None, k : k + T] == number[:, None, K - 1 :])
        z = z + tap
    y = F.silu(z) if activation else z
    if number is not None:
        y = y * (number[:, None, K - 1 :] >= 0)
        last = number[:, -1:]
        xe = xe * ((number == last) & (last >= 0))[:, None]
    return y, xe[:, :, T:]


def inputs(device, B=2, D=10, T=21, K=4, dtype=torch.float32, state=False, bias=True):
    def randn(*shape):
        return torch.randn(*shape, dtype=dtype, device=device)

    return [randn(B, D, T), randn(D, K), randn(D) if bias else None, randn(B, D, K - 1) if state else None]


def both(activation, **options):
    def op(x, weight, bias, state):
        return causal_conv1d(x, weight, bias, activation, initial_state=state, return_final_state=True, **options)

    def plain(x, weight, bias, state):
        return formula(x, weight, bias, activation, state)

    return op, plain


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_formula(device, activation, state, bias):
    compare(*both(activation), inputs(device, state=state, bias=bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("K", [1, 2, 3, 4, 7])
def test_dtypes_and_widths(device, dtype, K):
    compare(*both("silu"), inputs(device, K=K, dtype=dtype, state=True))


def test_dtypes_are_independent(device):
    x, weight, bias, state = inputs(device, state=True)
    compare(*both("silu"), [x.bfloat16(), weight, bias.half(), state.half()], dtype=torch.bfloat16)


@pytest.mark.parametrize("T", [0, 1, 2, 65])
@pytest.mark.parametrize("B", [0, 1, 3])
def test_sizes(device, B, T):
    compare(*both("silu"), inputs(device, B=B, T=T, state=True))


def test_strides_pass_through(device):
    x, weight, bias, _ = inputs(device)
    last = x.transpose(1, 2).contiguous().transpose(1, 2)
    y = causal_conv1d(last, weight, bias)
    assert y.stride() == last.stride()
    torch.testing.assert_close(y, causal_conv1d(x, weight, bias))
    wide = torch.randn(2, 30, 21, device=device)
    compare(*both("silu"), [wide[:, 3:13], weight, bias, None])
    compare(*both("silu"), [wide.transpose(1, 2).contiguous().transpose(1, 2)[:, 3:13], weight, bias, None])
    compare(*both(None), [x[:, :, ::2], weight.flip(1).t().contiguous().t(), bias, None])


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("state", [False, True])
def test_seq_idx(device, activation, state):
    x, weight, bias, initial = inputs(device, state=state)
    seq_idx = torch.tensor([[0] * 5 + [1] * 9 + [3] * 7, [2] * 2 + [-1] * 3 + [4] * 16], dtype=torch.int32, device=device)
    number = torch.cat([seq_idx[:, :1].expand(2, 3), seq_idx], 1)
    op, _ = both(activation, seq_idx=seq_idx)
    compare(op, lambda x, w, b, s: formula(x, w, b, activation, s, number), [x, weight, bias, initial])


@pytest.mark.parametrize("state", [False, True])
def test_cu_seqlens(device, state):
    x, weight, bias, _ = inputs(device, B=1)
    ends = [0, 6, 6, 15, 21]
    states = torch.randn(4, 10, 3, device=device) if state else None

    def plain(x, weight, bias, states):
        parts = [formula(x[:, :, a:b], weight, bias, "silu", None if states is None else states[n : n + 1])
                 for n, (a, b) in enumerate(zip(ends, ends[1:]))]  # fmt: skip
        return torch.cat([y for y, _ in parts], 2), torch.cat([s for _, s in parts])

    op, _ = both("silu", cu_seqlens=torch.tensor(ends, dtype=torch.int32, device=device))
    compare(op, plain, [x, weight, bias, states])


def test_gradients_in_float64(on_cpu):
    x, weight, bias, state = [t.requires_grad_() for t in inputs("cpu", 2, 3, 6, 3, torch.float64, state=True)]
    seq_idx = torch.tensor([[0, 0, 1, 1, 1, 1], [0, -1, 2, 2, 2, 3]], dtype=torch.int32)
    for options in ({}, {"seq_idx": seq_idx}):
        for activation in (None, "silu"):
            assert torch.autograd.gradcheck(
                lambda x, w, b, s: causal_conv1d(x, w, b, activation, initial_state=s, return_final_state=True, **options),
                (x, weight, bias, state),
            )


def test_update_continues_the_sequence(device):
    x, weight, bias, _ = inputs(device, B=3, T=12)
    whole = causal_conv1d(x, weight, bias, "silu")
    state = torch.zeros(5, 10, 6, device=device)
    rows = torch.tensor([4, 0, 2], dtype=torch.int32, device=device)
    parts = [causal_conv1d_update(x[:, :, :5], state, weight, bias, "silu", conv_state_indices=rows)]
    parts += [causal_conv1d_update(x[:, :, t], state, weight, bias, "silu", conv_state_indices=rows)[:, :, None]
              for t in range(5, 12)]  # fmt: skip
    torch.testing.assert_close(torch.cat(parts, 2), whole)
    torch.testing.assert_close(state[rows.long()], x[:, :, -6:])
    assert (state[[1, 3]] == 0).all()
    ring = torch.zeros(3, 10, 4, device=device)
    for t in range(12):
        at = torch.full((3,), t, dtype=torch.int32, device=device)
        y = causal_conv1d_update(x[:, :, t], ring, weight, bias, "silu", cache_seqlens=at)
        torch.testing.assert_close(y, whole[:, :, t])
    skipped = causal_conv1d_update(x[:, :, 0], ring, weight, conv_state_indices=-rows - 1)
    assert (skipped == 0).all()


@pytest.mark.parametrize(
    "error, message, change",
    [
        (ValueError, "causal_conv1d: activation is 'tanh', expected None or one of silu, swish$", dict(activation="tanh")),
        (ValueError, "activation is 'gelu_erf'", dict(activation="gelu_erf")),
        (ValueError, "weight has D=9", dict(weight=torch.zeros(9, 4))),
        (ValueError, "initial_state", dict(initial_state=torch.zeros(2, 10, 4))),
        (ValueError, "bias", dict(bias=torch.zeros(11))),
        (ValueError, "weight has 1 axis", dict(weight=torch.zeros(10), return_final_state=True)),
        (ValueError, "weight", dict(weight=torch.zeros(10, 0), return_final_state=True)),
        (TypeError, "seq_idx has dtype torch.int64", dict(seq_idx=torch.zeros(2, 21, dtype=torch.int64))),
        (TypeError, "weight has dtype torch.complex64", dict(weight=torch.zeros(10, 4, dtype=torch.complex64))),
        (ValueError, "x has 2 axes", dict(x=torch.zeros(10, 21))),
        (ValueError, "x has 7 axes", dict(x=torch.zeros(1, 1, 1, 1, 1, 1, 1))),
        (ValueError, "cu_seqlens", dict(cu_seqlens=torch.tensor([0, 21], dtype=torch.int32))),
    ],
)
def test_errors_name_the_argument(device, error, message, change):
    x, weight, bias, _ = inputs(device)
    arguments = dict(x=x, weight=weight, bias=bias)
    arguments.update({k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in change.items()})
    with pytest.raises(error, match=message):
        causal_conv1d(**arguments)


def test_index_data_out_of_order(on_cpu):
    x, weight, bias, _ = inputs("cpu", B=1)
    with pytest.raises(ValueError, match=r"cu_seqlens\[2\] is 3, less than 9 before it"):
        causal_conv1d(x, weight, bias, cu_seqlens=torch.tensor([0, 9, 3], dtype=torch.int32))
    with pytest.raises(ValueError, match="conv_state_indices"):
        causal_conv1d_update(x[:, :, 0], torch.zeros(2, 10, 3), weight, conv_state_indices=torch.tensor([2], dtype=torch.int32))


def test_update_counts_as_a_change_in_place(device):
    state = torch.zeros(2, 8, 3, device=device)
    x, weight = torch.randn(2, 8, device=device), torch.randn(8, 4, device=device)
    factor = torch.randn(2, 8, 3, device=device, requires_grad=True)
    for update in (causal_conv1d_update, lambda *a: torch.ops.cotangent.causal_conv1d_update(*a, None, None, None, 0)):
        y = (factor * state).sum()
        update(x, state, weight)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()
    with pytest.raises(RuntimeError, match="a leaf that requires a gradient"):
        causal_conv1d_update(x, state.requires_grad_(), weight)
