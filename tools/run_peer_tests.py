#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Runs the test files of flash_attn (version 2) and causal_conv1d with cotangent under their names. Needs a GPU, pytest
and einops, and checkouts of their repositories. The packages themselves need not be installed.

    tools/run_peer_tests.py --flash-attn CHECKOUT --causal-conv1d CHECKOUT [--sample N] [PYTEST'S OPTIONS...]

A test that needs what cotangent does not support raises NotImplementedError and counts as skipped, with the message. The
file of flash_attn has some hundred thousand cases: --sample runs N of each test, always the same. Exit status 1 if a test fails
or none passes.
"""
import argparse
import collections
import functools
import math
import pathlib
import random
import sys

FILES = {"flash_attn": "tests/test_flash_attn.py", "causal_conv1d": "tests/test_causal_conv1d.py"}


class Plugin:
    """Selects the sample, and turns NotImplementedError into a skip."""

    def __init__(self, sample):
        self.sample, self.counts, self.refusals = sample, collections.Counter(), collections.Counter()

    def pytest_generate_tests(self, metafunc):
        """Replaces the product of a test's parameters by a sample of it. pytest takes minutes to list the whole product."""
        lists = []
        for mark in list(metafunc.definition.iter_markers("parametrize")):
            names, values = mark.args
            lists.append((names.split(",") if isinstance(names, str) else list(names), list(values)))
        count = math.prod(len(values) for _, values in lists)
        if not self.sample or count <= self.sample:
            return
        cases = []
        for number in random.Random(metafunc.function.__name__).sample(range(count), self.sample):
            case = []
            for names, values in lists:
                number, index = divmod(number, len(values))
                case.extend([values[index]] if len(names) == 1 else values[index])
            cases.append(case)
        metafunc.definition.own_markers[:] = [m for m in metafunc.definition.own_markers if m.name != "parametrize"]
        metafunc.parametrize([name.strip() for names, _ in lists for name in names], cases)

    def pytest_runtest_makereport(self, item, call):
        import pytest

        if call.excinfo is not None and call.excinfo.errisinstance(NotImplementedError):
            self.refusals[str(call.excinfo.value)] += 1
            try:
                pytest.skip(str(call.excinfo.value))
            except pytest.skip.Exception:
                call.excinfo = pytest.ExceptionInfo.from_current()

    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1


def with_largest_one(function):
    """The function with S_dmask scaled as flash_attn's kernels scale it: its tests multiply each row by exp(max - lse)."""

    @functools.wraps(function)
    def call(*arguments, **options):
        results = function(*arguments, **options)
        if not isinstance(results, tuple) or len(results) < 3 or results[2] is None:
            return results
        largest = results[2].float().abs().amax(-1, keepdim=True)
        return (*results[:2], (results[2] / largest.clamp_min(1e-30)).to(results[2].dtype))

    return call


def run(name, checkout, sample, options):
    """Runs one file. Returns whether tests passed and none failed."""
    import pytest

    import cotangent.compat

    cotangent.compat.install()
    interface = sys.modules["flash_attn.flash_attn_interface"]
    interface.USE_TRITON_ROCM = False
    interface._get_block_size_n = lambda device, head_dim, is_dropout, is_causal: 1 << 30  # a row is one block
    for module in (interface, sys.modules["flash_attn"]):
        for attribute, function in list(vars(module).items()):
            if attribute.startswith("flash_attn_") and attribute.endswith("_func"):
                setattr(module, attribute, with_largest_one(function))
    file = pathlib.Path(checkout) / FILES[name]
    if not file.is_file():
        sys.exit(f"run_peer_tests: {file} is missing")
    plugin = Plugin(sample)
    status = pytest.main([str(file), "-q", "-p", "no:cacheprovider", "--rootdir", str(file.parent), *options], plugins=[plugin])
    print(f"{name}: {plugin.counts['passed']} passed, {plugin.counts['failed']} failed, {plugin.counts['skipped']} skipped")
    for message, count in plugin.refusals.most_common():
        print(f"    {count} skipped: {message}")
    return status == 0 and plugin.counts["passed"] > 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flash-attn")
    parser.add_argument("--causal-conv1d")
    parser.add_argument("--sample", type=int, default=0)
    chosen, options = parser.parse_known_args()
    files = [(name, path) for name, path in (("flash_attn", chosen.flash_attn), ("causal_conv1d", chosen.causal_conv1d)) if path]
    if not files:
        parser.error("give --flash-attn, --causal-conv1d or both")
    return 0 if all([run(name, path, chosen.sample, options) for name, path in files]) else 1


if __name__ == "__main__":
    sys.exit(main())
