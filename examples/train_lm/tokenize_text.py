#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a token file for `train_lm --tokens` from text files.

    examples/train_lm/tokenize_text.py --tokenizer tokenizer.json --out tokens.bin FILE...
    examples/train_lm/tokenize_text.py --train N --tokenizer tokenizer.json --out tokens.bin FILE...

Needs the package tokenizers (pip install tokenizers). --train first trains a byte-level BPE with N tokens on the files and
writes it to --tokenizer. Each file ends with the token --end, <|endoftext|> by default. tokens.h describes the format.
"""
import argparse
import array
import os
import sys

import tokenizers

HEADER_WORDS, PIECE = 256, 1 << 20  # PIECE: characters that are encoded at a time


def train(count, end, files, path):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train(files, tokenizers.trainers.BpeTrainer(vocab_size=count, special_tokens=[end], show_progress=False,
                                                          initial_alphabet=alphabet))
    tokenizer.save(path)


def pieces(path):
    """The text in pieces of about PIECE characters that end with a line."""
    with open(path, encoding="utf-8", errors="replace", newline="") as file:
        while lines := file.readlines(PIECE):
            yield "".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--train", type=int, metavar="N")
    parser.add_argument("--end", default="<|endoftext|>")
    parser.add_argument("files", nargs="+")
    options = parser.parse_args()
    if options.train:
        train(options.train, options.end, options.files, options.tokenizer)
    tokenizer = tokenizers.Tokenizer.from_file(options.tokenizer)
    end = tokenizer.token_to_id(options.end)
    if end is None:
        sys.exit(f'tokenize_text: --end is "{options.end}", which {options.tokenizer} does not have')
    short = tokenizer.get_vocab_size() <= 1 << 16
    tokens = array.array("H" if short else "I")
    for path in options.files:
        for piece in pieces(path):
            tokens.extend(tokenizer.encode(piece, add_special_tokens=False).ids)
        tokens.append(end)
    header = array.array("i", [0] * HEADER_WORDS)
    header[0], header[1], header[2] = (20240520, 1, len(tokens)) if short else (20240801, 7, len(tokens))
    if sys.byteorder == "big":
        header.byteswap(), tokens.byteswap()
    with open(options.out + ".part", "wb") as file:
        header.tofile(file)
        tokens.tofile(file)
    os.replace(options.out + ".part", options.out)
    print(f"{options.out}: {len(tokens)} tokens of a vocabulary of {tokenizer.get_vocab_size()}")


if __name__ == "__main__":
    main()
