/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_fwd_tiled.c: out = softmax(s) v and lse in tiles, on the products of simd/matmul.h:
 *
 *     S = Q K^T       [SCORE_ROWS queries][up to MAX_BLOCK_KEYS keys], float32
 *     P = exp(S - m)  m: row_max of the row. P is rounded to an operand's type (bf16 with AMX), its sum is not
 *     O = O exp(m_before - m) + P V;      out = O / sum,  lse = m + log(sum)
 *
 * Without AMX, row_max is the running maximum. With AMX and unmodified scores, row_max is fixed early: it is the sink
 * if there is one, else the largest score of the first result tile (32 keys) with a visible key. Later blocks keep it,
 * so out is not rescaled. If a row's sum over a block exceeds MAX_BLOCK_SUM, attend_running_max repeats the block: it
 * updates row_max and rescales out. Calls with softcap, ALiBi, bias, dropout or a negative scale use running maxima, as
 * without AMX.
 *
 * The keys of a sequence and key-value head are packed once for all query heads that read them. A block has K^T
 * [qk_size][layout.keys] and V [layout.keys][v_size], both in B form. Then an item is a block of queries of one head.
 * Its state is in the thread's scratch. Key blocks to which no query of the tile attends are skipped, and so are strips
 * of keys within a block. docs/kernels/attention_cpu.md has a table of these sizes (tile, result tile, strip, block,
 * panel).
 *
 * The file is compiled once per instruction set. simd/simd.h defines V_NAME (appends the name of the instruction set),
 * V_INLINE, vf (a vector of VW floats) and the functions v_*. simd/matmul.h defines mt (the type of an operand's
 * element), PANEL (the width of a panel), the A and B forms of operands, and the functions mt_*. MT_SAME_FORM: both
 * forms are panels of float, as the results. */
#include "attention_scores.h"

#include <stdatomic.h>

cot_status V_NAME(attention_fwd_tiled)(cot_queue *, const void *, void *);

enum {
    MAX_BLOCK_KEYS = MT_SAME_FORM ? ATTENTION_BLOCK : ATTENTION_FWD_AMX_KEYS(sizeof(mt)),
    MAX_ITEM_QUERIES = ATTENTION_FWD_ROWS,
    SCORE_COLUMNS = ATTENTION_BLOCK, /* keys of the score buffer: one block, or a sub-block of an AMX block */
    ELEMENTS = ATTENTION_FWD_ELEMENTS,
    /* Scores are scaled and rounded before the maximum, so that exp's argument is exactly 0 at the largest score. */
    SCALE_BEFORE_MAX = MT_SAME_FORM,
};

typedef struct context {
    const attention_problem *p;
    attention_fwd_layout layout;
    mt *kt, *v;
    int64_t private_groups;      /* the first groups: one thread processes each of them alone */
    _Atomic int64_t *next_group; /* the next private group */
} context;

/* The operands of a sequence and key-value head. Block i begins at row i * rows_to_next_block: at element
 * i * rows_to_next_block * qk_size of kt, and at element i * rows_to_next_block * v_size of v. */
typedef struct packed_keys {
    mt *kt, *v;
    int64_t rows_to_next_block;
} packed_keys;

/* ---- packing -------------------------------------------------------------------------------------------- */

/* `first_block` and `block_step` count blocks of one head. */
static packed_keys packed_keys_at(const context *c, int64_t first_block, int64_t block_step)
{
    return (packed_keys){c->kt + first_block * c->layout.keys * c->layout.qk_size,
                         c->v + first_block * c->layout.keys * c->layout.v_size, block_step * c->layout.keys};
}

/* Every block of every head has its own place; the heads of a block are adjacent. */
static packed_keys packed_keys_of(const context *c, int64_t b, int64_t hkv)
{
    const attention_axis axis = attention_key_axis(c->p, c->layout.keys);
    const int64_t kv_heads = c->p->sizes.Hkv;
    return packed_keys_at(c, attention_first_slot(&axis, b) * kv_heads + hkv, kv_heads);
}

/* `staging` holds a strip of rows. */
static void pack_block(const context *c, const attention_block *block, int64_t hkv, const packed_keys *keys,
                       float *staging)
{
    const attention_problem *p = c->p;
    const int64_t row_offset = block->first / c->layout.keys * keys->rows_to_next_block;
    for (int64_t r = 0; r < block->used; r += STRIP) {
        const int64_t rows = cot_clamp(block->used - r, 0, STRIP), row = block->sequence.k_row + block->first + r;
        load_rows(staging, c->layout.qk_size, &p->k, block->sequence.b, row, hkv, rows, p->sizes.d_qk);
        pack_b_transposed(keys->kt + row_offset * c->layout.qk_size, r, staging, c->layout.qk_size);
        load_rows(staging, c->layout.v_size, &p->v, block->sequence.b, row, hkv, rows, p->sizes.d_v);
        pack_b(keys->v + row_offset * c->layout.v_size, c->layout.keys, r, staging, c->layout.v_size);
    }
}

