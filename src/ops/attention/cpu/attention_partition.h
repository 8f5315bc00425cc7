/* SPDX-License-Identifier: Apache-2.0
 * attention_partition.h: how the tiled kernels divide a call, and the layout of their workspace. Neither depends on the
 * number of threads. The workspace layout depends on the shape alone; the blocks of packed sequences also depend on
 * cu_seqlens.
 *
 * Queries and keys are cut into blocks. Each sequence starts a new block. Each block has a slot: the slot's number
 * gives the place of the block's packed operands in the workspace. Packed sequences have some spare slots, because
 * their lengths are not known when the workspace is sized. */
#ifndef COT_ATTENTION_PARTITION_H
#define COT_ATTENTION_PARTITION_H

#include "ops/attention/attention_problem.h"

enum {
    ATTENTION_STRIP = 32,        /* granularity of a product's rows and columns: PANEL of simd/matmul.h */
    ATTENTION_SCORE_ROWS = 64,   /* rows of a tile of scores */
    ATTENTION_FWD_ROWS = 128,    /* queries of a forward item; half as many if d or d_v > 128 */
    ATTENTION_BLOCK = 128,       /* maximum keys of a block (with AMX more, see below); queries of a backward block */
    ATTENTION_L2_KEY_BLOCKS = 4, /* maximum key blocks that a backward item keeps in the L2 cache */
    ATTENTION_MAX_D = 256,       /* maximum d and d_v of the item buffers */
    ATTENTION_MIN_ITEMS = 16,    /* a backward adds chunks until it has this many items */
    ATTENTION_MAX_CHUNKS = 8
};

/* Maximum keys of a forward block with AMX. Longer blocks load and store out less often. `size` is the bytes of an
 * operand's element. */
#define ATTENTION_FWD_AMX_KEYS(size) ((size) == 2 ? 4 * ATTENTION_BLOCK : 2 * ATTENTION_BLOCK)

/* ---- slots -------------------------------------------------------------------------------------------- */

/* The query or key axis of a call, cut into blocks of block_size rows. */
typedef struct attention_axis {
    const attention_problem *p;
    bool along_keys;
    int64_t block_size;
} attention_axis;

static inline attention_axis attention_query_axis(const attention_problem *p, int64_t block_size)
{
    return (attention_axis){.p = p, .along_keys = false, .block_size = block_size};
}

static inline attention_axis attention_key_axis(const attention_problem *p, int64_t block_size)
{
    return (attention_axis){.p = p, .along_keys = true, .block_size = block_size};
}

static inline int64_t attention_slot_count(const attention_sizes *sizes, bool along_keys, int64_t block_size)
{
    const int64_t rows = along_keys ? sizes->rows_k : sizes->rows_q;
    return sizes->packed ? rows / block_size + sizes->B + 1
                         : cot_mul(sizes->B, cot_ceil_div(along_keys ? sizes->Tk : sizes->Tq, block_size));
}

/* The slot of sequence b's first block. The slots of different sequences do not overlap. */
static inline int64_t attention_first_slot(const attention_axis *axis, int64_t b)
{
    if (!axis->p->sizes.packed)
        return b * cot_ceil_div(axis->along_keys ? axis->p->sizes.Tk : axis->p->sizes.Tq, axis->block_size);
    return attention_load_i32(axis->along_keys ? &axis->p->cu_seqlens_k : &axis->p->cu_seqlens_q, b) /
               axis->block_size +
           b;
}

/* A block: rows first .. first+rows of `sequence`. The first `used` of them are below used_q or used_k. rows is 0 in a
 * spare slot. */
typedef struct attention_block {
    attention_sequence sequence;
    int64_t slot, first, rows, used;
} attention_block;

static inline attention_block attention_block_at(const attention_axis *axis, int64_t slot)
{
    /* Binary search for the last sequence whose first slot is <= slot. */
    int64_t low = 0, high = attention_sequence_count(axis->p) - 1;
    if (!axis->p->sizes.packed)
        low = high = slot / cot_ceil_div(axis->along_keys ? axis->p->sizes.Tk : axis->p->sizes.Tq, axis->block_size);
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (attention_first_slot(axis, middle) <= slot)
            low = middle;
        else
            high = middle - 1;
    }
    attention_block block = {.sequence = attention_sequence_at(axis->p, low), .slot = slot};
    block.first = (slot - attention_first_slot(axis, low)) * axis->block_size;
    block.rows = cot_clamp((axis->along_keys ? block.sequence.k_rows : block.sequence.q_rows) - block.first, 0,
                           axis->block_size);
    block.used =
        cot_clamp((axis->along_keys ? block.sequence.used_k : block.sequence.used_q) - block.first, 0, block.rows);
    return block;
}

