#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Runs the tests of one or more build directories, and prints at the end the number of passed, failed and skipped tests.
# The results of each are in BUILD/tests.xml (JUnit). A run in which no test passed fails, also if all were skipped.
#
#   tools/run_tests.sh BUILD...
set -u
[ $# -gt 0 ] || { echo "usage: run_tests.sh BUILD..." >&2; exit 2; }
faults=0
for build in "$@"; do
    echo "== tests of $build"
    rm -f "$build/tests.xml"
    # --output-junit is resolved against the build directory.
    ctest --test-dir "$build" --output-on-failure --no-tests=error --output-junit tests.xml -j "$(nproc)" || faults=1
done

# The sum of the attribute $attribute of <testsuite> over the builds.
total()
{
    for build in "$@"; do
        { tr '\n' ' ' <"$build/tests.xml"; echo; } | sed -n "s/.*<testsuite[^>]*[ \t]$attribute=\"\([0-9]*\)\".*/\1/p"
    done | awk '{ sum += $1 } END { print sum + 0 }'
}
attribute=tests; tests=$(total "$@")
attribute=failures; failed=$(total "$@")
attribute=disabled; disabled=$(total "$@")
attribute=skipped; skipped=$(total "$@")
for build in "$@"; do
    sed -n 's/.*<testcase name="\([^"]*\)".*status="fail".*/FAILED: \1/p' "$build/tests.xml" | sed "s:\$: ($build):"
done
# Prints the tests that were not run, with the last line of their output.
for build in "$@"; do
    awk -v build="$build" '
        /<testcase / { match($0, /name="[^"]*"/); name = substr($0, RSTART + 6, RLENGTH - 7); skipped = 0; last = "" }
        /<skipped / { skipped = 1 }
        { line = $0; sub(/^.*<system-out>/, "", line); sub(/<\/system-out>.*$/, "", line) }
        line !~ /^[ \t]*($|<)/ { last = line }
        /<\/testcase>/ && skipped { print "NOT RUN: " name " (" build ")" (last == "" ? "" : ": " last) }
    ' "$build/tests.xml" | sed -e 's/&apos;/'"'"'/g' -e 's/&quot;/"/g' -e 's/&lt;/</g' -e 's/&gt;/>/g' -e 's/&amp;/\&/g'
done
[ "$faults" -eq 0 ] || [ "$failed" -gt 0 ] || failed=1
passed=$((tests - failed - skipped - disabled))
echo "$passed passed, $failed failed, $((skipped + disabled)) skipped"
[ "$passed" -gt 0 ] || { echo "run_tests.sh: no test ran" >&2; faults=1; }
exit $faults
