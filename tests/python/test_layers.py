# SPDX-License-Identifier: Apache-2.0
"""The layers, and checkpoints of other implementations."""
import copy

import pytest
import torch
import torch.nn.functional as F
from support import compare
from test_attention import formula as plain_attention
from test_causal_conv1d import formula as plain_conv
from test_torch import has_attention

import cotangent
from cotangent import Attention, HyperConnection, HyperConnectionStack, LinearDropoutResidual, MambaInProjConv1d

close = dict(rtol=1e-4, atol=1e-5)


@pytest.fixture
def with_attention(device):
    if not has_attention(device):
        pytest.skip("no kernel of this device supports attention yet")


def layers(device):
    yield LinearDropoutResidual(12, 8, 0.3, activation="gelu", device=device), torch.randn(2, 5, 12, device=device)
    yield MambaInProjConv1d(12, 10, sizes_before=[6], sizes_after=[3], device=device), torch.randn(2, 9, 12, device=device)
    yield HyperConnectionStack([torch.nn.Linear(12, 12, device=device)] * 2, 12, 3, device=device), torch.randn(2, 5, 12, device=device)
    if has_attention(device):
        yield Attention(32, 4, causal=True, num_kv_heads=2, rope_base=100.0, qk_norm_eps=1e-6, device=device), torch.randn(2, 5, 32, device=device)


def test_state_dict_round_trip_and_compile(device):
    for layer, x in layers(device):
        layer.eval()
        other = copy.deepcopy(layer)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(1)
        other.load_state_dict(layer.state_dict())
        y, again = (r[1] if isinstance(r, tuple) else r for r in (layer(x), other(x)))
        assert torch.equal(y, again) and repr(layer)
        compiled = torch.compile(layer, backend="eager", fullgraph=True)(x)
        torch.testing.assert_close(compiled[1] if isinstance(compiled, tuple) else compiled, y)


@pytest.mark.parametrize("cast", ["bfloat16", "half", "to", "double"])
def test_small_parameters_stay_wide(device, cast):
    """A cast of a model rounds neither the coefficients of hyper-connections nor the sinks of attention."""
    model = HyperConnectionStack([Attention(8, 2, causal=True, use_sink=True), torch.nn.Linear(8, 8)], 8, 2)
    wide = {n: p.detach().clone() for n, p in model.named_parameters() if n.split(".")[-1] in ("phi", "alpha", "gamma", "sink")
            or (n.endswith("bias") and ".layer." not in n)}  # fmt: skip
    assert len(wide) == 2 * 4 + 1
    model = model.to(device, torch.bfloat16) if cast == "to" else getattr(model, cast)().to(device)
    narrow = dict(bfloat16=torch.bfloat16, half=torch.float16, to=torch.bfloat16, double=torch.float64)[cast]
    for name, parameter in model.named_parameters():
        assert parameter.device.type == torch.device(device).type
        if name in wide:
            assert parameter.dtype == (torch.float64 if cast == "double" else torch.float32)
            assert torch.equal(parameter.cpu().float(), wide[name])
        else:
            assert parameter.dtype == narrow


def test_linear_dropout_residual(device):
    layer = LinearDropoutResidual(12, 8, 0.5, activation="relu", device=device)
    plain = torch.nn.Linear(12, 8, device=device)
    layer.load_state_dict(plain.state_dict())
    x, residual = torch.randn(64, 12, device=device), torch.randn(64, 8, device=device)
    y = layer(x, residual) - residual
    kept = y != 0
    torch.testing.assert_close(y[kept], 2 * F.relu(plain(x))[kept], rtol=1e-4, atol=1e-4)
    assert 0.1 < kept.float().mean() < 0.4
    layer.eval()
    torch.testing.assert_close(layer(x, residual), residual + F.relu(plain(x)), **close)
    compare(lambda x, r, w, b: torch.func.functional_call(layer, dict(weight=w, bias=b), (x, r)),
            lambda x, r, w, b: r + F.relu(F.linear(x, w, b)), [x, residual, layer.weight, layer.bias], units=32)  # fmt: skip


