#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the Markdown pages: links, lengths and sentences.

    tools/check_pages.py [ROOT]

A relative link must lead to a file or folder of the repository, and its #anchor to a heading. The README has at most 5000
bytes, src/ops/*/README.md 150 lines, docs/kernels/*.md 200 lines. A sentence has at most 35 words. A colon ends no
sentence. In a table, semicolons separate the entries of a cell, each with at most 35 words. Code and headings are left
out. docs/README.md links every page of docs/guide and docs/kernels. docs/guide/c.md and
docs/guide/context_parallel_c.md quote their examples word for word.
"""
import pathlib
import re
import subprocess
import sys

LONGEST_SENTENCE, README_BYTES, OP_LINES, KERNEL_LINES = 35, 5000, 150, 200
QUOTES = [("docs/guide/c.md", "examples/c/causal_conv1d.c"), ("docs/guide/c.md", "examples/c/attention.c"),
          ("docs/guide/c.md", "examples/c/attention_cuda.c"), ("docs/guide/context_parallel_c.md", "examples/c/context_parallel.c")]


def without_code(text):
    """The text without fenced and indented blocks, HTML comments and tables."""
    text = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    lines = text.split("\n")
    kept, after_blank = [], True
    for line in lines:
        code = line.startswith("    ") and after_blank and not re.match(r"\s+([-*]|\d+\.) ", line)
        after_blank = not line.strip() or code
        kept.append("" if code or line.lstrip().startswith("|") else line)
    return "\n".join(kept)


def anchor_of(heading):
    """GitHub's anchor of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


def broken_links(root, path):
    text = without_code(path.read_text())
    tables = "\n".join(line for line in path.read_text().split("\n") if line.lstrip().startswith("|"))
    for target in re.findall(r"\]\(([^)\s]+)\)", text + "\n" + tables):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = (path.parent / name).resolve() if name else path
        if not file.exists() or not file.is_relative_to(root):
            yield target
        elif anchor and file.suffix == ".md":
            headings = re.findall(r"^#+ (.*)$", file.read_text(), flags=re.M)
            if anchor not in map(anchor_of, headings):
                yield target


def long_sentences(path):
    def plain(text):
        return re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", text))
    blocks = re.split(r"\n\s*\n|\n(?=#)|\n\s*(?=[-*] |\d+\. )", plain(without_code(path.read_text())))
    blocks = [block.partition("\n")[2] if block.startswith("#") else block for block in blocks]
    rows = [line for line in path.read_text().split("\n") if line.lstrip().startswith("|")]
    blocks += [entry for row in rows for entry in re.split("[|;]", plain(row))]
    for block in blocks:
        for sentence in re.split(r"(?<=[.!?])\s+", " ".join(block.split())):
            words = [word for word in sentence.split() if re.search(r"\w", word)]
            if len(words) > LONGEST_SENTENCE:
                yield f"{len(words)} words: {sentence}"


def pages_of(root):
    """The Markdown pages that git tracks or would track."""
    listed = subprocess.run(["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
                            check=True, capture_output=True, text=True).stdout
    return [root / name for name in sorted(set(listed.split("\0"))) if name and (root / name).exists()]


def main():
    root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else pathlib.Path(__file__).parent.parent).resolve()
    pages = pages_of(root)
    complaints = []
    for path in pages:
        name = path.relative_to(root)
        complaints += [f"{name}: the link {target} leads nowhere" for target in broken_links(root, path)]
        lines = path.read_text().count("\n")
        most = OP_LINES if name.match("src/ops/*/README.md") else KERNEL_LINES if name.match("docs/kernels/*.md") else None
        if most is not None and lines > most:
            complaints.append(f"{name}: {lines} lines, at most {most} are allowed")
        complaints += [f"{name}: {sentence}" for sentence in long_sentences(path)]
    if (root / "README.md").exists() and (size := (root / "README.md").stat().st_size) > README_BYTES:
        complaints.append(f"README.md: {size} bytes, at most {README_BYTES} are allowed")
    index = root / "docs/README.md"
    linked = re.findall(r"\]\(([^)\s#]+)", index.read_text()) if index.exists() else []
    complaints += [f"docs/README.md: no link to {path.relative_to(root / 'docs')}" for path in pages
                   if index.exists() and path.parent.name in ("guide", "kernels") and path.parent.parent == root / "docs"
                   and str(path.relative_to(root / "docs")) not in linked]
    for page, source in QUOTES:
        if not (root / page).exists():
            continue
        example = (root / source).read_text().partition("\n")[2]  # without the licence line
        if example not in re.findall(r"^```c\n(.*?)^```$", (root / page).read_text(), flags=re.M | re.S):
            complaints.append(f"{page}: no ```c block equals {source}")
    print("\n".join(complaints + [f"check_pages: {len(pages)} pages, {len(complaints)} complaints"]))
    return 1 if complaints else 0


if __name__ == "__main__":
    sys.exit(main())
