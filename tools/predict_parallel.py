#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Predicts the time of attention over several GPUs, from times of single calls on one GPU.

    tools/predict_parallel.py        prints the tables that docs/benchmarks/parallel.md has under "Prediction"

Causal attention in bf16 with H heads of d = 128, batch 1, T rows in all, n = T / N rows on each of N ranks.

Ring, zigzag cut. Step 0 is a causal call on the rank's own n rows. Every other step is one call without a mask: n queries on n/2
keys, or n/2 queries on n keys. The transfer of step s+1 runs during the arithmetic of step s, so that a step takes the larger of
the two. The first and the last transfer of the backward have no arithmetic beside them. A rank receives as many bytes as it
sends, in both directions of the link at once.

Heads (all-to-all). Each rank sends its rows, computes H/N heads of all T rows in one causal call, and sends the results back.
Nothing overlaps.

Memory: every pass over a tensor takes its bytes at the rate of a copy: merges of partial results (float32), sums of dk and dv,
packing of messages, conversion of results. A call of libcotangent also takes CALL seconds of launches, and a call of the group
AGREEMENT seconds, in which the ranks compare their arguments.

One GPU: the ranks of a local group share its arithmetic and its memory, so that their times add. A transfer is a copy in its
memory. The group has no comparison of arguments over a network.

