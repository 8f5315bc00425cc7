/* SPDX-License-Identifier: Apache-2.0
 * integers.h: saturating arithmetic on sizes. Sizes are 0 or more. A result above COT_HUGE becomes COT_HUGE, so that no
 * sum, product or workspace size of a call overflows. The dispatcher refuses a workspace above COT_MAX_BYTES. */
#ifndef COT_CORE_INTEGERS_H
#define COT_CORE_INTEGERS_H

#include <stddef.h>
#include <stdint.h>

#define COT_HUGE ((int64_t)1 << 62)
#define COT_MAX_BYTES ((size_t)1 << 56) /* limit of a tensor or a workspace; larger than any address space */

/* Alignment of the pool, of every workspace and of the parts of a workspace, in bytes. */
enum { COT_ALIGNMENT = 64 };

static inline int64_t cot_min(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t cot_max(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static inline int64_t cot_clamp(int64_t value, int64_t low, int64_t high)
{
    return value < low ? low : value > high ? high : value;
}

static inline int64_t cot_add(int64_t a, int64_t b)
{
    int64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? COT_HUGE : cot_min(sum, COT_HUGE);
}

static inline int64_t cot_mul(int64_t a, int64_t b)
{
    int64_t product;
    return __builtin_mul_overflow(a, b, &product) ? COT_HUGE : cot_min(product, COT_HUGE);
}

static inline int64_t cot_ceil_div(int64_t value, int64_t by)
{
    return value / by + (value % by != 0);
}

/* The smallest multiple of `unit` that is >= value. */
static inline int64_t cot_round_up(int64_t value, int64_t unit)
{
    return cot_mul(cot_ceil_div(value, unit), unit);
}

static inline int64_t cot_product(const int64_t *factors, size_t count)
{
    int64_t product = 1;
    for (size_t i = 0; i < count; i++)
        product = cot_mul(product, factors[i]);
    return product;
}

/* COT_PRODUCT(B, T, D) = B * T * D, multiplied from left to right. */
#define COT_PRODUCT(...) \
    cot_product((const int64_t[]){__VA_ARGS__}, sizeof((const int64_t[]){__VA_ARGS__}) / sizeof(int64_t))

/* ---- workspaces, in bytes ------------------------------------------------------------------------------------ */

static inline size_t cot_align_up(size_t bytes)
{
    return (bytes + COT_ALIGNMENT - 1) / COT_ALIGNMENT * COT_ALIGNMENT;
}

/* The number of bytes of `count` elements. */
static inline size_t cot_bytes(int64_t count, size_t size)
{
    return (size_t)cot_mul(count, (int64_t)size);
}

/* Reserves `count` elements in a workspace. Returns their offset in bytes, and advances *offset to the next part. */
static inline size_t cot_workspace_reserve(size_t *offset, int64_t count, size_t size)
{
    const size_t begin = *offset;
    *offset = (size_t)cot_add((int64_t)begin, (int64_t)cot_align_up(cot_bytes(count, size)));
    return begin;
}

#endif
