#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Shows that check can fail: plants one fault at a time in a copy of a kernel, builds it, and expects `cotangent check`
# to catch it and --report to say where it lives. A fault that changes no line of its file, does not build, or passes
# check is a failure of this script. On a machine with a GPU its kernels have their turn, too. Takes about a minute a
# fault the first time.
#
#   tools/plant_faults.sh [WORK_DIR]     (default: build/faults)
set -eu
cd "$(dirname "$0")/.."
work=${1:-build/faults}
backend=cpu
cuda=OFF
[ ! -e /dev/nvidia0 ] || cuda=ON
kernels=src/ops/causal_conv1d/cpu
dense=src/ops/causal_conv1d_dense/cpu
dropout=src/ops/dropout/cpu
attention=src/ops/attention/cpu
mkdir -p "$work"
passed=0
failed=0

# plant NAME FILE SED_EXPRESSION KERNEL CASES [OP]: the fault, the kernel that has it, the cases that must show it.
plant()
{
    local name=$1 file=$2 expression=$3 kernel=$4 cases=$5 op=${6:-causal_conv1d}
    copy_tree
    sed -i "$expression" "$work/src/$file"
    if cmp -s "$file" "$work/src/$file"; then
        echo "plant_faults: '$name' changes nothing in $file"
        failed=$((failed + 1))
        return
    fi
    if ! cmake --build "$work/build" --target cotangent_program >"$work/log" 2>&1; then
        echo "plant_faults: '$name' does not build:"
        tail -5 "$work/log"
        failed=$((failed + 1))
        return
    fi
    printf '\n== %s (%s)\n' "$name" "$file"
    if "$work/build/cotangent" check "$op" --backend "$backend" --kernel "$kernel" --only "$cases" --report >"$work/report"; then
        echo "plant_faults: check passes although '$name' is planted"
        failed=$((failed + 1))
    else
        grep -m 1 '^FAILED' "$work/report"
        grep -m 1 -A 3 ': FAILED$' "$work/report" | tail -n +2
        grep -m 3 '[0-9] indices beyond the tolerance' "$work/report"
        passed=$((passed + 1))
    fi
}

# The tracked files as they are in the working tree; those that are the same keep their time, so that little is rebuilt.
copy_tree()
{
    git ls-files include src cmake CMakeLists.txt tools/write_commit.sh tools/compile_device_code.sh | while read -r file; do
        mkdir -p "$work/src/$(dirname "$file")"
        cmp -s "$file" "$work/src/$file" || cp "$file" "$work/src/$file"
    done
}

copy_tree
[ -f "$work/build/build.ninja" ] || 
    cmake --log-level=WARNING -G Ninja -S "$work/src" -B "$work/build" -DCOT_TESTS=OFF -DCOT_INSTALL=OFF \
        -DCOT_PYTHON=OFF -DCOT_CUDA=$cuda

plant 'a wrong tap in the forward' $kernels/causal_conv1d_rows.h \
    's/v_fma(w\[k\], v_load(x + v \* VW + k), z\[v\])/v_fma(w[k], v_load(x + v * VW + (k == 1 ? 0 : k)), z[v])/' \
    causal_conv1d_fwd_channel_first 'forward f32 channel-first'
plant 'a row streamed twice' $kernels/causal_conv1d_tiles.h 's/from += ld) {/from += i == 2 ? 0 : ld) {/' \
    causal_conv1d_fwd_channel_last_avx2 'forward f32 channel-last B1 D528'
plant 'a tap left out of dweight' $kernels/causal_conv1d_bwd_channel_first.c \
    's/sums\[K - 2\] = v_fma(x, one, sums\[K - 2\]);/(void)one;/' \
    causal_conv1d_bwd_channel_first 'backward f32 channel-first'
plant 'one channel skipped' $kernels/causal_conv1d_scalar.c \
    's/for (int64_t t = span.first; cot_present(&a->y) \&\& t < span.end; t++) {/for (int64_t t = span.first; d != 3 \&\& cot_present(\&a->y) \&\& t < span.end; t++) {/' \
    causal_conv1d_fwd_scalar 'forward f32 channel-first'
plant 'the last token of a channel lost' $kernels/causal_conv1d_scalar.c \
    's/for (int64_t t = span.first; cot_present(&a->y) \&\& t < span.end; t++) {/for (int64_t t = span.first; cot_present(\&a->y) \&\& t < span.end - (d == 0); t++) {/' \
    causal_conv1d_fwd_scalar 'forward bf16 channel-last'
plant 'g of one token off by 2^-12' $kernels/causal_conv1d_scalar.c \
    's/ring\[p % K\] = g;/ring[p % K] = p == 5 ? g * 1.000244f : g;/' \
    causal_conv1d_bwd_scalar 'backward f32 channel-first'
plant 'taps of dx in the order of the forward' $dense/causal_conv1d_dense_products.h \
    's/o->wt + ((i \* out + n) \* K + K - 1 - k0 - k)/o->wt + ((i * out + n) * K + k0 + k)/' \
    causal_conv1d_dense_bwd_tiled_scalar 'backward f32' causal_conv1d_dense
plant 'the first chunk of a part of the tokens lost' $dense/causal_conv1d_dense_bwd_tiled.c \
    's/sum, l->o_rows, chunk > first, NULL/sum, l->o_rows, chunk > first + 1, NULL/' \
    causal_conv1d_dense_bwd_tiled_scalar 'T1025' causal_conv1d_dense
