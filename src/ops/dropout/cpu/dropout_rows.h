/* SPDX-License-Identifier: Apache-2.0
 * dropout_rows.h: the parts that the vector kernels of both directions share: the mask of an item's rows as bits, for
 * any source, and the conversion of rows of any dtype and stride to and from f32.
 *
 * Bit j of byte g in a row of bits is column 8g+j of the item. Given masks are converted to bits row by row. A mask
 * with the source DROPOUT_GENERATED is generated in the row loops, just before its use. If the mask of a whole row is
 * generated first, no load is in flight meanwhile, and the two durations add up. Short rows are the exception: the
 * masks of many rows are generated together. */
#ifndef COT_DROPOUT_ROWS_H
#define COT_DROPOUT_ROWS_H

#include "dropout_items.h"
#include "simd/gelu.h"

enum {
    DROPOUT_BITS_BYTES = DROPOUT_MAX_COLUMNS / COT_DROPOUT_GROUP, /* size of the bit buffer */
    DROPOUT_BITS_PADDING = 64,                                    /* bytes behind it that vector functions may access */
    DROPOUT_GENERATED_COLUMNS = COT_DROPOUT_GROUP * V_PHILOX_GROUPS, /* columns of one call of v_philox_keep */
    DROPOUT_NONTEMPORAL_BYTES = 8 << 20 /* calls that move at least as many bytes may bypass the caches */
};

V_INLINE int64_t dropout_element_size(cot_dtype dtype)
{
    return dtype == COT_F32 ? 4 : 2;
}

/* ---- mask ----------------------------------------------------------------------------------------------- */

/* Not inlined: 30 inlined copies took 1/3 of the loops' compile time and did not change the run time. */
static __attribute__((noinline)) void dropout_generate(uint8_t *bits, const v_philox *philox, uint64_t group)
{
    v_philox_keep(bits, philox, group);
}

/* Call it before columns [i, i + DROPOUT_GENERATED_COLUMNS) of a row of n columns are computed. It generates the mask
 * of the next DROPOUT_GENERATED_COLUMNS columns, and at i = 0 also the mask of these. Philox then overlaps with the
 * computation (Zen 4, bf16 backward in the caches: -10 % time). */
V_INLINE void dropout_generate_ahead(uint8_t *bits, const v_philox *philox, uint64_t group, int64_t i, int64_t n)
{
    if (i == 0)
        dropout_generate(bits, philox, group);
    i += DROPOUT_GENERATED_COLUMNS;
    if (i < n)
        dropout_generate(bits + i / 8, philox, group + (uint64_t)(i / 8));
}

typedef struct dropout_mask_reader {
    const dropout_mask *mask;
    const dropout_sizes *sizes;
    v_philox philox;
} dropout_mask_reader;

static inline dropout_mask_reader dropout_make_mask_reader(const dropout_mask *mask, const dropout_sizes *sizes)
{
    dropout_mask_reader reader = {.mask = mask, .sizes = sizes};
    if (mask->source == DROPOUT_GENERATED)
        reader.philox = v_philox_make(dropout_seed(mask), dropout_offset(mask), mask->threshold);
    return reader;
}

/* The number of rows whose bits are computed at once. More than 1 only where an item has whole rows: their groups are
 * consecutive then. */
static inline int64_t dropout_rows_per_batch(const dropout_sizes *sizes)
{
    return sizes->D <= DROPOUT_MAX_COLUMNS / 2 ? DROPOUT_BITS_BYTES / sizes->groups : 1;
}

/* Packs bit 0 of each of n bytes into bits. A multiplication packs 8 bytes at once. */
static inline void dropout_pack_bits(uint8_t *bits, const uint8_t *bytes, int64_t stride, int64_t n)
{
    const int64_t whole_groups = stride == 1 ? n / 8 : 0;
    for (int64_t g = 0; g < whole_groups; g++) {
        uint64_t eight;
        memcpy(&eight, bytes + 8 * g, sizeof eight);
        bits[g] = (uint8_t)((eight & 0x0101010101010101u) * 0x0102040810204080u >> 56);
    }
    for (int64_t g = whole_groups; 8 * g < n; g++) {
        bits[g] = 0;
        for (int64_t d = 8 * g; d < n && d < 8 * g + 8; d++)
            bits[g] = (uint8_t)(bits[g] | (bytes[d * stride] & 1) << (d - 8 * g));
    }
}

/* Unpacks n bits into bytes of 0 or 1. A multiplication unpacks 8 bits at once. */
static inline void dropout_unpack_bits(uint8_t *bytes, int64_t stride, const uint8_t *bits, int64_t n)
{
    const int64_t whole_groups = stride == 1 ? n / 8 : 0;
    for (int64_t g = 0; g < whole_groups; g++) {
        const uint64_t spread = bits[g] * 0x0101010101010101u & 0x8040201008040201u;
        const uint64_t eight = (spread + 0x7f7f7f7f7f7f7f7fu) >> 7 & 0x0101010101010101u;
        memcpy(bytes + 8 * g, &eight, sizeof eight);
    }
    for (int64_t d = 8 * whole_groups; d < n; d++)
        bytes[d * stride] = bits[d / 8] >> (d % 8) & 1;
}

/* Computes the keep bits of rows [r, r+rows), columns [d, d+n). d is a multiple of 8. rows > 1 requires d = 0 and n =
 * D; the bits of row r+k then begin at bits + k * groups. */
