/* SPDX-License-Identifier: Apache-2.0
 * attention_bwd_choice.h: chooses how the backward for Hopper runs a call: mode, kernel, who stores dq, how query heads
 * are divided, and the order of the key blocks. For the host code, and for tests/unit/test_attention_order.c. In this
 * file key_blocks are those of one head. */
#ifndef COT_ATTENTION_BWD_CHOICE_H
#define COT_ATTENTION_BWD_CHOICE_H

#include "attention_sm90_admit.h"

/* Values of first_ascending_section. */
enum { ALL_SECTIONS_ASCEND = 0, NO_SECTION_ASCENDS = INT32_MAX };

/* How a call runs: mode, kernel, and the order of key blocks and of their additions to dq. */
typedef struct backward_choice {
    bool deterministic;
    bool pairs;     /* the main kernel is that of attention_bwd_pairs_sm90.cu */
    bool stores_dq; /* the main kernel stores dq, as vectors of 16-bit elements */
    /* The order: see work_of in attention_bwd_common_sm90.cuh. */
    bool descending_tiles; /* in sections with ascending keys, the tiles of a key block are taken in descending order */
    int32_t heads_per_section;
    int32_t first_ascending_section; /* from it on, the keys ascend */
    int32_t head_split;              /* thread blocks that divide the query heads of a key block, see head_split_of */
} backward_choice;

/* Whether the mask is causal. A left window may be set too, in a call of the _general or the _softcap version. Then
 * head_split_of still divides heads, and has_long_packed_sequences is false. */
static inline bool is_causal(const attention_sizes *sizes)
{
    return sizes->right == 0;
}

/* Whether q, dout and dq of one head exceed 24 MiB, half of the L2 cache of an H100 or H200 (*long* in
 * docs/kernels/attention_bwd_order.md). Then the key blocks of a head must work on nearby tiles of queries, or the
 * tiles leave the cache. At 64 tile columns the limit is 48 MiB, because the order for long sequences costs more
 * there. */
static inline bool is_long_call(const attention_sizes *sizes, int64_t tile_columns)
{
    const int64_t row_bytes = tile_columns * (2 * (int64_t)sizeof(uint16_t) + (int64_t)sizeof(float));
    return cot_mul(sizes->Tq, row_bytes) > (tile_columns == 64 ? 48 : 24) << 20;
}

/* The keys to which a query can attend, in the longest sequence. */
static inline int64_t attended_keys(const attention_sizes *sizes)
{
    return cot_min(cot_min(sizes->left, sizes->Tk) + 1 + cot_min(sizes->right, sizes->Tk), sizes->Tk);
}

/* Whether the nondeterministic mode of the _general and _softcap versions is faster, where dq is not stored by the main
 * kernel: where a query can attend to more than 2048 keys, except with GQA up to 128 tile columns. */
static inline bool is_nondeterministic_general_faster(const attention_sizes *sizes, int64_t tile_columns)
{
    if (sizes->H != sizes->Hkv && tile_columns <= 128)
        return false;
    return attended_keys(sizes) > 16 * ATTENTION_BWD_KEYS;
}

/* Keys of a sequence, on average if the sequences are packed. */
static inline int64_t average_keys(const attention_sizes *sizes)
{
    return sizes->packed ? sizes->rows_k / cot_max(sizes->B, 1) : sizes->Tk;
}

/* Whether the sequences of a packed call have 4096 keys or more on average, without a window and softcap. */
static inline bool has_long_packed_sequences(const attention_sizes *sizes)
{
    return sizes->packed && is_causal(sizes) && sizes->left >= sizes->Tk && sizes->softcap == 0 &&
           average_keys(sizes) >= 4096;
}

/* Whether the nondeterministic mode is faster, for specialised versions. pairs: the call would run on the pair
 * kernel. */
static inline bool is_nondeterministic_faster(const attention_sizes *sizes, int64_t tile_columns, int64_t key_blocks,
                                              bool pairs)
{
    const bool causal = is_causal(sizes);
    if (attention_bwd_used_columns(sizes) == 96)
        return false;
    if (sizes->H != sizes->Hkv)
        return !causal || tile_columns > 128 || pairs;
    if (causal)
        return tile_columns == 64 ? is_long_call(sizes, tile_columns) : key_blocks >= 128;
    return tile_columns <= 128 && key_blocks >= (tile_columns == 128 ? 32 : 128);
}

static inline enum attention_store_method store_method_of(const attention_problem *p, const cot_tensor *gradient)
{
    if (!attention_has_aligned_rows(gradient) || gradient->shape[gradient->rank - 1] % 8 != 0)
        return ATTENTION_STORE_ELEMENTS;
    if (gradient->dtype == COT_F32)
        return ATTENTION_STORE_VECTORS_F32;
    return p->accumulate ? ATTENTION_STORE_ELEMENTS : ATTENTION_STORE_VECTORS_16;
}

