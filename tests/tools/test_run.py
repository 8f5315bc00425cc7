#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests `cotangent run` and `cotangent diff` on files that NumPy wrote. Compares the results with formulas in NumPy, in
float64 or wider. Invalid files must give one line on stderr, exit status 2 and no output file.

    tests/tools/test_run.py PROGRAM
"""
import json
import os
import re
import struct
import subprocess
import sys
import tempfile

import checks
import limited
import numpy as np
from checks import check

PROGRAM = os.path.realpath(sys.argv[1])
UNIT = {'f64': 2.0**-53, 'f32': 2.0**-24, 'f16': 2.0**-11, 'bf16': 2.0**-8}
TINY = {'f64': 2.0**-1074, 'f32': 2.0**-149, 'f16': 2.0**-24, 'bf16': 2.0**-133}


# ---- files -----------------------------------------------------------------------------------------------------

def to_bf16(values):
    """Rounds to bf16, to nearest, ties to even. Returns the bits as an array of NumPy's '<V2'."""
    bits = np.asarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view('V2')


def values_of(array):
    """The values of an array of `run`, in a type wide enough to check float64."""
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
    with open(path, 'wb') as file:  # a descriptor that NumPy does not write
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
    return limited.run([PROGRAM, *map(str, arguments)], {**os.environ, **(env or {})}, limit)


def run_ok(*arguments, **options):
    """Runs the program successfully. Returns the outputs of --out by name."""
    result = program(*arguments, **options)
    check(result.returncode == 0 and result.stderr == '',
          f'{arguments}: exit status {result.returncode}\n{result.stdout}{result.stderr}')
    return result


def outputs(folder):
    return {name[:-4]: np.load(os.path.join(folder, name)) for name in os.listdir(folder)}


def listing(folder):
    return sorted((name, os.stat(os.path.join(folder, name)).st_mtime_ns) for name in os.listdir(folder))


def refused(text, *arguments, status=2, folder='.', **options):
    """Requires one line on stderr, that exit status, and an unchanged folder."""
    before = listing(folder)
    result = program(*arguments, **options)
    good = (result.returncode == status and result.stderr.startswith('cotangent: ') and result.stderr.count('\n') == 1
            and result.stderr.endswith('\n') and text in result.stderr and result.stdout == '')
    check(good, f'{arguments}: exit status {result.returncode}, expected {status} and one line with "{text}":\n'
                f'{result.stdout}{result.stderr}')
    check(listing(folder) == before, f'{arguments}: left something behind: {listing(folder)}')


# ---- the formulas and their magnitudes -----------------------------------------------------------------

def sigmoid(z):
    return 1 / (1 + np.exp(-z))


def silu(z, zm, on):
    """Value, derivative, and the effect of a unit of error in z on both."""
    if not on:
        return z, np.ones_like(z), zm, np.ones_like(z)
    s = sigmoid(z)
    slope = s * (1 + z * (1 - s))
    return z * s, slope, zm * s * (1 + abs(z) * (1 - s)), s * (1 + abs(z) * (1 - s)) + zm * s * (1 - s) * (2 + abs(z))


def conv(x, weight, bias, state, on):
    B, D, T = x.shape
    K = weight.shape[1]
    xe = np.concatenate([state, x], axis=2)
    z = np.broadcast_to(bias[None, :, None], x.shape).copy()
    zm = abs(z)
    for k in range(K):
        z += weight[None, :, k:k + 1] * xe[:, :, k:k + T]
        zm += abs(weight[None, :, k:k + 1] * xe[:, :, k:k + T])
    return xe, z, zm


def forward(x, weight, bias, state, on):
    xe, z, zm = conv(x, weight, bias, state, on)
    y, _, ym, _ = silu(z, zm, on)
    final = xe[:, :, x.shape[2]:]
    return {'y': (y, ym), 'final_state': (final, abs(final))}


def backward(x, weight, bias, state, dy, dfinal, on, old=None):
    B, D, T = x.shape
    K = weight.shape[1]
    xe, z, zm = conv(x, weight, bias, state, on)
    _, slope, _, sm = silu(z, zm, on)
    g, gm = dy * slope, abs(dy) * sm
    dxe, dxem = np.zeros_like(xe), np.zeros_like(xe)
    dweight = np.zeros_like(weight) if old is None else old[0].copy()
    dbias = np.zeros_like(bias) if old is None else old[1].copy()
    dweightm, dbiasm = abs(dweight), abs(dbias)
    for k in range(K):
        dxe[:, :, k:k + T] += weight[None, :, k:k + 1] * g
        dxem[:, :, k:k + T] += abs(weight[None, :, k:k + 1]) * gm
        dweight[:, k] += (g * xe[:, :, k:k + T]).sum((0, 2))
        dweightm[:, k] += (gm * abs(xe[:, :, k:k + T])).sum((0, 2))
    dxe[:, :, T:] += dfinal
    dxem[:, :, T:] += abs(dfinal)
    dbias += g.sum((0, 2))
    dbiasm += gm.sum((0, 2))
    return {'dx': (dxe[:, :, K - 1:], dxem[:, :, K - 1:]), 'dinitial_state': (dxe[:, :, :K - 1], dxem[:, :, :K - 1]),
            'dweight': (dweight, dweightm), 'dbias': (dbias, dbiasm)}


