#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes __init__.pyi: the names of the package for type checkers and editors, which do not see the functions that
cotangent/__init__.py takes from the files of cotangent/ops.

    make_stub.py OUTPUT PACKAGE_FOLDER
"""
import ast
import pathlib
import sys


def main(output, folder):
    folder = pathlib.Path(folder)
    lines = ["__version__: str"]
    for node in ast.walk(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names = [alias.name for alias in node.names if alias.asname is None]
            lines += [f"from .{node.module} import {name} as {name}" for name in names]
    for path in sorted(folder.glob("ops/[!_]*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                lines.append(f"from .ops.{path.stem} import {node.name} as {node.name}")
    pathlib.Path(output).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
