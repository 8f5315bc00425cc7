/* SPDX-License-Identifier: Apache-2.0
 *
 * attention_bwd_tiled.c: dq, dk and dv in tiles, by the products of simd/matmul.h. Scores are transposed: a row is a
 * key, and the lanes of a vector are queries. P^T and dS^T then have the layout in which the products for dv and dk
 * read them:
 *
 *     S^T = K Q^T;  dP^T = V dout^T;  P^T = exp(scale S^T - lse);  dS^T = P^T (dP^T - delta)
 *     dv += P^T dout;  dk += dS^T q;  dq^T += K^T dS^T
 *
 * attention_bwd_score_block.h does this for a key block and a query block. attention_bwd_overlapped.h does it for
 * AMX products of two and three bf16, with the elementwise arithmetic overlapped with the products.
 *
 * Passes:
 * (1) Every query block is packed once, in each operand layout that the five products read (A form, B form:
 * simd/matmul.h), with its lse and delta.
 * (2) An item is one chunk of the key blocks of one sequence and key-value head. It processes a few key blocks at a
 * time: it packs them, loops over the query blocks that attend to them, accumulates their dk and dv, and adds to the
 * chunk's own dq^T.
 * (3) dq is the sum over the chunks, in their order. The number of chunks depends on the shape alone.
 * (4) dbias, one tile at a time (attention_bwd_dbias.h), and dsink.
 *
 * attention_fwd_tiled.c explains the names of simd/simd.h and simd/matmul.h: mt, PANEL, MT_SAME_FORM, the A and B
 * forms. */
#include "attention_bwd_dbias.h"
#include "attention_bwd_score_block.h"
#if defined(COT_MATMUL_SPLIT)
#include "attention_bwd_overlapped.h"
#endif

cot_status V_NAME(attention_bwd_tiled)(cot_queue *, const void *, void *);

/* Key blocks that stay in the L2 cache, with their dk and dv, while the item reads all queries. With AMX, the other
 * operands need more of the cache. With four key blocks a backward took 2.5 % to 17 % longer, most at d = 256. */
enum { L2_KEY_BLOCKS = MT_SAME_FORM ? ATTENTION_L2_KEY_BLOCKS : ATTENTION_L2_KEY_BLOCKS / 2 };

/* ---- one item ------------------------------------------------------------------------------------------------- */

/* The key blocks visible to a query block. */
static attention_span visible_key_blocks(const attention_problem *p, const attention_sequence *s, int64_t query_block)
{
    const attention_span keys =
        attention_visible_keys_of_rows(&p->sizes, s, query_block * BLOCK, (query_block + 1) * BLOCK);
    if (keys.first >= keys.end)
        return (attention_span){0, 0};
    return (attention_span){keys.first / BLOCK, cot_ceil_div(keys.end, BLOCK)};
}

static void store_dk_dv(const context *c, const attention_sequence *s, int64_t hkv, int64_t key_block, float *dk,
                        float *dv, const bool *initialized)
{
    const attention_problem *p = c->p;
    const int64_t rows = cot_clamp(s->k_rows - key_block * BLOCK, 0, BLOCK), row = s->k_row + key_block * BLOCK;
    for (int64_t strip = 0; strip < BLOCK / STRIP; strip++) {
        if (initialized[strip])
            continue;
        for (int64_t n = 0; n < c->layout.qk_size; n += PANEL)
            memset(dk + mt_offset(BLOCK, strip * STRIP, n), 0, STRIP * PANEL * sizeof(float));
        for (int64_t n = 0; n < c->layout.v_size; n += PANEL)
            memset(dv + mt_offset(BLOCK, strip * STRIP, n), 0, STRIP * PANEL * sizeof(float));
    }
    /* Keys from used_k on get gradients of 0. Their weights are 0, but the products multiply dout and q by them, and 0
     * times a NaN or an infinity is NaN. */
    for (int64_t r = cot_clamp(s->used_k - key_block * BLOCK, 0, rows); r < rows; r++) {
        for (int64_t n = 0; n < c->layout.qk_size; n += PANEL)
            memset(dk + mt_offset(BLOCK, r, n), 0, PANEL * sizeof(float));
        for (int64_t n = 0; n < c->layout.v_size; n += PANEL)
            memset(dv + mt_offset(BLOCK, r, n), 0, PANEL * sizeof(float));
    }
    if (cot_is_present(&p->dk))
        store_rows(&p->dk, s->b, row, hkv, rows, p->sizes.d_qk, dk, BLOCK, NULL, (float)p->sizes.scale, p->accumulate);
    if (cot_is_present(&p->dv))
        store_rows(&p->dv, s->b, row, hkv, rows, p->sizes.d_v, dv, BLOCK, NULL, 1, p->accumulate);
}