/* A group is the query heads of one key-value head of a sequence, which read the same keys. Returns whether one thread
 * processes the group alone. */
static bool is_private(const context *c, int64_t b, int64_t hkv)
{
    return b * c->p->sizes.Hkv + hkv < c->private_groups;
}

static void pack_item(void *argument, int64_t item, void *scratch)
{
    const context *c = argument;
    const attention_axis axis = attention_key_axis(c->p, c->layout.keys);
    const int64_t hkv = item % c->p->sizes.Hkv;
    const attention_block block = attention_block_at(&axis, item / c->p->sizes.Hkv);
    if (block.rows == 0 || is_private(c, block.sequence.b, hkv))
        return;
    const packed_keys keys = packed_keys_of(c, block.sequence.b, hkv);
    pack_block(c, &block, hkv, &keys, scratch);
}

/* ---- softmax --------------------------------------------------------------------------------------------- */

/* P V of a score tile, not yet accumulated in out. It has `result_tiles` result tiles of 32 x 32. */
typedef struct pending_product {
    const mt *prob, *v;
    float *out;
    int64_t keys, result_tiles, done;
    bool accumulate;
} pending_product;

/* The state of an item: a block of queries of one head. row_max (see the top of the file) is multiplied by EXP_SCALE.
 * row_sum holds the sum of exp(s - row_max). */
typedef struct item_state {
    _Alignas(64) mt q[ELEMENTS];
    _Alignas(64) float out[ELEMENTS];
    _Alignas(64) float row_max[MAX_ITEM_QUERIES], row_sum[MAX_ITEM_QUERIES];
    _Alignas(64) float scores[SCORE_ROWS * SCORE_COLUMNS];
    /* Double-buffered. With one form P overwrites scores. */
    _Alignas(64) mt prob[MT_SAME_FORM ? 1 : 2 * SCORE_ROWS * MAX_BLOCK_KEYS];
    int64_t prob_index;
    _Alignas(64) float dropout_factors[SCORE_ROWS * SCORE_COLUMNS];
    bool out_initialized[MAX_ITEM_QUERIES / STRIP]; /* the strip's out holds a value, or its first product is pending */
    bool row_max_set[MAX_ITEM_QUERIES / STRIP];     /* every row of the strip has a row_max */
    pending_product pending;
    _Alignas(64) float staging[STRIP * ATTENTION_MAX_D]; /* queries before packing */
} item_state;

_Static_assert(sizeof(item_state) <= ATTENTION_FWD_SCRATCH(sizeof(mt), MT_SAME_FORM, MAX_BLOCK_KEYS),
               "the state must fit the thread's scratch");

V_INLINE mt *prob_buffer(item_state *state)
{
    return MT_SAME_FORM ? (mt *)state->scores : state->prob + state->prob_index * SCORE_ROWS * MAX_BLOCK_KEYS;
}

/* Lane i of the result is the maximum (sum) of the lanes of vectors[i]. */
V_INLINE vf max_per_vector(vf vectors[VW])
{
    mt_transpose(vectors);
    for (int i = 1; i < VW; i++)
        vectors[0] = v_max(vectors[i], vectors[0]);
    return vectors[0];
}

V_INLINE vf sum_per_vector(vf vectors[VW])
{
    mt_transpose(vectors);
    for (int distance = 1; distance < VW; distance *= 2)
        for (int i = 0; i < VW; i += 2 * distance)
            vectors[i] = v_add(vectors[i], vectors[i + distance]);
    return vectors[0];
}

/* Sets masked scores of queries [first_query, first_query + rows) to -inf. Column 0 of s[s_rows][] is key first_key.
 * The mask has its own pass because few blocks cross a mask edge. */
static void apply_mask(const score_context *ctx, float *s, int64_t s_rows, int64_t first_query, int64_t rows,
                       int64_t first_key, attention_span key_range)
{
    for (int64_t r = 0; r < rows; r++) {
        const attention_span keys = visible_keys(ctx, first_query + r);
        const int64_t low = keys.first - first_key, high = keys.end - first_key;
        for (int64_t column = key_range.first; column < key_range.end; column += VW)
            if (column < low || column + VW > high)
                v_store(s + panel_offset(s_rows, r, column),
                        mask_scores(v_load(s + panel_offset(s_rows, r, column)), low - column, high - column));
    }
}

