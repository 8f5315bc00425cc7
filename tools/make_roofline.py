#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the rooflines of docs/plots from bench/results/*.json, through gnuplot: for each op and device

    docs/plots/DEVICE-OP-roofline.svg

which shows the kernels that dispatch takes, and the peers of tools/peers where they were measured, by operations a byte
and operations a second. The slope is the best copy of the same file's rows; the flat part is drawn where the rows have a rate
of matrix products.
"""
import pathlib
import subprocess
import sys

from make_tables import ROOT, newest_results, same_work

COLOURS = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377"]


def points(rows, peers):
    """{series: [(operations a byte, TFLOP/s)]}: ours by dtype, theirs by kernel."""
    ours = [row for row in rows if row["chosen"] and row["flops"] > 0]
    intensity = {same_work(row): (row["flops"], row["bytes"]) for row in ours}
    series = {}
    for row in ours:
        name = f"{row['direction']} {row['dtype']}"
        series.setdefault(name, []).append((row["flops"] / row["bytes"], row["tflops"]))
    for row in peers:
        if same_work(row) in intensity:
            flops, size = intensity[same_work(row)]
            series.setdefault(row["kernel"], []).append((flops / size, 1e-9 * flops / row["ms"]))
    return series


def draw(path, title, rows, peers):
    series = points(rows, peers)
    if not series:
        return False
    copy = max(row["ceiling"] for row in rows) * 1e-3 # TB/s
    products = max((row.get("product_ceiling", 0) for row in rows), default=0)
    roof = f"x * {copy:.6g}" if not products else f"(x * {copy:.6g} < {products:.6g} ? x * {copy:.6g} : {products:.6g})"
    least = min(x for values in series.values() for x, _ in values)
    most = max(x for values in series.values() for x, _ in values)
    script = ["set terminal svg size 1000,640 font 'sans,12' background '#ffffff'", f"set output '{path}.partial'",
              f'set title "{title}" noenhanced', "set logscale xy", "set grid", "set key outside right top noenhanced",
              "set xlabel 'operations a compulsory byte'", "set ylabel 'TFLOP/s'",
              f"set xrange [{least / 2:.6g}:{most * 2:.6g}]", "set samples 60"]
    plots = [f"{roof} with lines lw 2 lc rgb 'black' title 'copy {copy * 1e3:.0f} GB/s'"]
    for number, (name, values) in enumerate(series.items()):
        script += [f"$s{number} << END", *(f"{x:.6g} {y:.6g}" for x, y in values), "END"]
        plots.append(f"$s{number} using 1:2 with points pt {4 + number % 10} ps 1.1 "
                     f"lc rgb '{COLOURS[number % len(COLOURS)]}' title '{name}'")
    script.append("plot " + ", ".join(plots))
    subprocess.run(["gnuplot"], input="\n".join(script) + "\n", text=True, check=True)
    pathlib.Path(f"{path}.partial").rename(path)
    return True


def main():
    if sys.argv[1:]:
        sys.exit("usage: make_roofline.py")
    results, peers = newest_results(ROOT / "bench/results")
    directory = ROOT / "docs/plots"
    directory.mkdir(exist_ok=True)
    for (op, device), (source, rows) in sorted(results.items()):
        if "ceiling" not in rows[0]:
            continue
        short = pathlib.Path(source).stem.split("-", 3)[3].removesuffix("-" + op)
        path = directory / f"{short}-{op}-roofline.svg"
        title = f"{op}, {device}, commit {rows[0]['commit']}, {rows[0]['date']}"
        if draw(path, title, rows, peers.get((op, device), ("", []))[1]):
            print("roofline:", path.relative_to(ROOT))


if __name__ == "__main__":
    main()
