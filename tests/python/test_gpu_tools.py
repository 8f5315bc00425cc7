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


# Prints the lines of train_lm that the tools read. With --log it runs until it is killed, unless it resumes. OTHER_BITS: every
# run has another hash.
TRAINER = """#!{python}
import os, sys, time
arguments = sys.argv[1:]
def after(name):
    return arguments[arguments.index(name) + 1] if name in arguments else None
if after("--log"):
    open(after("--checkpoint"), "w").close()
    while True:
        with open(after("--log"), "a") as log:
            log.write("a step\\n")
        time.sleep(0.005)
assert "--resume" not in arguments or os.path.exists(after("--checkpoint"))
print("NVIDIA H100, bf16; 13.00 GB for the model, 13.55 of its 80 GB in use then, and the workspace of the ops")
print("training loss 1.5\\nvalidation loss 1.6\\n123 parameters, 456 tokens/s in training")
print("hash of the parameters:", os.getpid() if "OTHER_BITS" in os.environ else "abc")
"""


@pytest.fixture
def trainer(on_cpu, tmp_path, monkeypatch):
    for name, text in ("train_lm", TRAINER.format(python=sys.executable)), ("nvidia-smi", "#!/bin/sh\necho 13000\n"):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path / "train_lm"


def measure(tool, *arguments):
    return subprocess.run([sys.executable, TOOLS / tool, *map(str, arguments)], capture_output=True, text=True)


def test_measure_training(trainer, tmp_path, monkeypatch):
    rows = tmp_path / "rows.json"
    done = measure("measure_training.py", trainer, "--parts", "memory,bits", "--only", "gpt2", "--json", rows)
    assert done.returncode == 0, done.stderr
    assert "twice, and killed and resumed: abc abc abc" in done.stdout
    found = [(row["recompute"], row["tokens_per_second"], row["printed_gb"], row["used_gb"]) for row in json.loads(rows.read_text())]
    assert found == [(0, 456, 13.55, 13.63), (1, 456, 13.55, 13.63)]
    monkeypatch.setenv("OTHER_BITS", "1")
    done = measure("measure_training.py", trainer, "--parts", "bits", "--only", "gpt2")
    assert done.returncode == 1 and "the parameters differ" in done.stderr


def test_measure_training_gpus(trainer, monkeypatch):
    done = measure("measure_training_gpus.py", trainer, "--gpus", "1,2", "--context", "1024")
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert [(row["gpus"], row["op"], row["tokens_per_second"], row["validation_loss"]) for row in rows] == [
        (1, "training_context", 456, 1.6), (2, "training_context", 456, 1.6)]  # fmt: skip
    monkeypatch.setenv("OTHER_BITS", "1")
    done = measure("measure_training_gpus.py", trainer, "--gpus", "1")
    assert done.returncode == 1 and "two runs have other bits" in done.stderr
