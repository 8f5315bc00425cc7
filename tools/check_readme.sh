#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks that the README quotes examples/c/causal_conv1d.c, which the tests compile and run, word for word: one of its
# ```c blocks must be that file, without the licence line.
#
#   tools/check_readme.sh [ROOT]
set -eu
cd "${1:-$(dirname "$0")/..}"
[ -f README.md ] || { echo "check_readme: no README.md"; exit 0; }
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
sed -e '1{/SPDX/d}' examples/c/causal_conv1d.c >"$work/example"
awk -v prefix="$work/block" '
    inside && /^```/ { inside = 0; close(name); next }
    inside { print > name }
    /^```c$/ { inside = 1; name = prefix (++blocks); printf "" > name }' README.md
for block in "$work"/block*; do
    if cmp -s "$block" "$work/example"; then
        echo "check_readme: the README quotes examples/c/causal_conv1d.c"
        exit 0
    fi
done
echo "check_readme: no \`\`\`c block of README.md equals examples/c/causal_conv1d.c (<: the file, >: the first block)"
[ ! -f "$work/block1" ] || diff "$work/example" "$work/block1" || true
exit 1
