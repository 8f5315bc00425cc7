#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Lists each figure of the ops' pages at an older commit, and where the figure is now.

    tools/find_figures.py [--missing] [REVISION [OP...]]

Reads src/ops/OP/README.md of REVISION (994d9c3: the last commit before the pages were divided) without its generated
tables. A figure is a number, or a fraction in words ("a tenth"); for a fraction the percentage counts as well. The
place is the line of today's pages of the op (README, docs/kernels, docs/experiments, docs/benchmarks) that holds the
figure and shares most words with the old sentence. --missing prints the figures without a place only.
Exit status 1: a figure has no place.
"""
import argparse
import pathlib
import re
import subprocess
import sys

REVISION = "994d9c3"
# Percentages and factors that a fraction of the old pages became.
FRACTIONS = {
    "half": "50 0.5 1.5 2", "halves": "50 0.5 2", "halved": "50 0.5 2", "third": "33 0.33 1/3 67 1.33", "quarter": "25 0.25 75 4",
    "quarters": "75 25 0.75", "fifth": "20 0.2 5", "sixth": "17 1/6 6", "seventh": "14 1/7 7", "eighth": "12.5 12 1/8 8",
    "ninth": "11 1/9 9", "tenth": "10 0.1", "twelfth": "8.3 8 12", "thirteenth": "7.7 8 13", "fourteenth": "7 14",
    "fifteenth": "6.7 7 15", "sixteenth": "6 6.25 16", "eighteenth": "5.6 6 18", "twentieth": "5 20", "thirtieth": "3.3 3 30",
    "fortieth": "2.5 40", "fiftieth": "2 50", "sixtieth": "1.7 2 60", "hundredth": "1 100 0.5", "thousandth": "0.1 0.3 1000",
    "twice": "2", "threefold": "3", "fourfold": "4"}
NUMBER = re.compile(r"(?<![\w.^-])\d+(?:[.,]\d+)*(?:e-?\d+)?(?![\w])|(?<=\^)-?\d+")
FRACTION = re.compile(rf"\b({'|'.join(FRACTIONS)})s?\b", re.IGNORECASE)
WORD = re.compile(r"[A-Za-z_]{3,}")
MARK = re.compile(r"<!-- (?:table|chart).*?<!-- end -->", re.DOTALL)


def sentences(text):
    """Sentences and table lines with their numbers of line."""
    text = MARK.sub(lambda match: "\n" * match.group().count("\n"), text)
    start = 0
    for end in [match.end() for match in re.finditer(r"[.;:](?=\s)|\n(?=\s*(?:\||-|\n|#))", text)] + [len(text)]:
        if text[start:end].strip():
            begin = start + len(text[start:end]) - len(text[start:end].lstrip())
            yield text.count("\n", 0, begin) + 1, " ".join(text[start:end].split())
        start = end


def figures(sentence):
    plain = re.sub(r"\]\([^)]*\)", "]", sentence)
    yield from ((match.group(), {match.group()}) for match in NUMBER.finditer(plain))
    for match in FRACTION.finditer(plain):
        word = match.group(1).lower()
        yield match.group(), {word, word + "s", *FRACTIONS[word].split()}


def pages_of(op):
    family = "causal_conv1d_dense" if op == "causal_conv1d_dense" else op
    yield pathlib.Path(f"src/ops/{op}/README.md")
    for folder in ("docs/kernels", "docs/experiments", "docs/benchmarks"):
        yield from sorted(page for page in pathlib.Path(folder).glob(f"{family}*.md")
                          if op != "causal_conv1d" or "dense" not in page.name)


def places(op):
    """(place, its tokens, its words) of each line of today's pages; a line's neighbours lend their words."""
    for page in pages_of(op):
        lines = page.read_text().split("\n")
        for number, line in enumerate(lines, 1):
            tokens = set(NUMBER.findall(line)) | set(re.findall(r"\d+(?:\.\d+)?", line)) | set(re.findall(r"[a-z]+|1/\d", line.lower()))
            yield f"{page}:{number}", tokens, set(WORD.findall(" ".join(lines[max(0, number - 3):number + 2]).lower()))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--missing", action="store_true")
    parser.add_argument("revision", nargs="?", default=REVISION)
    parser.add_argument("ops", nargs="*", default=["attention", "causal_conv1d", "causal_conv1d_dense", "dropout", "mhc"])
    options = parser.parse_args()
    found = missing = 0
    for op in options.ops:
        path = f"src/ops/{op}/README.md"
        old = subprocess.run(["git", "show", f"{options.revision}:{path}"], capture_output=True, text=True, check=True).stdout
        today = list(places(op))
        for line, sentence in sentences(old):
            words = set(WORD.findall(sentence.lower()))
            for figure, forms in figures(sentence):
                candidates = [(len(words & near), place) for place, tokens, near in today if forms & tokens]
                place = max(candidates, key=lambda candidate: candidate[0])[1] if candidates else None
                found, missing = found + bool(place), missing + (not place)
                if not (options.missing and place):
                    print(f"{path}:{line}: {figure}: {place or 'nowhere'}: {sentence[:160]}")
    print(f"find_figures: {found + missing} figures, {missing} without a place", file=sys.stderr)
    sys.exit(missing > 0)


if __name__ == "__main__":
    main()
