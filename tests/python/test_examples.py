# SPDX-License-Identifier: Apache-2.0
"""Runs examples/mamba_block.py, which compares decoding with the forward."""
import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).parents[2] / "examples" / "mamba_block.py"


def test_mamba_block(on_cpu):
    done = subprocess.run([sys.executable, str(EXAMPLE)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "decoding differs" in done.stdout, done.stdout + done.stderr
