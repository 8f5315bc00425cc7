#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Reads ptxas's reports on the device code of a build. Fails on spills that tools/spills.txt does not list, on
# serialised wgmma and on an ignored setmaxnreg. In a build without CUDA it prints that there is no device code,
# and exits with 77.
#
#   tools/check_device_code.sh BUILD
set -u
cd "$(dirname "$0")/.."
build=${1:?usage: check_device_code.sh BUILD}
set -- "$build"/cuda/*.log
if [ ! -f "$1" ]; then
    echo "device code: none in $build"
    exit 77
fi
awk '
    FILENAME == "tools/spills.txt" { if ($1 !~ /^#/ && NF > 0) reviewed[$1] = 1; next }
    /Compiling entry function/ { split($0, part, "\047"); kernel = part[2]; arch = part[4]; kernels++ }
    / bytes spill stores/ {
        for (i = 1; i <= NF; i++)
            if ($(i + 1) == "bytes" && $(i + 2) == "spill" && $(i + 3) ~ /^stores/)
                stores = $i
        if (stores > 0 && !(kernel in reviewed)) { print "spills: " kernel " (" arch "): " $0; failed = 1 }
    }
    /wgmma.*serializ|setmaxnreg.*ignored/ { print FILENAME ": " $0; failed = 1 }
    END {
        if (!failed) print "device code: " kernels " kernels, no spill, no serialised wgmma, no ignored setmaxnreg"
        exit failed
    }' tools/spills.txt "$@"
