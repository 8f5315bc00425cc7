#!/usr/bin/env python3
"""Writes the tables of the READMEs from bench/results/*.json, so that no figure is typed.

A file holds the rows of `cotangent bench --json`; a README holds, for an op, the lines

    <!-- table: OP -->
    <!-- end -->

and gets between them the rows of the kernels that dispatch takes, from the newest file with rows of that op for each
device; beside them the times of the peers for the same cases, from the newest file whose name ends in -peers.json.
Where our kernel was timed in the peers' process (rows with "ours"), its figures are from there.
`make_tables.py --check` changes nothing and fails if a README is not what it would write; `make_tables.py --print OP` prints
OP's table, from DIR with --results DIR.
"""
import argparse
import json
import math
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
MARKERS = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)


def newest_results(directory):
    """Ours and the peers': {(op, device): (file, rows)}, of the last file by name, which begins with its date."""
    ours, peers = {}, {}
    for path in sorted(directory.glob("*.json")):
        results = peers if path.stem.endswith("-peers") else ours
        for row in json.loads(path.read_text()):
            if row.keys() & {"memory", "demo", "trained", "ncu"}:  # of `cotangent profile`, `cotangent demo`, train_lm, ncu
                continue
            key = row["op"], row["device"]
            if results.get(key, (None, []))[0] != path.name:
                results[key] = path.name, []
            results[key][1].append(row)
    return ours, peers


def same_work(row):
    """What a row of ours and of a peer must have in common. Dtypes of weights differ, a peer's dropout draws its mask, attention's
    order of sums is ours alone, and a peer's attention may have its rows as it likes them best."""
    if row["op"] == "attention":
        return row["direction"], row["dtype"], row["shape"], row["options"].removesuffix("+any-order")
    options = row["options"].removesuffix(" drawn")
    if row["op"].startswith("causal_conv1d"):
        options = "silu" in row["options"]
    return row["direction"], row["dtype"], row["layout"], row["shape"], options


def from_peers_run(row, peer_rows):
    """A row of bench with our kernel's figures from the peers' process, where it was timed there."""
    nondeterministic = "any-order" in row["options"]
    own = next((own for own in peer_rows if own.get("ours") and same_work(own) == same_work(row)
                and ("any-order" in own["options"]) == nondeterministic), None)
    if own is None:
        return row
    cycles = {"cycles16": row["cycles16"] * own["ms"] * own["threads"] / (row["ms"] * row["threads"])} if row["threads"] else {}
    return row | {key: own[key] for key in ("options", "ms", "bytes", "gbps", "ratio", "tflops") if key in own} | cycles


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


def attention_rate(row):
    """TFLOP/s as FlashAttention's papers count them: 4 B H Tq Tk d forward, 2.5 times that backward, half if causal."""
    B, H, Tq, Tk, d = map(int, re.fullmatch(r"B(\d+) H(\d+)/\d+ T(\d+)/(\d+) d(\d+)/\d+", row["shape"]).groups())
    flops = 4 * B * H * Tq * Tk * d * (2.5 if row["direction"] == "backward" else 1)
    return 1e-9 * flops / (2 if "causal" in row["options"] else 1) / row["ms"]


def is_entry(row):
    """Of FlashAttention-3's setting: no options but the mask and the order."""
    sizes = re.fullmatch(r"B(\d+) H(\d+)/(\d+) T(\d+)/(\d+) d(\d+)/(\d+)", row["shape"]).groups()
    B, H, Hkv, Tq, Tk, d, dv = map(int, sizes)
    return (row["dtype"] == "bf16" and row["options"] in ("full", "causal", "full+any-order", "causal+any-order")
            and H == Hkv and Tq == Tk and d == dv and B * Tq == 16384 and H * d == 2048)


def attention_features(rows):
    """A line for each row beyond the paper's setting, at its own rate: operations of visible pairs alone."""
    if not rows:
        return []
    return ["", "| direction | dtype | shape | options | ms | TFLOP/s of visible pairs |", "|---|---|---|---|--:|--:|"] + [
        f"| {row['direction']} | {row['dtype']} | {row['shape']} | {row['options']} | {row['ms']:.4f} | {row['tflops']:.0f} |"
        for row in rows
    ]