/* Softmax of the item's rows [first_row, first_row + rows) over the keys key_range of a block. Scores become
 * P = base^(score * exp_scale - row_max), see exp_scores. row_max and row_sum are updated, and out is rescaled to the
 * new maximum. */
V_INLINE void softmax_rows(item_state *state, const attention_fwd_layout *layout, int64_t first_row, int64_t rows,
                           attention_span key_range, float exp_scale, bool dropout)
{
    float *row_max = state->row_max + first_row, *row_sum = state->row_sum + first_row;
    mt *prob = prob_buffer(state);
    for (int64_t r = 0; r < rows; r += VW) {
        vf partials[VW]; /* of row r + i: partial maxima, then partial sums */
        for (int64_t i = 0; i < VW; i++) {
            /* Two accumulators, for every other vector, halve the chain of dependent operations. */
            vf max0 = v_set1(-INFINITY), max1 = v_set1(-INFINITY);
            for (int64_t column = key_range.first; column < key_range.end; column += 2 * VW) {
                float *s = state->scores + panel_offset(SCORE_ROWS, r + i, column);
                vf s0 = v_load(s), s1 = v_load(s + VW);
                if (SCALE_BEFORE_MAX) {
                    s0 = v_mul(s0, v_set1(exp_scale));
                    s1 = v_mul(s1, v_set1(exp_scale));
                    v_store(s, s0);
                    v_store(s + VW, s1);
                }
                max0 = v_max(max0, s0);
                max1 = v_max(max1, s1);
            }
            partials[i] = v_max(max0, max1);
        }
        /* A row without a visible key so far keeps -FLT_MAX, not -inf, so that no difference is NaN. */
        const vf old_max = v_load(row_max + r),
                 new_max = v_max(old_max, v_mul(max_per_vector(partials), v_set1(SCALE_BEFORE_MAX ? 1 : exp_scale))),
                 rescale = exp_scores(old_max, v_set1(1), new_max);
        float rescales[VW];
        v_store(row_max + r, new_max);
        v_store(rescales, rescale);
        for (int64_t i = 0; i < VW; i++) {
            const vf max = v_set1(row_max[r + i]), scale = v_set1(SCALE_BEFORE_MAX ? 1 : exp_scale);
            vf sum0 = v_zero(), sum1 = v_zero();
            for (int64_t column = key_range.first; column < key_range.end; column += 2 * VW) {
                const int64_t offset = panel_offset(SCORE_ROWS, r + i, column);
                vf p0 = exp_scores(v_load(state->scores + offset), scale, max),
                   p1 = exp_scores(v_load(state->scores + offset + VW), scale, max);
                sum0 = v_add(sum0, p0);
                sum1 = v_add(sum1, p1);
                if (dropout) {
                    p0 = v_mul(p0, v_load(state->dropout_factors + offset));
                    p1 = v_mul(p1, v_load(state->dropout_factors + offset + VW));
                }
                mt_store_a2(prob + offset, p0, p1);
            }
            partials[i] = v_add(sum0, sum1);
            /* No iteration if there is nothing to rescale: out has no value yet, or the row's maximum did not rise. */
            for (int64_t column = 0;
                 state->out_initialized[first_row / STRIP] && rescales[i] != 1 && column < layout->v_size;
                 column += VW) {
                float *out = state->out + panel_offset(layout->rows, first_row + r + i, column);
                v_store(out, v_mul(v_load(out), v_set1(rescales[i])));
            }
        }
        v_store(row_sum + r, v_fma(v_load(row_sum + r), rescale, sum_per_vector(partials)));
    }
}

/* ---- one item -------------------------------------------------------------------------------------------- */

/* Whether each of `rows` queries attends to every key of key_range, which is relative to block_first. Both ends of a
 * row's keys grow with the query. A row beyond the last query has no keys, so the end of the last row is tested too. */
static bool all_keys_visible(const score_context *ctx, int64_t first_query, int64_t rows, int64_t block_first,
                             attention_span key_range)
{
    const attention_span first_keys = visible_keys(ctx, first_query),
                         last_keys = visible_keys(ctx, first_query + rows - 1);
    return last_keys.first <= block_first + key_range.first && first_keys.end >= block_first + key_range.end &&
           last_keys.end >= block_first + key_range.end;
}

/* A block of at most MAX_BLOCK_KEYS packed keys: its first key and its operands. */
typedef struct packed_key_block {
    int64_t first;
    const mt *kt, *v;
} packed_key_block;

