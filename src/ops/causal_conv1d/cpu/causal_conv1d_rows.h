/* SPDX-License-Identifier: Apache-2.0
 * causal_conv1d_rows.h: the arithmetic of the channel-first kernels. The lanes of a vector are consecutive tokens of
 * one channel.
 *
 * A tap is a load from the same f32 row, one element further on. The row is x itself if x is f32, else a copy in the
 * L1 cache.
 *
 * Each loop exists twice. The fast loop handles whole vectors of one sequence, for a constant K = 2..8 or a variable K.
 * The general loop (`..._general`) handles the rest: partial vectors, and groups of 64 outputs whose inputs are of
 * several sequences, or padding. */
#ifndef COT_CAUSAL_CONV1D_ROWS_H
#define COT_CAUSAL_CONV1D_ROWS_H

#include "causal_conv1d_instances.h"
#include "causal_conv1d_pieces.h"
#include "causal_conv1d_to_f32.h"
#include "simd/silu.h"

/* l1, l2: the addresses that the loop prefetches into the L1 and the L2 cache while it computes element 0. For later
 * elements it adds the same offset to both. Measured as a fraction of a copy's speed, forward with tensors of at least
 * CONV1D_NONTEMPORAL_BYTES: none 0.55, L1 alone 0.75, L2 alone 0.83, both 0.89. */
typedef struct conv1d_prefetch_base {
    uintptr_t l1, l2;
} conv1d_prefetch_base;

enum {
    CONV1D_L1_DISTANCE = 1024, /* bytes: about 15 vectors of work, the latency of memory */
    CONV1D_L2_DISTANCE = 8192,
    CONV1D_WRITE_DISTANCE = 512 /* bytes, for ordinary stores of y */
};

/* For a row that is read directly from memory: prefetches further along the same row. The distance covers the
 * latency. */
static inline conv1d_prefetch_base conv1d_prefetch_same_row(const void *row)
{
    return (conv1d_prefetch_base){(uintptr_t)row + CONV1D_L1_DISTANCE, (uintptr_t)row + CONV1D_L2_DISTANCE};
}

/* For a row that was copied before: prefetches `next`, the row that follows. Without a next row, prefetches `row`
 * again. */
static inline conv1d_prefetch_base conv1d_prefetch_next_row(const void *row, const void *next)
{
    const uintptr_t address = (uintptr_t)(next != NULL ? next : row);
    return (conv1d_prefetch_base){address, address};
}

V_INLINE void conv1d_prefetch(const conv1d_prefetch_base *prefetch, int64_t offset)
{
    v_prefetch((const void *)(prefetch->l1 + (uintptr_t)offset));
    v_prefetch_l2((const void *)(prefetch->l2 + (uintptr_t)offset));
}

/* y[i] = act(bias + sum_k weight[k] * x[i+k]), i < n */
typedef struct conv1d_row {
    int64_t n, K;
    const float *x;      /* n+K-1 inputs */
    const float *weight; /* [K+1]: K weights, then the bias */
    void *y;
    cot_dtype dtype; /* dtype of y */
    bool silu, nontemporal;
    conv1d_prefetch_base prefetch; /* addresses to prefetch */
    /* NULL, or input i+k contributes to output i only if seq_ids[i+k] == seq_ids[i+output_offset] >= 0 */
    const int32_t *seq_ids;
    int64_t output_offset; /* the token of output i is at seq_ids[i+output_offset]: K-1 in the forward, 0 for dx */
    /* With seq_ids. mixed[g]: whether the inputs of outputs [64 g, 64 g + 64) are of several sequences, or
     * padding. */
    const uint8_t *mixed;
} conv1d_row;

enum { CONV1D_GROUP_TOKENS = 64 }; /* the outputs of one entry of `mixed`: a multiple of 2 VW */

V_INLINE char *conv1d_y_element(const conv1d_row *row, int64_t i)
{
    return (char *)row->y + i * conv1d_element_size(row->dtype);
}

V_INLINE vm conv1d_valid_lanes(const int32_t *seq_ids, int64_t i, int64_t tap, int64_t output_offset)
{
    const vi output_ids = vi_load(seq_ids + i + output_offset);
    return vm_and(vm_equal(vi_load(seq_ids + i + tap), output_ids), vm_not_negative(output_ids));
}