def attention_entries(rows, peer_rows):
    """A line for each head size, mask and kernel, a column for each length; of ours also the ratios to each peer. Then, apart,
    those of all entries of a direction."""
    def place(row):
        fields = re.fullmatch(r"B\d+ H\d+/\d+ T(\d+)/\d+ d(\d+)/\d+", row["shape"])
        return (row["direction"], int(fields[2]), "causal" if "causal" in row["options"] else "full"), int(fields[1])

    def grid(rows):
        cells = {}
        for row in rows:
            group, T = place(row)
            cells.setdefault(group, {})[T] = attention_rate(row)
        return cells

    def ordered(row):
        return row["direction"] == "backward" and "any-order" not in row["options"]

    ours = {"": grid(row for row in rows if row["direction"] != "backward"),
            "in order": grid(row for row in rows if ordered(row)),
            "in any order": grid(row for row in rows if "any-order" in row["options"])}
    theirs = {kernel: grid(row for row in peer_rows if row["kernel"] == kernel)
              for kernel in dict.fromkeys(row["kernel"] for row in peer_rows)}
    lengths = sorted({place(row)[1] for row in rows})
    lines = ["| direction | d | mask | kernel | " + " | ".join(f"T = {T}" for T in lengths)
             + " | geometric mean | T >= 2048 |", "|---|--:|---|---|" + "--:|" * (len(lengths) + 2)]

    def line(group, kernel, cells, digits):
        def mean(least):
            values = [value for T, value in cells.items() if T >= least]
            return f"{math.exp(sum(map(math.log, values)) / len(values)):.{digits}f}" if values else ""
        return (f"| {group[0]} | {group[1]} | {group[2]} | {kernel} | "
                + " | ".join(f"{cells[T]:.{digits}f}" if T in cells else "" for T in lengths)
                + f" | {mean(0)} | {mean(2048)} |")

    ratios = {}
    for group in dict.fromkeys(place(row)[0] for row in rows):
        for name, cells in ours.items():
            if group in cells:
                lines.append(line(group, f"cotangent, {name}" if name else "cotangent", cells[group], 0))
        for kernel, cells in theirs.items():
            if group in cells:
                lines.append(line(group, kernel, cells[group], 0))
        for kernel, cells in theirs.items():
            for name, own in ours.items():
                both = {T: own[group][T] / cells[group][T] for T in own.get(group, {}) if T in cells.get(group, {})}
                if both:
                    lines.append(line(group, f"{name or 'cotangent'} / {kernel}", both, 2))
                    ratios.setdefault((group[0], name or "cotangent", kernel), []).extend(both.values())
    summary = ["", "| direction | ratio | entries | geometric mean | least |", "|---|---|--:|--:|--:|"] if ratios else []
    for (direction, name, kernel), values in ratios.items():
        summary.append(f"| {direction} | {name} / {kernel} | {len(values)} "
                       f"| {math.exp(sum(map(math.log, values)) / len(values)):.2f} | {min(values):.2f} |")
    return lines, summary


def attention_tables(rows, peer_rows):
    """What dispatch takes, entry by entry; of the portable kernels, which it leaves to other devices, the ratios alone."""
    beside = [row for row in peer_rows if row.get("ours")]  # our kernels in the peers' process, in turns with them
    peer_rows = [row for row in peer_rows if not row.get("ours")]
    lines, summary = attention_entries([row for row in beside or rows if is_entry(row) and row["chosen"]], peer_rows)
    lines += summary + ["", "TFLOP/s, of 4 B H Tq Tk d forward and 2.5 times as many backward, half of them under a causal mask; "
                        "all kernels of a call counted. 16k tokens, H d = 2048."
                        + (" In turns in one process; from 4k tokens on under load, the second half of seconds of it each "
                           "(tools/peers/attention.py)." if beside else "")]
    portable = [row for row in rows if is_entry(row) and row["kernel"].endswith("_mma")]
    _, summary = attention_entries(portable, peer_rows)
    if summary:
        lines += ["", f"The portable kernels alone (commit {portable[0]['commit']}):", *summary]
    return lines + attention_features([row for row in rows if not is_entry(row) and row["chosen"]])


def rows_with(directory, key):
    """The rows of all files that have this key, in the order of the files' names: [(file, row)]."""
    return [(path.name, row) for path in sorted(directory.glob("*.json")) for row in json.loads(path.read_text()) if key in row]


def newest_with(directory, key, wanted=lambda row: True):
    """Those rows of the newest file of each device: {device: (file, rows)}."""
    newest = {}
    for source, row in rows_with(directory, key):
        if wanted(row):
            if newest.get(row["device"], ("", []))[0] != source:
                newest[row["device"]] = source, []
            newest[row["device"]][1].append(row)
    return newest