/* Attends the item's rows [first_row, first_row + rows) to the keys key_range of a block. */
static void attend_rows(const context *c, const score_context *ctx, item_state *state, int64_t first_query,
                        int64_t first_row, int64_t rows, const packed_key_block *block, attention_span key_range,
                        bool all_visible)
{
    const int64_t i = first_query + first_row, n = key_range.end - key_range.first;
    const float exp_scale = scores_exp_scale(c->p);
    mt_product_all_terms(rows, n, c->layout.qk_size, state->q + mt_offset(c->layout.rows, first_row, 0), c->layout.rows,
                         block->kt + mt_offset(c->layout.qk_size, 0, key_range.first), c->layout.qk_size,
                         state->scores + mt_offset(SCORE_ROWS, 0, key_range.first), SCORE_ROWS, /*add=*/false, NULL);
    if (ctx->modified) {
        const score_tile tile = {.i = i, .j = block->first, .keys_in_rows = false, .rows = rows, .columns = key_range};
        modify_scores(ctx, &tile, state->scores, NULL);
        if (ctx->dropout.dropped > 0)
            fill_dropout_factors(ctx, &tile, state->dropout_factors);
    }
    if (!all_visible)
        apply_mask(ctx, state->scores, SCORE_ROWS, i, rows, block->first, key_range);
    if (ctx->dropout.dropped > 0)
        softmax_rows(state, &c->layout, first_row, rows, key_range, exp_scale, /*dropout=*/true);
    else
        softmax_rows(state, &c->layout, first_row, rows, key_range, exp_scale, /*dropout=*/false);
    const mt *prob = prob_buffer(state);
    mt_product(rows, c->layout.v_size, n, prob + mt_offset(SCORE_ROWS, 0, key_range.first), SCORE_ROWS,
               block->v + mt_offset(c->layout.keys, key_range.first, 0), c->layout.keys,
               state->out + mt_offset(c->layout.rows, first_row, 0), c->layout.rows,
               state->out_initialized[first_row / STRIP], NULL);
    for (int64_t r = first_row; r < first_row + rows; r += STRIP)
        state->out_initialized[r / STRIP] = true;
}

#if defined(COT_MATMUL_AMX)

/* ---- overlap of exponentials with products -------------------------------------------------------------------- *
 * row_max is fixed early, see the top of the file, so S is read once. P of a result tile of S (32 queries x 32 keys) is
 * computed row by row, in the callbacks of mt_product_result_tile. While tile products of this S and of the pending P V
 * run, their callbacks compute the exponentials. A core of 2023 computes about one row of P during one AMX tile
 * product. */
#define MAX_BLOCK_SUM 4096.0f /* limit of a row's sum of P over a block */

enum {
    RESULT_TILES_DOWN = SCORE_ROWS / STRIP, /* result tiles in a column of a score tile */
    RING_SIZE = 4, /* result tiles of S that wait for their exponentials, plus the one that the product writes */
};

/* A result tile of S (32 queries x 32 keys) whose P is not yet computed. */
typedef struct softmax_result_tile {
    const float *s, *row_max;
    mt *prob;
    float *sums; /* [STRIP / 4][VW]: sums of four rows, in the layout of v_sums4 */
} softmax_result_tile;

/* The waiting result tiles in a ring. `current` is the oldest result tile, of which rows_left rows remain. The other
 * `count` result tiles follow: the first of them is ring[next]. */
typedef struct softmax_queue {
    const softmax_result_tile *ring;
    int64_t next, count;
    softmax_result_tile current;
    int64_t rows_left;
    vf exp_scale, sum[4]; /* sum: sums of the last four rows */
    bool step_has_rows;   /* rows_left > 0 when this group of steps began */
} softmax_queue;

/* Computes P of one row. `row` counts modulo 4; the fourth row stores the sums of all four. */
V_INLINE void softmax_row(softmax_queue *queue, int row)
{
    const vf row_max = v_set1(*queue->current.row_max);
    const vf e = exp_scores(v_load(queue->current.s), queue->exp_scale, row_max),
             f = exp_scores(v_load(queue->current.s + VW), queue->exp_scale, row_max);
    mt_store_a2(queue->current.prob, e, f);
    queue->sum[row] = v_add(e, f);
    queue->current.s += PANEL;
    queue->current.row_max++;
    queue->current.prob += PANEL;
    if (row == 3) {
        v_store(queue->current.sums, v_add(v_load(queue->current.sums),
                                           v_sums4(queue->sum[0], queue->sum[1], queue->sum[2], queue->sum[3])));
        queue->current.sums += VW;
        queue->rows_left -= 4;
    }
}

V_INLINE void start_next_result_tile(softmax_queue *queue)
{
    queue->current = queue->ring[queue->next];
    queue->next = (queue->next + 1) % RING_SIZE;
    queue->rows_left = STRIP;
    queue->count--;
}

