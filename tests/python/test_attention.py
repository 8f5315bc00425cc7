# SPDX-License-Identifier: Apache-2.0
import math

import pytest
import torch
from support import compare

from cotangent import attention, attention_varlen, dropout


@pytest.fixture(autouse=True)
def kernels_exist(device):
    """Asks the library, so that these tests run on a GPU as soon as the library has kernels for it."""
    q = torch.zeros(1, 1, 1, 8, device=device)
    try:
        attention(q, q, q)
    except NotImplementedError as error:
        pytest.skip(str(error))


def formula(q, k, v, sink=None, bias=None, slopes=None, causal=False, window=None, scale=None, softcap=0.0, keep=None,
            lengths=None):  # fmt: skip
    """keep: the dropout mask divided by the keep probability, [B,H,Tq,Tk]. lengths: valid (queries, keys) per
    sequence."""
    B, Tq, H, d = q.shape
    Tk, group = k.shape[1], H // k.shape[2]
    k, v = (t.repeat_interleave(group, 2) for t in (k, v))
    c = torch.einsum("bihd,bjhd->bhij", q, k) * (scale or 1 / math.sqrt(d))
    if softcap:
        c = softcap * torch.tanh(c / softcap)
    used_q, used_k = lengths or (q.new_full((B,), Tq), q.new_full((B,), Tk))
    i = torch.arange(Tq, device=q.device)[None, :, None]
    j = torch.arange(Tk, device=q.device)[None, None, :]
    distance = j - i - (used_k - used_q)[:, None, None]
    if slopes is not None:
        c = c - slopes.reshape(-1, H, 1, 1) * distance[:, None].abs()
    if bias is not None:
        c = c + bias
    left, right = window or (-1, -1)
    right = 0 if causal else right
    visible = (j < used_k[:, None, None]) & (i < used_q[:, None, None])
    visible = visible & (distance >= -left if left >= 0 else True) & (distance <= right if right >= 0 else True)
    s = c.masked_fill(~visible[:, None], -math.inf)
    logits = s if sink is None else torch.cat([s, sink.reshape(1, H, 1, 1).expand(B, H, Tq, 1)], 3)
    dead = ~visible.any(2)[:, None].expand(B, H, Tq)
    if sink is None:  # exp(-inf - -inf)
        lse = torch.logsumexp(logits.masked_fill(dead[..., None], 0), 3).masked_fill(dead, -math.inf)
        P = torch.exp(s - lse.masked_fill(dead, 0)[..., None])
    else:
        lse = torch.logsumexp(logits, 3)
        P = torch.exp(s - lse[..., None])
    out = torch.einsum("bhij,bjhd->bihd", P if keep is None else P * keep, v)
    return out, lse.masked_fill((i[..., 0] >= used_q[:, None])[:, None].expand(B, H, Tq), -math.inf)


def inputs(device, dtype=torch.float32, B=2, Tq=13, Tk=19, H=4, Hkv=2, d=16, d_v=16):
    return [torch.randn(s, dtype=dtype, device=device) for s in ((B, Tq, H, d), (B, Tk, Hkv, d), (B, Tk, Hkv, d_v))]


def check(tensors, dtype=None, units=32, **options):
    compare(lambda q, k, v: attention(q, k, v, return_lse=True, **options), lambda q, k, v: formula(q, k, v, **options),
            tensors, dtype, units)  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("causal", [False, True])
def test_formula(device, dtype, causal):
    check(inputs(device, dtype), causal=causal)


@pytest.mark.parametrize(
    "options",
    [dict(window=(3, 2)), dict(window=(-1, 4)), dict(window=(5, -1)), dict(window=(5, 0), causal=True), dict(scale=0.3),
     dict(softcap=2.0), dict(softcap=2.0, causal=True, scale=0.5)],
)  # fmt: skip
def test_options(device, options):
    check(inputs(device), **options)


@pytest.mark.parametrize("sizes", [dict(H=4, Hkv=4), dict(H=6, Hkv=1), dict(d_v=24), dict(d=8, d_v=40), dict(Tq=1),
                                   dict(Tq=33, Tk=65), dict(B=0), dict(Tk=0)])  # fmt: skip
def test_sizes(device, sizes):
    if sizes.get("Tk") == 0:
        out, lse = attention(*inputs(device, **sizes), return_lse=True)
        assert (out == 0).all() and (lse == -math.inf).all()
    else:
        check(inputs(device, **sizes))