Ideal: the time of the single call on one GPU, divided by N. Single calls and blocks run at the rates of RECORD: FLOP/s by T, at
the clock of short runs (turn_ms), interpolated between its lengths, and constant beyond them. A block of n x n/2 has the rate of
T = n/2."""
import json
import math
import pathlib

ROOT = pathlib.Path(__file__).resolve().parent.parent
RECORD = "2026-11-25-h200-attention.json"
H, D = 16, 128
LENGTHS = [32768, 65536, 131072, 262144, 524288, 1048576]
# (name, ranks, bytes/s in each direction, share of it that NCCL reaches, seconds of a message)
SYSTEMS = [("2 GPUs, NVLink", 2, 450e9, 0.8, 10e-6), ("4 GPUs, NVLink", 4, 450e9, 0.8, 10e-6), ("8 GPUs, NVLink", 8, 450e9, 0.8, 10e-6),
           ("16 machines with one GPU each, 400 Gb/s", 16, 50e9, 0.9, 20e-6)]  # fmt: skip
CALL, AGREEMENT = 15e-6, 100e-6
HALF, SINGLE = 2, 4  # bytes of bf16 and float32


class Rates:
    """What one GPU reaches: rate(direction, mask, T) in FLOP/s, and bytes/s of a copy."""

    def __init__(self):
        rows = json.loads((ROOT / "bench/results" / RECORD).read_text())
        self.rates, self.copy = {}, 0.0
        for row in rows:
            if row["dtype"] != "bf16" or not row["chosen"] or row["options"] not in ("full", "causal"):
                continue
            _, heads, length, size = row["shape"].split()
            if heads != f"H{H}/{H}" or size != f"d{D}/{D}":
                continue
            T = int(length.split("/")[1])
            self.rates.setdefault((row["direction"], row["options"]), {})[T] = row["flops"] / (1e-3 * row["turn_ms"])
            self.copy = 1e9 * row["ceiling"]

    def rate(self, direction, mask, T):
        table = sorted(self.rates[direction, mask].items())
        T = min(max(T, table[0][0]), table[-1][0])
        for (low, slow), (high, fast) in zip(table, table[1:]):
            if low <= T <= high:
                return slow + (fast - slow) * math.log(T / low) / math.log(high / low)
        raise ValueError(T)


def seconds_of(rates, direction, mask, pairs, T, heads=H):
    return pairs * heads * D * (4 if direction == "forward" else 10) / rates.rate(direction, mask, T)


def single(rates, direction, T, heads=H):
    return seconds_of(rates, direction, "causal", T * (T + 1) / 2, T, heads)


def ring(rates, direction, T, ranks, link, message, agreement=AGREEMENT):
    n, rates_copy = T / ranks, rates.copy
    row = H * D  # elements of a row of q, k, v or out
    keys = 2 * n * row * HALF / link + message
    parts = 2 * n * row * SINGLE / link + message
    pack = 2 * 2 * n * row * HALF / rates_copy  # keys and values into one message: read and write
    total = agreement + pack
    for s in range(ranks):
        if s == 0:
            work = single(rates, direction, n) + CALL
        else:
            work = seconds_of(rates, direction, "full", n * n / 2, n / 2) + CALL
        travels = keys if s + 1 < ranks else 0
        if direction == "forward":
            work += 3 * n * row * SINGLE / rates_copy if s > 0 else 0  # merge
        else:
            work += 2 * n * row * SINGLE / rates_copy  # dq is read and written once more
            work += 5 * 2 * n * row * SINGLE / rates_copy if s > 0 else 0  # parts: cleared, read and written, added
            travels += parts if s > 1 else 0  # those of the step before
        total += max(work, travels)
    if direction == "forward":
        return total + n * row * (SINGLE + SINGLE + HALF) / rates_copy  # cleared; rounded at the end
    return total + parts + 3 * n * row * (SINGLE + SINGLE + HALF) / rates_copy


def heads(rates, direction, T, ranks, link, message):
    n, row = T / ranks, H * D
    there, back = (3, 1) if direction == "forward" else (4, 3)
    sizes = (there * HALF, back * (HALF if direction == "forward" else SINGLE))
    moved = sum(sizes) * n * row
    exchange = moved * (ranks - 1) / ranks / link + 2 * (ranks - 1) * message
    memory = 4 * moved / rates.copy  # packed and unpacked: read and write
    return AGREEMENT + CALL + exchange + memory + single(rates, direction, T, H / ranks)


def local(rates, direction, T, ranks):
    """The ring of ranks that share one GPU."""
    n, row = T / ranks, H * D
    work = ring(rates, direction, T, ranks, math.inf, 0, 0)
    copies = (ranks - 1) * 2 * 2 * n * row * HALF  # keys and values: read and write
    if direction == "backward":
        copies += (ranks - 1) * 2 * 2 * n * row * SINGLE
    return ranks * (work + copies / rates.copy)


def tables():
    """Lines of Markdown."""
    rates = Rates()
    lines = [
        f"By [predict_parallel.py](../../tools/predict_parallel.py) from the times of single calls in "
        f"[{RECORD}](../../bench/results/{RECORD}). The tables above have runs on two and four GPUs; no run on eight exists yet. The first lines of the tool state the model. Causal, "
        f"bf16, {H} heads of {D}. Each cell is the share of ideal: forward, then forward and backward.", "",
        "| system | engine | " + " | ".join(f"T = {T // 1024}k" for T in LENGTHS) + " |", "|---|---|" + "---|" * len(LENGTHS),
    ]  # fmt: skip
    for name, ranks, bandwidth, reached, message in SYSTEMS:
        for engine, model in (("ring, zigzag", ring), ("heads", heads)):
            cells = []
            for T in LENGTHS:
                group = [model(rates, direction, T, ranks, bandwidth * reached, message) for direction in ("forward", "backward")]
                ideal = [single(rates, direction, T) / ranks for direction in ("forward", "backward")]
                cells.append(f"{ideal[0] / group[0]:.2f}, {sum(ideal) / sum(group):.2f}")
            lines.append(f"| {name} | {engine} | " + " | ".join(cells) + " |")
    lines += ["", "Ranks that share one GPU, ring, zigzag: the time of the group divided by that of the single call, forward and backward.", "",
              "| ranks | T = 32k | T = 128k |", "|--:|--:|--:|"]  # fmt: skip
    for ranks in (2, 4, 8):
        cells = []
        for T in (32768, 131072):
            group, alone = (sum(time(direction) for direction in ("forward", "backward")) for time in (
                lambda direction: local(rates, direction, T, ranks), lambda direction: single(rates, direction, T)))  # noqa: B023
            cells.append(f"{group / alone:.2f}")
        lines.append(f"| {ranks} | " + " | ".join(cells) + " |")
    assumed = [f"- {name}: {1e-9 * bandwidth:.0f} GB/s each way, {100 * reached:.0f} % of it, {1e6 * message:.0f} us a message"
               for name, _, bandwidth, reached, message in SYSTEMS]  # fmt: skip
    return [*lines, "", "Assumed:", "", *assumed, f"- all: {1e6 * CALL:.0f} us of launches a call of libcotangent, and "
            f"{1e6 * AGREEMENT:.0f} us for the comparison of arguments", ""]  # fmt: skip


if __name__ == "__main__":
    print("\n".join(tables()))
