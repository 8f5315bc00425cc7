# SPDX-License-Identifier: Apache-2.0
"""Run by test_distributed.py on several processes, which are the ranks of a gloo group:

    distributed_ranks.py SECTION,SECTION... RANK RANKS FOLDER [cuda]
    torchrun distributed_ranks.py page NUMBER

cuda: each rank has a GPU of its own, and the group has NCCL too.

Each rank computes the single call on the whole sequence too, and compares."""
import os
import re
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from support import UNITS

import cotangent
import cotangent.distributed as cp
from cotangent import _C
from cotangent.compat.causal_conv1d import causal_conv1d_fn
from cotangent.compat.causal_conv1d_cpp import causal_conv1d_fwd_function

T = 37  # no multiple of the number of ranks
DEVICE = torch.device("cpu")


def leaf(x):
    return x.detach().clone().requires_grad_()


def within(found, single, exact, about):
    """The norm rule of docs/guide/accuracy.md, with the single call instead of the scalar kernel. Two units instead
    of its terms for rounded results and cancelled sums."""
    assert found.shape == exact.shape, f"{about}: shape {tuple(found.shape)}, expected {tuple(exact.shape)}"
    finite = exact.isfinite()
    assert torch.equal(found[~finite].double(), exact[~finite]), f"{about}: other infinities"
    error, allowed = ((x[finite].double() - exact[finite]).norm().item() for x in (found, single))
    limit = 1.5 * allowed + 2 * UNITS[found.dtype] * exact[finite].norm().item()
    assert error <= limit, f"{about}: error {error:.3g}, the single call has {allowed:.3g}"