static void conv1d_convolve_general(const conv1d_row *row, int64_t begin, int64_t end)
{
    for (int64_t i = begin; i < end; i += VW) {
        const int lanes = (int)(end - i < VW ? end - i : VW);
        vf z = v_set1(row->weight[row->K]), total = v_zero();
        for (int64_t k = 0; k < row->K; k++) {
            conv1d_close_tap_chunk(k, &z, &total);
            vf x = v_load_n(row->x + i + k, lanes);
            if (row->seq_ids != NULL)
                x = v_maskz(conv1d_valid_lanes(row->seq_ids, i, k, row->output_offset), x);
            z = v_fma(v_set1(row->weight[k]), x, z);
        }
        z = conv1d_tap_sum(row->K, z, total);
        if (row->silu)
            z = v_silu_as(row->dtype, z);
        if (row->seq_ids != NULL)
            z = v_maskz(vm_not_negative(vi_load(row->seq_ids + i + row->output_offset)), z);
        v_store_n_as(conv1d_y_element(row, i), row->dtype, z, lanes);
    }
}

/* z of two vectors of outputs. x points to the oldest input of the first output. */
V_INLINE void conv1d_convolve_two(const float *x, const vf *w, vf bias, int64_t K, vf z[2])
{
    vf total[2] = {v_zero(), v_zero()};
    z[0] = z[1] = bias;
    V_UNROLL
    for (int64_t k = 0; k < K; k++)
        for (int v = 0; v < 2; v++) {
            conv1d_close_tap_chunk(k, &z[v], &total[v]);
            z[v] = v_fma(w[k], v_load(x + v * VW + k), z[v]);
        }
    for (int v = 0; v < 2; v++)
        z[v] = conv1d_tap_sum(K, z[v], total[v]);
}

/* Requires (end - begin) % (2 * VW) == 0. The loop sums the taps of the next vectors before the activation of the
 * current ones. One chain from tap to output is longer than the processor's out-of-order window. In bf16, in the
 * L1 cache, 16 outputs take 12.3 cycles instead of 13.5. */
V_INLINE void conv1d_convolve_body(const conv1d_row *row, int64_t begin, int64_t end, int64_t K, cot_dtype dtype)
{
    const int64_t size = conv1d_element_size(dtype);
    const float *x = row->x;
    char *y = row->y;
    const bool silu = row->silu, nontemporal = row->nontemporal;
    vf w[CONV1D_MAX_K], z[2], next[2];
    for (int64_t k = 0; k < K; k++)
        w[k] = v_set1(row->weight[k]);
    const vf bias = v_set1(row->weight[K]);
    const conv1d_prefetch_base prefetch = row->prefetch;
    conv1d_convolve_two(x + begin, w, bias, K, z);
    for (int64_t i = begin; i < end; i += 2 * VW) {
        const int64_t next_i = i + 2 * VW < end ? i + 2 * VW : i;
        /* `i * size` is an offset in y, also used for x: both tensors have the same dtype. If outputs pass through a
         * buffer of f32 and x has 16 bits, each step prefetches twice the bytes that it reads, and the last steps
         * prefetch beyond the row. This is harmless. */
        for (int64_t line = 0; line < 2 * VW * size; line += 64)
            conv1d_prefetch(&prefetch, i * size + line);
        conv1d_convolve_two(x + next_i, w, bias, K, next);
        if (silu)
            v_silus_as(dtype, z, 2);
        if (nontemporal) {
            v_stream2_as(y + i * size, dtype, z[0], z[1]);
        } else {
            v_prefetch_write(y + i * size + CONV1D_WRITE_DISTANCE);
            v_store2_as(y + i * size, dtype, z[0], z[1]);
        }
        z[0] = next[0];
        z[1] = next[1];
    }
}

