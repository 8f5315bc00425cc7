# SPDX-License-Identifier: Apache-2.0
"""Functions with the names and signatures of other packages: causal_conv1d, flash_attn (version 2),
flash_attn_interface (version 3), and PyTorch's scaled_dot_product_attention.

Call install() before you import a model that imports these packages: `import causal_conv1d`, `import flash_attn` and
`import flash_attn_interface` then find this package. install() does not change torch: call
cotangent.compat.sdpa.scaled_dot_product_attention where the model calls PyTorch's function."""
from __future__ import annotations

import importlib.metadata
import importlib.machinery
import sys
import types
from typing import Any, Optional, Sequence

from .. import attention as _attention  # noqa: F401  (raises an error that explains why the package cannot be used)
from . import bert_padding, causal_conv1d, flash_attn, flash_attn_interface, sdpa

__all__ = ["bert_padding", "causal_conv1d", "flash_attn", "flash_attn_interface", "install", "sdpa", "uninstall"]

# The module for each name, and the versions of the packages that have these signatures.
_MODULES = {
    "causal_conv1d": causal_conv1d,
    "causal_conv1d.causal_conv1d_interface": causal_conv1d,
    "causal_conv1d.causal_conv1d_varlen": causal_conv1d,
    "flash_attn": flash_attn,
    "flash_attn.flash_attn_interface": flash_attn,
    "flash_attn.bert_padding": bert_padding,
    "flash_attn_interface": flash_attn_interface,
}
_VERSIONS = {"causal_conv1d": "1.6.1", "flash_attn": "2.8.4", "flash_attn_interface": "3.0.0"}

_replaced: "dict[str, Optional[types.ModuleType]]" = {}


class _Distribution(importlib.metadata.Distribution):
    """For code that asks importlib.metadata whether a package is installed, and for its version."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> Optional[str]:
        if filename != "METADATA":
            return None
        return f"Metadata-Version: 2.1\nName: {self._name}\nVersion: {_VERSIONS[self._name]}\n"

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{self._name} is cotangent.compat's: it has no files")


class _Finder(importlib.metadata.DistributionFinder):
    def find_spec(self, fullname: str, path: Optional[Sequence[str]] = None, target: Any = None) -> None:
        return None

    def find_distributions(self, context: Any = importlib.metadata.DistributionFinder.Context()) -> Any:
        wanted = (context.name or "").replace("-", "_").lower()
        return [_Distribution(name) for name in _VERSIONS if name == wanted]


_finder = _Finder()


def install() -> None:
    """From now on `import causal_conv1d`, `import flash_attn` and `import flash_attn_interface` import the modules of
    this package, even if the real packages are installed. Modules that have already imported the real ones keep
    them. Other submodules, for example flash_attn.layers, cannot be imported."""
    if _replaced:
        return
    for name, source in _MODULES.items():
        _replaced[name] = sys.modules.get(name)
        module = types.ModuleType(name, source.__doc__)
        module.__dict__.update({k: getattr(source, k) for k in source.__all__})
        package = name.split(".")[0]
        module.__dict__["__version__"] = _VERSIONS[package]
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=name == package)
        module.__path__ = []
        sys.modules[name] = module
        if name != package:
            setattr(sys.modules[package], name.split(".")[1], module)
    sys.meta_path.insert(0, _finder)


def uninstall() -> None:
    """Reverts install(). Modules that have imported these modules keep them."""
    for name, module in _replaced.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module
    if _replaced:
        sys.meta_path.remove(_finder)
    _replaced.clear()
