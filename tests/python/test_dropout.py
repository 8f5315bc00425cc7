# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.nn.functional as F
from support import compare

from cotangent import dropout, dropout_scale

ACTIVATIONS = {
    None: lambda z: z,
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_erf": F.gelu,
    "swish": F.silu,
    "gelu_tanh": lambda z: F.gelu(z, approximate="tanh"),
}


def mask_of(p, seed, shape, device, offset=0):
    _, m = dropout(torch.ones(shape, device=device), p, seed=seed, offset=offset, return_mask="bytes")
    return m


def inputs(device, dtype=torch.float32, shape=(3, 5, 37)):
    return [torch.randn(s, dtype=dtype, device=device) for s in (shape, shape[-1:], shape)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_formula(device, activation, dtype):
    m = mask_of(0.3, 7, (3, 5, 37), device)

    def plain(x, bias, residual):
        return dropout_scale(0.3) * m * ACTIVATIONS[activation](x + bias) + residual

    compare(lambda x, b, r: dropout(x, 0.3, bias=b, activation=activation, residual=r, seed=7), plain,
            inputs(device, dtype))  # fmt: skip


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
def test_any_subset(device, bias, residual):
    x, b, r = inputs(device)
    m = mask_of(0.5, 1, x.shape, device)
    compare(
        lambda x, b, r: dropout(x, 0.5, bias=b, residual=r, seed=1),
        lambda x, b, r: dropout_scale(0.5) * m * (x if b is None else x + b) + (0 if r is None else r),
        [x, b if bias else None, r if residual else None],
    )


def test_given_and_exported_masks(device):
    x, _, _ = inputs(device)
    m = torch.rand(x.shape, device=device) < 0.6
    expected = x * m / 0.6
    torch.testing.assert_close(dropout(x, 0.4, mask=m), expected)
    torch.testing.assert_close(dropout(x, 0.4, mask=m.to(torch.uint8)), expected)
    y, drawn = dropout(x, 0.4, seed=9, return_mask="bytes")
    same, bits = dropout(x, 0.4, seed=9, return_mask="bits")
    assert torch.equal(y, same) and bits.shape == (3, 5, 5)
    unpacked = (bits[..., None] >> torch.arange(8, device=device)) & 1
    assert torch.equal(unpacked.flatten(-2)[..., :37].to(torch.uint8), drawn)
    assert torch.equal(dropout(x, 0.4, mask_bits=bits, scale=dropout_scale(0.4)), y)
    compare(lambda x: dropout(x, 0.4, mask_bits=bits, activation="silu"), lambda x: F.silu(x) * drawn / 0.6, [x])


@pytest.mark.parametrize("given", [{}, {"mask": True}, {"return_mask": "bytes"}])
def test_scale_0_is_0(device, given):
    x, b, r = (t.requires_grad_() for t in inputs(device))
    m = torch.rand(x.shape, device=device) < 0.6
    given = {**given, "mask": m} if "mask" in given else given
    y = dropout(x, 0.4, bias=b, activation="silu", residual=r, scale=0.0, seed=9, **given)
    if "return_mask" in given:
        y, kept = y
        assert torch.equal(kept, dropout(x, 0.4, seed=9, return_mask="bytes")[1])
    assert torch.equal(y, r)
    dx, db, dr = torch.autograd.grad(y.sum(), (x, b, r))
    assert (dx == 0).all() and (db == 0).all() and (dr == 1).all()
    assert (dropout(x, 0.4, scale=0.0) == 0).all() and (dropout(x, 0.0, scale=0) == 0).all()
    with pytest.raises(ValueError, match="p is 1.5"):
        dropout(x, 1.5, scale=0.0)
    with pytest.raises(ValueError, match="mask"):
        dropout(x, 0.5, scale=0.0, mask=m[:1])


@pytest.mark.parametrize("scale", [None, 0.0, 3.0])
def test_evaluation_scales_and_drops_nothing(device, scale):
    x, b, r = (t.requires_grad_() for t in inputs(device))
    none = torch.zeros(x.shape, device=device, dtype=torch.uint8)
    for masks in ({}, {"mask": none}, {"mask_bits": none[..., :5]}):
        y = dropout(x, 0.9, False, bias=b, activation="relu", residual=r, scale=scale, **masks)
        torch.testing.assert_close(y, F.relu(x + b) + r)
        found = torch.autograd.grad(y.sum(), (x, b, r))
        expected = torch.autograd.grad((F.relu(x + b) + r).sum(), (x, b, r))
        for a, e in zip(found, expected):
            torch.testing.assert_close(a, e)


def test_dropout_scale():
    assert dropout_scale(0.5) == 2 and dropout_scale(1.0) == 0
    with pytest.raises(ValueError, match="p is 1.5, expected 0 to 1"):
        dropout_scale(1.5)


def test_seeds(device):
    x = torch.ones(64, 64, device=device)
    torch.manual_seed(5)
    first, second = dropout(x, 0.5), dropout(x, 0.5)
    torch.manual_seed(5)
    again = dropout(x, 0.5)
    assert torch.equal(first, again) and not torch.equal(first, second)
    assert not torch.equal(dropout(x, 0.5, seed=1), dropout(x, 0.5, seed=1, offset=1))
    words = torch.tensor([3, 0], dtype=torch.int32, device=device)
    assert torch.equal(dropout(x, 0.5, seed=1, offset_tensor=words), dropout(x, 0.5, seed=1, offset=3))
    assert torch.equal(dropout(x, 0.5, seed_tensor=words), dropout(x, 0.5, seed=3))
    assert torch.equal(dropout(x, 0.9, training=False), x) and torch.equal(dropout(x, 0.0), x)
    assert (dropout(x, 1.0, residual=2 * x) == 2).all()
    share = dropout(torch.ones(1000, 1000, device=device), 0.25).mean().item()
    assert abs(share - 1) < 5 * (0.25 / 0.75 / 1e6) ** 0.5


@pytest.mark.parametrize("seed", [2**63, 2**64 - 1])
def test_seeds_of_64_bits(device, seed):
    """torch.initial_seed() returns such numbers. The op's schema has signed numbers."""
    x = torch.ones(64, device=device)
    y = dropout(x, 0.5, seed=seed)
    assert torch.equal(y, dropout(x, 0.5, seed=seed - 2**64))
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert torch.equal(y, dropout(x, 0.5, seed=seed))


def test_backward_draws_the_same_mask(device):
    x = torch.randn(33, 65, device=device, requires_grad=True)
    y = dropout(x, 0.5)
    y.sum().backward()
    assert torch.equal(x.grad != 0, y != 0)


def test_residual_of_another_dtype_adds_as_in_pytorch(device):
    x, _, r = inputs(device)
    y = dropout(x.bfloat16(), 0.5, seed=3, residual=r)
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, dropout(x.bfloat16().float(), 0.5, seed=3, residual=r))


