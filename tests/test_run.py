#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""`cotangent diff` on files that NumPy wrote.

    tests/test_run.py PROGRAM
"""
import json
import os
import resource
import struct
import subprocess
import sys
import tempfile

import numpy as np

PROGRAM = os.path.realpath(sys.argv[1])
UNIT = {'f64': 2.0**-53, 'f32': 2.0**-24, 'f16': 2.0**-11, 'bf16': 2.0**-8}
TINY = {'f64': 2.0**-1074, 'f32': 2.0**-149, 'f16': 2.0**-24, 'bf16': 2.0**-133}
passed = failed = 0


def check(good, what):
    global passed, failed
    if good:
        passed += 1
    else:
        failed += 1
        print(f'FAILED: {what}')


# ---- files -----------------------------------------------------------------------------------------------------

def to_bf16(values):
    """The bits of bf16, rounded to nearest, ties to even, in an array of NumPy's '<V2'."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view('V2')


def values_of(array):
    """Any array that run reads or writes, wide enough to judge float64 by."""
    if array.dtype == np.dtype('V2'):
        return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.longdouble)
    return array.astype(np.longdouble)


def cast(values, dtype):
    if dtype == 'bf16':
        return to_bf16(values)
    return np.asarray(values).astype({'f64': '<f8', 'f32': '<f4', 'f16': '<f2'}[dtype])


def save(path, array, descr=None):
    if descr is None:
        np.save(path, array)
        return
    with open(path, 'wb') as file:  # a descriptor that NumPy itself would not write
        np.lib.format.write_array_header_1_0(
            file, {'descr': descr, 'fortran_order': False, 'shape': array.shape})
        file.write(np.ascontiguousarray(array).tobytes())


NAMES = {'<f8': 'F64', '<f4': 'F32', '<f2': 'F16', '|V2': 'BF16', '<i4': 'I32', '<i8': 'I64', '|u1': 'U8'}


def save_safetensors(path, tensors):
    header, data = {}, b''
    for name, array in tensors.items():
        begin = len(data)
        data += np.ascontiguousarray(array).tobytes()
        header[name] = {'dtype': NAMES[array.dtype.str], 'shape': list(array.shape), 'data_offsets': [begin, len(data)]}
    text = json.dumps(header).encode()
    with open(path, 'wb') as file:
        file.write(struct.pack('<Q', len(text)) + text + data)


def content_of(path):
    with open(path, 'rb') as file:
        return file.read()


def load_safetensors(path):
    content = content_of(path)
    length = struct.unpack('<Q', content[:8])[0]
    dtypes = {name: descr for descr, name in NAMES.items()}
    tensors = {}
    for name, entry in json.loads(content[8:8 + length]).items():
        begin, end = (8 + length + offset for offset in entry['data_offsets'])
        tensors[name] = np.frombuffer(content[begin:end], dtypes[entry['dtype']]).reshape(entry['shape'])
    return tensors


# ---- the program -------------------------------------------------------------------------------------------------

def program(*arguments, limit=None, env=None):
    def set_limit():
        if limit is not None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    return subprocess.run([PROGRAM, *map(str, arguments)], capture_output=True, text=True, preexec_fn=set_limit,
                          env={**os.environ, **(env or {})})


def served(*arguments, **options):
    """Runs it; the outputs of --out by name."""
    result = program(*arguments, **options)
    check(result.returncode == 0 and result.stderr == '',
          f'{arguments}: exit status {result.returncode}\n{result.stdout}{result.stderr}')
    return result


def outputs(folder):
    return {name[:-4]: np.load(os.path.join(folder, name)) for name in os.listdir(folder)}


def listing(folder):
    return sorted((name, os.stat(os.path.join(folder, name)).st_mtime_ns) for name in os.listdir(folder))


def refused(text, *arguments, status=2, folder='.', **options):
    """One line, that status, and a folder that is as it was."""
    before = listing(folder)
    result = program(*arguments, **options)
    good = (result.returncode == status and result.stderr.startswith('cotangent: ') and result.stderr.count('\n') == 1
            and result.stderr.endswith('\n') and text in result.stderr and result.stdout == '')
    check(good, f'{arguments}: exit status {result.returncode}, expected {status} and one line with "{text}":\n'
                f'{result.stdout}{result.stderr}')
    check(listing(folder) == before, f'{arguments}: left something behind: {listing(folder)}')


random = np.random.default_rng(11)


# ---- diff ------------------------------------------------------------------------------------------------------------

