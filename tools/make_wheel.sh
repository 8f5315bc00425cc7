#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds the wheels and the source distribution of the Python package:
#
#   tools/make_wheel.sh BUILD DIST
#     DIST/cotangent-VERSION-cp39-abi3-manylinux_2_28_x86_64.whl      with GPU code; without nvcc it is left out
#     DIST/cpu/cotangent-VERSION-cp39-abi3-manylinux_2_28_x86_64.whl  without GPU code
#     DIST/cotangent-VERSION.tar.gz
#
# gcc of this machine compiles. The extension is linked to stubs of glibc 2.28 (tools/make_glibc_stubs.py), and takes
# OpenMP from torch (python/openmp.c), so that auditwheel finds nothing to add. The GPU code is that of BUILD, which is
# brought up to date, or that of the folder COT_FATBINS of the environment.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
mkdir -p "$1" "$2"
build=$(cd "$1" && pwd)
dist=$(cd "$2" && pwd)
glibc=2.28
platform=manylinux_2_28_x86_64
cd "$here/.."
: "${SOURCE_DATE_EPOCH:=$(git log -1 --format=%ct)}"
export SOURCE_DATE_EPOCH

# phase NAME COMMAND...: runs the command and prints its time, because the build of a wheel is to take minutes.
phase()
{
    local_name=$1
    local_start=$(date +%s)
    shift
    "$@"
    echo "wheel: $local_name: $(($(date +%s) - local_start)) s"
}

venv=$build/wheel_venv
if [ "$(cat "$venv/requirements.txt" 2>/dev/null)" != "$(cat "$here/requirements_wheel.txt")" ]; then
    rm -rf "$venv"
    python3 -m venv "$venv"
    "$venv/bin/pip" --quiet --disable-pip-version-check install -r "$here/requirements_wheel.txt"
    cp "$here/requirements_wheel.txt" "$venv/requirements.txt" # last, so that the file marks a complete environment
fi
PATH=$venv/bin:$PATH
export PATH

build_device_code()
{
    [ -z "${COT_FATBINS-}" ] || return 0
    [ -f "$build/build.ninja" ] || cmake --log-level=NOTICE -G Ninja -S . -B "$build" >/dev/null
    cmake --build "$build" --target device_code
}

# build_wheel FOLDER OPTIONS...
build_wheel()
{
    folder=$1
    shift
    rm -rf "$build/wheel_linux"
    "$venv/bin/pip" --quiet --disable-pip-version-check wheel . --no-deps --no-build-isolation -w "$build/wheel_linux" \
        --config-settings="build-dir=$build/wheel" --config-settings="cmake.define.COT_GLIBC_STUBS=$build/glibc-$glibc" "$@"
    check_wheel "$build"/wheel_linux/cotangent-*-cp39-abi3-linux_x86_64.whl
    rm -f "$folder"/cotangent-*.whl
    auditwheel repair --plat "$platform" --only-plat -w "$folder" "$build"/wheel_linux/*.whl
    auditwheel show "$folder"/cotangent-*.whl
    ls -l "$folder"/cotangent-*.whl
}

# A function that glibc 2.28 lacks has no version in the stubs. OpenMP must be found at run time.
check_wheel()
{
    rm -rf "$build/wheel_content"
    python3 -m zipfile -e "$1" "$build/wheel_content"
    extension=$build/wheel_content/cotangent/_C.abi3.so
    unknown=$(nm -D "$extension" | awk '$1 == "U" && $2 !~ /@/ && $2 !~ /^_?Py/ { print $2 }')
    [ -z "$unknown" ] || { echo "wheel: glibc $glibc has no" $unknown >&2; exit 1; }
    needed=$(readelf -d "$extension" | sed -n 's/.*(NEEDED).*\[\(.*\)\]/\1/p' |
        grep -vxE 'lib(c|m|dl|pthread)\.so\.[0-9]+|ld-linux-x86-64\.so\.2' || true)
    [ -z "$needed" ] || { echo "wheel: the extension needs" $needed >&2; exit 1; }
    # auditwheel does not look at the names that Python's limited API excludes.
    abi3=$(auditwheel show "$1" 2>/dev/null | grep -i 'abi3' | grep -i 'not' || true)
    [ -z "$abi3" ] || { echo "wheel: $abi3" >&2; exit 1; }
}

start=$(date +%s)
phase "stubs of glibc $glibc" python3 tools/make_glibc_stubs.py "$glibc" "$build/glibc-$glibc"
mkdir -p "$dist/cpu"
phase 'wheel for the CPU' build_wheel "$dist/cpu" --config-settings=cmake.define.COT_CUDA=OFF
if command -v nvcc >/dev/null || [ -x /usr/local/cuda/bin/nvcc ]; then
    phase 'GPU code' build_device_code
    phase 'wheel with GPU code' build_wheel "$dist" --config-settings=cmake.define.COT_CUDA=ON --config-settings="cmake.define.COT_FATBINS=${COT_FATBINS:-$build/cuda}"
else
    echo 'wheel: no nvcc, so no wheel with GPU code'
fi
rm -f "$dist"/cotangent-*.tar.gz
phase 'source distribution' python3 -m build --sdist --no-isolation --outdir "$dist" . >/dev/null
echo "wheel: $(($(date +%s) - start)) s in all"
