/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_rows.h: the arithmetic of the channel-first kernels. Lanes are consecutive tokens of one channel: a
 * tap is the same row of f32 in the first-level cache, loaded one element further on.
 *
 * Each loop exists twice. The fast one takes whole vectors of one sequence, for K = 2..8 as a constant (or K as a
 * variable). The other takes what is left: parts of a vector, and vectors where sequences meet. */
#ifndef COT_CAUSAL_CONV1D_ROWS_H
#define COT_CAUSAL_CONV1D_ROWS_H

#include "causal_conv1d_stage.h"

/* y[i] = act(bias + sum_k weight[k] * x[i+k]), i < n */
typedef struct conv1d_row {
    int64_t n, K;
    const float *x;      /* n+K-1 inputs, and a vector more that may be read */
    const float *weight; /* [K+1]: the bias follows */
    void *y;
    cot_dtype dtype; /* y's */
    bool silu, stream;
    const char *next;   /* x of the work that comes next, NULL if not worth a prefetch */
    const int32_t *ids; /* NULL, or input i+k counts for output i only if ids[i+k] == ids[i+centre] >= 0 */
    int64_t centre;
    const uint8_t *mixed; /* with ids: where sequences meet within outputs [i*MIXED_BLOCK, (i+1)*MIXED_BLOCK) */
} conv1d_row;

enum { CONV1D_MIXED_BLOCK = 64 };

V_INLINE char *conv1d_y_at(const conv1d_row *row, int64_t i)
{
    return (char *)row->y + i * (row->dtype == COT_F32 ? 4 : 2);
}

V_INLINE vm conv1d_valid(const int32_t *ids, int64_t i, int64_t tap, int64_t centre)
{
    const vi own = vi_load(ids + i + centre);
    return vm_and(vm_equal(vi_load(ids + i + tap), own), vm_not_negative(own));
}

static void conv1d_convolve_edge(const conv1d_row *row, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i += VW) {
        vf z = v_set1(row->weight[row->K]);
        for (int64_t k = 0; k < row->K; k++) {
            vf x = v_load(row->x + i + k);
            if (row->ids != NULL)
                x = v_keep(conv1d_valid(row->ids, i, k, row->centre), x);
            z = v_fma(v_set1(row->weight[k]), x, z);
        }
        if (row->silu)
            z = v_silu(z);
        if (row->ids != NULL)
            z = v_keep(vm_not_negative(vi_load(row->ids + i + row->centre)), z);
        v_store_n_as(conv1d_y_at(row, i), row->dtype, z, (int)(end - i < VW ? end - i : VW));
    }
}

/* (end - begin) % VW == 0 */
V_INLINE void conv1d_convolve_body(const conv1d_row *row, int64_t begin, int64_t end, int64_t K, cot_dtype dtype)
{
    const int64_t size = dtype == COT_F32 ? 4 : 2;
    const float *x = row->x;
    char *y = row->y;
    const bool silu = row->silu, stream = row->stream;
    vf w[CONV1D_MAX_K];
    for (int64_t k = 0; k < K; k++)
        w[k] = v_set1(row->weight[k]);
    const vf bias = v_set1(row->weight[K]);
    const char *next = row->next != NULL ? row->next : (const char *)x; /* no harm: it is there already */
    for (int64_t i = begin; i < end; i += VW) {
        v_prefetch(next + i * size);
        vf z = bias;
        V_UNROLL
        for (int64_t k = 0; k < K; k++)
            z = v_fma(w[k], v_load(x + i + k), z);
        if (silu)
            z = v_silu(z);
        if (stream)
            v_stream_as(y + i * size, dtype, z);
        else
            v_store_as(y + i * size, dtype, z);
    }
}

#define CONV1D_CONVOLVE(width, dtype)                                                                      \
    static void conv1d_convolve_##width##_##dtype(const conv1d_row *row, int64_t begin, int64_t end)       \
    {                                                                                                      \
        conv1d_convolve_body(row, begin, end, width == 0 ? row->K : width, COT_##dtype);                   \
    }
CONV1D_EACH_INSTANCE(CONV1D_CONVOLVE)

typedef void (*conv1d_convolve_part)(const conv1d_row *, int64_t, int64_t);

#define CONV1D_CONVOLVES(width) \
    {conv1d_convolve_##width##_F32, conv1d_convolve_##width##_F16, conv1d_convolve_##width##_BF16}
static const conv1d_convolve_part conv1d_convolves[8][3] = {
    CONV1D_CONVOLVES(0), CONV1D_CONVOLVES(2), CONV1D_CONVOLVES(3), CONV1D_CONVOLVES(4),
    CONV1D_CONVOLVES(5), CONV1D_CONVOLVES(6), CONV1D_CONVOLVES(7), CONV1D_CONVOLVES(8),
};

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
    const int64_t size = row->dtype == COT_F32 ? 4 : 2, bytes = VW * size;
    /* Stores that straddle cache lines cost twice, and streaming ones fault: begin where y is aligned. */
    const int64_t head = -(int64_t)((uintptr_t)row->y / (uintptr_t)size) & (bytes / size - 1);
    for (int64_t i = 0; i < row->n;) {
        int64_t end = i + conv1d_same_kind(row->mixed, i, row->n);
        if (row->mixed != NULL && row->mixed[i / CONV1D_MIXED_BLOCK]) {
            conv1d_convolve_edge(row, i, end);
            i = end;
            continue;
        }
        const int64_t first = end - i <= head ? end : i + head; /* i is 0 or a multiple of VW */
        const int64_t last = first + (end - first) / VW * VW;
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