/* The keys of one step of an item: up to L2_KEY_BLOCKS key blocks [first, end) of one sequence and key-value head. */
typedef struct item_keys {
    attention_sequence sequence;
    int64_t chunk, hkv, first, end;
    attention_span key_blocks; /* all key blocks of the chunk */
    mt *k, *kt, *v;            /* each L2_KEY_BLOCKS key blocks, as dk and dv */
    float *dk, *dv;
    bool dkv_initialized[L2_KEY_BLOCKS][BLOCK / STRIP];
#if defined(COT_MATMUL_SPLIT)
    pending_products pending;
#endif
} item_keys;

/* Differentiates a query block with all key blocks of `keys`, because its operands and its dq then are loaded once for
 * all of them. last: no query block of this head follows, so nothing is prefetched. */
static void backward_query_block(const context *c, item_keys *keys, const score_context *ctx, int64_t query_block,
                                 bool last, score_tile_buffers *buffers)
{
    const attention_problem *p = c->p;
    const attention_axis queries = attention_query_axis(p, BLOCK);
    const int64_t q_row =
        ((attention_first_slot(&queries, keys->sequence.b) + query_block) * p->sizes.H + ctx->h) * BLOCK;
    const attention_span visible = visible_key_blocks(p, &keys->sequence, query_block);
    float *dq = c->dq + (keys->chunk * c->layout.q_slots * p->sizes.H * BLOCK + q_row) * c->layout.qk_size;
    mt_prefetch_range forms_prefetch = {NULL, NULL}, dq_prefetch = {NULL, NULL};
    if (!last) {
        forms_prefetch.next = (const char *)query_forms_at(c, q_row / BLOCK + p->sizes.H).q_t;
        forms_prefetch.end = forms_prefetch.next + c->layout.query_block_elements * (int64_t)sizeof(mt);
        dq_prefetch.next = (const char *)(dq + p->sizes.H * BLOCK * c->layout.qk_size);
        dq_prefetch.end = dq_prefetch.next + BLOCK * c->layout.qk_size * (int64_t)sizeof(float);
    }
    const attention_span key_blocks = {cot_max(keys->first, visible.first), cot_min(keys->end, visible.end)};
    if (key_blocks.first >= key_blocks.end)
        return;
    /* An earlier step of the item has initialized dq if the chunk has earlier key blocks that the queries attend to. */
    bool dq_initialized[BLOCK / STRIP];
    for (int64_t i = 0; i < BLOCK / STRIP; i++)
        dq_initialized[i] = key_blocks.first > keys->key_blocks.first && key_blocks.first > visible.first;
    for (int64_t key_block = key_blocks.first; key_block < key_blocks.end; key_block++) {
        const int64_t k_row = (key_block - keys->first) * BLOCK;
        const score_block b = {
            .first_key = key_block * BLOCK,
            .first_query = query_block * BLOCK,
            .q = query_forms_at(c, q_row / BLOCK),
            .k = keys->k + k_row * c->layout.qk_size,
            .kt = keys->kt + k_row * c->layout.qk_size,
            .v = keys->v + k_row * c->layout.v_size,
            .lse = c->lse + q_row,
            .delta = c->delta + q_row,
            .dq = dq,
            .dk = keys->dk + k_row * c->layout.qk_size,
            .dv = keys->dv + k_row * c->layout.v_size,
            .dq_initialized = dq_initialized,
            .dkv_initialized = keys->dkv_initialized[key_block - keys->first],
            .forms_prefetch = &forms_prefetch,
            .dq_prefetch = &dq_prefetch,
        };
#if defined(COT_MATMUL_SPLIT)
        if (!ctx->modified) {
            for (int64_t first_row = 0; first_row < BLOCK; first_row += SCORE_ROWS)
                backward_score_block_overlapped(c, ctx, &b, buffers, &keys->pending, first_row);
            continue;
        }
#endif
        backward_score_block(c, ctx, &b, buffers);
    }
    for (int64_t i = 0; i < BLOCK / STRIP; i++)
        if (!dq_initialized[i])
            memset(dq + mt_offset(c->layout.qk_size, 0, i * STRIP), 0, (size_t)c->layout.qk_size * STRIP * sizeof *dq);
}

