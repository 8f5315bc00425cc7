/* SPDX-License-Identifier: Apache-2.0
 * dropout_rows.h: what the vector kernels of both directions share: the mask of an item's rows as bits, whatever its
 * source, and rows of any dtype and stride to and from f32.
 *
 * Bit j of byte g of a row of bits is column 8g+j of the item. Given masks are made into bits row by row. A drawn one
 * is drawn by the inner loops themselves, just before they need it: drawing a whole row first left the memory idle
 * meanwhile, and both times added up. Only where rows are short, the draws of many are taken at once. */
#ifndef COT_DROPOUT_ROWS_H
#define COT_DROPOUT_ROWS_H

#include "dropout_tiling.h"
#include "simd/gelu.h"

enum {
    DROPOUT_BITS_KEPT = DROPOUT_MAX_COLUMNS / COT_DROPOUT_GROUP, /* bytes of bits that are at hand */
    DROPOUT_SLACK = 64,                                          /* room behind them for whole calls of the verbs */
    DROPOUT_DRAW = COT_DROPOUT_GROUP * V_PHILOX_GROUPS,          /* columns of one draw */
    DROPOUT_STREAM_BYTES = 8 << 20 /* an output of a call that moves more than this bypasses the caches */
};

V_INLINE int64_t dropout_size(cot_dtype dtype)
{
    return dtype == COT_F32 ? 4 : 2;
}

/* ---- mask ----------------------------------------------------------------------------------------------- */

/* Not in the loops themselves: thirty copies of it took a third of their compile time, and none of the run time. */
static __attribute__((noinline)) void dropout_draw(uint8_t *bits, const v_philox *philox, uint64_t group)
{
    v_philox_keep(bits, philox, group);
}

/* What a row of n columns needs drawn before its columns [i, i+DROPOUT_DRAW): those, and the next already, which then
 * overlaps with them (a Zen 4's bf16 backward in the caches: a tenth less). */
V_INLINE void dropout_draw_ahead(uint8_t *bits, const v_philox *philox, uint64_t group, int64_t i, int64_t n)
{
    if (i == 0)
        dropout_draw(bits, philox, group);
    i += DROPOUT_DRAW;
    if (i < n)
        dropout_draw(bits + i / 8, philox, group + (uint64_t)(i / 8));
}

typedef struct dropout_drawer {
    const dropout_mask *mask;
    const dropout_sizes *sizes;
    v_philox philox;
} dropout_drawer;

static inline dropout_drawer dropout_make_drawer(const dropout_mask *mask, const dropout_sizes *sizes)
{
    dropout_drawer drawer = {.mask = mask, .sizes = sizes};
    if (mask->source == DROPOUT_DRAWN)
        drawer.philox = v_philox_make(dropout_seed(mask), dropout_offset(mask), mask->threshold);
    return drawer;
}

/* How many rows' bits are made at once: their groups follow one another where an item owns whole rows. */
static inline int64_t dropout_rows_at_once(const dropout_sizes *sizes)
{
    return sizes->D <= DROPOUT_MAX_COLUMNS / 2 ? DROPOUT_BITS_KEPT / sizes->groups : 1;
}

/* n bytes, of which bit 0 counts, to bits, and back: a multiplication moves 8 at once. */
static inline void dropout_pack_row(uint8_t *bits, const uint8_t *bytes, int64_t stride, int64_t n)
{
    const int64_t whole = stride == 1 ? n / 8 : 0;
    for (int64_t g = 0; g < whole; g++) {
        uint64_t eight;
        memcpy(&eight, bytes + 8 * g, sizeof eight);
        bits[g] = (uint8_t)((eight & 0x0101010101010101u) * 0x0102040810204080u >> 56);
    }
    for (int64_t g = whole; 8 * g < n; g++) {
        bits[g] = 0;
        for (int64_t d = 8 * g; d < n && d < 8 * g + 8; d++)
            bits[g] = (uint8_t)(bits[g] | (bytes[d * stride] & 1) << (d - 8 * g));
    }
}

