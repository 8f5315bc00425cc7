#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Installs a wheel as a newcomer does, and measures how long the first gradient takes.

    tools/measure_install.py WHEEL PYTHON TORCH [PYTHON TORCH ...] [--json FILE] [--folder FOLDER]

For each pair: an empty virtual environment of PYTHON, `pip install torch==TORCH`, `pip install WHEEL`, then in a new
process the imports and a backward of causal_conv1d on the CPU, then `python -m cotangent.doctor`. Fails if a step fails, or
if the process has two OpenMP runtimes. FOLDER keeps the environments. One that exists gets the wheel alone."""
import argparse
import datetime
import json
import pathlib
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent

FIRST_GRADIENT = """
import time
start = time.time()
import torch
torch_imported = time.time()
import cotangent
imported = time.time()
x, weight = torch.randn(2, 256, 512, requires_grad=True), torch.randn(256, 4, requires_grad=True)
cotangent.causal_conv1d(x, weight).sum().backward()
end = time.time()
import json, re, sys
runtimes = {line.split()[-1] for line in open("/proc/self/maps") if re.search(r"/lib(gomp|omp|iomp5)[-.]", line)}
print(json.dumps({"python": sys.version.split()[0], "torch": torch.__version__, "import_torch_s": torch_imported - start,
                  "import_s": imported - torch_imported, "first_gradient_s": end - start, "openmp": sorted(runtimes)}))
"""


def run(*command: str) -> str:
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"measure_install.py: {' '.join(map(str, command))}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def timed(*command: str) -> float:
    start = time.time()
    run(*command)
    return time.time() - start


def device_name() -> str:
    """As tools/peers/protocol.py, which needs torch."""
    names = [line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return f"{names[0]}, {len(names)} cores"


def measure(wheel: pathlib.Path, python: str, torch: str, folder: pathlib.Path, rounds: int) -> dict:
    version = run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    environment = folder / f"python{version}-torch{torch}"
    interpreter = environment / "bin/python"
    pip = (interpreter, "-m", "pip", "--disable-pip-version-check", "install", "-q")
    row = {"rounds": rounds}
    if not (environment / "complete").exists():
        run(python, "-m", "venv", "--clear", environment)
        row["torch_install_s"] = timed(*pip, f"torch=={torch}")
        (environment / "complete").touch()
    run(interpreter, "-m", "pip", "uninstall", "-q", "-y", "cotangent")
    row["wheel_install_s"] = timed(*pip, "--no-deps", wheel)
    runs = [json.loads(run(interpreter, "-c", FIRST_GRADIENT)) for _ in range(rounds)]
    row |= {key: runs[0][key] for key in ("python", "torch", "openmp")}
    row["cold_s"] = runs[0]["first_gradient_s"]  # compiles the package's modules, and reads torch from the disk
    row |= {key: sorted(one[key] for one in runs)[rounds // 2] for key in ("import_torch_s", "import_s", "first_gradient_s")}
    if len(row["openmp"]) != 1:
        sys.exit(f"measure_install.py: {environment.name}: one process has the OpenMP runtimes {row['openmp']}")
    row["openmp"] = str(pathlib.Path(row["openmp"][0]).relative_to(environment / f"lib/python{version}/site-packages"))
    report = run(interpreter, "-m", "cotangent.doctor")
    row["ops"] = report.count("forward and backward")
    files = run(interpreter, "-c", "import cotangent; print(cotangent.__path__[0])").strip()
    row["installed_bytes"] = sum(path.stat().st_size for path in pathlib.Path(files).rglob("*") if path.suffix != ".pyc" and path.is_file())
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheel", type=pathlib.Path)
    parser.add_argument("pairs", nargs="+", metavar="PYTHON TORCH")
    parser.add_argument("--folder", type=pathlib.Path, help="keep the environments here")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--rounds", type=int, default=5, help="runs of a process, of which the median counts")
    options = parser.parse_args()
    commit = run("git", "-C", ROOT, "rev-parse", "--short", "HEAD").strip()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or pathlib.Path(temporary)).resolve()
        for python, torch in zip(options.pairs[::2], options.pairs[1::2]):
            row = {"op": "install", "date": datetime.date.today().isoformat(), "commit": commit, "backend": "cpu",
                   "device": device_name(), "wheel": options.wheel.name, "wheel_bytes": options.wheel.stat().st_size}
            row |= measure(options.wheel.resolve(), python, torch, folder, options.rounds)
            rows.append(row)
            print(f"Python {row['python']}, torch {row['torch']}: wheel {row['wheel_install_s']:.1f} s, import {row['import_s']:.2f} s "
                  f"after torch's {row['import_torch_s']:.2f} s, first gradient after {row['first_gradient_s']:.2f} s, "
                  f"{row['ops']} ops, OpenMP {row['openmp']}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
