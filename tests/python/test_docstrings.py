# SPDX-License-Identifier: Apache-2.0
"""Every public function and class has an example in its docstring, which runs. `torch` and `cotangent` are imported. In
the examples of cotangent.distributed also `cp` and `dist`, with a group of one rank."""
import doctest
import importlib
import inspect
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import cotangent
import cotangent.compat
import cotangent.distributed

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
from make_guide import PYTHON_FILES, public_names  # noqa: E402  (the names of the reference page)

CALLBACKS = ("attention_mask", "attention_forward")  # transformers calls them


def documented():
    for _, files in PYTHON_FILES:
        for file in files:
            module = "cotangent." + file[: -len(".py")].replace("/", ".").replace(".__init__", "")
            for name in public_names(file):
                if name not in CALLBACKS:
                    yield pytest.param(module, name, id=f"{module}.{name}")


@pytest.fixture
def one_rank():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("module, name", list(documented()))
def test_example(on_cpu, module, name, request):
    names = {"torch": torch, "cotangent": cotangent}
    if module == "cotangent.distributed":
        request.getfixturevalue("one_rank")
        names.update(cp=cotangent.distributed, dist=dist)
    if module.endswith(".transformers"):
        pytest.importorskip("transformers")
    if module.endswith(".dtensor"):
        pytest.importorskip("torch.distributed.tensor.experimental")  # torch 2.5
    test = doctest.DocTestParser().get_doctest(
        inspect.getdoc(getattr(importlib.import_module(module), name)), names, f"{module}.{name}", None, None
    )
    assert test.examples, "the docstring has no example"
    report = []
    failed = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=report.append).failed
    assert failed == 0, "".join(report)