/* ---- visible keys or queries of a range of rows: both ends of the visible span rise with the row ------- */

static inline attention_span attention_visible_keys_of_rows(const attention_sizes *sizes, const attention_sequence *s,
                                                            int64_t first, int64_t end)
{
    end = end < s->used_q ? end : s->used_q;
    if (first >= end)
        return (attention_span){0, 0};
    return (attention_span){attention_visible_keys(sizes, s, first).first,
                            attention_visible_keys(sizes, s, end - 1).end};
}

static inline attention_span attention_visible_queries_of_rows(const attention_sizes *sizes,
                                                               const attention_sequence *s, int64_t first, int64_t end)
{
    end = end < s->used_k ? end : s->used_k;
    if (first >= end)
        return (attention_span){0, 0};
    return (attention_span){attention_visible_queries(sizes, s, first).first,
                            attention_visible_queries(sizes, s, end - 1).end};
}

/* `span` relative to `first`, clamped to [0, size), its ends rounded outwards to multiples of ATTENTION_STRIP. */
static inline attention_span attention_round_to_strips(attention_span span, int64_t first, int64_t size)
{
    const int64_t low = cot_clamp(span.first - first, 0, size), high = cot_clamp(span.end - first, 0, size);
    if (low >= high)
        return (attention_span){0, 0};
    return (attention_span){low / ATTENTION_STRIP * ATTENTION_STRIP, cot_round_up(high, ATTENTION_STRIP)};
}

/* ---- workspace ---------------------------------------------------------------------------------------- */

/* Forward: K^T and V of every key block and key-value head. kt and v are byte offsets. `size` is the bytes of an
 * operand's element, `keys` the maximum keys of a block. */
typedef struct attention_fwd_layout {
    int64_t qk_size, v_size; /* d and d_v of attention_sizes, rounded up to multiples of ATTENTION_STRIP */
    int64_t rows;            /* queries of an item */
    int64_t keys;            /* keys of a block */
    int64_t q_slots, k_slots;
    size_t kt, v, bytes;
} attention_fwd_layout;

static inline attention_fwd_layout attention_fwd_layout_of(const attention_sizes *sizes, size_t size, int64_t keys)
{
    attention_fwd_layout layout = {.qk_size = cot_round_up(sizes->d_qk, ATTENTION_STRIP),
                                   .v_size = cot_round_up(sizes->d_v, ATTENTION_STRIP),
                                   .keys = cot_round_up(cot_clamp(sizes->Tk, 1, keys), ATTENTION_STRIP)};
    layout.rows = sizes->d_qk > ATTENTION_MAX_D / 2 || sizes->d_v > ATTENTION_MAX_D / 2 ? ATTENTION_FWD_ROWS / 2
                                                                                        : ATTENTION_FWD_ROWS;
    layout.q_slots = attention_slot_count(sizes, /*along_keys=*/false, layout.rows);
    layout.k_slots = attention_slot_count(sizes, /*along_keys=*/true, layout.keys);
    layout.kt = cot_workspace_reserve(&layout.bytes,
                                      COT_PRODUCT(layout.k_slots, sizes->Hkv, layout.keys, layout.qk_size), size);
    layout.v =
        cot_workspace_reserve(&layout.bytes, COT_PRODUCT(layout.k_slots, sizes->Hkv, layout.keys, layout.v_size), size);
    return layout;
}

/* Backward. An item is one chunk of the key blocks of one sequence and key-value head. The chunks of a sequence
 * contribute to the same dq, so each chunk has its own dq. Members from `queries` on are byte offsets:
 *   queries   the packed queries, in all forms that the five products read
 *   lse, delta    of every query
 *   dq        dq^T of every chunk
 *   k, dk     the operands of each item's current key blocks; their dk and dv */
typedef struct attention_bwd_layout {
    int64_t qk_size, v_size; /* d and d_v of attention_sizes, rounded up to multiples of ATTENTION_STRIP */
    int64_t q_slots, chunks;
    int64_t query_block_elements; /* elements of a packed query block: q^T, q, dout^T, dout */
    int64_t key_block_elements;   /* elements of an item's packed key blocks: k, k^T, v of each */
    size_t queries, lse, delta, dq, k, dk, bytes;
} attention_bwd_layout;

static inline int64_t attention_chunk_count(const attention_sizes *sizes)
{
    const int64_t heads = cot_max(cot_mul(sizes->B, sizes->Hkv), 1), blocks = cot_ceil_div(sizes->Tk, ATTENTION_BLOCK);
    const int64_t max_chunks = blocks < ATTENTION_MAX_CHUNKS ? blocks : ATTENTION_MAX_CHUNKS;
    return cot_clamp(cot_ceil_div(ATTENTION_MIN_ITEMS, heads), 1, max_chunks > 1 ? max_chunks : 1);
}

