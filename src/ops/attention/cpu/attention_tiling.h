/* SPDX-License-Identifier: Apache-2.0
 * attention_tiling.h: where the tiled kernels' blocks and items begin and end, by the shape alone, and how their
 * workspace is laid out.
 *
 * Queries and keys are cut into blocks that begin anew with every sequence. Every block has a slot, whose number says
 * where its packed operands lie; packed sequences have a few slots to spare, since their lengths are data. */
#ifndef COT_ATTENTION_TILING_H
#define COT_ATTENTION_TILING_H

#include "ops/attention/attention_problem.h"

enum {
    ATTENTION_STRIP = 32,     /* rows or columns that a product takes at least: MT of simd/matmul.h */
    ATTENTION_TALL = 64,      /* rows of scores that are worked off together */
    ATTENTION_FWD_ROWS = 128, /* queries of a forward's item; half as many from d = 129 on */
    ATTENTION_BLOCK = 128,    /* keys of a block at most, and queries of a backward's */
    ATTENTION_SUPER = 4,      /* blocks of keys that a backward holds in the second-level cache, at most */
    ATTENTION_MAX_D = 256,    /* what the buffers of an item are made for */
    ATTENTION_ITEMS = 16,     /* a backward is cut into this many items where sequences and heads are fewer */
    ATTENTION_MAX_CHUNKS = 8
};

/* With AMX a forward's blocks are longer, which spares it loads and stores of out. By the size of an operand's element. */
#define ATTENTION_FWD_AMX_KEYS(size) ((size) == 2 ? 4 * ATTENTION_BLOCK : 2 * ATTENTION_BLOCK)

/* ---- slots -------------------------------------------------------------------------------------------- */

/* One of the two axes of a call, cut into blocks of `size`. */
typedef struct attention_axis {
    const attention_problem *p;
    bool keys;
    int64_t size;
} attention_axis;

static inline int64_t attention_slots(const attention_sizes *z, bool keys, int64_t size)
{
    const int64_t rows = keys ? z->rows_k : z->rows_q;
    return z->packed ? rows / size + z->B + 1 : cot_mul(z->B, cot_ceil_div(keys ? z->Tk : z->Tq, size));
}

/* The slot of sequence b's first block; no two sequences' slots overlap. */
static inline int64_t attention_first_slot(const attention_axis *x, int64_t b)
{
    if (!x->p->sizes.packed)
        return b * cot_ceil_div(x->keys ? x->p->sizes.Tk : x->p->sizes.Tq, x->size);
    return attention_index(x->keys ? &x->p->cu_seqlens_k : &x->p->cu_seqlens_q, b) / x->size + b;
}

/* A block: rows first .. first+rows of sequence s, `used` of which count. rows 0: the slot is spare. */
typedef struct attention_block {
    attention_sequence s;
    int64_t slot, first, rows, used;
} attention_block;

static inline attention_block attention_block_at(const attention_axis *x, int64_t slot)
{
    int64_t low = 0, high = attention_sequence_count(x->p) - 1; /* the last sequence that begins at or before slot */
    if (!x->p->sizes.packed)
        low = high = slot / cot_ceil_div(x->keys ? x->p->sizes.Tk : x->p->sizes.Tq, x->size);
    while (low < high) {
        const int64_t middle = (low + high + 1) / 2;
        if (attention_first_slot(x, middle) <= slot)
            low = middle;
        else
            high = middle - 1;
    }
    attention_block block = {.s = attention_sequence_at(x->p, low), .slot = slot};
    block.first = (slot - attention_first_slot(x, low)) * x->size;
    block.rows = cot_clamp((x->keys ? block.s.k_rows : block.s.q_rows) - block.first, 0, x->size);
    block.used = cot_clamp((x->keys ? block.s.Tk : block.s.Tq) - block.first, 0, block.rows);
    return block;
}

/* ---- what a stretch of queries or keys sees, as a whole: the masks' borders rise with the row -------------- */

