#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests `bench`, `demo`, `run` and `profile` with --backend hip, in tests/emulator-amd and without a HIP runtime.

    tests/tools/test_hip_commands.py PROGRAM EMULATOR_DIRECTORY NO_RUNTIME_DIRECTORY
"""
import json
import os
import subprocess
import sys
import tempfile

import checks
import numpy as np
from checks import check

PROGRAM, EMULATOR, NO_RUNTIME = map(os.path.realpath, sys.argv[1:])
DEVICE = 'emulator of gfx942, whose times mean nothing'


def program(*arguments, runtime=EMULATOR, **variables):
    return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, check=False,
                          env={**os.environ, 'LD_LIBRARY_PATH': runtime, **variables})


def succeeds(texts, *arguments, **options):
    result = program(*arguments, **options)
    check(result.returncode == 0 and result.stderr == '' and all(text in result.stdout for text in texts),
          f'{arguments}: exit status {result.returncode}, expected 0 and {texts}\n{result.stdout}{result.stderr}')


def refused(status, text, *arguments, **options):
    """Requires one line on stderr that begins with "cotangent", nothing on stdout, and that exit status."""
    result = program(*arguments, **options)
    check(result.returncode == status and result.stdout == '' and result.stderr.startswith('cotangent')
          and text in result.stderr and result.stderr.count('\n') == 1,
          f'{arguments}: exit status {result.returncode}, expected {status} and "{text}"\n{result.stdout}{result.stderr}')


def rows_of(path):
    with open(path, encoding='utf-8') as file:
        return json.load(file)


def test_bench():
    for words, kernel in ((('causal_conv1d', 'forward', 'B=1', 'D=16', 'T=64', 'f16'), 'channel_first'),
                          (('causal_conv1d_dense', 'forward', 'B=1', 'T=40', 'Din=8', 'Dout=8', 'bf16'), 'mma'),
                          (('dropout', 'backward', 'R=64', 'D=64'), 'bwd_rows')):
        succeeds([DEVICE, kernel, '_cdna', 'chosen'], 'bench', *words, '--backend', 'hip', '--json', 'rows.json')
        for row in rows_of('rows.json'):
            check(row['backend'] == 'hip' and row['device'] == DEVICE and row['ms'] > 0 and row['ceiling'] > 0,
                  f'bench {words}: {row}')
    succeeds(['emulator of gfx90a'], 'bench', 'dropout', 'forward', 'R=64', 'D=64', '--backend', 'hip', EMU_TARGET='gfx90a')
    refused(2, 'attention_forward: no kernel of this backend supports these arguments', 'bench', 'attention', 'forward', 'T=16',
            '--backend', 'hip')


def test_demo():
    for number in ('000', '002', '003'):
        succeeds([DEVICE, 'within the bounds'], 'demo', number, '--quick', '--backend', 'hip', '--json', 'rows.json')
        rows = [row for row in rows_of('rows.json') if 'kernel' in row]
        check(rows and all(row['backend'] == 'hip' and row['device'] == DEVICE and row['verified'] <= 1 for row in rows),
              f'demo {number}: {rows}')
    refused(2, "NUMBER is '001', whose op attention has no kernel of backend hip", 'demo', '001', '--backend', 'hip')
    refused(2, "NUMBER is '004', whose op mhc_pre has no kernel of backend hip", 'demo', '004', '--backend', 'hip')


def test_run():
    """The outputs differ from zero, are those of the CPU within the error rule, and are verified by the oracle."""
    generator = np.random.default_rng(1)
    np.save('x.npy', generator.standard_normal((2, 24, 72)).astype(np.float16))
    np.save('weight.npy', generator.standard_normal((24, 4)).astype(np.float32))
    np.save('dy.npy', generator.standard_normal((2, 24, 72)).astype(np.float16))
    for direction, inputs, names in (('forward', ('x', 'weight'), ('y',)),
                                     ('backward', ('x', 'weight', 'dy'), ('dx', 'dweight'))):
        files = [word for name in inputs for word in (f'--{name}', f'{name}.npy')]
        call = ['run', 'causal_conv1d', direction, *files, '--activation', 'silu']
        succeeds(['_cdna'], *call, '--backend', 'hip', '--verify', '--out', 'hip')
        succeeds([], *call, '--out', 'cpu')
        for name in names:
            check(np.abs(np.load(f'hip/{name}.npy')).max() > 0, f'run {direction}: {name} is zero')
            succeeds([' 0 beyond it'], 'diff', f'hip/{name}.npy', f'cpu/{name}.npy')
    refused(2, 'kernel causal_conv1d_fwd_scalar', 'run', 'causal_conv1d', 'forward', '--x', 'x.npy', '--weight',
            'weight.npy', '--backend', 'hip', '--kernel', 'causal_conv1d_fwd_scalar', '--out', 'none')
    check(not os.path.exists('none'), 'run: a refused call wrote its outputs')


def test_profile():
    """Every mode copies the same bytes, launches one kernel per piece, and reports the resources of its code object."""
    for target, modes, words in (('gfx942', 8, []), ('gfx90a', 1, ['--memory', 'fresh', '--streams', '2', '--batch', 'loop'])):
        succeeds(['causal_conv1d forward f16', f'emulator of {target}'], 'profile', 'causal_conv1d', 'forward', 'B=4', 'D=8',
                 'T=64', 'K=4', 'f16', 'silu', 'bias', '--backend', 'hip', '--json', 'rows.json', *words, EMU_TARGET=target)
        rows = {(row['memory'], row['streams'], row['batch']): row for row in rows_of('rows.json')}
        check(len(rows) == modes, f'profile: {len(rows)} modes, expected {modes}')
        for (memory, streams, batch), row in rows.items():
            check(row['pieces'] == (4 if batch == 'loop' else streams)
                  and row['bytes_to_device'] == 2 * 4 * 8 * 64 + 4 * (8 * 4 + 8) and row['bytes_to_host'] == 2 * 4 * 8 * 64
                  and (row['allocation_ms'] > 0) == (memory == 'fresh')
                  and row['total_ms'] > row['kernels_ms'] > 0 and row['to_device_ms'] > 0 and row['to_host_ms'] > 0,
                  f'profile: {row}')
            check(sum(launch['count'] for launch in row['launches']) == row['pieces'], f'profile: {row}')
            for launch in row['launches']:
                check('channel_first' in launch['name'] and launch['registers'] % 8 == 0 and 0 < launch['registers'] <= 512
                      and 0 < launch['occupancy'] <= 1 and launch['waves'] > 0 and launch['dynamic_shared'] == 0,
                      f'profile: {launch}')
    succeeds(['dropout backward'], 'profile', 'dropout', 'backward', 'R=64', 'D=64', '--backend', 'hip', '--json', 'rows.json', '--memory', 'pool',
             '--streams', '1')
    check(any(launch['static_shared'] == 8192 for row in rows_of('rows.json') for launch in row['launches']),
          'profile: the sums of dropout backward use 8192 bytes of LDS')
    refused(2, 'attention_forward: no kernel of this backend supports these arguments', 'profile', 'attention', 'forward', 'T=16',
            '--backend', 'hip')
    refused(1, 'allocating page-locked memory: hipErrorOutOfMemory', 'profile', 'dropout', 'forward', 'R=64', 'D=64', '--backend',
            'hip', FAKE_HIP='no_host_memory')


def test_no_runtime():
    for arguments in (('bench', 'dropout', 'forward', 'R=64', 'D=64'), ('profile', 'dropout', 'forward'), ('demo', '000', '--quick'), ('demo', '001'),
                      ('run', 'causal_conv1d', 'forward', '--x', 'x.npy', '--weight', 'weight.npy', '--verify')):
        refused(1, 'cot_queue_create: no HIP runtime of ROCm 6.0 or later: ', *arguments, '--backend', 'hip',
                runtime=NO_RUNTIME)


def test_other_backends():
    result = program('bench', 'dropout', '--backend', 'tpu')
    check(result.returncode == 2 and "--backend is 'tpu', expected cpu, cuda or hip" in result.stderr, result.stderr)


def main():
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for test in [value for name, value in globals().items() if name.startswith('test_')]:
            test()
        os.chdir('/')
    print(f'{checks.passed} passed, {checks.failed} failed')
    return checks.failed > 0


sys.exit(main())
