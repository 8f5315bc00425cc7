# SPDX-License-Identifier: Apache-2.0
"""Functions with the names and signatures of other packages: causal_conv1d, flash_attn (version 2, with bert_padding
and layers.rotary), flash_attn_interface (version 3), flash_attn.cute (version 4), and PyTorch's
scaled_dot_product_attention.

Call install() before you import a model that imports these packages. `import causal_conv1d`, `import flash_attn` and
`import flash_attn_interface` then import the modules of cotangent.compat. install() does not change torch. To replace
PyTorch's function, call cotangent.compat.sdpa.enable()."""
from __future__ import annotations

import importlib.metadata
import importlib.machinery
import sys
import types
from typing import Any, Optional, Sequence

from .. import attention as _attention  # noqa: F401  (raises an error that explains why the package cannot be used)
from . import (
    bert_padding,
    causal_conv1d,
    causal_conv1d_cpp,
    flash_attn,
    flash_attn_cute,
    flash_attn_interface,
    rotary,
    sdpa,
)

__all__ = [
    "bert_padding", "causal_conv1d", "causal_conv1d_cpp", "flash_attn", "flash_attn_cute", "flash_attn_interface",
    "install", "rotary", "sdpa", "uninstall",
]  # fmt: skip

# The module for each name.
_MODULES = {
    "causal_conv1d": causal_conv1d,
    "causal_conv1d.causal_conv1d_interface": causal_conv1d,
    "causal_conv1d.causal_conv1d_varlen": causal_conv1d,
    "causal_conv1d.cpp_functions": causal_conv1d_cpp,
    "flash_attn": flash_attn,
    "flash_attn.flash_attn_interface": flash_attn,
    "flash_attn.bert_padding": bert_padding,
    "flash_attn.layers": rotary,
    "flash_attn.layers.rotary": rotary,
    "flash_attn.cute": flash_attn_cute,
    "flash_attn.cute.interface": flash_attn_cute,
    "flash_attn_interface": flash_attn_interface,
}
# The packages that install() can replace, and the versions whose signatures their modules have.
_VERSIONS = {"causal_conv1d": "1.6.1", "flash_attn": "2.8.4", "flash_attn_interface": "3.0.0"}
# flash_attn.cute is a part of the package flash_attn, with a version of its own: that of FlashAttention 4.
_CUTE_VERSION = "4.0.0"

# The distributions that code looks for: their versions, and the packages that they contain. FlashAttention 4 is a
# distribution of its own, and its files are inside the package flash_attn.
_DISTRIBUTIONS = {
    "causal_conv1d": ("1.6.1", "causal_conv1d"),
    "flash_attn": ("2.8.4", "flash_attn"),
    "flash_attn_3": ("3.0.0", "flash_attn_interface"),
    "flash_attn_4": (_CUTE_VERSION, "flash_attn"),
}

_replaced: "dict[str, Optional[types.ModuleType]]" = {}


class _Distribution(importlib.metadata.Distribution):
    """What importlib.metadata returns for a replaced package: its name and version."""

    def __init__(self, name: str) -> None:
        self._name = name

    def read_text(self, filename: str) -> Optional[str]:
        version, package = _DISTRIBUTIONS[self._name]
        if filename == "top_level.txt":  # for importlib.metadata.packages_distributions
            return package + "\n"
        return f"Metadata-Version: 2.1\nName: {self._name}\nVersion: {version}\n" if filename == "METADATA" else None

    def locate_file(self, path: Any) -> Any:
        raise FileNotFoundError(f"{self._name} is cotangent.compat's: it has no files")


class _Finder(importlib.metadata.DistributionFinder):
    def find_spec(self, fullname: str, path: Optional[Sequence[str]] = None, target: Any = None) -> None:
        return None

    def find_distributions(self, context: Any = importlib.metadata.DistributionFinder.Context()) -> Any:
        wanted = None if context.name is None else context.name.replace("-", "_").lower()
        return [
            _Distribution(name)
            for name, (_, package) in _DISTRIBUTIONS.items()
            if package in _replaced and wanted in (None, name)
        ]


_finder = _Finder()


def _clear_transformers_caches() -> None:
    """Clears the caches of transformers: which packages exist, and which functions it has imported."""
    utils = sys.modules.get("transformers.utils.import_utils")
    names = ("_package_distribution_mapping", "is_causal_conv1d_available", "is_flash_attn_2_available",
             "is_flash_attn_3_available", "is_flash_attn_4_available", "is_flash_attn_greater_or_equal")  # fmt: skip
    for name in names:
        clear = getattr(getattr(utils, name, None), "cache_clear", None)
        if clear is not None:
            clear()
    attention = sys.modules.get("transformers.modeling_flash_attention_utils")
    if getattr(attention, "_loaded_implementation", None) in ("flash_attention_2", "flash_attention_3", "flash_attention_4"):
        attention._loaded_implementation = None  # type: ignore[union-attr]


def _check_packages(call: str, packages: Sequence[str]) -> None:
    for package in packages:
        if package not in _VERSIONS:
            raise ValueError(f"{call}: {package!r} is not one of {', '.join(_VERSIONS)}")


def install(*packages: str) -> None:
    """After this call `import causal_conv1d`, `import flash_attn` and `import flash_attn_interface` import the modules
    of cotangent.compat, even if the real packages are installed. `packages` are the names of the packages to replace.
    Without names, it replaces all three. Python modules that have already imported a real package keep it. Submodules
    that cotangent.compat does not have, for example flash_attn.ops, cannot be imported.

    The `__version__` of each module is that of the package whose signatures it has: causal_conv1d 1.6.1, flash_attn
    2.8.4, flash_attn.cute 4.0.0, flash_attn_interface 3.0.0. importlib.metadata reports the same versions for the
    distributions causal_conv1d, flash_attn, flash_attn_4 and flash_attn_3.

    >>> cotangent.compat.install("flash_attn")
    >>> import flash_attn
    >>> flash_attn.flash_attn_func is cotangent.compat.flash_attn.flash_attn_func
    True
    >>> cotangent.compat.uninstall("flash_attn")
    """
    _check_packages("install", packages)
    for name, source in _MODULES.items():
        package = name.split(".")[0]
        if name in _replaced or package not in (packages or _VERSIONS):
            continue
        _replaced[name] = sys.modules.get(name)
        module = types.ModuleType(name, source.__doc__)
        module.__dict__.update({k: getattr(source, k) for k in source.__all__})
        module.__dict__["__version__"] = _CUTE_VERSION if source is flash_attn_cute else _VERSIONS[package]
        is_package = any(other.startswith(name + ".") for other in _MODULES)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=is_package)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, leaf = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], leaf, module)
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    _clear_transformers_caches()


def uninstall(*packages: str) -> None:
    """Reverts install(). `packages` are the names of the packages to restore. Without names, it restores all. Python
    modules that have imported cotangent's functions keep them.

    >>> cotangent.compat.install()
    >>> cotangent.compat.uninstall()
    """
    _check_packages("uninstall", packages)
    for name in [name for name in _replaced if name.split(".")[0] in (packages or _VERSIONS)]:
        module = _replaced.pop(name)
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module
    if not _replaced and _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    _clear_transformers_caches()
