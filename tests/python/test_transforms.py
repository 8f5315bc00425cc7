# SPDX-License-Identifier: Apache-2.0
"""torch.func: forward mode, grad, vmap and their combinations."""
import warnings

import pytest
import torch
from support import close
from test_causal_conv1d import formula as plain_conv
from test_causal_conv1d_dense import formula as plain_dense
from test_mhc import plain_post
from test_torch import has_attention, randn
from torch.autograd import forward_ad
from torch.func import grad, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode

import cotangent
from cotangent import attention, causal_conv1d, causal_conv1d_dense, causal_conv1d_update, dropout
from cotangent import mhc_post, mhc_post_pre, mhc_pre, mhc_sinkhorn


def indices(device, *values):
    return torch.tensor(values, dtype=torch.int32, device=device)


def linear_cases(device):
    """Functions with a forward-mode derivative: (name, function, its formula in plain torch, inputs)."""

    def f(*shape):
        return randn(device, *shape)

    x, weight, bias, state = f(2, 6, 9), f(6, 4), f(6), f(2, 6, 3)
    parts = torch.tensor([[0] * 4 + [-1] * 2 + [1] * 3, [0] * 9], dtype=torch.int32, device=device)
    number = torch.cat([parts[:, :1].expand(2, 3), parts], 1)
    for activation in (None, "silu"):
        yield (
            f"causal_conv1d {activation}",
            lambda x, w, b, s: causal_conv1d(x, w, b, activation, initial_state=s, return_final_state=True),
            lambda x, w, b, s: plain_conv(x, w, b, activation, s),
            (x, weight, bias, state),
        )
        yield (
            f"causal_conv1d seq_idx {activation}",
            lambda x, w, b, s: causal_conv1d(x, w, b, activation, initial_state=s, seq_idx=parts),
            lambda x, w, b, s: plain_conv(x, w, b, activation, s, number)[0],
            (x, weight, bias, state),
        )
        if device.type == "cpu":
            yield (
                f"causal_conv1d_dense {activation}",
                lambda x, w, b, s: causal_conv1d_dense(x, w, b, activation, initial_state=s, return_final_state=True),
                lambda x, w, b, s: plain_dense(x, w, b, activation, s),
                (x, f(5, 6, 4), f(5), state),
            )
    ones = torch.ones(4, 10, device=device)
    _, kept = dropout(ones, 0.4, seed=3, return_mask="bytes")
    for activation in (None, "gelu"):
        act = torch.nn.functional.gelu if activation else lambda z: z
        yield (
            f"dropout {activation}",
            lambda x, b, r: dropout(x, 0.4, bias=b, activation=activation, residual=r, seed=3),
            lambda x, b, r: cotangent.dropout_scale(0.4) * kept * act(x + b) + r,
            (f(4, 10), f(10), f(4, 10)),
        )
    yield "mhc_post", mhc_post, plain_post, (f(2, 3, 4, 8), f(2, 3, 8), f(2, 3, 4), f(2, 3, 4, 4))


def other_cases(device):
    """Functions without a forward-mode derivative: (name, function, inputs)."""

    def f(*shape):
        return randn(device, *shape)

    yield "mhc_pre", mhc_pre, (f(2, 3, 4, 8), f(24, 32), f(3), f(24), f(4, 8))
    yield "mhc_post_pre", mhc_post_pre, (
        f(2, 3, 4, 8), f(2, 3, 8), f(2, 3, 4), f(2, 3, 4, 4), f(24, 32), f(3), f(24), f(4, 8)
    )  # fmt: skip
    yield "mhc_sinkhorn", mhc_sinkhorn, (f(2, 3, 4, 4),)
    if has_attention(device):
        yield "attention", lambda q, k, v, s: attention(q, k, v, sink=s, causal=True, return_lse=True), (
            f(2, 5, 4, 8), f(2, 7, 2, 8), f(2, 7, 2, 8), f(4)
        )  # fmt: skip
        yield "attention attn_bias", lambda q, k, v, b: attention(q, k, v, attn_bias=b), (
            f(2, 5, 4, 8), f(2, 7, 2, 8), f(2, 7, 2, 8), f(2, 1, 5, 7)
        )  # fmt: skip


def as_tuple(results):
    return results if isinstance(results, tuple) else (results,)


# ---- forward mode --------------------------------------------------------------------------------------------


