#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests train_lm on the emulated GPU: two runs have the same bits, and so has a run that was killed (kill -9) and
resumed. So have two runs on 2 GPUs, whose losses are those of one GPU up to rounding. A missing driver, GPU or cuBLASLt, too little memory and a checkpoint of other options give one line.

    tests/tools/test_train_cuda.py PROGRAM EMULATOR FAKE_DRIVER NO_DRIVER    the last three: folders for LD_LIBRARY_PATH
"""
import os
import subprocess
import sys
import tempfile
import time

import checks
from checks import check

PROGRAM, EMULATOR, FAKE, NONE = map(os.path.realpath, sys.argv[1:])
TEXT = os.path.realpath('LICENSE')
RUN = [PROGRAM, TEXT, '--steps', '6', '--batch', '2', '--accumulate', '2', '--context', '16', '--width', '16',
       '--inner', '64', '--layers', '2', '--attention', '2', '--mlp', '24', '--dropout', '0.1', '--sample', '0', '--quiet']


def environment(folder, **variables):
    return {**os.environ, 'PATH': '/nonexistent', 'OMP_WAIT_POLICY': 'passive', 'LD_LIBRARY_PATH': folder, **variables}


def run(*arguments, env=None):
    return subprocess.run([*RUN, '--out', 'out', *arguments], env=env or environment(EMULATOR), text=True,
                          capture_output=True)


def results(result):
    return [line for line in result.stdout.splitlines() if 'loss' in line or 'hash' in line]


def content(path):
    with open(path, 'rb') as file:
        return file.read()


def run_and_kill(options, checkpoint, env):
    """Kills a run when its first checkpoint is there."""
    killed = subprocess.Popen([*RUN, '--out', 'out', *options], env=env, stdout=subprocess.DEVNULL)
    while killed.poll() is None and not os.path.exists(checkpoint):
        time.sleep(0.002)
    killed.kill()
    check(killed.wait() < 0, f'{options}: the run ended before it could be killed')


def test_bits(dtype):
    """The same bits from two runs, and from a run that is killed after its first checkpoints."""
    options = ['--backend', 'cuda', '--dtype', dtype, '--every', '1']
    first = run(*options, '--checkpoint', 'first.safetensors')
    second = run(*options, '--checkpoint', 'second.safetensors')
    check(first.returncode == 0, f'{dtype}: status {first.returncode}: {first.stderr}')
    check(results(first) == results(second), f'{dtype}: two runs differ')
    check(content('first.safetensors') == content('second.safetensors'), f'{dtype}: two checkpoints differ')
    less = run(*options[:4], '--recompute')
    check(results(less) == results(first), f'{dtype}: a run with --recompute differs: {less.stderr}')
    run_and_kill([*options, '--checkpoint', 'third.safetensors'], 'third.safetensors', environment(EMULATOR))
    check(content('third.safetensors') != content('first.safetensors'), f'{dtype}: nothing was left to resume')
    resumed = run(*options, '--checkpoint', 'third.safetensors', '--resume')
    check(results(resumed) == results(first), f'{dtype}: a resumed run differs: {resumed.stderr}')
    check(content('third.safetensors') == content('first.safetensors'), f'{dtype}: a resumed checkpoint differs')


def test_gpt2():
    """GPT-2's layers: the loss of a step, at the CPU and at the GPU."""
    options = ['--arch', 'gpt2', '--inner', '16', '--mlp', '32', '--dtype', 'f32', '--dropout', '0', '--steps', '3']
    run_gpt2 = [PROGRAM, TEXT, '--batch', '2', '--context', '16', '--width', '16', '--layers', '2', '--sample', '0',
                '--quiet', '--out', 'out', *options]
    losses = []
    for backend in 'cpu', 'cuda':
        result = subprocess.run([*run_gpt2, '--backend', backend], env=environment(EMULATOR), text=True,
                                capture_output=True)
        check(result.returncode == 0, f'gpt2 on {backend}: {result.stderr}')
        losses += [float(line.split()[2]) for line in result.stdout.splitlines() if line.startswith('validation loss')]
    check(len(losses) == 2 and abs(losses[0] - losses[1]) < 1e-5, f'gpt2: {losses}')


def validation(result):
    return [float(line.split()[2]) for line in results(result) if line.startswith('validation loss')]


def test_gpus():
    """2 GPUs add the gradients in another order than 1 GPU. Dropout drops the same elements."""
    one, *more = (run('--backend', 'cuda', '--gpus', gpus, '--dtype', 'f32', env=environment(EMULATOR, FAKE_CUDA_DEVICES='2'))
                  for gpus in '122')
    check(more[0].returncode == 0 and '2 GPUs' in more[0].stdout, f'2 GPUs: {more[0].stderr} {more[0].stdout}')
    check(results(more[0]) == results(more[1]), '2 GPUs: two runs differ')
    losses = validation(one) + validation(more[0])
    check(len(losses) == 2 and abs(losses[0] - losses[1]) < 1e-5, f'1 and 2 GPUs: {losses}')
    checkpoint = ['--backend', 'cuda', '--gpus', '2', '--dtype', 'f32', '--checkpoint', 'two.safetensors', '--every', '2']
    two = environment(EMULATOR, FAKE_CUDA_DEVICES='2')
    check(results(run(*checkpoint, env=two)) == results(more[0]), '2 GPUs: a checkpoint changes the results')
    check(results(run(*checkpoint, '--resume', '--steps', '6', env=two))[-1:] == results(more[0])[-1:], '2 GPUs: resume')
    expect_line(run('--backend', 'cuda', '--gpus', '3', env=two), 2, '--accumulate is 2', 'multiple of the 3 GPUs')
    expect_line(run('--backend', 'cuda', '--gpus', '2'), 2, '--gpus is 2', 'options.device is 1, expected 0 to 0')
    expect_line(run('--gpus', '2', env=two), 2, '--gpus', '--backend cuda')
    expect_line(run('--backend', 'cuda', '--gpus', '2', env=environment(EMULATOR, FAKE_CUDA_DEVICES='2', CUBLASLT='/none')), 1,
                'cuBLASLt', '/none')