static inline attention_span attention_keys_of_rows(const attention_sizes *z, const attention_sequence *s,
                                                    int64_t first, int64_t end)
{
    end = end < s->Tq ? end : s->Tq;
    if (first >= end)
        return (attention_span){0, 0};
    return (attention_span){attention_keys_of(z, s, first).first, attention_keys_of(z, s, end - 1).end};
}

static inline attention_span attention_queries_of_rows(const attention_sizes *z, const attention_sequence *s,
                                                       int64_t first, int64_t end)
{
    end = end < s->Tk ? end : s->Tk;
    if (first >= end)
        return (attention_span){0, 0};
    return (attention_span){attention_queries_of(z, s, first).first, attention_queries_of(z, s, end - 1).end};
}

/* A span relative to `first`, within [0, size), its borders moved outwards to whole strips. */
static inline attention_span attention_strips(attention_span span, int64_t first, int64_t size)
{
    const int64_t low = cot_clamp(span.first - first, 0, size), high = cot_clamp(span.end - first, 0, size);
    if (low >= high)
        return (attention_span){0, 0};
    return (attention_span){low / ATTENTION_STRIP * ATTENTION_STRIP, cot_round_up(high, ATTENTION_STRIP)};
}

/* ---- workspace ---------------------------------------------------------------------------------------- */

/* Forward: K^T and V of every key block and key-value head. Offsets in bytes; `size` is that of an operand's element, `keys`
 * how many keys a block has at most. */
typedef struct attention_fwd_layout {
    int64_t d, dv; /* rounded up to whole strips */
    int64_t rows;  /* queries of an item */
    int64_t keys;  /* of a block */
    int64_t q_slots, k_slots;
    size_t kt, v, bytes;
} attention_fwd_layout;

static inline attention_fwd_layout attention_fwd_layout_of(const attention_sizes *z, size_t size, int64_t keys)
{
    attention_fwd_layout w = {.d = cot_round_up(z->d, ATTENTION_STRIP),
                              .dv = cot_round_up(z->dv, ATTENTION_STRIP),
                              .keys = cot_round_up(cot_clamp(z->Tk, 1, keys), ATTENTION_STRIP)};
    w.rows = z->d > ATTENTION_MAX_D / 2 || z->dv > ATTENTION_MAX_D / 2 ? ATTENTION_FWD_ROWS / 2 : ATTENTION_FWD_ROWS;
    w.q_slots = attention_slots(z, false, w.rows);
    w.k_slots = attention_slots(z, true, w.keys);
    w.kt = cot_take(&w.bytes, COT_PRODUCT(w.k_slots, z->Hkv, w.keys, w.d), size);
    w.v = cot_take(&w.bytes, COT_PRODUCT(w.k_slots, z->Hkv, w.keys, w.dv), size);
    return w;
}

/* Backward: the queries' operands in all the forms that the five products want, lse and D, dq of every chunk, transposed, and the
 * operands, dk and dv of the key blocks that an item is at. An item is a chunk of the key blocks of one sequence and
 * key-value head; the chunks of a sequence share its dq, so each has its own. */
typedef struct attention_bwd_layout {
    int64_t d, dv;
    int64_t q_slots, chunks;
    int64_t record; /* elements of a block of queries: q^T, q, dout^T, dout */
    int64_t keys;   /* of an item's blocks of keys: k, k^T, v of each */
    size_t queries, lse, D, dq, k, dk, bytes;
} attention_bwd_layout;

static inline int64_t attention_chunks(const attention_sizes *z)
{
    const int64_t heads = cot_max(cot_mul(z->B, z->Hkv), 1), blocks = cot_ceil_div(z->Tk, ATTENTION_BLOCK);
    const int64_t most = blocks < ATTENTION_MAX_CHUNKS ? blocks : ATTENTION_MAX_CHUNKS;
    return cot_clamp(cot_ceil_div(ATTENTION_ITEMS, heads), 1, most > 1 ? most : 1);
}

