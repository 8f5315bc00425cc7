# SPDX-License-Identifier: Apache-2.0
"""The generated __init__.pyi: what a type checker sees of the package."""
import ast
import inspect
from pathlib import Path

import cotangent

STUB = Path(cotangent.__file__).with_name("__init__.pyi")


def test_stub_has_every_name():
    names = set()
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            names |= {alias.asname for alias in node.names}
        elif isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.AnnAssign):
            names.add(node.target.id)
    assert set(cotangent.__all__) <= names


def test_results_have_types():
    """The signatures with and without return_... agree with the function, and differ in their results."""
    signatures = {}
    for node in ast.parse(STUB.read_text()).body:
        if isinstance(node, ast.FunctionDef):
            signatures.setdefault(node.name, []).append(node)
    assert set(signatures) == {"attention", "attention_varlen", "causal_conv1d", "causal_conv1d_dense", "dropout"}
    for name, nodes in signatures.items():
        assert [ast.unparse(node.returns) for node in nodes] == ["Tensor", "Tuple[Tensor, Tensor]"]
        for node in nodes:
            arguments = [a.arg for a in (*node.args.args, *node.args.kwonlyargs)]
            assert arguments == list(inspect.signature(getattr(cotangent, name)).parameters)
        kinds = [{a.arg: ast.unparse(a.annotation) for a in node.args.kwonlyargs} for node in nodes]
        flag = next(argument for argument in kinds[0] if argument.startswith("return_"))
        assert kinds[0][flag] in ("Literal[False]", "None") and kinds[1][flag] in ("Literal[True]", "str")
        without, with_flag = (dict(zip((a.arg for a in node.args.kwonlyargs), node.args.kw_defaults)) for node in nodes)
        assert without[flag] is not None and with_flag[flag] is None  # only without it, the flag may be left out
