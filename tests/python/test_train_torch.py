# SPDX-License-Identifier: Apache-2.0
"""Runs examples/train_torch.py on the CPU with a small model. The loss falls, plain PyTorch gives the same losses, and
two processes give the same losses as one, by batches or by sequences."""
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "train_torch.py"
LITTLE = ["--device", "cpu", "--width", "32", "--layers", "3", "--context", "64", "--batch", "4", "--dropout", "0"]


def curve(into, *options, launcher=()):
    command = [sys.executable, *launcher, str(EXAMPLE), *LITTLE, "--json", str(into), *options]
    one_thread = dict(os.environ, OMP_NUM_THREADS="1")  # a small model gains nothing from more
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=one_thread)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(into.read_text())


def same(one, other):
    assert [step for step, _, _ in one] == [step for step, _, _ in other]
    for (_, *a), (_, *b) in zip(one, other):
        assert a == pytest.approx(b, rel=2e-4)


def test_learns_alike_with_either_ops_and_on_two_processes(on_cpu, tmp_path):
    text = tmp_path / "text"  # few distinct bytes, so that 30 steps lower the loss on every machine
    text.write_text("".join(f"{n} and {n + 1} make {2 * n + 1}\n" for n in range(6000)))
    options = ["--steps", "30", "--eval-every", "10", "--lr", "0.01", "--text", str(text)]
    ours = curve(tmp_path / "ours.json", *options)
    assert ours[-1][2] < ours[0][2] - 1
    same(ours, curve(tmp_path / "plain.json", *options, "--ops", "torch"))
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    same(ours, curve(tmp_path / "two.json", *options, launcher=launcher))
    same(ours, curve(tmp_path / "cut.json", *options, "--context-parallel", launcher=launcher))


def test_refuses_what_cannot_be_shared_out(on_cpu):
    done = subprocess.run([sys.executable, str(EXAMPLE), "--width", "33"], capture_output=True, text=True)
    assert done.returncode == 2 and "--width is 33, expected a multiple of 32" in done.stderr
    done = subprocess.run([sys.executable, str(EXAMPLE), "--context-parallel"], capture_output=True, text=True)
    assert done.returncode == 2 and "--context-parallel needs several processes" in done.stderr
    done = subprocess.run([sys.executable, str(EXAMPLE), "--text", str(EXAMPLE)], capture_output=True, text=True)
    assert done.returncode == 1 and "bytes of text are too few" in done.stderr
