#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Reads clang's remarks on the code for AMD GPUs of a build. Fails on a kernel that spills vector registers or uses
# private memory. With --table it prints registers, LDS in bytes, occupancy (waves per SIMD, of 8), and the scalar
# registers that spill to lanes of vector registers ("to V"), of each kernel on gfx942. In a build without HIP it prints
# that there is no code, and exits with 77.
#
#   tools/check_hip_code.sh [--table] BUILD
set -u
table=0
[ "${1:-}" != --table ] || { table=1; shift; }
build=${1:?usage: check_hip_code.sh [--table] BUILD}
set -- "$build"/hip/*.log
if [ ! -f "$1" ]; then
    echo "HIP code: none in $build"
    exit 77
fi
# A file has the remarks of all kernels for gfx90a, then those for gfx942.
awk -v table="$table" '
    function value() { return $(NF - 1) }
    / Function Name: / { kernel = $(NF - 1); kernels++; of_942 = seen[kernel]++ }
    / SGPRs: / { sgprs = value() }
    / VGPRs: / { vgprs = value() }
    / AGPRs: / { agprs = value() }
    / Occupancy / { occupancy = value() }
    / ScratchSize / && value() > 0 { print "private memory: " kernel ": " value() " bytes a lane"; failed = 1 }
    / VGPRs Spill: / && value() > 0 { print "spills: " kernel ": " value() " vector registers"; failed = 1 }
    / SGPRs Spill: / { spills = value() }
    / LDS Size / {
        if (table && of_942)
            printf "%-46s %4d %4d %4d %6d %3d %4d\n", kernel, vgprs, agprs, sgprs, value(), occupancy, spills
    }
    BEGIN {
        if (table)
            printf "%-46s %4s %4s %4s %6s %3s %4s\n", "kernel on gfx942", "VGPR", "AGPR", "SGPR", "LDS", "occ", "to V"
    }
    END {
        if (!failed && !table)
            print "HIP code: " kernels " kernels of 2 GPUs, no spill of vector registers, no private memory"
        exit failed
    }' "$@"