/* Whether the main kernel of a general call stores dq. There is no such version with GQA and with softcap, and none for
 * f16 at 64 tile columns, where ptxas 13.0 spills a register. At 64 tile columns it is slower for long sequences. */
static inline bool general_version_stores_dq(const attention_problem *p, int64_t tile_columns)
{
    const attention_sizes *sizes = &p->sizes;
    if (tile_columns > 128 || sizes->d_qk != tile_columns || sizes->H != sizes->Hkv || sizes->softcap > 0 ||
        sizes->Tq == 0 || store_method_of(p, &p->dq) != ATTENTION_STORE_VECTORS_16)
        return false;
    return tile_columns == 128 ||
           (sizes->dtype == COT_BF16 && cot_min(attended_keys(sizes), average_keys(sizes)) < 4096);
}

/* Whether the pair kernel, if it runs the call in deterministic mode, stores dq: under a full mask, with at most 4096
 * keys, and not in f16 at 64 tile columns, where ptxas 13.0 spills a register. may_store_dq: see choose_backward. */
static inline bool pair_kernel_stores_dq(const attention_sizes *sizes, int64_t tile_columns, int64_t key_blocks,
                                         bool may_store_dq)
{
    return may_store_dq && !is_causal(sizes) && key_blocks <= 32 && (tile_columns == 128 || sizes->dtype == COT_BF16);
}

/* Whether a call runs on the pair kernel. Under a causal mask, one thread block of a cluster computes masked tiles.
 * With an odd number of key blocks, the second key block of the last pair has only masked keys. With GQA a pair takes
 * long, and few pairs would occupy the multiprocessors unevenly. */
static inline bool uses_pair_kernel(const attention_sizes *sizes, int64_t tile_columns, int64_t key_blocks,
                                    bool deterministic, bool stores_dq)
{
    if (tile_columns > 128 || attention_bwd_used_columns(sizes) == 96 || sizes->Tq == 0 ||
        (key_blocks % 2 != 0 && key_blocks < 64))
        return false;
    if (is_causal(sizes) && sizes->H != sizes->Hkv)
        return tile_columns == 128 && key_blocks >= 32 && cot_mul(key_blocks, cot_mul(sizes->B, sizes->Hkv)) >= 256;
    if (is_causal(sizes))
        return key_blocks >= (tile_columns == 64 ? 64 : 32);
    return key_blocks >= (tile_columns == 64 && !stores_dq ? 16 : 4) &&
           !(deterministic && is_long_call(sizes, tile_columns));
}

/* Key-value heads of a section under a full mask in deterministic mode: one line for each row of the table in
 * docs/kernels/attention_bwd_order.md. */
static inline int64_t full_mask_section_heads(const backward_choice *choice, const attention_sizes *sizes,
                                              int64_t tile_columns, int64_t key_blocks)
{
    const bool is_64 = tile_columns == 64;
    if (is_long_call(sizes, tile_columns))
        return 1;
    if (choice->pairs && sizes->H != sizes->Hkv)
        return 2;
    if (choice->pairs && choice->stores_dq)
        return is_64 ? cot_clamp(128 / key_blocks, 8, 32) : 8;
    if (choice->pairs)
        return is_64 ? cot_clamp(256 / key_blocks, 2, 8) : cot_clamp(64 / key_blocks, 2, 8);
    if (tile_columns > 128)
        return 8;
    if (key_blocks >= 128)
        return is_64 ? cot_clamp(512 / key_blocks, 4, 32) : cot_clamp(512 / key_blocks, 2, 4);
    return is_64 ? cot_clamp(512 / key_blocks, 4, 32) : cot_clamp(128 / key_blocks, 8, 16);
}

/* The thread blocks of a cluster that divide the query heads of a key block, and add their dK and dV at the end. Under
 * a causal mask the longest key block has twice the average work. With GQA and few key blocks in the call, half of the
 * GPU would wait for the longest ones. Two thread blocks halve this time. 384 key blocks are about three for each
 * multiprocessor. Full masks gain nothing. */
static inline int32_t head_split_of(const attention_problem *p, int64_t tile_columns, bool pairs)
{
    const attention_sizes *sizes = &p->sizes;
    const int64_t gqa_group = sizes->H / cot_max(sizes->Hkv, 1),
                  call_key_blocks = cot_mul(attention_bwd_batch_key_blocks_per_head(p), sizes->Hkv);
    return tile_columns <= 128 && is_causal(sizes) && gqa_group % 2 == 0 && !pairs && call_key_blocks < 384 ? 2 : 1;
}

/* Chooses mode, kernel and order of a call, by measurements on an H200 and an H100. docs/kernels/attention_bwd_order.md
 * has tables of these branches and their reasons. docs/experiments/attention.md has the figures. A section of few heads
 * keeps key blocks that add to the same rows of dq together, and their rows in the L2 cache. A section of many heads
 * starts them at different times, so that a key block of a full mask need not wait for the key block that adds before
 * it. */