plant 'padding a token short in im2col' $kernels/causal_conv1d_fwd_im2col.c \
    's/load_inputs(tile, c->p, b, t - (z->K - 1) + k, d);/load_inputs(tile, c->p, b, t - (z->K - 2) + k, d);/' \
    causal_conv1d_fwd_im2col_scalar 'forward f32 channel-first'
# The fault of the document that mhc comes from: a grid that reached stream 0 alone.
plant 'dx of stream 0 alone' src/ops/mhc/cpu/mhc_pre_bwd_tiles.c \
    's/number < chunks->count; number++/number < chunks->per_stream; number++/' \
    mhc_pre_bwd_tiles_scalar 'n4 D8 phi~1' mhc_pre
plant 'an error in stream 0 alone' src/ops/mhc/cpu/mhc_pre_bwd_tiles.c \
    's/h_pre = v_set1(s->h_pre\[own->i\]\[t + r\]);/h_pre = v_set1(s->h_pre[own->i][t + r] * (own->i == 0 ? 1.01f : 1));/' \
    mhc_pre_bwd_tiles_scalar 'n4 D8 phi~1' mhc_pre
if [ $cuda = ON ]; then
    backend=cuda
    plant 'stream 0 alone, on a GPU' src/ops/mhc/cuda/mhc_launch.c \
        's/s->D \/ MHC_SM90_CHUNK, streams}/s->D \/ MHC_SM90_CHUNK, 1}/' mhc_pre_bwd_cluster 'n4 D1280' mhc_pre
    plant 'a token short before a tile, on a GPU' src/ops/causal_conv1d/cuda/causal_conv1d_fwd_im2col.cu \
        's/row > HALO - W)/row > HALO - W + 1)/' causal_conv1d_fwd_im2col 'bf16 channel-last'
    backend=cpu
fi

plant 'the mask of a row begun anew in its middle' $dropout/dropout_fwd_rows.c \
    's/row->group + (uint64_t)(i \/ 8)/row->group/' dropout_fwd_rows 'forward f32 contiguous' dropout
plant 'a row left out of dbias' $dropout/dropout_bwd_rows.c \
    's/total\[i\] += block\[i\];/total[i] += r == 16 ? 0 : block[i];/' dropout_bwd_rows 'backward f32' dropout
plant 'the last column of a group dropped with the one before' src/core/philox.h \
    's/words\[j \/ 2\] >> (16 \* (j % 2))/words[j \/ 2] >> (16 * (j % 2 \&\& j != 7))/' dropout_fwd_scalar 'forward bf16' dropout
plant 'a slope of GELU without its second term' src/simd/gelu.h \
    's/v_fnma(a, v_set1(0.3989422804014327f), r)/r/' dropout_bwd_rows 'backward f32 contiguous' dropout

plant 'a row of out not scaled to its new maximum' $attention/attention_fwd_tiled.c \
    's/shrinks\[i\] != 1 \&\& c < w->dv/shrinks[i] != 1 \&\& r + i != 5 \&\& c < w->dv/' attention_fwd_tiled 'forward f32' attention
plant 'a mask one key too wide' $attention/attention_fwd_tiled.c \
    's/border(low - c, high - c)/border(low - c, high + 1 - c)/' attention_fwd_tiled 'causal' attention
plant 'D too small in dS' $attention/attention_bwd_pairs.h \
    's/v_mul(\*prob, v_sub(dp, D))/v_mul(*prob, v_sub(dp, v_mul(D, v_set1(0.97f))))/' attention_bwd_tiled 'backward bf16' attention
plant 'dq of the first chunk alone' $attention/attention_bwd_tiled.c \
    's/for (int64_t chunk = 0; chunk < c->w.chunks; chunk++)/for (int64_t chunk = 0; chunk < 1; chunk++)/' \
    attention_bwd_tiled 'backward' attention
plant 'half of the keys in a dbias that all of them share' $attention/attention_bwd_dbias.h \
    's/(one_key ? TALL : r + 1)/(one_key ? TALL \/ 2 : r + 1)/' attention_bwd_tiled '+bias' attention
if grep -q amx_bf16 /proc/cpuinfo; then
    plant 'the last product that is pending left out' $attention/attention_bwd_beside.h \
        's/while (y->done < y->count)/while (y->done + 1 < y->count)/' attention_bwd_tiled_amx_split 'backward f16' attention
    plant 'a part of scores overwritten while it waits' $attention/attention_bwd_beside.h \
        's/if (w.count + (w.rows > 0) + n > WAITING)/if (false)/' attention_bwd_tiled_amx_split3 'backward f32' attention
    plant 'rows of f32 without their last term as pairs' src/simd/matmul_amx.h \
        's/int term = 1; term < COT_MATMUL_SPLIT; term++/int term = 1; term < 2; term++/' \
        causal_conv1d_dense_bwd_tiled_amx_split3 'backward f32' causal_conv1d_dense
fi
plant 'weights of merge that leave the sink out' $attention/attention_rows.c \
    's/v_add(v_add(ex, ey), v_exp_flush(v_sub(z, most)))/v_add(ex, ey)/' attention_merge_rows '+sink' attention
plant 'a sum of weights without the sink' $attention/attention_scalar.c \
    's/real sum = has_sink ? EXP(sink - most) : 0;/real sum = 0;/' attention_fwd_scalar '+sink' attention

printf '\n%d passed, %d failed\n' "$passed" "$failed"
[ "$failed" -eq 0 ]