#define CONV1D_DEFINE_CONVOLVE(width, dtype)                                                         \
    static void conv1d_convolve_##width##_##dtype(const conv1d_row *row, int64_t begin, int64_t end) \
    {                                                                                                \
        conv1d_convolve_body(row, begin, end, width == 0 ? row->K : width, COT_##dtype);             \
    }
#define CONV1D_DEFINE_CONVOLVES(width) CONV1D_EACH_DTYPE(CONV1D_DEFINE_CONVOLVE, width)
CONV1D_EACH_WIDTH(CONV1D_DEFINE_CONVOLVES)

typedef void (*conv1d_convolve_fn)(const conv1d_row *, int64_t, int64_t);

#define CONV1D_CONVOLVE_ENTRY(width)                                                                 \
    {                                                                                                \
        conv1d_convolve_##width##_F32, conv1d_convolve_##width##_F16, conv1d_convolve_##width##_BF16 \
    }
static const conv1d_convolve_fn conv1d_convolve_table[CONV1D_INSTANCES][3] = CONV1D_TABLE(CONV1D_CONVOLVE_ENTRY);

/* Number of outputs of [i, end) before `mixed` changes its value. */
static inline int64_t conv1d_uniform_length(const uint8_t *mixed, int64_t i, int64_t end)
{
    if (mixed == NULL)
        return end - i;
    int64_t group = i / CONV1D_GROUP_TOKENS;
    const uint8_t is_mixed = mixed[group];
    while (group * CONV1D_GROUP_TOKENS < end && mixed[group] == is_mixed)
        group++;
    return (group * CONV1D_GROUP_TOKENS < end ? group * CONV1D_GROUP_TOKENS : end) - i;
}

static void conv1d_convolve(const conv1d_row *row)
{
    const conv1d_convolve_fn convolve_vectors =
        conv1d_convolve_table[conv1d_instance_index(row->K)][row->dtype - COT_F32];
    const int64_t size = conv1d_element_size(row->dtype);
    /* Start the vector loop where y is aligned: a store that crosses a cache line costs twice, and a non-temporal
     * one faults. */
    const int64_t unaligned_outputs = -(int64_t)((uintptr_t)row->y / (uintptr_t)size) & (2 * VW - 1);
    for (int64_t i = 0; i < row->n;) { /* i is 0 or a multiple of CONV1D_GROUP_TOKENS, and so of 2 VW */
        int64_t end = i + conv1d_uniform_length(row->mixed, i, row->n);
        if (row->mixed != NULL && row->mixed[i / CONV1D_GROUP_TOKENS]) {
            conv1d_convolve_general(row, i, end);
            i = end;
            continue;
        }
        const int64_t vectors_begin = end - i <= unaligned_outputs ? end : i + unaligned_outputs;
        const int64_t vectors_end = vectors_begin + (end - vectors_begin) / (2 * VW) * (2 * VW);
        if (vectors_begin > i)
            conv1d_convolve_general(row, i, vectors_begin);
        if (vectors_end > vectors_begin)
            convolve_vectors(row, vectors_begin, vectors_end);
        if (end > vectors_end)
            conv1d_convolve_general(row, vectors_end, end);
        i = end;
    }
}

/* Writes K+1 floats for each channel of [d_begin, d_end): its K weights and its bias. */
static inline void conv1d_copy_weights(float *rows, const cot_tensor *weight, const cot_tensor *bias, int64_t K,
                                       int64_t d_begin, int64_t d_end)
{
    for (int64_t d = d_begin; d < d_end; d++, rows += K + 1) {
        for (int64_t k = 0; k < K; k++)
            rows[k] = (float)cot_load_f64(weight->data, weight->dtype, d * weight->stride[0] + k * weight->stride[1]);
        rows[K] = cot_is_present(bias) ? (float)cot_load_f64(bias->data, bias->dtype, d * bias->stride[0]) : 0;
    }
}

/* Number of outputs at the start of a piece that read a copy of their inputs, if x is read in place. The first K-1
 * outputs may read inputs before valid_begin, which are in a state or 0. If they do, the number is CONV1D_GROUP_TOKENS
 * (one entry of `mixed`), or that of all outputs of a shorter piece. Else it is 0. */
static inline int64_t conv1d_outputs_from_copy(const conv1d_piece *piece, int64_t K)
{
    const int64_t n = piece->end - piece->begin;
    if (piece->begin - (K - 1) >= piece->valid_begin)
        return 0;
    return n < CONV1D_GROUP_TOKENS ? n : CONV1D_GROUP_TOKENS;
}

/* Writes, as f32, the inputs of tokens begin .. end-1 of the piece, and the K-1 inputs before them. Inputs before
 * valid_begin are in the initial state, or 0. */
static inline void conv1d_copy_inputs(const conv1d_piece *piece, const cot_tensor *x, const cot_tensor *initial_state,
                                      int64_t K, int64_t d, int64_t end, float *to)
{
    int64_t position = piece->begin - (K - 1);
    for (; position < piece->valid_begin; position++)
        *to++ = cot_is_present(initial_state) && piece->state >= 0
                    ? conv1d_load(initial_state, piece->state, d, position - piece->valid_begin + K - 1)
                    : 0;
    conv1d_gather(to, conv1d_element(x, piece->b, d, position), x->dtype, x->stride[2], end - position);
}

/* Computes `mixed` (see conv1d_row) for n outputs, whose n+K-1 inputs have these seq_ids. */
static inline void conv1d_mark_mixed(uint8_t *mixed, const int32_t *seq_ids, int64_t n, int64_t K)
{
    for (int64_t i = 0; i < n; i += CONV1D_GROUP_TOKENS) {
        const int64_t end = (i + CONV1D_GROUP_TOKENS < n ? i + CONV1D_GROUP_TOKENS : n) + K - 1;
        int32_t different = 0;
        for (int64_t j = i; j < end; j++)
            different |= seq_ids[j] ^ seq_ids[i];
        mixed[i / CONV1D_GROUP_TOKENS] = different != 0 || seq_ids[i] < 0;
    }
}

#endif
