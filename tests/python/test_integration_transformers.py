# SPDX-License-Identifier: Apache-2.0
"""attn_implementation="cotangent" and the convolution in small models of transformers, compared with eager PyTorch in the
same dtype. The reference is eager PyTorch in float64."""
import contextlib
import math
import os
import statistics
import types

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

from tiny_models import ATTENTION, HYBRIDS, OpRecorder, forget, generate, inputs, make, train

import cotangent.integrations.transformers as integration
from cotangent import compat

PADDINGS = [None, "left", "right"]


@pytest.fixture(autouse=True)
def quiet():
    transformers.logging.set_verbosity_error()
    forget()
    integration.enable()
    yield
    compat.uninstall()


@contextlib.contextmanager
def without_cotangent():
    compat.uninstall()
    try:
        yield
    finally:
        forget()
        integration.enable()


def eager(name, dtype, batch, **options):
    with without_cotangent():
        recorder = OpRecorder()
        result = train(make(name, dtype, "eager", **options).to(batch["input_ids"].device), batch, recorder)
        assert not recorder.names
        return result


def errors(found, exact):
    """Relative errors of the losses of the tokens, and of all gradients together."""
    losses = (found[0] - exact[0]).norm() / exact[0].norm()
    parts = [(found[1][n] - g).norm() / g.norm() for n, g in exact[1].items() if g.norm() > 0]
    return losses.item(), (torch.stack(parts).norm() / len(parts) ** 0.5).item()


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("name", [*ATTENTION, *HYBRIDS])
def test_loss_and_gradients(device, name, padding):
    """The median error of three batches. The error of one batch is one sample of a rounding error: in 12 batches of mamba2
    in float32 on a GPU, ours was 0.85 to 2.23 times that of eager, 1.03 in the median."""
    expected = {f"{op}_{way}" for op in (["attention"] if name in ATTENTION else ["causal_conv1d"]) for way in ("forward", "backward")}

    def ours(dtype, batch):
        recorder = OpRecorder()
        result = train(make(name, dtype, "cotangent").to(device), batch, recorder)
        assert expected <= recorder.names
        return result

    batches = [{k: v.to(device) for k, v in inputs(padding, seed=seed).items()} for seed in range(1, 4)]
    exact = [eager(name, torch.float64, batch) for batch in batches]
    if device.type == "cpu":  # a GPU has no float64 kernels
        assert max(errors(ours(torch.float64, batches[0]), exact[0])) < 1e-13
    for dtype, unit in ((torch.float32, 2.0**-24), (torch.bfloat16, 2.0**-9)):
        found = [errors(ours(dtype, batch), e) for batch, e in zip(batches, exact)]
        plain = [errors(eager(name, dtype, batch), e) for batch, e in zip(batches, exact)]
        for about, a, b in zip(("losses", "gradients"), zip(*found), zip(*plain)):
            a, b = statistics.median(a), statistics.median(b)
            assert a <= 2 * b + unit, f"{about} in {dtype}: error {a:.3g}, of eager {b:.3g}"


@pytest.mark.parametrize("padding", [None, "left"])
@pytest.mark.parametrize("name", [*ATTENTION, *HYBRIDS])
def test_tokens(device, name, padding):
    """Greedy decoding, longer than the sliding windows."""
    batch = {k: v.to(device) for k, v in inputs(padding).items()}
    with without_cotangent():
        expected = generate(make(name, torch.float32, "eager").to(device), batch)
    recorder = OpRecorder()
    assert torch.equal(generate(make(name, torch.float32, "cotangent").to(device), batch, recorder), expected)
    assert recorder.names & {"attention_forward", "causal_conv1d_update"}


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3", "gpt_oss"])
def test_static_cache(device, name):
    batch = {k: v.to(device) for k, v in inputs("left").items()}
    for implementation in ("eager", "cotangent"):
        model = make(name, torch.float32, implementation).to(device)
        tokens = generate(model, batch, cache_implementation="static", disable_compile=True)
        expected = tokens if implementation == "eager" else expected
        assert torch.equal(tokens, expected)


def packed(lengths=(4, 7, 2)):
    tokens = inputs(B=1, T=sum(lengths))["input_ids"]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    labels = tokens.masked_fill(positions == 0, -100)
    return lengths, dict(input_ids=tokens, labels=labels, position_ids=positions)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
