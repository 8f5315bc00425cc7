#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Compiles a .cu file for gfx90a and gfx942 with clang, to a bundle of code objects. Clang's remarks (registers, spills,
# LDS, occupancy of each kernel) go to IMAGE with .log for .hipfb. They are printed only on failure. The peephole
# optimiser for SDWA is off: tests/emulator-amd lacks these forms of instructions. -fuse-cuid=none: a code object would hold
# a hash of the path of its source, and builds in two folders would differ.
#
#   tools/compile_hip_code.sh CLANG SOURCES_ROOT IMAGE.hipfb FILE.cu [ARGUMENT...]
set -u
clang=$1 root=$2 image=$3 source=$4
shift 4
log=${image%.hipfb}.log
"$clang" -x hip --cuda-device-only --offload-arch=gfx90a --offload-arch=gfx942 --gpu-bundle-output -nogpulib -nogpuinc \
    -std=c++17 -O3 -fuse-cuid=none -fdeclspec -Wall -Wextra -Werror -I"$root/include" -I"$root/src" \
    -include "$root/src/hip/device/vocabulary.h" -mllvm -amdgpu-sdwa-peephole=0 -Rpass-analysis=kernel-resource-usage \
    "$@" -o "$image" "$source" >"$log" 2>&1 || { grep -v remark: "$log" >&2; exit 1; }