def test_forward_mode_has_the_formulas_tangents(device):
    for name, op, formula, inputs in linear_cases(device):
        for chosen in (range(len(inputs)), *([i] for i in range(len(inputs)))):
            tangents = tuple(torch.randn_like(t) if i in chosen else torch.zeros_like(t) for i, t in enumerate(inputs))

            def some(function, given):
                given = list(given)

                def of_chosen(*values):
                    mixed = list(given)
                    for i, value in zip(chosen, values):
                        mixed[i] = value
                    return function(*mixed)

                return of_chosen

            primals = tuple(inputs[i] for i in chosen)
            found = jvp(some(op, inputs), primals, tuple(tangents[i] for i in chosen))
            wide = [t.double() for t in inputs]
            expected = jvp(some(formula, wide), tuple(wide[i] for i in chosen), tuple(tangents[i].double() for i in chosen))
            for what, ours, theirs in zip(("results", "tangents"), found, expected):
                for i, (a, b) in enumerate(zip(as_tuple(ours), as_tuple(theirs))):
                    close(a, b, f"{name}, inputs {list(chosen)}: {what} {i}", torch.float32, 16)


def test_forward_mode_through_every_door(device):
    x, weight = randn(device, 2, 6, 9), randn(device, 6, 4)

    def f(x):
        return causal_conv1d(x, weight, None, "silu")

    expected = jvp(lambda x: plain_conv(x, weight, None, "silu")[0], (x,), (x,))[1]
    with forward_ad.dual_level():
        dual = forward_ad.unpack_dual(f(forward_ad.make_dual(x, x)))
    torch.testing.assert_close(dual.primal, f(x))
    torch.testing.assert_close(dual.tangent, expected, rtol=1e-4, atol=1e-4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(linearize(f, x)[1](x), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(jacfwd(f)(x), jacrev(f)(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(vmap(lambda t: jvp(f, (x,), (t,))[1])(torch.stack([x, -x]))[1], -expected, rtol=1e-4, atol=1e-4)
    leaf = x.clone().requires_grad_()  # and reverse mode through the tangent
    jvp(f, (leaf,), (x,))[0].sum().backward()
    torch.testing.assert_close(leaf.grad, grad(lambda x: f(x).sum())(x))


def test_numerical_derivatives(on_cpu, device):
    """Compares with finite differences in float64. Tangents and gradients are also computed by vmap."""
    for name, op, _, inputs in linear_cases(device):
        wide = [t.double().requires_grad_() for t in inputs]
        assert torch.autograd.gradcheck(
            op, wide, check_forward_ad=True, check_batched_grad=True, check_batched_forward_grad=True, fast_mode=True
        ), name


def test_reverse_mode_over_forward_mode(device):
    x, weight, direction = randn(device, 2, 6, 9), randn(device, 6, 4), randn(device, 2, 6, 9)

    def through(convolution):
        return grad(lambda x, w: jvp(lambda x: convolution(x, w), (x,), (direction,))[1].square().sum(), (0, 1))(x, weight)

    found = through(lambda x, w: causal_conv1d(x, w, None, "silu"))
    for a, b in zip(found, through(lambda x, w: plain_conv(x, w, None, "silu")[0])):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-3)


def test_forward_mode_in_compiled_code(device):
    x, weight = randn(device, 2, 6, 9), randn(device, 6, 4)

    def f(x):
        return causal_conv1d(x, weight, None, "silu")

    def dual(x, t):
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(f(forward_ad.make_dual(x, t))).tangent

    expected = dual(x, x)
    for function in (dual, lambda x, t: jvp(f, (x,), (t,))[1]):
        compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
        torch.testing.assert_close(compiled(x, x), expected)


def test_forward_mode_is_refused_by_name_elsewhere(device):
    for name, op, inputs in other_cases(device):
        for i in range(len(inputs)):
            tangent = torch.ones_like(inputs[i])
            with pytest.raises(NotImplementedError, match=f"cotangent::{name.split()[0]}_forward has no forward-mode"):
                jvp(lambda t: op(*inputs[:i], t, *inputs[i + 1 :]), (inputs[i],), (tangent,))
    x, weight = randn(device, 2, 6, 9), randn(device, 6, 4)
    with pytest.raises(NotImplementedError, match="causal_conv1d_update has no forward-mode"):
        jvp(lambda x: causal_conv1d_update(x, torch.zeros(2, 6, 3, device=device), weight), (x,), (x,))
    with pytest.raises(NotImplementedError, match="causal_conv1d_backward has no forward-mode"):
        jvp(grad(lambda x: causal_conv1d(x, weight, None, "silu").sum()), (x,), (x,))


# ---- reverse mode --------------------------------------------------------------------------------------------


def every_case(device):
    for name, op, _, inputs in linear_cases(device):
        yield name, op, inputs
    yield from other_cases(device)


def loss(op):
    def value(*inputs):
        return sum(r.square().sum() for r in as_tuple(op(*inputs)))

    return value


def test_grad_agrees_with_autograd(device):
    for name, op, inputs in every_case(device):
        every = tuple(range(len(inputs)))
        found = grad(loss(op), argnums=every)(*inputs)
        leaves = [t.clone().requires_grad_() for t in inputs]
        expected = torch.autograd.grad(loss(op)(*leaves), leaves)
        for a, b in zip(found, expected):
            assert torch.equal(a, b), name
        results, pull = vjp(op, *inputs)
        ones = torch.ones_like(results) if isinstance(results, torch.Tensor) else tuple(map(torch.ones_like, results))
        assert all(t.shape == g.shape for t, g in zip(inputs, pull(ones)))
        with torch.no_grad():
            assert torch.equal(grad(loss(op))(*inputs), found[0]), name  # torch.func.grad turns gradients on


def test_second_derivatives_are_refused_inside_transforms(device):
    x, weight = randn(device, 2, 6, 9), randn(device, 6, 4)
    inner = grad(lambda x: causal_conv1d(x, weight, None, "silu").sum())
    with pytest.raises(NotImplementedError, match="causal_conv1d_backward has no gradient of its own"):
        grad(lambda x: inner(x).sum())(x)


# ---- vmap ----------------------------------------------------------------------------------------------------


def mapped_inputs(inputs, chosen, count=3):
    """The inputs and in_dims. The chosen inputs get an axis of `count` samples at some position."""
    dims = tuple((i % 2 if t.dim() else 0) if i in chosen else None for i, t in enumerate(inputs))
    many = [
        torch.stack([torch.randn_like(t) for _ in range(count)], d) if d is not None else t for t, d in zip(inputs, dims)
    ]
    return many, dims


def sample(many, dims, n):
    return [t if d is None else t.select(d, n) for t, d in zip(many, dims)]


@pytest.mark.filterwarnings("error")
def test_vmap_agrees_with_a_loop(device):
    for name, op, inputs in every_case(device):
        for chosen in (range(len(inputs)), *([i] for i in range(len(inputs)))):
            many, dims = mapped_inputs(inputs, chosen)
            found = as_tuple(vmap(op, dims)(*many))
            for n in range(3):
                for a, b in zip(found, as_tuple(op(*sample(many, dims, n)))):
                    torch.testing.assert_close(a[n], b, msg=lambda m: f"{name}, {list(chosen)}: {m}")


@pytest.mark.filterwarnings("error")
def test_gradients_of_each_sample(device):
    for name, op, inputs in every_case(device):
        every = tuple(range(len(inputs)))
        for chosen in ([0], every):
            many, dims = mapped_inputs(inputs, chosen)
            found = vmap(grad(loss(op), argnums=every), dims)(*many)
            for n in range(3):
                for a, b in zip(found, grad(loss(op), argnums=every)(*sample(many, dims, n))):
                    torch.testing.assert_close(a[n], b, rtol=1e-4, atol=1e-4, msg=lambda m: f"{name}, {list(chosen)}: {m}")
        many, dims = mapped_inputs(inputs, [0])
        of_sum = grad(lambda *t: vmap(loss(op), dims)(*t).sum(), argnums=every)(*many)
        parts = [grad(loss(op), argnums=every)(*sample(many, dims, n)) for n in range(3)]
        for i, a in enumerate(of_sum):
            b = torch.stack([part[i] for part in parts], dims[i] or 0)
            torch.testing.assert_close(a, b.sum(0) if dims[i] is None else b, rtol=1e-4, atol=1e-4)


def calls_of(names, function):
    """Counts the calls of the ops with these names in function()."""
    found = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op._schema.name in names:
                found.append(op)
            return op(*args, **(kwargs or {}))

    with Count():
        function()
    return len(found)


def test_vmap_folds_into_the_batch(device):
    x, weight = randn(device, 7, 2, 6, 9), randn(device, 6, 4)
    name = "cotangent::causal_conv1d_"
    assert calls_of([name + "forward"], lambda: vmap(lambda x: causal_conv1d(x, weight))(x)) == 1
    of_x = vmap(grad(lambda x: causal_conv1d(x, weight).sum()))
    assert calls_of([name + "backward"], lambda: of_x(x)) == 1
    of_weight = vmap(grad(lambda w, x: causal_conv1d(x, w).sum()), (None, 0))
    assert calls_of([name + "backward"], lambda: of_weight(weight, x)) == 7
    if has_attention(device):
        q = randn(device, 7, 2, 5, 4, 8)
        assert calls_of(["cotangent::attention_forward"], lambda: vmap(lambda q: attention(q, q, q))(q)) == 1
        dropped = vmap(lambda q: attention(q, q, q, dropout_p=0.5, dropout_seed=1))(q)  # each sample has the mask of a single call
        torch.testing.assert_close(dropped[3], attention(q[3], q[3], q[3], dropout_p=0.5, dropout_seed=1))


def test_vmap_of_packed_sequences(device):
    x, weight, ends = randn(device, 3, 1, 6, 9), randn(device, 6, 4), indices(device, 0, 4, 9)
    found = vmap(lambda x: causal_conv1d(x, weight, cu_seqlens=ends))(x)
    torch.testing.assert_close(found[1], causal_conv1d(x[1], weight, cu_seqlens=ends))


def test_vmap_of_masks(device):
    x = torch.ones(2, 64, device=device)
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(lambda x: dropout(x, 0.5))(x)
    first, second = vmap(lambda x: dropout(x, 0.5), randomness="different")(x)
    assert not torch.equal(first, second)
    first, second = vmap(lambda x: dropout(x, 0.5), randomness="same")(x)
    assert torch.equal(first, second)


def test_vmap_of_decoding(device):
    x, weight, state = randn(device, 3, 2, 6), randn(device, 6, 4), randn(device, 2, 3, 6, 3)
    expected = state.clone()
    ys = [causal_conv1d_update(x[n], expected[:, n], weight) for n in range(3)]
    torch.testing.assert_close(vmap(lambda x, s: causal_conv1d_update(x, s, weight), (0, 1))(x, state), torch.stack(ys))
    torch.testing.assert_close(state, expected)
    with pytest.raises(ValueError, match="conv_state is changed in place"):
        vmap(lambda x: causal_conv1d_update(x, state[:, 0], weight))(x)


def test_vmap_over_nothing_is_refused(device):
    with pytest.raises(ValueError, match="cotangent::mhc_sinkhorn_forward: vmap over an axis of size 0"):
        vmap(mhc_sinkhorn)(randn(device, 0, 1, 2, 4, 4))


def test_modules(device):
    """Per-sample gradients computed by functional_call, vmap and grad."""
    module = torch.nn.Sequential(
        cotangent.CausalConv1d(8, activation="silu", channel_last=True, device=device),
        cotangent.BiasDropoutResidual(8, 0.1, activation="gelu", device=device),
        cotangent.HyperConnection(torch.nn.Linear(8, 8, device=device), 8, 2, device=device),
    ).eval()
    parameters = {name: p.detach() for name, p in module.named_parameters()}
    x = randn(device, 4, 5, 8)

    def of_one(parameters, x):
        first, second, last = module
        h = torch.func.functional_call(first, {k[2:]: v for k, v in parameters.items() if k[0] == "0"}, (x[None],))
        h = torch.func.functional_call(second, {k[2:]: v for k, v in parameters.items() if k[0] == "1"}, (h,))
        h = cotangent.HyperConnection.to_streams(h, 2)
        h = torch.func.functional_call(last, {k[2:]: v for k, v in parameters.items() if k[0] == "2"}, (h,))
        return h.square().sum()

    found = vmap(grad(of_one), (None, 0))(parameters, x)
    for n in range(4):
        for name, gradient in grad(of_one)(parameters, x[n]).items():
            torch.testing.assert_close(found[name][n], gradient, rtol=1e-4, atol=1e-4)


def test_batched_gradients_of_autograd(device):
    """torch.autograd.grad(is_grads_batched=True) and jacobian(vectorize=True) use the vmap of autograd."""
    x, weight = randn(device, 2, 6, 9).requires_grad_(), randn(device, 6, 4).requires_grad_()
    y = causal_conv1d(x, weight, None, "silu")
    many = randn(device, 3, 2, 6, 9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning that it is slow
        found = torch.autograd.grad(y, (x, weight), many, is_grads_batched=True, retain_graph=True)
    for n in range(3):
        for a, b in zip(found, torch.autograd.grad(y, (x, weight), many[n], retain_graph=True)):
            assert torch.equal(a[n], b)
