# SPDX-License-Identifier: Apache-2.0
"""Passes a wrong type, rank, dtype or device for every argument of every public function. The message must name it."""
import inspect
import re

import pytest
import torch
from test_torch import has_attention, randn
from torch._subclasses.fake_tensor import FakeTensorMode

import cotangent
from cotangent import _C
from cotangent.compat import causal_conv1d as compat_conv, flash_attn, flash_attn_interface, sdpa
from cotangent.compat import causal_conv1d_cpp as cpp, flash_attn_cute
from cotangent.ops import _define


def functions(device):
    """Public functions with all their arguments: (function, arguments, optional arguments)."""

    def f(*shape):
        return randn(device, *shape)

    def i(*values):
        return torch.tensor(values, dtype=torch.int32, device=device)

    x, weight, bias, state = f(2, 6, 9), f(6, 4), f(6), f(2, 6, 3)
    parts = torch.zeros(2, 9, dtype=torch.int32, device=device)
    yield cotangent.causal_conv1d, dict(
        x=x, weight=weight, bias=bias, activation="silu", initial_state=state, seq_idx=parts, return_final_state=True
    )
    yield cotangent.causal_conv1d, dict(x=x[:1], weight=weight, cu_seqlens=i(0, 4, 9))
    yield cotangent.causal_conv1d_update, dict(
        x=x[:, :, 0], conv_state=state, weight=weight, bias=bias, activation="silu", cache_seqlens=i(3, 4),
        conv_state_indices=i(1, 0),
    )  # fmt: skip
    yield cotangent.causal_conv1d_dense, dict(
        x=x, weight=f(5, 6, 4), bias=f(5), activation="silu", initial_state=state, return_final_state=True
    )
    r = f(4, 10)
    yield cotangent.dropout, dict(
        x=r, p=0.5, training=True, bias=f(10), activation="relu", residual=f(4, 10), scale=2.0, seed=1, offset=2,
        seed_tensor=i(1, 0), offset_tensor=i(1, 0), return_mask="bits",
    )  # fmt: skip
    yield cotangent.dropout, dict(x=r, p=0.5, mask=r > 0)
    yield cotangent.dropout, dict(x=r, p=0.5, mask_bits=torch.zeros(4, 2, dtype=torch.uint8, device=device))
    yield cotangent.dropout_scale, dict(p=0.5)
    streams, h_post, h_res = f(2, 3, 4, 8), f(2, 3, 4), f(2, 3, 4, 4)
    yield cotangent.mhc_pre, dict(
        x=streams, phi=f(24, 32), alpha=f(3), bias=f(24), gamma=f(4, 8), sinkhorn=True, sinkhorn_iterations=3,
        sinkhorn_eps=1e-6, norm_eps=1e-6, hc_eps=1e-6, post_scale=2.0,
    )  # fmt: skip
    yield cotangent.mhc_post_pre, dict(
        x=streams, f=f(2, 3, 8), h_post=h_post, h_res=h_res, phi=f(24, 32), alpha=f(3), bias=f(24), gamma=f(4, 8),
        h_res_is_out_in=False, sinkhorn=True, sinkhorn_iterations=3, sinkhorn_eps=1e-6, norm_eps=1e-6, hc_eps=1e-6,
        post_scale=2.0,
    )  # fmt: skip
    yield cotangent.mhc_sinkhorn, dict(h_res_logits=h_res, iterations=3, eps=1e-6)
    yield cotangent.mhc_post, dict(x=streams, f=f(2, 3, 8), h_post=h_post, h_res=h_res, h_res_is_out_in=False)
    yield compat_conv.causal_conv1d_fn, dict(
        x=x, weight=weight, bias=bias, seq_idx=parts, initial_states=state, return_final_states=True,
        final_states_out=torch.zeros_like(state), activation="silu",
    )  # fmt: skip
    yield compat_conv.causal_conv1d_update, dict(x=x[:, :, 0], conv_state=state, weight=weight, bias=bias)
    yield compat_conv.causal_conv1d_varlen_states, dict(x=f(9, 6), cu_seqlens=i(0, 9), state_len=3)
    if not has_attention(device):
        return
    q, k, v = f(2, 5, 4, 8), f(2, 7, 2, 8), f(2, 7, 2, 8)
    options = dict(causal=True, window=(3, 0), scale=0.5, softcap=3.0, dropout_p=0.1, dropout_seed=1, dropout_offset=2,
                   dropout_seed_tensor=i(1, 0), dropout_offset_tensor=i(1, 0), deterministic=True, return_lse=True)  # fmt: skip
    yield cotangent.attention, dict(
        q=q, k=k, v=v, seqused_q=i(5, 3), seqused_k=i(7, 2), sink=f(4), alibi_slopes=f(4), attn_bias=f(2, 4, 5, 7),
        **options,
    )  # fmt: skip
    packed = dict(q=f(9, 4, 8), k=f(9, 2, 8), v=f(9, 2, 8), cu_seqlens_q=i(0, 4, 9), cu_seqlens_k=i(0, 4, 9), max_seqlen_q=5,
                  max_seqlen_k=5)  # fmt: skip
    yield cotangent.attention_varlen, dict(**packed, **options)
    heads = [t.transpose(1, 2) for t in (q, k, v)]
    yield sdpa.scaled_dot_product_attention, dict(
        query=heads[0], key=heads[1], value=heads[2], attn_mask=f(2, 4, 5, 7), dropout_p=0.1, scale=0.5, enable_gqa=True
    )
    yield sdpa.scaled_dot_product_attention, dict(query=heads[0], key=heads[0], value=heads[0], is_causal=True)
    flash = dict(softmax_scale=0.5, causal=True, window_size=(3, 0), softcap=3.0, return_attn_probs=True)
    slopes = dict(alibi_slopes=f(4), dropout_p=0.1)
    yield flash_attn.flash_attn_func, dict(q=q, k=k, v=v, **flash, **slopes)
    yield flash_attn.flash_attn_varlen_func, dict(**packed, **flash, **slopes)
    yield flash_attn.flash_attn_qkvpacked_func, dict(qkv=f(2, 5, 3, 4, 8), **flash)
    yield flash_attn.flash_attn_kvpacked_func, dict(q=q, kv=f(2, 7, 2, 2, 8), **flash)
    yield flash_attn.flash_attn_with_kvcache, dict(
        q=q[:, :1], k_cache=k, v_cache=v, k=k[:, :1], v=v[:, :1], cache_seqlens=i(3, 2), softmax_scale=0.5, causal=True,
        window_size=(3, 0), softcap=3.0, alibi_slopes=f(4),
    )  # fmt: skip
    yield flash_attn_interface.flash_attn_func, dict(q=q, k=k, v=v, **flash)
    yield flash_attn_interface.flash_attn_varlen_func, dict(**packed, **flash)
    yield flash_attn_interface.flash_attn_qkvpacked_func, dict(qkv=f(2, 5, 8, 8), num_heads_q=4, softmax_scale=0.5)
    yield flash_attn_interface.flash_attn_with_kvcache, dict(
        q=q[:, :1], k_cache=k, v_cache=v, cache_seqlens=i(3, 2), softmax_scale=0.5, causal=True, window_size=(3, 0), softcap=3.0
    )
    cute = dict(softmax_scale=0.5, causal=True, window_size=(3, 0), softcap=3.0, learnable_sink=f(4))
    yield flash_attn_cute.flash_attn_func, dict(q=q, k=k, v=v, **cute)
    yield flash_attn_cute.flash_attn_varlen_func, dict(**packed, **cute, seqused_q=i(4, 3), seqused_k=i(3, 5))
    x, weight, state = f(2, 8, 11), f(8, 4), f(2, 8, 3)
    plain = dict(x=x, weight=weight, bias=f(8), initial_states=state, silu_activation=True)
    plain["seq_idx"] = torch.zeros(2, 11, dtype=torch.int32, device=device)
    yield cpp.causal_conv1d_fwd_function, dict(final_states_out=f(2, 8, 3), **plain)
    yield cpp.causal_conv1d_bwd_function, dict(dout=f(2, 8, 11), dfinal_states=f(2, 8, 3), dx=f(2, 8, 11), return_dinitial_states=True,
                                               **plain)  # fmt: skip


