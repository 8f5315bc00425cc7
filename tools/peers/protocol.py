# SPDX-License-Identifier: Apache-2.0
"""What the scripts of this folder share: how kernels are timed, JSON rows, and the command line.

All kernels of a case, ours and the copy among them, are timed interleaved in one process, as `cotangent bench` does it. In
each of 9 rounds every kernel runs once, and the order rotates from round to round, so that each kernel follows each. A
kernel's figure is its median round. On a GPU a kernel runs for 8 ms a round: a CUDA graph of as many calls as that takes,
at least one for each copy of the data. The copies exceed the second-level cache 4 times, so that a call finds no data in it.
A kernel that cannot be captured runs as plain calls between two events; its row says "graph": false.
"""
import argparse
import datetime
import functools
import gc
import json
import math
import pathlib
import platform
import statistics
import sys
import time

import library
import torch
import torch._functorch.config

torch._functorch.config.donated_buffer = False  # a compiled backward may run again on what the forward saved

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
LIBRARY = "build/libcotangent.so"
ROUNDS, ROUND_SECONDS, FLUSH, MAX_COPIES, MAX_CALLS = 9, 8e-3, 4, 64, 256
HOST_SECONDS, LEAST_ROUNDS, CASE_SECONDS = 0.01, 3, 12  # on the CPU: of a kernel's round, of all its rounds
PAGE, LARGE_PAGE = 4096, 2 << 20


# ---- timing


class GraphTimer:
    """A CUDA graph of as many calls as take `seconds`; plain calls where a kernel cannot be captured."""

    def __init__(self, calls, seconds):
        self.calls, self.count, self.graph = calls, len(calls), None
        self.plain = ""  # why there is no graph
        self.capture()
        once = [self.once() for _ in range(2)][-1]
        wanted = min(MAX_CALLS, int(seconds / max(once, 1e-9)) + 1)
        count = math.ceil(wanted / len(calls)) * len(calls)
        if count != self.count:
            self.count = count
            self.capture()
            self.once()

    def enqueue(self):
        for number in range(self.count):
            self.calls[number % len(self.calls)]()

    def capture(self):
        self.graph = None  # frees the memory of the graph before
        if self.plain:
            return
        try:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                self.enqueue()
            self.graph = graph
        except Exception as error:  # packages raise exceptions of their own
            self.plain = summary(error)
        torch.cuda.synchronize()

    def once(self):
        """Seconds of one call, the mean of a round."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        if self.graph is not None:
            self.graph.replay()
        else:
            self.enqueue()
        end.record()
        end.synchronize()
        return 1e-3 * begin.elapsed_time(end) / self.count


class HostTimer:
    """As many calls as take HOST_SECONDS."""
    plain = ""

    def __init__(self, calls, seconds=HOST_SECONDS):
        self.call, self.count = calls[0], 1
        once = [self.once() for _ in range(2)][-1]
        self.count = int(seconds / once) + 1 if once < seconds else 1

    def once(self):
        begin = time.perf_counter()
        for _ in range(self.count):
            self.call()
        return (time.perf_counter() - begin) / self.count


def interleave(calls, device):
    """Of {name: [a call for each copy of the data]}: {name: (seconds of one call, why not in a graph)}."""
    timers = {}
    for name, each in calls.items():
        try:
            timers[name] = GraphTimer(each, ROUND_SECONDS) if device == "cuda" else HostTimer(each)
        except Exception as error:  # memory, mostly
            leave_out(name, error)
        else:
            if timers[name].plain:
                print(f"{name} is timed without a graph: {timers[name].plain}", file=sys.stderr, flush=True)
    names, samples, begin = list(timers), {name: [] for name in timers}, time.perf_counter()
    for number in range(ROUNDS if names else 0):
        if device == "cpu" and number >= LEAST_ROUNDS and time.perf_counter() - begin > CASE_SECONDS * len(names):
            break
        first = number % len(names)
        for name in names[first:] + names[:first]:
            samples[name].append(timers[name].once())
    return {name: (statistics.median(samples[name]), timers[name].plain) for name in names}


def copies_for(footprint, device):
    """The number of copies of the data that leaves none of a copy in the cache when its turn comes again."""
    if device == "cpu":
        return 1
    cache = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return min(MAX_COPIES, int(FLUSH * cache / max(footprint, 1)) + 1)


def torch_copies(footprint, device):
    """torch's copy_ of half the footprint: {name: (calls, bytes read and written)}.

    The driver copies some sizes, a few pages beyond a round one, at 2/3 of its speed. Where a large page is little beside
    the footprint, there is a second copy, of whole large pages.
    """
    half = int(footprint) // 2
    sizes = [half // 4 * 4]
    if device == "cuda":
        sizes = [math.ceil(half / page) * page for page in ((PAGE, LARGE_PAGE) if half > 32 * LARGE_PAGE else (PAGE,))]
    found = {}
    for number, size in enumerate(sizes):
        pairs = [(torch.ones(size // 4, device=device), torch.zeros(size // 4, device=device))
                 for _ in range(copies_for(footprint, device))]
        found[f"copy {number}"] = [functools.partial(target.copy_, source) for source, target in pairs], 2 * size
    return found


def interleave_with_copy(calls, footprint, device):
    """interleave() of the calls and torch's copy of as many bytes: its timings, and the copy's bytes a second."""
    copies = torch_copies(footprint, device)
    timings = interleave(calls | {name: each for name, (each, _) in copies.items()}, device)
    rates = [size / timings.pop(name)[0] for name, (_, size) in copies.items() if name in timings]
    return timings, max(rates)


# ---- kernels of a case


def summary(error):
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def leave_out(name, error):
    print(f"{name} is left out: {summary(error)}", file=sys.stderr, flush=True)


def prepare(makers, data, device):
    """Of {name: function from the data to a call}: {name: [a call for each copy of the data]}, each called once.

    The first call compiles and loads. What fails is left out, with the reason on standard error.
    """
    calls = {}
    for name, make in makers.items():
        try:
            made = [make(copy) for copy in data]
            for call in made:
                call()
            if device == "cuda":
                torch.cuda.synchronize()
            calls[name] = made
        except Exception as error:  # whatever a package throws: the others go on
            leave_out(name, error)
    return calls


def torch_version():
    return torch.__version__.split("+")[0]


def normal(shape, dtype, device, scale=1.0):
    """Normal numbers, rounded to the dtype, as bench's inputs are."""
    return (scale * torch.randn(shape, device=device)).to(DTYPES[dtype])


