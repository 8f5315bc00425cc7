# SPDX-License-Identifier: Apache-2.0
"""The fixture `device`: the CPU, or a GPU with --device cuda. gradcheck runs on the CPU, because a GPU has no float64
kernels."""
import pytest
import torch


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where the ops run: cpu or cuda")


@pytest.fixture(scope="session")
def device(request):
    return torch.device(request.config.getoption("--device"))


@pytest.fixture
def on_cpu(device):
    if device.type != "cpu":
        pytest.skip("float64 kernels are the CPU's")


@pytest.fixture
def on_gpu(device):
    if device.type != "cuda":
        pytest.skip("needs --device cuda")


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)
