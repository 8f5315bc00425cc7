#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the benchmark pages and the tables of other pages from bench/results/*.json, so that nobody types a figure.

    tools/make_tables.py [--check] [--results DIR]
    tools/make_tables.py --print NAME [--results DIR]

docs/benchmarks/*.md are written as a whole: the newest record of each device and op, and the peers' newest record
(*-peers.json). README.md, some pages of the guide, docs/original_specifications.md and examples/train_lm/README.md get tables between the lines

    <!-- table: NAME -->
    <!-- end -->

--check changes nothing and fails if a file is stale. --print prints a page (an op's name) or a table. tools/make_charts.py
draws the pictures of the pages.
"""
import argparse
import json
import math
import pathlib
import re
import sys

import predict_parallel

ROOT = pathlib.Path(__file__).resolve().parent.parent
OPS = re.findall(r"^COT_OP_ENTRY\((\w+)\)", (ROOT / "src/ops/ops.def").read_text(), flags=re.M)
MARKERS = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.S)


# Words of records up to 2026-11-25, and what bench writes since then.
RENAMED = {r"\bany-order\b": "nondeterministic", r"\bdrawn\b": "generated", r"\bR=(\d+)": r"iterations=\1",
           "all-gather of K and V": "all-gather by hand"}


def records(path):
    """The rows of a file of bench/results, with today's words."""
    rows = json.loads(path.read_text())
    for row in rows:
        for key in row.keys() & {"options", "case", "figure", "kernel"}:
            for old, new in RENAMED.items():
                row[key] = re.sub(old, new, row[key])
    return rows


def newest_results(directory):
    """Ours and the peers': {(op, device): (file, rows)}, of the last file by name, which begins with its date."""
    ours, peers = {}, {}
    for path in sorted(directory.glob("*.json")):
        results = peers if path.stem.endswith("-peers") else ours
        for row in records(path):
            if row.keys() & {"memory", "demo", "trained", "ncu"}:  # of `cotangent profile`, `cotangent demo`, train_lm, ncu
                continue
            key = row["op"], row["device"]
            if results.get(key, (None, []))[0] != path.name:
                results[key] = path.name, []
            results[key][1].append(row)
    return ours, peers


def same_work(row):
    """What a row of ours and of a peer must have in common. Dtypes of weights differ, a peer's dropout generates its mask, only our
    attention names an order of sums, and a peer's attention may have any layout."""
    if row["op"] == "attention":
        return row["direction"], row["dtype"], row["shape"], row["options"].removesuffix("+nondeterministic")
    options = row["options"].removesuffix(" generated")
    if row["op"].startswith("causal_conv1d"):
        options = "silu" in row["options"]
    return row["direction"], row["dtype"], row["layout"], row["shape"], options


def from_peers_run(row, peer_rows):
    """A row of bench with our kernel's figures from the peers' process, where it was timed there."""
    nondeterministic = "nondeterministic" in row["options"]
    own = next((own for own in peer_rows if own.get("ours") and same_work(own) == same_work(row)
                and ("nondeterministic" in own["options"]) == nondeterministic), None)
    if own is None:
        return row
    cycles = {"cycles16": row["cycles16"] * own["ms"] * own["threads"] / (row["ms"] * row["threads"])} if row["threads"] else {}
    return row | {key: own[key] for key in ("options", "ms", "bytes", "gbps", "ceiling", "ratio", "tflops") if key in own} | cycles


def attention_rate(row):
    """TFLOP/s as FlashAttention's papers count them: 4 B H Tq Tk d forward, 2.5 times that backward, half if causal."""
    B, H, Tq, Tk, d = map(int, re.fullmatch(r"B(\d+) H(\d+)/\d+ T(\d+)/(\d+) d(\d+)/\d+", row["shape"]).groups())
    flops = 4 * B * H * Tq * Tk * d * (2.5 if row["direction"] == "backward" else 1)
    return 1e-9 * flops / (2 if "causal" in row["options"] else 1) / row["ms"]


def is_entry(row):
    """Of FlashAttention-3's setting: no options but the mask and the order."""
    sizes = re.fullmatch(r"B(\d+) H(\d+)/(\d+) T(\d+)/(\d+) d(\d+)/(\d+)", row["shape"]).groups()
    B, H, Hkv, Tq, Tk, d, dv = map(int, sizes)
    return (row["dtype"] == "bf16" and row["options"] in ("full", "causal", "full+nondeterministic", "causal+nondeterministic")
            and H == Hkv and Tq == Tk and d == dv and B * Tq == 16384 and H * d == 2048)


def rows_with(directory, key):
    """The rows of all files that have this key, in the order of the files' names: [(file, row)]."""
    return [(path.name, row) for path in sorted(directory.glob("*.json")) for row in records(path) if key in row]


def newest_with(directory, key, wanted=lambda row: True):
    """Those rows of the newest file of each device: {device: (file, rows)}."""
    newest = {}
    for source, row in rows_with(directory, key):
        if wanted(row):
            if newest.get(row["device"], ("", []))[0] != source:
                newest[row["device"]] = source, []
            newest[row["device"]][1].append(row)
    return newest


# What a document of docs/original_specifications.md is about.
SEEDS = {"seed_000": ("causal_conv1d", "backward"), "seed_001": ("attention", "backward"), "seed_002": ("dropout", "backward"),
         "seed_003": ("causal_conv1d", "forward"), "seed_004": ("mhc_pre", "backward")}


def seed_figures(number, directory):
    """A document's figures and those of `cotangent demo` on each device, from the newest file of each."""
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
    """Where the time goes from the host's memory and back. The document has 70 % copies, 20 % allocation, 10 % kernels."""
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


# ---- the benchmark pages: tables


def short_name(kernel):
    """A peer's name without versions: "torch 2.11.0 compile, taps" is "torch.compile taps"."""
    name = re.sub(r" through .*| v?\d[\w.+]*", "", kernel)
    return re.sub(r"^torch compiled?\b", "torch.compile", name).replace(",", "")


def versioned(kernel):
    """A peer's name with the version as its makers write it: cuDNN's 91900 is 9.19.0."""
    return re.sub(r"\bcuDNN (\d{5,})\b", lambda m: f"cuDNN {int(m[1]) // 10000}.{int(m[1]) // 100 % 100}.{int(m[1]) % 100}", kernel)


def library_of(row):
    """Whose figures a row has, as the pages and pictures call it."""
    ours = row.get("ours") or "commit" in row
    return "cotangent" + (", nondeterministic" if "nondeterministic" in row["options"] else "") if ours else short_name(row["kernel"])


def figure(value):
    """Four digits, of which at most four behind the point."""
    return f"{value:.{min(4, max(0, 3 - math.floor(math.log10(value))))}f}" if value > 0 else "0"


def markdown(columns, rows):
    """A table of rows; columns: (title, function from a row to a cell). Columns without content are left out."""
    cells = [[cell(row) for _, cell in columns] for row in rows]
    kept = [index for index in range(len(columns)) if any(line[index] for line in cells)]
    marks = ["--:" if all(re.fullmatch(r"[-+\d.e]*( %| [†‡§¶#])?", line[index]) for line in cells) else "---" for index in kept]
    return ["| " + " | ".join(columns[index][0] for index in kept) + " |", "|" + "|".join(marks) + "|",
            *("| " + " | ".join(line[index] for index in kept) + " |" for line in cells), ""]


def column(title, key, form):
    return title, lambda row: format(row[key], form) if key in row else ""


def case_words(text):
    """A shape or options as the pages print them. Delta and merge have no keys and no head dimension of keys. No activation is
    not named beside other options."""
    return re.sub(r"T(\d+)/1 d1/(\d+)", r"T\1 dv\2", text).removesuffix("+nondeterministic").removeprefix("none+")


def short_commit(commit):
    """Seven digits, and the + of uncommitted changes."""
    return commit[:7] + "+" * commit.endswith("+")


def commit_column(rows):
    """For a table whose rows are of several commits; other tables name the commit above."""
    return [("commit", lambda row: short_commit(row["commit"]))] if len({row.get("commit") for row in rows}) > 1 else []


def case_columns(rows):
    """What tells the cases apart: a layout that all have is not printed."""
    keys = ["dtype", "layout", "shape", "options"]
    if len({row["layout"] for row in rows}) == 1:
        keys.remove("layout")
    return [(key, lambda row, key=key: case_words(row[key])) for key in keys]


def measured_note(rows):
    """When the rows of a table were measured, and of which commit or by which process."""
    def commits(date):
        ours = [row for row in rows if row["date"] == date and (row.get("ours") or "commit" in row)]
        known = sorted({short_commit(row["commit"]) for row in ours if "commit" in row})
        unknown = "of some rows not recorded" if known else "not recorded"
        partly = not known or any("commit" not in row for row in ours)
        return "commit " + ", ".join(known) + ("; " if known else "") * partly + unknown * partly

    dates = sorted({row["date"] for row in rows}, reverse=True)
    together = any(row.get("ours") for row in rows)
    if len(dates) == 1:
        return f"{dates[0]},{' in the process of the peers (tools/peers),' if together else ''} {commits(dates[0])}."
    parts = [f"Rows of {date}: {commits(date)}." for date in dates]
    return " ".join(["Measured in the process of the peers (tools/peers)."] * together + parts)


def origin(row):
    """The date of a row, and if it is ours the commit."""
    ours = row.get("ours") or "commit" in row
    return row["date"], (short_commit(row["commit"]) if "commit" in row else "not recorded") if ours else None


def origin_signs(rows):
    """For a table whose rows have several origins: {origin: footnote sign}, and the note. The most frequent origin of our rows of
    the newest date has no sign. Rows of peers share the sign of our rows of their date."""
    ours = [origin(row) for row in rows if origin(row)[1] is not None]
    newest = max(row["date"] for row in rows)
    order = sorted(dict.fromkeys(ours), key=lambda found: (found[0] != newest, -ours.count(found), found))
    if len(order) < 2 or order[0][0] != newest:
        return {}, measured_note(rows)
    signs = {found: sign for found, sign in zip(order, ["", "†", "‡", "§", "¶", "#"])}
    for date in {row["date"] for row in rows} - {newest}:
        signs[date, None] = next((signs[found] for found in order if found[0] == date), "")
    together = " in the process of the peers (tools/peers)," if any(row.get("ours") for row in rows) else ""
    parts = [f"{sign} {'' if date == newest else f'{date}, '}commit {commit}." for (date, commit), sign in signs.items() if sign and commit]
    head = f"{newest},{together} commit {order[0][1]}. A sign after a number marks another origin:"
    return signs, " ".join([head] + parts)


MS = ("ms", lambda row: figure(row["ms"]))
LOAD_COLUMNS = [("burst ms", lambda row: figure(row["burst_ms"]) if "burst_ms" in row else ""), column("SM MHz", "sm_mhz", ".0f"),
                column("W", "watts", ".0f"), column("pJ/FLOP", "pj_per_flop", ".2f")]
PRODUCT_BOUND = {"attention": ("forward", "backward"), "causal_conv1d_dense": ("forward", "backward")}


def is_portable(row):
    """Whether a kernel for every GPU ran, and no Hopper kernel."""
    return "_sm80" in row["kernel"]


def product_bound(row):
    return row["direction"] in PRODUCT_BOUND.get(row["op"], ())


SLOW_COPY = 1.1  # a call cannot be this much faster than a copy of its minimum traffic


def case_table(rows):
    """Cases of a direction: against matrix products where products bound the op, against the copy elsewhere."""
    columns = case_columns(rows)
    products = [("TFLOP/s", lambda row: figure(row["tflops"])), column("of products", "product_ratio", ".2f")]
    if product_bound(rows[0]):
        both = any("nondeterministic" in row["options"] for row in rows)  # else a call has only one mode

        def mode(row):
            nondeterministic = "nondeterministic" in row["options"]
            words = [("nondeterministic", nondeterministic), ("deterministic", both and not nondeterministic),
                     ("portable kernel", is_portable(row))]
            return ", ".join(word for word, holds in words if holds)
        order = [("mode", mode)]
        return markdown(columns + order + [MS] + products + LOAD_COLUMNS + commit_column(rows), rows)
    unit, scale = ("TB/s", 1e-3) if rows[0]["backend"] == "cuda" else ("GB/s", 1)
    columns += [("MB", lambda row: f"{1e-6 * row['bytes']:.1f}"), MS,
                (unit, lambda row: f"{scale * row['gbps']:.{2 if scale < 1 else 1}f}"), column("of copy", "ratio", ".2f")]
    if rows[0]["op"] == "mhc_pre" and any("product_ratio" in row for row in rows):
        columns += products
    if rows[0]["backend"] == "cpu":
        columns.append(column("cycles / 16", "cycles16", ".1f"))
    slow_copies = any(row.get("ratio", 0) > SLOW_COPY for row in rows)
    note = [f"*Of copy* above {SLOW_COPY}: the copy was slow in that run. Compare the {unit} of rows instead.", ""] if slow_copies else []
    return markdown(columns + commit_column(rows), rows) + note


def beside_peers(rows, peer_rows):
    """The cases that peers were timed on: [(peer's row, our row, {library: ms})]. Our rows are those of the peers' process, and
    those of `cotangent bench` only where that process had none."""
    cases, own = {}, {}
    for row in [row for row in peer_rows if row.get("ours")] or [row for row in rows if row["chosen"]]:
        own.setdefault(same_work(row), row)
    for row in peer_rows:
        if not row.get("ours") and same_work(row) in own:
            case = cases.setdefault(same_work(row), (row, own[same_work(row)], {}))
            case[2][library_of(row)] = row["ms"]
    return list(cases.values())


def peers_table(cases):
    """Milliseconds of each library, and how many times as fast as the fastest peer ours is."""
    names = list(dict.fromkeys(name for _, _, times in cases for name in times))
    columns = [(key, lambda case, key=key: case_words(case[0][key])) for key in ("direction", "dtype", "layout", "shape", "options")]
    if len({case[0]["layout"] for case in cases}) == 1:
        del columns[2]
    columns += [("cotangent, ms", lambda case: figure(case[1]["ms"]))]
    columns += [(f"{name}, ms", lambda case, name=name: figure(case[2][name]) if name in case[2] else "") for name in names]
    columns += [("fastest peer / cotangent", lambda case: f"{min(case[2].values()) / case[1]['ms']:.2f}")]
    return markdown(columns, cases)


def geometric_mean(values):
    return math.exp(sum(map(math.log, values)) / len(values))


# ---- attention on a GPU: the setting of the FlashAttention papers


def attention_place(row):
    """(direction, d, mask), T."""
    fields = re.fullmatch(r"B\d+ H\d+/\d+ T(\d+)/\d+ d(\d+)/\d+", row["shape"])
    return (row["direction"], int(fields[2]), "causal" if "causal" in row["options"] else "full"), int(fields[1])


def attention_entries(rows, peer_rows):
    """Rows of that setting. Ours are those of the peers' process in a direction that it timed."""
    own = [row for row in peer_rows if row.get("ours")]
    timed = {row["direction"] for row in own}
    own += [row for row in rows if row["direction"] not in timed]
    own = [row for row in own if row["chosen"]]
    newest = {}  # a case that was timed again has two rows
    for row in own + [row for row in peer_rows if not row.get("ours")]:
        key = same_work(row), library_of(row)
        if is_entry(row) and (key not in newest or newest[key]["date"] <= row["date"]):
            newest[key] = row
    return list(newest.values())


def attention_cells(entries):
    """{(direction, d, mask): {library: {T: TFLOP/s}}}, ours first."""
    cells = {}
    for row in sorted(entries, key=lambda row: (not library_of(row).startswith("cotangent"), "nondeterministic" in library_of(row))):
        group, T = attention_place(row)
        cells.setdefault(group, {}).setdefault(library_of(row), {})[T] = attention_rate(row)
    return cells


def attention_origins(entries):
    """{((direction, d, mask), library, T): origin}, of the rows that attention_cells takes."""
    return {(attention_place(row)[0], library_of(row), attention_place(row)[1]): origin(row) for row in entries}


def product_rates(rows):
    """{T: the median rate of matrix products alone}, of bf16 rows that have one."""
    rates = {}
    for row in rows:
        if "product_ceiling" in row and is_entry(row):
            rates.setdefault(attention_place(row)[1], []).append(row["product_ceiling"])
    return {T: sorted(values)[len(values) // 2] for T, values in sorted(rates.items())}


def attention_ratios(cells):
    """[((direction, d, mask), our library, the peer, {T: ratio})]. Our nondeterministic mode is not compared with a deterministic
    peer."""
    return [(group, own, peer, {T: of[own][T] / of[peer][T] for T in of[own] if T in of[peer]})
            for group, of in cells.items() for peer in of for own in of
            if own.startswith("cotangent") and not peer.startswith("cotangent")
            and not ("nondeterministic" in own and "deterministic" in peer)]


def mean_rows(device, ratios):
    """Of all cases of a direction: [(device, direction, library / peer, the ratios)]."""
    collected = {}
    for (direction, _, _), own, peer, values in ratios:
        collected.setdefault((device, direction, f"{own} / {peer}"), []).extend(values.values())
    return [(*key, values) for key, values in collected.items()]


def means_table(means):
    return markdown([("device", lambda mean: mean[0]), ("direction", lambda mean: mean[1]), ("ratio", lambda mean: mean[2]),
                     ("cases", lambda mean: str(len(mean[3]))), ("geometric mean", lambda mean: f"{geometric_mean(mean[3]):.2f}"),
                     ("lowest ratio", lambda mean: f"{min(mean[3]):.2f}")], means)


def sustained_note(entries):
    """Which lengths of a table were timed under load, and which in short rounds."""
    loaded = {attention_place(row)[1] for row in entries if "burst_ms" in row}
    short = {attention_place(row)[1] for row in entries} - loaded
    parts = [f"T = {', '.join(map(str, sorted(lengths)))}: {words}." for lengths, words in
             ((short, "rounds of 8 ms"), (loaded, "sustained")) if lengths]
    return [" ".join(parts), ""] if len(parts) == 2 else []


def other_cases(peer_rows):
    """The peers' cases outside that setting: [(row, {library: TFLOP/s})]."""
    cases = {}
    for row in peer_rows:
        if not is_entry(row):
            cases.setdefault(same_work(row), (row, {}))[1][library_of(row)] = row["tflops"]
    return [(row, rates) for row, rates in cases.values() if len(rates) > 1 and "cotangent" in rates]


def fastest_peer(rates):
    return max(rate for name, rate in rates.items() if not name.startswith("cotangent"))


def other_attention_beside_peers(peer_rows):
    """The peers' cases outside that setting: TFLOP/s of each library, and ratios of ours to the fastest peer of each mode."""
    cases = other_cases(peer_rows)
    if not cases:
        return []
    names = sorted({name for _, rates in cases for name in rates}, key=lambda name: (not name.startswith("cotangent"), name))

    def ratio(case, own, deterministic=False):
        _, rates = case
        peers = {name: rate for name, rate in rates.items() if "deterministic" in name or not deterministic}
        known = own in rates and any(not name.startswith("cotangent") for name in peers)
        return f"{rates[own] / fastest_peer(peers):.2f}" if known else ""
    columns = [(key, lambda case, key=key: case_words(case[0][key])) for key in ("direction", "shape")]
    columns += [("options", lambda case: case_words(case[0]["options"].removesuffix("+nondeterministic")))]
    columns += [(name, lambda case, name=name: f"{case[1][name]:.0f}" if name in case[1] else "") for name in names]
    columns += [("deterministic / fastest peer", lambda case: ratio(case, "cotangent")),
                ("nondeterministic / fastest peer", lambda case: ratio(case, "cotangent, nondeterministic")),
                ("deterministic / fastest deterministic peer", lambda case: ratio(case, "cotangent", True))]
    return ["TFLOP/s, measured in one process, libraries alternating:", "", *markdown(columns, cases)]


def without_later(rows, peer_rows):
    """The rows of bench without those whose case and mode the table of the peers has from a later day."""
    tabled = {same_work(row) for row, _ in other_cases(peer_rows)}
    dates = {}
    for own in peer_rows:
        if own.get("ours") and same_work(own) in tabled:
            key = same_work(own), "nondeterministic" in own["options"]
            dates[key] = max(own["date"], dates.get(key, ""))
    return [row for row in rows if dates.get((same_work(row), "nondeterministic" in row["options"]), "") <= row["date"]]


def by_case(rows):
    """The rows with those of one case side by side, the deterministic one first."""
    cases = list(dict.fromkeys(map(same_work, rows)))
    return sorted(rows, key=lambda row: (cases.index(same_work(row)), "nondeterministic" in row["options"]))


def older_than_hopper(rows, device, results):
    """A note on rows of a portable kernel, if a newer record of another GPU has a Hopper kernel for the same case."""
    newer = {}
    for (op, other), (_, found) in results.items():
        if op == "attention" and other != device:
            newer |= {(same_work(row), other): row["date"] for row in found if row["chosen"] and "_sm90" in row["kernel"]}
    stale = [(row, other) for row in rows if is_portable(row)
             for (case, other), date in newer.items() if case == same_work(row) and date > row["date"]]
    if not stale:
        return []
    shapes = ", ".join(dict.fromkeys(case_words(row["shape"]).split()[-1] for row, _ in stale))
    other = stale[0][1]
    return [f"The rows {shapes} with *portable kernel* are older than the Hopper kernel of these sizes. "
            f"[{other}](#{other.lower().replace(' ', '-')}) has newer rows.", ""]


def attention_gpu(rows, peer_rows, device, results):
    """The sections of a GPU: the papers' setting by direction, then options and shapes beyond it."""
    entries = attention_entries(rows, peer_rows)
    cells, products = attention_cells(entries), product_rates(entries) or product_rates(rows)
    lines = []
    for direction in ("forward", "backward"):
        groups = {group: cells[group] for group in sorted(cells, key=lambda group: (group[1], group[2] == "causal"))
                  if group[0] == direction}
        if not groups:
            continue
        lengths = sorted({T for libraries in groups.values() for times in libraries.values() for T in times})
        timed = [row for row in entries if row["direction"] == direction]
        origins = attention_origins(timed)
        used = set(origins.values())
        signs, note = origin_signs([row for row in timed if origin(row) in used])
        dates = {}
        for (group, _, T), (date, _) in origins.items():
            dates.setdefault((group, T), set()).add(date)
        if len(set.union(*dates.values())) > 1 and all(len(of) == 1 for of in dates.values()):
            note += " All libraries of a case with a dated sign were timed on that date."
        lines += [f"### {direction.capitalize()}, TFLOP/s", "", note, "", *sustained_note(timed)]
        if products and not any("product_ceiling" in row for row in timed):
            lines += ["*Matrix products alone* are of `cotangent bench`, in another process. Do not divide the other rows by them.", ""]

        def rate_cell(line, T):
            key = (direction, int(line[0] or 0), line[1]), line[2], T
            return f"{line[3][T]:.0f} {signs.get(origins.get(key), '')}".rstrip() if T in line[3] else ""
        rates = [(str(d), mask, name, values) for (_, d, mask), libraries in groups.items() for name, values in libraries.items()]
        rates += [("", "", "matrix products alone", products)] if products else []
        names = [("d", lambda line: line[0]), ("mask", lambda line: line[1]), ("library", lambda line: line[2])]
        lines += markdown(names + [(f"T = {T}", lambda line, T=T: rate_cell(line, T)) for T in lengths], rates)
        ratios = [(str(group[1]), group[2], f"{own} / {peer}", values)
                  for group, own, peer, values in attention_ratios(groups) if values]
        if ratios:
            means = [(title, lambda line, least=least: f"{geometric_mean(values):.2f}"
                      if (values := [value for T, value in line[3].items() if T >= least]) else "")
                     for title, least in (("geometric mean", 0), ("geometric mean, T >= 2048", 2048))
                     if any(min(line[3]) < least or least == 0 for line in ratios)]
            names[2] = "ratio", lambda line: line[2]
            lines += markdown(names + [(f"T = {T}", lambda line, T=T: f"{line[3][T]:.2f}" if T in line[3] else "")
                                       for T in lengths] + means, ratios)
        loaded = [row for row in timed if "burst_ms" in row]
        if loaded:
            order = sorted(loaded, key=lambda row: (*attention_place(row)[0], attention_place(row)[1], library_of(row)))
            lines += ["<details><summary>Under load: sustained and burst time, clock, power, energy</summary>", ""]
            lines += markdown([("d", lambda row: str(attention_place(row)[0][1])), ("mask", lambda row: attention_place(row)[0][2]),
                               ("T", lambda row: str(attention_place(row)[1])), ("library", library_of), MS,
                               ("TFLOP/s", lambda row: f"{attention_rate(row):.0f}"),
                               column("of products", "product_ratio", ".2f")] + LOAD_COLUMNS, order)
            lines += ["</details>", ""]
    all_others = [row for row in rows if not is_entry(row) and row["chosen"]]
    others = without_later(all_others, peer_rows)
    if others:
        older = " A row of an old commit may show a slower kernel than the library has today." if commit_column(others) else ""
        lines += ["### Other shapes and options", "", "TFLOP/s count only the query-key pairs inside the mask." + older, ""]
        lines += other_attention_beside_peers(peer_rows)
        if len(others) < len(all_others):
            lines += ["The tables below are of `cotangent bench`. They leave out the cases that the process of the peers measured on a later day.", ""]
        for direction in dict.fromkeys(row["direction"] for row in others):
            rows_of = by_case([row for row in others if row["direction"] == direction])
            commits = {short_commit(row["commit"]) for row in rows_of}
            lines += [f"{direction.capitalize()}{f', commit {commits.pop()}' if len(commits) == 1 else ''}:", ""]
            if all("nondeterministic" in row["options"] for row in rows_of):
                lines += ["These times use `allow_nondeterminism`. A default call is deterministic and may be slower: it was not measured for these shapes.", ""]
            lines += older_than_hopper(rows_of, device, results) + case_table(rows_of)
    portable = [row for row in rows if is_entry(row) and is_portable(row)]
    peers_only = [row for row in peer_rows if not row.get("ours")]
    if portable and peers_only:
        lines += ["### Portable GPU kernels", "", f"The kernels for GPUs other than Hopper, run on this one (commit {portable[0]['commit']}):", ""]
        lines += means_table(mean_rows("", attention_ratios(attention_cells(portable + peers_only))))
    return lines


def profiled(op, device, directory):
    """What Nsight Compute read of an op's kernels."""
    source, rows = newest_with(directory, "ncu", lambda row: row["case"].startswith(op + " ")).get(device, ("", []))
    if not rows:
        return []
    def share(title, key):
        return title, lambda row: f"{row[key]:.0f} %"
    return ["### Nsight Compute", "", f"{record_link(source)}. The newest rows are last. The symbols are those of a row's commit. Utilisation of each unit. A value above 100 % "
            "is an artefact of a kernel of about 2 us. *Registers* are those at launch: Hopper kernels move registers between warpgroups later.", "",
            *markdown([("date", lambda row: row["date"]), ("commit", lambda row: row["commit"][:7]), ("case", lambda row: row["case"].removeprefix(op + " ")), ("kernel", lambda row: row["ncu"]),
                       ("us", lambda row: f"{row['us']:.1f}"), share("busiest pipe", "busiest_pipe"),
                       share("issue slots", "issue_slots"), share("L1 and shared memory", "l1"), share("L2", "l2"),
                       share("L2 hits", "l2_hits"), share("DRAM", "dram"), column("registers", "registers", ".0f"),
                       column("warps", "warps", ".1f")], rows)]


# ---- the benchmark pages: text


GENERATED = "<!-- Generated by tools/make_tables.py from bench/results: change the tool, then run `make tables`. -->"
MEMORY_BOUND = """This op is memory-bound. *TB/s* or *GB/s* is MB over the time. The black line of a picture is the rate of the memory copy."""
CYCLES = " *Cycles / 16* are core cycles of all threads for 16 elements of x."
# Pages: title, ops, text. An op that is on none of these pages gets a page with the text for a memory-bound op.
PAGES = {
    "attention": ("attention", ["attention"], """## How to read

TFLOP/s count as the FlashAttention papers do: forward 4 B H T² d operations, backward 2.5 times that. A causal mask halves both.
All kernels of a call are timed. Every GPU case has 16384 tokens, H d = 2048 and bf16, except under "Other shapes and options".

- **T >= 4096** is timed under a sustained load, and shorter cases in rounds of 8 ms. The clock falls under load: do
  not compare times of T < 4096 with times of T >= 4096. Ratios are comparable.
- **Not timed:** FlashAttention-2, and the forward of FlashAttention-3.
- **The backward has two modes.** *cotangent* is deterministic, its default: it adds the parts of dQ in a fixed order. *cotangent,
  nondeterministic* adds them in the order in which the blocks finish (`deterministic=False`). *FlashAttention-4* is
  nondeterministic, its default. Compare it with *FlashAttention-4 deterministic* as well.
- **Compare rows of one table only.** Other GPUs have other clocks. Tables of `cotangent bench` and of the process of the peers
  have other loads.
- **A ratio above 1** means that cotangent is faster. Each table names its date, and the commit of cotangent if the record has it.

[More rules for attention](README.md#attention)."""),
    "causal_conv1d": ("causal_conv1d", ["causal_conv1d"], MEMORY_BOUND + CYCLES + """

Peers are `F.conv1d` of PyTorch, eager and through `torch.compile`, and *taps*: K shifted products that `torch.compile` fuses. Their
weights have the dtype of x. The package causal_conv1d was not timed as a single call: it was not installed in that run.MAMBA_RATIO
[tools/peers/causal_conv1d.py](../../tools/peers/causal_conv1d.py) times it where it is installed. *Update* is a decoding step."""),
    "causal_conv1d_dense": ("causal_conv1d_dense", ["causal_conv1d_dense"],
                            """This op is compute-bound. A GPU's times are sustained where *burst ms* is given: the second half of three
seconds of load. *Burst* is one call on an idle GPU."""),
    "dropout": ("dropout", ["dropout"], MEMORY_BOUND + CYCLES + """

*generated*: the kernel generates the mask from the seed. *mask*: the mask is in memory, with one byte for each element. *mask_bits*:
with one bit for each element. Peers are the same formula in PyTorch, eager and through `torch.compile`."""),
    "mhc": ("mhc_pre, mhc_sinkhorn, mhc_post, mhc_post_pre", ["mhc_pre", "mhc_sinkhorn", "mhc_post", "mhc_post_pre"],
            MEMORY_BOUND.replace("This op is", "mhc_pre, mhc_post and mhc_post_pre are") + CYCLES + """

mhc_pre multiplies x by phi. With many streams or small D, it is compute-bound.

mhc_sinkhorn works on small matrices. Its time is the latency of a chain of divisions."""),
}
# What the calls of attention do that have no forward and backward.
DIRECTIONS = {"delta": "*Delta* computes the sum of dout * out of each row.", "merge": "*Merge* combines the results of two blocks of keys."}
MODELS = """Training steps of models with random weights, by [tools/measure_transformers.py](../../tools/measure_transformers.py): forward,
backward and AdamW in bf16. The only change between the rows of a model is `attn_implementation`, and for mamba2 the package that
computes the convolution. Its scan is that of mamba_ssm in all rows. *Tokens/s* is the mean of the runs, each in a process of its own. With
several runs, the implementations alternated. *Cotangent / this* is cotangent's rate divided by that of the row. gemma2 has no row with
sdpa, because PyTorch's `scaled_dot_product_attention` has no softcap."""
PAGES |= {op: (op, [op], MEMORY_BOUND + CYCLES) for op in OPS if not any(op in ops for _, ops, _ in PAGES.values())}
README = """A record is the JSON of `cotangent bench OP --json` on one device. `make tables` writes these pages from the newest record of each
device and op, and draws the pictures.

## How a time is measured

### By `cotangent bench`

It runs no peer. It calls the kernels of cotangent from C.

- The kernels of a case alternate with a memory copy of the same number of bytes. For compute-bound ops, a plain matrix product
  takes part too. A time is the median of the rounds. Inputs rotate through more memory than the caches hold.
- On a GPU, one round repeats a kernel for about 8 ms in one CUDA graph. In most cases *ms* is the median of these rounds.
- A GPU lowers its clock under load. So some compute-bound cases also run alone for 3 seconds (option `--load`; a page may name another
  number). Their *ms* is *sustained*: the time of one call in the second half of this period. They have *burst ms* too. These cases are
  attention with T >= 4096, causal_conv1d_dense, and mhc_pre with 8 streams in bf16.

### By tools/peers

The scripts of [tools/peers](../../tools/peers) run cotangent and the other libraries in one process. On a CPU, the process of attention's
peer runs no kernels of cotangent. Both times of a ratio come from the same process if one process ran both
libraries, otherwise from two.

- The libraries of a case run in 9 rounds, on a CPU in at least 3. The order rotates from round to round. A time is the median of the rounds.
- On a GPU, one round of a library is one replay of a CUDA graph of about 8 ms. A call that cannot be captured runs
  without a graph, and its row says `"graph": false`.
- In ops that are not attention, a copy by PyTorch takes part, and inputs rotate through more memory than the L2 cache holds.
- In attention, there is no copy and no matrix product, and the inputs do not rotate: each call reads the same tensors. They are
  contiguous [B, T, H, d], or [tokens, H, d] if packed. For cuDNN they are views [B, H, T, d].
- Under load, each library of a case with T >= 4096 also runs alone, as above (option `--load`), in graphs of about 20 ms. *Burst ms* is the
  median of three single calls, each after 0.4 seconds without work.

| library in attention | call | results |
|---|---|---|
| cotangent | the C functions, through ctypes | allocated before |
| cuDNN | `torch.ops.aten._scaled_dot_product_cudnn_attention` and its `_backward` | allocated by PyTorch, when the graph is captured |
| FlashAttention-4 | `flash_attn.cute.interface._flash_attn_fwd` and `_flash_attn_bwd` | allocated before |
| FlashAttention-3 | its backward, compiled into a library, through ctypes | allocated before, with the workspace |
| PyTorch, on a CPU | `scaled_dot_product_attention`, and `torch.autograd.grad` for the backward | allocated by PyTorch in each call |

## Words and columns

| word or column | meaning |
|---|---|
| peer | another library that runs the same case on the same device, through [tools/peers](../../tools/peers) |
| ceiling | the rate of the memory copy, or of the matrix products alone: the black line of a picture |
| oracle | the slow reference in C, with sums in long double, that all kernels are compared with |
| MB, floor | minimum traffic: each input read once, each output written once |
| mode: nondeterministic | a call with `allow_nondeterminism` (Python: `deterministic=False`) |
| mode: deterministic | a call without it, the default. A table without any nondeterministic call leaves this word out |
| mode: portable kernel | a portable GPU kernel ran the call, not a Hopper kernel |
| ms | time of one call, with all its kernels |
| TB/s, GB/s | minimum traffic over the time |
| of copy | the TB/s of the row, divided by the TB/s of the best memory copy of as many bytes in the same run. 1.00: as fast as a copy. Far above 1: the copy was slow in that run, so compare the TB/s of rows instead |
| TFLOP/s | arithmetic of the formula over the time; the attention page says how it counts |
| of products | that rate over matrix products alone, in the same run and under the same load |
| cycles / 16 | core cycles, summed over the threads, for 16 elements of x |
| burst ms | time of one call on an idle GPU |
| SM MHz, W, pJ/FLOP | clock, power and energy for each operation, during the sustained time |
| lowest ratio | of all cases |
| max error, mean error | largest and mean absolute error of the elements |
| elements with error > 1, < 0.1 | how many elements have an absolute error above 1, below 0.1 (not in ulp) |

Case names are those of the headers: B batch, T length, D channels, H heads, d head dimension, K filter width, n streams, R rows. In
attention, T and H may have two numbers (queries / keys), and so may d (keys / values).

A commit that ends in *+* had uncommitted changes.

| option | meaning |
|---|---|
| w=DTYPE | dtype of the weight |
| silu, gelu_tanh, gelu_erf | activation. `none`: no activation and no other option |
| bias, residual, gamma | the call has this optional input |
| full, causal | attention without a mask, or with a causal mask |
| windowLEFT,RIGHT | a query attends to LEFT keys before it and RIGHT keys after it |
| softcapC, sink | softcap C; an additional logit of each head |
| dropoutP, alibi | dropout probability P; slopes of ALiBi |
| biasN | a bias is added to the scores, and the backward has dbias. If bit n of N is set, all indices of axis n share it |
| packed | cu_seqlens is given: the B sequences are packed, all of length T |
| packed+mixed | the same, with lengths that alternate between T/2 and 3T/2 |
| p=P | dropout probability |
| generated, mask, mask_bits | the mask is generated from the seed; or it is in memory, with one byte or one bit for each element |
| phi~1/nD, phi~1 | variance of the elements of phi |
| sinkhorn | mhc_pre computes h_res too |
| dh_res_logits, dx_post | the backward has this optional input |
| h_res[in,out], h_res[out,in] | layout of h_res in mhc_post |
| iterations=N | iterations of mhc_sinkhorn |

## Attention

- A sustained time is that of the second half of a load. The load takes 3 seconds in `cotangent bench`, and 0.8 to 2.5 seconds in the
  process of the peers. So compare sustained times of one process only.
- Since commit 513ef73 (2026-11-25), the library takes the nondeterministic mode only for classes of calls where it was faster, or equal
  within 2 %, when measured. Elsewhere both rows are the same kernel. Records of earlier commits show a slower deterministic mode.
- A run of tools/peers records the commit of cotangent only if it is given (`--commit`).
- On CPUs, and under "Other shapes and options", TFLOP/s count only the query-key pairs inside the mask.
- FlashAttention-4 is a beta. The records have its version.
- FlashAttention-3 is commit 0251105 of Dao-AILab/flash-attention with the CUTLASS commit that it names, compiled by nvcc 13.0:
  [build_flash_attention_3.sh](../../tools/peers/build_flash_attention_3.sh). Its forward is not measured, because only its backward
  was built. At d = 64 the backward is measured up to T = 2048.

## How to reproduce

    make                                             # the program is build/cotangent
    build/cotangent bench attention --json bench/results/DATE-DEVICE-attention.json
    pip install torch flash-attn-4==4.0.0b36
    tools/peers/build_flash_attention_3.sh FLASH_ATTENTION CUTLASS fa3.so    # two clones; its head says which
    tools/peers/attention.py --device cuda --flash-attention-3 fa3.so --commit COMMIT \\
        --json bench/results/DATE-DEVICE-attention-peers.json
    make tables

A peer that cannot be imported is left out.

`make gpu` does this for every op on a machine with a GPU, after check and compute-sanitizer.

[Records](records.md) lists the files of all tables.
"""


def record_link(source):
    return f"[{source}](../../bench/results/{source})"


def devices(results):
    """GPUs, the newest name first, then CPUs."""
    names = sorted({device for _, device in results})
    return [name for name in reversed(names) if "NVIDIA" in name] + [name for name in names if "NVIDIA" not in name]


def picture(page, device, results):
    """The name of a page's picture for a device, or None: tools/make_charts.py draws those."""
    for op in PAGES[page][1]:
        if (op, device) in results and op != "mhc_sinkhorn":
            short = pathlib.Path(results[op, device][0]).stem.split("-", 3)[3].removesuffix("-" + op)
            return f"{short}-{page}.svg"
    return None


def threads_note(rows):
    """For a heading: the threads of a CPU's record, if the processor has more cores."""
    cores = re.search(r"(\d+) cores$", rows[0]["device"])
    return f", measured with {rows[0]['threads']} threads" if cores and rows[0]["threads"] < int(cores[1]) else ""


def older_note(op, device, results):
    """A warning if another GPU has a newer record of the op."""
    dates = {name: max(row["date"] for row in rows) for (other, name), (_, rows) in results.items() if other == op and rows[0]["backend"] == "cuda"}
    newest = max(dates, key=dates.get, default=None)
    if device not in dates or dates[device] == dates[newest]:
        return []
    return [f"The rows of {dates[device]} are older than those of {newest} ({dates[newest]}): the library may have faster kernels today.", ""]


def op_section(op, device, results, peers, directory, level):
    source, rows = results[op, device]
    peer_source, peer_rows = peers.get((op, device), ("", []))
    peer_rows = [row for row in peer_rows if row["direction"]]
    chosen = [row for row in rows if row["chosen"]]
    cpu = rows[0]["backend"] == "cpu"
    commits = ", ".join(dict.fromkeys(row["commit"] for row in chosen))
    host = f", {rows[0]['threads']} threads at {rows[0]['clock_ghz']:.2f} GHz" if cpu else ""
    names = ", ".join(dict.fromkeys(versioned(row["kernel"]) for row in peer_rows if not row.get("ours")))
    dates, peer_dates = (", ".join(sorted({row["date"] for row in timed})) for timed in (chosen, peer_rows))
    lines = [f"`cotangent bench`, commit {commits}, {dates}{host}: {record_link(source)}."
             + (f" Process of the peers, {peer_dates}: {record_link(peer_source)} ({names})." if peer_rows else ""), "", *older_note(op, device, results)]
    if op == "attention" and not cpu:
        return lines + attention_gpu(rows, peer_rows, device, results) + profiled(op, device, directory)
    for direction in dict.fromkeys(row["direction"] for row in chosen):
        about = [DIRECTIONS[direction], ""] if direction in DIRECTIONS else []
        lines += [f"{level} {direction.capitalize()}", "", *about, *case_table([row for row in chosen if row["direction"] == direction])]
    cases = beside_peers(rows, peer_rows)
    if cases:
        together = any(row.get("ours") for row in peer_rows)
        older = f" It is of {peer_dates}, the tables above are of {dates}: the times of cotangent may have changed." if peer_dates != dates else ""
        process = "Measured in one process, libraries alternating." if together else "The peers ran in a process of their own."
        lines += [f"{level} Comparison with other libraries", "", process + older.replace("It is", "This run is"), "", *peers_table(cases)]
    return lines + profiled(op, device, directory)


def accuracy(results):
    """Of test_mhc_accuracy's rows."""
    lines = ["## Accuracy", "", "Errors against the oracle, computed in long double, by `test_mhc_accuracy --json`. *Largest* is the largest magnitude of the output. "
             "*ulp* is the rms error in units in the last place of the output's dtype. *Relative* is the error norm over the norm. The "
             "last rows compare the projection with one running float32 sum and with TF32.", ""]
    for device in devices(results):
        if ("mhc_accuracy", device) not in results:
            continue
        source, rows = results["mhc_accuracy", device]
        lines += [f"### Accuracy on {device}", "", f"{rows[0]['date']}: {record_link(source)}.", ""]
        for shape in dict.fromkeys(row["shape"] for row in rows):
            lines += [f"{shape}:", "", *markdown([
                ("output", lambda row: row["output"]), column("elements", "elements", ""), column("largest", "largest", ".3g"),
                column("max error", "max", ".2g"), column("mean error", "mean", ".2g"), column("elements with error > 1", "above", ""),
                column("< 0.1", "below", ""), column("ulp", "rms_ulp", ".3g"), column("relative", "relative", ".2g")
            ], [row for row in rows if row["shape"] == shape])]
    return lines


def model_name(row):
    """A model's name; with its number of parameters, where that of the name is off by more than 10 %."""
    family, _, size = row["model"].rpartition("-")
    claimed = float(size[:-1]) * {"m": 1e6, "b": 1e9}[size[-1]]
    return row["model"] if abs(row["parameters"] / claimed - 1) < 0.1 else f"{family}-{row['parameters'] / 1e6:.0f}m"


def merged_models(rows):
    """The mean of the runs of each model and implementation, and a function: the rate of cotangent divided by that of a row."""
    def model(row):
        return row["model"], row["batch"], row["length"], row["padding"]
    groups = {}
    for row in rows:
        groups.setdefault((*model(row), row["implementation"]), []).append(row)
    merged = [runs[0] | {"tokens_per_s": sum(run["tokens_per_s"] for run in runs) / len(runs), "runs": len(runs)}
              for runs in groups.values()]
    models = list(dict.fromkeys(map(model, merged)))
    order = ["cotangent", "sdpa", "eager"]
    merged.sort(key=lambda row: (models.index(model(row)), order.index(row["implementation"]) if row["implementation"] in order else len(order)))
    ours = {model(row): row["tokens_per_s"] for row in merged if row["implementation"] == "cotangent"}

    def ratio(row):
        known = model(row) in ours and row["implementation"] != "cotangent"
        return f"{ours[model(row)] / row['tokens_per_s']:.2f}" if known else None
    return merged, ratio


def models_summary(results):
    """One line a model: the rate of training with cotangent divided by that with each other implementation."""
    lines = []
    for device in devices(results):
        if ("transformers", device) not in results:
            continue
        _, rows = results["transformers", device]
        merged, ratio = merged_models(rows)
        others = [(row, ratio(row)) for row in merged if ratio(row) and not row["padding"]]
        names = {"sdpa": "PyTorch's sdpa", "eager": "eager attention"}
        lines += [f"Training, {device}, {rows[0]['date']}, bfloat16, PyTorch {rows[0]['torch']}, transformers {rows[0]['transformers']}:", "",
                  *markdown([("model", lambda pair: model_name(pair[0])),
                             ("batch x tokens", lambda pair: f"{pair[0]['batch']} x {pair[0]['length']}"),
                             ("compared with", lambda pair: f"the package {pair[0]['convolution']}" if pair[0]["model"].startswith("mamba")
                              else names.get(pair[0]["implementation"], pair[0]["implementation"])),
                             ("speedup", lambda pair: pair[1])], others)]
    return "\n".join(lines).rstrip("\n") + "\n"


def mamba_ratio(results):
    """A sentence: the rate of a Mamba model with cotangent's convolution divided by that with the package causal_conv1d."""
    for device in devices(results):
        if ("transformers", device) in results:
            merged, ratio = merged_models(results["transformers", device][1])
            for row in merged:
                if row["model"].startswith("mamba") and ratio(row):
                    return (f" In training, a [{row['model']}](transformers.md)\nwith cotangent's convolution has {ratio(row)} times the "
                            f"tokens/s of the model with the package ({device}).")
    return ""


def models_page(results):
    """docs/benchmarks/transformers.md, of tools/measure_transformers.py's rows."""
    lines = [GENERATED, "", "# Benchmarks: models of transformers", "",
             "[How to use it](../guide/transformers.md) · [how other pages are measured](README.md)", "", MODELS, ""]
    for device in devices(results):
        if ("transformers", device) not in results:
            continue
        source, rows = results["transformers", device]
        merged, ratios = merged_models(rows)
        commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
        lines += [f"## {device}", "", f"{rows[0]['date']}, commit {commits}: {record_link(source)}. PyTorch {rows[0]['torch']}, "
                  f"transformers {rows[0]['transformers']}.", "", *markdown([
                      ("model", model_name), ("parameters", lambda row: f"{row['parameters'] / 1e6:.0f}M"),
                      ("batch x tokens", lambda row: f"{row['batch']} x {row['length']}"),
                      ("padding", lambda row: f"{row['padding']:.0%}" if row["padding"] else ""),
                      ("attention", lambda row: "" if row["model"].startswith("mamba") else row["implementation"]),
                      ("convolution", lambda row: row["convolution"] if row["model"].startswith("mamba") else ""),
                      ("runs", lambda row: str(row["runs"])), ("tokens/s", lambda row: f"{row['tokens_per_s']:.0f}"),
                      ("cotangent / this", lambda row: ratios(row) or ""), column("GiB", "gib", ".1f"), *commit_column(merged)], merged)]
    return "\n".join(lines).rstrip("\n") + "\n"


PARALLEL = """Attention of one sequence over several ranks, by [bench_parallel](../../tests/parallel/bench_parallel.c) on
[libcotangent_parallel](../guide/context_parallel_c.md). Each repeat runs one call of libcotangent on one GPU (*single*), then the call of all
ranks (*group*). Times are medians of the wall time in ms.

| word | meaning |
|---|---|
| both | forward and backward without a wait between them |
| nccl | a group over NCCL; each rank has its own GPU |
| local | a group of threads, whose streams alternate on the GPUs; copy engines transfer from GPU to GPU |
| head ranks | the number of ranks that exchange heads |
| keys | how keys travel between the other ranks: in a ring, or by an all-gather |
| share of ideal | single / (ranks x group), of the columns *both*. It is above 1 if the backward of the single long call is slower per query-key pair than the calls of the ranks |
| group / single | the cost of the division on one GPU |
| sent | bytes that a rank sends in one forward and backward, the most of all ranks |
| memory | device memory that the group holds for rank 0, beside the tensors of its call |
| calls | calls of libcotangent in one forward and backward, on the rank that waits longest |
| transfers | the time of this rank's transfers. Those of NCCL include the wait for the other rank |
| exposed | the time in which this rank's arithmetic waits: for transfers, and for slower ranks |"""

CONTEXT_PARALLEL = """Causal, bf16, 16 heads of 128, each rank on its own GPU, over NCCL:
[context_parallel.py](../../tools/peers/context_parallel.py). *single* is the call of one GPU. *zigzag ring*, *heads* and *ring of 2 heads*
(two ranks exchange heads, and the pairs of ranks form a ring) are calls of `cotangent.distributed.attention`. *all-gather by hand* is not
the option `all_gather=True`, which was not measured over NCCL: in this program each rank gathers all keys and values, and calls `cotangent.attention` for its own queries. *torch context_parallel* is `torch.distributed.tensor.experimental.context_parallel` around
FlashAttention-2 of PyTorch. Its shares are of cotangent's single call too, so they include the speed of FlashAttention-2. All calls alternate in one run. Each time is that of the slowest rank."""

TRAIN_TORCH = """[train_torch.py](../../examples/train_torch.py) trains one model with the same batches, *batch* windows of *context* tokens a
step. DDP divides the batch; the ops of cotangent do not communicate in it. `--context-parallel` divides each sequence. The losses are those of the last step."""


def parallel_page(results):
    """docs/benchmarks/parallel.md, of the rows of bench_parallel and of tools/peers/context_parallel.py."""
    lines = [GENERATED, "", "# Benchmarks: context parallelism", "", "[How to use it](../guide/context_parallel_c.md)", "", PARALLEL, ""]

    def time(part, kind):
        return lambda row: f"{row[part][kind] * 1000:.1f}" if kind in row[part] else ""

    def number(key):
        return lambda row: f"{row['both'][key]:.2f}" if key in row["both"] else ""

    def profile(key, factor, form):
        return lambda row: format(row["profile"][key] * factor, form) if "profile" in row else ""

    def loss(row, key):
        return f"{row[key]:.4f}" if key in row else ""

    for device in devices(results):
        if ("parallel_attention", device) not in results:
            continue
        source, rows = results["parallel_attention", device]
        commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
        parts = [(f"{part}, {kind}", time(part, kind + "_s")) for part in ("forward", "backward", "both") for kind in ("group", "single")]
        lines += [f"## {device}", "", f"{rows[0]['date']}, commit {commits}: {record_link(source)}. {rows[0]['dtype']}, d = {rows[0]['d']}.", "",
                  *markdown([("engine", lambda row: row["engine"]), ("GPUs", lambda row: str(row.get("gpus", row["ranks"] if row["engine"] == "nccl" else 1))),
                             ("ranks", lambda row: str(row["ranks"])), ("T", lambda row: str(row["T"])),
                             ("heads", lambda row: f"{row['H']}/{row['Hkv']}"), ("mask", lambda row: "causal" if row["causal"] else "full"),
                             ("cut", lambda row: row["cut"]), ("head ranks", lambda row: str(row["head_ranks"])),
                             ("keys", lambda row: "all-gather" if row.get("all_gather") else "ring" if row["head_ranks"] < row["ranks"] else ""), *parts,
                             ("sent, GB", lambda row: f"{max(row['sent_bytes']) * 1e-9:.2f}" if "sent_bytes" in row else ""),
                             ("memory, GB", lambda row: f"{row['group_bytes'] * 1e-9:.2f}" if "group_bytes" in row else ""),
                             ("calls", profile("calls", 1, "d")), ("transfers, ms", profile("transfer_s", 1000, ".1f")),
                             ("exposed, ms", profile("exposed_s", 1000, ".1f")), ("share of ideal", number("share_of_ideal")),
                             ("group / single", lambda row: "" if "share_of_ideal" in row["both"] else number("ratio")(row))], rows), ""]
        if ("context_parallel", device) in results:
            source, rows = results["context_parallel", device]
            lines += ["### PyTorch: cotangent.distributed and torch's context_parallel", "",
                      f"{rows[0]['date']}, commit {rows[0]['commit']}, torch {rows[0]['torch']}: {record_link(source)}. {CONTEXT_PARALLEL}", "",
                      *markdown([("ranks", lambda row: str(row["ranks"])), ("T", lambda row: str(row["T"])), ("call", lambda row: row["kernel"]),
                                 *[(f"{part}, ms", lambda row, part=part: f"{row[part]['s'] * 1000:.1f}") for part in ("forward", "both")],
                                 *[(f"share of ideal, {part}", lambda row, part=part: f"{row[part]['share']:.2f}") for part in ("forward", "both")]],
                                rows), ""]
        if ("train_torch", device) in results:
            source, rows = results["train_torch", device]
            alone = {row["context"]: row["tokens_per_second"] for row in rows if row["ranks"] == 1}
            programs = dict.fromkeys(row["program"] for row in rows)
            lines += ["### PyTorch: a model on several GPUs", "",
                      f"{rows[0]['date']}, commit {rows[0]['commit']}, torch {rows[0]['torch']}: {record_link(source)}. {TRAIN_TORCH}", "",
                      *[f"    torchrun --nproc-per-node N {program.replace(' --every ', ' --eval-every ')}" for program in programs], "",
                      *markdown([("context", lambda row: str(row["context"])), ("batch", lambda row: str(row["batch"])),
                                 ("GPUs", lambda row: str(row["ranks"])), ("divided", lambda row: row["division"]),
                                 ("tokens/s", lambda row: str(row["tokens_per_second"])),
                                 ("times one GPU", lambda row: f"{row['tokens_per_second'] / alone[row['context']]:.2f}"),
                                 ("training loss", lambda row: loss(row, "training_loss")),
                                 ("validation loss", lambda row: loss(row, "validation_loss"))], rows), ""]
    lines += ["## Prediction", "", *predict_parallel.tables()]
    return "\n".join(lines).rstrip("\n") + "\n"


ATTENTION_OPTIONS = """The times of calls of `cotangent.attention` that the Hopper kernels do not support, measured by
[tools/measure_attention_options.py](../../tools/measure_attention_options.py) from Python with a causal mask. The case *none* has no
option. In bfloat16 it runs the Hopper kernels. All other rows run the [portable GPU kernels](../kernels/attention_portable_gpu.md).
A time is the median of 15 rounds of 4 calls from Python, between two CUDA events. It is not sustained: do not compare it with
the [attention page](attention.md). *Slowdown* is the time divided by the time of *none* in bfloat16: above 1 is slower. TFLOP/s count as on the [attention page](attention.md). *k expanded*: k is a view with stride 0 between the heads."""


def attention_options_page(results):
    """docs/benchmarks/attention_options.md, of tools/measure_attention_options.py's rows."""
    lines = [GENERATED, "", "# Benchmarks: attention by option", "", "[Which calls are fast](../guide/performance.md#attention-on-hopper)",
             "", ATTENTION_OPTIONS, ""]
    for device in devices(results):
        if ("attention_options", device) not in results:
            continue
        source, rows = results["attention_options", device]
        none = {row["shape"]: row for row in rows if row["case"] == "none" and row["dtype"] == "bfloat16"}

        def times(direction):
            return "slowdown", lambda row: f"{row[direction + '_ms'] / none[row['shape']][direction + '_ms']:.1f}"
        columns = [(key, lambda row, key=key: row[key]) for key in ("shape", "dtype", "case")]
        for direction in ("forward", "backward"):
            columns += [(f"{direction}, ms", lambda row, key=f"{direction}_ms": figure(row[key])),
                        ("TFLOP/s", lambda row, key=f"{direction}_tflops": f"{row[key]:.1f}"), times(direction)]
        columns.append(("sdpa of PyTorch, forward, ms", lambda row: figure(row["sdpa_forward_ms"]) if "sdpa_forward_ms" in row else ""))
        columns.append(("forward / sdpa's", lambda row: f"{row['forward_ms'] / row['sdpa_forward_ms']:.1f}" if "sdpa_forward_ms" in row else ""))
        lines += [f"## {device}", "", f"{measured_note(rows)[:-1]}: {record_link(source)}. PyTorch {rows[0]['torch']}.", "", *markdown(columns, rows)]
    return "\n".join(lines).rstrip("\n") + "\n"


INSTALL = """The times from `pip install` to the first gradient, by [tools/measure_install.py](../../tools/measure_install.py). In a virtual
environment that has only PyTorch, the tool runs `pip install WHEEL`, then a process that computes a gradient of causal_conv1d on the CPU.
All rows install the same wheel of `make wheel`.

| column | meaning |
|---|---|
| wheel | time of pip |
| import torch | time of `import torch` |
| import | time of `import cotangent` after it |
| first gradient | time from the first import of the process to the gradient, median of *runs* processes |
| cold | the same in the first process after the installation |
| OpenMP | the only OpenMP runtime in the process |"""

# What the peers' own pages say, not measured here.
INSTALL_PEERS = """## Other packages

Their own pages say:

| package | documented way |
|---|---|
| flash-attn ([README](https://github.com/Dao-AILab/flash-attention#installation-and-features)) | `pip install flash-attn --no-build-isolation`, after PyTorch, `packaging` and `ninja`. It compiles with the CUDA toolkit: 3 to 5 minutes on 64 cores, 2 hours without ninja. `MAX_JOBS` limits the memory on machines with less than 96 GB |
| causal-conv1d ([README](https://github.com/Dao-AILab/causal-conv1d)) | its README of commit 06e2d8f names none. PyPI has only its source, which compiles with the CUDA toolkit |
"""


def install_page(results):
    """docs/benchmarks/install.md, of tools/measure_install.py's rows."""
    lines = [GENERATED, "", "# Benchmarks: installing", "", "[How to install](../guide/install.md)", "", INSTALL, ""]
    for device in devices(results):
        if ("install", device) not in results:
            continue
        source, rows = results["install", device]
        lines += [f"## {device}", "", f"{measured_note(rows)[:-1]}: {record_link(source)}. The wheel has {rows[0]['wheel_bytes'] / 1e6:.1f} MB, "
                  f"installed {rows[0]['installed_bytes'] / 1e6:.1f} MB.", "", *markdown([
                      ("Python", lambda row: row["python"]), ("PyTorch", lambda row: row["torch"]), ("runs", lambda row: str(row["rounds"])),
                      column("wheel, s", "wheel_install_s", ".1f"), column("import torch, s", "import_torch_s", ".2f"),
                      column("import, s", "import_s", ".2f"), column("first gradient, s", "first_gradient_s", ".2f"),
                      column("cold, s", "cold_s", ".1f"),
                      ("pip install to first gradient, s", lambda row: f"{row['wheel_install_s'] + row['cold_s']:.1f}"),
                      ("OpenMP", lambda row: row["openmp"])], rows), ""]
    return "\n".join(lines) + INSTALL_PEERS


TRAINING = """Training steps of [`train_lm --backend cuda`](../../examples/train_lm/README.md), compared with PyTorch. [Its table of
presets](../../examples/train_lm/README.md#on-a-gpu) has the sizes of each model. PyTorch uses
torch.compile and its fastest attention ([train_gpt2.py](../../tools/peers/train_gpt2.py),
[train_hybrid.py](../../tools/peers/train_hybrid.py)). The two programs ran one after the other on one machine:
[measure_training.py](../../tools/measure_training.py).

- *Batch*: "2 x 32" is gradient accumulation over 2 batches of 32 sequences of T tokens in each step.
- A step is the forward and backward of these batches, gradient clipping, and AdamW.
- *MFU* is the model's operations per second divided by 989 TFLOP/s. Operations per token: 6 for each
  matrix weight, and 6 T width for each layer of causal attention.
- hybrid-mhc-130m is hybrid-130m with hyper-connections of 4 residual streams.
- PyTorch compiles the whole model of gpt2-124m and of hybrid-130m. In hybrid-mhc-130m it compiles each kind of block separately, together
  with the mhc_post of the block before it."""
RECOMPUTE = """Separate runs, with and without `--recompute`. With it, train_lm keeps only the input of each block for the backward, and computes the other activations again.
*Printed* is the memory that train_lm prints before it allocates. *Used* is the largest figure of nvidia-smi in the run. The
parameters after the run have the same bits with and without `--recompute`."""
LOSSES = """[compare_losses.py](../../tools/peers/compare_losses.py) trains GPT-2 in bf16 with both libraries, with the same batches and the
same initial weights. *Spread* is the largest minus the smallest loss of the seeds."""
GRADIENTS = """[compare_gradients.py](../../tools/peers/compare_gradients.py) compares the gradient of each parameter of gpt2-124m with
float64. *Ratio* is the error of cotangent divided by the error of PyTorch in the same dtype."""
ERRORS = """Errors of cotangent and of PyTorch against float64, by [accuracy.py](../../tools/peers/accuracy.py), which has the formulas of
PyTorch. On a GPU PyTorch has its defaults: TF32 in convolutions, none in matrix products. An error is the norm of (result - exact) divided by the norm of exact. *Rounding alone* is the error of the exact result,
rounded to the output's dtype. Gradients are those of random gradients of the outputs."""
PEAK = 989e12
LAYERS, WIDTH, VOCABULARY = 12, 768, 50304  # of gpt2-124m


def training_speed(rows):
    def utilisation(row):
        flops = 6 * (12 * LAYERS * WIDTH**2 + VOCABULARY * WIDTH) + 6 * LAYERS * WIDTH * row["context"]
        return f"{100 * row.get('mfu', row['tokens_per_second'] * flops / PEAK):.1f} %"

    def ratio(row):
        peers = [r for r in rows if r["library"] != "cotangent" and all(r[k] == row[k] for k in ("model", "context", "batch", "accumulate"))]
        return f"{row['tokens_per_second'] / peers[0]['tokens_per_second']:.2f}" if peers and row["library"] == "cotangent" else ""
    return markdown([
        ("model", lambda row: row["model"]), column("T", "context", "d"),
        ("batch", lambda row: f"{row['accumulate']} x {row['batch']}"),
        ("library", lambda row: row["library"] + (f", attention by {row['attention']}" if "attention" in row else "")),
        column("tokens/s", "tokens_per_second", ".0f"), ("MFU", utilisation), ("cotangent / PyTorch", ratio)], rows)


def streams_cost(rows):
    """What mHC adds to the time of a step, for each library."""
    for row in rows:
        plain = [r for r in rows if r["model"] == "hybrid-130m" and all(r[k] == row[k] for k in ("library", "context", "batch", "accumulate"))]
        if row["model"] == "hybrid-mhc-130m" and plain:
            share = plain[0]["tokens_per_second"] / row["tokens_per_second"] - 1
            yield f"- {row['library']}: the 4 streams of hybrid-mhc-130m add {100 * share:.1f} % to the time of a step of hybrid-130m."


def losses_of(rows):
    seeds = sorted({row["seed"] for row in rows})
    lines = []
    for loss in "training", "validation":
        for library in dict.fromkeys(row["library"] for row in rows):
            values = [row[loss] for row in rows if row["library"] == library]
            lines.append({"loss": loss, "library": library, "values": values, "mean": sum(values) / len(values),
                          "spread": max(values) - min(values)})
    return markdown([("loss", lambda row: row["loss"]), ("library", lambda row: row["library"]),
                     *[(f"seed {seed}", lambda row, i=i: f"{row['values'][i]:.4f}") for i, seed in enumerate(seeds)],
                     column("mean", "mean", ".4f"), column("spread", "spread", ".4f")], lines)


def training_rows(results, device):
    def records_of(op):
        source, rows = results[op, device]
        return source, rows, f"{measured_note(rows)[:-1]}: {record_link(source)}."
    source, rows, note = records_of("training")
    lines = [note, "", *training_speed([row for row in rows if "used_gb" not in row])]
    cost = list(streams_cost([row for row in rows if "used_gb" not in row]))
    lines += [*cost, ""] if cost else []
    if memory := [row for row in rows if "used_gb" in row]:
        lines += [RECOMPUTE, "", *markdown([
            ("model", lambda row: row["model"]), ("`--recompute`", lambda row: "yes" if row["recompute"] else ""),
            ("batch", lambda row: f"{row['accumulate']} x {row['batch']}"), column("tokens/s", "tokens_per_second", ".0f"),
            column("printed, GB", "printed_gb", ".2f"), column("used, GB", "used_gb", ".2f")], memory)]
    if ("training_loss", device) in results:
        source, rows, note = records_of("training_loss")
        row = rows[0]
        texts = {other[0]["tokens"] for (op, _), (_, other) in results.items() if op == "training_loss"}
        other_texts = "The devices of this page had different texts: compare losses only inside a table. " if len(texts) > 1 else ""
        lines += [f"{LOSSES} The model has {row['layers']} layers of width {row['width']}. A run has {row['steps']} steps of {row['batch']} "
                  f"sequences of {row['context']} bytes, of a training text of {row['tokens']} bytes. {other_texts}The training loss is the mean of "
                  f"the last 50 steps. {note}", "", *losses_of(rows)]
    if ("training_gradients", device) in results:
        source, rows, note = records_of("training_gradients")
        lines += [GRADIENTS + ("" if all("median" in row for row in rows) else " This record has no median.") + f" {note}", "", *markdown([
            ("dtype", lambda row: row["dtype"]), column("parameters", "parameters", "d"), column("largest ratio", "ratio", ".3f"),
            ("parameter of this ratio", lambda row: f"`{row['parameter']}`"), column("median", "median", ".3f")], rows)]
    return lines


TRAINING_GPUS = """Data parallel training with `train_lm --gpus N`, by [measure_training_gpus.py](../../tools/measure_training_gpus.py). All runs
have the same batches of a generated text. Two runs on the largest number of GPUs had the same parameters, bit by bit."""
TRAINING_CONTEXT = """Each sequence divided over N GPUs with `train_lm --gpus N --context-ranks N`, by the same tool with `--context`. A step with one GPU
is a CUDA graph, the others are not. The sum of the gradients follows the backward: it does not overlap with it. Two runs on the largest
number of GPUs had the same parameters, bit by bit."""


def training_gpus_rows(results, device, op, title, text):
    source, rows = results[op, device]
    one = {row["program"]: row["tokens_per_second"] for row in rows if row["gpus"] == 1}
    return [title, "", f"{text} {measured_note(rows)[:-1]}: {record_link(source)}.", "",
            *markdown([("program", lambda row: f"`{row['program']}`"), ("GPUs", lambda row: str(row["gpus"])),
                       ("tokens/s", lambda row: str(row["tokens_per_second"])),
                       ("times one GPU", lambda row: f"{row['tokens_per_second'] / one[row['program']]:.2f}" if row["program"] in one else ""),
                       ("memory of a GPU, GB", lambda row: f"{row['printed_gb']:.2f}"),
                       ("training loss", lambda row: f"{row['training_loss']:.5f}"),
                       ("validation loss", lambda row: f"{row['validation_loss']:.5f}")], rows), ""]


def scientific(key):
    """An error as 2.9e-8."""
    return lambda row: re.sub("e([-+])0", r"e\1", f"{row[key]:.1e}") if row[key] else "0"


def errors_page(results):
    """docs/benchmarks/accuracy.md, of tools/peers/accuracy.py's rows."""
    lines = [GENERATED, "", "# Benchmarks: accuracy", "", "[What the figures mean](../guide/accuracy.md)", "", ERRORS, ""]
    for device in devices(results):
        if ("accuracy", device) in results:
            source, rows = results["accuracy", device]
            lines += [f"## {device}", "", f"{measured_note(rows)[:-1]}: {record_link(source)}. {rows[0]['peer']}.", ""]
            for case in dict.fromkeys((row["of"], row["case"]) for row in rows):
                lines += [f"{case[0]}, {case[1]}:", "", *markdown([
                    ("dtype", lambda row: row["dtype"]), ("output", lambda row: f"`{row['output']}`"), ("rounding alone", scientific("rounding")),
                    ("cotangent", scientific("error")), ("PyTorch", scientific("peer_error"))],
                    [row for row in rows if (row["of"], row["case"]) == case])]
    return "\n".join(lines).rstrip("\n") + "\n"


TORCH_DTYPES = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}  # for pages of PyTorch


def errors_summary(results):
    """The largest error of the outputs and of the gradients, for each device, op and dtype."""
    tables = [errors_of(rows) for (op, _), (_, rows) in sorted(results.items()) if op == "accuracy"]
    return "\n\n".join(tables)


def errors_of(rows):
    lines = []
    for case in dict.fromkeys((row["of"], row["case"], row["dtype"]) for row in rows):
        parts = [row for row in rows if (row["of"], row["case"], row["dtype"]) == case]
        gradients = [row for row in parts if row["output"].startswith("d")]
        outputs = [row for row in parts if row not in gradients]
        lines.append({"of": case[0], "dtype": case[2]} | {
            f"{key}_{part}": max(row[key] for row in some) for part, some in (("outputs", outputs), ("gradients", gradients))
            for key in ("rounding", "error", "peer_error")})
    columns = [("op", lambda row: row["of"]), ("dtype", lambda row: TORCH_DTYPES[row["dtype"]])]
    for part in "outputs", "gradients":
        columns += [(f"{part}: {name}", scientific(f"{key}_{part}")) for name, key in
                    (("rounding alone", "rounding"), ("cotangent", "error"), ("PyTorch", "peer_error"))]
    return "\n".join([f"{rows[0]['device']}, {measured_note(rows)[:-1]}, {rows[0]['peer']}:", "",
                      *markdown(columns, sorted(lines, key=lambda row: OPS.index(row["of"])))])


def gradients_summary(results):
    """The gradients of a whole model, of the newest record."""
    _, rows = max((found for (op, _), found in results.items() if op == "training_gradients"), key=lambda found: found[0])
    return "\n".join([f"{rows[0]['model']}, {rows[0]['device']}, {measured_note(rows)[:-1]}, {rows[0]['peer']}:", "", *markdown([
        ("dtype", lambda row: TORCH_DTYPES[row["dtype"]]), column("parameters", "parameters", "d"), ("error of cotangent", scientific("error")),
        ("error of PyTorch", scientific("peer_error")), column("ratio", "ratio", ".3f"), ("parameter of this ratio", lambda row: f"`{row['parameter']}`"),
        column("median of the ratios", "median", ".3f")], rows)])


def training_page(results):
    """docs/benchmarks/training.md."""
    lines = [GENERATED, "", "# Training in C (train_lm) against PyTorch", "", TRAINING, ""]
    for device in devices(results):
        if ("training", device) in results:
            lines += [f"## {device}", "", *training_rows(results, device)]
        for op, title, text in (("training_gpus", "### Several GPUs", TRAINING_GPUS),
                                ("training_context", "### Long sequences on several GPUs", TRAINING_CONTEXT)):
            if (op, device) in results:
                lines += training_gpus_rows(results, device, op, title, text)
    return "\n".join(lines).rstrip("\n") + "\n"


# Pages that are not of an op: {page: (the op of its records, title, function)}.
OTHER_PAGES = {
    "transformers": ("transformers", "models of transformers", models_page),
    "attention_options": ("attention_options", "attention by option", attention_options_page),
    "accuracy": ("accuracy", "accuracy", errors_page),
    "training": ("training", "training in C (train_lm) against PyTorch", training_page),
    "parallel": ("parallel_attention", "context parallelism", parallel_page),
    "install": ("install", "installing", install_page),
}


def has_records(op, results):
    return any(key[0] == op for key in results)


def attention_means(results, peers):
    """The ratios of all devices that peers were timed on."""
    means = []
    for device in devices(results):
        rows, peer_rows = (found.get(("attention", device), ("", []))[1] for found in (results, peers))
        if rows and peer_rows and rows[0]["backend"] == "cuda":
            means += mean_rows(device, attention_ratios(attention_cells(attention_entries(rows, peer_rows))))
        elif rows and peer_rows:
            collected = {}
            for row, own, times in beside_peers(rows, peer_rows):
                for name, ms in times.items():
                    collected.setdefault((device, row["direction"], f"cotangent / {name}"), []).append(ms / own["ms"])
            means += [(*key, values) for key, values in collected.items()]
    return ["## Geometric means", "", *means_table(means)] if means else []


def page(name, results, peers, directory):
    title, ops, text = PAGES[name]
    lines = [text.replace("MAMBA_RATIO", mamba_ratio(results)), ""]
    if name == "attention":
        lines += attention_means(results, peers)
    for device in devices(results):
        found = [op for op in ops if (op, device) in results]
        if not found:
            continue
        lines += [f"## {device}{threads_note(results[found[0], device][1])}", ""]
        svg = picture(name, device, results)
        lines += [f"![{title} on {device}]({svg})", ""] if svg else []
        for op in found:
            lines += [f"### {op}", ""] if len(ops) > 1 else []
            lines += op_section(op, device, results, peers, directory, "####" if len(ops) > 1 else "###")
    body = "\n".join(lines + (accuracy(results) if name == "mhc" else [])).rstrip("\n") + "\n"
    return "\n".join([GENERATED, "", f"# Benchmarks: {title}", "", f"[The op](../../src/ops/{name}/README.md) · "
                      "[how it is measured](README.md) · [words, columns, options, *+* after a commit](README.md#words-and-columns)", "", body])


def measured(results):
    """The names of the pages whose ops have records."""
    return [name for name, (_, ops, _) in PAGES.items() if any(op in ops for op, _ in results)]


def index(results, peers):
    """docs/benchmarks/README.md and records.md."""
    ops = [op for _, listed, _ in PAGES.values() for op in listed] + ["mhc_accuracy"] + [op for op, _, _ in OTHER_PAGES.values()]
    pages = {op: name for name, (_, listed, _) in PAGES.items() for op in listed} | {"mhc_accuracy": "mhc"}
    pages |= {op: name for name, (op, _, _) in OTHER_PAGES.items()}

    def cell(op, device):
        links = [f"[{text}](../../bench/results/{found[op, device][0]})" for found, text in
                 ((results, ", ".join(sorted({row["date"] for row in results.get((op, device), ("", []))[1]}))), (peers, "peers")) if (op, device) in found]
        return ", ".join(links)
    others = [f"[{title}]({name}.md)" for name, (op, title, _) in OTHER_PAGES.items() if has_records(op, results)]
    columns = [("op", lambda op: f"[{op}]({pages[op]}.md)")]
    columns += [(device, lambda op, device=device: cell(op, device)) for device in devices(results)]
    lines = [GENERATED, "", "# Benchmarks", "", "Pages: " + " · ".join([f"[{PAGES[name][0]}]({name}.md)" for name in measured(results)] + others) + ".", "", README]
    records_page = [GENERATED, "", "# Benchmarks: records", "", "The files that [the pages](README.md) are made from: the newest of each device and op.", "",
                    *markdown(columns, [op for op in ops if has_records(op, results)])]
    return ["\n".join(page_lines).rstrip("\n") + "\n" for page_lines in (lines, records_page)]


# ---- the README's table


# Cases of each op on the newest H200 record: op, words of the case for the reader, dtype, layout, shape, words of the
# options.
FRONT = [
    ("attention", "d=128 causal T=8192", "bf16", "bthd", "B2 H16/16 T8192/8192 d128/128", "causal"),
    ("attention", "d=128 full T=8192", "bf16", "bthd", "B2 H16/16 T8192/8192 d128/128", "full"),
    ("causal_conv1d", "B8 D4096 T4096 SiLU", "bf16", "channel-first", "B8 D4096 T4096 K4", "silu"),
    ("causal_conv1d_dense", "2048 to 2048 channels", "bf16", "channel-last", "B4 Din2048 Dout2048 T4096 K4", "silu"),
    ("dropout", "R32768 D4096 bias (forward: + residual)", "bf16", "contiguous", "R32768 D4096", "none+bias p=0.1 generated"),
    ("mhc_pre", "n=4 D=4096 without Sinkhorn", "bf16", "token-major", "B1 T8192 n4 D4096", "phi~1/nD"),
    ("mhc_sinkhorn", "n=4 T=8192 f32", "f32", "token-major", "B1 T8192 n4", ""),
    ("mhc_post", "n=4 D=4096", "bf16", "token-major", "B1 T8192 n4 D4096", ""),
]


def front_row(case, direction, rows):
    """The row of a case of FRONT in the deterministic mode, or None."""
    op, _, dtype, layout, shape, words = case

    def wanted(row):
        options = row["options"].replace("+residual", "")
        return (row["chosen"] and (row["direction"], row["dtype"], row["layout"], row["shape"]) == (direction, dtype, layout, shape)
                and (options == words if op == "attention" else words in options)
                and "nondeterministic" not in row["options"])
    return next((row for row in rows if wanted(row)), None)


def front_cell(op, bench_row, peer_rows):
    """What a row reaches, and how many times as fast as the fastest peer it is. The figures are those of the op's page: bandwidth
    and us are those of the bench, ratios those of the peers' process, and attention's TFLOP/s too."""
    if bench_row is None:
        return ""
    row = from_peers_run(bench_row, peer_rows)
    if op in PRODUCT_BOUND:
        reached = f"{attention_rate(row) if op == 'attention' else row['tflops']:.0f} TFLOP/s"
        reached += f", {row['product_ratio']:.2f} of GEMM" if op != "attention" else ""
    else:
        reached = f"{1e3 * bench_row['ms']:.0f} us" if op == "mhc_sinkhorn" else f"{bench_row['ratio']:.2f} of copy"
    same = [peer for peer in peer_rows if not peer.get("ours") and same_work(peer) == same_work(row)]
    if not same:
        return reached

    def ratio(peer):
        value = peer["ms"] / row["ms"]
        return f"{value:.{1 if value > 1.5 else 2}f}x"
    best = min(same, key=lambda peer: peer["ms"])
    cell = f"{reached}, {ratio(best)} {short_name(best['kernel'])}"
    if op == "attention" and row["direction"] == "backward":
        # A deterministic peer is the equal of our default.
        for peer in same:
            if "deterministic" in peer["kernel"] and peer is not best:
                cell += f", {ratio(peer)} {short_name(peer['kernel'])}"
    return cell.replace("FlashAttention-", "FA")


def lowest_ratios(device, results, peers):
    """Names attention's lowest ratio to a peer in each direction."""
    rows, peer_rows = (found.get(("attention", device), ("", []))[1] for found in (results, peers))
    ratios = [(ratio, group, own, peer, T) for group, own, peer, values in
              attention_ratios(attention_cells(attention_entries(rows, peer_rows))) for T, ratio in values.items() if own == "cotangent"]
    parts = []
    for direction in ("forward", "backward"):
        if found := [ratio for ratio in ratios if ratio[1][0] == direction]:
            ratio, _, _, peer, _ = min(found)
            parts.append((peer, sum(other == peer for _, _, _, other, _ in found), f"{ratio:.2f}x {direction}"))
    if not parts:
        return []
    if len({(peer, cases) for peer, cases, _ in parts}) == 1:
        lengths = [T for *_, T in ratios]
        sizes = ", ".join(map(str, sorted({group[1] for _, group, *_ in ratios})))
        text = (f" to {parts[0][0].replace('FlashAttention-', 'FA')} in {parts[0][1]} cases (d {sizes}; T {min(lengths)} to "
                f"{max(lengths)}): " + ", ".join(value for _, _, value in parts))
        others = [(rates["cotangent"] / rates[parts[0][0]], row["direction"]) for row, rates in other_cases(peer_rows) if parts[0][0] in rates]
        text += ". Lowest of other cases (GQA, packing, windows): {:.2f}x {}".format(*min(others)) if others else ""
    else:
        text = ": " + ", ".join(f"{value} to {peer} in {cases} cases" for peer, cases, value in parts)
    return [f"Lowest [attention ratio](docs/benchmarks/attention.md){text}.", ""]


def front(results, peers):
    """One line an op, of the newest H200."""
    device = next((device for device in devices(results) if "H200" in device), None)
    lines, dates = ["| op | forward | backward |", "|---|---|---|"], set()
    for case in FRONT:
        op, words, *_ = case
        rows, peer_rows = (found.get((op, device), ("", []))[1] for found in (results, peers))
        forward, backward = (front_row(case, direction, rows) for direction in ("forward", "backward"))
        if forward or backward:
            lines.append(f"| {op} {words} | {front_cell(op, forward, peer_rows)} | {front_cell(op, backward, peer_rows)} |")
            dates |= {row["date"] for row in rows + peer_rows}
    if not dates:
        return "Nothing measured yet.\n"
    span = " to ".join(dict.fromkeys((min(dates), max(dates))))
    kernels = sorted(row["kernel"] for row in peers.get(("attention", device), ("", []))[1] if row["kernel"].startswith("FlashAttention-4"))
    version = kernels[0].split()[1] if kernels else ""
    beta = ", beta" if re.search(r"\db\d", version) else ""
    peer = f" {version}{beta}" if version else ""
    return "\n".join([f"On an {device.removeprefix('NVIDIA ')}, {span}, bf16 unless noted. Attention: batch x tokens = 16384, heads x d = 2048.",
                      "", "- *1.08x FA4*: cotangent's speed / FA4's. All cotangent rows are deterministic.",
                      f"- Peers: cuDNN, FA4 (FlashAttention-4{peer}); backward also FA3 (FlashAttention-3).",
                      "- Not timed: FA3's forward, FlashAttention-2.",
                      "- Backward: first ratio against the fastest nondeterministic default, next against deterministic peers.",
                      "- *0.98 of copy*: 98 % of a copy's bandwidth. *0.73 of GEMM*: 73 % of a matrix product's rate.",
                      "- *torch.compile taps*: a sum of K shifted products of x.",
                      "", *lines, "",
                      *lowest_ratios(device, results, peers)]) + "\n"


def gains(results, peers):
    """Attention's default mode beside each peer on the newest H200, means of the papers' setting."""
    device = next(device for device in devices(results) if "H200" in device)
    rows, peer_rows = (found.get(("attention", device), ("", []))[1] for found in (results, peers))
    means = mean_rows(device, [ratio for ratio in attention_ratios(attention_cells(attention_entries(rows, peer_rows))) if ratio[1] == "cotangent"])
    return "\n".join(means_table(means)).rstrip("\n") + "\n"


def table(name, results, peers, directory):
    """A page or a table by its name."""
    if name == "front":
        return front(results, peers)
    if name == "gains":
        return gains(results, peers)
    if name in OTHER_PAGES:
        return OTHER_PAGES[name][2](results)
    if name == "models":
        return models_summary(results)
    if name == "errors":
        return errors_summary(results)
    if name == "gradients":
        return gradients_summary(results)
    if name == "train_lm":
        return trained(directory)
    if name in SEEDS or name == "shared_memory":
        return seed_table(name, results, directory)
    for page_name, (_, ops, _) in PAGES.items():
        if name == page_name or name in ops:
            return page(page_name, results, peers, directory)
    sys.exit(f"make_tables.py: there is no table or page '{name}'")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, and fail if a file is stale")
    parser.add_argument("--print", metavar="NAME", help="print a page or a table")
    parser.add_argument("--results", metavar="DIR", type=pathlib.Path, default=ROOT / "bench/results")
    options = parser.parse_args()
    results, peers = newest_results(options.results)
    if options.print:
        print(table(options.print, results, peers, options.results))
        return
    pages = ROOT / "docs/benchmarks"
    texts = {pages / f"{name}.md": page(name, results, peers, options.results) for name in measured(results)}
    texts |= {pages / f"{name}.md": write(results) for name, (op, _, write) in OTHER_PAGES.items() if has_records(op, results)}
    texts[pages / "README.md"], texts[pages / "records.md"] = index(results, peers)
    for path in (ROOT / "README.md", ROOT / "docs/original_specifications.md", ROOT / "docs/guide/accuracy.md",
                 ROOT / "docs/guide/replace.md", ROOT / "docs/guide/transformers.md", ROOT / "examples/train_lm/README.md"):
        texts[path] = MARKERS.sub(lambda m: m[1] + table(m[2], results, peers, options.results) + m[3], path.read_text())
    stale = [path for path, text in texts.items() if not path.exists() or path.read_text() != text]
    names = ", ".join(str(path.relative_to(ROOT)) for path in stale)
    if options.check and stale:
        sys.exit("not generated by tools/make_tables.py: " + names)
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(texts[path])
    print("tables:", names or "up to date")


if __name__ == "__main__":
    main()