# What a document of docs/seeds.md is about.
SEEDS = {"seed_000": ("causal_conv1d", "backward"), "seed_001": ("attention", "backward"), "seed_002": ("dropout", "backward"),
         "seed_003": ("causal_conv1d", "forward"), "seed_004": ("mhc_pre", "backward")}


def seed_figures(number, directory):
    """A document's figures beside those of `cotangent demo` on each device, from the newest file of each."""
    newest = {device: (source, {row["figure"]: row for row in rows})
              for device, (source, rows) in newest_with(directory, "figure", lambda row: row["demo"] == number).items()}
    if not newest:
        return []
    figures = {name: row["document"] for _, rows in newest.values() for name, row in rows.items()}
    lines = ["| figure | the document | " + " | ".join(newest) + " |", "|---|---|" + "---|" * len(newest)]
    for name, document in figures.items():
        cells = [rows[name]["here"] if name in rows else "" for _, rows in newest.values()]
        lines.append(f"| {name} | {document} | " + " | ".join(cells) + " |")
    sources = [f"{device}: commit {next(iter(rows.values()))['commit']}, {next(iter(rows.values()))['date']} "
               f"(`bench/results/{source}`)" for device, (source, rows) in newest.items()]
    return lines + ["", "; ".join(sources) + ".", ""]


def seed_bench(op, direction, results):
    """What GPUs reach in the same direction."""
    lines = []
    for (name, device), (source, rows) in sorted(results.items()):
        rows = [row for row in rows if name == op and row["backend"] == "cuda" and row["direction"] == direction and row["chosen"]]
        if not rows:
            continue
        lines += [f"{device}, commit {rows[0]['commit']}, {rows[0]['date']} (`bench/results/{source}`):", "",
                  "| dtype | layout | shape | options | us | TB/s | of copy |", "|---|---|---|---|--:|--:|--:|"]
        lines += [f"| {row['dtype']} | {row['layout']} | {row['shape']} | {row['options']} | {1e3 * row['ms']:.1f} "
                  f"| {1e-3 * row['gbps']:.2f} | {row['ratio']:.2f} |" for row in rows]
        lines += [""]
    return lines


def seed_shares(op, direction, directory):
    """Where the time goes from the host's memory and back, beside the document's 70 % copies, 20 % allocation, 10 % kernels."""
    parts = ("allocation_ms", "to_device_ms", "kernels_ms", "to_host_ms")
    rows = [row for _, row in rows_with(directory, "memory")
            if (row["op"], row["direction"], row["streams"]) == (op, direction, 1)]
    lines = ["| shape, dtype | device | memory | batch | ms | allocation | to the device | kernels | to the host |",
             "|---|---|---|---|--:|--:|--:|--:|--:|"] if rows else []
    for row in rows:
        shares = " | ".join(f"{100 * row[part] / row['total_ms']:.0f} %" for part in parts)
        lines.append(f"| {row['shape']}, {row['dtype']} | {row['device']} | {row['memory']} | {row['batch']} "
                     f"| {row['total_ms']:.3f} | {shares} |")
    note = ("`cotangent profile`, one stream; the document has about 70 % for copies both ways, 20 % for allocation, 10 % for "
            "kernels. What these do not sum up to is the time between them.")
    return lines + (["", note, ""] if rows else [])


def shared_memory(directory):
    """Static and dynamic shared memory of the kernels that `cotangent profile` saw."""
    launches = {}
    for _, row in rows_with(directory, "memory"):
        for launch in row["launches"]:
            launches[launch["name"]] = launch
    return ["| kernel | static, bytes | dynamic, bytes |", "|---|--:|--:|"] + [
        f"| {name} | {launch['static_shared']} | {launch['dynamic_shared']} |" for name, launch in sorted(launches.items())
    ] + [""]


def seed_table(name, results, directory):
    if name == "shared_memory":
        return "\n".join(shared_memory(directory))
    lines = seed_figures(name.removeprefix("seed_"), directory) + seed_bench(*SEEDS[name], results)
    if name == "seed_003":
        lines += seed_shares(*SEEDS[name], directory)
    return "\n".join(lines) + "\n" if lines else "Nothing measured yet.\n"


