#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tests `cotangent profile`, `check --repeat` and tools/gpu.sh with the driver of fake_cuda.c and without a driver.
#
#   tests/tools/test_gpu_commands.sh PROGRAM FAKE_DIRECTORY NO_DRIVER_DIRECTORY
set -u
program=$1 fake=$2 none=$3
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

# expect STATUS TEXT COMMAND...: requires the exit status, and the text on standard output or error.
expect()
{
    status=$1 text=$2
    shift 2
    "$@" >"$work/out" 2>&1 </dev/null
    got=$?
    if [ "$got" -ne "$status" ] || ! grep -qF -- "$text" "$work/out"; then
        echo "FAILED: $*: exit status $got, expected $status with \"$text\":"
        head -8 "$work/out"
        failed=$((failed + 1))
    fi
}

profile()
{
    LD_LIBRARY_PATH=$fake "$program" profile "$@"
}

without_driver()
{
    LD_LIBRARY_PATH=$none "$@"
}

# ---- wrong usage, and no GPU
expect 2 'OP is missing' profile
expect 2 "OP is 'nope'" profile nope
expect 2 "DIRECTION is 'sideways'" profile causal_conv1d sideways
expect 2 "'zzz' describes no case" profile causal_conv1d forward zzz
expect 2 "--memory is 'both', expected fresh or pool" profile causal_conv1d --memory both
expect 2 "--streams is '3', expected 1 or 2" profile causal_conv1d --streams 3
expect 2 "--batch is 'all', expected fused or loop" profile causal_conv1d --batch all
expect 2 'of which backend cpu makes none' profile causal_conv1d --backend cpu
expect 2 'cannot be written' profile causal_conv1d --json "$work/missing/rows.json"
expect 1 'no CUDA driver' without_driver "$program" profile causal_conv1d forward

# ---- doctor: the GPU code of this build, the required driver version, and the installed driver
doctor()
{
    FAKE_CUDA=$1 LD_LIBRARY_PATH=$fake "$program" doctor
}
expect 0 'PTX of compute_80' without_driver "$program" doctor
expect 0 'machine code requires the driver of CUDA' without_driver "$program" doctor
expect 1 'CUDA 11.8 is too old for this build' doctor old
doctor '' | grep -q 'built by CUDA 13' && expect 1 'CUDA 12.8 is too old for this build' doctor old12
# the fake driver is that of CUDA 13.0
if doctor '' | grep -q 'built by CUDA 1[23]\.0'; then
    expect 0 '[ok] gpu driver    CUDA 13.0, 1 devices' doctor ''
    expect 0 'compute capability 9.0: machine code, with the kernels for Hopper' doctor ''
    expect 0 'compute capability 8.9: PTX of the kernels for every GPU' doctor sm89
    expect 0 'compute capability 12.0: PTX of the kernels for every GPU' doctor sm120
    expect 0 'compute capability 7.0: none, the kernels support 8.0 and later' doctor sm70
fi

# ---- profile in every mode
case='forward B=4 D=8 T=64 K=4 silu bias'
expect 0 'causal_conv1d forward f32' profile causal_conv1d $case --json "$work/rows.json"
for key in op direction kernel dtype layout shape options memory streams batch pieces total_ms allocation_ms to_device_ms \
    kernels_ms to_host_ms bytes_to_device bytes_to_host allocated_bytes launches device date commit version registers \
    local_bytes static_shared dynamic_shared blocks_per_multiprocessor occupancy waves; do
    grep -q "\"$key\":" "$work/rows.json" || { echo "FAILED: profile --json has no $key"; failed=$((failed + 1)); }
done
# One row for each combination of memory, streams and batch. x, weight and bias are copied to the device, y to the host.
python3 - "$work/rows.json" <<'END' || failed=$((failed + 1))
import json, sys
rows = json.load(open(sys.argv[1]))
ways = {(row["memory"], row["streams"], row["batch"]): row for row in rows}
assert len(rows) == len(ways) == 8, len(rows)
for (memory, streams, batch), row in ways.items():
    assert row["pieces"] == (4 if batch == "loop" else streams), row
    assert row["bytes_to_device"] == 4 * (4 * 8 * 64 + 8 * 4 + 8) and row["bytes_to_host"] == 4 * 4 * 8 * 64, row
    assert (row["allocation_ms"] > 0) == (memory == "fresh") and row["total_ms"] > row["allocation_ms"], row
    assert sum(launch["count"] for launch in row["launches"]) == row["pieces"], row
END
expect 0 'causal_conv1d forward f32' without_driver "$program" profile --from "$work/rows.json" --plot "$work/rows.svg"
expect 2 'OP is too much' profile causal_conv1d --from "$work/rows.json"
echo '[{"op": "causal_conv1d"}]' >"$work/broken.json"
expect 2 'holds no rows' profile --from "$work/broken.json"
expect 2 'cannot be read' profile --from "$work/missing.json"
grep -q '</svg>' "$work/rows.svg" || { echo "FAILED: profile --plot draws nothing"; failed=$((failed + 1)); }
expect 0 'causal_conv1d backward' profile causal_conv1d backward B=3 D=8 T=64 --memory pool --streams 2 --batch loop
# Pool memory is allocated once, fresh memory in every call. A small case makes all calls within its time limit. Every
# queue opens the driver again by dlopen.
for memory in fresh pool; do
    FAKE_CUDA_COUNT=$work/$memory profile causal_conv1d forward B=3 D=8 T=64 --streams 1 --batch fused --memory $memory >"$work/out"
done
[ "$(cat "$work/fresh")" -gt $((3 * $(cat "$work/pool"))) ] ||
    { echo "FAILED: fresh memory was allocated $(cat "$work/fresh") times, the pool's $(cat "$work/pool")"; failed=$((failed + 1)); }
expect 0 'left out: the batch is not split, because it has no batch of two items' profile causal_conv1d forward B=1 D=8 T=64
expect 2 'in none of the requested modes' profile causal_conv1d forward B=1 D=8 T=64 --batch loop
expect 0 'all items write one output, which cannot accumulate' profile causal_conv1d update B=4 D=8 N=4
expect 0 'causal_conv1d update' profile causal_conv1d --memory pool --streams 1 --batch fused

# ---- repeats run and are compared; one job, because the driver counts the copies of all jobs together
flaky()
{
    FAKE_CUDA=flaky LD_LIBRARY_PATH=$fake "$program" check causal_conv1d --backend cuda --quick --jobs 1 --only 'update bf16' "$@"
}
expect 1 'other bits in run 4' flaky --repeat 6 # five large copies in each of 2 runs, then one per run

# ---- tools/gpu.sh reports what it cannot do, and reports no success
expect 1 'no GPU' without_driver tools/gpu.sh --program "$program" --stage check
expect 2 "STAGE is 'zzz'" tools/gpu.sh --program "$program" --stage zzz
expect 2 'cannot be run' tools/gpu.sh --program "$work/missing"
without_driver tools/gpu.sh --program "$program" 2>&1 | grep -i 'passed' && failed=$((failed + 1))

[ "$failed" -eq 0 ] && echo "test_gpu_commands: all as expected"
exit "$failed"
