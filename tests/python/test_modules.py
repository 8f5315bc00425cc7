# SPDX-License-Identifier: Apache-2.0
import copy
import re
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from support import compare
from test_attention import formula as plain_attention
from test_mhc import plain_post, plain_pre
from test_torch import has_attention

import cotangent
from cotangent import Attention, BiasDropoutResidual, CausalConv1d, HyperConnection, HyperConnectionStack, MambaInProjConv1d
from cotangent._context import contexts


def modules(device):
    yield CausalConv1d(10, 4, activation="silu", device=device), torch.randn(2, 10, 7, device=device)
    yield CausalConv1d(10, 3, bias=False, channel_last=True, device=device), torch.randn(2, 7, 10, device=device)
    yield BiasDropoutResidual(12, 0.2, activation="gelu", device=device), torch.randn(3, 12, device=device)
    yield HyperConnection(torch.nn.Linear(16, 16, device=device), 16, 3, device=device), torch.randn(2, 5, 3, 16, device=device)
    if has_attention(device):
        yield Attention(32, 4, causal=True, num_kv_heads=2, use_sink=True, proj_bias=True, device=device), torch.randn(2, 5, 32, device=device)


def test_state_dict_round_trip(device, tmp_path):
    for module, x in modules(device):
        module.eval()
        other = copy.deepcopy(module)
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.add_(1)
        torch.save(module.state_dict(), tmp_path / "state.pt")
        other.load_state_dict(torch.load(tmp_path / "state.pt"))
        assert torch.equal(module(x), other(x))
        assert list(module.state_dict()) == list(dict(module.named_parameters()))
        assert repr(module)


def test_conv_takes_the_weights_of_torchs(device):
    theirs = torch.nn.Conv1d(10, 10, 4, groups=10, padding=3, device=device)
    ours = CausalConv1d(10, 4, device=device)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 10, 9, device=device)
    torch.testing.assert_close(ours(x), theirs(x)[:, :, :9], rtol=1e-4, atol=1e-5)
    last = CausalConv1d(10, 4, channel_last=True, device=device)
    last.load_state_dict(ours.state_dict())
    torch.testing.assert_close(last(x.transpose(1, 2)).transpose(1, 2), ours(x))
    y, state = last(x.transpose(1, 2), return_final_state=True)
    assert y.shape == (2, 9, 10) and torch.equal(state, x[:, :, -3:])
    with torch.no_grad():
        following = ours.step(x[:, :, 0], state)
    torch.testing.assert_close(following, ours(torch.cat([x, x[:, :, :1]], 2))[:, :, -1])


def test_conv_names_a_wrong_x(device):
    for channel_last, shape, hint in ((False, "[B,D,T]", "channel_last=True takes [B,T,D]"),
                                      (True, "[B,T,D]", "channel_last=False takes [B,D,T]")):  # fmt: skip
        module = CausalConv1d(10, 4, channel_last=channel_last, device=device)
        with pytest.raises(TypeError, match="^CausalConv1d: x is a list"):
            module([1.0])
        with pytest.raises(ValueError, match=re.escape(f"CausalConv1d: x has 1 axis, expected 3: {shape}")):
            module(torch.zeros(10, device=device))
        x = torch.zeros(2, 10, 9, device=device)
        axis = "the last axis" if channel_last else "axis 1"
        with pytest.raises(ValueError, match=re.escape(f"CausalConv1d: {axis} of x has size 9, expected channels=10 ({hint})")):
            module(x if channel_last else x.transpose(1, 2))