static void backward_item(void *argument, int64_t item, void *scratch)
{
    const context *c = argument;
    const attention_problem *p = c->p;
    const attention_sizes *sizes = &p->sizes;
    const int64_t group = sizes->H / sizes->Hkv, b = item / c->layout.chunks / sizes->Hkv;
    item_keys keys = {.sequence = attention_sequence_at(p, b),
                      .chunk = item % c->layout.chunks,
                      .hkv = item / c->layout.chunks % sizes->Hkv};
    keys.key_blocks = attention_chunk_blocks(keys.chunk, c->layout.chunks, cot_ceil_div(keys.sequence.k_rows, BLOCK));
    keys.k = c->keys + item * c->layout.key_block_elements;
    keys.kt = keys.k + L2_KEY_BLOCKS * BLOCK * c->layout.qk_size;
    keys.v = keys.kt + L2_KEY_BLOCKS * BLOCK * c->layout.qk_size;
    keys.dk = c->dk + item * L2_KEY_BLOCKS * BLOCK * (c->layout.qk_size + c->layout.v_size);
    keys.dv = keys.dk + L2_KEY_BLOCKS * BLOCK * c->layout.qk_size;
    score_tile_buffers *const buffers = scratch;
    mt_state host_tiles;
    buffers->buffer = 0;
    mt_begin(&host_tiles);
    for (keys.first = keys.key_blocks.first; keys.first < keys.key_blocks.end; keys.first = keys.end) {
        keys.end = keys.first + L2_KEY_BLOCKS < keys.key_blocks.end ? keys.first + L2_KEY_BLOCKS : keys.key_blocks.end;
        memset(keys.dkv_initialized, 0, sizeof keys.dkv_initialized);
        for (int64_t key_block = keys.first; key_block < keys.end; key_block++) {
            const int64_t row = (key_block - keys.first) * BLOCK;
            pack_keys(c, &keys.sequence, keys.hkv, key_block * BLOCK, BLOCK, keys.k + row * c->layout.qk_size,
                      keys.kt + row * c->layout.qk_size, keys.v + row * c->layout.v_size, buffers->staging[0]);
        }
        const attention_span rows =
            attention_visible_queries_of_rows(sizes, &keys.sequence, keys.first * BLOCK, keys.end * BLOCK);
        for (int64_t h = keys.hkv * group; h < (keys.hkv + 1) * group; h++) {
            const score_context ctx = make_score_context(p, &keys.sequence, h);
            for (int64_t query_block = rows.first / BLOCK; query_block * BLOCK < rows.end; query_block++)
                backward_query_block(c, &keys, &ctx, query_block, (query_block + 1) * BLOCK >= rows.end, buffers);
        }
#if defined(COT_MATMUL_SPLIT)
        finish_pending(&keys.pending);
#endif
        for (int64_t key_block = keys.first; key_block < keys.end; key_block++)
            store_dk_dv(c, &keys.sequence, keys.hkv, key_block,
                        keys.dk + (key_block - keys.first) * BLOCK * c->layout.qk_size,
                        keys.dv + (key_block - keys.first) * BLOCK * c->layout.v_size,
                        keys.dkv_initialized[key_block - keys.first]);
    }
    mt_end(&host_tiles);
}

/* ---- dq --------------------------------------------------------------------------------------------------------- */

