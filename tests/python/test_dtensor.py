# SPDX-License-Identifier: Apache-2.0
"""Sharding rules for DTensor, on two processes of the CPU (dtensor_rules.py)."""
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch.distributed.tensor.experimental")


def test_rules(on_cpu):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
               str(Path(__file__).with_name("dtensor_rules.py"))]  # fmt: skip
    one_thread = dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=one_thread)
    assert done.returncode == 0 and done.stdout.count("sharded ops agree") == 2, done.stdout + done.stderr
