# SPDX-License-Identifier: Apache-2.0
"""Runs examples/mamba_block.py and examples/gpt_block.py, which compare decoding with the forward."""
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize("name", ["mamba_block.py", "gpt_block.py"])
def test_example(on_cpu, name):
    done = subprocess.run([sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and "decoding differs" in done.stdout, done.stdout + done.stderr