def trained(directory):
    """The validation losses of train_lm's architectures, from the newest file of each device."""
    lines = []
    for device, (source, rows) in newest_with(directory, "trained").items():
        seeds = sorted({row["seed"] for row in rows})
        lines += [f"{device}, {rows[0]['date']}, {rows[0]['tokens']} tokens each (`bench/results/{source}`):", "",
                  "| architecture | parameters | " + " | ".join(f"seed {seed}" for seed in seeds) + " | mean | bits/byte |",
                  "|---|--:|" + "--:|" * (len(seeds) + 2)]
        for name in dict.fromkeys(row["trained"] for row in rows):
            losses = {row["seed"]: row["validation"] for row in rows if row["trained"] == name}
            mean = sum(losses.values()) / len(losses)
            parameters = next(row["parameters"] for row in rows if row["trained"] == name)
            lines.append(f"| {name} | {parameters} | " + " | ".join(f"{losses[seed]:.4f}" for seed in seeds)
                         + f" | {mean:.4f} | {mean / math.log(2):.4f} |")
        lines += [f"| byte bigrams | |{' |' * len(seeds)} {rows[0]['bigram']:.4f} | {rows[0]['bigram'] / math.log(2):.4f} |", ""]
    return "\n".join(lines) + "\n" if lines else "Nothing measured yet.\n"


def profiled(op, directory):
    """What Nsight Compute saw of an op's kernels, from the newest file of each device."""
    lines = []
    for device, (source, rows) in newest_with(directory, "ncu", lambda row: row["case"].startswith(op + " ")).items():
        lines += [f"{device}, commit {rows[0]['commit']}, {rows[0]['date']} (`bench/results/{source}`):", "",
                  "| case | kernel | us | cycles | busiest pipe | instruction issue | first-level cache and shared memory "
                  "| second-level cache | its hits | memory | registers | warps |", "|---|---|" + "--:|" * 10]
        lines += [f"| {row['case']} | {row['ncu']} | {row['us']:.1f} | {row['cycles']:.0f} | {row['busiest_pipe']:.0f} % "
                  f"| {row['issue_slots']:.0f} % | {row['l1']:.0f} % | {row['l2']:.0f} % | {row['l2_hits']:.0f} % "
                  f"| {row['dram']:.0f} % | {row['registers']:.0f} | {row['warps']:.1f} |" for row in rows]
        lines += [""]
    return "\n".join(lines) + "\n" if lines else "Nothing measured yet.\n"


# A case of each op for the front page, on a GPU and on a CPU: dtype, shape, and words of the options.
FRONT = {
    "causal_conv1d": (("bf16", "B8 D4096 T4096 K4", "silu"), ("f32", "B8 D2048 T8192 K4", "silu")),
    "causal_conv1d_dense": (("bf16", "B4 Din2048 Dout2048 T4096 K4", "silu"), ("f32", "B2 Din512 Dout512 T2048 K4", "silu")),
    "dropout": (("bf16", "R32768 D4096", "none+bias p=0.1 drawn"), ("f32", "R32768 D4096", "none+bias p=0.1 drawn")),
    "mhc_pre": (("bf16", "B1 T8192 n4 D4096", "phi~1/nD"), ("f32", "B1 T16384 n4 D1024", "phi~1/nD")),
    "mhc_post": (("bf16", "B1 T8192 n4 D4096", ""), ("f32", "B1 T16384 n4 D1024", "")),
    "attention": (("bf16", "B2 H16/16 T8192/8192 d128/128", "causal"), ("bf16", "B1 H8/8 T2048/2048 d128/128", "causal")),
}


def front(results, peers):
    """What each op reaches on each device, beside the best of the peers that were timed there."""
    lines = []
    for device in sorted({device for _, device in results}, key=lambda name: ("NVIDIA" not in name, name)):
        rows = []
        for op, cases in FRONT.items():
            source, all_rows = results.get((op, device), ("", []))
            if not all_rows:
                continue
            dtype, shape, words = cases[all_rows[0]["backend"] == "cpu"]
            seen = set()
            for row in all_rows:
                key = row["direction"], row["layout"], "any-order" in row["options"]
                plain = row["options"].replace("+residual", "").removesuffix("+any-order")
                if (row["chosen"] and (row["dtype"], row["shape"]) == (dtype, shape) and key not in seen
                        and (plain == words if op == "attention" else words in plain)):
                    seen.add(key)
                    rows.append(row)
        if not rows:
            continue
        lines += [f"{device}:", "", "| op | direction | case | ms | reaches | beside the best peer |", "|---|---|---|--:|--:|---|"]
        for row in rows:
            peer_rows = peers.get((row["op"], device), ("", []))[1]
            row.update(from_peers_run(row, peer_rows))
            theirs = [peer for peer in peer_rows if not peer.get("ours") and same_work(peer) == same_work(row)]
            best = min(theirs, key=lambda peer: peer["ms"], default=None)
            products = row["op"] in ("attention", "causal_conv1d_dense")
            lines.append(f"| {row['op']} | {row['direction']} | {row['dtype']} {row['layout']} {row['shape']}, {row['options']} "
                         f"| {row['ms']:.3f} | " + (f"{row['tflops']:.3g} TFLOP/s" if products else f"{row['ratio']:.2f} of copy")
                         + (f" | {best['ms'] / row['ms']:.2f} times as fast as {best['kernel']} |" if best else " | |"))
        lines += [""]
    return "\n".join(lines) + "\n" if lines else "Nothing measured yet.\n"


