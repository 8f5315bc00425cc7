# SPDX-License-Identifier: Apache-2.0
"""One file per op: its schemas, the allocation of results, and the functions. Every file of this folder whose name does
not begin with _ is an op. The other files are shared by the ops.

- Functions whose names do not begin with _ become functions of the package: cotangent.NAME.
- `_example(randn)` makes a small call for python -m cotangent.doctor and returns a result to differentiate.
  randn(*shape) makes an input that requires a gradient.
"""
from __future__ import annotations

from importlib import import_module
from inspect import isfunction
from pkgutil import iter_modules
from typing import Any

modules: "dict[str, Any]" = {
    file.name: import_module(f"{__name__}.{file.name}") for file in iter_modules(__path__) if file.name[0] != "_"
}
functions: "dict[str, Any]" = {
    name: value
    for module in modules.values()
    for name, value in vars(module).items()
    if name[0] != "_" and isfunction(value) and value.__module__ == module.__name__
}
