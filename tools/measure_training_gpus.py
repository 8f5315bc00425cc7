#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Times `train_lm --gpus N` and prints JSON rows for bench/results.

    tools/measure_training_gpus.py TRAIN_LM [--gpus 1,2,4] [--accumulate 8] [--batch 32] [--steps 16] [--preset gpt2-124m] [--commit C]
                                   [--context T]

Each number of GPUs trains the same model with the same batches of a text that this tool generates. A row has the tokens per
second, the losses and the hash of the parameters. The last number runs twice, and the hashes of the two runs must be equal.
Without --context, the GPUs divide the batches of a step. With it, they divide each sequence of T tokens (--context-ranks).
"""
import argparse
import datetime
import json
import random
import re
import subprocess
import sys
import tempfile

WORDS = 4000


def text():
    """Words of random letters, the n-th with a probability of about 1/n: 12 MB."""
    generator = random.Random(1)
    words = [bytes(generator.choices(range(97, 123), k=generator.randint(2, 8))) for _ in range(WORDS)]
    return b' '.join(generator.choices(words, weights=[1 / (n + 1) for n in range(WORDS)], k=2000000))


def command(program, options, folder):
    """train_lm on the GPU with the text of the folder."""
    return [program, '--backend', 'cuda', *options, '--sample', '0', '--quiet', '--out', folder, f'{folder}/text']


def train(program, options, folder):
    """Runs train_lm. Returns a function that finds a pattern in what it printed."""
    done = subprocess.run(command(program, options, folder), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f'train_lm {" ".join(options)}: {done.stderr}')
    return lambda pattern: re.search(pattern, done.stdout).group(1)


def run(arguments, gpus, folder):
    """One row."""
    options = ['--preset', arguments.preset, '--batch', str(arguments.batch), '--accumulate', str(arguments.accumulate), '--steps',
               str(arguments.steps)]
    divided = []
    if arguments.context:
        options += ['--context', str(arguments.context), '--dropout', '0', '--dense', '0']
        divided = ['--context-ranks', str(gpus)]
    find = train(arguments.program, ['--gpus', str(gpus), *divided, *options], folder)
    return {'op': 'training_context' if arguments.context else 'training_gpus', 'model': arguments.preset, 'program': 'train_lm ' + ' '.join(options), 'gpus': gpus,
            'tokens_per_second': int(find(r'(\d+) tokens/s')), 'training_loss': float(find(r'training loss +(\S+)')),
            'validation_loss': float(find(r'validation loss +(\S+)')), 'hash': find(r'hash of the parameters: (\S+)'),
            'printed_gb': float(find(r'([\d.]+) GB for the model')), 'device': find(r'(NVIDIA [^,]+),'),
            'date': datetime.date.today().isoformat(), 'commit': arguments.commit}  # fmt: skip


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('program')
    parser.add_argument('--gpus', default='1,2,4')
    for name, default in ('accumulate', 8), ('batch', 32), ('steps', 16):
        parser.add_argument('--' + name, type=int, default=default)
    parser.add_argument('--context', type=int, default=0)
    parser.add_argument('--preset', default='gpt2-124m')
    parser.add_argument('--commit', default='')
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with open(f'{folder}/text', 'wb') as file:
            file.write(text())
        rows = [run(arguments, int(gpus), folder) for gpus in arguments.gpus.split(',')]
        if run(arguments, rows[-1]['gpus'], folder)['hash'] != rows[-1]['hash']:
            sys.exit('two runs have other bits')
    print(json.dumps(rows, indent=1))


if __name__ == '__main__':
    main()
