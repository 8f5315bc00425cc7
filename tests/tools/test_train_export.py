#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests the models that train_lm writes for transformers: GPT-2 and Llama have the validation loss that train_lm printed, and
continue a prompt with the same tokens. An imported model has the same bits. Token files: the data that the runs read.

    tests/tools/test_train_export.py PROGRAM [PYTHON]

PYTHON has torch and transformers; by default build/venv/bin/python, which tests/python/run.sh makes. Without them, the
parts that need no transformers run, and the exit status is 77, "skipped".
"""
import array
import json
import os
import random
import re
import struct
import subprocess
import sys
import tempfile

import checks
from checks import check

PROGRAM = os.path.realpath(sys.argv[1])
PYTHON = sys.argv[2] if len(sys.argv) > 2 else os.path.join(os.path.dirname(PROGRAM), 'venv/bin/python')
CONTEXT, VOCABULARY, TOKENS, WINDOWS = 32, 300, 6000, 64
COMMON = ['--tokens', 'tokens.bin', '--vocabulary', '304', '--context', str(CONTEXT), '--batch', '4', '--width', '32',
          '--inner', '32', '--layers', '2', '--steps', '10', '--lr', '5e-3', '--temperature', '0', '--sample', '20', '--quiet',
          '--out', 'out', '--heads', '4']
MODELS = {'gpt2': ['--arch', 'gpt2'], 'llama': ['--attention', '1', '--mlp', '48', '--kv-heads', '2']}
LOGITS = '''
import json, sys, torch, transformers
torch.set_num_threads(1)
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).eval()
windows, prompt, count = json.load(open(sys.argv[2]))
with torch.no_grad():
    windows = torch.tensor(windows)
    logits = model(windows[:, :-1]).logits.double()
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()).item()
    while count > 0:
        prompt.append(int(model(torch.tensor([prompt])).logits[0, -1].argmax()))
        count -= 1
print(json.dumps([type(model).__name__, loss, prompt]))
'''


def write_tokens(path, tokens):
    with open(path, 'wb') as file:
        file.write(struct.pack('<256i', 20240520, 1, len(tokens), *[0] * 253))
        file.write(struct.pack(f'<{len(tokens)}H', *tokens))


def draw_tokens():
    """Each token is 1 or 2 more than the one before it."""
    tokens, state = [1], 36
    while len(tokens) < TOKENS:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        tokens.append((tokens[-1] + 1 + (state >> 63)) % VOCABULARY)
    return tokens


def run(*arguments, status=0):
    result = subprocess.run([PROGRAM, *COMMON, *arguments], text=True, capture_output=True,
                            env={**os.environ, 'OMP_WAIT_POLICY': 'passive'})
    check(result.returncode == status, f'{arguments}: {result.returncode} {result.stderr}')
    return result


def results(result):
    loss = float(re.search(r'^validation loss +(\S+)', result.stdout, re.M).group(1))
    prompt, sample = ([int(token) for token in line.split()]
                      for line in re.search(r'^sample.*\n(.*)\n(.*)\n', result.stdout, re.M).groups())
    return loss, prompt, sample, re.search('hash.*', result.stdout).group()


def held_out_windows(tokens):
    held_out = tokens[len(tokens) - len(tokens) // 10:]
    available = (len(held_out) - 1) // CONTEXT
    count = min(available, WINDOWS)
    return [held_out[i * available // count * CONTEXT:][:CONTEXT + 1] for i in range(count)]


def read_tensors(path):
    with open(path, 'rb') as file:
        size, = struct.unpack('<Q', file.read(8))
        header = json.loads(file.read(size))
        data = file.read()
    return {name: (entry['shape'], array.array('f', data[slice(*entry['data_offsets'])]))
            for name, entry in header.items() if name != '__metadata__'}


def write_tensors(path, tensors):
    header, offset = {'__metadata__': {'format': 'pt'}}, 0
    for name, (shape, values) in tensors.items():
        header[name] = {'dtype': 'F32', 'shape': shape, 'data_offsets': [offset, offset + 4 * len(values)]}
        offset += 4 * len(values)
    text = json.dumps(header).encode()
    text += b' ' * (-len(text) % 8)
    with open(path, 'wb') as file:
        file.write(struct.pack('<Q', len(text)) + text + b''.join(values.tobytes() for _, values in tensors.values()))


def randomise(path):
    """Large random values, with which a sample is not one token again and again, and every parameter matters."""
    tensors, draw = read_tensors(path), random.Random(36)
    for _, values in tensors.values():
        for i in range(len(values)):
            values[i] = draw.uniform(-0.5, 0.5)
    write_tensors(path, tensors)


def test_log(path):
    with open(path) as file:
        rows = [json.loads(line) for line in file]
    check([row['step'] for row in rows] == list(range(1, 11)) and 'validation' in rows[-1] and
          rows[-1]['tokens'] == 10 * 4 * CONTEXT, f'the log: {rows[-1:]}')


def test_model(name, tokens, has_transformers):
    result = run(*MODELS[name], '--export', name, '--log', 'log.jsonl')
    test_log('log.jsonl')
    again = run(*MODELS[name], '--import', f'{name}/model.safetensors', '--lr', '0')
    check(results(again)[0] == results(result)[0] and results(again)[3] == results(result)[3],
          f'{name}: the imported model differs')
    randomise(f'{name}/model.safetensors')
    result = run(*MODELS[name], '--import', f'{name}/model.safetensors', '--lr', '0', '--export', name)
    loss, prompt, sample, _ = results(result)
    with open('windows.json', 'w') as file:
        json.dump([held_out_windows(tokens), prompt, len(sample)], file)
    if not has_transformers:
        return
    peer = subprocess.run([PYTHON, '-c', LOGITS, name, 'windows.json'], text=True, capture_output=True,
                          env={**os.environ, 'HF_HUB_OFFLINE': '1'})
    check(peer.returncode == 0, f'{name}: transformers: {peer.stderr}')
    if peer.returncode == 0:
        kind, peer_loss, peer_tokens = json.loads(peer.stdout.splitlines()[-1])
        check(kind == {'gpt2': 'GPT2LMHeadModel', 'llama': 'LlamaForCausalLM'}[name], f'{name}: {kind}')
        check(abs(peer_loss - loss) < 1e-5 * loss, f'{name}: transformers has the loss {peer_loss}, train_lm {loss}')
        check(peer_tokens == prompt + sample, f'{name}: transformers continues with {peer_tokens}, train_lm {sample}')
        check(len(set(sample)) > 2, f'{name}: a sample that shows little: {sample}')


def test_errors():
    for arguments, text in (
            (['--export', 'x'], '--export x: is of GPT-2 or Llama'),
            (['--export', 'tokens.bin', *MODELS['gpt2']], '--export tokens.bin: not a folder'),
            (['--import', 'missing', *MODELS['gpt2']], '--import missing: '),
            (['--gradients', 'missing/g', *MODELS['gpt2']], '--gradients missing/g: cannot be written'),
            (['--import', 'llama/model.safetensors', *MODELS['gpt2']],
             '--import llama/model.safetensors: has no tensor'),
            (['--import', 'gpt2/model.safetensors', *MODELS['gpt2'], '--layers', '3'],
             '--import gpt2/model.safetensors: has no tensor'),
            (['--import', 'gpt2/model.safetensors', *MODELS['gpt2'], '--width', '64', '--inner', '64'],
             '--import gpt2/model.safetensors: tensor "transformer.wte.weight" has another dtype or shape'),
            (['--log', 'missing/log', *MODELS['gpt2']], '--log missing/log: cannot be written: No such file'),
            (['--vocabulary', '256'], '--tokens data: token '),
            (['--tokens', 'windows.json'], '--tokens: windows.json: is no token file'),
            (['--tokens', 'short.bin'], '--tokens: short.bin: 11998 bytes of tokens, expected 12000'),
            (['--validation', 'missing'], '--tokens: missing: No such file'),
            (['--text', 'windows.json'], '--text and --tokens: give one of them'),
            (['--context', '601'], '--tokens: 600 tokens to validate on')):
        result = run(*arguments, status=2)
        check(result.stderr.startswith(f'train_lm: {text}') and result.stderr.count('\n') == 1,
              f'{arguments}: {result.stderr}')


def test_padding():
    """A file with fewer rows of the embedding, without the prefix of the names: as the first GPT-2."""
    tensors = {name.removeprefix('transformer.'): tensor for name, tensor in read_tensors('gpt2/model.safetensors').items()}
    rows = tensors['wte.weight'][1][:300 * 32]
    tensors['wte.weight'] = [300, 32], rows
    write_tensors('small.safetensors', tensors)
    run(*MODELS['gpt2'], '--import', 'small.safetensors', '--lr', '0', '--export', 'padded')
    shape, table = read_tensors('padded/model.safetensors')['transformer.wte.weight']
    check(shape == [304, 32] and table[:300 * 32] == rows and not any(table[300 * 32:]), 'the rows that a file lacks are 0')


with tempfile.TemporaryDirectory() as folder:
    PYTHON = os.path.abspath(PYTHON)
    os.chdir(folder)
    tokens = draw_tokens()
    write_tokens('tokens.bin', tokens)
    with open('tokens.bin', 'rb') as whole, open('short.bin', 'wb') as short:
        short.write(whole.read()[:-2])
    probe = subprocess.run([PYTHON, '-c', 'import torch, transformers'], capture_output=True) if os.path.exists(PYTHON) else None
    has_transformers = probe is not None and probe.returncode == 0
    for name in MODELS:
        test_model(name, tokens, has_transformers)
    test_errors()
    test_padding()
if checks.failed:
    sys.exit(f'test_train_export: {checks.failed} checks failed')
if not has_transformers:
    print(f'test_train_export: passed; not run: the comparison with transformers ({PYTHON} does not have it)')
    sys.exit(77)
print('test_train_export: passed')
