# SPDX-License-Identifier: Apache-2.0
"""The Python programs of the guide run, and a version in it is current. test_distributed.py runs those that create a
process group, and test_docstrings.py the examples of the reference."""
import re
from pathlib import Path

import pytest
import torch
import torch.nn.attention

from cotangent import compat

GUIDE = Path(__file__).parents[2] / "docs/guide"
# Packages and weights that the tests do not have, a GPU, and programs of several processes.
NOT_RUN = re.compile(r"mamba_ssm|from_pretrained|get_local_kernel|model\.model\.layers|ProfilerActivity|init_process_group")
REGISTRY = hasattr(torch.nn.attention, "activate_flash_attention_impl")


def programs():
    for page in sorted(GUIDE.glob("*.md")):
        if not page.name.startswith("python_reference"):
            for number, program in enumerate(re.findall(r"^```python\n(.*?)^```$", page.read_text(), flags=re.M | re.S)):
                if not NOT_RUN.search(program) and (REGISTRY or "activate_flash_attention_impl" not in program):
                    yield pytest.param(program, id=f"{page.stem}-{number}")


def test_version_of_transformers():
    """The version that CI installs is the one that the guide names."""
    requirements = (GUIDE.parents[1] / "tools/requirements.txt").read_text()
    version = re.search(r"^transformers==(.*)$", requirements, flags=re.M)[1]
    assert f"\n| {version} | tested by CI |" in (GUIDE / "transformers.md").read_text()


@pytest.mark.parametrize("program", list(programs()))
def test_program(on_cpu, program):
    try:
        exec(program, {})
    finally:
        compat.uninstall()
        if "activate_flash_attention_impl" in program:
            torch.nn.attention.restore_flash_attention_impl()
