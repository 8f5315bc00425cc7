#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests tokenize_text: a trained tokenizer and the tokens of texts are those of the Python package tokenizers, for random bytes,
several scripts, added tokens inside texts and other expressions for words. Bad input gives one line. train_lm reads the files and
prints a sample as text.

    tests/tools/test_tokenizer.py TOKENIZE_TEXT TRAIN_LM [PYTHON]

PYTHON has tokenizers; by default build/venv/bin/python. Without it, the other parts run, and the exit status is 77, "skipped".
"""
import array
import json
import os
import random
import subprocess
import sys
import tempfile

import checks
from checks import check

PROGRAM, TRAINER = (os.path.realpath(path) for path in sys.argv[1:3])
PYTHON = os.path.abspath(sys.argv[3]) if len(sys.argv) > 3 else os.path.join(os.path.dirname(PROGRAM), 'venv/bin/python')
END = '<|endoftext|>'
ALPHABETS = ['abcdefghij  \n\n\t \'', 'héß日本語 ١٢٣ ½²  \u00a0\u2003\u180e🙂👨\u200d👩 \'\n', "'s't're've'm'll'd 'S x1 2\r\n",
             'aaaa b', 'a<|endoftext|> ']
# Trains with the package, and prints the vocabulary, the merges and the tokens of all texts.
REFERENCE = '''
import json, re, sys, tokenizers
size, path, files = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
t = tokenizers.Tokenizer(tokenizers.models.BPE())
t.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
t.decoder = tokenizers.decoders.ByteLevel()
read = lambda path: open(path, encoding="utf-8", errors="replace", newline="").read()
if size:
    lines = [line for path in files for line in re.findall("[^\\n]*\\n|[^\\n]+", read(path))]
    t.train_from_iterator(lines, tokenizers.trainers.BpeTrainer(vocab_size=size, special_tokens=["<|endoftext|>"],
        show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    t.save(path)
else:
    t = tokenizers.Tokenizer.from_file(path)
end = t.token_to_id("<|endoftext|>")
ids = [id for path in files for id in t.encode(read(path), add_special_tokens=False).ids + [end]]
print(json.dumps(ids))
'''
SPLIT = {'type': 'Sequence', 'pretokenizers': [
    {'type': 'Split', 'behavior': 'Isolated', 'invert': False,
     'pattern': {'Regex': "(?i:'s|'t|'ll)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s+"}},
    {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': False}]}  # fmt: skip


def draw_text(draw, number):
    if number == 0:
        return b''
    if number == 1:
        return bytes(draw.randrange(256) for _ in range(2000))
    if number == 2:  # pieces of characters
        return b''.join(bytes([draw.choice('é日🙂a \n'.encode())]) for _ in range(1500))
    alphabet = draw.choice(ALPHABETS)
    text = ''.join(draw.choice(alphabet) for _ in range(draw.randrange(3000)))
    return text.replace('ab', END if draw.random() < 0.3 else 'ab').encode()


def run(*arguments):
    return subprocess.run([PROGRAM, *arguments], capture_output=True, text=True)


def read_tokens(path):
    with open(path, 'rb') as file:
        header = array.array('i', file.read(1024))
        tokens = array.array('H' if header[0] == 20240520 else 'I', file.read())
    check(list(header[:2]) in ([20240520, 1], [20240801, 7]) and header[2] == len(tokens), f'the header of {path}')
    return list(tokens)


def reference(*arguments):
    done = subprocess.run([PYTHON, '-c', REFERENCE, *arguments], capture_output=True, text=True)
    check(done.returncode == 0, f'the package: {done.stderr[-300:]}')
    return json.loads(done.stdout) if done.returncode == 0 else None


def model(path):
    with open(path, encoding='utf-8') as file:
        data = json.load(file)['model']
    return data['vocab'], [merge if isinstance(merge, str) else ' '.join(merge) for merge in data['merges']]


def compare(files, size):
    """Training, tokens with our file and with the package's, another expression for words."""
    done = run('--train', str(size), '--tokenizer', 'ours.json', '--out', 'ours.bin', *files)
    check(done.returncode == 0, f'--train {size}: {done.stderr}')
    theirs = reference(str(size), 'theirs.json', *files)
    check(model('ours.json') == model('theirs.json'), f'--train {size}: vocabulary and merges')
    check(read_tokens('ours.bin') == theirs, f'--train {size}: tokens')
    check(reference('0', 'ours.json', *files) == theirs, 'the package reads our tokenizer.json')
    with open('theirs.json', encoding='utf-8') as file:
        data = json.load(file)
    data['pre_tokenizer'], data['model']['ignore_merges'] = SPLIT, True
    with open('split.json', 'w', encoding='utf-8') as file:
        json.dump(data, file)
    done = run('--tokenizer', 'split.json', '--out', 'split.bin', *files)
    check(done.returncode == 0 and read_tokens('split.bin') == reference('0', 'split.json', *files), 'Split, ignore_merges')


