#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Shows that a change only renames identifiers and rewrites comments.

    tools/compare_tokens.py [--names] [--strings] REVISION [PATH...]

Compares the C, CUDA and Python files of the working tree with REVISION (PATH: only these files and folders). Comments,
Python docstrings and white space are left out. A file passes if both versions have the same tokens apart from the spelling of identifiers. (Whether a new name
hides another one, only the compiled code shows.) --names prints the renamed identifiers, --strings accepts and prints
string literals that changed. Renamed files are found by `git diff -M`. Exit status 1: a file differs otherwise.
"""
import argparse
import ast
import pathlib
import re
import subprocess
import sys

C_FILES = (".c", ".h", ".cu", ".cuh", ".def", ".cpp")
TOKEN = re.compile(r"""
    (?P<space>\s+|\\\n|//[^\n]*|/\*.*?\*/)
  | (?P<string>(?:u8|[uUL])?"(?:[^"\\\n]|\\.)*")
  | (?P<include>(?<=\#include\ )<[^>\n]*>)
  | (?P<char>'(?:[^'\\\n]|\\.)+')
  | (?P<name>[A-Za-z_]\w*)
  | (?P<number>\.?\d(?:[eEpP][+-]|'?[\w.])*)
  | (?P<other>.)""", re.VERBOSE | re.DOTALL)


def c_tokens(text):
    """(kind, text) of each token; string literals that follow each other are one."""
    tokens = []
    for match in TOKEN.finditer(text):
        kind = match.lastgroup
        if kind == "space":
            continue
        if kind == "string" and tokens and tokens[-1][0] == "string":
            tokens[-1] = ("string", tokens[-1][1][:-1] + match.group()[match.group().index('"') + 1:])
        else:
            tokens.append((kind, match.group()))
    return tokens


def python_tokens(text):
    """The syntax tree's nodes in order, with identifiers as names and without docstrings."""
    tokens = []

    def visit(node):
        tokens.append(("other", type(node).__name__))
        body = getattr(node, "body", None)
        documented = isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
        for field, value in ast.iter_fields(node):
            if documented and field == "body" and ast.get_docstring(node) is not None:
                value = body[1:]
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, ast.AST):
                    visit(item)
                elif isinstance(node, ast.Constant) and isinstance(item, str):
                    tokens.append(("string", item))
                elif isinstance(item, str):
                    tokens.append(("name", item))
                elif item is not None:
                    tokens.append(("other", repr(item)))
    visit(ast.parse(text))
    return tokens


def git(*arguments):
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


def changed_files(revision, paths):
    """(old path or None, new path or None) of each changed file that has tokens."""
    fields = iter(git("diff", "-M30%", "--name-status", "-z", revision, "--", *paths).split("\0"))
    for status in fields:
        if not status:
            return
        old = next(fields)
        new = next(fields) if status[0] == "R" else old
        if pathlib.PurePath(new).suffix in C_FILES + (".py",):
            yield (None if status[0] == "A" else old, None if status[0] == "D" else new)


def compare(path, old, new, options):
    """The names that changed, {old: {new}}; None if the files differ otherwise."""
    tokens = python_tokens if path.endswith(".py") else c_tokens
    old, new = tokens(old), tokens(new)
    renamed = {}
    for at, ((old_kind, a), (new_kind, b)) in enumerate(zip(old, new)):
        if old_kind == new_kind == "name":
            if a != b:
                renamed.setdefault(a, set()).add(b)
        elif (old_kind, a) != (new_kind, b):
            if old_kind == new_kind == "string" and (options.strings or a.endswith(('.h"', '.cuh"', '.def"'))):
                if options.strings:
                    print(f"{path}: {a} is now {b}")
                continue
            context = " ".join(text for _, text in old[max(0, at - 8):at])
            print(f"{path}: after '{context}': '{a}' became '{b}'")
            return None
    if len(old) != len(new):
        longer = old if len(old) > len(new) else new
        print(f"{path}: {len(old)} tokens became {len(new)}; the rest begins {longer[min(len(old), len(new))]}")
        return None
    return renamed


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision")
    parser.add_argument("paths", nargs="*")
    parser.add_argument("--names", action="store_true", help="print the renamed identifiers")
    parser.add_argument("--strings", action="store_true", help="accept string literals that changed, and print them")
    options = parser.parse_args()
    failed = count = 0
    for old, new in changed_files(options.revision, options.paths):
        if old is None or new is None:
            print(f"{old or new}: {'removed' if new is None else 'added'}")
            failed += 1
            continue
        count += 1
        renamed = compare(new, git("show", f"{options.revision}:{old}"), pathlib.Path(new).read_text(), options)
        if renamed is None:
            failed += 1
        elif options.names:
            for name, others in sorted(renamed.items()):
                print(f"{new}: {name} -> {', '.join(sorted(others))}")
    print(f"{count} files compared, {failed} differ by more than names and comments")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
