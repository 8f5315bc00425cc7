#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Builds the Markdown pages of the repository as static HTML, through MkDocs.

    tools/make_guide.py DIRECTORY

Copies the pages and the files that they link to into DIRECTORY.pages, with the paths of the repository, so that every link
works, and writes the site to DIRECTORY. `tools/check_pages.py` checks the links first.
"""
import json
import pathlib
import re
import shutil
import subprocess
import sys

from check_pages import pages_of

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAVIGATION = [
    ("Cotangent", "README.md"),
    ("All pages", "docs/README.md"),
    ("Guide", [("Before you adopt it", "docs/guide/before_you_adopt.md"),
               ("Getting started", "docs/guide/getting_started.md"), ("What is supported", "docs/guide/support.md"),
               ("Performance", "docs/guide/performance.md"), ("Pitfalls", "docs/guide/pitfalls.md"),
               ("C", "docs/guide/c.md"), ("Command line", "docs/guide/command_line.md"),
               ("Python guide", "docs/guide/python.md"), ("Python reference", "docs/guide/python_reference.md"),
               ("Python reference: distributed", "docs/guide/python_reference_distributed.md"),
               ("Python reference: compat, integrations", "docs/guide/python_reference_compat.md"),
               ("Masks and padding", "docs/guide/masks.md"), ("Hyper-connections", "docs/guide/hyper_connections.md"),
               ("Hugging Face Transformers", "docs/guide/transformers.md"),
               ("Replacing flash_attn and causal_conv1d", "docs/guide/replace.md"),
               ("Many GPUs", "docs/guide/many_gpus.md"),
               ("Context parallelism in C", "docs/guide/context_parallel_c.md"),
               ("Context parallelism in PyTorch", "docs/guide/context_parallel_pytorch.md"),
               ("Ring attention by hand", "docs/guide/ring_attention_by_hand.md"),
               ("Installing and packaging", "docs/guide/install.md"),
               ("Accuracy", "docs/guide/accuracy.md"), ("Reproducibility", "docs/guide/reproducibility.md"), ("Errors in Python", "docs/guide/errors.md"),
               ("Errors in C", "docs/guide/errors_c.md")]),
    ("Benchmarks", "docs/benchmarks"),
    ("Ops", "src/ops"),
    ("Kernels", "docs/kernels"),
    ("Experiments", "docs/experiments"),
    ("Development", [("Architecture", "docs/architecture.md"), ("Adding an op", "docs/adding_an_op.md"),
                     ("Contributing", "CONTRIBUTING.md"), ("Changes", "CHANGELOG.md")]),
]

# The theme leaves no space between a table and the text below it.
TABLES_CSS = ".rst-content table { margin-bottom: 24px } .rst-content td, .rst-content th { padding: 4px 8px }\n"

def stage(directory, names):
    """Copies the pages, and the files that they link to."""
    files = set(names)
    for name in names:
        for target in re.findall(r"\]\(([^)\s#]+)", (ROOT / name).read_text()):
            file = (ROOT / name).parent / target
            if not re.match(r"[a-z]+:", target) and file.is_file():
                files.add(str(file.resolve().relative_to(ROOT)))
    for name in files:
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, directory / name)


def title_of(name):
    heading = re.search(r"^# (.*)$", (ROOT / name).read_text(), flags=re.M)
    return heading[1] if heading else pathlib.PurePath(name).stem


def navigation(names):
    """MkDocs' nav: a folder becomes the list of its pages by their titles."""
    entries = []
    for title, target in NAVIGATION:
        if isinstance(target, list):
            entries.append({title: [{text: page} for text, page in target]})
        elif target.endswith(".md"):
            entries.append({title: target})
        elif inside := [{title_of(name): name} for name in names if name.startswith(target + "/")]:
            entries.append({title: inside})
    return entries


def main():
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: make_guide.py DIRECTORY")
    site = pathlib.Path(sys.argv[1]).resolve()
    source = site.with_name(site.name + ".pages")
    shutil.rmtree(source, ignore_errors=True)
    names = [str(page.relative_to(ROOT)) for page in pages_of(ROOT)]
    stage(source, names)
    (source / "tables.css").write_text(TABLES_CSS)
    config = source.with_suffix(".yml")
    config.write_text(json.dumps({"site_name": "Cotangent", "docs_dir": str(source), "site_dir": str(site), "theme": "readthedocs",
                                  "extra_css": ["tables.css"],
                                  "use_directory_urls": False, "nav": navigation(names), "plugins": []}))
    subprocess.run(["mkdocs", "build", "--quiet", "--clean", "--config-file", str(config)], check=True)
    print(f"make_guide: {site}/index.html")


if __name__ == "__main__":
    main()
