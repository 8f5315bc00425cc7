#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the software bill of materials of a release, in CycloneDX 1.5.

    tools/make_sbom.py FOLDER VERSION COMMIT

FOLDER has the files of the release. The library contains code of this repository alone, and in its GPU code functions of
the headers of CUDA. What it loads at run time is listed with scope "required" or "optional", what built it under
metadata.tools."""
import datetime
import hashlib
import json
import os
import pathlib
import re
import subprocess
import sys
import uuid

HERE = pathlib.Path(__file__).resolve().parent

# name, scope, why
RUNTIME = (
    ("glibc", "required", "libc.so.6, libm.so.6, libdl.so.2, libpthread.so.0: 2.28 or later for the wheels"),
    ("libgomp", "required", "the OpenMP runtime: that of torch in the Python package, libgomp.so.1 for the C library"),
    ("cuda-driver", "optional", "libcuda.so.1, opened at run time by calls on a GPU"),
    ("nccl", "optional", "libnccl.so.2, opened at run time by groups of GPUs"),
    ("torch", "optional", "2.4 or later, for the Python package"),
    ("jansson", "optional", "for the program of the Debian packages"),
)


def output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def tools() -> "list[dict[str, str]]":
    found = [{"type": "application", "name": "gcc", "version": output("gcc", "-dumpfullversion")}]
    release = re.search(r"V([\d.]+)", output("nvcc", "--version"))
    if release:
        found.append({"type": "application", "name": "nvcc", "version": release[1]})
    found.append({"type": "application", "name": "cmake", "version": output("cmake", "--version").splitlines()[0].split()[-1]})
    found.append({"type": "application", "name": "ninja", "version": output("ninja", "--version")})
    for line in (HERE / "requirements_wheel.txt").read_text().splitlines():
        if not line.startswith("#"):
            name, version = line.split("==")
            found.append({"type": "library", "name": name, "version": version, "purl": f"pkg:pypi/{name}@{version}"})
    return found


def main() -> None:
    folder, version, commit = pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    epoch = int(os.environ["SOURCE_DATE_EPOCH"])
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p.suffix in (".whl", ".deb", ".gz"))
    contained = [
        {
            "type": "file",
            "bom-ref": str(path.relative_to(folder)),
            "name": str(path.relative_to(folder)),
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}],
        }
        for path in files
    ]
    runtime = [
        {"type": "library", "bom-ref": name, "name": name, "scope": scope, "description": why} for name, scope, why in RUNTIME
    ]
    headers = {
        "type": "library",
        "bom-ref": "cuda-headers",
        "name": "cuda-headers",
        "scope": "required",
        "description": "inline functions of CUDA's headers, compiled into the GPU code by nvcc",
    }
    product = {
        "type": "library",
        "bom-ref": "cotangent",
        "name": "cotangent",
        "version": version,
        "licenses": [{"license": {"id": "Apache-2.0"}}],
        "purl": f"pkg:generic/cotangent@{version}",
        "pedigree": {"commits": [{"uid": commit}]},
        "components": contained,
    }
    document = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps([version, commit, contained]))}",
        "version": 1,
        "metadata": {
            "timestamp": datetime.datetime.fromtimestamp(epoch, datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
            "tools": {"components": tools()},
            "component": product,
        },
        "components": [headers, *runtime],
        "dependencies": [
            {"ref": "cotangent", "dependsOn": ["cuda-headers", *(name for name, *_ in RUNTIME)]},
            *({"ref": name, "dependsOn": []} for name in ("cuda-headers", *(name for name, *_ in RUNTIME))),
        ],
    }
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
