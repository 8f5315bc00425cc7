#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Shows that the checks of tools/ can fail. Plants faults in a copy of the tree and requires that each one is reported.
#
#   tests/tools/test_tools.sh BUILD [CC]      BUILD has libcotangent.so and libcotangent.a
set -eu
build=$(cd "${1:?usage: test_tools.sh BUILD}" && pwd)
cc=${2:-cc}
cd "$(dirname "$0")/../.."
tools=$PWD/tools
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
passed=0
failed=0

# A copy of the files that the checks read.
fresh()
{
    rm -rf "$work/tree"
    mkdir "$work/tree"
    cp -R include src examples .clang-format "$work/tree"
}

# expect pass|fail TEXT COMMAND...: requires the exit status, and that the command prints the text.
expect()
{
    wanted=$1 text=$2
    shift 2
    if "$@" >"$work/output" 2>&1; then got=pass; else got=fail; fi
    if [ $got = "$wanted" ] && grep -qF -- "$text" "$work/output"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "FAILED: $* gave \"$got\", expected \"$wanted\" and the text: $text"
        sed 's/^/    /' "$work/output"
    fi
}

# plant FILE LINE: prepends a line to a file of the copy. Creates the file if necessary.
plant()
{
    mkdir -p "$(dirname "$work/tree/$1")"
    [ -f "$work/tree/$1" ] || : >"$work/tree/$1"
    printf '%s\n' "$2" | cat - "$work/tree/$1" >"$work/planted"
    mv "$work/planted" "$work/tree/$1"
}

# wrong_include FILE LINE
wrong_include()
{
    fresh
    mkdir -p "$work/tree/src/ops/other_op" "$work/tree/src/simd" "$work/tree/src/io" "$work/tree/src/cli"
    touch "$work/tree/src/ops/other_op/other_op.h" "$work/tree/src/simd/planted.h" "$work/tree/src/io/npy.h" \
        "$work/tree/src/check/planted.h" "$work/tree/src/cli/planted.h" 2>/dev/null || true
    plant "$1" "$2"
    expect fail "$1:1: " "$tools/check_includes.sh" "$work/tree"
}

# ---- includes
fresh
expect pass 'run one way' "$tools/check_includes.sh" "$work/tree"
wrong_include include/cotangent/core.h '#include "core/status.h"'
wrong_include include/cotangent/core.h '#include <core/status.h>'
wrong_include src/core/tensor.c '#include "simd/planted.h"'
wrong_include src/core/tensor.c '#include "../ops/causal_conv1d/causal_conv1d_problem.h"'
wrong_include src/simd/planted.h '#include "ops/causal_conv1d/causal_conv1d_problem.h"'
wrong_include src/io/npy.c '#include "core/tensor.h"'
wrong_include src/ops/causal_conv1d/causal_conv1d.c '#include "ops/other_op/other_op.h"'
wrong_include src/ops/causal_conv1d/causal_conv1d.c '  #  include "../other_op/other_op.h" /* indented */'
wrong_include src/ops/causal_conv1d/cpu/planted.c '#include "io/npy.h"'
wrong_include src/check/planted.h '#include "cli/planted.h"'
wrong_include src/check/planted.h '#include "bench/bench.h"'
wrong_include src/ops/causal_conv1d/causal_conv1d.c '#include "cases/cases.h"'
wrong_include src/ops/causal_conv1d/causal_conv1d.c '#include "check/causal_conv1d_ref.h"'
wrong_include src/ops/causal_conv1d/check/planted.c '#include "ops/dropout/dropout_problem.h"'
wrong_include examples/train_lm/planted.c '#include "core/queue.h"'
wrong_include examples/c/causal_conv1d.c '#include "../../src/core/status.h"'
wrong_include src/core/tensor.c '#include "no_such_file.h"'
wrong_include src/core/tensor.c '#include A_MACRO'

