#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests that the peers of train_lm train the same models: tools/peers/compare_losses.py finds equal losses on the CPU, and the
model of tools/peers/train_hybrid.py has the validation loss of a checkpoint with convolutions, attention and mHC.

    tests/tools/test_train_peers.py PROGRAM [PYTHON]

PYTHON has torch; by default build/venv/bin/python, which tests/python/run.sh makes. Without it: exit status 77, "skipped".
"""
import json
import os
import re
import subprocess
import sys
import tempfile

PROGRAM = os.path.realpath(sys.argv[1])
PYTHON = sys.argv[2] if len(sys.argv) > 2 else os.path.join(os.path.dirname(PROGRAM), 'venv/bin/python')
PEERS, TEXT = os.path.realpath('tools/peers'), os.path.realpath('LICENSE')
ENVIRONMENT = {**os.environ, 'PYTHONPATH': PEERS, 'PYTHONDONTWRITEBYTECODE': '1', 'OMP_NUM_THREADS': '1'}
CONTEXT, LAYERS, WIDTH = 32, 4, 32
HYBRID = f'''
import sys, torch, compare_gradients, compare_losses, train_hybrid
values = compare_gradients.read_tensors(sys.argv[1])
model = train_hybrid.Hybrid({LAYERS}, 4, {WIDTH}, 48, 256, 2, 4, {CONTEXT}, "cpu")
parts = {{"branch.inner": "in", "branch.outer": "out", "branch": "conv"}}
with torch.no_grad():
    for name, parameter in model.named_parameters():
        *path, last = name.split(".")
        if path[0] == "blocks":
            part = ".".join(path[2:])
            prefix = f"blocks.{{path[1]}}." + (parts.get(part, part) or "mhc")
            parameter.copy_(values[prefix + "." + last])
        else:
            parameter.copy_(values[{{"tokens": "embedding"}}.get(path[0], path[0]) + "." + last])
text = open(sys.argv[2], "rb").read()
held_out = torch.frombuffer(bytearray(text[len(text) - len(text) // 10:]), dtype=torch.uint8)
rows = compare_losses.held_out(held_out, {CONTEXT}).long()
print(model(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()).item())
'''


def run(*command):
    result = subprocess.run([str(word) for word in command], env=ENVIRONMENT, capture_output=True, text=True)
    if result.returncode != 0:
        sys.exit(f'test_train_peers: {command[0]}: status {result.returncode}: {result.stderr}')
    return result.stdout


def test_losses():
    run(PYTHON, f'{PEERS}/compare_losses.py', PROGRAM, TEXT, '--backend', 'cpu', '--seeds', 1, '--steps', 6, '--batch', 4,
        '--context', CONTEXT, '--layers', 2, '--width', WIDTH, '--heads', 2, '--json', 'losses.json')
    with open('losses.json') as file:
        ours, theirs = json.load(file)
    for loss in 'first', 'training', 'validation':
        if not abs(ours[loss] - theirs[loss]) < 1e-4:
            sys.exit(f'test_train_peers: {loss} is {ours[loss]}, with PyTorch {theirs[loss]}')


def test_hybrid():
    printed = run(PROGRAM, '--text', TEXT, '--layers', LAYERS, '--width', WIDTH, '--inner', WIDTH, '--heads', 4,
                  '--kv-heads', 4, '--attention', 2, '--mlp', 48, '--mhc', 4, '--dropout', 0, '--context', CONTEXT,
                  '--batch', 4, '--steps', 8, '--lr', '1e-2', '--sample', 0, '--quiet', '--checkpoint', 'run.safetensors',
                  '--out', 'out')
    ours = float(re.search(r'validation loss +([\d.]+)', printed)[1])
    theirs = float(run(PYTHON, '-c', HYBRID, 'run.safetensors', TEXT))
    if not abs(ours - theirs) < 1e-5:
        sys.exit(f"test_train_peers: the hybrid's loss is {ours}, with PyTorch {theirs}")


if not os.path.exists(PYTHON) or subprocess.run([PYTHON, '-c', 'import torch'], capture_output=True).returncode != 0:
    print(f'test_train_peers: {PYTHON} does not have torch')
    sys.exit(77)
PYTHON = os.path.abspath(PYTHON)
with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    test_losses()
    test_hybrid()
print('test_train_peers: passed')
