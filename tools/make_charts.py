#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of docs/benchmarks from bench/results/*.json, through gnuplot.

    tools/make_charts.py

DEVICE-PAGE.svg has bars of the rate of each library for each case, with a black line at the ceiling that was measured: the copy
of as many bytes, or matrix products alone. attention-front.svg is the picture of README.md. Axes are linear and begin at 0.
"""
import pathlib
import subprocess
import sys

from make_tables import (PAGES, PRODUCT_BOUND, ROOT, attention_cells, attention_entries, attention_place, devices, from_peers_run,
                         library_of, newest_results, picture, product_rates, same_work)

# A hue a library; the lighter tone is its other mode.
COLOURS = {"cotangent": "#1f4e9c", "cotangent, nondeterministic": "#7fb2ea", "FlashAttention-4": "#d9541e",
           "FlashAttention-4 deterministic": "#f4b183", "FlashAttention-3": "#7b3fa0", "FlashAttention-3 deterministic": "#c3a5d6",
           "cuDNN": "#5a9e3d", "torch.compile taps": "#d9541e", "torch.compile": "#f0a83c", "torch eager": "#9a9a9a",
           "torch sdpa": "#9a9a9a", "causal-conv1d": "#5a9e3d"}
OTHERS = ["#5a9e3d", "#7b3fa0", "#2a9d8f", "#b5651d"]
WIDTH, GLYPH = 1000, 6.3  # pixels of a picture, and of a character of 11 points


def colours_of(names):
    """{library: colour}; libraries without a colour of their own take those of OTHERS."""
    free = iter(OTHERS * len(names))
    return {name: COLOURS.get(name) or next(free) for name in names}


def legend(entries, y, width, height):
    """A row of colour patches with names at `y` pixels below the top; entries: [(name, colour, or None for the ceiling's line)]."""
    script, x = [], 20
    for name, colour in entries:
        if colour:
            script.append(f"set object rect from screen {x / width:.4f}, screen {1 - (y + 5) / height:.4f} to screen "
                          f"{(x + 12) / width:.4f}, screen {1 - (y - 5) / height:.4f} fc rgb '{colour}' fs solid 1 noborder")
        else:
            script.append(f"set arrow from screen {x / width:.4f}, screen {1 - y / height:.4f} to screen {(x + 14) / width:.4f}, "
                          f"screen {1 - y / height:.4f} nohead lw 2 lc rgb 'black'")
        script.append(f'set label "{name}" at screen {(x + 18) / width:.4f}, screen {1 - y / height:.4f} left font ",11"')
        x += 18 + len(name) * GLYPH + 22
    return script


def begin(path, title, entries, width, height):
    return [f"set terminal svg size {width},{height} font 'Arial,11' background '#ffffff' noenhanced",
            f"set output '{path}.partial'", "set multiplot", "set style fill solid 1 noborder", "unset key", "set tics nomirror out scale 0.5",
            "set border 3 lc rgb '#808080'", "set xtics textcolor rgb 'black'", "set ytics textcolor rgb 'black'",
            f'set label "{title}" at screen {20 / width:.4f}, screen {1 - 16 / height:.4f} left font ",13"',
            *legend(entries, 38, width, height)]


def place(left, top, right, bottom, width, height):
    """The plot's area in pixels from the upper left corner."""
    return [f"set lmargin at screen {left / width:.4f}", f"set rmargin at screen {right / width:.4f}",
            f"set tmargin at screen {1 - top / height:.4f}", f"set bmargin at screen {1 - bottom / height:.4f}"]


AFTER_FIRST = ["unset object", "unset label", "unset arrow"]  # those of the whole picture: once is enough


def finish(path, script):
    subprocess.run(["gnuplot"], input="\n".join(script + ["unset multiplot", "unset output"]) + "\n", text=True, check=True)
    pathlib.Path(f"{path}.partial").rename(path)


def nice_top(value):
    """The end of an axis: a multiple of 1, 2 or 5 times a power of 10, and the distance of its ticks."""
    step = 10.0 ** (len(str(int(value))) - 1) if value >= 1 else 0.1
    while value / step < 4:
        step /= 2 if str(step)[0] in "12" else 2.5
    ticks = int(value * 1.02 / step) + 1
    return ticks * step, step


def length_name(T):
    return f"{T // 1024}k" if T >= 1024 else str(T)


def columns_panel(title, libraries, lengths, names, colours, products, top, step, box, size, y_axis):
    """Grouped bars over sequence length; libraries: {name: {T: TFLOP/s}}."""
    present = [name for name in names if name in libraries]
    bar = 0.84 / len(present)
    script = place(*box, *size) + [
        f'set title "{title}" font ",12" offset 0,-0.6', f"set yrange [0:{top:g}]", f"set xrange [-0.6:{len(lengths) - 0.4:g}]",
        f"set ytics {step:g} format '{'%g' if y_axis else ''}'", f"set ylabel '{'TFLOP/s' if y_axis else ''}' offset 1,0",
        "set grid ytics lc rgb '#e0e0e0' lw 1", "set xtics (" + ", ".join(f'"{length_name(T)}" {i}' for i, T in enumerate(lengths)) + ") offset 0,0.4"]
    plots = []
    for number, name in enumerate(present):
        shift = (number - (len(present) - 1) / 2) * bar
        script += [f"$bars{number} << END", *(f"{i + shift:.4f} {libraries[name][T]:.1f}" for i, T in enumerate(lengths)
                                             if T in libraries[name]), "END"]
        plots.append(f"$bars{number} using 1:2:({0.92 * bar:.4f}) with boxes lc rgb '{colours[name]}'")
    lines = [f"{i - 0.46:.2f} {products[T]:.1f} 0.92 0" for i, T in enumerate(lengths) if T in products]
    if lines:
        script += ["$ceiling << END", *lines, "END"]
        plots.append("$ceiling using 1:2:3:4 with vectors nohead lw 2 lc rgb 'black'")
    return script + ["plot " + ", ".join(plots)]


def library_order(cells):
    """Every library of the panels, in the order of COLOURS."""
    names = list(dict.fromkeys(name for libraries in cells.values() for name in libraries))
    return [name for name in COLOURS if name in names] + [name for name in names if name not in COLOURS]


def span_of(rows):
    """When these rows were measured: a date, or the first and the last one."""
    dates = sorted({row["date"] for row in rows})
    return " to ".join(dict.fromkeys((dates[0], dates[-1])))


def attention_picture(path, device, date, cells, products, only=None):
    """Panels of direction and mask below each other, head dimensions next to each other; or, `only`, those of the README."""
    names = library_order(cells)
    colours = colours_of(names)
    entries = [(name, colours[name]) for name in names] + ([("matrix products", None)] if products else [])
    rows = [only] if only else [[(direction, d, mask) for d in sorted({group[1] for group in cells})]
                                for direction in ("forward", "backward") for mask in ("full", "causal")]
    columns = max(map(len, rows))
    width, height = (900, 320) if only else (WIDTH, 78 + 208 * len(rows))
    title = f"Attention on {device}, bf16, {'d = 128, causal, ' if only else ''}16k tokens, {date}"
    highest = max([rate for libraries in cells.values() for rates in libraries.values() for rate in rates.values()]
                  + list(products.values()))
    top, step = nice_top(highest)
    lengths = sorted({T for libraries in cells.values() for rates in libraries.values() for T in rates})
    script = begin(path, title, entries, width, height)
    across, down = (width - 60) / columns, (height - 75) / len(rows)
    first = True
    for line, groups in enumerate(rows):
        for number, group in enumerate(groups):
            if group not in cells:
                continue
            left, upper = 58 + number * across, 55 + line * down
            box = left, upper + 24, left + across - 14, upper + down - 30
            direction, d, mask = group
            script += AFTER_FIRST if not first else []
            script += [f"set xlabel '{'sequence length T' if line == len(rows) - 1 else ''}' offset 0,0.8"]
            script += columns_panel(direction if only else f"{direction}, {mask}, d = {d}", cells[group], lengths, names, colours,
                                    products, top, step, box, (width, height), number == 0)
            first = False
    finish(path, script)


def case_name(row):
    """dtype, shape, layout and options, as short as they are clear."""
    layout = {"channel-first": "ch-first", "channel-last": "ch-last"}.get(row["layout"], "")
    options = [word for word in row["options"].removesuffix("+nondeterministic").replace(" p=0.1", "").replace(" ", "+").split("+")
               if not word.startswith(("w=", "phi~1/nD", "h_res[")) and word not in ("bias", "none", "residual", "full", "dh_res_logits")]
    return " ".join(filter(None, [row["dtype"], row["shape"].removeprefix("B1 ") if row["op"].startswith("mhc") else row["shape"],
                                  layout, *options]))


def bars_panel(title, unit, cases, names, colours, top, step, box, size, ceiling_name):
    """Bars of cases below each other; cases: [(label, {library: rate}, ceiling or None, share or None)]."""
    script = place(*box, *size) + [
        f'set title "{title}" font ",12" offset 0,-0.6', f"set xrange [0:{top:g}]", f"set yrange [{len(cases) - 0.4:g}:-0.6]",
        f"set xtics {step:g} format '%g' offset 0,0.4", f"set xlabel '{unit}' offset 0,0.9", "set ylabel ''", "set grid xtics lc rgb '#e0e0e0' lw 1",
        "set ytics (" + ", ".join(f'"{label}" {i}' for i, (label, *_) in enumerate(cases)) + ") font ',10'"]
    boxes, largest = {}, max(len(rates) for _, rates, _, _ in cases)
    for i, (_, rates, _, _) in enumerate(cases):
        present = [name for name in names if name in rates]
        bar = 0.8 / max(largest, 2)
        for number, name in enumerate(present):
            y = i + (number - (len(present) - 1) / 2) * bar
            boxes.setdefault(name, []).append(f"{rates[name] / 2:.6g} {y:.4f} {rates[name] / 2:.6g} {0.46 * bar:.4f}")
    plots = []
    for number, (name, lines) in enumerate(boxes.items()):
        script += [f"$bars{number} << END", *lines, "END"]
        plots.append(f"$bars{number} using 1:2:3:4 with boxxyerror lc rgb '{colours[name]}'")
    ceilings = [f"{ceiling:.6g} {i - 0.45:.2f} 0 0.9" for i, (_, _, ceiling, _) in enumerate(cases) if ceiling]
    if ceilings:
        script += ["$ceiling << END", *ceilings, "END"]
        plots.append("$ceiling using 1:2:3:4 with vectors nohead lw 2 lc rgb 'black'")
    shares = [f'{i} "{share:.0%}"' for i, (_, _, _, share) in enumerate(cases) if share is not None]
    if shares:
        script += ["$shares << END", *shares, "END"]
        script.append(f'set label 99 "of {ceiling_name.split()[-1]}" at graph 1, graph 1 left offset 0.8,0.6 font ",10"')
        plots.append(f"$shares using ({top:g}):1:2 with labels left offset 0.8,0 font ',10'")
    return script + ["plot " + ", ".join(plots)]


def panels_of(op, rows, peer_rows):
    """[(direction, unit, cases)] of an op whose cases have no common axis of sizes."""
    gpu = rows[0]["backend"] == "cuda"
    products = op in PRODUCT_BOUND
    panels = []
    for direction in PRODUCT_BOUND.get(op) or dict.fromkeys(row["direction"] for row in rows):
        cases = []
        for row in [from_peers_run(row, peer_rows) for row in rows if row["direction"] == direction and row["chosen"]]:
            scale = 1e-3 if gpu else 1
            rate = row["tflops"] if products else scale * row["gbps"]
            ceiling = row.get("product_ceiling") if products else scale * row["ceiling"]
            rates = {"cotangent": rate} | {library_of(peer): rate * row["ms"] / peer["ms"] for peer in peer_rows
                                           if not peer.get("ours") and same_work(peer) == same_work(row)}
            cases.append((case_name(row), rates, ceiling, ceiling and rate / ceiling))
        if cases:
            panels.append((direction, "TFLOP/s" if products else "TB/s" if gpu else "GB/s", cases))
    return panels


def cases_picture(path, title, ceiling_name, panels):
    """Panels below each other; panels: [(title, unit, cases)]."""
    names = library_order({number: rates for number, (_, rates, _, _) in enumerate(case for *_, cases in panels for case in cases)})
    colours = colours_of(names)
    has_ceiling = any(ceiling for *_, cases in panels for _, _, ceiling, _ in cases)
    entries = [(name, colours[name]) for name in names] + ([(ceiling_name, None)] if has_ceiling else [])
    group = max(18, 8 * max(len(rates) for *_, cases in panels for _, rates, _, _ in cases))
    label = 5.8 * max(len(case[0]) for *_, cases in panels for case in cases) + 16
    height = int(60 + sum(74 + group * len(cases) for *_, cases in panels))
    top, step = nice_top(max(value for *_, cases in panels for _, rates, ceiling, _ in cases for value in (*rates.values(), ceiling or 0)))
    script, y = begin(path, title, entries, WIDTH, height), 55
    for number, (name, unit, cases) in enumerate(panels):
        script += AFTER_FIRST if number else []
        script += bars_panel(name, unit, cases, names, colours, top, step,
                             (label, y + 24, WIDTH - 76, y + 24 + group * len(cases)), (WIDTH, height), ceiling_name)
        y += 74 + group * len(cases)
    finish(path, script)


def main():
    if sys.argv[1:]:
        sys.exit("usage: make_charts.py")
    results, peers = newest_results(ROOT / "bench/results")
    directory = ROOT / "docs/benchmarks"
    directory.mkdir(exist_ok=True)
    drawn, front = [], False
    for page, (title, ops, _) in PAGES.items():
        for device in devices(results):
            name = picture(page, device, results)
            if name is None:
                continue
            found = [(op, results[op, device][1], peers.get((op, device), ("", []))[1]) for op in ops if (op, device) in results]
            rows, peer_rows = found[0][1:]
            if page == "attention" and rows[0]["backend"] == "cuda":
                entries = attention_entries(rows, peer_rows)
                cells, products = attention_cells(entries), product_rates(entries) or product_rates(rows)
                attention_picture(directory / name, device, span_of(entries), cells, products)
                if "H200" in device and not front:
                    front = True
                    groups = [(direction, 128, "causal") for direction in ("forward", "backward")]
                    # Each library in its default mode. For these cases, ours runs the same kernel in both modes.
                    cells = {group: {library: rates for library, rates in cells[group].items() if "deterministic" not in library}
                             for group in groups}
                    shown = [row for row in entries if attention_place(row)[0] in groups and "deterministic" not in library_of(row)]
                    attention_picture(directory / "attention-front.svg", device, span_of(shown), cells, products, groups)
                    drawn.append("attention-front.svg")
            else:
                panels = [(f"{op}, {direction}" if len(ops) > 1 else direction, unit, cases)
                          for op, rows, peer_rows in found if op != "mhc_sinkhorn"
                          for direction, unit, cases in panels_of(op, rows, peer_rows)]
                date = span_of([row for _, rows, peer_rows in found for row in rows + peer_rows])
                ceiling = "matrix products" if ops[0] in PRODUCT_BOUND else "memory copy"
                cases_picture(directory / name, f"{title.replace(' mhc_sinkhorn,', '')} on {device}, {date}", ceiling, panels)
            drawn.append(name)
    print("charts:", ", ".join(drawn))


if __name__ == "__main__":
    main()