# ---- exported symbols, in a tree whose library has a few functions
expect pass 'all in order' "$tools/check_exports.sh" "$build"
library()
{
    fresh
    rm -rf "$work/tree/include/cotangent" "$work/library"
    mkdir -p "$work/tree/include/cotangent" "$work/library"
    printf '#define COT_API\n/* not COT_API int cot_comment(void); */\nCOT_API int cot_one(void);\nCOT_API const char\n*cot_two(int a,\n        int b);\n' \
        >"$work/tree/include/cotangent/core.h"
    printf 'X { global: cot_one; cot_two; %s local: *; };\n' "${2-}" >"$work/tree/src/cotangent.map"
    printf 'int cot_one(void) { return 1; }\nconst char *cot_two(int a, int b) { return a < b ? "" : 0; }\nint causal_conv1d_kernel(void) { return 3; }\n%s\n' \
        "$1" >"$work/library/library.c"
    "$cc" -fPIC -c "$work/library/library.c" -o "$work/library/library.o"
    "$cc" -shared ${3-} "$work/library/library.o" -Wl,--version-script="$work/tree/src/cotangent.map" \
        -o "$work/library/libcotangent.so"
    ar rc "$work/library/libcotangent.a" "$work/library/library.o"
}
check_library()
{
    "$tools/check_exports.sh" "$work/library" "$work/tree"
}
library ''
expect pass '2 exported functions, 3 static symbols' check_library
library 'int cot_extra(void) { return 4; }' 'cot_extra;'
expect fail 'cot_extra is in the shared library but not in the headers' check_library
library ''
printf 'COT_API int cot_three(void);\n' >>"$work/tree/include/cotangent/core.h"
expect fail 'cot_three is in the headers but not in the shared library' check_library
library 'int naked(void) { return 4; }' 'naked;'
expect fail 'naked is exported by the shared library, expected cot_*' check_library
library 'int helper(void) { return 4; }'
expect fail 'helper is a global symbol of the static library' check_library
library 'int shared_state;'
expect fail 'shared_state is a global symbol of the static library' check_library
library '' '' '-Wl,--no-as-needed -ldl -lpthread -lstdc++'
expect fail 'the shared library needs libstdc++' check_library
if [ "$(uname -m)" = x86_64 ]; then
    library '' '' -ffast-math
    expect fail 'linked with -ffast-math' check_library
fi

# ---- the binary interface: additions are allowed, breaks are not, and the record of a release tag cannot be replaced
abi_library()
{
    printf '%s\n' "$1" >"$work/tree/include/cotangent/x.h" # only declarations of headers are recorded
    printf '%s\n' '#include <cotangent/x.h>' 'int cot_one(const cot_x_args *a) { return (int)a->struct_size; }' \
        "${2-int cot_two(int a) { return a; \}}" >"$work/library/library.c"
    "$cc" -g -fPIC -shared -I "$work/tree/include" "$work/library/library.c" -o "$work/library/libcotangent.so"
}
old='typedef struct cot_x_args { unsigned long struct_size; int a; } cot_x_args;'
grown='typedef struct cot_x_args { unsigned long struct_size; int a; double b; } cot_x_args;'
shifted='typedef struct cot_x_args { unsigned long struct_size; long before; int a; } cot_x_args;'
compare_abi()
{
    "$work/tree/tools/check_abi.sh" "$work/library"
}
fresh
cp -R tools abi "$work/tree"
abi_library "$old"
expect pass 'wrote abi/cotangent.abi' "$work/tree/tools/check_abi.sh" --record "$work/library"
expect pass 'go on working' compare_abi
abi_library "$grown"
expect pass 'go on working' compare_abi
abi_library "$old" 'int cot_two(int a) { return a; } int cot_three(int a) { return a; }'
expect pass 'go on working' compare_abi
abi_library "$shifted"
expect fail 'long int before' compare_abi
abi_library "$old" 'long cot_two(int a) { return a; }'
expect fail 'return type changed' compare_abi
abi_library "$old" ''
expect fail 'cot_two' compare_abi
abi_library "$old"
git="git -C $work/tree -c user.name=tester -c user.email=tester@localhost -c init.defaultBranch=main"
($git init -q && $git add abi && $git commit -qm release && $git tag v0.9.0 && $git tag v0.10.0)
expect pass 'built against v0.10.0' compare_abi
abi_library "$shifted"
"$work/tree/tools/check_abi.sh" --record "$work/library" >/dev/null
expect fail 'not that of v0.10.0 any more' compare_abi

# ---- the pages: links, lengths, sentences, names, the quoted example
pages=$work/pages
mkdir -p "$pages/docs/guide" "$pages/src/ops/op" "$pages/examples"
cp -R examples/c "$pages/examples/c"
$git init -q "$pages"
page() # FILE TEXT: the repository with this page is checked
{
    printf "$2" >"$pages/$1"
    "$tools/check_pages.py" "$pages"
}
repeat() # N TEXT: the text, N times
{
    seq "$1" | while read -r _; do printf '%s' "$2"; done
}
quotes= # the ```c blocks of docs/guide/c.md
for example in causal_conv1d attention attention_cuda; do
    quotes="$quotes\`\`\`c\n$(sed -e '1{/SPDX/d}' -e 's/[%\\]/&&/g' examples/c/$example.c)\n\`\`\`\n"