@pytest.mark.parametrize("way", ["masks", "positions", "cu_seq_lens"])
def test_packed_sequences(on_cpu, name, way):
    """Packed sequences give the loss and gradients of the separate sequences. With a cache, transformers builds no mask
    of packed sequences, so that the attention finds them by the positions."""
    lengths, batch = packed()
    model = make(name, torch.float64, "cotangent")
    extra = dict(use_cache=way != "masks")
    if way == "cu_seq_lens":
        ends = torch.tensor([0, 4, 11, 13], dtype=torch.int32)
        extra.update(cu_seq_lens_q=ends, cu_seq_lens_k=ends, max_length_q=7, max_length_k=7)
    logits = model(**{k: v for k, v in batch.items() if k != "labels"}, **extra).logits[0]
    logits.square().sum().backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    parts = [model(input_ids=part).logits[0] for part in batch["input_ids"].split(lengths, 1)]
    torch.testing.assert_close(torch.cat(parts), logits, rtol=1e-5, atol=1e-5)
    torch.cat(parts).square().sum().backward()
    for n, p in model.named_parameters():
        torch.testing.assert_close(p.grad, found[n], rtol=1e-4, atol=1e-4)


class Recorded:
    """Records the masks that the attention function gets."""

    def __init__(self):
        self.masks = []

        def forward(module, query, key, value, attention_mask, **options):
            self.masks.append(attention_mask)
            return integration.attention_forward(module, query, key, value, attention_mask, **options)

        transformers.AttentionInterface.register("cotangent", forward)


@pytest.fixture
def recorded():
    yield Recorded()
    integration.enable()


def test_masks_of_older_versions(on_cpu):
    """transformers 5.4 to 5.17 have no functions for the positions inside packed sequences."""
    from transformers import masking_utils as masks

    newer = "remap_positions_for_packed_sequence", "packed_sequence_compatibility_function"
    older = types.SimpleNamespace(**{name: value for name, value in vars(masks).items() if name not in newer})
    recognizer = integration._Recognizer(older)
    assert recognizer.verify(older)
    sequences = torch.tensor([[0, 0, 1]])
    both = masks.and_masks(masks.causal_mask_function, masks.packed_sequence_mask_function(sequences))
    assert recognizer.band(both) == (math.inf, 0, sequences)
    assert recognizer.band(lambda batch, head, q, k: q >= k) is None


def test_unknown_mask_functions(on_cpu, monkeypatch):
    """A version of transformers with other mask functions: a warning, and every mask becomes a bias, with the same result."""
    from transformers import masking_utils as masks

    batch = {key: value for key, value in inputs().items() if key != "labels"}
    with torch.no_grad():
        expected = make("mistral", torch.float32, "eager")(**batch).logits
    monkeypatch.setattr(integration._Recognizer, "verify", lambda self, masks: False)
    with pytest.warns(UserWarning, match="mask functions of transformers .* are not recognised"):
        integration.enable()
    assert integration.attention_mask(batch_size=2, q_length=6, kv_length=6).shape == (2, 1, 6, 6)
    with torch.no_grad():
        torch.testing.assert_close(make("mistral", torch.float32, "cotangent")(**batch).logits, expected)
    monkeypatch.undo()
    monkeypatch.delattr(masks, "sliding_window_overlay")
    with pytest.warns(UserWarning, match="are not recognised"):
        integration.enable()


