#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tables of the kernels for gfx942, from clang's remarks and the disassembly of a build: registers, LDS and occupancy of all
kernels, and estimates of what bounds the MFMA kernels. Nothing here is measured.

  tools/estimate_hip.py BUILD                 print the tables
  tools/estimate_hip.py BUILD PAGE.md         write them between the lines <!-- NAME --> and <!-- end of NAME --> of a page
  tools/estimate_hip.py --check BUILD PAGE.md compare them with the page. Exit status 1: they differ; 77: the build has no code
                                              for AMD GPUs, or another release of clang made it than the one in the page

A step is one iteration of the loop that has the MFMA instructions. Each instruction of the loop counts once.
"""
import pathlib
import re
import subprocess
import sys
import tempfile

COMPUTE_UNITS, CLOCK, BANDWIDTH = 304, 2.1e9, 5.3e12  # AMD's data sheet of MI300X: peak clock, peak bandwidth of HBM3
LDS_BYTES_PER_CYCLE = 128  # of a compute unit
LANES, SIMDS = 64, 4
# Cycles and operations of an instruction: AMD's matrix instruction calculator, CDNA3.
MFMA = {
    "v_mfma_f32_32x32x8_f16": (32, 2 * 32 * 32 * 8),
    "v_mfma_f32_32x32x8_bf16": (32, 2 * 32 * 32 * 8),
    "v_mfma_f32_16x16x16_f16": (16, 2 * 16 * 16 * 16),
    "v_mfma_f32_16x16x16_bf16": (16, 2 * 16 * 16 * 16),
}
# file, kernels, waves of a block
KERNELS = [
    ("causal_conv1d_dense_mfma", ["causal_conv1d_dense_fwd_mma_bf16", "causal_conv1d_dense_dx_mma_bf16",
                                  "causal_conv1d_dense_dweight_mma_bf16"], 4),
    ("causal_conv1d_fwd_im2col_mfma", ["causal_conv1d_fwd_im2col_f16", "causal_conv1d_fwd_im2col_f16_k8"], 4),
]
# Rows of the table of registers: words, kernels. A kernel belongs to the first row that fits.
FAMILIES = [
    ("dropout forward, rows at multiples of 16 bytes", r"dropout_fwd_rows_cdna_\w{2,4}"),
    ("dropout forward, other contiguous rows", r"dropout_fwd_rows_cdna_\w+_shifted"),
    ("dropout forward, other strides", r"dropout_fwd_rows_cdna_\w+_strided"),
    ("dropout backward, rows at multiples of 16 bytes", r"dropout_bwd_rows_cdna_(f32|f16|bf16)(_active)?"),
    ("dropout backward, other contiguous rows", r"dropout_bwd_rows_cdna_\w+_shifted(_active)?"),
    ("dropout backward, other strides", r"dropout_bwd_rows_cdna_\w+_strided(_active)?"),
    ("causal_conv1d forward, contiguous time", r"causal_conv1d_fwd_channel_first_(f32|f16|bf16)"),
    ("causal_conv1d forward, contiguous time, general", r"causal_conv1d_fwd_channel_first_\w+_general"),
    ("causal_conv1d forward, contiguous channels", r"causal_conv1d_fwd_channel_last_(f32|f16|bf16)"),
    ("causal_conv1d forward, contiguous channels, general", r"causal_conv1d_fwd_channel_last_\w+_general"),
    ("causal_conv1d backward, contiguous time", r"causal_conv1d_bwd_channel_first_\w+"),
    ("causal_conv1d backward, contiguous channels", r"causal_conv1d_bwd_channel_last_(f32|f16|bf16)"),
    ("causal_conv1d backward, contiguous channels, general", r"causal_conv1d_bwd_channel_last_\w+_general"),
    ("causal_conv1d im2col, on MFMA", r"causal_conv1d_fwd_im2col_\w+"),
    ("causal_conv1d_dense, 16 bits, on MFMA", r"causal_conv1d_dense_\w+_mma_\w+"),
    ("causal_conv1d_dense, float32, on MFMA", r"causal_conv1d_dense_\w+_f32"),
    ("kernels of any strides, sums, states and packing", r".*"),
]
WIDTHS = [("b128", 16), ("dwordx4", 16), ("b64", 8), ("dwordx2", 8), ("b32", 4), ("dword", 4), ("b16", 2), ("u16", 2), ("ushort", 2)]


def fail(text):
    sys.exit(f"estimate_hip: {text}")


def width(mnemonic):
    size = next((bytes_ for part, bytes_ in WIDTHS if part in mnemonic), None)
    if size is None:
        fail(f"the width of {mnemonic} is not known")
    return size * (2 if "2_b" in mnemonic or "2st64" in mnemonic else 1)


def disassemble(bundle):
    """Returns {kernel: [(address, mnemonic, text)]} of the code object for gfx942."""
    with tempfile.NamedTemporaryFile() as code:
        common = ["clang-offload-bundler-19", "--type=o", f"--input={bundle}"]
        names = subprocess.run([*common, "--list"], check=True, capture_output=True, text=True).stdout.split()
        name = next(n for n in names if n.endswith("gfx942"))
        subprocess.run([*common, "--unbundle", f"--targets={name}", f"--output={code.name}"], check=True)
        text = subprocess.run(["llvm-objdump-19", "-d", "--no-show-raw-insn", code.name], check=True,
                              capture_output=True, text=True).stdout
    kernels, current = {}, None
    for line in text.splitlines():
        if match := re.match(r"[0-9a-f]+ <(.*)>:", line):
            current = kernels.setdefault(match[1], [])
        elif match := re.match(r"\t(\S+)(.*)// ([0-9A-F]+):", line):
            current.append((int(match[3], 16), match[1], match[2]))
    return kernels


def reach(start, edges):
    seen, stack = set(), [start]
    while stack:
        for to in edges.get(stack.pop(), ()):
            if to not in seen:
                seen.add(to)
                stack.append(to)
    return seen


def find_loop(code):
    """Returns the instructions that an MFMA instruction reaches and that reach it: its loop, in any order of the code."""
    after, before = {}, {}
    for n, (address, mnemonic, text) in enumerate(code):
        targets = [code[n + 1][0]] if n + 1 < len(code) and mnemonic not in ("s_branch", "s_endpgm") else []
        if mnemonic.startswith(("s_cbranch", "s_branch")):
            offset = int(text.split()[0])
            targets.append(address + 4 + 4 * (offset - 65536 if offset > 32767 else offset))
        for target in targets:
            after.setdefault(address, []).append(target)
            before.setdefault(target, []).append(address)
    for address, mnemonic, _ in code:
        if mnemonic in MFMA:
            loop = reach(address, after) & reach(address, before)
            if address in loop:
                return [i for i in code if i[0] in loop]
    fail("a kernel has no loop around its MFMA instructions")


def remarks(log, kernel):
    """Returns the remarks on a kernel for gfx942: those for gfx90a come first."""
    text = pathlib.Path(log).read_text().split(f"Function Name: {kernel} ")[-1].split("Function Name: ")[0]
    return {key: int(re.search(rf" {pattern}: (\d+)", text)[1]) for key, pattern in
            (("vector", "VGPRs"), ("accumulation", "AGPRs"), ("lds", r"LDS Size \[bytes/block\]"),
             ("waves", r"Occupancy \[waves/SIMD\]"), ("spills", "SGPRs Spill"))}


def registers(build):
    """The table of all kernels, by families."""
    collected = {words: [] for words, _ in FAMILIES}
    for log in sorted(pathlib.Path(build, "hip").glob("*.log")):
        for kernel in dict.fromkeys(re.findall(r"Function Name: (\S+)", log.read_text())):
            words = next(words for words, pattern in FAMILIES if re.fullmatch(pattern, kernel))
            collected[words].append(remarks(log, kernel))

    def of(key, members):
        values = sorted({member[key] for member in members})
        return str(values[0]) if len(values) == 1 else f"{values[0]} to {values[-1]}"
    lines = ["| kernels | number | vector registers | accumulation registers | LDS, bytes | waves per SIMD, of 8 | scalar registers that "
             "spill to vector registers |", "|---|--:|--:|--:|--:|--:|--:|"]
    return "\n".join(lines + [f"| {words} | {len(members)} | " + " | ".join(
        of(key, members) for key in ("vector", "accumulation", "lds", "waves", "spills")) + " |"
        for words, members in collected.items() if members])


def clang():
    return re.search(r"version (\S+)", subprocess.run(["clang-19", "--version"], capture_output=True, text=True).stdout)[1]


def estimate(build):
    peak = COMPUTE_UNITS * CLOCK * SIMDS * MFMA["v_mfma_f32_32x32x8_f16"][1] / MFMA["v_mfma_f32_32x32x8_f16"][0]
    lines = ["| kernel | registers, vector + accumulation | LDS, bytes | waves per SIMD | MFMA cycles of a step | LDS cycles "
             "of a step | bytes loaded in a step | bound of a step |", "|---|--:|--:|--:|--:|--:|--:|---|"]
    for stem, names, waves in KERNELS:
        bundle, log = f"{build}/hip/{stem}.hipfb", f"{build}/hip/{stem}.log"
        if not pathlib.Path(bundle).is_file() or not pathlib.Path(log).is_file():
            fail(f"{bundle} or its log is missing")
        code = disassemble(bundle)
        for name in names:
            loop, r = find_loop(code[name]), remarks(log, name)
            mfma = sum(MFMA[m][0] for _, m, _ in loop if m in MFMA) * waves // SIMDS
            lds = sum(LANES * width(m) for _, m, _ in loop if m.startswith(("ds_read", "ds_write"))) * waves
            loaded = sum(LANES * width(m) for _, m, _ in loop if m.startswith("global_load")) * waves
            cycles = lds / LDS_BYTES_PER_CYCLE
            bound = "MFMA" if mfma >= cycles else "LDS"
            lines.append(f"| `{name}` | {r['vector']} + {r['accumulation']} | {r['lds']} | {r['waves']} | {mfma} | "
                         f"{cycles:.0f} | {loaded} | {bound} |")
    tokens, channels, taps = 8 * 2048, 2048, 4
    dense = 2 * tokens * taps * channels * channels
    elements = 8 * 4096 * 4096
    lines += ["", f"Peak of the matrix cores for 16 bits: {peak / 1e12:.0f} TFLOP/s ({COMPUTE_UNITS} compute units, "
              f"{CLOCK / 1e9:.1f} GHz). Floors, which no kernel can beat:", "",
              "| call | floor | from |", "|---|--:|---|",
              f"| dense forward, {tokens} tokens, Din = Dout = {channels}, K = {taps}, bf16 | {1e6 * dense / peak:.0f} us | "
              "MFMA at the peak |",
              f"| causal_conv1d forward, B8 D4096 T4096 bf16 | {1e6 * 4 * elements / BANDWIDTH:.0f} us | 2 passes over memory at "
              f"{BANDWIDTH / 1e12:.1f} TB/s |",
              f"| causal_conv1d backward, the same | {1e6 * 6 * elements / BANDWIDTH:.0f} us | 3 passes |",
              f"| a step of im2col | {2048 * 4 / (BANDWIDTH / COMPUTE_UNITS / CLOCK):.0f} cycles | 2048 elements in and out, at "
              "the bandwidth of a compute unit |"]
    return "\n".join(lines)


def main():
    arguments = [argument for argument in sys.argv[1:] if argument != "--check"]
    check = len(arguments) < len(sys.argv) - 1
    if len(arguments) not in (1, 2) or (check and len(arguments) == 1):
        sys.exit(__doc__)
    page = pathlib.Path(arguments[1]) if len(arguments) == 2 else None
    if check and not list(pathlib.Path(arguments[0], "hip").glob("*.hipfb")):
        print(f"estimate_hip: not compared: {arguments[0]} has no code for AMD GPUs")
        sys.exit(77)
    version = f"Made by clang {clang()}."
    if check and version not in page.read_text():
        print(f"estimate_hip: not compared: {page} was not {version[0].lower()}{version[1:]}")
        sys.exit(77)
    tables = {"registers": f"{version}\n\n{registers(arguments[0])}", "estimates": estimate(arguments[0])}
    if page is None:
        print(*tables.values(), sep="\n\n")
        return
    text = page.read_text()
    for name, table in tables.items():
        text, count = re.subn(rf"(<!-- {name} -->\n).*?(<!-- end of {name} -->)", lambda m, table=table: f"{m[1]}{table}\n\n{m[2]}",
                              text, flags=re.S)
        if count != 1:
            fail(f"{page} has no line <!-- {name} -->")
    if check and text != page.read_text():
        fail(f"the tables of {page} differ from those of {arguments[0]}: run tools/estimate_hip.py {arguments[0]} {page}")
    if check:
        print(f"estimate_hip: the tables of {page} are those of {arguments[0]}")
    else:
        page.write_text(text)


main()
