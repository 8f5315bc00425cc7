#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures training on one GPU, train_lm beside PyTorch, and prints JSON rows for bench/results.

    tools/measure_training.py TRAIN_LM [--parts speed,memory,bits] [--only TEXT] [--commit C] [--json FILE]

speed    the tokens per second of train_lm, and of the same steps in PyTorch (peers/train_gpt2.py and
         peers/train_hybrid.py), one after the other
memory   train_lm with and without --recompute: the memory that it prints beforehand, with what was in use then, and the
         largest figure of nvidia-smi while it runs
bits     the same run twice, and once more with a SIGKILL in the middle and --resume: exit status 1 unless all end with
         the same parameters, bit by bit

The text is the one of measure_training_gpus.py.
"""
import argparse
import datetime
import json
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time

import measure_training_gpus

PEERS = pathlib.Path(__file__).resolve().parent / 'peers'
SPEED = [('gpt2-124m', 1024, 32, 60), ('gpt2-124m', 8192, 4, 30), ('hybrid-130m', 1024, 16, 40), ('hybrid-mhc-130m', 1024, 16, 40)]
MEMORY = [('gpt2-124m', 1024, 32, 30), ('hybrid-mhc-130m', 1024, 16, 30)]
REPRODUCED = [('gpt2-124m', 1024, 32, 60), ('hybrid-mhc-130m', 1024, 16, 60)]
ACCUMULATE, KILLED_AFTER = 2, 25


def options_of(case):
    model, context, batch, steps = case
    return ['--preset', model, '--context', str(context), '--batch', str(batch), '--accumulate', str(ACCUMULATE), '--steps', str(steps)]


def row_of(case, library, program, **figures):
    model, context, batch, steps = case
    return {'op': 'training', 'model': model, 'library': library, 'program': program, 'dtype': 'bf16', 'context': context,
            'batch': batch, 'accumulate': ACCUMULATE, 'steps': steps, **figures, 'date': datetime.date.today().isoformat()}


def train(arguments, folder, case, *more):
    """A row with what train_lm printed."""
    options = options_of(case) + list(more)
    find = measure_training_gpus.train(arguments.program, options, folder)
    return row_of(case, 'cotangent', 'train_lm ' + ' '.join(options), parameters=int(find(r'(\d+) parameters')),
                  tokens_per_second=int(find(r'(\d+) tokens/s in')), hash=find(r'hash of the parameters: (\S+)'),
                  printed_gb=float(find(r'([\d.]+) of its')), device=find(r'(NVIDIA [^,]+),'), commit=arguments.commit)


def train_peer(folder, case):
    model, context, batch, steps = case
    program, name = ('train_gpt2.py', model[5:]) if model.startswith('gpt2-') else ('train_hybrid.py', model)
    options = ['--model', name, '--context', str(context), '--batch', str(batch), '--accumulate', str(ACCUMULATE), '--steps', str(steps)]
    done = subprocess.run([sys.executable, PEERS / program, *options, '--json', f'{folder}/peer'], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f'{program} {" ".join(options)}: {done.stderr[-2000:]}')
    with open(f'{folder}/peer', encoding='utf-8') as file:
        row = json.load(file)[0]
    kept = {key: row[key] for key in ('attention', 'parameters', 'tokens_per_second', 'mfu', 'memory_gb', 'device')}
    return row_of(case, 'PyTorch ' + row['kernel'].split()[1].split('+')[0], f'{program} {" ".join(options)}', **kept)


def watched(function):
    """The result of function, and the largest memory in use while it ran, in GB."""
    used, ended = [], threading.Event()

    def watch():
        while not ended.is_set():
            query = subprocess.run(['nvidia-smi', '--query-gpu=memory.used', '--format=csv,noheader,nounits'], capture_output=True, text=True,
                                   check=True)
            used.append(int(query.stdout.split()[0]) * 2**20 / 1e9)
            ended.wait(0.1)
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        return function(), max(used)
    finally:
        ended.set()
        thread.join()


def killed(arguments, folder, case):
    """The hash after a run that is killed and resumed."""
    checkpoint = pathlib.Path(folder) / 'checkpoint'
    options = [*options_of(case), '--checkpoint', str(checkpoint), '--every', '10', '--log', f'{folder}/log']
    process = subprocess.Popen(measure_training_gpus.command(arguments.program, options, folder), stdout=subprocess.DEVNULL)
    log = pathlib.Path(folder) / 'log'
    while process.poll() is None and not (log.exists() and log.read_text().count('\n') >= KILLED_AFTER):
        time.sleep(0.01)
    if process.poll() is not None:
        sys.exit('train_lm ended before it was killed')
    process.send_signal(signal.SIGKILL)
    process.wait()
    found = train(arguments, folder, case, '--checkpoint', str(checkpoint), '--every', '10', '--resume')['hash']
    checkpoint.unlink()
    log.unlink()
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('program')
    parser.add_argument('--parts', default='speed,memory,bits')
    parser.add_argument('--only', default='', help='only the models whose name contains TEXT')
    parser.add_argument('--commit', default='')
    parser.add_argument('--json')
    arguments = parser.parse_args()
    rows, same = [], True

    def keep(row):
        rows.append(row)
        print(row['model'], row['context'], row['library'], row['tokens_per_second'], 'tokens/s', row.get('used_gb', ''), flush=True)
        if arguments.json:
            pathlib.Path(arguments.json).write_text(json.dumps(rows, indent=1) + '\n', encoding='utf-8')
    with tempfile.TemporaryDirectory() as folder:
        (pathlib.Path(folder) / 'text').write_bytes(measure_training_gpus.text())
        def cases(part, of_part):
            return [case for case in of_part if part in arguments.parts.split(',') and arguments.only in case[0]]
        for case in cases('speed', SPEED):
            ours, peer = train(arguments, folder, case), train_peer(folder, case)
            ours['mfu'] = round(peer['mfu'] * ours['tokens_per_second'] / peer['tokens_per_second'], 4) # the same model
            keep(ours)
            keep(peer)
        for case in cases('memory', MEMORY):
            for more in [], ['--recompute']:
                row, used = watched(lambda case=case, more=more: train(arguments, folder, case, *more))
                keep(row | {'recompute': len(more), 'used_gb': round(used, 2)})
        for case in cases('bits', REPRODUCED):
            hashes = [train(arguments, folder, case)['hash'] for _ in range(2)] + [killed(arguments, folder, case)]
            print(case[0], 'twice, and killed and resumed:', *hashes, flush=True)
            same = same and len(set(hashes)) == 1
    if not arguments.json:
        print(json.dumps(rows, indent=1))
    return 0 if same else 'the parameters differ'


if __name__ == '__main__':
    sys.exit(main())
