# SPDX-License-Identifier: Apache-2.0
"""The folder that the loader of Hugging Face kernels expects (tools/make_kernels_layout.py), loaded by its path, beside the
package itself."""
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cotangent

TOOL = Path(__file__).parents[2] / "tools" / "make_kernels_layout.py"
ALONE = Path(sys.prefix) / "alone"

USE = """
import importlib.util, pathlib, sys, torch
import cotangent as installed
folder = pathlib.Path(sys.argv[1])
{load}
assert loaded.__file__.startswith(sys.argv[1]) and loaded is not installed, loaded.__file__
q, x, w = torch.randn(1, 5, 2, 8, requires_grad=True), torch.randn(1, 4, 9), torch.randn(4, 3)
for run in (lambda m: m.attention(q, q, q, causal=True), lambda m: m.causal_conv1d(x, w, activation="silu")):
    assert torch.equal(run(loaded), run(installed))
ours, = torch.autograd.grad(loaded.attention(q, q, q).sum(), q)
assert torch.equal(ours, *torch.autograd.grad(installed.attention(q, q, q).sum(), q))
assert torch.equal(loaded.flash_attn_func(q, q, q), installed.attention(q, q, q))
assert torch.equal(loaded.causal_conv1d_fn(x, w), installed.causal_conv1d(x, w))
names = [str(op) for op in (loaded.ops._define.registered_ops, torch.ops.cotangent)]
assert len(set(names)) == 2, names
print("loaded", loaded.__version__)
"""


@pytest.fixture(scope="module")
def layout(tmp_path_factory):
    folder = tmp_path_factory.mktemp("layout")
    build = Path(cotangent.__file__).parents[2]
    done = subprocess.run([sys.executable, str(TOOL), str(build), str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def use(load, layout, *paths):
    path = os.pathsep.join([*map(str, paths), os.environ.get("PYTHONPATH", "")])
    environment = dict(os.environ, PYTHONPATH=path, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    done = subprocess.run([sys.executable, "-c", USE.format(load=load), str(layout)], capture_output=True, text=True,
                          env=environment)  # fmt: skip
    assert done.returncode == 0 and f"loaded {cotangent.__version__}" in done.stdout, done.stdout + done.stderr


def test_variants(layout):
    """The variant of the CPU is always there. Metadata names the copy by its content."""
    variants = sorted(path.name for path in (layout / "build").iterdir())
    assert sum("-cpu-" in name for name in variants) == 1
    for name in variants:
        metadata = json.loads((layout / "build" / name / "metadata.json").read_text())
        assert metadata["name"] == "cotangent" and metadata["id"].startswith("cotangent_")
        assert metadata["backend"]["type"] == ("cpu" if "-cpu-" in name else "cuda")
        assert metadata["id"] in (layout / "build" / name / "_namespace.py").read_text()


def test_loads_by_path(on_cpu, layout):
    if not ALONE.exists() and importlib.util.find_spec("kernels") is None:
        pytest.skip("the package kernels is not installed")
    use("import kernels; loaded = kernels.get_local_kernel(folder, backend='cpu')", layout, ALONE)


def test_loads_in_the_old_layout(on_cpu, layout):
    """Older loaders import the package inside the variant's folder."""
    use("""path = next(folder.glob("build/*-cpu-*")) / "cotangent/__init__.py"
spec = importlib.util.spec_from_file_location("old_cotangent", path)
loaded = importlib.util.module_from_spec(spec)
spec.loader.exec_module(loaded)""", layout)


def test_needs_a_build(tmp_path):
    done = subprocess.run([sys.executable, str(TOOL), str(tmp_path), str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1 and "cmake --build" in done.stderr
