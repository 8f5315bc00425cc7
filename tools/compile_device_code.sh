#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs nvcc and writes its output to LOG, which is printed only on failure. Keeps the PTX next to LOG, for
# tests/emulator.
#
#   tools/compile_device_code.sh LOG COMMAND...
set -u
log=$1
shift
keep=${log%.log}.keep
mkdir -p "$keep"
rm -f "${log%.log}.ptx" "${log%.log}".compute_*.ptx
"$@" --keep --keep-dir "$keep" >"$log" 2>&1 || { cat "$log" >&2; rm -r "$keep"; exit 1; }
mv "$keep"/*.ptx "${log%/*}"
rm -r "$keep"
