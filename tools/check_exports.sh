#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Checks the symbols that a build of the library exports to programs:
#   - the shared library exports exactly the functions that the public headers declare COT_API, all named cot_*;
#   - the shared library needs only libc, libm and the compiler's OpenMP, and was not linked with -ffast-math;
#   - libcotangent_parallel.so exports exactly the functions declared COT_PARALLEL_API, and needs only libc, libm,
#     libcotangent and MPI;
#   - the static library, which cannot hide symbols, defines only global names with the prefixes cot_ and OP_. OP is the
#     name of an op (a folder of src/ops).
#
#   tools/check_exports.sh BUILD [ROOT]
#   tools/check_exports.sh --list [ROOT]    prints the functions that the public headers declare COT_API
set -eu
build=${1:?usage: check_exports.sh BUILD [ROOT]}
root=${2:-$(dirname "$0")/..}
export LC_ALL=C

# "COT_API const char *cot_version(void);" -> cot_version. A declaration may have several lines. Comments and the
# definition of the macro are removed first.
# declared MACRO
declared()
{
    cat "$root"/include/cotangent/*.h | sed -e '/^#/d' | tr '\n' ' ' | sed -e 's:/\*[^*]*\**\([^/*][^*]*\*\**\)*/: :g' |
        tr ';' '\n' | sed -n "s/.*$1[^(]*[ *]\\([A-Za-z_0-9]*\\)(.*/\\1/p" | sort -u
}
if [ "$build" = --list ]; then
    declared COT_API
    declared COT_PARALLEL_API
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
faults=0
complain()
{
    echo "check_exports: $*"
    faults=$((faults + 1))
}

# compare WHAT FILE OTHER_WHAT OTHER_FILE: sorted lists that must be equal.
compare()
{
    for name in $(comm -23 "$2" "$4"); do complain "$name is in $1 but not in $3"; done
    for name in $(comm -13 "$2" "$4"); do complain "$name is in $3 but not in $1"; done
}

declared COT_API >"$work/declared"
nm -D --defined-only "$build/libcotangent.so" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' |
    sort -u >"$work/exported"
nm -g --defined-only "$build/libcotangent.a" | awk 'NF == 3 { print $3 }' | sort -u >"$work/static"

[ -s "$work/declared" ] || complain "no COT_API function found in $root/include/cotangent"
compare "the shared library" "$work/exported" "the headers" "$work/declared"
for name in $(grep -v '^cot_' "$work/exported" || true); do
    complain "$name is exported by the shared library, expected cot_*"
done

ops=$(cd "$root/src/ops" && ls -d */ | tr -d / | tr '\n' '|')
for name in $(grep -vE "^(cot|${ops%|})_" "$work/static" || true); do
    complain "$name is a global symbol of the static library, expected cot_* or the name of an op before it"
done

for library in $(readelf -d "$build/libcotangent.so" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'); do
    case $library in
    libc.so.*|libm.so.*|libgomp.so.*|libomp.so.*|ld-linux*) ;; # libomp: built by clang
    *) complain "the shared library needs $library" ;;
    esac
done
if [ -f "$build/libcotangent_parallel.so" ]; then
    declared COT_PARALLEL_API >"$work/declared_parallel"
    nm -D --defined-only "$build/libcotangent_parallel.so" | awk '$2 != "A" { sub(/@.*/, "", $3); print $3 }' |
        sort -u >"$work/exported_parallel"
    compare "libcotangent_parallel.so" "$work/exported_parallel" "the headers" "$work/declared_parallel"
    for library in $(readelf -d "$build/libcotangent_parallel.so" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p'); do
        case $library in
        libc.so.*|libm.so.*|libmpi.so.*|libcotangent.so.*|ld-linux*) ;;
        *) complain "libcotangent_parallel.so needs $library" ;;
        esac
    done
fi
if nm "$build/libcotangent.so" | grep -q ' set_fast_math$'; then
    complain "the shared library was linked with -ffast-math: loading it flips the process to flush denormals"
fi

[ $faults -eq 0 ] || exit 1
echo "check_exports: $(wc -l <"$work/exported") exported functions, $(wc -l <"$work/static") static symbols, all in order"
