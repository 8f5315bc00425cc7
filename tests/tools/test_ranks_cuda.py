#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests train_lm on two ranks of mpirun with an emulated GPU each, whose transfers go through MPI: the parameters and the losses
of --gpus 2, because both add the same gradients in the same order.

    tests/tools/test_ranks_cuda.py TRAIN_LM EMULATOR MPIRUN...    EMULATOR: the folder for LD_LIBRARY_PATH
"""
import os
import subprocess
import sys
import tempfile

import checks
from checks import check

PROGRAM, EMULATOR, MPIRUN = os.path.realpath(sys.argv[1]), os.path.realpath(sys.argv[2]), sys.argv[3:]
TEXT = os.path.realpath('LICENSE')
RUN = [PROGRAM, TEXT, '--backend', 'cuda', '--dtype', 'f32', '--steps', '2', '--batch', '2', '--accumulate', '2', '--context', '16',
       '--width', '16', '--inner', '64', '--layers', '2', '--attention', '2', '--mlp', '24', '--dropout', '0', '--dense', '0',
       '--sample', '0', '--quiet', '--out', 'out']
ENVIRONMENT = {**os.environ, 'OMP_WAIT_POLICY': 'passive', 'LD_LIBRARY_PATH': EMULATOR, 'FAKE_CUDA_DEVICES': '2'}


def run(start, *options):
    return subprocess.run([*start, *RUN, *options], env=ENVIRONMENT, text=True, capture_output=True, timeout=200)


def results(done):
    check(done.returncode == 0, f'{done.args}: {done.returncode}, {done.stderr[-500:]}')
    return [line for line in done.stdout.splitlines() if 'loss' in line or 'hash' in line]


def refused(start, options, text):
    done = run(start, *options)
    check(done.returncode != 0 and text in done.stderr, f'{options}: {done.stderr[-500:]}')


def main():
    ranks = [*MPIRUN, '-n', '2']
    for options in (['--shard-optimizer'], ['--context-ranks', '2']):
        threads = results(run([], '--gpus', '2', *options))
        check(any('hash' in line for line in threads), f'{options}: --gpus 2 prints {threads}')
        check(results(run(ranks, '--transfers', 'mpi', *options)) == threads, f'{options}: ranks of mpirun differ from --gpus 2')
    refused([], ['--transfers', 'mpi'], '--transfers needs several ranks of mpirun')
    refused(ranks, ['--backend', 'cpu', '--transfers', 'mpi'], '--transfers needs several ranks of mpirun, and --backend cuda')
    refused([], ['--transfers', 'tcp'], '--transfers is "tcp", expected nccl or mpi')
    print(f'{checks.failed} failures')
    return 1 if checks.failed else 0


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    sys.exit(main())
