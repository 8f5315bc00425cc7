# SPDX-License-Identifier: Apache-2.0
"""Every public function and class has an example in its docstring, which runs. `torch` and `cotangent` are imported. In
the examples of cotangent.distributed also `cp` and `dist`, with a group of one rank."""
import ast
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
from make_reference import MODULES, entry, public_names  # noqa: E402  (they make docs/guide/python_reference*.md)

CALLBACKS = ("attention_mask", "attention_forward")  # transformers calls them


def documented():
    for _, _, files in MODULES:
        for file in files:
            module = "cotangent." + file[: -len(".py")].replace("/", ".").replace(".__init__", "")
            for name in public_names(file):
                if name not in CALLBACKS:
                    yield pytest.param(module, name, id=f"{module}.{name}")
    yield pytest.param("cotangent.integrations.flops", None, id="cotangent.integrations.flops")


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
    documented = importlib.import_module(module)
    documented = documented if name is None else getattr(documented, name)
    test = doctest.DocTestParser().get_doctest(inspect.getdoc(documented), names, f"{module}.{name}", None, None)
    assert test.examples, "the docstring has no example"
    report = []
    failed = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(test, out=report.append).failed
    assert failed == 0, "".join(report)


SOURCE = '''
def f(x: "Tensor", *, cut: str = "zigzag", eps: float = 1e-6) -> Tensor:
    """Computes y[t] = sum(x) * 2 with x_scale=2.

        y = 2 * x

        z = y

    x, cut  [B,T]; see docs/guide/python.md
    eps
            a small
            number

    - one
      item
    - another

    >>> f(1)
    """
'''
PAGE = """### `m.f`

```python
f(x: Tensor, *, cut: str = "zigzag", eps: float = 1e-6) -> Tensor
```

Computes `y[t]` = `sum(x)` \\* 2 with `x_scale=2`.

```text
y = 2 * x

z = y
```

- `x`, `cut`: `[B,T]`; see [docs/guide/python.md](python.md)
- `eps`: a small number

- one item
- another

```pycon
>>> f(1)
```
"""


def test_entry_of_the_reference():
    assert "\n".join(entry(ast.parse(SOURCE).body[0], "m.", 3, SOURCE)) == PAGE
