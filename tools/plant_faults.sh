#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Shows that the tests can fail: plants one fault at a time in a copy of the tree, rebuilds the affected files, and
# expects the fault's command to fail. The faults are in tests/faults/*.faults; tests/faults/README.md describes an
# entry.
#
#   tools/plant_faults.sh [--work DIR] [--cuda BUILD] [--python BUILD] [NAME]
#   tools/plant_faults.sh [--work DIR] --sample N [--seed S]
#
#   NAME      only faults whose name contains this text
#   --sample  N random faults among those that need neither CUDA nor Python and rebuild little; prints the seed
#   --work    the folder of the copy (build/faults)
#   --cuda    a build with CUDA, for faults of CUDA kernels, which run on tests/emulator (build)
#   --python  a build with the extension and with the Python of tests/python/run.sh in venv/ (build)
#
# First every command runs without a fault, and must pass. This script fails if a fault changes no line, does not build,
# or passes its command, and if no fault is selected. Faults of an instruction set that this processor lacks are
# skipped. Without NAME, faults of CUDA and Python are skipped too if there is no such build.
set -u
cd "$(dirname "$0")/.."
root=$PWD work=build/faults cuda=build python=build sample= seed= only=
usage()
{
    sed -n 's/^#   \(tools.*\)/usage: \1/p' "$0" >&2
    exit 2
}
while [ $# -gt 0 ]; do
    case $1 in
    --work | --cuda | --python | --sample | --seed)
        [ $# -gt 1 ] || usage
        declare "${1#--}=$2"
        shift
        ;;
    -*) usage ;;
    *) [ -z "$only" ] || usage; only=$1 ;;
    esac
    shift
done
for number in sample seed; do
    [ -z "${!number}" ] || [ "${!number}" -gt 0 ] 2>/dev/null ||
        { echo "plant_faults: --$number is '${!number}', expected a whole number from 1" >&2; exit 2; }
done
mkdir -p "$work"
work=$(realpath "$work") cuda=$(realpath "$cuda") python=$(realpath "$python")
tree=$work/tree build=$work/tree/build clean=$work/clean log=$work/log

