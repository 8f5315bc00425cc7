#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes __init__.pyi: the names of the package for type checkers and editors, which do not see the functions that
cotangent/__init__.py takes from the files of cotangent/ops.

A function that returns Any and has an argument `return_...` returns a Tensor without it and two tensors with it. The stub
has both signatures, so that a type checker knows the type of a result.

    make_stub.py OUTPUT PACKAGE_FOLDER
"""
import ast
import pathlib
import sys


def overloads(function):
    """The signatures of a function whose result depends on its argument `return_...`, or [] for other functions."""
    names = [argument.arg for argument in function.args.kwonlyargs]
    flags = [i for i, name in enumerate(names) if name.startswith("return_")]
    if ast.unparse(function.returns) != "Any" or len(flags) != 1:
        return []
    i = flags[0]
    flag = function.args.kwonlyargs[i].annotation
    off, on = ("Literal[False]", "Literal[True]") if ast.unparse(flag) == "bool" else ("None", "str")
    lines = []
    for kind, result, default in ((off, "Tensor", function.args.kw_defaults[i]), (on, "Tuple[Tensor, Tensor]", None)):
        function.args.kwonlyargs[i].annotation = ast.parse(kind, mode="eval").body
        function.args.kw_defaults[i] = default
        lines.append(f"@overload\ndef {function.name}({ast.unparse(function.args)}) -> {result}:")
        lines.append(f'    r"""{ast.get_docstring(function, clean=False)}"""')
    return lines


def main(output, folder):
    folder = pathlib.Path(folder)
    lines = ["from typing import Literal, Optional, Tuple, overload", "from torch import Tensor", "__version__: str"]
    for node in ast.walk(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.level == 1:
            names = [alias.name for alias in node.names if alias.asname is None]
            lines += [f"from .{node.module} import {name} as {name}" for name in names]
    for path in sorted(folder.glob("ops/[!_]*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                lines += overloads(node) or [f"from .ops.{path.stem} import {node.name} as {node.name}"]
    pathlib.Path(output).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