def test_sharded_optimizer():
    """GPUs that share the optimiser have the parameters and the checkpoint of GPUs that do not, also when resumed."""
    two = environment(EMULATOR, FAKE_CUDA_DEVICES='2')
    for dtype in ('f32', 'bf16'):
        options = ['--backend', 'cuda', '--gpus', '2', '--dtype', dtype, '--every', '1', '--checkpoint']
        whole = run(*options, f'{dtype}.whole', env=two)
        shards = run(*options, f'{dtype}.shards', '--shard-optimizer', env=two)
        check(shards.returncode == 0, f'{dtype}: {shards.stderr}')
        check(results(shards) == results(whole), f'{dtype}: --shard-optimizer changes the results')
        check(content(f'{dtype}.shards') == content(f'{dtype}.whole'), f'{dtype}: --shard-optimizer changes the checkpoint')
        run_and_kill([*options, f'{dtype}.killed', '--shard-optimizer'], f'{dtype}.killed', two)
        check(content(f'{dtype}.killed') != content(f'{dtype}.whole'), f'{dtype}: nothing was left to resume')
        resumed = run(*options, f'{dtype}.killed', '--shard-optimizer', '--resume', env=two)
        check(results(resumed) == results(whole), f'{dtype}: resumed with --shard-optimizer: {resumed.stderr}')


def test_context_ranks():
    """GPUs that hold parts of the sequences train as one GPU does, up to rounding, and with the same bits in two runs."""
    for gpus, more in (('2', []), ('4', ['--recompute'])):
        many = environment(EMULATOR, FAKE_CUDA_DEVICES=gpus)
        options = ['--backend', 'cuda', '--dtype', 'f32', '--dropout', '0', '--dense', '0', '--lr', '0.01', *more]
        divide = ['--gpus', gpus, '--context-ranks', '2']
        one, *divided = (run(*options, *words, env=many) for words in ([], divide, divide))
        check(divided[0].returncode == 0, f'{gpus} GPUs {more}: {divided[0].stderr}')
        check(results(divided[0]) == results(divided[1]), f'{gpus} GPUs {more}: two runs differ')
        losses = validation(one) + validation(divided[0])
        check(len(losses) == 2 and abs(losses[0] - losses[1]) < 1e-5, f'{gpus} GPUs {more}: {losses}')
    expect_line(run('--backend', 'cuda', '--gpus', '2', '--context-ranks', '2', env=many), 2, '--context-ranks 2: needs --dropout 0')


def expect_line(result, status, *words):
    lines = result.stderr.splitlines()
    good = result.returncode == status and len(lines) == 1 and all(word in lines[0] for word in words)
    check(good, f'expected one line with {words} and status {status}, got {result.returncode}: {result.stderr!r}')


def test_errors():
    checkpoint = ['--checkpoint', 'first.safetensors', '--every', '1', '--resume']
    expect_line(run('--backend', 'cuda', '--dtype', 'f16', *checkpoint), 2, '--dtype f32', 'f16')
    expect_line(run(*checkpoint), 2, '--backend cuda', 'cpu')
    cuda = ['--backend', 'cuda']
    expect_line(run(*cuda, env=environment(NONE)), 1, 'no CUDA driver')
    expect_line(run(*cuda, env=environment(FAKE, FAKE_CUDA='no_device')), 1, 'no device')
    expect_line(run(*cuda, env=environment(FAKE, FAKE_CUDA='old')), 1, 'too old')
    expect_line(run(*cuda, env=environment(FAKE, FAKE_CUDA='no_memory')), 1, 'GB', '--batch')
    expect_line(run(*cuda, env=environment(EMULATOR, CUBLASLT='/nonexistent')), 1, 'cuBLASLt', '/nonexistent')
    expect_line(run(*cuda, env=environment(EMULATOR, FAKE_CUBLASLT='no_algorithm')), 1, 'no algorithm')
    expect_line(run(*cuda, '--inner', '24'), 1, 'multiple of 8')
    expect_line(run('--dtype', 'bf16'), 2, '--dtype', '--backend cuda')
    expect_line(run('--backend', 'gpu'), 2, '--backend', 'cpu, cuda or auto')
    automatic = run('--backend', 'auto', env=environment(NONE))
    check(automatic.returncode == 0 and 'backend: cpu (' in automatic.stdout, f'auto without a GPU: {automatic.stderr}')
    automatic = run('--backend', 'auto')
    check(automatic.returncode == 0 and 'backend: cuda' in automatic.stdout and 'GPU: Emulated GPU' in automatic.stdout,
          f'auto with a GPU: {automatic.stderr}')


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    test_bits('bf16')
    os.remove('first.safetensors'), os.remove('second.safetensors'), os.remove('third.safetensors')
    test_bits('f32')
    test_gpt2()
    test_gpus()
    test_sharded_optimizer()
    test_context_ranks()
    test_errors()
print('test_train_cuda: ' + (f'{checks.failed} checks failed' if checks.failed else 'passed'))
sys.exit(checks.failed > 0)
