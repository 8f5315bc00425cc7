#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# A killed process ends the job of mpirun within 30 seconds, with a message.
#
#   tests/parallel/rank_dies.sh MPIRUN... PROGRAM
set -u
status=0
# mpirun's own status is 137. That of timeout is 124.
output=$(timeout 30 "$@" die 2>&1) || status=$?
printf '%s\n' "$output"
case $status in
0) echo "rank_dies: the job succeeded"; exit 1 ;;
124) echo "rank_dies: the job did not end in 30 seconds"; exit 1 ;;
esac
printf '%s\n' "$output" | grep -qi 'signal 9\|killed' || { echo "rank_dies: no message names the signal"; exit 1; }
