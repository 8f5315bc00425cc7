#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Tests the program's commands as a user calls them: their output, and their messages for wrong usage (exit status 2).
#
#   tests/tools/test_cli.sh PROGRAM
set -u
program=$1
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

# expect STATUS TEXT ARGUMENT...: requires the exit status, and the text on standard output or error.
expect()
{
    status=$1 text=$2
    shift 2
    "$program" "$@" >"$work/out" 2>&1 </dev/null
    got=$?
    if [ "$got" -ne "$status" ] || ! grep -qF -- "$text" "$work/out"; then
        echo "FAILED: cotangent $*: exit status $got, expected $status with \"$text\":"
        head -5 "$work/out"
        [ "$(wc -l <"$work/out")" -le 5 ] || tail -5 "$work/out"
        failed=$((failed + 1))
    fi
}

expect 0 'Usage: cotangent COMMAND' --help
expect 0 'cotangent 0.' --version
expect 0 'isa' info
expect 0 '"isa"' info --json
expect 0 'causal_conv1d_bwd_scalar' ops
expect 0 'chosen' explain causal_conv1d backward B=2 D=64 T=100 K=3 bf16 channel-last silu initial final
expect 0 'refused: it supports f64 only' explain causal_conv1d update f16 S=9 ring indices
expect 0 'chosen' explain dropout backward R=100 D=33 p=0.5 bf16 slice gelu_erf bias mask_bits
# For a size out of range, the message names the limit and the value.
expect 0 'zigzag              1  ring            8       7         7     234.9      168.3         1.00' explain attention forward B=1 H=16 T=32768 d=128 bf16 causal --ranks 8
expect 0 'contiguous          8                  1       0        14     103.2      387.7         1.00' explain attention backward B=1 H=16 Hkv=4 T=32768 d=128 bf16 causal --ranks 8
expect 0 'contiguous          1  ring            3       2         2 ' explain attention forward B=1 H=16 T=4096 d=128 bf16 causal left=1024 alibi --ranks 8
expect 0 'zigzag              1  all-gather      2       0        ' explain attention forward B=1 H=16 T=32768 d=128 bf16 causal --ranks 8
expect 0 'refused: parallel_attention_forward: all_gather is given with 66 ranks divided by head_ranks 1, expected a quotient of 64 or less' explain attention forward B=1 H=1 T=200 d=16 --ranks 66
expect 0 'refused: parallel_attention_forward: bias is given with head_ranks 3' explain attention forward B=2 H=6 T=100 d=16 bias --ranks 3
expect 2 'is not explained for packed sequences' explain attention forward packed --ranks 2
expect 2 '--ranks explains attention' explain dropout forward --ranks 2
expect 2 '--ranks is 0, expected 1 to 1024' explain attention forward --ranks 0
expect 0 'it supports K up to 32, here K is 100' explain causal_conv1d forward K=100
expect 0 'it supports d and d_v up to 256, here d is 512/512' explain attention forward d=512
expect 0 'it supports n up to 8, here n is 12' explain mhc_sinkhorn forward n=12 T=8
expect 2 'x has n=999999999, expected at most 536870911' explain mhc_pre forward n=999999999 D=8
expect 2 "'K=99999999999' describes no case of causal_conv1d: K goes from 0 to 2147483647" explain causal_conv1d forward K=99999999999
expect 2 "'T=-1' describes no case of attention: T goes from 0 to 2147483647" explain attention forward T=-1
expect 2 "'R=99999999999' describes no case of dropout: R goes from 0 to 2147483647" explain dropout forward R=99999999999
expect 2 "'Z=1' describes no case of dropout; expected words like" explain dropout forward Z=1
expect 0 ' 0 failed' check dropout --quick --kernel scalar --only 'forward f16 slice'
expect 2 'p is 1.5, expected 0 to 1' explain dropout forward p=1.5
expect 2 "'gelu' describes no case" explain dropout forward gelu
expect 0 'chosen' explain attention backward B=2 H=8 Hkv=2 Tq=100 Tk=60 d=72 causal softcap=20 sink alibi bias dropout=0.1
expect 2 'q has H=8, expected a multiple of k'\''s Hkv=3' explain attention forward Hkv=3
expect 0 ' 0 failed' check causal_conv1d --quick --kernel update --only 'update bf16'
expect 0 ' 0 failed' check causal_conv1d --quick --repeat 5 --kernel update --only 'update bf16'
expect 0 'cycles/16' bench causal_conv1d forward B=1 D=16 T=64 f16 --chosen --threads 1
expect 0 'of copy' bench dropout forward R=64 D=64 --chosen
expect 0 'TFLOP/s of products' bench attention forward B=1 H=2 T=512 d=32 --chosen
expect 0 'causal_conv1d_bwd_scalar' bench causal_conv1d backward D=16 T=64 --json "$work/rows.json" --kernel bwd_scalar
for key in op direction kernel backend dtype layout shape options threads ms bytes flops gbps tflops ceiling ratio \
    footprint workspace_bytes chosen device date commit; do
    grep -q "\"$key\":" "$work/rows.json" || { echo "FAILED: bench --json has no $key"; failed=$((failed + 1)); }