# ---- rows


@functools.cache
def device_name(device):
    if device == "cuda":
        return torch.cuda.get_device_name()
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores" if names else platform.processor()


def row_of(device, op, direction, kernel, dtype, layout, shape, options, **figures):
    """A row with keys of `cotangent bench --json`."""
    return {
        "op": op, "direction": direction, "kernel": kernel, "backend": device, "dtype": dtype, "layout": layout,
        "shape": shape, "options": options, "threads": torch.get_num_threads() if device == "cpu" else 0, **figures,
        "device": device_name(device), "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    } | ({"ours": True, "chosen": True} if kernel == "cotangent" else {})


def memory_rows(makers, data, footprint, command, own_options="", **fields):
    """Rows of the kernels of a case that memory bounds, interleaved with torch's copy.

    makers and data as in prepare(); command: the command line; own_options: added to the options of our kernel; fields: the
    other arguments of row_of.
    """
    device, makers = command.device, {name: make for name, make in makers.items() if command.peer in name}
    timings, copy = interleave_with_copy(prepare(makers, data, device), footprint, device)
    rows = []
    for name, (seconds, plain) in timings.items():
        words = fields["options"] + (own_options if name == "cotangent" else "")
        rows.append(row_of(device, kernel=name, ms=1e3 * seconds, turn_ms=1e3 * seconds, bytes=footprint,
                           gbps=1e-9 * footprint / seconds, ceiling=1e-9 * copy, ratio=footprint / seconds / copy,
                           footprint=footprint, **fields | {"options": words}) | ({"graph": False} if plain else {}))
    print(*(fields[key] for key in ("op", "direction", "dtype", "layout", "shape", "options")), "of copy:",
          *(f"{row['kernel']} {row['ratio']:.2f}" for row in rows), file=sys.stderr, flush=True)
    return rows


# ---- the command line


def parser_of(description):
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, help="CPU threads (all)")
    parser.add_argument("--only", default="", help="only cases whose description contains each of these words")
    parser.add_argument("--commit", help="the commit of --library, for the record")
    parser.add_argument("--peer", default="", help="only kernels whose name contains this")
    parser.add_argument("--json", help="write the rows here instead of printing them")
    parser.add_argument("--library", help=f"of our own kernels (on a GPU {LIBRARY}, on the CPU none)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further case after this time")
    return parser


def begin(parser):
    """The options, and our library on the device, or None."""
    options = parser.parse_args()
    if options.threads is not None and options.threads < 1:
        parser.error("--threads must be 1 or more")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit(f"{parser.prog}: torch finds no CUDA device")
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    path = options.library or (LIBRARY if options.device == "cuda" else None)
    if options.library is None and path is not None and not pathlib.Path(path).exists():
        print(f"{parser.prog}: our kernels are left out: there is no {path}", file=sys.stderr)
        path = None
    stream = None
    if options.device == "cuda":
        stream = torch.cuda.Stream()  # the default stream cannot be captured
        torch.cuda.set_stream(stream)
    return options, library.Library(path, stream) if path is not None else None


def run(cases, options, rows=()):
    """Rows of the cases, (description, function that measures it), written after each: compiling takes minutes."""
    rows, failed, start = list(rows), False, time.perf_counter()
    for text, measure in cases:
        if not all(word in text for word in options.only.split()) or time.perf_counter() - start > options.seconds:
            continue
        try:
            rows += measure()
        except Exception as error:
            leave_out(text, error)
            failed = True
        for row in rows:
            if row.get("ours") and options.commit:
                row["commit"] = options.commit
        if options.json:
            write(rows, options.json)
        gc.collect()
        if options.device == "cuda":
            torch.cuda.empty_cache()
    if not options.json:
        print(json.dumps(rows, indent=1))
    else:
        write(rows, options.json)
    sys.exit(failed)


def write(rows, path):
    pathlib.Path(path).write_text(json.dumps(rows, indent=1) + "\n")
