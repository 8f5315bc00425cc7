# SPDX-License-Identifier: Apache-2.0
"""Runs the examples on the CPU. mamba_block.py and gpt_block.py compare decoding with the forward, replace_flash_attn.py
compares with PyTorch, and the losses of fsdp2.py must fall."""
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed.fsdp

EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENT = dict(os.environ, CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("name, words", [
    ("mamba_block.py", "decoding differs"), ("gpt_block.py", "decoding differs"),
    ("replace_flash_attn.py", "flash_attn is cotangent.compat.flash_attn"),
])  # fmt: skip
def test_example(on_cpu, name, words):
    done = subprocess.run([sys.executable, str(EXAMPLES / name)], capture_output=True, text=True, timeout=300, env=ENVIRONMENT)
    assert done.returncode == 0 and words in done.stdout, done.stdout + done.stderr


def test_fsdp2(on_cpu):
    if not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("torch has no fully_shard")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(EXAMPLES / "fsdp2.py")]
    environment = dict(ENVIRONMENT, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    losses = [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
    assert done.returncode == 0 and len(losses) == 4 and losses[-1] < 0.5 * losses[0], done.stdout + done.stderr
