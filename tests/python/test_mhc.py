# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from support import compare

from cotangent import mhc_post, mhc_post_pre, mhc_pre, mhc_sinkhorn


def plain_sinkhorn(h_res_logits, iterations=20, eps=1e-6):
    h_res = torch.softmax(h_res_logits, -1) + eps
    h_res = h_res / (h_res.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        h_res = h_res / (h_res.sum(-1, keepdim=True) + eps)
        h_res = h_res / (h_res.sum(-2, keepdim=True) + eps)
    return h_res


def plain_pre(x, phi, alpha, bias, gamma=None, sinkhorn=True, norm_eps=1e-6, hc_eps=1e-6, post_scale=2.0):
    B, T, n, D = x.shape
    flat = x.reshape(B, T, n * D)
    inv_rms = torch.rsqrt(flat.square().mean(-1, keepdim=True) + norm_eps)
    weights = phi if gamma is None else phi * gamma.reshape(-1)
    sizes = [n, n, n * n]
    parts = (flat @ weights.t() * inv_rms).split(sizes, -1)
    z_pre, z_post, z_res = (a * u + b for a, u, b in zip(alpha, parts, bias.split(sizes)))
    h_in = ((torch.sigmoid(z_pre) + hc_eps)[..., None] * x).sum(2)
    h_res_logits = z_res.reshape(B, T, n, n)
    return h_in, post_scale * torch.sigmoid(z_post), plain_sinkhorn(h_res_logits) if sinkhorn else h_res_logits


def plain_post(x, f, h_post, h_res):
    return h_post[..., None] * f[:, :, None] + h_res.transpose(-1, -2) @ x


def pre_inputs(device, n=4, D=24, dtype=torch.float32, gamma=True, B=2, T=5):
    M = n * n + 2 * n
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def randn(*shape, dtype=wide):
        return torch.randn(*shape, dtype=dtype, device=device)

    return [randn(B, T, n, D, dtype=dtype), randn(M, n * D) / (n * D) ** 0.5, randn(3), randn(M),
            randn(n, D) if gamma else None]  # fmt: skip


def post_inputs(device, n=4, D=24, dtype=torch.float32, B=2, T=5):
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x, f = torch.randn(B, T, n, D, dtype=dtype, device=device), torch.randn(B, T, D, dtype=dtype, device=device)
    return [x, f, torch.rand(B, T, n, dtype=wide, device=device), torch.rand(B, T, n, n, dtype=wide, device=device)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_pre(device, n, dtype):
    compare(mhc_pre, plain_pre, pre_inputs(device, n, dtype=dtype), units=16)
    compare(lambda *a: mhc_pre(*a, sinkhorn=False), lambda *a: plain_pre(*a, sinkhorn=False),
            pre_inputs(device, n, dtype=dtype, gamma=False), units=16)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_post(device, n, dtype):
    compare(mhc_post, plain_post, post_inputs(device, n, dtype=dtype), units=16)


def plain_post_pre(x, f, h_post, h_res, phi, alpha, bias, gamma=None, **options):
    y = plain_post(x, f, h_post, h_res)
    return (y, *plain_pre(y, phi, alpha, bias, gamma, **options))


def post_pre_inputs(device, n=4, D=24, dtype=torch.float32, gamma=True, B=2, T=5):
    return [*post_inputs(device, n, D, dtype, B, T), *pre_inputs(device, n, D, dtype, gamma, B, T)[1:]]


def exact(inputs):
    """The inputs with x, f, h_post and A such that y is exact in 16 bits. Otherwise the reference, which does not round y,
    would differ from a rounded y."""
    x, f, h_post, h_res, *others = inputs
    return [(x * 2).round().clamp(-3, 3) / 2, (f * 2).round().clamp(-3, 3) / 2, (h_post * 2).round() / 2, h_res.round(), *others]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [1, 2, 4, 8])
def test_post_pre(device, n, dtype):
    # n = 1: the 10 terms of dalpha cancel to 1/14 of the norm of their absolute values. So 64 units of the sum are 5 of the
    # terms.
    compare(mhc_post_pre, plain_post_pre, exact(post_pre_inputs(device, n, dtype=dtype)), units=64 if n == 1 else 16)
    compare(lambda *a: mhc_post_pre(*a, sinkhorn=False), lambda *a: plain_post_pre(*a, sinkhorn=False),
            exact(post_pre_inputs(device, n, dtype=dtype, gamma=False)), units=16)  # fmt: skip


def test_post_pre_is_post_and_pre(device):
    """The forward gives the same bits, also where y is rounded."""
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [t.requires_grad_() for t in post_pre_inputs(device, dtype=dtype)]
        same = [t.detach().clone().requires_grad_() for t in inputs]
        results = mhc_post_pre(*inputs, norm_eps=0.5, hc_eps=0.25, post_scale=3.0, sinkhorn_iterations=3)
        y = mhc_post(*same[:4])
        expected = y, *mhc_pre(y, *same[4:], norm_eps=0.5, hc_eps=0.25, post_scale=3.0, sinkhorn_iterations=3)
        assert all(torch.equal(a, b) for a, b in zip(results, expected))
        for outputs in (results, expected):
            sum((t.float() * t.float()).sum() for t in outputs).backward()
        for a, b in zip(inputs, same):
            difference = (a.grad.float() - b.grad.float()).norm() / b.grad.float().norm()
            assert difference <= (1e-6 if dtype == torch.float32 else 1e-2)  # only the two calls round the gradient of y


def test_post_pre_options(device):
    options = dict(norm_eps=0.5, hc_eps=0.25, post_scale=3.0)
    compare(lambda *a: mhc_post_pre(*a, **options), lambda *a: plain_post_pre(*a, **options), post_pre_inputs(device), units=16)
    compare(lambda x, f, h, h_res, *a: mhc_post_pre(x, f, h, h_res, *a, h_res_is_out_in=True),
            lambda x, f, h, h_res, *a: plain_post_pre(x, f, h, h_res.transpose(-1, -2), *a), post_pre_inputs(device), units=16)  # fmt: skip
    for B, T in ((0, 3), (2, 0)):
        compare(mhc_post_pre, plain_post_pre, post_pre_inputs(device, B=B, T=T), units=16)


def test_post_pre_without_some_gradients(device):
    """A layer that uses only h_in, and frozen parameters."""
    inputs = post_pre_inputs(device)
    x = inputs[0].requires_grad_()
    mhc_post_pre(*inputs)[1].square().sum().backward()
    x_again = x.detach().clone().requires_grad_()
    y = mhc_post(x_again, *inputs[1:4])
    mhc_pre(y, *inputs[4:])[0].square().sum().backward()
    torch.testing.assert_close(x.grad, x_again.grad)


def test_post_pre_gradients_in_float64(on_cpu):
    tensors = [t.requires_grad_() for t in post_pre_inputs("cpu", 2, 3, torch.float64, B=1, T=2)]
    for sinkhorn in (True, False):
        assert torch.autograd.gradcheck(lambda *a: mhc_post_pre(*a, sinkhorn=sinkhorn, sinkhorn_iterations=3), tensors)


def test_post_stored_the_other_way(device):
    compare(lambda x, f, h, h_res: mhc_post(x, f, h, h_res, h_res_is_out_in=True),
            lambda x, f, h, h_res: plain_post(x, f, h, h_res.transpose(-1, -2)), post_inputs(device), units=16)  # fmt: skip


def test_sinkhorn(device):
    compare(mhc_sinkhorn, plain_sinkhorn, [torch.randn(2, 5, 4, 4, device=device)], units=64)
    h_res = mhc_sinkhorn(torch.randn(1, 3, 6, 6, device=device), 50)
    torch.testing.assert_close(h_res.sum(-1), torch.ones(1, 3, 6, device=device), atol=1e-3, rtol=0)


def test_options(device):
    options = dict(norm_eps=0.5, hc_eps=0.25, post_scale=3.0)
    compare(lambda *a: mhc_pre(*a, **options), lambda *a: plain_pre(*a, **options), pre_inputs(device), units=16)


def test_strides_and_sizes(device):
    x, *others = pre_inputs(device)
    compare(mhc_pre, plain_pre, [x.transpose(1, 2).contiguous().transpose(1, 2), *others], units=16)
    for B, T in ((0, 3), (2, 0)):
        compare(mhc_pre, plain_pre, pre_inputs(device, B=B, T=T), units=16)
        compare(mhc_post, plain_post, post_inputs(device, B=B, T=T), units=16)


def test_parameters_of_other_dtypes_are_cast(device):
    x, *parameters = pre_inputs(device, dtype=torch.bfloat16)
    low = [p.bfloat16().requires_grad_() for p in parameters]
    h_in, *_ = mhc_pre(x, *low)
    torch.testing.assert_close(h_in, mhc_pre(x, *[p.float() for p in low])[0])
    h_in.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.bfloat16 for p in low)