def test_mamba_in_proj_conv1d(device):
    layer = MambaInProjConv1d(12, 10, sizes_before=[6], sizes_after=[3], bias=True, device=device)
    x = torch.randn(2, 9, 12, device=device)

    def plain(x, weight, bias, conv, conv_bias):
        z, inner, dt = F.linear(x, weight, bias).split([6, 10, 3], -1)
        return z, plain_conv(inner.transpose(1, 2), conv, conv_bias, "silu")[0].transpose(1, 2), dt

    names = ("in_proj.weight", "in_proj.bias", "conv1d.weight", "conv1d.bias")
    assert sorted(layer.state_dict()) == sorted(names)
    parameters = [dict(layer.named_parameters())[name] for name in names]
    compare(lambda x, *p: torch.func.functional_call(layer, dict(zip(names, p)), (x,)), plain, [x, *parameters], units=32)
    z, inner, dt, state = layer(x, return_final_state=True)
    with torch.no_grad():
        last = layer.step(x[:, 0], state)
        expected = layer(torch.cat([x, x[:, :1]], 1))
    for a, b in zip(last, expected):
        torch.testing.assert_close(a, b[:, -1], **close)
    idx = torch.tensor([[0] * 4 + [1] * 5] * 2, dtype=torch.int32, device=device)
    torch.testing.assert_close(layer(x, seq_idx=idx)[1][:, 4:], layer(x[:, 4:])[1], **close)


def test_mamba_in_proj_conv1d_reads_a_checkpoint(device):
    """The names of mamba_ssm and transformers, with the weight [D,1,K] of torch.nn.Conv1d."""
    layer = MambaInProjConv1d(12, 10, sizes_after=[10], device=device)
    theirs = {"in_proj.weight": torch.randn(20, 12), "conv1d.weight": torch.randn(10, 1, 4), "conv1d.bias": torch.randn(10),
              "A_log": torch.randn(10, 8), "out_proj.weight": torch.randn(12, 10)}  # fmt: skip
    result = layer.load_state_dict(theirs, strict=False)
    assert not result.missing_keys and sorted(result.unexpected_keys) == ["A_log", "out_proj.weight"]
    assert torch.equal(layer.conv1d.weight.cpu(), theirs["conv1d.weight"][:, 0])


def test_hyper_connection_stack(device):
    plain = torch.nn.ModuleList([torch.nn.Linear(12, 12, device=device) for _ in range(2)])
    stack = HyperConnectionStack([torch.nn.Linear(12, 12, device=device) for _ in range(2)], 12, 3, device=device)
    result = stack.load_state_dict(plain.state_dict(), strict=False)
    assert not result.unexpected_keys and all(not key.endswith((".weight", "layer.bias")) for key in result.missing_keys)
    x = torch.randn(2, 5, 12, device=device)
    streams = HyperConnection.to_streams(x, 3)
    assert torch.equal(streams, stack.layers[0].to_streams(x)) and stack.layers[0].to_streams(x, 2).shape == (2, 5, 2, 12)
    for connection, layer in zip(stack.layers, plain):
        assert torch.equal(connection.layer.weight, layer.weight)
        h_in, h_post, h_res = cotangent.mhc_pre(streams, connection.phi, connection.alpha, connection.bias, connection.gamma)
        streams = cotangent.mhc_post(streams, layer(h_in), h_post, h_res)
    torch.testing.assert_close(stack(x), streams.sum(2), **close)
    parameters = [parameter for name, parameter in stack.named_parameters() if ".layer." not in name]
    for a, b in zip(*(torch.autograd.grad(y.square().sum(), parameters) for y in (stack(x), streams.sum(2)))):
        torch.testing.assert_close(a, b, **close)
    with pytest.raises(RuntimeError, match="phi"):
        stack.load_state_dict(plain.state_dict())