done
expect pass '1 pages, 0 complaints' page README.md '# Title\n\nA [link](examples/c) and [another](#title).\n'
expect fail 'the link nothing.md leads nowhere' page README.md 'A [link](nothing.md).\n'
expect fail 'the link README.md#other leads nowhere' page README.md '# Title\n\nA [link](README.md#other).\n'
expect fail 'at most 5000 are allowed' page README.md "$(repeat 900 'Words. ')\n"
expect fail '36 words' page README.md "Not $(repeat 34 'too ')long.\n"
expect fail '36 words' page README.md "A colon: $(repeat 32 'and ')no end.\n"
expect fail '36 words' page README.md "| cell | $(repeat 36 'word ')| cell |\n"
expect pass '0 complaints' page README.md "| $(repeat 30 'word '); $(repeat 30 'word ')| cell |\n"
expect pass '0 complaints' page README.md "Just $(repeat 15 'not ')\n$(repeat 18 'not ')long.\n\n    $(repeat 40 'code ')\n"
expect fail 'README.md:3: 133 columns' page README.md "# Title\n\n$(repeat 13 'no words. ')abc\n"
expect pass '0 complaints' "$tools/check_pages.py" --wrap "$pages"
expect pass '0 complaints' page README.md "| $(repeat 30 'no words. ')|\n\n\`\`\`\n$(repeat 30 'no words. ')\n\`\`\`\n"
mkdir -p "$pages/docs/kernels"
expect fail 'no source has the name op_missing' page docs/kernels/op.md 'The function `op_missing`.\n'
printf 'int op_missing;\n' >"$pages/op.c"
expect pass '0 complaints' "$tools/check_pages.py" "$pages"
printf '/* %s */\n' "$(repeat 13 'no words. ')" >"$pages/op.c"
expect fail 'op.c:1: a comment of 136 columns' "$tools/check_pages.py" "$pages"
rm -r "$pages/op.c" "$pages/docs/kernels"
expect fail '151 lines, at most 150' page src/ops/op/README.md "$(repeat 75 'A line.\n\n')A line.\n"
expect fail '36 words' page src/ops/op/README.md "Not $(repeat 34 'too ')long.\n"
expect pass '0 complaints' page src/ops/op/README.md '# Op\n'
expect fail 'no link to guide/new.md' page docs/README.md '# Documentation\n' "$(printf '# New\n' >"$pages/docs/guide/new.md")"
expect pass '0 complaints' page docs/README.md '[New](guide/new.md)\n'
rm "$pages/docs/README.md" "$pages/docs/guide/new.md"
expect pass '0 complaints' page docs/guide/c.md "\`\`\`c\nint other;\n\`\`\`\n$quotes"
sed -i 's/args.weight/args.weights/' "$pages/docs/guide/c.md"
expect fail 'no ```c block equals examples/c/causal_conv1d.c' "$tools/check_pages.py" "$pages"
sed -i -e 's/args.weights/args.weight/' -e 's/cudaMalloc/cudaMallocManaged/' "$pages/docs/guide/c.md"
expect fail 'no ```c block equals examples/c/attention_cuda.c' "$tools/check_pages.py" "$pages"

# ---- make prints the build's messages, and the option in docs/guide/install.md that disables GPU code exists
grep -q 'COT_CUDA=OFF' docs/guide/install.md && grep -q '^option(COT_CUDA ' CMakeLists.txt ||
    { echo "FAILED: docs/guide/install.md names no build for the CPU alone"; failed=$((failed + 1)); }
first_build()
{
    make -n build BUILD="$work/none" | grep -c -- '--log-level=NOTICE'
}
expect pass 1 first_build

# ---- packages: missing packages are installed; nothing is done if none is missing
mkdir "$work/bin"
cat >"$work/bin/dpkg-query" <<'END'
#!/bin/sh
for package; do
    case $package in
    -*|cmake) ;;
    ninja-build) echo "$package rc " ;;
    *) echo "$package ii " ;;
    esac
done
exit 1
END
printf '#!/bin/sh\necho "apt-get $*" >&2\n' >"$work/bin/apt-get"
printf '#!/bin/sh\nexec "$@"\n' >"$work/bin/sudo"
chmod +x "$work"/bin/*
with_stubs()
{
    PATH=$work/bin:$PATH "$tools/setup.sh" && echo "exit $?"
}
expect pass 'setup: installing cmake ninja-build' with_stubs
expect pass 'apt-get -qq update' with_stubs
expect pass 'install cmake ninja-build' with_stubs
printf '#!/bin/sh\necho cannot >&2; exit 100\n' >"$work/bin/apt-get"
expect fail 'cannot' with_stubs
sed -i -e 's/-\*|cmake/-*/' -e '/ninja-build/d' "$work/bin/dpkg-query"
expect pass 'exit 0' with_stubs
[ "$(wc -l <"$work/output")" -eq 1 ] || { echo "FAILED: setup.sh is not quiet"; failed=$((failed + 1)); }