def test_attention_names_a_wrong_x(device):
    layer, cu = Attention(32, 4, causal=True, device=device), torch.tensor([0, 4], dtype=torch.int32, device=device)
    for shape, arguments, message in (
        ((4, 32), (), "x has 2 axes, expected 3: [B,T,D]"),
        ((1, 4, 32), (cu, 4), "x has 3 axes, expected 2: [total,D] with cu_seqlens"),
        ((1, 4, 16), (), "the last axis of x has size 16, expected dim=32"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"^Attention: {re.escape(message)}$"):
            layer(torch.zeros(shape, device=device), *arguments)
    with pytest.raises(TypeError, match="^Attention: x is a list, expected a Tensor"):
        layer([1.0])


def test_hyper_connections_name_a_wrong_x(device):
    layer = HyperConnection(torch.nn.Linear(16, 16, device=device), 16, 4, device=device)
    for shape, message in (((2, 5, 16), "x has 3 axes, expected 4: [B,T,n,D]"),
                           ((2, 5, 3, 16), "axis 2 of x has size 3, expected num_streams=4"),
                           ((2, 5, 4, 8), "the last axis of x has size 8, expected dim=16")):  # fmt: skip
        with pytest.raises(ValueError, match=f"^HyperConnection: {re.escape(message)}$"):
            layer(torch.zeros(shape, device=device))
    stack = HyperConnectionStack([layer], 16, 4, device=device)
    with pytest.raises(ValueError, match=r"^HyperConnectionStack: x has 4 axes, expected 3: \[B,T,D\]"):
        stack(torch.zeros(2, 5, 4, 16, device=device))


def test_mamba_names_a_wrong_x_and_a_context(device):
    module = MambaInProjConv1d(10, 10, device=device)
    with pytest.raises(TypeError, match="^MambaInProjConv1d: x is a list"):
        module([1.0])
    with pytest.raises(ValueError, match=r"^MambaInProjConv1d: x has 2 axes, expected 3: \[B,T,D\]"):
        module(torch.zeros(4, 10, device=device))
    contexts.append(None)  # an active block of cotangent.distributed.context_parallel
    try:
        with pytest.raises(NotImplementedError, match="^MambaInProjConv1d: not supported inside context_parallel"):
            module(torch.zeros(1, 4, 10, device=device))
    finally:
        contexts.pop()


def test_bias_dropout_residual(device):
    module = BiasDropoutResidual(12, 0.5, activation="relu", device=device)
    torch.nn.init.normal_(module.bias)
    x, residual = torch.randn(64, 12, device=device), torch.randn(64, 12, device=device)
    torch.manual_seed(2)
    y = module(x, residual) - residual
    kept = y != 0
    torch.testing.assert_close(y[kept], (2 * F.relu(x + module.bias))[kept], rtol=1e-4, atol=1e-4)
    assert 0.1 < kept.float().mean() < 0.4
    torch.testing.assert_close(module.eval()(x), F.relu(x + module.bias))


def test_hyper_connection(device):
    layer = torch.nn.Linear(16, 16, device=device)
    module = HyperConnection(layer, 16, 4, device=device)
    x = torch.randn(2, 5, 4, 16, device=device)

    def plain(x, phi, alpha, bias, gamma):
        h_in, h_post, A = plain_pre(x, phi, alpha, bias, gamma)
        return plain_post(x, F.linear(h_in, layer.weight.double(), layer.bias.double()), h_post, A)

    with torch.no_grad():
        module.alpha.fill_(0.7)
    compare(lambda x, *parameters: torch.func.functional_call(module, dict(zip(("phi", "alpha", "bias", "gamma"), parameters)),
            (x,)), plain, [x, module.phi, module.alpha, module.bias, module.gamma], units=32)  # fmt: skip
    module.reset_parameters()
    start = HyperConnection.to_streams(torch.randn(2, 5, 16, device=device), 4)
    torch.testing.assert_close(module(start), start + layer(start[:, :, :1]), rtol=0.05, atol=0.05)
    assert HyperConnection.reduce(start).shape == (2, 5, 16)


def test_hyper_connection_passes_arguments_and_results_on(device):
    class Layer(torch.nn.Module):
        def forward(self, x, factor, *, state):
            return x * factor, state

    x = torch.randn(2, 5, 4, 16, device=device)
    y, state = HyperConnection(Layer(), 16, 4, device=device)(x, 2.0, state="kept")
    assert y.shape == x.shape and state == "kept"


def test_attention(device):
    if not has_attention(device):
        pytest.skip("no kernel of this device supports attention yet")
    module = Attention(32, 4, causal=True, num_kv_heads=2, use_sink=True, softcap=5.0, window=(3, 0), device=device)
    torch.nn.init.normal_(module.sink)
    x = torch.randn(2, 9, 32, device=device)
    q, k, v = (p.unflatten(-1, (-1, 8)) for p in module.qkv(x).split([32, 16, 16], -1))
    out, _ = plain_attention(q, k, v, module.sink, causal=True, window=(3, 0), softcap=5.0)
    torch.testing.assert_close(module(x), module.out(out.flatten(2)), rtol=1e-4, atol=1e-5)
    packed = module(x.flatten(0, 1), torch.tensor([0, 9, 18], dtype=torch.int32, device=device), 9)
    torch.testing.assert_close(packed.unflatten(0, (2, 9)), module(x), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="num_heads is 5"):
        Attention(32, 5, causal=True)
    with pytest.raises(ValueError, match="num_kv_heads is 3"):
        Attention(32, 4, causal=True, num_kv_heads=3)


def test_doctor(capsys):
    from cotangent import doctor

    assert doctor.main() == 0
    words = " ".join(capsys.readouterr().out.split())
    assert f"[ok] cotangent {cotangent.__version__}" in words and "[ok] attention, cpu" in words
    for op in ("attention", "causal_conv1d", "causal_conv1d_dense", "dropout", "mhc"):
        assert f"[ok] {op}, cpu forward and backward in float32 and bfloat16" in words


def test_doctor_names_the_dtype_that_fails(capsys, monkeypatch):
    from cotangent import doctor, ops

    def example(randn):
        x = randn(2)
        if x.dtype == torch.bfloat16:
            raise RuntimeError("no such kernel")
        return x

    monkeypatch.setattr(doctor, "_wrong", 0)
    monkeypatch.setattr(ops.modules["dropout"], "_example", example)
    assert doctor.main() == 1
    words = " ".join(capsys.readouterr().out.split())
    assert "[!!] dropout, cpu bfloat16: no such kernel" in words and "[ok] dropout, cpu forward and backward in float32 [" in words


def test_doctor_names_a_rocm_build(capsys, monkeypatch):
    from cotangent import doctor

    monkeypatch.setattr(torch.version, "hip", "7.1.0")
    assert doctor.main() == 0
    assert "[--] rocm torch is a ROCm build" in " ".join(capsys.readouterr().out.split())


def test_doctor_says_what_a_gpu_gets():
    from cotangent.doctor import _code_of

    assert _code_of((9, 0)) == "machine code, with the kernels for Hopper"
    assert all("COT_GPUS" in _code_of(c) and "PTX" in _code_of(c) for c in ((8, 0), (8, 9), (10, 0), (12, 0)))
    assert "8.0 and later" in _code_of((7, 5))


@pytest.mark.skipif(torch.cuda.is_available(), reason="a machine with a GPU")
def test_error_without_a_usable_gpu_names_the_doctor():
    from cotangent import _C, doctor

    with pytest.raises(RuntimeError, match="^cotangent: .*: see python -m cotangent.doctor$") as error:
        _C.check_cuda(0)
    assert "cot_queue_create" not in str(error.value) and not doctor._first_line(error.value).endswith("doctor")


def test_shares_torchs_openmp():
    code = """
import re, cotangent, torch
x = torch.randn(2, 64, 512)
torch.mm(x[0], x[0].T)
cotangent.causal_conv1d(x, torch.randn(64, 4))
names = {line.split()[-1] for line in open("/proc/self/maps") if re.search(r"/lib(gomp|omp|iomp5)[-.]", line)}
print(*sorted(names))
"""
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert len(found) == 1 and "/torch/" in found[0], found
    headers = subprocess.run(["readelf", "-d", cotangent._C.__file__], capture_output=True, text=True, check=True).stdout
    assert "libm.so" in headers and "omp" not in headers, headers


@pytest.mark.parametrize(
    "before, expected",
    [("sys.modules['torch'] = None", "[!!] torch"), ("torch.__version__ = '2.3.1'", "torch is 2.3.1, expected 2.4 or later"),
     ("sys.modules['cotangent._C'] = None", "[!!] cotangent")],
)  # fmt: skip
def test_doctor_says_what_stands_in_the_way(before, expected):
    torch_first = "" if "None" in before else "import torch; "
    code = f"import runpy, sys; {torch_first}{before}; runpy.run_module('cotangent.doctor', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and expected in done.stdout and "Traceback" not in done.stderr, done.stdout + done.stderr
