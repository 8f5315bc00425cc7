#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Compares the binary interface of a build with that of the last release (abidiff), so that programs built against the
# release keep working. The last release is the newest tag v* of this clone; its interface is abi/cotangent.abi of that
# tag. Without tags the working tree's abi/cotangent.abi is used. Functions may be added, and argument structs may grow
# at their end (they have struct_size). Any other change fails.
#
#   tools/check_abi.sh BUILD             compare; BUILD has libcotangent.so with debug information
#   tools/check_abi.sh --record BUILD    write abi/cotangent.abi, for a release or for a break that the CHANGELOG
#                                        announces
set -eu
cd "$(dirname "$0")/.."
if [ "$1" = --record ]; then
    abidw --exported-interfaces-only --drop-private-types --headers-dir include --no-corpus-path --no-comp-dir-path \
        --no-show-locs --no-elf-needed --no-parameter-names --type-id-style hash "$2/libcotangent.so" |
        sed -e "s:path='$PWD/:path=':" >abi/cotangent.abi.new
    mv abi/cotangent.abi.new abi/cotangent.abi
    echo "check_abi: wrote abi/cotangent.abi"
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
tag=$(git tag --list 'v[0-9]*' --sort=-version:refname 2>/dev/null | head -1)
if [ -n "$tag" ]; then
    git show "$tag:abi/cotangent.abi" >"$work/released.abi"
else
    cp abi/cotangent.abi "$work/released.abi"
fi
status=0
abidiff --no-added-syms --suppressions abi/allowed.ini \
    "$work/released.abi" "$1/libcotangent.so" >"$work/report" 2>&1 || status=$?
if [ "$status" -ne 0 ]; then
    cat "$work/report"
    echo "check_abi: the interface is not that of ${tag:-abi/cotangent.abi} any more (abidiff: $status)"
    exit 1
fi
echo "check_abi: programs built against ${tag:-the recorded interface} go on working"