def test_masks_are_described_by_numbers(on_cpu, recorded):
    """A kernel gets windows and lengths instead of a bias [B,1,Tq,Tk]."""

    def masks(name, batch, **options):
        recorded.masks.clear()
        with torch.no_grad():
            make(name, torch.float32, "cotangent")(**{k: v for k, v in batch.items() if k != "labels"}, **options)
        return recorded.masks

    assert masks("llama", inputs()) == [None, None]
    for mask in masks("mistral", inputs()):
        assert mask._cotangent[:5] == (True, (4, 0), None, None, None)
    for mask in masks("mistral", inputs("right")):
        assert mask.shape == (3, 13) and mask._cotangent.lengths.tolist() == [13, 7, 10]
    for mask in masks("llama", inputs("left")):
        assert mask._cotangent.segments.cu_seqlens.tolist() == [0, 0, 19, 29, 39]
        assert mask._cotangent.segments.used.tolist() == [0, 13, 7, 10]
    sliding, full = masks("gemma3", inputs("left"))
    assert sliding._cotangent.window == (4, 0) and full._cotangent.window is None
    for mask in masks("mistral", {k: v for k, v in packed()[1].items()}, use_cache=False):
        assert mask._cotangent.segments.cu_seqlens.tolist() == [0, 4, 11, 13] and mask._cotangent.window == (4, 0)
    holes = inputs("right")
    holes["attention_mask"][:, 2] = 0
    for mask in masks("llama", holes):
        assert mask._cotangent.padding is not None and mask._cotangent.segments is None


def test_masks_of_other_functions(on_cpu):
    """An unknown mask function, a mask with holes, and a window of both sides."""
    from transformers import masking_utils as masks

    options = dict(batch_size=2, q_length=6, kv_length=6)
    chunks = masks.chunked_causal_mask_function(3, torch.zeros(2, dtype=torch.int64))
    found = integration.attention_mask(mask_function=chunks, **options)
    assert torch.equal(found, masks.sdpa_mask(mask_function=chunks, allow_is_causal_skip=False, **options))
    both = integration.attention_mask(mask_function=masks.sliding_window_bidirectional_mask_function(2), **options)
    assert both._cotangent[:2] == (False, (2, 2))
    assert integration.attention_mask(allow_is_causal_skip=False, **options).shape == (2, 1, 6, 6)
    assert integration.attention_mask(batch_size=2, q_length=3, kv_length=9)._cotangent.keys == 3
    assert integration.attention_mask(batch_size=2, q_length=3, kv_length=9, q_offset=6) is None


