/* SPDX-License-Identifier: Apache-2.0
 * attention_bwd_overlapped.h: the backward's elementwise arithmetic overlapped with its products. For AMX operands that
 * are split into two or three bf16.
 *
 * One call processes a score tile: SCORE_ROWS keys and a query block. The elementwise arithmetic, P^T and dS^T, runs
 * between tile products: two keys of a result tile (32 keys x 32 queries) per k-step. The tile products are those of
 * the next result tiles of S^T and dP^T, and those of dv, dk and dq of the previous score tile, which are pending until
 * then.
 *
 * With split operands the products take long enough to hide all of the arithmetic, although it is more expensive there:
 * P and dS are split, too. Products of one bf16 take too little time to hide it, so they use the separate passes of
 * attention_bwd_score_block.h, which are as fast. */
#ifndef COT_ATTENTION_BWD_OVERLAPPED_H
#define COT_ATTENTION_BWD_OVERLAPPED_H

#include "attention_bwd_score_block.h"

enum {
    RING_SIZE = 4, /* result tiles that wait for their exponentials, plus those that the products write */
    MAX_PENDING = (2 * SCORE_ROWS + BLOCK) / STRIP * ATTENTION_MAX_D / STRIP,
};

/* A result tile of dv, dk or dq that is not yet accumulated: c += a b, or c = a b. */
typedef struct pending_result_tile {
    const mt *a, *b;
    float *c;
    int64_t a_rows, n;
    bool accumulate;
} pending_result_tile;

typedef struct pending_products {
    pending_result_tile result_tiles[MAX_PENDING];
    int64_t count, done;
} pending_products;

/* A result tile of S^T and dP^T whose P^T and dS^T are not yet computed. */
typedef struct score_result_tile {
    const float *s, *dp, *lse, *delta;
    mt *prob, *ds, *ds_b;
} score_result_tile;

/* The waiting result tiles in a ring. `current` is the oldest result tile, of which rows_left rows remain. The other
 * `count` result tiles follow: the first of them is ring[next]. */
typedef struct score_queue {
    const score_result_tile *ring;
    int64_t next, count;
    score_result_tile current;
    int64_t rows_left;
    vf exp_scale;
    vf prob[2];                               /* P^T of the current key */
    vf ds[2];                                 /* dS^T of the even key of a pair, until the odd one is ready */
    bool step_has_rows;                       /* rows_left > 0 at step 0 of this k-step */
    mt_prefetch_range *prefetch, *prefetch_2; /* ranges to prefetch meanwhile, one after the other */
} score_queue;

V_INLINE void compute_prob_row(score_queue *queue)
{
    V_UNROLL
    for (int m = 0; m < 2; m++)
        queue->prob[m] =
            exp_scores(v_load(queue->current.s + m * VW), queue->exp_scale, v_load(queue->current.lse + m * VW));
    mt_store_a2(queue->current.prob, queue->prob[0], queue->prob[1]);
    queue->current.s += PANEL;
    queue->current.prob += PANEL;
}

V_INLINE void compute_ds_row(score_queue *queue, vf ds[2])
{
    V_UNROLL
    for (int m = 0; m < 2; m++)
        ds[m] = v_mul(queue->prob[m], v_sub(v_load(queue->current.dp + m * VW), v_load(queue->current.delta + m * VW)));
    mt_store_a2(queue->current.ds, ds[0], ds[1]);
    queue->current.dp += PANEL;
    queue->current.ds += PANEL;
}

/* Four steps process two keys. */
V_INLINE void compute_p_and_ds_of_step(score_queue *queue, int step)
{
    if (step % 2 == 0) {
        compute_prob_row(queue);
    } else if (step == 1) {
        compute_ds_row(queue, queue->ds);
    } else {
        vf odd[2];
        compute_ds_row(queue, odd);
        V_UNROLL
        for (int m = 0; m < 2; m++)
            mt_store_b(queue->current.ds_b, SCORE_ROWS, 0, m * VW, queue->ds[m], odd[m]);
        queue->current.ds_b += 2 * PANEL;
        queue->rows_left -= 2;
    }
}

V_INLINE void start_next_result_tile(score_queue *queue)
{
    queue->current = queue->ring[queue->next];
    queue->next = (queue->next + 1) % RING_SIZE;
    queue->rows_left = STRIP;
    queue->count--;
}

/* Callback of mt_product_result_tile, which calls it four times per k-step, with `step` = 0 to 3. */
V_INLINE void overlap_step(void *argument, int step)
{
    score_queue *queue = argument;
    for (size_t line = 0; line < COT_MATMUL_SPLIT; line++)
        mt_prefetch_next(queue->prefetch->next < queue->prefetch->end ? queue->prefetch : queue->prefetch_2);
    if (step == 0) {
        if (queue->rows_left == 0 && queue->count > 0)
            start_next_result_tile(queue);
        queue->step_has_rows = queue->rows_left > 0;
    }
    if (queue->step_has_rows)
        compute_p_and_ds_of_step(queue, step);
}

