#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# Builds libflash_attention_3.so for tools/peers/attention.py --flash-attention-3.
#
#     tools/peers/build_flash_attention_3.sh FLASH_ATTENTION CUTLASS OUTPUT [HEAD_DIM ...]
#
# FLASH_ATTENTION and CUTLASS are clones of github.com/Dao-AILab/flash-attention and of the CUTLASS commit that it names
# (git ls-tree HEAD csrc/cutlass). The options of nvcc are those of its hopper/setup.py. Head dimensions: 64 128 256.
set -eu
[ $# -ge 3 ] || { sed -n '5s/^# *//p' "$0" >&2; exit 2; }
here=$(dirname "$0") source=$1 cutlass=$2 output=$3
shift 3
objects=
for d in ${*:-64 128 256}; do
    nvcc -c -O3 -std=c++17 --use_fast_math -gencode arch=compute_90a,code=sm_90a -Xcompiler -fPIC --expt-relaxed-constexpr \
        --expt-extended-lambda -DCUTE_SM90_EXTENDED_MMA_SHAPES_ENABLED -DCUTLASS_ENABLE_GDC_FOR_SM90 -DNDEBUG \
        -DCUTLASS_DEBUG_TRACE_LEVEL=0 -DFLASHATTENTION_DISABLE_VARLEN -DFLASHATTENTION_DISABLE_LOCAL -DHEAD_DIM="$d" \
        -I"$source/hopper" -I"$cutlass/include" -o "$output.$d.o" "$here/flash_attention_3.cu"
    objects="$objects $output.$d.o"
done
nvcc -shared -cudart static -o "$output" $objects
rm $objects
