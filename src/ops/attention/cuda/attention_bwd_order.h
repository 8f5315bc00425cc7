/* SPDX-License-Identifier: Apache-2.0
 * attention_bwd_order.h: which kernel of the backward for Hopper runs a call, and in which order it takes the key blocks.
 * For the host code, and for tests/unit/test_attention_order.c. In this file key_blocks are those of one head. */
#ifndef COT_ATTENTION_BWD_ORDER_H
#define COT_ATTENTION_BWD_ORDER_H

#include "attention_sm90_launch.h"

/* The order of key blocks and of their additions to dq: see work_of in attention_bwd_common_sm90.cuh. `descending_tiles`: in
 * sections with ascending keys, the tiles of a key block are taken in descending order. `stores_dq`: the main kernel
 * stores dq, as 16-bit vectors. `pairs`: the main kernel is that of attention_bwd_pairs_sm90.cu. */
typedef struct key_block_order {
    bool deterministic, descending_tiles, stores_dq, pairs;
    int32_t heads_per_section, first_ascending_section;
} key_block_order;

/* Whether q, dout and dq of one head exceed 24 MiB, half of the L2 cache of an H100 or H200. Then the key blocks of a
 * head must work on nearby tiles of queries, or the tiles leave the cache. At 64 columns the limit is 48 MiB, because
 * the order for long sequences costs more there. */
static inline bool is_long(const attention_sizes *z, int64_t columns)
{
    const int64_t row_bytes = columns * (2 * (int64_t)sizeof(uint16_t) + (int64_t)sizeof(float));
    return cot_mul(z->Tq, row_bytes) > (columns == 64 ? 48 : 24) << 20;
}

/* Not called for the _general and _softcap versions: their nondeterministic mode is always faster. */
static inline bool is_nondeterministic_faster(const attention_sizes *z, int64_t columns, int64_t key_blocks)
{
    const bool causal = z->right == 0;
    if (z->H != z->Hkv)
        return !causal || columns > 128 || z->Hkv == 1;
    if (causal)
        return columns == 64 ? is_long(z, columns) : key_blocks >= 128;
    return columns <= 128 && key_blocks >= (columns == 128 ? 32 : 128);
}

static inline int32_t store_of(const attention_problem *p, const cot_tensor *gradient)
{
    if (!attention_has_aligned_rows(gradient) || gradient->shape[gradient->rank - 1] % 8 != 0)
        return ATTENTION_STORE_ELEMENTS;
    if (gradient->dtype == COT_F32)
        return ATTENTION_STORE_FLOATS;
    return p->accumulate ? ATTENTION_STORE_ELEMENTS : ATTENTION_STORE_16_BIT;
}

/* Whether the pair kernel, if it runs the call in deterministic mode, stores dq: with at most 4096 keys, and not in f16 at
 * 64 columns, where ptxas 13.0 spills a register. */
static inline bool pairs_store_dq(const attention_problem *p, int64_t columns, int64_t key_blocks)
{
    const attention_sizes *z = &p->sizes;
    return z->right != 0 && z->H == z->Hkv && key_blocks <= 32 && store_of(p, &p->dq) == ATTENTION_STORE_16_BIT &&
           (columns == 128 || z->dtype == COT_BF16);
}

/* Whether a call runs on the pair kernel. Under a causal mask, one thread block of a cluster computes masked tiles. With an
 * odd number of key blocks, the second key block of the last pair has only masked keys. */
static inline bool takes_pairs(const attention_sizes *z, int64_t columns, int64_t key_blocks, bool deterministic,
                               bool stores_dq)
{
    if (columns > 128 || z->Tq == 0 || (key_blocks % 2 != 0 && key_blocks < 64))
        return false;
    if (z->right == 0)
        return z->H == z->Hkv && key_blocks >= (columns == 64 ? 128 : 32);
    return key_blocks >= (columns == 64 && !stores_dq ? 16 : 4) && !(deterministic && is_long(z, columns));
}