static inline attention_bwd_layout attention_bwd_layout_of(const attention_sizes *sizes, size_t size)
{
    attention_bwd_layout layout = {.qk_size = cot_round_up(sizes->d_qk, ATTENTION_STRIP),
                                   .v_size = cot_round_up(sizes->d_v, ATTENTION_STRIP),
                                   .q_slots = attention_slot_count(sizes, /*along_keys=*/false, ATTENTION_BLOCK),
                                   .chunks = attention_chunk_count(sizes)};
    const int64_t q_rows = COT_PRODUCT(layout.q_slots, sizes->H, ATTENTION_BLOCK),
                  items = COT_PRODUCT(sizes->B + sizes->packed, sizes->Hkv, layout.chunks);
    layout.query_block_elements = COT_PRODUCT(2, ATTENTION_BLOCK, layout.qk_size + layout.v_size);
    layout.key_block_elements =
        COT_PRODUCT(ATTENTION_L2_KEY_BLOCKS, ATTENTION_BLOCK, cot_add(layout.qk_size, layout.qk_size + layout.v_size));
    layout.queries =
        cot_workspace_reserve(&layout.bytes, COT_PRODUCT(layout.q_slots, sizes->H, layout.query_block_elements), size);
    layout.lse = cot_workspace_reserve(&layout.bytes, q_rows, sizeof(float));
    layout.delta = cot_workspace_reserve(&layout.bytes, q_rows, sizeof(float));
    layout.dq = cot_workspace_reserve(&layout.bytes, COT_PRODUCT(layout.chunks, q_rows, layout.qk_size), sizeof(float));
    layout.k = cot_workspace_reserve(&layout.bytes, cot_mul(items, layout.key_block_elements), size);
    layout.dk = cot_workspace_reserve(
        &layout.bytes, COT_PRODUCT(items, ATTENTION_L2_KEY_BLOCKS, ATTENTION_BLOCK, layout.qk_size + layout.v_size),
        sizeof(float));
    return layout;
}

/* ---- scratch: bytes of an item's buffers in the thread's scratch ------------------------------------------- *
 * `size` is the bytes of an operand's element. one_form: P overwrites the scores and dS overwrites dP. */

enum {
    ATTENTION_FWD_ELEMENTS = ATTENTION_FWD_ROWS * ATTENTION_MAX_D / 2, /* elements of an item's q or out */
    ATTENTION_TILE_ELEMENTS = ATTENTION_SCORE_ROWS * ATTENTION_BLOCK,
    ATTENTION_STRIP_ELEMENTS = ATTENTION_STRIP * ATTENTION_MAX_D,
    ATTENTION_STATE_BYTES = 2048 /* for scalars, row sums and alignment gaps */
};

/* Forward: q and two P; out, scores, dropout factors and a strip of rows. `keys` is the maximum keys of a block. */
#define ATTENTION_FWD_SCRATCH(size, one_form, keys)                                             \
    ((size) * (ATTENTION_FWD_ELEMENTS + ((one_form) ? 0 : 2 * ATTENTION_SCORE_ROWS * (keys))) + \
     4 * (ATTENTION_FWD_ELEMENTS + 2 * ATTENTION_TILE_ELEMENTS + ATTENTION_STRIP_ELEMENTS) + ATTENTION_STATE_BYTES)

/* Backward: two each of P, dS and dS in B form; scores, softcap slopes and dropout factors; dP of a block; two strips
 * of rows. */
#define ATTENTION_BWD_SCRATCH(size, one_form)                                                               \
    ((size) * ((one_form) ? 0 : 6 * ATTENTION_TILE_ELEMENTS) +                                              \
     4 * (3 * ATTENTION_TILE_ELEMENTS + ATTENTION_BLOCK * ATTENTION_BLOCK + 2 * ATTENTION_STRIP_ELEMENTS) + \
     ATTENTION_STATE_BYTES)

/* Additionally for dbias: two operands of keys, and sums in double. */
#define ATTENTION_DBIAS_SCRATCH(size) \
    ((size)*2 * ATTENTION_SCORE_ROWS * ATTENTION_MAX_D + 8 * ATTENTION_TILE_ELEMENTS + ATTENTION_STATE_BYTES)

/* The key blocks of chunk `chunk` of a sequence. */
static inline attention_span attention_chunk_blocks(int64_t chunk, int64_t chunks, int64_t blocks)
{
    return (attention_span){chunk * blocks / chunks, (chunk + 1) * blocks / chunks};
}

#endif