/* Makes the next waiting result tile current if the current one is finished. Returns false if no result tile waits. */
V_INLINE bool ensure_current_result_tile(softmax_queue *queue)
{
    if (queue->rows_left > 0)
        return true;
    if (queue->count == 0)
        return false;
    start_next_result_tile(queue);
    return true;
}

/* Callbacks of mt_product_result_tile. It calls them four times per k-step, with `step` = 0 to 3. softmax_step computes
 * one row of P per call. softmax_step_two_rows computes two, for small d + d_v, where there are too few calls. */
V_INLINE void softmax_step(void *argument, int step)
{
    softmax_queue *queue = argument;
    if (step == 0)
        queue->step_has_rows = ensure_current_result_tile(queue);
    if (queue->step_has_rows)
        softmax_row(queue, step);
}

V_INLINE void softmax_step_two_rows(void *argument, int step)
{
    softmax_queue *queue = argument;
    if (step % 2 == 0)
        queue->step_has_rows = ensure_current_result_tile(queue);
    if (queue->step_has_rows) {
        softmax_row(queue, step % 2 * 2);
        softmax_row(queue, step % 2 * 2 + 1);
    }
}

/* Finishes the current result tile, and further ones until at most max_waiting result tiles wait. */
V_INLINE void drain_softmax(softmax_queue *queue, int64_t max_waiting)
{
    for (;;) {
        while (queue->rows_left > 0)
            for (int row = 0; row < 4; row++)
                softmax_row(queue, row);
        if (queue->count <= max_waiting)
            return;
        start_next_result_tile(queue);
    }
}

/* Sets row_max of rows that had no visible key before this result tile. Returns whether every row now has a row_max. */
static bool set_row_max(const float *s, float exp_scale, float *row_max)
{
    vf unset = v_zero();
    for (int64_t r = 0; r < STRIP; r += VW) {
        vf partials[VW];
        for (int64_t i = 0; i < VW; i++)
            partials[i] = v_max(v_load(s + (r + i) * PANEL), v_load(s + (r + i) * PANEL + VW));
        const vf least = v_set1(-FLT_MAX), old_max = v_load(row_max + r);
        const vf tile_max = v_max(least, v_mul(max_per_vector(partials), v_set1(exp_scale)));
        const vf new_max = v_select(vm_above(old_max, least), old_max, tile_max);
        v_store(row_max + r, new_max);
        unset = v_select(vm_above(new_max, least), unset, v_set1(1));
    }
    return v_sum(unset) == 0;
}

V_INLINE void accumulate_result_tile(const context *c, pending_product *pending, void (*overlap)(void *, int),
                                     softmax_queue *queue)
{
    const int64_t j = pending->done / RESULT_TILES_DOWN * STRIP, i = pending->done % RESULT_TILES_DOWN * STRIP;
    mt_product_result_tile(pending->keys, 1, pending->prob + mt_offset(SCORE_ROWS, i, 0), SCORE_ROWS,
                           pending->v + mt_offset(c->layout.keys, 0, j), pending->out + mt_offset(c->layout.rows, i, j),
                           pending->accumulate, /*all_terms=*/false, overlap, queue);
    pending->done++;
}

static void finish_pending(const context *c, pending_product *pending)
{
    softmax_queue empty_queue = {.rows_left = 0};
    while (pending->done < pending->result_tiles)
        accumulate_result_tile(c, pending, softmax_step, &empty_queue);
}

/* Computes P of the item's rows [first_row, first_row + SCORE_ROWS) for the visible keys of a block. Their P V becomes
 * the pending product. While tile products of this S and of the pending P V run, their callbacks compute the
 * exponentials: a call of `overlap` computes one or two rows. Returns false if P was too large. Then the pending
 * product is done and only row_max has changed. */