@pytest.mark.parametrize("of_x, of_f", [(torch.bfloat16, torch.float32), (torch.float32, torch.float16)])
def test_post_casts_f(device, of_x, of_f):
    """A layer under autocast returns another dtype than that of the streams. Its gradient has the dtype of the
    layer."""
    x, f, h_post, h_res = post_inputs(device)
    x, f = x.to(of_x), f.to(of_f).requires_grad_()
    y = mhc_post(x, f, h_post, h_res)
    assert y.dtype == of_x and torch.equal(y, mhc_post(x, f.to(of_x), h_post, h_res))
    y.float().square().sum().backward()
    same = f.detach().to(of_x).requires_grad_()
    mhc_post(x, same, h_post, h_res).float().square().sum().backward()
    assert f.grad.dtype == of_f and torch.equal(f.grad, same.grad.to(of_f))


def test_gradients_in_float64(on_cpu):
    def block(x, phi, alpha, bias, gamma, weight, fused):
        h_in, h_post, h_res = mhc_pre(x, phi, alpha, bias, gamma, sinkhorn=fused, sinkhorn_iterations=20 if fused else 1)
        return mhc_post(x, h_in * weight, h_post, h_res if fused else mhc_sinkhorn(h_res, 3))

    tensors = [t.requires_grad_() for t in pre_inputs("cpu", 2, 3, torch.float64, B=1, T=2)]
    tensors.append(torch.randn(3, dtype=torch.float64, requires_grad=True))
    for fused in (True, False):
        assert torch.autograd.gradcheck(lambda *a: block(*a, fused), tensors)


