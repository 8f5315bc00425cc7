#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs all checks and benchmarks that need a GPU. Needs the program, but no compiler. Fails without a GPU.
#
#   tools/gpu.sh [--program PROGRAM] [--op OP] [--stage STAGE] [--out DIR]
#
#   check      every CUDA kernel against its oracle; the quick cases 1000 times with the same bits; and the tests that
#              are in the program's folder: test_cuda (threads, graphs, streams), test_ptx (instructions),
#              test_attention_device (blocks, faults), test_attention_foreign (rows outside a sequence),
#              test_dropout_device (masks) and test_causal_conv1d_large (2^31 elements)
#   sanitize   the quick cases under compute-sanitizer: memcheck, racecheck, synccheck
#   bench      the times of every CUDA kernel and of a copy: DIR/DATE-DEVICE-OP.json
#   demo       the jobs of docs/original_specifications.md (cotangent demo): DIR/DATE-DEVICE-demo_NUMBER.json; not with --op
#   peers      the times of this machine's Python libraries for the same shapes (tools/peers/OP.py):
#              DIR/DATE-DEVICE-OP-peers.json
#
# Without --stage all stages run, without --op every op with a CUDA kernel. DIR is by default bench/results. Then
# tools/make_tables.py and tools/make_charts.py write docs/benchmarks from it. PROGRAM may have been built on another
# machine. A step fails after 8 minutes. A run without any step fails too.
set -u
cd "$(dirname "$0")/.." || exit 1
program=build/cotangent only= stages='check sanitize bench demo peers' out=bench/results
while [ $# -gt 0 ]; do
    [ $# -gt 1 ] || { echo "usage: tools/gpu.sh [--program PROGRAM] [--op OP] [--stage STAGE] [--out DIR]" >&2; exit 2; }
    case $1 in
    --program) program=$2 ;;
    --op) only=$2 ;;
    --stage) stages=$2 ;;
    --out) out=$2 ;;
    *) echo "gpu.sh: '$1' is no option" >&2; exit 2 ;;
    esac
    shift 2
done
case $stages in
check | sanitize | bench | demo | peers | 'check sanitize bench demo peers') ;;
*) echo "gpu.sh: STAGE is '$stages', expected check, sanitize, bench, demo or peers" >&2; exit 2 ;;
esac
state=$("$program" info 2>/dev/null | sed -n 's/^cuda  *//p')
[ -n "$state" ] || { echo "gpu.sh: $program cannot be run" >&2; exit 2; }
device=$(echo "$state" | sed -n 's/^available, //p')
[ -n "$device" ] || { echo "gpu.sh: no GPU to run on: $state" >&2; exit 1; }
if [ "$stages" = demo ] && [ -n "$only" ]; then
    echo "gpu.sh: --stage demo with --op leaves nothing to run: a demo is of several ops" >&2
    exit 2
fi
ops=$("$program" ops | awk '/^[a-z]/ { op = $1 } $2 == "cuda" { print op }' | uniq)
if [ -n "$only" ]; then
    echo "$ops" | grep -qx -- "$only" || { echo "gpu.sh: OP is '$only', expected one of:" $ops >&2; exit 2; }
    ops=$only
fi
mkdir -p "$out" || exit 1
PATH=$PATH:/usr/local/cuda/bin
short=$(echo "$device" | tr 'A-Z ' 'a-z-' | sed 's/^nvidia-//')
date=$(date -u +%Y-%m-%d)
passed=0
failed=0

child=
trap 'kill $child 2>/dev/null; exit 130' INT TERM # timeout's process group receives neither signal

# step NAME COMMAND...
step()
{
    local name=$1 start=$SECONDS
    shift
    printf '\n==== %s\n' "$name"
    timeout 480 "$@" </dev/null &
    child=$!
    if wait $child; then
        passed=$((passed + 1))
        printf '==== %s: passed (%d s)\n' "$name" $((SECONDS - start))
    else
        failed=$((failed + 1))
        printf '==== %s: FAILED (%d s)\n' "$name" $((SECONDS - start))
    fi
}

has_stage()
{
    case " $stages " in *" $1 "*) true ;; *) false ;; esac
}

echo "$device: $stages of" $ops
for op in $ops; do
    if has_stage check; then
        step "$op: check" "$program" check "$op" --backend cuda
        step "$op: 1000 repeats" "$program" check "$op" --backend cuda --quick --repeat 1000
    fi
    if has_stage sanitize; then
        for tool in memcheck racecheck synccheck; do
            step "$op: $tool" compute-sanitizer --tool $tool --error-exitcode 1 "$program" check "$op" --backend cuda --quick
        done
    fi
    if has_stage bench; then
        step "$op: bench" "$program" bench "$op" --backend cuda --json "$out/$date-$short-$op.json"
    fi
    if has_stage peers && [ ! -f "tools/peers/$op.py" ]; then
        echo "$op: no peers to run: there is no tools/peers/$op.py"
    elif has_stage peers; then
        step "$op: peers" python3 "tools/peers/$op.py" --device cuda --json "$out/$date-$short-$op-peers.json"
    fi
    if has_stage bench || has_stage peers; then
        step "$op: table" tools/make_tables.py --print "$op" --results "$out"
    fi
done
for name in test_cuda test_ptx test_attention_device test_attention_foreign test_dropout_device \
    test_causal_conv1d_large; do
    if has_stage check && [ -x "$(dirname "$program")/$name" ]; then
        step "$name" "$(dirname "$program")/$name"
    fi
done
for number in 000 001 002 003 004; do
    if has_stage demo && [ -z "$only" ]; then
        step "demo $number" "$program" demo $number --backend cuda --json "$out/$date-$short-demo_$number.json"
    fi
done
if [ "$out" = bench/results ] && { has_stage bench || has_stage demo || has_stage peers; }; then
    step 'tables' tools/make_tables.py
    step 'charts' tools/make_charts.py
fi
printf '\n%d passed, %d failed\n' "$passed" "$failed"
[ $((passed + failed)) -gt 0 ] || echo "gpu.sh: nothing was run"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
