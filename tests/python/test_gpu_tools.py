# SPDX-License-Identifier: Apache-2.0
"""The scripts that run on a machine with a GPU, with small work on the CPU."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools"

CASES = '''
import pytest, torch
from flash_attn import flash_attn_func
from flash_attn.flash_attn_interface import _get_block_size_n, USE_TRITON_ROCM
from flash_attn.layers.rotary import apply_rotary_emb

@pytest.mark.parametrize("n", range(20))
def test_attention(n):
    q = torch.randn(1, 3, 1, 8)
    assert flash_attn_func(q, q, q).shape == q.shape

def test_paged():
    from flash_attn import flash_attn_with_kvcache
    q = torch.randn(1, 1, 1, 8)
    flash_attn_with_kvcache(q, q, q, block_table=q)
'''


def run(*command):
    environment = dict(os.environ, OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1")
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, env=environment)


def test_peer_tests(on_cpu, tmp_path):
    (tmp_path / "tests").mkdir()
    file = tmp_path / "tests" / "test_flash_attn.py"
    file.write_text(CASES)
    done = run(TOOLS / "run_peer_tests.py", "--flash-attn", tmp_path)
    assert done.returncode == 0 and "flash_attn: 20 passed, 0 failed, 1 skipped" in done.stdout, done.stdout + done.stderr
    assert "1 skipped: flash_attn_with_kvcache: block_table is not supported by cotangent" in done.stdout
    done = run(TOOLS / "run_peer_tests.py", "--flash-attn", tmp_path, "--sample", "5")
    assert done.returncode == 0 and " of " not in done.stdout, done.stdout
    assert "5 passed" in done.stdout or "4 passed, 0 failed, 1 skipped" in done.stdout
    file.write_text(CASES + "\ndef test_fails():\n    assert False\n")
    assert run(TOOLS / "run_peer_tests.py", "--flash-attn", tmp_path).returncode == 1
    assert run(TOOLS / "run_peer_tests.py", "--flash-attn", tmp_path / "tests").returncode == 1
    assert run(TOOLS / "run_peer_tests.py").returncode == 2


def test_attention_options(on_cpu, tmp_path):
    small = ["--device", "cpu", "--tokens", 64, "--length", 32, "--width", 128]
    done = run(TOOLS / "measure_attention_options.py", *small, "--json", tmp_path / "out.json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "out.json").read_text())
    assert len(rows) == 14 and all(row["forward_ms"] > 0 and row["backward_ms"] > 0 for row in rows)
    assert {row["dtype"] for row in rows} == {"bfloat16", "float32"} and sum("sdpa_forward_ms" in row for row in rows) == 4


def test_measurement(on_cpu, tmp_path):
    pytest.importorskip("transformers")
    small = ["--device", "cpu", "--dtype", "float32", "--batch", 2, "--length", 24, "--layers", 1, "--width", 128, "--steps", 1,
             "--vocab", 256]  # fmt: skip
    done = run(TOOLS / "measure_transformers.py", *small, "--models", "llama-350m", "--implementations", "sdpa,cotangent",
               "--padding", 0.25, "--json", tmp_path / "out.json")  # fmt: skip
    assert done.returncode == 0 and "largest difference of a loss" in done.stdout, done.stdout + done.stderr
    sdpa, ours = json.loads((tmp_path / "out.json").read_text())
    assert (sdpa["implementation"], ours["implementation"]) == ("sdpa", "cotangent") and ours["tokens_per_s"] > 0
    assert sdpa["losses"] == pytest.approx(ours["losses"], rel=1e-2)
    done = run(TOOLS / "measure_transformers.py", *small, "--models", "llama-350m", "--implementations", "none")
    assert done.returncode == 1 and "failed: " in done.stdout