V_INLINE bool attend_overlapped(const context *c, const score_context *ctx, item_state *state, int64_t first_query,
                                int64_t first_row, const packed_key_block *block, void (*overlap)(void *, int))
{
    _Alignas(64) float s[RING_SIZE][STRIP * STRIP], sums[SCORE_ROWS / 4 * VW] = {0};
    const int64_t i0 = first_query + first_row;
    const attention_span key_range =
        attention_round_to_strips(attention_visible_keys_of_rows(&c->p->sizes, &ctx->sequence, i0, i0 + SCORE_ROWS),
                                  block->first, c->layout.keys);
    if (key_range.first == key_range.end)
        return true;
    const bool all_visible = all_keys_visible(ctx, i0, SCORE_ROWS, block->first, key_range);
    const int64_t n = key_range.end - key_range.first, result_tiles = n / STRIP * RESULT_TILES_DOWN;
    mt *prob = prob_buffer(state) + mt_offset(SCORE_ROWS, 0, key_range.first);
    pending_product *pending = &state->pending;
    softmax_result_tile ring[RING_SIZE];
    const float exp_scale = scores_exp_scale(c->p);
    softmax_queue queue = {.ring = ring, .exp_scale = v_set1(exp_scale)};
    for (int64_t result_tile = 0, ring_slot = 0, due = 0; result_tile < result_tiles;
         result_tile++, ring_slot = (ring_slot + 1) % RING_SIZE) {
        const int64_t j = result_tile / RESULT_TILES_DOWN * STRIP, i = result_tile % RESULT_TILES_DOWN * STRIP;
        mt_product_result_tile(c->layout.qk_size, 1, state->q + mt_offset(c->layout.rows, first_row + i, 0),
                               c->layout.rows, block->kt + mt_offset(c->layout.qk_size, 0, key_range.first + j),
                               s[ring_slot], /*add=*/false, /*all_terms=*/true, overlap, &queue);
        const attention_span keys = {key_range.first + j, key_range.first + j + STRIP};
        if (!all_visible && !all_keys_visible(ctx, i0 + i, STRIP, block->first, keys))
            apply_mask(ctx, s[ring_slot], STRIP, i0 + i, STRIP, block->first + keys.first, (attention_span){0, STRIP});
        if (!state->row_max_set[(first_row + i) / STRIP])
            state->row_max_set[(first_row + i) / STRIP] =
                set_row_max(s[ring_slot], exp_scale, state->row_max + first_row + i);
        ring[ring_slot] = (softmax_result_tile){s[ring_slot], state->row_max + first_row + i,
                                                prob + mt_offset(SCORE_ROWS, i, j), sums + i / 4 * VW};
        queue.count++;
        /* Spreads the pending result tiles evenly over the result tiles of this score tile. */
        for (due += pending->result_tiles; due >= result_tiles; due -= result_tiles)
            accumulate_result_tile(c, pending, overlap, &queue);
        if (queue.count == RING_SIZE - 1)
            drain_softmax(&queue, RING_SIZE - 2);
    }
    drain_softmax(&queue, 0);
    *pending = (pending_product){.result_tiles = 0};
    float block_sum[SCORE_ROWS];
    bool too_large = false;
    for (int64_t r = 0; r < SCORE_ROWS; r++) {
        const float *lanes = sums + r / 4 * VW + r % 4;
        block_sum[r] = lanes[0];
        for (int64_t i = 4; i < VW; i += 4)
            block_sum[r] += lanes[i];
        too_large |= !(block_sum[r] <= MAX_BLOCK_SUM);
    }
    if (too_large)
        return false;
    for (int64_t r = 0; r < SCORE_ROWS; r++)
        state->row_sum[first_row + r] += block_sum[r];
    *pending = (pending_product){.prob = prob,
                                 .v = block->v + mt_offset(c->layout.keys, key_range.first, 0),
                                 .out = state->out + mt_offset(c->layout.rows, first_row, 0),
                                 .keys = n,
                                 .result_tiles = c->layout.v_size / STRIP * RESULT_TILES_DOWN,
                                 .accumulate = state->out_initialized[first_row / STRIP]};
    state->out_initialized[first_row / STRIP] = state->out_initialized[first_row / STRIP + 1] = true;
    state->prob_index = 1 - state->prob_index;
    return true;
}

#endif

/* Attends SCORE_ROWS queries to a block of at most SCORE_COLUMNS keys, with running maxima and separate passes. With
 * float32 operands (MT_SAME_FORM) it works on STRIP queries at a time in two cases. A mask edge crosses the score tile:
 * then fewer masked scores are computed. Only one of the two strips has a value in out: a product either sets out or
 * adds to it. With AMX the shorter products cost more than that saves. */
static void attend_running_max(const context *c, const score_context *ctx, item_state *state, int64_t first_query,
                               int64_t first_row, const packed_key_block *block)
{
    const attention_sizes *sizes = &c->p->sizes;
    const int64_t i = first_query + first_row;
    const attention_span key_range = attention_round_to_strips(
        attention_visible_keys_of_rows(sizes, &ctx->sequence, i, i + SCORE_ROWS), block->first, SCORE_COLUMNS);
    if (key_range.first == key_range.end)
        return;
    const bool all_visible = all_keys_visible(ctx, i, SCORE_ROWS, block->first, key_range);
    if (!MT_SAME_FORM ||
        (all_visible && state->out_initialized[first_row / STRIP] == state->out_initialized[first_row / STRIP + 1])) {
        attend_rows(c, ctx, state, first_query, first_row, SCORE_ROWS, block, key_range, all_visible);
        return;
    }
    for (int64_t r = 0; r < SCORE_ROWS; r += STRIP) {
        const attention_span visible_range = attention_round_to_strips(
            attention_visible_keys_of_rows(sizes, &ctx->sequence, i + r, i + r + STRIP), block->first, SCORE_COLUMNS);
        if (visible_range.first < visible_range.end)
            attend_rows(c, ctx, state, first_query, first_row + r, STRIP, block, visible_range,
                        all_keys_visible(ctx, i + r, STRIP, block->first, visible_range));
    }
}