def test_keeps_no_input_that_the_backward_does_without(device):
    x = torch.randn(8, 8, device=device, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        dropout(x * 1, 0.5, seed=1)
        assert (8, 8) not in saved
        dropout(x * 1, 0.5, seed=1, activation="relu")
        assert (8, 8) in saved


def test_gradients_in_float64(on_cpu):
    tensors = [t.requires_grad_() for t in inputs("cpu", torch.float64, (2, 3, 5))]
    for activation in ACTIVATIONS:
        assert torch.autograd.gradcheck(
            lambda x, b, r: dropout(x, 0.3, bias=b, activation=activation, residual=r, seed=2), tensors
        )


@pytest.mark.parametrize(
    "error, message, change",
    [
        (ValueError, "p is 1.5", dict(p=1.5)),
        (ValueError, "p is nan", dict(p=float("nan"))),
        (ValueError, "dropout: activation is 'tanh', expected None or one of silu, relu, gelu_tanh, gelu, swish, gelu_erf$",
         dict(activation="tanh")),
        (TypeError, "dropout: activation is 2", dict(activation=2)),
        (ValueError, "return_mask is 'mask'", dict(return_mask="mask")),
        (ValueError, "bias", dict(bias=torch.zeros(36))),
        (ValueError, "residual", dict(residual=torch.zeros(3, 5, 36))),
        (ValueError, "mask", dict(mask=torch.zeros(3, 5, 36, dtype=torch.uint8))),
        (TypeError, "mask has dtype", dict(mask=torch.zeros(3, 5, 37))),
        (ValueError, "mask", dict(mask=torch.zeros(3, 5, 37).bool(), mask_bits=torch.zeros(3, 5, 5).byte())),
        (ValueError, "seed_tensor", dict(seed_tensor=torch.zeros(3, dtype=torch.int32))),
        (ValueError, "scale", dict(scale=-1.0)),
    ],
)
def test_errors_name_the_argument(device, error, message, change):
    arguments = dict(x=torch.zeros(3, 5, 37, device=device), p=0.5)
    arguments.update({k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in change.items()})
    with pytest.raises(error, match=message):
        dropout(**arguments)