class Other:
    """A type that no argument has."""


WRONG_TENSORS = {
    "a list": lambda t: t.tolist(),
    "an array": lambda t: t.cpu().numpy(),
    "a string": lambda t: "x",
    "a number": lambda t: 4,
    "another object": lambda t: Other(),
    "on meta": lambda t: t.to("meta"),
    "an axis more": lambda t: t[None],
    "two axes more": lambda t: t[None, None],
    "no axes": lambda t: t.flatten()[0],
    "complex": lambda t: t.to(torch.complex64),
    "sparse": lambda t: t.to_sparse(),
    "int64": lambda t: t.long(),
}
# Valid calls: a padding mask or a batch of states with fewer axes, a residual or a parameter of mhc of integers, batch
# axes of scaled_dot_product_attention that broadcast.
ALLOWED = {
    ("x", "an axis more"), ("x", "two axes more"), ("phi", "int64"), ("alpha", "int64"), ("bias", "int64"),
    ("gamma", "int64"), ("f", "int64"), ("residual", "int64"), ("attn_mask", "no axes"), ("cache_seqlens", "int64"),
    ("cache_seqlens", "a number"),
    ("cu_seqlens", "int64"), ("final_states_out", "int64"), ("final_states_out", "complex"), ("x", "int64"),
    ("x", "complex"),
    *((name, what) for name in ("query", "key", "value") for what in ("an axis more", "two axes more")),
}  # fmt: skip


