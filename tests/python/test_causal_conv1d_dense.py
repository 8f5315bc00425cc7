# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.nn.functional as F
from support import compare

from cotangent import causal_conv1d_dense

pytestmark = pytest.mark.usefixtures("on_cpu")


def formula(x, weight, bias=None, activation=None, initial_state=None):
    """Computes tap by tap, with matrix products."""
    B, Din, T = x.shape
    K = weight.shape[2]
    state = x.new_zeros(B, Din, K - 1) if initial_state is None else initial_state
    xe = torch.cat([state, x], 2)
    z = sum(weight[:, :, k] @ xe[:, :, k : k + T] for k in range(K))
    z = z if bias is None else z + bias[:, None]
    return F.silu(z) if activation else z, xe[:, :, T:]


def inputs(B=2, Din=10, Dout=7, T=21, K=4, dtype=torch.float32, state=False, bias=True):
    def randn(*shape):
        return torch.randn(*shape, dtype=dtype)

    weight = randn(Dout, Din, K) / (Din * K) ** 0.5
    return [randn(B, Din, T), weight, randn(Dout) if bias else None, randn(B, Din, K - 1) if state else None]


def both(activation):
    def op(x, weight, bias, state):
        return causal_conv1d_dense(x, weight, bias, activation, initial_state=state, return_final_state=True)

    def plain(x, weight, bias, state):
        return formula(x, weight, bias, activation, state)

    return op, plain


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("state", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_formula(activation, state, bias):
    compare(*both(activation), inputs(state=state, bias=bias))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("K", [1, 3, 4])
def test_dtypes_and_widths(dtype, K):
    compare(*both("silu"), inputs(K=K, dtype=dtype, state=True))


@pytest.mark.parametrize("B, T", [(0, 3), (1, 0), (1, 1), (3, 65)])
def test_sizes(B, T):
    compare(*both("silu"), inputs(B=B, T=T, state=True))


def test_as_conv1d():
    x, weight, bias, _ = inputs()
    torch.testing.assert_close(causal_conv1d_dense(x, weight, bias), F.conv1d(F.pad(x, (3, 0)), weight, bias))


def test_strides_pass_through():
    x, weight, bias, _ = inputs()
    last = x.transpose(1, 2).contiguous().transpose(1, 2)
    y = causal_conv1d_dense(last, weight, bias)
    assert y.stride(1) == 1
    torch.testing.assert_close(y, causal_conv1d_dense(x, weight, bias))
    compare(*both("silu"), [last[:, :, ::2], weight.flip(2).permute(2, 0, 1).contiguous().permute(1, 2, 0), bias, None])


def test_gradients_in_float64():
    tensors = [t.requires_grad_() for t in inputs(2, 3, 2, 6, 3, torch.float64, state=True)]
    for activation in (None, "silu"):
        op, _ = both(activation)
        assert torch.autograd.gradcheck(op, tensors)


def test_autocast_and_compile():
    x, weight, bias, _ = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        assert causal_conv1d_dense(x, weight, bias, "silu").dtype == torch.bfloat16
    torch.library.opcheck(torch.ops.cotangent.causal_conv1d_dense_forward.default, (x, weight, bias, None, 1, False))


@pytest.mark.parametrize(
    "error, message, change",
    [
        (ValueError, "weight has Din=9, x has Din=10", lambda x, w, b: (x, w[:, :9], b)),
        (ValueError, "bias has Dout=3, weight has Dout=7", lambda x, w, b: (x, w, b[:3])),
        (ValueError, "x has 2 axes, expected 3", lambda x, w, b: (x[0], w, b)),
        (TypeError, "weight has dtype torch.float64, x has torch.float32", lambda x, w, b: (x, w.double(), b)),
    ],
)
def test_errors(error, message, change):
    x, weight, bias, _ = inputs()
    with pytest.raises(error, match=message):
        causal_conv1d_dense(*change(x, weight, bias))
