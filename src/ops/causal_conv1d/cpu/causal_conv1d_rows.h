/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_rows.h: the arithmetic of the channel-first kernels. Lanes are consecutive tokens of one channel: a
 * tap is the same row of f32, loaded one element further on: x itself where it is f32, else a copy in the first-level
 * cache.
 *
 * Each loop exists twice. The fast one takes whole vectors of one sequence, for K = 2..8 as a constant (or K as a
 * variable). The other takes what is left: parts of a vector, and vectors where sequences meet. */
#ifndef COT_CAUSAL_CONV1D_ROWS_H
#define COT_CAUSAL_CONV1D_ROWS_H

#include "causal_conv1d_stage.h"

/* Where the prefetches that go with element 0 of a row point: into the first-level cache, into the second-level one.
 * Beyond the caches, with streaming stores, the far one alone gives 0.83 of a copy's speed, the near one alone 0.75,
 * both 0.89, none 0.55. */
typedef struct conv1d_ahead {
    uintptr_t near, far;
} conv1d_ahead;

enum {
    CONV1D_NEAR = 1024, /* bytes: about 15 vectors of work, the latency of memory */
    CONV1D_FAR = 8192,
    CONV1D_WRITE = 512 /* of what is stored, not streamed */
};

/* For a row that is read straight from `row`: how far ahead is a matter of time. */
static inline conv1d_ahead conv1d_ahead_in(const void *row)
{
    return (conv1d_ahead){(uintptr_t)row + CONV1D_NEAR, (uintptr_t)row + CONV1D_FAR};
}

/* For a row that was read before: `next` is the one to come, `row` at hand stands in for it if there is none. */
static inline conv1d_ahead conv1d_ahead_of(const void *row, const void *next)
{
    const uintptr_t ahead = (uintptr_t)(next != NULL ? next : row);
    return (conv1d_ahead){ahead, ahead};
}

V_INLINE void conv1d_prefetch(const conv1d_ahead *ahead, int64_t bytes)
{
    v_prefetch((const void *)(ahead->near + (uintptr_t)bytes));
    v_prefetch_far((const void *)(ahead->far + (uintptr_t)bytes));
}

/* y[i] = act(bias + sum_k weight[k] * x[i+k]), i < n */
typedef struct conv1d_row {
    int64_t n, K;
    const float *x;      /* n+K-1 inputs */
    const float *weight; /* [K+1]: the bias follows */
    void *y;
    cot_dtype dtype; /* y's */
    bool silu, stream;
    conv1d_ahead ahead; /* what to prefetch */
    const int32_t *ids; /* NULL, or input i+k counts for output i only if ids[i+k] == ids[i+centre] >= 0 */
    int64_t centre;
    const uint8_t *mixed; /* with ids: where sequences meet within outputs [i*MIXED_BLOCK, (i+1)*MIXED_BLOCK) */
} conv1d_row;

enum { CONV1D_MIXED_BLOCK = 64 };

V_INLINE char *conv1d_y_at(const conv1d_row *row, int64_t i)
{
    return (char *)row->y + i * conv1d_size(row->dtype);
}

V_INLINE vm conv1d_valid(const int32_t *ids, int64_t i, int64_t tap, int64_t centre)
{
    const vi own = vi_load(ids + i + centre);
    return vm_and(vm_equal(vi_load(ids + i + tap), own), vm_not_negative(own));
}

static void conv1d_convolve_edge(const conv1d_row *row, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i += VW) {
        const int lanes = (int)(end - i < VW ? end - i : VW);
        vf z = v_set1(row->weight[row->K]), before = v_zero();
        for (int64_t k = 0; k < row->K; k++) {
            conv1d_next_tap(k, &z, &before);
            vf x = v_load_n(row->x + i + k, lanes);
            if (row->ids != NULL)
                x = v_keep(conv1d_valid(row->ids, i, k, row->centre), x);
            z = v_fma(v_set1(row->weight[k]), x, z);
        }
        z = conv1d_taps_sum(row->K, z, before);
        if (row->silu)
            z = v_silu_as(row->dtype, z);
        if (row->ids != NULL)
            z = v_keep(vm_not_negative(vi_load(row->ids + i + row->centre)), z);
        v_store_n_as(conv1d_y_at(row, i), row->dtype, z, lanes);
    }
}

