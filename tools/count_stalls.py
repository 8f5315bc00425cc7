#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Counts the instructions and stall cycles of a GPU kernel's main loop in its machine code (tried with sm_90a).

    cuobjdump -xelf all build/cuda/STEM.fatbin
    nvdisasm -hex STEM.1.sm_90a.cubin | tools/count_stalls.py [--list] KERNEL

The main loop is the shortest loop with at least half of the kernel's matrix products. Each instruction states how many cycles
its warp waits after it. The sum is the least time of one iteration for a warp that is alone on its scheduler, if no branch
skips instructions of the loop. Waits for loads, barriers and other warps come on top. Both programs are in the CUDA toolkit, and on PyPI: nvidia-cuda-cuobjdump,
nvidia-cuda-nvdisasm.
"""
import argparse
import re
import sys

LINE = re.compile(r"\s+/\*[0-9a-f]+\*/\s+(.*?)\s*;?\s*/\* 0x[0-9a-f]{16} \*/")
SECOND_WORD = re.compile(r"\s+/\* 0x([0-9a-f]{16}) \*/")
STALL_SHIFT, STALL_MASK = 41, 15  # of the second 64-bit word of an instruction


def read_kernel(lines, kernel):
    """The kernel's instructions as (text, stall cycles), and the index of the instruction at each label."""
    instructions, labels, inside = [], {}, False
    for line in lines:
        if line.startswith("\t.section\t"):
            inside = line.startswith(f"\t.section\t.text.{kernel},")
        elif inside:
            label = re.match(r"(\.L_x_\d+):", line)
            first, second = LINE.match(line), SECOND_WORD.match(line)
            if label:
                labels[label[1]] = len(instructions)
            elif first:
                instructions.append((first[1], 0))
            elif second and instructions:
                instructions[-1] = (instructions[-1][0], int(second[1], 16) >> STALL_SHIFT & STALL_MASK)
    return instructions, labels


def is_product(text):
    return re.search(r"\b[HIDQ]?G?MMA\b", text) is not None


def find_main_loop(instructions, labels):
    """The first and the last index of the loop; None without one."""
    products = [is_product(text) for text, _ in instructions]
    loops = []
    for end, (text, _) in enumerate(instructions):
        branch = re.search(r"\bBRA\b.*`\((\.L_x_\d+)\)", text)
        begin = labels.get(branch[1], end + 1) if branch else end + 1
        if begin <= end and 2 * sum(products[begin:end + 1]) >= max(1, sum(products)):
            loops.append((end - begin, begin, end))
    return min(loops)[1:] if loops else None


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--list", action="store_true", help="print every instruction of the loop after its stall cycles")
    parser.add_argument("kernel", metavar="KERNEL", help="its name in the machine code")
    options = parser.parse_args()
    instructions, labels = read_kernel(sys.stdin, options.kernel)
    if not instructions:
        sys.exit(f"count_stalls.py: no kernel {options.kernel} in this text, expected the output of nvdisasm -hex")
    loop = find_main_loop(instructions, labels)
    if loop is None:
        sys.exit(f"count_stalls.py: {options.kernel} has no loop with half of its matrix products")
    body = instructions[loop[0]:loop[1] + 1]
    if options.list:
        for text, stall in body:
            print(f"{stall:2} {text}")
    print(f"{options.kernel}: {len(body)} instructions, {sum(is_product(text) for text, _ in body)} of them products, "
          f"{sum(stall for _, stall in body)} stall cycles")


if __name__ == "__main__":
    main()