static void attend_key_block(const context *c, const score_context *ctx, item_state *state, int64_t first_query,
                             const packed_key_block *block)
{
    for (int64_t first_row = 0; first_row < c->layout.rows; first_row += SCORE_ROWS) {
#if defined(COT_MATMUL_AMX)
        if (!ctx->modified &&
            (c->layout.qk_size + c->layout.v_size >= 8 * PANEL
                 ? attend_overlapped(c, ctx, state, first_query, first_row, block, softmax_step)
                 : attend_overlapped(c, ctx, state, first_query, first_row, block, softmax_step_two_rows)))
            continue;
#endif
        /* In sub-blocks of SCORE_COLUMNS keys, because the score buffer holds no more. */
        for (int64_t key = 0; key < c->layout.keys; key += SCORE_COLUMNS) {
            const packed_key_block sub_block = {block->first + key, block->kt + mt_offset(c->layout.qk_size, 0, key),
                                                block->v + mt_offset(c->layout.keys, key, 0)};
            attend_running_max(c, ctx, state, first_query, first_row, &sub_block);
        }
    }
}

static void store_query_block(const context *c, item_state *state, const attention_block *queries, int64_t h,
                              float sink)
{
    const attention_problem *p = c->p;
    float inverse[MAX_ITEM_QUERIES], lse[MAX_ITEM_QUERIES];
    for (int64_t r = 0; r < queries->rows; r++) {
        const bool has_sum = r < queries->used && state->row_sum[r] != 0; /* true if the sum is NaN */
        inverse[r] = has_sum ? 1 / state->row_sum[r] : 0;
        const bool max_is_sink =
            state->row_max[r] == sink * EXP_SCALE; /* then lse is exactly the sink if no key is visible */
        lse[r] = has_sum ? (max_is_sink ? sink : state->row_max[r] / EXP_SCALE) + logf(state->row_sum[r]) : -INFINITY;
        if (cot_is_present(&p->lse))
            ((float *)p->lse.data)[attention_lse_offset(&p->lse, queries->sequence.b, h,
                                                        queries->sequence.q_row + queries->first + r)] = lse[r];
        /* No iteration if out has a value and the row a sum. Otherwise out is cleared, because 0 times NaN is NaN. */
        for (int64_t n = 0; (!state->out_initialized[r / STRIP] || !has_sum) && n < c->layout.v_size; n += PANEL)
            memset(state->out + mt_offset(c->layout.rows, r, n), 0, PANEL * sizeof(float));
    }
    if (cot_is_present(&p->out))
        store_rows(&p->out, queries->sequence.b, queries->sequence.q_row + queries->first, h, queries->rows,
                   p->sizes.d_v, state->out, c->layout.rows, /*row_factors=*/inverse, /*factor=*/0,
                   /*accumulate=*/false);
}

static void attend_query_block(const context *c, const attention_block *queries, int64_t h, const packed_keys *packed,
                               item_state *state)
{
    const attention_problem *p = c->p;
    const score_context ctx = make_score_context(p, &queries->sequence, h);
    const float sink = cot_is_present(&p->sink) && queries->sequence.b < p->sizes.B
                           ? (float)cot_load_f64(p->sink.data, p->sink.dtype, h * p->sink.stride[0])
                           : -INFINITY;
    mt_state host_tiles;
    memset(state->out_initialized, 0, sizeof state->out_initialized);
    memset(state->row_max_set, 0, sizeof state->row_max_set);
    state->pending = (pending_product){.result_tiles = 0};
    state->prob_index = 0;
    for (int64_t r = 0; r < MAX_ITEM_QUERIES; r++) {
        state->row_max[r] = sink != -INFINITY ? sink * EXP_SCALE : -FLT_MAX;
        /* exp(sink - row_max): 1, or NaN for an infinite sink. */
        state->row_sum[r] = sink != -INFINITY ? 1 + (sink - sink) : 0;
    }
    for (int64_t r = 0; r < c->layout.rows; r += STRIP) {
        load_rows(state->staging, c->layout.qk_size, &p->q, queries->sequence.b,
                  queries->sequence.q_row + queries->first + r, h, cot_clamp(queries->used - r, 0, STRIP),
                  p->sizes.d_qk);
        pack_a(state->q, c->layout.rows, r, state->staging, c->layout.qk_size);
    }
    const attention_span keys =
        attention_visible_keys_of_rows(&p->sizes, &queries->sequence, queries->first, queries->first + c->layout.rows);
    mt_begin(&host_tiles);
    for (int64_t i = keys.first / c->layout.keys; i * c->layout.keys < keys.end; i++) {
        const int64_t row_offset = i * packed->rows_to_next_block;
        const packed_key_block block = {i * c->layout.keys, packed->kt + row_offset * c->layout.qk_size,
                                        packed->v + row_offset * c->layout.v_size};
        attend_key_block(c, &ctx, state, queries->first, &block);
    }
#if defined(COT_MATMUL_AMX)
    finish_pending(c, &state->pending);
#endif
    mt_end(&host_tiles);
    store_query_block(c, state, queries, h, sink);
}

