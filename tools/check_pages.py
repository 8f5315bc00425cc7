#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the Markdown pages: links, lengths, sentences and names.

    tools/check_pages.py [--wrap] [ROOT]

A relative link must lead to a file or folder of the repository, and its #anchor to a heading. The README has at most 5000
bytes, src/ops/*/README.md 150 lines, docs/kernels/*.md 200 lines. A sentence has at most 35 words. A colon ends no
sentence. In a table, semicolons separate the entries of a cell, each with at most 35 words. Code and headings are left
out. docs/README.md links every page of docs/guide and docs/kernels. docs/guide/c.md and
docs/guide/context_parallel_c.md quote their examples word for word. In docs/kernels, a name with an underscore in
backticks exists in the sources. A line of text in a page, or of a comment in C and CUDA, has at most 132 columns:
--wrap wraps the paragraphs of pages that have longer ones. Longer lines are allowed in docs/benchmarks, which is
generated, and in docs/original_specifications.md, a quotation.
"""
import argparse
import pathlib
import re
import subprocess
import sys
import textwrap

LONGEST_SENTENCE, README_BYTES, OP_LINES, KERNEL_LINES = 35, 5000, 150, 200
COLUMNS = 132
ANY_WIDTH = ("docs/benchmarks/*", "docs/original_specifications.md")
QUOTES = [("docs/guide/c.md", "examples/c/causal_conv1d.c"), ("docs/guide/c.md", "examples/c/attention.c"),
          ("docs/guide/c.md", "examples/c/attention_cuda.c"), ("docs/guide/context_parallel_c.md", "examples/c/context_parallel.c")]


def is_prose(text):
    """For each line of the text, whether it is prose: no fenced or indented block, HTML comment, table or heading, and not
    generated (between <!-- table: --> and <!-- end -->)."""
    prose, fenced, comment, generated, after_blank = [], False, False, False, True
    for line in text.split("\n"):
        fence = line.lstrip().startswith("```")
        comment = comment or line.lstrip().startswith("<!--")
        generated = (generated or line.startswith("<!-- table")) and not line.startswith("<!-- end")
        code = line.startswith("    ") and after_blank and not re.match(r"\s+([-*]|\d+\.) ", line)
        after_blank = not line.strip() or code
        prose.append(bool(line.strip()) and not (fenced or fence or comment or code or generated or line.lstrip().startswith(("|", "#"))))
        fenced, comment = fenced != fence, comment and "-->" not in line
    return prose


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


def wrapped(text):
    """The text, in which the paragraphs with lines above COLUMNS are wrapped."""
    lines, prose, result, at = text.split("\n"), is_prose(text), [], 0
    while at < len(lines):
        end = at + 1
        while end < len(lines) and prose[at] and prose[end] and not re.match(r"\s*([-*]|\d+\.) ", lines[end]):
            end += 1
        paragraph = lines[at:end]
        if prose[at] and max(map(len, paragraph)) > COLUMNS:
            marker = re.match(r"\s*(?:(?:[-*]|\d+\.) )?", paragraph[0])[0]
            joined = " ".join([paragraph[0][len(marker):]] + [line.strip() for line in paragraph[1:]])
            # No break within code, or before what would begin a list, a heading or a table.
            joined = re.sub(r"`[^`]*`", lambda code: code[0].replace(" ", "\0"), joined)
            joined = re.sub(r" (?=([-+*#>|]|\d+\.) )", "\0", joined)
            paragraph = textwrap.wrap(joined, COLUMNS, initial_indent=marker, subsequent_indent=" " * len(marker),
                                      break_long_words=False, break_on_hyphens=False)
        result += [line.replace("\0", " ") for line in paragraph]
        at = end
    return "\n".join(result)


def long_lines(path):
    text = path.read_text()
    for number, (line, prose) in enumerate(zip(text.split("\n"), is_prose(text)), 1):
        if prose and len(line) > COLUMNS and wrapped(line) != line:
            yield f"{number}: {len(line)} columns, at most {COLUMNS} are allowed (tools/check_pages.py --wrap)"


def long_comments(path):
    for number, line in enumerate(path.read_text().split("\n"), 1):
        if len(line) > COLUMNS and re.match(r"\s*(/\*|\*|//) ", line) and not re.search(r"\*/.*\S", line):
            yield f"{number}: a comment of {len(line)} columns, at most {COLUMNS} are allowed"


def unknown_names(path, sources):
    """Names with an underscore in backticks that no source contains. Macros join the name of a kernel's instance: it begins with
    the name of the kernel. The last column of the glossary has names of other libraries."""
    text = re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.M | re.S)
    if path.name == "glossary.md":
        text = re.sub(r"\|[^|\n]*\|$", "|", text, flags=re.M)
    for name in sorted(set(re.findall(r"`(\w*[A-Za-z0-9]_\w+)(?:\(\))?`", text))):
        if re.sub(r"(_sm[89]0)_\w+$", r"\1", name) not in sources:
            yield name


def tracked(root, *patterns):
    listed = subprocess.run(["git", "-C", root, "ls-files", "-z", "--cached", "--others", "--exclude-standard", *patterns],
                            check=True, capture_output=True, text=True).stdout
    return [root / name for name in sorted(set(listed.split("\0"))) if name and (root / name).exists()]


def pages_of(root):
    """The Markdown pages that git tracks or would track."""
    return tracked(root, "*.md")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("root", nargs="?", type=pathlib.Path, default=pathlib.Path(__file__).parent.parent)
    parser.add_argument("--wrap", action="store_true", help="wrap paragraphs with long lines")
    options = parser.parse_args()
    root = options.root.resolve()
    pages = pages_of(root)
    narrow = [path for path in pages if not any(path.relative_to(root).match(pattern) for pattern in ANY_WIDTH)]
    for path in narrow if options.wrap else []:
        text = path.read_text()
        if any(long_lines(path)):
            path.write_text(wrapped(text))
    code = tracked(root, "*.c", "*.h", "*.cu", "*.cuh", "*.cpp")
    others = tracked(root, "*.def", "*.py", "*.sh", "*.cmake", "*CMakeLists.txt", ".ci/run")
    sources = "\n".join(path.read_text() + path.name for path in code + others)
    complaints = [f"{path.relative_to(root)}:{line}" for path in narrow for line in long_lines(path)]
    complaints += [f"{path.relative_to(root)}:{line}" for path in code for line in long_comments(path)]
    complaints += [f"{path.relative_to(root)}: no source has the name {name}" for path in pages
                   if path.parent == root / "docs/kernels" for name in unknown_names(path, sources)]
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