def refusal(function, arguments, name, value):
    """The message of a call with the value as that argument; None if the call succeeds."""
    given = {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in arguments.items()}
    given[name] = value
    try:
        function(**given)
    except (NotImplementedError, TypeError, ValueError) as error:
        assert not isinstance(error, UnicodeError)
        return f"{type(error).__name__}: {error}".splitlines()[0]
    except Exception as error:
        return f"not a refusal: {type(error).__name__}: {error}".splitlines()[0]
    return None


def is_named(names, said):
    """Whether one of the names is in the message."""
    return re.search(rf"\b({'|'.join(names)})\b", said) is not None and "not a refusal" not in said


def test_wrong_tensors_are_refused_by_name(device):
    faults, refused = [], 0
    for function, arguments in functions(device):
        function(**{n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in arguments.items()})
        for name, good in arguments.items():
            if not isinstance(good, torch.Tensor):
                continue
            tensors = [n for n, v in arguments.items() if isinstance(v, torch.Tensor)]
            for what, spoil in WRONG_TENSORS.items():
                if what == "on meta" and len(tensors) == 1:
                    continue  # all dtypes are equal
                said = refusal(function, arguments, name, spoil(good))
                where = f"{function.__module__}.{function.__name__}({name}={what})"
                # With a wrong rank, the message may name another tensor. It contains both ranks in either case.
                if said is not None and not is_named(tensors if "axes" in what or "axis" in what else [name], said):
                    faults.append(f"{where}: {said}")
                elif said is None and (name, what) not in ALLOWED and good.dtype != torch.int64:
                    faults.append(f"{where}: served")
                refused += said is not None
    assert not faults, f"{len(faults)} of {refused}:\n" + "\n".join(faults)
    assert refused > 500


def test_wrong_numbers_are_refused_by_name(device):
    faults, refused = [], 0
    for function, arguments in functions(device):
        parameters = inspect.signature(function).parameters
        for name, good in arguments.items():
            if isinstance(good, torch.Tensor):
                continue
            wrong = ["a string", [1.5], Other()]
            if isinstance(good, tuple):
                wrong += [4, (1,), (1, 2, 3), ("a", "b")]
            elif isinstance(good, str):
                wrong += [4, {}]
            else:
                wrong += [None] if parameters[name].default is not None else []
                wrong += [1.5, 2**70] if type(good) is int else []
                wrong += [float("nan"), -1.0] if type(good) is float and name not in ("scale", "softmax_scale") else []
            for value in wrong:
                if value == 2**70 and name in ("seed", "offset", "dropout_seed", "dropout_offset"):
                    continue  # they are taken modulo 2^64
                said = refusal(function, arguments, name, value)
                where = f"{function.__module__}.{function.__name__}({name}={value!r})"
                if said is None or not is_named([name], said):
                    faults.append(f"{where}: {said or 'served'}")
                refused += said is not None
    assert not faults, f"{len(faults)} of {refused}:\n" + "\n".join(faults)
    assert refused > 100


def test_meta_beside_another_device(device):
    x, weight = randn(device, 2, 6, 9), randn(device, 6, 4)
    with pytest.raises(ValueError, match=r"causal_conv1d: weight is on meta, x is on c"):
        cotangent.causal_conv1d(x, weight.to("meta"))
    with pytest.raises(ValueError, match=r"causal_conv1d: weight is on c\w+(:0)?, x is on meta"):
        cotangent.causal_conv1d(x.to("meta"), weight)
    assert cotangent.causal_conv1d(x.to("meta"), weight.to("meta")).device.type == "meta"
    with pytest.raises(ValueError, match="causal_conv1d: x has shape"):
        cotangent.causal_conv1d(x[0, 0].to("meta"), weight.to("meta"), return_final_state=True)