def test_sink_bias_and_slopes(device):
    sink = torch.randn(4, device=device)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    for shape in ((1, 4, 13, 19), (2, 1, 1, 19), (1, 1, 13, 1)):
        bias = torch.randn(shape, device=device)
        compare(
            lambda q, k, v, s, b: attention(q, k, v, sink=s, attn_bias=b, alibi_slopes=slopes, causal=True, return_lse=True),
            lambda q, k, v, s, b: formula(q, k, v, s, b, slopes, causal=True),
            [*inputs(device), sink, bias], units=32,
        )  # fmt: skip


# A row that a mask of finite numbers masks completely. Without a special case, lse in float32 would be the number of
# the mask, and exp(s - lse) would be 1 for each key.
@pytest.mark.parametrize("number", ["lowest", -3e38, -1e9, -1e6, -65504.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_low_numbers_of_the_bias_are_masks(device, dtype, number, causal):
    number = max(torch.finfo(dtype).min if number == "lowest" else number, torch.finfo(dtype).min)
    q, k, v = inputs(device, dtype)
    bias = torch.randn(2, 1, 13, 19, device=device, dtype=dtype)
    masked = torch.zeros(2, 1, 13, 19, device=device, dtype=torch.bool)
    masked[:, :, 4] = masked[1, :, 7] = masked[0, :, :, 15:] = True  # two fully masked rows: out and gradients are 0
    with_number = bias.masked_fill(masked, number)
    rows = masked.all(3)

    def op(q, k, v, bias):
        out, lse = attention(q, k, v, attn_bias=bias, causal=causal, return_lse=True)
        return out, lse.masked_fill(rows, 0)  # lse of fully masked rows is -inf; tested below

    def plain(q, k, v, bias):
        out, lse = formula(q, k, v, bias=bias.masked_fill(masked & ~rows[..., None], -math.inf), causal=causal)
        return out * ~rows[:, 0, :, None, None], lse.masked_fill(rows, 0)

    compare(op, plain, [q, k, v, with_number], units=32)
    out, lse = attention(q, k, v, attn_bias=with_number, return_lse=True)
    assert (out[:, 4] == 0).all() and (lse[:, :, 4] == -math.inf).all()


def test_higher_numbers_of_the_bias_are_no_masks(device):
    q, k, v = inputs(device)
    bias = torch.randn(1, 1, 13, 19, device=device)
    bias[:, :, 4] -= 60000
    out, lse = attention(q, k, v, attn_bias=bias, return_lse=True)
    torch.testing.assert_close(out, formula(q, k, v, bias=bias)[0], rtol=0.02, atol=0.02)
    assert torch.isfinite(lse).all()


def test_a_mask_expanded_over_heads_is_read_once(device):
    from cotangent.ops.attention import _with_masks

    bias = torch.zeros(2, 1, 13, 19, device=device).expand(2, 4, 13, 19)
    arguments = [None] * 9 + [bias, None]
    assert _with_masks(False, *arguments)[9].shape == (2, 1, 13, 19)
    assert _with_masks(True, *arguments)[9].shape == (2, 4, 13, 19)
    q, k, v = inputs(device)
    wide = torch.randn(2, 1, 13, 19, device=device).requires_grad_()
    compare(lambda q, k, v, b: attention(q, k, v, attn_bias=b.expand(2, 4, 13, 19)),
            lambda q, k, v, b: formula(q, k, v, bias=b)[0], [q, k, v, wide], units=32)  # fmt: skip


def test_dropout(device):
    q, k, v = inputs(device)
    B, Tq, H, Tk, p = 2, 13, 4, 19, 0.25
    # The header's rule: attention draws the same masks as dropout on rows h * B*Tq + b*Tq + i.
    _, drawn = dropout(torch.ones(H * B * Tq, Tk, device=device), p, seed=3, offset=5, return_mask="bytes")
    keep = drawn.reshape(H, B, Tq, Tk).transpose(0, 1) / (1 - p)
    compare(lambda q, k, v: attention(q, k, v, dropout_p=p, dropout_seed=3, dropout_offset=5, return_lse=True),
            lambda q, k, v: formula(q, k, v, keep=keep), [q, k, v], units=32)  # fmt: skip
    torch.manual_seed(1)
    one, two = attention(q, k, v, dropout_p=p), attention(q, k, v, dropout_p=p)
    torch.manual_seed(1)
    assert torch.equal(one, attention(q, k, v, dropout_p=p)) and not torch.equal(one, two)


def test_packed(device):
    lengths = [(3, 5), (0, 4), (7, 7), (3, 3)]
    ends_q, ends_k = [0], [0]
    for a, b in lengths:
        ends_q.append(ends_q[-1] + a)
        ends_k.append(ends_k[-1] + b)
    cu_q, cu_k = (torch.tensor(e, dtype=torch.int32, device=device) for e in (ends_q, ends_k))
    q, k, v = (t[0] for t in inputs(device, B=1))

    def plain(q, k, v):
        parts = [formula(q[None, a:b], k[None, c:e], v[None, c:e], causal=True)
                 for a, b, c, e in zip(ends_q, ends_q[1:], ends_k, ends_k[1:])]  # fmt: skip
        return torch.cat([o[0] for o, _ in parts]), torch.cat([lse[0] for _, lse in parts], 1)

    compare(lambda q, k, v: attention_varlen(q, k, v, cu_q, cu_k, 7, 7, causal=True, return_lse=True), plain, [q, k, v],
            units=32)  # fmt: skip


def test_seqused(device):
    q, k, v = inputs(device)
    used_q = torch.tensor([13, 9], dtype=torch.int32, device=device)
    used_k = torch.tensor([11, 19], dtype=torch.int32, device=device)
    compare(
        lambda q, k, v: attention(q, k, v, causal=True, seqused_q=used_q, seqused_k=used_k),
        lambda q, k, v: formula(q, k, v, causal=True, lengths=(used_q, used_k))[0],
        [q, k, v], units=32,
    )  # fmt: skip


def test_strides_pass_through(device):
    B, T, H, d = 2, 9, 4, 16
    qkv = torch.randn(B, T, 3, H, d, device=device)
    check([qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]], causal=True)
    heads_first = [torch.randn(B, H, T, d, device=device).transpose(1, 2) for _ in range(3)]
    check(heads_first, causal=True)
    assert attention(*heads_first).stride() == heads_first[0].stride()


def test_gradients_in_float64(on_cpu):
    q, k, v = [t.requires_grad_() for t in inputs("cpu", torch.float64, 1, 3, 4, 2, 1, 3, 2)]
    sink, bias = (torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((2,), (1, 2, 1, 4)))
    for options in (dict(causal=True), dict(softcap=1.5, dropout_p=0.3, dropout_seed=1), dict(window=(1, 1), deterministic=False)):
        assert torch.autograd.gradcheck(
            lambda q, k, v, s, b: attention(q, k, v, sink=s, attn_bias=b, return_lse=True, **options), (q, k, v, sink, bias)
        )


@pytest.mark.parametrize(
    "error, message, change",
    [
        (ValueError, "q has 2 axes", dict(q=torch.zeros(3, 16))),
        (ValueError, "q has 0 axes", dict(q=torch.zeros(()))),
        (ValueError, "v has 0 axes", dict(v=torch.zeros(()))),
        (ValueError, "k", dict(k=torch.zeros(2, 19, 2, 15))),
        (ValueError, "H=", dict(k=torch.zeros(2, 19, 3, 16), v=torch.zeros(2, 19, 3, 16))),
        (TypeError, "v has dtype", dict(v=torch.zeros(2, 19, 2, 16, dtype=torch.float16))),
        (ValueError, "window", dict(window=(-2, 0))),
        (ValueError, "dropout_p is 2", dict(dropout_p=2.0)),
        (ValueError, "softcap", dict(softcap=-1.0)),
        (ValueError, "sink", dict(sink=torch.zeros(5))),
        (ValueError, r"\battn_bias\b", dict(attn_bias=torch.zeros(2, 3, 13, 19))),
        (TypeError, "seqused_k has dtype torch.int64", dict(seqused_k=torch.zeros(2, dtype=torch.int64))),
    ],
)
def test_errors_name_the_argument(device, error, message, change):
    arguments = dict(zip("qkv", inputs(device)))
    arguments.update({k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in change.items()})
    with pytest.raises(error, match=message):
        attention(**arguments)