static void store_dq_item(void *argument, int64_t item, void *scratch)
{
    const context *c = argument;
    const attention_problem *p = c->p;
    const attention_axis axis = attention_query_axis(p, BLOCK);
    const int64_t h = item % p->sizes.H, qk_size = c->layout.qk_size;
    const attention_block query_block = attention_block_at(&axis, item / p->sizes.H);
    if (query_block.rows == 0)
        return;
    const attention_span visible = visible_key_blocks(p, &query_block.sequence, query_block.first / BLOCK);
    const int64_t key_blocks = cot_ceil_div(query_block.sequence.k_rows, BLOCK);
    float *const rows = scratch; /* [STRIP][qk_size] */
    for (int64_t r = 0; r < query_block.rows; r += STRIP) {
        memset(rows, 0, (size_t)(STRIP * qk_size) * sizeof *rows);
        for (int64_t chunk = 0; chunk < c->layout.chunks; chunk++) {
            const attention_span chunk_key_blocks = attention_chunk_blocks(chunk, c->layout.chunks, key_blocks);
            if (chunk_key_blocks.first >= visible.end || chunk_key_blocks.end <= visible.first ||
                chunk_key_blocks.first == chunk_key_blocks.end)
                continue;
            const float *dq = c->dq + (chunk * c->layout.q_slots * p->sizes.H + item) * BLOCK * qk_size;
            for (int64_t n = 0; n < qk_size; n += VW) {
                for (int64_t i = 0; i < STRIP; i += VW) {
                    vf v[VW];
                    for (int64_t k = 0; k < VW; k++)
                        v[k] = v_load(dq + panel_offset(qk_size, n + k, r + i));
                    mt_transpose(v);
                    for (int64_t k = 0; k < VW; k++) {
                        float *row = rows + panel_offset(STRIP, i + k, n);
                        v_store(row, v_add(v_load(row), v[k]));
                    }
                }
            }
        }
        /* Queries from used_q on get gradients of 0, for the same reason as in store_dk_dv. */
        for (int64_t i = cot_clamp(query_block.used - r, 0, STRIP); i < STRIP; i++)
            for (int64_t n = 0; n < qk_size; n += PANEL)
                memset(rows + mt_offset(STRIP, i, n), 0, PANEL * sizeof(float));
        store_rows(&p->dq, query_block.sequence.b, query_block.sequence.q_row + query_block.first + r, h,
                   cot_clamp(query_block.rows - r, 0, STRIP), p->sizes.d_qk, rows, STRIP, NULL, (float)p->sizes.scale,
                   p->accumulate);
    }
}

/* ---- dsink: summed in double, from the packed lse and delta ------------------------------------------------ */

static void dsink_item(void *argument, int64_t h)
{
    const context *c = argument;
    const attention_problem *p = c->p;
    const double exp_scale = lse_exp_scale(p);
    const float sink = (float)cot_load_f64(p->sink.data, p->sink.dtype, h * p->sink.stride[0]);
    const int64_t offset = h * p->dsink.stride[0];
    double sum = p->accumulate ? cot_load_f64(p->dsink.data, p->dsink.dtype, offset) : 0;
    const attention_axis axis = attention_query_axis(p, BLOCK);
    for (int64_t slot = 0; slot < c->layout.q_slots; slot++) {
        const attention_block query_block = attention_block_at(&axis, slot);
        const int64_t row = (slot * p->sizes.H + h) * BLOCK;
        for (int64_t i = 0; i < query_block.used; i++)
            sum -= (double)(expf(sink - (float)(c->lse[row + i] / exp_scale)) * c->delta[row + i]);
    }
    cot_store_f64(p->dsink.data, p->dsink.dtype, offset, sum);
}

cot_status V_NAME(attention_bwd_tiled)(cot_queue *queue, const void *problem, void *workspace)
{
    context c = {.p = problem};
    const attention_sizes *sizes = &c.p->sizes;
    const attention_bwd_layout layout = c.layout = *(const attention_bwd_layout *)queue->plan;
    char *base = workspace;
    c.queries = (mt *)(base + layout.queries);
    c.keys = (mt *)(base + layout.k);
    c.lse = (float *)(base + layout.lse), c.delta = (float *)(base + layout.delta);
    c.dq = (float *)(base + layout.dq), c.dk = (float *)(base + layout.dk);
    cot_run_items_scratch(queue, layout.q_slots * sizes->H, pack_queries_item, &c);
    cot_run_items_scratch(queue, attention_sequence_count(c.p) * sizes->Hkv * layout.chunks, backward_item, &c);
    if (cot_is_present(&c.p->dq))
        cot_run_items_scratch(queue, layout.q_slots * sizes->H, store_dq_item, &c);
    if (cot_is_present(&c.p->dsink))
        cot_run_items(queue, sizes->H, dsink_item, &c);
    if (cot_is_present(&c.p->dbias)) {
        const int64_t *shape = c.p->dbias.shape;
        cot_run_items_scratch(queue,
                              shape[0] * shape[1] * cot_ceil_div(shape[2], BLOCK) * cot_ceil_div(shape[3], SCORE_ROWS),
                              dbias_item, &c);
    }
    return COT_OK;
}
