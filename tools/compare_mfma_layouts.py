#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compares the register layouts of MFMA instructions, under which tests/emulator-amd/test_emulator_amd.c tests the emulator, with
AMD's matrix instruction calculator, for MI200 (CDNA2) and MI300 (CDNA3).

  git clone https://github.com/ROCm/amd_matrix_instruction_calculator CALCULATOR     (needs the package tabulate)
  tools/compare_mfma_layouts.py build/test_emulator_amd CALCULATOR
"""
import collections
import pathlib
import re
import subprocess
import sys

INSTRUCTIONS = {  # kernel of mfma_probe.cu: the instruction of CDNA2, of CDNA3
    "mfma_32_f16": ("v_mfma_f32_32x32x8f16", "v_mfma_f32_32x32x8_f16"),
    "mfma_32_bf16": ("v_mfma_f32_32x32x8bf16_1k", "v_mfma_f32_32x32x8_bf16"),
    "mfma_32_f32": ("v_mfma_f32_32x32x2f32", "v_mfma_f32_32x32x2_f32"),
    "mfma_16_f16": ("v_mfma_f32_16x16x16f16", "v_mfma_f32_16x16x16_f16"),
    "mfma_16_bf16": ("v_mfma_f32_16x16x16bf16_1k", "v_mfma_f32_16x16x16_bf16"),
    "mfma_16_f32": ("v_mfma_f32_16x16x4f32", "v_mfma_f32_16x16x4_f32"),
}


def of_calculator(folder, architecture, instruction, matrix):
    """{(row, column): (lane, element)}: a line of the calculator is a lane, and its columns are the elements."""
    command = [sys.executable, pathlib.Path(folder, "matrix_calculator.py"), "-a", architecture, "-i", instruction,
               "--matrix-layout", "--csv", f"-{matrix}"]
    layout = {}
    for line in subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines():
        lane, *cells = line.split(",")
        for element, cell in enumerate(cells if lane.isdigit() else []):
            row, column = re.fullmatch(r"\w\[(\d+)\]\[(\d+)\]", cell.strip()).groups()
            layout[int(row), int(column)] = int(lane), element
    return layout


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    ours = collections.defaultdict(dict)
    for line in subprocess.run([sys.argv[1], "layouts"], check=True, capture_output=True, text=True).stdout.splitlines():
        kernel, matrix, *numbers = line.split()
        row, column, lane, element = map(int, numbers)
        ours[kernel, matrix][row, column] = lane, element
    failed = False
    for number, architecture in enumerate(("CDNA2", "CDNA3")):
        for kernel, names in INSTRUCTIONS.items():
            differ = places = 0
            for matrix in "ABD":
                theirs = of_calculator(sys.argv[2], architecture, names[number], matrix)
                differ += sum(ours[kernel, matrix].get(place) != at for place, at in theirs.items())
                differ += len(ours[kernel, matrix].keys() ^ theirs.keys())
                places += len(theirs)
            print(f"{architecture} {names[number]}: {places} places, {differ} differ")
            failed = failed or differ > 0 or places == 0
    sys.exit(failed)


main()