def refused(what, expected, *arguments, status=2):
    done = run(*arguments)
    good = done.returncode == status and done.stderr.count('\n') == 1 and expected in done.stderr
    check(good, f'{what}: {done.returncode}, {done.stderr!r}')
    check(not any(name.endswith('.partial') or name == 'no.bin' for name in os.listdir('.')), f'{what}: files are left')


def changed(**fields):
    """A copy of ours.json with other fields of the model, or at the top."""
    with open('ours.json', encoding='utf-8') as file:
        data = json.load(file)
    for key, value in fields.items():
        (data if key in data else data['model'])[key] = value
    with open('changed.json', 'w', encoding='utf-8') as file:
        json.dump(data, file)
    return '--tokenizer', 'changed.json', '--out', 'no.bin', 'text'


def bad_input():
    ours = '--tokenizer', 'ours.json', '--out', 'no.bin'
    refused('no file', 'FILE is missing', *ours)
    refused('a missing file', 'missing.txt', *ours, 'missing.txt')
    refused('a folder', 'is a directory', *ours, '.')
    refused('--end', '--end', *ours, '--end', '<none>', 'text')
    refused('--train', '--train is "12"', *ours, '--train', '12', 'text')
    refused('no such tokenizer', 'none.json', '--tokenizer', 'none.json', '--out', 'no.bin', 'text')
    refused('no JSON', 'is no JSON', '--tokenizer', 'text', '--out', 'no.bin', 'text')
    refused('a folder for --out', 'missing/no.bin', '--tokenizer', 'ours.json', '--out', 'missing/no.bin', 'text')
    refused('another model', 'expected BPE', *changed(type='Unigram'))
    refused('a prefix', 'continuing_subword_prefix', *changed(continuing_subword_prefix='##'))
    refused('bytes as fallback', 'byte_fallback', *changed(byte_fallback=True))
    refused('a normalizer', 'normalizer', *changed(normalizer={'type': 'NFC'}))
    refused('no vocabulary', 'model.vocab', *changed(vocab=[]))
    refused('an id', 'the id of "a"', *changed(vocab={'a': -1}))
    refused('a large id', 'the id of "a"', *changed(vocab={'a': 1 << 40}))
    refused('a merge', 'model.merges[0]', *changed(merges=['ab cd ef']))
    refused('no pair', 'model.merges[0] is no pair', *changed(merges=['ab']))
    refused('a missing byte', 'no token for the byte 0x62', *changed(vocab={'a': 0, '<|endoftext|>': 1}, merges=[]))
    refused('a prefix space', 'add_prefix_space', *changed(pre_tokenizer={'type': 'ByteLevel', 'add_prefix_space': True}))
    refused('other words', 'pre_tokenizer "Whitespace"', *changed(pre_tokenizer={'type': 'Whitespace'}))
    pattern = dict(SPLIT['pretokenizers'][0], pattern={'Regex': '(a'})
    refused('an expression', 'the regular expression is not valid',
            *changed(pre_tokenizer={'type': 'Sequence', 'pretokenizers': [pattern, SPLIT['pretokenizers'][1]]}))


def sample():
    """train_lm prints the prompt and the sample as text."""
    common = [TRAINER, '--tokens', 'ours.bin', '--vocabulary', '704', '--arch', 'gpt2', '--width', '32', '--layers', '1', '--heads', '2',
              '--steps', '1', '--context', '32', '--quiet', '--out', 'out', '--sample']  # fmt: skip
    done = subprocess.run([*common, '8', '--tokenizer', 'ours.json', '--prompt', 'häa'], capture_output=True, text=True)
    check(done.returncode == 0 and '\nhäa' in done.stdout, f'the sample: {done.stdout[-200:]}{done.stderr}')
    for arguments, expected in ((['--prompt', 'a'], '--prompt needs --tokenizer'), (['--tokenizer', 'text'], 'is no JSON')):
        done = subprocess.run([*common, '8', *arguments], capture_output=True, text=True)
        check(done.returncode == 2 and expected in done.stderr and done.stderr.count('\n') == 1, f'{arguments}: {done.stderr}')


def main():
    draw, files = random.Random(7), [f'text{i}' for i in range(12)]
    for i, path in enumerate(files):
        with open(path, 'wb') as file:
            file.write(draw_text(draw, i))
    with open('text', 'wb') as file:
        file.write(b'b a ab\n')
    has_package = subprocess.run([PYTHON, '-c', 'import tokenizers'], capture_output=True).returncode == 0 if os.path.exists(PYTHON) else False
    if has_package:
        for size in (257, 300, 2000):
            compare(files, size)
    check(run('--train', '700', '--tokenizer', 'ours.json', '--out', 'ours.bin', *files).returncode == 0, '--train 700')
    first = read_tokens('ours.bin')
    check(run('--tokenizer', 'ours.json', '--out', 'again.bin', *files).returncode == 0 and read_tokens('again.bin') == first,
          'the same tokens without --train')
    bad_input()
    sample()
    print(f'{checks.failed} failures' + ('' if has_package else '; not compared: the package tokenizers is missing'))
    return 1 if checks.failed else 0 if has_package else 77


with tempfile.TemporaryDirectory() as folder:
    os.chdir(folder)
    sys.exit(main())