/* Chosen by measurements on an H200 and an H100. docs/kernels/attention_bwd_order.md has tables of these branches and
 * their reasons. docs/experiments/attention.md has the figures. A section of few heads keeps key blocks that add to the
 * same rows of dq together, and their rows in the L2 cache. A section of many heads starts them at different times, so
 * that a key block of a full mask need not wait for the key block that adds before it. */
static inline key_block_order key_block_order_of(const attention_problem *p, bool general, int64_t columns)
{
    const attention_sizes *z = &p->sizes;
    const bool causal = z->right == 0, is_wide = columns > 128, grouped = z->H != z->Hkv;
    const bool long_heads = is_long(z, columns);
    const int64_t key_blocks = cot_max(cot_ceil_div(z->Tk, ATTENTION_BWD_KEYS), 1),
                  batch_kv_heads = cot_mul(z->B, z->Hkv);
    if (general) { /* it has one order for each mode */
        key_block_order order = {.deterministic = !p->allow_nondeterminism, .heads_per_section = 4};
        if (z->softcap > 0 && !is_wide)
            order.heads_per_section = columns == 64 ? 32 : 8;
        else if (!order.deterministic && !is_wide)
            order.heads_per_section = 8;
        return order;
    }
    if (p->allow_nondeterminism && is_nondeterministic_faster(z, columns, key_blocks)) {
        key_block_order order = {.heads_per_section = 2,
                                 .descending_tiles = causal && grouped,
                                 .pairs = takes_pairs(z, columns, key_blocks, false, false)};
        if (order.pairs)
            order.heads_per_section = causal ? 4 : 1;
        else if (grouped)
            order.heads_per_section = long_heads ? 1 : 4;
        else if (causal)
            order.heads_per_section = long_heads ? 4 : 8;
        return order;
    }
    const bool vector_dq = store_of(p, &p->dq) == ATTENTION_STORE_16_BIT;
    const bool pairs = takes_pairs(z, columns, key_blocks, true, pairs_store_dq(p, columns, key_blocks)),
               pairs_store = pairs && pairs_store_dq(p, columns, key_blocks);
    key_block_order order = {.deterministic = true,
                             .descending_tiles = causal,
                             .stores_dq = pairs ? pairs_store : columns == 64 && !grouped && vector_dq,
                             .pairs = pairs};
    if (!causal) {
        const int64_t short_heads = is_wide             ? 8
                                    : pairs && grouped  ? 2
                                    : pairs_store       ? cot_clamp(128 / key_blocks, 8, columns == 64 ? 32 : 8)
                                    : pairs             ? cot_clamp((columns == 64 ? 256 : 64) / key_blocks, 2, 8)
                                    : columns == 64     ? cot_clamp(512 / key_blocks, 4, 32)
                                    : key_blocks >= 128 ? cot_clamp(512 / key_blocks, 2, 4)
                                                        : cot_clamp(128 / key_blocks, 8, 16);
        order.heads_per_section = long_heads ? 1 : (int32_t)short_heads;
        order.first_ascending_section = INT32_MAX;
    } else if (long_heads) {
        order.heads_per_section = grouped ? 2 : 4;
    } else if (grouped && !is_wide) { /* divided over two thread blocks, see head_split_of */
        order.heads_per_section = 8;
    } else {
        const int64_t most = cot_clamp(batch_kv_heads / 2, 1, is_wide ? 8 : 32), least = cot_min(most, 2);
        const int64_t section_key_blocks = is_wide || (columns == 128 && (pairs || key_blocks < 32)) ? 128 : 256;
        const int64_t heads_per_section = cot_clamp(section_key_blocks / key_blocks, least, most);
        order.heads_per_section = (int32_t)heads_per_section;
        order.first_ascending_section = (int32_t)(cot_ceil_div(batch_kv_heads, heads_per_section) - 1);
        order.stores_dq |= columns == 128 && !grouped && key_blocks <= 16 && vector_dq;
    }
    return order;
}

#endif
