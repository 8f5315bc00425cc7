#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the programs with failing allocations. The N-th allocation fails, for every N until a run has fewer than N.
Then all allocations from the N-th on fail. Such a run must end with one line on stderr, exit status 1, and unchanged
output files. It may also succeed with the outputs of an undisturbed run, if the C library does not need the memory.

Every allocation since main began fails once (tests/tools/fail_allocations.c): those of the program, libc, libgomp and
jansson. For libgomp, the line on stderr is that of libgomp. These allocations never fail:

    before main         the dynamic loader and the constructors of libraries
    OpenBLAS            its kernels for small matrices do not check the result of malloc
    libgomp             in train_lm only, where each parallel region allocates; `run` covers these failures

    tests/tools/test_memory.py FAIL_ALLOCATIONS.so PROGRAM [TRAIN_LM TOKENIZE_TEXT]
"""
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time

import numpy as np

LIBRARY, PROGRAM = (os.path.realpath(path) for path in sys.argv[1:3])
TRAIN_LM, TOKENIZE_TEXT = map(os.path.realpath, sys.argv[3:5]) if sys.argv[3:5] else (None, None)
LICENSE = os.path.realpath('LICENSE')
SECONDS = 10  # limit for one run: a run that hangs is a failure
SHOWN = 8     # maximum number of failures that are printed per command
ENVIRONMENT = {'PATH': '/nonexistent', 'HOME': '/', 'OMP_NUM_THREADS': '1', 'OPENBLAS_NUM_THREADS': '1'}
QKV = [f'--{name}={name}.npy' for name in 'qkv']
passed = failed = 0


def content_of(folder):
    """A dictionary of every path below the folder and its bytes; None for a folder."""
    tree = {}
    for where, folders, files in os.walk(folder):
        for name in folders:
            tree[os.path.relpath(os.path.join(where, name), folder)] = None
        for name in files:
            with open(os.path.join(where, name), 'rb') as file:
                tree[os.path.relpath(os.path.join(where, name), folder)] = file.read()
    return tree


def restore(folder, tree):
    shutil.rmtree(folder, ignore_errors=True)
    os.mkdir(folder)
    for path, content in sorted(tree.items()):
        if content is None:
            os.mkdir(os.path.join(folder, path))
        else:
            with open(os.path.join(folder, path), 'wb') as file:
                file.write(content)


def run(command, number=None, excepted='libopenblas'):
    """Runs the command in the folder `work`. Also returns the call that failed, or None."""
    environment = dict(ENVIRONMENT)
    if number is not None:
        environment.update(LD_PRELOAD=LIBRARY, FAIL_ALLOCATION=number, FAIL_ALLOCATION_LOG='../log',
                           FAIL_ALLOCATION_EXCEPT=excepted)
    try:
        result = subprocess.run(command, cwd='work', env=environment, capture_output=True, timeout=SECONDS, text=True,
                                stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        result = subprocess.CompletedProcess(command, f'none after {SECONDS} s', '', '')
    try:
        with open('log', encoding='utf-8') as file:
            call = file.readline().strip()
        os.remove('log')
    except FileNotFoundError:
        call = None
    return result, call


def what_is_wrong(result, tree, before, after, expected, steady, in_turn):
    """The reason why a run with a failed allocation is wrong, or None. A program that writes its files one by one may
    have written the first files completely."""
    tree, after = ({path: steady(content) for path, content in files.items()} for files in (tree, after))
    if result.returncode == 0:
        if result.stderr != '':
            return 'exit status 0, but a message'
        if steady(result.stdout.encode()) != steady(expected.encode()):
            return 'exit status 0, but another stdout than that of an undisturbed run'
        return None if tree == after else 'exit status 0, but other files than those of an undisturbed run'
    if result.returncode != 1:
        return f'exit status {result.returncode}, expected 1'
    if len(result.stderr.strip('\n').splitlines()) != 1:  # libgomp prints an empty line first
        return 'no single line on stderr'
    if not any(words in result.stderr for words in ('memory', 'Memory', 'pool cannot grow')):
        return 'the line on stderr does not speak of memory'
    for path in sorted(set(tree) | set(before)):
        whole = [before.get(path, 'none')] + ([after.get(path, 'none')] if in_turn else [])
        if tree.get(path, 'none') not in whole:
            return f'left or changed {path}'
    return None


def fail_each(name, whole, later, expected, after, steady, excepted, in_turn):
    """Makes every allocation of one command fail in turn; with `later`, also all allocations after it."""
    global passed, failed
    begin = time.monotonic()
    number, served, wrong = 0, 0, 0
    while True:
        number += 1
        result, call = run(whole, f'{number}{later}', excepted)
        if call is None:
            break
        tree = content_of('work')
        why = what_is_wrong(result, tree, INPUTS, after, expected, steady, in_turn)
        served += result.returncode == 0
        if why is not None:
            wrong += 1
            if wrong <= SHOWN:
                print(f'FAILED: {name}: allocation {number}{later} ({call}): {why}: {result.stderr[:300]!r}')
        if tree != INPUTS:
            restore('work', INPUTS)
    if what_is_wrong(result, content_of('work'), INPUTS, after, expected, steady, False) or result.returncode != 0:
        wrong += 1
        print(f'FAILED: {name}: the run without a failure: {result.returncode} {result.stderr}')
    restore('work', INPUTS)
    passed += number - wrong
    failed += wrong
    print(f'{name}: {number - 1} allocations{" and all later ones" if later else ""}: {number - 1 - served} ended with exit '
          f'status 1, {served} did without; {wrong} wrong, {time.monotonic() - begin:.1f} s')


def command(name, *arguments, program=PROGRAM, steady=lambda content: content, excepted='libopenblas', in_turn=False):
    global failed
    whole = [program, *map(str, arguments)]
    undisturbed, _ = run(whole)
    after = content_of('work')
    restore('work', INPUTS)
    if undisturbed.returncode != 0 or undisturbed.stderr != '':
        failed += 1
        print(f'FAILED: {name}: undisturbed: {undisturbed.returncode} {undisturbed.stderr}')
        return
    for later in ('', '+'):
        fail_each(name, whole, later, undisturbed.stdout, after, steady, excepted, in_turn)


def make_inputs():
    """The files that every command finds: inputs, and old outputs."""
    random = np.random.default_rng(1)
    os.mkdir('work')
    for name in ('q', 'k', 'v', 'dout'):
        np.save(f'work/{name}.npy', random.standard_normal((1, 3, 2, 4)).astype('<f4'))
    np.save('work/big.npy', np.load('work/q.npy').astype('>f4'))
    np.save('work/other.npy', np.load('work/q.npy') * np.float32(1.5))
    np.save('work/near.npy', np.nextafter(np.load('work/q.npy'), np.float32(9)))
    os.mkdir('work/old')
    for name in ('out', 'lse', 'dq'):
        with open(f'work/old/{name}.npy', 'w', encoding='utf-8') as file:
            file.write('the old file')
    with open('work/old.safetensors', 'w', encoding='utf-8') as file:
        file.write('the old file')
    shutil.copy(LICENSE, 'work/text')
    with open('work/tokens.bin', 'wb') as file:
        np.array([20240520, 1, 2000] + [0] * 253, '<i4').tofile(file)
        (np.arange(2000) % 256).astype('<u2').tofile(file)
    result, _ = run([PROGRAM, 'run', 'attention', 'forward', *QKV, '--out', 'forward.safetensors'])
    assert result.returncode == 0, result.stderr
    numbers = ('streams pieces total_ms allocation_ms to_device_ms kernels_ms to_host_ms bytes_to_device bytes_to_host').split()
    texts = 'op direction kernel dtype layout shape options memory batch device date commit'.split()
    with open('work/rows.json', 'w', encoding='utf-8') as file:
        json.dump([{**{key: 'x' for key in texts}, **{key: 1 for key in numbers}, 'launches': []}], file)
    if TOKENIZE_TEXT is not None:
        with open('work/words', 'wb') as file:
            file.write(b'ab ab \xff abc\n')
        result, _ = run([TOKENIZE_TEXT, '--train', '259', '--tokenizer', 'tokenizer.json', '--out', 'unused', 'words'])
        assert result.returncode == 0, result.stderr
        os.remove('work/unused')
    return content_of('work')


def test_program():
    backward = [*QKV, '--dout', 'dout.npy', '--outputs', 'dq,dk,dv']
    command('run forward', 'run', 'attention', 'forward', *QKV, '--verify', '--out', 'old', '--threads', 1)
    command('run backward', 'run', 'attention', 'backward', *backward, '--tensor-out', 'forward.safetensors:out', '--lse',
            'forward.safetensors:lse', '--verify', '--out', 'new')
    command('run, big-endian and .safetensors', 'run', 'attention', 'forward', '--q', 'big.npy', '--k',
            'forward.safetensors:out', '--v', 'v.npy', '--out', 'old.safetensors')
    command('run, --in', 'run', 'attention', 'backward', *backward, '--in', 'forward.safetensors', '--out', 'new.safetensors')
    command('diff', 'diff', 'near.npy', 'q.npy')
    command('diff .safetensors', 'diff', 'forward.safetensors', 'forward.safetensors')
    command('profile --from', 'profile', '--from', 'rows.json', '--json', 'old.json')
    command('ops', 'ops')
    command('explain', 'explain', 'attention', 'forward')


def test_train_lm():
    def without_rate(content):
        """Removes the figures that differ between runs: tokens per second (before their unit, in JSON, and in the
        table of runs), and the times and rates of the ops."""
        rates = (rb'\d+ tokens/s|"tokens_per_second": [^,]*|(?<=as given   )  +\d+ +\d+|(?m:^full  +\d+ +\d+)'
                 rb'|(?: +[\d.]+){3} (?=GB/s|GFLOP/s)')
        return re.sub(rates, b'', content) if content is not None else None

    small = ['--steps', 2, '--batch', 1, '--context', 8, '--width', 4, '--layers', 1, '--quiet', '--out', 'old']
    trainer = {'program': TRAIN_LM, 'steady': without_rate, 'excepted': 'libopenblas libgomp', 'in_turn': True}
    command('train_lm', 'text', *small, '--attention', 1, '--mhc', 2, '--sample', 2, '--checkpoint', 'run.safetensors', **trainer)
    command('train_lm of tokens', '--tokens', 'tokens.bin', '--vocabulary', 256, *small, '--arch', 'gpt2', '--heads', 2,
            '--sample', 2, '--export', 'old', **trainer)
    command('train_lm of its own text', *small, '--source-dir', '.', '--sample', 0, **trainer)
    command('train_lm of several', 'text', *small, '--sample', 0, '--seeds', 2, '--json', 'old/runs.json', **trainer)


def test_tokenizer():
    """A short text: every word and every merge allocates."""
    trained = ['--tokenizer', 'old.json', '--out', 'old.bin', 'words']
    command('tokenize_text --train', '--train', 259, *trained, program=TOKENIZE_TEXT)
    command('tokenize_text', '--tokenizer', 'tokenizer.json', '--out', 'old.bin', 'words', program=TOKENIZE_TEXT)


def main():
    global INPUTS
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        INPUTS = make_inputs()
        test_program()
        if TRAIN_LM is not None:
            test_train_lm()
            test_tokenizer()
        os.chdir('/')
    print(f'{passed} passed, {failed} failed')
    return failed > 0


if __name__ == '__main__':
    sys.exit(main())