def dtype_name(array):
    return {'<f8': 'f64', '<f4': 'f32', '<f2': 'f16', '|V2': 'bf16'}[array.dtype.str]


def check_values(what, got, expected):
    """The elementwise error rule: |y - r| <= u_out*|r| + 4*u_mid*m."""
    check(set(got) == set(expected), f'{what}: outputs {sorted(got)}, expected {sorted(expected)}')
    for name in set(got) & set(expected):
        r, m = expected[name]
        out = dtype_name(got[name])
        tolerance = np.maximum(UNIT[out] * abs(r), 0.5 * TINY[out]) + 4 * UNIT['f64' if out == 'f64' else 'f32'] * m
        y = values_of(got[name])
        good = y.shape == r.shape and bool((abs(y - r) <= tolerance).all())
        worst = (abs(y - r) / np.maximum(tolerance, 1e-300)).max() if y.shape == r.shape and y.size else y.shape
        check(good, f'{what}: {name} is beyond the rule, {worst} of the tolerance')


# ---- supported --------------------------------------------------------------------------------------------------------

random = np.random.default_rng(11)


def problem(B, D, T, K, dtype, wdtype):
    """Inputs, rounded to the dtypes of the files."""
    shapes = {'x': (B, D, T), 'weight': (D, K), 'bias': (D,), 'initial_state': (B, D, K - 1), 'dy': (B, D, T),
              'dfinal_state': (B, D, K - 1), 'dweight': (D, K), 'dbias': (D,)}
    return {name: cast(random.standard_normal(shape), dtype if name in ('x', 'dy') else wdtype)
            for name, shape in shapes.items()}


FORWARD = ('x', 'weight', 'bias', 'initial_state')
BACKWARD = FORWARD + ('dy', 'dfinal_state')


def select(arrays, names):
    return {name: values_of(arrays[name]) for name in names}


def options(names):
    return [word for name in names for word in (f'--{name}', f'{name}.npy')]


def test_dtypes_and_orders():
    variants = {
        'as it is': lambda a: (a, None),
        'Fortran': lambda a: (np.asfortranarray(a), None),
        'big-endian': lambda a: (a if a.dtype.kind == 'V' else a.astype(a.dtype.newbyteorder('>')), None),
        'big-endian Fortran': lambda a: (np.asfortranarray(
            a if a.dtype.kind == 'V' else a.astype(a.dtype.newbyteorder('>'))), None),
        'bf16 as <V2': lambda a: (a, '<V2' if a.dtype.kind == 'V' else None),
    }
    for dtype, wdtype in (('f32', 'f32'), ('f64', 'f64'), ('f16', 'f32'), ('bf16', 'f32'), ('bf16', 'bf16')):
        for variant, change in variants.items():
            for on in (False, True):
                arrays = problem(2, 5, 37, 4, dtype, wdtype)
                for name, array in arrays.items():
                    save(f'{name}.npy', *change(array))
                activation = ['--activation', 'silu' if on else 'none']
                what = f'{dtype}/{wdtype} {variant} {activation[1]}'
                run_ok('run', 'causal_conv1d', 'forward', *options(FORWARD), *activation, '--out', 'out')
                check_values(what + ' forward', outputs('out'), forward(*select(arrays, FORWARD).values(), on))
                run_ok('run', 'causal_conv1d', 'backward', *options(BACKWARD), *activation, '--out', 'out2')
                check_values(what + ' backward', outputs('out2'), backward(*select(arrays, BACKWARD).values(), on))


def test_accumulate():
    arrays = problem(2, 5, 37, 4, 'f32', 'f32')
    for name, array in arrays.items():
        save(f'{name}.npy', array)
    arguments = ['run', 'causal_conv1d', 'backward', *options(BACKWARD), '--accumulate', '1']
    run_ok(*arguments, '--dweight', 'dweight.npy', '--dbias', 'dbias.npy', '--verify', '--out', 'out3')
    old = [values_of(arrays[name]) for name in ('dweight', 'dbias')]
    check_values('accumulate', outputs('out3'), backward(*select(arrays, BACKWARD).values(), False, old))
    refused('dweight is added to: --dweight gives its old value', *arguments, '--out', 'new')
    run_ok(*arguments, '--outputs', 'dx', '--out', 'out4')
    check(sorted(outputs('out4')) == ['dx'], 'accumulate: --outputs dx')
    refused('dweight is written only', *arguments[:-1], '0', '--dweight', 'dweight.npy', '--out', 'new')