def attend(attention_mask, implementation="cotangent", T=7, H=4, Hkv=2, dtype=torch.float32, **options):
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, h, T, 8, generator=generator).to(dtype).requires_grad_() for h in (H, Hkv, Hkv))
    module = torch.nn.Module()
    module.is_causal, module.num_key_value_groups, module.training = True, H // Hkv, True
    function = transformers.AttentionInterface()[implementation]
    out, weights = function(module, q, k, v, attention_mask, **options)
    assert weights is None
    return (out, *torch.autograd.grad(out.square().sum(), (q, k, v)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_masks_of_four_axes(on_cpu, dtype):
    """A mask that the user gives: bool, or numbers with the lowest number of a dtype. A hidden row gives 0."""
    keep = torch.rand(2, 1, 7, 7) < 0.6
    keep[..., 0] = True
    numbers = torch.zeros(2, 1, 7, 7, dtype=dtype).masked_fill(~keep, torch.finfo(dtype).min)
    close = dict(rtol=2e-2, atol=2e-2) if dtype != torch.float32 else dict(rtol=1e-4, atol=1e-5)
    for a, b in zip(attend(keep, dtype=dtype), attend(keep, "sdpa", dtype=dtype)):
        torch.testing.assert_close(a, b, **close)
    for a, b in zip(attend(keep, dtype=dtype), attend(numbers, dtype=dtype)):
        assert torch.equal(a, b)
    hidden = torch.full((2, 1, 7, 7), torch.finfo(dtype).min, dtype=dtype)
    assert all((t == 0).all() for t in attend(hidden, dtype=dtype))


def test_mask_moves_with_its_description(on_cpu):
    """Models on several devices move the mask from layer to layer."""
    mask = integration.attention_mask(batch_size=2, q_length=3, kv_length=9)  # a static cache
    copy = mask.to("cpu", copy=True)
    assert copy is not mask and copy._cotangent == mask._cotangent
    tokens = torch.tensor([[True] * 3, [False, True, True]])
    mask = integration.attention_mask(batch_size=2, q_length=3, kv_length=3, attention_mask=tokens)
    assert torch.equal(mask, tokens) and type(mask & tokens) is torch.Tensor
    moved = mask.to("meta")._cotangent
    assert moved.padding.is_meta and moved.segments.used.is_meta and moved.segments.max_seqlen == mask._cotangent.segments.max_seqlen


def test_mask_without_its_attribute(on_cpu):
    """A copy of a mask [B,Tk] has only the tokens. The rest follows from is_causal and sliding_window."""
    tokens = torch.tensor([[True] * 7, [False] * 2 + [True] * 5])
    full = tokens[:, None, None, :] & torch.ones(7, 7, dtype=torch.bool).tril().triu(-2)
    real = tokens[..., None, None]
    found, expected = attend(tokens, sliding_window=3)[0], attend(full)[0]
    torch.testing.assert_close(found * real, expected * real)


def test_window_without_a_mask(on_cpu):
    band = torch.ones(7, 7, dtype=torch.bool).tril().triu(-2)[None, None]
    for a, b in zip(attend(None, sliding_window=3), attend(band)):
        torch.testing.assert_close(a, b)
    band = torch.ones(7, 7, dtype=torch.bool).triu(-2).tril(2)[None, None]
    for a, b in zip(attend(None, sliding_window=3, is_causal=False), attend(band)):
        torch.testing.assert_close(a, b)


def test_position_bias(on_cpu):
    bias = torch.randn(1, 4, 7, 7, requires_grad=True)
    for a, b in zip(attend(None, position_bias=bias), attend(None, "sdpa", position_bias=bias)):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    attend_bias = torch.autograd.grad(forward_with(bias), bias)[0]
    assert attend_bias.abs().sum() > 0


def forward_with(bias):
    module = torch.nn.Module()
    q = torch.randn(2, 4, 7, 8)
    return integration.attention_forward(module, q, q, q, None, position_bias=bias)[0].square().sum()


def test_dropout(on_cpu):
    """Dropout reaches the kernel in training alone, and follows torch.manual_seed."""
    model = make("llama", torch.float32, "cotangent", attention_dropout=0.5)
    tokens = inputs()["input_ids"]

    def logits(seed):
        torch.manual_seed(seed)
        with torch.no_grad():
            return model(tokens).logits

    assert torch.equal(logits(1), logits(1)) and not torch.equal(logits(1), logits(2))
    model.eval()
    assert torch.equal(logits(1), logits(2))
    v = torch.ones(1, 1, 64, 8)
    out = integration.attention_forward(model, torch.randn(1, 1, 64, 8), torch.randn(1, 1, 64, 8), v, None, dropout=0.5)[0]
    assert 0.8 < out[:, 32:].mean() < 1.2 and out.std() > 0.05


def test_encoder_and_cross_attention(on_cpu):
    """A bidirectional encoder with padding, and an encoder with a decoder: T5 has a position bias."""
    from transformers.models.bert import BertConfig, BertModel
    from transformers.models.t5 import T5Config, T5ForConditionalGeneration

    tokens, mask = (inputs("right")[n] for n in ("input_ids", "attention_mask"))
    sizes = dict(vocab_size=61, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
    small = dict(vocab_size=61, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)

    def results(implementation):
        torch.manual_seed(0)
        bert = BertModel(BertConfig(**sizes, attn_implementation=implementation)).eval()
        t5 = T5ForConditionalGeneration(T5Config(**small, attn_implementation=implementation)).eval()
        recorder = OpRecorder()
        with torch.no_grad(), recorder:
            states = bert(tokens, attention_mask=mask).last_hidden_state[mask.bool()]
            logits = t5(input_ids=tokens, attention_mask=mask, decoder_input_ids=tokens[:, :5]).logits
        return states, logits, recorder.names

    (states, logits, names), (expected, expected_logits, _) = results("cotangent"), results("eager")
    assert "attention_forward" in names
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(logits, expected_logits, rtol=1e-4, atol=1e-4)


def test_compiled_and_checkpointed(on_cpu):
    batch = inputs("left")
    expected = train(make("mistral", torch.float32, "cotangent"), batch)
    model = make("mistral", torch.float32, "cotangent")
    model.activation_checkpointing_enable()
    found = train(model, batch)
    assert torch.equal(found[0], expected[0]) and all(torch.equal(g, expected[1][n]) for n, g in found[1].items())
    model = make("mistral", torch.float32, "cotangent").eval()
    arguments = dict(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], use_cache=False)
    real = batch["attention_mask"].bool()
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager")(**arguments).logits
        torch.testing.assert_close(compiled[real], model(**arguments).logits[real], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("use_cache", [False, True])
def test_compiled_packed_sequences(on_cpu, name, use_cache):
    """With cu_seq_lens_q, a compiled model does not attend to other sequences, whether the mask has them or not."""
    lengths, batch = packed()
    model = make(name, torch.float64, "cotangent").eval()
    ends = torch.tensor([0, 4, 11, 13], dtype=torch.int32)
    extra = dict(cu_seq_lens_q=ends, cu_seq_lens_k=ends.clone(), max_length_q=7, max_length_k=7, use_cache=use_cache)
    with torch.no_grad():
        parts = [model(input_ids=part).logits[0] for part in batch["input_ids"].split(lengths, 1)]
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        logits = compiled(input_ids=batch["input_ids"], position_ids=batch["position_ids"], **extra).logits[0]
    torch.testing.assert_close(torch.cat(parts), logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_a_bias(on_cpu, monkeypatch, dynamic):
    """A compiled model without attention_mask has a plain causal mask, also behind the tokens of a cache."""
    torch.compiler.reset()
    model, tokens = make("llama", torch.float64, "cotangent").eval(), inputs("right")["input_ids"]
    with torch.no_grad():
        expected = model(input_ids=tokens).logits
        monkeypatch.setattr(integration, "_as_bias", lambda *_: pytest.fail("a mask was made"))
        compiled = torch.compile(model, backend="eager", fullgraph=True, dynamic=dynamic)
        first = compiled(input_ids=tokens[:, :5])
        rest = compiled(input_ids=tokens[:, 5:], past_key_values=first.past_key_values)
    torch.testing.assert_close(torch.cat([first.logits, rest.logits], 1), expected, rtol=1e-5, atol=1e-5)


def test_compiled_training_and_decoding(on_cpu):
    """A compiled model has one graph. There padding and windows are biases, because their values are not known."""
    batch = inputs("left")
    expected = train(make("gemma2", torch.float32, "cotangent"), batch)
    model = make("gemma2", torch.float32, "cotangent")
    model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
    assert max(errors(train(model, batch), expected)) < 1e-5
    tokens = generate(make("gemma3", torch.float32, "eager"), batch)
    model = make("gemma3", torch.float32, "cotangent")
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    assert torch.equal(generate(model, batch, cache_implementation="static"), tokens)


def test_refusals(on_cpu):
    q = torch.randn(1, 2, 3, 8)
    for name in ("cache", "block_table", "head_mask", "output_attentions"):
        with pytest.raises(NotImplementedError, match=f"{name} is not supported"):
            integration.attention_forward(torch.nn.Module(), q, q, q, None, **{name: True})
    ends, others = torch.tensor([0, 1, 3]), torch.tensor([0, 2, 3])
    with pytest.raises(NotImplementedError, match="cotangent attention: cu_seq_lens_k must equal cu_seq_lens_q"):
        integration.attention_forward(torch.nn.Module(), q, q, q, None, cu_seq_lens_q=ends, cu_seq_lens_k=others,
                                      max_length_q=2, max_length_k=2)  # fmt: skip
    with pytest.raises(NotImplementedError, match="position_bias is not supported"):
        integration.attention_forward(torch.nn.Module(), q, q, q, None, cu_seq_lens_q=ends, cu_seq_lens_k=ends,
                                      max_length_q=2, position_bias=torch.zeros(1, 2, 3, 3))  # fmt: skip


@pytest.mark.parametrize("padding", [False, True])
def test_models_that_compute_their_attention_themselves(on_cpu, padding):
    """They would use None as no mask at all, and a MaskTensor as numbers."""
    config = transformers.BloomConfig(vocab_size=61, hidden_size=32, n_layer=1, n_head=4)
    model = transformers.BloomForCausalLM._from_config(config, attn_implementation="cotangent")
    mask = torch.ones(2, 6, dtype=torch.int64)
    mask[1, 4:] = 0 if padding else 1
    with pytest.raises(NotImplementedError, match="the model of BloomConfig computes its attention itself"):
        model(torch.ones(2, 6, dtype=torch.int64), attention_mask=mask)


def llama_pair():
    """The same model with PyTorch's attention and with cotangent's."""
    model = make("llama", torch.float32, "cotangent").eval()
    other = make("llama", torch.float32, "sdpa").eval()
    other.load_state_dict(model.state_dict())
    return model, other


def test_positions_beside_an_attention_mask(on_cpu):
    """Positions pack sequences only without attention_mask, as in the other implementations."""
    model, other = llama_pair()
    ids, positions = torch.randint(3, 61, (2, 8)), torch.tensor([[0, 1, 1, 1, 2, 3, 4, 5]]).expand(2, 8)
    for mask in (None, torch.ones(2, 8, dtype=torch.int64)):
        options = dict(position_ids=positions, attention_mask=mask, use_cache=False)
        with torch.no_grad():
            torch.testing.assert_close(model(ids, **options).logits, other(ids, **options).logits, rtol=1e-4, atol=1e-5)


def test_masks_that_change_in_place(on_cpu):
    model, other = llama_pair()
    ids, positions = torch.randint(3, 61, (1, 8)), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    mask = torch.ones(1, 1, 8, 8, dtype=torch.bool).tril()

    def same(**options):
        with torch.no_grad():
            logits = (m(ids, use_cache=False, **options).logits for m in (model, other))
            torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-5)

    with torch.inference_mode():  # what is kept here cannot be used for training
        model(ids, attention_mask=mask, use_cache=False)
        model(ids, position_ids=positions, use_cache=False)
    same(attention_mask=mask)
    same(position_ids=positions)
    mask[..., 1:, 0] = False
    positions.copy_(torch.tensor([[0, 1, 0, 1, 2, 3, 4, 5]]))
    same(attention_mask=mask)
    same(position_ids=positions)
    model(ids, attention_mask=mask, use_cache=False).logits.sum().backward()


def test_disable(on_cpu):
    """The name and the convolution are gone. What compat.install() installed before enable() stays."""
    import sys

    names = transformers.AttentionInterface(), transformers.AttentionMaskInterface()
    assert all("cotangent" in interface for interface in names) and "causal_conv1d" in sys.modules
    integration.disable()
    assert not any("cotangent" in interface for interface in names) and "causal_conv1d" not in sys.modules
    integration.disable()  # a second call has no effect
    model = make("llama", torch.float32, "sdpa")
    with pytest.raises(ValueError, match="cotangent"):
        model.set_attn_implementation("cotangent")
    compat.install()
    integration.enable()
    model.set_attn_implementation("cotangent")
    model.set_attn_implementation("sdpa")
    integration.disable()
    assert {"causal_conv1d", "flash_attn"} <= sys.modules.keys()
    compat.uninstall("causal_conv1d")
    assert "causal_conv1d" not in sys.modules and "flash_attn" in sys.modules
    with pytest.raises(ValueError, match="uninstall: 'flash' is not one of"):
        compat.uninstall("flash")


def test_a_model_imported_before_enable(on_cpu):
    with without_cotangent():
        forget()
        make("mamba", torch.float32, "eager")
        with pytest.warns(UserWarning, match="modeling_mamba was imported before enable"):
            integration.enable()


# ---- flash_attention_2, 3 and 4 ---------------------------------------------------------------------------


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """transformers asks torch for a GPU before it imports flash_attn. The models of these tests are on the CPU."""
    import transformers.utils.import_utils as utils

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *arguments: (9, 0))
    utils.is_torch_cuda_available.cache_clear()
    yield
    monkeypatch.undo()
    utils.is_torch_cuda_available.cache_clear()
    compat.uninstall()


@pytest.mark.parametrize("version", [2, 3, 4])
def test_flash_attention(on_cpu, as_on_a_gpu, version):
    compat.install()
    import transformers.utils.import_utils as utils

    assert getattr(utils, f"is_flash_attn_{version}_available")()
    name = "gpt_oss" if version == 4 else "mistral"
    for padding in (None, "left"):
        batch = inputs(padding)
        expected = train(make(name, torch.float32, "cotangent"), batch)
        recorder = OpRecorder()
        found = train(make(name, torch.float32, f"flash_attention_{version}"), batch, recorder)
        assert {"attention_forward", "attention_backward"} <= recorder.names
        assert max(errors(found, expected)) < 1e-5
    compat.uninstall()
    assert not getattr(utils, f"is_flash_attn_{version}_available")()