done
# Output that cannot be written is an error.
"$program" ops >/dev/full 2>"$work/full.err" && { echo "FAILED: ops to a full device: exit status 0"; failed=$((failed + 1)); }
grep -q '^cotangent: standard output: ' "$work/full.err" ||
    { echo "FAILED: ops to a full device says nothing"; failed=$((failed + 1)); }
# A replaced file keeps its permissions, and a symbolic link to it remains.
echo old > "$work/linked.json"
chmod 604 "$work/linked.json"
ln -s linked.json "$work/link.json"
expect 0 'causal_conv1d_bwd_scalar' bench causal_conv1d backward D=16 T=64 --json "$work/link.json" --kernel bwd_scalar
[ -L "$work/link.json" ] && [ "$(stat -c %a "$work/linked.json")" = 604 ] && grep -q '"kernel"' "$work/linked.json" ||
    { echo "FAILED: bench --json through a symbolic link"; failed=$((failed + 1)); }
for number in 000 001 002 003 004; do
    expect 0 'within the bounds' demo $number --quick --json "$work/demo.json"
    for key in demo what verified flops figure document here device date commit; do
        grep -q "\"$key\":" "$work/demo.json" || { echo "FAILED: demo $number --json has no $key"; failed=$((failed + 1)); }
    done
done
expect 0 'not compared with the oracle' demo 003 --quick --verify off
expect 2 "NUMBER is '5', expected one of: 000 001 002 003 004" demo 5
expect 2 'NUMBER is missing' demo
expect 2 "--verify is 'maybe', expected on or off" demo 000 --verify maybe
expect 2 "unexpected argument '001'" demo 000 001
expect 0 '--initial_state=FILE' run causal_conv1d forward --help
expect 0 'final_state[N|B,D,K-1]' run causal_conv1d forward --help
expect 0 'B is the reference' diff --help
OMP_NUM_THREADS=1 expect 0 'nothing stands in the way' doctor
COT_KERNEL=causal_conv1d=zzz expect 1 '[!!] COT_KERNEL    names zzz' doctor
COT_KERNEL=bad expect 1 '[!!] cpu queues' doctor
OMP_NUM_THREADS=999 expect 1 'set OMP_NUM_THREADS=' doctor
expect 2 "unexpected argument 'extra'" doctor extra
if "$program" info | grep -q 'built without kernels for NVIDIA GPUs'; then
    expect 0 '[--] gpu code      none in this build, which is for the CPU alone' doctor
else
    expect 0 '[ok] gpu code      machine code for sm_90a' doctor
fi

expect 0 '--tensor-out=FILE' run attention backward --help

# The names of an op's tensors and options must differ from the options of `run`.
"$program" ops | awk '/^[a-z]/ { op = $1 } /^  [a-z]/ { print op, $1 }' >"$work/directions"
while read -r op direction; do
    twice=$("$program" run "$op" "$direction" --help | grep -oE '^ +(-., )?--[a-z_0-9-]+' | sort | uniq -d)
    [ -z "$twice" ] || { echo "FAILED: cotangent run $op $direction has two options$twice"; failed=$((failed + 1)); }
