#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Links a library to the stubs of tools/make_glibc_stubs.py, and checks the versions that it needs and that it runs.
#
#   tests/tools/test_glibc_stubs.sh CC
set -eu
cc=$1
cd "$(dirname "$0")/../.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
fail()
{
    echo "FAILED: $*" >&2
    exit 1
}

cat >"$work/library.c" <<'END'
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdio.h>
int works(double x)
{
    pthread_key_t key;
    void *self = dlopen(NULL, RTLD_LAZY);
    return self != NULL && pthread_key_create(&key, NULL) == 0 && fabs(log(exp(x)) - x) < 1e-12 && fflush(stdout) == 0;
}
END
cat >"$work/program.c" <<'END'
int works(double x);
int main(void) { return !works(0.5); }
END
tools/make_glibc_stubs.py 2.28 "$work/stubs" "$cc"
"$cc" -fno-builtin -shared -fPIC -o "$work/libworks.so" "$work/library.c" "-L$work/stubs" -lm -ldl -lpthread
versions=$(objdump -T "$work/libworks.so" | grep -o 'GLIBC_[0-9.]*' | sort -uV)
highest=$(printf '%s\n' "$versions" | tail -1)
case $highest in
GLIBC_2.2.5 | GLIBC_2.[3-9] | GLIBC_2.1? | GLIBC_2.2[0-8]) ;;
*) fail "it needs $highest" ;;
esac
needed=$(readelf -d "$work/libworks.so" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' | sort | tr '\n' ' ')
[ "$needed" = 'libc.so.6 libdl.so.2 libm.so.6 libpthread.so.0 ' ] || fail "it needs the libraries $needed"
"$cc" -o "$work/program" "$work/program.c" "$work/libworks.so"
LD_LIBRARY_PATH=$work "$work/program" || fail 'the library does not run'

# A function that is newer than the stubs stays without a version.
echo 'void *newer; unsigned arc4random(void); unsigned use(void) { return arc4random(); }' >"$work/newer.c"
"$cc" -shared -fPIC -o "$work/newer.so" "$work/newer.c" "-L$work/stubs"
nm -D "$work/newer.so" | grep -q 'U arc4random$' || fail 'a function of glibc 2.36 got a version of the stubs'
echo "glibc stubs: $highest at most"