/* Finishes the current result tile, and further ones until at most max_waiting result tiles wait. */
V_INLINE void drain_scores(score_queue *queue, int64_t max_waiting)
{
    for (;;) {
        while (queue->rows_left > 0)
            for (int step = 0; step < 4; step++)
                compute_p_and_ds_of_step(queue, step);
        if (queue->count <= max_waiting)
            return;
        start_next_result_tile(queue);
    }
}

V_INLINE void run_pending(pending_products *pending, score_queue *queue)
{
    const pending_result_tile *result_tile = &pending->result_tiles[pending->done++];
    mt_product_result_tile(result_tile->n, 1, result_tile->a, result_tile->a_rows, result_tile->b, result_tile->c,
                           result_tile->accumulate, /*all_terms=*/false, overlap_step, queue);
}

static void finish_pending(pending_products *pending)
{
    mt_prefetch_range no_prefetch = {NULL, NULL};
    score_queue queue = {.prefetch = &no_prefetch, .prefetch_2 = &no_prefetch};
    while (pending->done < pending->count)
        run_pending(pending, &queue);
    pending->count = pending->done = 0;
}

/* For each strip of the SCORE_ROWS keys, the range of queries that attend to it, and for each strip of queries the
 * range of keys that it attends to, both in whole strips. result_tiles: how many result tiles these ranges have. */
typedef struct visible_strips {
    attention_span queries[SCORE_ROWS / STRIP], keys[BLOCK / STRIP];
    int64_t result_tiles;
} visible_strips;

static visible_strips visible_strips_of(const context *c, const score_context *ctx, int64_t first_key,
                                        int64_t first_query)
{
    visible_strips visible = {.result_tiles = 0};
    for (int64_t i = 0; i < BLOCK / STRIP; i++)
        visible.keys[i] = (attention_span){SCORE_ROWS, 0};
    for (int64_t r = 0; r < SCORE_ROWS; r += STRIP) {
        const attention_span rows =
            attention_visible_queries_of_rows(&c->p->sizes, &ctx->sequence, first_key + r, first_key + r + STRIP);
        const attention_span query_range = visible.queries[r / STRIP] =
            attention_round_to_strips(rows, first_query, BLOCK);
        for (int64_t i = query_range.first / STRIP; i < query_range.end / STRIP; i++, visible.result_tiles++) {
            visible.keys[i].first = visible.keys[i].first < r ? visible.keys[i].first : r;
            visible.keys[i].end = r + STRIP;
        }
    }
    return visible;
}

/* Queues the products of rows [first_row, first_row + SCORE_ROWS) of the key block. dv and dk go column panel by
 * column panel, because the strips of keys share a panel of B. dq^T goes by two rows of result tiles. */
static void queue_products(const context *c, const score_block *b, const score_tile_buffers *buffers,
                           const visible_strips *visible, int64_t first_row, pending_products *pending)
{
    const int64_t qk_size = c->layout.qk_size, v_size = c->layout.v_size,
                  buffer_offset = buffers->buffer * SCORE_ROWS * BLOCK;
    const mt *prob = buffers->prob + buffer_offset, *ds = buffers->ds + buffer_offset,
             *ds_b = buffers->ds_b + buffer_offset;
    for (int64_t n = 0; n < v_size + qk_size; n += STRIP)
        for (int64_t r = 0; r < SCORE_ROWS; r += STRIP) {
            const attention_span span = visible->queries[r / STRIP];
            const mt *rows = n < v_size ? prob : ds, *columns = n < v_size ? b->q.dout : b->q.q;
            float *c_panel = n < v_size ? b->dv : b->dk;
            const int64_t column = n < v_size ? n : n - v_size;
            if (span.first < span.end)
                pending->result_tiles[pending->count++] =
                    (pending_result_tile){.a = rows + mt_offset(SCORE_ROWS, r, span.first),
                                          .a_rows = SCORE_ROWS,
                                          .b = columns + mt_offset(BLOCK, span.first, column),
                                          .c = c_panel + mt_offset(BLOCK, first_row + r, column),
                                          .n = span.end - span.first,
                                          .accumulate = b->dkv_initialized[(first_row + r) / STRIP]};
        }
    for (int64_t first_of_two = 0; first_of_two < qk_size; first_of_two += 2 * STRIP)
        for (int64_t i = 0; i < BLOCK; i += STRIP) {
            const attention_span span = visible->keys[i / STRIP];
            for (int64_t row = first_of_two; span.first < span.end && row < first_of_two + 2 * STRIP && row < qk_size;
                 row += STRIP)
                pending->result_tiles[pending->count++] =
                    (pending_result_tile){.a = b->kt + mt_offset(qk_size, row, first_row + span.first),
                                          .a_rows = qk_size,
                                          .b = ds_b + mt_offset(SCORE_ROWS, span.first, i),
                                          .c = b->dq + mt_offset(qk_size, row, i),
                                          .n = span.end - span.first,
                                          .accumulate = b->dq_initialized[i / STRIP]};
        }
    for (int64_t r = 0; r < SCORE_ROWS / STRIP; r++)
        b->dkv_initialized[first_row / STRIP + r] |= visible->queries[r].first < visible->queries[r].end;
    for (int64_t i = 0; i < BLOCK / STRIP; i++)
        b->dq_initialized[i] |= visible->keys[i].first < visible->keys[i].end;
}