def test_tensors_of_two_devices_without_a_gpu():
    """Uses fake tensors, which need no device."""
    with FakeTensorMode():
        for one, other in (("cpu", "cuda"), ("cuda", "cpu")):
            x, weight = torch.empty(2, 6, 9, device=one), torch.empty(6, 4, device=other)
            with pytest.raises(ValueError, match=r"weight is on c\w+(:0)?, x is on c\w+(:0)?"):
                torch.ops.cotangent.causal_conv1d_forward(x, weight, None, None, None, None, 0, False)


def test_the_gpus_kernel_runs_on_the_device_of_a_gpus_tensor(monkeypatch):
    """x on the CPU and a weight on a GPU: the dispatcher calls the CUDA kernel, whose error names x."""
    found = []

    class Library:
        @staticmethod
        def run_cuda(plan, device, *others):
            found.append(device)
            _C.run_cuda(plan, device, *others)

    monkeypatch.setattr(_define, "_C", Library)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    plan = _C.plan("causal_conv1d_forward", ("x", "weight", "y"))
    op = torch.ops.cotangent.causal_conv1d_forward.default
    _, kernel = _define._kernels(plan, lambda x, weight: torch.empty_like(x), op, None)
    with FakeTensorMode():
        weight = torch.empty(6, 4, device="cuda:0")
    with pytest.raises(ValueError, match="causal_conv1d_forward: x is on the CPU, expected cuda:0"):
        kernel(torch.empty(2, 6, 9), weight)
    assert found == [0]


def test_a_dtype_that_the_library_does_not_have(device):
    """The message names the dtypes that the argument can have."""
    x, weight, q = randn(device, 2, 6, 9), randn(device, 6, 4), randn(device, 3, 2, 8)
    long = dict(dtype=torch.int64, device=device)
    with pytest.raises(TypeError, match="seq_idx has dtype torch.int64, expected torch.int32$"):
        cotangent.causal_conv1d(x, weight, seq_idx=torch.zeros(2, 9, **long))
    with pytest.raises(TypeError, match="mask has dtype torch.int64, expected torch.uint8 or torch.bool$"):
        cotangent.dropout(x, 0.5, mask=torch.zeros(2, 6, 9, **long))
    numbers = "torch.float32, torch.float16, torch.bfloat16 or torch.float64$"
    with pytest.raises(TypeError, match=f"weight has dtype torch.int64, expected {numbers}"):
        cotangent.causal_conv1d(x, weight.long())
    if has_attention(device):
        with pytest.raises(TypeError, match="cu_seqlens_q has dtype torch.int64, expected torch.int32$"):
            cotangent.attention_varlen(q, q, q, *2 * [torch.tensor([0, 3], **long)], 3, 3)


def test_a_bool_mask_is_refused_as_attn_bias(device):
    if not has_attention(device):
        pytest.skip("no kernel of this device supports attention yet")
    q, cu = randn(device, 3, 2, 8), torch.tensor([0, 3], dtype=torch.int32, device=device)
    mask = torch.ones(1, 1, 3, 3, dtype=torch.bool, device=device)
    message = "attn_bias has dtype torch.bool, expected a float tensor: 0, or -inf where a key is masked$"
    with pytest.raises(TypeError, match=f"^attention: {message}"):
        cotangent.attention(q[None], q[None], q[None], attn_bias=mask)
    with pytest.raises(TypeError, match=f"^attention_varlen: {message}"):
        cotangent.attention_varlen(q, q, q, cu, cu, 3, 3, attn_bias=mask)


