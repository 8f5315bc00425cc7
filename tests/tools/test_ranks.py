#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests train_lm on several ranks of mpirun: the same parameters as one rank that adds the same batches, the losses of one rank if
the ranks divide the sequences, checkpoints that another number of ranks resumes, ranks with other options, a rank that is killed.

    tests/tools/test_ranks.py TRAIN_LM MPIRUN...
"""
import array
import json
import os
import re
import signal
import struct
import subprocess
import sys
import tempfile
import time

import checks
from checks import check

PROGRAM, MPIRUN = os.path.realpath(sys.argv[1]), sys.argv[2:]
os.environ['NCCL'] = '/none/libnccl.so.2'
COMMON = [PROGRAM, '--text', 'text', '--width', '32', '--inner', '32', '--layers', '2', '--context', '32', '--batch', '2', '--accumulate',
          '4', '--steps', '8', '--sample', '0', '--threads', '1', '--quiet', '--out', 'out']


def run(ranks, *options, seconds=60):
    """One rank runs without mpirun."""
    start = [] if ranks == 1 else [*MPIRUN, '-n', str(ranks)]
    return subprocess.run([*start, *COMMON, *options], capture_output=True, text=True, timeout=seconds)


def results(done):
    """The hash of the parameters and the losses."""
    check(done.returncode == 0, f'{done.args}: {done.returncode}, {done.stderr[-500:]}')
    return re.findall(r'^hash.*|^\w+ loss.*', done.stdout, re.M)


def same_on_all_ranks():
    for options in ([], ['--arch', 'gpt2', '--dropout', '0.2'], ['--attention', '2', '--mhc', '2']):
        one = results(run(1, *options))
        check(len(one) == 3, f'one rank prints {one}')
        for ranks in (2, 4):
            done = run(ranks, *options)
            check(results(done) == one, f'{ranks} ranks {options}: {results(done)}, one rank {one}')
            check(done.stdout.count('hash of the parameters') == 1, f'{ranks} ranks: only rank 0 prints')


def sharded_optimizer():
    """Ranks that share the optimiser have the parameters and the checkpoint of ranks that do not."""
    options = ['--attention', '2', '--mhc', '2', '--checkpoint', 'shards.safetensors', '--every', '4']

    def of(ranks, *more):
        found = results(run(ranks, *options, *more))
        with open('shards.safetensors', 'rb') as file:
            checkpoint = file.read()
        os.remove('shards.safetensors')
        return found, checkpoint

    one = of(1)
    for ranks in (1, 2, 4):
        check(of(ranks, '--shard-optimizer') == one, f'{ranks} ranks with --shard-optimizer differ from one rank')


def losses(done):
    check(done.returncode == 0, f'{done.args}: {done.returncode}, {done.stderr[-500:]}')
    return [float(text) for text in re.findall(r'^\w+ loss +([0-9.]+)', done.stdout, re.M)]


def first_moments(path):
    """The weighted mean of every parameter's gradients over the steps, from a checkpoint; removes the file."""
    with open(path, 'rb') as file:
        header = json.loads(file.read(struct.unpack('<q', file.read(8))[0]))
        data = file.read()
    os.remove(path)
    moments = {}
    for name, entry in header.items():
        if name.endswith('.moment1'):
            values = array.array({'F32': 'f', 'F64': 'd'}[entry['dtype']])
            values.frombytes(data[slice(*entry['data_offsets'])])
            moments[name] = values
    return moments


def different_gradients(first, second):
    """The parameters with gradients that differ by more than rounding. AdamW divides by the size of a gradient, so that losses hardly show
    one that is a multiple of the right one."""
    check(first.keys() == second.keys() and len(first) > 0, f'moments of {list(first)} and {list(second)}')
    return [name for name, values in first.items()
            if max(abs(a - b) for a, b in zip(values, second[name], strict=True)) > 1e-3 * max(map(abs, values))]  # fmt: skip


def divided_sequences():
    """Ranks that hold parts of the sequences train as one rank does, up to rounding, and with the same bits in two runs."""
    checkpoint = ['--checkpoint', 'divided.safetensors']
    for options in (['--attention', '2', '--dense', '0'], ['--arch', 'gpt2'], ['--attention', '2', '--mhc', '2', '--dense', '0', '--recompute']):
        options = [*options, '--dropout', '0', '--lr', '0.01']  # 8 steps that rounding changes by 1e-8
        one = losses(run(1, *options, *checkpoint))
        moments = first_moments('divided.safetensors')
        check(len(one) == 2, f'one rank prints {one}')
        for ranks, context_ranks in ((2, 2), (4, 2), (4, 4)):
            divide = ['--context-ranks', str(context_ranks)]
            done = run(ranks, *options, *divide, *checkpoint)
            near = all(abs(a - b) < 2e-7 for a, b in zip(losses(done), one, strict=True))
            check(near, f'{ranks} ranks {options} {divide}: {losses(done)}, one rank {one}')
            wrong = different_gradients(moments, first_moments('divided.safetensors'))
            check(not wrong, f'{ranks} ranks {options} {divide}: gradients of {wrong}')
            if ranks == 4:
                check(results(run(ranks, *options, *divide)) == results(done), f'{ranks} ranks {options} {divide}: two runs differ')
    options = ['--arch', 'hybrid', '--dropout', '0', '--accumulate', '1']
    one, done = losses(run(1, *options)), run(2, *options, '--context-ranks', '2')
    check(all(abs(a - b) < 2e-7 for a, b in zip(losses(done), one, strict=True)), f'one batch: {losses(done)}, one rank {one}')