static inline void dropout_unpack_row(uint8_t *bytes, int64_t stride, const uint8_t *bits, int64_t n)
{
    const int64_t whole = stride == 1 ? n / 8 : 0;
    for (int64_t g = 0; g < whole; g++) {
        const uint64_t apart = bits[g] * 0x0101010101010101u & 0x8040201008040201u;
        const uint64_t eight = (apart + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
        memcpy(bytes + 8 * g, &eight, sizeof eight);
    }
    for (int64_t d = 8 * whole; d < n; d++)
        bytes[d * stride] = bits[d / 8] >> (d % 8) & 1;
}

/* The bits of rows [r, r+rows), columns [d, d+n), d a multiple of 8; rows > 1 only where the columns are all, and then
 * those of row k begin at bits + k * groups. */
static inline void dropout_keep_bits(uint8_t *bits, const dropout_drawer *drawer, int64_t r, int64_t rows, int64_t d,
                                     int64_t n)
{
    const dropout_mask *mask = drawer->mask;
    const cot_tensor *given = &mask->given;
    const int64_t groups = drawer->sizes->groups, first = d / 8, count = (n + 7) / 8;
    if (mask->source == DROPOUT_DRAWN) {
        for (int64_t g = 0; g < (rows - 1) * groups + count; g += V_PHILOX_GROUPS)
            dropout_draw(bits + g, &drawer->philox, (uint64_t)(r * groups + first + g));
        return;
    }
    for (int64_t k = 0; k < rows; k++) {
        uint8_t *row = bits + k * groups;
        const int64_t stride = cot_is_present(given) ? given->stride[given->rank - 1] : 0;
        const uint8_t *from = cot_is_present(given) ? (const uint8_t *)given->data + dropout_row(given, r + k) : NULL;
        if (mask->source == DROPOUT_BYTES)
            dropout_pack_row(row, from + d * stride, stride, n);
        else if (mask->source == DROPOUT_BITS && stride == 1)
            memcpy(row, from + first, (size_t)count);
        else if (mask->source == DROPOUT_BITS)
            for (int64_t g = 0; g < count; g++)
                row[g] = from[(first + g) * stride];
        else
            memset(row, mask->source == DROPOUT_KEEP_ALL ? 0xff : 0, (size_t)count);
    }
}

/* ---- rows ----------------------------------------------------------------------------------------------- */

V_INLINE char *dropout_at(const cot_tensor *tensor, int64_t r, int64_t d)
{
    const int64_t position = dropout_row(tensor, r) + d * tensor->stride[tensor->rank - 1];
    return (char *)tensor->data + position * (int64_t)cot_dtype_size(tensor->dtype);
}

static inline bool dropout_contiguous(const cot_tensor *tensor)
{
    return !cot_is_present(tensor) || tensor->stride[tensor->rank - 1] == 1 || tensor->shape[tensor->rank - 1] == 1;
}

static inline void dropout_gather(float *to, const cot_tensor *tensor, int64_t r, int64_t d, int64_t n)
{
    const char *from = dropout_at(tensor, r, d);
    for (int64_t i = 0; i < n; i++)
        to[i] = (float)cot_load_f64(from, tensor->dtype, i * tensor->stride[tensor->rank - 1]);
}

static inline void dropout_scatter(const cot_tensor *tensor, int64_t r, int64_t d, const float *from, int64_t n)
{
    char *to = dropout_at(tensor, r, d);
    for (int64_t i = 0; i < n; i++)
        cot_store_f64(to, tensor->dtype, i * tensor->stride[tensor->rank - 1], (double)from[i]);
}

V_INLINE void dropout_widen(float *to, const char *from, cot_dtype dtype, int64_t n)
{
    int64_t i = 0;
    for (; i + VW <= n; i += VW)
        v_store(to + i, v_load_as(from + i * dropout_size(dtype), dtype));
    if (i < n)
        v_store_n(to + i, v_load_n_as(from + i * dropout_size(dtype), dtype, (int)(n - i)), (int)(n - i));
}

/* bias[d .. d+n) in f32; without one, what added changes nothing, not even the sign of 0. */
static inline void dropout_stage_bias(float *to, const cot_tensor *bias, int64_t d, int64_t n)
{
    if (cot_is_present(bias) && bias->stride[0] == 1) {
        const char *from = (const char *)bias->data + d * dropout_size(bias->dtype);
        switch (bias->dtype) {
        case COT_F32: dropout_widen(to, from, COT_F32, n); return;
        case COT_BF16: dropout_widen(to, from, COT_BF16, n); return;
        default: dropout_widen(to, from, COT_F16, n); return;
        }
    }
    for (int64_t i = 0; i < n; i++)
        to[i] = cot_is_present(bias) ? (float)cot_load_f64(bias->data, bias->dtype, (d + i) * bias->stride[0]) : -0.0f;
}

/* Are the rows of an output whole cache lines, and is the call beyond the caches? */
static inline bool dropout_streams(const cot_tensor *out, const dropout_sizes *sizes, int tensors)
{
    const int64_t size = (int64_t)cot_dtype_size(out->dtype);
    bool lines = (uintptr_t)out->data % 64 == 0;
    for (int axis = 0; axis < out->rank - 1; axis++)
        lines = lines && out->stride[axis] * size % 64 == 0;
    return lines && (double)tensors * (double)sizes->R * (double)sizes->D * (double)size >= DROPOUT_STREAM_BYTES;
}

/* The row that is asked for while row r is made: DROPOUT_AHEAD rows further on, more where they are short. */
enum { DROPOUT_AHEAD = 2, DROPOUT_AHEAD_BYTES = 16 << 10 };

static inline int64_t dropout_next_row(const dropout_sizes *sizes, int64_t r)
{
    const int64_t ahead =
        cot_clamp(DROPOUT_AHEAD_BYTES / (sizes->D * dropout_size(sizes->dtype)), DROPOUT_AHEAD, sizes->R);
    return cot_clamp(r + ahead, r, sizes->R - 1);
}

/* Asks for its columns [i, i+DROPOUT_DRAW): the draws fill the window in which a processor would otherwise find its
 * loads early. Into the second-level cache, which has twice as many lines on their way as the first (a Zen 4: its f32
 * forward went from six tenths of the copy to eight and a half, where the first level had been asked). */
V_INLINE void dropout_ask(const char *next, int64_t i, cot_dtype dtype)
{
    v_prefetch_range(next + i * dropout_size(dtype), DROPOUT_DRAW * dropout_size(dtype));
}

V_INLINE void dropout_ask_page(const char *next, int64_t i, cot_dtype dtype)
{
    v_prefetch_page(next + i * dropout_size(dtype), DROPOUT_DRAW * dropout_size(dtype));
}

/* ---- instances: a loop for every activation in every dtype -------------------------------------------------- */

/* clang-format off */
#define DROPOUT_EACH_DTYPE(instance, activation) \
    instance(activation, F32) instance(activation, F16) instance(activation, BF16)
#define DROPOUT_EACH_INSTANCE(instance)     \
    DROPOUT_EACH_DTYPE(instance, NONE)      \
    DROPOUT_EACH_DTYPE(instance, SILU)      \
    DROPOUT_EACH_DTYPE(instance, RELU)      \
    DROPOUT_EACH_DTYPE(instance, GELU_TANH) \
    DROPOUT_EACH_DTYPE(instance, GELU_ERF)
/* clang-format on */

#endif