/* Sets masked scores to -inf in s[STRIP][STRIP]. Row 0 is key first_key, column 0 is query first_query. */
static void apply_mask(const score_context *ctx, float *s, int64_t first_key, int64_t first_query)
{
    for (int64_t r = 0; r < STRIP; r++) {
        const attention_span queries = visible_queries(ctx, first_key + r);
        for (int64_t c = 0; c < STRIP; c += VW)
            v_store(s + r * PANEL + c, mask_scores(v_load(s + r * PANEL + c), queries.first - first_query - c,
                                                   queries.end - first_query - c));
    }
}

/* Computes P^T and dS^T of rows [first_row, first_row + SCORE_ROWS) of the key block for the query block,
 * while it runs the pending products. The products of these keys become pending. */
static void backward_score_block_overlapped(const context *c, const score_context *ctx, const score_block *b,
                                            score_tile_buffers *buffers, pending_products *pending, int64_t first_row)
{
    /* Result tiles of S^T and dP^T lie in the buffers that backward_score_block uses for whole score tiles. */
    float(*const s)[STRIP * STRIP] = (float(*)[STRIP * STRIP]) buffers->scores;
    float(*const dp)[STRIP * STRIP] = (float(*)[STRIP * STRIP]) buffers->dp;
    const int64_t qk_size = c->layout.qk_size, v_size = c->layout.v_size, first_key = b->first_key + first_row;
    const visible_strips visible = visible_strips_of(c, ctx, first_key, b->first_query);
    if (visible.result_tiles == 0)
        return;
    buffers->buffer = 1 - buffers->buffer;
    const int64_t buffer_offset = buffers->buffer * SCORE_ROWS * BLOCK;
    score_result_tile ring[RING_SIZE];
    score_queue queue = {.ring = ring,
                         .exp_scale = v_set1(scores_exp_scale(c->p)),
                         .prefetch = b->forms_prefetch,
                         .prefetch_2 = b->dq_prefetch};
    int64_t ring_slot = 0, due = 0;
    for (int64_t i = 0; i < BLOCK; i += STRIP) {
        const attention_span keys = visible.keys[i / STRIP], queries = {i, i + STRIP};
        const int64_t n = keys.end > keys.first ? (keys.end - keys.first) / STRIP : 0;
        if (queue.count + (queue.rows_left > 0) + n > RING_SIZE)
            drain_scores(&queue, RING_SIZE - n);
        for (int64_t r = keys.first; r < keys.end; r += STRIP)
            mt_product_result_tile(qk_size, 1, b->k + mt_offset(BLOCK, first_row + r, 0), BLOCK,
                                   b->q.q_t + mt_offset(qk_size, 0, i),
                                   s[(ring_slot + (r - keys.first) / STRIP) % RING_SIZE], /*add=*/false,
                                   /*all_terms=*/false, overlap_step, &queue);
        for (int64_t r = keys.first; r < keys.end; r += STRIP, ring_slot = (ring_slot + 1) % RING_SIZE) {
            mt_product_result_tile(v_size, 1, b->v + mt_offset(BLOCK, first_row + r, 0), BLOCK,
                                   b->q.dout_t + mt_offset(v_size, 0, i), dp[ring_slot], /*add=*/false,
                                   /*all_terms=*/true, overlap_step, &queue);
            if (!all_visible(ctx, first_key + r, STRIP, b->first_query, queries))
                apply_mask(ctx, s[ring_slot], first_key + r, b->first_query + i);
            const int64_t offset = buffer_offset + mt_offset(SCORE_ROWS, r, i);
            ring[ring_slot] = (score_result_tile){s[ring_slot],          dp[ring_slot],          b->lse + i,
                                                  b->delta + i,          buffers->prob + offset, buffers->ds + offset,
                                                  buffers->ds_b + offset};
            queue.count++;
        }
        /* Spreads the pending result tiles evenly over the result tiles of this score tile. */
        for (due += n * pending->count; due >= visible.result_tiles; due -= visible.result_tiles)
            run_pending(pending, &queue);
    }
    drain_scores(&queue, 0);
    pending->count = pending->done = 0;
    queue_products(c, b, buffers, &visible, first_row, pending);
}

#endif