/* z of two vectors of outputs, x at the first one's oldest input. */
V_INLINE void conv1d_convolve_two(const float *x, const vf *w, vf bias, int64_t K, vf z[2])
{
    vf before[2] = {v_zero(), v_zero()};
    z[0] = z[1] = bias;
    V_UNROLL
    for (int64_t k = 0; k < K; k++)
        for (int v = 0; v < 2; v++) {
            conv1d_next_tap(k, &z[v], &before[v]);
            z[v] = v_fma(w[k], v_load(x + v * VW + k), z[v]);
        }
    for (int v = 0; v < 2; v++)
        z[v] = conv1d_taps_sum(K, z[v], before[v]);
}

/* (end - begin) % (2 * VW) == 0. The taps of the next vectors are summed before the activation of these: one chain of
 * operations from tap to output is longer than what the processor looks ahead (in bf16, 12.3 cycles for 16 outputs in
 * the first-level cache instead of 13.5). */
V_INLINE void conv1d_convolve_body(const conv1d_row *row, int64_t begin, int64_t end, int64_t K, cot_dtype dtype)
{
    const int64_t size = conv1d_size(dtype);
    const float *x = row->x;
    char *y = row->y;
    const bool silu = row->silu, stream = row->stream;
    vf w[CONV1D_MAX_K], z[2], next[2];
    for (int64_t k = 0; k < K; k++)
        w[k] = v_set1(row->weight[k]);
    const vf bias = v_set1(row->weight[K]);
    const conv1d_ahead ahead = row->ahead;
    conv1d_convolve_two(x + begin, w, bias, K, z);
    for (int64_t i = begin; i < end; i += 2 * VW) {
        const int64_t following = i + 2 * VW < end ? i + 2 * VW : i;
        for (int64_t line = 0; line < 2 * VW * size; line += 64)
            conv1d_prefetch(&ahead, i * size + line);
        conv1d_convolve_two(x + following, w, bias, K, next);
        if (silu)
            v_silus_as(dtype, z, 2);
        if (stream) {
            v_stream2_as(y + i * size, dtype, z[0], z[1]);
        } else {
            v_prefetch_write(y + i * size + CONV1D_WRITE);
            v_store2_as(y + i * size, dtype, z[0], z[1]);
        }
        z[0] = next[0];
        z[1] = next[1];
    }
}

