#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes stub libraries of an older glibc. A library that is linked to them runs with that glibc and every newer one.

    tools/make_glibc_stubs.py VERSION FOLDER [CC]        tools/make_glibc_stubs.py 2.28 build/glibc-2.28

A stub has the names and versions of a glibc's functions, but no code. glibc keeps the old versions of a function beside the
new one, so that this machine's glibc shows what the older one had: each function with its newest version up to VERSION.
The compiler is not told: it still uses this machine's headers. A function that VERSION did not have stays undefined without
a version; tools/make_wheel.sh refuses such a library."""
import os
import pathlib
import re
import subprocess
import sys

# glibc 2.34 moved the functions of other libraries into libc.so.6. The stubs have them where they were before.
MOVED = 34
FORMER = (("libdl.so.2", re.compile(r"dl\w+")), ("libpthread.so.0", re.compile(r"(pthread|sem)_\w+")))
LIBRARIES = ("libc.so.6", "libm.so.6", "ld-linux-x86-64.so.2")


def version(text: str) -> "tuple[int, ...]":
    return tuple(int(part) for part in text.split("."))


def read_symbols(path: str) -> "dict[str, list[tuple[str, str]]]":
    """{name: [(version, type), ...]}"""
    symbols = {}
    for line in subprocess.run(["nm", "-D", "--defined-only", path], capture_output=True, text=True, check=True).stdout.splitlines():
        match = re.fullmatch(r"\S+ (\w) (\w+)@@?GLIBC_([\d.]+)", line)
        if match:
            symbols.setdefault(match[2], []).append((match[3], match[1]))
    return symbols


def write_stub(folder: pathlib.Path, soname: str, chosen: "dict[str, tuple[str, str]]", compiler: str) -> None:
    by_version: "dict[str, list[str]]" = {}
    assembly = ""
    for name, (symbol_version, kind) in sorted(chosen.items()):
        by_version.setdefault(symbol_version, []).append(name)
        data = kind in "BDRVS"
        assembly += f'.{"data" if data else "text"}\n.globl {name}\n.type {name}, @{"object" if data else "function"}\n{name}:\n'
        assembly += f".skip 8\n.size {name}, 8\n" if data else ""
    script = "".join(
        f"GLIBC_{v} {{ global: {' '.join(n + ';' for n in names)} {'local: *;' if i == 0 else ''} }};\n"
        for i, (v, names) in enumerate(sorted(by_version.items(), key=lambda item: version(item[0])))
    )
    (folder / f"{soname}.s").write_text(assembly + '.section .note.GNU-stack, "", @progbits\n')
    (folder / f"{soname}.map").write_text(script)
    subprocess.run(
        [compiler, "-shared", "-nostdlib", "-o", folder / soname, folder / f"{soname}.s",
         f"-Wl,-soname,{soname},--version-script={folder / soname}.map"], check=True,
    )  # fmt: skip


def main() -> None:
    limit, folder = version(sys.argv[1]), pathlib.Path(sys.argv[2]).resolve()
    compiler = sys.argv[3] if len(sys.argv) > 3 else "gcc"
    if limit >= (2, MOVED):
        sys.exit(f"make_glibc_stubs.py: {sys.argv[1]}, expected a version before 2.{MOVED}")
    folder.mkdir(parents=True, exist_ok=True)
    stubs: "dict[str, dict[str, tuple[str, str]]]" = {soname: {} for soname, _ in FORMER}
    for soname in LIBRARIES:
        path = subprocess.run([compiler, f"-print-file-name={soname}"], capture_output=True, text=True, check=True).stdout.strip()
        stubs[soname] = {}
        for name, versions in read_symbols(path).items():
            old = [entry for entry in versions if version(entry[0]) <= limit]
            if not old:
                continue
            home = soname
            if soname == "libc.so.6" and any(v == f"2.{MOVED}" for v, _ in versions):
                former = [stub for stub, pattern in FORMER if pattern.fullmatch(name)]
                if not former:
                    continue  # of another library, such as librt
                home = former[0]
            stubs[home][name] = max(old, key=lambda entry: version(entry[0]))
    for soname, chosen in stubs.items():
        write_stub(folder, soname, chosen, compiler)
    for name in ("m", "dl", "pthread"):
        soname = next(s for s in stubs if s.startswith(f"lib{name}."))
        link = folder / f"lib{name}.so"
        link.unlink(missing_ok=True)
        os.symlink(soname, link)
    # As glibc's own libc.so: functions that each library contains itself, and the thread-local storage of the loader.
    static = subprocess.run([compiler, "-print-file-name=libc_nonshared.a"], capture_output=True, text=True, check=True).stdout.strip()
    (folder / "libc.so").write_text(
        f"GROUP ( {folder}/libc.so.6 {static} AS_NEEDED ( {folder}/ld-linux-x86-64.so.2 ) )\n"
    )


if __name__ == "__main__":
    main()