static inline backward_choice choose_backward(const attention_problem *p, bool general, int64_t tile_columns)
{
    const attention_sizes *sizes = &p->sizes;
    const bool causal = is_causal(sizes), is_wide = tile_columns > 128, grouped = sizes->H != sizes->Hkv;
    const bool is_long = is_long_call(sizes, tile_columns);
    const int64_t key_blocks = cot_max(cot_ceil_div(sizes->Tk, ATTENTION_BWD_KEYS), 1),
                  batch_kv_heads = cot_mul(sizes->B, sizes->Hkv);
    if (general) { /* all sections have the same order */
        const bool stores_dq = general_version_stores_dq(p, tile_columns);
        backward_choice choice = {.deterministic = stores_dq || !p->allow_nondeterminism ||
                                                   !is_nondeterministic_general_faster(sizes, tile_columns),
                                  .stores_dq = stores_dq,
                                  .heads_per_section = 4,
                                  .head_split = head_split_of(p, tile_columns, false)};
        const bool is_long_packed = attention_bwd_used_columns(sizes) == 128 && has_long_packed_sequences(sizes);
        choice.descending_tiles = !choice.deterministic || (grouped && !is_wide) || is_long_packed;
        choice.first_ascending_section = choice.descending_tiles ? ALL_SECTIONS_ASCEND : NO_SECTION_ASCENDS;
        if (sizes->softcap > 0 && !is_wide)
            choice.heads_per_section = tile_columns == 64 ? 32 : 8;
        else if (!is_wide && (!choice.deterministic || (grouped ? tile_columns == 64 : is_long_packed)))
            choice.heads_per_section = 8;
        else if (stores_dq)
            choice.heads_per_section =
                (int32_t)cot_clamp(256 / cot_max(cot_ceil_div(average_keys(sizes), ATTENTION_BWD_KEYS), 1), 4, 32);
        return choice;
    }
    const bool nondeterministic_pairs = uses_pair_kernel(sizes, tile_columns, key_blocks, false, false);
    if (p->allow_nondeterminism &&
        is_nondeterministic_faster(sizes, tile_columns, key_blocks, nondeterministic_pairs)) {
        backward_choice choice = {.heads_per_section = 2,
                                  .first_ascending_section = ALL_SECTIONS_ASCEND,
                                  .descending_tiles = causal && grouped,
                                  .pairs = nondeterministic_pairs,
                                  .head_split = head_split_of(p, tile_columns, nondeterministic_pairs)};
        if (choice.pairs && causal)
            choice.heads_per_section = grouped ? (int32_t)cot_clamp(256 / key_blocks, 2, 8) : 4;
        else if (choice.pairs)
            choice.heads_per_section = 1;
        else if (grouped)
            choice.heads_per_section = is_long ? 1 : 4;
        else if (causal)
            choice.heads_per_section = is_long ? 4 : 8;
        return choice;
    }
    /* The kernels that store dq do so as vectors of 16 bits, for one query head of each key-value head. There is none
     * for 96 used columns. They need the counter of units, which a call without queries does not have. */
    const bool may_store_dq = sizes->Tq > 0 && !grouped && attention_bwd_used_columns(sizes) != 96 &&
                              store_method_of(p, &p->dq) == ATTENTION_STORE_VECTORS_16;
    const bool pair_kernel_would_store_dq = pair_kernel_stores_dq(sizes, tile_columns, key_blocks, may_store_dq);
    backward_choice choice = {.deterministic = true,
                              .descending_tiles = causal,
                              .pairs =
                                  uses_pair_kernel(sizes, tile_columns, key_blocks, true, pair_kernel_would_store_dq)};
    choice.head_split = head_split_of(p, tile_columns, choice.pairs);
    choice.stores_dq = choice.pairs ? pair_kernel_would_store_dq : tile_columns == 64 && may_store_dq;
    if (!causal) {
        choice.heads_per_section = (int32_t)full_mask_section_heads(&choice, sizes, tile_columns, key_blocks);
        choice.first_ascending_section = NO_SECTION_ASCENDS;
    } else if (is_long) {
        choice.heads_per_section = grouped ? 2 : 4;
        choice.first_ascending_section = ALL_SECTIONS_ASCEND;
    } else if (grouped && !is_wide) {
        choice.heads_per_section = 8;
        choice.first_ascending_section = ALL_SECTIONS_ASCEND;
    } else {
        const int64_t max_heads = cot_clamp(batch_kv_heads / 2, 1, is_wide ? 8 : 32), min_heads = cot_min(max_heads, 2);
        const int64_t section_key_blocks =
            is_wide || (tile_columns == 128 && (choice.pairs || key_blocks < 32)) ? 128 : 256;
        const int64_t heads_per_section = cot_clamp(section_key_blocks / key_blocks, min_heads, max_heads);
        choice.heads_per_section = (int32_t)heads_per_section;
        choice.first_ascending_section = (int32_t)(cot_ceil_div(batch_kv_heads, heads_per_section) - 1);
        choice.stores_dq |= tile_columns == 128 && may_store_dq && key_blocks <= 16;
    }
    return choice;
}

#endif