# ---- skipped tests are listed at the end, with the reason
mkdir "$work/ctest"
cat >"$work/ctest/CTestTestfile.cmake" <<'END'
add_test(good sh -c "echo fine")
add_test(later sh -c "echo first; echo 'no <network> here'; exit 77")
set_tests_properties(later PROPERTIES SKIP_RETURN_CODE 77)
END
expect pass "NOT RUN: later ($work/ctest): no <network> here" "$tools/run_tests.sh" "$work/ctest"
expect pass '1 passed, 0 failed, 1 skipped' "$tools/run_tests.sh" "$work/ctest"
if grep -q 'NOT RUN: good' "$work/output"; then echo "FAILED: run_tests.sh calls a test that ran not run"; failed=$((failed + 1)); fi

# ---- without a network the Python tests are skipped; in CI they fail
mkdir "$work/venv_build"
without_network()
{
    CI=$1 PIP_NO_INDEX=1 PIP_CONFIG_FILE=/dev/null tests/python/run.sh "$work/venv_build"
    echo "exit $?"
}
expect pass 'PyTorch could not be installed' without_network ''
grep -q 'exit 77' "$work/output" || { echo "FAILED: tests/python/run.sh without a network"; failed=$((failed + 1)); }
expect pass 'exit 1' without_network true

# ---- layout
if command -v clang-format >/dev/null; then
    fresh
    cp -R tools "$work/tree/tools"
    expect pass '1 files agree' "$work/tree/tools/format.sh" --check examples/c/causal_conv1d.c
    plant examples/c/causal_conv1d.c 'int  main( void );'
    expect fail 'examples/c/causal_conv1d.c:1' "$work/tree/tools/format.sh" --check examples/c/causal_conv1d.c
fi

# ---- planted faults and fuzzers: an empty selection fails, and so do wrong arguments
expect fail "no fault's name contains 'zzz'" "$tools/plant_faults.sh" --work "$work/faults" zzz
expect fail "--sample is '0'" "$tools/plant_faults.sh" --work "$work/faults" --sample 0
expect fail 'usage: ' "$tools/plant_faults.sh" --bogus
expect fail 'usage: run_tests.sh' "$tools/run_tests.sh"
expect fail "NAME is 'zzz'" "$tools/fuzz.sh" "$build" 1 zzz
expect fail "SECONDS is 'x'" "$tools/fuzz.sh" "$build" x

# ---- stall cycles in machine code: bits 41 to 44 of an instruction's second word
machine_code()
{
    printf '\t.section\t.text.%s,"ax",@progbits\n' planted
    instruction 'MOV R1, R2' 2
    printf '.L_x_1:\n'
    instruction 'HMMA.16816.F32.BF16 R4, R8, R2, R4' 6
    instruction "@P0 BRA \`(.L_x_$1)" 5
    printf '.L_x_2:\n\t.section\t.text.%s,"ax",@progbits\n' other
    instruction EXIT 15
}
instruction()
{
    printf '        /*0000*/ %s ; /* 0x%016x */\n    /* 0x%016x */\n' "$1" 0 $(($2 << 41 | 1 << 45))
}
count_stalls() { machine_code "$1" | "$tools/count_stalls.py" "$2"; }
expect pass 'planted: 2 instructions, 1 of them products, 11 stall cycles' count_stalls 1 planted
expect fail 'planted has no loop with half of its matrix products' count_stalls 2 planted
expect fail 'no kernel absent in this text' count_stalls 1 absent

# ---- public headers
mkdir "$work/headers"
header_alone()
{
    printf '%s\n' "$2" >"$work/headers/planted.h"
    tests/consumers/header_alone.sh "$cc" "$1" "$work/headers" planted.h && echo compiled
}
expect pass compiled header_alone c99 'int cot_one(void);'
expect fail 'size_t' header_alone c11 'size_t cot_one(void);'
expect fail 'prototype' header_alone c99 'int cot_one();'
expect fail 'fallthrough' header_alone c++17 'static inline int f(int a) { switch (a) { case 1: a = 2; case 3: a++; } return fallthrough; }'
expect fail 'extra' header_alone c99 'int cot_one(void);;'

echo "$passed passed, $failed failed"
[ $failed -eq 0 ]