def test_packed():
    """cu_seqlens in NumPy's default dtype, int64."""
    arrays = problem(1, 3, 20, 3, 'f32', 'f32')
    starts = np.array([0, 7, 7, 18])
    state = cast(random.standard_normal((3, 3, 2)), 'f32')
    for name in ('x', 'weight', 'bias'):
        save(f'{name}.npy', arrays[name])
    save('initial_state.npy', state)
    save('starts.npy', starts)
    run_ok('run', 'causal_conv1d', 'forward', *options(FORWARD), '--cu_seqlens', 'starts.npy', '--out', 'out5',
           '--verify')
    y, ym = np.zeros((1, 3, 20)), np.zeros((1, 3, 20))
    final, x, weight, bias = np.zeros((3, 3, 2)), *select(arrays, ('x', 'weight', 'bias')).values()
    for n in range(3):
        span = slice(starts[n], starts[n + 1])
        part = forward(x[:, :, span], weight, bias, values_of(state)[n:n + 1], False)
        y[:, :, span], ym[:, :, span] = part['y']
        final[n] = part['final_state'][0][0]
    check_values('cu_seqlens', outputs('out5'), {'y': (y, ym), 'final_state': (final, abs(final))})
    save('starts.npy', np.array([0, 7, 2**31]))
    refused('holds the int64 2147483648 (element 2), which no i32 can be', 'run', 'causal_conv1d', 'forward',
            *options(('x', 'weight')), '--cu_seqlens', 'starts.npy', '--out', 'new')
    for wrong in ([0, 9, 7], [1, 9], [0, 21]):
        save('starts.npy', np.array(wrong))
        for more in (['--out', 'new'], ['--verify'], ['--verify', '--out', 'new.safetensors']):
            refused('cu_seqlens', 'run', 'causal_conv1d', 'forward', *options(('x', 'weight')), '--cu_seqlens',
                    'starts.npy', *more)


def test_update():
    x, weight = cast(random.standard_normal((2, 5)), 'f32'), cast(random.standard_normal((5, 4)), 'f32')
    state = cast(random.standard_normal((3, 5, 6)), 'f32')
    save('x.npy', x), save('weight.npy', weight), save('conv_state.npy', state), save('rows.npy', np.array([2, 0]))
    run_ok('run', 'causal_conv1d', 'update', *options(('x', 'weight', 'conv_state')), '--conv_state_indices',
           'rows.npy', '--out', 'out6', '--verify')
    after, y, ym = values_of(state), np.zeros((2, 5)), np.zeros((2, 5))
    for b, row in enumerate((2, 0)):
        after[row] = np.concatenate([after[row][:, 1:], values_of(x)[b][:, None]], axis=1)
        y[b] = (values_of(weight) * after[row][:, -4:]).sum(1)
        ym[b] = abs(values_of(weight) * after[row][:, -4:]).sum(1)
    check_values('update', outputs('out6'), {'y': (y, ym), 'conv_state': (after, abs(after))})
    check((np.load('conv_state.npy') == state).all(), 'update: the input file was written')


def philox(counter, key):
    """Philox4x32-10 of arrays of 32-bit words, in uint64."""
    low = np.uint64(0xffffffff)
    for round in range(10):
        first, second = counter[0] * np.uint64(0xd2511f53), counter[2] * np.uint64(0xcd9e8d57)
        counter = [second >> np.uint64(32) ^ counter[1] ^ np.uint64(key[0]), second & low,
                   first >> np.uint64(32) ^ counter[3] ^ np.uint64(key[1]), first & low]
        key = [(key[0] + 0x9e3779b9) & 0xffffffff, (key[1] + 0xbb67ae85) & 0xffffffff]
    return counter


