#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Converts the details page of Nsight Compute to records for tools/make_tables.py.

    ncu --clock-control none --set full -k regex:OP -o REPORT PROGRAM bench OP DIRECTION WORD... --backend cuda --chosen
    ncu --import REPORT.ncu-rep --page details |
        tools/read_ncu.py --device NAME --commit COMMIT --case 'OP DIRECTION WORD...' > bench/results/DATE-DEVICE-OP-ncu.json

The driver must allow ncu to read hardware counters. There is one record per kernel, in the order of launches.
"""
import argparse
import datetime
import json
import re
import sys

# (section, metric) on the page: its name in a record. Times are converted to us, cycles are numbers.
METRICS = {("GPU Speed Of Light Throughput", "Duration"): "us",
           ("GPU Speed Of Light Throughput", "Elapsed Cycles"): "cycles",
           ("Compute Workload Analysis", "SM Busy"): "busiest_pipe",
           ("Compute Workload Analysis", "Issue Slots Busy"): "issue_slots",
           ("GPU Speed Of Light Throughput", "L1/TEX Cache Throughput"): "l1",
           ("GPU Speed Of Light Throughput", "L2 Cache Throughput"): "l2",
           ("Memory Workload Analysis", "L2 Hit Rate"): "l2_hits",
           ("GPU Speed Of Light Throughput", "DRAM Throughput"): "dram",
           ("Launch Statistics", "Registers Per Thread"): "registers",
           ("Occupancy", "Achieved Active Warps Per SM"): "warps"}
MICROSECONDS = {"ns": 1e-3, "us": 1.0, "ms": 1e3, "s": 1e6}


def read(lines):
    rows, section = [], ""
    for line in lines:
        kernel = re.match(r"  (\w+) \(\d+, \d+, \d+\)x\(\d+, \d+, \d+\), Context", line)
        if kernel:
            rows.append({"ncu": kernel[1]})
        elif line.strip().startswith("Section: "):
            section = line.strip().removeprefix("Section: ")
        else:
            metric = re.match(r"    (\S.*?)\s{2,}(?:(\S+)\s+)?([\d.,]+)\s*$", line)
            name = METRICS.get((section, metric[1])) if metric else None
            if rows and name:
                value = float(metric[3].replace(",", ""))
                rows[-1][name] = value * MICROSECONDS[metric[2]] if name == "us" else value
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("device", "commit", "case"):
        parser.add_argument("--" + name, required=True)
    parser.add_argument("--date", default=datetime.datetime.now(datetime.timezone.utc).date().isoformat())
    options = parser.parse_args()
    rows = read(sys.stdin)
    if not rows:
        sys.exit("read_ncu.py: no kernel on this page")
    for row in rows:
        missing = set(METRICS.values()) - set(row)
        if missing:
            sys.exit(f"read_ncu.py: {row['ncu']} lacks {', '.join(sorted(missing))}")
        row |= {"case": options.case, "device": options.device, "date": options.date, "commit": options.commit}
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
