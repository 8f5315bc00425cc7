#!/usr/bin/env python3
"""Writes the tables of the READMEs from bench/results/*.json, so that no figure is typed.

A file holds the rows of `cotangent bench --json`; a README holds, for an op, the lines

    <!-- table: OP -->
    <!-- end -->

and gets between them the rows of the kernels that dispatch takes, from the newest file with rows of that op for each
device; beside them the times of the peers for the same cases, from the newest file whose name ends in -peers.json.
`make_tables.py --check` changes nothing and fails if a README is not what it would write.
"""
import json
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MARKERS = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)


def newest_results():
    """Ours and the peers': {(op, device): (file, rows)}, of the last file by name, which begins with its date."""
    ours, peers = {}, {}
    for path in sorted((ROOT / "bench/results").glob("*.json")):
        results = peers if path.stem.endswith("-peers") else ours
        for row in json.loads(path.read_text()):
            if "memory" in row: # of `cotangent profile`, which draws them itself
                continue
            key = row["op"], row["device"]
            if results.get(key, (None, []))[0] != path.name:
                results[key] = path.name, []
            results[key][1].append(row)
    return ours, peers


def same_work(row):
    """What a row of ours and of a peer must have in common; dtypes of weights differ."""
    return row["direction"], row["dtype"], row["layout"], row["shape"], "silu" in row["options"]


def accuracy(device, source, rows):
    """Of test_mhc_accuracy's rows."""
    lines = [f"{device}, {rows[0]['date']} (`bench/results/{source}`):"]
    for shape in dict.fromkeys(row["shape"] for row in rows):
        lines += [
            "", f"{shape}:", "",
            "| output | elements | largest | max error | mean error | > 1.0 | < 0.1 | rms error, units of the dtype "
            "| rms error, relative |", "|---|--:|--:|--:|--:|--:|--:|--:|--:|"
        ]
        for row in rows:
            if row["shape"] != shape:
                continue
            if "max" in row:
                lines.append(f"| {row['output']} | {row['elements']} | {row['largest']:.3g} | {row['max']:.2g} "
                             f"| {row['mean']:.2g} | {row['above']} | {row['below']} | {row['rms_ulp']:.3g} "
                             f"| {row['relative']:.2g} |")
            else:
                lines.append(f"| {row['output']} | {row['elements']} | | | | | | | {row['relative']:.2g} |")
    return lines + [""]


def table(op, results, peers):
    lines = []
    for (name, device), (source, rows) in sorted(results.items()):
        if name != op:
            continue
        if op == "mhc_accuracy":
            lines += accuracy(device, source, rows)
            continue
        rows = [row for row in rows if row["chosen"]]
        first = rows[0]
        cuda = first["backend"] == "cuda"
        host = "" if cuda else f"{first['threads']} threads, clock {first['clock_ghz']:.2f} GHz, "
        # Where matrix products are what there is to do, a row has their rate beside its own.
        products = any("product_ceiling" in row for row in rows)
        peer_source, peer_rows = peers.get((name, device), ("", []))
        theirs = {(row["kernel"], same_work(row)): row["ms"] for row in peer_rows}
        kernels = [kernel for kernel in dict.fromkeys(row["kernel"] for row in peer_rows)
                   if any((kernel, same_work(row)) in theirs for row in rows)]
        lines += [
            f"{device}, {host}commit {first['commit']}, {first['date']} (`bench/results/{source}`):",
            "",
            "| direction | dtype | layout | shape | options | MB | ms | GB/s | of copy |" + ("" if cuda else " cycles / 16 |")
            + (" TFLOP/s | of products |" if products else "") + "".join(f" {kernel}, ms |" for kernel in kernels),
            "|---|---|---|---|---|--:|--:|--:|--:|" + ("" if cuda else "--:|") + ("--:|--:|" if products else "")
            + "--:|" * len(kernels),
        ]
        for row in rows:
            lines.append(
                f"| {row['direction']} | {row['dtype']} | {row['layout']} | {row['shape']} | {row['options']} "
                f"| {row['bytes'] / 1e6:.1f} | {row['ms']:.{4 if cuda else 3}f} | {row['gbps']:.1f} "
                f"| {row['ratio']:.2f} |" + ("" if cuda else f" {row['cycles16']:.1f} |")
                + (f" {row['tflops']:.3f} | {row['product_ratio']:.2f} |" if "product_ratio" in row
                   else " | |" if products else "")
                + "".join(f" {theirs[key]:.4f} |" if (key := (kernel, same_work(row))) in theirs else " |"
                          for kernel in kernels))
        lines += [
            "",
            "MB are compulsory bytes: each input read once, each output written once. \"Of copy\": GB/s over the best "
            "copy of as many bytes in the same run. \"Cycles / 16\": core cycles, summed over the threads, for 16 "
            "elements of x."
            + (" \"Of products\": over matrix products of the same dtype from the first-level cache in the same run."
               if products else "")
            + (f" The last columns: peers on the same device and cases (`bench/results/{peer_source}`), with weights of x's dtype."
               if kernels else ""),
            "",
        ]
    return "\n".join(lines) + "\n" if lines else "Nothing measured yet.\n"


def main():
    check = sys.argv[1:] == ["--check"]
    if sys.argv[1:] and not check:
        sys.exit("usage: make_tables.py [--check]")
    results, peers = newest_results()
    stale = []
    for path in [ROOT / "README.md", *sorted(ROOT.glob("src/ops/*/README.md"))]:
        old = path.read_text()
        new = MARKERS.sub(lambda m: m[1] + table(m[2], results, peers) + m[3], old)
        if new != old:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(new)
    if check and stale:
        sys.exit("not generated by tools/make_tables.py: " + ", ".join(stale))
    print("tables:", ", ".join(stale) if stale else "up to date")


if __name__ == "__main__":
    main()
