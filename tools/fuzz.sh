#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Runs the fuzzers of tests/fuzz, which are part of the sanitized build, for SECONDS each, two at a time. They start
# from the repository's corpus and the findings of earlier runs. Inputs that make a fuzzer fail are in
# BUILD/fuzz/findings. To repeat one: BUILD/fuzz_NAME FILE.
#
#   tools/fuzz.sh BUILD SECONDS [NAME...]        without names: all
#   tools/fuzz.sh BUILD --merge [NAME...]        adds inputs with new coverage to the corpus, removes others
set -u
cd "$(dirname "$0")/.."
build=${1:?usage: fuzz.sh BUILD SECONDS [NAME...]}
seconds=${2:?usage: fuzz.sh BUILD SECONDS [NAME...]}
work=$build/fuzz
shift 2
[ "$seconds" = --merge ] || [ "$seconds" -gt 0 ] 2>/dev/null || # for libFuzzer 0 seconds mean no limit
    { echo "fuzz.sh: SECONDS is '$seconds', expected a whole number from 1" >&2; exit 2; }
known=$(sed -n 's/^cot_fuzzer(\([a-z_]*\).*/\1/p' tests/fuzz/CMakeLists.txt)
[ $# -gt 0 ] || set -- $known
[ $# -gt 0 ] || { echo "fuzz.sh: tests/fuzz/CMakeLists.txt names no fuzzer" >&2; exit 1; }
for name; do
    [[ " "${known//$'\n'/ }" " == *" $name "* ]] || { echo "fuzz.sh: NAME is '$name', expected one of:" $known >&2; exit 2; }
done
mkdir -p "$work"
export ASAN_OPTIONS=allocator_may_return_null=1:intercept_tls_get_addr=0:detect_stack_use_after_return=1 UBSAN_OPTIONS=print_stacktrace=1
export LSAN_OPTIONS=print_suppressions=0:suppressions=tests/lsan.supp

fuzz()
{
    local name=$1 dictionary=
    mkdir -p "$work/corpus/$name" "$work/findings"
    [ ! -f "tests/fuzz/$name.dict" ] || dictionary=-dict=tests/fuzz/$name.dict
    if "$build/fuzz_$name" $dictionary -max_total_time="$seconds" -timeout=20 -close_fd_mask=2 -print_final_stats=1 \
        -max_len="$(sed -n "s/^\/\* -max_len=\([0-9]*\).*/\1/p" "tests/fuzz/fuzz_$name.c")" \
        -artifact_prefix="$work/findings/$name-" "$work/corpus/$name" "tests/fuzz/corpus/$name" >"$work/$name.log" 2>&1
    then
        awk -v name="$name" '/^stat::number_of_executed_units/ { n = $2 } /cov: / { sub(/.*cov: /, ""); cov = $1 }
            END { printf "fuzz_%s: %d executions, %d edges, no finding\n", name, n, cov; exit n == 0 }' "$work/$name.log"
    else
        echo "fuzz_$name: FAILED"
        grep -vE ' (NEW|REDUCE|pulse) |NEW_FUNC' "$work/$name.log" | tail -40
        return 1
    fi
}

# Selects inputs that cover all edges that the old corpus and the runs cover, and keeps at most 100 of them. The first
# 100 names are a random choice, because names are hashes. A fuzzer finds the others again within a minute.
merge()
{
    local name=$1 kept=$work/merged/$1
    rm -rf "$kept"
    mkdir -p "$kept" "$work/corpus/$name"
    "$build/fuzz_$name" -set_cover_merge=1 -use_counters=0 -close_fd_mask=2 "$kept" "tests/fuzz/corpus/$name" \
        "$work/corpus/$name" >"$work/$name.log" 2>&1 || { tail -5 "$work/$name.log"; return 1; }
    rm -f "tests/fuzz/corpus/$name"/*
    (cd "$kept" && ls | sort | head -100 | xargs cp -t "$OLDPWD/tests/fuzz/corpus/$name")
    echo "$name: $(ls "$kept" | wc -l) files, $(ls "tests/fuzz/corpus/$name" | wc -l) kept"
}

failed=0
if [ "$seconds" = --merge ]; then
    for name; do merge "$name" || failed=1; done
else
    while [ $# -gt 0 ]; do
        fuzz "$1" &
        first=$!
        second=
        if [ $# -gt 1 ]; then
            fuzz "$2" &
            second=$!
        fi
        wait $first || failed=1
        [ -z "$second" ] || wait $second || failed=1
        shift $(($# > 1 ? 2 : 1))
    done
fi
exit $failed