# ---- the table: fault NUMBER has name[], file[], sed[], fails[], needs[] --------------------------------------------
name=() file=() sed=() fails=() needs=() chosen=()
read_faults()
{
    local path line number=-1 key
    for path in tests/faults/*.faults; do
        while IFS= read -r line || [ -n "$line" ]; do
            key=${line%%:*} line=${line#*: }
            case $key in
            '' | '#'*) ;;
            name) number=$((number + 1)) name[number]=$line needs[number]= ;;
            file | sed | fails | needs) declare -g "$key[$number]=$line" ;;
            *) echo "plant_faults: $path: '$key' is no field of a fault" >&2; exit 2 ;;
            esac
        done <"$path"
    done
    for ((number = 0; number < ${#name[@]}; number++)); do
        [ -n "${file[number]-}" ] && [ -n "${sed[number]-}" ] && [ -n "${fails[number]-}" ] ||
            { echo "plant_faults: '${name[number]}' lacks file, sed or fails" >&2; exit 2; }
    done
}

# Prints why the fault cannot be tested here; prints nothing if it can.
obstacle()
{
    local number=$1
    if [ -n "${needs[number]}" ] && ! grep -qw "${needs[number]}" /proc/cpuinfo; then
        echo "this processor lacks ${needs[number]}"
    elif [[ ${fails[number]} == *emulate\ * && ! -f $cuda/tests/emulator/libcuda.so.1 ]]; then
        echo "$cuda has no CUDA (--cuda)"
    elif [[ ${fails[number]} == *emulate_hip\ * && ! -f $cuda/tests/emulator-amd/libamdhip64.so ]]; then
        echo "$cuda has no HIP (--cuda)"
    elif [[ ${fails[number]} == pytest\ * && ! (-d $python/python/cotangent && -x $python/venv/bin/python) ]]; then
        echo "$python has no Python package with a venv (--python)"
    fi
}

# Whether --sample may choose the fault: not with CUDA or Python, and not if most of the library is compiled again.
can_be_sampled()
{
    [[ ${fails[$1]} != *@(emulate|emulate_hip|pytest|tiles)\ * && ${file[$1]} != src/@(core|simd)/* ]] && [ -z "$(obstacle "$1")" ]
}

choose_faults()
{
    local number
    for ((number = 0; number < ${#name[@]}; number++)); do
        [[ "${name[number]}" == *"$only"* ]] || continue
        [ -z "$sample" ] || can_be_sampled "$number" || continue
        chosen+=("$number")
    done
    [ ${#chosen[@]} -gt 0 ] || { echo "plant_faults: no fault's name contains '$only'" >&2; exit 2; }
    [ -n "$sample" ] || return
    : "${seed:=$((SRANDOM % 1000000 + 1))}"
    echo "plant_faults: $sample of ${#chosen[@]} faults, --seed $seed"
    mapfile -t chosen < <(printf '%s\n' "${chosen[@]}" | awk -v seed="$seed" 'BEGIN { srand(seed) } { print rand(), $1 }' |
        LC_ALL=C sort -g | awk -v n="$sample" 'NR <= n { print $2 }')
}

# ---- the copy of the tree --------------------------------------------------------------------------------------------
# Copies the files of the working tree. Equal files keep their modification time, so that a second call builds little.
copy_tree()
{
    local path
    if [ -d "$clean" ]; then # the last call was interrupted
        rm -rf "$tree" || exit 1
        mv "$clean" "$tree"
    fi
    mkdir -p "$tree"
    git ls-files --cached --others --exclude-standard | grep -v '^bench/results/' | LC_ALL=C sort >"$work/files"
    while read -r path; do
        [ -f "$path" ] || continue
        mkdir -p "$tree/$(dirname "$path")"
        cmp -s "$path" "$tree/$path" || cp "$path" "$tree/$path"
    done <"$work/files"
    (cd "$tree" && find . -path ./build -prune -o -type f -print | sed 's:^\./::' | LC_ALL=C sort |
        LC_ALL=C comm -23 - "$work/files" | xargs -r -d '\n' rm)
    [ -f "$build/build.ninja" ] || # a build for these commands only, quick to compile
        cmake --log-level=WARNING -G Ninja -S "$tree" -B "$build" -DCOT_INSTALL=OFF -DCOT_PYTHON=OFF -DCOT_CUDA=OFF -DCOT_HIP=OFF \
            "-DCMAKE_C_FLAGS_RELWITHDEBINFO=-O1 -DCOT_FEW_INSTANCES" >"$log" 2>&1 || { tail -5 "$log"; exit 1; }
}

NOT_BUILT=100

compile()
{
    cmake --build "$build" --parallel "$(nproc)" --target "$1" >"$log" 2>&1 || { grep -m 5 -E 'error|undefined' "$log"; return $NOT_BUILT; }
}

# ---- the commands of `fails`: each builds its program; status 1: a test failed ---------------------------------------

# check OP...: `cotangent check`. Status 2 of this and the other commands: nothing ran.
check()
{
    compile cotangent_program || return
    timeout 300 "$build/cotangent" check "$@" --report
}

# tiles OP...: `cotangent check` with emulated AMX instructions.
tiles()
{
    compile cotangent_emulated_tiles || return
    timeout 300 "$build/cotangent_emulated_tiles" check "$@" --report
}

# unit NAME...: the program test_NAME with arguments
unit()
{
    compile "test_$1" || return
    (cd "$tree" && timeout 300 "$build/test_$1" "${@:2}") || return 1
}

# script FILE...: tests/tools/FILE with the program and arguments
script()
{
    compile cotangent_program || return
    case $1 in
    *.py) (cd "$tree" && timeout 300 /usr/bin/python3 "tests/tools/$1" "$build/cotangent" "${@:2}") || return 1 ;;
    *) (cd "$tree" && timeout 300 "tests/tools/$1" "$build/cotangent" "${@:2}") || return 1 ;;
    esac
}

# trainer: tests/tools/test_resume.py with train_lm
trainer()
{
    compile train_lm || return
    (cd "$tree" && timeout 300 /usr/bin/python3 tests/tools/test_resume.py "$build/train_lm") || return 1
}

# ranks: tests/tools/test_ranks.py with train_lm
ranks()
{
    compile train_lm || return
    (cd "$tree" && python3 tests/tools/test_ranks.py "$build/train_lm" mpirun --oversubscribe --allow-run-as-root \
        --mca btl_vader_single_copy_mechanism none --mca btl self,vader,tcp) >"$log" 2>&1
}

# emulate STEM OP...: `cotangent check OP --backend cuda` on tests/emulator. The PTX of STEM.cu is compiled from the
# copy. The program and the other kernels come from the build with CUDA.
emulate()
{
    local stem=$1 source code=$work/code architecture
    shift
    source=$(echo "$tree"/src/ops/*/cuda/"$stem".cu)
    rm -rf "$code"
    mkdir -p "$code"
    ln -s "$cuda"/cuda/*.fatbin "$cuda"/cuda/*.ptx "$code"
    local to=$code/$stem.ptx
    if [ -f "$code/$stem.compute_90a.ptx" ]; then
        to=$code/$stem.compute_90a.ptx architecture=-arch=compute_90a
    else
        case $stem in *_sm90) architecture=-arch=compute_90a ;; *) architecture='-DCOT_EVERY_GPU -arch=compute_80' ;; esac
    fi
    if [ -n "$planted" ]; then
        rm -f "$to"
        "$(sed -n 's/^COT_NVCC:[A-Z]*=//p' "$cuda/CMakeCache.txt")" -ptx -std=c++17 -O3 $architecture -I"$tree/include" \
            -I"$tree/src" -o "$to" "$source" >"$log" 2>&1 && [ -s "$to" ] || { tail -5 "$log"; return $NOT_BUILT; }
    fi
    EMU_CODE=$code LD_LIBRARY_PATH=$cuda/tests/emulator timeout 300 "$cuda/cotangent" check "$@" --backend cuda --report
}

# emulate_hip STEM OP...: `cotangent check OP --backend hip` on tests/emulator-amd. STEM.cu is compiled from the copy.
emulate_hip()
{
    local stem=$1 source
    shift
    source=$(ls "$tree"/src/ops/*/cuda/"$stem".cu "$tree"/src/ops/*/hip/"$stem".cu 2>/dev/null)
    "$tree/tools/compile_hip_code.sh" clang-19 "$tree" "$work/$stem.hipfb" "$source" >"$log" 2>&1 ||
        { tail -5 "$log"; return $NOT_BUILT; }
    EMU_CODE=$work/$stem.hipfb LD_LIBRARY_PATH=$cuda/tests/emulator-amd timeout 300 "$cuda/cotangent" check "$@" \
        --backend hip --report
}

# pytest FILE...: tests/python/FILE, with the Python modules of the copy and the extension of the build with Python
pytest()
{
    rm -rf "$work/package"
    cp -rL "$python/python" "$work/package"
    cp -r "$tree/python/cotangent" "$work/package"
    (cd "$tree/tests/python" && PYTHONPATH=$work/package PYTHONDONTWRITEBYTECODE=1 timeout 300 "$python/venv/bin/python" -m pytest -q \
        -p no:cacheprovider "$@") || return $(($? == 1 ? 1 : 2))
}

# run FAULT: runs its command and writes the output to $work/output
run()
{
    eval "${fails[$1]}" >"$work/output" 2>&1 </dev/null
}

# Prints the main lines of the output.
show()
{
    grep -m 1 -E '^FAILED|^E  |Error|error:|ERROR|\[  FAILED|expected|Assert' "$work/output" | cut -c 1-200
    grep -m 2 'indices beyond the tolerance' "$work/output"
}

# ---- all selected faults ---------------------------------------------------------------------------------------------
passed=0 failed=0 skipped=0 planted=
complain()
{
    printf 'FAILED: %s\n' "$*"
    failed=$((failed + 1))
}

read_faults
for ((number = 0; number < ${#name[@]}; number++)); do # also those that are not chosen: a rename makes them stale
    sed "${sed[number]}" "${file[number]}" 2>/dev/null | cmp -s - "${file[number]}" &&
        complain "${name[number]}: changes no line of ${file[number]}"
done
choose_faults
able=()
for number in "${chosen[@]}"; do
    why=$(obstacle "$number")
    if [ -z "$why" ]; then
        able+=("$number")
    elif [ -n "$only" ]; then
        complain "${name[number]}: $why"
    else
        echo "skipped: ${name[number]}: $why"
        skipped=$((skipped + 1))
    fi
done

copy_tree
declare -A works # command -> whether it passes without a fault
for number in "${able[@]}"; do
    command=${fails[number]}
    [ -z "${works[$command]-}" ] || continue
    if run "$number"; then
        works[$command]=yes
    else
        works[$command]=no
        tail -5 "$work/output"
        complain "without a fault: $command"
    fi
done
rm -rf "$clean.partial"
cp -a "$tree" "$clean.partial"
mv "$clean.partial" "$clean"

for number in "${able[@]}"; do
    [ "${works[${fails[number]}]}" = yes ] || continue
    path=${file[number]} start=$SECONDS
    rm -rf "$tree"
    cp -a "$clean" "$tree"
    if ! sed -i "${sed[number]}" "$tree/$path" 2>"$log"; then
        complain "${name[number]}: $(tail -1 "$log")"
        continue
    fi
    if cmp -s "$path" "$tree/$path"; then
        complain "${name[number]}: changes no line of $path"
        continue
    fi
    planted=$number
    run "$number"
    status=$?
    planted=
    case $status in
    0) complain "${name[number]}: planted in $path, it passes: ${fails[number]}" ;;
    $NOT_BUILT)
        cat "$work/output"
        complain "${name[number]}: does not build"
        ;;
    2)
        tail -3 "$work/output"
        complain "${name[number]}: its command ran nothing"
        ;;
    *)
        printf 'seen: %s (%d s)\n' "${name[number]}" $((SECONDS - start))
        show | sed 's/^ */    /'
        passed=$((passed + 1))
        ;;
    esac
done
rm -rf "$tree"
mv "$clean" "$tree"

printf '\n%d passed, %d failed, %d skipped\n' "$passed" "$failed" "$skipped"
[ "$failed" -eq 0 ] && [ "$passed" -gt 0 ]