#define CONV1D_CONVOLVE(width, dtype)                                                                \
    static void conv1d_convolve_##width##_##dtype(const conv1d_row *row, int64_t begin, int64_t end) \
    {                                                                                                \
        conv1d_convolve_body(row, begin, end, width == 0 ? row->K : width, COT_##dtype);             \
    }
#define CONV1D_CONVOLVES_OF(width) CONV1D_EACH_DTYPE(CONV1D_CONVOLVE, width)
CONV1D_EACH_WIDTH(CONV1D_CONVOLVES_OF)

typedef void (*conv1d_convolve_part)(const conv1d_row *, int64_t, int64_t);

#define CONV1D_CONVOLVES(width)                                                                      \
    {                                                                                                \
        conv1d_convolve_##width##_F32, conv1d_convolve_##width##_F16, conv1d_convolve_##width##_BF16 \
    }
static const conv1d_convolve_part conv1d_convolves[CONV1D_INSTANCES][3] = CONV1D_TABLE(CONV1D_CONVOLVES);

/* The number of outputs of [i, end) up to the next change between one sequence and several. */
static inline int64_t conv1d_same_kind(const uint8_t *mixed, int64_t i, int64_t end)
{
    if (mixed == NULL)
        return end - i;
    int64_t block = i / CONV1D_MIXED_BLOCK;
    const uint8_t kind = mixed[block];
    while (block * CONV1D_MIXED_BLOCK < end && mixed[block] == kind)
        block++;
    return (block * CONV1D_MIXED_BLOCK < end ? block * CONV1D_MIXED_BLOCK : end) - i;
}

static void conv1d_convolve(const conv1d_row *row)
{
    const conv1d_convolve_part whole = conv1d_convolves[conv1d_instance(row->K)][row->dtype - COT_F32];
    const int64_t size = conv1d_size(row->dtype);
    /* Stores that straddle cache lines cost twice, and streaming ones fault: begin where y is aligned. */
    const int64_t head = -(int64_t)((uintptr_t)row->y / (uintptr_t)size) & (2 * VW - 1);
    for (int64_t i = 0; i < row->n;) {
        int64_t end = i + conv1d_same_kind(row->mixed, i, row->n);
        if (row->mixed != NULL && row->mixed[i / CONV1D_MIXED_BLOCK]) {
            conv1d_convolve_edge(row, i, end);
            i = end;
            continue;
        }
        const int64_t first = end - i <= head ? end : i + head; /* i is 0 or a multiple of VW */
        const int64_t last = first + (end - first) / (2 * VW) * (2 * VW);
        if (first > i)
            conv1d_convolve_edge(row, i, first);
        if (last > first)
            whole(row, first, last);
        if (end > last)
            conv1d_convolve_edge(row, last, end);
        i = end;
    }
}

/* Rows of K weights and the bias, for channels [d_begin, d_end). */
static inline void conv1d_stage_weights(float *rows, const cot_tensor *weight, const cot_tensor *bias, int64_t K,
                                        int64_t d_begin, int64_t d_end)
{
    for (int64_t d = d_begin; d < d_end; d++, rows += K + 1) {
        for (int64_t k = 0; k < K; k++)
            rows[k] = (float)cot_load_f64(weight->data, weight->dtype, d * weight->stride[0] + k * weight->stride[1]);
        rows[K] = cot_present(bias) ? (float)cot_load_f64(bias->data, bias->dtype, d * bias->stride[0]) : 0;
    }
}

/* The first outputs of a piece, those that may not have all their inputs in x: none, or a block (see conv1d_row). */
static inline int64_t conv1d_head(const conv1d_piece *piece, int64_t K)
{
    const int64_t n = piece->end - piece->begin;
    if (piece->begin - (K - 1) >= piece->first)
        return 0;
    return n < CONV1D_MIXED_BLOCK ? n : CONV1D_MIXED_BLOCK;
}

/* f32 of the inputs of tokens begin .. end-1 of the piece's sequence: the K-1 before them too. */
static inline void conv1d_stage_inputs(const conv1d_piece *piece, const cot_tensor *x, const cot_tensor *initial_state,
                                       int64_t K, int64_t d, int64_t end, float *to)
{
    int64_t p = piece->begin - (K - 1);
    for (; p < piece->first; p++)
        *to++ = cot_present(initial_state) && piece->state >= 0
                    ? conv1d_load(initial_state, piece->state, d, p - piece->first + K - 1)
                    : 0;
    conv1d_gather(to, conv1d_at(x, piece->b, d, p), x->dtype, x->stride[2], end - p);
}

/* Marks the blocks of outputs [0, n) whose inputs are of several sequences. */
static inline void conv1d_mark_mixed(uint8_t *mixed, const int32_t *ids, int64_t n, int64_t K)
{
    for (int64_t i = 0; i < n; i += CONV1D_MIXED_BLOCK) {
        const int64_t end = (i + CONV1D_MIXED_BLOCK < n ? i + CONV1D_MIXED_BLOCK : n) + K - 1;
        int32_t different = 0;
        for (int64_t j = i; j < end; j++)
            different |= ids[j] ^ ids[i];
        mixed[i / CONV1D_MIXED_BLOCK] = different != 0 || ids[i] < 0;
    }
}

#endif