@pytest.mark.parametrize(
    "error, message, change",
    [
        (ValueError, "x has 3 axes", dict(x=torch.zeros(2, 5, 24))),
        (ValueError, "phi has 0 axes", dict(phi=torch.zeros(()))),
        (ValueError, "phi", dict(phi=torch.zeros(24, 95))),
        (ValueError, "alpha", dict(alpha=torch.zeros(2))),
        (ValueError, "bias", dict(bias=torch.zeros(23))),
        (ValueError, "gamma", dict(gamma=torch.zeros(4, 25))),
        (ValueError, "sinkhorn_iterations is 0", dict(sinkhorn_iterations=0)),
        (ValueError, "post_scale is -1", dict(post_scale=-1.0)),
    ],
)
def test_errors_name_the_argument(device, error, message, change):
    arguments = dict(zip(("x", "phi", "alpha", "bias", "gamma"), pre_inputs(device)))
    arguments.update({k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in change.items()})
    with pytest.raises(error, match=message):
        mhc_pre(**arguments)


def test_errors_of_post_pre(device):
    inputs = post_pre_inputs(device)
    with pytest.raises(ValueError, match="f has D=23"):
        mhc_post_pre(inputs[0], inputs[1][..., :23], *inputs[2:])
    with pytest.raises(ValueError, match="sinkhorn_iterations is 0"):
        mhc_post_pre(*inputs, sinkhorn_iterations=0)
    with pytest.raises(TypeError, match="sinkhorn is"):
        mhc_post_pre(*inputs, sinkhorn=None)


def test_errors_of_post_and_sinkhorn(device):
    x, f, h_post, h_res = post_inputs(device)
    with pytest.raises(ValueError, match="f has D=23"):
        mhc_post(x, f[..., :23], h_post, h_res)
    with pytest.raises(TypeError, match="h_post has dtype"):
        mhc_post(x, f, h_post.half(), h_res)
    with pytest.raises(ValueError, match="iterations is 5000"):
        mhc_sinkhorn(h_res, 5000)
