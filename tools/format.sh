#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Formats the C, C++ and CUDA files of the repository by .clang-format; with --check only says which lines differ.
#
#   tools/format.sh [--check] [FILE...]      without files: all that git tracks or would track
set -eu
cd "$(dirname "$0")/.."
if [ "${1-}" = --check ]; then
    shift
    mode='--dry-run -Werror'
else
    mode=-i
fi
if [ $# -eq 0 ]; then
    # A file that was deleted but not yet committed is still listed.
    set -- $(git ls-files -co --exclude-standard -- '*.c' '*.h' '*.cpp' '*.cu' '*.cuh' | sort -u |
             while read -r file; do [ ! -f "$file" ] || echo "$file"; done)
fi
clang-format $mode --style=file "$@"
[ "$mode" = -i ] || echo "format: $# files agree with .clang-format"
