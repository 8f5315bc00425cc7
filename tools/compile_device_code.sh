#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs a compiler of device code and keeps what it says in a file; shows it only when it fails.
#
#   tools/compile_device_code.sh LOG COMMAND...
set -u
log=$1
shift
"$@" >"$log" 2>&1 && exit
cat "$log" >&2
exit 1
