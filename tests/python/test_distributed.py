# SPDX-License-Identifier: Apache-2.0
"""cotangent.distributed on two, three and four processes of the CPU (distributed_ranks.py), and of GPUs if there are two."""
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed.fsdp

from cotangent import _C

BUILD = Path(_C.__file__).parents[2]
EMULATOR, NCCL = BUILD / "tests" / "emulator", BUILD / "tests" / "parallel" / "nccl_whole"
SCRIPT = Path(__file__).with_name("distributed_ranks.py")
ENVIRONMENT = dict(os.environ, OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo", HF_HUB_OFFLINE="1")


def launch(folder, sections, ranks, *device):
    """Runs sections on every rank. Returns their exit statuses and their output."""
    processes = [
        subprocess.Popen([sys.executable, str(SCRIPT), sections, str(rank), str(ranks), str(folder), *device], text=True,
                         stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=ENVIRONMENT)
        for rank in range(ranks)
    ]  # fmt: skip
    deadline = time.monotonic() + 240
    try:
        output = [process.communicate(timeout=max(deadline - time.monotonic(), 1))[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [process.returncode for process in processes], "\n".join(output)


def check(folder, sections, ranks, *device):
    statuses, output = launch(folder, sections, ranks, *device)
    assert statuses == [0] * ranks and output.count("is done") == ranks, output


@pytest.mark.parametrize("ranks", [2, 4])
def test_ops(on_cpu, tmp_path, ranks):
    check(tmp_path, "attention,convolution,cuts" + (",compiled" if ranks == 2 else ""), ranks)


def test_models_of_transformers_and_fsdp(on_cpu, tmp_path):
    pytest.importorskip("transformers")
    check(tmp_path, "models,fsdp" if hasattr(torch.distributed.fsdp, "fully_shard") else "models", 2)


@pytest.mark.parametrize("number, ranks", [(0, 2), (1, 4), (2, 2), (3, 2), (4, 2)])
def test_page(on_cpu, number, ranks):
    if number == 2:
        pytest.importorskip("transformers")
    if number in (3, 4) and not hasattr(torch.distributed.fsdp, "fully_shard"):
        pytest.skip("torch has no fully_shard")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), str(SCRIPT), "page",
               str(number)]  # fmt: skip
    environment = dict(ENVIRONMENT, CUDA_VISIBLE_DEVICES="")  # else the programs would use the GPUs
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0 and done.stdout.count("is done") == ranks, done.stdout + done.stderr


def test_faults_reach_every_rank(on_cpu, tmp_path):
    statuses, output = launch(tmp_path, "faults", 3)
    assert statuses == [0, 0, -9] and output.count("has survived") == 2, output


def test_nccl_on_the_emulator(on_cpu):
    if not (EMULATOR / "libcuda.so.1").exists() or not (NCCL / "libnccl.so.2").exists():
        pytest.skip("a build without the emulator")
    command = [sys.executable, str(SCRIPT.with_name("nccl_ranks.py")), _C.__file__, "libcuda.so.1", "libnccl.so.2"]
    environment = dict(os.environ, LD_LIBRARY_PATH=f"{EMULATOR}:{NCCL}", FAKE_NCCL_PATIENCE="2000")
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0 and "all ranks are done" in done.stdout, done.stdout + done.stderr


def test_no_nccl(on_cpu, tmp_path):
    check(tmp_path, "no_nccl", 3)


@pytest.mark.parametrize("sections", ["attention", "convolution,cuts,compiled", "models,fsdp"])
def test_on_gpus(on_gpu, tmp_path, sections):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    check(tmp_path, sections, 2, "cuda")


def test_faults_on_gpus(on_gpu, tmp_path):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    statuses, output = launch(tmp_path, "faults", 2, "cuda")
    assert statuses == [0, -9] and output.count("has survived") == 1, output