def drawn_mask(R, D, p, seed, offset):
    """Draws a mask by the header's rule: 16 bits per element, 8 columns per Philox call."""
    i = (np.arange(R, dtype=np.uint64)[:, None] * np.uint64((D + 7) // 8)
         + (np.arange(D, dtype=np.uint64) // np.uint64(8))[None, :])
    low = np.uint64(0xffffffff)
    fixed = [np.full_like(i, offset & 0xffffffff), np.full_like(i, offset >> 32)]
    words = np.stack(philox(fixed + [i & low, i >> np.uint64(32)], [seed & 0xffffffff, seed >> 32]))
    d = np.arange(D)
    word = np.take_along_axis(words, np.broadcast_to(d % 8 // 2, (1, R, D)), axis=0)[0]
    draw = word >> np.uint64(16) * (d % 2).astype(np.uint64) & np.uint64(0xffff)
    return (draw >= np.uint64(int(65536 * p + 0.5))).astype(np.uint8)


def test_dropout_masks():
    """The mask is the same when it is drawn, written as bytes or bits, and read again."""
    R, D, p, seed, offset = 13, 27, 0.3, 0xfedcba9876543210, 5 << 32 | 7
    c = 65536 / (65536 - 19661)
    arrays = {name: cast(random.standard_normal(shape), 'f32') for name, shape in
              {'x': (R, D), 'residual': (R, D), 'dy': (R, D), 'bias': (D,)}.items()}
    for name, array in arrays.items():
        save(f'{name}.npy', array)
    x, residual, dy, bias = select(arrays, ('x', 'residual', 'dy', 'bias')).values()
    m = drawn_mask(R, D, p, seed, offset)
    drawing = ['--p', p, '--seed', seed, '--offset', offset]
    run_ok('run', 'dropout', 'forward', *options(('x', 'bias', 'residual')), *drawing, '--verify', '--out', 'drawn')
    out = outputs('drawn')
    check((out.pop('mask_out') == m).all(), 'dropout: mask_out')
    check((out.pop('mask_bits_out') == np.packbits(m, axis=1, bitorder='little')).all(), 'dropout: mask_bits_out')
    check_values('dropout forward', out, {'y': (c * m * (x + bias) + residual, c * (abs(x) + abs(bias)) + abs(residual))})
    dx = c * m * dy
    expected = {'dx': (dx, c * abs(dy)), 'dbias': (dx.sum(0), c * abs(dy).sum(0))}
    run_ok('run', 'dropout', 'backward', '--dy', 'dy.npy', *drawing, '--verify', '--out', 'drawn.safetensors')
    check_values('dropout backward', load_safetensors('drawn.safetensors'), expected)
    for form in ('mask', 'mask_bits'):
        giving = ['--p', p, '--scale', repr(c), f'--{form}', f'drawn/{form}_out.npy']
        run_ok('run', 'dropout', 'forward', *options(('x', 'bias', 'residual')), *giving, '--out', form)
        check((outputs(form)['y'] == np.load('drawn/y.npy')).all(), f'dropout: y with --{form}')
        check((outputs(form)['mask_out'] == m).all(), f'dropout: mask_out with --{form}')
        run_ok('run', 'dropout', 'backward', '--dy', 'dy.npy', *giving, '--verify', '--out', f'{form}.safetensors')
        check(content_of(f'{form}.safetensors') == content_of('drawn.safetensors'), f'dropout: backward with --{form}')
    save('wide.npy', np.ones((R, D + 1), np.uint8))
    save('floats.npy', np.ones((R, D), np.float32))
    forward_x = ['run', 'dropout', 'forward', '--x', 'x.npy', '--out', 'new']
    refused('mask has D=28, x has D=27', *forward_x, '--mask', 'wide.npy')
    refused('mask has dtype f32, expected u8', *forward_x, '--mask', 'floats.npy')
    refused('p is 1.5, expected 0 to 1', *forward_x, '--p', 1.5)
    refused('p is nan, expected 0 to 1', *forward_x, '--p', 'nan')
    unknown = program(*forward_x, '--activation', 'gelu')
    check(unknown.returncode == 2 and "--activation is 'gelu', expected one of: none silu" in unknown.stderr,
          'dropout: an unknown activation')


def test_empty_and_scalar():
    for B, D, T in ((0, 5, 7), (2, 0, 7), (2, 5, 0)):
        arrays = problem(B, D, T, 4, 'f32', 'f32')
        for name, array in arrays.items():
            save(f'{name}.npy', array)
        run_ok('run', 'causal_conv1d', 'forward', *options(FORWARD), '--verify', '--out', 'out7')
        check_values(f'empty {B, D, T}', outputs('out7'), forward(*select(arrays, FORWARD).values(), False))
    save('x.npy', np.float32(3))
    refused('x has 0 axes', 'run', 'causal_conv1d', 'forward', *options(('x', 'weight')), '--out', 'new')


def test_safetensors():
    arrays = problem(2, 5, 37, 4, 'bf16', 'f32')
    save_safetensors('in.safetensors', arrays)  # also holds dy and dfinal_state, for the backward
    expected = forward(*select(arrays, FORWARD).values(), False)
    run_ok('run', 'causal_conv1d', 'forward', '--in', 'in.safetensors', '--out', 'y.safetensors')
    check_values('--in', load_safetensors('y.safetensors'), expected)
    for name in ('x', 'weight'):
        save(f'{name}.npy', arrays[name])
    save_safetensors('model.safetensors', {'layers.0.bias': arrays['bias']})
    run_ok('run', 'causal_conv1d', 'forward', '--in', 'in.safetensors', '--x', 'x.npy', '--bias',
           'model.safetensors:layers.0.bias', '--out', 'z.safetensors')
    check_values('--in and others', load_safetensors('z.safetensors'), expected)
    run = ['run', 'causal_conv1d', 'forward']
    refused('has no tensor "other"', *run, '--x', 'in.safetensors:other', '--out', 'new')
    refused('holds tensors by name, expected in.safetensors:NAME', *run, '--x', 'in.safetensors', '--out', 'new')
    save_safetensors('typo.safetensors', {**arrays, 'biass': arrays['bias']})
    refused('has a tensor "biass", which is none of causal_conv1d\'s', *run, '--in', 'typo.safetensors', '--out', 'new')


def test_choices():
    arrays = problem(2, 64, 301, 4, 'bf16', 'bf16')
    for name, array in arrays.items():
        save(f'{name}.npy', array)
    run = ['run', 'causal_conv1d', 'backward', *options(BACKWARD), '--activation', 'silu']
    result = run_ok(*run, '--outputs', 'dweight,dx', '--dtype', 'dweight=f32', '--kernel', 'causal_conv1d_bwd_scalar',
                    '--out', 'out8')
    got, expected = outputs('out8'), backward(*select(arrays, BACKWARD).values(), True)
    check_values('--outputs', got, {name: expected[name] for name in ('dweight', 'dx')})
    check(got['dweight'].dtype == np.float32 and got['dx'].dtype == np.dtype('V2'), '--dtype dweight=f32')
    check('by causal_conv1d_bwd_scalar' in result.stdout, '--kernel')
    for threads in (1, 2, 3):
        result = run_ok(*run, '--threads', threads, '--out', f'threads{threads}')
        check(f'on {threads} threads' in result.stdout, '--threads')
    for threads in (2, 3):
        for name in ('dx', 'dweight', 'dbias', 'dinitial_state'):
            with open(f'threads1/{name}.npy', 'rb') as a, open(f'threads{threads}/{name}.npy', 'rb') as b:
                check(a.read() == b.read(), f'{name} on {threads} threads has other bits')
    result = run_ok(*run, '--verify')
    check(result.stdout.count('elements: passed') == 4 and 'of the tolerance' in result.stdout, '--verify reports')
    arrays['dy'] = arrays['dy'].copy()
    arrays['dy'].view(np.uint16)[1, 2, 3] = 0x7fc0  # NaN: the oracle has NaN in the same elements
    save('dy.npy', arrays['dy'])
    check(run_ok(*run, '--verify').stdout.count('elements: passed') == 4, '--verify of a NaN')
    x = cast(np.ones((2, 5, 7)), 'f32')
    x[0, 0, 0] = np.nan  # this kernel spreads NaN to other channels, see its README
    save('nan.npy', x)
    save('ones.npy', cast(np.ones((5, 4)), 'f32'))
    before = listing('.')
    result = program('run', 'causal_conv1d', 'forward', '--x', 'nan.npy', '--weight', 'ones.npy', '--kernel',
                     'causal_conv1d_fwd_im2col_portable', '--verify', '--out', 'new')
    check(result.returncode == 1 and 'FAILED' in result.stdout
          and result.stderr == 'cotangent: causal_conv1d_forward: beyond the error rule; nothing is written\n',
          f'--verify of a kernel that is off: {result.returncode} {result.stderr}')
    check(listing('.') == before, '--verify: wrote what failed')


# ---- what --help says --------------------------------------------------------------------------------------------

SIZES = {'B': 2, 'N': 2, 'T': 6, 'Tq': 6, 'Tk': 6, 'D': 8, 'Din': 8, 'Dout': 8, 'K': 3, 'S': 3, 'n': 2, 'M': 8, 'H': 2,
         'Hkv': 2, 'd': 8, 'd_v': 8, '...': 2}


def size_of(term):
    """The value of "K-1", "n*D", "N|B", "3"."""
    for sign, act in (('|', lambda a, b: a), ('*', lambda a, b: a * b), ('-', lambda a, b: a - b), ('+', lambda a, b: a + b)):
        if sign in term:
            return act(*map(size_of, term.split(sign)))
    return int(term) if term.isdigit() else SIZES[term]


def required_inputs(op, direction):
    """Names and shapes of the inputs that --help lists as required."""
    text = program('run', op, direction, '--help', env={'ARGP_HELP_FMT': 'rmargin=200'}).stdout
    found = re.findall(r'--(?:tensor-)?(\w+)=FILE\s+Required input \[(.*?)\]', text)
    return {name: [size_of(term) for term in shape.split(',')] for name, shape in found}


def test_required_inputs():
    """The inputs that --help lists as required suffice for a call with the documented defaults. Each of them is
    necessary."""
    directions = {(op, direction) for op in ('causal_conv1d', 'causal_conv1d_dense', 'attention', 'dropout', 'mhc_pre',
                                             'mhc_sinkhorn', 'mhc_post') for direction in ('forward', 'backward')}
    directions |= {('causal_conv1d', 'update'), ('attention', 'delta'), ('attention', 'merge')}
    for op, direction in sorted(directions):
        required = required_inputs(op, direction)
        check(len(required) > 0, f'{op} {direction}: --help calls no input required')
        for name, shape in required.items():
            save(f'{name}.npy', cast(random.standard_normal(shape), 'f32'))
        enough = dict(required)
        if (op, direction) == ('attention', 'backward'):  # needs out or delta; neither alone is required
            enough['out'] = enough['dout']
            save('out.npy', cast(random.standard_normal(enough['out']), 'f32'))
        run_ok('run', op, direction, *options(enough), '--out', f'{op}_{direction}', '--verify')
        for name in required:
            refused(f'{name} is required', 'run', op, direction, *options(set(enough) - {name}), '--out', 'new')


def test_defaults():
    """The defaults equal those of the init macros, and --help prints them."""
    for name, shape in required_inputs('mhc_pre', 'forward').items():
        save(f'{name}.npy', cast(random.standard_normal(shape), 'f32'))
    run = ['run', 'mhc_pre', 'forward', *options(required_inputs('mhc_pre', 'forward'))]
    explicit = {'norm_eps': '1e-6', 'hc_eps': '1e-6', 'post_scale': '2', 'sinkhorn_eps': '1e-6', 'sinkhorn_iterations': '20'}
    run_ok(*run, '--out', 'given.safetensors', *[word for name, value in explicit.items() for word in (f'--{name}', value)])
    run_ok(*run, '--out', 'default.safetensors')
    check(content_of('default.safetensors') == content_of('given.safetensors'), 'mhc_pre: other defaults')
    for op, direction, text in (('mhc_pre', 'forward', '--sinkhorn_iterations=N +Default 20'),
                                ('mhc_pre', 'backward', '--post_scale=N +Default 2'),
                                ('mhc_sinkhorn', 'forward', '--eps=N +Default 1e-06'),
                                ('attention', 'forward', r'--scale=N +default 1/sqrt\(d\)'),
                                ('dropout', 'forward', r'--scale=N +.*default 1/\(1-p\)'),
                                ('causal_conv1d', 'forward', r'--activation=WORD +none silu \(default none\)')):
        shown = program('run', op, direction, '--help', env={'ARGP_HELP_FMT': 'rmargin=200'}).stdout
        check(re.search(text, shown), f'{op} {direction} --help shows no "{text}"')


def test_input_called_out():
    """--out names the outputs. FILE.npy or FILE.safetensors:NAME as --out is attention's input `out`."""
    shapes = required_inputs('attention', 'backward')
    for name, shape in shapes.items():
        save(f'{name}.npy', cast(random.standard_normal(shape), 'f32'))
    save('o.npy', np.load('dout.npy'))
    save_safetensors('saved.safetensors', {'o': np.load('dout.npy')})
    run_ok('run', 'attention', 'forward', *options(('q', 'k', 'v')), '--out', 'forward')
    check(sorted(outputs('forward')) == ['lse', 'out'], 'attention forward')
    run = ['run', 'attention', 'backward', *options(shapes)]
    run_ok(*run, '--tensor-out', 'o.npy', '--out', 'old.safetensors')
    run_ok(*run, '--out', 'o.npy', '--out', 'new.safetensors')
    run_ok(*run, '--out', 'newer.safetensors', '--out', 'saved.safetensors:o')
    for name in ('new', 'newer'):
        check(content_of(f'{name}.safetensors') == content_of('old.safetensors'), f'--out of attention backward: {name}')
    result = program(*run, '--out', 'o.npy')
    check(result.returncode == 2 and 'neither --out nor --verify' in result.stderr, '--out gives the input alone')


# ---- refused ---------------------------------------------------------------------------------------------------------

def test_wrong_files():
    x, weight = cast(np.ones((2, 5, 7)), 'f32'), cast(np.ones((5, 4)), 'f32')
    save('x.npy', x), save('weight.npy', weight)
    run = ['run', 'causal_conv1d', 'forward', '--weight', 'weight.npy', '--out', 'new']
    with open('x.npy', 'rb') as file:
        content = file.read()
    os.mkfifo('pipe')
    files = {
        'cut.npy': (content[:-1], 'has a shape of 280 bytes, but 279 bytes of data'),
        'head.npy': (content[:50], 'is cut off in its header'),
        'long.npy': (content + b'x', 'but 281 bytes of data'),
        'none.npy': (b'', 'is no .npy file'),
        'text.npy': (b'hello\n', 'is no .npy file'),
        'lie.npy': (content.replace(b'(2, 5, 7)', b'(2,5,999)'), 'but 280 bytes of data'),
        'wrap.npy': (content.replace(b"(2, 5, 7), }             ", b"(4294967296, 4294967296),}"), 'more than 2^56 bytes'),
        'object.npy': (content.replace(b"'<f4'", b"'|O' "), "has dtype '|O'"),
        'huge.npy': (content[:6] + b'\2\0' + struct.pack('<I', 2**31) + content[12:], 'has a header of 2147483648 bytes'),
        'noise.npy': (random.bytes(300), 'is no .npy file'),
    }
    for name, (content, text) in files.items():
        with open(name, 'wb') as file:
            file.write(content)
        refused(text, *run, '--x', name)
        refused(name, *run, '--x', name)
        refused(text, 'diff', name, 'x.npy')
        refused(text, 'diff', 'x.npy', name)
    refused('missing.npy: No such file or directory', *run, '--x', 'missing.npy')
    refused('.: is a directory, expected a regular file', *run, '--x', '.')
    refused('pipe: is a pipe, expected a regular file', *run, '--x', 'pipe')
    refused('/dev/zero: is a device, expected a regular file', *run, '--x', '/dev/zero')
    refused('a?b: No such file or directory', *run, '--x', 'a\nb')
    save('complex.npy', np.ones((2, 5, 7), np.complex64))
    refused("has dtype '<c8'", *run, '--x', 'complex.npy')
    save('int.npy', np.ones((2, 5, 7), np.int64))
    refused('x has dtype i32', *run, '--x', 'int.npy')
    save('records.npy', np.ones(3, [('a', '<f4'), ('b', '<i4')]))
    refused('holds records', *run, '--x', 'records.npy')
    save('axes.npy', np.ones((1,) * 7, np.float32))
    refused('has more than 6 axes', *run, '--x', 'axes.npy')
    save('wide.npy', np.ones((5, 4), np.float64))
    refused('f64 goes with f64 only', 'run', 'causal_conv1d', 'forward', '--x', 'x.npy', '--weight', 'wide.npy',
            '--out', 'new')
    save('narrow.npy', np.ones((4, 4), np.float32))
    refused('weight has D=4, x has D=5', 'run', 'causal_conv1d', 'forward', '--x', 'x.npy', '--weight', 'narrow.npy',
            '--out', 'new')


def test_wrong_safetensors():
    save('weight.npy', cast(np.ones((5, 4)), 'f32'))
    entry = '"x":{"dtype":"F32","shape":[2,5,7],"data_offsets":[0,280]}'
    data = bytes(280)
    cases = {
        'cut': ('{' + entry + '}', data[:-1], 'there are 279 bytes of data'),
        'long': ('{' + entry + '}', data + b'x', 'the last 1 bytes belong to no tensor'),
        'lie': ('{' + entry.replace('7]', '8]') + '}', data, 'has a shape of 320 bytes, but data_offsets of 280'),
        'twice': ('{' + entry + ',' + entry + '}', data, 'duplicate object key'),
        'overlap': ('{' + entry + ',"y":{"dtype":"U8","shape":[1],"data_offsets":[9,10]}}', data, 'overlaps'),
        'gap': ('{' + entry.replace('[0,280]', '[1,281]') + '}', data + b'x', '1 bytes before tensor "x"'),
        'deep': ('{"a":' + '[' * 100000, data, 'maximum parsing depth'),
        'text': ('hello', b'', 'does not begin with'),
        'wrap': ('{' + entry.replace('[2,5,7]', '[4294967296,4294967296]') + '}', data, 'more than 2^56 bytes'),
    }
    for name, (header, content, text) in cases.items():
        path = name + '.safetensors'
        with open(path, 'wb') as file:
            file.write(struct.pack('<Q', len(header)) + header.encode() + content)
        for arguments in (['--in', path], ['--x', path + ':x']):
            refused(text, 'run', 'causal_conv1d', 'forward', '--weight', 'weight.npy', *arguments, '--out', 'new')
        refused(text, 'diff', path, path)
    with open('huge.safetensors', 'wb') as file:
        file.write(struct.pack('<Q', 2**40) + b'{}')
    refused('has a header of 1099511627776 bytes', 'diff', 'huge.safetensors', 'huge.safetensors')


def test_wrong_usage():
    save('x.npy', cast(np.ones((2, 5, 7)), 'f32')), save('weight.npy', cast(np.ones((5, 4)), 'f32'))
    run = ['run', 'causal_conv1d', 'forward']
    good = [*run, *options(('x', 'weight'))]
    with open('file', 'w') as file:
        file.write('in the way')
    refused('weight is required', *run, '--x', 'x.npy', '--out', 'new')
    refused('x is required', *run, '--weight', 'weight.npy', '--out', 'new')
    refused('file: is a file, expected a folder', *good, '--out', 'file')
    refused('missing/new: No such file or directory', *good, '--out', 'missing/new')
    refused('missing/y.safetensors: No such file or directory', *good, '--out', 'missing/y.safetensors')
    os.makedirs('dir.safetensors', exist_ok=True)
    refused('dir.safetensors: is there and is no regular file', *good, '--out', 'dir.safetensors')
    refused('the forced kernel "zzz" is none of causal_conv1d\'s', *good, '--kernel', 'zzz', '--out', 'new')
    refused('the forced kernel', *good, '--kernel', 'causal_conv1d_fwd_scalar_f64', '--out', 'new')
    refused('has the entry "bad"', *good, '--out', 'new', env={'COT_KERNEL': 'bad'})
    for text, arguments in {  # errors of the parser have a second line that refers to --help
            "--activation is 'gelu', expected one of: none silu": [*good, '--activation', 'gelu', '--out', 'new'],
            "--outputs names 'z', which is no output": [*good, '--outputs', 'y,z', '--out', 'new'],
            "--outputs names 'x', which is no output": [*good, '--outputs', 'x', '--out', 'new'],
            "--dtype is 'y=f8'": [*good, '--dtype', 'y=f8', '--out', 'new'],
            "--dtype is 'y'": [*good, '--dtype', 'y', '--out', 'new'],
            "--dtype names 'q'": [*good, '--dtype', 'q=f32', '--out', 'new'],
            "--in is 'x.npy'": [*run, '--in', 'x.npy', '--out', 'new'],
            "unrecognized option '--y'": [*good, '--y', 'y.npy', '--out', 'new'],
            "unrecognized option '--what'": [*good, '--what', 'x', '--out', 'new'],
            "unexpected argument 'silu'": [*good, 'silu', '--out', 'new'],
            'neither --out nor --verify': good,
            "--threads is '0'": [*good, '--threads', '0', '--out', 'new'],
            "--accumulate is '1.5', expected an integer": ['run', 'causal_conv1d', 'backward', '--accumulate', '1.5'],
            "--accumulate is '4294967297', expected an integer of 32 bits": ['run', 'causal_conv1d', 'backward',
                                                                             '--accumulate', '4294967297'],
            'OP is missing': ['run'],
            'DIRECTION is missing': ['run', 'causal_conv1d'],
            "OP is 'nope'": ['run', 'nope', 'forward'],
            "DIRECTION is 'sideways'": ['run', 'causal_conv1d', 'sideways', '--x', 'x.npy'],
            'B is missing': ['diff', 'x.npy'],
            "--terms is '0'": ['diff', 'x.npy', 'x.npy', '--terms', '0'],
            "unexpected argument 'c'": ['diff', 'a', 'b', 'c'],
            'one of A and B is a .safetensors': ['diff', 'x.npy', 'x.safetensors']}.items():
        result = program(*arguments)
        check(result.returncode == 2 and text in result.stderr and result.stdout == '' and not os.path.exists('new'),
              f'{arguments}: exit status {result.returncode}, expected 2 with "{text}":\n{result.stderr}')
    result = program(*good, '--backend', 'cuda', '--out', 'new')
    check(result.returncode in (0, 1), '--backend cuda')


def test_full_disk():
    """Either all old files or all new files remain. y fits below the limit, final_state does not."""
    save('x.npy', cast(np.ones((2, 5, 1)), 'f32')), save('weight.npy', cast(np.ones((5, 401)), 'f32'))
    run = ['run', 'causal_conv1d', 'forward', *options(('x', 'weight'))]
    run_ok(*run, '--out', 'old')
    run_ok(*run, '--out', 'old.safetensors')
    save('x.npy', cast(np.full((2, 5, 1), 7), 'f32'))
    # clang's OpenMP runtime, used by the build with sanitizers, does not start if its 1 KB of shared memory is refused.
    limits = [limit for limit in (0, 100, 5000) if program('info', limit=limit).returncode == 0]
    check(5000 in limits, 'the program starts where files end at 5000 bytes')
    for limit in limits:
        for out, folder in (('old', 'old'), ('old.safetensors', '.'), ('new', '.'), ('new.safetensors', '.')):
            before = listing(folder)
            result = program(*run, '--out', out, limit=limit)
            check(result.returncode == 1 and result.stderr.count('\n') == 1 and 'cannot be written: File too large'
                  in result.stderr, f'a full disk, --out {out}: {result.returncode} {result.stderr}')
            check(listing(folder) == before, f'a full disk, --out {out}: {listing(folder)}')
    check((outputs('old')['final_state'][:, :, -1] == 1).all(), 'a full disk: the old file')
    run_ok(*run, '--out', 'old')
    check((outputs('old')['final_state'][:, :, -1] == 7).all(), 'room again: the new file')


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
        # An error of 3 units in one element exceeds the rule for 16 bits. In f32 it may come from the sums: the rule
        # allows 33 units for 64 terms and 5 units for one term.
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
    # Two results of the same dtype may each have an error of half a unit. A difference of 1 unit passes, 3 units fail.
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
    # Two kernels of one op in f32, with sums of 4096 terms in different orders.
    arrays = problem(2, 8, 2048, 4, 'f32', 'f32')
    for name, array in arrays.items():
        save(f'{name}.npy', array)
    for kernel in ('scalar', 'channel_first_portable'):
        run_ok('run', 'causal_conv1d', 'backward', *options(BACKWARD), '--activation', 'silu', '--kernel',
               f'causal_conv1d_bwd_{kernel}', '--out', f'{kernel}.safetensors')
    agrees(0, ' 0 beyond it', 'channel_first_portable.safetensors', 'scalar.safetensors', '--terms', 4096)
    check(content_of('channel_first_portable.safetensors') != content_of('scalar.safetensors'), 'two kernels, same bits')
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
    print(f'{checks.passed} passed, {checks.failed} failed')
    return checks.failed > 0


sys.exit(main())