done <"$work/directions"
[ -s "$work/directions" ] || { echo "FAILED: cotangent ops lists no direction"; failed=$((failed + 1)); }

# A check or a measurement without cases fails, and the message names the pattern that matched nothing.
expect 2 "no case's description contains 'zzz'" check causal_conv1d --only zzz
expect 2 "no case's description contains 'zzz'" check dropout --quick --only zzz --kernel scalar
expect 2 "no kernel's name contains 'zzz'" check --quick --kernel zzz
expect 2 "no kernel with 'update' in its name supports a case" check causal_conv1d --quick --kernel update --only forward
expect 0 ' 0 failed' check --quick --kernel update --only 'update bf16'
grep -q amx_bf16 /proc/cpuinfo || expect 2 'this machine lacks the instruction set' check causal_conv1d_dense --quick --kernel amx

# The hashes of check do not depend on the number of jobs. Two kernels with other bits have other hashes.
hashes() { "$program" check dropout --quick --hash --kernel bwd_ --only gelu_erf "$@" | grep -o 'hash [0-9a-f]*$'; }
hashes --jobs 1 >"$work/hashes"
[ -s "$work/hashes" ] && [ "$(hashes --jobs 3)" = "$(cat "$work/hashes")" ] && [ -z "$(sort "$work/hashes" | uniq -d)" ] ||
    { echo "FAILED: check --hash: $(cat "$work/hashes")"; failed=$((failed + 1)); }

expect 2 "no case's description contains 'zzz'" bench causal_conv1d --only zzz
expect 2 "no kernel's name contains 'zzz'" bench causal_conv1d --kernel zzz
expect 2 "no kernel with 'update' in its name supports a case" bench causal_conv1d forward D=16 T=64 --kernel update
expect 2 'no kernel with '\''bwd_scalar'\'' in its name is chosen' bench causal_conv1d backward D=64 T=64 --kernel bwd_scalar --chosen

expect 2 'Usage:'
expect 2 "'foo' is no command" foo
expect 2 "unexpected argument 'extra'" info extra
expect 2 "OP is 'nope'" check nope
expect 2 "unrecognized option '--bogus'" check --bogus
expect 2 "--repeat is '1'" check --repeat 1
expect 2 "--backend is 'tpu'" check --backend tpu
# When it is interrupted, bench finishes the current case, reports the interruption and writes the finished rows.
"$program" bench causal_conv1d --chosen --only "D1024 T2048" --json "$work/cut.json" > /dev/null 2> "$work/cut.err" &
cut=$!
sleep 1
kill -TERM $cut
wait $cut
[ $? -eq 1 ] && grep -q 'these are not all rows' "$work/cut.err" &&
    [ "$(grep -c '"kernel":' "$work/cut.json")" -gt 0 ] && [ "$(grep -c '"kernel":' "$work/cut.json")" -lt 12 ] ||
    { echo "FAILED: bench, interrupted, does not leave its rows"; failed=$((failed + 1)); }
expect 2 "DIRECTION is 'sideways'" bench causal_conv1d sideways
expect 2 "--threads is '0'" bench --threads 0
expect 2 'of which backend cpu makes none' profile causal_conv1d --backend cpu
expect 2 'cannot be written' bench --json "$work/missing/rows.json"
expect 2 'cannot be written' bench --plot "$work/missing/rows.svg"
expect 2 'DIRECTION is missing' explain causal_conv1d
expect 2 'weight has K=0' explain causal_conv1d forward K=0
expect 2 "'T=-1' describes no case" explain causal_conv1d forward T=-1
expect 2 'x reaches past' bench causal_conv1d forward B=2147483647 D=2147483647 T=2147483647
COT_KERNEL=bad expect 2 'has the entry "bad"' explain causal_conv1d forward
COT_KERNEL=causal_conv1d=zzz expect 2 'the forced kernel "zzz"' explain causal_conv1d forward
[ -z "$(ls "$work" | grep partial)" ] || { echo "FAILED: a partial file was left"; failed=$((failed + 1)); }

[ "$failed" -eq 0 ] && echo "test_cli: all as expected"
exit "$failed"