def agrees(status, text, a, b, *options):
    result = program('diff', a, b, *options)
    check(result.returncode == status and text in result.stdout and result.stderr == '',
          f'diff {a} {b} {options}: exit status {result.returncode}, expected {status} with "{text}":\n{result.stdout}')


def test_diff():
    exact = random.standard_normal((40, 50))
    for dtype, coarse in (('f32', 2.0**-24), ('f16', 2.0**-11), ('bf16', 2.0**-8)):
        rounded = cast(exact, dtype)
        save('r.npy', exact), save('y.npy', rounded)
        agrees(0, '1 within the rule', 'y.npy', 'r.npy')
        agrees(0, '1 within the rule', 'r.npy', 'y.npy')
        agrees(0, 'the same bits', 'y.npy', 'y.npy')
        # One element off by three of its own spacings: beyond the rule for 16 bits. In f32 the sums may have made that,
        # of 64 terms up to 33 units and of one up to 5.
        wrong = values_of(rounded)
        at = np.unravel_index(abs(wrong).argmax(), wrong.shape)
        wrong[at] *= 1 + (3 if dtype != 'f32' else 8) * 2 * coarse
        save('w.npy', cast(wrong, dtype))
        agrees(1, '1 beyond it', 'w.npy', 'r.npy', '--terms', 1)
        if dtype == 'f32':
            agrees(0, '1 within the rule', 'w.npy', 'r.npy')
            wrong[at] *= 1 + 24 * 2 * coarse
            save('w.npy', cast(wrong, dtype))
        agrees(1, '1 beyond it', 'w.npy', 'r.npy')
        agrees(1, f'worst at [{at[0]},{at[1]}]', 'w.npy', 'r.npy')
    # Two results of the same dtype may each be off by half a unit: neighbours pass, two units apart do not.
    y = to_bf16(exact)
    near, far = y.view(np.uint16).copy(), y.view(np.uint16).copy()
    near[3, 4] += 1
    far[3, 4] += 3
    save('y.npy', y), save('near.npy', near.view('V2')), save('far.npy', far.view('V2'))
    agrees(0, '1 within the rule', 'near.npy', 'y.npy')
    agrees(1, '1 beyond it', 'far.npy', 'y.npy')
    odd = exact.copy()
    odd[0, :3] = np.inf, -np.inf, np.nan
    save('odd.npy', odd), save('odd32.npy', odd.astype(np.float32))
    agrees(0, '3 elements are the same infinity or NaN in both', 'odd32.npy', 'odd.npy')
    agrees(1, 'FAILED', 'odd32.npy', 'r.npy')
    save('i.npy', np.arange(6, dtype=np.int32).reshape(2, 3)), save('i64.npy', np.arange(6).reshape(2, 3))
    save('j.npy', np.array([[0, 1, 2], [3, 9, 5]], np.int32))
    agrees(0, 'the same bits', 'i64.npy', 'i.npy')
    agrees(1, '1 of 6 elements differ, first number 4: 9, expected 4', 'j.npy', 'i.npy')
    agrees(1, 'i32 [2,3] against f64 [40,50]', 'i.npy', 'r.npy')
    save('t.npy', exact.T)
    agrees(1, 'f64 [50,40] against f64 [40,50]', 't.npy', 'r.npy')
    save('f.npy', np.asfortranarray(exact))
    agrees(0, 'the same bits', 'f.npy', 'r.npy')
    save('e.npy', np.zeros((0, 3)))
    agrees(0, 'the same bits', 'e.npy', 'e.npy')
    save_safetensors('a.safetensors', {'one': exact, 'two': exact[0]})
    save_safetensors('b.safetensors', {'two': exact[0].astype(np.float32), 'one': exact})
    save_safetensors('c.safetensors', {'one': exact, 'three': exact})
    agrees(0, '1 the same, 1 within the rule, 0 beyond it', 'a.safetensors', 'b.safetensors')
    agrees(1, 'two: FAILED, not in c.safetensors', 'a.safetensors', 'c.safetensors')
    agrees(1, 'three: FAILED, not in a.safetensors', 'a.safetensors', 'c.safetensors')


def main():
    tests = [value for name, value in globals().items() if name.startswith('test_')]
    for test in tests:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            test()
            left = [name for root, _, names in os.walk('.') for name in names if 'partial' in name]
            check(not left, f'{test.__name__}: left {left}')
            os.chdir('/')
    print(f'{passed} passed, {failed} failed')
    return failed > 0


sys.exit(main())
