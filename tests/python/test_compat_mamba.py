# SPDX-License-Identifier: Apache-2.0
"""A Mamba model of Hugging Face, which looks for its convolution in the package causal_conv1d when it is imported.
Loss, gradients and generated tokens must be the same with and without compat.install()."""
import importlib
import os
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from cotangent import compat

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")


class OpRecorder(TorchDispatchMode):
    """Records which of cotangent's ops run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "cotangent":
            self.names.add(function._schema.name.split("::")[1])
        return function(*args, **(kwargs or {}))


def run(device, dtype):
    """Loss, gradients and greedy tokens of a small model with seeded weights, after a fresh import."""
    for name in [n for n in sys.modules if n.startswith("transformers.models.mamba.")]:
        del sys.modules[name]
    modeling = importlib.import_module("transformers.models.mamba.modeling_mamba")
    configuration = importlib.import_module("transformers.models.mamba.configuration_mamba")
    torch.manual_seed(0)
    config = configuration.MambaConfig(
        vocab_size=61, hidden_size=24, state_size=8, num_hidden_layers=2, expand=2, time_step_rank=4, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = modeling.MambaForCausalLM(config).to(device, dtype).train()
    tokens = torch.randint(3, 61, (2, 17), generator=torch.Generator().manual_seed(1)).to(device)
    recorder = OpRecorder()
    with recorder:
        loss = model(tokens, labels=tokens).loss
        loss.backward()
    gradients = {name: p.grad.double().cpu() for name, p in model.named_parameters()}
    with recorder, torch.no_grad():
        generated = model.eval().generate(tokens[:, :5], max_new_tokens=6, min_new_tokens=6, do_sample=False)
    return loss.detach().double().cpu(), gradients, generated.cpu(), recorder.names


def test_mamba(device):
    plain = run(device, torch.float32)
    exact = run(device, torch.float64)
    assert not plain[3]
    compat.install()
    try:
        ours = run(device, torch.float32)
    finally:
        compat.uninstall()
    assert {"causal_conv1d_forward", "causal_conv1d_backward", "causal_conv1d_update"} <= ours[3]
    unit = 2.0**-24
    assert abs(ours[0] - exact[0]) <= 1.5 * abs(plain[0] - exact[0]) + 0.25 * unit * exact[0]
    # The norm rule over all gradients together, each relative to its norm, with plain PyTorch instead of the scalar
    # kernel. The errors within one gradient are not independent, because they pass through later layers. Therefore the
    # ratio of two norms of one tensor scatters by more than the factor 1.5 of the rule. A fault exceeds it by orders of
    # magnitude.
    found, theirs = ([(side[1][name] - r).norm() / r.norm() for name, r in exact[1].items()] for side in (ours, plain))
    assert torch.stack(found).norm() <= 1.5 * torch.stack(theirs).norm() + 0.25 * unit * len(found) ** 0.5
    for name, error, plain_error in zip(exact[1], found, theirs):
        assert error <= 3 * plain_error + unit, f"{name}: {error:.3g}, without install() {plain_error:.3g}"
    assert torch.equal(ours[2], plain[2])