static void attend_item(void *argument, int64_t item, void *scratch)
{
    const context *c = argument;
    const attention_axis axis = attention_query_axis(c->p, c->layout.rows);
    const int64_t h = item / c->layout.q_slots, hkv = h / (c->p->sizes.H / c->p->sizes.Hkv);
    /* Under a causal mask the last queries attend to the most keys. They go first, so that no thread ends with a long
     * item. */
    const attention_block queries = attention_block_at(&axis, c->layout.q_slots - 1 - item % c->layout.q_slots);
    if (queries.rows == 0 || is_private(c, queries.sequence.b, hkv))
        return;
    const packed_keys keys = packed_keys_of(c, queries.sequence.b, hkv);
    attend_query_block(c, &queries, h, &keys, scratch);
}

/* Processes private groups one after the other. They are packed at the same place, so that the operands stay in the
 * L2 cache. */
static void attend_private_groups(void *argument, int64_t thread, void *scratch)
{
    const context *c = argument;
    const attention_sizes *sizes = &c->p->sizes;
    const attention_axis axis_k = {.p = c->p, .along_keys = true, .block_size = c->layout.keys},
                         axis_q = {.p = c->p, .along_keys = false, .block_size = c->layout.rows};
    const int64_t group_heads = sizes->H / sizes->Hkv, blocks = c->layout.k_slots / sizes->B,
                  items = c->layout.q_slots / sizes->B;
    const packed_keys keys = packed_keys_at(c, thread * blocks, 1);
    for (int64_t group; (group = atomic_fetch_add(c->next_group, 1)) < c->private_groups;) {
        const int64_t b = group / sizes->Hkv, hkv = group % sizes->Hkv;
        for (int64_t i = b * blocks; i < (b + 1) * blocks; i++) {
            const attention_block block = attention_block_at(&axis_k, i);
            pack_block(c, &block, hkv, &keys, scratch);
        }
        for (int64_t h = hkv * group_heads; h < (hkv + 1) * group_heads; h++)
            for (int64_t i = b * items; i < (b + 1) * items; i++) {
                const attention_block queries = attention_block_at(&axis_q, i);
                attend_query_block(c, &queries, h, &keys, scratch);
            }
    }
}

/* If all sequences have the same length and there are at least two groups per thread, each thread processes whole
 * groups alone (attend_private_groups). All threads share the remaining groups. These are packed first, then their
 * items are distributed. With two or three groups per thread, one more group per thread is shared. Otherwise threads
 * would wait long for the last group. Sequences of different lengths are always shared, because one of them may be as
 * long as all others together. */
cot_status V_NAME(attention_fwd_tiled)(cot_queue *queue, const void *problem, void *workspace)
{
    _Atomic int64_t next_group = 0;
    context c = {.p = problem, .next_group = &next_group};
    const attention_sizes *sizes = &c.p->sizes;
    c.layout = *(const attention_fwd_layout *)queue->plan;
    c.kt = (mt *)((char *)workspace + c.layout.kt);
    c.v = (mt *)((char *)workspace + c.layout.v);
    const bool equal_lengths = !sizes->packed && !cot_is_present(&c.p->seqused_k) && !cot_is_present(&c.p->seqused_q);
    const int64_t groups = sizes->B * sizes->Hkv, threads = cot_queue_threads(queue);
    const int64_t rounds = groups / threads;
    if (equal_lengths && rounds >= 2) {
        c.private_groups = (rounds < 4 ? rounds - 1 : rounds) * threads;
        cot_run_items_scratch(queue, threads, attend_private_groups, &c);
    }
    cot_run_items_scratch(queue, c.layout.k_slots * sizes->Hkv, pack_item, &c);
    cot_run_items_scratch(queue, c.layout.q_slots * sizes->H, attend_item, &c);
    return COT_OK;
}
