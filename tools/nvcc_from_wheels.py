#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""nvcc for device code, of the compiler in NVIDIA's wheels (tools/requirements_nvrtc.txt).

    tools/nvcc_from_wheels.py -fatbin -o IMAGE.fatbin [OPTION...] SOURCE.cu

CUDA 12.9 has no nvcc on PyPI, but it has NVRTC (CUDA C++ to PTX) and ptxas (PTX to machine code). Machine code of CUDA 12
runs on drivers from R525 on; that of CUDA 13 needs R580. Takes the options that cmake/cuda.cmake gives to nvcc: -std, -D,
-I, -gencode, -Xptxas, -MD -MF -MT, -Werror, --keep and --keep-dir. `fatbinary` on the PATH joins the images. It must be that of
a CUDA toolkit that has the option --compress-mode; it compresses in the format that drivers of CUDA 12 read.
"""

import ctypes
import pathlib
import re
import site
import subprocess
import sys
import tempfile

# What the device code includes from the C library. NVRTC has neither these headers nor their types.
STANDARD_HEADERS = {
    "stdint.h": "typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long int64_t;\n"
                "typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;\n"
                "typedef unsigned long uint64_t; typedef unsigned long uintptr_t; typedef long intptr_t;\n"
                "#define INT64_C(x) x##L\n#define UINT64_C(x) x##UL\n#define INT32_MAX 2147483647\n"
                "#define INT64_MAX 9223372036854775807L\n#define UINT32_MAX 4294967295U\n"
                "#define UINT64_MAX 18446744073709551615UL\n#define INT64_MIN (-INT64_MAX - 1)\n",
    "stddef.h": "typedef unsigned long size_t; typedef long ptrdiff_t;\n#define offsetof(t, m) ((size_t)__INTADDR__(&((t *)0)->m))\n",
    "nvcc.h": "#include <math.h>\n#include <stddef.h>\n",  # what nvcc includes before the source
    "stdlib.h": "",
    "stdbool.h": "",
    "string.h": "",
    "math.h": "#define INFINITY __int_as_float(0x7f800000)\n#define NAN __int_as_float(0x7fc00000)\n",
    "float.h": "#define FLT_MAX 3.402823466e+38F\n#define FLT_MIN 1.175494351e-38F\n#define FLT_EPSILON 1.192092896e-07F\n"
               "#define DBL_MAX 1.7976931348623158e+308\n#define DBL_EPSILON 2.2204460492503131e-16\n",
}


def fail(text: str) -> None:
    sys.exit(f"nvcc_from_wheels: {text}")


def in_wheels(pattern: str) -> pathlib.Path:
    for folder in [*site.getsitepackages(), site.getusersitepackages()]:
        for path in sorted(pathlib.Path(folder, "nvidia").glob(pattern)):
            return path
    fail(f"no installed package has the file nvidia/{pattern}: run pip install -r tools/requirements_nvrtc.txt")
    raise AssertionError


class Command:
    """The parsed command line."""

    def __init__(self, words: "list[str]") -> None:
        self.output = self.source = self.dependency_file = self.dependency_target = self.keep = ""
        self.defines: "list[str]" = []
        self.include: "list[str]" = []
        self.ptxas: "list[str]" = ["-O3"]
        self.standard = "-std=c++17"
        self.codes: "list[tuple[str, list[str]]]" = []  # the PTX's architecture, and its images
        self.compress = False
        iterator = iter(words)
        for word in iterator:
            if word in ("-fatbin", "-O3", "-MD", "--keep"):  # what this program does anyway
                continue
            if word == "-o":
                self.output = next(iterator)
            elif word == "-MF":
                self.dependency_file = next(iterator)
            elif word == "-MT":
                self.dependency_target = next(iterator)
            elif word == "--keep-dir":
                self.keep = next(iterator)
            elif word == "-gencode":
                self.codes.append(self.gencode(next(iterator)))
            elif word == "-Xptxas":
                self.ptxas += next(iterator).split(",")
            elif word == "-Xfatbin":
                self.compress |= next(iterator) == "-compress-all"
            elif word == "-Werror":
                next(iterator)  # all warnings of NVRTC are errors, see compile_to_ptx
            elif word.startswith("-std="):
                self.standard = word
            elif word.startswith("-D"):
                self.defines.append(word)
            elif word.startswith("-I"):
                self.include.append(word)
            elif word.endswith(".cu"):
                self.source = word
            else:
                fail(f"does not know {word}")
        if not self.output or not self.source or not self.codes:
            fail("-o, -gencode or the source is missing")

    @staticmethod
    def gencode(text: str) -> "tuple[str, list[str]]":
        match = re.fullmatch(r"arch=(compute_\w+),code=(?:\[([\w,]+)\]|(\w+))", text)
        if match is None:
            fail(f"-gencode {text}")
            raise AssertionError
        return match[1], (match[2] or match[3]).split(",")


class Nvrtc:
    def __init__(self) -> None:
        self.library = ctypes.CDLL(str(in_wheels("cuda_nvrtc/lib/libnvrtc.so.*")))

    def text(self, name: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        getattr(self.library, f"nvrtcGet{name}Size")(program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        getattr(self.library, f"nvrtcGet{name}")(program, buffer)
        return buffer.raw.rstrip(b"\0")

    def compile_to_ptx(self, source: pathlib.Path, options: "list[str]") -> bytes:
        program = ctypes.c_void_p()
        names = (ctypes.c_char_p * len(STANDARD_HEADERS))(*(n.encode() for n in STANDARD_HEADERS))
        texts = (ctypes.c_char_p * len(STANDARD_HEADERS))(*(t.encode() for t in STANDARD_HEADERS.values()))
        self.library.nvrtcCreateProgram(ctypes.byref(program), source.read_bytes(), str(source).encode(),
                                        len(STANDARD_HEADERS), texts, names)
        words = (ctypes.c_char_p * len(options))(*(o.encode() for o in options))
        status = self.library.nvrtcCompileProgram(program, len(options), words)
        log = self.text("ProgramLog", program)
        if status != 0 or log:
            fail(f"{source}:\n{log.decode(errors='replace')}")
        return self.text("PTX", program)


def dependencies(source: pathlib.Path, folders: "list[pathlib.Path]") -> "set[pathlib.Path]":
    """The files that `source` includes by quotes or from `folders`, with those that they include."""
    found: "set[pathlib.Path]" = set()
    queue = [source]
    while queue:
        path = queue.pop()
        if path in found:
            continue
        found.add(path)
        for name in re.findall(r'^\s*#\s*include\s*["<]([^">]+)[">]', path.read_text(), re.MULTILINE):
            for folder in [path.parent, *folders]:
                candidate = (folder / name).resolve()
                if candidate.is_file():
                    queue.append(candidate)
                    break
    return found


def main() -> None:
    if "--dryrun" in sys.argv:  # CMake asks for the folder of the headers
        print(f'#$ "-I{in_wheels("cuda_runtime/include")}"', file=sys.stderr)
        return
    command = Command(sys.argv[1:])
    source = pathlib.Path(command.source).resolve()
    headers = in_wheels("cuda_runtime/include")
    nvrtc = Nvrtc()
    with tempfile.TemporaryDirectory() as temporary:
        images: "list[str]" = []
        for architecture, codes in command.codes:
            several = len(command.codes) > 1
            ptx = pathlib.Path(temporary, f"{source.stem}{'.' + architecture if several else ''}.ptx")
            ptx.write_bytes(nvrtc.compile_to_ptx(source, [
                f"-arch={architecture}", command.standard, "-default-device", "--pre-include=nvcc.h", *command.defines, *command.include,
                f"-I{source.parent}", f"-I{headers}"]))
            if command.keep:
                pathlib.Path(command.keep, ptx.name).write_bytes(ptx.read_bytes())
            for code in codes:
                if code.startswith("compute_"):
                    images.append(f"--image3=kind=ptx,sm={code[8:]},file={ptx}")
                    continue
                cubin = pathlib.Path(temporary, f"{code}.{architecture}.cubin")
                subprocess.run([str(in_wheels("cuda_nvcc/bin/ptxas")), f"-arch={code}", *command.ptxas, str(ptx), "-o",
                                str(cubin)], check=True)
                images.append(f"--image3=kind=elf,sm={code[3:]},file={cubin}")
        mode = ["-compress-all", "--compress-mode=speed"] if command.compress else ["--compress-mode=none"]
        subprocess.run(["fatbinary", "-64", *mode, f"--create={command.output}", *images], check=True)
    if command.dependency_file:
        folders = [pathlib.Path(i[2:]) for i in command.include]
        paths = " \\\n  ".join(sorted(str(p) for p in dependencies(source, folders)))
        pathlib.Path(command.dependency_file).write_text(f"{command.dependency_target}: {paths}\n")


main()
