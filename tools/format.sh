#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Formats the C, C++ and CUDA files of the repository with .clang-format. With --check it only prints the lines that
# differ.
#
#   tools/format.sh [--check] [FILE...]      without files: all files that git tracks or does not ignore
set -eu
cd "$(dirname "$0")/.."
if [ "${1-}" = --check ]; then
    shift
    mode='--dry-run -Werror'
else
    mode=-i
fi
if [ $# -eq 0 ]; then
    # git also lists files whose deletion is not committed.
    set -- $(git ls-files -co --exclude-standard -- '*.c' '*.h' '*.cpp' '*.cu' '*.cuh' | sort -u |
             while read -r file; do [ ! -f "$file" ] || echo "$file"; done)
fi
clang-format $mode --style=file "$@"
[ "$mode" = -i ] || echo "format: $# files agree with .clang-format"