def test_hyper_connection_reads_the_checkpoint_of_its_layer(device):
    """A layer with parameters of the names that the connection uses too."""
    plain = torch.nn.Linear(12, 12, device=device)
    connection = HyperConnection(torch.nn.Linear(12, 12, device=device), 12, 3, device=device)
    before = connection.bias.clone()
    assert not connection.load_state_dict(plain.state_dict(), strict=False).unexpected_keys
    assert torch.equal(connection.layer.bias, plain.bias) and torch.equal(connection.bias, before)

def test_qk_norm_eps_is_no_flag():
    with pytest.raises(TypeError, match="qk_norm_eps is True, expected None or the eps"):
        Attention(32, 4, causal=True, qk_norm_eps=True)



def plain_rope(x, base, dim, interleaved):
    """Complex numbers instead of cos and sin."""
    T = x.shape[1]
    frequency = base ** (-torch.arange(0, dim, 2, dtype=torch.float64, device=x.device) / dim)
    turn = torch.polar(torch.ones(T, dim // 2, dtype=torch.float64, device=x.device),
                       torch.arange(T, device=x.device)[:, None] * frequency)[:, None]  # fmt: skip
    part = x[..., :dim]
    a, b = (part[..., ::2], part[..., 1::2]) if interleaved else part.chunk(2, -1)
    turned = torch.complex(a.double(), b.double()) * turn
    joined = torch.stack([turned.real, turned.imag], -1).flatten(-2) if interleaved else torch.cat([turned.real, turned.imag], -1)
    return torch.cat([joined.to(x.dtype), x[..., dim:]], -1)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("qk_norm_eps", [None, 1e-5])
def test_attention_with_rope(device, with_attention, interleaved, qk_norm_eps):
    module = Attention(32, 4, causal=True, num_kv_heads=2, head_dim=16, window=(5, 0), rope_base=50.0, rope_dim=12, rope_interleaved=interleaved,
                       qk_norm_eps=qk_norm_eps, device=device)  # fmt: skip
    if qk_norm_eps:
        torch.nn.init.normal_(module.q_norm.weight)
    x = torch.randn(2, 9, 32, device=device)
    q, k, v = (p.unflatten(-1, (-1, 16)) for p in module.qkv(x).split([64, 32, 32], -1))
    if qk_norm_eps:
        q, k = F.rms_norm(q, (16,), module.q_norm.weight, 1e-5), F.rms_norm(k, (16,), module.k_norm.weight, 1e-5)
    q, k = (plain_rope(t, 50.0, 12, interleaved) for t in (q, k))
    out, _ = plain_attention(q, k, v, causal=True, window=(5, 0))
    expected = module.out(out.flatten(2))
    torch.testing.assert_close(module(x), expected, **close)
    # Each packed sequence begins at position 0.
    ends = torch.tensor([0, 9, 18], dtype=torch.int32, device=device)
    torch.testing.assert_close(module(x.flatten(0, 1), ends, 9).unflatten(0, (2, 9)), expected, **close)
    with pytest.raises(ValueError, match="max_seqlen is None, expected a value because cu_seqlens is given"):
        module(x.flatten(0, 1), ends)
    with pytest.raises(ValueError, match="cu_seqlens is None, expected a value because max_seqlen is given"):
        module(x, max_seqlen=9)


@pytest.mark.parametrize("deterministic", [True, False])
def test_attention_deterministic(device, with_attention, monkeypatch, deterministic):
    """The option reaches the function, in forward and in step."""
    found = []

    def recorded(*arguments, deterministic=True, **options):
        found.append(deterministic)
        return cotangent.attention(*arguments, deterministic=deterministic, **options)

    monkeypatch.setattr("cotangent.layers.attention", recorded)
    module = Attention(32, 4, causal=True, deterministic=deterministic, device=device)
    x, caches = torch.randn(2, 5, 32, device=device), torch.zeros(2, 2, 8, 4, 8, device=device)
    module(x).sum().backward()
    module.step(x, *caches, torch.zeros(2, dtype=torch.int32, device=device))
    assert found == [deterministic] * 2


@pytest.mark.parametrize("rope_base", [None, 50.0])
def test_attention_decodes(device, with_attention, rope_base):
    """Steps of one and of several tokens, for rows with different numbers of tokens."""
    module = Attention(32, 4, causal=True, num_kv_heads=2, rope_base=rope_base, window=(4, 0), use_sink=True, device=device)
    x = torch.randn(2, 9, 32, device=device)
    with torch.no_grad():
        whole = module(x)
        caches = [torch.full((2, 16, 2, 8), float("nan"), device=device) for _ in range(2)]
        used = torch.zeros(2, dtype=torch.int32, device=device)
        first = module.step(x[:, :4], *caches, used)
        torch.testing.assert_close(first, whole[:, :4], **close)
        used += 4
        used[1] = 2  # row 1 continues after 2 tokens
        y = module.step(torch.stack([x[0, 4], x[1, 2]]), *caches, used)
        torch.testing.assert_close(y, torch.stack([whole[0, 4], whole[1, 2]]), **close)
    with pytest.raises(ValueError, match="k_cache has shape"):
        module.step(x[:, 0], caches[0][:, :, :1], caches[1], used)
    with pytest.raises(ValueError, match="causal is False"):
        Attention(32, 4, causal=False, device=device).step(x[:, 0], *caches, used)
    with pytest.raises(ValueError, match="rope_dim is 9"):
        Attention(32, 4, causal=True, rope_base=10.0, rope_dim=9)


def test_attention_reads_checkpoints(device, with_attention):
    theirs = torch.nn.MultiheadAttention(32, 4, batch_first=True, device=device)
    torch.nn.init.normal_(theirs.in_proj_bias)
    ours = Attention(32, 4, causal=False, proj_bias=True, device=device)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 9, 32, device=device)
    torch.testing.assert_close(ours(x), theirs(x, x, x, need_weights=False)[0], **close)
    names = ("q_proj", "k_proj", "v_proj", "o_proj")
    split = {f"{n}.{kind}": torch.randn((32, 32) if kind == "weight" else 32, device=device) for n in names for kind in ("weight", "bias")}
    outer = torch.nn.ModuleDict(dict(attn=Attention(32, 4, causal=True, use_sink=True, proj_bias=True, device=device)))
    outer.load_state_dict({f"attn.{n}": t for n, t in {**split, "sinks": torch.arange(4.0)}.items()})
    attn = outer["attn"]
    assert torch.equal(attn.qkv.weight[32:64], split["k_proj.weight"]) and torch.equal(attn.out.bias, split["o_proj.bias"])
    assert attn.sink.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_attention_of_transformers(device, with_attention, name):
    """Loads the attention of a model, and computes what eager PyTorch does."""
    pytest.importorskip("transformers")
    from tiny_models import make

    model = make(name, torch.float32, "eager").to(device).eval()
    theirs, config = model.model.layers[0].self_attn, model.config
    base = getattr(config, "rope_theta", None) or config.rope_parameters["rope_theta"]
    ours = Attention(32, 4, causal=True, num_kv_heads=2, head_dim=theirs.head_dim, rope_base=base, qk_norm_eps=1e-6 if name == "qwen3" else None,
                     device=device)  # fmt: skip
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 9, 32, device=device)
    places = model.model.rotary_emb(x, torch.arange(9, device=device)[None])
    mask = torch.full((9, 9), torch.finfo(torch.float32).min, device=device).triu(1)[None, None]
    with torch.no_grad():
        expected = theirs(x, position_embeddings=places, attention_mask=mask)[0]
        torch.testing.assert_close(ours(x), expected, rtol=1e-4, atol=1e-4)