def table(op, results, peers, directory):
    if op == "front":
        return front(results, peers)
    if op.endswith("_ncu"):
        return profiled(op.removesuffix("_ncu"), directory)
    if op == "train_lm":
        return trained(directory)
    if op in SEEDS or op == "shared_memory":
        return seed_table(op, results, directory)
    lines = []
    for (name, device), (source, rows) in sorted(results.items()):
        if name != op:
            continue
        if op == "mhc_accuracy":
            lines += accuracy(device, source, rows)
            continue
        all_rows, rows = rows, [row for row in rows if row["chosen"]]
        first = rows[0]
        cuda = first["backend"] == "cuda"
        if cuda and op == "attention":
            peer_source, peer_rows = peers.get((name, device), ("", []))
            commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
            lines += [f"{device}, commit {commits}, {first['date']} (`bench/results/{source}`"
                      + (f", peers `bench/results/{peer_source}`" if peer_rows else "") + "):", "",
                      *attention_tables(all_rows, peer_rows), ""]
            continue
        host = "" if cuda else f"{first['threads']} threads, clock {first['clock_ghz']:.2f} GHz, "
        # Where matrix products are what there is to do, a row has their rate beside its own.
        products = any("product_ceiling" in row for row in rows)
        peer_source, peer_rows = peers.get((name, device), ("", []))
        rows = [from_peers_run(row, peer_rows) for row in rows]
        interleaved = any(row.get("ours") for row in peer_rows)
        theirs = {(row["kernel"], same_work(row)): row["ms"] for row in peer_rows if not row.get("ours")}
        kernels = [kernel for kernel in dict.fromkeys(kernel for kernel, _ in theirs)
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
                + "".join(f" {theirs[key]:.{4 if cuda else 3}f} |" if (key := (kernel, same_work(row))) in theirs else " |"
                          for kernel in kernels))
        lines += [
            "",
            "MB are compulsory bytes: each input read once, each output written once. \"Of copy\": GB/s over the best "
            "copy of as many bytes in the same run. \"Cycles / 16\": core cycles, summed over the threads, for 16 "
            "elements of x."
            + (" \"Of products\": over matrix products of the same dtype from the first-level cache in the same run."
               if products else "")
            + (f" The last columns: peers on the same device and cases (`bench/results/{peer_source}`)"
               + ("." if op == "attention" or op.startswith("mhc") else ", with weights of x's dtype.")
               + (" Where there are peers, all kernels of a row ran interleaved in one process (tools/peers/protocol.py)."
                  if interleaved else "") if kernels else ""),
            "",
        ]
    return "\n".join(lines) + "\n" if lines else "Nothing measured yet.\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, and fail if a README is stale")
    parser.add_argument("--print", metavar="OP", help="print the table of OP")
    parser.add_argument("--results", metavar="DIR", type=pathlib.Path, default=ROOT / "bench/results")
    options = parser.parse_args()
    check = options.check
    results, peers = newest_results(options.results)
    if options.print:
        print(table(options.print, results, peers, options.results))
        return
    stale = []
    for path in [ROOT / "README.md", ROOT / "docs/seeds.md", ROOT / "examples/train_lm/README.md",
                 *sorted(ROOT.glob("src/ops/*/README.md"))]:
        old = path.read_text()
        new = MARKERS.sub(lambda m: m[1] + table(m[2], results, peers, options.results) + m[3], old)
        if new != old:
            stale.append(str(path.relative_to(ROOT)))
            if not check:
                path.write_text(new)
    if check and stale:
        sys.exit("not generated by tools/make_tables.py: " + ", ".join(stale))
    print("tables:", ", ".join(stale) if stale else "up to date")


if __name__ == "__main__":
    main()