static inline void dropout_keep_bits(uint8_t *bits, const dropout_mask_reader *reader, int64_t r, int64_t rows,
                                     int64_t d, int64_t n)
{
    const dropout_mask *mask = reader->mask;
    const cot_tensor *given = &mask->given;
    const int64_t groups = reader->sizes->groups, first = d / 8, count = (n + 7) / 8;
    if (mask->source == DROPOUT_GENERATED) {
        for (int64_t g = 0; g < (rows - 1) * groups + count; g += V_PHILOX_GROUPS)
            dropout_generate(bits + g, &reader->philox, (uint64_t)(r * groups + first + g));
        return;
    }
    for (int64_t k = 0; k < rows; k++) {
        uint8_t *row = bits + k * groups;
        const int64_t stride = cot_is_present(given) ? given->stride[given->rank - 1] : 0;
        const uint8_t *from =
            cot_is_present(given) ? (const uint8_t *)given->data + dropout_row_offset(given, r + k) : NULL;
        if (mask->source == DROPOUT_BYTES)
            dropout_pack_bits(row, from + d * stride, stride, n);
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

V_INLINE char *dropout_address(const cot_tensor *tensor, int64_t r, int64_t d)
{
    const int64_t position = dropout_row_offset(tensor, r) + d * tensor->stride[tensor->rank - 1];
    return (char *)tensor->data + position * (int64_t)cot_dtype_size(tensor->dtype);
}

static inline bool dropout_is_contiguous(const cot_tensor *tensor)
{
    return !cot_is_present(tensor) || tensor->stride[tensor->rank - 1] == 1 || tensor->shape[tensor->rank - 1] == 1;
}

static inline void dropout_gather(float *to, const cot_tensor *tensor, int64_t r, int64_t d, int64_t n)
{
    const char *from = dropout_address(tensor, r, d);
    for (int64_t i = 0; i < n; i++)
        to[i] = (float)cot_load_f64(from, tensor->dtype, i * tensor->stride[tensor->rank - 1]);
}

static inline void dropout_scatter(const cot_tensor *tensor, int64_t r, int64_t d, const float *from, int64_t n)
{
    char *to = dropout_address(tensor, r, d);
    for (int64_t i = 0; i < n; i++)
        cot_store_f64(to, tensor->dtype, i * tensor->stride[tensor->rank - 1], (double)from[i]);
}

V_INLINE void dropout_convert_to_f32(float *to, const char *from, cot_dtype dtype, int64_t n)
{
    int64_t i = 0;
    for (; i + VW <= n; i += VW)
        v_store(to + i, v_load_as(from + i * dropout_element_size(dtype), dtype));
    if (i < n)
        v_store_n(to + i, v_load_n_as(from + i * dropout_element_size(dtype), dtype, (int)(n - i)), (int)(n - i));
}

/* Converts bias[d .. d+n) to f32. Without a bias the values are -0, so that adding them keeps the sign of a zero. */
static inline void dropout_stage_bias(float *to, const cot_tensor *bias, int64_t d, int64_t n)
{
    if (cot_is_present(bias) && bias->stride[0] == 1) {
        const char *from = (const char *)bias->data + d * dropout_element_size(bias->dtype);
        switch (bias->dtype) {
        case COT_F32: dropout_convert_to_f32(to, from, COT_F32, n); return;
        case COT_BF16: dropout_convert_to_f32(to, from, COT_BF16, n); return;
        default: dropout_convert_to_f32(to, from, COT_F16, n); return;
        }
    }
    for (int64_t i = 0; i < n; i++)
        to[i] = cot_is_present(bias) ? (float)cot_load_f64(bias->data, bias->dtype, (d + i) * bias->stride[0]) : -0.0f;
}

/* Whether stores of `out` bypass the caches: its rows begin at cache lines, and the call moves at least
 * DROPOUT_NONTEMPORAL_BYTES. */
static inline bool dropout_bypasses_caches(const cot_tensor *out, const dropout_sizes *sizes, int tensors)
{
    const int64_t size = (int64_t)cot_dtype_size(out->dtype);
    bool lines = (uintptr_t)out->data % 64 == 0;
    for (int axis = 0; axis < out->rank - 1; axis++)
        lines = lines && out->stride[axis] * size % 64 == 0;
    return lines && (double)tensors * (double)sizes->R * (double)sizes->D * (double)size >= DROPOUT_NONTEMPORAL_BYTES;
}

/* The row to prefetch during the computation of row r: DROPOUT_PREFETCH_ROWS rows later, more if rows are short. */
enum { DROPOUT_PREFETCH_ROWS = 2, DROPOUT_PREFETCH_BYTES = 16 << 10 };

static inline int64_t dropout_prefetch_row(const dropout_sizes *sizes, int64_t r)
{
    const int64_t distance = cot_clamp(DROPOUT_PREFETCH_BYTES / (sizes->D * dropout_element_size(sizes->dtype)),
                                       DROPOUT_PREFETCH_ROWS, sizes->R);
    return cot_clamp(r + distance, r, sizes->R - 1);
}

/* Prefetches columns [i, i + DROPOUT_GENERATED_COLUMNS) of this row. Without it the loads begin late, because the
 * instructions of the generator fill the out-of-order window. The target is the L2 cache, which can have twice as many
 * misses outstanding as L1. (Zen 4, f32 forward: from 60 % of the copy's rate with prefetches to L1 to 85 % with
 * prefetches to L2.) */
V_INLINE void dropout_prefetch_columns(const char *row, int64_t i, cot_dtype dtype)
{
    v_prefetch_range(row + i * dropout_element_size(dtype), DROPOUT_GENERATED_COLUMNS * dropout_element_size(dtype));
}

V_INLINE void dropout_prefetch_page(const char *row, int64_t i, cot_dtype dtype)
{
    v_prefetch_page(row + i * dropout_element_size(dtype), DROPOUT_GENERATED_COLUMNS * dropout_element_size(dtype));
}

/* ---- instances: one loop for each activation and dtype ------------------------------------------------------ */

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
