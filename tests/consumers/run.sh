#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Tests the installed library as a user installs it. Installs into a clean prefix and builds programs with find_package,
# pkg-config (shared and static) and FetchContent, in C99, C11 and C++17, with gcc and clang (FetchContent: gcc). The
# environment does not refer to this tree. Then tests the manual pages, the completion, and the Debian packages, including their removal.
# Takes the device code from build/ if it is there: to compile it again takes 10 minutes.
#
#   tests/consumers/run.sh [WORK_DIR]     (default: a directory that is removed at the end)
set -u
cd "$(dirname "$0")/../.."
root=$PWD
if [ $# -gt 0 ]; then
    work=$(realpath -m "$1")
    rm -rf "$work"
    mkdir -p "$work"
else
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
fi
prefix=$work/prefix
mkdir "$work/home"
passed=0
failed=0

# clean COMMAND...: runs the command in a new environment.
clean()
{
    env -i PATH=/usr/bin:/bin HOME="$work/home" TERM=dumb "$@"
}

# expect NAME COMMAND...: requires success. Prints the output of the command on failure.
expect()
{
    local name=$1
    shift
    if "$@" >"$work/output" 2>&1 </dev/null; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED: $name: $*"
        tail -20 "$work/output" | sed 's/^/    /'
    fi
}

# refuse NAME COMMAND...: requires that the command fails.
refuse()
{
    local name=$1
    shift
    if "$@" >"$work/output" 2>&1 </dev/null; then
        failed=$((failed + 1))
        echo "FAILED: $name succeeds: $*"
    else
        passed=$((passed + 1))
    fi
}

# run_all NAME PROGRAM...: requires that each program runs with the libraries of its run path.
run_all()
{
    local name=$1 program
    shift
    for program in "$@"; do
        expect "$name: run $(basename "$program")" clean "$program"
    done
}

# ---- install ----------------------------------------------------------------------------------------------------
if [ -f build/build.ninja ]; then
    expect 'device code' cmake --build build --target device_code
    export FATBINS=$root/build/cuda
fi
manifest=build/release/install_manifest.txt
files()
{
    (cd "$1" && find . \( -type f -o -type l \) | sort)
}
expect 'install' make --no-print-directory install PREFIX="$prefix"
refuse 'install leaves a file outside of its prefix' grep -v "^$prefix/" $manifest
files "$prefix" >"$work/installed"
sed "s:^$prefix/:./:" $manifest | cat - <(echo) | sed '/^$/d' | sort >"$work/listed"
expect 'the manifest lists what was installed' diff "$work/listed" "$work/installed"
for file in bin/cotangent lib/libcotangent.so lib/libcotangent.so.0 lib/libcotangent.a include/cotangent/core.h \
    include/cotangent/cotangent.h lib/pkgconfig/cotangent.pc lib/cmake/cotangent/cotangent-config.cmake \
    lib/cmake/cotangent/cotangent-config-version.cmake share/bash-completion/completions/cotangent \
    share/man/man1/cotangent.1 share/man/man3/cot_queue_create.3; do
    expect "installed" test -s "$prefix/$file"
done
refuse 'the source or build directory is named in an installed file' grep -rlF "$root/" "$prefix"
expect 'the program runs from its prefix' clean "$prefix/bin/cotangent" info

# With DESTDIR, the same files are below it, and the prefix stays empty.
staged=$work/staged
expect 'staged install' make --no-print-directory install PREFIX="$work/final" DESTDIR="$staged"
files "$staged$work/final" >"$work/staged_files"
expect 'DESTDIR holds the same files' diff "$work/installed" "$work/staged_files"
refuse 'the staged install touches its prefix' test -e "$work/final"
expect 'pkg-config names the prefix, not DESTDIR' grep -qx "prefix=$work/final" "$staged$work/final/lib/pkgconfig/cotangent.pc"
expect 'staged uninstall' make --no-print-directory uninstall DESTDIR="$staged"
refuse 'the uninstall leaves a file' grep -q . <(files "$staged")
refuse 'the uninstall leaves a directory of ours' grep -q . <(find "$staged" -name cotangent)

# ---- programs against the installed tree ----------------------------------------------------------------------------
for compiler in gcc clang; do
    case $compiler in gcc) c=gcc cxx=g++ ;; clang) c=clang cxx=clang++ ;; esac
    build=$work/find_package_$compiler
    expect "find_package, $compiler" clean cmake -G Ninja -S tests/consumers/find_package -B "$build" \
        -DCMAKE_C_COMPILER=$c -DCMAKE_CXX_COMPILER=$cxx -DCMAKE_PREFIX_PATH="$prefix"
    expect "find_package, $compiler: build" clean cmake --build "$build"
    run_all "find_package, $compiler" "$build"/program_{99,11,17}_{cotangent,static}

    packages="clean env PKG_CONFIG_PATH=$prefix/lib/pkgconfig pkg-config"
    cp tests/consumers/program.c "$work/program.cpp"
    for standard in c99 c11 c++17; do
        case $standard in c++17) compile=$cxx source=$work/program.cpp ;; *) compile=$c source=tests/consumers/program.c ;; esac
        strict="-std=$standard -Wall -Wextra -Wpedantic -Werror"
        for linking in shared static; do
            program=$work/pkg_config_${compiler}_${standard}_$linking
            case $linking in
            shared) libraries="$($packages --libs cotangent) -Wl,-rpath,$prefix/lib" ;;
            static) libraries="$prefix/lib/libcotangent.a $($packages --libs --static cotangent | sed 's/-lcotangent//')" ;;
            esac
            expect "pkg-config, $compiler, $standard, $linking" clean $compile $strict $source \
                $($packages --cflags cotangent) $libraries -o "$program"
            run_all "pkg-config, $compiler, $standard, $linking" "$program"
            if [ $linking = static ]; then
                refuse 'a static program needs the shared library' grep -q libcotangent <(ldd "$program")
            fi
        done
    done
