#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests train_lm's checkpoints. A training that is killed (kill -9) at a random time and resumed ends with the same
bits as an undisturbed training. A checkpoint that is damaged, of another run, or cannot be written is reported in one
line.

    tests/tools/test_resume.py PROGRAM
"""
import json
import os
import random
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time

import checks
import limited
from checks import check

PROGRAM = os.path.realpath(sys.argv[1])
TEXT = os.path.realpath('LICENSE')
KILLS = 5  # per architecture
ARCHITECTURES = ([], ['--arch', 'conv'], ['--attention', '1'], ['--attention', '2'], ['--arch', 'gpt2'], ['--attention', '2', '--mhc', '2'])
STEPS = 60
RUN = [PROGRAM, TEXT, '--steps', str(STEPS), '--batch', '2', '--context', '64', '--width', '16', '--layers', '2',
       '--dropout', '0.1', '--sample', '0', '--quiet', '--out', 'out', '--checkpoint', 'run.safetensors']
# Without PATH, gnuplot is not found, which would take longer than the training. Idle threads must not spin.
ENVIRONMENT = {**os.environ, 'PATH': '/nonexistent', 'OMP_WAIT_POLICY': 'passive'}
# In the build with sanitizers, only undisturbed runs detect leaks. Of the many resumed runs, one would sometimes end
# with a fault of LeakSanitizer's tracer ("Tracer caught signal 11").
RESUMED = {**ENVIRONMENT, 'ASAN_OPTIONS': os.environ.get('ASAN_OPTIONS', '') + ':detect_leaks=0'}


def run(*arguments, architecture=(), limit=None):
    environment = RESUMED if '--resume' in arguments else ENVIRONMENT
    return limited.run([*RUN, *architecture, *map(str, arguments)], environment, limit)


def content(path):
    with open(path, 'rb') as file:
        return file.read()


def end_of(result):
    """The results of a run: the printed losses, the curve, and all bits of parameters, moments and losses."""
    printed = [line for line in result.stdout.splitlines() if 'loss' in line or 'hash' in line]
    return printed, content('out/loss.csv'), content('run.safetensors')


def clear():
    for name in os.listdir('.'):
        shutil.rmtree(name) if os.path.isdir(name) else os.remove(name)


def kill_at_random(draw, seconds, architecture):
    """Starts a run and kills it within the time of a complete run. True if it was still running."""
    process = subprocess.Popen([*RUN, *architecture, '--resume', '--every', str(draw.choice((1, 2, 7))), '--threads',
                                str(draw.choice((1, 2)))], stdout=subprocess.DEVNULL, env=ENVIRONMENT)
    time.sleep(draw.uniform(0, seconds))
    process.kill()
    return process.wait() < 0


def test_kills(draw, architecture):
    """Returns how many of the killed runs had a checkpoint."""
    clear()
    start = time.monotonic()
    undisturbed = run('--every', 7, architecture=architecture)  # the fastest of the variants below
    seconds = time.monotonic() - start
    check(undisturbed.returncode == 0, f'undisturbed: {undisturbed.stderr}')
    expected = end_of(undisturbed)
    killed = resumed = attempts = 0
    while killed < KILLS and attempts < 5 * KILLS:
        clear()
        attempts += 1
        if not kill_at_random(draw, seconds, architecture):
            seconds *= 0.8  # the machine is less busy than when the complete run was timed
            continue
        killed += 1
        has_checkpoint = os.path.exists('run.safetensors')
        resumed += has_checkpoint
        seconds *= 1 if has_checkpoint else 1.1
        result = run('--resume', '--every', 5, architecture=architecture)
        check(result.returncode == 0 and end_of(result) == expected,
              f'{architecture}, kill {killed}: another end than the undisturbed run\'s\n{result.stdout}{result.stderr}')
        check(not os.path.exists('run.safetensors.partial'), f'kill {killed}: left a partial file')
    check(killed == KILLS, f'only {killed} of {attempts} runs were still at work when they were killed')
    if architecture != ARCHITECTURES[-1]:
        return resumed
    # One run that is killed repeatedly.
    clear()
    kills = 0
    for _ in range(5):
        kills += kill_at_random(draw, seconds / 2, architecture)
    result = run('--resume', architecture=architecture)
    check(result.returncode == 0 and end_of(result) == expected, f'{kills} kills: {result.stdout}{result.stderr}')
    again = run('--resume', architecture=architecture)
    check(again.returncode == 0 and end_of(again) == expected, 'going on from a finished run')
    print(f'then one run killed {kills} times')
    return resumed


def test_all_kills():
    draw = random.Random(7)
    resumed = sum(test_kills(draw, architecture) for architecture in ARCHITECTURES)
    kills = KILLS * len(ARCHITECTURES)
    check(resumed >= kills // 4, f'only {resumed} of {kills} runs had a checkpoint when they were killed')
    print(f'{kills} runs killed, {resumed} of them with a checkpoint')


def test_several():
    """--arch and --seeds print a table at the end. Its runs equal single runs."""
    clear()
    small = [PROGRAM, TEXT, '--steps', '4', '--batch', '1', '--context', '32', '--width', '8', '--layers', '5', '--quiet',
             '--sample', '0', '--out', 'out']

    def train(*arguments):
        return subprocess.run([*small, *arguments], capture_output=True, text=True, env=ENVIRONMENT)

    def hash_of(result):
        return [line for line in result.stdout.splitlines() if 'hash' in line]

    several = train('--arch', 'hybrid-mhc,conv', '--seeds', '2', '--json', 'runs.json')
    check(several.returncode == 0, f'several: {several.stderr}')
    single = [train('--seed', seed, *model) for model in (['--attention', '0'], ['--attention', '5', '--mhc', '2']) for seed in '12']
    check(hash_of(several) == [hash_of(result)[0] for result in single] and len(set(hash_of(several))) == 4,
          f'several are not the single ones: {several.stdout}')
    with open('runs.json', encoding='utf-8') as file:
        rows = json.load(file)
    check([(row['trained'], row['seed']) for row in rows] ==
          [('conv', 1), ('conv', 2), ('hybrid-mhc', 1), ('hybrid-mhc', 2)], f'runs.json: {rows}')
    check(not os.path.exists('out/conv-1/loss.csv.partial'), 'a partial file')
    os.chmod('runs.json', 0o604)  # a replaced file keeps its permissions, and a symbolic link to it remains
    os.symlink('runs.json', 'link.json')
    replaced = train('--arch', 'conv', '--seeds', '2', '--json', 'link.json')
    check(replaced.returncode == 0 and os.path.islink('link.json') and os.stat('runs.json').st_mode & 0o777 == 0o604,
          f'--json through a symbolic link: {replaced.stderr}')
    missing = train('--arch', 'conv', '--seeds', '2', '--json', 'missing/runs.json')
    check(missing.returncode == 2 and missing.stdout.count('\n') == 0 and missing.stderr ==
          'train_lm: --json missing/runs.json: cannot be written: No such file or directory\n', missing.stderr)
    for row in rows:
        check(f" {row['validation']:.4f} " in several.stdout, f'not in the table: {row}')
        check(os.path.exists(f"out/{row['trained']}-{row['seed']}/loss.csv"), f'no curve of {row}')
    check([line.split()[0] for line in several.stdout.splitlines()[-4:-2]] == ['conv', 'hybrid-mhc'],
          f'the table: {several.stdout}')
    for arguments, text in ((['--arch', 'rnn'], '--arch is "rnn", expected conv, attention, hybrid, hybrid-mhc, full, gpt2 or all'),
                            (['--arch', 'conv,'], '--arch is "conv,", expected'),
                            (['--arch', 'hybrid', '--mhc', '2'], '--arch says what --attention, --mhc and --dense say'),
                            (['--arch', 'all', '--checkpoint', 'x'], '--checkpoint is of a single run'),
                            (['--preset', 'gpt2-124m', '--mhc', '2'], '--attention, --mhc and --dense are not of a gpt2 preset'),
                            (['--preset', 'gpt3'], '--preset is "gpt3", expected gpt2-124m, gpt2-350m, llama-130m'),
                            (['--arch', 'gpt2', '--heads', '8', '--kv-heads', '2'], '--kv-heads is not of GPT-2'),
                            (['--arch', 'gpt2', '--heads', '7'], '--width must be a multiple of --heads'),
                            (['--arch', 'conv', '--heads', '7'], 'the default of --inner, 5/4 of the width, is no multiple'),
                            (['--json', 'x'], '--json is of several runs')):
        result = train(*arguments)
        check(result.returncode == 2 and result.stderr.startswith(f'train_lm: {text}')
              and result.stderr.count('\n') == 1, f'{arguments}: {result.returncode} {result.stderr}')


def test_interrupt():
    """SIGINT ends a run after its step, with a checkpoint and one line. The resumed run equals an undisturbed one. The log
    has every step once."""
    clear()
    undisturbed = run('--every', 1000)
    expected = end_of(undisturbed)
    clear()
    process = subprocess.Popen([*RUN, '--every', '1000', '--log', 'log.jsonl'], stdout=subprocess.DEVNULL,
                               stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)
    while process.poll() is None and not (os.path.exists('log.jsonl') and content('log.jsonl')):
        time.sleep(0.001)
    process.send_signal(signal.SIGINT)
    message = process.communicate()[1]
    check(process.returncode == 130 and message.count('\n') == 1 and
          message.startswith('train_lm: stopped by SIGINT after step ') and
          message.endswith(f'of {STEPS}: --resume goes on from run.safetensors\n'),
          f'SIGINT: status {process.returncode}, {message!r}')
    check(os.path.exists('out/loss.csv'), 'SIGINT: no curve')
    resumed = run('--resume', '--every', 1000, '--log', 'log.jsonl')
    check(resumed.returncode == 0 and end_of(resumed) == expected, f'after SIGINT: {resumed.stdout}{resumed.stderr}')
    steps = [json.loads(line)['step'] for line in content('log.jsonl').splitlines()]
    check(steps == list(range(1, STEPS + 1)), f'after SIGINT: the log has the steps {steps}')


def test_default():
    """Without --arch every op is used, and a table at the end lists them."""
    clear()
    small = [PROGRAM, TEXT, '--steps', '6', '--batch', '1', '--context', '32', '--width', '8', '--layers', '5', '--sample', '9',
             '--out', 'out']

    def train(*arguments):
        return subprocess.run([*small, *arguments], capture_output=True, text=True, env=ENVIRONMENT).stdout

    lines = train().splitlines()
    table = lines[[line.startswith('ops in training') for line in lines].index(True) + 1:] if any(
        line.startswith('ops in training') for line in lines) else []
    rows = {' '.join(line.split()[:2]): line.split()[2:] for line in table}
    ops = ('causal_conv1d', 'causal_conv1d_dense', 'attention', 'dropout', 'mhc_pre', 'mhc_post_pre', 'mhc_post')
    check(sorted(rows) == sorted(f'{op} {direction}' for op in ops for direction in ('forward', 'backward')),
          f'the ops of a default run: {sorted(rows)}')
    for name, row in rows.items():
        check(len(row) == 5 and int(row[0]) >= 6 and all(float(value) >= 0 for value in row[1:4])
              and row[4] == ('GFLOP/s' if name.split()[0] in ('causal_conv1d_dense', 'attention') else 'GB/s'), f'{name}: {row}')
    check(rows.get('dropout backward', [''])[0] == '30', 'six steps of five blocks drop thirty times')
    hashes = [[line for line in train(*arch).splitlines() if 'hash' in line]
              for arch in ([], ['--arch', 'full'], ['--attention', '5', '--mhc', '2', '--dense', '4'], ['--arch', 'hybrid-mhc'])]
    check(hashes[0] == hashes[1] == hashes[2] != hashes[3], f'the default is --arch full: {hashes}')


def refused(text, *arguments, status=2, **options):
    before = {name: content(name) for name in os.listdir('.') if os.path.isfile(name)}
    result = run(*arguments, **options)
    check(result.returncode == status and result.stderr.startswith('train_lm: ') and result.stderr.count('\n') == 1
          and text in result.stderr, f'{arguments}: {result.returncode}, expected {status} with "{text}": {result.stderr}')
    after = {name: content(name) for name in os.listdir('.') if os.path.isfile(name)}
    check(before == after, f'{arguments}: changed a file')


def test_refusals():
    clear()
    check(run('--every', 40).returncode == 0, 'a run')
    whole = content('run.safetensors')
    refused('run.safetensors: is there: --resume goes on from it')
    for option, value, was in (('--lr', 0.001, '0.0040000000000000001'), ('--steps', 61, '60'), ('--seed', 2, '1'),
                               ('--width', 24, '16'), ('--batch', 1, '2'), ('--clip', 2, '1'),
                               ('--weight-decay', 0, '0.40000000000000002'), ('--kernel', 3, '4'),
                               ('--dropout', 0.2, '0.10000000000000001')):
        refused(f'was trained with {option} {was}, not ', '--resume', option, value)
    refused('was trained on another text', '--resume', os.path.join(os.path.dirname(TEXT), 'README.md'))
    length = struct.unpack('<Q', whole[:8])[0]
    for name, damaged in {'there are': whole[:-1], 'is cut off in its header': whole[:length],
                          'is no checkpoint of this program': whole.replace(b'checkpoint 1', b'checkpoint 9'),
                          'has no tensor "norm.gain"': whole.replace(b'"norm.gain"', b'"norm.pain"'),
                          'has another dtype or shape': whole.replace(b'"F32","shape":[16]', b'"I32","shape":[16]'),
                          'within the first 8 bytes': b''}.items():
        with open('run.safetensors', 'wb') as file:
            file.write(damaged)
        refused(name, '--resume')
    os.remove('run.safetensors')
    refused('missing/c: cannot be written: No such file or directory', '--checkpoint', 'missing/c')
    refused('out: is a directory, expected a regular file', '--checkpoint', 'out', '--resume')
    # A full disk during the training: the run ends, and resumes from the last complete checkpoint.
    refused('run.safetensors: cannot be written: File too large', '--every', 7, status=1, limit=50000)
    check(not os.path.exists('run.safetensors'), 'a full disk: a checkpoint')
    for arguments in (['--resume'], ['--every', '3']):
        result = subprocess.run([PROGRAM, TEXT, *arguments], capture_output=True, text=True, env=ENVIRONMENT)
        check(result.returncode == 2 and result.stderr == f'train_lm: {arguments[0]} needs --checkpoint\n',
              f'{arguments} without --checkpoint: {result.stderr}')


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        test_all_kills()
        test_several()
        test_default()
        test_interrupt()
        test_refusals()
        os.chdir('/')
    print(f'{checks.passed} passed, {checks.failed} failed')
    return checks.failed > 0


sys.exit(main())
