#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the folder that the loader of Hugging Face `kernels` expects, from a build of the Python package.

    tools/make_kernels_layout.py BUILD FOLDER

FOLDER/build has one folder for each variant: the package, its extension, and metadata.json. The extension is not linked
to libtorch or to CUDA's run-time library. One variant therefore works with every torch from 2.4, and one with every CUDA
of a major version. A build without nvcc has the variant for the CPU alone. Existing variants are replaced.

    from kernels import get_local_kernel
    cotangent = get_local_kernel(pathlib.Path("FOLDER"))
"""
import hashlib
import json
import pathlib
import platform
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
TORCH = "torch-stable-abi24"  # the oldest torch
CUDA_MAJORS = ("120", "130")  # the loader accepts newer minor versions

# Names that transformers looks for in the module of a kernel, besides those of the package.
NAMES = '''
from .compat.causal_conv1d import causal_conv1d_fn  # noqa: E402
from .compat.flash_attn import (  # noqa: E402
    flash_attn_func,
    flash_attn_varlen_func,
    flash_attn_with_kvcache,
)

__all__ += ["causal_conv1d_fn", "flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]
'''

# The loader of kernels before 0.11 imports this folder instead.
OLD_LAYOUT = '''import importlib.util
import pathlib
import sys

_path = pathlib.Path(__file__).resolve().parent.parent / "__init__.py"
_spec = importlib.util.spec_from_file_location("{module}", _path)
_module = sys.modules.get("{module}")
if _module is None:
    _module = importlib.util.module_from_spec(_spec)
    sys.modules["{module}"] = _module
    _spec.loader.exec_module(_module)
globals().update({{name: value for name, value in vars(_module).items() if not name.startswith("__") or name == "__version__"}})
'''


def digest(folder):
    """A short name for the content of a folder."""
    found = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.name != "metadata.json":
            found.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()[:12]


def has_device_code(extension):
    """Whether a build of the extension has the GPU kernels: their fat binaries have a magic number."""
    return b"\x50\xed\x55\xba" in extension.read_bytes()


def write_variant(source, folder, backend):
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("__pycache__", "*.pyc", "doctor.py"))
    module = f"cotangent_{digest(folder)}"
    (folder / "_namespace.py").write_text(f'# SPDX-License-Identifier: Apache-2.0\nNAMESPACE = "{module}"\n')
    init = folder / "__init__.py"
    init.write_text(init.read_text() + NAMES)
    (folder / "cotangent").mkdir()
    (folder / "cotangent/__init__.py").write_text(OLD_LAYOUT.format(module=module))
    metadata = {"id": module, "name": "cotangent", "version": 0, "license": "Apache-2.0", "python-depends": [],
                "backend": {"type": backend}}
    (folder / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def main(build, folder):
    source, folder = pathlib.Path(build) / "python/cotangent", pathlib.Path(folder)
    extension = source / "_C.abi3.so"
    if not extension.exists():
        sys.exit(f"make_kernels_layout: {extension} is missing, run `cmake --build {build} --target cotangent_python`")
    machine = f"{platform.machine()}-{platform.system().lower()}"
    variants = {f"{TORCH}-cpu-{machine}": "cpu"}
    if has_device_code(extension):
        variants.update({f"{TORCH}-cu{major}-{machine}": "cuda" for major in CUDA_MAJORS})
    for name, backend in variants.items():
        write_variant(source, folder / "build" / name, backend)
        if shutil.which("strip"):
            subprocess.run(["strip", "--strip-debug", str(folder / "build" / name / "_C.abi3.so")], check=True)
        print(f"make_kernels_layout: {folder / 'build' / name}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__.strip())
    main(*sys.argv[1:])