@pytest.mark.parametrize("error, message, options", [
    (ValueError, "window[1] is 5, expected 0 or -1 with causal", dict(window=(3, 5), causal=True)),
    (ValueError, "window[0] is -2, expected -1 (all) or more", dict(window=(-2, 0))),
    (ValueError, "window[1] is -2, expected -1 (all) or more", dict(window=(0, -2))),
    (TypeError, "dropout_seed is a str, expected an integer", dict(dropout_seed="x", dropout_p=0.5)),
    (TypeError, "dropout_offset is a str, expected an integer", dict(dropout_offset="x", dropout_seed=1, dropout_p=0.5)),
    (ValueError, "dropout_seed_tensor has 3 words, expected 2 (low, high)",
     dict(dropout_seed_tensor=torch.zeros(3, dtype=torch.int32), dropout_p=0.5)),
    (ValueError, "dropout_offset_tensor has 3 words, expected 2 (low, high)",
     dict(dropout_offset_tensor=torch.zeros(3, dtype=torch.int32), dropout_seed=1, dropout_p=0.5)),
    (ValueError, "scale is 1e-31, expected None or a magnitude from 1e-30 to 1e30", dict(scale=1e-31)),
    (ValueError, "softcap is -1, expected 0 (none) or 1e-30 to 1e30", dict(softcap=-1.0)),
])  # fmt: skip
def test_attention_names_the_arguments_of_python(device, error, message, options):
    """The op has other names: bias, window_left, window_right, and a scale of 0 for None."""
    if not has_attention(device):
        pytest.skip("no kernel of this device supports attention yet")
    q, cu = randn(device, 1, 3, 2, 8), torch.tensor([0, 3], dtype=torch.int32, device=device)
    options = {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in options.items()}
    for name, call in (("attention", lambda: cotangent.attention(q, q, q, **options)),
                       ("attention_varlen", lambda: cotangent.attention_varlen(q[0], q[0], q[0], cu, cu, 3, 3, **options))):  # fmt: skip
        with pytest.raises(error, match=f"^{re.escape(f'{name}: {message}')}$"):
            call()


def test_errors_have_the_names_of_python(device):
    """The library begins with causal_conv1d_forward and so on, and writes f16. torch.ops keeps these names."""
    x, weight = randn(device, 2, 6, 9), randn(device, 6, 4)
    with pytest.raises(TypeError, match="^causal_conv1d_dense: weight has dtype torch.float64, x has torch.float32"):
        cotangent.causal_conv1d_dense(x, randn(device, 6, 6, 4).double())
    with pytest.raises(ValueError, match="^causal_conv1d: weight has "):
        cotangent.causal_conv1d(x, weight[:5])
    with pytest.raises(ValueError, match="^causal_conv1d_forward: weight has "):
        torch.ops.cotangent.causal_conv1d_forward(x, weight[:5], None, None, None, None, 0, False)
    if has_attention(device):
        q = randn(device, 1, 3, 2, 8)
        with pytest.raises(TypeError, match="^attention: k has dtype torch.float16, expected q's torch.float32$"):
            cotangent.attention(q, q.half(), q)


@pytest.mark.parametrize("message, options", [
    ("scale is 0", dict(scale=0.0)),
    ("window is 4", dict(window=4)),
    ("dropout_p is a str", dict(dropout_p="x")),
    ("deterministic is None", dict(deterministic=None)),
    ("return_lse is None", dict(return_lse=None)),
])  # fmt: skip
def test_attention_varlen_begins_with_its_own_name(device, message, options):
    if not has_attention(device):
        pytest.skip("no kernel of this device supports attention yet")
    q, cu = randn(device, 3, 2, 8), torch.tensor([0, 3], dtype=torch.int32, device=device)
    with pytest.raises((TypeError, ValueError), match=f"^attention_varlen: {message}"):
        cotangent.attention_varlen(q, q, q, cu, cu, 3, 3, **options)
    with pytest.raises((TypeError, ValueError), match=f"^attention: {message}"):
        cotangent.attention(q[None], q[None], q[None], **options)


def test_flash_attn_names_the_sides_of_a_window(device):
    if not has_attention(device):
        pytest.skip("no kernel of this device supports attention yet")
    q = randn(device, 1, 3, 2, 8)
    for side, window in ((0, (2**70, 0)), (1, (0, 2**70))):
        with pytest.raises(ValueError, match=rf"^flash_attn_func: window_size\[{side}\] is "):
            flash_attn.flash_attn_func(q, q, q, window_size=window)


def test_scale_0_of_attention_is_refused(device):
    """The library treats a scale of 0 as unset and would use 1/sqrt(d)."""
    if not has_attention(device):
        pytest.skip("no kernel of this device supports attention yet")
    q = randn(device, 1, 3, 2, 8)
    with pytest.raises(ValueError, match="attention: scale is 0"):
        cotangent.attention(q, q, q, scale=0.0)
    with pytest.raises(ValueError, match="flash_attn_func: softmax_scale is 0"):
        flash_attn.flash_attn_func(q, q, q, softmax_scale=0.0)