done

# Without optimisation and without device code, to save minutes. The installed build has both.
build=$work/fetch_content
expect 'FetchContent' clean cmake -G Ninja -S tests/consumers/fetch_content -B "$build" -DCMAKE_C_COMPILER=gcc \
    -DCMAKE_CXX_COMPILER=g++ -DCOT_SOURCE="$root" -DCMAKE_BUILD_TYPE=Debug -DCOT_CUDA=OFF
expect 'FetchContent: build' clean cmake --build "$build"
run_all 'FetchContent' "$build"/program_{99,11,17}_{cotangent,static}

expect 'pkg-config knows the version' test "$($packages --modversion cotangent)" = \
    "$("$prefix/bin/cotangent" --version | cut -d ' ' -f 2)"
expect 'pkg-config --static names all that the archive needs' clean gcc -o "$work/from_archive" \
    tests/consumers/program.c $($packages --cflags cotangent) -Wl,-Bstatic -lcotangent -Wl,-Bdynamic \
    $($packages --libs --static cotangent | sed 's/-lcotangent//')
mkdir -p "$work/newer/find_package"
cp tests/consumers/program* "$work/newer"
sed 's/(cotangent 0.1/(cotangent 1.0/' tests/consumers/find_package/CMakeLists.txt >"$work/newer/find_package/CMakeLists.txt"
refuse 'find_package of another major version' clean cmake -G Ninja -S "$work/newer/find_package" -B "$work/newer/build" \
    -DCMAKE_PREFIX_PATH="$prefix"

# ---- manual pages -----------------------------------------------------------------------------------------------
# shows SECTION NAME: requires that the manual page exists, contains the name, and causes no troff warning.
shows()
{
    clean env MANPATH="$prefix/share/man" man --warnings=w "$1" "$2" >"$work/page" 2>"$work/warnings" &&
        ! grep . "$work/warnings" && tr -s ' ' <"$work/page" | grep -qF -- "$(echo "$2" | tr - ' ')" # man pads lines
}
for command in $("$prefix/bin/cotangent" --help | sed -n 's/^  \([a-z][a-z]*\)  *[^ ].*/\1/p'); do
    expect "the man page of $command" shows 1 "cotangent-$command"
done
for function in $(tools/check_exports.sh --list) cot_queue_options cot_tensor; do
    expect "the man page of $function" shows 3 "$function"
done

# complete WORD...: prints the completions of the last word.
complete()
{
    clean PATH="$prefix/bin:/usr/bin:/bin" bash -c '. "$1"; shift; COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)); _cotangent
        printf "%s\n" "${COMPREPLY[@]}"' bash "$prefix/share/bash-completion/completions/cotangent" "$@"
}
expect 'completion of a command' test "$(complete cotangent ex)" = explain
expect 'completion of an option' test "$(complete cotangent check --qu)" = --quick
expect 'completion of an op' test "$(complete cotangent check drop)" = dropout
expect 'completion of a direction' test "$(complete cotangent explain causal_conv1d up)" = update
refuse 'completion of what does not exist' test -n "$(complete cotangent zzz)"

# ---- Debian packages, in a separate root with this machine's list of installed packages ------------------------------
expect 'make deb' make --no-print-directory deb
debian=$work/debian
mkdir -p "$debian/var/lib/dpkg/updates" "$debian/var/lib/dpkg/info"
cp /var/lib/dpkg/status "$debian/var/lib/dpkg/status"
as_root=
[ "$(id -u)" -eq 0 ] || as_root='unshare --user --map-root-user'
# The scripts of a package would run in its root, which has no shell. Only their trigger (ldconfig) is left out.
expect 'dpkg -i' $as_root env PATH=/usr/sbin:/sbin:/usr/bin:/bin dpkg --root="$debian" --force-script-chrootless \
    --log="$work/dpkg.log" -i build/release/deb/*.deb
expect 'the packaged program runs' clean "$debian/usr/bin/cotangent" info
library=$(cd "$debian" && find usr/lib -name libcotangent.so.0)
expect 'a program against the packages' clean gcc -I "$debian/usr/include" tests/consumers/program.c \
    -L "$debian/$(dirname "$library")" -lcotangent -o "$work/against_packages"
expect 'and runs' clean env LD_LIBRARY_PATH="$debian/$(dirname "$library")" "$work/against_packages"
expect 'a program against the packages of libcotangent_parallel' clean gcc -std=c11 -I "$debian/usr/include" \
    examples/c/context_parallel.c -L "$debian/$(dirname "$library")" -lcotangent_parallel -lcotangent -lm -o "$work/ring"
expect 'and runs' clean env LD_LIBRARY_PATH="$debian/$(dirname "$library")" "$work/ring"
for package in build/release/deb/libcotangent0_*.deb build/release/deb/cotangent_*.deb; do
    expect "$package depends on libgomp1" grep -q libgomp1 <(dpkg-deb -f "$package" Depends)
done
expect 'dpkg -r' $as_root env PATH=/usr/sbin:/sbin:/usr/bin:/bin dpkg --root="$debian" --force-script-chrootless \
    --log="$work/dpkg.log" -r libcotangent-parallel-dev libcotangent-parallel0 libcotangent-dev cotangent \
    libcotangent0
refuse 'dpkg -r leaves a file' grep -q . <(find "$debian/usr" -type f 2>/dev/null)

echo "$passed passed, $failed failed"
[ "$failed" -eq 0 ]