static inline attention_bwd_layout attention_bwd_layout_of(const attention_sizes *z, size_t size)
{
    attention_bwd_layout w = {.d = cot_round_up(z->d, ATTENTION_STRIP),
                              .dv = cot_round_up(z->dv, ATTENTION_STRIP),
                              .q_slots = attention_slots(z, false, ATTENTION_BLOCK),
                              .chunks = attention_chunks(z)};
    const int64_t q_rows = COT_PRODUCT(w.q_slots, z->H, ATTENTION_BLOCK),
                  items = COT_PRODUCT(z->B + z->packed, z->Hkv, w.chunks);
    w.record = COT_PRODUCT(2, ATTENTION_BLOCK, w.d + w.dv);
    w.keys = COT_PRODUCT(ATTENTION_SUPER, ATTENTION_BLOCK, cot_add(w.d, w.d + w.dv));
    w.queries = cot_take(&w.bytes, COT_PRODUCT(w.q_slots, z->H, w.record), size);
    w.lse = cot_take(&w.bytes, q_rows, sizeof(float));
    w.D = cot_take(&w.bytes, q_rows, sizeof(float));
    w.dq = cot_take(&w.bytes, COT_PRODUCT(w.chunks, q_rows, w.d), sizeof(float));
    w.k = cot_take(&w.bytes, cot_mul(items, w.keys), size);
    w.dk = cot_take(&w.bytes, COT_PRODUCT(items, ATTENTION_SUPER, ATTENTION_BLOCK, w.d + w.dv), sizeof(float));
    return w;
}

/* ---- what an item keeps in its thread's slice of scratch --------------------------------------------------- *
 * Bytes by the size of an operand's element; one_form: P and dS take the place of the scores. */

enum {
    ATTENTION_FWD_CELLS = ATTENTION_FWD_ROWS * ATTENTION_MAX_D / 2, /* of an item's q and out */
    ATTENTION_TILE_CELLS = ATTENTION_TALL * ATTENTION_BLOCK,
    ATTENTION_STRIP_CELLS = ATTENTION_STRIP * ATTENTION_MAX_D,
    ATTENTION_STATE_BYTES = 2048 /* of scalars, row sums and the gaps between arrays */
};

/* Forward: q, two P; out, scores, their dropout, a strip of rows. `keys` is the most that a block has. */
#define ATTENTION_FWD_SCRATCH(size, one_form, keys)                                    \
    ((size) * (ATTENTION_FWD_CELLS + ((one_form) ? 0 : 2 * ATTENTION_TALL * (keys))) + \
     4 * (ATTENTION_FWD_CELLS + 2 * ATTENTION_TILE_CELLS + ATTENTION_STRIP_CELLS) + ATTENTION_STATE_BYTES)

/* Backward: two each of P and of dS in two forms; scores, dP of a block, slopes of softcap, dropout, two strips of rows. */
#define ATTENTION_BWD_SCRATCH(size, one_form)                                                         \
    ((size) * ((one_form) ? 0 : 6 * ATTENTION_TILE_CELLS) +                                           \
     4 * (3 * ATTENTION_TILE_CELLS + ATTENTION_BLOCK * ATTENTION_BLOCK + 2 * ATTENTION_STRIP_CELLS) + \
     ATTENTION_STATE_BYTES)

/* Behind them, for dbias: two operands of keys, and sums in double. */
#define ATTENTION_DBIAS_SCRATCH(size) \
    ((size)*2 * ATTENTION_TALL * ATTENTION_MAX_D + 8 * ATTENTION_TILE_CELLS + ATTENTION_STATE_BYTES)

/* Chunk c of a sequence's key blocks: [first, end). */
static inline attention_span attention_chunk(int64_t c, int64_t chunks, int64_t blocks)
{
    return (attention_span){c * blocks / chunks, (c + 1) * blocks / chunks};
}

#endif