class NormAndLayer(torch.nn.Module):
    """A layer with a child of the name that HyperConnection gives its layer, and with a parameter of one of its names."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer, self.phi = torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.Parameter(torch.randn(3))


def test_hyper_connection_reads_the_names_of_its_layer():
    alone, wrapped = NormAndLayer(), HyperConnection(NormAndLayer(), 8, 2)
    found = wrapped.load_state_dict(alone.state_dict(), strict=False)
    assert not found.unexpected_keys and sorted(found.missing_keys) == ["alpha", "bias", "gamma", "phi"]
    for name, value in alone.state_dict().items():
        assert torch.equal(wrapped.layer.state_dict()[name], value), name
    again = HyperConnection(NormAndLayer(), 8, 2)
    again.load_state_dict(wrapped.state_dict())
    for name, value in wrapped.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name


def test_a_refused_step_writes_nothing(on_cpu):
    layer, x = Attention(32, 4, causal=True), torch.randn(2, 3, 32)
    zeros = dict(cache_seqlens=torch.zeros(2, dtype=torch.int32), shape=(2, 8, 4, 8), dtype=torch.float32)
    for wrong, error, message in (
        (dict(cache_seqlens=torch.tensor([0, -2], dtype=torch.int32)), ValueError, "cache_seqlens has -2, expected 0 to 5"),
        (dict(cache_seqlens=torch.tensor([0, 6], dtype=torch.int32)), ValueError, "cache_seqlens has 6, expected 0 to 5"),
        (dict(cache_seqlens=torch.zeros(3, dtype=torch.int32)), ValueError, r"cache_seqlens has shape \(3,\), expected \(2,\)"),
        (dict(cache_seqlens=torch.zeros(2)), TypeError, "cache_seqlens has dtype torch.float32, expected torch.int32 or torch.int64"),
        (dict(dtype=torch.bfloat16), TypeError, "k_cache has dtype torch.bfloat16, expected torch.float32"),
        (dict(), ValueError, "softcap is -1"),
    ):
        layer.softcap = 0.0 if wrong else -1.0
        options = {**zeros, **wrong}
        caches = [torch.zeros(options["shape"], dtype=options["dtype"]) for _ in range(2)]
        with pytest.raises(error, match=message):
            layer.step(x, *caches, options["cache_seqlens"])
        assert not caches[0].any() and not caches[1].any(), message
    caches = torch.zeros(2, 2, 8, 4, 8)
    with pytest.raises(ValueError, match="^Attention.step: x has 9 tokens, more than the 8 positions of k_cache$"):
        layer.step(torch.randn(2, 9, 32), *caches, torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match="^Attention.step: x has 4 axes, expected 3: "):
        layer.step(torch.randn(1, 2, 3, 32), *caches, torch.zeros(2, dtype=torch.int32))


def test_rotary_table_of_inference_and_of_export(on_cpu):
    layer, x = Attention(32, 4, causal=True, rope_base=100.0), torch.randn(1, 8, 32)
    with torch.inference_mode():
        layer(x)
    layer(x).sum().backward()
    layer = Attention(32, 4, causal=True, rope_base=100.0)
    length = torch.export.Dim("T", min=2, max=4096)
    exported = torch.export.export(layer, (x,), dynamic_shapes=({1: length},)).module()
    for T in (8, 100):
        x = torch.randn(1, T, 32)
        torch.testing.assert_close(exported(x), layer(x))


@pytest.mark.parametrize(
    "options, message",
    [(dict(num_heads=0), "num_heads is 0"), (dict(num_kv_heads=0), "num_kv_heads is 0"), (dict(num_kv_heads=-2), "num_kv_heads is -2"),
     (dict(rope_dim=4), "rope_dim is 4, expected None"), (dict(rope_base=0.0), "rope_base is 0.0"), (dict(head_dim=-8), "head_dim")],
)  # fmt: skip
def test_attention_refuses_sizes(options, message):
    with pytest.raises(ValueError, match=message):
        Attention(32, causal=True, **{"num_heads": 4, **options})


def test_attention_has_no_default_for_causal():
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'causal'"):
        Attention(32, 4)


def test_sinks_have_the_dtype_of_a_float64_layer(on_cpu):
    layer = Attention(32, 4, causal=True, use_sink=True, dtype=torch.float64)
    assert layer.sink.dtype == torch.float64
    layer(torch.randn(2, 5, 32, dtype=torch.float64)).sum().backward()
    assert layer.sink.grad.abs().sum() > 0
    assert Attention(32, 4, causal=True, use_sink=True, dtype=torch.bfloat16).sink.dtype == torch.float32