def compare(about, tensors, axes, call, single, place, results=1):
    """call(*parts) over the group and single(*wholes). tensors: inputs by name; axes: the cut axis of an input, or None
    for an input that all ranks share. Results have the axes of `results`."""
    names = list(tensors)
    generator = torch.Generator().manual_seed(5)
    gradients = None

    def whole(dtype):
        nonlocal gradients
        place = "cpu" if dtype else DEVICE  # a GPU has no float64 kernels
        leaves = {n: leaf(x.to(place, dtype or x.dtype)) for n, x in tensors.items()}
        outputs = single(**leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        if gradients is None:
            gradients = [torch.randn(y.shape, generator=generator).to(y.dtype) for y in outputs]
        torch.autograd.backward(outputs, [g.to(y) for g, y in zip(gradients, outputs)])
        return [y.detach().cpu() for y in outputs], [x.grad.cpu() for x in leaves.values()]

    def parts():
        leaves = {
            n: leaf((x if axes[n] is None else cp.shard(x, dim=axes[n], **place)).to(DEVICE)) for n, x in tensors.items()
        }
        outputs = call(**leaves)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        backward = [g if axis is None else cp.shard(g, dim=axis, **place) for g, axis in zip(gradients, axes["results"])]
        if None in axes["results"]:  # all ranks share the result: the gradients are added
            backward = [g / dist.get_world_size() if a is None else g for g, a in zip(backward, axes["results"])]
        torch.autograd.backward(outputs, [g.to(DEVICE) for g in backward])
        cp.check_group()
        return [y.detach() for y in outputs], [x.grad for x in leaves.values()]

    plain = whole(None)
    exact = whole(torch.float64)
    ours = parts()
    again = parts()
    for kind, a, b in zip(("result", "gradient"), ours, again):
        assert all(torch.equal(x, y) for x, y in zip(a, b)), f"{about}: other bits of a {kind} in the second run"

    def collected(x, axis, length):
        return (x if axis is None else cp.unshard(x, dim=axis, length=length, **place)).cpu()

    for i, (y, p, e, axis) in enumerate(zip(ours[0], plain[0], exact[0], axes["results"])):
        within(collected(y, axis, None if axis is None else e.shape[axis]), p.detach(), e.detach(), f"{about}, result {i}")
    for name, x, p, e in zip(names, ours[1], plain[1], exact[1]):
        if axes[name] is None:
            x = cp.all_reduce(x.clone())
            if dist.get_rank() > 0 and not axes.get("partial"):
                assert not ours[1][names.index(name)].any(), f"{about}: {name} has a gradient on rank {dist.get_rank()}"
        within(collected(x, axes[name], e.shape[axes[name] or 0]), p, e, f"{about}, gradient of {name}")


# ---- attention --------------------------------------------------------------------------------------------------


def attention_inputs(dtype=torch.float32, B=2, H=4, Hkv=2, d=16):
    q, k, v = (torch.randn(B, T, h, d).to(dtype) for h in (H, Hkv, Hkv))
    return dict(q=q, k=k, v=v)


def check_attention(about, tensors=None, cut="zigzag", stripe=0, head_ranks=1, all_gather=False, **options):
    tensors = tensors or attention_inputs()
    place, division = dict(cut=cut, stripe=stripe), dict(head_ranks=head_ranks, all_gather=all_gather)
    axes = {"q": 1, "k": 1, "v": 1, "sink": None, "results": (1, 2)}
    axes["attn_bias"] = 2 if "attn_bias" in tensors and tensors["attn_bias"].shape[2] > 1 else None

    def call(**x):
        return cp.attention(**x, **place, **division, q_length=T, k_length=T, return_lse=True, **options_of(x["q"]))

    def options_of(q):
        return {n: moved(option, q) for n, option in options.items()}

    compare(f"attention, {about}", tensors, axes, call,
            lambda **x: cotangent.attention(**x, return_lse=True, **options_of(x["q"])), place)  # fmt: skip


def moved(option, like):
    """An option on the device of the inputs; float64 for float64 inputs."""
    if not isinstance(option, torch.Tensor):
        return option
    floats = option.is_floating_point() and like.dtype == torch.float64
    return option.to(like.device, torch.float64 if floats else option.dtype)


def attention(ranks):
    check_attention("causal, zigzag", causal=True)
    check_attention("causal, bf16", attention_inputs(torch.bfloat16), causal=True)
    check_attention("window, contiguous", cut="contiguous", window=(5, 0), causal=True)
    check_attention("window on both sides", cut="contiguous", window=(3, 6))
    check_attention("softcap, striped", cut="striped", stripe=4, causal=True, softcap=2.0, scale=0.4)
    check_attention("one key head", attention_inputs(Hkv=1))
    check_attention("sink and slopes", dict(attention_inputs(), sink=torch.randn(4)), causal=True, alibi_slopes=torch.rand(4))
    check_attention("heads", head_ranks=ranks, causal=True)
    if ranks == 4:
        check_attention("heads and ring", head_ranks=2, causal=True, window=(20, 0))
        check_attention("heads and all-gather", head_ranks=2, all_gather=True, causal=True, window=(20, 0))
    check_attention("all-gather, bf16", attention_inputs(torch.bfloat16), all_gather=True, causal=True)
    check_attention("all-gather, striped", cut="striped", stripe=4, all_gather=True, window=(3, 6))
    check_attention("all-gather, sink", dict(attention_inputs(), sink=torch.randn(4)), all_gather=True, causal=True)
    check_attention("all-gather, dropout", all_gather=True, causal=True, dropout_p=0.3, dropout_seed=7)
    for shape in ((2, 4, T, T), (1, 1, 1, T)):
        check_attention(f"attn_bias {shape}", dict(attention_inputs(), attn_bias=torch.randn(shape)), causal=True)
    check_attention("dropout", causal=True, dropout_p=0.3, dropout_seed=7, dropout_offset=3)
    check_attention("dropout, heads", causal=True, head_ranks=ranks, dropout_p=0.3, dropout_seed=7)
    used = torch.tensor([T, 20], dtype=torch.int32)
    check_attention("seqused", causal=True, seqused_q=used, seqused_k=used)

    ends = torch.tensor([0, 5, 5, 29, T], dtype=torch.int32)
    place = dict(cut="zigzag")
    packed = {n: x[0] for n, x in attention_inputs(B=1).items()}
    packed["sink"] = torch.randn(4)
    options = dict(causal=True, window=(9, 0), return_lse=True)
    compare("attention, packed", packed, {"q": 0, "k": 0, "v": 0, "sink": None, "results": (0, 1)},
            lambda sink, **x: cp.attention_varlen(*x.values(), *2 * [ends.to(sink.device)], 24, 24, q_length=T, k_length=T, sink=sink, **place, **options),
            lambda sink, **x: cotangent.attention_varlen(*x.values(), *2 * [ends.to(sink.device)], 24, 24, sink=sink, **options), place)  # fmt: skip

    x = {n: t.to(DEVICE) for n, t in attention_inputs().items()}
    parts = [cp.shard(t, dim=1, cut="contiguous") for t in x.values()]
    # Under autocast the call goes through the dispatcher, whose numbers are signed.
    with torch.autocast(DEVICE.type, torch.bfloat16):
        outs = [cp.attention(*parts, q_length=T, k_length=T, cut="contiguous", dropout_p=0.5, dropout_seed=seed)
                for seed in (2**64 - 1, -1)]  # fmt: skip
    assert torch.equal(*outs)
    # Without a seed all ranks use that of rank 0.
    torch.manual_seed(dist.get_rank())
    found = cp.attention(*parts, q_length=T, k_length=T, cut="contiguous", dropout_p=0.5)
    torch.manual_seed(0)
    single = cotangent.attention(*x.values(), dropout_p=0.5)
    torch.testing.assert_close(cp.unshard(found, dim=1, length=T, cut="contiguous"), single, rtol=1e-5, atol=1e-5)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        assert cp.attention(*parts, q_length=T, k_length=T, cut="contiguous").dtype == torch.bfloat16


# ---- causal_conv1d ----------------------------------------------------------------------------------------------


def convolution(ranks):
    D, K = 6, 4
    x, weight, bias, state = torch.randn(2, D, T), torch.randn(D, K), torch.randn(D), torch.randn(2, D, K - 1)
    axes = {"x": 2, "weight": None, "bias": None, "initial_state": None, "results": (2, None)}
    for cut, stripe in (("contiguous", 0), ("zigzag", 0), ("striped", 2)):
        place = dict(cut=cut, stripe=stripe)
        compare(f"conv, {cut}", dict(x=x, weight=weight, bias=bias, initial_state=state), axes,
                lambda **t: cp.causal_conv1d(**t, activation="silu", length=T, return_final_state=True, **place),
                lambda **t: cotangent.causal_conv1d(**t, activation="silu", return_final_state=True), place)  # fmt: skip
    place = dict(cut="zigzag")
    index = torch.arange(T).div(7, rounding_mode="floor").to(torch.int32).expand(2, T).contiguous()
    ends = torch.tensor([0, 9, 30, T], dtype=torch.int32)
    packings = (
        (x, dict(seq_idx=cp.shard(index, dim=1, **place).to(DEVICE)), dict(seq_idx=index)),
        (x[:1], dict(cu_seqlens=ends.to(DEVICE)), dict(cu_seqlens=ends)),
    )
    for x_, part, whole in packings:
        compare(f"conv, {list(part)}", dict(x=x_, weight=weight, bias=bias), dict(axes, results=(2,)),
                lambda **t: cp.causal_conv1d(**t, activation="swish", length=T, **part, **place),
                lambda **t: cotangent.causal_conv1d(**t, activation="swish", **{n: moved(o, t["x"]) for n, o in whole.items()}), place)  # fmt: skip

    # The final state has a gradient on one rank alone.
    x, weight = x.to(DEVICE), weight.to(DEVICE)
    part, w = leaf(cp.shard(x, dim=2, cut="contiguous")), leaf(weight)
    y, last = cp.causal_conv1d(part, w, length=T, cut="contiguous", return_final_state=True)
    (y.sum() + (last.sum() if dist.get_rank() == ranks - 1 else 0)).backward()
    whole, v = leaf(x), leaf(weight)
    y, last = cotangent.causal_conv1d(whole, v, return_final_state=True)
    (y.sum() + last.sum()).backward()
    torch.testing.assert_close(cp.unshard(part.grad, dim=2, length=T, cut="contiguous"), whole.grad)
    torch.testing.assert_close(cp.all_reduce(w.grad), v.grad)


# ---- cuts and sums ------------------------------------------------------------------------------------------------


def cuts(ranks):
    rank = dist.get_rank()
    for cut, stripe in (("contiguous", 0), ("zigzag", 0), ("striped", 3)):
        place = dict(cut=cut, stripe=stripe)
        rows = cp.positions(T, **place)
        assert rows.dtype == torch.int64 and bool((rows.diff() > 0).all())
        for whole in (torch.randn(3, T, 2), torch.randint(9, (3, T)), torch.rand(3, T) > 0.5):
            part = cp.shard(whole, dim=1, **place)
            assert torch.equal(part, whole[:, rows]) and torch.equal(cp.unshard(part, dim=-whole.dim() + 1, length=T, **place), whole)
        whole = leaf(torch.randn(T, 2))
        (cp.unshard(cp.shard(whole, dim=0, **place), dim=0, length=T, **place) * (rank + 1)).sum().backward()
        assert torch.equal(whole.grad[rows], torch.full((len(rows), 2), ranks * (ranks + 1) / 2))
    assert len(cp.positions(1, cut="contiguous")) == (rank == ranks - 1)  # the other parts are empty

    torch.manual_seed(rank)
    x = (torch.randn(1001) * 10.0 ** torch.randint(-3, 4, (1001,))).to(DEVICE)
    every = cp.unshard(x[None], dim=0, cut="contiguous").double()
    total = every[0]
    for row in every[1:]:
        total = total + row
    assert torch.equal(cp.all_reduce(x.clone()), total.float())

    layer = torch.nn.Linear(3, 2).to(torch.bfloat16)
    unused = torch.nn.Parameter(torch.zeros(2))
    half, full = (torch.nn.Parameter(torch.zeros(4, dtype=t)) for t in (torch.bfloat16, torch.float32))
    layer.weight.grad, layer.bias.grad = torch.full((2, 3), rank + 1.0).bfloat16().t().contiguous().t(), torch.ones(2).bfloat16()
    half.grad, full.grad = torch.ones(4).bfloat16(), torch.full((4,), float(rank))
    cp.all_reduce_gradients([*layer.parameters(), unused, half, full])
    assert torch.equal(layer.weight.grad.float(), torch.full((2, 3), ranks * (ranks + 1) / 2))
    assert torch.equal(half.grad.float(), torch.full((4,), float(ranks))) and unused.grad is None
    assert torch.equal(full.grad, torch.full((4,), ranks * (ranks - 1) / 2))

    # A DeviceMesh, a name, and a group of some ranks.
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (ranks,))
    name = dist.group.WORLD.group_name
    for group in (mesh, name, dist.group.WORLD):
        assert torch.equal(cp.all_reduce(torch.ones(2), group=group), torch.full((2,), float(ranks)))
    pairs = [dist.new_group([first, first + 1]) for first in range(0, ranks, 2)]
    own = pairs[rank // 2]
    assert cp.all_reduce(torch.tensor([rank]).float(), group=own).item() == 2 * (rank - rank % 2) + 1
    expect(ValueError, "cut is 'diagonal', expected one of contiguous, zigzag, striped", lambda: cp.positions(4, cut="diagonal"))
    expect(ValueError, "stripe", lambda: cp.positions(4, cut="striped"))
    count = len(cp.positions(T, cut="contiguous"))
    expect(ValueError, f"x has 3 tokens on dim 0, expected {count}: this rank's part of length={T}",
           lambda: cp.unshard(torch.ones(3), dim=0, length=T, cut="contiguous"))  # fmt: skip
    expect(TypeError, "group is 3, expected a ProcessGroup", lambda: cp.positions(4, group=3, cut="contiguous"))
    expect(ValueError, "the group is already in use", lambda: cp.prepare_group())
    expect(NotImplementedError, "x is on meta, expected the CPU or a GPU", lambda: cp.all_reduce(torch.ones(2, device="meta")))
    if ranks == 4:
        mesh2 = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
        expect(ValueError, "the DeviceMesh has 2 dimensions, expected 1", lambda: cp.positions(4, group=mesh2, cut="contiguous"))
        assert cp.all_reduce(torch.ones(1), group=mesh2["b"]).item() == 2


def expect(kind, message, call):
    try:
        call()
    except kind as error:
        assert message in str(error), f"got {error!r}, expected {message!r}"
        return
    raise AssertionError(f"no {kind.__name__}: {message}")


def timeouts(ranks):
    """prepare_group() without a device sets the timeout of every device, with a device that of this device."""
    group, seen, cpu_handle, nccl_handle = dist.new_group(list(range(ranks))), [], cp._cpu_handle, cp._nccl_handle

    def handle_of_gpu(process_group, device, timeout):
        seen.append(("cuda", device, timeout))

    def handle_of_cpu(process_group, timeout):
        seen.append(("cpu", timeout))
        return cpu_handle(process_group, timeout)

    cp._cpu_handle, cp._nccl_handle = handle_of_cpu, handle_of_gpu
    try:
        cp.prepare_group(group, timeout=60)
        expect(ValueError, "the group is already in use", lambda: cp.prepare_group(group, timeout=70))
        cp._group(group.group_name, 0), cp._group(group.group_name, 1, 80.0)
        assert cp.all_reduce(torch.ones(1), group=group).item() == ranks
        expect(ValueError, "the group is already in use", lambda: cp.prepare_group(group, timeout=70, device="cpu"))
        other = dist.new_group(list(range(ranks)))
        cp.prepare_group(other, timeout=90, device="cpu")
        cp._group(other.group_name, 0)
        expect(ValueError, "the group is already in use", lambda: cp.prepare_group(other, timeout=70))
    finally:
        cp._cpu_handle, cp._nccl_handle = cpu_handle, nccl_handle
    assert seen == [("cuda", 0, 60.0), ("cuda", 1, 80.0), ("cpu", 60.0), ("cpu", 90.0), ("cuda", 0, 30.0)], seen


def no_nccl(ranks):
    """A rank without NCCL: every rank gets an error, and none of them waits in NCCL."""
    nccl = Path(_C.__file__).parents[2] / "tests" / "parallel" / "nccl_whole" / "libnccl.so.2"
    missing = not nccl.exists() or dist.get_rank() == ranks - 1
    cp._NCCL, first = "libmissing.so.2" if missing else str(nccl), ranks - 1 if nccl.exists() else 0
    name = dist.group.WORLD.group_name
    expect(RuntimeError, f"rank {first} has no NCCL for CUDA tensors: libmissing.so.2", lambda: cp._group(name, 0, 5.0))
    expect(ValueError, "device is meta, expected cpu or cuda", lambda: cp.prepare_group(device="meta"))
    timeouts(ranks)
    cp.check_group()  # nothing to wait for
    cp.prepare_group(device="cpu")  # the group goes on
    cp.check_group()
    assert cp.all_reduce(torch.ones(1)).item() == ranks


# ---- torch.compile -------------------------------------------------------------------------------------------------


def compiled(ranks):
    def step(q, k, v, x, weight):
        out = cp.attention(q, k, v, causal=True, cut="zigzag", q_length=T, k_length=T)
        y = cp.causal_conv1d(x, weight, None, "silu", cut="zigzag", length=T)
        whole = cp.unshard(out * 2, dim=1, length=T, cut="zigzag")
        equal = cp.attention(q[:, :5], k[:, :5], v[:, :5], cut="contiguous", causal=True)  # the lengths follow from the rows
        return equal.cos().sum() + (whole.sin() * 1.5).sum() + y.square().sum() + cp.positions(T, cut="zigzag").sum()

    shared = dict(cut="zigzag")
    tensors = [cp.shard(t, dim=1, **shared) for t in attention_inputs().values()]
    tensors += [cp.shard(torch.randn(2, 6, T), dim=2, **shared), torch.randn(6, 4)]
    tensors = [t.to(DEVICE) for t in tensors]
    results = []
    for run in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        leaves = [leaf(t) for t in tensors]
        loss = run(*leaves)
        loss.backward()
        results.append([loss.detach(), *(t.grad for t in leaves)])
    for a, b in zip(*results):
        torch.testing.assert_close(a, b)
    for op, sample in (
        (torch.ops.cotangent.parallel_unshard.default, (tensors[0], 1, T, dist.group.WORLD.group_name, 1, 0)),
        (torch.ops.cotangent.parallel_positions.default, (T, dist.group.WORLD.group_name, 1, 0)),
    ):
        torch.library.opcheck(op, sample, test_utils=("test_schema", "test_faketensor"))


# ---- models ---------------------------------------------------------------------------------------------------------


def model_and_batch(name, dtype=torch.float32):
    import tiny_models

    import cotangent.integrations.transformers as integration

    integration.enable(convolution=False)
    model = tiny_models.make(name, dtype, "cotangent").to(DEVICE)
    tokens = torch.randint(3, 61, (2, T + 1), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    return model, tokens[:, :-1], tokens[:, 1:]


def loss_of(model, tokens, labels, place=None):
    """The sum over the labels of this rank, divided by the number of all labels."""
    options, count = {}, labels.numel()
    if place is not None:
        options = dict(position_ids=cp.positions(T, device=DEVICE, **place)[None])
        tokens, labels = (cp.shard(t, dim=1, **place) for t in (tokens, labels))
    logits = model(input_ids=tokens, use_cache=False, **options).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / count


def gradients_of(model):
    return {n: p.grad.clone() for n, p in model.named_parameters()}


def near(found, exact, about):
    """Two orders of the same sums: errors pass through layers, so that only a norm over all of them has a bound."""
    error = torch.stack([(found[n].double() - e.double()).norm() / e.double().norm() for n, e in exact.items()]).norm()
    assert error < 1e-4, f"{about}: {error:.3g}"


def models(ranks):
    for name, place in (("llama", dict(cut="zigzag")), ("mistral", dict(cut="contiguous")), ("gpt_oss", dict(cut="striped", stripe=4))):
        model, tokens, labels = model_and_batch(name)
        loss_of(model, tokens, labels).backward()
        exact = gradients_of(model)
        model.zero_grad()
        with cp.context_parallel(length=T, **place):
            loss = loss_of(model, tokens, labels, place)
            loss.backward()
        cp.all_reduce_gradients(model.parameters())
        near(gradients_of(model), exact, name)
    model, tokens, labels = model_and_batch("llama")
    place = dict(cut="zigzag")
    ends = torch.tensor([0, 11, 30, T], dtype=torch.int32, device=DEVICE)  # packed: positions begin anew
    packed = torch.cat([torch.arange(int(n)) for n in ends.diff()])[None].to(DEVICE)
    with torch.no_grad():
        expected = model(input_ids=tokens[:1], position_ids=packed, use_cache=False).logits
        with cp.context_parallel(length=T, cu_seqlens=ends, **place):
            found = model(input_ids=cp.shard(tokens[:1], dim=1, **place), position_ids=cp.shard(packed, dim=1, **place),
                          use_cache=False).logits  # fmt: skip
            torch.testing.assert_close(cp.unshard(found, dim=1, length=T, **place), expected, rtol=1e-3, atol=1e-3)
            padding = torch.ones(2, 5, dtype=torch.int64, device=DEVICE)
            padding[1, 0] = 0
            expect(NotImplementedError, "attention_mask has padding",
                   lambda: model(input_ids=tokens[:, :5], attention_mask=padding, use_cache=False))  # fmt: skip
            expect(NotImplementedError, "cu_seqlens with a batch of 2, expected 1", lambda: model(input_ids=tokens, use_cache=False))
    x, weight = torch.randn(1, 5, 8, device=DEVICE), torch.randn(8, 4, device=DEVICE)
    local = {
        "Attention": (cotangent.Attention(8, 1, causal=True, device=DEVICE), x),
        "CausalConv1d": (cotangent.CausalConv1d(8, channel_last=True, device=DEVICE), x),
        "MambaInProjConv1d": (cotangent.MambaInProjConv1d(8, 8, device=DEVICE), x),
        "causal_conv1d_fn": (causal_conv1d_fn, x.transpose(1, 2), weight),
        "causal_conv1d_fwd_function": (causal_conv1d_fwd_function, x.transpose(1, 2), weight, *[None] * 4, False),
    }
    for name, (function, *arguments) in local.items():
        function(*arguments)
        with cp.context_parallel(**place):
            expect(NotImplementedError, f"{name}: not supported inside context_parallel", lambda: function(*arguments))


def fsdp(ranks):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, tokens, labels = model_and_batch("gpt_oss")
    loss_of(model, tokens, labels).backward()
    exact = gradients_of(model)
    model.zero_grad()
    mesh = init_device_mesh(DEVICE.type, (ranks,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    place = dict(cut="zigzag")
    with cp.context_parallel(mesh, length=T, **place):
        (loss_of(model, tokens, labels, place) * ranks).backward()  # FSDP2 divides by the number of ranks
    near({n: p.grad.full_tensor() for n, p in model.named_parameters()}, exact, "fsdp")


# ---- programs of the guide that create a process group ---------------------------------------------------------------

PAGES = ("context_parallel_pytorch.md", "transformers.md", "many_gpus.md")


def page(number):
    """Runs a program of the pages. Compares its results with those of the single calls, if the ranks share a sequence."""
    guide = Path(__file__).parents[2] / "docs/guide"
    blocks = []
    for name in PAGES:
        blocks += re.findall(r"^```python\n(.*?)^```$", (guide / name).read_text(), flags=re.M | re.S)
    blocks = [block for block in blocks if "init_process_group" in block]
    assert len(blocks) == 5
    names = {"__name__": "__main__"}
    exec(blocks[number], names)
    assert not dist.is_initialized()
    if number == 2:
        model, text = names["model"], names["text"]
        found = gradients_of(model)
        model.zero_grad()
        loss_of(model, text[:, :-1], text[:, 1:]).backward()
        near(found, gradients_of(model), "the page's model")
    elif number == 4:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # the same steps on one rank
        torch.manual_seed(0)
        model = names["Model"]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss = names["loss_of"](model, names["batch_of"](step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        torch.testing.assert_close(names["mean"], loss.detach())
        near(names["state"], model.state_dict(), "the page's FSDP2 model")
        dist.destroy_process_group()
    elif number == 3:
        assert names["loss"].isfinite() and all(p.dtype == torch.float32 for p in names["model"].parameters())
    else:
        project, x = names["project"], names["x" if number == 0 else "batch"]
        found = gradients_of(project)
        project.zero_grad()
        q, k, v = project(x).unflatten(-1, (3, 4, 16)).unbind(2)
        out = cotangent.attention(q, k, v, causal=True)
        out.square().sum().backward()
        if number == 0:
            torch.testing.assert_close(names["whole"], out.detach())
        near(found, gradients_of(project), "the page's layer")
    print(f"rank {os.environ['RANK']} is done")


# ---- faults ----------------------------------------------------------------------------------------------------------


def faults(ranks):
    rank, last = dist.get_rank(), dist.get_rank() == ranks - 1
    parts = [cp.shard(t, dim=1, cut="contiguous").to(DEVICE) for t in attention_inputs().values()]

    def run(group, **options):
        out = cp.attention(*parts, **dict(dict(group=group, cut="contiguous", q_length=T, k_length=T), **options))
        cp.check_group(group)
        return out

    # Refusals: the group goes on.
    for option in ("causal", "all_gather"):
        name = f"rank {ranks - 1} passes another value of {option} than rank 0"
        expect(RuntimeError, name, lambda: run(None, **{option: last}))
    if last:
        expect(ValueError, "softcap is -1", lambda: run(None, softcap=-1.0))
        expect(ValueError, "window[1] is 5", lambda: run(None, causal=True, window=(3, 5)))
    else:
        refused = f"rank {ranks - 1} refuses its arguments: attention: "
        expect(RuntimeError, f"{refused}softcap is -1", lambda: run(None))
        expect(RuntimeError, f"{refused}window[1] is 5", lambda: run(None, causal=True, window=(3, 0)))
    expect(RuntimeError, "tensor's shape or dtype", lambda: cp.all_reduce(torch.ones(2 + last, device=DEVICE)))
    run(None)

    # A silent rank.
    groups = [dist.new_group(list(range(ranks))) for _ in range(2)]
    timeout = 1.0 if DEVICE.type == "cpu" else 6.0  # NCCL takes seconds to connect
    cp.prepare_group(groups[0], timeout=timeout, device=DEVICE)
    cp.prepare_group(groups[1], timeout=4 * timeout, device=DEVICE)
    run(groups[0])
    if last:
        time.sleep(timeout + 1.5)
    started = time.monotonic()
    expect(RuntimeError, "rank ", lambda: run(groups[0]))
    assert time.monotonic() - started < timeout + 10
    expect(RuntimeError, "the group is broken: ", lambda: run(groups[0]))

    # A rank that dies during a call of the others.
    run(groups[1])
    dist.barrier()
    if last:
        os.kill(os.getpid(), 9)
    started = time.monotonic()
    expect(RuntimeError, "the group is broken: ", lambda: run(groups[1]))
    assert time.monotonic() - started < 4 * timeout + 10
    expect(RuntimeError, "the group is broken: ", lambda: cp.all_reduce(torch.ones(2, device=DEVICE), group=groups[1]))
    print(f"rank {rank} has survived", flush=True)
    os._exit(0)  # without the barrier of a clean end


def main(sections, rank, ranks, folder, device="cpu"):
    global DEVICE
    torch.set_num_threads(1)
    if device == "cuda":
        DEVICE = torch.device("cuda", rank)
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", init_method=f"file://{folder}/store",
                            rank=rank, world_size=ranks)  # fmt: skip
    try:
        for section in sections.split(","):
            torch.manual_seed(0)
            globals()[section](ranks)
    except BaseException:
        print(f"rank {rank}:", traceback.format_exc(), file=sys.stderr, flush=True)
        os._exit(1)
    dist.destroy_process_group()
    print(f"rank {rank} is done")


if __name__ == "__main__":
    if sys.argv[1] == "page":
        page(int(sys.argv[2]))
    else:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
    # At the interpreter's own end, threads of PyTorch that need it sometimes abort the process ("terminate called without
    # an active exception"; see dtensor_rules.py). That abort made a test fail.
    sys.stdout.flush()
    os._exit(0)
