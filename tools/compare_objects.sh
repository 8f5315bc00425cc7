#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Compares the machine code of two builds apart from the names of symbols: shows that a rename changes nothing else.
#
#   tools/compare_objects.sh BUILD_A BUILD_B
#
# Host code: the bytes of the executable sections of every object file that both builds have. GPU code: the PTX of every .cu file
# without comments and symbol names, and ptxas's report of registers, spills and shared memory per kernel.
set -u
[ $# -eq 2 ] || { echo "usage: compare_objects.sh BUILD_A BUILD_B" >&2; exit 2; }
a=$(realpath "$1") b=$(realpath "$2")
objects=0 ptx=0 reports=0 different=0 missing=0

code_of()
{
    objdump -d --no-show-raw-insn "$1" | sed -E '/file format/d; s/^[0-9a-f]+ <[^>]*>:/function:/; s/<[^>]*>//g; s/[ \t]+/ /g'
}

ptx_of()
{
    sed -E '/^[ \t]*\/\//d; s/[_$A-Za-z0-9]*_Z[A-Za-z0-9_$]+/symbol/g; s/_param_[0-9]+/_param/g; s/\b[a-z][a-z0-9_]*_param\b/param/g
        s/^(\.visible|\.entry|\.extern|\.weak)(.*) [a-zA-Z_][a-zA-Z0-9_]*(\(?)$/\1\2 symbol\3/' "$1"
}

report_of()
{
    grep -oE 'Used [0-9]+ registers.*|[0-9]+ bytes stack frame.*' "$1" | sort
}

same() # KIND NAME A B
{
    cmp -s <("$1" "$3") <("$1" "$4") && return
    echo "differs: $2"
    different=$((different + 1))
}

while read -r name; do
    [ -f "$b/$name" ] || { missing=$((missing + 1)); continue; }
    case $name in
    *.o) objects=$((objects + 1)); same code_of "$name" "$a/$name" "$b/$name" ;;
    *.ptx) ptx=$((ptx + 1)); same ptx_of "$name" "$a/$name" "$b/$name" ;;
    *.log) reports=$((reports + 1)); same report_of "$name" "$a/$name" "$b/$name" ;;
    esac
done < <(cd "$a" && find . \( -name '*.o' -o -path './cuda/*.ptx' -o -path './cuda/*.log' \) -not -path './asan/*' | sort)
echo "$objects objects, $ptx PTX files and $reports reports compared, $different differ, $missing are in the first build only"
[ "$different" -eq 0 ] && [ "$objects" -gt 0 ]