def ranks_of(process):
    """The processes of train_lm below mpirun."""
    found = []
    for folder in filter(str.isdigit, os.listdir('/proc')):
        try:
            with open(f'/proc/{folder}/stat', encoding='utf-8') as file:
                name, parent = re.match(r'\d+ \((.*)\) \S (\d+)', file.read()).groups()
        except (OSError, AttributeError):
            continue
        if name == 'train_lm' and int(parent) == process.pid:
            found.append(int(folder))
    return found


def kill_a_rank(process):
    """The job ends within 30 seconds, with a message."""
    ranks = ranks_of(process)
    check(len(ranks) == 4, f'ranks below mpirun: {ranks}')
    if ranks:
        os.kill(ranks[-1], signal.SIGKILL)
    start = time.monotonic()
    try:
        _, errors = process.communicate(timeout=30)
        check(process.returncode != 0 and re.search('signal 9|killed', errors, re.I), f'a killed rank: {errors[-300:]}')
    except subprocess.TimeoutExpired:
        process.kill()
        check(False, f'a killed rank: no end after {time.monotonic() - start:.0f} s')


def resumed_on_other_ranks():
    """A rank of 4 is killed; 2 ranks go on from the checkpoint."""
    files, steps = ['--checkpoint', 'run.safetensors', '--every', '3', '--log', 'run.jsonl'], ['--steps', '300']
    whole = results(run(1, *steps))
    process = subprocess.Popen([*MPIRUN, '-n', '4', *COMMON, *files, *steps], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                               text=True)  # fmt: skip
    deadline = time.monotonic() + 60
    while not os.path.exists('run.safetensors') and time.monotonic() < deadline:
        time.sleep(0.01)
    kill_a_rank(process)
    check(results(run(2, *files, *steps, '--resume', '--shard-optimizer')) == whole, '2 ranks resume from the checkpoint of 4')
    with open('run.jsonl', encoding='utf-8') as file:
        logged = {json.loads(line)['step'] for line in file}
    check(logged == set(range(1, 301)), 'the log has every step')


def refused():
    done = run(3)
    check(done.returncode != 0 and '--accumulate is 4, expected a multiple of the 3 ranks' in done.stderr, f'3 ranks: {done.stderr}')
    done = subprocess.run([*MPIRUN, '-n', '1', *COMMON, ':', '-n', '1', *COMMON, '--lr', '1e-3'], capture_output=True, text=True, timeout=60)
    check(done.returncode != 0 and 'rank 1 has other options' in done.stderr, f'other options: {done.stderr[-500:]}')
    done = subprocess.run([*MPIRUN, '-n', '1', *COMMON, ':', '-n', '1', *COMMON[:1], '--text', 'missing', *COMMON[3:]],
                          capture_output=True, text=True, timeout=60)  # fmt: skip
    check(done.returncode != 0 and 'missing' in done.stderr, f'a rank without a text: {done.stderr[-500:]}')
    no_cuda = 'this build has no CUDA'
    without_nccl = 'mpirun with --backend cuda needs NCCL, which cannot be opened: /none'
    for ranks, options, text in (
            (2, ['--backend', 'cuda'], no_cuda if no_cuda in run(1, '--backend', 'cuda').stderr else without_nccl),
            (2, ['--context-ranks', '2'], '--context-ranks 2: needs --dropout 0: '),
            (2, ['--context-ranks', '2', '--dropout', '0'], '--context-ranks 2: needs --dense 0: '),
            (2, ['--context-ranks', '2', '--context', '30'], '--context is 30, expected a multiple of 2 x --context-ranks, 4'),
            (3, ['--context-ranks', '2'], '--context-ranks is 2, expected a divisor of the number of ranks, 3'),
            (1, ['--context-ranks', '2'], '--context-ranks is 2, expected a divisor of the number of ranks, 1'),
            (4, ['--context-ranks', '2', '--accumulate', '3'], '--accumulate is 3, expected a multiple of the 2 groups of ranks'),
            (2, ['--gpus', '2', '--backend', 'cuda'], '--gpus: with mpirun each rank has one GPU')):
        done = run(ranks, *options)
        check(done.returncode != 0 and text in done.stderr, f'{ranks} ranks {options}: {done.stderr[-500:]}')


def main():
    with open('text', 'wb') as file:
        file.write(bytes((i * i * 7 + i // 3) % 96 + 32 for i in range(40000)))
    same_on_all_ranks()
    sharded_optimizer()
    divided_sequences()
    resumed_on_other_ranks()
    refused()
    print(f'{checks.failed} failures')
    return 1 if checks.failed else 0


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    sys.exit(main())
